"""The path from a function to a network, from top to bottom:

source  →  target  →  candidates  →  build  →  observe  →  prove  →  refine  →  network
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnc.certifying import certify_also, observe
from attnc.constructions.built import Built, Progress, out_of_time
from attnc.constructions.construction import (
    DEFAULT_EPS,
    MAX_ANCHORS,
    MAX_BYTES,
    SMOOTH,
    Request,
    exponent,
    normal_numbers,
)
from attnc.constructions.fitting.search import tightened
from attnc.errors import BoundNotMet, InputError, ProgramError, positive_number, real_number
from attnc.exports.tensors import encode
from attnc.network import Network
from attnc.numerics.arithmetic import require_no_fault
from attnc.numerics.limits import OutOfTime, time_limit, time_share
from attnc.numerics.quiet import quiet
from attnc.numerics.threads import one_thread
from attnc.planning import DEFAULT_SECONDS, candidates, without_overflow
from attnc.proofs.gradient_prover import require_gradient
from attnc.proving import prove, prove_gradient, with_claims
from attnc.refusing import gradient_not_met, gradient_not_proved, not_met, rounding_of, with_reachable
from attnc.targets.box import BoxLike
from attnc.targets.sources import as_target
from attnc.targets.target import Target

MAX_RETRIES = 6
"""Maximum number of retries of a construction with a smaller eps. Each costs a build and a proof. One of the 170 cases
of the corpus meets eps by one retry, and one search for an eps that is met takes three. No more retries ever helped."""
RETRY_AIM = 0.9
"""A retry asks for an eps at which the error should be this share of the part of eps that rounding leaves. Measured in
nine cases near the limit of rounding: 0.8 and 0.95 take as many retries and meet the same eps."""
RETRY_FACTORS = (0.1, 0.8)
"""Least and largest ratio of an eps that is asked for to the one before. Measured in the same cases: 0.05 changes
nothing, 0.2 lowers the eps of one refusal from 3.9e-6 to 2.3e-6, and 0.6 overshoots: sin(x) no longer meets 2.5e-14."""
PROOF_SHARE = 1 / 2
"""The part of the time that is left which the proof of a network may take, and of all the time in counted seconds."""
SEARCH_SHARE = 1 / 5
"""The part of the time that is kept for the search for an eps that is met."""
DEFAULT_GRADIENT = 100.0
"""The default of gradient_eps, in units of eps divided by the smallest half-width of the box. The slopes of heads that
are solved for values err 38 to 66 times as much as these."""
WORTHWHILE = 0.97
"""Stop unless a retry lowers the error below this share of the best error so far. Six retries that gain 3 % each would
lower the error by a sixth only."""


def compile(  # the public name; this module does not need the builtin
    source: str | Target | Callable[[np.ndarray], Any],
    box: BoxLike | None = None,
    eps: float | None = None,
    *,
    dtype: str = "float64",
    also: str | None = None,
    construction: str = "auto",
    criterion: str = "multiply_adds",
    lipschitz: float | None = None,
    hessian_bound: float | None = None,
    norm: float | str = "inf",
    gradient_eps: float | None = None,
    centres: str | None = None,
    heads: int | None = None,
    beta: float | None = None,
    points_per_axis: int | Sequence[int] | np.ndarray | None = None,
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
    command: str | None = None,
    proof: bool = True,
) -> Network:
    """Compile a function to a network of affine maps and softmax attention that is within eps of it on the box.

    Parameters
    ----------
    source
        An expression, a Target, a torch.nn.Sequential of Linear and ReLU in turn, or a callable (batch, d) → (batch,)
        or (batch, k).
    box
        The range of every variable; a Target has its own.
    eps
        The largest error allowed anywhere on the box, by default 0.01. Leave it out if points_per_axis is given.
    dtype
        The arithmetic of the network, "float64" or "float32".
    also
        A second dtype in which the network will run, with its weights rounded to it. Its bound may be larger than eps:
        see `Network.certified_in`.
    construction
        A name from `attnc plan`, or "auto", which tries those that suit the target, the cheapest first.
    criterion
        The cost that "auto" compares: "multiply_adds", "anchors", "parameters" or "layers".
    lipschitz, hessian_bound
        For a callable: its Lipschitz constant, from the 2-norm of all inputs to the largest output, and the largest
        |∂²f/∂x_i²|. They are taken on trust. Without either, nothing is proved.
    norm
        "inf", or a number p ≥ 1 to measure the error in L_p over the box. In L_p the function may jump. "C1" bounds the
        error of the values by eps, and the error of every partial derivative by gradient_eps.
    gradient_eps
        For norm="C1": the largest error allowed in a partial derivative, by default 100·eps divided by the smallest
        half-width of the box. Neighbourhoods of kinks are excluded, and the certificate lists them.
    centres, heads
        Options of some constructions: "grid" or "adaptive" cells, and the number of heads in a first layer.
    beta
        The inverse temperature of constructions that select cells, for distances in widths of a cell. By default it is
        chosen automatically.
    points_per_axis
        The number of cells per axis, or one number for each axis, instead of eps. The bound is then reported, not
        enforced.
    max_anchors, max_bytes
        Limits on the size of the network.
    seconds
        The time limit. The result does not depend on the machine or its load, unless the limit is reached.
    progress
        A function that is called with the name of the current step and the fraction of it that is done.
    command
        The command line to state on the model card.
    proof
        False leaves the proof from the weights to `attnc prove`, which can divide it into shards. Until then there is
        only the error at samples, and the bound of a theorem if there is one.

    Returns
    -------
    Network
        The network, with a certificate of its error.

    Raises
    ------
    BoundNotMet
        If the bound cannot be brought to eps within max_anchors, max_bytes and seconds.
    InputError
        If an argument is not valid.
    ExpressionError, DomainError
        If the expression cannot be read, or is not defined on the box.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
    >>> net.certificate.bound <= 1e-3
    True
    >>> coarse = attnc.compile("sin(x)", {"x": (-3, 3)}, construction="max_affine", beta=50.0, points_per_axis=9)
    >>> coarse.eps is None, coarse.num_anchors, coarse.certificate.bound > 0.1
    (True, 9, True)
    """
    require_no_fault()
    if eps is None and points_per_axis is None:
        eps = DEFAULT_EPS
    counts = points_per_axis.tolist() if isinstance(points_per_axis, np.ndarray) else points_per_axis
    request = Request(
        None if eps is None else real_number("eps", eps),
        dtype,
        exponent("inf" if norm == SMOOTH else norm),
        max_anchors,
        max_bytes,
        centres,
        heads,
        progress,
        tuple(counts) if isinstance(counts, Sequence) else counts,
        None if beta is None else real_number("beta", beta),
        construction=construction,
        criterion=criterion,
        also=also,
        seconds=positive_number("seconds", seconds),
        proof=proof,
    )
    with time_limit(request.seconds):
        target = as_target(source, box, lipschitz, request.p, hessian_bound)
        request = replace(request, gradient_eps=_gradient_eps(norm, gradient_eps, target, request))
        request.require_representable(target)
        tiny = normal_numbers(target, request)
        # A number that overflows is not finite. No construction uses it, and no bound is made of it.
        with one_thread(), quiet():
            try:
                with time_share(1 - SEARCH_SHARE):
                    found = _within_eps(target, request)
                if found.network.certificate.bound is None and tiny is not None:
                    raise InputError(tiny)
            except BoundNotMet as refusal:
                if tiny is not None:
                    raise InputError(tiny) from None
                if request.gradient_eps is not None:  # the search below is about values alone
                    raise
                eased = with_reachable(refusal, target, request, lambda eased: _within_eps(target, eased).network)
                raise eased from None
            network = certify_also(found.network, found.built, target, also, progress)
    return replace(network, command=command)


def _gradient_eps(norm: float | str, given: float | None, target: Target, request: Request) -> float | None:
    """Return the largest error allowed in a partial derivative; None if gradients are not bounded.

    Raise InputError if there are no gradients to bound, or if an argument is missing.
    """
    if norm != SMOOTH:
        if given is not None:
            raise InputError(f"gradient_eps={given!r} is for norm={SMOOTH!r}. Add norm={SMOOTH!r}, or leave it out.")
        return None
    if request.eps is None:
        raise InputError(f"norm={SMOOTH!r} needs eps, the largest error of the values. Add eps.")
    require_gradient(target)
    return DEFAULT_GRADIENT * request.eps / float(target.box.widths.min() / 2) if given is None else given


def _within_eps(target: Target, request: Request) -> _Attempt:
    """Try the candidates, cheapest first, until one is proved to be within eps."""
    best: _Attempt | None = None
    unbuilt: BoundNotMet | None = None
    for build in candidates(target, request):
        try:
            attempt = _refined(build, target, request)
        except BoundNotMet as refusal:
            unbuilt = refusal
            continue
        if attempt.error <= request.eps_or_any:
            return attempt
        best = attempt if best is None or attempt.error < best.error else best
    if best is not None:
        claim = best.network.certificate
        if request.gradient_eps is not None and claim.error is not None and claim.error <= request.eps_or_any:
            raise gradient_not_met(target, best.network, best.gradient_error, request)
        raise not_met(target, best.network, request)
    assert unbuilt is not None
    raise unbuilt.with_network(lambda built: _proved(built, target, request).network)


def _proved(built: Built, target: Target, request: Request) -> _Attempt:
    """Observe and prove in the share of the time that a proof has; raise BoundNotMet if no bound is found in it."""
    gradient_error, seconds = 0.0, PROOF_SHARE * request.seconds
    try:
        with time_share(PROOF_SHARE):
            network = observe(built, target, request.eps, request.p, request.progress)
            if request.proof:
                proved = prove(network, target, request.progress, seconds)
            else:
                proved = network if request.gradient_eps is not None else with_claims(network, target)
            if request.gradient_eps is not None:
                proved, gradient_error = prove_gradient(proved, target, request.gradient_eps, request.progress, seconds)
    except OutOfTime as late:
        raise out_of_time(target, request.eps_or_any, request.seconds, built.construction, late) from None
    except ProgramError as reason:
        if request.gradient_eps is None:
            raise
        raise gradient_not_proved(target, built, reason, request) from None
    return _Attempt(built, proved, request.eps_or_any, gradient_error, request.gradient_eps)


def _refined(build: Callable[[], Built], target: Target, request: Request) -> _Attempt:
    """Build and prove, and again for a smaller eps while the proved error is above eps, as long as that helps."""

    def attempt(asked: _Asked, failed: Sequence[_Attempt]) -> _Attempt | None:
        try:
            if not failed:
                built = build()
            elif asked.again is not None:
                built = without_overflow(asked.again, target)
            else:
                finer = replace(request, eps=asked.eps, construction=failed[-1].built.construction)
                built = next(candidates(target, finer))()
        except BoundNotMet:
            if not failed:
                raise
            return None
        if failed and failed[-1].is_same(built):  # its samples show a smaller error than it was asked for
            return failed[-1]
        return _proved(built, target, request)

    goal = request.eps_or_any
    found = tightened(_Asked(goal, None), attempt, _Asked.next, goal, 1 + MAX_RETRIES, gives_up=_is_useless)
    return found.met or found.best


@dataclass(frozen=True)
class _Asked:
    """The eps of a retry, or its build from the proved errors."""

    eps: float
    again: Callable[[], Built] | None

    def next(self, last: _Attempt) -> _Asked:
        """Return the next retry: first a build from proved errors, if there is one, then a smaller eps, in turns."""
        again = last.again if self.again is None else None
        return _Asked(self.eps if again is not None else self.eps * last.room, again)


def _is_useless(failed: Sequence[_Attempt]) -> bool:
    """Whether the last attempt was hardly better than the earlier ones, or cannot be finer.

    A build from proved errors, which is every other attempt, is not judged before the next eps was tried.
    """
    *earlier, last = failed
    is_from_errors = failed[0].again is not None and len(failed) % 2 == 0
    is_new = bool(earlier) and last not in earlier and not is_from_errors
    is_better = not is_new or last.error < WORTHWHILE * min(each.error for each in earlier)
    return not (is_better and last.can_be_finer)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A network that was built for eps, and its certificate."""

    built: Built
    network: Network
    eps: float
    gradient_error: float = 0.0  # the bound, or the error that was seen
    gradient_eps: float | None = None

    @property
    def error(self) -> float:
        """The bound, or the observed error. On an infinite box an error without a bound is taken as infinite.

        If gradients are bounded, too, it is the larger of both errors, each in units of its own eps, times eps.
        """
        claim = self.network.certificate
        drifts = claim.bound is None and not self.network.box.is_bounded
        error = math.inf if drifts or claim.error is None else claim.error
        return error if self.gradient_eps is None else max(error, self.gradient_error / self.gradient_eps * self.eps)

    @property
    def rounding(self) -> float:
        return min(rounding_of(self.network), self.error)

    @property
    def can_be_finer(self) -> bool:
        """Whether a smaller eps may help. Not if rounding is the limit, or if only the proof ran out of time."""
        claim = self.network.certificate
        is_proof_too_long = not claim.complete and (claim.observed or 0.0) <= self.eps / 2
        return self.rounding < self.eps and not is_proof_too_long

    @property
    def again(self) -> Callable[[], Built] | None:
        """The build that uses the proved errors, if the construction has one."""
        proved = self.network.certificate.by_heads
        if self.built.again is None or proved is None:
            return None
        return functools.partial(self.built.again, {head.channel: head.bound for head in proved.heads}, self.error)

    @property
    def room(self) -> float:
        """The factor for the next eps. It is chosen so that the error should then be within eps."""
        aim = RETRY_AIM * (self.eps - self.rounding) / (self.error - self.rounding)
        return max(RETRY_FACTORS[0], min(RETRY_FACTORS[1], aim))

    def is_same(self, built: Built) -> bool:
        """Return whether another build has exactly the same weights."""
        (_, first), (_, second) = encode(self.built.program), encode(built.program)
        return first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())
