"""Gradient descent on the prompt, by layers of attention.

For the squared and the Poisson loss, one layer computes the gradient. The memory holds the prompt, and the main stream
holds one state token (v, p, g). A step is

    gradient   cross-attention, g ← Σ_i ∂loss_i: for the squared loss the difference heads (`differences`) on the scores
               r_i = v·x̃_i − y_i; for Poisson one head of score v·x̃_i, since a softmax sums e^{v·x̃_i}
    threshold  for lasso and elastic net: soft(u) = relu(u−t) − relu(−u−t), two gates of two keys for each weight
    update     affine: (v, p) ← the method's combination of v, p and ∇ = g + λ·v (`acceleration`)

The weights depend on the prompt's sizes and norm bounds, the penalties, the step sizes and T. They do not depend on the
examples. Steps with equal coefficients share their arrays: T equal steps are stored once. Several tasks run one after
another, each on its own rows of the memory. Each task starts where the one before ended.

Every other smooth loss A(w·x̃) − y·w·x̃ needs two layers for a gradient (`GLMTask`). Every token carries one vector:
example i carries x̃_i, the tokens v, p and g carry the states and the gradient, and key token k carries a_k·v. A step is

    read       example i queries the key tokens, with score a_k·v·x̃_i + c_k and value v_k, and gets μ_i = A′(v·x̃_i).
               For the logistic loss two keys are exact: softmax([v·x̃_i, 0]) = (μ_i, 1 − μ_i)
    sum        g queries the examples: difference heads on r_i = μ_i − y_i give g = Σ r_i x̃_i (`differences`)
    update     affine: v, p and the keys from v, p, g (`acceleration`)

Masks let an example see only the key tokens, and g only the examples and the sinks. All others see the null token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext.acceleration import Penalty, Schedule
from attnc.incontext.asking import ASKED, ask
from attnc.incontext.differences import Differences, Sizes, beside_the_sink, rounded_up, sink_score
from attnc.incontext.prompt import LOG_WEIGHT, ONE, PRESENT, SINK, TARGET, Prompt
from attnc.ir.building import AffineBuilder, Attending, Entries, reading
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.soft_head import SoftHead
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.arrays import Float, Int
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma

MU, BIAS, VALUE, GATE = "mu", "bias", "value", "gate"

LOGISTIC = SoftHead.of_one_variable(np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([1.0, 0.0]))
"""The two keys that compute the sigmoid exactly."""


@dataclass(frozen=True)
class Task:
    """One fit: the prompt's sizes, the objective and the steps.

    The objective is Σ_i loss_i (their mean if `mean`) + Σ_c (½ penalty_c w_c² + l1_c |w_c|). During the steps, `reach`
    bounds |r_i| for the squared loss, and v·x̃_i for Poisson. For Poisson, `targets` bounds |y_i|. `size` bounds the
    weights that enter the gates, and `asked` |w·x| for the queries of the prompt.
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
    clip: float = 0.0
    asked: float = 1.0

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
        if self.l1 and (self.loss != "squared" or self.schedule.method not in ("plain", "nesterov")):
            raise InputError(
                f"l1 takes the squared loss and plain or nesterov steps, found {self.loss} and {self.schedule.method}"
            )

    @property
    def sinks(self) -> int:
        """The number of sinks: one for a sum, one per row for a mean."""
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
        """Return the program of this task alone."""
        return descent_program([self], dtype)

    def inputs(
        self,
        start: np.ndarray,
        X: np.ndarray,
        y: np.ndarray,
        sample_weight: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return the inputs of the program: the first weights and the prompt."""
        return [start, self.prompt.tokens(X, y, sample_weight=sample_weight, queries=queries)]

    def sink(self, dtype: str) -> float:
        """Return the score C of the sink, for the heads that compute the gradient."""
        if self.loss == "squared":
            return self.differences.sink(self.keys, self.reach, dtype)
        return sink_score(self.keys, self.reach, dtype)

    def gradient_bound(self, x: float, weights: float, dtype: str = "float64") -> Bound:
        """Return a bound δ of |g of one gradient layer − the exact sum or mean|₂, for |x̃_i| ≤ x and |v| ≤ weights.

        For the squared loss it is the bound of the difference heads. For Poisson the head sums e^{v·x̃_i} itself. Its
        errors are rounding and the examples' share of the denominator. Difference heads compute the moment Σ y_i x̃_i.
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


def gate_slope(size: float, dtype: str) -> float:
    """Return the slope β of the gates for arguments up to `size`: the steepest that scores resolve.

    The gate error is then as small as rounding.
    """
    return math.ldexp(1.0, math.floor(-math.log2(UNIT_ROUNDOFF[dtype] * 8 * size)))


def descent_program(tasks: Sequence[Task], dtype: str = "float64", *, rates: Sequence[float] | None = None) -> Program:
    """Build the program that descends on one or more tasks, one after the other.

    Parameters
    ----------
    tasks : sequence of Task
        The tasks, for example the `task` of a plan from `plan_least_squares`. Each starts where the one before ended.
    dtype : {"float64", "float32"}
        The arithmetic of the program.
    rates : sequence of float, optional
        A rate κ for each task. Then every task starts at a learned start a, and a ← (1−κ)·a + κ·(its last weights)
        after it. See `learn_start`.

    Returns
    -------
    Program
        Its inputs are the first weights and the prompts, one below the other. Its output is the last weights, or the
        learned start.

    Raises
    ------
    InputError
        If the tasks differ in their features or their intercept, or have a loss that needs two layers for a gradient.

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
        if replace(task.prompt, rows=first.rows) != first:
            raise InputError("tasks of one program share their features, their intercept and their kind of prompt")
        if first.targets > 1:
            raise InputError(f"gradient steps fit one target, found {first.targets}: take Newton–Schulz turns")
        if task.loss not in Task.losses:
            raise InputError(
                f"one program of several tasks takes the losses {' and '.join(Task.losses)}, found {task.loss}: build "
                "task.program(), and start it at the result of the program before it"
            )
        if task.prompt.queries and (len(tasks) > 1 or rates is not None):
            raise InputError("queries belong to a program of one task")
        if rates is not None and (task.l1 or task.clip):
            raise InputError("a learned start takes tasks without l1 and without a safeguard")
    builder = _DescentBuilder(tuple(tasks), dtype, None if rates is None else tuple(rates))
    shapes = ((first.num_weights,), (sum(t.prompt.shape[0] for t in tasks), first.shape[1]))
    out = (first.queries,) if first.queries else shapes[0]
    return check(Program(rolled(builder.main()), shapes, out, (builder.memory(),)))


@dataclass(frozen=True, eq=False)
class _DescentBuilder:
    tasks: tuple[Task, ...]
    dtype: str
    rates: tuple[float, ...] | None = None

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return self.tasks[0].prompt.weight_names

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts: tuple[str, ...] = ("v", "p", "g")
        parts += ("s",) if any(task.has_offset for task in self.tasks) else ()
        parts += ("a",) if self.rates is not None else ()
        return (*(f"{part}.{c}" for part in parts for c in self.weights), ONE)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The channels of the memory."""
        return (*self.tasks[0].prompt.inputs, SINK, *((ASKED,) if self.tasks[0].prompt.queries else ()))

    @property
    def asked(self) -> np.ndarray:
        """The tokens of the memory that are queries. A sink of their own comes after them."""
        return self.tasks[0].keys + np.arange(self.tasks[0].prompt.queries)

    def memory(self) -> Affine:
        """Return the map that places the tokens of all tasks. Masks hide those of other tasks, and the queries."""
        prompt = self.tasks[0].prompt
        rows = np.cumsum([0, *(task.prompt.rows for task in self.tasks)])
        tokens = np.cumsum([0, *(task.keys for task in self.tasks)])
        hidden = prompt.queries + bool(prompt.queries)
        place = AffineBuilder(rows[-1] + prompt.queries, prompt.inputs, tokens[-1] + hidden, self.kept)
        for task, row, token in zip(self.tasks, rows, tokens, strict=False):
            task.prompt.place(place, row, token, task.mean)
        if prompt.queries:
            place.copy(self.asked, prompt.rows + np.arange(prompt.queries), prompt.regressors)
            place.set(self.asked, ASKED, 1.0)
            place.set(self.asked[-1] + 1, SINK, 1.0)
            if prompt.intercept:
                place.set(self.asked, PRESENT, 1.0)
        return place.build("place", self.dtype)

    def attending(self, number: int) -> Attending:
        """Let the state attend to the tokens of one task."""
        mask = None
        if len(self.tasks) > 1 or len(self.asked):
            segments = [np.full(task.keys, k, np.int32) for k, task in enumerate(self.tasks)]
            hidden = np.full(len(self.asked) + bool(len(self.asked)), len(self.tasks), np.int32)
            mask = Mask(np.array([number], np.int32), np.concatenate([*segments, hidden]))
        return Attending(self.channels, self.kept, self.dtype, mask)

    def main(self) -> tuple[Layer, ...]:
        names = [f"w.{c}" for c in self.weights]
        begin = AffineBuilder(1, names, 1, self.channels)
        for c in self.weights:
            for part in ("v", "p", *(("a",) if self.rates is not None else ())):
                begin.link(0, f"{part}.{c}", 0, f"w.{c}")
        begin.set(0, ONE, 1.0)
        layers: list[Layer] = [begin.build("begin", self.dtype)]
        for number, task in enumerate(self.tasks):
            prefix = f"task{number + 1}." if len(self.tasks) > 1 else ""
            if number and self.rates is None:  # both states become the last iterate
                last = self.tasks[number - 1].iterate
                layers.append(self._on_state({("v", last): 1.0, ("p", last): 1.0}, f"{prefix}begin"))
            layers += self._steps(number, task, prefix)
            if self.rates is not None:
                move = {"a": 1 - self.rates[number], task.iterate: self.rates[number]}
                learned: dict[tuple[str, str], Penalty] = {(new, old): by for new in "avp" for old, by in move.items()}
                layers.append(self._on_state(learned, f"{prefix}learn"))
        answer = self.tasks[-1].iterate if self.rates is None else "a"
        if len(self.asked):
            task, state = self.tasks[0], np.zeros(1, int)
            asked = ask(
                task.prompt,
                (1, self.channels),
                (state, answer),
                (self.asked, int(self.asked[-1]) + 1),
                (int(self.asked[-1]) + 2, self.kept),
                task.asked,
                is_exponential=task.loss == "poisson",
            )
            return (*layers, *asked)
        outputs = {f"w.{c}": f"{answer}.{c}" for c in self.weights}
        return (*layers, reading("read", 1, self.channels, [0], outputs, self.dtype))

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
        clip = self._clip(task) if task.clip else []
        for t, numbers in enumerate(schedule.pairs):
            if numbers not in made:
                made[numbers] = self._threshold(task, *numbers) if task.l1 else [self._update(task, t)]
                if clip:
                    *before, update = made[numbers]
                    made[numbers] = [*before, replace(update, name="step"), *clip]
            layers += [replace(layer, name=f"{prefix}{layer.name}{t + 1}") for layer in (gradient, *made[numbers])]
        return layers

    def _gradient_heads(self, task: Task, attending: Attending) -> tuple[Head, ...]:
        regressors, C = task.prompt.regressors, task.sink(self.dtype)
        state = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, regressors, strict=True)}
        if task.loss == "squared":
            return self._difference_heads(task, attending, C, {(ONE, TARGET): -1.0} | state, "g")
        same = {(c, c): 1.0 for c in regressors}
        outputs = {(c, f"g.{w}"): math.exp(C) for w, c in zip(self.weights, regressors, strict=True)}
        of_query, of_key = beside_the_sink(C, task.prompt.weighted)
        return (attending.head({**state, **of_query}, {**same, **of_key}, same, outputs),)

    def _difference_heads(
        self, task: Task, attending: Attending, C: float, residual: Entries, into: str
    ) -> tuple[Head, ...]:
        """Return heads that add Σ r_i x̃_i to the channels `into`. `residual` holds the entries of W_Q for r_i."""
        regressors = task.prompt.regressors
        keys = {(c, c): 1.0 for c in (*regressors, TARGET)}
        outputs = [(c, f"{into}.{w}") for w, c in zip(self.weights, regressors, strict=True)]
        return task.differences.sum_heads(attending, C, residual, keys, outputs, weighted=task.prompt.weighted)

    def _update(self, task: Task, t: int) -> Affine:
        """Return step t with ∇ = g − s + λv."""
        entries = task.schedule.step(t, np.array(task.penalty))
        if task.has_offset:
            entries |= {(new, "s"): -entries[new, "g"] for new in "vp" if (new, "g") in entries} | {("s", "s"): 1.0}
        if self.rates is not None:
            entries |= {("a", "a"): 1.0}
        return self._on_state(entries, "update")

    def _on_state(self, entries: dict[tuple[str, str], Penalty], name: str) -> Affine:
        """Return the map of the state token with `entries[new, old]` for all weights. The constant 1 stays.

        Its arrays are built directly, because a program may have thousands of these maps.
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
        return [
            spread.build("spread", self.dtype),
            self._soft("threshold", channels, gate_slope(task.size + eta * max(task.l1), self.dtype)),
            update.build("update", self.dtype),
        ]

    def _clip(self, task: Task) -> list[Layer]:
        """Replace v by v − soft(v, clip). Token 1 + c holds u = v_c and t = clip, and gets soft(u)."""
        num, channels = len(self.weights), (*self.channels, "u", "t", "soft")
        spread = AffineBuilder(1, self.channels, num + 2, channels)
        update = AffineBuilder(num + 2, channels, 1, self.channels)
        for layer in (spread, update):
            layer.copy([0], [0], self.channels)
        for k, c in enumerate(self.weights):
            spread.link(1 + k, "u", 0, f"v.{c}")
            spread.set(1 + k, ONE, 1.0)
            spread.set(1 + k, "t", task.clip)
            update.link(0, f"v.{c}", 1 + k, "soft", -1.0)
        slope = gate_slope(2 * task.clip, self.dtype)
        return [
            spread.build("spread_clip", self.dtype),
            self._soft("clip", channels, slope),
            update.build("update", self.dtype),
        ]

    def _soft(self, name: str, channels: tuple[str, ...], slope: float) -> Attention:
        """Return the layer in which token 1 + c gets soft(u) = relu(u − t) − relu(−u − t), by two gates."""
        num = len(self.weights)
        units = range(1, num + 1)
        mask = Mask(  # the state sees the last key alone
            np.array([num + 2, *units, num + 1], np.int32), np.array([0, *units, EVERY_QUERY], np.int32)
        )
        attending = Attending(channels, channels, self.dtype, mask)
        gates = []
        for sign in (1.0, -1.0):
            queries, keys = {("u", "on"): sign, ("t", "on"): -1.0}, {(ONE, "on"): slope}
            values, outputs = {("u", "soft"): sign, ("t", "soft"): -1.0}, {("soft", "soft"): sign}
            gates.append(attending.head(queries, keys, values, outputs))
        return Attention(name, tuple(gates), channels, residual=True)


@dataclass(frozen=True, eq=False)
class GLMTask(Task):
    """One fit with the mean function μ(z) = A′(z). The error of its keys is ≤ `keys_error`, and |μ_i − y_i| ≤ reach."""

    loss: str = "logistic"
    mean_keys: SoftHead[np.ndarray] = LOGISTIC
    keys_error: float = 0.0

    losses: ClassVar[tuple[str, ...]] = ("logistic", "other")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedule.check_steady()

    @property
    def iterate(self) -> str:
        return "vector"

    @property
    def token(self) -> int:  # type: ignore[override]
        """The number of the token that holds the iterate. v and p come after the null token."""
        return self.keys + (2 if self.schedule.iterate == "p" else 1)

    def program(self, dtype: str = "float64") -> Program:
        """Return the program of this task. Its one input has the shape (rows + 1, features + 2)."""
        shape = (self.prompt.shape[0] + 1, self.prompt.shape[1])
        layers, out = rolled(_GLMBuilder(self, dtype).layers()), (self.prompt.queries or self.prompt.num_weights,)
        return check(Program(layers, (shape,), out))

    def inputs(
        self,
        start: np.ndarray,
        X: np.ndarray,
        y: np.ndarray,
        sample_weight: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return the one input of the program: the first weights, padded with zeros, above the prompt."""
        _, tokens = super().inputs(start, X, y, sample_weight, queries)
        return [np.vstack([np.pad(start, (0, tokens.shape[1] - len(start))), tokens])]

    def gradient_bound(self, x: float, weights: float, dtype: str = "float64") -> Bound:
        """Return a bound of |g − Σ (A′(v·x̃_i) − y_i) x̃_i|₂ for |x̃_i| ≤ x and |v| ≤ weights.

        The error of a score in the read layer is at most e = γ·Σ|terms|. A weight then changes by a factor in e^{±2e}.
        So the error of μ is at most (e^{4e} − 1)·½·span of the values, plus the rounding of their average.
        """
        u, keys, d = UNIT_ROUNDOFF[dtype], self.mean_keys, self.prompt.num_weights
        scores = gamma(d + 4, u) * float((np.abs(keys.slopes[:, 0]) * x * weights + np.abs(keys.offsets)).max())
        reached = float(np.abs(keys.slopes).max()) * x * weights + float(np.abs(keys.offsets).max())
        off = 2 * scores + u * reached + 2 * LIBM_ULPS * u
        values = float(np.abs(keys.values).max())
        read = math.expm1(2 * off) * float(np.ptp(keys.values)) / 2 + gamma(2 * keys.num_keys + 3, u) * values
        total = x if self.mean else self.prompt.rows * x
        sizes = Sizes(self.prompt.rows, 2, x, self.reach, self.reach + 2 * values, self.mean)
        means = rounded_up(
            ("mean function", total * self.keys_error, "the keys' error"),
            ("read", total * read, f"the read layer in {dtype}"),
        )
        return Bound((*means.terms, *self.differences.bound(sizes, dtype).terms))


