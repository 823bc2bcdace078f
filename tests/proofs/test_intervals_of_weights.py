"""A bound for all weights within a radius: it holds for each of them, it is not vacuous, and it names its limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import attnc
from attnc import InputError


def networks():
    return {
        "solved": attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-3, construction="spectral_grid"),
        "selected": attnc.compile("sin(x)", {"x": (-3, 3)}, 0.1, construction="max_affine"),
        "plane": attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, 0.5, construction="max_affine"),
        "gate": attnc.compile("clip(x,0,1)", {"x": (-0.2, 1.2)}, 1e-3, construction="gates"),
        "deep": attnc.compile("exp(sin(x)*y)", [(-1, 1)] * 2, 1e-2, construction="compose"),
        "passing": attnc.compile("sin(exp(x)*y)+z", [(-1, 1)] * 3, 1e-2, construction="compose"),
        "three layers": attnc.compile("tanh(exp(sin(x)*y)-x)", [(-1, 1)] * 2, 1e-2, construction="compose"),
    }


NETWORKS = networks()


def moved(program, size, rng):
    """Every stored number times 1 ± size, with a random sign for each."""

    def change(array):
        return array * (1 + size * rng.choice([-1.0, 1.0], array.shape))

    def of_layer(layer):
        if isinstance(layer, attnc.Affine):
            parts = {name: getattr(layer, name) for name in ("weight", "constant")}
            return replace(layer, **{name: replace(part, values=change(part.values)) for name, part in parts.items()})
        heads = (
            replace(head, **{name: change(array) for name, array in head.matrices.items()}) for head in layer.heads
        )
        return replace(layer, heads=tuple(heads))

    return replace(program, layers=tuple(map(of_layer, program.layers)))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-4])
def test_every_network_within_the_radius_keeps_the_bound(name, size):
    net, rng = NETWORKS[name], np.random.default_rng(int(1e9 * size))
    bound, target = net.bound(weights_within=size), attnc.as_target(net.expression, net.box.as_dict())
    assert bound is not None
    points = rng.uniform(net.box.lo, net.box.hi, (800, net.box.d))
    wanted, exact = target(points).ravel(), net.program(points).ravel()
    outputs = [moved(net.program, size, rng)(points).ravel() for _ in range(12)]
    largest = max(np.abs(found - wanted).max() for found in outputs)
    assert largest <= bound
    # Random signs reach a tenth of the worst case: a vacuous bound would be far above.
    change = max(np.abs(found - exact).max() for found in outputs)
    assert bound <= 1.1 * net.certificate.bound + 60 * change


def test_bounds_grow_with_the_radius():
    for net in NETWORKS.values():
        bounds = [net.bound(weights_within=size) for size in (1e-12, 1e-6, 1e-4, 1e-3)]
        assert None not in bounds
        assert bounds[0] <= 1.05 * net.certificate.bound
        assert all(first <= 1.05 * second for first, second in itertools.pairwise(bounds))


def test_parts_of_the_box_and_the_nominal_bound():
    net = NETWORKS["solved"]
    assert net.bound({"x": (0, 0.5)}, weights_within=1e-5) < net.bound(weights_within=1e-5)
    assert net.bound(weights_within=0.0) == net.bound() == net.certificate.bound


def test_channels_that_are_passed_on_change_on_the_way():
    """A weight that passes z on, and one that reads it: the output moves by about 2·size·|z|."""
    net, size = NETWORKS["passing"], 1e-4
    assert net.program.num_attention_layers > 1
    names = [term.name for term in net.certificate.terms]
    assert net.bound(weights_within=size) > net.certificate.bound + size, names


def test_networks_of_code_have_none():
    code = attnc.compile(lambda x: np.clip(x[:, 0], 0, 1), [(-0.5, 1.5)], eps=0.1, lipschitz=1.0)
    assert code.bound(weights_within=1e-6) is None


@pytest.mark.parametrize("wrong", [-1e-9, 1.0, float("nan")])
def test_shares_out_of_range(wrong):
    with pytest.raises(InputError, match="weights_within"):
        NETWORKS["solved"].bound(weights_within=wrong)
