"""Looks into a compiled network with TransformerLens: cache, patterns, ablation and patching by its own names.

Needs the extra `lens`: pip install -c constraints.txt -e '.[lens]'
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import attnc

EXPRESSION = "tanh(sin(x) + y)*exp(y)"
BOX = {"x": (-2, 2), "y": (-2, 2)}


def main() -> None:
    net = attnc.compile(EXPRESSION, BOX, eps=1e-6)
    model = net.to_transformer_lens()
    points = np.random.default_rng(0).uniform(-2, 2, (6, 2))
    embedded = model.embed_points(points)

    outputs, cache = model.run_with_cache(embedded)
    print(f"{EXPRESSION}: {model.cfg.n_layers} blocks, {model.cfg.n_heads} heads, {model.cfg.d_model} channels")
    print(f"largest difference from the reference: {np.abs(outputs[:, -1, 0].numpy() - net.program(points)).max():.1e}")

    print("\nThe residual stream at the query position, after each block:")
    for channel, label in enumerate(model.residual_labels):
        if label == "rest":
            break  # keys, values and flags follow
        after = [cache["resid_post", block][0, -1, channel] for block in range(model.cfg.n_layers)]
        print(f"  {label:24} {' '.join(f'{value:9.5f}' for value in after)}")

    print("\nThe pattern of each head, from the query position:")
    for block, heads in enumerate(model.head_labels):
        for number, name in enumerate(heads):
            pattern = cache["pattern", block][0, number, -1]
            top = int(pattern.argmax())
            print(f"  blocks.{block} head {number}  {name:20} {model.position_labels[top]:6} {pattern[top]:.3f}")

    print("\nMean change of the output without a head:")
    for block, heads in enumerate(model.head_labels):
        for number, name in enumerate(heads):
            changed = without_head(model, embedded, block, number)
            print(f"  {name:20} {(changed - outputs[:, -1]).abs().mean():.4f}")

    print("\nMean change of the output with a channel of the last point in all points, after the first block:")
    for label in ("x", "sin(x)", "exp(y)"):
        channel = model.residual_labels.index(label)
        changed = patched(model, embedded, 1, channel, float(cache["resid_pre", 1][-1, -1, channel]))
        print(f"  {label:8} {(changed - outputs[:, -1]).abs().mean():.4f}")


def without_head(model: Any, embedded: torch.Tensor, block: int, head: int) -> torch.Tensor:
    """The output if the head writes nothing."""

    def silence(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z[:, :, head] = 0
        return z

    return model.run_with_hooks(embedded, fwd_hooks=[(f"blocks.{block}.attn.hook_z", silence)])[:, -1]


def patched(model: Any, embedded: torch.Tensor, block: int, channel: int, value: float) -> torch.Tensor:
    """The output if a channel of the query position has this value before a block."""

    def put(state: torch.Tensor, hook: Any) -> torch.Tensor:
        state[:, -1, channel] = value
        return state

    return model.run_with_hooks(embedded, fwd_hooks=[(f"blocks.{block}.hook_resid_pre", put)])[:, -1]


if __name__ == "__main__":
    main()
