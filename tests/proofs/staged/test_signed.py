"""Errors of heads with their signs: they hold on every leaf, make bounds tight, and are refused if they are forged."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import attnc
from attnc.numerics.intervals import Interval
from attnc.proofs.prover import ProofRequest
from attnc.proofs.staged.error_flow import Deviations, ErrorFlow, FlowStage, Readings, Slopes
from attnc.proofs.staged.lines import held_at
from attnc.proofs.staged.prover import walked
from attnc.proofs.stages.extraction import OneStage
from attnc_checker import check
from checker.tampering import edit
from proofs.staged.test_error_flow import tree_of

BUMP, SQUARE = "exp(-x**2-y**2)*sin(3*x+y)", {"x": (-2, 2), "y": (-2, 2)}


@pytest.fixture(scope="module")
def net():
    return attnc.compile(BUMP, SQUARE, 1e-6, norm="C1", gradient_eps=1e-4)


@pytest.fixture(scope="module")
def saved(net, tmp_path_factory):
    folder = tmp_path_factory.mktemp("signed") / "net"
    net.save(folder)
    return folder


def test_bounds_are_within_a_fifth_of_the_errors(net):
    claim = net.certificate
    assert claim.observed <= claim.bound <= 1.2 * claim.observed
    assert claim.gradient_observed <= claim.gradient_bound <= 1.2 * claim.gradient_observed
    assert sum(term.value for term in claim.terms) == pytest.approx(claim.bound)
    assert sum(term.value for term in claim.gradient.terms) == pytest.approx(claim.gradient_bound)


def test_every_head_is_where_its_leaves_say(net):
    request = ProofRequest(eps=1e-6, derivation=net.derivation)
    walk, _ = walked(net.program, attnc.as_target(BUMP, SQUARE), request)
    walk.take_signs()
    for (group,) in [[group] for groups in walk.groups for group in groups]:
        (head,), known = group.heads, group.deviations
        t = known.edges.lo + (known.edges.hi - known.edges.lo) * np.linspace(0, 1, 41)[:, None]
        heads, g = OneStage.of_line(group.line.heads), held_at(head.claim.function, group.held)
        found = (heads.values(t.reshape(-1, 1)) - g(t.reshape(-1, 1))).reshape(t.shape)
        radii = known.deltas - np.abs(known.middles)
        assert (np.abs(found - known.middles) <= radii + 1e-15).all()
        assert np.median(radii / known.deltas) < 0.5


def test_files_keep_the_middles(saved, net):
    read = attnc.load(saved).certificate
    assert read.by_heads == net.certificate.by_heads
    assert read.gradient.heads[0].leaves == net.certificate.gradient.heads[0].leaves
    assert json.loads((saved / "certificate.json").read_text())["stages"][0]["leaf_middles"]


def of(place, change):
    def changed(data):
        change(data["stages"][0] if place == "values" else data["gradient"]["stages"][0])

    return changed


def flipped(entry):
    entry["leaf_middles"] = [-x for x in entry["leaf_middles"]]


def moved(entry):
    """Move the middle of the leaf that is known best by a tenth of its bound."""
    middles, bounds = entry["leaf_middles"], entry["leaf_bounds"]
    known = min(range(len(bounds)), key=lambda n: (bounds[n] - abs(middles[n])) / bounds[n])
    middles[known] *= 0.9
    bounds[known] = abs(middles[known]) + (bounds[known] - abs(middles[known] / 0.9))


def on_its_bound(entry):
    entry["leaf_middles"][3] = entry["leaf_bounds"][3]


def shorter(entry):
    entry["leaf_middles"].pop()


def infinite(entry):
    entry["leaf_middles"][0] = 1e999


@pytest.mark.parametrize("place", ["values", "slopes"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flipped, "is not re-proved to"),
        (moved, "is not re-proved to"),
        (on_its_bound, "is not re-proved to"),
        (shorter, "leaf_middles has"),
        (infinite, ""),
    ],
)
def test_forged_middles_are_refused(saved, tmp_path, place, change, reason):
    folder = tmp_path / "net"
    shutil.copytree(saved, folder)
    edit(folder, "certificate.json", of(place, change))
    verdict = check(folder, processes=1)
    assert not verdict.proved
    assert reason in verdict.reason
    assert "broke off" not in verdict.reason


def test_signed_sums_hold_and_cancel():
    """Of sin(x) + d₁ − (sin(x) + d₂) with errors d₁, d₂ that are nearly equal, little is left."""
    edges = np.linspace(-1, 1, 129)
    t = Interval(edges[:-1, None], edges[1:, None])
    at = np.linspace(edges[:-1], edges[1:], 65)
    stages = []
    for scale in (1.0, 0.9):
        error = scale * np.sin(7 * at)
        middles = (error.min(axis=0) + error.max(axis=0)) / 2
        deltas = np.abs(middles) + (error.max(axis=0) - error.min(axis=0)) / 2 + 1e-3
        own = Deviations(Interval(edges[:-1], edges[1:]), deltas, 1.0, 0.0, 0.0, middles)
        count = len(stages)
        reads = Readings(np.zeros((1, count)), np.zeros(1), np.zeros(1), np.zeros(1))
        slopes = Slopes.of(tree_of("sin(t)"), -1.0, 1.0, 0.0)
        stages.append(FlowStage(reads, slopes, np.array([deltas.max()]), np.zeros(1), None, (own,)))
    flow = ErrorFlow(stages, Interval(np.tile(t.lo, 2), np.tile(t.hi, 2)), None, has_signs=True)
    outputs = np.array([[1.0, -1.0]])
    signed, unsigned = flow.signed(outputs)[:, 0], flow.own.sum(axis=1)
    true = np.abs(0.1 * np.sin(7 * at)).max(axis=0)
    assert (true <= signed).all()
    assert signed.max() < 0.25 * unsigned.max()
