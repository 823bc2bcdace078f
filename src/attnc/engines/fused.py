"""Stages of a normal form as instructions for compiled loops.

A block of points is a table with one row per number and one column per point. It stays in the cache while a list of
steps turns the rows of the variables into those of the outputs:

    AFFINE   row ← constant + Σ coefficient·row
    HEAD     rows ← the averages of a head with constant keys; its queries are rows. A SIMPLE_HEAD has one query entry,
             and one or two averages
    PAIR     rows ← the averages of a head with one query entry and two constant keys, whose values are rows
    MOVING   the same as HEAD, with keys and values that are rows
    SOFTMAX  rows ← the softmax of rows
    PRODUCT  row ← row·row, or row·row + row, where a head's values depend on the input

Numpy runs the steps, or one compiled function (`fused_numba`), which is the same for all networks. Scores are computed
as in the other engines, the largest is subtracted, and sums over keys are those of `ir.summing`. Where the weights of a
SIMPLE_HEAD are powers of one exponential, `powers` computes them. So the bounds of `ir.rounding` hold as
they are. Only stored tensors are read, by way of the normal form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from attnc.engines.powers import Powers, as_powers
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, pruned
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import unpacked
from attnc.ir.summing import MOST_KEYS, key_mix, key_sum
from attnc.numerics.arrays import Float

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
FEW_INSTRUCTIONS, MANY_INSTRUCTIONS, MANY_POINTS = 16, 256, 128
"""The largest number of instructions that numpy runs with few points and with many. Measured with copies of one gate:
8 instructions take a third of the time of a stage at one point, 26 take twice as long; at 1000 points 242 take two
thirds, and 902 take twice as long."""
STEP_WORK = 16
"""The work of an instruction besides its keys, in units of that of a key. Measured in compiled loops with 13
networks: a unit takes 0.016 to 0.032 ns."""
SCORES_PER_STEP = 2**15
"""The number of scores of a head that numpy computes at once: 256 KiB of float64 stay in a second-level cache."""


class Instruction(NamedTuple):
    """One instruction. Each row is written by one step."""

    kind: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    numbers: tuple[np.ndarray, ...] = ()
    """AFFINE: the constant and the coefficients. Heads: offsets (keys,), slopes (keys, queries) and values
    (keys, columns). A PAIR has no values. It reads its query, the value of its first key, and that of its second."""
    num_keys: int = 0
    num_queries: int = 0  # entries of a query
    powers: Powers | None = None  # how a head takes powers of one exponential


class Instructions(NamedTuple):
    """The steps of a program, and the rows of its outputs. The first rows are the variables."""

    steps: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    num_inputs: int
    dtype: np.dtype[np.floating]

    @property
    def most_keys(self) -> int:
        """The largest number of keys of a head."""
        return max((step.num_keys for step in self.steps), default=0)

    def with_few_rows(self) -> tuple[Instructions, int]:
        """Return the same with numbers of rows that are used again once nothing reads them, and the number of rows.

        The rows of variables and constants stay, and a step writes no row that it reads.
        """
        last = {row: number for number, step in enumerate(self.steps) for row in (*step.reads, *step.writes)}
        kept = [*range(self.num_inputs), *(row for step in self.steps if not step.reads for row in step.writes)]
        last |= dict.fromkeys((*kept, *self.outputs), len(self.steps))
        places, free, count = {row: place for place, row in enumerate(kept)}, list[int](), len(kept)
        steps = list[Instruction]()
        for number, step in enumerate(self.steps):
            for row in step.writes if step.reads else ():
                if not free:
                    free.append(count)
                    count += 1
                places[row] = free.pop()
            steps.append(
                step._replace(reads=tuple(places[r] for r in step.reads), writes=tuple(places[r] for r in step.writes))
            )
            free += {places[row] for row in (*step.reads, *step.writes) if last[row] == number}
        outputs = tuple(places[row] for row in self.outputs)
        return self._replace(steps=tuple(steps), outputs=outputs), count


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

    def without_caches(self) -> Fused:
        """Return the same without the compiled tables of its runs."""
        return Fused(self._given)

    @property
    def dtype(self) -> np.dtype[np.floating]:
        return self._given.dtype

    @property
    def num_inputs(self) -> int:
        return self._given.num_inputs

    @property
    def num_outputs(self) -> int:
        return len(self._given.outputs)

    @property
    def work_per_point(self) -> int:
        """The work of compiled loops for a point: the number of keys, and as much for a step as for 16 keys."""
        return sum(STEP_WORK + step.num_keys for step in self._given.steps)

    def run(self, num_points: int, is_compiled: bool) -> RunBlock | None:
        """Return the evaluator of parts of a batch of this size: compiled loops, or numpy.

        Return None if the stages are faster one by one, because in numpy each instruction takes some time.
        """
        if is_compiled:
            return self._compiled
        most = FEW_INSTRUCTIONS if num_points < MANY_POINTS else MANY_INSTRUCTIONS
        return self._in_numpy if len(self._given.steps) <= most else None

    @cached_property
    def _compiled(self) -> RunBlock:
        from attnc.engines.fused_numba import compiled

        return compiled(self._given)

    @cached_property
    def _with_few_rows(self) -> tuple[Instructions, int]:
        return self._given.with_few_rows()

    def _in_numpy(self, u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        is_inside = True
        for start in range(0, len(u), self._step):
            part = slice(start, start + self._step)
            is_inside &= is_between(u[part], least, most)
            _run(*self._with_few_rows, u[part], out[part])
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


def _run(
    given: Instructions, num_rows: int, u: Float[np.ndarray, "batch variables"], out: Float[np.ndarray, "batch outputs"]
) -> None:
    """Set out to the outputs at a block of points."""
    state = np.empty((num_rows, len(u)), out.dtype)
    state[: u.shape[1]] = u.T
    for kind, reads, writes, numbers, keys, queries, powers in given.steps:
        row, rows = state[writes[0]], list(writes)
        if kind == AFFINE:
            row.fill(numbers[0][0])
            for factor, read in zip(numbers[0][1:], reads, strict=True):
                row += factor * state[read]
        elif kind == PRODUCT:
            np.multiply(state[reads[0]], state[reads[1]], out=row)
            if len(reads) > 2:
                row += state[reads[2]]
        elif powers is not None and np.abs(state[reads[0]]).max(initial=0.0) <= powers.reach:
            weights = powers.weights(state[reads[0]].astype(np.float64))
            state[rows] = (numbers[2].T.astype(np.float64) @ weights) / weights.sum(axis=0)
        elif kind in (SIMPLE_HEAD, HEAD, PAIR):
            offsets, slopes = numbers[:2]
            scores = np.multiply.outer(slopes[:, 0], state[reads[0]]) if queries else np.zeros((keys, len(u)), u.dtype)
            for j in range(1, queries):
                scores += np.multiply.outer(slopes[:, j], state[reads[j]])
            scores += offsets[:, None]
            weights, total = _weights(scores)
            if kind == PAIR:
                values = state[list(reads[1:])].reshape(2, len(writes), len(u))
                state[rows] = (weights[0] * values[0] + weights[1] * values[1]) / total
            else:
                state[rows] = key_mix(weights.T, numbers[2]).T / total
        elif kind == MOVING:
            after = (1 + keys) * queries
            own = state[list(reads[queries:after])].reshape(keys, queries, len(u))
            values = state[list(reads[after:])].reshape(keys, len(writes), len(u))
            scores = np.zeros((keys, len(u)), u.dtype)
            for j in range(queries):
                scores += own[:, j] * state[reads[j]]
            weights, total = _weights(scores)
            for column, target in enumerate(rows):
                state[target] = key_sum((weights * values[:, column]).T) / total
        else:
            weights, total = _weights(state[list(reads)])
            state[rows] = weights / total
    out[:] = state[list(given.outputs)].T


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
    writer, form = _Writer(dtype), pruned(form)
    u = writer.new(form.num_inputs)
    try:
        for stage in form.stages:
            u = writer.attention(stage, u) if isinstance(stage, AttentionStage) else writer.softmax(stage, u)
        outputs = writer.form(form.output, u)
    except TooLarge:
        return None
    return Instructions(tuple(writer.steps), tuple(outputs), form.num_inputs, dtype)


class _Writer:
    """Writes instructions, and numbers rows."""

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        self.steps: list[Instruction] = []
        self._dtype, self._num_rows, self._count, self._sums = dtype, 0, 0, dict[tuple[object, ...], int]()

    def new(self, count: int) -> list[int]:
        """Return new rows."""
        self._num_rows += count
        return list(range(self._num_rows - count, self._num_rows))

    def _stored(self, numbers: np.ndarray) -> np.ndarray:
        """Return numbers in the program's dtype, and count them."""
        self._count += numbers.size
        self._require(self._count)
        return np.asarray(numbers, self._dtype)

    def _write(self, step: Instruction) -> None:
        if not step.writes:  # a head without values
            return
        self._count += len(step.reads) + len(step.writes)
        self._require(self._count)
        self.steps.append(step)

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
        """Return the row of constant + Σ coefficients·rows: one of the rows if the sum is that row.

        The row of a sum that was written before is used again.
        """
        if constant == 0 and list(coefficients) == [1.0]:
            return rows[0]
        name = (constant, *coefficients, *rows)
        if name not in self._sums:
            (self._sums[name],) = target = self.new(1)
            numbers = self._stored(np.array([constant, *coefficients]))
            self._write(Instruction(AFFINE, tuple(rows), tuple(target), (numbers,)))
        return self._sums[name]

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
            self._write(Instruction(SOFTMAX, tuple(logits[part]), tuple(written[part]), num_keys=columns))
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

    def _constant_keys(self, head: FoldedHead, u: Sequence[int]) -> list[list[int]]:
        keys, (num_queries, d_k) = unpacked(head.keys.constants), head.queries.shape
        moves = np.diff(head.queries.linear.indptr).reshape(num_queries, d_k) > 0
        constants, found = head.queries.constant.toarray(), []
        stored = dict[bytes, tuple[np.ndarray, np.ndarray]]()
        columns = _columns(head.values)
        for query in range(num_queries):
            seen = head.seen(query)
            used = np.flatnonzero(moves[query] & (keys[seen] != 0).any(axis=0))
            still = np.flatnonzero(~moves[query])
            name = seen.tobytes() + b"|" + used.tobytes()
            if name not in stored:
                mixed = np.stack([np.zeros(len(seen)), *(column[seen] for _, _, column in columns)], axis=1)[:, 1:]
                stored[name] = self._stored(keys[np.ix_(seen, used)]), self._stored(mixed)
            slopes, values = stored[name]
            offsets = self._stored(keys[np.ix_(seen, still)] @ constants[query, still])
            queries = self.form(head.queries, u, [query * d_k + int(j) for j in used])
            if len(used) == 1 and len(seen) == 2:
                found.append(self._pair(head.values, seen, (offsets, slopes), queries[0], u))
                continue
            rows = self.new(len(columns))
            is_simple = len(used) == 1 and len(rows) <= 2
            powers = as_powers(slopes[:, 0], offsets, values) if is_simple else None
            kind = SIMPLE_HEAD if is_simple else HEAD
            if rows:
                numbers = offsets, slopes, values
                self._write(Instruction(kind, tuple(queries), tuple(rows), numbers, len(seen), len(used), powers))
            averages = list[int | None]([None] * head.values.shape[1])
            for row, (column, variable, _) in zip(rows, columns, strict=True):
                if variable is not None:
                    row = self._product(row, u[variable], averages[column])
                averages[column] = row
            found.append([self._affine(0.0, (), ()) if row is None else row for row in averages])
        return found

    def _product(self, row: int, factors: int, added: int | None) -> int:
        """Return the row of row·factors + added."""
        (target,) = self.new(1)
        self._write(Instruction(PRODUCT, (row, factors) if added is None else (row, factors, added), (target,)))
        return target

    def _pair(
        self, values: FloatForm, seen: np.ndarray, numbers: tuple[np.ndarray, ...], query: int, u: Sequence[int]
    ) -> list[int]:
        d_v = values.shape[1]
        read = self.form(values, u, [int(key) * d_v + column for key in seen for column in range(d_v)])
        rows = self.new(d_v)
        for column, row in enumerate(rows):
            self._write(Instruction(PAIR, (query, read[column], read[d_v + column]), (row,), numbers, 2, 1))
        return rows

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
            self._write(Instruction(MOVING, tuple(read), tuple(rows), (), len(seen), d_k))
            found.append(rows)
        return found


def _columns(values: FloatForm) -> list[tuple[int, int | None, Float[np.ndarray, " keys"]]]:
    """Return (column, variable, coefficients of all keys) for the constants of all columns of values, without variable,
    and for all variables on which a column depends. Coefficients that are all zero are left out.

    Averages of coefficients are added up, one per variable. Bounds on rounding count the additions of the value with
    the most terms, and two more: those of engines that divide weights before they are summed.
    """
    num_keys, d_v = values.shape
    if values.linear.nnz * num_keys > MOST_NUMBERS:
        raise TooLarge
    found = list[tuple[int, int | None, np.ndarray]]()
    constants = values.constant.toarray() if not values.is_constant else unpacked(values.constants)
    for column in range(d_v):
        if constants[:, column].any():
            found.append((column, None, constants[:, column]))
        linear = values.linear[column::d_v]
        variables = np.unique(linear.indices)
        if len(variables) > np.diff(linear.indptr).max(initial=0) + 1:
            raise TooLarge
        found += [(column, int(j), linear[:, [j]].toarray()[:, 0]) for j in variables]
    return found
