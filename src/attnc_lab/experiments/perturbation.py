"""Experiment 12: how fast the error grows when the constructed weights are perturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Status, Table, Verdict, errors_at, sweep

SIZES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TRIALS = 8
"""Random perturbations of each size, whose mean is shown."""
STEP = 1e-6
"""The relative step of the central differences: near the cube root of the unit roundoff, where their error is least."""
COLOURS = {"hard clip": drawing.INK, "soft clip": drawing.BLUE, "partition": drawing.ORANGE, "solved": drawing.GREEN}


def subjects() -> dict[str, tuple[attnc.Target, Callable[[attnc.Target], attnc.constructions.Built]]]:
    """Three constructions of the papers, and one with solved values."""
    clip = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))
    wave = attnc.as_target("sin(x)+cos(y)", [(-3, 3)] * 2)
    line = attnc.as_target("sin(x)", [(-3, 3)])
    built = attnc.constructions
    return {
        "hard clip": (clip, lambda t: built.truncated_linear(t, num_anchors=33, beta=60.0)),
        "soft clip": (clip, lambda t: built.truncated_linear(t, num_anchors=33)),
        "partition": (wave, lambda t: built.max_affine(t, points_per_axis=9)),
        "solved": (line, lambda t: built.spectral_grid(t, num_anchors=15)),
    }


def cells(profile: str) -> list[Cell]:
    return sweep(subject=COLOURS)


def measure(cell: Cell, seed: int) -> list[Row]:
    target, build = subjects()[cell["subject"]]
    program = build(target).program
    rng = np.random.default_rng(seed)
    points = rng.uniform(target.box.lo, target.box.hi, (150, target.box.d))
    exact, numbers = program(points), weights_of(program)
    slopes = np.array([_slope(program, numbers, j, points) for j in range(len(numbers))])  # (numbers, points)
    error = errors_at(points, program, target).max()
    worst = int(np.abs(slopes).sum(axis=0).argmax())

    def moved_by(relative: np.ndarray) -> float:
        return float(np.abs(with_weights(program, numbers * (1 + relative))(points) - exact).max())

    slope = {
        "random_slope": np.linalg.norm(slopes, axis=0).max(),
        "adversarial_slope": np.abs(slopes).sum(axis=0).max(),
    }
    facts = {**slope, "numbers": len(numbers), "error": error, "spread": np.ptp(exact)}
    rows: list[Row] = []
    for size in SIZES:
        changes = [moved_by(size * rng.normal(size=len(numbers))) for _ in range(TRIALS)]
        against = [moved_by(sign * size * np.sign(slopes[:, worst])) for sign in (-1, 1)]
        rows.append({"size": size, "random": np.mean(changes), "adversarial": max(against), **facts})
    return rows


def _slope(program: attnc.Program, numbers: np.ndarray, j: int, points: np.ndarray) -> np.ndarray:
    """∂out/∂log|w_j| at the points."""
    found = []
    for sign in (1, -1):
        moved = numbers.copy()
        moved[j] *= 1 + sign * STEP
        found.append(with_weights(program, moved)(points))
    return (found[0] - found[1]) / (2 * STEP)


def weights_of(program: attnc.Program) -> np.ndarray:
    """Return every stored number that is not 0."""
    found: list[np.ndarray] = []

    def collected(array: np.ndarray) -> np.ndarray:
        found.append(array[array != 0])
        return array

    mapped(program, collected)
    return np.concatenate(found)


def with_weights(program: attnc.Program, numbers: np.ndarray) -> attnc.Program:
    """Return the same program with these in place of its stored numbers, in the order of `weights_of`."""
    used = 0

    def changed(array: np.ndarray) -> np.ndarray:
        nonlocal used
        made, end = array.astype(np.float64), used + int(np.count_nonzero(array))
        made[array != 0] = numbers[used:end]
        used = end
        return made

    return mapped(program, changed)


def mapped(program: attnc.Program, change: Callable[[np.ndarray], np.ndarray]) -> attnc.Program:
    """Return the program with every stored array replaced by `change` of it."""

    def of_head(head: Any) -> Any:
        return replace(head, **{name: change(getattr(head, name)) for name in ("W_Q", "W_K", "W_V", "W_O")})

    def of_layer(layer: Any) -> Any:
        if isinstance(layer, attnc.Affine):
            parts = {name: getattr(layer, name) for name in ("weight", "constant")}
            return replace(layer, **{name: replace(part, values=change(part.values)) for name, part in parts.items()})
        if isinstance(layer, attnc.Attention):
            return replace(layer, heads=tuple(map(of_head, layer.heads)))
        return layer

    return replace(program, layers=tuple(map(of_layer, program.layers)))


def judge(table: Table) -> list[Verdict]:
    small = Table(row for row in table if row["size"] <= 1e-6)
    ratio = small.column("adversarial") / (small.column("size") * small.column("adversarial_slope"))
    chance = small.column("random") / (small.column("size") * small.column("random_slope"))
    slopes = {name: float(table.where(subject=name)[0]["adversarial_slope"]) for name in COLOURS}
    allowed = {name: row["error"] / slopes[name] for name in COLOURS if (row := table.where(subject=name)[0])}
    return [
        Verdict(
            "Small perturbations of the constructed weights change the output by the first-order prediction.",
            Status.CONSTANT.when(ratio.min() > 0.8 and ratio.max() < 1.25 and chance.max() < 2),
            f"relative changes of 10⁻⁸ … 10⁻⁶: adversarial ones give {ratio.min():.2f} to {ratio.max():.2f} times "
            f"Σ|∂out/∂log w|, random ones {chance.min():.2f} to {chance.max():.2f} times its root sum of squares.",
            {"least_ratio": ratio.min(), "largest_ratio": ratio.max(), "largest_random": chance.max()},
        ),
        Verdict(
            "Hard selection is sensitive: the harder, the more.",
            Status.CONSTANT.when(slopes["hard clip"] > 3 * slopes["soft clip"]),
            "amplification of an adversarial relative change: "
            + ", ".join(f"{name} {value:.3g}" for name, value in slopes.items())
            + ". It comes from the scores, whose size is β·r²: a hard head moves its boundaries, and between two "
            "anchors the slope of its output is β times a soft one's.",
            {name.replace(" ", "_"): value for name, value in slopes.items()},
        ),
        Verdict(
            "Imperfect weights as training makes them (relative 10⁻² … 10⁻¹) destroy the construction.",
            Status.HOLDS.when(all(row["adversarial"] > row["error"] for row in table.where(size=1e-1))),
            "relative changes beyond "
            + ", ".join(f"{value:.1e} ({name})" for name, value in allowed.items())
            + " add more than the construction's own error if they are adversarial; solved values, whose error is "
            "tiny, tolerate least before it shows.",
            {f"allowed_{name.replace(' ', '_')}": value for name, value in allowed.items()},
        ),
    ]


def draw(table: Table) -> drawing.Figure:
    picture, (left, right) = drawing.panels(2, width=5.3, height=4.2)
    size = np.array(SIZES)
    for panel, column, name in ((left, "adversarial", "adversarial"), (right, "random", "random")):
        title = f"{name} perturbation of every stored number"
        panel.label(title, "relative size", "largest change of the output", log="xy")
        for (subject, colour), marker in zip(COLOURS.items(), drawing.MARKERS, strict=False):
            rows = table.where(subject=subject)
            first_order = size * rows[0][f"{column}_slope"]
            panel.theory(size, first_order, "first order" if subject == "hard clip" else "", colour)
            panel.points(rows, "size", column, f"measured, {subject}", colour, marker)
        panel.axes.set_ylim(1e-9, 1e3)
    return picture


ABOUT = About(
    12,
    "Perturbation of the constructed weights",
    "How does the error grow when the constructed weights are perturbed, at random or by an adversary?",
    "To first order a relative change ε of every stored number w_j moves the output by ε·Σ_j|∂out/∂log "
    "w_j| at worst, and by ε times the root of the sum of squares at random; ∂out/∂s_k = w_k(v_k − out), so it "
    "scales with the scores' size βr².",
    "2504.19901: next checks 3 (robustness to approximation), critical path (W_K and W_Q must reflect the grid)",
)
