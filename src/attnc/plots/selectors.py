"""One softmax of a network at a time: the scores that one query of one head meets, read from the normal form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.engines.numpy_engine import advanced
from attnc.ir.normal_form import AttentionStage, FoldedHead, NormalForm, SoftmaxStage, Stage
from attnc.ir.reference import softmax
from attnc.ir.soft_head import KeyGrid, SoftHead

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

SCORE_ROUNDING = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 2e-6}
"""Largest deviation of scores from a formula, relative to their range, that counts as rounding. It is far above the
roundings of β|L|² and far below the deviation of scores of another shape."""


@dataclass(frozen=True, eq=False)
class Selector:
    """One softmax in its place: the soft head over the keys that a query sees, a function of the state u before it.

    There is no soft head where scores are bilinear in u; scores are then made by the folded head.
    """

    stage: int
    layer: str
    head: int | None  # None: a Softmax layer
    query: int
    keys: Int[np.ndarray, " keys"]  # their tokens
    soft: SoftHead[Any] | None
    gain: Float[np.ndarray, " channels"] | None  # the output's coefficients on the channels that the softmax writes
    base: float  # the constant of the output
    folded: FoldedHead | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def scores(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """Return the scores of some of the keys, (batch, near)."""
        if self.soft is not None:
            return self.soft.chosen(near).scores(u)
        assert self.folded is not None
        queries = self.folded.queries.rows(np.array([self.query]))(u)
        keys = self.folded.keys.rows(self.keys[near])(u)
        return np.asarray((queries @ keys.transpose(0, 2, 1))[:, 0])

    def near(
        self,
        lo: Float[np.ndarray, " variables"],
        hi: Float[np.ndarray, " variables"],
        margin: float,
        among: Int[np.ndarray, " among"] | None = None,
    ) -> Int[np.ndarray, " near"]:
        """Return the keys that come within `margin` of the largest score somewhere in the window.

        Such a key comes within `margin` of the key that wins in the middle, and a linear difference is largest at a
        corner. So this drops no key that matters, and costs one pass.
        """
        among = np.arange(len(self)) if among is None else among
        if self.soft is None or len(among) == 1:
            return among
        soft = self.soft if len(among) == len(self) else self.soft.chosen(among)
        a, middle, half = soft.slopes, (lo + hi) / 2, (hi - lo) / 2
        scores = soft.scores(middle[None])[0]
        best = int(np.argmax(scores))
        row = a[[best]].toarray()[0]
        # Σ_i |a_ki − row_i|·half_i, from the non-zeros of a_k alone
        change = (np.abs(a.data - row[a.indices]) - np.abs(row[a.indices])) * half[a.indices]
        spread = np.abs(row) @ half + type(a)((change, a.indices, a.indptr), a.shape) @ np.ones(a.shape[1])
        return among[scores - scores[best] + spread >= -margin]

    def weights(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """Return the weights of some of the keys, (batch, near); those left out must be negligible."""
        return softmax(self.scores(u, near))

    @property
    def spoken(self) -> Float[np.ndarray, "keys channels"] | None:
        """The vector that a key with all of the weight adds to the state; None if it moves, or for a Softmax layer."""
        if self.folded is None or not self.folded.values.is_constant:
            return None
        if self.soft is not None:
            return self.soft.values
        return np.asarray(self.folded.values.constant @ self.folded.W_O, np.float64)[self.keys]

    @cached_property
    def is_sentinel(self) -> Bool[np.ndarray, " keys"]:
        """Keys of value 0 beyond all others along a line; if the keys stand in no line, all keys of value 0."""
        if self.spoken is None or not self.spoken.any():
            return np.zeros(len(self), bool)
        silent = np.asarray(~self.spoken.any(axis=1))
        direction = common_direction([self])
        if direction is None or self.soft is None:
            return silent
        place = self.soft.slopes @ direction
        first, last = place[~silent].min(), place[~silent].max()
        return np.asarray(silent & ((place < first) | (place > last)))

    @property
    def outputs(self) -> Float[np.ndarray, " keys"] | None:
        """The output of the network where one key has all of the weight and other heads add nothing."""
        if self.gain is None or self.head is None:
            return None if self.gain is None else self.gain + self.base
        return None if self.spoken is None else self.spoken @ self.gain + self.base

    def on_line(
        self, origin: Float[np.ndarray, " variables"], direction: Float[np.ndarray, " variables"]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (slope, constant) of every score along u = origin + t·direction."""
        return None if self.soft is None else (self.soft.slopes @ direction, self.soft.scores(origin[None])[0])

    def as_grid(self) -> KeyGrid | None:
        """Return the grid that the keys form in the inputs, if they form one."""
        return None if self.soft is None or self.stage > 0 else self.soft.as_grid()


def common_direction(heads: list[Selector]) -> Float[np.ndarray, " variables"] | None:
    """Return a vector w such that the gradient of every score is a multiple of it; None if there is none."""
    found = None
    for head in heads:
        if head.soft is None or head.soft.slopes.nnz == 0:
            return None
        slopes = head.soft.slopes
        columns = np.unique(slopes.indices)
        dense = slopes[:, columns].toarray()
        if found is None:
            found = np.zeros(slopes.shape[1])
            found[columns] = dense[np.argmax(np.abs(dense).max(axis=1))]
        along = dense @ found[columns] / (found @ found)
        if np.abs(dense - along[:, None] * found[columns]).max() > 1e-6 * np.abs(dense).max():
            return None
    return found


# --- from the normal form to softmaxes --------------------------------------------------------------------------------


