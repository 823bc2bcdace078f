"""Wrong arguments and targets of every construction: the message names what is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnc
from attnc.constructions import (
    attention_softmax,
    binomial,
    compose,
    graded,
    max_affine,
    max_affine_cross,
    relu_network,
    spectral_grid,
    table_grid,
    table_scattered,
    truncated_linear,
    truncated_linear_heads,
    two_layer,
)
from attnc.constructions.beyond.binomial import binomial_keys
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.errors import target_of

LINE, ABS = target_of("x", (-1, 1)), target_of("abs(x)", (-1, 1))
PLANE, KINKED = target_of("x*y", *[(-1, 1)] * 2), target_of("abs(x)+y", *[(-1, 1)] * 2)
CODE, JUMP = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)])), attnc.as_target("sign(x)", [(-1, 1)], p=2)
LIPSCHITZ = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
TWO_INPUTS = SequenceTarget(lambda X, Y: X + Y, (1, 1), (1, 1), (-1, 1), 2.0)
CLIP, TABLE = attnc.TruncatedLinear([1.0]), attnc.TableTarget(np.linspace(0, 1, 5), np.linspace(0, 1, 5))
RELU = attnc.ReLUNetwork([[[1.0], [-1.0]], [[1.0, 1.0]]], [[0.0, 0.0], [0.0]], box=(-1, 1))
BUMPS = (two_layer, attention_softmax)
GRIDS = (max_affine, *BUMPS)
ADAPTIVE = (max_affine, max_affine_cross)
CELLS = [  # on LIPSCHITZ
    (GRIDS, {"eps": None}, "either eps or points_per_axis"),
    (GRIDS, {"eps": 0.1, "points_per_axis": 3}, "either eps or points_per_axis"),
    (GRIDS, {"points_per_axis": 0}, "points_per_axis"),
    (GRIDS, {"points_per_axis": (2, 3)}, "points_per_axis"),
    (GRIDS, {"points_per_axis": 3_000_000}, "max_anchors"),
    (GRIDS, {"points_per_axis": 3, "beta": -1.0}, "beta"),
    (GRIDS, {"points_per_axis": 3, "beta": math.nan}, "beta"),
    (GRIDS, {"points_per_axis": 3, "norm": 0.5}, "norm"),
    ((max_affine, two_layer), {"points_per_axis": 3, "margin": 0.0}, "margin"),
    (BUMPS, {"points_per_axis": 3, "heads": 0}, "heads"),
    (BUMPS, {"points_per_axis": 3, "heads": 2.0}, "heads"),
    (BUMPS, {"points_per_axis": 3, "num_step_anchors": 1}, "num_step_anchors"),
    (BUMPS, {"points_per_axis": 3, "num_step_anchors": 10**6}, "num_step_anchors"),
    (ADAPTIVE, {"eps": 0.1, "centres": "voronoi"}, "'grid' or 'adaptive'"),
    (ADAPTIVE, {"centres": "adaptive", "points_per_axis": 3}, "needs eps"),
    (ADAPTIVE, {"centres": "adaptive", "eps": 0.1, "points_per_axis": 3}, "either eps or points_per_axis"),
    (ADAPTIVE, {"centres": "adaptive", "eps": 0.1, "beta": 10.0}, "beta"),
    (ADAPTIVE, {"centres": "adaptive", "eps": 0.1, "norm": 2.0}, "norm must be 'inf'"),
    (ADAPTIVE, {"centres": "adaptive", "eps": 0.1, "max_bytes": 10}, "even one cell"),
]
OTHERS = [
    (max_affine, CODE, {"eps": 0.1, "centres": "adaptive"}, InputError, "Lipschitz"),
    (max_affine, target_of("floor(x)", (-1, 1)), {"eps": 0.1, "centres": "adaptive"}, DomainError, "jumps"),
    *((build, TWO_INPUTS, {"eps": 0.5}, InputError, "max_affine_cross") for build in GRIDS),
    (graded, ABS, {}, InputError, "give either eps or num_anchors"),
    (graded, ABS, {"eps": 0.1, "num_anchors": 3}, InputError, "give either eps or num_anchors"),
    (graded, ABS, {"eps": -1.0}, InputError, "eps must be"),
    (graded, ABS, {"num_anchors": 0}, InputError, "whole number ≥ 1"),
    (graded, ABS, {"eps": 0.1, "max_value": 0.5}, InputError, "max_value must be"),
    (graded, ABS, {"num_anchors": 20, "max_anchors": 10}, InputError, "max_anchors"),
    (graded, target_of("1e39*abs(x)", (-1, 1)), {"eps": 1e37, "dtype": "float32"}, InputError, "float32"),
    (graded, KINKED, {"eps": 0.1}, InputError, r"one variable.*has 2.*attnc.plan"),
    (graded, target_of("sign(x)", (-1, 1)), {"eps": 0.1}, DomainError, "jump"),
    (binomial, KINKED, {"eps": 0.1}, InputError, r"one variable.*attnc.plan"),
    (binomial, LINE, {}, InputError, "either"),
    (spectral_grid, PLANE, {}, InputError, "either eps or num_anchors"),
    (spectral_grid, PLANE, {"eps": 0.1, "num_anchors": 5}, InputError, "either eps or num_anchors"),
    (spectral_grid, PLANE, {"num_anchors": (5, 5, 5)}, InputError, "for 2 variables"),
    (spectral_grid, PLANE, {"eps": 0.1, "max_value": 0.5}, InputError, "max_value"),
    (spectral_grid, PLANE, {"num_anchors": (5, 0)}, InputError, "whole number ≥ 1"),
    (spectral_grid, target_of("a+b+c+d+f+g*h", *[(0, 1)] * 7), {"eps": 0.1}, InputError, "1 to 6 variables"),
    (compose, CODE, {"eps": 0.1}, InputError, "structure"),
    (compose, JUMP, {"eps": 0.1}, InputError, "continuous"),
    (truncated_linear, CLIP, {}, InputError, "eps or num_anchors"),
    (truncated_linear, CLIP, {"num_anchors": 1}, InputError, "num_anchors"),
    (truncated_linear, CLIP, {"num_anchors": 10**9}, InputError, "max_anchors"),
    (truncated_linear, CLIP, {"num_anchors": 9, "beta": 0.0}, InputError, "beta"),
    (truncated_linear, CLIP, {"eps": 1e-9}, BoundNotMet, "anchors"),
    (truncated_linear, LINE, {"eps": 0.1}, InputError, "TruncatedLinear"),
    (truncated_linear_heads, CLIP, {"num_heads": 2}, InputError, "num_tokens"),
    (truncated_linear_heads, CLIP, {"num_heads": 2, "num_tokens": 2}, InputError, "num_tokens"),
    (truncated_linear_heads, CLIP, {"num_heads": 1, "num_tokens": 3}, InputError, "one anchor"),
    (truncated_linear_heads, CLIP, {"num_heads": 2, "num_tokens": 9, "sentinels": 0}, InputError, "sentinels"),
    (truncated_linear_heads, CLIP, {"num_heads": 2, "num_tokens": 9, "beta": -1.0}, InputError, "beta"),
    (relu_network, RELU, {}, InputError, "eps or num_anchors"),
    (relu_network, RELU, {"num_anchors": 1}, InputError, "≥ 2"),
    (relu_network, RELU, {"num_anchors": (5, 5)}, InputError, "1 whole"),
    (relu_network, RELU, {"eps": 1e-10}, BoundNotMet, "max_anchors"),
    (relu_network, LINE, {"eps": 0.1}, InputError, "ReLUNetwork"),
    (table_grid, LINE, {"eps": 0.1}, InputError, r"table_grid takes a target made by attnc\.TableTarget"),
    (table_grid, TABLE, {"eps": 0.1, "max_value": math.nan}, InputError, "max_value must be a number ≥ 1"),
    (table_scattered, TABLE, {"eps": 0.1, "max_value": 0.5}, InputError, "max_value must be a number ≥ 1"),
    (binomial_keys, np.exp, {"lo": 1.0, "hi": 0.0, "num_keys": 4}, InputError, "lo < hi"),
    (binomial_keys, np.exp, {"lo": 0.0, "hi": 1.0, "num_keys": 4, "delta": -1.0}, InputError, "delta"),
    (binomial_keys, np.exp, {"lo": 0.0, "hi": np.inf, "num_keys": 4, "delta": 0.5}, InputError, "limits"),
    (attnc.TruncatedLinear, [[1.0, np.nan]], {}, InputError, "W"),
    (attnc.TruncatedLinear, [], {}, InputError, "W"),
    (attnc.TruncatedLinear, [1.0], {"t": [1.0, 2.0]}, InputError, "t has 2"),
    (attnc.TruncatedLinear, [1.0], {"a": 1.0, "b": 1.0}, InputError, "a < b"),
    (attnc.TruncatedLinear, [1.0], {"b": np.inf}, InputError, "a < b"),
    (attnc.TruncatedLinear, [1.0, 2.0], {"box": [(0, 1)] * 3}, InputError, "box"),
    (attnc.ReLUNetwork, [], {"biases": [], "box": (-1, 1)}, InputError, "as many biases"),
    (attnc.ReLUNetwork, [[[1.0]]], {"biases": [], "box": (-1, 1)}, InputError, "as many biases"),
    (attnc.ReLUNetwork, [[[1.0]], [[1.0, 2.0]]], {"biases": [[0.0], [0.0]], "box": (-1, 1)}, InputError, "layer 1"),
    (attnc.ReLUNetwork, [[[1.0]]], {"biases": [[0.0, 1.0]], "box": (-1, 1)}, InputError, "layer 0"),
    (attnc.ReLUNetwork, [[[np.inf]]], {"biases": [[0.0]], "box": (-1, 1)}, InputError, "not finite"),
]


@pytest.mark.parametrize(
    ("build", "subject", "arguments", "error", "words"),
    [*((build, LIPSCHITZ, given, InputError, words) for builds, given, words in CELLS for build in builds), *OTHERS],
)
def test_what_is_wrong_is_named(build, subject, arguments, error, words):
    with pytest.raises(error, match=words), np.errstate(over="ignore"):
        build(subject, **arguments)
