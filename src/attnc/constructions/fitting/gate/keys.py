"""Gates: heads whose keys may carry their own query, and the search for the largest error of such a head.

A head of one variable is G(x) = Σ_k w_k(x)(v_k + u_k·x), w = softmax(a_k·x + c_k): a `SoftHead` with one input and one
output. Its `carried` is None if every u_k is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.construction import round_above
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.errors import InputError, real_number
from attnc.functions.gate_recipes import ExactKeys
from attnc.ir.soft_head import SoftHead

if TYPE_CHECKING:
    from jaxtyping import Float

ALL_REALS = (-math.inf, math.inf)


SEARCH_SAFETY = 1.01
"""Margin on an error found by a search, which finds peaks to a relative 1e-4."""
PEAK_ROUNDS, PEAK_PARTS = 2, 24
"""Number of refinements about each peak, and number of parts of each refinement: peaks are then found to 1e-4."""
NEGLIGIBLE_SCORE = 60.0
"""Keys whose score is lower than that of the largest by this have weights below e^{−60} < 2⁻⁸⁶."""


@dataclass(frozen=True, eq=False)
class Gate:
    """One activation f as attention: `build(circuit, wire)` adds its heads.

    |gate(x) − f(x)| ≤ error for every x of the domain, in exact arithmetic. `is_proved` tells that this is a closed
    form; otherwise it is the largest error found by a search. `lipschitz` is that of f on the domain. `keys` is the
    only head, if there is one.
    """

    name: str
    error: float
    num_anchors: int
    num_layers: int
    domain: tuple[float, float]
    build: Callable[[Circuit, Wire], Wire]
    lipschitz: float
    is_proved: bool = False
    keys: SoftHead[np.ndarray] | None = None

    @classmethod
    def one_head(
        cls,
        name: str,
        keys: SoftHead[np.ndarray],
        error: float,
        lipschitz: float,
        *,
        domain: tuple[float, float] = ALL_REALS,
        is_proved: bool = False,
    ) -> Gate:
        def build(circuit: Circuit, x: Wire) -> Wire:
            return circuit.apply(keys, x, name=name)

        return cls(name, error, keys.num_keys, 1, domain, build, lipschitz, is_proved, keys)


def exact_gate(name: str, recipe: ExactKeys, eps: float) -> Gate:
    """The gate of a function that is a softmax already; eps is checked and not needed."""
    positive("eps", eps)
    slopes, offsets, values = (np.array(numbers) for numbers in (recipe.slopes, recipe.offsets, recipe.values))
    carried = np.array(recipe.carried) if any(recipe.carried) else None
    keys = SoftHead.of_one_variable(slopes, offsets, values, carried)
    return Gate.one_head(name, keys, recipe.error, recipe.lipschitz, is_proved=True)


def positive(name: str, given: float) -> float:
    value = real_number(name, given)
    if not value > 0:
        raise InputError(f"{name} must be a finite number > 0, found {given!r}")
    return value


def power_of_two(at_least: float) -> float:
    """The least power of two that is not below: products with it are exact, and so are scores β·x."""
    if not at_least < 2.0**1000:
        raise InputError(f"the error asked for needs an inverse temperature of {at_least:.3g}; choose a larger eps")
    mantissa, exponent = math.frexp(max(at_least, 2.0**-1000))
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


class OutOfReach(InputError):
    """No gate is as accurate as `eps`; the most accurate one has the error `error`."""

    def __init__(self, name: str, eps: float, error: float, keys: int) -> None:
        self.eps, self.error = eps, error
        super().__init__(
            f"no {name} gate has an error ≤ eps={eps:g}: the most accurate one has {keys} keys and an error of "
            f"{error:.2g}. Choose eps ≥ {round_above(error):.2g}."
        )


def largest(error_at: Callable[[np.ndarray], np.ndarray], points: Float[np.ndarray, " points"]) -> float:
    """max |error| over sorted points, refined about every peak of at least 70 % of the largest."""
    points = np.asarray(points, np.float64)
    errors = np.abs(error_at(points))
    found = float(errors.max())
    for _ in range(PEAK_ROUNDS):
        padded = np.concatenate([[0.0], errors, [0.0]])
        at = np.flatnonzero((errors >= padded[:-2]) & (errors >= padded[2:]) & (errors >= 0.7 * found))
        left, right = points[np.maximum(at - 1, 0)], points[np.minimum(at + 1, len(points) - 1)]
        points = np.unique((left[:, None] + (right - left)[:, None] * (np.arange(PEAK_PARTS + 1) / PEAK_PARTS)).ravel())
        errors = np.abs(error_at(points))
        found = max(found, float(errors.max()))
    return found


def observed(error_at: Callable[[np.ndarray], np.ndarray], points: Float[np.ndarray, " points"], size: float) -> float:
    """The largest error, rounded up, plus the rounding errors of float64: `size` is that of the summed terms."""
    return SEARCH_SAFETY * largest(error_at, points) + 16 * 2.0**-53 * size


def half_line(reach: float, core: float = 12.0, count: int = 1000) -> Float[np.ndarray, " points"]:
    """Points from 0 to reach: evenly spaced up to `core`, geometrically beyond."""
    near = np.linspace(0.0, min(core, reach), count)
    return near if reach <= core else np.concatenate([near, np.geomspace(core, reach, 300)[1:]])


def at_points(keys: SoftHead[np.ndarray], x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
    """G(x), for a head of one variable."""
    return keys(x[:, None])[:, 0]


def reach_of(keys: SoftHead[np.ndarray]) -> float:
    """The x beyond which the score of the last key exceeds all others by `NEGLIGIBLE_SCORE`."""
    slopes = keys.slopes[:, 0]
    gaps, behind = slopes[-1] - slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    return float(((NEGLIGIBLE_SCORE + np.maximum(behind, 0.0)) / gaps).max())


def tail(keys: SoftHead[np.ndarray], x: float) -> float:
    """sup |G(t) − (v + ut)| over t ≥ x, (v, u) those of the last key, whose slope is the largest; x ≥ reach_of(keys).

    Proof.  |G − (v + ut)| ≤ Σ_k e^{s_k − s_last}(|v_k − v| + |u_k − u|t), and t·e^{−gap·t} falls for t ≥ 1/gap.
    """
    slopes, values = keys.slopes[:, 0], keys.values[:, 0]
    gaps, behind = slopes[-1] - slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    apart = np.abs(values[:-1] - values[-1])
    if keys.carried is not None:
        apart = apart + np.abs(keys.carried[:-1, 0, 0] - keys.carried[-1, 0, 0]) * x
    return 1.001 * float((np.exp(behind - gaps * x) * apart).sum())