def selectors(form: NormalForm, stage: int, output: int, queries: Int[np.ndarray, " queries"]) -> list[Selector]:
    """Return every head of a stage for every one of the queries, query by query."""
    found = form.stages[stage]
    is_last = stage == len(form.stages) - 1
    gains, base = _gains(form, output) if is_last else ({}, 0.0)
    if isinstance(found, AttentionStage) and found.is_residual:
        gains = {}
    heads = range(len(found.heads)) if isinstance(found, AttentionStage) else [None]
    return [_selector(found, stage, head, int(query), gains, base) for query in queries for head in heads]


def read_selectors(form: NormalForm, stage: int, output: int) -> list[Selector]:
    """Return every head of a stage for the queries that the output reads."""
    return selectors(form, stage, output, reads(form, output)[stage])


def _selector(
    stage: Stage, position: int, head: int | None, query: int, gains: dict[int, np.ndarray], base: float
) -> Selector:
    gain = gains[query] if set(gains) == {query} else None  # otherwise other queries add to the same output
    if isinstance(stage, SoftmaxStage):
        keys, soft = np.arange(len(stage.channels)), stage.soft_head(query)
        return Selector(position, stage.name, None, query, keys, soft, gain, base)
    assert head is not None
    folded = stage.heads[head]
    return Selector(position, stage.name, head, query, folded.seen(query), folded.soft_head(query), gain, base, folded)


def _gains(form: NormalForm, output: int) -> tuple[dict[int, Float[np.ndarray, " channels"]], float]:
    """Return the coefficients of the output on the channels of each query of the last stage, and its constant.

    There are no coefficients if the output also reads variables that were carried past the stage.
    """
    stage, row = form.stages[-1], form.output.linear[[output]]
    base = float(form.output.constant.toarray().ravel()[output])
    used = row.indices[row.data != 0]
    if (used >= len(stage.written)).any():
        return {}, base
    gains: dict[int, np.ndarray] = {}
    for variable, gain in zip(used, row.data[row.data != 0], strict=True):
        query, channel = divmod(int(stage.written[variable]), len(stage.channels))
        gains.setdefault(query, np.zeros(len(stage.channels)))[channel] = gain
    return gains, base


# --- the way of points and outputs through the stages -----------------------------------------------------------------


def state_before(
    form: NormalForm, stage: int, points: Float[np.ndarray, "points d"]
) -> Float[np.ndarray, "points variables"]:
    """Return the variables u after the stages before this one, computed in the program's dtype."""
    return advanced(form.stages[:stage], np.asarray(points, form.output.linear.dtype)).astype(np.float64)


def reads(form: NormalForm, output: int) -> list[Int[np.ndarray, " queries"]]:
    """Return for every stage the queries (tokens, for a softmax stage) that matter to the output, found backwards."""
    needed = np.unique(form.output.linear[[output]].indices)
    found: list[np.ndarray] = []
    for stage in reversed(form.stages):
        count = len(stage.written)
        queries = np.unique(stage.written[needed[needed < count]] // len(stage.channels))
        carried = stage.carried[needed[needed >= count] - count]
        found.insert(0, queries)
        needed = np.unique(np.concatenate([carried, *_used(stage, queries)]))
    return found


def _used(stage: Stage, queries: np.ndarray) -> list[np.ndarray]:
    if not isinstance(stage, AttentionStage):
        return [stage.logits.rows(queries).variables_used()]
    forms = [form for head in stage.heads for form in (head.queries.rows(queries), head.keys, head.values)]
    if stage.residual is not None:
        forms.append(stage.residual.rows(queries))
    return [form.variables_used() for form in forms]


# --- where anchors stand ----------------------------------------------------------------------------------------------


def gaussian_places(
    slopes: Float[np.ndarray, " keys"], constants: Float[np.ndarray, " keys"], rounding: float
) -> Float[np.ndarray, " keys"] | None:
    """Return the X_k if scores s_k·x + c_k are −γ(x − X_k)² up to a term that all keys share, otherwise None.

    Then c_k = α + p·s_k + q·s_k² with q < 0, and key k is the best of all s at x = −2q·s_k − p.
    """
    middle, half = (slopes.min() + slopes.max()) / 2, (slopes.max() - slopes.min()) / 2
    if half == 0 or len(np.unique(slopes)) < 3:
        return None
    z = (slopes - middle) / half
    columns = np.stack([np.ones_like(z), z, z * z], axis=1)
    found = np.linalg.lstsq(columns, constants, rcond=None)[0]
    off = np.abs(columns @ found - constants).max()
    _, linear, square = (float(number) for number in found)
    if not square < 0 or off > rounding * max(np.ptp(constants), np.abs(constants).max(), 1e-300):
        return None
    q, p = square / half**2, linear / half - 2 * square * middle / half**2
    return np.asarray(-2 * q * slopes - p)


def runs(ids: Int[np.ndarray, " samples"]) -> tuple[Int[np.ndarray, " runs"], Int[np.ndarray, " runs"]]:
    """Return the (first, last) sample of every run of equal numbers."""
    ends = np.flatnonzero(np.diff(ids))
    return np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(ids) - 1]])


def run_places(x: Float[np.ndarray, " samples"], ids: Int[np.ndarray, " samples"]) -> Float[np.ndarray, " runs"]:
    """Return the middle of every cell that wins on a line; an end cell counts as no wider than its neighbour."""
    first, last = runs(ids)
    edges = np.concatenate([[x[0]], (x[last[:-1]] + x[first[1:]]) / 2, [x[-1]]])
    half = np.diff(edges) / 2
    middles = edges[:-1] + half
    if len(half) > 2:
        middles[0] = edges[1] - min(half[0], half[1])
        middles[-1] = edges[-2] + min(half[-1], half[-2])
    return np.asarray(middles)
