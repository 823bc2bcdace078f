"""ReLU networks as attention: the composed bound is the tolerance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc import ReLUNetwork
from attnc.constructions import relu_network
from attnc.ir import Attention
from constructions.errors import reference_error


def random_network(sizes, seed, scale=1.0, box=(-1, 1)) -> ReLUNetwork:
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [scale * rng.normal(size=(o, i)) / np.sqrt(i) for i, o in pairs]
    return ReLUNetwork(weights, [rng.normal(size=o) * 0.3 for _, o in pairs], box)


def error_at(program, target, count=500):
    points = target.box.lo + np.random.default_rng(1).random((count, target.box.d)) * target.box.widths
    return reference_error(program, target, points)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    p=st.integers(2, 60),
    beta=st.sampled_from([0.5, 2.72, 20.0, 1e4, 1e7]),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_the_bound_holds(sizes, seed, p, beta, dtype):
    target = random_network(sizes, seed)
    built = relu_network(target, num_anchors=p, beta=beta, dtype=dtype)
    assert error_at(built.program, target) <= built.bound.value


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_hidden_unit_is_tight(dtype):
    target = ReLUNetwork([[[1.0]], [[2.0]]], [[0.0], [0.5]], (-1, 1))
    built = relu_network(target, num_anchors=12, dtype=dtype)
    error = error_at(built.program, target, 5000)
    assert error <= built.bound.value <= 1.2 * error


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 8, 1), (4, 32, 32, 2), (3, 5, 5, 5, 2)])
def test_compile_meets_eps(sizes):
    target = random_network(sizes, 0)
    net = attnc.compile(target, eps=0.2)
    assert net.construction == "relu_network"
    assert net.certificate.observed <= net.certificate.bound <= 0.2
    layers = [layer for layer in net.program.layers if isinstance(layer, Attention)]
    assert len(layers) == len(sizes) - 2
    assert all(len(layer.heads) == 1 for layer in layers)


def test_smaller_eps_takes_more_anchors():
    target = random_network((2, 6, 1), 3)
    coarse, fine = (attnc.compile(target, eps=eps).num_anchors for eps in (0.01, 0.0001))
    assert 50 < fine / coarse < 200


def test_units_that_are_never_positive_are_silent():
    target = ReLUNetwork([[[1.0], [1.0]], [[1.0, 1.0]]], [[-5.0, 0.0], [0.0]], (-1, 1))
    built = relu_network(target, eps=0.01)
    assert error_at(built.program, target) <= built.bound.value <= 0.01


def test_a_network_without_hidden_layers_is_affine():
    target = ReLUNetwork([[[1.0, 2.0]]], [[3.0]], (-1, 1))
    net = attnc.compile(target, eps=1e-6)
    assert net.num_anchors == 0
    assert net.certificate.bound < 1e-13
