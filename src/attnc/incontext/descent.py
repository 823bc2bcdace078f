"""Gradient descent on the prompt, for losses whose gradient is one layer: squared, and Poisson.

The memory holds the prompt, the main stream one state token (v, p, g). A step is

    gradient   cross-attention, g ← Σ_i ∂loss_i: for the squared loss the difference heads (`differences`) on the scores
               r_i = v·x̃_i − y_i; for Poisson one head of score v·x̃_i, since e^{v·x̃_i} is what a softmax sums
    threshold  lasso and elastic net: soft(u) = relu(u−t) − relu(−u−t), two gates of two keys for each weight
    update     affine: (v, p) ← the method's combination of v, p and ∇ = g + λ·v (`acceleration`)

The weights know the prompt's sizes and norm bounds, the penalties, step sizes and T; of the examples they know nothing.
Steps with equal numbers share their arrays: T steps are stored once. Several tasks run one after another, each on
its own rows of the memory, from where the one before ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.incontext.prompt import ONE, SINK, TARGET
from attnc.incontext.task import Task
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.rounding import UNIT_ROUNDOFF

GATE_ERROR = 0.2785
"""sup |x·σ(βx) − relu(x)| = W(1/e)/β < 0.2785/β (two gates make a soft threshold)."""


def gate_slope(task: Task, eta: float, dtype: str) -> float:
    """β of the gates: as steep as scores still resolve, so that the gate error is of the size of rounding."""
    return math.ldexp(1.0, math.floor(-math.log2(UNIT_ROUNDOFF[dtype] * 8 * (task.size + eta * max(task.l1)))))


def descent_program(tasks: Sequence[Task], dtype: str = "float64") -> Program:
    """Inputs: the first weights (num_weights,), and the prompts one below the other. Output: the last weights."""
    first = tasks[0].prompt
    for task in tasks:
        if (task.prompt.features, task.prompt.intercept) != (first.features, first.intercept):
            raise InputError("tasks of one program share their features and intercept")
    builder = _Builder(tuple(tasks), dtype)
    shapes = ((first.num_weights,), (sum(t.prompt.rows for t in tasks), first.features + 2))
    return check(Program(builder.main(), shapes, shapes[0], builder.memory()))


@dataclass(frozen=True, eq=False)
class _Builder:
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
        """The places of all tasks side by side; a mask tells whose they are."""
        if len(self.tasks) == 1:
            return (self.tasks[0].prompt.place(self.tasks[0].mean, self.dtype),)
        inputs = self.tasks[0].prompt.inputs
        rows, tokens = sum(t.prompt.rows for t in self.tasks), sum(t.keys for t in self.tasks)
        index, values = [], []
        constant_index, constant_values = [], []
        row = token = 0
        for task in self.tasks:
            place = task.prompt.place(task.mean, self.dtype)
            index.append(place.weight.index + np.array([token, 0, row, 0], np.int32))
            constant_index.append(place.constant.index + np.array([token, 0], np.int32))
            values.append(place.weight.values)
            constant_values.append(place.constant.values)
            row, token = row + task.prompt.rows, token + task.keys
        weight = replace(
            place.weight,
            shape=(tokens, len(inputs) + 1, rows, len(inputs)),
            index=np.concatenate(index),
            values=np.concatenate(values),
        )
        constant = replace(
            place.constant,
            shape=(tokens, len(inputs) + 1),
            index=np.concatenate(constant_index),
            values=np.concatenate(constant_values),
        )
        return (replace(place, weight=weight, constant=constant),)

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
        """From where the task before ended, at rest."""
        return self._on_state({("v", iterate): 1.0, ("p", iterate): 1.0}, name)

    def _steps(self, number: int, task: Task, prefix: str) -> list[Layer]:
        mask, schedule = self.mask(number), task.schedule
        layers: list[Layer] = []
        if task.has_offset:
            moment = tuple(self._difference_heads(task, mask, "s", with_state=False))
            layers.append(Attention(f"{prefix}moment", moment, self.channels, residual=True, cross=True))
        if task.loss == "squared":
            heads = tuple(self._difference_heads(task, mask, "g", with_state=True))
        else:
            heads = (self._exponential_head(task, mask),)
        gradient = Attention("gradient", heads, self.channels, residual=True, cross=True)
        made: dict[tuple[float, float], list[Layer]] = {}
        for t, numbers in enumerate(zip(schedule.etas, schedule.betas, strict=True)):
            if numbers not in made:
                eta, beta = numbers
                made[numbers] = self._threshold(task, eta, beta) if task.l1 else [self._update(task, eta, beta)]
            layers += [replace(layer, name=f"{prefix}{layer.name}{t + 1}") for layer in (gradient, *made[numbers])]
        return layers

    def _difference_heads(self, task: Task, mask: Mask | None, into: str, *, with_state: bool) -> list[Head]:
        """Σ r_i x̃_i with r_i = v·x̃_i − y_i, or with r_i = y_i, into the channels `into`."""
        regressors, memory = task.prompt.regressors, (*task.prompt.inputs, SINK)
        differences = task.differences
        C = task.sink(self.dtype) if with_state else differences.sink(task.keys, task.targets, self.dtype)
        by = (*regressors, TARGET, SINK)
        W_K = projection(memory, by, {(c, c): 1.0 for c in by[:-1]} | {(SINK, SINK): C}, self.dtype)
        W_V = projection(memory, regressors, {(c, c): 1.0 for c in regressors}, self.dtype)
        heads = []
        for j in differences.nodes:
            scale = j * differences.eps
            queries = {(ONE, TARGET): -scale if with_state else scale, (ONE, SINK): 1.0}
            if with_state:
                queries |= {(f"v.{w}", c): scale for w, c in zip(self.weights, regressors, strict=True)}
            weight = differences.weight(j) * math.exp(C)
            outputs = {(c, f"{into}.{w}"): weight for w, c in zip(self.weights, regressors, strict=True)}
            W_Q = projection(self.channels, by, queries, self.dtype)
            heads.append(Head(W_Q, W_K, W_V, projection(regressors, self.channels, outputs, self.dtype), mask))
        return heads

    def _exponential_head(self, task: Task, mask: Mask | None) -> Head:
        """Σ e^{v·x̃_i} x̃_i."""
        regressors, memory = task.prompt.regressors, (*task.prompt.inputs, SINK)
        C = task.sink(self.dtype)
        by = (*regressors, SINK)
        queries = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, regressors, strict=True)} | {(ONE, SINK): 1.0}
        outputs = {(c, f"g.{w}"): math.exp(C) for w, c in zip(self.weights, regressors, strict=True)}
        return Head(
            projection(self.channels, by, queries, self.dtype),
            projection(memory, by, {(c, c): 1.0 for c in regressors} | {(SINK, SINK): C}, self.dtype),
            projection(memory, regressors, {(c, c): 1.0 for c in regressors}, self.dtype),
            projection(regressors, self.channels, outputs, self.dtype),
            mask,
        )

    def _update(self, task: Task, eta: float, beta: float) -> Affine:
        """With the step v − η∇, ∇ = g − s + λv: Nesterov has p' = step, v' = p' + β(p' − p), the others
        v' = step + β(v − p), p' = v."""
        damped = 1 - eta * np.array(task.penalty)
        entries: dict[tuple[str, str], float | np.ndarray] = {("v", "p"): -beta}
        if task.schedule.method == "nesterov":
            for out, factor in (("p", 1.0), ("v", 1 + beta)):
                entries |= {(out, "v"): factor * damped, (out, "g"): -factor * eta}
                entries |= {(out, "s"): factor * eta} if task.has_offset else {}
        else:
            entries |= {("p", "v"): 1.0, ("v", "v"): damped + beta, ("v", "g"): -eta}
            entries |= {("v", "s"): eta} if task.has_offset else {}
        entries |= {("s", "s"): 1.0} if task.has_offset else {}
        return self._on_state(entries, "update")

    def _on_state(self, entries: dict[tuple[str, str], float | np.ndarray], name: str) -> Affine:
        """The map of the state token with `entries[to, from]` for all weights; the constant 1 stays.

        Written out as arrays: a program has thousands of these.
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
        """Token 1 + c holds u = (v − η∇)_c and t = η·l1_c, and gets soft(u); the last key has score and value 0."""
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
            queries = {("u", "on"): sign, ("t", "on"): -1.0}
            values = {("u", "soft"): sign, ("t", "soft"): -1.0}
            gates.append(
                Head(
                    projection(channels, ("on",), queries, self.dtype),
                    projection(channels, ("on",), {(ONE, "on"): slope}, self.dtype),
                    projection(channels, ("soft",), values, self.dtype),
                    projection(("soft",), channels, {("soft", "soft"): sign}, self.dtype),
                    mask,
                )
            )
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
