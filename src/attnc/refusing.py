"""The message where eps cannot be met: the best bound found, the place where it is largest, and an eps that is met."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from attnc.constructions.construction import round_above
from attnc.errors import AttncError, BoundNotMet
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.observed import sample_points
from attnc.targets.target import Target
from attnc.wording import plural

SEARCH_SECONDS = 6.0  # of processor time, after which the search for an eps that is met ends
CLOSE_EPS = 3.0  # an eps that is met is close enough if one that is smaller by this factor is not met
LEAST_ROUNDINGS = 64  # roundings of max |f|: a smaller eps is hardly ever proved, and is not tried


def not_met(target: Target, network: Network, eps: float) -> BoundNotMet:
    """The refusal for the best network that was built."""
    claim = network.certificate
    if not target.box.is_bounded and not math.isfinite(math.inf if claim.bound is None else claim.bound):
        return BoundNotMet(
            f"no bound was found for {target.describe()} on {target.box}, by {network.construction}: far out, function "
            f"and network must have exactly the same slope, and weights are {claim.dtype} numbers: 0.25 is one, 0.3 is "
            "not. Choose coefficients that are, or a finite box.",
            eps=eps,
            bound=claim.bound,
            build=lambda: network,
        )
    kind = "observed error" if claim.bound is None else "bound"
    why = "" if claim.complete else " The proof ran out of time: a larger eps, or a smaller box, is easier to prove."
    rounding, is_known = rounding_of(network), claim.error is not None and 0 < claim.error < math.inf
    least = f"eps ≥ {round_above(claim.error):.2g}" if is_known and claim.error is not None else "a larger eps"
    change = f"Choose {least}, or another construction (attnc plan lists them)."
    if rounding > 0.3 * eps and is_known:
        why += f" Rounding alone costs {rounding:.2g}: that is the rounding level of {claim.dtype} here."
        change = f"Choose {least}{', float64' if claim.dtype == 'float32' else ''}, or a box closer to 0."
    place = claim.worst_place(network.box)
    return BoundNotMet(
        f"cannot bring {target.describe()} on {target.box} to eps={eps:g} by {network.construction}: the {kind} is "
        f"{claim.error:.3g}{f', largest on {place}' if place else ''}.{why} {change}",
        eps=eps,
        bound=claim.bound,
        worst_box=claim.worst_box(network.box),
        build=lambda: network,
    )


def rounding_of(network: Network) -> float:
    """The part of the bound that is due to rounding."""
    return math.fsum(term.value for term in network.certificate.terms if term.name == "rounding")


def with_reachable(
    refusal: BoundNotMet, target: Target, dtype: str, compiled: Callable[[float], Network]
) -> BoundNotMet:
    """The refusal with an eps that is met, and the network that comes nearest to the eps that was asked for.

    It is returned as it is where it names a bound already, or nothing can be proved at all. `compiled` makes a network
    for another eps, or raises: the eps of the message was tried.
    """
    is_known = refusal.bound is not None and refusal.worst_box is not None
    if is_known or not target.is_known_on_cells:
        return refusal
    if not target.box.is_bounded and refusal.network is not None and _bound(refusal.network) == math.inf:
        return refusal  # slopes differ far out, whatever eps
    largest = float(np.abs(target(sample_points(target.box.core(1.0), 256))).max())
    met, nearest = _search(refusal, largest, UNIT_ROUNDOFF[dtype], compiled)
    if nearest is None or _bound(nearest) == math.inf:
        return refusal
    claim = nearest.certificate
    place = claim.worst_place(nearest.box)
    advice = "" if met is None else f" eps={met:.2g} is met."
    return BoundNotMet(
        f"{refusal}\nThe best bound that was found is {claim.bound:.3g}, by {nearest.construction} with "
        f"{plural(nearest.num_anchors, 'anchor')}{f', largest on {place}' if place else ''}.{advice}",
        eps=refusal.eps,
        bound=claim.bound,
        worst_box=claim.worst_box(nearest.box) or nearest.box.as_dict(),
        build=lambda: nearest,
    )


def _search(
    refusal: BoundNotMet, largest: float, unit: float, compiled: Callable[[float], Network]
) -> tuple[float | None, Network | None]:
    """The smallest eps that is met, within a factor CLOSE_EPS; and the network with the least bound on the way to it.

    An eps that is missed leaves the best bound that was found, and that is tried next. Where it leaves none, eps grows
    ever faster until it is met, and is then bisected; but not below the level of rounding.
    """
    end, growth, met = time.process_time() + SEARCH_SECONDS, CLOSE_EPS, math.inf
    nearest, reach = _reached(refusal)
    missed = max(refusal.eps, reach or LEAST_ROUNDINGS * unit * largest)
    while met > CLOSE_EPS * missed and time.process_time() < end:
        if reach is not None:
            eps = round_above(reach)
        elif met < math.inf:
            eps = _one_digit(math.sqrt(met * missed))
        else:
            eps, growth = _one_digit(min(growth * missed, max(largest, CLOSE_EPS * missed))), growth**2
        try:
            network: Network | None = compiled(eps)
            met, reach = eps, None
        except AttncError as found:
            network, reach = _reached(found)
            missed = max(eps, reach or 0.0)
        nearest = min(nearest, network, key=_bound)
    return (met if met < math.inf else None), nearest


def _reached(refusal: AttncError) -> tuple[Network | None, float | None]:
    """The network that a refusal leaves, and the error that it came to, as far as is known."""
    if not isinstance(refusal, BoundNotMet):
        return None, None
    bound = _bound(refusal.network)
    return refusal.network, bound if 0 < bound < math.inf else refusal.reach


def _bound(network: Network | None) -> float:
    bound = None if network is None else network.certificate.bound
    return math.inf if bound is None else bound


def _one_digit(eps: float) -> float:
    """The number as the message shows it: the eps that is shown is the one that was tried."""
    return float(f"{eps:.0e}")
