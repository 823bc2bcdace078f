"""Logistic, Poisson and Huber regression by Newton steps on the prompt, three or four attention layers each.

All tokens are in one stream: the examples, the penalty rows, a state with the weights w, a token for each row m_r of a
matrix M that tends to the inverse of the Hessian H, a sink, and the keys of the loss, which hold multiples of w. With
z_i = w·x_i, μ_i the mean at z_i and s_i its derivative, all turns are

    read       example i queries the keys of the loss, with scores a_k·z_i + c_k, and gets μ_i and s_i. For the logistic
               loss three keys give both exactly: softmax(0, z + log 2, 2z) = ((1−μ)², 2μ(1−μ), μ²). For Poisson
               regression a head beside a sink returns e^z, which is both
    sum        the state gets g = Σ (μ_i − y_i) x_i + Σ λ_c w_c, and row r gets p_r = Σ s_i (m_r·x_i) x_i + λ_r m_r, row
               r of MH. The sum of products takes four heads for each difference (`differences.Products`)
    rows       a token with p gets Σ_k p_k m_k: Mg for the state, and row r of MHM for row r
    update     affine: w ← w − ηMg, m_r ← 2m_r − (MHM)_r, and the keys follow w

For the Huber loss r²/2 (|r| ≤ 1), |r| − ½ (beyond), two layers take the place of `read`, and s_i is 1:

    read       example i attends to the state by difference heads and gets z_i
    clip       two gates, in which example i sees itself, subtract relu(r_i − 1) − relu(−r_i − 1), r_i = z_i − y_i

A penalty λ_c is one row of the prompt, as in `newton`: √λ_c in column c, and flag 0. Units are such that M₀ = I/τ is at
most H⁻¹ at the start, with τ the number of weights (four times that for Poisson regression, whose curvature grows).

While M is below the inverse of H, its turns double it, and w takes short steps that lower the objective. Then both
converge quadratically. Where curvatures jump, M may be above 2H⁻¹ for a turn, and then the turns diverge. With
`caution` > 0 that many turns take η = 1/4. No convergence is proved in advance: the domain of such a program consists
of the prompts on which exact turns converge, which `check` runs, and `enclosures` bounds the distance that is left. The
turns of the Huber loss cannot diverge (`turns`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnc.errors import InputError
from attnc.incontext.descent import GATE, gate_slope
from attnc.incontext.differences import Products, Sizes, choose
from attnc.incontext.domain import Domain
from attnc.incontext.prompt import LOG_WEIGHT, ONE, SINK, TARGET, Prompt
from attnc.incontext.turns import CURVATURES, HUBER, REFINING, Examples, Turns
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.spec import check
from attnc.numerics.arrays import Float, Int

MEAN, SLOPE, BIAS = "mean", "slope", "bias"
GRADIENT_HEADS = 8
"""Number of pairs of heads of the gradient, as in `newton`."""
PRODUCT_HEADS = 4
"""Number of differences of the Hessian. M only preconditions: its error delays convergence and does not bias w."""
ROW_REACH = 8.0
"""Entries of MH and of the scaled gradient for which the heads over rows are made. Those of MH tend to 0 and 1."""
MEAN_ROOM = 40.0
"""log of a sink's weight over that of the largest mean, so that the sink is the denominator."""
MOST_TURNS = 64
"""Maximum number of turns. Measured on 300 random data sets with conditions up to 1e9: the largest number was 48."""
BEYOND = 8
"""Number of Newton turns beyond log₂ of the condition at the start. On breast cancer data, standardised, 18 turns bring
the error to 1e-9 at a condition of 4e3."""
LEAST_NEWTON_TURNS = 8
"""The smallest number of Newton turns."""
MOST_HUBER_TURNS = 2_000
"""Maximum number of turns of the Huber loss. The error of w shrinks in a turn by the share of examples, in the worst
direction, whose residuals are beyond the threshold."""


