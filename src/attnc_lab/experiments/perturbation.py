"""Experiment 12: how fast the error grows when the constructed weights are perturbed, measured and proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.experiments.rate_in_p import HARD, SOFT
from attnc_lab.measuring import unproved

SIZES = tuple(float(f"{10**power:.4g}") for power in np.arange(-8, -0.99, 0.5))
"""The relative sizes: 1e-8 to 1e-1 in half decades."""
PARTS = ("all", "affine", "W_Q", "W_K", "W_V", "W_O")
WAYS = ("random", "sign", "one weight", "gradient")
CANDIDATES, ATTACKED = 500, 64
"""The number of points at which slopes are computed, and of those among them that the adversary attacks."""
BOUND_SECONDS = 600.0
"""The limit of time for a bound. It takes about a second, so results do not depend on the machine's other work."""
COLOURS = {
    "hard clip": drawing.INK,
    "soft clip": drawing.BLUE,
    "partition": drawing.ORANGE,
    "solved": drawing.GREEN,
    "composed": drawing.PURPLE,
}
EPS = {"hard clip": 0.05, "soft clip": 0.005, "partition": 1.2, "solved": 1e-3, "composed": 1e-2}
"""The error that each certificate promises."""
SMALL, LARGE = 1e-6, 1e-1
"""The sizes up to which the first order must hold, and at which training usually leaves weights."""


def clip(beta: float) -> attnc.Network:
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(-0.2, 1.2))
    built = attnc.constructions.truncated_linear(target, num_anchors=17, beta=beta)
    return unproved(attnc.as_target("clip(x, 0, 1)", {"x": (-0.2, 1.2)}), built)


def partition() -> attnc.Network:
    target = attnc.as_target("sin(x)+cos(y)", [(-3, 3)] * 2)
    return unproved(target, attnc.constructions.max_affine(target, points_per_axis=8))


SUBJECTS: dict[str, Callable[[], attnc.Network]] = {
    "hard clip": lambda: clip(HARD),
    "soft clip": lambda: clip(SOFT),
    "partition": partition,
    "solved": lambda: attnc.compile("sin(x)", [(-3, 3)], EPS["solved"], construction="spectral_grid"),
    "composed": lambda: attnc.compile("exp(sin(x)*y)", [(-1, 1)] * 2, EPS["composed"], construction="compose"),
}
"""Two heads that clip, a partition, a head with solved values, and two layers in sequence."""


def cells(profile: str) -> list[Cell]:
    some = SIZES[2::4] if profile == "quick" else SIZES[::2]
    whole = sweep(subject=COLOURS, part="all", size=SIZES)
    return [*whole, *sweep(subject=COLOURS, part=PARTS[1:], size=some), *sweep(subject=COLOURS, kind="radius")]


