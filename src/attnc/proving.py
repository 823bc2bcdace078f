"""The error of a network and its proof: observed at samples, then proved from the weights."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Progress
from attnc.errors import InputError, ProgramError
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import OutOfTime, check_time, time_limit
from attnc.numerics.rounding import UNIT_ROUNDOFF, engine_assumption
from attnc.proofs.cells.branching import Budget
from attnc.proofs.certificate import ASSUMING, TRUSTED, Certificate
from attnc.proofs.gradient_prover import gradient_task
from attnc.proofs.kinds.point import hash_of_rows, points_of
from attnc.proofs.observed import observed_error, sample_points
from attnc.proofs.proof import Leaves, Points, Proof, Stages
from attnc.proofs.prover import ProofRequest, num_softmaxes
from attnc.proofs.provers import FEW_VARIABLES, HEAD_BY_HEAD, best_proof
from attnc.proofs.staged.claims import NotBoundedError
from attnc.proofs.staged.gradient import StagedGradient
from attnc.proofs.staged.prover import claimed_stages
from attnc.targets.expressions.kinks import REACH
from attnc.targets.target import Target

if TYPE_CHECKING:
    from attnc.network import Network

BESIDE_THEOREM = 1.01
"""Without eps, a proof replaces the bound of a theorem if it is larger by this factor at most, as it can be re-proved.
Measured for 27 partitions of one to four variables: proofs are at most 1.0003 times a theorem that is attained."""
QUADRATURE = 1e-3
"""Relative error allowed to an observed L_p norm, which is a mean over sampled points. If the observed norm exceeds the
bound by more, compile reports a defect."""

REFERENCE_POINTS = 256
"""Number of points at which the float64 error of an expression is enclosed. Measured with the 108 expressions of the
corpus on finite boxes: with 512 points the largest error is at most 17 % larger, with 128 at most 31 % smaller."""
USUAL_ROUNDINGS = 64
"""An error of an expression is unusual above this number of roundings of its value. Enclosures of the same expressions
are 38 roundings wide in the median, and 112 or less for 95 %. The errors that count as unusual are at most 0.4 % of the
eps of their case."""


def unproved(
    target: Target,
    dtype: str,
    norm: str,
    truncation: float,
    *,
    bound: float | None = None,
    terms: tuple[Term, ...] = (),
    method: str = "estimate",
) -> Certificate:
    """Return a certificate that nothing was proved about, with the bound of a theorem if there is one."""
    count = target.num_check_points
    return Certificate(
        bound,
        observed=None,
        terms=terms,
        assumptions=(*target.assumptions, engine_assumption(dtype), *([] if bound is None else [TRUSTED])),
        dtype=dtype,
        norm=norm,
        method=method if count is None else f"check at the table's {count:,} points",
        truncation=truncation,
        evidence=None if count is None else Points(count),
    )


def observe(network: Network, target: Target, progress: Progress | None) -> Network:
    """Return the network with the largest error at samples or at all points of a table.

    The float64 error of the expression itself is subtracted where it is unusually large. If the time
    runs out, a network with a bound is returned without an observed error; OutOfTime is raised if there is no bound.
    """

    def report(fraction: float) -> None:
        check_time("observing")
        if progress is not None:
            progress("observing", fraction)

    p = float(network.certificate.norm)
    try:
        seen = observed_error(lambda points: network.at(points, report), target, network.work_per_point, p)
    except OutOfTime:
        if network.certificate.bound is None:
            raise
        return network
    unusual, _ = _reference_errors(target)
    return _checked(_with_observed(network, max(0.0, seen - unusual)), target)


def prove(network: Network, target: Target, progress: Progress | None, seconds: float) -> Network:
    """Return the network with the bound that a prover derives from its weights, if it can replace the theorem's.

    It does so if it is smaller, or within eps: the checker can re-prove it, and cannot re-prove a theorem.
    If there is neither, the bound is None and the method is "estimate". `seconds` are counted. OutOfTime is raised if
    the time on the wall is over before there is a bound.
    """
    claim = network.certificate
    request = ProofRequest(
        p=float(claim.norm),
        eps=network.eps or BESIDE_THEOREM * (claim.bound or 0.0),
        observed=claim.observed or 0.0,
        truncation=network.truncation,
        progress=progress,
        derivation=network.derivation,
        has_theorem=claim.bound is not None,
    )
    try:
        with time_limit(counted=seconds):
            proof = best_proof(network.program, target, request)
    except OutOfTime:
        if claim.bound is None:
            raise
        return network
    if proof is None or not _replaces(proof, claim.bound, request):
        return network
    return proved_by(network, proof, target)


def with_claims(network: Network, target: Target) -> Network:
    """Return a network without a proof with what `attnc prove` needs: the rows of a table, or the claims about heads.

    The claims state what every head should compute. They are stored where heads would be proved one by one.
    """
    request = ProofRequest(eps=network.eps or 0.0, derivation=network.derivation)
    claim = network.certificate
    if target.num_check_points is not None:
        evidence: Points | Stages = points_of(target, hash_of_rows(target))
    elif network.derivation is not None and target.expression is not None and _has_claims(network, target, request):
        try:
            evidence = claimed_stages(network.program, target, request)
        except (ProgramError, NotBoundedError):
            return network
    else:
        return network
    return network._with_certificate(dataclasses.replace(claim, evidence=evidence))


def _has_claims(network: Network, target: Target, request: ProofRequest) -> bool:
    is_flat = num_softmaxes(network.program) <= 1 and target.box.d <= FEW_VARIABLES
    return network.certificate.norm == "inf" and not is_flat and HEAD_BY_HEAD.accepts(network.program, target, request)


def proved_by(network: Network, proof: Proof, target: Target) -> Network:
    """Return the network with the bound and the evidence of a proof. Raise InputError if a sample contradicts it."""
    return _checked(network._with_certificate(network.certificate.proved(proof, _method(proof, target))), target)


def prove_gradient(
    network: Network, target: Target, eps: float, progress: Progress | None, seconds: float
) -> tuple[Network, float]:
    """Return the network with a bound of the errors of all partial derivatives, and that bound.

    If the error that is seen at samples exceeds eps, nothing is proved, and this error is returned.
    """
    with time_limit(counted=seconds):
        task = gradient_task(network.program, target, eps, network.derivation, network._slopes_at)
        if task.observed > eps:
            return network, task.observed
        if isinstance(task, StagedGradient) and not isinstance(network.certificate.evidence, Stages):
            network = _proved_by_heads(network, target, progress)
        proof = task.proof(Budget(progress=progress))
    if not math.isfinite(proof.bound):
        return network, proof.bound
    return network._with_certificate(dataclasses.replace(network.certificate, gradient=proof)), proof.bound


def _proved_by_heads(network: Network, target: Target, progress: Progress | None) -> Network:
    """Return the network with a bound of its values that is proved head by head, as that of its gradient will be."""
    observed = network.certificate.observed or 0.0
    request = ProofRequest(eps=network.eps or 0.0, observed=observed, progress=progress, derivation=network.derivation)
    return proved_by(network, HEAD_BY_HEAD.prove(network.program, target, request), target)


def _replaces(proof: Proof, bound: float | None, request: ProofRequest) -> bool:
    """Return whether a proof replaces the bound of a theorem, or the check of a table by an engine.

    The check is kept if its error is within eps, and the bound with rounding is not.
    """
    if isinstance(proof.evidence, Points):
        return math.isfinite(proof.bound) and not request.observed <= request.eps < proof.bound
    return bound is None or proof.bound <= max(bound, request.eps)


def _method(proof: Proof, target: Target) -> str:
    match proof.evidence:
        case Stages():
            return "staged proof"
        case Points(count):
            return f"proof at the table's {count:,} points"
        case Leaves():
            return under_assumption("proof", target)


def under_assumption(how: str, target: Target) -> str:
    return how if target.given is None else f"{how}{ASSUMING}{target.given} as given"


def _checked(network: Network, target: Target) -> Network:
    """Return the network if no sample contradicts its claim; raise InputError otherwise.

    An excess that the rounding of the expression explains is no contradiction.
    """
    claim = network.certificate
    if claim.bound is None or claim.observed is None:
        return network
    allowed = claim.bound * (1 + QUADRATURE * (claim.norm != "inf"))
    if claim.observed <= claim.bound:
        return network
    _, reference = _reference_errors(target)
    if claim.observed - reference <= allowed:
        return _with_observed(network, claim.bound)
    found = (
        f"the error at a sample is {claim.observed:.6g}, above the bound {claim.bound:.6g} of {target.describe()} on "
        f"{target.box}"
    )
    if target.given is not None:
        raise InputError(f"{found}: {target.given} cannot be right. State a larger number.")
    raise InputError(f"{found}: this is a defect of attnc. Please report it with this message.")


def _with_observed(network: Network, observed: float) -> Network:
    return network._with_certificate(dataclasses.replace(network.certificate, observed=observed))


def _reference_errors(target: Target) -> tuple[float, float]:
    """Return the largest float64 error of the expression among the unusually large ones, and among all.

    An error is unusually large if it is more than a few units in the last place, as for (x + 1e8) − 1e8.
    """
    if target.expression is None:
        return 0.0, 0.0
    points = sample_points(target.box if target.box.is_bounded else target.box.core(REACH), REFERENCE_POINTS)
    ranges = target.expression.ranges(Interval.point(points), violations="infinite")
    widths = np.where(np.isfinite(ranges.hi - ranges.lo), ranges.hi - ranges.lo, 0.0)
    usual = USUAL_ROUNDINGS * UNIT_ROUNDOFF["float64"] * np.maximum(np.abs(ranges.hi), np.abs(ranges.lo))
    return float(widths[widths > usual].max(initial=0.0)), float(widths.max())
