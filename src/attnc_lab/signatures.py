"""The failure signatures of attention, each with the numbers that show it and the parameter that removes it.

The peak of a key is its largest weight at any point. A head is sharp if the peaks of its keys are near 1. A soft head
whose error is within eps is healthy. The signatures are tried in this order, and later ones only if earlier ones do not
explain the error:

underflow    weights are not finite or do not sum to 1, or scores are so large that their rounding selects
boundary     the error within a cell of the box's ends exceeds eps and three times the error inside
seams        the error where one head takes over from another exceeds eps, and twice the error elsewhere; 1.5 times is
             enough if the error elsewhere is within eps
diffuse      no key ever dominates (median peak below ½), and sharper scores would be better
drift        keys dominate but do not win (below 0.95): the output passes between levels; sharper scores would be better
oscillation  the selection is sharp, but the target varies by more than eps within the cell of one key
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

import attnc

if TYPE_CHECKING:
    from jaxtyping import Float

DOMINATES, WINS = 0.5, 0.95
"""The median peak above which keys dominate, and the one above which they win. At 0.95 all other keys share 5 %."""
EXCESS = 3.0
"""An error is attributed to the ends of the box if it exceeds the error elsewhere by this factor."""
SEAM_EXCESS, SEAM_EXCESS_ALONE = 2.0, 1.5
"""The factor for seams, and the one that is enough if the error is above eps at seams alone. Measured for four heads of
8 anchors with one sentinel per side: the factor is 3.1 at βh² = 0.75, 2.6 at 1, and 1.7 at 1.5. From 2.75 on, where
seams are healthy, it is 1.1 or less."""
FACTORS = tuple(2.0**k for k in range(1, 13))
"""The factors by which scores are sharpened for a test, up to 4096."""
SOFT_VARIATION = 1.5
"""The ratio of the variation within a cell to the error from which a soft head is said to oscillate. With one value for
each cell, taken in its middle, the ratio is 2. A soft head with βh² = 0.4 has 1.2 at the ends of its range."""
SILENT = 1e-3
"""A head whose weight is below this is inactive."""


@dataclass(frozen=True, eq=False)
class Observation:
    """The flat outputs at every point, each head's weights over its keys, and the largest |score| if it is known."""

    outputs: Float[np.ndarray, "points outputs"]
    heads: list[Float[np.ndarray, "points keys"]]
    largest_score: float | None


@dataclass(frozen=True, eq=False)
class Subject:
    """A subject with attention: a function to observe it, and one that returns its outputs with all scores scaled."""

    look: Callable[[np.ndarray], Observation]
    sharpened: Callable[[float, np.ndarray], np.ndarray] | None
    roundoff: float


