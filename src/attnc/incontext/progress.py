"""A fit, layer by layer: its objective, exact steps to compare with, and the attention of chosen heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.engines.prompt import remember, run
from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.glm import GLMTask
from attnc.ir.layers import Attention, Layer
from attnc.ir.program import Program
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of a task on its prompt, in plain numpy."""

    task: Task | GLMTask
    X: Float[np.ndarray, "rows weights"]
    y: Float[np.ndarray, " rows"]

    @classmethod
    def of(cls, task: Task | GLMTask, tokens: Float[np.ndarray, "rows width"]) -> Objective:
        is_present = tokens[:, -2] != 0
        return cls(task, tokens[is_present, : task.prompt.num_weights], tokens[is_present, -1])

    @property
    def loss(self) -> str:
        return self.task.loss if isinstance(self.task, Task) else "logistic"

    @property
    def _weight(self) -> float:
        return 1 / len(self.y) if self.task.mean else 1.0

    @property
    def _l1(self) -> Float[np.ndarray, " weights"]:
        l1 = self.task.l1 if isinstance(self.task, Task) else ()
        return np.array(l1) if l1 else np.zeros(self.task.prompt.num_weights)

    def __call__(self, w: Float[np.ndarray, " weights"]) -> float:
        with np.errstate(over="ignore"):
            z = self.X @ w
            losses = {
                "squared": lambda: (z - self.y) ** 2 / 2,
                "poisson": lambda: np.exp(z) - self.y * z,
                "logistic": lambda: np.logaddexp(0, z) - self.y * z,
            }[self.loss]()
            return float(
                self._weight * losses.sum() + (np.array(self.task.penalty) * w**2).sum() / 2 + self._l1 @ np.abs(w)
            )

    def gradient(self, w: Float[np.ndarray, " weights"]) -> Float[np.ndarray, " weights"]:
        """The gradient of the smooth part."""
        from scipy.special import expit

        z = self.X @ w
        with np.errstate(over="ignore"):
            means = {"squared": lambda: z, "poisson": lambda: np.exp(z), "logistic": lambda: expit(z)}[self.loss]()
        residuals = means - self.y
        return self._weight * (self.X.T @ residuals) + np.array(self.task.penalty) * w

    def exact_trajectory(self, start: Float[np.ndarray, " weights"]) -> Float[np.ndarray, "steps weights"]:
        """The iterates of the same steps with exact gradients, in float64; the program approximates them."""
        schedule, l1 = self.task.schedule, self._l1
        v = p = np.array(start, np.float64)
        path = [v]
        for eta, beta in zip(schedule.etas, schedule.betas, strict=True):
            moved = v - eta * self.gradient(v)
            step = np.sign(moved) * np.maximum(np.abs(moved) - eta * l1, 0.0)
            if schedule.method == "nesterov":
                v, p = step + beta * (step - p), step
                path.append(p)
            else:
                v, p = step + beta * (v - p), v
                path.append(v)
        return np.stack(path)


def loss_path(
    objective: Objective, trajectory: Float[np.ndarray, "steps weights"], most: int = 400
) -> tuple[Int[np.ndarray, " shown"], Float[np.ndarray, " shown"]]:
    """The objective after at most `most` of the steps, the first and the last among them."""
    steps = np.unique(np.linspace(0, len(trajectory) - 1, min(most, len(trajectory))).round().astype(int))
    return steps, np.array([objective(trajectory[t]) for t in steps])


def attention_map(
    program: Program, inputs: Sequence[np.ndarray], layer_name: str, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "heads queries keys"]:
    """The attention of chosen heads, or of all, of one layer of the main stream on one prompt."""
    at = next((i for i, layer in enumerate(program.layers) if layer.name == layer_name), None)
    if at is None or not isinstance(program.layers[at], Attention):
        names = [layer.name for layer in program.layers if isinstance(layer, Attention)]
        raise InputError(f"the attention layers are {', '.join(names[:6])} … {names[-1]}, found {layer_name!r}")
    layer: Any = program.layers[at]
    memory = remember(program, inputs) if len(program.input_shapes) > 1 else None
    found: list[np.ndarray] = [np.asarray(inputs[0], np.float64).reshape(-1, np.shape(inputs[0])[-1])]

    def watch(now: Layer, state: np.ndarray) -> None:
        if at and now is program.layers[at - 1]:
            found[0] = state.copy()

    run(program, inputs, watch, memory)
    keyed = memory if layer.cross and memory is not None else found[0]
    maps = []
    for h in heads if heads is not None else range(len(layer.heads)):
        head = layer.heads[h]
        scores = found[0] @ head.W_Q @ (keyed @ head.W_K).T
        if head.mask is not None:
            scores = np.where(head.mask.visible(np.arange(len(scores)), slice(None)), scores, -np.inf)
        maps.append(softmax(scores))
    return np.stack(maps)
