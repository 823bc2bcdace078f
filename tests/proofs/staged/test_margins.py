"""The room that staged proofs leave for the checker: what it finds is within every claim, and claims are not loose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.targets.target import Target
from attnc_checker.checking import precision, proof_of, read
from proofs.staged.test_units import CONSTANT_ROW, random_clips, random_network

BOX = dict.fromkeys("abc", (-1.0, 1.5))
CASES = {
    "product": ("sin(a*b) + c*exp(a)", 1e-4, "float64", "compose"),
    "maximum": ("max(a*b, sin(c))*c - 0.3*a", 1e-4, "float64", "compose"),
    "root": ("sqrt(abs(a - b)) + relu(a*b - c)**2", 1e-3, "float64", "compose"),
    "steep": ("tanh(5*a*b) + c", 1e-3, "float64", "compose"),
    "composition in float32": ("clip(a*b, -0.3, 0.5) + abs(b - c)/(2 + a)", 1e-3, "float32", "compose"),
    "gates": ("max(a, b)*c + 0.5*b", 1e-3, "float32", "compose"),
    "network": (random_network(3, (2, 9, 1)), 0.1, "float64", "relu_network"),
    "deep network": (random_network(5, (3, 6, 6, 6, 2)), 0.2, "float64", "relu_network"),
    "network in float32": (random_network(4, (3, 8, 4, 2)), 0.1, "float32", "relu_network"),
    "clip": (random_clips(13, 1, 3), 0.02, "float64", "truncated_linear"),
    "clips in float32": (random_clips(42, 4, 2), 0.02, "float32", "truncated_linear"),
    "several heads": (random_clips(12, 1, 2), 0.2, "float32", "truncated_linear_heads"),
    "a constant row": (CONSTANT_ROW, 0.02, "float64", "truncated_linear"),
}
LEAST_RATIO = 0.9
"""What the checker finds for the whole network is at least this share of the claim: more room would be waste."""


def as_target(given: str | Target) -> Target:
    if not isinstance(given, str):
        return given
    return attnc.as_target(given, {name: ends for name, ends in BOX.items() if name in given})


def ratios(path: Path) -> tuple[np.ndarray, float]:
    """Found over claimed, for every leaf of every stage, and for the whole network."""
    with precision():
        claim, *stored = read(path, "certificate.json")
        proof = proof_of(claim, *stored)
        claimed = [proof.subjects[s].bounds[n] for s, n in proof.jobs]
        found = [proof.prove(job) for job in proof.jobs]
        return np.array(found) / np.array(claimed), proof.conclude(found) / claim.bound


@pytest.mark.parametrize("name", CASES)
def test_found_is_within_claimed(tmp_path, capsys, name):
    given, eps, dtype, construction = CASES[name]
    net = attnc.compile(as_target(given), eps=eps, dtype=dtype, construction=construction)
    assert net.certificate.method == "staged proof"
    net.save(tmp_path / "net")
    leaves, total = ratios(tmp_path / "net")
    with capsys.disabled():
        print(f"\n{name}: found/claimed at most {leaves.max():.6f} on {len(leaves)} leaves, {total:.6f} in all")
    assert leaves.max() <= 1
    assert LEAST_RATIO <= total <= 1
