"""What certificate.json claims, and that its leaves cover the box, which takes integers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnc_checker.files import BadFile, Refused
from attnc_checker.rounding import FORMATS

FIELDS: tuple[str, ...] = (
    "format",
    "weights_sha256",
    "expression",
    "box",
    "dtype",
    "norm",
    "bound",
    "observed",
    "terms",
)
FIELDS += ("assumptions", "method", "leaves")
MAX_LEVEL = 128
MAX_ORDERS = (24, 20, 12, 8)
"""In one, two, three and more variables: beyond these a proof takes long and gains nothing."""

Cell = tuple[int, tuple[int, ...]]
"""A level, and for each variable an index below 2^level."""


class Leaf(NamedTuple):
    kind: str
    order: int  # of a tail: its side, −1 or 1
    cell: Cell | None


@dataclass(frozen=True)
class Claim:
    """sup |f − network| ≤ bound over the box, in this arithmetic."""

    expression: Any
    variables: tuple[str, ...]
    ends: tuple[tuple[float, float], ...]  # of what the cells divide: the box, or the core of an infinite one
    bound: float
    dtype: str
    truncation: float  # what engines that leave out far keys may be off by besides: part of the bound
    leaves: tuple[Leaf, ...]


def read_claim(data: dict[str, Any]) -> Claim:
    """BadFile for what cannot be read; Refused for what can, and is no proof."""
    if missing := [key for key in FIELDS if key not in data]:
        raise BadFile(f"certificate.json lacks {missing[0]!r}")
    if data["format"] != "attnc.certificate/1":
        raise BadFile(f"certificate.json has the format {data['format']!r:.40}, not 'attnc.certificate/1'")
    if data["method"] != "proof":
        raise Refused(f"the method is {data['method']!r:.40}: only a proof by leaves can be proved again")
    if data["norm"] != "inf":
        raise Refused(f"the norm is {data['norm']!r:.40}: only bounds at every point ('inf') can be proved again")
    if data["dtype"] not in (*FORMATS, "real"):
        raise Refused(f"the dtype {data['dtype']!r:.40} is none of {', '.join(FORMATS)}, real")
    bound, observed = _number(data["bound"], "bound"), data["observed"]
    if bound < 0:
        raise Refused(f"the bound {bound} is negative")
    if observed is not None and _number(observed, "observed") > bound:
        raise Refused(f"the bound {bound} is below the observed error {observed}")
    truncation = _number(data.get("truncation", 0.0), "truncation")
    if truncation < 0:
        raise Refused(f"the truncation {truncation} is negative")
    variables, ends, sides = _box(data["box"], data.get("core"))
    if not isinstance(data["leaves"], list):
        raise BadFile("certificate.json: leaves is no list")
    leaves = tuple(_leaf(entry, len(variables)) for entry in data["leaves"])
    _cover(leaves, len(variables), sides)
    return Claim(data["expression"], variables, ends, bound, data["dtype"], truncation, leaves)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or float(value) != value:
        raise BadFile(f"certificate.json: {name} is {value!r:.40}, not a number of float64")
    return float(value)


def _box(box: Any, core: Any) -> tuple[tuple[str, ...], tuple[tuple[float, float], ...], set[int]]:
    """Variables, finite ends, and the sides that are infinite: of one variable, whose finite part is then `core`."""
    if not isinstance(box, dict) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in (*box.values(), core or [0, 0])
    ):
        raise BadFile("certificate.json: box is no object of [lo, hi], or core no [lo, hi]")
    pairs, sides = list(box.values()), set()
    if core is not None:
        infinite = [len(pairs) == 1 and pairs[0][i] == text for i, text in enumerate(("-inf", "inf"))]
        if not all(is_infinite or pairs[0][i] == core[i] for i, is_infinite in enumerate(infinite)):
            raise Refused(f"the core {core} does not end where the box {box} does")
        pairs, sides = [core], {side for side, is_infinite in zip((-1, 1), infinite, strict=True) if is_infinite}
    ends = tuple((_number(lo, "an end of the box"), _number(hi, "an end of the box")) for lo, hi in pairs)
    if not ends or not all(lo < hi for lo, hi in ends):
        raise Refused(f"the box {box!r:.80} is empty or reversed")
    return tuple(box), ends, sides


def _leaf(entry: Any, d: int) -> Leaf:
    """["taylor", order, level, i_1 … i_d], ["mean", level, …], ["selection", level, …] or ["tail", side]."""
    if not isinstance(entry, list) or not entry or not all(type(x) is int for x in entry[1:]):
        raise BadFile(f"the leaf {entry!r:.60} is no list of a kind and whole numbers")
    kind, numbers = entry[0], entry[1:]
    if kind == "tail" and numbers in ([-1], [1]):
        return Leaf(kind, numbers[0], None)
    if kind not in ("taylor", "mean", "selection"):
        raise Refused(f"the leaf {entry!r:.60} is of an unknown kind")
    if len(numbers) != 1 + d + (kind == "taylor"):
        raise Refused(f"the leaf {entry!r:.60} has not the numbers of a cell in {d} variable(s)")
    order, highest = numbers.pop(0) if kind == "taylor" else 1, MAX_ORDERS[min(d, len(MAX_ORDERS)) - 1]
    if not 1 <= order <= highest:
        raise Refused(f"the leaf {entry!r:.60} has an order that is not between 1 and {highest}")
    level, *index = numbers
    if not 0 <= level <= MAX_LEVEL or not all(0 <= i < 2**level for i in index):
        raise Refused(f"the leaf {entry!r:.60} is out of range")
    return Leaf(kind, order, (level, tuple(index)))


def _cover(leaves: tuple[Leaf, ...], d: int, sides: set[int]) -> None:
    """Cells that are distinct, none within another, and of volume one together, cover the box."""
    tails = sorted(leaf.order for leaf in leaves if leaf.cell is None)
    if tails != sorted(sides):
        raise Refused(f"the leaves do not cover the box: tails on the sides {tails}, infinite ends on {sorted(sides)}")
    cells = [leaf.cell for leaf in leaves if leaf.cell is not None]
    known, levels = set(cells), {level for level, _ in cells}
    if len(known) < len(cells):
        raise Refused("the leaves do not divide the box: a cell is stated twice")
    for level, index in cells:
        if any((up, tuple(i >> level - up for i in index)) in known for up in levels if up < level):
            raise Refused(f"the leaves do not divide the box: the cell {[level, *index]} lies within another")
    finest = max(levels, default=0)
    volume, whole = sum(2 ** (d * (finest - level)) for level, _ in cells), 2 ** (d * finest)
    if volume != whole:
        raise Refused(f"the leaves do not cover the box: they fill {volume} of its {whole} parts")
