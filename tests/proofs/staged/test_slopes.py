"""Gradients of compositions: bounds hold in every engine, are tight, are proved again, and refused if forged."""

from __future__ import annotations

import dataclasses
import functools
import shutil

import numpy as np
import pytest
from flint import arb

import attnc
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.proofs.rounding.growth import num_roundings, slope_underflow
from attnc.targets.expressions.derivatives import gradient
from attnc.targets.expressions.expression import Expression
from attnc_checker import check
from attnc_checker.forms import ONE
from attnc_checker.overflow import lost
from attnc_checker.overflow import num_roundings as counted_again
from attnc_checker.program import Program
from checker.tampering import edit

UNIT, SQUARE = {"x": (-1, 1), "y": (-1, 1)}, {"x": (-2, 2), "y": (-2, 2)}
CUBE = dict.fromkeys("xyz", (-1, 1))
CASES = {
    "sum": ("tanh(sin(x)+y)+x*y", UNIT, 1e-6, {}),
    "bump": ("exp(-x**2-y**2)*sin(3*x+y)", SQUARE, 1e-6, {}),
    "root": ("sqrt(1+x**2+y**2)", SQUARE, 1e-6, {}),
    "outputs": ("(sin(x*y), x + exp(y))", UNIT, 1e-5, {}),
    "three": ("1/(2+sin(x*y*z))", CUBE, 1e-4, {}),
    "deep": ("exp(sin(cos(pi/3*x*y)))", UNIT, 1e-4, {}),
    "float32": ("cos(x*y)", UNIT, 1e-3, {"dtype": "float32"}),
}


@functools.cache
def compiled(name: str) -> attnc.Network:
    text, box, eps, options = CASES[name]
    return attnc.compile(text, box, eps, norm="C1", construction="compose", **options)


