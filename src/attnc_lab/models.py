"""Small models with free weights, for the tasks that the constructions solve. `fitting` trains them in batches.

This module imports torch, so measurements import it only when they run.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """Σ_h softmax(β_h (x, 1) W_Q^h (E W_K^h)ᵀ)(E W_V^h + V^h): multi-head attention over p free tokens E.

    It is the layer of the theorems with all numbers free. The logarithm of β is a number of its own, because a step of
    an optimiser then changes β by a factor. A model may keep β, or everything but β, fixed.
    """

    def __init__(self, d: int, num_keys: int, d_out: int = 1, *, num_heads: int = 1, d_token: int = 4) -> None:
        super().__init__()
        self.W_Q = _free(num_heads, d + 1, d + 1)
        self.E = nn.Parameter(torch.randn(num_keys, d_token))
        self.W_K = _free(num_heads, d_token, d + 1)
        self.W_V = _free(num_heads, d_token, d_out)
        self.V = nn.Parameter(torch.randn(num_heads, num_keys, d_out) / math.sqrt(num_keys))
        self.log_beta = nn.Parameter(torch.zeros(num_heads))

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores (heads, …, keys) of inputs (…, d)."""
        keys = self.E @ self.W_K
        queries = torch.einsum("...d,hdk->h...k", with_one(x), self.W_Q * torch.exp(self.log_beta)[:, None, None])
        return torch.einsum("h...k,hpk->h...p", queries, keys)

    def slopes(self) -> np.ndarray:
        """Return the slopes (keys, d) of the scores of the first head."""
        beta = torch.exp(self.log_beta[0])
        return (beta * self.E @ self.W_K[0] @ self.W_Q[0].T)[:, :-1].detach().numpy().astype(float)

    def norms(self) -> float:
        """Return |W_Q|·|W_K| of the first head. β is part of W_Q."""
        return float((self.W_Q[0].norm() * torch.exp(self.log_beta[0]) * self.W_K[0].norm()).detach())

    def forward(self, x: Tensor) -> Tensor:
        values = self.E @ self.W_V + self.V
        return torch.einsum("h...p,hpo->...o", torch.softmax(self.scores(x), -1), values)

    def construct(self, L: np.ndarray, values: np.ndarray, beta: float) -> Heads:
        """Set the weights of the theorem for one head: tokens (L, |L|²), keys (2L, −|L|²), values f(L)."""
        d = L.shape[1]
        with torch.no_grad():
            self.W_Q[0] = torch.eye(d + 1)
            self.E[:] = torch.tensor(np.concatenate([L, (L**2).sum(axis=1, keepdims=True)], axis=1))
            self.W_K[0] = torch.diag(torch.tensor([2.0] * d + [-1.0]))
            self.W_V.zero_()
            self.V[0, :, 0] = torch.tensor(values)
            self.log_beta[0] = math.log(beta)
        return self

    def construct_clip(self, a: float, b: float, softness: float) -> Heads:
        """Set the weights of heads that share a clip to [a, b]: head h clips to its own part, with its own anchors.

        `softness` is βΔ², Δ the distance of the anchors of a head. Tokens are (1, ℓ, ℓ²), where ℓ is the place of an
        anchor within the part of its head, and c_h is the beginning of that part: the key of c_h + ℓ is affine in them.
        """
        num_heads, p = self.V.shape[:2]
        part = (b - a) / num_heads
        places, starts = np.linspace(0, part, p), a + part * np.arange(num_heads)
        with torch.no_grad():
            self.E[:] = torch.tensor(np.stack([np.ones(p), places, places**2], axis=1))
            self.W_V.zero_()
            for h, c in enumerate(starts):
                self.W_Q[h] = torch.eye(2)
                self.W_K[h] = torch.tensor([[2 * c, -(c**2)], [2.0, -2 * c], [0.0, -1.0]])
                self.V[h, :, 0] = torch.tensor(places + (a if h == 0 else 0.0))
            self.log_beta[:] = math.log(softness / (part / (p - 1)) ** 2)
        return self


class ClippedTokens(nn.Module):
    """A model of the truncated-linear task. Token i of n becomes the input w_i·x_i + t_i of `Heads`."""

    def __init__(self, num_tokens: int, width: int, num_keys: int, num_heads: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_tokens, width) / math.sqrt(width))
        self.t = nn.Parameter(torch.zeros(num_tokens))
        self.heads = Heads(1, num_keys, num_heads=num_heads, d_token=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads((torch.einsum("...nd,nd->...n", x, self.w) + self.t)[..., None])[..., 0]


def with_one(x: Tensor) -> Tensor:
    """Return (x, 1), which makes scores affine in x."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-2]))


class SequenceModel(nn.Module):
    """vec X → affine → multi-head attention among tokens → attention, or a softmax over features → affine → vec Y.

    Each attention adds to its input, as in transformers: without these residual connections training is far worse.
    """

    def __init__(
        self, num_tokens: int, width: int, *, has_softmax: bool, d_model: int = 32, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.num_tokens, self.has_softmax = num_tokens, has_softmax
        size, state = num_tokens * width, num_tokens * d_model
        self.mix_in = nn.Linear(size, state)
        self.first = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.last: nn.Module = (
            nn.Linear(state, 4 * size) if has_softmax else nn.MultiheadAttention(d_model, 1, batch_first=True)
        )
        self.mix_out = nn.Linear(4 * size if has_softmax else state, size)

    def forward(self, x: Tensor) -> Tensor:
        z = self.mix_in(x).reshape(len(x), self.num_tokens, -1)
        z = z + self.first(z, z, z, need_weights=False)[0]
        if self.has_softmax:
            logits = self.last(z.flatten(1))
            z = logits.shape[1] * torch.softmax(logits, dim=-1)  # the factor makes the mean 1
        else:
            z = (z + self.last(z, z, z, need_weights=False)[0]).flatten(1)
        out: Tensor = self.mix_out(z)
        return out


class HeadLayers(nn.Module):
    """One or two layers of single-head attention over free tokens. The first of two has as many outputs as inputs."""

    def __init__(self, d: int, num_layers: int, num_parameters: int) -> None:
        super().__init__()
        shares = [1.0] if num_layers == 1 else [0.6, 0.4]
        outputs = [*[d] * (num_layers - 1), 1]
        heads = (self._head(d, out, share * num_parameters) for out, share in zip(outputs, shares, strict=True))
        self.parts = nn.ModuleList(heads)

    @staticmethod
    def _head(d: int, d_out: int, size: float) -> Heads:
        """Return a head with as many keys as at most `size` free numbers allow."""
        fixed = 2 * (d + 1) ** 2 + (d + 1) * d_out + 1  # W_Q, W_K, W_V, log β
        return Heads(d, int((size - fixed) / (d + 1 + d_out)), d_out, d_token=d + 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
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
