"""A certificate: the norm of f − network is ≤ bound, for these weights, on this box, in this arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import FileError
from attnc.numerics.bound import Term
from attnc.targets.box import Box, show_intervals

if TYPE_CHECKING:
    from jaxtyping import Float

FORMAT = "attnc.certificate/1"


@dataclass(frozen=True, repr=False)
class Certificate:
    """`bound` is what was proved (None: nothing was); `observed` is the largest error seen at samples. Never mixed.

    Of a table with so many `points` both are about these points alone, every one of which was looked at.
    """

    bound: float | None
    observed: float | None
    terms: tuple[Term, ...]
    assumptions: tuple[str, ...]
    dtype: str
    method: str
    norm: str = "inf"
    leaves: tuple[Any, ...] = ()
    leaf_bounds: tuple[float, ...] = ()  # of every leaf, for pictures; the checker finds its own
    complete: bool = True  # False: time ran out before the bound was as small as it can be
    core: tuple[float, float] | None = None  # of an infinite box: the part that the leaves cover, tails apart
    cuts: tuple[tuple[float, ...], ...] = ()  # of enclosure leaves: where cells are cut further, axis by axis
    truncation: float = 0.0  # what engines that leave out far anchors may be off by besides, counted in the bound
    points: int | None = None  # of a table: what the claim is about; between them nothing is claimed
    table: tuple[tuple[float, ...], ...] = ()  # where it is small enough: every point, and its values
    stages: tuple[Any, ...] = ()  # of a deep program: every head's claim, with its own leaves
    outputs: tuple[str, ...] = ()  # of a deep program: what its outputs are made of, in the names of the stages
    axes: tuple[int, ...] = ()  # of a deep program: along which its box is halved, one after the other

    def __repr__(self) -> str:
        claim = f"bound={self.bound!r}, observed={self.observed!r}, dtype={self.dtype!r}, method={self.method!r}"
        return (
            f"<Certificate: {claim}; {len(self.terms)} terms, {len(self.leaves):,} leaves, {len(self.stages)} stages>"
        )

    @property
    def error(self) -> float | None:
        """The bound, or what was observed where nothing was proved."""
        return self.observed if self.bound is None else self.bound

    @property
    def pointwise_bound(self) -> float | None:
        """The bound where it holds at every point of the box: neither an L_p norm for p < ∞ nor a table's is one."""
        return self.bound if self.norm == "inf" and not self.is_of_table else None

    @property
    def is_of_table(self) -> bool:
        """Whether the claim is about finitely many points, all of them checked, and about nothing between them."""
        return self.points is not None

    def cells(self, box: Box) -> tuple[Float[np.ndarray, "leaves d"], Float[np.ndarray, "leaves d"]]:
        """The lower and upper ends of the leaves, tails apart, in floating point: for pictures and messages."""
        if self.core is not None:
            box = Box.parse([self.core], box.names)
        cells = [leaf[2:] if leaf[0] == "taylor" else leaf[1:] for leaf in self.leaves if leaf[0] != "tail"]
        level = np.array([cell[0] for cell in cells])[:, None]
        index = np.array([cell[1:] for cell in cells]).reshape(len(cells), -1)
        lo = box.lo + box.widths * index / 2.0**level
        return lo, lo + box.widths / 2.0**level

    def worst_box(self, box: Box) -> dict[str, tuple[float, float]] | None:
        """The leaf with the largest bound."""
        if not self.leaf_bounds or len(self.leaf_bounds) > len(self.leaves):
            return None
        lo, hi = self.cells(box)
        worst = int(np.argmax(self.leaf_bounds))
        return {name: (float(a), float(b)) for name, a, b in zip(box.names, lo[worst], hi[worst], strict=True)}

    def worst_place(self, box: Box) -> str:
        """The same in words, where the ledger is that of one leaf: not of a norm, of a tail, nor head by head."""
        found = self.worst_box(box) if self.norm == "inf" and all(term.name != "tail" for term in self.terms) else None
        return show_intervals(found or {})

    def to_json(self, expression: str | None, box: Box) -> dict[str, Any]:
        """All but the hash of the weights, which the writer of the files adds."""
        return {
            "format": FORMAT,
            "expression": expression,
            "box": box.as_json(),
            "dtype": self.dtype,
            "norm": self.norm,
            "bound": self.bound,
            "observed": self.observed,
            "terms": [{"name": term.name, "value": term.value, "reason": term.reason} for term in self.terms],
            "assumptions": list(self.assumptions),
            "method": self.method,
            "complete": self.complete,
            "leaves": list(self.leaves),
            "leaf_bounds": list(self.leaf_bounds),
            **({} if self.core is None else {"core": list(self.core)}),
            **({"cuts": [list(points) for points in self.cuts]} if self.cuts else {}),
            "truncation": self.truncation,
            **({} if self.points is None else {"points": self.points, "table": [list(row) for row in self.table]}),
            "stages": list(self.stages),
            "outputs": list(self.outputs),
            **({"axes": list(self.axes)} if self.axes else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        try:
            if data["format"] != FORMAT:
                raise FileError(f"certificate: format {data['format']!r} is not the one read here, {FORMAT!r}")
            claim = cls(
                bound=_number(data["bound"]),
                observed=_number(data["observed"]),
                terms=tuple(_term(entry) for entry in _list(data["terms"])),
                assumptions=tuple(_text(sentence) for sentence in _list(data["assumptions"])),
                dtype=_text(data["dtype"]),
                method=_text(data["method"]),
                norm=_text(data["norm"]),
                leaves=tuple(_list(data["leaves"])),
                leaf_bounds=tuple(_positive(bound) for bound in _list(data["leaf_bounds"])),
                complete=_flag(data["complete"]),
                core=_core(data.get("core")),
                cuts=tuple(tuple(map(float, _list(points))) for points in _list(data.get("cuts", []))),
                truncation=_positive(data["truncation"]),
                points=_count(data.get("points")),
                table=tuple(tuple(map(float, _list(row))) for row in _list(data.get("table", []))),
                stages=tuple(_list(data["stages"])),
                outputs=tuple(_text(output) for output in _list(data["outputs"])),
                axes=tuple(map(int, _list(data.get("axes", [])))),
            )
            claim._require_consistent()
        except KeyError as error:
            raise FileError(f"certificate: the field {error} is missing") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise FileError(f"certificate: {error}") from None
        return claim

    def _require_consistent(self) -> None:
        """ValueError where the claim contradicts what it consists of: the bound was changed, or something else was."""
        if self.leaf_bounds and len(self.leaf_bounds) != sum(leaf[:1] != ["tail"] for leaf in self.leaves):
            raise ValueError(f"{len(self.leaf_bounds):,} leaf_bounds for {len(self.leaves):,} leaves, tails among them")
        parts = {"the sum of its terms": math.fsum(term.value for term in self.terms)}
        if self.norm == "inf":
            parts |= {"its largest leaf": max(self.leaf_bounds, default=0.0), "what was observed": self.observed or 0.0}
        for what, least in parts.items():
            if self.bound is not None and self.bound < least * (1 - 2.0**-40):
                raise ValueError(f"the bound {self.bound:.6g} is below {what}, {least:.6g}: it is not what was proved")


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number or null, found {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"expected a finite number ≥ 0, found {value!r:.80}")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise TypeError("expected a number, found null")
    return number


def _core(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    lo, hi = (float(end) for end in _list(value))
    return lo, hi


def _count(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"expected a whole number ≥ 1, found {value!r:.80}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {value!r:.80}")
    return value


def _term(entry: Any) -> Term:
    if not isinstance(entry, dict):
        raise TypeError(f"expected a term with a name, a value and a reason, found {entry!r:.80}")
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
