"""The leaves of a proof as the certificate states them. Integer arithmetic checks that they cover the box."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from attnc_checker.files import BadFile, Refused, require, typed

MAX_LEVEL = 128
"""Largest number of halvings of the box along each axis. A finer cell is narrower than the last place of its ends."""
MAX_ORDERS = (24, 20, 12, 8)
"""Highest Taylor orders in one, two, three and more variables. attnc uses at most 16, 16, 12 and 4. A product of two
polynomials of the highest order takes less than 10 ms."""
MAX_PRODUCTS = 2**24
"""Largest number of products of monomials when two polynomials are multiplied: about 4 s, at 0.25 µs each. In up to
four variables MAX_ORDERS allow 27,132."""

Ends = tuple[float, float]
"""The lower and the upper end of an interval."""

TAYLOR, SELECTION, ENCLOSURE, TAIL, EXCLUDED = "taylor", "selection", "enclosure", "tail", "excluded"
Cell = tuple[int, tuple[int, ...]]
"""A level, and for each variable an index below 2^level."""


class Leaf(NamedTuple):
    kind: str
    order: int  # for a tail, its side: −1 or 1
    cell: Cell | None


ANY_KIND = (TAYLOR, SELECTION, ENCLOSURE)
"""The kinds of leaves on cells in a proof about values."""


def read_leaves(
    entries: object, d: int, sides: Iterable[int] = (), kinds: Collection[str] = ANY_KIND
) -> tuple[Leaf, ...]:
    """Return the leaves of a box in d variables, or of one variable that is unbounded on these sides."""
    leaves = tuple(_leaf(entry, d, kinds) for entry in typed(entries, list, "leaves"))
    tails = sorted(leaf.order for leaf in leaves if leaf.cell is None)
    if tails != sorted(sides):
        raise Refused(f"the leaves do not cover the box: tails on the sides {tails}, infinite ends on {sorted(sides)}")
    _require_cover([leaf.cell for leaf in leaves if leaf.cell is not None], d)
    return leaves


def _leaf(entry: object, d: int, kinds: Collection[str]) -> Leaf:
    """Read ["taylor", order, level, i_1 … i_d], ["tail", side], or another kind as ["selection", level, i_1 … i_d]."""
    if not isinstance(entry, list) or not entry or not all(type(x) is int for x in entry[1:]):
        raise BadFile(f"the leaf {entry!r:.60} is no list of a kind and whole numbers")
    (kind, *numbers), leaf = entry, f"the leaf {entry!r:.60}"
    if kind == TAIL:
        require(numbers in ([-1], [1]), f"{leaf} has no side, which is -1 or 1")
        return Leaf(kind, numbers[0], None)
    require(kind in kinds, f"{leaf} is of an unknown kind")
    num_numbers = 1 + d + (kind == TAYLOR)
    require(len(numbers) == num_numbers, f"{leaf} does not have the numbers of a cell in {d} variable(s)")
    order = numbers.pop(0) if kind == TAYLOR else 1
    level, *index = numbers
    return checked_leaf(kind, order, level, index, d)


def checked_leaf(kind: str, order: int, level: int, index: Sequence[int], d: int) -> Leaf:
    """Return a leaf on a cell. Refuse one whose order, level or index is out of range."""
    highest = MAX_ORDERS[min(d, len(MAX_ORDERS)) - 1]
    in_range = 0 <= level <= MAX_LEVEL and all(0 <= i < 2**level for i in index)
    if not (1 <= order <= highest and in_range and math.comb(2 * d + order + 1, order + 1) <= MAX_PRODUCTS):
        leaf = f"the leaf {[kind, order, level, *index]!r:.60}"
        require(1 <= order <= highest, f"{leaf} has an order that is not between 1 and {highest}")
        require(in_range, f"{leaf} is out of range")
        raise Refused(f"{leaf} has too high an order for {d} variables")
    return Leaf(kind, order, (level, tuple(index)))


def _require_cover(cells: list[Cell], d: int) -> None:
    """Refuse unless the cells divide the box: from the finest level on, the 2^d parts of a cell are joined to it."""
    at = defaultdict[int, set[tuple[int, ...]]](set)
    for level, index in cells:
        at[level].add(index)
    require(sum(map(len, at.values())) == len(cells), "the leaves do not divide the box: a cell is stated twice")
    finest = max(at, default=0)
    volume, whole = sum(len(at[level]) << d * (finest - level) for level in at), 1 << d * finest
    require(volume >= whole, f"the leaves do not cover the box: they fill {volume} of its {whole} parts")
    _join(at, d, finest, 0, "the leaves do not divide the box")


def require_divided(cells: list[Cell], d: int, top: int, problem: str) -> set[tuple[int, ...]]:
    """Return the cells of the level `top` that these cells divide. Refuse if they leave a part out, or overlap."""
    at = defaultdict[int, set[tuple[int, ...]]](set)
    for level, index in cells:
        at[level].add(index)
    require(sum(map(len, at.values())) == len(cells), f"{problem}: a cell is stated twice")
    _join(at, d, max(at), top, problem)
    return at[top]


def _join(at: dict[int, set[tuple[int, ...]]], d: int, finest: int, top: int, problem: str) -> None:
    for level in range(finest, top, -1):
        joined = {tuple(i >> 1 for i in index) for index in at[level]}
        is_divided = len(at[level]) == len(joined) << d and at[level - 1].isdisjoint(joined)
        require(is_divided, f"{problem}: a cell lies within another, or parts of a cell are missing")
        at[level - 1] |= joined
