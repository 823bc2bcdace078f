"""The figures of the docs: `tables.py --figures` draws them."""

from __future__ import annotations

import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import attnc
from attnc import constructions
from gallery import EXHIBITS, draw
from guide_figures import draw_hero, draw_partition
from subjects import HAT, as_network, sweeps
from theorem_figures import theorem_figures
from transcripts import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_FIGURE_BYTES, MAX_DEMO_BYTES = 120_000, 150_000
"""The size of a picture in the repository: pages load at once, and the pictures are still sharp."""


def draw_demo(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(f"attnc demo --out {folder}")
        os.replace(Path(folder) / "demo.png", path)


def draw_slopes(path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = picture.subplots()
    colours = ("#0072b2", "#5b6470", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's
    markers, dashes = "osD^v", ("-", "-", "-", "-", (0, (6, 2)))  # grey, green and pink look alike without red or green
    scale = {"H": 8, "n − 2": 8, "p": 1}  # N anchors for every unit of the varied quantity
    for (name, (axis, points)), colour, marker, dash in zip(sweeps().items(), colours, markers, dashes, strict=True):
        x, bounds, observed = zip(*points, strict=True)
        unit = 4 if "s = 3" in name else scale[axis]
        anchors = [unit * value for value in x]
        wide = axis == "H" and unit == 8  # it coincides with the sweep over n: drawn wider, below it
        thick, size, alpha = (5.0, 8, 0.4) if wide else (1.4, 5, 1.0)
        axes.loglog(anchors, bounds, color=colour, ls=dash, lw=thick, alpha=alpha)
        axes.loglog(anchors, observed, marker, color=colour, ms=size, alpha=alpha)
        axes.plot([], [], marker=marker, ls=dash, color=colour, lw=thick, ms=size, alpha=alpha, label=name)
    guide = np.array([9.0, 513.0])
    axes.loglog(guide, 0.8 / guide, "--", color="#1b1f24", lw=1.1, label="guide of slope −1: 0.8/N")
    axes.set_xlabel("anchors N")
    axes.set_ylabel("error for clip(x, 0, 1)")
    axes.set_title("lines: bound (proven); markers: observed (sampled)", loc="left", fontsize=10)
    axes.grid(which="major", color="#d5dae0", lw=0.6)
    axes.legend(frameon=False, fontsize=9)
    picture.savefig(path, dpi=130, facecolor="white")


def draw_tutorial(path: Path) -> None:
    """Seven keys of sin at three temperatures: the output above, the weights of the keys below."""
    from matplotlib.figure import Figure

    x = np.linspace(-3, 3, 601)
    picture = Figure(figsize=(9.2, 4.4), layout="constrained")
    rows = picture.subplots(2, 3, sharex=True, height_ratios=(3, 2))
    for beta, curve, image in zip((0.3, 3.0, 50.0), *rows, strict=True):
        net = attnc.compile("sin(x)", {"x": (-3, 3)}, construction="max_affine", beta=beta, points_per_axis=7)
        outputs, cache = net.run(x[:, None], cache=True)
        curve.plot(x, np.sin(x), color="#5b6470", lw=1.2, ls="--", label="sin(x)")
        curve.plot(x, outputs, color="#0072b2", lw=1.8, label="network")
        curve.set_title(f"β = {beta:g}", fontsize=11)
        shown = image.imshow(
            cache["select.head0.pattern"][:, 0].T,
            "Blues",
            aspect="auto",
            interpolation="nearest",
            origin="lower",
            extent=(-3, 3, 0.5, 7.5),
            vmin=0,
            vmax=1,
        )
        image.set_xlabel("x")
        image.set_yticks(range(1, 8))
    rows[0][0].legend(frameon=False, fontsize=9)
    rows[0][0].set_ylabel("output")
    rows[1][0].set_ylabel("key")
    picture.colorbar(shown, ax=rows[1], label="weight", pad=0.01)
    picture.savefig(path, dpi=130, facecolor="white")


def draw_trace(path: Path) -> None:
    """Activation patching of a composition of three heads, with the pairs of points of docs/interpretability.md."""
    net = attnc.compile("tanh(sin(x) + y) + x*y", {"x": (-2, 2), "y": (-1, 1)}, 1e-5)
    clean, corrupted = (np.random.default_rng(seed).uniform(-1, 1, (100, 2))[:20] for seed in (0, 1))
    attnc.trace(net, clean, corrupted).plot(path)


def rates() -> dict[str, Any]:
    """Return the names of examples/rates.py, which measures and draws the rates."""
    return runpy.run_path(str(EXAMPLES / "rates.py"), run_name="rates")


def draw_loss(path: Path) -> None:
    from attnc.plots import plot_loss
    from incontext_figures import ridge_of_diabetes

    plot_loss(ridge_of_diabetes()[0], path)


def draw_rates(path: Path) -> None:
    rates()["draw"](path)


class DrawnHead(NamedTuple):
    """A head of a composed program as its stored weights show it."""

    name: str
    level: int
    keys: int
    queries: tuple[str, ...]  # signals that the scores read
    carried: tuple[str, ...]  # signals that the keys carry


def drawn_heads(program: attnc.Program, inputs: Sequence[str]) -> tuple[list[DrawnHead], tuple[str, ...]]:
    """The heads level by level, and the signals that the output reads."""
    before, heads = [f"signal.{name}" for name in inputs], list[DrawnHead]()
    *pairs, read = program.layers
    for level, (place, attend) in enumerate(zip(pairs[::2], pairs[1::2], strict=True), 1):
        for head in attend.heads:
            (made,) = (attend.channels[i] for i in np.flatnonzero(head.W_O.any(axis=0)))
            asked = [attend.channels[i] for i in np.flatnonzero(head.W_Q.any(axis=1))]
            values = [i for i in np.flatnonzero(head.W_V.any(axis=1))]
            links = place.weight.index[np.isin(place.weight.index[:, 1], values)]
            keys = place.weight.shape[0] if head.mask is None else int(head.mask.num_visible()[0])
            queries = tuple(name for name in asked if name.startswith("signal."))
            heads.append(DrawnHead(made, level, keys, queries, tuple(before[i] for i in np.unique(links[:, 3]))))
        before = list(attend.channels)
    return heads, tuple(before[i] for i in np.unique(read.weight.index[:, 3]))


COMPOSED = "exp(sin(x)*y)*(x*y-z) + abs(x*y-z)"
COMPOSED_BOX = {"x": (-2.0, 2.0), "y": (-2.0, 2.0), "z": (-1.0, 1.0)}


def draw_compose(path: Path) -> None:
    """Heads in columns, one for each attention layer; the arguments of the scores, and the signals that keys carry."""
    from matplotlib.figure import Figure

    target = attnc.as_target(COMPOSED, COMPOSED_BOX)
    program = constructions.compose(target, eps=1e-6).program
    heads, read = drawn_heads(program, target.box.names)
    blue, orange, grey, ink = "#0072b2", "#d55e00", "#5b6470", "#1b1f24"
    depth = heads[-1].level
    arrows = [(source, head.name, head.level, blue, "-") for head in heads for source in head.queries]
    arrows += [(source, head.name, head.level, orange, "--") for head in heads for source in head.carried]
    arrows += [(source, "out", depth + 1, grey, "-") for source in read]
    made = {f"signal.{name}": 0 for name in target.box.names} | {head.name: head.level for head in heads}
    needed = {name: max(level for source, _, level, _, _ in arrows if source == name) for name in made}
    columns = [
        [name for name in made if made[name] == level] + [name for name in made if made[name] < level < needed[name]]
        for level in range(depth + 1)
    ] + [["out"]]
    places = {
        (name, i): (2.2 * i, (len(column) - 1) / 2 - j)
        for i, column in enumerate(columns)
        for j, name in enumerate(column)
    }
    picture = Figure(figsize=(8.2, 3.4), layout="constrained")
    axes = picture.subplots()

    def arrow(source: str, end: str, level: int, colour: str, style: str) -> None:
        (x0, y0), (x1, y1) = places[source, level - 1], places[end, level]
        half = {0: 0.16, depth + 1: 0.26}
        wide = 0.32 if made[source] == level - 1 else 0.12
        shift = {blue: 0.1, orange: -0.1, grey: 0.0}[colour]
        there = (x1 - (0.32 if made.get(end) == level else half.get(level, 0.12)), y1 + shift)
        shape = {"arrowstyle": "-|>" if made.get(end, level) == level else "-", "color": colour, "ls": style, "lw": 1.2}
        axes.annotate("", there, (x0 + half.get(level - 1, wide), y0 + shift / 2), arrowprops=shape)

    for source, end, level, colour, style in arrows:
        arrow(source, end, level, colour, style)
    for i, column in enumerate(columns):
        for name in column:
            (x, y), label = places[name, i], name.removeprefix("signal.").split("#")[0]
            keys = [f"{head.keys} keys" for head in heads if head.name == name]
            if name != "out" and made[name] < i:  # passes by, in the state
                arrow(name, name, i, grey, "-")
                axes.text(x, y, label, ha="center", va="center", fontsize=10, color=grey)
                continue
            box = {"boxstyle": "round,pad=0.45", "fc": "white" if keys else "#eef1f4", "ec": ink, "lw": 0.8}
            axes.text(x, y, "\n".join([label, *keys]), ha="center", va="center", fontsize=10, color=ink, bbox=box)
        title = "inputs" if i == 0 else "output" if i > depth else f"layer {i}"
        axes.text(2.2 * i, 1.65, title, ha="center", fontsize=10, color=grey)
    for x, colour, style, label in ((0.0, blue, "-", "read by the scores"), (3.2, orange, "--", "carried by the keys")):
        axes.plot([x, x + 0.5], [-1.75, -1.75], color=colour, ls=style, lw=1.2)
        axes.text(x + 0.65, -1.75, label, va="center", fontsize=10, color=grey)
    axes.set_xlim(-0.3, 2.2 * (depth + 1) + 0.4)
    axes.set_ylim(-1.95, 1.85)
    axes.axis("off")
    picture.savefig(path, dpi=130, facecolor="white")


def draw_playground(path: Path) -> None:
    """Photograph the page of `attnc serve` with chromium."""
    command = [sys.executable, "-m", "attnc", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[4].rstrip(".")
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        browser += ["--window-size=1400,1210", "--virtual-time-budget=9000", f"--screenshot={path}"]
        subprocess.run([*browser, f"{address}#keys=12&beta=700"], check=True, stderr=subprocess.DEVNULL)
        server.send_signal(signal.SIGINT)


def figures() -> dict[str, Callable[[Path], None]]:
    def of_text(text: str, box: Sequence[tuple[float, float]], eps: float, **options: object) -> Callable[[Path], None]:
        return lambda path: attnc.compile(text, box, eps, **options).plot(path)  # type: ignore[arg-type]

    def of_clip(make: Callable[..., constructions.Built], **options: object) -> Callable[[Path], None]:
        return lambda path: as_network(HAT, make(HAT, **options)).plot(path, HAT)

    return {
        "hero": draw_hero,
        "partition": draw_partition,
        "demo": draw_demo,
        "tutorial": draw_tutorial,
        "trace": draw_trace,
        "max_affine": of_text("x*sin(3*x)", [(-2, 2)], 0.5, construction="max_affine"),
        "truncated_linear": of_clip(constructions.truncated_linear, num_anchors=9),
        "truncated_linear_heads": of_clip(constructions.truncated_linear_heads, num_heads=4, num_tokens=5),
        "truncated_linear_slopes": draw_slopes,
        "compose": draw_compose,
        **theorem_figures(),
        "rates": draw_rates,
        "incontext_loss": draw_loss,
        **{exhibit.picture: functools.partial(draw, exhibit) for exhibit in EXHIBITS},
        "playground": draw_playground,
    }


def optimise(path: Path) -> None:
    """256 colours, and as wide as fits into MAX_FIGURE_BYTES."""
    from PIL import Image

    whole = Image.open(path).convert("RGB")
    limit = MAX_DEMO_BYTES if path.stem == "demo" else MAX_FIGURE_BYTES
    for width in range(1000, 500, -50):
        height = round(whole.height * width / whole.width)
        small = whole.resize((width, height), Image.Resampling.LANCZOS) if width < whole.width else whole
        small.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < limit:
            return
