"""The numpy engine: folded, streamed over keys and points, in the program's dtype.

It works on the normal form, so constant keys are projected once and only the tokens that are read are computed.
How a head goes through its keys is told in `streaming`, and how it need not, where they are a grid, in `grid`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.grid import GridHead
from attnc.engines.rows import Rows
from attnc.engines.streaming import StreamedHead, streamed
from attnc.ir.normal_form import AttentionStage, SoftmaxStage, normal_form
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.rounding import up

if TYPE_CHECKING:
    from jaxtyping import Float

CELLS_PER_BLOCK = 2**21
"""Points are taken in blocks whose arrays have about this many cells altogether: 16 MiB of float64."""
SCORES_PER_THREAD = 2**18
"""Less work than this, a millisecond or so, is not worth another thread."""

Progress = Callable[[float], None]


class NumpyEngine:
    """Evaluates one program; folding happens at construction. `work_per_point` counts the scores that a point costs.

    Grids are evaluated as such in the last stage alone, `with_grids`: what they are off by, no later softmax magnifies.
    """

    def __init__(self, program: Program, *, with_grids: bool = True) -> None:
        self.program = program
        self.form = normal_form(program)
        self._stages = [_stream(stage, with_grids and stage is self.form.stages[-1]) for stage in self.form.stages]
        self._output = Rows(self.form.output)
        heads = [head for stage in self._stages if isinstance(stage, _Attention) for head in stage.heads]
        self.work_per_point = sum(head.work_per_point for head in heads)
        cells = [head.cells_per_point for head in heads] + [stage.cells_per_point for stage in self._stages]
        self._cells_per_point = max([1, self._output.shape[0] * self._output.shape[1], *cells])

    def __call__(self, *inputs: np.ndarray, progress: Progress | None = None) -> np.ndarray:
        states = self.program.as_tokens(inputs)
        batch = len(states[0])
        u = np.concatenate([state.reshape(batch, state.shape[1] * state.shape[2]) for state in states], axis=1)
        out = np.empty((batch, *self.form.output.shape), self.program.dtype)
        threads = min(os.cpu_count() or 1, batch, 1 + batch * self.work_per_point // SCORES_PER_THREAD)
        step = max(1, min(CELLS_PER_BLOCK // self._cells_per_point, -(-batch // max(1, threads))))
        starts = range(0, batch, step)

        def work(start: int) -> None:
            out[start : start + step] = self._run_block(u[start : start + step])

        with ThreadPoolExecutor(max(1, threads)) as pool:
            # One thread's work is done here and now: a pool starts its threads with the first task.
            for done, _ in enumerate(pool.map(work, starts) if threads > 1 else map(work, starts), 1):
                if progress:
                    progress(done / len(starts))
        return self.program.from_tokens(out)

    @cached_property
    def truncation(self) -> float:
        """What any output may be off by beyond what `ir.rounding` grants to a plain evaluation: 0 without a grid.

        Windows of anchors, and the like (see `grid`). A bound on the error of this engine is one on that of a plain
        evaluation plus this.
        """
        last = self._stages[-1] if self._stages else None
        if not isinstance(last, _Attention):
            return 0.0
        off = abs(self.form.output.linear).astype(np.float64) @ last.truncation
        num_terms = len(last.truncation) + len(last.heads)
        return float(up(off.max(initial=0.0), 2 * num_terms + 4)) if off.any() else 0.0

    def _run_block(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        for stage in self._stages:
            u = stage(u)
        return self._output(u)


def _stream(stage: AttentionStage | SoftmaxStage, may_be_grid: bool) -> _Attention | _Softmax:
    return _Attention(stage, may_be_grid) if isinstance(stage, AttentionStage) else _Softmax(stage)


class _Attention:
    def __init__(self, stage: AttentionStage, may_be_grid: bool) -> None:
        self._stage = stage
        has_grids = may_be_grid and stage.residual is None
        grids = [GridHead.of(head) if has_grids else None for head in stage.heads]
        self.heads: list[StreamedHead] = [g or streamed(head) for g, head in zip(grids, stage.heads, strict=True)]
        self._residual = None if stage.residual is None else Rows(stage.residual)
        num_queries, width = stage.heads[0].queries.shape[0], stage.heads[0].W_O.shape[1]
        self.cells_per_point = 2 * num_queries * width + len(stage.written) + len(stage.carried)

    @property
    def truncation(self) -> Float[np.ndarray, " moved"]:
        """What grids may be off by, in each variable that is made."""
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
        if self._residual is not None:
            total += self._residual(u)
        moved = total.reshape(len(u), total.shape[1] * total.shape[2])[:, self._stage.written]
        return np.concatenate([moved, u[:, self._stage.carried]], axis=1)


def _projected(mixed: Float[np.ndarray, "batch queries d_v"], W_O: Float[np.ndarray, "d_v width_out"]) -> np.ndarray:
    """mixed @ W_O, without a product for every point where that is one number."""
    return mixed * W_O[0, 0] if W_O.shape == (1, 1) else mixed @ W_O


class _Softmax:
    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._carried = Rows(stage.logits), stage.carried
        self.cells_per_point = 3 * self._logits.shape[0] * self._logits.shape[1] + len(stage.carried)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
        weights = softmax(self._logits(u))
        moved = weights.reshape(len(u), weights.shape[1] * weights.shape[2])
        return np.concatenate([moved, u[:, self._carried]], axis=1)
