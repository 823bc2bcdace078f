"""Newton turns with exact sums, in plain numpy: the steps that programs of `newton_glm` compute by attention.

F is the loss divided by its largest curvature at the start, plus the penalties. With H its Hessian and g its gradient
at w, a turn is  w ← w − ηMg,  M ← 2M − MHM,  from w = 0 and M = I/τ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from attnc.numerics.arrays import Float

Array = np.ndarray
CURVATURES = {"logistic": 0.25, "poisson": 1.0}
"""The largest second derivative of a loss at z = 0."""
MEANS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "logistic": (expit, lambda z: expit(z) * expit(-z)),
    "poisson": (np.exp, np.exp),
}
"""Name of a loss → its mean at z, and the derivative of the mean."""
REFINING = (0, 0, 12, 12, 24)
"""Powers of two that multiply the gradient in the last turns. It is small there, and its product with M is then as
accurate as the gradient."""
CAUTIOUS = 0.25
"""The length of a cautious step."""
CONVERGED = 1e-6
"""The largest last step, as a fraction of 1 + |w|, of turns that converge. The next step would be about its square."""


@dataclass(frozen=True)
class Turns:
    """The number and the lengths of the turns of a loss, and the factors of their gradients."""

    loss: str
    turns: int
    caution: int = 0
    trace: float = 1.0

    def length(self, turn: int) -> float:
        """Return the length η of the step of one turn, from 0."""
        return CAUTIOUS if turn < self.caution else 1.0

    def gain(self, turn: int) -> float:
        """Return the factor of the gradient in one turn, from 0."""
        last = turn - (self.turns - len(REFINING))
        return math.ldexp(1.0, REFINING[last]) if last >= 0 else 1.0

    def gradient(self, prompt: Examples, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, " weights"]:
        """Return g at w."""
        off = (MEANS[self.loss][0](prompt.X @ w) - prompt.y) * prompt.omega / CURVATURES[self.loss]
        return np.asarray(prompt.X.T @ off + prompt.penalty * w)

    def hessian(self, prompt: Examples, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, "weights weights"]:
        """Return H at w."""
        slopes = MEANS[self.loss][1](prompt.X @ w) * prompt.omega / CURVATURES[self.loss]
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
        _, norms, last = self.path(prompt)
        gains = np.array([self.gain(t) for t in range(self.turns)])
        return bool(last <= CONVERGED and (norms * gains <= reach).all())


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a prompt, their weights ω_i, and the penalties of the columns."""

    X: Float[np.ndarray, "rows weights"]
    y: Float[np.ndarray, " *shape"]
    omega: Float[np.ndarray, " rows"]
    penalty: Float[np.ndarray, " weights"]
