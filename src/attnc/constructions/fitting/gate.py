"""Gates: the activations, the product, max and min as heads whose keys may carry their own query.

A head of one variable is G(x) = Σ_k w_k(x)(v_k + V_k·x), w = softmax(a_k·x + c_k): a `SoftHead` with one input and one
output. Its `carried` is None if every V_k is 0. There are four kinds of gates:

Closed forms: activations that are a softmax already.

Lines: piecewise linear activations are a steep softmax between lines, with an error of W(1/e)/β on all of R. Two lines
that meet at κ and whose slopes differ by J have weights σ(±β(x − κ)): the error is J·|t|σ(−β|t|), t = x − κ, at most
J·max_s s/(e^s + 1)/β = J·W(1/e)/β, with W Lambert's function. Far from κ it is zero in floating point as well.

Fitted keys: smooth activations on all of R, and products on a box, have a few keys with solved values. The end keys of
an activation carry its limits exactly. For x·y the keys carry x, and the weights at y average to y.

Curves and lines: a curve G is a group of keys, and every line beside it is a steep key. The line that meets the curve
at κ has the score ±β(x − κ) + log Σ e^{s_k(κ)}, summed over the group. The ratios of the weights inside the group do
not change, so the head is G + σ(±β(x − κ) + …)(line − G). Where the slopes differ by J the error is J·W(1/e)/β, and
where they do not, J₂·0.2415/β² with J₂ the difference of the second derivatives, as max_s s²/(2(e^s + 1)) = 0.2415.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.built import round_above
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.minimax import chebyshev, fit_values, highest
from attnc.errors import InputError, positive_number, real_number
from attnc.functions.gate_recipes import Decay, ExactKeys, FittedKeys, GateRecipe, PickedValue, TwoLines
from attnc.functions.gate_table import GELU_TANH, GELU_TANH_LATTICE, RECIPROCAL
from attnc.functions.logistic import SILU_SLOPE_TURNS, logistic
from attnc.functions.registry import FUNCTIONS
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float

ALL_REALS = (-math.inf, math.inf)
SEARCH_SAFETY = 1.01
"""Margin on an error found by a search. The search finds peaks to a relative accuracy of 1e-4."""
NEGLIGIBLE_SCORE = 60.0
"""A key whose score is lower than the largest by this has a weight below e^{−60} < 2⁻⁸⁶."""
FIT_PASSES = 24
"""Number of reweightings of a fit. The errors in the gate table were measured with this number."""
MAX_EXPONENT = 300.0
"""Largest argument of exp. A product of two numbers up to e^300 is still within float64, which ends at e^709."""


@dataclass(frozen=True, eq=False)
class Gate:
    """One function f as attention: an activation, max or min of several wires, or a product.

    |gate(x) − f(x)| ≤ error for every x of the domain, in exact arithmetic. If `is_proved`, the error is a closed form;
    otherwise it is the largest error found by a search. `lipschitz` is the Lipschitz constant of f on the domain.

    A product is x·A(y), with A the head of `keys`. It is linear in x, and `domain` is the domain of y.

    With a number `sign` = β the gate has two layers: s = tanh(βx) and y = x·s by two keys, then s·A(y). Only softsign
    has two layers.
    """

    name: str
    keys: SoftHead[np.ndarray]
    error: float
    lipschitz: float
    domain: tuple[float, float] = ALL_REALS
    is_proved: bool = False
    sign: float | None = None
    is_product: bool = False

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys + (0 if self.sign is None else 2)

    def build(self, circuit: Circuit, *wires: Wire) -> Wire:
        """Add the heads of the gate to a circuit. An activation has one wire, a product has the wires x and y."""
        count = self.keys.num_inputs + self.is_product
        if len(wires) != count:
            raise InputError(f"this {self.name} gate takes {count} wires, found {len(wires)}")
        if self.is_product:
            return circuit.apply(self.keys, wires[1], wires[0], name=self.name)
        if self.sign is None:
            return circuit.head(wires, self.keys, name=self.name)[0]
        sides, zero = np.array([-1.0, 1.0]), np.zeros(2)
        values, carried = np.stack([sides, zero], axis=1), np.stack([zero, sides], axis=1)
        steep = SoftHead(self.sign * sides[:, None], zero, values, carried[:, :, None])
        sign, size = circuit.head(wires, steep, name="sign")
        return circuit.apply(self.keys, size, sign, name=self.name)


def min_keys(name: str, eps: float, hints: Mapping[int, float], make: Callable[[int], Gate]) -> Gate:
    """Return the gate with the fewest keys p and an error ≤ eps. Skip a p whose hint is more than 10 % above eps."""
    positive_number("eps", eps)
    for p, hint in sorted(hints.items()):
        if 0.9 * hint <= eps:
            gate = make(p)
            if gate.error <= eps:
                return gate
    best = make(max(hints))
    if best.error <= eps:
        return best
    raise OutOfReach(name, eps, best.error, best.num_anchors)


def power_of_two(at_least: float) -> float:
    """Return the least power of two ≥ `at_least`. Products with it are exact, and so are scores β·x."""
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


def observed(error_at: Callable[[np.ndarray], np.ndarray], points: Float[np.ndarray, " points"], size: float) -> float:
    """Return max |error| over sorted points, refined about the highest peaks and rounded up.

    It includes the rounding errors of float64 for summed terms of this size.
    """
    found, _ = highest(lambda x: np.abs(error_at(x)), points)
    return SEARCH_SAFETY * found + 16 * 2.0**-53 * size


def half_line(reach: float, core: float = 12.0, count: int = 1000) -> Float[np.ndarray, " points"]:
    """Return points from 0 to reach, evenly spaced up to `core` and geometrically spaced beyond."""
    near = np.linspace(0.0, min(core, reach), count)
    return near if reach <= core else np.concatenate([near, np.geomspace(core, reach, 300)[1:]])


def at_points(keys: SoftHead[np.ndarray], x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
    """Return G(x), for a head of one variable."""
    return keys(x[:, None])[:, 0]


def reach_of(keys: SoftHead[np.ndarray]) -> float:
    """Return the x beyond which the score of the last key exceeds all others by `NEGLIGIBLE_SCORE`."""
    slopes = keys.slopes[:, 0]
    gaps, behind = slopes[-1] - slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    return float(((NEGLIGIBLE_SCORE + np.maximum(behind, 0.0)) / gaps).max())


def tail(keys: SoftHead[np.ndarray], x: float) -> float:
    """Return a bound on |G(t) − (v + ut)| for t ≥ x ≥ reach_of(keys), with v and u of the key of the largest slope.

    Proof.  |G − (v + ut)| ≤ Σ_k e^{s_k − s_last}(|v_k − v| + |V_k − u|t), and t·e^{−gap·t} falls for t ≥ 1/gap.
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
    """Return the keys with values + values·z and carried parts + carried·z. z minimises max |G(x) − f|, |z| ≤ limit."""
    weights = keys.weights(x[:, None])
    columns = weights @ values if carried is None else weights @ values + x[:, None] * (weights @ carried)
    if not columns.shape[1]:
        return keys
    rest = (f - at_points(keys, x))[:, None]
    z, _ = fit_values(columns, rest, np.array([limit]), FIT_PASSES)
    moving = keys.carried if carried is None or keys.carried is None else keys.carried + (carried @ z)[:, :, None]
    return SoftHead(keys.slopes, keys.offsets, keys.values + values @ z, moving)


