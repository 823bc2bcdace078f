"""An upper bound of the distance to the optimum of a ridge problem, enclosed at the examples at hand.

Theorem.  Let F(w) = c·Σ ℓ(x_i·w, y_i) + ½λ|w|² with ∂²ℓ/∂z² = s(z) > 0, and g = ∇F(w). On the ball of radius r around
          w let lo_i ≤ s(x_i·v) ≤ hi_i, M = c·Σ ½(lo_i + hi_i) x_i x_iᵀ + λ and E = c·Σ ½(hi_i − lo_i) x_i x_iᵀ. If the
          optimum w* lies in the ball, then
              |w − w*| ≤ |g|/(least eigenvalue of M − E),   and   |w − w*| ≤ |M⁻¹g| / (1 − ‖M⁻¹‖·‖E‖)
          if the denominator is positive. It lies in the ball for r = |g|/λ.
Proof.    g = H(w − w*), where H is the mean second derivative on the segment from w* to w, and |H − M| ≤ E as forms.
          So H ≥ M − E, and w − w* = M⁻¹g + M⁻¹(M − H)(w − w*). F is λ-strongly convex, hence |w − w*| ≤ |g|/λ. ∎
Each bound is the radius of a smaller ball, to which the theorem applies again. All is computed in enclosures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import flint
import numpy as np

MAX_BALLS = 60
"""Maximum number of balls, each inside of the one before. In the lab at most 30 are needed."""
BITS = 128
"""The precision of the enclosures: at an optimum in float64 its distance is then bounded to 17 digits."""
GAIN = 0.99
"""A smaller ball has at most this share of the radius before. Otherwise the search ends."""


def logistic_slopes(z: flint.arb) -> tuple[flint.arb, flint.arb]:
    """Return the least and the largest derivative of the logistic function on an interval. It falls with |z|."""

    def slope(t: flint.arb) -> flint.arb:
        return 1 / (2 + t.exp() + (-t).exp())

    far, near = flint.arb(z.abs_upper()), flint.arb(z.abs_lower())
    return slope(far), slope(near)


def exponential_slopes(z: flint.arb) -> tuple[flint.arb, flint.arb]:
    """Return the least and the largest derivative of the exponential function on an interval."""
    return flint.arb(z.lower()).exp(), flint.arb(z.upper()).exp()


def constant_slopes(z: flint.arb) -> tuple[flint.arb, flint.arb]:
    """Return the derivative of z, twice."""
    return flint.arb(1), flint.arb(1)


MEANS: dict[str, Callable[[flint.arb], flint.arb]] = {
    "least squares": lambda z: z,
    "logistic": lambda z: 1 / (1 + (-z).exp()),
    "poisson": lambda z: z.exp(),
}
"""The mean of an observation as a function of z = w·x, by the name of the loss."""
SLOPES = {"least squares": constant_slopes, "logistic": logistic_slopes, "poisson": exponential_slopes}
"""The range of its derivative on an interval."""


def distance_bound(
    loss: str, X: np.ndarray, y: np.ndarray, w: np.ndarray, *, share: float, ridge: float, known: float = math.inf
) -> float:
    """Return an upper bound of |w − w*|. `share` is the factor c, `ridge` is λ, and `known` another such bound."""
    with flint.ctx.workprec(BITS):
        n, d = X.shape
        A = flint.arb_mat(n, d, [flint.arb(v) for v in X.ravel().tolist()])
        at = flint.arb_mat(d, 1, [flint.arb(v) for v in w.tolist()])
        c, penalty, z = flint.arb(share), flint.arb(ridge), A * at
        off = flint.arb_mat(n, 1, [MEANS[loss](z[i, 0]) - flint.arb(v) for i, v in enumerate(y.tolist())])
        g = c * (A.transpose() * off) + penalty * at
        norms = [_norm([A[i, k] for k in range(d)]) for i in range(n)]
        radius = min(known, _above(_norm(g.entries()) / penalty))
        for _ in range(MAX_BALLS):
            ranges = [
                SLOPES[loss](flint.arb(z[i, 0].mid(), _above(z[i, 0].rad() + norms[i] * radius))) for i in range(n)
            ]
            found = _within(A, g, c, penalty, ranges)
            is_last = not found < GAIN * radius
            radius = min(radius, found)
            if is_last:
                break
        return radius


def _within(
    A: flint.arb_mat, g: flint.arb_mat, c: flint.arb, penalty: flint.arb, ranges: list[tuple[flint.arb, flint.arb]]
) -> float:
    """Return the smaller of the two bounds of the theorem, for derivatives within these ranges."""
    n, d = A.nrows(), A.ncols()
    identity = flint.arb_mat(d, d, [int(i == j) for i in range(d) for j in range(d)])

    def weighted(weights: list[flint.arb]) -> flint.arb_mat:
        return c * (A.transpose() * flint.arb_mat(n, d, [weights[i] * A[i, k] for i in range(n) for k in range(d)]))

    M = weighted([(lo + hi) / 2 for lo, hi in ranges]) + penalty * identity
    E = weighted([(hi - lo) / 2 for lo, hi in ranges])
    bounds = [_norm(g.entries()) / _least(M - E, penalty), _norm(g.entries()) / penalty]
    room = 1 - _norm(E.entries()) / _least(M, penalty)  # Frobenius, which is at least the largest eigenvalue
    if room > 0:
        bounds.append(_norm(M.solve(g).entries()) / room)
    return min(map(_above, bounds))


def _least(M: flint.arb_mat, floor: flint.arb) -> flint.arb:
    """Return a lower bound of the least eigenvalue of a symmetric matrix, which is at least `floor`.

    With V nearly orthogonal, it is at least that of VᵀMV over the norm of VᵀV, and Gershgorin's circles bound both.
    """
    d = M.nrows()
    middle = np.array([[float(M[i, j].mid()) for j in range(d)] for i in range(d)])
    if not np.isfinite(middle).all():  # the range of an exponential on a large ball
        return floor
    columns = np.linalg.eigh((middle + middle.T) / 2)[1]
    V = flint.arb_mat(d, d, [flint.arb(v) for v in columns.ravel().tolist()])
    B, square = V.transpose() * M * V, V.transpose() * V
    circles = range(d)
    least = min(float((B[i, i] - sum(abs(B[i, j]) for j in circles if j != i)).lower()) for i in circles)
    most = max(_above(sum((abs(square[i, j]) for j in circles), flint.arb(0))) for i in circles)
    return flint.arb(max(float(floor.lower()), least / most * (1 - 1e-15) if least > 0 else 0.0))


def _norm(entries: list[flint.arb]) -> flint.arb:
    """Return an upper bound of the 2-norm."""
    return sum((flint.arb(v.abs_upper()) ** 2 for v in entries), flint.arb(0)).sqrt()


def _above(value: flint.arb) -> float:
    """Return a float that is at least the value."""
    return float(np.nextafter(float(flint.arb(value).upper()), np.inf))
