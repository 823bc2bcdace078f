"""Equal layers become repeats, and repeats become layers again; rows of affine maps give the same states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.engines import prompt
from attnc.errors import ProgramError
from attnc.exports.tensors import decode, encode, layout
from attnc.ir.affine_rows import AffineRows
from attnc.ir.layers import Affine, Attention, Head, Layer, Softmax
from attnc.ir.program import Program
from attnc.ir.repeats import Repeat, Varying, later_name, rolled, runs, unrolled
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.ir.text import layer_rows

EYE = np.eye(2)
HEADS = (Head(EYE, EYE, EYE, EYE),)
NAMES = ("a", "b")


def affine(name: str, values: tuple[float, float], tokens: int = 1) -> Affine:
    index = np.array([[t, c, t, c] for t in range(tokens) for c in range(2)], np.int32)
    weight = Sparse((tokens, 2, tokens, 2), index, np.array(values * tokens))
    return Affine(name, weight, Sparse.zeros((tokens, 2), np.float64), NAMES)


def steps(count: int, *, tokens: int = 1, varied: bool = False) -> list[Layer]:
    made: list[Layer] = []
    for t in range(count):
        made += [
            Attention(f"attend{t + 1}", HEADS, NAMES, residual=True),
            affine(f"update{t + 1}", (1.0, 2.0 + varied * t), tokens),
        ]
    return made


@pytest.mark.parametrize("varied", [False, True])
def test_equal_steps_become_a_repeat(varied: bool) -> None:
    layers = [affine("begin", (1.0, 1.0)), *steps(5, varied=varied), Softmax("end", NAMES)]
    begin, repeat, end = rolled(layers)
    assert begin is layers[0]
    assert end is layers[-1]
    assert isinstance(repeat, Repeat)
    assert (repeat.count, len(repeat.layers)) == (5, 2)
    assert {key: differ.entries.tolist() for key, differ in repeat.varying.items()} == (
        {(1, "weight"): [1]} if varied else {}
    )
    again = unrolled((begin, repeat, end))
    assert [layer.name for layer in again] == [layer.name for layer in layers]
    for one, other in zip(again, layers, strict=True):
        if isinstance(one, Affine) and isinstance(other, Affine):
            assert one.weight.values.tolist() == other.weight.values.tolist()
    assert [run.count for run in runs((begin, repeat, end))] == [1, 5, 1]


def test_turns_with_equal_values_share_them() -> None:
    layers = steps(6)
    layers[11] = affine("update6", (1.0, 7.0))
    (repeat,) = rolled(layers)
    assert isinstance(repeat, Repeat)
    maps = [layer.weight for layer in repeat.unrolled if isinstance(layer, Affine)]
    assert len({id(weight) for weight in maps}) == 2
    assert maps[-1].values.tolist() == [1.0, 7.0]
    rows = AffineRows.of(repeat.layers[1], repeat.varying[1, "weight"])  # type: ignore[arg-type]
    assert len(rows.weights.distinct) == 2


def test_two_turns_are_no_repeat() -> None:
    assert not any(isinstance(part, Repeat) for part in rolled(steps(2)))


@pytest.mark.parametrize(
    "changed",
    [
        lambda layer: replace(layer, name="attend9"),
        lambda layer: replace(layer, residual=False),
        lambda layer: replace(layer, heads=(Head(EYE, EYE, EYE, 2 * EYE),)),
        lambda layer: replace(layer, channels=("a", "c")),
    ],
)
def test_a_step_that_differs_ends_the_repeat(changed) -> None:
    layers = steps(6)
    layers[6] = changed(layers[6])  # the attention of the fourth step
    first = rolled(layers)[0]
    assert isinstance(first, Repeat)
    assert first.count == 3


def program(varied: bool = True) -> Program:
    layers = [*steps(5, tokens=3, varied=varied), Softmax("end", NAMES)]
    return check(Program(rolled(layers), ((3, 2),), (3, 2), rolled(())))


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_engines_and_exports_agree_with_the_layers_written_out(varied: bool, dtype: str, tmp_path) -> None:
    repeated = program(varied).astype(dtype)
    plain = replace(
        repeated,
        layers=tuple(
            replace(layer, heads=tuple(replace(h) for h in layer.heads)) if isinstance(layer, Attention) else layer
            for layer in repeated.unrolled_layers
        ),
    )
    assert not any(isinstance(part, Repeat) for part in plain.layers)
    points = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(dtype) * 0.1
    wanted = plain(points)
    assert (repeated(points) == wanted).all()  # bit for bit
    u = np.finfo(dtype).eps
    near = 1e3 * u * np.abs(wanted).max()  # five turns that grow up to 6-fold, in another order of summation
    for point, value in zip(points, wanted, strict=True):
        assert (prompt.run(repeated, [point]) == prompt.run(plain, [point])).all()
        assert np.abs(prompt.run(repeated, [point]) - value).max() <= near
    from attnc.ir.normal_form import normal_form

    assert normal_form(repeated).num_scores == normal_form(plain).num_scores
    structure, tensors = encode(repeated)
    again = decode(structure, tensors)
    assert set(layout(structure)) == set(tensors)
    assert (again(points) == wanted).all()
    assert (repeated.num_attention_layers, repeated.num_heads) == (5, 5)
    assert repeated.num_parameters < plain.num_parameters
    torch = pytest.importorskip("torch")
    from attnc.engines.torch_layers import LayeredNetwork

    assert np.abs(LayeredNetwork(repeated)(torch.tensor(points)).detach().numpy() - wanted).max() <= near
    pytest.importorskip("onnxruntime")
    from attnc.exports.onnx_file import run_onnx
    from attnc.exports.onnx_layers import export_layers

    export_layers(repeated, tmp_path / "a.onnx", metadata={})
    assert np.abs(run_onnx(tmp_path / "a.onnx", [points]) - wanted).max() <= near


def test_a_repeat_is_one_row_of_the_text() -> None:
    rows = layer_rows(program())
    assert [(row["name"], row["turns"]) for row in rows] == [("attend1", 5), ("update1", 5), ("end", 1)]
    assert "attend1 × 5" in str(program())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": 0}, "has no turn"),
        ({"layers": ()}, "has no turn"),
        ({"layers": (affine("map", (1.0, 2.0), 3),), "varying": {}}, "without a number at its end"),
        ({"varying": {(0, "weight"): Varying(np.array([1]), np.ones((5, 1)))}}, "is no affine map"),
        ({"varying": {(1, "bias"): Varying(np.array([1]), np.ones((5, 1)))}}, "is no affine map"),
        ({"varying": {(1, "weight"): Varying(np.array([6]), np.ones((5, 1)))}}, "does not have"),
        ({"varying": {(1, "weight"): Varying(np.array([1, 1]), np.ones((5, 2)))}}, "one of them twice"),
        ({"varying": {(1, "weight"): Varying(np.array([1]), np.ones((4, 1)))}}, "values of shape"),
        ({"varying": {(1, "weight"): Varying(np.array([1]), np.full((5, 1), np.nan))}}, "are finite"),
        ({"layers": (Attention("widen1", (Head(EYE, EYE, EYE, np.ones((2, 3))),), ("a", "b", "c")),)}, "a turn of"),
    ],
)
def test_repeats_that_are_not_legal_are_refused(changed, message: str) -> None:
    repeat = program().layers[0]
    if "layers" in changed:
        changed = {"varying": {}} | changed
    broken = replace(repeat, **changed)
    with pytest.raises(ProgramError, match=message):
        check(replace(program(), layers=(broken, Softmax("end", NAMES))))


def test_the_number_of_a_name_grows() -> None:
    assert later_name("task1.update9", 3) == "task1.update12"
    with pytest.raises(ValueError, match="number at the end"):
        later_name("update", 1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_rows_give_the_state_of_the_map(seed: int, tokens: int, width: int, tokens_in: int, width_in: int) -> None:
    generator = np.random.default_rng(seed)
    dense = generator.choice([0.0, 0.0, 1.0, -2.5], (tokens, width, tokens_in, width_in))
    constant = generator.choice([0.0, 0.0, 3.0], (tokens, width))
    layer = Affine("map", Sparse.from_dense(dense), Sparse.from_dense(constant), tuple(map(str, range(width))))
    rows, state = AffineRows.of(layer), generator.normal(size=tokens_in * width_in)
    taken = state[rows.columns] if state.size else np.zeros(rows.columns.shape)
    made = (rows.weights.distinct[0] * taken).sum(-1) + rows.constants.distinct[0]
    found = np.concatenate([state, made])[rows.selected]
    wanted = dense.reshape(tokens * width, -1) @ state + constant.ravel()
    assert np.allclose(found, wanted, rtol=1e-14, atol=1e-14)
    assert len(rows.columns) <= tokens * width
