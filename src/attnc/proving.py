"""Which proof serves a network: by leaves over its box, head by head, or layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

from attnc.constructions.built import Built, Progress
from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.rounding import up
from attnc.proofs.affine_proof import prove_affine
from attnc.proofs.certificate import Certificate
from attnc.proofs.deep_prover import MAX_DEEP_VARIABLES, prove_deep
from attnc.proofs.proof import Proof, Stages
from attnc.proofs.proven import Proven
from attnc.proofs.prover import MAX_VARIABLES, prove
from attnc.proofs.selection_prover import MAX_SELECTING_VARIABLES, prove_selection
from attnc.proofs.staged.prover import StagedProver, stages_as_json
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.function_target import CallableTarget, FunctionTarget
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.parts.part import Derivation
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

MOST_CELLS = 500_000
SECONDS_BEFORE_STAGES, CELLS_BEFORE_STAGES, FEW_VARIABLES = 3.0, 8_000, 2
"""For leaves where heads can be proved one by one, and the variables up to which leaves are tried first. More cells
would be proved in time, but not checked in time."""
TIGHT = 2.0
"""Times the error that was seen: where leaves come no closer, heads are tried, too. In several variables leaves stop
far above an error that is next to none, as that of gates."""
TRUNCATION = "anchors that the engine leaves out of a grid, and the like"
SECONDS_FOR_NORMS = 10.0
"""For an L_p norm that a theorem bounds already: leaves make that smaller, ever more slowly."""
TAILS = "beyond the core of the box the bound is for exact arithmetic: rounding grows with |x| there"
MAX_PROVED_ANCHORS = 20_000
"""A larger network whose theorem brings a bound keeps that one: a proof by leaves would take minutes."""


def can_be_enclosed(target: Target) -> bool:
    """Whether what is known of the target bounds it over a cell: derived, or from a constant that was given."""
    return target.check_points() is None and (target.given is not None or not isinstance(target, FunctionTarget))


def proved(
    network: Network, built: Built, target: Target, p: float, seconds: float, progress: Progress | None
) -> Certificate | None:
    """By leaves over the box, or head by head; None where the prover does not serve.

    Leaves are tight, and are tried first where they are cheap: one stage of one or two variables. A kink along a line
    of the box takes too many of them; where a derivation says what each head is for, one variable at a time is enough.
    """
    derivation, eps = built.derivation, network.eps or 0.0
    if isinstance(target, ReLUNetwork | TruncatedLinear) and p == math.inf:
        return _by_heads(network, target, None, seconds, progress)
    softmaxes = sum(not isinstance(layer, Affine) for layer in built.program.all_layers)
    is_one_stage = softmaxes == 1
    if derivation is None or p < math.inf or not isinstance(target, ExpressionTarget):
        has_theorem = network.certificate.bound is not None
        if has_theorem and network.num_anchors > MAX_PROVED_ANCHORS:
            return None
        budget = min(seconds, SECONDS_FOR_NORMS) if p < math.inf and has_theorem else seconds
        return _by_leaves(network, target, p, is_one_stage, budget, progress)
    found: list[Certificate] = []
    ways = [functools.partial(_by_heads, network, target, derivation, seconds, progress)]
    if softmaxes <= 1:
        budgets = (SECONDS_BEFORE_STAGES, progress, CELLS_BEFORE_STAGES)
        leaves = functools.partial(_by_leaves, network, target, p, is_one_stage, *budgets)
        ways.insert(0 if target.box.d <= FEW_VARIABLES else 1, leaves)
    for prove_it in ways:
        claim = prove_it()
        if claim is not None and claim.bound is not None:
            is_tight = softmaxes == 0 or claim.bound <= TIGHT * (claim.observed or 0.0)
            if claim.complete and claim.bound <= eps and (claim.stages or is_tight):
                return claim
            found.append(claim)
    return min(found, key=lambda claim: claim.bound or 0.0, default=None)


def _by_heads(
    network: Network, target: Target, derivation: Derivation | None, seconds: float, progress: Progress | None
) -> Certificate | None:
    try:
        found = StagedProver().prove(network.program, target, derivation, seconds=seconds, progress=progress)
    except ProgramError:
        return None
    return _staged(network, found)


def _staged(network: Network, found: Proof) -> Certificate:
    bound, terms, evidence = found.bound, found.terms, found.evidence
    assert isinstance(evidence, Stages)
    if network.truncation:
        bound = float(up(bound + network.truncation))
        terms = (*terms, Term("truncation", network.truncation, TRUNCATION))
    return dataclasses.replace(
        network.certificate,
        bound=bound,
        terms=terms,
        method="staged proof",
        stages=stages_as_json(evidence),
        outputs=evidence.outputs,
        axes=evidence.axes,
        complete=found.complete,
    )


def _selects(target: Target) -> bool:
    """Whether a network of one stage with a theorem selects cells, of few enough variables: all but clips do."""
    return isinstance(target, ExpressionTarget | FunctionTarget) and target.box.d <= MAX_SELECTING_VARIABLES


def _by_leaves(
    network: Network,
    target: Target,
    p: float,
    is_one_stage: bool,
    seconds: float,
    progress: Progress | None,
    most_cells: int = MOST_CELLS,
) -> Certificate | None:
    claim = network.certificate
    provers: list[functools.partial[Proven]] = []
    if isinstance(target, ExpressionTarget) and not network.program.num_attention_layers and p == math.inf:
        try:
            return _with_leaves(network, target, prove_affine(network.program, target))
        except ProgramError:
            return None
    if not is_one_stage and target.box.d <= MAX_DEEP_VARIABLES:
        provers.append(functools.partial(prove_deep, network.program, target, p=p))
    if is_one_stage:
        selects = p == math.inf and claim.bound is not None and _selects(target)
        if selects and isinstance(target, ExpressionTarget) and target.box.d > 1:
            # A grid takes far fewer leaves axis by axis, and they are checked sooner.
            provers.append(functools.partial(prove_deep, network.program, target))
        if isinstance(target, ExpressionTarget | CallableTarget) and target.box.d <= MAX_VARIABLES:
            provers.append(functools.partial(prove, network.program, target, p=p))
        elif selects:
            provers.append(functools.partial(prove_selection, network.program, target))
    for prover in provers:
        with contextlib.suppress(ProgramError):
            found = prover(
                observed=claim.observed or 0.0,
                eps=network.eps or 0.0,
                truncation=network.truncation,
                time_budget=seconds,
                box_budget=most_cells,
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
        method=method_of("proof", target),
        leaves=(*(leaf.as_json() for leaf in found.leaves), *(["tail", side] for side in found.tails)),
        leaf_bounds=tuple(map(float, found.leaf_bounds)),
        complete=found.complete,
        core=(float(found.core.lo[0]), float(found.core.hi[0])) if found.tails else None,
        cuts=found.cuts,
        assumptions=(*claim.assumptions, *([TAILS] if found.tails else [])),
    )


def method_of(how: str, target: Target) -> str:
    if isinstance(target, TableTarget):
        return f"check at the table's {target.num_points:,} points"
    is_believed = target.given is not None and how != "estimate"
    return how if not is_believed else f"{how} under the stated assumption: {target.given} as given"
