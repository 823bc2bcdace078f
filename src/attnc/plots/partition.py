"""The cells of the last layer over two variables, coloured by their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.plots.cells import Cells, line_tiles, pixels, side_for, square_tiles, zoom
from attnc.plots.heads import bordered
from attnc.plots.style import INK, VALUES, add_colorbar, limits, set_plane, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.plots.subject import Subject

PIXELS, PIXELS_OF_HEADS = 480, 240


def draw_partition(
    picture: Figure,
    axes: Axes,
    subject: Subject,
    cells: Cells,
    centre: np.ndarray,
    scale: tuple[float, float],
    marked: list[Axes],
) -> None:
    """Every pixel in the colour of the key with the largest weight there; borders between cells in white."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    box = subject.network.box
    lo, hi = zoom(lambda points: cells.at(points, line_tiles(len(points)))[0], centre, box.lo, box.hi)
    side = side_for(subject.form, cells.heads, PIXELS if len(cells.heads) == 1 else PIXELS_OF_HEADS)
    winner = cells.at(pixels(lo, hi, side), square_tiles(side))[0].reshape(side, side)
    winner = winner.repeat(PIXELS // side, axis=0).repeat(PIXELS // side, axis=1)  # lines of one pixel stay thin
    is_zoomed = bool((lo > box.lo).any() or (hi < box.hi).any())
    values = cells.outputs
    if values is not None:
        norm = Normalize(*(limits(values[winner]) if is_zoomed else scale))
        colours = colormaps[VALUES](norm(values[winner]))[..., :3]
    else:
        norm = None
        hue = np.random.default_rng(0).permutation(cells.num_cells) / max(1, cells.num_cells - 1)
        colours = colormaps["cividis"](hue[winner])[..., :3]
    set_title(
        axes, f"partition{', zoomed' if is_zoomed else ''}", _note(subject, cells, winner, (hi - lo) / box.widths)
    )
    set_plane(axes, box)
    axes.imshow(bordered(colours, winner), origin="lower", extent=(lo[0], hi[0], lo[1], hi[1]), aspect="auto")
    mapped = ScalarMappable(norm, VALUES if norm is not None else "cividis")
    bar = add_colorbar(picture, axes, mapped, "value of the winning key" if norm is not None else "key")
    if norm is None:
        bar.set_ticks([])
    if is_zoomed:
        for other in marked:
            for colour, width in (("white", 2.6), (INK, 1.2)):
                other.add_patch(Rectangle((lo[0], lo[1]), *(hi - lo), fill=False, edgecolor=colour, linewidth=width))


def _note(subject: Subject, cells: Cells, winner: np.ndarray, shares: np.ndarray) -> str:
    layer = f", layer {cells.heads[0].layer}" if len(subject.form.stages) > 1 else ""
    if (shares == 1).all():
        by = "coloured by its value" if cells.outputs is not None else "one colour each"
        return f"one cell per key, {by}{layer}"
    lattice = cells.lattice()
    if lattice is None:
        return f"{len(np.unique(winner)):,} of {cells.num_cells:,} cells{layer}, framed in the other panels"
    part = " × ".join(f"{round(share * count)}" for share, count in zip(shares, lattice, strict=True))
    whole = " × ".join(f"{count:,}" for count in lattice)
    return f"{part} of {whole} cells{layer}, framed in the other panels"
