"""The picture of a certificate: its ledger as bars, and the error over the domain, proved for each leaf and as seen."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.plots import style
from attnc.plots.drawing import write_figure
from attnc.plots.subject import PICTURE_SCORES, PlotSubject
from attnc.proofs.error_tree import ErrorNode, error_tree
from attnc.targets.box import Box
from attnc.wording import at_points, ceiling, certificate_lines, function_of, one_line, percent, said, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

MOST_TERMS, LONGEST = 12, 34
"""Maximum number of bars, and of letters of the name beside a bar. The bars then keep most of the panel."""
MOST_PROFILES, PROFILE = 6, 1.5
"""Maximum number of variables along which the error is drawn if there are more than two, and the height of each panel
in inches."""
LETTERS, TITLE_LETTERS = 13.0, 7.0
"""Letters per inch in the lines of the header, and in its title."""
MOST_OUTLINED = 4_096
"""Maximum number of cells that are outlined. With more, outlines would hide the cells."""
ON_A_LINE, ON_A_SIDE, IN_SPACE = 1_025, 97, 20_000
"""Number of points at which the error is evaluated: for one variable, along each side for two, and in total for
more."""
PROFILE_BINS = 32
"""Number of bins along a variable over which the largest error is shown. Each has about 600 of the IN_SPACE points."""
NEARLY_ALL = 0.99
"""Share of the box whose bounds a colour scale shows in full if f jumps. Bounds next to the jump are far larger."""
WHERE, TITLE_HEIGHT = "Where the error is", 22
"""The title of these panels, and its height above them in points."""


def plot_certificate(network: Network, path: str | os.PathLike[str]) -> None:
    """Write the picture as SVG, PDF or PNG."""
    if network.certificate.bound is None:
        raise InputError("nothing was proved about this network, so there is no ledger to draw; plot() shows its error")
    write_figure(path, lambda: certificate_figure(network))


def certificate_figure(network: Network) -> Figure:
    """Draw the ledger on the left, and on the right the error over the domain, as proved for each leaf and as seen."""
    claim, d, subject = network.certificate, network.box.d, PlotSubject.of(network, None, 0)
    has_leaves, is_known = len(claim.leaf_bounds) > 0, subject.function is not None
    panels: list[Callable[[Axes, PlotSubject], None]] = []
    profiles = 0
    if claim.at_points is not None:
        panels += [_draw_points] * (d <= 2 and bool(claim.at_points.table))
    elif d == 1:
        panels += [_draw_line] * (has_leaves or is_known)
    elif d == 2:
        panels += [_draw_cells] * has_leaves + [_draw_plane] * is_known
    elif has_leaves or is_known:
        profiles = min(d, MOST_PROFILES)
    width = 13.0 if profiles else (7.5, 11.5, 16.0)[len(panels)]
    lines = [
        part for line in certificate_lines(claim, network.box) for part in textwrap.wrap(line, int(LETTERS * width))
    ]
    title = shortened(function_of(network), int(TITLE_LETTERS * width))
    picture = style.new_figure(width, max(4.2, PROFILE * profiles), title, *lines)
    ratios = (1, 1) if profiles else (1.1, *[1] * len(panels))
    grid = picture.add_gridspec(1, len(ratios), width_ratios=ratios)
    _draw_ledger(picture.add_subplot(grid[0]), network)
    for i, draw in enumerate(panels, 1):
        draw(picture.add_subplot(grid[i]), subject)
    if profiles:
        rows = grid[1].subgridspec(profiles, 1)
        _draw_profiles([picture.add_subplot(rows[i]) for i in range(profiles)], subject)
    return picture


def _draw_ledger(axes: Axes, network: Network) -> None:
    """Draw bars in proportion to the terms. A source too small to be seen does not matter."""
    sources = sorted(_leaves_of(error_tree(network.certificate)), key=lambda node: -node.adds)
    shown, rest = sources[:MOST_TERMS], sources[MOST_TERMS:]
    rows = [(_label(node), node.adds, node.share) for node in shown]
    if rest:
        rows.append((f"{len(rest)} more", sum(node.adds for node in rest), sum(node.share for node in rest)))
    places = np.arange(len(rows))
    style.set_plain(axes, grid=False)
    axes.barh(places, [adds for _, adds, _ in rows], color=style.BLUE, height=0.6)
    axes.set_yticks(places, [name for name, _, _ in rows], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max((adds for _, adds, _ in rows), default=0.0) or 1.0)
    axes.locator_params(axis="x", nbins=4)
    for place, (_, adds, share) in zip(places, rows, strict=True):
        text = f"{ceiling(adds)}  ({percent(share)})"
        axes.annotate(text, (adds, place), (4, 0), "data", "offset points", va="center", fontsize=9, color=style.INK)
    worst = "at the worst place" if network.certificate.norm == "inf" else "over the box"
    style.set_title(axes, "Ledger", f"contribution of each source, {worst}")


def _leaves_of(node: ErrorNode) -> list[ErrorNode]:
    return [leaf for child in node.children for leaf in _leaves_of(child)] or ([] if node.name == "bound" else [node])


def _label(node: ErrorNode) -> str:
    if node.own is None:
        return shortened(one_line(node.name), LONGEST)
    what, others = one_line(node.what), re.search(r", and (\d+ more) of this kind$", node.what)
    if others is not None:
        what = f"{what[: others.start()]}, and {others[1]}"
    text, keep = f"{one_line(node.name)} = {what}", 0 if others is None else len(others[1]) + 6
    # A long label is shortened in the middle, so that its last letters stay.
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1 - keep]}…{text[len(text) - keep :]}"


# --- where the error is -----------------------------------------------------------------------------------------------


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count:,} leaves"


def _few_enough(network: Network, count: int) -> int:
    """Return the number of points at which the error is evaluated: fewer if the network is large."""
    return max(33, min(count, int(PICTURE_SCORES / max(1, network.work_per_point))))


# --- one variable -----------------------------------------------------------------------------------------------------


def _draw_line(axes: Axes, subject: PlotSubject) -> None:
    """Draw the bounds of the leaves as steps, and the error at points as a line."""
    network, claim, what = subject.network, subject.network.certificate, list[str]()
    lo, hi = float(network.box.lo[0]), float(network.box.hi[0])
    edges, bounds = subject.leaf_steps()
    if len(bounds):
        axes.stairs(bounds, edges, color=style.BLUE, fill=True, alpha=0.25, label=f"{said(claim)}: bound of each leaf")
        axes.stairs(bounds, edges, color=style.BLUE, lw=0.8)  # leaves at a jump are thinner than a pixel
        what.append(_leaves(len(bounds)))
        if claim.core is not None:
            _draw_tails(axes, network, edges)
            lo, hi = float(edges[0]), float(edges[-1])
            what.append(f"tails beyond [{lo:g}, {hi:g}]")
    bound = (claim.bound or 0.0) if claim.norm == "inf" else None
    count = _few_enough(network, ON_A_LINE)
    xs = np.linspace(lo, hi, count)
    if 0 < len(edges) <= count:  # at a kink leaves are finer than any grid
        xs = np.unique(np.concatenate([xs, edges, (edges[1:] + edges[:-1]) / 2])).clip(lo, hi)
    errors, top = subject.errors_at(xs[:, None]), float(bounds.max(initial=bound or 0.0))
    if bound is not None:
        axes.axhline(bound, color=style.ORANGE, lw=1.4, label=f"{said(claim)}: bound")
    if errors is not None:
        axes.plot(xs, errors, color=style.INK, lw=0.9, label="seen, no proof")
        what.append(f"seen at {len(xs):,} points")
        top = max(top, float(errors.max()))
    _finish_line(axes, network, top, ", ".join(what))


def _finish_line(axes: Axes, network: Network, top: float, note: str) -> None:
    """Style a panel of the error over one variable."""
    axes.set_ylim(0, 1.35 * top or 1.0)
    style.set_labels(axes, network.variables[0], "error", style.GREY)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    style.set_plain(axes)
    style.set_title(axes, WHERE, note)


def _draw_tails(axes: Axes, network: Network, edges: np.ndarray) -> None:
    """Draw the tails beyond the core. Each has one bound, at most the certificate's, to which rounding is added."""
    claim, width = network.certificate, 0.25 * (edges[-1] - edges[0])
    label: str | None = "tail, without rounding"
    for start, stop, end in (
        (edges[0] - width, edges[0], network.box.lo[0]),
        (edges[-1], edges[-1] + width, network.box.hi[0]),
    ):
        if np.isinf(end):
            axes.stairs([claim.bound or 0.0], [start, stop], fill=True, color=style.GREY, alpha=0.25, label=label)
            label = None


