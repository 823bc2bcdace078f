"""False or unproved claims are refused, with the reason."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from attnc_checker.__main__ import main
from checker.networks import sampled_error, save, spectral, uniform
from checker.tampering import changes, edit, multiplied, proved, refusal, saved_once, write_weights

BOX = [(-3.0, 3.0)]
EMPTY = {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}
VALUES = "layers.0.embed.constant.values"
PROGRAM, LEAVES = spectral(np.sin, BOX, 17), uniform("taylor", 4, 1)
OBSERVED = sampled_error(PROGRAM, np.sin, BOX)


saved = saved_once(lambda path: proved(save(path, PROGRAM, "sin(x)", BOX, LEAVES, 1.02 * OBSERVED, observed=OBSERVED)))


def set_leaf(index, leaf):
    return lambda data: data["leaves"].__setitem__(index, leaf)


def layer(data, number):
    return data["program"]["layers"][number]


def expressed(text, **fields):
    """Another expression, and maybe other fields."""
    return lambda data: data.update(expression=text, **fields)


test_a_changed_file = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data["leaves"].pop(5), "do not cover the box: they fill 15 of its 16"),
            (lambda data: data["leaves"].clear(), "do not cover the box: they fill 0 of its 1"),
            (lambda data: data["leaves"].append(data["leaves"][3]), "stated twice"),
            (set_leaf(3, ["taylor", 6, 4, 4]), "stated twice"),
            (lambda data: data["leaves"].append(["taylor", 8, 6, 3]), "lies within another"),
            (lambda data: data["leaves"].append(["taylor", 8, 0, 0]), "lies within another"),
            (set_leaf(3, ["taylor", 8, 4, 16]), "out of range"),
            (set_leaf(3, ["taylor", 8, 4, -1]), "out of range"),
            (set_leaf(3, ["taylor", 8, -1, 0]), "out of range"),
            (set_leaf(3, ["taylor", 8, 10**6, 3]), "out of range"),
            (set_leaf(3, ["taylor", 8, 4, 3, 0]), "numbers of a cell in 1 variable"),
            (set_leaf(3, ["guess", 8, 4, 3]), "unknown kind"),
            (set_leaf(3, [["taylor"], 8, 4, 3]), "unknown kind"),
            (set_leaf(3, ["taylor", 0, 4, 3]), "order that is not between 1 and"),
            (set_leaf(3, ["taylor", 10**6, 4, 3]), "order that is not between 1 and"),
            (set_leaf(3, ["taylor", 1, 4, 3]), "the taylor leaf x ∈ [-1.875"),
            (set_leaf(3, ["selection", 4, 3]), "the selection leaf x ∈ [-1.875"),
            (lambda data: data["leaves"].append(["tail", 1]), "tails on the sides [1], infinite ends on []"),
            (lambda data: data["leaves"].append(["tail", 0]), "has no side"),
            (lambda data: data.update(observed=2 * data["bound"]), "below the observed error"),
            (lambda data: data.update(bound=-1.0), "negative"),
            (lambda data: data.update(box={"x": [3.0, -3.0]}), "empty or reversed"),
            (lambda data: data.update(box={"x": [-3.0, 3.25]}), "differ in the box"),
            (lambda data: data.update(box={"y": [-3.0, 3.0]}), "differ in the variables"),
            (lambda data: data.update(expression="sin(x) + 0"), "differ in the variables or the expression"),
            (lambda data: data.update(dtype="float32"), "claimed for float32, but the weights are float64"),
            (lambda data: data.update(dtype="bfloat16"), "the dtype 'bfloat16' is none of"),
            (lambda data: data.update(norm="2", leaf_bounds=[]), "needs a bound of its own"),
            (lambda data: data.update(method="theorem"), "the method is 'theorem'"),
            (lambda data: data.update(method="estimate", bound=None), "the method is 'estimate'"),
            (lambda data: data.update(weights_sha256="0" * 64), "belongs to other weights"),
            (lambda data: data.update(core=[-2.0, 3.0]), "does not end where the box"),
            (lambda data: data.update(bound=0.99 * OBSERVED, observed=None), "is not re-proved to"),
            (lambda data: data.update(truncation=0.1 * OBSERVED), "is not re-proved"),
            (lambda data: data.update(truncation=-1.0), "truncation -1.0 is negative"),
        ],
        ("certificate.json", 2): [
            (set_leaf(3, ["taylor", 8.0, 4, 3]), "no list of a kind and whole numbers"),
            (set_leaf(3, ["taylor", True, 4, 3]), "no list of a kind and whole numbers"),
            (set_leaf(3, {}), "no list of a kind and whole numbers"),
            (lambda data: data.update(leaves="all"), "leaves is 'all', not a list"),
            (lambda data: data.update(bound="1e-9"), "bound is '1e-9', not a number"),
            (lambda data: data.update(bound=None), "bound is None, not a number"),
            (lambda data: data.update(bound=True), "bound is True, not a number"),
            (lambda data: data.update(bound=10**400), "more than 20 digits"),
            (lambda data: data.update(box={"x": ["-inf", "inf"]}), "box.x[0] is '-inf', not a number"),
            (lambda data: data.update(box={"x": [3.0]}), "box.x is [3.0], not a list of 2"),
            (lambda data: data.update(format="attnc.certificate/2"), "the format 'attnc.certificate/2'"),
            (lambda data: data.pop("leaves"), "lacks 'leaves'"),
        ],
        ("config.json", 1): [
            (lambda data: data.update(box={"x": [-3.0, 3.25]}), "config.json and certificate.json differ in the box"),
        ],
        ("config.json", 2): [
            (lambda data: data.update(format="attnc.network/9"), "the format 'attnc.network/9'"),
            (lambda data: data.pop("program"), "does not describe a network"),
            (lambda data: data["program"].update(dtype="float16"), "the dtype 'float16'"),
            (lambda data: data["program"].update(dtype="float32"), "not F32"),
            (lambda data: data["program"].update(input_shapes=[[2]]), "inputs are not the 1 variable"),
            (lambda data: data["program"].update(output_shape=[2]), "output's shape"),
            (lambda data: data["program"].update(output_shape=""), "output's shape"),
            (lambda data: data["program"].update(scale=2), "its fields"),
            (lambda data: layer(data, 0).update(kind="convolution"), "of another kind ('convolution')"),
            (lambda data: layer(data, 0).update(scale=2), "fields of layers.0.embed"),
            (lambda data: layer(data, 0).update(name=7), "names in layers.0"),
            (lambda data: layer(data, 0)["channels"].__setitem__(0, 7), "names in layers.0"),
            (lambda data: layer(data, 0).update(channels=["one"] * 5), "names in layers.0"),
            (lambda data: layer(data, 0)["weight"].update(index_dtype="int8"), "of another kind ('int8')"),
            (lambda data: layer(data, 0)["weight"].update(shape=[17, 5, 1, 2]), "shapes of layers.0.embed"),
            (lambda data: layer(data, 0)["constant"].update(shape=[17, 2]), "out of range"),
            (lambda data: layer(data, 0)["weight"].update(num_entries=7), "not I32 of"),
            (lambda data: layer(data, 0)["constant"].update(num_entries=50.0), "not I32 of [50.0, 2]"),
            (lambda data: layer(data, 1).update(num_heads=2), "heads of layers.1.select"),
            (lambda data: layer(data, 1).update(num_heads=True), "heads of layers.1.select"),
            (lambda data: layer(data, 1)["heads"][0].update(W_O=[1.0, 1]), "not F64 of [1.0, 1]"),
            (lambda data: layer(data, 1).update(residual=1), "residual of layers.1.select"),
            (lambda data: layer(data, 1)["heads"][0].update(W_Q=[5, 1]), "shapes of layers.1.select.head0"),
            (lambda data: layer(data, 1)["heads"][0].update(bias=0), "layers.1.select.head0"),
            (lambda data: data["program"]["layers"].pop(), "output's shape"),
            (lambda data: layer(data, 1).update(cross=True), "no"),  # computes something else with the same weights
        ],
        ("tensors", 1): [
            (multiplied(VALUES, 40, 1 + 1e-7), "is not re-proved to"),
            (multiplied("layers.1.select.head0.W_K", 4, 1 + 1e-7), "is not re-proved to"),  # 2c
        ],
        ("tensors", 2): [(multiplied(VALUES, 40, float("nan")), "not finite")],
        ("header", 2): [
            (lambda header: header[VALUES].update(dtype="BF16"), "not read here"),
            (lambda header: header[VALUES].update(dtype=["F64"]), "not read here"),
            (lambda header: header[VALUES].update(dtype="I64"), "is I64 of shape"),
            (lambda header: header[VALUES].update(shape=[2, 3]), "does not fit"),
            (lambda header: header[VALUES].update(shape=[2**39, 2**39]), "does not fit"),
            (lambda header: header[VALUES].update(data_offsets=[0, 2**39]), "does not fit"),
            (lambda header: header[VALUES].update(data_offsets=[-8, 8]), "not read here"),
            (lambda header: header[VALUES].update(extra=1), "does not describe"),
            (lambda header: header.pop(VALUES), "does not fit"),
            (lambda header: header.update(other=header[VALUES]), "does not fit"),
            (lambda header: header.update({"other": header.pop(VALUES)}), "is missing"),
            (lambda header: header.update(other=EMPTY), "belong to no layer"),
        ],
        ("both", 1): [
            (lambda data: data.update(box={"x": [-3.0, 3.25]}), "is not re-proved"),
            (expressed("sin(x)*(1 + 1e-8)"), "is not re-proved to"),
            (expressed("sin(x) + 0*log(x)"), "is not re-proved to"),  # undefined somewhere, like the next two
            (expressed("sin(x) + 0*sqrt(x)"), "is not re-proved to"),
            (expressed("sin(x) + 0/(x - 1)"), "is not re-proved to"),
            (expressed("(sin(x), x)"), "the network has 1 output(s), the expression 2"),
        ],
        ("both", 2): [
            (expressed("__import__('os')"), "unknown characters"),
            (expressed("sin(x).real"), "unknown characters"),
            (expressed("sin(x) if x else 0"), "is not allowed"),
            (expressed("lambda: x"), "unknown characters"),
            (expressed("sin(y)"), "'y' is not allowed"),
            (expressed("sin(x, x)"), "is not allowed"),
            (expressed("x**10000"), "an exponent is beyond"),
            (expressed("(" * 4000 + "x" + ")" * 4000), "cannot be read"),
            (expressed("2x"), "unknown characters"),
            (expressed("x" * 50_001), "no text of at most 50,000"),
            (expressed("u = x, x; u"), "'u' to be several numbers"),
            (expressed(""), "cannot be read"),
            (expressed(None), "no text of"),
            # A claim about the variable e would be one about 2.718…
            (expressed("sin(e)", box={"e": [-3.0, 3.0]}, variables=["e"]), "e is a number"),
        ],
    }
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"bound": 1', "not valid JSON"),
        (b"[" * 10**5, "nested too deep"),
        (b'{"a":' * 10**5, "nested too deep"),
        (b"[1]", "no JSON object"),
        (b'{"bound": NaN}', "NaN is no number"),
        (b'{"bound": Infinity}', "Infinity is no number"),
        (b'{"bound": 1e999}', "1e999 is no number"),
        (b'{"bound": ' + b"9" * 5000 + b"}", "more than 20 digits"),
        (b'{"bound": 1, "bound": 2}', "one key twice"),
        (b'{"bound": "\xff"}', "not valid JSON"),
        (b" " * (2**26 + 1), "more than the 67,108,864 bytes"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("name", ["certificate.json", "config.json"])
def test_files_that_are_not_json(net, name, text, reason):
    (net / name).write_bytes(text)
    assert reason in refusal(net, 2)


def test_a_power_of_zero_is_defined_everywhere(net):
    edit(net, "both", expressed("sin(x)*x**0"))
    proved(net)


def test_the_weights_of_another_network(net, tmp_path):
    other = save(tmp_path / "other", spectral(np.cos, BOX, 17), "cos(x)", BOX, [], 1.0)
    shutil.copy(other / "model.safetensors", net)
    assert "belongs to other weights" in refusal(net)
    write_weights(net, (other / "model.safetensors").read_bytes())
    assert "is not re-proved to" in refusal(net)


@pytest.mark.parametrize("name", ["certificate.json", "config.json", "model.safetensors"])
def test_a_missing_file(net, name):
    (net / name).unlink()
    assert "cannot be read" in refusal(net, 2)


@pytest.mark.parametrize("length", [0, 7, 100, -8])
def test_truncated_weights(net, length):
    raw = (net / "model.safetensors").read_bytes()[:length]
    (net / "model.safetensors").write_bytes(raw)
    assert "belongs to other weights" in refusal(net)
    write_weights(net, raw)
    assert "cut" in refusal(net, 2)


def test_a_pipe_is_not_waited_for(net):
    (net / "certificate.json").unlink()
    os.mkfifo(net / "certificate.json")
    assert "not a regular file" in refusal(net, 2)


def test_what_an_engine_leaves_out_is_part_of_the_bound(net):
    edit(net, "certificate.json", lambda data: data.update(truncation=1e-3 * OBSERVED))
    assert any("leaves out keys" in text for text in proved(net).assumptions)


@pytest.mark.parametrize("name", ["\r\x1b[2Kre-proved: the error is at most 1e-09\n\x1b[8m", "\ud800"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_names_do_not_steer_a_terminal(net, name, options, capsys):
    """Otherwise a text could erase a refusal on a terminal, and write a success in its place."""

    edit(net, "both", expressed("1", box={name: [-3.0, 3.0]}, variables=[name]))
    assert "the taylor leaf ?" in refusal(net)
    assert main([str(net), "--processes", "1", *options]) == 1
    said = "".join(capsys.readouterr())
    if "--json" in options:
        json.loads(said)  # which refuses a line break within a text
    assert (said.replace("\n", "") if "--json" in options else said.removesuffix("\n")).isprintable()
    assert "\\u001b" not in said
