"""Fair training of small models: a search of learning rates, several seeds, float64, and second-order steps at the end.

All seeds and learning rates are trained at once, in one batched tensor. This module imports torch, so measurements
import it only when they run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc_lab.experiment import Row

Batch = tuple[Tensor, Tensor]
"""Inputs and wanted outputs."""
Draw = Callable[[tuple[int, int], torch.Generator], Batch]
"""Draws a batch. The leading axes of both tensors are the given shape: runs, and points of each run."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps the outputs of one run and the wanted outputs to a number."""
SEARCH_SHARE = 0.25
"""The share of the steps that every learning rate gets in the search. The best one then starts again with all steps."""
WARM_UP = 0.05
"""The share of the steps in which the learning rate rises from 0."""
LARGEST_GRADIENT = 10.0
"""The norm to which a longer gradient of a run is shortened."""
DECAY_1, DECAY_2, TINY = 0.9, 0.999, 1e-8
"""Adam's constants, as its authors chose them. The first is also the momentum of plain gradient descent."""
DAMPING, EASIER, HARDER = 1e-3, 0.3, 4.0
"""Damping of second-order steps, relative to the diagonal: the first one, and its factors after success and failure."""
MAX_DAMPING = 1e8
"""The search for a second-order step ends at this damping: such steps are too short to matter."""


@dataclass(frozen=True)
class Budget:
    """How long to train: steps of Adam, seeds, learning rates to choose from, points per step, second-order steps."""

    steps: int
    seeds: int = 5
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1)
    points: int = 256
    second_order: int = 0
    second_order_points: int = 1000
    is_sgd: bool = False
    """Whether to use plain gradient descent with momentum instead of Adam."""


@dataclass(frozen=True)
class Fitted:
    """Trained models, one for each seed, with their losses on held-out points, and the learning rate of all."""

    models: list[Any]
    losses: np.ndarray
    rate: float
    searched: dict[float, float]
    """The median loss of every learning rate in the search."""
    budget: Budget

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.models[0].parameters())

    def row(self, trial: int) -> Row:
        """Return the facts of one seed's training: its number, steps, second-order steps, rate, and held-out loss."""
        effort = {"trial": trial, "steps": self.budget.steps, "second_order": self.budget.second_order}
        return {**effort, "rate": self.rate, "loss": self.losses[trial], "weights": self.num_parameters}


def mean_square(found: Tensor, wanted: Tensor) -> Tensor:
    return ((found - wanted) ** 2).mean()


def fit(
    make: Callable[[], nn.Module],
    draw: Draw,
    held_out: Batch,
    budget: Budget,
    *,
    seed: int,
    loss: Loss = mean_square,
    dtype: torch.dtype = torch.float64,
    only: tuple[str, ...] = (),
    watch: Callable[[int, list[Any]], None] | None = None,
    num_watched: int = 20,
) -> Fitted:
    """Train the models that `make` returns with every seed, at the learning rate that is best in a search.

    Every seed has its own start and its own batches. A run ends with the weights that had the lowest loss on held-out
    points, of those at some times in the training. A rate is judged by the median of these losses over the seeds, so
    tests need points of their own. The learning rate rises, then falls to 0 along a cosine. Second-order steps
    (Levenberg and Marquardt) follow if the budget has any. They minimise squares, whatever the loss is, and are kept
    where they lower the loss on held-out points. `only` names the parameters that are trained, if not all are: then
    there are no second-order steps. `watch` sees the models of the final training now and then.
    """
    starts = []
    for trial in range(budget.seeds):
        torch.manual_seed((seed * 1_000_003 + trial) % 2**63)
        starts.append(make().to(dtype))
    held = _cast(held_out, dtype)
    assert not only or not budget.second_order
    train = _Training(draw, held, budget, seed, loss, dtype, only)
    with sdpa_kernel(SDPBackend.MATH):  # the others cannot be batched over runs
        return _fitted(train, starts, watch, num_watched)


