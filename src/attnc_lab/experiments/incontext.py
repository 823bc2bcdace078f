"""Experiment 14: gradient descent in context: one step, T steps, and two tasks one after the other."""

from __future__ import annotations

import math

import flint
import numpy as np

from attnc.incontext import Norms, Plan, Prompt, descent_program, plan_least_squares, run_recorded
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep

ROWS, FEATURES, STEPS = 40, 5, 60
START = np.zeros(FEATURES)
"""Every descent starts from these weights."""
HEADS = (1, 2, 3, 4)
EPSILONS = tuple(2.0**-k for k in range(5, 11))
"""The values of ε of the difference heads. Their scores are ε times residuals."""
BITS = 200
"""The precision of enclosures. Series of four pairs of heads cancel about 80 bits at the smallest ε."""
SMALL = 0.1
"""The share of rounding in a bound below which truncation is compared."""
COLOURS = dict(zip(HEADS, (drawing.ORANGE, drawing.YELLOW, drawing.GREEN, drawing.BLUE), strict=True))


def cells(profile: str) -> list[Cell]:
    steps = sweep(kind="step", heads=HEADS, eps=EPSILONS)
    return [*steps, *sweep(kind="depth", heads=HEADS), {"kind": "sequence"}]


def regression(seed: int, which: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, which])
    X = rng.normal(size=(ROWS, FEATURES))
    return X, X @ rng.normal(size=FEATURES) + 0.3 * rng.normal(size=ROWS)


def curvatures(X: np.ndarray) -> tuple[float, float]:
    """Return L and μ such that the eigenvalues of XᵀX lie in [μ, L], with a margin for rounding."""
    values = np.linalg.eigvalsh(X.T @ X)
    return float(values[-1] * (1 + 1e-12)), float(values[0] * (1 - 1e-12))


def plan_of(X: np.ndarray, y: np.ndarray, *, heads: int, steps: int, eps: float | None = None) -> Plan:
    """Plan plain gradient steps of size 1/L on ½|Xw − y|²."""
    L, mu = curvatures(X)
    norms = Norms(float(np.linalg.norm(X, axis=1).max()), float(np.linalg.norm(y)), L, mu)
    return plan_least_squares(
        Prompt(*X.shape), norms, (0.0,) * FEATURES, steps=steps, heads=heads, eps=eps, method="plain", eta=1 / L
    )


def exact_path(X: np.ndarray, y: np.ndarray, start: np.ndarray, steps: int) -> np.ndarray:
    L, _ = curvatures(X)
    path = [start]
    for _ in range(steps):
        path.append(path[-1] - X.T @ (X @ path[-1] - y) / L)
    return np.stack(path)


