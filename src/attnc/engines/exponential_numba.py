"""An exponential for compiled loops, which LLVM vectorises. This module imports numba.

With n = round(x/ln 2) and r = x − n ln 2, |r| ≤ (ln 2)/2, e^x = 2^n·e^r. The product n·ln 2 is taken from x in two
parts. The first has few bits, so that it is exact. The polynomial 1 + r + r²·q(r) interpolates e^r in Chebyshev nodes:
its relative error is 1.7e-17 with degree 11 in float64, and 1.0e-8 with degree 6 in float32. n is added to the bits of
the exponent, so that results must be normal numbers. The tests compare with exact values, in float32 at every number:
errors are below 1.2 ulp. Certificates allow ENGINE_ULPS.

`power_of_two` is for powers of one exponential. With n = round(ρx), it is 2^n·2^r, where r = ρx − n is rounded once,
or twice in float32, where ρ is a sum of two numbers. 2^r = 1 + r·q(r) has a relative error of 8.5e-18 in float64 and
5.1e-9 in float32 besides rounding. `powers.EXPONENTIAL_ERROR` is a bound for both.

`rough_power_of_two` has one number for ρ, and in float32 a polynomial of degree 5 with a relative error of 9.4e-8. So
its exponent is off by 2^−24·|ρx| or twice that, and its result by ROUGH_POWER_ERROR unit roundoffs besides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba.extending import intrinsic, overload  # type: ignore[import-not-found, import-untyped, unused-ignore]

from attnc.engines.powers import POWER_OF_TWO

CONTRACT = {"contract"}
"""A product and a sum may be fused, which drops a rounding. Nothing may be rearranged: that would spoil r."""


def _rounder(bits: int) -> float:
    """Return 1.5·2^(bits − 1). A number of small size that is added to it is rounded to a whole number."""
    return 1.5 * 2.0 ** (bits - 1)


INVERSE_64, HIGH_64, LOW_64 = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
ROUNDER_64 = _rounder(53)
(Q0, Q1, Q2, Q3, Q4, Q5, Q6, Q7, Q8, Q9) = (
    *(0.5, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062, 0.0013888888917213717),
    *(0.00019841269863053618, 2.4801521295954376e-05, 2.7557268459997064e-06, 2.7620088445409746e-07),
    2.510038549551032e-08,
)
"""The coefficients of q in float64."""

INVERSE_32, HIGH_32, LOW_32 = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER_32, ONE_32 = np.float32(_rounder(24)), np.float32(1)
(P0, P1, P2, P3, P4) = (
    *(np.float32(0.5), np.float32(0.16666576989698775), np.float32(0.041666554617204574)),
    *(np.float32(0.008363179052722578), np.float32(0.0013926183587713494)),
)
"""The coefficients of q in float32."""


(A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10) = POWER_OF_TWO
(B0, B1, B2, B3, B4, B5) = (
    *(np.float32(0.6931471880262288), np.float32(0.24022650760568126), np.float32(0.05550357114219078)),
    *(np.float32(0.009618082557277852), np.float32(0.0013390863364671234), np.float32(0.0001545316294512069)),
)
"""The coefficients of (2^r − 1)/r in float32."""
(R0, R1, R2, R3, R4) = (
    *(np.float32(0.6931470036506653), np.float32(0.24022246897220612), np.float32(0.0555071085691452)),
    *(np.float32(0.009671292267739773), np.float32(0.0013269525952637196)),
)
"""Fewer coefficients of (2^r − 1)/r in float32, such that the largest relative error of 1 + r·(…) is least."""


def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c, rounded once on every machine."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return (a(a, a, a), made) if a == b == c else None


fma: Any = intrinsic(_fma)


def _borrowed(context: Any, array: Any) -> Any:
    """Return the same array without its counter of references. The caller keeps the array for as long as it is used.

    Each view of an array moves that counter, and such a step waits for all stores before it: 4 ns and more.
    """

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(array)(context, builder, value=arguments[0])
        view.meminfo = view.meminfo.type(None)
        view.parent = view.parent.type(None)
        return view._getvalue()

    return array(array), made


borrowed: Any = intrinsic(_borrowed)


def exponential(x: Any) -> Any:
    """Return e^x in the dtype of x. Both must be normal numbers."""
    raise NotImplementedError("this is for compiled code only")


@overload(exponential, jit_options={"error_model": "numpy", "fastmath": CONTRACT}, inline="never")  # type: ignore[untyped-decorator, unused-ignore]
def _exponential(x: Any) -> Any:
    def of_float64(x: Any) -> Any:
        shifted = x * INVERSE_64 + ROUNDER_64
        n = shifted - ROUNDER_64
        r = (x - n * HIGH_64) - n * LOW_64
        q = ((((Q9 * r + Q8) * r + Q7) * r + Q6) * r + Q5) * r + Q4
        p = ((((q * r + Q3) * r + Q2) * r + Q1) * r + Q0) * (r * r) + r + 1.0
        bits = np.float64(p).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)
        return np.int64(bits).view(np.float64)

    def of_float32(x: Any) -> Any:
        shifted = x * INVERSE_32 + ROUNDER_32
        n = shifted - ROUNDER_32
        r = (x - n * HIGH_32) - n * LOW_32
        p = ((((P4 * r + P3) * r + P2) * r + P1) * r + P0) * (r * r) + r + ONE_32
        bits = np.int32(np.float32(p).view(np.int32) + np.int32(np.float32(shifted).view(np.int32) << np.int32(23)))
        return np.int32(bits).view(np.float32)

    return of_float32 if x == types.float32 else of_float64


def power_of_two(x: Any, rate: Any, low: Any) -> Any:
    """Return 2^(rate·x), or 2^((rate + low)·x) in float32. The result must be a normal number."""
    raise NotImplementedError("this is for compiled code only")


@overload(power_of_two, jit_options={"error_model": "numpy"}, inline="never")  # type: ignore[untyped-decorator, unused-ignore]
def _power_of_two(x: Any, rate: Any, low: Any) -> Any:
    def of_float64(x: Any, rate: Any, low: Any) -> Any:
        shifted = fma(x, rate, ROUNDER_64)
        r = fma(x, rate, ROUNDER_64 - shifted)
        q = fma(fma(fma(fma(fma(A10, r, A9), r, A8), r, A7), r, A6), r, A5)
        p = fma(fma(fma(fma(fma(fma(q, r, A4), r, A3), r, A2), r, A1), r, A0), r, 1.0)
        bits = np.float64(p).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)
        return np.int64(bits).view(np.float64)

    def of_float32(x: Any, rate: Any, low: Any) -> Any:
        shifted = fma(x, rate, ROUNDER_32)
        r = fma(x, low, fma(x, rate, ROUNDER_32 - shifted))
        p = fma(fma(fma(fma(fma(fma(B5, r, B4), r, B3), r, B2), r, B1), r, B0), r, ONE_32)
        bits = np.int32(np.float32(p).view(np.int32) + np.int32(np.float32(shifted).view(np.int32) << np.int32(23)))
        return np.int32(bits).view(np.float32)

    return of_float32 if x == types.float32 else of_float64


def rough_power_of_two(x: Any, rate: Any) -> Any:
    """Return 2^(rate·x) with a few rounding errors more than `power_of_two`. The result must be a normal number."""
    raise NotImplementedError("this is for compiled code only")


@overload(rough_power_of_two, jit_options={"error_model": "numpy", "fastmath": CONTRACT}, inline="never")  # type: ignore[untyped-decorator, unused-ignore]
def _rough_power_of_two(x: Any, rate: Any) -> Any:
    def of_float64(x: Any, rate: Any) -> Any:
        shifted = x * rate + ROUNDER_64
        r = x * rate - (shifted - ROUNDER_64)
        q = ((((A10 * r + A9) * r + A8) * r + A7) * r + A6) * r + A5
        p = (((((q * r + A4) * r + A3) * r + A2) * r + A1) * r + A0) * r + 1.0
        bits = np.float64(p).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)
        return np.int64(bits).view(np.float64)

    def of_float32(x: Any, rate: Any) -> Any:
        shifted = x * rate + ROUNDER_32
        r = x * rate - (shifted - ROUNDER_32)
        p = ((((R4 * r + R3) * r + R2) * r + R1) * r + R0) * r + ONE_32
        bits = np.int32(np.float32(p).view(np.int32) + np.int32(np.float32(shifted).view(np.int32) << np.int32(23)))
        return np.int32(bits).view(np.float32)

    return of_float32 if x == types.float32 else of_float64


def kept(function: Any, fastmath: bool | set[str] = False) -> Any:
    """Compile a function. Keep the result on disk if there is a writable folder for it."""
    try:
        return njit(function, nogil=True, error_model="numpy", fastmath=fastmath, cache=True)
    except RuntimeError:  # neither this folder nor the user's cache can be written to
        return inlined(function, fastmath)


def inlined(function: Any, fastmath: bool | set[str] = False, inline: Any = "never") -> Any:
    """Compile a function that compiled functions call. LLVM inlines it, or numba before that with `inline="always"`."""
    return njit(function, nogil=True, error_model="numpy", fastmath=fastmath, inline=inline)


def _each(x: Any, found: Any) -> None:
    for i in range(len(x)):
        found[i] = exponential(x[i])


exponentials = kept(_each, CONTRACT)
"""Sets found[i] to e^x[i]: for tests and `attnc doctor`."""


def _each_power(x: Any, rate: Any, low: Any, found: Any) -> None:
    for i in range(len(x)):
        found[i] = power_of_two(x[i], rate, low)


powers_of_two = kept(_each_power)
"""Sets found[i] to `power_of_two`(x[i], rate, low): for tests and `attnc doctor`."""
