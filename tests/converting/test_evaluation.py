"""Activations, with numba and without, agree with an explicit softmax within the rounding that is proven."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import attnc  # noqa: E402
from attnc.constructions.fitting.gate import hardswish_product  # noqa: E402
from attnc.converting import kernels  # noqa: E402
from attnc.converting.activations import KnownActivation, key_arrays, solve, stored_keys  # noqa: E402
from attnc.converting.evaluation import evaluation_of  # noqa: E402
from attnc.converting.modules import AttentionActivation, expression, weights_of  # noqa: E402
from attnc.converting.rounding import rounding_of  # noqa: E402

CASES = {
    "gelu": (),
    "gelu_tanh": (),
    "silu": (),
    "sigmoid": (),
    "tanh": (),
    "mish": (),
    "tanhshrink": (),
    "softplus": (("beta", 1.0),),
    "logsigmoid": (),
    "relu": (),
    "leaky_relu": (("slope", 0.1),),
    "hardtanh": (("lo", -0.3), ("hi", 0.7)),
    "relu6": (),
    "hardsigmoid": (),
    "hardswish": (),
    "soft_threshold": (("threshold", 0.4),),
    "elu": (("alpha", 0.5),),
    "celu": (("alpha", 1.3),),
    "selu": (),
    "erf": (),
}
ONE_EXPONENTIAL = (
    *("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "mish", "tanhshrink", "softplus", "logsigmoid"),
    *("erf", "elu", "celu", "selu"),
)
KINKED = ("relu", "leaky_relu", "hardtanh", "relu6", "hardsigmoid", "hardswish", "soft_threshold")


def points(dtype: torch.dtype) -> torch.Tensor:
    near = torch.cat([k + 1e-5 * torch.randn(2000, dtype=torch.float64) for k in (-3, -0.4, -0.3, 0, 0.4, 0.7, 3, 6)])
    far = torch.logspace(-8, 30, 500, dtype=torch.float64)
    return torch.cat([torch.linspace(-30, 30, 20001, dtype=torch.float64), near, far, -far]).to(dtype)


def exact(gate: AttentionActivation, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The explicit softmax with stored keys, in float64."""
    stored = key_arrays(stored_keys(gate.solved.keys, dtype)).values()
    keys = tuple(torch.tensor(numbers) for numbers in stored)
    return expression(x.double(), keys, gate.scale, gate.solved.is_product)


@pytest.fixture(params=["compiled", "in torch"])
def way(request, monkeypatch):
    """Activations run with numba if it is installed, and without."""
    if request.param == "in torch":
        monkeypatch.setattr(kernels, "is_available", lambda: False)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_proven_rounding_of_the_softmax(name, way):
    solved = solve(KnownActivation(name, CASES[name]), 1e-6, ("float32",))
    gate = AttentionActivation(solved)
    rounding = rounding_of(solved, "float32")
    assert rounding is not None
    x = points(torch.float32)
    y = exact(gate, x, "float32")
    by_softmax = expression(x, gate.keys(x), gate.scale, solved.is_product)
    for computed in (gate(x), by_softmax):
        assert ((computed.double() - y).abs() <= rounding * (1 + y.abs())).all()
    assert rounding <= 2e-4  # not vacuous
    double = solve(KnownActivation(name, CASES[name]), 1e-6, ("float64",))
    y, x = exact(AttentionActivation(double), x.double(), "float64"), x.double()
    assert ((AttentionActivation(double)(x) - y).abs() <= 2 * rounding_of(double, "float64") * (1 + y.abs())).all()


@pytest.mark.parametrize("name", CASES)
def test_the_loop_is_the_cheapest(name):
    solved = solve(KnownActivation(name, CASES[name]), 1e-6, ("float32",))
    found = evaluation_of(key_arrays(solved.keys), "float32", is_product=solved.is_product).description
    assert name in ONE_EXPONENTIAL + KINKED
    assert found == ("one exponential" if name in ONE_EXPONENTIAL else "exponentials at kinks")


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_those_of_the_softmax(name, way):
    solved = solve(KnownActivation(name, CASES[name]), 1e-6, ("float64",))
    gate = AttentionActivation(solved)
    x = points(torch.float64)
    x = x[x.abs() < 100].requires_grad_()
    (found,) = torch.autograd.grad(gate(x).sum(), x)
    keys = gate.keys(x)
    (expected,) = torch.autograd.grad(expression(x, keys, gate.scale, solved.is_product).sum(), x)
    assert (found - expected).abs().max() <= 1e-8


