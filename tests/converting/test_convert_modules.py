"""Whole models: activations that are found, that stay, that are named; and the kernels that run."""

from __future__ import annotations

import copy
import functools
import json

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import attnc  # noqa: E402
from attnc.converting.measuring import gain  # noqa: E402
from attnc.converting.mlp import as_stages, composed_error  # noqa: E402
from converting.trace import Trace, assert_same_by_attention, mlp, traced  # noqa: E402

renamed = F.relu


class Functional(nn.Module):
    """Calls in every spelling, a branch that torch.fx cannot trace, and activations where torch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kept = F.elu
        self.bound = functools.partial(F.gelu, approximate="tanh")
        self.hidden = [torch.tanh, nn.SiLU()]

    def forward(self, x):
        x = F.leaky_relu(self.linear(x), 0.2)
        x = x.sigmoid() * torch.relu(x)
        if x.sum() > 0:
            x = handwritten_gelu(x)
        x = self.kept(x) + self.bound(x)
        x = self.hidden[0](x) + self.hidden[1](x)
        return F.glu(x).tanh_()


def handwritten_gelu(x):
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


class Traceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return F.softplus(self.relu(self.linear(x)), beta=2.0)

    def features(self, x):
        return torch.sigmoid(self.linear(x))


def test_relu_mlp_reaches_the_figure():
    model = mlp(nn.ReLU, 64, 256, 64, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-12)
    x = torch.randn(2000, 64, dtype=torch.float64) * 10
    assert (converted(x) - model(x)).abs().max() <= 1e-9
    assert composed_error(as_stages(converted)) <= 1e-9
    assert report.replaced[0].anchors == 2


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, functools.partial(nn.ELU, 0.5)], ids=str)
def test_the_composed_error_is_a_bound_and_not_a_vacuous_one(activation):
    model = mlp(activation, 3, 8, 8, 2, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-3)
    x = torch.randn(20_000, 3, dtype=torch.float64) * 3
    error = (converted(x) - model(x)).abs().max().item()
    bound = composed_error(as_stages(converted))
    assert error <= bound + 1e-14
    assert bound <= 100 * error
    assert report.replaced[-1].block_error == pytest.approx(gain(model[-1]) * report.replaced[-1].error)


def test_the_block_error_is_reached_within_a_factor_of_three():
    """Weights of one sign and pre-activations where the gate is worst."""
    model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for p in (model[0].weight, model[2].weight):
            p.fill_(1.0)
        model[0].bias.zero_()
    converted, report = attnc.convert(model, eps=1e-3)
    x = torch.linspace(-0.01, 0.01, 20_001, dtype=torch.float64)[:, None]
    error = (converted(x) - model(x)).abs().max().item()
    assert error <= report.replaced[0].block_error <= 3 * error


def test_functions_in_code_are_answered_and_reported():
    torch.manual_seed(1)
    model, x = Functional().eval(), torch.randn(5, 16)
    converted, report = attnc.convert(model, eps=1e-6, example=x)
    assert_same_by_attention(model, converted, x)
    assert len(report.replaced) >= 8
    found = {entry.activation.partition("(")[0] for entry in report.replaced}
    assert found == {"leaky_relu", "sigmoid", "relu", "erf", "elu", "gelu_tanh", "tanh", "silu"}
    assert "leaky_relu(slope=0.2)" in {entry.activation for entry in report.replaced}
    assert report.end_to_end.hidden <= 1e-5


def test_without_an_example_the_code_still_tells():
    model, x = Functional().eval(), torch.randn(5, 16)
    converted, report = attnc.convert(model, eps=1e-6)
    assert any("erf" in note and "sigmoid" in note for note in report.notes)
    _, trace = traced(converted, x)
    assert not trace.activations
    assert {"leaky_relu()", "erf()"} <= {entry.path for entry in report.replaced}


def test_traceable_code_is_known_before_it_runs():
    model, x = Traceable(), torch.randn(3, 4)
    converted, report = attnc.convert(model, eps=1e-6)
    assert [(entry.path, entry.activation) for entry in report.replaced] == [
        ("relu", "relu"),
        ("softplus()", "softplus(beta=2)"),
    ]
    for run in ("forward", "features"):
        assert_same_by_attention(getattr(model, run), getattr(converted, run), x)


def test_other_modules_of_the_class_are_untouched():
    model, other = Traceable(), Traceable()
    before = copy.deepcopy(model.state_dict())
    converted, _ = attnc.convert(model)
    assert type(model) is type(other) is Traceable
    assert isinstance(converted, Traceable)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    _, trace = traced(model, torch.randn(2, 4))
    assert {"relu", "softplus"} <= trace.activations
    twice = copy.deepcopy(converted)
    _, trace = traced(twice, torch.randn(2, 4))
    assert not trace.activations


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu])
def test_transformer_layers_do_not_take_the_fused_path(activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation=activation, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=activation is not F.silu).eval()
    x = torch.randn(2, 5, 16)
    _, before = traced(model, x)
    assert "_transformer_encoder_layer_fwd" in before.counts or activation is F.silu
    converted, report = attnc.convert(model, eps=1e-6, example=x)
    assert_same_by_attention(model, converted, x)
    assert [entry.path for entry in report.replaced] == ["layers.0.activation", "layers.1.activation"]
    assert [entry.consumers for entry in report.replaced] == [("layers.0.linear2",), ("layers.1.linear2",)]
    assert all(entry.block_error > 0 or activation is F.silu for entry in report.replaced)
    assert all(entry.seen[0] < 0 < entry.seen[1] and entry.drift <= 1e-5 for entry in report.replaced)
    padded = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    y, after = traced(converted, x, src_key_padding_mask=padded)
    assert not after.activations
    assert (y - model(x, src_key_padding_mask=padded))[~padded].abs().max() <= 1e-5


def test_decoder_and_whole_transformer():
    torch.manual_seed(0)
    model, x = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    converted, report = attnc.convert(model, eps=1e-6)
    assert_same_by_attention(model, converted, x, x)
    assert len(report.replaced) == 2


def test_gated_blocks():
    class SwiGLU(nn.Module):
        def __init__(self, act) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
            self.act = act

        def forward(self, x):
            return self.down(self.act(self.gate(x)) * self.up(x))

    x = torch.randn(4, 8)
    for act in (nn.SiLU(), nn.GELU(), F.silu):
        model = SwiGLU(act)
        converted, report = attnc.convert(model, eps=1e-6, example=x)
        assert_same_by_attention(model, converted, x)
        assert report.replaced[0].path == "act"


def test_shared_and_tied_modules_stay_shared():
    act, linear = nn.GELU(), nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(linear, act), "b": nn.Sequential(linear, act)})
    converted, report = attnc.convert(model)
    assert converted["a"][1] is converted["b"][1]
    assert converted["a"][0] is converted["b"][0]
    assert report.replaced[0].path == "a.1"
    assert report.replaced[0].also == ("b.1",)


def test_bad_input():
    for given, message in (
        (lambda x: x, "torch.nn.Module"),
        (nn.Linear(2, 2), "no activation"),
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.ReLU()), "complex"),
        (torch.jit.ScriptModule(), "TorchScript"),
        (nn.Sequential(nn.Linear(2, 2, device="meta"), nn.ReLU()), "meta"),
    ):
        with pytest.raises(attnc.InputError, match=message):
            attnc.convert(given)
    for eps in (0, -1.0, float("nan"), "small"):
        with pytest.raises(attnc.InputError, match="eps"):
            attnc.convert(nn.ReLU(), eps=eps)
    strange = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    strange[0].weight = nn.Parameter(strange[0].weight.data.to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(attnc.InputError, match="float8_e5m2"):
        attnc.convert(strange)
    with pytest.raises(attnc.InputError, match="does not run on the example"):
        attnc.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), example=torch.zeros(1, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_refused():
    with pytest.raises(attnc.InputError, match="0 was compiled by"):
        attnc.convert(nn.Sequential(torch.compile(nn.ReLU())))


def test_an_activation_with_a_backward_of_its_own():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    model, x = nn.Sequential(nn.Linear(4, 4), bloom.BloomGelu()), torch.randn(3, 4)
    converted, report = attnc.convert(model)
    assert [(entry.path, entry.activation) for entry in report.replaced] == [("1", "gelu_tanh")]
    with Trace() as trace:
        y = converted(x)
        y.sum().backward()
    assert not trace.activations
    assert (y - model(x)).abs().max() <= 1e-5


def test_what_no_reading_shows_is_found_by_a_run():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.name = "".join(["si", "lu"])
            self.fine = lambda x: x * torch.sigmoid(x)

        def forward(self, x):
            return getattr(F, self.name)(x) + self.fine(x) + renamed(x)

    x = torch.randn(5)
    model = Hidden()
    converted, report = attnc.convert(model, example=x)
    assert_same_by_attention(model, converted, x)
    assert {entry.activation for entry in report.replaced} == {"silu", "sigmoid", "relu"}


def test_kernels_called_by_their_operator_are_named():
    class Direct(nn.Module):
        def forward(self, x):
            return torch.ops.aten.gelu(torch.relu(x))

    _, report = attnc.convert(Direct(), example=torch.randn(5))
    assert [entry.what for entry in report.left] == ["kernel gelu"]
    with pytest.raises(attnc.InputError, match="kernel gelu"):
        attnc.convert(Direct(), example=torch.randn(5), strict=True)


def test_training_mode_and_randomness_survive_an_example():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5)).train()
    converted, report = attnc.convert(model, example=torch.randn(3, 4))
    assert model.training
    assert converted.training
    assert converted[2].training
    assert report.end_to_end.hidden <= 1e-6


def test_a_converted_mlp_fine_tunes_like_the_original():
    torch.manual_seed(0)
    x = torch.rand(256, 2, dtype=torch.float64) * 2 - 1
    target = torch.sin(3 * x[:, :1]) * x[:, 1:]
    losses = []
    original = mlp(nn.GELU, 2, 16, 1, dtype=torch.float64)
    for model in (original, attnc.convert(original, eps=1e-7)[0]):
        model = copy.deepcopy(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(60):
            optimiser.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    assert losses[1] < 0.5 * F.mse_loss(original(x), target).item()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_report_is_a_table_and_json():
    _, report = attnc.convert(mlp(nn.GELU, 4, 8, 2), eps=1e-5, example=torch.randn(9, 4))
    assert json.loads(json.dumps(report.as_json()))["replaced"][0]["name"] == "1"
    text = str(report)
    assert "proven block error" in text
    assert "measured drift" in text
    assert report.markdown().count("\n") == 2
    assert np.isfinite(report.replaced[0].drift)


def test_padded_encoders_are_measured():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padded = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    example = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padded}
    converted, report = attnc.convert(model, eps=1e-6, example=example)
    assert model.use_nested_tensor
    assert report.end_to_end.hidden <= 1e-5
    assert all(entry.drift is not None and entry.floor > 0 and 0 < entry.share < 1 for entry in report.replaced)
    assert (converted(**example) - model(**example))[~padded].abs().max() <= 1e-5


def test_the_noise_floor_is_that_of_the_dtype():
    model = mlp(nn.GELU, 16, 64, 64, 4)
    x = torch.randn(50, 16)
    _, report = attnc.convert(model, eps=1e-7, example=x)
    floor = report.end_to_end.noise_floor
    exact = (model(x).double() - copy.deepcopy(model).double()(x.double())).abs().max().item()
    assert floor == pytest.approx(exact)
    assert 1e-8 < floor < 1e-5
    assert report.end_to_end.hidden <= 10 * floor
    assert f"{floor:.2e}" in str(report)
    assert torch.get_default_dtype() == torch.float32
    _, report = attnc.convert(model.double(), eps=1e-9, example=x.double())
    assert report.end_to_end.noise_floor is None


def test_rounding_is_proven():
    model, x = mlp(nn.GELU, 4, 64, 2), 3 * torch.randn(2000, 4)
    converted, report = attnc.convert(model, eps=1e-6, example=x)
    gate, entry = converted[1], report.replaced[0]
    seen = converted[0](x).detach()
    keys = {name: getattr(gate, name).float().double() for name in ("slopes", "offsets", "values", "carried")}
    exact = copy.deepcopy(gate)
    for name, key in keys.items():
        getattr(exact, name).copy_(key)
    y = exact(seen.double())
    moved = ((gate(seen).double() - y).abs() / (1 + y.abs())).max().item()
    assert moved <= entry.rounding <= 200 * moved


def test_a_model_without_forward_takes_a_function_as_example():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(3, 3), nn.GELU()

        def encode(self, x):
            return self.act(self.linear(x))

    x = torch.randn(2, 3)
    converted, report = attnc.convert(Encoder(), example=lambda model: model.encode(x), strict=True)
    assert [entry.path for entry in report.replaced] == ["act"]
    assert report.end_to_end.noise_floor is not None
    assert report.replaced[0].seen is not None
    with pytest.raises(attnc.InputError, match="has no forward"):
        attnc.convert(Encoder(), example=x)
    assert converted.encode(x).shape == (2, 3)


class Gated(nn.Module):
    """A gated block behind a norm that is written out, with a gain of 1 + weight."""

    def __init__(self, *, is_normed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.act, self.is_normed, self.weight = nn.GELU(), is_normed, nn.Parameter(0.1 * torch.randn(8))

    def forward(self, x):
        if self.is_normed:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)
        return self.down(self.act(self.gate(x)) * self.up(x).clamp(-5, 5))


def test_gated_blocks_have_a_bound_for_all_inputs_if_a_norm_bounds_the_factor():
    model = Gated(is_normed=True).double()
    x = torch.randn(20_000, 8, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-3, example=x[:50])
    bound = next(entry.block_error for entry in report.replaced if entry.path == "act")
    for scale in (1e-3, 1.0, 1e3):
        seen = (converted(scale * x) - model(scale * x)).abs().max().item()
        clamp = next(entry for entry in report.replaced if entry.activation.startswith("hardtanh"))
        assert seen <= bound + clamp.block_error
    assert bound <= 50 * seen
    assert report.replaced[0].drift is not None


def test_a_clamp_bounds_the_factor_and_without_one_nothing_is_claimed():
    x = torch.randn(50, 8)
    _, report = attnc.convert(Gated(is_normed=False), eps=1e-3, example=x)
    gate = next(entry for entry in report.replaced if entry.path == "act")
    assert gate.block_error == pytest.approx(gate.error * gain(Gated(is_normed=False).down) * 5, rel=0.01)
    clamp = next(entry for entry in report.replaced if entry.activation.startswith("hardtanh"))
    assert clamp.block_error is None  # its error is multiplied by a gelu of any size
    assert clamp.block_error_seen > 0


class Between(nn.Module):
    """An activation, arithmetic, and a linear map."""

    def __init__(self, arithmetic, activation):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 4)
        self.act, self.arithmetic = activation, arithmetic

    def forward(self, x):
        return self.down(self.arithmetic(self.act(self.up(self.norm(x)))))


def written(y):
    z = y.clone()
    z[..., :4] += y[..., 4:8]
    return z


@pytest.mark.parametrize(
    "arithmetic",
    [lambda y: y - y.mean(-1, keepdim=True), lambda y: y + y.roll(1, -1), lambda y: y + y.cumsum(-1), written],
)
def test_errors_that_arrive_in_two_ways_are_not_claimed_by_one(arithmetic):
    _, report = attnc.convert(Between(arithmetic, nn.GELU()), eps=1e-3, example=torch.randn(5, 8))
    assert report.replaced[0].block_error is None


@pytest.mark.parametrize("square", [torch.square, lambda y: y * y, lambda y: y**2])
def test_squared_relus_have_a_block_bound(square):
    model = Between(square, nn.ReLU()).double()
    with torch.no_grad():
        model.up.weight.mul_(0.05)  # inputs close to the kink, where the error is
    x = torch.randn(20_000, 8, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-1, example=x[:50])
    seen = (converted(x) - model(x)).abs().max().item()
    assert seen <= report.replaced[0].block_error <= 50 * seen


def test_prelus_of_different_weights_share_no_keys():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor([0.25])), nn.Parameter(torch.full((4,), -60.0))

        def forward(self, x):
            return F.prelu(x, self.a) + F.prelu(x, self.b)

    model, x = Two().double(), torch.linspace(-1e-2, 1e-2, 40_004, dtype=torch.float64).reshape(-1, 4)
    converted, report = attnc.convert(model, eps=1e-4, example=x)
    assert all(entry.error <= 1e-4 for entry in report.replaced)
    assert (converted(x) - model(x)).abs().max() <= sum(entry.error for entry in report.replaced)
