"""Derive the gate table: slopes and offsets of the fewest keys with the smallest largest error.

    python benchmarks/gate_table.py                      # search every row again and compare it with the table
    python benchmarks/gate_table.py --rows gelu:4 erf:6  # some rows only
    python benchmarks/gate_table.py --write              # also write rows that are better by more than 2 %

Method.  A gate is G(x) = Σ_k w_k(x)(v_k + u_k·x), w = softmax(a_k·x + c_k). The unknowns z are slopes, offsets, values
and carried parts, with the symmetry of the function built in. For each row:
1. Starts, in families. Nearly even slopes with offsets −s·slope² for a ladder of spacings, which is a quadrature of the
   integral that gives Φ. Random slopes and offsets with a fixed seed. The row with two keys fewer, with one more pair
   outside it, at several scales. For softplus, random keys with the outer two slopes 1 apart, which its tail eˣ needs.
   The row itself is never a start. Values are solved by least squares, within ±`MAX_VALUE`.
2. Gauss–Newton (Levenberg–Marquardt) for the sum of squared errors on a sample: a few steps from the best starts of
   each family, then many from the best places found, each place once.
3. Sequential linear programs for the largest error: |r + J·d| ≤ t with d in a trust region, t minimal, until t stands.
   Good rows of different spacings form a curved valley; a search in the first and in the last slope follows it.
4. Digits. The fewest decimals whose error, with the values that `attnc` solves, is within 2 % of that of all digits.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, linprog, lsq_linear

from attnc.constructions.fitting.gate import (
    OTHER_RECIPES,
    lattice_gate,
    lattice_sides,
    reciprocal_keys,
    solved_gate,
)
from attnc.functions import gate_table
from attnc.functions.gate_recipes import FittedKeys
from attnc.functions.registry import FUNCTIONS
from attnc.functions.trigonometric import graded_row

TABLE = Path(gate_table.__file__)
TOLERANCE = 0.02
"""A found row counts as equal to a stored one if its error exceeds that by at most this part."""
NUM_RANDOM_STARTS, NUM_UNIT_GAP_STARTS = 60, 300
"""Numbers of random starts of a row; solving the values of one takes less than 1 ms."""
NUM_BEST_STARTS = 10
"""Number of starts of each family that are refined; the others are worse after their values are solved."""
NUM_REFINED, HOPEFUL = 12, 30.0
"""The search goes on from at most 12 places found with few steps, with errors at most 30 times that of the best place.
For softplus:7 the least row is reached from a place whose error is 5 times that of the best."""
FEW_STEPS, MANY_STEPS = 40, 2000
"""Maximum numbers of Gauss–Newton steps. After 400 steps softplus:7 is still a factor of 4 above its minimum."""
MAX_VALUE = 10.0
"""Largest value of a key. Without this limit the rows of softplus, arctan and 1/(1 + y) with few keys end at values of
10³ to 10¹². Their errors are 10 to 60 % smaller in float64, and in float32 the rounding of the values is larger."""
MAX_PROGRAMS = 25
"""Maximum number of linear programs for one refinement, which bounds its time."""
VALLEY_STEP, VALLEY_END = 1.05, 0.002
"""First factor on the spacing in the search along the valley, and the difference from 1 at which it ends."""
STANDING = 1e-4
"""The programs stop when one promises to lower the largest error by less than this part."""

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Slopes, offsets, values and carried parts of all keys."""


