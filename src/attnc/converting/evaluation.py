"""How an activation by attention is evaluated in one dtype: with one exponential if its keys allow it.

The keys are (a_k, c_k, v_k, u_k), and y = Σ w_k(v_k + u_k·x), w = softmax(a_k·x + c_k). All evaluations compute this
sum. They differ in the order of operations:

Powers.  If slopes are equally spaced, a_{k+1} − a_k = δ, weights are powers of E = e^{−δ|x|} ≤ 1. Count keys from the
         end that wins on the side of x. With C_k = e^{c_k − c_0} ≥ 0, D = Σ C_k·E^k, and the differences from key 0,

             y = u_0·x + v_0 + (Σ_{k>0} (v_k − v_0)C_k·E^k + x·Σ_{k>0} (u_k − u_0)C_k·E^k)/D.

         There is nothing to overflow, and for E = 0 this is the line of key 0. On the other side keys are counted from
         the other end. A *ramp* has the same coefficients on both sides, up to the sign of u_k − u_0.
Lines.   Steep keys: where δ times the distance from a kink exceeds 87, float32 weights are exactly 0 and 1, and y is
         the line of one key. Only blocks of elements with one nearer to a kink take exponentials.
Keys.    One exponential for each key, after the largest score is subtracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from importlib.util import find_spec

import numpy as np

from attnc.numerics.arrays import Float

MOST_EXPONENT = {"float32": 87.0, "float64": 708.0}
"""The largest t for which e^{−t} is computed. Beyond it the weight is 0, or stays e^{−87} or e^{−708}."""
MOST_KEYS = {"two": 2, "ramp": 8, "long_ramp": 10, "ramp_values": 6, "sided": 3}
"""The largest numbers of keys of the compiled loops for powers. They hold their coefficients in registers."""
LARGEST_OFFSET_RANGE = 60.0
"""The largest difference of two offsets of powers: e^60 is far from overflow in float32."""
LARGE = 2.0**64
"""Beyond this |x| a line is computed. Powers end at e^{−87}, and 2⁶⁴·e^{−87} is still below 10⁻¹⁸."""
STEEPEST_SLOPE = 2000.0
"""Slopes that differ by more than this make lines: exponentials are needed within 0.05 of a kink only."""
KINK_ROOM = 8.0
"""Added to MOST_EXPONENT for the distance from a kink: it covers the rounding of scores beside the kink."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Numbers for one of the loops: "two", "ramp", "long_ramp", "ramp_values", "sided", "lines" or "keys".

    `numbers` begin with 0, 1, the largest exponent and LARGE. `saved` holds (K, v_0, v_1) if
    the derivative is K(y − v_0)(v_1 − y), so that backward needs the output alone.
    """

    kind: str
    numbers: Float[np.ndarray, " numbers"]
    num_keys: int
    saved: Float[np.ndarray, " three"] | None = None
    step: float | None = None  # δ, if weights are powers of e^{−δ|x|}
    kinks: tuple[float, ...] | None = None  # of lines, in ascending order

    @property
    def description(self) -> str:
        """How many exponentials an element takes."""
        if self.kind == "keys":
            return f"{self.num_keys} exponentials"
        return "exponentials at kinks" if self.kind == "lines" else "one exponential"


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
    is_mild = np.ptp(c) <= LARGEST_OFFSET_RANGE and bool(np.isfinite([a, c, v, u]).all())
    if step is None or is_product or not is_mild:
        return _keys(a, c, v, u, dtype, is_product)
    if len(a) <= MOST_KEYS["ramp_values" if np.ptp(v) else "long_ramp"] and _is_ramp(c, v, u):
        return _ramp(step, c, v, u, dtype)
    if len(a) <= MOST_KEYS["sided"]:
        return _sided(step, c, v, u, dtype)
    return _keys(a, c, v, u, dtype, is_product)


def evaluation_text(keys: Keys, dtype: str, *, is_product: bool = False) -> str:
    """Describe how these keys are evaluated on a CPU: by compiled loops if numba is installed."""
    if find_spec("numba") is None:
        return "softmax in torch"
    return f"compiled, {evaluation_of(keys, dtype, is_product=is_product).description}"


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
    pairs = u + u[::-1]  # exact if both are multiples of one small number, as those of lattice gates are
    return bool((c == c[::-1]).all() and (v == v[::-1]).all() and (pairs == pairs[0]).all() and u.any())


def _start(dtype: str) -> list[float]:
    return [0.0, 1.0, MOST_EXPONENT[dtype], LARGE]


def powers_weights(c: Float[np.ndarray, " keys"]) -> Float[np.ndarray, " keys"]:
    """Return e^{c_k − c_0}, correct to the last digit of float64 and almost never off by one."""
    context = Context(prec=40)
    first = Decimal(float(c[0]))
    return np.array([float(context.exp(context.subtract(Decimal(float(each)), first))) for each in c])


def _padded(numbers: np.ndarray, size: int) -> list[float]:
    """Return the numbers after the first, with zeros up to `size`."""
    return [*numbers[1:].tolist(), *[0.0] * (size - len(numbers) + 1)]


def _ramp(step: float, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str) -> Evaluation:
    p, C = len(c), powers_weights(c)
    Q, P = (u - u[0]) * C, (v - v[0]) * C
    kind = "ramp_values" if P.any() else next(kind for kind, most in MOST_KEYS.items() if p <= most)
    size = MOST_KEYS[kind] - 1
    numbers = [*_start(dtype), step, v[0], u[0], u[-1], *_padded(C, size), *_padded(Q, size), *_padded(P, size)]
    return Evaluation(kind, np.array(numbers, dtype), p, step=step)


def _sided(step: float, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str) -> Evaluation:
    numbers, size = [*_start(dtype), step], MOST_KEYS["sided"] - 1
    for c_side, v_side, u_side in ((c, v, u), (c[::-1], v[::-1], u[::-1])):
        C = powers_weights(c_side)
        numbers += [v_side[0], u_side[0]]
        for coefficients in (C, (v_side - v_side[0]) * C, (u_side - u_side[0]) * C):
            numbers += _padded(coefficients, size)
    saved = None
    if len(c) == 2 and not u.any() and v[0] != v[1]:
        saved = np.array([step / (v[1] - v[0]), v[0], v[1]], dtype)
    return Evaluation("sided", np.array(numbers, dtype), len(c), saved, step)


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
    return Evaluation("lines", np.array(numbers, dtype), len(a), kinks=tuple(kinks))


def _keys(a: np.ndarray, c: np.ndarray, v: np.ndarray, u: np.ndarray, dtype: str, is_product: bool) -> Evaluation:
    return Evaluation("keys", np.array([*_start(dtype), float(is_product), *a, *c, *v, *u], dtype), len(a))
