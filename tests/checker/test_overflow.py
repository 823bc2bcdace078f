"""Numbers that leave the range of floats, and their effects in engines and later layers.

Numbers that no output needs may overflow, too: engines multiply them by 0, and 0·∞ is nan. Products with small numbers
underflow, and later layers may make the lost part large again.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc.engines import fused
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.layers import Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc_checker.files import Refused
from checker.networks import affine, one_head, reduced, save
from checker.tampering import edit, proved, refusal, reproved

KEYS = 8
POINTS = np.array([[0.25], [1.0]])
LEAF = [["taylor", 1, 0, 0]]


def half(factor: float, scale: float, *, is_hidden: bool) -> Program:
    """Says 1/2. Two layers multiply x by the factor: a feature that no head reads, or the value of a hidden key."""
    channels, keys = ("value", "dead"), np.arange(KEYS)
    large = (KEYS - 1, "value") if is_hidden else (keys, "dead")
    embed = affine("embed", (1, ["x"]), (KEYS, channels), [(*large, 0, "x", factor)], [([0, 1, 2], "value", 0.5)])
    scales = np.where((keys == KEYS - 1) & is_hidden, scale, 1.0)
    links = [(keys, "value", keys, "value", scales), (keys, "dead", keys, "dead", scale)]
    again = affine("again", (KEYS, channels), (KEYS, channels), links)
    mask = Mask(np.minimum(keys, 5), np.array([0, 0, 0, 1, 2, 3, 4, 5]))
    program = one_head(embed, Head(np.zeros((2, 1)), np.zeros((2, 1)), np.array([[1.0], [0.0]]), np.eye(1), mask))
    return replace(program, layers=(embed, again, *program.layers[1:]))


def claimed(path, program: Program, expression: str = "0.5 + 0*x", end: float = 1.0, bound: float = 1e-10):
    return save(path, program, expression, [(0, end)], [["taylor", 2, 0, 0]], bound)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_dead_number_may_be_large_but_may_not_overflow(tmp_path, is_hidden, monkeypatch):
    """Products of weights alone overflow where variables are small. A list of instructions leaves hidden keys out."""
    monkeypatch.setattr(fused, "MOST_NUMBERS", -1)
    fine, program = half(1e200, 1e50, is_hidden=is_hidden), half(1e200, 1e200, is_hidden=is_hidden)
    assert np.abs(fine(POINTS) - 0.5).max() <= 1e-10
    proved(claimed(tmp_path / "fine", fine))
    with np.errstate(all="ignore"):
        found = [program(POINTS), NumpyEngine(program)(POINTS)]
    assert not np.isfinite(found).all()
    for end in (1.0, 1e-200):
        assert "may overflow" in refusal(claimed(tmp_path / str(end), program, end=end))


def test_a_dead_query_that_sees_no_key(tmp_path):
    net = claimed(tmp_path / "net", half(1.0, 1.0, is_hidden=True))
    last = "layers.2.attend.head0.mask.query_segments"
    edit(net, "tensors", lambda tensors: tensors[last].__setitem__(-1, 9))  # of the last token, which nothing reads
    assert "sees no key" in refusal(net)


@pytest.mark.parametrize("end", [2.0**130, 2.0**110])
def test_variables_are_cast_to_float32(tmp_path, end):
    """2^−120·x is small, but x itself is more than float32 holds, or may be, in a sum of many."""
    scale = affine("scale", (1, ["x"]), (1, ["y"]), [(0, "y", 0, "x", 2.0**-120)], dtype=np.float32)
    program = Program((scale,), ((1,),), (1,))
    with np.errstate(all="ignore"):
        assert np.isfinite(program(np.array([[end]]))).all() == (end < 2.0**128)
    assert "may overflow" in refusal(save(tmp_path / "net", program, "x/2**120", [(0, end)], LEAF, 1.0))
    proved(save(tmp_path / "fine", program, "x/2**120", [(0, 2.0**100)], LEAF, 1.0))


def scaled(exponents: tuple[int, ...], *, has_head: bool) -> Program:
    """x times 2^k for every k, one layer after the other; maybe as the value of both keys of a head."""
    tokens, layers, last = 1 + has_head, list[Layer](), (1, ["x"])
    for i, k in enumerate(exponents):
        token, inputs, last = np.arange(tokens), last, (tokens, ["x"])
        layers.append(affine(f"times{i}", inputs, last, [(token, "x", token if i else 0, "x", 2.0**k)]))
    if has_head:
        head = Head(np.zeros((1, 1)), np.zeros((1, 1)), np.eye(1), np.eye(1))
        layers += one_head(layers[-1], head).layers[1:]
    return Program(tuple(layers), ((1,),), ())


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize(
    ("exponents", "x", "computed", "folded", "bound"),
    [
        ((-600, -600, 600, 600), 1.0, 0, 0, 0.5),  # powers of two underflow layer by layer
        # Layer by layer x = 2^20 keeps numbers above 2^−1074, but the folded coefficient 2^−1080 is 0.
        ((-540, -540, 1000, 60), 2.0**20, 1, 0, 0.1),
    ],
)
def test_products_that_underflow(tmp_path, has_head, exponents, x, computed, folded, bound):
    program = scaled(exponents, has_head=has_head)
    assert program([[x]])[0] == computed
    assert NumpyEngine(program)(np.array([[x]]))[0] == folded
    text = f"x*2**({sum(exponents)})"
    assert "is not re-proved" in refusal(claimed(tmp_path / "net", program, text, x, bound))


def test_powers_of_two_that_do_not_underflow_are_exact(tmp_path):
    proved(claimed(tmp_path / "net", scaled((600, 300), has_head=False), "2**900*x", 1, 0.0))


@pytest.mark.parametrize(("text", "slope"), [("0.5*x", 0.5), ("x/4", 0.25), ("2*x", 2), ("-x", -1)])
def test_affine_functions_of_the_least_numbers(tmp_path, text, slope):
    net = attnc.compile(text, {"x": (-1, 1)}, 1e-9)
    reproved(tmp_path / "net", net)
    points = np.array([5e-324, 1.5e-323, 2.5e-323, 1.0, -1.0])
    for x, y in zip(points, np.ravel(net(points[:, None])), strict=True):
        assert abs(Fraction(y) - Fraction(slope) * Fraction(x)) <= Fraction(net.certificate.bound)


LARGE = 2.0**600


def attended(
    scale: float = 1.0, *, constant: float = 0.0, last: float = 1.0, memory: float = 1.0, **options
) -> Program:
    """A head between two affine layers, all of one channel. Its matrices and what they read are 1 unless given."""
    head = Head(*(np.full((1, 1), options.pop(name, 1.0)) for name in ("W_Q", "W_K", "W_V", "W_O")))
    one, link = (1, ["x"]), (0, "x", 0, "x")
    layers = (
        affine("first", one, one, [(*link, scale)], [(0, "x", constant)]),
        Attention("attend", (head,), ("x",), **options),
        affine("last", one, one, [(*link, last)]),
    )
    if not options.get("cross"):
        return Program(layers, ((1,),), ())
    return Program(layers, ((1,), (1,)), (), (affine("memory", one, one, [(*link, memory)]),))


@pytest.mark.parametrize(
    "large",
    [
        {"constant": 2.0**1010},
        {"W_Q": LARGE, "W_K": LARGE},
        {"W_V": LARGE, "W_O": LARGE},
        {"W_V": LARGE, "last": LARGE},
        {"scale": LARGE, "W_Q": 1 / LARGE, "W_V": 0.0, "residual": True, "last": LARGE},
        {"memory": LARGE, "W_K": LARGE, "cross": True},
        {"memory": LARGE, "W_V": LARGE, "cross": True},
    ],
)
def test_two_large_factors_may_overflow_in_every_part_of_a_head(large):
    with pytest.raises(Refused, match="may overflow"):
        reduced(attended(**large))
    with pytest.raises(Refused, match="not a one-stage program"):  # not with ones
        reduced(attended(**{name: value if value is True else min(value, 1.0) for name, value in large.items()}))
