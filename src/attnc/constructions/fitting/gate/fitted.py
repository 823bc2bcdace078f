"""Smooth activations on all of R, and products on a box, by a few keys with solved values.

The end keys of an activation carry its limits exactly. For x·y the keys carry x, and the weights at y average to y.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate.keys import (
    Gate,
    at_points,
    half_line,
    min_keys,
    observed,
    pairs,
    positive,
    reach_of,
    solved,
    tail,
)
from attnc.constructions.fitting.minimax import chebyshev
from attnc.functions.gate_recipes import FittedKeys
from attnc.functions.gate_table import GELU_TANH
from attnc.functions.logistic import SOFTPLUS, logistic
from attnc.ir.soft_head import SoftHead

PRODUCT_VALUE_LIMIT = 10.0
"""Limit of the values of a product gate: larger ones need fewer keys and have larger rounding errors."""
HINTS = {2: 8.5e-4, 3: 1.5e-5, 4: 9.8e-8, 5: 3.1e-9, 6: 3.2e-11, 7: 1.3e-12, 8: 3.6e-14}
"""Number of keys, and the largest error measured on [−1, 1], rounded up; a test compares both."""
TANH_CUBIC = 0.044715
"""The coefficient of x³ in the tanh approximation of GELU."""


def fitted_gate(name: str, recipe: FittedKeys, eps: float) -> Gate:
    """The cheapest row of the table whose error is ≤ eps."""
    errors = {p: row[-1] for p, row in recipe.rows.items()}
    return min_keys(name, eps, errors, lambda p: solved_gate(name, recipe, p))


@functools.lru_cache(maxsize=256)
def solved_gate(name: str, recipe: FittedKeys, p: int) -> Gate:
    """The gate of one row: its slopes and offsets, and the values that make the largest error least."""
    right, height, _ = recipe.rows[p]
    middle = [0.0] * (p % 2)
    slopes = np.array([*(-a for a in reversed(right)), *middle, *right])
    offsets = np.array([*reversed(height), *middle, *height])
    if recipe.limit is None:
        keys = _ramp(recipe, slopes, offsets)
    else:  # ν_k on the right and −ν_k on the left, the limits at the ends
        ends = np.array([-recipe.limit, *[0.0] * (p - 2), recipe.limit])
        keys = _fitted(recipe, SoftHead.of_one_variable(slopes, offsets, ends), pairs(p, -1.0)[:, :-1])
    reach = reach_of(keys)
    # |gate − f| is even: x ≤ 0 is enough, where a ramp is small and float64 hides nothing of it.
    size = max(1.0, float(np.abs(keys.values).max()))
    core = observed(lambda t: at_points(keys, -t) - recipe.below(-t), half_line(reach), size)
    return Gate(name, keys, max(core, tail(keys, reach) + recipe.tail(reach)), recipe.lipschitz)


def _ramp(recipe: FittedKeys, slopes: np.ndarray, offsets: np.ndarray) -> SoftHead[np.ndarray]:
    """Carried parts ½ ± μ_k, 0 and 1 at the ends; unless the ramp is pure, equal values ν_k on both sides."""
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


GELU_TANH_KEYS = FittedKeys(_gelu_tanh_below, lambda x: x * math.exp(-1.59 * x), 1.128993068658772, GELU_TANH)
"""x·σ(2√(2/π)(x + 0.044715x³)), which is ½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""


def softplus(eps: float, beta: float = 1.0) -> Gate:
    """log(1 + e^{βx})/β: values that are affine in x, x and 0 at the ends."""
    beta, recipe = positive("beta", beta), SOFTPLUS.gate
    assert isinstance(recipe, FittedKeys)
    gate = fitted_gate("softplus", recipe, positive("eps", eps) * beta)
    # G(βx)/β carries the same multiples of x as G. Rounded, (u·β)/β is not 1 for every β: the error would grow with x.
    keys = replace(gate.keys.scaled(beta).combined(1 / beta), carried=gate.keys.carried)
    return Gate("softplus", keys, gate.error / beta * (1 + 1e-14), 1.0)


def logsigmoid(eps: float) -> Gate:
    """log σ(x) = −softplus(−x)."""
    gate = softplus(eps)
    return replace(gate, name="logsigmoid", keys=gate.keys.scaled(-1.0).combined(-1.0))


# Products


@functools.lru_cache(maxsize=16)
def identity(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Keys of A(y) ≈ y on [−1, 1], odd, with |v| ≤ about 10, and the largest error found.

    With n = p − 1, slopes (k − n/2)δ, offsets 2 log C(n, k), A is a quotient of polynomials of degree n in z = e^{δy},
    whose denominator Σ C(n, k)² z^k = (1 − z)ⁿP_n((1 + z)/(1 − z)) is that of the [n/n] Padé approximant of log z at 1,
    P_n Legendre's polynomial. Its error is of order 2n + 1 in δ, where binomial weights C(n, k) have order n + 1; and
    its coefficients are positive, so that it is a softmax. The end values of the approximant are ±2(1 + ½ + … + 1/n)/δ:
    δ is chosen so that they are ±10. The values are solved, which spreads the error evenly.
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


@dataclass(frozen=True, eq=False)
class ProductGate:
    """x·A(y): |gate − x·y| ≤ error for |x| ≤ size_x, |y| ≤ size_y; it is linear in x."""

    keys: SoftHead[np.ndarray]  # A(y) ≈ y
    error: float
    size_x: float
    size_y: float

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys

    def build(self, circuit: Circuit, x: Wire, y: Wire) -> Wire:
        return circuit.gate(self.keys, y, x, name="product")


def product_gate(eps: float, size_x: float = 1.0, size_y: float = 1.0) -> ProductGate:
    """The fewest keys with an error ≤ eps for |x| ≤ size_x and |y| ≤ size_y: size_y·A(y/size_y)."""
    size_x, size_y = positive("size_x", size_x), positive("size_y", size_y)
    gate = _scaled_identity("product", eps, size_x, size_y)
    return ProductGate(gate.keys, gate.error, size_x, size_y)


def square_gate(eps: float, size: float = 1.0) -> Gate:
    """x² for |x| ≤ size: x·A(x), with weights and carrier from one wire."""
    size = positive("size", size)
    gate = _scaled_identity("square", eps, size, size)
    keys = SoftHead(gate.keys.slopes, gate.keys.offsets, 0.0 * gate.keys.values, gate.keys.values[:, :, None])
    return replace(gate, keys=keys, lipschitz=2 * size)


def _scaled_identity(name: str, eps: float, factor: float, size: float) -> Gate:
    """The fewest keys of A(y) ≈ y for |y| ≤ size, with factor·|A(y) − y| ≤ eps."""
    scale = factor * size

    def make(p: int) -> Gate:
        keys, error = identity(p)
        scaled = SoftHead(keys.slopes / size, keys.offsets, keys.values * size)
        return Gate(name, scaled, error * scale * (1 + 1e-14), factor, domain=(-size, size))

    return min_keys(name, eps, {p: hint * scale for p, hint in HINTS.items()}, make)
