"""Experiment 10: does gradient descent find the partition that the theorem constructs, and does it stay there?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnc_lab import drawing
from attnc_lab.experiment import (
    About,
    Cell,
    Effort,
    Interval,
    Row,
    Span,
    Status,
    Table,
    Verdict,
    Verdicts,
    listed,
    sweep,
)
from attnc_lab.measuring import lattice, middles

SIDE = 3.0
PER_AXIS = {2: 8, 3: 5}
"""Number of centres per axis of the construction. The trained head has as many keys as the construction."""
START_BETA = 3.0
"""βh² of the construction that training starts from. It gives a partition, but is soft enough to leave a gradient."""
TRAINING = {
    "adam": (1e-3, 3e-3, 1e-2, 3e-2),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1),
    "from construction": (1e-4, 1e-3, 1e-2),
}
"""The learning rates of each kind of training. The last one is Adam, too."""
TARGETS = ("smooth", "kinked", "discontinuous")
TEXTS = {"smooth": "sin x + cos y", "kinked": "|x| − |y|", "discontinuous": "sign(sin 2x)·sign(y)"}
COLOURS = {"adam": drawing.BLUE, "sgd": drawing.GREEN, "from construction": drawing.ORANGE}
OF_TARGET = {"smooth": drawing.BLUE, "kinked": drawing.GREEN, "discontinuous": drawing.ORANGE}
SEEDS = 5
STEPS = {"quick": 2000, "full": 4000}


def cells(profile: str) -> list[Cell]:
    steps = STEPS[profile]
    return [
        *sweep(d=3, target="smooth", kind=("adam", "from construction"), steps=steps),
        *sweep(d=2, target=TARGETS, kind=("adam", "from construction"), steps=steps),
        *sweep(d=2, target="smooth", kind="sgd", steps=steps),
    ]


def target(name: str, x: Any, lib: Any) -> Any:
    """Return the target: smooth, kinked, or discontinuous; in three dimensions sin x + cos y + sin(x)·z/3."""
    if name == "kinked":
        return lib.abs(x[..., 0]) - lib.abs(x[..., 1])
    if name == "discontinuous":
        return lib.sign(lib.sin(2 * x[..., 0])) * lib.sign(x[..., 1])
    found = lib.sin(x[..., 0]) + lib.cos(x[..., 1])
    return found if x.shape[-1] == 2 else found + lib.sin(x[..., 0]) * x[..., 2] / 3


def centres(d: int) -> tuple[np.ndarray, float]:
    """Return the centres of a grid of cells, and the width h of a cell."""
    h = 2 * SIDE / PER_AXIS[d]
    axis = middles(-SIDE, SIDE, PER_AXIS[d])
    return lattice(axis, d), h


def measure(cell: Cell, seed: int) -> list[Row]:
    import torch

    from attnc_lab.fitting import Batch, Budget, fit
    from attnc_lab.models import Heads

    kind, d, name = cell["kind"], cell["d"], cell["target"]
    L, h = centres(d)

    def make() -> Heads:
        head = Heads(d, len(L), d_token=d + 1)
        if kind == "from construction":
            head.construct(L, target(name, L, np), START_BETA / h**2)
        return head

    def draw(shape: tuple[int, int], generator: torch.Generator) -> Batch:
        x = SIDE * (2 * torch.rand((*shape, d), generator=generator, dtype=torch.float64) - 1)
        return x, target(name, x, torch)[..., None]

    test = np.random.default_rng([seed, 9]).uniform(-SIDE, SIDE, (2000, d))
    rows: list[Row] = []

    def watch(step: int, heads: list[Any]) -> None:
        for trial, head in enumerate(heads):
            rows.append({"trial": trial, "step": step, **_state(head, test, name, L, h)})

    held = draw((1, 1000), torch.Generator().manual_seed(seed + 77))
    budget = Budget(cell["steps"], SEEDS, TRAINING[kind], 160, is_sgd=kind == "sgd")
    fitted = fit(make, draw, (held[0][0], held[1][0]), budget, seed=seed, watch=watch, num_watched=10)
    return [{**row, "rate": fitted.rate} for row in rows]


def _state(head: Any, test: np.ndarray, name: str, L: np.ndarray, h: float) -> Row:
    """Return norms, the slope of the scores, entropy, the mean largest weight, errors, and the places of keys."""
    import torch

    with torch.no_grad():
        x = torch.tensor(test)
        errors = head(x)[:, 0].numpy() - target(name, test, np)
        weights = torch.softmax(head.scores(x)[0], -1).numpy()
    slopes = head.slopes()
    slopes = slopes - slopes.mean(axis=0)
    beta = max(math.sqrt((slopes**2).mean() / (L**2).mean()) / 2, 1e-12)
    hard = target(name, L[((test[:, None] - L) ** 2).sum(axis=-1).argmin(axis=1)], np) - target(name, test, np)
    return {
        "norm": head.norms(),
        "slope": float(np.sqrt((slopes**2).sum(axis=1).mean())),
        "entropy": float(-(weights * np.log(weights + 1e-300)).sum(axis=1).mean()),
        "beta": beta * h**2,
        "largest_weight": weights.max(axis=1).mean(),
        "used": np.unique(weights.argmax(axis=1)).size / len(L),
        "rms": np.sqrt((errors**2).mean()),
        "max_error": np.abs(errors).max(),
        "rms_constructed": np.sqrt((hard**2).mean()),
        "distance": _matched(slopes / (2 * beta), L) / h,
        "distance_random": _matched(np.random.default_rng(5).uniform(-SIDE, SIDE, L.shape), L) / h,
    }


def _matched(found: np.ndarray, L: np.ndarray) -> float:
    """Return the mean distance between found and constructed centres, under the matching that minimises it."""
    from scipy.optimize import linear_sum_assignment

    distances = np.linalg.norm(found[:, None] - L, axis=-1)
    return distances[linear_sum_assignment(distances)].mean()


def judge(table: Table) -> Verdicts:
    steps = int(table[0]["steps"])
    first, last = table.where(step=0), table.where(step=steps)
    kept = last.where(kind="from construction")
    free = Table(row for row in last if row["kind"] != "from construction")
    sharp, used = free.column("largest_weight"), free.column("used")
    distance = free.ratio("distance", "distance_random")
    yield Verdict(
        "Gradient descent finds the partition of the construction (the paper does not show it).",
        Status.HOLDS.when((sharp > 0.8).all() and (distance < 0.7).all(), Status.NOT_REACHED),
        f"from random weights the largest attention weight is {sharp.mean():.2f} on average (one-hot: 1), a share "
        f"{used.mean():.2f} of the keys wins anywhere, and after optimal matching keys are {Span.of(distance):.2f} "
        "times as far from the constructed centres as random points are. Training finds a mixture of few keys, not a "
        "partition of all.",
        {"largest_weight": sharp.mean(), "used": used.mean(), **Span.of(distance).numbers("distance")},
        effort=Effort(steps, SEEDS, sharp.max(), "mean largest weight"),
    )
    of_adam = {name: tuple(rows.where(kind="adam", d=2, target=name) for rows in (last, first)) for name in TARGETS}
    grown = {
        measure: {
            name: Interval.of(end.column(measure) / start.column(measure)) for name, (end, start) in of_adam.items()
        }
        for measure in ("norm", "slope", "entropy")
    }
    largest = {name: (end.column("norm") / start.column("norm")).max() for name, (end, start) in of_adam.items()}
    for name in TARGETS:
        norm, slope, entropy = (grown[measure][name] for measure in ("norm", "slope", "entropy"))
        yield Verdict(
            f"A trained head increases the norms of W_Q and W_K to sharpen its partition: {TEXTS[name]} ({name}).",
            _increase(norm, slope),
            f"factors from the start to the end of Adam in 2-D, geometric means and 95 % intervals of {SEEDS} seeds, "
            f"{steps:,} steps: |W_Q|·|W_K| {norm:.2f}, slope of the scores {slope:.2f}, entropy of attention "
            f"{entropy:.2f}. The rougher the target, the sharper the head; a smooth target needs no sharp one.",
            {"norm": norm.mean, "slope": slope.mean, "entropy": entropy.mean},
            effort=Effort(steps, SEEDS, largest[name], "factor of the norms"),
        )
    gap = {
        name: {
            kind: Interval.of(last.where(kind=kind, d=2, target=name).ratio("rms", "rms_constructed"))
            for kind in last.where(d=2, target=name).distinct("kind")
        }
        for name in TARGETS
    }
    yield Verdict(
        "Other weights than the construction's approximate better, and training finds some.",
        Status.HOLDS.when(all(min(each.mean for each in found.values()) < 1 for found in gap.values())),
        "rms errors relative to hard selection with as many cells, in 2-D, geometric means and 95 % intervals of "
        f"{SEEDS} seeds: "
        + "; ".join(f"{name}: {listed('{0} {1:.3f}', by)}" for name, by in gap.items())
        + ". One value per cell does not use all that a soft head can do.",
        {f"{name}_{kind}".replace(" ", "_"): found.mean for name, by in gap.items() for kind, found in by.items()},
        effort=Effort(steps, SEEDS, last.ratio("rms", "rms_constructed").min(), "relative error"),
    )
    drift, moved = kept.column("distance").max(), Span.of(kept.column("beta"))
    by_target = {name: kept.where(target=name, d=2).column("distance").max() for name in TARGETS}
    yield Verdict(
        "Started from the construction, training stays there.",
        Status.HOLDS.when(drift < 0.5),
        f"in 2-D keys end {listed('{1:.2f} ({0})', by_target)} spacings from their centres on average (random points: "
        f"{kept.column('distance_random').mean():.2f}), while βh² goes from {START_BETA:g} to {moved.least:.2f} … "
        f"{moved.largest:.2f}. Where the target jumps, keys leave the grid for the jumps.",
        {"drift": drift, **moved.numbers("beta"), **by_target},
        effort=Effort(steps, SEEDS, kept.column("distance").min(), "distance"),
    )


def _increase(*factors: Interval) -> Status:
    """Judge a claim that quantities increase, by the intervals of the factors by which they change."""
    if min(factor.high for factor in factors) < 1:
        return Status.FAILS
    return Status.HOLDS.when(min(factor.low for factor in factors) > 1, Status.NOT_REACHED)


def draw(table: Table, picture: drawing.Figure) -> None:
    axes = drawing.panels(picture, 6, width=4.6, height=4.0, rows=2)
    axes[0].label("rms error, sin x + cos y", "training step", "rms error", log="y")
    axes[1].label("how one-hot attention is", "training step", "mean largest weight")
    axes[2].label("keys against constructed centres", "training step", "distance after matching, in h")
    smooth = table.where(d=2, target="smooth")
    for kind in TRAINING:
        for panel, column in zip(axes[:3], ("rms", "largest_weight", "distance"), strict=True):
            panel.seeds(smooth.where(kind=kind), "step", column, f"trained, {kind}", COLOURS[kind], size=3.5)
    reach = np.array([0.0, table.column("step").max()])
    axes[0].theory(reach, [smooth[0]["rms_constructed"]] * 2, "constructed, hard selection")
    axes[1].theory(reach, [1, 1], "constructed, hard: one-hot")
    axes[2].theory(reach, [smooth[0]["distance_random"]] * 2, "random points", drawing.GREY, ":")
    for panel, column, title in zip(
        axes[3:],
        ("norm", "slope", "entropy"),
        ("|W_Q|·|W_K|, Adam", "slope of the scores (rms), Adam", "entropy of attention (nats), Adam"),
        strict=True,
    ):
        panel.label(title, "training step", title.partition(",")[0], log="y")
        for name, colour in OF_TARGET.items():
            rows = table.where(d=2, target=name, kind="adam")
            panel.seeds(rows, "step", column, TEXTS[name], colour, size=3.5)


ABOUT = About(
    10,
    "Learnability of the partition",
    "Does a single-head layer trained by SGD or Adam find a partition, raise its norms, come close to the "
    "constructed keys?",
    "The theorem shows that weights exist (keys β(2L, −|L|²), βh² ≥ 3, values f(L)), not that they are "
    "found; Section 6, as the summary cites it, hints that norms grow as partitions sharpen.",
    "the summary of 2504.19901: first experiments 2 (temperature sweep), next checks 1 (learnability), confidence: "
    "learnability not established",
)
