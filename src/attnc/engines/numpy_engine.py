"""The numpy engine runs a folded program in blocks of keys and points, in the program's dtype.

It works on the normal form, so constant keys are projected once, and only the tokens that are read are computed. A head
is factorised per axis if its keys form a grid (`grid`). A program without grids and with few keys runs as a list of
instructions (`fused`). Otherwise a head is averaged over blocks of keys. No array of size queries × keys ever exists.

Then there are two passes over the keys. The first finds each query's largest score, and the second sums exponentials
shifted by it. A head with one block of keys keeps its scores instead of computing them again. Weights below
e^NEGLIGIBLE times the largest count as zero (`ir.rounding`), and a query skips the blocks that hold only such weights.
Together they change an average by at most num_keys · e^NEGLIGIBLE · (max v − min v).
"""

from __future__ import annotations

import _thread
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from attnc.engines.fused import Fused, RunBlock, exponentials, is_between
from attnc.engines.gradient import Gradients, GridGradients
from attnc.engines.grid import GridHead
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, SoftmaxStage, Stage, normal_form
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import unpacked
from attnc.ir.summing import MOST_KEYS, key_mix, key_sum
from attnc.numerics.arrays import Bool, Float, Int
from attnc.numerics.rounding import up

CELLS_PER_POINT_BLOCK = 2**21
"""Total number of array cells for a block of points: 16 MiB of float64."""
SCORES_PER_POINT_BLOCK = 2**26
"""Maximum number of scores for a block of several points: about half a second of work between two reports."""
SCORES_PER_THREAD = 2**18
"""Number of scores below which another thread does not pay: about a millisecond of work."""
LEAST_COMPILED = 2**23
"""The work of compiled loops (`Fused.work_per_point`) below which another thread does not pay: 0.2 ms. It starts within
0.1 ms. Measured with 10⁵ points: x·y takes 96 µs on one thread and 132 µs on two, a composition of 18 keys 627 and 370.
"""
MOST_PARTS = 16
"""Number of parts into which a large batch is divided for threads. It does not depend on the number of cores, because
products of matrices of other sizes are rounded otherwise."""

KEYS_PER_BLOCK = MOST_KEYS // 4
"""Number of keys of a block. Heads with up to four times as many keys have one block, whose scores are computed
once."""
SCORES_PER_BLOCK = 2**16
"""Number of scores computed at a time: 512 KiB of float64 stay in the cache of one core. The product is below the size
at which BLAS starts its own threads, which would compete with those of the engine."""
GATHERED_KEYS = 2**22
"""Maximum number of (query, visible key) pairs of a masked head whose keys are gathered per query: 32 MiB of
float64."""

