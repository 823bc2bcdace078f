"""Enclosure leaves of deep programs: proved again; what is said holds at points; what was changed is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

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
from checker.tampering import change_weight, changes, edit, refused_changes, reproved

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
    """Or they do not matter: what is proved of the network as it now is, is true."""
    net, path = attnc.compile("sin(x)", box={"x": (0, 3)}, eps=0.3, construction=construction), tmp_path / "net"
    net.save(path)
    x = np.linspace(net.box.lo, net.box.hi, 4001)
    refused = refused_changes(path, x, np.sin(x), lambda size: [(i, -1.5) for i in {0, size - 1}])
    assert {name.split(".")[1] for name in refused} >= {"0", "4"}


def test_a_link_must_prove_its_reach(tmp_path):
    """The average of x, −x and −x is at most 1, and its reach is 2. By differences from one value its bound is 7/3."""
    signs = np.array([1.0, -1.0, -1.0])
    values = affine("values", (1, ["x"]), (4, ["value"]), [([1, 2, 3], "value", 0, "x", signs)])
    none, one = np.zeros((1, 1)), np.eye(1)
    mean = Attention("mean", (Head(none, none, one, one, Mask(np.zeros(4, int), np.array([1, 0, 0, 0]))),), ("mean",))
    pick = affine("pick", (4, ["mean"]), (1, ["in.0"]), [(0, "in.0", 0, "mean")])
    last = lattice_program(np.array([[-2.0], [2.0]]), np.array([0.5, 0.5]), [1.0], [0.0], 1.0)
    program = Program((values, mean, pick, *last.layers), ((1,),), (1,))
    net = save(tmp_path / "net", program, "0.5 + 0*x", [(-1.0, 1.0)], [["enclosure", 0, 0]], 1e-3)
    (subject,) = proof_of(*read(net)).subjects
    assert isinstance(subject.prover, Chain)
    (way,) = subject.prover.outputs[0].ways
    with pytest.raises(Refused, match="not bounded well enough to exclude an overflow"):
        list(way.states(arb(-1), arb(1)))
    ((_, _, (_, link)),) = way.states(arb(0.5), arb(1))
    assert abs(link) <= 2
