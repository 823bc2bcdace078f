"""A program as text for people (`describe`) and as rows for JSON (`layer_rows`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attnc.ir.layers import Attention, Layer
from attnc.ir.program import Program, token_shape
from attnc.ir.shapes import key_counts, main_start, memory_start, stream_shapes

CHANNELS_SHOWN = 8
HEADS_SHOWN = 4
LAYERS_SHOWN = 40
NAME_WIDTH = 24

Row = dict[str, Any]
Cells = tuple[str, ...]


def layer_rows(program: Program) -> list[Row]:
    """The facts of every layer, the memory's first, as plain JSON values.

    `keys`, `d_k`, `d_v` and `writes`, the channels that a head writes to, run over the heads.
    """
    keys = iter(key_counts(program))
    memory = zip(program.memory, stream_shapes(program.memory, memory_start(program))[1:], strict=True)
    main = zip(program.layers, stream_shapes(program.layers, main_start(program))[1:], strict=True)
    rows = [_row(layer, "memory", shape, keys) for layer, shape in memory]
    return rows + [_row(layer, "main", shape, keys) for layer, shape in main]


def _row(layer: Layer, stream: str, shape: tuple[int, int], keys: Iterator[int]) -> Row:
    heads = layer.heads if isinstance(layer, Attention) else ()
    return {
        "name": layer.name,
        "stream": stream,
        "kind": type(layer).__name__.lower(),
        "tokens": int(shape[0]),
        "width": int(shape[1]),
        "parameters": int(layer.num_parameters),
        "channels": list(layer.channels),
        "heads": len(heads),
        "keys": [int(next(keys)) for _ in heads],
        "d_k": [int(head.W_Q.shape[1]) for head in heads],
        "d_v": [int(head.W_V.shape[1]) for head in heads],
        "writes": [[layer.channels[i] for i in np.flatnonzero(head.W_O.any(axis=0))] for head in heads],
        "masked_heads": sum(head.mask is not None for head in heads),
        "residual": isinstance(layer, Attention) and layer.residual,
        "cross": isinstance(layer, Attention) and layer.cross,
    }


def describe(program: Program) -> str:
    """One line a layer, in columns: name, kind, state, parameters, what is particular."""
    rows = layer_rows(program)
    memory = [_layer_cells(row) for row in rows if row["stream"] == "memory"]
    main = [_layer_cells(row) for row in rows if row["stream"] == "main"]
    if len(program.input_shapes) > 1:
        memory.insert(0, _input_cells(program.input_shapes[1]))
    main.insert(0, _input_cells(program.input_shapes[0]))
    main.append(("output", str(program.output_shape), "", "", ""))
    memory, main = _shortened(memory), _shortened(main)
    lines = _aligned(memory + main)
    if not memory:
        return "\n".join(lines)
    sections = (("memory", lines[: len(memory)]), ("main", lines[len(memory) :]))
    return "\n\n".join("\n".join([title, *("  " + line for line in section)]) for title, section in sections)


def _input_cells(shape: tuple[int, ...]) -> Cells:
    return ("input", str(shape), _state(*token_shape(shape)), "", "")


def _layer_cells(row: Row) -> Cells:
    name, parameters = _clipped(row["name"]), _counted(row["parameters"], "non-zero")
    state = _state(row["tokens"], row["width"])
    if not row["heads"]:
        return (name, row["kind"], state, parameters, _channels(row["channels"]))
    written = list(dict.fromkeys(channel for channels in row["writes"] for channel in channels))
    return (name, row["kind"], state, parameters, f"{_heads(row)} → {_channels(written)}")


def _state(tokens: int, width: int) -> str:
    return f"{_counted(tokens, 'token')} × {width:,}"


def _heads(row: Row) -> str:
    sizes = [f"{_over_heads(row['keys'])} keys", f"d_k {_over_heads(row['d_k'])}", f"d_v {_over_heads(row['d_v'])}"]
    if row["keys"] == [1]:
        sizes[0] = "1 key"
    masked = {0: "no", row["heads"]: "yes"}.get(row["masked_heads"], f"in {_counted(row['masked_heads'], 'head')}")
    parts = [_counted(row["heads"], "head"), *sizes, f"residual {'yes' if row['residual'] else 'no'}", f"mask {masked}"]
    return ", ".join([*parts, "keys from memory"] if row["cross"] else parts)


def _over_heads(numbers: Sequence[int]) -> str:
    """17 if all heads agree, 5+5+17 if a few differ, 5–17 if many do."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]:,}"
    if len(numbers) <= HEADS_SHOWN:
        return "+".join(f"{number:,}" for number in numbers)
    return f"{min(numbers):,}–{max(numbers):,}"


def _channels(channels: Sequence[str]) -> str:
    shown = [_clipped(channel) for channel in channels[:CHANNELS_SHOWN]]
    more = len(channels) - len(shown)
    return " ".join([*shown, f"… +{more:,}"] if more else shown)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _clipped(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _shortened(rows: list[Cells]) -> list[Cells]:
    left_out = len(rows) - LAYERS_SHOWN
    if left_out <= 0:
        return rows
    half = LAYERS_SHOWN // 2
    return [*rows[:half], ("…", f"{left_out:,} more", "", "", ""), *rows[-half:]]


def _aligned(rows: list[Cells]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column == 3 else cell.ljust(width)  # numbers of parameters end under each other
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("   ".join(cells).rstrip())
    return lines
