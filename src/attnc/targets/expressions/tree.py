"""The expression tree, its text, the order in which to evaluate it, and trees made from trees.

Numbers are exact: 0.1 is the fraction 1/10. Subtraction is a Sum with a Negate, so that a chain of + and − is one node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True)
class Number:
    """A rational number, exactly."""

    value: Fraction


@dataclass(frozen=True)
class Constant:
    """pi or e."""

    name: str


@dataclass(frozen=True)
class Variable:
    """A variable, by its name."""

    name: str


@dataclass(frozen=True)
class Sum:
    """terms[0] + terms[1] + …, from the left."""

    terms: tuple[Node, ...]


@dataclass(frozen=True)
class Product:
    """factors[0] * factors[1] * …, from the left."""

    factors: tuple[Node, ...]


@dataclass(frozen=True)
class Quotient:
    """dividend / divisor."""

    dividend: Node
    divisor: Node


@dataclass(frozen=True)
class Power:
    """base ** exponent."""

    base: Node
    exponent: Node


@dataclass(frozen=True)
class Negate:
    """−operand."""

    operand: Node


@dataclass(frozen=True)
class Call:
    """A call of a function of the registry in `functions`."""

    name: str
    arguments: tuple[Node, ...]


Node = Number | Constant | Variable | Sum | Product | Quotient | Power | Negate | Call


def children(node: Node) -> tuple[Node, ...]:
    """Return the operands, in order."""
    match node:
        case Sum(operands) | Product(operands) | Call(_, operands):
            return operands
        case Quotient(left, right) | Power(left, right):
            return (left, right)
        case Negate(operand):
            return (operand,)
        case _:
            return ()


def with_children(node: Node, operands: Sequence[Node]) -> Node:
    """Return the same operation on other operands."""
    match node:
        case Sum() | Product():
            return type(node)(tuple(operands))
        case Quotient() | Power():
            return type(node)(*operands)
        case Negate():
            return Negate(*operands)
        case Call(name):
            return Call(name, tuple(operands))
        case _:
            return node


@dataclass(frozen=True)
class Step:
    """Evaluate `node` from the results of the steps numbered `arguments`."""

    node: Node
    arguments: tuple[int, ...]


def schedule(outputs: Sequence[Node]) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Return the steps that evaluate the outputs, operands first, and the numbers of the outputs among them."""
    steps: list[Step] = []
    by_key: dict[Hashable, int] = {}
    by_id: dict[int, int] = {}  # keys hold the numbers of the operands, so that no key is deep
    pending: list[Node] = list(reversed(outputs))
    while pending:
        node = pending[-1]
        if id(node) in by_id:
            pending.pop()
            continue
        missing = [child for child in children(node) if id(child) not in by_id]
        if missing:
            pending.extend(reversed(missing))
            continue
        arguments = tuple(by_id[id(child)] for child in children(node))
        label = node if not arguments else (type(node), node.name if isinstance(node, Call) else "")
        number = by_key.setdefault((label, arguments), len(steps))
        if number == len(steps):
            steps.append(Step(node, arguments))
        by_id[id(node)] = number
        pending.pop()
    return tuple(steps), tuple(by_id[id(node)] for node in outputs)


def walk(outputs: Sequence[Node]) -> Iterator[Node]:
    """Yield every distinct sub-expression, operands first."""
    for step in schedule(outputs)[0]:
        yield step.node


def is_constant(tree: Node) -> bool:
    """Return whether no variable occurs in the tree."""
    return not any(isinstance(node, Variable) for node in walk([tree]))


def folded(outputs: Sequence[Node], operation: Callable[[Node, list[Made]], Made]) -> list[Made]:
    """Return the results of the outputs.

    Each step is operation(node, results of its operands), once for equal nodes.
    """
    steps, numbers = schedule(outputs)
    made: list[Made] = []
    for step in steps:
        made.append(operation(step.node, [made[i] for i in step.arguments]))
    return [made[i] for i in numbers]


def substitute(tree: Node, argument: Node) -> Node:
    """Return tree(t) at t = argument. Shared sub-expressions stay shared."""

    def operation(node: Node, operands: list[Node]) -> Node:
        return argument if isinstance(node, Variable) else with_children(node, operands)

    return folded([tree], operation)[0]


_SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(5)


def to_text(node: Node) -> str:
    """Return text that parses back to an equal tree."""
    return _render(node)[0]


def _render(node: Node) -> tuple[str, int]:
    """Return the text and how tightly it binds."""
    match node:
        case Number(value):
            return _number_text(value)
        case Constant(name) | Variable(name):
            return name, _ATOM
        case Sum(terms):
            text = _in(terms[0], _SUM)
            for term in terms[1:]:
                if isinstance(term, Negate):
                    text += " - " + _in(term.operand, _PRODUCT)
                elif isinstance(term, Number) and term.value < 0:
                    text += " - " + _in(Number(-term.value), _PRODUCT)
                else:
                    text += " + " + _in(term, _PRODUCT)
            return text, _SUM
        case Product(factors):
            return "*".join([_in(factors[0], _PRODUCT), *(_in(factor, _SIGN) for factor in factors[1:])]), _PRODUCT
        case Quotient(dividend, divisor):
            return f"{_in(dividend, _PRODUCT)}/{_in(divisor, _SIGN)}", _PRODUCT
        case Negate(operand):
            return "-" + _in(operand, _SIGN), _SIGN
        case Power(base, exponent):
            return f"{_in(base, _ATOM)}**{_in(exponent, _SIGN)}", _POWER
        case Call(name, arguments):
            return f"{name}({', '.join(to_text(argument) for argument in arguments)})", _ATOM


def _in(node: Node, least: int) -> str:
    """Return the text of an operand, in parentheses if it binds less tightly than `least`."""
    text, binding = _render(node)
    return text if binding >= least else f"({text})"


def _number_text(value: Fraction) -> tuple[str, int]:
    """Return digits, a decimal (with an exponent if long), or a quotient of integers."""
    if value < 0:
        text, binding = _number_text(-value)
        return "-" + text, min(binding, _SIGN)
    numerator, denominator = value.numerator, value.denominator
    if denominator == 1 and numerator < 10**16:
        return str(numerator), _ATOM
    shift = next((n for n in range(denominator.bit_length()) if 10**n % denominator == 0), None)
    if shift is None:
        return f"{numerator}/{denominator}", _PRODUCT
    numerator = numerator * 10**shift // denominator
    digits = str(numerator)
    if 0 < shift <= 20:
        digits = digits.rjust(shift + 1, "0")
        return f"{digits[:-shift]}.{digits[-shift:]}", _ATOM
    stripped = digits.rstrip("0")
    return f"{stripped}e{len(digits) - len(stripped) - shift}", _ATOM
