"""One softmax of a network at a time: the scores that one query of one head meets, read from the normal form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.numpy_engine import advanced
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, Stage
from attnc.ir.reference import softmax
from attnc.ir.soft_head import KeyGrid, SoftHead

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from scipy.sparse import csr_array

SCORE_ROUNDING = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 2e-6}
"""Largest deviation of scores from a formula, relative to their range, that counts as rounding. It is far above the
roundings of β|L|² and far below the deviation of scores of another shape."""


@dataclass(frozen=True, eq=False)
class Selector:
    """The softmax of the scores a_k·u + c_k over the keys that a query sees, u the state before the stage.

    The scores may also be bilinear in u. The a_k are sparse: a softmax stage has as many variables as keys.
    """

    stage: int
    layer: str
    head: int | None  # None: a Softmax layer
    query: int
    keys: Int[np.ndarray, " keys"]  # their tokens
    a: csr_array | None  # (keys, variables); None: the scores are not affine
    c: Float[np.ndarray, " keys"]
    values: Float[np.ndarray, " keys"] | None  # the output that a key with all of the weight adds, if it is constant
    base: float  # the constant of the output
    folded: FoldedHead | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def scores(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """The scores of some of the keys, (batch, near)."""
        if self.a is not None:
            return np.asarray((self.a[near] @ u.T).T + self.c[near])
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
        """The keys that come within `margin` of the largest score somewhere in the window.

        Such a key comes within `margin` of the key that wins in the middle, and a linear difference is largest at a
        corner. So this drops no key that matters, and costs one pass.
        """
        if self.a is None or len(self if among is None else among) == 1:
            return np.arange(len(self)) if among is None else among
        a, c = (self.a, self.c) if among is None else (self.a[among], self.c[among])
        middle, half = (lo + hi) / 2, (hi - lo) / 2
        scores = a @ middle + c
        best = int(np.argmax(scores))
        row = a[[best]].toarray()[0]
        # Σ_i |a_ki − row_i|·half_i, from the non-zeros of a_k alone
        change = (np.abs(a.data - row[a.indices]) - np.abs(row[a.indices])) * half[a.indices]
        spread = np.abs(row) @ half + type(a)((change, a.indices, a.indptr), a.shape) @ np.ones(a.shape[1])
        found = np.flatnonzero(scores - scores[best] + spread >= -margin)
        return found if among is None else among[found]

    def weights(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """The weights of some of the keys, (batch, near); those left out must be negligible."""
        return softmax(self.scores(u, near))

    @cached_property
    def spoken(self) -> Float[np.ndarray, "keys channels"] | None:
        """The vector that a key with all of the weight adds to the state; None if it moves, or for a Softmax layer."""
        if self.folded is None or not self.folded.values.is_constant:
            return None
        return np.asarray(self.folded.values.constant @ self.folded.W_O, np.float64)[self.keys]

    @cached_property
    def is_sentinel(self) -> Bool[np.ndarray, " keys"]:
        """Keys of value 0 beyond all others along a line; if the keys stand in no line, all keys of value 0."""
        if self.spoken is None or not self.spoken.any():
            return np.zeros(len(self), bool)
        silent = np.asarray(~self.spoken.any(axis=1))
        direction = common_direction([self])
        if direction is None or self.a is None:
            return silent
        place = self.a @ direction
        first, last = place[~silent].min(), place[~silent].max()
        return np.asarray(silent & ((place < first) | (place > last)))

    @property
    def outputs(self) -> Float[np.ndarray, " keys"] | None:
        """The output of the network where one key has all of the weight and other heads add nothing."""
        return None if self.values is None else self.values + self.base

    def on_line(
        self, origin: Float[np.ndarray, " variables"], direction: Float[np.ndarray, " variables"]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(slope, constant) of every score along u = origin + t·direction."""
        return None if self.a is None else (self.a @ direction, self.a @ origin + self.c)

    def as_grid(self) -> KeyGrid | None:
        """The grid that the keys form in the inputs, if they form one."""
        if self.a is None or self.stage > 0:
            return None
        return SoftHead(self.a.toarray(), self.c, np.zeros((len(self), 0))).as_grid()


def common_direction(heads: list[Selector]) -> Float[np.ndarray, " variables"] | None:
    """A vector w such that the gradient of every score is a multiple of it; None if there is none."""
    found = None
    for head in heads:
        if head.a is None or head.a.nnz == 0:
            return None
        columns = np.unique(head.a.indices)
        dense = head.a[:, columns].toarray()
        if found is None:
            found = np.zeros(head.a.shape[1])
            found[columns] = dense[np.argmax(np.abs(dense).max(axis=1))]
        along = dense @ found[columns] / (found @ found)
        if np.abs(dense - along[:, None] * found[columns]).max() > 1e-6 * np.abs(dense).max():
            return None
    return found


# --- from the normal form to softmaxes --------------------------------------------------------------------------------


def selectors(form: NormalForm, stage: int, output: int, queries: Int[np.ndarray, " queries"]) -> list[Selector]:
    """Every head of a stage for every one of the queries, query by query."""
    found = form.stages[stage]
    is_last = stage == len(form.stages) - 1
    gains, base = _gains(form, output) if is_last else ({}, 0.0)
    if isinstance(found, SoftmaxStage):
        return [_of_softmax(found, stage, int(token), gains, base) for token in queries]
    gains = gains if found.residual is None else {}
    return [_of_head(found, stage, h, int(query), gains, base) for query in queries for h in range(len(found.heads))]


