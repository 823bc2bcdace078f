"""A small softmax-attention model trained on in-context linear regression, beside the constructed programs.

The task is that of Garg et al. (2208.01066): prompts of 40 examples (x_i, y_i) in 20 dimensions, y = w·x + noise,
w ~ N(0, I), and a query x. All are asked for w·x on the same fresh prompts. The trained model has `--layers` layers of
softmax attention (residual, layer norm before each, no feed-forward). Its training begins with prompts that use 4
dimensions, and adds 2 after every 300 steps, as Garg et al. do with other numbers. A constructed program has
T gradient steps, a layer each, or Newton turns of two layers, and weights that were computed, not trained.
Three tables:

1. The error of the answers. The last row is what no method can beat: the posterior mean, which is ridge regression.
2. Layer by layer: the share of the posterior mean w* that is there. For programs it is that of their iterate w_t. For
   the trained model a linear probe reads w* off the states of its tokens.
3. A program of as many gradient steps as a start: its weights are trained on, from the construction.

    python examples/incontext_training.py [--steps 4000] [--layers 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import Task, descent_program, run_recorded
from attnc.incontext.differences import Differences, Sizes, choose
from attnc.incontext.newton import NewtonTask
from attnc.incontext.prompt import Prompt
from attnc.ir.program import Program

FEATURES, EXAMPLES, NOISE = 20, 40, 0.1
WIDTH, HEADS, BATCH, ASKED = 64, 4, 64, 512
LARGEST, SMALLEST = 160.0, 0.5
"""Bounds on the eigenvalues of XᵀX + noise² for nearly all prompts of 40 Gaussian examples in 20 dimensions."""
REACH, LONGEST = 100.0, 9.0
"""Bounds of the residuals, and of the norm of an example."""
UNIT, SPREAD = 12.0, 80.0
"""For Newton turns columns and targets are divided by these, so that their norms are at most 1."""
PROBED, RECORDED = 1500, 32
"""Number of prompts for a probe, and for the iterates of programs."""
COARSE = Differences(1, 2.0**-8)
"""The heads of a program that is trained on. Two heads far apart cancel little, so that small changes do little."""
ON_STEPS, ON_RATE = 150, 3e-4
FIRST, MORE, EACH = 4, 2, 300
"""Training begins with this many dimensions, and adds MORE after EACH steps, up to all of them."""
RATE, WARMING = 1e-3, 200
"""The step size of Adam, and the number of steps in which it grows to that."""


class Prompts(NamedTuple):
    X: np.ndarray  # (batch, examples, features)
    y: np.ndarray  # (batch, examples)
    asked: np.ndarray  # (batch, features)
    answer: np.ndarray  # (batch,), without noise


def prompts(rng: np.random.Generator, batch: int, used: int = FEATURES) -> Prompts:
    """Prompts whose inputs are zero beyond the first `used` dimensions."""
    w = rng.normal(size=(batch, FEATURES))
    X = rng.normal(size=(batch, EXAMPLES, FEATURES))
    X[:, :, used:] = 0.0
    y = np.einsum("bnd,bd->bn", X, w) + NOISE * rng.normal(size=(batch, EXAMPLES))
    asked = rng.normal(size=(batch, FEATURES))
    asked[:, used:] = 0.0
    return Prompts(X, y, asked, (asked * w).sum(axis=1))


def descent_task(steps: int, method: str, heads: Differences | None = None) -> Task:
    """The gradient steps for every prompt."""
    schedule = Schedule(method, steps, LARGEST, SMALLEST)
    reach = REACH * schedule.overshoot
    chosen = heads or choose(Sizes(EXAMPLES, FEATURES + 1, LONGEST, reach, 3 * reach), 4, "float64")
    return Task(Prompt(EXAMPLES, FEATURES), schedule, chosen, reach, (NOISE**2,) * FEATURES)


def constructed(steps: int, method: str) -> Program:
    """One program for every prompt: it has sizes, norm bounds and step sizes."""
    return descent_program([descent_task(steps, method)])


def answers(program: Program, asked: Prompts) -> np.ndarray:
    w = program(np.zeros((len(asked.X), FEATURES)), as_prompts(asked))
    return (w * asked.asked).sum(axis=1)


def as_prompts(asked: Prompts) -> np.ndarray:
    return np.concatenate([asked.X, np.ones((len(asked.X), EXAMPLES, 1)), asked.y[:, :, None]], axis=2)


def iterates(method: str, layers: int, asked: Prompts) -> np.ndarray:
    """The weights of a program after every step, for each prompt: (prompts, steps + 1, features)."""
    start = np.zeros(FEATURES)
    if method != "newton":
        task = descent_task(layers, method)
        program = descent_program([task])
        return np.stack([run_recorded(program, [start, p], start, task.iterate)[1] for p in as_prompts(asked)])
    turns = NewtonTask(Prompt(EXAMPLES + FEATURES, FEATURES), condition=4.0**7)
    program, penalty = turns.program(), np.full(FEATURES, (NOISE / UNIT) ** 2)
    found = []
    for X, y in zip(asked.X, asked.y, strict=True):
        tokens = turns.tokens(X / UNIT, y / SPREAD, penalty)
        found.append(run_recorded(program, [start, tokens], start, turns.iterate, turns.token)[1])
    return np.stack(found) * SPREAD / UNIT


def posterior_weights(asked: Prompts) -> np.ndarray:
    gram = np.einsum("bnd,bne->bde", asked.X, asked.X) + NOISE**2 * np.eye(FEATURES)
    return np.linalg.solve(gram, np.einsum("bnd,bn->bd", asked.X, asked.y)[..., None])[..., 0]


def posterior_means(asked: Prompts) -> np.ndarray:
    return (posterior_weights(asked) * asked.asked).sum(axis=1)


class Trained(NamedTuple):
    answer: Callable[[Prompts], np.ndarray]
    states: Callable[[Prompts], np.ndarray]  # (layers + 1, prompts, numbers): the query's token, and the mean token


def trained(steps: int, layers: int, seed: int) -> Trained:
    """A model of prompts: embed, attend `layers` times, read the query's token."""
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(FEATURES + 2, WIDTH)
            self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(layers))
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
            self.read = nn.Linear(WIDTH, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.read(self.path(tokens)[-1][:, -1])[:, 0]

        def path(self, tokens: torch.Tensor) -> list[torch.Tensor]:
            states = [self.embed(tokens)]
            for layer, norm in zip(self.layers, self.norms, strict=True):
                z = norm(states[-1])
                states.append(states[-1] + layer(z, z, z, need_weights=False)[0])
            return states

    def as_tokens(asked: Prompts) -> torch.Tensor:
        batch = len(asked.X)
        examples = np.concatenate([asked.X, asked.y[:, :, None], np.ones((batch, EXAMPLES, 1))], axis=2)
        query = np.concatenate([asked.asked, np.zeros((batch, 2))], axis=1)[:, None]
        return torch.tensor(np.concatenate([examples, query], axis=1), dtype=torch.float32)

    model, rng = Model(), np.random.default_rng(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(steps):
        batch = prompts(rng, BATCH, min(FEATURES, FIRST + MORE * (step // EACH)))
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMING)
        loss = ((model(as_tokens(batch)) - torch.tensor(batch.answer, dtype=torch.float32)) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    def answer(asked: Prompts) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(as_tokens(asked)).numpy(), np.float64)

    def states(asked: Prompts) -> np.ndarray:
        with torch.no_grad():
            path = model.path(as_tokens(asked))
        return np.stack([torch.cat([one[:, -1], one.mean(dim=1)], dim=1).numpy() for one in path]).astype(np.float64)

    return Trained(answer, states)


def explained(found: np.ndarray, wanted: np.ndarray) -> float:
    """The share of the variance of the weights that is found. It is negative if they are worse than 0."""
    return float(1 - ((found - wanted) ** 2).sum() / (wanted**2).sum())


def probes(model: Trained, rng: np.random.Generator) -> list[float]:
    """The share of the posterior mean w* that a linear probe reads off the states after every layer."""
    fitted, tested = prompts(rng, PROBED), prompts(rng, ASKED)
    wanted, found = posterior_weights(fitted), []
    for A, B in zip(model.states(fitted), model.states(tested), strict=True):
        A, B = (np.column_stack([one, np.ones(len(one))]) for one in (A, B))
        probe = np.linalg.solve(A.T @ A + 1e-3 * np.eye(A.shape[1]), A.T @ wanted)
        found.append(explained(B @ probe, posterior_weights(tested)))
    return found


def layer_by_layer(model: Trained, layers: int, seed: int) -> dict[str, list[float]]:
    """The share of w* after every layer, for the trained model and for programs."""
    rng = np.random.default_rng(seed + 2 * 10**6)
    found = {"trained (probe)": probes(model, rng)}
    asked = prompts(rng, RECORDED)
    wanted = posterior_weights(asked)
    for method in ("plain", "chebyshev", "newton"):
        path = iterates(method, layers, asked)
        each = 2 if method == "newton" else 1  # layers of a step
        found[method] = [explained(path[:, layer // each], wanted) for layer in range(layers + 1)]
    return found


def trained_on(layers: int, steps: int, seed: int) -> tuple[float, float]:
    """The error of a constructed program of `layers` gradient steps, before and after its weights are trained."""
    import torch

    from attnc.engines.torch_layers import LayeredNetwork

    module = LayeredNetwork(descent_program([descent_task(layers, "plain", COARSE)]))
    module.requires_grad_(True)
    start = [value.detach().clone() for value in module.parameters()]
    changes = [torch.zeros_like(value) for value in start]  # relative ones, because weights are of many sizes
    optimiser = torch.optim.Adam(changes, lr=ON_RATE)
    rng = np.random.default_rng(seed)

    def errors(asked: Prompts) -> Any:
        w = module(torch.zeros(len(asked.X), FEATURES, dtype=torch.float64), torch.tensor(as_prompts(asked)))
        return ((w * torch.tensor(asked.asked)).sum(dim=1) - torch.tensor(asked.answer)) ** 2

    fresh = prompts(np.random.default_rng(seed + 10**6), ASKED)
    with torch.no_grad():
        before = float(errors(fresh).mean())
    for _ in range(steps):
        module.zero_grad()
        errors(prompts(rng, BATCH)).mean().backward()
        with torch.no_grad():
            for value, begun, change in zip(module.parameters(), start, changes, strict=True):
                change.grad = None if value.grad is None else value.grad * begun
            optimiser.step()
            for value, begun, change in zip(module.parameters(), start, changes, strict=True):
                value.copy_(begun * (1 + change))
    with torch.no_grad():
        return before, float(errors(fresh).mean())


def table(model: Trained, steps: int, layers: int, seed: int) -> list[tuple[str, float]]:
    """(method, mean squared error of its answers) on the same prompts."""
    asked = prompts(np.random.default_rng(seed + 10**6), ASKED)

    def error(found: np.ndarray) -> float:
        return float(((found - asked.answer) ** 2).mean())

    rows = [("answer 0", error(np.zeros(ASKED)))]
    rows += [(f"trained, {layers} layers of attention, {steps} steps", error(model.answer(asked)))]
    for T, method in ((layers, "plain"), (layers, "chebyshev"), (16, "chebyshev"), (64, "chebyshev")):
        rows.append((f"constructed, {T} layers of attention ({method})", error(answers(constructed(T, method), asked))))
    few = Prompts(*(part[:RECORDED] for part in asked))
    path = iterates("newton", layers, few)
    for turns in (layers // 2, path.shape[1] - 1):
        off = ((path[:, turns] * few.asked).sum(axis=1) - few.answer) ** 2
        rows.append((f"constructed, {2 * turns} layers (Newton–Schulz), {RECORDED} prompts", float(off.mean())))
    return [*rows, ("ridge, the posterior mean", error(posterior_means(asked)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 4000), ("layers", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    begun = time.perf_counter()
    model = trained(given.steps, given.layers, given.seed)
    print(f"{given.steps} steps of Adam from seed {given.seed} took {time.perf_counter() - begun:.0f} s")
    print(f"mean squared error of w·x on {ASKED} prompts of {EXAMPLES} examples in {FEATURES} dimensions")
    for what, error in table(model, given.steps, given.layers, given.seed):
        print(f"  {what:58s} {error:.3g}")
    print("share of the posterior mean after 0, 1, … layers")
    for name, shares in layer_by_layer(model, given.layers, given.seed).items():
        print(f"  {name:20s} {' '.join(f'{share:6.3f}' for share in shares)}")
    before, after = trained_on(given.layers, ON_STEPS, given.seed)
    print(
        f"a program of {given.layers} gradient steps: {before:.3g} as constructed, {after:.3g} after it is trained on"
    )


if __name__ == "__main__":
    main()
