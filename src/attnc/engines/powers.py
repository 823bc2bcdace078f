"""Heads of one argument whose slopes are equally spaced: their weights are powers of one exponential.

With slopes a_k = kδ + s, the weights e^{a_k x + c_k} are C_k·E^k times a factor that all keys share, with E = e^{δx}
and C_k = e^{c_k}. So a query takes one exponential for all keys. Everything here is computed in float64. Powers are
made in groups of 8: E², E³ = E²·E, E⁴ = E²·E², then E⁵ to E⁷ as products with E⁴, and E⁸ = E⁴·E⁴. Later groups are
these times a base, the last base times E⁸.

Rounding.  Let u be the unit roundoff of float64. An engine may compute weights that are off by a factor
e^{±(δ_k + 2Ku)}, up to a factor that all keys share, with K = ENGINE_ULPS and the score error
δ_k ≥ 2u(|a_k x| + |c_k|). Here:
- δ·x is rounded. The exponent of key k is off by (k + s/δ)·u|δx| = u|a_k x|, if the shared factor is chosen well.
- The slopes are equally spaced up to u|a_k|. This adds u|a_k x|. Both are within δ_k.
- E has a relative error ε ≤ 2·EXPONENTIAL_ULPS·u = 2.5u. Let u_j be the rounding of the product for E^j. The errors of
  E², E⁴, E⁸ are 2ε + u₂, 4ε + 2u₂ + u₄ and 8ε + 4u₂ + 2u₄ + u₈. The power k is off by k·η plus a rest, where
  η = ε + u₂/2 + u₄/4 + u₈/8 ≤ 3.4u. The rest is largest for E⁷: (½ + ¾ + ⅞ + 2)u ≤ 4.2u. At most 3 bases, and a product
  with one, add 4u. The rounding of C_k and the product with it add 2u.
- The shared factor is chosen such that k·η counts from the middle key: at most 15.5·3.4u for 32 keys.
So the exponents are off by at most (52.7 + 10.2)u < 63u ≤ 2Ku besides δ_k. For a float32 program these errors are far
below the unit roundoff of float32. Only slopes that are not quite equally spaced count there, and its δ_k has u|a_k x|
for the product with a slope, unless all slopes are powers of two. Then they must be equally spaced exactly.

No power overflows or underflows, because |δx|·31 and the range of the c_k are limited. A query beyond `reach` takes an
exponential for each key, as all other heads do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF

EXPONENTIAL_ULPS = 1.25
"""The largest error of an exponential whose powers are weights, in ulp. The compiled one is within 1.2, numpy's within
1 (`attnc doctor` measures both)."""
ROUGH_POWER_ERROR = 6.0
"""The largest relative error of `rough_power_of_two` besides that of its exponent, in unit roundoffs: 1.6 of the
polynomial in float32, and rounding. The last sum adds 1, the last product 0.6, and the sums before it 1.2; without
fused products each of the last two has a rounding more."""
LOG2_E = Fraction("1.44269504088896340735992468100189213742664595415298593413545")
"""log₂ e with 60 digits: coefficients are rounded once."""
POWER_OF_TWO = (
    *(0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888, 0.0013333558146416936),
    *(0.0001540353044173605, 1.525273382983612e-05, 1.321544258792169e-06, 1.0178062445845774e-07),
    *(7.072585949269223e-09, 4.4549605981865186e-10),
)
"""The coefficients of a polynomial that interpolates (2^r − 1)/r in Chebyshev nodes of |r| ≤ ½. The relative error of
1 + r·polynomial(r) is 8.5e-18 besides rounding."""
MOST_POWERS = 32
"""The largest number of keys whose weights are powers: the bound above has room for no more."""
GROUP = 8
"""The number of powers that are made before the next base."""
LARGEST_RANGE = 60.0
"""The largest difference of two c_k. Together with LARGEST_EXPONENT it is below 700, and e^±700 are normal numbers."""
LARGEST_EXPONENT = 600.0
"""The largest exponent of a power."""
LARGEST_VALUE = 1e15
"""The largest absolute value of a key. Its product with e^660 is far from overflow."""


@dataclass(frozen=True, eq=False)
class Powers:
    """A head whose weights are coefficients[k]·e^{k·step·x}, for |x| ≤ reach."""

    step: float
    reach: float
    coefficients: Float[np.ndarray, " keys"]

    def weights(self, x: Float[np.ndarray, " batch"]) -> Float[np.ndarray, "keys batch"]:
        """Return the weights, up to a factor that all keys share, for |x| ≤ reach."""
        keys = len(self.coefficients)
        found = np.empty((keys, len(x)))
        found[0], found[1] = 1.0, np.exp(self.step * x)
        for start, end, base in _products(keys):
            np.multiply(found[base], found[start - base : end - base], out=found[start:end])
        found *= self.coefficients[:, None]
        return found


def _products(keys: int) -> Iterator[tuple[int, int, int]]:
    """Return (start, end, base): the powers from start to end − 1 are the base-th power times lower ones."""
    later = [part for k in range(2 * GROUP, keys, GROUP) for part in ((k, k + 1, GROUP), (k + 1, k + GROUP, k))]
    for start, end, base in ((2, 3, 1), (3, 5, 2), (5, 8, 4), (8, 9, 4), (9, 16, 8), *later):
        if start < keys:
            yield start, min(end, keys), base


def raised(first: Any, keys: int) -> list[Any]:
    """Return the powers 0 to keys − 1 of an array of any kind. The first of them is a number."""
    powers = [1.0, first]
    for start, end, base in _products(keys):
        powers += [powers[base] * powers[k - base] for k in range(start, end)]
    return powers


def as_powers(
    slopes: Float[np.ndarray, " keys"], offsets: Float[np.ndarray, " keys"], values: Float[np.ndarray, "keys columns"]
) -> Powers | None:
    """Return the head with these numbers as powers of one exponential, or None if it has no such form."""
    keys, dtype = len(slopes), str(slopes.dtype)
    if (
        not 3 <= keys <= MOST_POWERS
        or not np.ptp(offsets) <= LARGEST_RANGE
        or np.abs(values).max(initial=0.0) > LARGEST_VALUE
    ):
        return None
    step = _common_step(slopes.astype(np.float64), UNIT_ROUNDOFF[dtype], dtype == "float32")
    if step is None:
        return None
    top, context = Decimal(float(offsets.max())), Context(prec=40)
    exact = (context.exp(context.subtract(Decimal(float(c)), top)) for c in offsets)
    coefficients = np.array([float(c) for c in exact])
    return Powers(step, LARGEST_EXPONENT / (keys - 1) / abs(step), coefficients)


def _common_step(slopes: Float[np.ndarray, " keys"], u: float, is_product_counted: bool) -> float | None:
    """Return a step such that all slopes are k·step + s, with errors of at most u|slope|, or None.

    With `is_product_counted`, such errors take the place of the rounding of products. So there must be any.
    """
    step, least = (float(slopes[-1]) - float(slopes[0])) / (len(slopes) - 1), int(np.abs(slopes).argmin())
    if step == 0 or np.abs(np.diff(slopes) - step).max() > 8 * u * np.abs(slopes).max():
        return None
    numbers = [Fraction(slope) for slope in slopes.tolist()]
    is_rounded = any(abs(a) < 1 or abs(a).numerator & (abs(a).numerator - 1) or a.denominator > 1 for a in numbers if a)
    beside = [float(slopes[k]) - float(slopes[k - 1]) for k in (least, least + 1) if 0 < k < len(slopes)]
    for tried in (step, *beside, float(np.nextafter(step, np.inf)), float(np.nextafter(step, -np.inf))):
        spacing = Fraction(tried)
        errors = [abs(a - numbers[least] - (k - least) * spacing) for k, a in enumerate(numbers)]
        are_small = all(error <= Fraction(u) * abs(a) for error, a in zip(errors, numbers, strict=True))
        if are_small and (is_rounded or not is_product_counted or not any(errors)):
            return tried
    return None
