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
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext.acceleration import Penalty, Schedule
from attnc.incontext.differences import Differences, Sizes, rounded_up, sink_score
from attnc.incontext.prompt import ONE, SINK, TARGET, Attending, Entries, Prompt
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma

if TYPE_CHECKING:
    from jaxtyping import Float

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

    losses: ClassVar[tuple[str, ...]] = ("squared", "poisson")
    token: ClassVar[int] = 0  # the number of the token that holds the iterate

    def __post_init__(self) -> None:
        for given in (self.penalty, self.l1 or self.penalty):
            if len(given) != self.prompt.num_weights or not all(number >= 0 for number in given):
                raise InputError(
                    f"{self.prompt.num_weights} weights need {self.prompt.num_weights} penalties ≥ 0, found {given}"
                )
        if self.loss not in self.losses:
            raise InputError(f"{type(self).__name__} takes the loss {' or '.join(self.losses)}, found {self.loss!r}")
        if self.l1 and self.schedule.method not in ("plain", "nesterov"):
            raise InputError(f"l1 takes plain or nesterov steps, found {self.schedule.method}")

    @property
    def sinks(self) -> int:
        """The number of sinks: one, or for a mean one for each row."""
        return self.prompt.rows if self.mean else 1

    @property
    def keys(self) -> int:
        """The number of tokens of this task in the memory."""
        return self.prompt.rows + self.sinks

    @property
    def iterate(self) -> str:
        """The prefix of the channels that hold the iterate."""
        return self.schedule.iterate

    @property
    def has_offset(self) -> bool:
        """Whether Σ_i y_i x̃_i is kept in the state."""
        return self.loss == "poisson"

    def program(self, dtype: str = "float64") -> Program:
        """The program of this task alone."""
        return descent_program([self], dtype)

    def inputs(self, start: np.ndarray, X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """The inputs of the program: the first weights and the prompt."""
        return [start, self.prompt.tokens(X, y)]

    def sink(self, dtype: str) -> float:
        """The score C of the sink, for the heads that make the gradient."""
        if self.loss == "squared":
            return self.differences.sink(self.keys, self.reach, dtype)
        return sink_score(self.keys, self.reach, dtype)

    def gradient_bound(self, x: float, weights: float, dtype: str = "float64") -> Bound:
        """A bound δ of |g of one gradient layer − the exact sum or mean|₂, for |x̃_i| ≤ x and |v| ≤ weights.

        For the squared loss it is the bound of the difference heads. For Poisson the head sums e^{v·x̃_i} itself, off by
        rounding and by the examples' share of the denominator; difference heads make the moment Σ y_i x̃_i.
        """
        rows, width = self.prompt.rows, self.prompt.num_weights + 1
        if self.loss == "squared":
            sizes = Sizes(rows, width, x, self.reach, self.reach + 2 * x * weights, self.mean)
            return self.differences.bound(sizes, dtype)
        u, C = UNIT_ROUNDOFF[dtype], self.sink(dtype)
        grown = (1 if self.mean else rows) * x * math.exp(self.reach)
        off = gamma(width + 3, u) * x * weights + 2 * u * (C + self.reach) + 2 * LIBM_ULPS * u + gamma(self.keys + 8, u)
        moment = self.differences.bound(Sizes(rows, 2, x, self.targets, self.targets, self.mean), dtype)
        sums = rounded_up(
            ("exponentials", grown * off, f"their sum in {dtype}"),
            ("shares", grown * self.keys * math.exp(self.reach - C), "of the denominator"),
        )
        return Bound((*sums.terms, *(Term(f"moment: {t.name}", t.value, t.reason) for t in moment.terms)))


def gate_slope(task: Task, eta: float, dtype: str) -> float:
    """The slope β of the gates: the steepest that scores resolve, so that the gate error is of the size of rounding."""
    return math.ldexp(1.0, math.floor(-math.log2(UNIT_ROUNDOFF[dtype] * 8 * (task.size + eta * max(task.l1)))))


def descent_program(tasks: Sequence[Task], dtype: str = "float64") -> Program:
    """Build the program that descends on one or more tasks, one after the other.

    Parameters
    ----------
    tasks : sequence of Task
        The tasks, for example `plan.task` of `plan_least_squares`. Each starts where the one before ended.
    dtype : {"float64", "float32"}
        The arithmetic of the program.

    Returns
    -------
    Program
        It takes the first weights and the prompts, one below the other, and returns the last weights.

    Raises
    ------
    InputError
        If the tasks differ in their features or their intercept.

    Examples
    --------
    >>> import numpy as np
    >>> from attnc.incontext import Norms, Prompt, descent_program, plan_least_squares
    >>> norms = Norms(x=1.0, y=2.0, L=1.0, mu=1.0)
    >>> plan = plan_least_squares(Prompt(rows=1, features=1), norms, penalty=(0.0,), accuracy=1e-6)
    >>> program = descent_program([plan.task])
    >>> weights = program(np.zeros((1, 1)), plan.task.prompt.tokens([[1.0]], [2.0])[None])
    >>> bool(abs(weights[0, 0] - 2.0) <= plan.bound.value)
    True
    """
    first = tasks[0].prompt
    for task in tasks:
        if (task.prompt.features, task.prompt.intercept) != (first.features, first.intercept):
            raise InputError("tasks of one program share their features and intercept")
    builder = _DescentBuilder(tuple(tasks), dtype)
    shapes = ((first.num_weights,), (sum(t.prompt.rows for t in tasks), first.features + 2))
    return check(Program(builder.main(), shapes, shapes[0], (builder.memory(),)))


@dataclass(frozen=True, eq=False)
class _DescentBuilder:
    tasks: tuple[Task, ...]
    dtype: str

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return self.tasks[0].prompt.weight_names

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts = ("v", "p", "g", "s") if any(task.has_offset for task in self.tasks) else ("v", "p", "g")
        return (*(f"{part}.{c}" for part in parts for c in self.weights), ONE)

    def memory(self) -> Affine:
        """The tokens of all tasks; masks keep those of other tasks out."""
        inputs = self.tasks[0].prompt.inputs
        rows = np.cumsum([0, *(task.prompt.rows for task in self.tasks)])
        tokens = np.cumsum([0, *(task.keys for task in self.tasks)])
        place = AffineBuilder(rows[-1], inputs, tokens[-1], (*inputs, SINK))
        for task, row, token in zip(self.tasks, rows, tokens, strict=False):
            task.prompt.place(place, row, token, task.mean)
        return place.build("place", self.dtype)

    def attending(self, number: int) -> Attending:
        """The state, which attends to the tokens of one task."""
        mask = None
        if len(self.tasks) > 1:
            segments = np.concatenate([np.full(task.keys, k, np.int32) for k, task in enumerate(self.tasks)])
            mask = Mask(np.array([number], np.int32), segments)
        return Attending(self.channels, (*self.tasks[0].prompt.inputs, SINK), self.dtype, mask)

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
            if number:  # both states become the last iterate
                last = self.tasks[number - 1].iterate
                layers.append(self._on_state({("v", last): 1.0, ("p", last): 1.0}, f"{prefix}begin"))
            layers += self._steps(number, task, prefix)
        read = AffineBuilder(1, self.channels, 1, names)
        for c in self.weights:
            read.link(0, f"w.{c}", 0, f"{self.tasks[-1].iterate}.{c}")
        return (*layers, read.build("read", self.dtype))

    def _steps(self, number: int, task: Task, prefix: str) -> list[Layer]:
        attending, schedule = self.attending(number), task.schedule
        layers: list[Layer] = []
        if task.has_offset:
            C = task.differences.sink(task.keys, task.targets, self.dtype)
            moment = self._difference_heads(task, attending, C, {(ONE, TARGET): 1.0}, "s")
            layers.append(Attention(f"{prefix}moment", moment, self.channels, residual=True, cross=True))
        heads = self._gradient_heads(task, attending)
        gradient = Attention("gradient", heads, self.channels, residual=True, cross=True)
        made: dict[tuple[float, float], list[Layer]] = {}
        for t, numbers in enumerate(zip(schedule.etas, schedule.betas, strict=True)):
            if numbers not in made:
                made[numbers] = self._threshold(task, *numbers) if task.l1 else [self._update(task, t)]
            layers += [replace(layer, name=f"{prefix}{layer.name}{t + 1}") for layer in (gradient, *made[numbers])]
        return layers

    def _gradient_heads(self, task: Task, attending: Attending) -> tuple[Head, ...]:
        regressors, C = task.prompt.regressors, task.sink(self.dtype)
        state = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, regressors, strict=True)}
        if task.loss == "squared":
            return self._difference_heads(task, attending, C, {(ONE, TARGET): -1.0} | state, "g")
        same = {(c, c): 1.0 for c in regressors}
        outputs = {(c, f"g.{w}"): math.exp(C) for w, c in zip(self.weights, regressors, strict=True)}
        return (attending.head(state | {(ONE, SINK): 1.0}, same | {(SINK, SINK): C}, same, outputs),)

    def _difference_heads(
        self, task: Task, attending: Attending, C: float, residual: Entries, into: str
    ) -> tuple[Head, ...]:
        """Heads that add Σ r_i x̃_i to the channels `into`; `residual` are the entries of W_Q that make r_i."""
        regressors = task.prompt.regressors
        keys = {(c, c): 1.0 for c in (*regressors, TARGET)}
        outputs = [(c, f"{into}.{w}") for w, c in zip(self.weights, regressors, strict=True)]
        return task.differences.sum_heads(attending, C, residual, keys, outputs)

    def _update(self, task: Task, t: int) -> Affine:
        """Step t with ∇ = g − s + λv."""
        entries = task.schedule.step(t, np.array(task.penalty))
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
        update = AffineBuilder(num + 2, channels, 1, self.channels)
        momentum = beta if task.schedule.method == "nesterov" else 0.0
        for layer in (spread, update):
            layer.set(0, ONE, 1.0)
        for k, c in enumerate(self.weights):
            spread.link(0, f"p.{c}", 0, f"p.{c}")
            spread.link(1 + k, "u", 0, f"v.{c}", 1 - eta * task.penalty[k])
            spread.link(1 + k, "u", 0, f"g.{c}", -eta)
            spread.set(1 + k, ONE, 1.0)
            spread.set(1 + k, "t", eta * task.l1[k])
            source = "soft" if task.l1[k] else "u"
            update.link(0, f"v.{c}", 1 + k, source, 1 + momentum)
            update.link(0, f"p.{c}", 1 + k, source, 1.0)
            update.link(0, f"v.{c}", 0, f"p.{c}", -momentum)
            if task.has_offset:
                spread.link(1 + k, "u", 0, f"s.{c}", eta)
                for layer in (spread, update):
                    layer.link(0, f"s.{c}", 0, f"s.{c}")
        units = range(1, num + 1)
        mask = Mask(  # the state sees the last key alone
            np.array([num + 2, *units, num + 1], np.int32), np.array([0, *units, EVERY_QUERY], np.int32)
        )
        slope, attending = gate_slope(task, eta, self.dtype), Attending(channels, channels, self.dtype, mask)
        gates = []
        for sign in (1.0, -1.0):
            queries, keys = {("u", "on"): sign, ("t", "on"): -1.0}, {(ONE, "on"): slope}
            values, outputs = {("u", "soft"): sign, ("t", "soft"): -1.0}, {("soft", "soft"): sign}
            gates.append(attending.head(queries, keys, values, outputs))
        return [
            spread.build("spread", self.dtype),
            Attention("threshold", tuple(gates), channels, residual=True),
            update.build("update", self.dtype),
        ]


