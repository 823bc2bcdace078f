"""Experiment 20: error and number of parameters against the dimension, for constructed and for trained models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import (
    About,
    Cell,
    Constant,
    Effort,
    Interval,
    Row,
    Status,
    Table,
    Verdict,
    Verdicts,
    listed,
    sweep,
)
from attnc_lab.measuring import errors_at, sizes_of

if TYPE_CHECKING:
    from torch import nn

SIDE, EPS = 2.0, 0.1
"""The functions are on [−2, 2]^d, and the requested error of constructed networks."""
DIMENSIONS = tuple(range(2, 11))
TRAINED = {"quick": (2, 4, 6, 8, 10), "full": DIMENSIONS}
BUILT = {"quick": 3, "full": 4}
"""The largest dimension in which a grid for EPS is built. The size of larger grids is predicted from these."""
STEPS, SEEDS = {"quick": 800, "full": 2500}, 5
PARAMETERS = 2000
"""The number of parameters of all trained models, and of a grid head beside them, at most."""
BUDGET = 1e6
"""The number of parameters that a growing model must not exceed."""
TESTS = 4000
MODELS = ("single head", "two layers", "MLP")
COLOURS = dict(zip(MODELS, (drawing.ORANGE, drawing.PURPLE, drawing.SKY), strict=True))


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="trained", model=MODELS, d=TRAINED[profile], steps=STEPS[profile]),
        *sweep(kind="grid", d=range(2, BUILT[profile] + 1)),
        *sweep(kind="composed", d=DIMENSIONS),
        *sweep(kind="equal grid", d=DIMENSIONS),
    ]


def text_of(d: int) -> str:
    """Return the mean of sin(x_i)·cos(x_{i+1}): every variable matters, two at a time."""
    return "(" + "+".join(f"sin(x{i})*cos(x{i + 1})" for i in range(d - 1)) + f")/{d - 1}"


def values(x: np.ndarray) -> np.ndarray:
    return np.asarray((np.sin(x[..., :-1]) * np.cos(x[..., 1:])).mean(axis=-1))


def target_of(d: int) -> attnc.Target:
    return attnc.as_target(text_of(d), {f"x{i}": (-SIDE, SIDE) for i in range(d)})


def tests_of(d: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, d]).uniform(-SIDE, SIDE, (TESTS, d))


def measure(cell: Cell, seed: int) -> list[Row]:
    d = cell["d"]
    points = tests_of(d, seed)
    if cell["kind"] == "trained":
        return _trained(cell["model"], d, cell["steps"], points, seed)
    target = target_of(d)
    if cell["kind"] == "composed":
        built = attnc.constructions.compose(target, eps=EPS)
    elif cell["kind"] == "grid":
        built = attnc.constructions.max_affine(target, eps=EPS)
    else:  # the largest grid with at most PARAMETERS numbers: each centre has d + 2 of them
        per_axis = int((PARAMETERS / (d + 2)) ** (1 / d) + 1e-9)
        if per_axis == 1:  # one centre: the best constant
            return [{"per_axis": 1, "parameters": d + 2, "unexplained": 1.0}]
        built = attnc.constructions.max_affine(target, points_per_axis=per_axis)
        return [{"per_axis": per_axis, **_errors(built, target, points)}]
    return [_errors(built, target, points)]


def _errors(built: attnc.constructions.Built, target: attnc.Target, points: np.ndarray) -> Row:
    errors = errors_at(points, built.program, target)
    return {"max_error": errors.max(), "unexplained": (errors**2).mean() / target(points).var(), **sizes_of(built)}


def model_of(model: str, d: int) -> nn.Module:
    """Return a model of at most PARAMETERS free numbers: attention over free tokens once or twice, or an MLP."""
    from torch import nn

    from attnc_lab.models import HeadLayers

    if model == "MLP":
        width = (PARAMETERS - 1) // (d + 2)
        return nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, 1))
    return HeadLayers(d, 1 if model == "single head" else 2, PARAMETERS)


def _trained(model: str, d: int, steps: int, points: np.ndarray, seed: int) -> list[Row]:
    import torch

    from attnc_lab.fitting import Budget, fit

    scale = float(values(points).std())  # every target has variance 1 in training

    def batch_of(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = SIDE * (2 * torch.rand((*shape, d), generator=generator, dtype=torch.float64) - 1)
        y = (torch.sin(x[..., :-1]) * torch.cos(x[..., 1:])).mean(-1, keepdim=True) / scale
        return x, y

    held_out = batch_of((1000,), torch.Generator().manual_seed(seed + 99))
    budget = Budget(steps, SEEDS, rates=(3e-3, 2e-2), points=256)
    fitted = fit(lambda: model_of(model, d), batch_of, held_out, budget, seed=seed)
    wanted, rows = values(points), []
    for trial, found in enumerate(fitted.models):
        with torch.no_grad():
            errors = scale * found(torch.tensor(points))[:, 0].numpy() - wanted
        row = {"max_error": np.abs(errors).max(), "unexplained": (errors**2).mean() / wanted.var()}
        rows.append(fitted.row(trial) | row | {"parameters": fitted.num_parameters})
    return rows


def grid_law(table: Table) -> tuple[float, float]:
    """Return (constant, factor) such that a grid takes about constant·factor^d parameters."""
    grid = table.where(kind="grid")
    slope, start = np.polyfit(grid.column("d"), np.log(grid.column("parameters")), 1)
    return float(np.exp(start)), float(np.exp(slope))


def judge(table: Table) -> Verdicts:
    grid, composed = table.where(kind="grid"), table.where(kind="composed")
    constant, factor = grid_law(table)
    leaves = math.log(BUDGET / constant) / math.log(factor)
    slope, start = np.polyfit(composed.column("d"), composed.column("parameters"), 1)
    linear = (BUDGET - start) / slope
    worst = max(grid.column("max_error").max(), composed.column("max_error").max())
    off = np.abs(composed.column("parameters") / (start + slope * composed.column("d")) - 1).max()
    yield Verdict(
        "The size of a grid head is exponential in the dimension, that of a composed network linear.",
        Status.CONSTANT.when(factor > 5 and off < 0.25 and worst <= EPS),
        f"to ε = {EPS:g} on [−2, 2]^d a grid head built for d = 2 … {grid[-1]['d']} takes {factor:.0f} times more "
        f"parameters per dimension, and leaves 10⁶ parameters at d = {math.ceil(leaves)}. The composed network takes "
        f"{slope:.0f} more per dimension, and leaves 10⁶ at d = {linear:,.0f} by this law. Largest error {worst:.2g}.",
        {"factor": factor, "grid_leaves": leaves, "slope": slope, "composed_leaves": linear},
        Constant(1 + off, "parameters of a composed network over the linear law, or its inverse"),
    )
    trained = table.where(kind="trained")
    dimensions = trained.distinct("d")
    first, last = dimensions[0], dimensions[-1]
    shares = {model: {d: Interval.of(trained.where(model=model, d=d).column("unexplained")) for d in dimensions}
              for model in MODELS}  # fmt: skip
    best = trained.where(model="single head", d=last).column("unexplained").min()
    shown = {
        model: f"{found[first]:.2g} at d = {first}, {found[last]:.2g} at d = {last}" for model, found in shares.items()
    }
    effort = Effort(int(trained[0]["steps"]), SEEDS, best, f"share of the variance left unexplained at d = {last}:")
    single, mlp = (shares[model][last].mean for model in ("single head", "MLP"))
    yield Verdict(
        "Trained, a single head of attention keeps up with an MLP of equal size as the dimension grows.",
        Status.HOLDS.when(single <= mlp, Status.NOT_REACHED),
        f"share of the variance left unexplained with {PARAMETERS:,} parameters, geometric mean of {SEEDS} seeds and "
        f"95 % interval: {listed('{0}: {1}', shown)}.",
        {f"{model.replace(' ', '_')}_{d}": shares[model][d].mean for model in MODELS for d in (first, last)},
        effort=effort,
    )
    equal = {row["d"]: row["unexplained"] for row in table.where(kind="equal grid")}
    better = [d for d in dimensions if shares["single head"][d].high < equal[d]]
    yield Verdict(
        "Trained heads avoid the exponential law of the grid: with equal parameters they are better than a grid head.",
        Status.HOLDS.when(len(better) == len(dimensions), Status.NOT_REACHED),
        f"a constructed grid head with at most {PARAMETERS:,} parameters leaves {equal[first]:.2g} of the variance at "
        f"d = {first}, and {equal[last]:.2g} at d = {last}, where it has one centre. A trained single head leaves less "
        f"at d = {', '.join(map(str, better)) or 'no dimension'}.",
        {"grid_first": equal[first], "grid_last": equal[last]},
        effort=effort,
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2, width=5.6, height=4.4)
    left.label(f"parameters for an error of {EPS:g}", "dimension d", "stored numbers", log="y")
    constant, factor = grid_law(table)
    d = np.array(DIMENSIONS, float)
    left.theory(d, constant * factor**d, f"grid head, ×{factor:.0f} per dimension", drawing.GREY)
    left.points(table.where(kind="grid"), "d", "parameters", "grid head, built", drawing.INK, "s")
    composed = table.where(kind="composed")
    slope, start = np.polyfit(composed.column("d"), composed.column("parameters"), 1)
    left.theory(d, start + slope * d, f"composed, +{slope:.0f} per dimension", drawing.BLUE)
    left.points(composed, "d", "parameters", "composed, built", drawing.BLUE)
    left.axes.axhline(BUDGET, color=drawing.ORANGE, lw=1.2, ls=":", label="10⁶ parameters")
    right.label(f"error with {PARAMETERS:,} parameters", "dimension d", "variance left unexplained", log="y")
    right.points(table.where(kind="equal grid"), "d", "unexplained", "grid head, constructed", drawing.INK, "s")
    right.points(composed, "d", "unexplained", "composed (fewer parameters)", drawing.BLUE)
    for (model, colour), marker in zip(COLOURS.items(), "^Dv", strict=True):
        rows = table.where(kind="trained", model=model)
        found = [(d, Interval.of(rows.where(d=d).column("unexplained"))) for d in rows.distinct("d")]
        places, shares = [d for d, _ in found], [share for _, share in found]
        right.axes.fill_between(
            places, [s.low for s in shares], [s.high for s in shares], color=colour, alpha=0.2, lw=0
        )
        right.axes.plot(places, [s.mean for s in shares], marker=marker, color=colour, ms=5, label=f"trained {model}")
    for panel in (left, right):
        panel.axes.set_xticks(DIMENSIONS)


ABOUT = About(
    20,
    "Dimensions 2 to 10, constructed and trained",
    "How do the error and the number of parameters grow with the dimension, for a grid head, a composed network, and "
    "trained models of equal size?",
    "A grid takes (Λ₁·w/2ε)^d centres of d + 2 numbers. A composed network takes two heads of a few keys for each of "
    "the d − 1 terms.",
    "2504.19901: next check 2 (dimensions 2 to 10), design trade-off P^{dn}; 2504.15956: next check 3",
)
