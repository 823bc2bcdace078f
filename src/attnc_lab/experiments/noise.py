"""Experiment 11: noisy inputs: the best temperature of the construction, and the temperature of trained heads."""

from __future__ import annotations

import math

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Span, Status, Table, Verdict, Verdicts, fit_power, sweep
from attnc_lab.experiments.learnability import START_BETA
from attnc_lab.measuring import middles, unproved

OMEGA = 1.5
"""f = sin(ωx), x uniform on [−π, π]: three half periods. Anchors extend as far again beyond the ends."""
REACH, PADDED = math.pi, 2 * math.pi
P = 64
H = 2 * PADDED / P
SIGMAS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
STARTS = ("random", "construction")
"""The start of training: random weights, or the construction at βh² = 3."""
LEARNED = (0.0, 0.1, 0.2, 0.4, 0.8)
BETAS = np.logspace(-1.6, 1.6, 33)
"""The values of βh² in the sweep."""


def cells(profile: str) -> list[Cell]:
    trials, steps = (2, 800) if profile == "quick" else (5, 10_000)
    trained = sweep(kind="trained", start=STARTS, sigma=LEARNED, trial=range(trials), steps=steps)
    return [*trained, *sweep(kind="constructed", sigma=SIGMAS)]


def measure(cell: Cell, seed: int) -> list[Row]:
    sigma = cell["sigma"]
    if cell["kind"] == "trained":
        return [_trained(cell, sigma, seed)]
    rng = np.random.default_rng(seed)
    target = attnc.as_target(f"sin({OMEGA}*x)", {"x": (-PADDED, PADDED)})
    x = middles(-REACH, REACH, 8000)
    noisy = np.clip(x + sigma * rng.normal(size=x.shape), -PADDED, PADDED)
    rows: list[Row] = []
    for beta in BETAS:
        built = attnc.constructions.max_affine(target, points_per_axis=P, beta=float(beta))
        errors = unproved(target, built)(noisy[:, None]) - np.sin(OMEGA * x)
        rows.append({"beta": float(beta), "mse": (errors**2).mean(), "predicted": float(predicted_mse(beta, sigma))})
    return rows


def predicted_mse(beta: np.ndarray | float, sigma: float) -> np.ndarray:
    """Return ½(1 + a² − 2a·e^{−ω²σ²/2}) + ripple. Smoothing by β multiplies f by a = e^{−ω²/4β}, noise by e^{−ω²σ²/2}.

    The ripple of a lattice is, with q = e^{−π²/βh²} and t = πω/βh, ½a²q²((1−e^{−t})² + (e^t−1)²).
    """
    beta = np.asarray(beta, float)
    a = np.exp(-((OMEGA * H) ** 2) / (4 * beta))
    q, t = np.exp(-(math.pi**2) / beta), math.pi * OMEGA * H / beta
    ripple = 0.5 * a**2 * q**2 * ((1 - np.exp(-t)) ** 2 + np.expm1(t) ** 2)
    return 0.5 * (1 + a**2 - 2 * a * math.exp(-((OMEGA * sigma) ** 2) / 2)) + ripple


def bayes(sigma: float) -> float:
    """Return ½(1 − e^{−ω²σ²}), the smallest error of any function of the noisy input (Bayes)."""
    return -0.5 * math.expm1(-((OMEGA * sigma) ** 2))


