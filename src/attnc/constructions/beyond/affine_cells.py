"""Affine functions on the cells of a grid whose borders are the places where f jumps: one key per cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.constructions.built import Built, Progress, too_many_anchors
from attnc.constructions.construction import (
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Estimate,
    Request,
    finite_box,
    function,
    normal_numbers,
    one_input,
    refuse,
    summable,
)
from attnc.constructions.fitting.cell_head import CellHead, self_attention
from attnc.constructions.fitting.selection import Positions, allowed_anchors, num_positions
from attnc.constructions.fitting.stored_head import stored
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import TINIEST
from attnc.numerics.threads import one_thread
from attnc.targets.expressions.kinks import jumps_across
from attnc.targets.target import Target

NAME = "affine_cells"
MAX_CELLS = 20_000
"""Most cells that are tried. In three variables f is then sampled at 2.5 million points, which takes about a second."""
FIT_SHARE, LAYER_SHARE = 0.5, 0.25
"""The shares of eps for the fits on the cells, and for the layers about jumps. A steeper switch costs nothing, so the
layers have the smaller share; the rest is for the proof, whose cells are coarse."""
TURN = 64.0
"""The lead of a score beyond which the other keys are negligible: e^−64 is 10⁻²⁸."""
LEAST_TURNS = 64.0
"""Least lead of a key over a cell, in units of TURN. A key then reaches at most 1/64 of a cell beyond its border."""
GROWTH = 1.3
"""The factor by which cells between two jumps grow at a time. The error falls with the square: 1.7 times for 1.3."""
NEGLIGIBLE = 1e-13
"""Slopes that change f by less than this part of max |f| over a cell are rounding: sums of five samples have 5e-16."""
NODES = np.array([-1 + 1e-9, -math.sqrt(0.5), 0.0, math.sqrt(0.5), 1 - 1e-9])
"""Samples along a cell [−1, 1]: the extrema of a Chebyshev polynomial, but not on the borders, where f may jump."""


@one_thread()
def affine_cells(
    target: Target,
    *,
    eps: float,
    norm: float,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """A grid of cells with borders where f jumps, and on every cell an affine function that its key carries.

    Theorem.  Let n borders κ_1 < … < κ_n cut an axis, and the score of cell i be S_i(x) = B·Σ_{l≤i} (x − κ_l). On cell
              i, at a distance z from its borders, every other cell of the axis is behind by Bz at least. So beyond
              z = TURN/B the output is the affine function A_i of the cell, up to e^{−TURN} times the spread of the
              values for each other cell. In the layers between, output and f are at most J = 2 max |f| apart, and
                  ‖out − f‖_p ≤ (Σ_C vol(C)·sup_C |f − A_C|^p)^{1/p} + J·(area of the jumps·2 TURN/B)^{1/p}
              but for these weights. B is a power of 2 that makes the second term at most LAYER_SHARE·eps.
    Weights.  key_i has the slopes B(i − n/2) along each axis and the value A_i(x) = v_i + V_i·x.
    Chosen.   The grid is refined, along the axis and between the jumps where f bends most, until samples of f are
              within FIT_SHARE·eps of affine functions.

    Parameters
    ----------
    target : Target
        An expression of up to three variables on a finite box. It jumps only where a variable passes certain values.
    eps : float
        The largest error allowed, in the norm.
    norm : float
        The exponent p of the L_p norm.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the cells and the slope B of each axis. It has no bound.

    Raises
    ------
    InputError
        If the target does not jump, or not only where a variable passes certain values.
    BoundNotMet
        If the cells needed are more than the limits allow.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("sign(x)*y", {"x": (-1, 1), "y": (-1, 1)}, p=10)
    >>> attnc.constructions.affine_cells(target, eps=0.1, norm=10).program.num_anchors
    2
    """
    request = Request(eps, dtype, norm, max_anchors, max_bytes, progress=progress)
    refuse(NAME, target, request, *REQUIRED)
    return _search(target, request).built()


@dataclass(frozen=True, eq=False)
class AffineGrid:
    """Cells, counted along each axis between its jumps, and the affine function with which f is compared on each."""

    target: Target
    request: Request
    jumps: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    @cached_property
    def ends(self) -> list[Float[np.ndarray, " ends"]]:
        """For each axis, the ends of its cells."""
        box, found = self.target.box, []
        for lo, hi, jumps, counts in zip(box.lo, box.hi, self.jumps, self.counts, strict=True):
            parts = zip(itertools.pairwise([lo, *jumps, hi]), counts, strict=True)
            found.append(np.concatenate([*(np.linspace(*ends, count + 1)[:-1] for ends, count in parts), [hi]]))
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.counts))

    @cached_property
    def middles(self) -> Float[np.ndarray, "cells d"]:
        return _tensor([ends[:-1] / 2 + ends[1:] / 2 for ends in self.ends])

    @cached_property
    def halves(self) -> Float[np.ndarray, "cells d"]:
        return _tensor([np.diff(ends) / 2 for ends in self.ends])

    @cached_property
    def samples(self) -> Float[np.ndarray, "cells outputs *nodes"]:
        d = len(self.shape)
        points = self.middles[:, None] + self.halves[:, None] * _tensor([NODES] * d)
        values = self.target(points.reshape(-1, d)).reshape(*points.shape[:2], -1)
        return np.asarray(values.transpose(0, 2, 1).reshape(len(points), -1, *[len(NODES)] * d))

    def along(self, axis: int) -> Float[np.ndarray, "cells outputs *nodes"]:
        """Fit a line along one axis by least squares, at every node of the other axes. Slopes are per half cell."""
        return np.asarray(np.tensordot(self.samples, NODES / (NODES @ NODES), axes=(axis + 2, 0)))

    @cached_property
    def slopes(self) -> Float[np.ndarray, "cells outputs d"]:
        """The slopes of the affine functions, in units of a half cell; 0 if they are rounding.

        They are those of least squares: the nodes are symmetric, so 1, τ_1, …, τ_d are orthogonal on them.
        """
        d = len(self.shape)
        found = np.stack([self.along(axis).mean(axis=tuple(range(2, d + 1))) for axis in range(d)], axis=2)
        return np.where(np.abs(found) <= NEGLIGIBLE * np.abs(self.samples).max(), 0.0, found)

    @cached_property
    def offsets(self) -> Float[np.ndarray, "cells outputs samples"]:
        """The samples of f without the linear part of the affine functions."""
        linear = self.slopes @ _tensor([NODES] * len(self.shape)).T
        return np.asarray(self.samples.reshape(linear.shape) - linear)

    @property
    def error(self) -> float:
        """The L_p norm of the errors of the affine functions, from the largest at the samples of each cell."""
        errors, p = np.ptp(self.offsets, axis=2).max(axis=1) / 2, self.request.p
        shares = (2 * self.halves / self.target.box.widths).prod(axis=1)
        largest = max(float(errors.max()), TINIEST)
        norm = largest * float(shares @ (errors / largest) ** p) ** (1 / p)
        return norm * self.request.goal / self.request.for_largest_error(self.target.box).goal

    def refined(self) -> AffineGrid:
        """Return more cells along the axis, and between the jumps, where f bends or twists most in a cell.

        Where a twist can be lowered along either axis, sizes are about equal, and the axis with fewer cells is taken.
        """
        parts = list[tuple[int, int, int, int]]()
        for axis, counts in enumerate(self.counts):
            slopes, samples = self.along(axis), np.moveaxis(self.samples, axis + 2, -1)
            bends = np.ptp(samples - slopes[..., None] * NODES, axis=-1).reshape(len(slopes), -1).max(axis=1)
            twists = np.ptp(slopes.reshape(*slopes.shape[:2], -1), axis=2).max(axis=1)
            sizes = np.moveaxis(np.maximum(bends, twists).reshape(self.shape), axis, 0).reshape(self.shape[axis], -1)
            of_parts = np.maximum.reduceat(sizes.max(axis=1), np.cumsum([0, *counts[:-1]]))
            octaves = np.round(np.log2(np.maximum(of_parts, TINIEST))).astype(int).tolist()
            parts += [(octave, -counts[part], axis, part) for part, octave in enumerate(octaves)]
        _, _, axis, part = max(parts)
        finer = [list(counts) for counts in self.counts]
        finer[axis][part] = math.ceil(GROWTH * finer[axis][part])
        return replace(self, counts=tuple(map(tuple, finer)))

    # --- the network --------------------------------------------------------------------------------------------------

    @property
    def steepness(self) -> list[float]:
        """B of each axis: a power of 2, so that slopes and a single border are stored exactly."""
        box, request, found = self.target.box, self.request, []
        size, jumps = float(np.abs(self.samples).max()), sum(map(len, self.jumps))
        most = math.log2(float(np.finfo(request.dtype).max)) / 2
        for i, (ends, at) in enumerate(zip(self.ends, self.jumps, strict=True)):
            area, needed = jumps * float(np.delete(box.widths, i).prod()), -math.inf
            if at and size > 0:
                # In the layer a proof finds |out| ≤ size and |f| ≤ size, and no more.
                needed = math.log2(2 * TURN * area) + request.p * math.log2(2 * size / (LAYER_SHARE * request.goal))
            least = math.log2(LEAST_TURNS * TURN / float(np.diff(ends).min()))
            limit = most - math.log2(len(ends) * float(box.magnitude[i]))
            found.append(2.0 ** math.ceil(min(max(needed, least), limit)))
        return found

    def built(self) -> Built:
        """Return the program of one head over the cells."""
        dtype, names, steep = self.request.dtype, self.target.box.names, self.steepness
        scores = [_scores(ends[1:-1], B) for ends, B in zip(self.ends, steep, strict=True)]
        slopes, offsets = _tensor([slope for slope, _ in scores]), _tensor([offset for _, offset in scores]).sum(axis=1)
        carried = self.slopes / self.halves[:, None]
        values = (self.offsets.max(axis=2) + self.offsets.min(axis=2)) / 2 - (carried @ self.middles[..., None])[..., 0]
        keys = [slopes, offsets, values, *([carried] if carried.any() else [])]
        head = SoftHead(*(stored(part, dtype) for part in keys))
        d = len(names)
        program = self_attention(CellHead(self.target, dtype, np.ones(d), np.zeros(d), head, 1.0, Positions(1, 0.0)))
        cells = tuple((f"cells_{name}", count) for name, count in zip(names, self.shape, strict=True))
        slopes_B = tuple((f"B_{name}", B) for name, B in zip(names, steep, strict=True))
        return Built(program, NAME, None, parameters=(*cells, *slopes_B))


def _tensor(columns: Sequence[Float[np.ndarray, " n"]]) -> Float[np.ndarray, "product d"]:
    """Return all points of a grid, the last axis running fastest."""
    return np.stack([part.ravel() for part in np.meshgrid(*columns, indexing="ij")], axis=1)


def _scores(borders: Float[np.ndarray, " n"], B: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the slopes and offsets of B·Σ_{l≤i} (x − κ_l), minus half of the last one of them."""
    count, sums = np.arange(len(borders) + 1), np.cumsum([0.0, *borders])
    return B * (count - len(borders) / 2), B * (sums[-1] / 2 - sums)