@dataclass(frozen=True, eq=False)
class RowProblem:
    """Find z = (shape, linear part) with a small largest error of the gate on the points x.

    `arrays(z)` are the keys. The first `num_shape` entries of z place slopes and offsets; the others enter linearly.
    `starts` are families of shapes to begin from; `row(shape)` is the row as stored, without its error; `error(row)`
    is the largest error of the gate that `attnc` makes of the row.
    """

    x: np.ndarray
    f: np.ndarray
    num_shape: int
    num_linear: int
    arrays: Callable[[np.ndarray], Arrays]
    starts: tuple[tuple[np.ndarray, ...], ...]
    row: Callable[[np.ndarray], tuple[Any, ...]]
    error: Callable[[tuple[Any, ...]], float]
    shape_step: float = 1.0
    num_slopes: int = 0  # of a row of slopes and offsets; 0 for a graded row
    is_lattice: bool = False

    def worst(self, z: np.ndarray) -> float:
        """The largest error on the sample."""
        return float(np.abs(self.residual(z)).max())

    def residual(self, z: np.ndarray) -> np.ndarray:
        return _gate(self.arrays(z), self.x)[0] - self.f

    def jacobian(self, z: np.ndarray) -> np.ndarray:
        """∂G/∂z: exact in the keys, and by central differences in the few numbers of a graded row."""
        (a, c, v, u), x, m = self.arrays(z), self.x[:, None], self.num_shape
        value, w = _gate((a, c, v, u), self.x)
        pull = w * (v + u * x - value[:, None])  # ∂G/∂c_k
        of_shape = self.fixed[:, :m] if self.num_slopes else self.directions(z, range(m))
        da, dc, dv, du = np.concatenate([of_shape, self.fixed[:, m:]], axis=1)
        return (pull * x) @ da.T + pull @ dc.T + w @ dv.T + (w * x) @ du.T

    @functools.cached_property
    def fixed(self) -> np.ndarray:
        """∂(a, c, v, u)/∂z where the keys are affine in z: the linear part, and the shape unless the row is graded."""
        size = self.num_shape + self.num_linear
        return self.directions(np.zeros(size), range(size))

    def directions(self, z: np.ndarray, entries: range) -> np.ndarray:
        """∂(a, c, v, u)/∂z for some entries of z, by central differences."""
        steps = np.eye(len(z))[list(entries)] * self.shape_step
        moved = [(self.arrays(z + step), self.arrays(z - step)) for step in steps]
        pairs = np.array(moved).reshape(len(steps), 2, 4, -1)
        return np.moveaxis((pairs[:, 0] - pairs[:, 1]) / (2 * self.shape_step), 0, 1)

    def with_solved_values(self, shape: np.ndarray) -> np.ndarray:
        """The shape, and the linear part within `MAX_VALUE` that makes the sum of squares least."""
        z = np.concatenate([shape, np.zeros(self.num_linear)])
        value, w = _gate(self.arrays(z), self.x)
        _, _, dv, du = self.fixed[:, self.num_shape :]
        columns = w @ dv.T + (w * self.x[:, None]) @ du.T
        linear = np.linalg.lstsq(columns, self.f - value, rcond=1e-15)[0]
        if np.abs(linear).max(initial=0.0) > MAX_VALUE:
            linear = lsq_linear(columns, self.f - value, (-MAX_VALUE, MAX_VALUE), "bvls").x
        return np.concatenate([shape, linear])