def _fitted(
    train: _Training, starts: list[nn.Module], watch: Callable[[int, list[Any]], None] | None, num_watched: int
) -> Fitted:
    budget, seed, held = train.budget, train.seed, train.held_out
    searched: dict[float, float] = {}
    rate = budget.rates[0]
    if len(budget.rates) > 1:
        runs = [copy.deepcopy(start) for start in starts for _ in budget.rates]
        steps = max(1, int(SEARCH_SHARE * budget.steps))
        _, losses = train(runs, list(budget.rates) * budget.seeds, steps)
        medians = np.median(losses.reshape(budget.seeds, -1), axis=0)
        searched = dict(zip(budget.rates, map(float, medians), strict=True))
        rate = min(searched, key=lambda each: searched[each])
    models, losses = train(starts, [rate] * budget.seeds, budget.steps, watch, num_watched)
    for trial in range(budget.seeds if budget.second_order else 0):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + trial + 500_009) % 2**63)
        sample = _cast(train.draw((1, budget.second_order_points), generator), train.dtype)
        better = _second_order(models[trial], (sample[0][0], sample[1][0]), budget.second_order)
        with torch.no_grad():
            found = float(train.loss(better(held[0]), held[1]))
        if found < losses[trial]:
            models[trial], losses[trial] = better, found
    return Fitted(models, losses, rate, searched, budget)


