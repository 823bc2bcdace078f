"""Files made by hand: to prove a false claim, or to ask for much memory. Each is refused, with its reason."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flint import arb

from attnc.ir.layers import Attention, Head, Softmax
from attnc.ir.program import Program
from attnc_checker.__main__ import main
from attnc_checker.cells import read_leaves
from attnc_checker.files import MAX_WEIGHTS, BadFile, Refused, read_bytes
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Vector
from checker.networks import affine, lattice_program, one_head, save
from checker.tampering import edit, refusal

NUMBER = 0.5


EMBED = affine("embed", (1, ["x"]), (3, ["x", "v"]), [(0, "x", 0, "x")], [([0, 1, 2], "v", NUMBER)])
HEAD = Head(np.zeros((2, 1)), np.zeros((2, 1)), np.array([[0.0], [1.0]]), np.eye(1))
SAYS_IT = one_head(EMBED, HEAD, channel="signal")
"""A network whose output is NUMBER everywhere."""


def forged(path, expression, ends, program=SAYS_IT, **fields):
    return save(path, program, expression, [ends], **{"leaves": [], "bound": 1e-10, "method": "staged proof", **fields})


def stage(**fields):
    """The fields of a claim about one stage, which is the output."""
    stated = {"stage": "attend", "channel": "signal", "name": "s", "function": "t", "argument": "x", "carrier": None}
    claim = stated | {"interval": [0, 1], "bound": 1e-12, "leaves": [["taylor", 4, 0, 0]]} | fields
    return {"stages": [claim], "outputs": ["s"]}


def plain(order=4, **fields):
    """The fields of a proof by one leaf."""
    return {"method": "proof", "leaves": [["taylor", order, 0, 0]], **fields}


def table(points):
    return {"method": "proof at the table's 1 points", "table": [[0.0, NUMBER]], "points": points}


CUBES = "; ".join(f"b{i + 1} = b{i}*b{i}*b{i}" for i in range(45))
UNDEFINED = ["0*log(0)", "exp(log(0*x))", "0*x*log(0*x)", "0*log(x + 1)", "atan(log(0*x)) + pi/2", "max(0, log(0*x))"]
NEARLY = f"{NUMBER} + 0.9999 + 0.0051*x**2 - 0.0047*x**3"
SUM = "add up to the norm"
DOUBLE = affine("double", (1, ["x"]), (1, ["y"]), [(0, "y", 0, "x", 2.0**100)], dtype=np.float32)
SIGNED = [affine("pass", (1, ["x"]), (1, ["y"]), [(0, "y", 0, "x", sign)], dtype=np.float32) for sign in (1.0, -1.0)]
TRIPLE = affine("triple", (1, ["x"]), (1, ["y"]), [(0, "y", 0, "x", 3.0)])
SOFT = (
    affine("embed", (1, ["x"]), (1, ["a", "b"]), [(0, "a", 0, "x", 5.0)]),
    Softmax("soft", ("a", "b")),
    affine("read", (1, ["a", "b"]), (1, ["y"]), [(0, "y", 0, "a", 1000.0)], [(0, "y", 0.25)]),
)


@pytest.mark.parametrize(
    ("expression", "ends", "fields", "reason"),
    [
        # Held at 2, relu(t − 1.5) is 0.5 for all t of [0, 1], where it is 0.
        ("relu(x - 1.5)", (0, 1), stage(function="relu(t - 1.5)", held=[2, 3]), "add up to"),
        ("relu(-1.5 - x)", (-1, 0), stage(function="relu(-1.5 - t)", interval=[-1, 0], held=[-3, -2]), "add up to"),
        # A table is no claim about a function.
        ("sin(x)", (-3, 3), table(1), "about 1 rows of a table"),
        (None, (-3, 3), table(2), "about 1 rows of a table"),
        (f"b0 = 3*x; {CUBES}; 0.5 + 0*b45", (0, 1), stage(function="0.5"), "too large"),
        ("0.5", (0, 1), stage(function="t, t"), "several outputs"),
        ("0.5", (0, 1), stage(function="0.5", leaves=[["enclosure", 0, 0]]), "enclosure leaves"),
        ("0*x", (0, 1), stage(carrier="0"), "carrier of stage s is 0"),
        # log has no value at 0, and what comes of it none either.
        *((f"{NUMBER} + {text}", (-1, 1), plain(bound=0.05), "not re-proved") for text in UNDEFINED),
        # The error is near its largest, 1.0097, on a small part of the leaf only; its norm is 1.00657.
        *((NEARLY, (-1, 1), plain(8, norm="999", leaf_bounds=[1.0], bound=x), SUM) for x in (1.006, 1.004, 1.003)),
        # float32 holds no number between 0 and 1.4e-45: the least is lost to rounding, not a part of x.
        ("2**100*x", (0, 1e-42), plain(1, bound=1e-18, program=Program((DOUBLE,), ((1,),), ())), "is not re-proved to"),
        # The input is cast to float32, and passed on.
        *(
            (
                text,
                (0, 1),
                {"stages": [], "outputs": [text], "program": Program((layer,), ((1,),), ())},
                "add up to 5.96",
            )
            for text, layer in zip(("x", "-x"), SIGNED, strict=True)
        ),
        # A product with 3 rounds.
        ("3*x", (0, 1), plain(1, bound=1e-17, program=Program((TRIPLE,), ((1,),), ())), "is not re-proved to"),
        # The centre and the half-width of the box are rounded, to 128 bits. The function jumps at its end.
        ("9*floor(x)", (2.0**-200, 1), plain(bound=0.51), "is not re-proved to"),
        ("0.25", (-1, 1), {"stages": [], "outputs": ["0.25"], "program": Program(SOFT, ((1,),), ())}, "no stage has"),
    ],
)
def test_claims_that_are_false_or_not_proved(tmp_path, expression, ends, fields, reason):
    assert reason in refusal(forged(tmp_path / "net", expression, ends, **fields))


ROWS = "the keys of the last head are not all combinations of rows"


@pytest.mark.parametrize(
    ("anchors", "values"),
    [
        ([[-2.0], [2.0], [2.0]], [0.0, 5.0, 1.0]),  # two keys of one row: 3 is their average, not 1
        ([[-2.0, -2.0], [-2.0, 2.0], [2.0, -2.0]], [0.0, 0.0, 0.0]),  # no key for (2, 2)
    ],
)
def test_enclosures_need_one_key_for_each_combination_of_rows(tmp_path, anchors, values):
    d = len(anchors[0])
    program = lattice_program(np.array(anchors), np.array(values), [1.0] * d, [0.0] * d, 5.0)
    leaves, expression = [["enclosure", 0, *[0] * d]], "1 + 0*x"
    net = save(tmp_path / "net", program, expression, [(0.5, 1.0)] * d, leaves, 1e-3)
    assert ROWS in refusal(net)


def test_what_is_told_says_where_it_holds(tmp_path, capsys):
    assert main([str(forged(tmp_path / "table", None, (-3, 3), **table(1)))]) == 0
    assert "at the table's 1 points, and nowhere else" in capsys.readouterr().out
    net = str(forged(tmp_path / "norm", "0.5", (-3, 3), **plain(2, norm="2", leaf_bounds=[1e-12])))
    assert main([net, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scope"] == "in the norm L_2 over the box"


UNIT = [(0.0, 1.0)]


def test_a_head_that_reads_nothing_is_refused(tmp_path):
    """Its projections have no rows and so, for a few bytes, as many columns as one likes."""
    none, many = np.zeros((0, 7)), [0, 2**39]
    attention = Attention("attend", (Head(none, none, np.zeros((0, 1)), np.zeros((1, 0))),), ())
    read = affine("read", (1, []), (1, ["y"]), (), [(0, "y", 0.5)])
    layers = (affine("forget", (1, ["x"]), (1, [])), attention, read)
    net = save(tmp_path / "net", Program(layers, ((1,),), (1,)), "0.5 + 0*x", UNIT, [["taylor", 1, 0, 0]], 1e-3)
    names = [f"layers.1.attend.head0.{name}" for name in ("W_Q", "W_K")]
    edit(net, "header", lambda header: [header[name].update(shape=many) for name in names])
    edit(net, "config.json", lambda data: data["program"]["layers"][1]["heads"][0].update(W_Q=many, W_K=many))
    assert "layers.1.attend.head0" in refusal(net, code=2)


def test_keys_that_are_not_stored_are_counted(tmp_path):
    embed = affine("embed", (1, ["x"]), (2**18 + 1, ["x"]), [(0, "x", 0, "x")])
    program = one_head(embed, Head(*(np.ones((1, 1)) for _ in range(4))))
    net = save(tmp_path / "net", program, "0*x", UNIT, [["taylor", 1, 0, 0]], 1e-3)
    assert "more than 262,144 keys" in refusal(net)


@pytest.mark.parametrize(("d", "order"), [(30, 7), (11, 8), (3000, 1)])
def test_polynomials_of_millions_of_terms_are_refused(d, order):
    with pytest.raises(Refused, match="too high an order"):
        read_leaves([["taylor", order, 0, *[0] * d]], d)


def test_as_many_roundings_as_there_are_numbers_are_refused():
    arithmetic = Arithmetic("float32")
    assert (1 + arithmetic.u) ** (2**20) - 1 < arithmetic.gamma(2**20) < arb(0.08)
    for n in (2**22, 2**24, 2**25):
        with pytest.raises(Refused, match="roundings in a row"):
            arithmetic.gamma(n)
    many = SimpleNamespace(num_keys=2**22, values={0: SimpleNamespace(n=1)}, depth=1)
    with pytest.raises(Refused, match="a head with 4,194,304 keys"):
        arithmetic.summation(many, 0, Vector(), Vector())


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """Eight gigabytes that take no room on the disk."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(BadFile, match=f"more than the {MAX_WEIGHTS:,} bytes"):
        read_bytes(path, MAX_WEIGHTS)
