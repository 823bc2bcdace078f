"""A network of two variables: maps of target, output and error, and what the last layer selects where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import AttentionStage
from attnc.plots.cells import Cells, count_along, pixels, side_for
from attnc.plots.error_curves import error_reach
from attnc.plots.flow import reads
from attnc.plots.heads import draw_heads, draw_levels
from attnc.plots.lines import along_variable
from attnc.plots.partition import draw_partition
from attnc.plots.reading import read_selectors
from attnc.plots.selectors import Selector
from attnc.plots.style import ERRORS, SIZES, VALUES, add_colorbar, limits, new_figure, set_plane, set_title
from attnc.plots.subject import SCORES, Subject
from attnc.wording import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK, MOST_BLOCKS = 5, 64
"""Where cells are as fine as the samples, the error's size is shown over blocks of BLOCK × BLOCK samples."""
HEADS_PIXELS = 240
OF_HEADS = ("compose", "gates")
"""Constructions whose heads compute a function each: lines between the keys of each head say more than their cells."""
MUCH_WORK = 4e6
"""Scores per point from which on a map is coarse."""


def draw_maps(make: type[Figure], subject: Subject) -> Figure:
    box = subject.network.box
    least = 24 if subject.work_per_point <= MUCH_WORK else 8
    side = BLOCK * int(np.clip((SCORES / subject.work_per_point) ** 0.5 / BLOCK, least, MOST_BLOCKS))
    is_fine = 3 * _cells_along(subject) > side
    points = pixels(box.lo, box.hi, side, scatter=is_fine)
    network = subject.network_at(points)[:, subject.output]
    target = None if subject.function is None else subject.target_at(points)[:, subject.output]
    scale = limits(network if target is None else np.concatenate([network, target]))
    selecting = list(_selecting(subject))

    count = (1 if target is None else 3) + len(selecting)
    rows, columns = (1, count) if count <= 3 else (2, -(-count // 2))
    picture = new_figure(make, max(7.6, 5.0 * columns), 4.7 * rows, subject.entry_title, *subject.header)
    panels = iter(picture.subplots(rows, columns, squeeze=False).ravel())
    extent = (float(box.lo[0]), float(box.hi[0]), float(box.lo[1]), float(box.hi[1]))

    def image(name: str, note: str, values: np.ndarray, cmap: str, ends: tuple[float, float], label: str) -> Axes:
        axes: Axes = next(panels)
        set_title(axes, name, note)
        set_plane(axes, box)
        drawn = axes.imshow(
            values.reshape(round(values.size**0.5), -1),
            origin="lower",
            extent=extent,
            aspect="auto",
            cmap=cmap,
            vmin=ends[0],
            vmax=ends[1],
            interpolation="nearest",
        )
        add_colorbar(picture, axes, drawn, label)
        return axes

    names = ", ".join(one_line(name) for name in box.names)
    if target is not None:
        smooth = subject.target_at(pixels(box.lo, box.hi, side))[:, subject.output] if is_fine else target
        note = "read from the weights" if subject.is_read else "the function itself"
        image("target", note, smooth, VALUES, scale, f"f({names})")
    marked = [image("network", "what the attention computes", network, VALUES, scale, f"network({names})")]
    centre = (box.lo + box.hi) / 2
    if target is not None:
        error = network - target
        reach = error_reach(subject, error)
        if is_fine:
            blocks = np.abs(error).reshape(side // BLOCK, BLOCK, side // BLOCK, BLOCK).max(axis=(1, 3))
            label = f"largest |network − target| of {BLOCK**2} samples"
            marked.append(image("error", subject.claims, blocks, SIZES, (0, reach), label))
        else:
            marked.append(image("error", subject.claims, error, ERRORS, (-reach, reach), "network − target"))
        centre = points[int(np.nanargmax(np.abs(error)))]
    for kind, found in selecting:
        axes = next(panels)
        if kind == "cells":
            draw_partition(picture, axes, subject, Cells(subject.form, found), centre, scale, marked)
        elif kind == "heads":
            side, queries = side_for(subject.form, found, HEADS_PIXELS), reads(subject.form, subject.output)
            is_one = len(queries[found[0].stage]) == 1
            of = "" if is_one else f" for query {found[0].query}"
            draw_heads(picture, axes, Cells(subject.form, found), box, side, of)
        else:
            draw_levels(axes, subject.form, found, box, side_for(subject.form, found, HEADS_PIXELS))
    for unused in panels:
        unused.set_axis_off()
    return picture


def _selecting(subject: Subject) -> Iterator[tuple[str, list[Selector]]]:
    """What the attention does, as (kind of panel, softmaxes): cells or level lines of the last layer, and heads."""
    stages = subject.form.stages
    if not stages:
        return
    last = read_selectors(subject.form, len(stages) - 1, subject.output)
    if subject.network.construction in OF_HEADS and last:
        yield "levels", last
        return
    if last:
        yield ("cells" if len({s.query for s in last}) == 1 else "levels"), last
    for position in range(len(stages) - 1, -1, -1):
        stage = stages[position]
        if isinstance(stage, AttentionStage) and len(stage.heads) > 1:
            found = read_selectors(subject.form, position, subject.output)
            if found:
                middle = found[len(found) // 2].query
                yield "heads", [s for s in found if s.query == middle]
            return


def _cells_along(subject: Subject) -> int:
    """How many cells lie along an axis through the middle of the box."""
    box, last = subject.network.box, len(subject.form.stages) - 1
    found = read_selectors(subject.form, last, subject.output) if last >= 0 else []
    lines = [along_variable(box, axis) for axis in range(box.d)]
    return max(count_along(subject.form, found, line.share) for line in lines)