CORES = os.cpu_count() or 1
"""Number of threads at most."""
FractionDone = Callable[[float], None]
"""A callback that gets the fraction of a run that is done."""
Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable, in the dtype of the points."""


class OutsideLimits(Exception):
    """A variable of a point is not within its limits."""


class NumpyEngine:
    """Evaluates one program, which is folded at construction. `work_per_point` is the number of scores per point.
    `has_grids` tells whether heads are factorised, and
    `has_loops` whether loops can be compiled for all of the program.

    With `with_grids`, grids are factorised in the last stage only, so that no later softmax can magnify their
    truncation. A call with `is_compiled` runs the loops that numba compiles, for grids and for lists of instructions.
    """

    def __init__(self, program: Program, *, with_grids: bool = True) -> None:
        self.program = program
        self.form = normal_form(program)
        self._stages = [_stream(stage, with_grids and stage is self.form.stages[-1]) for stage in self.form.stages]
        grids = [head for stage in self._stages for head in stage.heads if isinstance(head, GridHead)]
        self._fewest_points = max((grid.fewest_points for grid in grids), default=1)
        self._fused = None if grids else Fused.of(self.form, program.dtype)
        self.has_grids, self.has_loops = bool(grids), bool(grids) or self._fused is not None
        self.work_per_point = sum(stage.work_per_point for stage in self._stages)
        self._num_outputs = math.prod(self.form.output.shape)
        self._cells_per_point = max([1, self._num_outputs, *(stage.cells_per_point for stage in self._stages)])
        self._dtype, self._input_shapes, self._output_shape = program.dtype, program.input_shapes, program.output_shape
        most = np.full(self.form.num_inputs, np.inf, program.dtype)
        self._no_limits = -most, most

    def __call__(
        self,
        *inputs: np.ndarray,
        is_compiled: bool = False,
        progress: FractionDone | None = None,
        limits: Limits | None = None,
        threads: int | None = None,
    ) -> np.ndarray:
        """Return the outputs, by at most `threads` threads. With limits, raise OutsideLimits if a number is beyond."""
        u = self._variables(inputs)
        ends = self._no_limits if limits is None else limits
        batch = len(u)
        fused = None if self._fused is None else self._fused.run(batch, is_compiled)
        streamed = partial(self._streamed, is_compiled=is_compiled)
        run, cells = (streamed, self._cells_per_point) if fused is None else (fused, self._num_outputs)
        out = np.empty((batch, self._num_outputs), self._dtype)
        fewest = 1 if is_compiled else self._fewest_points
        work, least = self.work_per_point, 0
        if self._fused is not None and is_compiled:
            work, least = self._fused.work_per_point, LEAST_COMPILED
        is_inside = in_parts(
            run, u, out, ends, cells, work, fewest=fewest, least=least, threads=threads, progress=progress
        )
        if not is_inside and limits is not None:
            raise OutsideLimits
        return out.reshape(batch, *self._output_shape)

    def gradient(
        self,
        *inputs: np.ndarray,
        is_compiled: bool = False,
        progress: FractionDone | None = None,
        limits: Limits | None = None,
        threads: int | None = None,
        with_grids: bool = False,
    ) -> Float[np.ndarray, "batch outputs inputs"]:
        """Return the derivative of every output by every input. The arguments are those of a call.

        Grids are factorised only `with_grids`: certificates do not cover that.
        """
        u = self._variables(inputs)
        of = (self._grid_gradients if with_grids and self.has_grids else None) or self._gradients
        out = np.empty((len(u), of.num_outputs), self._dtype)
        ends, work = self._no_limits if limits is None else limits, (1 + of.num_inputs) * self.form.num_scores
        run = of.run(is_compiled=is_compiled)
        is_inside = in_parts(run, u, out, ends, of.num_outputs, work, threads=threads, progress=progress)
        if not is_inside and limits is not None:
            raise OutsideLimits
        return out.reshape(len(u), self._num_outputs, of.num_inputs)

    @cached_property
    def _gradients(self) -> Gradients:
        return Gradients(self.form, self._dtype)

    @cached_property
    def _grid_gradients(self) -> GridGradients | None:
        return GridGradients.of(self.form)

    def _variables(self, inputs: tuple[np.ndarray, ...]) -> Float[np.ndarray, "batch variables"]:
        """Return the inputs as one array in the program's dtype, checked for shape."""
        given = inputs[0] if len(inputs) == len(self._input_shapes) == 1 else None
        if type(given) is np.ndarray and given.dtype == self._dtype and given.shape[1:] == self._input_shapes[0]:
            return given.reshape(len(given), math.prod(self._input_shapes[0]))
        states = self.program.as_tokens(inputs)
        flat = [state.reshape(len(state), state.shape[1] * state.shape[2]) for state in states]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)

    @cached_property
    def truncation(self) -> float:
        """A bound of the error of any output beyond the error that `ir.rounding` allows for a plain evaluation.

        It is 0 without a grid. The module `grid` lists its sources. The sum of this bound and a bound for a plain
        evaluation bounds the error of this engine.
        """
        last = self._stages[-1] if self._stages else None
        if not isinstance(last, StreamedAttention):
            return 0.0
        off = abs(self.form.output.linear).astype(np.float64) @ last.truncation
        num_terms = len(last.truncation) + len(last.heads)
        return float(up(off.max(initial=0.0), 2 * num_terms + 4)) if off.any() else 0.0

    def _streamed(self, u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray, is_compiled: bool) -> bool:
        is_inside = is_between(u, least, most)
        for stage in self._stages:
            u = stage(u, is_compiled=is_compiled)
        out[:] = self.form.output(u).reshape(len(u), self._num_outputs)
        return is_inside


