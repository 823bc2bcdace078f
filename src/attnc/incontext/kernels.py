"""Kernels on the prompt: Nadaraya–Watson, kernel ridge, and nearest neighbours, for a block of queries at a time.

The memory holds the examples, the main stream the queries. Keys need |x_i|², which is not affine in the prompt: a
squares layer makes it, each token looking at itself and a sink, by difference heads (`differences`) on r = x_i·x_i.

    nadaraya_watson    softmax over −β|x − x_i|², values y_i: one head; |x|² is the same for all keys and drops out
    kernel_ridge       a ← a − η(Ka + λa − y), K_ij = e^{−β|x_i−x_j|²}: a head beside a sink sums K_ij·a_j, where
                       without one it would average; T steps in the memory, then one head for the queries
    nearest            hard attention, in rounds: a query keeps the names (one-hot) of what it has found, and keys of
                       those names lose. Squared distances that differ by less than `resolution` count as equal, and
                       the earlier example wins
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.incontext.acceleration import Schedule
from attnc.incontext.differences import MARGIN, SLACK, Differences, Sizes, choose
from attnc.incontext.prompt import ONE, PRESENT, SINK, TARGET, Prompt
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.rounding import UNIT_ROUNDOFF, up

SQUARE, ABSENT = "square", "absent"
CLEAR = 40.0
"""Scores this far apart leave a loser e^{−40} < 5e-18 of the weight."""
MAX_NAMED = 4096
"""One-hot names make the memory as wide as it is long."""


@dataclass(frozen=True)
class Kernel:
    """e^{−β|x−x'|²} on points |x| ≤ size, for up to `queries` of them at a time."""

    prompt: Prompt
    beta: float
    size: float
    queries: int = 64
    heads: int = 5
    dtype: str = "float64"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0 and math.isfinite(self.size) and self.size > 0):
            raise InputError(f"beta and size are positive numbers, found {self.beta!r} and {self.size!r}")

    @property
    def sizes(self) -> Sizes:
        return Sizes(1, self.prompt.features, 1.0, self.size**2, self.size**2)

    @property
    def differences(self) -> Differences:
        return choose(self.sizes, self.heads, self.dtype)

    @property
    def square_error(self) -> float:
        """|the |x|² of the squares layer − the exact one|, everything included."""
        return self.differences.bound(self.sizes, self.dtype).value

    @property
    def points(self) -> tuple[str, ...]:
        return tuple(f"x.{c}" for c in range(self.prompt.features))

    @property
    def outside(self) -> float:
        """M: a key so marked loses against every example by more than rounding."""
        log_keys = math.log(self.prompt.rows + 1)
        return math.ceil(self.beta * 4 * self.size**2 + log_keys - math.log(UNIT_ROUNDOFF[self.dtype]) + MARGIN)


def nadaraya_watson(kernel: Kernel) -> Program:
    """Inputs (queries, features) and the prompt (rows, features + 2); output (queries,)."""
    channels = _memory_channels(kernel)
    main = (*kernel.points, ONE, "out")
    by = (*kernel.points, SQUARE, ABSENT)
    same = {(c, c): 1.0 for c in kernel.points}
    keys = {(c, c): 2 * kernel.beta for c in kernel.points}
    keys |= {(SQUARE, SQUARE): -kernel.beta, (ABSENT, ABSENT): -kernel.outside}
    head = Head(
        projection(main, by, same | {(ONE, SQUARE): 1.0, (ONE, ABSENT): 1.0}, kernel.dtype),
        projection(channels, by, keys, kernel.dtype),
        projection(channels, (TARGET,), {(TARGET, TARGET): 1.0}, kernel.dtype),
        projection((TARGET,), main, {(TARGET, "out"): 1.0}, kernel.dtype),
    )
    layers = (_place_queries(kernel, main), Attention("average", (head,), main, residual=True, cross=True))
    return _program(kernel, (*layers, _answer(kernel, main)), _memory(kernel, channels))


def average_error(kernel: Kernel, spread: float) -> float:
    """Of Nadaraya–Watson with targets in an interval of length `spread`: what the squares layer and padding do.

    Scores off by ≤ βe change weights by factors in e^{±2βe}, an average by ≤ spread·tanh(βe) ≤ spread·βe; the keys that
    are marked have less than a unit of rounding together.
    """
    e = kernel.beta * kernel.square_error
    return float(up(spread * (e + UNIT_ROUNDOFF[kernel.dtype]), SLACK))


