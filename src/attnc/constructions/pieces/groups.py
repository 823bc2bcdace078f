"""A group of keys that together give one smooth piece of a function, or one graded to its singular points.

Anchors are spaced by a `Grading`, and the values are solved for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.pieces.grading import Grading
from attnc.constructions.unary.compass import Shape
from attnc.constructions.unary.keys import Function, Keys
from attnc.constructions.unary.minimax import Fit, chebyshev, fit_values
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float

PASSES = 8


@dataclass(frozen=True, eq=False)
class Piece:
    """f on [lo, hi]; `points` are where it is not smooth, at the ends or inside."""

    f: Function
    lo: float
    hi: float
    limits: Float[np.ndarray, " outputs"]  # of the values
    points: tuple[float, ...] = ()
    unit: float = UNIT_ROUNDOFF["float64"]  # of the arithmetic that the head runs in
    _samples: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, default_factory=dict)  # by number of keys

    @property
    def width(self) -> float:
        return self.hi - self.lo

    def sample(self, anchors: np.ndarray, t0: float) -> tuple[np.ndarray, np.ndarray]:
        """Points dense enough for these anchors, and f there."""
        if not self.points:
            if len(anchors) not in self._samples:
                x = chebyshev(self.lo, self.hi, (6 if len(anchors) <= 64 else 4) * len(anchors) + 24)
                self._samples[len(anchors)] = x, self.f(x)
            return self._samples[len(anchors)]
        x = graded_points(self.lo, self.hi, self.points, anchors, t0, 6)
        return x, self.f(x)


@dataclass(frozen=True, eq=False)
class Group:
    piece: Piece
    keys: Keys
    anchors: Float[np.ndarray, " p"]
    error: float  # the largest on the sample of the piece
    shape: Shape  # (log c, log steps, shift), for a graded group (…, log t0, u), and () for a constant

    @property
    def p(self) -> int:
        return self.keys.p


def graded_points(
    lo: float, hi: float, points: tuple[float, ...], anchors: np.ndarray, t0: float, per_gap: int
) -> Float[np.ndarray, " sample"]:
    """Chebyshev points in every gap between anchors, and ever closer to the singular points."""
    near = t0 * 10.0 ** -np.arange(0.0, 16.1, 0.5)
    marks = np.concatenate([anchors, [lo, hi], np.array(points)])
    marks = np.unique(marks[(marks >= lo) & (marks <= hi)])
    inner = chebyshev(0.0, 1.0, per_gap)[1:-1]
    between = (marks[:-1, None] + np.diff(marks)[:, None] * inner).ravel()
    close = np.concatenate([kappa + side * near for kappa in points for side in (-1.0, 1.0)] or [between])
    x = np.concatenate([marks, between, close, chebyshev(lo, hi, 4 * per_gap)])
    return np.unique(x[(x >= lo) & (x <= hi)])


def make_group(piece: Piece, num_keys: int, shape: Shape, passes: int = PASSES, goal: float = 0.0) -> Group:
    """The keys of this shape with their values solved."""
    c, steps, shift = math.exp(shape[0]), math.exp(shape[1]), shape[2]
    t0, u = (math.exp(shape[3]), shape[4]) if piece.points else (1.0, 0.0)
    slopes, offsets, anchors = Grading(piece.lo, piece.hi, piece.points, t0, u).tangents(num_keys, c, steps, shift)
    x, f = piece.sample(anchors, t0)
    weights = Keys(slopes, offsets, np.zeros(num_keys)).weights(x)
    fit = fit_values(weights, f, piece.limits, passes, goal)
    return Group(piece, Keys(slopes, offsets, fit.values), anchors, fit.error, shape)


def constant_group(piece: Piece) -> Group:
    """One key: the middle of the range."""
    x = graded_points(piece.lo, piece.hi, piece.points, np.linspace(piece.lo, piece.hi, 17), piece.width, 6)
    f = piece.f(x)
    least, most = f.min(axis=0), f.max(axis=0)
    fit = Fit(np.clip(0.5 * least + 0.5 * most, -piece.limits, piece.limits)[None], float((most - least).max() / 2))
    zero, middle = np.zeros(1), np.array([0.5 * piece.lo + 0.5 * piece.hi])
    return Group(piece, Keys(zero, zero, fit.values), middle, fit.error, ())
