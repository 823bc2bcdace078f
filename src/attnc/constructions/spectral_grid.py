"""One head over a tensor grid of anchors at a moderate temperature, its values solved instead of sampled."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.estimate import Estimate, Wanted
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES, bytes_per_anchor
from attnc.constructions.partition.positions import Positions, num_positions
from attnc.constructions.partition.weights import Cells, self_attention
from attnc.constructions.spectral.axis import MAX_VALUE
from attnc.constructions.spectral.search import Search, Spectrum
from attnc.errors import InputError
from attnc.targets.target import Target

NAME = "spectral_grid"
MAX_VARIABLES = 6
MARGIN_OF_POSITIONS = 40.0


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
    """One self-attention head over a tensor grid of anchors, soft, with values solved by least squares.

    Weights.  Those of `max_affine`, with β = c/h² moderate, c ∈ [0.1, 1.25], and anchors that reach `pad` spacings
              beyond the box: weights are normalised Gaussians. The softmax factorises over the axes, so the values
              that fit f best at Chebyshev points come from one small pseudo-inverse per axis.
    Rate.     Faster than any power of the number of anchors for analytic f, down to rounding. Nothing is proved here:
              `bound` is None.
    Chosen.   The fewest anchors on every axis, its c and its pad, from sections of f along that axis; then the whole
              grid is fitted and tested, and sections through the worst points are added until the error is ≤ eps.
              |values| stay ≤ max_value·max|f|, which keeps float32 accurate.
    """
    _check(target, eps, num_anchors, max_value)
    limit = min(max_anchors, max_bytes // bytes_per_anchor(target)) // num_positions(target)
    search = Search(target, max_value, limit, dtype, progress, partial(_build, target, dtype=dtype))
    if eps is not None:
        found = search.reach(eps)
    else:
        counts = (num_anchors,) * target.box.d if isinstance(num_anchors, int) else num_anchors
        assert counts is not None
        found = search.of_size(tuple(counts))
    return _build(target, found, dtype)


def estimate_spectral_grid(target: Target, wanted: Wanted) -> Estimate:
    """The size from sections alone, before the grid is fitted."""
    _check(target, wanted.eps, None, MAX_VALUE)
    limit = min(wanted.max_anchors, wanted.max_bytes // bytes_per_anchor(target)) // num_positions(target)
    search = Search(target, MAX_VALUE, limit, wanted.dtype, None, partial(_build, target, dtype=wanted.dtype))
    axes, errors = search.begin(wanted.eps)
    anchors = math.prod(axis.p for axis in axes) * num_positions(target)
    outputs = target.num_outputs // num_positions(target)

    def build() -> Built:
        return _build(target, search.reach(wanted.eps), wanted.dtype)

    return Estimate.one_layer(NAME, anchors, target.box.d, outputs, sum(errors), build)


def _check(target: Target, eps: float | None, num_anchors: int | tuple[int, ...] | None, max_value: float) -> None:
    d = target.box.d
    if len(target.input_shapes) > 1:
        raise InputError(f"{NAME} takes one input; for f(X, Y) use construction='max_affine_cross'")
    if d > MAX_VARIABLES:
        raise InputError(
            f"{NAME} serves 1 to {MAX_VARIABLES} variables, {target.describe()} has {d}: a grid of 5 anchors an axis "
            f"would have {5.0**d:.1e}. An expression can be composed instead (construction='compose')."
        )
    if not target.is_continuous:
        raise InputError(f"{NAME} needs a continuous function, {target.describe()} may jump; use max_affine, norm=2")
    if (eps is None) == (num_anchors is None):
        raise InputError("give either eps or num_anchors")
    if isinstance(num_anchors, tuple) and len(num_anchors) != d:
        raise InputError(f"num_anchors={num_anchors} for {d} variables")
    if not max_value >= 1:
        raise InputError(f"max_value must be a number ≥ 1, found {max_value}")


def _build(target: Target, found: Spectrum, dtype: str) -> Built:
    """In y = c(x − middle)/h a key is (2L, −cL²) with L the lattice: whole halves, so that both are exact."""
    axes, positions = found.axes, Positions(num_positions(target), MARGIN_OF_POSITIONS)
    c, h = np.array([axis.c for axis in axes]), np.array([axis.h for axis in axes])
    middle = target.box.lo / 2 + target.box.hi / 2
    mesh = np.meshgrid(*[axis.lattice for axis in axes], indexing="ij")
    anchors = np.stack([L.ravel() for L in mesh], axis=1)
    values = found.values.reshape(len(anchors), positions.n, -1)
    stored = positions.undo_leak(values).reshape(len(anchors) * positions.n, -1)
    bias = -(c * anchors**2).sum(axis=1)
    cells = Cells(target, dtype, c / h, -middle * c / h, anchors, bias, 1.0, positions, stored)
    counts = tuple((f"anchors_{name}", axis.p) for name, axis in zip(target.box.names, axes, strict=True))
    softness = tuple((f"c_{name}", axis.c) for name, axis in zip(target.box.names, axes, strict=True))
    largest = ("largest value", float(np.abs(stored).max()))
    return Built(self_attention(cells), NAME, None, parameters=(*counts, *softness, largest))
