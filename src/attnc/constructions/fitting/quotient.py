"""Heads of one variable whose offsets are fitted together with their values: quotients of two polynomials.

With equally spaced slopes 2L_k = 2k − (p − 1) and z = e^{2y}, a head is N(z)/D(z). The denominator D has the
coefficients e^{c_k} > 0, and N has the coefficients v_k e^{c_k}. A `Lattice` fixes D by c_k = −cL_k² and solves for N.
Here D is fitted as well, so that about two thirds as many keys are enough. The slopes remain equally spaced.

For given offsets and spacing the best values are linear least squares. Levenberg's method moves the offsets and the
logarithm of the spacing along the residual of that problem (variable projection: Golub and Pereyra, SIAM J. Numer.
Anal. 10, 1973). It starts from the best lattice. A ridge keeps the values small: it falls with the error, since a
small ridge makes large values before the error is small. Lawson's method then makes the largest errors equal.
"""

from __future__ import annotations

import math

import numpy as np

from attnc.constructions.fitting.axis import AxisSections, KeysOnAxis, Lattice, stored_coordinate
from attnc.constructions.fitting.circuit import PartFit
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.stored_head import stored
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.limits import check_time, spend

MOST_FITTED = 40
"""Largest number of keys whose offsets are fitted. A fit of 40 keys takes 0.1 s."""
MAX_STEPS = 80
"""Maximum number of steps of the offsets. Measured with 52 fits: 60 steps change no error by more than 10 %."""
NODES_PER_KEY, SPARE_NODES = 3, 12
"""Number of points of a fit: so many for each key, and some more. Measured with 42 fits: two per key do as well."""
RIDGE = 2.0
"""The ridge, in units of error/limit: with values at their limit it adds this multiple of the error to the residual.
Measured with 52 fits: the mean error is three times as large with 1 and with 4."""
RIDGE_STEP = 0.5
RIDGE_FLOOR = 0.25
FIRST_DAMPING, MORE_DAMPING, LESS_DAMPING = 10.0, 10.0, 3.0
"""Damping of a step in units of the squared residual, and its factors after a step that failed and one that did not. A
step of all offsets by 1 then costs as much as the residual. Measured with 42 fits: 0.01 at first doubles the errors."""
MAX_REFUSALS = 5
"""Number of dampings that are tried for one step."""
IDLE_STEPS, IDLE_RATIO = 6, 0.9
"""Stop if so many steps leave more than this share of the squared residual."""
ENOUGH = 0.2
"""Stop when the root mean square of the residual is below this share of the goal."""
OUT_OF_REACH = 1e5
"""Largest ratio of the error of a lattice to the goal from which offsets are fitted."""
LAWSON_PASSES = 10
"""Number of reweightings after the offsets are fixed."""
POINTS_PER_KEY, SPARE_POINTS = 6, 40
"""Number of points of the last fit: so many for each key, and some more. Between them the error is 1 % larger."""
STEP_SECONDS = 1e-8
"""Counted seconds of a step, for each point and each pair of keys."""


def quotient(f: Function, lo: float, hi: float, p: int, goal: float, limit: float, dtype: str) -> PartFit | None:
    """Return p keys for f on [lo, hi] with |values| ≤ limit, or None if no lattice has such values.

    The search stops when the error is below the goal. Slopes and offsets are rounded to `dtype` before the values are
    solved for.
    """
    middle, half = lo / 2 + hi / 2, hi / 2 - lo / 2

    def on_unit(t: np.ndarray) -> np.ndarray:
        return f(np.clip(middle + half * t, lo, hi))

    def sections(t: np.ndarray) -> np.ndarray:
        return on_unit(t)[:, None]

    start = AxisSections(-1.0, 1.0, sections, sections).best(p, limit, goal)
    if start is None:
        return None
    lattice = start.lattice
    spacing, offsets = lattice.c * lattice.spacings, -lattice.c * lattice.anchors**2
    if p > 1 and goal < start.error <= OUT_OF_REACH * goal:
        spacing, offsets = _moved(on_unit, spacing, offsets, goal, limit)
    scale, shift = stored_coordinate(spacing / (hi - lo), middle, dtype)
    on_axis = KeysOnAxis(scale, shift, lattice.anchors, stored(offsets, dtype))
    x = chebyshev(lo, hi, POINTS_PER_KEY * p + SPARE_POINTS)
    values, error = fit_values(on_axis.weights(x), f(x)[:, None], np.array([limit]), LAWSON_PASSES, ENOUGH * goal)
    keys = SoftHead(2 * on_axis.anchors[:, None], on_axis.bias, values)
    return PartFit(keys, error, scale, shift)


def _moved(
    f: Function, spacing: float, offsets: Float[np.ndarray, " p"], goal: float, limit: float
) -> tuple[float, Float[np.ndarray, " p"]]:
    """Move the spacing and the offsets until the residual is small, or no longer falls."""
    p = len(offsets)
    m = NODES_PER_KEY * p + SPARE_NODES
    t, L, unit = np.cos(np.pi * (np.arange(m) + 0.5) / m), Lattice(p).anchors, np.eye(p)
    wanted, ridge_per_error = np.concatenate([f(t), np.zeros(p)]), RIDGE * math.sqrt(m / p) / limit

    def solve(place: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the weights, an orthonormal basis of the columns of the problem, the values and the residual."""
        spend(STEP_SECONDS * m * p**2)
        weights = softmax(np.multiply.outer(t, math.exp(place[0]) * L) + place[1:])
        Q, R = np.linalg.qr(np.concatenate([weights, ridge * unit]))
        along = Q.T @ wanted
        return weights, Q, np.linalg.solve(R, along), wanted - Q @ along

    def error_of(residual: np.ndarray) -> float:
        return max(RIDGE_FLOOR * goal, math.sqrt(residual[:m] @ residual[:m] / m))

    place = np.concatenate([[math.log(spacing)], offsets])
    ridge = RIDGE * math.sqrt(m / p)
    for _ in range(MAX_REFUSALS):  # the ridge depends on the error, and the error a little on the ridge
        weights, Q, values, residual = solve(place, ridge)
        less = ridge_per_error * error_of(residual)
        if less > ridge / 2:
            break
        ridge = less
    squares, damping, past = residual @ residual, FIRST_DAMPING, list[float]()
    moves = np.zeros((m + p, p + 1))
    for _ in range(MAX_STEPS):
        check_time("fitting")
        moves[:m, 1:] = weights * (values - (weights @ values)[:, None])
        moves[:m, 0] = math.exp(place[0]) * t * (moves[:m, 1:] @ L)
        U, S, Vt = np.linalg.svd(moves - Q @ (Q.T @ moves), full_matrices=False)
        along = U.T @ residual
        for _ in range(MAX_REFUSALS):
            new = place + Vt.T @ (S / (S**2 + damping * squares) * along)
            found = solve(new, ridge)
            if found[3] @ found[3] < squares:
                break
            damping *= MORE_DAMPING
        else:
            break
        place, (weights, Q, values, residual), damping = new, found, damping / LESS_DAMPING
        less = ridge_per_error * error_of(residual)
        if less < RIDGE_STEP * ridge:
            ridge = less
            weights, Q, values, residual = solve(place, ridge)
        squares = residual @ residual
        past.append(squares)
        is_idle = len(past) > IDLE_STEPS and past[-1] > IDLE_RATIO * past[-1 - IDLE_STEPS]
        if is_idle or residual[:m] @ residual[:m] < m * (ENOUGH * goal) ** 2:
            break
    return math.exp(place[0]), place[1:] - place[1 + p // 2]
