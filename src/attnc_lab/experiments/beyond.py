"""Experiment 15, beyond the papers: the same tasks by sampled, solved, graded, gated and composed constructions."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Status, Table, Verdict, Verdicts, sweep

TASKS: dict[str, tuple[str, list[tuple[float, float]], tuple[str, ...]]] = {
    "sin": ("sin(x)", [(-3, 3)], ("max_affine", "spectral_grid", "graded")),
    "relu": ("relu(x)", [(-1, 1)], ("max_affine", "graded", "gates")),
    "gelu": ("gelu(x)", [(-4, 4)], ("max_affine", "spectral_grid", "gates")),
    "wave": ("sin(x)+cos(y)", [(-3, 3)] * 2, ("max_affine", "spectral_grid", "compose")),
    "product": ("exp(sin(x)*y)", [(-1, 1)] * 2, ("max_affine", "spectral_grid", "compose")),
}
"""The function, box and constructions of each task. The papers' construction comes first."""
SAMPLED, SOLVED = (0.3, 0.1, 0.03, 0.01), (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
COLOURS = {
    "max_affine": drawing.INK,
    "spectral_grid": drawing.GREEN,
    "graded": drawing.PURPLE,
    "gates": drawing.ORANGE,
    "compose": drawing.BLUE,
}


def cells(profile: str) -> list[Cell]:
    found: list[Cell] = []
    for task, (_, box, methods) in TASKS.items():
        is_plane = len(box) > 1
        for method in methods:
            levels = SAMPLED if method == "max_affine" else SOLVED
            count = len(levels) - (1 if is_plane and profile == "quick" else 0)  # the last level would take minutes
            found += sweep(task=task, construction=method, eps=levels[:count])
    return found


def measure(cell: Cell, seed: int) -> list[Row]:
    text, box, _ = TASKS[cell["task"]]
    try:
        net = attnc.compile(text, box, cell["eps"], construction=cell["construction"])
    except attnc.BoundNotMet as refusal:
        return [{"refused": 1, **({} if refusal.bound is None else {"best_bound": float(refusal.bound)})}]
    sizes = {"anchors": net.num_anchors, "parameters": net.num_parameters, "layers": net.program.num_attention_layers}
    errors = {"observed": net.certificate.observed, "bound": net.certificate.bound}
    return [sizes | {name: value for name, value in errors.items() if value is not None}]


def judge(table: Table) -> Verdicts:
    done = table.having("anchors")
    gains, best = {}, {}
    for task, (_, _, methods) in TASKS.items():
        law = done.where(task=task, construction="max_affine").power("eps", "anchors")
        others = [row for method in methods[1:] for row in done.where(task=task, construction=method)]
        best[task] = min(others, key=lambda row: (row["eps"], row["anchors"]))
        gains[task] = law(np.array([best[task]["eps"]]))[0] / best[task]["anchors"]
    by_task = [
        f"{TASKS[task][0]} to {row['eps']:g}: {row['anchors']} anchors ({row['construction']}), {gains[task]:.1e} "
        "times fewer than selection by its own law"
        for task, row in best.items()
    ]
    yield Verdict(
        "Solved, graded, gated and composed constructions need far fewer anchors than the papers' selection.",
        Status.HOLDS.when(all(gain > 1e3 for gain in gains.values())),
        "; ".join(by_task) + ".",
        gains,
    )
    proven = done.having("bound")
    ratio = proven.above("observed", 0).ratio("bound", "observed")  # an exact gate shows no error at all
    unproven, refused = len(done) - len(proven), len(table.having("refused"))
    yield Verdict(
        "The certified error is above the observed one, and close to it.",
        Status.CONSTANT.when(proven.is_within("observed", "bound") and np.median(ratio) < 3),
        f"in all {len(proven)} networks with a proof the bound is {ratio.min():.2f} to {ratio.max():.3g} times the "
        f"observed error, median {np.median(ratio):.2f}; {unproven} networks have no proof, {refused} requests were "
        "refused.",
        {"median": np.median(ratio), "largest": ratio.max(), "unproven": unproven, "refused": refused},
        Constant(ratio.max(), "proven bound over observed error, the largest of all networks with a proof"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    axes = drawing.panels(picture, 6, width=4.4, height=4.0, rows=2)
    done = table.having("anchors")
    for panel, (task, (text, box, methods)) in zip(axes, TASKS.items(), strict=False):
        panel.label(text, "anchors in all", "error", log="xy")
        papers = done.where(task=task, construction="max_affine")
        power = 1 / len(box)
        anchors = np.logspace(0, 6, 20)
        scale = papers.column("observed")[-1] * papers.column("anchors")[-1] ** power
        panel.theory(anchors, scale * anchors**-power, f"the papers' rate: anchors^−{power:g}")
        for method in methods:
            rows, colour = done.where(task=task, construction=method), COLOURS[method]
            panel.points(rows.having("observed"), "anchors", "observed", method, colour)
            panel.points(rows.having("bound"), "anchors", "bound", "_proven", colour, "s", size=8, is_open=True)
        panel.measured([], [], "open squares: proven", drawing.INK, "s", size=8, is_open=True)
        panel.axes.set_ylim(1e-12, 3)
    last = axes[-1]
    last.label("certified against observed, all tasks", "observed error", "proven bound", log="xy")
    line = np.array([1e-12, 1.0])
    last.theory(line, line, "theory: the bound is above")
    for method, colour in COLOURS.items():
        rows = done.having("bound").where(construction=method)
        last.points(rows, "observed", "bound", method, colour, "s", size=4)


ABOUT = About(
    15,
    "Beyond the papers: solved, graded, gated, composed",
    "How many anchors do the same functions need by other choices of the same layer's weights, and how "
    "tight are the proofs?",
    "Selection: anchors ∝ ε^−D. Solved values at moderate temperature: polylogarithmic in 1/ε for "
    "analytic functions; gates: two keys for ReLU at any ε; composition: the sum over an expression's heads. A "
    "proven bound is at least the observed error.",
    "beyond the papers; the summary of 2504.15956: limitation computational overhead, open question on parameter "
    "complexity",
)
