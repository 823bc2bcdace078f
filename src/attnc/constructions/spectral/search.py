"""The smallest spectral grid for an eps: axes from sections of f, the whole grid, more sections where it is worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.spectral.axis import MAX_P, Axis, value_limit
from attnc.constructions.spectral.lines import Lines
from attnc.errors import BoundNotMet, InputError
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

NUM_LINES = 20
MAX_SAMPLES = 10**7
MAX_TESTS = 3 * 10**5
MAX_SOLVED = 10**5
MAX_THINNED = 10**4
HASTE = (1.0, 0.6, 0.3)
"""How much of what the values may grow by the first axes take; the best of these is kept."""
MARGIN = 0.9
"""What is asked of the fit, as a part of eps: between the points looked at the error is a little larger."""
ROUNDS = 16
ROUNDINGS = 24
"""An eps below this many roundings of max |f| is out of reach: each weight and each sum is off by a few."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A fit: out(x) = Σ_k Π_i w_i(x_i)_{k_i} v_k, with the error that its tests showed, and where."""

    axes: tuple[Axis, ...]
    values: Float[np.ndarray, "*grid outputs"]
    error: float
    worst: Float[np.ndarray, "few d"]

    @property
    def largest(self) -> float:
        return float(np.abs(self.values).max())


