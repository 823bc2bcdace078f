"""What a network computes, how far off it can be, how to run it: a README.md for people, a summary for programs."""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Any

from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.error_tree import ErrorNode, error_tree

if TYPE_CHECKING:
    from attnc.network import Network
    from attnc.proofs.certificate import Certificate

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$!])")


def model_card(network: Network) -> str:
    """Markdown. Text that came from a user is escaped or fenced: it cannot end a table, a list or a block of code."""
    unnamed = without_expression(network)
    title = code(network.expression) if network.expression is not None else unnamed[0].upper() + unnamed[1:]
    blocks = [
        f"# {title} as softmax attention",
        "Affine maps and softmax attention, nothing else; constructed by attnc, not trained.",
        "\n".join(f"- **{name}:** {value}" for name, value in _facts(network)),
        "## How far off it can be",
        _claims(network),
        *_ledger(network),
        *_assumptions(network),
        "## Run it",
        "In this folder, with attnc installed:",
        fenced(_snippet(network), "python"),
    ]
    if network.command is not None:
        blocks += ["## How it was made", fenced(network.command, "sh")]
    return "\n\n".join(blocks) + "\n"


def summary(network: Network) -> dict[str, Any]:
    """The same as plain JSON values."""
    program, certificate = network.program, network.certificate
    return {
        "name": network.expression or (without_expression(network) if certificate.is_of_table else "function"),
        "expression": network.expression,
        "variables": list(network.variables),
        "box": network.box.as_json(),
        "eps": network.eps,
        "construction": network.construction,
        "parameters": dict(network.parameters),
        "num_layers": len(program.all_layers),
        "num_attention_layers": program.num_attention_layers,
        "num_heads": program.num_heads,
        "num_anchors": network.num_anchors,
        "num_parameters": network.num_parameters,
        "dtype": network.dtype,
        "bound": certificate.bound,
        "observed": certificate.observed,
        "method": certificate.method,
        "complete": certificate.complete,
        "num_leaves": certificate.num_leaves,
        "num_stages": certificate.num_heads,
        "num_points": certificate.num_points if certificate.is_of_table else None,
        "norm": certificate.norm,
        "certificates": [_certified(network, dtype) for dtype in UNIT_ROUNDOFF],
        "terms": [{"name": term.name, "value": term.value, "reason": term.reason} for term in certificate.terms],
        "assumptions": list(certificate.assumptions),
        "command": network.command,
    }


def _certified(network: Network, dtype: str) -> dict[str, Any]:
    claim = network.certified_in(dtype)
    facts = {name: None if claim is None else getattr(claim, name) for name in ("bound", "observed", "method")}
    return {"name": dtype, "certified": claim is not None, **facts}


def without_expression(network: Network) -> str:
    """What a network computes that has no expression."""
    if network.definitions is not None:
        return "a ReLU network" if "relu(" in network.definitions else "truncated linear functions"
    if not network.certificate.is_of_table:
        return "a Python function"
    return f"table of {plural(network.certificate.num_points, 'point')}"


def _facts(network: Network) -> list[tuple[str, str]]:
    program = network.program
    what = without_expression(network) + (", not stored here" if network.definitions is None else "")
    what = code(network.expression) if network.expression is not None else what
    box = ", ".join(f"{code(name)} ∈ [{lo!r}, {hi!r}]" for name, (lo, hi) in network.box.as_dict().items())
    parameters = ", ".join(f"{code(name)} = {code(shown(value))}" for name, value in network.parameters.items())
    return [
        ("Function", what),
        ("Box", box),
        ("Accuracy asked for (eps)", "not stated" if network.eps is None else f"{network.eps!r}"),
        ("Construction", code(network.construction) + (f" with {parameters}" if parameters else "")),
        (
            "Size",
            f"{len(program.all_layers)} layers, {program.num_attention_layers} of them attention; "
            f"{plural(program.num_heads, 'head')}, {plural(network.num_anchors, 'anchor')}, "
            f"{plural(network.num_parameters, 'stored non-zero')}",
        ),
        ("Arithmetic (dtype)", network.dtype),
    ]


def _claims(network: Network) -> str:
    certificate = network.certificate
    arithmetic = f"{escape(proved_how(certificate))}; arithmetic: {escape(certificate.dtype)}"
    if certificate.is_of_table:
        return _claims_of_table(certificate)
    if certificate.bound is None:
        bound = f"none. Nothing was proved (arithmetic: {escape(certificate.dtype)})."
    else:
        largest = f"**{ceiling(certificate.bound)}**"
        norm = (
            "sup |f − network|" if certificate.norm == "inf" else f"the L{escape(certificate.norm)} norm of f − network"
        )
        bound = f"{norm} ≤ {largest} over the whole box, {rounding_where(certificate)} (proven {arithmetic})."
        if not certificate.complete:
            bound += " The proof ran out of time: a smaller bound may be true."
    if certificate.observed is None:
        observed = "not measured."
    else:
        observed = (
            f"**{certificate.observed:.3g}**, the largest difference at sampled points. It says nothing about the "
            "points between them."
            if certificate.norm == "inf"
            else f"**{certificate.observed:.3g}**, the same norm by quadrature at sampled points. It proves nothing."
        )
    others = "".join(f"\n- **In {dtype}:** {escape(claim)}." for dtype, claim in elsewhere(network))
    return f"- **Bound (proven):** {bound}\n- **Observed error (sampled):** {observed}{others}"


