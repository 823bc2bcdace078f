"""An experiment: a question, a prediction from theory, a measurement, verdicts, and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure

Cell = Mapping[str, Any]
"""The parameters of one measurement, by name: numbers and texts."""
Row = dict[str, Any]
"""The numbers of one measurement, by name. A numpy scalar is stored as a Python number."""
PROFILES = ("quick", "full")
CONFIDENCE = 0.95
"""The level of the confidence intervals of exponents: the usual one."""


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
    """The conclusion about one claim. `numbers` holds the figures behind the words."""

    claim: str
    status: Status
    because: str
    numbers: Mapping[str, float | np.floating]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", {name: float(number) for name, number in self.numbers.items()})


Verdicts = Iterator[Verdict]


class Table(list[Row]):
    """The rows of an experiment. A row may lack columns that others have."""

    def where(self, **wanted: Any) -> Table:
        """Return the rows that have these values."""
        return Table(row for row in self if all(row.get(name) == value for name, value in wanted.items()))

    def having(self, name: str) -> Table:
        """Return the rows that have this column."""
        return Table(row for row in self if name in row)

    def above(self, name: str, least: float) -> Table:
        """Return the rows in which this column is larger than `least`."""
        return Table(row for row in self if row[name] > least)

    def column(self, name: str) -> Float[np.ndarray, " rows"]:
        return np.array([float(row[name]) for row in self])

    def distinct(self, name: str) -> list[Any]:
        """Return the distinct values of a column, in order of first appearance."""
        return list(dict.fromkeys(row[name] for row in self if name in row))

    def ratio(self, over: str, under: str) -> Float[np.ndarray, " rows"]:
        """Return one column divided by another."""
        return self.column(over) / self.column(under)

    def is_within(self, name: str, bound: str) -> bool:
        """Return whether a column is at most another one in every row."""
        return bool((self.column(name) <= self.column(bound)).all())

    def power(self, x: str, y: str, shift: float = 0.0) -> Power:
        """Fit the column `y` as a power of the column `x`, plus `shift`."""
        return fit_power(self.column(x) + shift, self.column(y))

    def growth(self, y: str) -> Power:
        """Fit the column `y` as a power of 1/eps."""
        return fit_power(1 / self.column("eps"), self.column(y))


class Span(NamedTuple):
    """The smallest and the largest of some values. Its text is "0.5 to 2", each number in the given format."""

    least: float
    largest: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " values"] | Sequence[float]) -> Span:
        return cls(float(np.min(values)), float(np.max(values)))

    def __format__(self, spec: str) -> str:
        return f"{self.least:{spec}} to {self.largest:{spec}}"

    def numbers(self, name: str) -> dict[str, float]:
        """Return both ends as numbers of a verdict."""
        return {f"least_{name}": self.least, f"largest_{name}": self.largest}


class Power(NamedTuple):
    """y ≈ factor·x^exponent. The exponent lies in [low, high] with 95 % confidence if the residuals are normal."""

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
    """The texts of an experiment. `source` is the place of the claim in the papers' summaries."""

    number: int
    title: str
    question: str
    prediction: str
    source: str


@dataclass(frozen=True)
class Experiment(About):
    """An experiment.

    `cells` are the parameter points of a profile. `measure` returns the rows of one, determined by the seed.
    """

    name: str
    cells: Callable[[str], list[Cell]]
    measure: Callable[[Cell, int], Iterable[Row]]
    judge: Callable[[Table], Verdicts]
    draw: Callable[[Table, Figure], None]

    @classmethod
    def of_module(cls, module: Any) -> Experiment:
        """Return the experiment that a module defines: ABOUT, and the functions cells, measure, judge and draw."""
        functions = {name: getattr(module, name) for name in ("cells", "measure", "judge", "draw")}
        return cls(**vars(module.ABOUT), name=module.__name__.rpartition(".")[2], **functions)

    def rows(self, cell: Cell, seed: int) -> list[Row]:
        """Measure a cell, and convert numpy scalars to Python numbers."""
        return [{name: _plain(value) for name, value in row.items()} for row in self.measure(cell, seed)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def listed(template: str, values: Mapping[Any, Any]) -> str:
    """Return "a, b, c", where each entry is the template filled with a name, as {0}, and its value, as {1}."""
    return ", ".join(template.format(name, value) for name, value in values.items())


def sweep(**axes: Any) -> list[Cell]:
    """Return a cell for every combination of values. The last name varies fastest. A single value is in all cells."""
    values = [[choice] if isinstance(choice, str | int | float) else choice for choice in axes.values()]
    return [dict(zip(axes, map(_plain, chosen), strict=True)) for chosen in itertools.product(*values)]
