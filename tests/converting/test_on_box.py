"""Bounds of |converted − original| on a box: no search exceeds them, and they are not far above what it finds."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import attnc  # noqa: E402
from attnc.converting import propagation  # noqa: E402
from attnc.converting.activations import KnownActivation, solve  # noqa: E402
from attnc.converting.modules import AttentionActivation  # noqa: E402
from attnc.converting.on_box import on_box  # noqa: E402
from attnc.numerics.affine_forms import AffineVectors, spectral_norm  # noqa: E402
from attnc.numerics.intervals import Interval  # noqa: E402
from converting import trace  # noqa: E402

STEPS = 20


class Residual(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


def searched(
    model: nn.Module, converted: nn.Module, shape: tuple[int, ...], reach: float = 1.0, n: int = 4000
) -> float:
    """The largest difference that random points, corners and gradient ascent find in [−reach, reach]."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    x = reach * (2 * torch.rand(n, *shape, dtype=dtype) - 1)
    x[: n // 8] = reach * x[: n // 8].sign()
    x[n // 8 : n // 4] = x[n // 8 : n // 4].mean(-1, keepdim=True) + 1e-3 * x[n // 8 : n // 4]  # norms are steep here
    model, converted = model.eval(), converted.eval()
    with torch.no_grad():
        found = (model(x) - converted(x)).abs().reshape(n, -1).max(1).values
    best = float(found.max())
    start = x[found.topk(32).indices]
    for sign in (1.0, -1.0):
        x = start
        for step in range(STEPS):
            x = x.detach().requires_grad_()
            moved = converted(x) - model(x)
            best = max(best, float(moved.detach().abs().max()))
            (slope,) = torch.autograd.grad((sign * moved).reshape(len(x), -1).max(1).values.sum(), x)
            x = (x + 0.05 * reach * 0.9**step * slope.sign()).clamp(-reach, reach)
    return best


def at_kinks(model: nn.Sequential, converted: nn.Module, width: int, beta: float) -> float:
    """The largest difference near points where several units of the last hidden layer are where a gate is worst."""
    hidden, row, best = model[:-2], model[-1].weight.detach()[0], 0.0
    torch.manual_seed(2)
    for start in range(12):
        x = torch.rand(width, dtype=row.dtype) - 0.5
        units = (row > 0 if start % 2 else row < 0).nonzero().ravel()
        units = units[(hidden(x)[units].abs() / row[units].abs()).argsort()][: max(2, width // 4)]
        for _ in range(6):  # Newton's method: hidden is piecewise linear
            J = torch.autograd.functional.jacobian(hidden, x)[units]
            x = (x + torch.linalg.lstsq(J, 1.278 / beta - hidden(x)[units]).solution).detach()
        if x.abs().max() <= 1:
            best = max(best, float((model(x) - converted(x)).detach().abs().max()))
    return best


@pytest.mark.parametrize(
    ("activation", "width"),
    [(nn.GELU, 2), (nn.GELU, 16), (nn.ReLU, 16), (nn.Softplus, 8)],
    ids=["gelu 2", "gelu 16", "relu 16", "softplus 8"],
)
def test_deep_mlps_are_within_a_hundred_times_the_observed_difference(activation, width):
    model = trace.mlp(activation, width, 128, 128, 128, 3, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-6, box=(-1, 1))
    found = searched(model, converted, (width,))
    if activation is nn.ReLU:
        beta = float(converted[1].slopes.abs().max())
        found = max(found, at_kinks(model, converted, width, beta))
    assert report.on_box.bound is not None
    assert found <= report.on_box.bound <= 100 * found
    assert report.on_box.terms.terms[0].name == "conversion"
    assert "proven for all inputs in [-1, 1]^" in str(report)


def test_boxes_of_few_axes_are_divided_at_kinks(monkeypatch):
    model = trace.mlp(nn.LeakyReLU, 2, 48, 48, 1, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-6, box=(-1, 1))
    found = at_kinks(model, converted, 2, float(converted[1].slopes.abs().max()))
    monkeypatch.setattr("attnc.converting.on_box.MAX_PARTS", 1)
    _, whole = attnc.convert(model, eps=1e-6, box=(-1, 1))
    assert found <= report.on_box.bound <= 0.5 * whole.on_box.bound
    assert report.on_box.bound <= 100 * found
    assert report.on_box.width <= whole.on_box.width


def blocks(dtype: torch.dtype) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    feed_forward = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 6), nn.Dropout(0.1))
    first = nn.TransformerEncoderLayer(6, 2, 12, activation="gelu", norm_first=True, batch_first=True)
    last = nn.TransformerEncoderLayer(6, 2, 12, activation="relu", batch_first=True)
    rms = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8, eps=1e-5), nn.GELU(), nn.Linear(8, 3), nn.Mish())
    norm = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.PReLU(8), nn.Linear(8, 2, bias=False))
    made = {
        "residual": (nn.Sequential(Residual(feed_forward), nn.Identity(), Residual(nn.Tanh()), nn.Linear(6, 2)), (6,)),
        "rms": (rms, (6,)),
        "norm": (norm, (6,)),
        "norms first": (first, (5, 6)),
        "norms last": (last, (5, 6)),
        "encoder": (nn.TransformerEncoder(first, 2, norm=nn.LayerNorm(6), enable_nested_tensor=False), (5, 6)),
    }
    return {name: (model.to(dtype).eval(), shape) for name, (model, shape) in made.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ["residual", "rms", "norm", "norms first", "norms last", "encoder"])