def _trained(cell: Cell, sigma: float, seed: int) -> Row:
    """Train one head of 64 free keys. Its β follows from the spread of its keys' slopes."""
    import torch

    from attnc_lab.training import Heads, seeded, train, with_one

    seeded(seed, cell["trial"])
    head = Heads(2, P, 1, d_token=2)
    if cell["start"] == "construction":
        L = middles(-PADDED, PADDED, P)[:, None]
        head.construct(L, np.sin(OMEGA * L[:, 0]), START_BETA / H**2)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = REACH * (2 * torch.rand(512, 1) - 1)
        return with_one(x + sigma * torch.randn_like(x)), torch.sin(OMEGA * x)

    train(head, batch, steps=cell["steps"], rate=3e-2 if cell["start"] == "random" else 1e-2)
    x = torch.linspace(-REACH, REACH, 8001)[:, None]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        noisy = x + sigma * torch.randn(x.shape, generator=generator)
        mse = float(((head(with_one(noisy)) - torch.sin(OMEGA * x)) ** 2).mean())
        slopes = head.slopes()[:, 0]
        weights = torch.softmax(head.scores(with_one(x))[0], -1)
        entropy = float(-(weights * (weights + 1e-30).log()).sum(-1).mean())
        norm = float(head.W_Q.norm() * head.W_K.norm())
    spread = PADDED / math.sqrt(3)  # of the constructed anchors
    beta = slopes.std() / (2 * spread) * H**2
    return {"mse": mse, "bayes": bayes(sigma), "norm": norm, "beta": beta, "entropy": entropy}


def best_beta(rows: Table) -> float:
    """Return the β with the smallest MSE, by a parabola over log β through the lowest point and its neighbours."""
    logs, mse = np.log(rows.column("beta")), rows.column("mse")
    i = int(np.clip(mse.argmin(), 1, len(mse) - 2))
    a, b, _ = np.polyfit(logs[i - 1 : i + 2] - logs[i], mse[i - 1 : i + 2], 2)
    return float(np.exp(logs[i] + np.clip(-b / (2 * a) if a > 0 else 0.0, -0.2, 0.2)))


def predicted_best(sigma: float) -> float:
    fine = np.logspace(-2, 1.8, 4000)
    return float(fine[predicted_mse(fine, sigma).argmin()])


def _change(rows: Table) -> tuple[float, float]:
    """Return the factors by which the norms and β change from little noise to strong noise."""
    sigma = rows.column("sigma")
    low, high = sigma <= LEARNED[1], sigma >= LEARNED[-2]
    norms, betas = rows.column("norm"), rows.column("beta")
    return np.median(norms[high]) / np.median(norms[low]), np.median(betas[high]) / np.median(betas[low])


