"""The numpy engine: folded, streamed over keys and points, in the program's dtype.

It works on the normal form, so constant keys are projected once and only the tokens that are read are computed.
Heads are summed over blocks of keys (`streaming`), or factorised per axis if their keys form a grid (`grid`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.grid import GridHead
from attnc.engines.streaming import StreamedHead, streamed
from attnc.ir.normal_form import AttentionStage, SoftmaxStage, Stage, normal_form
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.rounding import up

if TYPE_CHECKING:
    from jaxtyping import Float

CELLS_PER_POINT_BLOCK = 2**21
"""Array cells of a block of points altogether: 16 MiB of float64."""
SCORES_PER_THREAD = 2**18
"""Scores, a millisecond or so of work, below which another thread does not pay."""

Progress = Callable[[float], None]


class NumpyEngine:
    """Evaluates one program; folding happens at construction. `work_per_point` counts the scores that a point costs.

    With `with_grids`, grids are factorised in the last stage alone: no later softmax can magnify their truncation.
    """

    def __init__(self, program: Program, *, with_grids: bool = True) -> None:
        self.program = program
        self.form = normal_form(program)
        self._stages = [_stream(stage, with_grids and stage is self.form.stages[-1]) for stage in self.form.stages]
        self.work_per_point = sum(stage.work_per_point for stage in self._stages)
        cells = [stage.cells_per_point for stage in self._stages]
        self._cells_per_point = max([1, math.prod(self.form.output.shape), *cells])

    def __call__(self, *inputs: np.ndarray, progress: Progress | None = None) -> np.ndarray:
        states = self.program.as_tokens(inputs)
        batch = len(states[0])
        u = np.concatenate([state.reshape(batch, state.shape[1] * state.shape[2]) for state in states], axis=1)
        out = np.empty((batch, *self.form.output.shape), self.program.dtype)
        threads = min(os.cpu_count() or 1, batch, 1 + batch * self.work_per_point // SCORES_PER_THREAD)
        step = max(1, min(CELLS_PER_POINT_BLOCK // self._cells_per_point, -(-batch // max(1, threads))))
        starts = range(0, batch, step)

        def work(start: int) -> None:
            out[start : start + step] = self._run_block(u[start : start + step])

        with ThreadPoolExecutor(max(1, threads)) as pool:
            # The work of one thread is done by this one: a pool starts its threads with the first task.
            for done, _ in enumerate(pool.map(work, starts) if threads > 1 else map(work, starts), 1):
                if progress:
                    progress(done / len(starts))
        return self.program.from_tokens(out)

    @cached_property
    def truncation(self) -> float:
        """A bound of the error of any output beyond the one that `ir.rounding` grants to a plain evaluation.

        It is 0 without a grid; `grid` lists its sources. A bound of the error of a plain evaluation, plus this one, is
        a bound of the error of this engine.
        """
        last = self._stages[-1] if self._stages else None
        if not isinstance(last, StreamedAttention):
            return 0.0
        off = abs(self.form.output.linear).astype(np.float64) @ last.truncation
        num_terms = len(last.truncation) + len(last.heads)
        return float(up(off.max(initial=0.0), 2 * num_terms + 4)) if off.any() else 0.0

    def _run_block(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        for stage in self._stages:
            u = stage(u)
        return self.form.output(u)


def advanced(stages: Sequence[Stage], u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
    """The variables after some stages of a normal form, block by block of points, without the truncation of grids."""
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

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
        outs = [_projected(head(u), folded.W_O) for head, folded in zip(self.heads, self._stage.heads, strict=True)]
        total = outs[0]
        for out in outs[1:]:
            total += out
        if self._stage.residual is not None:
            total += self._stage.residual(u)
        moved = total.reshape(len(u), total.shape[1] * total.shape[2])[:, self._stage.written]
        return np.concatenate([moved, u[:, self._stage.carried]], axis=1)


def _projected(mixed: Float[np.ndarray, "batch queries d_v"], W_O: Float[np.ndarray, "d_v width_out"]) -> np.ndarray:
    """mixed @ W_O, without a product for every point where that is one number."""
    return mixed * W_O[0, 0] if W_O.shape == (1, 1) else mixed @ W_O


class StreamedSoftmax:
    """A softmax stage, with the same call."""

    work_per_point = 0  # scores are counted, and a softmax stage makes none

    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._carried = stage.logits, stage.carried
        self.cells_per_point = 3 * math.prod(stage.logits.shape) + len(stage.carried)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
        weights = softmax(self._logits(u))
        moved = weights.reshape(len(u), weights.shape[1] * weights.shape[2])
        return np.concatenate([moved, u[:, self._carried]], axis=1)
