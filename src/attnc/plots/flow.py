"""How the picture's points go through a network: the state before each stage, and which queries an output reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.streaming import streamed
from attnc.ir.normal_form import AttentionStage, NormalForm, Stage
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CELLS_PER_BLOCK = 2**21
"""Points are taken in blocks whose arrays have about this many cells."""


def state_before(
    form: NormalForm, stage: int, points: Float[np.ndarray, "points d"]
) -> Float[np.ndarray, "points variables"]:
    """u after the stages before this one, computed in the program's dtype."""
    u = np.asarray(points, form.output.linear.dtype)
    for passed in form.stages[:stage]:
        u = _advanced(passed, u)
    return u.astype(np.float64)


def _advanced(stage: Stage, u: np.ndarray) -> np.ndarray:
    if not isinstance(stage, AttentionStage):
        weights = softmax(stage.logits(u))
        return np.concatenate([weights.reshape(len(u), -1), u[:, stage.carried]], axis=1)
    heads = [streamed(head) for head in stage.heads]
    rows = max(1, CELLS_PER_BLOCK // max(1, *(head.cells_per_point for head in heads)))
    blocks = []
    for i in range(0, len(u), rows):
        block = u[i : i + rows]
        total = sum(run(block) @ head.W_O for run, head in zip(heads, stage.heads, strict=True))
        total = total if stage.residual is None else total + stage.residual(block)
        moved = np.asarray(total).reshape(len(block), -1)[:, stage.written]
        blocks.append(np.concatenate([moved, block[:, stage.carried]], axis=1))
    return np.concatenate(blocks)


def reads(form: NormalForm, output: int) -> list[Int[np.ndarray, " queries"]]:
    """For every stage the queries (of a softmax: the tokens) that matter to the output, found backwards."""
    needed = np.unique(form.output.linear[[output]].indices)
    found: list[np.ndarray] = []
    for stage in reversed(form.stages):
        if isinstance(stage, AttentionStage):
            written, width = stage.written, stage.heads[0].W_O.shape[1]
        else:
            written, width = np.arange(stage.logits.shape[0] * stage.logits.shape[1]), stage.logits.shape[1]
        queries = np.unique(written[needed[needed < len(written)]] // width)
        carried = stage.carried[needed[needed >= len(written)] - len(written)]
        found.insert(0, queries)
        needed = np.unique(np.concatenate([carried, *_used(stage, queries)]))
    return found


def _used(stage: Stage, queries: np.ndarray) -> list[np.ndarray]:
    if not isinstance(stage, AttentionStage):
        return [stage.logits.rows(queries).variables_used()]
    forms = [form for head in stage.heads for form in (head.queries.rows(queries), head.keys, head.values)]
    if stage.residual is not None:
        forms.append(stage.residual.rows(queries))
    return [form.variables_used() for form in forms]
