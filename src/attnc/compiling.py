"""The path from a function to a network, from top to bottom:

source  →  target  →  candidates  →  build  →  observe and prove  →  refine  →  network
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc import planning
from attnc.certifying import certify, certify_also
from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Estimate, Request
from attnc.errors import BoundNotMet, InputError, real_number
from attnc.exports.tensors import encode
from attnc.ir.program import Program
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.planning import builders, construction_named, named_builder
from attnc.proofs.observed import sample_points
from attnc.refusing import not_met, rounding_of, with_reachable
from attnc.targets.box import BoxLike
from attnc.targets.sources import as_target
from attnc.targets.target import Target

LEAST_IN_FLOAT32 = 2.0**-100
"""Least magnitude of a variable in float32: smaller numbers lose digits there, and below 2^−149 there are none."""
MAX_RETRIES = 6
"""Maximum number of retries of a construction with a smaller eps."""
WORTHWHILE = 0.97
"""A retry is worth another one if it lowers the error to this share of the best error before it."""


def compile(  # the contract's name; inside this module nothing needs the builtin
    source: str | Target | Callable[[np.ndarray], Any],
    box: BoxLike | None = None,
    eps: float = 1e-2,
    *,
    dtype: str = "float64",
    also: str | None = None,
    construction: str = "auto",
    criterion: str = "multiply_adds",
    lipschitz: float | None = None,
    hessian_bound: float | None = None,
    norm: float | str = "inf",
    centres: str | None = None,
    heads: int | None = None,
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
    command: str | None = None,
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
        The largest error allowed anywhere on the box.
    dtype
        The arithmetic of the network, "float64" or "float32".
    also
        A second dtype in which the network will run, with its weights rounded to it. The bound that is proved for it is
        in `certified_in(also)`; it may be larger than eps.
    construction
        A name from `attnc plan`, or "auto": the cheapest of those that suit the target, by `criterion`.
    criterion
        "multiply_adds", "anchors", "parameters" or "layers".
    lipschitz, hessian_bound
        For a callable: its Lipschitz constant, and the largest |∂²f/∂x_i²|. They are taken on trust; without either
        nothing is proved.
    norm
        "inf", or p ≥ 1 to measure the error in L_p over the box. Then the function may jump.
    centres, heads
        Options of some constructions: "grid" or "adaptive" cells, and the number of heads of a first layer.
    max_anchors, max_bytes
        Limits of the size of the network.
    progress
        Called with the current step and the fraction of it that is done.
    command
        The command line that is noted on the model card.

    Returns
    -------
    Network
        With a certificate of its error.

    Raises
    ------
    BoundNotMet
        If the bound cannot be brought to eps within max_anchors and max_bytes.
    InputError
        If an argument is not valid.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
    >>> net.certificate.bound <= 1e-3
    True
    """
    from threadpoolctl import threadpool_limits

    p = _exponent(norm)
    request = Request(real_number("eps", eps), dtype, p, max_anchors, max_bytes, centres, heads, progress)
    if construction != "auto":
        construction_named(construction)
    if also is not None and (also not in UNIT_ROUNDOFF or also == dtype):
        others = " or ".join(name for name in UNIT_ROUNDOFF if name != dtype)
        raise InputError(f"also is a second dtype beside {dtype}: {others}; found {also!r}")
    target = as_target(source, box, lipschitz, p, hessian_bound)
    if not target.box.is_bounded and construction not in ("auto", "gates"):
        raise InputError(f"{construction} takes a finite box, found {target.box}; gates serve all of R")
    _check_sizes(target, "float32" if "float32" in (dtype, also) else dtype)
    if "float32" in (dtype, also) and target.box.is_bounded and target.box.magnitude.min() < LEAST_IN_FLOAT32:
        name = target.box.names[int(target.box.magnitude.argmin())]
        raise InputError(f"|{name}| ≤ {target.box.magnitude.min():.3g} is too small for float32: scale the variable")
    # The decompositions are small: the threads of a BLAS would cost more than they gain. A number that overflows on the
    # way is not finite, and neither used by a construction nor taken for a bound.
    with threadpool_limits(1), np.errstate(all="ignore"):
        return _Compilation(target, request, construction, criterion, also, command).network()


