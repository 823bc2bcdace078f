"""From the normal form to the softmaxes of a layer: their scores as functions of the state, their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage
from attnc.plots.flow import reads
from attnc.plots.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from scipy.sparse import csr_array


def selectors(form: NormalForm, stage: int, output: int, queries: Int[np.ndarray, " queries"]) -> list[Selector]:
    """Every head of a stage for every one of the queries, query by query."""
    found = form.stages[stage]
    is_last = stage == len(form.stages) - 1
    gains, base = _gains(form, output) if is_last else ({}, 0.0)
    if isinstance(found, SoftmaxStage):
        return [_of_softmax(found, stage, int(token), gains, base) for token in queries]
    gains = gains if found.residual is None else {}
    return [_of_head(found, stage, h, int(query), gains, base) for query in queries for h in range(len(found.heads))]


def read_selectors(form: NormalForm, stage: int, output: int) -> list[Selector]:
    """For the queries that the output reads."""
    return selectors(form, stage, output, reads(form, output)[stage])


def _of_head(
    stage: AttentionStage, position: int, h: int, query: int, gains: dict[int, np.ndarray], base: float
) -> Selector:
    head = stage.heads[h]
    seen = head.seen(query)
    values = None
    if set(gains) == {query} and head.values.is_constant:  # otherwise other queries add to the same output
        values = np.asarray(head.values.constant @ (head.W_O @ gains[query]), np.float64)[seen]
    affine = _affine_scores(head, query, seen)
    a, c = affine if affine is not None else (None, np.zeros(len(seen)))
    return Selector(position, stage.name, h, query, seen, a, c, values, base, head)


def _of_softmax(stage: SoftmaxStage, position: int, token: int, gains: dict[int, np.ndarray], base: float) -> Selector:
    row = stage.logits.rows(np.array([token]))
    c = row.constant.toarray()[0].astype(np.float64)
    values = np.asarray(gains[token], np.float64) if set(gains) == {token} else None
    return Selector(
        position, stage.name, None, token, np.arange(len(c)), row.linear.astype(np.float64), c, values, base
    )


def _affine_scores(
    head: FoldedHead, query: int, seen: Int[np.ndarray, " keys"]
) -> tuple[csr_array, Float[np.ndarray, " keys"]] | None:
    """(a, c) of query(u)·key_k(u); None where a component that moves in the query meets one that moves in a key."""
    from scipy.sparse import csr_array

    one, keys = head.queries.rows(np.array([query])), head.keys
    if len(seen) < keys.shape[0]:
        keys = keys.rows(seen)
    keys = FloatForm(keys.linear.astype(np.float64), keys.constant.astype(np.float64))
    moving = np.flatnonzero(np.diff(one.linear.indptr))
    moved = np.unique(np.flatnonzero(np.diff(keys.linear.indptr)) % keys.shape[1])
    if np.intersect1d(moving, moved).size:
        return None
    still = keys.times(one.constant.toarray().T.astype(np.float64))
    a = csr_array(keys.constant @ one.linear.astype(np.float64) + still.linear)
    return a, still.constant.toarray()[:, 0]


def _gains(form: NormalForm, output: int) -> tuple[dict[int, Float[np.ndarray, " channels"]], float]:
    """What the output takes of each query's (or token's) channels in the last stage, and what it adds to that.

    Empty where it also takes what was carried past the stage.
    """
    stage, row = form.stages[-1], form.output.linear[[output]]
    base = float(form.output.constant.toarray().ravel()[output])
    if isinstance(stage, AttentionStage):
        written, width = stage.written, stage.heads[0].W_O.shape[1]
    else:
        written, width = np.arange(stage.logits.shape[0] * stage.logits.shape[1]), stage.logits.shape[1]
    used = row.indices[row.data != 0]
    if (used >= len(written)).any():
        return {}, base
    gains: dict[int, np.ndarray] = {}
    for variable, gain in zip(used, row.data[row.data != 0], strict=True):
        query, channel = divmod(int(written[variable]), width)
        gains.setdefault(query, np.zeros(width))[channel] = gain
    return gains, base
