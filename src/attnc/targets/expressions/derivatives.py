"""The partial derivatives of an expression, as an expression of the same language.

Every function of the registry states its derivative as a text in t. At a kink a derivative has the value between both
sides that `sign(0) = 0` gives. Proofs do not use it: they exclude a neighbourhood of each kink.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from attnc.errors import ExpressionError
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.parsing import parse
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
    folded,
    substitute,
)

ZERO, ONE, HALF = Number(Fraction(0)), Number(Fraction(1)), Number(Fraction(1, 2))

Pair = tuple[Node, Node]
"""A sub-expression and its derivative."""


def gradient(expression: Expression) -> Expression:
    """Return ∂f_o/∂x_i as one expression. Its outputs are ordered by o, then by i.

    Raise ExpressionError if a function has no derivative, such as floor.
    """
    outputs = tuple(
        derivative for tree in expression.outputs for derivative in _derivatives(tree, expression.variables)
    )
    return replace(expression, text=f"gradient of {expression.text}", outputs=outputs, is_tuple=True)


def _derivatives(tree: Node, variables: Sequence[str]) -> list[Node]:
    return [folded([tree], functools.partial(_step, name))[0][1] for name in variables]


def _step(name: str, node: Node, operands: list[Pair]) -> Pair:
    """Return the node on these operands, and its derivative in the variable `name`."""
    trees, slopes = [tree for tree, _ in operands], [slope for _, slope in operands]
    match node:
        case Variable(own):
            return node, ONE if own == name else ZERO
        case Number() | Constant():
            return node, ZERO
        case Sum():
            return Sum(tuple(trees)), _sum(slopes)
        case Negate():
            return Negate(trees[0]), _negated(slopes[0])
        case Product():
            terms = [_product([*trees[:i], slope, *trees[i + 1 :]]) for i, slope in enumerate(slopes)]
            return Product(tuple(trees)), _sum(terms)
        case Quotient():
            quotient = Quotient(*trees)
            rest = _sum([slopes[0], _negated(_product([quotient, slopes[1]]))])
            return quotient, rest if rest == ZERO else Quotient(rest, trees[1])
        case Power():
            return Power(*trees), _of_power(trees, slopes)
        case Call(called):
            return Call(called, tuple(trees)), _of_call(called, trees, slopes)


def _of_power(trees: Sequence[Node], slopes: Sequence[Node]) -> Node:
    """(u^v)′ = v·u^(v−1)·u′ + u^v·log(u)·v′."""
    u, v = trees
    if isinstance(v, Number):
        lower = ONE if v.value == 1 else u if v.value == 2 else Power(u, Number(v.value - 1))
        return _product([v, lower, slopes[0]])
    by_base = _product([v, Power(u, Sum((v, Number(Fraction(-1))))), slopes[0]])
    return _sum([by_base, _product([Power(u, v), Call("log", (u,)), slopes[1]])])


def _of_call(name: str, trees: Sequence[Node], slopes: Sequence[Node]) -> Node:
    if all(slope == ZERO for slope in slopes):
        return ZERO
    if name == "clip":
        (u, low, high), (du, dlow, dhigh) = trees, slopes
        raised = Call("max", (u, low))
        return _chosen(raised, high, _chosen(u, low, du, dlow, largest=True), dhigh, largest=False)
    if name in ("max", "min"):
        best, slope = trees[0], slopes[0]
        for tree, other in zip(trees[1:], slopes[1:], strict=True):
            slope = _chosen(best, tree, slope, other, largest=name == "max")
            best = Call(name, (best, tree))
        return slope
    text = FUNCTIONS[name].derivative
    if text is None:
        raise ExpressionError(f"{name} has no derivative: certify the value alone, or write it without {name}", name)
    (outer,), _, _ = parse(text)
    return _product([substitute(outer, trees[0]), slopes[0]])


def _chosen(a: Node, b: Node, of_a: Node, of_b: Node, *, largest: bool) -> Node:
    """Return the derivative of the larger of two trees, or of the smaller: H·a′ + (1 − H)·b′ with H in {0, 1}."""
    side = Call("sign", (Sum((a, Negate(b))) if largest else Sum((b, Negate(a))),))
    wins, loses = (Product((HALF, Sum((ONE, each)))) for each in (side, Negate(side)))
    return _sum([_product([wins, of_a]), _product([loses, of_b])])


def _sum(terms: Sequence[Node]) -> Node:
    kept = [term for term in terms if term != ZERO]
    return ZERO if not kept else kept[0] if len(kept) == 1 else Sum(tuple(kept))


def _product(factors: Sequence[Node]) -> Node:
    if ZERO in factors:
        return ZERO
    kept = [factor for factor in factors if factor != ONE]
    return ONE if not kept else kept[0] if len(kept) == 1 else Product(tuple(kept))


def _negated(tree: Node) -> Node:
    return ZERO if tree == ZERO else Negate(tree)
