"""The outputs of an expression as parts, each within reach of one head.

Whatever depends on one part only is one function of it, however long: sin(x)² + exp(x) is a single head. Where such a
function is too hard for one head it is taken apart again, operation by operation. Parts that cost next to nothing by
themselves are not made part of a longer function: affine arguments, affine terms of a sum, and gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from attnc.targets.expressions.coefficient import MINUS, TWO, UNIT, ZERO, Coefficient
from attnc.targets.expressions.substituting import is_constant, substitute, with_children
from attnc.targets.expressions.tree import (
    Call,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    children,
    schedule,
)
from attnc.targets.parts.part import Combination, Multiply, Part, Source, T, Unary, combination, is_constant_part

ONE = Number(Fraction(1))
CHOICES = ("max", "min", "clip")
RELU = Call("relu", (T,))
SQUARE = Power(T, Number(Fraction(2)))
MAX_ANGLE_HALVINGS = 24
"""Largest number of halvings of an angle: a range of 2²⁴ turns loses as many bits of float64."""

CanFit = Callable[[Part, Node], bool]
"""Whether tree(t), at t = this part, is within reach of one head."""


def affine_in_t(tree: Node) -> tuple[Coefficient, Coefficient] | None:
    """(slope, offset), if the tree is written as an affine function of t."""
    if is_constant(tree):
        return ZERO, Coefficient(tree)
    match tree:
        case Variable(_):
            return UNIT, ZERO
        case Negate(operand):
            inner = affine_in_t(operand)
            return None if inner is None else (-inner[0], -inner[1])
        case Sum(terms):
            slope, offset = ZERO, ZERO
            for part in map(affine_in_t, terms):
                if part is None:
                    return None
                slope, offset = slope + part[0], offset + part[1]
            return slope, offset
        case Product(factors):
            scale, moving = _without_constants(factors)
            inner = affine_in_t(moving[0]) if len(moving) == 1 else None
            return None if inner is None else (scale * inner[0], scale * inner[1])
        case Quotient(dividend, divisor) if is_constant(divisor):
            inner, inverse = affine_in_t(dividend), Coefficient(Quotient(ONE, divisor))
            return None if inner is None else (inverse * inner[0], inverse * inner[1])
        case _:
            return None


def _without_constants(factors: Sequence[Node]) -> tuple[Coefficient, list[Node]]:
    """The product of the constant factors, and the others."""
    scale = UNIT
    for factor in factors:
        if is_constant(factor):
            scale = scale * Coefficient(factor)
    return scale, [factor for factor in factors if not is_constant(factor)]


@dataclass(frozen=True, eq=False)
class _Pending:
    """tree(t) at t = base, not yet a part; a constant has no base."""

    base: Part | None
    tree: Node


class Lowering:
    """Turns the outputs of an expression into parts, equal sub-expressions once."""

    def __init__(self, variables: Sequence[str], can_fit: CanFit, gates: Sequence[str] = ()) -> None:
        """`gates`: the functions whose heads have few keys, whatever the range."""
        self._gates = gates
        self._sources = {name: Source(i) for i, name in enumerate(variables)}
        self._can_fit = can_fit
        self._made: dict[tuple[int, int], Part] = {}  # (base, tree) → its part
        self._kept: list[Node] = []  # the trees whose identities are keys

    def lower(self, outputs: Sequence[Node]) -> list[Part]:
        steps, numbers = schedule(outputs)
        pending: list[_Pending] = []
        for step in steps:
            pending.append(self._operation(step.node, [pending[i] for i in step.arguments]))
        return [self._part(pending[i]) for i in numbers]

    def _operation(self, node: Node, operands: Sequence[_Pending]) -> _Pending:
        if isinstance(node, Variable):
            return _Pending(self._sources[node.name], T)
        bases = {id(operand.base): operand.base for operand in operands if operand.base is not None}
        if len(bases) <= 1:
            base = next(iter(bases.values()), None)
            return _Pending(base, with_children(node, [operand.tree for operand in operands]))
        return _Pending(self._several(node, operands), T)

    def _several(self, node: Node, operands: Sequence[_Pending]) -> Part:
        """An operation on functions of different parts."""
        match node:
            case Sum(_):
                return combination([(self._part(group), UNIT) for group in _grouped(operands, Sum)])
            case Product(_):
                return self._product(_grouped(operands, Product))
            case Quotient(_, _):
                dividend, divisor = operands
                inverse = _Pending(divisor.base, Quotient(ONE, divisor.tree))
                return self._product([dividend, inverse])
            case Power(_, _):
                base, exponent = operands
                logarithm = _Pending(base.base, Call("log", (base.tree,)))
                return self._unary(self._product([exponent, logarithm]), Call("exp", (T,)))
            case Call("clip", _) if operands[1].base is None and operands[2].base is None:
                return self._clipped(self._part(operands[0]), *(Coefficient(bound.tree) for bound in operands[1:]))
            case Call("clip", _):
                x, low, high = operands
                return self._least(self._greatest(self._part(x), self._part(low)), self._part(high))
            case Call("max" | "min", _):
                parts = [self._part(operand) for operand in operands]
                choose = self._greatest if node.name == "max" else self._least
                found = parts[0]
                for part in parts[1:]:
                    found = choose(found, part)
                return found
            case _:
                raise AssertionError(f"{type(node).__name__} has one operand")

    def _greatest(self, u: Part, v: Part) -> Part:
        """max(u, v) = u + relu(v − u)."""
        return combination([(u, UNIT), (self._unary(combination([(v, UNIT), (u, MINUS)]), RELU), UNIT)])

    def _least(self, u: Part, v: Part) -> Part:
        """min(u, v) = u − relu(u − v)."""
        return combination([(u, UNIT), (self._unary(combination([(u, UNIT), (v, MINUS)]), RELU), MINUS)])

    def _clipped(self, u: Part, low: Coefficient, high: Coefficient) -> Part:
        """clip(u, a, b) = a + relu(u − a) − relu(u − b) for a ≤ b: both in one layer."""
        if low.value >= high.value:
            return self._least(self._greatest(u, Combination((), low)), Combination((), high))
        above_low, above_high = (self._unary(combination([(u, UNIT)], -end), RELU) for end in (low, high))
        return combination([(above_low, UNIT), (above_high, MINUS)], low)

    def _product(self, factors: Sequence[_Pending]) -> Part:
        """A balanced tree of products; constants scale."""
        scale, parts = UNIT, list[Part]()
        for part in map(self._part, factors):
            if is_constant_part(part):
                scale = scale * part.constant
            else:
                parts.append(part)
        if not parts:
            return Combination((), scale)
        while len(parts) > 1:
            pairs = [Multiply(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
            parts = [*pairs, *parts[2 * len(pairs) :]]
        return combination([(parts[0], scale)])

    def _part(self, pending: _Pending) -> Part:
        if pending.base is None:
            return Combination((), Coefficient(pending.tree))
        return self._unary(pending.base, pending.tree)

    def _unary(self, base: Part, tree: Node) -> Part:
        """tree(base) by one head, or taken apart at its last operation."""
        if is_constant_part(base):
            return Combination((), Coefficient(substitute(tree, base.constant.tree)))
        key = (id(base), id(tree))
        if key not in self._made:
            self._kept.append(tree)
            self._made[key] = self._fitted(base, tree)
        return self._made[key]

    def _fitted(self, base: Part, tree: Node) -> Part:
        affine = affine_in_t(tree)
        if affine is not None:
            return base if affine == (UNIT, ZERO) else combination([(base, affine[0])], affine[1])
        match tree:
            case Negate(operand):
                return combination([(self._unary(base, operand), MINUS)])
            case Product(factors) if any(is_constant(factor) for factor in factors):
                scale, moving = _without_constants(factors)
                inner = self._unary(base, moving[0] if len(moving) == 1 else Product(tuple(moving)))
                return combination([(inner, scale)])
            case Product((left, right)) if self._is_carried(left, right) or self._is_carried(right, left):
                return self._product([_Pending(base, left), _Pending(base, right)])
            case Call(name, (argument,)) if argument is not T and affine_in_t(argument) is not None:
                return self._unary(self._unary(base, argument), Call(name, (T,)))
            case Sum(terms) if apart := [term for term in terms if self._is_cheap(term)]:
                rest = tuple(term for term in terms if term not in apart)
                whole = [*apart, *([rest[0] if len(rest) == 1 else Sum(rest)] if rest else [])]
                return combination([(self._unary(base, term), UNIT) for term in whole])
        if self._can_fit(base, tree):
            return Unary(base, tree)
        wide = self._wide(base, tree)
        if wide is not None:
            return wide
        if isinstance(tree, Call) and tree.name in CHOICES:
            return self._several(tree, [_Pending(None if is_constant(c) else base, c) for c in children(tree)])
        arguments = [child for child in children(tree) if not is_constant(child)]
        if all(argument is T for argument in arguments):
            return Unary(base, tree)  # an operation of its own: its fit succeeds or refuses
        if len(arguments) == 1:
            inner = self._unary(base, arguments[0])
            return self._unary(inner, with_children(tree, [T if c is arguments[0] else c for c in children(tree)]))
        operands = [_Pending(None, c) if is_constant(c) else _Pending(self._unary(base, c), T) for c in children(tree)]
        return self._part(self._operation(tree, operands))

    def _is_gate(self, tree: Node) -> bool:
        match tree:
            case Call(name, (argument,)) if name in self._gates:
                return affine_in_t(argument) is not None
        return False

    def _is_carried(self, carrier: Node, gate: Node) -> bool:
        """Whether their product costs little more than the gate: keys may carry the other factor, or its head does."""
        return self._is_gate(gate) and affine_in_t(carrier) is not None

    def _is_cheap(self, term: Node) -> bool:
        match term:
            case Negate(operand):
                return self._is_cheap(operand)
            case Product(factors) if any(is_constant(factor) for factor in factors):
                _, moving = _without_constants(factors)
                return not moving or self._is_cheap(moving[0] if len(moving) == 1 else Product(tuple(moving)))
            case Product((left, right)):
                return self._is_carried(left, right) or self._is_carried(right, left)
        return self._is_gate(term) or affine_in_t(term) is not None

    def _wide(self, base: Part, tree: Node) -> Part | None:
        """sin and cos of wide ranges by doubling the angle, powers by squaring: layers instead of anchors."""
        match tree:
            case Call("sin" | "cos", (Variable(_),)):
                for halvings in range(1, MAX_ANGLE_HALVINGS):
                    angle = Quotient(T, Number(Fraction(2**halvings)))
                    if all(self._can_fit(base, Call(name, (angle,))) for name in ("sin", "cos")):
                        sine, cosine = (self._unary(base, Call(name, (angle,))) for name in ("sin", "cos"))
                        for step in reversed(range(halvings)):
                            square = self._unary(sine, SQUARE)
                            whole = Quotient(T, Number(Fraction(2**step)))
                            names = (Unary(base, Call(name, (whole,))) for name in ("sin", "cos"))
                            product = Multiply(sine, cosine)
                            sine = Combination(((product, TWO),), ZERO, next(names))
                            cosine = Combination(((square, -TWO),), UNIT, next(names))
                        return sine if tree.name == "sin" else cosine
            case Power(Variable(_), Number(n)) if n.denominator == 1 and n > 2:
                half = self._unary(base, Power(T, Number(Fraction(n // 2))) if n > 3 else T)
                square = self._unary(half, SQUARE)
                return square if n % 2 == 0 else Multiply(square, base)
        return None


def _grouped(operands: Sequence[_Pending], kind: type[Sum] | type[Product]) -> list[_Pending]:
    """Operands with the same base become one."""
    groups: dict[int, list[_Pending]] = {}
    for operand in operands:
        groups.setdefault(id(operand.base), []).append(operand)
    return [
        group[0] if len(group) == 1 else _Pending(group[0].base, kind(tuple(member.tree for member in group)))
        for group in groups.values()
    ]
