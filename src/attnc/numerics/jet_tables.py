"""The monomials in d variables up to a degree, numbered, and the pairs of monomials that make up each product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise

import numpy as np
import numpy.typing as npt

from attnc.numerics.arrays import Int

Rows = slice | npt.NDArray[np.int64]
Places = tuple[int, ...]
"""Which of d variables a polynomial depends on, ascending."""


def num_monomials(d: int, order: int) -> int:
    """Return the number of monomials in d variables of degree ≤ order."""
    return math.comb(d + order, d)


@lru_cache(maxsize=64)
def monomials(d: int, order: int) -> Int[np.ndarray, "count d"]:
    """Return the exponents j with |j| ≤ order, by degree, then lexicographically descending, the constant first."""
    choices = (chosen for degree in range(order + 1) for chosen in combinations_with_replacement(range(d), degree))
    exponents = [tuple(map(chosen.count, range(d))) for chosen in choices]
    table = np.array(exponents, dtype=np.int64).reshape(len(exponents), d)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=64)
def _numbers(d: int, order: int) -> dict[tuple[int, ...], int]:
    return {tuple(j): number for number, j in enumerate(monomials(d, order).tolist())}


@lru_cache(maxsize=64)
def degree_blocks(d: int, degree: int) -> tuple[slice, ...]:
    """Return the slices of the monomials of degree 0, 1, …, which are adjacent."""
    ends = [0, *(num_monomials(d, k) for k in range(degree + 1))]
    return tuple(slice(start, end) for start, end in pairwise(ends))


@lru_cache(maxsize=64)
def degrees(d: int, degree: int) -> npt.NDArray[np.float64]:
    """Return the degree of every monomial, as a column."""
    column = monomials(d, degree).sum(axis=1, keepdims=True).astype(np.float64)
    column.flags.writeable = False
    return column


def _padded(places: Places, degree: int, d: int) -> list[tuple[int, ...]]:
    """Return the monomials in the variables `places` as monomials in all d variables."""
    exponents = np.zeros((num_monomials(len(places), degree), d), dtype=np.int64)
    exponents[:, places] = monomials(len(places), degree)
    return [tuple(j) for j in exponents.tolist()]


def _rows(numbers: Sequence[int]) -> Rows:
    """Return the row numbers, as a slice if they are evenly spaced, so that no rows are copied."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step == 0 or any(b - a != step for a, b in pairwise(numbers)):
        return np.array(numbers, dtype=np.int64)
    stop = numbers[-1] + (1 if step > 0 else -1)
    return slice(numbers[0], stop if stop >= 0 else None, step)


@lru_cache(maxsize=512)
def embedding(places: Places, degree: int, d: int) -> Rows:
    """Return the rows of the monomials in the variables `places` among the monomials in d variables."""
    numbers = _numbers(d, degree)
    return _rows([numbers[j] for j in _padded(places, degree, d)])


@dataclass(frozen=True)
class FactorPairs:
    """The products that make up the coefficients of one degree of a product.

    The coefficients are those in `block`. `single` lists the coefficients made of one product: (their places in the
    block, the left and the right factors). `sums` lists the others that are not zero. The longest sum has `longest`
    products.
    """

    block: slice
    single: tuple[Rows, Rows, Rows] | None
    sums: tuple[tuple[int, Rows, Rows], ...]
    longest: int


@lru_cache(maxsize=512)
def pairs(
    left: Places, left_degree: int, right: Places, right_degree: int, d: int, limit: int, *, constant: bool = True
) -> tuple[FactorPairs, ...]:
    """Return the factor pairs, by degree, of the product of polynomials in d variables, cut off at degree `limit`.

    The factors depend on the variables `left` and `right`. Without `constant`, the constant of the right factor is
    left out.
    """
    numbers = _numbers(d, limit)
    terms: list[tuple[list[int], list[int]]] = [([], []) for _ in numbers]
    right_factors = _padded(right, right_degree, d)
    right_degrees = [sum(j) for j in right_factors]
    for number, i in enumerate(_padded(left, left_degree, d)):
        room = limit - sum(i)
        for other in range(0 if constant else 1, len(right_factors)):
            if right_degrees[other] > room:
                break
            target = numbers[tuple(a + b for a, b in zip(i, right_factors[other], strict=True))]
            terms[target][0].append(number)
            terms[target][1].append(other)
    return tuple(_pairs_of(block, terms[block]) for block in degree_blocks(d, limit))


def _pairs_of(block: slice, terms: Sequence[tuple[list[int], list[int]]]) -> FactorPairs:
    alone = [place for place, (i, _) in enumerate(terms) if len(i) == 1]
    left, right = ([terms[place][side][0] for place in alone] for side in (0, 1))
    single = (_rows(alone), _rows(left), _rows(right)) if alone else None
    sums = tuple((place, _rows(i), _rows(j)) for place, (i, j) in enumerate(terms) if len(i) > 1)
    return FactorPairs(block, single, sums, max(len(i) for i, _ in terms))
