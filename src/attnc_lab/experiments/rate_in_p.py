"""Experiment 1: the error of one head that clips, against its number of anchors p."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Power, Row, Status, Table, Verdict, Verdicts, sweep
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


def cells(profile: str) -> list[Cell]:
    trials, steps = (2, 500) if profile == "quick" else (5, 4000)
    learned = {"papers": (60, 80, 100, 120), "decades": (8, 32, 128, 512)} if profile == "quick" else SIZES
    trained = {"trial": range(trials), "steps": steps}
    return [
        *(cell for name, p in learned.items() for cell in sweep(kind="trained", setting=name, p=p, **trained)),
        *(cell for name, p in SIZES.items() for cell in sweep(kind=("hard", "soft"), setting=name, p=p)),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    tokens = TOKENS if cell["setting"] == "papers" else 8
    target, p = target_of(seed, tokens), cell["p"]
    if cell["kind"] == "trained":
        inputs, errors, _ = train_clip(target, p, 1, 1600 // tokens, cell, seed)
        return [_errors(target, inputs, errors)]
    built = attnc.constructions.truncated_linear(target, num_anchors=p, beta=HARD if cell["kind"] == "hard" else SOFT)
    inputs = sampled_inputs(target, max(400, 60 * p // tokens), seed)
    errors = built.program(inputs) - target(inputs.reshape(len(inputs), -1))
    return [_errors(target, inputs, errors) | sizes_of(built)]


def _errors(target: attnc.TruncatedLinear, inputs: np.ndarray, errors: np.ndarray) -> Row:
    inside = np.abs(target.linear(inputs.reshape(len(inputs), -1))) <= END
    return {"max_error": np.abs(errors).max(), "mse": (errors[inside] ** 2).mean()}


def train_clip(
    target: attnc.TruncatedLinear, keys: int, heads: int, batch_size: int, cell: Cell, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Train the same layer with all weights free, from random weights.

    Returns new inputs that cover the range, the errors there, and the number of weights.
    """
    import torch

    from attnc_lab.training import ClippedTokens, seeded, train

    seeded(seed, cell["trial"])
    n, d = target.W.shape
    W, t = torch.tensor(target.W, dtype=torch.float32) / END, torch.tensor(target.t, dtype=torch.float32) / END

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(batch_size, n, d)
        return x, (torch.einsum("bnd,nd->bn", x, W) + t).clamp(-1, 1)

    model = ClippedTokens(n, d, keys, heads)
    train(model, batch, steps=cell["steps"], rate=2e-2)
    inputs = sampled_inputs(target, 4000 // n, seed)
    with torch.no_grad():
        found = END * model(torch.tensor(inputs, dtype=torch.float32)).numpy().astype(float)
    return inputs, found - target(inputs.reshape(len(inputs), -1)), sum(w.numel() for w in model.parameters())


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
            f"max error = {measured:.3f}·Δ (theory: {constant:g}·Δ), Δ = |b−a|/(p−1); exponents {most} for the max "
            f"error and {square} for the MSE over two decades of p, {papers_most} and {papers_square} for the papers' "
            "p = 60 … 120.",
            {"constant": measured, **exponents, **papers},
            Constant(measured, "largest error over Δ = |b−a|/(p−1)"),
        )
    decades, short = (fits(table, "trained", setting)[1] for setting in ("decades", "papers"))
    trained, best = (table.where(kind=kind, setting="papers").column("mse") for kind in ("trained", "soft"))
    excess = np.sqrt(np.median(trained) / np.median(best))
    yield Verdict(
        "A trained head follows the same rate: MSE ∝ p⁻².",
        Status.HOLDS.when(decades.low <= -2 <= decades.high and decades.high < 0),
        f"the MSE of trained heads has the exponent {decades} over two decades, {short} for p = 60 … 120. Where "
        f"anchors are many, training, not p, decides the error: at the papers' sizes its root is {excess:.1f} times "
        "that of the best construction.",
        {"mse_exponent": decades.exponent, "papers_mse_exponent": short.exponent, "excess": excess},
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
            ("trained", "trained (Adam)", drawing.ORANGE, "^"),
        ):
            panel.points(table.where(kind=kind), "p", column, name, colour, marker)
        panel.axes.axvspan(60, 120, color=drawing.FAINT, alpha=0.45, lw=0, label="the papers' range")
        panel.whole_ticks((10, 30, 100, 300, 1000))


ABOUT = About(
    1,
    "Rate in the number of anchors",
    "Does one head that clips a linear function have an error of O(1/p), and its MSE of O(1/p²)? Does a trained one?",
    "With p anchors Δ = |b−a|/(p−1) apart: |out − clip(w·x+t, a, b)| ≤ Δ/2 for hard selection, MSE Δ²/12; "
    "0.062·Δ at βΔ² = 2.72. So slopes −1 and −2.",
    "2504.15956: key results (O(1/p)); first experiments 1 (MSE against p); setting d = 10, n = 50, range ±25",
)
