"""Experiment 22: planted failures, and whether their signatures are named; drift between anchors; broken promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import attnc
from attnc.incontext import Norms, Prompt, plan_least_squares
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.experiments.incontext import FEATURES, attention_path, curvatures, regression
from attnc_lab.measuring import middles, unproved

if TYPE_CHECKING:
    from torch import Tensor, nn

P = 24
"""Number of levels of a head that should snap to them."""
BETAS = tuple(float(f"{beta:.4g}") for beta in np.logspace(-0.6, 2.4, 16))
"""The values of βΔ² at which drift is measured."""
OFF = 0.1
"""An output is off its level if it is farther than this share of the distance between two levels."""
HARD = 60.0
RATIOS = (0.5, 1.0, 1.5, 1.9, 2.1, 2.5, 3.0)
"""The curvature of a prompt, divided by the largest curvature that was promised when the steps were planned."""
BEGIN, END = 5, 10
"""Growth is measured from the first of these steps to the second: later, the theorem's range is left."""
HEALTHY = "healthy"
FAULTS = (
    "diffuse attention",
    "drift between anchors",
    "boundary artefacts",
    "seams between heads",
    "oscillation",
    "underflow",
    HEALTHY,
)
SHORT = ("diffuse", "drift", "ends", "seams", "oscillation", "underflow", HEALTHY)


class Planted(NamedTuple):
    """A fault: the signature that should be named, whether it is in context, and a function that diagnoses it."""

    wanted: str
    in_context: bool
    diagnosed: Callable[[], attnc.Diagnosis]


def on_line(text: str, points: int, beta: float, eps: float) -> attnc.Diagnosis:
    """Diagnose a head with one value for each of some anchors on [−3, 3]."""
    target = attnc.as_target(text, {"x": (-3.0, 3.0)})
    built = attnc.constructions.max_affine(target, points_per_axis=points, beta=beta)
    return attnc.diagnose(unproved(target, built, eps))


def of_seams(beta: float) -> attnc.Diagnosis:
    """Diagnose four heads of eight anchors, with one sentinel on each side of a head."""
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))
    built = attnc.constructions.truncated_linear_heads(target, num_heads=4, num_tokens=10, beta=beta)
    return attnc.diagnose(unproved(target, built, 0.3 / 31), target)


def in_float32(anchors: int) -> attnc.Diagnosis:
    """Diagnose a head in float32 whose scores are rounded by about as much as they differ."""
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))
    with np.errstate(all="ignore"):  # the theorem's bound overflows: it is vacuous there
        built = attnc.constructions.truncated_linear(target, num_anchors=anchors, beta=HARD, dtype="float32")
    points = np.random.default_rng(0).random((300, 1))
    return attnc.diagnose(unproved(target, built, 0.55 / (anchors - 1)), target, points=points)


def examples_of(
    where: np.ndarray, f: Callable[[np.ndarray], np.ndarray], beta: float, *, naive: bool = False
) -> nn.Module:
    """Return attention over the examples of a prompt, scores −β(x − x_i)², as a module that shows its weights.

    A naive softmax does not subtract the largest score.
    """
    import torch
    from torch import nn

    class Examples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at, self.y = nn.Parameter(torch.tensor(where)), torch.tensor(f(where))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = -beta * (x - self.at) ** 2
            if naive:
                powers = torch.exp(scores - 800.0)
                weights = powers / powers.sum(-1, keepdim=True)
            else:
                weights = torch.softmax(scores, -1)
            return (weights @ self.y)[:, None], weights

    return Examples()


def in_context(count: int, beta: float, eps: float, *, end: float = 3.0, naive: bool = False) -> attnc.Diagnosis:
    """Diagnose a prompt of examples of sin(2x) on [−3, end], for queries on [−3, 3].

    β is in units of the distance of the examples.
    """
    spacing = (end + 3.0) / count
    module = examples_of(middles(-3, end, count), lambda x: np.sin(2 * x), beta / spacing**2, naive=naive)
    return attnc.diagnose(module, attnc.as_target("sin(2*x)", {"x": (-3.0, 3.0)}), eps=eps)


def levels(beta: float) -> tuple[nn.Module, Callable[[np.ndarray], np.ndarray], np.ndarray]:
    """Return a head that should snap to levels that go up and down, these levels as a function, and points.

    The points are the inner 80 % of each cell.
    """
    h = 6.0 / P
    heights = np.sin(4 * middles(-3, 3, P)).round(1)

    def snapped(x: np.ndarray) -> np.ndarray:
        return heights[np.clip(np.floor((np.asarray(x).reshape(-1) + 3) / h), 0, P - 1).astype(int)]

    x = np.linspace(-3, 3, 4001)[1:-1]
    inner = np.abs((x + 3) / h % 1 - 0.5) < 0.4
    return examples_of(middles(-3, 3, P), snapped, beta / h**2), snapped, x[inner][:, None]


def snapping(beta: float) -> attnc.Diagnosis:
    module, snapped, points = levels(beta)
    return attnc.diagnose(module, snapped, eps=0.05, points=points)


