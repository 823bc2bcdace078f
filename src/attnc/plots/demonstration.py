"""The picture of the demonstration: the papers' partition beside the soft heads of a sum of functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import unpacked
from attnc.plots import style
from attnc.plots.drawing import write_figure
from attnc.plots.selectors import LayerSoftmaxes, Selector, last_layer, pixels
from attnc.plots.subject import along_variable
from attnc.wording import headline, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

SIDE, ALONG = 520, 1201
"""Number of pixels along a side of the map, and of points along a line."""


def plot_demonstration(path: str | os.PathLike[str], partition: Network, soft: Network) -> None:
    """Write the picture as SVG, PDF or PNG, by the path's suffix. The file is written whole or not at all."""
    write_figure(path, lambda: draw_demonstration(partition, soft))


def draw_demonstration(partition: Network, soft: Network) -> Figure:
    """Draw a partition of two variables and its weights along the first, and below two heads of a soft network."""
    picture = style.new_figure(
        10.6,
        8.2,
        f"{partition.expression}: one key wins, or keys share",
        "A key has a score, which is an affine function of the point. The softmax turns scores into weights.",
        "A head returns the mean of its keys' values by these weights. Each curve below is the weight of one key.",
    )
    panels = picture.subplots(2, 2)
    cells, heads = (last_layer(network._engine.form, 0) for network in (partition, soft))
    _draw_cells(panels[0, 0], partition, cells)
    _draw_weights(panels[0, 1], partition, cells, cells.members[0], 0)
    style.set_title(panels[0, 1], "hard: its weights along y = 0", _claims(partition))
    for axes, axis in zip(panels[1], range(2), strict=True):
        member = max(heads.members, key=lambda one: _slope_along(one, axis))
        _draw_weights(axes, soft, heads, member, axis)
        title = f"soft: the {plural(len(member), 'key')} of the head of {soft.variables[axis]}"
        style.set_title(axes, title, _claims(soft) if axis else _values(member))
    return picture


def _claims(network: Network) -> str:
    return f"{plural(network.num_anchors, 'key')} in all, {headline(network.certificate)}"


def _slope_along(member: Selector, axis: int) -> float:
    assert member.soft is not None
    return float(np.ptp(unpacked(member.soft.slopes)[:, axis]))


def _values(member: Selector) -> str:
    assert member.soft is not None
    values = unpacked(member.soft.values)
    return f"values from {style.number(values.min())} to {style.number(values.max())}, found by fitting"


def _draw_cells(axes: Axes, network: Network, cells: LayerSoftmaxes) -> None:
    """Draw the value of the winning key at every pixel, and a dot in the middle of every cell."""
    box = network.box
    points = pixels(box.lo, box.hi, SIDE)
    winner = cells.cells_at(points, SIDE)
    style.set_plane(axes, box)
    extent = float(box.lo[0]), float(box.hi[0]), float(box.lo[1]), float(box.hi[1])
    values = network.at(points).reshape(SIDE, SIDE)
    style.add_colorbar(axes, style.draw_image(axes, values, extent, style.VALUES), "value of the key")
    count = np.bincount(winner)
    middles = np.stack([np.bincount(winner, column) for column in points.T], axis=1)[count > 0]
    axes.plot(*(middles / count[count > 0, None]).T, ".", color="white", markersize=3)
    title = f"partition: {plural(cells.num_cells, 'key')}"
    style.set_title(axes, title, "a cell for each key, and in it a dot: the key's anchor")


def _draw_weights(axes: Axes, network: Network, layer: LayerSoftmaxes, member: Selector, axis: int) -> None:
    """Draw the weight of every key of a head along a variable."""
    line = along_variable(network.box, axis)
    t = np.linspace(line.lo, line.hi, ALONG)
    weights = member.weights(layer.state(line.at(t)), np.arange(len(member)))
    seen = np.flatnonzero(weights.max(axis=0) > 0.01)
    for i, key in enumerate(seen[np.argsort(weights[:, seen].argmax(axis=0), kind="stable")]):
        axes.plot(t, weights[:, key], color=style.PALETTE[i % len(style.PALETTE)], linewidth=1.8)
    axes.set_ylim(0, 1.05)
    style.set_labels(axes, line.name, "weight")
    style.set_plain(axes)
