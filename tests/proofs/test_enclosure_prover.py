"""Programs of several stages by leaves: proofs hold and are tight, tampered programs gain nothing, softmaxes too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.constructions import Built
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.layers import Layer, Softmax
from attnc.ir.program import Program
from attnc.ir.rounding import evaluation_error
from attnc.ir.spec import check
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import time_limit
from attnc.proofs.enclosure_prover import EnclosureProver
from attnc.proofs.kinds.axis_keys import AxisKeys, axis_keys
from attnc.proofs.kinds.enclosure import StageEnclosure, axis_breaks, cut_at
from attnc.proofs.partition_prover import PartitionProver
from attnc.proofs.proof import Proof
from attnc.proofs.prover import ProofRequest, num_softmaxes
from attnc.proofs.stages.extraction import ProgramStage, stage_chain, stages, stages_and_read_out
from attnc.targets.expression_target import ExpressionTarget
from proofs.comparisons import Comparisons, adversarial_points, errors_at, worst_error
from proofs.mutations import PROGRAM_MUTATIONS, with_layer
from proofs.one_stage_programs import Maker
from proofs.small_stages import stage_values


def prove_deep(program: Program, target: ExpressionTarget, *, seconds: float = 60.0, **request: float) -> Proof:
    with time_limit(counted=seconds):
        prover = PartitionProver() if num_softmaxes(program) == 1 else EnclosureProver()
        return prover.prove(program, target, ProofRequest(**request))


DTYPES = ("float64", "float32")
SELECTING = ("two_layer", "attention_softmax")
CASES = [
    ("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 0.6),
    ("(x*y, max(x, y) - 0.3)", {"x": (-1, 1), "y": (-1.5, 1)}, 0.4),
    ("sqrt(abs(x))", {"x": (-1, 1)}, 0.2),
    ("x*y + max(z, w)", dict.fromkeys("xyzw", (-1, 1)), 0.8),
]


@functools.cache
def selecting(name: str, case: int, dtype: str) -> tuple[ExpressionTarget, Built, np.ndarray, float]:
    text, box, eps = CASES[case]
    target = attnc.as_target(text, box)
    built = getattr(constructions, name)(target, eps=eps, dtype=dtype)
    points = adversarial_points(built.program, target, 800 if name in SELECTING else 2000)
    return target, built, points, float(errors_at(NumpyEngine(built.program), target, points).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "case", "most"), [*((name, case, 1.5) for name in SELECTING for case in range(3)), ("max_affine", 3, 1.1)]
)
def test_bounds_hold_and_are_tight(name, case, most, dtype):
    target, built, points, seen = selecting(name, case, dtype)
    found = prove_deep(built.program, target, observed=seen, eps=CASES[case][2], seconds=30)
    Comparisons().check(built.program, target, found.bound, points)
    assert found.complete
    assert found.bound <= most * seen
    assert len(found.evidence.leaves) <= 512 or name in SELECTING  # one stage needs few leaves, in four variables too


@pytest.mark.parametrize(("text", "p"), [("x*y", 2.0), ("max(x, y)", 3.5), ("sign(x)*y", 1.0)])
def test_norms_hold_and_are_tight(text, p):
    """Against a fine midpoint rule, which is off by far less than the room that is left."""
    target = attnc.as_target(text, {"x": (-1, 1), "y": (-1, 1)}, p=p)
    built = constructions.two_layer(target, eps=0.5, norm=p)
    middles = (np.arange(400) + 0.5) / 200 - 1
    points = np.stack(np.meshgrid(middles, middles), axis=-1).reshape(-1, 2)
    errors = errors_at(NumpyEngine(built.program), target, points)
    seen = float((4 * np.mean(errors**p)) ** (1 / p))
    found = prove_deep(built.program, target, p=p, observed=seen, eps=0.5, seconds=10)
    assert seen <= 1.001 * found.bound
    assert found.bound <= 2 * seen
    volumes = [4 * 0.25**leaf.level for leaf in found.evidence.leaves]
    assert sum(volumes) == pytest.approx(4)
    assert np.dot(volumes, found.evidence.bounds**p) ** (1 / p) == pytest.approx(found.bound, rel=1e-6)


def keys_of(program: Program, target: ExpressionTarget) -> tuple[AxisKeys, ...] | None:
    stages = [StageEnclosure.of(stage, is_first=i == 0) for i, stage in enumerate(stage_chain(program))]
    cuts = [axis_breaks(stages[0], target.box, axis) for axis in range(target.box.d)]
    return axis_keys(stages, Interval(target.box.lo[None], target.box.hi[None]), cuts, 1e-4)


@pytest.mark.parametrize("name", SELECTING)
def test_keys_of_a_grid_are_combinations_of_rows(name):
    target, built, points, _ = selecting(name, 1, "float64")
    found = keys_of(built.program, target)
    assert found is not None
    (head,) = found
    counts = dict(built.parameters)["points_per_axis"]
    assert " × ".join(map(str, head.keys.shape)) == counts
    assert np.array_equal(np.sort(head.keys.ravel()), np.arange(head.keys.size))
    # At every point the output of the network is one of the values of the keys that can win there.
    computed = NumpyEngine(built.program)(points).reshape(len(points), -1)
    ends = Interval(target.box.lo[None], target.box.hi[None])
    tables = [axis.winners(ends.lo[:, i], ends.hi[:, i])[0] for i, axis in enumerate(head.axes)]
    leak = head.growth * (head.spare_leak + sum(table.leak for table in tables))
    room = leak * np.ptp(head.values.mid, axis=0) + head.rounding
    for x, said in zip(points, computed, strict=True):
        rows = [t.rows[(t.lo <= value) & (value <= t.hi)] for t, value in zip(tables, x, strict=True)]
        near = head.values[head.keys[np.ix_(*rows)].ravel()]
        assert (near.lo.min(axis=0) - room <= said).all()
        assert (said <= near.hi.max(axis=0) + room).all()
        assert max(map(len, rows)) <= 2


def test_keys_of_another_kind_are_not_taken_apart():
    """Layers of random weights mix the variables, or read several heads; a key that is missing leaves a gap."""
    assert all(keys_of(*random_deep(np.random.default_rng(seed))) is None for seed in range(6))
    target, built, _, _ = selecting("attention_softmax", 1, "float64")
    scores = built.program.layers[-3]
    kept = scores.weight.index[:, 1] != scores.weight.shape[1] - 1
    weight = dataclasses.replace(scores.weight, index=scores.weight.index[kept], values=scores.weight.values[kept])
    assert keys_of(with_layer(built.program, -3, dataclasses.replace(scores, weight=weight)), target) is None


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_programs_that_were_tampered_with(mutate):
    """The network is refused, or the bound is that of the changed network."""
    for seed, name in enumerate(SELECTING):
        target, built, _, seen = selecting(name, 2, "float64")
        program = mutate(np.random.default_rng(seed), built.program)
        with contextlib.suppress(ProgramError):
            found = prove_deep(program, target, observed=seen, eps=1.0, seconds=2)
            worst_error(program, target, found.bound, 200, seed)


def test_stages_in_another_order():
    """The two steps of which bumps are made, exchanged: it is another program, and its error is another."""
    target, built, _, seen = selecting("two_layer", 2, "float64")
    select = built.program.layers[2]
    index = select.weight.index.copy()
    index[:, 2] = index[:, 2].max() - index[:, 2]
    other = dataclasses.replace(select, weight=dataclasses.replace(select.weight, index=index))
    program = with_layer(built.program, 2, other)
    found = prove_deep(program, target, observed=seen, eps=1.0, seconds=3)
    assert worst_error(program, target, found.bound, 300) > 2 * seen


def random_deep(rng: np.random.Generator) -> tuple[Program, ExpressionTarget]:
    """Affine maps and softmaxes of random weights, of attention or of features; 2 inputs, 1 output."""
    make, state = Maker(rng, np.dtype(rng.choice(["float32", "float64"], p=[0.4, 0.6]))), (1, 2)
    layers: list[Layer] = []
    for number in range(int(rng.integers(2, 5))):
        of_features, state_after = rng.random() < 0.5, (int(rng.integers(2, 5)), int(rng.integers(3, 6)))
        fixed = make.affine(f"affine{number}.0", state, state_after, dense=of_features)
        attends = make.attention(state_after, None, 1.0, gates=False)
        layers += [fixed, Softmax("softmax", fixed.channels) if of_features else attends]
        state = (state_after[0], len(layers[-1].channels))
    layers = [dataclasses.replace(layer, name=f"{layer.name}{i}") for i, layer in enumerate(layers)]
    program = check(Program((*layers, make.affine("read", state, (1, 1), dense=True)), ((2,),), ()))
    ends = np.sort(rng.uniform(-2, 2, (2, 2)), axis=1)
    return program, attnc.as_target("sin(x)*y + 0.3", {"x": tuple(ends[0]), "y": tuple(ends[1])})


@pytest.mark.parametrize("seed", range(6))
def test_stages_of_any_kind(seed):
    program, target = random_deep(np.random.default_rng(seed))
    found = prove_deep(program, target, seconds=2)
    assert worst_error(program, target, found.bound, 300, seed) < math.inf


def computed(stage: ProgramStage, u: np.ndarray) -> np.ndarray:
    """The outputs of a stage from its slopes, offsets and values, in float64."""
    parts = stages(stage)
    out = np.empty((len(u), sum(len(outputs) for _, outputs in parts)))
    for part, outputs in parts:
        out[:, outputs] = stage_values(part, u)
    return out


@pytest.mark.parametrize("seed", range(8))
def test_stages_one_after_the_other_are_the_program(seed):
    """Also where a softmax over features is written as attention."""
    rng = np.random.default_rng(seed)
    program, target = random_deep(rng)
    points = target.box.lo + rng.random((50, 2)) * target.box.widths
    points = points.astype(program.dtype).astype(np.float64)
    wanted = program(points).reshape(50, -1)
    slack = evaluation_error(program, [points]).reshape(50, -1)
    found, read = stages_and_read_out(program)
    chained = state = points
    for stage in stage_chain(program):
        chained = computed(stage, chained)
    for stage in found:
        assert state.shape[1] == len(stage.reads)
        state = computed(stage, state)
        assert state.shape[1] == len(stage.outputs) == len(stage.tokens)
    for outputs in (chained, state @ read.weights.T + read.constant):
        assert (np.abs(outputs - wanted) <= 4 * slack).all()


@pytest.mark.parametrize("seed", range(4))
def test_an_enclosure_holds_what_is_computed(seed):
    rng = np.random.default_rng(seed)
    program, target = random_deep(rng)
    centres = target.box.lo + rng.random((20, 2)) * target.box.widths
    radii = target.box.widths * 10.0 ** rng.uniform(-6, -1, (20, 1))
    boxes = Interval(np.maximum(centres - radii, target.box.lo), np.minimum(centres + radii, target.box.hi))
    state = boxes
    for number, stage in enumerate(stage_chain(program)):
        state = StageEnclosure.of(stage, is_first=number == 0)(state)
    for _ in range(50):
        points = boxes.lo + rng.random(boxes.lo.shape) * (boxes.hi - boxes.lo)
        y = NumpyEngine(program)(points).reshape(len(points), -1)
        assert ((state.lo <= y) & (y <= state.hi)).all()


def test_cells_are_cut_into_pieces_that_cover_them():
    rng = np.random.default_rng(0)
    breaks = [np.sort(rng.random(9)), np.array([]), np.array([0.5])]
    lo = rng.random((40, 3)) * 0.7
    cells = Interval(lo, lo + rng.random((40, 3)) * 0.3)
    pieces, cell = cut_at(breaks, cells)
    volumes = np.bincount(cell, (pieces.hi - pieces.lo).prod(axis=1))
    assert volumes == pytest.approx((cells.hi - cells.lo).prod(axis=1))
    assert (cells[cell].contains(pieces)).all()
    for axis, points in enumerate(breaks):
        inside = (pieces.lo[:, axis, None] < points) & (points < pieces.hi[:, axis, None])
        assert not inside.any()


def test_what_cannot_be_proved_in_stages_is_refused():
    target, built, _, _ = selecting("two_layer", 2, "float64")
    grid, made, _, seen = selecting("max_affine", 3, "float32")
    embed, *others = made.program.layers
    moved = embed.constant.values.copy()
    moved[np.flatnonzero(embed.constant.index[:, 1] == embed.channels.index("anchor.x"))[0]] += 0.5
    constant = dataclasses.replace(embed.constant, values=moved)
    scattered = dataclasses.replace(made.program, layers=(dataclasses.replace(embed, constant=constant), *others))
    for program, given, match in (
        (dataclasses.replace(built.program, layers=built.program.layers[:-1]), target, "alternate"),
        (built.program, attnc.as_target("x*y", {"x": (0, 1), "y": (0, 1)}), "the target"),
        (scattered, grid, "combinations of rows"),
    ):
        with pytest.raises(ProgramError, match=match):
            prove_deep(program, given, observed=seen, eps=0.8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_partitions_have_bounds_that_hold(dtype):
    """Most points share several rows, and the values of all of them count."""
    target, _, points, seen = selecting("max_affine", 2, dtype)
    built = constructions.max_affine(target, points_per_axis=4, beta=1.0, dtype=dtype)
    found = prove_deep(built.program, target, observed=seen, eps=0.8)
    worst = Comparisons().check(built.program, target, found.bound, points)
    assert found.bound <= 3 * worst


def test_a_part_of_the_box_has_a_bound_of_its_own():
    net = attnc.compile("x", box={"x": (0, 1)}, eps=0.3, construction="two_layer")
    assert net.certificate.method == "proof"
    points = np.linspace(0.25, 0.5, 4001)[:, None]
    error = np.abs(net(points) - points[:, 0]).max()
    assert error <= net.bound({"x": (0.25, 0.5)}, seconds=5) <= min(net.certificate.bound, 1.2 * error)
