"""Smooth generalised linear losses A(z) − y·z, given as an expression A in z, with the mean function A′ as a head.

The derivative is symbolic. `constructions.spectral_grid` fits the head, and `proofs.leaves_prover` proves
|Σ_k weight_k(z)·v_k − A′(z)| ≤ error for all |z| ≤ reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

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
"""Name of a function of u → its derivative."""
CURVATURE_CELLS = 4096
"""Number of cells on [−reach, reach] on which |A″| is enclosed. Measured for
A′ = silu: the bound is 0.1 % above the largest |A″|, and the computation takes 40 ms."""


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
    """Return the mean function of the loss A(z) − y·z for |z| ≤ reach, with a proved error of about eps.

    Parameters
    ----------
    loss : str
        The expression A in the variable z.
    reach : float
        The largest |z|.
    eps : float
        The error to aim at. The proved error is `error` of the result.

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
    curvature = float(gradients.mag.max())
    assert soft is not None
    keys = SoftHead(unpacked(soft.slopes), soft.offsets, soft.values[:, :1])
    return MeanFunction(text, reach, keys, proven.bound, curvature)


def derivative(node: tree.Node) -> tree.Node:
    """Return d/dz by the chain rule: Σ ∂node/∂operand · operand′ over the operands that depend on z."""
    if isinstance(node, tree.Variable):
        return _number(1)
    terms = tuple(
        _product(partial, derivative(operand))
        for operand, partial in zip(tree.children(node), _partials(node), strict=True)
        if not tree.is_constant(operand)
    )
    return tree.Sum(terms) if len(terms) > 1 else (terms[0] if terms else _number(0))


def _partials(node: tree.Node) -> list[tree.Node]:
    """Return the derivatives of an operation with respect to its operands."""
    match node:
        case tree.Sum(terms):
            return [_number(1)] * len(terms)
        case tree.Negate():
            return [_number(-1)]
        case tree.Product(factors):
            return [_product(*factors[:i], *factors[i + 1 :]) for i in range(len(factors))]
        case tree.Quotient(dividend, divisor):
            square = tree.Power(divisor, _number(2))
            return [tree.Quotient(_number(1), divisor), tree.Negate(tree.Quotient(dividend, square))]
        case tree.Power(base, tree.Number(value) as exponent):
            power = base if value == 2 else tree.Power(base, _number(value - 1))
            return [_product(exponent, power), _number(0)]
        case tree.Power(base, exponent):
            power = tree.Power(base, tree.Sum((exponent, _number(-1))))
            return [_product(exponent, power), _product(node, tree.Call("log", (base,)))]
        case tree.Call(name, (argument,)) if name in SLOPES:
            return [tree.substitute(Expression.parse(SLOPES[name]).outputs[0], argument)]
        case tree.Call(name, _):
            raise InputError(f"use one of {', '.join(SLOPES)}: {name} is not smooth, or has no derivative here")
    return []


def _number(value: int | Fraction) -> tree.Number:
    return tree.Number(Fraction(value))


def _product(*factors: tree.Node) -> tree.Node:
    kept = tuple(factor for factor in factors if factor != _number(1))
    return tree.Product(kept) if len(kept) > 1 else (kept[0] if kept else _number(1))
