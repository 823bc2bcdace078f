"""Scores of keys that are crowded at a singularity: slopes of 1e10 and more, whose differences decide."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from attnc.proofs.taylor.weights import score_gaps

U = Fraction(1, 2**53)


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e10, 1e14])
@pytest.mark.parametrize("d", [1, 2])
def test_gaps_are_within_what_is_said(scale, d):
    """Of exact scores that nearly cancel, and relative to a key that leads: none is far above 0, one is there."""
    rng = np.random.default_rng(int(np.log10(scale)) + d)
    points = 1 - rng.random((5, d)) / scale
    slopes = scale * rng.normal(size=(40, d))
    offsets = -slopes @ np.ones(d) + rng.normal(size=40)
    found, slack = score_gaps(slopes, offsets, points)
    assert found.max(axis=1).tolist() == [0.0] * 5
    slack = Fraction(slack)
    for point, gaps in zip(points.tolist(), found.tolist(), strict=True):
        exact = [
            sum(map(Fraction.__mul__, map(Fraction, a), map(Fraction, point)), Fraction(c))
            for a, c in zip(slopes.tolist(), offsets.tolist(), strict=True)
        ]
        first = int(np.argmax(gaps))
        for gap, score in zip(gaps, exact, strict=True):
            assert abs(score - exact[first] - Fraction(gap)) <= U * abs(Fraction(gap)) + 2 * slack
