"""Small attention models with free weights, trained on the tasks that the constructions solve.

This module imports torch, so measurements import it only when they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """Σ_h softmax(z W_Q^h (E W_K^h)ᵀ) E_v W_V^h for queries z: multi-head attention over p free tokens E.

    It is the layer of the theorems with all numbers free. In a construction E holds the anchors, and W_K contains β.
    """

    def __init__(self, d_query: int, num_keys: int, d_out: int, *, num_heads: int = 1, d_token: int = 4) -> None:
        super().__init__()
        self.W_Q = _free(num_heads, d_query, d_query)
        self.E = nn.Parameter(torch.randn(num_keys, d_token))
        self.W_K = _free(num_heads, d_token, d_query)
        self.W_V = _free(num_heads, d_token, d_out)
        self.V = nn.Parameter(torch.randn(num_heads, num_keys, d_out) / math.sqrt(num_keys))

    def scores(self, z: Tensor) -> Tensor:
        """Return the scores (heads, …, keys) of queries (…, d_query)."""
        keys = self.E @ self.W_K
        return torch.einsum("...d,hdk,hpk->h...p", z, self.W_Q, keys)

    def slopes(self) -> np.ndarray:
        """Return the slopes (keys, d_query) of the scores of the first head, in float64."""
        return (self.E @ self.W_K[0] @ self.W_Q[0].T).detach().numpy().astype(float)

    def construct(self, L: np.ndarray, values: np.ndarray, beta: float) -> None:
        """Set the weights of the theorem for one head: key β(2L, −|L|²), value f(L)."""
        d = L.shape[1]
        with torch.no_grad():
            self.W_Q[0] = torch.eye(d + 1)
            self.E[:] = torch.tensor(np.concatenate([L, (L**2).sum(axis=1, keepdims=True)], axis=1))
            self.W_K[0] = torch.diag(torch.tensor([2 * beta] * d + [-beta]))
            self.W_V.zero_()
            self.V[0, :, 0] = torch.tensor(values)

    def forward(self, z: Tensor) -> Tensor:
        values = self.E @ self.W_V + self.V
        return torch.einsum("h...p,hpo->...o", torch.softmax(self.scores(z), -1), values)


class ClippedTokens(nn.Module):
    """A model of the truncated-linear task. Token i of n becomes the query (w_i·x_i + t_i, 1) of `Heads`."""

    def __init__(self, num_tokens: int, width: int, num_keys: int, num_heads: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_tokens, width) / math.sqrt(width))
        self.t = nn.Parameter(torch.zeros(num_tokens))
        self.heads = Heads(2, num_keys, 1, num_heads=num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(with_one((torch.einsum("bnd,nd->bn", x, self.w) + self.t)[..., None]))[..., 0]


def seeded(seed: int, number: int) -> None:
    """Seed torch's random numbers for training number `number`."""
    torch.manual_seed(2**16 * seed % 2**32 + number)


def with_one(x: Tensor) -> Tensor:
    """Return (x, 1), which makes scores affine in x."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def train(
    model: nn.Module,
    batch: Callable[[], tuple[Tensor, Tensor]],
    *,
    steps: int,
    rate: float,
    optimiser: str = "adam",
    watch: Callable[[int], None] = lambda step: None,
    watch_every: int = 1,
) -> None:
    """Minimise squares on new batches.

    The learning rate falls to 0 along a cosine. Call `watch` at times and at the end.
    """
    parameters = list(model.parameters())
    chosen: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=rate)
    if optimiser == "sgd":
        chosen = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, steps)
    for step in range(steps):
        if step % watch_every == 0:
            watch(step)
        inputs, wanted = batch()
        loss = ((model(inputs) - wanted) ** 2).mean()
        chosen.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 10.0)
        chosen.step()
        schedule.step()
    watch(steps)


def _free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-2]))


class SequenceModel(nn.Module):
    """vec X → affine → multi-head attention among tokens → attention, or a softmax over features → affine → vec Y."""

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
        z = self.first(z, z, z, need_weights=False)[0]
        if self.has_softmax:
            logits = self.last(z.flatten(1))
            z = logits.shape[1] * torch.softmax(logits, dim=-1)  # the factor makes the mean 1
        else:
            z = self.last(z, z, z, need_weights=False)[0].flatten(1)
        out: Tensor = self.mix_out(z)
        return out
