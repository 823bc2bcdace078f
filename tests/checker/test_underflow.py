"""Products with small numbers underflow, and later layers may make what is lost large again."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Attention, Head, Layer
from attnc.ir.program import Program
from attnc_checker import check
from checker.networks import refusal, save


def scaled(exponents: tuple[int, ...], *, has_head: bool) -> Program:
    """x times 2^k for every k, one layer after the other; maybe as the value of both keys of a head."""
    tokens, layers = 1 + has_head, list[Layer]()
    for i, k in enumerate(exponents):
        layer, token = AffineBuilder(tokens if i else 1, ["x"], tokens, ["x"]), np.arange(tokens)
        layer.link(token, "x", token if i else 0, "x", 2.0**k)
        layers.append(layer.build(f"times{i}"))
    if has_head:
        head = Head(np.zeros((1, 1)), np.zeros((1, 1)), np.eye(1), np.eye(1))
        read = AffineBuilder(2, ["x"], 1, ["x"])
        read.link(0, "x", 0, "x")
        layers += [Attention("attend", (head,), ("x",)), read.build("read")]
    return Program(tuple(layers), ((1,),), ())


def claimed(path, program: Program, expression: str, end: float, bound: float):
    return save(path, program, expression, [(0, end)], [["taylor", 2, 0, 0]], bound)


@pytest.mark.parametrize("has_head", [False, True])
def test_powers_of_two_underflow_layer_by_layer(tmp_path, has_head):
    program = scaled((-600, -600, 600, 600), has_head=has_head)
    assert program(np.ones((1, 1)))[0] == 0
    assert "is not re-proved" in refusal(claimed(tmp_path / "net", program, "x", 1, 0.5))


@pytest.mark.parametrize("has_head", [False, True])
def test_folded_coefficients_underflow_where_variables_are_large(tmp_path, has_head):
    """Layer by layer x = 2^20 keeps numbers above 2^−1074, but 2^−1080 is 0."""
    program = scaled((-540, -540, 1000, 60), has_head=has_head)
    x = np.full((1, 1), 2.0**20)
    assert program(x)[0] == 1
    assert NumpyEngine(program)(x)[0] == 0
    assert "is not re-proved" in refusal(claimed(tmp_path / "net", program, "x*2**(-20)", 2.0**20, 0.1))


def test_powers_of_two_that_do_not_underflow_are_exact(tmp_path):
    assert check(claimed(tmp_path / "net", scaled((600, 300), has_head=False), "2**900*x", 1, 0.0), 1).proved


@pytest.mark.parametrize("text", ["0.5*x", "x/4", "2*x", "-x"])
def test_affine_functions_of_the_least_numbers(tmp_path, text):
    net = attnc.compile(text, {"x": (-1, 1)}, 1e-9)
    net.save(tmp_path / "net")
    assert check(tmp_path / "net", 1).proved
    points = np.array([5e-324, 1.5e-323, 2.5e-323, 1.0, -1.0])
    for x, y in zip(points, np.ravel(net(points[:, None])), strict=True):
        exact = {"0.5*x": Fraction(x) / 2, "x/4": Fraction(x) / 4, "2*x": 2 * Fraction(x), "-x": -Fraction(x)}[text]
        assert abs(Fraction(y) - exact) <= Fraction(net.certificate.bound)