def run_recorded(
    program: Program, inputs: Sequence[np.ndarray], start: np.ndarray, iterate: str, token: int = 0
) -> tuple[Float[np.ndarray, " weights"], Float[np.ndarray, "steps weights"]]:
    """Run the program, and record the weights after every step.

    Parameters
    ----------
    program : Program
        The program of one or more tasks.
    inputs : sequence of arrays
        The inputs of the program, without a batch axis.
    start : array of shape (weights,)
        The first weights.
    iterate : str
        The prefix of the channels that hold the weights, `task.iterate`.
    token : int
        The number of the token that holds them.

    Returns
    -------
    weights : array of shape (weights,)
        The last weights.
    trajectory : array of shape (steps + 1, weights)
        The first weights, and those after every layer whose name begins with `update`.

    Examples
    --------
    >>> import numpy as np
    >>> from attnc.incontext import Norms, Prompt, descent_program, plan_least_squares, run_recorded
    >>> norms = Norms(x=1.0, y=2.0, L=1.0, mu=0.5)
    >>> task = plan_least_squares(Prompt(rows=1, features=1), norms, penalty=(0.0,), steps=3, method="plain").task
    >>> start = np.zeros(1)
    >>> inputs = [start, task.prompt.tokens([[1.0]], [2.0])]
    >>> weights, trajectory = run_recorded(descent_program([task]), inputs, start, task.iterate)
    >>> trajectory.shape, bool(weights == trajectory[-1])
    ((4, 1), True)
    """
    path = [np.array(start, np.float64)]
    columns: dict[int, list[int]] = {}

    def watch(layer: Layer, state: np.ndarray) -> None:
        if not layer.name.rpartition(".")[2].startswith("update"):
            return
        key = id(layer.channels)
        if key not in columns:
            columns[key] = [i for i, name in enumerate(layer.channels) if name.startswith(f"{iterate}.")]
        path.append(state[token, columns[key]].astype(np.float64))

    with np.errstate(over="ignore", invalid="ignore"):
        out = run(program, inputs, watch)
    return np.asarray(out, np.float64), np.stack(path)
