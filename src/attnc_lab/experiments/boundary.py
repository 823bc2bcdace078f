"""Experiment 6: errors at the ends of the range, at the seams between heads, and at steep places and jumps."""

from __future__ import annotations

import math

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import Cell, Experiment, Row, Status, Table, Verdict

HEADS, PER_HEAD = 4, 8
ANCHORS = HEADS * PER_HEAD
RADIUS = (ANCHORS - 1) / 2
SEAMS = tuple((h * PER_HEAD - 0.5) / (ANCHORS - 1) for h in range(1, HEADS))
BETAS = (0.5, 0.75, 1.0, 1.5, 2.0, 2.75, 4.0, 6.0, 8.0, 12.0)
SHOWN = (1.0, 2.75, 8.0)
"""The β of the error profiles that are drawn."""
CELLS = 32
H = 2 / CELLS
PLACES = {"inside": 0.5 * H, "near the end": 1 - 1.5 * H, "at the end": 1 - 0.5 * H}
"""Where a steep place or a jump is: x in [−1, 1], each time in the middle of a cell, where it costs most."""
STEEPNESS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
FINENESS = (8, 16, 32, 64, 128, 256)


def cells(profile: str) -> list[Cell]:
    profiles: list[Cell] = [{"kind": "profile", "beta": beta, "sentinels": 1} for beta in SHOWN]
    seams: list[Cell] = [{"kind": "seam", "beta": beta, "sentinels": s} for s in (1, 2, 3) for beta in BETAS]
    steep: list[Cell] = [{"kind": "steep", "place": place, "k": k} for place in PLACES for k in STEEPNESS]
    jumps: list[Cell] = [{"kind": "jump", "place": place, "P": P} for place in PLACES for P in FINENESS]
    return [*profiles, *seams, *steep, *jumps]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] in ("profile", "seam"):
        return _heads(cell)
    return [
        _steep(str(cell["place"]), float(cell["k"]))
        if cell["kind"] == "steep"
        else _jump(str(cell["place"]), int(cell["P"]))
    ]


def _heads(cell: Cell) -> list[Row]:
    """Errors in spacings of heads that clip to [0, 1], all along, or the largest by place."""
    s = int(cell["sentinels"])
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(-0.2, 1.2))
    built = attnc.constructions.truncated_linear_heads(
        target, num_heads=HEADS, num_tokens=PER_HEAD + 2 * s, sentinels=s, beta=float(cell["beta"])
    )
    x = np.linspace(-0.1, 1.1, 801 if cell["kind"] == "profile" else 12_001)
    errors = np.abs(built.program(x[:, None]) - np.clip(x, 0, 1)) * (ANCHORS - 1)
    if cell["kind"] == "profile":
        return [{"x": float(at), "error": float(error)} for at, error in zip(x, errors, strict=True)]
    reach = 2 / (ANCHORS - 1)
    at_seam = np.abs(x[:, None] - np.array(SEAMS)).min(axis=1) < reach
    at_end = np.minimum(np.abs(x), np.abs(x - 1)) < reach
    one = attnc.constructions.truncated_linear(target, num_anchors=ANCHORS, beta=float(cell["beta"]))
    alone = one.program(x[:, None])
    single = np.abs(alone - np.clip(x, 0, 1)) * (ANCHORS - 1)
    added = np.abs(built.program(x[:, None]) - alone) * (ANCHORS - 1)
    inner = ~at_seam & ~at_end & (x > 0) & (x < 1)
    return [
        {
            "seam": float(errors[at_seam].max()),
            "added": float(added[at_seam].max()),
            "end": float(errors[at_end].max()),
            "inside": float(errors[inner].max()),
            "one_head": float(single[(x >= 0) & (x <= 1)].max()),
        }
    ]


def _steep(place: str, k: float) -> Row:
    """tanh(k(x − x0)) by a value per cell: the largest error within two cells of x0, and elsewhere."""
    target = attnc.as_target(f"tanh({k!r}*(x-{PLACES[place]!r}))", {"x": (-1, 1)})
    built = attnc.constructions.max_affine(target, points_per_axis=CELLS, beta=64.0)
    x = np.unique(
        np.concatenate([np.linspace(-1, 1, 8001), np.clip(PLACES[place] + np.linspace(-2, 2, 4001) * H, -1, 1)])
    )
    errors = np.abs(built.program(x[:, None]) - target(x[:, None])[:, 0])
    near = np.abs(x - PLACES[place]) <= 2 * H
    return {"near": float(errors[near].max()), "elsewhere": float(errors[~near].max())}


