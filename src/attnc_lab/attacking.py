"""A program as a differentiable function of its stored numbers, and adversaries that change these within a box.

This module imports torch, so measurements import it only when they run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev, vmap

import attnc

AFFINE = "affine"
PARTS = (AFFINE, "W_Q", "W_K", "W_V", "W_O")
"""The parts of a program that hold numbers: affine maps, and the four matrices of heads."""
STEPS, SHRINK = 24, 0.85
"""Number of steps of the projected gradient, and the factor of the step size from one to the next."""
SINGLE = 24
"""Number of weights that are changed one at a time: those with the steepest slopes."""


@dataclass(frozen=True, eq=False)
class Weights:
    """All stored numbers of a program that are not 0, as one vector, and the part of each.

    A relative change r of a number w makes it w(1 + r). Numbers that are 0 stay 0.
    """

    program: attnc.Program
    values: Tensor
    parts: np.ndarray

    @classmethod
    def of(cls, program: attnc.Program) -> Weights:
        found = [(part, array) for part, array, _ in _arrays(program)]
        values = np.concatenate([array.ravel()[array.ravel() != 0] for _, array in found])
        parts = np.concatenate([[part] * int(np.count_nonzero(array)) for part, array in found])
        return cls(program, torch.tensor(values, dtype=torch.float64), parts)

    def of_part(self, part: str) -> Tensor:
        """Return 1 for numbers of the part and 0 for others; all numbers count for the part "all"."""
        return torch.tensor(np.ones(len(self.parts)) if part == "all" else 1.0 * (self.parts == part))

    def outputs(self, relative: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (points,) for inputs (points, d), with all numbers changed by these relative amounts.

        It computes the same as the program: affine maps over all tokens and channels, and attention without masks.
        """
        numbers, used, state = self.values * (1 + relative), 0, x[:, None, :]
        layers = self.program.unrolled_layers
        for i, layer in enumerate(layers):
            taken: list[Tensor] = []
            for _, array, place in _arrays_of(layer):
                count = int(np.count_nonzero(array))
                flat = torch.zeros(int(np.prod(place.shape)), dtype=torch.float64)
                taken.append(flat.index_put((place.index,), numbers[used : used + count]).reshape(place.shape))
                used += count
            if isinstance(layer, attnc.Affine):
                weight, constant = taken
                state = (state.flatten(1) @ weight.T + constant).reshape(len(x), *layer.constant.shape)
                continue
            read = _tokens_read(layers[i + 1], state.shape[1])
            queried = state[:, read]
            mixed = queried if layer.residual else torch.zeros((), dtype=torch.float64)
            for W_Q, W_K, W_V, W_O in zip(*[iter(taken)] * 4, strict=True):
                attention = torch.softmax(queried @ W_Q @ (state @ W_K).transpose(1, 2), -1)
                mixed = mixed + attention @ (state @ W_V) @ W_O
            state = torch.zeros((len(x), state.shape[1], mixed.shape[2]), dtype=torch.float64)
            state = state.index_copy(1, torch.tensor(read), mixed)
        return state.reshape(len(x))

    def slopes(self, x: Tensor) -> Tensor:
        """Return ∂out/∂log|w| at every point, (points, numbers)."""
        nothing = torch.zeros(len(self.values), dtype=torch.float64)

        def alone(relative: Tensor, point: Tensor) -> Tensor:
            return self.outputs(relative, point[None])[0]

        found: Tensor = vmap(jacrev(alone), in_dims=(None, 0), chunk_size=64)(nothing, x)
        return found


@dataclass(frozen=True)
class _Place:
    """Where the nonzero numbers of an array go: the shape of a matrix, and flat places in it."""

    shape: tuple[int, ...]
    index: Tensor


def _arrays(program: attnc.Program) -> list[tuple[str, np.ndarray, _Place]]:
    return [found for layer in program.unrolled_layers for found in _arrays_of(layer)]


