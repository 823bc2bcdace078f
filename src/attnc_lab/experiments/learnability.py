"""Experiment 10: does gradient descent find the partition that the theorem constructs, and does it stay there?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Span, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.measuring import lattice, middles

SIDE = 3.0
PER_AXIS = {2: 8, 3: 5}
"""Number of centres per axis of the construction. The trained head has as many keys as the construction."""
START_BETA = 3.0
"""βh² of the construction that training starts from. It gives a partition, but is soft enough to leave a gradient."""
TRAINING = {"adam": ("adam", 2e-2), "sgd": ("sgd", 5e-2), "from construction": ("adam", 5e-3)}
"""The optimiser and the first learning rate of each kind of training."""
COLOURS = {"adam": drawing.BLUE, "sgd": drawing.GREEN, "from construction": drawing.ORANGE}


def cells(profile: str) -> list[Cell]:
    trials, steps = (2, 1200) if profile == "quick" else (5, 20_000)
    return sweep(d=PER_AXIS, kind=TRAINING, trial=range(trials), steps=steps)


def target(x: Any, lib: Any) -> Any:
    """Return sin x + cos y, plus sin(x)·z/3 in three dimensions."""
    found = lib.sin(x[..., 0]) + lib.cos(x[..., 1])
    return found if x.shape[-1] == 2 else found + lib.sin(x[..., 0]) * x[..., 2] / 3


def centres(d: int) -> tuple[np.ndarray, float]:
    """Return the centres of a grid of cells, and the width h of a cell."""
    h = 2 * SIDE / PER_AXIS[d]
    axis = middles(-SIDE, SIDE, PER_AXIS[d])
    return lattice(axis, d), h


def measure(cell: Cell, seed: int) -> list[Row]:
    import torch

    from attnc_lab.training import Heads, seeded, train, with_one

    kind, d, steps = cell["kind"], cell["d"], cell["steps"]
    seeded(seed, 100 * d + cell["trial"])
    L, h = centres(d)
    head = Heads(d + 1, len(L), 1, d_token=d + 1)
    if kind == "from construction":
        head.construct(L, target(L, np), START_BETA / h**2)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = SIDE * (2 * torch.rand(256, d) - 1)
        return with_one(x), target(x, torch)[:, None]

    test = np.random.default_rng([seed, 9]).uniform(-SIDE, SIDE, (4000, d))
    rows: list[Row] = []

    def watch(step: int) -> None:
        rows.append({"step": step, **_state(head, test, L, h)})

    optimiser, rate = TRAINING[kind]
    train(head, batch, steps=steps, rate=rate, optimiser=optimiser, watch=watch, watch_every=max(1, steps // 20))
    return rows


def _state(head: Any, test: np.ndarray, L: np.ndarray, h: float) -> Row:
    """Return norms, temperature, the mean largest weight, errors, and the distances of keys from the centres."""
    import torch

    from attnc_lab.training import with_one

    d = L.shape[1]
    with torch.no_grad():
        z = with_one(torch.tensor(test, dtype=torch.float32))
        errors = head(z)[:, 0].numpy().astype(float) - target(test, np)
        weights = torch.softmax(head.scores(z)[0], -1).numpy()
    slopes = head.slopes()[:, :d]
    slopes = slopes - slopes.mean(axis=0)
    beta = math.sqrt((slopes**2).mean() / (L**2).mean()) / 2
    hard = target(L[((test[:, None] - L) ** 2).sum(axis=-1).argmin(axis=1)], np) - target(test, np)
    return {
        "norm_Q": float(head.W_Q.detach().norm()),
        "norm_K": float(head.W_K.detach().norm()),
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
    last = table.where(step=table.column("step").max())
    kept, free = last.where(kind="from construction"), Table(row for row in last if row["kind"] != "from construction")
    sharp, used, distance = (free.column(name) for name in ("largest_weight", "used", "distance"))
    distance = distance / free.column("distance_random")
    yield Verdict(
        "Gradient descent finds the partition of the construction (the paper does not claim it).",
        Status.HOLDS.when((sharp > 0.8).all() and (distance < 0.7).all()),
        f"the largest weight is {sharp.mean():.2f} on average (one-hot: 1), a share {used.mean():.2f} of the keys wins "
        f"anywhere, and after optimal matching keys are {Span.of(distance):.2f} times as far from the constructed "
        "centres as random points are. Training finds a smooth mixture of few keys, not a partition of all.",
        {"largest_weight": sharp.mean(), "used": used.mean(), **Span.of(distance).numbers("distance")},
    )
    adam = last.where(kind="adam", d=2)
    before, after = (
        rows.column("norm_Q") * rows.column("norm_K") for rows in (table.where(step=0, kind="adam", d=2), adam)
    )
    grown = Span.of(after / before)
    yield Verdict(
        "A trained head increases the norms of W_Q and W_K to sharpen its partition.",
        Status.HOLDS.when(grown.least > 1.2),
        f"with Adam |W_Q|·|W_K| ends at {grown:.2f} times its start (2-D), and βh² at "
        f"{Span.of(adam.column('beta')):.2f}: far below the {START_BETA:g} at which selection begins.",
        {**grown.numbers("growth"), "beta": adam.column("beta").mean()},
    )
    gap = {kind: np.median(last.where(kind=kind, d=2).ratio("rms", "rms_constructed")) for kind in TRAINING}
    yield Verdict(
        "Other weights than the construction's approximate as well or better.",
        Status.HOLDS.when(gap["adam"] < 1),
        f"rms errors relative to hard selection with as many cells, in 2-D: Adam {gap['adam']:.3f}, SGD "
        f"{gap['sgd']:.3f}, started from the construction {gap['from construction']:.3f}. One value per "
        "cell does not use all that a soft head can do.",
        {kind.replace(" ", "_"): value for kind, value in gap.items()},
    )
    drift, moved = kept.column("distance").max(), Span.of(kept.column("beta"))
    yield Verdict(
        "Started from the construction, training stays there.",
        Status.HOLDS.when(drift < 0.5),
        f"keys stay within {drift:.2f} spacings of their centres on average (random points: "
        f"{kept.column('distance_random').mean():.2f}), while βh² goes from {START_BETA:g} to {moved.least:.2f} … "
        f"{moved.largest:.2f}: the geometry is kept, the temperature is raised until values can be interpolated.",
        {"drift": drift, **moved.numbers("beta")},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    axes = drawing.panels(picture, 4, width=5.2, height=3.9, rows=2)
    axes[0].label("rms error, sin x + cos y", "training step", "rms error", log="y")
    axes[1].label("effective temperature", "training step", "βh²", log="y")
    axes[2].label("how one-hot attention is", "training step", "mean largest weight")
    axes[3].label("keys against constructed centres", "training step", "distance after matching, in h")
    for kind in TRAINING:
        for trial in table.distinct("trial"):
            rows = table.where(kind=kind, d=2, trial=trial)
            for panel, column in zip(axes, ("rms", "beta", "largest_weight", "distance"), strict=True):
                name = f"trained, {kind}" if trial == 0 else None
                panel.line(rows, "step", column, name, COLOURS[kind], lw=1.4, marker="o", ms=2.5)
    reach = np.array([0.0, table.column("step").max()])
    any_row = table.where(d=2)[0]
    axes[0].theory(reach, [any_row["rms_constructed"]] * 2, "constructed, hard selection")
    axes[1].theory(reach, [START_BETA] * 2, "constructed: selection from βh² = 3")
    axes[2].theory(reach, [1, 1], "constructed, hard: one-hot")
    axes[3].theory(reach, [any_row["distance_random"]] * 2, "random points", drawing.GREY, ":")
    axes[3].theory(reach, [0, 0], "constructed: 0")


ABOUT = About(
    10,
    "Learnability of the partition",
    "Does a single-head layer trained by SGD or Adam find a partition, raise its norms, come close to the "
    "constructed keys?",
    "The theorem shows that weights exist (keys β(2L, −|L|²), βh² ≥ 3, values f(L)), not that they are "
    "found; section 6 of the paper expects norms to grow as partitions sharpen.",
    "2504.19901: first experiments 2 (temperature sweep), next checks 1 (learnability), confidence: "
    "learnability not established",
)
