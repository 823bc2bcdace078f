"""Experiment 9: sin(x) + cos(y) by explicit single-head weights, by cross-attention, in L₂, and on smaller domains."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, sweep
from attnc_lab.measuring import errors_at, lattice, middles, sizes_of, unproved

TEXT, STEP = "sin(x)+cos(y)", "sign(x+0.3*y)+sign(x**2+y**2-4)"
EPSILONS = {
    "quick": (0.5, 0.2, 0.1, 0.05, 0.02, 0.01),
    "full": (0.5, 0.3, 0.2, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01),
}
NAMES = {"self": "max_affine", "cross": "max_affine_cross"}
SIDES = (3.0, 2.0, 1.0, 0.5)
FINENESS = (6, 12, 24, 48, 96)
SHOWN = 0.5
"""The accuracy whose partition is shown."""
EPS_SIDE = 0.1
RAW_BETA = (1.0, 50.0)
"""The βh² at which scores are compared with those of Proposition 3.2."""


def cells(profile: str) -> list[Cell]:
    uniform = sweep(eps=EPSILONS[profile], kind=NAMES)
    jumps, sides = sweep(kind="jump", P=FINENESS), sweep(kind="side", side=SIDES)
    propositions = sweep(kind="propositions", d=(1, 2, 3), P=8, beta=RAW_BETA)
    return [*uniform, {"kind": "partition", "eps": SHOWN}, *jumps, *sides, *propositions]


def measure(cell: Cell, seed: int) -> list[Row]:
    kind = cell["kind"]
    if kind in NAMES:
        return [_row(attnc.compile(TEXT, [(-3, 3)] * 2, cell["eps"], construction=NAMES[kind]))]
    if kind == "propositions":
        return [_propositions(cell["d"], cell["P"], cell["beta"], seed)]
    if kind == "partition":
        return _partition(cell["eps"])
    if kind == "side":
        box = [(-cell["side"], cell["side"])] * 2
        return [_row(attnc.compile(TEXT, box, EPS_SIDE, construction="max_affine"))]
    target = attnc.as_target(STEP, [(-3, 3)] * 2, p=2.0)
    built = attnc.constructions.max_affine(target, points_per_axis=cell["P"], norm=2.0)
    points = lattice(middles(-3, 3, 5 * cell["P"]), 2)
    errors = errors_at(points, unproved(target, built), target)
    return [{"l2": np.sqrt(36 * (errors**2).mean()), "max_error": errors.max(), **sizes_of(built)}]


def _row(net: attnc.Network) -> Row:
    errors = {"bound": net.certificate.bound, "observed": net.certificate.observed}
    return {"anchors": net.num_anchors, "parameters": net.num_parameters, **errors}


def _propositions(d: int, P: int, beta: float, seed: int) -> Row:
    """Compare stored scores and values with R(v·x − ½|v|²) and f(v), v the centres of cells, R = 2β/h².

    A softmax does not see what all scores of a query share, so scores are compared after their mean is removed.
    """
    target = attnc.as_target("+".join(("sin(x)", "cos(y)", "sin(z)")[:d]), {name: (-3, 3) for name in "xyz"[:d]})
    built = attnc.constructions.max_affine(target, points_per_axis=P, beta=beta)
    x = np.random.default_rng([seed, 5]).uniform(-3, 3, (200, d))
    cache = unproved(target, built).run(x, cache=True).cache
    h = 6 / P
    scores, axes = cache["select.head0.scores"][:, 0], [cache[f"embed.anchor.{name}"] for name in "xyz"[:d]]
    centres = h * np.stack([np.asarray(axis)[0] for axis in axes], axis=1)
    wanted = 2 * beta / h**2 * (x @ centres.T - (centres**2).sum(axis=1) / 2)
    off = scores - wanted
    off -= off.mean(axis=1, keepdims=True)
    values = np.asarray(cache["embed.value.0"])[0]
    return {
        "scores_off": np.abs(off).max() / np.abs(wanted).max(),
        "values_off": np.abs(values - target(centres)[:, 0]).max(),
    }


def _partition(eps: float) -> list[Row]:
    """Return the output at points of the square, and the key with the largest weight there."""
    net = attnc.compile(TEXT, [(-3, 3)] * 2, eps, construction="max_affine")
    points = lattice(np.linspace(-3, 3, 61), 2)
    made = net.run(points, cache=True)
    chosen = made.cache["select.head0.pattern"][:, 0].argmax(axis=1)
    return [
        {"x": float(x), "y": float(y), "out": float(out), "key": int(key)}
        for (x, y), out, key in zip(points, made.outputs, chosen, strict=True)
    ]


def judge(table: Table) -> Verdicts:
    for kind in NAMES:
        rows = table.where(kind=kind)
        share, exponent = Span.of(rows.ratio("observed", "eps")), rows.growth("anchors").exponent
        yield Verdict(
            f"Single-head {kind}-attention after a linear map approximates sin(x) + cos(y) within ε.",
            Status.HOLDS.when(rows.is_within("bound", "eps") and share.largest <= 1),
            f"proven and observed for ε = {rows[0]['eps']:g} … {rows[-1]['eps']:g}: the error seen is {share:.2f} of "
            f"ε; {rows[-1]['anchors']:,.0f} cells for the last, growing like ε^−{exponent:.2f} (theory: −2, one factor "
            "1/ε per axis).",
            {**share.numbers("share"), "exponent": exponent},
        )
    rows = table.where(kind="propositions")
    scores, values = rows.column("scores_off").max(), rows.column("values_off").max()
    yield Verdict(
        "Scores are R·(v·x − ½|v|²), v the centres of cells (Proposition 3.2), and values are f(v) (Proposition 3.3).",
        Status.HOLDS.when(scores < 1e-12 and values < 1e-12),
        f"in 1, 2 and 3 dimensions, with R = 2β/h²: scores differ by {scores:.1e} of the largest, and values by "
        f"{values:.1e}, which is rounding. Numbers of propositions are those of the paper's summary.",
        {"scores": scores, "values": values},
    )
    jump = table.where(kind="jump")
    law, largest = jump.power("P", "l2"), jump.column("max_error").min()
    yield Verdict(
        "The result extends to L_p norms, and there to discontinuous functions.",
        Status.CONSTANT.when(jump.is_within("l2", "bound") and abs(law.exponent + 0.5) < 0.12),
        f"two jumps, along a line and a circle: the L₂ error falls with exponent {law} in the cells per axis (theory "
        "−½: a jump spoils a strip of width h) and stays below its proven bound, while the largest error stays at "
        f"{largest:.2f}.",
        {"exponent": law.exponent, "max_error": largest},
        Constant(jump.ratio("l2", "bound").max(), "L₂ error over its proven bound, which is O(√h)"),
    )
    sides = table.where(kind="side")
    saving = sides.power("side", "anchors")
    yield Verdict(
        "A Lipschitz function on a smaller domain needs fewer cells.",
        Status.HOLDS.when(saving.exponent > 1.5),
        f"{sides[0]['anchors']:,.0f} cells on [−3, 3]², {sides[-1]['anchors']:,.0f} on [−½, ½]² for ε = {EPS_SIDE:g}: "
        f"exponent {saving} in the side (theory 2, and more where the function is flatter).",
        {"exponent": saving.exponent},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third, fourth = drawing.panels(picture, 4, width=5.2, height=4.1, rows=2)
    first.label("error against ε", "requested ε", "error", log="xy")
    eps = np.array([0.01, 0.5])
    first.theory(eps, eps, "theory: ≤ ε")
    for kind, colour, marker in (("self", drawing.BLUE, "o"), ("cross", drawing.GREEN, "D")):
        rows = table.where(kind=kind)
        size = 9 if kind == "self" else 4
        first.points(rows, "eps", "bound", f"proven, {kind}-attention", colour, "s", size=size, is_open=True)
        first.points(rows, "eps", "observed", f"observed, {kind}-attention", colour, marker, size=size)
    rows = table.where(kind="partition")
    side = round(len(rows) ** 0.5)
    second.label(f"output and partition at ε = {SHOWN:g}", "x", "y")
    image = second.image(rows.column("out").reshape(side, side).T, (-3, 3, -3, 3), cmap="viridis")
    keys = rows.column("key").reshape(side, side).T
    axis = np.linspace(-3, 3, side)
    for direction, draw_line in enumerate((second.axes.axhline, second.axes.axvline)):
        for place in np.unique(np.argwhere(np.diff(keys, axis=direction) != 0)[:, direction]):
            draw_line(axis[place] / 2 + axis[place + 1] / 2, color="white", lw=0.6)
    picture.colorbar(image, ax=second.axes, shrink=0.85).set_label("output", fontsize=9)
    third.label("a discontinuous target, in L₂", "cells per axis P", "error", log="xy")
    jump = table.where(kind="jump")
    P = jump.column("P")
    third.theory(P, jump[0]["l2"] * np.sqrt(P[0] / P), "theory: P^−½")
    third.points(jump, "P", "l2", "L₂ error", drawing.BLUE)
    third.points(jump, "P", "bound", "proven bound of it", drawing.BLUE, "s", is_open=True)
    third.points(jump, "P", "max_error", "largest error", drawing.ORANGE, "^")
    third.whole_ticks(FINENESS)
    fourth.label(f"a smaller domain, ε = {EPS_SIDE:g}", "half side of the square", "cells", log="xy")
    sides = table.where(kind="side")
    s = sides.column("side")
    fourth.theory(s, sides[0]["anchors"] * (s / s[0]) ** 2, "theory: side²")
    fourth.points(sides, "side", "anchors", "measured", drawing.BLUE)
    fourth.whole_ticks(SIDES)


ABOUT = About(
    9,
    "Approximation in two dimensions by explicit weights",
    "Do the explicit single-head weights approximate sin(x) + cos(y) within ε in L∞? In L_p? With fewer cells on less?",
    "|out − f| ≤ Λ₁h/2 (+ leak): P = Λ₁·w/2ε cells per axis, ε⁻² in two dimensions; (w/w')² fewer on a "
    "smaller square; in L₂ a jump along a curve costs O(√h).",
    "the summary of 2504.19901: first experiments 1 (synthetic 2D approximation), key results (L∞, L_p, "
    "cross-attention, Lipschitz functions on smaller domains)",
)
