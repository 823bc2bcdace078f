"""Experiment 3: the error against the length of the range, near 0 and far from it."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.experiments.rate_in_p import HARD, SOFT, SOFT_ERROR
from attnc_lab.measuring import errors_at, sizes_of

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


def with_rounding(length: np.ndarray) -> np.ndarray:
    """Return 0.062·Δ + 2u·max|x|. The second term is the rounding of the input and of w·x + t − m far from 0."""
    return SOFT_ERROR * length / (P - 1) + 2 * U32 * (FAR + length / 2)


def judge(table: Table) -> Verdicts:
    near = table.where(middle=0.0)
    hard, soft = (near.where(kind=kind).power("length", "max_error") for kind in ("hard", "soft"))
    constants = {"hard_constant": hard.factor * (P - 1), "soft_constant": soft.factor * (P - 1)}
    yield Verdict(
        "The error is proportional to the length |b−a| of the range.",
        Status.CONSTANT.when(max(abs(law.exponent - 1) for law in (hard, soft)) < 0.01),
        f"exponents in |b−a|: {hard} for hard selection, constant {constants['hard_constant']:.3f}/(p−1), and {soft} "
        f"at the best temperature, constant {constants['soft_constant']:.3f}/(p−1), over six decades.",
        {"hard_exponent": hard.exponent, "soft_exponent": soft.exponent, **constants},
        Constant(constants["hard_constant"], "largest error over |b−a|/(p−1), for hard selection"),
    )
    far = table.where(middle=FAR, dtype="float32")
    ratio = Span.of(far.column("max_error") / with_rounding(far.column("length")))
    yield Verdict(
        "A range far from 0 costs nothing but the rounding of its inputs.",
        Status.CONSTANT.when(ratio.largest <= 1.5),
        f"around {FAR:g} in float32 the error is {ratio:.2f} times 0.062·Δ + 2u·max|x|: the anchors are centred, so "
        "only w·x + t is rounded at the size of the range's middle.",
        ratio.numbers("ratio"),
        Constant(ratio.largest, "largest error over 0.062·Δ + 2u·max|x|"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    (panel,) = drawing.panels(picture, 1, width=7.2, height=4.3)
    panel.label(f"error against the range, p = {P}", "length of the range, |b−a|", "largest error", log="xy")
    length = np.array(LENGTHS)
    panel.theory(length, length / (2 * (P - 1)), "theory: |b−a|/(2(p−1))")
    panel.theory(length, SOFT_ERROR * length / (P - 1), "theory: 0.062·|b−a|/(p−1)", drawing.BLUE)
    panel.theory(length, with_rounding(length), "theory: the same + 2u·max|x|, float32", drawing.ORANGE, "-.")
    for kind, middle, dtype, name, colour, marker in (
        ("hard", 0.0, "float64", "hard, around 0", drawing.INK, "s"),
        ("soft", 0.0, "float64", "soft, around 0", drawing.BLUE, "o"),
        ("soft", FAR, "float64", f"soft, around {FAR:g}", drawing.GREEN, "D"),
        ("soft", FAR, "float32", f"soft, around {FAR:g}, float32", drawing.ORANGE, "^"),
    ):
        rows = table.where(kind=kind, middle=middle, dtype=dtype)
        panel.points(rows, "length", "max_error", name, colour, marker)


ABOUT = About(
    3,
    "The length of the range",
    "How does the error depend on the range [a, b] that a head clips to?",
    "Δ = |b−a|/(p−1): proportional to |b−a| at fixed p; where the range lies costs rounding only, 2u·max|x|.",
    "2504.15956: mechanism 1 (p anchors in [a, b]); trade-off precision against sequence length",
)
