"""True claims are re-proved: every kind of leaf, of head and of arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest
from flint import arb

import attnc
from attnc.ir import Attention, Head, Program
from attnc_checker import check
from attnc_checker.__main__ import main
from attnc_checker.ranges import Ranges
from checker.networks import dense, gate, sampled_error, save, spectral, uniform
from checker.tampering import edit, proved, refusal

LINE = [(-3.0, 3.0)]


def sine(path, bound):
    """Save a network that is fitted to sin, with this bound."""
    return save(path, spectral(np.sin, LINE, 17), "sin(x)", LINE, uniform("taylor", 4, 1), bound)


KINK = int(2**9 * 1.4 / 2.3)  # the cell of level 9 that holds 0.1
BESIDE_KINK = [["taylor", 8, level, KINK >> 9 - level ^ 1] for level in range(9, 0, -1)]
BESIDE_ZERO = [["taylor", 8, 6, i] for i in range(2, 64)]


@pytest.mark.parametrize(
    ("f", "text", "box", "count", "options", "leaves", "room"),
    [
        (np.sin, "sin(x)", LINE, 17, {}, uniform("taylor", 4, 1), 1.02),
        (np.sin, "sin(x)", LINE, 17, {"dtype": np.float32}, uniform("taylor", 4, 1), 30),
        (
            lambda x, y: np.exp(-x * x) * np.cos(y) / (2 + x),
            *("exp(-x**2)*cos(y)/(2 + x)", [(-1.0, 0.7), (-1.1, 1.0)], 13, {"pad": 4}, uniform("taylor", 3, 2), 1.1),
        ),
        # No end has a short binary expansion, and the kink is in no cell's middle.
        *(
            (lambda x: np.abs(x - 0.1), "abs(x - 0.1)", [(-1.3, 1.0)], 25, {"pad": 3, "c": 0.5}, leaves, 1.1)
            for leaves in ([["taylor", order, 9, KINK], *BESIDE_KINK] for order in (3, 8))
        ),
        # Of x**1.5 the slope at 0 is known, so that a leaf of low order there is as good as the slope.
        (lambda x: x**1.5, "x**1.5", [(0, 1)], 17, {}, [*([["taylor", 3, 6, i] for i in (0, 1)]), *BESIDE_ZERO], 1.5),
    ],
)
def test_fitted_networks(tmp_path, f, text, box, count, options, leaves, room):
    program = spectral(f, box, count, **options)
    observed = sampled_error(program, f, box)
    path = save(tmp_path / "net", program, text, box, leaves, room * observed)
    verdict = proved(path, processes=len(box))
    assert verdict.exit_code == 0
    assert 0.99 * observed <= verdict.reproved <= verdict.bound  # the checker's own figure is no looser than claimed
    ulps = 32 if program.dtype == np.float64 else 4
    assert any(f"within {ulps} ulp" in text for text in verdict.assumptions)
    edit(path, "certificate.json", lambda data: data.update(bound=0.98 * observed))
    assert "is not re-proved" in refusal(path)
    dtype, other = ("float64", "float32") if program.dtype == np.float64 else ("float32", "float64")
    edit(path, "certificate.json", lambda data: data.update(dtype=other))
    assert f"claimed for {other}, but the weights are {dtype}" in refusal(path)


@pytest.mark.parametrize(
    ("text", "box", "eps", "construction", "dtype", "level"),
    [
        ("sin(x)", {"x": (-3, 3)}, 0.15, "max_affine", "float64", 8),
        ("sin(x)", {"x": (-3, 3)}, 0.15, "max_affine", "float32", 8),
        ("sin(x)", {"x": (-3, 3)}, 0.15, "max_affine_cross", "float64", 8),
        ("sin(x)", {"x": (-3, 3)}, 0.15, "max_affine_cross", "float32", 8),
        # By where each key can win: the bound of the construction, from 64 cells of which each holds several keys.
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 0.5, "max_affine", "float64", 3),
        ("sqrt(x)", {"x": (0, 1)}, 0.2, "max_affine", "float64", 8),
    ],
)
def test_hard_attention_by_selection(tmp_path, text, box, eps, construction, dtype, level):
    attnc.compile(text, box=box, eps=eps, construction=construction, dtype=dtype).save(tmp_path / "net")
    fields = {"method": "proof", "leaves": uniform("selection", level, len(box))}
    if text == "sqrt(x)":
        fields["bound"] = 0.2
    edit(tmp_path / "net", "certificate.json", lambda data: data.update(fields))
    verdict = proved(tmp_path / "net")
    assert verdict.reproved <= verdict.bound
    edit(tmp_path / "net", "certificate.json", lambda data: data.update(bound=0.97 * data["observed"], observed=None))
    refusal(tmp_path / "net")


TWO = [(0, 0), (0, 1)]
SILU, MISH = gate(TWO, TWO), gate([(math.log(2), 0), (math.log(2), 1), (0, 2)], [(0, 0), (0, 1), (0, 1)])
EXACT = (uniform("taylor", 6, 1, 16), 40, 1e-12, 1e-18)  # only rounding is left, and next to nothing beyond the core
SMOOTH = uniform("taylor", 9, 1, 6)
AT_KINK = [*SMOOTH[:255], ["taylor", 3, 9, 255], ["taylor", 3, 9, 256], *SMOOTH[257:]]


@pytest.mark.parametrize(
    ("expression", "program", "leaves", "end", "bound", "too_small"),
    [
        ("x*sigmoid(x)", SILU, *EXACT),
        ("silu(x)", SILU, *EXACT),
        ("tanh(x)", gate([(0, -1), (0, 1)], [(-1, 0), (1, 0)]), *EXACT),
        ("sigmoid(x) - x", gate(TWO, [(0, 0), (1, 0)], residual=-1.0), *EXACT),
        ("x*tanh(softplus(x))", MISH, *EXACT),
        ("relu(x)", gate([(0, 0), (0, 64)], TWO), AT_KINK, 8, 0.284 / 64, 0.273 / 64),  # W(1/e)/β = 0.27847/β
        ("abs(x)", gate([(0, -32), (0, 32)], [(0, -1), (0, 1)]), AT_KINK, 8, 0.568 / 64, 0.546 / 64),
        ("gelu(x)", gate([(0, 0), (0, 1.702)], TWO), SMOOTH, 8, 0.0208, 0.02),  # the known logistic approximation
    ],
)
def test_gates_on_the_whole_line(tmp_path, expression, program, leaves, end, bound, too_small):
    cover = [*leaves, ["tail", -1], ["tail", 1]]
    path = save(tmp_path / "net", program, expression, [("-inf", "inf")], cover, bound, core=[-end, end])
    assert any("beyond the core" in text for text in proved(path).assumptions)
    edit(path, "certificate.json", lambda data: data.update(bound=too_small))
    assert "is not re-proved to" in refusal(path)
    edit(path, "certificate.json", lambda data: data["leaves"].pop())
    assert "tails on the sides [-1]" in refusal(path)
    edit(path, "certificate.json", lambda data: data.pop("core"))
    refusal(path, 2)


def test_a_tail_that_drifts_away_is_refused(tmp_path):
    leaves = [*uniform("taylor", 3, 1, 12), ["tail", 1]]
    path = save(tmp_path / "net", SILU, "silu(x) + x/1024", [(-2, "inf")], leaves, 0.5, core=[-2, 4])
    assert "drift apart" in check(path).reason


def test_several_heads_outputs_and_affine_layers(tmp_path):
    """Two fitted networks side by side as two heads, mixed by two affine layers into two outputs."""
    box = [(-2.0, 2.0)]
    parts = [spectral(f, box, 13, pad=4) for f in (np.sin, np.cos)]
    heads = [part.layers[1].heads[0] for part in parts]
    embeds = [part.layers[0] for part in parts]
    width = len(embeds[0].channels)
    weights, constants = ([getattr(embed, name).dense() for embed in embeds] for name in ("weight", "constant"))
    embed = dense("embed", np.concatenate(weights, axis=1), np.concatenate(constants, axis=1))

    def widened(head, i):
        pad = ((i * width, (1 - i) * width), (0, 0))
        W_Q, W_K, W_V = (np.pad(matrix, pad) for matrix in (head.W_Q, head.W_K, head.W_V))
        return Head(W_Q, W_K, W_V, np.eye(1, 2, i))

    attention = Attention("both", tuple(map(widened, heads, (0, 1))), ("a", "b"))
    first = np.zeros((1, 2, 13, 2))
    first[0, :, 0] = [[1, 1], [1, -1]]
    second = np.array([[0.5, 0.5], [0.25, -0.25]])[None, :, None]
    read = dense("read", second, np.array([[0.0, 3.0]]))
    program = Program((embed, attention, dense("mix", first), read), ((1,),), (2,))
    points = np.linspace(-2, 2, 2001)[:, None]
    wanted = np.concatenate([np.sin(points), np.cos(points) / 2 + 3], axis=1)
    bound = 1.1 * float(np.abs(program(points) - wanted).max())
    path = save(tmp_path / "net", program, "(sin(x), 0.5*cos(x) + 3)", box, uniform("taylor", 4, 1), bound)
    proved(path)
    edit(path, "both", lambda data: data.update(expression="(0.5*cos(x) + 3, sin(x))"))
    assert check(path).exit_code == 1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rounding_of_affine_parts_is_part_of_the_bound(tmp_path, dtype):
    """An affine map, which the expression equals digit by digit: only rounding is left, and it is not nothing."""
    weight, constant = np.array([[[[0.3]]]], dtype), np.array([[0.7]], dtype)
    program = Program((dense("map", weight, constant),), ((1,),), (1,))
    expression = f"{Decimal(weight.item())}*x + {Decimal(constant.item())}"
    path = save(tmp_path / "net", program, expression, [(-1, 1)], [["taylor", 1, 0, 0]], 0.0)
    assert not check(path).proved
    edit(path, "certificate.json", lambda data: data.update(dtype="real"))
    proved(path)
    unit = float(np.finfo(dtype).eps) / 2
    edit(path, "certificate.json", lambda data: data.update(dtype=np.dtype(dtype).name, bound=4 * unit))
    proved(path)


def test_the_command_line(tmp_path, capsys):
    for bound, printed in ((1.0000004e-9, "1.00001e-09"), (1e-9, "1e-09")):  # not below the bound
        path = sine(tmp_path / printed, bound)
        assert main([str(path)]) == 0
        told = f"re-proved: the error is at most {printed} at every point of the box, in float64"
        assert told in capsys.readouterr().out
    command = [sys.executable, "-m", "attnc_checker", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["proved"] is True
    assert printed.keys() == {field.name for field in dataclasses.fields(check(path))}
    edit(path, "certificate.json", lambda data: data.update(bound=1e-12))
    assert main([str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proved"] is False
    assert main([str(tmp_path / "nothing")]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([str(path), "--processes", "0"])
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_a_reader_that_has_seen_enough(tmp_path):
    path = sine(tmp_path / "net", 1e-9)
    command = [sys.executable, "-m", "attnc_checker", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_it_needs_the_standard_library_and_flint_alone():
    code = "import attnc_checker.__main__, sys; print({'attnc', 'numpy', 'scipy', 'safetensors'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["cosh", "silu", "gelu"])
def test_ranges_of_functions_that_turn(name):
    """They fall and then rise: the least value is at the turn, or at an end."""
    rng, f = np.random.default_rng(0), attnc.targets.expressions.expression.Expression.parse(f"{name}(t)")
    for _ in range(60):
        a, b = np.sort(rng.normal(-0.8, rng.choice([0.01, 1.0, 3.0]), 2))
        low, high = Ranges([]).apply(name, (arb(a), arb(b)))
        seen = f(np.linspace(a, b, 2001)[:, None])
        assert float(low) <= seen.min() + 1e-14 * abs(seen.min())
        assert seen.max() <= float(high) + 1e-14 * abs(seen.max())
        assert seen.min() - float(low) <= 1e-5 * (b - a) ** 2 + 1e-14
