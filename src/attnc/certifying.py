"""From a program to a network with its certificate: observed always, proved where a prover can prove it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError, ProgramError
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, engine_assumption, up
from attnc.proofs.certificate import Certificate
from attnc.proofs.observed import observed_error, sample_points
from attnc.proofs.proof import Leaves, Points, Proof, Stages
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import best_proof
from attnc.proofs.staged.prover import TRUNCATION
from attnc.targets.expressions.kinks import REACH
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

PROOF_SECONDS = 30.0  # for the proof of one network


def certify(
    built: Built,
    target: Target,
    p: float,
    eps: float,
    command: str | None,
    progress: Progress | None,
    proof_seconds: float | None = None,
) -> Network:
    """The network that was built, with the error that a dense sample shows (or all points of a table), and a bound.

    The bound is the one that a prover derives from the stored weights, or else that of the construction's theorem;
    where there is neither it is None, and the method is called an estimate.
    """
    network = _with_truncation(_network(built, target, p, eps, command))

    def evaluate(points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        report = None if progress is None else lambda fraction: progress("observing", fraction)
        return network(*target.split(points), progress=report).reshape(len(points), -1)

    observed = observed_error(evaluate, target, network.work_per_point, p)
    unusual, reference = _reference_errors(target)
    network = network.with_observed(max(0.0, observed - unusual))
    claim = network.certificate
    if claim.bound is not None:
        network = _checked(network, target, reference)
    request = ProofRequest(
        p=p,
        eps=eps,
        observed=network.certificate.observed or 0.0,
        truncation=network.truncation,
        seconds=PROOF_SECONDS if proof_seconds is None else proof_seconds,
        progress=progress,
        derivation=built.derivation,
        has_theorem=claim.bound is not None,
    )
    proof = best_proof(built.program, target, request)
    if proof is None or not _is_better(proof, claim.bound, request):
        return network
    proved = network.certificate.proved(proof, _method(proof, target))
    return _checked(dataclasses.replace(network, certificate=proved), target, reference)


def _is_better(proof: Proof, bound: float | None, request: ProofRequest) -> bool:
    """Whether a proof replaces the bound of a theorem, or the check of all points of a table in an engine.

    That check stays where the error that it shows is within eps, and only the bound on rounding is not.
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
            return _under_assumption("proof", target)


def _under_assumption(how: str, target: Target) -> str:
    return how if target.given is None else f"{how} under the stated assumption: {target.given} as given"


def certify_also(network: Network, built: Built, target: Target, dtype: str, progress: Progress | None) -> Network:
    """The network with a certificate of its weights rounded to another dtype, where they can be proved in it.

    The theorem of a construction is about weights that were made for their dtype: it states nothing about these.
    """
    cast = dataclasses.replace(built, program=built.program.astype(dtype), bound=None)
    norm = float(network.certificate.norm)
    try:
        claim = certify(cast, target, norm, network.eps or 0.0, network.command, progress).certificate
    except ProgramError:  # a weight overflows
        return network
    return network if claim.bound is None else dataclasses.replace(network, also={**network.also, dtype: claim})


def _with_truncation(network: Network) -> Network:
    """A theorem is about the full softmax; the part that the engine leaves out of it is added."""
    claim, truncation = network.certificate, network.truncation
    if claim.bound is None or truncation == 0:
        return network
    term = Term("truncation", truncation, TRUNCATION)
    bound = float(up(claim.bound + truncation))
    return dataclasses.replace(network, certificate=dataclasses.replace(claim, bound=bound, terms=(*claim.terms, term)))


def _network(built: Built, target: Target, p: float, eps: float, command: str | None) -> Network:
    """The network with the bound of the construction's theorem, if there is one, and no observed error yet."""
    bound, dtype, points = built.bound, str(built.program.dtype), target.check_points()
    method = "estimate" if bound is None else _under_assumption("theorem", target)
    if points is not None:
        method = f"check at the table's {len(points):,} points"
    claim = Certificate(
        bound=None if bound is None else bound.value,
        observed=None,
        terms=() if bound is None else bound.terms,
        assumptions=(*target.assumptions, engine_assumption(dtype)),
        dtype=dtype,
        norm=str(float(p)).removesuffix(".0"),
        method=method,
        truncation=NumpyEngine(built.program).truncation,
        evidence=None if points is None else Points(len(points)),
    )
    return Network(
        built.program,
        claim,
        target.box,
        construction=built.construction,
        expression=target.text,
        definitions=target.definitions,
        eps=eps,
        parameters=dict(built.parameters),
        command=command,
    )


def _reference_errors(target: Target) -> tuple[float, float]:
    """The largest error of the expression in float64: where it is more than a few units in the last place, as that of
    (x + 1e8) − 1e8; and anywhere."""
    if target.expression is None:
        return 0.0, 0.0
    points = sample_points(target.box if target.box.is_bounded else target.box.core(REACH), 256)
    ranges = target.expression.ranges(Interval.point(points), violations="infinite")
    widths = np.where(np.isfinite(ranges.hi - ranges.lo), ranges.hi - ranges.lo, 0.0)
    usual = 64 * UNIT_ROUNDOFF["float64"] * np.maximum(np.abs(ranges.hi), np.abs(ranges.lo))
    return float(widths[widths > usual].max(initial=0.0)), float(widths.max())


def _checked(network: Network, target: Target, reference: float) -> Network:
    """The network, whose claim no sample contradicts: InputError otherwise.

    The rounding of the expression at a sample is not held against the bound.
    """
    claim = network.certificate
    assert claim.bound is not None
    assert claim.observed is not None
    quadrature = 1 + 1e-3 * (claim.norm != "inf")  # an observed norm may be off by this factor
    if claim.observed <= claim.bound * quadrature:
        return network
    if not claim.observed - reference <= claim.bound * quadrature:
        raise InputError(_refuted(target, claim.observed, claim.bound))
    return network.with_observed(claim.bound)


def _refuted(target: Target, observed: float, bound: float) -> str:
    """The message for a sample that contradicts the bound: a given constant cannot be true, or a proof is wrong."""
    found = (
        f"the error at a sample is {observed:.6g}, above the bound {bound:.6g} of {target.describe()} on {target.box}"
    )
    if target.given is not None:
        return f"{found}: what was given cannot be right ({target.given}). State a larger number."
    return f"{found}: this is a defect of attnc. Please report it with this message."
