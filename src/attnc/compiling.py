"""The path from a function to a network, from top to bottom:

source  →  target  →  construction (program and bound)  →  certificate  →  network
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
from attnc.choosing import builders, named_builder
from attnc.constructions.built import Built, Progress
from attnc.constructions.estimate import Estimate, Wanted
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.errors import BoundNotMet, InputError, real_number
from attnc.exports.tensors import encode
from attnc.ir.program import Program
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.planning import CONSTRUCTIONS
from attnc.proofs.observed import sample_points
from attnc.refusing import not_met, rounding_of, with_reachable
from attnc.targets.box import BoxLike
from attnc.targets.sources import as_target
from attnc.targets.target import Target

SMALL = 2.0**-100
"""A variable that is smaller everywhere would lose digits when it is cast to float32, which has none below 2^−149."""
ATTEMPTS = 6
"""So often a construction is asked for less than eps."""
WORTHWHILE = 0.97
"""It is asked for less again if its error fell to this part of what it was."""


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
    """A network of affine maps and softmax attention that is within eps of `source` everywhere on the box.

    `source` is an expression, a Target, a torch.nn.Sequential of Linear and ReLU in turn, or a callable (batch, d) →
    (batch,) or (batch, k); of a callable `lipschitz`, its Lipschitz constant, or `hessian_bound`, the largest
    |∂²f/∂x_i²|, is believed, and without one nothing is proved.
    The construction "auto" is the cheapest that `plan` finds, by multiply-adds, or by anchors, parameters or layers
    (`criterion`). With norm = p ≥ 1 the error is measured in L_p over the box, and the function may jump. `centres`
    ("grid", "adaptive") and `heads` go to the constructions that know them. `also` is a second dtype in which the
    network will run, with its weights rounded to it: what is proved for that is in `certified_in(also)`, and is as
    large as it is, whatever eps.
    Raises BoundNotMet when the bound cannot be brought to eps within max_anchors and max_bytes.
    """
    from threadpoolctl import threadpool_limits

    _check_request(eps, dtype, construction, max_anchors, max_bytes)
    if also is not None and (also not in UNIT_ROUNDOFF or also == dtype):
        others = " or ".join(name for name in UNIT_ROUNDOFF if name != dtype)
        raise InputError(f"also is a second dtype beside {dtype}: {others}; found {also!r}")
    eps = float(eps)
    p = _exponent(norm)
    target = as_target(source, box, lipschitz, p, hessian_bound)
    if not target.box.is_bounded and construction not in ("auto", "gates"):
        raise InputError(f"{construction} takes a finite box, found {target.box}; gates serve all of R")
    _check_sizes(target, "float32" if "float32" in (dtype, also) else dtype)
    if "float32" in (dtype, also) and target.box.is_bounded and target.box.magnitude.min() < SMALL:
        name = target.box.names[int(target.box.magnitude.argmin())]
        raise InputError(f"|{name}| ≤ {target.box.magnitude.min():.3g} is too small for float32: scale the variable")
    options = {"centres": centres, "heads": heads}
    given = {key: value for key, value in options.items() if value is not None}
    request = _Request(
        target, eps, dtype, also, p, construction, criterion, given, max_anchors, max_bytes, command, progress
    )
    # Many small decompositions: the threads of a BLAS would cost more than they gain. What overflows on the way is not
    # finite, and neither used by a construction nor taken for a bound.
    with threadpool_limits(1), np.errstate(all="ignore"):
        return request.network()


@dataclass(frozen=True, eq=False)
class _Request:
    """What was asked for, checked."""

    target: Target
    eps: float
    dtype: str
    also: str | None
    p: float
    construction: str
    criterion: str
    options: dict[str, Any]
    max_anchors: int
    max_bytes: int
    command: str | None
    progress: Progress | None

    def network(self) -> Network:
        """Within eps; or BoundNotMet, with an eps that is met instead."""
        try:
            found = self._within_eps()
        except BoundNotMet as refusal:
            raise with_reachable(refusal, self.target, self.dtype, self._for_eps) from None
        if self.also is None:
            return found.network
        return certify_also(found.network, found.built, self.target, self.also, self.progress)

    def _for_eps(self, eps: float) -> Network:
        return dataclasses.replace(self, eps=eps)._within_eps().network

    def _within_eps(self) -> _Attempt:
        """By the cheapest construction that is proved to be: where rounding is in the way of one, another may serve."""
        best: _Attempt | None = None
        unbuilt: BoundNotMet | None = None
        for build in builders(
            self.target, self._wanted(self.eps), self.construction, self.options, self.criterion, self.progress
        ):
            try:
                found = self._refined(self._attempt(build))
            except BoundNotMet as refusal:
                unbuilt = refusal
                continue
            if found.is_met:
                return found
            best = found if best is None or found.error < best.error else best
        if best is not None:
            raise not_met(self.target, best.network, self.eps)
        assert unbuilt is not None
        raise unbuilt.with_network(self._certified)

    def _attempt(self, build: Callable[[], Built]) -> _Attempt:
        return self._proved(self._built(build))

    def _proved(self, built: Built) -> _Attempt:
        return _Attempt(built, self._certified(built), self.eps)

    def _built(self, build: Callable[[], Built]) -> Built:
        try:
            return build()
        except np.linalg.LinAlgError:
            raise InputError(
                f"the numbers of {self.target.describe()} on {self.target.box} are too large or too small for a fit: "
                "scale the function or its variables"
            ) from None

    def _refined(self, best: _Attempt) -> _Attempt:
        """Built for less as long as the proof finds more than the construction saw, and that helps."""
        last, asked = best, self.eps
        again: Callable[[], Built] | None = None
        for _ in range(ATTEMPTS):
            if last.is_met or not last.can_be_finer:
                break
            again = last.again if again is None else None
            if again is None:
                asked *= last.room
            try:
                built = self._built(again or self._named(last.built.construction, asked))
            except BoundNotMet:
                break
            if _are_same(built.program, last.built.program):  # it saw less than it was asked for
                continue
            last = self._proved(built)
            helped = last.error < WORTHWHILE * best.error
            best = last if last.error < best.error else best
            if not helped:
                break
        return best

    def _named(self, name: str, eps: float) -> Callable[[], Built]:
        return named_builder(name, self.target, self._wanted(eps), self.options, self.progress)

    def _wanted(self, eps: float) -> Wanted:
        return Wanted(eps, self.dtype, self.p, self.max_anchors, self.max_bytes)

    def _certified(self, built: Built) -> Network:
        return certify(built, self.target, self.p, self.eps, self.command, self.progress)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """What was built for eps, and what was proved of it."""

    built: Built
    network: Network
    eps: float

    @property
    def error(self) -> float:
        """On an infinite box samples say nothing: far out any error can be found where slopes differ."""
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
        """Not where rounding is in the way, nor where only the proof is: it ran out of time."""
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
        """What is to be asked for, as a part of what was, for the error to be within eps."""
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
    """What every construction would cost for this eps, the cheapest by multiply-adds first; nothing is built."""
    from threadpoolctl import threadpool_limits

    _check_request(eps, dtype, "auto", max_anchors, max_bytes)
    p = _exponent(norm)
    target = as_target(source, box, lipschitz, p, hessian_bound)
    with threadpool_limits(1):
        rows = planning.plan(target, Wanted(float(eps), dtype, p, max_anchors, max_bytes))
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
    """Arithmetic that overflows would make the network NaN under a finite bound."""
    most = float(np.finfo(dtype).max) / 8
    box = target.box.core(1.0)
    if not float(box.magnitude.max()) < math.sqrt(most):  # scores are of the size of its square
        raise InputError(f"the box {target.box} is more than {dtype} holds: choose a smaller one, or scale the inputs")
    points = target.check_points()
    points = sample_points(box, 64) if points is None else points[:64]
    largest = float(np.abs(target(points)).max(initial=0.0))
    if not largest < most:
        raise InputError(f"{target.describe()} reaches {largest:.3g}, more than {dtype} holds: scale the function")


def _check_request(eps: float, dtype: str, construction: str, max_anchors: int, max_bytes: int) -> None:
    if not real_number("eps", eps) > 0:
        raise InputError(f"eps must be a finite number > 0, found {eps!r}")
    if not isinstance(dtype, str) or dtype not in UNIT_ROUNDOFF:
        raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")
    if not isinstance(construction, str) or construction not in ("auto", *CONSTRUCTIONS):
        raise InputError(f"construction must be auto or one of {', '.join(CONSTRUCTIONS)}; found {construction!r}")
    for name, limit in (("max_anchors", max_anchors), ("max_bytes", max_bytes)):
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InputError(f"{name} must be a whole number ≥ 1, found {limit!r}")