def read_selectors(form: NormalForm, stage: int, output: int) -> list[Selector]:
    """Every head of a stage for the queries that the output reads."""
    return selectors(form, stage, output, reads(form, output)[stage])


def _of_head(
    stage: AttentionStage, position: int, h: int, query: int, gains: dict[int, np.ndarray], base: float
) -> Selector:
    head = stage.heads[h]
    seen = head.seen(query)
    values = None
    if set(gains) == {query} and head.values.is_constant:  # otherwise other queries add to the same output
        values = np.asarray(head.values.constant @ (head.W_O @ gains[query]), np.float64)[seen]
    affine = _affine_scores(head, query, seen)
    a, c = affine if affine is not None else (None, np.zeros(len(seen)))
    return Selector(position, stage.name, h, query, seen, a, c, values, base, head)


def _of_softmax(stage: SoftmaxStage, position: int, token: int, gains: dict[int, np.ndarray], base: float) -> Selector:
    row = stage.logits.rows(np.array([token]))
    c = row.constant.toarray()[0].astype(np.float64)
    values = np.asarray(gains[token], np.float64) if set(gains) == {token} else None
    return Selector(
        position, stage.name, None, token, np.arange(len(c)), row.linear.astype(np.float64), c, values, base
    )


def _affine_scores(
    head: FoldedHead, query: int, seen: Int[np.ndarray, " keys"]
) -> tuple[csr_array, Float[np.ndarray, " keys"]] | None:
    """(a, c) of query(u)·key_k(u); None if a component moves both in the query and in a key."""
    from scipy.sparse import csr_array

    one, keys = head.queries.rows(np.array([query])), head.keys
    if len(seen) < keys.shape[0]:
        keys = keys.rows(seen)
    keys = FloatForm(keys.linear.astype(np.float64), keys.constant.astype(np.float64))
    moving = np.flatnonzero(np.diff(one.linear.indptr))
    moved = np.unique(np.flatnonzero(np.diff(keys.linear.indptr)) % keys.shape[1])
    if np.intersect1d(moving, moved).size:
        return None
    still = keys.times(one.constant.toarray().T.astype(np.float64))
    a = csr_array(keys.constant @ one.linear.astype(np.float64) + still.linear)
    return a, still.constant.toarray()[:, 0]


def _gains(form: NormalForm, output: int) -> tuple[dict[int, Float[np.ndarray, " channels"]], float]:
    """The coefficients of the output on the channels of each query (or token) of the last stage, and its constant.

    There are none if the output also reads variables that were carried past the stage.
    """
    stage, row = form.stages[-1], form.output.linear[[output]]
    base = float(form.output.constant.toarray().ravel()[output])
    if isinstance(stage, AttentionStage):
        written, width = stage.written, stage.heads[0].W_O.shape[1]
    else:
        written, width = np.arange(stage.logits.shape[0] * stage.logits.shape[1]), stage.logits.shape[1]
    used = row.indices[row.data != 0]
    if (used >= len(written)).any():
        return {}, base
    gains: dict[int, np.ndarray] = {}
    for variable, gain in zip(used, row.data[row.data != 0], strict=True):
        query, channel = divmod(int(written[variable]), width)
        gains.setdefault(query, np.zeros(width))[channel] = gain
    return gains, base


# --- the way of points and outputs through the stages -----------------------------------------------------------------


def state_before(
    form: NormalForm, stage: int, points: Float[np.ndarray, "points d"]
) -> Float[np.ndarray, "points variables"]:
    """The variables u after the stages before this one, computed in the program's dtype."""
    return advanced(form.stages[:stage], np.asarray(points, form.output.linear.dtype)).astype(np.float64)


def reads(form: NormalForm, output: int) -> list[Int[np.ndarray, " queries"]]:
    """For every stage the queries (tokens, for a softmax stage) that matter to the output, found backwards."""
    needed = np.unique(form.output.linear[[output]].indices)
    found: list[np.ndarray] = []
    for stage in reversed(form.stages):
        if isinstance(stage, AttentionStage):
            written, width = stage.written, stage.heads[0].W_O.shape[1]
        else:
            written, width = np.arange(stage.logits.shape[0] * stage.logits.shape[1]), stage.logits.shape[1]
        queries = np.unique(written[needed[needed < len(written)]] // width)
        carried = stage.carried[needed[needed >= len(written)] - len(written)]
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
    """The X_k of scores s_k·x + c_k that are −γ(x − X_k)² up to a term that all keys share; None if they are not.

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
    """(first, last) sample of every run of equal numbers."""
    ends = np.flatnonzero(np.diff(ids))
    return np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(ids) - 1]])


def run_places(x: Float[np.ndarray, " samples"], ids: Int[np.ndarray, " samples"]) -> Float[np.ndarray, " runs"]:
    """The middle of every cell that wins somewhere on a line; an end cell counts as no wider than its neighbour."""
    first, last = runs(ids)
    edges = np.concatenate([[x[0]], (x[last[:-1]] + x[first[1:]]) / 2, [x[-1]]])
    half = np.diff(edges) / 2
    middles = edges[:-1] + half
    if len(half) > 2:
        middles[0] = edges[1] - min(half[0], half[1])
        middles[-1] = edges[-2] + min(half[-1], half[-2])
    return np.asarray(middles)
