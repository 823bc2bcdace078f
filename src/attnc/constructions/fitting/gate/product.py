"""x·y by one head: the keys carry x, the weights at y average to y."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate.fitted import FIT_PASSES, min_keys
from attnc.constructions.fitting.gate.keys import Gate, OutOfReach, at_points, observed, positive
from attnc.constructions.fitting.minimax import chebyshev, fit_values
from attnc.ir.soft_head import SoftHead

PRODUCT_VALUE_LIMIT = 10.0
"""Limit of the values of a product gate: larger ones need fewer keys and have larger rounding errors."""
HINTS = {2: 8.5e-4, 3: 1.5e-5, 4: 9.8e-8, 5: 3.1e-9, 6: 3.2e-11, 7: 1.3e-12, 8: 3.6e-14}
"""Number of keys, and the largest error measured on [−1, 1], rounded up; a test compares both."""


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
    m = p // 2
    weights = SoftHead.of_one_variable(slopes, offsets, np.zeros(p)).weights(y[:, None])
    odd = weights[:, p - m :] - weights[:, :m][:, ::-1]
    half = fit_values(odd, y[:, None], np.array([1.2 * PRODUCT_VALUE_LIMIT]), FIT_PASSES).values[:, 0]
    keys = SoftHead.of_one_variable(slopes, offsets, np.concatenate([-half[::-1], [0.0] * (p % 2), half]))
    return keys, observed(lambda t: at_points(keys, t) - t, chebyshev(0.0, 1.0, 600), float(np.abs(half).max()))


@dataclass(frozen=True, eq=False)
class ProductGate:
    """x·A(y): `build(circuit, x, y)`. |gate − x·y| ≤ error for |x| ≤ size_x, |y| ≤ size_y; it is linear in x."""

    error: float
    size_x: float
    size_y: float
    keys: SoftHead[np.ndarray]  # A(y) ≈ y
    name: str = "product"
    num_layers: int = 1
    is_proved: bool = False

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys

    @property
    def domain(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return (-self.size_x, self.size_x), (-self.size_y, self.size_y)

    @property
    def lipschitz(self) -> tuple[float, float]:
        """With respect to x and to y."""
        return self.size_y, self.size_x

    def build(self, circuit: Circuit, x: Wire, y: Wire) -> Wire:
        return circuit.gate(self.keys, y, x, name=self.name)


def product_gate(eps: float, size_x: float = 1.0, size_y: float = 1.0) -> ProductGate:
    """The fewest keys with an error ≤ eps for |x| ≤ size_x and |y| ≤ size_y."""
    size_x, size_y = positive("size_x", size_x), positive("size_y", size_y)
    scale = size_x * size_y
    share = positive("eps", eps) / scale
    for p, hint in HINTS.items():
        keys, error = identity(p)
        if 0.9 * hint <= share and error <= share:
            break
    else:
        raise OutOfReach("product", eps, error * scale, p)
    # size_y·A(y/size_y)
    scaled = SoftHead(keys.slopes / size_y, keys.offsets, keys.values * size_y)
    return ProductGate(error * scale * (1 + 1e-14), size_x, size_y, scaled)


def square_gate(eps: float, size: float = 1.0) -> Gate:
    """x² for |x| ≤ size: x·A(x), with weights and carrier from one wire."""
    size = positive("size", size)
    hints = {p: hint * size**2 for p, hint in HINTS.items()}
    return min_keys("square", eps, hints, lambda p: _square(p, size))


def _square(p: int, size: float) -> Gate:
    keys, error = identity(p)
    squared = SoftHead(keys.slopes / size, keys.offsets, np.zeros((p, 1)), keys.values[:, :, None] * size)
    return Gate.one_head("square", squared, error * size**2 * (1 + 1e-14), 2 * size, domain=(-size, size))
