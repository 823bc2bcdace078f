"""Stages of a normal form as instructions for compiled loops.

A block of points is a table with one row per number and one column per point. It stays in the cache while a list of
instructions turns the rows of the variables into those of the outputs:

    AFFINE   row ← constant + Σ coefficient·row
    HEAD     rows ← the averages of a head with constant keys; its queries are rows. A SIMPLE_HEAD has one query entry,
             and one or two averages. A PAIR has one query entry and two keys
    MOVING   the same, with keys and values that are rows
    SOFTMAX  rows ← the softmax of rows
    PRODUCT  row ← row + row·row, where a head's values depend on the input

Numpy runs the list, or one compiled function (`fused_numba`), which is the same for all networks. Scores are computed
as in the other engines, the largest is subtracted, and sums over keys are those of `ir.summing`. Where the weights of a
SIMPLE_HEAD are powers of one exponential, `powers` says how they are computed. So the bounds of `ir.rounding` hold as
they are. Only stored tensors are read, by way of the normal form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from attnc.engines.powers import Powers, as_powers
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import unpacked
from attnc.ir.summing import MOST_KEYS, key_mix, key_sum
from attnc.numerics.arrays import Float, Int

RunBlock = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], bool]
"""Takes points, (batch, variables), sets the outputs, (batch, outputs), and returns whether all variables are within
limits, the least and the largest value of each. They are compared here, while a block is in the cache."""
FEW_NUMBERS = 32
"""The number of inputs that are compared with limits one by one, in 0.1 µs each. Calls of numpy take 2 µs."""
AFFINE, SIMPLE_HEAD, HEAD, MOVING, SOFTMAX, PRODUCT, PAIR = range(7)
"""The kinds of instructions."""
MOST_NUMBERS = 2**20
"""The largest number of stored numbers and of rows that are read: 8 MiB. With more, the numpy engine takes blocks of
keys, and skips those that are out of reach."""
BYTES_PER_BLOCK = 2**17
"""The size of a block of points in compiled loops, with all its rows and scores: a part of a second-level cache.
Measured with 6 and 11 rows: 2^14 bytes take 1.2 times as long, 2^18 bytes as long."""
FEWEST_POINTS, MOST_POINTS = 32, 2048
"""The fewest and most points of a block in compiled loops. Fewer leave vector units idle; more do not save time."""
FEW_INSTRUCTIONS, MANY_INSTRUCTIONS, MANY_POINTS = 16, 256, 128
"""The largest number of instructions that numpy runs with few points and with many. Measured with copies of one gate:
8 instructions take a third of the time of a stage at one point, 26 take twice as long; at 1000 points 242 take two
thirds, and 902 take twice as long."""
SCORES_PER_STEP = 2**15
"""The number of scores of a head that numpy computes at once: 256 KiB of float64 stay in a second-level cache."""


class Instructions(NamedTuple):
    """What the compiled loops read."""

    table: Int[np.ndarray, "instructions columns"]  # kind, keys, queries, outputs, and where rows and numbers start
    rows: Int[np.ndarray, " rows"]
    numbers: Float[np.ndarray, " numbers"]
    outputs: Int[np.ndarray, " outputs"]  # the rows of the outputs
    powers: tuple[Powers | None, ...]  # for each instruction, how a head takes powers of one exponential
    num_rows: int
    most_keys: int  # of a head
    most_scores: int  # of a head that keeps its scores in compiled loops
    block: int  # the number of points of a block
    negligible: float  # exponentials of less than this count as zero


class TooLarge(Exception):
    """A program exceeds the limits of instructions: in size, or in the number of additions."""


class Fused:
    """Computes the outputs of a program at some points."""

    def __init__(self, given: Instructions) -> None:
        self._given, self._step = given, max(1, SCORES_PER_STEP // max(1, given.most_keys))

    @classmethod
    def of(cls, form: NormalForm, dtype: np.dtype[np.floating]) -> Fused | None:
        """Return None if there would be too many instructions."""
        given = instructions(form, dtype)
        return None if given is None else cls(given)

    def run(self, num_points: int, is_compiled: bool) -> RunBlock | None:
        """Return what runs parts of a batch of this many points: compiled loops, or numpy.

        Return None if the stages are faster one by one, because in numpy each instruction takes some time.
        """
        if is_compiled:
            return self._compiled
        most = FEW_INSTRUCTIONS if num_points < MANY_POINTS else MANY_INSTRUCTIONS
        return self._in_numpy if len(self._given.table) <= most else None

    @cached_property
    def _compiled(self) -> RunBlock:
        from attnc.engines.fused_numba import compiled

        return compiled(self._given)

    def _in_numpy(self, u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        is_inside = True
        for start in range(0, len(u), self._step):
            part = slice(start, start + self._step)
            is_inside &= is_between(u[part], least, most)
            _run(self._given, u[part], out[part])
        return is_inside


def is_between(
    points: Float[np.ndarray, "batch variables"],
    least: Float[np.ndarray, " variables"],
    most: Float[np.ndarray, " variables"],
) -> bool:
    """Return whether all numbers are in the ranges of their columns. No range contains NaN."""
    if points.size <= FEW_NUMBERS:
        ends = list(zip(least.tolist(), most.tolist(), strict=True))
        return all(low <= x <= high for row in points.tolist() for x, (low, high) in zip(row, ends, strict=True))
    # Numpy takes the least and the largest number of a column in a tenth of the time of comparing all numbers.
    columns = zip(least, points.T, most, strict=True)
    return all(low <= column.min() and column.max() <= high for low, column, high in columns)


def _run(given: Instructions, u: Float[np.ndarray, "batch variables"], out: Float[np.ndarray, "batch outputs"]) -> None:
    """Set out to the outputs at a block of points."""
    state = np.empty((given.num_rows, len(u)), out.dtype)
    state[: u.shape[1]] = u.T
    rows, numbers = given.rows, given.numbers
    table = zip(given.table.tolist(), given.powers, strict=True)
    for (kind, keys, queries, columns, at, first, second, third), powers in table:
        if kind == AFFINE:
            sum_ = state[rows[at]]
            sum_.fill(numbers[first])
            for i in range(1, keys + 1):
                sum_ += numbers[first + i] * state[rows[at + i]]
        elif powers is not None and np.abs(state[rows[at]]).max(initial=0.0) <= powers.reach:
            weights = powers.weights(state[rows[at]].astype(np.float64))
            values = numbers[third : third + keys * columns].reshape(keys, columns).astype(np.float64)
            state[rows[at + 1 : at + 1 + columns]] = (values.T @ weights) / weights.sum(axis=0)
        elif kind == PRODUCT:
            state[rows[at]] += state[rows[at + 1]] * state[rows[at + 2]]
        elif kind in (SIMPLE_HEAD, HEAD, PAIR):
            slopes = numbers[second : second + keys * queries].reshape(keys, queries)
            scores = np.multiply.outer(slopes[:, 0], state[rows[at]]) if queries else np.zeros((keys, len(u)), u.dtype)
            for j in range(1, queries):
                scores += np.multiply.outer(slopes[:, j], state[rows[at + j]])
            scores += numbers[first : first + keys, None]
            weights, total = _weights(scores)
            values = numbers[third : third + keys * columns].reshape(keys, columns)
            state[rows[at + queries : at + queries + columns]] = key_mix(weights.T, values).T / total
        elif kind == MOVING:
            after = at + (1 + keys) * queries
            own = state[rows[at + queries : after]].reshape(keys, queries, len(u))
            values = state[rows[after : after + keys * columns]].reshape(keys, columns, len(u))
            scores = np.zeros((keys, len(u)), u.dtype)
            for j in range(queries):
                scores += own[:, j] * state[rows[at + j]]
            weights, total = _weights(scores)
            for column, row in enumerate(rows[after + keys * columns : after + (keys + 1) * columns]):
                state[row] = key_sum((weights * values[:, column]).T) / total
        else:
            weights, total = _weights(state[rows[at : at + keys]])
            state[rows[at + keys : at + 2 * keys]] = weights / total
    out[:] = state[given.outputs].T


def _weights(
    scores: Float[np.ndarray, "keys batch"],
) -> tuple[Float[np.ndarray, "keys batch"], Float[np.ndarray, " batch"]]:
    """Return exponentials of the scores, less the largest of each point, and their sums. Overwrite the scores."""
    weights = exponentials(scores, scores.max(axis=0))
    return weights, key_sum(weights.T)


def exponentials(scores: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return exp(scores − top), computed in place. Negligible values are zero."""
    scores -= top
    least = NEGLIGIBLE[str(scores.dtype)]
    if not scores.size or scores.min() >= least:
        np.exp(scores, out=scores)
        return scores
    is_zero = scores < least
    # A row instead of a number: numpy's loop over two contiguous arrays is the faster one.
    np.maximum(scores, np.full(scores.shape[-1], least, scores.dtype), out=scores)
    np.exp(scores, out=scores)
    np.copyto(scores, 0.0, where=is_zero)
    return scores


