"""Kernels on the prompt: Nadaraya–Watson, kernel ridge and nearest neighbours, for a block of queries at a time.

The memory holds the examples, and the main stream holds the queries. Keys need |x_i|², which is not affine in the
prompt. A squares layer computes it by difference heads (`differences`) on r = x_i·x_i: each token attends to itself
and a sink.

    nadaraya_watson    softmax over −β|x − x_i|², values y_i: one head; |x|² is the same for all keys and drops out
    kernel_ridge       a ← a − η(Ka + λa − y), K_ij = e^{−β|x_i−x_j|²}: a head beside a sink sums K_ij·a_j, where
                       without one it would average; T steps in the memory, then one head for the queries
    with corrections   v ← v + (y − Av), T times in the memory, before that head reads v: A is its own softmax over the
                       examples, without a sink
    nearest            hard attention, in rounds: a query keeps the one-hot names of the examples that it has found,
                       and keys of those names lose. Squared distances that differ by less than `resolution` count as
                       equal, and the earlier example wins

Nadaraya–Watson is universal: from examples (x_i, f(x_i)) in the prompt it predicts f(x), with a bound.
Theorem.  With inverse temperature β over N examples it is within
              ω̂(√(fill² + (log N)/β + 2e)) + osc·(padding)     of f everywhere on the domain,
          where ω̂ is a concave modulus of continuity of f (Λt if f is Λ-Lipschitz), fill the largest distance from a
          point of the domain to the nearest example, and e the error of the squares layer.
Proof.    With energies E_i = |x − x_i|² ± e the softmax is the Gibbs measure p of βE: Σ p_i E_i − H(p)/β ≤ min E. So
          Σ p_i |x − x_i|² ≤ fill² + (log N)/β + 2e, as H ≤ log N. Then |Σ p_i f(x_i) − f(x)| ≤ Σ p_i ω̂(|x − x_i|) ≤
          ω̂(√(Σ p_i |x − x_i|²)), twice by Jensen.

Corrections solve for values: the head then returns f at the examples, and not an average of f about them.
Theorem.  After T corrections the residuals are y − Av = (I − A)^{T+1} y, and A has its eigenvalues in (0, 1] if no two
          examples are equal. So they fall along every eigenvector of A, by the factor 1 − λ each time.
Proof.    v₀ = y, and y − Av_{t+1} = (I − A)(y − Av_t). A = D⁻¹K is similar to D^{−½}KD^{−½}, where K is the Gaussian
          kernel matrix, which is positive definite, and the rows of A sum to 1. ∎
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc.errors import InputError
from attnc.incontext.acceleration import Schedule
from attnc.incontext.differences import CLOSED_FORM_SLACK, Differences, Sizes, choose, rounded_up, sink_score
from attnc.incontext.prompt import ONE, PRESENT, SINK, TARGET, Prompt
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

SQUARE, ABSENT = "square", "absent"
CLEAR_SCORE = 40.0
"""The difference between the scores of two neighbours. The farther one keeps e^−40 < 5e-18 of the weight, less than a
rounding in float64."""
MAX_NAMED = 4096
"""Maximum number of rows that get one-hot names. The memory is then as wide as it is long, and takes 128 MiB in
float64."""


@dataclass(frozen=True)
class Kernel:
    """The kernel e^{−β|x−x'|²} on points |x| ≤ size, for blocks of `queries` points."""

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
        """A bound of the error of |x|² from the squares layer, including rounding."""
        return self.differences.bound(self.sizes, self.dtype).value

    @property
    def points(self) -> tuple[str, ...]:
        """The channels of a point."""
        return self.prompt.inputs[: self.prompt.features]

    @property
    def memory(self) -> tuple[str, ...]:
        """The channels of the memory that all programs have."""
        return (*self.points, TARGET, ONE, SINK, SQUARE, ABSENT)

    @property
    def outside(self) -> float:
        """The amount M subtracted from the score of an absent key.

        All absent keys together then weigh less than rounding.
        """
        return sink_score(self.prompt.rows + 1, 4 * self.beta * self.size**2, self.dtype)


def nadaraya_watson(kernel: Kernel, corrections: int = 0) -> Program:
    """Return the program: queries (queries, features) and a prompt (rows, features + 2) → outputs (queries,).

    Every correction is one more attention layer in the memory.
    """
    channels = (*kernel.memory, *(("v", "p", "product") if corrections else ()))
    main = (*kernel.points, ONE, "out")
    memory = _memory(kernel, channels, "v" if corrections else None)
    if corrections:
        average = Attention("average", (_average_head(kernel, channels, channels, "v", "product"),), channels, True)
        update = _dual_update(kernel, channels, 0.0, Schedule("plain", corrections, 1.0, 0.0, 1.0))
        for t in range(1, corrections + 1):
            memory = (*memory, replace(average, name=f"average{t}"), replace(update, name=f"update{t}"))
    head = _average_head(kernel, main, channels, "v" if corrections else TARGET, "out")
    return _program(kernel, main, (Attention("average", (head,), main, residual=True, cross=True),), memory)


def _average_head(kernel: Kernel, main: tuple[str, ...], channels: tuple[str, ...], value: str, out: str) -> Head:
    """Return a head with score 2βx·x_j − β|x_j|² on the examples that are present."""
    queries = {(c, c): 1.0 for c in kernel.points} | {(ONE, SQUARE): 1.0, (ONE, ABSENT): 1.0}
    keys = {(c, c): 2 * kernel.beta for c in kernel.points}
    keys |= {(SQUARE, SQUARE): -kernel.beta, (ABSENT, ABSENT): -kernel.outside}
    return Attending(main, channels, kernel.dtype).head(queries, keys, {(value, value): 1.0}, {(value, out): 1.0})


def average_error(kernel: Kernel, spread: float) -> float:
    """Bound the error of Nadaraya–Watson that the squares layer and padding cause, for targets that span `spread`.

    Score errors ≤ βe change weights by factors in e^{±2βe}, and an average by ≤ spread·tanh(βe) ≤ spread·βe. Absent
    keys together weigh less than one rounding.
    """
    e = kernel.beta * kernel.square_error
    return float(up(spread * (e + UNIT_ROUNDOFF[kernel.dtype]), CLOSED_FORM_SLACK))


def universal_bound(kernel: Kernel, modulus: Callable[[float], float], fill: float, oscillation: float) -> Bound:
    """Return a bound of sup |program − f| for prompts of fill distance ≤ `fill`.

    `modulus` is concave and never falls.
    """
    rows, u = kernel.prompt.rows, UNIT_ROUNDOFF[kernel.dtype]
    distance = math.sqrt(fill**2 + math.log(rows) / kernel.beta + 2 * kernel.square_error)
    # Scores ≤ 4β·size² have an error of γ times that, weights have twice this error, and averages round once more.
    scores = gamma(kernel.prompt.features + 8, u) * 4 * kernel.beta * kernel.size**2
    rounding = oscillation * math.expm1(min(4 * scores, 700.0)) + gamma(2 * rows + 8, u) * oscillation
    return rounded_up(
        ("approximation", modulus(float(up(distance, CLOSED_FORM_SLACK))), f"fill {fill:.3g}"),
        ("padding", oscillation * u, "rows that are absent, and the sink"),
        ("rounding", rounding, f"the average in {kernel.dtype}, targets centred"),
    )


def kernel_ridge(kernel: Kernel, penalty: float, schedule: Schedule) -> Program:
    """Return the program for Σ_i a_i e^{−β|x−x_i|²}, where a is the result of the schedule's steps from 0.

    Its inputs and its output are those of `nadaraya_watson`.
    """
    schedule.check_steady()
    channels = (*kernel.memory, "v", "p", "product")
    C = sink_score(kernel.prompt.rows + 1, 0.0, kernel.dtype)
    multiply = Attention("product", (_kernel_head(kernel, channels, channels, C, "v", "product"),), channels, True)
    update = _dual_update(kernel, channels, penalty, schedule)
    memory = list(_memory(kernel, channels))
    for t in range(1, schedule.steps + 1):
        memory += [replace(multiply, name=f"product{t}"), replace(update, name=f"update{t}")]
    main = (*kernel.points, ONE, SINK, SQUARE, ABSENT, "out")
    head = _kernel_head(kernel, main, channels, C, schedule.iterate, "out")
    read = Attention("sum", (head,), main, residual=True, cross=True)
    return _program(kernel, main, (_squares(kernel, main, kernel.queries), read), memory)


def _kernel_head(
    kernel: Kernel, queries: tuple[str, ...], keys: tuple[str, ...], C: float, value: str, out: str
) -> Head:
    """Return a head with score −β|x − x_j|² on examples, less M for an absent query, and C on the sink of value 0."""
    beta = kernel.beta
    W_Q = {(c, c): 2 * beta for c in kernel.points} | {(ONE, SQUARE): -beta, (SQUARE, ONE): -beta, (ONE, SINK): 1.0}
    W_Q |= {(ABSENT, ONE): -kernel.outside}
    W_K = {(c, c): 1.0 for c in (*kernel.points, SQUARE, ONE)} | {(SINK, SINK): C}
    W_V, W_O = {(value, value): 1.0}, {(value, out): math.exp(C)}
    return Attending(queries, keys, kernel.dtype).head(W_Q, W_K, W_V, W_O)


def _dual_update(kernel: Kernel, channels: tuple[str, ...], penalty: float, schedule: Schedule) -> Affine:
    """Return one step for the dual weight a_i of every example. Its gradient is product + λa − y."""
    tokens = kernel.prompt.rows + 1
    rows = np.arange(kernel.prompt.rows)
    update = AffineBuilder(tokens, channels, tokens, channels)
    update.copy(np.arange(tokens), np.arange(tokens), channels[:-3])
    for (new, old), coefficient in schedule.step(0, penalty).items():
        update.link(rows, new, rows, "product" if old == "g" else old, coefficient)
        if old == "g":
            update.link(rows, new, rows, TARGET, -coefficient)
    return update.build("update", kernel.dtype)


def nearest(kernel: Kernel, neighbours: int, resolution: float) -> Program:
    """Return the program for the mean of y over the nearest examples.

    Its inputs and output are those of `nadaraya_watson`.

    It does not use `kernel.beta`.
    """
    rows = kernel.prompt.rows
    if rows > MAX_NAMED:
        raise InputError(f"neighbours have one-hot names: at most {MAX_NAMED} examples, found {rows}")
    if not 1 <= neighbours <= rows:
        raise InputError(f"the number of neighbours is 1 to {rows}, the rows of the prompt; found {neighbours}")
    if not resolution > 0:
        raise InputError(f"the resolution of squared distances is positive, found {resolution!r}")
    beta = CLEAR_SCORE * (rows + 1) / resolution
    # No two scores differ by more than this. An absent key loses twice this amount, and a found key four times.
    widest = beta * 4 * kernel.size**2 + CLEAR_SCORE * (rows + 2)
    names = tuple(f"name.{i}" for i in range(rows))
    channels = (*kernel.memory, "rank", *names)
    main = (*kernel.points, ONE, "out", *names)
    queries = {(c, c): 1.0 for c in (*kernel.points, *names)} | {(ONE, c): 1.0 for c in (SQUARE, ABSENT, "rank")}
    keys = {(c, c): 2 * beta for c in kernel.points}
    keys |= {(SQUARE, SQUARE): -beta, (ABSENT, ABSENT): -2 * widest, ("rank", "rank"): -CLEAR_SCORE}
    keys |= {(c, c): -4 * widest for c in names}
    values = {(c, c): 1.0 for c in (TARGET, *names)}
    outputs = {(c, c): 1.0 for c in names} | {(TARGET, "out"): 1 / neighbours}
    head = Attending(main, channels, kernel.dtype).head(queries, keys, values, outputs)
    find = Attention("find", (head,), main, residual=True, cross=True)
    rounds = [replace(find, name=f"find{k + 1}") for k in range(neighbours)]
    return _program(kernel, main, rounds, _memory(kernel, channels))


def _memory(kernel: Kernel, channels: tuple[str, ...], copied: str | None = None) -> tuple[Layer, ...]:
    """Return the layers of the memory: one places the examples, marked if absent, and the sink; one squares them.

    The channel `copied` starts as a copy of the targets.
    """
    prompt = kernel.prompt
    rows = np.arange(prompt.rows)
    place = AffineBuilder(prompt.rows, prompt.inputs, prompt.rows + 1, channels)
    place.copy(rows, rows, (*kernel.points, TARGET))
    place.link(rows, ABSENT, rows, PRESENT, -1.0)
    place.set(np.arange(prompt.rows + 1), ABSENT, 1.0)
    place.set(rows, ONE, 1.0)
    place.set(prompt.rows, SINK, 1.0)
    if copied is not None:
        place.link(rows, copied, rows, TARGET)
    if "rank" in channels:
        place.set(rows, "rank", rows.astype(float))
        for i in rows:
            place.set(i, f"name.{i}", 1.0)
    return (place.build("place", kernel.dtype), _squares(kernel, channels, prompt.rows))


def _squares(kernel: Kernel, channels: tuple[str, ...], count: int) -> Attention:
    """Return the layer that computes |x|² of the first `count` tokens.

    The token after them is the sink, which all tokens see.
    """
    differences = kernel.differences
    tokens = range(count)
    mask = Mask(np.array([*tokens, count], np.int32), np.array([*tokens, EVERY_QUERY], np.int32))
    C = differences.sink(2, kernel.size**2, kernel.dtype)
    same = {(c, c): 1.0 for c in kernel.points}
    heads = differences.sum_heads(Attending(channels, channels, kernel.dtype, mask), C, same, same, [(ONE, SQUARE)])
    return Attention("squares", heads, channels, residual=True)


def _program(kernel: Kernel, channels: tuple[str, ...], layers: Sequence[Layer], memory: Sequence[Layer]) -> Program:
    """Return the program that places the queries on these channels, runs the layers, and reads the channel `out`."""
    prompt, rows, has_sink = kernel.prompt, np.arange(kernel.queries), SINK in channels
    place = AffineBuilder(kernel.queries, kernel.points, kernel.queries + has_sink, channels)
    place.copy(rows, rows, kernel.points)
    place.set(rows, ONE, 1.0)
    if has_sink:
        place.set(kernel.queries, SINK, 1.0)
    answer = reading("answer", kernel.queries + has_sink, channels, rows, {"out": "out"}, kernel.dtype)
    main = (place.build("ask", kernel.dtype), *layers, answer)
    shapes = ((kernel.queries, prompt.features), (prompt.rows, prompt.features + 2))
    return check(Program(main, shapes, (kernel.queries,), tuple(memory)))
