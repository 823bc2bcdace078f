"""One axis of a grid: windows leave out what is stated, and not much less."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.engines import grid, grid_axis
from attnc.engines.numpy_engine import NumpyEngine
from engines.anchors import Anchors, assert_agrees

pytestmark = pytest.mark.usefixtures("any_number_of_keys")


def weights_on(axis: grid_axis.WindowedAxis, t: np.ndarray) -> np.ndarray:
    """(points, anchors): the weights that `grid.Tiles` makes, normalised, outside of its window 0."""
    group, argument = grid._locate(axis, t.copy())
    made = grid._weights(axis, group, argument[:, None])[:, :, 0]
    made /= made.sum(axis=1, keepdims=True)
    spread = np.zeros((len(t), axis.padded), np.longdouble)
    np.put_along_axis(spread, axis.starts[group][:, None] + np.arange(axis.width), made, axis=1)
    return spread


def exact_weights(axis: grid_axis.WindowedAxis, t: np.ndarray) -> np.ndarray:
    scores = axis.slopes.astype(np.longdouble) * t[:, None] + axis.offsets
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("tail", [1e-1, 1e-3, 1e-6, 1e-13])
@pytest.mark.parametrize("c", [0.05, 0.3, 1.0, 3.0, 30.0])
def test_windows_leave_out_what_is_stated_and_not_much_less(c, tail, monkeypatch):
    """At the edges of a group the next anchor outside is nearest: there the tail is what the theorem says, nearly."""
    monkeypatch.setattr(grid_axis, "TAIL", tail)
    L = np.arange(200) - 99.5
    axis = grid_axis.make_axis(2 * c * L, -c * L**2, 1)
    assert axis.width < 200
    step = 1 / axis.inverse
    edges = axis.origin + np.arange(axis.first, axis.last + 1) * step
    t = np.concatenate([edges - 1e-9, edges + 1e-9, np.linspace(-130, 130, 999)])
    off = np.abs(weights_on(axis, t) - exact_weights(axis, t)).sum(axis=1)
    rounding = 1e-13 if c < 1 else 2e-12  # of the scores themselves, in either
    assert off.max() <= axis.error + rounding
    assert axis.error <= tail + 1e-12
    if tail > 1e-7 and c < 1:
        assert axis.error <= 20 * off.max()


@pytest.mark.parametrize("seed", range(1, 5))
def test_uneven_slopes_under_even_edges_have_windows_too(seed):
    rng = np.random.default_rng(seed)
    gaps = 10 ** rng.uniform(0, seed, 99)
    slopes = np.concatenate([[0.0], np.cumsum(gaps)]) - gaps.sum() / 2
    edges = np.arange(99) - 49.0
    offsets = np.concatenate([[0.0], -np.cumsum(gaps * edges)])
    axis = grid_axis.make_axis(slopes, offsets, 1)
    assert axis.width < 40
    assert axis.table is None
    t = rng.uniform(-60, 60, 2000)
    rounding = 1e-14 * (np.abs(slopes).max() * 60 + np.abs(offsets).max())
    assert np.abs(weights_on(axis, t) - exact_weights(axis, t)).sum(axis=1).max() <= axis.error + rounding


@pytest.mark.parametrize("spacing", [5e-324, 1e-300, 1e-9, 1e9, 1e300])
def test_extreme_spacings(spacing):
    """Too flat for a window, or so steep that neighbours are out of reach."""
    slopes = spacing * np.arange(90.0)
    made = Anchors(slopes[:, None], -slopes * np.arange(90.0), np.arange(90.0), np.ones(1), np.zeros(1))
    made.values = made.values[:, None]
    engine = NumpyEngine(made.program())
    points = np.linspace(0, 1, 7)[:, None]
    assert_agrees(made.program(), points, engine(points), engine.truncation)
