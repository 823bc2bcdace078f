"""From what was built to a network with its certificate: proved where the prover serves, observed always."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from attnc.certificates.affine_proof import prove_affine
from attnc.certificates.at_points import prove_at_points
from attnc.certificates.certificate import Certificate
from attnc.certificates.deep_prover import MAX_DEEP_VARIABLES, prove_deep
from attnc.certificates.observed import REACH, observed_error, sample_points
from attnc.certificates.proven import Proven
from attnc.certificates.prover import MAX_VARIABLES, prove
from attnc.certificates.relu_prover import prove_relu
from attnc.certificates.selection_prover import MAX_SELECTING_VARIABLES, prove_selection
from attnc.certificates.staged import prove_staged
from attnc.constructions.built import Built, Progress
from attnc.errors import InputError, ProgramError
from attnc.ir.layers import Affine
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, engine_assumption, up
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.function_target import CallableTarget, FunctionTarget
from attnc.targets.linear import ReLUNetwork
from attnc.targets.parts import Derivation
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

PROOF_SECONDS = 30.0
SECONDS_BEFORE_STAGES, FEW_VARIABLES = 3.0, 2
"""For leaves where heads can be proved one by one, and the variables up to which leaves are tried first."""
TRUNCATION = "anchors that the engine leaves out of a grid, and the like"
SECONDS_FOR_NORMS = 10.0
"""For an L_p norm that a theorem bounds already: leaves make that smaller, ever more slowly."""
TAILS = "beyond the core of the box the bound is for exact arithmetic: rounding grows with |x| there"
MAX_STORED = 2**20
"""Numbers of a table that a certificate repeats, for a checker to read."""
MAX_PROVED_ANCHORS = 20_000
"""A larger network whose theorem brings a bound keeps that one: a proof by leaves would take minutes."""


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
    if not _can_be_enclosed(target):
        return network
    claim = _proved(network, built, target, p, PROOF_SECONDS if proof_seconds is None else proof_seconds, progress)
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
        truncation=network.truncation,
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


def _can_be_enclosed(target: Target) -> bool:
    """Whether what is known of the target bounds it over a cell: derived, or from a constant that was given."""
    return target.check_points() is None and (target.given is not None or not isinstance(target, FunctionTarget))


def _proved(
    network: Network, built: Built, target: Target, p: float, seconds: float, progress: Progress | None
) -> Certificate | None:
    """By leaves over the box, or head by head; None where the prover does not serve.

    Leaves are tight, and are tried first where they are cheap: one stage of one or two variables. A kink along a line
    of the box takes too many of them; where a derivation says what each head is for, one variable at a time is enough.
    """
    derivation, eps = built.derivation, network.eps or 0.0
    if isinstance(target, ReLUNetwork) and p == math.inf:
        return _by_layers(network, target, seconds, progress)
    softmaxes = sum(not isinstance(layer, Affine) for layer in built.program.all_layers)
    is_one_stage = softmaxes == 1
    if derivation is None or p < math.inf or not isinstance(target, ExpressionTarget):
        if network.certificate.bound is not None and network.num_anchors > MAX_PROVED_ANCHORS:
            return None
        budget = min(seconds, SECONDS_FOR_NORMS) if p < math.inf else seconds
        return _by_leaves(network, target, p, is_one_stage, budget, progress)
    found: list[Certificate] = []
    ways = [functools.partial(_by_heads, network, target, derivation, seconds, progress)]
    if softmaxes <= 1:
        leaves = functools.partial(_by_leaves, network, target, p, is_one_stage, SECONDS_BEFORE_STAGES, progress)
        ways.insert(0 if target.box.d <= FEW_VARIABLES else 1, leaves)
    for prove_it in ways:
        claim = prove_it()
        if claim is not None and claim.bound is not None:
            if claim.complete and claim.bound <= eps:
                return claim
            found.append(claim)
    return min(found, key=lambda claim: claim.bound or 0.0, default=None)


def _by_heads(
    network: Network, target: ExpressionTarget, derivation: Derivation, seconds: float, progress: Progress | None
) -> Certificate | None:
    try:
        found = prove_staged(network.program, target, derivation, time_budget=seconds, progress=progress)
    except ProgramError:
        return None
    bound, terms = found.bound, found.terms
    if network.truncation:
        bound = float(up(bound + network.truncation))
        terms = (*terms, Term("truncation", network.truncation, TRUNCATION))
    return dataclasses.replace(
        network.certificate,
        bound=bound,
        terms=terms,
        truncation=network.truncation,
        method="staged proof",
        stages=found.as_json(),
        outputs=found.outputs,
        axes=found.axes,
        complete=found.complete,
    )


def _selects(target: Target) -> bool:
    """Whether a network of one stage with a theorem selects cells, of few enough variables: all but clips do."""
    return isinstance(target, ExpressionTarget | FunctionTarget) and target.box.d <= MAX_SELECTING_VARIABLES


def _by_layers(network: Network, target: ReLUNetwork, seconds: float, progress: Progress | None) -> Certificate | None:
    try:
        found = prove_relu(network.program, target, time_budget=seconds, progress=progress)
    except ProgramError:
        return None
    return dataclasses.replace(
        network.certificate,
        bound=found.bound,
        terms=found.terms,
        method="staged proof",
        stages=found.as_json(),
        outputs=found.outputs,
        parts=1,  # the proof takes the box as a whole
        complete=found.complete,
    )


def _by_leaves(
    network: Network, target: Target, p: float, is_one_stage: bool, seconds: float, progress: Progress | None
) -> Certificate | None:
    claim = network.certificate
    provers: list[functools.partial[Proven]]
    if isinstance(target, ExpressionTarget) and not network.program.num_attention_layers and p == math.inf:
        try:
            return _with_leaves(network, target, prove_affine(network.program, target))
        except ProgramError:
            return None
    if is_one_stage and isinstance(target, ExpressionTarget | CallableTarget) and target.box.d <= MAX_VARIABLES:
        provers = [functools.partial(prove, network.program, target, p=p)]
    elif not is_one_stage and target.box.d <= MAX_DEEP_VARIABLES:
        provers = [functools.partial(prove_deep, network.program, target, p=p)]
    elif p == math.inf and claim.bound is not None and _selects(target):
        provers = [functools.partial(prove_selection, network.program, target)]
        if isinstance(target, ExpressionTarget):  # a grid takes far fewer leaves axis by axis
            provers.insert(0, functools.partial(prove_deep, network.program, target))
    else:
        return None
    for prover in provers:
        with contextlib.suppress(ProgramError):
            found = prover(
                observed=claim.observed or 0.0,
                eps=network.eps or 0.0,
                truncation=network.truncation,
                time_budget=seconds,
                progress=progress,
            )
            return _with_leaves(network, target, found)
    return None


def _with_leaves(network: Network, target: Target, found: Proven) -> Certificate:
    claim = network.certificate
    return dataclasses.replace(
        claim,
        bound=found.bound,
        terms=found.terms,
        method=_method("proof", target),
        leaves=(*(leaf.as_json() for leaf in found.leaves), *(["tail", side] for side in found.tails)),
        leaf_bounds=tuple(map(float, found.leaf_bounds)),
        complete=found.complete,
        core=(float(found.core.lo[0]), float(found.core.hi[0])) if found.tails else None,
        cuts=found.cuts,
        truncation=network.truncation,
        assumptions=(*claim.assumptions, *([TAILS] if found.tails else [])),
    )


def _network(built: Built, target: Target, p: float, eps: float, command: str | None) -> Network:
    """With what the construction itself states."""
    bound, dtype = built.bound, str(built.program.dtype)
    claim = Certificate(
        bound=None if bound is None else bound.value,
        observed=None,
        terms=() if bound is None else bound.terms,
        assumptions=(*target.assumptions, engine_assumption(dtype)),
        dtype=dtype,
        norm=f"{p:g}",
        method=_method("estimate" if bound is None else "theorem", target),
        points=target.num_points if isinstance(target, TableTarget) else None,
    )
    return Network(
        built.program,
        claim,
        target.box,
        construction=built.construction,
        expression=target.text,
        definitions=target.definitions if isinstance(target, ReLUNetwork) else None,
        eps=eps,
        parameters=dict(built.parameters),
        command=command,
    )


def _method(how: str, target: Target) -> str:
    if isinstance(target, TableTarget):
        return f"check at the table's {target.num_points:,} points"
    is_believed = target.given is not None and how != "estimate"
    return how if not is_believed else f"{how} under the stated assumption: {target.given} as given"


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