def in_parts(
    run: RunBlock,
    u: Float[np.ndarray, "batch variables"],
    out: Float[np.ndarray, "batch outputs"],
    limits: Limits,
    cells_per_point: int,
    work_per_point: int,
    *,
    fewest: int = 1,
    least: int = 0,
    threads: int | None = None,
    progress: FractionDone | None = None,
) -> bool:
    """Set the outputs, in parts that threads take. Return whether all variables are within the limits.

    A part has `fewest` points or more if two parts are left, and memory allows. With less work than `least` in all, one
    thread does it. A part has at least half of that work, because each part costs a call. The calling thread takes
    parts like the others, because waking a thread takes some time. No part starts once another one has found a variable
    beyond its limits.
    """
    batch = len(u)
    work = batch * work_per_point
    parts = min(MOST_PARTS, 1 + work // max(SCORES_PER_THREAD, least // 2)) if work >= least else 1
    most = CELLS_PER_POINT_BLOCK // max(1, cells_per_point), SCORES_PER_POINT_BLOCK // max(1, work_per_point)
    step = max(1, min(*most, -(-batch // parts)), min(fewest, 2 * most[0], -(-batch // 2)))
    if batch == step and progress is None:
        return run(u, out, *limits)
    starts, done, is_inside = SimpleQueue[int](), list[int](), True
    for start in range(0, batch, step):
        starts.put(start)
    count = starts.qsize()

    def take_parts(progress: FractionDone | None = None) -> None:
        nonlocal is_inside
        with suppress(Empty):
            while True:
                start = starts.get_nowait()
                if is_inside and not run(u[start : start + step], out[start : start + step], *limits):
                    is_inside = False
                done.append(start)
                if progress:
                    progress(len(done) / count)

    others = min(CORES if threads is None else threads, parts, count) - 1
    if others < 1:
        take_parts(progress)
        return is_inside
    helpers = [_Helper(take_parts) for _ in range(others)]
    try:
        take_parts(progress)
    finally:
        with suppress(Empty):  # after an error, no new part starts
            while True:
                starts.get_nowait()
        errors = [helper.error() for helper in helpers]
    for error in filter(None, errors):
        raise error
    if progress:
        progress(1.0)
    return is_inside


class _Helper:
    """A thread that runs a function once.

    A thread of `threading` takes 40 µs more to start, because it reports back, and a pool 100 µs more. Threads that
    stay do not pay: systems may wake them on the core of the caller, where both take turns.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._is_done = run, _thread.allocate_lock()
        self._error: BaseException | None = None
        self._is_done.acquire()
        _thread.start_new_thread(self._once, ())

    def _once(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._is_done.release()

    def error(self) -> BaseException | None:
        """Wait for the end, and return the exception that ended the function, if there was one."""
        self._is_done.acquire()
        return self._error


@cache
def has_numba() -> bool:
    """Return whether loops can be compiled: whether the extra `fast` is installed."""
    return importlib.util.find_spec("numba") is not None


def advanced(stages: Sequence[Stage], u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
    """Return the variables after some stages of a normal form, without the truncation of grids."""
    for stage in stages:
        run = _stream(stage, may_be_grid=False)
        step = max(1, CELLS_PER_POINT_BLOCK // max(1, run.cells_per_point))
        u = np.concatenate([run(u[i : i + step]) for i in range(0, max(1, len(u)), step)])
    return u


def _stream(stage: Stage, may_be_grid: bool) -> StreamedAttention | StreamedSoftmax:
    return StreamedAttention(stage, may_be_grid) if isinstance(stage, AttentionStage) else StreamedSoftmax(stage)


class StreamedAttention:
    """An attention stage: (batch, variables) → (batch, moved), the variables of the next stage."""

    def __init__(self, stage: AttentionStage, may_be_grid: bool) -> None:
        self._stage = stage
        has_grids = may_be_grid and stage.residual is None
        grids = [GridHead.of(head) if has_grids else None for head in stage.heads]
        self.heads: list[StreamedHead] = [g or streamed(head) for g, head in zip(grids, stage.heads, strict=True)]
        num_queries, width = stage.heads[0].queries.shape[0], stage.heads[0].W_O.shape[1]
        own = 2 * num_queries * width + len(stage.written) + len(stage.carried)
        self.cells_per_point = max(own, *(head.cells_per_point for head in self.heads))
        self.work_per_point = sum(head.work_per_point for head in self.heads)

    @property
    def truncation(self) -> Float[np.ndarray, " moved"]:
        """A bound of the truncation of grids in each variable that the stage writes."""
        off = np.zeros((self._stage.heads[0].queries.shape[0], self._stage.heads[0].W_O.shape[1]))
        for head, folded in zip(self.heads, self._stage.heads, strict=True):
            if isinstance(head, GridHead):
                off += up(head.truncation @ np.abs(folded.W_O.astype(np.float64)), 2 * len(folded.W_O) + 4)
        return np.concatenate([off.ravel()[self._stage.written], np.zeros(len(self._stage.carried))])

    def __call__(
        self, u: Float[np.ndarray, "batch variables"], *, is_compiled: bool = False
    ) -> Float[np.ndarray, "batch moved"]:
        averages = [head(u, is_compiled=is_compiled) if isinstance(head, GridHead) else head(u) for head in self.heads]
        outs = [_projected(mixed, head.W_O) for mixed, head in zip(averages, self._stage.heads, strict=True)]
        total = outs[0]
        for out in outs[1:]:
            total += out
        if self._stage.residual is not None:
            total += self._stage.residual(u)
        moved = total.reshape(len(u), total.shape[1] * total.shape[2])[:, self._stage.written]
        return np.concatenate([moved, u[:, self._stage.carried]], axis=1)


def _projected(mixed: Float[np.ndarray, "batch queries d_v"], W_O: Float[np.ndarray, "d_v width_out"]) -> np.ndarray:
    """Return mixed @ W_O. If W_O is one number, no matrix product is made for every point."""
    return mixed * W_O[0, 0] if W_O.shape == (1, 1) else mixed @ W_O


class StreamedSoftmax:
    """A softmax stage, with the same call."""

    work_per_point = 0  # only scores are counted, and a softmax stage computes none
    heads: tuple[StreamedHead, ...] = ()

    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._carried = stage.logits, stage.carried
        self.cells_per_point = 3 * math.prod(stage.logits.shape) + len(stage.carried)

    def __call__(
        self, u: Float[np.ndarray, "batch variables"], *, is_compiled: bool = False
    ) -> Float[np.ndarray, "batch moved"]:
        weights = softmax(self._logits(u))
        moved = weights.reshape(len(u), weights.shape[1] * weights.shape[2])
        return np.concatenate([moved, u[:, self._carried]], axis=1)


# --- heads averaged over blocks of keys -------------------------------------------------------------------------------


class StreamedHead(Protocol):
    """A head as an engine runs it."""

    cells_per_point: int  # array cells alive at once for one point
    work_per_point: int  # scores computed for one point

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch queries d_v"]: ...


def streamed(head: FoldedHead) -> StreamedHead:
    """Return the head in the form that runs: gathered if a mask hides most keys, pruned if its keys are constant."""
    if head.mask is not None:
        shared = head.mask.shared
        visible = [(queries, np.concatenate([shared, own])) for queries, own in head.mask.groups()]
        pairs = sum(len(queries) * len(keys) for queries, keys in visible)
        if pairs <= min(GATHERED_KEYS, head.queries.shape[0] * head.keys.shape[0] // 4):
            return _Gathered(head, visible)
    return _StreamedSoftHead(head) if head.keys.is_constant else _MovingKeys(head)


class _Blocked:
    """The parts of a head that is averaged over blocks of keys."""

    def __init__(self, head: FoldedHead) -> None:
        self._queries, self._keys, self._values, self._mask = head.queries, head.keys, head.values, head.mask
        (self._num_queries, self._d_k), num_keys = head.queries.shape, head.keys.shape[0]
        self._dtype, self._d_v = head.W_O.dtype, head.W_O.shape[0]
        self._negligible = NEGLIGIBLE[str(self._dtype)]
        # Few keys form one block. Their scores are computed once and kept.
        step = num_keys if num_keys <= 4 * KEYS_PER_BLOCK else KEYS_PER_BLOCK
        self._blocks = [slice(start, min(start + step, num_keys)) for start in range(0, num_keys, step)]
        self.work_per_point = self._num_queries * num_keys

    def _hidden(
        self, keys: slice, queries: slice | Int[np.ndarray, " chosen"] = slice(None)
    ) -> Bool[np.ndarray, "chosen keys"] | None:
        """Return which of these keys the mask hides from which queries; None if it hides none."""
        hidden = None if self._mask is None else ~self._mask.visible(queries, keys)
        return hidden if hidden is not None and hidden.any() else None

    def _masked(self, scores: np.ndarray, keys: slice, queries: slice | Int[np.ndarray, " chosen"]) -> np.ndarray:
        """Return the scores, with −∞ in place of those that the mask hides."""
        hidden = self._hidden(keys, queries)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden)
        return scores


class _StreamedSoftHead(_Blocked):
    """A soft head. The queries of all points are rows of one matrix, and blocks out of reach are skipped."""

    def __init__(self, head: FoldedHead) -> None:
        super().__init__(head)
        self._soft = head.over_queries()
        self._summarise_blocks()
        moving = 0 if self._values.is_constant else self._blocks[0].stop * self._d_v
        self.cells_per_point = self._num_queries * (self._d_k + self._d_v + 4 * len(self._blocks) + moving)

    def _summarise_blocks(self) -> None:
        """Find the box and the middle key of each block, and which queries see that key or no key of the block."""
        boxes = []
        self._is_masked: list[bool] = []
        self._sees_none = np.zeros((self._num_queries, len(self._blocks)), bool)
        self._sees_middle = ~self._sees_none
        for j, block in enumerate(self._blocks):
            keys = unpacked(self._soft.slopes[block])
            boxes.append((keys.min(axis=0), keys.max(axis=0), keys[len(keys) // 2]))
            hidden = self._hidden(block)
            self._is_masked.append(hidden is not None)
            if hidden is not None:
                self._sees_none[:, j] = hidden.all(axis=1)
                self._sees_middle[:, j] = ~hidden[:, len(keys) // 2]
        self._low, self._high, self._middle = (np.stack(part).T for part in zip(*boxes, strict=True))
        self._size = np.maximum(np.abs(self._low), np.abs(self._high))

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch queries d_v"]:
        queries = self._queries(u).reshape(len(u) * self._num_queries, self._d_k)
        total = np.zeros((len(queries), 1), self._dtype)
        mixed = np.zeros((len(queries), self._d_v), self._dtype)
        if len(self._blocks) == 1:
            for rows in self._chunks(np.arange(len(queries)), 0):
                scores = self._scores(queries, rows, 0)
                self._add(scores, scores.max(axis=1), rows, 0, u, total, mixed)
        else:
            tops = np.full((len(queries), len(self._blocks)), -np.inf, self._dtype)
            for j, rows in self._met(self._is_in_reach(queries)):
                tops[rows, j] = self._scores(queries, rows, j).max(axis=1)
            top = tops.max(axis=1)
            for j, rows in self._met(tops >= (top + self._negligible)[:, None]):
                self._add(self._scores(queries, rows, j), top[rows], rows, j, u, total, mixed)
        mixed /= total
        return mixed.reshape(len(u), self._num_queries, self._d_v)

    def _is_in_reach(self, queries: Float[np.ndarray, "rows d_k"]) -> Bool[np.ndarray, "rows blocks"]:
        """Return False where an upper bound of a block's scores proves that all of its exponentials are negligible."""
        repeats = len(queries) // max(1, self._num_queries)
        highest = np.maximum(queries, 0) @ self._high + np.minimum(queries, 0) @ self._low
        some = queries @ self._middle
        some[~np.tile(self._sees_middle, (repeats, 1))] = -np.inf
        # Bound and scores are inner products of d_k terms. The error of each is at most γ_{d_k+1}·|q|·|k|.
        slack = np.abs(queries) @ self._size
        slack *= 4 * (queries.shape[1] + 2) * np.finfo(self._dtype).eps
        reach = highest + slack
        needed = some.max(axis=1) - slack.max(axis=1) + self._negligible
        is_in_reach: np.ndarray = reach >= needed[:, None]
        is_in_reach &= ~np.tile(self._sees_none, (repeats, 1))
        return is_in_reach

    def _met(self, is_met: Bool[np.ndarray, "rows blocks"]) -> Iterator[tuple[int, Int[np.ndarray, " chosen"]]]:
        for j in np.flatnonzero(is_met.any(axis=0)).tolist():
            for rows in self._chunks(np.flatnonzero(is_met[:, j]), j):
                yield j, rows

    def _chunks(self, rows: Int[np.ndarray, " rows"], j: int) -> Iterator[Int[np.ndarray, " chosen"]]:
        step = max(1, SCORES_PER_BLOCK // (self._blocks[j].stop - self._blocks[j].start))
        for start in range(0, len(rows), step):
            yield rows[start : start + step]

    def _scores(self, queries: np.ndarray, rows: np.ndarray, j: int) -> Float[np.ndarray, "chosen keys"]:
        scores: np.ndarray = queries[rows] @ unpacked(self._soft.slopes[self._blocks[j]]).T
        return self._masked(scores, self._blocks[j], rows % self._num_queries) if self._is_masked[j] else scores

    def _add(
        self,
        scores: Float[np.ndarray, "chosen keys"],
        top: Float[np.ndarray, " chosen"],
        rows: Int[np.ndarray, " chosen"],
        j: int,
        u: np.ndarray,
        total: Float[np.ndarray, "rows one"],
        mixed: Float[np.ndarray, "rows d_v"],
    ) -> None:
        """Add the exponentials of these scores, and their products with the values, to the sums.

        Overwrite the scores.
        """
        weights = exponentials(scores, top[:, None])
        total[rows, 0] += key_sum(weights)
        if self._values.is_constant:
            mixed[rows] += key_mix(weights, unpacked(self._soft.values[self._blocks[j]]))
        else:
            points, which = np.unique(rows // self._num_queries, return_inverse=True)
            values = self._values.block(self._blocks[j], u[points])
            mixed[rows] += key_mix(weights[:, None], values[which])[:, 0]


class _MovingKeys(_Blocked):
    """A head whose keys depend on the point."""

    def __init__(self, head: FoldedHead) -> None:
        super().__init__(head)
        keys = self._blocks[0].stop
        self._queries_per_block = max(1, min(self._num_queries, SCORES_PER_BLOCK // keys))
        per_key = self._queries_per_block + self._d_k + self._d_v
        self.cells_per_point = keys * per_key + self._num_queries * (self._d_k + self._d_v)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch queries d_v"]:
        queries = self._queries(u)
        mixed = np.empty((*queries.shape[:2], self._d_v), queries.dtype)
        for start in range(0, queries.shape[1], self._queries_per_block):
            block = slice(start, start + self._queries_per_block)
            mixed[:, block] = self._average(queries[:, block], block, u)
        return mixed

    def _average(self, queries: np.ndarray, which: slice, u: np.ndarray) -> np.ndarray:
        tops, scores = [], np.zeros(0)
        for keys in self._blocks:
            scores = self._scores(queries, which, keys, u)
            tops.append(scores.max(axis=-1, keepdims=True))
        top = np.max(tops, axis=0)
        total = np.zeros_like(top)
        mixed = np.zeros((*queries.shape[:2], self._d_v), queries.dtype)
        for keys, block_top in zip(self._blocks, tops, strict=True):
            if (block_top < top + self._negligible).all():
                continue
            if len(self._blocks) > 1:
                scores = self._scores(queries, which, keys, u)
            weights = exponentials(scores, top)
            total += key_sum(weights)[..., None]
            mixed += key_mix(weights, self._values.block(keys, u))
        mixed /= total
        return mixed

    def _scores(self, queries: np.ndarray, which: slice, keys: slice, u: np.ndarray) -> np.ndarray:
        return self._masked(queries @ np.swapaxes(self._keys.block(keys, u), -1, -2), keys, which)


class _Gathered:
    """A head whose mask hides most keys.

    Each query gets only its own keys, so that work grows with the visible keys.
    """

    def __init__(self, head: FoldedHead, visible: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._queries, self._d_v = head.queries, head.W_O.shape[0]
        by_count: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for queries, keys in visible:
            all_queries, all_keys = by_count.setdefault(len(keys), ([], []))
            all_queries.append(queries)
            all_keys.append(np.broadcast_to(keys, (len(queries), len(keys))))
        self._pieces: list[tuple[np.ndarray, FloatForm, FloatForm]] = []
        for count, (all_queries, all_keys) in by_count.items():
            chosen, keys = np.concatenate(all_queries), np.concatenate(all_keys)
            step = max(1, SCORES_PER_BLOCK // count)
            for i in range(0, len(chosen), step):
                rows = keys[i : i + step].ravel()
                self._pieces.append((chosen[i : i + step], head.keys.rows(rows), head.values.rows(rows)))
        sizes = [keys.shape[0] for _, keys, _ in self._pieces]
        self.work_per_point = sum(sizes)
        self.cells_per_point = max(sizes, default=0) * (head.keys.shape[1] + self._d_v + 2)
        self.cells_per_point += head.queries.shape[0] * (head.queries.shape[1] + self._d_v)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch queries d_v"]:
        queries = self._queries(u)
        mixed = np.empty((*queries.shape[:2], self._d_v), queries.dtype)
        for chosen, key_rows, value_rows in self._pieces:
            shape = (len(u), len(chosen), key_rows.shape[0] // len(chosen))
            keys, values = (rows(u).reshape(*shape, rows.shape[1]) for rows in (key_rows, value_rows))
            scores = np.zeros(shape, queries.dtype)
            for column in range(keys.shape[3]):
                scores += keys[..., column] * queries[:, chosen, column, None]
            weights = exponentials(scores, scores.max(axis=-1, keepdims=True))
            total = key_sum(weights)
            for column in range(self._d_v):
                mixed[:, chosen, column] = key_sum(weights * values[..., column]) / total
        return mixed
