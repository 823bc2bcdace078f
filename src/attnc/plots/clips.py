"""Truncated linear functions, told by a Target or read from the weights of a network that computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import AttentionStage, NormalForm
from attnc.plots.flow import reads
from attnc.plots.places import ROUNDING, gaussian_places
from attnc.plots.reading import selectors
from attnc.plots.selectors import common_direction
from attnc.plots.style import number
from attnc.targets.linear import TruncatedLinear

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Clip:
    """Output i is clip(W_i·x + t_i, a, b), x all variables in one row."""

    W: Float[np.ndarray, "outputs d"]
    t: Float[np.ndarray, " outputs"]
    a: float
    b: float

    @classmethod
    def of(cls, target: TruncatedLinear) -> Clip:
        n, d = target.W.shape
        W = np.zeros((n, n, d))
        W[np.arange(n), np.arange(n)] = target.W
        return cls(W.reshape(n, n * d), np.array(target.t), target.a, target.b)

    def __call__(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.clip(points @ self.W.T + self.t, self.a, self.b)

    def describe(self, names: tuple[str, ...]) -> str:
        ends = f"{number(self.a)}, {number(self.b)}"
        if self.W.shape[0] > 1 or len(names) > 3:
            return f"clip(w·x + t, {ends})"
        terms = [
            (w, f"{number(abs(w))}·{name}".removeprefix("1·")) for w, name in zip(self.W[0], names, strict=True) if w
        ]
        is_shifted = abs(self.t[0]) > 1e-9 * (self.b - self.a)  # what was read has rounding errors
        terms += [(self.t[0], number(abs(self.t[0])))] if is_shifted else []
        text = "".join(f" {'−' if w < 0 else '+'} {term}" for w, term in terms)
        return f"clip({text[3:] if text.startswith(' +') else text[1:]}, {ends})"


def read_clip(form: NormalForm) -> Clip | None:
    """The functions that one attention layer truncates; None where the weights do not say.

    An output reads one query, whose scores depend on one direction of x and stand like −γ(s − S_k)² along it. Where
    the keys' values are clip(μ + λ·S_k), the function is clip(μ + λ·s).
    """
    if len(form.stages) != 1 or not isinstance(form.stages[0], AttentionStage):
        return None
    rows = [_read_row(form, output) for output in range(math.prod(form.output.shape))]
    if any(row is None for row in rows):
        return None
    known = [row for row in rows if row is not None]
    ends = np.array([[a, b] for _, _, a, b in known])
    if np.ptp(ends, axis=0).max() > 1e-6 * np.ptp(ends):
        return None
    return Clip(np.array([w for w, *_ in known]), np.array([t for _, t, *_ in known]), *map(float, ends[0]))


def _read_row(form: NormalForm, output: int) -> tuple[np.ndarray, float, float, float] | None:
    queries = reads(form, output)[0]
    if len(queries) != 1:
        return None
    heads = selectors(form, 0, output, queries)
    direction = common_direction(heads)
    if direction is None:
        return None
    places, values = [], []
    for head in heads:
        assert head.a is not None
        rounding = ROUNDING[form.output.linear.dtype]
        found = gaussian_places(head.a @ direction / (direction @ direction), head.c, rounding)
        if found is None or head.outputs is None:
            return None
        says = ~head.is_sentinel if len(heads) > 1 else np.ones(len(head), bool)
        places.append(found[says])
        values.append(head.outputs[says])
    return _linear_between(np.concatenate(places), np.concatenate(values), direction)


def _linear_between(
    S: np.ndarray, v: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, float, float, float] | None:
    """v = clip(μ + λS, min v, max v), fitted where it is not truncated and checked everywhere."""
    a, b = float(v.min()), float(v.max())
    slack = 1e-4 * (b - a) / max(1, len(v) - 1)
    inside = (v > a + slack) & (v < b - slack)
    if b <= a or not inside.any():
        return None
    # The two ends belong to the line as well: the outermost places that have the ends' values and are nearest to it.
    ends = [np.flatnonzero(v <= a + slack), np.flatnonzero(v >= b - slack)]
    middle = S[inside].mean()
    chosen = np.concatenate([np.flatnonzero(inside), *(e[[np.argmin(np.abs(S[e] - middle))]] for e in ends)])
    slope, constant = np.polyfit(S[chosen], v[chosen], 1)
    if np.abs(np.clip(constant + slope * S, a, b) - v).max() > 1e-3 * (b - a) / max(1, len(chosen) - 1):
        return None
    return slope * direction, float(constant), a, b
