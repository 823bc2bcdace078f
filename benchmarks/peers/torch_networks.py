"""A trained MLP, a trained attention layer, and attnc's own head evaluated as dense attention by torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from bench_functions import Function
from protocol import Fitted, Job, serve
from torch import nn

HIDDEN, LEARNED_KEYS = 64, 64
"""Units per hidden layer, and keys. With 1,024 keys the trained head was six times worse than with 64."""
NUM_TRAINED = 10_000
"""Training points: twice as many do not lower the error of a network with 4,417 parameters."""
ADAM_SHARE = 0.4
"""Share of the time for Adam. L-BFGS has the rest: alone it stops in poor minima, after Adam it gains a digit."""
SCORES_PER_BLOCK = 2**22
"""Scores of a block of dense attention: 32 MiB of float64. All points at once would need gigabytes."""


class Head(nn.Module):
    """One head over learned keys: slopes, offsets and values are all trained."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.scores, self.values = nn.Linear(d, LEARNED_KEYS), nn.Linear(LEARNED_KEYS, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(torch.softmax(3 * self.scores(x), dim=-1))


def fit(job: Job, target: Function) -> Iterator[Fitted]:
    torch.set_default_dtype(torch.float64)
    d = len(target.box)
    yield from dense(job, target)
    torch.manual_seed(0)
    layers = [nn.Linear(d, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)]
    yield trained("torch, trained MLP", nn.Sequential(*layers), job, target)
    torch.manual_seed(0)
    yield trained("torch, trained attention layer", Head(d), job, target)


def dense(job: Job, target: Function) -> Iterator[Fitted]:
    """Yield the single heads that attnc left, evaluated by scaled_dot_product_attention."""
    for path in sorted(Path(job.folder).glob("head_*.npz"), key=lambda path: -float(path.stem.removeprefix("head_"))):
        with np.load(path, allow_pickle=False) as stored:
            keys = torch.tensor(np.concatenate([stored["slopes"], stored["offsets"][:, None]], axis=1))
            values, size, built = torch.tensor(stored["values"]), int(stored["size"]), float(stored["built"])
        step = max(1, SCORES_PER_BLOCK // len(keys))

        @torch.no_grad()
        def evaluate(
            points: np.ndarray, keys: torch.Tensor = keys, values: torch.Tensor = values, step: int = step
        ) -> np.ndarray:
            queries = torch.cat([torch.as_tensor(points), torch.ones(len(points), 1)], dim=1)
            attend = nn.functional.scaled_dot_product_attention
            return torch.cat(
                [attend(block[None], keys[None], values[None], scale=1.0)[0] for block in queries.split(step)]
            ).numpy()

        eps = float(path.stem.removeprefix("head_"))
        yield Fitted(
            "torch, dense attention (SDPA)", eps, size, built, evaluate, torch.get_num_threads(), keys=len(keys)
        )


def trained(method: str, model: nn.Module, job: Job, target: Function) -> Fitted:
    """Train on random points, for the time that the job gives: Adam, then L-BFGS. Keep the weights of least loss."""
    lo, hi = target.ends
    points = target.sample(NUM_TRAINED, seed=2)

    def scaled(points: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(2 * (points - lo) / (hi - lo) - 1)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small products are slower with more
    start = time.perf_counter()
    x, y = scaled(points), torch.as_tensor(target(points))[:, None]
    mean, spread = y.mean(), y.std()
    y = (y - mean) / spread
    adam, rng = torch.optim.Adam(model.parameters(), lr=3e-3), np.random.default_rng(0)
    while (share := (time.perf_counter() - start) / job.seconds) < ADAM_SHARE:
        adam.param_groups[0]["lr"] = 3e-3 * max(0.01, 1 - share / ADAM_SHARE)
        chosen = torch.as_tensor(rng.integers(0, len(x), 1024))
        adam.zero_grad()
        ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
        adam.step()
    newton = torch.optim.LBFGS(model.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        newton.zero_grad()
        found = ((model(x) - y) ** 2).mean()
        found.backward()
        return found

    least, kept = float("inf"), {name: value.clone() for name, value in model.state_dict().items()}
    while time.perf_counter() - start < job.seconds:
        before = float(newton.step(loss).detach())
        if not before < least:  # diverged, or no progress
            break
        with torch.no_grad():
            now = float(((model(x) - y) ** 2).mean())
        if now < before:
            least, kept = before, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept)
    built = time.perf_counter() - start
    torch.set_num_threads(threads)

    @torch.no_grad()
    def evaluate(points: np.ndarray) -> np.ndarray:
        return (model(scaled(points)) * spread + mean).numpy()

    size = sum(each.numel() for each in model.parameters())
    keys = LEARNED_KEYS if isinstance(model, Head) else None
    return Fitted(method, None, size, built, evaluate, threads, keys=keys)


if __name__ == "__main__":
    serve(fit)