@dataclass(frozen=True, eq=False)
class _Compilation:
    """One call of `compile`, with checked arguments: candidates → build → observe and prove → refine."""

    target: Target
    request: Request
    construction: str
    criterion: str
    also: str | None
    command: str | None

    def network(self) -> Network:
        """The network within eps; or BoundNotMet, with an eps that is met instead."""
        try:
            found = self._within_eps()
        except BoundNotMet as refusal:
            raise with_reachable(refusal, self.target, self.request.dtype, self._for_eps) from None
        if self.also is None:
            return found.network
        return certify_also(found.network, found.built, self.target, self.also, self.request.progress)

    def _for_eps(self, eps: float) -> Network:
        return dataclasses.replace(self, request=dataclasses.replace(self.request, eps=eps))._within_eps().network

    def _within_eps(self) -> _Attempt:
        """Try the candidates, cheapest first, until one is proved to be within eps."""
        best: _Attempt | None = None
        unbuilt: BoundNotMet | None = None
        for build in builders(self.target, self.request, self.construction, self.criterion):
            try:
                found = self._refined(self._attempt(build))
            except BoundNotMet as refusal:
                unbuilt = refusal
                continue
            if found.is_met:
                return found
            best = found if best is None or found.error < best.error else best
        if best is not None:
            raise not_met(self.target, best.network, self.request.goal)
        assert unbuilt is not None
        raise unbuilt.with_network(self._certified)

    def _attempt(self, build: Callable[[], Built]) -> _Attempt:
        return self._proved(self._built(build))

    def _proved(self, built: Built) -> _Attempt:
        return _Attempt(built, self._certified(built), self.request.goal)

    def _built(self, build: Callable[[], Built]) -> Built:
        try:
            return build()
        except np.linalg.LinAlgError:
            raise InputError(
                f"the numbers of {self.target.describe()} on {self.target.box} are too large or too small for a fit: "
                "scale the function or its variables"
            ) from None

    def _refined(self, best: _Attempt) -> _Attempt:
        """Build again for a smaller eps while the proved error is above eps, and as long as that helps."""
        last, asked = best, self.request.goal
        again: Callable[[], Built] | None = None
        for _ in range(MAX_RETRIES):
            if last.is_met or not last.can_be_finer:
                break
            again = last.again if again is None else None
            if again is None:
                asked *= last.room
            try:
                built = self._built(again or self._named(last.built.construction, asked))
            except BoundNotMet:
                break
            if _are_same(built.program, last.built.program):  # its samples show less than it was asked for
                continue
            last = self._proved(built)
            helped = last.error < WORTHWHILE * best.error
            best = last if last.error < best.error else best
            if not helped:
                break
        return best

    def _named(self, name: str, eps: float) -> Callable[[], Built]:
        return named_builder(construction_named(name), self.target, dataclasses.replace(self.request, eps=eps))

    def _certified(self, built: Built) -> Network:
        request = self.request
        return certify(built, self.target, request.p, request.goal, self.command, request.progress)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A network that was built for eps, and its certificate."""

    built: Built
    network: Network
    eps: float

    @property
    def error(self) -> float:
        """The certified error. On an infinite box samples prove nothing: errors grow where slopes differ."""
        claim = self.network.certificate
        drifts = claim.bound is None and not self.network.box.is_bounded
        return math.inf if drifts or claim.error is None else claim.error

    @property
    def is_met(self) -> bool:
        return self.error <= self.eps

    @property
    def rounding(self) -> float:
        return min(rounding_of(self.network), self.error)

    @property
    def can_be_finer(self) -> bool:
        """Whether a smaller eps may help: not if rounding is the limit, nor if only the proof ran out of time."""
        claim = self.network.certificate
        is_proof_too_long = not claim.complete and (claim.observed or 0.0) <= self.eps / 2
        return self.rounding < self.eps and not is_proof_too_long

    @property
    def again(self) -> Callable[[], Built] | None:
        """Built with the errors that its heads were proved to have."""
        proved = self.network.certificate.by_heads
        if self.built.again is None or proved is None:
            return None
        return functools.partial(self.built.again, {head.channel: head.bound for head in proved.heads})

    @property
    def room(self) -> float:
        """The factor by which the next eps is smaller, so that the error is expected to be within eps."""
        return max(0.1, min(0.8, 0.9 * (self.eps - self.rounding) / (self.error - self.rounding)))


def _are_same(one: Program, other: Program) -> bool:
    (_, first), (_, second) = encode(one), encode(other)
    return first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())


def plan(
    source: str | Target | Callable[[np.ndarray], Any],
    box: BoxLike | None = None,
    eps: float = 1e-2,
    *,
    dtype: str = "float64",
    lipschitz: float | None = None,
    hessian_bound: float | None = None,
    norm: float | str = "inf",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
) -> list[Estimate]:
    """List the cost of every construction for this eps, the cheapest by multiply-adds first.

    Costs are found by the work that they depend on. Compositions, gates, clips, ReLU networks, tables and heads of one
    variable are fitted, and the fit is kept: building it later is free. A spectral grid is sized from sections of the
    function, and the papers' grids from its variation. Nothing is certified.
    """
    from threadpoolctl import threadpool_limits

    p = _exponent(norm)
    request = Request(real_number("eps", eps), dtype, p, max_anchors, max_bytes)
    target = as_target(source, box, lipschitz, p, hessian_bound)
    with threadpool_limits(1):
        rows = planning.plan(target, request)
    able = planning.cheapest(rows, "multiply_adds")
    return [*able, *(row for row in rows if row.why_not is not None)]


def _exponent(norm: Any) -> float:
    """p of the L_p norm; "inf" is the largest error."""
    if norm == "inf":
        return math.inf
    is_number = isinstance(norm, numbers.Real) and not isinstance(norm, bool)
    if not is_number or not norm >= 1:
        raise InputError(f"norm must be 'inf' or a number p ≥ 1, found {norm!r}")
    return float(norm)


def _check_sizes(target: Target, dtype: str) -> None:
    """Refuse values that overflow in the dtype: the network would be NaN under a finite bound."""
    most = float(np.finfo(dtype).max) / 8
    box = target.box.core(1.0)
    if not float(box.magnitude.max()) < math.sqrt(most):  # scores are of the size of its square
        raise InputError(f"the box {target.box} is more than {dtype} holds: choose a smaller one, or scale the inputs")
    points = target.check_points()
    points = sample_points(box, 64) if points is None else points[:64]
    largest = float(np.abs(target(points)).max(initial=0.0))
    if not largest < most:
        raise InputError(f"{target.describe()} reaches {largest:.3g}, more than {dtype} holds: scale the function")
