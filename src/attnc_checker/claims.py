"""What certificate.json claims: BadFile for what cannot be read, Refused for what can, and is no proof."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, get_type_hints

from attnc_checker.cells import MAX_LEVEL, Leaf, read_leaves
from attnc_checker.files import BadFile, Refused, field, typed
from attnc_checker.rounding import FORMATS

NEEDED = "format weights_sha256 expression box dtype norm bound observed terms assumptions method leaves"
NORM = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")
STAGED, AT_POINTS = "staged proof", "proof at the table's "
MAX_STAGES, ROW_LEVEL, INFINITE = 1000, 8, ("-inf", "inf")
ALIKE = ("function", "interval", "held", "bound")
"""What a stage has of one that it is like."""

Ends = tuple[float, float]


@dataclass(frozen=True)
class StageClaim:
    """What attention writes into the channel is carrier·function(t) at t = argument, in the names of earlier stages.

    For t in `interval` its heads are within `bound` of the function, held at the ends of `held` if there are any. A
    stage that is `like` an earlier one has its heads, as functions of t, and needs no leaves. Fields are those of the
    certificate.
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
    like: str | None
    leaves: tuple[Leaf, ...]

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
    is_staged: bool = False  # a deep program, which is proved stage by stage:
    stages: tuple[StageClaim, ...] = ()
    outputs: tuple[str, ...] = ()  # as combinations of stages
    axes: tuple[int, ...] = ()  # along which the box is halved, one after the other: any would do

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
        return len(self.leaves) + sum(len(stage.leaves) for stage in self.stages)


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


def _with_stages(claim: Claim, data: dict[str, Any]) -> Claim:
    entries, axes = field(data, "stages", list), field(data, "axes", tuple[int, ...] | None) or ()
    if len(entries) > MAX_STAGES:
        raise BadFile(f"certificate.json has more than {MAX_STAGES} stages")
    if len(axes) > MAX_LEVEL or not all(0 <= i < len(claim.ends) for i in axes):
        raise BadFile(f"certificate.json: axes is {axes!r:.40}, not at most {MAX_LEVEL} numbers of variables")
    stages: dict[str, StageClaim] = {}
    for i, entry in enumerate(entries):
        stage = _stage(typed(entry, dict, f"stages[{i}]"), f"stages[{i}].", stages)
        if stage.name in (*claim.variables, *stages):
            raise Refused(f"two stages or variables are called {stage.name!r:.40}")
        stages[stage.name] = stage
    outputs = field(data, "outputs", tuple[str, ...])
    return replace(claim, is_staged=True, stages=tuple(stages.values()), outputs=outputs, axes=axes)


def _stage(entry: dict[str, Any], where: str, known: dict[str, StageClaim]) -> StageClaim:
    """`known`: the stages before it."""
    said: dict[str, Any]
    if (like := field(entry, "like", str | None, where)) is None:
        said = {"leaves": read_leaves(field(entry, "leaves", list, where), 1, set())}
    elif like in known and known[like].like is None:
        said = {"leaves": (), **{name: getattr(known[like], name) for name in ALIKE}}
    else:
        raise Refused(f"a stage is said to be like {like!r:.40}, which is none that was proved before it")
    kinds = {name: kind for name, kind in get_type_hints(StageClaim).items() if name not in said}
    claim = StageClaim(**said, **{name: field(entry, name, kind, where) for name, kind in kinds.items()})
    for low, high in (claim.interval, claim.held or claim.interval):
        if not low < high:
            raise Refused(f"the interval [{low}, {high}] of {where[:-1]} is empty or reversed")
    if claim.bound < 0:
        raise Refused(f"a bound of stage {claim.name!r:.40} is negative")
    if any(leaf.kind == "enclosure" for leaf in claim.leaves):
        raise Refused(f"stage {claim.name!r:.40} has enclosure leaves, which are for whole networks")
    return claim