# --- two variables ----------------------------------------------------------------------------------------------------


def _draw_cells(axes: Axes, subject: PlotSubject) -> None:
    """Draw the bounds of the leaves, with a frame around the worst leaf."""
    from matplotlib.collections import PolyCollection

    claim, box = subject.network.certificate, subject.network.box
    lo, hi = claim.cells(box)
    bounds = claim.leaf_bounds
    corners = np.stack([lo, np.stack([hi[:, 0], lo[:, 1]], 1), hi, np.stack([lo[:, 0], hi[:, 1]], 1)], axis=1)
    outline = (
        style.GREY if len(lo) <= MOST_OUTLINED else "face"
    )  # lines would hide cells that are thinner than they are
    drawn = PolyCollection(list(corners), array=bounds, cmap=style.SIZES, edgecolors=outline, linewidths=0.2)
    axes.add_collection(drawn)
    axes.set(xlim=(box.lo[0], box.hi[0]), ylim=(box.lo[1], box.hi[1]))
    note, top = f"{_leaves(len(lo))} cover{'s' * (len(lo) == 1)} the box", float(bounds.max())
    if claim.norm != "inf":
        top = _scale(bounds, (hi - lo).prod(axis=1))
    elif len(lo) > 1:
        worst = corners[int(bounds.argmax())]
        axes.fill(worst[:, 0], worst[:, 1], facecolor="none", edgecolor=style.BLUE, linewidth=1.6, clip_on=False)
        note += ", the worst in a frame"
    drawn.set_clim(0, top or 1.0)
    style.set_plane(axes, box)
    is_more = float(bounds.max()) > top
    label = f"error at most (up to {bounds.max():.2g} where f jumps)" if is_more else "error at most"
    style.add_colorbar(axes, drawn, label, extend="max" if is_more else "neither")
    style.set_title(axes, f"{WHERE}: {said(claim)}", note)


