"""A soft head as it is stored: its numbers in a dtype, its output in that arithmetic, its error, and its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from attnc.constructions.built import Built
from attnc.constructions.construction import FIT, Construction, Request, for_eps, one_variable, refuse
from attnc.constructions.fitting.cell_head import CellHead, self_attention
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values, highest
from attnc.constructions.fitting.selection import Positions, num_positions
from attnc.errors import InputError, whole_number
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.targets.box import Box
from attnc.targets.target import Target

WIDTHS = (1e-100, 1e100)
"""Least and largest width of a box. Slopes are up to 10¹⁵ divided by it."""
QUIET = 1e-12
"""Least weight of a point in the centring of scores. Points at which rounding of the scores does no harm have it."""
SCORES_AT_ONCE = 2**21
"""Number of scores computed at once: 16 MB in float64."""
EVERYWHERE = {"float64": 4001, "float32": 40_001}
"""Number of evenly spaced points at which errors are measured. There are more in float32, where rounding is the larger
part of the error and varies from point to point."""

F = TypeVar("F")


@dataclass(frozen=True, eq=False)
class StoredHead:
    """A head over y = scale·x + offset, whose numbers are rounded to `dtype` and held in float64 arrays."""

    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]
    keys: SoftHead[np.ndarray]  # the head as a function of y
    dtype: str

    def y(self, x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points d"]:
        """Return the coordinate y in the arithmetic of the program."""
        return np.asarray(x.astype(self.dtype) * self.scale.astype(self.dtype) + self.offset.astype(self.dtype))

    def weights(self, x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points p"]:
        """Return the weights of the stored keys, computed in float64."""
        return self.keys.weights(self.y(x).astype(np.float64))

    def __call__(self, x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """Return the output in the arithmetic of the dtype."""
        slopes, offsets, values = (
            part.astype(self.dtype) for part in (self.keys.slopes, self.keys.offsets, self.keys.values)
        )
        head, found = SoftHead(slopes, offsets, values), np.empty((len(x), values.shape[1]))
        step = max(1, SCORES_AT_ONCE // len(values))
        for start in range(0, len(x), step):
            found[start : start + step] = head(self.y(x[start : start + step]))
        return found

    def keys_of_x(self) -> SoftHead[np.ndarray]:
        """The same head over x itself."""
        return self.keys.shifted(self.offset).scaled(self.scale)

    def with_values(self, values: Float[np.ndarray, "p outputs"]) -> StoredHead:
        return replace(self, keys=replace(self.keys, values=stored(values, self.dtype)))

    def program(self, target: Target, margin: float = 0.0) -> Program:
        """Return one head in which every token is a key. M = `margin` separates several output positions."""
        positions = Positions(num_positions(target), margin)
        keys = replace(self.keys, values=positions.stored(self.keys.values))
        return self_attention(CellHead(target, self.dtype, self.scale, self.offset, keys, 1.0, positions))


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return float64 numbers rounded to the dtype."""
    return array.astype(dtype).astype(np.float64)


def store(keys: SoftHead[np.ndarray], box: Box, dtype: str, centre: float | None = None) -> StoredHead:
    """Return the head of one variable in a coordinate y, |y| ≤ 2 on the box, with small scores where rounding matters.

    The same number may be added to all scores of a query. Here an affine function of y is added that makes the largest
    scores small, weighted by the spread of the values about the output A. Where A is an average of distant values, an
    error of a score moves the output. Where one value has all the weight, it does not.
    """
    lo, hi = float(box.lo[0]), float(box.hi[0])
    centre = 0.5 * lo + 0.5 * hi if centre is None else centre
    width = 2.0 ** math.ceil(math.log2(max(hi - centre, centre - lo)))  # a power of two: exact
    shift = float(stored(np.array(-centre / width), dtype))
    slopes = keys.slopes * width
    offsets = keys.offsets - slopes[:, 0] * shift
    y = _probes(keys, lo, hi) / width + shift
    placed, values = SoftHead(slopes, offsets, keys.values), keys.values
    scores, weights = placed.scores(y[:, None]), placed.weights(y[:, None])
    felt = np.zeros(len(y))
    for v in (values / (np.abs(values).max(axis=0) + 1e-300)).T:
        felt = np.maximum(felt, (weights * np.abs(v - (weights @ v)[:, None])).sum(axis=1))
    felt = felt / (felt.max() + 1e-300) + QUIET
    top = scores.max(axis=1)
    affine = np.stack([y, np.ones_like(y)], axis=1)
    tilt, _ = fit_values(affine * felt[:, None], (top * felt)[:, None], np.array([np.inf]), 25)
    largest = float(np.abs(np.concatenate([slopes[:, 0], offsets, values.ravel(), box.magnitude])).max())
    if not largest < float(np.finfo(dtype).max) / 8:
        raise InputError(
            f"numbers up to {largest:.3g} cannot be stored: they are more than {dtype} holds. Scale the function."
        )
    slope, offset = tilt[:, 0]
    kept = SoftHead(stored(slopes - slope, dtype), stored(offsets - offset, dtype), stored(values, dtype))
    return StoredHead(np.array([1 / width]), np.array([shift]), kept, dtype)


