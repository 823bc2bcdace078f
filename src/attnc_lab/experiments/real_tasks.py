"""Experiment 21: one layer of single-head attention on small real tasks, with and without a feed-forward block."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Effort, Interval, Row, Status, Table, Verdict, Verdicts, listed, sweep

if TYPE_CHECKING:
    import torch
    from torch import nn

TASKS = ("digits", "diabetes", "sort", "parity", "copy")
MODELS = ("attention only", "with feed-forward", "affine")
STEPS, SEEDS = {"quick": 1500, "full": 3000}, 5
PARAMETERS = {"digits": 6000, "diabetes": 1200, "sort": 1200, "parity": 2400, "copy": 2400}
"""The number of free numbers of both attention models, at most."""
SORTED, BITS = 4, 8
"""The number of numbers that are sorted, and of bits."""
NEAR = 1.25
"""A model without feed-forward suffices if its error is at most this multiple of the error with it, and of that of an
affine map."""
CHANCE = {"digits": 0.9, "parity": 0.5, "diabetes": 1.0, "sort": 1.0, "copy": 1.0}
"""The error of a guess without the input."""
NEGLIGIBLE = 1e-3
"""An error below this counts as none."""
COLOURS = dict(zip(MODELS, (drawing.BLUE, drawing.ORANGE, drawing.GREY), strict=True))


def cells(profile: str) -> list[Cell]:
    trained = sweep(kind="trained", task=TASKS, model=MODELS, steps=STEPS[profile])
    return [*trained, *sweep(kind="constructed", task=("sort", "parity"), eps=(1e-1, 1e-3, 1e-6))]


@dataclass(frozen=True)
class Task:
    """Examples (n, tokens, width), their labels or outputs, and a test set. `classes` is 0 for a regression."""

    inputs: np.ndarray
    outputs: np.ndarray
    tests: np.ndarray
    answers: np.ndarray
    classes: int

    @property
    def d_out(self) -> int:
        return self.classes or self.outputs.shape[1]


def task_of(name: str, seed: int) -> Task:
    """Return a task. Real data are split by the seed, and other data are drawn."""
    rng = np.random.default_rng([seed, TASKS.index(name)])
    if name in ("digits", "diabetes"):
        from sklearn import datasets

        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        order = rng.permutation(len(X))
        X, y = X[order].astype(float), y[order]
        X = X.reshape(-1, 8, 8) / 16 if name == "digits" else (X / X.std(axis=0))[:, :, None]
        num_tests = len(X) // 4
        if name == "diabetes":
            y = ((y - y.mean()) / y.std())[:, None]
        return Task(X[num_tests:], y[num_tests:], X[:num_tests], y[:num_tests], 10 if name == "digits" else 0)
    if name == "parity":
        X = np.array(list(itertools.product((0.0, 1.0), repeat=BITS)))[rng.permutation(2**BITS)][:, :, None]
        y = X.sum(axis=(1, 2)).astype(int) % 2
        return Task(X, y, X, y, 2)  # all inputs there are: the question is whether it can be represented and found
    X = rng.uniform(-1, 1, (6000, SORTED if name == "sort" else 2 * SORTED, 1))
    y = np.sort(X[:, :, 0], axis=1) if name == "sort" else X[:, :, 0].copy()
    return Task(X[:5000], y[:5000], X[5000:], y[5000:], 0)


def model_of(model: str, task: Task, size: int) -> nn.Module:
    """Return the largest model of at most `size` free numbers."""
    from torch import nn

    from attnc_lab.models import OneLayer

    n, width = task.inputs.shape[1:]
    if model == "affine":
        return nn.Sequential(nn.Flatten(), nn.Linear(n * width, task.d_out))
    return OneLayer.largest(n, width, task.d_out, size, has_block=model != "attention only")


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "constructed":
        return [_constructed(cell["task"], cell["eps"], seed)]
    import torch

    from attnc_lab.fitting import Budget, fit, mean_square

    task = task_of(cell["task"], seed)
    num_held = len(task.inputs) // 5 if cell["task"] != "parity" else 0
    inputs = torch.tensor(task.inputs)
    outputs = torch.tensor(task.outputs)
    held = (inputs[:num_held], outputs[:num_held]) if num_held else (inputs, outputs)

    def batch(shape: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(num_held, len(inputs), shape, generator=generator)
        return inputs[chosen], outputs[chosen]

    loss: Callable[[Any, Any], Any] = torch.nn.functional.cross_entropy if task.classes else mean_square
    budget = Budget(cell["steps"], SEEDS, rates=(1e-3, 5e-3, 2e-2), points=64)
    made = fit(
        lambda: model_of(cell["model"], task, PARAMETERS[cell["task"]]), batch, held, budget, seed=seed, loss=loss
    )
    rows = []
    for trial, model in enumerate(made.models):
        with torch.no_grad():
            found = model(torch.tensor(task.tests)).numpy()
        if task.classes:
            error = float((found.argmax(axis=1) != task.answers).mean())
        else:
            error = float(((found - task.answers) ** 2).sum() / ((task.answers - task.answers.mean(axis=0)) ** 2).sum())
        rows.append(made.row(trial) | {"error": error})
    return rows


def _constructed(task: str, eps: float, seed: int) -> Row:
    """Compile the task as an expression: attention and affine maps only."""
    rng = np.random.default_rng([seed, 8])
    if task == "parity":
        names = [f"b{i}" for i in range(BITS)]
        text, box = f"(1-cos(pi*({'+'.join(names)})))/2", dict.fromkeys(names, (0, 1))
        points = np.array(list(itertools.product((0.0, 1.0), repeat=BITS)))
        wanted = points.sum(axis=1)[:, None] % 2
    else:
        text, box = ", ".join(sorting_network()), dict.fromkeys("abcd", (-1, 1))
        points = rng.uniform(-1, 1, (4000, SORTED))
        wanted = np.sort(points, axis=1)
    net = attnc.compile(text, box, eps, construction="compose")
    found = net(points).reshape(wanted.shape)
    sizes = {"heads": net.program.num_heads, "layers": net.program.num_attention_layers, "anchors": net.num_anchors}
    bound = net.certificate.bound
    return {"max_error": np.abs(found - wanted).max(), **sizes} | ({} if bound is None else {"bound": bound})


def sorting_network() -> list[str]:
    """Return the numbers a, b, c, d in order, as expressions: five comparisons."""
    wires = list("abcd")
    for i, j in ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)):
        wires[i], wires[j] = f"min({wires[i]},{wires[j]})", f"max({wires[i]},{wires[j]})"
    return wires


def _text(error: Interval) -> str:
    return "none" if error.high < 1e-8 else f"{error:.2g}"


def shares(table: Table, task: str, model: str) -> Interval:
    return Interval.of(np.maximum(table.where(kind="trained", task=task, model=model).column("error"), 1e-9))


def judge(table: Table) -> Verdicts:
    trained = table.where(kind="trained")
    for task in TASKS:
        alone, block, affine = (shares(table, task, model) for model in MODELS)
        what = "share of wrong answers" if task in ("digits", "parity") else "share of the variance left unexplained"
        rows = trained.where(task=task, model="attention only")
        is_enough = (
            alone.mean <= max(NEAR * min(block.mean, affine.mean), NEGLIGIBLE) and alone.mean < 0.9 * CHANCE[task]
        )
        remark = " An affine map is as good, so this task needs no attention." if affine.mean <= alone.mean else ""
        yield Verdict(
            f"One layer of single-head attention without feed-forward suffices: {task}.",
            Status.HOLDS.when(is_enough, Status.NOT_REACHED),
            f"{what} on tests, geometric mean of {SEEDS} seeds and 95 % interval: {_text(alone)} with attention only "
            f"({rows[0]['weights']} parameters), {_text(block)} with a feed-forward block "
            f"({trained.where(task=task, model=MODELS[1])[0]['weights']}), {_text(affine)} for an affine map. "
            f"Sufficient is at most {NEAR:g} times the better of the two, or {NEGLIGIBLE:g}.{remark}",
            {"attention_only": alone.mean, "with_feed_forward": block.mean, "affine": affine.mean},
            effort=Effort(int(rows[0]["steps"]), SEEDS, rows.column("error").min(), what),
        )
    built = table.where(kind="constructed")
    finest = {task: built.where(task=task)[-1] for task in ("sort", "parity")}
    sizes = {task: f"{row['heads']} heads in {row['layers']} layers" for task, row in finest.items()}
    yield Verdict(
        "Constructed, attention and affine maps suffice for sorting and parity.",
        Status.HOLDS.when(built.is_within("max_error", "eps") and len(built.having("bound")) == len(built)),
        f"to a proven {finest['sort']['bound']:.1e} (sorting {SORTED} numbers) and {finest['parity']['bound']:.1e} "
        f"(parity of {BITS} bits): {listed('{0}: {1}', sizes)}. Parity is the cosine of the sum of the bits, and "
        "a sorting network is five comparisons, each a gate.",
        {f"{task}_error": row["max_error"] for task, row in finest.items()},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    (panel,) = drawing.panels(picture, 1, width=8.4, height=4.6)
    panel.label("one layer, one head, equal parameters, 5 seeds", "", "error on tests (share); lowest: ≤ 10⁻⁶", log="y")
    for shift, (model, colour) in enumerate(COLOURS.items()):
        for i, task in enumerate(TASKS):
            errors = np.maximum(table.where(kind="trained", task=task, model=model).column("error"), 1e-6)
            places = i + 0.22 * (shift - 1) + 0.02 * (np.arange(len(errors)) - 2)
            panel.measured(places, errors, model if i == 0 else "_", colour, "os^"[shift])
    for i, task in enumerate(TASKS):
        name = "a guess without the input" if i == 0 else "_"
        panel.axes.hlines(CHANCE[task], i - 0.4, i + 0.4, color=drawing.INK, lw=1.2, ls="--", label=name)
    for task in ("sort", "parity"):
        row = table.where(kind="constructed", task=task)[-1]
        i, name = TASKS.index(task), "constructed, largest error"
        panel.measured([i + 0.4], [max(row["max_error"], 1e-6)], name if task == "sort" else "_", drawing.GREEN, "D")
    panel.axes.set_xticks(range(len(TASKS)), labels=["digits\nwrong", "diabetes\nvariance", "sort 4\nvariance",
                                                     "parity of 8\nwrong", "copy 8\nvariance"])  # fmt: skip
    panel.axes.set_ylim(5e-7, 3)


ABOUT = About(
    21,
    "Small real sequence tasks, without feed-forward",
    "Is one layer of single-head attention with affine maps, without feed-forward or positional encodings, sufficient "
    "on small real tasks? Trained, and constructed.",
    "The theorems state that such weights exist for every continuous function. They are not about training or the "
    "number of parameters.",
    "2504.19901: confidence and limitations (sufficiency for real sequence tasks)",
)