@dataclass(frozen=True, eq=False)
class Evidence:
    """The points, the observation there, the wanted outputs, and the quantities that signatures derive from them."""

    points: np.ndarray
    seen: Observation
    wanted: np.ndarray
    """The target at the points. Without a target it is NaN, and so are the errors."""
    eps: float
    """The tolerated error; infinite without a target."""
    box: attnc.Box | None
    """The box of the points, if they have one."""
    subject: Subject

    @cached_property
    def errors(self) -> np.ndarray:
        return np.nan_to_num(np.abs(self.seen.outputs - self.wanted).max(axis=1), nan=math.inf)

    @cached_property
    def is_wrong(self) -> bool:
        """Whether any error is larger than tolerated. It is False without a target, because no error is known."""
        return bool(self.errors.max() > self.eps)

    @cached_property
    def peaks(self) -> np.ndarray:
        return _peaks(self.seen.heads)

    @cached_property
    def peak(self) -> float:
        return float(np.median(self.peaks))

    @cached_property
    def softness(self) -> float:
        """βh², from the peak of a key among equally spaced keys: peak = 1/(1 + 2e^{−βh²} + …)^d.

        The sum is √(π/βh²) where many keys share the weight.
        """
        share = max(self.peak, 1e-9) ** (1 / max(1, min(3, self.points.shape[1])))
        if share < DOMINATES:
            return max(1e-3, math.pi * share**2)
        return max(1e-3, -math.log(max(1e-12, (1 / min(share, 1 - 1e-12) - 1) / 2)))

    @cached_property
    def num_cells(self) -> int:
        """The number of keys with the largest weight at some point, in the head that has the most of them."""
        return max(len(_winners(weights)) for weights in self.seen.heads)

    @property
    def facts(self) -> dict[str, float]:
        return {"peak": self.peak, "softness": self.softness, "cells": float(self.num_cells)}

    def place(self, index: int) -> str:
        names = [f"x{i}" for i in range(self.points.shape[1])] if self.box is None else self.box.names
        return ", ".join(f"{name} = {x:.6g}" for name, x in zip(names, self.points[index], strict=True))

    @cached_property
    def at_end(self) -> np.ndarray:
        """Whether a point is within a cell of the box's ends, or within twice the width of soft attention.

        A cell is a side divided by the number of cells along it. Weights fall like e^{−βd²} with the distance d, which
        has a standard deviation of 1/√(2βh²) cells.
        """
        if self.box is None or not self.box.is_bounded:
            return np.zeros(len(self.points), bool)
        per_axis = max(4.0, self.num_cells ** (1 / self.box.d))
        distance = np.minimum(self.points - self.box.lo, self.box.hi - self.points) / self.box.widths
        reach = min(per_axis / 4, max(1.0, 2 / math.sqrt(2 * self.softness)))
        return distance.min(axis=1) < reach / per_axis

    @cached_property
    def at_seam(self) -> np.ndarray:
        """Whether two heads share a point: both have part of their weight on keys other than their resting keys."""
        if len(self.seen.heads) < 2:
            return np.zeros(len(self.points), bool)
        activity = np.stack([_activity(weights) for weights in self.seen.heads], axis=1)
        return ((activity > SILENT) & (activity < 1 - SILENT)).sum(axis=1) >= 2

    @cached_property
    def elsewhere(self) -> np.ndarray:
        """Whether a point is neither at an end of the box nor at a seam."""
        return ~(self.at_end | self.at_seam)


def _winners(weights: np.ndarray) -> np.ndarray:
    """Return the keys with the largest weight at some point."""
    return np.unique(np.nan_to_num(weights, nan=0.0).argmax(axis=1))


def _peaks(heads: list[np.ndarray]) -> np.ndarray:
    """Return the largest weight of every key that wins at some point, over all heads."""
    return np.concatenate([np.nan_to_num(weights, nan=0.0).max(axis=0)[_winners(weights)] for weights in heads])


def _activity(weights: np.ndarray) -> np.ndarray:
    """Return the weight of a head on keys other than its resting keys, which win at far more points than others."""
    wins = np.bincount(weights.argmax(axis=1), minlength=weights.shape[1])
    winning = wins[wins > 0]
    resting = wins > 2.5 * np.median(winning)
    found: np.ndarray = weights[:, ~resting].sum(axis=1)
    return found


@dataclass(frozen=True)
class Symptom:
    """One failure signature: its evidence, its place, and its remedy.

    Attributes
    ----------
    name, evidence, remedy, where : str
        The signature, the observation that shows it, the advice which parameter to change, and the point.
    numbers : mapping
        The figures in the evidence and the remedy, by name.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=0.2, construction="max_affine")
    >>> [symptom] = attnc.diagnose(net, eps=1e-3).symptoms
    >>> symptom.name, sorted(symptom.numbers)
    ('oscillation', ['error', 'points_per_axis', 'varies'])
    """

    name: str
    evidence: str
    remedy: str
    where: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence} (at {self.where}). Remedy: {self.remedy}"


