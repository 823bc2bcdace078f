"""Polynomials in σ(δx): exactly those, on all of R; figures, limits, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.beyond.binomial import binomial, binomial_keys, binomial_scores
from attnc.errors import BoundNotMet
from constructions.kinked import fitted, largest_error, program_error, unary

HALF_LINE = np.unique(np.concatenate([np.linspace(0, 60, 6001), np.geomspace(1e-9, 690, 2000)]))


def error_on(x, keys, f) -> float:
    return largest_error(lambda at: np.abs(keys(at[:, None])[:, 0] - f(at)), x)


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    delta=st.floats(0.1, 5),
    centre=st.floats(-2, 2),
)
def test_a_head_is_the_polynomial_with_these_bernstein_coefficients(values, delta, centre):
    n = len(values) - 1
    keys = replace(binomial_scores(n + 1, delta, centre), values=np.array(values)[:, None])
    x = np.linspace(-6, 6, 101)
    t = 1 / (1 + np.exp(-delta * (x - centre)))
    bernstein = sum(v * math.comb(n, k) * t**k * (1 - t) ** (n - k) for k, v in enumerate(values))
    assert keys(x[:, None])[:, 0] == pytest.approx(bernstein, abs=1e-11)
    ends = keys(np.array([[-1e4], [1e4]]))[:, 0]
    assert ends == pytest.approx([values[0], values[-1]], abs=1e-12)


@pytest.mark.parametrize(
    ("f", "count", "max_value", "error"),
    [
        (lambda y: np.exp(-y), 10, 14.0, 6.7e-8),
        (lambda y: np.exp(-y), 12, 17.0, 2.0e-9),
        (lambda y: np.log1p(np.exp(-y)), 10, 10.0, 4.7e-9),
    ],
)
def test_figures_on_the_half_line(f, count, max_value, error):
    keys = binomial_keys(f, 0.0, np.inf, count, 1.0, centre=0.0, max_value=max_value)
    assert error_on(HALF_LINE, keys, f) <= error
    assert np.abs(keys.values).max() <= max_value * f(0.0)
    assert np.array_equal(keys.slopes[:, 0], np.arange(count))


@pytest.mark.parametrize(
    ("f", "lo", "hi", "count", "delta", "error", "largest"),
    [
        (lambda y: np.exp(-y), 0.0, np.inf, 10, 1.0, 6.7e-8, 10.0),
        (lambda y: np.exp(-y), 0.0, np.inf, 12, 1.0, 4e-9, 10.0),
        (lambda y: np.log1p(np.exp(-y)), 0.0, np.inf, 8, 1.0, 1e-9, 10 * np.log(2)),
        (lambda y: y, -1.0, 1.0, 8, 0.5, 6.35e-9, 6.8),
    ],
)
def test_a_centre_that_is_chosen_does_as_well_with_smaller_values(f, lo, hi, count, delta, error, largest):
    keys = binomial_keys(f, lo, hi, count, delta)
    assert error_on(HALF_LINE if hi > 1 else np.linspace(lo, hi, 4001), keys, f) <= error
    assert np.abs(keys.values).max() <= largest * (1 + 1e-9)


def test_prescribed_limits_hold_on_the_whole_line():
    decay = binomial_keys(lambda y: np.exp(-y), 0.0, np.inf, 10, limits=(None, 0.0))
    assert decay.values[-1] == 0
    assert error_on(HALF_LINE, decay, lambda y: np.exp(-y)) <= 2e-7
    mirrored = binomial_keys(np.exp, -np.inf, 0.0, 10, limits=(0.0, None))
    assert error_on(-HALF_LINE[::-1], mirrored, np.exp) <= 2e-7
    step = binomial_keys(np.tanh, -np.inf, np.inf, 6, limits=(-1.0, 1.0))
    assert error_on(np.linspace(-50, 50, 2001), step, np.tanh) < 1e-12
    both = binomial_keys(
        lambda y: np.stack([np.exp(-y), np.exp(-2 * y)], axis=1), 0.0, np.inf, 12, 1.0, max_value=100.0
    )
    assert np.abs(both(HALF_LINE[:, None]) - np.exp(-np.outer(HALF_LINE, [1, 2]))).max() < 1e-5
    assert both.values.shape == (12, 2)


@pytest.mark.parametrize(
    ("text", "ends", "eps", "enough"),
    [
        ("sin(x)", (-3, 3), 1e-6, 15),
        ("exp(x)", (0, 1), 1e-9, 13),
        ("tanh(x)", (-4, 4), 1e-9, 2),
        ("(x, exp(sin(x)))", (-2, 2), 1e-4, 14),
        ("x", (1000, 1002), 1e-3, 8),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_error_is_reached_with_few_keys(text, ends, eps, enough, dtype):
    eps = eps if dtype == "float64" else max(eps, 1e-4 if ends[0] < 100 else 1e-2)
    fitted(binomial, unary(text, *ends), eps, dtype=dtype, enough=enough, slack=1e-6)


def test_the_rate_is_geometric():
    target, counts = unary("sin(x)", -3, 3), [6, 10, 14, 18]
    errors = [dict(binomial(target, num_anchors=n).parameters)["worst_error"] for n in counts]
    line = np.polyfit(counts, np.log(errors), 1)
    assert line[0] < -1
    assert np.abs(np.polyval(line, counts) - np.log(errors)).max() < 1.5


def test_limits_and_given_parameters_of_a_program():
    built = binomial(unary("tanh(2*x)"), num_anchors=8, delta=1.0, centre=0.0, limits=(-1.0, 1.0))
    assert dict(built.parameters)["delta"] == pytest.approx(1.0)
    assert built.program(np.array([[-300.0], [300.0]])) == pytest.approx([-1, 1], abs=1e-12)


def test_refusals():
    with pytest.raises(BoundNotMet, match="graded") as refusal:
        binomial(unary("abs(x)"), eps=1e-6)
    assert 1e-4 < program_error(refusal.value.network, unary("abs(x)"), [0]) < 0.05
    with pytest.raises(BoundNotMet, match="rounding"):
        binomial(unary("sin(x)"), eps=1e-17)


@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_float32_does_not_stop_far_above_its_rounding(eps):
    """Two sizes of an even function may have the same error: that is no sign of rounding."""
    fitted(binomial, unary("1/(1 + x*x)", -2, 2), eps, dtype="float32", slack=1e-6)
