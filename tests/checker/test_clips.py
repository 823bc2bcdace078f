"""Truncated linear functions: their certificates are proved again, and every change to one is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import attnc
from attnc import TruncatedLinear
from attnc_checker import check
from checker.networks import change_weight, edit, edit_both, proved, proved_again, refusal
from proofs.mutations import PROGRAM_MUTATIONS

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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", TARGETS)
def test_proofs_are_proved_again(tmp_path, name, dtype):
    if name == "many variables" and dtype == "float32":
        pytest.skip("t = 1000 leaves float32 no digits for 0.02")
    proved_again(tmp_path / "net", attnc.compile(TARGETS[name], eps=0.02, dtype=dtype), loosest=1.1)


@pytest.mark.parametrize("name", ["two variables", "tokens"])
def test_several_heads(tmp_path, name):
    proved_again(
        tmp_path / "net", attnc.compile(TARGETS[name], eps=0.02, construction="truncated_linear_heads"), loosest=1.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "eps", "construction"),
    [
        ("three variables", 1e-4, "truncated_linear"),
        ("tokens", 2e-4, "truncated_linear"),
        ("two variables", 1e-3, "truncated_linear_heads"),
    ],
)
def test_more_proofs(tmp_path, name, eps, construction):
    proved_again(tmp_path / "net", attnc.compile(TARGETS[name], eps=eps, construction=construction), loosest=1.1)


def test_a_second_dtype(tmp_path):
    net = attnc.compile(TARGETS["two variables"], eps=0.02, also="float32")
    net.save(tmp_path / "net")
    verdict = proved(tmp_path / "net", name="certificate.float32.json")
    assert verdict.bound == net.certified_in("float32").bound


@pytest.fixture(scope="module")
def honest():
    target = TruncatedLinear([[2.0, -1.0], [0.5, 0.75]], [0.5, -0.25], 0.0, 1.0, (-1, 1))
    return target, attnc.compile(target, eps=0.02)


@pytest.fixture(scope="module")
def saved(honest, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net"
    proved_again(path, honest[1], loosest=1.1)
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2*x0_0", "2.0000000000000004*x0_0"),
        ("2*x0_0", "2*x1_0"),
        ("- 0.25", "- 0.2500000000000001"),
        ("+ 0.5,", "+ 0.5 + x0_0*x0_1,"),
        (", 0, 1)", ", 0, 1.01)"),
        (", 0, 1)", ", -0.01, 1)"),
        (", 0, 1)", ", 0.01, 1)"),
        ("clip(2*x0_0", "(2*x0_0"),
    ],
)
def test_another_expression(net, old, new):
    edit_both(net, lambda data: data.update(expression=changed(data["expression"], old, new)))
    code = 2 if new.startswith("(") else 1
    assert ("cannot be read" if code == 2 else "not known to be the expression") in refusal(net, code)


def changed(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


def first(**fields):
    return lambda data: data["stages"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (first(function="clip(t, 0, 1)"), "not known to be the expression"),
        (first(argument="2*x0_0 - x0_1 + 0.25"), "not known to be the expression"),
        (first(channel="clip@1"), "do not depend on its input alone"),
        (lambda data: data["stages"][1].update(channel="clip"), "two stages are said to write"),
        (first(interval=[-2.0, 3.0]), "may leave the claimed interval"),
        (lambda data: data["stages"][0]["leaves"].pop(), "do not cover the box"),
        (lambda data: data["stages"][0].update(bound=0.99 * data["stages"][0]["bound"]), "is not re-proved to"),
        (lambda data: data["stages"].pop(), "an output is no combination"),
        (lambda data: data["outputs"].reverse(), "not known to be the expression"),
        (lambda data: data.update(bound=0.99 * data["bound"], observed=0.0), "the errors of the stages add up to"),
        (lambda data: data["box"].update(x0_0=[-1.0, 1.5]), "differ in the box"),
    ],
)
def test_a_changed_claim(net, change, reason):
    edit(net, "certificate.json", change)
    assert reason in refusal(net)


def test_a_wider_box(net):
    edit_both(net, lambda data: data["box"].update(x0_0=[-1.0, 1.5]))
    assert "may leave the claimed interval" in refusal(net)


@pytest.mark.parametrize("tensor", ["0.embed.weight", "0.embed.constant", "2.read.weight", "2.read.constant"])
def test_a_changed_weight(net, tensor):
    """w, t, Δ and m, as they are stored; with a hash that fits and with one that does not."""
    change_weight(net, f"layers.{tensor}.values", 0, 1.01, rehash=False)
    assert "belongs to other weights" in refusal(net)
    change_weight(net, f"layers.{tensor}.values", 0, 1.01, rehash=True)
    reasons = ("do not depend on its input alone", "add up to", "is not re-proved to", "have other scores")
    found = refusal(net)
    assert any(reason in found for reason in reasons), found


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_programs_that_were_tampered_with(honest, tmp_path, mutate):
    """With a hash that fits: refused, or the change costs no more than the bound has room for."""
    target, network = honest
    tampered = dataclasses.replace(network, program=mutate(np.random.default_rng(1), network.program))
    tampered.save(tmp_path / "net")
    verdict = check(tmp_path / "net", processes=1)
    if verdict.proved:
        points = target.box.lo + np.random.default_rng(1).random((2000, 4)) * target.box.widths
        assert np.abs(tampered(points.reshape(-1, 2, 2)) - target(points)).max() <= verdict.bound