def measure(cell: Cell, seed: int) -> Iterator[Row]:
    network = SUBJECTS[cell["subject"]]()
    if cell.get("kind") == "radius":
        yield {"bound": network.bound(weights_within=1e-15) or math.nan, **_radius(network, EPS[cell["subject"]])}
        return
    import torch

    from attnc_lab.attacking import Weights, attack

    target = attnc.as_target(str(network.expression), network.box.as_dict())
    weights = Weights.of(network.program)
    rng = np.random.default_rng([seed, 12])
    points = rng.uniform(target.box.lo, target.box.hi, (CANDIDATES, target.box.d))
    x, wanted = (torch.tensor(array.astype(np.float64)) for array in (points, target(points).reshape(-1)))
    slopes = weights.slopes(x)
    with torch.no_grad():
        exact = weights.outputs(torch.zeros(len(weights.values), dtype=torch.float64), x)
        steep = slopes.abs().sum(1).argsort(descending=True)[: ATTACKED // 2]
        wrong = (exact - wanted).abs().argsort(descending=True)[: ATTACKED // 2]
        chosen = torch.unique(torch.cat([steep, wrong]))
    found = attack(weights, cell["part"], cell["size"], x[chosen], wanted[chosen], slopes[chosen], seed)
    of_part = slopes[chosen] * weights.of_part(cell["part"])
    proven = network.bound(weights_within=cell["size"], seconds=BOUND_SECONDS) if cell["part"] == "all" else None
    row: Row = {
        "numbers": int(weights.of_part(cell["part"]).sum()),
        "slope": float(of_part.abs().sum(1).max()),
        "error_before": float((exact[chosen] - wanted[chosen]).abs().max()),
    }
    for way in WAYS:
        name = way.replace(" ", "_")
        row |= {f"change_{name}": found.change[way], f"error_{name}": found.error[way]}
    yield row | ({} if proven is None else {"proven": proven})


def _radius(network: attnc.Network, eps: float) -> Row:
    """Return the largest relative size up to which the prover shows that the error stays within eps, by bisection."""

    def holds(size: float) -> bool:
        bound = network.bound(weights_within=size, seconds=BOUND_SECONDS)
        return bound is not None and bound <= eps

    low, high = -10.0, -1.0
    if not holds(10**low):
        return {}
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(10**middle) else (low, middle)
    return {"proven_radius": 10**low}


def measured_radius(rows: Table, eps: float) -> float:
    """Return the size at which the strongest adversary brings the error to eps, between sizes along straight lines."""
    sizes, errors = np.log(rows.column("size")), np.log(rows.column("error_gradient"))
    above = np.flatnonzero(errors > math.log(eps))
    if not len(above):
        return float(np.exp(sizes[-1]))
    i = int(above[0])
    if i == 0:
        return float(np.exp(sizes[0]))
    share = (math.log(eps) - errors[i - 1]) / (errors[i] - errors[i - 1])
    return float(np.exp(sizes[i - 1] + share * (sizes[i] - sizes[i - 1])))


def judge(table: Table) -> Verdicts:
    whole = Table(row for row in table.where(part="all") if "change_gradient" in row)
    small = Table(row for row in whole if row["size"] <= SMALL)
    ratio, chance = (
        Span.of(small.column(f"change_{way}") / (small.column("size") * small.column("slope")))
        for way in ("gradient", "random")
    )
    weaker = whole.is_within("change_random", "change_gradient") and whole.is_within("error_random", "error_gradient")
    yield Verdict(
        "Small perturbations of the constructed weights change the output by the first-order prediction.",
        Status.CONSTANT.when(weaker and ratio.least > 0.8 and ratio.largest < 1.25),
        f"relative changes up to {SMALL:g}: the strongest adversary gives {ratio:.2f} times size·Σ|∂out/∂log w|, and "
        f"chance within the same limits {chance:.3f} times it. The adversary is never weaker than chance.",
        {**ratio.numbers("ratio"), **chance.numbers("random")},
        Constant(ratio.largest, "largest change by the adversary over size·Σ|∂out/∂log w|, up to the size 1e-6"),
    )
    first = {name: whole.where(subject=name)[0] for name in COLOURS}
    slopes = {name: row["slope"] for name, row in first.items()}
    yield Verdict(
        "Hard selection is sensitive: the harder, the more.",
        Status.HOLDS.when(slopes["hard clip"] > 3 * slopes["soft clip"]),
        f"amplification of an adversarial relative change: {listed('{0} {1:.3g}', slopes)}. It comes from the scores, "
        "whose size is β·r²: a hard head moves its boundaries, and between two anchors the slope of its output is β "
        "times a soft one's.",
        {name.replace(" ", "_"): value for name, value in slopes.items()},
    )
    shares = _shares(table)
    yield Verdict(
        "What makes the scores must be precise: anchors in the affine map, W_Q, W_K. Values are forgiving.",
        Status.HOLDS.when(all(shares[name]["W_K"] > shares[name]["W_V"] for name in ("hard clip", "partition"))),
        "change of the output by an adversary of one part, relative to one of all parts, at the size 1e-7: "
        + "; ".join(f"{name}: {listed('{0} {1:.2f}', parts)}" for name, parts in shares.items())
        + ".",
        {f"{name}_{part}".replace(" ", "_"): value for name, parts in shares.items() for part, value in parts.items()},
    )
    radii = table.having("proven_radius")
    proven = {row["subject"]: row["proven_radius"] for row in radii}
    seen = {name: measured_radius(whole.where(subject=name), EPS[name]) for name in COLOURS}
    is_sound = whole.having("proven").is_within("error_gradient", "proven")
    lag = {name: seen[name] / proven[name] for name in proven}
    yield Verdict(
        "The certificate's promise, error ≤ ε, is proven for all weights within a radius, and no adversary breaks it.",
        Status.HOLDS.when(is_sound and len(proven) == len(COLOURS) and min(lag.values()) >= 1),
        "relative radius, proven by the prover with weights as intervals, and measured as the size at which the "
        "adversary reaches ε: "
        + "; ".join(f"{name} {proven[name]:.1e} and {seen[name]:.1e}" for name in proven)
        + ". The composed network has two layers: its heads are proved one by one, and the errors of the first layer "
        "are followed through the second.",
        {
            **{f"proven_{name.replace(' ', '_')}": value for name, value in proven.items()},
            **{f"measured_{name.replace(' ', '_')}": value for name, value in seen.items()},
        },
    )
    last = Table(row for row in whole if row["size"] == LARGE)
    lost = {row["subject"]: row["error_gradient"] / EPS[row["subject"]] for row in last}
    by_chance = {row["subject"]: row["error_random"] / EPS[row["subject"]] for row in last}
    yield Verdict(
        "Imperfect weights as training makes them (relative 10⁻¹) destroy the construction.",
        Status.HOLDS.when(min(lost.values()) > 1),
        f"at the size {LARGE:g} the error is {listed('{1:.3g} ({0})', lost)} times ε by the adversary, and "
        f"{listed('{1:.3g} ({0})', by_chance)} times by chance.",
        {name.replace(" ", "_"): value for name, value in lost.items()},
    )


def _shares(table: Table) -> dict[str, dict[str, float]]:
    """Return, for every subject, the change by an adversary of each part relative to one of all, at the size 1e-7."""
    found: dict[str, dict[str, float]] = {}
    for name in COLOURS:
        rows = {row["part"]: row["change_gradient"] for row in table.where(subject=name, size=SIZES[2])}
        found[name] = {part: rows[part] / rows["all"] for part in PARTS[1:]}
    return found


def draw(table: Table, picture: drawing.Figure) -> None:
    axes = drawing.panels(picture, 4, width=5.6, height=4.4, rows=2)
    size = np.array(SIZES)
    axes[0].label(
        "all stored numbers, by an adversary and by chance", "relative size", "change of the output", log="xy"
    )
    axes[1].label("the error stays below a proven bound", "relative size", "error; bound", log="xy")
    axes[2].label("which part is attacked, size 1e-7", "", "change relative to all parts")
    axes[3].label("how far weights may be off for error ≤ ε", "", "relative radius", log="y")
    for (subject, colour), marker in zip(COLOURS.items(), drawing.MARKERS, strict=False):
        rows = Table(row for row in table.where(subject=subject, part="all") if "change_gradient" in row)
        axes[0].theory(size, size * rows[0]["slope"], "theory: first order" if subject == "hard clip" else "", colour)
        axes[0].points(rows, "size", "change_gradient", f"adversary, {subject}", colour, marker)
        axes[0].points(rows, "size", "change_random", f"chance, {subject}", colour, marker, size=6, is_open=True)
        axes[1].points(rows, "size", "error_gradient", f"adversary, {subject}", colour, marker)
        if len(rows.having("proven")):
            axes[1].law(rows.having("proven"), "size", "proven", f"proven, {subject}", colour)
    axes[0].axes.set_ylim(1e-9, 30)
    axes[1].axes.set_ylim(1e-4, 30)
    for (name, parts), colour in zip(_shares(table).items(), COLOURS.values(), strict=True):
        offset = 0.15 * (list(COLOURS).index(name) - 2)
        axes[2].axes.bar(np.arange(len(parts)) + offset, list(parts.values()), 0.14, color=colour, label=name)
    axes[2].axes.set_xticks(range(len(PARTS) - 1), labels=PARTS[1:])
    whole = Table(row for row in table.where(part="all") if "change_gradient" in row)
    for i, (name, colour) in enumerate(COLOURS.items()):
        seen = measured_radius(whole.where(subject=name), EPS[name])
        axes[3].measured([i], [seen], "measured, adversary" if i == 0 else "", colour)
        for row in table.where(subject=name).having("proven_radius"):
            axes[3].measured([i], [row["proven_radius"]], "proven" if i == 0 else "", colour, "s", 8, is_open=True)
    axes[3].axes.set_xticks(range(len(COLOURS)), labels=[f"{name}\nε = {EPS[name]:g}" for name in COLOURS])
    axes[3].axes.set_xlim(-0.5, len(COLOURS) - 0.5)


ABOUT = About(
    12,
    "Perturbation of the constructed weights",
    "How does the error grow when the constructed weights are perturbed, at random or by an adversary? How far may "
    "they be off so that the certificate's promise is still proven?",
    "To first order a relative change of size ε of every stored number w_j moves the output by ε·Σ_j|∂out/∂log w_j| "
    "at worst; ∂out/∂s_k = w_k(v_k − out), so it scales with the scores' size βr². With weights as intervals the "
    "prover bounds the error for all of them at once.",
    "the summary of 2504.19901: next checks 3 (robustness to approximation), critical path (W_K and W_Q must reflect "
    "the grid)",
)