def _jump(place: str, P: int) -> Row:
    """sign(x − x0), a jump of 2 in the middle of a cell: sup and L2 errors, and the sup two cells away from it."""
    h = 2 / P
    x0 = {"inside": 0.5 * h, "near the end": 1 - 1.5 * h, "at the end": 1 - 0.5 * h}[place]
    target = attnc.as_target(f"sign(x-{x0!r})", {"x": (-1, 1)}, p=2.0)
    built = attnc.constructions.max_affine(target, points_per_axis=P, norm=2.0, beta=64.0)
    x = -1 + 2 * (np.arange(100 * P) + 0.5) / (100 * P)
    errors = np.abs(built.program(x[:, None]) - target(x[:, None])[:, 0])
    near = np.abs(x - x0) <= 2 * h
    return {
        "near": float(errors[near].max()),
        "elsewhere": float(errors[~near].max()),
        "l2": float(np.sqrt(2 * (errors**2).mean())),
    }


def leak(beta: np.ndarray, s: int) -> np.ndarray:
    """r·e^{−β⌊(s+1)²/2⌋} spacings, r = (N−1)/2: the error of two heads at a seam."""
    return RADIUS * np.exp(-beta * ((s + 1) ** 2 // 2))


def judge(table: Table) -> list[Verdict]:
    seams = table.where(kind="seam")
    hard, soft = seams.where(beta=8.0, sentinels=1)[0], seams.where(beta=1.0, sentinels=1)[0]
    ratios = []
    for s in (1, 2, 3):
        rows = seams.where(sentinels=s)
        added = rows.column("added")
        predicted = leak(rows.column("beta"), s)
        seen = (predicted > 1e-8) & (predicted < 1)
        ratios += [float(ratio) for ratio in added[seen] / predicted[seen]]
    ends = max(float(row["end"]) / float(row["one_head"]) for row in seams.where(beta=8.0))
    spike = float(soft["end"]) / float(soft["inside"])
    steep = table.where(kind="steep")
    bound = np.tanh(steep.column("k") * H / 2)
    off = float((steep.column("near") / bound).max())
    by_place = {place: steep.where(place=place).column("near").max() for place in PLACES}
    jumps = table.where(kind="jump")
    laws = {place: jumps.where(place=place).power("P", "l2") for place in PLACES}
    spread = max(abs(law.exponent + 0.5) for law in laws.values())
    sup, far = float(jumps.column("near").min()), float(jumps.column("elsewhere").max())
    return [
        Verdict(
            "Errors spike between head partitions (the failure signature), unless β is large enough or sentinels are "
            "many.",
            Status.CONSTANT.when(max(ratios) < 4 and float(hard["seam"]) < 0.55 < float(soft["seam"])),
            f"with one sentinel per side the seam is off by {float(soft['seam']):.2f} spacings at βΔ² = 1 (inside "
            f"{float(soft['inside']):.2f}), by {float(hard['seam']):.2f} at 8. A seam adds {min(ratios):.2f} "
            f"to {max(ratios):.2f} times (N−1)/2·e^(−βΔ²·⌊(s+1)²/2⌋), s = 1, 2, 3.",
            {"seam_soft": float(soft["seam"]), "seam_hard": float(hard["seam"]), "largest_ratio": max(ratios)},
        ),
        Verdict(
            "The ends of [a, b] are no worse than the inside: truncation is free.",
            Status.HOLDS.when(ends <= 1.01),
            f"within two spacings of a and b, and beyond them, the error is at most {ends:.2f} times that of one head "
            "inside, at βΔ² = 8: the outer sentinels carry the values a and b. Only where β is too low for selection "
            f"do the ends spike, {spike:.1f} times the inside at βΔ² = 1, since there is no anchor beyond them to "
            "balance.",
            {"ratio": ends, "ratio_soft": spike},
        ),
        Verdict(
            "Steep transitions cost their oscillation over half a cell, wherever they are.",
            Status.CONSTANT.when(off <= 1.02),
            f"tanh(k(x−x₀)) is off by at most {off:.2f} times tanh(kh/2); the largest error is "
            + ", ".join(f"{value:.3f} {place}" for place, value in by_place.items())
            + ": the boundary is not special.",
            {"ratio": off, **{place.replace(" ", "_"): float(value) for place, value in by_place.items()}},
        ),
        Verdict(
            "A jump cannot be approximated in L∞, but in L₂ the error falls like √h.",
            Status.CONSTANT.when(spread < 0.06 and sup > 0.9 and far < 1e-3),
            f"a jump of 2 leaves a sup error of {sup:.2f} or more at every size (no continuous function has less than "
            f"1), {far:.1e} or less two cells away; the L₂ exponents in the number of cells are "
            + ", ".join(f"{law} {place}" for place, law in laws.items())
            + ", theory −½.",
            {
                "sup": sup,
                "elsewhere": far,
                "exponent": laws["inside"].exponent,
                "exponent_at_end": laws["at the end"].exponent,
            },
        ),
    ]


def draw(table: Table) -> drawing.Figure:
    picture, (first, second, third, fourth) = drawing.panels(4, width=5.3, height=4.0, rows=2)
    drawing.label(first, f"error along the range, {HEADS} heads", "w·x + t", "error, in spacings")
    for beta, colour in zip(SHOWN, (drawing.ORANGE, drawing.BLUE, drawing.INK), strict=True):
        rows = table.where(kind="profile", beta=beta)
        first.plot(rows.column("x"), rows.column("error"), color=colour, lw=0.9, label=f"measured, βΔ² = {beta:g}")
    for i, seam in enumerate(SEAMS):
        first.axvline(seam, color=drawing.GREY, lw=1, ls=":", label="seams" if i == 0 else None)
    first.axhline(0.5, color=drawing.INK, lw=1.2, ls="--", label="theory: ½, hard selection")
    drawing.label(second, "what a seam adds", "βΔ²", "difference from one head, in spacings", log="y")
    fine = np.linspace(0.5, 12, 100)
    for s, colour, marker in ((1, drawing.ORANGE, "^"), (2, drawing.GREEN, "D"), (3, drawing.BLUE, "o")):
        rows = table.where(kind="seam", sentinels=s)
        drawing.points(second, rows, "beta", "added", f"measured, {s} sentinel{'s' * (s > 1)} per side", colour, marker)
        drawing.theory(second, fine, leak(fine, s), f"theory: r·exp(−{(s + 1) ** 2 // 2}βΔ²)", colour)
    second.set_ylim(1e-13, 50)
    drawing.label(third, f"steep transitions tanh(k(x−x₀)), {CELLS} cells", "steepness k", "largest error", log="xy")
    k = np.logspace(math.log10(5), math.log10(320), 100)
    drawing.theory(third, k, np.tanh(k * H / 2), "theory: tanh(kh/2)")
    drawing.label(fourth, "jumps, in the middle of a cell", "cells P", "L₂ error; largest error", log="xy")
    P = np.array(FINENESS, float)
    drawing.theory(fourth, P, np.sqrt(2 / P), "theory: ½J·√h, L₂")
    for place, colour, size in zip(PLACES, (drawing.BLUE, drawing.GREEN, drawing.ORANGE), (10, 7, 4), strict=True):
        rows = table.where(kind="steep", place=place)
        drawing.points(third, rows, "k", "near", f"measured, {place}", colour, size=size)
        rows = table.where(kind="jump", place=place)
        drawing.points(fourth, rows, "P", "l2", f"L₂, {place}", colour, size=size)
        drawing.points(fourth, rows, "P", "near", f"largest, {place}", colour, "s", size=size, is_open=True)
    fourth.axhline(1, color=drawing.INK, lw=1.1, ls=":", label="theory: J/2, any continuous function")
    drawing.whole_ticks(fourth, FINENESS)
    return picture


EXPERIMENT = Experiment(
    cells,
    measure,
    judge,
    draw,
    number=6,
    name="boundary",
    title="Boundaries, seams, steep places and jumps",
    question="Are errors larger at the ends of the range, at the seams between heads, or where the target is steep "
    "or jumps?",
    prediction="A seam adds (N−1)/2·e^(−βΔ²⌊(s+1)²/2⌋) spacings with s sentinels per side; an end adds nothing. A "
    "steep place costs its oscillation over half a cell, tanh(kh/2); a jump J in the middle of a cell costs ½J·√h in "
    "L₂ and J/2 or more in L∞.",
    source="2504.15956: failure signature boundary artefacts, next checks 2 (stress test domain boundaries), "
    "limitation continuity",
)