@dataclass(frozen=True, eq=False)
class _GLMBuilder:
    model: GLMTask
    dtype: str

    @cached_property
    def vector(self) -> tuple[str, ...]:
        return tuple(f"vector.{c}" for c in range(self.model.prompt.num_weights))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        weight = (LOG_WEIGHT,) if self.model.prompt.weighted else ()
        return (*self.vector, MU, TARGET, *weight, SINK, BIAS, VALUE, ONE)

    @cached_property
    def places(self) -> dict[str, Int[np.ndarray, " tokens"]]:
        """The numbers of the tokens of each kind."""
        sizes = {"example": self.model.prompt.rows, "sink": self.model.sinks, "null": 1, "v": 1, "p": 1, "g": 1}
        sizes["key"] = self.model.mean_keys.num_keys
        sizes["query"] = self.model.prompt.queries
        ends = np.cumsum(list(sizes.values()))
        return {name: np.arange(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def tokens(self) -> int:
        return int(self.places["key"][-1]) + 1 + self.model.prompt.queries

    def layers(self) -> tuple[Layer, ...]:
        read = Attention("read", (self._read_head(),), self.channels, residual=True)
        total = Attention("sum", self._sum_heads(), self.channels, residual=True)
        step = (read, total, self._update())
        layers: list[Layer] = [self._place()]
        for t in range(1, self.model.schedule.steps + 1):
            layers += [replace(layer, name=f"{layer.name}{t}") for layer in step]
        if self.model.prompt.queries:
            layers.append(replace(read, name="predict"))
        return (*layers, self._answer())

    def _place(self) -> Affine:
        prompt, places = self.model.prompt, self.places
        place = AffineBuilder(prompt.shape[0] + 1, prompt.inputs, self.tokens, self.channels)
        rows, asked = np.arange(1, prompt.rows + 1), prompt.rows + 1 + np.arange(prompt.queries)
        for regressor, channel in zip(prompt.regressors, self.vector, strict=True):
            place.link(places["example"], channel, rows, regressor)
            if regressor == PRESENT:  # a query has no flag, but an intercept
                place.set(places["query"], channel, 1.0)
            else:
                place.link(places["query"], channel, asked, regressor)
            for name, factor in (("v", 1.0), ("p", 1.0), ("key", self.model.mean_keys.slopes[:, 0])):
                place.link(places[name], channel, 0, regressor, factor)
        place.link(places["example"], TARGET, rows, TARGET)
        place.set(places["example"], ONE, 1.0)
        place.set(places["query"], ONE, 1.0)
        if prompt.weighted:
            place.link(places["example"], LOG_WEIGHT, rows, LOG_WEIGHT)
        if self.model.mean:
            place.link(places["sink"], SINK, rows, PRESENT)
            if prompt.weighted:
                place.link(places["sink"], LOG_WEIGHT, rows, LOG_WEIGHT)
        else:
            place.set(places["sink"], SINK, 1.0)
        self._set_constants(place)
        return place.build("place", self.dtype)

    def _set_constants(self, layer: AffineBuilder) -> None:
        layer.set(self.places["g"], ONE, 1.0)
        layer.set(self.places["key"], BIAS, self.model.mean_keys.offsets)
        layer.set(self.places["key"], VALUE, self.model.mean_keys.values[:, 0])

    def _update(self) -> Affine:
        """Return one step. The keys follow the new v. The μ of the examples and the sum in g are set to 0."""
        model, places, slopes = self.model, self.places, self.model.mean_keys.slopes[:, 0]
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        kept = np.concatenate([places[name] for name in ("example", "sink", "null", "query")])
        update.copy(kept, kept, (channel for channel in self.channels if channel != MU))
        for channel, penalty in zip(self.vector, model.penalty, strict=True):
            for (new, old), coefficient in model.schedule.step(0, penalty).items():
                update.link(places[new], channel, places[old], channel, coefficient)
                if new == "v":
                    update.link(places["key"], channel, places[old], channel, coefficient * slopes)
        self._set_constants(update)
        return update.build("update", self.dtype)

    def _attending(self, queries: tuple[str, ...], *keys: str) -> Attending:
        """Let these queries attend to these keys, by a mask. All other queries see the null token."""
        sees, seen = np.zeros(self.tokens, np.int32), np.full(self.tokens, 2, np.int32)
        for name in queries:
            sees[self.places[name]] = 1
        for name in keys:
            seen[self.places[name]] = 1
        seen[self.places["null"]] = 0
        return Attending(self.channels, self.channels, self.dtype, Mask(sees, seen))

    def _read_head(self) -> Head:
        same = {(channel, channel): 1.0 for channel in self.vector}
        queries, keys = same | {(ONE, "constant"): 1.0}, same | {(BIAS, "constant"): 1.0}
        return self._attending(("example", "query"), "key").head(queries, keys, {(VALUE, MU): 1.0}, {(MU, MU): 1.0})

    def _sum_heads(self) -> tuple[Head, ...]:
        model, attending = self.model, self._attending(("g",), "example", "sink")
        C = model.differences.sink(model.keys, model.reach, self.dtype)
        keys = {(MU, "residual"): 1.0, (TARGET, "residual"): -1.0}
        outputs = [(c, c) for c in self.vector]
        return model.differences.sum_heads(
            attending, C, {(ONE, "residual"): 1.0}, keys, outputs, weighted=model.prompt.weighted
        )

    def _answer(self) -> Affine:
        outputs = {f"w.{name}": f"vector.{i}" for i, name in enumerate(self.model.prompt.weight_names)}
        if self.model.prompt.queries:
            asked = self.places["query"]
            return reading("answer", self.tokens, self.channels, asked, {"prediction": MU}, self.dtype)
        read = self.places[self.model.schedule.iterate]
        return reading("answer", self.tokens, self.channels, read, outputs, self.dtype)


def run_recorded(
    program: Program, inputs: Sequence[np.ndarray], start: np.ndarray, iterate: str, token: int | slice = 0
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
    token : int or slice
        The number of the token that holds them, or those of several targets.

    Returns
    -------
    weights : array of shape (weights,)
        The last weights.
    trajectory : array of shape (steps + 1, weights)
        The first weights, and the weights after every layer whose name begins with `update`.

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
        path.append(state[token][..., columns[key]].astype(np.float64))

    with np.errstate(over="ignore", invalid="ignore"):
        out = run(program, inputs, watch)
    return np.asarray(out, np.float64), np.stack(path)
