"""The contract of margins: the checker finds, on every leaf that decides a bound, at most the bound that is claimed.

Staged proofs have a test of their own, `staged/test_margins.py`. `make corpus` measures the whole corpus in the same
way, as `found`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attnc
from attnc_checker.checking import precision, proof_of, read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "auto sin(x) 1e-12",
    "auto abs(sin(3*x)) 0.001",
    "auto sqrt(x) 0.001",
    "auto sin(x) + cos(y) 1e-06",
    "infinite gelu(x) on -inf:inf",
    "infinite softplus(x) on -inf:inf",
    "float32 sin(x)",
    "float32 tanh(x*y)",
    "max_affine x*sin(3*x) 0.05",
    "max_affine sin(x)*y 0.1",
    "two_layer heads=3 sin(x) 0.2",
    "attention_softmax x + y 0.4",
    "spectral_grid sin(x*y) 1e-06",
)
"""One case of the corpus for every kind of leaf, dtype and number of variables: together they take 20 s."""
DECIDES = 0.9
"""Leaves with at least this share of the largest bound: the others may be found up to that bound."""
LEAST_FOUND = 0.75
"""The share of a claim that the checker finds at least: a claim with more room would be wasteful."""


@pytest.fixture(scope="module")
def corpus() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield runpy.run_path(str(BENCHMARKS / "corpus_cases.py"))["corpus"]()
        sys.modules.pop("corpus_cases", None)


@pytest.mark.parametrize("name", NAMES)
def test_found_is_within_claimed(corpus, tmp_path, name):
    case = corpus[name]
    net = attnc.compile(case.source, case.box, case.eps, **case.options)
    net.save(tmp_path / "net")
    with precision():
        claim, *stored = read(tmp_path / "net")
        proof = proof_of(claim, *stored)
        (subject,) = proof.subjects
        cells = [leaf for leaf in subject.leaves if leaf.cell is not None]
        for leaf, bound in zip(cells, net.certificate.leaf_bounds.tolist(), strict=True):
            if bound >= DECIDES * claim.bound:
                subject.prove(leaf, bound)  # Refused if more is found than was claimed
        found = proof.conclude([proof.prove(job) for job in proof.jobs])
    assert LEAST_FOUND * claim.bound <= found <= claim.bound
