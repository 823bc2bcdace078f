"""From the stored weights of a program of one attention stage to what the prover works on.

Between embedding and read-out stands one attention layer: for a query and a head, scores s_k = q(x)·k_k(x), affine
in x unless a moving query meets a moving key, and values that the head's W_O and the read-out turn into outputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.stages.forms import Anatomy, Group, HeadForms, absolute
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Int


def one_stage(program: Program) -> OneStage:
    """The program as one stage over all its outputs: a head for each pair of a query token and a head.

    ProgramError if it has not exactly one attention layer, or scores that are not affine in the input.
    """
    anatomy = Anatomy.of(program)
    return _stage(anatomy, Group(np.arange(math.prod(program.output_shape)), np.arange(len(anatomy.place.queries))))


def stages(program: Program) -> tuple[tuple[OneStage, Int[np.ndarray, " outputs"]], ...]:
    """(stage, the outputs that it makes), flat, one for each set of query tokens that outputs are read from."""
    anatomy = Anatomy.of(program)
    return tuple((_stage(anatomy, group), group.outputs) for group in output_groups(program))


def output_groups(program: Program) -> tuple[Group, ...]:
    """The outputs by the set of their query tokens; those that are read from none go with the first group."""
    anatomy = Anatomy.of(absolute(program))  # absolute values: what cancels in the outputs still reads its token
    read, width = anatomy.read, anatomy.place.width
    queries: list[set[int]] = [set() for _ in range(math.prod(program.output_shape))]
    for output, column in zip(read.row.tolist(), read.column.tolist(), strict=True):
        if column < read.num_columns - 1:
            queries[output].add(column // width)
    by_queries: dict[tuple[int, ...], list[int]] = {key: [] for key in sorted({*map(_key, queries)} - {()})} or {(): []}
    first = next(iter(by_queries))
    for output, found in enumerate(queries):
        by_queries[_key(found) or first].append(output)
    return tuple(Group(np.array(outputs, np.int64), np.array(key, np.int64)) for key, outputs in by_queries.items())


def _key(queries: set[int]) -> tuple[int, ...]:
    return tuple(sorted(queries))


def _stage(anatomy: Anatomy, group: Group) -> OneStage:
    d, num_outputs = anatomy.queried.num_columns - 1, len(group.outputs)
    heads = tuple(stage_head(forms, num_outputs) for forms in anatomy.heads(group))
    mid, radius = anatomy.affine_part(group.outputs).dense(num_outputs)
    return OneStage(heads, Enclosed(mid[:, d].copy(), radius[:, d].copy()), Enclosed(mid[:, :d], radius[:, :d]))


def stage_head(forms: HeadForms, num_outputs: int) -> SoftHead[Enclosed]:
    """Scores and values of one query and one head, with W_O and the read-out in the values."""
    d, p = forms.query.num_columns - 1, forms.num_keys
    mid, radius = forms.scores().dense(p)
    value, error = (part.reshape(p, num_outputs, d + 1) for part in forms.outputs().dense(p * num_outputs))
    moves = bool(value[..., :d].any() or error[..., :d].any())
    return SoftHead(
        Enclosed(mid[:, :d].copy(), radius[:, :d].copy()),
        Enclosed(mid[:, d].copy(), radius[:, d].copy()),
        Enclosed(value[..., d].copy(), error[..., d].copy()),
        Enclosed(value[..., :d].copy(), error[..., :d].copy()) if moves else None,
    )
