"""Where a bound comes from: its ledger as bars, and on which part of the domain the error sits."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.plots.drawing import write_figure
from attnc.plots.error_places import draw_cells, draw_line, draw_plane, draw_points, draw_profiles
from attnc.plots.style import BLUE, INK, figure_class, new_figure, set_plain, set_title, shortened
from attnc.plots.subject import Subject
from attnc.proofs.error_tree import ErrorNode, error_tree
from attnc.wording import ceiling, one_line, percent, plural, proved_how, without_expression

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

MOST_TERMS, LONGEST = 12, 34
"""The most bars, and the most letters of the name beside a bar."""
MOST_PROFILES, PROFILE = 6, 1.5
"""The most variables along which the error is drawn where there are more than two, and the height of each in inches."""
LETTERS, TITLE_LETTERS = 13.0, 7.0
"""Letters per inch in the lines of the header, and in its title."""


def plot_certificate(network: Network, path: str | os.PathLike[str]) -> None:
    """Writes the picture as SVG, PDF or PNG."""
    if network.certificate.bound is None:
        raise InputError("nothing was proved of this network, so there is no ledger to draw; plot() shows its error")
    write_figure(path, lambda: certificate_figure(network))


def certificate_figure(network: Network) -> Figure:
    """The ledger on the left; on the right where on the domain the error sits: proved of each leaf, and seen."""
    claim, d = network.certificate, network.box.d
    has_leaves, is_known = len(claim.leaf_bounds) > 0, Subject.of(network, None, 0).function is not None
    title = one_line(network.expression or without_expression(network))
    if claim.at_points is not None:
        count, width = int(d <= 2 and bool(claim.at_points.table)), 11.5
    elif d <= 2 or not network.box.is_bounded:
        count = (has_leaves and d == 2) + is_known if d == 2 else int(has_leaves or is_known)
        width = 16.0 if count == 2 else 11.5
    else:
        count, width = (min(d, MOST_PROFILES) if has_leaves or is_known else 0), 13.0
    width = width if count else 7.5
    lines = [part for text in _claims(network) for part in textwrap.wrap(text, int(LETTERS * width))]
    height = max(4.2, PROFILE * count) if d > 2 else 4.2
    picture = new_figure(figure_class(), width, height, shortened(title, int(TITLE_LETTERS * width)), *lines)
    if not count:
        _draw_ledger(picture.subplots(), network)
    elif d > 2:
        grid = picture.add_gridspec(1, 2)
        _draw_ledger(picture.add_subplot(grid[0]), network)
        rows = grid[1].subgridspec(count, 1)
        draw_profiles([picture.add_subplot(rows[i]) for i in range(count)], network)
    else:
        left, *others = picture.subplots(1, 1 + count, width_ratios=(1.1, *[1] * count))
        _draw_ledger(left, network)
        if claim.is_of_table:
            draw_points(picture, others[0], network)
        elif d == 1:
            draw_line(others[0], network)
        else:
            if has_leaves:
                draw_cells(picture, others[0], network)
            if is_known:
                draw_plane(picture, others[-1], network)
    return picture


def _claims(network: Network) -> list[str]:
    """The bound, the place where it is largest, and the error that was seen."""
    claim = network.certificate
    if claim.is_of_table:
        where = f"at the table's {plural(claim.num_points, 'point')}"
        seen = "" if claim.observed is None else f"; {claim.observed:.3g} is the largest error seen at them"
        return [f"proven {where}, in {claim.dtype}: at most {ceiling(claim.bound or 0.0)}{seen}"]
    norm = "" if claim.norm == "inf" else f" in the L{claim.norm} norm"
    place = claim.worst_place(network.box)
    proven = f"proven {proved_how(claim)}, in {claim.dtype}: at most {ceiling(claim.bound or 0.0)}{norm}"
    lines = [proven + (f", largest on {place}" if place else "")]
    if claim.observed is not None:
        lines.append(f"seen at samples{norm}, no proof: {claim.observed:.3g}")
    return lines


def _draw_ledger(axes: Axes, network: Network) -> None:
    """Bars in proportion to the amounts that sources add: one that does not show does not matter."""
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
    axes.set_xlim(0, 1.45 * max((adds for _, adds, _ in rows), default=0.0) or 1.0)
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
    if node.own is None:
        return shortened(one_line(node.name), LONGEST)
    what, others = one_line(node.what), re.search(r", and (\d+ more) of this kind$", node.what)
    if others is not None:
        what = f"{what[: others.start()]}, and {others[1]}"
    return _shortened_within(f"{one_line(node.name)} = {what}", keep=0 if others is None else len(others[1]) + 6)


def _shortened_within(text: str, keep: int) -> str:
    """To the longest label, without losing the last letters."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 1 - keep]}…{text[len(text) - keep :]}"
