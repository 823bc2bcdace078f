"""Experiment 11: noisy inputs: the best temperature of the construction, and the temperature of trained heads."""

from __future__ import annotations

import functools
import math

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
    fit_power,
    listed,
    sweep,
)
from attnc_lab.measuring import middles, unproved

OMEGA = 1.5
"""f = sin(ωx), x uniform on [−π, π]: three half periods. Anchors extend as far again beyond the ends."""
REACH, PADDED = math.pi, 2 * math.pi
P = 64
H = 2 * PADDED / P
SIGMAS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
START_BETA = 3.0
"""βh² of the construction that training starts from: hard selection."""
TRAINED = {
    "temperature": ("log_beta",),
    "values": ("log_beta", "V", "W_V"),
    "all": (),
    "random": (),
}
"""The trained parameters: log β alone; log β and the values; all weights, from the construction or a random start."""
NAMES = {
    "temperature": "log β alone",
    "values": "log β and values",
    "all": "all, from the construction",
    "random": "all, random start",
}
COLOURS = {"temperature": drawing.BLUE, "values": drawing.GREEN, "all": drawing.PURPLE, "random": drawing.ORANGE}
RATES = {"temperature": (1e-2, 3e-2, 1e-1), "values": (1e-3, 1e-2, 1e-1), "all": (1e-4, 1e-3, 1e-2)}
STEPS, SEEDS = {"quick": 1200, "full": 2500}, 5
QUADRATURE = 1e-3
"""Relative error allowed to the errors, which are sums over 1,500 points and 24 nodes of noise."""
LEARNED = (0.05, 0.1, 0.2, 0.4, 0.8)
RANK = 1e-12
"""The share of the largest eigenvalue below which a direction of values is left out: rounding decides about it."""
FLAT = 1.001
"""A temperature is as good as the best if its error is at most this multiple of the smallest."""
BETAS = np.logspace(-1.6, 1.6, 33)
"""The values of βh² in the sweep."""


def cells(profile: str) -> list[Cell]:
    trained = sweep(kind="trained", what=TRAINED, sigma=LEARNED, steps=STEPS[profile])
    return [*trained, *sweep(kind="constructed", sigma=SIGMAS), *sweep(kind="best values", sigma=LEARNED)]


def measure(cell: Cell, seed: int) -> list[Row]:
    sigma = cell["sigma"]
    if cell["kind"] == "trained":
        return _trained(cell, sigma, seed)
    if cell["kind"] == "best values":
        return _best_values(sigma)
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


