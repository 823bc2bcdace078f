"""The figures of single theorems: each shows the part of the network that its theorem is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc.constructions.beyond.binomial import binomial_keys
from attnc.constructions.beyond.gates import GATES
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.plots import style
from attnc.plots.selectors import last_layer, pixels
from attnc.wording import ceiling
from subjects import SPIKE, SPIKE_BOX, WAVE, WAVE_BOX, small_mlp

DPI = 110
"""Dots per inch: a figure of 9.4 inches is then 1,034 pixels wide, twice the width of a phone's screen in points."""
SIDE = 480
"""Number of pixels along a side of a map."""


def _save(picture: Any, path: Path) -> None:
    picture.savefig(path, dpi=DPI, facecolor="white")


def _sizes(network: attnc.Network) -> str:
    return f"{network.num_anchors:,} keys, bound {ceiling(network.certificate.bound)} (proven)"


def _at(network: attnc.Network, x: np.ndarray) -> np.ndarray:
    return network.at(x[:, None]).ravel()


def _weights(keys: SoftHead[np.ndarray], x: np.ndarray) -> np.ndarray:
    return softmax(x[:, None] * keys.slopes[:, 0] + keys.offsets)


def _map(axes: Any, network: attnc.Network, values: np.ndarray, label: str, cmap: str = style.VALUES, **ends: Any):
    box = network.box
    style.set_plane(axes, box)
    extent = float(box.lo[0]), float(box.hi[0]), float(box.lo[1]), float(box.hi[1])
    image = style.draw_image(axes, values.reshape(round(values.size**0.5), -1), extent, cmap, ends.get("ends"))
    style.add_colorbar(axes, image, label)


def _curves(axes: Any, x: np.ndarray, weights: np.ndarray, width: float = 1.6) -> None:
    """Draw the weight of every key, in colours that repeat."""
    for i, weight in enumerate(weights.T):
        axes.plot(x, weight, color=style.PALETTE[i % len(style.PALETTE)], linewidth=width)
    axes.set_ylim(0, 1.05)
    style.set_plain(axes)


def _error(axes: Any, x: np.ndarray, error: np.ndarray, bound: float | None, name: str = "x") -> None:
    axes.plot(x, error, color=style.BLUE, linewidth=1.2)
    axes.axhline(0, color=style.GREY, linewidth=0.7)
    if bound is not None:
        for sign in (-1, 1):
            axes.axhline(sign * bound, color=style.ORANGE, linewidth=1.3, linestyle=(0, (5, 3)))
    style.set_labels(axes, name, "network − target")
    style.set_plain(axes)


def draw_adaptive(path: Path) -> None:
    """The partition of the whole box, and the part about the bump enlarged."""
    from matplotlib.patches import ConnectionPatch, Rectangle

    network = attnc.compile(SPIKE, SPIKE_BOX, 0.1, centres="adaptive")
    cells = last_layer(network._engine.form, 0)
    picture = style.new_figure(10.4, 4.6, f"{SPIKE}: cells are small where f changes", _sizes(network))
    whole, part = picture.subplots(1, 2)
    near = 0.5
    for axes, half in ((whole, 2.0), (part, near)):
        lo, hi = np.full(2, -half), np.full(2, half)
        winner = cells.cells_at(pixels(lo, hi, SIDE), SIDE).reshape(SIDE, SIDE)
        border = np.zeros(winner.shape, bool)
        border[:, 1:] |= winner[:, 1:] != winner[:, :-1]
        border[1:] |= winner[1:] != winner[:-1]
        values = network.at(pixels(lo, hi, SIDE)).reshape(SIDE, SIDE)
        style.set_plane(axes, network.box)
        image = style.draw_image(axes, values, (-half, half, -half, half), style.VALUES, (0, 1))
        shown = np.where(border, 1.0, np.nan)
        axes.imshow(shown, origin="lower", extent=(-half, half, -half, half), cmap="gray", vmin=0, vmax=1, alpha=0.75)
    style.set_title(whole, "the whole box", "white lines: borders of cells; frame: the part on the right")
    style.set_title(part, "the frame, enlarged 4 times", f"{len(np.unique(winner))} of {network.num_anchors} cells")
    style.add_colorbar(part, image, "value of the winning key")
    for colour, width in (("white", 2.6), (style.INK, 1.2)):
        whole.add_patch(Rectangle((-near, -near), 2 * near, 2 * near, fill=False, edgecolor=colour, linewidth=width))
    for y in (-near, near):
        line = ConnectionPatch((near, y), (-near, y), "data", "data", axesA=whole, axesB=part, color=style.GREY, lw=0.7)
        picture.add_artist(line)
    _save(picture, path)


