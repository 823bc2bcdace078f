"""A small softmax-attention model trained on in-context linear regression, beside the constructed programs.

Prompts: n examples (x_i, y_i) with y = w·x + noise, w ~ N(0, I), and a query x. Both are asked for w·x on the same
fresh prompts. The trained model has `--layers` layers of softmax attention (residual, no feed-forward); a constructed
program has T gradient steps, a layer each, and weights that were computed, not trained. The last row is what no method
can beat: ridge with the noise's variance for a penalty, the posterior mean.

    python examples/incontext_training.py [--steps 3000] [--layers 4] [--seed 0]
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.prompt import Prompt
from attnc.ir.program import Program

FEATURES, EXAMPLES, NOISE = 4, 16, 0.1
WIDTH, HEADS, BATCH, ASKED = 32, 4, 128, 512
LARGEST, SMALLEST = 60.0, 0.5
"""Bounds on the eigenvalues of XᵀX + noise² for nearly all prompts of 16 Gaussian examples in 4 dimensions."""


class Prompts(NamedTuple):
    X: np.ndarray  # (batch, examples, features)
    y: np.ndarray  # (batch, examples)
    asked: np.ndarray  # (batch, features)
    answer: np.ndarray  # (batch,), without noise


def prompts(rng: np.random.Generator, batch: int) -> Prompts:
    w = rng.normal(size=(batch, FEATURES))
    X = rng.normal(size=(batch, EXAMPLES, FEATURES))
    y = np.einsum("bnd,bd->bn", X, w) + NOISE * rng.normal(size=(batch, EXAMPLES))
    asked = rng.normal(size=(batch, FEATURES))
    return Prompts(X, y, asked, (asked * w).sum(axis=1))


def constructed(steps: int, method: str) -> Program:
    """One program for every prompt: it has sizes, norm bounds and step sizes."""
    prompt = Prompt(EXAMPLES, FEATURES)
    schedule = Schedule(method, steps, LARGEST, SMALLEST)
    reach = 40.0 * schedule.overshoot
    sizes = Sizes(EXAMPLES, FEATURES + 1, 6.0, reach, 3 * reach)
    task = Task(prompt, schedule, choose(sizes, 4, "float64"), reach, (NOISE**2,) * FEATURES)
    return descent_program([task])


def answers(program: Program, asked: Prompts) -> np.ndarray:
    batch = len(asked.X)
    tokens = np.concatenate([asked.X, np.ones((batch, EXAMPLES, 1)), asked.y[:, :, None]], axis=2)
    w = program(np.zeros((batch, FEATURES)), tokens)
    return (w * asked.asked).sum(axis=1)


def posterior_means(asked: Prompts) -> np.ndarray:
    gram = np.einsum("bnd,bne->bde", asked.X, asked.X) + NOISE**2 * np.eye(FEATURES)
    w = np.linalg.solve(gram, np.einsum("bnd,bn->bd", asked.X, asked.y)[..., None])[..., 0]
    return (w * asked.asked).sum(axis=1)


def trained(steps: int, layers: int, seed: int):
    """A function of prompts: embed, attend `layers` times, read the query's token."""
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(FEATURES + 2, WIDTH)
            self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(layers))
            self.read = nn.Linear(WIDTH, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            state = self.embed(tokens)
            for layer in self.layers:
                state = state + layer(state, state, state, need_weights=False)[0]
            return self.read(state[:, -1])[:, 0]

    def as_tokens(asked: Prompts) -> torch.Tensor:
        batch = len(asked.X)
        examples = np.concatenate([asked.X, asked.y[:, :, None], np.ones((batch, EXAMPLES, 1))], axis=2)
        query = np.concatenate([asked.asked, np.zeros((batch, 2))], axis=1)[:, None]
        return torch.tensor(np.concatenate([examples, query], axis=1), dtype=torch.float32)

    model, rng = Model(), np.random.default_rng(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = prompts(rng, BATCH)
        loss = ((model(as_tokens(batch)) - torch.tensor(batch.answer, dtype=torch.float32)) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    def answer(asked: Prompts) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(as_tokens(asked)).numpy(), np.float64)

    return answer


def table(steps: int, layers: int, seed: int) -> list[tuple[str, float]]:
    """(method, mean squared error of its answers) on the same prompts."""
    asked = prompts(np.random.default_rng(seed + 10**6), ASKED)

    def error(found: np.ndarray) -> float:
        return float(((found - asked.answer) ** 2).mean())

    rows = [("answer 0", error(np.zeros(ASKED)))]
    rows += [(f"trained, {layers} layers of attention, {steps} steps", error(trained(steps, layers, seed)(asked)))]
    for T, method in ((layers, "plain"), (layers, "chebyshev"), (16, "chebyshev"), (64, "chebyshev")):
        rows.append((f"constructed, {T} layers of attention ({method})", error(answers(constructed(T, method), asked))))
    return [*rows, ("ridge, the posterior mean", error(posterior_means(asked)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 3000), ("layers", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(f"mean squared error of w·x on {ASKED} prompts of {EXAMPLES} examples in {FEATURES} dimensions")
    for what, error in table(given.steps, given.layers, given.seed):
        print(f"  {what:52s} {error:.3g}")


if __name__ == "__main__":
    main()