PLANTED: dict[str, Planted] = {
    **{
        f"sin({w}x), βh² = {beta:g}": Planted(FAULTS[0], False, partial(on_line, f"sin({w}*x)", 32, beta, 0.1 * w))
        for w in (2, 4)
        for beta in (0.01, 0.03, 0.1)
    },
    **{f"levels, βh² = {beta:g}": Planted(FAULTS[1], False, partial(snapping, beta)) for beta in (1.0, 1.4, 2.0)},
    **{
        f"{text}, βh² = {beta:g}": Planted(
            FAULTS[2], False, partial(on_line, text, 24, beta, 0.03 if text == "x" else 0.13)
        )
        for text, betas in (("x", (0.5, 1.0)), ("sin(x)", (0.7, 1.0)))
        for beta in betas
    },
    **{f"four heads, βΔ² = {beta:g}": Planted(FAULTS[3], False, partial(of_seams, beta)) for beta in (0.75, 1.0, 1.25)},
    **{
        f"sin({w}x), 16 anchors": Planted(FAULTS[4], False, partial(on_line, f"sin({w}*x)", 16, HARD, 0.1))
        for w in (2, 4, 8)
    },
    **{f"float32, {p:,} anchors": Planted(FAULTS[5], False, partial(in_float32, p)) for p in (8192, 16_384)},
    **{
        f"sin({w}x), 96 anchors": Planted(HEALTHY, False, partial(on_line, f"sin({w}*x)", 96, HARD, 0.04 * w))
        for w in (1, 2, 4)
    },
    "four heads, βΔ² = 2.75": Planted(HEALTHY, False, partial(of_seams, 2.75)),
    **{
        f"prompt of 64, βh² = {beta:g}": Planted(FAULTS[0], True, partial(in_context, 64, beta, 0.12))
        for beta in (0.003, 0.01)
    },
    "prompt of 8": Planted(FAULTS[4], True, partial(in_context, 8, HARD, 0.12)),
    "prompt of 16": Planted(FAULTS[4], True, partial(in_context, 16, HARD, 0.12)),
    "prompt with a gap": Planted(FAULTS[4], True, partial(in_context, 64, HARD, 0.12, end=1.0)),
    "prompt, softmax without shift": Planted(FAULTS[5], True, partial(in_context, 64, HARD, 0.12, naive=True)),
    "prompt of 64": Planted(HEALTHY, True, partial(in_context, 64, HARD, 0.12)),
    "prompt of 256": Planted(HEALTHY, True, partial(in_context, 256, HARD, 0.12)),
}


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="planted", case=PLANTED),
        *sweep(kind="drift", beta=BETAS),
        *sweep(kind="promise", ratio=RATIOS),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "planted":
        planted = PLANTED[cell["case"]]
        found = planted.diagnosed()
        named = [symptom.name for symptom in found.symptoms] or [HEALTHY]
        context = "in context" if planted.in_context else "constructed"
        return [{"wanted": planted.wanted, "named": named[0], "all": "; ".join(named), "where": context}]
    if cell["kind"] == "drift":
        return [{"off": _share_off(cell["beta"]), "predicted": min(1 - 2 * OFF, math.log(1 / OFF - 1) / cell["beta"])}]
    return [_broken_promise(cell["ratio"], seed)]


