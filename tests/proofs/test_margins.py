"""The contract of margins: the checker finds, on every leaf that decides a bound, at most the bound that is claimed.

The ordinary tests check a few cases of the corpus, the slow ones all of them. `make corpus` fails if a certificate that
was re-proved is refused. Staged proofs of random networks have a test of their own, `staged/test_margins.py`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import attnc
from attnc.proofs.certificate import Certificate
from attnc_checker.checking import certificates, precision, proof_of, read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    CORPUS = runpy.run_path(str(BENCHMARKS / "corpus_cases.py"))["corpus"]()
    sys.modules.pop("corpus_cases", None)
QUICK = (
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
"""The share of a claim that the checker finds at least in the quick cases: a claim with more room would be wasteful."""


def found_and_claimed(folder: Path, name: str, certificate: Certificate) -> tuple[float, float]:
    """The bound that the checker finds, and the bound claimed; Refused if a leaf has more than was claimed for it."""
    with precision():
        claim, *stored = read(folder, name)
        proof = proof_of(claim, *stored)
        if certificate.by_leaves is not None and certificate.norm == "inf":
            (subject,) = proof.subjects
            cells = [leaf for leaf in subject.leaves if leaf.cell is not None]
            for leaf, bound in zip(cells, certificate.leaf_bounds.tolist(), strict=True):
                if bound >= DECIDES * claim.bound:
                    subject.prove(leaf, bound)
        return proof.conclude([proof.prove(job) for job in proof.jobs]), claim.bound


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CORPUS)])
def test_found_is_within_claimed(tmp_path, name):
    case = CORPUS[name]
    try:
        net = attnc.compile(case.source, case.box, case.eps, **case.options)
    except attnc.AttncError:
        pytest.skip("refused, as the corpus expects")
    net.save(tmp_path / "net")
    if net.expression is None and not net.certificate.is_of_table:
        pytest.skip("no expression: the checker has nothing to check against")
    for stated in certificates(tmp_path / "net"):
        certificate = net.certificate if stated == "certificate.json" else net.certified_in(stated.split(".")[1])
        found, claimed = found_and_claimed(tmp_path / "net", stated, certificate)
        assert found <= claimed
        assert name not in QUICK or LEAST_FOUND * claimed <= found


@pytest.mark.slow
def test_rows_that_the_checker_needs_are_not_left_out(tmp_path):
    """When the checker chose the rows for itself, this certificate was refused for some choices of the prover."""
    net = attnc.compile("sqrt(x)", {"x": (0, 1)}, 0.1, construction="two_layer", dtype="float32")
    net.save(tmp_path / "net")
    found, claimed = found_and_claimed(tmp_path / "net", "certificate.json", net.certificate)
    assert found <= claimed
