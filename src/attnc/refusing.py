"""What is said where eps cannot be met: the best bound that was found, where it is largest, and an eps that is met."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from attnc.certificates.observed import sample_points
from attnc.constructions.unary.request import round_above
from attnc.errors import AttncError, BoundNotMet
from attnc.model_card import plural
from attnc.network import Network
from attnc.targets.function_target import FunctionTarget
from attnc.targets.target import Target

SECONDS = 8.0
"""After which no closer eps is looked for."""
CLOSE = 3.0
"""An eps that is met is close enough if one that is smaller by this factor is not."""


def not_met(target: Target, network: Network, eps: float) -> BoundNotMet:
    """Of the best network that was built."""
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
    """What the bound holds of rounding."""
    return math.fsum(term.value for term in network.certificate.terms if term.name == "rounding")


def with_nearest(refusal: BoundNotMet, target: Target, compiled: Callable[[float], Network]) -> BoundNotMet:
    """The refusal with the network that comes nearest to what was asked for, if it has none that is proved.

    `compiled` makes a network for another eps, or raises: an eps that is said to be met was tried.
    """
    is_known = refusal.bound is not None and refusal.worst_box is not None
    is_sampled = isinstance(target, FunctionTarget) and target.given is None  # nothing can be proved of it
    if is_known or is_sampled or target.check_points() is not None:
        return refusal
    network: Network | None = refusal.network
    reached = None if network is None else network.certificate.bound
    if not target.box.is_bounded and not math.isfinite(reached or math.inf):
        return refusal  # slopes differ far out, whatever eps
    if reached is not None and 0 < reached < math.inf:
        tried = _Tries(compiled, 0.0, round_above(reached))
    else:
        box = target.box.core(1.0)
        largest = float(np.abs(target(sample_points(box, 256))).max())
        tried = _Tries(compiled, refusal.eps, round_above(max(largest, 2 * refusal.eps)))
    found = tried.nearest()
    if found is None:
        return refusal
    if network is None or reached is None or (found.certificate.bound or 0.0) < reached:
        network = found
    claim = network.certificate
    place = claim.worst_place(network.box)
    return BoundNotMet(
        f"{refusal}\nThe best bound that was found is {claim.bound:.3g}, by {network.construction} with "
        f"{plural(network.num_anchors, 'anchor')}{f', largest on {place}' if place else ''}. eps={found.eps:.2g} "
        "is met.",
        eps=refusal.eps,
        bound=claim.bound,
        worst_box=claim.worst_box(network.box) or network.box.as_dict(),
        build=lambda: network,
    )


class _Tries:
    """Networks for several eps, to find the smallest that is met."""

    def __init__(self, compiled: Callable[[float], Network], missed: float, first: float) -> None:
        self.compiled, self.missed, self.first = compiled, missed, first
        self.began = time.monotonic()

    def nearest(self) -> Network | None:
        """By bisection of logarithms between an eps that is missed and one that is met; none is known to be missed if
        that is 0."""
        met, best = self.first, None
        for _ in range(4):
            best = self._at(met)
            if best is not None or time.monotonic() - self.began > SECONDS:
                break
            met = round_above(CLOSE * met)
        while best is not None and self.missed > 0 and met > CLOSE * self.missed:
            if time.monotonic() - self.began > SECONDS:
                break
            middle = float(f"{math.sqrt(met * self.missed):.0e}")  # one digit: what is said is what was tried
            found = self._at(middle)
            if found is None:
                self.missed = middle
            else:
                met, best = middle, found
        return best

    def _at(self, eps: float) -> Network | None:
        try:
            found = self.compiled(eps)
        except AttncError:
            return None
        return found if found.certificate.bound is not None else None