def _probes(keys: SoftHead[np.ndarray], lo: float, hi: float) -> Float[np.ndarray, " points"]:
    """Return Chebyshev points, and the points at which neighbouring keys in order of slope have equal scores."""
    slopes = keys.slopes[:, 0]
    order = np.argsort(slopes, kind="stable")
    with quiet():
        crossings = -np.diff(keys.offsets[order]) / np.diff(slopes[order])
    crossings = crossings[np.isfinite(crossings) & (crossings > lo) & (crossings < hi)]
    return np.unique(np.concatenate([chebyshev(lo, hi, 129), crossings]))


@dataclass(frozen=True, eq=False)
class MeasuredHead(Generic[F]):
    """A stored head of one variable, the fit that it stores, the largest error found, and its place."""

    fit: F
    head: StoredHead
    error: float
    at: float

    @property
    def p(self) -> int:
        return self.head.keys.num_keys

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        largest = float(np.abs(self.head.keys.values).max())
        return ("largest_value", largest), ("worst_error", self.error), ("worst_at", self.at)


def measured(fit: F, heads: Sequence[StoredHead], f: Function, x: Float[np.ndarray, " points"]) -> MeasuredHead[F]:
    """Return the head with the least error on these points, which reach from end to end, and on evenly spaced ones."""
    fine = np.union1d(x, np.linspace(x.min(), x.max(), EVERYWHERE[heads[0].dtype]))

    def errors(head: StoredHead, at: np.ndarray) -> np.ndarray:
        return np.abs(head(at[:, None]) - f(at)).max(axis=1)

    found = [MeasuredHead(fit, head, *highest(partial(errors, head), fine)) for head in heads]
    return min(found, key=lambda one: one.error)


# --- requests ---------------------------------------------------------------------------------------------------------


def check_fit(request: Request, num_anchors: int | tuple[int, ...] | None, max_value: float) -> None:
    """Raise InputError unless exactly one of eps and the number of anchors is given, and max_value is at least 1."""
    if (request.eps is None) == (num_anchors is None):
        raise InputError("give either eps or num_anchors")
    if num_anchors is not None:
        for count in num_anchors if isinstance(num_anchors, tuple) else (num_anchors,):
            whole_number("the number of anchors", count, 1)
    check_max_value(max_value)


def check_max_value(max_value: float) -> None:
    """Raise InputError unless max_value allows values as large as the function."""
    if not (isinstance(max_value, int | float) and 1 <= max_value < math.inf):
        raise InputError(
            f"max_value must be a number ≥ 1 and finite, found {max_value!r}: values below max|f| cannot reach f"
        )


def check_unary(
    name: str, target: Target, request: Request, num_anchors: int | None, max_value: float, most: int
) -> None:
    """Raise InputError unless the target, the request and the limits allow the fit of one head of one variable."""
    refuse(name, target, request, one_variable)
    box = target.box
    width, reach = float(box.widths[0]), float(box.magnitude[0])
    if not WIDTHS[0] < width < WIDTHS[1] or reach > WIDTHS[1]:
        raise InputError(
            f"{name} needs a box between {WIDTHS[0]:g} and {WIDTHS[1]:g} wide, found {box}: rescale the variable"
        )
    check_fit(request, num_anchors, max_value)
    if num_anchors is not None and num_anchors > most:
        raise InputError(f"num_anchors={num_anchors:,}: max_anchors, max_bytes and the fit allow {most:,}")


def unary_construction(
    theorem: Callable[..., Built], suits: Callable[[Target, Request], bool] = lambda target, request: False
) -> Construction:
    """Return the construction of a theorem for functions of one variable."""
    return Construction(theorem.__name__, for_eps(theorem), (*FIT, one_variable), suits, options=frozenset({"norm"}))
