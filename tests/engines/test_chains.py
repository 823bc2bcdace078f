"""Heads as quotients of polynomials in compiled loops: their rounding is within what certificates allow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import arb, ctx

pytest.importorskip("numba")

import attnc
from attnc.engines.chains import EXPONENTIAL_ERROR, REDUCTION_ERROR, as_chains
from attnc.engines.exponential_numba import powers_of_two
from attnc.engines.fused import AFFINE, PAIR, SIMPLE_HEAD, Instruction, Instructions, instructions
from attnc.engines.fused_numba import compiled
from attnc.engines.fusing import QUOTIENT, fuse
from attnc.engines.powers import as_powers
from attnc.ir.normal_form import normal_form
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF

DTYPES = ("float64", "float32")


def head(keys: int, seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Slopes, offsets and values of a bell about 0, and the coefficient of its query."""
    rng = np.random.default_rng(seed)
    places = np.arange(keys) - (keys - 1) / 2 + rng.integers(-1, 2)
    spacing, softness = (1.0 if seed % 2 else rng.uniform(0.1, 3)), rng.uniform(0.01, 1)
    offsets = -softness * places**2
    numbers = spacing * places, offsets, rng.normal(size=keys) * 10 ** rng.uniform(-2, 2)
    return *(each.astype(dtype) for each in numbers), float(np.dtype(dtype).type(rng.uniform(0.2, 1)))


def allowed(weights: list[float], values: np.ndarray, dtype: str) -> float:
    """Return the error that certificates allow for exact scores: the theorem of `proofs.rounding.stage`."""
    u, p, v = UNIT_ROUNDOFF[dtype], np.array(weights), values.astype(float)
    big, average, tau = (p > u / 8).sum(), (p * v).sum(), 2 * ENGINE_ULPS[dtype] * u
    small = 2 * (np.where(p > u / 8, 0.0, p) * (np.abs(v) + np.abs(v).max())).sum()
    by_weights = tau * (p * np.abs(v - average)).sum() / (1 - tau)
    return float(by_weights + u * ((big + 3) * (p * np.abs(v)).sum() + big * abs(average)) * (1 + 100 * u) + small)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_within_what_certificates_allow(dtype: str) -> None:
    """At random points of the whole interval, against exact averages. The scores are exact."""
    worst, count = {False: 0.0, True: 0.0}, 0  # in the range of several chains, and in that of one
    for seed in range(60):
        keys = 3 + seed % (30 if dtype == "float64" else 6)
        slopes, offsets, values, factor = head(keys, seed, dtype)
        chains = as_chains(slopes, offsets, values, factor)
        if chains is None or as_powers(slopes, offsets, values[:, None]) is None:
            continue
        count += 1
        for ends in [(chains.least, chains.most), chains.inner][: 1 + (chains.inner[0] < chains.inner[1])]:
            points = np.random.default_rng(seed).uniform(*ends, (40, 1)).astype(dtype)
            points[0], points[-1] = (np.nextafter(end.astype(dtype), 0) for end in np.array(ends))
            found = run_head(slopes, offsets, values, factor, points)
            with ctx.workprec(200):
                for z, given in zip(points[:, 0].tolist(), found.tolist(), strict=True):
                    x = arb(z) * arb(factor)
                    scores = [arb(a) * x + arb(c) for a, c in zip(slopes.tolist(), offsets.tolist(), strict=True)]
                    exact = [score.exp() for score in scores]
                    total = sum(exact, arb(0))
                    average = sum((w * arb(v) for w, v in zip(exact, values.tolist(), strict=True)), arb(0)) / total
                    room = allowed([float(w / total) for w in exact], values, dtype)
                    worst[ends == chains.inner] = max(
                        worst[ends == chains.inner], abs(float(arb(given) - average)) / room
                    )
    assert count >= 30
    assert all(0.1 < each <= 1 for each in worst.values())


def run_head(
    slopes: np.ndarray, offsets: np.ndarray, values: np.ndarray, factor: float, points: np.ndarray
) -> np.ndarray:
    """Return the averages by compiled loops: rows 0 (variable), 1 (query) and 2 (average)."""
    dtype, columns = slopes.dtype, values[:, None]
    query = Instruction(AFFINE, (0,), (1,), (np.array([0, factor], dtype),))
    powers = as_powers(slopes, offsets, columns)
    step = Instruction(SIMPLE_HEAD, (1,), (2,), (offsets, slopes[:, None], columns), len(slopes), 1, powers)
    given = Instructions((query, step), (2,), 1, dtype)
    assert [each.kind for each in fuse(given).steps if each.reads] == [QUOTIENT]
    out, most = np.empty((len(points), 1), dtype), np.full(1, np.inf, dtype)
    compiled(given)(points, out, -most, most)
    return out[:, 0]