def _claims_of_table(certificate: Certificate) -> str:
    where = f"at the table's {plural(certificate.num_points, 'point')}"
    arithmetic = f"arithmetic: {escape(certificate.dtype)}"
    seen = "not measured" if certificate.observed is None else f"**{certificate.observed:.3g}**"
    lines = [
        f"- **Observed error:** {seen}, the largest {where}, each of which was checked ({arithmetic}).",
        "- **Between the points:** nothing is claimed; a table says nothing there.",
    ]
    if certificate.bound is not None:
        largest = f"**{ceiling(certificate.bound)}**"
        lines.insert(0, f"- **Bound (proven):** |f − network| ≤ {largest} {where}, rounding included ({arithmetic}).")
    return "\n".join(lines)


def proved_how(certificate: Certificate) -> str:
    """In words: by leaves that cover the box, head after head, or by the theorem of the construction."""
    method, _, given = one_line(certificate.method).partition(" under the stated assumption: ")
    given = f", under the stated assumption: {given}" if given else ""
    if method == "proof":
        tails = 0 if certificate.by_leaves is None else len(certificate.by_leaves.tails)
        cells = plural(certificate.num_leaves - tails, "cell") + (f" and {plural(tails, 'tail')}" if tails else "")
        cells += " that covers" if certificate.num_leaves == 1 else " that cover"
        return f"by leaves, {cells} the box{given}"
    if method == "staged proof":
        return f"head by head, {plural(certificate.num_heads, 'head')}{given}"
    return f"by {method}{given}"


def rounding_where(certificate: Certificate) -> str:
    """Of an infinite box the tails are about exact arithmetic: rounding grows with |x| there."""
    if certificate.core is None:
        return "rounding included"
    lo, hi = certificate.core
    return f"rounding included on [{lo:g}, {hi:g}], in exact arithmetic beyond"


def elsewhere(network: Network) -> list[tuple[str, str]]:
    """For every dtype but the network's own, what is known of its weights rounded to it."""
    found = []
    for dtype in UNIT_ROUNDOFF:
        claim = network.certified_in(dtype)
        if dtype == network.dtype:
            continue
        if claim is None or claim.bound is None:
            found.append((dtype, "not certified"))
        else:
            seen = "" if claim.observed is None else f"; observed {claim.observed:.3g} at samples"
            how = f"weights rounded to it, proven {proved_how(claim)}"
            beyond = "" if claim.core is None else f", {rounding_where(claim)}"
            found.append((dtype, f"≤ {ceiling(claim.bound)}, {how}{beyond}{seen}"))
    return found


def _ledger(network: Network) -> list[str]:
    """The terms with their shares; of a staged proof, by stages: whatever the heads, a card stays short."""
    tree = error_tree(network.certificate, network.box)
    if not tree.children:
        return []
    rows = [
        f"| {escape(node.name)} | {ceiling(node.adds)} | {percent(node.share)} | {escape(_what(node))} |"
        for node in tree.children
    ]
    heading = "| source | adds | share | what |"
    where = f", {tree.what}," if tree.what else ""
    return [f"The bound{where} is the sum of:", "\n".join([heading, "| :-- | --: | --: | :-- |", *rows])]


def _what(node: ErrorNode) -> str:
    """Of a stage: the head that adds most."""
    if not node.children:
        return node.what
    worst = max(node.children, key=lambda child: child.adds)
    return f"{node.what}; most of it ({percent(worst.share)}) by {worst.name} = {worst.what}"


def _assumptions(network: Network) -> list[str]:
    assumptions = network.certificate.assumptions
    if not assumptions:
        return []
    return ["It assumes:", "\n".join(f"- {escape(sentence)}" for sentence in assumptions)]


def _snippet(network: Network) -> str:
    """Four lines: the middle of the box, as the network takes it."""
    shapes = network.program.input_shapes
    inside = network.box.core(1.0)
    middle = [float(x) for x in inside.lo / 2 + inside.hi / 2]
    if len(shapes) == 1 and len(shapes[0]) == 1 and len(middle) <= 4:
        names = ", ".join(one_line(name) for name in network.variables)
        points, arguments = f"points = [{middle!r}]  # columns: {names}", "points"
    elif len(shapes) == 1:
        points, arguments = f"points = (net.box.lo / 2 + net.box.hi / 2).reshape{(1, *shapes[0])!r}", "points"
    else:
        cut = math.prod(shapes[0])
        points = "middle = net.box.lo / 2 + net.box.hi / 2"
        arguments = f"middle[:{cut}].reshape{(1, *shapes[0])!r}, middle[{cut}:].reshape{(1, *shapes[1])!r}"
    return (
        f'import attnc\nnet = attnc.load(".")\n{points}\nprint(net({arguments}), "±", net.certificate.pointwise_bound)'
    )


# --- text -------------------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Line breaks stay; what cannot be printed, such as a terminal's escape codes, becomes �."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """Printable, with runs of blanks and line breaks made one blank."""
    return printable(" ".join(text.split()))


def escape(text: str) -> str:
    """Plain text in Markdown, fit for a table's cell."""
    return _SPECIAL.sub(r"\\\1", one_line(text))


def code(text: str) -> str:
    """A span of code, whatever backticks the text holds."""
    text = one_line(text) or " "
    fence = "`" * (_longest_run(text) + 1)
    blank = " " if text[0] == "`" or text[-1] == "`" else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def fenced(text: str, language: str) -> str:
    """A block of code, whatever backticks the text holds."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    return "< 0.1 %" if 0 < share < 1e-3 else f"{100 * share:.1f} %"


def shown(value: float | int | str) -> str:
    """A parameter of a construction, to six digits; files have all."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def ceiling(value: float, digits: int = 3) -> str:
    """A bound to a few digits, rounded up: read back as a float, what is printed is still a bound."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(value)))
    exponent = rounded.adjusted()
    if -5 < exponent < 4:
        return f"{rounded:f}"
    return f"{rounded.scaleb(-exponent):f}e{exponent:+03d}"
