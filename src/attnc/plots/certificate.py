"""Where a bound comes from: its ledger as bars, and on which part of the domain the error sits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from attnc.certificates.error_tree import ErrorNode, error_tree
from attnc.errors import InputError
from attnc.model_card import ceiling, one_line, percent, proved_how, without_expression
from attnc.plots.drawing import write_figure
from attnc.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SIZES,
    add_colorbar,
    figure_class,
    new_figure,
    set_plain,
    set_plane,
    set_title,
)
from attnc.targets.expressions.expression import Expression

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

MOST_TERMS = 12
MOST_OUTLINED = 4_096
"""Cells up to which each has an outline."""


def plot_certificate(network: Network, path: str | os.PathLike[str]) -> None:
    """Writes the picture as SVG, PDF or PNG."""
    if network.certificate.bound is None:
        raise InputError("nothing was proved of this network, so there is no ledger to draw; plot() shows its error")
    write_figure(path, lambda: certificate_figure(network))


def certificate_figure(network: Network) -> Figure:
    """The ledger on the left; on the right the bounds of the leaves over the domain, or else the error seen there."""
    claim = network.certificate
    has_leaves = network.box.d in (1, 2) and bool(claim.leaf_bounds)
    has_map = has_leaves or (network.box.d in (1, 2) and network.box.is_bounded and network.expression is not None)
    title = one_line(network.expression or without_expression(network))
    norm = "" if claim.norm == "inf" else f" in the L{claim.norm} norm"
    how = f"proven {proved_how(claim)}, in {claim.dtype}: at most {ceiling(claim.bound or 0.0)}{norm}"
    seen = "" if claim.observed is None else f"; {claim.observed:.3g} seen at samples"
    picture = new_figure(figure_class(), 11.5 if has_map else 7.5, 4.2, title, how + seen)
    if not has_map:
        _draw_ledger(picture.subplots(), network)
        return picture
    left, right = picture.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_ledger(left, network)
    if not has_leaves:
        _draw_seen(picture, right, network)
    elif network.box.d == 1:
        _draw_steps(right, network)
    else:
        _draw_cells(picture, right, network)
    return picture


def _draw_ledger(axes: Axes, network: Network) -> None:
    """Bars in proportion to what is added: a source that does not show does not matter."""
    sources = sorted(_leaves_of(error_tree(network.certificate)), key=lambda node: -node.adds)
    shown, rest = sources[:MOST_TERMS], sources[MOST_TERMS:]
    rows = [(_label(node), node.adds, node.share) for node in shown]
    if rest:
        rows.append((f"{len(rest)} more", sum(node.adds for node in rest), sum(node.share for node in rest)))
    places = np.arange(len(rows))
    set_plain(axes, grid=False)
    axes.barh(places, [adds for _, adds, _ in rows], color=BLUE, height=0.6)
    axes.set_yticks(places, [name for name, _, _ in rows], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(max((adds for _, adds, _ in rows), default=0.0), 1e-300))
    axes.locator_params(axis="x", nbins=4)
    for place, (_, adds, share) in zip(places, rows, strict=True):
        axes.annotate(
            f"{ceiling(adds)}  ({percent(share)})",
            (adds, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    worst = "at the worst place" if network.certificate.norm == "inf" else "over the box"
    set_title(axes, "Ledger", f"what each source adds, {worst}")


def _leaves_of(node: ErrorNode) -> list[ErrorNode]:
    return [leaf for child in node.children for leaf in _leaves_of(child)] or ([] if node.name == "bound" else [node])


def _label(node: ErrorNode) -> str:
    text = one_line(node.name if node.own is None else f"{node.name} = {node.what}")
    return text if len(text) < 34 else text[:32] + "…"


def _draw_seen(picture: Figure, axes: Axes, network: Network) -> None:
    """Of a proof without leaves over the box: the error at a grid of points, which proves nothing."""
    box = network.box
    per_axis = 513 if box.d == 1 else 97
    lines = [np.linspace(lo, hi, per_axis) for lo, hi in zip(box.lo, box.hi, strict=True)]
    points = np.stack([line.ravel() for line in np.meshgrid(*lines, indexing="ij")], axis=1)
    wanted = Expression.parse(network.expression or "").with_variables(box.names)(points)
    errors = np.abs(network(points).reshape(len(points), -1) - wanted).max(axis=1)
    if box.d == 1:
        axes.plot(lines[0], errors, color=BLUE, lw=1.2)
        axes.set_xlabel(one_line(box.names[0]), color=INK, parse_math=False)
        axes.set_ylabel("error seen", color=GREY)
        set_plain(axes)
    else:
        drawn = axes.pcolormesh(*lines, errors.reshape(per_axis, per_axis).T, cmap=SIZES, vmin=0, rasterized=True)
        set_plane(axes, box)
        add_colorbar(picture, axes, drawn, "error seen")
    set_title(axes, "Where the error sits", f"seen at {len(points):,} points; the proof is head by head")


def _draw_steps(axes: Axes, network: Network) -> None:
    claim = network.certificate
    lo, hi = claim.cells(network.box)
    order = np.argsort(lo[:, 0])
    edges = np.append(lo[order, 0], hi[order[-1], 0])
    bounds = np.array(claim.leaf_bounds)[order]
    axes.stairs(bounds, edges, color=BLUE, fill=True, alpha=0.35, label="bound of each leaf")
    axes.stairs(bounds, edges, color=BLUE, lw=0.8)  # leaves at a jump are thinner than a pixel
    if claim.norm == "inf":
        axes.axhline(claim.bound or 0.0, color=ORANGE, lw=1.4, label="bound")
    what = f"{len(lo):,} leaves cover the box"
    if claim.core is not None:
        _draw_tails(axes, network, edges)
        what = f"{len(lo):,} leaves cover [{edges[0]:g}, {edges[-1]:g}], tails the rest"
    axes.set_ylim(0, 1.3 * float(max(bounds.max(), claim.bound or 0.0 if claim.norm == "inf" else 0.0)))
    axes.set_xlabel(one_line(network.variables[0]), color=INK, parse_math=False)
    axes.set_ylabel("error at most", color=GREY)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
    set_plain(axes)
    set_title(axes, "Where the error sits", what)


def _draw_tails(axes: Axes, network: Network, edges: np.ndarray) -> None:
    """Beyond the core: one bound for all of a tail, at most that of the certificate, in exact arithmetic."""
    claim, width = network.certificate, 0.25 * (edges[-1] - edges[0])
    label: str | None = "tail, in exact arithmetic"
    for start, stop, end in (
        (edges[0] - width, edges[0], network.box.lo[0]),
        (edges[-1], edges[-1] + width, network.box.hi[0]),
    ):
        if np.isinf(end):
            axes.stairs([claim.bound or 0.0], [start, stop], fill=True, color=GREY, alpha=0.25, label=label)
            label = None


def _draw_cells(picture: Figure, axes: Axes, network: Network) -> None:
    from matplotlib.collections import PolyCollection

    claim = network.certificate
    lo, hi = claim.cells(network.box)
    corners = np.stack([lo, np.stack([hi[:, 0], lo[:, 1]], 1), hi, np.stack([lo[:, 0], hi[:, 1]], 1)], axis=1)
    outline = GREY if len(lo) <= MOST_OUTLINED else "face"  # lines would hide cells that are thinner than they are
    drawn = PolyCollection(
        list(corners), array=np.array(claim.leaf_bounds), cmap=SIZES, edgecolors=outline, linewidths=0.2
    )
    axes.add_collection(drawn)
    axes.set_xlim(network.box.lo[0], network.box.hi[0])
    axes.set_ylim(network.box.lo[1], network.box.hi[1])
    drawn.set_clim(0, claim.bound or 1.0)
    set_plane(axes, network.box)
    add_colorbar(picture, axes, drawn, "error at most")
    set_title(axes, "Where the error sits", f"{len(lo):,} leaves cover the box")
