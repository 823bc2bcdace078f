"""The refusal of an eps that cannot be met: the best bound found, where it is largest, and an eps that is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from attnc.constructions.built import ROUNDING_SHARE, Built, more_time, round_above
from attnc.constructions.construction import Request
from attnc.constructions.fitting.grid_partition import constant_norm
from attnc.errors import AttncError, BoundNotMet, ProgramError
from attnc.network import Network
from attnc.numerics.limits import is_time_over, time_limit
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.observed import sample_points
from attnc.targets.target import Target
from attnc.wording import OUT_OF_TIME, largest_on, plural

SEARCH_SECONDS = 6.0
"""Counted seconds of the search for an eps that is met: ten compilations of 0.6 s, the corpus median."""
MAX_TRIALS = 12
"""Maximum number of eps that are tried: 6 to find one that is met, by factors up to 3^32, and 6 to bisect."""
CLOSE_EPS = 3.0
"""The search ends if an eps is met, and eps / CLOSE_EPS is not. Another step could gain only a factor √3."""
VALUE_SAMPLES = 256
"""Number of points at which the size of the values of f is sampled."""
MAX_TRIED_ANCHORS = 20_000
"""Largest max_anchors for which a network is built to confirm an eps: building and proving it takes seconds."""
LEAST_ROUNDINGS = 64
"""Smallest eps that is tried, in roundings of max |f|. A smaller eps can hardly ever be proved."""


PARTS = {"jump": "the boundary layer about the jumps", "rounding": "rounding"}
"""The names of terms of an L_p norm in messages. All other terms are differences of f and the network: the fit."""


def not_met(target: Target, network: Network, request: Request) -> BoundNotMet:
    """Return the refusal for the best network that was built."""
    claim, error, eps = network.certificate, network.certificate.error, request.goal
    what, how = f"{target.describe()} on {target.box}", f"by {network.construction}"
    if not target.box.is_bounded and not math.isfinite(_bound(network)):
        message = (
            f"no bound was found for {what}, {how}. On an infinite box the network must have exactly the slopes of the "
            f"function, so these must be {claim.dtype} numbers: 0.25 is one, 0.3 is not. Choose such coefficients, or "
            "a finite box."
        )
        return BoundNotMet(message, eps=eps, bound=claim.bound, network=network)
    kind = "observed error" if claim.bound is None else "bound"
    why = ""
    if not claim.complete:
        why = f" {OUT_OF_TIME}: a larger eps, or a smaller box, is easier to prove. {more_time(request.seconds)}."
    if request.p < math.inf and claim.bound is not None and claim.terms:
        largest = max(claim.terms, key=lambda term: term.value)
        why = f" The largest part is {PARTS.get(largest.name, 'the fit')}: {largest.value:.2g}.{why}"
    is_known = error is not None and 0 < error <= _largest_value(target, request.p)
    least = f"eps ≥ {round_above(error):.2g}" if error is not None and is_known else "a larger eps"
    change = f"{least}, or another construction (attnc plan lists them)"
    if is_known and rounding_of(network) > ROUNDING_SHARE * eps:
        why += f" Rounding in {claim.dtype} alone contributes {rounding_of(network):.2g}."
        change = f"{least}{', float64' if claim.dtype == 'float32' else ''}, or a box closer to 0"
    return BoundNotMet(
        f"cannot bring {what} to eps={eps:g} {how}: the {kind} is {error:.3g}{largest_on(claim, network.box)}.{why} "
        f"Choose {change}.",
        eps=eps,
        bound=claim.bound,
        worst_box=claim.worst_box(network.box),
        network=network,
    )


def gradient_not_met(target: Target, network: Network, error: float, request: Request) -> BoundNotMet:
    """Return the refusal for a network whose values are within eps, and whose gradient is not within gradient_eps."""
    claim, eps = network.certificate, request.gradient_eps
    kind, assumed = ("observed error", "") if claim.gradient is None else ("bound", " or more seconds,")
    least = f"gradient_eps ≥ {round_above(error):.2g},{assumed} " if math.isfinite(error) else ""
    return BoundNotMet(
        f"cannot bring the gradient of {target.describe()} on {target.box} to gradient_eps={eps:g} by "
        f"{network.construction}: the {kind} of a partial derivative is {error:.3g}; that of the values is "
        f"{claim.error:.3g}, within eps={request.eps_or_any:g}. Choose {least}a smaller eps, or another construction.",
        eps=request.goal,
        bound=claim.bound,
        worst_box=claim.worst_box(network.box),
        network=network,
    )


def gradient_not_proved(target: Target, built: Built, reason: ProgramError, request: Request) -> BoundNotMet:
    """Return the refusal for a network about whose gradient nothing can be proved."""
    return BoundNotMet(
        f"the gradient of {target.describe()} cannot be certified by {built.construction}: {reason}. Choose "
        "construction='auto', or norm='inf'.",
        eps=request.goal,
    )


def rounding_of(network: Network) -> float:
    """Return the part of the bound that is due to rounding."""
    return math.fsum(term.value for term in network.certificate.terms if term.name == "rounding")


def with_reachable(
    refusal: BoundNotMet, target: Target, request: Request, compiled: Callable[[Request], Network]
) -> BoundNotMet:
    """Return the refusal with an eps that is met, and the network that comes nearest to the eps that was asked for.

    The first line states an eps that was tried and is met. If the search ends before there is one, it states the
    smallest bound of a network that was built, as an eps that is expected to be met.
    `compiled` makes a network for another eps, or raises. The refusal is returned unchanged if nothing can be proved.
    """
    bound = math.inf if refusal.bound is None else refusal.bound
    is_known = bound <= _largest_value(target, request.p) and refusal.worst_box is not None
    if is_known or not target.is_known_on_cells:
        return _with_known(refusal, target, request)
    if not target.box.is_bounded and refusal.network is not None and _bound(refusal.network) == math.inf:
        return refusal  # the slopes differ on an infinite box, for any eps
    with time_limit(counted=SEARCH_SECONDS):
        met, nearest = _search(refusal, target, request, compiled)
    if nearest is None or _bound(nearest) == math.inf:
        return refusal
    claim = nearest.certificate
    found = (
        f"{refusal}\nThe best bound that was found is {claim.bound:.3g}, by {nearest.construction} with "
        f"{plural(nearest.num_anchors, 'anchor')}{largest_on(claim, nearest.box)}."
    )
    is_tried, met = met is not None, round_above(_bound(nearest)) if met is None else met
    return BoundNotMet(
        f"{_first_line(met, refusal.eps, is_tried=is_tried)}{found}",
        eps=refusal.eps,
        bound=claim.bound,
        worst_box=claim.worst_box(nearest.box) or nearest.box.as_dict(),
        network=nearest,
        reach=met,
    )


def _with_known(refusal: BoundNotMet, target: Target, request: Request) -> BoundNotMet:
    """Return a refusal that has a bound or a network, with the eps that follows from it as its first line.

    A large network is not built for this; its eps is then only expected to be met. For a table, a network has at most
    one key per point.
    """
    most = min(request.max_anchors, target.num_check_points or request.max_anchors)
    is_large = most > MAX_TRIED_ANCHORS and not refusal.is_built
    network = None if is_large else refusal.network
    claim = None if network is None else network.certificate
    bounds = [bound for bound in (refusal.bound, claim and claim.error) if bound is not None]
    if not bounds or not 0 < max(bounds) < math.inf:
        return refusal
    met = round_above(max(bounds))
    return BoundNotMet(
        f"{_first_line(met, refusal.eps, is_tried=not is_large)}{refusal}",
        eps=refusal.eps,
        bound=refusal.bound,
        worst_box=refusal.worst_box,
        build=lambda: refusal.network,
        reach=met,
    )


def _first_line(met: float, asked: float, *, is_tried: bool = True) -> str:
    return f"eps={met:.2g} is {'met' if is_tried else 'expected to be met'}, eps={asked:g} is not.\n"


def _search(
    refusal: BoundNotMet, target: Target, request: Request, compiled: Callable[[Request], Network]
) -> tuple[float | None, Network | None]:
    """Return the smallest eps that is met, within a factor CLOSE_EPS, and the network with the smallest bound.

    If an eps is missed, the best bound that was found is tried next. If there is none below the values of f, or it was
    tried already, eps grows faster and faster until it is met, and is then bisected. An eps below the level of rounding
    is not tried.
    """
    largest = _largest_value(target, request.p)
    growth, met = CLOSE_EPS, math.inf
    nearest, reach = _reached(refusal, largest)
    missed = max(refusal.eps, reach or LEAST_ROUNDINGS * UNIT_ROUNDOFF[request.dtype] * largest)
    for _ in range(MAX_TRIALS):
        if met <= CLOSE_EPS * missed or is_time_over():
            break
        if reach is not None and round_above(reach) > missed:
            eps = round_above(reach)
        elif met < math.inf:
            eps = _one_digit(math.sqrt(met * missed))
        else:
            eps, growth = _one_digit(min(growth * missed, max(largest, CLOSE_EPS * missed))), growth * growth
        try:
            network: Network | None = compiled(replace(request, eps=eps))
            met, reach = eps, None
        except AttncError as found:
            network, reach = _reached(found, largest)
            missed = max(eps, reach or 0.0)
        nearest = min(nearest, network, key=_bound)
    return (met if met < math.inf else None), nearest


def _largest_value(target: Target, p: float) -> float:
    """Return the error in L_p of a network that computes 0, if |f| is largest at sampled points or those of a table."""
    return target.largest_value(sample_points(target.box.core(1.0), VALUE_SAMPLES)) * constant_norm(target.box, p)


def _reached(refusal: AttncError, largest: float) -> tuple[Network | None, float | None]:
    """Return the best network of a refusal, and the eps that it reaches, if that is known and at most `largest`."""
    if not isinstance(refusal, BoundNotMet):
        return None, None
    bound = _bound(refusal.network)
    reach = bound if 0 < bound < math.inf else refusal.reach
    return refusal.network, reach if reach is not None and reach <= largest else None


def _bound(network: Network | None) -> float:
    bound = None if network is None else network.certificate.bound
    return math.inf if bound is None else bound


def _one_digit(eps: float) -> float:
    """Round to one digit, as the message shows it: the eps that is shown is the one that was tried."""
    return float(f"{eps:.0e}")
