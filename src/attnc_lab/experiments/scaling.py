"""Experiment 8: long sequences; and many dimensions, by a grid and by a composition."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.experiments.rate_in_p import END, HARD, inputs_at, target_of
from attnc_lab.measuring import errors_at, sizes_of, unproved

LENGTHS = (50, 200, 1000, 4000, 10_000)
HEADS = (1, 4)
DIMENSIONS = tuple(range(2, 11))
EPS, SIDE = 0.1, 2.0
"""The requested accuracy of both, on [−2, 2]^D."""
LIMITS = {"quick": 50_000, "full": 1_500_000}
"""Maximum number of anchors of a grid that is built. The size of larger grids is predicted."""


def cells(profile: str) -> list[Cell]:
    lengths = sweep(kind="length", n=LENGTHS, H=HEADS)
    grids = sweep(kind="grid", D=DIMENSIONS, limit=LIMITS[profile])
    return [*reversed(lengths), *grids, *sweep(kind="compose", D=DIMENSIONS)]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "length":
        return [_length(cell["n"], cell["H"], seed)]
    D = cell["D"]
    target = attnc.as_target(chain(D), {f"x{i}": (-SIDE, SIDE) for i in range(D)})
    if cell["kind"] == "compose":
        return [_sizes(attnc.constructions.compose(target, eps=EPS), target, seed)]
    expected, limit = (_slopes(target, seed) * SIDE / EPS) ** D, cell["limit"]
    predicted: Row = {"predicted": expected}
    if expected > 2 * limit:
        return [predicted]
    try:
        built = attnc.constructions.max_affine(target, eps=EPS, max_anchors=limit)
    except attnc.BoundNotMet:
        return [predicted]
    return [predicted | _sizes(built, target, seed)]


def chain(D: int) -> str:
    """Return the mean of sin(x_i)·cos(x_{i+1}). Every variable matters, two at a time."""
    return "(" + "+".join(f"sin(x{i})*cos(x{i + 1})" for i in range(D - 1)) + f")/{D - 1}"


def _sizes(built: attnc.constructions.Built, target: attnc.Target, seed: int) -> Row:
    points = np.random.default_rng(seed).uniform(-SIDE, SIDE, (1000, target.box.d))
    errors = errors_at(points, unproved(target, built), target)
    return {**sizes_of(built), "layers": built.program.num_attention_layers, "max_error": errors.max()}


def _slopes(target: attnc.Target, seed: int) -> float:
    """Return max Σ_i |∂f/∂x_i| over a sample: the change of f over a cube of half-width h/2, divided by h/2."""
    points = np.random.default_rng([seed, 2]).uniform(-SIDE, SIDE, (4000, target.box.d))
    steps = 1e-6 * np.eye(target.box.d)
    total = sum(np.abs(target(points + step) - target(points - step))[:, 0] / 2e-6 for step in steps)
    return total.max()


def _length(n: int, H: int, seed: int) -> Row:
    """Measure n tokens of width 10, each clipped by its own w. Every head has n keys."""
    target = target_of(seed, n)
    if H == 1:
        built, anchors = attnc.constructions.truncated_linear(target, num_anchors=n, beta=HARD), n
    else:
        built = attnc.constructions.truncated_linear_heads(target, num_heads=H, num_tokens=n, beta=HARD)
        anchors = (n - 2) * H
    # Near the middles between two anchors, where the error is largest.
    rng = np.random.default_rng([seed, 3])
    shape = (max(1, 2000 // n), n)
    steps = rng.integers(0, anchors - 1, shape) + 0.5 + rng.choice([-0.05, -0.02, 0.02, 0.05], shape)
    inputs = inputs_at(target, -END + 2 * END * steps / (anchors - 1), seed)
    errors = errors_at(inputs, built.program, target)
    return {"N": anchors, "max_error": errors.max(), "scores": n * built.program.num_anchors, **sizes_of(built)}


def judge(table: Table) -> Verdicts:
    lengths = table.where(kind="length")
    laws = {H: lengths.where(H=H).power("N", "max_error") for H in HEADS}
    constant = (lengths.column("max_error") * lengths.column("N") / (2 * END)).max()
    yield Verdict(
        "The rates O(1/p) and O(1/(nH)) hold for long sequences, n = 50 … 10,000.",
        Status.CONSTANT.when(all(abs(law.exponent + 1) < 0.1 for law in laws.values())),
        f"exponents {laws[1]} with one head and {laws[4]} with four, in the number of anchors; the error is at most "
        f"{constant:.2f}·|b−a|/N. It costs n·N scores per point: "
        f"{lengths.where(n=LENGTHS[-1], H=1)[0]['scores']:.1e} at n = 10,000 with one head.",
        {"one_head": laws[1].exponent, "four_heads": laws[4].exponent, "constant": constant},
        Constant(constant, "largest error over |b−a|/N"),
    )
    grids = table.where(kind="grid")
    built = grids.having("anchors")
    ratio = Span.of(built.ratio("anchors", "predicted"))
    factor = 10 ** np.polyfit(grids.column("D"), np.log10(grids.column("predicted")), 1)[0]
    yield Verdict(
        "A grid needs a number of cells that is exponential in the dimension.",
        Status.CONSTANT.when(len(built) >= 2 and ratio.least > 0.1 and ratio.largest < 10),
        f"(Λ₁·w/2ε)^D, Λ₁ = max Σ|∂f/∂x_i|, w = {2 * SIDE:g}, is the prediction; the grids built up to D = "
        f"{max(built.distinct('D'))} have {ratio:.2f} times that. The number grows by a factor {factor:.0f} per "
        f"dimension, to {grids[-1]['predicted']:.1e} at D = {DIMENSIONS[-1]}.",
        {**ratio.numbers("ratio"), "factor": factor},
        Constant(ratio.largest, "number of cells over (Λ₁·w/2ε)^D"),
    )
    composed = table.where(kind="compose")
    growth, anchors = composed.power("D", "anchors", -1), composed.column("anchors")
    largest = composed.column("max_error").max()
    yield Verdict(
        "Polynomial size for structured functions (an open question of the paper): by composition it is linear in D.",
        Status.HOLDS.when(growth.exponent < 1.3 and largest <= EPS),
        f"the same functions to the same ε = {EPS:g} by a deep program: {anchors[0]:.0f} anchors at D = 2, "
        f"{anchors[-1]:.0f} at D = {DIMENSIONS[-1]}, exponent {growth} in the number of terms; observed error "
        f"{largest:.2g} at most.",
        {"exponent": growth.exponent, "last": anchors[-1]},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2, width=5.4, height=4.1)
    left.label("error against sequence length, width 10", "tokens n", "largest error", log="xy")
    n = np.array(LENGTHS, float)
    for H, colour, marker in ((1, drawing.BLUE, "o"), (4, drawing.GREEN, "D")):
        left.theory(n, END / (n if H == 1 else (n - 2) * H), "theory: |b−a|/2N", colour)
        left.points(table.where(kind="length", H=H), "n", "max_error", f"measured, H = {H}", colour, marker)
    left.whole_ticks(LENGTHS)
    right.label(f"anchors for ε = {EPS:g} on [−2, 2]^D", "dimension D", "anchors", log="y")
    grids, composed = table.where(kind="grid"), table.where(kind="compose")
    right.law(grids, "D", "predicted", "theory: (Λ₁w/2ε)^D")
    right.points(grids.having("anchors"), "D", "anchors", "grid, built (max_affine)", drawing.ORANGE, "s")
    D = composed.column("D")
    right.theory(D, composed[0]["anchors"] * (D - 1), "theory: linear in D", drawing.BLUE)
    right.points(composed, "D", "anchors", "composition, built (compose)", drawing.BLUE, "o")


ABOUT = About(
    8,
    "Sequence length and input dimension",
    "Do the rates hold for long sequences? How does the size grow with the dimension, for a grid and for a "
    "composition?",
    "n tokens give each head n keys: error ≤ |b−a|/2N, N = n or (n−2)H. A grid of cells needs (Λ₁·w/2ε)^D "
    "of them; a composition of an expression needs a number of heads linear in its size, whatever D is.",
    "2504.15956: next checks 3 (realistic sequence lengths), open question on polynomial size; 2504.19901: "
    "next checks 2 (dimensional scaling), trade-off minimalism against capacity",
)
