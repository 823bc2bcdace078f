"""Pictures of a comparison: the overlap of matched keys, a panel for each pair of heads."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.plots import style
from attnc.plots.drawing import write_figure
from attnc.wording import one_line, plural, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnc.comparing import Comparison

MOST_PANELS, COLUMNS = 12, 4
"""Maximum number of heads that are drawn, and of panels in a row."""


def plot_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Write the picture of a comparison."""
    write_figure(path, lambda: comparison_figure(comparison))


def comparison_figure(comparison: Comparison) -> Figure:
    """Draw the overlaps of the first heads. Keys are in the order of the constructed head, their matches likewise."""
    heads = comparison.heads[:MOST_PANELS]
    if not heads:
        raise InputError("no heads were compared: there is nothing to draw")
    columns = min(COLUMNS, len(heads))
    rows = math.ceil(len(heads) / columns)
    notes = ["overlap of the attention of learned and constructed keys; matched keys are on the diagonal"]
    if comparison.largest is not None:
        notes.append(f"outputs differ by {comparison.largest:.3g} at most at {plural(comparison.num_points, 'point')}")
    elif heads[0].pattern_distance is None:
        notes = ["nearness of learned and constructed keys, 1/(1 + distance/spread); matched keys are on the diagonal"]
    left_out = len(comparison.heads) - len(heads)
    if left_out:
        notes.append(f"{plural(left_out, 'pair')} of heads left out")
    width = max(8.6, 3.4 * columns)
    picture = style.new_figure(width, 3.5 * rows, "learned and constructed", *notes)
    panels = np.ravel(picture.subplots(rows, columns, squeeze=False))
    for axes, head in zip(panels, heads, strict=False):
        count = head.overlap.shape
        drawn = axes.imshow(head.overlap, cmap=style.WEIGHTS, vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        pair = head.learned if head.learned == head.constructed else f"{head.learned} | {head.constructed}"
        patterns = "" if head.pattern_distance is None else f"patterns apart by {head.pattern_distance:.2g}"
        style.set_title(axes, shortened(one_line(pair), 28), patterns)
        style.set_labels(axes, f"constructed key, of {count[1]}", f"learned key, as matched, of {count[0]}")
        for axis, keys in ((axes.xaxis, count[1]), (axes.yaxis, count[0])):
            axis.get_major_locator().set_params(integer=True, nbins=min(6, keys))
        axes.tick_params(colors=style.GREY, labelsize=9, length=2)
    style.add_colorbar(
        panels[len(heads) - 1], drawn, "overlap" if heads[0].pattern_distance is not None else "nearness", 0.04
    )
    for axes in panels[len(heads) :]:
        axes.set_visible(False)
    return picture