def pairs(p: int, sign: float) -> Float[np.ndarray, "keys pairs"]:
    """Return a column for each pair of keys about the middle, inner pairs first: 1 on the right, `sign` on the left."""
    unit, m = np.eye(p), p // 2
    return unit[:, p - m :] + sign * unit[:, :m][:, ::-1]


# Closed forms and lines

W = 0.2784645427610739
"""W(1/e), rounded up."""
ROUNDED_UP = 1 + 2.0**-50
"""Factor that covers the roundings of the few products and quotients in the formula of an error."""


def line_gate(name: str, eps: float, kinks: tuple[float, ...], lines: list[tuple[float, float]]) -> Gate:
    """Return the gate of two lines (value, slope) that meet at a kink, or of three with equal outer slopes.

    Theorem.  |gate − f| ≤ J·W(1/e)/β on all of R, J the difference of two neighbouring slopes.
    Weights.  Two lines have the scores 0, β(x − κ). Three have 0, β(x − lo), β(x − lo) + β(x − hi): the middle
              line leads between the kinks. β(x − lo) is then subtracted from all. The weights are the same, and each
              score has one rounding.
    Proof.    For two lines see above. Let u = x − lo, v = hi − x. Between the kinks the outer two lines are off by −Ju
              and +Jv, so the error is J(v·e^{−βv} − u·e^{−βu})/(1 + e^{−βu} + e^{−βv}): two terms of opposite signs.
              Neither exceeds J·s·e^{−s}/(1 + e^{−s})/β, s = βv or βu. Below lo, with t = lo − x, the others are off by
              −Jt, weighted e^{−βt}, and by +J(hi − lo), weighted e^{−β(hi − lo)}e^{−2βt}: again of opposite signs,
              and no larger.
    """
    slopes, offsets = (
        ((0.0, 1.0), (0.0, 0.0 - kinks[0])) if len(kinks) == 1 else ((-1.0, 0.0, 1.0), (kinks[0], 0.0, -kinks[1]))
    )
    jump = abs(lines[1][1] - lines[0][1])
    beta = power_of_two(jump * W / positive_number("eps", eps) * ROUNDED_UP)  # so that jump·W(1/e)/β ≤ eps
    values, carried = np.array(lines).T
    keys = SoftHead.of_one_variable(beta * np.array(slopes), beta * np.array(offsets), values, carried)
    return Gate(name, keys, jump * W / beta * ROUNDED_UP, max(abs(u) for _, u in lines), is_proved=True)


def leaky_relu(eps: float, slope: float = 0.01, name: str = "leaky_relu") -> Gate:
    """Return the gate with values slope·x, x."""
    return line_gate(name, eps, (0.0,), [(0.0, real_number("slope", slope)), (0.0, 1.0)])


def clamp_min(eps: float, lo: float = 0.5) -> Gate:
    """Return the gate of max(x, lo), with values lo, x."""
    lo = real_number("lo", lo)
    return line_gate("clamp_min", eps, (lo,), [(lo, 0.0), (0.0, 1.0)])


