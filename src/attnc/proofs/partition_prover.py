"""Proofs of partitions: one head with constant keys that are all combinations of rows, one row for each variable.

The theorem is that of `kinds.axis_keys`, with the strips of `StripRows`. Scores and values are linear in the numbers
that a key stores, its constants in some channels. So a program with a few other keys determines the head. One key
for each channel has a 1 there and 0 elsewhere: its score is the part of one unit of that number. One more key has the
largest number of each channel: its errors are at least those of every key. The keys themselves are only a table of
numbers. So a partition of 10^6 cells is read in seconds, and f is compared with every value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import AdditiveOffsets
from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.cells.branching import branch_and_bound
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.cells.intervals import centred, interval
from attnc.proofs.enclosure_prover import goal_of
from attnc.proofs.kinds.axis_keys import AxisKeys, AxisKind, StripRows
from attnc.proofs.kinds.enclosure import QueryEnclosure, StageEnclosure
from attnc.proofs.margins import PARTITION_SCORES, STAGE_ROUNDING
from attnc.proofs.proof import Proof, proof_by_leaves
from attnc.proofs.prover import ProofRequest, Prover, num_softmaxes, require_same_shapes
from attnc.proofs.rounding.program import Roundings, sizes_at
from attnc.proofs.rounding.stage import largest_score_error, rounding_of_sums
from attnc.targets.box import Box
from attnc.targets.target import Target

MAX_PROVED_ANCHORS = 20_000  # leaves of other kinds would take minutes for a larger network
MOST_PARTITION_LEAVES = 2**12
"""The most leaves of a partition. Halving them makes a bound smaller only where f is not enclosed well on a cell of the
grid. Six variables, halved twice, are as many."""
MOST_NORM_LEAVES = 2**14
"""The most leaves of a partition in an L_p norm, where smaller leaves follow the error from place to place. Measured on
three norms of two variables: with 2^12 two of them miss their eps, and with 2^14 a check takes 2 to 5 s."""
MOST_SOFT_LEAVES = 2**7
"""The most leaves if several rows of an axis share most points: then each leaf is compared with nearly all values."""
MAX_FIRST_LEAVES, ROWS_PER_LEAF = 6, 8
"""log2 of the largest number of leaves of a partition at first, and the least number of rows of each axis in a leaf.
Several processes check them. Smaller leaves meet more cells twice, at their borders. Measured: in two variables 64
leaves take a check 5 % longer than one, and in five variables 32 leaves of four rows take twice as long."""
PARTITION_LEAK = 2.5e-5
"""The share of the goal that the rows which a proof of a partition leaves out may cost, `AXIS_FARTHEST` apart. Measured
on five partitions: with ten times as much bounds are 0.1 % smaller or 0.01 % larger, with a tenth 0.1 % larger."""


class PartitionProver(Prover):
    """Proves single stages that select a cell of a grid, in any number of variables.

    A leaf has many cells of the grid, and the whole box may be one. So the leaves are few for any number of keys, and
    the checker compares f with each value once.
    """

    name = "partition"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        is_likely = request.has_theorem or program.num_anchors > MAX_PROVED_ANCHORS
        return is_likely and num_softmaxes(program) == 1 and target.expression is not None

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove a bound. Raise ProgramError if the keys are no grid."""
        require_same_shapes(program, target)
        keys = _StoredKeys.of(program)
        box = target.box
        goal = goal_of(request) if request.p == math.inf else request.goal_in_norm(box.d)
        parts = StageEnclosure.of(keys.few, is_first=True).parts
        heads, near = zip(*(_partition(keys, part, box, goal) for part in parts), strict=True)
        kind = AxisKind(heads, target, request.truncation, is_single=True)
        most = MOST_PARTITION_LEAVES if request.p == math.inf else MOST_NORM_LEAVES
        most = most if max(near) <= 2**box.d else MOST_SOFT_LEAVES
        budget = dataclasses.replace(request, cells=min(request.cells, most))
        if request.p < math.inf:
            found = bound_integral([kind], box, request.p, goal=goal, budget=budget)
        else:
            level = min(MAX_FIRST_LEAVES // box.d, max(0, math.floor(math.log2(kind.fewest_rows / ROWS_PER_LEAF))))
            found = branch_and_bound([kind], box, goal=goal, start_level=level, budget=budget)
        return proof_by_leaves(found, gap=kind.gap)


@dataclass(frozen=True, eq=False)
class _StoredKeys:
    """The numbers that the keys store in each channel that scores or values read, and a program with a few other keys.

    Key c of that program has a 1 in channel c. Its last key has the `largest` numbers.
    """

    table: Float[np.ndarray, "keys channels"]
    largest: Float[np.ndarray, " channels"]
    few: Program

    @property
    def count(self) -> int:
        return len(self.table)

    @classmethod
    def of(cls, program: Program) -> _StoredKeys:
        """Raise ProgramError unless the program has one head whose keys are constants."""
        found = [(n, layer) for n, layer in enumerate(program.unrolled_layers) if isinstance(layer, Attention)]
        if [len(layer.heads) for _, layer in found] != [1] or found[0][1].heads[0].mask is not None:
            raise ProgramError("a partition is one head without a mask")
        ((n, layer),) = found
        stream = list(program.unrolled_memory if layer.cross else program.unrolled_layers)
        place = len(stream) - 1 if layer.cross else n - 1
        made = stream[place] if place >= 0 else None
        if not isinstance(made, Affine):
            raise ProgramError("the keys of a partition are constants")
        (head,) = layer.heads
        (read,) = np.nonzero((head.W_K != 0).any(axis=1) | (head.W_V != 0).any(axis=1))
        if np.isin(made.weight.index[:, 1], read).any():
            raise ProgramError("the keys of a partition are constants")
        is_key, column = np.isin(made.constant.index[:, 1], read), np.zeros(made.constant.shape[1], np.int64)
        column[read] = np.arange(len(read))
        table = np.zeros((made.constant.shape[0], len(read)))
        table[made.constant.index[is_key, 0], column[made.constant.index[is_key, 1]]] = made.constant.values[is_key]
        largest = _not_powers(np.abs(table).max(axis=0), program.dtype)
        tokens = len(read) + 1
        index = np.concatenate([np.arange(tokens - 1), np.full(tokens - 1, tokens - 1)])
        stored = np.stack([index, np.tile(read, 2)], axis=1)
        others, values = made.constant.index[~is_key], made.constant.values[~is_key]
        numbers = np.concatenate([values, np.ones(len(read)), largest]).astype(program.dtype)
        constant = Sparse((tokens, made.constant.shape[1]), np.concatenate([others, stored]), numbers)
        weight = dataclasses.replace(made.weight, shape=(tokens, *made.weight.shape[1:]))
        stream[place] = dataclasses.replace(made, weight=weight, constant=constant)
        reads = [others[:, 0], weight.index[:, 0]]
        if not layer.cross:
            after = stream[n + 1] if n + 1 < len(stream) else None
            if not isinstance(after, Affine):
                raise ProgramError("the outputs of a partition are read from its query")
            shape = (*after.weight.shape[:2], tokens, after.weight.shape[3])
            stream[n + 1] = dataclasses.replace(after, weight=dataclasses.replace(after.weight, shape=shape))
            reads.append(after.weight.index[:, 2])
        if np.concatenate(reads).max(initial=0) >= tokens:
            raise ProgramError("the query of a partition is one of its first tokens")
        layers, memory = (
            (program.unrolled_layers, tuple(stream)) if layer.cross else (tuple(stream), program.unrolled_memory)
        )
        return cls(table, largest, dataclasses.replace(program, layers=layers, memory=memory))


def _not_powers(sizes: Float[np.ndarray, " channels"], dtype: np.dtype[np.floating]) -> Float[np.ndarray, " channels"]:
    """Return the next larger numbers of the dtype for powers of two, so that products with all of them round."""
    larger = np.nextafter(sizes.astype(dtype), dtype.type(np.inf))
    return np.where(np.frexp(sizes)[0] == 0.5, larger, sizes).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one variable by ascending slopes: their numbers in some channels, and their parts of scores."""

    numbers: Float[np.ndarray, "rows channels"]
    channels: Int[np.ndarray, " channels"]
    row: Int[np.ndarray, " keys"]  # the row of every key
    slopes: Interval
    offsets: Interval

    @classmethod
    def of(
        cls, keys: _StoredKeys, channels: Int[np.ndarray, " channels"], slopes: Interval, offsets: Interval
    ) -> _Rows:
        """`slopes` and `offsets` are those of a unit of each number."""
        columns = keys.table[:, channels]
        if len(channels) == 1:
            levels, row = np.unique(columns[:, 0], return_inverse=True)
            numbers = levels[:, None]
        elif len(channels):
            numbers, row = np.unique(columns, axis=0, return_inverse=True)
        else:
            numbers, row = columns[:1], np.zeros(keys.count, np.int64)
        along = _combined(numbers, slopes[channels])
        order = np.argsort(along.mid, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        numbers, along = numbers[order], along[order]
        return cls(numbers, channels, place[row.reshape(-1)], along, _combined(numbers, offsets[channels]))


def _combined(numbers: Float[np.ndarray, "rows channels"], units: Interval) -> Interval:
    """Return Σ_c numbers_c·units_c for every row."""
    total = Interval.point(np.zeros(len(numbers)))
    for number, lo, hi in zip(numbers.T, units.lo, units.hi, strict=True):
        total = total + Interval.point(number) * Interval(np.full(len(number), lo), np.full(len(number), hi))
    return total


def _partition(keys: _StoredKeys, part: QueryEnclosure, box: Box, goal: float) -> tuple[AxisKeys, int]:
    """Return the head over combinations of rows, and the largest number of them that are needed at one point.

    Raise ProgramError if it is no such head.
    """
    room = PARTITION_SCORES[part.roundings.dtype]
    stage, d, reach, (head,), (rounds,) = part.stage, box.d, box.magnitude, part.stage.heads, part.roundings.heads
    slopes, offsets, per_unit = (interval(each[:-1]) for each in (head.slopes, head.offsets, head.values))
    moves, adds, gives = ((each.lo != 0) | (each.hi != 0) for each in (slopes, offsets, per_unit))
    is_affine = stage.linear.mid.any() or stage.linear.radius.any() or head.carried is not None
    if is_affine or (moves.sum(axis=1) > 1).any() or (gives.sum(axis=0) != 1).any():
        raise ProgramError("a number of a partition's keys counts for one variable, and an output has one number")
    rows = [_Rows.of(keys, np.flatnonzero(moves[:, axis]), slopes[:, axis], offsets) for axis in range(d)]
    cells, lines, misfit = _grid(keys, rows, np.flatnonzero(adds & ~moves.any(axis=1)), offsets)
    along, swings = zip(*(centred(each.slopes) for each in rows), strict=True)
    own_offsets = (each.offsets + Interval.point(line) for each, line in zip(rows, lines, strict=True))
    starts, moved = zip(*map(centred, own_offsets), strict=True)
    own, of_query = _score_errors(keys, part.roundings, rows, reach)
    # Weights of keys that are farther behind than NEGLIGIBLE are lost, and counted as such.
    kept = part.roundings.unit * (64 - 2 * NEGLIGIBLE[part.roundings.dtype])
    widths = sum(r * float(a.max()) + float(b.max()) for r, a, b in zip(reach.tolist(), swings, moved, strict=True))
    unsure = float(up(own + misfit + kept + widths, 4 * d + 8))
    by_output = [_combined(keys.table, per_unit[:, o]) for o in range(gives.shape[1])]
    values = Interval(*(np.stack([getattr(v, end) for v in by_output], axis=1) for end in ("lo", "hi")))
    values = values + interval(stage.constant)
    sizes = float(sizes_at(rounds.value_sizes.max(axis=0), reach[None]).max())
    spread = float((values.hi.max(axis=0) - values.lo.min(axis=0)).max())
    leak = PARTITION_LEAK * goal / (spread + goal + 4 * sizes) if goal > 0 else PARTITION_LEAK
    gap = float(up(2 * room * unsure + math.log(2 * d / leak), LIBM_ULPS))
    if not math.isfinite(gap + sum(float(errors.max(initial=0.0)) for errors in of_query)):
        raise ProgramError("the scores of the partition may overflow")
    axes = [
        StripRows.of(slope, offset, gap, up(room * errors), leak / d)
        for slope, offset, errors in zip(along, starts, of_query, strict=True)
    ]
    near = math.prod(axis.most_at_once for axis in axes)
    # Underflow of values, and the sum of all values before an engine divides it, grow with the number of keys.
    underflow, peak = rounds.underflow * keys.count, part.roundings.peak * keys.count
    of_all = dataclasses.replace(part.roundings, heads=(dataclasses.replace(rounds, underflow=underflow),), peak=peak)
    rounding = STAGE_ROUNDING * rounding_of_sums(of_all, reach[None], near, leak, keys.count)[0]
    return AxisKeys(part.outputs, axes, cells, values, 0.0, 1.0, rounding), near


def _grid(
    keys: _StoredKeys, rows: Sequence[_Rows], shared: Int[np.ndarray, " channels"], offsets: Interval
) -> tuple[Int[np.ndarray, "*rows"], tuple[Float[np.ndarray, " rows"], ...], float]:
    """Return the key of every combination of rows, the share of each row in the offsets, and the largest misfit.

    The channels `shared` add an offset that depends on no variable. Raise ProgramError unless keys are all combinations
    of rows, each once.
    """
    shape = tuple(len(each.numbers) for each in rows)
    if math.prod(shape) != keys.count:
        raise ProgramError("the keys are not all combinations of rows of each axis, each once")
    cells = np.full(keys.count, -1)
    cells[np.ravel_multi_index([each.row for each in rows], shape)] = np.arange(keys.count)
    if (cells < 0).any():
        raise ProgramError("the keys are not all combinations of rows of each axis, each once")
    constants, radii = centred(_combined(keys.table[:, shared], offsets[shared]))
    table = constants[cells].reshape(shape)
    first = float(table.flat[0])
    through = [tuple(slice(None) if i == axis else 0 for i in range(len(rows))) for axis in range(len(rows))]
    split = AdditiveOffsets.of(table, [table[line] - first for line in through], first)
    return cells.reshape(shape), split.lines, float(np.abs(split.misfit).max() + split.misfit_error + radii.max())


def _score_errors(
    keys: _StoredKeys, roundings: Roundings, rows: Sequence[_Rows], reach: Float[np.ndarray, " d"]
) -> tuple[float, list[Float[np.ndarray, " rows_but_one"]]]:
    """Return the errors of computed scores: those of every key, and for each variable those of the query.

    An error of the query, the same for all keys, moves the point at which their scores are taken. It changes the
    differences of neighbouring rows by the returned number. In float64 it counts as an error of every key.
    """
    (head,), reach = roundings.heads, up(reach * (1 + 2 * roundings.unit), 2)
    fine = head.scores
    if fine is None:
        return float(largest_score_error(head, reach[None])), [np.zeros(len(each.numbers) - 1) for each in rows]
    at, u, n = np.append(reach, 1.0), roundings.unit, fine.num_terms
    query, moves = fine.query @ at, fine.query[:, :-1].any(axis=1)
    parts = keys.largest @ np.abs(fine.keys[:-1])
    known = float((fine.own @ at).max() + head.score_underflow.max() * at.sum() + parts[~moves] @ query[~moves])
    # Every partial sum of n terms is at most the sum of their sizes.
    added = max(0, n - 1) * u / (1 - n * u) * float((fine.sizes @ at).max() + known + parts @ query)
    differences = (np.abs(np.diff(each.numbers @ fine.keys[each.channels], axis=0)) for each in rows)
    return float(up(known + added, 64)), [up(each[:, moves] @ query[moves], 64) for each in differences]
