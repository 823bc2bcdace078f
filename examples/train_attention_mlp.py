"""Training after converting. Run `python examples/train_attention_mlp.py`; it needs the extra torch.

1. A small gated network (SwiGLU) is trained with torch's own SiLU, converted, compared, and trained on: gradients flow
   through the attention.
2. A network of attention alone, built by attnc with hidden units as tokens, is trained end to end: its keys, queries
   and values are the parameters, and no activation is anywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import attnc


class SwiGLU(nn.Module):
    """down(silu(gate(x))·up(x)), between an embedding and a read-out."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(2, width), nn.Linear(width, 1)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.read(h + self.down(nn.functional.silu(self.gate(h)) * self.up(h)))


def data(seed: int, count: int = 512) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4 - 2
    return x, torch.sin(2 * x[:, :1]) * torch.exp(-(x[:, 1:] ** 2))


def train(
    model: nn.Module, parameters: list[Tensor], steps: int, seed: int = 0, lr: float = 5e-3
) -> tuple[float, float]:
    """The mean squared error before and after."""
    x, y = data(seed)
    optimiser = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(x).reshape(y.shape), y)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def gated(steps: int = 600) -> dict[str, float]:
    torch.manual_seed(0)
    model = SwiGLU().double()
    _, trained = train(model, list(model.parameters()), steps)
    x, _ = data(1)
    converted, report = attnc.convert(model, eps=1e-9, example=x)
    gradients = []
    for each in (model, converted):
        each.zero_grad()
        each(x).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in each.parameters()]))
    before, after = train(converted, list(converted.parameters()), steps)
    return {
        "loss of the original": trained,
        "loss of the converted": before,
        "loss after fine-tuning it": after,
        "largest difference of outputs": report.end_to_end.hidden,
        "largest difference of gradients": float((gradients[0] - gradients[1]).abs().max()),
    }


def attention_only(steps: int = 600) -> dict[str, float]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(2, 24), nn.GELU(), nn.Linear(24, 1)).double()
    network = attnc.mlp_network(mlp, (-2.0, 2.0), eps=1e-3)
    model = network.to_torch()
    parameters = [buffer.requires_grad_() for buffer in model.buffers() if buffer.is_floating_point()]
    points = np.random.default_rng(0).uniform(-2, 2, (100, 2))
    agrees = np.abs(network(points).ravel() - mlp(torch.tensor(points)).detach().numpy().ravel()).max()
    before, after = train(model, parameters, steps)
    return {
        "difference from the MLP it was built from": float(agrees),
        "trained numbers": sum(p.numel() for p in parameters),
        "loss before": before,
        "loss after": after,
    }


def main() -> None:
    for title, found in (("SwiGLU, converted", gated()), ("attention alone, trained", attention_only())):
        print(title)
        for name, value in found.items():
            print(f"  {name:<44}{value:.3g}")


if __name__ == "__main__":
    main()
