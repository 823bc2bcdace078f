"""An experiment: a question, the prediction of theory, a measurement, verdicts, and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import attnc

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure

Cell = Mapping[str, Any]
"""The parameters of one measurement, by name: numbers and texts."""
Row = dict[str, Any]
"""The numbers of one measurement, by name. A scalar of numpy is stored as a number of Python."""
PROFILES = ("quick", "full")
CONFIDENCE = 0.95
"""The level of the confidence intervals of exponents, as is usual."""


class Status(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    CONSTANT = "holds with a constant"
    FAILS = "fails"

    def when(self, condition: bool | np.bool_) -> Status:
        """Return this status if the condition is true, otherwise FAILS."""
        return self if condition else Status.FAILS


@dataclass(frozen=True)
class Verdict:
    """The conclusion about one claim; `numbers` are the figures that the words rest on."""

    claim: str
    status: Status
    because: str
    numbers: Mapping[str, float | np.floating]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", {name: float(number) for name, number in self.numbers.items()})


class Table(Sequence[Row]):
    """The rows of an experiment; a column that a row does not have is absent, not empty."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def where(self, **wanted: Any) -> Table:
        """Return the rows that have these values."""
        return Table(row for row in self.rows if all(row.get(name) == value for name, value in wanted.items()))

    def having(self, name: str) -> Table:
        """Return the rows that have this column."""
        return Table(row for row in self.rows if name in row)

    def above(self, name: str, least: float) -> Table:
        """Return the rows in which this column is larger than `least`."""
        return Table(row for row in self.rows if row[name] > least)

    def column(self, name: str) -> Float[np.ndarray, " rows"]:
        return np.array([float(row[name]) for row in self.rows])

    def distinct(self, name: str) -> list[Any]:
        """Return the values of a column, each once, in the order in which they come."""
        return list(dict.fromkeys(row[name] for row in self.rows if name in row))

    def ratio(self, over: str, under: str) -> Float[np.ndarray, " rows"]:
        """Return one column divided by another."""
        return self.column(over) / self.column(under)

    def power(self, x: str, y: str, shift: float = 0.0) -> Power:
        """Fit the column `y` as a power of the column `x`, plus `shift`."""
        return fit_power(self.column(x) + shift, self.column(y))


class Power(NamedTuple):
    """y ≈ factor·x^exponent; the exponent lies in [low, high] with 95 % confidence if the residuals are normal."""

    exponent: float
    low: float
    high: float
    factor: float

    def __call__(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        return self.factor * np.asarray(x, float) ** self.exponent

    def __str__(self) -> str:
        return f"{self.exponent:.3f} [{self.low:.3f}, {self.high:.3f}]"


def fit_power(x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"]) -> Power:
    """Fit a power by least squares on logarithms."""
    from scipy import stats

    logs_x, logs_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    fit = stats.linregress(logs_x, logs_y)
    free = len(logs_x) - 2
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, free) * fit.stderr) if free > 0 else np.inf
    slope = float(fit.slope)
    return Power(slope, slope - reach, slope + reach, float(np.exp(fit.intercept)))


@dataclass(frozen=True)
class About:
    """The words of an experiment; `source` is the place where the papers' summaries claim it."""

    number: int
    title: str
    question: str
    prediction: str
    source: str


@dataclass(frozen=True)
class Experiment(About):
    """`cells` are the parameter points of a profile; `measure` gives the rows of one, the same for the same seed."""

    name: str
    cells: Callable[[str], list[Cell]]
    measure: Callable[[Cell, int], list[Row]]
    judge: Callable[[Table], list[Verdict]]
    draw: Callable[[Table], Figure]

    @classmethod
    def of_module(cls, module: Any) -> Experiment:
        """Return the experiment that a module defines: ABOUT, and the functions cells, measure, judge and draw."""
        functions = {name: getattr(module, name) for name in ("cells", "measure", "judge", "draw")}
        return cls(**vars(module.ABOUT), name=module.__name__.rpartition(".")[2], **functions)

    def rows(self, cell: Cell, seed: int) -> list[Row]:
        """Measure a cell, with numbers of Python in place of numpy's scalars."""
        return [{name: _plain(value) for name, value in row.items()} for row in self.measure(cell, seed)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def sweep(**axes: Any) -> list[Cell]:
    """Return a cell for every combination of values. The last name varies fastest; a single value is in all cells."""
    values = [[choice] if isinstance(choice, str | int | float) else choice for choice in axes.values()]
    return [dict(zip(axes, map(_plain, chosen), strict=True)) for chosen in itertools.product(*values)]


def lattice(axis: Float[np.ndarray, " places"], d: int) -> Float[np.ndarray, "points d"]:
    """Return all points whose coordinates are places of the axis; the last coordinate varies fastest."""
    return np.stack(np.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d)


def middles(lo: float, hi: float, count: int) -> Float[np.ndarray, " points"]:
    """Return the middles of `count` equal parts of [lo, hi]."""
    return lo + (hi - lo) * (np.arange(count) + 0.5) / count


def unproved(target: attnc.Target, built: attnc.constructions.Built, eps: float | None = None) -> attnc.Network:
    """Return a construction as a network that claims nothing, ready to run and to record."""
    nothing = attnc.Certificate(
        bound=None, observed=None, terms=(), assumptions=(), dtype=str(built.program.dtype), method="none"
    )
    return attnc.Network(built.program, nothing, target.box, built.construction, target.text, eps)


def errors_at(
    points: Float[np.ndarray, "points ..."], run: Callable[[np.ndarray], np.ndarray], target: attnc.Target
) -> Float[np.ndarray, "points outputs"]:
    """Return |run − target| at the points, in float64, with the outputs of all tokens side by side."""
    found = run(points).astype(np.float64).reshape(len(points), -1)
    return np.abs(found - target(points.reshape(len(points), -1)))


def sizes_of(built: attnc.constructions.Built) -> Row:
    """Return the size of a construction and, where its theorem has one, its bound."""
    program = built.program
    found: Row = {"anchors": program.num_anchors, "parameters": program.num_parameters}
    return found | ({} if built.bound is None else {"bound": built.bound.value})
