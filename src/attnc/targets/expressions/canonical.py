"""Whether two expressions are the same function, decided by exact canonical forms: "yes" is a proof, "no" is not.

A form is a rational combination of monomials of atoms. Atoms are variables, π and e, calls of functions, powers that
are not integral, and sums that stand below a fraction bar or are not multiplied out; equal atoms have equal arguments,
as forms. Beyond the laws of a commutative ring these are used:

    a/b = a·b⁻¹, a^m·a^n = a^(m+n) for integers,      a^b = exp(b·log a) unless b is a constant,
    max(a, b) = a + relu(b − a),                      min(a, b) = a − relu(a − b),
    clip(u, a, b) = min(max(u, a), b),                and for constants a < b: a + relu(u − a) − relu(u − b),
    sin w = (E − E⁻¹)/2i, cos w = (E + E⁻¹)/2,        E = exp(iw), whose powers are those of multiples of w.

All hold wherever both sides are defined. The caller checks the domains.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import reduce

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
    schedule,
)

Monomial = tuple[tuple[int, Fraction], ...]
"""(atom, exponent), by atom; exponents are not 0, and integers but for waves."""
Form = tuple[tuple[Monomial, Fraction], ...]
"""(monomial, coefficient), by monomial; coefficients are not 0."""

MAX_TERMS = 2**12
"""Maximum number of terms of a product that is multiplied out, which bounds time and memory."""
MAX_EXPANDED_EXPONENT = 4096
"""Larger exponents make an atom of the power; Python integers of such powers would take kilobytes each."""
IMAGINARY_UNIT = 0
"""The number of the atom i."""


def equivalent(left: Sequence[Node], right: Sequence[Node]) -> bool:
    """Whether the expressions are equal, one by one. True is proved; False means that no proof was found.

    Forms in which less is multiplied out are shorter and come first. Forms with more laws are tried if these differ.
    """
    if len(left) != len(right):
        return False
    for forms in (_CanonicalForms(expands=False), _CanonicalForms(), _CanonicalForms(trigonometry=True)):
        found = forms.of([*left, *right])
        if found[: len(left)] == found[len(left) :]:
            return True
    return False


class _CanonicalForms:
    """Makes forms that can be compared, since they share the numbers of their atoms."""

    def __init__(self, *, expands: bool = True, trigonometry: bool = False) -> None:
        self._expands, self._trigonometry = expands, trigonometry
        self._atoms: dict[Hashable, int] = {"i": IMAGINARY_UNIT}
        self._constants = {IMAGINARY_UNIT}

    def of(self, trees: Sequence[Node]) -> list[Form]:
        steps, numbers = schedule(trees)
        forms: list[Form] = []
        is_constant: list[bool] = []
        for step in steps:
            is_constant.append(not isinstance(step.node, Variable) and all(is_constant[i] for i in step.arguments))
            forms.append(self._operation(step.node, [forms[i] for i in step.arguments], step.arguments, is_constant))
        return [forms[i] for i in numbers]

    def _operation(self, node: Node, a: list[Form], arguments: Sequence[int], is_constant: Sequence[bool]) -> Form:
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
                product = a[0]
                for factor in a[1:]:
                    product = self._times(product, factor)
                return product
            case Quotient(_, _):
                return self._times(a[0], self._power(a[1], -1))
            case Power(_, _):
                return self._raised(*a, exponent_is_constant=is_constant[arguments[1]])
            case Call("max", _):
                return reduce(self._greatest, a)
            case Call("min", _):
                return reduce(self._least, a)
            case Call("clip", (_, low, high)):
                if is_constant[arguments[1]] and is_constant[arguments[2]] and _is_below(low, high):
                    above_low, above_high = (self._relu(_sum(a[0], _scaled(end, -1))) for end in a[1:])
                    return _sum(a[1], above_low, _scaled(above_high, -1))
                return self._least(self._greatest(a[0], a[1]), a[2])
            case Call("sin" | "cos", _) if self._trigonometry and a[0]:
                return self._wave(node.name, a[0])
            case Call(name, _):
                return self._atom(("call", name, tuple(a)))
        raise AssertionError(node)

    def _greatest(self, a: Form, b: Form) -> Form:
        return _sum(a, self._relu(_sum(b, _scaled(a, -1))))

    def _least(self, a: Form, b: Form) -> Form:
        return _sum(a, _scaled(self._relu(_sum(a, _scaled(b, -1))), -1))

    def _relu(self, a: Form) -> Form:
        return self._atom(("call", "relu", (a,)))

    def _wave(self, name: str, angle: Form) -> Form:
        scale = angle[0][1]
        forth, back = (self._atom(("wave", _scaled(angle, 1 / scale)), sign * scale) for sign in (1, -1))
        if name == "cos":
            return _sum(_scaled(forth, Fraction(1, 2)), _scaled(back, Fraction(1, 2)))
        over_i = (((IMAGINARY_UNIT, Fraction(1)),), Fraction(-1, 2))  # 1/2i = −i/2
        return self._times((over_i,), _sum(forth, _scaled(back, -1)))

    def _atom(self, key: Hashable, exponent: Fraction | int = 1) -> Form:
        number = self._atoms.setdefault(key, len(self._atoms))
        return ((((number, Fraction(exponent)),), Fraction(1)),)

    def _times(self, a: Form, b: Form) -> Form:
        if len(a) * len(b) > MAX_TERMS or not (self._expands or self._is_short(a, b)):
            a, b = self._whole(a, 1), self._whole(b, 1)
        found: dict[Monomial, Fraction] = {}
        for left, p in a:
            for right, q in b:
                monomial, sign = _product(left, right)
                found[monomial] = found.get(monomial, Fraction(0)) + sign * p * q
        return _sorted(found)

    def _is_short(self, a: Form, b: Form) -> bool:
        """Two monomials, or a constant one and a sum."""
        few, many = sorted((a, b), key=len)
        constant = len(few) == 1 and all(atom in self._constants for atom, _ in few[0][0])
        return len(many) <= 1 or not few or constant

    def _whole(self, a: Form, exponent: int) -> Form:
        """A sum to a power, as one atom but for its scale."""
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
            raised, sign = _reduced({atom: exponent * n for atom, exponent in monomial})
            return ((raised, sign * coefficient**n),)
        if n < 0 or not self._expands or math.comb(len(a) + n - 1, n) > MAX_TERMS:
            return self._whole(a, n)
        found = a
        for _ in range(n - 1):
            found = self._times(found, a)
        return found

    def _raised(self, base: Form, exponent: Form, *, exponent_is_constant: bool) -> Form:
        value = Fraction(0) if not exponent else exponent[0][1] if exponent[0][0] == () and len(exponent) == 1 else None
        if value is not None and value.denominator == 1:
            return self._power(base, value.numerator)
        if exponent_is_constant:
            return self._atom(("power", base, exponent))
        return self._atom(("call", "exp", (self._times(exponent, self._atom(("call", "log", (base,)))),)))


def _is_below(low: Node, high: Node) -> bool:
    a, b = Coefficient(low), Coefficient(high)
    return Fraction(a.value) + Fraction(a.slack) < Fraction(b.value) - Fraction(b.slack)


def _number(value: Fraction) -> Form:
    return (((), value),) if value else ()


def _sum(*forms: Form) -> Form:
    found: dict[Monomial, Fraction] = {}
    for form in forms:
        for monomial, coefficient in form:
            found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return _sorted(found)


def _scaled(a: Form, factor: Fraction | int) -> Form:
    return tuple((monomial, coefficient * factor) for monomial, coefficient in a) if factor else ()


def _product(a: Monomial, b: Monomial) -> tuple[Monomial, int]:
    exponents = dict(a)
    for atom, exponent in b:
        exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
    return _reduced(exponents)


def _reduced(exponents: dict[int, Fraction]) -> tuple[Monomial, int]:
    """A monomial and its sign: i² = −1."""
    sign = 1
    if IMAGINARY_UNIT in exponents:
        turns = int(exponents[IMAGINARY_UNIT]) % 4
        exponents[IMAGINARY_UNIT], sign = Fraction(turns % 2), 1 - 2 * (turns // 2)
    return tuple(sorted((atom, exponent) for atom, exponent in exponents.items() if exponent)), sign


def _sorted(found: dict[Monomial, Fraction]) -> Form:
    return tuple(sorted((monomial, coefficient) for monomial, coefficient in found.items() if coefficient))
