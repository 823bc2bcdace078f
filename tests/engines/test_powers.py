"""Weights that are powers of one exponential: their errors are within those that certificates allow."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.engines.fused import SIMPLE_HEAD
from attnc.engines.numpy_engine import NumpyEngine
from attnc.engines.powers import EXPONENTIAL_ULPS, MOST_POWERS, Powers, as_powers
from attnc.ir.rounding import evaluation_error
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF
from engines.test_agreement import run_compiled, run_numpy, run_reference
from ir.random_programs import lookup_program

U = UNIT_ROUNDOFF["float64"]


def head(keys: int, spacing: float, softness: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slopes, offsets and values of a normalised Gaussian about 0."""
    places = np.arange(keys) - (keys - 1) / 2
    offsets = -softness * places**2
    return spacing * places, offsets, np.random.default_rng(seed).normal(size=(keys, 2))


def excess(powers: Powers, slopes: np.ndarray, offsets: np.ndarray, x: np.ndarray) -> float:
    """Return the least n such that log weights are off by n·u besides 2u|a_k x|, up to a shared term."""
    found, most = powers.weights(x), 0.0
    with ctx.workprec(160):
        for i, place in enumerate(x.tolist()):
            exact = [
                arb(w).log() - (arb(a) * arb(place) + arb(c))
                for w, a, c in zip(found[:, i].tolist(), slopes.tolist(), offsets.tolist(), strict=True)
            ]
            off = np.array([float(x - exact[0]) for x in exact])
            room = 2 * U * np.abs(slopes * place)
            most = max(most, float((off - room).max() - (off + room).min()) / 2 / U)
    return most


@settings(max_examples=60)
@given(
    st.integers(3, MOST_POWERS), st.floats(1e-3, 1e3), st.floats(0, 0.2), st.integers(0, 2**32 - 1), st.floats(0.01, 1)
)
def test_weights_are_within_the_ulps_of_certificates(
    keys: int, spacing: float, softness: float, seed: int, part: float
) -> None:
    slopes, offsets, values = head(keys, spacing, softness)
    powers = as_powers(slopes, offsets, values)
    assert powers is not None
    x = np.random.default_rng(seed).uniform(-1, 1, 20) * powers.reach * part
    assert excess(powers, slopes, offsets, x) <= 2 * ENGINE_ULPS["float64"]


def test_the_allowed_ulps_are_needed() -> None:
    """A bound that is far above all errors would be no test. Exponentials of numpy are better than those assumed."""
    slopes, offsets, values = head(MOST_POWERS, 1.0, 0.1)
    powers = as_powers(slopes, offsets, values)
    assert powers is not None
    x = np.random.default_rng(0).uniform(-1, 1, 1000) * powers.reach / 100
    assert 2 * ENGINE_ULPS["float64"] / 4 < excess(powers, slopes, offsets, x)
    assert 2 * ENGINE_ULPS["float64"] > 15.5 * (2 * EXPONENTIAL_ULPS + 7 / 8) + 10.2


def test_only_equal_steps_are_powers() -> None:
    slopes, offsets, values = head(9, 0.1, 0.3)  # multiples of 0.1 are rounded
    assert as_powers(slopes, offsets, values) is not None
    moved = slopes.copy()
    moved[-2] *= 1 + 4 * U
    assert as_powers(moved, offsets, values) is None
    assert as_powers(np.zeros(9), offsets, values) is None
    assert as_powers(slopes, 15 * offsets, values) is None  # their range is too large
    assert as_powers(slopes, offsets, 1e20 * values) is None
    assert as_powers(*head(MOST_POWERS + 1, 0.1, 0.01)) is None
    single = slopes.astype(np.float32), offsets.astype(np.float32), values.astype(np.float32)
    assert as_powers(*single) is not None
    whole = np.array([1, 2, 4], np.float32), single[1][:3], single[2][:3]
    assert as_powers(*whole) is None


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("keys", [3, 4, 5, 8, 9, 16, 17, 31, 32, 33])
def test_heads_of_any_number_of_keys(keys: int, dtype: str) -> None:
    """Far points are beyond the reach of powers, and some blocks have both."""
    places, values = (np.arange(keys) - (keys - 1) / 2) / 8, np.random.default_rng(keys).normal(size=keys)
    program = lookup_program(places, values, 8.0, np.dtype(dtype))
    given = NumpyEngine(program, with_grids=False)._fused._given  # type: ignore[union-attr]
    (head,) = (step for step in given.steps if step.kind == SIMPLE_HEAD)
    assert (head.powers is not None) == (keys <= MOST_POWERS)
    near = np.random.default_rng(1).uniform(-1.5, 1.5, (700, 1)).astype(dtype)
    for points in (near, np.concatenate([near, 1e4 * near]), near[:0], near[:1]):
        expected, room = run_reference(program, (points,)), 2 * evaluation_error(program, (points,))
        for run in (run_numpy, run_compiled):
            assert (np.abs(run(program, (points,)) - expected) <= room).all()
