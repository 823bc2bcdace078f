"""Newton turns with exact sums, in plain numpy: the steps that programs of `newton_glm` compute by attention.

F is the loss divided by its largest curvature at the start, plus the penalties. With H its Hessian and g its gradient
at w, a turn is  w ← w − ηMg,  M ← 2M − MHM,  from w = 0 and M = I/τ.

The Huber loss is r²/2 for |r| ≤ 1 and |r| − 1/2 beyond, r = w·x − y. Its Hessian jumps, so that H is S = Σ ω_i x_i x_iᵀ
plus the penalties instead, which is never smaller.

Theorem.  For the Huber loss, exact turns never raise F if the trace of S is at most τ.
Proof.    I/τ ≤ S⁻¹, and I − SM becomes its square in a turn, so M ≤ S⁻¹ and MSM ≤ M always. The curvature of F is at
          most S, so F(w − Mg) ≤ F(w) − g·Mg + ½ g·MSMg ≤ F(w) − ½ g·Mg. ∎
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnc.functions.logistic import logistic
from attnc.numerics.arrays import Float

Array = np.ndarray
HUBER = "huber"
CURVATURES = {"logistic": 0.25, "poisson": 1.0, HUBER: 1.0}
"""The largest second derivative of a loss at z = 0."""
SLOPES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]] = {
    "logistic": (lambda z, y: logistic(z) - y, lambda z: logistic(z) * logistic(-z)),
    "poisson": (lambda z, y: np.exp(z) - y, np.exp),
    HUBER: (lambda z, y: np.clip(z - y, -1.0, 1.0), np.ones_like),
}
"""Name of a loss → its derivative at (z, y), and the curvature of which H consists."""
REFINING = (0, 0, 12, 12, 24)
"""Powers of two that multiply the gradient in the last turns. It is small there, and its product with M is then as
accurate as the gradient."""
CAUTIOUS = 0.25
"""The length of a cautious step."""
CONVERGED = 1e-6
"""The largest last step, as a fraction of 1 + |w|, of turns that converge. The next step would be about its square."""


@dataclass(frozen=True)
class Turns:
    """The number and the lengths of the turns of a loss, and the factors of their gradients.

    `reach` bounds |w·x_i| and √λ_c·|w_c| on the way.
    """

    loss: str
    turns: int
    caution: int = 0
    trace: float = 1.0
    reach: float = math.inf

    def length(self, turn: int) -> float:
        """Return the length η of the step of one turn, from 0."""
        return CAUTIOUS if turn < self.caution else 1.0

    def gain(self, turn: int) -> float:
        """Return the factor of the gradient in one turn, from 0."""
        last = turn - (self.turns - len(REFINING))
        return math.ldexp(1.0, REFINING[last]) if last >= 0 else 1.0

    def gradient(self, prompt: Examples, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, " weights"]:
        """Return g at w."""
        off = SLOPES[self.loss][0](prompt.X @ w, prompt.y) * prompt.omega / CURVATURES[self.loss]
        return np.asarray(prompt.X.T @ off + prompt.penalty * w)

    def hessian(self, prompt: Examples, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, "weights weights"]:
        """Return H at w."""
        return self._weighted(prompt, SLOPES[self.loss][1](prompt.X @ w))

    def curvature(self, prompt: Examples, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, "weights weights"]:
        """Return the Hessian of F at w. It is H, except for the Huber loss."""
        if self.loss != HUBER:
            return self.hessian(prompt, w)
        return self._weighted(prompt, (np.abs(prompt.X @ w - prompt.y) < 1).astype(float))

    def _weighted(self, prompt: Examples, curvatures: Float[np.ndarray, " rows"]) -> np.ndarray:
        slopes = curvatures * prompt.omega / CURVATURES[self.loss]
        return np.asarray((prompt.X.T * slopes) @ prompt.X + np.diag(prompt.penalty))

    def path(self, prompt: Examples) -> tuple[Float[np.ndarray, "steps weights"], Float[np.ndarray, " turns"], float]:
        """Return the weights at the start and after every turn, the norms of the gradients, and the last step."""
        d = prompt.X.shape[1]
        w, M = np.zeros(d), np.eye(d) / self.trace
        found, norms, step = [w], [], np.zeros(d)
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(self.turns):
                g, H = self.gradient(prompt, w), self.hessian(prompt, w)
                step = self.length(t) * (M @ g)
                w, M = w - step, 2 * M - M @ H @ M
                norms.append(float(np.linalg.norm(g)))
                found.append(w)
            last = float(np.abs(step).max() / (1 + np.abs(w).max()))
        return np.stack(found), np.array(norms), last if np.isfinite(last) else math.inf

    def converges(self, prompt: Examples, reach: float) -> bool:
        """Return whether the turns converge, with gradients of at most `reach` after their factors."""
        path, norms, last = self.path(prompt)
        gains = np.array([self.gain(t) for t in range(self.turns)])
        is_within = bool(last <= CONVERGED and (norms * gains <= reach).all())
        return is_within and (self.reach == math.inf or self.reached(prompt, path) <= self.reach)

    @staticmethod
    def reached(prompt: Examples, path: Float[np.ndarray, "steps weights"]) -> float:
        """Return the largest |w·x_i| and √λ_c·|w_c| on a path."""
        scores, roots = np.abs(path @ prompt.X.T), np.abs(path * np.sqrt(prompt.penalty))
        return float(max(scores.max(initial=0), roots.max(initial=0)))


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a prompt, their weights ω_i, and the penalties of the columns."""

    X: Float[np.ndarray, "rows weights"]
    y: Float[np.ndarray, " *shape"]
    omega: Float[np.ndarray, " rows"]
    penalty: Float[np.ndarray, " weights"]
