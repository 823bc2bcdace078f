"""Compiled loops over the instructions of `fusing`. This module imports numba.

Each loop over the points of a block is vectorised. Scores that are not finite give NaN, as in the other engines. Chains
of coefficients are tuples, so that the compiler sees their lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.engines.exponential_numba import CONTRACT, borrowed, exponential, fma, inlined, kept, power_of_two
from attnc.engines.fused import AFFINE, HEAD, MOVING, PAIR, PRODUCT, SIMPLE_HEAD, SOFTMAX, Instructions, RunBlock
from attnc.engines.fusing import QUOTIENT, flattened, fuse, points_per_block
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.summing import BLOCK, MOST_KEYS

SINGLE_LEVEL = {"float32": BLOCK, "float64": MOST_KEYS}
"""The number of keys that are added up in any order."""
ONE, TWO, THREE = np.uint64(1), np.uint64(2), np.uint64(3)


def compiled(given: Instructions) -> RunBlock:
    """Return the function that computes the outputs at some points."""
    dtype = given.dtype
    given, num_rows = fuse(given).with_few_rows()
    constants = [step for step in given.steps if step.kind == AFFINE and not step.reads]
    steps, outputs = [step for step in given.steps if step.kind != AFFINE or step.reads], list(given.outputs)
    if len(outputs) == 1 and steps and list(steps[-1].writes) == outputs:
        # The last step writes into the output itself.
        steps[-1], outputs = steps[-1]._replace(writes=(num_rows,)), [num_rows]
    table, rows, numbers = flattened(steps)
    most_scores = max((step.num_keys for step in steps if step.kind in (HEAD, MOVING, SOFTMAX)), default=0)
    block = points_per_block((num_rows + most_scores + 8) * dtype.itemsize)
    most_levels = num_levels(given.most_keys, SINGLE_LEVEL[str(dtype)])
    num_work = num_rows + most_scores + 3 * most_levels + 2
    arguments = (
        *(table, rows, numbers.astype(dtype), np.array(outputs, np.int64)),
        np.array([step.writes[0] for step in constants], np.int64),
        np.array([step.numbers[0][0] for step in constants], dtype),
        *(num_rows, most_levels, most_scores, block),
        *(dtype.type(NEGLIGIBLE[str(dtype)]), SINGLE_LEVEL[str(dtype)]),
    )

    def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        # Arrays of another order, or read-only ones, would be another type, for which the loops were compiled anew.
        work = np.empty((num_work, min(block, len(u))), dtype)
        return bool(_run(u if u.flags.carray else u.copy(), *arguments, work, least, most, out))

    return run


def add_scaled(row: Any, factor: Any, read: Any, points: Any) -> None:
    """Set row ← row + factor·read. Products are rounded, so that they overflow as in other engines."""
    for b in range(points):
        row[b] += factor * read[b]


def affine(state: Any, own: Any, rows: Any, at: Any, numbers: Any, first: Any, terms: Any, points: Any) -> None:
    """Set a row to constant + Σ factor·row, one term after the other."""
    row, constant = _row(state, own, rows[at + terms]), numbers[first]
    read, factor = state[rows[at]], numbers[first + 1]
    if terms == 1:
        for b in range(points):
            row[b] = factor * read[b] + constant
        return
    second, other = state[rows[at + 1]], numbers[first + 2]
    for b in range(points):
        row[b] = (factor * read[b] + constant) + other * second[b]
    for i in range(2, terms):
        add_scaled(row, numbers[first + 1 + i], state[rows[at + i]], points)


def _row(state: Any, own: Any, number: Any) -> Any:
    """Return a row of the block. The number after the last is that of the output."""
    return own if number == len(state) else state[number]


def add_product(row: Any, read: Any, factors: Any, points: Any) -> None:
    """Set row ← row + factors·read, with rounded products."""
    for b in range(points):
        row[b] += factors[b] * read[b]


def multiply(row: Any, read: Any, factors: Any, points: Any) -> None:
    """Set row ← factors·read."""
    for b in range(points):
        row[b] = factors[b] * read[b]


def _add(row: Any, read: Any, points: Any) -> None:
    for b in range(points):
        row[b] += read[b]


def _scaled(row: Any, factor: Any, read: Any, points: Any) -> None:
    for b in range(points):
        row[b] = factor * read[b]


def divide(row: Any, sums: Any, total: Any, points: Any) -> None:
    for b in range(points):
        row[b] = sums[b] / total[b]


def num_levels(keys: Any, single_level: Any) -> Any:
    """Return the number of levels of a sum over keys."""
    levels = 1
    while keys > single_level:
        levels, keys = levels + 1, (keys + BLOCK - 1) // BLOCK
    return levels


def carry(sums: Any, levels: Any, count: Any, points: Any) -> None:
    """Add full blocks of terms to the next level, where `count` terms were added up."""
    level = 0
    while level < levels - 1 and count % BLOCK == 0:
        this, above = sums[level], sums[level + 1]
        for b in range(points):
            above[b] += this[b]
            this[b] = 0.0
        level, count = level + 1, count // BLOCK


def summed(sums: Any, levels: Any, points: Any) -> None:
    """Add up all levels into the last one."""
    for level in range(levels - 1):
        this, above = sums[level], sums[level + 1]
        for b in range(points):
            above[b] += this[b]
            this[b] = 0.0


def find_top(scores: Any, keys: Any, points: Any, top: Any) -> None:
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


def clear(sums: Any, levels: Any, points: Any) -> None:
    for level in range(levels):
        for b in range(points):
            sums[level, b] = 0.0


def weigh(scores: Any, keys: Any, top: Any, negligible: Any, points: Any, levels: Any, totals: Any) -> None:
    """Replace scores by exponentials. The last level of the totals holds their sum."""
    clear(totals, levels, points)
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
        carry(totals, levels, k + 1, points)
    summed(totals, levels, points)


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
    clear(totals, levels, points)
    clear(sums, levels, points)
    clear(others, levels, points)
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
        carry(totals, levels, k + 4, points)
        carry(sums, levels, k + 4, points)
        carry(others, levels, k + 4, points)
    for k in range(whole, keys):
        a, c = numbers[slope + k], numbers[offset + k]
        v, w = numbers[value + k * columns], numbers[value + k * columns + last]
        for b in range(points):
            behind = a * read[b] + c - top[b]
            weight = exponential(behind if behind > negligible else negligible)
            total[b] += weight
            mixed[b] += weight * v
            other[b] += weight * w
    summed(totals, levels, points)
    summed(sums, levels, points)
    summed(others, levels, points)


def _pair(
    read: Any,
    one: Any,
    other: Any,
    factors: Any,
    addends: Any,
    row: Any,
    numbers: Any,
    offset: Any,
    slope: Any,
    negligible: Any,
) -> None:
    """Set a row to average·factor + addend, with the average over two keys, whose values are one and other."""
    a, d, c, e = numbers[slope], numbers[slope + 1], numbers[offset], numbers[offset + 1]
    for b in range(len(row)):
        x = read[b]
        first, second = a * x + c, d * x + e
        behind = -abs(first - second)
        weight = exponential(behind if behind > negligible else negligible)
        total = weight + ((first - first) + (second - second) + 1)  # NaN if a score is not finite
        # Both values are read first. A choice between reads would not be vectorised.
        one_value, other_value, is_first = one[b], other[b], first >= second
        larger = one_value if is_first else other_value
        smaller = other_value if is_first else one_value
        row[b] = (smaller * weight + larger) / total * factors[b] + addends[b]


def _one(numbers: Any, at: Any) -> Any:
    return (numbers[at],)


def _two(numbers: Any, at: Any) -> Any:
    return numbers[at], numbers[at + 1]


def _three(numbers: Any, at: Any) -> Any:
    return numbers[at], numbers[at + 1], numbers[at + 2]


def _four(numbers: Any, at: Any) -> Any:
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]


def _six(numbers: Any, at: Any) -> Any:
    return _three(numbers, at) + _three(numbers, at + 3)


def _eight(numbers: Any, at: Any) -> Any:
    return _four(numbers, at) + _four(numbers, at + 4)


def _chain(c: Any, x: Any) -> Any:
    """Return Σ c_k·x^k, by Horner's rule."""
    total = c[len(c) - 1]
    for k in range(len(c) - 2, -1, -1):
        total = fma(total, x, c[k])
    return total


