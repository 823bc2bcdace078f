"""Every activation by attention: within its proven error, in each dtype, forwards and backwards."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

import attnc  # noqa: E402
from attnc.converting.activations import SOFTSIGN_RANGE  # noqa: E402
from converting.trace import Trace  # noqa: E402

ACTIVATIONS = [
    *(nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(), nn.ReLU6(), nn.Hardtanh(-0.3, 0.7), nn.Hardswish(), nn.Hardsigmoid()),
    *(nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Softplus()),
    *(nn.Softplus(0.3), nn.ELU(0.5), nn.SELU(), nn.CELU(0.7), nn.Mish(), nn.Tanhshrink(), nn.Softshrink(0.4)),
    *(nn.Threshold(0.0, 0.0), nn.RReLU().eval(), nn.Softsign()),
]
SMOOTH = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Softplus()]
EXACT = [nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.Mish()]


def wide(dtype: torch.dtype = torch.float64, reach: float = 1e30) -> torch.Tensor:
    """Near the kinks, on the core, and far out."""
    far = torch.logspace(1, math.log10(reach), 60, dtype=torch.float64)
    near = torch.logspace(-12, 0, 200, dtype=torch.float64)
    core = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    kinks = torch.tensor([-3.0, -0.4, -0.3, 0.0, 0.4, 0.7, 1.0, 3.0, 6.0], dtype=torch.float64)
    around = (kinks[:, None] + torch.cat([-near, near])).flatten()
    return torch.cat([-far, far, core, around]).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_float64_error_is_within_what_is_proven(activation):
    original = copy.deepcopy(activation).double()
    x = wide(reach=SOFTSIGN_RANGE if isinstance(activation, nn.Softsign) else 1e30)
    converted, report = attnc.convert(original, eps=1e-6)
    (entry,) = report.replaced
    assert entry.error <= 1e-6
    y = original(x).detach()
    if isinstance(activation, nn.Softplus):  # torch's own jumps by log(1 + e^−20)/β where βx = 20
        y = torch.logaddexp(activation.beta * x, torch.zeros_like(x)) / activation.beta
    if isinstance(activation, nn.Tanhshrink | nn.Softshrink | nn.GELU | nn.Mish | nn.SiLU | nn.SELU | nn.Softplus):
        slack = 2.0**-50 * (x.abs() + 1)
    else:
        slack = 2.0**-51 * (y.abs() + 1)
    assert ((converted(x).detach() - y).abs() <= entry.error + slack).all()


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if not isinstance(a, nn.Softsign)], ids=str)
def test_float32_rounding_is_a_few_units(activation):
    original = copy.deepcopy(activation).float()
    converted, report = attnc.convert(original, eps=1e-6)
    x = wide(torch.float32)
    reference = copy.deepcopy(activation).double()(x.double()).detach()
    off = (converted(x).detach().double() - reference).abs()
    assert (off <= report.replaced[0].error + 2.0**-20 * (x.double().abs() + 1)).all()
    assert converted(x).dtype == torch.float32


@pytest.mark.parametrize("activation", EXACT, ids=str)
def test_exact_gates_in_float64(activation):
    """The figure of the issue: 4·2⁻⁵²·max(1, |y|), with two or three keys."""
    converted, report = attnc.convert(activation, eps=1e-6)
    x = torch.cat([wide(reach=1e300), torch.randn(100_000, dtype=torch.float64) * 5])
    y = activation(x)
    if isinstance(activation, nn.Mish):  # torch's own is off by more than that below −20
        e = torch.exp(-x.abs())
        weight = torch.where(x > 0, (1 + 2 * e) / (1 + 2 * e + 2 * e * e), e * (2 + e) / (2 + 2 * e + e * e))
        y = x * weight
    assert ((converted(x) - y).abs() <= 4 * 2.0**-52 * y.abs().clamp(min=1)).all()
    assert report.replaced[0].anchors <= 3


def test_gelu_reaches_the_figures():
    x = wide()
    for eps, keys, scale in ((1e-7, 17, torch.ones_like(x)), (1e-12, 33, x.abs().clamp(min=1))):
        converted, report = attnc.convert(nn.GELU(), eps=eps)
        assert report.replaced[0].anchors <= keys
        assert report.dtype == "float64 or float32"  # a module without parameters takes both
        assert ("float32" in report.replaced[0].dtype) == (eps == 1e-7)
        assert ((converted(x) - nn.GELU()(x)).abs() <= eps * scale).all()


@pytest.mark.parametrize("activation", SMOOTH, ids=str)
def test_gradients_agree(activation):
    converted, _ = attnc.convert(activation, eps=1e-7)
    x = torch.linspace(-12, 12, 3001, dtype=torch.float64)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    (activation(a) * torch.cos(x)).sum().backward()
    trace = Trace()
    with trace:
        (converted(b) * torch.cos(x)).sum().backward()
    assert not trace.activations
    assert (a.grad - b.grad).abs().max() <= 1e-4


def test_gradients_are_those_of_the_attention():
    converted, _ = attnc.convert(nn.GELU(), eps=1e-6)
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(converted, (x,))
    assert torch.autograd.gradgradcheck(converted, (x,))


def test_blocks_do_not_show(monkeypatch):
    from attnc.converting import modules

    converted, _ = attnc.convert(nn.Softplus(), eps=1e-6)
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    whole = converted(x)
    monkeypatch.setattr(modules, "SCORE_BYTES", 400)
    y = x.clone().requires_grad_()
    out = converted(y)
    assert (out - whole).abs().max() <= 2.0**-50
    out.sum().backward()
    assert torch.allclose(y.grad, torch.sigmoid(x), atol=1e-5)


def test_shapes_strides_and_in_place():
    converted, _ = attnc.convert(nn.ReLU(), eps=1e-6)
    for x in (torch.randn(()), torch.zeros(0, 3), torch.randn(4, 6).T, torch.randn(2, 3, 4, 5)[:, ::2]):
        assert converted(x).shape == x.shape
        assert (converted(x) - torch.relu(x)).abs().max().item() <= 1e-6 if x.numel() else True
    converted, _ = attnc.convert(nn.ReLU(inplace=True), eps=1e-6)
    x = torch.randn(10)
    assert converted(x) is x
    assert (x > -1e-6).all()


def test_prelu_of_channels_keeps_its_weight():
    original = nn.PReLU(3)
    with torch.no_grad():
        original.weight.copy_(torch.tensor([-0.5, 0.1, 2.0]))
    converted, report = attnc.convert(original, eps=1e-6)
    x = torch.randn(4, 3, 5)
    assert (converted(x) - original(x)).abs().max() <= report.error + 1e-6
    converted(x).sum().backward()
    original(x).sum().backward()
    assert torch.allclose(converted.weight.grad, original.weight.grad, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    original = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.ReLU()).to(dtype)
    converted, report = attnc.convert(original, eps=1e-6)
    assert any("computed in float32" in note for note in report.notes)
    x = torch.randn(100, 8).to(dtype)
    y = converted(x)
    assert y.dtype == dtype
    assert (y.float() - original(x).float()).abs().max() <= torch.finfo(dtype).eps * 8


def test_keys_stay_precise_when_the_model_is_cast():
    converted, _ = attnc.convert(nn.Sequential(nn.Linear(4, 4), nn.GELU()), eps=1e-6)
    before = converted[1].slopes.clone()
    converted.half().float().double()
    assert torch.equal(converted[1].slopes, before)


def test_parameters_that_make_a_jump_are_left_and_named():
    for module in (nn.Hardshrink(), nn.Threshold(1.0, 0.0), nn.Softplus(threshold=2.0), nn.RReLU().train()):
        converted, report = attnc.convert(nn.Sequential(nn.Linear(2, 2), module))
        assert report.left[0].path == "1"
        assert type(converted[1]) is type(module)
        with pytest.raises(attnc.InputError, match="'1'"):
            attnc.convert(nn.Sequential(nn.Linear(2, 2), module), strict=True)


def test_what_cannot_be_reached_is_refused_with_what_can():
    with pytest.raises(attnc.InputError, match=r"1: .*gelu_tanh.*eps"):
        attnc.convert(nn.Sequential(nn.Linear(2, 2), nn.GELU(approximate="tanh")), eps=1e-13)
    with pytest.raises(attnc.InputError, match="softsign"):
        attnc.convert(nn.Softsign(), eps=1e-9)


def test_integers_and_complex_numbers_are_refused():
    converted, _ = attnc.convert(nn.ReLU())
    for x in (torch.arange(3), torch.randn(3, dtype=torch.complex64)):
        with pytest.raises(attnc.InputError, match="found a tensor of"):
            converted(x)


def test_trained_keys_get_gradients():
    converted, _ = attnc.convert(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 1)), eps=1e-3)
    gate = converted[1].train_keys()
    names = {name for name, _ in gate.named_parameters()}
    assert names == {"slopes", "offsets", "values", "carried"}
    converted(torch.randn(7, 3)).square().sum().backward()
    assert all(p.grad is not None and np.isfinite(p.grad.numpy()).all() for p in gate.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if not isinstance(a, nn.Softsign)], ids=str)
def test_where_scores_overflow_the_limit_is_computed(activation, dtype):
    original = copy.deepcopy(activation).to(dtype)
    converted, _ = attnc.convert(original, eps=1e-5)
    most = torch.finfo(dtype).max
    x = torch.tensor([-most, -most / 8, -1.0, 0.5, most / 8, most], dtype=dtype, requires_grad=True)
    y, z = converted(x), original(x)
    if isinstance(activation, nn.Hardswish | nn.GELU):  # torch's own overflow: x·6, x³
        z = torch.where(x.abs() > 1e30, torch.relu(x), z)
    assert ((y == z) | ((y - z).abs() <= 1e-5 + 4 * torch.finfo(dtype).eps * z.abs())).all()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(slope).all()
    ends = converted(torch.tensor([-math.inf, math.inf, math.nan, 1.0], dtype=dtype)).detach()
    assert ends[2].isnan()
    assert not ends[[0, 3]].isnan().any()
    expected = original(torch.tensor([-math.inf, math.inf], dtype=dtype)).nan_to_num(0.0, math.inf, -math.inf)
    if not isinstance(activation, nn.GELU):  # torch has NaN on one side or on both
        assert torch.allclose(ends[:2], expected, atol=1e-5)
    else:
        assert ends[:2].tolist() == [0.0, math.inf]


def test_activations_that_write_into_their_input_train():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ELU(inplace=True), nn.Conv2d(8, 2, 3)).double()
    x, grads = torch.randn(2, 3, 8, 8, dtype=torch.float64), []
    for model in (conv, attnc.convert(conv, eps=1e-7)[0]):
        model(x).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() <= 1e-4 * grads[0].abs().max()


def test_gradients_of_every_sample_at_once():
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 1)).double()
    x, found = torch.randn(4, 3, dtype=torch.float64), []
    for each in (model, attnc.convert(model, eps=1e-7)[0]):
        parameters = {name: p.detach() for name, p in each.named_parameters()}

        def loss(parameters, x, each=each):
            return torch.func.functional_call(each, parameters, (x,)).sum()

        found.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x))
    for name, expected in found[0].items():
        assert (expected - found[1][name]).abs().max() <= 1e-4
