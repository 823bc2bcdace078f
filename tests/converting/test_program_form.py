"""The Program of an MLP: the same keys as the drop-in modules, the same numbers, and a certificate."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

import attnc  # noqa: E402
from attnc.ir.rounding import evaluation_error  # noqa: E402
from attnc_checker import check  # noqa: E402
from converting import trace  # noqa: E402

mlp = functools.partial(trace.mlp, dtype=torch.float64)


def both_forms(module: nn.Sequential, network: attnc.Network, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points, and the outputs of both forms there."""
    converted, _ = attnc.convert(module, eps=eps)
    points = np.random.default_rng(0).uniform(network.box.lo, network.box.hi, (50, network.box.d))
    with torch.no_grad():
        dropped_in = converted(torch.tensor(points, dtype=module[0].weight.dtype)).numpy()
    return points, network(points).reshape(dropped_in.shape), dropped_in


@pytest.mark.parametrize(
    ("module", "eps"),
    [
        (mlp(nn.GELU, 4, 6, 3), 1e-6),
        (mlp(nn.ReLU, 4, 6, 5, 2), 1e-9),
        (mlp(nn.Tanh, 4, 6, 3, dtype=torch.float32), 1e-6),
        (mlp(lambda: nn.PReLU(6), 4, 6, 3), 1e-6),
        (nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.SiLU(), nn.Dropout(0.5))), 1e-6),
    ],
    ids=["gelu", "deep relu", "float32", "prelu", "nested"],
)
def test_both_forms_agree(module, eps):
    network = attnc.mlp_network(module, (-2.0, 2.0), eps)
    points, by_program, dropped_in = both_forms(module.eval(), network, eps)
    allowed = evaluation_error(network.program, [points]).reshape(by_program.shape)
    assert (np.abs(by_program - dropped_in) <= 2 * allowed).all()
    assert allowed.max() <= (1e-4 if network.dtype == "float32" else 1e-11)
    with torch.no_grad():
        original = module.double()(torch.tensor(points)).numpy()
    assert (np.abs(by_program - original) <= network.parameters["error"] + allowed).all()


def test_hidden_units_are_tokens_behind_a_mask():
    network = attnc.mlp_network(mlp(nn.GELU, 4, 5, 2), (-1.0, 1.0), 1e-6)
    kinds = [type(layer).__name__ for layer in network.program.layers]
    assert kinds == ["Affine", "Attention", "Affine"]
    (head,) = network.program.layers[1].heads
    keys = network.num_anchors
    assert keys in (8, 10)  # on a lattice: one exponential for all
    assert len(head.mask.key_segments) == 5 * keys
    assert (head.mask.num_visible() == keys).all()
    assert network.program.layers[0].channels == ("z", "one", "slope", "offset", "value")


@pytest.mark.parametrize(
    ("activation", "widths", "eps"),
    [(nn.GELU, (2, 4, 1), 1e-6), (nn.SiLU, (1, 5, 2), 1e-6), (nn.Softplus, (1, 3, 1), 1e-5)],
    ids=["gelu", "silu", "softplus"],
)
def test_small_ones_are_proved_from_their_weights(activation, widths, eps, tmp_path):
    module = mlp(activation, *widths)
    network = attnc.mlp_network(module, (-1.0, 1.0), eps)
    claim = network.certificate
    assert claim.method == "proof"
    assert claim.complete
    points = np.random.default_rng(1).uniform(-1, 1, (5000, widths[0]))
    with torch.no_grad():
        reference = module(torch.tensor(points)).numpy()
    error = np.abs(network(points).reshape(reference.shape) - reference).max()
    assert error <= claim.bound
    assert claim.bound <= max(3 * claim.observed, 1e-9)
    network.save(tmp_path / "net")
    assert check(tmp_path / "net", processes=1).proved


def test_what_is_not_in_a_row_is_refused():
    for module, message in (
        (nn.Linear(2, 2), r"nn\.Sequential"),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "behind each"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), "follow one another"),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU()), "LayerNorm"),
        (nn.Sequential(nn.Linear(2, 2), nn.Softsign()), "softsign"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()).half(), "float64 or float32"),
    ):
        with pytest.raises(attnc.InputError, match=message):
            attnc.mlp_network(module, (-1.0, 1.0), 1e-6)


def test_the_block_of_a_transformer_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu").double().eval()
    network = attnc.mlp_network(layer, (-1.0, 1.0), 1e-6)
    points = np.random.default_rng(0).uniform(-1, 1, (20, 4))
    with torch.no_grad():
        x = torch.tensor(points)
        reference = layer.linear2(torch.nn.functional.gelu(layer.linear1(x))).numpy()
    assert np.abs(network(points) - reference).max() <= network.parameters["error"] + 1e-12
