"""Gradient descent on the prompt, for the losses whose gradient is one layer: squared and Poisson.

The memory holds the prompt, the main stream one state token (v, p, g). A step is

    gradient   cross-attention, g ← Σ_i ∂loss_i: for the squared loss the difference heads (`differences`) on the scores
               r_i = v·x̃_i − y_i; for Poisson one head of score v·x̃_i, since a softmax sums e^{v·x̃_i}
    threshold  for lasso and elastic net: soft(u) = relu(u−t) − relu(−u−t), two gates of two keys for each weight
    update     affine: (v, p) ← the method's combination of v, p and ∇ = g + λ·v (`acceleration`)

The weights depend on the prompt's sizes and norm bounds, the penalties, the step sizes and T, and not on the examples.
Steps with equal numbers share their arrays: T equal steps are stored once. Several tasks run one after another, each
on its own rows of the memory. Each starts where the one before ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.incontext.acceleration import Penalty, Schedule
from attnc.incontext.differences import SINK_MARGIN, Differences
from attnc.incontext.prompt import ONE, SINK, TARGET, Prompt, named_head
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.rounding import UNIT_ROUNDOFF

GATE_ERROR = 0.2785
"""β times the error of one gate: sup |x·σ(βx) − relu(x)| = W(1/e)/β < 0.2785/β. A soft threshold has two gates."""


@dataclass(frozen=True)
class Task:
    """One fit: the prompt's sizes, the objective and the steps.

    The objective is Σ_i loss_i (their mean if `mean`) + Σ_c (½ penalty_c w_c² + l1_c |w_c|). On the way, `reach` bounds
    |r_i| for the squared loss, and v·x̃_i for Poisson, whose |y_i| are at most `targets`. `size` bounds the weights that
    enter the gates.
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
                raise InputError(
                    f"{self.prompt.num_weights} weights need {self.prompt.num_weights} penalties ≥ 0, found {given}"
                )
        if self.loss not in ("squared", "poisson"):
            raise InputError(f"one-layer losses are squared and poisson, found {self.loss!r}; see glm for others")
        if self.l1 and self.schedule.method not in ("plain", "nesterov"):
            raise InputError(f"l1 takes plain or nesterov steps, found {self.schedule.method}")

    @property
    def keys(self) -> int:
        """The number of tokens of this task in the memory."""
        return self.prompt.rows + (self.prompt.rows if self.mean else 1)

    @property
    def iterate(self) -> str:
        """The prefix of the channels that hold the iterate."""
        return self.schedule.iterate

    @property
    def has_offset(self) -> bool:
        """Whether Σ_i y_i x̃_i is kept in the state."""
        return self.loss == "poisson"

    def sink(self, dtype: str) -> float:
        """The score C of the sink, for the heads that make the gradient."""
        if self.loss == "squared":
            return self.differences.sink(self.keys, self.reach, dtype)
        return math.ceil(math.log(self.keys) + self.reach - math.log(UNIT_ROUNDOFF[dtype]) + SINK_MARGIN)


def gate_slope(task: Task, eta: float, dtype: str) -> float:
    """The slope β of the gates: the steepest that scores resolve, so that the gate error is of the size of rounding."""
    return math.ldexp(1.0, math.floor(-math.log2(UNIT_ROUNDOFF[dtype] * 8 * (task.size + eta * max(task.l1)))))


def descent_program(tasks: Sequence[Task], dtype: str = "float64") -> Program:
    """The program of all tasks: from the first weights and the prompts, one below the other, to the last weights."""
    first = tasks[0].prompt
    for task in tasks:
        if (task.prompt.features, task.prompt.intercept) != (first.features, first.intercept):
            raise InputError("tasks of one program share their features and intercept")
    builder = _DescentBuilder(tuple(tasks), dtype)
    shapes = ((first.num_weights,), (sum(t.prompt.rows for t in tasks), first.features + 2))
    return check(Program(builder.main(), shapes, shapes[0], builder.memory()))