def draw_memory(path: Path) -> None:
    """The memory of a cross-attention head as a table and as places, and the output."""
    network = attnc.compile("sin(x)*y", {"x": (-3, 3), "y": (-1, 1)}, 0.3, construction="max_affine_cross")
    point = np.array([[1.2, 0.7]])
    _, cache = network.run(point, cache=True)
    names = [name for name in cache if name.startswith("memory.remember.")]
    memory = np.stack([cache[name][0] for name in names], axis=1)
    pattern = cache["select.head0.pattern"][0, 0]
    picture = style.new_figure(11.4, 4.4, "sin(x)*y: keys and values are a constant memory", _sizes(network))
    table, places, output = picture.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
    scaled = memory / np.abs(memory).max(axis=0)
    shown = table.imshow(scaled, aspect="auto", cmap=style.ERRORS, vmin=-1, vmax=1, interpolation="nearest")
    short = [name.removeprefix("memory.remember.") for name in names]
    table.set_xticks(range(len(names)), short, rotation=35, ha="right")
    style.set_title(table, "memory", "a row per key; columns are scaled")
    table.set_ylabel("key", color=style.INK)
    table.tick_params(colors=style.GREY, labelsize=9, length=0)
    picture.colorbar(shown, ax=table, location="bottom", shrink=0.8, pad=0.02).ax.tick_params(labelsize=8)
    lattice = memory[:, :2]
    counts = [len(np.unique(column)) for column in lattice.T]
    middle, width = (network.box.lo + network.box.hi) / 2, network.box.widths / counts
    where = middle + lattice * width
    style.set_plane(places, network.box)
    dots = places.scatter(*where.T, c=memory[:, 3], cmap=style.VALUES, s=46, edgecolors=style.GREY, linewidths=0.5)
    style.add_colorbar(places, dots, "value of the key")
    won = where[pattern.argmax()]
    places.plot(*point[0], marker="*", color=style.ORANGE, markersize=13, linestyle="", markeredgecolor="white")
    places.annotate("", won, point[0], arrowprops={"arrowstyle": "->", "color": style.ORANGE, "lw": 1.6})
    places.scatter(*won, s=150, facecolors="none", edgecolors=style.ORANGE, linewidths=1.8)
    places.set(xlim=(-3, 3), ylim=(-1, 1))
    style.set_title(places, "a query and its key", f"star: query (1.2, 0.7); its key has weight {pattern.max():.3f}")
    points = pixels(network.box.lo, network.box.hi, SIDE)
    _map(output, network, network.at(points), "network(x, y)", ends=style.limits(memory[:, 3]))
    style.set_title(output, "output", "the value of the key that wins")
    _save(picture, path)


