"""In-context universal approximation: from examples (x_i, f(x_i)) in the prompt, predict f(x), with a bound.

Theorem.  Nadaraya–Watson with inverse temperature β over N examples is within
              ω̂(√(fill² + (log N)/β + 2e)) + osc·(padding)     of f everywhere on the domain,
          ω̂ a concave modulus of continuity of f (Λt, if f is Λ-Lipschitz), fill the largest distance of a point of the
          domain to the nearest example, e the error of the squares layer.
Proof.    With energies E_i = |x − x_i|² ± e the softmax is the Gibbs measure p of βE: Σ p_i E_i − H(p)/β ≤ min E. So
          Σ p_i |x − x_i|² ≤ fill² + (log N)/β + 2e, as H ≤ log N. Then |Σ p_i f(x_i) − f(x)| ≤ Σ p_i ω̂(|x − x_i|) ≤
          ω̂(√(Σ p_i |x − x_i|²)), twice by Jensen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.incontext.differences import SLACK
from attnc.incontext.kernels import Kernel
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float

Modulus = Callable[[float], float]


def universal_bound(kernel: Kernel, modulus: Modulus, fill: float, oscillation: float) -> Bound:
    """sup |program − f| for a prompt whose fill distance is at most `fill`; `modulus` concave and not decreasing."""
    rows, u = kernel.prompt.rows, UNIT_ROUNDOFF[kernel.dtype]
    distance = math.sqrt(fill**2 + math.log(rows) / kernel.beta + 2 * kernel.square_error)
    # Scores of size ≤ 4β·size² are off by γ of that; weights by twice as much; averages round once more.
    scores = gamma(kernel.prompt.features + 8, u) * 4 * kernel.beta * kernel.size**2
    rounding = oscillation * math.expm1(min(4 * scores, 700.0)) + gamma(2 * rows + 8, u) * oscillation
    return Bound(
        (
            Term("approximation", float(up(modulus(float(up(distance, SLACK))), SLACK)), f"fill {fill:.3g}"),
            Term("padding", float(up(oscillation * u, SLACK)), "rows that are absent, and the sink"),
            Term("rounding", float(up(rounding, SLACK)), f"the average in {kernel.dtype}, targets centred"),
        )
    )


def beta_for(eps: float, lipschitz: float, fill: float, rows: int) -> float:
    """The least β (softest kernel) with Λ·√(fill² + (log N)/β) ≤ eps, up to the squares layer's error."""
    room = (eps / lipschitz) ** 2 - fill**2
    if not room > 0:
        raise InputError(
            f"a fill distance of {fill:.3g} cannot serve eps={eps:g}, Lipschitz constant {lipschitz:g}: they need a "
            f"fill distance below {eps / lipschitz:.3g}"
        )
    return max(1.0, math.log(rows)) / (0.99 * room)


def fill_distance(points: Float[np.ndarray, "n d"], box: Box, cells: int = 2**14) -> float:
    """An upper bound of max over the box of the distance to the nearest point.

    The largest at the centres of a grid of cells, and half a diagonal, since that distance is 1-Lipschitz.
    """
    from scipy.spatial import cKDTree

    each = max(1, round(cells ** (1 / box.d)))
    steps = (box.hi - box.lo) / each
    axes = [lo + step * (np.arange(each) + 0.5) for lo, step in zip(box.lo, steps, strict=True)]
    centres = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, box.d)
    distances = np.asarray(cKDTree(points).query(centres)[0])
    return float(up(float(distances.max()) + float(np.linalg.norm(steps)) / 2, 2**20))
