"""Experiment 24: statistical models in context: every estimator's error against its proven bound, over T, N and d."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flint
import numpy as np

from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Constant, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep

DIGITS = 60
"""Decimal digits of the optima that fits are compared with."""
NEWTON_STEPS = 8
"""Newton steps of such an optimum, from the fit. Each doubles the number of right digits, and fits have nine."""
ROWS, FEATURES = (20, 60, 200, 600), (1, 2, 4, 8, 16)
"""The numbers N of examples and d of features. Those that are not varied are 60 and 4."""
BASE = {"rows": 60, "features": 4}
NOISE = 0.3
PENALTY = 0.1
"""The penalty of the sparse models, of Poisson regression, and of half of |w|² in logistic regression."""
COLOURS = {
    "least squares": drawing.INK,
    "ridge": drawing.BLUE,
    "lasso": drawing.GREEN,
    "elastic net": drawing.SKY,
    "logistic": drawing.ORANGE,
    "poisson": drawing.PURPLE,
    "kernel ridge": drawing.YELLOW,
}
KERNEL = "kernel ridge"
"""The model whose weights belong to examples, and not to features."""
KERNEL_RIDGE, NEIGHBOURS = {"alpha": PENALTY, "gamma": 0.5}, 5
"""The parameters of kernel ridge regression, and the number of neighbours."""
MOST_KERNEL_ROWS = 200
"""Maximum number of examples of kernel ridge regression: its enclosure takes N³ operations in many digits."""
QUERIES = 50
"""The number of points at which neighbours are asked for."""
TURNED = ("least squares", "ridge")
"""The models whose turns have a bound that is known before the fit."""


class Model(NamedTuple):
    """An estimator: its name in `attnc.incontext` and its parameters, its loss, and the penalties |w| and |w|²/2."""

    name: str
    options: dict[str, float]
    loss: str = "squared"
    sparse: float = 0.0
    square: float = 0.0
    is_mean: bool = False
    """Whether the loss is a mean over the examples, and not a sum."""


MODELS = {
    "least squares": Model("LinearRegression", {}),
    "ridge": Model("Ridge", {"alpha": 1.0}, square=1.0),
    "lasso": Model("Lasso", {"alpha": PENALTY}, sparse=PENALTY, is_mean=True),
    "elastic net": Model("ElasticNet", {"alpha": PENALTY}, sparse=PENALTY / 2, square=PENALTY / 2, is_mean=True),
    "logistic": Model("LogisticRegression", {"C": 1 / PENALTY}, "logistic", square=PENALTY),
    "poisson": Model("PoissonRegressor", {"alpha": PENALTY}, "poisson", square=PENALTY, is_mean=True),
}


def cells(profile: str) -> list[Cell]:
    by_rows = sweep(kind="fit", axis="rows", model=MODELS, rows=ROWS, features=BASE["features"])
    by_features = sweep(kind="fit", axis="features", model=MODELS, rows=BASE["rows"], features=FEATURES)
    sized = [*sweep(axis="rows", rows=ROWS, features=BASE["features"]),
             *sweep(axis="features", rows=BASE["rows"], features=FEATURES)]  # fmt: skip
    kernels = [{"kind": "kernel", "model": KERNEL, **size} for size in sized if size["rows"] <= MOST_KERNEL_ROWS]
    neighbours = [{"kind": "neighbours", **size} for size in sized]
    return [*by_rows, *by_features, *sweep(kind="turns", model=TURNED, **BASE), *kernels, *neighbours]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] in ("kernel", "neighbours"):
        X, y = examples("squared", cell["rows"], cell["features"], seed)
        return [_kernel(X, y) if cell["kind"] == "kernel" else _neighbours(X, y, seed)]
    model = MODELS[cell["model"]]
    X, y = examples(model.loss, cell["rows"], cell["features"], seed)
    fit = fitted(model, X, y)
    if cell["kind"] == "turns":
        return _turns(fit)
    found = np.append(np.ravel(fit.coef_), np.ravel(fit.intercept_))
    bounds = np.append(np.ravel(fit.coef_bound_), np.ravel(fit.intercept_bound_))
    off = distances(model, X, y, found)
    shares = np.divide(off, bounds, out=np.where(off > 0, np.inf, 0.0), where=bounds > 0)
    return [{"layers": fit.program_.depth, "error": off.max(), "bound": bounds.max(), "share": shares.max()}]


def examples(loss: str, rows: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return examples of a model with random weights. Every other weight is 0."""
    rng = np.random.default_rng([seed, rows, features])
    X = rng.normal(size=(rows, features))
    z = X @ (rng.normal(size=features) * (np.arange(features) % 2 == 0))
    if loss == "logistic":
        return X, (z + rng.logistic(size=rows) > 0).astype(float)
    if loss == "poisson":
        return X, rng.poisson(np.exp(np.clip(z, -3, 3) / 2)).astype(float)
    return X, z + NOISE * rng.normal(size=rows)