def _scale(bounds: Float[np.ndarray, " leaves"], volumes: Float[np.ndarray, " leaves"]) -> float:
    """Return the largest bound over nearly all of the box."""
    order = np.argsort(bounds)
    covered = np.cumsum(volumes[order]) / volumes.sum()
    return float(bounds[order[int(np.searchsorted(covered, NEARLY_ALL).clip(0, len(order) - 1))]])


def _draw_plane(axes: Axes, subject: PlotSubject) -> None:
    """Draw the error at a grid of points. This proves nothing."""
    network = subject.network
    side = max(9, min(ON_A_SIDE, int(_few_enough(network, ON_A_SIDE**2) ** 0.5)))
    lines = [np.linspace(lo, hi, side) for lo, hi in zip(network.box.lo, network.box.hi, strict=True)]
    points = np.stack([line.ravel() for line in np.meshgrid(*lines, indexing="ij")], axis=1)
    errors = subject.errors_at(points)
    assert errors is not None
    drawn = axes.pcolormesh(*lines, errors.reshape(side, side).T, cmap=style.SIZES, vmin=0, rasterized=True)
    drawn.set_clim(0, float(errors.max()) or 1.0)
    style.set_plane(axes, network.box)
    style.add_colorbar(axes, drawn, "error seen")
    style.set_title(axes, f"{WHERE}: seen", f"at {len(points):,} points, which proves nothing between them")


