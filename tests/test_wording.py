"""The words of claims: the same facts on cards, terminals and pictures, and bounds that stay bounds when printed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnc
from attnc import wording
from attnc.proofs.cells.branching import Leaf
from attnc.proofs.certificate import Standing
from attnc.proofs.proof import Beyond, Leaves, Points

LEAVES = Leaves((Leaf("taylor", 2, 0, (0,)),), np.array([0.01234]))
PROVED = attnc.Certificate(
    bound=0.01234, observed=0.01, terms=(), assumptions=(), dtype="float32", method="proof", evidence=LEAVES
)
CLAIMS = {
    "proved": PROVED,
    "norm": replace(PROVED, norm="2"),
    "table": replace(PROVED, evidence=Points(5), method="proof at the table's 5 points"),
    "tails": replace(PROVED, evidence=replace(LEAVES, core=(-4.0, 4.0), beyond=Beyond(1.2341e-7, 3.49e25))),
    "exact tails": replace(PROVED, evidence=replace(LEAVES, core=(-4.0, 4.0))),
    "cut short": replace(PROVED, complete=False),
    "not proved": replace(PROVED, bound=None, method="estimate"),
    "stated": replace(PROVED, standing=Standing.STATED),
    "re-proved": replace(PROVED, standing=Standing.REPROVED),
    "theorem": replace(PROVED, standing=Standing.STATED, method="theorem", evidence=None),
    "theorem under an assumption": replace(PROVED, method="theorem under the stated assumption: L", evidence=None),
}
SURFACES = {
    "card": lambda claim: f"{wording.bound_sentence(claim)} {wording.observed_sentence(claim)}",
    "terminal": lambda claim: (
        f"{wording.ceiling(claim.bound or 0)} {wording.bound_note(claim)} "
        f"{claim.observed} {wording.observed_note(claim)}"
    ),
    "head of a picture": wording.headline,
    "picture": lambda claim: " ".join(wording.certificate_lines(claim, attnc.Box.parse({"x": (0, 1)}))),
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", CLAIMS)
def test_every_surface_states_the_same_facts(surface: str, name: str) -> None:
    claim = CLAIMS[name]
    if claim.bound is None and surface == "picture":
        pytest.skip("a certificate without a bound has no picture")
    words = SURFACES[surface](claim)
    assert "0.01" in words
    if claim.bound is None:
        assert "0.0124" not in words
        assert "none" in words or "no bound" in words
        return
    assert "0.0124" in words
    if surface != "head of a picture":
        assert "float32" in words
    if claim.is_of_table:
        assert "at the table's 5 points" in words
    if claim.norm != "inf":
        assert "L2 norm" in words
    if claim.core is not None and surface in ("card", "terminal"):
        more = "; beyond, it adds at most 1.24e-07·|x|, up to |x| = 3.4e+25"
        beyond = ", in exact arithmetic beyond" if claim.beyond is None else more
        assert f"rounding included on [-4, 4]{beyond}" in words
    if surface == "card":
        assert "proven" not in words
        assert ("Run `attnc verify` on this folder" in words) == claim.is_reprovable
    else:
        known = (*wording.SAID.values(), wording.BY_THEOREM)
        assert [word for word in known if word in words] == [wording.said(claim)]
    if claim.is_by_theorem:
        assert wording.BY_THEOREM in words
        assert ("`attnc verify` cannot re-prove it" in words) == (surface != "head of a picture")
    elif claim.standing is Standing.STATED and surface in ("terminal", "picture"):
        assert ("`attnc verify` re-proves it" in words) == claim.is_reprovable
        assert ("`attnc verify` cannot re-prove it" in words) != claim.is_reprovable
    if surface == "card":
        assert ("The proof ran out of time" in words) != claim.complete


@pytest.mark.parametrize(
    ("name", "is_claimed", "at", "words"),
    [
        ("proved", True, 0.0, "± 0.0124"),
        ("stated", True, 0.0, "± 0.0124 (stated by the certificate; `attnc verify` re-proves it)"),
        ("re-proved", True, 0.0, "± 0.0124 (re-proved here)"),
        *(
            (name, True, 0.0, "± 0.0124 (stated by a theorem; `attnc verify` cannot re-prove it)")
            for name in ("theorem", "theorem under an assumption")
        ),
        ("proved", False, 0.0, "(no bound)"),
        ("tails", True, 4.0, "± 0.0124"),
        ("tails", True, -1e6, "± 0.136"),
        ("tails", True, 1e26, "(± 0.0124 in exact arithmetic, numbers may overflow beyond |x| = 3.4e+25)"),
        ("exact tails", True, 5.0, "(± 0.0124 in exact arithmetic, rounding beyond [-4, 4] not counted)"),
        ("norm", True, 0.0, "(no bound at a single point: the L2 norm of the error over the box is at most 0.0124)"),
        ("table", True, 0.0, "(± 0.0124 at the table's 5 points; nothing is claimed between them)"),
        ("not proved", True, 0.0, "(not certified in float32)"),
    ],
)
def test_a_value_is_shown_with_its_bound(name: str, is_claimed: bool, at: float, words: str) -> None:
    assert wording.value_note(CLAIMS[name], is_claimed=is_claimed, at=at) == words


def test_another_dtype() -> None:
    assert wording.rounded_note(None) == wording.rounded_note(CLAIMS["not proved"]) == "not certified"
    assert wording.rounded_note(CLAIMS["stated"]) == (
        "≤ 0.0124, weights rounded to it, stated by the certificate with a proof by leaves, 1 cell that covers the box"
        "; observed 0.01 at samples"
    )
    assert wording.rounded_note(PROVED) == (
        "≤ 0.0124, weights rounded to it, proven by leaves, 1 cell that covers the box; observed 0.01 at samples"
    )


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_printed_bound_is_still_a_bound(value: float) -> None:
    shown = float(wording.ceiling(value))
    assert value <= shown <= value * 1.0101


def test_special_bounds_print() -> None:
    shown = {0.0: "0", 0.05: "0.05", 0.28919: "0.290", 1.07e-13: "1.07e-13", 123456.7: "1.24e+05", math.inf: "inf"}
    shown[float(np.nextafter(0.05, 1))] = "0.0501"
    assert {value: wording.ceiling(value) for value in shown} == shown


def test_what_cannot_be_printed_is_replaced() -> None:
    assert wording.printable("a\x1b[31m\nb\u202e") == "a�[31m\nb�"


def test_tails_are_no_cells() -> None:
    claim = attnc.compile("tanh(x)", [(-math.inf, math.inf)], eps=1e-3).certificate
    cells = 0 if claim.by_leaves is None else len(claim.by_leaves.leaves)
    assert wording.proved_how(claim) == f"by leaves, {cells} cells and 2 tails that cover the box"


ROOT = Path(__file__).resolve().parent.parent
DIALECT = {
    "So many, so much": r"\b[Ss]o (?:many|much|often|few)\b",
    "Of X, in front of a sentence": (
        r'(?:^\s*(?:"""|#|-|\*)?\s*|[.;:] )Of '
        r"(?:a|an|the|all|every|each|such|these|those|what|which|Python|deep|several|one|two)\b"
    ),
    "proofs and networks that say, know or believe": (
        r"\b(?:proofs?|provers?|theorems?|checkers?|bounds?|leaf|leaves|weights|networks?|heads?|programs?|it) "
        r"(?:says?|knows?|believes?)\b"
    ),
    "an axis, for per axis": r"\b(?:anchors|cells|keys|points|parts|pieces|nodes) an axis\b",
    "looked for, for": r"looked for, for",
    "a verb before its subject": r"(?:^|[.;:] )So (?:are|is|have|has|does|do|can) |[Nn]owhere [^.]*(?:is|are) it",
    "is to be": r"\b(?:is|are|was|were) to be\b",
    "would do": r"\bwould do\b",
    "words of law books": r"\b(?:whence|lest|thereof|whereof|wherein|herein|whereby|hitherto|albeit|thereto|therein)\b",
    "a sentence whose subject is a clause with what": r'(?:^\s*(?:"""|# |- )?|[.;:] )What (?!if\b)[^?|]*$',
}
"""Ways of writing that a reader has to read twice."""
EXAMPLES = (
    "Of a box it knows so much: 3 anchors an axis. They are looked for, for an hour. So are cells. "
    "Any would do, wherein f is to be bounded. What is found is small"
)


def written_files() -> list[Path]:
    """Return the sources and pages of the project, without stored answers and without this list."""
    found = [path for pattern in ("*.md", "*.toml") for path in ROOT.glob(pattern)]
    for folder in ("src", "docs", "tests", "examples", "benchmarks"):
        found += [path for kind in ("py", "md", "toml") for path in (ROOT / folder).rglob(f"*.{kind}")]
    left_out = (ROOT / "tests/data", ROOT / "benchmarks/out", ROOT / "benchmarks/.venvs", Path(__file__).resolve())
    return sorted(path for path in found if not any(path.is_relative_to(out) for out in left_out))


@pytest.mark.parametrize("name", DIALECT)
def test_plain_words(name: str) -> None:
    pattern = re.compile(DIALECT[name])
    assert pattern.search(EXAMPLES)
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in written_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and not (path.suffix == ".md" and line.startswith("#"))
    ]
    assert not lines, f"{name}:\n" + "\n".join(lines)
