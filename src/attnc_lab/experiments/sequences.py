"""Experiment 13: two layers, and attention then softmax, on a sequence-to-sequence ReLU target."""

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
    sweep,
)
from attnc_lab.measuring import errors_at, sizes_of, unproved

TOKENS, WIDTH = 20, 5
"""The papers' task: 20 tokens of width 5."""
SMALL = (2, 3)
"""Numbers of tokens of width 1 for which a grid of all inputs fits into memory."""
NAMES = {"two layers": "two_layer", "attention + softmax": "attention_softmax"}
FINENESS = {2: (4, 8, 16, 32), 3: (3, 6, 12)}
LEVELS = (1e-2, 3e-3, 1e-3, 3e-4)
HEADS, SHOWN = (1, 2, 4, 8), 16
"""The numbers of heads of the first of two layers, and the number of cells per axis at which forms are compared."""
SEEDS, RATES = 5, (1e-3, 3e-3)
STEPS = {"quick": 500, "full": 1500}
COLOURS = {"two layers": drawing.BLUE, "attention + softmax": drawing.GREEN}


def cells(profile: str) -> list[Cell]:
    trained = sweep(kind="trained", model=NAMES, steps=STEPS[profile])
    built = [cell for n in SMALL for cell in sweep(kind="constructed", model=NAMES, n=n, P=FINENESS[n])]
    forms = [*sweep(kind="heads", n=2, P=SHOWN, heads=HEADS), *sweep(kind="positions", n=2, P=SHOWN, channels=(1, 0))]
    return [*trained, {"kind": "linear"}, *sweep(kind="relu network", eps=LEVELS), *built, *forms]