# --- more variables ---------------------------------------------------------------------------------------------------


def _draw_profiles(panels: list[Axes], subject: PlotSubject) -> None:
    """Draw, along each variable, the largest error over all other variables."""
    from matplotlib.transforms import ScaledTranslation

    network, claim = subject.network, subject.network.certificate
    points = _random_points(network.box, _few_enough(network, IN_SPACE))
    errors = subject.errors_at(points)
    for i, axes in enumerate(panels):
        lo, hi = float(network.box.lo[i]), float(network.box.hi[i])
        edges, bounds = subject.leaf_steps(i)
        if len(bounds):
            axes.stairs(bounds, edges, color=style.BLUE, fill=True, alpha=0.25, label="leaf bounds")
        if claim.norm == "inf":
            axes.axhline(claim.bound or 0.0, color=style.ORANGE, lw=1.4, label="bound")
        if errors is not None:
            edges = np.linspace(lo, hi, PROFILE_BINS + 1)
            bins = np.clip(np.searchsorted(edges, points[:, i], "right") - 1, 0, PROFILE_BINS - 1)
            largest = np.zeros(PROFILE_BINS)
            np.maximum.at(largest, bins, errors)
            axes.stairs(largest, edges, color=style.INK, lw=0.9, label="seen")
        axes.set(xlim=(lo, hi), ylim=(0, None))
        style.set_labels(axes, network.variables[i])
        style.set_plain(axes)
        axes.locator_params(axis="y", nbins=3)
    beside_title = panels[0].transAxes + ScaledTranslation(0, TITLE_HEIGHT / 72, panels[0].figure.dpi_scale_trans)
    room: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderpad": 0, "borderaxespad": 0, "columnspacing": 1.2}
    panels[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), bbox_transform=beside_title, **room)
    note = "largest over the other variables"
    style.set_title(panels[0], WHERE, note if errors is None else f"{note}; seen at {len(points):,} points")


def _random_points(box: Box, count: int) -> Float[np.ndarray, "points d"]:
    """Return random points, and as many on the border, where errors are often largest."""
    rng = np.random.default_rng(0)
    parts = rng.random((count, box.d))
    rows = np.arange(0, count, 2)
    parts[rows, rng.integers(box.d, size=len(rows))] = rng.integers(2, size=len(rows))
    return np.asarray(np.clip(box.lo + box.widths * parts, box.lo, box.hi))


# --- tables -----------------------------------------------------------------------------------------------------------


def _draw_points(axes: Axes, subject: PlotSubject) -> None:
    """Draw the error at every point of a table of one or two variables."""
    network, claim = subject.network, subject.network.certificate
    rows = np.array(claim.at_points.table if claim.at_points else ())
    points, wanted = np.split(rows, [network.box.d], axis=1)
    inside = np.clip(points, network.box.lo, network.box.hi)
    errors = np.abs(subject.network_at(inside) - wanted).max(axis=1)
    note = f"{at_points(claim)}; nothing is claimed between them"
    if network.box.d == 1:
        axes.vlines(points[:, 0], 0, errors, color=style.BLUE, lw=1.0)
        axes.plot(points[:, 0], errors, "o", color=style.BLUE, ms=3, label="seen")
        axes.axhline(claim.bound or 0.0, color=style.ORANGE, lw=1.4, label=f"{said(claim)}: bound")
        _finish_line(axes, network, claim.bound or 0.0, note)
        return
    x, y = points.T
    drawn = axes.scatter(x, y, c=errors, cmap=style.SIZES, vmin=0, s=24, edgecolors=style.GREY, linewidths=0.4)
    style.set_plane(axes, network.box)
    style.add_colorbar(axes, drawn, "error seen")
    style.set_title(axes, WHERE, note)
