"""Trainable models: set to a construction they compute what it computes, and they have the sizes that are asked for."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc_lab.measuring import lattice, middles

torch = pytest.importorskip("torch")

from attnc_lab.models import ClippedTokens, HeadLayers, Heads, OneLayer  # noqa: E402  (imports torch)


def number(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_a_head_can_be_the_partition_of_the_theorem() -> None:
    target = attnc.as_target("sin(x)+cos(y)", [(-3, 3)] * 2)
    built = attnc.constructions.max_affine(target, points_per_axis=8, beta=3.0)
    L = lattice(middles(-3, 3, 8), 2)
    head = Heads(2, 64, d_token=3).double().construct(L, np.sin(L[:, 0]) + np.cos(L[:, 1]), 3.0 / (6 / 8) ** 2)
    x = np.random.default_rng(0).uniform(-3, 3, (200, 2))
    with torch.no_grad():
        found = head(torch.tensor(x)).numpy()[:, 0]
    assert np.abs(found - built.program(x).ravel()).max() < 1e-9
    scores = 2 * 3.0 / (6 / 8) ** 2 * L
    assert np.abs(head.slopes() - scores).max() < 1e-9


@pytest.mark.parametrize("num_heads", [1, 4])
def test_heads_can_share_a_clip(num_heads: int) -> None:
    """Each head clips to its own part of [−1, 1]. Between its anchors it is as exact as one head of these anchors."""
    head = Heads(1, 12, num_heads=num_heads, d_token=3).double().construct_clip(-1, 1, 2.72)
    x = np.linspace(-1.5, 1.5, 2001)
    with torch.no_grad():
        found = head(torch.tensor(x[:, None])).numpy()[:, 0]
    spacing = 2 / num_heads / 11
    assert np.abs(found - np.clip(x, -1, 1)).max() <= 0.5 * spacing
    assert abs(found[0] + 1) < 1e-6 > abs(found[-1] - 1)


def test_tokens_are_clipped_one_by_one() -> None:
    model = ClippedTokens(3, 2, 16, num_heads=2).double()
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        whole, alone = model(x), model(torch.cat([x[:, :2], 9 * x[:, 2:]], dim=1))
    assert whole.shape == (5, 3)
    assert torch.equal(whole[:, :2], alone[:, :2])


@pytest.mark.parametrize("d", [2, 10])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_layers_have_the_size_that_is_asked_for(d: int, num_layers: int) -> None:
    model = HeadLayers(d, num_layers, 2000)
    assert 0.9 * 2000 < number(model) <= 2000
    assert model(torch.randn(7, d)).shape == (7, 1)


@pytest.mark.parametrize("has_block", [False, True])
def test_one_layer_is_the_widest_that_fits(has_block: bool) -> None:
    model = OneLayer.largest(8, 1, 3, 2400, has_block=has_block)
    assert 0.7 * 2400 < number(model) <= 2400
    assert model(torch.randn(5, 8, 1)).shape == (5, 3)
