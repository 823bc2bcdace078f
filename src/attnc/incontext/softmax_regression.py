"""Logistic regression over several classes: softmax attention computes its probabilities exactly.

All tokens are in one stream: the examples, a sink, the null token, three tokens v_k, p_k and g_k for each class, and
the queries. Token v_k holds the weights of class k. A step is

    read       example i queries the tokens v_k, with scores v_k·x̃_i, and gets their softmax: the probabilities
    sum        g_k queries the examples: difference heads on r_ik = probability_ik − [y_i = k] give g_k = Σ r_ik x̃_i
    update     affine: v_k and p_k from v_k, p_k and g_k (`acceleration`)

Masks let an example see only the tokens v_k, and g_k only the examples and the sink. All others see the null token. The
targets of the prompt are one-hot. The Hessian of the loss is at most ½ Σ x̃_i x̃_iᵀ for each class (Böhning).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnc.incontext.descent import Task
from attnc.incontext.differences import Sizes, rounded_up
from attnc.incontext.prompt import LOG_WEIGHT, ONE, PRESENT, SINK
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.spec import check
from attnc.numerics.arrays import Int
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma


@dataclass(frozen=True, eq=False)
class SoftmaxTask(Task):
    """One fit of several classes. The prompt has a target for each, which is 1 for the class of the example."""

    loss: str = "softmax"

    losses: ClassVar[tuple[str, ...]] = ("softmax",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedule.check_steady()

    @property
    def iterate(self) -> str:
        return "vector"

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.prompt.targets

    @cached_property
    def places(self) -> dict[str, Int[np.ndarray, " tokens"]]:
        """The numbers of the tokens of each kind."""
        sizes = {"example": self.prompt.rows, "sink": 1, "null": 1, "v": self.classes, "p": self.classes}
        sizes |= {"g": self.classes, "query": self.prompt.queries}
        ends = np.cumsum(list(sizes.values()))
        return {name: np.arange(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def token(self) -> slice:  # type: ignore[override]
        """The tokens that hold the weights, one for each class."""
        found = self.places[self.schedule.iterate]
        return slice(int(found[0]), int(found[-1]) + 1)

    def program(self, dtype: str = "float64") -> Program:
        """Return the program of this task. Its one input has the first weights above the prompt."""
        return _ClassesBuilder(self, dtype).program()

    def inputs(
        self,
        start: np.ndarray,
        X: np.ndarray,
        y: np.ndarray,
        sample_weight: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return the one input of the program: the first weights, alike for all classes, above the prompt."""
        _, tokens = super().inputs(start, X, y, sample_weight, queries)
        return [np.vstack([np.pad(start, (0, tokens.shape[1] - len(start))), tokens])]

    def gradient_bound(self, x: float, weights: float, dtype: str = "float64") -> Bound:
        """Return a bound of |g_k − Σ r_ik x̃_i|₂ for each class, for |x̃_i| ≤ x and |v_k| ≤ weights.

        A score has an error of at most e. A probability then changes by a factor in e^{±4e}, and rounds once more.
        """
        u, d = UNIT_ROUNDOFF[dtype], self.prompt.num_weights
        off = 4 * (gamma(d + 4, u) + 2 * u) * x * weights + gamma(2 * self.classes + 8, u)
        found = self.differences.bound(Sizes(self.prompt.rows, 2, x, self.reach, 2 * self.reach), dtype)
        read = rounded_up(("read", self.prompt.rows * x * off, f"the read layer in {dtype}"))
        return Bound((*read.terms, *found.terms))


