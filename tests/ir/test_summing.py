"""Sums in blocks: their definition, and how many additions a term passes through."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.ir.summing import MOST_KEYS, depth, key_mix, key_sum

U = Fraction(1, 2**24)


def total(terms: np.ndarray) -> Fraction:
    return sum((Fraction(float(term)) for term in terms), Fraction(0))


@given(st.integers(1, 700), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_errors_are_those_of_so_many_additions(n, columns, seed):
    """γ of the depth, of all orders of magnitude; of a product one more."""
    rng = np.random.default_rng(seed)
    terms = (rng.choice([-1, 1], n) * np.exp(rng.uniform(-30, 5, n))).astype(np.float32)
    values = rng.standard_normal((n, columns)).astype(np.float32)
    m = depth(n, "float32") * U
    assert abs(Fraction(float(key_sum(terms))) - total(terms)) <= m / (1 - m) * total(np.abs(terms))
    m += U
    found = key_mix(terms[None], values)
    assert found.shape == (1, columns)
    for column in range(columns):
        exact = [Fraction(float(t)) * Fraction(float(v)) for t, v in zip(terms, values[:, column], strict=True)]
        assert abs(Fraction(float(found[0, column])) - sum(exact)) <= m / (1 - m) * sum(map(abs, exact))


def test_small_terms_are_not_lost_beside_a_large_one():
    """Each of them is below half a unit of the large one: added to it one by one, none would count."""
    terms = np.full(MOST_KEYS, 2.0**-25, np.float32)
    terms[0] = 1
    in_order = np.float32(0)
    for term in terms:
        in_order += term
    assert in_order == 1
    exact = 1 + 4095 * 2.0**-25
    assert abs(float(key_sum(terms)) - exact) <= 2.0**-22
    assert abs(float(key_mix(terms[None], np.ones((MOST_KEYS, 2), np.float32))[0, 1]) - exact) <= 2.0**-22


def test_depth():
    assert [depth(n, "float32") for n in (0, 1, 2, 8, 9, 64, 289, 4096)] == [0, 0, 1, 7, 8, 14, 18, 28]
    assert depth(MOST_KEYS + 1, "float32") == depth(MOST_KEYS + 1, "float64") == MOST_KEYS
    assert depth(289, "float64") == 288  # the order is left to the BLAS


@pytest.mark.parametrize("shape", [(5, 1, 20), (0, 2, 33), (3, 4, 8), (2, 3, 100)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_any_shape(shape, dtype):
    rng = np.random.default_rng(0)
    weights = rng.random(shape).astype(dtype)
    for lead in ((), shape[:1]):
        for columns in (1, 3):
            values = rng.standard_normal((*lead, shape[-1], columns)).astype(dtype)
            found = key_mix(weights, values)
            assert found.dtype == dtype
            np.testing.assert_allclose(found, weights @ values, rtol=0, atol=1e-5)
    np.testing.assert_allclose(key_sum(weights), weights.sum(axis=-1), rtol=1e-6)
