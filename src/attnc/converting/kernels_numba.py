"""Compiled loops for activations by attention, forwards and backwards. This module imports numba.

Every loop computes y of flat arrays of equal length, which do not overlap. `c` holds the numbers of an `Evaluation`, in
the dtype of the arrays: all constants are read from it, because a literal would be float64. A worker takes addresses
of arrays, so that threads of any pool can call it.
"""

from __future__ import annotations

import functools
import re
from types import FunctionType
from typing import Any

import numba  # type: ignore[import-not-found, import-untyped, unused-ignore]
import numpy as np
from llvmlite import binding as llvm  # type: ignore[import-not-found, import-untyped, unused-ignore]
from llvmlite import ir  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba import types  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba.core.cgutils import alloca_once, raw_memcpy  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba.core.codegen import get_host_cpu_features  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba.extending import intrinsic, overload  # type: ignore[import-not-found, import-untyped, unused-ignore]

from attnc.converting.compiled_loops import ENTRY
from attnc.converting.shared_library import NotLinked, linked
from attnc.engines.exponential_numba import CONTRACT, exponential, inlined, rough_power_of_two

carray: Any = numba.carray  # type: ignore[attr-defined, unused-ignore]
cfunc: Any = numba.cfunc
compiled_call: Any = intrinsic
ARGUMENTS = ("x", "y", "grad", "count", "numbers", "num_numbers", "num_keys", "threads", "thread_number")
"""The entries of the array of int64 that a worker takes. The first three and `numbers` are addresses, and
`thread_number` is the address of a C function without arguments that returns the number of the calling thread."""
CHUNK = 256
"""Number of elements whose powers or scores are computed at once: they stay in the first cache."""
LINE_SPAN, LINE_BLOCK = 1024, 64
"""Numbers of elements that are computed as lines at once. A span with an element close to a kink is computed again in
blocks, and such a block takes exponentials. With β = 2.6e5 and normal x these are one span in 4 and one block in 50.
Curves take exponentials for the whole span."""
GRAIN = 4096
"""Number of elements at whose multiples threads part."""


def _room(size: int) -> Any:
    """Return a function of an array. It returns a pointer to `size` numbers of the same dtype on the stack.

    Memory of numpy arrays would come with counters of references and errors, and so with calls into Python.
    """

    def room(context: Any, like: Any) -> Any:
        pointer_to: Any = types.CPointer

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return alloca_once(builder, context.get_data_type(like.dtype), size=size)  # type: ignore[no-untyped-call, unused-ignore]

        return pointer_to(like.dtype)(like), code

    return compiled_call(room)


_chunk, _span_of_lines = _room(CHUNK), _room(LINE_SPAN)
_rows_of_chunks, _rows_of_blocks = _room(9 * CHUNK), _room(9 * LINE_BLOCK)


# --- one exponential --------------------------------------------------------------------------------------------------


def _power(size: Any, limit: Any, zero: Any) -> Any:
    """Return e^{−size}, and 0 beyond the limit."""
    found = exponential(-size)  # beyond the limit this is no number, and not used
    return zero if size > limit else found


def _bounded_power(t: Any, rate: Any, end: Any) -> Any:
    """Return E = 2^{rate·t} for t up to `end`, and 2^{rate·end} beyond."""
    return rough_power_of_two(t if t < end else end, rate)


def bits(x: Any) -> Any:
    """Return the bits of a number ≥ 0 as an integer. Larger numbers have larger ones, and NaN the largest."""
    raise NotImplementedError("this is for compiled code only")


@overload(bits, inline="never")  # type: ignore[untyped-decorator, unused-ignore]
def _bits(x: Any) -> Any:
    def of_float32(x: Any) -> Any:
        return np.float32(x).view(np.int32)

    def of_float64(x: Any) -> Any:
        return np.float64(x).view(np.int64)

    return of_float32 if x == types.float32 else of_float64


_power, _bounded_power = inlined(_power, CONTRACT), inlined(_bounded_power, CONTRACT)


def bits_before(x: Any) -> Any:
    """Return the bits of a number ≥ 0 minus 1, without sign: 0 has the largest."""
    raise NotImplementedError("this is for compiled code only")


@overload(bits_before, inline="never")  # type: ignore[untyped-decorator, unused-ignore]
def _bits_before(x: Any) -> Any:
    def of_float32(x: Any) -> Any:
        return np.uint32(np.float32(x).view(np.uint32) - np.uint32(1))

    def of_float64(x: Any) -> Any:
        return np.uint64(np.float64(x).view(np.uint64) - np.uint64(1))

    return of_float32 if x == types.float32 else of_float64


def _finished(x: Any, u: Any, rest: Any, zero: Any) -> Any:
    """Return u·x + rest. A line of slope 0 is 0 for infinite x, and NaN stays NaN."""
    y = u * x + rest if u != zero else rest
    return y if x == x else x


def _set_limits(x: Any, y: Any, most: Any, zero: Any, va: Any, ua: Any, vb: Any, ub: Any) -> None:
    """Set y to the line of the key that wins where |x| > most, and to NaN where x is NaN."""
    for i in range(len(x)):
        if not (abs(x[i]) <= most):
            left = x[i] < zero
            y[i] = _finished(x[i], ua if left else ub, va if left else vb, zero)


def _set_slope_limits(x: Any, y: Any, grad: Any, most: Any, zero: Any, ua: Any, ub: Any) -> None:
    for i in range(len(x)):
        if not (abs(x[i]) <= most):
            y[i] = grad[i] * ((ua if x[i] < zero else ub) if x[i] == x[i] else x[i])