def signatures(evidence: Evidence) -> list[Symptom]:
    """Return the failure signatures that the evidence shows."""
    if (broken := _underflow(evidence)) is not None:
        return [broken]
    if evidence.eps == math.inf:
        return list(_uniform(evidence))
    if not evidence.is_wrong:
        return []
    local = list(_local(evidence))
    if local and not (evidence.errors[evidence.elsewhere] > evidence.eps).any():
        return local
    symptom = _soft(evidence) or _oscillation(evidence)
    return local if symptom is None else [*local, symptom]


def _underflow(evidence: Evidence) -> Symptom | None:
    heads = evidence.seen.heads
    sums = np.stack([weights.sum(axis=1) for weights in heads], axis=1)
    broken = ~(np.abs(sums - 1) < 1e-2).all(axis=1) | ~np.isfinite(evidence.seen.outputs).all(axis=1)
    if broken.any():
        share = float(broken.mean())
        return Symptom(
            "underflow",
            f"at {100 * share:.1f} % of the points the weights do not sum to 1, or the output is not finite: every "
            "exponential was 0, or one overflowed",
            "subtract the largest score before the exponential (log-sum-exp, torch.softmax), or divide W_K by the "
            "factor by which scores exceed 80",
            evidence.place(int(broken.argmax())),
            {"share": share},
        )
    score, u = evidence.seen.largest_score, evidence.subject.roundoff
    if score is None or not evidence.is_wrong or u * score < 1:
        return None
    return Symptom(
        "underflow",
        f"scores reach {score:.3g} and are rounded by {u * score:.2g} or more: rounding, not distance, selects",
        f"lower beta by a factor {4 * u * score:.2g} (scores below {0.25 / u:.1e}), use float64, or measure from the "
        "middle of the box",
        evidence.place(int(evidence.errors.argmax())),
        {"largest_score": score, "rounded_by": u * score},
    )


def _uniform(evidence: Evidence) -> Iterator[Symptom]:
    """Find attention that is nearly uniform, without a target."""
    shares = []
    for weights in evidence.seen.heads:
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        shares.append(float(entropy.mean()) / math.log(max(2, weights.shape[1])))
    share, factor = float(np.mean(shares)), _factor(evidence.seen.heads)
    if share >= 0.9 and evidence.peak <= DOMINATES:
        yield Symptom(
            "diffuse attention",
            f"the mean entropy is {100 * share:.1f} % of that of uniform weights, and no key has more than "
            f"{evidence.peaks.max():.3g} anywhere",
            f"multiply W_Q or W_K by {factor:.3g}: then half of the keys win somewhere",
            "all points",
            {"entropy_share": share, "peak": evidence.peak, "factor": factor},
        )


def _local(evidence: Evidence) -> Iterator[Symptom]:
    """Find places where errors are far larger than elsewhere: at the ends of the box, and at seams between heads."""
    rest, at_seam = evidence.elsewhere, evidence.at_seam & ~evidence.at_end
    ends, seams = (EXCESS, EXCESS), (SEAM_EXCESS, SEAM_EXCESS_ALONE)
    for inside, name, place, remedy, (excess, alone) in (
        (evidence.at_end, "boundary artefacts", "within a cell of the ends of the box", _end_remedy, ends),
        (at_seam, "seams between heads", "where one head takes over from another", _seam_remedy, seams),
    ):
        if not inside.any() or not rest.any():
            continue
        here, there = float(evidence.errors[inside].max()), float(evidence.errors[rest].max())
        if here > evidence.eps and here >= (excess if there > evidence.eps else alone) * there:
            yield Symptom(
                name,
                f"the error is {here:.3g} {place} and {there:.3g} elsewhere",
                remedy(evidence.softness, math.log(max(2.0, 2 * here / evidence.eps))),
                evidence.place(int(np.where(inside, evidence.errors, -1).argmax())),
                {"error_there": here, "error_elsewhere": there},
            )


