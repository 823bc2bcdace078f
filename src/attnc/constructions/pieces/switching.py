"""Groups of keys joined into one head: at a kink the weight passes from one group to the next.

Add to the scores of group i an affine function ψ_i, the same for all its keys, with ψ_{i+1} − ψ_i rising at the kink
κ_i: softmax weights inside a group stay what they were, and the weights of the groups are a softmax of their own. With
D = B(x − κ) the difference of the log-sum-exps of two neighbours, the head is σ(−D)·A_i + σ(D)·A_{i+1}, so that

    |out − f| ≤ max(error of A_i, of A_{i+1}) + |A_i − A_{i+1}|·σ(−|D|),

and where the slopes of two pieces differ by J the last term is at most J·max_z zσ(−Bz) = 0.2785·J/B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.pieces.groups import Group
from attnc.constructions.unary.keys import Keys

if TYPE_CHECKING:
    from jaxtyping import Float

STEEPEST = 1e15
"""In units of 1/width: a switch narrower than that is narrower than the spacing of floats."""
_APART = np.concatenate([-np.geomspace(1.0, 1e-16, 129), np.geomspace(1e-16, 1.0, 129)])


def steepness(left: Group, right: Group, allowed: float) -> float:
    """The least B (to 5 %) with which two neighbours alone have an error of at most `allowed` near their kink."""
    kappa = left.piece.hi
    width = min(left.piece.width, right.piece.width)
    z = width * _APART
    x = np.clip(kappa + z, left.piece.lo, right.piece.hi)
    z = x - kappa
    a, b = left.keys(x), right.keys(x)
    f = np.where(z[:, None] <= 0, left.piece.f(np.minimum(x, kappa)), right.piece.f(np.maximum(x, kappa)))
    bend = _log_sum(right, x) - _log_sum(left, x) - _tangent(right, kappa, z) + _tangent(left, kappa, z)

    def error(B: float) -> float:
        with np.errstate(over="ignore"):
            weight = 1 / (1 + np.exp(-(B * z + bend)))[:, None]
        return float(np.abs((1 - weight) * a + weight * b - f).max())

    low, high = math.log(1 / width), math.log(STEEPEST / width)
    if error(math.exp(high)) > allowed:
        return math.exp(high)
    while high - low > 0.05:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if error(math.exp(middle)) <= allowed else (middle, high)
    return math.exp(high)


def join(groups: Sequence[Group], steep: Sequence[float]) -> Keys:
    """All keys of all groups; between groups i and i+1 the difference of log-sum-exps is 0 at κ_i, with slope steep[i].

    The group with the most keys keeps its scores as they are: there rounding is felt most.
    """
    tilts, lifts = [0.0], [0.0]
    for left, right, B in zip(groups, groups[1:], steep, strict=False):
        kappa = left.piece.hi
        jump = _log_sum(right, np.array([kappa])) - _log_sum(left, np.array([kappa]))
        rise = B - _mean_slope(right, kappa) + _mean_slope(left, kappa)
        tilts.append(tilts[-1] + rise)
        lifts.append(lifts[-1] - rise * kappa - float(jump[0]))
    chosen = max(range(len(groups)), key=lambda i: groups[i].p)
    slopes = [g.keys.slopes + (tilt - tilts[chosen]) for g, tilt in zip(groups, tilts, strict=True)]
    offsets = [g.keys.offsets + (lift - lifts[chosen]) for g, lift in zip(groups, lifts, strict=True)]
    return Keys(np.concatenate(slopes), np.concatenate(offsets), np.concatenate([g.keys.values for g in groups]))


def _log_sum(group: Group, x: np.ndarray) -> Float[np.ndarray, " points"]:
    """log Σ_k e^{score}."""
    scores = x[:, None] * group.keys.slopes + group.keys.offsets
    top = scores.max(axis=1)
    return np.asarray(top + np.log(np.exp(scores - top[:, None]).sum(axis=1)))


def _mean_slope(group: Group, x: float) -> float:
    """The derivative of the log-sum-exp: the average slope."""
    return float((group.keys.weights(np.array([x])) @ group.keys.slopes)[0])


def _tangent(group: Group, x: float, off: np.ndarray) -> Float[np.ndarray, " points"]:
    return np.asarray(_log_sum(group, np.array([x])) + _mean_slope(group, x) * off)
