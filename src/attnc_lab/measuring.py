"""Elements of measurements: sample points, networks that claim nothing, errors, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import attnc
from attnc_lab.experiment import Row

if TYPE_CHECKING:
    from jaxtyping import Float


def lattice(axis: Float[np.ndarray, " places"], d: int) -> Float[np.ndarray, "points d"]:
    """Return all points whose coordinates are places of the axis. The last coordinate varies fastest."""
    return np.stack(np.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d)


def middles(lo: float, hi: float, count: int) -> Float[np.ndarray, " points"]:
    """Return the middles of `count` equal parts of [lo, hi]."""
    return lo + (hi - lo) * (np.arange(count) + 0.5) / count


def unproved(target: attnc.Target, built: attnc.constructions.Built, eps: float | None = None) -> attnc.Network:
    """Return a construction as a network that claims nothing. It can be run and recorded."""
    nothing = attnc.Certificate(
        bound=None, observed=None, terms=(), assumptions=(), dtype=str(built.program.dtype), method="none"
    )
    return attnc.Network(built.program, nothing, target.box, built.construction, target.text, eps)


def errors_at(
    points: Float[np.ndarray, "points ..."], run: Callable[[np.ndarray], np.ndarray], target: attnc.Target
) -> Float[np.ndarray, "points outputs"]:
    """Return |run − target| at the points, in float64, with the outputs of all tokens side by side."""
    found = run(points).astype(np.float64).reshape(len(points), -1)
    return np.abs(found - target(points.reshape(len(points), -1)))


def sizes_of(built: attnc.constructions.Built) -> Row:
    """Return the size of a construction, and its bound if its theorem has one."""
    program = built.program
    found: Row = {"anchors": program.num_anchors, "parameters": program.num_parameters}
    return found | ({} if built.bound is None else {"bound": built.bound.value})
