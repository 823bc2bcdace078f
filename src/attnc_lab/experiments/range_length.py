"""Experiment 3: the error against the length of the range; anchors, tokens and heads varied one at a time."""

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
    Row,
    Span,
    Status,
    Table,
    Verdict,
    Verdicts,
    listed,
    sweep,
)
from attnc_lab.experiments.rate_in_p import END, HARD, SOFT, SOFT_ERROR, sampled_inputs, target_of
from attnc_lab.measuring import errors_at, sizes_of

P = 33
FAR = 1000.0
"""The middle of a range that is far from 0."""
U32 = 2.0**-24
LENGTHS = tuple(float(length) for length in np.logspace(-2, 4, 13))
ANCHORS, TOKENS = (16, 64, 256, 1024), (1, 2, 4, 8, 16)
"""The numbers of anchors p and of tokens n, in all pairs."""
TOTAL, HEADS = 128, (1, 2, 4, 8, 16, 32)
"""The total number of keys, and the numbers of heads that share them."""
STEPS, SEEDS = {"quick": 600, "full": 5000}, 5
COLOURS = (drawing.BLUE, drawing.GREEN, drawing.ORANGE, drawing.PURPLE, drawing.SKY)


def cells(profile: str) -> list[Cell]:
    apart = [
        *sweep(kind="trained heads", H=HEADS[:5], steps=STEPS[profile]),
        *sweep(kind="apart", p=ANCHORS, n=TOKENS),
        *sweep(kind="heads", H=HEADS),
    ]
    near = sweep(kind=("hard", "soft"), middle=0.0, dtype="float64", length=LENGTHS)
    return [*apart, *near, *sweep(kind="soft", middle=FAR, dtype=("float64", "float32"), length=LENGTHS)]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "apart":
        target = target_of(seed, cell["n"], 3)
        built = attnc.constructions.truncated_linear(target, num_anchors=cell["p"], beta=HARD)
        return [_over_range(built, target, cell["p"], seed)]
    if cell["kind"] == "heads":
        target, H = target_of(seed, 2, 3), cell["H"]
        built = attnc.constructions.truncated_linear_heads(target, num_heads=H, num_tokens=TOTAL // H, beta=HARD)
        return [{"N": TOTAL - 2 * H} | _over_range(built, target, TOTAL, seed)]
    if cell["kind"] == "trained heads":
        return _trained(cell["H"], cell["steps"], seed)
    length, middle, dtype = cell["length"], cell["middle"], cell["dtype"]
    a, b = middle - length / 2, middle + length / 2
    target = attnc.TruncatedLinear([1.0], 0.0, a, b, box=(a - length / 4, b + length / 4))
    beta = HARD if cell["kind"] == "hard" else SOFT
    built = attnc.constructions.truncated_linear(target, num_anchors=P, beta=beta, dtype=dtype)
    x = np.linspace(a - length / 4, b + length / 4, 20_001)[:, None]
    return [{"max_error": errors_at(x, built.program, target).max(), **sizes_of(built)}]


def _over_range(built: attnc.constructions.Built, target: attnc.TruncatedLinear, anchors: int, seed: int) -> Row:
    inputs = sampled_inputs(target, 40 * anchors // len(target.W) + 1, seed)
    return {"max_error": errors_at(inputs, built.program, target).max(), **sizes_of(built)}


def _trained(H: int, steps: int, seed: int) -> list[Row]:
    """Train H heads that share TOTAL keys, with all weights free, on two tokens of width 3."""
    import torch

    from attnc_lab.fitting import Budget, fit
    from attnc_lab.models import ClippedTokens

    target = target_of(seed, 2, 3)
    W, t = torch.tensor(target.W) / END, torch.tensor(target.t) / END

    def batch(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn((*shape, *W.shape), generator=generator, dtype=torch.float64)
        return x, (torch.einsum("...nd,nd->...n", x, W) + t).clamp(-1, 1)

    held_out = batch((500,), torch.Generator().manual_seed(seed + 99))
    budget = Budget(steps, SEEDS, rates=(5e-3, 2e-2), points=128)
    made = fit(lambda: ClippedTokens(2, 3, TOTAL // H, H), batch, held_out, budget, seed=seed)
    inputs = sampled_inputs(target, 2000, seed)
    wanted, rows = target(inputs.reshape(len(inputs), -1)), []
    for trial, model in enumerate(made.models):
        with torch.no_grad():
            errors = END * model(torch.tensor(inputs)).numpy() - wanted
        rows.append(made.row(trial) | {"max_error": np.abs(errors).max(), "rms": np.sqrt((errors**2).mean())})
    return rows


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
    apart = table.where(kind="apart")
    constants = apart.column("max_error") * (apart.column("p") - 1) / (2 * END)
    spread = max(np.ptp(constants[apart.column("p") == p]) for p in ANCHORS)
    yield Verdict(
        "Precision p against sequence length n: the error depends on the number p of anchors, not on the number n of "
        "tokens.",
        Status.CONSTANT.when(spread < 0.05 and constants.max() <= 0.51),
        f"p = {ANCHORS[0]} … {ANCHORS[-1]:,} and n = {TOKENS[0]} … {TOKENS[-1]}, in all pairs: the error is "
        f"{Span.of(constants):.3f} times |b−a|/(p−1), and at the same p it differs by {spread:.3f} of it at most "
        "between different n. A head needs p ≥ n tokens, and no more.",
        {"constant": constants.max(), "spread": spread},
        Constant(constants.max(), "largest error over |b−a|/(p−1)"),
    )
    shared = table.where(kind="heads")
    off = shared.column("max_error") * (shared.column("N") - 1) / (2 * END)
    trained = table.where(kind="trained heads")
    found = {H: Interval.of(trained.where(H=H).column("max_error")) for H in trained.distinct("H")}
    yield Verdict(
        f"Heads ablated at a fixed total of {TOTAL} keys: constructed, more heads only cost their sentinels.",
        Status.CONSTANT.when(off.max() <= 0.51),
        f"with H = {HEADS[0]} … {HEADS[-1]} the error is {Span.of(off):.3f} times |b−a|/(N−1) for the N = {TOTAL} − 2H "
        f"anchors that are left: {shared[0]['max_error']:.3g} with one head, {shared[-1]['max_error']:.3g} with "
        f"{HEADS[-1]}. Heads pay only where each brings keys of its own.",
        {"constant": off.max(), "one_head": shared[0]["max_error"], "most_heads": shared[-1]["max_error"]},
        Constant(off.max(), "largest error over |b−a|/(N−1)"),
    )
    yield Verdict(
        f"Heads ablated at a fixed total of {TOTAL} keys: trained, no difference is seen between one head and more.",
        Status.HOLDS.when(all(each.low <= found[1].high and found[1].low <= each.high for each in found.values())),
        f"largest error, geometric mean of {SEEDS} seeds and 95 % interval, all of which overlap with that of one "
        "head: "
        f"{listed('{1:.2g} (H = {0})', found)}. None reaches a constructed head, which has "
        f"{shared[0]['max_error']:.2g}. The intervals are wide, so a difference of less than a factor of "
        f"{max(each.high / each.low for each in found.values()):.0f} may not be seen.",
        {f"H_{H}": interval.mean for H, interval in found.items()},
        effort=Effort(int(trained[0]["steps"]), SEEDS, trained.column("max_error").min(), "error"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    panel, second, third = drawing.panels(picture, 3, width=4.9, height=4.2)
    second.label("anchors p and tokens n apart", "anchors p", "largest error", log="xy")
    p = np.array(ANCHORS, float)
    second.theory(p, END / (p - 1), "theory: |b−a|/(2(p−1))")
    for i, (n, colour) in enumerate(zip(TOKENS, COLOURS, strict=True)):
        rows = table.where(kind="apart", n=n)
        second.measured(rows.column("p") * 1.07 ** (i - 2), rows.column("max_error"), f"n = {n}", colour, "os^Dv"[i])
    second.whole_ticks(ANCHORS)
    third.label(f"heads that share {TOTAL} keys", "heads H", "largest error", log="xy")
    H = np.array(HEADS, float)
    third.theory(H, END / (TOTAL - 2 * H - 1), "theory: |b−a|/(2(N−1)), N = 128 − 2H")
    third.points(table.where(kind="heads"), "H", "max_error", "constructed", drawing.INK, "s")
    third.points(table.where(kind="trained heads"), "H", "max_error", "trained, 5 seeds", drawing.ORANGE, "^")
    third.whole_ticks(HEADS)
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
    "The length of the range; anchors, tokens and heads",
    "How does the error depend on the range [a, b] that a head clips to? On anchors, tokens and heads, if only one of "
    "them is varied?",
    "Δ = |b−a|/(p−1): proportional to |b−a| at fixed p; where the range lies costs rounding only, 2u·max|x|.",
    "2504.15956: mechanism 1 (p anchors in [a, b]); trade-off precision against sequence length; "
    "first experiments 3 (ablate heads)",
)
