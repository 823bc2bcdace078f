"""The numpy engine: folded, streamed over keys and points, in the program's dtype.

It works on the normal form, so constant keys are projected once and only the tokens that are read are computed.
How a head goes through its keys is told in `streaming`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.streaming import Rows, StreamedHead, streamed
from attnc.ir.normal_form import AttentionStage, SoftmaxStage, normal_form
from attnc.ir.program import Program
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float

CELLS_PER_BLOCK = 2**21
"""Points are taken in blocks whose arrays have about this many cells altogether: 16 MiB of float64."""
SCORES_PER_THREAD = 2**18
"""Less work than this, a millisecond or so, is not worth another thread."""

Progress = Callable[[float], None]


class NumpyEngine:
    """Evaluates one program; folding happens at construction. `work_per_point` counts the scores that a point costs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.form = normal_form(program)
        self._stages = [_stream(stage) for stage in self.form.stages]
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

    def _run_block(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        for stage in self._stages:
            u = stage(u)
        return self._output(u)


def _stream(stage: AttentionStage | SoftmaxStage) -> _Attention | _Softmax:
    return _Attention(stage) if isinstance(stage, AttentionStage) else _Softmax(stage)


class _Attention:
    def __init__(self, stage: AttentionStage) -> None:
        self._stage = stage
        self.heads: list[StreamedHead] = [streamed(head) for head in stage.heads]
        self._residual = None if stage.residual is None else Rows(stage.residual)
        num_queries, width = stage.heads[0].queries.shape[0], stage.heads[0].W_O.shape[1]
        self.cells_per_point = 2 * num_queries * width + len(stage.written) + len(stage.carried)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
        outs = [head(u) @ folded.W_O for head, folded in zip(self.heads, self._stage.heads, strict=True)]
        total = outs[0]
        for out in outs[1:]:
            total += out
        if self._residual is not None:
            total += self._residual(u)
        moved = total.reshape(len(u), total.shape[1] * total.shape[2])[:, self._stage.written]
        return np.concatenate([moved, u[:, self._stage.carried]], axis=1)


class _Softmax:
    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._carried = Rows(stage.logits), stage.carried
        self.cells_per_point = 3 * self._logits.shape[0] * self._logits.shape[1] + len(stage.carried)

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch moved"]:
        weights = softmax(self._logits(u))
        moved = weights.reshape(len(u), weights.shape[1] * weights.shape[2])
        return np.concatenate([moved, u[:, self._carried]], axis=1)
