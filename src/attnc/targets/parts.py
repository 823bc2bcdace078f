"""An expression as parts that attention computes: affine combinations, functions of one part, products of two.

Whatever depends on one part only is one function of it, however long: sin(x)² + exp(x) is a single head. Where such a
function is too hard for one head it is taken apart again, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from attnc.targets.coefficient import MINUS, TWO, UNIT, ZERO, Coefficient
from attnc.targets.expression import Expression
from attnc.targets.tree import (
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
    to_text,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = Variable("t")
"""The argument of a function of one part."""
ONE = Number(Fraction(1))
CHOICES = ("max", "min", "clip")
RELU = Call("relu", (T,))
SQUARE = Power(T, Number(Fraction(2)))
MAX_HALVINGS = 24


@dataclass(frozen=True, eq=False)
class Source:
    """An input of the program."""

    index: int


@dataclass(frozen=True, eq=False)
class Combination:
    """constant + Σ coefficient·part: costs nothing, an affine map does it."""

    terms: tuple[tuple[Part, Coefficient], ...]
    constant: Coefficient
    known: Unary | None = None  # the same function, where that tells its range better


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


@dataclass(frozen=True, eq=False)
class HeadClaim:
    """What a head is meant to compute: carrier·tree(t) at t = argument, which is `part`; without a carrier, tree(t)."""

    part: Part
    argument: Part
    tree: Node
    carrier: Part | None = None


@dataclass(frozen=True, eq=False)
class Derivation:
    """How a deep program is meant to compute an expression: the parts of its outputs, and what every head is for.

    Whoever proves the program proves each claim from the weights; this only says what to prove.
    """

    outputs: tuple[Part, ...]
    heads: Mapping[str, HeadClaim]  # by the channel that the head writes


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


def combination(terms: Sequence[tuple[Part, Coefficient]], constant: Coefficient = ZERO) -> Part:
    """Combinations within are taken in."""
    found: dict[int, tuple[Part, Coefficient]] = {}

    def add(part: Part, coefficient: Coefficient) -> None:
        nonlocal constant
        if isinstance(part, Combination):
            constant = constant + coefficient * part.constant
            for inner, factor in part.terms:
                add(inner, coefficient * factor)
        else:
            before = found.get(id(part), (part, ZERO))[1]
            found[id(part)] = (part, before + coefficient)

    for part, coefficient in terms:
        add(part, coefficient)
    kept = tuple((part, coefficient) for part, coefficient in found.values() if coefficient != ZERO)
    return kept[0][0] if len(kept) == 1 and kept[0][1] == UNIT and constant == ZERO else Combination(kept, constant)


def is_constant_part(part: Part) -> TypeIs[Combination]:
    return isinstance(part, Combination) and not part.terms


def is_constant(tree: Node) -> bool:
    return not any(isinstance(step.node, Variable) for step in schedule([tree])[0])


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
