"""The words of a claim, for model cards, the terminal, pictures and refusals.

The bound and the observed error of a certificate are always two figures, each with its name. A bound is printed
rounded up, with the arithmetic in which it holds. It is called proven only if it was proved in this process.
Otherwise a file states it, and `attnc verify` may have re-proved it on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import TYPE_CHECKING

from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.certificate import ASSUMING, Standing

if TYPE_CHECKING:
    from attnc.network import Network
    from attnc.proofs.certificate import Certificate
    from attnc.targets.box import Box

NOT_CERTIFIED = "not certified"
OUT_OF_TIME = "The proof ran out of time"
ON_EXPORT = {
    "clamp": "a point is moved to the box, and the value is that at the moved point",
    "nan": "the value is NaN",
    "allow": "a value is computed, and nothing is claimed about it",
}
"""The behaviour of an exported network outside the box, in words."""
ON_FILE = "stated by the network's certificate; `attnc verify` re-proves it from the saved network"
"""The standing of the bound of an exported file, on any machine."""
SAID = {
    Standing.PROVEN: "proven",
    Standing.STATED: "stated by the certificate",
    Standing.REPROVED: "re-proved here",
}
"""The word for a bound, by the standing of its certificate."""
BY_THEOREM = "stated by a theorem"
"""The word for a bound that was not derived from the weights."""
Mark = Callable[[str], str]
"""A function that formats a text, for example in bold or escaped."""


def bound_sentence(claim: Certificate, strong: Mark = str, plain: Mark = str) -> str:
    """Return the bound as sentences, for a card. `plain` is applied to texts from files, which may be anybody's.

    A card goes with the files to any machine, so it writes "the certificate states", whatever the standing.
    """
    arithmetic = f"arithmetic: {plain(claim.dtype)}"
    if claim.bound is None:
        return f"none. Nothing was proved ({arithmetic})."
    largest = strong(ceiling(claim.bound))
    again = "Run `attnc verify` on this folder to re-prove it."
    again = again if claim.is_reprovable else "`attnc verify` cannot re-prove it."
    if claim.is_of_table:
        return f"|f − network| ≤ {largest} {at_points(claim)}, rounding included ({arithmetic}). {again}"
    quantity = "sup |f − network|" if claim.norm == "inf" else f"the {plain(_norm(claim))} of f − network"
    late = "" if claim.complete else f" {OUT_OF_TIME}: a smaller bound may be true."
    how = f"{BY_THEOREM}{_given(claim)}" if claim.is_by_theorem else f"proof {proved_how(claim)}"
    how = f"{plain(how)}; {arithmetic}"
    return f"{quantity} ≤ {largest} over the whole box, {rounding_where(claim)} ({how}).{late} {again}"


def observed_sentence(claim: Certificate, strong: Mark = str, plain: Mark = str) -> str:
    """Return the observed error as a sentence, for a card."""
    seen = "not measured" if claim.observed is None else strong(f"{claim.observed:.3g}")
    if claim.is_of_table:
        return f"{seen}, the largest {at_points(claim)}, each of which was checked (arithmetic: {plain(claim.dtype)})."
    if claim.observed is None:
        return f"{seen}."
    if claim.norm == "inf":
        return f"{seen}, the largest difference at sampled points. Between them the error may be larger."
    return f"{seen}, the same norm by quadrature at sampled points. It proves nothing."


def said(claim: Certificate) -> str:
    """Return the word for the bound of a claim: proven, stated by the certificate or a theorem, or re-proved here."""
    return BY_THEOREM if claim.is_by_theorem else SAID[claim.standing]


def _joined(claim: Certificate, *parts: str) -> str:
    """Return the parts that are not empty, and for a stated bound the remedy after the first, separated by ;."""
    first, *others = parts
    can = "re-proves" if claim.is_reprovable else "cannot re-prove"
    is_open = claim.standing is Standing.STATED or claim.is_by_theorem
    remedy = f"`attnc verify` {can} it" if is_open else ""
    return "; ".join(filter(None, (first, remedy, *others)))


def bound_note(claim: Certificate, eps: float | None = None) -> str:
    """Return the words after a bound on a terminal: where it holds, in which arithmetic, and how it was proved."""
    if claim.bound is None:
        if claim.is_of_table:
            return f"none proven {at_points(claim)}, and none between them"
        return f"none: nothing was proved ({one_line(claim.method)})"
    where = "on the whole box" if claim.norm == "inf" else f"of the {_norm(claim)} over the box"
    how = f"{rounding_where(claim)}{_way(claim)}"
    if claim.is_of_table:
        where, how = at_points(claim), "rounding included; none between them"
    asked = "" if eps is None else f"eps {eps}"
    return one_line(_joined(claim, f"{said(claim)} {where} in {claim.dtype}, {how}", asked))


def observed_note(claim: Certificate) -> str:
    """Return the words after an observed error on a terminal."""
    return "at samples; no proof" if not claim.is_of_table else f"the largest {at_points(claim)}, all checked"


def gradient_note(claim: Certificate) -> str | None:
    """Return both figures about partial derivatives, and where they do not hold; None if nothing is claimed."""
    proof = claim.gradient
    if proof is None:
        return None
    how = _joined(claim, f"{said(claim)} for every partial derivative, rounding included")
    bands = excluded_note(claim)
    seen = f"observed {proof.observed:.3g} at samples, no proof"
    late = "" if proof.complete else f"; {OUT_OF_TIME}: a smaller bound may be true"
    return one_line(f"≤ {ceiling(proof.bound)}  {how}; gradient_eps {proof.eps:g}; {seen}{bands}{late}")


def excluded_note(claim: Certificate) -> str:
    """Return the neighbourhoods of kinks in which nothing is claimed about partial derivatives, or "" for none."""
    bands = [f"{band.argument} ∈ [{band.lo:.6g}, {band.hi:.6g}]" for band in claim.excluded]
    return f"; excluded at kinks: {', '.join(bands)}" if bands else ""


def gradient_sentence(claim: Certificate, strong: Mark = str, plain: Mark = str) -> str:
    """Return the claim about partial derivatives as a sentence, for a card."""
    proof = claim.gradient
    assert proof is not None
    bound, seen, bands = strong(ceiling(proof.bound)), strong(f"{proof.observed:.3g}"), plain(excluded_note(claim))
    return (
        f"|∂network/∂x − ∂f/∂x| ≤ {bound} for every variable and output over the whole box, rounding included{bands}. "
        f"At samples {seen} was seen, which proves nothing."
    )


def headline(claim: Certificate) -> str:
    """Return both figures in one line, for the title of a picture."""
    before, how = "" if claim.norm == "inf" else f"{_norm(claim)}: ", "sampled"
    if claim.is_of_table:
        before, how = f"{at_points(claim)}: ", "all checked"
    bound = "no bound" if claim.bound is None else f"bound {ceiling(claim.bound)} ({said(claim)})"
    slopes = "" if claim.gradient is None else f"   gradient ≤ {ceiling(claim.gradient.bound)}"
    return before + bound + ("" if claim.observed is None else f"   observed {claim.observed:.3g} ({how})") + slopes


def certificate_lines(claim: Certificate, box: Box) -> list[str]:
    """Return both figures, and the place where the bound is largest, as lines above the picture of a certificate."""
    norm = "" if claim.norm == "inf" else f" in the {_norm(claim)}"
    how = f" {at_points(claim)}" if claim.is_of_table else _way(claim).lstrip(",")
    largest = f"{ceiling(claim.bound or 0.0)}{norm}{largest_on(claim, box)}"
    bound = _joined(claim, f"{said(claim)}{how}, in {claim.dtype}: at most {largest}")
    if claim.observed is None:
        return [bound]
    if claim.is_of_table:
        return [f"{bound}; {claim.observed:.3g} is the largest error seen at them"]
    slopes = gradient_note(claim)
    seen = f"seen at samples{norm}, no proof: {claim.observed:.3g}"
    return [bound, seen, *([] if slopes is None else [f"gradient {slopes}"])]


def value_note(claim: Certificate, *, is_claimed: bool, at: float = 0.0) -> str:
    """Return the words after a value at one point. `is_claimed` is true if the point is in the box or was moved there.

    `at` is the variable, which matters on an infinite box: far out, rounding is relative to it.
    """
    if claim.bound is None:
        return f"({NOT_CERTIFIED} in {claim.dtype})"
    if claim.norm == "inf" and not is_claimed:
        return "(no bound)"
    largest, bound = ceiling(claim.bound), claim.bound_at(at)
    words = f"± {largest if bound is None else ceiling(bound)}"
    if claim.norm != "inf":
        words = f"(no bound at a single point: the {_norm(claim)} of the error over the box is at most {largest})"
    elif claim.is_of_table:
        words = f"(± {largest} {at_points(claim)}; nothing is claimed between them)"
    elif claim.core is not None and bound is None:
        beyond = f"rounding beyond [{claim.core[0]:g}, {claim.core[1]:g}] not counted"
        if claim.beyond is not None:
            beyond = f"numbers may overflow beyond |x| = {floor(claim.beyond.reach)}"
        words = f"(± {largest} in exact arithmetic, {beyond})"
    is_plain = claim.standing is Standing.PROVEN and not claim.is_by_theorem
    return words if is_plain else f"{words} ({_joined(claim, said(claim))})"


def elsewhere(network: Network) -> list[tuple[str, str]]:
    """Return, for every dtype but the network's own, the claim about the same weights rounded to it."""
    return [(dtype, rounded_note(network.certified_in(dtype))) for dtype in UNIT_ROUNDOFF if dtype != network.dtype]