def mixing(n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return W and b of relu(W vec X + b). W mixes tokens and features, and its rows have norm 1."""
    rng = np.random.default_rng([seed, n, d])
    W = rng.normal(size=(n * d, n * d))
    return W / np.linalg.norm(W, axis=1, keepdims=True), 0.2 * rng.normal(size=n * d)


def measure(cell: Cell, seed: int) -> list[Row]:
    kind = cell["kind"]
    if kind == "constructed":
        return [_constructed(cell["model"], cell["n"], cell["P"], seed)]
    if kind in ("heads", "positions"):
        return [_form(cell, seed)]
    if kind == "relu network":
        return [_relu_network(cell["eps"], seed)]
    if kind == "linear":
        return [{"unexplained": _linear(seed)}]
    return _trained(cell["model"], cell["steps"], seed)


def small_target(n: int, seed: int) -> attnc.SequenceTarget:
    """Return relu(W vec X + b) of n tokens of width 1."""
    W, b = mixing(n, 1, seed)

    def relu_of_mixture(X: np.ndarray) -> np.ndarray:
        return np.maximum(np.einsum("ij,bjd->bid", W, X) + b[:, None], 0)

    return attnc.SequenceTarget(relu_of_mixture, tokens=n, width=1, box=(-1, 1), lipschitz=1.0)


def _constructed(model: str, n: int, P: int, seed: int) -> Row:
    target = small_target(n, seed)
    return _errors(getattr(attnc.constructions, NAMES[model])(target, points_per_axis=P), target, seed)


def _errors(built: attnc.constructions.Built, target: attnc.SequenceTarget, seed: int) -> Row:
    points = np.random.default_rng([seed, 4]).uniform(-1, 1, (2000, target.box.d))
    return {"max_error": errors_at(points[..., None], unproved(target, built), target).max(), **sizes_of(built)}


def _form(cell: Cell, seed: int) -> Row:
    """Measure two layers whose first has several heads, or one layer with or without channels of positions."""
    target = small_target(cell["n"], seed)
    if cell["kind"] == "heads":
        built = attnc.constructions.two_layer(target, points_per_axis=cell["P"], heads=cell["heads"])
        first, last = (len(layer.heads) for layer in built.program.layers if isinstance(layer, attnc.Attention))
        return {"first": first, "last": last, **_errors(built, target, seed)}
    built = attnc.constructions.max_affine(target, points_per_axis=cell["P"], position_channels=bool(cell["channels"]))
    named = {name for layer in built.program.layers for name in getattr(layer, "channels", ()) if "position" in name}
    return {"positions": len(named), **_errors(built, target, seed)}


def _relu_network(eps: float, seed: int) -> Row:
    """Measure the whole 20×5 task. A hidden unit is a truncated linear function, so one attention layer is enough."""
    D = TOKENS * WIDTH
    W, b = mixing(TOKENS, WIDTH, seed)
    target = attnc.ReLUNetwork([W, np.eye(D)], [b, np.zeros(D)], box=(-1, 1))
    built = attnc.constructions.relu_network(target, eps=eps)
    points = np.random.default_rng([seed, 5]).uniform(-1, 1, (200, D))
    errors = errors_at(points, unproved(target, built), target)
    unexplained = (errors**2).mean() / target(points).var()
    return {"max_error": errors.max(), "unexplained": unexplained, **sizes_of(built)}


def _task(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    W, b = mixing(TOKENS, WIDTH, seed)
    x = np.random.default_rng([seed, 6]).uniform(-1, 1, (4000, TOKENS * WIDTH))
    return W, b, x, np.maximum(x @ W.T + b, 0)


def _linear(seed: int) -> float:
    """Return the share of the variance that the best affine map leaves unexplained."""
    _, _, x, y = _task(seed)
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    fit = np.linalg.lstsq(design[:2000], y[:2000], rcond=None)[0]
    return float(((design[2000:] @ fit - y[2000:]) ** 2).mean() / y.var())


def _trained(model: str, steps: int, seed: int) -> list[Row]:
    import torch

    from attnc_lab.fitting import Batch, Budget, fit
    from attnc_lab.models import SequenceModel

    W, b, x, y = (torch.tensor(array, dtype=torch.float32) for array in _task(seed))

    def draw(shape: tuple[int, int], generator: torch.Generator) -> Batch:
        drawn = 2 * torch.rand((*shape, TOKENS * WIDTH), generator=generator) - 1
        return drawn, torch.relu(drawn @ W.T + b)

    fitted = fit(
        lambda: SequenceModel(TOKENS, WIDTH, has_softmax=model == "attention + softmax"),
        draw,
        (x[:1000], y[:1000]),
        Budget(steps, SEEDS, RATES, 32),
        seed=seed,
        dtype=torch.float32,  # there are 130,000 weights
    )
    rows: list[Row] = []
    for trial, network in enumerate(fitted.models):
        with torch.no_grad():
            errors = network(x[2000:]) - y[2000:]
        unexplained = float((errors**2).mean() / y[2000:].var())
        rows.append({**fitted.row(trial), "max_error": float(errors.abs().max()), "unexplained": unexplained})
    return rows


def judge(table: Table) -> Verdicts:
    for model in NAMES:
        rows = table.where(kind="constructed", model=model)
        laws = {n: rows.where(n=n).power("P", "max_error") for n in SMALL}
        is_falling = all(law.exponent < -0.8 for law in laws.values())
        yield Verdict(
            f"Constructed, {model}: a continuous sequence-to-sequence function is approximated, at any accuracy.",
            Status.CONSTANT.when(rows.is_within("max_error", "bound") and is_falling),
            f"relu(W·vec X + b) of 2 and 3 tokens: every error is within its proven bound; exponents {laws[2]} and "
            f"{laws[3]} in the cells per axis (theory −1), P^D cells: "
            f"{rows.where(n=3).column('parameters').max():,.0f} numbers for 3 tokens already.",
            {"exponent_2": laws[2].exponent, "exponent_3": laws[3].exponent},
            Constant(rows.ratio("max_error", "bound").max(), "largest error over the proven bound"),
        )
    heads = table.where(kind="heads")
    yield Verdict(
        "Two layers as in the paper's component map: several heads in the first layer, one in the second.",
        Status.HOLDS.when(
            heads.is_within("max_error", "bound")
            and all(row["first"] == row["heads"] and row["last"] == 1 for row in heads)
        ),
        f"with H = {', '.join(map(str, HEADS))} heads that share the steps of layer 1 and one head in layer 2, for 2 "
        f"tokens and {SHOWN} cells per axis, the error is {Span.of(heads.column('max_error')):.3f}, within the proven "
        f"{Span.of(heads.column('bound')):.3f}.",
        {"max_error": heads.column("max_error").max(), "bound": heads.column("bound").max()},
    )
    encoded, plain = (table.where(kind="positions", channels=channels)[0] for channels in (1, 0))
    yield Verdict(
        "No positional encodings are needed.",
        Status.HOLDS.when(plain["positions"] == 0 < encoded["positions"] and plain["max_error"] <= plain["bound"]),
        f"one head for 2 tokens and {SHOWN} cells per axis: without any channel of positions the error is "
        f"{plain['max_error']:.3f} (proven {plain['bound']:.3f}) with {plain['anchors']:,} anchors; with the one-hot "
        f"channels that attnc uses by default, {encoded['max_error']:.3f} (proven {encoded['bound']:.3f}) with "
        f"{encoded['anchors']:,}. The affine maps before and after the head tell tokens apart.",
        {"max_error": plain["max_error"], "bound": plain["bound"]},
    )
    relu = table.where(kind="relu network")
    growth, finest = relu.growth("anchors"), relu[-1]
    yield Verdict(
        "Attention subsumes ReLU networks: the whole 20×5 task by one attention layer.",
        Status.HOLDS.when(relu.is_within("max_error", "bound")),
        f"100 inputs, 100 hidden units, error {finest['max_error']:.2g} within a proven bound of "
        f"{finest['bound']:.2g} with {finest['anchors']:,.0f} anchors; these grow like ε^−{growth.exponent:.2f}, not "
        "with a grid of 100 dimensions.",
        {"max_error": finest["max_error"], "exponent": growth.exponent},
    )
    linear = table.where(kind="linear")[0]["unexplained"]
    for model in NAMES:
        rows = table.where(kind="trained", model=model)
        found = Interval.of(rows.column("unexplained"))
        yield Verdict(
            f"Trained, {model}: it leaves less of the 20×5 task unexplained than an affine map does.",
            Status.HOLDS.when(found.high < linear, Status.NOT_REACHED),
            f"share of the variance left unexplained: {found:.4f}, geometric mean and 95 % interval of {SEEDS} seeds; "
            f"the best affine map leaves {linear:.3f}, the constructed layer {relu.column('unexplained').min():.1e}. "
            f"With {rows[0]['weights']:,.0f} weights, at the best of {len(RATES)} learning rates, {rows[0]['rate']:g}. "
            "The accuracy of the constructed layer was not reached.",
            {"linear": linear, **found.numbers("unexplained")},
            effort=Effort(int(rows[0]["steps"]), SEEDS, rows.column("unexplained").min(), "unexplained share"),
        )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, middle, right = drawing.panels(picture, 3, width=5.0, height=4.6)
    left.label("constructed, 2 and 3 tokens of width 1", "cells per axis P", "largest error", log="xy")
    for model, colour in COLOURS.items():
        for n, marker in zip(SMALL, "o^", strict=True):
            rows = table.where(kind="constructed", model=model, n=n)
            size, is_open = (9, True) if model == "two layers" else (5, False)
            left.points(rows, "P", "max_error", f"{model}, n = {n}", colour, marker, size=size, is_open=is_open)
            if model == "two layers":
                style = "--" if n == 2 else ":"
                left.law(rows, "P", "bound", f"theory: its bound, n = {n}", drawing.GREY, style)
    left.whole_ticks((3, 4, 6, 8, 12, 16, 32))
    middle.label("the 20×5 task by one layer (relu_network)", "requested ε", "largest error", log="xy")
    rows = table.where(kind="relu network")
    middle.law(rows, "eps", "eps", "theory: ≤ ε")
    middle.points(rows, "eps", "bound", "proven", drawing.BLUE, "s", is_open=True)
    middle.points(rows, "eps", "max_error", "observed", drawing.BLUE)
    right.label("the 20×5 task, trained and constructed", "", "variance left unexplained", log="y")
    for i, (model, colour) in enumerate(COLOURS.items()):
        rows = Table({**row, "at": i} for row in table.where(kind="trained", model=model))
        right.seeds(rows, "at", "unexplained", f"trained, {model}: mean and interval", colour)
        beside = i + 0.12 * (np.arange(len(rows)) - len(rows) / 2 + 0.5) / 2 + 0.25
        right.measured(beside, rows.column("unexplained"), "each seed" if i == 0 else "", drawing.GREY, size=3)
    linear = table.where(kind="linear")[0]["unexplained"]
    right.axes.axhline(linear, color=drawing.GREY, ls=":", lw=1.3, label="best affine map")
    built = table.where(kind="relu network").column("unexplained")
    right.measured([2] * len(built), built, "constructed, ε = 10⁻² … 3·10⁻⁴", drawing.INK, "s")
    right.axes.set_xlim(-0.6, 2.6)
    right.axes.set_xticks([0, 1, 2], labels=["two layers", "attention\n+ softmax", "relu_network"])
    right.legend(1)


ABOUT = About(
    13,
    "Sequence-to-sequence: two layers, and attention then softmax",
    "Do two attention layers, and one followed by a softmax, approximate a ReLU target on sequences: "
    "constructed, trained?",
    "|out − f| ≤ ω_f(√D(h/2 + δ)) + osc·D(P−1)e^(−β/2): O(1/P) with P^D cells, D = nd. As ReLU networks: "
    "each hidden unit is one truncated linear function, O(1/p) whatever D is.",
    "2504.15956: abstract (two layers; one layer and a softmax); its summary: mechanism 3, component map; the 20×5 "
    "experiment of its authors; the summary of 2504.19901: no positional encodings",
)
