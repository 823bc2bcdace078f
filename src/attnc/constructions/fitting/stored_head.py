"""One head over one variable as a program: token 0 carries x, every token is a key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.construction import Request
from attnc.constructions.fitting.minimax import chebyshev, fit_values
from attnc.errors import InputError, real_number
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.targets.box import Box
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

WIDTHS = (1e-100, 1e100)
"""Least and largest width of a box: slopes are up to 10¹⁵ divided by it."""
QUIET = 1e-12
"""Least weight of a point when scores are centred: for points at which rounding of the scores does no harm."""


@dataclass(frozen=True, eq=False)
class StoredHead:
    """The numbers as they are stored, in float64 arrays: y = scale·x + shift, scores slopes·y + offsets, values."""

    scale: float  # a power of two: exact
    shift: float
    keys: SoftHead[np.ndarray]  # of y
    dtype: str

    def y(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        """As the program computes it, back in float64."""
        kind = np.dtype(self.dtype).type
        return np.asarray(x.astype(kind) * kind(self.scale) + kind(self.shift), np.float64)

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        """The weights of the stored keys, without the rounding of an evaluation."""
        return self.keys.weights(self.y(x)[:, None])

    def __call__(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points outputs"]:
        """In the arithmetic of the dtype, by log-sum-exp."""
        a, c, v, y = (
            part.astype(self.dtype) for part in (self.keys.slopes[:, 0], self.keys.offsets, self.keys.values, self.y(x))
        )
        scores = y[:, None] * a + c
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray((weights @ v) / weights.sum(axis=1, keepdims=True), np.float64)

    def keys_of_x(self) -> SoftHead[np.ndarray]:
        """The same head over x itself."""
        return self.keys.shifted(self.shift).scaled(self.scale)

    def with_values(self, values: Float[np.ndarray, "p outputs"]) -> StoredHead:
        return replace(self, keys=replace(self.keys, values=stored(values, self.dtype)))

    def program(self, target: Target) -> Program:
        """Channels query.x, one; slope.x, bias, value.j: score = slope·y + bias."""
        name, p, values = target.box.names[0], self.keys.num_keys, self.keys.values
        query, slope, outputs = f"query.{name}", f"slope.{name}", tuple(f"out.{j}" for j in range(values.shape[1]))
        named = tuple(f"value.{j}" for j in range(values.shape[1]))
        embed = AffineBuilder(1, ("in.0",), p, (query, "one", slope, "bias", *named))
        embed.link(0, query, 0, "in.0", self.scale)
        embed.set(0, query, self.shift)
        embed.set(0, "one", 1.0)
        embed.set(np.arange(p), slope, self.keys.slopes[:, 0])
        embed.set(np.arange(p), "bias", self.keys.offsets)
        for j, channel in enumerate(named):
            embed.set(np.arange(p), channel, values[:, j])
        channels, scores = embed.channels_out, (f"by.{name}", "constant")
        head = Head(
            projection(channels, scores, {(query, scores[0]): 1.0, ("one", "constant"): 1.0}, self.dtype),
            projection(channels, scores, {(slope, scores[0]): 1.0, ("bias", "constant"): 1.0}, self.dtype),
            projection(channels, outputs, dict.fromkeys(zip(named, outputs, strict=True), 1.0), self.dtype),
            np.eye(len(outputs), dtype=self.dtype),
        )
        read = AffineBuilder(p, outputs, 1, outputs)
        for channel in outputs:
            read.link(0, channel, 0, channel)
        layers = (
            embed.build("embed", self.dtype),
            Attention("select", (head,), outputs),
            read.build("read", self.dtype),
        )
        return check(Program(layers, target.input_shapes, target.output_shape))


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """float64 numbers rounded to the dtype."""
    return array.astype(dtype).astype(np.float64)


def store(keys: SoftHead[np.ndarray], box: Box, dtype: str, centre: float | None = None) -> StoredHead:
    """The head in a coordinate y, |y| ≤ 2 on the box, with the scores made small where it matters.

    To all scores of a query the same may be added: here an affine function of y, which leaves the scores of the keys
    that count as small as possible, with the spread of the values about A for a weight. Where A is an average of
    values far apart, an error of a score is felt; where one value has all the weight, it is not.
    """
    lo, hi = float(box.lo[0]), float(box.hi[0])
    centre = 0.5 * lo + 0.5 * hi if centre is None else centre
    width = 2.0 ** math.ceil(math.log2(max(hi - centre, centre - lo)))
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
    tilt = fit_values(
        np.stack([y, np.ones_like(y)], axis=1) * felt[:, None], (top * felt)[:, None], np.array([np.inf]), 25
    )
    _check_range(np.concatenate([slopes[:, 0], offsets, values.ravel(), box.magnitude]), dtype)
    slope, offset = tilt.values[:, 0]
    kept = SoftHead(stored(slopes - slope, dtype), stored(offsets - offset, dtype), values)
    return StoredHead(1 / width, shift, kept, dtype).with_values(values)


def _check_range(numbers: np.ndarray, dtype: str) -> None:
    largest = float(np.abs(numbers).max())
    if not largest < float(np.finfo(dtype).max) / 8:
        raise InputError(f"numbers up to {largest:.3g} are to be stored, more than {dtype} holds: scale the function")


def worst_error(
    head: StoredHead, f: Callable[[np.ndarray], np.ndarray], x: Float[np.ndarray, " points"]
) -> tuple[float, float]:
    """(the largest error found, where): on the sample, and around its highest peaks on ever closer points."""

    def errors(at: np.ndarray) -> np.ndarray:
        return np.abs(head(at) - f(at)).max(axis=1)

    found = errors(x)
    for _ in range(3):
        inner = found[1:-1]
        peaks = 1 + np.flatnonzero((inner >= found[:-2]) & (inner >= found[2:]))
        peaks = peaks[np.argsort(-found[peaks])][:16]
        close = [np.linspace(x[i - 1], x[i + 1], 19)[1:-1] for i in peaks]
        if not close:
            break
        more = np.setdiff1d(np.concatenate(close), x)
        if not len(more):
            break
        x, found = np.concatenate([x, more]), np.concatenate([found, errors(more)])
        order = np.argsort(x)
        x, found = x[order], found[order]
    worst = int(np.argmax(found))
    return float(found[worst]), float(x[worst])


def check_fit(request: Request, num_anchors: int | None, max_value: float) -> None:
    """Raise InputError unless exactly one of eps and the number of anchors is given, and values may be large enough."""
    if (request.eps is None) == (num_anchors is None):
        raise InputError("give either eps or the number of anchors")
    if num_anchors is not None and (
        isinstance(num_anchors, bool) or not isinstance(num_anchors, int) or num_anchors < 1
    ):
        raise InputError(f"the number of anchors must be a whole number ≥ 1, found {num_anchors!r}")
    if not real_number("max_value", max_value) >= 1:
        raise InputError(f"max_value must be at least 1, found {max_value}: values below max|f| cannot reach f")


def check_unary(target: Target, name: str) -> None:
    """One variable, one position, and a box that scores can be written for."""
    box, positions = target.box, target.output_shape[0] if len(target.output_shape) == 2 else 1
    if box.d != 1 or positions != 1:
        raise InputError(
            f"{name} takes a function of one variable; {target.describe()} has {box.d} ({', '.join(box.names[:6])}"
            f"{', …' if box.d > 6 else ''}). Use construction='max_affine', which takes any number of variables and "
            "positions."
        )
    width, reach = float(box.widths[0]), float(box.magnitude[0])
    if not WIDTHS[0] < width < WIDTHS[1] or reach > WIDTHS[1]:
        raise InputError(
            f"{name} needs a box between {WIDTHS[0]:g} and {WIDTHS[1]:g} wide, found {box}: rescale the variable"
        )


def _probes(keys: SoftHead[np.ndarray], lo: float, hi: float) -> Float[np.ndarray, " points"]:
    """Chebyshev points, and where neighbouring keys in order of slope have equal scores."""
    slopes = keys.slopes[:, 0]
    order = np.argsort(slopes, kind="stable")
    rise = np.diff(slopes[order])
    with np.errstate(all="ignore"):
        crossings = -np.diff(keys.offsets[order]) / rise
    crossings = crossings[np.isfinite(crossings) & (crossings > lo) & (crossings < hi)]
    return np.unique(np.concatenate([chebyshev(lo, hi, 129), crossings]))
