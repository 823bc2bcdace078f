"""An experiment: a question, the prediction of theory, a measurement, verdicts, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import attnc

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure

Number = float | int | str
Cell = Mapping[str, Number]
"""The parameters of one measurement."""
Row = dict[str, Number]
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

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def where(self, **wanted: Number) -> Table:
        """Return the rows that have these values."""
        return Table([row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())])

    def having(self, name: str) -> Table:
        """Return the rows that have this column."""
        return Table([row for row in self.rows if name in row])

    def column(self, name: str) -> Float[np.ndarray, " rows"]:
        return np.array([float(row[name]) for row in self.rows])

    def distinct(self, name: str) -> list[Number]:
        """Return the values of a column, each once, in the order in which they come."""
        return list(dict.fromkeys(row[name] for row in self.rows if name in row))

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
class Experiment:
    """`cells` are the parameter points of a profile; `measure` gives the rows of one, the same for the same seed."""

    cells: Callable[[str], list[Cell]]
    measure: Callable[[Cell, int], list[Row]]
    judge: Callable[[Table], list[Verdict]]
    draw: Callable[[Table], Figure]
    number: int
    name: str
    title: str
    question: str
    prediction: str
    source: str  # where the papers' summaries claim it


def unproved(target: attnc.Target, built: attnc.constructions.Built, eps: float | None = None) -> attnc.Network:
    """Return a construction as a network that claims nothing, ready to run and to record."""
    nothing = attnc.Certificate(
        bound=None, observed=None, terms=(), assumptions=(), dtype=str(built.program.dtype), method="none"
    )
    return attnc.Network(built.program, nothing, target.box, built.construction, target.text, eps)
