"""Generalised linear models on the prompt: losses A(w·x̃) − y·w·x̃ with any smooth A.

Every token carries one vector: example i carries x̃_i, the tokens v, p and g carry the states and the gradient, and key
token k carries a_k·v. A step is two layers of attention and an affine map:

    read     example i queries the key tokens, with score a_k·v·x̃_i + c_k and value v_k, and gets μ_i = A′(v·x̃_i).
             For the logistic loss two keys are exact: softmax([v·x̃_i, 0]) = (μ_i, 1 − μ_i)
    sum      g queries the examples: difference heads on r_i = μ_i − y_i give g = Σ r_i x̃_i (`differences`)
    update   affine: v, p and the keys from v, p, g (`acceleration`)

By masks, an example sees the key tokens alone, g sees the examples and the sinks, and all else sees the null token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.differences import Sizes, rounded_up
from attnc.incontext.prompt import ONE, SINK, TARGET, Attending
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma

if TYPE_CHECKING:
    from jaxtyping import Int

MU, BIAS, VALUE = "mu", "bias", "value"

LOGISTIC = SoftHead.of_one_variable(np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([1.0, 0.0]))
"""The keys of the sigmoid: two, and exact."""


@dataclass(frozen=True, eq=False)
class GLMTask(Task):
    """One fit: the mean function μ(z) = A′(z) as keys within `keys_error` of it, and |μ_i − y_i| ≤ reach."""

    loss: str = "logistic"
    mean_keys: SoftHead[np.ndarray] = LOGISTIC
    keys_error: float = 0.0

    losses: ClassVar[tuple[str, ...]] = ("logistic", "other")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l1:
            raise InputError(f"a loss that takes two layers has no l1 penalty, found {self.l1}")
        self.schedule.check_steady()

    @property
    def iterate(self) -> str:
        return "vector"

    @property
    def token(self) -> int:  # type: ignore[override]
        """The number of the token that holds the iterate: v and p stand behind the null token."""
        return self.keys + (2 if self.schedule.iterate == "p" else 1)

    def program(self, dtype: str = "float64") -> Program:
        return glm_program(self, dtype)

    def inputs(self, start: np.ndarray, X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """The one input of the program: the first weights, padded with zeros, above the prompt."""
        prompt = self.prompt
        return [np.vstack([np.pad(start, (0, len(prompt.inputs) - prompt.num_weights)), prompt.tokens(X, y)])]

    def gradient_bound(self, x: float, weights: float, dtype: str = "float64") -> Bound:
        """A bound of |g − Σ (A′(v·x̃_i) − y_i) x̃_i|₂ for |x̃_i| ≤ x and |v| ≤ weights.

        A score of the read layer is off by at most e = γ·Σ|terms|, a weight by a factor in e^{±2e}, and so μ by
        (e^{4e} − 1)·½·span of the values, and by the rounding of their average.
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


def glm_program(model: GLMTask, dtype: str = "float64") -> Program:
    """The program of a fit, which returns the last weights.

    Its input has the shape (rows + 1, features + 2): the first weights, padded with zeros, above the prompt.
    """
    builder = _GLMBuilder(model, dtype)
    prompt = model.prompt
    shape = (prompt.rows + 1, prompt.features + 2)
    return check(Program(builder.layers(), (shape,), (prompt.num_weights,)))


@dataclass(frozen=True, eq=False)
class _GLMBuilder:
    model: GLMTask
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
        sizes = {"example": self.model.prompt.rows, "sink": self.model.sinks, "null": 1, "v": 1, "p": 1, "g": 1}
        sizes["key"] = self.model.mean_keys.num_keys
        ends = np.cumsum(list(sizes.values()))
        return {name: np.arange(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def tokens(self) -> int:
        return int(self.places["key"][-1]) + 1

    def layers(self) -> tuple[Layer, ...]:
        read = Attention("read", (self._read_head(),), self.channels, residual=True)
        total = Attention("sum", self._sum_heads(), self.channels, residual=True)
        step = (read, total, self._update())
        layers: list[Layer] = [self._place()]
        for t in range(1, self.model.schedule.steps + 1):
            layers += [replace(layer, name=f"{layer.name}{t}") for layer in step]
        return (*layers, self._answer())

    def _place(self) -> Affine:
        prompt, places = self.model.prompt, self.places
        place = AffineBuilder(prompt.rows + 1, prompt.inputs, self.tokens, self.channels)
        rows = np.arange(1, prompt.rows + 1)
        for regressor, channel in zip(prompt.regressors, self.vector, strict=True):
            place.link(places["example"], channel, rows, regressor)
            for name, factor in (("v", 1.0), ("p", 1.0), ("key", self.model.mean_keys.slopes[:, 0])):
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
        layer.set(self.places["g"], ONE, 1.0)
        layer.set(self.places["key"], BIAS, self.model.mean_keys.offsets)
        layer.set(self.places["key"], VALUE, self.model.mean_keys.values[:, 0])

    def _update(self) -> Affine:
        """One step; the keys follow the new v. Examples lose their μ, and g its sum."""
        model, places, slopes = self.model, self.places, self.model.mean_keys.slopes[:, 0]
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        kept = np.concatenate([places[name] for name in ("example", "sink", "null")])
        for channel in self.channels:
            if channel != MU:
                update.link(kept, channel, kept, channel)
        for channel, penalty in zip(self.vector, model.penalty, strict=True):
            for (new, old), coefficient in model.schedule.step(0, penalty).items():
                update.link(places[new], channel, places[old], channel, coefficient)
                if new == "v":
                    update.link(places["key"], channel, places[old], channel, coefficient * slopes)
        self._set_constants(update)
        return update.build("update", self.dtype)

    def _attending(self, queries: str, *keys: str) -> Attending:
        """By a mask these queries see these keys; all others see the null token."""
        sees, seen = np.zeros(self.tokens, np.int32), np.full(self.tokens, 2, np.int32)
        sees[self.places[queries]] = 1
        for name in keys:
            seen[self.places[name]] = 1
        seen[self.places["null"]] = 0
        return Attending(self.channels, self.channels, self.dtype, Mask(sees, seen))

    def _read_head(self) -> Head:
        same = {(channel, channel): 1.0 for channel in self.vector}
        queries, keys = same | {(ONE, "constant"): 1.0}, same | {(BIAS, "constant"): 1.0}
        return self._attending("example", "key").head(queries, keys, {(VALUE, MU): 1.0}, {(MU, MU): 1.0})

    def _sum_heads(self) -> tuple[Head, ...]:
        model, attending = self.model, self._attending("g", "example", "sink")
        C = model.differences.sink(model.keys, model.reach, self.dtype)
        keys = {(MU, "residual"): 1.0, (TARGET, "residual"): -1.0}
        outputs = [(c, c) for c in self.vector]
        return model.differences.sum_heads(attending, C, {(ONE, "residual"): 1.0}, keys, outputs)

    def _answer(self) -> Affine:
        names = [f"w.{name}" for name in self.model.prompt.weight_names]
        answer = AffineBuilder(self.tokens, self.channels, 1, names)
        for name, channel in zip(names, self.vector, strict=True):
            answer.link(0, name, self.places[self.model.schedule.iterate], channel)
        return answer.build("answer", self.dtype)
