"""Compare two expressions by exact canonical forms. The answer "equal" is proved, "different" is not.

A form is a rational combination of monomials of atoms. Atoms are variables, π and e, calls of functions, powers whose
exponents are not integers, and sums that are divisors or are not multiplied out. Two atoms are equal if their arguments
are equal forms. The laws used are those of a commutative ring and

    a/b = a·b⁻¹, a^m·a^n = a^(m+n) for integers,      a^b = exp(b·log a) unless b is a constant,
    max(a, b) = a + relu(b − a),                      min(a, b) = a − relu(a − b),
    |a| = 2·relu(a) − a,
    clip(u, a, b) = min(max(u, a), b),                and for constants a < b: a + relu(u − a) − relu(u − b),
    sin w = (E − E⁻¹)/2i, cos w = (E + E⁻¹)/2,        E = exp(iw), whose powers are those of multiples of w,
    f(0) = 0 for sin, tanh, relu and the like.

All hold where both sides are defined. The caller checks the domains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from functools import cache, reduce

from attnc.errors import DomainError
from attnc.targets.expressions.coefficient import Coefficient
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    folded,
    is_constant,
)

Monomial = tuple[tuple[int, Fraction], ...]
"""Pairs (atom, exponent), sorted by atom. Exponents are not 0; only those of waves may be fractions."""
Term = tuple[Monomial, Fraction]
"""A monomial and its coefficient."""
Form = tuple[Term, ...]
"""Terms, sorted by monomial. Coefficients are not 0."""

MAX_TERMS_OF_PRODUCT = 2**12
"""Maximum number of terms of a product that is multiplied out, to bound the time: this many take 0.3 s."""
MAX_EXPANDED_EXPONENT = 4096
"""Powers with a larger exponent are atoms. Multiplied out, their coefficients would take kilobytes each."""
IMAGINARY_UNIT = 0
"""The number of the atom i."""


def equivalent(left: Sequence[Node], right: Sequence[Node]) -> bool:
    """Return whether the expressions are equal, one by one. True is proved. False means that no proof was found.

    Forms in which less is multiplied out are shorter, so they are compared first. If they differ, forms by more laws
    are compared.
    """
    if len(left) != len(right):
        return False
    for forms in (_CanonicalForms(expands=False), _CanonicalForms(), _CanonicalForms(trigonometry=True)):
        found = folded([*left, *right], forms.operation)
        if found[: len(left)] == found[len(left) :]:
            return True
    return False


class _CanonicalForms:
    """Makes forms that can be compared, because they share the numbers of their atoms."""

    def __init__(self, *, expands: bool = True, trigonometry: bool = False) -> None:
        self._expands, self._trigonometry = expands, trigonometry
        self._atoms: dict[Hashable, int] = {"i": IMAGINARY_UNIT}
        self._constants = {IMAGINARY_UNIT}

    def operation(self, node: Node, a: list[Form]) -> Form:
        """Return the form of an operation on operands with these forms."""
        match node:
            case Number(value):
                return _number(value)
            case Constant(name) | Variable(name):
                form = self._atom((type(node).__name__, name))
                self._constants |= {form[0][0][0][0]} if isinstance(node, Constant) else set()
                return form
            case Sum(_):
                return _sum(*a)
            case Negate(_):
                return _scaled(a[0], -1)
            case Product(_):
                return reduce(self._times, a)
            case Quotient(_, _):
                return self._times(a[0], self._power(a[1], -1))
            case Power(_, exponent):
                return self._raised(*a, exponent_is_constant=is_constant(exponent))
            case Call("max", _):
                return reduce(self._greatest, a)
            case Call("min", _):
                return reduce(self._least, a)
            case Call("abs", _):
                return _sum(_scaled(self._relu(a[0]), 2), _scaled(a[0], -1))
            case Call("clip", (_, low, high)) if is_constant(low) and is_constant(high) and _is_below(low, high):
                above_low, above_high = (self._relu(_sum(a[0], _scaled(end, -1))) for end in a[1:])
                return _sum(a[1], above_low, _scaled(above_high, -1))
            case Call("clip", _):
                return self._least(self._greatest(a[0], a[1]), a[2])
            case Call("sin" | "cos", _) if self._trigonometry and a[0]:
                return self._wave(node.name, a[0])
            case Call(name, _) if not any(a) and _vanishes_at_zero(name, len(a)):
                return ()
            case Call(name, _):
                return self._atom(("call", name, tuple(a)))
        raise AssertionError(node)

    def _greatest(self, a: Form, b: Form) -> Form:
        return _sum(a, self._relu(_sum(b, _scaled(a, -1))))

    def _least(self, a: Form, b: Form) -> Form:
        return _sum(a, _scaled(self._relu(_sum(a, _scaled(b, -1))), -1))

    def _relu(self, a: Form) -> Form:
        return self._atom(("call", "relu", (a,))) if a else ()

    def _wave(self, name: str, angle: Form) -> Form:
        scale = angle[0][1]
        forth, back = (self._atom(("wave", _scaled(angle, 1 / scale)), sign * scale) for sign in (1, -1))
        if name == "cos":
            return _sum(_scaled(forth, Fraction(1, 2)), _scaled(back, Fraction(1, 2)))
        over_2i = (((IMAGINARY_UNIT, Fraction(1)),), Fraction(-1, 2))  # 1/2i = −i/2
        return self._times((over_2i,), _sum(forth, _scaled(back, -1)))

    def _atom(self, key: Hashable, exponent: Fraction | int = 1) -> Form:
        number = self._atoms.setdefault(key, len(self._atoms))
        return ((((number, Fraction(exponent)),), Fraction(1)),)

    def _times(self, a: Form, b: Form) -> Form:
        if len(a) * len(b) > MAX_TERMS_OF_PRODUCT or not (self._expands or self._is_short(a, b)):
            a, b = self._whole(a, 1), self._whole(b, 1)
        return _collected(_product(left, right) for left in a for right in b)

    def _is_short(self, a: Form, b: Form) -> bool:
        """Return whether the factors are two monomials, or a constant monomial and a sum."""
        few, many = sorted((a, b), key=len)
        constant = len(few) == 1 and all(atom in self._constants for atom, _ in few[0][0])
        return len(many) <= 1 or not few or constant

    def _whole(self, a: Form, exponent: int) -> Form:
        """Return a sum to a power as its scale times one atom."""
        if len(a) == 1:
            return self._power(a, exponent)
        if not a:
            return self._atom(("sum", a), exponent)
        scale = a[0][1]
        return _scaled(self._atom(("sum", _scaled(a, 1 / scale)), exponent), scale**exponent)

    def _power(self, a: Form, n: int) -> Form:
        if abs(n) > MAX_EXPANDED_EXPONENT:
            return self._atom(("power", a, _number(Fraction(n))))
        if n in (0, 1):
            return a if n else _number(Fraction(1))
        if len(a) == 1:
            ((monomial, coefficient),) = a
            return (_term({atom: exponent * n for atom, exponent in monomial}, coefficient**n),)
        if n < 0 or not self._expands or math.comb(len(a) + n - 1, n) > MAX_TERMS_OF_PRODUCT:
            return self._whole(a, n)
        return reduce(self._times, [a] * n)

    def _raised(self, base: Form, exponent: Form, *, exponent_is_constant: bool) -> Form:
        value = Fraction(0) if not exponent else exponent[0][1] if exponent[0][0] == () and len(exponent) == 1 else None
        if value is not None and value.denominator == 1:
            return self._power(base, value.numerator)
        if exponent_is_constant:
            return self._atom(("power", base, exponent))
        return self._atom(("call", "exp", (self._times(exponent, self._atom(("call", "log", (base,)))),)))


@cache
def _vanishes_at_zero(name: str, num_arguments: int) -> bool:
    try:
        return Coefficient(Call(name, (Number(Fraction(0)),) * num_arguments)).size == 0
    except DomainError:
        return False


def _is_below(low: Node, high: Node) -> bool:
    a, b = Coefficient(low), Coefficient(high)
    return Fraction(a.value) + Fraction(a.slack) < Fraction(b.value) - Fraction(b.slack)


def _number(value: Fraction) -> Form:
    return (((), value),) if value else ()


def _sum(*forms: Form) -> Form:
    return _collected(itertools.chain(*forms))


def _scaled(a: Form, factor: Fraction | int) -> Form:
    return tuple((monomial, coefficient * factor) for monomial, coefficient in a) if factor else ()


def _product(a: Term, b: Term) -> Term:
    exponents = dict(a[0])
    for atom, exponent in b[0]:
        exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
    return _term(exponents, a[1] * b[1])


def _term(exponents: dict[int, Fraction], coefficient: Fraction) -> Term:
    """Return the term, simplified by i² = −1."""
    if IMAGINARY_UNIT in exponents:
        turns = int(exponents[IMAGINARY_UNIT]) % 4
        exponents[IMAGINARY_UNIT], coefficient = Fraction(turns % 2), coefficient * (1 - 2 * (turns // 2))
    return tuple(sorted((atom, exponent) for atom, exponent in exponents.items() if exponent)), coefficient


def _collected(terms: Iterable[Term]) -> Form:
    """Return the sum of the terms."""
    found: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return tuple(sorted((monomial, coefficient) for monomial, coefficient in found.items() if coefficient))