def rounded_note(claim: Certificate | None) -> str:
    """Return the claim about weights that were rounded to another dtype."""
    if claim is None or claim.bound is None:
        return NOT_CERTIFIED
    beyond = "" if claim.core is None else f", {rounding_where(claim)}"
    seen = "" if claim.observed is None else f"; observed {claim.observed:.3g} at samples"
    return f"≤ {ceiling(claim.bound)}, weights rounded to it, {said(claim)}{_way(claim).lstrip(',')}{beyond}{seen}"


def _norm(claim: Certificate) -> str:
    return f"L{one_line(claim.norm)} norm"


def largest_on(claim: Certificate, box: Box) -> str:
    """Return the place where the bound is largest, as the end of a sentence; empty if there is no such place."""
    place = claim.worst_place(box)
    return f", largest on {place}" if place else ""


def at_points(claim: Certificate) -> str:
    """Return where a claim about a table holds."""
    return f"at the table's {plural(claim.num_points, 'point')}"


def _way(claim: Certificate) -> str:
    """Return the method, as it goes on after the word for the bound."""
    if claim.is_by_theorem:
        return _given(claim)
    return f", with a proof {proved_how(claim)}" if claim.standing is Standing.STATED else f", {proved_how(claim)}"


def proved_how(claim: Certificate) -> str:
    """Return how the bound was proved, in words: by leaves that cover the box, head by head, or by a theorem."""
    method, given = one_line(claim.method).partition(ASSUMING)[0], _given(claim)
    if method == "proof":
        tails = 0 if claim.by_leaves is None else len(claim.by_leaves.tails)
        cells = plural(claim.num_leaves - tails, "cell") + (f" and {plural(tails, 'tail')}" if tails else "")
        cells += " that covers" if claim.num_leaves == 1 else " that cover"
        return f"by leaves, {cells} the box{given}"
    if method == "staged proof":
        return f"head by head, {plural(claim.num_heads, 'head')}{given}"
    return f"by {method}{given}"


