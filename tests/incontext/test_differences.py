"""Difference heads sum r_i x_i within the bound, and the bound is not much larger than the worst error."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.errors import InputError
from attnc.incontext.differences import Differences, Sizes, choose


def exact_difference(differences: Differences, r: float) -> mpmath.mpf:
    """D(r) − r from the definition of the c_j, with 150 digits."""
    with mpmath.workdps(150):
        m, eps, r = differences.heads, mpmath.mpf(differences.eps), mpmath.mpf(r)
        total = mpmath.mpf(0)
        for j in range(1, m + 1):
            c = mpmath.mpf(1)
            for i in range(1, m + 1):
                if i != j:
                    c *= mpmath.mpf(i) ** 2 / (mpmath.mpf(i) ** 2 - mpmath.mpf(j) ** 2)
            total += c * mpmath.sinh(j * eps * r) / (j * eps)
        return total - r


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 8), st.integers(-6, 1), st.floats(0.01, 3.0))
def test_truncation_is_proved_and_tight(heads, power, r):
    differences = Differences(heads, 2.0**power)
    error, bound = abs(exact_difference(differences, r)), differences.truncation(r)
    assert error <= bound
    for smaller in (0.3 * r, 0.8 * r):
        assert abs(exact_difference(differences, smaller)) <= bound
    if heads * differences.eps * r <= 4:
        assert bound <= 3 * error


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1e-3, 1.0, 300.0]), st.integers(1, 2000), st.booleans())
def test_the_chosen_spacing_balances(heads, r, rows, mean):
    """No other power of two has a smaller bound."""
    sizes = Sizes(rows, 5, 2.0, r, 3 * r, mean)
    chosen = choose(sizes, heads, "float64")
    for factor in (0.25, 0.5, 2.0, 4.0):
        other = Differences(heads, chosen.eps * factor)
        assert chosen.bound(sizes, "float64").value <= other.bound(sizes, "float64").value


def test_called_it_is_the_sum_of_its_heads():
    differences = Differences(3, 0.125)
    r = np.linspace(-2, 2, 9)
    error = np.abs(differences(r) - r - np.array([float(exact_difference(differences, x)) for x in r]))
    assert error.max() <= 1e-13


@pytest.mark.parametrize(("heads", "eps"), [(0, 0.5), (13, 0.5), (2, 0.3), (2, 0.0), (2, -0.5), (2, math.nan)])
def test_refusals(heads, eps):
    with pytest.raises(InputError):
        Differences(heads, eps)