def at(net: attnc.Network, count: int = 3000) -> np.ndarray:
    """Random points, corners and edges of the box."""
    d, rng = net.box.d, np.random.default_rng(0)
    points = rng.random((count, d))
    on_edges = np.where(rng.random((count // 4, d)) < 0.4, rng.integers(0, 2, (count // 4, d)), points[: count // 4])
    return net.box.lo + np.concatenate([points, on_edges]) * net.box.widths


def exact(net: attnc.Network, points: np.ndarray) -> np.ndarray:
    tree = gradient(Expression.parse(net.expression).with_variables(net.variables))
    return tree(points).reshape(len(points), -1, net.box.d)


def in_numpy(net, points):
    return NumpyEngine(net.program, with_grids=False).gradient(points)


def compiled_loops(net, points):
    return net.gradient(points)


def backwards(net, points, form="folded"):
    torch = pytest.importorskip("torch")
    module, x = net.to_torch(form=form), torch.tensor(points, requires_grad=True)
    y = module(x).reshape(len(points), -1)
    columns = [torch.autograd.grad(y[:, o].sum(), x, retain_graph=True)[0] for o in range(y.shape[1])]
    return torch.stack(columns, dim=1).numpy()


def in_jax(net, points):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        function = net.to_jax()
        one = lambda x: function(x[None])[0]  # noqa: E731
        return np.asarray(jax.vmap(jax.jacrev(one))(points)).reshape(len(points), -1, net.box.d)


ENGINES = {
    "numpy": in_numpy,
    "compiled": compiled_loops,
    "torch": backwards,
    "layers": functools.partial(backwards, form="unfolded"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_in_every_engine_and_is_close_to_the_error(name):
    net = compiled(name)
    proof, points = net.certificate.gradient, at(net)
    assert net.program.num_attention_layers > 1
    assert proof.bound <= proof.eps
    assert [head.name for head in proof.heads] == [head.name for head in net.certificate.by_heads.heads]
    wanted = exact(net, points)
    for engine in ENGINES.values():
        assert np.abs(engine(net, points) - wanted).max() <= proof.bound
    looseness = 10 if net.dtype == "float32" else 2.5  # of rounding along all paths; of errors of any sign
    assert proof.observed <= proof.bound <= looseness * proof.observed
    assert sum(term.value for term in proof.terms) == pytest.approx(proof.bound)


@pytest.mark.parametrize("name", ["bump", "float32"])
def test_engines_agree_within_the_bound(name):
    net = compiled(name)
    points = at(net, 400)
    found = [engine(net, points) for engine in (*ENGINES.values(), in_jax)]
    for one in found:
        assert np.abs(one - exact(net, points)).max() <= net.certificate.gradient_bound
        assert np.abs(one - found[0]).max() <= 2 * sum(
            term.value for term in net.certificate.gradient.terms if term.name in ("rounding", "slopes")
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(name):
        folder = tmp_path_factory.mktemp(name) / "net"
        compiled(name).save(folder)
        return folder

    return functools.cache(save)


@pytest.mark.parametrize("name", CASES)
def test_the_claim_is_read_and_proved_again(saved, name):
    folder = saved(name)
    assert attnc.load(folder).certificate == compiled(name).certificate
    verdict = check(folder, processes=1)
    assert verdict.proved, verdict.reason
    assert verdict.gradient_bound == compiled(name).certificate.gradient_bound


def lower(claim):
    claim["observed"] = claim["bound"] = 0.9 * claim["bound"]


def lower_slopes(claim):
    (*_, head) = claim["stages"]
    head["bound"] *= 0.5
    head["leaf_bounds"] = [0.5 * each for each in head["leaf_bounds"]]


def lower_leaf(claim):
    (*_, head) = claim["stages"]
    worst = max(range(len(head["leaf_bounds"])), key=head["leaf_bounds"].__getitem__)
    head["leaf_bounds"][worst] *= 0.8


def without_leaf(claim):
    for name in ("leaves", "leaf_bounds", "leaf_middles"):
        if name in claim["stages"][0]:
            claim["stages"][0][name].pop()


def swapped(claim):
    claim["stages"].reverse()


def with_leaves(claim):
    claim["leaves"] = [["taylor", 4, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lower, "the errors of slopes add up to"),
        (lower_slopes, "slopes, .* is not re-proved to"),
        (lower_leaf, "slopes, .* is not re-proved to"),
        (without_leaf, "do not cover the box"),
        (swapped, "not those of all stages"),
        (lambda claim: claim["stages"].pop(), "not those of all stages"),
        (lambda claim: claim.pop("stages"), "not a one-stage program|leaves|cover"),
        (lambda claim: claim.update(stages=[]), "by leaves of the box, or by those of the stages"),
        (lambda claim: claim["stages"][0].update(bound=-1.0), "is negative"),
        (lambda claim: claim.update(axes=[]), "the errors of slopes add up to"),
        (lambda claim: claim.update(axes=[7]), "axes"),
        (with_leaves, "by leaves of the box, or by those of the stages"),
        (lambda claim: claim["excluded"].append({"argument": "x", "lo": 0.1, "hi": 0.11}), "no stage has a kink"),
    ],
)
def test_a_forged_claim_is_refused(saved, tmp_path, change, reason):
    folder = tmp_path / "net"
    shutil.copytree(saved("root"), folder)
    edit(folder, "certificate.json", lambda data: change(data["gradient"]))
    verdict = check(folder, processes=1)
    assert not verdict.proved
    assert pytest.importorskip("re").search(reason, verdict.reason), verdict.reason


def test_slopes_of_other_weights_are_refused(saved, tmp_path):
    """A ripple in the values of a head that its bound of values leaves room for, and that of slopes does not."""
    folder = tmp_path / "net"
    shutil.copytree(saved("root"), folder)

    def rippled(tensors):
        name = max(tensors, key=lambda each: tensors[each].size if tensors[each].dtype == np.float64 else 0)
        tensors[name] = tensors[name] * (
            1 + 1e-9 * (-1.0) ** np.arange(tensors[name].size).reshape(tensors[name].shape)
        )

    def roomier(data):
        data["bound"] *= 1.5
        for head in data["stages"]:
            head["bound"] *= 1.5
            head["leaf_bounds"] = [1.5 * each for each in head.get("leaf_bounds", [])]

    edit(folder, "tensors", rippled)
    edit(folder, "certificate.json", roomier)
    assert not check(folder, processes=1).proved


def test_prover_and_checker_count_the_same_roundings(saved):
    for name in ("bump", "three"):
        net = compiled(name)
        stored = attnc_program(saved(name))
        assert counted_again(stored) == num_roundings(net.program)
        reach = {ONE: arb(1), **dict(enumerate(map(arb, net.box.magnitude.tolist())))}
        assert 0 < lost(stored, reach) <= slope_underflow(net.program, net.box) < 1.2 * lost(stored, reach)


def attnc_program(folder) -> Program:
    from pathlib import Path

    from attnc_checker.checking import read

    claim, structure, tensors = read(Path(folder))
    return Program(structure, tensors, len(claim.ends))


def test_a_smaller_gradient_eps_takes_more_keys_and_is_met():
    found = [attnc.compile("sin(x*y)", SQUARE, 1e-3, norm="C1", gradient_eps=each) for each in (1e-1, 1e-4)]
    assert found[1].num_anchors > found[0].num_anchors
    assert found[1].certificate.gradient_bound <= 1e-4 < found[0].certificate.gradient_bound


def test_auto_takes_the_smallest_network_that_meets_both():
    net = attnc.compile("exp(-x**2-y**2)*sin(3*x+y)", SQUARE, 1e-6, norm="C1", gradient_eps=1e-4)
    assert (net.construction, net.num_anchors) == ("compose", 32)


def test_a_wrong_derivation_is_refused():
    """The derivation is checked, not trusted: that of another function raises, whatever the slopes are."""
    from attnc.proofs.cells.branching import Budget
    from attnc.proofs.gradient_prover import gradient_task

    net, other = compiled("root"), attnc.as_target("sqrt(1+x**2+2*y**2)", SQUARE)
    task = gradient_task(net.program, other, 1.0, net.derivation, net._slopes_at)
    with pytest.raises(ProgramError, match="not known to compute"):
        task.proof(Budget())


def test_the_weights_decide_not_the_derivation():
    """Another program with the same derivation: its own error is in the bound, or the proof is refused."""
    from attnc.proofs.cells.branching import Budget
    from attnc.proofs.gradient_prover import gradient_task

    net, target = compiled("root"), attnc.as_target("sqrt(1+x**2+y**2)", SQUARE)
    layers = list(net.program.layers)
    (head, *heads) = layers[3].heads
    changed = dataclasses.replace(head, W_V=head.W_V * (1 + 1e-3))
    layers[3] = dataclasses.replace(layers[3], heads=(changed, *heads))
    program = dataclasses.replace(net.program, layers=tuple(layers))
    points = at(net, 500)
    seen = np.abs(NumpyEngine(program, with_grids=False).gradient(points) - exact(net, points)).max()
    task = gradient_task(program, target, 1.0, net.derivation, lambda x: in_numpy_of(program, x))
    assert 1e-4 < seen <= task.proof(Budget()).bound


def in_numpy_of(program, points):
    return NumpyEngine(program, with_grids=False).gradient(points).reshape(len(points), -1)
