"""Taylor polynomials by power series of Arb: values at points of the box, and coefficients."""

from __future__ import annotations

from collections.abc import Callable

import flint
import numpy as np
from flint import arb, arb_series

from attnc.numerics.jet_tables import monomials
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import Taylor, taylor
from strategies.reference import TreeArithmetic, monomial, precision, tree_value


def boxes(expression: Expression, count: int, seed: int, low: float = -1.0, high: float = 1.0, widest: float = 0.3):
    """Centres and radii of boxes in [low, high]^d, from very small ones to wide ones."""
    rng = np.random.default_rng(seed)
    shape = (count, len(expression.variables))
    radii = (high - low) * np.minimum(10.0 ** rng.uniform(-8, 0, shape), widest) / 2
    radii[rng.random(shape) < 0.05] = 0.0
    centres = rng.uniform(low, high, shape)
    return np.clip(centres, low + radii, high - radii), radii


def check_points(expression: Expression, centres: np.ndarray, radii: np.ndarray, order: int, result: Taylor, seed: int):
    """|f(c + rτ) − Σ mid_j τ^j| ≤ Σ radius_j |τ^j| + max|τ|^{m+1}·remainder at corners and at random."""
    rng = np.random.default_rng(seed)
    d = len(expression.variables)
    exponents = monomials(d, order).tolist()
    points = np.concatenate([np.zeros((1, d)), rng.choice([-1.0, 1.0], (3, d)), rng.uniform(-1, 1, (3, d))])
    for box, output in zip(*np.nonzero(np.isfinite(result.remainder)), strict=True):
        mid, radius = result.mid[box, output].tolist(), result.radius[box, output].tolist()
        for point in points.tolist():
            tau = [arb(t) for t in point]
            at = [arb(c) + arb(r) * t for c, r, t in zip(centres[box].tolist(), radii[box].tolist(), tau, strict=True)]
            value = tree_value(expression.outputs[output], dict(zip(expression.variables, at, strict=True)))
            error, allowed = value, arb(float(result.remainder[box, output]))
            for _ in range(order + 1):
                allowed = allowed * arb(max(map(abs, point), default=0.0))
            for j, m, r in zip(exponents, mid, radius, strict=True):
                if m or r:
                    power = monomial(tau, j)
                    error, allowed = error - arb(m) * power, allowed + arb(r) * abs(power)
            assert error.is_finite()
            assert not abs(error) > allowed, (expression.text, centres[box], radii[box], point, error, allowed)


SERIES: dict[str, Callable[[arb_series], arb_series]] = {
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2,
    "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "softplus": lambda x: (1 + x.exp()).log(),
    "gelu": lambda x: x * (1 + (x * (1 / arb(2).sqrt())).erf()) / 2,
    **{name: getattr(arb_series, name) for name in ("sin", "cos", "tan", "exp", "log", "sqrt")},
    **{name: getattr(arb_series, name) for name in ("atan", "asin", "acos", "erf")},
}


along_a_line = TreeArithmetic(
    SERIES, lambda ball: arb_series([ball]), lambda base, exponent: (base.log() * exponent).exp()
)
"""Series of trees without kinks along a line."""


def line_coefficients(expression: Expression, centre: np.ndarray, radius: np.ndarray, along: np.ndarray, order: int):
    """The coefficients of s^k in f(c + r·s·τ), k ≤ order, for each output: Σ_{|j|=k} p_j τ^j."""
    before = flint.ctx.cap
    flint.ctx.cap = order + 1
    try:
        point = {
            name: arb_series([arb(c), arb(r) * arb(t)])
            for name, c, r, t in zip(expression.variables, centre, radius, along, strict=True)
        }
        series = [along_a_line.value(output, point) for output in expression.outputs]
        return [[each[k] for k in range(order + 1)] for each in series]
    finally:
        flint.ctx.cap = before


def check_coefficients(expression: Expression, centres, radii, order: int, result: Taylor, seed: int) -> None:
    """Along random lines through the centre, degree by degree: the enclosures contain Arb's coefficients."""
    rng = np.random.default_rng(seed)
    d = len(expression.variables)
    exponents = monomials(d, order)
    degrees = exponents.sum(axis=1)
    for box in range(len(centres)):
        along = rng.integers(-4, 5, d) / 4  # so that τ^j is exact
        powers = np.prod(along**exponents, axis=1)
        exact = line_coefficients(expression, centres[box].tolist(), radii[box].tolist(), along.tolist(), order)
        for output in range(len(expression.outputs)):
            if not np.isfinite(result.remainder[box, output]):
                continue
            for k in range(order + 1):
                difference, allowed = exact[output][k], arb(0)
                known = np.stack([result.mid[box, output], result.radius[box, output], powers], axis=1)
                for m, r, t in known[degrees == k].tolist():
                    difference, allowed = difference - arb(m) * arb(t), allowed + arb(r) * abs(arb(t))
                assert difference.is_finite()
                assert not abs(difference) > allowed, (expression.text, centres[box], radii[box], k, difference)


def check(expression: Expression, centres, radii, order: int, seed: int = 0, *, lines: bool = True) -> Taylor:
    result = taylor(expression, centres, radii, order)
    assert result.mid.shape == result.radius.shape
    assert np.isfinite(result.mid).all()
    assert np.isfinite(result.radius).all()
    assert (result.radius >= 0).all()
    assert (result.remainder >= 0).all()
    with precision(300):
        check_points(expression, centres, radii, order, result, seed)
        if lines:
            check_coefficients(expression, centres, radii, order, result, seed)
    return result
