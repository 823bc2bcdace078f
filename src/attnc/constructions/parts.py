"""An expression as parts that attention computes: affine combinations, functions of one part, products of two.

Whatever depends on one part only is one function of it, however long: sin(x)² + exp(x) is a single head. Where such a
function is too hard for one head it is taken apart again, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from attnc.targets.expression import Expression
from attnc.targets.tree import (
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
    children,
    schedule,
    to_text,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = Variable("t")
"""The argument of a function of one part."""
ONE = Number(Fraction(1))
CHOICES = ("max", "min", "clip")
SQUARE = Power(T, Number(Fraction(2)))
MAX_HALVINGS = 24


@dataclass(frozen=True, eq=False)
class Source:
    """An input of the program."""

    index: int


@dataclass(frozen=True, eq=False)
class Combination:
    """constant + Σ coefficient·part: costs nothing, an affine map does it."""

    terms: tuple[tuple[Part, float], ...]
    constant: float


@dataclass(frozen=True, eq=False)
class Unary:
    """tree(t) at t = base."""

    base: Part
    tree: Node


@dataclass(frozen=True, eq=False)
class Multiply:
    left: Part
    right: Part


Part = Source | Combination | Unary | Multiply
CanFit = Callable[[Part, Node], bool]
"""Whether tree(t), at t = this part, is within reach of one head."""


def function_of_t(tree: Node) -> Expression:
    return Expression(to_text(tree), (tree,), ("t",), False, ())


def in_order(outputs: Sequence[Part]) -> tuple[Part, ...]:
    """Every part that the outputs need, operands first."""
    found: dict[int, Part] = {}
    pending: list[tuple[Part, bool]] = [(part, False) for part in reversed(outputs)]
    while pending:
        part, ready = pending.pop()
        if ready:
            found.setdefault(id(part), part)
        elif id(part) not in found:
            pending.append((part, True))
            pending.extend((operand, False) for operand in operands_of(part))
    return tuple(found.values())


def operands_of(part: Part) -> tuple[Part, ...]:
    match part:
        case Source(_):
            return ()
        case Combination(terms, _):
            return tuple(inner for inner, _ in terms)
        case Unary(base, _):
            return (base,)
        case Multiply(left, right):
            return (left, right)


def affine_in_t(tree: Node) -> tuple[float, float] | None:
    """(slope, offset), if the tree is written as an affine function of t."""
    match tree:
        case Number(value):
            return 0.0, float(value)
        case Constant(name):
            return 0.0, {"pi": math.pi, "e": math.e}[name]
        case Variable(_):
            return 1.0, 0.0
        case Negate(operand):
            inner = affine_in_t(operand)
            return None if inner is None else (-inner[0], -inner[1])
        case Sum(terms):
            parts = [affine_in_t(term) for term in terms]
            known = [part for part in parts if part is not None]
            return (
                (math.fsum(a for a, _ in known), math.fsum(b for _, b in known)) if len(known) == len(parts) else None
            )
        case Product(factors):
            slope, offset = 0.0, 1.0
            for part in map(affine_in_t, factors):
                if part is None or (slope and part[0]):
                    return None
                slope, offset = slope * part[1] + offset * part[0], offset * part[1]
            return slope, offset
        case Quotient(dividend, divisor):
            top, bottom = affine_in_t(dividend), affine_in_t(divisor)
            usable = top is not None and bottom is not None and bottom[0] == 0 and bottom[1] != 0
            return (top[0] / bottom[1], top[1] / bottom[1]) if usable and top and bottom else None
        case _:
            return None


@dataclass(frozen=True, eq=False)
class _Pending:
    """tree(t) at t = base, not yet a part; a constant has no base."""

    base: Part | None
    tree: Node


class Lowering:
    """Turns the outputs of an expression into parts, equal sub-expressions once."""

    def __init__(self, variables: Sequence[str], can_fit: CanFit) -> None:
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
                return combination([(self._part(group), 1.0) for group in _grouped(operands, Sum)])
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
        return combination([(u, 1.0), (self._unary(combination([(v, 1.0), (u, -1.0)]), Call("relu", (T,))), 1.0)])

    def _least(self, u: Part, v: Part) -> Part:
        """min(u, v) = u − relu(u − v)."""
        return combination([(u, 1.0), (self._unary(combination([(u, 1.0), (v, -1.0)]), Call("relu", (T,))), -1.0)])

    def _product(self, factors: Sequence[_Pending]) -> Part:
        """A balanced tree of products; constants scale."""
        scale, parts = 1.0, list[Part]()
        for part in map(self._part, factors):
            if is_constant_part(part):
                scale *= part.constant
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
            return Combination((), constant_value(pending.tree))
        return self._unary(pending.base, pending.tree)

    def _unary(self, base: Part, tree: Node) -> Part:
        """tree(base) by one head, or taken apart at its last operation."""
        if is_constant_part(base):
            return Combination((), constant_value(substitute(tree, Number(Fraction(base.constant)))))
        key = (id(base), id(tree))
        if key not in self._made:
            self._kept.append(tree)
            self._made[key] = self._fitted(base, tree)
        return self._made[key]

    def _fitted(self, base: Part, tree: Node) -> Part:
        affine = affine_in_t(tree)
        if affine is not None:
            return base if affine == (1.0, 0.0) else combination([(base, affine[0])], affine[1])
        match tree:
            case Negate(operand):
                return combination([(self._unary(base, operand), -1.0)])
            case Product(factors) if any(is_constant(factor) for factor in factors):
                moving = [factor for factor in factors if not is_constant(factor)]
                scale = math.prod(constant_value(factor) for factor in factors if is_constant(factor))
                return combination(
                    [(self._unary(base, moving[0] if len(moving) == 1 else Product(tuple(moving))), scale)]
                )
        if self._can_fit(base, tree):
            return Unary(base, tree)
        wide = self._wide(base, tree)
        if wide is not None:
            return wide
        if isinstance(tree, Call) and tree.name in CHOICES:
            return self._several(tree, [_Pending(None if is_constant(c) else base, c) for c in children(tree)])
        arguments = [child for child in children(tree) if not is_constant(child)]
        if all(argument is T for argument in arguments):
            return Unary(base, tree)  # an operation of its own: whoever fits it finds a way or says why not
        if len(arguments) == 1:
            inner = self._unary(base, arguments[0])
            return self._unary(inner, with_children(tree, [T if c is arguments[0] else c for c in children(tree)]))
        operands = [_Pending(None, c) if is_constant(c) else _Pending(self._unary(base, c), T) for c in children(tree)]
        return self._part(self._operation(tree, operands))

    def _wide(self, base: Part, tree: Node) -> Part | None:
        """sin and cos of wide ranges by doubling the angle, powers by squaring: layers instead of anchors."""
        match tree:
            case Call("sin" | "cos", (Variable(_),)):
                for halvings in range(1, MAX_HALVINGS):
                    angle = Quotient(T, Number(Fraction(2**halvings)))
                    if self._can_fit(base, Call("sin", (angle,))):
                        sine, cosine = (self._unary(base, Call(name, (angle,))) for name in ("sin", "cos"))
                        for _ in range(halvings):
                            square = self._unary(sine, SQUARE)
                            doubled = combination([(Multiply(sine, cosine), 2.0)])
                            sine, cosine = doubled, combination([(square, -2.0)], 1.0)
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


def combination(terms: Sequence[tuple[Part, float]], constant: float = 0.0) -> Part:
    """Combinations within are taken in."""
    found: dict[int, tuple[Part, float]] = {}

    def add(part: Part, coefficient: float) -> None:
        nonlocal constant
        if isinstance(part, Combination):
            constant += coefficient * part.constant
            for inner, factor in part.terms:
                add(inner, coefficient * factor)
        else:
            before = found.get(id(part), (part, 0.0))[1]
            found[id(part)] = (part, before + coefficient)

    for part, coefficient in terms:
        add(part, coefficient)
    kept = tuple((part, coefficient) for part, coefficient in found.values() if coefficient != 0)
    return kept[0][0] if len(kept) == 1 and kept[0][1] == 1 and constant == 0 else Combination(kept, constant)


def is_constant_part(part: Part) -> TypeIs[Combination]:
    return isinstance(part, Combination) and not part.terms


def is_constant(tree: Node) -> bool:
    return not any(isinstance(step.node, Variable) for step in schedule([tree])[0])


def constant_value(tree: Node) -> float:
    import numpy as np

    return float(Expression(to_text(tree), (tree,), (), False, ())(np.zeros((1, 0)))[0, 0])


def substitute(tree: Node, argument: Node) -> Node:
    """tree(t) at t = argument; what is shared stays shared."""
    steps, (last,) = schedule([tree])
    made: list[Node] = []
    for step in steps:
        operands = [made[i] for i in step.arguments]
        made.append(argument if isinstance(step.node, Variable) else with_children(step.node, operands))
    return made[last]


def with_children(node: Node, operands: Sequence[Node]) -> Node:
    """The same operation on other operands."""
    match node:
        case Sum(_):
            return Sum(tuple(operands))
        case Product(_):
            return Product(tuple(operands))
        case Quotient(_, _):
            return Quotient(*operands)
        case Power(_, _):
            return Power(*operands)
        case Negate(_):
            return Negate(*operands)
        case Call(name, _):
            return Call(name, tuple(operands))
        case _:
            return node