def kernel_ridge(kernel: Kernel, penalty: float, schedule: Schedule) -> Program:
    """Inputs and output as `nadaraya_watson`: Σ_i a_i e^{−β|x−x_i|²}, a after the schedule's steps from 0."""
    if len(set(zip(schedule.etas, schedule.betas, strict=True))) > 1:
        raise InputError("a step moves every token, and is stored once: choose plain, heavy_ball, or nesterov, mu > 0")
    channels = (*_memory_channels(kernel), "v", "p", "product")
    C = math.ceil(math.log(kernel.prompt.rows + 1) - math.log(UNIT_ROUNDOFF[kernel.dtype]) + MARGIN)
    multiply = Attention("product", (_kernel_head(kernel, channels, channels, C, "v", "product"),), channels, True)
    update = _dual_update(kernel, channels, penalty, schedule)
    memory = list(_memory(kernel, channels))
    for t in range(1, schedule.steps + 1):
        memory += [replace(multiply, name=f"product{t}"), replace(update, name=f"update{t}")]
    main = (*kernel.points, ONE, SINK, SQUARE, ABSENT, "out")
    iterate = "p" if schedule.method == "nesterov" else "v"
    head = _kernel_head(kernel, main, channels, C, iterate, "out")
    place = _place_queries(kernel, main, sink=True)
    squares = _squares(kernel, main, kernel.queries)
    read = Attention("sum", (head,), main, residual=True, cross=True)
    return _program(kernel, (place, squares, read, _answer(kernel, main)), tuple(memory))


def _kernel_head(
    kernel: Kernel, queries: tuple[str, ...], keys: tuple[str, ...], C: float, value: str, out: str
) -> Head:
    """Score −β|x − x_j|² on the examples, less M where the query is padding; C on the sink, whose value is 0."""
    by = (*kernel.points, SQUARE, ONE, SINK)
    beta = kernel.beta
    W_Q = {(c, c): 2 * beta for c in kernel.points} | {(ONE, SQUARE): -beta, (SQUARE, ONE): -beta, (ONE, SINK): 1.0}
    W_Q |= {(ABSENT, ONE): -kernel.outside}
    W_K = {(c, c): 1.0 for c in (*kernel.points, SQUARE, ONE)} | {(SINK, SINK): C}
    return Head(
        projection(queries, by, W_Q, kernel.dtype),
        projection(keys, by, W_K, kernel.dtype),
        projection(keys, (value,), {(value, value): 1.0}, kernel.dtype),
        projection((value,), queries, {(value, out): math.exp(C)}, kernel.dtype),
    )


def _dual_update(kernel: Kernel, channels: tuple[str, ...], penalty: float, schedule: Schedule) -> Affine:
    """The step of `acceleration` for every example's own a_i; its gradient is product + λa − y."""
    eta, beta = schedule.etas[0], schedule.betas[0]
    tokens = kernel.prompt.rows + 1
    rows = np.arange(kernel.prompt.rows)
    update = AffineBuilder(tokens, channels, tokens, channels)
    for channel in channels[:-3]:
        update.link(np.arange(tokens), channel, np.arange(tokens), channel)
    step = {"v": 1 - eta * penalty, "product": -eta, TARGET: eta}
    if schedule.method == "nesterov":
        made = {"p": step, "v": {name: (1 + beta) * c for name, c in step.items()} | {"p": -beta}}
    else:
        made = {"p": {"v": 1.0}, "v": step | {"v": step["v"] + beta, "p": -beta}}
    for out, terms in made.items():
        for source, coefficient in terms.items():
            update.link(rows, out, rows, source, coefficient)
    return update.build("update", kernel.dtype)


def nearest(kernel: Kernel, neighbours: int, resolution: float) -> Program:
    """Inputs and output as `nadaraya_watson`: the mean of y over the nearest examples. `kernel.beta` is not used."""
    rows = kernel.prompt.rows
    if rows > MAX_NAMED:
        raise InputError(f"neighbours are named one-hot: at most {MAX_NAMED} examples, asked for {rows}")
    if not 1 <= neighbours <= rows:
        raise InputError(f"neighbours are 1 to {rows}, the prompt's room; asked for {neighbours}")
    if not resolution > 0:
        raise InputError(f"the resolution of squared distances is positive, found {resolution!r}")
    beta = CLEAR * (rows + 1) / resolution
    # No two scores differ by more: a found key loses by as much again, padding by twice that.
    widest = beta * 4 * kernel.size**2 + CLEAR * (rows + 2)
    names = tuple(f"name.{i}" for i in range(rows))
    channels = (*_memory_channels(kernel), "rank", *names)
    main = (*kernel.points, ONE, "out", *names)
    by = (*kernel.points, SQUARE, ABSENT, "rank", *names)
    same = {(c, c): 1.0 for c in (*kernel.points, *names)}
    keys = {(c, c): 2 * beta for c in kernel.points} | {(c, c): -2 * widest for c in names}
    keys |= {(SQUARE, SQUARE): -beta, (ABSENT, ABSENT): -4 * widest, ("rank", "rank"): -CLEAR}
    values = {(c, c): 1.0 for c in (TARGET, *names)}
    outputs = {(c, c): 1.0 for c in names} | {(TARGET, "out"): 1 / neighbours}
    head = Head(
        projection(main, by, same | {(ONE, c): 1.0 for c in (SQUARE, ABSENT, "rank")}, kernel.dtype),
        projection(channels, by, keys, kernel.dtype),
        projection(channels, (TARGET, *names), values, kernel.dtype),
        projection((TARGET, *names), main, outputs, kernel.dtype),
    )
    find = Attention("find", (head,), main, residual=True, cross=True)
    rounds = [replace(find, name=f"find{k + 1}") for k in range(neighbours)]
    layers: tuple[Layer, ...] = (_place_queries(kernel, main), *rounds, _answer(kernel, main))
    return _program(kernel, layers, _memory(kernel, channels))


