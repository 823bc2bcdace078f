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
from attnc.certificates.certificate import Certificate
from attnc.certificates.observed import sample_points
from attnc.certifying import certify, certify_also
from attnc.choosing import cheapest_builder, named_builder
from attnc.constructions.built import Built, Progress
from attnc.constructions.estimate import Estimate, Wanted
from attnc.constructions.gate.keys import OutOfReach
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.errors import BoundNotMet, InputError, real_number
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.planning import CONSTRUCTIONS
from attnc.refusing import not_met, rounding_of, with_nearest
from attnc.targets.box import BoxLike
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.sources import as_target
from attnc.targets.target import Target

SMALL = 2.0**-100
"""A variable that is smaller everywhere would lose digits when it is cast to float32, which has none below 2^−149."""
ATTEMPTS = 8
WORTHWHILE = 0.97
"""A construction is asked for less again if its error fell to this part of what it was."""

CLOSE = 1.05
"""Of what the most accurate gates reach, to be reached for certain."""


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
    options = {"norm": None if p == math.inf else p, "centres": centres, "heads": heads}
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
        """Within eps; or BoundNotMet, with what can be had instead."""
        try:
            return self._proved()
        except BoundNotMet as refusal:
            raise with_nearest(
                refusal, self.target, lambda eps: dataclasses.replace(self, eps=eps, also=None)._proved()
            ) from None

    def _proved(self) -> Network:
        """Built and proved; built again for a smaller error where the proof found more than the construction saw.

        Where that does not help, because rounding is in the way, another construction may.
        """
        best: Network | None = None
        least: dict[str, float] = {}  # of each construction, the error that it was brought to
        given_up: set[str] = set()
        name, asked = None if self.construction == "auto" else self.construction, self.eps
        again: Callable[[], Built] | None = None
        out_of_reach: OutOfReach | None = None
        for _ in range(ATTEMPTS):
            wanted = Wanted(asked, self.dtype, self.p, self.max_anchors, self.max_bytes)
            try:
                built = (again or self._builder(name, wanted, given_up))()
            except np.linalg.LinAlgError:
                raise InputError(
                    f"the numbers of {self.target.describe()} on {self.target.box} are too large or too "
                    "small for a fit: scale the function or its variables"
                ) from None
            except OutOfReach as refusal:  # what its gates can do shows how close one comes
                out_of_reach, again = refusal, None
                asked *= CLOSE * refusal.error / refusal.eps
                continue
            except BoundNotMet as refusal:
                if best is None:
                    raise refusal.with_network(self._certified) from None
                if name is None or self.construction != "auto":
                    break
                given_up.add(name)
                name, asked, again = None, self.eps, None
                continue
            network, name = self._certified(built), built.construction
            claim = network.certificate
            error = math.inf if self._drifts(claim) else claim.error
            if error is None or error <= self.eps:
                also = self.also
                return network if also is None else certify_also(network, built, self.target, also, self.progress)
            before = least.get(name, math.inf)
            least[name] = min(error, before)
            best = network if error <= min(least.values()) else best
            rounding = min(rounding_of(network), error)
            is_proof_too_long = not claim.complete and (claim.observed or 0.0) <= self.eps / 2
            if rounding < self.eps and error < WORTHWHILE * before and not is_proof_too_long:
                if again is None and built.again is not None and claim.stages:
                    again = functools.partial(built.again, {head["channel"]: head["bound"] for head in claim.stages})
                    continue
                room = (self.eps - rounding) / (error - rounding)
                asked, again = asked * max(0.1, min(0.8, 0.9 * room)), None
            elif self.construction == "auto":
                given_up.add(name)
                name, asked, again = None, self.eps, None
            else:
                break
        if best is None and out_of_reach is not None:
            raise out_of_reach
        assert best is not None
        raise not_met(self.target, best, self.eps)

    def _drifts(self, claim: Certificate) -> bool:
        """On an infinite box, samples say nothing: far out any error can be found where slopes differ."""
        return claim.bound is None and isinstance(self.target, ExpressionTarget) and not self.target.box.is_bounded

    def _builder(self, name: str | None, wanted: Wanted, given_up: set[str]) -> Callable[[], Built]:
        if name is None:
            return cheapest_builder(self.target, wanted, self.options, self.criterion, given_up, self.progress)
        return named_builder(name, self.target, wanted, self.options, self.progress)

    def _certified(self, built: Built) -> Network:
        return certify(built, self.target, self.p, self.eps, self.command, self.progress)


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