def judge(table: Table) -> Verdicts:
    swept = table.where(kind="constructed")
    best = {sigma: best_beta(swept.where(sigma=sigma)) for sigma in SIGMAS}
    ratio = Span.of([best[sigma] / predicted_best(sigma) for sigma in SIGMAS])
    strong = [sigma for sigma in SIGMAS if sigma >= H]
    law = fit_power(np.array(strong), np.array([best[sigma] / H**2 for sigma in strong]))
    closed = Span.of([2 * sigma**2 * best[sigma] / H**2 for sigma in strong])
    least = Span.of([swept.where(sigma=sigma).column("mse").min() / bayes(sigma) for sigma in strong])
    yield Verdict(
        "With noisy inputs of standard deviation σ the best inverse temperature of the construction is β = 1/(2σ²).",
        Status.HOLDS.when(abs(law.exponent + 2) < 0.3 and ratio.least > 0.7 and ratio.largest < 1.4),
        f"for σ ≥ h, 2σ²β* = {closed:.2f}, exponent {law} in σ, and the error is {least:.3f} times the Bayes error; "
        f"below h the ripple of the lattice limits β. The closed form with both gives {ratio:.2f} times the measured "
        "β* at every σ.",
        {"exponent": law.exponent, **ratio.numbers("ratio"), "bayes_ratio": least.largest},
    )
    trained = table.where(kind="trained")
    changes = {start: _change(trained.where(start=start)) for start in STARTS}
    yield Verdict(
        "A trained head lowers the norms of W_Q and W_K, and so its β, where inputs are noisy.",
        Status.HOLDS.when(all(norms < 0.9 and beta < 0.9 for norms, beta in changes.values())),
        f"from σ ≤ {LEARNED[1]:g} to σ ≥ {LEARNED[-2]:g} the product of the norms changes by a factor "
        f"{changes['random'][0]:.2f} and β by {changes['random'][1]:.2f} if training starts from random weights, by "
        f"{changes['construction'][0]:.2f} and {changes['construction'][1]:.2f} if from the construction at "
        f"βh² = {START_BETA:g}; the best β changes by {(LEARNED[1] / LEARNED[-2]) ** 2:.2f} or less. Trained heads "
        "blur by their values rather than by their temperature.",
        {
            f"{what}_{start}": value
            for start, pair in changes.items()
            for what, value in zip(("norms", "beta"), pair, strict=True)
        },
    )
    free = trained.where(start="random")
    excess = Table(row for row in free if row["sigma"] >= LEARNED[-2]).ratio("mse", "bayes")
    unexplained = np.median(free.column("mse")[free.column("sigma") <= LEARNED[1]])
    yield Verdict(
        "With strong noise, training comes close to the best possible estimate.",
        Status.HOLDS.when(np.median(excess) < 1.5),
        f"for σ ≥ {LEARNED[-2]:g} the MSE of trained heads is {Span.of(excess):.2f} times ½(1 − e^(−ω²σ²)); with "
        f"little noise the error that training leaves dominates, an MSE of {unexplained:.2g}.",
        {"median": np.median(excess), "largest": excess.max(), "without_noise": unexplained},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, middle, right = drawing.panels(picture, 3, width=4.6, height=4.1)
    left.label("error of the construction against β", "βh²", "MSE with noisy inputs", log="xy")
    fine = np.logspace(-1.6, 1.2, 200)
    for sigma, colour in zip(SIGMAS, drawing.PALETTE, strict=True):
        rows = table.where(kind="constructed", sigma=sigma)
        left.points(rows, "beta", "mse", f"σ = {sigma:g}", colour, size=3.5)
        left.theory(fine, predicted_mse(fine, sigma), "closed form" if sigma == SIGMAS[0] else "", colour)
    left.legend(3)
    middle.label("the best β against noise", "noise σ", "β*h²", log="xy")
    sigmas = np.logspace(math.log10(0.04), 0, 60)
    middle.theory(sigmas, H**2 / (2 * sigmas**2), "theory: β = 1/(2σ²)")
    middle.theory(sigmas, [predicted_best(float(s)) for s in sigmas], "closed form, with ripple", drawing.BLUE, "-.")
    found = [best_beta(table.where(kind="constructed", sigma=sigma)) for sigma in SIGMAS]
    middle.measured(SIGMAS, found, "measured, constructed", drawing.BLUE)
    right.label("trained heads", "noise σ", "MSE; norms", log="y")
    s = np.linspace(0.02, 0.85, 100)
    right.theory(s, [bayes(float(x)) for x in s], "theory: Bayes, ½(1−e^(−ω²σ²))")
    for start, colour, marker in zip(STARTS, (drawing.ORANGE, drawing.PURPLE), "^v", strict=True):
        rows = table.where(kind="trained", start=start)
        middle.points(rows.above("sigma", 0), "sigma", "beta", f"trained, from {start}", colour, marker)
        right.points(rows, "sigma", "mse", f"MSE, from {start}", colour, marker)
        right.points(rows, "sigma", "norm", f"|W_Q|·|W_K|, from {start}", colour, "s", is_open=True)
    middle.axes.axvline(H, color=drawing.FAINT, lw=2, zorder=0, label="σ = h")


ABOUT = About(
    11,
    "Noise against partition precision",
    "Should, and does, attention lower its inverse temperature when inputs are noisy?",
    "Softmax over −β|x̃ − L|² with values f(L) is the posterior mean for noise of variance 1/2β: β* = "
    "1/(2σ²) for σ ≥ h, MSE ½(1 + a² − 2a·e^(−ω²σ²/2)), a = e^(−ω²/4β), plus the lattice's ripple, for f = sin(ωx).",
    "2504.19901: first experiments 3 (noise against partition precision), confidence: robustness to noise unclear",
)
