"""The normal form has the meaning of the program, and folds everything that does not depend on the input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.sparse import csr_array

import attnc
from attnc.ir import Affine, Attention, Head, Program, Softmax
from attnc.ir.building import AffineBuilder, Attending, projection, reading
from attnc.ir.normal_form import AttentionStage, FloatForm, NormalForm, normal_form, pruned
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.proofs.rounding.program import RoundingForm
from attnc.proofs.stages.enclosed_sparse import EnclosedForm, SizeForm
from ir.random_programs import Factory, channels, lookup_program, programs_and_inputs, random_inputs
from ir.rounding import assert_agrees


def dumb(form: NormalForm, program: Program, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """Stage by stage as in its docstrings, one point at a time, everything dense."""
    outputs = []
    for b in range(len(inputs[0])):
        u = np.concatenate([given[b].ravel() for given in inputs])
        assert len(u) == form.num_inputs
        for stage in form.stages:
            if isinstance(stage, AttentionStage):
                moved = dumb_attention(stage, u).ravel()[stage.written]
            else:
                moved = np.array([softmax(row) for row in dense(stage.logits, u)]).ravel()
            u = np.concatenate([moved, u[stage.carried]])
        outputs.append(dense(form.output, u).reshape(program.output_shape))
    return np.array(outputs, program.dtype).reshape(len(inputs[0]), *program.output_shape)


def dense(form: FloatForm, u: np.ndarray) -> np.ndarray:
    assert form.linear.shape == (form.shape[0] * form.shape[1], len(u))
    return (form.linear.toarray() @ u).reshape(form.shape) + form.constant.toarray()


def dumb_attention(stage: AttentionStage, u: np.ndarray) -> np.ndarray:
    total = 0.0 if stage.residual is None else dense(stage.residual, u)
    for head in stage.heads:
        scores = dense(head.queries, u) @ dense(head.keys, u).T
        if head.mask is not None:
            for q, k in np.ndindex(scores.shape):
                if head.mask.key_segments[k] not in (-1, head.mask.query_segments[q]):
                    scores[q, k] = -np.inf
        total = total + np.array([softmax(row) for row in scores]) @ dense(head.values, u) @ head.W_O
    return total


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - max(scores))
    return weights / sum(weights)


@settings(max_examples=120, deadline=None)
@given(programs_and_inputs())
def test_normal_form_equals_reference(case):
    program, inputs = case
    assert_agrees(program, inputs, dumb(normal_form(program), program, inputs))


def midpoints(form: EnclosedForm) -> FloatForm:
    mid = form.dense().mid
    return FloatForm(csr_array(mid[:, :-1]), csr_array(mid[:, -1].reshape(form.shape)))


@settings(max_examples=60, deadline=None)
@given(programs_and_inputs())
def test_enclosures_are_folded_like_floats(case):
    """Memories, masks, softmaxes and variables that are carried, any number of stages."""
    program, inputs = case
    folded, stages = normal_form(program, EnclosedForm), []
    for stage in folded.stages:
        if isinstance(stage, AttentionStage):
            heads = tuple(
                replace(head, queries=midpoints(head.queries), keys=midpoints(head.keys), values=midpoints(head.values))
                for head in stage.heads
            )
            stages.append(replace(stage, heads=heads, queried=midpoints(stage.queried)))
        else:
            stages.append(replace(stage, logits=midpoints(stage.logits)))
    form = NormalForm(tuple(stages), midpoints(folded.output), folded.num_inputs)
    assert_agrees(program, inputs, dumb(form, program, inputs))


@settings(max_examples=40, deadline=None)
@given(programs_and_inputs())
def test_sizes_are_sums_of_absolute_values(case):
    """Sizes at ones are those that rounding is counted on, and no enclosure is larger."""
    program, _ = case
    exact, sizes, rounded = (normal_form(program, numbers) for numbers in (EnclosedForm, SizeForm, RoundingForm))
    mid, size = exact.output.dense().mid, sizes.output.dense().mid
    assert mid.shape == size.shape
    assert (np.abs(mid) <= size * (1 + 1e-12)).all()
    if not sizes.stages:  # afterwards a state is made of new variables, some of which are only carried
        np.testing.assert_allclose(size.sum(axis=1), rounded.output.size, rtol=1e-12)
    assert rounded.output.peak >= rounded.output.size.max(initial=0.0)
    assert (rounded.output.is_there == size.any(axis=1)).all()


@settings(max_examples=40, deadline=None)
@given(programs_and_inputs())
def test_forms_evaluate_batches_and_choose_rows(case):
    program, inputs = case
    form = normal_form(program)
    u = np.concatenate([given.reshape(len(given), int(np.prod(given.shape[1:]))) for given in inputs], axis=1)
    for stage in form.stages[:1]:
        some = stage.heads[0].keys if isinstance(stage, AttentionStage) else stage.logits
        batch = some(u)
        assert batch.shape == (len(u), *some.shape)
        for point, expected in zip(u, batch, strict=True):
            np.testing.assert_allclose(dense(some, point), expected, rtol=1e-5, atol=1e-5)
        rows = np.arange(some.shape[0])[::-2]
        assert (some.rows(rows)(u) == batch[:, rows]).all()


def test_constant_keys_fold_to_slopes_and_offsets():
    anchors, beta = np.array([-1.0, 0.5, 2.0]), 3.0
    form = normal_form(lookup_program(anchors, np.sin(anchors), beta))
    (stage,) = form.stages
    (head,) = stage.heads
    assert head.keys.is_constant
    assert head.values.is_constant
    assert head.queries.shape == (1, 2)  # the query that is read, of four tokens
    soft = head.soft_head(0)
    assert soft.slopes.toarray()[:, 0].tolist() == (2 * beta * anchors).tolist()
    assert soft.offsets.tolist() == (-beta * anchors**2).tolist()
    assert soft.values[:, 0].tolist() == np.sin(anchors).tolist()
    assert soft.carried is None
    assert head.mask.key_segments.tolist() == [1, 0, 0, 0]  # the mask hides the query token itself
    assert head.seen(0).tolist() == [1, 2, 3]


def test_what_cancels_exactly_is_constant():
    add = AffineBuilder(1, ["x"], 2, ["x", "minus", "one"])
    add.link([0, 1], "x", 0, "x")
    add.link([0, 1], "minus", 0, "x", -1.0)
    add.set([0, 1], "one", [1.0, 2.0])
    names = ("x", "minus", "one")
    W_K = projection(names, ["k"], {("x", "k"): 1.0, ("minus", "k"): 1.0, ("one", "k"): 1.0}, np.float64)
    head = Head(projection(names, ["k"], {("x", "k"): 1.0}, np.float64), W_K, W_K, np.ones((1, 1)))
    program = check(Program((add.build("add"), Attention("a", (head,), ("y",))), ((1,),), (2,)))
    (folded,) = normal_form(program).stages[0].heads
    assert folded.keys.is_constant
    assert folded.keys.constant.toarray().tolist() == [[1.0], [2.0]]


def test_stored_zeros_do_not_count_as_dependence():
    weight = Sparse((2, 1, 1, 1), np.zeros((1, 4), np.int32), np.zeros(1))
    embed = Affine("embed", weight, Sparse.from_dense(np.array([[1.0], [2.0]])), ("k",))
    one = np.ones((1, 1))
    program = check(Program((embed, Attention("a", (Head(one, one, one, one),), ("y",))), ((1,),), (2,)))
    assert normal_form(program).stages[0].heads[0].keys.is_constant


def residual_program(depth: int) -> Program:
    """Tokens (x, anchor) with a residual stream: each layer writes `x` and leaves `anchor` and `value` as they are."""
    names = ("x", "anchor", "value")
    embed = AffineBuilder(1, ["x"], 4, names)
    embed.link(0, "x", 0, "x")
    embed.set(np.arange(1, 4), "anchor", [-1.0, 0.1, 1.0])
    embed.set(np.arange(1, 4), "value", [0.02, -0.01, 0.03])
    attending = Attending(names, names, np.float64)
    head = attending.head({("x", "k"): 1.0}, {("anchor", "k"): 1.0}, {("value", "v"): 1.0}, {("v", "x"): 1.0})
    layers = [Attention(f"step{i}", (head,), names, residual=True) for i in range(depth)]
    read = reading("read", 4, names, [0], {"x": "x"}, np.float64)
    return check(Program((embed.build("embed"), *layers, read), ((1,),), ()))


def test_constants_in_the_residual_stay_constants():
    form = normal_form(residual_program(3))
    for stage in form.stages:
        assert stage.heads[0].keys.is_constant
        assert stage.heads[0].values.is_constant
    for stage in form.stages[:-1]:
        assert len(stage.written) == 4  # `x` of the four tokens; the eight constants are not variables
    assert len(form.stages[-1].written) == 1


def test_deep_programs_do_not_grow():
    program = residual_program(300)
    form = normal_form(program)
    assert len(form.stages) == 300
    assert {stage.heads[0].queries.linear.shape[1] for stage in form.stages[1:]} == {4}
    assert max(stage.heads[0].queries.linear.nnz + stage.heads[0].keys.constant.nnz for stage in form.stages) <= 7
    assert all(len(stage.carried) == 0 for stage in form.stages)
    inputs = random_inputs(program, 2, 0)
    np.testing.assert_allclose(dumb(form, program, inputs), program(*inputs), rtol=300 * 50 * 2.0**-53)


@pytest.mark.parametrize("stages_between", [0, 1, 3])
def test_memory_variables_are_carried_through_stages(stages_between):
    """The second input is read by the last layer only: its variables survive the stages before it, and no longer."""
    factory = Factory(None, np.random.default_rng(stages_between), np.dtype(np.float64), 3, (1.0,))

    def head() -> Head:
        return Head(*(factory.numbers(2, 2) for _ in range(4)))

    between = [Attention(f"self{i}", (head(),), channels(2), residual=i % 2 == 0) for i in range(stages_between)]
    layers = (
        *between,
        Attention("look", (head(),), channels(2), cross=True),
        Attention("after", (head(),), ("a", "b")),
    )
    inner = Attention("inner", (head(),), channels(2))
    program = check(Program(layers, ((3, 2), (4, 2)), (3, 2), (inner,)))
    form = normal_form(program)
    assert form.num_inputs == 14
    assert form.stages[0].carried.tolist() == list(range(6))  # of the main stream, through the memory's own stage
    assert all(len(stage.carried) == 8 for stage in form.stages[1 : 1 + stages_between])
    assert all(len(stage.carried) == 0 for stage in form.stages[1 + stages_between :])
    inputs = random_inputs(program, 3, 1)
    assert_agrees(program, inputs, dumb(form, program, inputs))


def test_constant_memory_is_folded_before_anything_moves():
    grid = Affine("grid", Sparse.zeros((3, 2, 0, 0), np.float64), Sparse.from_dense(np.eye(3, 2)), channels(2))
    one = np.ones((1, 1))
    look = Attention("look", (Head(one, np.ones((2, 1)), np.ones((2, 1)), one),), ("y",), cross=True)
    form = normal_form(check(Program((look,), ((1,),), (1,), (grid,))))
    assert form.num_inputs == 1
    assert form.stages[0].heads[0].keys.is_constant
    assert form.stages[0].heads[0].keys.constant.toarray().ravel().tolist() == [1.0, 1.0, 0.0]


def test_what_nothing_reads_is_no_stage():
    factory = Factory(None, np.random.default_rng(0), np.dtype(np.float64), 3, (1.0,))
    dead = Attention("dead", (Head(*(factory.numbers(2, 2) for _ in range(4))),), channels(2))
    constant = Affine("end", Sparse.zeros((1, 1, 3, 2), np.float64), Sparse.from_dense(np.ones((1, 1))), ("one",))
    program = check(Program((dead, Softmax("smooth", channels(2)), constant), ((3, 2),), ()))
    form = normal_form(program)
    assert form.stages == ()
    assert form.output.is_constant
    assert program(np.zeros((2, 3, 2))).tolist() == [1.0, 1.0]


@settings(max_examples=60)
@given(programs_and_inputs(max_layers=5))
def test_variables_that_nothing_reads_are_dropped(case):
    program, inputs = case
    form = normal_form(program)
    few = pruned(form)
    for stage, before in zip(few.stages, form.stages, strict=True):
        assert stage.num_variables <= before.num_variables
    assert_agrees(program, inputs, dumb(few, program, inputs))


def test_a_composition_passes_on_only_what_it_reads():
    form = pruned(normal_form(attnc.compile("exp(sin(x)*y)", [(-1, 1)] * 2, eps=1e-3, construction="compose").program))
    assert [len(stage.written) + len(stage.carried) for stage in form.stages] == [1, 1]
