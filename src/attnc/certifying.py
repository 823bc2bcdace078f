"""From what was built to a network with its certificate: proved where the prover serves, observed always."""

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
from attnc.proofs.at_points import prove_at_points
from attnc.proofs.certificate import Certificate
from attnc.proofs.observed import observed_error, sample_points
from attnc.proving import TRUNCATION, can_be_enclosed, method_of, proved
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.kinks import REACH
from attnc.targets.function_target import FunctionTarget
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

PROOF_SECONDS = 30.0
MAX_STORED = 2**20
"""Numbers of a table that a certificate repeats, for a checker to read."""


def certify(
    built: Built,
    target: Target,
    p: float,
    eps: float,
    command: str | None,
    progress: Progress | None,
    proof_seconds: float | None = None,
) -> Network:
    """What was built, with the error that a dense sample shows (or all points of a table), and a bound where there is.

    The bound is what the prover derives from the stored weights; else what the construction's theorem states; else
    None, and the method is called an estimate.
    """
    network = _with_truncation(_network(built, target, p, eps, command))

    def evaluate(points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        report = None if progress is None else lambda fraction: progress("observing", fraction)
        return network(*target.split(points), progress=report).reshape(len(points), -1)

    observed = observed_error(evaluate, target, network.work_per_point, p)
    unusual, reference = _reference_errors(target) if isinstance(target, ExpressionTarget) else (0.0, 0.0)
    network = network.with_observed(max(0.0, observed - unusual))
    bound = network.certificate.bound
    if bound is not None:
        network = _checked(network, target, reference)
    if isinstance(target, TableTarget):
        return _at_points(network, target, eps, progress)
    if not can_be_enclosed(target):
        return network
    claim = proved(network, built, target, p, PROOF_SECONDS if proof_seconds is None else proof_seconds, progress)
    if claim is None or claim.bound is None or (bound is not None and claim.bound > max(bound, eps)):
        return network
    return _checked(dataclasses.replace(network, certificate=claim), target, reference)


def certify_also(network: Network, built: Built, target: Target, dtype: str, progress: Progress | None) -> Network:
    """The network with a certificate of its weights rounded to another dtype, as far as the prover serves there.

    The theorem of a construction is about weights that were made for their dtype: for these it states nothing.
    """
    cast = dataclasses.replace(built, program=built.program.astype(dtype), bound=None)
    norm = float(network.certificate.norm)
    try:
        claim = certify(cast, target, norm, network.eps or 0.0, network.command, progress).certificate
    except ProgramError:  # a weight overflows
        return network
    return network if claim.bound is None else dataclasses.replace(network, also={**network.also, dtype: claim})


def _at_points(network: Network, target: TableTarget, eps: float, progress: Progress | None) -> Network:
    """Of a table: a bound at its points, each of them proved; without one, what the numpy engine shows there.

    That is the claim too where what is shown is within eps, and only the bound on rounding is not.
    """
    claim = network.certificate
    try:
        found = prove_at_points(
            network.program,
            target.points,
            target.values,
            truncation=network.truncation,
            time_budget=PROOF_SECONDS,
            progress=progress,
        )
    except ProgramError:
        found = None
    observed = claim.observed or 0.0
    if found is None or not math.isfinite(found.bound) or observed <= eps < found.bound:
        return network
    if observed > found.bound:
        raise InputError(_refuted(target, observed, found.bound))
    method, rows = f"proof at the table's {target.num_points:,} points", np.hstack([target.points, target.values])
    claim = dataclasses.replace(
        claim,
        bound=found.bound,
        terms=found.terms,
        method=method,
        table=tuple(map(tuple, rows.tolist())) if rows.size <= MAX_STORED else (),
    )
    return dataclasses.replace(network, certificate=claim)


def _with_truncation(network: Network) -> Network:
    """A theorem is about the full softmax; what the engine leaves out of it is added."""
    claim, truncation = network.certificate, network.truncation
    if claim.bound is None or truncation == 0:
        return network
    term = Term("truncation", truncation, TRUNCATION)
    bound = float(up(claim.bound + truncation))
    return dataclasses.replace(network, certificate=dataclasses.replace(claim, bound=bound, terms=(*claim.terms, term)))


def _network(built: Built, target: Target, p: float, eps: float, command: str | None) -> Network:
    """With what the construction itself states."""
    bound, dtype = built.bound, str(built.program.dtype)
    claim = Certificate(
        bound=None if bound is None else bound.value,
        observed=None,
        terms=() if bound is None else bound.terms,
        assumptions=(*target.assumptions, engine_assumption(dtype)),
        dtype=dtype,
        norm=str(float(p)).removesuffix(".0"),
        method=method_of("estimate" if bound is None else "theorem", target),
        points=target.num_points if isinstance(target, TableTarget) else None,
        truncation=NumpyEngine(built.program).truncation,
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


def _reference_errors(target: ExpressionTarget) -> tuple[float, float]:
    """How far float64 may be from the expression itself: where that is more than a few units, as of (x + 1e8) − 1e8;
    and anywhere."""
    points = sample_points(target.box if target.box.is_bounded else target.box.core(REACH), 256)
    ranges = target.expression.ranges(Interval.point(points), violations="infinite")
    widths = np.where(np.isfinite(ranges.hi - ranges.lo), ranges.hi - ranges.lo, 0.0)
    usual = 64 * UNIT_ROUNDOFF["float64"] * np.maximum(np.abs(ranges.hi), np.abs(ranges.lo))
    return float(widths[widths > usual].max(initial=0.0)), float(widths.max())


def _checked(network: Network, target: Target, reference: float) -> Network:
    """The network, whose claim no sample contradicts: InputError otherwise.

    What may be the rounding of the expression at a sample is not held against the bound.
    """
    claim = network.certificate
    assert claim.bound is not None
    assert claim.observed is not None
    quadrature = 1 + 1e-3 * (claim.norm != "inf")  # what it may be off by
    if claim.observed <= claim.bound * quadrature:
        return network
    if not claim.observed - reference <= claim.bound * quadrature:
        raise InputError(_refuted(target, claim.observed, claim.bound))
    return network.with_observed(claim.bound)


def _refuted(target: Target, observed: float, bound: float) -> str:
    """A sample that contradicts the bound: what was given cannot be true, or a proof is wrong. Either is an error."""
    found = (
        f"the error at a sample is {observed:.6g}, above the bound {bound:.6g} of {target.describe()} on {target.box}"
    )
    if isinstance(target, FunctionTarget):
        return f"{found}: what was given cannot be right ({target.given}). State a larger number."
    return f"{found}: this is a defect of attnc. Please report it with this message."
