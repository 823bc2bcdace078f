"""Experiment 1: the error of one head that clips, against its number of anchors p."""

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
    Span,
    Status,
    Table,
    Verdict,
    Verdicts,
    sweep,
)
from attnc_lab.measuring import sizes_of

TOKENS, WIDTH, END, NORM = 50, 10, 25.0, 15.0
"""The papers' setting: 50 tokens of width 10, clipped to ±25. w·x has a standard deviation of 15."""
HARD, SOFT = 60.0, 2.72
"""β in units of Δ⁻²: one that is nearly one-hot, and the one with the smallest error."""
SOFT_ERROR = 0.062
"""The largest error at the best temperature, in spacings Δ."""
SIZES = {"papers": (60, 70, 80, 90, 100, 110, 120), "decades": (8, 16, 32, 64, 128, 256, 512, 1024)}
"""The numbers of anchors p: those of the papers, and two decades."""


def target_of(seed: int, tokens: int = TOKENS, width: int = WIDTH) -> attnc.TruncatedLinear:
    """Return clip(w_i·x_i + t_i, −25, 25) for each of the tokens."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(tokens, width))
    W *= NORM / np.linalg.norm(W, axis=1, keepdims=True)
    return attnc.TruncatedLinear(W, rng.normal(size=tokens), -END, END, box=(-6.0, 6.0))


def sampled_inputs(target: attnc.TruncatedLinear, count: int, seed: int) -> np.ndarray:
    """Return inputs whose w·x + t cover [−1.2, 1.2]·25 evenly."""
    n = len(target.W)
    return inputs_at(target, np.linspace(-1.2 * END, 1.2 * END, count * n).reshape(count, n), seed)


def inputs_at(target: attnc.TruncatedLinear, u: np.ndarray, seed: int) -> np.ndarray:
    """Return inputs with these w·x + t. Their parts orthogonal to w are random."""
    rest = np.random.default_rng([seed, 1]).normal(size=(*u.shape, target.W.shape[1]))
    square = (target.W**2).sum(axis=1)
    rest -= np.einsum("bnd,nd->bn", rest, target.W)[..., None] * target.W / square[:, None]
    return rest + ((u - target.t) / square)[..., None] * target.W


STARTS = ("random", "construction")
"""The start of training: random weights, or the construction at the best temperature."""
TRAINING_RATES = {"random": (3e-3, 1e-2, 3e-2, 1e-1), "construction": (1e-5, 1e-4, 1e-3, 1e-2)}
"""The learning rates that are tried, by the start of training."""
BUDGETS = {"quick": (3000, 60), "full": (8000, 120)}
"""Steps of Adam, and second-order steps after them."""
SEEDS = 5
LEARNED = {"quick": (8, 16, 32, 64), "full": (8, 16, 32, 64, 128)}
"""The numbers of anchors of heads that are trained on one number, clipped to [−1, 1]."""
TOKEN_STEPS = {"quick": 800, "full": 8000}
"""The number of steps of Adam for the papers' whole setting: 50 tokens of width 10."""


