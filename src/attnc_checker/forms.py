"""Affine forms in exact arithmetic, with the sizes and counts that bound their rounding.

`sizes` is the same form with absolute values. Any evaluation is within γ_n·sizes(|x|) of the form, since layer by layer
every term of the sum is rounded at most n times. If more than one map rounds (`maps`), engines may fold the constants
first. Then the sum over x comes last, and its terms are counted too. If a product may underflow, the smallest normal
number is added to `sizes`: underflow costs at most u times that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.vectors import INFINITE, Row, Vector, total

SMALLEST = {"float64": arb(2) ** -1022, "float32": arb(2) ** -126}
UNLIMITED = 10**9
"""More additions than any term of a sum passes through."""
Key = int | tuple[int, ...]
"""The variable of a term: ONE for the constant, i ≥ 0 for the input x_i, (layer, query, head, component) for an average
that a head makes, and (layer, token, channel) for an entry that attention wrote in a deep program."""
ONE = -1

Terms = dict[Key, Any]
"""Coefficients: rationals or balls, or vectors of them if one form represents the forms of all keys of a head."""


class Form(NamedTuple):
    terms: Terms  # fmpq
    sizes: Terms  # arb
    n: int = 0
    maps: int = 0

    @property
    def is_constant(self) -> bool:
        return self.sizes.keys() <= {ONE}

    @property
    def is_power_of_two(self) -> bool:
        """Whether this is an exact ±2^k, k ≥ 0. Products with it are exact. (Products with 2^−k may underflow.)"""
        q = self.terms.get(ONE, fmpq(0))
        return self.n == 0 and self.is_constant and q.q == 1 and int(abs(q.p)).bit_count() == 1

    def folded(self) -> Form:
        return self._replace(n=self.n + len(self.sizes)) if self.maps > 1 else self


def unit(key: Key) -> Form:
    return Form({key: fmpq(1)}, {key: arb(1)})


def constant(x: fmpq) -> Form:
    return Form({ONE: x}, {ONE: abs(arb(x))}) if x != 0 else ZERO


ZERO = Form({}, {})


def dense(terms: Terms, inputs: Iterable[Key]) -> Row:
    """Return the constant and the coefficients of the inputs. Those that are missing are 0."""
    zero = terms.get(ONE, fmpq(0)) * 0
    return tuple(terms.get(key, zero) for key in (ONE, *inputs))


def span(sizes: Terms, reach: Terms) -> Any:
    """Return Σ |coefficient|·reach: the largest absolute value of a form, or a vector of them."""
    return total(abs(x) * reach[key] for key, x in sizes.items())


def combined(parts: Iterable[tuple[fmpq | int, arb | Vector, Form]]) -> tuple[Terms, Terms]:
    """Return Σ x·form and Σ |x|·sizes. A part is (x, |x|, form)."""
    terms: Terms = {}
    sizes: Terms = {}
    for x, absolute, form in parts:
        for key, y in form.terms.items():
            terms[key] = terms.get(key, 0) + x * y
        for key, y in form.sizes.items():
            sizes[key] = sizes.get(key, arb(0)) + absolute * y
    return {key: x for key, x in terms.items() if x != 0}, sizes


def stacked(forms: list[Form]) -> Form:
    """Return the forms of all keys as one form, whose coefficients are vectors."""

    def columns(table: list[Terms], zero: fmpq | arb) -> Terms:
        keys = dict.fromkeys((ONE, *itertools.chain(*table)))
        return {key: Vector(terms.get(key, zero) for terms in table) for key in keys}

    terms, sizes = columns([form.terms for form in forms], fmpq(0)), columns([form.sizes for form in forms], arb(0))
    return Form(terms, sizes, max(form.n for form in forms))


def times(factor: arb | int, sizes: Terms) -> Terms:
    return {key: factor * x for key, x in sizes.items()}


def rounds(a: Form, b: Form) -> bool:
    """Whether the product of the two rounds."""
    return not (a.is_power_of_two or b.is_power_of_two)


@dataclass(frozen=True, eq=False)
class Head:
    """The scores of all keys and, for every output that reads the head, their values.

    With v = u/(1 − n·u), computed scores are off by v·own(|x|) + slack and by the errors of the query: its component j
    is off by an e_j with |e_j| ≤ v·query_j(|x|), the same for all keys, and adds e_j·parts_j.
    """

    scores: Form
    values: dict[int, Form]
    own: Terms
    slack: Vector
    n: int
    depth: int = UNLIMITED  # the largest number of additions of a term in its sums over keys
    addends: int = 0  # the number of terms of a score, if the rounding of their sum is not yet in `own`; otherwise 0
    query: tuple[Terms, ...] = ()
    parts: tuple[Vector, ...] = ()
    farthest: arb = INFINITE  # in all sizes, |x| counts as at most this
    silent: int = 0  # the number of further keys, whose values are 0 and whose weights may be lost

    @classmethod
    def of(cls, scores: list[Form], values: dict[int, Form]) -> Head:
        """Make a head in which all errors of scores are roundings of their terms."""
        whole = stacked(scores)
        return cls(whole, values, times(whole.n, whole.sizes), Vector([arb(0)] * len(scores)), whole.n)

    @property
    def num_keys(self) -> int:
        return len(self.slack)
