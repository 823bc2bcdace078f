"""Adversaries of stored weights: the function they attack is the program's, and none is weaker than chance."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc_lab.experiments.perturbation import clip, partition
from attnc_lab.experiments.rate_in_p import SOFT

torch = pytest.importorskip("torch")

from attnc_lab.attacking import PARTS, Attack, Weights, attack  # noqa: E402  (imports torch)

NETWORKS = {
    "clip": clip(SOFT),
    "partition": partition(),
    "composed": attnc.compile("exp(sin(x)*y)", [(-1, 1)] * 2, 1e-2, construction="compose"),
}


def points_of(net: attnc.Network, count: int = 40) -> np.ndarray:
    return np.random.default_rng(1).uniform(net.box.lo, net.box.hi, (count, net.box.d))


@pytest.mark.parametrize("name", NETWORKS)
def test_unchanged_weights_give_the_outputs_of_the_program(name: str) -> None:
    net, weights = NETWORKS[name], Weights.of(NETWORKS[name].program)
    x = points_of(net)
    found = weights.outputs(torch.zeros(len(weights.values), dtype=torch.float64), torch.tensor(x)).numpy()
    assert np.abs(found - net.program(x).ravel()).max() < 1e-11
    assert set(weights.parts) <= set(PARTS)
    assert sum(float(weights.of_part(part).sum()) for part in PARTS) == len(weights.values)


@pytest.mark.parametrize("name", NETWORKS)
def test_slopes_are_those_of_the_outputs(name: str) -> None:
    net, weights = NETWORKS[name], Weights.of(NETWORKS[name].program)
    x, size = torch.tensor(points_of(net, 5)), 1e-7
    direction = torch.tensor(np.random.default_rng(2).uniform(-1, 1, len(weights.values)))
    moved = weights.outputs(size * direction, x) - weights.outputs(-size * direction, x)
    slopes = weights.slopes(x)
    assert torch.allclose(moved / (2 * size), slopes @ direction, rtol=1e-4, atol=1e-5 * float(slopes.abs().max()))


def attacked(name: str, part: str, size: float) -> tuple[Attack, float]:
    """Attack a part. Return the largest changes and errors, and the change that the first order predicts."""
    net = NETWORKS[name]
    weights, x = Weights.of(net.program), points_of(net)
    target = attnc.as_target(str(net.expression), net.box.as_dict())
    at, wanted = torch.tensor(x), torch.tensor(target(x).reshape(-1))
    slopes = weights.slopes(at)
    predicted = float((slopes * weights.of_part(part)).abs().sum(1).max())
    return attack(weights, part, size, at, wanted, slopes, 3), size * predicted


@pytest.mark.parametrize("name", NETWORKS)
def test_the_adversary_reaches_the_first_order(name: str) -> None:
    found, predicted = attacked(name, "all", 1e-8)
    assert found.change["gradient"] == pytest.approx(predicted, rel=1e-2)
    assert found.change["random"] <= 1.01 * predicted  # the first order is the worst case


@pytest.mark.parametrize("part", ["all", "W_K"])
@pytest.mark.parametrize("size", [1e-5, 1e-2])
def test_no_adversary_is_weaker_than_chance(part: str, size: float) -> None:
    for name in NETWORKS:
        found, _ = attacked(name, part, size)
        for of in (found.change, found.error):
            assert of["gradient"] == max(of.values())
