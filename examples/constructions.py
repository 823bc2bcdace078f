"""Prints the table of docs/constructions.md: sizes, proven bounds and observed errors in one run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import attnc

BOX = [(-3, 3)] * 2
EPS = 0.1


def cases() -> dict[str, tuple[str, str, attnc.Network]]:
    """name → (theorem, target, network)."""
    rng = np.random.default_rng(0)
    wave, clip = "sin(x)+cos(y)", attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.5, 1.5))
    sizes = [(8, 2), (8, 8), (1, 8)]
    weights, biases = [rng.normal(size=s) / 2 for s in sizes], [rng.normal(size=s[0]) / 2 for s in sizes]
    relu = attnc.ReLUNetwork(weights, biases, (-1, 1))

    def build(name: str, eps: float = EPS) -> attnc.Network:
        return attnc.compile(wave, BOX, eps, construction=name)

    def fine(name: str, text: str, box: Any) -> tuple[str, attnc.Network]:
        return f"{text}, eps 1e-6", attnc.compile(text, box, 1e-6, construction=name)

    line = [(-3, 3)]

    return {
        "`compose`": ("a head for each function and product; deep", *fine("compose", wave, BOX)),
        "`spectral_grid`": ("one soft head over a grid, its values solved", *fine("spectral_grid", wave, BOX)),
        "`graded`": ("one soft head, anchors crowded at a singularity", *fine("graded", "sqrt(x)", [(0, 1)])),
        "`binomial`": ("one soft head: a polynomial in a sigmoid", *fine("binomial", "1/(1+x**2)", line)),
        "`gates`": ("tanh, sigmoid, gelu, … on all of R", *fine("gates", "gelu(x)", [(-math.inf, math.inf)])),
        "`max_affine`": ("one head, one layer: a max-affine partition", wave, build("max_affine")),
        "`max_affine_cross`": ("the same by cross-attention to a memory", wave, build("max_affine_cross")),
        "`two_layer`": ("bumps by attention, then selection", f"{wave}, eps 0.3", build("two_layer", 0.3)),
        "`attention_softmax`": (
            "bumps by attention, then a softmax",
            f"{wave}, eps 0.3",
            build("attention_softmax", 0.3),
        ),
        "`truncated_linear`": ("one head clips: O(1/p)", "clip(x, 0, 1), eps 1e-3", attnc.compile(clip, eps=1e-3)),
        "`truncated_linear_heads`": (
            "H heads clip: O(1/(nH))",
            "clip(x, 0, 1), eps 1e-3",
            attnc.compile(clip, eps=1e-3, construction="truncated_linear_heads"),
        ),
        "`relu_network`": ("an MLP, layer by layer", "ReLU 2→8→8→1", attnc.compile(relu, eps=EPS)),
    }


def main() -> None:
    for name, (theorem, target, net) in cases().items():
        claim = net.certificate
        print(f"| {name} | {theorem} | {target} | {net.num_anchors:,} | {claim.bound:.2g} | {claim.observed:.2g} |")


if __name__ == "__main__":
    main()
