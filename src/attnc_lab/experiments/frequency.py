"""Experiment 7: the error against the target's frequency at a fixed grid."""

from __future__ import annotations

import math

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.measuring import errors_at, sizes_of

P = 32
H = 2 / P
"""The width of a cell of [−1, 1]."""


def cells(profile: str) -> list[Cell]:
    waves = np.logspace(math.log10(0.02), math.log10(4), 25 if profile == "quick" else 97) / H * math.pi
    return sweep(kind=("sampled", "solved"), omega=waves)


def measure(cell: Cell, seed: int) -> list[Row]:
    omega = cell["omega"]
    target = attnc.as_target(f"sin({omega!r}*x+1)", {"x": (-1, 1)})
    if cell["kind"] == "sampled":
        built = attnc.constructions.max_affine(target, points_per_axis=P)
    else:
        built = attnc.constructions.spectral_grid(target, num_anchors=P)
    x = np.linspace(-1, 1, 64 * P + 1)[:, None]
    errors = errors_at(x, built.program, target)
    return [{"max_error": errors.max(), "rms": np.sqrt((errors**2).mean()), **sizes_of(built)}]


def oscillation(omega: np.ndarray) -> np.ndarray:
    """Return max |sin(ωx) − sin(ωv)| over |x − v| ≤ h/2. It is 2 sin(ωh/4), and 2 from ωh = 2π on."""
    return 2 * np.sin(np.minimum(omega * H / 4, math.pi / 2))


def judge(table: Table) -> Verdicts:
    sampled, solved = table.where(kind="sampled"), table.where(kind="solved")
    omega, error, later_error = sampled.column("omega"), sampled.column("max_error"), solved.column("max_error")
    ratio = error / oscillation(omega)
    largest, least = ratio.max(), ratio[omega * H < 1.5].min()
    yield Verdict(
        "With one value per cell of width h, the error is the oscillation of f over h/2.",
        Status.CONSTANT.when(largest <= 1.02 and least > 0.5),
        f"the error is {least:.2f} to {largest:.2f} times 2·sin(ωh/4) below ωh = 1.5, and never more than "
        f"{largest:.2f} times it: the oscillation bound holds with equality, except for the softness of the selection.",
        {"least_ratio": least, "largest_ratio": largest},
        Constant(largest, "largest error over the oscillation of f over h/2"),
    )
    breaks, later = (omega[np.argmax(found > 0.5)] * H / math.pi for found in (error, later_error))
    yield Verdict(
        "A target that varies fast within a cell cannot be approximated (the break condition).",
        Status.HOLDS.when(0.1 < breaks < 1),
        f"the error passes half the amplitude at ωh = {breaks:.2f}·π, about {2 / breaks:.0f} cells per period, and "
        "reaches twice the amplitude: the output is then unrelated to the target.",
        {"breaks_at": breaks},
    )
    resolved = omega * H < math.pi / 3
    gain = np.median(error[resolved] / later_error[resolved])
    yield Verdict(
        "Solved values (beyond the papers) fail at a higher frequency, and are far more accurate below it.",
        Status.HOLDS.when(later > breaks and gain > 100),
        f"with the same {P} anchors and solved values the error passes half the amplitude at ωh = {later:.2f}·π (two "
        "anchors per period are 1·π; some anchors lie beyond the ends), and below ωh = π/3 it is "
        f"{gain:.1e} times smaller (median).",
        {"breaks_at": later, "gain": gain},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    (panel,) = drawing.panels(picture, 1, width=7.2, height=4.4)
    panel.label(
        f"sin(ωx + 1) on [−1, 1], {P} anchors", "ωh/π: phase per cell, in half turns", "largest error", log="xy"
    )
    fine = np.logspace(math.log10(0.02), math.log10(4), 300)
    omega = fine * math.pi / H
    panel.theory(fine, oscillation(omega), "theory: 2·sin(ωh/4), the oscillation bound")
    panel.theory(fine, omega * H / 2, "theory: Λh/2 = ωh/2, from the Lipschitz constant", drawing.GREY, ":")
    for kind, name, colour, marker in (
        ("sampled", "a value per cell (max_affine)", drawing.BLUE, "o"),
        ("solved", "solved values (spectral_grid)", drawing.GREEN, "D"),
    ):
        rows = table.where(kind=kind)
        panel.measured(rows.column("omega") * H / math.pi, rows.column("max_error"), name, colour, marker)
    panel.axes.axvline(1, color=drawing.FAINT, lw=2, zorder=0, label="two anchors per period")
    panel.axes.set_ylim(1e-14, 30)


ABOUT = About(
    7,
    "Frequency of the target at a fixed grid",
    "At which frequency does a fixed partition fail, and does the error equal the oscillation bound?",
    "|out − f| ≤ ω_f(h/2) = 2·sin(ωh/4) for sin(ωx), at most 2; ωh/2 to first order.",
    "the summary of 2504.19901: mechanism 2, break condition (high frequency within a cell), mechanism 3, failure "
    "signature oscillations",
)
