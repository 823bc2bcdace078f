"""One head over a tensor grid of anchors at a moderate temperature. Its values are solved, not sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.constructions.built import Built, Progress, require_resolution
from attnc.constructions.construction import FIT, MAX_ANCHORS, MAX_BYTES, Construction, Estimate, Request, for_eps
from attnc.constructions.fitting.axis import (
    MAX_P,
    MAX_VALUE,
    AxisSections,
    SpectralAxis,
    along_axes,
    grid_head,
    unit_points,
    value_limit,
)
from attnc.constructions.fitting.search import thinned
from attnc.constructions.fitting.selection import allowed_anchors, num_positions
from attnc.constructions.fitting.stored_head import check_fit
from attnc.errors import BoundNotMet, InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.threads import one_thread
from attnc.proofs.leaves_prover import MAX_VARIABLES
from attnc.targets.expressions.tree import Call, walk
from attnc.targets.target import Target

NAME = "spectral_grid"
MAX_GRID_DIMENSIONS = 6
"""Largest number of variables. Five anchors per axis are 15,625 anchors in six variables."""
MARGIN_OF_POSITIONS = 40.0
"""M, the score bonus for keys at the query's own position. Other positions keep e^−40 of its weight."""


@one_thread()
def spectral_grid(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | tuple[int, ...] | None = None,
    max_value: float = MAX_VALUE,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One soft self-attention head over a tensor grid of anchors, with values solved by least squares.

    Weights.  The weights are those of `max_affine`, but with a moderate β = c/h², c ∈ [0.09, 1.25], and anchors that
              reach `pad` spacings beyond the box. They are normalised Gaussians. The softmax factorises over the axes,
              so the values that fit f best at Chebyshev points come from one small pseudo-inverse per axis.
    Rate.     For analytic f the error falls faster than any power of the number of anchors, down to rounding. Nothing
              is proved here: `bound` is None.
    Chosen.   Sections of f along an axis give the fewest anchors for the axis, its c and its pad. Then the whole grid
              is fitted and tested. Sections through the worst points are added until the error is ≤ eps.
              |values| stay ≤ max_value·max|f|, which limits rounding.

    Parameters
    ----------
    target : Target
        A continuous function of one input, with one to six variables on a finite box.
    eps : float, optional
        The largest error allowed. Give either eps or num_anchors.
    num_anchors : int or tuple of int, optional
        The number of anchors on each axis. The best grid of this size is built.
    max_value : float
        The largest |value| of a key, in units of max|f|.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the anchors and the softness of every axis. It has no bound.

    Raises
    ------
    InputError
        If the target has too many variables or may jump, or an argument is out of range.
    BoundNotMet
        If eps is not reached. The exception carries the best grid that was found, if there is one.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("sin(x)", {"x": (-3, 3)})
    >>> built = attnc.constructions.spectral_grid(target, eps=1e-9)
    >>> built.program.num_anchors
    14
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    check_fit(request, num_anchors, max_value)
    search = SpectralSearch(target, request, max_value)
    if num_anchors is None:
        return search.build(search.reach())
    counts = (num_anchors,) * target.box.d if isinstance(num_anchors, int) else num_anchors
    if len(counts) != target.box.d:
        raise InputError(f"num_anchors={num_anchors} for {target.box.d} variables")
    return search.build(search.of_size(counts))


def _estimate(target: Target, request: Request) -> Estimate:
    """Return the size from sections alone, before the grid is fitted."""
    search, n = SpectralSearch(target, request.for_largest_error(target.box), MAX_VALUE), num_positions(target)
    axes, outputs = search.begin(), target.num_outputs // n
    anchors, error = n * math.prod(axis.p for axis in axes), sum(axis.error for axis in axes)
    return Estimate.one_layer(NAME, anchors, target.box.d, outputs, error, lambda: search.build(search.reach()))


NUM_SECTIONS_AT_FIRST = 20
"""Number of sections of f along each axis for the first choice of the axes. Measured with ten functions: with 40 all
grids have the same size; with 12 two have fewer anchors, 125 instead of 175 and 169 instead of 180."""
MAX_GRID_SAMPLES = 10**7
"""Largest number of samples of f on the nodes of the grid: 80 MB per output."""
MAX_TESTS = 3 * 10**5
"""Largest number of test points between the nodes. It bounds the time of a test. Measured with ten functions of up to
four variables: half and twice as many give the same grids."""
MAX_SOLVED = 10**5
"""Largest number of samples of f for the estimate of the growth of the values along one axis. Measured with ten
functions of up to four variables: half and twice as many give the same grids."""
MAX_THINNED = 10**4
"""Largest grid, in anchors, whose axes are shortened one by one. Each attempt fits the whole grid. The ten grids that
were measured, of up to 625 anchors, are far below it."""
HASTE = (1.0, 0.6, 0.3)
"""Factors on the exponent (i + 1)/d of the value limit max_value^((i + 1)/d) after axis i. With a smaller factor the
first axes leave more growth of the values to the later ones. The best result is kept."""
FIT_SHARE = 0.9
"""The share of eps for the error at test points. Between them the error may be a little larger. Measured with ten
functions: with 0.8 two grids have more anchors, up to 288 instead of 180; with 0.95 two have 5 % fewer."""
MAX_ROUNDS = 16
"""Largest number of fits of the whole grid. Each fit adds sections through the worst points. Measured with ten
functions: 8 and 32 give the same grids."""
RESOLVED_ROUNDINGS = 24
"""Least eps in roundings of max |f|. Each weight and each sum is off by a few roundings. Measured at two
eps that rounding does not allow: 12 and 48 refuse them as well, 48 with bounds that are 1 % and 18 % smaller."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A fit: out(x) = Σ_k Π_i w_i(x_i)_{k_i} v_k, with its largest error at the test points, and the place of it."""

    axes: tuple[SpectralAxis, ...]
    values: Float[np.ndarray, "*grid outputs"]
    error: float
    worst: Float[np.ndarray, "few d"]

    @property
    def largest(self) -> float:
        return float(np.abs(self.values).max())


class SpectralSearch:
    """Chooses the axes from sections of f, fits the grid, and adds sections where the fit is worst."""

    def __init__(self, target: Target, request: Request, max_value: float) -> None:
        d, box = target.box.d, target.box
        SPECTRAL_GRID.accept(target, request)
        self.target, self.request, self.max_value, self.dtype = target, request, max_value, request.dtype
        self.limit = allowed_anchors(target, request) // num_positions(target)
        rng = np.random.default_rng(0)
        scattered = box.lo + rng.random((256, d)) * box.widths
        values = np.abs(target(scattered)).max(axis=1)
        corners = np.where(rng.random((8, d)) < 0.5, box.lo, box.hi)
        middle = (box.lo / 2 + box.hi / 2)[None]
        first = [middle, corners, scattered[: NUM_SECTIONS_AT_FIRST - 9], scattered[[values.argmax()]]]
        self.through = np.concatenate(first) if d > 1 else middle
        self.size = max(float(values.max()), float(np.abs(target(self.through)).max()))

    def build(self, found: Spectrum) -> Built:
        """Return the program of the head over the grid."""
        box, values = self.target.box, found.values.reshape(math.prod(axis.p for axis in found.axes), -1)
        ends = zip(found.axes, box.lo.tolist(), box.hi.tolist(), strict=True)
        head = grid_head([axis.lattice.keys(lo, hi, self.dtype) for axis, lo, hi in ends], values, self.dtype)
        counts = tuple((f"anchors_{name}", axis.p) for name, axis in zip(box.names, found.axes, strict=True))
        softness = tuple((f"c_{name}", axis.lattice.c) for name, axis in zip(box.names, found.axes, strict=True))
        parameters = (*counts, *softness, ("largest value", found.largest))
        return Built(head.program(self.target, MARGIN_OF_POSITIONS), NAME, None, parameters=parameters)

    def begin(self) -> tuple[SpectralAxis, ...]:
        """Return the axes that the first sections give."""
        eps, level = self.request.goal, RESOLVED_ROUNDINGS * UNIT_ROUNDOFF[self.dtype] * self.size
        require_resolution(self.target, eps, self.dtype, level)
        self.max_value = min(self.max_value, value_limit(eps, self.size, self.dtype))
        axes = self.choose(FIT_SHARE * eps)
        self._check_limits(axes)
        return axes

    def reach(self) -> Spectrum:
        """Return the smallest grid found whose error is ≤ eps."""
        eps, axes, tried = self.request.goal, self.begin(), list[Spectrum]()
        goal = FIT_SHARE * eps
        for round_ in range(MAX_ROUNDS):
            self.request.report("fitting", round_ / MAX_ROUNDS)
            found = self.fitted(axes)
            if found.error <= FIT_SHARE * eps:
                return self._thinned(found, FIT_SHARE * eps)
            tried.append(found)
            goal = max(goal * 0.2, min(goal * 0.7, goal * eps / found.error))
            self.through = np.concatenate([self.through, found.worst])
            axes = self.choose(goal)
        best = min(tried, key=lambda spectrum: spectrum.error)
        counts = _show_counts([axis.p for axis in best.axes])
        raise self._refusal(f"to eps={eps:g}: with {counts} anchors the error is {best.error:.3g}", best)

    def of_size(self, counts: tuple[int, ...]) -> Spectrum:
        """Return the best grid found with these counts."""
        if math.prod(counts) > self.limit:
            raise InputError(f"{math.prod(counts):,} anchors are more than the limit of {self.limit:,}")
        chosen = [
            self._axes(haste, lambda lines, limit, before: lines.best(counts[len(before)], limit))
            for haste in HASTE[: len(counts)]
        ]
        found = [self.fitted(axes) for axes in chosen if len(axes) == len(counts)]
        if not found:
            raise InputError(
                f"no fit of {_show_counts(counts)} anchors keeps |values| ≤ {self.max_value:g}·max|f|; raise max_value"
            )
        return min(found, key=lambda spectrum: spectrum.error)

    def _limit(self, i: int, haste: float = 1.0) -> float:
        """Return the limit on the values after axis i is solved. The next axis is fitted to these values."""
        d = self.target.box.d
        return float(self.size * self.max_value ** (haste * (i + 1) / d if i + 1 < d else 1.0))

    def choose(self, eps: float) -> tuple[SpectralAxis, ...]:
        """Return axes with the fewest anchors for which the sections along each axis are within eps/√d."""
        d = self.target.box.d
        most = min(MAX_P**d, self.limit)
        share, best, fewest = eps / math.sqrt(d), None, most

        def smallest(lines: AxisSections, limit: float, before: Sequence[SpectralAxis]) -> SpectralAxis | None:
            room = max(1, min(MAX_P, fewest // math.prod(axis.p for axis in before)))
            return lines.smallest(share, limit, before[-1].p if before else 9, room)

        for haste in HASTE[:d]:  # with a small factor the first axes may have no fit
            axes = self._axes(haste, smallest)
            if len(axes) < d:
                lacking = self.target.box.names[len(axes)]
            else:
                best, fewest = axes, math.prod(axis.p for axis in axes)
        if best is None:
            asked = f"to eps={self.request.goal:g}"
            raise self._refusal(f"{asked}: {lacking} needs more than {min(MAX_P, most):,} anchors")
        return best

    def _axes(
        self, haste: float, fit: Callable[[AxisSections, float, Sequence[SpectralAxis]], SpectralAxis | None]
    ) -> tuple[SpectralAxis, ...]:
        """Fit axis after axis, up to the first one that has no fit."""
        axes: tuple[SpectralAxis, ...] = ()
        for i in range(self.target.box.d):
            found = fit(self._lines(axes), self._limit(i, haste), axes)
            if found is None:
                break
            axes = (*axes, found)
        return axes

    def _lines(self, before: Sequence[SpectralAxis]) -> AxisSections:
        """Return sections along the next axis, given the axes chosen before it."""
        box, target, through = self.target.box, self.target, self.through
        i = len(before)

        def samples(x: np.ndarray) -> np.ndarray:
            points = np.repeat(through[None], len(x), axis=0)
            points[:, :, i] = x[:, None]
            return target(points.reshape(-1, box.d)).reshape(len(x), -1)

        def solved(x: np.ndarray) -> np.ndarray:
            """Return lines of the values after solving the last of the earlier axes, as many as MAX_SOLVED allows."""
            nodes = [axis.nodes() for axis in before]
            first = 0
            while first < i and math.prod(map(len, nodes[first:])) * len(x) > MAX_SOLVED:
                first += 1
            free = through[: max(1, MAX_SOLVED // (math.prod(map(len, nodes[first:])) * len(x)))]
            grid = np.stack(np.meshgrid(*nodes[first:], x, indexing="ij"), axis=-1)
            points = np.broadcast_to(free, (*grid.shape[:-1], *free.shape)).copy()
            points[..., first : i + 1] = grid[..., None, :]
            values = target(points.reshape(-1, box.d)).reshape(*grid.shape[:-1], -1)
            values = along_axes(values, [axis.solve for axis in before[first:]])
            return np.moveaxis(values, -2, 0).reshape(len(x), -1)

        return AxisSections(float(box.lo[i]), float(box.hi[i]), samples, solved, 4 if box.d < 4 else 2)

    def fitted(self, axes: tuple[SpectralAxis, ...]) -> Spectrum:
        """Solve the values by one small product per axis, and test them on a grid between the nodes."""
        self._check_limits(axes)
        nodes = [axis.nodes() for axis in axes]
        values = along_axes(self._on_grid(nodes), [axis.solve for axis in axes])
        tests = _test_points(axes)
        made = along_axes(values, [axis.weights(x).__matmul__ for axis, x in zip(axes, tests, strict=True)])
        errors = np.abs(made - self._on_grid(tests)).max(axis=-1)
        worst = np.argsort(errors, axis=None)[::-1][: max(1, errors.size // 100)][:: max(1, errors.size // 400)]
        index = np.unravel_index(worst, errors.shape)
        points = np.stack([x[i] for x, i in zip(tests, index, strict=True)], axis=1)
        return Spectrum(axes, values, float(errors.max()), points)

    def _check_limits(self, axes: Sequence[SpectralAxis]) -> None:
        anchors, samples = (math.prod(counts) for counts in ([a.p for a in axes], [len(a.nodes()) for a in axes]))
        if anchors > self.limit or samples > MAX_GRID_SAMPLES:
            raise self._refusal(
                f"within the limits: it needs {_show_counts([axis.p for axis in axes])} = {anchors:,} anchors and "
                f"{samples:,} samples, the limits are {self.limit:,} and {MAX_GRID_SAMPLES:,}"
            )

    def _on_grid(self, axes: Sequence[np.ndarray]) -> np.ndarray:
        mesh = np.meshgrid(*axes, indexing="ij")
        points = np.stack([x.ravel() for x in mesh], axis=1)
        return self.target(points).reshape(*mesh[0].shape, -1)

    def _thinned(self, found: Spectrum, goal: float) -> Spectrum:
        """Remove anchors axis by axis while the error stays within the goal. Sections often ask for too many."""
        if self.target.box.d == 1 or math.prod(axis.p for axis in found.axes) > MAX_THINNED:
            return found

        def shorter(grid: Spectrum, i: int) -> Spectrum | None:
            p, before, most = grid.axes[i].p, grid.axes[:i], max(grid.largest, self.max_value * self.size)
            for haste in HASTE[: len(grid.axes) - i] if p > 1 else ():  # the last axis has one limit, whatever it is
                less = self._lines(before).best(p - 1 - p // 64, self._limit(i, haste))
                thinner = None if less is None else self.fitted((*before, less, *grid.axes[i + 1 :]))
                if thinner is None or thinner.error > goal:
                    return None
                if thinner.largest <= most:
                    return thinner
            return None

        return thinned(found, len(found.axes), shorter)

    def _refusal(self, found: str, best: Spectrum | None = None) -> BoundNotMet:
        return BoundNotMet(
            f"cannot bring a spectral grid for {self.target.describe()} on {self.target.box} {found}. Is there a kink, "
            f"a narrow feature, or is eps close to the rounding of {self.dtype}? Try construction='compose' (or "
            "'graded' for one variable), a larger eps, or a smaller box.",
            eps=math.nan if self.request.eps is None else self.request.eps,
            build=None if best is None else lambda: self.build(best),
        )


def _show_counts(counts: Sequence[int]) -> str:
    return " × ".join(map(str, counts))


def _test_points(axes: Sequence[SpectralAxis]) -> list[np.ndarray]:
    """Return points between the nodes for each axis, several per spacing if MAX_TESTS allows it, ends included."""
    most = max(3, int(MAX_TESTS ** (1 / len(axes))))
    rng = np.random.default_rng(1)
    found = []
    for axis in axes:
        _, tests = unit_points(axis.p, axis.spare)
        if len(tests) > most:
            tests = np.concatenate([[-1.0, 1.0], rng.choice(tests, most - 2, replace=False)])
        found.append(axis.at(np.sort(tests)))
    return found


def _suits(target: Target, request: Request) -> bool:
    """Accept continuous functions for which the prover is expected to reach eps. In L_p norms, accept no kinks.

    With a kink, the whole grid would have to be as fine as at the kink. Grids of expressions in many variables are not
    proved.
    """
    if request.is_plain(target):
        return request.is_short_proof(target) if target.expression is None else target.box.d <= MAX_VARIABLES
    if request.p == math.inf or SPECTRAL_GRID.why_not(target, request):
        return False
    if target.expression is None:
        return request.is_short_proof(target)
    calls = (node for node in walk(target.expression.outputs) if isinstance(node, Call))
    return target.box.d == 1 or not any(FUNCTIONS[call.name].has_kinks for call in calls)


def few_axes(target: Target, request: Request) -> str | None:
    """The condition that a grid of a few anchors per axis is not too large."""
    d, most = target.box.d, MAX_GRID_DIMENSIONS
    return None if d <= most else f"takes 1 to {most} variables; 5 anchors per axis are {5.0**d:.1e} for {d} variables"


SPECTRAL_GRID = Construction(NAME, for_eps(spectral_grid), (*FIT, few_axes), _suits, _estimate, frozenset({"norm"}))
