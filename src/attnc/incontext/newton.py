"""Least squares by Newton–Schulz steps on the prompt: tens of layers where gradient steps take hundreds.

The memory holds the prompt. The main stream holds a state token with the weights w, one token for each row m_r of a
matrix M that tends to the inverse of S = Σ x_i x_iᵀ, and a sink. All turns are equal. A turn is

    prompt     cross-attention, by difference heads (`differences`): the state gets g = Σ (w·x_i − y_i) x_i, and row r
               gets p_r = Σ (m_r·x_i) x_i, row r of MS. All tokens have one kind of score, v·x_i + ρ·y_i: the state has
               v = w and ρ = −1, and row r has v = σ m_r and ρ = 0
    scale      affine: p_r ← p_r/σ and g ← 2^⌊t/2⌋ g in turn t, so that all scores are of one size
    rows       attention over the rows: a token with p gets Σ_k p_k σ m_k. That is Mg for the state, and row r of MSM
    update     affine: w ← w − Mg, m_r ← 2m_r − (MSM)_r

A penalty λ_c is one more row of the prompt, √λ_c in column c and target 0. So the weights of the program depend on the
number of rows and columns, the number of turns and the condition, and on no number of the examples.

Several fits can run side by side in groups of such tokens, on one prompt:

    several targets     a group has a state for each, and they share the rows of M
    causal              group i sees the examples before example i, and returns a prediction for example i. In
                        group i a score loses `HIDDEN` for example j ≥ i: Σ_k [k = i]·[k ≤ j], one channel for each k
    choosing a penalty  group k adds its own penalties in the scale map, and does not see the held-out examples. Then
                        each state sums the squares of its held-out residuals by second differences, and one head with
                        scores −β·loss_k returns the weights of the best group

Theorem.  Let the trace of S be at most τ and its eigenvalues at least τ/κ, and M₀ = I/τ, w₀ = 0. Exact turns give
              |w_T − w*|_S = |(I − S/τ)^(2^T − 1) w*|_S ≤ (1 − 1/κ)^(2^T − 1) |w*|_S,   |v|_S² = v·Sv.
Proof.    E_t = I − S M_t obeys E_{t+1} = E_t², so E_t = (I − S/τ)^(2^t). The error of w is multiplied by E_t in turn t,
          and the exponents add up to 2^T − 1. All eigenvalues of S/τ are in [1/κ, 1].
Range.    Scores stay within |w·x_i − y_i| ≤ ‖y‖, because the S-norm of the error never grows, and within
          |m_r·x_i| ≤ √(M_rr) ≤ √(κ/τ), because MSM ≤ M. So σ = √(τ/κ) gives both one range. Row sums of MS are at most
          √(τ·M_rr), and entries of M at most κ/τ. In turn t the gradient is S(I − S/τ)^n w*, n = 2^t − 1, of norm at
          most max_s √s (1 − s/τ)^n ≤ √(τ/(2n + 1)), so that 2^⌊t/2⌋ g stays within √τ.
Rounding. A turn corrects the errors of the turns before: E_{t+1} = E_t² + δ, where δ grows like √κ times the rounding
          of a difference head, and w is left with an error of about that of one gradient times κ/τ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnc.errors import InputError
from attnc.incontext.asking import ASKED, ask
from attnc.incontext.differences import Differences, Sizes, choose
from attnc.incontext.domain import Domain
from attnc.incontext.prompt import ONE, SINK, Prompt
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.spec import check
from attnc.numerics.arrays import Float

SCORE_ROOM = 1.25
"""The factor by which scores may exceed their range in exact arithmetic."""
SETTLING = 5
"""Number of turns beyond log₂κ. After them the theorem's factor is at most e^−31."""


HEADS = 8
"""Number of pairs of difference heads. Measured on five data sets with condition 5e2 to 4e10: with 4 pairs the error of
the weights is 6 to 50 times that of 8 pairs, and with 6 pairs 1 to 3 times."""
MOST_GAIN = 2.0**24
"""The largest factor of a gradient. Rounding leaves gradients of about 1e-13, which stay small beside √τ."""
HIDDEN = 800.0
"""The distance by which the score of a hidden example lies below that of the sink. e^−745 is 0 in float64."""
CHOOSING = 2.0**26
"""The inverse temperature of the choice among groups. Losses are at most about 1, and those that differ by 1e-6 get
weights in the ratio e^67."""
HELD_REACH = 4.0
"""The residuals of held-out examples for which losses are accurate. Targets have the 2-norm 1, so a method with larger
ones is worse than none."""
FINEST = 2.0**46
"""The largest condition. Beyond it roundings of float64 leave no digit of the weights."""


