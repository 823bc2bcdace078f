"""Experiment 12: how fast the error grows when the constructed weights are perturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.measuring import errors_at

SIZES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TRIALS = 8
"""Number of random perturbations of each size. Their mean is shown."""
STEP = 1e-6
"""The relative step of the central differences. It is near the cube root of the unit roundoff, where their error is
smallest."""
COLOURS = {"hard clip": drawing.INK, "soft clip": drawing.BLUE, "partition": drawing.ORANGE, "solved": drawing.GREEN}


def subjects() -> dict[str, tuple[attnc.Target, Callable[[attnc.Target], attnc.constructions.Built]]]:
    """Return three constructions of the papers, and one with solved values."""
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


def measure(cell: Cell, seed: int) -> Iterator[Row]:
    target, build = subjects()[cell["subject"]]
    program = build(target).program
    rng = np.random.default_rng(seed)
    points = rng.uniform(target.box.lo, target.box.hi, (150, target.box.d))
    exact, count = program(points), program.num_parameters
    slopes = np.array([_slope(program, step, points) for step in STEP * np.eye(count)])  # (numbers, points)
    worst = int(np.abs(slopes).sum(axis=0).argmax())

    def moved_by(relative: np.ndarray) -> float:
        return float(np.abs(perturbed(program, relative)(points) - exact).max())

    facts = {
        "random_slope": np.linalg.norm(slopes, axis=0).max(),
        "adversarial_slope": np.abs(slopes).sum(axis=0).max(),
        "numbers": count,
        "error": errors_at(points, program, target).max(),
        "spread": np.ptp(exact),
    }
    for size in SIZES:
        changes = [moved_by(size * rng.normal(size=count)) for _ in range(TRIALS)]
        against = [moved_by(sign * size * np.sign(slopes[:, worst])) for sign in (-1, 1)]
        yield {"size": size, "random": np.mean(changes), "adversarial": max(against), **facts}


def _slope(program: attnc.Program, step: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return ∂out/∂log|w_j| at the points, by a relative step of the number w_j alone."""
    return (perturbed(program, step)(points) - perturbed(program, -step)(points)) / (2 * STEP)


def perturbed(program: attnc.Program, relative: np.ndarray) -> attnc.Program:
    """Return the program with every stored number that is not 0 changed by its relative amount."""
    used = 0

    def changed(array: np.ndarray) -> np.ndarray:
        nonlocal used
        made, start = array.astype(np.float64), used
        used += int(np.count_nonzero(array))
        made[array != 0] *= 1 + relative[start:used]
        return made

    return mapped(program, changed)


def mapped(program: attnc.Program, change: Callable[[np.ndarray], np.ndarray]) -> attnc.Program:
    """Return the program with every stored array replaced by `change` of it."""

    def of_head(head: Any) -> Any:
        return replace(head, **{name: change(matrix) for name, matrix in head.matrices.items()})

    def of_layer(layer: Any) -> Any:
        if isinstance(layer, attnc.Affine):
            parts = {name: getattr(layer, name) for name in ("weight", "constant")}
            return replace(layer, **{name: replace(part, values=change(part.values)) for name, part in parts.items()})
        if isinstance(layer, attnc.Attention):
            return replace(layer, heads=tuple(map(of_head, layer.heads)))
        return layer

    return replace(program, layers=tuple(map(of_layer, program.layers)))


def judge(table: Table) -> Verdicts:
    small = Table(row for row in table if row["size"] <= 1e-6)
    ratio, chance = (
        Span.of(small.column(how) / (small.column("size") * small.column(f"{how}_slope")))
        for how in ("adversarial", "random")
    )
    yield Verdict(
        "Small perturbations of the constructed weights change the output by the first-order prediction.",
        Status.HOLDS.when(ratio.least > 0.8 and ratio.largest < 1.25 and chance.largest < 2),
        f"relative changes of 10⁻⁸ … 10⁻⁶: adversarial ones give {ratio:.2f} times Σ|∂out/∂log w|, random ones "
        f"{chance:.2f} times its root sum of squares.",
        {**ratio.numbers("ratio"), "largest_random": chance.largest},
    )
    first = {name: table.where(subject=name)[0] for name in COLOURS}
    slopes = {name: row["adversarial_slope"] for name, row in first.items()}
    yield Verdict(
        "Hard selection is sensitive: the harder, the more.",
        Status.HOLDS.when(slopes["hard clip"] > 3 * slopes["soft clip"]),
        f"amplification of an adversarial relative change: {listed('{0} {1:.3g}', slopes)}. It comes from the scores, "
        "whose size is β·r²: a hard head moves its boundaries, and between two anchors the slope of its output is β "
        "times a soft one's.",
        {name.replace(" ", "_"): value for name, value in slopes.items()},
    )
    allowed = {name: row["error"] / row["adversarial_slope"] for name, row in first.items()}
    yield Verdict(
        "Imperfect weights as training makes them (relative 10⁻² … 10⁻¹) destroy the construction.",
        Status.HOLDS.when(all(row["adversarial"] > row["error"] for row in table.where(size=1e-1))),
        f"relative changes beyond {listed('{1:.1e} ({0})', allowed)} add more than the construction's own error if "
        "they are adversarial; solved values, whose error is tiny, tolerate least before it shows.",
        {f"allowed_{name.replace(' ', '_')}": value for name, value in allowed.items()},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2, width=5.3, height=4.2)
    size = np.array(SIZES)
    for panel, column in ((left, "adversarial"), (right, "random")):
        title = f"{column} perturbation of every stored number"
        panel.label(title, "relative size", "largest change of the output", log="xy")
        for (subject, colour), marker in zip(COLOURS.items(), drawing.MARKERS, strict=False):
            rows = table.where(subject=subject)
            first_order = size * rows[0][f"{column}_slope"]
            panel.theory(size, first_order, "first order" if subject == "hard clip" else "", colour)
            panel.points(rows, "size", column, f"measured, {subject}", colour, marker)
        panel.axes.set_ylim(1e-9, 1e3)


ABOUT = About(
    12,
    "Perturbation of the constructed weights",
    "How does the error grow when the constructed weights are perturbed, at random or by an adversary?",
    "To first order a relative change ε of every stored number w_j moves the output by ε·Σ_j|∂out/∂log "
    "w_j| at worst, and by ε times the root of the sum of squares at random; ∂out/∂s_k = w_k(v_k − out), so it "
    "scales with the scores' size βr².",
    "2504.19901: next checks 3 (robustness to approximation), critical path (W_K and W_Q must reflect the grid)",
)
