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
CPU_SECONDS, PEAK_MIB = "cpu_seconds", "peak_mib"
"""The columns of a cell's costs, in the first of its rows: processor time, and the growth of memory in MiB."""
COSTS = (CPU_SECONDS, PEAK_MIB)
CONFIDENCE = 0.95
"""The level of the confidence intervals of exponents and of means over seeds: the usual one."""


class Status(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    CONSTANT = "holds with a constant"
    NOT_REACHED = "not reached by this training"
    FAILS = "fails"

    @property
    def meaning(self) -> str:
        """The definition that the report shows."""
        return MEANINGS[self]

    def when(self, condition: bool | np.bool_, otherwise: Status | None = None) -> Status:
        """Return this status if the condition is true, otherwise the other one, which is FAILS unless it is given."""
        return self if condition else otherwise or Status.FAILS


MEANINGS = {
    Status.HOLDS: "the claim was measured as it stands, at every point of the sweep",
    Status.CONSTANT: "what was measured is at most c times the prediction at every point of the sweep; each such "
    "verdict defines its c",
    Status.NOT_REACHED: "this training did not find weights with the property, although such weights exist or may "
    "exist; the number of steps, the number of seeds and the best result are given",
    Status.FAILS: "the measurement contradicts the claim",
}


class Constant(NamedTuple):
    """The c of "holds with the constant c", and its definition: a ratio of a measured and a predicted quantity."""

    value: float
    definition: str


class Effort(NamedTuple):
    """The training behind a verdict: steps of each run, number of seeds, and the best result with its name."""

    steps: int
    seeds: int
    best: float
    what: str

    def __str__(self) -> str:
        return f"{self.steps:,} steps, {self.seeds} seeds, best {self.what} {self.best:.3g}"


@dataclass(frozen=True)
class Verdict:
    """The conclusion about one claim. `numbers` holds the figures behind the words.

    "Holds with a constant" needs the constant. "Not reached by this training" needs the effort.
    """

    claim: str
    status: Status
    because: str
    numbers: Mapping[str, float | np.floating]
    constant: Constant | None = None
    effort: Effort | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", {name: float(number) for name, number in self.numbers.items()})
        assert self.constant is not None or self.status is not Status.CONSTANT, self.claim
        assert self.effort is not None or self.status is not Status.NOT_REACHED, self.claim

    @property
    def label(self) -> str:
        """The status in words, with the constant or the effort of training."""
        if self.status is Status.CONSTANT and self.constant is not None:
            return f"holds with the constant {self.constant.value:.3g}"
        if self.status is Status.NOT_REACHED and self.effort is not None:
            return f"not reached by this training ({self.effort})"
        return str(self.status)


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

    def without_costs(self) -> Table:
        """Return the rows without the costs of their measurement, which differ from run to run."""
        return Table({name: value for name, value in row.items() if name not in COSTS} for row in self)

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


class Interval(NamedTuple):
    """The geometric mean of positive results of some seeds, and its 95 % interval if their logarithms are normal."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " seeds"] | Sequence[float]) -> Interval:
        from scipy import stats

        logs = np.log(np.maximum(np.asarray(values, float), np.finfo(float).tiny))
        free = len(logs) - 1
        reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, free) * logs.std(ddof=1) / np.sqrt(len(logs))) if free else 0.0
        return cls(*(float(np.exp(logs.mean() + step)) for step in (0.0, -reach, reach)))

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def numbers(self, name: str) -> dict[str, float]:
        """Return the mean and both ends as numbers of a verdict."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


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
