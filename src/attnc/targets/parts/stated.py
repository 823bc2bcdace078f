"""A derivation as a certificate states it, read back: what every head is for, in the names of the inputs and heads.

Nothing of it is believed by whoever proves it, so nothing has to be checked here but that it can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attnc.errors import ExpressionError, ProgramError
from attnc.targets.expressions.coefficient import UNIT, ZERO, Coefficient
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.substituting import is_constant
from attnc.targets.expressions.tree import Negate, Node, Product, Sum, Variable
from attnc.targets.parts.part import Derivation, HeadClaim, Multiply, Part, Source, T, Unary, combination


class StatedHead(Protocol):
    """The texts of a head: carrier·function(t) at t = argument."""

    @property
    def channel(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def argument(self) -> str: ...
    @property
    def carrier(self) -> str | None: ...


def stated_derivation(stages: Sequence[StatedHead], outputs: Sequence[str], variables: Sequence[str]) -> Derivation:
    """ProgramError where it cannot be read."""
    parts: dict[str, Part] = {name: Source(i) for i, name in enumerate(variables)}
    heads: dict[str, HeadClaim] = {}
    try:
        for stage in stages:
            (tree,) = Expression.parse(stage.function).outputs
            argument = _affine(stage.argument, parts)
            carrier = None if stage.carrier is None else _affine(stage.carrier, parts)
            part: Part = argument if carrier is not None and tree == T else Unary(argument, tree)
            part = part if carrier is None else Multiply(part, carrier)
            heads[stage.channel] = HeadClaim(part, argument, tree, carrier)
            parts[stage.name] = part
        return Derivation(tuple(_affine(output, parts) for output in outputs), heads)
    except (ExpressionError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"the stages of the certificate cannot be read: {type(error).__name__}: {error}") from None


def _affine(text: str, parts: Mapping[str, Part]) -> Part:
    """A combination of parts, as 2*x + -1*s_0 + 0.5."""
    (tree,) = Expression.parse(text).outputs
    terms, constant = list[tuple[Part, Coefficient]](), ZERO

    def add(node: Node, scale: Coefficient) -> None:
        nonlocal constant
        if is_constant(node):
            constant = constant + scale * Coefficient(node)
            return
        match node:
            case Variable(name):
                terms.append((parts[name], scale))
            case Negate(operand):
                add(operand, -scale)
            case Sum(summands):
                for summand in summands:
                    add(summand, scale)
            case Product((factor, operand)) if is_constant(factor):
                add(operand, scale * Coefficient(factor))
            case _:
                raise ValueError(f"{text!r} is not a combination of parts")

    add(tree, UNIT)
    return combination(terms, constant)
