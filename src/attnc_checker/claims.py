"""What certificate.json claims, and that its leaves cover the box, which takes integers only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from attnc_checker.files import BadFile, Refused
from attnc_checker.rounding import FORMATS

NEEDED = "format weights_sha256 expression box dtype norm bound observed terms assumptions method leaves"
NORM = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")
AT_POINTS = "proof at the table's "
MAX_LEVEL, MAX_STAGES, ROW_LEVEL = 128, 1000, 8
MAX_ORDERS = (24, 20, 12, 8)
"""In one, two, three and more variables: beyond these a proof takes long and gains nothing."""

Cell = tuple[int, tuple[int, ...]]
"""A level, and for each variable an index below 2^level."""


class Leaf(NamedTuple):
    kind: str
    order: int  # of a tail: its side, −1 or 1; of a row of a table: its number
    cell: Cell | None
    bound: float | None = None  # of an L_p norm: about what is to be found at every point of the cell
    row: tuple[float, ...] = ()  # of a table: a point of the cell, and the values there


@dataclass(frozen=True)
class StageClaim:
    """What attention writes into the channel is carrier·function(t) at t = argument, in the names of earlier stages.

    For t in `ends` its heads are within `bound` of the function, held at the ends of `held` if there are any. A stage
    that is `like` an earlier one has its heads, as functions of t, and needs no leaves.
    """

    layer: str
    channel: str
    name: str
    function: str
    argument: str
    argument_as: str | None  # an expression in the variables that is known to be the same
    carrier: str | None
    carrier_as: str | None
    ends: tuple[float, float]
    held: tuple[float, float] | None
    bound: float
    leaves: tuple[Leaf, ...]
    like: str | None

    @property
    def unit(self) -> str:
        return "1" if self.carrier is None else self.carrier


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
    is_staged: bool
    stages: tuple[StageClaim, ...]  # of a deep program, whose outputs are combinations of them
    outputs: tuple[Any, ...]
    cuts: tuple[tuple[float, ...], ...]  # where, along each variable, enclosure leaves are cut: any would do
    p: float | None  # of an L_p norm
    parts: int | None  # of the box, in which ranges of stages are found
    axes: tuple[int, ...]  # along which the box of a deep program is halved, one after the other: any would do

    @property
    def is_chain(self) -> bool:
        return any(leaf.kind == "enclosure" for leaf in self.leaves)

    @property
    def scope(self) -> str:
        """Where the bound holds."""
        if any(leaf.kind == "row" for leaf in self.leaves):
            return f"at the table's {len(self.leaves):,} points, and nowhere else"
        return "at every point of the box" if self.p is None else f"in the norm L_{self.p:g} over the box"

    @property
    def num_leaves(self) -> int:
        return len(self.leaves) + sum(len(stage.leaves) for stage in self.stages)


def read_claim(data: dict[str, Any]) -> Claim:
    """BadFile for what cannot be read; Refused for what can, and is no proof."""
    if missing := [key for key in NEEDED.split() if key not in data]:
        raise BadFile(f"certificate.json lacks {missing[0]!r}")
    if data["format"] != "attnc.certificate/1":
        raise BadFile(f"certificate.json has the format {data['format']!r:.40}, not 'attnc.certificate/1'")
    is_table = isinstance(data["method"], str) and data["method"].startswith(AT_POINTS)
    if data["method"] not in ("proof", "staged proof") and not is_table:
        raise Refused(f"the method is {data['method']!r:.40}: only proofs by leaves can be proved again")
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
    is_staged = data["method"] == "staged proof"
    if is_staged and sides:
        raise Refused("a staged proof is for a bounded box")
    leaves = _rows(data, ends) if is_table else () if is_staged else _leaves(data["leaves"], len(variables), sides)
    if len({leaf.kind == "enclosure" for leaf in leaves}) > 1:
        raise Refused("enclosure leaves are for all of a box, or for none of it")
    stages, outputs = ([], []) if not is_staged else (data.get("stages"), data.get("outputs"))
    if not isinstance(stages, list) or not isinstance(outputs, list) or len(stages) > MAX_STAGES:
        raise BadFile(f"certificate.json: stages or outputs are no lists, or there are more than {MAX_STAGES} stages")
    p, parts = None, data.get("parts")
    if parts is not None and (type(parts) is not int or parts < 1):
        raise BadFile(f"certificate.json: parts is {parts!r:.40}, not a number of parts of the box")
    if data["norm"] != "inf":
        if is_staged or is_table or sides:
            raise Refused(f"the norm {data['norm']!r:.40} is for leaves of a bounded box")
        p, leaves = _with_bounds(leaves, data["norm"], data.get("leaf_bounds"))
    cuts = data.get("cuts", [[]] * len(variables))
    if not isinstance(cuts, list) or not all(isinstance(points, list) for points in cuts) or len(cuts) != len(ends):
        raise BadFile("certificate.json: cuts is no list of a list for every variable")
    places = tuple(tuple(sorted(_number(x, "a cut") for x in points)) for points in cuts)
    axes = data.get("axes", [])
    if (
        not isinstance(axes, list)
        or len(axes) > MAX_LEVEL
        or not all(type(i) is int and 0 <= i < len(ends) for i in axes)
    ):
        raise BadFile("certificate.json: axes is no list of numbers of variables")
    texts, dtype, whole = data["expression"], data["dtype"], tuple(outputs)
    known: dict[Any, Any] = {}  # stages that are like no other
    stated = tuple(_stage(entry, known) for entry in stages)
    return Claim(
        texts,
        variables,
        ends,
        bound,
        dtype,
        truncation,
        leaves,
        is_staged,
        stated,
        whole,
        places,
        p,
        parts,
        tuple(axes),
    )


def _rows(data: dict[str, Any], ends: tuple[tuple[float, float], ...]) -> tuple[Leaf, ...]:
    """Every row of a table is a leaf, in some cell of the box; between them nothing is claimed."""
    rows, parts, leaves = data.get("table"), 2**ROW_LEVEL, []
    if not isinstance(rows, list) or not rows or data["method"] != f"{AT_POINTS}{len(rows):,} points":
        raise Refused(f"the method is {data['method']!r:.60}, but the table is not stored, or not whole")
    if data["expression"] is not None or data.get("points", len(rows)) != len(rows):
        raise Refused(f"the claim is about {len(rows):,} rows of a table, and states an expression or other points")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not len(row) == len(rows[0]) > len(ends):
            raise BadFile(f"certificate.json: row {number} of the table is no list of as many numbers as the first")
        numbers = tuple(_number(x, "an entry of the table") for x in row)
        places = [
            (Fraction(x) - Fraction(lo)) / (Fraction(hi) - Fraction(lo))
            for x, (lo, hi) in zip(numbers, ends, strict=False)
        ]
        if not all(0 <= place <= 1 for place in places):
            raise Refused(f"the point in row {number} of the table lies outside of the box")
        index = tuple(min(parts - 1, int(place * parts)) for place in places)
        leaves.append(Leaf("row", number, (ROW_LEVEL, index), None, numbers))
    return tuple(leaves)


def _with_bounds(leaves: tuple[Leaf, ...], norm: Any, bounds: Any) -> tuple[float, tuple[Leaf, ...]]:
    """p, and leaves that have bounds of their own."""
    if not isinstance(norm, str) or not NORM.fullmatch(norm) or not float(norm) >= 1:
        raise Refused(f"the norm is {norm!r:.40}: neither 'inf' nor a number from 1 on")
    if not isinstance(bounds, list) or len(bounds) != len(leaves):
        raise Refused(f"with the norm {norm} every leaf needs a bound of its own")
    own = [_number(b, "the bound of a leaf") for b in bounds]
    return float(norm), tuple(leaf._replace(bound=b) for leaf, b in zip(leaves, own, strict=True))


def _stage(entry: Any, known: dict[Any, Any]) -> StageClaim:
    texts = ("stage", "channel", "name", "function", "argument")
    others = ("argument_as", "carrier", "carrier_as", "like")
    like = entry.get("like") if isinstance(entry, dict) else None
    if like is not None:
        if not isinstance(like, str) or like not in known:
            raise Refused(f"a stage is said to be like {like!r:.40}, which is none that was proved before it")
        entry = entry | {key: known[like].get(key) for key in ("function", "interval", "held", "bound")}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in texts):
        raise BadFile(f"certificate.json: a stage is not described by the texts {', '.join(texts)}")
    if not all(isinstance(entry.get(key), str | None) for key in others):
        raise BadFile(f"certificate.json: one of {', '.join(others)} of a stage is no text")
    held = None if entry.get("held") is None else _pair(entry["held"], "held")
    ends = _pair(entry.get("interval"), "interval")
    bound = _number(entry.get("bound"), "bound of a stage")
    if bound < 0:
        raise Refused(f"a bound of stage {entry['name']!r:.40} is negative")
    leaves = _leaves(entry.get("leaves"), 1, set()) if like is None else ()
    if any(leaf.kind == "enclosure" for leaf in leaves):
        raise Refused(f"stage {entry['name']!r:.40} has enclosure leaves, which are for whole networks")
    if like is None:
        known[entry["name"]] = entry
    fields: list[Any] = [*map(entry.get, (*texts, *others[:-1])), ends, held, bound, leaves, like]
    return StageClaim(*fields)


def _pair(value: Any, name: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise BadFile(f"certificate.json: {name} is no [lo, hi]")
    low, high = (_number(x, f"an end of {name}") for x in value)
    if not low < high:
        raise Refused(f"{name} [{low}, {high}] of a stage is empty or reversed")
    return low, high


def _leaves(entries: Any, d: int, sides: set[int]) -> tuple[Leaf, ...]:
    if not isinstance(entries, list):
        raise BadFile("certificate.json: leaves is no list")
    leaves = tuple(_leaf(entry, d) for entry in entries)
    _cover(leaves, d, sides)
    return leaves


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
    """["taylor", order, level, i_1 … i_d], ["mean", level, …], alike "selection", "enclosure"; or ["tail", side]."""
    if not isinstance(entry, list) or not entry or not all(type(x) is int for x in entry[1:]):
        raise BadFile(f"the leaf {entry!r:.60} is no list of a kind and whole numbers")
    kind, numbers = entry[0], entry[1:]
    if kind == "tail" and numbers in ([-1], [1]):
        return Leaf(kind, numbers[0], None)
    if kind not in ("taylor", "mean", "selection", "enclosure"):
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