def _given(claim: Certificate) -> str:
    """Return the assumption under which the bound holds, to go on after a comma; empty if there is none."""
    _, assuming, given = one_line(claim.method).partition(ASSUMING)
    return f",{assuming}{given}" if given else ""


def rounding_where(claim: Certificate) -> str:
    """Return where rounding is included. On an infinite box it grows with |x| beyond the core."""
    if claim.core is None:
        return "rounding included"
    lo, hi = claim.core
    if claim.beyond is None:
        return f"rounding included on [{lo:g}, {hi:g}], in exact arithmetic beyond"
    more, reach = ceiling(claim.beyond.relative), floor(claim.beyond.reach)
    return f"rounding included on [{lo:g}, {hi:g}]; beyond, it adds at most {more}·|x|, up to |x| = {reach}"


def remarks(network: Network) -> list[str]:
    """Return sentences that explain an unusual network: one without heads, or without an eps."""
    found = []
    if not network.program.num_heads:
        found.append("The function is affine: an affine map computes it by itself, and no attention head is needed.")
    if network.eps is None:
        found.append("No eps was asked for: the bound is reported, not enforced.")
    return found


def function_of(network: Network) -> str:
    """Return the function of a network in one line: its expression, or words in its place."""
    return one_line(network.expression or without_expression(network))


def without_expression(network: Network) -> str:
    """Return words for the function of a network that has no expression."""
    if network.definitions is not None:
        return "a ReLU network" if "relu(" in network.definitions else "truncated linear functions"
    claim = network.certificate
    return f"table of {plural(claim.num_points, 'point')}" if claim.is_of_table else "a Python function"


def printable(text: str) -> str:
    """Replace characters that cannot be printed, such as escape codes of a terminal, by �. Line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """Return printable text in which every run of blanks and line breaks is one blank."""
    return printable(" ".join(text.split()))


def shortened(text: str, length: int) -> str:
    """Return the text, or its beginning with "…" if it has more letters than this."""
    return text if len(text) <= length else text[: length - 1] + "…"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: 1 head, 2 heads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share of 1 in percent."""
    return "< 0.1 %" if 0 < share < 1e-3 else f"{100 * share:.1f} %"


def shown(value: float | int | str) -> str:
    """Return a parameter of a construction with six digits. Files have all digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def ceiling(value: float, digits: int = 3, rounding: str = ROUND_CEILING) -> str:
    """Return a bound with a few digits, rounded up, so that the printed number is still a bound."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=rounding).plus(Decimal(repr(value)))
    exponent = rounded.adjusted()
    if -5 < exponent < 4:
        return f"{rounded:f}"
    return f"{rounded.scaleb(-exponent):f}e{exponent:+03d}"


def floor(value: float, digits: int = 2) -> str:
    """Return a limit with a few digits, rounded down."""
    return ceiling(value, digits, ROUND_FLOOR)
