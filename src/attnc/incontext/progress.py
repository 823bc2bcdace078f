"""The progress of a fit, layer by layer: its objective, exact steps to compare with, and the attention of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit

from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.newton import NewtonTask
from attnc.ir.layers import Attention
from attnc.ir.program import Program
from attnc.ir.reference import evaluate
from attnc.ir.shapes import streams
from attnc.numerics.arrays import Float, Int

Array = np.ndarray
LOSSES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]] = {
    "squared": (lambda z, y: (z - y) ** 2 / 2, lambda z: z),
    "poisson": (lambda z, y: np.exp(z) - y * z, np.exp),
    "logistic": (lambda z, y: np.logaddexp(0, z) - y * z, expit),
}
"""Name of a loss → its value at z = w·x̃ and y, and its mean function A′(z); the derivative by z is A′(z) − y."""


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of a task on its prompt, in plain numpy."""

    task: Task | NewtonTask
    X: Float[np.ndarray, "rows weights"]
    y: Float[np.ndarray, " rows"]

    @classmethod
    def of(cls, task: Task | NewtonTask, tokens: Float[np.ndarray, "rows width"]) -> Objective:
        """Return the objective on the tokens of a prompt without its padding. Penalty rows count as examples."""
        is_present = tokens.any(axis=1)
        return cls(task, tokens[is_present, : task.prompt.num_weights], tokens[is_present, -1])

    @property
    def _count(self) -> int:
        return len(self.y) if self.task.mean else 1

    @property
    def _l1(self) -> Float[np.ndarray, " weights"]:
        return np.array(self.task.l1 or (0.0,) * self.task.prompt.num_weights)

    def __call__(self, w: Float[np.ndarray, " weights"]) -> float:
        with np.errstate(over="ignore"):
            losses = LOSSES[self.task.loss][0](self.X @ w, self.y).sum()
        return float(losses / self._count + (np.array(self.task.penalty) * w**2).sum() / 2 + self._l1 @ np.abs(w))

    def gradient(self, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, " weights"]:
        """Return the gradient of the smooth part."""
        with np.errstate(over="ignore", invalid="ignore"):
            residuals = LOSSES[self.task.loss][1](self.X @ w) - self.y
            return np.asarray(self.X.T @ residuals / self._count + np.array(self.task.penalty) * w)

    def exact_trajectory(self, start: Float[np.ndarray, " weights"]) -> Float[np.ndarray, "steps weights"]:
        """Return the iterates of the same steps with exact gradients, in float64. The program approximates them."""
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

    def _exact_turns(self, start: np.ndarray, task: NewtonTask) -> Float[np.ndarray, "turns weights"]:
        """Return the weights at the start and after every turn: w ← w − M∇, M ← 2M − MSM."""
        S, M, path = self.X.T @ self.X, np.eye(len(start)) / task.trace, [np.array(start, np.float64)]
        for _ in range(task.turns):
            path.append(path[-1] - M @ self.gradient(path[-1]))
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
    at = next((i for i, layer in enumerate(program.layers) if layer.name == layer_name), None)
    if at is None or not isinstance(program.layers[at], Attention):
        names = [layer.name for layer in program.layers if isinstance(layer, Attention)]
        raise InputError(f"the attention layers are {', '.join(names[:6])} … {names[-1]}, found {layer_name!r}")
    shape = streams(program)[1].steps[at].after
    patterns: dict[str, np.ndarray] = {}

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith(f"{layer_name}.head") and name.endswith(".pattern"):
            patterns[name] = array[0]
        return array

    evaluate(
        replace(program, layers=program.layers[: at + 1], output_shape=shape),
        tuple(np.asarray(given)[None] for given in inputs),
        keep,
    )
    chosen = range(len(patterns)) if heads is None else heads
    return np.stack([patterns[f"{layer_name}.head{h}.pattern"] for h in chosen])
