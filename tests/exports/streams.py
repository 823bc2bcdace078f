"""Networks of all forms that transformer blocks can have, for the tests with and without TransformerLens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import attnc

SQUARE = {"x": (-1, 1), "y": (-1, 1)}
CASES: dict[str, tuple[Any, ...]] = {
    "one stage": ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, {}),
    "values that carry inputs": ("sin(x*y)+abs(x)", SQUARE, 1e-4, {}),
    "values that carry heads": ("tanh(sin(x)+y)*exp(y)", SQUARE, 1e-4, {}),
    "three stages in float32": ("max(x,y)*sin(x)/(2+y)", SQUARE, 1e-3, {"dtype": "float32"}),
    "two outputs": ("sin(x)*y, exp(x) - y", SQUARE, 1e-4, {}),
    "all of R": ("gelu(x)", {"x": (-math.inf, math.inf)}, 1e-4, {}),
    "max_affine": ("sin(x)", {"x": (0, 1)}, 1e-2, {"construction": "max_affine"}),
    "several queries and a softmax": ("abs(x)", {"x": (-1, 1)}, 0.5, {"construction": "attention_softmax"}),
    "several queries": ("abs(x)", {"x": (-1, 1)}, 0.2, {"construction": "two_layer"}),
    "a memory": ("sin(x)", {"x": (-1, 1)}, 1e-1, {"construction": "max_affine_cross"}),
    "a grid": ("exp(sin(x)*y)", SQUARE, 1e-2, {"construction": "spectral_grid"}),
}


def compiled(name: str) -> attnc.Network:
    expression, box, eps, chosen = CASES[name]
    return attnc.compile(expression, box, eps, **chosen)


def points_of(net: attnc.Network, count: int = 20) -> np.ndarray:
    lo, hi = np.maximum(net.box.lo, -20), np.minimum(net.box.hi, 20)
    return np.random.default_rng(0).uniform(lo, hi, (count, len(net.variables))).astype(net.dtype)