def instructions(form: NormalForm, dtype: np.dtype[np.floating]) -> Instructions | None:
    """Return the instructions for all stages and the output, or None if they would be too large."""
    writer = _Writer(dtype)
    u = writer.new(form.num_inputs)
    try:
        for stage in form.stages:
            after = writer.attention(stage, u) if isinstance(stage, AttentionStage) else writer.softmax(stage, u)
            writer.free_all_but(after)
            u = after
        outputs = writer.form(form.output, u)
    except TooLarge:
        return None
    bytes_per_point = (writer.num_rows + writer.most_scores + 8) * dtype.itemsize
    block = max(FEWEST_POINTS, min(MOST_POINTS, BYTES_PER_BLOCK // bytes_per_point // FEWEST_POINTS * FEWEST_POINTS))
    return Instructions(
        np.array(writer.table, np.int64).reshape(len(writer.table), 8),
        np.array(writer.rows, np.int64),
        np.concatenate([np.zeros(0, dtype), *writer.numbers]),
        np.array(outputs, np.int64),
        tuple(writer.powers),
        writer.num_rows,
        writer.most_keys,
        writer.most_scores,
        block,
        NEGLIGIBLE[str(dtype)],
    )


class _Writer:
    """Writes instructions, and gives out the rows of a block."""

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        self.table: list[tuple[int, ...]] = []
        self.rows: list[int] = []
        self.numbers: list[np.ndarray] = []
        self.powers: list[Powers | None] = []
        self.num_rows = self.most_keys = self.most_scores = self._count = 0
        self._dtype, self._free = dtype, list[int]()

    # --- rows and numbers ---------------------------------------------------------------------------------------------

    def new(self, count: int) -> list[int]:
        """Return rows that hold nothing that is still needed."""
        found = [self._free.pop() for _ in range(min(count, len(self._free)))]
        more = range(self.num_rows, self.num_rows + count - len(found))
        self.num_rows += len(more)
        return [*found, *more]

    def free_all_but(self, rows: Sequence[int]) -> None:
        self._free = sorted(set(range(self.num_rows)) - set(rows), reverse=True)

    def _stored(self, numbers: np.ndarray) -> int:
        """Store numbers, and return where they start."""
        start = self._count
        self._count += numbers.size
        self._require(self._count)
        self.numbers.append(np.asarray(numbers, self._dtype).ravel())
        return start

    def _write(
        self,
        kind: int,
        rows: Sequence[int],
        sizes: tuple[int, int, int],
        starts: tuple[int, ...],
        powers: Powers | None = None,
    ) -> None:
        self._require(len(self.rows) + len(rows))
        if kind in (HEAD, MOVING, SOFTMAX, PAIR):
            self.most_scores = max(self.most_scores, sizes[0])
        self.table.append((kind, *sizes, len(self.rows), *starts, *(0 for _ in range(3 - len(starts)))))
        self.rows.extend(rows)
        self.powers.append(powers)

    def _require(self, count: int) -> None:
        if count > MOST_NUMBERS:
            raise TooLarge

    # --- affine maps --------------------------------------------------------------------------------------------------

    def form(self, form: FloatForm, u: Sequence[int], entries: Sequence[int] | None = None) -> list[int]:
        """Return the rows of an affine form, or of some of its entries."""
        self._require(form.shape[0] * form.shape[1])
        constants = form.constant.toarray().ravel()
        which = range(constants.size) if entries is None else entries
        return [self._affine(constants[i], *self._terms(form, u, i)) for i in which]

    def _terms(self, form: FloatForm, u: Sequence[int], entry: int) -> tuple[list[float], list[int]]:
        """Return the coefficients and the rows of an entry of a form."""
        part = slice(*form.linear.indptr[entry : entry + 2])
        return form.linear.data[part].tolist(), [u[i] for i in form.linear.indices[part]]

    def _affine(self, constant: float, coefficients: Sequence[float], rows: Sequence[int]) -> int:
        """Return the row of constant + Σ coefficients·rows: one of the rows if the sum is that row."""
        if constant == 0 and list(coefficients) == [1.0]:
            return rows[0]
        (target,) = self.new(1)
        start = self._stored(np.array([constant, *coefficients]))
        self._write(AFFINE, [target, *rows], (len(rows), 0, 0), (start,))
        return target

    def _sum(self, parts: Sequence[tuple[float, list[float], list[int]]]) -> int:
        """Return the row of the sum of some affine forms.

        The terms of a form are added up before the forms are: bounds on rounding count the additions in this order.
        """
        constant, coefficients, rows = 0.0, list[float](), list[int]()
        for part in parts:
            is_one_term = len(part[2]) + (part[0] != 0) <= 1
            own, factors, read = part if is_one_term else (0.0, [1.0], [self._affine(*part)])
            constant, coefficients, rows = constant + own, coefficients + factors, rows + read
        return self._affine(constant, coefficients, rows)

    # --- stages -------------------------------------------------------------------------------------------------------

    def softmax(self, stage: SoftmaxStage, u: Sequence[int]) -> list[int]:
        logits, (rows, columns) = self.form(stage.logits, u), stage.logits.shape
        written = self.new(len(logits))
        self._count_keys(columns)
        for start in range(0, rows * columns, max(1, columns)):
            part = slice(start, start + columns)
            self._write(SOFTMAX, [*logits[part], *written[part]], (columns, 0, 0), ())
        return [*written, *(u[i] for i in stage.carried)]

    def attention(self, stage: AttentionStage, u: Sequence[int]) -> list[int]:
        mixed = [self._head(head, u) for head in stage.heads]  # for each head, the rows of each query
        width, found = stage.heads[0].W_O.shape[1], []
        residual = stage.residual
        constants = np.zeros(0) if residual is None else residual.constant.toarray().ravel()
        for entry in stage.written.tolist():
            query, column = divmod(entry, width)
            parts = [] if residual is None else [(constants[entry], *self._terms(residual, u, entry))]
            for head, averages in zip(stage.heads, mixed, strict=True):
                used = np.flatnonzero(head.W_O[:, column])
                parts.append((0.0, head.W_O[used, column].tolist(), [averages[query][i] for i in used]))
            found.append(self._sum(parts))
        return [*found, *(u[i] for i in stage.carried)]

    def _head(self, head: FoldedHead, u: Sequence[int]) -> list[list[int]]:
        self._require(head.queries.shape[0] * head.keys.shape[0])
        self._count_keys(head.keys.shape[0])
        average = self._constant_keys if head.keys.is_constant else self._moving_keys
        return average(head, u)

    def _count_keys(self, count: int) -> None:
        if count > MOST_KEYS:
            raise TooLarge
        self.most_keys = max(self.most_keys, count)

    def _constant_keys(self, head: FoldedHead, u: Sequence[int]) -> list[list[int]]:
        keys, (num_queries, d_k), d_v = unpacked(head.keys.constants), head.queries.shape, head.values.shape[1]
        moves = np.diff(head.queries.linear.indptr).reshape(num_queries, d_k) > 0
        constants, found = head.queries.constant.toarray(), []
        stored = dict[bytes, tuple[np.ndarray, np.ndarray, int, int]]()
        carriers = [] if head.values.is_constant else _carriers(head.values)
        for query in range(num_queries):
            seen = head.seen(query)
            used = np.flatnonzero(moves[query] & (keys[seen] != 0).any(axis=0))
            still = np.flatnonzero(~moves[query])
            name = seen.tobytes() + b"|" + used.tobytes()
            if name not in stored:
                values = [unpacked(head.values.constants)[seen], *(column[seen, None] for _, _, column in carriers)]
                slopes, mixed = keys[np.ix_(seen, used)], np.concatenate(values, axis=1)
                stored[name] = slopes, mixed, self._stored(slopes), self._stored(mixed)
            offsets = keys[np.ix_(seen, still)] @ constants[query, still]
            slopes, mixed, *starts = stored[name]
            queries = self.form(head.queries, u, [query * d_k + int(j) for j in used])
            rows = self.new(d_v + len(carriers))
            is_simple = len(used) == 1 and len(rows) <= 2
            is_pair = len(used) == 1 and len(seen) == 2
            kind = PAIR if is_pair else SIMPLE_HEAD if is_simple else HEAD
            powers = as_powers(slopes[:, 0], offsets, mixed) if kind == SIMPLE_HEAD else None
            sizes = len(seen), len(used), len(rows)
            self._write(kind, [*queries, *rows], sizes, (self._stored(offsets), *starts), powers)
            for row, (column, variable, _) in zip(rows[d_v:], carriers, strict=True):
                self._write(PRODUCT, [rows[column], row, u[variable]], (0, 0, 0), ())
            found.append(rows[:d_v])
        return found

    def _moving_keys(self, head: FoldedHead, u: Sequence[int]) -> list[list[int]]:
        (num_queries, d_k), d_v = head.queries.shape, head.values.shape[1]
        queries, keys, values = (self.form(form, u) for form in (head.queries, head.keys, head.values))
        found = []
        for query in range(num_queries):
            seen, rows = head.seen(query).tolist(), self.new(d_v)
            own = [keys[k * d_k + j] for k in seen for j in range(d_k)]
            read = [
                *queries[query * d_k : (query + 1) * d_k],
                *own,
                *(values[k * d_v + c] for k in seen for c in range(d_v)),
            ]
            self._write(MOVING, [*read, *rows], (len(seen), d_k, d_v), ())
            found.append(rows)
        return found


def _carriers(values: FloatForm) -> list[tuple[int, int, Float[np.ndarray, " keys"]]]:
    """Return (column, variable, coefficients of all keys) for all variables on which a column of the values depends.

    Averages of coefficients are added up, one per variable. Bounds on rounding count the additions of the value with
    the most terms, and two more: those of engines that divide weights before they are summed.
    """
    num_keys, d_v = values.shape
    if values.linear.nnz * num_keys > MOST_NUMBERS:
        raise TooLarge
    found = []
    for column in range(d_v):
        linear = values.linear[column::d_v]
        variables = np.unique(linear.indices)
        if len(variables) > np.diff(linear.indptr).max(initial=0) + 1:
            raise TooLarge
        found += [(column, int(j), linear[:, [j]].toarray()[:, 0]) for j in variables]
    return found
