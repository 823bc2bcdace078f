"""An experiment: a question, what theory predicts, what is measured, what follows, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure

Number = float | int | str
Cell = Mapping[str, Number]
"""The parameters of one measurement."""
Row = dict[str, Number]
PROFILES = ("quick", "full")


class Status(StrEnum):
    HOLDS = "holds"
    CONSTANT = "holds with a constant"
    FAILS = "fails"


@dataclass(frozen=True)
class Verdict:
    """What the measurement says about one claim; `numbers` are what the words rest on."""

    claim: str
    status: Status
    because: str
    numbers: Mapping[str, float]


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
        """The rows that have these values."""
        return Table([row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())])

    def having(self, name: str) -> Table:
        return Table([row for row in self.rows if name in row])

    def column(self, name: str) -> Float[np.ndarray, " rows"]:
        return np.array([float(row[name]) for row in self.rows])

    def distinct(self, name: str) -> list[Number]:
        """The values of a column, each once, in the order in which they come."""
        return list(dict.fromkeys(row[name] for row in self.rows if name in row))


@dataclass(frozen=True)
class Experiment:
    """`cells` are the parameter points of a profile, `measure` gives the rows of one: the same for the same seed."""

    number: int
    name: str
    title: str
    question: str
    prediction: str
    source: str  # where the papers' summaries claim it
    cells: Callable[[str], list[Cell]]
    measure: Callable[[Cell, int], list[Row]]
    judge: Callable[[Table], list[Verdict]]
    draw: Callable[[Table], Figure]
