"""The export of a network as a stock checkpoint: heads with constant keys → layout → proof → folder."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.beyond.compose import compose
from attnc.constructions.built import Progress
from attnc.errors import BoundNotMet, InputError, ProgramError
from attnc.exports.safe_files import PathLike, why_not_writable
from attnc.exports.stock_layout import CONTEXT, Checkpoint, lay_out
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.arrays import Float
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.numerics.rounding import ENGINE_ULPS
from attnc.proofs.certificate import Certificate
from attnc.proofs.observed import observed_error
from attnc.proofs.proof import Points, Stages
from attnc.proofs.prover import PROOF_SECONDS, ProofRequest
from attnc.proofs.provers import best_proof
from attnc.stock.folder import STOCK, save_checkpoint
from attnc.stock.heads import stock_network
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

DTYPE = "float32"
ASSUMPTIONS = (
    "transformers computes the checkpoint in float32 with IEEE rounding to nearest and gradual underflow, in any order "
    f"of summation, and weights of a softmax are within {ENGINE_ULPS[DTYPE]} ulp for exact scores; TF32, bfloat16 and "
    "fast-math kernels are outside this",
    "attention is eager, or a kernel of scaled_dot_product_attention that keeps the same",
    "the inverse square root of an even power of two is exact",
    f"a sequence has the prefix first, then query and padding tokens, and at most {CONTEXT:,} tokens",
)
ROUNDING_LEVEL = 2.0**-21
"""Least eps of a fit, relative to the largest |f|: below it, float32 leaves nothing to gain."""
COARSER = 4.0
"""The factor between the eps of one attempt and of the next. With a larger eps keys are fewer and scores smaller, which
makes rounding smaller."""
MOST_ATTEMPTS = 6
WORTHWHILE = 0.9
"""A coarser attempt must bring the bound below this share of the last one, or the search ends."""
TRUNCATION = 2.0**-60
"""The part of the bound for underflow in the last norm, relative to the largest output: 2^−90 would be enough."""


@dataclass(frozen=True, eq=False)
class StockExport:
    """A checkpoint with its certificate."""

    checkpoint: Checkpoint
    certificate: Certificate


def stock_checkpoint(
    target: Target,
    *,
    program: Program | None = None,
    eps: float | None = None,
    has_theorem: bool = False,
    progress: Progress | None = None,
) -> StockExport:
    """Return a checkpoint of the target with a proven bound.

    The heads of `program` are taken as they are, if it has one stage with constant keys. Otherwise heads are fitted
    anew, from the expression. Then a bound of about `eps` is aimed at.

    Raises
    ------
    InputError
        If the target cannot be exported: the message says why, and what can.
    BoundNotMet
        If no bound can be proved.
    """
    _require_exportable(target)
    reason = "nothing was proved about its heads in float32"
    if program is not None and program.num_attention_layers == 1:
        try:
            return _certified(lay_out(stock_network(program, target.box)), target, None, eps, has_theorem, progress)
        except (InputError, ProgramError, BoundNotMet) as error:
            reason = str(error)
    if target.expression is None:
        raise InputError(
            f"the network cannot be exported as it is ({reason}), and without an expression it cannot be built anew "
            "with constant keys. Compile an expression, or export to ONNX."
        )
    return _composed(target, eps, progress)


def _require_exportable(target: Target) -> None:
    if len(target.input_shapes) != 1 or len(target.input_shapes[0]) != 1:
        raise InputError(
            f"the function takes inputs of shapes {target.input_shapes}, and a stock checkpoint takes one vector: "
            "compile a function of the entries, f(x, y, …), or export to ONNX"
        )
    if not target.box.is_bounded:
        raise InputError(
            f"the box {target.box} is not bounded. Without values that carry the input, a head is right on a bounded "
            "range only: compile for a bounded box."
        )


def _composed(target: Target, eps: float | None, progress: Progress | None) -> StockExport:
    """Fit heads with constant keys. If rounding outweighs the fit, coarser fits are tried while the bound falls."""
    best: StockExport | None = None
    size = float(np.abs(target(_corners(target))).max(initial=0.0))
    goal = max(eps or 0.0, ROUNDING_LEVEL * size, 1e-30)
    problem: BoundNotMet | None = None
    for _ in range(MOST_ATTEMPTS):
        try:
            built = compose(target, eps=goal, dtype=DTYPE, progress=progress, constant_keys=True)
            checkpoint = lay_out(stock_network(built.program, target.box))
            found = _certified(checkpoint, target, built.derivation, goal, False, progress)
        except BoundNotMet as error:
            problem, goal = error, COARSER * goal
            continue
        bound = found.certificate.bound or math.inf
        if best is not None and bound > WORTHWHILE * (best.certificate.bound or math.inf):
            return best if bound > (best.certificate.bound or math.inf) else found
        best = found
        if bound <= 2 * goal:
            break
        goal = COARSER * goal
    if best is None:
        assert problem is not None
        raise problem
    return best


def _corners(target: Target) -> Float[np.ndarray, "points d"]:
    """Return points that show the size of a function."""
    rng = np.random.default_rng(0)
    return target.box.lo + rng.random((1000, target.box.d)) * target.box.widths


def _certified(
    checkpoint: Checkpoint,
    target: Target,
    derivation: Derivation | None,
    eps: float | None,
    has_theorem: bool,
    progress: Progress | None,
) -> StockExport:
    """Prove a bound of the checkpoint. Raise BoundNotMet if none is found."""
    program = checkpoint.program()
    work = sum(head.keys.num_keys for head in checkpoint.network.heads)
    observed = observed_error(lambda points: evaluate(checkpoint, points), target, work, math.inf)
    truncation = TRUNCATION * max(1.0, float(np.abs(target(_corners(target))).max(initial=0.0)))
    points = target.check_points()
    claim = Certificate(
        None, observed, (), (*target.assumptions, *ASSUMPTIONS), DTYPE, "estimate", "inf", truncation=truncation
    )
    if points is not None:
        claim = replace(claim, evidence=Points(len(points)))
    request = ProofRequest(
        eps=eps or 0.0,
        observed=observed,
        truncation=truncation,
        progress=progress,
        derivation=derivation,
        has_theorem=has_theorem,
    )
    proof = None
    with contextlib.suppress(OutOfTime), time_limit(counted=PROOF_SECONDS):
        proof = best_proof(program, target, request)
    if proof is None or not math.isfinite(proof.bound):
        raise BoundNotMet(
            f"no bound of the stock checkpoint of {target.describe()} on {target.box} could be proved in float32. Its "
            f"observed error is {observed:.3g}. Choose a larger eps or a smaller box.",
            eps=eps or 0.0,
        )
    evidence = proof.evidence
    method = (
        "staged proof"
        if isinstance(evidence, Stages)
        else f"proof at the table's {evidence.count:,} points"
        if isinstance(evidence, Points)
        else "proof"
    )
    return StockExport(checkpoint, claim.proved(proof, method))


def evaluate(checkpoint: Checkpoint, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
    """Return the outputs of the checkpoint in float32, without silent keys."""
    E, network = checkpoint.embedding, checkpoint.network
    z = E[checkpoint.query] + np.asarray(points, np.float32) @ E[list(checkpoint.variables)]
    for layer in range(checkpoint.num_layers):
        before = z
        for head in network.heads:
            if head.layer == layer:
                _, columns = checkpoint.columns_of(head.name)
                keys, values = (
                    E[: head.keys.num_keys] @ W[layer][:, columns] for W in (checkpoint.W_K, checkpoint.W_V)
                )
                scores = (
                    (before @ checkpoint.W_Q[layer][:, columns]) @ keys.T / np.float32(math.sqrt(checkpoint.d_head))
                )
                z = z + softmax(scores) @ values @ checkpoint.W_O[layer][columns]
    return z @ E[list(checkpoint.outputs)].T


def export_stock(
    path: PathLike,
    target: Target,
    *,
    expression: str | None,
    program: Program | None = None,
    eps: float | None = None,
    has_theorem: bool = False,
    limit: float = math.inf,
    progress: Progress | None = None,
) -> StockExport:
    """Write the folder of a stock checkpoint, and return it with its certificate. Its bound is at most `limit`."""
    if reason := why_not_writable(path, STOCK):
        raise InputError(f"cannot export to {path!s}: {reason}")
    found = stock_checkpoint(target, program=program, eps=eps, has_theorem=has_theorem, progress=progress)
    bound = found.certificate.bound or math.inf
    if bound > limit:
        raise BoundNotMet(
            f"the bound of the stock checkpoint of {target.describe()} on {target.box} is {bound:.3g} in float32, "
            f"above eps={limit:g}. Nothing was written. Choose a larger eps or a smaller box.",
            eps=limit,
            bound=bound,
        )
    save_checkpoint(path, found.checkpoint, found.certificate, expression)
    return found