@dataclass(frozen=True, eq=False)
class _ClassesBuilder:
    model: SoftmaxTask
    dtype: str

    @cached_property
    def vector(self) -> tuple[str, ...]:
        return tuple(f"vector.{c}" for c in self.model.prompt.weight_names)

    def of_classes(self, part: str) -> tuple[str, ...]:
        return tuple(f"{part}.{k}" for k in range(self.model.classes))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        weight = (LOG_WEIGHT,) if self.model.prompt.weighted else ()
        parts = (channel for part in ("probability", "class") for channel in self.of_classes(part))
        return (*self.vector, *parts, *self.model.prompt.target_names, *weight, SINK, ONE)

    @property
    def tokens(self) -> int:
        return sum(len(found) for found in self.model.places.values())

    def program(self) -> Program:
        model, prompt = self.model, self.model.prompt
        read = Attention("read", (self._read_head(),), self.channels, residual=True)
        total = Attention("sum", self._sum_heads(), self.channels, residual=True)
        step = (read, total, self._update())
        layers: list[Layer] = [self._place()]
        for t in range(1, model.schedule.steps + 1):
            layers += [replace(layer, name=f"{layer.name}{t}") for layer in step]
        shape = (1 + prompt.shape[0], prompt.shape[1])
        if prompt.queries:
            layers.append(replace(read, name="predict"))
            asked, outputs = model.places["query"], {name: name for name in self.of_classes("probability")}
            answer = reading("answer", self.tokens, self.channels, asked, outputs, self.dtype)
            return check(Program(rolled([*layers, answer]), (shape,), (prompt.queries, model.classes)))
        read_off = model.places[model.schedule.iterate]
        outputs = {f"w.{c}": f"vector.{c}" for c in prompt.weight_names}
        answer = reading("answer", self.tokens, self.channels, read_off, outputs, self.dtype)
        return check(Program(rolled([*layers, answer]), (shape,), (model.classes, prompt.num_weights)))

    def _place(self) -> Affine:
        prompt, places = self.model.prompt, self.model.places
        place = AffineBuilder(1 + prompt.shape[0], prompt.inputs, self.tokens, self.channels)
        rows, asked = np.arange(1, prompt.rows + 1), prompt.rows + 1 + np.arange(prompt.queries)
        for regressor, channel in zip(prompt.regressors, self.vector, strict=True):
            place.link(places["example"], channel, rows, regressor)
            if regressor == PRESENT:  # a query has no flag, but an intercept
                place.set(places["query"], channel, 1.0)
            else:
                place.link(places["query"], channel, asked, regressor)
            for name in ("v", "p"):
                place.link(places[name], channel, 0, regressor)
        place.copy(places["example"], rows, (*prompt.target_names, *((LOG_WEIGHT,) if prompt.weighted else ())))
        place.set(places["example"], ONE, 1.0)
        place.set(places["sink"], SINK, 1.0)
        self._set_constants(place)
        return place.build("place", self.dtype)

    def _set_constants(self, layer: AffineBuilder) -> None:
        layer.set(self.model.places["g"], ONE, 1.0)
        for k, channel in enumerate(self.of_classes("class")):
            layer.set(self.model.places["v"][k], channel, 1.0)
            layer.set(self.model.places["g"][k], channel, 1.0)

    def _update(self) -> Affine:
        """Return one step. The probabilities of the examples and the sums in g are set to 0."""
        model, places = self.model, self.model.places
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        kept = np.concatenate([places[name] for name in ("example", "sink", "null", "query")])
        update.copy(kept, kept, (c for c in self.channels if not c.startswith("probability.")))
        for channel, penalty in zip(self.vector, model.penalty, strict=True):
            for (new, old), coefficient in model.schedule.step(0, penalty).items():
                update.link(places[new], channel, places[old], channel, coefficient)
        self._set_constants(update)
        return update.build("update", self.dtype)

    def _attending(self, queries: tuple[str, ...], *keys: str) -> Attending:
        """Let these queries attend to these keys, by a mask. All other queries see the null token."""
        sees, seen = np.zeros(self.tokens, np.int32), np.full(self.tokens, 2, np.int32)
        for name in queries:
            sees[self.model.places[name]] = 1
        for name in keys:
            seen[self.model.places[name]] = 1
        seen[self.model.places["null"]] = 0
        return Attending(self.channels, self.channels, self.dtype, Mask(sees, seen))

    def _read_head(self) -> Head:
        same = {(channel, channel): 1.0 for channel in self.vector}
        named = list(zip(self.of_classes("class"), self.of_classes("probability"), strict=True))
        values, outputs = {(c, c): 1.0 for c, _ in named}, dict.fromkeys(named, 1.0)
        return self._attending(("example", "query"), "v").head(same, same, values, outputs)

    def _sum_heads(self) -> tuple[Head, ...]:
        model, classes = self.model, self.of_classes("class")
        C = model.differences.sink(model.keys, model.reach, self.dtype)
        keys = {pair: 1.0 for pair in zip(self.of_classes("probability"), classes, strict=True)}
        keys |= {pair: -1.0 for pair in zip(model.prompt.target_names, classes, strict=True)}
        return model.differences.sum_heads(
            self._attending(("g",), "example", "sink"),
            C,
            {(channel, channel): 1.0 for channel in classes},
            keys,
            [(channel, channel) for channel in self.vector],
            weighted=model.prompt.weighted,
        )
