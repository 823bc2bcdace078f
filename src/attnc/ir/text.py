"""A program as text for people (`describe`) and as rows for JSON (`layer_rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnc.ir.program import Program, token_shape
from attnc.ir.repeats import Repeat
from attnc.ir.shapes import PlacedLayer, streams

CHANNELS_SHOWN = 8
"""Maximum number of channel names on a line. Eight short names fit the width of a terminal."""
HEADS_SHOWN = 4
"""Maximum number of heads whose sizes are written out, as in 5+5+17. For more heads a range is shorter."""
LAYERS_SHOWN = 40
"""Maximum number of lines per stream: about one screen."""
NAME_WIDTH = 24
"""Maximum number of characters of a name, so that the other columns fit beside it in a terminal."""

Row = dict[str, Any]
Cells = tuple[str, ...]


def layer_rows(program: Program) -> list[Row]:
    """Return the facts of every layer, the memory's first, as plain JSON values.

    Layers that repeat are described once, in their first turn, with the number of their `turns`. `keys`, `d_k`, `d_v`
    and `writes`, the channels that a head writes to, run over the heads.
    """
    rows = []
    stored = (program.memory, program.layers)
    for name, parts, stream in zip(("memory", "main"), stored, streams(program), strict=True):
        at = 0
        for part in parts:
            turn, turns = (len(part.layers), part.count) if isinstance(part, Repeat) else (1, 1)
            rows += [_row(step, name, turns) for step in stream.steps[at : at + turn]]
            at += turn * turns
    return rows


def _row(step: PlacedLayer, stream: str, turns: int) -> Row:
    layer, heads = step.layer, step.layer.heads
    return {
        "name": layer.name,
        "stream": stream,
        "kind": type(layer).__name__.lower(),
        "turns": turns,
        "tokens": int(step.after[0]),
        "width": int(step.after[1]),
        "parameters": int(layer.num_parameters),
        "channels": list(layer.channels),
        "heads": len(heads),
        "keys": step.key_counts(),
        "d_k": [int(head.W_Q.shape[1]) for head in heads],
        "d_v": [int(head.W_V.shape[1]) for head in heads],
        "writes": [[layer.channels[i] for i in np.flatnonzero(head.W_O.any(axis=0))] for head in heads],
        "masked_heads": sum(head.mask is not None for head in heads),
        "residual": layer.residual,
        "cross": layer.cross,
    }


def describe(program: Program) -> str:
    """Return one line per layer, in columns: name, kind, state, parameters, particulars. `× T` stands for T turns."""
    sections: dict[str, list[Cells]] = {"memory": [], "main": []}
    for title, shape in zip(("main", "memory"), program.input_shapes, strict=False):
        sections[title].append(("input", str(shape), _state(*token_shape(shape)), "", ""))
    for row in layer_rows(program):
        sections[row["stream"]].append(_layer_cells(row))
    sections["main"].append(("output", str(program.output_shape), "", "", ""))
    memory, main = map(_shortened, sections.values())
    lines = _aligned(memory + main)
    if not memory:
        return "\n".join(lines)
    parts = (("memory", lines[: len(memory)]), ("main", lines[len(memory) :]))
    return "\n\n".join("\n".join([title, *("  " + line for line in part)]) for title, part in parts)


def _layer_cells(row: Row) -> Cells:
    turns = f" × {row['turns']:,}" if row["turns"] > 1 else ""
    name, parameters = _clipped(row["name"]) + turns, _counted(row["parameters"], "non-zero")
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
    """Write 17 if all heads agree, 5+5+17 if a few differ, 5–17 if many do."""
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
