"""Experiment 6: errors at the ends of the range, at the seams between heads, and at steep places and jumps."""

from __future__ import annotations

import math

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.measuring import errors_at, middles

HEADS, PER_HEAD = 4, 8
ANCHORS = HEADS * PER_HEAD
SEAMS = tuple((h * PER_HEAD - 0.5) / (ANCHORS - 1) for h in range(1, HEADS))
REST = (0.5 - SEAMS[0]) * (ANCHORS - 1)
"""The distance of the outer seams from the middle of the range, in spacings. Idle heads rest at the middle."""
BETAS = (0.5, 0.75, 1.0, 1.5, 2.0, 2.75, 4.0, 6.0, 8.0, 12.0)
SHOWN = (1.0, 2.75, 8.0)
"""The β of the error profiles that are drawn."""
CELLS = 32
H = 2 / CELLS
PLACES = {"inside": 0.5 * H, "near the end": 1 - 1.5 * H, "at the end": 1 - 0.5 * H}
"""The places of a steep transition or a jump: x in [−1, 1], always in the middle of a cell, where the error is
largest."""
STEEPNESS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
FINENESS = (8, 16, 32, 64, 128, 256)


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="profile", beta=SHOWN, sentinels=1),
        *sweep(kind="seam", sentinels=(1, 2, 3), beta=BETAS),
        *sweep(kind="steep", place=PLACES, k=STEEPNESS),
        *sweep(kind="jump", place=PLACES, P=FINENESS),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] in ("profile", "seam"):
        return _heads(cell)
    return [_steep(cell["place"], cell["k"]) if cell["kind"] == "steep" else _jump(cell["place"], cell["P"])]