def _one_chain(read: Any, factors: Any, addends: Any, row: Any, start: Any, c: Any, v: Any) -> None:
    """Set a row to average·factor + addend.

    The average is a quotient of polynomials in x = 2^((rate + low)·variable), with the coefficients v and c.
    """
    rate, low = start
    for b in range(len(row)):
        x = power_of_two(read[b], rate, low)
        row[b] = fma(_chain(v, x) / _chain(c, x), factors[b], addends[b])


def _two_chains(read: Any, factors: Any, addends: Any, row: Any, start: Any, c: Any, d: Any, v: Any, w: Any) -> None:
    """Do the same with chains of every second coefficient: the weights have c_0, d_0, c_1, d_1 and so on."""
    rate, low = start
    for b in range(len(row)):
        x = power_of_two(read[b], rate, low)
        x2 = x * x
        mixed, total = fma(_chain(w, x2), x, _chain(v, x2)), fma(_chain(d, x2), x, _chain(c, x2))
        row[b] = fma(mixed / total, factors[b], addends[b])


def _four_chains(read: Any, factors: Any, addends: Any, row: Any, start: Any, c: Any, v: Any) -> None:
    """Do the same with chains of every fourth coefficient."""
    rate, low = start
    for b in range(len(row)):
        x = power_of_two(read[b], rate, low)
        x2 = x * x
        x4 = x2 * x2
        mixed = fma(fma(_chain(v[3], x4), x, _chain(v[2], x4)), x2, fma(_chain(v[1], x4), x, _chain(v[0], x4)))
        total = fma(fma(_chain(c[3], x4), x, _chain(c[2], x4)), x2, fma(_chain(c[1], x4), x, _chain(c[0], x4)))
        row[b] = fma(mixed / total, factors[b], addends[b])


