"""Experiment 4: the selection by attention, from diffuse to one-hot, as the temperature falls."""

from __future__ import annotations

import math

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.measuring import middles, unproved

SHOWN = (0.01, 0.1, 1.0, 10.0, 100.0)
"""The β of the heat maps, in units of Δ⁻²."""
SMALL, LARGE = 8, 64


def cells(profile: str) -> list[Cell]:
    betas = np.logspace(-4, 3, 25 if profile == "quick" else 61)
    return [*sweep(kind="map", p=SMALL, beta=SHOWN), *sweep(kind="entropy", p=(SMALL, LARGE), beta=betas)]


def pattern(p: int, beta: float, x: np.ndarray) -> np.ndarray:
    """Return the weights (x, anchors) of the head that clips to [0, 1]."""
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))
    built = attnc.constructions.truncated_linear(target, num_anchors=p, beta=beta)
    return unproved(target, built).run(x[:, None], cache=True).cache["clip.head0.pattern"][:, 0]


def measure(cell: Cell, seed: int) -> list[Row]:
    p, beta = cell["p"], cell["beta"]
    if cell["kind"] == "map":
        x = np.linspace(0, 1, 57)
        return [
            {"x": float(at), "anchor": k, "weight": float(weight)}
            for at, row in zip(x, pattern(p, beta, x), strict=True)
            for k, weight in enumerate(row)
        ]
    weights = pattern(p, beta, middles(0, 1, 4000))
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return [{"entropy": -(weights * logs).sum(axis=1).mean(), "largest_weight": weights.max(axis=1).mean()}]


def hard_entropy(beta: np.ndarray) -> np.ndarray:
    """Return π²/6β: the mean entropy over x of the two nearest anchors. Their scores differ by β(1−2r), 0 ≤ r ≤ ½."""
    return math.pi**2 / (6 * beta)


def soft_entropy(beta: np.ndarray) -> np.ndarray:
    """Return ½ log(πe/β): the entropy of a Gaussian of variance 1/2β, in units of the spacing."""
    return np.maximum(0.5 * np.log(math.pi * math.e / beta), 1e-9)


def judge(table: Table) -> Verdicts:
    rows = table.where(kind="entropy", p=LARGE)
    beta, entropy = rows.column("beta"), rows.column("entropy")
    hard, soft = beta > 8, (beta > 0.02) & (beta < 1)
    off_hard = np.abs(entropy[hard] / hard_entropy(beta[hard]) - 1).max()
    sharp = table.where(kind="map", beta=SHOWN[-1])
    x, weights = (sharp.column(name).reshape(-1, SMALL) for name in ("x", "weight"))
    steps = x[:, 0] * (SMALL - 1)
    least = weights.max(axis=1)[np.abs(steps - steps.round()) < 1e-9].min()
    yield Verdict(
        "High β makes attention one-hot: it selects the nearest anchor.",
        Status.HOLDS.when(least > 0.999 and off_hard < 0.1),
        f"at βΔ² = {SHOWN[-1]:g} the weight of the nearest anchor is {least:.6g} to six digits wherever x is at an "
        f"anchor; the mean entropy is π²/(6βΔ²) within {100 * off_hard:.1g} % from βΔ² = 8 on: it falls like 1/β, "
        "since between two anchors a share of 1/β of all x stays undecided.",
        {"least_weight": least, "off": off_hard},
    )
    off_soft = np.abs(entropy[soft] / soft_entropy(beta[soft]) - 1).max()
    uniform = entropy[0] / math.log(LARGE)
    yield Verdict(
        "Low β makes attention diffuse (the failure signature: uniform attention).",
        Status.HOLDS.when(uniform > 0.95 and off_soft < 0.1),
        f"between, the entropy is that of a Gaussian, ½·log(πe/βΔ²), within {100 * off_soft:.1f} % (p = {LARGE}); at "
        f"βΔ² = {beta[0]:g} it is {100 * uniform:.1f} % of log p, the uniform one.",
        {"uniform": uniform, "off": off_soft},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    picture.set_size_inches(11.5, 6.3)
    grid = picture.add_gridspec(2, len(SHOWN), height_ratios=(1, 1.25))
    for column, beta in enumerate(SHOWN):
        panel = drawing.Panel(picture.add_subplot(grid[0, column]))
        panel.label(f"βΔ² = {beta:g}", "x", "anchor k" if column == 0 else "")
        weights = table.where(kind="map", beta=beta).column("weight").reshape(-1, SMALL).T
        image = panel.image(weights, (0, 1, -0.5, SMALL - 0.5), aspect="auto", cmap="Blues", vmin=0, vmax=1)
    bar = picture.colorbar(image, ax=picture.axes, location="right", shrink=0.9, pad=0.01)
    bar.set_label("attention weight", fontsize=9)
    panel = drawing.Panel(picture.add_subplot(grid[1, :]))
    panel.label("mean entropy of attention against β", "βΔ²", "entropy (nats)", log="xy")
    fine = np.logspace(-4, 3, 200)
    panel.theory(fine[fine < 3], soft_entropy(fine[fine < 3]), "theory: ½·log(πe/βΔ²), a Gaussian", drawing.INK)
    panel.theory(fine[fine > 1], hard_entropy(fine[fine > 1]), "theory: π²/(6βΔ²), two neighbours", drawing.INK, ":")
    for p, colour, marker in ((SMALL, drawing.ORANGE, "^"), (LARGE, drawing.BLUE, "o")):
        rows = table.where(kind="entropy", p=p)
        panel.points(rows, "beta", "entropy", f"measured, p = {p}", colour, marker)
        panel.theory(fine[[0, -1]], [math.log(p)] * 2, f"uniform: log {p}", colour, "-.")
    panel.axes.set_ylim(1e-3, 9)
    panel.legend(3)


ABOUT = About(
    4,
    "Selection: from diffuse to one-hot",
    "Does the softmax select the nearest anchor, and at which β does it begin to?",
    "Weights ∝ exp(−β(u − L_k)²). Mean entropy over u: log p for β → 0, ½·log(πe/βΔ²) while many anchors "
    "share, π²/(6βΔ²) once two do.",
    "the summary of 2504.15956: mechanism 1, first experiments 2 (heat maps), failure signature uniform attention; "
    "the summary of 2504.19901: fuzzy partitioning, temperature scaling",
)
