"""Numbers that no output needs may overflow, too: engines multiply them by 0, and 0·∞ is nan."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Attention, Head, Mask
from attnc.ir.program import Program
from attnc_checker import check
from checker.networks import edit, refusal, save

KEYS = 8
POINTS = np.array([[0.25], [1.0]])
LEAF = [["taylor", 1, 0, 0]]


def half(factor: float, scale: float, *, is_hidden: bool) -> Program:
    """Says 1/2. Two layers multiply x by the factor: a feature that no head reads, or the value of a hidden key."""
    channels, keys = ("value", "dead"), np.arange(KEYS)
    embed, again = AffineBuilder(1, ["x"], KEYS, channels), AffineBuilder(KEYS, channels, KEYS, channels)
    embed.set([0, 1, 2], "value", 0.5)
    embed.link(KEYS - 1 if is_hidden else keys, "value" if is_hidden else "dead", 0, "x", factor)
    again.link(keys, "value", keys, "value", np.where((keys == KEYS - 1) & is_hidden, scale, 1.0))
    again.link(keys, "dead", keys, "dead", scale)
    mask = Mask(np.minimum(keys, 5), np.array([0, 0, 0, 1, 2, 3, 4, 5]))
    head = Head(np.zeros((2, 1)), np.zeros((2, 1)), np.array([[1.0], [0.0]]), np.eye(1), mask)
    read = AffineBuilder(KEYS, ["said"], 1, ["out"])
    read.link(0, "out", 0, "said")
    layers = (embed.build("embed"), again.build("again"), Attention("attend", (head,), ("said",)), read.build("read"))
    return Program(layers, ((1,),), ())


def claimed(path, program: Program, end: float = 1.0):
    return save(path, program, "0.5 + 0*x", [(0, end)], [["taylor", 2, 0, 0]], 1e-10)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_dead_number_that_overflows(tmp_path, is_hidden):
    program = half(1e200, 1e200, is_hidden=is_hidden)
    with np.errstate(all="ignore"):
        found = [program(POINTS), NumpyEngine(program)(POINTS)]
    assert not np.isfinite(found).all()
    assert "may overflow" in refusal(claimed(tmp_path / "net", program))


@pytest.mark.parametrize("is_hidden", [False, True])
def test_products_of_weights_overflow_where_variables_are_small(tmp_path, is_hidden):
    program = half(1e200, 1e200, is_hidden=is_hidden)
    assert "may overflow" in refusal(claimed(tmp_path / "net", program, 1e-200))


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_dead_number_may_be_large(tmp_path, is_hidden):
    program = half(1e200, 1e50, is_hidden=is_hidden)
    assert np.abs(program(POINTS) - 0.5).max() <= 1e-10
    assert check(claimed(tmp_path / "net", program), processes=1).proved


def test_a_dead_query_that_sees_no_key(tmp_path):
    net = claimed(tmp_path / "net", half(1.0, 1.0, is_hidden=True))
    path = net / "model.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    (asked,) = (entry for name, entry in json.loads(raw[8:start]).items() if name.endswith("query_segments"))
    end = start + asked["data_offsets"][1]
    raw[end - 4 : end] = (9).to_bytes(4, "little")  # of the last token, which nothing reads
    path.write_bytes(raw)
    edit(net, "certificate.json", lambda data: data.update(weights_sha256=hashlib.sha256(raw).hexdigest()))
    assert "sees no key" in refusal(net)


@pytest.mark.parametrize("end", [2.0**130, 2.0**110])
def test_variables_are_cast_to_float32(tmp_path, end):
    """2^−120·x is small, but x itself is more than float32 holds, or may be, in a sum of many."""
    scale = AffineBuilder(1, ["x"], 1, ["y"])
    scale.link(0, "y", 0, "x", 2.0**-120)
    program = Program((scale.build("scale", np.float32),), ((1,),), (1,))
    with np.errstate(all="ignore"):
        assert np.isfinite(program(np.array([[end]]))).all() == (end < 2.0**128)
    assert "may overflow" in refusal(save(tmp_path / "net", program, "x/2**120", [(0, end)], LEAF, 1.0))
    assert check(save(tmp_path / "fine", program, "x/2**120", [(0, 2.0**100)], LEAF, 1.0), processes=1).proved
