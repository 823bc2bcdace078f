"""The stage contains the exact function of the stored weights, and its radii are of the size of a few roundings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import fmpq
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine
from attnc.errors import ProgramError
from attnc.ir import Affine, Attention, Head, Program, Softmax
from attnc.ir.shapes import streams
from attnc.ir.soft_head import Enclosed
from attnc.ir.sparse import Sparse
from attnc.proofs.stages.enclosed_sparse import EnclosedForm, SizeForm
from attnc.proofs.stages.extraction import OneStage, OutputGroup, one_stage, only_stage, stages
from attnc.targets.function_target import SequenceTarget
from ir.random_programs import lookup_program
from proofs.exact_programs import exact_head, exact_output, rational, read_out
from proofs.one_stage_programs import num_inputs, random_program
from proofs.small_stages import stage_output
from strategies.reference import precision


def coefficients(function, d: int) -> tuple[np.ndarray, np.ndarray]:
    """(slopes, constants) of an affine function to arrays of rationals, from its values at 0 and the unit vectors."""
    zero = np.array(function([fmpq(0)] * d), dtype=object)
    rest = [np.array(function([fmpq(int(i == j)) for j in range(d)]), dtype=object) - zero for i in range(d)]
    return np.stack(rest, axis=-1), zero


def assert_encloses(enclosed: Enclosed, exact: np.ndarray, size: Enclosed) -> None:
    """Each number is within its radius, and the radius within a few units of the size of its terms."""
    assert enclosed.mid.shape == exact.shape
    for mid, radius, number in zip(enclosed.mid.ravel(), enclosed.radius.ravel(), exact.ravel(), strict=True):
        assert abs(number - rational(mid)) <= rational(radius)
    assert (enclosed.radius <= 8 * 2.0**-53 * size.mid).all()


def exact_values(program: Program, query: int, number: int):
    """The values of one query and head as they arrive in the outputs: (keys, outputs)."""
    place = next(i for i, layer in enumerate(program.layers) if isinstance(layer, Attention))
    tokens, width = streams(program)[1].steps[place].after
    silent = read_out(program, [[fmpq(0)] * width for _ in range(tokens)])

    def at(point):
        rows = []
        for value in exact_head(program, point, query, number)[1]:
            written = [[fmpq(0)] * width for _ in range(tokens)]
            written[query] = value
            rows.append([a - b for a, b in zip(read_out(program, written), silent, strict=True)])
        return rows

    return at


def whole_stage(program: Program, numbers: type[EnclosedForm] = EnclosedForm) -> OneStage:
    """All outputs as one stage."""
    forms = only_stage(program).folded(numbers)
    return one_stage(forms, OutputGroup(np.arange(forms.num_outputs), np.arange(forms.num_queries)))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_every_number_is_enclosed_tightly(seed):
    program = random_program(seed)
    stage, size, d = whole_stage(program), whole_stage(program, SizeForm), num_inputs(program)
    softmax = only_stage(program).folded(EnclosedForm).softmax
    tokens = [] if softmax is None else softmax.tokens.tolist()
    pairs = [(query, number) for query in tokens for number in range(len(softmax.heads))]
    for head, of_size, (query, number) in zip(stage.heads, size.heads, pairs, strict=True):
        slopes, offsets = coefficients(lambda x, q=query, h=number: exact_head(program, x, q, h)[0], d)
        assert_encloses(head.slopes, slopes, of_size.slopes)
        assert_encloses(head.offsets, offsets, of_size.offsets)
        slopes, values = coefficients(exact_values(program, query, number), d)
        assert_encloses(head.values, values, of_size.values)
        if head.carried is not None:
            assert_encloses(head.carried, slopes, of_size.carried)
        else:
            assert not slopes.any()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_the_stages_compute_the_program(seed):
    program = random_program(seed, scale=0.05)
    point = np.random.default_rng(seed).uniform(-2, 2, num_inputs(program))
    seen = []
    with precision(200):
        expected = exact_output(program, point)
        for stage, outputs in stages(program):
            seen += outputs.tolist()
            for found, output in zip(stage_output(stage, point), outputs.tolist(), strict=True):
                assert found.overlaps(expected[output])
                assert float(found.rad()) < 1e-9 * (1 + abs(float(found.mid())))
    assert sorted(seen) == list(range(math.prod(program.output_shape)))


def test_what_is_exact_has_no_radius():
    """Anchors that are short floats, β a power of two: nothing rounds, in either dtype."""
    for dtype in (np.float64, np.float32):
        program = lookup_program(np.arange(6.0), np.array([0.1, 0.2, -0.3, 1e10, 0, 1e-310]), 4.0, dtype)
        (head,) = whole_stage(program).heads
        assert not any(part.radius.any() for part in (head.slopes, head.offsets, head.values))
        assert head.values.mid[0, 0] == dtype(0.1)


def test_positions_are_stages_of_their_own():
    target = SequenceTarget(lambda X: np.tanh(X - X.mean(1, keepdims=True)), tokens=2, width=1, lipschitz=0.7072)
    program = max_affine(target, points_per_axis=3).program
    parts = stages(program)
    assert [outputs.tolist() for _, outputs in parts] == [[0], [1]]
    assert all(len(stage.heads) == 1 and stage.heads[0].slopes.mid.shape == (18, 2) for stage, _ in parts)
    assert len(whole_stage(program).heads) == 2


def test_keys_of_a_second_input_are_affine_in_both():
    target = SequenceTarget(lambda X, Y: X * Y.mean(1, keepdims=True), (1, 1), (1, 1), lipschitz=1.5)
    program = attnc.constructions.max_affine_cross(target, points_per_axis=(4, 3)).program
    (head,) = whole_stage(program).heads
    assert head.slopes.mid.shape == (12, 2)
    assert len(np.unique(head.slopes.mid[:, 0])) == 4
    assert len(np.unique(head.slopes.mid[:, 1])) == 3


def attending(W_K: float, size: float = 1.0, moves: bool = False) -> Program:
    """(x, size) asks two tokens, (x, size) and (size, size), for their first channel with keys from either channel."""
    weight = np.zeros((2, 2, 1, 1))
    weight[0, 0] = 1
    constant = size * np.array([[0.0, 1.0], [1.0, 1.0]])
    embed = Affine("embed", Sparse.from_dense(weight), Sparse.from_dense(constant), ("x", "one"))
    keys = np.array([[W_K], [0.0]] if moves else [[0.0], [W_K]])
    head = Head(np.array([[1.0], [0.0]]), keys, np.eye(2), np.ones((2, 1)))
    return Program((embed, Attention("ask", (head,), ("y",))), ((1,),), (2,))


def test_what_is_not_one_stage_is_refused():
    program = attending(1.0)
    assert whole_stage(program).heads[0].carried is not None
    embed, ask = program.layers
    twice = Program((embed, Softmax("s", ("x", "one")), ask), ((1,),), (2,))
    for refused, match in (
        (attending(1.0, moves=True), "bilinear"),
        (twice, r"'s' \(softmax\), 'ask' \(attention\)"),
        (Program((embed,), ((1,),), (4,)), "found, beside affine maps: none"),
        (attending(1e300, size=1e300), "overflows"),
    ):
        with pytest.raises(ProgramError, match=match):
            whole_stage(refused)
