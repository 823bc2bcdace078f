"""Smooth generalised linear losses A(z) − y·z, given as an expression A in z: the mean function A′ as keys of a head.

The derivative is symbolic. The head is fitted by `constructions.spectral_grid` and proved by `proofs.prover`:
|Σ_k weight_k(z)·v_k − A′(z)| ≤ error for all |z| ≤ reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

from attnc.constructions.beyond.spectral_grid import spectral_grid
from attnc.errors import InputError
from attnc.ir.normal_form import AttentionStage, normal_form
from attnc.ir.soft_head import SoftHead, unpacked
from attnc.numerics.intervals import Interval
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.prover import ProofRequest
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions import tree
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import substitute

SLOPES = {
    "exp": "exp(u)",
    "log": "1/u",
    "sqrt": "1/(2*sqrt(u))",
    "sin": "cos(u)",
    "cos": "-sin(u)",
    "tanh": "1 - tanh(u)**2",
    "sinh": "cosh(u)",
    "cosh": "sinh(u)",
    "atan": "1/(1 + u**2)",
    "erf": "2/sqrt(pi)*exp(-u**2)",
    "softplus": "sigmoid(u)",
    "sigmoid": "sigmoid(u)*sigmoid(-u)",
    "silu": "sigmoid(u)*(1 + u*sigmoid(-u))",
}
"""Function of u → its derivative."""
CURVATURE_CELLS = 4096
"""Number of cells on [−reach, reach] on which |A″| is enclosed. The number is not tuned."""


@dataclass(frozen=True, eq=False)
class MeanFunction:
    """A′ on [−reach, reach]: its text, keys that are within `error` of it, and a bound `curvature` of |A″|."""

    text: str
    reach: float
    keys: SoftHead[np.ndarray]
    error: float
    curvature: float

    def __call__(self, z: np.ndarray) -> np.ndarray:
        return np.asarray(Expression.parse(self.text).with_variables(("z",))(z.reshape(-1, 1))[:, 0]).reshape(z.shape)


def mean_function(loss: str, reach: float, eps: float) -> MeanFunction:
    """The mean function of the loss A(z) − y·z, for |z| ≤ reach, with a proved error of about eps.

    Parameters
    ----------
    loss : str
        The expression A in the variable z.
    reach : float
        The largest |z|.
    eps : float
        The error to aim at; `error` of the result is the proved one.

    Returns
    -------
    MeanFunction

    Raises
    ------
    InputError
        If A is not an expression in z alone, is linear, or is not smooth.
    """
    parsed = Expression.parse(loss)
    if parsed.variables != ("z",) or parsed.is_tuple:
        raise InputError(f"a loss is one expression A(z) in the variable z, for A(z) − y·z; found {loss!r:.80}")
    if not (np.isfinite(reach) and reach > 0):
        raise InputError(f"the reach of z is a positive number, found {reach!r}")
    text = tree.to_text(derivative(parsed.outputs[0]))
    mean = Expression.parse(text)
    if mean.variables != ("z",):
        raise InputError(f"the loss {loss!r} is linear: its mean function {text} does not depend on z")
    target = ExpressionTarget(mean, Box.parse({"z": (-reach, reach)}))
    built = spectral_grid(target, eps=eps)
    proven = LeavesProver().prove(built.program, target, ProofRequest(eps=eps))
    (stage,) = normal_form(built.program).stages
    assert isinstance(stage, AttentionStage)
    (head,) = stage.heads
    soft = head.soft_head(0)
    edges = np.linspace(-reach, reach, CURVATURE_CELLS + 1)
    cells = Interval(edges[:-1, None], edges[1:, None])
    _, gradients = mean.ranges_and_gradients(cells)
    curvature = float(np.maximum(np.abs(gradients.lo), np.abs(gradients.hi)).max())
    assert soft is not None
    keys = SoftHead(unpacked(soft.slopes), soft.offsets, soft.values[:, :1])
    return MeanFunction(text, reach, keys, proven.bound, curvature)


def derivative(node: tree.Node) -> tree.Node:
    """The derivative d/dz, without terms that are zero and factors that are one."""
    match node:
        case tree.Number() | tree.Constant():
            return _number(0)
        case tree.Variable():
            return _number(1)
        case tree.Sum(terms):
            return _sum(*map(derivative, terms))
        case tree.Negate(operand):
            return _negate(derivative(operand))
        case tree.Product(factors):
            return _sum(
                *(_product(*factors[:i], derivative(factor), *factors[i + 1 :]) for i, factor in enumerate(factors))
            )
        case tree.Quotient(dividend, divisor):
            if _is(derivative(divisor), 0):
                return _quotient(derivative(dividend), divisor)
            top = _sum(_product(derivative(dividend), divisor), _negate(_product(dividend, derivative(divisor))))
            return _quotient(top, tree.Power(divisor, _number(2)))
        case tree.Power(base, tree.Number(value)):
            return _product(_number(value), _power(base, value - 1), derivative(base))
        case tree.Power(base, exponent):
            return derivative(tree.Call("exp", (tree.Product((exponent, tree.Call("log", (base,)))),)))
        case tree.Call(name, (argument,)) if name in SLOPES:
            return _product(substitute(_slope(name), argument), derivative(argument))
        case tree.Call(name, _):
            raise InputError(f"use one of {', '.join(SLOPES)}: {name} is not smooth, or has no derivative here")


@cache
def _slope(name: str) -> tree.Node:
    return Expression.parse(SLOPES[name]).outputs[0]


def _number(value: int | Fraction) -> tree.Number:
    return tree.Number(Fraction(value))


def _is(node: tree.Node, value: int) -> bool:
    return isinstance(node, tree.Number) and node.value == value


def _sum(*terms: tree.Node) -> tree.Node:
    kept = tuple(term for term in terms if not _is(term, 0))
    return tree.Sum(kept) if len(kept) > 1 else (kept[0] if kept else _number(0))


def _product(*factors: tree.Node) -> tree.Node:
    if any(_is(factor, 0) for factor in factors):
        return _number(0)
    kept = tuple(factor for factor in factors if not _is(factor, 1))
    return tree.Product(kept) if len(kept) > 1 else (kept[0] if kept else _number(1))


def _quotient(dividend: tree.Node, divisor: tree.Node) -> tree.Node:
    return _number(0) if _is(dividend, 0) else tree.Quotient(dividend, divisor)


def _power(base: tree.Node, exponent: Fraction) -> tree.Node:
    return base if exponent == 1 else (_number(1) if exponent == 0 else tree.Power(base, _number(exponent)))


def _negate(node: tree.Node) -> tree.Node:
    return node if _is(node, 0) else tree.Negate(node)
