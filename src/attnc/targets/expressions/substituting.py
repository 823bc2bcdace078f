"""Trees made from trees: with other operands, or with an argument in place of the variable."""

from __future__ import annotations

from collections.abc import Sequence

from attnc.targets.expressions.tree import Call, Negate, Node, Power, Product, Quotient, Sum, Variable, schedule


def is_constant(tree: Node) -> bool:
    return not any(isinstance(step.node, Variable) for step in schedule([tree])[0])


def substitute(tree: Node, argument: Node) -> Node:
    """tree(t) at t = argument; shared sub-expressions stay shared."""
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
