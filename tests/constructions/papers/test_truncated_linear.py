"""Truncated linear functions by one head and by many: the bound is the tolerance, on the box and far outside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc import TruncatedLinear
from attnc.constructions import truncated_linear, truncated_linear_heads
from attnc.constructions.fitting.clips import silence
from attnc.constructions.fitting.selection import far_weight, mean_distance, mean_error
from attnc.engines.numpy_engine import NumpyEngine
from constructions.errors import error_at, reference_error


def points_for(target: TruncatedLinear, count: int = 600, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return target.box.lo + rng.random((count, target.box.d)) * target.box.widths


@st.composite
def targets(draw) -> TruncatedLinear:
    n, d = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    a = draw(st.sampled_from([0.0, -1.0, 5.0, -1000.0]))
    b = a + draw(st.floats(0.1, 20))
    t = (a + b) / 2 + rng.normal(size=n)
    return TruncatedLinear(rng.normal(size=(n, d)) * 3, t, a, b, (-2, 2))


@settings(max_examples=60)
@given(
    target=targets(),
    p=st.integers(2, 200),
    exponent=st.floats(-2, 8),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_one_head_keeps_its_bound_at_any_temperature(target, p, exponent, dtype):
    built = truncated_linear(target, num_anchors=p, beta=10.0**exponent, dtype=dtype)
    assert reference_error(built.program, target, points_for(target)) <= built.bound.value


@settings(max_examples=60)
@given(
    target=targets(),
    n=st.integers(3, 12),
    H=st.integers(1, 12),
    s=st.integers(1, 3),
    hardness=st.sampled_from([1.0, 10.0, 1e3, 1e6]),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_many_heads_keep_their_bound(target, n, H, s, hardness, dtype):
    n = max(n, 2 * s + 1, len(target.W))
    H = max(H, 2) if n - 2 * s == 1 else H
    beta = hardness * dict(truncated_linear_heads(target, num_heads=H, num_tokens=n, sentinels=s).parameters)["beta"]
    built = truncated_linear_heads(target, num_heads=H, num_tokens=n, sentinels=s, beta=beta, dtype=dtype)
    assert reference_error(built.program, target, points_for(target)) <= built.bound.value
    assert built.program.num_heads == H


def seam_points(target: TruncatedLinear, num_anchors: int) -> np.ndarray:
    """x at anchors, at midpoints and beside them, for the target clip(x, a, b)."""
    spacing = (target.b - target.a) / (num_anchors - 1)
    steps = np.arange(2 * num_anchors - 1) / 2
    places = target.a + steps * spacing
    nudged = [places + shift for shift in (0, 1e-14, -1e-14, 1e-7, -1e-7, spacing / 7)]
    return np.clip(np.concatenate(nudged), target.box.lo[0], target.box.hi[0])[:, None]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("n", "H", "s"), [(3, 2, 1), (3, 9, 1), (10, 4, 1), (6, 5, 2), (9, 3, 3), (5, 1, 1)])
def test_seams_between_heads(n, H, s, dtype):
    target = TruncatedLinear([1.0], 0.0, -1.0, 2.0, (-2, 3))
    built = truncated_linear_heads(target, num_heads=H, num_tokens=n, sentinels=s, dtype=dtype)
    error = reference_error(built.program, target, seam_points(target, (n - 2 * s) * H))
    assert (
        error <= built.bound.value <= 3 * max(error, reference_error(built.program, target, points_for(target, 5000)))
    )


@pytest.mark.parametrize(
    ("H", "n", "s", "beta"), [(200, 3, 1, 0.05), (50, 5, 1, 0.01), (50, 10, 1, 0.02), (100, 3, 1, 0.1), (40, 7, 2, 0.3)]
)
def test_many_soft_heads_all_speak(H, n, s, beta):
    """Each of H soft heads may add its own share: the bound must not pretend that only two do."""
    target = TruncatedLinear([1.0], 0.0, -1.0, 1.0, (-1, 1))
    built = truncated_linear_heads(target, num_heads=H, num_tokens=n, sentinels=s, beta=beta)
    assert reference_error(built.program, target, points_for(target, 2000)) <= built.bound.value


@pytest.mark.parametrize("build", [truncated_linear, truncated_linear_heads])
def test_truncation_holds_on_all_of_R(build):
    target = TruncatedLinear([[2.0, -1.0], [0.5, 0.5]], [0.3, -0.1], -1.0, 1.5, (-1, 1))
    built = build(target, eps=0.01)
    engine = NumpyEngine(built.program)
    for scale in (10.0, 1e3, 1e6, 1e9):
        points = points_for(target) * scale
        found = engine(*target.split(points)).reshape(len(points), -1)
        # Outside the box the linear part itself rounds more; far out all but few points are truncated exactly.
        exact = target.linear(points)
        sure = np.abs(exact - np.clip(exact, target.a, target.b)) > 1e-6 * scale
        assert np.abs(found - target(points))[sure].max() <= built.bound.value


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_bound_is_tight_for_one_head(dtype):
    target = TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.5, 1.5))
    for beta in (1.0, 2.72, 8.0, 100.0, 1e4):
        built = truncated_linear(target, num_anchors=20, beta=beta, dtype=dtype)
        error = reference_error(
            built.program, target, np.concatenate([points_for(target, 20_000), seam_points(target, 20)])
        )
        assert error <= built.bound.value <= 1.2 * error


def slope(sizes, errors) -> float:
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def test_rate_in_p():
    """Error of one head falls as 1/p: log-log slope −1 ± 0.1 over two decades."""
    target = TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.2, 1.2))
    points = np.linspace(-0.2, 1.2, 40_001)[:, None]
    sizes = [10, 20, 50, 100, 200, 500, 1000]
    errors = [error_at(truncated_linear(target, num_anchors=p).program, target, points) for p in sizes]
    assert slope(sizes, errors) == pytest.approx(-1, abs=0.1)


def test_rate_in_n_times_H():
    """Error of H heads of n keys falls as 1/(nH), in n and in H, at a temperature that stays hard."""
    target = TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.2, 1.2))
    points = np.linspace(-0.2, 1.2, 40_001)[:, None]

    def error(n, H):
        built = truncated_linear_heads(target, num_tokens=n, num_heads=H, beta=100.0)
        return error_at(built.program, target, points)

    heads = [1, 2, 5, 10, 20, 50, 100]
    assert slope(heads, [error(12, H) for H in heads]) == pytest.approx(-1, abs=0.1)
    keys = [10, 20, 50, 100, 200, 500, 1000]
    assert slope([n - 2 for n in keys], [error(n, 4) for n in keys]) == pytest.approx(-1, abs=0.1)


def test_heads_against_parameters_at_equal_error():
    """Heads share their keys here, so at equal error many heads need fewer parameters than one."""
    target = TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.2, 1.2))
    one = truncated_linear(target, eps=1e-3, beta=50.0)
    many = truncated_linear_heads(target, eps=1e-3, beta=50.0)
    assert many.bound.value <= 1e-3
    assert many.program.num_parameters < one.program.num_parameters


@pytest.mark.parametrize("construction", ["auto", "truncated_linear", "truncated_linear_heads", "max_affine"])
@pytest.mark.parametrize("eps", [0.3, 0.02])
def test_compile_meets_eps(construction, eps):
    target = TruncatedLinear([1.0, -2.0], 0.1, -1.0, 2.0, (-1, 1))
    net = attnc.compile(target, eps=eps, construction=construction)
    assert net.certificate.observed <= net.certificate.bound <= eps
    assert net(np.zeros((3, 2))).shape == (3,)


def test_n_models_at_once_have_their_own_weights():
    target = TruncatedLinear(np.eye(3), [0.0, 0.5, -0.5], -1, 1, (-1, 1))
    net = attnc.compile(target, eps=0.01)
    X = np.random.default_rng(0).uniform(-1, 1, (5, 3, 3))
    wanted = np.clip(np.diagonal(X, axis1=1, axis2=2) + np.array([0.0, 0.5, -0.5]), -1, 1)
    assert net(X).shape == (5, 3)
    assert np.abs(net(X) - wanted).max() <= net.certificate.bound


# --- the lemmas ------------------------------------------------------------------------------------------------------


def lattice_weights(beta: float, count: int, steps: int = 20_001):
    L = np.arange(count) - (count - 1) / 2
    y = np.linspace(-count / 2 - 3, count / 2 + 3, steps)[:, None]
    scores = -beta * (y - L) ** 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return L, y, weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("beta", [0.03, 0.3, 1.0, 2.72, 8.0, 50.0, 1e4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_lattice_lemmas(beta, count):
    L, y, weights = lattice_weights(beta, count)
    inside = np.clip(y, L[0], L[-1])
    assert (weights * np.abs(L - inside)).sum(axis=1).max() <= mean_distance(beta, count)
    assert np.abs((weights * L).sum(axis=1) - inside[:, 0]).max() <= mean_error(beta, count)
    within = (y[:, 0] >= L[0] - 0.5) & (y[:, 0] <= L[-1] + 0.5)
    for rho in (0.51, 0.75, 1.0, 2.5):
        far = (weights * (np.abs(y - L) > rho)).sum(axis=1)[within].max()
        assert far <= far_weight(beta, rho, count)


def test_silence_is_an_upper_bound():
    rng = np.random.default_rng(0)
    for s, q, beta in ((1, 1, 3.0), (1, 4, 5.0), (2, 3, 2.0), (3, 2, 1.0)):
        H = 7
        g = np.arange(-s, q * H + s)
        for y in rng.uniform(-1, q * H, 300):
            e = np.exp(-beta * (y - g) ** 2 + beta * np.min((y - g) ** 2))
            total = 0.0
            for h in range(H):
                window = (g >= h * q - s) & (g < (h + 1) * q + s)
                own = (g >= h * q) & (g < (h + 1) * q)
                if e[window].sum() > 0:
                    total += np.abs(e[own] / e[window].sum() - e[own] / e.sum()).sum()
            assert total <= silence(beta, s, 0.0, H)
