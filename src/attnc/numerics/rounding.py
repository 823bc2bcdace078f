"""Outward rounding in float64, and the assumptions about the machine's elementary functions.

Every rule rests on IEEE 754 rounding to nearest: the rounded result of + − × ÷ √ is a neighbour of the exact one. So
the next float up (down) is an upper (lower) bound on it.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from attnc.errors import InputError
from attnc.numerics.quiet import is_quiet, quiet

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}
"""u: the largest relative error of one rounding to nearest."""
LARGEST = float(np.finfo(np.float64).max)
"""The largest float64 number."""
TINIEST = 2.0**-1074
"""The smallest positive float64 number."""
LIBM_ULPS = 8
"""Largest assumed error of an elementary function, in ulp. `attnc doctor` compares with 128 bits, the tests with 200,
and they find none larger."""
ENGINE_ULPS = {"float64": 32, "float32": 4}
"""Largest assumed error of the weights of an engine for exact scores, in ulp. `attnc doctor` measures it. Exponentials
were within 2.4 ulp in all engines, with the divisions of a softmax; numpy states 2.52 for float32. In float64, weights
may also be powers of one exponential, up to the 31st (`engines.powers` derives 31 ulp)."""
SINE_SLACK = 8 * 2.0**-52
"""Largest assumed error of sin and cos, whose values are at most 1."""
LIBM_ASSUMPTION: str = (
    "the float64 functions of numpy and scipy.special used here (exp, log, power, tan, tanh, sinh, cosh, "
    f"arctan, arcsin, arccos, erf, and logaddexp of 0 and a number) are within {LIBM_ULPS} ulp of the exact value, and "
    f"sin and cos within {LIBM_ULPS}*2^-52 of it for arguments up to 2^20"
)


def engine_assumption(dtype: str) -> str:
    """Return the assumption of the rounding term about the engine that runs the network."""
    blocks = " (but over keys 8 at a time, and 8 of these sums, and so on)" if dtype == "float32" else ""
    return (
        f"the engine computes in {dtype} with IEEE rounding, in any order of summation{blocks}, and its exponentials "
        f"are within {ENGINE_ULPS[dtype]} ulp; TF32, bfloat16 and fused fast-math kernels are outside this"
    )


def up(x: npt.ArrayLike, ulps: int = 1) -> Array:
    """Return an upper bound on the real number that was computed as x.

    For one ulp this is the next float up, which is above every real that rounds to x. For more it is a float ≥ every
    real within `ulps` units in the last place of x.
    """
    value: Array = np.asarray(x, dtype=np.float64)
    if is_quiet():
        return _up(value, ulps)
    with quiet():
        return _up(value, ulps)


def _up(value: Array, ulps: int) -> Array:
    if ulps > 1:
        # An overflowed x may stand for a value as small as the largest float less the error, hence the limits.
        # One ulp of x is ≤ 2⁻⁵²|x| + 2⁻¹⁰⁷⁴; the half ulp lost by the sums here is won back by nextafter.
        value = np.minimum(np.maximum(value, -LARGEST), LARGEST)
        value = value + (np.abs(value) * (ulps * 2.0**-52) + ulps * TINIEST)
    return np.asarray(np.nextafter(value, np.inf))


def down(x: npt.ArrayLike, ulps: int = 1) -> Array:
    """Return a lower bound on the real number that was computed as x: −up(−x)."""
    return -up(-np.asarray(x, dtype=np.float64), ulps)


@functools.lru_cache(maxsize=4096)
def gamma(n: int, u: float) -> float:
    """Return γ_n = n·u / (1 − n·u), rounded up: the relative error of n roundings in a row (Higham)."""
    product = n * Fraction(u)
    if product >= 1 or n < 0:
        raise InputError(f"cannot bound {n} roundings of relative size {u!r}: gamma(n, u) needs 0 <= n*u < 1.")
    exact = product / (1 - product)
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else float(up(nearest))


def sum_and_error(a: Array, b: Array) -> tuple[Array, Array]:
    """Return fl(a + b) and the error a + b − fl(a + b), exact if nothing overflows (Knuth's TwoSum)."""
    s = np.asarray(a + b)
    z = s - a
    error = np.asarray((a - (s - z)) + (b - z))
    return s, error


def halves(a: Array) -> tuple[Array, Array]:
    """Split a into a sum of two floats of at most 26 bits (Veltkamp)."""
    shifted = a * (2.0**27 + 1)
    high = np.asarray(shifted - (shifted - a))
    return high, np.asarray(a - high)


def product_and_error(a: Array, b: Array) -> tuple[Array, Array]:
    """Return fl(ab) and the error ab − fl(ab), exact if nothing overflows or underflows (Dekker's product)."""
    product = np.asarray(a * b)
    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def compensated_sum(*terms: Array) -> tuple[Array, Array]:
    """Return the sum as if computed in twice the precision, and Σ|e| over the errors e of its additions, both rounded.

    The error of every addition is kept, and all errors are added at the end.
    """
    total, rest, size = np.asarray(terms[0]), np.zeros(()), np.zeros(())
    for term in terms[1:]:
        total, error = sum_and_error(total, term)
        rest, size = rest + error, size + np.abs(error)
    return np.asarray(total + rest), size


def add_down(a: Array, b: Array) -> Array:
    """Return the largest float ≤ a + b, which is a + b if the sum is exact."""
    s, error = sum_and_error(a, b)
    # |error| ≤ 2⁹⁷⁰ unless an intermediate result overflowed, and then nothing is known of it.
    return np.where((error >= 0) & (error < 1e300), s, np.nextafter(s, -np.inf))


def add_up(a: Array, b: Array) -> Array:
    """Return the smallest float ≥ a + b, which is a + b if the sum is exact."""
    s, error = sum_and_error(a, b)
    return np.where((error <= 0) & (error > -1e300), s, np.nextafter(s, np.inf))


def is_short(x: Array) -> Mask:
    """Whether x fits in float32. The float64 product of two such numbers is exact (48 bits, 2⁻²⁹⁸ to 2²⁵⁶)."""
    return np.asarray(x == x.astype(np.float32))


def square_down(x: Array) -> Array:
    """Return a lower bound on x² for x ≥ 0, exact for short x."""
    s = x * x
    return np.where(is_short(x), s, np.maximum(np.nextafter(s, -np.inf), 0.0))


def square_up(x: Array) -> Array:
    """Return an upper bound on x² for x ≥ 0, exact for short x."""
    s = x * x
    return np.where(is_short(x), s, np.nextafter(s, np.inf))