def clamp_max(eps: float, hi: float = 0.5) -> Gate:
    """Return the gate of min(x, hi), with values x, hi."""
    hi = real_number("hi", hi)
    return line_gate("clamp_max", eps, (hi,), [(0.0, 1.0), (hi, 0.0)])


def clip(eps: float, lo: float = -1.0, hi: float = 1.0, name: str = "clip") -> Gate:
    """Return the gate of min(max(x, lo), hi), with values lo, x, hi. No digits cancel, even for large x."""
    lo, hi = real_number("lo", lo), real_number("hi", hi)
    if not lo < hi:
        raise InputError(f"{name} needs lo < hi, found lo={lo:g}, hi={hi:g}")
    return line_gate(name, eps, (lo, hi), [(lo, 0.0), (0.0, 1.0), (hi, 0.0)])


def hardsigmoid(eps: float) -> Gate:
    """Return the gate of clip(x/6 + ½, 0, 1)."""
    gate = line_gate("hardsigmoid", eps, (-3.0, 3.0), [(0.0, 0.0), (0.5, 1 / 6), (1.0, 0.0)])
    return replace(gate, error=gate.error + 2.0**-54)  # 1/6 is stored rounded


def soft_threshold(eps: float, threshold: float = 0.5) -> Gate:
    """Return the gate of x ∓ λ beyond ±λ and 0 between, with values x + λ, 0, x − λ."""
    threshold = positive_number("threshold", threshold)
    lines = [(threshold, 1.0), (0.0, 0.0), (-threshold, 1.0)]
    return line_gate("soft_threshold", eps, (-threshold, threshold), lines)


def max_gate(eps: float, count: int = 2, name: str = "max") -> Gate:
    """Return the gate of the maximum of n wires. Each wire has one key, with score βx_i and value x_i.

    Theorem.  0 ≤ max x − Σ w_i x_i ≤ W((n − 1)/e)/β.
    Proof.    With d_i = max x − x_i the error is Σ d_i e^{−βd_i}/(1 + Σ e^{−βd_i}), summed over the other n − 1. It is
              at most λ if Σ (d_i − λ)e^{−βd_i} ≤ λ for all d. All terms have the same form, so the worst d_i are equal.
              (n − 1)s/(e^s + n − 1) is largest, W((n − 1)/e), where (s − 1)e^{s−1} = (n − 1)/e.
    """
    import scipy.special

    positive_number("eps", eps)
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise InputError(f"{name} needs two wires or more, found count={count!r}")
    largest = float(scipy.special.lambertw((count - 1) / math.e).real) * (1 + 1e-12)  # scipy's error is far smaller
    beta = power_of_two(largest / eps * ROUNDED_UP)
    unit = np.eye(count)
    slopes = beta * unit if name == "max" else -beta * unit
    keys = SoftHead(slopes, np.zeros(count), np.zeros((count, 1)), unit[:, None, :])
    return Gate(name, keys, largest / beta * ROUNDED_UP, 1.0, is_proved=True)


min_gate = functools.partial(max_gate, name="min")
"""The gate of min x = −max(−x), with scores −βx_i and values x_i."""


# Fitted keys

PRODUCT_VALUE_LIMIT = 10.0
"""Limit on the values of a product gate. With larger values fewer keys are enough, but rounding errors grow: at 10 one
digit is lost."""
IDENTITY_HINTS = {2: 8.5e-4, 3: 1.5e-5, 4: 9.8e-8, 5: 3.1e-9, 6: 3.2e-11, 7: 1.3e-12, 8: 3.6e-14}
"""Number of keys → the largest error measured on [−1, 1], rounded up. A test compares them with the gates."""
TANH_CUBIC = 0.044715
"""The coefficient of x³ in the tanh approximation of GELU."""
QUICK_GELU_SLOPE = 1.702
"""The factor of x in the sigmoid approximation of GELU."""


LATTICE_BITS = 14
"""Steps of lattices are multiples of 2⁻¹⁴. Up to 31 half steps are then exact in float32."""
VALUE_BITS = 24
"""Values of lattice gates are multiples of 2⁻²⁴, or of 2⁻²³ if they are larger than 1. Those of a pair then add up to 1
exactly in float32, so that one set of coefficients is enough for both signs of x."""


