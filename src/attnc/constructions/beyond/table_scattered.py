"""One head for a table with points anywhere: few anchors on a grid if it is smooth, or a key at every point."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from attnc.constructions.beyond.table_grid import GridTableSearch
from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request, of_kind
from attnc.constructions.fitting.axis import (
    LEAST_SPACINGS,
    MAX_VALUE,
    NEGLIGIBLE_EXPONENT,
    Decomposition,
    KeysOnAxis,
    Lattice,
    Ridged,
    Sections,
    grid_head,
    middle_of_groups,
    stored_coordinate,
)
from attnc.constructions.fitting.search import fewest, thinned
from attnc.constructions.fitting.stored_head import StoredHead, stored
from attnc.constructions.fitting.table_fit import NO_ROWS, TABLE_SHARE, TableFit, TableSearch, table_construction
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.contraction import ROWS_AT_ONCE, contracted, largest_of_rows, softmax_of_rows
from attnc.numerics.limits import check_time
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.threads import one_thread
from attnc.targets.table import BLOCK_ROWS, TableTarget
from attnc.targets.target import Target

NAME = "table_scattered"
ROUGH_GROWTH = 3.0
"""Largest ratio of the values of keys at the points to the values of the table, for a table that is noise. Between the
points the output can be as large as the values. Measured with 400 random numbers: the bound is 2e-9 with 1.5, 3e-6 with
3 and 9e-8 with 6."""
SHAPES = ((0.0, 0.5), (0.0, 0.296875), (0.125, 0.6875), (0.25, 0.5), (0.25, 0.296875))
"""(padding as a share of p, c), tried in turn. Padding suits functions that continue smoothly beyond the box. Not
tuned."""
SCATTERED_CUTS = (1e-11, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Singular values below this share of the largest are cut off. The first cut that keeps the values small is taken."""
RIDGES = (1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
"""Ridges in units of the largest diagonal entry. The first that keeps the values small is taken."""
FINE_SHARE = 1e-6
"""An eps below this share of max |f| needs singular values. For a larger eps normal equations are enough, which are
faster but square the condition number."""
MAX_SMOOTH_ANCHORS, MAX_FINE_ANCHORS = 2000, 600
"""Largest numbers of anchors of a smooth fit by normal equations and by singular values. They bound the time of one fit
to seconds."""
SAMPLED_ROWS = 2**16
"""Number of points at which a search measures errors. All points are checked afterwards."""
MAX_CHECKS = 8
"""Largest number of checks of all points. After each that fails, the worst points join the sample and all fits.
Measured with seven smooth tables of 10^4 to 10^6 rows: the first or the second check passes."""
WORST = 128
"""Number of points that join the sample after a check. A check ends once it has found as many above the goal in a
block."""
POLYNOMIAL_SHARE = 0.25
"""The share of the goal that the polynomial may be off at the points. The grid has the rest."""
FIRST_SHARE, NEXT_SHARE = 2.0, 0.85
"""The error that a grid may have at nodes, as a share of the polynomial's remainder: at first, and the factor from one
trial to the next. Least squares over the points lower the error."""
MAX_TRIALS, FURTHER_TRIALS = 16, 3
"""Largest number of grids that are tried, and the number that are tried after the first within eps. Measured with three
tables of 10^4 to 10^5 rows of one function: without further trials their anchors differ by a factor of 1.5."""
REPEATS, NEARLY, WEIGHT = 4, 2.0, 4
"""Largest number of least squares for one grid, the error in units of the goal above which there is only one, and the
number of times that the worst points are repeated. They lower the largest error by up to a third."""
MAX_SHORTENED = 600
"""Largest number of anchors of a grid whose axes are shortened one by one. It bounds the time to seconds."""
FEWER = (1, 2, 4)
"""Numbers of anchors that are removed from an axis at once, tried in turn. Errors are not monotone in the number:
measured with a table of 10^5 rows, lattices of nine keys miss the goal, and one of six meets it."""
SHORT_PADS, SHORT_SOFTNESS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5), (0.84375, 0.59375, 0.40625, 0.25)
"""The lattices that are tried for an axis with one anchor less."""
MAX_TERMS = 1500
"""Largest number of terms of the polynomial. It bounds the time of one fit to a second."""
FIRST_DEGREE = 4
"""The degree along each axis with which a polynomial begins."""
GROWING_TAIL = 0.4
"""Axes grow whose last coefficients are at least this share of the largest ones."""
LAST_SHARE = 0.6
"""Coefficients beyond this share of the squared ellipsoid of degrees are the last ones."""
END_WEIGHT = 1e-3
"""Added to 1 − y², so that the weight of a point at an end is finite."""
POLYNOMIAL_ROWS = 2**13
"""Number of points at which all terms of a polynomial are computed at once: 100 MB for 1500 terms."""
LEAST_HELD_OUT = 200
"""Least number of points that no fit used, for an estimate of the error between the points."""
NODES_PER_DEGREE = 2
"""Number of nodes per degree of the polynomial of the grid on which keys are chosen. A polynomial of degree n between
2n equally spaced points exceeds its values there by a few per cent. The points of the table are checked in any case."""
MAX_NODES = {1: 400, 2: 200, 3: 48, 4: 20}
"""Largest number of nodes per axis of this grid, by the number of variables: at most 160,000 in all."""
NEIGHBOURS_OF = 2 * 10**5
"""Number of points among which neighbours are looked for, to estimate steepness and noise: 1 s of a k-d tree."""
STEEPEST_COUNTS = (*range(1, 11), 12, 14, 16, 19, 22, 26, 30, 36, 43, 51, 61, 73, 88, 105, 126, 151, 181, 217, 260)
"""Numbers of anchors on the steepest axis that are tried in turn. From ten on, each is 1.2 times the one before."""