def _share_off(beta: float) -> float:
    """Return the share of inputs at which a head that clips is off every level, between its inner anchors."""
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, float(P - 1), box=(0.0, float(P - 1)))
    built = attnc.constructions.truncated_linear(target, num_anchors=P, beta=beta)
    x = middles(P // 4, P - 1 - P // 4, 40_000)
    out = np.ravel(built.program(x[:, None]))
    return float((np.abs(out - out.round()) > OFF).mean())


def _broken_promise(ratio: float, seed: int) -> Row:
    """Make gradient steps in context on a prompt whose curvature is `ratio` times the promised one."""
    X, y = regression(seed)
    L, mu = curvatures(X)
    promised = L / ratio
    norms = Norms(float(np.linalg.norm(X, axis=1).max()), float(np.linalg.norm(y)), promised, min(mu, promised))
    plan = plan_least_squares(
        Prompt(*X.shape), norms, (0.0,) * FEATURES, steps=END, heads=4, method="plain", eta=1 / promised
    )
    best = np.linalg.lstsq(X, y, rcond=None)[0]
    errors = np.linalg.norm(attention_path([plan], [(X, y)]) - best, axis=1)
    growth = (errors[END] / errors[BEGIN]) ** (1 / (END - BEGIN))
    slopes = np.abs(1 - np.linalg.eigvalsh(X.T @ X) / promised)
    return {"growth": growth, "predicted": slopes.max()}


def confusion(table: Table) -> np.ndarray:
    """Return how often each fault was planted (rows) and each signature was named first (columns)."""
    found = np.zeros((len(FAULTS), len(FAULTS)), int)
    for row in table.where(kind="planted"):
        found[FAULTS.index(row["wanted"]), FAULTS.index(row["named"])] += 1
    return found


def judge(table: Table) -> Verdicts:
    for where, faults in (
        ("constructed", "constructed heads"),
        ("in context", "attention over the examples of a prompt"),
    ):
        rows = table.where(kind="planted", where=where)
        wrong = {row["case"]: row["all"] for row in rows if row["wanted"] != row["named"]}
        planted = Table(row for row in rows if row["wanted"] != HEALTHY)
        false = [row["case"] for row in rows if row["wanted"] == HEALTHY != row["named"]]
        yield Verdict(
            f"The failure signatures tell the failures apart: {faults}.",
            Status.HOLDS.when(not wrong),
            f"{len(rows) - len(wrong)} of {len(rows)} cases are named as planted, among them {len(planted)} failures "
            f"of {len(set(planted.distinct('wanted')))} kinds; {len(false)} healthy ones are named as failures"
            + (f"; not named as planted: {listed('{0} ({1})', wrong)}." if wrong else "."),
            {"cases": len(rows), "wrong": len(wrong)},
        )
    drift = table.where(kind="drift")
    sharp = drift.above("beta", 4.0)
    ratio = Span.of(sharp.ratio("off", "predicted"))
    yield Verdict(
        "Interpolation drift: between levels the output passes smoothly, on a share of the inputs that falls like 1/β.",
        Status.CONSTANT.when(ratio.least > 0.95 and ratio.largest < 1.05),
        f"for βΔ² > 4 the share of inputs whose output is more than {OFF:g}·Δ off every level is {ratio:.3f} times "
        f"ln {1 / OFF - 1:.0f}/(βΔ²); it is {drift[0]['off']:.2f} at βΔ² = {drift[0]['beta']:g} and "
        f"{drift[-1]['off']:.3f} at {drift[-1]['beta']:g}.",
        ratio.numbers("ratio"),
        Constant(ratio.largest, "share of inputs off every level over ln 9/(βΔ²), for βΔ² > 4"),
    )
    promise = table.where(kind="promise")
    off = Span.of(promise.ratio("growth", "predicted"))
    diverging = promise.above("ratio", 2.0)
    yield Verdict(
        "In context, a prompt may break the promise with which the steps were planned: beyond twice the promised "
        "curvature they diverge.",
        Status.HOLDS.when((diverging.column("growth") > 1).all() and off.least > 0.94 and off.largest < 1.06),
        f"the distance to the optimum changes by {off:.3f} times max|1 − λ/L| per step, L the promised curvature and λ "
        f"the prompt's; it grows {diverging[0]['growth']:.2f}-fold at λ = {diverging[0]['ratio']:g}·L. A step size "
        "that must diverge for what was promised is refused when it is planned.",
        off.numbers("ratio"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, middle, right = drawing.panels(picture, 3, width=5.0, height=4.3)
    counts = confusion(table)
    left.label("planted failures (rows) and their names", "named first", "planted")
    left.axes.grid(False)
    left.axes.imshow(counts > 0, cmap="Blues", vmin=0, vmax=2.5, aspect="auto")
    for (i, j), count in np.ndenumerate(counts):
        if count:
            left.axes.text(j, i, str(count), ha="center", va="center", color=drawing.INK, fontsize=10)
    left.axes.set_xticks(range(len(SHORT)), labels=SHORT, rotation=35, ha="right")
    left.axes.set_yticks(range(len(SHORT)), labels=SHORT)
    middle.label("drift between levels", "βΔ²", "share of inputs off every level", log="xy")
    drift = table.where(kind="drift")
    middle.law(drift, "beta", "predicted", "theory: ln 9/(βΔ²), at most 0.8")
    middle.points(drift, "beta", "off", "measured, constructed head", drawing.BLUE)
    right.label("a prompt that breaks its promise", "curvature / promised curvature", "growth of the error per step")
    promise = table.where(kind="promise")
    right.law(promise, "ratio", "predicted", "theory: max|1 − λ/L|")
    right.points(promise, "ratio", "growth", "measured, attention", drawing.ORANGE)
    right.axes.axhline(1, color=drawing.GREY, lw=1, ls=":", label="no progress")
    right.axes.axvline(1, color=drawing.FAINT, lw=2, zorder=0, label="as promised")


ABOUT = About(
    22,
    "Failures and their signatures",
    "Are planted failures named by their signatures, in constructed heads and in context? How far does the output "
    "drift between anchors? What happens if a prompt breaks its promise?",
    "Between two levels out = Δ·σ(2βΔ·s), s from the middle: off both by more than 0.1Δ where |s| < ln 9/(2βΔ), a "
    "share ln 9/(βΔ²). A gradient step of size 1/L changes the error by max|1 − λ/L|.",
    "the summary of 2504.15956: failure signatures (uniform attention, boundary artefacts, interpolation drift); the "
    "summary of 2504.19901: failure signatures (fuzzy partitioning, oscillations)",
)
