"""Model cards and summaries: complete, true to the certificate, and safe whatever text a stranger wrote."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import attnc
from attnc.model_card import code, escape, fenced, model_card, summary
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.wording import ceiling, one_line, percent

HOSTILE = "x` | y\n\n# heading\n\n```\n<script>&amp;[a](http://b) *b* \\ \x1b[31m"


BOX = {"x": (-1, 1), "y": (0, 2)}


@pytest.fixture(scope="module")
def network() -> Network:
    return attnc.compile("sin(x)+y", BOX, 0.5, construction="max_affine", command="attnc compile 'sin(x)+y'")


def tokens(text: str):
    return MarkdownIt("commonmark").enable("table").parse(text)


def inline_parts(text: str):
    """The spans of the paragraphs, headings and cells of a page."""
    return [part for token in tokens(text) if token.type == "inline" for part in token.children or []]


def test_a_card_states_everything(network: Network) -> None:
    card = model_card(network)
    certificate = network.certificate
    assert certificate.bound is not None
    assert card.startswith("# `sin(x)+y` as softmax attention\n")
    for needed in (
        "`x` ∈ [-1.0, 1.0], `y` ∈ [0.0, 2.0]",
        "eps):** 0.5",
        "`max_affine`",
        "`beta`",
        f"{network.num_anchors:,} anchors",
        f"{network.num_parameters:,} stored non-zeros",
        "1 head,",
        "3 layers",
        "float64",
        f"**Bound (stated by the certificate):** sup |f − network| ≤ **{ceiling(certificate.bound)}**",
        f"**Observed error (sampled):** **{certificate.observed:.3g}**",
        "arithmetic: float64",
        "attnc compile 'sin(x)+y'",
    ):
        assert needed in card
    for term in certificate.terms:
        share = percent(term.value / sum(other.value for other in certificate.terms))
        assert f"| {escape(term.name)} | {ceiling(term.value)} | {share} | {escape(term.reason)} |" in card
    for sentence in certificate.assumptions:
        assert f"- {escape(sentence)}" in card


def test_a_card_says_how_the_bound_was_proved() -> None:
    again = "Run `attnc verify` on this folder to re-prove it."
    by_leaves = attnc.compile("sin(x)+cos(y)", BOX, 1e-8)
    count = by_leaves.certificate.num_leaves
    assert f"(proof by leaves, {count} cells that cover the box; arithmetic: float64). {again}" in model_card(by_leaves)
    by_heads = attnc.compile("exp(sin(x)*y)", BOX, 1e-3)
    count = by_heads.program.num_heads
    assert f"(proof head by head, {count} heads; arithmetic: float64). {again}" in model_card(by_heads)
    by_theorem = attnc.compile(attnc.SequenceTarget(lambda X: X, tokens=5, width=1, lipschitz=1.0), eps=1.5)
    given = "under the stated assumption: Lipschitz constant 1.0 as given"
    assert f"(stated by a theorem, {given}; arithmetic: float64). `attnc verify` cannot re-prove it." in model_card(
        by_theorem
    )
    for network in (by_leaves, by_heads, by_theorem):
        assert "ran out of time" not in model_card(network)
        cut_short = dataclasses.replace(network, certificate=dataclasses.replace(network.certificate, complete=False))
        assert "The proof ran out of time" in model_card(cut_short)
    sampled = model_card(attnc.compile(lambda p: np.sin(p[:, 0]), [(-1, 1)], 0.01))
    assert "**Bound:** none. Nothing was proved" in sampled


def test_rounding_is_relative_beyond_the_core_of_an_infinite_range() -> None:
    network = attnc.compile("silu(x)", {"x": (-math.inf, math.inf)}, 1e-3)
    assert network.certificate.core is not None
    lo, hi = network.certificate.core
    card = model_card(network)
    assert f"rounding included on [{lo:g}, {hi:g}]; beyond, it adds at most 6.73e-16·|x|, up to |x| = 1.3e+300" in card
    assert "points = [[0.0]]" in card
    assert summary(network)["box"] == {"x": ["-inf", "inf"]}


def run_snippet(network: Network, folder: Path) -> str:
    """Return what the four lines of the card print in the folder of the network."""
    network.save(folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    (snippet,) = [token.content for token in tokens(card) if token.type == "fence" and token.info == "python"]
    assert len(snippet.strip().splitlines()) == 4
    command = [sys.executable, "-X", "utf8", "-c", snippet]
    ran = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_snippet_runs(network: Network, tmp_path: Path) -> None:
    value, bound = run_snippet(network, tmp_path / "net").strip("[]\n").replace("] ±", " ±").split("±")
    assert float(bound) == network.certificate.bound
    assert abs(float(value) - 1.0) <= float(bound)


def test_the_snippet_fits_a_sequence(tmp_path: Path) -> None:
    target = attnc.SequenceTarget(lambda X: X.mean(axis=1, keepdims=True) + 0 * X, tokens=2, width=1, lipschitz=1.0)
    assert "±" in run_snippet(attnc.compile(target, eps=0.5), tmp_path / "net")


def test_hostile_text_cannot_break_the_markdown(network: Network) -> None:
    certificate = dataclasses.replace(
        network.certificate,
        terms=(Term(HOSTILE, 0.25, HOSTILE), Term("leak", 1e-9, "a|b")),
        assumptions=(HOSTILE, "plain"),
        method=HOSTILE,
    )
    texts = dict.fromkeys(("expression", "construction", "command"), HOSTILE)
    hostile = dataclasses.replace(network, certificate=certificate, parameters={HOSTILE: HOSTILE}, **texts)
    card = model_card(hostile)
    before, after = tokens(model_card(network)), tokens(card)

    def kinds(found, kind):
        return [token for token in found if token.type == kind]

    assert len(kinds(after, "heading_open")) == len(kinds(before, "heading_open"))
    assert [token.info for token in kinds(after, "fence")] == [token.info for token in kinds(before, "fence")]
    assert kinds(after, "fence")[-1].content == HOSTILE + "\n"
    assert not kinds(after, "html_block")
    assert len(kinds(after, "table_open")) == 1
    assert len(kinds(after, "tr_open")) == 3
    assert len(kinds(after, "td_open")) == 8
    assert not {part.type for part in inline_parts(card)} & {"link_open", "image", "html_inline", "em_open"}
    assert "\x1b" not in card.replace(fenced(HOSTILE, "sh"), "")


def test_a_network_of_which_nothing_is_known(network: Network) -> None:
    unproved = dataclasses.replace(network.certificate, bound=None, observed=None, terms=(), assumptions=())
    card = model_card(dataclasses.replace(network, certificate=unproved, expression=None, eps=None, command=None))
    assert "**Bound:** none. Nothing was proved" in card
    assert "**Observed error (sampled):** not measured." in card
    assert "A Python function as softmax attention" in card
    assert "How it was made" not in card


def test_summary_is_json_and_complete(network: Network) -> None:
    facts, claim = summary(network), network.certificate
    known = {"box": {"x": [-1.0, 1.0], "y": [0.0, 2.0]}, "bound": claim.bound, "observed": claim.observed}
    assert facts == facts | known | {"num_anchors": network.num_anchors}
    assert [term["name"] for term in facts["terms"]] == [term.name for term in network.certificate.terms]


@given(st.text())
def test_escaped_text_reads_as_it_was(text: str) -> None:
    seen = "".join(part.content for part in inline_parts("a " + escape(text) + " b"))
    assert " ".join(seen.split()) == " ".join(f"a {one_line(text)} b".split())


@given(st.text(alphabet="`ab |\n"))
def test_code_spans_hold_any_backticks(text: str) -> None:
    found = [part.content for part in inline_parts("a " + code(text)) if part.type == "code_inline"]
    assert found == [one_line(text) or " "]