def _memory_channels(kernel: Kernel) -> tuple[str, ...]:
    return (*kernel.points, TARGET, ONE, SINK, SQUARE, ABSENT)


def _memory(kernel: Kernel, channels: tuple[str, ...]) -> tuple[Layer, ...]:
    """The examples, marked where absent, and the sink; then their squares."""
    prompt = kernel.prompt
    rows = np.arange(prompt.rows)
    place = AffineBuilder(prompt.rows, prompt.inputs, prompt.rows + 1, channels)
    for channel in (*kernel.points, TARGET):
        place.link(rows, channel, rows, channel)
    place.link(rows, ABSENT, rows, PRESENT, -1.0)
    place.set(np.arange(prompt.rows + 1), ABSENT, 1.0)
    place.set(rows, ONE, 1.0)
    place.set(prompt.rows, SINK, 1.0)
    if "rank" in channels:
        place.set(rows, "rank", rows.astype(float))
        for i in rows:
            place.set(i, f"name.{i}", 1.0)
    return (place.build("place", kernel.dtype), _squares(kernel, channels, prompt.rows))


def _squares(kernel: Kernel, channels: tuple[str, ...], count: int) -> Attention:
    """|x|² of the first `count` tokens; the token after them is the sink, which all see, itself too."""
    differences = kernel.differences
    C = differences.sink(2, kernel.size**2, kernel.dtype)
    own = np.arange(count + 1, dtype=np.int32)
    seen = own.copy()
    seen[-1] = EVERY_QUERY
    mask = Mask(own, seen)
    by = (*kernel.points, SINK)
    keys = {(c, c): 1.0 for c in kernel.points} | {(SINK, SINK): C}
    W_K = projection(channels, by, keys, kernel.dtype)
    W_V = projection(channels, (ONE,), {(ONE, ONE): 1.0}, kernel.dtype)
    heads = []
    for j in differences.nodes:
        queries = {(c, c): j * differences.eps for c in kernel.points} | {(ONE, SINK): 1.0, (SINK, SINK): 1.0}
        W_O = {(ONE, SQUARE): differences.weight(j) * math.exp(C)}
        W_Q = projection(channels, by, queries, kernel.dtype)
        heads.append(Head(W_Q, W_K, W_V, projection((ONE,), channels, W_O, kernel.dtype), mask))
    return Attention("squares", tuple(heads), channels, residual=True)


def _place_queries(kernel: Kernel, channels: tuple[str, ...], sink: bool = False) -> Affine:
    rows = np.arange(kernel.queries)
    place = AffineBuilder(kernel.queries, kernel.points, kernel.queries + sink, channels)
    for channel in kernel.points:
        place.link(rows, channel, rows, channel)
    place.set(rows, ONE, 1.0)
    if sink:
        place.set(kernel.queries, SINK, 1.0)
    return place.build("ask", kernel.dtype)


def _answer(kernel: Kernel, channels: tuple[str, ...]) -> Affine:
    rows, tokens = np.arange(kernel.queries), kernel.queries + (SINK in channels)
    answer = AffineBuilder(tokens, channels, kernel.queries, ("out",))
    answer.link(rows, "out", rows, "out")
    return answer.build("answer", kernel.dtype)


def _program(kernel: Kernel, layers: tuple[Layer, ...], memory: tuple[Layer, ...]) -> Program:
    prompt = kernel.prompt
    shapes: Any = ((kernel.queries, prompt.features), (prompt.rows, prompt.features + 2))
    return check(Program(layers, shapes, (kernel.queries,), memory))
