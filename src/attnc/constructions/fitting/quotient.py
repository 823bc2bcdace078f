"""Heads of one variable whose scores are fitted together with their values.

With equally spaced slopes 2L_k = 2k − (p − 1) and z = e^{2y}, a head is a quotient N(z)/D(z) of polynomials. D has the
coefficients e^{c_k} > 0, and N has the coefficients v_k e^{c_k}. A `Lattice` fixes D by c_k = −cL_k² and solves for N.
Here D is fitted as well, so that about two thirds as many keys are enough, and the slopes remain equally spaced.

The zeros of D are never real. So for a function with a singularity beside one end of the interval, such as log t or
1/t, equally spaced slopes are poor. Keys that are denser towards that end have slopes of their own, which are fitted
too.

For given scores the best values are linear least squares. Levenberg's method moves the offsets and the spacing, or the
offsets and the slopes, along the residual of that problem (variable projection: Golub and Pereyra, SIAM J. Numer.
Anal. 10, 1973). A ridge keeps the values small. It is proportional to the error: a smaller one makes large values
before the error is small. Lawson's method then makes the largest errors equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from attnc.constructions.fitting.axis import AxisSections, Lattice, keys_at_nodes, stored_coordinate
from attnc.constructions.fitting.circuit import PartFit
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.stored_head import stored
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.limits import check_time, spend
from attnc.numerics.small_matrices import orthonormal_factors, singular_values, triangular_solution

# The constants were measured with 49 fits of 14 functions to 1e-3 … 1e-9. Together they take 641 keys; lattices 943.
MOST_MOVED = 48
"""Largest number of keys whose scores are moved. A fit of 48 keys takes 0.1 s."""
MAX_STEPS = 80
"""Maximum number of steps. With 30 the 49 fits take 690 keys instead of 641, in three quarters of the time."""
IDLE_STEPS, IDLE_RATIO = 6, 0.9
"""Stop if this number of steps leaves more than this share of the squared residual. With 16 and up to 200 steps there
are 619 keys, in 1.4 times the time."""
NODES_PER_KEY, SPARE_NODES = 3, 12
"""Number of points of a fit: a number for each key, and some more. Two for each key do as well."""
RIDGE = 2.0
"""The ridge in units of error/limit. If all values are at their limit, it adds this multiple of the error to the
residual. With 1 there are 2 % more keys, with 0.5 and with 4 there are 6 % more."""
RIDGE_FLOOR = 0.25
"""Least error that the ridge is proportional to, as a share of the goal. Half and twice as much change 1 % of the
keys."""
FIRST_DAMPING, MORE_DAMPING, LESS_DAMPING = 10.0, 10.0, 3.0
"""Damping of the first step in units of the squared residual, and its factor after a step that fails and its divisor
after one that does not. Offsets change by about 1/3 at first. With a first damping of 1 there are 1 % more keys."""
MAX_REFUSALS = 5
"""Maximum number of dampings for one step, and of corrections of the first ridge. Later ones never helped."""
ENOUGH = 0.2
"""Stop when the root mean square of the residual is below this share of the goal. With 0.4 there are as many keys."""
OUT_OF_REACH = 1e5
"""Largest ratio of an error to the goal from which scores are moved. Moving them gains a factor of 10⁴ at most, except
for functions that are a head themselves."""
GRADES, GRADED_SOFTNESS = (30.0, 1e3, 1e6), (0.4, 0.15)
"""Ratios of the largest to the least gap between graded keys, and leads of keys over their neighbours (`keys_at_nodes`)
with which a fit begins. √t on [0, 1] to 1e-3 needs the last grade."""
MAX_STARTS = 2
"""Number of grades from which graded keys are moved, the best ones first. With one, 1/t may take twice the keys."""
LAWSON_PASSES = 10
"""Maximum number of reweightings after the scores are fixed."""
POINTS_PER_KEY, SPARE_POINTS = 6, 40
"""Number of points of the last fit: a number for each key, and some more. Between them errors are up to 1 % larger."""
STEP_SECONDS = 1e-8
"""Counted seconds of a step, for each point and each pair of keys."""


@dataclass(frozen=True, eq=False)
class StartingScores:
    """StartingScores slope_k·t + offset_k on [−1, 1], the points at which they are fitted, and the error before that.

    The slopes are `moves` times some parameters. A single column keeps them equally spaced.
    """

    slopes: Float[np.ndarray, " p"]
    offsets: Float[np.ndarray, " p"]
    moves: Float[np.ndarray, "p parameters"]
    points: Float[np.ndarray, " points"]
    error: float
    end: float = 0.0  # the end of [−1, 1] towards which keys are denser: −1 or 1, and 0 for a lattice
    grade: float = 1.0  # the ratio of the largest to the least gap between keys
    values: Float[np.ndarray, "p 1"] | None = None  # those of a lattice, before it is moved


def even_scores(f: Function, p: int, goal: float, limit: float) -> list[StartingScores]:
    """Return the best lattice of p keys for f on [−1, 1], if one has values up to `limit`."""

    def sections(t: np.ndarray) -> np.ndarray:
        return f(t)[:, None]

    found = AxisSections(-1.0, 1.0, sections, sections).best(p, limit, goal)
    if found is None:
        return []
    L, c = found.lattice.anchors, found.lattice.c
    slopes, points = c * found.lattice.spacings * L, _nodes(NODES_PER_KEY * p + SPARE_NODES)
    values = found.solve(sections(found.nodes()))
    return [StartingScores(slopes, -c * L**2, slopes[:, None], points, found.error, values=values)]


def graded_scores(f: Function, p: int, goal: float, limit: float) -> list[StartingScores]:
    """Return p keys that are ever denser towards one end of [−1, 1], for each grade, the best first."""

    def tried(end: float, grade: float, c: float) -> StartingScores:
        anchors, offsets = keys_at_nodes(np.sort(_graded(np.linspace(0.0, 1.0, p), end, grade)), c)
        nodes = _nodes(NODES_PER_KEY * p // 2 + SPARE_NODES)
        points = np.concatenate([nodes, _graded((nodes + 1) / 2, end, grade)])
        start = StartingScores(2 * anchors, offsets, np.eye(p), points, math.inf, end, grade)
        residual = _Projection(f, start, goal, limit).state.residual
        return replace(start, error=float(np.abs(residual[: len(points)]).max()))

    if p == 1:
        return []
    end = min((-1.0, 1.0), key=lambda end: tried(end, GRADES[0], GRADED_SOFTNESS[0]).error)
    best = [min((tried(end, grade, c) for c in GRADED_SOFTNESS), key=lambda scores: scores.error) for grade in GRADES]
    return sorted(best, key=lambda scores: scores.error)


def _graded(s: Float[np.ndarray, " points"], end: float, grade: float) -> Float[np.ndarray, " points"]:
    """Map [0, 1] to [−1, 1] so that points are `grade` times as dense at this end as at the other."""
    return end * (1 - 2 * (grade**s - 1) / (grade - 1))


def _nodes(count: int) -> Float[np.ndarray, " count"]:
    """Return Chebyshev points of [−1, 1], without the ends."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def quotient(
    f: Function, lo: float, hi: float, p: int, goal: float, limit: float, dtype: str, is_even: bool = True
) -> PartFit | None:
    """Return p keys for f on [lo, hi] with |values| ≤ limit, or None if no lattice has such values.

    The search stops when the error is below the goal.
    """
    on_unit = unit_function(f, lo, hi)
    found: PartFit | None = None
    for scores in (even_scores if is_even else graded_scores)(on_unit, p, goal, limit)[:MAX_STARTS]:
        if 1 < p <= MOST_MOVED and goal < scores.error <= OUT_OF_REACH * goal:
            scores = _Projection(on_unit, scores, goal, limit).moved()
        fit = _solved(f, lo, hi, scores, goal, limit, dtype)
        found = fit if found is None or fit.error < found.error else found
        if found.error <= goal:
            break
    return found


