"""A compiled network as a ground truth for interpretability. Run `python examples/ground_truth.py`; it needs torch.

1. Activation patching finds the circuit, and the exact answer stands beside it.
2. Heads are switched off.
3. The network is trained on another function, and comes back with its bound for the old one, and one for the new.
4. The trained heads are compared with the constructed ones.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import attnc

EXPRESSION, BOX = "sin(x) + cos(2*y)", {"x": (-2, 2), "y": (-1, 1)}
OTHER = "1.3*sin(x) + cos(2*y)"


def train(net: attnc.Network, steps: int) -> torch.nn.Module:
    """Train the weights of the network towards another function."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the arrays are small
    module = net.to_torch(form="unfolded", trainable=True)
    lo, hi = (torch.tensor([ends[i] for ends in BOX.values()], dtype=torch.float64) for i in (0, 1))
    optimiser = torch.optim.Adam(module.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        x = lo + torch.rand(256, 2, dtype=torch.float64) * (hi - lo)
        optimiser.zero_grad()
        (module(x) - (1.3 * x[:, 0].sin() + (2 * x[:, 1]).cos())).square().mean().backward()
        optimiser.step()
        schedule.step()
    return module


def main(steps: int = 400) -> dict[str, float]:
    net = attnc.compile(EXPRESSION, BOX, eps=1e-4, construction="compose")
    rng = np.random.default_rng(0)
    clean, corrupted = rng.uniform(-1, 1, (2, 50, 2))
    print(net, "\n")
    traced = attnc.trace(net, clean, corrupted)
    print(traced, "\n")
    heads = {site.holds: site.name.removesuffix(".z") for site in traced.sites if site.is_head}
    for holds, head in heads.items():
        for how in ("zero", "mean", "resample"):
            change = np.abs(net.ablate(head, how=how)(clean) - net(clean)).mean()
            print(f"{head} ({holds}) by {how:<9} moves the output by {change:.3f} in the mean")
    module = train(net, steps)
    bounds = {}
    for expression in (EXPRESSION, OTHER):
        try:
            bounds[expression] = net.with_weights(module, target=attnc.as_target(expression, BOX)).certificate.bound
        except attnc.BoundNotMet as refusal:
            bounds[expression] = refusal.bound
        print(f"\ntrained, the network is within {bounds[expression]:.3g} of {expression}: proven")
    print()
    print(attnc.compare(module, net, clean))
    return bounds


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
