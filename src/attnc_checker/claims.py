"""What certificate.json claims: BadFile for what cannot be read, Refused for what can, and is no proof."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from attnc_checker.cells import MAX_LEVEL, Leaf, read_leaves
from attnc_checker.files import BadFile, Refused, field, typed
from attnc_checker.rounding import FORMATS

NEEDED = "format weights_sha256 expression box dtype norm bound observed terms assumptions method leaves"
NORM = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")
STAGED, AT_POINTS = "staged proof", "proof at the table's "
MAX_STAGES, ROW_LEVEL, INFINITE = 1000, 8, ("-inf", "inf")

Ends = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """sup |f − network| ≤ bound over the box, in this arithmetic."""

    expression: Any
    variables: tuple[str, ...]
    ends: tuple[Ends, ...]  # of what the cells divide: the box, or the core of an infinite one
    bound: float
    dtype: str
    truncation: float  # what engines that leave out far keys may be off by besides: part of the bound
    leaves: tuple[Leaf, ...]
    p: float | None  # of an L_p norm
    cuts: tuple[tuple[float, ...], ...]  # where, along each variable, enclosure leaves are cut: any would do

    title = ""

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
        return len(self.leaves)


@dataclass(frozen=True)
class StageClaim:
    """What attention writes into the channel is carrier·function(t) at t = argument, in the names of earlier stages.

    For t in `interval` its heads are within `bound` of the function, held at the ends of `held` if there are any. A
    stage that is `like` an earlier one has its heads, as functions of t, and needs no leaves.
    """

    stage: str  # the layer
    channel: str
    name: str
    argument: str
    argument_as: str | None  # an expression in the variables that is known to be the same
    carrier: str | None
    carrier_as: str | None
    function: str
    interval: Ends
    held: Ends | None
    bound: float
    leaves: tuple[Leaf, ...]
    like: str | None

    variables, truncation = ("t",), 0.0

    @property
    def title(self) -> str:
        return f"stage {self.name}, {self.channel!r:.60}: "

    @property
    def ends(self) -> tuple[Ends]:
        return (self.interval,)

    @property
    def unit(self) -> str:
        return "1" if self.carrier is None else self.carrier


@dataclass(frozen=True)
class StagedClaim(Claim):
    """The same of a deep program, whose outputs are combinations of stages."""

    stages: tuple[StageClaim, ...]
    outputs: tuple[str, ...]
    axes: tuple[int, ...]  # along which the box is halved, one after the other: any would do

    @property
    def num_leaves(self) -> int:
        return sum(len(stage.leaves) for stage in self.stages)


def read_claim(data: dict[str, Any]) -> Claim:
    for name in NEEDED.split():
        field(data, name, Any)
    if data["format"] != "attnc.certificate/1":
        raise BadFile(f"certificate.json has the format {data['format']!r:.40}, not 'attnc.certificate/1'")
    method, norm, p = data["method"], data["norm"], None
    is_table = isinstance(method, str) and method.startswith(AT_POINTS)
    if method not in ("proof", STAGED) and not is_table:
        raise Refused(f"the method is {method!r:.40}: only proofs by leaves can be proved again")
    if data["dtype"] not in (*FORMATS, "real"):
        raise Refused(f"the dtype {data['dtype']!r:.40} is none of {', '.join(FORMATS)}, real")
    bound, observed = field(data, "bound", float), field(data, "observed", float | None)
    truncation = field(data, "truncation", float | None) or 0.0
    if bound < 0:
        raise Refused(f"the bound {bound} is negative")
    if observed is not None and observed > bound:
        raise Refused(f"the bound {bound} is below the observed error {observed}")
    if truncation < 0:
        raise Refused(f"the truncation {truncation} is negative")
    box = field(data, "box", dict)
    ends, sides = _ends(box, field(data, "core", Ends | None))
    if method == STAGED and sides:
        raise Refused("a staged proof is for a bounded box")
    if norm != "inf" and (method != "proof" or sides):
        raise Refused(f"the norm {norm!r:.40} is for leaves of a bounded box")
    if method == "proof":
        leaves = read_leaves(data["leaves"], len(ends), sides)
    else:
        leaves = _rows(data, ends) if is_table else ()
    if len({leaf.kind == "enclosure" for leaf in leaves}) > 1:
        raise Refused("enclosure leaves are for all of a box, or for none of it")
    if norm != "inf":
        p, leaves = _with_bounds(leaves, norm, field(data, "leaf_bounds", tuple[float, ...] | None))
    cuts = field(data, "cuts", tuple[tuple[float, ...], ...] | None) or ((),) * len(ends)
    if len(cuts) != len(ends):
        raise BadFile(f"certificate.json: cuts has {len(cuts)} lists, not one for every variable")
    claim = Claim(data["expression"], tuple(box), ends, bound, data["dtype"], truncation, leaves, p, cuts)
    return _with_stages(claim, data) if method == STAGED else claim


def _ends(box: dict[str, Any], core: Ends | None) -> tuple[tuple[Ends, ...], set[int]]:
    """Finite ends, and the sides that are infinite: of one variable, whose finite part is then `core`."""
    if core is None:
        ends, sides = tuple(typed(pair, Ends, f"box.{name}") for name, pair in box.items()), set[int]()
    else:
        whole = typed([*box.values()], tuple[tuple[Any, Any], ...], "box")
        if len(whole) != 1 or any(x not in either for x, *either in zip(whole[0], INFINITE, core, strict=True)):
            raise Refused(f"the core {core} does not end where the box {box} does")
        ends, sides = (core,), {side for side, x in zip((-1, 1), whole[0], strict=True) if x in INFINITE}
    if not ends or not all(lo < hi for lo, hi in ends):
        raise Refused(f"the box {box!r:.80} is empty or reversed")
    return ends, sides


def _rows(data: dict[str, Any], ends: tuple[Ends, ...]) -> tuple[Leaf, ...]:
    """Every row of a table is a leaf, in some cell of the box; between them nothing is claimed."""
    rows, parts, leaves = field(data, "table", tuple[tuple[float, ...], ...] | None), 2**ROW_LEVEL, []
    if not rows or data["method"] != f"{AT_POINTS}{len(rows):,} points":
        raise Refused(f"the method is {data['method']!r:.60}, but the table is not stored, or not whole")
    if data["expression"] is not None or data.get("points", len(rows)) != len(rows):
        raise Refused(f"the claim is about {len(rows):,} rows of a table, and states an expression or other points")
    for number, row in enumerate(rows):
        if not len(row) == len(rows[0]) > len(ends):
            raise BadFile(f"certificate.json: row {number} of the table is no list of as many numbers as the first")
        sides = [(Fraction(x), Fraction(lo), Fraction(hi)) for x, (lo, hi) in zip(row, ends, strict=False)]
        if not all(lo <= x <= hi for x, lo, hi in sides):
            raise Refused(f"the point in row {number} of the table lies outside of the box")
        index = tuple(min(parts - 1, int((x - lo) / (hi - lo) * parts)) for x, lo, hi in sides)
        leaves.append(Leaf("row", number, (ROW_LEVEL, index), row=row))
    return tuple(leaves)


def _with_bounds(
    leaves: tuple[Leaf, ...], norm: Any, bounds: tuple[float, ...] | None
) -> tuple[float, tuple[Leaf, ...]]:
    """p, and leaves that have bounds of their own."""
    if not isinstance(norm, str) or not NORM.fullmatch(norm) or not float(norm) >= 1:
        raise Refused(f"the norm is {norm!r:.40}: neither 'inf' nor a number from 1 on")
    if bounds is None or len(bounds) != len(leaves):
        raise Refused(f"with the norm {norm} every leaf needs a bound of its own")
    return float(norm), tuple(leaf._replace(bound=b) for leaf, b in zip(leaves, bounds, strict=True))


def _with_stages(claim: Claim, data: dict[str, Any]) -> StagedClaim:
    entries, known = field(data, "stages", list), dict[str, StageClaim]()
    axes = field(data, "axes", tuple[int, ...] | None) or ()
    if len(entries) > MAX_STAGES:
        raise BadFile(f"certificate.json has more than {MAX_STAGES} stages")
    if len(axes) > MAX_LEVEL or not all(0 <= i < len(claim.ends) for i in axes):
        raise BadFile(f"certificate.json: axes is {axes!r:.40}, not at most {MAX_LEVEL} numbers of variables")
    stages = tuple(_stage(entry, f"stages[{i}]", known) for i, entry in enumerate(entries))
    outputs = field(data, "outputs", tuple[str, ...])
    return StagedClaim(**vars(claim), stages=stages, outputs=outputs, axes=axes)


def _stage(entry: Any, where: str, known: dict[str, StageClaim]) -> StageClaim:
    """`known`: the stages so far that are like no other."""

    def ask(name: str, kind: Any) -> Any:
        return field(typed(entry, dict, where), name, kind, f"{where}.")

    texts = {name: ask(name, str) for name in ("stage", "channel", "name", "argument")}
    texts |= {name: ask(name, str | None) for name in ("argument_as", "carrier", "carrier_as", "like")}
    if (like := texts["like"]) in known:
        return replace(known[like], **texts, leaves=())
    if like is not None:
        raise Refused(f"a stage is said to be like {like!r:.40}, which is none that was proved before it")
    interval, held, bound = ask("interval", Ends), ask("held", Ends | None), ask("bound", float)
    for low, high in (interval, held or interval):
        if not low < high:
            raise Refused(f"the interval [{low}, {high}] of {where} is empty or reversed")
    if bound < 0:
        raise Refused(f"a bound of stage {texts['name']!r:.40} is negative")
    leaves = read_leaves(ask("leaves", list), 1, set())
    if any(leaf.kind == "enclosure" for leaf in leaves):
        raise Refused(f"stage {texts['name']!r:.40} has enclosure leaves, which are for whole networks")
    known[texts["name"]] = StageClaim(
        **texts, function=ask("function", str), interval=interval, held=held, bound=bound, leaves=leaves
    )
    return known[texts["name"]]
