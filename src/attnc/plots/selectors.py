"""The softmaxes of a network, read from its normal form: scores, weights, and the cells in which each key wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from attnc.engines.numpy_engine import advanced
from attnc.ir.normal_form import AttentionStage, FoldedHead, NormalForm, SoftmaxStage, Stage
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Bool, Float, Int
from attnc.plots.style import distinct_colours

Item = TypeVar("Item")

SCORE_ROUNDING = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 2e-6}
"""Largest deviation of scores from a formula that counts as rounding, relative to the range of the scores. It is far
above the roundings of β|L|², and far below the deviation of scores of another shape."""
PIXELS_PER_TILE = 32
"""Number of pixels along a side of a tile. Few keys can win in it, and the Python code between tiles is still cheap."""
SHOWN_WHOLE = 40
"""Maximum number of cells along an axis that is shown whole. A cell is then 12 pixels wide. With more cells, a window
of ZOOMED cells is shown."""
ZOOMED = 24
"""Number of cells along an axis of a window. They are few enough for their borders to be visible."""
PIXEL_SCORES, PIXEL_STATES, LEAST_PIXELS = 6e7, 2.0**24, 60
"""Number of scores and state entries that the pixels of one panel may cost, about a second; and the fewest pixels along
a side, whatever their cost."""
TIE = 1e-6
"""The weights of scores this close look equal."""
INVISIBLE = 40.0
"""A key is left out if its score is lower than the largest by this much everywhere. Its weight is then below e⁻⁴⁰,
which no picture shows."""


@dataclass(frozen=True, eq=False)
class Selector:
    """One softmax of a network: the soft head over the keys that a query sees, a function of the state u before it.

    If scores are bilinear in u, there is no soft head, and the folded head computes the scores.
    """

    head: int | None  # None for a Softmax layer
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
        margin: float = INVISIBLE,
        among: Int[np.ndarray, " among"] | None = None,
    ) -> Int[np.ndarray, " near"]:
        """Return the keys that come within `margin` of the largest score somewhere in the window.

        Such a key comes within `margin` of the key that wins in the middle, and a linear difference is largest at a
        corner. So this drops no key that matters, and takes one pass.
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
        """Return the weights of some of the keys, (batch, near). The other keys must be negligible."""
        return softmax(self.scores(u, near))

    @property
    def spoken(self) -> Float[np.ndarray, "keys channels"] | None:
        """The vector that a key with all of the weight adds to the state; None if it varies, or for a Softmax layer."""
        if self.folded is None or not self.folded.values.is_constant:
            return None
        if self.soft is not None:
            return self.soft.values
        return np.asarray(self.folded.values.constant @ self.folded.W_O, np.float64)[self.keys]

    @cached_property
    def is_sentinel(self) -> Bool[np.ndarray, " keys"]:
        """The keys of value 0 beyond all others along a line; all keys of value 0 if the keys do not lie on a line."""
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
        """The output of the network if one key has all of the weight and other heads add nothing, for each key."""
        if self.gain is None or self.head is None:
            return None if self.gain is None else self.gain + self.base
        return None if self.spoken is None else self.spoken @ self.gain + self.base


def common_direction(heads: list[Selector]) -> Float[np.ndarray, " variables"] | None:
    """Return a vector w such that the gradient of every score is a multiple of it, or None if there is none."""
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