def test_no_search_exceeds_the_bound_of_a_block(name, dtype):
    model, shape = blocks(dtype)[name]
    reach = 1.0
    converted, report = attnc.convert(model, eps=1e-5, box=(-reach, reach), example=torch.zeros(1, *shape, dtype=dtype))
    found = report.on_box
    seen = searched(model, converted, shape, reach, 300)
    assert 0 < seen <= (math.inf if found.terms is None else found.terms.value)
    if name == "encoder":  # norms are steep near vectors of equal entries, so that two layers are too many
        assert found.bound is None
        assert found.vacuous_at.startswith("layers.")
        assert [block.path for block in found.blocks] == ["layers.0", "layers.1"]
        assert found.blocks[0].composed == found.blocks[0].bound
        assert all(block.bound is not None for block in found.blocks) == (dtype == torch.float64)
    elif dtype == torch.float64 or name == "rms":
        assert found.bound == found.terms.value < found.width


def test_a_vacuous_bound_is_called_so():
    model, _ = blocks(torch.float32)["encoder"]
    _, report = attnc.convert(model, eps=1e-2, box=(-1e6, 1e6))
    assert report.on_box.bound is None
    assert report.on_box.vacuous_at.startswith("layers.")
    assert "no useful bound" in str(report)


def test_changed_models_are_refused_or_exceed_the_bound():
    model = trace.mlp(nn.GELU, 3, 16, 2, dtype=torch.float64)
    converted, report = attnc.convert(model, eps=1e-6, box=(-1, 1))
    assert searched(model, converted, (3,)) <= report.on_box.bound
    with torch.no_grad():
        converted[1].values += 1e-3
        converted[1].carried += 1e-3
    assert searched(model, converted, (3,)) > report.on_box.bound
    with pytest.raises(attnc.InputError, match="not those that were proved"):
        on_box(model, converted, (-1, 1))
    converted, _ = attnc.convert(model, eps=1e-6)
    with torch.no_grad():
        converted[2].weight[0, 0] += 1e-9
    with pytest.raises(attnc.InputError, match=r"2\.weight is not the same"):
        on_box(model, converted, (-1, 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Conv1d(2, 2, 1)), "rules for Linear"),
        (nn.Sequential(nn.Linear(2, 2), nn.Softsign()), "softsign"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()).half(), "float32 or float64"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(3, 2)), "takes 3 features, and 2 arrive"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)), "give example="),
    ],
)
def test_models_without_a_rule_are_refused(model, message):
    with pytest.raises(attnc.InputError, match=message):
        attnc.convert(model, eps=1e-3, box=(-1, 1))


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "tanh", "softplus", "mish", "elu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_of_gates_and_of_torch(name, dtype):
    """float32 is compared with float64. The bound in float64 is only compared with its size."""
    parameters = {"softplus": (("beta", 1.0),), "elu": (("alpha", 1.0),)}.get(name, ())
    solved = solve(KnownActivation(name, parameters), 1e-5, (dtype,))
    gate = AttentionActivation(solved)
    size = np.concatenate([np.geomspace(1e-9, 60, 4000), np.linspace(0, 8, 4000)])
    bound = propagation.gate_rounding(solved, dtype, size)
    assert (np.diff(propagation.gate_rounding(solved, dtype, np.sort(size))) >= 0).all()
    if dtype == "float64":
        assert bound.max() <= 1e-12 * 60
        return
    for sign in (1, -1):
        x = torch.tensor(sign * size, dtype=torch.float32)
        with torch.no_grad():
            for key in ("slopes", "offsets", "values", "carried"):  # the keys as float32 stores them
                getattr(gate, key).copy_(getattr(gate, key).float().double())
            exact, computed = gate(x.double()), gate(x).double()
            assert ((computed - exact).abs().numpy() <= bound).all()
            own = {"gelu": nn.GELU(), "relu": nn.ReLU(), "silu": nn.SiLU(), "tanh": nn.Tanh(), "mish": nn.Mish()}
            own |= {"softplus": nn.Softplus(), "elu": nn.ELU()}
            y = own[name](x.double())
            scale = torch.maximum(x.double().abs(), y.abs()).clamp_min(1.0)
            assert ((own[name](x).double() - y).abs() <= propagation.TORCH_ULPS / 2 * 2**-23 * scale).all()
    assert bound.max() <= 60 * 2e-5