def _heads(cell: Cell) -> list[Row]:
    """Return the errors of heads that clip to [0, 1], in spacings: at every point, or the largest near each place."""
    s = cell["sentinels"]
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(-0.2, 1.2))
    built = attnc.constructions.truncated_linear_heads(
        target, num_heads=HEADS, num_tokens=PER_HEAD + 2 * s, sentinels=s, beta=cell["beta"]
    )
    x = np.linspace(-0.1, 1.1, 801 if cell["kind"] == "profile" else 12_001)
    errors = np.abs(built.program(x[:, None]) - np.clip(x, 0, 1)) * (ANCHORS - 1)
    if cell["kind"] == "profile":
        return [{"x": float(at), "error": float(error)} for at, error in zip(x, errors, strict=True)]
    reach = 2 / (ANCHORS - 1)
    by_seam = np.abs(x[:, None] - np.array(SEAMS)) < reach
    at_seam = by_seam.any(axis=1)
    at_end = np.minimum(np.abs(x), np.abs(x - 1)) < reach
    one = attnc.constructions.truncated_linear(target, num_anchors=ANCHORS, beta=cell["beta"])
    alone = one.program(x[:, None])
    single = np.abs(alone - np.clip(x, 0, 1)) * (ANCHORS - 1)
    added = np.abs(built.program(x[:, None]) - alone) * (ANCHORS - 1)
    inner = ~at_seam & ~at_end & (x > 0) & (x < 1)
    by_place = {"seam": errors[at_seam].max(), "end": errors[at_end].max(), "inside": errors[inner].max()}
    middle = by_seam[:, len(SEAMS) // 2]
    by_place |= {"added": added[at_seam].max(), "added_middle": added[middle].max()}
    return [by_place | {"one_head": single[(x >= 0) & (x <= 1)].max()}]


def _steep(place: str, k: float) -> Row:
    """Return the largest errors of tanh(k(x − x0)) with one value per cell: within two cells of x0, and elsewhere."""
    target = attnc.as_target(f"tanh({k!r}*(x-{PLACES[place]!r}))", {"x": (-1, 1)})
    built = attnc.constructions.max_affine(target, points_per_axis=CELLS, beta=64.0)
    x = np.union1d(np.linspace(-1, 1, 8001), np.clip(PLACES[place] + np.linspace(-2, 2, 4001) * H, -1, 1))
    return _near_and_elsewhere(x, PLACES[place], 2 * H, errors_at(x[:, None], built.program, target))


def _jump(place: str, P: int) -> Row:
    """Return the errors of sign(x − x0), a jump of 2 in the middle of a cell: near it, elsewhere, and in L₂."""
    h = 2 / P
    x0 = {"inside": 0.5 * h, "near the end": 1 - 1.5 * h, "at the end": 1 - 0.5 * h}[place]
    target = attnc.as_target(f"sign(x-{x0!r})", {"x": (-1, 1)}, p=2.0)
    built = attnc.constructions.max_affine(target, points_per_axis=P, norm=2.0, beta=64.0)
    x = middles(-1, 1, 100 * P)
    errors = errors_at(x[:, None], built.program, target)
    return _near_and_elsewhere(x, x0, 2 * h, errors) | {"l2": np.sqrt(2 * (errors**2).mean())}


def _near_and_elsewhere(x: np.ndarray, x0: float, reach: float, errors: np.ndarray) -> Row:
    """Return the largest errors within `reach` of x0, and beyond it."""
    near = np.abs(x - x0) <= reach
    return {"near": errors[near].max(), "elsewhere": errors[~near].max()}


def leak(beta: np.ndarray, s: int) -> np.ndarray:
    """Return the error of two heads at an outer seam, in spacings: r·e^{−β⌊(s+1)²/2⌋}, r its distance from the middle.

    A head that is idle returns the middle of the range, so its leak moves the output by up to r towards the middle.
    """
    return REST * np.exp(-beta * ((s + 1) ** 2 // 2))


def judge(table: Table) -> Verdicts:
    seams = table.where(kind="seam")
    hard, soft = seams.where(beta=8.0, sentinels=1)[0], seams.where(beta=1.0, sentinels=1)[0]
    ratios: list[float] = []
    for s in (1, 2, 3):
        rows = seams.where(sentinels=s)
        predicted = leak(rows.column("beta"), s)
        seen = (predicted > 1e-8) & (predicted < 1)
        ratios += list(rows.column("added")[seen] / predicted[seen])
    added = Span.of(ratios)
    middle = seams.where(sentinels=1).ratio("added_middle", "added").max()
    yield Verdict(
        "Errors spike between head partitions (the failure signature), unless β is large enough or sentinels are many.",
        Status.CONSTANT.when(added.largest < 4 and hard["seam"] < 0.55 < soft["seam"]),
        f"with one sentinel per side the error at the seam is {soft['seam']:.2f} spacings at βΔ² = 1 (inside "
        f"{soft['inside']:.2f}), and {hard['seam']:.2f} at 8. A seam adds {added:.2f} times "
        "r·e^(−βΔ²·⌊(s+1)²/2⌋), s = 1, 2, 3, where r is its distance from the middle of the range: idle heads rest "
        f"there. So the seam in the middle adds at most {middle:.2f} times what the others add.",
        {"middle": middle, "seam_soft": soft["seam"], "seam_hard": hard["seam"], "largest_ratio": added.largest},
        Constant(added.largest, "the error that a seam adds over r·e^(−βΔ²·⌊(s+1)²/2⌋) spacings"),
    )
    ends = seams.where(beta=8.0).ratio("end", "one_head").max()
    spike = soft["end"] / soft["inside"]
    yield Verdict(
        "The ends of [a, b] are no worse than the inside: truncation is free.",
        Status.HOLDS.when(ends <= 1.01),
        f"within two spacings of a and b, and beyond them, the error is at most {ends:.2f} times that of one head "
        "inside, at βΔ² = 8: the outer sentinels carry the values a and b. Only where β is too low for selection do "
        f"the ends spike, {spike:.1f} times the inside at βΔ² = 1, since there is no anchor beyond them to balance.",
        {"ratio": ends, "ratio_soft": spike},
    )
    steep = table.where(kind="steep")
    off = (steep.column("near") / np.tanh(steep.column("k") * H / 2)).max()
    by_place = {place: steep.where(place=place).column("near").max() for place in PLACES}
    yield Verdict(
        "Steep transitions cost their oscillation over half a cell, wherever they are.",
        Status.CONSTANT.when(off <= 1.02),
        f"the error of tanh(k(x−x₀)) is at most {off:.2f} times tanh(kh/2); the largest error is "
        f"{listed('{1:.3f} {0}', by_place)}: the boundary is not special.",
        {"ratio": off, **{place.replace(" ", "_"): value for place, value in by_place.items()}},
        Constant(off, "largest error near the steep place over tanh(kh/2)"),
    )
    jumps = table.where(kind="jump")
    laws = {place: jumps.where(place=place).power("P", "l2") for place in PLACES}
    spread = max(abs(law.exponent + 0.5) for law in laws.values())
    sup, far = jumps.column("near").min(), jumps.column("elsewhere").max()
    exponents = {"exponent": laws["inside"].exponent, "exponent_at_end": laws["at the end"].exponent}
    yield Verdict(
        "A jump cannot be approximated in L∞, but in L₂ the error falls like √h.",
        Status.CONSTANT.when(spread < 0.06 and sup > 0.9 and far < 1e-3),
        f"a jump of 2 leaves a sup error of {sup:.2f} or more at every size (no continuous function has less than 1), "
        f"{far:.1e} or less two cells away; the L₂ exponents in the number of cells are {listed('{1} {0}', laws)}, "
        "theory −½.",
        {"sup": sup, "elsewhere": far, **exponents},
        Constant(
            (jumps.column("l2") / np.sqrt(2 / jumps.column("P"))).max(), "L₂ error over ½J·√h, for a jump of J = 2"
        ),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third, fourth = drawing.panels(picture, 4, width=5.3, height=4.0, rows=2)
    first.label(f"error along the range, {HEADS} heads", "w·x + t", "error, in spacings")
    for beta, colour in zip(SHOWN, (drawing.ORANGE, drawing.BLUE, drawing.INK), strict=True):
        rows = table.where(kind="profile", beta=beta)
        first.line(rows, "x", "error", f"measured, βΔ² = {beta:g}", colour, lw=0.9)
    for i, seam in enumerate(SEAMS):
        first.axes.axvline(
            seam, color=drawing.GREY, lw=1, ls=":", label="seams; idle heads rest at ½" if i == 0 else None
        )
    first.axes.axhline(0.5, color=drawing.INK, lw=1.2, ls="--", label="theory: ½, hard selection")
    second.label("error that a seam adds", "βΔ²", "difference from one head, in spacings", log="y")
    fine = np.linspace(0.5, 12, 100)
    for s, colour, marker in ((1, drawing.ORANGE, "^"), (2, drawing.GREEN, "D"), (3, drawing.BLUE, "o")):
        rows = table.where(kind="seam", sentinels=s)
        second.points(rows, "beta", "added", f"measured, {s} sentinel{'s' * (s > 1)} per side", colour, marker)
        second.theory(fine, leak(fine, s), f"theory: r·exp(−{(s + 1) ** 2 // 2}βΔ²)", colour)
    rows = table.where(kind="seam", sentinels=1)
    second.points(rows, "beta", "added_middle", "seam in the middle, 1 sentinel", drawing.ORANGE, "v", is_open=True)
    second.axes.set_ylim(1e-13, 50)
    third.label(f"steep transitions tanh(k(x−x₀)), {CELLS} cells", "steepness k", "largest error", log="xy")
    k = np.logspace(math.log10(5), math.log10(320), 100)
    third.theory(k, np.tanh(k * H / 2), "theory: tanh(kh/2)")
    fourth.label("jumps, in the middle of a cell", "cells P", "L₂ error; largest error", log="xy")
    P = np.array(FINENESS, float)
    fourth.theory(P, np.sqrt(2 / P), "theory: ½J·√h, L₂")
    for place, colour, size in zip(PLACES, (drawing.BLUE, drawing.GREEN, drawing.ORANGE), (10, 7, 4), strict=True):
        rows = table.where(kind="steep", place=place)
        third.points(rows, "k", "near", f"measured, {place}", colour, size=size)
        rows = table.where(kind="jump", place=place)
        fourth.points(rows, "P", "l2", f"L₂, {place}", colour, size=size)
        fourth.points(rows, "P", "near", f"largest, {place}", colour, "s", size=size, is_open=True)
    fourth.axes.axhline(1, color=drawing.INK, lw=1.1, ls=":", label="theory: J/2, any continuous function")
    fourth.whole_ticks(FINENESS)


ABOUT = About(
    6,
    "Boundaries, seams, steep places and jumps",
    "Are errors larger at the ends of the range, at the seams between heads, or where the target is steep or jumps?",
    "A seam r spacings from the middle adds r·e^(−βΔ²⌊(s+1)²/2⌋) spacings with s sentinels per side; an end adds "
    "nothing. A "
    "steep place costs its oscillation over half a cell, tanh(kh/2); a jump J in the middle of a cell costs ½J·√h in "
    "L₂ and J/2 or more in L∞.",
    "the summary of 2504.15956: failure signature boundary artefacts, next checks 2 (stress test domain boundaries), "
    "limitation continuity",
)