def cells(profile: str) -> list[Cell]:
    steps, second_order = BUDGETS[profile]
    trained = sweep(kind="trained", setting="decades", p=LEARNED[profile], start=STARTS, steps=steps)
    whole = sweep(kind="trained", setting="papers", p=(60, 120), start="random", steps=TOKEN_STEPS[profile])
    return [
        *({**cell, "second_order": second_order} for cell in reversed(trained)),
        *({**cell, "second_order": 0} for cell in whole),
        *(cell for name, p in SIZES.items() for cell in sweep(kind=("hard", "soft"), setting=name, p=p)),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "trained":
        return _trained_tokens(cell, seed) if cell["setting"] == "papers" else train_clip(cell, 1, cell["p"], seed)
    tokens = TOKENS if cell["setting"] == "papers" else 8
    target, p = target_of(seed, tokens), cell["p"]
    built = attnc.constructions.truncated_linear(target, num_anchors=p, beta=HARD if cell["kind"] == "hard" else SOFT)
    inputs = sampled_inputs(target, max(400, 60 * p // tokens), seed)
    errors = built.program(inputs) - target(inputs.reshape(len(inputs), -1))
    inside = np.abs(target.linear(inputs.reshape(len(inputs), -1))) <= END
    return [{"max_error": np.abs(errors).max(), "mse": (errors[inside] ** 2).mean(), **sizes_of(built)}]


def train_clip(cell: Cell, heads: int, keys: int, seed: int) -> list[Row]:
    """Train heads with all weights free to clip a number to [−1, 1], on [−1.2, 1.2]. Errors are scaled to ±25.

    Adam at the best of four learning rates, in float64, then second-order steps; a row for every seed.
    """
    import torch

    from attnc_lab.fitting import Batch, Budget, fit
    from attnc_lab.models import Heads

    def make() -> Heads:
        made = Heads(1, keys, num_heads=heads, d_token=3)
        return made if cell["start"] == "random" else made.construct_clip(-1, 1, SOFT)

    def draw(shape: tuple[int, int], generator: torch.Generator) -> Batch:
        u = 2.4 * torch.rand((*shape, 1), generator=generator, dtype=torch.float64) - 1.2
        return u, u.clamp(-1, 1)

    u = torch.linspace(-1.2, 1.2, 8001, dtype=torch.float64)[:, None]
    rates = TRAINING_RATES[cell["start"]]
    points = 1000 if cell["second_order"] else 0
    budget = Budget(cell["steps"], SEEDS, rates, 160, cell["second_order"], max(points, 6 * keys * heads))
    held = draw((1, 1000), torch.Generator().manual_seed(seed + 77))
    fitted = fit(make, draw, (held[0][0], held[1][0]), budget, seed=seed)
    rows: list[Row] = []
    for trial, model in enumerate(fitted.models):
        with torch.no_grad():
            errors = END * (model(u) - u.clamp(-1, 1))[:, 0].numpy()
        inside = errors[(np.abs(u[:, 0].numpy()) <= 1)]
        rows.append({**fitted.row(trial), "max_error": np.abs(errors).max(), "mse": (inside**2).mean()})
    return rows


def _trained_tokens(cell: Cell, seed: int) -> list[Row]:
    """Train the papers' whole setting: 50 tokens of width 10, each with its own w and t, which are trained as well."""
    import torch

    from attnc_lab.fitting import Batch, Budget, fit
    from attnc_lab.models import ClippedTokens

    target = target_of(seed, TOKENS)
    W, t = torch.tensor(target.W) / END, torch.tensor(target.t) / END

    def draw(shape: tuple[int, int], generator: torch.Generator) -> Batch:
        x = torch.randn((*shape, TOKENS, WIDTH), generator=generator, dtype=torch.float64)
        return x, (torch.einsum("...nd,nd->...n", x, W) + t).clamp(-1, 1)

    held = draw((1, 40), torch.Generator().manual_seed(seed + 77))
    fitted = fit(
        lambda: ClippedTokens(TOKENS, WIDTH, cell["p"]),
        draw,
        (held[0][0], held[1][0]),
        Budget(cell["steps"], SEEDS, (1e-2, 3e-2, 1e-1), 4),
        seed=seed,
    )
    inputs = sampled_inputs(target, 80, seed)
    inside = np.abs(target.linear(inputs.reshape(len(inputs), -1))) <= END
    rows: list[Row] = []
    for trial, model in enumerate(fitted.models):
        with torch.no_grad():
            errors = END * model(torch.tensor(inputs)).numpy() - target(inputs.reshape(len(inputs), -1))
        rows.append({**fitted.row(trial), "max_error": np.abs(errors).max(), "mse": (errors[inside] ** 2).mean()})
    return rows


def fits(table: Table, kind: str, setting: str) -> tuple[Power, Power]:
    """Fit the largest error and the MSE as powers of the number of intervals p − 1."""
    rows = table.where(kind=kind, setting=setting)
    return rows.power("p", "max_error", -1), rows.power("p", "mse", -1)


def judge(table: Table) -> Verdicts:
    for kind, constant, name in (("hard", 0.5, "hard selection"), ("soft", SOFT_ERROR, "the best temperature")):
        most, square = fits(table, kind, "decades")
        papers_most, papers_square = fits(table, kind, "papers")
        rows = table.where(kind=kind)
        measured = (rows.column("max_error") / (2 * END / (rows.column("p") - 1))).max()
        exponents = {"max_exponent": most.exponent, "mse_exponent": square.exponent}
        papers = {"papers_max_exponent": papers_most.exponent, "papers_mse_exponent": papers_square.exponent}
        yield Verdict(
            f"One head with p anchors clips with error O(1/p): constructed, {name}.",
            Status.CONSTANT.when(abs(most.exponent + 1) < 0.03 and abs(square.exponent + 2) < 0.06),
            f"max error = {measured:.3f}·Δ (theory: at most {constant:g}·Δ), Δ = |b−a|/(p−1); exponents {most} for the "
            f"max error and {square} for the MSE over two decades of p, {papers_most} and {papers_square} for the "
            "papers' p = 60 … 120.",
            {"constant": measured, **exponents, **papers},
            Constant(measured, "largest error over Δ = |b−a|/(p−1)"),
        )
    constructed = table.where(kind="soft", setting="decades").power("p", "mse", -1)
    for start in STARTS:
        rows = table.where(kind="trained", setting="decades", start=start)
        by_p = {p: Interval.of(rows.where(p=p).column("mse")) for p in sorted(rows.distinct("p"))}
        law = rows.power("p", "mse", -1)
        excess = {p: found.mean / constructed(np.array([p - 1.0]))[0] for p, found in by_p.items()}
        last, best = max(by_p), rows.where(p=max(by_p)).column("mse").min()
        yield Verdict(
            f"A trained head has an MSE below that of the best construction, which is O(p⁻²): start {start}.",
            Status.HOLDS.when(max(excess.values()) <= 1, Status.NOT_REACHED),
            f"the MSE, geometric mean of {SEEDS} seeds, goes from {by_p[min(by_p)]:.2g} at p = "
            f"{min(by_p)} to {by_p[last]:.2g} at p = {last} (95 % intervals over seeds), exponent {law} in "
            f"p − 1 over all runs; that is {min(excess.values()):.2g} to {max(excess.values()):.2g} times the MSE of "
            "the best construction. The worst seed has "
            f"{rows.where(p=last).column('mse').max():.2g} at p = {last}. The best of four learning rates, chosen for "
            f"each p, is {Span.of(rows.column('rate')):g} of {Span.of(TRAINING_RATES[start]):g}, and "
            f"{rows[0]['second_order']} second-order steps followed.",
            {"mse_exponent": law.exponent, "excess": max(excess.values()), **by_p[last].numbers("mse")},
            effort=Effort(int(rows[0]["steps"]), SEEDS, best, f"MSE at p = {last}:"),
        )
    whole, soft = (table.where(kind=kind, setting="papers") for kind in ("trained", "soft"))
    found = {p: Interval.of(whole.where(p=p).column("mse")) for p in whole.distinct("p")}
    built = {p: soft.where(p=p)[0]["mse"] for p in found}
    yield Verdict(
        "In the papers' setting, 50 tokens of width 10, a trained head is as accurate as the construction.",
        Status.HOLDS.when(all(found[p].low <= 2 * built[p] for p in found), Status.NOT_REACHED),
        "the MSE is "
        + "; ".join(f"{found[p]:.2g} with p = {p}, constructed {built[p]:.1g}" for p in found)
        + ". Here each of the 50 tokens has its own w and t to learn, 550 numbers besides the head.",
        {f"mse_{p}": interval.mean for p, interval in found.items()},
        effort=Effort(int(whole[0]["steps"]), SEEDS, whole.column("mse").min(), "MSE"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2, width=5.0, height=4.0)
    p = np.array([7.0, 1200.0])
    spacing = 2 * END / (p - 1)
    law = table.where(kind="soft", setting="decades").power("p", "mse", -1)
    left.label("largest error", "anchors p", "largest error", log="xy")
    left.theory(p, 0.5 * spacing, "theory: Δ/2")
    left.theory(p, SOFT_ERROR * spacing, "theory: 0.062·Δ", drawing.BLUE)
    right.label("mean squared error", "anchors p", "mean squared error", log="xy")
    right.theory(p, spacing**2 / 12, "theory: Δ²/12")
    right.theory(p, law.factor * (p - 1) ** -2.0, "slope −2 through the soft ones", drawing.BLUE)
    for panel, column in ((left, "max_error"), (right, "mse")):
        for kind, name, colour, marker in (
            ("hard", "constructed, hard (βΔ² = 60)", drawing.INK, "s"),
            ("soft", "constructed, βΔ² = 2.72", drawing.BLUE, "o"),
        ):
            panel.points(table.where(kind=kind), "p", column, name, colour, marker)
        for setting, start, name, colour in (
            ("decades", "random", "trained, random start", drawing.ORANGE),
            ("decades", "construction", "trained, from the construction", drawing.GREEN),
            ("papers", "random", "trained, 50 tokens of width 10", drawing.PURPLE),
        ):
            panel.seeds(table.where(kind="trained", setting=setting, start=start), "p", column, name, colour, "^")
        panel.axes.axvspan(60, 120, color=drawing.FAINT, alpha=0.45, lw=0, label="the papers' range")
        panel.whole_ticks((10, 30, 100, 300, 1000))


ABOUT = About(
    1,
    "Rate in the number of anchors",
    "Does one head that clips a linear function have an error of O(1/p), and its MSE of O(1/p²)? Does a trained one?",
    "With p anchors Δ = |b−a|/(p−1) apart: |out − clip(w·x+t, a, b)| ≤ Δ/2 for hard selection, MSE Δ²/12; "
    "0.062·Δ at βΔ² = 2.72. So slopes −1 and −2.",
    "the summary of 2504.15956: key results (O(1/p)); first experiments 1 (MSE against p); setting d = 10, "
    "n = 50, range ±25",
)