@dataclass(frozen=True)
class _Training:
    draw: Draw
    held_out: Batch
    budget: Budget
    seed: int
    loss: Loss
    dtype: torch.dtype
    only: tuple[str, ...]

    def __call__(
        self,
        models: list[nn.Module],
        rates: list[float],
        steps: int,
        watch: Callable[[int, list[Any]], None] | None = None,
        num_watched: int = 20,
    ) -> tuple[list[Any], np.ndarray]:
        """Train all runs by Adam. Those of one seed follow each other, and share their batches."""
        base, seeds = copy.deepcopy(models[0]), self.budget.seeds
        stacked, buffers = stack_module_state(models)
        names = list(stacked)
        weights = [stacked[name].detach().clone().requires_grad_() for name in names]
        chosen = [weight for name, weight in zip(names, weights, strict=True) if not self.only or name in self.only]
        means, squares = ([torch.zeros_like(weight) for weight in chosen] for _ in range(2))
        highest = torch.tensor(rates, dtype=self.dtype)
        generator = torch.Generator().manual_seed(self.seed % 2**63)

        def of_run(run: list[Tensor], kept: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.loss(functional_call(base, (dict(zip(names, run, strict=True)), kept), (x,)), y)

        losses_of, held_losses = vmap(of_run), vmap(of_run, in_dims=(0, 0, None, None))
        every = max(1, steps // num_watched)
        best, lowest = _Best(weights), torch.full((len(rates),), torch.inf, dtype=self.dtype)
        for step in range(steps):
            if step % every == 0:
                with torch.no_grad():
                    lowest = best.kept(weights, held_losses(weights, buffers, *self.held_out), lowest)
                if watch is not None:
                    watch(step, _unstacked(base, names, weights, buffers))
            inputs, wanted = _cast(self.draw((seeds, self.budget.points), generator), self.dtype)
            if len(rates) > seeds:
                inputs, wanted = (each.repeat_interleave(len(rates) // seeds, 0) for each in (inputs, wanted))
            losses = losses_of(weights, buffers, inputs, wanted)
            gradients = torch.autograd.grad(losses.sum(), chosen)
            norms = torch.stack([each.reshape(len(rates), -1).square().sum(1) for each in gradients]).sum(0).sqrt()
            scale = torch.nan_to_num(torch.clamp(LARGEST_GRADIENT / norms, max=1.0), nan=0.0)
            rise, fall = min(1.0, (step + 1) / max(1.0, WARM_UP * steps)), 0.5 * (1 + math.cos(math.pi * step / steps))
            correction = math.sqrt(1 - DECAY_2 ** (step + 1)) / (1 - DECAY_1 ** (step + 1))
            rate = highest * rise * fall * correction
            with torch.no_grad():
                for weight, gradient, mean, square in zip(chosen, gradients, means, squares, strict=True):
                    along = (-1, *[1] * (weight.ndim - 1))
                    gradient = torch.nan_to_num(gradient) * scale.reshape(along)
                    if self.budget.is_sgd:
                        mean.mul_(DECAY_1).add_(gradient)
                        weight.sub_((highest * rise * fall).reshape(along) * mean)
                        continue
                    mean.lerp_(gradient, 1 - DECAY_1)
                    square.mul_(DECAY_2).addcmul_(gradient, gradient, value=1 - DECAY_2)
                    weight.sub_(rate.reshape(along) * mean / (square.sqrt() + TINY))
        with torch.no_grad():
            lowest = best.kept(weights, held_losses(weights, buffers, *self.held_out), lowest)
        if watch is not None:
            watch(steps, _unstacked(base, names, weights, buffers))
        return _unstacked(base, names, best.weights, buffers), lowest.numpy().astype(float)


class _Best:
    """The weights with which each run had its smallest loss on held-out points, so no run ends worse than it began."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = [weight.detach().clone() for weight in weights]

    def kept(self, weights: list[Tensor], losses: Tensor, lowest: Tensor) -> Tensor:
        """Keep the weights of runs whose loss is lower than before, and return the lowest losses."""
        better = losses < lowest
        for kept, weight in zip(self.weights, weights, strict=True):
            kept[better] = weight.detach()[better]
        return torch.where(better, losses, lowest)


def _unstacked(base: nn.Module, names: list[str], weights: list[Tensor], buffers: dict[str, Tensor]) -> list[Any]:
    """Return a module for every run."""
    made = []
    for run in range(len(weights[0])):
        module = copy.deepcopy(base)
        state = {name: weight[run].detach().clone() for name, weight in zip(names, weights, strict=True)}
        module.load_state_dict(state | {name: buffer[run] for name, buffer in buffers.items()}, strict=False)
        made.append(module)
    return made


def _second_order(module: nn.Module, sample: Batch, steps: int) -> Any:
    """Return the module after damped Gauss–Newton steps on the squares at a sample (Levenberg and Marquardt)."""
    names = [name for name, _ in module.named_parameters()]
    shapes = [weight.shape for _, weight in module.named_parameters()]
    flat = torch.cat([weight.detach().flatten() for weight in module.parameters()])
    inputs, wanted = sample
    target = wanted.flatten()

    def outputs(weights: Tensor, x: Tensor) -> Tensor:
        parts = torch.split(weights, [shape.numel() for shape in shapes])
        state = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        found: Tensor = functional_call(module, state, (x[None],))[0].flatten()
        return found

    slopes, values = vmap(jacrev(outputs), in_dims=(None, 0)), vmap(outputs, in_dims=(None, 0))
    damping = DAMPING
    with torch.no_grad():
        residual = values(flat, inputs).flatten() - target
        for _ in range(steps):
            slope = slopes(flat, inputs).reshape(len(target), -1)
            normal, gradient = slope.T @ slope, slope.T @ residual
            diagonal = torch.diagonal(normal).clone() + 1e-12 * float(torch.diagonal(normal).max())
            while damping < MAX_DAMPING:
                factor, failed = torch.linalg.cholesky_ex(normal + torch.diag(damping * diagonal))
                moved = flat - torch.cholesky_solve(gradient[:, None], factor)[:, 0]
                there = values(moved, inputs).flatten() - target
                if not int(failed) and float(there.square().sum()) < float(residual.square().sum()):
                    flat, residual, damping = moved, there, max(1e-12, EASIER * damping)
                    break
                damping *= HARDER
            else:
                break
    found = copy.deepcopy(module)
    torch.nn.utils.vector_to_parameters(flat, found.parameters())
    return found


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch with its floating-point tensors in this type. Labels stay integers."""
    inputs, wanted = (each.to(dtype) if each.is_floating_point() else each for each in batch)
    return inputs, wanted
