"""The parts of an expression that attention computes: affine combinations, functions of one part, products of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attnc.targets.expressions.coefficient import UNIT, ZERO, Coefficient
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node, Variable, to_text

T = Variable("t")
"""The argument of a function of one part."""


@dataclass(frozen=True, eq=False)
class Source:
    """An input of the program."""

    index: int


@dataclass(frozen=True, eq=False)
class Combination:
    """constant + Σ coefficient·part. An affine map computes it without a head."""

    terms: tuple[tuple[Part, Coefficient], ...]
    constant: Coefficient
    known: Unary | Multiply | None = None  # the same function in another form, which gives its range


@dataclass(frozen=True, eq=False)
class Unary:
    """tree(t) at t = base."""

    base: Part
    tree: Node


@dataclass(frozen=True, eq=False)
class Multiply:
    """left·right."""

    left: Part
    right: Part


@dataclass(frozen=True, eq=False)
class Choice:
    """max, min or clip of parts, computed by one head over all of them."""

    name: str
    operands: tuple[Part, ...]


Part = Source | Combination | Unary | Multiply | Choice


@dataclass(frozen=True, eq=False)
class HeadClaim:
    """The claim that a head computes `part`: carrier·tree(t) at t = argument, or tree(t) without a carrier."""

    part: Part
    argument: Part
    tree: Node
    carrier: Part | None = None


@dataclass(frozen=True, eq=False)
class Derivation:
    """A deep program's intended computation of an expression: the parts of its outputs, and a claim for every head.

    The prover proves each claim from the weights. It also proves that the parts of the outputs equal the expression.
    """

    outputs: tuple[Part, ...]
    heads: Mapping[str, HeadClaim]  # by the channel that the head writes


def function_of_t(tree: Node) -> Expression:
    return Expression(to_text(tree), (tree,), ("t",), False, ())


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
        case Choice(_, operands):
            return operands


def in_order(outputs: Sequence[Part], operands: Callable[[Part], tuple[Part, ...]] = operands_of) -> tuple[Part, ...]:
    """List every part that the outputs need, operands first."""
    found: dict[int, Part] = {}

    def add(part: Part) -> None:
        if id(part) not in found:
            for operand in reversed(operands(part)):
                add(operand)
            found[id(part)] = part

    for part in outputs:
        add(part)
    return tuple(found.values())


def combination(terms: Sequence[tuple[Part, Coefficient]], constant: Coefficient = ZERO) -> Part:
    """Combine parts. Combinations among them are expanded."""
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
    kept = tuple((part, coefficient) for part, coefficient in found.values() if coefficient.size > 0)
    return kept[0][0] if len(kept) == 1 and kept[0][1] == UNIT and constant == ZERO else Combination(kept, constant)
