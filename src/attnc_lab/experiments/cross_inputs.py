"""Experiment 18: cross-attention of two inputs f(X, Y); and L_p norms of functions that jump on lines and curves."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.measuring import errors_at, lattice, middles, sizes_of

TOKENS = {"1 and 1": (1, 1), "1 and 2": (1, 2), "2 and 1": (2, 1)}
"""The numbers of tokens of X and of Y. All tokens have width 1."""
LIPSCHITZ = 2.0
"""A Lipschitz constant of `mixed`: |∇|² ≤ ȳ² + (|x|/m + cos y₁)² + (m−1)x²/m² ≤ 4 for all numbers in [−1, 1]."""
JUMPS = {
    "line x = 0.3": "sign(x-0.3)*cos(y)",
    "oblique line": "sign(x+0.7*y)",
    "circle": "sign(x**2+y**2-0.5)",
    "parabola": "sign(y-x**2)*(1+x)/2",
}
"""The name of a set on which a function jumps → the function."""
JUMP, LONGEST = 2.0, 4.5
"""The height of a jump, and a bound of the length of the set: the circle has 2π√½ = 4.44."""
NORMS = (1.0, 2.0, 4.0, 10.0)
FINENESS = {"quick": (4, 8, 16), "full": (4, 8, 16, 32)}
POINTS = 192
"""Number of points of the quadrature per axis: 6 to 48 in a cell."""
COLOURS = dict(zip(NORMS, (drawing.GREEN, drawing.BLUE, drawing.ORANGE, drawing.PURPLE), strict=True))


def cells(profile: str) -> list[Cell]:
    fineness = FINENESS[profile]
    pairs = [cell for name in TOKENS for cell in sweep(kind="two inputs", tokens=name, P=(*fineness, 12, 24))]
    largest = 12 if profile == "quick" else 24  # P³ cells for three numbers
    pairs = [cell for cell in pairs if cell["tokens"] == "1 and 1" or cell["P"] <= largest]
    return [*pairs, *sweep(kind="jump", jump=JUMPS, norm=NORMS, P=fineness)]


def mixed(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return tanh(x·mean(Y) + sin(y₁)) for every token x of X."""
    x, y = X[:, :, 0], Y[:, :, 0]
    return np.tanh(x * y.mean(axis=1, keepdims=True) + np.sin(y[:, :1]))[:, :, None]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "two inputs":
        return [_two_inputs(TOKENS[cell["tokens"]], cell["P"], seed)]
    text, norm, P = JUMPS[cell["jump"]], cell["norm"], cell["P"]
    square = {"x": (-1, 1), "y": (-1, 1)}
    net = attnc.compile(text, square, construction="max_affine", norm=norm, points_per_axis=P)
    errors = errors_at(lattice(middles(-1, 1, POINTS), 2), net, attnc.as_target(text, square, p=norm))
    found: Row = {"error": (4 * (errors**norm).mean()) ** (1 / norm), "max_error": errors.max()}
    return [found | {"anchors": net.num_anchors, "bound": net.certificate.bound}]


def _two_inputs(tokens: tuple[int, int], P: int, seed: int) -> Row:
    target = attnc.SequenceTarget(mixed, tokens=tokens, width=(1, 1), box=(-1, 1), lipschitz=LIPSCHITZ)
    built = attnc.constructions.max_affine_cross(target, points_per_axis=P)
    rng = np.random.default_rng([seed, P])
    X, Y = (rng.uniform(-1, 1, (2000, count, 1)) for count in tokens)
    found, wanted = built.program(X, Y).reshape(len(X), -1), mixed(X, Y).reshape(len(X), -1)
    # With Y of other points, the output must follow: it depends on both inputs.
    other = built.program(X, Y[::-1]).reshape(len(X), -1)
    return {
        "max_error": np.abs(found - wanted).max(),
        "swapped": np.abs(other - mixed(X, Y[::-1]).reshape(len(X), -1)).max(),
        "layers": built.program.num_attention_layers,
        "heads": built.program.num_heads,
        **sizes_of(built),
    }


