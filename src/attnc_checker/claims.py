"""What every certificate.json claims: BadFile for what cannot be read, Refused for what can, and is no proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnc_checker.cells import Leaf, read_leaves
from attnc_checker.files import BadFile, Refused, field, typed
from attnc_checker.rounding import FORMATS

NEEDED = "format weights_sha256 expression box dtype norm bound observed terms assumptions method leaves"
BY_LEAVES, STAGED, AT_POINTS = "proof", "staged proof", "proof at the table's "
INFINITE = ("-inf", "inf")

Ends = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """sup |f − network| ≤ bound over the box, in this arithmetic; `data` is the certificate, of which every kind of
    proof reads what it needs."""

    expression: Any
    variables: tuple[str, ...]
    ends: tuple[Ends, ...]  # of what the cells divide: the box, or the core of an infinite one
    sides: frozenset[int]  # on which its one variable goes on without end: −1, 1
    bound: float
    dtype: str
    truncation: float  # what engines that leave out far keys may be off by besides: part of the bound
    method: str
    norm: Any
    leaves: tuple[Leaf, ...]  # of the method BY_LEAVES
    data: dict[str, Any]

    title = ""


def read_claim(data: dict[str, Any]) -> Claim:
    for name in NEEDED.split():
        field(data, name, Any)
    if data["format"] != "attnc.certificate/1":
        raise BadFile(f"the certificate has the format {data['format']!r:.40}, not 'attnc.certificate/1'")
    method = data["method"]
    if method not in (BY_LEAVES, STAGED) and not (isinstance(method, str) and method.startswith(AT_POINTS)):
        raise Refused(f"the method is {method!r:.40}: only proofs, by leaves, stages or points, can be proved again")
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
    if data["norm"] != "inf" and (method != BY_LEAVES or sides):
        raise Refused(f"the norm {data['norm']!r:.40} is for leaves of a bounded box")
    leaves = read_leaves(data["leaves"], len(ends), sides) if method == BY_LEAVES else ()
    said = (bound, data["dtype"], truncation, method, data["norm"], leaves, data)
    return Claim(data["expression"], tuple(box), ends, sides, *said)


def _ends(box: dict[str, Any], core: Ends | None) -> tuple[tuple[Ends, ...], frozenset[int]]:
    """Finite ends, and the sides that are infinite: of one variable, whose finite part is then `core`."""
    if core is None:
        ends, sides = tuple(typed(pair, Ends, f"box.{name}") for name, pair in box.items()), frozenset[int]()
    else:
        whole = typed([*box.values()], tuple[tuple[Any, Any], ...], "box")
        if len(whole) != 1 or any(x not in either for x, *either in zip(whole[0], INFINITE, core, strict=True)):
            raise Refused(f"the core {core} does not end where the box {box} does")
        ends, sides = (core,), frozenset(side for side, x in zip((-1, 1), whole[0], strict=True) if x in INFINITE)
    if not ends or not all(lo < hi for lo, hi in ends):
        raise Refused(f"the box {box!r:.80} is empty or reversed")
    return ends, sides