@one_thread()
def table_scattered(
    target: Target,
    *,
    eps: float,
    max_value: float = MAX_VALUE,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One self-attention head, its values solved from a table whose points may lie anywhere.

    Statement. |out − f| ≤ eps at every point of the table, rounding included. Nothing is proved between them.
    Weights.   The weights are normalised Gaussians on a tensor grid of few anchors, as in `spectral_grid`, with values
               by least squares over the points. If the table is too rough for that, the anchors are the points.
    Chosen.    The grid grows, faster along axes on which the table is steeper, until the error is ≤ eps at every point.
               Then axes are shortened one by one. |values| stay ≤ max_value times the table's.
    Always.    For large β, keys at the points select the nearest point. So any eps above rounding is reached.

    Parameters
    ----------
    target : TableTarget
        A table of points anywhere and their values.
    eps : float
        The largest error allowed at the points of the table.
    max_value : float
        The largest |value| of a key, in units of the table's largest value.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the anchors of every axis, or β of the keys at the points. It has no bound.

    Raises
    ------
    InputError
        If the target is not a table, or the dtype cannot hold its numbers.
    BoundNotMet
        If eps is not reached, or needs more anchors than allowed. The exception carries the best head, if there is one.

    Examples
    --------
    >>> import attnc
    >>> import numpy as np
    >>> points = np.random.default_rng(0).uniform(-1, 1, (800, 2))
    >>> table = attnc.TableTarget(points, np.sin(points[:, 0] + 2 * points[:, 1]))
    >>> built = attnc.constructions.table_scattered(table, eps=1e-3)
    >>> built.program.num_anchors < 100
    True
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    return ScatteredSearch(of_kind(NAME, target, TableTarget), request, max_value).build()


@dataclass(frozen=True, eq=False)
class _GridFit:
    """Anchors on a grid of `counts`, and the error of the best values that are not too large."""

    counts: tuple[int, ...]
    parameters: tuple[tuple[str, float | int | str], ...]
    keys: Sequence[KeysOnAxis]
    error: float
    values: Float[np.ndarray, "keys outputs"] | None = None
    shape: int = 0  # the number of a shape of SHAPES


class ScatteredSearch(TableSearch):
    """Tries grids of anchors, from small to large, in several shapes each; then keys at the points."""

    def __init__(self, table: TableTarget, request: Request, max_value: float) -> None:
        super().__init__(NAME, table, request, max_value)
        points = table.points
        self.x = points if self.dtype == "float64" else stored(points, self.dtype)  # as the network receives them
        self.f = table.values - self.middle
        self.largest = max_value * self.sizes
        self.is_fine = self.eps < FINE_SHARE * float(max(self.f.max(), -self.f.min()))
        largest = MAX_FINE_ANCHORS if self.is_fine else MAX_SMOOTH_ANCHORS
        self.most = min(self.limit, int(0.6 * table.num_points), largest)
        self.ridges = [0] * len(SHAPES)  # for each shape, the index in RIDGES that its last fit used
        self.order = np.random.default_rng(0).permutation(table.num_points)[:SAMPLED_ROWS]
        self.hard = NO_ROWS  # the worst points of earlier checks
        self.smoothest: _GridFit | None = None  # the grid with the least error so far
        some = np.sort(self.order[:NEIGHBOURS_OF])
        self.near = Neighbours.of(self.x[some] / table.box.widths, self.f[some], self.eps)

    def smooth(self) -> Iterator[TableFit]:
        """Yield the smallest grid that is found with an error ≤ TABLE_SHARE·eps before rounding, if there is one.

        A polynomial through the points stands for a smooth function between them. So the axes of the grid can be
        chosen one by one, as for a gridded table. If there is no such polynomial, grids of one shape are tried in turn.
        """
        if self.near.is_rough:
            return
        found = self._by_polynomial(TABLE_SHARE * self.eps) or self._by_shapes(TABLE_SHARE * self.eps)
        if found is not None:
            fit, error = found
            keys, values = fit.keys, fit.values
            assert values is not None  # its error is finite
            yield self.fit(
                grid_head(keys, values, self.dtype),
                error,
                lambda rows: _outputs(keys, values, self.x[rows]),
                *((f"anchors_{name}", p) for name, p in zip(self.table.box.names, fit.counts, strict=True)),
                *fit.parameters,
            )

    def _by_polynomial(self, goal: float) -> tuple[_GridFit, float] | None:
        """Return a grid that is fitted to a polynomial and then to the points, and its error at all points.

        Points where a check fails join all later fits. If these fail, too, the grid is made for a smaller error.
        """
        polynomial = self._polynomial(POLYNOMIAL_SHARE * goal)
        if polynomial is None:
            return None
        share, best, after = FIRST_SHARE, None, 0
        for _ in range(MAX_TRIALS):
            self.request.report("fitting", 1 - share / FIRST_SHARE)
            grid = self._grid_of(polynomial, share * goal)
            share *= NEXT_SHARE
            if grid is None:
                break
            after += best is not None
            is_larger = best is not None and math.prod(grid.counts) >= math.prod(best[0].counts)
            fit = grid if is_larger else self._refitted(grid, goal)
            if self.smoothest is None or fit.error < self.smoothest.error:
                self.smoothest = fit
            if fit.error <= goal:
                error, worst = self._check(fit, goal)
                if error > goal:
                    self.hard = np.union1d(self.hard, worst)
                    fit = self._refitted(grid, goal)
                    error, worst = self._check(fit, goal)
                    self.hard = np.union1d(self.hard, worst)
                if error <= goal:
                    best = fit, error
            if after >= FURTHER_TRIALS:
                break
        if best is None:
            return None
        fit, error = self._shortened(*best, goal)
        return replace(fit, parameters=(*fit.parameters, *self._held_out(fit))), error

    def _held_out(self, fit: _GridFit) -> tuple[tuple[str, float | int | str], ...]:
        """Return the largest error at the points of the sample that no fit used, as an estimate between the points."""
        used = np.concatenate([self.order[self.spread[: 8 * math.prod(fit.counts) + 600]], self.hard])
        rest = np.setdiff1d(self.order, used)
        if len(rest) < LEAST_HELD_OUT or fit.values is None:
            return ()
        return ("holdout_error", self._error_at(rest, fit.keys, fit.values)), ("holdout_points", len(rest))

    def _shortened(self, grid: _GridFit, error: float, goal: float) -> tuple[_GridFit, float]:
        """Remove anchors from the axes, the longest first, while a lattice of fewer anchors is within the goal."""
        best, stuck = (grid, error), set[int]()
        while len(stuck) < len(grid.counts) and math.prod(best[0].counts) <= MAX_SHORTENED:
            counts = best[0].counts
            i = max((i for i in range(len(counts)) if i not in stuck), key=lambda i: counts[i])
            for fewer in FEWER:
                fit = self._with_less(best[0], i, fewer, goal) if counts[i] > 2 + fewer else None
                error = math.inf if fit is None else self._check(fit, goal)[0]
                if fit is not None and error <= goal:
                    best = fit, error
                    break
            else:
                stuck.add(i)
        return best

    def _with_less(self, grid: _GridFit, i: int, fewer: int, goal: float) -> _GridFit | None:
        """Return the best grid with fewer anchors on axis i if least squares bring it within the goal at the sample.

        Lattices are compared by least squares over some points, and the best two are fitted.
        """
        check_time("fitting")
        box, p, tried = self.table.box, grid.counts[i] - fewer, list[_GridFit]()
        counts = tuple(n - fewer * (i == j) for j, n in enumerate(grid.counts))
        some = self.order[self.spread[: 4 * math.prod(counts) + 300]]
        f, name = self.f[some], box.names[i]
        others = [None if i == j else axis.weights(self.x[some, j]) for j, axis in enumerate(grid.keys)]
        for pad, c in itertools.product(SHORT_PADS, SHORT_SOFTNESS):
            if p - 1 - 2 * pad < LEAST_SPACINGS:
                continue
            keys = Lattice(p, pad, c).keys(float(box.lo[i]), float(box.hi[i]), self.dtype)
            weights = [keys.weights(self.x[some, i]) if own is None else own for own in others]
            found = Ridged(_products(weights), RIDGES[2:]).first_cut(Sections(f, f, self.largest))
            if found is not None:
                axes = [keys if i == j else axis for j, axis in enumerate(grid.keys)]
                own = tuple((key, c if key == f"c_{name}" else value) for key, value in grid.parameters)
                off = float(np.abs(_products(weights) @ found.values - f).max())
                tried.append(_GridFit(counts, own, axes, off))
        for each in sorted(tried, key=lambda fit: fit.error)[:2]:
            if each.error <= NEARLY * goal:
                fit = self._refitted(replace(each, error=math.inf), goal)
                if fit.error <= goal:
                    return fit
        return None

    def _polynomial(self, goal: float) -> TensorPolynomial | None:
        """Return a polynomial within the goal at the sample, or None.

        Its degrees grow along the axes on which its last coefficients are largest.
        """
        limit = min(MAX_TERMS, int(0.4 * len(self.order)))
        y, f = self.y, self.f[self.order]
        degrees = np.full(self.table.box.d, FIRST_DEGREE)
        while True:
            check_time("fitting")
            index = TensorPolynomial.within(degrees)
            if len(index) > limit:
                return None
            rows = self.spread[: 4 * len(index) + 200]
            fit = Ridged(TensorPolynomial.terms(index, y[rows]), RIDGES)
            found = fit.first_cut(Sections(f[rows], f[rows], math.inf))
            if found is None:
                return None
            made = TensorPolynomial(index, found.values, 0.0)
            if np.abs(fit.weights @ found.values - f[rows]).max() <= goal:
                starts = range(0, len(y), POLYNOMIAL_ROWS)
                blocks = [slice(i, i + POLYNOMIAL_ROWS) for i in starts]
                error = max(float(np.abs(made(y[block]) - f[block]).max()) for block in blocks)
                if error <= goal:
                    return replace(made, error=error)
            tails = made.tails(degrees)
            degrees = np.where(tails >= GROWING_TAIL * tails.max(), degrees + 1 + degrees // 5, degrees)

    @functools.cached_property
    def y(self) -> Float[np.ndarray, "points d"]:
        """The points of the sample, moved to [−1, 1]^d."""
        box = self.table.box
        return np.asarray((self.x[self.order] - (box.lo / 2 + box.hi / 2)) / (box.widths / 2))

    @functools.cached_property
    def spread(self) -> Int[np.ndarray, " points"]:
        """The numbers of the points of the sample in random order, those near the ends of axes more likely first.

        Points are drawn with weights Π (1 − y_i²)^{−1/2}, so that least squares over the first of them are about as
        good near the ends as in the middle.
        """
        weights = np.prod(1 - self.y**2 + END_WEIGHT, axis=1) ** -0.5
        return np.argsort(np.random.default_rng(2).exponential(size=len(self.y)) / weights)

    def _grid_of(self, polynomial: TensorPolynomial, goal: float) -> _GridFit | None:
        """Return a grid of keys within the goal of the polynomial at the nodes of a fine grid, or None."""
        box = self.table.box
        sizes = [min(NODES_PER_DEGREE * (int(n) + 1) + 4, MAX_NODES[box.d]) for n in polynomial.index.max(axis=0)]
        nodes = [np.linspace(lo, hi, n) for lo, hi, n in zip(box.lo, box.hi, sizes, strict=True)]
        target = TableTarget.from_grid(nodes, polynomial.on_grid([np.linspace(-1, 1, n) for n in sizes]), box.names)
        if float(np.ptp(target.values)) == 0:
            return None
        grid = target.grid
        assert grid is not None
        request = replace(self.request, eps=goal / TABLE_SHARE, progress=None)
        found = next(GridTableSearch(target, grid, request, self.max_value).smooth(), None)
        if found is None or len(found.values) > self.most:
            return None
        parameters = tuple(each for each in found.parameters if not each[0].startswith("anchors"))
        counts = tuple(len(axis.anchors) for axis in found.axes)
        return _GridFit(counts, parameters, found.axes, math.inf, found.values)

    def _refitted(self, grid: _GridFit, goal: float) -> _GridFit:
        """Return the grid with its values, or with values by least squares over the points if these are better.

        Where least squares miss the goal by little, the worst points of the sample are repeated among the equations.
        """
        rows = np.concatenate([self.order[self.spread[: 8 * math.prod(grid.counts) + 600]], self.hard])
        checked, best = np.concatenate([self.order, self.hard]), grid
        if grid.values is not None:
            best = replace(grid, error=self._error_at(checked, grid.keys, grid.values))
        for _ in range(REPEATS):
            if best.error <= goal:
                break
            W, f = _grid_weights(grid.keys, self.x[rows]), self.f[rows]
            fit = Decomposition(W, SCATTERED_CUTS) if self.is_fine else Ridged(W, RIDGES)
            found = fit.first_cut(Sections(f, f, self.largest))
            if found is None:
                break
            off = largest_of_rows(np.abs(_outputs(grid.keys, found.values, self.x[checked]) - self.f[checked]))
            error = float(off.max())
            if error < best.error:
                best = replace(grid, values=found.values, error=error)
            if error > NEARLY * goal:
                break
            worst = checked[np.argpartition(off, -WORST)[-WORST:]] if len(off) > WORST else checked
            rows = np.concatenate([rows, *[worst] * WEIGHT])
        return best

    def _error_at(self, rows: np.ndarray, keys: Sequence[KeysOnAxis], values: np.ndarray) -> float:
        return float(np.abs(_outputs(keys, values, self.x[rows]) - self.f[rows]).max())

    def _by_shapes(self, goal: float) -> tuple[_GridFit, float] | None:
        """Return a grid with one shape on all axes, and its error at all points.

        The search measures errors at a sample. Then all points are checked. If that fails, the search goes on with the
        worst points in the sample.
        """
        least = 1
        for _ in range(MAX_CHECKS):
            found = self._search(goal, least)
            if found is None:
                return None
            least = max(found.counts)
            for fit in dict.fromkeys((self._thinned(found, goal), found)):  # perhaps an axis was shortened too much
                error, worst = self._check(fit, goal)
                if error <= goal:
                    return fit, error
                self.hard = np.union1d(self.hard, worst)
        return None

    def _search(self, goal: float, least: int) -> _GridFit | None:
        """Return the smallest grid within the goal at the sample, with `least` anchors on the steepest axis or more."""
        shapes = list(range(len(SHAPES)))

        def attempt(p: int, before: Sequence[_GridFit]) -> _GridFit:
            nonlocal shapes
            counts = self._counts(p)
            self.request.report("fitting", math.prod(counts) / self.most)
            fits = sorted((self._fit(counts, shape) for shape in shapes), key=lambda fit: fit.error)
            if math.prod(counts) > 600:  # from here on fits take long, and the best shapes change little
                shapes = [fit.shape for fit in fits[:2]]
            if self.smoothest is None or fits[0].error < self.smoothest.error:
                self.smoothest = fits[0]
            return fits[0]

        is_few = lambda p: math.prod(self._counts(p)) <= self.most  # noqa: E731
        sizes = itertools.takewhile(is_few, (p for p in STEEPEST_COUNTS if max(self._counts(p)) >= least))
        return fewest(sizes, attempt, goal, resolution=1).met

    def alternative(self) -> tuple[tuple[str, float | int | str], ...]:
        """Return the error of the best smooth head at all points, and its anchors."""
        best = self.smoothest
        if best is None:  # the table is noise: one grid of moderate size tells how smooth it is
            few = [p for p in STEEPEST_COUNTS if math.prod(self._counts(p)) <= min(self.most, 300)]
            best = self._fit(self._counts(few[-1]), 1) if few else None
        if best is None or best.values is None:
            return ()
        return ("smooth_error", self._check(best, math.inf)[0]), ("smooth_anchors", math.prod(best.counts))

    def _check(self, fit: _GridFit, goal: float) -> tuple[float, np.ndarray]:
        """Return the largest error at all points, and the worst points. Stop after a block with many above the goal."""
        assert fit.values is not None
        largest, errors, rows = 0.0, np.zeros(0), NO_ROWS
        for start in range(0, len(self.x), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            off = largest_of_rows(np.abs(_outputs(fit.keys, fit.values, self.x[block]) - self.f[block]))
            largest = max(largest, float(off.max()))
            above = np.flatnonzero(off > goal)
            above = above[np.argsort(off[above])[-WORST:]]
            errors, rows = np.append(errors, off[above]), np.append(rows, above + start)
            if len(above) >= WORST:
                break
        return largest, rows[np.argsort(errors)[-WORST:]]

    def _counts(self, p: int) -> tuple[int, ...]:
        """Return p anchors for the steepest axis, and fewer for the others, down to a few for a flat axis."""
        relative = float((np.abs(self.f).max(axis=0) / self.eps).max(initial=1.0))
        least = 2 + 1.2 * math.log10(max(1.0, relative))
        return tuple(round(min(p, least + share * max(0.0, p - least))) for share in self.near.steepness.tolist())

    def _thinned(self, fit: _GridFit, goal: float) -> _GridFit:
        """Remove anchors axis by axis while the error stays small enough."""

        def shorter(grid: _GridFit, i: int) -> _GridFit | None:
            if grid.counts[i] == 1:
                return None
            counts = tuple(p - (1 + p // 12) * (i == j) for j, p in enumerate(grid.counts))
            less = self._fit(counts, grid.shape)
            return less if less.error <= goal else None

        return thinned(fit, len(fit.counts), shorter)

    def _fit(self, counts: tuple[int, ...], shape: int) -> _GridFit:
        """Fit by least squares at several points for each anchor, and measure the error at all points."""
        part, c = SHAPES[shape]
        pads = [min(part * p, 6.0, (p - 1) / 2 - 0.2) if p > 1 else 0.0 for p in counts]
        box = self.table.box
        keys = [
            Lattice(p, pad, c).keys(float(lo), float(hi), self.dtype)
            for p, pad, lo, hi in zip(counts, pads, box.lo, box.hi, strict=True)
        ]
        rows = np.concatenate([self.order[: 8 * math.prod(counts) + 600], self.hard])
        W, f = _grid_weights(keys, self.x[rows]), self.f[rows]
        start = max(0, self.ridges[shape] - 1)  # from the ridge before the last one of this shape on
        fit = Decomposition(W, SCATTERED_CUTS) if self.is_fine else Ridged(W, RIDGES[start:])
        found = fit.first_cut(Sections(f, f, self.largest))
        if found is None:
            self.ridges[shape] = 0
            return _GridFit(counts, (), keys, math.inf, None, shape)
        if not self.is_fine:
            self.ridges[shape] = RIDGES.index(found.cut)
        error = float(np.abs(W @ found.values - f).max())
        if error <= TABLE_SHARE * self.eps:
            error = max(error, self._error_at(self.order, keys, found.values))
        return _GridFit(counts, (("c", c),), keys, error, found.values, shape)

    def at_points(self) -> Iterator[TableFit]:
        """Yield heads with a key at every point, from the softest that can be solved to one that selects the nearest.

        At the points, weights ∝ exp(−β|y − L_j|²) are W = D⁻¹K. Here K is the Gaussian kernel, positive definite for
        distinct points, and D its row sums. So the values are W⁻¹f = K⁻¹(Df). They exist for every β. For small β they
        are large where two points are close, and a head whose values grow too much is skipped. As β grows, W tends to
        the identity and the values to f, so any eps above rounding is reached. A softer head is smoother between the
        points. The last head (`Kink`) separates points that are too close for any β.
        """
        points = _Points(self)
        growth = ROUGH_GROWTH if self.near.is_rough else self.max_value
        beta, is_last = SOFTEST / HARDER, False
        while not is_last:
            beta *= HARDER
            is_identity = beta * points.closest**2 > 2 * NEGLIGIBLE_EXPONENT
            found = points.solved(beta, math.inf if is_identity else growth)
            if found is not None:
                yield found
            is_last = is_identity or beta * points.farthest**2 > 1 / UNIT_ROUNDOFF[self.dtype]  # then rounding decides
        yield points.selecting()


def _grid_weights(axes: Sequence[KeysOnAxis], x: np.ndarray) -> Float[np.ndarray, "points keys"]:
    """Return the weights over a grid, which are the products of the weights of the axes."""
    return _products([axis.weights(x[:, i]) for i, axis in enumerate(axes)])


def _products(weights: Sequence[Float[np.ndarray, "points p"]]) -> Float[np.ndarray, "points keys"]:
    return reduce(lambda W, w: (W[:, :, None] * w[:, None, :]).reshape(len(W), -1), weights)


@dataclass(frozen=True, eq=False)
class TensorPolynomial:
    """Σ_j a_j Π_i T_{index_ji}(y_i) on [−1, 1]^d, with Chebyshev polynomials T, and its distance from a sample."""

    index: Int[np.ndarray, "terms d"]
    coefficients: Float[np.ndarray, "terms outputs"]
    error: float

    @staticmethod
    def within(degrees: Int[np.ndarray, " d"]) -> Int[np.ndarray, "terms d"]:
        """Return all indices in the ellipsoid Σ (j_i/n_i)² ≤ 1 with half-axes n_i = degrees_i."""
        index = np.stack(np.meshgrid(*(np.arange(n + 1) for n in degrees), indexing="ij"), axis=-1)
        index = index.reshape(-1, len(degrees))
        return index[((index / degrees) ** 2).sum(axis=1) <= 1 + 1e-9]

    def tails(self, degrees: Int[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
        """Return, for each axis, the sum of the coefficients whose index is large on this axis more than on others."""
        share = self.index / degrees
        is_last = (share**2).sum(axis=1) > LAST_SHARE
        sizes = np.abs(self.coefficients).max(axis=1) * is_last
        return np.array([float((sizes * own**2).sum()) for own in share.T])

    @staticmethod
    def terms(index: Int[np.ndarray, "terms d"], y: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points terms"]:
        along = [np.polynomial.chebyshev.chebvander(y[:, i], int(n)) for i, n in enumerate(index.max(axis=0))]
        return reduce(np.multiply, (T[:, n] for T, n in zip(along, index.T, strict=True)))

    def __call__(self, y: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return self.terms(self.index, y) @ self.coefficients

    def on_grid(self, nodes: Sequence[Float[np.ndarray, " nodes"]]) -> Float[np.ndarray, "*grid outputs"]:
        tensor = np.zeros((*(self.index.max(axis=0) + 1), self.coefficients.shape[1]))
        tensor[tuple(self.index.T)] = self.coefficients
        for i, y in enumerate(nodes):
            T = np.polynomial.chebyshev.chebvander(y, tensor.shape[i] - 1)
            tensor = np.moveaxis(np.tensordot(T, tensor, axes=(1, i)), 0, i)
        return np.ascontiguousarray(tensor)


def _outputs(
    keys: Sequence[KeysOnAxis], values: Float[np.ndarray, "keys outputs"], x: Float[np.ndarray, "points d"]
) -> Float[np.ndarray, "points outputs"]:
    """Return the outputs at points, axis by axis."""
    counts = [len(axis.anchors) for axis in keys]
    tensor, found = values.reshape(*counts, -1), np.empty((len(x), values.shape[-1]))
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        weights = [softmax_of_rows(axis.scores(x[rows, i])) for i, axis in enumerate(keys)]
        found[rows] = contracted(weights, tensor)
    return found


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Whether a table is noise for every smooth fit, and its steepness along each axis, from neighbouring points."""

    is_rough: bool
    steepness: Float[np.ndarray, " d"]  # with x in widths of the box, as a share of the steepest axis

    @classmethod
    def of(cls, y: Float[np.ndarray, "points d"], f: Float[np.ndarray, "points outputs"], eps: float) -> Neighbours:
        """Estimate both from points in widths of the box.

        A quadratic through the neighbours of a point predicts its value. For a smooth function this is much better than
        the value of the nearest neighbour, and for noise it is no better.
        """
        from scipy.spatial import cKDTree

        d = y.shape[1]
        count = (d + 1) * (d + 2) + 1  # twice as many neighbours as a quadratic has coefficients, and the point itself
        if len(y) <= 2 * count:
            return cls(False, np.ones(d))
        some = np.random.default_rng(1).permutation(len(y))[:400]
        near = np.asarray(cKDTree(y).query(y[some], k=count)[1])
        coefficients = np.linalg.pinv(_quadratic(y[near[:, 1:]] - y[some, None])) @ f[near[:, 1:]]
        predicted = np.abs(coefficients[:, 0] - f[some]).max(axis=1)
        nearest = np.abs(f[near[:, 1]] - f[some]).max(axis=1)
        slopes = np.quantile(np.abs(coefficients[:, 1 : d + 1]).max(axis=2), 0.8, axis=0)
        is_rough = float(np.median(predicted)) > max(5 * eps, 0.5 * float(np.median(nearest)))
        return cls(is_rough, slopes / slopes.max() if slopes.max() > 0 else np.ones(d))


def _quadratic(x: Float[np.ndarray, "batch points d"]) -> Float[np.ndarray, "batch points monomials"]:
    d = x.shape[-1]
    squares = [x[..., i] * x[..., j] for i in range(d) for j in range(i, d)]
    return np.stack([np.ones(x.shape[:-1]), *np.moveaxis(x, -1, 0), *squares], axis=-1)


MAX_PAIRS = 10**7
"""Largest number of pairs of points whose kernel is stored: 240 MB."""
MAX_GRADIENT_STEPS = 1000
"""Largest number of steps of the conjugate gradients. A kernel that needs more is treated as too soft. Measured with
three scattered tables: 500 and 2000 give as many keys; one bound is 9e-12 with 500, and 6e-12 otherwise."""
MAX_GRADIENT_WORK = 2 * 10**8
"""Largest number of steps × pairs of the conjugate gradients: 0.6 s of sparse products on one core."""
SOFTEST = 1.0
"""The first β, in units of the mean spacing of the points. Weights reach over about six spacings: e^−36 ≈ 2e-16."""
HARDER = 2.0
"""The factor from one β to the next: a power of two, so that multiples of anchors are exact."""


class _Points:
    """The distinct points in units of their mean spacing, and their values in the table."""

    def __init__(self, search: ScatteredSearch) -> None:
        from scipy.spatial import cKDTree

        self.search, self.dtype = search, search.dtype
        box, spacing = search.table.box, search.table.num_points ** (-1 / search.table.box.d)
        middles = box.lo / 2 + box.hi / 2
        pairs = zip(1 / (box.widths * spacing), middles, strict=True)
        self.scale, self.offset = np.array([stored_coordinate(*pair, self.dtype) for pair in pairs]).T
        y = stored(search.x * self.scale + self.offset, self.dtype)
        self.y, which = np.unique(y, axis=0, return_inverse=True)
        self.which: Int[np.ndarray, " points"] = which.ravel()
        self.f = middle_of_groups(search.f, self.which, len(self.y))
        self.farthest = float(np.sqrt((self.y**2).sum(axis=1).max()))  # the largest distance from the origin
        self._tree = cKDTree(self.y)
        two = min(2, len(self.y))
        found: Any = self._tree.query(self.y, k=[two])  # every point's nearest neighbour
        self._apart, self._neighbours = found[0][:, 0] if two == 2 else np.full(1, np.inf), found[1][:, 0]
        self.closest = float(self._apart.min())  # the least distance of two points

    def _fit(
        self, beta: float, values: np.ndarray, exact: np.ndarray, kinks: Sequence[Kink], *parameters: tuple[str, float]
    ) -> TableFit:
        """Return keys of temperature β at the points, with the tangents of the kinks added to them."""
        anchors, bias = tangents(kinks, self.y)
        # β is a power of two: β·y is as exact as y
        keys = SoftHead(2 * (beta * self.y + anchors), bias - beta * (self.y**2).sum(axis=1), values)
        head = StoredHead(self.scale, self.offset, keys, self.dtype)
        fitted = float(np.abs(exact[self.which] - self.search.f).max())
        return self.search.fit(head, fitted, lambda rows: exact[self.which[rows]], ("beta", beta), *parameters)

    def selecting(self) -> TableFit:
        """Return a head that selects the nearest point, with kinks between points that are too close for β alone."""
        u = UNIT_ROUNDOFF[self.dtype]
        beta = 2.0 ** math.floor(math.log2(SELECTING / (400 * u * self.farthest**2)))
        near = math.sqrt(SELECTING / beta)  # 20√u of the largest |y|: scores are exact to ¼
        kinks = kinks_between(self.y, self._tree.query_pairs(near, output_type="ndarray"))
        return self._fit(beta, self.f, self.f, kinks, ("kinks", len(kinks)))

    def solved(self, beta: float, growth: float) -> TableFit | None:
        """Return the head of this temperature, or None if its values cannot be solved or grow too large."""
        eps = self.search.eps
        largest = growth * np.maximum(np.abs(self.f).max(axis=0), eps)
        if (self._expected(beta) > largest).any():
            return None
        kernel = self._kernel(beta)
        if kernel is None:
            return None
        sums = np.asarray(kernel.sum(axis=1)).reshape(-1, 1)
        values = _conjugate_gradients(kernel, sums, self.f, 1e-3 * eps)
        if values is None or (np.abs(values).max(axis=0) > largest).any():
            return None
        return self._fit(beta, values, (kernel @ values) / sums, ())

    def _expected(self, beta: float) -> Float[np.ndarray, " outputs"]:
        """Return a low estimate of the largest value, as if every point had one neighbour.

        For K = (1 k; k 1), half the difference of two values is (1 + k)/(1 − k) times half the difference of f.
        """
        k = np.exp(-beta * self._apart**2)[:, None]
        half = np.abs(self.f - self.f[self._neighbours]) / 2
        with quiet():
            halves = (1 + k) / -np.expm1(-beta * self._apart**2)[:, None] * half
        return np.nan_to_num(halves, nan=0.0, posinf=np.inf).max(axis=0)

    def _kernel(self, beta: float) -> Any:
        """Return the entries exp(−β|L_i − L_j|²) that are not negligible, sparse, or None if they are too many."""
        from scipy.sparse import coo_array, eye_array

        n, reach = len(self.y), math.sqrt(NEGLIGIBLE_EXPONENT / beta)
        if self._tree.count_neighbors(self._tree, reach) > 2 * MAX_PAIRS:
            return None
        pairs = self._tree.query_pairs(reach, output_type="ndarray")
        weights = np.exp(-beta * ((self.y[pairs[:, 0]] - self.y[pairs[:, 1]]) ** 2).sum(axis=1))
        half = coo_array((weights, pairs.T), shape=(n, n))
        return (eye_array(n) + half + half.T).tocsr()


def _conjugate_gradients(
    kernel: Any, sums: Float[np.ndarray, "points one"], f: Float[np.ndarray, "points outputs"], goal: float
) -> Float[np.ndarray, "points outputs"] | None:
    """Return kernel⁻¹·(sums·f), with no residual above the goal, or None if that takes too many steps.

    Rows of the kernel sum to 1 or more, so a residual here is no larger in the output of the network.
    """
    from scipy.sparse.linalg import cg

    right, steps = sums * f, min(MAX_GRADIENT_STEPS, MAX_GRADIENT_WORK // kernel.nnz)
    goal = max(goal, 1e-14 * float(np.abs(right).max(initial=0.0)))
    found = [cg(kernel, b, start, rtol=0.0, atol=goal, maxiter=steps) for b, start in zip(right.T, f.T, strict=True)]
    return None if any(failed for _, failed in found) else np.stack([x for x, _ in found], axis=1)


SELECTING = 80.0
"""The lead of a score that leaves no weight to others: e^−80 is far below the unit roundoff of float64."""
MAX_PAIR_KINKS = 2000
"""Largest number of kinks between close points. Every key adds a term for each kink. Measured with 300 close
pairs of points: limits from 75 to 4000 give as many keys."""


Kink = tuple[int, float, float]
"""(axis, m, κ): the convex function κ|y_axis − m|, to which keys add their tangents.

At a point, its own tangent is the largest of all tangents. Sums of convex functions add up these leads, so kinks never
reduce the lead of another point. If two points are on opposite sides of a kink, each leads the other by 2κ times its
own distance to the kink.
"""


def kinks_between(y: Float[np.ndarray, "points d"], pairs: Int[np.ndarray, "pairs two"]) -> list[Kink]:
    """Return kinks for which the points of every pair lead each other by SELECTING.

    A kink is halfway between two points, on the axis on which they differ most.
    """
    difference = np.abs(y[pairs[:, 0]] - y[pairs[:, 1]])
    axes, gaps = difference.argmax(axis=1), difference.max(axis=1)
    found: list[Kink] = []
    for pair in np.argsort(gaps)[:MAX_PAIR_KINKS].tolist():
        axis = int(axes[pair])
        low, high = sorted(y[pairs[pair], axis].tolist())
        is_apart = (2 * k * min(m - low, high - m) >= SELECTING for i, m, k in found if i == axis)
        if not any(is_apart):
            found.append((axis, (low + high) / 2, SELECTING / (high - low)))
    return found


def tangents(kinks: Sequence[Kink], y: Float[np.ndarray, "points d"]) -> tuple[np.ndarray, np.ndarray]:
    """Return anchors and bias of the tangents at points. The tangent of κ|y − m| at a point is κ·sign·(y − m)."""
    anchors, bias = np.zeros_like(y), np.zeros(len(y))
    for axis, at, strength in kinks:
        sign = np.sign(y[:, axis] - at)
        anchors[:, axis] += strength / 2 * sign
        bias -= strength * at * sign
    return anchors, bias


TABLE_SCATTERED = table_construction(table_scattered, is_gridded=False)