def fitted(model: Model, X: np.ndarray, y: np.ndarray) -> Any:
    """Fit an estimator by attention. Its warnings are of no interest, since its error is measured."""
    from attnc import incontext

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(incontext, model.name)(**model.options).fit(X, y)


SLOPES: dict[str, Callable[[flint.arb], tuple[flint.arb, flint.arb]]] = {
    "squared": lambda z: (z, flint.arb(1)),
    "poisson": lambda z: (z.exp(), z.exp()),
    "logistic": lambda z: ((m := 1 / (1 + (-z).exp())), m * (1 - m)),
}
"""The mean of an observation as a function of z = w·x + b, and its derivative."""


def distances(model: Model, X: np.ndarray, y: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the distance of each weight, and of the intercept, from the optimum in many digits.

    Weights that are 0 in the fit are kept there. The others have the signs of the fit, so that Newton's method applies.
    That the gradient is smaller than the penalty at those that are 0 is checked.
    """
    before, flint.ctx.dps = flint.ctx.dps, DIGITS
    try:
        n, d = X.shape
        free = [c for c in range(d + 1) if c == d or not model.sparse or found[c]]
        A = flint.arb_mat(n, d + 1, [flint.arb(v) for row in X.tolist() for v in (*row, 1.0)])
        scale = flint.arb(1) / n if model.is_mean else flint.arb(1)
        w = [flint.arb(v) for v in found.tolist()]
        for _ in range(NEWTON_STEPS):
            gradient, curvature = _derivatives(model, A, y, w, scale)
            H = flint.arb_mat(len(free), len(free), [curvature[i, j] for i in free for j in free])
            step = H.solve(flint.arb_mat(len(free), 1, [gradient[c] for c in free]))
            for k, c in enumerate(free):
                w[c] = (w[c] - step[k, 0]).mid()
        gradient, _ = _derivatives(model, A, y, w, scale)
        assert all(abs(float(gradient[c])) < model.sparse for c in range(d) if c not in free), "another support"
        return np.array([abs(float(w[c] - flint.arb(float(found[c])))) for c in range(d + 1)])
    finally:
        flint.ctx.dps = before


def _derivatives(
    model: Model, A: flint.arb_mat, y: np.ndarray, w: list[flint.arb], scale: flint.arb
) -> tuple[list[flint.arb], flint.arb_mat]:
    """Return the gradient, with the penalties at the weights that are not 0, and the matrix of second derivatives."""
    n, width = A.nrows(), len(w)
    z = A * flint.arb_mat(width, 1, w)
    means, slopes = zip(*(SLOPES[model.loss](z[i, 0]) for i in range(n)), strict=True)
    off = flint.arb_mat(n, 1, [mean - flint.arb(float(wanted)) for mean, wanted in zip(means, y, strict=True)])
    g, B = A.transpose() * off, flint.arb_mat(n, width, [slopes[i] * A[i, c] for i in range(n) for c in range(width)])
    H = scale * (A.transpose() * B)
    gradient = [scale * g[c, 0] for c in range(width)]
    for c in range(width - 1):
        sign = (w[c] > 0) - (w[c] < 0)
        gradient[c] += flint.arb(model.square) * w[c] + flint.arb(model.sparse) * sign
        H[c, c] += flint.arb(model.square)
    return gradient, H


def _kernel(X: np.ndarray, y: np.ndarray) -> Row:
    """Return the largest error of a dual weight of kernel ridge regression, and its bound at the examples at hand.

    M = K + αI ≥ αI, r = Mc − y and R ≈ M⁻¹ give c − c* = M⁻¹r = Rr + (I − RM)M⁻¹r, where |M⁻¹r| ≤ |r|/α.
    """
    from attnc import incontext

    before, flint.ctx.dps = flint.ctx.dps, DIGITS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = incontext.KernelRidge(**KERNEL_RIDGE).fit(X, y)
        found, n = fit.dual_coef_, len(y)
        alpha, gamma = (flint.arb(KERNEL_RIDGE[name]) for name in ("alpha", "gamma"))
        rows = _matrix(X)
        inner = rows * rows.transpose()
        square = [inner[i, i] for i in range(n)]
        entries = [(gamma * (2 * inner[i, j] - square[i] - square[j])).exp() for i in range(n) for j in range(n)]
        M = flint.arb_mat(n, n, entries) + alpha * _identity(n)
        R = np.linalg.inv(np.array([float(v) for v in M.entries()]).reshape(n, n))
        inverse, c, wanted = _matrix(R), _matrix(found[:, None]), _matrix(y[:, None])
        r = M * c - wanted
        first, rest = inverse * r, _identity(n) - inverse * M
        size = sum((v * v for v in r.entries()), flint.arb(0)).sqrt() / alpha
        rests = (sum((rest[i, j] ** 2 for j in range(n)), flint.arb(0)).sqrt() * size for i in range(n))
        bounds = np.array([float((abs(first[i, 0]) + each).upper()) for i, each in enumerate(rests)])
        best = c - first
        for _ in range(NEWTON_STEPS):
            best = _middles(best - inverse * (M * best - wanted))
        off = np.array([abs(float(v)) for v in (c - best).entries()])
    finally:
        flint.ctx.dps = before
    shares = np.divide(off, bounds, out=np.where(off > 0, np.inf, 0.0), where=bounds > 0)
    return {"layers": fit.program_.depth, "error": off.max(), "bound": bounds.max(), "share": shares.max()}


def _neighbours(X: np.ndarray, y: np.ndarray, seed: int) -> Row:
    """Return the largest distance of a prediction from the mean of the nearest targets, and the predicted rounding.

    A sum of rows + neighbours terms of at most max|y| is rounded, with weights that exceed 1 − e^−40 at the nearest.
    """
    from attnc import incontext

    fit = incontext.KNeighborsRegressor(n_neighbors=NEIGHBOURS).fit(X, y)
    asked = np.random.default_rng([seed, 11]).normal(size=(QUERIES, X.shape[1]))
    distances = ((asked[:, None].astype(np.longdouble) - X) ** 2).sum(axis=-1)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBOURS]
    off = np.abs(fit.predict(asked) - y[nearest].mean(axis=1))
    rounding = 2.0**-53 * (len(y) + NEIGHBOURS) * np.abs(y).max()
    return {"layers": fit.program_.depth, "error": off.max(), "bound": rounding}


def _matrix(values: np.ndarray) -> flint.arb_mat:
    rows, columns = values.shape
    return flint.arb_mat(rows, columns, [flint.arb(v) for v in values.ravel().tolist()])


def _identity(n: int) -> flint.arb_mat:
    return _matrix(np.eye(n))


def _middles(values: flint.arb_mat) -> flint.arb_mat:
    return flint.arb_mat(values.nrows(), values.ncols(), [v.mid() for v in values.entries()])


def _turns(fit: Any) -> list[Row]:
    """Return the distance of the weights from the optimum after every turn of Newton and Schulz, and its bound.

    All is in the units of the prompt, whose rows are examples and penalties: S = Σ x xᵀ, Sw* = Σ y x.
    """
    rows = fit.prompt_
    features = fit.trajectory_.shape[1]
    X, y = rows[:, :features].astype(np.longdouble), rows[:, -1].astype(np.longdouble)
    S = np.asarray(X.T @ X, float)
    values = np.linalg.eigvalsh(S)
    best = np.linalg.lstsq(np.asarray(X, float), np.asarray(y, float), rcond=None)[0]
    size = np.sqrt(best @ S @ best)
    return [
        {
            "turn": turn,
            "error": np.sqrt((w - best) @ S @ (w - best)) / size,
            "bound": (1 - values[0] / values.sum()) ** (2.0**turn - 1),
        }
        for turn, w in enumerate(fit.trajectory_)
    ]


def judge(table: Table) -> Verdicts:
    fits = Table([*table.where(kind="fit"), *table.where(kind="kernel")])
    models = (*MODELS, KERNEL)
    shares = {name: Span.of(fits.where(model=name).column("share")) for name in models}
    worst = {name: fits.where(model=name).column("error").max() for name in models}
    yield Verdict(
        "Statistical models in context: every weight of every estimator is within its proven bound, over N and d.",
        Status.HOLDS.when(max(share.largest for share in shares.values()) <= 1),
        f"{len(fits)} fits with N = {ROWS[0]} … {ROWS[-1]} (kernel ridge: {MOST_KERNEL_ROWS}) and d = {FEATURES[0]} … "
        f"{FEATURES[-1]}, against optima in {DIGITS} digits. The largest error of a weight is "
        f"{listed('{1:.1e} ({0})', worst)}. In every fit some weight has an error of at least "
        f"{min(share.least for share in shares.values()):.4f} times its bound, so bounds are close. Those of kernel "
        "ridge regression are enclosed here; the others are of the estimators themselves.",
        {f"share_{name.replace(' ', '_')}": share.largest for name, share in shares.items()},
    )
    layers = {name: Span.of(fits.where(model=name).column("layers")) for name in models}
    turns = table.where(kind="turns")
    floor = 1e-13  # rounding of the reference, relative
    above = turns.above("bound", 1e-10)
    slack = Span.of(above.ratio("bound", "error"))
    yield Verdict(
        "T turns of Newton and Schulz bring least squares and ridge regression to within (1 − 1/κ)^(2^T − 1) of the "
        "optimum, relative to its size.",
        Status.HOLDS.when(all(row["error"] <= row["bound"] * (1 + 1e-9) + floor for row in turns)),
        f"a turn is two layers. Down to a bound of 1e-10 it is {slack:.2g} times the error; the last "
        f"error is rounding, {max(turns.where(model=name)[-1]['error'] for name in TURNED):.1e}. The fits above "
        f"take {listed('{1:.0f} ({0})', layers)} layers.",
        slack.numbers("ratio"),
    )
    nearest = table.where(kind="neighbours")
    share = Span.of(nearest.ratio("error", "bound"))
    yield Verdict(
        f"Nearest neighbours in context: the prediction is the mean of the {NEIGHBOURS} nearest targets, but for "
        "rounding.",
        Status.CONSTANT.when(share.largest <= 1),
        f"for N = {ROWS[0]} … {ROWS[-1]} and d = {FEATURES[0]} … {FEATURES[-1]}, {QUERIES} queries each, the largest "
        f"difference is {nearest.column('error').max():.1e}. No bound of a prediction is proven.",
        {"largest": nearest.column("error").max(), "share": share.largest},
        Constant(share.largest, f"largest difference over u·(N + {NEIGHBOURS})·max|y|, u = 2⁻⁵³"),
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third = drawing.panels(picture, 3, width=4.9, height=4.2)
    fits = Table([*table.where(kind="fit"), *table.where(kind="kernel")])
    for panel, axis, name in ((first, "rows", "examples N, d = 4"), (second, "features", "features d, N = 60")):
        panel.label(f"error and proven bound over {'N' if axis == 'rows' else 'd'}", name, "largest error", log="xy")
        for (model, colour), marker in zip(COLOURS.items(), drawing.MARKERS, strict=False):
            rows = fits.where(axis=axis, model=model)
            panel.law(rows, axis, "bound", "_", colour)
            panel.points(rows, axis, "error", model, colour, marker)
        panel.theory([], [], "dashed: proven")
        panel.whole_ticks(ROWS if axis == "rows" else FEATURES)
    third.label("Newton–Schulz turns, N = 60, d = 4", "turn T", "distance, relative", log="y")
    for model in TURNED:
        rows = table.where(kind="turns", model=model)
        third.law(rows.above("bound", 1e-18), "turn", "bound", f"theorem, {model}", COLOURS[model])
        third.points(rows, "turn", "error", f"measured, {model}", COLOURS[model])
    third.axes.set_ylim(1e-18, 3)


ABOUT = About(
    24,
    "Statistical models in context",
    "Is every estimator within its proven bound, over the number of layers, of examples and of features?",
    "For a strongly convex loss |w − w*| ≤ |Rg| + ‖I − RH‖·r (docs/incontext.md), enclosed for the data at hand; with "
    "T exact turns |w_T − w*|_S ≤ (1 − 1/κ)^(2^T − 1)·|w*|_S, κ the trace of S over its least eigenvalue.",
    "2504.15956: abstract (statistical models in context)",
)
