"""Where a bound comes from: its ledger as bars, and on which part of the domain the error sits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.model_card import ceiling, one_line
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network

MOST_TERMS = 12


def plot_certificate(network: Network, path: str | os.PathLike[str]) -> None:
    """Writes the picture as SVG, PDF or PNG."""
    if network.certificate.bound is None:
        raise InputError("nothing was proved of this network, so there is no ledger to draw; plot() shows its error")
    write_figure(path, lambda: certificate_figure(network))


def certificate_figure(network: Network) -> Figure:
    """The ledger on the left; on the right the bounds of the leaves over the domain, if the proof has leaves."""
    claim = network.certificate
    has_map = network.box.d in (1, 2) and bool(claim.leaf_bounds)
    title = one_line(network.expression or "a Python function")
    how = f"{claim.method}, in {claim.dtype}: at most {ceiling(claim.bound or 0.0)}"
    seen = "" if claim.observed is None else f"; {claim.observed:.3g} seen at samples"
    picture = new_figure(figure_class(), 11.5 if has_map else 7.5, 4.2, title, how + seen)
    if not has_map:
        _draw_ledger(picture.subplots(), network)
        return picture
    left, right = picture.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_ledger(left, network)
    if network.box.d == 1:
        _draw_steps(right, network)
    else:
        _draw_cells(picture, right, network)
    return picture


def _draw_ledger(axes: Axes, network: Network) -> None:
    terms = sorted(network.certificate.terms, key=lambda term: -term.value)
    shown = terms[:MOST_TERMS]
    names = [one_line(term.name) if len(term.name) < 40 else one_line(term.name[:38]) + "…" for term in shown]
    values = [term.value for term in shown]
    if len(terms) > MOST_TERMS:
        names.append(f"{len(terms) - MOST_TERMS} more")
        values.append(sum(term.value for term in terms[MOST_TERMS:]))
    places = np.arange(len(values))
    set_plain(axes, grid=False)
    axes.barh(places, values, color=BLUE, height=0.6)
    axes.set_yticks(places, names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(max(min(v for v in [*values, 1.0] if v > 0) / 3, max(values) * 1e-12), max(values) * 20)
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            ceiling(value),
            (max(value, axes.get_xlim()[0]), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    set_title(axes, "Ledger", "what each term adds, at the worst place")


def _draw_steps(axes: Axes, network: Network) -> None:
    claim = network.certificate
    lo, hi = claim.cells(network.box)
    order = np.argsort(lo[:, 0])
    edges = np.append(lo[order, 0], hi[order[-1], 0])
    axes.stairs(
        np.array(claim.leaf_bounds)[order], edges, color=BLUE, fill=True, alpha=0.35, label="bound of each leaf"
    )
    axes.axhline(claim.bound or 0.0, color=ORANGE, lw=1.4, label="bound")
    axes.set_xlabel(one_line(network.variables[0]), color=INK, parse_math=False)
    axes.set_ylabel("error at most", color=GREY)
    axes.legend(frameon=False, fontsize=9)
    set_plain(axes)
    set_title(axes, "Where the error sits", f"{len(lo):,} leaves cover the box")


def _draw_cells(picture: Figure, axes: Axes, network: Network) -> None:
    from matplotlib.collections import PolyCollection

    claim = network.certificate
    lo, hi = claim.cells(network.box)
    corners = np.stack([lo, np.stack([hi[:, 0], lo[:, 1]], 1), hi, np.stack([lo[:, 0], hi[:, 1]], 1)], axis=1)
    drawn = PolyCollection(
        list(corners), array=np.array(claim.leaf_bounds), cmap=SIZES, edgecolors=GREY, linewidths=0.2
    )
    axes.add_collection(drawn)
    axes.set_xlim(network.box.lo[0], network.box.hi[0])
    axes.set_ylim(network.box.lo[1], network.box.hi[1])
    drawn.set_clim(0, claim.bound or 1.0)
    set_plane(axes, network.box)
    add_colorbar(picture, axes, drawn, "error at most")
    set_title(axes, "Where the error sits", f"{len(lo):,} leaves cover the box")
