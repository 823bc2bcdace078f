"""Compiled loops for gradients, over the instructions of `fused`. This module imports numba.

A row of a block has a value for each point, and a derivative by each input for each point. Loops over points are
vectorised. Scores that are not finite give NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.engines.exponential_numba import CONTRACT, exponential, inlined, kept
from attnc.engines.fused import AFFINE, HEAD, MOVING, PAIR, PRODUCT, SIMPLE_HEAD, Instructions, RunBlock
from attnc.engines.fused_numba import (
    SINGLE_LEVEL,
    add_product,
    add_scaled,
    affine,
    carry,
    clear,
    divide,
    find_top,
    mix,
    moving_mix,
    multiply,
    num_levels,
    read_points,
    score_key,
    summed,
    weigh,
)
from attnc.engines.fusing import flattened, points_per_block
from attnc.ir.rounding import NEGLIGIBLE


def compiled(given: Instructions) -> RunBlock:
    """Return the function that computes the derivatives of the outputs: for each output, one by each input."""
    dtype = given.dtype
    given, num_rows = given.with_few_rows()
    table, rows, numbers = flattened(given.steps)
    most_keys = max(1, given.most_keys)
    most_queries = max((step.num_queries for step in given.steps), default=0)
    d = given.num_inputs
    block = points_per_block((num_rows * (1 + d) + 2 * most_keys + most_queries + 8) * dtype.itemsize)
    arguments = (
        *(table, rows, numbers.astype(dtype), np.array(given.outputs, np.int64)),
        *(num_rows, most_keys, max(1, most_queries), block, dtype.type(NEGLIGIBLE[str(dtype)])),
        SINGLE_LEVEL[str(dtype)],
    )

    def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        # Arrays of another order, or read-only ones, would be another type, for which the loops were compiled anew.
        return bool(_run(u if u.flags.carray else u.copy(), *arguments, least, most, out))

    return run


def _fill(row: Any, number: Any, points: Any) -> None:
    for b in range(points):
        row[b] = number


def _pair(
    state: Any, change: Any, rows: Any, at: Any, numbers: Any, offset: Any, slope: Any, negligible: Any, points: Any
) -> None:
    """Set a row to the average of two rows: that of the first and the second key.

    Σ w_k (v_k − A)(a_k − mean of a) is w_0·w_1·(v_0 − v_1)·(a_0 − a_1) for two keys.
    """
    read, one, other, target = rows[at], rows[at + 1], rows[at + 2], rows[at + 3]
    a, e, c, g = numbers[slope], numbers[slope + 1], numbers[offset], numbers[offset + 1]
    for b in range(points):
        first, second = a * state[read, b] + c, e * state[read, b] + g
        behind = -abs(first - second)
        weight = exponential(behind if behind > negligible else negligible)
        total = weight + ((first - first) + (second - second) + 1)  # NaN if a score is not finite
        smaller, larger = weight / total, 1 / total
        w, z = (larger, smaller) if first >= second else (smaller, larger)
        state[target, b] = w * state[one, b] + z * state[other, b]
        by_query = w * z * (state[one, b] - state[other, b]) * (a - e)
        for i in range(change.shape[1]):
            through_values = w * change[one, i, b] + z * change[other, i, b]
            change[target, i, b] = by_query * change[read, i, b] + through_values


def _average_slopes(
    weights: Any, keys: Any, numbers: Any, value: Any, columns: Any, slope: Any, queries: Any, total: Any,
    A: Any, mean: Any, points: Any, levels: Any, sums: Any,
) -> None:  # fmt: skip
    """Set the last level of the sums to Σ w_k (v_k − A)(a_k − mean), before the division by the total."""
    clear(sums, levels, points)
    mixed = sums[0]
    for k in range(keys):
        row, v, a = weights[k], numbers[value + k * columns], numbers[slope + k * queries]
        for b in range(points):
            mixed[b] += row[b] * ((v - A[b]) * (a - mean[b]))
        carry(sums, levels, k + 1, points)
    summed(sums, levels, points)


def _mean_of_rows(
    weights: Any, slopes: Any, keys: Any, total: Any, mean: Any, points: Any, levels: Any, sums: Any
) -> None:
    """Set the mean to Σ weights[k]·slopes[k] / total."""
    clear(sums, levels, points)
    for k in range(keys):
        add_product(sums[0], weights[k], slopes[k], points)
        carry(sums, levels, k + 1, points)
    summed(sums, levels, points)
    divide(mean, sums[levels - 1], total, points)


_fill, _pair, _average_slopes = inlined(_fill), inlined(_pair, CONTRACT), inlined(_average_slopes, CONTRACT)
_mean_of_rows = inlined(_mean_of_rows, CONTRACT)


def _run_blocks(
    given: Any,
    table: Any,
    rows: Any,
    numbers: Any,
    outputs: Any,
    num_rows: Any,
    most_keys: Any,
    most_queries: Any,
    block: Any,
    negligible: Any,
    single_level: Any,
    least: Any,
    most: Any,
    out: Any,
) -> Any:
    """Set out to the derivatives at the given points. Return whether all variables are from `least` to `most`."""
    block, d = min(block, len(given)), given.shape[1]
    state, change = np.empty((num_rows, block), numbers.dtype), np.zeros((num_rows, d, block), numbers.dtype)
    scores, slopes = np.empty((most_keys, block), numbers.dtype), np.empty((most_keys, block), numbers.dtype)
    means, most_levels = np.empty((most_queries, block), numbers.dtype), num_levels(most_keys, single_level)
    top, deviation = np.empty(block, numbers.dtype), np.empty(block, numbers.dtype)
    totals, sums = np.empty((most_levels, block), numbers.dtype), np.empty((most_levels, block), numbers.dtype)
    for i in range(d):
        change[i, i, :] = 1.0
    is_inside = True
    for start in range(0, len(given), block):
        points = min(block, len(given) - start)
        is_inside &= read_points(given[start : start + points], least, most, state)
        for number in range(len(table)):
            kind, keys, queries, columns = table[number, 0], table[number, 1], table[number, 2], table[number, 3]
            at, first, second, third = table[number, 5], table[number, 6], table[number, 7], table[number, 8]
            levels = num_levels(keys, single_level)
            total, mixed = totals[levels - 1], sums[levels - 1]
            if kind == AFFINE:
                target = rows[at + columns]
                if columns == 0:
                    _fill(state[target], numbers[first], points)
                else:
                    affine(state, top, rows, at, numbers, first, columns, points)
                for i in range(d):
                    row = change[target, i]
                    _fill(row, 0.0, points)
                    for j in range(columns):
                        add_scaled(row, numbers[first + 1 + j], change[rows[at + j], i], points)
            elif kind == PRODUCT:
                one, other, target = rows[at], rows[at + 1], rows[at + columns]
                multiply(state[target], state[one], state[other], points)
                if columns == 3:
                    for b in range(points):
                        state[target, b] += state[rows[at + 2], b]
                for i in range(d):
                    row = change[target, i]
                    multiply(row, change[one, i], state[other], points)
                    add_product(row, change[other, i], state[one], points)
                    if columns == 3:
                        for b in range(points):
                            row[b] += change[rows[at + 2], i, b]
            elif kind == PAIR:
                _pair(state, change, rows, at, numbers, first, second, negligible, points)
            elif kind in (SIMPLE_HEAD, HEAD):
                for k in range(keys):
                    score_key(state, rows, at, queries, numbers, first + k, second + k * queries, points, scores[k])
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                for j in range(queries):
                    mix(scores, keys, numbers, second + j, queries, points, levels, sums)
                    divide(means[j], mixed, total, points)
                for column in range(columns):
                    target = rows[at + queries + column]
                    mix(scores, keys, numbers, third + column, columns, points, levels, sums)
                    divide(state[target], mixed, total, points)
                    for i in range(d):
                        _fill(change[target, i], 0.0, points)
                    for j in range(queries):
                        _average_slopes(
                            *(scores, keys, numbers, third + column, columns, second + j, queries, total),
                            *(state[target], means[j], points, levels, sums),
                        )
                        divide(deviation, mixed, total, points)
                        for i in range(d):
                            add_product(change[target, i], change[rows[at + j], i], deviation, points)
            elif kind == MOVING:
                values, targets = at + (1 + keys) * queries, at + (1 + keys) * queries + keys * columns
                for k in range(keys):
                    _fill(scores[k], 0.0, points)
                    for j in range(queries):
                        add_product(scores[k], state[rows[at + j]], state[rows[at + (1 + k) * queries + j]], points)
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                for column in range(columns):
                    moving_mix(scores, keys, state, rows, values + column, columns, points, levels, sums)
                    divide(state[rows[targets + column]], mixed, total, points)
                for i in range(d):
                    for k in range(keys):
                        slope = slopes[k]
                        _fill(slope, 0.0, points)
                        for j in range(queries):
                            asked, own = rows[at + j], rows[at + (1 + k) * queries + j]
                            add_product(slope, change[asked, i], state[own], points)
                            add_product(slope, state[asked], change[own, i], points)
                    _mean_of_rows(scores, slopes, keys, total, deviation, points, levels, sums)
                    for column in range(columns):
                        target = rows[targets + column]
                        clear(sums, levels, points)
                        for k in range(keys):
                            read = rows[values + k * columns + column]
                            for b in range(points):
                                centred = (state[read, b] - state[target, b]) * (slopes[k, b] - deviation[b])
                                sums[0, b] += scores[k, b] * (centred + change[read, i, b])
                            carry(sums, levels, k + 1, points)
                        summed(sums, levels, points)
                        divide(change[target, i], mixed, total, points)
            else:
                for k in range(keys):
                    for b in range(points):
                        scores[k, b] = state[rows[at + k], b]
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                for i in range(d):
                    for k in range(keys):
                        for b in range(points):
                            slopes[k, b] = change[rows[at + k], i, b]
                    _mean_of_rows(scores, slopes, keys, total, deviation, points, levels, sums)
                    for k in range(keys):
                        for b in range(points):
                            weight = scores[k, b] / total[b]
                            change[rows[at + keys + k], i, b] = weight * (slopes[k, b] - deviation[b])
                for k in range(keys):
                    divide(state[rows[at + keys + k]], scores[k], total, points)
        for b in range(points):
            for o in range(len(outputs)):
                for i in range(d):
                    out[start + b, o * d + i] = change[outputs[o], i, b]
    return is_inside


_run = kept(_run_blocks, CONTRACT)
