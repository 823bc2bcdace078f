"""The export of a network as a stock checkpoint: heads with constant keys → layout → proof → folder."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.beyond.compose import compose
from attnc.constructions.built import Progress
from attnc.errors import BoundNotMet, InputError, ProgramError
from attnc.exports.directory import STOCK
from attnc.exports.safe_files import PathLike, why_not_writable
from attnc.exports.stock_layout import CONTEXT, Checkpoint, lay_out
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.arrays import Float
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.numerics.rounding import ENGINE_ULPS
from attnc.proofs.certificate import Certificate
from attnc.proofs.observed import observed_error, sample_points
from attnc.proofs.proof import Points, Stages
from attnc.proofs.prover import PROOF_SECONDS, ProofRequest
from attnc.proofs.provers import best_proof
from attnc.stock.folder import save_checkpoint
from attnc.stock.heads import scaled, stock_network
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

DTYPE = "float32"
ASSUMPTIONS = (
    "transformers computes the checkpoint in float32 with IEEE rounding to nearest and gradual underflow, in any order "
    f"of summation, and weights of a softmax are within {ENGINE_ULPS[DTYPE]} ulp for exact scores; TF32, bfloat16 and "
    "fast-math kernels are outside this",
    "attention is eager, or a kernel of scaled_dot_product_attention that keeps the same",
    "the inverse square root of an even power of two is exact",
    f"a sequence has the prefix before all query tokens, query tokens are in the box, padding is anywhere, and all of "
    f"them are at most {CONTEXT:,} tokens",
)
ROUNDING_LEVEL = 2.0**-21
"""Least eps of a fit, relative to the largest |f|: below it, float32 leaves nothing to gain."""
COARSER, FINER = 4.0, 0.4
"""The factors between the eps of one attempt and of the next. With a larger eps, keys are fewer and scores smaller, and
so is rounding."""
MOST_ATTEMPTS = 6  # each takes about as long as compiling once
LEAST_EPS_OF_FIT = 1e-30
"""Least eps of a fit: smaller numbers come close to underflow in float32."""
LARGEST_SIZE = 2.0**100
"""Larger values, or sums of them, may overflow in float32."""
SIZED_POINTS = 1000
"""Number of points at which the size of a function is seen."""


@dataclass(frozen=True, eq=False)
class StockExport:
    """A checkpoint with its certificate."""

    checkpoint: Checkpoint
    certificate: Certificate
    is_built_anew: bool = False  # its heads were fitted for the checkpoint

    @property
    def bound(self) -> float:
        assert self.certificate.bound is not None
        return self.certificate.bound


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
        If the target cannot be exported: the message gives the reason, and names exports that are possible.
    BoundNotMet
        If no bound can be proved.
    """
    _require_exportable(target)
    reason = "nothing was proved about its heads in float32"
    if program is not None and program.num_attention_layers == 1:
        try:
            checkpoint = lay_out(scaled(stock_network(program, target.box)))
            return _certified(checkpoint, target, None, eps, has_theorem, progress)
        except (InputError, ProgramError, BoundNotMet) as error:
            reason = str(error)
    if target.expression is None:
        raise InputError(
            f"the network cannot be exported as it is ({reason}), and without an expression it cannot be built anew "
            "with constant keys. Compile an expression, or export to ONNX."
        )
    return replace(_composed(target, eps, progress), is_built_anew=True)


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
    """Fit heads with constant keys, and again while the bound is above eps and falls.

    If rounding is the larger part of the bound, the next fits are coarser; otherwise they are finer.
    """
    size = _size(target)
    if not size < LARGEST_SIZE:
        raise InputError(
            f"{target.describe()} has values of up to {size:.3g} on {target.box}: they overflow float32, the "
            "arithmetic of a stock checkpoint. Scale the function."
        )
    best: StockExport | None = None
    problem: BoundNotMet | None = None
    least = max(ROUNDING_LEVEL * size, LEAST_EPS_OF_FIT)
    goal = wanted = max(eps or 0.0, least)
    for _ in range(MOST_ATTEMPTS):
        try:
            built = compose(target, eps=goal, dtype=DTYPE, progress=progress, constant_keys=True)
            checkpoint = lay_out(stock_network(built.program, target.box))
            found = _certified(checkpoint, target, built.derivation, goal, False, progress)
        except BoundNotMet as error:
            problem, goal = error, COARSER * goal
            continue
        if best is not None and found.bound >= best.bound:
            break
        best = found
        if best.bound <= wanted:
            break
        rounding = next((term.value for term in best.certificate.terms if term.name == "rounding"), 0.0)
        goal = COARSER * goal if rounding > best.bound / 2 else max(least, FINER * goal)
    if best is None:
        assert problem is not None
        raise problem
    return best


def _size(target: Target) -> float:
    """Return the largest absolute value at some points, or at those of a table."""
    return target.largest_value(sample_points(target.box, SIZED_POINTS))


def _certified(
    checkpoint: Checkpoint,
    target: Target,
    derivation: Derivation | None,
    eps: float | None,
    has_theorem: bool,
    progress: Progress | None,
) -> StockExport:
    """Prove a bound of the checkpoint. Raise BoundNotMet if none is found.

    Silent keys move the average of a head by at most 2^17·e^−80 < 10^−29 of its largest value, and underflow in norms
    moves an input by less than 2^−100 of its largest value. The room for the checker (ANY_ORDER_ROUNDING) covers both:
    it is a tenth of a rounding that is at least 2^−24 of these values. The checker counts them one by one.
    """
    program = checkpoint.program()
    work = sum(head.keys.num_keys for head in checkpoint.network.heads)
    observed = observed_error(lambda points: evaluate(checkpoint, points), target, work, math.inf)
    truncation = checkpoint.underflow
    claim = Certificate(
        None, observed, (), (*target.assumptions, *ASSUMPTIONS), DTYPE, "estimate", "inf", truncation=truncation
    )
    if target.num_check_points is not None:
        claim = replace(claim, evidence=Points(target.num_check_points))
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
    if found.bound > limit:
        raise BoundNotMet(
            f"the bound of the stock checkpoint of {target.describe()} on {target.box} is {found.bound:.3g} in "
            f"float32, above eps={limit:g}. Nothing was written. Choose a larger eps or a smaller box.",
            eps=limit,
            bound=found.bound,
        )
    made = "fitted anew, with constant keys" if found.is_built_anew else "those of the network, as they are"
    save_checkpoint(path, found.checkpoint, found.certificate, expression, made)
    return found
