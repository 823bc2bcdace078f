"""The loops of a grid, compiled."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from attnc.engines import grid
from attnc.engines.numpy_engine import NumpyEngine
from engines.anchors import Anchors, assert_agrees, head_of

pytestmark = pytest.mark.usefixtures("any_number_of_keys")


@pytest.fixture
def compiled(monkeypatch):
    """Compiled from the first point on."""
    pytest.importorskip("numba")
    monkeypatch.setattr(grid, "WORK_WORTH", 0)


@pytest.mark.parametrize("counts", [(300,), (60, 40), (60, 7), (1, 50), (12, 11, 14), (5, 6, 7, 4), (3, 2, 3, 2, 3)])
def test_compiled_loops_agree(counts, compiled, monkeypatch):
    rng = np.random.default_rng(len(counts))
    lattices = [np.arange(p) - (p - 1) / 2 for p in counts]
    for c, columns in [(0.3, 2), (1.5, 1), (40.0, 1), (1e4, 3)]:
        made = Anchors.gaussian(lattices, c, rng.normal(size=(math.prod(counts), columns)))
        reach = np.array(counts) / 2 + 3
        points = rng.uniform(-reach, reach, (700, len(counts)))
        points[:3] = [[np.nan], [1e12], [-1e12]]
        engine = NumpyEngine(made.program())
        found = engine(points)
        assert "_compiled" in vars(head_of(engine))
        with monkeypatch.context() as patch:
            patch.setattr(grid, "MOST_GROUPS", 0)
            expected = NumpyEngine(made.program())(points)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(made.values).max() * (1 + c))
        assert_agrees(made.program(), points[3:20], found[3:20], engine.truncation)


def test_code_that_cannot_be_kept_is_compiled_all_the_same():
    """A function of no file has no place on disk, like one in folders that are read-only."""
    pytest.importorskip("numba")
    from attnc.engines import grid_numba

    def tripled(x):
        return 3 * x

    homeless = types.FunctionType(tripled.__code__.replace(co_filename="/nowhere/at_all.py"), {})
    assert grid_numba._kept(homeless)(2) == 6


def test_loops_are_compiled_once_they_are_worth_it(monkeypatch):
    monkeypatch.setattr(grid, "COMPILING", grid._Compiling())
    monkeypatch.setattr(grid, "WORK_WORTH", 1000)
    engine = NumpyEngine(Anchors.gaussian([np.arange(100.0)], 0.3, np.ones(100)).program())
    head = head_of(engine)
    batches = -(-1000 // head.work_per_point)
    head._compiled = lambda t: np.full((1, t.shape[1]), 7.0)
    grid.COMPILING.is_possible = True
    found = [float(engine(np.zeros((1, 1)))[0, 0]) for _ in range(batches + 2)]
    np.testing.assert_allclose(found, [1.0] * batches + [7.0] * 2, rtol=1e-14)
    grid.COMPILING.is_possible = False
    np.testing.assert_allclose(engine(np.zeros((1, 1))), 1.0, rtol=1e-14)
