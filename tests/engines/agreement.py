"""Programs and networks on which every engine and export must compute what the reference computes."""

from __future__ import annotations

import functools

import numpy as np

import attnc
from attnc.ir import Program
from ir.random_programs import lookup_program

rng = np.random.default_rng(0)
LINEAR = attnc.TruncatedLinear(rng.normal(size=(3, 2)), 0.1, -1, 1, box=(-1, 1))
RELU = attnc.ReLUNetwork(
    [rng.normal(size=(5, 2)), rng.normal(size=(4, 5)), rng.normal(size=(2, 4))],
    [rng.normal(size=5), rng.normal(size=4), rng.normal(size=2)],
    (-1, 1),
)
SEQUENCE = attnc.SequenceTarget(lambda X: X.mean(axis=1, keepdims=True) + 0 * X, 2, 1, (-1, 1), lipschitz=1.0)
PAIR = attnc.SequenceTarget(lambda X, Y: X + Y.mean(axis=1, keepdims=True), (2, 1), (1, 1), (-1, 1), lipschitz=2.0)
NETWORKS = {
    "max_affine": (attnc.as_target("sin(x) + cos(y)", [(-1, 1)] * 2), 0.3, "auto"),
    "max_affine, sequence": (SEQUENCE, 0.5, "auto"),
    "max_affine_cross": (PAIR, 0.8, "auto"),
    "truncated_linear": (LINEAR, 0.05, "auto"),
    "truncated_linear_heads": (LINEAR, 0.05, "truncated_linear_heads"),
    "relu_network": (RELU, 0.2, "auto"),
    "compose": (attnc.as_target("max(sin(3*x), y**2 - 0.5) + exp(sin(x)*y)", [(-1, 1)] * 2), 1e-3, "compose"),
}
"""The target, eps and construction of each network."""


@functools.cache
def network(name: str, dtype: str = "float64") -> attnc.Network:
    target, eps, construction = NETWORKS[name]
    return attnc.compile(target, eps=eps, construction=construction, dtype=dtype)


def small_program(dtype=np.float64, beta: float = 4.0, num_anchors: int = 9) -> Program:
    anchors = np.linspace(-1, 1, num_anchors)
    return lookup_program(anchors, np.cos(anchors), beta, dtype)
