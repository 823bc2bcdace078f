"""The progress of a fit, layer by layer: its objective, exact steps to compare with, and the attention of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, huber, logsumexp, softmax

from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.domain import Domain
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.turns import CURVATURES, HUBER, Examples
from attnc.ir.layers import Attention
from attnc.ir.program import Program
from attnc.ir.reference import evaluate
from attnc.ir.shapes import streams
from attnc.numerics.arrays import Float, Int

Array = np.ndarray


def _of_classes(z: Array, y: Array) -> Array:
    """Return the logistic loss over several classes, whose targets are one-hot."""
    return np.asarray(logsumexp(z, axis=1) - (y * z).sum(axis=1))


LOSSES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]]] = {
    "squared": (lambda z, y: (z - y) ** 2 / 2, lambda z, y: z - y),
    "poisson": (lambda z, y: np.exp(z) - y * z, lambda z, y: np.exp(z) - y),
    "softmax": (_of_classes, lambda z, y: softmax(z, axis=1) - y),
    "logistic": (lambda z, y: np.logaddexp(0, z) - y * z, lambda z, y: expit(z) - y),
    HUBER: (lambda z, y: huber(1.0, z - y), lambda z, y: np.clip(z - y, -1.0, 1.0)),
}
"""Name of a loss → its value at z = w·x̃ and y, and its derivative by z."""


AnyTask = Task | NewtonTask | CurvedTask


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of a task on its prompt, in plain numpy. With several targets it is their sum."""

    task: AnyTask
    examples: Examples

    @classmethod
    def of(cls, task: AnyTask, tokens: Float[np.ndarray, "rows width"]) -> Objective:
        """Return the objective on the tokens of a prompt without its padding. Penalty rows add to the penalties."""
        has_rows = isinstance(task, NewtonTask | CurvedTask)
        return cls(task, Domain(task.prompt, penalty=tuple(task.penalty), has_penalty_rows=has_rows).examples(tokens))

    @property
    def _share(self) -> float:
        """The factor of the sum over the examples."""
        if isinstance(self.task, CurvedTask):
            return 1 / CURVATURES[self.task.loss]
        return 1 / float(self.examples.omega.sum()) if self.task.mean else 1.0

    @property
    def _l1(self) -> Float[np.ndarray, " weights"]:
        return np.array(self.task.l1 or (0.0,) * self.task.prompt.num_weights)

    def __call__(self, w: Float[np.ndarray, " *shape"]) -> float:
        given = self.examples
        with np.errstate(over="ignore"):
            losses = given.omega @ LOSSES[self.task.loss][0](given.X @ w.T, given.y)
        return float((losses * self._share + (w**2) @ given.penalty / 2 + np.abs(w) @ self._l1).sum())

    def gradient(self, w: Float[np.ndarray, " *shape"]) -> Float[np.ndarray, " *shape"]:
        """Return the gradient of the smooth part."""
        given = self.examples
        with np.errstate(over="ignore", invalid="ignore"):
            residuals = LOSSES[self.task.loss][1](given.X @ w.T, given.y)
            sums = (given.X.T * given.omega) @ residuals
            return np.asarray(sums.T * self._share + given.penalty * w)

    def exact_trajectory(self, start: Float[np.ndarray, " *shape"]) -> Float[np.ndarray, " *shape"]:
        """Return the iterates of the same steps with exact gradients, in float64. The program approximates them."""
        if isinstance(self.task, CurvedTask):
            return self.task.steps.path(self.examples)[0]
        if isinstance(self.task, NewtonTask):
            return self._exact_turns(start, self.task)
        schedule, l1 = self.task.schedule, self._l1
        v = p = np.array(start, np.float64)
        path = [v]
        for eta, beta in schedule.pairs:
            moved = v - eta * self.gradient(v)
            step = np.sign(moved) * np.maximum(np.abs(moved) - eta * l1, 0.0)
            is_nesterov = schedule.iterate == "p"
            v, p = (step + beta * (step - p), step) if is_nesterov else (step + beta * (v - p), v)
            path.append(p if is_nesterov else v)
        return np.stack(path)

    def _exact_turns(self, start: np.ndarray, task: NewtonTask) -> Float[np.ndarray, " *shape"]:
        """Return the weights at the start and after every turn: w ← w − M∇, M ← 2M − MSM."""
        given = self.examples
        S = (given.X.T * given.omega) @ given.X + np.diag(given.penalty)
        M, path = np.eye(len(S)) / task.trace, [np.array(start, np.float64)]
        for _ in range(task.turns):
            path.append(path[-1] - self.gradient(path[-1]) @ M)
            M = 2 * M - M @ S @ M
        return np.stack(path)


def loss_path(
    objective: Objective, trajectory: Float[np.ndarray, "steps weights"], most: int = 400
) -> tuple[Int[np.ndarray, " shown"], Float[np.ndarray, " shown"]]:
    """Return the objective after at most `most` of the steps, including the first and the last."""
    steps = np.unique(np.linspace(0, len(trajectory) - 1, min(most, len(trajectory))).round().astype(int))
    return steps, np.array([objective(trajectory[t]) for t in steps])


def attention_map(
    program: Program, inputs: Sequence[np.ndarray], layer_name: str, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "heads queries keys"]:
    """Return the attention of chosen heads, or of all heads, in one layer of the main stream on one prompt."""
    at = next((i for i, layer in enumerate(program.unrolled_layers) if layer.name == layer_name), None)
    if at is None or not isinstance(program.unrolled_layers[at], Attention):
        names = [layer.name for layer in program.unrolled_layers if isinstance(layer, Attention)]
        raise InputError(f"the attention layers are {', '.join(names[:6])} … {names[-1]}, found {layer_name!r}")
    shape = streams(program)[1].steps[at].after
    patterns: dict[str, np.ndarray] = {}

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith(f"{layer_name}.head") and name.endswith(".pattern"):
            patterns[name] = array[0]
        return array

    evaluate(
        replace(program, layers=program.unrolled_layers[: at + 1], output_shape=shape),
        tuple(np.asarray(given)[None] for given in inputs),
        keep,
    )
    chosen = range(len(patterns)) if heads is None else heads
    return np.stack([patterns[f"{layer_name}.head{h}.pattern"] for h in chosen])
