"""Lower the outputs of an expression to parts, each of which one head can compute.

A sub-expression that depends on one part only is one function of it, however long: sin(x)² + exp(x) is a single head.
If such a function is too hard for one head, it is split again, operation by operation. Parts that are cheap by
themselves are not merged into a longer function: affine arguments, affine terms of a sum, and gates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce

from attnc.targets.expressions.coefficient import MINUS, TWO, UNIT, ZERO, Coefficient
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
    folded,
    is_constant,
    substitute,
    with_children,
)
from attnc.targets.parts.part import (
    Choice,
    Combination,
    Multiply,
    Part,
    Source,
    T,
    Unary,
    combination,
)

ONE = Number(Fraction(1))
CHOICES = ("max", "min", "clip")
RELU = Call("relu", (T,))
SQUARE = Power(T, Number(Fraction(2)))
MAX_ANGLE_HALVINGS = 24
"""Maximum number of halvings of an angle. A range of 2²⁴ turns loses 24 bits of float64."""

CanFit = Callable[[Part, Node], bool]
"""Whether one head can compute tree(t) at t = this part."""


def affine_in_t(tree: Node) -> tuple[Coefficient, Coefficient] | None:
    """Return (slope, offset) if the tree is written as an affine function of t, else None."""
    if is_constant(tree):
        return ZERO, Coefficient(tree)
    scale, rest = _without_scale(tree)
    if rest is not tree:
        inner = affine_in_t(rest)
        return None if inner is None else (scale * inner[0], scale * inner[1])
    match tree:
        case Variable(_):
            return UNIT, ZERO
        case Power(base, exponent) if _is_exactly(exponent, 1):
            return affine_in_t(base)
        case Sum(terms):
            slope, offset = ZERO, ZERO
            for part in map(affine_in_t, terms):
                if part is None:
                    return None
                slope, offset = slope + part[0], offset + part[1]
            return slope, offset
    return None


def _is_exactly(tree: Node, number: int) -> bool:
    """Return whether the tree is a constant of this value."""
    return is_constant(tree) and Coefficient(tree).value == number and not Coefficient(tree).slack


def _without_scale(tree: Node) -> tuple[Coefficient, Node]:
    """Return the sign, constant factors or constant divisor of the last operation, and the operand without them."""
    match tree:
        case Negate(operand):
            return MINUS, operand
        case Quotient(dividend, divisor) if is_constant(divisor):
            return Coefficient(Quotient(ONE, divisor)), dividend
        case Product(factors) if any(map(is_constant, factors)):
            constants = [Coefficient(factor) for factor in factors if is_constant(factor)]
            moving = [factor for factor in factors if not is_constant(factor)]
            return reduce(operator.mul, constants), _joined(Product, moving)
    return UNIT, tree


def _joined(kind: type[Sum] | type[Product], trees: Sequence[Node]) -> Node:
    return trees[0] if len(trees) == 1 else kind(tuple(trees))


@dataclass(frozen=True, eq=False)
class _Pending:
    """tree(t) at t = base, which is not yet a part. A constant has no base."""

    base: Part | None
    tree: Node


class Lowering:
    """Turns the outputs of an expression into parts. Equal parts are made once."""

    def __init__(self, variables: Sequence[str], can_fit: CanFit | None = None, gates: Sequence[str] = ()) -> None:
        """Create a lowering. `gates` names the functions that heads compute with few keys on any range.

        Without `can_fit` every call of a function and every product is a part of its own. max and min are then one
        part, whatever the number of operands, so that one layer of heads computes as much as possible.
        """
        self._can_fit, self._gates = can_fit, gates
        self._sources = {name: Source(i) for i, name in enumerate(variables)}
        self._made: dict[tuple[int, int], tuple[Node, Part]] = {}  # (base, tree) → the tree and its part
        self._calls: dict[Call, Call] = {}  # functions of t and of constants, each once
        self._combined: dict[tuple[frozenset[tuple[int, Coefficient]], Coefficient], Part] = {}

    def lower(self, outputs: Sequence[Node]) -> list[Part]:
        return [self._part(pending) for pending in folded(outputs, self._operation)]

    def _operation(self, node: Node, operands: Sequence[_Pending]) -> _Pending:
        if isinstance(node, Variable):
            return _Pending(self._sources[node.name], T)
        bases = {id(operand.base): operand.base for operand in operands if operand.base is not None}
        if len(bases) <= 1:
            base, tree = next(iter(bases.values()), None), with_children(node, [operand.tree for operand in operands])
            affine = affine_in_t(tree) if isinstance(tree, Sum) and base is not None else None
            if affine is not None and affine[0] == ZERO:  # the terms cancel, as in t − t
                return _Pending(None, affine[1].tree)
            return _Pending(base, tree)
        return _Pending(self._several(node, operands), T)

    def _several(self, node: Node, operands: Sequence[_Pending]) -> Part:
        """Return the part for an operation on functions of different parts."""
        match node:
            case Sum(_):
                return self._combination([(self._part(group), UNIT) for group in _grouped(operands, Sum)])
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
            case Call(name, _) if name in CHOICES:
                return self._choice(name, [self._part(operand) for operand in operands])
        raise AssertionError(f"{type(node).__name__} has one operand")

    def _choice(self, name: str, parts: Sequence[Part]) -> Part:
        """Return max, min or clip.

        For constants a < b, clip(u, a, b) is a + relu(u − a) − relu(u − b), in one layer.
        """
        match parts:
            case [u, Combination((), a), Combination((), b)] if name == "clip" and a.value < b.value:
                if self._can_fit is None:
                    return Unary(u, Call(name, (T, a.tree, b.tree)))
                above_a, above_b = (self._unary(self._combination([(u, UNIT)], -end), RELU) for end in (a, b))
                return self._combination([(above_a, UNIT), (above_b, MINUS)], a)
        if self._can_fit is None:
            return Choice(name, tuple(parts))
        if name == "clip":
            return self._extreme(MINUS, self._extreme(UNIT, *parts[:2]), parts[2])
        return reduce(partial(self._extreme, UNIT if name == "max" else MINUS), parts)

    def _extreme(self, sign: Coefficient, u: Part, v: Part) -> Part:
        """Return max(u, v) = u + relu(v − u) for the sign 1, and min(u, v) = u − relu(u − v) for −1."""
        excess = self._unary(self._combination([(v, sign), (u, -sign)]), RELU)
        return self._combination([(u, UNIT), (excess, sign)])

    def _product(self, factors: Sequence[_Pending]) -> Part:
        """Return a balanced tree of products. Constants and constant factors scale it."""
        scale, parts = UNIT, list[Part]()
        for part in map(self._part, factors):
            match part:
                case Combination((), constant):
                    scale = scale * constant
                case Combination(((inner, coefficient),), constant, None) if constant == ZERO:
                    scale = scale * coefficient
                    parts.append(inner)
                case _:
                    parts.append(part)
        if not parts:
            return Combination((), scale)
        while len(parts) > 1:
            pairs = [Multiply(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
            parts = [*pairs, *parts[2 * len(pairs) :]]
        return self._combination([(parts[0], scale)])

    def _combination(self, terms: Sequence[tuple[Part, Coefficient]], constant: Coefficient = ZERO) -> Part:
        """Combine parts. Combinations of the same parts with the same coefficients are one part."""
        made = combination(terms, constant)
        if not isinstance(made, Combination):
            return made
        key = frozenset((id(part), coefficient) for part, coefficient in made.terms), made.constant
        return self._combined.setdefault(key, made)

    def _part(self, pending: _Pending) -> Part:
        if pending.base is None:
            return Combination((), Coefficient(pending.tree))
        return self._unary(pending.base, pending.tree)

    def _unary(self, base: Part, tree: Node) -> Part:
        """Return tree(base) by one head, or split at its last operation."""
        if isinstance(base, Combination) and not base.terms:
            return Combination((), Coefficient(substitute(tree, base.constant.tree)))
        if isinstance(tree, Call) and all(child is T or is_constant(child) for child in tree.arguments):
            tree = self._calls.setdefault(tree, tree)
        key = (id(base), id(tree))
        if key not in self._made:
            self._made[key] = tree, self._fitted(base, tree)
        return self._made[key][1]

    def _fitted(self, base: Part, tree: Node) -> Part:
        affine = affine_in_t(tree)
        if affine is not None:
            return base if affine == (UNIT, ZERO) else self._combination([(base, affine[0])], affine[1])
        scale, rest = _without_scale(tree)
        if rest is not tree:
            return self._combination([(self._unary(base, rest), scale)])
        match tree:
            case Product(factors) if self._can_fit is None or self._is_carried(factors):
                return self._product([_Pending(base, factor) for factor in factors])
            case Power(root, exponent) if self._can_fit is None and _is_exactly(exponent, 2):
                return self._product([_Pending(base, root)] * 2)
            case Call(name, (argument, *limits)) if self._is_moved(argument) and all(map(is_constant, limits)):
                return self._unary(self._unary(base, argument), Call(name, (T, *limits)))
            case Sum(terms) if apart := [term for term in terms if self._is_cheap(term)]:
                rest_of_sum = [term for term in terms if term not in apart]
                whole = [*apart, *([_joined(Sum, rest_of_sum)] if rest_of_sum else [])]
                return self._combination([(self._unary(base, term), UNIT) for term in whole])
        if self._can_fit is not None:
            if self._can_fit(base, tree):
                return Unary(base, tree)
            wide = self._wide(base, tree, self._can_fit)
            if wide is not None:
                return wide
        if isinstance(tree, Call) and tree.name in CHOICES:
            return self._several(tree, [_Pending(None if is_constant(c) else base, c) for c in children(tree)])
        arguments = [child for child in children(tree) if not is_constant(child)]
        if all(argument is T for argument in arguments):
            return Unary(base, tree)  # a single operation cannot be split further
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

    def _is_moved(self, argument: Node) -> bool:
        """Return whether this is an affine function of t other than t."""
        return argument is not T and not is_constant(argument) and affine_in_t(argument) is not None

    def _is_carried(self, factors: Sequence[Node]) -> bool:
        """Return whether this is a gate times an affine function, which the keys of the gate or its head can carry."""
        if len(factors) != 2:
            return False
        return any(self._is_gate(g) and affine_in_t(c) is not None for g, c in (factors, reversed(factors)))

    def _is_cheap(self, term: Node) -> bool:
        if affine_in_t(term) is not None:
            return True
        _, rest = _without_scale(term)
        if isinstance(rest, Product):
            return self._is_carried(rest.factors)
        return self._is_gate(rest) or (rest is not term and self._is_cheap(rest))

    def _wide(self, base: Part, tree: Node, can_fit: CanFit) -> Part | None:
        """Double the angle for sin or cos of a wide range, or square for a power.

        This takes more layers and fewer anchors.
        """
        match tree:
            case Call("sin" | "cos", (Variable(_),)):
                for halvings in range(1, MAX_ANGLE_HALVINGS):
                    angle = Quotient(T, Number(Fraction(2**halvings)))
                    if all(can_fit(base, Call(name, (angle,))) for name in ("sin", "cos")):
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
    """Merge operands with the same base."""
    groups: dict[int, list[_Pending]] = {}
    for operand in operands:
        groups.setdefault(id(operand.base), []).append(operand)
    return [_Pending(group[0].base, _joined(kind, [member.tree for member in group])) for group in groups.values()]
