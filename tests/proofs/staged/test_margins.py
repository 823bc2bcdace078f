"""The room that staged proofs leave for the checker: its bounds are within every claim, and claims are not loose."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flint import arb

import attnc
from attnc.numerics.intervals import Interval
from attnc.proofs.margins import ARGUMENT_ROOM, DIVIDED_ROOM
from attnc.proofs.staged.error_flow import Slopes
from attnc.targets.expressions.expression import Expression
from attnc.targets.target import Target
from attnc_checker.checking import precision, proof_of, read
from attnc_checker.deep.pieces import Pieces
from proofs.staged.test_units import CONSTANT_ROW, random_clips, random_network

BOX = dict.fromkeys("abc", (-1.0, 1.5))
CASES = {
    "product": ("sin(a*b) + c*exp(a)", 1e-4, "float64", "compose"),
    "maximum": ("max(a*b, sin(c))*c - 0.3*a", 1e-4, "float64", "compose"),
    "root": ("sqrt(abs(a - b)) + relu(a*b - c)**2", 1e-3, "float64", "compose"),
    "root of a power": ("sqrt(abs(tanh(3*c))**1.5)", 3e-3, "float64", "compose"),
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
"""The checker's bound of the whole network is at least this share of the claim: more room would be waste."""


def as_target(given: str | Target) -> Target:
    if not isinstance(given, str):
        return given
    return attnc.as_target(given, {name: ends for name, ends in BOX.items() if re.search(rf"\b{name}\b", given)})


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


FUNCTIONS = (
    *("sin(t)", "exp(t)", "tanh(t)", "sigmoid(t)", "erf(t)", "atan(t)", "gelu(t)", "silu(t)", "softplus(t)"),
    *("abs(t)", "relu(t)", "clip(t, -1, 0.5)", "t**2", "t**3", "1/(1 + 25*t**2)", "t/(1 + t**2)", "t*exp(-t**2)"),
)


@pytest.mark.parametrize("text", FUNCTIONS)
def test_slopes_of_the_checker_are_within_the_room(text):
    """The change of a function, by ARGUMENT_ROOM, and every slope, by DIVIDED_ROOM of the largest one."""
    (tree,) = Expression.parse(text).outputs
    claim = SimpleNamespace(function=text, held=None)
    for (lo, hi), share in itertools.product([(-1.3, 1.9), (-9.0, 7.0)], [1e-2, 1e-3, 1e-5]):
        error = share * (hi - lo)
        slopes = Slopes.of(tree, lo, hi, error)
        with precision():
            found = Pieces(claim, arb(lo), arb(hi), arb(error), are_many=True)
            change = float(found.around().change)
            pieces = [(float(piece.low + piece.high) / 2, max(map(abs, piece.slopes))) for piece in found.pieces]
        assert change <= ARGUMENT_ROOM * slopes.change[0]
        if share <= 1e-3:
            places, steepness = np.array(pieces, np.float64).T
            claimed, _, _ = slopes.over(Interval.point(places[:, None]))
            assert (steepness <= claimed.mag[:, 0] + DIVIDED_ROOM * slopes.G.mag.max()).all()


@pytest.mark.parametrize("text", ["sqrt(t)", "t**0.25"])
def test_the_range_at_an_infinite_slope_needs_no_room(text):
    """The prover takes the error of the argument larger by ARGUMENT_ROOM, and holds the function accordingly."""
    (tree,) = Expression.parse(text).outputs
    for error in (1e-2, 1e-4, 1e-7):
        e = ARGUMENT_ROOM * error
        claimed = Slopes.of(tree, 0.0, 4.0, e, held=(e, 4 - e))
        with precision():
            claim = SimpleNamespace(function=text, held=(e, 4 - e))
            found = Pieces(claim, arb(0), arb(4), arb(error), are_many=True).around()
            assert found.change <= arb(float(claimed.change[0]))
            assert found.jump <= arb(float(claimed.jumps.max()))
    claim = SimpleNamespace(function=text, held=(1e-300, 4.0))  # without an error, pieces shrink to the end of `held`
    with precision():
        assert Pieces(claim, arb(0), arb(4), arb(0), are_many=True).around().jump <= 1e-70
