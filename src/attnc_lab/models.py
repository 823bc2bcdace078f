"""Models of the experiments on dimensions and on real tasks. Their classes can be trained in batches by `fitting`.

This module imports torch, so measurements import it only when they run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnc_lab.training import Heads, with_one


class HeadLayers(nn.Module):
    """One or two layers of single-head attention over free tokens. The first of two has as many outputs as inputs."""

    def __init__(self, d: int, num_layers: int, num_parameters: int) -> None:
        super().__init__()
        shares = [1.0] if num_layers == 1 else [0.6, 0.4]
        outputs = [*[d] * (num_layers - 1), 1]
        heads = (self._head(d + 1, out, share * num_parameters) for out, share in zip(outputs, shares, strict=True))
        self.parts = nn.ModuleList(heads)

    @staticmethod
    def _head(d_query: int, d_out: int, size: float) -> Heads:
        """Return a head with as many keys as at most `size` free numbers allow."""
        keys = int((size - 2 * d_query**2 - d_query * d_out) / (d_query + d_out))
        return Heads(d_query, keys, d_out, d_token=d_query)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(with_one(x))
        return x


class OneLayer(nn.Module):
    """One layer of single-head self-attention between affine maps of the whole sequence, as in the papers.

    There are no positional encodings. With `has_block` a feed-forward block acts on each token after the attention.
    """

    def __init__(self, num_tokens: int, width: int, d_out: int, d: int, *, has_block: bool) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.first = nn.Linear(num_tokens * width, num_tokens * d)
        self.queries, self.keys, self.values = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.block = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) if has_block else None
        self.last = nn.Linear(num_tokens * d, d_out)

    @staticmethod
    def size(num_tokens: int, width: int, d_out: int, d: int, *, has_block: bool) -> int:
        """Return the number of free numbers."""
        affine = num_tokens * d * (num_tokens * width + 1) + d_out * (num_tokens * d + 1)
        return affine + 3 * d * d + (4 * d * d + 3 * d if has_block else 0)

    @classmethod
    def largest(cls, num_tokens: int, width: int, d_out: int, size: int, *, has_block: bool) -> OneLayer:
        """Return the widest layer of at most `size` free numbers, and at most 256 channels."""
        fits = [d for d in range(1, 257) if cls.size(num_tokens, width, d_out, d, has_block=has_block) <= size]
        return cls(num_tokens, width, d_out, max(fits), has_block=has_block)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.flatten(1)).unflatten(1, (self.num_tokens, -1))
        scores = self.queries(z) @ self.keys(z).mT / z.shape[-1] ** 0.5
        z = z + torch.softmax(scores, -1) @ self.values(z)
        if self.block is not None:
            z = z + self.block(z)
        out: Tensor = self.last(z.flatten(1))
        return out
