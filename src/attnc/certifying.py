"""From a program to a network with its certificate: bound of the theorem → observed error → proof."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from attnc import proving
from attnc.constructions.built import Built, Progress
from attnc.errors import ProgramError
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.limits import OutOfTime
from attnc.numerics.rounding import up
from attnc.proofs.certificate import THEOREM, Certificate
from attnc.proofs.prover import PROOF_SECONDS
from attnc.proofs.staged.prover import TRUNCATION
from attnc.targets.target import Target


def certify(
    built: Built,
    target: Target,
    eps: float | None,
    p: float = math.inf,
    progress: Progress | None = None,
    seconds: float | None = None,
) -> Network:
    """Return the network that was built, with its observed error and a bound, if one can be proved in time."""
    network = observe(built, target, eps, p, progress)
    with contextlib.suppress(OutOfTime):
        return proving.prove(network, target, progress, PROOF_SECONDS if seconds is None else seconds)
    return network


def observe(built: Built, target: Target, eps: float | None, p: float, progress: Progress | None) -> Network:
    """Return the network with the bound of its theorem, and the largest error at samples or at all points of a table.

    If the time runs out, a network with the bound of a theorem is returned without an observed error; OutOfTime is
    raised if there is no bound.
    """
    return proving.observe(_by_theorem(built, target, eps, p), target, progress)


def certify_also(
    network: Network, built: Built, target: Target, dtype: str | None, progress: Progress | None
) -> Network:
    """Return the network with a second certificate, for its weights rounded to another dtype, if that can be proved.

    The theorem of a construction holds only for weights that were made for their dtype, not for rounded ones.
    """
    if dtype is None:
        return network
    cast = dataclasses.replace(built, program=built.program.astype(dtype), bound=None)
    try:
        claim = certify(cast, target, network.eps, float(network.certificate.norm), progress).certificate
    except (ProgramError, OutOfTime):  # a weight overflows
        return network
    return network if claim.bound is None else dataclasses.replace(network, also={**network.also, dtype: claim})


def _by_theorem(built: Built, target: Target, eps: float | None, p: float) -> Network:
    """Return the network with the bound of the construction's theorem, if there is one, and no observed error yet.

    A theorem is about the full softmax. The truncation of the engine is added to its bound.
    """
    dtype, norm = str(built.program.dtype), str(float(p)).removesuffix(".0")
    bound, terms, method = None, tuple[Term, ...](), "estimate"
    network = Network(
        built.program,
        Certificate(bound, None, terms, (), dtype, method, norm),
        target.box,
        construction=built.construction,
        expression=target.text,
        definitions=target.definitions,
        eps=eps,
        parameters=dict(built.parameters),
        derivation=built.derivation,
    )
    truncation = network.truncation
    if built.bound is not None:
        bound, terms, method = built.bound.value, built.bound.terms, proving.under_assumption(THEOREM, target)
        if truncation > 0:
            bound, terms = float(up(bound + truncation)), (*terms, Term("truncation", truncation, TRUNCATION))
    claim = proving.unproved(target, dtype, norm, truncation, bound=bound, terms=terms, method=method)
    return network._with_certificate(claim)
