"""A physical law inside a transformer block. Run `python examples/physics_in_transformer.py`.

Tokens are noisy measurements of a damped pendulum at successive times: its angle θ and its velocity ω. A block attends
to the past, estimates the present state, and predicts the next one. The law of motion is not learned: it is a layer,
θ″ = −sin θ − 0.2·ω|ω|, with a proven error, and gradients flow through it to the attention. Beside it stands the same
block with a feed-forward network in place of the law.

Both see states of |θ| ≤ 1 in training. The law holds on its whole box, so the block with the law also predicts swings
that are twice as wide, and runs freely from there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import attnc.nn

STEP = 0.1
"""The time between two tokens, in units of the period over 2π."""
LENGTH, NOISE = 12, 0.05
"""Tokens of a sequence, and the standard deviation of the noise of a measurement."""
LAW = "-sin(a) - 0.2*w*abs(w)"
BOX = {"a": (-3.2, 3.2), "w": (-3.5, 3.5)}


class Block(nn.Module):
    """(batch, tokens, 2) → predictions of the next state for each token."""

    def __init__(self, law: nn.Module | None, width: int = 16) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(2 + 4, width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.correct = nn.Linear(width, 2)
        nn.init.zeros_(self.correct.weight)
        nn.init.zeros_(self.correct.bias)
        self.law = law
        self.feed_forward = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1)) if law is None else None

    def acceleration(self, state: Tensor) -> Tensor:
        if self.law is not None:
            return self.law(state)
        assert self.feed_forward is not None
        return self.feed_forward(state)[..., 0]

    def forward(self, measured: Tensor) -> Tensor:
        tokens = measured.shape[1]
        age = torch.arange(tokens, dtype=measured.dtype)[:, None] * STEP
        position = torch.cat([torch.sin(age), torch.cos(age), torch.sin(2 * age), torch.cos(2 * age)], dim=1)
        h = self.embed(torch.cat([measured, position.expand(len(measured), -1, -1)], dim=-1))
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        h = h + self.attention(h, h, h, attn_mask=future, need_weights=False)[0]
        return self.step(measured + self.correct(h))

    def step(self, state: Tensor) -> Tensor:
        """Two half steps of the midpoint rule, by the law."""
        for _ in range(2):
            middle = state + STEP / 4 * self.motion(state)
            state = state + STEP / 2 * self.motion(middle)
        return state

    def motion(self, state: Tensor) -> Tensor:
        return torch.stack([state[..., 1], self.acceleration(state)], dim=-1)


def moved(state: Tensor, parts: int = 20) -> Tensor:
    """Return the true states one step later."""
    for _ in range(parts):
        a, w = state.unbind(1)
        state = state + STEP / parts * torch.stack([w, -torch.sin(a) - 0.2 * w * w.abs()], dim=1)
    return state


def swings(largest: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Measured states, and true ones one step later, of pendulums released at angles up to `largest`."""
    generator = torch.Generator().manual_seed(seed)
    angle = (2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1) * largest
    state, states = torch.stack([angle, torch.zeros_like(angle)], dim=1), []
    for _ in range(LENGTH + 1):
        states.append(state)
        state = moved(state)
    true = torch.stack(states, dim=1)
    noise = NOISE * torch.randn(true.shape, generator=generator, dtype=torch.float64)
    return (true + noise)[:, :-1].float(), true[:, 1:].float()


def trained(law: nn.Module | None, steps: int) -> Block:
    torch.manual_seed(0)
    block, (measured, following) = Block(law), swings(1.0, 64, seed=0)
    optimiser = torch.optim.Adam(block.parameters(), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(block(measured), following)
        loss.backward()
        optimiser.step()
    return block.eval()


def free_run(block: Block, steps: int = 30) -> float:
    """Return the largest error of some steps from a release at 2 rad, by the block's own law, without measurements."""
    with torch.no_grad():
        run = torch.tensor([[2.0, 0.0]])
        exact = run.double()
        for _ in range(steps):
            run, exact = block.step(run), moved(exact, parts=200)
        return float((run - exact).abs().max())


def compared(steps: int = 200) -> dict[str, float]:
    """Return root mean squared errors of both blocks, on swings as in training and on wider ones, and of free runs."""
    law = attnc.nn.Function(LAW, BOX, 1e-3, dtype="float32")
    found = {"proven error of the law": law.certificate.bound or math.inf}
    for name, block in (("with the law", trained(law, steps)), ("with a network", trained(None, steps))):
        for width, largest in (("as in training", 1.0), ("twice as wide", 2.0)):
            measured, following = swings(largest, 64, seed=1)
            with torch.no_grad():
                error = nn.functional.mse_loss(block(measured), following).sqrt()
            found[f"{name}, swings {width}"] = float(error)
        found[f"{name}, 30 steps from 2 rad"] = free_run(block)
    return found


def main() -> None:
    for name, value in compared().items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
