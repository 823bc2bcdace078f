"""Heads with fitted scores: fewer keys than lattices, values within their limit, slopes as they were asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.fitting.axis import AxisSections
from attnc.constructions.fitting.quotient import even_scores, graded_scores, quotient

Function = Callable[[np.ndarray], np.ndarray]
SMOOTH: list[tuple[str, Function]] = [
    ("sin", lambda x: np.sin(3 * x)),
    ("bell", lambda x: np.exp(-4 * x * x)),
    ("pole", lambda x: 1 / (1 + 25 * x * x)),
    ("square", lambda x: x * x),
    ("exp", lambda x: np.exp(2 * x - 2)),
]
SINGULAR: list[tuple[str, Function]] = [
    ("log", lambda x: np.log(1.1 + x) / 2.3),
    ("root", lambda x: np.sqrt(1.02 - x) / 1.42),
    ("reciprocal", lambda x: 0.1 / (1.1 + x)),
]


def fewest_keys(f: Function, goal: float, is_even: bool) -> int:
    """The least number of keys from 2 to 40 whose error is at most the goal."""
    for p in range(2, 41):
        fit = quotient(f, -1.0, 1.0, p, goal, 10.0, "float64", is_even)
        if fit is not None and fit.error <= goal:
            return p
    return 41


@pytest.mark.parametrize(("name", "f"), SMOOTH)
@pytest.mark.parametrize("goal", [1e-3, 1e-6])
def test_fewer_keys_than_a_lattice(name: str, f: Function, goal: float) -> None:
    def sections(x: np.ndarray) -> np.ndarray:
        return f(x)[:, None]

    lattice = AxisSections(-1.0, 1.0, sections, sections).smallest(goal, 10.0)
    assert lattice is not None
    assert fewest_keys(f, goal, is_even=True) <= 0.8 * lattice.p


@pytest.mark.parametrize(("name", "f"), SINGULAR)
def test_graded_keys_beside_a_singularity(name: str, f: Function) -> None:
    assert graded_scores(f, 9, 0.0, 10.0)[0].error < even_scores(f, 9, 0.0, 10.0)[0].error
    assert fewest_keys(f, 1e-5, is_even=False) <= 0.7 * fewest_keys(f, 1e-5, is_even=True)


@settings(max_examples=40)
@given(
    st.integers(1, 14),
    st.floats(-100.0, 100.0),
    st.floats(1e-3, 1e3),
    st.sampled_from([1e-2, 1e-5, 1e-8]),
    st.sampled_from(["float64", "float32"]),
    st.booleans(),
)
def test_values_are_within_their_limit_and_the_error_is_the_one_found(
    p: int, lo: float, width: float, goal: float, dtype: str, is_even: bool
) -> None:
    hi = lo + width

    def f(x: np.ndarray) -> np.ndarray:
        return np.sin(4 * (x - lo) / width) + 0.2

    fit = quotient(f, lo, hi, p, goal, 5.0, dtype, is_even)
    if fit is None:
        return
    again = quotient(f, lo, hi, p, goal, 5.0, dtype, is_even)
    assert again is not None
    assert np.array_equal(again.keys.values, fit.keys.values)
    assert fit.num_anchors == p
    assert np.abs(fit.keys.values).max() <= 5.0 * (1 + 1e-12)
    x = np.linspace(lo, hi, 4001)
    assert np.abs(fit(x) - f(x)).max() <= 1.05 * fit.error + 1e-13
    for part in (fit.keys.slopes, fit.keys.offsets, np.array([fit.scale, fit.shift])):
        assert np.array_equal(part.astype(dtype).astype(np.float64), part)
    if is_even:
        assert np.array_equal(fit.keys.slopes[:, 0], 2 * np.arange(p) - (p - 1.0))
