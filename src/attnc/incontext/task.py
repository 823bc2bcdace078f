"""What one fit on the prompt is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnc.errors import InputError
from attnc.incontext.acceleration import Schedule
from attnc.incontext.differences import MARGIN, Differences
from attnc.incontext.prompt import Prompt
from attnc.numerics.rounding import UNIT_ROUNDOFF


@dataclass(frozen=True)
class Task:
    """One fit: the prompt's sizes, the objective and the steps.

    The objective is Σ_i loss_i (mean: over the number of examples) + Σ_c (½ penalty_c w_c² + l1_c |w_c|). `reach`
    bounds |r_i| (squared loss) or v·x̃_i (Poisson, whose |y_i| are at most `targets`) on the way; `size` bounds the
    weights, for the gates.
    """

    prompt: Prompt
    schedule: Schedule
    differences: Differences
    reach: float
    penalty: tuple[float, ...]
    l1: tuple[float, ...] = ()
    size: float = 1.0
    mean: bool = False
    loss: str = "squared"
    targets: float = 0.0

    def __post_init__(self) -> None:
        for given in (self.penalty, self.l1 or self.penalty):
            if len(given) != self.prompt.num_weights or not all(number >= 0 for number in given):
                raise InputError(f"{self.prompt.num_weights} weights take as many penalties ≥ 0, found {given}")
        if self.loss not in ("squared", "poisson"):
            raise InputError(f"one-layer losses are squared and poisson, found {self.loss!r}; see glm for others")
        if self.l1 and self.schedule.method not in ("plain", "nesterov"):
            raise InputError(f"l1 takes plain or nesterov steps, found {self.schedule.method}")

    @property
    def keys(self) -> int:
        """How many tokens the memory has for this task."""
        return self.prompt.rows + (self.prompt.rows if self.mean else 1)

    @property
    def iterate(self) -> str:
        """The channels that hold the iterate: beside Nesterov's v, which is extrapolated, and v itself otherwise."""
        return "p" if self.schedule.method == "nesterov" else "v"

    @property
    def has_offset(self) -> bool:
        """Whether Σ_i y_i x̃_i is kept in the state."""
        return self.loss == "poisson"

    def sink(self, dtype: str) -> float:
        """C of the heads that make the gradient."""
        if self.loss == "squared":
            return self.differences.sink(self.keys, self.reach, dtype)
        return math.ceil(math.log(self.keys) + self.reach - math.log(UNIT_ROUNDOFF[dtype]) + MARGIN)
