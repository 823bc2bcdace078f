from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings

from attnc.ir import Affine, Attention, Head, Mask, Program, Softmax
from attnc.ir.shapes import key_counts
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.ir.text import describe, layer_rows
from ir.random_programs import channels, lookup_program, programs_and_inputs


def test_a_lookup_reads_as_it_should():
    anchors = np.linspace(1, 2, 3600)
    assert describe(lookup_program(anchors, anchors, 1.0)).splitlines() == [
        "input    (1,)        1 token × 1",
        "embed    affine      3,601 tokens × 5   10,802 non-zeros   x one slope offset value",
        "select   attention   3,601 tokens × 1        6 non-zeros   "
        "1 head, 3,600 keys, d_k 2, d_v 1, residual no, mask yes → y",
        "read     affine      1 token × 1              1 non-zero   y",
        "output   ()",
    ]


def head(width: int, key_width: int, d_v: int, mask: Mask | None = None) -> Head:
    return Head(np.ones((width, 1)), np.ones((key_width, 1)), np.ones((key_width, d_v)), np.ones((d_v, width)), mask)


def test_memory_is_a_section_and_long_lists_are_cut():
    grid = Affine("grid", Sparse.zeros((9, 20, 0, 0), float), Sparse.from_dense(np.eye(9, 20)), channels(20))
    few = Attention("few", (head(2, 20, 1), head(2, 20, 3)), ("a", "b"), residual=True, cross=True)
    mask = Mask(np.zeros(1, int), np.array([0, 0, 1, 1, 1, 1, 1, 1, 1]))
    many = Attention(
        "many", tuple(head(2, 20, d, mask if d < 3 else None) for d in range(1, 8)), ("a", "b"), cross=True
    )
    smooth = Softmax("a name that goes on and on and on", ("a", "b"))
    program = check(Program((few, many, smooth), ((2,),), (2,), (grid,)))
    text = describe(program)
    assert text.startswith("memory\n  grid ")
    assert "\n\nmain\n  input " in text
    assert "c0 c1 c2 c3 c4 c5 c6 c7 … +12" in text
    assert "2 heads, 9 keys, d_k 1, d_v 1+3, residual yes, mask no, keys from memory → a b" in text
    assert "7 heads, 2–9 keys, d_k 1, d_v 1–7, residual no, mask in 2 heads, keys from memory" in text
    assert "a name that goes on and…" in text
    rows = layer_rows(program)
    assert [row["stream"] for row in rows] == ["memory", "main", "main", "main"]
    assert rows[2]["keys"] == [2, 2, 9, 9, 9, 9, 9]
    assert len(rows[0]["channels"]) == 20


def test_deep_programs_are_cut():
    layers = tuple(Softmax(f"s{i}", ("a", "b")) for i in range(500))
    text = describe(check(Program(layers, ((2,),), (2,))))
    assert len(text.splitlines()) == 41
    assert "…        462 more" in text
    assert text.splitlines()[-1].split() == ["output", "(2,)"]


@settings(max_examples=60, deadline=None)
@given(programs_and_inputs())
def test_any_program_has_a_text_and_rows(case):
    program, _ = case
    text, rows = describe(program), layer_rows(program)
    assert text == describe(program)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert json.loads(json.dumps(rows)) == rows
    assert [row["name"] for row in rows] == [layer.name for layer in program.all_layers]
    assert sum(row["parameters"] for row in rows) == program.num_parameters
    assert [keys for row in rows for keys in row["keys"]] == key_counts(program)
    assert rows[-1]["tokens"] * rows[-1]["width"] == np.prod(program.output_shape)