@dataclass(frozen=True)
class NewtonTask:
    """A fit of at most `prompt.rows` examples, penalty rows included, by Newton–Schulz steps.

    Columns have 2-norm at most 1, and so have the targets. The smallest eigenvalue of S is at least weights/condition.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt. With queries, the program returns predictions for them instead of weights.
    condition : float
        The condition.
    heads : int
        Number of pairs of heads.
    is_causal : bool
        Whether the program returns a prediction for each example from those before it.
    penalties : tuple of tuple of float
        The penalties of the columns: one tuple for each group among which the program chooses, or one for all.
    held_out : int
        Number of rows, the last ones of the examples, by which it chooses.
    query : float
        The largest norm of a query.
    """

    prompt: Prompt
    condition: float
    heads: int = HEADS
    is_causal: bool = False
    penalties: tuple[tuple[float, ...], ...] = ()
    held_out: int = 0
    query: float = 1.0

    loss: ClassVar[str] = "squared"
    mean: ClassVar[bool] = False
    l1: ClassVar[tuple[float, ...]] = ()
    iterate: ClassVar[str] = "v"

    def __post_init__(self) -> None:
        if not 1 <= self.condition <= FINEST:
            raise InputError(f"the condition is a number from 1 to {FINEST:.2g}, found {self.condition!r}")
        if not 0 <= self.held_out < self.prompt.rows or bool(self.held_out) != (len(self.penalties) > 1):
            raise InputError(
                f"a choice among several penalties takes some of the {self.prompt.rows} rows as held-out examples, "
                f"found {len(self.penalties)} groups of penalties and {self.held_out} rows"
            )
        if (self.is_causal or self.penalties) and self.prompt.targets > 1:
            raise InputError(f"causal programs and choices take one target, found {self.prompt.targets}")
        if self.is_causal and (self.held_out or self.prompt.queries):
            raise InputError("a causal program predicts its examples: it takes no queries and no choice of penalties")

    @property
    def token(self) -> int | slice:
        """The numbers of the tokens that hold the iterate."""
        return 0 if self.prompt.targets == 1 else slice(0, self.prompt.targets)

    @property
    def groups(self) -> int:
        """The number of fits side by side, besides several targets."""
        return self.prompt.rows if self.is_causal else max(1, len(self.penalties))

    @property
    def size(self) -> int:
        """The number of tokens of a group: its states, and its rows of M."""
        return self.prompt.targets + self.prompt.num_weights

    @property
    def trace(self) -> float:
        """The bound τ of the trace of S: the number of columns, whose squares add up to at most 1."""
        return float(self.prompt.num_weights)

    @property
    def turns(self) -> int:
        """The number of turns T."""
        return math.ceil(math.log2(self.condition)) + SETTLING

    @property
    def scale(self) -> float:
        """The factor σ of the rows of M, a power of two."""
        return math.ldexp(1.0, math.floor(math.log2(math.sqrt(self.trace / self.condition))))

    def gain(self, turn: int) -> float:
        """Return the factor of g in one turn, from 0. It gives Mg the relative accuracy that g has."""
        return min(math.ldexp(1.0, turn // 2), MOST_GAIN)

    @cached_property
    def over_prompt(self) -> tuple[Differences, float]:
        """The heads over the prompt, and the score of their sink."""
        rows, width = self.prompt.rows, self.prompt.num_weights + 1
        sizes = Sizes(rows, width, math.sqrt(self.trace), SCORE_ROOM, 2 * SCORE_ROOM)
        found = choose(sizes, self.heads, "float64")
        return found, found.sink(rows + 1, SCORE_ROOM, "float64")

    @cached_property
    def over_rows(self) -> tuple[Differences, float]:
        """The heads over the rows of M, and the score of their sink. Entries of g and of MS are at most √τ and 1."""
        weights = self.prompt.num_weights
        reach = SCORE_ROOM * math.sqrt(self.trace)
        found = choose(Sizes(weights, 1, 1.0, reach, reach), self.heads, "float64")
        return found, found.sink(weights + 2, reach, "float64")

    @property
    def penalty(self) -> tuple[float, ...]:
        """No penalty: those of a ridge are rows of the prompt."""
        return (0.0,) * self.prompt.num_weights

    @property
    def reach(self) -> float:
        """A bound of the predictions: |w*| ≤ √(condition/τ), because |w*|_S ≤ 1."""
        return (
            SCORE_ROOM
            * math.sqrt(self.condition / self.trace)
            * (math.sqrt(self.trace) if self.is_causal else self.query)
        )

    @property
    def domain(self) -> Domain:
        """The prompts for which the program is built."""
        tau = self.trace
        return Domain(
            self.prompt,
            math.sqrt(tau),
            1.0,
            start=0.0,
            query=self.query if self.prompt.queries else math.inf,
            L=tau,
            mu=0.0 if self.penalties or self.is_causal else tau / self.condition,
            has_penalty_rows=not self.penalties and not self.is_causal,
        )

    def program(self) -> Program:
        """Return the program. Its inputs are the first weights and the prompt, as those of `descent_program`."""
        return _NewtonBuilder(self).program()

    def tokens(
        self,
        X: Float[np.ndarray, "rows weights"],
        y: Float[np.ndarray, " *shape"],
        penalty: Float[np.ndarray, " weights"],
        sample_weight: Float[np.ndarray, " rows"] | None = None,
        queries: Float[np.ndarray, "queries weights"] | None = None,
    ) -> Float[np.ndarray, "rows width"]:
        """Return the prompt. Penalties that are not 0 are the last rows before the queries."""
        tokens = self.prompt.tokens(X, y, sample_weight=sample_weight, queries=queries)
        weights, end = self.prompt.num_weights, self.prompt.rows
        if penalty.any():
            if tokens[end - weights : end].any():
                raise InputError(f"the prompt has no room for {weights} rows of penalties below its examples")
            tokens[end - weights : end, :weights] = np.diag(np.sqrt(penalty))
        return tokens


@dataclass(frozen=True, eq=False)
class _NewtonBuilder:
    task: NewtonTask

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return self.task.prompt.weight_names

    @property
    def targets(self) -> tuple[str, ...]:
        return self.task.prompt.target_names

    @cached_property
    def positions(self) -> tuple[str, ...]:
        return tuple(f"position.{k}" for k in range(self.task.prompt.rows)) if self.task.is_causal else ()

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts = (f"{part}.{c}" for part in ("v", "p", "q", "row") for c in self.weights)
        choice = ("loss",) if self.task.held_out else ()
        return (*parts, *(f"rho.{name}" for name in self.targets), ONE, SINK, *choice, *self.positions)

    @cached_property
    def memory(self) -> tuple[str, ...]:
        """The channels of the memory."""
        held = ("held", "kept") if self.task.held_out else ()
        return (*self.task.prompt.inputs, SINK, *((ASKED,) if self.reads_memory else ()), *held, *self.positions)

    @property
    def reads_memory(self) -> bool:
        """Whether predictions or losses are read off the memory."""
        return bool(self.task.prompt.queries or self.task.is_causal or self.task.held_out)

    @property
    def tokens(self) -> int:
        """All groups, each with its states and its rows of M, and the sink."""
        return self.task.groups * self.task.size + 1

    @cached_property
    def states(self) -> np.ndarray:
        """The states, group by group."""
        starts = self.task.size * np.arange(self.task.groups)
        return (starts[:, None] + np.arange(len(self.targets))).reshape(-1)

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows of M, of shape (groups, weights)."""
        starts = self.task.size * np.arange(self.task.groups)
        return starts[:, None] + len(self.targets) + np.arange(len(self.weights))

    def program(self) -> Program:
        prompt, task = self.task.prompt, self.task
        over_prompt, over_rows = self._prompt_layer(), self._rows_layer()
        layers: list[Layer] = [self._begin()]
        for t in range(task.turns):
            turn = (over_prompt, self._scale(task.gain(t)), over_rows, self._update(task.gain(t)))
            layers += [replace(layer, name=f"{layer.name}{t + 1}") for layer in turn]
        chosen, channels = self.states, self.channels
        if task.held_out:
            layers += self._choice()
            chosen = np.array([self.tokens])
        shapes = ((prompt.num_weights,), prompt.shape)
        memory = (self._place(),)
        if task.is_causal or prompt.queries:
            seen = np.arange(prompt.rows) if task.is_causal else prompt.rows + 1 + np.arange(prompt.queries)
            tokens = self.tokens + bool(task.held_out)
            memory_of = (len(self._hidden()), self.memory)
            asked = ask(prompt, (tokens, channels), (chosen, "v"), (seen, prompt.rows), memory_of, task.reach)
            shape = (len(seen),) if len(self.targets) == 1 else (len(seen), len(self.targets))
            return check(Program(rolled([*layers, *asked]), shapes, shape, memory))
        outputs = {f"w.{c}": f"v.{c}" for c in self.weights}
        answer = reading("answer", self.tokens + bool(task.held_out), channels, chosen, outputs, "float64")
        shape = (prompt.num_weights,) if len(self.targets) == 1 else (len(self.targets), prompt.num_weights)
        return check(Program(rolled([*layers, answer]), shapes, shape, memory))

    def _place(self) -> Affine:
        """Place the examples, the sink, and the queries."""
        prompt, task = self.task.prompt, self.task
        place = AffineBuilder(prompt.shape[0], prompt.inputs, len(self._hidden()), self.memory)
        prompt.place(place, 0, 0, mean=False)
        examples, asked = np.arange(prompt.rows), np.arange(prompt.queries)
        place.copy(prompt.rows + 1 + asked, prompt.rows + asked, prompt.regressors)
        if self.reads_memory:
            place.set(examples, ASKED, 1.0)
            place.set(prompt.rows + 1 + asked, ASKED, 1.0)
        if task.held_out:
            place.set(examples[-task.held_out :], "held", 1.0)
            place.set(examples[: -task.held_out], "kept", 1.0)
        for k, position in enumerate(self.positions):
            place.set(examples[k:], position, 1.0)
        return place.build("place")

    def _hidden(self) -> np.ndarray:
        """Return the segments of the memory: queries are hidden from the turns."""
        seen = np.full(self.task.prompt.rows + 1 + self.task.prompt.queries, EVERY_QUERY, np.int32)
        seen[self.task.prompt.rows + 1 :] = 1
        return seen

    def _begin(self) -> Affine:
        names = [f"w.{c}" for c in self.weights]
        begin = AffineBuilder(1, names, self.tokens, self.channels)
        for k, c in enumerate(self.weights):
            begin.link(self.states, f"v.{c}", 0, f"w.{c}")
            begin.set(self.rows[:, k], f"v.{c}", self.task.scale / self.task.trace)
        self._set_constants(begin)
        return begin.build("begin")

    def _set_constants(self, layer: AffineBuilder) -> None:
        for k, name in enumerate(self.targets):
            layer.set(self.states[k :: len(self.targets)], f"rho.{name}", -1.0)
        layer.set(np.arange(self.tokens), ONE, 1.0)
        layer.set(self.tokens - 1, SINK, 1.0)
        for k, c in enumerate(self.weights):
            layer.set(self.rows[:, k], f"row.{c}", 1.0)
        for k, position in enumerate(self.positions):
            layer.set(self.task.size * k + np.arange(self.task.size), position, 1.0)

    def _attending(self) -> Attending:
        mask = Mask(np.zeros(self.tokens, np.int32), self._hidden()) if self.task.prompt.queries else None
        return Attending(self.channels, self.memory, "float64", mask)

    def _prompt_layer(self) -> Attention:
        prompt, (differences, C) = self.task.prompt, self.task.over_prompt
        score = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, prompt.regressors, strict=True)}
        score |= {(f"rho.{name}", name): 1.0 for name in self.targets}
        keys = {(c, c): 1.0 for c in (*prompt.regressors, *self.targets)}
        outputs = [(c, f"p.{w}") for w, c in zip(self.weights, prompt.regressors, strict=True)]
        hiding = {(position, position): -(C + HIDDEN) for position in self.positions}
        hiding |= {(ONE, "held"): -(C + HIDDEN)} if self.task.held_out else {}
        heads = differences.sum_heads(
            self._attending(), C, score, keys, outputs, weighted=prompt.weighted, beside=hiding
        )
        return Attention("prompt", heads, self.channels, residual=True, cross=True)

    def _scale(self, gain: float) -> Affine:
        """Scale the sums, and add each group's penalties."""
        scale = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        everywhere = np.arange(self.tokens)
        scale.copy(everywhere, everywhere, [channel for channel in self.channels if not channel.startswith("p.")])
        for k, c in enumerate(self.weights):
            own = np.array([penalty[k] for penalty in self.task.penalties] or [0.0])
            scale.link(self.states, f"p.{c}", self.states, f"p.{c}", gain)
            scale.link(self.rows, f"p.{c}", self.rows, f"p.{c}", 1 / self.task.scale)
            if own.any():
                scale.link(self.states, f"p.{c}", self.states, f"v.{c}", gain * own)
                scale.link(self.rows, f"p.{c}", self.rows, f"v.{c}", own[:, None] / self.task.scale)
        return scale.build("scale")

    def _rows_layer(self) -> Attention:
        """Let every token see the rows of its group and the sink. States are hidden as keys."""
        differences, C = self.task.over_rows
        groups = np.repeat(np.arange(self.task.groups, dtype=np.int32), self.task.size)
        asking = np.append(groups, 0).astype(np.int32)
        seen = np.append(groups, EVERY_QUERY).astype(np.int32)
        seen[self.states] = self.task.groups
        attending = Attending(self.channels, self.channels, "float64", Mask(asking, seen))
        score = {(f"p.{c}", f"row.{c}"): 1.0 for c in self.weights}
        keys = {(f"row.{c}", f"row.{c}"): 1.0 for c in self.weights}
        outputs = [(f"v.{c}", f"q.{c}") for c in self.weights]
        heads = differences.sum_heads(attending, C, score, keys, outputs)
        return Attention("rows", heads, self.channels, residual=True)

    def _update(self, gain: float) -> Affine:
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        for c in self.weights:
            update.link(self.states, f"v.{c}", self.states, f"v.{c}")
            update.link(self.states, f"v.{c}", self.states, f"q.{c}", -1 / (self.task.scale * gain))
            update.link(self.rows, f"v.{c}", self.rows, f"v.{c}", 2.0)
            update.link(self.rows, f"v.{c}", self.rows, f"q.{c}", -1.0)
        self._set_constants(update)
        return update.build("update")

    def _choice(self) -> list[Layer]:
        """Sum the squares of each state's held-out residuals, and return the weights of the best in one more token."""
        prompt = self.task.prompt
        loss = Attention("held_out", self._squares(), self.channels, residual=True, cross=True)
        more = AffineBuilder(self.tokens, self.channels, self.tokens + 1, self.channels)
        everywhere = np.arange(self.tokens)
        more.copy(everywhere, everywhere, self.channels)
        more.set(self.tokens, ONE, 1.0)
        asking, seen = np.zeros(self.tokens + 1, np.int32), np.full(self.tokens + 1, 2, np.int32)
        asking[self.tokens], seen[self.states], seen[self.tokens - 1] = 1, 1, EVERY_QUERY
        # The sink lies far below every group's score, and is what all other tokens see.
        attending = Attending(self.channels, self.channels, "float64", Mask(asking, seen))
        lowest = -CHOOSING * (prompt.rows * HELD_REACH**2 + 1)
        queries, keys = {(ONE, "score"): 1.0}, {("loss", "score"): -CHOOSING, (SINK, "score"): lowest}
        same = {(f"v.{c}", f"v.{c}"): 1.0 for c in self.weights}
        head = attending.head(queries, keys, same, same)
        return [loss, more.build("chooser"), Attention("choose", (head,), self.channels, residual=True)]

    def _squares(self) -> tuple[Head, ...]:
        """Return heads that add Σ r_i² over the held-out examples to `loss`: Σ_j c_j (2cosh(jεr) − 2)/(jε)²."""
        prompt, task = self.task.prompt, self.task
        sizes = Sizes(prompt.rows, prompt.num_weights + 1, 1.0, HELD_REACH, 2 * HELD_REACH)
        differences = choose(sizes, task.heads, "float64")
        C = differences.sink(prompt.rows + 1, HELD_REACH, "float64")
        score = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, prompt.regressors, strict=True)}
        score |= {(f"rho.{name}", name): 1.0 for name in self.targets}
        keys = {(c, c): 1.0 for c in (*prompt.regressors, *self.targets)}
        return differences.square_heads(
            self._attending(),
            C,
            score,
            keys,
            (ASKED, "loss"),
            weighted=prompt.weighted,
            beside={(ONE, "kept"): -(C + HIDDEN)},
        )