class Search:
    """Chooses the axes from sections of f, fits the grid, and adds sections where the fit is worst."""

    def __init__(
        self,
        target: Target,
        max_value: float,
        limit: int,
        dtype: str,
        progress: Progress | None,
        finish: Callable[[Spectrum], Built],
    ) -> None:
        self.target, self.max_value, self.limit, self.progress = target, max_value, limit, progress
        self.finish, self.eps = finish, math.nan
        box = target.box
        rng = np.random.default_rng(0)
        scattered = box.lo + rng.random((256, box.d)) * box.widths
        values = np.abs(target(scattered)).max(axis=1)
        corners = np.where(rng.random((8, box.d)) < 0.5, box.lo, box.hi)
        middle = (box.lo / 2 + box.hi / 2)[None]
        self.through = np.concatenate([middle, corners, scattered[: NUM_LINES - 9], scattered[[values.argmax()]]])
        if box.d == 1:
            self.through = middle
        self.size = max(float(values.max()), float(np.abs(target(self.through)).max()))
        self.dtype = dtype

    def begin(self, eps: float) -> tuple[tuple[Axis, ...], list[float]]:
        """The axes by the first sections, and the errors there."""
        floor = ROUNDINGS * UNIT_ROUNDOFF[self.dtype] * self.size
        if eps < floor:
            raise BoundNotMet(
                f"eps={eps:g} is below what {self.dtype} holds for {self.target.describe()} on {self.target.box}: with "
                f"|f| up to {self.size:.3g} the rounding level is {floor:.2g}. Choose a larger eps"
                + (", or float64." if self.dtype == "float32" else "."),
                eps=eps,
                bound=None,
            )
        self.eps = eps
        self.max_value = min(self.max_value, value_limit(eps, self.size, self.dtype))
        axes, errors = self.choose(MARGIN * eps)
        self._check_limits(axes)
        return axes, errors

    def reach(self, eps: float) -> Spectrum:
        """The smallest grid whose error is ≤ eps."""
        axes, goal = self.begin(eps)[0], MARGIN * eps
        best: Spectrum | None = None
        for round_ in range(ROUNDS):
            self._report(round_ / ROUNDS)
            found = self.fitted(axes)
            if found.error <= MARGIN * eps:
                return self._thinned(found, MARGIN * eps)
            best = found if best is None or found.error < best.error else best
            goal = max(goal * 0.2, min(goal * 0.7, goal * eps / found.error))
            self.through = np.concatenate([self.through, found.worst])
            axes = self.choose(goal)[0]
        assert best is not None
        tried = f"with {_counts(best.axes)} anchors the error is {best.error:.3g}"
        raise self._refusal(f"to eps={eps:g}: {tried}", eps, best)

    def of_size(self, counts: tuple[int, ...]) -> Spectrum:
        """The best grid with these counts."""
        if math.prod(counts) > self.limit:
            raise InputError(f"{math.prod(counts):,} anchors are more than the limit of {self.limit:,}")
        found = [spectrum for haste in HASTE[: len(counts)] if (spectrum := self._of_size(counts, haste)) is not None]
        if not found:
            size = " × ".join(map(str, counts))
            raise InputError(f"no fit of {size} anchors keeps |values| ≤ {self.max_value:g}·max|f|; raise max_value")
        return min(found, key=lambda spectrum: spectrum.error)

    def _of_size(self, counts: tuple[int, ...], haste: float) -> Spectrum | None:
        axes: list[Axis] = []
        for i, p in enumerate(counts):
            found = self._lines(axes).best(p, self._limit(i, haste))
            if found is None:
                return None
            axes.append(found[0])
        return self.fitted(tuple(axes))

    def _limit(self, i: int, haste: float = 1.0) -> float:
        """On the values once axis i is solved: what is solved along one axis is what the next one meets."""
        d = self.target.box.d
        return float(self.size * self.max_value ** (haste * (i + 1) / d if i + 1 < d else 1.0))

    def choose(self, eps: float) -> tuple[tuple[Axis, ...], list[float]]:
        """The fewest anchors an axis for which its sections are within eps/√d."""
        most = min(MAX_P**self.target.box.d, self.limit)
        share, best, fewest = eps / math.sqrt(self.target.box.d), None, most
        for haste in HASTE[: self.target.box.d]:  # which may leave too little to the first axes
            found = self._chosen(share, haste, fewest)
            if isinstance(found, str):
                lacking = found
            else:
                best, fewest = found, math.prod(axis.p for axis in found[0])
        if best is None:
            raise self._refusal(
                f"to eps={self.eps:g}: {lacking} needs more than {min(MAX_P, most):,} anchors", self.eps
            )
        return best

    def _chosen(self, share: float, haste: float, fewest: int) -> tuple[tuple[Axis, ...], list[float]] | str:
        """Axes of at most `fewest` anchors together, and their errors; or the name of one that needs more."""
        axes: list[Axis] = []
        errors: list[float] = []
        for i, name in enumerate(self.target.box.names):
            most = max(1, min(MAX_P, fewest // math.prod(axis.p for axis in axes)))
            start = axes[-1].p if axes else 9
            found = self._lines(axes).smallest(share, self._limit(i, haste), start, most)
            if found is None:
                return name
            axes.append(found[0])
            errors.append(found[1])
        return tuple(axes), errors

    def _lines(self, before: Sequence[Axis]) -> Lines:
        """Sections along the axis after those that have been chosen."""
        box, target, through = self.target.box, self.target, self.through
        i = len(before)

        def samples(x: np.ndarray) -> np.ndarray:
            points = np.repeat(through[None], len(x), axis=0)
            points[:, :, i] = x[:, None]
            return target(points.reshape(-1, box.d)).reshape(len(x), -1)

        def solved(x: np.ndarray) -> np.ndarray:
            """The axes before are solved, as many of the last of them as MAX_SOLVED allows."""
            nodes = [axis.nodes() for axis in before]
            first = 0
            while first < i and math.prod(map(len, nodes[first:])) * len(x) > MAX_SOLVED:
                first += 1
            free = through[: max(1, MAX_SOLVED // (math.prod(map(len, nodes[first:])) * len(x)))]
            grid = np.stack(np.meshgrid(*nodes[first:], x, indexing="ij"), axis=-1)
            points = np.broadcast_to(free, (*grid.shape[:-1], *free.shape)).copy()
            points[..., first : i + 1] = grid[..., None, :]
            values = target(points.reshape(-1, box.d)).reshape(*grid.shape[:-1], -1)
            values = _along(values, [axis.solve for axis in before[first:]])
            return np.moveaxis(values, -2, 0).reshape(len(x), -1)

        return Lines(float(box.lo[i]), float(box.hi[i]), samples, solved, 4 if box.d < 4 else 2)

    def fitted(self, axes: tuple[Axis, ...]) -> Spectrum:
        """Values by one small product per axis, tested on a grid between the nodes."""
        self._check_limits(axes)
        nodes = [axis.nodes() for axis in axes]
        values = _along(self._on_grid(nodes), [axis.solve for axis in axes])
        tests = [axis.at(t) for axis, t in zip(axes, _test_points(axes), strict=True)]
        made = _along(values, [axis.weights(x).__matmul__ for axis, x in zip(axes, tests, strict=True)])
        errors = np.abs(made - self._on_grid(tests)).max(axis=-1)
        worst = np.argsort(errors, axis=None)[::-1][: max(1, errors.size // 100)][:: max(1, errors.size // 400)]
        index = np.unravel_index(worst, errors.shape)
        points = np.stack([x[i] for x, i in zip(tests, index, strict=True)], axis=1)
        return Spectrum(axes, values, float(errors.max()), points)

    def _check_limits(self, axes: Sequence[Axis]) -> None:
        anchors, samples = (math.prod(counts) for counts in ([a.p for a in axes], [len(a.nodes()) for a in axes]))
        if anchors > self.limit or samples > MAX_SAMPLES:
            raise self._refusal(
                f"within the limits: it needs {_counts(axes)} = {anchors:,} anchors and {samples:,} samples, the "
                f"limits are {self.limit:,} and {MAX_SAMPLES:,}",
                self.eps,
            )

    def _on_grid(self, axes: Sequence[np.ndarray]) -> np.ndarray:
        mesh = np.meshgrid(*axes, indexing="ij")
        points = np.stack([x.ravel() for x in mesh], axis=1)
        return self.target(points).reshape(*mesh[0].shape, -1)

    def _thinned(self, found: Spectrum, goal: float) -> Spectrum:
        """Fewer anchors on single axes, while the error stays within the goal: sections ask for a little too much."""
        if self.target.box.d == 1 or math.prod(axis.p for axis in found.axes) > MAX_THINNED:
            return found
        for i in range(len(found.axes)):
            while found.axes[i].p > 1:
                less = self._lines(found.axes[:i]).best(found.axes[i].p - 1 - found.axes[i].p // 64, self._limit(i))
                if less is None:
                    break
                thinner = self.fitted((*found.axes[:i], less[0], *found.axes[i + 1 :]))
                if thinner.error > goal or thinner.largest > max(found.largest, self.max_value * self.size):
                    break
                found = thinner
        return found

    def _report(self, fraction: float) -> None:
        if self.progress is not None:
            self.progress("fitting", fraction)

    def _refusal(self, found: str, eps: float, best: Spectrum | None = None) -> BoundNotMet:
        return BoundNotMet(
            f"cannot bring a spectral grid for {self.target.describe()} on {self.target.box} {found}. Is there a kink, "
            f"a narrow feature, or is eps close to the rounding of {self.dtype}? Try construction='compose' (or "
            "'graded' for one variable), a larger eps, or a smaller box.",
            eps=eps,
            bound=None,
            build=None if best is None else lambda: self.finish(best),
        )


def _counts(axes: Sequence[Axis]) -> str:
    return " × ".join(str(axis.p) for axis in axes)


def _along(tensor: np.ndarray, maps: Sequence[Callable[[np.ndarray], np.ndarray]]) -> np.ndarray:
    """Axis i goes through maps[i], a linear map of columns; axes beyond stay."""
    for i, linear in enumerate(maps):
        moved = np.moveaxis(tensor, i, 0)
        columns = linear(moved.reshape(len(moved), -1))
        tensor = np.moveaxis(columns.reshape(len(columns), *moved.shape[1:]), 0, i)
    return tensor


def _test_points(axes: Sequence[Axis]) -> list[np.ndarray]:
    """For each axis points of [−1, 1] between the nodes, several a spacing where MAX_TESTS allows it, ends included."""
    most = max(3, int(MAX_TESTS ** (1 / len(axes))))
    rng = np.random.default_rng(1)
    found = []
    for axis in axes:
        tests = axis.fit.tests
        if len(tests) > most:
            tests = np.concatenate([[-1.0, 1.0], rng.choice(tests, most - 2, replace=False)])
        found.append(np.sort(tests))
    return found
