"""Where on the domain the error sits: what was proved of each leaf, and the error that is seen at points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.plots.style import BLUE, GREY, INK, ORANGE, SIZES, add_colorbar, set_plain, set_plane, set_title
from attnc.plots.subject import SCORES, Subject
from attnc.targets.box import Box
from attnc.wording import one_line, plural

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

MOST_OUTLINED = 4_096
"""Cells up to which each has an outline."""
ON_A_LINE, ON_A_SIDE, IN_SPACE = 1_025, 97, 20_000
"""Points at which the error is seen: of one variable, along each side of two, and of more."""
BINS = 32
"""Along a variable, of those points."""
NEARLY_ALL = 0.99
"""Of the box: what a colour scale shows in full where f jumps; bounds next to the jump are far larger."""
WHERE, TITLE = "Where the error sits", 22
"""The title of these panels, and how high it stands above them, in points."""


def seen_errors(network: Network, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"] | None:
    """The largest over the outputs; None where what the network stands for is not known."""
    subject = Subject.of(network, None, 0)
    if subject.function is None:
        return None
    errors = np.abs(subject.network_at(points) - subject.target_at(points))
    return np.asarray(np.nan_to_num(errors).max(axis=1))


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count:,} leaves"


def few_enough(network: Network, count: int) -> int:
    return max(33, min(count, int(SCORES / max(1, network.work_per_point))))


# --- one variable -----------------------------------------------------------------------------------------------------


def draw_line(axes: Axes, network: Network) -> None:
    """The bounds of the leaves as steps, the error that is seen as a line."""
    claim = network.certificate
    box, what, edges, bounds = network.box, [], np.zeros(0), np.zeros(0)
    if len(claim.leaf_bounds):
        lo, hi = claim.cells(network.box)
        order = np.argsort(lo[:, 0])
        edges = np.append(lo[order, 0], hi[order[-1], 0])
        bounds = claim.leaf_bounds[order]
        axes.stairs(bounds, edges, color=BLUE, fill=True, alpha=0.25, label="proven: bound of each leaf")
        axes.stairs(bounds, edges, color=BLUE, lw=0.8)  # leaves at a jump are thinner than a pixel
        what.append(_leaves(len(lo)))
        if claim.core is not None:
            _draw_tails(axes, network, edges)
            what.append(f"tails beyond [{edges[0]:g}, {edges[-1]:g}]")
            box = Box(box.names, edges[:1], edges[-1:])
    is_largest_error = claim.norm == "inf"
    if is_largest_error:
        axes.axhline(claim.bound or 0.0, color=ORANGE, lw=1.4, label="proven: bound")
    top = max(float(bounds.max(initial=0.0)), (claim.bound or 0.0) if is_largest_error else 0.0)
    count = few_enough(network, ON_A_LINE)
    xs = np.linspace(box.lo[0], box.hi[0], count)
    if 0 < len(edges) <= count:  # at a kink leaves are finer than any grid
        xs = np.unique(np.concatenate([xs, edges, (edges[1:] + edges[:-1]) / 2])).clip(box.lo[0], box.hi[0])
    errors = seen_errors(network, xs[:, None])
    if errors is not None:
        axes.plot(xs, errors, color=INK, lw=0.9, label="seen, no proof")
        what.append(f"seen at {len(xs):,} points")
        top = max(top, float(errors.max()))
    axes.set_ylim(0, 1.35 * top or 1.0)
    axes.set_xlabel(one_line(network.variables[0]), color=INK, parse_math=False)
    axes.set_ylabel("error", color=GREY)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    set_plain(axes)
    set_title(axes, WHERE, ", ".join(what))


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


# --- two variables ----------------------------------------------------------------------------------------------------


def draw_cells(picture: Figure, axes: Axes, network: Network) -> None:
    """The bounds of the leaves; the worst of them has a frame."""
    from matplotlib.collections import PolyCollection

    claim = network.certificate
    lo, hi = claim.cells(network.box)
    bounds = claim.leaf_bounds
    corners = np.stack([lo, np.stack([hi[:, 0], lo[:, 1]], 1), hi, np.stack([lo[:, 0], hi[:, 1]], 1)], axis=1)
    outline = GREY if len(lo) <= MOST_OUTLINED else "face"  # lines would hide cells that are thinner than they are
    drawn = PolyCollection(list(corners), array=bounds, cmap=SIZES, edgecolors=outline, linewidths=0.2)
    axes.add_collection(drawn)
    axes.set_xlim(network.box.lo[0], network.box.hi[0])
    axes.set_ylim(network.box.lo[1], network.box.hi[1])
    note, top = f"{_leaves(len(lo))} cover{'s' * (len(lo) == 1)} the box", float(bounds.max())
    if claim.norm != "inf":
        top = _scale(bounds, (hi - lo).prod(axis=1))
    elif len(lo) > 1:
        worst = corners[int(bounds.argmax())]
        axes.fill(worst[:, 0], worst[:, 1], facecolor="none", edgecolor=BLUE, linewidth=1.6, clip_on=False)
        note += ", the worst in a frame"
    drawn.set_clim(0, top or 1.0)
    set_plane(axes, network.box)
    is_more = float(bounds.max()) > top
    label = f"error at most (up to {bounds.max():.2g} where f jumps)" if is_more else "error at most"
    add_colorbar(picture, axes, drawn, label, extend="max" if is_more else "neither")
    set_title(axes, f"{WHERE}: proven", note)


def _scale(bounds: Float[np.ndarray, " leaves"], volumes: Float[np.ndarray, " leaves"]) -> float:
    """The bound that holds on nearly all of the box."""
    order = np.argsort(bounds)
    covered = np.cumsum(volumes[order]) / volumes.sum()
    return float(bounds[order[int(np.searchsorted(covered, NEARLY_ALL).clip(0, len(order) - 1))]])


def draw_plane(picture: Figure, axes: Axes, network: Network) -> None:
    """The error at a grid of points, which proves nothing."""
    side = max(9, min(ON_A_SIDE, int(few_enough(network, ON_A_SIDE**2) ** 0.5)))
    lines = [np.linspace(lo, hi, side) for lo, hi in zip(network.box.lo, network.box.hi, strict=True)]
    points = np.stack([line.ravel() for line in np.meshgrid(*lines, indexing="ij")], axis=1)
    errors = seen_errors(network, points)
    assert errors is not None
    drawn = axes.pcolormesh(*lines, errors.reshape(side, side).T, cmap=SIZES, vmin=0, rasterized=True)
    drawn.set_clim(0, float(errors.max()) or 1.0)
    set_plane(axes, network.box)
    add_colorbar(picture, axes, drawn, "error seen")
    set_title(axes, f"{WHERE}: seen", f"at {len(points):,} points, which proves nothing between them")


# --- more variables ---------------------------------------------------------------------------------------------------


def draw_profiles(panels: list[Axes], network: Network) -> None:
    """Along one variable after the other: the largest over all the others."""
    from matplotlib.transforms import ScaledTranslation

    claim = network.certificate
    points = _spread(network.box, few_enough(network, IN_SPACE))
    errors = seen_errors(network, points)
    for i, axes in enumerate(panels):
        lo, hi = float(network.box.lo[i]), float(network.box.hi[i])
        if len(claim.leaf_bounds):
            starts, stops = (ends[:, i] for ends in claim.cells(network.box))
            edges = np.unique(np.concatenate([starts, stops]))
            bounds = np.zeros(len(edges) - 1)
            for start, stop, bound in zip(starts, stops, claim.leaf_bounds.tolist(), strict=True):
                within = slice(*np.searchsorted(edges, (start, stop)))
                bounds[within] = np.maximum(bounds[within], bound)
            axes.stairs(bounds, edges, color=BLUE, fill=True, alpha=0.25, label="leaf bounds")
        if claim.norm == "inf":
            axes.axhline(claim.bound or 0.0, color=ORANGE, lw=1.4, label="bound")
        if errors is not None:
            edges = np.linspace(lo, hi, BINS + 1)
            bins = np.clip(np.searchsorted(edges, points[:, i], "right") - 1, 0, BINS - 1)
            largest = np.zeros(BINS)
            np.maximum.at(largest, bins, errors)
            axes.stairs(largest, edges, color=INK, lw=0.9, label="seen")
        axes.set_xlim(lo, hi)
        axes.set_ylim(0, None)
        axes.set_xlabel(one_line(network.variables[i]), color=INK, parse_math=False)
        set_plain(axes)
        axes.locator_params(axis="y", nbins=3)
    beside_title = panels[0].transAxes + ScaledTranslation(0, TITLE / 72, panels[0].figure.dpi_scale_trans)
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderpad": 0, "borderaxespad": 0, "columnspacing": 1.2}
    panels[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), bbox_transform=beside_title, **style)
    note = "largest over the other variables"
    set_title(panels[0], WHERE, note if errors is None else f"{note}; seen at {len(points):,} points")


def _spread(box: Box, count: int) -> Float[np.ndarray, "points d"]:
    """Random points, and as many on the border: there errors often are largest."""
    rng = np.random.default_rng(0)
    parts = rng.random((count, box.d))
    rows = np.arange(0, count, 2)
    parts[rows, rng.integers(box.d, size=len(rows))] = rng.integers(2, size=len(rows))
    return np.asarray(np.clip(box.lo + box.widths * parts, box.lo, box.hi))


# --- tables -----------------------------------------------------------------------------------------------------------


def draw_points(picture: Figure, axes: Axes, network: Network) -> None:
    """Of a table of one or two variables: the error at every point."""
    box, rows = network.box, np.array(network.certificate.at_points.table if network.certificate.at_points else ())
    points, wanted = rows[:, : box.d], rows[:, box.d :]
    errors = np.abs(np.asarray(network(points, outside="clamp")).reshape(len(rows), -1) - wanted).max(axis=1)
    note = f"at the table's {plural(len(rows), 'point')}; nothing is claimed between them"
    if box.d == 1:
        axes.vlines(points[:, 0], 0, errors, color=BLUE, lw=1.0)
        axes.plot(points[:, 0], errors, "o", color=BLUE, ms=3, label="seen")
        axes.axhline(network.certificate.bound or 0.0, color=ORANGE, lw=1.4, label="proven: bound")
        axes.set_ylim(0, 1.35 * (network.certificate.bound or 0.0) or 1.0)
        axes.set_xlabel(one_line(box.names[0]), color=INK, parse_math=False)
        axes.set_ylabel("error", color=GREY)
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
        set_plain(axes)
    else:
        x, y = points.T
        drawn = axes.scatter(x, y, c=errors, cmap=SIZES, vmin=0, s=24, edgecolors=GREY, linewidths=0.4)
        set_plane(axes, box)
        add_colorbar(picture, axes, drawn, "error seen")
    set_title(axes, WHERE, note)
