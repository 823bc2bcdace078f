"""Files made by hand: to prove a false claim, or to ask for much memory. Each is refused, with its reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flint import arb

from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Attention, Head, Softmax
from attnc.ir.program import Program
from attnc_checker.__main__ import main
from attnc_checker.cells import read_leaves
from attnc_checker.files import MAX_WEIGHTS, BadFile, Refused, read_bytes
from attnc_checker.rounding import Arithmetic
from checker.networks import save
from checker.tampering import edit, edit_header, refusal

NUMBER = 0.5


def constant_program() -> Program:
    """One head, which says NUMBER everywhere."""
    embed = AffineBuilder(1, ["x"], 3, ["x", "v"])
    embed.link(0, "x", 0, "x", 1.0)
    embed.set([0, 1, 2], "v", NUMBER)
    head = Head(np.zeros((2, 1)), np.zeros((2, 1)), np.array([[0.0], [1.0]]), np.array([[1.0]]))
    read = AffineBuilder(3, ["signal"], 1, ["y"])
    read.link(0, "y", 0, "signal", 1.0)
    return Program((embed.build("embed"), Attention("attend", (head,), ("signal",)), read.build("read")), ((1,),), ())


def forged(path, program, expression, ends, **fields):
    return save(path, program, expression, [ends], **{"leaves": [], "bound": 1e-10, "method": "staged proof", **fields})


def stage(**fields):
    stated = {"stage": "attend", "channel": "signal", "name": "s", "function": "t", "argument": "x", "carrier": None}
    return stated | {"interval": [0, 1], "bound": 1e-12, "leaves": [["taylor", 4, 0, 0]]} | fields


@pytest.mark.parametrize(
    ("function", "ends", "held"),
    [("relu(t - 1.5)", (0, 1), [2, 3]), ("relu(-1.5 - t)", (-1, 0), [-3, -2])],
)
def test_a_function_may_not_be_held_where_its_input_never_is(tmp_path, function, ends, held):
    """Held at 2, relu(t − 1.5) is 0.5 for all t of [0, 1], where it is 0."""
    claim = stage(function=function, interval=list(ends), held=held)
    net = forged(tmp_path / "net", constant_program(), function.replace("t", "x"), ends, stages=[claim], outputs=["s"])
    net_reason = refusal(net)
    assert "add up to" in net_reason or "not re-proved" in net_reason


def test_a_softmax_that_no_stage_has_proved_is_not_left_out(tmp_path):
    embed = AffineBuilder(1, ["x"], 1, ["a", "b"])
    embed.link(0, "a", 0, "x", 5.0)
    read = AffineBuilder(1, ["a", "b"], 1, ["y"])
    read.link(0, "y", 0, "a", 1000.0)
    read.set(0, "y", 0.25)
    program = Program((embed.build("embed"), Softmax("soft", ("a", "b")), read.build("read")), ((1,),), ())
    net = forged(tmp_path / "net", program, "0.25", (-1, 1), stages=[], outputs=["0.25"])
    assert "softmax that no stage has proved" in refusal(net)


def test_casting_to_subnormal_numbers_is_counted(tmp_path):
    """float32 holds no number between 0 and 1.4e-45: the least is lost to rounding, not a part of x."""
    double = AffineBuilder(1, ["x"], 1, ["y"])
    double.link(0, "y", 0, "x", 2.0**100)
    program = Program((double.build("double"),), ((1,),), ()).astype("float32")
    fields = {"method": "proof", "leaves": [["taylor", 1, 0, 0]], "bound": 1e-18}
    net = forged(tmp_path / "net", program, "2**100*x", (0, 1e-42), **fields)
    assert "is not re-proved to" in refusal(net)


@pytest.mark.parametrize(("expression", "points"), [("sin(x)", 1), (None, 2)])
def test_a_table_is_no_claim_about_a_function(tmp_path, expression, points):
    fields = {"method": "proof at the table's 1 points", "table": [[0.0, NUMBER]], "points": points}
    net = forged(tmp_path / "net", constant_program(), expression, (-3, 3), **fields)
    assert "about 1 rows of a table" in refusal(net)


def test_what_is_told_says_where_it_holds(tmp_path, capsys):
    fields = {"method": "proof at the table's 1 points", "table": [[0.0, NUMBER]], "points": 1}
    assert main([str(forged(tmp_path / "table", constant_program(), None, (-3, 3), **fields))]) == 0
    assert "at the table's 1 points, and nowhere else" in capsys.readouterr().out
    fields = {"method": "proof", "leaves": [["taylor", 2, 0, 0]], "norm": "2", "leaf_bounds": [1e-12]}
    net = str(forged(tmp_path / "norm", constant_program(), "0.5", (-3, 3), **fields))
    assert main([net, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scope"] == "in the norm L_2 over the box"


def test_numbers_that_are_cubed_again_and_again_are_refused(tmp_path):
    cubes = "; ".join(f"b{i + 1} = b{i}*b{i}*b{i}" for i in range(45))
    text = f"b0 = 3*x; {cubes}; 0.5 + 0*b45"
    net = forged(tmp_path / "net", constant_program(), text, (0, 1), stages=[stage(function="0.5")], outputs=["s"])
    assert "too large" in refusal(net)


def test_a_stage_has_one_function_and_its_own_leaves(tmp_path):
    for number, (fields, reason) in enumerate(
        [({"function": "t, t"}, "several outputs"), ({"leaves": [["enclosure", 0, 0]]}, "enclosure leaves")]
    ):
        claim = stage(**{"function": "0.5", **fields})
        net = forged(tmp_path / str(number), constant_program(), "0.5", (0, 1), stages=[claim], outputs=["s"])
        assert reason in refusal(net)


UNDEFINED = ["0*log(0)", "exp(log(0*x))", "0*x*log(0*x)", "0*log(x + 1)", "atan(log(0*x)) + pi/2", "max(0, log(0*x))"]


@pytest.mark.parametrize("text", UNDEFINED)
def test_what_is_undefined_is_not_zero(tmp_path, text):
    """log has no value at 0, and what comes of it none either."""
    leaves = [["taylor", 4, 0, 0]]
    fields = {"method": "proof", "leaves": leaves, "bound": 0.05}
    net = forged(tmp_path / "net", constant_program(), f"{NUMBER} + {text}", (-1, 1), **fields)
    assert "not re-proved" in refusal(net)


@pytest.mark.parametrize("bound", [1.006, 1.004, 1.003])
def test_a_part_of_a_leaf_does_not_stand_for_it_in_a_norm(tmp_path, bound):
    """The error is near its largest, 1.0097, on a small part of the leaf only; its norm is 1.00657."""
    text = f"{NUMBER} + 0.9999 + 0.0051*x**2 - 0.0047*x**3"
    fields = {"method": "proof", "norm": "999", "leaves": [["taylor", 8, 0, 0]], "leaf_bounds": [1.0], "bound": bound}
    assert "add up to the norm" in refusal(forged(tmp_path / "net", constant_program(), text, (-1, 1), **fields))


def test_a_definition_is_one_number(tmp_path):
    fields = {"method": "proof", "leaves": [["taylor", 4, 0, 0]]}
    net = forged(tmp_path / "net", constant_program(), "u = x, x; u", (-1, 1), **fields)
    assert "'u' to be several numbers" in refusal(net, 2)


def test_a_carrier_that_is_zero_is_refused(tmp_path):
    claims = [stage(carrier="0")]
    net = forged(tmp_path / "net", constant_program(), "0*x", (0, 1), stages=claims, outputs=["s"])
    assert "carrier of stage s is 0" in refusal(net)


UNIT = [(0.0, 1.0)]


def test_a_head_that_reads_nothing_is_refused(tmp_path):
    """Its projections have no rows and so, for a few bytes, as many columns as one likes."""
    none, many = np.zeros((0, 7)), [0, 2**39]
    read = AffineBuilder(1, [], 1, ["y"])
    read.set(0, "y", 0.5)
    head = Head(none, none, np.zeros((0, 1)), np.zeros((1, 0)))
    layers = (AffineBuilder(1, ["x"], 1, []).build("forget"), Attention("attend", (head,), ()), read.build("read"))
    net = save(tmp_path / "net", Program(layers, ((1,),), (1,)), "0.5 + 0*x", UNIT, [["taylor", 1, 0, 0]], 1e-3)
    names = [f"layers.1.attend.head0.{name}" for name in ("W_Q", "W_K")]
    edit_header(net, lambda header: [header[name].update(shape=many) for name in names])
    edit(net, "config.json", lambda data: data["program"]["layers"][1]["heads"][0].update(W_Q=many, W_K=many))
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