def test_only_few_keys_of_float32_have_room() -> None:
    for keys in range(3, 12):
        slopes, offsets, values, _ = head(keys, 1, "float32")
        assert (as_chains(slopes, offsets / 10, values, 1.0) is not None) == (keys <= 8)


def test_keys_must_weigh_enough() -> None:
    """Chains round more often than a sum of few large terms would: beyond `most`, too few keys are left."""
    slopes, offsets, values, _ = head(7, 1, "float64")
    chains = as_chains(slopes, offsets, values, 1.0)
    assert chains is not None

    def heavy(z: float) -> int:
        scores = slopes * z + offsets
        weights = np.exp(scores - scores.max())
        return int((weights / weights.sum() > UNIT_ROUNDOFF["float64"] / 2).sum())

    assert heavy(chains.most) >= 4 > heavy(chains.most * 1.3)
    assert as_chains(slopes, 9 * offsets, values, 1.0) is None  # already at 0 some keys weigh nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_beyond_the_interval_take_an_exponential_for_each_key(dtype: str) -> None:
    slopes, offsets, values, _ = head(6, 1, dtype)
    chains = as_chains(slopes, offsets, values, 1.0)
    assert chains is not None
    points = np.array([[0.5], [chains.most * 2], [-1e3], [np.nan], [np.inf]], dtype)
    with np.errstate(all="ignore"):
        found = run_head(slopes, offsets, values, 1.0, points)
        scores = slopes.astype(float) * points + offsets
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ values / weights.sum(axis=1)
    assert np.isnan(found[3:]).all()
    assert np.abs(found[:3] - expected[:3]).max() <= 1e3 * UNIT_ROUNDOFF[dtype] * np.abs(values).max()


# --- the exponential --------------------------------------------------------------------------------------------------


def powers(x: np.ndarray, rate: float = 1.0, low: float = 0.0) -> np.ndarray:
    found = np.empty_like(x)
    powers_of_two(x, x.dtype.type(rate), x.dtype.type(low), found)
    return found


def float32_error(r: np.ndarray) -> float:
    return float(np.abs(powers(r).astype(float) / np.exp2(r.astype(float)) - 1).max()) / UNIT_ROUNDOFF["float32"]


def test_a_dense_part_of_float32() -> None:
    last = int(np.float32(0.5).view(np.uint32))
    r = np.arange(last - 2**27, last + 1, 61, dtype=np.uint32).view(np.float32)
    for sign in (1, -1):
        assert float32_error(sign * r) <= EXPONENTIAL_ERROR["float32"] - REDUCTION_ERROR["float32"]


@pytest.mark.slow
def test_every_float32_number() -> None:
    last = int(np.float32(0.5).view(np.uint32))
    for start in range(0, last + 1, 2**24):
        r = np.arange(start, min(start + 2**24, last + 1), dtype=np.uint32).view(np.float32)
        for sign in (1, -1):
            assert float32_error(sign * r) <= EXPONENTIAL_ERROR["float32"] - REDUCTION_ERROR["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_with_any_rate(dtype: str) -> None:
    """Also half way between whole numbers, and at the ends. In float32 the rate has two parts."""
    rng, largest, worst = np.random.default_rng(0), 0.9 * math.log2(np.finfo(dtype).max), 0.0
    for _ in range(20):
        rate = float(np.dtype(dtype).type(10 ** rng.uniform(-3, 3)))
        low = float(np.dtype(dtype).type(rate * rng.uniform(-0.5, 0.5) * 2.0**-24)) if dtype == "float32" else 0.0
        halves = (rng.integers(-40, 40, 100) + 0.5 + rng.normal(size=100) * 1e-6) / rate
        x = np.concatenate([halves, rng.uniform(-largest, largest, 100) / rate, [0.0]]).astype(dtype)
        with ctx.workprec(200):
            exact = [((arb(rate) + arb(low)) * arb(z) * arb(2).log()).exp() for z in x.tolist()]
            errors = [abs(float(arb(y) / e - 1)) for y, e in zip(powers(x, rate, low).tolist(), exact, strict=True)]
        worst = max(worst, *errors)
    assert 0.5 < worst / UNIT_ROUNDOFF[dtype] <= EXPONENTIAL_ERROR[dtype]


# --- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("x*y", [QUOTIENT]),
        ("sin(x) + cos(y)", [QUOTIENT, QUOTIENT]),
        ("x*y + tanh(x)", [PAIR, QUOTIENT]),
        ("abs(x - y)", [AFFINE, AFFINE, PAIR]),
    ],
)
def test_products_and_sums_take_no_passes_of_their_own(text: str, kinds: list[int]) -> None:
    net = attnc.compile(text, {"x": (-1, 1), "y": (-1, 1)}, 1e-4)
    given = instructions(normal_form(net.program), net.program.dtype)
    assert given is not None
    assert sorted(step.kind for step in fuse(given).steps if step.reads) == sorted(kinds)
