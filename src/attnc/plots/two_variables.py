"""A network of two variables: maps of target, output and error, and the keys that the last layer selects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.constructions.catalogue import CATALOGUE
from attnc.ir.normal_form import AttentionStage
from attnc.numerics.arrays import Bool, Float, Int
from attnc.plots import style
from attnc.plots.selectors import LayerSoftmaxes, last_layer, pixels, read_layer, reads, spread, zoom
from attnc.plots.subject import PICTURE_SCORES, PlotSubject, along_variable
from attnc.targets.box import Box
from attnc.wording import headline, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLES_PER_BLOCK, MOST_BLOCKS = 5, 64
"""If cells are as fine as the samples, the size of the error is shown over blocks of 5 × 5 samples. The second number
is the maximum number of blocks along a side of a map, which then has 320 samples."""
MUCH_WORK = 4e6
"""Number of scores per point from which on a map may have as few as 8 blocks along a side instead of 24."""
PIXELS, PIXELS_OF_HEADS = 480, 240
"""Number of pixels along a side of a panel of one head, and of several heads. A border is one pixel wide. A pixel needs
the scores of all heads."""
NAMED_HEADS = 12
"""Maximum number of heads that are named beside the colour bar. More names would touch."""
MOST_LEVELS, LEVELS_PER_QUERY, LEVELS_PER_HEAD = 8, 5, 24
"""Maximum number of queries or heads whose level lines are drawn, and maximum number of lines of each query and of each
head."""


def draw_maps(subject: PlotSubject) -> Figure:
    """Draw maps of target, network and error, and the panels of the attention."""
    box = subject.network.box
    least = 24 if subject.work_per_point <= MUCH_WORK else 8
    block = SAMPLES_PER_BLOCK
    side = block * int(np.clip((PICTURE_SCORES / subject.work_per_point) ** 0.5 / block, least, MOST_BLOCKS))
    is_fine = 3 * _cells_along(subject) > side
    points = pixels(box.lo, box.hi, side, scatter=is_fine)
    network = subject.network_at(points)[:, subject.output]
    target = None if subject.function is None else subject.target_at(points)[:, subject.output]
    scale = style.limits(network if target is None else np.concatenate([network, target]))
    selecting = list(_selecting(subject))

    count = (1 if target is None else 3) + len(selecting)
    rows, columns = (1, count) if count <= 3 else (2, -(-count // 2))
    picture = style.new_figure(max(7.6, 5.0 * columns), 4.7 * rows, subject.entry_title, *subject.header)
    panels = iter(picture.subplots(rows, columns, squeeze=False).ravel())

    def image(name: str, note: str, values: np.ndarray, cmap: str, ends: tuple[float, float], label: str) -> Axes:
        axes: Axes = next(panels)
        style.set_title(axes, name, note)
        style.set_plane(axes, box)
        drawn = style.draw_image(axes, values.reshape(round(values.size**0.5), -1), _extent(box.lo, box.hi), cmap, ends)
        style.add_colorbar(axes, drawn, label)
        return axes

    names = ", ".join(one_line(name) for name in box.names)
    if target is not None:
        smooth = subject.target_at(pixels(box.lo, box.hi, side))[:, subject.output] if is_fine else target
        note = "read from the weights" if subject.is_read else "the function itself"
        image("target", note, smooth, style.VALUES, scale, f"f({names})")
    marked = [image("network", "computed by attention", network, style.VALUES, scale, f"network({names})")]
    centre = (box.lo + box.hi) / 2
    if target is not None:
        error, claims = network - target, headline(subject.network.certificate)
        reach = subject.error_reach(error)
        if is_fine:
            blocks = np.abs(error).reshape(side // block, block, side // block, block).max(axis=(1, 3))
            label = f"largest |network − target| of {block**2} samples"
            marked.append(image("error", claims, blocks, style.SIZES, (0, reach), label))
        else:
            marked.append(image("error", claims, error, style.ERRORS, (-reach, reach), "network − target"))
        centre = points[int(np.nanargmax(np.abs(error)))]
    for kind, layer in selecting:
        axes = next(panels)
        if kind == "cells":
            _draw_partition(axes, subject, layer, centre, scale, marked)
        elif kind == "heads":
            _draw_heads(axes, subject, layer)
        else:
            _draw_levels(axes, layer, box)
    for unused in panels:
        unused.set_axis_off()
    return picture


def _selecting(subject: PlotSubject) -> Iterator[tuple[str, LayerSoftmaxes]]:
    """Yield the panels of the attention, as (kind, softmaxes): cells or level lines of the last layer, and heads."""
    form, last = subject.form, last_layer(subject.form, subject.output)
    if last:
        # If each head computes its own function, lines between the keys of each head are more useful than cells.
        is_of_heads = any(each.name == subject.network.construction and each.has_own_functions for each in CATALOGUE)
        yield ("cells" if len(last.queries) == 1 and not is_of_heads else "levels"), last
        if is_of_heads:
            return
    for position in range(len(form.stages) - 1, -1, -1):
        stage = form.stages[position]
        if isinstance(stage, AttentionStage) and len(stage.heads) > 1:
            layer = read_layer(form, position, subject.output)
            if layer:
                yield "heads", layer.only("query", layer.members[len(layer) // 2].query)
            return


def _cells_along(subject: PlotSubject) -> int:
    """Return the largest number of cells per axis, along a line through the middle of the box."""
    box, last = subject.network.box, last_layer(subject.form, subject.output)
    return max(last.count_along(along_variable(box, axis).share) for axis in range(box.d))


# --- cells of the last layer, coloured by their values ----------------------------------------------------------------


def _draw_partition(
    axes: Axes,
    subject: PlotSubject,
    cells: LayerSoftmaxes,
    centre: np.ndarray,
    scale: tuple[float, float],
    marked: list[Axes],
) -> None:
    """Colour every pixel by the key with the largest weight there. Borders between cells are white."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    box = subject.network.box
    lo, hi = zoom(cells.cells_at, centre, box.lo, box.hi)
    side = cells.affordable_side(PIXELS if len(cells) == 1 else PIXELS_OF_HEADS)
    winner = cells.cells_at(pixels(lo, hi, side), side).reshape(side, side)
    winner = winner.repeat(PIXELS // side, axis=0).repeat(PIXELS // side, axis=1)  # lines of one pixel stay thin
    is_zoomed = bool((lo > box.lo).any() or (hi < box.hi).any())
    values = cells.outputs
    norm, cmap, label = None, "cividis", "key"
    shown = (np.random.default_rng(0).permutation(cells.num_cells) / max(1, cells.num_cells - 1))[winner]
    if values is not None:
        norm, cmap, label = Normalize(*scale), style.VALUES, "value of the winning key"
        if is_zoomed:
            norm = Normalize(*style.limits(values[winner]))
        shown = norm(values[winner])
    note = _partition_note(subject, cells, winner, (hi - lo) / box.widths)
    style.set_title(axes, f"partition{', zoomed' if is_zoomed else ''}", note)
    style.set_plane(axes, box)
    image = _bordered(colormaps[cmap](shown)[..., :3], winner)
    axes.imshow(image, origin="lower", extent=_extent(lo, hi), aspect="auto")
    bar = style.add_colorbar(axes, ScalarMappable(norm, cmap), label)
    if norm is None:
        bar.set_ticks([])
    if is_zoomed:
        for other in marked:
            for colour, width in (("white", 2.6), (style.INK, 1.2)):
                other.add_patch(Rectangle((lo[0], lo[1]), *(hi - lo), fill=False, edgecolor=colour, linewidth=width))


def _partition_note(subject: PlotSubject, cells: LayerSoftmaxes, winner: np.ndarray, shares: np.ndarray) -> str:
    layer = f", layer {cells.name}" if len(subject.form.stages) > 1 else ""
    if (shares == 1).all():
        by = "coloured by its value" if cells.outputs is not None else "one colour each"
        return f"one cell per key, {by}{layer}"
    lattice = cells.lattice()
    if lattice is None:
        return f"{len(np.unique(winner)):,} of {cells.num_cells:,} cells{layer}, framed in the other panels"
    part = " × ".join(f"{round(share * count)}" for share, count in zip(shares, lattice, strict=True))
    whole = " × ".join(f"{count:,}" for count in lattice)
    return f"{part} of {whole} cells{layer}, framed in the other panels"


# --- heads, and level lines of several queries ------------------------------------------------------------------------


def _draw_heads(axes: Axes, subject: PlotSubject, layer: LayerSoftmaxes) -> None:
    """Colour every pixel by the strongest head there, for one query. The query is named if the layer has several."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    box, count, side = subject.network.box, len(layer), layer.affordable_side(PIXELS_OF_HEADS)
    has_queries = len(reads(subject.form, subject.output)[layer.stage]) > 1
    of = f" for query {layer.queries[0]}" if has_queries else ""
    speakers = layer.winners_at(pixels(box.lo, box.hi, side), side)[1].reshape(side, side)
    palette = style.distinct_colours(count)
    how = "most weight on keys with a value" if layer.has_sentinels else "largest output"
    style.set_title(axes, f"heads, layer {layer.name}", f"the strongest head{of}: {how}")
    style.set_plane(axes, box)
    style.draw_image(axes, _bordered(palette[speakers], speakers), _extent(box.lo, box.hi))
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    bar = style.add_colorbar(axes, ScalarMappable(norm, ListedColormap(list(palette))), "")
    named = np.arange(0, count, -(-count // NAMED_HEADS))
    bar.set_ticks(named, labels=[f"head {h}" for h in named])
    bar.ax.minorticks_off()


def _draw_levels(axes: Axes, layer: LayerSoftmaxes, box: Box) -> None:
    """Draw some of the lines between the cells of the keys of every query, or of every head of one query."""
    from matplotlib.lines import Line2D

    is_of_heads, side = len(layer.queries) == 1, layer.affordable_side(PIXELS_OF_HEADS)
    kind, kinds, many = ("head", "heads", LEVELS_PER_HEAD) if is_of_heads else ("query", "queries", LEVELS_PER_QUERY)
    all_numbers = layer.heads if is_of_heads else layer.queries
    shown = spread(all_numbers, MOST_LEVELS)
    part = f"{len(shown)} of {len(all_numbers)} {kinds}, " if len(shown) < len(all_numbers) else ""
    note = "lines: where the key with most weight changes" if is_of_heads else "thick: where it leaves its first key"
    style.set_title(axes, f"keys of each {kind}, layer {layer.name}", part + note)
    style.set_plane(axes, box)
    x, y = (np.linspace(lo, hi, side) for lo, hi in zip(box.lo, box.hi, strict=True))
    points = np.stack([axis.ravel() for axis in np.meshgrid(x, y)], axis=1)
    palette, handles = style.distinct_colours(len(shown)), []
    for number, colour in zip(shown, palette, strict=True):
        cells = layer.only(kind, number).cells_at(points, side)
        handles.append(Line2D([], [], color=colour, linewidth=2, label=f"{kind} {number}"))
        present = np.unique(cells)
        if len(present) == 1:
            handles[-1].set(linestyle=(0, (1, 2)), label=f"{kind} {number} (idle)")
            continue
        rank = np.searchsorted(present, cells).reshape(side, side)
        levels = np.unique(np.linspace(0, len(present) - 2, many).round()) + 0.5
        widths = [1.2] * len(levels) if is_of_heads else [2.2, *[0.8] * (len(levels) - 1)]
        axes.contour(x, y, rank, levels=levels, colors=[colour], linewidths=widths)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    axes.legend(handles=handles, frameon=False, fontsize=9, labelcolor=style.GREY, **place)
    for spine in axes.spines.values():
        spine.set(visible=True, color=style.FAINT)


def _extent(lo: Float[np.ndarray, " d"], hi: Float[np.ndarray, " d"]) -> tuple[float, float, float, float]:
    return float(lo[0]), float(hi[0]), float(lo[1]), float(hi[1])


def _bordered(colours: Float[np.ndarray, "side side rgb"], ids: Int[np.ndarray, "side side"]) -> np.ndarray:
    """Return the image with white lines between pixels of different ids."""
    border: Bool[np.ndarray, "side side"] = np.zeros(ids.shape, bool)
    border[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    border[1:] |= ids[1:] != ids[:-1]
    image = colours.copy()
    image[border] = 0.25 * image[border] + 0.75
    return image
