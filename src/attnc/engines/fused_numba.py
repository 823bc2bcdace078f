"""Compiled loops over the instructions of `fused`. This module imports numba.

Each loop over the points of a block is vectorised. Scores that are not finite give NaN, as in the other engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.engines.exponential_numba import CONTRACT, exponential, inlined, kept
from attnc.engines.fused import AFFINE, HEAD, MOVING, PRODUCT, SIMPLE_HEAD, Instructions, RunBlock
from attnc.ir.summing import BLOCK, MOST_KEYS
from attnc.numerics.arrays import Float

SINGLE_LEVEL = {"float32": BLOCK, "float64": MOST_KEYS}
"""The number of keys that are added up in any order."""


def compiled(given: Instructions) -> RunBlock:
    """Return the function that computes the outputs at some points."""
    dtype = given.numbers.dtype
    arguments = (*given[:-1], dtype.type(given.negligible), SINGLE_LEVEL[str(dtype)])

    def run(u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch outputs"]:
        out = np.empty((len(u), len(given.outputs)), dtype)
        # Arrays of another order, or read-only ones, would be another type, for which the loops were compiled anew.
        _run(u if u.flags.carray else u.copy(), *arguments, out)
        return out

    return run


def _add_scaled(row: Any, factor: Any, read: Any, points: Any) -> None:
    """Set row ← row + factor·read. Products are rounded, so that they overflow as in other engines."""
    for b in range(points):
        row[b] += factor * read[b]


def _add_product(row: Any, read: Any, factors: Any, points: Any) -> None:
    """Set row ← row + factors·read, with rounded products."""
    for b in range(points):
        row[b] += factors[b] * read[b]


def _num_levels(keys: Any, single_level: Any) -> Any:
    """Return the number of levels of a sum over keys."""
    levels = 1
    while keys > single_level:
        levels, keys = levels + 1, (keys + BLOCK - 1) // BLOCK
    return levels


def _carry(sums: Any, levels: Any, count: Any, points: Any) -> None:
    """Add full blocks of terms to the next level, where `count` terms were added up."""
    level = 0
    while level < levels - 1 and count % BLOCK == 0:
        this, above = sums[level], sums[level + 1]
        for b in range(points):
            above[b] += this[b]
            this[b] = 0.0
        level, count = level + 1, count // BLOCK


def _summed(sums: Any, levels: Any, points: Any) -> None:
    """Add up all levels into the last one."""
    for level in range(levels - 1):
        this, above = sums[level], sums[level + 1]
        for b in range(points):
            above[b] += this[b]
            this[b] = 0.0


def _top(scores: Any, keys: Any, points: Any, top: Any) -> None:
    """Set top to the largest score of each point, and to NaN if a score is NaN."""
    for b in range(points):
        top[b] = scores[0, b]
    for k in range(1, keys):
        row = scores[k]
        for b in range(points):
            top[b] = row[b] if (row[b] > top[b]) | (row[b] != row[b]) else top[b]


def _top_of_one(read: Any, numbers: Any, offset: Any, slope: Any, keys: Any, points: Any, top: Any) -> None:
    """Set top to the largest score of a head of one argument."""
    for b in range(points):
        top[b] = numbers[slope] * read[b] + numbers[offset]
    for k in range(1, keys, 4):
        i, j, m = min(k + 1, keys - 1), min(k + 2, keys - 1), min(k + 3, keys - 1)
        ak, ai, aj, am = numbers[slope + k], numbers[slope + i], numbers[slope + j], numbers[slope + m]
        ck, ci, cj, cm = numbers[offset + k], numbers[offset + i], numbers[offset + j], numbers[offset + m]
        for b in range(points):
            x, first, second = read[b], ak * read[b] + ck, ai * read[b] + ci
            third, fourth = aj * x + cj, am * x + cm
            first = first if first > second else second
            third = third if third > fourth else fourth
            first = first if first > third else third
            top[b] = first if first > top[b] else top[b]


def _clear(sums: Any, levels: Any, points: Any) -> None:
    for level in range(levels):
        for b in range(points):
            sums[level, b] = 0.0


def _weights(scores: Any, keys: Any, top: Any, negligible: Any, points: Any, levels: Any, totals: Any) -> None:
    """Replace scores by exponentials. The last level of the totals holds their sum."""
    _clear(totals, levels, points)
    total = totals[0]
    for b in range(points):
        total[b] = top[b] - top[b]  # NaN if there is no largest score
    for k in range(keys):
        row = scores[k]
        for b in range(points):
            behind = row[b] - top[b]
            weight = exponential(behind if behind > negligible else negligible)
            row[b] = weight
            total[b] += weight
        _carry(totals, levels, k + 1, points)
    _summed(totals, levels, points)


def _weights_of_one(
    read: Any,
    numbers: Any,
    offset: Any,
    slope: Any,
    value: Any,
    keys: Any,
    columns: Any,
    top: Any,
    negligible: Any,
    points: Any,
    levels: Any,
    totals: Any,
    sums: Any,
    others: Any,
) -> None:
    """Add up the weights of a head of one argument in totals, and their products with its values in sums and others.

    `others` is for the last column of values. Four keys are taken at a time, so that sums stay in registers.
    """
    _clear(totals, levels, points)
    _clear(sums, levels, points)
    _clear(others, levels, points)
    total, mixed, other = totals[0], sums[0], others[0]
    for b in range(points):
        total[b] = top[b] - top[b]  # NaN if there is no largest score
    last = columns - 1
    whole = keys // 4 * 4
    for k in range(0, whole, 4):
        at, place = value + k * columns, slope + k
        ak, ai, aj, am = numbers[place], numbers[place + 1], numbers[place + 2], numbers[place + 3]
        place = offset + k
        ck, ci, cj, cm = numbers[place], numbers[place + 1], numbers[place + 2], numbers[place + 3]
        vk, vi, vj, vm = numbers[at], numbers[at + columns], numbers[at + 2 * columns], numbers[at + 3 * columns]
        at += last
        wk, wi, wj, wm = numbers[at], numbers[at + columns], numbers[at + 2 * columns], numbers[at + 3 * columns]
        for b in range(points):
            x, most = read[b], top[b]
            first, second = ak * x + ck - most, ai * x + ci - most
            third, fourth = aj * x + cj - most, am * x + cm - most
            first = exponential(first if first > negligible else negligible)
            second = exponential(second if second > negligible else negligible)
            third = exponential(third if third > negligible else negligible)
            fourth = exponential(fourth if fourth > negligible else negligible)
            total[b] += (first + second) + (third + fourth)
            mixed[b] += (first * vk + second * vi) + (third * vj + fourth * vm)
            other[b] += (first * wk + second * wi) + (third * wj + fourth * wm)
        _carry(totals, levels, k + 4, points)
        _carry(sums, levels, k + 4, points)
        _carry(others, levels, k + 4, points)
    for k in range(whole, keys):
        a, c = numbers[slope + k], numbers[offset + k]
        v, w = numbers[value + k * columns], numbers[value + k * columns + last]
        for b in range(points):
            behind = a * read[b] + c - top[b]
            weight = exponential(behind if behind > negligible else negligible)
            total[b] += weight
            mixed[b] += weight * v
            other[b] += weight * w
    _summed(totals, levels, points)
    _summed(sums, levels, points)
    _summed(others, levels, points)


def _mixed(weights: Any, keys: Any, values: Any, start: Any, step: Any, points: Any, levels: Any, sums: Any) -> None:
    """Set the last level of the sums to Σ weights[k]·values[start + k·step]."""
    _clear(sums, levels, points)
    mixed = sums[0]
    for k in range(keys):
        row, value = weights[k], values[start + k * step]
        for b in range(points):
            mixed[b] += row[b] * value
        _carry(sums, levels, k + 1, points)
    _summed(sums, levels, points)


def _moving_mixed(
    weights: Any, keys: Any, state: Any, rows: Any, start: Any, step: Any, points: Any, levels: Any, sums: Any
) -> None:
    """Set the last level of the sums to Σ weights[k]·state[rows[start + k·step]]."""
    _clear(sums, levels, points)
    mixed = sums[0]
    for k in range(keys):
        row, value = weights[k], state[rows[start + k * step]]
        for b in range(points):
            mixed[b] += row[b] * value[b]
        _carry(sums, levels, k + 1, points)
    _summed(sums, levels, points)


def _constant_scores(
    state: Any, rows: Any, at: Any, queries: Any, numbers: Any, offset: Any, slope: Any, points: Any, score: Any
) -> None:
    """Set the scores of a key: numbers[offset] + Σ_j numbers[slope + j]·query_j."""
    for b in range(points):
        score[b] = numbers[offset]
    for j in range(queries):
        _add_scaled(score, numbers[slope + j], state[rows[at + j]], points)


_add_scaled, _add_product, _num_levels = inlined(_add_scaled), inlined(_add_product), inlined(_num_levels)
_carry, _summed, _clear = inlined(_carry, CONTRACT), inlined(_summed, CONTRACT), inlined(_clear, CONTRACT)
_constant_scores, _top = inlined(_constant_scores, CONTRACT), inlined(_top, CONTRACT)
_weights, _mixed, _moving_mixed = (inlined(function, CONTRACT) for function in (_weights, _mixed, _moving_mixed))
_top_of_one, _weights_of_one = inlined(_top_of_one, CONTRACT), inlined(_weights_of_one, CONTRACT)


def _run_blocks(
    given: Any,
    table: Any,
    rows: Any,
    numbers: Any,
    outputs: Any,
    num_rows: Any,
    most_keys: Any,
    most_scores: Any,
    block: Any,
    negligible: Any,
    single_level: Any,
    out: Any,
) -> None:
    """Set out to the outputs at the given points."""
    block = min(block, len(given))
    state, scores = np.empty((num_rows, block), numbers.dtype), np.empty((most_scores, block), numbers.dtype)
    most_levels, top = _num_levels(most_keys, single_level), np.empty(block, numbers.dtype)
    totals, sums = np.empty((most_levels, block), numbers.dtype), np.empty((most_levels, block), numbers.dtype)
    others = np.empty((most_levels, block), numbers.dtype)
    for start in range(0, len(given), block):
        points = min(block, len(given) - start)
        for i in range(given.shape[1]):
            for b in range(points):
                state[i, b] = given[start + b, i]
        for number in range(len(table)):
            kind, keys, queries, columns = table[number, 0], table[number, 1], table[number, 2], table[number, 3]
            at, first, second, third = table[number, 4], table[number, 5], table[number, 6], table[number, 7]
            levels = _num_levels(keys, single_level)
            total, mixed, other = totals[levels - 1], sums[levels - 1], others[levels - 1]
            if kind == AFFINE:
                row, constant = state[rows[at]], numbers[first]
                for b in range(points):
                    row[b] = constant
                for i in range(keys):
                    _add_scaled(row, numbers[first + 1 + i], state[rows[at + 1 + i]], points)
            elif kind == PRODUCT:
                row, read, factors = state[rows[at]], state[rows[at + 1]], state[rows[at + 2]]
                _add_product(row, read, factors, points)
            elif kind == SIMPLE_HEAD:
                read = state[rows[at]]
                _top_of_one(read, numbers, first, second, keys, points, top)
                _weights_of_one(
                    *(read, numbers, first, second, third, keys, columns, top, negligible, points),
                    *(levels, totals, sums, others),
                )
                for column in range(columns):
                    row, of_column = state[rows[at + 1 + column]], mixed if column == 0 else other
                    for b in range(points):
                        row[b] = of_column[b] / total[b]
            elif kind == HEAD:
                for k in range(keys):
                    _constant_scores(
                        state, rows, at, queries, numbers, first + k, second + k * queries, points, scores[k]
                    )
                _top(scores, keys, points, top)
                _weights(scores, keys, top, negligible, points, levels, totals)
                for column in range(columns):
                    _mixed(scores, keys, numbers, third + column, columns, points, levels, sums)
                    row = state[rows[at + queries + column]]
                    for b in range(points):
                        row[b] = mixed[b] / total[b]
            elif kind == MOVING:
                for k in range(keys):
                    score = scores[k]
                    for b in range(points):
                        score[b] = 0.0
                    for j in range(queries):
                        _add_product(score, state[rows[at + j]], state[rows[at + (1 + k) * queries + j]], points)
                _top(scores, keys, points, top)
                _weights(scores, keys, top, negligible, points, levels, totals)
                values = at + (1 + keys) * queries
                for column in range(columns):
                    _moving_mixed(scores, keys, state, rows, values + column, columns, points, levels, sums)
                    row = state[rows[values + keys * columns + column]]
                    for b in range(points):
                        row[b] = mixed[b] / total[b]
            else:
                for k in range(keys):
                    score, read = scores[k], state[rows[at + k]]
                    for b in range(points):
                        score[b] = read[b]
                _top(scores, keys, points, top)
                _weights(scores, keys, top, negligible, points, levels, totals)
                for k in range(keys):
                    weight, row = scores[k], state[rows[at + keys + k]]
                    for b in range(points):
                        row[b] = weight[b] / total[b]
        for i in range(len(outputs)):
            row = state[outputs[i]]
            for b in range(points):
                out[start + b, i] = row[b]


_run = kept(_run_blocks, CONTRACT)