def _end_remedy(softness: float, log_excess: float) -> str:
    """Advise k anchors beyond each end, such that the weight e^{−βh²k²} of the last one is below eps/error."""
    pad = math.ceil(math.sqrt(log_excess / softness))
    return f"let anchors reach {pad} spacings beyond the box (pad), or raise beta {max(2.0, 3 / softness):.2g}-fold"


def _seam_remedy(softness: float, log_excess: float) -> str:
    more = 0.5 * log_excess
    return (
        f"raise beta by ½·log(error/eps) = {more:.2f} in units of the spacing⁻², to {softness + more:.2f}, or use one "
        "more sentinel per side"
    )


def _soft(evidence: Evidence) -> Symptom | None:
    """Find diffuse attention or drift. Keys do not win, and errors at their peaks fall when scores are sharpened."""
    if evidence.peak >= WINS:
        return None
    peaks = np.unique(np.concatenate([head.argmax(axis=0)[_winners(head)] for head in evidence.seen.heads]))
    before = float(np.quantile(evidence.errors[peaks], 0.9))
    factor, after = _factor(evidence.seen.heads), math.nan
    if evidence.subject.sharpened is not None:
        found = evidence.subject.sharpened(factor, evidence.points[peaks])
        after = float(np.quantile(np.abs(found - evidence.wanted[peaks]).max(axis=1), 0.9))
        if not after < 0.7 * before:
            return None
    if before <= 0.5 * evidence.eps:
        return None
    name, seen, so = "diffuse attention", "no key dominates", ""
    if evidence.peak >= DOMINATES:
        name, seen = "drift between anchors", "keys dominate but do not win"
        so = ", so the output passes smoothly between the levels of its anchors"
    cured = {} if math.isnan(after) else {"error_after": after}
    shown = f": the error at the keys' own places falls from {before:.3g} to {after:.3g}" if cured else ""
    return Symptom(
        name,
        f"{seen}: the median of their largest weights is {evidence.peak:.2f}{so}; the error at their own places is "
        f"{before:.3g}",
        f"multiply beta (W_K) by {factor:.3g}{shown}",
        evidence.place(int(peaks[evidence.errors[peaks].argmax()])),
        {"peak": evidence.peak, "factor": factor, "error_before": before, **cured},
    )


def _oscillation(evidence: Evidence) -> Symptom | None:
    """Find a target that varies by more than eps among points that have the same key."""
    first = max(evidence.seen.heads, key=lambda weights: len(_winners(weights))).argmax(axis=1)
    worst = int(evidence.errors.argmax())
    varies = float(np.ptp(evidence.wanted[first == first[worst]], axis=0).max())
    error = float(evidence.errors.max())
    least = 0.5 if evidence.peak >= DOMINATES else SOFT_VARIATION  # a soft head may be wrong for another reason
    if varies < evidence.eps or varies < least * error:
        return None
    d = evidence.points.shape[1]
    per_axis = max(2, round(evidence.num_cells ** (1 / d)))
    needed = math.ceil(per_axis * max(1.0, error / evidence.eps))
    return Symptom(
        "oscillation",
        f"the grid is too coarse: within the cell of one key the target varies by {varies:.3g}, and the error is "
        f"{error:.3g}",
        f"raise points_per_axis from about {per_axis} to {needed}, or solve the values (spectral_grid)",
        evidence.place(worst),
        {"varies": varies, "error": error, "points_per_axis": float(needed)},
    )


def _factor(heads: list[np.ndarray]) -> float:
    """Return the smallest power of 2 by which scores must grow for the median key to win: softmax(r·s) ∝ wʳ exactly."""
    for factor in FACTORS:
        sharp = []
        for weights in heads:
            scores = factor * np.log(np.maximum(np.nan_to_num(weights, nan=0.0), 1e-300))
            grown = np.exp(scores - scores.max(axis=1, keepdims=True))
            sharp.append(grown / grown.sum(axis=1, keepdims=True))
        if np.median(_peaks(sharp)) >= WINS:
            return factor
    return FACTORS[-1]
