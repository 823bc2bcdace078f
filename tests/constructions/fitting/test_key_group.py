"""The keys of one piece of a function."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.constructions.fitting.key_group import Grading, SmoothPiece, search_group
from constructions.kinked import hard_points, largest_error


@pytest.mark.parametrize(("count", "error"), [(8, 1.3e-3), (16, 8.1e-5), (24, 1.5e-5)])
def test_anchors_of_one_group_graded_to_a_kink_inside(count, error):
    """No switch: one convex φ for both sides."""
    piece = SmoothPiece(lambda x: np.maximum(x, 0.0)[:, None], -1.0, 1.0, np.array([10.0]), (0.0,))
    group = search_group(piece, count)
    at = hard_points(-1.0, 1.0, [0.0])
    assert largest_error(lambda x: np.abs(group.keys(x[:, None])[:, 0] - np.maximum(x, 0.0)), at) <= error


def test_the_closed_forms_of_a_grading():
    """Anchors are one apart in ∫ρ, and scores are tangents of ∫∫cρ²: against sums over a fine mesh."""
    grading = Grading(-1.0, 2.0, (-0.3, 0.5, 1.1), 1e-2, 3.0)
    slopes, offsets, anchors = grading.tangents(40, 0.7, 36.0, 0.25)
    mesh = np.unique(np.concatenate([anchors, np.linspace(anchors[0], anchors[-1], 400_001)]))
    density = 1 / (1e-2 + np.abs(mesh[:, None] - np.array(grading.points)).min(axis=1)) + 1.0

    def integral(y):
        return np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2 * np.diff(mesh))])

    apart = np.diff(np.interp(anchors, mesh, integral(density)))
    assert np.ptp(apart) < 1e-6
    slope = integral(0.7 * (density / apart[0]) ** 2)
    height = integral(slope)
    assert slopes - slopes[0] == pytest.approx(np.interp(anchors, mesh, slope), rel=1e-5, abs=1e-5)
    x = np.linspace(-1, 2, 9)[:, None]
    tangents = np.interp(anchors, mesh, height) + np.interp(anchors, mesh, slope) * (x - anchors)
    scores = slopes * x + offsets
    assert (scores - scores[:, :1]) - (tangents - tangents[:, :1]) == pytest.approx(0, abs=1e-2)