def _solved(f: Function, lo: float, hi: float, found: StartingScores, goal: float, limit: float, dtype: str) -> PartFit:
    """Return the head with these scores. They are rounded to `dtype` before the values are solved for."""
    p, is_even = len(found.offsets), found.end == 0
    t = chebyshev(-1.0, 1.0, POINTS_PER_KEY * p + SPARE_POINTS)
    if is_even:  # in units of half the spacing, slopes are exact in every dtype
        unit = (found.slopes[-1] - found.slopes[0]) / (2 * (p - 1)) if p > 1 else 1.0
        slopes, offsets = 2 * Lattice(p).anchors, found.offsets - found.offsets[p // 2]
    else:  # the coordinate is 0 where keys are closest, and the key that leads at the other end has the score 0
        unit, last = 1.0, np.argmax(-found.end * found.slopes)
        offsets = found.offsets + found.slopes * found.end
        slopes, offsets = found.slopes - found.slopes[last], offsets - offsets[last]
        t = np.concatenate([t, _graded((t + 1) / 2, found.end, found.grade)])
    middle, half = lo / 2 + hi / 2, hi / 2 - lo / 2
    scale, shift = stored_coordinate(unit / half, middle + found.end * half, dtype)
    x = np.clip(middle + half * t, lo, hi)
    keys = SoftHead.of_one_variable(stored(slopes, dtype), stored(offsets, dtype), np.zeros(p))
    weights = keys.weights((scale * x + shift)[:, None])
    values, error = fit_values(weights, f(x)[:, None], np.array([limit]), LAWSON_PASSES, ENOUGH * goal)
    if found.values is not None:
        before = float(np.abs(weights @ found.values - f(x)[:, None]).max())
        values, error = (found.values, before) if before < error else (values, error)
    return PartFit(replace(keys, values=values), error, scale, shift)


def unit_function(f: Function, lo: float, hi: float) -> Function:
    """Return f on [lo, hi] as a function on [−1, 1]."""
    return lambda t: f(np.clip(lo / 2 + hi / 2 + (hi / 2 - lo / 2) * t, lo, hi))


class _State(NamedTuple):
    """The solution for given scores: weights, an orthonormal basis of the columns, values and residual."""

    weights: np.ndarray
    basis: np.ndarray
    values: np.ndarray
    residual: np.ndarray


class _Projection:
    """Least squares with values eliminated, as a function of slopes and offsets.

    The residual has a row for each point, and one for each value times the ridge.
    """

    def __init__(self, f: Function, start: StartingScores, goal: float, limit: float) -> None:
        self.start, self.goal, self.p, self.m = start, goal, len(start.offsets), len(start.points)
        self.wanted = np.concatenate([f(start.points), np.zeros(self.p)])
        most = RIDGE * math.sqrt(self.m / self.p)
        self.per_error, self.ridge = most / limit, most
        self.state = self._solve(start.slopes, start.offsets)
        for _ in range(MAX_REFUSALS):  # the ridge depends on the error, and the error a little on the ridge
            if not self._lower_ridge(start.slopes, start.offsets):
                break

    def _solve(self, slopes: np.ndarray, offsets: np.ndarray) -> _State:
        spend(STEP_SECONDS * self.m * self.p**2)
        weights = softmax(np.multiply.outer(self.start.points, slopes) + offsets)
        Q, R = orthonormal_factors(np.concatenate([weights, self.ridge * np.eye(self.p)]))
        along = Q.T @ self.wanted
        values = triangular_solution(R, along)
        if values is None:
            raise np.linalg.LinAlgError("the equations for the values are singular")
        return _State(weights, Q, values, self.wanted - Q @ along)

    @property
    def error(self) -> float:
        """The root mean square of the residual at the points."""
        residual = self.state.residual[: self.m]
        return math.sqrt(residual @ residual / self.m)

    def _lower_ridge(self, slopes: np.ndarray, offsets: np.ndarray) -> bool:
        """Lower the ridge if the error has fallen, and return whether it was lowered."""
        ridge = self.per_error * max(RIDGE_FLOOR * self.goal, self.error)
        if ridge > self.ridge / 2:
            return False
        self.ridge = ridge
        self.state = self._solve(slopes, offsets)
        return True

    def moved(self) -> StartingScores:
        """Move slopes and offsets until the residual is small, or no longer falls."""
        p, m, t, by = self.p, self.m, self.start.points, self.start.moves
        slopes, offsets = self.start.slopes, self.start.offsets
        damping, past = FIRST_DAMPING, list[float]()
        columns = np.zeros((m + p, p + by.shape[1]))
        for _ in range(MAX_STEPS):
            check_time("fitting")
            weights, basis, values, residual = self.state
            squares = residual @ residual
            past.append(squares)
            is_idle = len(past) > IDLE_STEPS and squares > IDLE_RATIO * past[-1 - IDLE_STEPS]
            if is_idle or self.error < ENOUGH * self.goal:
                break
            columns[:m, :p] = weights * (values - (weights @ values)[:, None])
            columns[:m, p:] = (t[:, None] * columns[:m, :p]) @ by
            U, S, Vt = singular_values(columns - basis @ (basis.T @ columns))
            along = U.T @ residual
            for _ in range(MAX_REFUSALS):
                step = Vt.T @ (S / (S**2 + damping * squares) * along)
                new = slopes + by @ step[p:], offsets + step[:p]
                state = self._solve(*new)
                if state.residual @ state.residual < squares:
                    break
                damping *= MORE_DAMPING
            else:
                break
            self.state, (slopes, offsets), damping = state, new, damping / LESS_DAMPING
            self._lower_ridge(slopes, offsets)
        return replace(self.start, slopes=slopes, offsets=offsets, values=None)
