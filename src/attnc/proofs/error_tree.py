"""The ledger of a certificate as a tree: the bound, the stages of a deep program, the share of each head or term."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnc.numerics.bound import Term
from attnc.proofs.certificate import Certificate
from attnc.proofs.proof import HeadProof
from attnc.targets.box import Box


@dataclass(frozen=True)
class ErrorNode:
    """The part of the bound that one source adds. For a head it is its own error times the growth up to the output."""

    name: str
    what: str
    adds: float
    share: float  # the share of the whole ledger
    own: float | None = None  # for a head: its distance from its function on `interval`
    grows: float | None = None  # adds / own
    interval: tuple[float, float] | None = None
    children: tuple[ErrorNode, ...] = ()

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "what": self.what, "adds": self.adds, "share": self.share}
        if self.own is not None:
            found |= {"own_error": self.own, "amplification": self.grows}
        if self.interval is not None:
            found["interval"] = list(self.interval)
        return found | ({"children": [child.as_json() for child in self.children]} if self.children else {})


def error_tree(certificate: Certificate, box: Box | None = None) -> ErrorNode:
    """Return the tree. Its root is the bound, with the part of the box where it is largest.

    Heads are the children of their stage, in the order in which the program runs them.
    """
    total = math.fsum(term.value for term in certificate.terms)

    def share(value: float) -> float:
        return value / total if total > 0 else 0.0

    left = {term.name: term for term in certificate.terms}
    nodes: list[ErrorNode] = []
    by_stage: dict[str, list[ErrorNode]] = {}
    for same in _by_term(() if certificate.by_heads is None else certificate.by_heads.heads):
        by_stage.setdefault(same[0].stage, []).append(_head(same, left, share))
    for stage, heads in by_stage.items():
        adds = math.fsum(head.adds for head in heads)
        nodes.append(
            ErrorNode(stage, f"{len(heads)} function{'s' * (len(heads) > 1)}", adds, share(adds), children=tuple(heads))
        )
    nodes += [ErrorNode(term.name, term.reason, term.value, share(term.value)) for term in left.values()]
    place = "" if box is None else certificate.worst_place(box)
    where = f"largest on {place}" if place else ""
    return ErrorNode("bound", where, total, 1.0, children=tuple(nodes))


def gradient_tree(certificate: Certificate) -> ErrorNode | None:
    """Return the terms of the bound of partial derivatives as a tree; None if there is none."""
    if certificate.gradient is None:
        return None
    terms = certificate.gradient.terms
    total = math.fsum(term.value for term in terms)
    nodes = [ErrorNode(term.name, term.reason, term.value, term.value / (total or 1.0)) for term in terms]
    return ErrorNode("gradient", "of every variable and output", total, 1.0, children=tuple(nodes))


def _by_term(heads: Sequence[HeadProof]) -> list[list[HeadProof]]:
    """Group the heads of one stage that share a term of the ledger, such as the units of a layer of a ReLU network."""
    groups: dict[tuple[str, str], list[HeadProof]] = {}
    terms = {head.name: head.term for head in heads if head.like is None}
    for head in heads:
        groups.setdefault((head.stage, terms[head.like or head.name]), []).append(head)
    return list(groups.values())


def _head(same: list[HeadProof], left: dict[str, Term], share: Callable[[float], float]) -> ErrorNode:
    """Return the node of heads that share a term of the ledger, and remove that term from `left`."""
    head, others = same[0], len(same) - 1
    argument = _readable(head.argument_as or head.argument)
    what = _applied(head.function, argument, None if head.carrier is None else _readable(head.carrier))
    what += f", and {others} more of this kind" if others else ""
    term, own = left.pop(head.term, None), max(one.bound for one in same)
    if term is None:  # it was counted for a head of another stage with the same function and argument
        return ErrorNode(head.name, what, 0.0, 0.0, own, 0.0, head.interval)
    grows = term.value / own if own > 0 else None
    return ErrorNode(head.name, what, term.value, share(term.value), own, grows, head.interval)


def _readable(text: str) -> str:
    """Return a sum in its usual form: y - x for 1*y + -1*x + 0."""
    text = re.sub(r"(?<![\w.*])1\*", "", text).replace("+ -", "- ")
    return re.sub(r" [+-] 0$", "", text)


def _applied(function: str, argument: str, carrier: str | None) -> str:
    """Return the text of carrier·g(argument)."""
    at = re.sub(r"\bt\b", lambda _: _factor(argument), function)
    at = at.replace(f"({_factor(argument)})", f"({argument})") if _factor(argument) != argument else at
    return at if carrier is None else f"{_factor(carrier)}·{_factor(at)}"


def _factor(text: str) -> str:
    """Return the text in brackets, unless it is a name, a number, a call, or already in brackets."""
    return text if re.fullmatch(r"[\w.]*(\([^()]*\))?", text) else f"({text})"
