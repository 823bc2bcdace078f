"""What a conversion did: every activation with its path, keys and errors; and whatever was left, with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from attnc.converting.activations import Solved
from attnc.model_card import code
from attnc.wording import ceiling


@dataclass
class Replaced:
    """One activation of the model.

    `error` is proven, in exact arithmetic, for every x of `domain`, with the keys as the dtype stores them.
    `block_error` is ‖|W₂|‖_∞·error, where the linear map that follows is known. `seen` is the range of the
    pre-activations and `drift` the largest change of the block's output, on the given inputs; both are measured.
    """

    path: str
    activation: str
    anchors: int
    error: float
    method: str
    dtype: str
    domain: tuple[float, float]
    lipschitz: float
    found: str = "module"  # or "function", of which the code or a run told
    block_error: float | None = None
    seen: tuple[float, float] | None = None
    drift: float | None = None
    also: tuple[str, ...] = ()  # further paths of a shared module
    consumers: tuple[str, ...] = ()  # the linear maps that take the output
    parameters: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, solved: Solved, path: str, found: str) -> Replaced:
        name, keys = str(solved.activation), solved.num_anchors
        dtype = " or ".join(solved.dtypes)
        entry = cls(path, name, keys, solved.error, solved.method, dtype, solved.domain, solved.lipschitz, found)
        entry.parameters = solved.activation.parameters
        return entry

    def as_json(self) -> dict[str, Any]:
        lo, hi = self.domain
        return {
            "name": self.path,
            "activation": self.activation,
            "parameters": [list(pair) for pair in self.parameters],
            "anchors": self.anchors,
            "error": self.error,
            "method": self.method,
            "dtype": self.dtype,
            "domain": None if math.isinf(lo) and math.isinf(hi) else [lo, hi],
            "found": self.found,
            "block_error": self.block_error,
            "seen": None if self.seen is None else list(self.seen),
            "drift": self.drift,
            "also": list(self.also),
        }


@dataclass
class Left:
    """Something that is as it was, and why."""

    path: str
    what: str
    reason: str


@dataclass
class EndToEnd:
    """Measured on given inputs, between the original and the converted model."""

    inputs: str
    hidden: float | None = None
    cosine: float | None = None  # 1 − the least cosine of pooled outputs
    size: float | None = None  # of the original's hidden states


@dataclass
class Report:
    """`replaced`, `left`, `notes`, and `end_to_end` once it was measured. str(report) is a table."""

    eps: float
    dtype: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    end_to_end: EndToEnd | None = None

    @property
    def num_anchors(self) -> int:
        """Keys that a query of every activation meets, summed over activations."""
        return sum(entry.anchors for entry in self.replaced)

    @property
    def error(self) -> float:
        """The largest proven error of an activation."""
        return max((entry.error for entry in self.replaced), default=0.0)

    def as_json(self) -> dict[str, Any]:
        drift = self.end_to_end
        return {
            "eps": self.eps,
            "dtype": self.dtype,
            "replaced": [entry.as_json() for entry in self.replaced],
            "left": [{"name": entry.path, "what": entry.what, "reason": entry.reason} for entry in self.left],
            "notes": list(self.notes),
            "end_to_end": None if drift is None else vars(drift),
        }

    def rows(self) -> list[list[str]]:
        """Cells of the table; proven and measured figures in separate columns."""
        return [
            [
                entry.path or "(the model)",
                entry.activation,
                str(entry.anchors),
                _bound(entry.error),
                _bound(entry.block_error),
                "" if entry.seen is None else f"[{entry.seen[0]:.3g}, {entry.seen[1]:.3g}]",
                _seen(entry.drift),
            ]
            for entry in self.replaced
        ]

    def markdown(self) -> str:
        lines = [
            f"| {' | '.join(HEADERS)} |",
            "| :-- | :-- | --: | --: | --: | --: | --: |",
            *(f"| {' | '.join([code(row[0]), *row[1:]])} |" for row in self.rows()),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        table = [list(HEADERS), *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
        return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in table), *self.remarks()])

    def remarks(self) -> list[str]:
        """What is not in the table: what was left, notes, and the drift from end to end."""
        lines = [f"left as it was: {entry.path or 'the model'} ({entry.what}): {entry.reason}" for entry in self.left]
        lines += [f"note: {note}" for note in self.notes]
        drift = self.end_to_end
        if drift is not None and drift.hidden is not None:
            pooled = "" if drift.cosine is None else f", 1 − cosine of pooled outputs {_seen(drift.cosine)}"
            lines.append(f"measured on {drift.inputs}: outputs move {_seen(drift.hidden)}{pooled}")
        return lines


HEADERS = ("path", "activation", "keys", "proven error", "proven block error", "range seen", "measured drift")


def _bound(value: float | None) -> str:
    return "" if value is None else ceiling(value)


def _seen(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