def draw_two_layer(path: Path) -> None:
    """Steps of layer 1, the bumps between them, the score of one cell, and the output."""
    network = attnc.compile(WAVE, WAVE_BOX, 0.5, construction="two_layer")
    x = np.linspace(-3, 3, 1501)
    _, cache = network.run(np.stack([x, np.zeros_like(x)], axis=1), cache=True)
    bumps = np.stack([cache[name][:, 0] for name in cache if name.startswith("bumps.bump.x.")], axis=1)
    steps = 1 - np.cumsum(bumps, axis=1)[:, :-1]
    picture = style.new_figure(10.6, 7.4, f"{WAVE}: steps, bumps, look-up", _sizes(network))
    (first, second), (score, output) = picture.subplots(2, 2)
    _curves(first, x, steps)
    style.set_labels(first, "x", "step")
    style.set_title(
        first, "layer 1: a step at every inner edge", f"{steps.shape[1]} steps along x, and as many along y"
    )
    _curves(second, x, bumps)
    style.set_labels(second, "x", "bump")
    style.set_title(
        second, "between: bumps", f"differences of neighbouring steps; the {bumps.shape[1]} bumps add up to 1"
    )
    picked = bumps[::5, 9][None, :] + bumps[::5, 6][:, None]  # the bumps of y have the same shape as those of x
    _map(score, network, picked.ravel(), "bump of x + bump of y", style.SIZES, ends=(0, 2))
    style.set_title(score, "layer 2: the score of one key", "2 on its own cell, 1 on its row and column, 0 elsewhere")
    _map(output, network, network.at(pixels(network.box.lo, network.box.hi, SIDE)), "network(x, y)")
    style.set_title(output, "output", "β = 32: the key with the score 2 has all the weight")
    _save(picture, path)


