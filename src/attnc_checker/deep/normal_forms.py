"""Whether two expressions are the same function, by exact normal forms. A yes is a proof, a no is not.

A form is a rational combination of monomials of atoms: variables, π and e, functions of forms, and sums that are not
multiplied out. Besides the laws of a commutative ring it uses, wherever both sides are defined,

    max(a, b) = a + relu(b − a),  relu(c·a) = c·relu(a) for c > 0,  relu(a) = a + relu(−a),
    clip(u, a, b) = a + relu(u − a) − relu(u − b) for constants a < b,  a^b = exp(b·log a),
    sin w = (E − 1/E)/2i,  cos w = (E + 1/E)/2,  E = exp(iw), E^n = exp(inw).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TypeVar

from flint import arb, fmpq

from attnc_checker.expressions import NAMED, Reader, Rules, Smooth, Step, evaluate
from attnc_checker.files import require
from attnc_checker.ranges import coefficients

Exponent = fmpq | int
Monomial = tuple[tuple[int, Exponent], ...]
"""(atom, exponent), sorted, no exponent 0."""
Form = tuple[tuple[Monomial, fmpq], ...]
"""(monomial, coefficient), sorted, no coefficient 0."""
MOST, MAX_BITS = 4096, 2**16
"""Products of more terms are not multiplied out, and numbers of more bits are refused, to bound the time. The corpus
has products of up to 38 terms, and numbers of up to 1,694 bits."""
S = TypeVar("S", Monomial, int)
E = TypeVar("E", fmpq, Exponent)
NAN = arb("nan")
IMAGINARY = 0
"""The number of the atom i."""


def are_equal(reader: Reader, pairs: Iterable[tuple[Step, Step]]) -> bool:
    """Whether the steps of each pair are equal. Forms in which less is multiplied out are tried first."""
    function = reader.function([step for pair in pairs for step in pair])
    tried = (evaluate(function, Forms(expands)) for expands in (False, True))
    return any(found[::2] == found[1::2] for found in tried)


def _bits(q: fmpq) -> int:
    return max(int(q.p).bit_length(), int(q.q).bit_length())


def _sorted(terms: dict[S, E]) -> tuple[tuple[S, E], ...]:
    return tuple(sorted((key, x) for key, x in terms.items() if x != 0))


class Forms(Rules[Form]):
    """Rules for normal forms."""

    def __init__(self, expands: bool) -> None:
        self.expands = expands  # sums and waves are multiplied out
        self.atoms: dict[Hashable, int] = {"i": IMAGINARY}
        self.values: dict[int, arb] = {}  # the values of constant atoms

    def atom(self, key: Hashable, exponent: Exponent = 1, value: arb = NAN) -> Form:
        number = self.atoms.setdefault(key, len(self.atoms))
        if value.is_finite():
            self.values[number] = value
        return ((((number, exponent),), fmpq(1)),)

    def constant(self, x: fmpq | arb) -> Form:
        assert isinstance(x, fmpq)  # π and e are atoms (`named`)
        return (((), x),) if x != 0 else ()

    def named(self, name: str) -> Form:
        return self.atom(name, value=NAMED[name]())

    def variable(self, i: int) -> Form:
        return self.atom(("variable", i))

    def plus(self, a: Form, b: Form, sign: int = 1) -> Form:
        terms = dict(a)
        for monomial, x in b:
            terms[monomial] = terms.get(monomial, fmpq(0)) + sign * x
        return _sorted(terms)

    def times(self, a: Form, b: Form) -> Form:
        if not a or not b:
            return ()
        few, many = sorted((a, b), key=len)
        scales = len(few) == 1 and all(atom in self.values for atom, _ in few[0][0])
        if not scales and (len(a) * len(b) > MOST or not (self.expands or len(many) == 1)):
            a, b = self.whole(a, 1), self.whole(b, 1)
        terms: dict[Monomial, fmpq] = {}
        for left, x in a:
            for right, y in b:
                exponents = dict(left)
                for atom, exponent in right:
                    exponents[atom] = exponents.get(atom, 0) + exponent
                monomial, sign = self._monomial(exponents)
                product = terms[monomial] = terms.get(monomial, fmpq(0)) + sign * x * y
                require(_bits(product) <= MAX_BITS, "the numbers of the expression grow too large")
        return _sorted(terms)

    def _monomial(self, exponents: dict[int, Exponent]) -> tuple[Monomial, int]:
        """Return the monomial and its sign, with i² = −1."""
        turns = int(exponents.pop(IMAGINARY, 0)) % 4
        return _sorted(exponents | {IMAGINARY: turns % 2}), 1 - 2 * (turns // 2)

    def whole(self, a: Form, n: int) -> Form:
        """Return a^n. A sum becomes one atom, up to its scale."""
        monomial, scale = a[0]
        scale = scale if abs(n) * _bits(scale) <= MAX_BITS else fmpq(1)
        sum_ = self.scaled(a, 1 / scale)
        if sum_ == ((monomial, fmpq(1)),):
            raised, sign = self._monomial({atom: exponent * n for atom, exponent in monomial})
            return ((raised, sign * scale**n),)
        return self.scaled(self.atom(("sum", sum_), n, self.value(sum_)), scale**n)

    def scaled(self, a: Form, factor: fmpq) -> Form:
        return tuple((monomial, x * factor) for monomial, x in a)

    def power(self, a: Form, n: int) -> Form:
        if n < 2 or not a:
            return a if n else self.constant(fmpq(1))
        if len(a) == 1 or not self.expands or math.comb(len(a) + n - 1, n) > MOST:
            return self.whole(a, n)
        return super().power(a, n)

    def maximum(self, a: Form, b: Form) -> Form:
        """Return a + relu(b − a). The first coefficient of the argument is scaled to 1."""
        d = self.plus(b, a, -1)
        if not d:
            return a
        scale = d[0][1]
        d = self.scaled(d, 1 / scale)
        relu = self.atom(("relu", d), value=self.value(d).max(arb(0)))
        return self.plus(a if scale > 0 else b, self.scaled(relu, abs(scale)))

    def clip(self, a: Form, low: Form, high: Form) -> Form:
        if not self.value(high) > self.value(low):
            return super().clip(a, low, high)
        above_low, above_high = (self.maximum(self.plus(a, end, -1), ()) for end in (low, high))
        return self.plus(self.plus(low, above_low), above_high, -1)

    def value(self, a: Form) -> arb:
        """Return the value of a constant form, or nan for others."""
        return sum((self._product(monomial, x) for monomial, x in a), arb(0))

    def _product(self, monomial: Iterable[tuple[int, Exponent]], x: fmpq) -> arb:
        return math.prod((self.values.get(atom, NAN) ** arb(exponent) for atom, exponent in monomial), start=arb(x))

    def linear(self, a: Form, d: int) -> list[arb] | None:
        """Return the constant and the coefficients of the d variables, if the form is affine in them."""
        numbers = {self.atoms[key]: i for i in range(d) if (key := ("variable", i)) in self.atoms}
        found = [arb(0)] * (d + 1)
        for monomial, x in a:
            moving = [(atom, exponent) for atom, exponent in monomial if atom not in self.values]
            if len(moving) > 1 or not all(atom in numbers and exponent == 1 for atom, exponent in moving):
                return None
            place = 1 + numbers[moving[0][0]] if moving else 0
            found[place] += self._product([pair for pair in monomial if pair not in moving], x)
        return found

    def apply(self, name: Smooth, a: Form) -> Form:
        if isinstance(name, fmpq) and name > 0 and not a:  # a power of 0
            return a
        if isinstance(name, fmpq) and name.q != 1:
            return self.apply("exp", self.times(self.constant(name), self.apply("log", a)))
        if isinstance(name, fmpq) and (name >= 0 or a):
            raised = self.power(a, abs(int(name.p)))
            return raised if name >= 0 else self.whole(raised, -1)
        value = self.value(a)
        if name in ("sin", "cos") and self.expands and not value.is_finite():
            scale = a[0][1]
            forth, back = (self.atom(("wave", self.scaled(a, 1 / scale)), side * scale) for side in (1, -1))
            if name == "cos":
                return self.scaled(self.plus(forth, back), fmpq(1, 2))
            return self.times(self.scaled(self.atom("i"), fmpq(-1, 2)), self.plus(forth, back, -1))  # 1/2i = −i/2
        return self.atom((name, a), value=coefficients(name, (value.lower(), value.upper()), 2)[0])

    def step(self, name: str, a: Form) -> Form:
        return self.atom((name, a))
