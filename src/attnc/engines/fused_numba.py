"""Compiled loops over the instructions of `fused`. This module imports numba.

Each loop over the points of a block is vectorised. Scores that are not finite give NaN, as in the other engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.engines.exponential_numba import CONTRACT, exponential, inlined, kept
from attnc.engines.fused import AFFINE, HEAD, MOVING, PAIR, PRODUCT, SIMPLE_HEAD, Instructions, RunBlock
from attnc.engines.powers import GROUP
from attnc.ir.summing import BLOCK, MOST_KEYS

SINGLE_LEVEL = {"float32": BLOCK, "float64": MOST_KEYS}
"""The number of keys that are added up in any order."""
ONE, TWO = np.uint64(1), np.uint64(2)


def compiled(given: Instructions) -> RunBlock:
    """Return the function that computes the outputs at some points."""
    dtype, starts, powers = given.numbers.dtype, np.full(len(given.table), -1), list[np.ndarray]()
    for number, found in enumerate(given.powers):
        if found is not None:
            keys, columns, third = (int(given.table[number, column]) for column in (1, 3, 7))
            values = given.numbers[third : third + keys * columns].reshape(keys, columns)
            starts[number] = sum(map(len, powers))
            powers.append(found.packed(values))
    arguments = (
        *(given.table, given.rows, given.numbers, given.outputs, starts, np.concatenate([np.zeros(0), *powers])),
        *(given.num_rows, given.most_keys, given.most_scores, given.block),
        *(dtype.type(given.negligible), SINGLE_LEVEL[str(dtype)]),
    )

    def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        # Arrays of another order, or read-only ones, would be another type, for which the loops were compiled anew.
        return bool(_run(u if u.flags.carray else u.copy(), *arguments, least, most, out))

    return run


def _add_scaled(row: Any, factor: Any, read: Any, points: Any) -> None:
    """Set row ← row + factor·read. Products are rounded, so that they overflow as in other engines."""
    for b in range(points):
        row[b] += factor * read[b]


def _affine(state: Any, rows: Any, at: Any, numbers: Any, first: Any, terms: Any, points: Any) -> None:
    """Set a row to constant + Σ factor·row, one term after the other."""
    row, constant = state[rows[at]], numbers[first]
    if terms == 0:
        for b in range(points):
            row[b] = constant
        return
    read, factor = state[rows[at + 1]], numbers[first + 1]
    for b in range(points):
        row[b] = factor * read[b] + constant
    for i in range(1, terms):
        _add_scaled(row, numbers[first + 1 + i], state[rows[at + 1 + i]], points)


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


def _pair(
    read: Any, numbers: Any, offset: Any, slope: Any, negligible: Any, points: Any, left: Any, right: Any
) -> None:
    """Set left and right to the weights of a head of two keys, divided by their sum."""
    a, d, c, e = numbers[slope], numbers[slope + 1], numbers[offset], numbers[offset + 1]
    for b in range(points):
        x = read[b]
        first, second = a * x + c, d * x + e
        behind = -abs(first - second)
        weight = exponential(behind if behind > negligible else negligible)
        larger = ((first - first) + (second - second) + 1) / (weight + 1)  # NaN if a score is not finite
        smaller = weight * larger
        left[b] = larger if first >= second else smaller
        right[b] = smaller if first >= second else larger


def _four(numbers: Any, at: Any) -> Any:
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]


def _sum(w: Any) -> Any:
    return (w[0] + w[1]) + (w[2] + w[3])


def _mix(w: Any, v: Any) -> Any:
    return (w[0] * v[0] + w[1] * v[1]) + (w[2] * v[2] + w[3] * v[3])


def _low(c: Any, x: Any) -> Any:
    """Return c_k·x^k for k < 4."""
    x2 = x * x
    return c[0], c[1] * x, c[2] * x2, c[3] * (x2 * x)


def _high(c: Any, x: Any) -> Any:
    """Return c_k·x^(4 + k) for k < 4."""
    x2 = x * x
    x4 = x2 * x2
    return c[0] * x4, c[1] * (x4 * x), c[2] * (x4 * x2), c[3] * (x4 * (x2 * x))


def _low_after(c: Any, base: Any, x: Any) -> Any:
    """Return c_k·(base·x^k) for k < 4."""
    x2 = x * x
    return c[0] * base, c[1] * (base * x), c[2] * (base * x2), c[3] * (base * (x2 * x))


def _high_after(c: Any, base: Any, x: Any) -> Any:
    """Return c_k·(base·x^(4 + k)) for k < 4."""
    x2 = x * x
    x4 = x2 * x2
    return c[0] * (base * x4), c[1] * (base * (x4 * x)), c[2] * (base * (x4 * x2)), c[3] * (base * (x4 * (x2 * x)))


def _next_base(base: Any, x: Any) -> Any:
    x2 = x * x
    x4 = x2 * x2
    return base * (x4 * x4)


def _is_within(read: Any, reach: Any, points: Any) -> Any:
    """Return whether all |read| ≤ reach. NaN is not."""
    within = 0
    for b in range(points):
        within += abs(read[b]) <= reach
    return within == points


def _by_powers(
    read: Any, numbers: Any, start: Any, keys: Any, columns: Any, points: Any, doubles: Any, mixed: Any, other: Any
) -> None:
    """Set mixed and other to the averages of a head whose weights are powers of one exponential (`powers`).

    `numbers` are packed from `start` on, and `doubles` are five rows that this needs. `other` is for a second column.
    """
    step, at, size = numbers[start], start + 2, GROUP * (1 + columns)
    c, v, w = _four(numbers, at), _four(numbers, at + GROUP), _four(numbers, at + GROUP * columns)
    d, y, z = _four(numbers, at + 4), _four(numbers, at + GROUP + 4), _four(numbers, at + GROUP * columns + 4)
    if keys <= 4 and columns == 1:
        for b in range(points):
            low = _low(c, exponential(step * np.float64(read[b])))
            mixed[b] = _mix(low, v) / _sum(low)
    elif keys <= 4:
        for b in range(points):
            low = _low(c, exponential(step * np.float64(read[b])))
            share = 1 / _sum(low)
            mixed[b], other[b] = _mix(low, v) * share, _mix(low, w) * share
    elif keys <= GROUP and columns == 1:
        for b in range(points):
            x = exponential(step * np.float64(read[b]))
            low, high = _low(c, x), _high(d, x)
            mixed[b] = (_mix(low, v) + _mix(high, y)) / (_sum(low) + _sum(high))
    elif keys <= GROUP:
        for b in range(points):
            x = exponential(step * np.float64(read[b]))
            low, high = _low(c, x), _high(d, x)
            share = 1 / (_sum(low) + _sum(high))
            mixed[b], other[b] = (_mix(low, v) + _mix(high, y)) * share, (_mix(low, w) + _mix(high, z)) * share
    else:
        powers, bases, totals, firsts, lasts = doubles[0], doubles[1], doubles[2], doubles[3], doubles[4]
        for b in range(points):
            x = exponential(step * np.float64(read[b]))
            low, high = _low(c, x), _high(d, x)
            powers[b], bases[b], totals[b] = x, 1.0, _sum(low) + _sum(high)
            firsts[b], lasts[b] = _mix(low, v) + _mix(high, y), _mix(low, w) + _mix(high, z)
        for _ in range(GROUP, keys, GROUP):
            at += size
            c, v, w = _four(numbers, at), _four(numbers, at + GROUP), _four(numbers, at + GROUP * columns)
            d, y, z = _four(numbers, at + 4), _four(numbers, at + GROUP + 4), _four(numbers, at + GROUP * columns + 4)
            for b in range(points):
                x = powers[b]
                base = _next_base(bases[b], x)
                low, high = _low_after(c, base, x), _high_after(d, base, x)
                bases[b] = base
                totals[b] += _sum(low) + _sum(high)
                firsts[b] += _mix(low, v) + _mix(high, y)
                lasts[b] += _mix(low, w) + _mix(high, z)
        for b in range(points):
            mixed[b] = firsts[b] / totals[b]
        for b in range(points if columns == 2 else 0):
            other[b] = lasts[b] / totals[b]


def _read_points(given: Any, least: Any, most: Any, state: Any) -> Any:
    """Set the first rows to the variables of some points. Return whether all are from `least` to `most`.

    Unsigned indices cannot count from the end of an array. So loops with steps are vectorised.
    """
    points, width, inside, flat = np.uint64(len(given)), np.uint64(given.shape[1]), 0, given.reshape(-1)
    if width == 2:  # a step that the compiler sees
        row, second, low, high, lower, higher = state[0], state[1], least[0], most[0], least[1], most[1]
        for b in range(points):
            x, y = flat[TWO * b], flat[TWO * b + ONE]
            row[b], second[b] = x, y
            inside += (x >= low) & (x <= high) & (y >= lower) & (y <= higher)
        return inside == len(given)
    for i in range(width):
        row, low, high = state[i], least[i], most[i]
        for b in range(points):
            x = flat[width * b + i]
            row[b] = x
            inside += (x >= low) & (x <= high)
    return inside == given.size


def _write_outputs(state: Any, outputs: Any, out: Any) -> None:
    points, width, flat = np.uint64(len(out)), np.uint64(len(outputs)), out.reshape(-1)
    if width == 1:
        row = state[outputs[0]]
        for b in range(points):
            flat[b] = row[b]
        return
    for i in range(width):
        row = state[outputs[i]]
        for b in range(points):
            flat[width * b + i] = row[b]


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


_add_scaled = inlined(_add_scaled)
_affine, _add_product, _num_levels = inlined(_affine), inlined(_add_product), inlined(_num_levels)
_carry, _summed, _clear = inlined(_carry, CONTRACT), inlined(_summed, CONTRACT), inlined(_clear, CONTRACT)
_constant_scores, _top = inlined(_constant_scores, CONTRACT), inlined(_top, CONTRACT)
_weights, _mixed, _moving_mixed = (inlined(function, CONTRACT) for function in (_weights, _mixed, _moving_mixed))
_top_of_one, _weights_of_one = inlined(_top_of_one, CONTRACT), inlined(_weights_of_one, CONTRACT)
_pair, _four = inlined(_pair, CONTRACT), inlined(_four)
_sum, _mix = inlined(_sum), inlined(_mix, CONTRACT)
_low, _high, _low_after, _high_after = inlined(_low), inlined(_high), inlined(_low_after), inlined(_high_after)
_next_base, _is_within, _by_powers = inlined(_next_base), inlined(_is_within), inlined(_by_powers, CONTRACT)
_read_points, _write_outputs = inlined(_read_points), inlined(_write_outputs)


def _run_blocks(
    given: Any,
    table: Any,
    rows: Any,
    numbers: Any,
    outputs: Any,
    starts: Any,
    powers: Any,
    num_rows: Any,
    most_keys: Any,
    most_scores: Any,
    block: Any,
    negligible: Any,
    single_level: Any,
    least: Any,
    most: Any,
    out: Any,
) -> Any:
    """Set out to the outputs at the given points. Return whether all variables are from `least` to `most`."""
    block = min(block, len(given))
    state, scores = np.empty((num_rows, block), numbers.dtype), np.empty((most_scores, block), numbers.dtype)
    most_levels, top = _num_levels(most_keys, single_level), np.empty(block, numbers.dtype)
    totals, sums = np.empty((most_levels, block), numbers.dtype), np.empty((most_levels, block), numbers.dtype)
    others = np.empty((most_levels, block), numbers.dtype)
    doubles = np.empty((5, block), np.float64)
    is_inside = True
    for start in range(0, len(given), block):
        points = min(block, len(given) - start)
        is_inside &= _read_points(given[start : start + points], least, most, state)
        for number in range(len(table)):
            kind, keys, queries, columns = table[number, 0], table[number, 1], table[number, 2], table[number, 3]
            at, first, second, third = table[number, 4], table[number, 5], table[number, 6], table[number, 7]
            levels = _num_levels(keys, single_level)
            total, mixed, other = totals[levels - 1], sums[levels - 1], others[levels - 1]
            if kind == AFFINE:
                _affine(state, rows, at, numbers, first, keys, points)
            elif kind == PRODUCT:
                row, read, factors = state[rows[at]], state[rows[at + 1]], state[rows[at + 2]]
                _add_product(row, read, factors, points)
            elif kind == PAIR:
                left, right = scores[0], scores[1]
                _pair(state[rows[at]], numbers, first, second, negligible, points, left, right)
                for column in range(columns):
                    row, v, w = state[rows[at + 1 + column]], numbers[third + column], numbers[third + columns + column]
                    for b in range(points):
                        row[b] = left[b] * v + right[b] * w
            elif starts[number] >= 0 and _is_within(state[rows[at]], powers[starts[number] + 1], points):
                row, other = state[rows[at + 1]], state[rows[at + columns]]
                _by_powers(state[rows[at]], powers, starts[number], keys, columns, points, doubles, row, other)
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
        _write_outputs(state, outputs, out[start : start + points])
    return is_inside


_run = kept(_run_blocks, CONTRACT)
