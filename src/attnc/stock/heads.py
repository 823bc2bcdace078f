"""From a program to the heads of a stock checkpoint: constant keys and values, queries that are affine in channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.exports.stock_layout import ONE, StockHead, StockNetwork, input_channel
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, entry_name, normal_form, pruned
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead, unpacked
from attnc.targets.box import Box

Combination = dict[str, float]
"""Channels with their coefficients. The channel ONE holds 1."""


def stock_network(program: Program, box: Box) -> StockNetwork:
    """Return the heads of a program. Raise InputError if keys or values of one depend on the input.

    Every variable between two stages is a combination of channels: of those that heads write, and of the inputs.
    """
    form = pruned(normal_form(program))
    variables: list[Combination] = [{input_channel(name): 1.0} for name in box.names]
    heads: list[StockHead] = []
    for layer, stage in enumerate(form.stages):
        if not isinstance(stage, AttentionStage):
            raise InputError(f"layer {stage.name!r} is a softmax over features, which a stock checkpoint does not have")
        width, written = len(stage.channels), stage.written.tolist()
        before = stage.queried if stage.is_residual else None
        after: list[Combination] = [{} if before is None else _combined(before, entry, variables) for entry in written]
        for number, head in enumerate(stage.heads):
            for row in sorted({entry // width for entry in written}):
                entries = [entry for entry in written if entry // width == row and head.W_O[:, entry % width].any()]
                if not entries:
                    continue
                name = entry_name(stage, entries[0])
                keys, queries = _keys(head, row, [entry % width for entry in entries], variables, name)
                label = f"{layer}.{number}" if len(stage.tokens) == 1 else f"{layer}.{number}.{row}"
                writes = tuple(
                    entry_name(stage, entry) if _is_alone(stage, entry, after[written.index(entry)]) else f"{label}.{m}"
                    for m, entry in enumerate(entries)
                )
                heads.append(StockHead(label, layer, queries, keys, writes))
                for entry, channel in zip(entries, writes, strict=True):
                    mine = after[written.index(entry)]
                    mine[channel] = mine.get(channel, 0.0) + 1.0
        variables = [*after, *(variables[i] for i in stage.carried.tolist())]
    rows, columns = form.output.shape
    outputs = tuple(_combined(form.output, entry, variables) for entry in range(rows * columns))
    return StockNetwork(box, tuple(heads), outputs, program.output_shape)


def _is_alone(stage: AttentionStage, entry: int, residual: Mapping[str, float]) -> bool:
    """Return whether one head alone makes an entry, so that its channel has the name of the entry."""
    writers = sum(bool(head.W_O[:, entry % len(stage.channels)].any()) for head in stage.heads)
    return writers == 1 and not residual


def _combined(form: FloatForm, entry: int, variables: list[Combination]) -> Combination:
    """Return an entry of an affine form of the variables as a combination of channels."""
    found: Combination = {}
    row = form.linear[[entry]].tocoo()
    for variable, c in zip(row.coords[1].tolist(), row.data.tolist(), strict=True):
        for name, inner in variables[variable].items():
            found[name] = found.get(name, 0.0) + c * inner
    constant = float(unpacked(form.constant[[entry // form.shape[1]]])[0, entry % form.shape[1]])
    if constant:
        found[ONE] = found.get(ONE, 0.0) + constant
    return {name: c for name, c in found.items() if c != 0}


def _keys(
    head: FoldedHead[Any], row: int, columns: list[int], variables: list[Combination], name: str
) -> tuple[SoftHead[np.ndarray], tuple[Combination, ...]]:
    """Return the keys that a query sees, and its components that depend on the input. The others are offsets."""
    if not (head.keys.is_constant and head.values.is_constant):
        raise InputError(f"the keys or values of the head that writes {name!r} depend on the input")
    seen, d_k = head.seen(row), head.queries.shape[1]
    keys = np.asarray(unpacked(head.keys.constant), np.float64)[seen]
    values = np.asarray(unpacked(head.values.constant), np.float64)[seen] @ head.W_O.astype(np.float64)[:, columns]
    queries = [_combined(head.queries, row * d_k + j, variables) for j in range(d_k)]
    moves = [j for j, query in enumerate(queries) if query.keys() - {ONE}]
    offsets = sum((query.get(ONE, 0.0) * keys[:, j] for j, query in enumerate(queries) if j not in moves), 0.0)
    offsets = np.broadcast_to(np.asarray(offsets, np.float64), len(seen)).copy()
    return SoftHead(keys[:, moves], offsets, values), tuple(queries[j] for j in moves)


def scaled(network: StockNetwork) -> StockNetwork:
    """Return the network with values of at most 1, if no head reads the channels of another: the read-out scales them.

    The claims of a derivation are about the channels as they are. So this is for networks without one.
    """
    if any(
        name in head.writes for head in network.heads for other in network.heads for q in other.queries for name in q
    ):
        return network
    scales: dict[str, float] = {}
    heads = []
    for head in network.heads:
        sizes = np.abs(head.keys.values).max(axis=0)
        factors = np.where(sizes > 1, 2.0 ** np.ceil(np.log2(np.maximum(sizes, 1.0))), 1.0)
        scales |= dict(zip(head.writes, factors.tolist(), strict=True))
        keys = SoftHead(head.keys.slopes, head.keys.offsets, head.keys.values / factors)
        heads.append(replace(head, keys=keys))
    outputs = tuple({name: c * scales.get(name, 1.0) for name, c in output.items()} for output in network.outputs)
    return replace(network, heads=tuple(heads), outputs=outputs)
