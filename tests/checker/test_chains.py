"""Enclosure leaves of deep programs are proved again; their claims hold at points; changed files are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flint import arb

import attnc
from attnc.ir import Attention, Head, Mask, Program
from attnc_checker import check
from attnc_checker.checking import proof_of, read
from attnc_checker.deep.chains import Chain
from attnc_checker.files import Refused
from checker.networks import affine, box_of, lattice_program, save
from checker.tampering import change_weight, changes, edit, proved, refusal, refused_changes, reproved

CASES = {  # flat between steps, so that few leaves do
    "two_layer": ("sin(x)", {"x": (0, 3)}, 0.3, "float64"),
    "attention_softmax": ("x*y, y - x", {"x": (0, 1), "y": (0, 1)}, 0.6, "float32"),
}


def enclosed(*target, **options):
    """Compile a network, and require that its proof has enclosure leaves alone."""
    net = attnc.compile(*target, **options)
    assert {leaf.kind for leaf in net.certificate.by_leaves.leaves} == {"enclosure"}
    return net


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    expression, box, eps, dtype = CASES[request.param]
    net, path = enclosed(expression, box, eps, construction=request.param, dtype=dtype), tmp_path_factory.mktemp("deep")
    verdict = reproved(path / "net", net)
    assert net.certificate.observed <= verdict.reproved * (1 + 1e-9)
    return path / "net"


def test_one_stage_in_four_variables(tmp_path):
    """A chain without links."""
    net = enclosed("x*y + max(z, w)", dict.fromkeys("xyzw", (-1, 1)), eps=0.8, construction="max_affine")
    verdict = reproved(tmp_path / "net", net)
    assert net.certificate.observed <= verdict.reproved * (1 + 1e-9)
    change_weight(tmp_path / "net", "layers.0.embed.constant.values", 0, 2.0)
    assert check(tmp_path / "net", processes=1).exit_code == 1


def _can_win_at(winners, row, x):
    sides = (wins[m] for (wins, _), m in zip(winners, row, strict=True))
    return all(lo <= value <= hi for (lo, hi), value in zip(sides, x.tolist(), strict=True))


@pytest.mark.parametrize("gap", [None, 0.0, 2.0, 20.0])
def test_what_is_said_of_a_box_holds_at_its_points(saved, gap):
    """On wide boxes, narrow ones, and between the flat parts, whatever gap is stated: it is a hint."""
    net = attnc.load(saved)
    claim, *stored = read(saved)
    (subject,) = proof_of(replace(claim, evidence=replace(claim.evidence, gap=gap)), *stored).subjects
    assert isinstance(subject.prover, Chain)
    rng, d, widths = np.random.default_rng(0), net.box.d, []
    for trial in range(60):
        half = net.box.widths * 2.0 ** -rng.uniform(1, 14)
        centre = rng.uniform(net.box.lo + half, net.box.hi - half)
        points = np.clip(centre + half * rng.uniform(-1, 1, (200, d)), net.box.lo, net.box.hi)
        values = net(points).reshape(len(points), -1)
        for o, output in enumerate(subject.prover.outputs):
            found = output.winners(box_of(centre, half))
            leak = float(output.growth * sum(leak for _, leak in found))
            stored = [float(arb(value)) for (value,) in output.values.values()]
            rows = [*itertools.product(*(wins for wins, _ in found))]
            near = [float(arb(output.values[row][0])) for row in rows]
            room = leak * np.ptp(stored) + float(output.rounding)
            assert min(near) - room <= values[:, o].min(), trial
            assert values[:, o].max() <= max(near) + room, trial
            # Each point is near to the values of the keys that can win there alone.
            for x, value in zip(points[:40], values[:40, o], strict=True):
                here = [v for row, v in zip(rows, near, strict=True) if _can_win_at(found, row, x)]
                assert min(here) - room <= value <= max(here) + room, trial
            widths.append(np.ptp(near) + room)
    assert min(widths) < 1e-3 * max(widths)  # narrow where the network is flat


def _wider(data):
    data["box"] = {name: [lo - 0.5, hi] for name, (lo, hi) in data["box"].items()}


test_changed_certificates_are_refused = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data["leaves"].pop(), "do not cover the box"),
            (lambda data: data["leaves"].append(data["leaves"][0]), "stated twice"),
            (lambda data: data["leaves"][0].__setitem__(0, "selection"), "enclosure leaves are for"),
            (lambda data: data.update(bound=0.97 * data["observed"], observed=None), "the enclosure leaf x ∈"),
            (_wider, "differ in the box"),
            (lambda data: data.update(dtype="float16"), "the dtype 'float16'"),
            (lambda data: data.update(gap=-1.0), "the gap -1.0 is negative"),
            (lambda data: data.update(gap=1e9), "the enclosure leaf x ∈"),
        ],
        ("certificate.json", 2): [
            (lambda data: data.update(gap="9"), "gap is '9', not a number"),
            (lambda data: data.update(cuts=[0.5]), "cuts[0] is 0.5, not a list"),
            (lambda data: data.update(cuts=[["0.5"] for _ in data["box"]]), "cuts[0][0] is '0.5', not a number"),
        ],
        ("both", 1): [(_wider, "enclosure")],
    }
)


def test_cuts_are_hints(tmp_path):
    """Without them, or with others, the leaves are not proved; with more they are, as any parts are the whole."""
    net = attnc.compile("sin(x)", box={"x": (0, 3)}, eps=0.05, construction="attention_softmax")
    net.save(tmp_path / "net")
    ((*cuts,),) = net.certificate.by_leaves.cuts
    assert cuts
    more = [*cuts, -7.0, 0.1, 0.1, 9.0][::-1]
    for points, is_enough in (([], False), ([x + 0.02 for x in cuts], False), (more, True)):
        edit(tmp_path / "net", "certificate.json", lambda data, points=points: data.update(cuts=[points]))
        verdict = check(tmp_path / "net", processes=1)
        assert verdict.proved is is_enough, verdict.reason
    assert attnc.load(tmp_path / "net").certificate.by_leaves.cuts == (tuple(more),)


@pytest.mark.parametrize("construction", CASES)
def test_changed_weights_are_refused(tmp_path, construction):
    """Or they do not matter: the bound proved for the changed network is true."""
    net, path = attnc.compile("sin(x)", box={"x": (0, 3)}, eps=0.3, construction=construction), tmp_path / "net"
    net.save(path)
    x = np.linspace(net.box.lo, net.box.hi, 4001)
    refused = refused_changes(path, x, np.sin(x), lambda size: [(i, -1.5) for i in {0, size - 1}])
    assert {name.split(".")[1] for name in refused} >= {"0", "4"}


def chained(values: np.ndarray, variables: str = "x", dtype: type = float) -> Program:
    """A link that averages values[k]·(x, y, …) over its keys, and a last head with two keys of the value 1/2."""
    inputs, keys, none = list(variables), 1 + np.arange(len(values)), np.zeros((1, 1), dtype)
    links = [(keys, "value", 0, name, values[:, i]) for i, name in enumerate(inputs)]
    mask = Mask(np.zeros(len(values) + 1, int), np.r_[1, np.zeros(len(values), int)])
    last = lattice_program(np.array([[-2.0], [2.0]]), np.array([0.5, 0.5]), [1.0], [0.0], 1.0, dtype)
    one = np.eye(1, dtype=dtype)
    layers = (
        affine("values", (1, inputs), (len(values) + 1, ["value"]), links, dtype=dtype),
        Attention("mean", (Head(none, none, one, one, mask),), ("mean",)),
        affine("pick", (len(values) + 1, ["mean"]), (1, ["in.0"]), [(0, "in.0", 0, "mean")], dtype=dtype),
    )
    return Program((*layers, *last.layers), ((len(inputs),),), (1,))


def way_of(path: Path, program: Program) -> Any:
    """Return the way of the first variable, in the proof of a claim about the program."""
    d = program.input_shapes[0][0]
    net = save(path, program, "0.5 + 0*x", [(-1.0, 1.0)] * d, [["enclosure", 0, *[0] * d]], 1e-3)
    (subject,) = proof_of(*read(net)).subjects
    assert isinstance(subject.prover, Chain)
    return subject.prover.outputs[0].ways[0]


def test_a_link_must_prove_its_reach(tmp_path):
    """The average of x, −x and −x is at most 1, and its reach is 2. By differences from one value its bound is 7/3."""
    way = way_of(tmp_path / "net", chained(np.array([[1.0], [-1.0], [-1.0]])))
    with pytest.raises(Refused, match="not bounded well enough to exclude an overflow"):
        list(way.states(arb(-1), arb(1)))
    ((_, _, (_, link)),) = way.states(arb(0.5), arb(1))
    assert abs(link) <= 2


def test_links_hold_the_rounding_of_inputs_and_averages(tmp_path):
    """At x = 0.7, which float32 does not hold. All values are 0.3·x, and so is their average, up to its rounding."""
    way, x = way_of(tmp_path / "net", chained(np.full((3, 1), 0.3), dtype=np.float32)), np.float32(0.7)
    ((_, _, (cast, _)),) = way.states(arb(0.7), arb(0.7))
    assert cast.contains(arb(float(x)))
    (link,) = way.links
    average, product = link([arb(float(x))], way.arithmetic), float(np.float32(0.3) * x)
    for ulps in (-3, 0, 3):
        assert average.contains(arb(product + ulps * 2.0**-26))


def test_a_link_of_two_variables_is_refused(tmp_path):
    with pytest.raises(Refused, match="two variables meet in one link"):
        way_of(tmp_path / "net", chained(np.array([[1.0, 0.0], [0.0, 1.0]]), "xy"))


NOT_PROVED = "is not re-proved to"


def linked(last: Program) -> Program:
    """The program after a head with one key, which copies every variable."""
    inputs = [f"in.{i}" for i in range(last.input_shapes[0][0])]
    none, one, copies = np.zeros((len(inputs), 1)), np.eye(len(inputs)), [(0, name, 0, name) for name in inputs]
    copy, pick = (affine(name, (1, inputs), (1, inputs), copies) for name in ("copy", "pick"))
    keep = Attention("keep", (Head(none, none, one, one),), tuple(inputs))
    return Program((copy, keep, pick, *last.layers), last.input_shapes, last.output_shape)


@pytest.mark.parametrize("far", [1000.0, -1000.0])
@pytest.mark.parametrize(("gap", "bound"), [(3.0, 1.0), (4.06, 17.0)])
def test_rows_that_are_left_out_are_paid_for(tmp_path, far, gap, bound):
    """The other key is behind by 8x, and at x = 1/2 its value adds 18. The second gap lies within the leaf."""
    program = linked(lattice_program(np.array([[-2.0], [2.0]]), np.array([far, 0.0]), [1.0], [0.0], 1.0))
    assert abs(program(np.array([[0.5]]))[0, 0]) > 17.9
    given = (program, "0*x", [(0.5, 1.0)], [["enclosure", 0, 0]])
    assert NOT_PROVED in refusal(save(tmp_path / "net", *given, bound, gap=gap))
    proved(save(tmp_path / "fine", *given, 20.0, gap=3.0))


def test_scores_that_are_no_sums_of_rows_are_paid_for(tmp_path):
    """Both rows of a key are behind by 2, and the key, with 4 more, is not. Its value is 1000, and the average 440."""
    anchors = np.array([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]])
    program = linked(lattice_program(anchors, np.array([0.0, 0.0, 0.0, 1000.0]), [1.0, 1.0], [0.0, 0.0], 0.5))
    net = save(tmp_path / "net", program, "0*x", [(0.5, 1.0)] * 2, [["enclosure", 0, 0, 0]], 300.0, gap=1.5)
    proved(net)

    def raise_score(tensors):
        numbers = tensors["layers.3.embed.constant.values"]
        numbers[np.flatnonzero(numbers == -8)[-1]] = -(2.0**-40)

    edit(net, "tensors", raise_score)
    assert NOT_PROVED in refusal(net)
    (subject,) = proof_of(*read(net)).subjects
    assert subject.prover.outputs[0].growth >= arb(7.99).exp()  # weights are off by e^{2y} if scores are off by ±y


def test_the_rounding_of_the_last_head_counts(tmp_path):
    value = float(np.float32(0.3))
    program = lattice_program(np.array([[-2.0], [2.0]]), np.full(2, 0.3), [1.0], [0.0], 1.0, np.float32)
    net = save(tmp_path / "net", program, f"{value!r} + 0*x", [(0.5, 1.0)], [["enclosure", 0, 0]], 1e-9)
    assert NOT_PROVED in refusal(net)