def lattice_sides(p: int) -> Float[np.ndarray, "one half"]:
    """Return the slopes of p equally spaced keys to the right of 0, as a row, in units of the step."""
    return (np.arange(p - p // 2, p) - (p - 1) / 2)[None]


@functools.lru_cache(maxsize=256)
def lattice_gate(name: str, recipe: FittedKeys, p: int) -> Gate:
    """Return the gate of one row of the recipe whose slopes are equally spaced."""
    step, height, error = recipe.lattice[p]
    step = round(step * 2.0**LATTICE_BITS) / 2.0**LATTICE_BITS
    slopes = (step * lattice_sides(p)[0]).tolist()
    row = tuple(slopes), height if p % 2 else (0.0, *height), error
    return solved_gate(name, replace(recipe, rows={p: row}), p, is_rounded=True)


@functools.lru_cache(maxsize=256)
def solved_gate(name: str, recipe: FittedKeys, p: int, is_rounded: bool = False) -> Gate:
    """Return the gate of one row of the recipe: its slopes and offsets, with values that minimise the largest error.

    If `is_rounded`, the values have VALUE_BITS.
    """
    right, height, _ = recipe.rows[p]
    middle = [0.0] * (p % 2)
    slopes = np.array([*(-a for a in reversed(right)), *middle, *right])
    offsets = np.array([*reversed(height), *middle, *height])
    if recipe.limit is None:
        keys = _ramp(recipe, slopes, offsets)
    else:  # ν_k on the right and −ν_k on the left, the limits at the ends
        ends = np.array([-recipe.limit, *[0.0] * (p - 2), recipe.limit])
        keys = _fitted(recipe, SoftHead.of_one_variable(slopes, offsets, ends), pairs(p, -1.0)[:, :-1])
    if is_rounded:
        carried = None if keys.carried is None else _few_bits(keys.carried)
        keys = SoftHead(keys.slopes, keys.offsets, _few_bits(keys.values), carried)
    reach = reach_of(keys)
    # |gate − f| is even, so x ≤ 0 is enough. There a ramp is small, and float64 resolves its error.
    size = max(1.0, float(np.abs(keys.values).max()))
    core = observed(lambda t: at_points(keys, -t) - recipe.below(-t), half_line(reach), size)
    return Gate(name, keys, max(core, tail(keys, reach) + recipe.tail(reach)), recipe.lipschitz)


def _few_bits(values: Float[np.ndarray, "keys ..."]) -> Float[np.ndarray, "keys ..."]:
    """Round the values of each pair of keys to multiples of one power of two, which float32 resolves for both."""
    largest = np.maximum(np.abs(values), np.abs(values[::-1]))
    unit = 2.0**-VALUE_BITS * np.exp2(np.ceil(np.log2(np.maximum(largest, 1.0))))
    return np.asarray(np.round(values / unit) * unit)


def _ramp(recipe: FittedKeys, slopes: np.ndarray, offsets: np.ndarray) -> SoftHead[np.ndarray]:
    """Return keys with carried parts ½ ± μ_k, 0 and 1 at the ends. A ramp that is not pure has equal values ν_k on both
    sides."""
    p, odd, even = len(slopes), pairs(len(slopes), -1.0)[:, :-1], pairs(len(slopes), 1.0)[:, :-1]
    if p % 2:
        even = np.concatenate([even, np.eye(p)[:, [p // 2]]], axis=1)
    even = even[:, :0] if recipe.is_pure else even
    carried = np.array([0.0, *[0.5] * (p - 2), 1.0])
    start = SoftHead.of_one_variable(slopes, offsets, np.zeros(p), carried)
    values, moving = (np.concatenate(both, axis=1) for both in ((0.0 * odd, even), (odd, 0.0 * even)))
    return _fitted(recipe, start, values, moving)


def _fitted(
    recipe: FittedKeys, keys: SoftHead[np.ndarray], values: np.ndarray, carried: np.ndarray | None = None
) -> SoftHead[np.ndarray]:
    reach = max(30.1, reach_of(keys))
    x = -np.concatenate([np.linspace(0.0, 1.0, 300)[1:] ** 1.5 * min(reach, 30.0), np.geomspace(30.0, reach, 100)[1:]])
    return solved(keys, x, recipe.below(x), values, carried)


def _gelu_tanh_below(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -100.0)  # below −100 the value is 0 in float64, and x³ might overflow
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + TANH_CUBIC * x**3))


def softplus(eps: float, beta: float = 1.0, *, on_lattice: bool = False) -> Gate:
    """Return the gate of log(1 + e^{βx})/β. Its values are affine in x, and x and 0 at the ends."""
    beta = positive_number("beta", beta)
    make = lattice_function_gate if on_lattice else function_gate
    gate = make("softplus", positive_number("eps", eps) * beta)
    # G(βx)/β carries the same multiples of x as G. Rounded, (u·β)/β is not 1 for every β: the error would grow with x.
    keys = replace(gate.keys.scaled(beta).combined(1 / beta), carried=gate.keys.carried)
    return Gate("softplus", keys, gate.error / beta * (1 + 1e-14), 1.0)


def logsigmoid(eps: float, *, on_lattice: bool = False) -> Gate:
    """Return the gate of log σ(x) = −softplus(−x)."""
    gate = softplus(eps, on_lattice=on_lattice)
    return replace(gate, name="logsigmoid", keys=gate.keys.scaled(-1.0).combined(-1.0))


# Products


@functools.lru_cache(maxsize=16)
def identity(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Return keys of an odd A(y) ≈ y on [−1, 1], with |v| ≤ about 10, and the largest error found.

    With n = p − 1, slopes (k − n/2)δ, offsets 2 log C(n, k), A is a quotient of polynomials of degree n in z = e^{δy},
    whose denominator Σ C(n, k)² z^k = (1 − z)ⁿP_n((1 + z)/(1 − z)) is that of the [n/n] Padé approximant of log z at 1,
    P_n Legendre's polynomial. Its error is of order 2n + 1 in δ, where binomial weights C(n, k) have order n + 1. Its
    coefficients are positive, so that it is a softmax. The end values of the approximant are ±2(1 + ½ + … + 1/n)/δ, and
    δ is chosen so that they are ±10. The values are then solved, which spreads the error evenly.
    """
    n = p - 1
    delta = 2 * sum(1 / k for k in range(1, p)) / PRODUCT_VALUE_LIMIT
    slopes = delta * (np.arange(p) - n / 2)
    offsets = np.array([2 * math.log(math.comb(n, k)) for k in range(p)])
    y = chebyshev(0.0, 1.0, 160)[1:]
    start = SoftHead.of_one_variable(slopes, offsets, np.zeros(p))
    keys = solved(start, y, y, pairs(p, -1.0), limit=1.2 * PRODUCT_VALUE_LIMIT)
    size = float(np.abs(keys.values).max())
    return keys, observed(lambda t: at_points(keys, t) - t, chebyshev(0.0, 1.0, 600), size)


def product_gate(eps: float, size_x: float = 1.0, size_y: float = 1.0) -> Gate:
    """Return the gate x·size_y·A(y/size_y) of x·y with the fewest keys, for |x| ≤ size_x and |y| ≤ size_y."""
    gate = _scaled_identity("product", eps, positive_number("size_x", size_x), positive_number("size_y", size_y))
    return replace(gate, is_product=True)


def square_gate(eps: float, size: float = 1.0) -> Gate:
    """Return the gate x·A(x) of x² for |x| ≤ size. One wire gives both the weights and the carrier."""
    size = positive_number("size", size)
    gate = _scaled_identity("square", eps, size, size)
    keys = SoftHead(gate.keys.slopes, gate.keys.offsets, 0.0 * gate.keys.values, gate.keys.values[:, :, None])
    return replace(gate, keys=keys, lipschitz=2 * size)


def _scaled_identity(name: str, eps: float, factor: float, size: float) -> Gate:
    """Return the gate with the fewest keys of A(y) ≈ y for |y| ≤ size, with factor·|A(y) − y| ≤ eps."""
    scale = factor * size

    def make(p: int) -> Gate:
        keys, error = identity(p)
        scaled = SoftHead(keys.slopes / size, keys.offsets, keys.values * size)
        return Gate(name, scaled, error * scale * (1 + 1e-14), factor, domain=(-size, size))

    return min_keys(name, eps, {p: hint * scale for p, hint in IDENTITY_HINTS.items()}, make)


# Curves and lines

WEIGHT_RATIO = 8.0
"""Ratio of neighbouring weights of the exponential at y = 0. The largest value is about this ratio, so rounding takes
one digit."""
EXP_HINTS = {2: 2.1e-2, 3: 5.8e-4, 4: 1.7e-5, 5: 5.2e-7, 6: 1.6e-8, 7: 4.9e-10, 8: 1.5e-11, 9: 4.8e-13}
"""Number of keys of the exponential → the largest error measured, rounded up. A test compares them with the gates."""
KINK_SHARE = 0.04
"""Share of eps for each kink. It is small, since a larger β costs no key."""
STEEP_LINE = 2.0**18
"""The least β of a line beside a curve on a lattice: one normal number in 3,000 is then close to the kink."""
STEP_BITS = 20
"""Number of bits of the step of such a curve. Up to 15 steps are then exact in float32, and the rounding of the step
moves e^{x/width} by 2⁻²¹/e = 1.8e-7 at most, which is 0 if 1/width has few bits."""
COARSE_HARDSWISH = 2e-7
"""The least eps for which 1/6 is stored as float32 holds it. The error of that is 4.6e-8."""
BEND_ERROR = 0.2415
"""max_s s²/(2(e^s + 1)), rounded up."""
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # the constants of PyTorch, in float64


@functools.lru_cache(maxsize=16)
def decay(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Return keys of A(y) ≈ e^{−y} on [0, ∞), and the largest error found.

    With scores k(y + log V), A is a quotient of polynomials of degree n = p − 1 in z = e^y, with the denominator
    D(z) = Σ (Vz)^k. Then D(z)(1/z − A) = 1/z − (a polynomial of degree n that the values choose). With t = 1/z in
    (0, 1] the error is |t^p − q(t)|/Σ V^k t^{n−k}, q of degree ≤ n and q(0) = 0. If the numerator is the Chebyshev
    polynomial, this is about 2·4^{−p}·V^{−n}. Values are close to V, except the last, which is 0: the limit at ∞.
    """
    slopes = np.arange(p) - (p - 2.0)  # near y = 0 the keys with most weight have small scores, and so little rounding
    offsets = slopes * math.log(WEIGHT_RATIO)
    t = (1 - np.cos(np.linspace(0.0, math.pi, 300)))[1:] / 2
    keys = solved(SoftHead.of_one_variable(slopes, offsets, np.zeros(p)), -np.log(t), t, np.eye(p)[:, :-1])
    reach = reach_of(keys)
    core = observed(lambda y: at_points(keys, y) - np.exp(-y), half_line(reach), 1.0)
    return keys, max(core, tail(keys, reach) + math.exp(-reach))


def exp(eps: float, hi: float = 0.0) -> Gate:
    """Return the gate of eˣ on (−∞, hi]."""
    hi = real_number("hi", hi)
    scale = math.exp(min(hi, 700.0))

    def make(p: int) -> Gate:
        keys, error = decay(p)
        found = keys.shifted(hi).scaled(-1.0).combined(scale)
        return Gate("exp", found, error * scale * (1 + 1e-14), scale * (1 + 1e-15), domain=(-math.inf, hi))

    return min_keys("exp", eps, {p: hint * scale for p, hint in EXP_HINTS.items()}, make)


def _with_line(group: SoftHead[np.ndarray], kink: float, beta: float, line: float) -> SoftHead[np.ndarray]:
    """Return the group with one more key of value line·x, which wins right of the kink for β > 0 and left for β < 0.

    Its score is steeper by |β| than the log-sum-exp of the group, and equal to it at the kink.
    """
    at_kink = np.array([[kink]])
    slope = float((group.weights(at_kink) @ group.slopes)[0, 0]) + beta
    offset = float(group.log_sum(at_kink)[0]) - slope * kink
    carried = np.zeros(group.num_keys) if group.carried is None else group.carried[:, 0, 0]
    return SoftHead.of_one_variable(
        np.append(group.slopes, slope),
        np.append(group.offsets, offset),
        np.append(group.values, 0.0),
        np.append(carried, line),
    )


def _near(kink: float, beta: float) -> np.ndarray:
    """Return points about a kink, where the weight passes from one piece to the other."""
    t = np.concatenate([np.linspace(0.0, 8.0, 200), np.linspace(8.0, NEGLIGIBLE_SCORE, 100)[1:]]) / beta
    return np.concatenate([kink - t[:0:-1], kink + t])


def elu(
    eps: float,
    alpha: float = 1.0,
    width: float = 1.0,
    scale: float = 1.0,
    name: str = "elu",
    *,
    on_lattice: bool = False,
) -> Gate:
    """Return the gate, one head, of scale·x above 0 and scale·α(e^{x/width} − 1) below.

    On a lattice the slopes of the curve are equally spaced exactly, in float32 too, and the line is so steep that few
    numbers are close to the kink.
    """
    alpha = positive_number("alpha", alpha)
    jump, bend = scale * abs(alpha / width - 1), scale * alpha / width**2
    share = KINK_SHARE * positive_number("eps", eps)
    least = STEEP_LINE if on_lattice else 128 / width
    beta = power_of_two(max(2 * jump * W / share, math.sqrt(2 * BEND_ERROR * bend / share), least))
    step = 1 / width
    if on_lattice:
        mantissa, exponent = math.frexp(step)
        step = math.ldexp(round(mantissa * 2.0**STEP_BITS), exponent - STEP_BITS)

    def make(p: int) -> Gate:
        keys, _ = decay(p)
        curve = keys.scaled(-step).combined(scale * alpha, constant=-scale * alpha)
        joined = _with_line(curve, 0.0, beta, scale)

        def error_at(x: np.ndarray) -> np.ndarray:
            below = scale * alpha * np.expm1(np.minimum(x, 0.0) / width)
            return at_points(joined, x) - np.where(x > 0, scale * x, below)

        reach = width * reach_of(keys)
        points = np.unique(np.concatenate([-half_line(reach, 12 * width), _near(0.0, beta)]))
        core = observed(error_at, points, scale * alpha)
        # Beyond 60/β on the right the group is behind by (β − (p − 1)/width)·x or more.
        most = scale * alpha * (1 + float(np.abs(keys.values).max()))
        right = math.exp(-NEGLIGIBLE_SCORE * (1 - (p - 1) / width / beta)) * (most + scale * NEGLIGIBLE_SCORE / beta)
        left = scale * alpha * (tail(keys, reach / width) + math.exp(-reach / width))
        left += math.exp(-(beta - p / width) * reach) * (most + scale * reach)
        return Gate(name, joined, max(core, right, left), scale * max(1.0, alpha / width))

    return min_keys(name, eps, {p: hint * scale * alpha for p, hint in EXP_HINTS.items()}, make)


def celu(eps: float, alpha: float = 1.0, *, on_lattice: bool = False) -> Gate:
    """Return the gate of x above 0 and α(e^{x/α} − 1) below. This function has no kink."""
    return elu(eps, alpha, positive_number("alpha", alpha), name="celu", on_lattice=on_lattice)


selu = functools.partial(elu, alpha=SELU_ALPHA, scale=SELU_SCALE, name="selu")
"""The gate of SELU, an ELU with the constants of PyTorch."""


def hardswish(eps: float) -> Gate:
    """Return the gate of 0 below −3, x(x + 3)/6 between, and x above 3.

    One head: a product of x with itself between two steep keys.
    """
    beta = power_of_two(0.5 * W / (KINK_SHARE * positive_number("eps", eps)) + 64.0)

    def make(p: int) -> Gate:
        keys, _ = identity(p)
        carried = keys.values[:, 0] / 2 + 0.5
        most = float(np.abs(carried).max())
        middle = SoftHead.of_one_variable(keys.slopes[:, 0] / 3, keys.offsets, np.zeros(p), carried)
        joined = _with_line(_with_line(middle, -3.0, -beta, 0.0), 3.0, beta, 1.0)

        def error_at(x: np.ndarray) -> np.ndarray:
            return at_points(joined, x) - x * np.clip(x + 3, 0.0, 6.0) / 6

        points = np.concatenate([_near(-3.0, beta), np.linspace(-3.0, 3.0, 800), _near(3.0, beta)])
        core = observed(error_at, np.unique(points), 3 * most)
        # Beyond ±(3 + 60/β) the middle is behind by (β − 2·its largest slope)·60/β and falls back further.
        steepest = float(np.abs(middle.slopes).max())
        weight = (p + 1) * math.exp(-NEGLIGIBLE_SCORE * (1 - 2 * steepest / beta))
        outside = weight * (3 + NEGLIGIBLE_SCORE / beta) * (1 + most)
        return Gate("hardswish", joined, max(core, outside), 1.5)

    return min_keys("hardswish", eps, {p: 1.5 * hint for p, hint in IDENTITY_HINTS.items()}, make)


def hardswish_product(eps: float) -> Gate:
    """Return the gate x·A(x) of hard-swish, with A the gate of clip(x/6 + ½, 0, 1): three keys and a product.

    Theorem.  |x·A(x) − x·clip(x/6 + ½, 0, 1)| ≤ J(3W(1/e)/β + 0.483/β²) + 9.1·|û − 1/6| on all of R, with J = û the
              stored 1/6.
    Proof.    Let t be the distance to the kink that is nearer. With û in place of 1/6 and kinks at ±3, the lines 0,
              ½ + û·x and 1 meet up to 3|û − 1/6|. By the proof of `_lines`, the error of A for lines that do meet is
              ≤ J·t·σ(−βt). Between the kinks |x| ≤ 3, and beyond |x| = 3 + t, where t²σ(−βt) ≤ 2·BEND_ERROR/β². The
              difference û − 1/6 moves x·A by w·x²|û − 1/6|, with w the weight of the middle key: at most 9|û − 1/6|
              between the kinks, and (3 + t)²e^{−βt} ≤ 9.1 beyond them, because β ≥ 128.
    """
    sixth = float(np.float32(1 / 6)) if positive_number("eps", eps) >= COARSE_HARDSWISH else 1 / 6
    off = 9.1 * (abs(sixth - 1 / 6) + 2.0**-55)  # 1/6 itself is rounded here
    beta = power_of_two(max(128.0, 0.6 * W / max(eps - off, eps / 2)))
    values, carried = np.array([0.0, 0.5, 1.0]), np.array([0.0, sixth, 0.0])
    keys = SoftHead.of_one_variable(
        beta * np.array([-1.0, 0.0, 1.0]), beta * np.array([-3.0, 0.0, -3.0]), values, carried
    )
    error = (sixth * (3 * W / beta + 2 * BEND_ERROR / beta**2) + off) * ROUNDED_UP
    return Gate("hardswish", keys, error, 1.5, is_proved=True, is_product=True)


@functools.lru_cache(maxsize=16)
def reciprocal(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Return keys of A(y) ≈ 1/(1 + y) on [0, ∞), and the largest error found."""
    return reciprocal_keys(p, *RECIPROCAL[p][:3])


def reciprocal_keys(p: int, K: float, step: float, first: float) -> tuple[SoftHead[np.ndarray], float]:
    """Return keys with slopes −e^{−s_j}, s_j evenly spaced, and solved values; and the largest error found.

    The weights have the same shape at every scale of 1 + y, as the function does.
    """
    s = first + step * np.arange(p)
    slopes, offsets = -np.exp(-s), -K * s
    no_values = SoftHead.of_one_variable(slopes, offsets, np.zeros(p))
    reach = reach_of(no_values)
    y = np.concatenate([[0.0], np.geomspace(1e-4, reach, 300)])
    keys = solved(no_values, y, 1 / (1 + y), np.eye(p)[:, :-1])
    points = np.concatenate([[0.0], np.geomspace(1e-5, reach, 1500)])
    core = observed(lambda t: at_points(keys, t) - 1 / (1 + t), points, float(np.abs(keys.values).max()))
    return keys, max(core, tail(keys, reach) + 1 / reach)


SIGN_ERROR = 0.4478
"""sup x/cosh²(x), rounded up. Divided by β, it bounds the error that tanh(βx) in place of the sign adds to softsign."""
SIGN_SHARE = 0.005
"""Largest part of the error of softsign that may come from tanh(βx). β is free, so that it is small."""


def softsign(eps: float) -> Gate:
    """Return the gate of x/(1 + |x|), in two layers.

    The first makes s = tanh(βx) and y = x·tanh(βx) by two keys, the second s·(1 − A(y)), A(y) ≈ 1/(1 + y).

    Error.  |s(1 − A(y)) − sy/(1 + y)| ≤ error of A on y ≥ 0. With T = |s|, |sy/(1 + y) − x/(1 + |x|)| is
            |x|(1 − T)(1 + T + T|x|)/((1 + |x|)(1 + T|x|)) ≤ |x|(1 − T²) = |x|/cosh²(βx) ≤ SIGN_ERROR/β.
    There are two layers, since float32 would not resolve keys of such different scales beside steep ones.
    """
    beta = power_of_two(SIGN_ERROR / (SIGN_SHARE * positive_number("eps", eps)))

    def make(p: int) -> Gate:
        keys, error = reciprocal(p)
        complement = keys.combined(-1.0, constant=1.0)
        return Gate("softsign", complement, error + SIGN_ERROR / beta, 1.0, sign=beta)

    return min_keys("softsign", eps, {p: row[-1] for p, row in RECIPROCAL.items()}, make)


# The gate of every activation

ACTIVATIONS = tuple(n for n, f in FUNCTIONS.items() if f.gate is not None and not isinstance(f.gate, PickedValue))
"""Functions of one variable of the expression language that have gates."""
OTHER_RECIPES: dict[str, tuple[str, GateRecipe]] = {
    # the weights of tanh, values x ± 1
    "tanhshrink": ("x - tanh(x)", ExactKeys((-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (1.0, 1.0), lipschitz=1.0)),
    # 1.702 is stored with a relative error of 2⁻⁵³, and s²σ′(s)/1.702 ≤ 0.26
    "quick_gelu": (
        f"x*sigmoid({QUICK_GELU_SLOPE}*x)",
        ExactKeys((0.0, QUICK_GELU_SLOPE), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), SILU_SLOPE_TURNS[1][2], 2.0**-54),
    ),
    # with z = eˣ, tanh(log(1 + z)) = ((1 + z)² − 1)/((1 + z)² + 1) = (2z + z²)/(2 + 2z + z²);
    # log 2 is stored to within 2⁻⁵⁴, which moves the output by |x|·w₀(1 − w₀)·2⁻⁵⁴, and |x|·w₀(1 − w₀) < ½
    "mish": (
        "x*tanh(softplus(x))",
        ExactKeys(
            *((0.0, 1.0, 2.0), (math.log(2), math.log(2), 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0)),
            *(1.088498161251728, 2.0**-55),
        ),
    ),
    # ½x(1 + tanh(√(2/π)(x + 0.044715x³)))
    "gelu_tanh": (
        f"x*sigmoid(2*sqrt(2/pi)*(x + {TANH_CUBIC}*x**3))",
        FittedKeys(
            _gelu_tanh_below,
            lambda x: x * math.exp(-1.59 * x),
            1.128993068658772,
            GELU_TANH,
            lattice=GELU_TANH_LATTICE,
        ),
    ),
}
"""Activations that have no name in the expression language: each as an expression, and its recipe."""


def function_gate(name: str, eps: float, hi: float = 0.0) -> Gate:
    """Return the cheapest gate of a function of the expression language. The gate of exp holds on (−∞, hi]."""
    return recipe_gate(name, FUNCTIONS[name].gate, eps, hi)


def lattice_function_gate(name: str, eps: float) -> Gate:
    """Return the gate with the fewest keys whose slopes are equally spaced."""
    return lattice_recipe_gate(name, FUNCTIONS[name].gate, eps)


def lattice_recipe_gate(name: str, recipe: GateRecipe | None, eps: float) -> Gate:
    assert isinstance(recipe, FittedKeys)
    errors = {p: row[-1] for p, row in recipe.lattice.items()}
    return min_keys(name, eps, errors, lambda p: lattice_gate(name, recipe, p))


def recipe_gate(name: str, recipe: GateRecipe | None, eps: float, hi: float = 0.0) -> Gate:
    """Return the cheapest gate of a function of one variable with an error ≤ eps."""
    match recipe:
        case ExactKeys(slopes, offsets, values, carried, lipschitz, error):
            positive_number("eps", eps)  # checked, and not needed
            numbers = map(np.array, (slopes, offsets, values, *([carried] if any(carried) else [])))
            return Gate(name, SoftHead.of_one_variable(*numbers), error, lipschitz, is_proved=True)
        case TwoLines(left, right):
            return line_gate(name, eps, (0.0,), [(0.0, left), (0.0, right)])  # relu is x·σ(βx)
        case FittedKeys() as recipe:
            errors = {p: row[-1] for p, row in recipe.rows.items()}
            return min_keys(name, eps, errors, lambda p: solved_gate(name, recipe, p))
        case Decay():
            return exp(eps, hi)
    raise InputError(f"there is no gate of one variable for {name}")


GATES: dict[str, Callable[..., Gate]] = {
    **{name: functools.partial(recipe_gate, name, recipe) for name, (_, recipe) in OTHER_RECIPES.items()},
    **{name: functools.partial(function_gate, name) for name in ACTIVATIONS},
    "leaky_relu": leaky_relu,
    "prelu": functools.partial(leaky_relu, slope=0.25, name="prelu"),
    "clamp_min": clamp_min,
    "clamp_max": clamp_max,
    "clip": clip,
    "hardtanh": functools.partial(clip, name="hardtanh"),
    "relu6": functools.partial(clip, lo=0.0, hi=6.0, name="relu6"),
    "hardsigmoid": hardsigmoid,
    "soft_threshold": soft_threshold,
    "softplus": softplus,
    "logsigmoid": logsigmoid,
    "elu": elu,
    "celu": celu,
    "selu": selu,
    "hardswish": hardswish,
    "softsign": softsign,
}
"""name → the cheapest gate with error ≤ eps: GATES["gelu"](1e-7). Parameters by name: GATES["elu"](1e-6, alpha=0.5)."""
FEW_EXPONENTIALS: dict[str, Callable[..., Gate]] = {
    "gelu": functools.partial(lattice_function_gate, "gelu"),
    "gelu_tanh": functools.partial(lattice_recipe_gate, "gelu_tanh", OTHER_RECIPES["gelu_tanh"][1]),
    "softplus": functools.partial(softplus, on_lattice=True),
    "logsigmoid": functools.partial(logsigmoid, on_lattice=True),
    "erf": functools.partial(lattice_function_gate, "erf"),
    "elu": functools.partial(elu, on_lattice=True),
    "celu": functools.partial(celu, on_lattice=True),
    "selu": functools.partial(selu, on_lattice=True),
    "hardswish": hardswish_product,
}
"""name → a gate that takes fewer exponentials than that of GATES, and more keys or a product. `convert` prefers it."""
