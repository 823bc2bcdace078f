"""All provers, and the choice between them for `compile` and `Network.bound`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.proofs.enclosure_prover import EnclosureProver
from attnc.proofs.kinds.affine import AffineProver
from attnc.proofs.kinds.point import PointProver
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.partition_prover import MAX_PROVED_ANCHORS, PartitionProver
from attnc.proofs.proof import Proof, Stages
from attnc.proofs.prover import ProofRequest, Prover, num_softmaxes
from attnc.proofs.staged.prover import StagedProver
from attnc.targets.target import Target

HEAD_BY_HEAD, AT_POINTS, PARTITION, LEAVES = StagedProver(), PointProver(), PartitionProver(), LeavesProver()
BY_LEAVES: tuple[Prover, ...] = (AffineProver(), EnclosureProver(), LEAVES)
"""A program is proved by the first of these that accepts it and finds that its weights have the right form."""

SECONDS_BEFORE_STAGES, CELLS_BEFORE_STAGES = 3.0, 8_000
"""The limits, in counted seconds and in cells, for leaves where heads can be proved one by one. More cells could be
proved in a short time, but would take long to check."""
FEW_VARIABLES = 2
"""Up to this number of variables leaves are tried before heads. Measured on 22 cases of two and more variables: with 1
bounds change by −7 to 2 %, and with 3 they stay the same and take 6 % more time."""
TIGHT = 2.0
"""Heads are tried as well if the bound by leaves is above this multiple of the error that was seen. In several
variables leaves stop far above an error that is nearly 0, such as that of gates."""
SECONDS_FOR_NORMS = 10.0  # counted, for an L_p norm that a theorem bounds already: leaves lower it ever more slowly


def best_proof(program: Program, target: Target, request: ProofRequest) -> Proof | None:
    """Return the proof by leaves or head by head, whichever has the smaller bound. None if no prover can do it.

    Leaves are tight, and are tried first where they are cheap: one stage of one or two variables. A kink along a line
    of the box takes too many of them. If a derivation states a function for every head, each head is proved as a
    function of one variable, and a kink costs little.
    """
    if not target.is_known_on_cells:
        return _first((AT_POINTS,), program, target, request)
    softmaxes, has_heads = num_softmaxes(program), HEAD_BY_HEAD.accepts(program, target, request)
    if has_heads and target.expression is None:
        return _first((HEAD_BY_HEAD,), program, target, request)
    if not has_heads:
        if program.num_anchors > MAX_PROVED_ANCHORS:
            provers = (PARTITION,) if request.has_theorem else (PARTITION, *BY_LEAVES)
            return _first(provers, program, target, request)
        partition = _first((PARTITION,), program, target, request)
        if partition is not None and partition.bound <= request.eps:
            return partition
        has_norm = request.has_theorem and request.p < math.inf
        with time_limit(counted=SECONDS_FOR_NORMS if has_norm else math.inf):
            return _best(partition, _first(BY_LEAVES, program, target, request))
    brief = dataclasses.replace(request, cells=min(request.cells, CELLS_BEFORE_STAGES))
    ways: list[tuple[tuple[Prover, ...], ProofRequest, float]] = [((HEAD_BY_HEAD,), request, math.inf)]
    if softmaxes <= 1:
        ways.insert(0 if target.box.d <= FEW_VARIABLES else 1, (BY_LEAVES, brief, SECONDS_BEFORE_STAGES))
    found = list[Proof]()
    for provers, asked, seconds in ways:
        try:
            with time_limit(counted=seconds):
                proof = _first(provers, program, target, asked)
        except OutOfTime:
            if not found:
                raise
            break
        if proof is None:
            continue
        is_tight = softmaxes == 0 or proof.bound <= TIGHT * request.observed
        if proof.complete and proof.bound <= request.eps and (isinstance(proof.evidence, Stages) or is_tight):
            return proof
        found.append(proof)
    return _best(*found)


def _best(*proofs: Proof | None) -> Proof | None:
    return min((proof for proof in proofs if proof is not None), key=lambda proof: proof.bound, default=None)


def _first(provers: Iterable[Prover], program: Program, target: Target, request: ProofRequest) -> Proof | None:
    """Return the proof of the first prover that accepts the program and finds that its weights have the right form."""
    for prover in provers:
        if prover.accepts(program, target, request):
            with contextlib.suppress(ProgramError):
                return prover.prove(program, target, request)
    return None