@dataclass(frozen=True, eq=False)
class _DescentBuilder:
    tasks: tuple[Task, ...]
    dtype: str

    @cached_property
    def weights(self) -> tuple[str, ...]:
        prompt = self.tasks[0].prompt
        return tuple(name.removeprefix("x.") for name in prompt.regressors)

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts = ("v", "p", "g", "s") if any(task.has_offset for task in self.tasks) else ("v", "p", "g")
        return (*(f"{part}.{c}" for part in parts for c in self.weights), ONE)

    def memory(self) -> tuple[Layer, ...]:
        """The tokens of all tasks; masks keep those of other tasks out."""
        places = [task.prompt.place(task.mean, self.dtype) for task in self.tasks]
        if len(places) == 1:
            return (places[0],)
        rows, tokens = (
            np.cumsum([0, *sizes]) for sizes in ([t.prompt.rows for t in self.tasks], [t.keys for t in self.tasks])
        )
        width, shifts = len(self.tasks[0].prompt.inputs), zip(tokens, rows, strict=True)
        moved = [(p, np.array([token, 0, row, 0], np.int32)) for p, (token, row) in zip(places, shifts, strict=False)]
        weight = Sparse(
            (int(tokens[-1]), width + 1, int(rows[-1]), width),
            np.concatenate([place.weight.index + shift for place, shift in moved]),
            np.concatenate([place.weight.values for place in places]),
        )
        constant = Sparse(
            (int(tokens[-1]), width + 1),
            np.concatenate([place.constant.index + shift[:2] for place, shift in moved]),
            np.concatenate([place.constant.values for place in places]),
        )
        return (replace(places[0], weight=weight, constant=constant),)

    def mask(self, number: int) -> Mask | None:
        if len(self.tasks) == 1:
            return None
        segments = np.concatenate([np.full(task.keys, k, np.int32) for k, task in enumerate(self.tasks)])
        return Mask(np.array([number], np.int32), segments)

    def main(self) -> tuple[Layer, ...]:
        names = [f"w.{c}" for c in self.weights]
        begin = AffineBuilder(1, names, 1, self.channels)
        for c in self.weights:
            begin.link(0, f"v.{c}", 0, f"w.{c}")
            begin.link(0, f"p.{c}", 0, f"w.{c}")
        begin.set(0, ONE, 1.0)
        layers: list[Layer] = [begin.build("begin", self.dtype)]
        for number, task in enumerate(self.tasks):
            prefix = f"task{number + 1}." if len(self.tasks) > 1 else ""
            if number:
                layers.append(self._restart(f"{prefix}begin", self.tasks[number - 1].iterate))
            layers += self._steps(number, task, prefix)
        read = AffineBuilder(1, self.channels, 1, names)
        for c in self.weights:
            read.link(0, f"w.{c}", 0, f"{self.tasks[-1].iterate}.{c}")
        return (*layers, read.build("read", self.dtype))

    def _restart(self, name: str, iterate: str) -> Affine:
        """Both states become the last iterate."""
        return self._on_state({("v", iterate): 1.0, ("p", iterate): 1.0}, name)

    def _steps(self, number: int, task: Task, prefix: str) -> list[Layer]:
        mask, schedule = self.mask(number), task.schedule
        layers: list[Layer] = []
        if task.has_offset:
            moment = self._difference_heads(task, mask, "s", with_state=False)
            layers.append(Attention(f"{prefix}moment", moment, self.channels, residual=True, cross=True))
        gradient = Attention("gradient", self._gradient_heads(task, mask), self.channels, residual=True, cross=True)
        made: dict[tuple[float, float], list[Layer]] = {}
        for t, numbers in enumerate(zip(schedule.etas, schedule.betas, strict=True)):
            if numbers not in made:
                eta, beta = numbers
                made[numbers] = self._threshold(task, eta, beta) if task.l1 else [self._update(task, eta, beta)]
            layers += [replace(layer, name=f"{prefix}{layer.name}{t + 1}") for layer in (gradient, *made[numbers])]
        return layers

    def _gradient_heads(self, task: Task, mask: Mask | None) -> tuple[Head, ...]:
        if task.loss == "squared":
            return self._difference_heads(task, mask, "g", with_state=True)
        weights, regressors, C = self.weights, task.prompt.regressors, task.sink(self.dtype)
        same = {(c, c): 1.0 for c in regressors}
        exponentials = named_head(
            self.channels,
            (*task.prompt.inputs, SINK),
            {(f"v.{w}", c): 1.0 for w, c in zip(weights, regressors, strict=True)} | {(ONE, SINK): 1.0},
            same | {(SINK, SINK): C},
            same,
            {(c, f"g.{w}"): math.exp(C) for w, c in zip(weights, regressors, strict=True)},
            self.dtype,
            mask,
        )
        return (exponentials,)

    def _difference_heads(self, task: Task, mask: Mask | None, into: str, *, with_state: bool) -> tuple[Head, ...]:
        """Heads that add Σ r_i x̃_i to the channels `into`: r_i = v·x̃_i − y_i with the state, and y_i without it."""
        regressors, differences = task.prompt.regressors, task.differences
        C = task.sink(self.dtype) if with_state else differences.sink(task.keys, task.targets, self.dtype)
        residual = {(ONE, TARGET): -1.0 if with_state else 1.0}
        if with_state:
            residual |= {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, regressors, strict=True)}
        return differences.sum_heads(
            C,
            self.channels,
            (*task.prompt.inputs, SINK),
            residual=residual,
            sinks={(ONE, SINK): 1.0},
            keys={(c, c): 1.0 for c in (*regressors, TARGET)} | {(SINK, SINK): C},
            values={(c, c): 1.0 for c in regressors},
            outputs=[(c, f"{into}.{w}") for w, c in zip(self.weights, regressors, strict=True)],
            dtype=self.dtype,
            mask=mask,
        )

    def _update(self, task: Task, eta: float, beta: float) -> Affine:
        """One step with ∇ = g − s + λv."""
        entries = task.schedule.step(eta, beta, np.array(task.penalty))
        if task.has_offset:
            entries |= {(new, "s"): -entries[new, "g"] for new in "vp" if (new, "g") in entries} | {("s", "s"): 1.0}
        return self._on_state(entries, "update")

    def _on_state(self, entries: dict[tuple[str, str], Penalty], name: str) -> Affine:
        """The map of the state token with `entries[new, old]` for all weights; the constant 1 stays.

        Its arrays are built directly, since a program may have thousands of these maps.
        """
        num, parts = len(self.weights), [channel.partition(".")[0] for channel in self.channels]
        start = {part: parts.index(part) for part in dict.fromkeys(parts)}
        width, zeros, each = len(parts), np.zeros(num, np.int32), np.arange(num, dtype=np.int32)
        index = [np.stack([zeros, start[out] + each, zeros, start[into] + each], axis=1) for out, into in entries]
        values = np.concatenate([np.broadcast_to(value, num) for value in entries.values()]).astype(self.dtype)
        kept = values != 0
        weight = Sparse((1, width, 1, width), np.concatenate(index).astype(np.int32)[kept], values[kept])
        one = Sparse((1, width), np.array([[0, width - 1]], np.int32), np.ones(1, self.dtype))
        return Affine(name, weight, one, self.channels)

    def _threshold(self, task: Task, eta: float, beta: float) -> list[Layer]:
        """Token 1 + c holds u = (v − η∇)_c and t = η·l1_c, and gets soft(u). The last key has score and value 0."""
        num, channels = len(self.weights), (*self.channels, "u", "t", "soft")
        spread = AffineBuilder(1, self.channels, num + 2, channels)
        spread.set(0, ONE, 1.0)
        for k, c in enumerate(self.weights):
            spread.link(0, f"p.{c}", 0, f"p.{c}")
            spread.link(1 + k, "u", 0, f"v.{c}", 1 - eta * task.penalty[k])
            spread.link(1 + k, "u", 0, f"g.{c}", -eta)
            spread.set(1 + k, ONE, 1.0)
            spread.set(1 + k, "t", eta * task.l1[k])
            if task.has_offset:
                spread.link(0, f"s.{c}", 0, f"s.{c}")
                spread.link(1 + k, "u", 0, f"s.{c}", eta)
        slope = gate_slope(task, eta, self.dtype)
        own = np.arange(num + 2, dtype=np.int32)
        own[-1] = EVERY_QUERY
        sees = np.arange(num + 2, dtype=np.int32)
        sees[0] = num + 2  # the state sees the last key alone
        mask = Mask(sees, own)
        gates = []
        for sign in (1.0, -1.0):
            queries, keys = {("u", "on"): sign, ("t", "on"): -1.0}, {(ONE, "on"): slope}
            values, outputs = {("u", "soft"): sign, ("t", "soft"): -1.0}, {("soft", "soft"): sign}
            gates.append(named_head(channels, channels, queries, keys, values, outputs, self.dtype, mask))
        update = AffineBuilder(num + 2, channels, 1, self.channels)
        update.set(0, ONE, 1.0)
        for k, c in enumerate(self.weights):
            source = "soft" if task.l1[k] else "u"
            is_nesterov = task.schedule.method == "nesterov"
            update.link(0, f"v.{c}", 1 + k, source, 1 + beta if is_nesterov else 1.0)
            update.link(0, f"p.{c}", 1 + k, source, 1.0)
            update.link(0, f"v.{c}", 0, f"p.{c}", -beta if is_nesterov else 0.0)
            if task.has_offset:
                update.link(0, f"s.{c}", 0, f"s.{c}")
        return [
            spread.build("spread", self.dtype),
            Attention("threshold", tuple(gates), channels, residual=True),
            update.build("update", self.dtype),
        ]
