"""Gates: heads whose keys may carry their own query, how their values are solved, and how large their errors are.

A head of one variable is G(x) = Σ_k w_k(x)(v_k + u_k·x), w = softmax(a_k·x + c_k): a `SoftHead` with one input and one
output. Its `carried` is None if every u_k is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.construction import round_above
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.minimax import fit_values
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
FIT_PASSES = 24
"""Number of reweightings of a fit; the errors in the gate table hold for this number."""


@dataclass(frozen=True, eq=False)
class Gate:
    """One activation f as attention.

    |gate(x) − f(x)| ≤ error for every x of the domain, in exact arithmetic. `is_proved` tells that this is a closed
    form; otherwise it is the largest error found by a search. `lipschitz` is that of f on the domain.

    With a number `sign` = β the gate has two layers: s = tanh(βx) and y = x·s by two keys, then s·A(y), A the head of
    `keys`. Only softsign has them.
    """

    name: str
    keys: SoftHead[np.ndarray]
    error: float
    lipschitz: float
    domain: tuple[float, float] = ALL_REALS
    is_proved: bool = False
    sign: float | None = None

    @property
    def num_layers(self) -> int:
        return 1 if self.sign is None else 2

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys + (0 if self.sign is None else 2)

    def build(self, circuit: Circuit, x: Wire) -> Wire:
        """Add the heads of the gate at x."""
        if self.sign is None:
            return circuit.apply(self.keys, x, name=self.name)
        sides, zero = np.array([-1.0, 1.0]), np.zeros(2)
        values, carried = np.stack([sides, zero], axis=1), np.stack([zero, sides], axis=1)
        steep = SoftHead(self.sign * sides[:, None], zero, values, carried[:, :, None])
        sign, size = circuit.head([x], steep, name="sign")
        return circuit.gate(self.keys, size, sign, name=self.name)


def exact_gate(name: str, recipe: ExactKeys, eps: float) -> Gate:
    """The gate of a function that is a softmax already; eps is checked and not needed."""
    positive("eps", eps)
    slopes, offsets, values = (np.array(numbers) for numbers in (recipe.slopes, recipe.offsets, recipe.values))
    carried = np.array(recipe.carried) if any(recipe.carried) else None
    keys = SoftHead.of_one_variable(slopes, offsets, values, carried)
    return Gate(name, keys, recipe.error, recipe.lipschitz, is_proved=True)


def min_keys(name: str, eps: float, hints: Mapping[int, float], make: Callable[[int], Gate]) -> Gate:
    """The gate with the least p whose error is ≤ eps. Rows whose hint is more than 10 % above eps are not tried."""
    positive("eps", eps)
    for p, hint in sorted(hints.items()):
        if 0.9 * hint <= eps:
            gate = make(p)
            if gate.error <= eps:
                return gate
    best = make(max(hints))
    if best.error <= eps:
        return best
    raise OutOfReach(name, eps, best.error, best.num_anchors)


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
    """sup |G(t) − (v + ut)| over t ≥ x, with v and u of the last key, whose slope is the largest; x ≥ reach_of(keys).

    Proof.  |G − (v + ut)| ≤ Σ_k e^{s_k − s_last}(|v_k − v| + |u_k − u|t), and t·e^{−gap·t} falls for t ≥ 1/gap.
    """
    slopes, values = keys.slopes[:, 0], keys.values[:, 0]
    gaps, behind = slopes[-1] - slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    apart = np.abs(values[:-1] - values[-1])
    if keys.carried is not None:
        apart = apart + np.abs(keys.carried[:-1, 0, 0] - keys.carried[-1, 0, 0]) * x
    return 1.001 * float((np.exp(behind - gaps * x) * apart).sum())


def solved(
    keys: SoftHead[np.ndarray],
    x: Float[np.ndarray, " points"],
    f: Float[np.ndarray, " points"],
    values: Float[np.ndarray, "keys unknowns"],
    carried: Float[np.ndarray, "keys unknowns"] | None = None,
    limit: float = math.inf,
) -> SoftHead[np.ndarray]:
    """The keys with values + values·z and carried parts + carried·z, for the z that makes max |G(x) − f| least.

    `limit` bounds |z|.
    """
    weights = keys.weights(x[:, None])
    columns = weights @ values if carried is None else weights @ values + x[:, None] * (weights @ carried)
    if not columns.shape[1]:
        return keys
    rest = (f - at_points(keys, x))[:, None]
    z = fit_values(columns, rest, np.array([limit]), FIT_PASSES).values
    moving = keys.carried if carried is None or keys.carried is None else keys.carried + (carried @ z)[:, :, None]
    return SoftHead(keys.slopes, keys.offsets, keys.values + values @ z, moving)


def pairs(p: int, sign: float) -> Float[np.ndarray, "keys pairs"]:
    """A column for each pair of keys about the middle, from the inside out: 1 on the right, `sign` on the left."""
    unit, m = np.eye(p), p // 2
    return unit[:, p - m :] + sign * unit[:, :m][:, ::-1]