def judge(table: Table) -> Verdicts:
    pairs = table.where(kind="two inputs")
    laws = {name: pairs.where(tokens=name).power("P", "max_error") for name in TOKENS}
    ratio = Span.of(pairs.ratio("bound", "max_error"))
    holds = pairs.is_within("max_error", "bound") and pairs.is_within("swapped", "bound")
    off = max(abs(law.exponent + 1) for law in laws.values())
    yield Verdict(
        "One head of cross-attention approximates f(X, Y): queries from X, keys and values from Y.",
        Status.CONSTANT.when(holds and off < 0.35),
        f"one layer with one head; every error is below the proven bound, which is {ratio:.2f} times the error seen at "
        f"2,000 points. Exponents in the cells per axis P: {listed('{1} ({0} tokens)', laws)}; theory −1. With the "
        "order of Y reversed, the errors stay within the same bounds.",
        {**ratio.numbers("ratio"), "exponent": laws["1 and 1"].exponent},
        Constant(pairs.ratio("max_error", "bound").max(), "largest error over the proven bound"),
    )
    jumps = table.where(kind="jump")
    looseness = Span.of(jumps.ratio("bound", "error"))
    yield Verdict(
        "In L_p, p < ∞, functions that jump on lines and curves are approximated, with a proven bound.",
        Status.HOLDS.when(jumps.is_within("error", "bound") and looseness.largest <= 3),
        f"for p = 1, 2, 4, 10 and {len(JUMPS)} functions that jump on lines and curves, the certificate's bound is "
        f"{looseness:.2f} times the error by quadrature at {POINTS}² points.",
        looseness.numbers("ratio"),
    )
    fits = {norm: [jumps.where(norm=norm, jump=jump).power("P", "error") for jump in JUMPS] for norm in NORMS}
    powers = {norm: Span.of([fit.exponent for fit in found]) for norm, found in fits.items()}
    p, P = jumps.column("norm"), jumps.column("P")
    gap = max(abs(power + 1 / norm) for norm, powers_of in powers.items() for power in powers_of)
    yield Verdict(
        "The L_p error of a jump falls like P^(−1/p): only the cells that it cuts count.",
        Status.CONSTANT.when(gap < 0.3),
        f"exponents in P: {listed('{1:.2f} (p = {0:g})', powers)}; theory −1/p. On P² cells about P are cut, each with "
        "an error of half the jump on a volume of P^−2. In L_10 the rate is so slow that a grid is no answer; "
        "affine_cells puts cells at straight jumps instead.",
        {"gap": gap, **{f"exponent_{norm:g}": span.least for norm, span in powers.items()}},
        Constant(
            (jumps.column("error") / (JUMP**p * LONGEST * 2 / P) ** (1 / p)).max(),
            f"L_p error over (J^p·ℓ·h)^(1/p), for a jump J = {JUMP:g} on a set of length ℓ ≤ {LONGEST:g}, h = 2/P",
        ),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third = drawing.panels(picture, 3, width=4.7, height=4.2)
    first.label("f(X, Y) by one cross-attention head", "cells per axis P", "largest error", log="xy")
    for name, colour, marker in zip(TOKENS, (drawing.BLUE, drawing.GREEN, drawing.ORANGE), "o^s", strict=True):
        rows = Table(sorted(table.where(kind="two inputs", tokens=name), key=lambda row: row["P"]))
        first.law(rows, "P", "bound", f"proven, {name} tokens", colour)
        first.points(rows, "P", "max_error", f"observed, {name}", colour, marker)
    first.whole_ticks((4, 8, 16, 24))
    first.axes.set_ylim(0.04, 2)
    second.label("a jump on a circle", "cells per axis P", "L_p error", log="xy")
    for norm, marker in zip(NORMS, "o^sD", strict=True):
        rows = table.where(kind="jump", jump="circle", norm=norm)
        second.law(rows, "P", "bound", f"proven, p = {norm:g}", COLOURS[norm])
        second.points(rows, "P", "error", f"quadrature, p = {norm:g}", COLOURS[norm], marker)
    second.axes.set_ylim(0.2, 5)
    second.whole_ticks(table.where(kind="jump").distinct("P"))
    third.label("proven bound over error, all jumps", "cells per axis P", "bound / error", log="x")
    for shift, (norm, colour) in enumerate(COLOURS.items()):
        rows = table.where(kind="jump", norm=norm)
        places = rows.column("P") * 1.06 ** (shift - 1.5)  # beside each other
        third.measured(places, rows.ratio("bound", "error"), f"p = {norm:g}", colour, "o^sD"[shift])
    third.axes.axhline(3, color=drawing.INK, ls="--", lw=1.2, label="promised: at most 3")
    third.axes.axhline(1, color=drawing.GREY, ls=":", lw=1.2, label="theory: at least 1")
    third.axes.set_ylim(0, 3.4)
    third.whole_ticks(table.where(kind="jump").distinct("P"))


ABOUT = About(
    18,
    "Two inputs f(X, Y), and L_p norms with jumps",
    "Does one head of cross-attention approximate a function of two sequences? How tight are L_p bounds for functions "
    "that jump on lines and curves?",
    "|out − f| ≤ ω_f(√D/2P) with P^D cells, D the numbers of X and Y together. In L_p a jump J on a set of length ℓ "
    "costs at most J·(ℓ·h·√D)^(1/p), h = 2/P: the cells that it cuts.",
    "2504.19901: key results (cross-attention, L_p norms)",
)