TRIED_TURNS = (100, 400)
"""Numbers of turns of the Huber loss that are tried before the largest: most data need fewer than 100."""


@dataclass(frozen=True)
class CurvedTask:
    """A fit of at most `prompt.rows` examples, penalty rows included, by Newton steps of a curved loss.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt. Its regressors include a constant column if there is an intercept.
    loss : {"logistic", "poisson", "huber"}
        The loss.
    turns : int
        Number of turns.
    caution : int
        Number of turns with short steps, at the beginning.
    largest : float
        The largest mean of a Poisson regression, or the largest |y_i| for the Huber loss. Means of the logistic loss
        are at most 1.
    reach : float
        For the Huber loss, the largest |w·x_i| and √λ_c·|w_c| on the way.
    doublings : int or None
        The number of turns in which M grows in the flattest direction. None takes the number of turns, less 6.
    asked : float
        For the Huber loss, the largest |w·x| of a query.
    """

    prompt: Prompt
    loss: str
    turns: int
    caution: int = 0
    largest: float = 1.0
    reach: float = 1.0
    doublings: int | None = None
    asked: float = 1.0

    mean: ClassVar[bool] = False
    l1: ClassVar[tuple[float, ...]] = ()
    iterate: ClassVar[str] = "vector"

    def __post_init__(self) -> None:
        if self.loss not in CURVATURES:
            raise InputError(f"the loss is {' or '.join(CURVATURES)}, found {self.loss!r}")
        most = MOST_HUBER_TURNS if self.is_huber else MOST_TURNS
        if not len(REFINING) < self.turns <= most or not 0 <= self.caution <= self.turns:
            raise InputError(
                f"the number of turns is {len(REFINING) + 1} to {most}, and at most all of them are cautious, "
                f"found {self.turns} and {self.caution}"
            )

    @property
    def steps(self) -> Turns:
        """The same turns with exact sums."""
        return Turns(self.loss, self.turns, self.caution, self.trace, self.reach if self.is_huber else math.inf)

    @property
    def is_huber(self) -> bool:
        """Whether the loss is Huber's."""
        return self.loss == HUBER

    @property
    def residual(self) -> float:
        """A bound of the derivative of a loss."""
        return 1.0 if self.is_huber else self.largest

    @property
    def growth(self) -> int:
        """The number of turns in which M grows in the flattest direction."""
        return max(self.turns - 6, 0) if self.doublings is None else self.doublings

    @property
    def trace(self) -> float:
        """M₀ = I/trace."""
        return float(self.prompt.num_weights) * (4.0 if self.loss == "poisson" else 1.0)

    @property
    def scale(self) -> float:
        """The factor of the rows of M, a power of two: M grows to 2^growth/trace in the flattest direction."""
        return math.ldexp(1.0, math.floor(math.log2(self.trace)) - self.growth // 2)

    @property
    def factor_scale(self) -> float:
        """The factor, beyond `scale`, that brings m_r·x_i into [−1, 1]. A power of two."""
        reach = self.scale * 2.0**self.growth / self.trace * math.sqrt(self.prompt.num_weights)
        return math.ldexp(1.0, -math.ceil(math.log2(reach)))

    @property
    def gradient_scale(self) -> float:
        """The factor of g, a power of two. |g_c| ≤ residual·√rows/curvature without penalties."""
        most = self.residual * math.sqrt(self.prompt.rows) / CURVATURES[self.loss] + self.reach * self.is_huber
        return math.ldexp(1.0, -math.ceil(math.log2(most)))

    @property
    def penalty(self) -> tuple[float, ...]:
        """No penalty: penalties are rows of the prompt."""
        return (0.0,) * self.prompt.num_weights

    @cached_property
    def places(self) -> dict[str, Int[np.ndarray, " tokens"]]:
        """The numbers of the tokens of each kind."""
        weights = self.prompt.num_weights
        sizes = {"example": self.prompt.rows - weights, "ridge": weights, "query": self.prompt.queries, "null": 1}
        sizes |= {"sink": 1, "state": 1, "row": weights, "key": len(self.keys[0])}
        ends = np.cumsum(list(sizes.values()))
        return {name: np.arange(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def token(self) -> int:
        """The number of the token that holds the weights."""
        return int(self.places["state"][0])

    @property
    def keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The slopes, the offsets and the values (mean, slope / curvature) of the keys of the loss."""
        if self.is_huber:
            return np.zeros(0), np.zeros(0), np.zeros((0, 2))
        if self.loss == "logistic":
            return np.array([0.0, 1.0, 2.0]), np.array([0.0, math.log(2), 0.0]), np.array([[0, 0], [0.5, 2], [1, 0]])
        C = math.log(self.largest) + MEAN_ROOM
        return np.array([1.0, 0.0]), np.array([0.0, C]), np.array([[math.exp(C)] * 2, [0.0, 0.0]])

    @property
    def domain(self) -> Domain:
        """The prompts for which the program is built."""
        tau = self.prompt.num_weights
        target = 1.0 if self.loss == "logistic" else self.largest
        return Domain(
            self.prompt,
            math.sqrt(tau),
            target=target,
            start=0.0,
            L=float(tau),
            has_penalty_rows=True,
            turns=self.steps,
            gradient=ROW_REACH / self.gradient_scale,
        )

    def program(self) -> Program:
        """Return the program. Its one input has the first weights above the prompt."""
        return _CurvedBuilder(self).program()

    def inputs(
        self,
        X: Float[np.ndarray, "rows weights"],
        y: Float[np.ndarray, " rows"],
        penalty: Float[np.ndarray, " weights"],
        sample_weight: Float[np.ndarray, " rows"] | None = None,
        queries: Float[np.ndarray, "queries weights"] | None = None,
    ) -> list[np.ndarray]:
        """Return the one input of the program. Penalties are the last rows before the queries."""
        prompt, d = self.prompt, self.prompt.num_weights
        if len(X) > prompt.rows - d:
            raise InputError(f"the program was built for at most {prompt.rows - d} examples, found {len(X)}")
        tokens = prompt.tokens(X, y, sample_weight=sample_weight, queries=queries)
        tokens[prompt.rows - d : prompt.rows, :d] = np.diag(np.sqrt(penalty))
        return [np.vstack([np.zeros((1, tokens.shape[1])), tokens])]


def glm_tasks(loss: str, prompt: Prompt, doublings: int, most: float, max_iter: int) -> Iterator[CurvedTask]:
    """Return tasks of logistic or Poisson regression in the order in which a fit tries them.

    The first has as many turns as `doublings`, log₂ of the condition at the start, asks for. Later ones have more, and
    the last ones begin with short steps. `most` is the largest target.
    """
    allowed = min(max_iter, MOST_TURNS)
    begin = min(4 * math.ceil((doublings + BEYOND) / 4), MOST_TURNS)
    plain = [(turns, 0, 1.0) for turns in range(begin, allowed + 1, 4)] or [(allowed, 0, 1.0)]
    cautious = [(allowed, allowed * 5 // 8, factor) for factor in (1.0, 16.0)]
    largest = power_of_four(2 * max(1.0, most)) if loss == "poisson" else 1.0
    for turns, caution, room in (*plain, *cautious):
        if turns >= LEAST_NEWTON_TURNS:
            yield CurvedTask(prompt, loss, turns, caution, largest * (room if loss == "poisson" else 1.0))


def huber_task(
    prompt: Prompt, fits: Sequence[Examples], doublings: int, tol: float, max_iter: int
) -> tuple[CurvedTask, float]:
    """Return the task whose turns converge to `tol` on all of these fits, and the largest last step.

    `doublings` is log₂ of the largest condition.
    """
    allowed = min(max_iter, MOST_HUBER_TURNS)
    turns, reached, most, left = doublings, 1.0, 1.0, 0.0
    for each in fits:
        for tried in sorted({min(number, allowed) for number in (*TRIED_TURNS, allowed)}):
            trial = Turns(HUBER, tried, trace=float(prompt.num_weights))
            path, _, _ = trial.path(each)
            steps = np.abs(np.diff(path, axis=0)).max(axis=1) / (1 + np.abs(path[1:]).max(axis=1))
            enough = np.flatnonzero(steps[doublings:] <= tol)
            if len(enough):
                break
        own = doublings + int(enough[0]) + 1 if len(enough) else trial.turns
        left = max(left, float(steps[own - 1]))
        turns, reached = max(turns, own), max(reached, trial.reached(each, path[: own + 1]))
        most = max(most, float(np.abs(each.y).max()))
    made = CurvedTask(
        prompt,
        HUBER,
        min(max(4 * math.ceil((turns + len(REFINING)) / 4), LEAST_NEWTON_TURNS), MOST_HUBER_TURNS),
        largest=power_of_four(2 * most),
        reach=power_of_four(2 * reached),
        doublings=doublings,
    )
    return made, left


def power_of_four(number: float) -> float:
    """Return the least power of 4 that is at least a number."""
    return 4.0 ** math.ceil(math.log(number, 4))


@dataclass(frozen=True, eq=False)
class _CurvedBuilder:
    task: CurvedTask

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return self.task.prompt.weight_names

    def channels_of(self, part: str) -> tuple[str, ...]:
        return tuple(f"{part}.{c}" for c in self.weights)

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts = (channel for part in ("vector", "p", "q", "row") for channel in self.channels_of(part))
        return (*parts, MEAN, SLOPE, TARGET, LOG_WEIGHT, SINK, BIAS, ONE)

    @property
    def tokens(self) -> int:
        return sum(len(places) for places in self.task.places.values())

    def program(self) -> Program:
        prompt, task = self.task.prompt, self.task
        layers: list[Layer] = [self._place()]
        read: list[Attention] = [self._read("read", task.reach)]
        if task.is_huber:
            read.append(Attention("clip", self._gates(), self.channels, residual=True))
        total = Attention("sum", self._sum_heads(), self.channels, residual=True)
        rows = Attention("rows", self._row_heads(), self.channels, residual=True)
        made: dict[tuple[float, float], tuple[Affine, Affine]] = {}
        for t in range(task.turns):
            gain, length = task.gradient_scale * task.steps.gain(t), task.steps.length(t)
            if (gain, length) not in made:
                made[gain, length] = (self._scale(gain), self._update(gain, length))
            scale, update = made[gain, length]
            turn: tuple[Layer, ...] = (*read, total, scale, rows, update)
            layers += [replace(layer, name=f"{layer.name}{t + 1}") for layer in turn]
        shape = (1 + prompt.shape[0], prompt.shape[1])
        if prompt.queries:
            layers.append(self._read("predict", task.asked))
            asked = task.places["query"]
            answer = reading("answer", self.tokens, self.channels, asked, {"prediction": MEAN}, "float64")
            return check(Program(rolled([*layers, answer]), (shape,), (prompt.queries,)))
        outputs = {f"w.{c}": f"vector.{c}" for c in self.weights}
        answer = reading("answer", self.tokens, self.channels, task.places["state"], outputs, "float64")
        return check(Program(rolled([*layers, answer]), (shape,), (prompt.num_weights,)))

    def _place(self) -> Affine:
        prompt, places, slopes = self.task.prompt, self.task.places, self.task.keys[0]
        place = AffineBuilder(1 + prompt.shape[0], prompt.inputs, self.tokens, self.channels)
        given = np.concatenate(
            [places[name] for name in ("example", "ridge", "query")]
        )  # as many as rows of the prompt
        for k, c in enumerate(prompt.regressors):
            place.link(given, f"vector.{self.weights[k]}", 1 + given, c)
            place.link(places["state"], f"vector.{self.weights[k]}", 0, c)
            place.link(places["key"], f"vector.{self.weights[k]}", 0, c, slopes)
            place.set(places["row"][k], f"vector.{self.weights[k]}", self.task.scale / self.task.trace)
        rows = 1 + places["example"]
        place.link(places["example"], TARGET, rows, TARGET)
        if prompt.weighted:
            place.link(places["example"], LOG_WEIGHT, rows, LOG_WEIGHT)
        self._set_constants(place)
        return place.build("place")

    def _set_constants(self, layer: AffineBuilder) -> None:
        places = self.task.places
        for name in ("example", "ridge", "query", "state", "row"):
            layer.set(places[name], ONE, 1.0)
        layer.set(places["sink"], SINK, 1.0)
        layer.set(places["ridge"], SLOPE, 1.0)
        if self.task.is_huber:
            layer.set(places["example"], SLOPE, 1.0)
        _, offsets, values = self.task.keys
        layer.set(places["key"], BIAS, offsets)
        layer.set(places["key"], MEAN, values[:, 0])
        layer.set(places["key"], SLOPE, values[:, 1])
        for row, channel in zip(places["row"], self.channels_of("row"), strict=True):
            layer.set(row, channel, 1.0)

    def _attending(self, queries: tuple[str, ...], *keys: str) -> Attending:
        """Let these queries attend to these keys, by a mask. All other queries see the null token."""
        sees, seen = np.zeros(self.tokens, np.int32), np.full(self.tokens, 2, np.int32)
        for name in queries:
            sees[self.task.places[name]] = 1
        for name in keys:
            seen[self.task.places[name]] = 1
        seen[self.task.places["null"]] = 0
        return Attending(self.channels, self.channels, "float64", Mask(sees, seen))

    def _read(self, name: str, reach: float) -> Attention:
        """Return the layer in which examples and queries get their means, or z for the Huber loss."""
        same = {(channel, channel): 1.0 for channel in self.channels_of("vector")}
        if not self.task.is_huber:
            return Attention(name, (self._read_head(same),), self.channels, residual=True)
        found = choose(Sizes(1, self.task.prompt.num_weights, 1.0, reach, reach), GRADIENT_HEADS, "float64")
        attending = self._attending(("example", "query"), "state", "sink")
        heads = found.sum_heads(attending, found.sink(2, reach, "float64"), same, same, [(ONE, MEAN)])
        return Attention(name, heads, self.channels, residual=True)

    def _gates(self) -> tuple[Head, ...]:
        """Return the heads that subtract relu(r − 1) − relu(−r − 1) from the mean of each example."""
        examples, null = self.task.places["example"], self.task.places["null"]
        sees = np.full(self.tokens, len(examples), np.int32)
        seen = np.full(self.tokens, len(examples) + 1, np.int32)
        sees[examples] = seen[examples] = np.arange(len(examples))
        seen[null] = EVERY_QUERY
        attending = Attending(self.channels, self.channels, "float64", Mask(sees, seen))
        slope = gate_slope(self.task.largest + self.task.reach + 1, "float64")
        heads = []
        for sign in (1.0, -1.0):
            beyond = {(MEAN, GATE): sign, (TARGET, GATE): -sign, (ONE, GATE): -1.0}
            heads.append(attending.head(beyond, {(ONE, GATE): slope}, beyond, {(GATE, MEAN): -sign}))
        return tuple(heads)

    def _read_head(self, same: dict[tuple[str, str], float]) -> Head:
        queries, keys = same | {(ONE, "constant"): 1.0}, same | {(BIAS, "constant"): 1.0}
        values = {(channel, channel): 1.0 for channel in (MEAN, SLOPE)}
        return self._attending(("example", "query"), "key").head(queries, keys, values, values)

    def _sum_heads(self) -> tuple[Head, ...]:
        task, prompt = self.task, self.task.prompt
        vector, sums = self.channels_of("vector"), self.channels_of("p")
        same = {(channel, channel): 1.0 for channel in vector}
        into = dict(zip(vector, sums, strict=True))
        x, keyed = math.sqrt(prompt.num_weights), prompt.rows + 1

        parts = 2 * (task.largest + task.reach * task.is_huber)
        of_losses = choose(Sizes(prompt.rows, 2, x, task.residual, parts), GRADIENT_HEADS, "float64")
        heads = of_losses.sum_heads(
            self._attending(("state",), "example", "sink"),
            of_losses.sink(keyed, task.residual, "float64"),
            {(ONE, "residual"): 1.0},
            {(MEAN, "residual"): 1.0, (TARGET, "residual"): -1.0},
            into.items(),
            factor=1 / CURVATURES[task.loss],
            weighted=prompt.weighted,
        )
        # √λ·w is below the room of a gradient. A product with room in the value has the accuracy of one without.
        room = 1 / task.gradient_scale
        of_penalties = choose(Sizes(prompt.num_weights, prompt.num_weights, 1.0, 1.0, 1.0), GRADIENT_HEADS, "float64")
        heads += of_penalties.sum_heads(
            self._attending(("state",), "ridge", "sink"),
            of_penalties.sink(prompt.num_weights + 1, 1.0, "float64"),
            {(channel, channel): 1 / room for channel in vector},
            same,
            into.items(),
            factor=room,
        )
        products = Products.best(PRODUCT_HEADS, "float64")
        return heads + products.product_heads(
            self._attending(("row",), "example", "ridge", "sink"),
            products.sink(keyed, 2.0, "float64"),
            {(channel, channel): task.factor_scale for channel in vector},
            {(ONE, SLOPE): 1 / task.residual},
            same | {(SLOPE, SLOPE): 1.0},
            {pair: task.residual / (task.factor_scale * task.scale) for pair in into.items()},
            weighted=prompt.weighted,
        )

    def _row_heads(self) -> tuple[Head, ...]:
        weights = len(self.weights)
        found = choose(Sizes(weights, 1, 1.0, ROW_REACH, ROW_REACH), GRADIENT_HEADS, "float64")
        numbers, names = self.channels_of("p"), self.channels_of("row")
        return found.sum_heads(
            self._attending(("state", "row"), "row", "sink"),
            found.sink(weights + 1, ROW_REACH, "float64"),
            {pair: 1.0 for pair in zip(numbers, names, strict=True)},
            {(name, name): 1.0 for name in names},
            list(zip(self.channels_of("vector"), self.channels_of("q"), strict=True)),
        )

    def _scale(self, gain: float) -> Affine:
        """Multiply the gradient by its factor in this turn."""
        scale = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        everywhere, state = np.arange(self.tokens), self.task.places["state"]
        others = np.setdiff1d(everywhere, state)
        for channel in self.channels:
            scale.link(others, channel, others, channel)
            scale.link(state, channel, state, channel, gain if channel.startswith("p.") else 1.0)
        return scale.build("scale")

    def _update(self, gain: float, length: float) -> Affine:
        """Return one step. The keys follow the new w. Means, slopes and sums are set to 0."""
        task, places, slopes = self.task, self.task.places, self.task.keys[0]
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        given = np.concatenate([places[name] for name in ("example", "ridge", "query")])
        update.copy(given, given, (*self.channels_of("vector"), TARGET, LOG_WEIGHT))
        for vector, q in zip(self.channels_of("vector"), self.channels_of("q"), strict=True):
            for name, factor in (("state", 1.0), ("key", slopes)):
                update.link(places[name], vector, places["state"], vector, factor)
                update.link(places[name], vector, places["state"], q, -length * factor / (task.scale * gain))
            update.link(places["row"], vector, places["row"], vector, 2.0)
            update.link(places["row"], vector, places["row"], q, -1.0)
        self._set_constants(update)
        return update.build("update")
