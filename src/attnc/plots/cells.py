"""The cells in which each key wins, for one query and all heads of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import AttentionStage, NormalForm
from attnc.plots.selectors import Selector, runs, state_before

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PIXELS_PER_TILE = 32
"""Pixels along a side of a tile: few keys can win in it, and Python between tiles is still cheap."""
WHOLE = 40
"""Most cells along an axis that are shown whole: a cell is then 12 pixels wide. Beyond, a window of ZOOMED is shown."""
ZOOMED = 24
"""Cells along an axis of a window: few enough for their borders to be seen."""
PIXEL_SCORES, PIXEL_STATES, LEAST_PIXELS = 6e7, 2.0**24, 60
"""Scores, and numbers of the state, that the pixels of one panel may cost, about a second; and the fewest pixels along
a side, whatever their cost."""
TIE = 1e-6
"""Scores this close have the same weight to the eye."""
INVISIBLE = 40.0
"""Scores by which a key is behind everywhere when it is left out: its weight is below e⁻⁴⁰, which no picture shows."""


@dataclass(frozen=True, eq=False)
class WinningCells:
    """The cells of a layer: in cell `starts[h] + k` head h is the loudest and its key k has the largest weight."""

    form: NormalForm
    heads: list[Selector]

    @cached_property
    def starts(self) -> Int[np.ndarray, " heads"]:
        return np.cumsum([0, *(len(head) for head in self.heads)])[:-1]

    @property
    def num_cells(self) -> int:
        return sum(len(head) for head in self.heads)

    @cached_property
    def outputs(self) -> Float[np.ndarray, " cells"] | None:
        """The output of the network in each cell, up to the other weights; None if it is not constant."""
        found = [head.outputs for head in self.heads]
        known = [outputs for outputs in found if outputs is not None]
        return np.concatenate(known) if len(known) == len(found) else None

    @property
    def has_sentinels(self) -> bool:
        return any(head.is_sentinel.any() for head in self.heads)

    def at(
        self, points: Float[np.ndarray, "points d"], tiles: Iterable[Int[np.ndarray, " tile"]]
    ) -> tuple[Int[np.ndarray, " points"], Int[np.ndarray, " points"]]:
        """Return (cell, head) at every point; a tile holds points that lie together, since few keys can win there."""
        u = state_before(self.form, self.heads[0].stage, points)
        margin = 1.0 if len(self.heads) == 1 else INVISIBLE
        near = [head.near(u.min(axis=0), u.max(axis=0), margin) for head in self.heads]
        cells, speakers = np.empty(len(u), np.int64), np.zeros(len(u), np.int64)
        for tile in tiles:
            block = u[tile]
            lo, hi = block.min(axis=0), block.max(axis=0)
            won, voices = [], []
            for head, among in zip(self.heads, near, strict=True):
                keys = head.near(lo, hi, margin, among)
                if len(self.heads) == 1:
                    cells[tile] = keys[_first_best(head.scores(block, keys))]
                    break
                weights = head.weights(block, keys)
                won.append(keys[_first_best(weights)])
                voices.append(self._voice(head, keys, weights))
            else:
                speaker = np.argmax(voices, axis=0)
                cells[tile] = self.starts[speaker] + np.array(won)[speaker, np.arange(len(block))]
                speakers[tile] = speaker
        return cells, speakers

    def _voice(self, head: Selector, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the loudness of a head: its weight on keys with a value, or the size of its output."""
        if self.has_sentinels:
            return np.asarray(weights @ ~head.is_sentinel[keys])
        if head.spoken is None:
            return np.asarray(weights.max(axis=1))
        return np.asarray(np.abs(weights @ head.spoken[keys]).max(axis=1))

    def lattice(self) -> list[int] | None:
        """Return the number of cells along each axis, if the keys form a grid in the inputs."""
        grid = self.heads[0].as_grid() if len(self.heads) == 1 else None
        return None if grid is None or grid.has_duplicates else list(grid.shape)


def _first_best(scores: Float[np.ndarray, "points keys"]) -> Int[np.ndarray, " points"]:
    """Return the first of the keys that tie, however their scores are rounded."""
    return np.argmax(scores >= scores.max(axis=1, keepdims=True) - TIE, axis=1)


def square_tiles(side: int) -> list[Int[np.ndarray, " tile"]]:
    index, step = np.arange(side * side).reshape(side, side), PIXELS_PER_TILE
    return [index[i : i + step, j : j + step].ravel() for i in range(0, side, step) for j in range(0, side, step)]


def line_tiles(count: int) -> list[Int[np.ndarray, " tile"]]:
    step = 2 * PIXELS_PER_TILE
    return [np.arange(i, min(count, i + step)) for i in range(0, count, step)]


def zoom(
    cells_at: Callable[[np.ndarray], np.ndarray], centre: np.ndarray, lo: np.ndarray, hi: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a window around the centre with few cells along each axis: the whole box if it has few.

    `cells_at` maps points in the coordinates of the window to cells.
    """
    for _ in range(8):
        counts = []
        for axis in range(len(lo)):
            points = np.repeat(centre[None], 1000, axis=0)
            points[:, axis] = np.linspace(lo[axis], hi[axis], 1000)
            counts.append(len(runs(cells_at(points))[0]))
        share = np.array([1.0 if count <= WHOLE else ZOOMED / count for count in counts])
        if (share == 1).all():
            break
        size = share * (hi - lo)
        start = np.clip(centre - size / 2, lo, hi - size)
        lo, hi = np.where(share == 1, lo, start), np.where(share == 1, hi, start + size)
    return lo, hi


def pixels(lo: np.ndarray, hi: np.ndarray, side: int, scatter: bool = False) -> Float[np.ndarray, "pixels 2"]:
    """Return the middles of side × side pixels, row by row from below; with `scatter` a random place in each.

    Where cells are about as fine as pixels, middles would make a pattern that is not there.
    """
    rows, columns = np.divmod(np.arange(side * side), side)
    places = np.random.default_rng(0).random((side * side, 2)) if scatter else 0.5
    share = (np.stack([columns, rows], axis=1) + places) / side
    return np.asarray(np.clip(lo + share * (hi - lo), lo, hi))


def side_for(form: NormalForm, found: list[Selector], wanted: int) -> int:
    """Pixels along a side: fewer where many stages come first, or where keys move and all must be looked at."""
    before = form.stages[: found[0].stage]
    variables = len(before[-1].written) if before else 1
    work = 1 + sum(len(s) for s in found if s.soft is None)
    for stage in before:
        if isinstance(stage, AttentionStage):
            work += sum(head.queries.shape[0] * head.keys.shape[0] for head in stage.heads)
        else:
            work += len(stage.written)
    affordable = min(PIXEL_SCORES / work, PIXEL_STATES / variables) ** 0.5
    return int(np.clip(affordable, LEAST_PIXELS, wanted))


def count_along(form: NormalForm, found: list[Selector], at: Callable[[np.ndarray], np.ndarray]) -> int:
    """Return the number of cells that a line meets, over all queries; `at` maps [0, 1] to its points."""
    queries = sorted({s.query for s in found})
    points, total = at(np.linspace(0, 1, 1000)), 0
    for query in queries[:: max(1, -(-len(queries) // 8))]:
        cells = WinningCells(form, [s for s in found if s.query == query])
        total += len(runs(cells.at(points, line_tiles(len(points)))[0])[0])
    return total