def _quotient(read: Any, factors: Any, addends: Any, row: Any, numbers: Any, at: Any, length: Any) -> None:
    """Run chains of any length. `at` are the places of the first numbers, of the weights and of the products."""
    n, start, c, v = numbers, _two(numbers, at[0]), at[1], at[2]
    if length == 4:
        _two_chains(read, factors, addends, row, start, _two(n, c), _two(n, c + 2), _two(n, v), _two(n, v + 2))
    elif length == 6:
        _two_chains(read, factors, addends, row, start, _three(n, c), _three(n, c + 3), _three(n, v), _three(n, v + 3))
    elif length == 8:
        _two_chains(read, factors, addends, row, start, _four(n, c), _four(n, c + 4), _four(n, v), _four(n, v + 4))
    elif length == 12:
        weights = _three(n, c), _three(n, c + 3), _three(n, c + 6), _three(n, c + 9)
        products = _three(n, v), _three(n, v + 3), _three(n, v + 6), _three(n, v + 9)
        _four_chains(read, factors, addends, row, start, weights, products)
    elif length == 16:
        weights = _four(n, c), _four(n, c + 4), _four(n, c + 8), _four(n, c + 12)
        products = _four(n, v), _four(n, v + 4), _four(n, v + 8), _four(n, v + 12)
        _four_chains(read, factors, addends, row, start, weights, products)
    elif length == 24:
        weights = _six(n, c), _six(n, c + 6), _six(n, c + 12), _six(n, c + 18)
        products = _six(n, v), _six(n, v + 6), _six(n, v + 12), _six(n, v + 18)
        _four_chains(read, factors, addends, row, start, weights, products)
    else:
        weights = _eight(n, c), _eight(n, c + 8), _eight(n, c + 16), _eight(n, c + 24)
        products = _eight(n, v), _eight(n, v + 8), _eight(n, v + 16), _eight(n, v + 24)
        _four_chains(read, factors, addends, row, start, weights, products)


