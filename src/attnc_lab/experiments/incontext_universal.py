"""Experiment 16: one program in context for all continuous functions, from prompts of 16 to 16,384 examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attnc import incontext
from attnc_lab import drawing
from attnc_lab.experiment import (
    About,
    Cell,
    Constant,
    Power,
    Row,
    Span,
    Status,
    Table,
    Verdict,
    Verdicts,
    listed,
    sweep,
)
from attnc_lab.measuring import lattice, middles

LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
SHARPNESS = (0.5, 2.0, 8.0, 32.0)
"""The values of β·fill², where fill is the fill distance of the prompt."""
DIMENSIONS = (1, 2, 3)
FAMILIES = ("fourier", "piecewise", "seeds")
FINE = {1: 20_000, 2: 500, 3: 72}
"""Cells per axis of the lattice on which fill distances are bounded."""
SOFTNESS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 2.0)
"""The same with corrections, which allow a softer head."""
QUERIES = 256
"""Number of points at which errors are measured: four blocks of the program."""
CORRECTIONS = (0, 1, 7)
"""Numbers of corrections. With one, the program has two layers of averages."""
CORRECTED = {"quick": (16, 36, 64, 144, 256, 576), "full": (16, 36, 64, 144, 256, 576, 1024, 2304)}
"""The lengths of prompts with corrections, whose layers take N² scores. They are squares, for grids of two axes."""
COLOURS = dict(zip(DIMENSIONS, (drawing.BLUE, drawing.GREEN, drawing.ORANGE), strict=True))


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="universal", d=DIMENSIONS, family=FAMILIES[:1], N=LENGTHS),
        *sweep(kind="universal", d=DIMENSIONS, family=FAMILIES[1:], N=LENGTHS[:-1] if profile == "quick" else LENGTHS),
        *sweep(kind="corrected", d=(1, 2), prompt=("random", "grid"), N=CORRECTED[profile]),
    ]


class Function(NamedTuple):
    """A function on [−1, 1]^d with a Lipschitz constant, and a bound of |f| and of max f − min f."""

    values: Callable[[np.ndarray], np.ndarray]
    lipschitz: float
    oscillation: float


def function(family: str, d: int, seed: int) -> Function:
    """Return a random function of a family, or the target of the papers with d variables."""
    rng = np.random.default_rng([seed, d])
    if family == "seeds":
        if d == 1:
            return Function(lambda x: np.clip(2 * x[:, 0], -0.5, 0.5), 2.0, 1.0)
        # sin + cos on [−3, 3], stretched; |∇|² ≤ 9 for each term.
        waves = (np.sin, np.cos, np.sin)[:d]
        return Function(
            lambda x: np.sum([wave(3 * x[:, i]) for i, wave in enumerate(waves)], axis=0), 3 * math.sqrt(d), 2.0 * d
        )
    if family == "fourier":
        frequencies, phases = 3 * rng.normal(size=(8, d)), rng.uniform(0, 2 * np.pi, 8)
        weights = rng.normal(size=8)
        weights /= np.abs(weights).sum()
        steepest = float((np.abs(weights) * np.linalg.norm(frequencies, axis=1)).sum())
        return Function(lambda x: np.cos(x @ frequencies.T + phases) @ weights, steepest, 2.0)
    planes = [(rng.normal(size=(5, d)), rng.normal(size=5)) for _ in range(2)]

    def difference(x: np.ndarray) -> np.ndarray:
        one, two = ((x @ slopes.T + offsets).max(axis=1) for slopes, offsets in planes)
        return one - two

    lipschitz = sum(float(np.linalg.norm(slopes, axis=1).max()) for slopes, _ in planes)
    size = float(np.abs(difference(np.zeros((1, d))))[0]) + lipschitz * math.sqrt(d)
    return Function(difference, lipschitz, 2 * size)


def prompt_of(N: int, d: int, seed: int, kind: str = "random") -> np.ndarray:
    """Return N points of [−1, 1]^d: random ones, or the middles of a grid of about N cells."""
    if kind == "grid":
        return lattice(middles(-1, 1, round(N ** (1 / d))), d)
    return np.random.default_rng([seed, N, d]).uniform(-1, 1, (N, d))


def fill_distance(points: np.ndarray) -> float:
    """Return a bound of the largest distance from a point of [−1, 1]^d to the nearest of these points."""
    from scipy.spatial import cKDTree

    d = points.shape[1]
    places = lattice(middles(-1, 1, FINE[d]), d)
    # Every point of the box is within half a diagonal of a cell of its middle.
    return float(np.max(cKDTree(points).query(places)[0])) + math.sqrt(d) / FINE[d]


def measure(cell: Cell, seed: int) -> list[Row]:
    d, N = cell["d"], cell["N"]
    is_corrected = cell["kind"] == "corrected"
    f = function("fourier" if is_corrected else cell["family"], d, seed)
    X = prompt_of(N, d, seed, cell.get("prompt", "random"))
    fill = fill_distance(X)
    queries = np.random.default_rng([seed, 1]).uniform(-1, 1, (QUERIES, d))
    inside = np.abs(queries).max(axis=1) < 0.7
    rows: list[Row] = []
    for corrections in CORRECTIONS if is_corrected else (0,):
        for sharpness in SOFTNESS if is_corrected else SHARPNESS:
            model = incontext.NadarayaWatson(gamma=sharpness / fill**2, corrections=corrections).fit(X, f.values(X))
            errors = np.abs(model.predict(queries) - f.values(queries))
            row: Row = {"fill": fill, "sharpness": sharpness, "corrections": corrections, "error": errors.max()}
            row["inner_error"] = errors[inside].max()
            if not corrections:
                row["bound"] = model.error_bound(lambda t: f.lipschitz * t, fill, f.oscillation).value
            rows.append(row | {"lipschitz": f.lipschitz})
    return rows


def best(rows: Table, name: str = "error") -> Table:
    """Return for every fill distance the row with the smallest value of a column."""
    return Table(min(rows.where(fill=fill), key=lambda row: row[name]) for fill in rows.distinct("fill"))


def judge(table: Table) -> Verdicts:
    plain = table.where(kind="universal")
    tightest = Span.of([row["bound"] / row["error"] for d in DIMENSIONS for family in FAMILIES
                        for row in best(plain.where(d=d, family=family), "bound")])  # fmt: skip
    yield Verdict(
        "Universal approximation in context (an open question of the paper): one program predicts every continuous "
        "function from examples in its prompt.",
        Status.HOLDS.when(plain.is_within("error", "bound")),
        f"for three families of functions of 1, 2 and 3 variables, prompts of 16 to {LENGTHS[-1]:,} random examples "
        f"and β·fill² = {SHARPNESS[0]:g} … {SHARPNESS[-1]:g} every error is below the proven ω̂_f(√(fill² + "
        f"(log N)/β)). At the β with the smallest bound, the bound is {tightest:.2g} times the error: it counts with "
        "the steepest place of f, and the emptiest place of the prompt.",
        tightest.numbers("ratio"),
    )
    laws = {(d, family): best(plain.where(d=d, family=family)).power("fill", "error")
            for d in DIMENSIONS for family in FAMILIES}  # fmt: skip
    rates = {f"d = {d}": Span.of([laws[d, family].exponent for family in FAMILIES]) for d in DIMENSIONS}
    constant = max(row["error"] / (row["lipschitz"] * row["fill"]) for d in DIMENSIONS for family in FAMILIES
                   for row in best(plain.where(d=d, family=family)))  # fmt: skip
    chosen = [
        row["sharpness"] for d in DIMENSIONS for family in FAMILIES for row in best(plain.where(d=d, family=family))
    ]
    yield Verdict(
        "The error falls like the fill distance of the prompt.",
        Status.CONSTANT.when(constant <= 1 and all(span.least > 0.6 for span in rates.values())),
        f"exponents in the fill distance, with the best β for each prompt: {listed('{1:.2f} ({0})', rates)}; theory at "
        f"least 1. The best β·fill² has the median {np.median(chosen):.2g}. So N examples give N^(−1/d), and about "
        "ε^(−d) examples are needed.",
        {"constant": constant, "median_sharpness": float(np.median(chosen))},
        Constant(constant, "largest error over Λ·fill, at the best β"),
    )
    corrected = table.where(kind="corrected")
    powers = {f"{d} {prompt} {count}": _law(corrected, d, prompt, count)
              for d in (1, 2) for prompt in ("random", "grid") for count in CORRECTIONS}  # fmt: skip
    gains = {d: _gain(corrected, d) for d in (1, 2)}
    shown = {count: powers[f"1 grid {count}"].exponent for count in CORRECTIONS}
    random = {count: powers[f"1 random {count}"].exponent for count in CORRECTIONS}
    yield Verdict(
        "Beyond the theorem: a soft head with values solved in context has a better rate on a grid of examples.",
        Status.HOLDS.when(shown[1] > shown[0] + 0.5 and min(gains.values()) > 1),
        f"one correction v = y + (y − Ay) is one more layer. Within |x| ≤ 0.7 the exponents in the fill distance, for "
        f"one variable and a grid of examples, are {listed('{1:.2f} ({0} corrections)', shown)}; for random examples "
        f"{listed('{1:.2f} ({0})', random)}, so the gain in rate needs a grid. At the longest prompt "
        f"of a grid one correction makes the error {listed('{1:,.0f} times (d = {0})', gains)} smaller. This is "
        "measured, not proved.",
        {f"exponent_{count}": value for count, value in shown.items()}
        | {f"gain_{d}": gain for d, gain in gains.items()},
    )


def _law(rows: Table, d: int, prompt: str, corrections: int) -> Power:
    return best(rows.where(d=d, prompt=prompt, corrections=corrections), "inner_error").power("fill", "inner_error")


def _gain(rows: Table, d: int) -> float:
    """Return how much smaller one correction makes the error, at the longest prompt of a grid."""
    one, two = (best(rows.where(d=d, prompt="grid", corrections=count), "inner_error")[-1] for count in (0, 1))
    return float(one["inner_error"] / two["inner_error"])


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third = drawing.panels(picture, 3, width=4.9, height=4.3)
    plain = table.where(kind="universal")
    first.label("error and proven bound, best β of each", "fill distance of the prompt", "largest error", log="xy")
    for d, colour in COLOURS.items():
        for family, marker in zip(FAMILIES, "o^s", strict=True):
            rows = best(plain.where(d=d, family=family))
            first.points(rows, "fill", "error", f"{family}, d = {d}", colour, marker)
        rows = best(plain.where(d=d, family="fourier"), "bound")
        first.law(rows, "fill", "bound", f"proven, fourier, d = {d}", colour)
    first.legend(3)
    second.label("the temperature, 4,096 examples, fourier", "β·fill²", "largest error", log="xy")
    for d, colour in COLOURS.items():
        rows = plain.where(d=d, family="fourier", N=4096)
        second.law(rows, "sharpness", "bound", f"proven, d = {d}", colour)
        second.points(rows, "sharpness", "error", f"measured, d = {d}", colour)
    third.label("solved in context, examples on a grid", "fill distance of the prompt", "error, |x| ≤ 0.7", log="xy")
    for d, colour in ((1, drawing.BLUE), (2, drawing.GREEN)):
        for corrections, marker in zip(CORRECTIONS, "o^s", strict=True):
            rows = best(table.where(kind="corrected", d=d, prompt="grid", corrections=corrections), "inner_error")
            third.points(rows, "fill", "inner_error", f"d = {d}, {corrections} corrections", colour, marker)
    rows = best(table.where(kind="corrected", d=1, prompt="grid", corrections=0), "inner_error")
    fine = np.array([rows.column("fill").min(), rows.column("fill").max()])
    for power, style in ((2, "--"), (4, ":")):
        third.theory(fine, rows[0]["inner_error"] * (fine / rows[0]["fill"]) ** power, f"slope {power}", style=style)
    third.axes.set_ylim(1e-13, 2)


ABOUT = About(
    16,
    "Universal approximation in context",
    "Does one program predict every continuous function from examples in its prompt? At which rate, and at which "
    "temperature? What do more layers give?",
    "|out − f| ≤ ω̂_f(√(fill² + (log N)/β)) for N examples of fill distance `fill`: Λ·fill for β → ∞. With values "
    "corrected once, the bias of a soft head is of a higher order in the width of its kernel.",
    "2504.15956: open question on universality in context",
)
