"""Python functions: their proofs rest on the given constants, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.errors import BoundNotMet, InputError
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_tables import monomials
from attnc.proofs.kinds.taylor import interpolant
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.prover import ProofRequest
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget


def wave(points):
    return np.sin(points @ np.arange(1, points.shape[1] + 1))


def given(d: int, *names: str) -> dict[str, float]:
    """The gradient of the wave is at most |(1, …, d)|, its second derivatives at most d²."""
    known = {"lipschitz": float(np.linalg.norm(np.arange(1, d + 1))), "hessian_bound": float(d * d)}
    return {name: known[name] for name in names}


BOTH = ("lipschitz", "hessian_bound")


@pytest.mark.parametrize("names", [("lipschitz",), ("hessian_bound",), BOTH])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_interpolant_encloses_the_function(d, names):
    rng = np.random.default_rng(d)
    target = CallableTarget(wave, Box.parse([(-1.1, 0.7)] * d), **given(d, *names))
    centres = rng.uniform(-1, 0.6, (40, d))
    radii = np.minimum(10.0 ** rng.uniform(-9, -0.5, (40, d)), np.minimum(centres + 1.1, 0.7 - centres))
    model = interpolant(target, centres, radii, 4)
    for tau in rng.uniform(-1, 1, (50, d)):
        powers = (tau ** monomials(d, 4)).prod(axis=1)
        found = model.mid @ powers
        allowed = model.remainder + model.radius.sum(axis=2) + 1e-15  # of the float64 evaluations here
        assert (np.abs(found - target(centres + radii * tau)) <= allowed).all()


@pytest.mark.parametrize("names", [("lipschitz",), ("hessian_bound",), BOTH])
def test_ranges_and_variations_enclose_the_function(names):
    rng = np.random.default_rng(5)
    target = CallableTarget(wave, Box.parse([(-1, 1)] * 2), **given(2, *names))
    ends = np.sort(rng.uniform(-1, 1, (2, 60, 2)), axis=0)
    cells = Interval(ends[0], ends[1])
    ranges, centres = target.enclosure(cells), cells.mid
    values = rng.normal(size=(60, 1))
    around, about = target.variation(cells, centres), target.variation(cells, centres, values)
    for place in rng.random((40, 60, 2)):
        f = target(ends[0] + place * (ends[1] - ends[0]))
        assert ((ranges.lo <= f) & (f <= ranges.hi)).all()
        assert (np.abs(f - target(centres))[:, 0] <= around + 1e-15).all()
        assert (np.abs(f - values)[:, 0] <= about + 1e-15).all()


CASES = [
    (1, 1e-2, ("lipschitz",)),
    (1, 1e-5, ("hessian_bound",)),
    (1, 1e-4, BOTH),
    (2, 0.2, ("lipschitz",)),
    (2, 2e-3, ("hessian_bound",)),
    (3, 0.1, ("hessian_bound",)),
]


@pytest.mark.parametrize(("d", "eps", "names"), CASES)
def test_smooth_constructions_are_proved_under_the_assumption(d, eps, names):
    net = attnc.compile(wave, [(-1, 1)] * d, eps, **given(d, *names))
    claim = net.certificate
    assert net.construction == ("graded" if d == 1 else "spectral_grid")
    assert claim.method.startswith("proof under the stated assumption: ")
    assert claim.method.endswith(" as given")
    assert ("Lipschitz constant" in claim.method, "second derivatives" in claim.method) == tuple(
        n in names for n in BOTH
    )
    assert claim.complete
    assert claim.observed <= claim.bound <= eps
    points = np.random.default_rng(0).uniform(-1, 1, (20_000, d))
    assert np.abs(net(points) - wave(points)).max() <= claim.bound
    assert {leaf.kind for leaf in claim.by_leaves.leaves} == {"interpolant"}
    assert "given, not proved" in claim.assumptions[0]
    assert "its own rounding is not counted" in claim.assumptions[0]


def bound_for(function, curvature: float, **request: float) -> float:
    """The bound of a network for the wave, proved against another function or under another assumption."""
    target = CallableTarget(wave, Box.parse([(-1, 1)]), hessian_bound=1.0)
    other = CallableTarget(function, target.box, hessian_bound=curvature)
    program = constructions.spectral_grid(target, num_anchors=9).program
    return LeavesProver().prove(program, other, ProofRequest(**request)).bound


def test_what_is_given_decides_the_bound():
    """A larger constant is a weaker assumption: the same network, a larger bound; the truth is in none of them."""
    weak, weaker, weakest = (bound_for(wave, curvature, cells=600) for curvature in (1.0, 4.0, 16.0))
    assert weak < weaker < weakest


def test_a_weight_that_is_off_is_found():
    assert bound_for(lambda p: wave(p) + 0.3 * p[:, 0] ** 2, 1.6, eps=1e-3) >= 0.29


def test_the_best_bound_so_far_when_time_runs_out(monkeypatch):
    monkeypatch.setattr("attnc.certifying.PROOF_SECONDS", 1.0)
    with pytest.raises(BoundNotMet, match="ran out of time") as refused:
        attnc.compile(wave, [(-1, 1)], 1e-7, lipschitz=1.0, construction="spectral_grid")
    assert 1e-7 < refused.value.bound < 0.1
    assert refused.value.network.certificate.complete is False


OWN = CallableTarget(wave, Box.parse([(-1, 1)]), lipschitz=1.0)


@pytest.mark.parametrize(
    ("source", "box", "options", "words"),
    [
        (wave, [(-1, 1)], {"lipschitz": 0.5}, r"Lipschitz constant 0.5 .* cannot be right"),
        (wave, [(-1, 1)], {"hessian_bound": 0.1}, r"second derivatives at most 0.1\) cannot be right"),
        (wave, [(-1, 1)], {"hessian_bound": -1.0}, "hessian_bound must be ≥ 0"),
        (wave, [(-1, 1)], {"hessian_bound": float("nan")}, "hessian_bound must be a finite number"),
        (wave, [(-1, 1)], {"hessian_bound": float("inf")}, "hessian_bound must be a finite number"),
        (wave, [(-1, 1)], {"hessian_bound": "4"}, "hessian_bound must be a finite number"),
        (wave, [(-1, 1)], {"lipschitz": True}, "lipschitz must be a finite number"),
        (OWN, None, {"hessian_bound": 1.0}, "hessian_bound: the target has its own"),
        ("sin(x)", {"x": (-1, 1)}, {"hessian_bound": 1.0}, "hessian_bound: an expression's constants are derived"),
        (wave, [(-1, 1)] * 7, {"hessian_bound": 49.0}, "up to 6 variables"),
    ],
)
def test_nonsense_is_refused(source, box, options, words):
    """Constants given twice or in the wrong place are refused, too."""
    with pytest.raises(InputError, match=words):
        attnc.compile(source, box, 1e-3, **options)


def pair(points):
    return np.stack([wave(points), points[:, 0] ** 2], axis=1)


@pytest.mark.parametrize(
    ("function", "d", "eps", "options"),
    [
        (wave, 2, 0.2, {"hessian_bound": 4.0, "construction": "max_affine"}),
        (pair, 1, 1e-3, {"hessian_bound": 2.0}),
        (pair, 1, 0.1, {"lipschitz": 3.0, "norm": 2}),
    ],
)
def test_partitions_several_outputs_and_norms(function, d, eps, options):
    claim = attnc.compile(function, [(-1, 1)] * d, eps, **options).certificate
    assert claim.observed <= claim.bound <= eps
    assert claim.norm == str(options.get("norm", "inf"))
    assert claim.method.startswith("proof under the stated assumption")
