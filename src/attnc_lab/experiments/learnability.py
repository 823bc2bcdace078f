"""Experiment 10: does gradient descent find the partition that the theorem constructs, and does it stay there?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnc_lab import drawing
from attnc_lab.experiment import Cell, Experiment, Row, Status, Table, Verdict

SIDE = 3.0
PER_AXIS = {2: 8, 3: 5}
"""Centres per axis of the construction; the trained head has as many keys."""
START_BETA = 3.0
"""βh² of the construction that training starts from: a partition, not so hard that no gradient is left."""
KINDS = ("adam", "sgd", "from construction")
RATES = {"adam": 2e-2, "sgd": 5e-2, "from construction": 5e-3}
COLOURS = {"adam": drawing.BLUE, "sgd": drawing.GREEN, "from construction": drawing.ORANGE}


def cells(profile: str) -> list[Cell]:
    trials, steps = (2, 1200) if profile == "quick" else (5, 20_000)
    return [
        {"kind": kind, "d": d, "trial": trial, "steps": steps}
        for d in PER_AXIS
        for kind in KINDS
        for trial in range(trials)
    ]


def target(x: Any, lib: Any) -> Any:
    """sin x + cos y, and in three dimensions + sin(x)·z/3."""
    found = lib.sin(x[..., 0]) + lib.cos(x[..., 1])
    return found if x.shape[-1] == 2 else found + lib.sin(x[..., 0]) * x[..., 2] / 3


def centres(d: int) -> tuple[np.ndarray, float]:
    """Return the centres of a grid of cells, and the width h of a cell."""
    h = 2 * SIDE / PER_AXIS[d]
    axis = -SIDE + h * (np.arange(PER_AXIS[d]) + 0.5)
    return np.stack(np.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d), h


def measure(cell: Cell, seed: int) -> list[Row]:
    import torch

    from attnc_lab.training import Heads, train, with_one

    kind, d, steps = str(cell["kind"]), int(cell["d"]), int(cell["steps"])
    torch.manual_seed(2**16 * seed % 2**32 + 100 * d + int(cell["trial"]))
    L, h = centres(d)
    head = Heads(d + 1, len(L), 1, d_token=d + 1)
    if kind == "from construction":
        construct(head, L, target(L, np), START_BETA / h**2)

    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = SIDE * (2 * torch.rand(256, d) - 1)
        return with_one(x), target(x, torch)[:, None]

    test = np.random.default_rng([seed, 9]).uniform(-SIDE, SIDE, (4000, d))
    rows: list[Row] = []
    train(
        head,
        batch,
        steps=steps,
        rate=RATES[kind],
        optimiser="sgd" if kind == "sgd" else "adam",
        watch=lambda step, _: rows.append({"step": step, **_state(head, test, L, h)}),
        watch_every=max(1, steps // 20),
    )
    return rows


def construct(head: Any, L: np.ndarray, values: np.ndarray, beta: float) -> None:
    """The weights of the theorem: key β(2L, −|L|²), value f(L)."""
    import torch

    with torch.no_grad():
        d = L.shape[1]
        head.W_Q[0] = torch.eye(d + 1)
        head.E[:] = torch.tensor(np.concatenate([L, (L**2).sum(axis=1, keepdims=True)], axis=1), dtype=torch.float32)
        head.W_K[0] = torch.diag(torch.tensor([2 * beta] * d + [-beta]))
        head.W_V.zero_()
        head.V[0, :, 0] = torch.tensor(values, dtype=torch.float32)


def _state(head: Any, test: np.ndarray, L: np.ndarray, h: float) -> Row:
    """Norms, effective temperature, how one-hot attention is, errors, and how far keys are from the centres."""
    import torch

    from attnc_lab.training import with_one

    d = L.shape[1]
    with torch.no_grad():
        z = with_one(torch.tensor(test, dtype=torch.float32))
        errors = head(z)[:, 0].numpy().astype(float) - target(test, np)
        weights = torch.softmax(head.scores(z)[0], -1).numpy()
        slopes = (head.E @ head.W_K[0] @ head.W_Q[0].T).numpy().astype(float)[:, :d]
        norms = float(head.W_Q.norm()), float(head.W_K.norm())
    slopes = slopes - slopes.mean(axis=0)
    beta = math.sqrt((slopes**2).mean() / (L**2).mean()) / 2
    hard = target(L[((test[:, None] - L) ** 2).sum(axis=-1).argmin(axis=1)], np) - target(test, np)
    return {
        "norm_Q": norms[0],
        "norm_K": norms[1],
        "beta": beta * h**2,
        "largest_weight": float(weights.max(axis=1).mean()),
        "used": float(np.unique(weights.argmax(axis=1)).size / len(L)),
        "rms": float(np.sqrt((errors**2).mean())),
        "max_error": float(np.abs(errors).max()),
        "rms_constructed": float(np.sqrt((hard**2).mean())),
        "distance": _matched(slopes / (2 * beta), L) / h,
        "distance_random": _matched(np.random.default_rng(5).uniform(-SIDE, SIDE, L.shape), L) / h,
    }


def _matched(found: np.ndarray, L: np.ndarray) -> float:
    """The mean distance of the found centres from the constructed ones, matched so that it is least."""
    from scipy.optimize import linear_sum_assignment

    distances = np.linalg.norm(found[:, None] - L, axis=-1)
    return float(distances[linear_sum_assignment(distances)].mean())


def last(table: Table, **wanted: Any) -> Table:
    rows = table.where(**wanted)
    return rows.where(step=int(rows.column("step").max()))


def judge(table: Table) -> list[Verdict]:
    free = Table([row for d in PER_AXIS for kind in ("adam", "sgd") for row in last(table, kind=kind, d=d)])
    kept = Table([row for d in PER_AXIS for row in last(table, kind="from construction", d=d)])
    first = table.where(step=0)
    sharp, distance = free.column("largest_weight"), free.column("distance") / free.column("distance_random")
    adam = last(table, kind="adam", d=2)
    grown = (
        adam.column("norm_Q")
        * adam.column("norm_K")
        / (first.where(kind="adam", d=2).column("norm_Q") * first.where(kind="adam", d=2).column("norm_K"))
    )
    gap = {
        kind: float(np.median(rows.column("rms") / rows.column("rms_constructed")))
        for kind in KINDS
        if (rows := last(table, kind=kind, d=2))
    }
    found_partition = bool((sharp > 0.8).all() and (distance < 0.7).all())
    drift = float(kept.column("distance").max())
    moved = kept.column("beta") / START_BETA
    return [
        Verdict(
            "Gradient descent finds the partition of the construction (the paper does not claim it).",
            Status.HOLDS.when(found_partition),
            f"the largest weight is {sharp.mean():.2f} on average (one-hot: 1), a share "
            f"{free.column('used').mean():.2f} of the keys wins anywhere, and after optimal matching keys are "
            f"{distance.min():.2f} to {distance.max():.2f} times as far from the constructed centres as random points "
            "are. Training finds a smooth mixture of few keys, not a partition of all.",
            {
                "largest_weight": sharp.mean(),
                "used": free.column("used").mean(),
                "least_distance": distance.min(),
                "largest_distance": distance.max(),
            },
        ),
        Verdict(
            "A trained head increases the norms of W_Q and W_K to sharpen its partition.",
            Status.HOLDS.when(bool((grown > 1.2).all())),
            f"with Adam |W_Q|·|W_K| ends at {grown.min():.2f} to {grown.max():.2f} times its start (2-D), and βh² at "
            f"{adam.column('beta').min():.2f} to {adam.column('beta').max():.2f}: far below the {START_BETA:g} from "
            "which one would speak of selection.",
            {"least_growth": grown.min(), "largest_growth": grown.max(), "beta": adam.column("beta").mean()},
        ),
        Verdict(
            "Other weights than the construction's approximate as well or better.",
            Status.CONSTANT.when(gap["adam"] < 1),
            f"rms errors relative to hard selection with as many cells, in 2-D: Adam {gap['adam']:.3f}, SGD "
            f"{gap['sgd']:.3f}, started from the construction {gap['from construction']:.3f}. A value per cell wastes "
            "what a soft head can do.",
            {kind.replace(" ", "_"): value for kind, value in gap.items()},
        ),
        Verdict(
            "Started from the construction, training stays there.",
            Status.CONSTANT.when(drift < 0.5),
            f"keys stay within {drift:.2f} spacings of their centres on average (random points: "
            f"{kept.column('distance_random').mean():.2f}), while βh² goes from {START_BETA:g} to "
            f"{START_BETA * moved.min():.2f} … {START_BETA * moved.max():.2f}: the geometry is kept, the temperature "
            "is raised until values can be interpolated.",
            {"drift": drift, "least_beta": START_BETA * moved.min(), "largest_beta": START_BETA * moved.max()},
        ),
    ]


def draw(table: Table) -> drawing.Figure:
    picture, axes = drawing.panels(4, width=5.2, height=3.9, rows=2)
    drawing.label(axes[0], "rms error, sin x + cos y", "training step", "rms error", log="y")
    drawing.label(axes[1], "effective temperature", "training step", "βh²", log="y")
    drawing.label(axes[2], "how one-hot attention is", "training step", "mean largest weight")
    drawing.label(axes[3], "keys against constructed centres", "training step", "distance after matching, in h")
    for kind in KINDS:
        for trial in table.distinct("trial"):
            rows = table.where(kind=kind, d=2, trial=trial)
            for panel, column in zip(axes, ("rms", "beta", "largest_weight", "distance"), strict=True):
                name = f"trained, {kind}" if trial == 0 else None
                panel.plot(
                    rows.column("step"),
                    rows.column(column),
                    color=COLOURS[kind],
                    lw=1.4,
                    marker="o",
                    ms=2.5,
                    label=name,
                )
    reach = np.array([0.0, float(table.column("step").max())])
    any_row = table.where(d=2)[0]
    drawing.theory(axes[0], reach, [float(any_row["rms_constructed"])] * 2, "constructed, hard selection")
    drawing.theory(axes[1], reach, [START_BETA] * 2, "constructed: selection from βh² = 3")
    drawing.theory(axes[2], reach, [1, 1], "constructed, hard: one-hot")
    drawing.theory(axes[3], reach, [float(any_row["distance_random"])] * 2, "random points", drawing.GREY, ":")
    drawing.theory(axes[3], reach, [0, 0], "constructed: 0")
    return picture


EXPERIMENT = Experiment(
    cells,
    measure,
    judge,
    draw,
    number=10,
    name="learnability",
    title="Learnability of the partition",
    question="Does a single-head layer trained by SGD or Adam find a partition, raise its norms, come close to the "
    "constructed keys?",
    prediction="The theorem shows that weights exist (keys β(2L, −|L|²), βh² ≥ 3, values f(L)), not that they are "
    "found; section 6 of the paper expects norms to grow as partitions sharpen.",
    source="2504.19901: first experiments 2 (temperature sweep), next checks 1 (learnability), confidence: "
    "learnability not established",
)