def _single_quotient(read: Any, factors: Any, addends: Any, row: Any, numbers: Any, at: Any, length: Any) -> None:
    """Run a single chain with the coefficients of two."""
    n, start, c, v = numbers, _two(numbers, at[0]), at[1], at[2]
    if length == 4:
        weights, products = _alternating(_two(n, c), _two(n, c + 2)), _alternating(_two(n, v), _two(n, v + 2))
        _one_chain(read, factors, addends, row, start, weights, products)
    else:
        weights = _alternating(_two(n, c), _two(n, c + 3)) + _one(n, c + 2)
        products = _alternating(_two(n, v), _two(n, v + 3)) + _one(n, v + 2)
        _one_chain(read, factors, addends, row, start, weights, products)


def _alternating(one: Any, other: Any) -> Any:
    return one[0], other[0], one[1], other[1]


def _are_within(read: Any, least: Any, most: Any, numbers: Any, at: Any) -> Any:
    """Return whether all numbers of a row, which are from `least` to `most`, are in the stored range."""
    low, high = numbers[at], numbers[at + 1]
    return low <= high and ((low <= least and most <= high) or _are_between(read, low, high))


def _are_between(row: Any, least: Any, most: Any) -> Any:
    inside = 0
    for b in range(len(row)):
        inside += (row[b] >= least) & (row[b] <= most)
    return inside == len(row)


def read_points(given: Any, least: Any, most: Any, state: Any) -> Any:
    """Set the first rows to the variables of some points. Return whether all are from `least` to `most`.

    Unsigned indices cannot count from the end of an array. So loops with steps are vectorised, if the compiler sees the
    step.
    """
    points, width, flat = np.uint64(len(given)), np.uint64(given.shape[1]), given.reshape(-1)
    inside = 0
    if width == 2:
        row, second = state[0], state[1]
        (low, other), (high, above) = _two(least, 0), _two(most, 0)
        for b in range(points):
            x, y = flat[TWO * b], flat[TWO * b + ONE]
            row[b], second[b] = x, y
            inside += (x >= low) & (x <= high) & (y >= other) & (y <= above)
    elif width == 3:
        row, second, third = state[0], state[1], state[2]
        (low, other, last), (high, above, top) = _three(least, 0), _three(most, 0)
        for b in range(points):
            x, y, z = flat[THREE * b], flat[THREE * b + ONE], flat[THREE * b + TWO]
            row[b], second[b], third[b] = x, y, z
            inside += (x >= low) & (x <= high) & (y >= other) & (y <= above) & (z >= last) & (z <= top)
    else:
        are_inside = True
        for i in range(width):
            row, low, high, inside = state[i], least[i], most[i], 0
            for b in range(points):
                x = flat[width * b + i]
                row[b] = x
                inside += (x >= low) & (x <= high)
            are_inside &= inside == len(given)
        return are_inside
    return inside == len(given)


def _write_outputs(state: Any, outputs: Any, out: Any) -> None:
    points, width, flat = np.uint64(len(out)), np.uint64(len(outputs)), out.reshape(-1)
    for i in range(width):
        row = state[outputs[i]]
        for b in range(points):
            flat[width * b + i] = row[b]


def mix(weights: Any, keys: Any, values: Any, start: Any, step: Any, points: Any, levels: Any, sums: Any) -> None:
    """Set the last level of the sums to Σ weights[k]·values[start + k·step]."""
    clear(sums, levels, points)
    mixed = sums[0]
    for k in range(keys):
        row, value = weights[k], values[start + k * step]
        for b in range(points):
            mixed[b] += row[b] * value
        carry(sums, levels, k + 1, points)
    summed(sums, levels, points)