def _arrays_of(layer: object) -> list[tuple[str, np.ndarray, _Place]]:
    """Return the part, the numbers and the places of every stored array of a layer."""
    if isinstance(layer, attnc.Affine):
        weight, constant = layer.weight, layer.constant
        rows, columns = (int(np.prod(weight.shape[axes])) for axes in (slice(0, 2), slice(2, None)))
        flat = weight.flat(slice(0, 2)).astype(np.int64) * columns + weight.flat(slice(2, None))
        kept, kept_constant = weight.values != 0, constant.values != 0
        return [
            (AFFINE, weight.values, _Place((rows, columns), torch.tensor(flat[kept]))),
            (AFFINE, constant.values, _Place((rows,), torch.tensor(constant.flat(slice(None))[kept_constant]).long())),
        ]
    assert isinstance(layer, attnc.Attention)
    assert not layer.cross
    assert all(head.mask is None for head in layer.heads)
    matrices = [(name, getattr(head, name)) for head in layer.heads for name in PARTS[1:]]
    return [(name, array, _Place(array.shape, torch.tensor(np.flatnonzero(array)))) for name, array in matrices]


def _tokens_read(layer: object, num_tokens: int) -> list[int]:
    """Return the tokens that a layer reads. Attention is not computed for others."""
    if not isinstance(layer, attnc.Affine):
        return list(range(num_tokens))
    return sorted({int(token) for token in layer.weight.index[:, 2]})


@dataclass(frozen=True)
class Attack:
    """The largest change of the output, and the largest error against the target, by several adversaries of one size.

    Every relative change is within [−size, size]. "random" draws signs and uniform numbers. "sign" follows the slopes
    at the points where their sum is largest. "one weight" changes a single number. "gradient" is the projected gradient
    from the best of all these, with restarts; so it is never weaker than chance.
    """

    change: dict[str, float]
    error: dict[str, float]


def attack(weights: Weights, part: str, size: float, x: Tensor, wanted: Tensor, slopes: Tensor, seed: int) -> Attack:
    """Attack the numbers of one part, at points x, by changes of at most this relative size."""
    generator = torch.Generator().manual_seed(seed)
    mask, count = weights.of_part(part), len(weights.values)
    exact = weights.outputs(torch.zeros(count, dtype=torch.float64), x)
    masked = slopes * mask
    worst = masked.abs().sum(1).argsort(descending=True)[:6]
    signs = torch.sign(masked[worst])
    steep = masked.abs().amax(0).argsort(descending=True)[:SINGLE]
    single = torch.zeros(2 * len(steep), count, dtype=torch.float64)
    single[torch.arange(len(steep)), steep], single[len(steep) + torch.arange(len(steep)), steep] = 1.0, -1.0
    uniform = 2 * torch.rand(8, count, generator=generator, dtype=torch.float64) - 1
    starts = {"random": torch.cat([uniform, torch.sign(uniform)]), "sign": torch.cat([signs, -signs])}
    starts["one weight"] = single
    run = vmap(weights.outputs, in_dims=(0, None))
    change, error, pool = {}, {}, []
    with torch.no_grad():
        for name, directions in starts.items():
            moved = run(size * directions * mask, x)
            changes, errors = (moved - exact).abs().amax(1), (moved - wanted).abs().amax(1)
            change[name], error[name] = float(changes.max()), float(errors.max())
            pool.append((directions * mask, changes, errors))
    directions, changes, errors = (torch.cat(each) for each in zip(*pool, strict=True))
    for goal, found in ((exact, changes), (wanted, errors)):
        best = found.argsort(descending=True)[:8]
        climbed = _climb(weights, size, x, goal, directions[best], mask)
        with torch.no_grad():
            moved = run(size * climbed, x)
        change["gradient"] = max(change.get("gradient", 0.0), float((moved - exact).abs().max()), *change.values())
        error["gradient"] = max(error.get("gradient", 0.0), float((moved - wanted).abs().max()), *error.values())
    return Attack(change, error)


def _climb(weights: Weights, size: float, x: Tensor, goal: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """Maximise |out − goal| at the worst point by signs of gradients, projected to the box. Keep the best."""
    at, best, step = starts.clone(), starts.clone(), 1.0
    highest = torch.zeros(len(starts), dtype=torch.float64)
    run = vmap(weights.outputs, in_dims=(0, None))
    for _ in range(STEPS):
        at = at.detach().requires_grad_()
        found = (run(size * at, x) - goal).abs().amax(1)
        (gradient,) = torch.autograd.grad(found.sum(), at)
        with torch.no_grad():
            better = found > highest
            best[better], highest = at[better], torch.maximum(found, highest)
            at = (at + step * torch.sign(torch.nan_to_num(gradient)) * mask).clamp(-1, 1)
            step *= SHRINK
    return best.detach()