def draw_attention_softmax(path: Path) -> None:
    """Cells against anchors: the output, one step of layer 1 with its anchors, and the weights of the softmax."""
    network = attnc.compile("sin(3*x)", {"x": (-2, 2)}, 0.3, construction="attention_softmax")
    chosen = dict(network.parameters)
    num_cells, num_anchors, share = int(chosen["points_per_axis"]), chosen["step_anchors"], chosen["step_width"]
    width = 4 / num_cells
    edge = -2 + width * (num_cells // 2 + 1)
    x = np.linspace(-2, 2, 2001)
    _, cache = network.run(x[:, None], cache=True)
    weights = np.stack([cache[name][:, 0] for name in cache if name.startswith("select.cell.")], axis=1)
    bound = ceiling(network.certificate.bound)
    note = f"{num_cells} cells; {num_cells - 1} steps share {network.num_anchors} keys; bound {bound} (proven)"
    picture = style.new_figure(9.4, 8.6, "sin(3*x): steps by attention, then a softmax over cells", note)
    curve, step, shares = picture.subplots(3, 1, height_ratios=(1.15, 1, 1))
    curve.plot(x, np.sin(3 * x), color=style.ORANGE, linewidth=2.4, label="target")
    curve.plot(x, _at(network, x), color=style.BLUE, linewidth=1.4, label="network")
    edges = -2 + width * np.arange(num_cells + 1)
    curve.plot(edges, np.zeros(len(edges)), "|", color=style.INK, markersize=10, transform=curve.get_xaxis_transform())
    style.set_title(curve, "target and network", "ticks: the edges of cells. These are not anchors")
    style.add_legend_above(curve, 2)
    style.set_labels(curve, "x", "f(x)")
    style.set_plain(curve)
    near = edge + np.linspace(-1.5, 1.5, 1201) * share * width
    _, cache = network.run(near[:, None], cache=True)
    made = cache["steps.clip"][:, num_cells // 2]
    lowest, highest = made.min(), made.max()
    step.plot((near - edge) / width, (made - lowest) / (highest - lowest), color=style.BLUE, linewidth=1.6)
    places = (np.arange(num_anchors) / (num_anchors - 1) - 0.5) * share
    axis_transform = step.get_xaxis_transform()
    step.plot(places, np.zeros(num_anchors), "|", color=style.ORANGE, markersize=10, transform=axis_transform)
    style.set_title(
        step,
        f"one step, enlarged {num_cells / (3 * share):.0f} times",
        f"ticks: the {num_anchors} anchors, in 1/64 of a cell's width",
    )
    style.set_labels(step, f"(x − {edge:.3g}) / width of a cell", "step")
    style.set_plain(step)
    _curves(shares, x, weights)
    style.set_title(shares, "softmax over cells", "the weight of each cell; the output is their values' mean")
    style.set_labels(shares, "x", "weight")
    _save(picture, path)


def draw_relu(path: Path) -> None:
    """The clip that all units share, and the network beside its target."""
    mlp = small_mlp()
    network = attnc.compile(mlp, eps=0.1)
    points = np.random.default_rng(0).uniform(-1, 1, (4000, 2))
    _, cache = network.run(points, cache=True)
    y = np.concatenate([cache["affine0.y"][:, j] for j in range(8)])
    clip = np.concatenate([cache["relu0.clip"][:, j] for j in range(8)])
    order = np.argsort(y)
    keys = int(np.unique(cache["affine0.anchor"]).size)
    half = (keys - 1) / 2
    picture = style.new_figure(11.4, 4.3, "A ReLU network 2 → 8 → 8 → 1", _sizes(network))
    unit, wanted, made = picture.subplots(1, 3, width_ratios=(1.05, 1, 1))
    unit.plot(y[order], np.clip(y[order], -half, half), color=style.ORANGE, linewidth=2.4, label="clip")
    unit.plot(y[order], clip[order], color=style.BLUE, linewidth=1.3, label="head")
    ticks = np.arange(keys) - half
    unit.plot(ticks, np.zeros(keys), "|", color=style.INK, markersize=10, transform=unit.get_xaxis_transform())
    unit.set_xlim(-half - 6, half + 1)
    style.set_title(unit, "layer 1: relu as a clip", f"ticks: the {keys} keys, which all 8 units share")
    unit.legend(frameon=False, fontsize=9, loc="upper left")
    style.set_labels(unit, "pre-activation, in distances of keys", "activation")
    style.set_plain(unit)
    grid = pixels(network.box.lo, network.box.hi, 240)
    target, output = mlp(grid).ravel(), network.at(grid).ravel()
    ends = style.limits(np.concatenate([target, output]))
    _map(wanted, network, target, "f(x0, x1)", ends=ends)
    style.set_title(wanted, "the ReLU network", "target")
    _map(made, network, output - target, "network − target", style.ERRORS, ends=(-0.064, 0.064))
    style.set_title(made, "error", "the colour scale ends at the bound")
    _save(picture, path)


def draw_spectral(path: Path) -> None:
    """Function, anchors with their values beyond the box, and the weights of the keys."""
    network = attnc.compile("x*sin(3*x)", {"x": (-2, 2)}, 1e-3, construction="spectral_grid")
    _, cache = network.run(np.array([[0.0], [1.0]]), cache=True)
    c = dict(network.parameters)["c_x"]
    per_unit = cache["embed.query.x"][1, 0] - cache["embed.query.x"][0, 0]
    anchors, values = cache["embed.anchor.x"][0] * c / per_unit, cache["embed.value.0"][0]
    x = np.linspace(-2, 2, 1201)
    _, cache = network.run(x[:, None], cache=True)
    picture = style.new_figure(9.4, 7.6, "x*sin(3*x) by soft keys", _sizes(network))
    curve, weights, error = picture.subplots(3, 1, sharex=True, height_ratios=(1.4, 1, 0.9))
    curve.vlines(anchors, 0, values, color=style.FAINT, linewidth=1.4)
    curve.plot(anchors, values, "o", color=style.INK, markersize=5, label="keys: anchor and value")
    curve.plot(x, x * np.sin(3 * x), color=style.ORANGE, linewidth=2.8, label="target")
    curve.plot(x, _at(network, x), color=style.BLUE, linewidth=1.3, label="network")
    outside = int((np.abs(anchors) > 2 + 1e-9).sum())
    style.set_title(curve, "target and keys", f"shaded: beyond the box, where {outside} of {len(anchors)} anchors are")
    style.set_labels(curve, "", "f(x), value")
    style.add_legend_above(curve, 3)
    style.set_plain(curve)
    _curves(weights, x, cache["select.head0.pattern"][:, 0])
    style.set_title(weights, "weights", "each curve is one key: several share every point")
    style.set_labels(weights, "", "weight")
    _error(error, x, _at(network, x) - x * np.sin(3 * x), network.certificate.bound)
    style.set_title(error, "error", "dashed: the proven bound")
    reach = np.abs(anchors).max() + 0.2
    for axes in (curve, weights, error):
        axes.set_xlim(-reach, reach)
        for lo, hi in ((-reach, -2), (2, reach)):
            axes.axvspan(lo, hi, color=style.FAINT, alpha=0.45, linewidth=0, zorder=0)
    _save(picture, path)


def draw_graded(path: Path) -> None:
    """A kink, where two groups of keys are switched, and a singular point, at which keys are crowded."""
    picture = style.new_figure(
        10.6, 6.4, "Kinks and singular points", "Above: the weight of each key. Below: the error, and its proven bound."
    )
    panels = picture.subplots(2, 2)
    x = np.linspace(-1, 1, 4001)
    kink = attnc.compile("abs(x-0.3)", {"x": (-1, 1)}, 1e-4, construction="graded")
    _, cache = kink.run(x[:, None], cache=True)
    _curves(panels[0, 0], x, cache["select.head0.pattern"][:, 0])
    panels[0, 0].axvline(0.3, color=style.GREY, linewidth=0.8, linestyle=":")
    style.set_title(panels[0, 0], "|x − 0.3|", f"{kink.num_anchors} keys in two groups, which change at the kink")
    _error(panels[1, 0], x, _at(kink, x) - np.abs(x - 0.3), kink.certificate.bound)
    root = attnc.compile("sqrt(x)", {"x": (0, 1)}, 1e-4, construction="graded")
    t = np.geomspace(1e-9, 1, 2001)
    _, cache = root.run(t[:, None], cache=True)
    _curves(panels[0, 1], t, cache["select.head0.pattern"][:, 0])
    style.set_title(panels[0, 1], "√x", f"{root.num_anchors} keys, crowded at 0: the axis is logarithmic")
    _error(panels[1, 1], t, _at(root, t) - np.sqrt(t), root.certificate.bound)
    for axes in panels[:, 1]:
        axes.set_xscale("log")
    for axes in panels[0]:
        style.set_labels(axes, "x", "weight")
    _save(picture, path)


def draw_gates(path: Path) -> None:
    """Weights and error of GELU, and of ReLU at three inverse temperatures."""
    picture = style.new_figure(
        10.6, 6.4, "Gates: the keys carry x", "The head returns x times the mean of constants: left GELU, right ReLU."
    )
    panels = picture.subplots(2, 2)
    x = np.linspace(-6, 6, 2401)
    gate = GATES["gelu"](1e-7)
    weights = _weights(gate.keys, x)
    _curves(panels[0, 0], x, weights)
    carried = weights @ gate.keys.carried[:, 0, 0]
    panels[0, 0].plot(x, carried, color=style.INK, linewidth=1.6, linestyle=(0, (4, 2)))
    panels[0, 0].annotate("their mean: Φ(x)", (1.4, 0.93), color=style.INK, fontsize=9, ha="right")
    style.set_title(
        panels[0, 0], "GELU: weights of 8 keys", "keys on the right carry about x, keys on the left about 0"
    )
    style.set_labels(panels[0, 0], "x", "weight")
    from scipy.special import ndtr

    _error(panels[1, 0], x, x * carried - x * ndtr(x), gate.error)
    style.set_title(panels[1, 0], "GELU: error on all of R", "dashed: the largest error that a search found, plus 1 %")
    line = np.linspace(-1, 1, 2001)
    for beta, colour in ((8, style.PALETTE[1]), (32, style.PALETTE[2]), (128, style.PALETTE[0])):
        weight = 1 / (1 + np.exp(-beta * line))
        panels[0, 1].plot(line, weight, color=colour, linewidth=1.6, label=f"β = {beta}")
        panels[1, 1].plot(line, line * weight - np.maximum(line, 0), color=colour, linewidth=1.4)
        panels[1, 1].axhline(-0.27846 / beta, color=colour, linewidth=1, linestyle=(0, (5, 3)))
    style.set_title(panels[0, 1], "ReLU: weight of the key that carries x", "the other key carries 0")
    panels[0, 1].legend(frameon=False, fontsize=9, loc="upper left")
    style.set_labels(panels[0, 1], "x", "weight")
    style.set_title(panels[1, 1], "ReLU: error", "dashed: 0.2785/β, as in the theorem")
    style.set_labels(panels[1, 1], "x", "network − target")
    for axes in panels[:, 1]:
        style.set_plain(axes)
    _save(picture, path)


def draw_binomial(path: Path) -> None:
    """Bernstein's polynomials in a sigmoid as weights, and the error for e^−x on a half-line."""
    keys = binomial_keys(lambda y: np.exp(-y), 0.0, np.inf, num_keys=10, limits=(None, 0.0))
    x = np.linspace(-6, 16, 2201)
    weights = _weights(keys, x)
    picture = style.new_figure(
        9.4, 6.2, "e^−x on [0, ∞) by 10 keys", "Weights are Bernstein's polynomials in a sigmoid of x."
    )
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
    _curves(above, x, weights)
    style.set_title(above, "weights", "far out one key has all the weight: the limits are its value, on either side")
    style.set_labels(above, "", "weight")
    inside = x >= 0
    error = weights[inside] @ keys.values[:, 0] - np.exp(-x[inside])
    _error(below, x[inside], error, None)
    style.set_title(below, "error", f"observed: at most {np.abs(error).max():.1e}; nothing is claimed on the left of 0")
    for axes in (above, below):
        axes.axvspan(x[0], 0, color=style.FAINT, alpha=0.45, linewidth=0, zorder=0)
        axes.set_xlim(x[0], x[-1])
    _save(picture, path)


def draw_tables(path: Path) -> None:
    """A smooth table, with fewer keys than points, and a rough one, with a key at every point."""
    smooth = np.linspace(-3, 3, 50)
    rough = np.geomspace(0.02, 1, 20)
    noise = np.random.default_rng(0).normal(size=20)
    picture = style.new_figure(
        10.6, 6.0, "Tables", "Above: points of the table and the network's output. Below: the weight of each key."
    )
    panels = picture.subplots(2, 2, height_ratios=(1.2, 1))
    for column, (x, values, eps) in enumerate(((smooth, np.sin(smooth), 1e-6), (rough, noise, 1e-6))):
        network = attnc.compile(attnc.TableTarget(x[:, None], values, names=["x"]), eps=eps)
        line = np.linspace(x[0], x[-1], 2001)
        outputs, cache = network.run(line[:, None], cache=True)
        curve, weights = panels[:, column]
        curve.plot(line, outputs, color=style.BLUE, linewidth=1.4)
        curve.plot(x, values, "o", color=style.ORANGE, markersize=4)
        style.set_title(
            curve, ("a smooth table", "a rough table")[column], f"{len(x)} points, {network.num_anchors} keys"
        )
        style.set_plain(curve)
        style.set_labels(curve, "x", "value")
        _curves(weights, line, cache["select.head0.pattern"][:, 0], 1.3)
        how = ("several share every point", "one key at each point has most of the weight there")[column]
        style.set_title(weights, "weights", how)
        style.set_labels(weights, "x", "weight")
    _save(picture, path)


def draw_overview(path: Path) -> None:
    """The way of a function through attnc: boxes of work and of results, and the check."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    picture = Figure(figsize=(9.6, 4.9), layout="constrained")
    axes = picture.subplots()
    boxes = {
        "function": (0, 2, "function, box, eps", "text, Python code,\na table, torch modules", "#eef1f4"),
        "target": (1, 2, "target", "values, ranges, slopes,\nkinks, limits", "white"),
        "plan": (2, 2, "plan", "the cost of each\nconstruction", "white"),
        "build": (3, 2, "build", "keys, values and\ninverse temperatures", "white"),
        "program": (3, 1, "program", "affine maps and attention:\nstored numbers", "#eef1f4"),
        "prove": (2, 1, "prove", "cells cover the box;\nrounding included", "white"),
        "certificate": (1, 1, "certificate", "bound, leaves or stages,\nassumptions", "#eef1f4"),
        "run": (3, 0, "run and export", "numpy, torch, JAX, ONNX,\nstock checkpoints", "white"),
        "check": (1, 0, "check", "another program reads the\nfiles, in ball arithmetic", "white"),
        "answer": (0, 0, "yes or no", "exit code 0 or 1", "#eef1f4"),
    }
    wide, high, across, down = 2.05, 0.92, 2.6, 1.5
    for column, row, title, note, colour in boxes.values():
        x, y = column * across, row * down
        shape = FancyBboxPatch((x, y), wide, high, "round,pad=0.04,rounding_size=0.08", fc=colour, ec=style.INK, lw=0.9)
        axes.add_patch(shape)
        axes.text(x + wide / 2, y + high - 0.2, title, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(x + wide / 2, y + 0.3, note, ha="center", va="center", fontsize=8.5, color=style.GREY)
    arrows = ["function target", "target plan", "plan build", "build program", "program prove", "prove certificate"]
    for pair in [*arrows, "program run", "certificate check", "check answer", "prove build"]:
        (x0, y0), (x1, y1) = ((boxes[name][0] * across, boxes[name][1] * down) for name in pair.split())
        is_retry = pair == "prove build"
        if x0 == x1:
            ends = (x0 + wide / 2, y0 - 0.06), (x1 + wide / 2, y1 + high + 0.06)
        elif is_retry:
            ends = (x0 + wide, y0 + high + 0.06), (x1 + 0.3, y1 - 0.06)
        else:
            step = 1 if x1 > x0 else -1
            ends = (
                (x0 + (wide + 0.07 if step > 0 else -0.07), y0 + high / 2),
                (
                    x1 + (-0.07 if step > 0 else wide + 0.07),
                    y1 + high / 2,
                ),
            )
        colour, line = (style.ORANGE, (0, (4, 3))) if is_retry else (style.BLUE, "-")
        axes.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": colour, "ls": line, "lw": 1.4})
    retry = "above eps: again,\nfor a smaller eps"
    axes.text(2 * across + wide + 0.05, 1.74 * down, retry, fontsize=8, color=style.ORANGE, ha="right")
    axes.annotate(
        "",
        (2 * across + 0.5, down + high + 0.06),
        (across + 1.5, 2 * down - 0.06),
        arrowprops={"arrowstyle": "-|>", "color": style.BLUE, "lw": 1.4},
    )
    axes.set_xlim(-0.15, 3 * across + wide + 0.15)
    axes.set_ylim(-0.15, 2 * down + high + 0.15)
    axes.axis("off")
    _save(picture, path)


def theorem_figures() -> dict[str, Callable[[Path], None]]:
    return {
        "max_affine_adaptive": draw_adaptive,
        "max_affine_cross": draw_memory,
        "two_layer": draw_two_layer,
        "attention_softmax": draw_attention_softmax,
        "relu_network": draw_relu,
        "spectral_grid": draw_spectral,
        "graded": draw_graded,
        "gates": draw_gates,
        "binomial": draw_binomial,
        "tables": draw_tables,
        "how_it_works": draw_overview,
    }
