"""Activations that are written as arithmetic: found without an example, and proved against the code."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import attnc  # noqa: E402
from attnc.converting.activations import solve  # noqa: E402
from attnc.converting.arithmetic import Written, X, chosen, combined, matched, number, text_of  # noqa: E402
from converting.trace import traced  # noqa: E402

WRITTEN = {
    "x*(x > 0)": lambda x: x * (x > 0),
    "float mask": lambda x: (x >= 0).float() * x,
    "not mask": lambda x: x * ~(x < 0),
    "1 - mask": lambda x: x * (1 - (x < 0).to(x.dtype)),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "Tensor.where": lambda x: x.where(x > 0, torch.zeros_like(x)),
    "where, other kink": lambda x: torch.where(x < 0.25, torch.full_like(x, 0.25), x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "elu": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "selu": lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * torch.expm1(x)),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: torch.clamp_min(x, 0.5),
    "clamp max": lambda x: torch.clamp(x, max=1.5),
    "clamp to a tensor": lambda x: torch.max(x, torch.tensor(0.0)),
    "maximum": lambda x: torch.maximum(x, 0.2 * x),
    "relu6": lambda x: torch.minimum(torch.maximum(x, torch.zeros_like(x)), torch.full_like(x, 6.0)),
    "two tensors": lambda x: torch.maximum(x, x.flip(0)) + torch.min(x, x.roll(1, 0)),
    "abs": lambda x: x.abs() + abs(x),
    "sqrt of a square": lambda x: (x + torch.sqrt(x * x)) / 2,
    "relu squared": lambda x: F.relu(x) ** 2 + torch.square(x.clamp(min=0)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "swish": lambda x: x * torch.reciprocal(1 + torch.exp(-1.5 * x)),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "shifted softplus": lambda x: torch.log1p(x.exp()) - math.log(2),
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "log sigmoid": lambda x: torch.log(torch.sigmoid(x)),
    "sigmoid by e^x": lambda x: x.exp() / (1 + x.exp()) + x * torch.exp(x) / (torch.exp(x) + 1),
    "tanh by e^x": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
    "tanh by e^-2x": lambda x: (1 - torch.exp(-2 * x)) / (1 + torch.exp(-2 * x)) + torch.sinh(x) / torch.cosh(x),
    "log cosh": lambda x: torch.log(torch.cosh(x)),
    "erfc": lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)) + torch.erfc(x),
    "ndtr": lambda x: x * torch.special.ndtr(x),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "softsign": lambda x: x / (1 + x.abs()),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25])),
    "clipped gate": lambda x: (x.clamp(-7, 7) + 1) * (x.clamp(max=7.0) * torch.sigmoid(1.702 * x.clamp(max=7.0))),
    "entries set": lambda x: entries_set(2 * x + 1),
    "entries masked in place": lambda x: (x * 1).masked_fill_(x < 0.5, 0.5),
    "in place": lambda x: x.clone().mul_(2).clamp_(min=0),
}


def entries_set(x):
    x[x < 0] = 0
    x[x > 1.5] = 1.5
    return x


class Block(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.f = nn.Linear(4, 6), f

    def forward(self, x):
        return self.f(self.linear(x))


@pytest.mark.parametrize("name", WRITTEN)
def test_written_activations_are_converted_without_an_example(name):
    model, x = Block(WRITTEN[name]), 3 * torch.randn(50, 4)
    converted, report = attnc.convert(model, eps=1e-6)
    y, trace = traced(converted, x)
    assert not trace.activations
    assert report.replaced
    assert all(entry.error <= 1e-6 for entry in report.replaced)
    assert (y - model(x)).abs().max() <= 3e-5  # products multiply errors by up to 20
    _, after = attnc.convert(model, eps=1e-6, example=x, strict=True)  # strict: nothing is left
    assert not after.left


def test_a_module_of_one_expression_is_known_before_it_runs():
    class Elu(nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x, 0.5 * (torch.exp(x) - 1))

    _, report = attnc.convert(nn.Sequential(nn.Linear(2, 2), Elu()))
    assert [(entry.path, entry.activation) for entry in report.replaced] == [("1.elu()", "elu(alpha=0.5, width=1)")]


def test_the_proof_is_against_the_code_and_not_against_the_guess():
    """A wrong guess is refused, however close its values are where they were compared."""
    right = matched(chosen(("step", 1.0, 0.0), X, number(0.0)))
    assert right is not None
    assert solve(right, 1e-6, ("float64",)).error <= 1e-6
    wrong = type(right)(**{**vars(right), "texts": (("float64", "max(x, 0) + 0.001*exp(-(x - 7)**2)"),)})
    with pytest.raises(attnc.InputError, match="cannot prove"):
        solve(wrong, 1e-6, ("float64",))
    steep = type(right)(**{**vars(right), "texts": (("float64", "max(x, 0) + 0.00000000001*max(x - 100, 0)"),)})
    with pytest.raises(attnc.InputError, match="cannot prove"):
        solve(steep, 1e-6, ("float64",))


def test_expressions_that_jump_or_have_no_gate_are_not_taken_for_activations():
    hard_threshold = chosen(("step", 1.0, -0.5), X, number(0.0))
    assert matched(hard_threshold) is None
    assert matched(("div", X, ("sqrt", ("add", number(1.0), ("power", X, 2))))) is None
    assert matched(("exp", X)) is None
    assert matched(("add", X, number(1.0))) is None
    assert matched(("where", 3.0, -1.0, ("mul", number(3.0), X), number(1.0))) is None  # 1/3 is no number of the dtypes
    exp = ("exp", ("mul", number(0.1), X))  # 0.1 is another number in float32
    assert combined("div", exp, ("add", number(1.0), exp))[0] == "div"
    assert combined("add", ("step", 1.0, 0.0), X) is None


def test_numbers_are_those_of_the_dtype():
    tree = ("mul", number(0.1), X)
    assert "0.1000000014901161" in text_of(tree, "float32")
    assert "0.1000000014901161" not in text_of(tree, "float64")


def test_what_cannot_be_converted_is_named_with_its_place():
    class Hard(nn.Module):
        def forward(self, x, y):
            jump = torch.where(x > 0.3, 1.0, x)
            return torch.exp(x) + jump + torch.sin(y) + F.relu(x)

    example = (torch.randn(4, 3), torch.randn(4, 3))
    _, report = attnc.convert(Hard(), example=example)
    assert {entry.what for entry in report.left} == {"kernel exp", "kernel gt", "kernel where", "kernel sin"}
    assert all("test_arithmetic.py:" in entry.reason for entry in report.left)
    with pytest.raises(attnc.InputError, match="4 part"):
        attnc.convert(Hard(), example=example, strict=True)


def test_functions_of_weights_and_positions_and_norms_are_not_named():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.embed = nn.Parameter(torch.ones(())), nn.Embedding(9, 4)

        def forward(self, ids):
            x = self.embed(ids)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            angle = torch.arange(ids.shape[1]).float().log1p().cos()[:, None]
            weights = (ids > 2).float()
            mean = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-9)
            return F.gelu(x * angle * self.scale.exp().clamp(max=100)) + mean[:, None]

    _, report = attnc.convert(Around(), example=torch.randint(0, 9, (2, 5)), strict=True)
    assert "gelu" in {entry.activation for entry in report.replaced}
    assert report.kept["normalisation"] >= 1


def test_views_that_are_written_carry_data():
    class Loop(nn.Module):
        def forward(self, x):
            out = torch.zeros_like(x)
            for i in range(x.shape[1]):
                out[:, i] = torch.exp(x[:, i])
            return out + F.relu(x)

    _, report = attnc.convert(Loop(), example=torch.randn(2, 3))
    assert [entry.what for entry in report.left] == ["kernel exp"]


def test_a_form_is_not_used_after_its_source_has_changed():
    class Changed(nn.Module):
        def forward(self, x):
            x = x * 1.0
            mask = x > 0
            x.add_(1.0)
            return x * mask + torch.relu(x)

    model, x = Changed(), torch.linspace(-2, 2, 9)
    converted, report = attnc.convert(model, example=x)
    assert (converted(x) - model(x)).abs().max() <= 1e-6
    assert [entry.what for entry in report.left] == ["kernel gt"]


def test_forms_do_not_stay_on_outputs():
    model = Block(lambda x: torch.where(x > 0, x, 0.1 * x))
    converted, _ = attnc.convert(model)
    y = converted(torch.randn(3, 4))
    assert getattr(y, "attnc_form", None) is None


def test_infinite_masks_pass_through_a_maximum():
    converted, _ = attnc.convert(Block(lambda x: torch.maximum(x, x.flip(0))))
    holder = converted.attention_functions
    x = torch.tensor([1.0, -math.inf, 5.0, math.inf, -math.inf])
    y = torch.tensor([-math.inf, 2.0, torch.finfo(torch.float32).min, 1.0, -math.inf])
    assert torch.equal(holder.extreme("max", x, y), torch.maximum(x, y))
    assert torch.equal(holder.extreme("min", x, y), torch.minimum(x, y))


@pytest.mark.parametrize("name", ["elu", "x*(x > 0)", "maximum", "softplus"])
def test_gradients_are_those_of_the_function(name):
    model = Block(WRITTEN[name]).double()
    converted, _ = attnc.convert(model, eps=1e-9)
    x = torch.randn(20, 4, dtype=torch.float64)
    for run in (model, converted):
        run.zero_grad()
        run(x).square().sum().backward()
    assert (model.linear.weight.grad - converted.linear.weight.grad).abs().max() <= 1e-5


def test_without_an_example_functions_that_may_be_nonlinear_are_noted():
    class Exp(nn.Module):
        def forward(self, x):
            return torch.exp(x)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Exp())
    _, report = attnc.convert(model)
    assert any("exp (2)" in note for note in report.notes)

    class Snake(nn.Module):
        def forward(self, x):
            return x + torch.sin(x) ** 2

    _, report = attnc.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Snake()))
    assert any("sin (2)" in note for note in report.notes)
    _, report = attnc.convert(model, example=lambda model: float(model(torch.ones(1, 2)).sum()))
    assert [entry.what for entry in report.left] == ["kernel exp"]  # even if the output is no tensor


def test_written_activations_survive_json():
    model = nn.Sequential(nn.Linear(2, 2), Silu(), nn.ReLU())
    _, report = attnc.convert(model)
    facts = json.loads(json.dumps(report.as_json(), allow_nan=False))
    (written,) = [entry["written"] for entry in facts["replaced"] if entry["written"] is not None]
    assert Written.from_json(written) == report.replaced[0].written


class Silu(nn.Module):
    def forward(self, x):
        return x / (1 + torch.exp(-x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_helpers_are_left_only_if_they_hold_activations(monkeypatch):
    def bucket(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, 0, 3)

    def curve(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    for name, function in (("bucket", bucket), ("curve", curve)):
        monkeypatch.setitem(globals(), f"scripted_{name}", torch.jit.script(function))

    class Positions(nn.Module):
        def forward(self, x):
            return F.gelu(x) + scripted_bucket(torch.arange(x.shape[-1]))  # noqa: F821

    class Data(nn.Module):
        def forward(self, x):
            return F.gelu(x) + scripted_bucket(x)  # noqa: F821

    class Curve(nn.Module):
        def forward(self, x):
            return F.gelu(x) + scripted_curve(x)  # noqa: F821

    class Module(nn.Module):
        def forward(self, x):
            return F.gelu(scripted_module(x))  # noqa: F821

    monkeypatch.setitem(globals(), "scripted_module", torch.jit.script(nn.Linear(3, 3)))
    x = torch.randn(3)
    assert [entry.activation for entry in attnc.convert(Module(), strict=True, example=x)[1].replaced] == ["gelu"]
    attnc.convert(Positions(), strict=True)
    attnc.convert(Positions(), strict=True, example=x)
    _, report = attnc.convert(Data(), example=x)
    assert [entry.what for entry in report.left] == ["kernel clamp"]
    with pytest.raises(attnc.InputError, match="relu"):
        attnc.convert(Curve(), strict=True)