# --- the softmaxes of a layer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerSoftmaxes:
    """Softmaxes of one layer, and their cells.

    In cell `starts[h] + k` softmax h is the strongest and its key k wins.
    """

    form: NormalForm
    stage: int
    members: list[Selector]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        """The name of the layer."""
        return self.form.stages[self.stage].name

    @property
    def heads(self) -> list[int]:
        return sorted({member.head or 0 for member in self.members})

    @property
    def queries(self) -> list[int]:
        return sorted({member.query for member in self.members})

    def only(self, kind: str, number: int) -> LayerSoftmaxes:
        """Return the softmaxes of one "head" or of one "query"."""
        return replace(self, members=[member for member in self.members if (getattr(member, kind) or 0) == number])

    def colour_of(self, member: Selector) -> Float[np.ndarray, " rgb"]:
        """Return the colour of a head, or of a query if the layer has one head."""
        heads, queries = self.heads, self.queries
        numbers, number = (queries, member.query) if len(heads) == 1 else (heads, member.head or 0)
        return distinct_colours(len(numbers))[numbers.index(number)]

    @cached_property
    def starts(self) -> Int[np.ndarray, " softmaxes"]:
        return np.cumsum([0, *(len(member) for member in self.members)])[:-1]

    @property
    def num_cells(self) -> int:
        return sum(len(member) for member in self.members)

    @cached_property
    def outputs(self) -> Float[np.ndarray, " cells"] | None:
        """The output of the network in each cell, up to the other weights; None if it is not constant."""
        known = [outputs for member in self.members if (outputs := member.outputs) is not None]
        return np.concatenate(known) if len(known) == len(self) else None

    @property
    def has_sentinels(self) -> bool:
        return any(member.is_sentinel.any() for member in self.members)

    def state(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points variables"]:
        """Return the variables u before the layer, computed in the program's dtype."""
        u = np.asarray(points, self.form.output.linear.dtype)
        return advanced(self.form.stages[: self.stage], u).astype(np.float64)

    def cells_at(self, points: Float[np.ndarray, "points d"], side: int | None = None) -> Int[np.ndarray, " points"]:
        """Return the cell of every point of a line, or of every pixel of a square with this side."""
        return self.winners_at(points, side)[0]

    def winners_at(
        self, points: Float[np.ndarray, "points d"], side: int | None = None
    ) -> tuple[Int[np.ndarray, " points"], Int[np.ndarray, " points"]]:
        """Return (cell, softmax) at every point of a line or of a square.

        The points are processed in tiles of neighbours, because few keys can win in a tile.
        """
        u = self.state(points)
        margin = 1.0 if len(self) == 1 else INVISIBLE
        near = [member.near(u.min(axis=0), u.max(axis=0), margin) for member in self.members]
        cells, speakers = np.empty(len(u), np.int64), np.zeros(len(u), np.int64)
        for tile in _line_tiles(len(u)) if side is None else _square_tiles(side):
            block = u[tile]
            lo, hi = block.min(axis=0), block.max(axis=0)
            won, voices = [], []
            for member, among in zip(self.members, near, strict=True):
                keys = member.near(lo, hi, margin, among)
                if len(self) == 1:
                    cells[tile] = keys[_first_best(member.scores(block, keys))]
                    break
                weights = member.weights(block, keys)
                won.append(keys[_first_best(weights)])
                voices.append(self._voice(member, keys, weights))
            else:
                speaker = np.argmax(voices, axis=0)
                cells[tile] = self.starts[speaker] + np.array(won)[speaker, np.arange(len(block))]
                speakers[tile] = speaker
        return cells, speakers

    def _voice(self, member: Selector, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the strength of a softmax: its weight on keys with a value, or the size of its output."""
        if self.has_sentinels:
            return np.asarray(weights @ ~member.is_sentinel[keys])
        if member.spoken is None:
            return np.asarray(weights.max(axis=1))
        return np.asarray(np.abs(weights @ member.spoken[keys]).max(axis=1))

    def anchors_along(
        self, member: Selector, origin: Float[np.ndarray, " variables"], direction: Float[np.ndarray, " variables"]
    ) -> Float[np.ndarray, " keys"] | None:
        """Return the t of the keys on the line origin + t·direction, or None if scores are not squared distances."""
        if member.soft is None:
            return None
        slopes, constants = member.soft.slopes @ direction, member.soft.scores(origin[None])[0]
        return gaussian_places(slopes, constants, SCORE_ROUNDING[self.form.output.linear.dtype])

    def lattice(self) -> list[int] | None:
        """Return the number of cells along each axis, if the keys form a grid in the inputs."""
        soft = self.members[0].soft if len(self) == 1 and self.stage == 0 else None
        grid = None if soft is None else soft.as_grid()
        return None if grid is None or grid.has_duplicates else list(grid.shape)

    def count_along(self, at: Callable[[np.ndarray], np.ndarray]) -> int:
        """Return the number of cells that a line crosses, over all queries. `at` maps [0, 1] to its points."""
        points, queries = at(np.linspace(0, 1, 1000)), self.queries
        some = queries[:: max(1, -(-len(queries) // 8))]
        return sum(len(runs(self.only("query", query).cells_at(points))[0]) for query in some)

    def affordable_side(self, wanted: int) -> int:
        """Return the pixels along a side: fewer if many stages come first, or if keys depend on the point."""
        before = self.form.stages[: self.stage]
        variables = len(before[-1].written) if before else 1
        work = 1 + sum(len(member) for member in self.members if member.soft is None) + sum(map(num_scores, before))
        affordable = min(PIXEL_SCORES / work, PIXEL_STATES / variables) ** 0.5
        return int(np.clip(affordable, LEAST_PIXELS, wanted))


def read_layer(form: NormalForm, stage: int, output: int) -> LayerSoftmaxes:
    """Return every head of a stage for every query that the output reads, query by query."""
    found = form.stages[stage]
    gains, base = _gains(form, output) if stage == len(form.stages) - 1 else ({}, 0.0)
    if isinstance(found, AttentionStage) and found.is_residual:
        gains = {}
    members = []
    for query in map(int, reads(form, output)[stage]):
        gain = gains[query] if set(gains) == {query} else None  # otherwise other queries add to the same output
        if isinstance(found, SoftmaxStage):
            members.append(Selector(None, query, np.arange(len(found.channels)), found.soft_head(query), gain, base))
            continue
        for number, head in enumerate(found.heads):
            members.append(Selector(number, query, head.seen(query), head.soft_head(query), gain, base, folded=head))
    return LayerSoftmaxes(form, stage, members)


def last_layer(form: NormalForm, output: int) -> LayerSoftmaxes:
    """Return the softmaxes of the last layer that the output reads. An affine map has none."""
    return read_layer(form, len(form.stages) - 1, output) if form.stages else LayerSoftmaxes(form, 0, [])


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


# --- from outputs back through the stages -----------------------------------------------------------------------------


def reads(form: NormalForm, output: int) -> list[Int[np.ndarray, " queries"]]:
    """Return for every stage the queries (tokens, for a softmax stage) that the output depends on, found backwards."""
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


def num_scores(stage: Stage) -> int:
    """Return the number of scores that a stage computes for one point."""
    if isinstance(stage, AttentionStage):
        return sum(head.queries.shape[0] * head.keys.shape[0] for head in stage.heads)
    return math.prod(stage.logits.shape)


# --- where anchors are ------------------------------------------------------------------------------------------------


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
    """Return the middle of every cell on a line. An end cell counts as no wider than its neighbour."""
    first, last = runs(ids)
    edges = np.concatenate([[x[0]], (x[last[:-1]] + x[first[1:]]) / 2, [x[-1]]])
    half = np.diff(edges) / 2
    middles = edges[:-1] + half
    if len(half) > 2:
        middles[0] = edges[1] - min(half[0], half[1])
        middles[-1] = edges[-2] + min(half[-1], half[-2])
    return np.asarray(middles)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return some of the items, at even distances."""
    if not items:
        return []
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, count).round().astype(int))]


