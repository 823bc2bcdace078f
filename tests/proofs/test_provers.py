"""The choice of a prover; and a kind of leaf from the outside, in this file alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.engines.numpy_engine import NumpyEngine
from attnc.numerics.limits import time_limit
from attnc.proofs import provers
from attnc.proofs.cells.kind import Bounds, Kind
from attnc.proofs.certificate import Certificate
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.proof import Leaves, Points, Stages
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import AT_POINTS, BY_LEAVES, HEAD_BY_HEAD, PARTITION, best_proof
from proofs.comparisons import Comparisons, adversarial_points, errors_at
from proofs.proving import constructed


@dataclass(frozen=True, eq=False)
class CutAtZeroKind(Kind):
    """Cells that contain 0 are cut there, and Taylor polynomials taken on both sides: for |x| and the like."""

    inner: Kind
    name = "cut at zero"

    def bounds(self, centres, radii, goal):
        lo, hi = centres - radii, centres + radii
        is_cut = ((lo < 0) & (hi > 0))[:, 0]
        halves = [
            self.inner.bounds(np.where(is_cut[:, None], end / 2, centres), np.where(is_cut[:, None], size, radii), goal)
            for end, size in ((lo, -lo / 2), (hi, hi / 2))
        ]
        return Bounds(np.maximum(halves[0].upper, halves[1].upper), seen=max(half.seen for half in halves))


def cut_at_zero(stage, target):
    return CutAtZeroKind(TaylorKind.of(stage, target.expression, 8))


def test_a_kind_from_the_outside_proves_a_network():
    program, target = constructed("spectral_grid", "abs(x)", {"x": (-1, 1.1)}, num_anchors=33)
    points = adversarial_points(program, target, 4000)
    seen = float(errors_at(NumpyEngine(program), target, points).max())
    request = ProofRequest(observed=seen)
    usual, found = (prover.prove(program, target, request) for prover in (LeavesProver(), LeavesProver(cut_at_zero)))
    assert "cut at zero" in {leaf.kind for leaf in found.evidence.leaves}
    assert len(found.evidence.leaves) < len(usual.evidence.leaves)
    assert found.complete
    assert found.bound <= 1.03 * usual.bound
    worst = Comparisons().check(program, target, found.bound, points, {"numpy": NumpyEngine(program)})
    assert found.bound <= 1.05 * worst
    assert math.fsum(term.value for term in found.terms) == pytest.approx(found.bound, rel=1e-9)
    claim = Certificate(None, seen, (), (), "float64", "none").proved(found, "proof")
    assert Certificate.from_json(claim.to_json("abs(x)", target.box)) == claim


def test_compile_uses_it_where_it_is_in_the_list_of_provers(monkeypatch):
    monkeypatch.setattr(provers, "BY_LEAVES", (LeavesProver(cut_at_zero),))
    net = attnc.compile("abs(x)", {"x": (-1, 1.1)}, eps=0.1, construction="spectral_grid")
    assert "cut at zero" in {leaf.kind for leaf in net.certificate.by_leaves.leaves}
    assert net.certificate.observed <= net.certificate.bound <= 0.1


SQUARE = {"x": (-1, 1), "y": (-1, 1)}
HALF = {"eps": 0.5}


@pytest.mark.parametrize(
    ("text", "box", "construction", "options", "request_", "names", "evidence"),
    [
        ("sin(x)", {"x": (-1, 1)}, "spectral_grid", {"num_anchors": 9}, {}, ["leaves"], Leaves),
        ("x + 1", {"x": (-1, 1)}, "compose", {"eps": 1e-3}, {}, ["head by head", "affine", "enclosure"], Leaves),
        ("sin(x*y)", SQUARE, "compose", {"eps": 1e-2}, {}, ["head by head", "enclosure"], Stages),
        ("x*y", SQUARE, "two_layer", HALF, HALF, ["enclosure"], Leaves),
        ("x*y", SQUARE, "max_affine", HALF, {**HALF, "has_theorem": True}, ["partition", "leaves"], Leaves),
    ],
)
def test_provers_accept_what_they_can_prove(text, box, construction, options, request_, names, evidence):
    target = attnc.as_target(text, box)
    built = getattr(constructions, construction)(target, **options)
    (seen,) = errors_at(built.program, target, target.box.lo[None])
    asked = ProofRequest(derivation=built.derivation, observed=float(seen), **request_)
    known = (AT_POINTS, HEAD_BY_HEAD, PARTITION, *BY_LEAVES)
    accepting = [p.name for p in known if p.accepts(built.program, target, asked)]
    assert accepting == names
    with time_limit(counted=5.0):
        assert isinstance(best_proof(built.program, target, asked).evidence, evidence)


def test_tables_are_proved_at_their_points_and_code_without_a_constant_not_at_all():
    x = np.linspace(-1, 1, 30)
    table = attnc.TableTarget(x, np.sin(x))
    net = attnc.compile(table, eps=1e-3)
    assert isinstance(best_proof(net.program, table, ProofRequest()).evidence, Points)
    code = attnc.as_target(np.sin, {"x": (-1, 1)})
    assert best_proof(net.program, code, ProofRequest()) is None


def test_a_target_of_a_derived_class_is_proved_head_by_head():
    class Clip(attnc.TruncatedLinear):
        """A class from the outside."""

    target = Clip([2.0], t=-0.5, a=0.0, b=1.0, box=(-1, 1))
    program = constructions.truncated_linear(target, num_anchors=9).program
    assert HEAD_BY_HEAD.accepts(program, target, ProofRequest())
    assert HEAD_BY_HEAD.prove(program, target, ProofRequest()).bound < 0.02
