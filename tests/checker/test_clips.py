"""Truncated linear functions: their certificates are proved again, and every change to one is refused."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc import TruncatedLinear
from checker.tampering import changes, mutations, proved, replaced, reproved, saved_once, stage, weights

RNG = np.random.default_rng(0)
TARGETS = {
    "one variable": TruncatedLinear([0.1], 0.3, -0.7, 1 / 3, (-5, 15)),
    "two variables": TruncatedLinear([2.1, -1.3], 0.5, 0.1, 1.0, {"s0": (-1, 1), "t": (0, 2)}),
    "three variables": TruncatedLinear([2.1, -1.3, 1e-9], 0.5, -1.0, 1.0, (-1, 1)),
    "many variables": TruncatedLinear(RNG.normal(size=12), 1e3, 999.0, 1001.0, (-1, 1)),
    "tokens": TruncatedLinear(RNG.normal(size=(3, 2)), RNG.normal(size=3), -1.0, 1.0, (-2, 2)),
    "a constant row": TruncatedLinear([[1.0, 2.0], [0.0, 0.0]], [0.3, 0.4], -1.0, 1.0, (-1, 1)),
    "definitions": TruncatedLinear(RNG.normal(size=(6, 60)), 0.0, -1.0, 1.0, (-2, 2)),
}


ONE, HEADS = "truncated_linear", "truncated_linear_heads"
CASES = [
    *((name, 0.02, "auto", "float64") for name in TARGETS),
    *((name, 0.02, "auto", "float32") for name in TARGETS if name != "many variables"),  # t = 1000 leaves it no digits
    ("two variables", 0.02, HEADS, "float64"),
    ("tokens", 0.02, HEADS, "float64"),
    pytest.param("three variables", 1e-4, ONE, "float64", marks=pytest.mark.slow),
    pytest.param("tokens", 2e-4, ONE, "float64", marks=pytest.mark.slow),
    pytest.param("two variables", 1e-3, HEADS, "float64", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "eps", "construction", "dtype"), CASES)
def test_proofs_are_proved_again(tmp_path, name, eps, construction, dtype):
    net = attnc.compile(TARGETS[name], eps=eps, construction=construction, dtype=dtype)
    reproved(tmp_path / "net", net, loosest=1.1)


def test_a_second_dtype(tmp_path):
    net = attnc.compile(TARGETS["two variables"], eps=0.02, also="float32")
    net.save(tmp_path / "net")
    verdict = proved(tmp_path / "net", name="certificate.float32.json")
    assert verdict.bound == net.certified_in("float32").bound


TARGET = TruncatedLinear([[2.0, -1.0], [0.5, 0.75]], [0.5, -0.25], 0.0, 1.0, (-1, 1))
HONEST = attnc.compile(TARGET, eps=0.02)
saved = saved_once(lambda path: reproved(path, HONEST, loosest=1.1))


UNKNOWN = "not known to be the expression"


test_a_changed_claim = changes(
    {
        ("both", 1): [
            (replaced("2*x0_0", "2.0000000000000004*x0_0", 1), UNKNOWN),
            (replaced("2*x0_0", "2*x1_0", 1), UNKNOWN),
            (replaced("- 0.25", "- 0.2500000000000001", 1), UNKNOWN),
            (replaced("+ 0.5,", "+ 0.5 + x0_0*x0_1,", 1), UNKNOWN),
            (replaced(", 0, 1)", ", 0, 1.01)", 1), UNKNOWN),
            (replaced(", 0, 1)", ", -0.01, 1)", 1), UNKNOWN),
            (replaced(", 0, 1)", ", 0.01, 1)", 1), UNKNOWN),
            (lambda data: data["box"].update(x0_0=[-1.0, 1.5]), "may leave the claimed interval"),
        ],
        ("both", 2): [(replaced("clip(2*x0_0", "(2*x0_0", 1), "cannot be read")],
        ("certificate.json", 1): [
            (stage(0, function="clip(t, 0, 1)"), UNKNOWN),
            (stage(0, argument="2*x0_0 - x0_1 + 0.25"), UNKNOWN),
            (stage(0, channel="clip@1"), "do not depend on its input alone"),
            (stage(1, channel="clip"), "two stages claim to write"),
            (stage(0, interval=[-2.0, 3.0]), "may leave the claimed interval"),
            (lambda data: data["stages"][0]["leaves"].pop(), "do not cover the box"),
            (stage(0, bound=lambda x: 0.99 * x), "is not re-proved to"),
            (lambda data: data["stages"].pop(), "an output is no combination"),
            (lambda data: data["outputs"].reverse(), UNKNOWN),
            (lambda data: data.update(bound=0.99 * data["bound"], observed=0.0), "the errors of the stages add up to"),
            (lambda data: data["box"].update(x0_0=[-1.0, 1.5]), "differ in the box"),
        ],
    }
)


STORED = ["0.embed.weight", "0.embed.constant", "2.read.weight", "2.read.constant"]  # w, t, Δ and m
test_a_changed_weight = weights([f"layers.{tensor}.values" for tensor in STORED], 1.01)
test_programs_that_were_tampered_with = mutations(HONEST, TARGET)