# --- pixels and windows -----------------------------------------------------------------------------------------------


def _first_best(scores: Float[np.ndarray, "points keys"]) -> Int[np.ndarray, " points"]:
    """Return the first key among those that tie up to rounding."""
    return np.argmax(scores >= scores.max(axis=1, keepdims=True) - TIE, axis=1)


def _square_tiles(side: int) -> list[Int[np.ndarray, " tile"]]:
    index, step = np.arange(side * side).reshape(side, side), PIXELS_PER_TILE
    return [index[i : i + step, j : j + step].ravel() for i in range(0, side, step) for j in range(0, side, step)]


def _line_tiles(count: int) -> list[Int[np.ndarray, " tile"]]:
    return np.split(np.arange(count), range(2 * PIXELS_PER_TILE, count, 2 * PIXELS_PER_TILE))


def zoom(
    cells_at: Callable[[np.ndarray], np.ndarray], centre: np.ndarray, lo: np.ndarray, hi: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a window around the centre with few cells along each axis, or the whole box if it has few.

    `cells_at` maps points in the coordinates of the window to cells.
    """
    for _ in range(8):
        counts = []
        for axis in range(len(lo)):
            points = np.repeat(centre[None], 1000, axis=0)
            points[:, axis] = np.linspace(lo[axis], hi[axis], 1000)
            counts.append(len(runs(cells_at(points))[0]))
        share = np.array([1.0 if count <= SHOWN_WHOLE else ZOOMED / count for count in counts])
        if (share == 1).all():
            break
        size = share * (hi - lo)
        start = np.clip(centre - size / 2, lo, hi - size)
        lo, hi = np.where(share == 1, lo, start), np.where(share == 1, hi, start + size)
    return lo, hi


def pixels(lo: np.ndarray, hi: np.ndarray, side: int, scatter: bool = False) -> Float[np.ndarray, "pixels 2"]:
    """Return the middles of side × side pixels, row by row from below, or with `scatter` a random place in each.

    If cells are about as fine as pixels, middles would show a false pattern.
    """
    rows, columns = np.divmod(np.arange(side * side), side)
    places = np.random.default_rng(0).random((side * side, 2)) if scatter else 0.5
    share = (np.stack([columns, rows], axis=1) + places) / side
    return np.asarray(np.clip(lo + share * (hi - lo), lo, hi))
