"""Experiment 2: the error of H heads that share the clipping, against H; and the parameters that heads save."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import (
    About,
    Cell,
    Constant,
    Effort,
    Interval,
    Power,
    Row,
    Status,
    Table,
    Verdict,
    Verdicts,
    sweep,
)
from attnc_lab.experiments.rate_in_p import END, HARD, SEEDS, STARTS, sampled_inputs, target_of, train_clip
from attnc_lab.measuring import errors_at, sizes_of

TOKENS = 10
PER_HEAD = TOKENS - 2
"""Number of anchors per head. Two of its keys are sentinels."""
HEADS = (1, 2, 4, 8, 16, 32)
TRAINED = HEADS[:4]
"""The numbers of heads that are trained."""
LEVELS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
UNIT = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(-0.5, 1.5))


def cells(profile: str) -> list[Cell]:
    steps, second_order = (2000, 25) if profile == "quick" else (3000, 60)
    trained = sweep(kind="trained", H=TRAINED, start=STARTS, steps=steps)
    levels = LEVELS if profile == "full" else LEVELS[:-1]
    return [
        *({**cell, "second_order": second_order} for cell in reversed(trained)),
        *sweep(kind=("hard", "soft"), H=HEADS),
        *sweep(kind=("one head", "heads"), eps=levels),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if "eps" in cell:
        name = "truncated_linear" if cell["kind"] == "one head" else "truncated_linear_heads"
        net = attnc.compile(UNIT, eps=cell["eps"], construction=name)
        sizes: Row = {"anchors": net.num_anchors, "heads": net.program.num_heads, "parameters": net.num_parameters}
        return [{**sizes, "observed": net.certificate.observed, "bound": net.certificate.bound}]
    target, H = target_of(seed, TOKENS), cell["H"]
    if cell["kind"] == "trained":
        return [{"N": TOKENS * H, **row} for row in train_clip(cell, H, TOKENS, seed)]
    built = attnc.constructions.truncated_linear_heads(
        target, num_heads=H, num_tokens=TOKENS, beta=HARD if cell["kind"] == "hard" else None
    )
    inputs = sampled_inputs(target, max(400, 60 * H), seed)
    errors = errors_at(inputs, built.program, target)
    return [{"N": PER_HEAD * H, "max_error": errors.max(), **sizes_of(built)}]


def judge(table: Table) -> Verdicts:
    hard = table.where(kind="hard")
    law = hard.power("N", "max_error", -1)
    ratio = (hard.column("max_error") * hard.column("N") / (2 * END)).max()
    yield Verdict(
        "H heads over n tokens clip with error O(1/(nH)): constructed.",
        Status.CONSTANT.when(abs(law.exponent + 1) < 0.03 and ratio <= 1),
        f"the error is at most {ratio:.2f}·|b−a|/((n−2)H), two of the n keys being sentinels; exponent {law} in the "
        f"number of intervals, H = 1 … {HEADS[-1]}.",
        {"constant": ratio, "exponent": law.exponent},
        Constant(ratio, "largest error over |b−a|/((n−2)H)"),
    )
    for start in STARTS:
        rows = table.where(kind="trained", start=start)
        by_H = {H: Interval.of(rows.where(H=H).column("max_error")) for H in sorted(rows.distinct("H"))}
        law = rows.power("H", "max_error")
        excess = {H: found.mean / (2 * END / (PER_HEAD * H)) for H, found in by_H.items()}
        last = max(by_H)
        yield Verdict(
            f"Trained heads have an error below |b−a|/((n−2)H), H = 1 … {last}: start {start}.",
            Status.HOLDS.when(max(excess.values()) <= 1, Status.NOT_REACHED),
            f"the largest error, geometric mean of {SEEDS} seeds, goes from {by_H[1]:.2g} with one head to "
            f"{by_H[last]:.2g} with {last} (95 % intervals over seeds). That is "
            f"{excess[1]:.2g} and {excess[last]:.2g} times |b−a|/((n−2)H). {rows[0]['second_order']} second-order "
            f"steps followed those of Adam. The exponent in H over all runs is {law}, so {_rate(law)}.",
            {"exponent": law.exponent, "excess": max(excess.values()), **by_H[last].numbers("error")},
            effort=Effort(
                int(rows[0]["steps"]), SEEDS, rows.where(H=last).column("max_error").min(), f"error at H = {last}:"
            ),
        )
    one, many = (table.where(kind=kind) for kind in ("one head", "heads"))
    by_one, by_many = (rows.growth("parameters").exponent for rows in (one, many))
    saved = one[-1]["parameters"] / many[-1]["parameters"]
    yield Verdict(
        "Heads instead of anchors save parameters at equal error.",
        Status.HOLDS.when(by_many < 0.75 * by_one),
        f"parameters grow like ε^−{by_one:.2f} with one head and ε^−{by_many:.2f} with about as many heads as tokens, "
        f"since heads share the tokens: {saved:.0f} times fewer at ε = {one[-1]['eps']:g}.",
        {"one_head_exponent": by_one, "heads_exponent": by_many, "saved": saved},
    )


def _rate(law: Power) -> str:
    """Return the conclusion from the interval of an exponent, which theory bounds by −1."""
    if law.low > 0:
        return "trained errors grow with H"
    if law.high >= 0:
        return "these runs show no rate in H: 0 is in the interval"
    return "trained errors fall with H" + (", more slowly than the bound" if law.low > -1 else "")


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2, width=5.0, height=4.0)
    left.label("error against heads, n = 10 tokens", "heads H", "largest error", log="xy")
    H = np.array(HEADS, float)
    left.theory(H, 2 * END / (PER_HEAD * H), "theory: |b−a|/((n−2)H)")
    left.theory(H, END / (PER_HEAD * H - 1), "theory: Δ/2", drawing.GREY, ":")
    for kind, name, colour, marker in (
        ("hard", "constructed, hard", drawing.INK, "s"),
        ("soft", "constructed, as soft as seams allow", drawing.BLUE, "o"),
    ):
        left.points(table.where(kind=kind), "H", "max_error", name, colour, marker)
    for start, colour in (("random", drawing.ORANGE), ("construction", drawing.GREEN)):
        left.seeds(table.where(kind="trained", start=start), "H", "max_error", f"trained, start {start}", colour, "^")
    left.whole_ticks(HEADS)
    right.label("parameters at equal error, clip to [0, 1]", "requested error ε", "stored numbers", log="xy")
    for kind, colour, marker, power in (("one head", drawing.INK, "s", 1.0), ("heads", drawing.GREEN, "D", 0.5)):
        rows = table.where(kind=kind)
        eps, size = rows.column("eps"), rows.column("parameters")
        right.theory(eps, size[-1] * (eps[-1] / eps) ** power, f"theory: ε^−{power:g}", colour)
        right.measured(eps, size, kind if kind == "one head" else "about as many heads as tokens", colour, marker)
    right.axes.invert_xaxis()


ABOUT = About(
    2,
    "Rate in the number of heads",
    "With the anchors of each head fixed, does the error fall like 1/(nH)? Do trained heads? What do heads cost?",
    "N = (n−2)H anchors, Δ = |b−a|/(N−1): |out − clip| ≤ |b−a|/N for βΔ² large enough that silent heads "
    "leak less than rounding; heads share n tokens, so ε needs O(n + H) = O(ε^−½) numbers instead of O(ε⁻¹).",
    "the summary of 2504.15956: key results (O(1/(nH))), mechanism 2, first experiments 3 (ablate heads), trade-off "
    "heads against capacity",
)