def _search(target: Target, request: Request) -> AffineGrid:
    """Return the first grid found on which f is within FIT_SHARE·eps of affine functions at the samples."""
    jumps = places_of_jumps(target)
    assert jumps is not None
    grid = AffineGrid(target, request, tuple(map(tuple, jumps)), tuple((1,) * (len(places) + 1) for places in jumps))
    most = min(MAX_CELLS, allowed_anchors(target, request))
    while grid.error > FIT_SHARE * request.goal or math.prod(grid.shape) > most:
        finer, limit = grid.refined(), f"{most:,}"
        if math.prod(finer.shape) > most:
            cells = f"more than {' × '.join(map(str, grid.shape))} cells"
            raise too_many_anchors(target, request.goal, NAME, cells, limit, None, None, grid.built)
        grid = finer
        request.report("fitting", math.prod(grid.shape) / most)
    return grid


def _estimate(target: Target, request: Request) -> Estimate:
    grid = _search(target, request)
    d, cells = target.box.d, math.prod(grid.shape)
    numbers = target.num_outputs * (1 + (d if grid.slopes.any() else 0))
    return Estimate.one_layer(NAME, cells, d, numbers, request.goal, grid.built)


def places_of_jumps(target: Target) -> list[list[float]] | None:
    """Return where the target jumps inside the box, for each variable; None if it does not, or that is not known."""
    found = None
    if target.expression is not None and not target.is_continuous:
        found = jumps_across(target.expression, target.box)
    ends = zip(target.box.lo, target.box.hi, strict=True)
    return found and [[x for x in jumps if lo < x < hi] for (lo, hi), jumps in zip(ends, found, strict=True)]


def jumps_along_axes(target: Target, request: Request) -> str | None:
    """The condition that the target jumps, only where a variable passes certain values, and the norm admits it."""
    if request.p == math.inf:
        return "bounds an L_p norm, in which functions may jump"
    if num_positions(target) == 1 and places_of_jumps(target) is not None:
        return None
    return "takes an expression that jumps, and only where one variable passes certain numbers"


def _suits(target: Target, request: Request) -> bool:
    return all(condition(target, request) is None for condition in REQUIRED)


REQUIRED = (finite_box, function, one_input, jumps_along_axes, summable, normal_numbers)
AFFINE_CELLS = Construction(
    NAME, lambda target, request: _search(target, request).built(), REQUIRED, _suits, _estimate, frozenset({"norm"})
)
