"""How far an engine's result may be from the exact one, box by box.

Let δ_k bound the error of score k on the box, g_k the distance of s_k to the largest score, K the error of an
exponential in ulps, u the unit roundoff. A computed weight is the exact one times 1 + η_k, |η_k| ≤ τ_k, and a factor
that all share:

    τ_k = exp(δ_k + u(g_k + δ_k + max_j δ_j))·(1 + 2Ku) − 1,     τ̄ = Σ p_k τ_k,
    weights     |Â − A| = |Σ p_k η_k (v_k − A)| / Σ p_k(1 + η_k) ≤ Σ p_k τ_k |v_k − A| / (1 − τ̄);
    sums        γ_{B+3+n}·Σ p̂_k|v_k| + γ_B·|Â|, p̂_k ≤ p_k(1 + τ_k)/(1 − τ̄), n the roundings of values and read-out.

The sums above and below the fraction bar are trees of additions, and B is one more than what a term passes through of
them: `depth` in a tree of blocks (`ir.summing`), with one for engines that divide weights by their sum, and these once
more. In any order, B may be the number of keys with p_k > u/8: adding to a partial sum one that holds small keys only
rounds by no more than that, as the other is itself a float. So the paths of big keys meet at most B − 1 other
additions, and all small ones together cost twice their share, in either sum.

How the weights are bounded over a whole box is told in `weight_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.near_keys import NearPairs, NearValues
from attnc.proofs.rounding.parts import in_parts, shared
from attnc.proofs.rounding.program import HeadRoundings, Roundings
from attnc.proofs.rounding.weight_errors import WeightErrors, deltas
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]


def rounding_bounds(
    stage: OneStage,
    roundings: Roundings,
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    *,
    truncation: float | Sequence[float] = (),
    for_any_weights: bool = False,
    enough: float | Float[np.ndarray, " boxes"] = np.inf,
) -> Float[np.ndarray, "boxes outputs"]:
    """Upper bounds of |computed − exact| over the boxes centre ± radius, for every engine: the reference, numpy,
    torch and ONNX Runtime.

    `roundings` are those of the stage (`program.roundings`). `truncation`: what an engine may be off by
    besides, in any output; or for each head, what it may change in the weights, Σ_k |weight used − weight|. With
    `for_any_weights` the error of the weights is left out: for bounds of |f − stage| that hold whatever the weights
    are, `selection_bounds` with `score_errors`. What is at most `enough` is not made sharper: a bound that many boxes
    share, or that of a whole box; above it, boxes are looked at in parts. Where numbers may overflow, the bound is ∞.
    """
    of_heads = [0.0] * len(stage.heads) if isinstance(truncation, float | int) or not len(truncation) else truncation
    if len(of_heads) != len(stage.heads):
        raise InputError(f"truncation has {len(of_heads)} entries, the stage {len(stage.heads)} heads")
    spare = float(truncation) if isinstance(truncation, float | int) else 0.0

    def bounds(centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
        unit = roundings.unit
        reach = up((np.abs(centres) + radii) * (1 + 2 * unit), 2)
        tiny = roundings.underflow * (1 + reach.sum(axis=1))[:, None]
        total = up(gamma(roundings.count, unit) * _at(roundings.sizes, roundings.size_slopes, reach), 4) + 2 * tiny
        for head, rounds, left_out in zip(stage.heads, roundings.heads, of_heads, strict=True):
            part = _HeadError(head, rounds, roundings.dtype, centres, radii, reach, for_any_weights)
            total = up(total + up(part.bounds() + left_out * part.largest, 2))
        total = total if spare == 0 else up(total + spare)
        with np.errstate(over="ignore"):
            largest = roundings.peak * np.square(1 + reach.sum(axis=1))
        overflows = ~(largest < np.finfo(roundings.dtype).max / 4)
        return np.where(overflows[:, None], np.inf, total)

    if not len(centres):
        return np.zeros((0, len(stage.constant.mid)))
    wanted = np.broadcast_to(enough, len(centres))
    least = float(wanted.min())
    upper = shared(bounds, centres, radii, least) if 0 < least < np.inf else bounds(centres, radii)
    return in_parts(bounds, upper, centres, radii, wanted)


def score_errors(
    roundings: Roundings, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]
) -> Float[np.ndarray, " heads"]:
    """For each head the δ for which `selection_bounds` also covers the computed weights, on all of the boxes.

    A weight is the exponential of (ŝ_k − max ŝ)(1 + θ), |θ| ≤ u, and that is good to K ulps. Where a key must be behind
    by g + 2δ to have a weight of e^{−g}, g < 80, these cost u(g + 2K + 1) < 2·64u besides the errors of two scores.
    """
    if not len(centres):
        return np.zeros(len(roundings.heads))
    reach = up((np.abs(centres) + radii).max(axis=0) * (1 + 2 * roundings.unit), 2)[None]
    largest = [float(deltas(rounds, reach, slice(None), 0).max()) for rounds in roundings.heads]
    return up(np.array(largest) + 64 * roundings.unit)


def _at(values: np.ndarray, slopes: np.ndarray | None, reach: np.ndarray) -> np.ndarray:
    """values + slopes·reach: (boxes, outputs) for values (outputs,), slopes (outputs, d)."""
    return values if slopes is None else up(values + reach @ slopes.T, reach.shape[1] + 1)


@dataclass(frozen=True, eq=False)
class _HeadError:
    head: SoftHead[Enclosed]
    rounds: HeadRoundings
    dtype: str
    centres: Float[np.ndarray, "boxes d"]
    radii: Float[np.ndarray, "boxes d"]
    reach: Float[np.ndarray, "boxes d"]
    for_any_weights: bool

    @property
    def unit(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @cached_property
    def largest_delta(self) -> float:
        """Of any key on any box."""
        return float(deltas(self.rounds, self.reach.max(axis=0)[None], slice(None), 0).max())

    @cached_property
    def near(self) -> NearValues:
        return NearValues(self.head, self.centres, self.radii, self.largest_delta + 64 * self.unit)

    @cached_property
    def largest(self) -> Float[np.ndarray, "boxes outputs"]:
        """The size of the largest value."""
        slopes = self.rounds.value_size_slopes
        return np.broadcast_to(
            _at(self.rounds.value_sizes.max(axis=0), None if slopes is None else slopes.max(axis=0), self.reach),
            (len(self.reach), self.rounds.value_sizes.shape[1]),
        )

    def bounds(self) -> Float[np.ndarray, "boxes outputs"]:
        found = np.empty(self.largest.shape)
        for pairs in self.near.pairs():
            found[pairs.boxes] = self._of_pairs(pairs)
        # Exponentials below e^NEGLIGIBLE may be zero, and keys that are behind by the gap are not looked at.
        unseen = 2 * self.near.scores.num_keys * math.exp(NEGLIGIBLE[self.dtype]) + 8 * self.near.rest
        spent = up(self.rounds.underflow * (1 + self.reach.sum(axis=1))[:, None], 4)
        return up(found + up(unseen * self.largest, 2) + spent)

    def _of_pairs(self, pairs: NearPairs) -> Float[np.ndarray, "rows outputs"]:
        u = self.unit
        weights = WeightErrors(self.near, pairs, self.rounds, self.reach, u, for_any_weights=self.for_any_weights)
        num_keys = self.near.scores.num_keys
        is_big = (weights.most > u / 8) | (num_keys * u > 0.1)  # with more keys the factor 2 below is too small
        num_big = weights.sums(is_big)
        columns = []
        for output in range(self.largest.shape[1]):
            size = self._sizes(pairs, output)
            top = np.maximum.reduceat(size, pairs.starts)
            by_weights, average = weights.error(output)
            mean = top if self.for_any_weights else weights.computed_mean(size)
            average = np.fmin(average + by_weights, mean)
            small = 2 * weights.sums(np.where(is_big, 0.0, weights.most * (size + top[pairs.row])))
            in_blocks = self._sums(self.rounds.depth + 1, mean, average)
            sums = np.fmin(self._sums(num_big, mean, average) + small, in_blocks)
            columns.append(sums if self.for_any_weights else by_weights + sums)
        return up(np.stack(columns, axis=1) * weights.margin)

    def _sums(self, B: np.ndarray | int, mean: np.ndarray, average: np.ndarray) -> np.ndarray:
        """The theorem for mean ≥ Σ p̂_k|v_k|, average ≥ |Â|."""
        below = self._gamma(B)
        return np.asarray(self._gamma(B + 3 + self.rounds.count) * (1 + below) * mean + below * average)

    def _gamma(self, n: np.ndarray | float) -> np.ndarray | float:
        """γ_n, ∞ where it is not defined."""
        nu = n * self.unit
        return np.where(nu < 1, nu / np.maximum(1 - nu, U), np.inf)

    def _sizes(self, pairs: NearPairs, output: int) -> Float[np.ndarray, " pairs"]:
        size = self.rounds.value_sizes[pairs.key, output]
        slopes = self.rounds.value_size_slopes
        if slopes is not None:
            size = size + (slopes[pairs.key, output] * self.reach[pairs.boxes[pairs.row]]).sum(axis=1)
        return size