def attention_path(plans: list[Plan], tasks: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the iterates of one program that descends from 0 on one task after the other."""
    tokens = np.concatenate([plan.task.prompt.tokens(X, y) for plan, (X, y) in zip(plans, tasks, strict=True)])
    program, iterate = descent_program([plan.task for plan in plans]), plans[0].task.iterate
    return run_recorded(program, [START, tokens], START, iterate)[1]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "sequence":
        return _sequence(seed)
    X, y = regression(seed)
    L, mu = curvatures(X)
    steps = 1 if cell["kind"] == "step" else STEPS
    plan = plan_of(X, y, heads=cell["heads"], steps=steps, eps=cell.get("eps"))
    path, exact = attention_path([plan], [(X, y)]), exact_path(X, y, START, steps)
    if cell["kind"] == "step":
        error = np.linalg.norm(path[1] - exact[1])
        bounds = {"gradient_bound": plan.gradient.value, "enclosed_bound": _enclosed(plan, X, y, cell)}
        bounds["rounding"] = rounding(plan)
        return [{"error": error * L, **bounds, "gradient": np.linalg.norm(X.T @ y)}]
    best = np.linalg.lstsq(X, y, rcond=None)[0]
    local = [np.linalg.norm(path[t + 1] - exact_path(X, y, path[t], 1)[1]) for t in range(STEPS)]
    rho = 1 - mu / L
    return [
        {
            "step": t,
            "difference": np.linalg.norm(path[t] - exact[t]),
            "local": local[t - 1] if t else 0.0,
            "predicted": max(local) * (1 - rho**t) / (1 - rho),
            "to_best": np.linalg.norm(path[t] - best),
            "to_best_exact": np.linalg.norm(exact[t] - best),
        }
        for t in range(STEPS + 1)
    ]


def _enclosed(plan: Plan, X: np.ndarray, y: np.ndarray, cell: Cell) -> float:
    """Return a bound of the error of the first gradient, from the residuals −y_i at hand.

    In exact arithmetic the error is that of the differences, |Σ (D(r_i) − r_i)·x_i|. It is enclosed. Rounding is
    bounded as for all prompts of the same norms.
    """
    m, eps = cell["heads"], flint.arb(cell["eps"])
    with flint.ctx.workprec(BITS):
        size = flint.arb(math.factorial(m)) ** 2
        weights = {j: 2 * (-1) ** (j + 1) * size / (math.factorial(m - j) * math.factorial(m + j))
                   for j in range(1, m + 1)}  # fmt: skip
        off = [flint.arb(v) - sum(c * (j * eps * v).sinh() / (j * eps) for j, c in weights.items()) for v in y.tolist()]
        rows = flint.arb_mat(ROWS, FEATURES, [flint.arb(v) for v in X.ravel().tolist()])
        exact = (rows.transpose() * flint.arb_mat(ROWS, 1, off)).entries()
        truncation = float(sum((v * v for v in exact), flint.arb(0)).sqrt().upper())
    return truncation * (1 + 1e-15) + rounding(plan)


def rounding(plan: Plan) -> float:
    """Return the terms of the bound of a gradient other than truncation: the sink and rounding."""
    return math.fsum(term.value for term in plan.gradient.terms if term.name != "truncation")


def _sequence(seed: int) -> list[Row]:
    """Measure one program that makes STEPS steps on the first task, then STEPS steps on the second from there."""
    tasks = [regression(seed, which) for which in (0, 1)]
    path = attention_path([plan_of(X, y, heads=4, steps=STEPS) for X, y in tasks], tasks)
    exact = exact_path(*tasks[0], START, STEPS)
    exact = np.concatenate([exact, exact_path(*tasks[1], exact[-1], STEPS)[1:]])
    best = [np.linalg.lstsq(X, y, rcond=None)[0] for X, y in tasks]
    return [
        {
            "step": t,
            "difference": np.linalg.norm(path[t] - exact[t]),
            "to_first": np.linalg.norm(path[t] - best[0]),
            "to_second": np.linalg.norm(path[t] - best[1]),
        }
        for t in range(len(exact))
    ]


def judge(table: Table) -> Verdicts:
    single = table.where(kind="step")
    laws = {heads: single.where(heads=heads).power("eps", "error") for heads in HEADS[:2]}
    exact = Table(row for row in single if row["rounding"] < SMALL * row["enclosed_bound"])
    slack, rounded = (Span.of(rows.ratio("enclosed_bound", "error")) for rows in (exact, single))
    loose = Span.of(exact.ratio("gradient_bound", "error"))
    is_within = single.is_within("error", "enclosed_bound") and single.is_within("error", "gradient_bound")
    yield Verdict(
        "One attention layer makes one step of gradient descent.",
        Status.CONSTANT.when(is_within and abs(laws[1].exponent - 2) < 0.3),
        f"the error of the gradient is below its proven bound: O(ε²) with one pair of heads (exponent {laws[1]}) and "
        f"O(ε⁴) with two ({laws[2]}), whose leading terms cancel. With the residuals at hand the bound is "
        f"{slack:.3g} times the error where less than {SMALL:.0%} of it is rounding, and at most "
        f"{rounded.largest:.3g} times it elsewhere. The bound for every prompt of the same norms is {loose:.2g} times "
        "the error there: it assumes that every residual is as large as all of them together.",
        {"one_head": laws[1].exponent, "two_heads": laws[2].exponent, **slack.numbers("slack")},
        Constant(single.ratio("error", "enclosed_bound").max(), "error of the gradient over its bound at hand"),
    )
    depth = table.where(kind="depth")
    worst = {heads: depth.where(heads=heads).column("difference").max() for heads in HEADS}
    later = depth.above("step", 0)
    ratio = (later.column("difference") / np.maximum(later.column("predicted"), 1e-300)).max()
    yield Verdict(
        "Depth T: T layers make T steps, and errors do not accumulate (an open question of the paper: stability of "
        "stacked steps).",
        Status.HOLDS.when(ratio <= 1.0001),
        f"over {STEPS} steps the iterates stay within {listed('{1:.1e} ({0})', worst)} of exact gradient descent with "
        f"1 … 4 pairs of heads: {ratio:.2f} of δ(1−ρ^T)/(1−ρ) at most, δ the largest error of a step.",
        {"ratio": ratio, **{f"heads_{heads}": value for heads, value in worst.items()}},
    )
    sequence = table.where(kind="sequence")
    drift = sequence.column("difference").max()
    middle, end = sequence.where(step=STEPS)[0], sequence.where(step=2 * STEPS)[0]
    yield Verdict(
        "Two tasks in sequence: one program descends on the first, then on the second.",
        Status.HOLDS.when(drift < 1e-6 and end["to_second"] < middle["to_second"]),
        f"the whole path is within {drift:.1e} of exact gradient descent on both; the distance to the first optimum is "
        f"{middle['to_first']:.1e} after {STEPS} steps, to the second {end['to_second']:.1e} after {2 * STEPS}.",
        {"drift": drift, "to_first": middle["to_first"], "to_second": end["to_second"]},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, middle, right = drawing.panels(picture, 3, width=4.7, height=4.1)
    left.label("error of one gradient", "ε, score per residual", "|gradient − exact|", log="xy")
    middle.label("T steps against exact gradient descent", "step T", "|w_T − w_T exact|", log="y")
    for heads, marker in zip(HEADS, "os^D", strict=True):
        rows, colour = table.where(kind="step", heads=heads), COLOURS[heads]
        left.points(rows, "eps", "error", f"measured, {heads} pair{'s' * (heads > 1)} of heads", colour, marker)
        left.law(rows, "eps", "gradient_bound", "proven, all prompts" if heads == 1 else "", colour)
        left.law(rows, "eps", "enclosed_bound", "proven, this prompt" if heads == 1 else "", colour, ":")
        path = table.where(kind="depth", heads=heads).above("step", 0)
        middle.points(Table(path[::3]), "step", "difference", f"measured, {heads}", colour, marker, size=4)
        middle.law(path, "step", "predicted", "theory: δ(1−ρ^T)/(1−ρ)" if heads == 1 else "", colour)
    rows = table.where(kind="sequence")
    right.label("two tasks in sequence, one program", "step", "distance", log="y")
    right.line(rows, "step", "to_first", "to the first optimum", drawing.BLUE)
    right.line(rows, "step", "to_second", "to the second optimum", drawing.GREEN)
    right.line(rows.above("step", 0), "step", "difference", "to exact gradient descent", drawing.ORANGE)
    right.axes.axvline(STEPS, color=drawing.GREY, ls=":", lw=1, label="second task begins")


ABOUT = About(
    14,
    "Gradient descent in context",
    "How exact is a step of gradient descent made by attention, how do errors add up over T layers, and "
    "over two tasks?",
    "Difference heads on scores εr_i give the gradient up to O(ε²), O(ε^2m) with m pairs; with "
    "contraction ρ the error over T steps is at most δ(1−ρ^T)/(1−ρ), bounded for every T.",
    "the summary of 2504.15956: key results (in-context gradient descent), open question on multi-step and "
    "task composition",
)
