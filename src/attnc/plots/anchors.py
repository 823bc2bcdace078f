"""The anchors of a layer as ticks on a line, in the colours of their heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.normal_form import NormalForm
from attnc.plots.bands import colours_of
from attnc.plots.cells import Cells, line_tiles
from attnc.plots.lines import Line
from attnc.plots.places import ROUNDING, gaussian_places, run_places
from attnc.plots.selectors import Selector
from attnc.plots.style import INK

if TYPE_CHECKING:
    from jaxtyping import Float

TICKS = 120
"""More would run together."""


def anchor_ticks(form: NormalForm, found: list[Selector], line: Line) -> tuple[list[tuple[np.ndarray, Any]], str]:
    """[(places, colour)] of every head or query, and a word on what they are."""
    if not found:
        return [], ""
    has_heads, has_queries = len({s.head for s in found}) > 1, len({s.query for s in found}) > 1
    colours = colours_of(found)
    ticks = []
    for selector in found:
        places = _places(form, selector, line, has_heads)
        ticks.append((places, colours[selector.query, selector.head] if has_heads or has_queries else INK))
        if sum(len(drawn) for drawn, _ in ticks) > TICKS:
            return [], "more anchors than ticks could show"
    by = ", in the colour of the head" if has_heads else ", in the colour of the query" if has_queries else ""
    return ticks, f"ticks: the anchors{by}"


def _places(form: NormalForm, selector: Selector, line: Line, has_heads: bool) -> Float[np.ndarray, " anchors"]:
    """Exactly, where the scores are a squared distance; else the middles of the cells. Sentinels are left out."""
    scores = selector.on_line(line.origin, line.direction) if selector.stage == 0 else None
    if scores is not None:
        places = gaussian_places(*scores, ROUNDING[form.output.linear.dtype])
        if places is not None:
            places = np.unique(places[~selector.is_sentinel] if has_heads else places)
            slack = 1e-6 * (line.hi - line.lo)
            return np.asarray(places[(places >= line.lo - slack) & (places <= line.hi + slack)])
    t = np.linspace(line.lo, line.hi, 4000)
    cells, _ = Cells(form, [selector]).at(line.at(t), line_tiles(len(t)))
    return run_places(t, cells)
