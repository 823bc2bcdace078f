"""Infinite boxes: beyond the core the error of every engine is within bound + relative·|x|, up to the stated reach.

The claim is the tolerance. Each comparison is decided in Arb.
"""

from __future__ import annotations

import json
import math
import re
import warnings

import numpy as np
import pytest
from flint import arb

import attnc
from attnc_checker import check
from proofs.comparisons import ENGINES, engines_of
from proofs.exact_programs import exact_values
from strategies.reference import precision

REAL = {"x": (-math.inf, math.inf)}
EPS = {"float64": 1e-6, "float32": 1e-3}
GATES = ["relu(x)", "gelu(x)", "silu(x)", "softplus(x)", "tanh(x)", "sigmoid(x)", "abs(x)", "gelu(2*x - 1) + x", "3*x"]
BITS = 2200
"""Precision of Arb: |x| is up to 2^1000, and errors of 1e-20 count."""


def points_beyond(claim: attnc.Certificate, seed: int) -> np.ndarray:
    """Points of both tails: at the core, at powers of ten and of two and a float beside them, and at random."""
    rng, (lo, hi), reach = np.random.default_rng(seed), claim.core, claim.beyond.reach
    start = max(-lo, hi)
    tens = 10.0 ** np.arange(3, 301, 9)
    twos = 2.0 ** np.arange(math.ceil(math.log2(start)), math.floor(math.log2(reach)), 37)
    spread = start * (reach / start) ** rng.random(60)
    near = start * (1 + rng.random(40) ** 4)
    sizes = np.concatenate([tens, twos, np.nextafter(twos, 0), np.nextafter(twos, np.inf), spread, near, [reach]])
    sizes = np.unique(sizes[(sizes > start) & (sizes <= reach)])
    ends = [np.nextafter(hi, np.inf), np.nextafter(lo, -np.inf)]
    return np.concatenate([sizes, -sizes, ends])


def worst_share(network: attnc.Network, points: np.ndarray) -> dict[str, float]:
    """The largest error/claim of every engine; AssertionError where it is above one."""
    target, claim = attnc.as_target(network.expression, network.box.as_dict()), network.certificate
    found = {}
    with precision(BITS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = [exact_values(target.expression, np.array([x]))[0] for x in points]
        for name, engine in engines_of(network.program, ENGINES).items():
            y = np.asarray(engine(points[:, None]), np.float64).reshape(-1)
            assert np.isfinite(y).all(), name
            shares = []
            for x, f, value in zip(points.tolist(), exact, y.tolist(), strict=True):
                error, bound = abs(f - arb(value)), claim.bound_at(x)
                assert error <= arb(bound), f"{name}: |f − y| = {error.str(9)} > {bound!r} at {x!r}"
                shares.append(float(error / bound) if bound else 0.0)
            found[name] = max(shares)
    return found


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("text", GATES)
def test_rounding_far_out_is_within_the_claim_in_every_engine(text, dtype):
    network = attnc.compile(text, REAL, EPS[dtype], dtype=dtype)
    claim = network.certificate
    assert claim.beyond is not None
    assert claim.beyond.reach >= {"float64": 1e290, "float32": 1e25}[dtype]
    shares = worst_share(network, points_beyond(claim, 0))
    assert set(shares) == set(ENGINES)
    slope, unit = {"3*x": 3, "gelu(2*x - 1) + x": 3}.get(text, 1), {"float64": 2.0**-53, "float32": 2.0**-24}[dtype]
    assert claim.beyond.relative <= 16 * unit * slope  # a few roundings, and not hundreds


def test_values_that_stay_bounded_have_no_rounding_that_grows():
    assert attnc.compile("tanh(x)", REAL, 1e-6).certificate.beyond.relative < 1e-300


@pytest.mark.parametrize("box", [(3, math.inf), (-math.inf, -2), (-math.inf, 7)])
def test_one_tail(box):
    network = attnc.compile("silu(x)", {"x": box}, 1e-6)
    claim = network.certificate
    points = points_beyond(claim, 1)
    worst_share(network, points[(points > claim.core[1]) if box[1] == math.inf else (points < claim.core[0])])


def test_bounds_at_points():
    claim = attnc.compile("relu(x)", REAL, 1e-3, dtype="float32").certificate
    assert claim.bound_at(1.0) == claim.bound
    assert claim.bound_at(-1e6) == pytest.approx(claim.bound + 1e6 * claim.beyond.relative)
    assert claim.bound_at(2 * claim.beyond.reach) is None
    assert not any("exact arithmetic" in text for text in claim.assumptions)


def saved(folder, text="gelu(x)", **options):
    network = attnc.compile(text, REAL, 1e-3, **options)
    network.save(folder)
    assert check(folder).proved
    return folder / "certificate.json"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"relative": 0.5}, "rounding is .*·.x., not"),
        ({"relative": -1.0}, "no rounding and no reach"),
        ({"reach": 1e7}, "may overflow"),
        ({"reach": 0.0}, "no rounding and no reach"),
    ],
)
@pytest.mark.parametrize("dtype", EPS)
def test_a_false_claim_about_rounding_is_refused(tmp_path, change, reason, dtype):
    path = saved(tmp_path / "net", dtype=dtype)
    data = json.loads(path.read_text())
    data["beyond"] = {name: value * change.get(name, 1.0) for name, value in data["beyond"].items()}
    path.write_text(json.dumps(data))
    verdict = check(tmp_path / "net")
    assert not verdict.proved
    assert re.search(reason, verdict.reason)


def test_without_the_claim_the_tails_are_about_exact_arithmetic(tmp_path):
    """Certificates written before it existed state less, and are re-proved as such."""
    path = saved(tmp_path / "net")
    data = json.loads(path.read_text())
    del data["beyond"]
    path.write_text(json.dumps(data))
    verdict = check(tmp_path / "net")
    assert verdict.proved
    assert any("exact arithmetic beyond the core" in text for text in verdict.assumptions)
    claim = attnc.load(tmp_path / "net").certificate
    assert claim.beyond is None
    assert claim.bound_at(1e6) is None