def _gate(arrays: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gate at points, and its weights."""
    a, c, v, u = arrays
    scores = x[:, None] * a + c
    w = np.exp(scores - scores.max(axis=1, keepdims=True))
    w /= w.sum(axis=1, keepdims=True)
    return (w * (v + u * x[:, None])).sum(axis=1), w


# The problems


def table_problem(name: str, recipe: FittedKeys, p: int, *, on_lattice: bool = False) -> RowProblem:
    """A row of slopes and offsets to the right of 0, for a ramp or an odd function.

    On a lattice the slopes are multiples of one step, which takes their place in the shape.
    """
    m, odd = p // 2, p % 2
    num_slopes, sides = (1, lattice_sides(p)) if on_lattice else (m, np.eye(m))
    num_offsets = m - 1 + odd  # one offset is 0: that of the middle key, or that of the first pair
    is_ramp, num_nu = recipe.limit is None, 0 if recipe.is_pure and recipe.limit is None else m - 1
    num_linear = (m - 1 if is_ramp else 0) + (num_nu + (odd if is_ramp and not recipe.is_pure else 0))

    def arrays(z: np.ndarray) -> Arrays:
        right = z[:num_slopes] @ sides
        height = z[num_slopes:][:num_offsets] if odd else np.concatenate([[0.0], z[num_slopes:][:num_offsets]])
        linear, zero = z[num_slopes + num_offsets :], [0.0] * odd
        slopes, offsets = np.concatenate([-right[::-1], zero, right]), np.concatenate([height[::-1], zero, height])
        if not is_ramp:
            outer = np.append(linear, recipe.limit)
            return slopes, offsets, np.concatenate([-outer[::-1], zero, outer]), np.zeros(p)
        outer, values = np.append(0.5 + linear[: m - 1], 1.0), np.zeros(p)
        if not recipe.is_pure:
            nu = np.append(linear[m - 1 : 2 * (m - 1)], 0.0)
            values = np.concatenate([nu[::-1], linear[2 * (m - 1) :], nu])
        return slopes, offsets, values, np.concatenate([1.0 - outer[::-1], [0.5] * odd, outer])

    def row(shape: np.ndarray) -> tuple[Any, ...]:
        if on_lattice:
            return float(abs(shape[0])), tuple(shape[1:].tolist())
        height = shape[m:] if odd else np.concatenate([[0.0], shape[m:]])
        right = np.abs(shape[:m])  # the keys of a pair may have changed sides
        order = np.argsort(right)
        height = height[order] if odd else height[order] - height[order[0]]
        return tuple(right[order].tolist()), tuple(height.tolist())

    def error(row: tuple[Any, ...]) -> float:
        if on_lattice:
            return lattice_gate(name, replace(recipe, lattice={p: (*row, 0.0)}), p).error
        return solved_gate(name, replace(recipe, rows={p: (*row, 0.0)}), p).error

    x = -np.concatenate([np.linspace(0.0, 1.0, 500)[1:] ** 1.5 * 30.0, np.geomspace(30.0, 200.0, 30)[1:]])
    if on_lattice:
        starts = (tuple(_lattice(p)), tuple(_random_lattice(p)))
        sizes = (1 + num_offsets, num_linear)
        return RowProblem(x, recipe.below(x), *sizes, arrays, starts, row, error, num_slopes=1, is_lattice=True)
    families = [_even(m, odd), _random(m, odd), _longer(recipe, p), *([] if recipe.is_pure else [_unit_gap(m, odd)])]
    starts = tuple(map(tuple, families))
    return RowProblem(x, recipe.below(x), m + num_offsets, num_linear, arrays, starts, row, error, num_slopes=m)


def _even(m: int, odd: int) -> Iterator[np.ndarray]:
    """Nearly even slopes, and offsets that fall with their squares."""
    k = np.arange(1.0, m + 1) - (0.0 if odd else 0.5)
    for spacing, growth, curvature in itertools.product(
        np.geomspace(0.7, 3.0, 20), (0.0, 0.002, 0.005, 0.01), (0.5, 0.55, 0.25, 0.275, 0.2)
    ):
        slopes = spacing * k * (1 + growth * k**2)
        offsets = -curvature * slopes**2
        yield np.concatenate([slopes, offsets if odd else offsets[1:] - offsets[0]])


def _random(m: int, odd: int) -> Iterator[np.ndarray]:
    """Random slopes and offsets."""
    rng = np.random.default_rng(m * 2 + odd)
    for _ in range(NUM_RANDOM_STARTS):
        slopes = np.cumsum(rng.uniform(0.3, 1.4, m))
        yield np.concatenate([slopes, rng.normal(0.0, 1.0, m - 1 + odd)])


def _lattice(p: int) -> Iterator[np.ndarray]:
    """Steps with offsets that fall with the squares of slopes."""
    for step, curvature in itertools.product(np.geomspace(0.4, 2.5, 60), (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)):
        offsets = -curvature * (step * lattice_sides(p)[0]) ** 2
        yield np.append(step, offsets if p % 2 else offsets[1:] - offsets[0])


def _random_lattice(p: int) -> Iterator[np.ndarray]:
    """Random steps and offsets."""
    rng = np.random.default_rng(p)
    for _ in range(NUM_UNIT_GAP_STARTS):
        offsets = np.cumsum(rng.normal(-0.3, 1.0, p // 2 - 1 + p % 2))
        yield np.append(rng.choice([0.5, 1.0, rng.uniform(0.4, 2.0)]), offsets)


def _unit_gap(m: int, odd: int) -> Iterator[np.ndarray]:
    """Random inner keys, and an outer pair whose slopes differ by 1.

    softplus(x) approaches eˣ for x → −∞. There the head is the value of the second key times the ratio of the weights
    of the outer two keys. That is eˣ if their slopes differ by 1 and the logarithm of the value is the rise of the
    offset from the second key to the first. Values between 1.4 and 7.4 are tried.
    """
    rng = np.random.default_rng(m * 2 + odd)
    for _ in range(NUM_UNIT_GAP_STARTS):
        slopes = np.cumsum(rng.uniform(0.3, 1.4, m))
        offsets = rng.normal(0.0, 1.0, m - 1 + odd)
        if m > 1:
            slopes[-1] = slopes[-2] + 1
            offsets[-1] = (offsets[-2] if m + odd > 2 else 0.0) + rng.uniform(0.3, 2.0)
        yield np.concatenate([slopes, offsets])


def _longer(recipe: FittedKeys, p: int) -> Iterator[np.ndarray]:
    """The row with two keys fewer and one more pair outside it, at several scales."""
    if p - 2 not in recipe.rows or p < 6:
        return
    right, height = (list(numbers) for numbers in recipe.rows[p - 2][:2])
    right.append(2 * right[-1] - right[-2] + 0.05 * (right[-1] - right[-2]))
    rise = height[-1] - height[-2]
    height.append(height[-1] + rise + (rise - (height[-2] - height[-3]) if len(height) > 2 else rise))
    for factor in np.linspace(0.84, 1.04, 11):
        shape = np.concatenate([np.array(right) * factor, np.array(height) * factor**2])
        yield shape if p % 2 else np.delete(shape, len(right))


def graded(shape: np.ndarray, largest: float = 2.0) -> tuple[float, ...]:
    """(K, Δ, s₀, …) of a graded row, with |K| < largest and 0.2 < Δ < 3: float32 then resolves the offsets."""
    K, step = largest * np.tanh(shape[0]), 1.6 + 1.4 * np.tanh(shape[1])
    return (float(K), float(step), *shape[2:].tolist())


def _graded_start(K: float, step: float, *others: float, largest: float = 2.0) -> np.ndarray:
    return np.array([np.arctanh(K / largest), np.arctanh((step - 1.6) / 1.4), *others])


def atan_problem(recipe: FittedKeys, p: int) -> RowProblem:
    """(K, Δ, s₀, gap) of a graded row for arctan."""
    m = p // 2
    largest = 64.0 if m == 2 else 2.0  # two pairs have one offset, which stays small

    def arrays(z: np.ndarray) -> Arrays:
        right, height, _ = graded_row(*graded(z[:4], largest), 0.0, m)
        outer = np.append(z[4:], recipe.limit)
        slopes, offsets = np.array([*(-a for a in right[::-1]), *right]), np.array([*height[::-1], *height])
        return slopes, offsets, np.concatenate([-outer[::-1], outer]), np.zeros(p)

    def error(row: tuple[Any, ...]) -> float:
        return solved_gate("atan", replace(recipe, rows={p: graded_row(*row, 0.0, m)}), p).error

    x = -np.concatenate([np.linspace(0.0, 1.0, 300)[1:] ** 1.5 * 30.0, np.geomspace(30.0, 1e8, 400)[1:]])
    ladder = itertools.product((0.2, 0.4), (0.8, 1.1), (-0.5, 0.2, 1.0), (0.1, 0.5, 2.0))
    starts = (tuple(_graded_start(*start, largest=largest) for start in ladder),)
    row = functools.partial(graded, largest=largest)
    return RowProblem(x, recipe.below(x), 4, m - 1, arrays, starts, row, error, 1e-5)


def reciprocal_problem(p: int) -> RowProblem:
    """(K, Δ, s₀) of a graded row for 1/(1 + y), y ≥ 0."""

    def arrays(z: np.ndarray) -> Arrays:
        K, step, first = graded(z[:3])
        s = first + step * np.arange(p)
        return -np.exp(-s), -K * s, np.append(z[3:], 0.0), np.zeros(p)

    def error(row: tuple[Any, ...]) -> float:
        return reciprocal_keys(p, *row)[1]

    y = np.concatenate([[0.0], np.geomspace(1e-4, 1e10, 800)])
    ladder = itertools.product((-0.15, 0.02), (0.7, 1.0, 1.4), (-6.0, -4.0, -2.0, -1.0))
    starts = (tuple(_graded_start(*start) for start in ladder),)
    return RowProblem(y, 1 / (1 + y), 3, p - 1, arrays, starts, graded, error, 1e-5)


# The search


def search(problem: RowProblem) -> tuple[Any, ...]:
    """The best row that the starts lead to, with its error as `attnc` finds it."""
    refined: list[np.ndarray] = []
    for family in problem.starts:
        solved = [z for z in map(problem.with_solved_values, family) if np.isfinite(z).all()]
        refined += (_squares(problem, z, FEW_STEPS) for z in sorted(solved, key=problem.worst)[:NUM_BEST_STARTS])
    refined = _distinct(problem, refined)[:NUM_REFINED]
    refined = [z for z in refined if problem.worst(z) <= HOPEFUL * problem.worst(refined[0])]
    refined = _distinct(problem, [_squares(problem, z, MANY_STEPS) for z in refined])
    level, m = [_minimax(problem, z) for z in refined], problem.num_slopes
    if problem.is_lattice:  # least squares end far from the best steps
        first = sorted(map(problem.with_solved_values, problem.starts[0]), key=problem.worst)
        level += (_minimax(problem, _minimax(problem, z, held=0)) for z in first[: 2 * NUM_BEST_STARTS])
    level.sort(key=problem.worst)
    best = level[0]
    for held in (0, m - 1, 0, m - 1) if m > 3 else (0,):
        best = _along_valley(problem, best, held)
    # A sample may miss an error beyond it: among the best rows, the one whose gate has the least error counts.
    return min((_rounded(problem, z) for z in (_minimax(problem, best), *level[:6])), key=lambda row: row[-1])


def _distinct(problem: RowProblem, found: list[np.ndarray]) -> list[np.ndarray]:
    """The rows sorted by their error. Of rows with almost equal errors only one stays: they are the same row."""
    kept: list[np.ndarray] = []
    for z in sorted(found, key=problem.worst):
        if not kept or problem.worst(z) > problem.worst(kept[-1]) * (1 + STANDING):
            kept.append(z)
    return kept


def _along_valley(problem: RowProblem, z: np.ndarray, held: int) -> np.ndarray:
    """A search in one number of the shape, with all others refined again at each of its values.

    Good rows of different spacings form a curved valley, along which free steps are short. The first slope moves all
    slopes alike; the last moves the outer slopes more than the inner ones.
    """
    worst, factor, m = problem.worst(z), VALLEY_STEP, problem.num_slopes
    while abs(factor - 1) > VALLEY_END:
        moved = z.copy()
        if m:  # offsets are about proportional to the squares of slopes
            pull = 1 + (factor - 1) * (np.arange(1, m + 1) / m) ** (2 if held else 0)
            moved[:m] *= pull
            moved[m : problem.num_shape] *= pull[m - (problem.num_shape - m) :] ** 2
        else:
            moved[0] *= factor
        moved = _minimax(problem, moved, held)
        found = problem.worst(moved)
        if found < worst * (1 - STANDING):
            z, worst, factor = moved, found, 1 + 1.5 * (factor - 1)
        else:
            factor = 1 - 0.5 * (factor - 1)  # the other way, half as far
    return z


def _squares(problem: RowProblem, z: np.ndarray, steps: int) -> np.ndarray:
    """Levenberg–Marquardt steps in the shape; the linear part is eliminated (variable projection after Kaufman)."""
    m = problem.num_shape
    scale = max(float(np.abs(problem.residual(z)).max()), 1e-15)

    def residual(shape: np.ndarray) -> np.ndarray:
        if not np.isfinite(shape).all():
            return np.full(len(problem.x), 1e9)
        return np.nan_to_num(problem.residual(problem.with_solved_values(shape)) / scale, nan=1e9)

    def jacobian(shape: np.ndarray) -> np.ndarray:
        z = problem.with_solved_values(shape)
        J = problem.jacobian(z) / scale
        Q = np.linalg.qr(J[:, m:][:, np.abs(z[m:]) < MAX_VALUE])[0]
        return np.nan_to_num(J[:, :m] - Q @ (Q.T @ J[:, :m]))

    with np.errstate(all="ignore"):
        found = least_squares(
            residual, z[:m], jacobian, method="lm", x_scale="jac", ftol=1e-12, xtol=1e-12, gtol=1e-12, max_nfev=steps
        ).x
    return problem.with_solved_values(found) if np.isfinite(found).all() else z


def _minimax(problem: RowProblem, z: np.ndarray, held: int | None = None) -> np.ndarray:
    """Linear programs: the shape moves in a trust region, then the linear part is solved again for the new shape."""
    radius, free = 0.1, np.arange(len(z)) != (-1 if held is None else held)
    z = _with_level_values(problem, z)
    r = problem.residual(z)
    worst = float(np.abs(r).max())
    for _ in range(MAX_PROGRAMS):
        reach, J = np.maximum(np.abs(z), 0.1), problem.jacobian(z)[:, free]
        low, high = _room(problem, z, radius * reach)
        program = _linear_step(r / worst, J / worst, reach[free], low[free], high[free])
        if program is None or program[1] > 1 - STANDING or radius < 1e-8:
            break
        with np.errstate(all="ignore"):
            moved = _with_level_values(problem, _moved(z, free, program[0]))
            left = problem.residual(moved)
        found = float(np.abs(left).max())
        gained, promised = 1 - found / worst, 1 - program[1]
        if gained > 0.1 * promised:
            z, r, worst = moved, left, found
        radius = min(2 * radius, 0.5) if gained > 0.5 * promised else radius if gained > 0.1 * promised else radius / 4
    return z


def _moved(z: np.ndarray, free: np.ndarray, step: np.ndarray) -> np.ndarray:
    moved = z.copy()
    moved[free] += step
    return moved


def _with_level_values(problem: RowProblem, z: np.ndarray) -> np.ndarray:
    """The same shape, with the linear part that makes the largest error least."""
    m = problem.num_shape
    z = problem.with_solved_values(z[:m])
    r = problem.residual(z)
    worst, columns = float(np.abs(r).max()), problem.jacobian(z)[:, m:]
    if not columns.shape[1] or not np.isfinite(worst):
        return z
    low, high = (end[m:] for end in _room(problem, z, z))
    program = _linear_step(r / worst, columns / worst, np.ones(columns.shape[1]), low, high)
    return z if program is None else z + np.concatenate([np.zeros(m), program[0]])


def _room(problem: RowProblem, z: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest step: the shape moves by at most `reach`, and values end within `MAX_VALUE`."""
    is_shape = np.arange(len(z)) < problem.num_shape
    return np.where(is_shape, -reach, -MAX_VALUE - z), np.where(is_shape, reach, MAX_VALUE - z)


def _linear_step(
    r: np.ndarray, J: np.ndarray, reach: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """d with low ≤ d ≤ high that makes max |r + J·d| least, and that maximum; `reach` is the usual size of d.

    The columns of J are nearly dependent. With J·diag(reach) = QR the program is solved for y = R·diag(1/reach)·d,
    whose columns Q are orthogonal.
    """
    n, unknowns = J.shape
    Q, R = np.linalg.qr(J * reach)
    if not unknowns or not np.abs(np.diag(R)).min() > 0:
        return None
    scale = np.abs(Q).max(axis=0)
    back = np.linalg.solve(R, np.diag(1 / scale))  # d/reach from the scaled y
    Q = Q / scale
    near = np.concatenate([np.concatenate([Q, -Q]), -np.ones((2 * n, 1))], axis=1)
    size = np.abs(back).max(axis=1, keepdims=True)
    ends = np.concatenate([high / reach / size[:, 0], -low / reach / size[:, 0]])
    inside = np.concatenate(
        [np.concatenate([back, -back]) / np.tile(size, (2, 1)), np.zeros((2 * unknowns, 1))], axis=1
    )
    found = linprog(
        np.append(np.zeros(unknowns), 1.0),
        A_ub=np.concatenate([near, inside]),
        b_ub=np.concatenate([-r, r, ends]),
        bounds=[*[(None, None)] * unknowns, (0.0, None)],
        method="highs",
    )
    return None if found.status != 0 else (reach * (back @ found.x[:-1]), float(found.x[-1]))


def _rounded(problem: RowProblem, z: np.ndarray) -> tuple[Any, ...]:
    """The row with the fewest decimals that keep the error within 2 %, and that error."""
    whole = problem.row(z[: problem.num_shape])
    least = problem.error(whole)
    for digits in range(2, 16):
        row = tuple(round(x, digits) if isinstance(x, float) else tuple(round(y, digits) for y in x) for x in whole)
        error = problem.error(row)
        if error <= (1 + TOLERANCE) * least:
            return (*row, error)
    return (*whole, least)


# The table


def problems() -> dict[str, tuple[Mapping[int, Any], Callable[[int], RowProblem]]]:
    """By name: the stored rows, and the problem of a row."""
    recipes = {name: FUNCTIONS[name].gate for name in ("gelu", "erf", "softplus", "atan")}
    recipes["gelu_tanh"] = OTHER_RECIPES["gelu_tanh"][1]
    found: dict[str, tuple[Mapping[int, Any], Callable[[int], RowProblem]]] = {}
    for name in ("gelu", "gelu_tanh", "erf", "softplus"):
        recipe = recipes[name]
        assert isinstance(recipe, FittedKeys)
        found[name] = (recipe.rows, lambda p, name=name, recipe=recipe: table_problem(name, recipe, p))
        if recipe.lattice:
            found[f"{name}_lattice"] = (
                recipe.lattice,
                lambda p, name=name, recipe=recipe: table_problem(name, recipe, p, on_lattice=True),
            )
    graded = recipes["atan"]
    assert isinstance(graded, FittedKeys)
    found["atan"] = (gate_table.ATAN, lambda p: atan_problem(graded, p))
    found["reciprocal"] = (gate_table.RECIPROCAL, reciprocal_problem)
    return found


def stored_error(name: str, p: int) -> float:
    """The largest error of the gate that `attnc` makes of the stored row."""
    rows, problem = problems()[name]
    return problem(p).error(rows[p][:-1])


def _text(row: tuple[Any, ...]) -> str:
    """A row of the table, its error rounded to two digits."""
    return repr((*row[:-1], float(f"{row[-1]:.1e}")))


def write(name: str, p: int, row: tuple[Any, ...]) -> None:
    """Replace one row of the table's source."""
    source = TABLE.read_text(encoding="utf-8")
    start = source.index(f"\n{name.upper()}: ")
    at = re.compile(rf"^    {p}: \(.*?\),\n(?=    \d+: |}})", re.MULTILINE | re.DOTALL).search(source, start)
    assert at is not None
    TABLE.write_text(f"{source[: at.start()]}    {p}: {_text(row)},\n{source[at.end() :]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Derive the gate table again.")
    parser.add_argument("--rows", nargs="*", help="name:keys, as gelu:4; all if not given")
    parser.add_argument("--write", action="store_true", help="write rows that are better by more than 2 %%")
    given = parser.parse_args()
    chosen = [(name, p) for name, (rows, _) in problems().items() for p in rows]
    if given.rows:
        chosen = [(row.split(":")[0], int(row.split(":")[1])) for row in given.rows]
    print("| function | keys | stored | found | ratio |\n| :-- | --: | --: | --: | --: |")
    for name, p in chosen:
        stored, row = stored_error(name, p), search(problems()[name][1](p))
        print(f"| {name} | {p} | {stored:.3e} | {row[-1]:.3e} | {row[-1] / stored:.3f} |", flush=True)
        if given.write and row[-1] < (1 - TOLERANCE) * stored:
            write(name, p, row)


if __name__ == "__main__":
    main()
