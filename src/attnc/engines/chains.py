"""Averages of a head of one argument as the quotient of two polynomials in one exponential, for compiled loops.

With slopes a_k = kδ + s, the average of values v_k is Σ v_k C_k E^k / Σ C_k E^k, where E = e^{δx} and C_k = e^{c_k}, up
to a factor that all keys share (`powers`). Both sums are computed in the program's dtype, each as m chains: chain i has
the keys k ≡ i modulo m, and is evaluated by Horner's rule in E^m. m is 4 for more than 8 keys, and 2 for fewer. Up to 5
keys are one chain in a smaller range of the variable. All products with a sum are fused (`exponential_numba.fma`), so
that a product and a sum round once. Coefficients are rounded once: C_k, v_k C_k, and the rate ρ = wδ log₂e of the
exponent, where the query is w·z for a variable z.

Rounding.  Let u be the unit roundoff. Certificates allow, at every x, weights that are off by a factor e^{±2Ku}, up to
a shared one, with K = ENGINE_ULPS. They also allow B roundings of the sum of weights, and B + 3 of that of their
products with values, the quotient included. B is the number of keys whose weight, divided by the sum of all, exceeds
u/8. Or all others weigh together f, and 2f is added on either side. So if n keys weigh more than u/2 each, there is
room for n roundings: each of these keys counts in B, or it adds more than u to 2f.

- E has a relative error ε ≤ EXPONENTIAL_ERROR·u. E² adds a rounding u₂, and E⁴ = E²·E² adds u₄. The power k is off by
  kη plus a rest. For m = 1, η = ε without a rest. For m = 2, η = ε + u₂/2, and the rest is u/2. For m = 4,
  η = ε + u₂/2 + u₄/4, and the rest is 1.25u. The shared factor is chosen such that k·η counts from the middle key:
  ((p − 1)/2)·η for p keys.
- Slopes that are not equally spaced, and the rounding of ρ, change exponents by d·|z|. d is computed from the stored
  numbers.
- A key passes through at most r fused products and sums: one less than the length of a chain, and log₂m more that add
  up the chains. C_k is rounded once more. So the sum of weights has r + 1 roundings, that of products with values r + 2
  with the quotient.

The first two items must be within 2Ku, and n ≥ r + 1 keys must weigh more than u/2. If 2Ku has room for the rounding of
C_k, n ≥ r suffices. Both limit the variable: `least` ≤ z ≤ `most`. Beyond that, a head takes an exponential for each
key. `inner` is the range for one chain. No sum overflows, because |δx| and the range of the c_k are limited. The least
C_k is 1, so that a part of a sum that underflows is off by less than a subnormal number relative to the sum of the
weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

from attnc.engines.powers import LOG2_E, MOST_POWERS
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF

EXPONENTIAL_ERROR = {"float64": 2.5, "float32": 1.6}
"""The largest relative error of `exponential_numba.power_of_two`, in unit roundoffs (`attnc doctor` measures it).
Measured: 1.24 at all r of float32, 1.3 in float64, and REDUCTION_ERROR besides."""
REDUCTION_ERROR = {"float64": 0.18, "float32": 0.35}
"""The part of it that rounding r once may cause, or twice in float32: u·(log 2)/4 each."""
MOST_IN_ONE, MOST_IN_PAIRS = 5, 8
"""The largest number of keys with one chain, and with two. One takes the fewest operations, and rounds most often."""
LENGTHS = {2: (2, 3, 4), 4: (3, 4, 6, 8)}
"""The lengths of chains for which loops are compiled. Missing coefficients are 0. A single chain takes the coefficients
of two chains."""
POWER_ERRORS = {1: (0.0, 0.0), 2: (0.5, 0.5), 4: (0.75, 1.25)}
"""For each number of chains η − ε and the rest, in unit roundoffs."""
LARGEST_RANGE = {"float64": 60.0, "float32": 20.0}
"""The largest difference of two c_k."""
LARGEST_EXPONENT = {"float64": 600.0, "float32": 50.0}
"""The largest exponent of a power. Together with the range, e^70 in float32 and e^660 in float64 are normal numbers."""
LARGEST_VALUE = {"float64": 1e15, "float32": 1e6}
"""The largest absolute value of a key. Its product with the largest power is far from overflow."""
SHARE = 0.999
"""The share of 2Ku that is used: products of errors are far below the rest."""
NOWHERE = math.inf, -math.inf
"""An empty range."""
PLACES = 512
"""The number of places at which the weights of keys are computed. Between them they are bounded by their slopes."""


@dataclass(frozen=True, eq=False)
class Chains:
    """A head as a quotient of two polynomials in 2^((rate + low)·z), for least ≤ z ≤ most."""

    rate: float
    low: float
    least: float
    most: float
    inner: tuple[float, float]  # where a single chain may be taken
    weights: Float[np.ndarray, "chains length"]
    products: Float[np.ndarray, "chains length"]  # with the values


def as_chains(
    slopes: Float[np.ndarray, " keys"],
    offsets: Float[np.ndarray, " keys"],
    values: Float[np.ndarray, " keys"],
    factor: float,
) -> Chains | None:
    """Return a head with these numbers, whose query is factor·z, or None if it has no such form."""
    keys, dtype = len(slopes), str(slopes.dtype)
    span, largest = float(np.ptp(offsets)), float(np.abs(values).max(initial=0.0))
    if not (3 <= keys <= MOST_POWERS and span <= LARGEST_RANGE[dtype] and largest <= LARGEST_VALUE[dtype]):
        return None
    exact = [Fraction(a) * Fraction(factor) * LOG2_E for a in slopes.tolist()]
    spacing = (exact[-1] - exact[0]) / (keys - 1)
    rate = _rounded(spacing, dtype)
    low = _rounded(spacing - Fraction(rate), dtype) if dtype == "float32" else 0.0
    off = [a - k * (Fraction(rate) + Fraction(low)) for k, a in enumerate(exact)]
    drift = float((max(off) - min(off)) / 2 / LOG2_E)  # the largest change of an exponent, divided by |z|
    rise = (keys - 1) * abs(rate) / float(LOG2_E)
    if not 0 < rise < math.inf:
        return None
    moves = slopes.astype(np.float64) * factor, offsets.astype(np.float64)
    reach = LARGEST_EXPONENT[dtype] / rise
    chains = 2 if keys <= MOST_IN_PAIRS else 4
    ends = _range(*moves, chains, drift, reach, dtype)
    if ends is None:
        return None
    inner = _range(*moves, 1, drift, reach, dtype) if keys <= MOST_IN_ONE else None
    bottom, context = Decimal(float(offsets.min())), Context(prec=40)
    C = [context.exp(context.subtract(Decimal(float(c)), bottom)) for c in offsets]
    length = next(each for each in LENGTHS[chains] if each * chains >= keys)
    weights, products = np.zeros((2, length * chains), dtype)
    weights[:keys] = [float(c) for c in C]
    products[:keys] = [float(context.multiply(c, Decimal(float(v)))) for c, v in zip(C, values, strict=True)]
    shape = length, chains
    return Chains(rate, low, *ends, inner or NOWHERE, weights.reshape(shape).T.copy(), products.reshape(shape).T.copy())


def _range(
    slopes: Float[np.ndarray, " keys"],
    offsets: Float[np.ndarray, " keys"],
    chains: int,
    drift: float,
    reach: float,
    dtype: str,
) -> tuple[float, float] | None:
    """Return the range of the variable, within ±reach, in which the bounds on rounding above hold. None: nowhere."""
    keys, unit, levels = len(slopes), UNIT_ROUNDOFF[dtype], chains.bit_length() - 1
    shared, rest = POWER_ERRORS[chains]
    room = 2 * ENGINE_ULPS[dtype] * SHARE - (keys - 1) / 2 * (EXPONENTIAL_ERROR[dtype] + shared) - rest
    needed = -(-keys // chains) - 1 + levels
    room, needed = (room - 1, needed) if room > 1 else (room, needed + 1)
    if room <= 0:
        return None
    if drift > 0:
        reach = min(reach, room * unit / drift)
    if not 2 * float(np.finfo(dtype).tiny) < reach < float(np.finfo(dtype).max):
        return None
    return _where_keys_weigh(slopes, offsets, unit / 2, needed, reach)


def _rounded(number: Fraction, dtype: str) -> float:
    return float(np.dtype(dtype).type(float(number)))


def _where_keys_weigh(
    slopes: Float[np.ndarray, " keys"], offsets: Float[np.ndarray, " keys"], least: float, count: int, reach: float
) -> tuple[float, float] | None:
    """Return the ends of an interval about 0, within ±reach, on which `count` keys have a weight above `least`.

    The logarithm of a weight changes with z by at most the largest difference of two slopes.
    """
    z = np.linspace(-reach, reach, PLACES + 1)
    scores = slopes[:, None] * z + offsets[:, None]
    top = scores.max(axis=0)
    logs = scores - (top + np.log(np.exp(scores - top).sum(axis=0)))
    lost = float(np.ptp(slopes)) * reach / PLACES + 1e-6  # for half the distance of two places, and for rounding
    is_lost = (logs > math.log(least) + lost).sum(axis=0) < count
    middle = PLACES // 2
    if is_lost[middle]:
        return None
    before, after = np.flatnonzero(is_lost[:middle]), np.flatnonzero(is_lost[middle:])
    first = before[-1] + 1 if len(before) else 0
    last = middle + after[0] - 1 if len(after) else PLACES
    return float(z[first]), float(z[last])