_finished = inlined(_finished, CONTRACT)
_set_limits = inlined(_set_limits, CONTRACT)
_set_slope_limits = inlined(_set_slope_limits, CONTRACT)


def two(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """A ramp of two keys: y = u·x + v − |x|·J·σ, with σ = E/(1 + E)."""
    zero, one, end, most, rate, value, first, last, J = c[0], c[1], c[2], c[3], c[4], c[6], c[7], c[8], c[9]
    largest = bits(zero)
    for i in range(len(y)):
        t = abs(x[i])
        largest = max(largest, bits(t))
        E = _bounded_power(t, rate, end)
        u = first if x[i] < zero else last
        y[i] = u * x[i] + (value - t * (J * (E / (one + E))))
    if largest > bits(most):
        _set_limits(x, y, most, zero, value, first, value, last)


def two_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """With s = σ and t = |x|, (tJs)′ = J(s − δt·s(1 − s))."""
    zero, one, end, most, rate, step, first, last, J = c[0], c[1], c[2], c[3], c[4], c[5], c[7], c[8], c[9]
    largest = bits(zero)
    for i in range(len(y)):
        t = abs(x[i])
        largest = max(largest, bits(t))
        E = _bounded_power(t, rate, end)
        s = E / (one + E)
        B = J * (s - step * t * (s - s * s))
        slope = first + B if x[i] < zero else last - B
        y[i] = grad[i] * slope
    if largest > bits(most):
        _set_slope_limits(x, y, grad, most, zero, first, last)


def _sigma(x: Any, sigma: Any, c: Any) -> Any:
    """Set sigma to E/(1 + E), and return the bits of the largest |x|.

    This is a loop of its own because a processor overlaps the elements of two short loops better than those of one.
    """
    one, end, rate = c[1], c[2], c[4]
    largest = bits(c[0])
    for i in range(len(x)):
        t = abs(x[i])
        largest = max(largest, bits(t))
        E = _bounded_power(t, rate, end)
        sigma[i] = E / (one + E)
    return largest


_sigma = inlined(_sigma, CONTRACT, "always")  # a fifth faster than if LLVM inlines it


def ramp(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """y = u·x + v − |x|·B, with B = Jσ + (1 − 2σ)A(q)/P(q)."""
    zero, one, most, value, first, last, J = c[0], c[1], c[3], c[6], c[7], c[8], c[9]
    P1, P2, P3, P4, A1, A2, A3, A4 = c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17]
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here = x[start:stop], y[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            t = abs(x_here[i])
            q = s - s * s
            P = (((P4 * q + P3) * q + P2) * q + P1) * q + one
            A = (((A4 * q + A3) * q + A2) * q + A1) * q
            B = J * s + (one - (s + s)) * A / P
            u = first if x_here[i] < zero else last
            y_here[i] = u * x_here[i] + (value - t * B)
    if largest > bits(most):
        _set_limits(x, y, most, zero, value, first, value, last)


def _symmetric_slope(s: Any, q: Any, J: Any, A: Any, A_slope: Any, P: Any, P_slope: Any, one: Any) -> Any:
    """Return B and −dB/d(δt): with F = A/P and c = 1 − 2s, they are Js + cF and q(J − 2F + c²F′)."""
    inverse = one / P
    F = A * inverse
    c = one - (s + s)
    return J * s + c * F, q * (J - (F + F) + c * c * ((A_slope - F * P_slope) * inverse))


_symmetric_slope = inlined(_symmetric_slope, CONTRACT)


def ramp_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """(tB)′ = B + t·B′, with t = |x|."""
    zero, one, most, step, first, last, J = c[0], c[1], c[3], c[5], c[7], c[8], c[9]
    P1, P2, P3, P4, A1, A2, A3, A4 = c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17]
    two, three, four = one + one, one + one + one, one + one + one + one
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here, grad_here = x[start:stop], y[start:stop], grad[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            t = abs(x_here[i])
            q = s - s * s
            P = (((P4 * q + P3) * q + P2) * q + P1) * q + one
            A = (((A4 * q + A3) * q + A2) * q + A1) * q
            P_slope = ((four * P4 * q + three * P3) * q + two * P2) * q + P1
            A_slope = ((four * A4 * q + three * A3) * q + two * A2) * q + A1
            B, fall = _symmetric_slope(s, q, J, A, A_slope, P, P_slope, one)
            B = B - step * t * fall
            slope = first + B if x_here[i] < zero else last - B
            y_here[i] = grad_here[i] * slope
    if largest > bits(most):
        _set_slope_limits(x, y, grad, most, zero, first, last)


def odd(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """y = v ± B, with the same values on both sides up to the sign."""
    zero, one, most, first, last, J = c[0], c[1], c[3], c[7], c[8], c[9]
    P1, P2, P3, P4, A1, A2, A3, A4 = c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17]
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here = x[start:stop], y[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            q = s - s * s
            P = (((P4 * q + P3) * q + P2) * q + P1) * q + one
            A = (((A4 * q + A3) * q + A2) * q + A1) * q
            B = J * s + (one - (s + s)) * A / P
            y_here[i] = first + B if x_here[i] < zero else last - B
    if largest > bits(most):
        _set_limits(x, y, most, zero, first, zero, last, zero)


def odd_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    zero, one, most, step, J = c[0], c[1], c[3], c[5], c[9]
    P1, P2, P3, P4, A1, A2, A3, A4 = c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17]
    two, three, four = one + one, one + one + one, one + one + one + one
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here, grad_here = x[start:stop], y[start:stop], grad[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            q = s - s * s
            P = (((P4 * q + P3) * q + P2) * q + P1) * q + one
            A = (((A4 * q + A3) * q + A2) * q + A1) * q
            P_slope = ((four * P4 * q + three * P3) * q + two * P2) * q + P1
            A_slope = ((four * A4 * q + three * A3) * q + two * A2) * q + A1
            _, fall = _symmetric_slope(s, q, J, A, A_slope, P, P_slope, one)
            y_here[i] = grad_here[i] * (step * fall)
    if largest > bits(most):
        _set_slope_limits(x, y, grad, most, zero, zero, zero)


def ramp_values(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """y = u·x + v + W, with W = (V(q) − |x|(1 − 2σ)A(q))/P(q) − |x|·Jσ."""
    zero, one, most, value, first, last, J = c[0], c[1], c[3], c[6], c[7], c[8], c[9]
    P1, P2, A1, A2, V1, V2 = c[10], c[11], c[12], c[13], c[14], c[15]
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here = x[start:stop], y[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            t = abs(x_here[i])
            q = s - s * s
            P = (P2 * q + P1) * q + one
            A = (A2 * q + A1) * q
            V = (V2 * q + V1) * q
            u = first if x_here[i] < zero else last
            y_here[i] = u * x_here[i] + (value + ((V - t * ((one - (s + s)) * A)) / P - t * (J * s)))
    if largest > bits(most):
        _set_limits(x, y, most, zero, value, first, value, last)


def ramp_values_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """With m = 1 − 2s, N = V − tmA and R = N/P, W = R − tJs. By s′ = −δq, q′ = −δqm and m′ = 2δq, N′ is
    −mA − δq(mV′ + t(2A − m²A′)), P′ is −δqmP′(q), and so −W′ = Js + (mA + δq(m(V′ − RP′) + tK))/P, with
    K = 2A − m²A′ − JP, a polynomial in q."""
    zero, one, most, step, first, last, J = c[0], c[1], c[3], c[5], c[7], c[8], c[9]
    P1, P2, A1, A2, V1, V2, K0, K1, K2 = c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17], c[18]
    P2_twice, V2_twice = P2 + P2, V2 + V2
    largest, sigma = bits(zero), carray(_chunk(c), (CHUNK,))
    for start in range(0, len(y), CHUNK):
        stop = start + CHUNK
        x_here, y_here, grad_here = x[start:stop], y[start:stop], grad[start:stop]
        largest = max(largest, _sigma(x_here, sigma, c))
        for i in range(len(x_here)):
            s = sigma[i]
            t = abs(x_here[i])
            q = s - s * s
            inverse = one / ((P2 * q + P1) * q + one)
            m = one - (s + s)
            mA = m * ((A2 * q + A1) * q)
            R = ((V2 * q + V1) * q - t * mA) * inverse
            rise = m * ((V2_twice * q + V1) - R * (P2_twice * q + P1)) + t * ((K2 * q + K1) * q + K0)
            fall = J * s + (mA + step * q * rise) * inverse
            slope = first + fall if x_here[i] < zero else last - fall
            y_here[i] = grad_here[i] * slope
    if largest > bits(most):
        _set_slope_limits(x, y, grad, most, zero, first, last)


def sided(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """y = u·x + v + (P(E) + x·Q(E))/D(E), with coefficients of either side."""
    zero, one, end, most, rate = c[0], c[1], c[2], c[3], c[4]
    va, ua, D1a, D2a, P1a, P2a, Q1a, Q2a = c[6], c[7], c[8], c[9], c[10], c[11], c[12], c[13]
    vb, ub, D1b, D2b, P1b, P2b, Q1b, Q2b = c[14], c[15], c[16], c[17], c[18], c[19], c[20], c[21]
    largest = bits(zero)
    for i in range(len(y)):
        left = x[i] < zero
        t = abs(x[i])
        largest = max(largest, bits(t))
        E = _bounded_power(t, rate, end)
        D = ((D2a if left else D2b) * E + (D1a if left else D1b)) * E + one
        P = ((P2a if left else P2b) * E + (P1a if left else P1b)) * E
        Q = ((Q2a if left else Q2b) * E + (Q1a if left else Q1b)) * E
        y[i] = (ua if left else ub) * x[i] + ((va if left else vb) + (P + x[i] * Q) / D)
    if largest > bits(most):
        _set_limits(x, y, most, zero, va, ua, vb, ub)


def sided_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """With R = (P + xQ)/D, dR/dx = (Q ± δE(P′ + xQ′ − R·D′))/D, + for x < 0."""
    zero, one, end, most, rate, step = c[0], c[1], c[2], c[3], c[4], c[5]
    ua, D1a, D2a, P1a, P2a, Q1a, Q2a = c[7], c[8], c[9], c[10], c[11], c[12], c[13]
    ub, D1b, D2b, P1b, P2b, Q1b, Q2b = c[15], c[16], c[17], c[18], c[19], c[20], c[21]
    largest = bits(zero)
    for i in range(len(y)):
        left = x[i] < zero
        t = abs(x[i])
        largest = max(largest, bits(t))
        E = _bounded_power(t, rate, end)
        D1, D2 = D1a if left else D1b, D2a if left else D2b
        P1, P2 = P1a if left else P1b, P2a if left else P2b
        Q1, Q2 = Q1a if left else Q1b, Q2a if left else Q2b
        inverse = one / ((D2 * E + D1) * E + one)
        R = ((P2 * E + P1) + x[i] * (Q2 * E + Q1)) * E * inverse
        inner = step * E * ((P2 + P2) * E + P1 + x[i] * ((Q2 + Q2) * E + Q1) - R * ((D2 + D2) * E + D1))
        found = ((Q2 * E + Q1) * E + (inner if left else -inner)) * inverse
        slope = (ua if left else ub) + found
        y[i] = grad[i] * slope
    if largest > bits(most):
        _set_slope_limits(x, y, grad, most, zero, ua, ub)


def saved_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """K(y − v₀)(v₁ − y), where x holds the output of two keys with constant values."""
    K, v0, v1 = c[0], c[1], c[2]
    for i in range(len(y)):
        y[i] = grad[i] * (K * ((x[i] - v0) * (v1 - x[i])))


# --- one exponential for each key -------------------------------------------------------------------------------------


def _bounded(x: Any, q: Any, reach: Any) -> None:
    """Set q to x kept within ±reach, where one key has all the weight and no score overflows. NaN becomes −reach."""
    for i in range(len(x)):
        x_i = x[i] if x[i] > -reach else -reach
        q[i] = x_i if x_i < reach else reach


def _affine(q: Any, factor: Any, constant: Any, row: Any) -> None:
    for i in range(len(q)):
        row[i] = factor * q[i] + constant


def _raise_top(q: Any, slope: Any, offset: Any, top: Any) -> None:
    for i in range(len(q)):
        score = slope * q[i] + offset
        top[i] = score if score > top[i] else top[i]


def _value_of_top(q: Any, top: Any, slope: Any, offset: Any, carried: Any, constant: Any, value: Any) -> None:
    """Set value to that of this key where its score is the largest."""
    for i in range(len(q)):
        value[i] = carried * q[i] + constant if slope * q[i] + offset == top[i] else value[i]


def _weight(q: Any, top: Any, slope: Any, offset: Any, limit: Any, zero: Any, weight: Any) -> None:
    for i in range(len(q)):
        weight[i] = _power(top[i] - (slope * q[i] + offset), limit, zero)


def _add_scaled(row: Any, factor: Any, weight: Any) -> None:
    for i in range(len(row)):
        row[i] += factor * weight[i]


def _add_moved(row: Any, weight: Any, factor: Any, carried: Any, constant: Any, q: Any, value: Any) -> None:
    """Add weight·factor·(y_k − y_top)."""
    for i in range(len(row)):
        row[i] += weight[i] * (factor * ((carried * q[i] + constant) - value[i]))


_bounded = inlined(_bounded, CONTRACT)
_affine = inlined(_affine, CONTRACT)
_raise_top = inlined(_raise_top, CONTRACT)
_value_of_top = inlined(_value_of_top, CONTRACT)
_weight = inlined(_weight, CONTRACT)
_add_scaled = inlined(_add_scaled, CONTRACT)
_add_moved = inlined(_add_moved, CONTRACT)


def _attend(x: Any, y: Any, c: Any, key: Any, p: Any, s: Any) -> None:
    """Compute a block of elements. c[4] tells whether y is x times the head."""
    zero, one, limit, most, is_product, n = c[0], c[1], c[2], c[3], c[4] != c[0], len(x)
    q, top, weight, total, constant, carried = s[0, :n], s[1, :n], s[2, :n], s[3, :n], s[4, :n], s[5, :n]
    _bounded(x, q, np.sqrt(most))
    _affine(q, key[0], key[p], top)
    for k in range(1, p):
        _raise_top(q, key[k], key[p + k], top)
    total[:], constant[:], carried[:] = zero, zero, zero
    for k in range(p):
        _weight(q, top, key[k], key[p + k], limit, zero, weight)
        _add_scaled(total, one, weight)
        if key[2 * p + k] != zero:
            _add_scaled(constant, key[2 * p + k], weight)
        if key[3 * p + k] != zero:
            _add_scaled(carried, key[3 * p + k], weight)
    for i in range(n):
        found = _finished(x[i], carried[i] / total[i], constant[i] / total[i], zero)
        product = x[i] * found if found != zero else zero
        found = product if is_product else found
        y[i] = found if x[i] == x[i] else x[i]


def _attend_slope(x: Any, y: Any, grad: Any, c: Any, key: Any, p: Any, s: Any) -> None:
    """y′ = Σ w·u + Σ w·a·d − (Σ w·a)(Σ w·d), with d_k = y_k − y_top: nothing large cancels at kinks."""
    zero, one, limit, most, is_product, n = c[0], c[1], c[2], c[3], c[4] != c[0], len(x)
    q, top, weight, total, value = s[0, :n], s[1, :n], s[2, :n], s[3, :n], s[4, :n]
    carried, slopes, moved, both = s[5, :n], s[6, :n], s[7, :n], s[8, :n]
    _bounded(x, q, np.sqrt(most))
    _affine(q, key[0], key[p], top)
    for k in range(1, p):
        _raise_top(q, key[k], key[p + k], top)
    total[:], carried[:], slopes[:], moved[:], both[:], value[:] = zero, zero, zero, zero, zero, zero
    for k in range(p):
        _value_of_top(q, top, key[k], key[p + k], key[3 * p + k], key[2 * p + k], value)
    for k in range(p):
        _weight(q, top, key[k], key[p + k], limit, zero, weight)
        _add_scaled(total, one, weight)
        _add_scaled(slopes, key[k], weight)
        if key[3 * p + k] != zero:
            _add_scaled(carried, key[3 * p + k], weight)
        _add_moved(moved, weight, one, key[3 * p + k], key[2 * p + k], q, value)
        _add_moved(both, weight, key[k], key[3 * p + k], key[2 * p + k], q, value)
    for i in range(n):
        t = one / total[i]
        slope = (carried[i] + (both[i] - slopes[i] * t * moved[i])) * t
        slope = (value[i] + moved[i] * t) + q[i] * slope if is_product else slope
        y[i] = grad[i] * (slope if x[i] == x[i] else x[i])


_attend = inlined(_attend, CONTRACT)
_attend_slope = inlined(_attend_slope, CONTRACT)


def keys(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """One exponential for each key."""
    s = carray(_rows_of_chunks(c), (9, CHUNK))
    for at in range(0, len(y), CHUNK):
        _attend(x[at : at + CHUNK], y[at : at + CHUNK], c, c[5:], p, s)


def keys_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    s = carray(_rows_of_chunks(c), (9, CHUNK))
    for at in range(0, len(y), CHUNK):
        _attend_slope(
            x[at : at + CHUNK],
            y[at : at + CHUNK],
            grad[at : at + CHUNK],
            c,
            c[5:],
            p,
            s,
        )


def _on_lines(x: Any, y: Any, c: Any) -> Any:
    """Compute elements whose weights are 0 and 1. Return whether there are others: near a kink, or not finite."""
    zero, most, is_product, low, high, near, at_zero = c[0], c[3], c[4] != c[0], c[5], c[6], c[7], c[8] != c[0]
    va, ua, vm, um, vb, ub = c[9], c[10], c[11], c[12], c[13], c[14]
    closest, closest_other, largest = bits(most), bits_before(zero), bits(zero)
    if at_zero:  # one kink, at 0, where y = 0 whatever the weights are
        for i in range(len(x)):
            size = abs(x[i])
            y[i] = (ua if x[i] < zero else ub) * x[i]
            closest_other = min(closest_other, bits_before(size))
            largest = max(largest, bits(size))
    elif is_product:
        for i in range(len(x)):
            v, u = va if x[i] < low else vm, ua if x[i] < low else um
            y[i] = x[i] * ((ub if x[i] > high else u) * x[i] + (vb if x[i] > high else v))
            closest = min(closest, bits(abs(x[i] - low)), bits(abs(x[i] - high)))
            largest = max(largest, bits(abs(x[i])))
    else:
        for i in range(len(x)):
            v, u = va if x[i] < low else vm, ua if x[i] < low else um
            y[i] = (ub if x[i] > high else u) * x[i] + (vb if x[i] > high else v)
            closest = min(closest, bits(abs(x[i] - low)), bits(abs(x[i] - high)))
            largest = max(largest, bits(abs(x[i])))
    return (closest_other < bits_before(near)) | (closest < bits(near)) | (largest > bits(most))


def _on_lines_slope(x: Any, y: Any, grad: Any, c: Any) -> Any:
    most, is_product, low, high, near = c[3], c[4] != c[0], c[5], c[6], c[7]
    va, ua, vm, um, vb, ub = c[9], c[10], c[11], c[12], c[13], c[14]
    closest, largest = bits(most), bits(c[0])
    if is_product:
        for i in range(len(x)):
            v, u = va if x[i] < low else vm, ua if x[i] < low else um
            v, u = vb if x[i] > high else v, ub if x[i] > high else u
            y[i] = grad[i] * ((u + u) * x[i] + v)
            closest = min(closest, bits(abs(x[i] - low)), bits(abs(x[i] - high)))
            largest = max(largest, bits(abs(x[i])))
    elif low == high:
        for i in range(len(x)):
            t = bits(abs(x[i] - low))
            y[i] = grad[i] * (ua if x[i] < low else ub)
            closest, largest = min(closest, t), max(largest, t)
    else:
        for i in range(len(x)):
            u = ua if x[i] < low else um
            y[i] = grad[i] * (ub if x[i] > high else u)
            closest = min(closest, bits(abs(x[i] - low)), bits(abs(x[i] - high)))
            largest = max(largest, bits(abs(x[i])))
    return (closest < bits(near)) | (largest > bits(most))


_on_lines = inlined(_on_lines, CONTRACT)
_on_lines_slope = inlined(_on_lines_slope, CONTRACT)


def _at_kink(x: Any, y: Any, c: Any) -> None:
    """Two lines that meet at 0: y = u·x − |x|·J·E/(1 + E), and a weight of 0 beyond the largest exponent."""
    zero, one, limit, most, ua, ub, beta = c[0], c[1], c[2], c[3], c[10], c[14], c[16] - c[15]
    for i in range(len(x)):
        t = abs(x[i])
        E = _power(beta * t, limit, zero)
        y[i] = (ua if x[i] < zero else ub) * x[i] - t * ((ub - ua) * (E / (one + E)))
    _set_limits(x, y, most, zero, zero, ua, zero, ub)


def _at_kink_slope(x: Any, y: Any, grad: Any, c: Any) -> None:
    zero, one, limit, most, ua, ub, beta = c[0], c[1], c[2], c[3], c[10], c[14], c[16] - c[15]
    for i in range(len(x)):
        size = beta * abs(x[i])
        E = _power(size, limit, zero)
        s = E / (one + E)
        B = (ub - ua) * (s - (size if size < limit else limit) * (s - s * s))
        y[i] = grad[i] * (ua + B if x[i] < zero else ub - B)
    _set_slope_limits(x, y, grad, most, zero, ua, ub)


_at_kink, _at_kink_slope = inlined(_at_kink, CONTRACT), inlined(_at_kink_slope, CONTRACT)


def lines(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """The line of one key. Small blocks with other elements take exponentials."""
    s = carray(_rows_of_blocks(c), (9, LINE_BLOCK))
    at_zero = c[8] != c[0]
    for start in range(0, len(y), LINE_SPAN):
        x_span, y_span = x[start : start + LINE_SPAN], y[start : start + LINE_SPAN]
        if _on_lines(x_span, y_span, c):
            for at in range(0, len(y_span), LINE_BLOCK):
                x_here, y_here = x_span[at : at + LINE_BLOCK], y_span[at : at + LINE_BLOCK]
                if _on_lines(x_here, y_here, c):
                    if at_zero:
                        _at_kink(x_here, y_here, c)
                    else:
                        _attend(x_here, y_here, c, c[15:], p, s)


@compiled_call  # type: ignore[untyped-decorator, unused-ignore]
def _copy_bytes(context: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy bytes from one address to another. numba's own copy of a slice takes three times as long."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, count = args
        pointer = ir.IntType(8).as_pointer()
        raw_memcpy(builder, builder.inttoptr(to, pointer), builder.inttoptr(source, pointer), count, 1)  # type: ignore[no-untyped-call, unused-ignore]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


def _is_near_kink(x: Any, c: Any) -> Any:
    """Whether an element takes exponentials, or is not finite."""
    zero, most, low, high, near, at_zero = c[0], c[3], c[5], c[6], c[7], c[8] != c[0]
    closest, closest_other, largest = bits(most), bits_before(zero), bits(zero)
    if at_zero:
        for i in range(len(x)):
            size = abs(x[i])
            closest_other, largest = min(closest_other, bits_before(size)), max(largest, bits(size))
    else:
        for i in range(len(x)):
            closest = min(closest, bits(abs(x[i] - low)), bits(abs(x[i] - high)))
            largest = max(largest, bits(abs(x[i])))
    return (closest_other < bits_before(near)) | (closest < bits(near)) | (largest > bits(most))


def _replace_by_lines(y: Any, c: Any) -> None:
    """Set y to the line of the key that wins at y."""
    zero, is_product, low, high, at_zero = c[0], c[4] != c[0], c[5], c[6], c[8] != c[0]
    va, ua, vm, um, vb, ub = c[9], c[10], c[11], c[12], c[13], c[14]
    if at_zero:
        for i in range(len(y)):
            y[i] = (ua if y[i] < zero else ub) * y[i]
    elif is_product:
        for i in range(len(y)):
            v, u = va if y[i] < low else vm, ua if y[i] < low else um
            y[i] = y[i] * ((ub if y[i] > high else u) * y[i] + (vb if y[i] > high else v))
    else:
        for i in range(len(y)):
            v, u = va if y[i] < low else vm, ua if y[i] < low else um
            y[i] = (ub if y[i] > high else u) * y[i] + (vb if y[i] > high else v)


_is_near_kink, _replace_by_lines = inlined(_is_near_kink, CONTRACT), inlined(_replace_by_lines, CONTRACT)


def lines_in_place(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """`lines` where x is y. Only blocks with an element near a kink are copied."""
    at_zero, size = c[8] != c[0], np.int64(y.itemsize)
    copy, s = carray(_chunk(c), (CHUNK,)), carray(_rows_of_blocks(c), (9, LINE_BLOCK))
    for start in range(0, len(y), LINE_SPAN):
        span = y[start : start + LINE_SPAN]
        if not _is_near_kink(span, c):
            _replace_by_lines(span, c)
            continue
        for at in range(0, len(span), LINE_BLOCK):
            here = span[at : at + LINE_BLOCK]
            if not _is_near_kink(here, c):
                _replace_by_lines(here, c)
                continue
            _copy_bytes(np.int64(copy.ctypes.data), np.int64(here.ctypes.data), len(here) * size)
            if at_zero:
                _at_kink(copy[: len(here)], here, c)
            else:
                _attend(copy[: len(here)], here, c, c[15:], p, s)


def lines_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    s = carray(_rows_of_blocks(c), (9, LINE_BLOCK))
    at_zero = c[8] != c[0]
    for start in range(0, len(y), LINE_SPAN):
        end = start + LINE_SPAN
        x_span, y_span, grad_span = x[start:end], y[start:end], grad[start:end]
        if _on_lines_slope(x_span, y_span, grad_span, c):
            for at in range(0, len(y_span), LINE_BLOCK):
                x_here, y_here = x_span[at : at + LINE_BLOCK], y_span[at : at + LINE_BLOCK]
                grad_here = grad_span[at : at + LINE_BLOCK]
                if _on_lines_slope(x_here, y_here, grad_here, c):
                    if at_zero:
                        _at_kink_slope(x_here, y_here, grad_here, c)
                    else:
                        _attend_slope(x_here, y_here, grad_here, c, c[15:], p, s)


# --- a curve to the left of 0, and a line to the right ----------------------------------------------------------------


def _curve(E: Any, one: Any, v0: Any, c: Any) -> Any:
    """Return N = Σ v_k·C_k·E^k and D = Σ C_k·E^k."""
    D = ((((((c[18] * E + c[17]) * E + c[16]) * E + c[15]) * E + c[14]) * E + c[13]) * E + c[12]) * E + one
    N = ((((((c[25] * E + c[24]) * E + c[23]) * E + c[22]) * E + c[21]) * E + c[20]) * E + c[19]) * E + v0
    return N, D


def _curve_slopes(E: Any, C1: Any, C2: Any, C3: Any, C4: Any, C5: Any, C6: Any, C7: Any, one: Any) -> Any:
    """Return the derivative of C1·E + … + C7·E⁷."""
    two = one + one
    three, four = two + one, two + two
    five, six, seven = four + one, four + two, four + three
    high = ((seven * C7 * E + six * C6) * E + five * C5) * E + four * C4
    return ((high * E + three * C3) * E + two * C2) * E + C1


_curve, _curve_slopes = inlined(_curve, CONTRACT), inlined(_curve_slopes, CONTRACT)


def _curve_at_kink(x: Any, y: Any, c: Any) -> None:
    """y = (N + R·line)/(D + R), where R is the weight of the line in units of that of key 0."""
    zero, one, end, most, rate, v0, near = c[0], c[1], c[2], c[3], c[4], c[6], c[7]
    slope, offset, vl, ul, largest = c[8], c[9], c[10], c[11], c[26]
    for i in range(len(x)):
        t = -x[i] if -x[i] > -near else -near
        E = _bounded_power(t, rate, end)
        N, D = _curve(E, one, v0, c)
        size = slope * t - offset  # R = e^{−size}
        R = exponential(-(size if size > -largest else -largest) if size < largest else -largest)
        R = zero if size > largest else R
        line = ul * x[i] + vl
        found = (N + R * line) / (D + R)
        y[i] = line if x[i] > near else found
    _set_limits(x, y, most, zero, v0, zero, vl, ul)


def _curve_at_kink_slope(x: Any, y: Any, grad: Any, c: Any) -> None:
    """y′ = w(s(line − y) + u) + δE(N′ − yD′)/(D + R), with w = R/(D + R) and R = e^{s·x + …}."""
    zero, one, end, most, rate, step, v0, near = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]
    slope, offset, vl, ul, largest, gap, gap_slope, bend = c[8], c[9], c[10], c[11], c[26], c[27], c[28], c[29]
    for i in range(len(x)):
        t = -x[i] if -x[i] > -near else -near
        E = _bounded_power(t, rate, end)
        N, D = _curve(E, one, v0, c)
        size = slope * t - offset
        R = exponential(-(size if size > -largest else -largest) if size < largest else -largest)
        R = zero if size > largest else R
        inverse = one / (D + R)
        w, line = R * inverse, vl - ul * t
        found = (N + R * line) * inverse
        rise = _curve_slopes(E, c[19], c[20], c[21], c[22], c[23], c[24], c[25], one)
        rise = rise - found * _curve_slopes(E, c[12], c[13], c[14], c[15], c[16], c[17], c[18], one)
        close = t if t < near else near
        between = gap - (gap_slope + bend * close) * close  # line − curve
        both = w * (slope * (D * inverse) * between + ul) + step * E * rise * inverse
        y[i] = grad[i] * (ul if x[i] > near else both)
    _set_slope_limits(x, y, grad, most, zero, zero, ul)


_curve_at_kink, _curve_at_kink_slope = inlined(_curve_at_kink, CONTRACT), inlined(_curve_at_kink_slope, CONTRACT)


def curve(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """A quotient of powers of E = e^{δx} to the left of 0, and the line of the steep key to the right."""
    zero, one, end, most, rate, v0, near, vl, ul = c[0], c[1], c[2], c[3], c[4], c[6], c[7], c[10], c[11]
    for start in range(0, len(y), LINE_SPAN):
        x_span, y_span = x[start : start + LINE_SPAN], y[start : start + LINE_SPAN]
        closest, largest = bits(most), bits(zero)
        for i in range(len(x_span)):
            t = abs(x_span[i])
            closest, largest = min(closest, bits(t)), max(largest, bits(t))
            N, D = _curve(_bounded_power(t, rate, end), one, v0, c)
            y_span[i] = ul * x_span[i] + vl if x_span[i] > zero else N / D
        if closest < bits(near) or largest > bits(most):
            _curve_at_kink(x_span, y_span, c)


def curve_slope(x: Any, y: Any, grad: Any, c: Any, p: Any) -> None:
    """To the left y′ = δE(N′ − yD′)/D."""
    zero, one, end, most, rate, step, v0, near, ul = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[11]
    for start in range(0, len(y), LINE_SPAN):
        stop = start + LINE_SPAN
        x_span, y_span, grad_span = x[start:stop], y[start:stop], grad[start:stop]
        closest, largest = bits(most), bits(zero)
        for i in range(len(x_span)):
            t = abs(x_span[i])
            closest, largest = min(closest, bits(t)), max(largest, bits(t))
            E = _bounded_power(t, rate, end)
            N, D = _curve(E, one, v0, c)
            inverse = one / D
            rise = _curve_slopes(E, c[19], c[20], c[21], c[22], c[23], c[24], c[25], one)
            rise = rise - N * inverse * _curve_slopes(E, c[12], c[13], c[14], c[15], c[16], c[17], c[18], one)
            y_span[i] = grad_span[i] * (ul if x_span[i] > zero else step * E * rise * inverse)
        if closest < bits(near) or largest > bits(most):
            _curve_at_kink_slope(x_span, y_span, grad_span, c)


# --- workers ----------------------------------------------------------------------------------------------------------


@compiled_call  # type: ignore[untyped-decorator, unused-ignore]
def _as_float32(context: Any, address: Any) -> Any:
    return _pointer(types.float32, address)


@compiled_call  # type: ignore[untyped-decorator, unused-ignore]
def _as_float64(context: Any, address: Any) -> Any:
    return _pointer(types.float64, address)


@compiled_call  # type: ignore[untyped-decorator, unused-ignore]
def _as_int64(context: Any, address: Any) -> Any:
    return _pointer(types.int64, address)


def _pointer(kind: Any, address: Any) -> Any:
    """Return the signature and code of a function from an address to a pointer."""
    pointer_to: Any = types.CPointer
    signature = pointer_to(kind)(address)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = context.get_value_type(signature.return_type)
        turn = builder.bitcast if isinstance(args[0].type, ir.PointerType) else builder.inttoptr
        return turn(args[0], pointer)

    return signature, code


@compiled_call  # type: ignore[untyped-decorator, unused-ignore]
def _called(context: Any, address: Any) -> Any:
    """Call a C function of no arguments that returns an int."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), [])

    return types.int32(address), code


def _span(given: Any) -> Any:
    """Return the elements of the calling thread."""
    count, threads = given[3], given[7]
    if threads <= 1:
        return 0, count
    number = np.int64(_called(given[8]))
    share = ((count + threads - 1) // threads + GRAIN - 1) // GRAIN * GRAIN
    return min(count, number * share), min(count, (number + 1) * share)


_span = inlined(_span)


def _on_float32(address: Any) -> None:
    given = carray(_as_int64(address), (len(ARGUMENTS),))
    start, stop = _span(given)
    c, p = carray(_as_float32(given[4]), (given[5],)), given[6]
    is_copied = COPIES and given[0] == given[1]  # type: ignore[name-defined]  # noqa: F821
    copy, grain = carray(_span_of_lines(c), (LINE_SPAN,)), LINE_SPAN if is_copied else GRAIN
    for at in range(start, stop, grain):
        n = min(grain, stop - at)
        x = carray(_as_float32(given[0] + 4 * at), (n,))
        y = carray(_as_float32(given[1] + 4 * at), (n,))
        grad = carray(_as_float32(given[2] + 4 * at), (n,))
        if is_copied:
            _copy_bytes(np.int64(copy.ctypes.data), given[0] + 4 * at, 4 * n)
            x = copy[:n]
        LOOP(x, y, grad, c, p)  # type: ignore[name-defined]  # noqa: F821


def _on_float64(address: Any) -> None:
    given = carray(_as_int64(address), (len(ARGUMENTS),))
    start, stop = _span(given)
    c, p = carray(_as_float64(given[4]), (given[5],)), given[6]
    is_copied = COPIES and given[0] == given[1]  # type: ignore[name-defined]  # noqa: F821
    copy, grain = carray(_span_of_lines(c), (LINE_SPAN,)), LINE_SPAN if is_copied else GRAIN
    for at in range(start, stop, grain):
        n = min(grain, stop - at)
        x = carray(_as_float64(given[0] + 8 * at), (n,))
        y = carray(_as_float64(given[1] + 8 * at), (n,))
        grad = carray(_as_float64(given[2] + 8 * at), (n,))
        if is_copied:
            _copy_bytes(np.int64(copy.ctypes.data), given[0] + 8 * at, 8 * n)
            x = copy[:n]
        LOOP(x, y, grad, c, p)  # type: ignore[name-defined]  # noqa: F821


SIGNATURE, OPTIONS = "void(voidptr)", {"error_model": "numpy", "fastmath": CONTRACT}
RUNS = {"float32": _on_float32, "float64": _on_float64}
LOOPS: dict[str, Any] = {
    loop.__name__: inlined(loop, CONTRACT)
    for loop in (
        *(two, two_slope, ramp, ramp_slope, ramp_values, ramp_values_slope, odd, odd_slope, sided, sided_slope),
        *(saved_slope, keys, keys_slope, lines, lines_in_place, lines_slope, curve, curve_slope),
    )
}


def _named(name: str, dtype: str) -> Any:
    """Return the function of a worker. Every worker has its own name, because numba finds kept results by name."""
    made = FunctionType(
        RUNS[dtype].__code__, globals() | {"LOOP": LOOPS[name], "COPIES": name != "lines_in_place"}, f"{name}_{dtype}"
    )
    made.__qualname__ = made.__name__
    return made


@functools.cache  # the machine code lives as long as the result
def worker(name: str, dtype: str) -> Any:
    """Compile a loop for a dtype, and return it as a C function of the address of ARGUMENTS.

    numba keeps the result on disk if there is a writable folder for it.
    """
    try:
        return cfunc(SIGNATURE, cache=True, **OPTIONS)(_named(name, dtype))
    except RuntimeError:  # neither this folder nor the user's cache can be written to
        return cfunc(SIGNATURE, **OPTIONS)(_named(name, dtype))


def library(name: str, dtype: str) -> bytes:
    """Compile a loop for a dtype into a shared library with the function ENTRY. Raise NotLinked if it cannot be one.

    A loop owns no memory and raises no error. So counters of references can be left out, and the code that numba makes
    for the errors of a C function is replaced by ENTRY, which drops the status.
    """
    made = cfunc(SIGNATURE, **OPTIONS)(_named(name, dtype))
    wrapper, text = made.native_name, made.inspect_llvm()
    found = re.search(rf'^define [^\n]*@"?{re.escape(wrapper)}"?\(.*?^\}}\n', text, re.MULTILINE | re.DOTALL)
    if found is None or "pickle" in text.replace("numba_unpickle", ""):  # pickled errors
        raise NotLinked("numba's code has another form")
    text = text[: found.start()] + text[found.end() :]
    text = re.sub(r"^ *(tail )?call void @NRT_(in|de)cref\(.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^define [^\n]*@NRT_(in|de)cref\(.*?^\}\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text += f"""
define void @{ENTRY}(ptr %given) {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{wrapper.removeprefix("cfunc.")}"(ptr %result, ptr %error, ptr %given)
  ret void
}}
"""
    features = get_host_cpu_features()  # type: ignore[no-untyped-call, unused-ignore]
    cpu = llvm.get_host_cpu_name()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")
    return linked(machine.emit_object(llvm.parse_assembly(text)), ENTRY)
