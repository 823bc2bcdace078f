"""Experiment 8: long sequences; many dimensions, by a grid and by a composition; and families of large expressions."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import (
    PEAK_MIB,
    About,
    Cell,
    Constant,
    Row,
    Span,
    Status,
    Table,
    Verdict,
    Verdicts,
    listed,
    sweep,
)
from attnc_lab.experiments.rate_in_p import END, HARD, inputs_at, target_of
from attnc_lab.measuring import errors_at, sizes_of, unproved

LENGTHS = (50, 200, 1000, 4000, 10_000)
HEADS = (1, 4)
WIDTHS, LONG = (10, 20, 50, 100), 1000
"""The widths of tokens that are compared, and the number of tokens there."""
DIMENSIONS = tuple(range(2, 11))
EPS, SIDE = 0.1, 2.0
"""The requested accuracy of both, on [−2, 2]^D."""
LIMITS = {"quick": 50_000, "full": 1_500_000}
"""Maximum number of anchors of a grid that is built. The size of larger grids is predicted."""
FAMILY_SIZES = {12: 2, 40: 8, 80: 16, 120: 24, 400: 60, 1000: 100}
"""About the number of operations of an expression of a family → its number of variables, on [−1, 1]."""
DEEPEST = 80
"""The largest number of operations of one chain: an expression is nested at most 100 levels deep."""
CHAINS = (DEEPEST, 1000)
"""The numbers of operations of single chains: one that is read, and one that is nested too deep."""
FAMILY_EPS, STRIP = 1e-4, 0.5
"""The requested accuracy of families, and the a of the theorem on polynomial size: sin and tanh are analytic, and at
most tan(1) < 2 in size, within 2a of the real axis."""


def cells(profile: str) -> list[Cell]:
    lengths = sweep(kind="length", n=LENGTHS, H=HEADS)
    families = sweep(kind="family", family=tuple(FAMILIES), N=FAMILY_SIZES)
    grids = sweep(kind="grid", D=DIMENSIONS, limit=LIMITS[profile])
    widths = [cell for cell in sweep(kind="width", n=LONG, H=HEADS, width=WIDTHS) if cell["width"] > WIDTHS[0]]
    chains = sweep(kind="chain", N=CHAINS)
    return [*reversed(lengths), *widths, *grids, *sweep(kind="compose", D=DIMENSIONS), *families, *chains]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] in ("length", "width"):
        return [_length(cell["n"], cell["H"], cell.get("width", WIDTHS[0]), seed)]
    if cell["kind"] == "family":
        return [_family(cell["family"], cell["N"], seed)]
    if cell["kind"] == "chain":
        return [{"is_read": int(_is_read(nested(cell["N"] // 2, 8)))}]
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


class Member(NamedTuple):
    """An expression of a family, with the numbers of the theorem on polynomial size.

    It has `heads` operations that are not affine, chains of at most `depth` operations, operands of at most `reach` in
    size, and `affine` bounds Σ|c| of its sums.
    """

    text: str
    operations: int
    heads: int
    depth: int
    reach: float
    affine: float


def sums(N: int, d: int) -> Member:
    """Return the mean of N/3 terms g(x_i)·x_j."""
    m = max(2, N // 3)
    terms = [f"{('sin', 'tanh')[k // d % 2]}({1 + k // d}*x{k % d})*x{(7 * k + 1 + k // d) % d}" for k in range(m)]
    return Member(f"({'+'.join(terms)})/{m}", 3 * m, 2 * m, 4, 1 + m // d, 1 + m // d)


def products(N: int, d: int) -> Member:
    """Return the product of N/3 factors 1 + g(x_i)/m, which is at most e."""
    m = max(2, N // 3)
    factors = [f"(1+{('sin', 'tanh')[k // d % 2]}({1 + k // d}*x{k % d})/{m})" for k in range(m)]
    return Member(
        "*".join(factors), 4 * m - 1, 2 * m - 1, 3 + math.ceil(math.log2(m)), max(math.e, 1 + m // d), 2 + m // d
    )


def trees(N: int, d: int) -> Member:
    """Return a balanced tree of g(left + right/2) with N/2 leaves."""
    level, height = [f"x{k % d}" for k in range(max(2, N // 2))], 0
    leaves = len(level)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        odd = level[-1:] if len(level) % 2 else []
        level = [f"{('sin', 'tanh')[height % 2]}({left}+{right}/2)" for left, right in pairs] + odd
        height += 1
    return Member(level[0], 2 * (leaves - 1), leaves - 1, 2 * height, 1.5, 1.5)


def nested(levels: int, d: int, first: int = 0) -> str:
    """Return one chain of levels of sin(inner + x_i/4), whose innermost variable is x_first."""
    text = f"x{first % d}"
    for k in range(levels):
        text = f"sin({text}+x{(first + k + 1) % d}/4)"
    return text


def _is_read(text: str) -> bool:
    """Return whether an expression in eight variables is not nested too deep to be read."""
    try:
        attnc.as_target(text, {f"x{i}": (-1, 1) for i in range(8)})
    except attnc.ExpressionError:
        return False
    return True


def compositions(N: int, d: int) -> Member:
    """Return N/2 levels of sin(inner + x_i/4), or the mean of several such chains of at most DEEPEST operations."""
    count = -(-N // DEEPEST)
    levels = N // (2 * count)
    chains = [nested(levels, d, 7 * chain) for chain in range(count)]
    text = chains[0] if count == 1 else f"({'+'.join(chains)})/{count}"
    return Member(text, 2 * levels * count + (count > 1), levels * count, 2 * levels + (count > 1), 1.25, 1.25)


FAMILIES = {"sums": sums, "products": products, "trees": trees, "compositions": compositions}


def keys_of_theorem(member: Member) -> float:
    """Return the number of keys that the theorem on polynomial size states (docs/compose.md)."""
    a, B = STRIP, member.reach
    M = max(2.0, B + 2 * a)
    R, K = (B + a) / a, max(1.0, M / a, member.affine, 2 * B + a)
    log = math.log(3.53 * R * M * (B + a) * member.depth / FAMILY_EPS) + (member.depth - 1) * math.log(K)
    return member.heads * (2 + 1.79 * R * log)


def _family(name: str, N: int, seed: int) -> Row:
    d = FAMILY_SIZES[N]
    member = FAMILIES[name](N, d)
    target = attnc.as_target(member.text, {f"x{i}": (-1, 1) for i in range(d)})
    row = _sizes(attnc.constructions.compose(target, eps=FAMILY_EPS), target, seed)
    return {"variables": d, "operations": member.operations, "theorem": keys_of_theorem(member), **row}


def _sizes(built: attnc.constructions.Built, target: attnc.Target, seed: int) -> Row:
    points = np.random.default_rng(seed).uniform(target.box.lo, target.box.hi, (1000, target.box.d))
    errors = errors_at(points, unproved(target, built), target)
    program = built.program
    counted = {"heads": program.num_heads, "layers": program.num_attention_layers}
    return {**sizes_of(built), **counted, "max_error": errors.max()}


def _slopes(target: attnc.Target, seed: int) -> float:
    """Return max Σ_i |∂f/∂x_i| over a sample: the change of f over a cube of half-width h/2, divided by h/2."""
    points = np.random.default_rng([seed, 2]).uniform(-SIDE, SIDE, (4000, target.box.d))
    steps = 1e-6 * np.eye(target.box.d)
    total = sum(np.abs(target(points + step) - target(points - step))[:, 0] / 2e-6 for step in steps)
    return total.max()


def _length(n: int, H: int, width: int, seed: int) -> Row:
    """Measure n tokens, each clipped by its own w. Every head has n keys."""
    target = target_of(seed, n, width)
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
    net = unproved(target, built)
    net(inputs[:1])  # the first call also prepares the engine
    started = time.process_time()
    errors = errors_at(inputs, net, target)
    seconds = (time.process_time() - started) / len(inputs)
    scores = n * built.program.num_anchors
    return {"N": anchors, "max_error": errors.max(), "scores": scores, "seconds": seconds, **sizes_of(built)}


def judge(table: Table) -> Verdicts:
    lengths = table.where(kind="length")
    laws = {H: lengths.where(H=H).power("N", "max_error") for H in HEADS}
    wide = table.where(kind="width")
    both = Table([*lengths, *wide])
    constant = (both.column("max_error") * both.column("N") / (2 * END)).max()
    yield Verdict(
        "The rates O(1/p) and O(1/(nH)) hold for long sequences, n = 50 … 10,000, and for tokens of width 10 … 100.",
        Status.CONSTANT.when(all(abs(law.exponent + 1) < 0.1 for law in laws.values()) and constant <= 1),
        f"exponents {laws[1]} with one head and {laws[4]} with four, in the number of anchors; the error is at most "
        f"{constant:.2f}·|b−a|/N. At n = {LONG:,} and a width of {WIDTHS[-1]} it is "
        f"{wide.where(H=1, width=WIDTHS[-1])[0]['max_error']:.3g} with one head, and "
        f"{lengths.where(n=LONG, H=1)[0]['max_error']:.3g} at a width of {WIDTHS[0]}: the head sees w·x + t alone.",
        {"one_head": laws[1].exponent, "four_heads": laws[4].exponent, "constant": constant},
        Constant(constant, "largest error over |b−a|/N"),
    )
    shown = {n: lengths.where(n=n, H=1)[0] for n in (LONG, LENGTHS[-1])}
    grown = lengths.where(H=1).above("n", LENGTHS[0]).power("scores", "seconds")
    long = shown[LENGTHS[-1]]
    memory = f"{long[PEAK_MIB]:.0f} MiB" if PEAK_MIB in long else "not recorded"
    per_score = Span.of(1e9 * lengths.ratio("seconds", "scores"))
    yield Verdict(
        "n = 1,000 and 10,000 tokens can be computed: the cost of the layer is that of its n·N scores.",
        Status.HOLDS.when(long["scores"] == LENGTHS[-1] ** 2 and long["max_error"] <= END / long["N"] * 1.001),
        f"one head on {LENGTHS[-1]:,} tokens of width {WIDTHS[0]} takes {long['scores']:.0e} scores and "
        f"{long['seconds']:.2g} s of processor time per sequence, and {memory} in all, building included; "
        f"{LONG:,} tokens take {shown[LONG]['seconds']:.2g} s. The time per sequence grows like scores^{grown} "
        f"over n = {LENGTHS[1]} … {LENGTHS[-1]:,} with one head; theory 1. It is {per_score:.1f} ns per score in all "
        "cells of width 10. Keys are streamed: n·N "
        f"numbers would be {8 * long['scores'] / 2**20:,.0f} MiB.",
        {"time_exponent": grown.exponent, "seconds": long["seconds"]},
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
    families = table.where(kind="family")
    laws_of = {name: families.where(family=name).power("operations", "anchors") for name in FAMILIES}
    slack = Span.of(families.ratio("theorem", "anchors"))
    worst = families.column("max_error").max()
    is_read = {row["N"]: bool(row["is_read"]) for row in table.where(kind="chain")}
    most = {
        name: f"{rows[-1]['operations']:,.0f} operations in {rows[-1]['variables']:.0f} variables"
        for name in FAMILIES
        for rows in [families.where(family=name)]
    }
    yield Verdict(
        "Polynomial size for a class of functions (an open question of the paper): sums, products, trees and "
        "compositions of analytic functions.",
        Status.HOLDS.when(
            families.is_within("anchors", "theorem")
            and max(law.exponent for law in laws_of.values()) < 1.2
            and worst <= FAMILY_EPS
        ),
        f"to ε = {FAMILY_EPS:g} by deep programs, up to {listed('{1} ({0})', most)}. The "
        f"exponents of the number of keys in the number of operations are {listed('{1} ({0})', laws_of)}. The "
        f"theorem's count is {slack:.0f} times the keys of compose, which are fitted. Observed error ≤ {worst:.2g}. "
        f"Compositions of more than {DEEPEST} operations are the mean of chains of at most {DEEPEST}"
        f"{'' if is_read[CHAINS[-1]] else f': one chain of {CHAINS[-1]:,} is refused, as it is nested too deep'}.",
        {f"exponent_{name}": law.exponent for name, law in laws_of.items()} | slack.numbers("slack"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, cost, right, third = drawing.panels(picture, 4, width=5.6, height=4.4, rows=2)
    cost.label("processor time of a sequence, width 10", "scores n·N", "seconds per sequence", log="xy")
    third.label(f"families of expressions, ε = {FAMILY_EPS:g}", "operations", "keys in all", log="xy")
    colours = (drawing.BLUE, drawing.GREEN, drawing.ORANGE, drawing.PURPLE)
    for name, colour, marker in zip(FAMILIES, colours, "os^D", strict=True):
        rows = table.where(kind="family", family=name)
        third.law(rows, "operations", "theorem", f"theorem, {name}", colour)
        third.points(rows, "operations", "anchors", f"compose, {name}", colour, marker)
    left.label("error against sequence length", "tokens n", "largest error", log="xy")
    n = np.array(LENGTHS, float)
    for H, colour, marker in ((1, drawing.BLUE, "o"), (4, drawing.GREEN, "D")):
        left.theory(n, END / (n if H == 1 else (n - 2) * H), "theory: |b−a|/2N", colour)
        rows = table.where(kind="length", H=H)
        left.points(rows, "n", "max_error", f"measured, H = {H}", colour, marker)
        wide = table.where(kind="width", H=H, width=WIDTHS[-1])
        name = f"width {WIDTHS[-1]}, H = {H}"
        left.points(wide, "n", "max_error", name, colour, marker, size=10, is_open=True)
        cost.measured(rows.column("scores"), rows.column("seconds"), f"measured, H = {H}", colour, marker)
    rows = table.where(kind="length", H=1)
    last = rows.where(n=LENGTHS[-1])[0]
    each = last["seconds"] / last["scores"]
    cost.theory(rows.column("scores"), each * rows.column("scores"), "theory: in proportion to the scores")
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
