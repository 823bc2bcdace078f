"""Experiment 3: the error against the length of the range, near 0 and far from it."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Status, Table, Verdict, errors_at, sizes_of, sweep
from attnc_lab.experiments.rate_in_p import HARD, SOFT, SOFT_ERROR

P = 33
FAR = 1000.0
"""The middle of a range that is far from 0."""
U32 = 2.0**-24
LENGTHS = tuple(float(length) for length in np.logspace(-2, 4, 13))


def cells(profile: str) -> list[Cell]:
    near = sweep(kind=("hard", "soft"), middle=0.0, dtype="float64", length=LENGTHS)
    return [*near, *sweep(kind="soft", middle=FAR, dtype=("float64", "float32"), length=LENGTHS)]


def measure(cell: Cell, seed: int) -> list[Row]:
    length, middle, dtype = cell["length"], cell["middle"], cell["dtype"]
    a, b = middle - length / 2, middle + length / 2
    target = attnc.TruncatedLinear([1.0], 0.0, a, b, box=(a - length / 4, b + length / 4))
    beta = HARD if cell["kind"] == "hard" else SOFT
    built = attnc.constructions.truncated_linear(target, num_anchors=P, beta=beta, dtype=dtype)
    x = np.linspace(a - length / 4, b + length / 4, 20_001)[:, None]
    return [{"max_error": errors_at(x, built.program, target).max(), **sizes_of(built)}]


def rounding_floor(length: np.ndarray) -> np.ndarray:
    """2u·|middle|: the input, and w·x + t − m, are rounded where |middle| is much larger than the range."""
    return 2 * U32 * (FAR + length / 2)


def judge(table: Table) -> list[Verdict]:
    near = table.where(middle=0.0)
    laws = {
        str(kind): rows.power("length", "max_error") for kind in ("hard", "soft") if (rows := near.where(kind=kind))
    }
    worst = max(abs(law.exponent - 1) for law in laws.values())
    far = table.where(middle=FAR, dtype="float32")
    predicted = SOFT_ERROR * far.column("length") / (P - 1) + rounding_floor(far.column("length"))
    ratio = far.column("max_error") / predicted
    return [
        Verdict(
            "The error is proportional to the length |b−a| of the range.",
            Status.CONSTANT.when(worst < 0.01),
            f"exponents in |b−a|: {laws['hard']} for hard selection, constant "
            f"{laws['hard'].factor * (P - 1):.3f}/(p−1), and {laws['soft']} at the best temperature, constant "
            f"{laws['soft'].factor * (P - 1):.3f}/(p−1), over six decades.",
            {
                "hard_exponent": laws["hard"].exponent,
                "soft_exponent": laws["soft"].exponent,
                "hard_constant": laws["hard"].factor * (P - 1),
                "soft_constant": laws["soft"].factor * (P - 1),
            },
        ),
        Verdict(
            "A range far from 0 costs nothing but the rounding of its inputs.",
            Status.CONSTANT.when(ratio.max() <= 1.5),
            f"around {FAR:g} in float32 the error is {ratio.min():.2f} to {ratio.max():.2f} times "
            "0.062·Δ + 2u·max|x|: the anchors are centred, so only w·x + t is rounded at the size of the range's "
            "middle.",
            {"least_ratio": ratio.min(), "largest_ratio": ratio.max()},
        ),
    ]


def draw(table: Table) -> drawing.Figure:
    picture, (panel,) = drawing.panels(1, width=7.2, height=4.3)
    panel.label(f"error against the range, p = {P}", "length of the range, |b−a|", "largest error", log="xy")
    length = np.array(LENGTHS)
    panel.theory(length, length / (2 * (P - 1)), "theory: |b−a|/(2(p−1))")
    panel.theory(length, SOFT_ERROR * length / (P - 1), "theory: 0.062·|b−a|/(p−1)", drawing.BLUE)
    floor = SOFT_ERROR * length / (P - 1) + rounding_floor(length)
    panel.theory(length, floor, "theory: the same + 2u·max|x|, float32", drawing.ORANGE, "-.")
    for kind, middle, dtype, name, colour, marker in (
        ("hard", 0.0, "float64", "hard, around 0", drawing.INK, "s"),
        ("soft", 0.0, "float64", "soft, around 0", drawing.BLUE, "o"),
        ("soft", FAR, "float64", f"soft, around {FAR:g}", drawing.GREEN, "D"),
        ("soft", FAR, "float32", f"soft, around {FAR:g}, float32", drawing.ORANGE, "^"),
    ):
        rows = table.where(kind=kind, middle=middle, dtype=dtype)
        panel.points(rows, "length", "max_error", name, colour, marker)
    return picture


ABOUT = About(
    3,
    "The length of the range",
    "How does the error depend on the range [a, b] that a head clips to?",
    "Δ = |b−a|/(p−1): proportional to |b−a| at fixed p; where the range lies costs rounding only, 2u·max|x|.",
    "2504.15956: mechanism 1 (p anchors in [a, b]); trade-off precision against sequence length",
)