@pytest.mark.parametrize("name", ["elu", "celu", "selu"])
def test_slopes_in_float32_are_exact_beside_a_steep_kink(name, way):
    solved = solve(KnownActivation(name, CASES[name]), 1e-6, ("float32",))
    gate = AttentionActivation(solved)
    near, far = torch.logspace(-12, 1, 3000), torch.tensor([1e3, 1e12, 3e18, 1e25])
    x = torch.cat([near, -near, far, -far]).requires_grad_()
    (found,) = torch.autograd.grad(gate(x).sum(), x)
    double = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact(gate, double, "float32").sum(), double)
    assert (found - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("name", CASES)
def test_a_changed_key_changes_the_result(name, way):
    gate = AttentionActivation(solve(KnownActivation(name, CASES[name]), 1e-6, ("float32",)))
    x = torch.linspace(-4, 4, 1001)
    before = gate(x)
    weights = weights_of(x, *gate.keys(x)[:2], gate.scale)
    gate.values.data[weights.sum(0).argmax()] += 0.25  # past the version counter
    y = gate(x)
    assert (y - before).abs().max() > 0.01
    expected = expression(x, gate.keys(x), gate.scale, gate.solved.is_product)
    allowed = 1e-5 if way == "compiled" else 2e-3  # beside a steep kink, scores are rounded in another order
    assert (y - expected).abs().max() <= allowed


def test_copies_and_pickles_of_a_gate_run():
    gate = AttentionActivation(solve(KnownActivation("gelu"), 1e-6, ("float32",)))
    x = torch.randn(100)
    y = gate(x)
    for other in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert torch.equal(other(x), y)


@pytest.mark.skipif(not kernels.is_available(), reason="numba is missing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*KINKED, "silu", "elu"])
def test_in_place_loops_compute_the_same_bits(name, dtype):
    solved = solve(KnownActivation(name, CASES[name]), 1e-6, (str(dtype).removeprefix("torch."),))
    gate, beside = AttentionActivation(solved, inplace=True), AttentionActivation(solved)
    x = points(dtype)
    x[::977], x[5::991], x[7::983] = math.inf, -math.inf, math.nan
    for given in (x, x[:3000], x[:6000].reshape(2, 3, 20, 50).to(memory_format=torch.channels_last), x[:6000:2]):
        y = given.clone(memory_format=torch.preserve_format)
        expected = beside(y)
        assert gate(y) is y
        assert torch.equal(y.nan_to_num(nan=7.25), expected.nan_to_num(nan=7.25))


def test_threads_compute_what_one_thread_computes():
    gate = AttentionActivation(solve(KnownActivation("gelu"), 1e-6, ("float32",)))
    x, threads = torch.randn(100_003), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = gate(x)
        torch.set_num_threads(3)
        assert torch.equal(gate(x), alone)
    finally:
        torch.set_num_threads(threads)


def test_without_numba_torch_computes_activations(monkeypatch):
    monkeypatch.setattr(kernels, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Hardswish(), nn.ReLU()).double()
    converted, _ = attnc.convert(model, eps=1e-7)
    x = torch.randn(20_000, 4, dtype=torch.float64, requires_grad=True)
    assert (converted(x) - model(x)).abs().max() <= 1e-6
    (found,) = torch.autograd.grad(converted(x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert (found - expected).abs().mean() <= 1e-5


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-8])
def test_hardswish_as_a_product_is_within_its_bound(eps):
    gate = hardswish_product(eps)
    assert gate.error <= eps
    t = np.geomspace(1e-12, 10, 2000)
    x = np.concatenate([s * k + r * t for s in (-1, 1) for k in (0, 3) for r in (-1, 1)])
    found = x * gate.keys(x[:, None])[:, 0]
    error = np.abs(found - x * np.clip(x + 3, 0, 6) / 6).max()
    assert error <= gate.error + 1e-14
    assert gate.error <= 3 * error + 1e-7 * (eps > 1e-7)


def test_the_report_has_evaluation_and_rounding():
    _, report = attnc.convert(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.PReLU()), eps=1e-6)
    gelu, prelu = report.replaced
    assert gelu.evaluation == ("compiled, one exponential" if kernels.is_available() else "in torch, one exponential")
    assert 0 < gelu.rounding < 1e-5
    assert prelu.rounding is None
    assert report.as_json()["replaced"][0]["rounding"] == gelu.rounding
    assert "evaluation on a CPU" in str(report)
    assert math.isfinite(gelu.error)