def test_affine_forms_contain_their_members():
    rng = np.random.default_rng(0)
    x = Interval(-np.ones(5), np.full(5, 2.0))
    form = AffineVectors.around(x)
    W, V = rng.normal(size=(4, 5)), rng.normal(size=(3, 4))
    made = form.linear(W, np.ones(4)).scaled(np.array([0.5, -1.0, 2.0, 0.0])).with_noise(np.full(4, 0.1), 0.15)
    out = made.linear(V) + form.linear(V @ W)
    points = rng.uniform(x.lo, x.hi, (2000, 5))
    noise = rng.normal(size=(2000, 4))
    noise = 0.15 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    noise = np.clip(noise, -0.1, 0.1)
    inner = np.array([0.5, -1.0, 2.0, 0.0]) * (points @ W.T + 1) + noise
    values = inner @ V.T + points @ (V @ W).T
    assert out.interval.contains(values).all()
    assert (out.spread <= 1.5 * (values.max(0) - values.min(0)) / 2 * 2).all()
    assert (np.linalg.norm(values, axis=1) <= out.length).all()
    for shape in ((6, 4), (40, 50), (1, 3)):
        A = rng.normal(size=shape)
        exact = np.linalg.norm(A, 2)
        assert exact <= spectral_norm(A) <= exact * min(shape) ** (1 / 64) * (1 + 1e-9)
    assert spectral_norm(np.zeros((2, 2))) == 0


def test_the_page_is_whole_and_escapes_names():
    pytest.importorskip("jinja2")
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(2, 3))
    model.add_module("<img src=x>", nn.GELU())
    _, report = attnc.convert(model, box=(-1, 1), example=torch.linspace(-1, 1, 8).reshape(4, 2))
    page = report.html()
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x&gt;" in page
    assert "http" not in page
    assert 'class="bar"' in page
    assert "[-1, 1]^2" in page
