"""Which softmaxes of a layer are shown, in which colours, under which names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.normal_form import NormalForm
from attnc.plots.cells import Cells, line_tiles
from attnc.plots.lines import Line
from attnc.plots.selectors import Selector
from attnc.plots.style import distinct_colours

if TYPE_CHECKING:
    from jaxtyping import Float

BANDS = 12
"""So many heads or queries of one layer are shown."""


def bands_of(form: NormalForm, found: list[Selector], line: Line) -> list[Selector]:
    """All softmaxes of the layer; of many, some queries or heads in which something happens along the line."""
    heads, queries = (sorted({key(s) for s in found}) for key in (_head, _query))
    if len(found) <= BANDS:
        return found
    points = line.share(np.linspace(0, 1, 200))
    is_busy = [len(np.unique(Cells(form, [s]).at(points, line_tiles(200))[0])) > 1 for s in found]
    busy = [s for s, is_one in zip(found, is_busy, strict=True) if is_one] or found
    if len(queries) > 1:
        shown = _spread(sorted({s.query for s in busy}), max(1, BANDS // len(heads)))
        busy = [s for s in found if s.query in shown]
    return busy if len(busy) <= BANDS else _spread(busy, BANDS)


def colours_of(found: list[Selector]) -> dict[tuple[int, int | None], Float[np.ndarray, " rgb"]]:
    """A colour for each head; of a layer with one head, for each query."""
    heads, queries = (sorted({key(s) for s in found}) for key in (_head, _query))
    if len(heads) == 1:
        palette = distinct_colours(len(queries))
        return {(s.query, s.head): palette[queries.index(s.query)] for s in found}
    palette = distinct_colours(len(heads))
    return {(s.query, s.head): palette[heads.index(s.head or 0)] for s in found}


def part_of(found: list[Selector], bands: list[Selector]) -> str:
    """How many of the queries and heads are shown."""
    counts = [(len({key(s) for s in bands}), len({key(s) for s in found})) for key in (_query, _head)]
    named = zip(counts, ("queries", "heads"), strict=True)
    return ", ".join(f"{shown} of {count} {name}" for (shown, count), name in named if shown < count)


def name_of(band: Selector, found: list[Selector]) -> str:
    """Its query and head, where the layer has several."""
    has_heads, has_queries = (len({key(s) for s in found}) > 1 for key in (_head, _query))
    names = [f"query {band.query}"] * has_queries + [f"head {band.head}"] * has_heads
    return ", ".join(names)


def _spread(items: list[Any], count: int) -> list[Any]:
    """Some of the items, evenly."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, count).round().astype(int))]


def _head(s: Selector) -> int:
    return s.head or 0


def _query(s: Selector) -> int:
    return s.query
