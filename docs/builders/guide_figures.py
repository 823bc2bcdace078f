"""The pictures of the way in: one query through a network with its real numbers, and the partition of a plane."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import attnc
from attnc.plots.style import BLUE, FAINT, GREY, INK, ORANGE, VALUES

QUERY = 0.55
"""The input of the hero picture. Two keys share most of the weight there."""
PLANE_KEYS, PLANE_BETAS = 7, (50.0, 2.0)
"""Keys per axis and the two inverse temperatures of the partition picture: a hard one and a moderate one."""


def draw_hero(path: Path) -> None:
    """x → affine → scores → weights → average of values, with the numbers of a compiled network."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle

    net = attnc.compile("sin(x)", {"x": (-3, 3)}, construction="max_affine", beta=3.0, points_per_axis=7)
    outputs, cache = net.run(np.array([[QUERY]]), cache=True)
    query, anchors, values, scores, weights = (
        cache[name].ravel()
        for name in (
            "embed.query.x",
            "embed.anchor.x",
            "embed.value.0",
            "select.head0.scores",
            "select.head0.pattern",
        )
    )
    picture = Figure(figsize=(7.9, 4.1))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 90)
    axes.set_ylim(0, 43)
    axes.axis("off")

    def text(x: float, y: float, content: str, size: float = 11.5, colour: str = INK, **style: str) -> None:
        axes.text(x, y, content, fontsize=size, color=colour, **({"ha": "center", "va": "center"} | style))

    def box(x: float, y: float, width: float, height: float, colour: str) -> None:
        shape = "round,pad=0,rounding_size=1"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc="white", ec=colour, lw=1.4))

    def arrow(start: float, end: float, y: float) -> None:
        axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.5})

    middle = 19.0
    for x, title, note in (
        (6, "input", ""),
        (19, "affine map", "query 7/6·x"),
        (34, "7 keys", "one per cell"),
        (46.5, "scores", "query · key"),
        (58, "weights", "softmax"),
        (70.2, "values", "sin at the keys"),
        (84, "output", "their average"),
    ):
        text(x, 40, title, 12.5, weight="bold")
        text(x, 37.3, note, 10, GREY)
    box(1, middle - 3, 10, 6, INK)
    text(6, middle, f"x = {QUERY}", 12)
    arrow(11.2, 14.3, middle)
    box(14.5, middle - 3, 9, 6, INK)
    text(19, middle, f"{query[0]:.3f}", 12)
    arrow(23.8, 28.6, middle)
    rows = [33.4 - 4.8 * k for k in range(len(anchors))]
    for y, anchor, score, weight, value in zip(rows, anchors, scores, weights, values, strict=True):
        strong = weight > 0.02
        text(34, y, f"at {anchor:.0f}".replace("-", "−"), colour=INK if strong else GREY)
        text(49, y, f"{score:.1f}".replace("-", "−"), colour=INK if strong else GREY, ha="right")
        axes.add_patch(Rectangle((53.5, y - 1.5), 9.0, 3.0, fc="#eef1f4", ec="none"))
        axes.add_patch(Rectangle((53.5, y - 1.5), 9.0 * weight, 3.0, fc=BLUE, ec="none"))
        inside = weight > 0.6
        text(
            57 if inside else 62.2,
            y,
            f"{weight:.2f}",
            10.5,
            "white" if inside else INK,
            ha="center" if inside else "right",
        )
        axes.plot([70.2, 70.2], [y - 2.4, y + 2.4], color=FAINT, lw=1)
        axes.add_patch(
            Rectangle((70.2, y - 1.1), 4.2 * value, 2.2, fc=ORANGE, ec="none", alpha=1.0 if strong else 0.35)
        )
        side = -1.0 if value > 0 else 1.0
        text(
            70.2 + side * 0.8,
            y,
            f"{value:.2f}".replace("-", "−"),
            10.5,
            INK if strong else GREY,
            ha="right" if side < 0 else "left",
        )
    axes.plot([29.5, 29.5], [rows[-1] - 2.4, rows[0] + 2.4], color=FAINT, lw=1.5)
    axes.plot([77, 77], [rows[-1] - 2.4, rows[0] + 2.4], color=FAINT, lw=1.5)
    arrow(77.3, 79.3, middle)
    box(79.5, middle - 3, 9, 6, INK)
    text(84, middle, f"{outputs[0]:.3f}", 12)
    text(84, middle - 6, f"sin x = {np.sin(QUERY):.3f}", 10.5, GREY)
    picture.savefig(path, dpi=130, facecolor="white")


def draw_partition(path: Path) -> None:
    """sin(x) + cos(y), the cells in which one key wins, and the same keys with their weights shared."""
    from matplotlib.figure import Figure

    at = np.linspace(-3, 3, 241)
    points = np.stack(np.meshgrid(at, at), axis=-1).reshape(-1, 2)
    nets = [
        attnc.compile(
            "sin(x) + cos(y)", [(-3, 3)] * 2, construction="max_affine", beta=beta, points_per_axis=PLANE_KEYS
        )
        for beta in PLANE_BETAS
    ]
    exact = np.sin(points[:, 0]) + np.cos(points[:, 1])
    panels = [
        ("the function", "sin(x) + cos(y)", exact),
        ("in each cell one key wins", f"{nets[0].num_anchors} keys, sharp weights", nets[0](points)),
        ("keys share the weight", "the same keys, softer weights", nets[1](points)),
    ]
    step = 6 / PLANE_KEYS
    places = -3 + step * (np.arange(PLANE_KEYS) + 0.5)
    picture = Figure(figsize=(9.6, 3.7), layout="constrained")
    for i, (axes, (title, note, values)) in enumerate(zip(picture.subplots(1, 3, sharey=True), panels, strict=True)):
        image = values.reshape(len(at), len(at))
        shown = axes.imshow(image, VALUES, origin="lower", extent=(-3, 3, -3, 3), vmin=-2, vmax=2)
        axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK, pad=20)
        axes.annotate(note, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=10, color=GREY)
        axes.set_xlabel("x")
        axes.set_xticks((-3, 0, 3))
        axes.set_yticks((-3, 0, 3))
        if i:
            axes.plot(
                *(grid.ravel() for grid in np.meshgrid(places, places)), ".", color="white", ms=4, mec=INK, mew=0.3
            )
        else:
            axes.set_ylabel("y")
    picture.colorbar(shown, ax=picture.axes[:3], shrink=0.82, pad=0.015)
    picture.savefig(path, dpi=130, facecolor="white")
