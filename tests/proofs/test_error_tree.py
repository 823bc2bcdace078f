"""The ledger as a tree: its entries add up, heads stand under their stages, strangers' files are refused."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

import attnc
from attnc.cli.output import bar, ledger_table
from attnc.errors import FileError
from attnc.numerics.bound import Term
from attnc.proofs.error_tree import error_tree

BOX = {"x": (-2, 2), "y": (-2, 2)}


@pytest.fixture(scope="module")
def deep():
    return attnc.compile("exp(sin(x)*y) + sin(y)", BOX, 1e-3)


def test_shares_add_up_and_heads_stand_under_their_stages(deep):
    claim = deep.certificate
    tree = error_tree(claim)
    assert claim.method == "staged proof"
    assert math.isclose(tree.adds, claim.bound, rel_tol=1e-12)
    assert math.isclose(sum(node.share for node in tree.children), 1.0, rel_tol=1e-9)
    stages = [node for node in tree.children if node.children]
    heads = [head for stage in stages for head in stage.children]
    assert [node.name for node in stages] == list(dict.fromkeys(head.stage for head in claim.by_heads.heads))
    assert len(heads) == claim.num_heads
    for stage in stages:
        assert math.isclose(stage.adds, sum(head.adds for head in stage.children))
    for head in heads:
        assert math.isclose(head.adds, head.own * head.grows)
    assert {head.what for head in heads} == {"sin(y)", "y·sin(x)", "exp(s_1)"}
    inner, outer = (next(head for head in heads if head.what == what) for what in ("y·sin(x)", "exp(s_1)"))
    assert inner.grows > 2 > outer.grows  # exp enlarges the errors before it, and nothing comes after it


def test_one_stage_has_its_terms():
    claim = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4, construction="spectral_grid").certificate
    tree = error_tree(claim)
    assert [(node.name, node.adds) for node in tree.children] == [(term.name, term.value) for term in claim.terms]
    assert not any(node.children for node in tree.children)


def test_layers_of_relu_networks_are_one_entry_each():
    rng = np.random.default_rng(0)
    weights, biases = [rng.normal(size=(4, 2)), rng.normal(size=(1, 4))], [rng.normal(size=4), np.zeros(1)]
    claim = attnc.compile(attnc.ReLUNetwork(weights, biases, [(-1, 1)] * 2), eps=0.1).certificate
    tree = error_tree(claim)
    assert [node.name for node in tree.children] == ["relu0", "rounding"]
    assert tree.children[0].children[0].what.endswith(", and 3 more of this kind")
    assert tree.children[0].adds == claim.terms[0].value
    assert math.isclose(tree.adds, sum(node.adds for node in tree.children))


def test_json_has_the_same_figures(deep):
    found = error_tree(deep.certificate).as_json()
    head = found["children"][0]["children"][0]
    assert set(head) == {"name", "what", "adds", "share", "own_error", "amplification", "interval"}
    assert found["adds"] == error_tree(deep.certificate).adds


def test_it_is_printed_as_a_tree(deep):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(ledger_table(error_tree(deep.certificate)))
    text = console.export_text()
    for needed in ("├─ attend1", "│  └─ s_1", "y·sin(x)", "own error", "grows", "100.0 %", "█"):
        assert needed in text
    assert (bar(1.0), bar(0.5), bar(0.0)) == ("█" * 12, "█" * 6, "")


@pytest.mark.parametrize("stage", [None, 3, "s", {}, {"stage": "a", "bound": "x"}])
def test_stages_that_do_not_fit_are_refused(deep, stage):
    stored = deep.certificate.to_json(deep.expression, deep.box)
    assert attnc.Certificate.from_json(stored) == deep.certificate
    for stages in ([stage], [*stored["stages"], stage], stored["stages"] * 2):
        with pytest.raises(FileError, match="a stage does not fit"):
            attnc.Certificate.from_json({**stored, "stages": stages})


def test_the_root_says_where_the_bound_is_largest():
    network = attnc.compile("exp(4*x) + 0*y", {"x": (-1, 1), "y": (0, 1)}, 1e-2, construction="spectral_grid")
    root = error_tree(network.certificate, network.box)
    found = re.fullmatch(r"largest on x ∈ \[(.*), (.*)\], y ∈ \[(.*), (.*)\]", root.what)
    assert found is not None
    x_lo, x_hi, y_lo, y_hi = map(float, found.groups())
    assert -1 <= x_lo < x_hi <= 1
    assert 0 <= y_lo < y_hi <= 1
    part = {"x": (x_lo, x_hi), "y": (y_lo, y_hi)}
    assert network.bound(part) == pytest.approx(network.certificate.bound, rel=0.1)


@pytest.mark.parametrize(("text", "box", "norm"), [("sin(x)", (-1, 1), 2), ("gelu(x)", (-math.inf, math.inf), "inf")])
def test_of_a_norm_and_beyond_the_core_no_cell_is_the_worst(text, box, norm):
    network = attnc.compile(text, {"x": box}, 1e-2, norm=norm)
    claim = network.certificate
    if norm == "inf":  # as if the error beyond the core were worse than all leaves
        claim = dataclasses.replace(claim, terms=(Term("tail", claim.bound, "beyond"),))
    assert error_tree(claim, network.box).what == ""
