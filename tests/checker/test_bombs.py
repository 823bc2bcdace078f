"""Small files that ask for much: they are refused before anything of that size is made."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from flint import arb

from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program
from attnc_checker.cells import read_leaves
from attnc_checker.files import MAX_WEIGHTS, BadFile, Refused, read_bytes
from attnc_checker.rounding import Arithmetic
from checker.networks import edit, refusal, save

UNIT = [(0.0, 1.0)]


def test_a_head_that_reads_nothing_is_refused(tmp_path):
    """Its projections have no rows and so, for a few bytes, as many columns as one likes."""
    none, many = np.zeros((0, 7)), [0, 2**39]
    read = AffineBuilder(1, [], 1, ["y"])
    read.set(0, "y", 0.5)
    head = Head(none, none, np.zeros((0, 1)), np.zeros((1, 0)))
    layers = (AffineBuilder(1, ["x"], 1, []).build("forget"), Attention("attend", (head,), ()), read.build("read"))
    net = save(tmp_path / "net", Program(layers, ((1,),), (1,)), "0.5 + 0*x", UNIT, [["taylor", 1, 0, 0]], 1e-3)
    raw = (net / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name in ("W_Q", "W_K"):
        header[f"layers.1.attend.head0.{name}"]["shape"] = many
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text + raw[start:]
    (net / "model.safetensors").write_bytes(raw)
    edit(net, "config.json", lambda data: data["program"]["layers"][1]["heads"][0].update(W_Q=many, W_K=many))
    edit(net, "certificate.json", lambda data: data.update(weights_sha256=hashlib.sha256(raw).hexdigest()))
    assert "layers.1.attend.head0" in refusal(net, code=2)


def test_keys_that_are_not_stored_are_counted(tmp_path):
    tokens = 2**18 + 1
    embed = AffineBuilder(1, ["x"], tokens, ["x"])
    embed.link(0, "x", 0, "x")
    head = Head(*(np.ones((1, 1)) for _ in range(4)))
    read = AffineBuilder(tokens, ["x"], 1, ["y"])
    read.link(0, "y", 0, "x")
    layers = (embed.build("embed"), Attention("attend", (head,), ("x",)), read.build("read"))
    net = save(tmp_path / "net", Program(layers, ((1,),), (1,)), "0*x", UNIT, [["taylor", 1, 0, 0]], 1e-3)
    assert "more than 262,144 keys" in refusal(net)


@pytest.mark.parametrize(("d", "order"), [(30, 7), (11, 8), (3000, 1)])
def test_polynomials_of_millions_of_terms_are_refused(d, order):
    with pytest.raises(Refused, match="too high an order"):
        read_leaves([["taylor", order, 0, *[0] * d]], d)


def test_as_many_roundings_as_there_are_numbers_are_refused():
    arithmetic = Arithmetic("float32")
    assert arithmetic.gamma(2**20) < arb(0.08)
    for n in (2**22, 2**24, 2**25):
        with pytest.raises(Refused, match="roundings, one after the other"):
            arithmetic.gamma(n)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """Eight gigabytes that take no room on the disk."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(BadFile, match=r"more than the 268,435,456 bytes"):
        read_bytes(path, MAX_WEIGHTS)
