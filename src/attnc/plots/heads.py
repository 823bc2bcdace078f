"""Which head speaks where, and the level lines of several queries, over two variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import NormalForm
from attnc.plots.cells import Cells, pixels, square_tiles
from attnc.plots.selectors import Selector
from attnc.plots.style import FAINT, GREY, add_colorbar, distinct_colours, set_plane, set_title
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 12
"""So many heads are named beside the colour bar."""
QUERIES, LEVELS, KEYS = 8, 5, 24
"""So many queries or heads are drawn, and so many lines of each query, of each head."""


def draw_heads(picture: Figure, axes: Axes, cells: Cells, box: Box, side: int, of: str = "") -> None:
    """Every pixel in the colour of the head that speaks there; `of` tells which query this is, if one of many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(cells.heads)
    speakers = cells.at(pixels(box.lo, box.hi, side), square_tiles(side))[1].reshape(side, side)
    palette = distinct_colours(count)
    how = "most weight on keys with a value" if cells.has_sentinels else "largest output"
    set_title(axes, f"heads, layer {cells.heads[0].layer}", f"which speaks{of}: {how}")
    set_plane(axes, box)
    axes.imshow(
        bordered(palette[speakers], speakers),
        origin="lower",
        extent=(box.lo[0], box.hi[0], box.lo[1], box.hi[1]),
        aspect="auto",
        interpolation="nearest",
    )
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    bar = add_colorbar(picture, axes, ScalarMappable(norm, ListedColormap(list(palette))), "")
    named = np.arange(0, count, -(-count // NAMED))
    bar.set_ticks(named, labels=[f"head {h}" for h in named])
    bar.ax.minorticks_off()


def draw_levels(axes: Axes, form: NormalForm, found: list[Selector], box: Box, side: int) -> None:
    """For every query, or every head of one query, lines between the cells of its keys: some of them."""
    from matplotlib.lines import Line2D

    is_of_heads = len({s.query for s in found}) == 1
    kind, kinds, many = ("head", "heads", KEYS) if is_of_heads else ("query", "queries", LEVELS)
    numbers = [(s.head or 0) if is_of_heads else s.query for s in found]
    all_numbers = sorted(set(numbers))
    shown = [all_numbers[i] for i in np.unique(np.linspace(0, len(all_numbers) - 1, QUERIES).round().astype(int))]
    part = f"{len(shown)} of {len(all_numbers)} {kinds}, " if len(shown) < len(all_numbers) else ""
    note = "lines: where the key with most weight changes" if is_of_heads else "thick: where it leaves its first key"
    set_title(axes, f"keys of each {kind}, layer {found[0].layer}", part + note)
    set_plane(axes, box)
    x, y = (np.linspace(lo, hi, side) for lo, hi in zip(box.lo, box.hi, strict=True))
    points = np.stack([axis.ravel() for axis in np.meshgrid(x, y)], axis=1)
    palette, handles = distinct_colours(len(shown)), []
    for number, colour in zip(shown, palette, strict=True):
        of_number = [s for s, its in zip(found, numbers, strict=True) if its == number]
        cells = Cells(form, of_number).at(points, square_tiles(side))[0]
        handles.append(Line2D([], [], color=colour, linewidth=2, label=f"{kind} {number}"))
        present = np.unique(cells)
        if len(present) == 1:
            handles[-1].set(linestyle=(0, (1, 2)), label=f"{kind} {number} (idle)")
            continue
        rank = np.searchsorted(present, cells).reshape(side, side)
        levels = np.unique(np.linspace(0, len(present) - 2, many).round()) + 0.5
        widths = [1.2] * len(levels) if is_of_heads else [2.2, *[0.8] * (len(levels) - 1)]
        axes.contour(x, y, rank, levels=levels, colors=[colour], linewidths=widths)
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        labelcolor=GREY,
    )
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT)


def bordered(colours: Float[np.ndarray, "side side rgb"], ids: Int[np.ndarray, "side side"]) -> np.ndarray:
    """The image with white lines between pixels of different ids."""
    border: Bool[np.ndarray, "side side"] = np.zeros(ids.shape, bool)
    border[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    border[1:] |= ids[1:] != ids[:-1]
    image = colours.copy()
    image[border] = 0.25 * image[border] + 0.75
    return image
