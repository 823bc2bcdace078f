"""The failure signatures, each with the numbers that show it and the parameter that cures it.

A head is sharp if its keys win: the peak of a key is its largest weight at any point. Nothing is a failure that does no
harm: a soft head whose error is within eps is healthy. What is wrong is looked for in this order, and later signatures
only where earlier ones do not explain the error:

underflow    weights that are not finite or do not sum to 1; or scores so large that their rounding selects
boundary     the error within a cell of the box's ends exceeds eps and thrice the error inside
seams        as much where one head hands over to the next
diffuse      no key ever dominates (median peak below ½), and sharper scores would be better
drift        keys dominate but do not win (below 0.95): the output passes between levels; sharper scores would be better
oscillation  the selection is sharp, but the target varies by more than eps within the cell of one key
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from attnc.diagnosing.evidence import Evidence
from attnc.ir.reference import softmax

DOMINATES, WINS = 0.5, 0.95
EXCESS = 3.0
"""How much larger an error must be in one place than elsewhere to be a matter of that place."""
FACTORS = tuple(2.0**k for k in range(1, 13))
"""By which scores are sharpened, on trial."""


@dataclass(frozen=True)
class Symptom:
    """One failure signature: what shows it, where, and the remedy."""

    name: str
    evidence: str
    remedy: str
    where: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence} (at {self.where}). Remedy: {self.remedy}"


def signatures(evidence: Evidence) -> list[Symptom]:
    broken = _underflow(evidence)
    if broken is not None:
        return [broken]
    if evidence.wanted is None:
        diffuse = _uniform(evidence)
        return [] if diffuse is None else [diffuse]
    if not evidence.is_wrong:
        return []
    local = [symptom for symptom in (_boundary(evidence), _seams(evidence)) if symptom is not None]
    assert evidence.eps is not None
    elsewhere = ~(evidence.at_end | evidence.at_seam) if local else np.ones(len(evidence.points), bool)
    if local and not (evidence.errors[elsewhere] > evidence.eps).any():
        return local
    for look in (_soft, _oscillation):
        symptom = look(evidence)
        if symptom is not None:
            return [*local, symptom]
    return local


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
    if score is None or evidence.wanted is None or not evidence.is_wrong or u * score < 1:
        return None
    return Symptom(
        "underflow",
        f"scores reach {score:.3g} and are rounded by {u * score:.2g} or more: rounding, not distance, selects",
        f"lower beta by a factor {4 * u * score:.2g} (scores below {0.25 / u:.1e}), use float64, or measure from the "
        "middle of the box",
        evidence.place(int(evidence.errors.argmax())),
        {"largest_score": score, "rounded_by": u * score},
    )


def _uniform(evidence: Evidence) -> Symptom | None:
    """Without a target: attention that is all but uniform."""
    shares = []
    for weights in evidence.seen.heads:
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        shares.append(float(entropy.mean()) / math.log(max(2, weights.shape[1])))
    share = float(np.mean(shares))
    if share < 0.9 or evidence.peak > DOMINATES:
        return None
    return Symptom(
        "diffuse attention",
        f"the mean entropy is {100 * share:.1f} % of that of uniform weights, and no key has more than "
        f"{evidence.peaks.max():.3g} anywhere",
        f"multiply W_Q or W_K by {_factor(evidence.seen.heads):.3g}: then half of the keys win somewhere",
        "all points",
        {"entropy_share": share, "peak": evidence.peak, "factor": _factor(evidence.seen.heads)},
    )


def _boundary(evidence: Evidence) -> Symptom | None:
    outer = evidence.at_end
    return _local(
        evidence,
        outer,
        "boundary artefacts",
        "within a cell of the ends of the box",
        lambda error, eps: (
            f"let anchors reach {_pad(evidence.softness, error / eps)} spacings beyond the box (pad), or raise beta "
            f"{max(2.0, 3 / evidence.softness):.2g}-fold"
        ),
    )


def _seams(evidence: Evidence) -> Symptom | None:
    return _local(
        evidence,
        evidence.at_seam & ~evidence.at_end,
        "seams between heads",
        "where one head hands over to the next",
        lambda error, eps: (
            f"raise beta by ½·log(error/eps) = {0.5 * math.log(max(2.0, 2 * error / eps)):.2f} in units of the "
            f"spacing⁻², to {evidence.softness + 0.5 * math.log(max(2.0, 2 * error / eps)):.2f}, or use one more "
            "sentinel a side"
        ),
    )


def _local(
    evidence: Evidence, inside: np.ndarray, name: str, place: str, remedy: Callable[[float, float], str]
) -> Symptom | None:
    assert evidence.eps is not None
    rest = ~(evidence.at_end | evidence.at_seam)
    if not inside.any() or not rest.any():
        return None
    here, there = float(evidence.errors[inside].max()), float(evidence.errors[rest].max())
    if here <= evidence.eps or here < EXCESS * there:
        return None
    worst = int(np.where(inside, evidence.errors, -1).argmax())
    return Symptom(
        name,
        f"the error is {here:.3g} {place} and {there:.3g} elsewhere",
        remedy(here, evidence.eps),
        evidence.place(worst),
        {"error_there": here, "error_elsewhere": there},
    )


def _soft(evidence: Evidence) -> Symptom | None:
    """Diffuse attention, or drift: keys do not win, and the errors at their peaks fall when scores are sharpened."""
    if evidence.peak >= WINS:
        return None
    peaks = _peak_points(evidence.seen.heads)
    assert evidence.wanted is not None
    assert evidence.eps is not None
    before = float(np.quantile(evidence.errors[peaks], 0.9))
    factor, after = _factor(evidence.seen.heads), math.nan
    if evidence.subject.sharpened is not None:
        after = _error_sharpened(evidence, factor, peaks)
        if not after < 0.7 * before:
            return None
    if before <= 0.5 * evidence.eps:
        return None
    is_diffuse = evidence.peak < DOMINATES
    shown = "" if math.isnan(after) else f": the error at the keys' own places falls from {before:.3g} to {after:.3g}"
    seen = (
        f"no key dominates: the median of their largest weights is {evidence.peak:.2f}"
        if is_diffuse
        else f"keys dominate but do not win: the median of their largest weights is {evidence.peak:.2f}, so the "
        "output passes smoothly between the levels of its anchors"
    )
    worst = int(peaks[evidence.errors[peaks].argmax()])
    return Symptom(
        "diffuse attention" if is_diffuse else "drift between anchors",
        f"{seen}; the error at their own places is {before:.3g}",
        f"multiply beta (W_K) by {factor:.3g}{shown}",
        evidence.place(worst),
        {
            "peak": evidence.peak,
            "factor": factor,
            "error_before": before,
            **({} if math.isnan(after) else {"error_after": after}),
        },
    )


def _error_sharpened(evidence: Evidence, factor: float, peaks: np.ndarray) -> float:
    assert evidence.subject.sharpened is not None
    assert evidence.wanted is not None
    found = evidence.subject.sharpened(factor, evidence.points[peaks])
    return float(np.quantile(np.abs(found - evidence.wanted[peaks]).max(axis=1), 0.9))


def _oscillation(evidence: Evidence) -> Symptom | None:
    """The target varies by more than eps among points that have the same key."""
    assert evidence.wanted is not None
    assert evidence.eps is not None
    head = max(evidence.seen.heads, key=lambda weights: len(np.unique(weights.argmax(axis=1))))
    first = head.argmax(axis=1)
    ranges = np.zeros(head.shape[1])
    for key in np.unique(first):
        ranges[key] = float(np.ptp(evidence.wanted[first == key], axis=0).max())
    worst = int(evidence.errors.argmax())
    varies, error = float(ranges[first[worst]]), float(evidence.errors.max())
    if varies < evidence.eps or varies < 0.5 * error:
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
    """The least power of 2 by which scores must be multiplied for the median key to win: softmax(r·s) ∝ wʳ, exactly."""
    for factor in FACTORS:
        found = []
        for weights in heads:
            sharp = softmax(factor * np.log(np.maximum(np.nan_to_num(weights, nan=0.0), 1e-300)))
            found.append(sharp.max(axis=0)[np.unique(sharp.argmax(axis=1))])
        if np.median(np.concatenate(found)) >= WINS:
            return factor
    return FACTORS[-1]


def _peak_points(heads: list[np.ndarray]) -> np.ndarray:
    """For every key that is ever first: the point where its weight is largest."""
    return np.unique(np.concatenate([weights.argmax(axis=0)[np.unique(weights.argmax(axis=1))] for weights in heads]))


def _pad(softness: float, ratio: float) -> int:
    """Anchors beyond an end weigh e^{−βh²k²}: k such that this is below eps/error."""
    return math.ceil(math.sqrt(math.log(max(2.0, 2 * ratio)) / softness))