def _nodes(sigma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points x, noisy inputs (points, nodes), and weights (nodes,) of a mean over the noise."""
    x = middles(-REACH, REACH, 1500)
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    return x, x[:, None] + sigma * nodes, weights / weights.sum()


def _best_values(sigma: float) -> list[Row]:
    """Return the smallest error of any values, for every second β of the sweep: least squares over points and noise."""
    L = middles(-PADDED, PADDED, P)
    x, noisy, weights = _nodes(sigma)
    wanted = np.broadcast_to(np.sin(OMEGA * x)[:, None], noisy.shape).ravel()
    share = np.tile(weights, len(x)) / len(x)
    rows: list[Row] = []
    for beta in BETAS[::2]:
        scores = -beta / H**2 * (noisy.reshape(-1, 1) - L) ** 2
        found = np.exp(scores - scores.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        size, basis = np.linalg.eigh(found.T @ (found * share[:, None]))
        kept = size > RANK * size[-1]
        projected = basis[:, kept].T @ (found.T @ (share * wanted))
        values = basis[:, kept] @ (projected / size[kept])
        rows.append({"beta": float(beta), "mse": float(share @ (found @ values - wanted) ** 2)})
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


@functools.cache
def bayes(sigma: float) -> float:
    """Return the smallest error of any function of the noisy input: that of E[f(x) | x̃] for x uniform on [−π, π].

    At the ends the noise may only come from inside, so this is a little below ½(1 − e^{−ω²σ²}), its value for x uniform
    on the whole line. Both integrals are sums over points 1/500 of σ, or of 1, apart.
    """
    step = min(sigma, 1.0) / 50
    x = np.arange(-REACH + step / 2, REACH, step)
    noisy = np.arange(-REACH - 8 * sigma, REACH + 8 * sigma, 4 * step)
    density = np.exp(-0.5 * ((noisy[:, None] - x) / sigma) ** 2)
    f = np.sin(OMEGA * x)
    mean = density @ f / density.sum(axis=1)
    return float((f**2).mean() - (mean**2 * density.sum(axis=1)).sum() / density.sum())


def _trained(cell: Cell, sigma: float, seed: int) -> list[Row]:
    """Train one head of 64 keys, or a part of its weights. Return a row for every seed."""
    import torch

    from attnc_lab.fitting import Batch, Budget, fit
    from attnc_lab.models import Heads

    what, L = cell["what"], middles(-PADDED, PADDED, P)[:, None]

    def make() -> Heads:
        head = Heads(1, P, d_token=2)
        return head if what == "random" else head.construct(L, np.sin(OMEGA * L[:, 0]), START_BETA / H**2)

    def draw(shape: tuple[int, int], generator: torch.Generator) -> Batch:
        x = REACH * (2 * torch.rand((*shape, 1), generator=generator, dtype=torch.float64) - 1)
        return x + sigma * torch.randn(x.shape, generator=generator, dtype=torch.float64), torch.sin(OMEGA * x)

    rates = RATES.get(what, (1e-2, 3e-2, 1e-1))
    held = draw((1, 4000), torch.Generator().manual_seed(seed + 77))
    budget = Budget(cell["steps"], SEEDS, rates, 200)
    fitted = fit(make, draw, (held[0][0], held[1][0]), budget, seed=seed, only=TRAINED[what])
    x, places, weights = _nodes(sigma)
    noisy = torch.tensor(places.reshape(-1, 1))
    rows: list[Row] = []
    for trial, head in enumerate(fitted.models):
        with torch.no_grad():
            errors = head(noisy).numpy().reshape(len(x), -1) - np.sin(OMEGA * x)[:, None]
            scores = torch.softmax(head.scores(torch.tensor(x[:, None]))[0], -1)
            entropy = float(-(scores * (scores + 1e-300).log()).sum(-1).mean())
        spread = PADDED / math.sqrt(3)  # of the constructed anchors
        beta = head.slopes()[:, 0].std() / (2 * spread) * H**2
        mse = (errors**2 @ weights).mean()
        rows.append({**fitted.row(trial), "mse": mse, "norm": head.norms(), "beta": beta, "entropy": entropy})
    return rows


def best_beta(rows: Table) -> float:
    """Return the β with the smallest MSE, by a parabola over log β through the lowest point and its neighbours."""
    logs, mse = np.log(rows.column("beta")), rows.column("mse")
    i = int(np.clip(mse.argmin(), 1, len(mse) - 2))
    a, b, _ = np.polyfit(logs[i - 1 : i + 2] - logs[i], mse[i - 1 : i + 2], 2)
    return float(np.exp(logs[i] + np.clip(-b / (2 * a) if a > 0 else 0.0, -0.2, 0.2)))


def predicted_best(sigma: float) -> float:
    fine = np.logspace(-2, 1.8, 4000)
    return float(fine[predicted_mse(fine, sigma).argmin()])


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
        Status.CONSTANT.when(abs(law.exponent + 2) < 0.3 and ratio.least > 0.7 and ratio.largest < 1.4),
        f"for σ ≥ h, 2σ²β* = {closed:.2f}, exponent {law} in σ, and the error is {least:.3f} times the Bayes error of "
        f"the bounded prior; below h the ripple of the lattice limits β. The closed form with both gives {ratio:.2f} "
        "times the measured β* at every σ.",
        {"exponent": law.exponent, **ratio.numbers("ratio"), "bayes_ratio": least.largest},
        Constant(max(ratio.largest, 1 / ratio.least), "measured β* over that of the closed form, or its inverse"),
    )
    trained = table.where(kind="trained")
    steps = int(trained[0]["steps"])
    alone = trained.where(what="temperature")
    found = {sigma: Interval.of(alone.where(sigma=sigma).column("beta")) for sigma in LEARNED if sigma >= H}
    theory = {sigma: H**2 / (2 * sigma**2) for sigma in found}
    off = max(max(found[sigma].mean / theory[sigma], theory[sigma] / found[sigma].mean) for sigma in found)
    yield Verdict(
        "A trained temperature falls where inputs are noisy, to β = 1/(2σ²).",
        Status.CONSTANT.when(off < 1.25, Status.NOT_REACHED),
        f"log β alone is trained, from βh² = {START_BETA:g}: "
        + "; ".join(f"βh² = {found[sigma]:.3f} at σ = {sigma:g}, theory {theory[sigma]:.3f}" for sigma in found)
        + f" (geometric means and 95 % intervals of {SEEDS} seeds).",
        {f"beta_{sigma:g}": found[sigma].mean for sigma in found},
        Constant(off, "trained β over 1/(2σ²), or its inverse, for σ ≥ h"),
        Effort(steps, SEEDS, min(off, *(found[s].mean / theory[s] for s in found)), "ratio"),
    )
    changes = {what: _change(trained.where(what=what)) for what in TRAINED}
    before = f"from σ ≤ {LEARNED[1]:g} to σ ≥ {LEARNED[-2]:g} the product of the norms changes by a factor"
    effort = {what: Effort(steps, SEEDS, change.mean, f"factor of {NAMES[what]}:") for what, change in changes.items()}
    blurred = {sigma: trained.where(what="values", sigma=sigma) for sigma in LEARNED}
    ends = {f"σ = {sigma:g}": f"{Interval.of(rows.column('beta')).mean:.2g}" for sigma, rows in blurred.items()}
    flat = {f"σ = {sigma:g}": _flat(table.where(kind="best values", sigma=sigma)) for sigma in LEARNED}
    yield Verdict(
        "A head whose temperature and values are trained lowers the norms of W_Q and W_K where inputs are noisy.",
        _decrease(changes["values"]),
        f"{before} {changes['values']:.2f}; with log β alone, {changes['temperature']:.3f} (geometric means and "
        f"95 % intervals of {SEEDS} seeds). Free values blur as well as a low β does, so that β need not fall: with "
        "the best values for each β the error is within 0.1 % of the smallest for βh² at least from "
        f"{listed('{1:.2g} ({0})', flat)}. Training ends at βh² = {listed('{1} ({0})', ends)}.",
        changes["values"].numbers("norms_values") | changes["temperature"].numbers("norms_temperature"),
        effort=effort["values"],
    )
    of_all = {NAMES[what]: changes[what] for what in ("all", "random")}
    yield Verdict(
        "A head whose weights are all trained lowers the norms of W_Q and W_K where inputs are noisy.",
        _decrease(*of_all.values()),
        f"{before} {listed('{1:.2f} ({0})', of_all)}, geometric means and 95 % intervals of {SEEDS} seeds, although "
        "the error is the smallest possible (below). Such a head blurs by its values: averages over neighbours, as "
        "values, do what a lower β does. So the norms alone say little about noise.",
        changes["all"].numbers("norms_all") | changes["random"].numbers("norms_random"),
        effort=effort["all"],
    )
    over = Table({**row, "over": row["mse"] / bayes(row["sigma"])} for row in trained)
    smallest = over.column("over").min()
    close = {
        what: max(Interval.of(over.where(what=what, sigma=sigma).column("over")).mean for sigma in LEARNED[-2:])
        for what in TRAINED
    }
    yield Verdict(
        "No head is better than the Bayes estimate, and with strong noise trained heads come close to it.",
        Status.CONSTANT.when(smallest >= 1 - QUADRATURE and max(close.values()) < 1.5, Status.NOT_REACHED),
        f"MSE over the Bayes error of x uniform on [−π, π], σ ≥ {LEARNED[-2]:g}, the larger of two geometric means "
        f"over seeds: {listed('{1:.3f} ({0})', {NAMES[what]: value for what, value in close.items()})}; the "
        f"smallest of all runs at any σ is {smallest:.3f}.",
        {**close, "smallest": smallest},
        Constant(max(close.values()), f"MSE over the Bayes error for σ ≥ {LEARNED[-2]:g}, mean over seeds"),
        Effort(steps, SEEDS, smallest, "MSE over Bayes"),
    )


def _flat(rows: Table) -> Span:
    """Return the temperatures of a sweep whose error is close to the smallest."""
    errors = rows.column("mse")
    return Span.of(rows.column("beta")[errors <= FLAT * errors.min()])


def _change(rows: Table) -> Interval:
    """Return the factor by which the norms change from little noise to strong noise, over seeds."""

    def norms(trial: int, is_strong: bool) -> float:
        logs = [math.log(row["norm"]) for row in rows.where(trial=trial)
                if (row["sigma"] >= LEARNED[-2] if is_strong else row["sigma"] <= LEARNED[1])]  # fmt: skip
        return float(np.exp(np.mean(logs)))

    return Interval.of([norms(trial, True) / norms(trial, False) for trial in rows.distinct("trial")])


def _decrease(*factors: Interval) -> Status:
    """Judge a claim that norms fall, by the intervals of the factors by which they change."""
    if max(factor.low for factor in factors) > 1:
        return Status.FAILS
    return Status.HOLDS.when(max(factor.high for factor in factors) < 1, Status.NOT_REACHED)


def draw(table: Table, picture: drawing.Figure) -> None:
    left, middle, right, last = drawing.panels(picture, 4, width=5.4, height=4.4, rows=2)
    left.label("error of the construction against β", "βh²", "MSE with noisy inputs", log="xy")
    fine = np.logspace(-1.6, 1.2, 200)
    for sigma, colour in zip(SIGMAS, drawing.PALETTE, strict=True):
        rows = table.where(kind="constructed", sigma=sigma)
        left.points(rows, "beta", "mse", f"σ = {sigma:g}", colour, size=3.5)
        left.theory(fine, predicted_mse(fine, sigma), "closed form" if sigma == SIGMAS[0] else "", colour)
    left.legend(3)
    middle.label("the best β, and the trained β", "noise σ", "βh²", log="xy")
    sigmas = np.logspace(math.log10(0.04), 0, 60)
    middle.theory(sigmas, H**2 / (2 * sigmas**2), "theory: β = 1/(2σ²)")
    middle.theory(sigmas, [predicted_best(float(s)) for s in sigmas], "closed form, with ripple", drawing.BLUE, "-.")
    found = [best_beta(table.where(kind="constructed", sigma=sigma)) for sigma in SIGMAS]
    middle.measured(SIGMAS, found, "measured, constructed", drawing.INK, "s", 7, is_open=True)
    right.label("mean squared error of trained heads", "noise σ", "MSE over the Bayes error", log="x")
    right.theory([0.04, 1], [1, 1], "theory: Bayes, x uniform on [−π, π]")
    last.label("norms of trained heads", "noise σ", "|W_Q|·|W_K|", log="xy")
    for what, marker in zip(TRAINED, "ov^D", strict=True):
        rows, colour = table.where(kind="trained", what=what), COLOURS[what]
        middle.seeds(rows, "sigma", "beta", f"trained: {NAMES[what]}", colour, marker)
        over = Table({**row, "over": row["mse"] / bayes(row["sigma"])} for row in rows)
        right.seeds(over, "sigma", "over", f"trained: {NAMES[what]}", colour, marker)
        last.seeds(rows, "sigma", "norm", f"trained: {NAMES[what]}", colour, marker)
    middle.axes.axvline(H, color=drawing.FAINT, lw=2, zorder=0, label="σ = h")
    for panel in (middle, right, last):
        panel.whole_ticks((0.05, 0.1, 0.2, 0.4, 0.8))


ABOUT = About(
    11,
    "Noise against partition precision",
    "Should, and does, attention lower its inverse temperature when inputs are noisy?",
    "Softmax over −β|x̃ − L|² with values f(L) is the posterior mean for noise of variance 1/2β: β* = "
    "1/(2σ²) for σ ≥ h, MSE ½(1 + a² − 2a·e^(−ω²σ²/2)), a = e^(−ω²/4β), plus the lattice's ripple, for f = sin(ωx).",
    "the summary of 2504.19901: first experiments 3 (noise against partition precision), confidence: robustness "
    "to noise unclear",
)
