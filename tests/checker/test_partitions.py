"""Partitions: grids of cells are recognised in the weights and re-proved cell by cell; false ones are refused."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flint import arb, fmpq
from safetensors.numpy import load_file

import attnc
from attnc_checker.averages import Average
from attnc_checker.checking import precision, proof_of, read
from attnc_checker.expressions import evaluate, parse
from attnc_checker.network import Reduction
from attnc_checker.partitions import Keys, Line, Partition, _Evaluation, _most_at_once, _score_errors, _where_near
from attnc_checker.program import Program
from attnc_checker.ranges import Box, Ranges
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import most
from checker.networks import lattice_program, save
from checker.tampering import changes, edit, proved, refusal, refused_changes, replaced, reproved, saved_once

UNIT = (0, 1)
HONEST = [
    ("sin(3*x)", "x", 0.01, {}),
    ("x*x - x, 1000 + sin(x)", "x", 0.1, {}),
    ("sin(3*x)", "x", 0.005, {"dtype": "float32"}),  # scores are off by 4, and the borders of cells by 0.2 of a cell
    ("x*(1 - x)*y", "xy", 0.02, {}),
    ("abs(x - y)", "xy", 0.05, {"dtype": "float32"}),
    ("sin(3*x)*y", "xy", 0.05, {"construction": "max_affine_cross"}),
    ("x*y + z", "xyz", 0.2, {}),
    ("x*y + max(z, w)", "xyzw", 0.6, {}),
    ("x + y + z + u + v", "xyzuv", 1.0, {}),
    ("x*y + z*u + v*w", "xyzuvw", 1.0, {"dtype": "float32"}),
    ("x*y", "xy", None, {"points_per_axis": 7}),
    ("sin(3*x)*y", "xy", 0.01, {"max_anchors": 20_000}),
]
IN_NORMS = [
    ("exp(x)*cos(y)", "xy", 0.0125, {"norm": 1}),  # of 72,154 leaves of another kind, which took a check 340 s
    ("sin(3*x)*y", "xy", 0.008, {"norm": 4, "dtype": "float32"}),
    ("sign(x - 0.3)*y + sin(3*x)", "xy", 0.3, {"norm": 2}),
    ("floor(3*x)", "x", 0.3, {"norm": 2}),  # leaves of rounding alone
]


def partition(text, names, eps, options, *, box=UNIT):
    options = {"construction": "max_affine", **options}
    net = attnc.compile(text, dict.fromkeys(names, box), eps, **options)
    assert net.certificate.method == "proof"
    assert {leaf.kind for leaf in net.certificate.by_leaves.leaves} == {"enclosure"}
    return net


@pytest.mark.parametrize(("text", "names", "eps", "options"), HONEST, ids=[str(case[:3]) for case in HONEST])
def test_partitions_are_re_proved(tmp_path, text, names, eps, options):
    net = partition(text, names, eps, options)
    assert net.certificate.num_leaves <= 64  # of the whole box, and not one for each cell
    net.save(tmp_path / "net")
    verdict = proved(tmp_path / "net")
    assert net.certificate.observed <= verdict.reproved * (1 + 1e-9)
    assert verdict.reproved <= net.certificate.bound <= 1.3 * net.certificate.observed
    assert eps is None or net.certificate.bound <= eps


@pytest.mark.parametrize(("text", "names", "eps"), [("sin(3*x)*y", "xy", 0.008), ("x + y + z + u + v", "xyzuv", 0.35)])
def test_large_partitions_are_re_proved(tmp_path, text, names, eps):
    """Leaves of other kinds would take minutes, and before only a theorem stated these bounds."""
    net = partition(text, names, eps, {})
    assert net.num_anchors > 20_000
    reproved(tmp_path / "net", net)


@pytest.mark.parametrize(("text", "names", "eps", "options"), IN_NORMS)
def test_partitions_are_re_proved_in_norms(tmp_path, text, names, eps, options):
    net = partition(text, names, eps, options)
    assert net.certificate.observed <= net.certificate.bound <= eps
    reproved(tmp_path / "net", net)


saved = saved_once(partition("sin(3*x)*y", "xy", 0.1, {}).save)


def constants(tensors):
    """The constants of the keys by channel, as {channel: numbers in the list of constants}."""
    index = tensors["layers.0.embed.constant.index"]
    return {channel: np.flatnonzero(index[:, 1] == channel) for channel in np.unique(index[:, 1])}


def other_value(tensors):
    """One value of one cell, off by three times the bound."""
    places = constants(tensors)
    tensors["layers.0.embed.constant.values"][places[max(places)][40]] += 0.3


def swapped_values(tensors):
    places, values = constants(tensors), tensors["layers.0.embed.constant.values"]
    first, last = places[max(places)][[1, -2]]
    values[[first, last]] = values[[last, first]]


def other_anchor(tensors):
    """One key at the place of another one."""
    places, values = constants(tensors), tensors["layers.0.embed.constant.values"]
    anchors = places[sorted(places)[3]]
    values[anchors[0]] = values[anchors[-1]]


def other_bias(tensors):
    """One key that is 50 units ahead of the others."""
    places, values = constants(tensors), tensors["layers.0.embed.constant.values"]
    values[places[sorted(places)[5]][7]] += 50.0


def row_behind(tensors):
    """All keys of one row are behind everywhere: other cells take its place."""
    index, values = (tensors[f"layers.0.embed.constant.{name}"] for name in ("index", "values"))
    anchor, bias = sorted(constants(tensors))[3], sorted(constants(tensors))[5]
    row = index[(index[:, 1] == anchor) & (values == values[index[:, 1] == anchor].max() - 3), 0]
    assert len(row) > 1
    values[np.isin(index[:, 0], row) & (index[:, 1] == bias)] -= 1e3


def softer(tensors):
    tensors["layers.1.select.head0.W_K"] /= 512


def moved(tensors):
    """All cells, by one half of their width."""
    tensors["layers.0.embed.constant.values"][0] += 0.5


def _wider(data):
    data["box"] = {name: [lo - 0.25, hi] for name, (lo, hi) in data["box"].items()}


LEAF = "the enclosure leaf x ∈"
test_false_certificates_are_refused = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data["leaves"].pop(), "do not cover the box"),
            (lambda data: data.update(bound=0.97 * data["observed"], observed=None), LEAF),
            (lambda data: data.update(gap=0.0), "too uncertain"),
            (lambda data: data.update(gap=1e3), LEAF),
            (lambda data: data.update(gap=1e9), LEAF),
            (_wider, "differ in the box"),
            (lambda data: data.update(norm="2", leaf_bounds=None), "every leaf needs a bound of its own"),
            (
                lambda data: data.update(norm="2", bound=0.5 * data["bound"], observed=None),
                "the leaves add up to the norm",
            ),
            (lambda data: data.update(norm="2", leaf_bounds=[0.01] * len(data["leaves"])), LEAF),
        ],
        ("both", 1): [
            (_wider, LEAF),
            (replaced("sin(3*x)", "sin(3.3*x)"), LEAF),
            (replaced("*y", "*y*y"), LEAF),
            (replaced("*y", "*y + 0*log(x - 0.2)"), LEAF),  # it is not defined on the first cells
        ],
        ("tensors", 1): [
            (other_value, LEAF),
            (swapped_values, LEAF),
            (other_anchor, "not all combinations of rows"),
            (other_bias, "are too uncertain"),
            (row_behind, LEAF),
            (softer, LEAF),
            (moved, LEAF),
        ],
    }
)


def test_the_same_weights_in_float32_have_another_bound(net):
    def rounded(tensors):
        tensors.update({name: x.astype(np.float32) for name, x in tensors.items() if x.dtype == np.float64})

    edit(net, "tensors", rounded)
    edit(net, "config.json", lambda data: data["program"].update(dtype="float32"))
    edit(net, "certificate.json", lambda data: data.update(bound=1.0001 * data["observed"], dtype="float32"))
    assert LEAF in refusal(net)


def test_a_cell_that_is_left_out_is_refused(net):
    """The last key, with all its numbers."""

    def without(tensors):
        index, values = (tensors[f"layers.0.embed.constant.{name}"] for name in ("index", "values"))
        kept = index[:, 0] < index[:, 0].max()
        tensors["layers.0.embed.constant.index"] = index[kept]
        tensors["layers.0.embed.constant.values"] = values[kept]

    def fewer(data):
        layers = data["program"]["layers"]
        count = layers[0]["constant"]["shape"][0]
        for layer in (layers[0], layers[2]):
            for part in ("weight", "constant"):
                layer[part]["shape"] = [count - 1 if size == count else size for size in layer[part]["shape"]]

        layers[0]["constant"]["num_entries"] = len(
            load_file(net / "model.safetensors")["layers.0.embed.constant.values"]
        )

    edit(net, "tensors", without)
    edit(net, "config.json", fewer)
    assert "not all combinations of rows" in refusal(net)


def test_changed_weights_are_refused_or_do_not_matter(tmp_path):
    net = partition("sin(3*x)", "x", 0.1, {})
    net.save(tmp_path / "net")
    x = np.linspace(net.box.lo, net.box.hi, 4001)
    for factor in (-1.5, 1.01, 1 + 1e-9):
        path = shutil.copytree(tmp_path / "net", tmp_path / str(factor) / "net")
        places = lambda size, factor=factor: [(i, factor) for i in {0, size // 2, size - 1}]  # noqa: E731
        refused = refused_changes(path, x, np.sin(3 * x), places)
        assert {name.split(".")[1] for name in refused} >= ({"0", "1"} if factor < 0 else set())


@pytest.mark.parametrize(
    ("text", "names", "eps", "dtype"),
    [("sin(3*x)", "x", 0.01, "float64"), ("sin(3*x)", "x", 0.005, "float32"), ("abs(x - y)", "xy", 0.1, "float32")],
)
def test_no_error_is_above_the_bound_found(tmp_path, text, names, eps, dtype):
    """At the borders of cells, at the ends of the strips around them, and uphill from there in steps down to an ulp."""
    net = partition(text, names, eps, {"dtype": dtype})
    net.save(tmp_path / "net")
    found, rng, box = proved(tmp_path / "net").reproved, np.random.default_rng(0), net.box
    with precision():
        (subject,) = proof_of(*read(tmp_path / "net")).subjects
        ends = [np.array([float(x) for side in rows for x in side]) for rows in subject.prover.sides]
    points = np.stack([rng.choice(each[np.isfinite(each)], 2000) for each in ends], axis=1)
    points[::2] += rng.uniform(-1, 1, points[::2].shape) * box.widths / len(ends[0])
    target = attnc.as_target(text, dict.fromkeys(names, UNIT))
    errors = np.full(len(points), -1.0)
    for step in 2.0 ** np.array([40, 34, 28, 22, 16, 10, 5, 2, 0, 0, 0]):
        moved = np.clip(points + step * np.spacing(points) * rng.integers(-2, 3, points.shape), box.lo, box.hi)
        new = np.abs(net(moved) - target(moved)[:, 0])
        points, errors = np.where((new > errors)[:, None], moved, points), np.maximum(errors, new)
    assert 0.7 * found <= errors.max() <= found


def test_the_key_that_stands_for_all_has_errors_of_at_least_their_size(tmp_path):
    """Also if terms of the largest numbers cancel, which those of other keys do not."""
    net = partition("abs(x - y)", "xy", 0.2, {"dtype": "float32"})
    net.save(tmp_path / "net")
    channels = list(net.program.layers[0].channels)
    numbers = net.program.layers[0].constant.dense()[:, [channels.index(name) for name in ("bias", "anchor.x")]]

    def cancelling(tensors):
        W_K = tensors["layers.1.select.head0.W_K"]
        (component,) = np.flatnonzero(W_K[channels.index("bias")])
        bias, anchor = np.abs(numbers).max(axis=0)
        W_K[channels.index("anchor.x"), component] = -W_K[channels.index("bias"), component] * bias / anchor

    edit(tmp_path / "net", "tensors", cancelling)
    with precision():
        _, structure, tensors = read(tmp_path / "net")
        program, reach, arithmetic = Program(structure, tensors, 2), [arb(1), arb(1)], Arithmetic("float32")
        keys = Keys(program, reach)
        own, _ = _score_errors(keys, keys.stage().heads[0], arithmetic)
        whole = Reduction(program, reach)
        (head,) = whole.stage().heads
        fixed = replace(head, query=tuple({} if moves else x for moves, x in zip(keys.moving, head.query, strict=True)))
        box = Box([arb(0)] * 2, reach)
        errors = Average.of(fixed, whole.inputs).score_errors(box, arithmetic, [arb(0)] * len(head.parts))
        assert own >= most(errors) > own / 4


@pytest.mark.parametrize("gap", [3.0, 4.06, 5.0, 40.0])
def test_keys_that_are_left_out_are_paid_for(tmp_path, gap):
    """The other key is behind by 8x, and at x = 1/2 its value adds 18."""
    program = lattice_program(np.array([[-2.0], [2.0]]), np.array([1000.0, 0.0]), [1.0], [0.0], 1.0)
    given = (program, "0*x", [(0.5, 1.0)], [["enclosure", 0, 0]])
    assert refusal(save(tmp_path / "net", *given, 17.9, gap=gap))
    assert proved(save(tmp_path / "fine", *given, 1001.0, gap=40.0)).reproved >= 1000


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_left_out_weigh_less_than_the_theorem_states(seed):
    rng = np.random.default_rng(seed)
    borders = np.sort(rng.uniform(-1, 1, 12))
    slopes = np.cumsum(rng.uniform(20, 200, 13))
    offsets = np.concatenate([[0.0], -np.cumsum(np.diff(slopes) * borders)])
    lines = [
        Line(fmpq(*a.as_integer_ratio()), fmpq(*c.as_integer_ratio()), ()) for a, c in zip(slopes, offsets, strict=True)
    ]
    gap = 3.0
    sides = [(float(lo), float(hi)) for lo, hi in _where_near(lines[:2], arb(gap), [])]
    assert sides[0][1] > sides[1][0]
    lows = np.concatenate([[-np.inf], borders - gap / np.diff(slopes)])
    highs = np.concatenate([borders + gap / np.diff(slopes), [np.inf]])
    for x in np.concatenate([rng.uniform(-1.2, 1.2, 400), borders, lows[1:], highs[:-1]]):
        scores = slopes * x + offsets
        weights = np.exp(scores - scores.max())
        left_out = weights[(x < lows) | (x > highs)].sum() / weights.sum()
        assert left_out <= 2 * math.exp(-gap)


def test_the_largest_number_of_rows_at_one_point():
    sides = [(arb(lo), arb(hi)) for lo, hi in ((-9, 1), (0, 2), (1, 3), (2.5, 4), (2.75, 9))]
    assert _most_at_once(sides) == 3
    assert _most_at_once(sides[:1]) == 1


@pytest.mark.parametrize("text", ["sin(x)*y + x", "y + cos(z)*(x - z)", "3", "max(x, y, z), exp(x*z) - z"])
def test_ranges_on_all_cells_are_those_of_each_cell(text):
    function = parse(text, ["x", "y", "z"])
    sides = [[(arb(n / 4), arb(n / 4 + 0.5)) for n in range(count)] for count in (3, 2, 4)]
    with precision():
        found = dict(_Evaluation(function, sides).cells())
        assert list(found) == list(itertools.product(range(3), range(2), range(4)))
        for place, ranges in found.items():
            alone = evaluate(function, Ranges([side[n] for side, n in zip(sides, place, strict=True)]))
            assert str(alone) == str(ranges)


def test_what_is_left_out_is_counted(saved):
    """At random points the network is a mean of the values of cells that may win there, up to leak and rounding."""
    net = attnc.load(saved)
    with precision():
        (subject,) = proof_of(*read(saved)).subjects
        prover = subject.prover
        assert isinstance(prover, Partition)
        (values,) = prover.values
        room = float(
            prover.leak * (values.high - values.low) + values.rounding(prover.arithmetic, prover.near, prover.leak)
        )
        ends = [[(float(lo), float(hi)) for lo, hi in rows] for rows in prover.sides]
        points = net.box.lo + np.random.default_rng(0).random((300, 2)) * net.box.widths
        borders = np.array([[rows[1][0], rows[2][1]] for rows in ends]).T
        for x, said in zip(np.concatenate([points, borders]), net(np.concatenate([points, borders])), strict=True):
            near = [[m for m, (lo, hi) in enumerate(rows) if lo <= at <= hi] for rows, at in zip(ends, x, strict=True)]
            here = [float(values.at(cell)) for cell in itertools.product(*near)]
            assert len(here) <= prover.near
            assert min(here) - room <= said <= max(here) + room
