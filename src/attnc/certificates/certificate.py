"""A certificate: the norm of f − network is ≤ bound, for these weights, on this box, in this arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnc.errors import FileError
from attnc.numerics.bound import Term

FORMAT = "attnc.certificate/1"


@dataclass(frozen=True)
class Certificate:
    """`bound` is what was proved (None: nothing was); `observed` is the largest error seen at samples. Never mixed."""

    bound: float | None
    observed: float | None
    terms: tuple[Term, ...]
    assumptions: tuple[str, ...]
    dtype: str
    method: str
    norm: str = "inf"
    leaves: tuple[Any, ...] = ()

    @property
    def pointwise_bound(self) -> float | None:
        """The bound where it holds at every point: an L_p norm for p < ∞ says nothing about a single one."""
        return self.bound if self.norm == "inf" else None

    def to_json(self, expression: str | None, box: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
        """All but the hash of the weights, which the writer of the files adds."""
        return {
            "format": FORMAT,
            "expression": expression,
            "box": {name: list(ends) for name, ends in box.items()},
            "dtype": self.dtype,
            "norm": self.norm,
            "bound": self.bound,
            "observed": self.observed,
            "terms": [{"name": term.name, "value": term.value, "reason": term.reason} for term in self.terms],
            "assumptions": list(self.assumptions),
            "method": self.method,
            "leaves": list(self.leaves),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        try:
            if data["format"] != FORMAT:
                raise FileError(f"certificate: format {data['format']!r} is not the one read here, {FORMAT!r}")
            return cls(
                bound=_number(data["bound"]),
                observed=_number(data["observed"]),
                terms=tuple(_term(entry) for entry in _list(data["terms"])),
                assumptions=tuple(_text(sentence) for sentence in _list(data["assumptions"])),
                dtype=_text(data["dtype"]),
                method=_text(data["method"]),
                norm=_text(data["norm"]),
                leaves=tuple(_list(data["leaves"])),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileError(f"certificate: {type(error).__name__}: {error}") from None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number or null, found {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"expected a finite number ≥ 0, found {value!r:.80}")
    return number


def _term(entry: Any) -> Term:
    value = _number(entry["value"])
    if value is None:
        raise TypeError("a term has no value")
    return Term(_text(entry["name"]), value, _text(entry["reason"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r:.80}")
    return value
