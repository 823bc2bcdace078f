"""Generalised linear models on the prompt: losses A(w·x̃) − y·w·x̃ with any smooth A.

Every token carries one vector: example i its x̃_i, the tokens V, P, G the states v, p and the gradient g, and key token
k the multiple a_k·v. A step is two layers of attention and an affine map:

    read     example i queries the key tokens: score a_k·v·x̃_i + c_k, value v_k. It reads μ_i = A′(v·x̃_i) off the
             keys; for the logistic loss two keys are exact: softmax([v·x̃_i, 0]) = (μ_i, 1 − μ_i)
    sum      G queries the examples: difference heads on r_i = μ_i − y_i, g = Σ r_i x̃_i (`differences`)
    update   affine: v, p and the keys from v, p, g (`acceleration`)

A mask keeps the others out: an example sees key tokens alone, G examples and sinks, all else the null token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.incontext.acceleration import Schedule
from attnc.incontext.differences import SLACK, Differences, Sizes
from attnc.incontext.prompt import ONE, SINK, TARGET, Prompt
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

if TYPE_CHECKING:
    from jaxtyping import Int

MU, BIAS, VALUE = "mu", "bias", "value"

LOGISTIC = SoftHead.of_one_variable(np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([1.0, 0.0]))
"""σ: two keys, exact."""


@dataclass(frozen=True, eq=False)
class Model:
    """One fit: the mean function μ(z) = A′(z) as keys, |μ_i − y_i| ≤ reach, penalties and steps."""

    prompt: Prompt
    schedule: Schedule
    differences: Differences
    mean_keys: SoftHead[np.ndarray]
    reach: float
    penalty: tuple[float, ...]
    mean: bool = False

    def __post_init__(self) -> None:
        if len(self.penalty) != self.prompt.num_weights:
            raise InputError(f"{self.prompt.num_weights} weights, but {len(self.penalty)} penalties")
        if len(set(zip(self.schedule.etas, self.schedule.betas, strict=True))) > 1:
            raise InputError(
                "a step here moves every token, and is stored once: choose plain, heavy_ball, or nesterov with mu > 0"
            )

    @property
    def iterate(self) -> str:
        return "P" if self.schedule.method == "nesterov" else "V"

    def gradient_bound(self, x: float, weights: float, error: float, dtype: str) -> Bound:
        """|g − Σ (A′(v·x̃_i) − y_i) x̃_i|₂ for |x̃_i| ≤ x, |v| ≤ weights and keys that are within `error` of A′.

        A score of the read layer is off by at most γ·Σ|terms| =: e; weights by e^{±2e}; so μ by (e^{4e} − 1)·½·span of
        the values, and by the rounding of their average.
        """
        u, keys, d = UNIT_ROUNDOFF[dtype], self.mean_keys, self.prompt.num_weights
        scores = gamma(d + 4, u) * float((np.abs(keys.slopes[:, 0]) * x * weights + np.abs(keys.offsets)).max())
        reached = float(np.abs(keys.slopes).max()) * x * weights + float(np.abs(keys.offsets).max())
        off = 2 * scores + u * reached + 2 * LIBM_ULPS * u
        values = float(np.abs(keys.values).max())
        read = math.expm1(2 * off) * float(np.ptp(keys.values)) / 2 + gamma(2 * keys.num_keys + 3, u) * values
        total = x if self.mean else self.prompt.rows * x
        sizes = Sizes(self.prompt.rows, 2, x, self.reach, self.reach + 2 * values, self.mean)
        terms = (
            Term("mean function", float(up(total * error, SLACK)), "the keys' error"),
            Term("read", float(up(total * read, SLACK)), f"the read layer in {dtype}"),
        )
        return Bound((*terms, *self.differences.bound(sizes, dtype).terms))

    @property
    def sinks(self) -> int:
        return self.prompt.rows if self.mean else 1


def glm_program(model: Model, dtype: str = "float64") -> Program:
    """Input (rows + 1, features + 2): the first weights, padded with zeros, then the prompt. Output: the weights."""
    builder = _Builder(model, dtype)
    prompt = model.prompt
    shape = (prompt.rows + 1, prompt.features + 2)
    return check(Program(builder.layers(), (shape,), (prompt.num_weights,)))


@dataclass(frozen=True, eq=False)
class _Builder:
    model: Model
    dtype: str

    @cached_property
    def vector(self) -> tuple[str, ...]:
        return tuple(f"vector.{c}" for c in range(self.model.prompt.num_weights))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        return (*self.vector, MU, TARGET, SINK, BIAS, VALUE, ONE)

    @cached_property
    def places(self) -> dict[str, Int[np.ndarray, " tokens"]]:
        """The tokens of each kind, in their order."""
        sizes = {"example": self.model.prompt.rows, "sink": self.model.sinks, "null": 1, "V": 1, "P": 1, "G": 1}
        sizes["key"] = self.model.mean_keys.num_keys
        ends = np.cumsum(list(sizes.values()))
        return {name: np.arange(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def tokens(self) -> int:
        return int(self.places["key"][-1]) + 1

    def layers(self) -> tuple[Layer, ...]:
        read = Attention("read", (self._read_head(),), self.channels, residual=True)
        total = Attention("sum", tuple(self._sum_heads()), self.channels, residual=True)
        schedule = self.model.schedule
        step = (read, total, self._update(schedule.etas[0], schedule.betas[0]))
        layers: list[Layer] = [self._place()]
        for t in range(1, schedule.steps + 1):
            layers += [replace(layer, name=f"{layer.name}{t}") for layer in step]
        return (*layers, self._answer())

    def _place(self) -> Affine:
        prompt, places = self.model.prompt, self.places
        place = AffineBuilder(prompt.rows + 1, prompt.inputs, self.tokens, self.channels)
        rows = np.arange(1, prompt.rows + 1)
        for regressor, channel in zip(prompt.regressors, self.vector, strict=True):
            place.link(places["example"], channel, rows, regressor)
            for name, factor in (("V", 1.0), ("P", 1.0), ("key", self.model.mean_keys.slopes[:, 0])):
                place.link(places[name], channel, 0, regressor, factor)
        place.link(places["example"], TARGET, rows, TARGET)
        place.set(places["example"], ONE, 1.0)
        if self.model.mean:
            place.link(places["sink"], SINK, rows, "m")
        else:
            place.set(places["sink"], SINK, 1.0)
        self._set_constants(place)
        return place.build("place", self.dtype)

    def _set_constants(self, layer: AffineBuilder) -> None:
        layer.set(self.places["G"], ONE, 1.0)
        layer.set(self.places["key"], BIAS, self.model.mean_keys.offsets)
        layer.set(self.places["key"], VALUE, self.model.mean_keys.values[:, 0])

    def _update(self, eta: float, beta: float) -> Affine:
        """As in `descent`: with step = v − η(g + λv), Nesterov has p' = step, v' = p' + β(p' − p), the others
        v' = step + β(v − p), p' = v. Examples forget their μ, G its sum; the keys follow v'."""
        model, places = self.model, self.places
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        kept = np.concatenate([places[name] for name in ("example", "sink", "null")])
        for channel in self.channels:
            if channel != MU:
                update.link(kept, channel, kept, channel)
        V, P, G = (int(places[name][0]) for name in "VPG")
        for channel, penalty in zip(self.vector, model.penalty, strict=True):
            damped = 1 - eta * penalty
            if model.schedule.method == "nesterov":
                new_p = {V: damped, G: -eta}
                new_v = {V: (1 + beta) * damped, G: -(1 + beta) * eta, P: -beta}
            else:
                new_p = {V: 1.0}
                new_v = {V: damped + beta, G: -eta, P: -beta}
            self._link_all(update, P, channel, new_p, 1.0)
            self._link_all(update, V, channel, new_v, 1.0)
            self._link_all(update, places["key"], channel, new_v, model.mean_keys.slopes[:, 0])
        self._set_constants(update)
        return update.build("update", self.dtype)

    @staticmethod
    def _link_all(
        layer: AffineBuilder,
        token: int | np.ndarray,
        channel: str,
        terms: Mapping[int, float],
        scale: float | np.ndarray,
    ) -> None:
        for source, coefficient in terms.items():
            layer.link(token, channel, source, channel, coefficient * scale)

    def _mask(self, queries: str, keys: tuple[str, ...]) -> Mask:
        """These queries see these keys; all others see the null token."""
        sees, seen = np.zeros(self.tokens, np.int32), np.full(self.tokens, 2, np.int32)
        sees[self.places[queries]] = 1
        for name in keys:
            seen[self.places[name]] = 1
        seen[self.places["null"]] = 0
        return Mask(sees, seen)

    def _read_head(self) -> Head:
        by = (*self.vector, "constant")
        same = {(channel, channel): 1.0 for channel in self.vector}
        return Head(
            projection(self.channels, by, same | {(ONE, "constant"): 1.0}, self.dtype),
            projection(self.channels, by, same | {(BIAS, "constant"): 1.0}, self.dtype),
            projection(self.channels, (MU,), {(VALUE, MU): 1.0}, self.dtype),
            projection((MU,), self.channels, {(MU, MU): 1.0}, self.dtype),
            self._mask("example", ("key",)),
        )

    def _sum_heads(self) -> list[Head]:
        model, by = self.model, ("residual", SINK)
        differences = model.differences
        C = differences.sink(model.prompt.rows + model.sinks, model.reach, self.dtype)
        W_K = projection(
            self.channels, by, {(MU, "residual"): 1.0, (TARGET, "residual"): -1.0, (SINK, SINK): C}, self.dtype
        )
        W_V = projection(self.channels, self.vector, {(c, c): 1.0 for c in self.vector}, self.dtype)
        mask = self._mask("G", ("example", "sink"))
        heads = []
        for j in differences.nodes:
            queries = {(ONE, "residual"): j * differences.eps, (ONE, SINK): 1.0}
            W_O = {(c, c): differences.weight(j) * math.exp(C) for c in self.vector}
            W_Q = projection(self.channels, by, queries, self.dtype)
            heads.append(Head(W_Q, W_K, W_V, projection(self.vector, self.channels, W_O, self.dtype), mask))
        return heads

    def _answer(self) -> Affine:
        names = [f"w.{name.removeprefix('x.')}" for name in self.model.prompt.regressors]
        answer = AffineBuilder(self.tokens, self.channels, 1, names)
        for name, channel in zip(names, self.vector, strict=True):
            answer.link(0, name, self.places[self.model.iterate], channel)
        return answer.build("answer", self.dtype)