def moving_mix(
    weights: Any, keys: Any, state: Any, rows: Any, start: Any, step: Any, points: Any, levels: Any, sums: Any
) -> None:
    """Set the last level of the sums to Σ weights[k]·state[rows[start + k·step]]."""
    clear(sums, levels, points)
    mixed = sums[0]
    for k in range(keys):
        row, value = weights[k], state[rows[start + k * step]]
        for b in range(points):
            mixed[b] += row[b] * value[b]
        carry(sums, levels, k + 1, points)
    summed(sums, levels, points)


def score_key(
    state: Any, rows: Any, at: Any, queries: Any, numbers: Any, offset: Any, slope: Any, points: Any, score: Any
) -> None:
    """Set the scores of a key: numbers[offset] + Σ_j numbers[slope + j]·query_j."""
    for b in range(points):
        score[b] = numbers[offset]
    for j in range(queries):
        add_scaled(score, numbers[slope + j], state[rows[at + j]], points)


add_scaled = inlined(add_scaled)
_row, add_product, num_levels = inlined(_row), inlined(add_product), inlined(num_levels)
affine = inlined(affine)
carry, summed, clear = inlined(carry, CONTRACT), inlined(summed, CONTRACT), inlined(clear, CONTRACT)
score_key, find_top = inlined(score_key, CONTRACT), inlined(find_top, CONTRACT)
weigh, mix, moving_mix = (inlined(function, CONTRACT) for function in (weigh, mix, moving_mix))
_top_of_one, _weights_of_one = inlined(_top_of_one, CONTRACT), inlined(_weights_of_one, CONTRACT)
_add, _scaled = inlined(_add), inlined(_scaled)
_pair, multiply, divide = inlined(_pair, CONTRACT), inlined(multiply), inlined(divide)
_one, _two, _three, _four = inlined(_one), inlined(_two), inlined(_three), inlined(_four)
_six, _eight, _chain = inlined(_six), inlined(_eight), inlined(_chain)
_one_chain, _two_chains, _four_chains = inlined(_one_chain), inlined(_two_chains), inlined(_four_chains)
_alternating, _are_between = inlined(_alternating), inlined(_are_between)
_quotient, _single_quotient, _are_within = inlined(_quotient), inlined(_single_quotient), inlined(_are_within)
read_points, _write_outputs = inlined(read_points), inlined(_write_outputs)


