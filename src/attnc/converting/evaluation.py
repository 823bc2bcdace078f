"""How an activation by attention is evaluated in one dtype: with one exponential if its keys allow it.

The keys are (a_k, c_k, v_k, u_k), and y = Σ w_k(v_k + u_k·x), w = softmax(a_k·x + c_k). All evaluations compute this
sum. They differ in the order of operations:

Powers.  If slopes are equally spaced, a_{k+1} − a_k = δ, weights are powers of E = e^{−δ|x|} ≤ 1. Count keys from the
         end that wins on the side of x. With C_k = e^{c_k − c_0} ≥ 0, D = Σ C_k·E^k, and the differences from key 0,

             y = u_0·x + v_0 + (Σ_{k>0} (v_k − v_0)C_k·E^k + x·Σ_{k>0} (u_k − u_0)C_k·E^k)/D.

         There is nothing to overflow, and for E = 0 this is the line of key 0. On the other side keys are counted from
         the other end.
Ramps.   If c and v are symmetric and u_k + u_{p−1−k} is the same for all k, let J = u_{p−1} − u_0, σ = E/(1 + E) and
         q = σ(1 − σ). Symmetric polynomials of degree p − 1, divided by (1 + E)^{p−1}, are polynomials in q of half
         the degree: D gives P(q), and the sum of (v_k − v_0)C_k·E^k gives V(q). Let Q = Σ (u_k − u_0)C_k·E^k. Then
         (1 + E)Q − J·E·D is antisymmetric, so it is 1 − E times a symmetric polynomial, which gives A(q). Hence

             Q/D = Jσ + (1 − 2σ)A(q)/P(q),

         with one exponential, two divisions and half the products. If v_k + v_{p−1−k} is the same for all k instead,
         and there is no u, the same holds for Q = Σ (v_k − v_0)C_k·E^k: an *odd* function, up to a constant.
Lines.   Steep keys: where δ times the distance from a kink exceeds 87, float32 weights are exactly 0 and 1, and y is
         the line of one key. Only blocks of elements with one nearer to a kink take exponentials.
Curve.   Powers to the left of 0, and the line of one steep key to the right, as in ELU. Blocks with an element close to
         0 take a second exponential, for the weight w of the line. The derivative has the term βw(line − y), and β
         would make the rounding of y large. So line − y is computed as 1 − w times the difference of the line and the
         curve, with the curve's Taylor polynomial of degree 2 at 0. As w(1 − w) ≤ e^{1 − β|x|} and t³e^{−t} ≤ 27e^{−3},
         that changes the term by less than max|curve‴|/β².
Keys.    One exponential for each key, after the largest score is subtracted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from importlib.util import find_spec

import numpy as np

from attnc.engines.powers import LOG2_E
from attnc.numerics.arrays import Float

MOST_EXPONENT = {"float32": 87.0, "float64": 708.0}
"""The largest t for which e^{−t} is computed. Beyond it the weight is 0, or stays e^{−87} or e^{−708}."""
MOST_KEYS = {"two": 2, "ramp": 10, "ramp_values": 6, "odd": 10, "sided": 3, "curve": 8}
"""The largest numbers of keys of the compiled loops for powers, of a curve without its line."""
LARGEST_OFFSET_RANGE = 60.0
"""The largest difference of two offsets of powers: e^60 is far from overflow in float32."""
LARGE = 2.0**64
"""Beyond this |x| a line is computed. Powers end at e^{−87}, and 2⁶⁴·e^{−87} is still below 10⁻¹⁸."""
STEEPEST_SLOPE = 2000.0
"""Slopes that differ by more than this make lines: exponentials are needed within 0.05 of a kink only."""
STEEPEST_CURVE = 2.0**17
"""A line beside a curve is at least this much steeper: one element in 4,000 is then close to the kink."""
KINKS_APART = 400.0
"""The least difference of scores between two kinks: beside one of them, the third key has a weight below e^{−200}."""
KINK_ROOM = 8.0
"""Added to MOST_EXPONENT for the distance from a kink: it covers the rounding of scores beside the kink."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Numbers for one of the loops: a name of MOST_KEYS, "lines" or "keys".

    `numbers` begin with 0, 1, the largest exponent, or the largest |x| of powers, and LARGE. `saved` holds
    (K, v_0, v_1) if the derivative is K(y − v_0)(v_1 − y), so that backward needs the output alone.
    """

    kind: str
    numbers: Float[np.ndarray, " numbers"]
    num_keys: int
    saved: Float[np.ndarray, " three"] | None = None
    step: float | None = None  # δ, if slopes are equally spaced
    kinks: tuple[float, ...] | None = None  # of lines, in ascending order

    @property
    def description(self) -> str:
        """How many exponentials an element takes."""
        if self.kind == "keys":
            return f"{self.num_keys} exponentials"
        return "exponentials at kinks" if self.kind == "lines" else "one exponential"

    @property
    def num_plain_exponentials(self) -> int | None:
        """How many exponentials an element takes in torch functions (`plain`), or None where it takes a softmax."""
        if self.kind in ("two", "ramp", "ramp_values", "sided"):
            return 1
        if self.kind == "curve":
            return 2
        if self.kinks is None or self.step is None:
            return None
        step, kinks = self.step, self.kinks
        is_apart = all(step * (b - a) >= KINKS_APART for a, b in itertools.pairwise(kinks))
        return len(kinks) if is_apart else None


Keys = Mapping[str, np.ndarray]
"""slopes, offsets, values and carried parts, as the dtype stores them."""


def evaluation_of(keys: Keys, dtype: str, *, is_product: bool = False) -> Evaluation:
    """Return the cheapest evaluation of these keys. A product is x times the head."""
    stored = {name: numbers.astype(dtype).astype(np.float64) for name, numbers in keys.items()}
    order = np.argsort(stored["slopes"], kind="stable")
    a, c, v, u = (stored[name][order] for name in ("slopes", "offsets", "values", "carried"))
    step = lattice_step(a, dtype)
    if step is not None and step > STEEPEST_SLOPE and len(a) <= 3:
        kinks = _kinks(a, c, dtype)
        if kinks is not None:
            return _lines(a, c, v, u, kinks, step, dtype, is_product)
    if not is_product and (found := _curve(a, c, v, u, dtype)) is not None:
        return found
    is_mild = np.ptp(c) <= LARGEST_OFFSET_RANGE and bool(np.isfinite([a, c, v, u]).all())
    if step is None or is_product or not is_mild:
        return _keys(a, c, v, u, dtype, is_product)
    if len(a) <= MOST_KEYS["ramp_values" if np.ptp(v) else "ramp"] and _is_ramp(c, v, u):
        return _ramp(step, c, v, u, dtype)
    if len(a) <= MOST_KEYS["sided"]:
        return _sided(step, c, v, u, dtype)
    if len(a) <= MOST_KEYS["odd"] and not u.any() and _is_symmetric(c, v):
        return _odd(step, c, v, dtype)
    return _keys(a, c, v, u, dtype, is_product)


def evaluation_text(keys: Keys, dtype: str, *, is_product: bool = False) -> str:
    """Describe how these keys are evaluated on a CPU: by compiled loops if numba is installed, else in torch."""
    found = evaluation_of(keys, dtype, is_product=is_product)
    if find_spec("numba") is not None:
        return f"compiled, {found.description}"
    count = found.num_plain_exponentials
    return (
        "softmax in torch" if count is None else f"in torch, {'one exponential' if count == 1 else 'two exponentials'}"
    )


def lattice_step(slopes: Float[np.ndarray, " keys"], dtype: str) -> float | None:
    """Return δ if the sorted slopes are spaced by exactly δ and the dtype holds it, otherwise None."""
    if len(slopes) < 2 or not np.isfinite(slopes).all():
        return None
    exact = [Fraction(slope) for slope in slopes.tolist()]
    gaps = {b - a for a, b in itertools.pairwise(exact)}
    step = float(np.dtype(dtype).type(slopes[1] - slopes[0]))
    return step if gaps == {Fraction(step)} and step > 0 else None


def _is_ramp(c: np.ndarray, v: np.ndarray, u: np.ndarray) -> bool:
    """Whether the coefficients on both sides are the same: c and v are symmetric, and u_k + u_{p−1−k} are equal."""
    return bool((v == v[::-1]).all() and u.any()) and _is_symmetric(c, u)


def _is_symmetric(c: np.ndarray, values: np.ndarray) -> bool:
    """Whether c is symmetric, and each pair of values has the same sum, exactly."""
    exact = [Fraction(value) for value in values.tolist()]
    return bool((c == c[::-1]).all()) and len({a + b for a, b in zip(exact, exact[::-1], strict=True)}) == 1


def _start(dtype: str) -> list[float]:
    return [0.0, 1.0, MOST_EXPONENT[dtype], LARGE]


def _start_of_powers(step: float, dtype: str) -> list[float]:
    """0, 1, the largest |x| whose power is computed, LARGE, the exponent of 2 for each unit of |x|, and the step."""
    return [0.0, 1.0, MOST_EXPONENT[dtype] / step, LARGE, float(-Fraction(step) * LOG2_E), step]


def powers_weights(c: Float[np.ndarray, " keys"]) -> Float[np.ndarray, " keys"]:
    """Return e^{c_k − c_0}, correct to the last digit of float64 and almost never off by one."""
    return np.array([float(weight) for weight in _exact_weights(c)])


def _exact_weights(c: Float[np.ndarray, " keys"]) -> list[Fraction]:
    """Return e^{c_k − c_0} to 40 digits."""
    context = Context(prec=40)
    first = Decimal(float(c[0]))
    return [Fraction(context.exp(context.subtract(Decimal(float(each)), first))) for each in c]


def _padded(numbers: Sequence[float], size: int) -> list[float]:
    """Return the numbers after the first, with zeros up to `size`."""
    return [*numbers[1:], *[0.0] * (size - len(numbers) + 1)]


def symmetric_parts(c: np.ndarray, values: np.ndarray) -> tuple[float, list[float], list[float]]:
    """Return J and the coefficients of A and P, for symmetric c and pairs of values with the same sum."""
    C, exact = _exact_weights(c), [Fraction(value) for value in values.tolist()]
    J = exact[-1] - exact[0]
    Q = [(value - exact[0]) * weight for value, weight in zip(exact, C, strict=True)]
    none = [Fraction(0)]
    rest = [a + b - J * d for a, b, d in zip(Q + none, none + Q, none + C, strict=True)]  # (1 + E)Q − J·E·D
    return float(J), _in_q(list(itertools.accumulate(rest))[:-1]), _in_q(C)


def _in_q(coefficients: list[Fraction]) -> list[float]:
    """Return the coefficients in q of Σ coefficients_k·E^k/(1 + E)^n, a symmetric polynomial of degree n."""
    n = len(coefficients) - 1
    if n % 2:  # divisible by 1 + E
        divided = [coefficients[0]]
        for each in coefficients[1:-1]:
            divided.append(each - divided[-1])
        coefficients = divided
    half, found = n // 2, list[Fraction]()
    for j in range(half + 1):  # E^i(1 + E)^{2(half − i)} has the coefficient C(2(half − i), j − i) at E^j
        known = sum(each * math.comb(2 * (half - i), j - i) for i, each in enumerate(found))
        found.append(coefficients[j] - known)
    return [float(each) for each in found]


def _ramp(step: float, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str) -> Evaluation:
    p = len(c)
    J, A, P = symmetric_parts(c, u)
    numbers = [*_start_of_powers(step, dtype), v[0], u[0], u[-1], J]
    if p == 2:
        return Evaluation("two", np.array(numbers, dtype), p, step=step)
    kind = "ramp_values" if np.ptp(v) else "ramp"
    size = (MOST_KEYS[kind] - 1) // 2
    numbers += [*_padded(P, size), *_padded(A, size)]
    if kind == "ramp_values":
        numbers += [*_padded(value_part(c, v), size), *_slope_part(J, A, P, size)]
    return Evaluation(kind, np.array(numbers, dtype), p, step=step)


def _slope_part(J: float, A: list[float], P: list[float], size: int) -> list[float]:
    """Return the coefficients of 2A − (1 − 4q)A′ − JP, which is a part of the derivative."""
    A, P = [*A, *[0.0] * (size + 2 - len(A))], [*P, *[0.0] * (size + 1 - len(P))]
    return [(2 + 4 * k) * A[k] - (k + 1) * A[k + 1] - J * P[k] for k in range(size + 1)]


def value_part(c: np.ndarray, v: np.ndarray) -> list[float]:
    """Return the coefficients of V, for symmetric c and v."""
    first = Fraction(float(v[0]))
    weights = zip(v.tolist(), _exact_weights(c), strict=True)
    return _in_q([(Fraction(value) - first) * weight for value, weight in weights])


def _odd(step: float, c: np.ndarray, v: np.ndarray, dtype: str) -> Evaluation:
    J, A, P = symmetric_parts(c, v)
    size = (MOST_KEYS["odd"] - 1) // 2
    numbers = [*_start_of_powers(step, dtype), 0.0, v[0], v[-1], J, *_padded(P, size), *_padded(A, size)]
    return Evaluation("odd", np.array(numbers, dtype), len(c), step=step)


def _sided(step: float, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str) -> Evaluation:
    numbers, size = _start_of_powers(step, dtype), MOST_KEYS["sided"] - 1
    for c_side, v_side, u_side in ((c, v, u), (c[::-1], v[::-1], u[::-1])):
        C = powers_weights(c_side)
        numbers += [v_side[0], u_side[0]]
        for coefficients in (C, (v_side - v_side[0]) * C, (u_side - u_side[0]) * C):
            numbers += _padded(coefficients.tolist(), size)
    saved = None
    if len(c) == 2 and not u.any() and v[0] != v[1]:
        saved = np.array([step / (v[1] - v[0]), v[0], v[1]], dtype)
    return Evaluation("sided", np.array(numbers, dtype), len(c), saved, step)


def _curve(a: np.ndarray, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str) -> Evaluation | None:
    """Return the evaluation of keys of which the last is steep and the others are a lattice, or None."""
    group, p = slice(0, -1), len(a) - 1
    step = lattice_step(a[group], dtype)
    is_mild = np.ptp(c) <= LARGEST_OFFSET_RANGE and bool(np.isfinite([a, c, v, u]).all())
    if step is None or not is_mild or not 2 < p <= MOST_KEYS["curve"] or u[group].any():
        return None
    ahead = a[-1] - a[-2]
    near = (MOST_EXPONENT[dtype] + KINK_ROOM + float(np.abs(c[group] - c[-1]).max()) + math.log(p)) / ahead
    if ahead < STEEPEST_CURVE or abs(c[-1] - float(np.logaddexp.reduce(c[group]))) > 1:  # the kink is not at 0
        return None
    C, size = powers_weights(c[group]), MOST_KEYS["curve"] - 1
    numbers = [*_start_of_powers(step, dtype), v[0], near, a[-1] - a[0], c[-1] - c[0], v[-1], u[-1]]
    numbers += [*_padded(C.tolist(), size), *_padded((v[group] * C).tolist(), size), LARGEST_OFFSET_RANGE]
    weights, powers = C / C.sum(), np.arange(p)  # the derivatives of a mean by x are δ times central moments
    rest, spread = v[group] - weights @ v[group], powers - weights @ powers
    numbers += [v[-1] - weights @ v[group], u[-1] - step * (weights @ (rest * spread))]
    numbers += [step**2 * (weights @ (rest * spread**2)) / 2]
    return Evaluation("curve", np.array(numbers, dtype), p + 1)


def _kinks(a: np.ndarray, c: np.ndarray, dtype: str) -> list[float] | None:
    """Return the points at which neighbouring keys have equal scores, in ascending order, or None."""
    kinks = [float(kink) for kink in (c[:-1] - c[1:]) / (a[1:] - a[:-1])]
    return kinks if all(np.isfinite(kinks)) and kinks == sorted(kinks) else None


def _lines(
    a: np.ndarray,
    c: np.ndarray,
    v: np.ndarray,
    u: np.ndarray,
    kinks: list[float],
    step: float,
    dtype: str,
    is_product: bool,
) -> Evaluation:
    near = (MOST_EXPONENT[dtype] + KINK_ROOM) / step + 8 * float(np.finfo(dtype).eps) * max(map(abs, kinks))
    at_zero = float(len(a) == 2 and c[0] == c[1] and not v.any())  # y(0) = 0 whatever the weights are
    middle = [v[1], u[1]] if len(a) == 3 else [v[0], u[0]]
    numbers = [*_start(dtype), float(is_product), kinks[0], kinks[-1], near, at_zero]
    numbers += [v[0], u[0], *middle, v[-1], u[-1], *a, *c, *v, *u]
    return Evaluation("lines", np.array(numbers, dtype), len(a), step=step, kinks=tuple(kinks))


def _keys(a: np.ndarray, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str, is_product: bool) -> Evaluation:
    return Evaluation("keys", np.array([*_start(dtype), float(is_product), *a, *c, *v, *u], dtype), len(a))
