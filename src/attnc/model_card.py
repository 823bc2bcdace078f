"""The model card of a network for people, and its summary for programs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnc.numerics.bound import Term
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.certificate import THEOREM, Certificate, Standing
from attnc.proofs.error_tree import ErrorNode, error_tree
from attnc.wording import (
    bound_sentence,
    ceiling,
    elsewhere,
    gradient_sentence,
    observed_sentence,
    one_line,
    percent,
    plural,
    remarks,
    said,
    shown,
    without_expression,
)

if TYPE_CHECKING:
    from attnc.network import Network

MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]<>|#~&$!])")


def model_card(network: Network) -> str:
    """Return the card as Markdown. Texts of users are escaped or fenced, so that they cannot change its structure.

    The card is the same on every machine: its words are "the certificate states".
    """
    network = _as_stated(network)
    unnamed = without_expression(network)
    title = code(network.expression) if network.expression is not None else unnamed[0].upper() + unnamed[1:]
    blocks = [
        f"# {title} as softmax attention",
        "Affine maps and softmax attention, nothing else; constructed by attnc, not trained.",
        "\n".join(f"- **{name}:** {value}" for name, value in _facts(network)),
        "## How far off it can be",
        _claims(network),
        *remarks(network),
        *_ledger(network),
        *_assumptions(network),
        "## Run it",
        "In this folder, with attnc installed:",
        fenced(_snippet(network), "python"),
    ]
    if network.command is not None:
        blocks += ["## How it was made", fenced(network.command, "sh")]
    return "\n\n".join(blocks) + "\n"


def _as_stated(network: Network) -> Network:
    """Return the network with certificates that are stated, as they are for who reads the files."""
    claim, *others = (replace(each, standing=Standing.STATED) for each in (network.certificate, *network.also.values()))
    return replace(network, certificate=claim, also=dict(zip(network.also, others, strict=True)))


def summary(network: Network) -> dict[str, Any]:
    """Return the same facts as plain JSON values."""
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
        "standing": standing(certificate),
        "observed": certificate.observed,
        "method": certificate.method,
        "complete": certificate.complete,
        "num_leaves": certificate.num_leaves,
        "num_stages": certificate.num_heads,
        "num_points": certificate.num_points if certificate.is_of_table else None,
        "norm": certificate.norm,
        "gradient_eps": certificate.gradient_eps,
        "gradient_bound": certificate.gradient_bound,
        "gradient_observed": certificate.gradient_observed,
        "gradient_terms": _terms(() if certificate.gradient is None else certificate.gradient.terms),
        "excluded": [dataclasses.asdict(band) for band in certificate.excluded],
        "certificates": [_certified(network, dtype) for dtype in UNIT_ROUNDOFF],
        "terms": _terms(certificate.terms),
        "assumptions": list(certificate.assumptions),
        "command": network.command,
    }


def _terms(terms: Iterable[Term]) -> list[dict[str, Any]]:
    return [{"name": term.name, "value": term.value, "reason": term.reason} for term in terms]


def _certified(network: Network, dtype: str) -> dict[str, Any]:
    claim = network.certified_in(dtype)
    facts = {name: None if claim is None else getattr(claim, name) for name in ("bound", "observed", "method")}
    return {"name": dtype, "certified": claim is not None, **facts, "standing": standing(claim)}


def standing(claim: Certificate | None) -> str | None:
    """Return the standing of a bound for programs: proven, stated, re-proved or theorem; None if there is no bound."""
    if claim is None or claim.bound is None:
        return None
    return THEOREM if claim.is_by_theorem else claim.standing.value


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
    claim, strong = network.certificate, "**{}**".format
    bound, observed = bound_sentence(claim, strong, escape), observed_sentence(claim, strong, escape)
    kind = "Bound" if claim.bound is None else f"Bound ({said(claim)})"
    if claim.is_of_table:
        lines = [] if claim.bound is None else [f"**{kind}:** {bound}"]
        lines.append(f"**Observed error:** {observed}")
        lines.append("**Between the points:** nothing is claimed. The table has no values there.")
    else:
        lines = [f"**{kind}:** {bound}", f"**Observed error (sampled):** {observed}"]
        if claim.gradient is not None:
            slopes = gradient_sentence(claim, strong, escape)
            lines.append(f"**Gradient ({said(claim)}):** {slopes}")
        lines += [f"**In {dtype}:** {escape(claimed)}." for dtype, claimed in elsewhere(network)]
    lines.append(
        "**Outside the box:** nothing is claimed. `net(points)` refuses points there, unless `outside` is `clamp` or "
        "`allow`. `to_torch` and `export_onnx` take `outside` as well: `clamp`, `nan` or `allow`."
    )
    return "\n".join(f"- {line}" for line in lines)


def _ledger(network: Network) -> list[str]:
    """List the terms with their shares. A staged proof is listed by stages, which keeps the card short."""
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
    """Describe a source of error; a stage is described with the head that adds most."""
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
    """Return four lines that evaluate the network in the middle of its box."""
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


def escape(text: str) -> str:
    """Escape plain text for Markdown, also for the cell of a table."""
    return MARKDOWN_SIGNS.sub(r"\\\1", one_line(text))


def code(text: str) -> str:
    """Return a span of code, with a fence longer than any run of backticks in the text."""
    text = one_line(text) or " "
    fence = "`" * (_longest_run(text) + 1)
    blank = " " if text[0] == "`" or text[-1] == "`" else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def fenced(text: str, language: str) -> str:
    """Return a block of code, with a fence longer than any run of backticks in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