def _run_blocks(
    given: Any,
    table: Any,
    rows: Any,
    numbers: Any,
    outputs: Any,
    constant_rows: Any,
    constants: Any,
    num_rows: Any,
    most_levels: Any,
    most_scores: Any,
    block: Any,
    negligible: Any,
    single_level: Any,
    work: Any,
    least: Any,
    most: Any,
    out: Any,
) -> Any:
    """Set out to the outputs at the given points. Return whether all variables are from `least` to `most`.

    `work` has a row per row of the block, then those of scores, of sums on all levels, and two more.
    """
    given, table, rows, numbers = borrowed(given), borrowed(table), borrowed(rows), borrowed(numbers)
    work, flat = borrowed(work), borrowed(out).reshape(-1)
    state, scores, after = work[:num_rows], work[num_rows : num_rows + most_scores], num_rows + most_scores
    totals, sums = work[after : after + most_levels], work[after + most_levels : after + 2 * most_levels]
    others, top, scaled = work[after + 2 * most_levels : len(work) - 2], work[len(work) - 2], work[len(work) - 1]
    for i in range(len(constant_rows)):
        state[constant_rows[i], :] = constants[i]
    is_inside, has_own = True, len(outputs) == 1 and outputs[0] == num_rows
    for start in range(0, len(given), block):
        points = min(block, len(given) - start)
        own = flat[start : start + points] if has_own else top
        is_inside &= read_points(given[start : start + points], least, most, state)
        for number in range(len(table)):
            kind, keys, queries, columns = table[number, 0], table[number, 1], table[number, 2], table[number, 3]
            length, at = table[number, 4], table[number, 5]
            first, second, third = table[number, 6], table[number, 7], table[number, 8]
            levels = num_levels(keys, single_level)
            total, mixed, other = totals[levels - 1], sums[levels - 1], others[levels - 1]
            if kind == AFFINE:
                affine(state, own, rows, at, numbers, first, columns, points)
            elif kind == PRODUCT:
                row = _row(state, own, rows[at + columns])
                multiply(row, state[rows[at]], state[rows[at + 1]], points)
                if columns == 3:
                    _add(row, state[rows[at + 2]], points)
            elif kind == QUOTIENT:
                read, factors, addends = state[rows[at]], state[rows[at + 1]], state[rows[at + 2]]
                row = _row(state, own, rows[at + 3])[:points]
                # If a variable is beyond its limits, the caller drops all outputs.
                has_limits, places = rows[at] < len(least), (first, second, third)
                low, high = (least[rows[at]], most[rows[at]]) if has_limits else (-np.inf, np.inf)
                if _are_within(read[:points], low, high, numbers, first + 5):
                    _single_quotient(read, factors, addends, row, numbers, places, length)
                elif _are_within(read[:points], low, high, numbers, first + 2):
                    _quotient(read, factors, addends, row, numbers, places, length)
                else:
                    first, second, third = table[number, 9], table[number, 10], table[number, 11]
                    _scaled(scaled, numbers[table[number, 6] + 4], read, points)
                    _top_of_one(scaled, numbers, first, second, keys, points, top)
                    _weights_of_one(
                        *(scaled, numbers, first, second, third, keys, 1, top, negligible, points),
                        *(levels, totals, sums, others),
                    )
                    for b in range(points):
                        row[b] = mixed[b] / total[b] * factors[b] + addends[b]
            elif kind == PAIR:
                read, one, two = state[rows[at]], state[rows[at + 1]], state[rows[at + 2]]
                factors, addends = state[rows[at + 3]], state[rows[at + 4]]
                row = _row(state, own, rows[at + 5])[:points]
                _pair(read, one, two, factors, addends, row, numbers, first, second, negligible)
            elif kind == SIMPLE_HEAD:
                read = state[rows[at]]
                _top_of_one(read, numbers, first, second, keys, points, top)
                _weights_of_one(
                    *(read, numbers, first, second, third, keys, columns, top, negligible, points),
                    *(levels, totals, sums, others),
                )
                divide(_row(state, own, rows[at + 1]), mixed, total, points)
                if columns == 2:
                    divide(state[rows[at + 2]], other, total, points)
            elif kind == HEAD:
                for k in range(keys):
                    score_key(state, rows, at, queries, numbers, first + k, second + k * queries, points, scores[k])
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                for column in range(columns):
                    mix(scores, keys, numbers, third + column, columns, points, levels, sums)
                    divide(_row(state, own, rows[at + queries + column]), mixed, total, points)
            elif kind == MOVING:
                for k in range(keys):
                    score = scores[k]
                    for b in range(points):
                        score[b] = 0.0
                    for j in range(queries):
                        add_product(score, state[rows[at + j]], state[rows[at + (1 + k) * queries + j]], points)
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                values = at + (1 + keys) * queries
                for column in range(columns):
                    moving_mix(scores, keys, state, rows, values + column, columns, points, levels, sums)
                    divide(_row(state, own, rows[values + keys * columns + column]), mixed, total, points)
            else:
                for k in range(keys):
                    score, read = scores[k], state[rows[at + k]]
                    for b in range(points):
                        score[b] = read[b]
                find_top(scores, keys, points, top)
                weigh(scores, keys, top, negligible, points, levels, totals)
                for k in range(keys):
                    divide(_row(state, own, rows[at + keys + k]), scores[k], total, points)
        if not has_own:
            _write_outputs(state, outputs, borrowed(out)[start : start + points])
    return is_inside


_run = kept(_run_blocks, CONTRACT)
