"""The claims of a certificate as typed records. BadFile: a file cannot be read. Refused: it claims no proof."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any, NamedTuple

from attnc_checker.cells import ENCLOSURE, EXCLUDED, TAYLOR, Ends, Leaf, read_leaves
from attnc_checker.deep.claims import MAX_STAGES, Stages, read_axes, read_middles, read_stages
from attnc_checker.files import BadFile, Object, Refused, field, require, typed
from attnc_checker.rounding import FORMATS
from attnc_checker.shards import ShardLeaves

NEEDED = "format weights_sha256 expression box dtype norm bound observed terms assumptions method leaves"
BY_LEAVES, STAGED, AT_POINTS = "proof", "staged proof", "proof at the table's "
INFINITE = ("-inf", "inf")
LARGEST_ERROR = "inf"
"""The name of the norm that is the largest error."""
LARGEST_EXCLUDED, MOST_EXCLUDED = 1 / 16, 1000
"""Largest share of the box that an excluded neighbourhood may take up, and the largest number of them."""
ALL_EXCLUDED = 1 / 2
"""Largest share of the box that all excluded neighbourhoods may take up together."""
NORM = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")

Rows = tuple[tuple[float, ...], ...]
ReadShards = Callable[[Object, int, float], ShardLeaves]
"""Reads the leaves of the shards that a certificate lists, from the certificate, the number of its variables and the
largest bound that a leaf may have."""
ReadTable = Callable[[Object, tuple[Ends, ...]], Sequence[tuple[float, ...]]]
"""Reads the rows of the table that a certificate states by its hash, from the certificate and the ends of the box."""


@dataclass(frozen=True)
class ByLeaves:
    """Leaves that cover the box. `bounds` has a bound for each leaf, which only L_p norms need."""

    leaves: Sequence[Leaf]
    bounds: tuple[float, ...] | None
    cuts: Rows | None  # the points, for each variable, at which enclosure leaves are cut further
    gap: float | None  # in enclosure leaves, rows whose scores are behind by more than this are left out
    points: Rows  # for each variable, the ends of the box and the knots between them, in ascending order

    @property
    def encloses(self) -> bool:
        """Whether its leaves are enclosures. Either all are, or none."""
        return self.leaves[0].kind == ENCLOSURE


@dataclass(frozen=True)
class AtPoints:
    """The rows of a table. Each has the variables and then the outputs."""

    rows: Sequence[tuple[float, ...]]


class Beyond(NamedTuple):
    """Beyond the core of an infinite box, rounding adds at most relative·|x| to the bound, for |x| ≤ reach."""

    relative: float
    reach: float


class Excluded(NamedTuple):
    """Nothing is claimed about gradients where argument ∈ [lo, hi]. The argument is an expression of the variables."""

    argument: str
    lo: float
    hi: float


class GradientClaim(NamedTuple):
    """|∂f/∂x_i − ∂network/∂x_i| ≤ bound for every variable and output, but not in the excluded neighbourhoods, each of
    which holds a kink of f."""

    bound: float
    leaves: tuple[Leaf, ...]
    excluded: tuple[Excluded, ...]
    heads: tuple[SlopeClaim, ...] = ()  # one for each stage of a staged proof, which has no leaves of the box
    axes: tuple[int, ...] = ()  # the axes along which the box is then halved in turn; any axes are sound


class SlopeClaim(NamedTuple):
    """The computed slopes of a stage are within `bound` of g′ for t in its interval, in units of the carrier."""

    name: str  # of the stage
    bound: float
    leaves: tuple[Leaf, ...]
    leaf_bounds: tuple[float, ...]
    leaf_middles: tuple[float, ...]  # as for stages


@dataclass(frozen=True)
class Claim:
    """‖f − network‖ ≤ bound over the box, in this arithmetic. Tails without `beyond` are about exact arithmetic."""

    expression: str | None
    variables: tuple[str, ...]
    ends: tuple[Ends, ...]  # the ends of the box, or of the finite core of an infinite box
    sides: frozenset[int]  # the sides on which the one variable is unbounded: −1, 1
    bound: float
    dtype: str
    truncation: float  # the part of the bound for engines that leave out far keys
    norm: str
    evidence: ByLeaves | Stages | AtPoints
    beyond: Beyond | None = None
    gradient: GradientClaim | None = None
    title: str = ""  # words before the name of a leaf in messages

    @property
    def reach(self) -> list[float]:
        """The largest absolute values of the variables for which the claim is about computed numbers."""
        return [self.beyond.reach] if self.beyond else [max(abs(lo), abs(hi)) for lo, hi in self.ends]

    @property
    def scope(self) -> str:
        if self.beyond is None:
            return "at every point of the box"
        (lo, hi), (relative, reach) = self.ends[0], self.beyond
        more, most = rounded(relative, 3, ROUND_CEILING), rounded(reach, 2, ROUND_FLOOR)
        return f"on [{lo:g}, {hi:g}] and, with {more}·|x| more for rounding, beyond it up to |x| = {most}"


def rounded(x: float, digits: int, direction: str) -> str:
    """Return a number to a few digits, rounded up or down: nothing beyond it was proved."""
    return f"{float(Context(prec=digits, rounding=direction).create_decimal(repr(x))):.{digits}g}"


def read_claim(data: Object, shards: ReadShards | None = None, table: ReadTable | None = None) -> Claim:
    for name in NEEDED.split():
        field(data, name, Any)
    if data["format"] != "attnc.certificate/1":
        raise BadFile(
            f"the certificate has the format {data['format']!r:.40}, not 'attnc.certificate/1': check it with "
            "the version of attnc that wrote it"
        )
    method = data["method"]
    if method not in (BY_LEAVES, STAGED) and not (isinstance(method, str) and method.startswith(AT_POINTS)):
        raise Refused(f"the method is {method!r:.40}: only proofs, by leaves, stages or points, can be proved again")
    if data["dtype"] not in (*FORMATS, "real"):
        raise Refused(f"the dtype {data['dtype']!r:.40} is none of {', '.join(FORMATS)}, real")
    bound, observed = field(data, "bound", float), field(data, "observed", float | None)
    truncation = field(data, "truncation", float | None) or 0.0
    require(bound >= 0, f"the bound {bound} is negative")
    require(observed is None or observed <= bound, f"the bound {bound} is below the observed error {observed}")
    require(truncation >= 0, f"the truncation {truncation} is negative")
    box = field(data, "box", dict)
    ends, sides = _ends(box, field(data, "core", Ends | None))
    require(method != STAGED or not sides, "a staged proof is for a bounded box")
    norm = data["norm"]
    if norm != LARGEST_ERROR:
        require(method == BY_LEAVES and not sides, f"the norm {norm!r:.40} is for leaves of a bounded box")
        is_known = isinstance(norm, str) and bool(NORM.fullmatch(norm)) and float(norm) >= 1
        require(is_known, f"the norm is {norm!r:.40}: neither 'inf' nor a number from 1 on")
    if "table_file" in data and method.startswith(AT_POINTS):
        rows = field(data, "points", int)
        require(table is not None and data["expression"] is None and rows > 0, "the table is not stored, or not whole")
        require(method == f"{AT_POINTS}{rows:,} points", f"the method is {method!r:.60}, for {rows:,} points")
        assert table is not None
        evidence: ByLeaves | Stages | AtPoints = AtPoints(table(data, ends))
    else:
        evidence = _evidence(data, method, tuple(box), ends, sides, shards)
    expression = field(data, "expression", str | None)
    claim = Claim(expression, tuple(box), ends, sides, bound, data["dtype"], truncation, str(norm), evidence)
    claim = replace(claim, gradient=_gradient(data, claim))
    return replace(claim, beyond=_beyond(data, claim)) if sides else claim


def _gradient(data: Object, claim: Claim) -> GradientClaim | None:
    stated, d = field(data, "gradient", dict | None), len(claim.ends)
    if stated is None:
        return None
    is_plain = data["method"] in (BY_LEAVES, STAGED) and claim.norm == LARGEST_ERROR and not claim.sides
    require(is_plain, "gradients are claimed for an expression on a bounded box, beside a bound of the largest error")
    bound, observed, eps = (field(stated, name, float, "gradient.") for name in ("bound", "observed", "eps"))
    require(0 <= observed <= bound, f"the bound {bound} of gradients is below the observed error {observed}")
    require(eps >= 0, f"the requested error {eps} of gradients is negative")
    excluded = tuple(_excluded(each) for each in field(stated, "excluded", list))
    require(len(excluded) <= MOST_EXCLUDED, f"gradients exclude more than {MOST_EXCLUDED} neighbourhoods", BadFile)
    if (entries := field(stated, "stages", list | None, "gradient.")) is not None:
        is_staged = data["method"] == STAGED and not stated.get("leaves") and 0 < len(entries) <= MAX_STAGES
        require(is_staged, "gradients are proved by leaves of the box, or by those of the stages of a staged proof")
        heads = tuple(_slopes(typed(each, dict, "gradient.stages")) for each in entries)
        return GradientClaim(bound, (), excluded, heads, read_axes(stated, claim.variables))
    for argument, lo, hi in excluded:
        require((argument,) == claim.variables, "leaves of the box exclude intervals of a single variable alone")
        ((start, end),) = claim.ends
        is_small = start <= lo and hi <= end and hi - lo <= LARGEST_EXCLUDED * (end - start)
        require(is_small, f"the excluded interval [{lo:g}, {hi:g}] is not in the box, or more than a 16th of it")
    if excluded:
        ((start, end),) = claim.ends
        is_small = math.fsum(hi - lo for _, lo, hi in excluded) <= ALL_EXCLUDED * (end - start)
        require(is_small, "all excluded intervals together are more than half of the box")
    leaves = read_leaves(stated.get("leaves"), d, kinds=(TAYLOR, EXCLUDED))
    return GradientClaim(bound, leaves, excluded)


def _slopes(stated: Object) -> SlopeClaim:
    name, bound = field(stated, "name", str, "gradient.stages."), field(stated, "bound", float, "gradient.stages.")
    leaves = read_leaves(stated.get("leaves"), 1, kinds=(TAYLOR, EXCLUDED))
    bounds = field(stated, "leaf_bounds", tuple[float, ...], "gradient.stages.")
    about = f"the slopes of stage {name!r:.40}"
    require(len(bounds) == len(leaves), f"{about} have {len(leaves)} leaves and {len(bounds)} bounds")
    in_order = all(0 <= x <= bound for x in (bound, *bounds))
    require(in_order, f"a bound of {about} is negative, or that of a leaf above that of the stage")
    return SlopeClaim(name, bound, leaves, bounds, read_middles(stated, leaves, "gradient.stages."))


def _excluded(stated: object) -> Excluded:
    """Read a neighbourhood of a kink, in which nothing is claimed."""
    require(isinstance(stated, dict), f"the excluded neighbourhood {stated!r:.60} is no object", BadFile)
    assert isinstance(stated, dict)
    lo, hi = field(stated, "lo", float, "excluded."), field(stated, "hi", float, "excluded.")
    require(lo < hi, f"the excluded interval [{lo:g}, {hi:g}] is empty")
    return Excluded(field(stated, "argument", str, "excluded."), lo, hi)


def _beyond(data: Object, claim: Claim) -> Beyond | None:
    stated = field(data, "beyond", dict | None)
    if stated is None:
        return None
    found = Beyond(field(stated, "relative", float, "beyond."), field(stated, "reach", float, "beyond."))
    is_sound = found.relative >= 0 and found.reach >= max(claim.reach)
    require(is_sound, f"beyond the core, {stated!r:.80} is no rounding and no reach outside of it")
    return found


def _evidence(
    data: Object,
    method: str,
    variables: tuple[str, ...],
    ends: tuple[Ends, ...],
    sides: frozenset[int],
    shards: ReadShards | None,
) -> ByLeaves | Stages | AtPoints:
    if "shards" in data:
        is_plain = method == BY_LEAVES and not sides and shards is not None
        require(is_plain, "shards are for leaves of a bounded box, and a folder of attnc")
        assert shards is not None
        is_norm = data["norm"] != LARGEST_ERROR
        found = shards(data, len(ends), math.inf if is_norm else field(data, "bound", float))
        return ByLeaves(found, found.bounds if is_norm else None, None, None, ends)
    if method == BY_LEAVES:
        leaves = read_leaves(data["leaves"], len(ends), sides)
        are_alike = len({leaf.kind == ENCLOSURE for leaf in leaves}) == 1
        require(are_alike, "enclosure leaves are for all of a box, or for none of it")
        bounds, gap = field(data, "leaf_bounds", tuple[float, ...] | None), field(data, "gap", float | None)
        require(gap is None or gap >= 0, f"the gap {gap} is negative")
        return ByLeaves(leaves, bounds, field(data, "cuts", Rows | None), gap, _points(data, ends, leaves))
    if method == STAGED:
        return read_stages(data, variables)
    rows = field(data, "table", Rows | None)
    if not rows or method != f"{AT_POINTS}{len(rows):,} points":
        raise Refused(f"the method is {method!r:.60}, but the table is not stored, or not whole")
    if data["expression"] is not None or data.get("points", len(rows)) != len(rows):
        raise Refused(f"the claim is about {len(rows):,} rows of a table, and states an expression or other points")
    for number, row in enumerate(rows):
        if not len(row) == len(rows[0]) > len(ends):
            raise BadFile(f"the certificate: row {number} of the table is no list of as many numbers as the first")
        if not all(lo <= x <= hi for x, (lo, hi) in zip(row, ends, strict=False)):
            raise Refused(f"the point in row {number} of the table lies outside of the box")
    return AtPoints(rows)


def _points(data: Object, ends: tuple[Ends, ...], leaves: tuple[Leaf, ...]) -> Rows:
    """Return, for each variable, the ends and the knots between them. Most certificates have no knots."""
    knots = field(data, "knots", Rows | None)
    if knots is None:
        return ends
    require(len(knots) == len(ends), f"there are knots for {len(knots)} variables of {len(ends)}")
    require(leaves[0].kind != ENCLOSURE, "enclosure leaves have no knots")
    points = tuple((lo, *inner, hi) for (lo, hi), inner in zip(ends, knots, strict=True))
    is_ascending = all(x < y for side in points for x, y in itertools.pairwise(side))  # False for nan
    require(is_ascending, "the knots do not lie inside of the box, in ascending order")
    return points


def _ends(box: Object, core: Ends | None) -> tuple[tuple[Ends, ...], frozenset[int]]:
    """Return finite ends and the infinite sides. A box with an infinite side has one variable, with the ends `core`."""
    if core is None:
        ends, sides = tuple(typed(pair, Ends, f"box.{name}") for name, pair in box.items()), frozenset[int]()
    else:
        whole = typed([*box.values()], tuple[tuple[Any, Any], ...], "box")
        if len(whole) != 1 or any(x not in either for x, *either in zip(whole[0], INFINITE, core, strict=True)):
            raise Refused(f"the core {core} does not end where the box {box} does")
        ends, sides = (core,), frozenset(side for side, x in zip((-1, 1), whole[0], strict=True) if x in INFINITE)
    require(bool(ends) and all(lo < hi for lo, hi in ends), f"the box {box!r:.80} is empty or reversed")
    return ends, sides
