"""Runs of equal layers are found, taken apart and put together again; rows of affine maps give the same states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.ir.affine_rows import AffineRows
from attnc.ir.layers import Affine, Attention, Head, Layer, Softmax
from attnc.ir.repeats import later_name, repeats
from attnc.ir.sparse import Sparse

EYE = np.eye(2)
HEADS = (Head(EYE, EYE, EYE, EYE),)
NAMES = ("a", "b")


def affine(name: str, values: tuple[float, ...]) -> Affine:
    index = np.array([[0, 0, 0, 0], [0, 1, 0, 1]], np.int32)
    return Affine(name, Sparse((1, 2, 1, 2), index, np.array(values)), Sparse.zeros((1, 2), np.float64), NAMES)


def steps(count: int, *, first: int = 1, varied: bool = False) -> list[Layer]:
    made: list[Layer] = []
    for t in range(count):
        made += [
            Attention(f"attend{first + t}", HEADS, NAMES, residual=True),
            affine(f"update{first + t}", (1.0, 2.0 + varied * t)),
        ]
    return made


@pytest.mark.parametrize("varied", [False, True])
def test_equal_steps_are_one_run(varied: bool) -> None:
    layers = [affine("begin", (1.0, 1.0)), *steps(5, varied=varied), Softmax("end", NAMES)]
    before, run, after = repeats(layers)
    assert (before.times, run.times, after.times) == (1, 5, 1)
    assert len(run.body) == 2
    assert set(run.varying) == ({(1, "weight")} if varied else set())
    again = [*before.layers, *run.layers, *after.layers]
    assert [layer.name for layer in again] == [layer.name for layer in layers]
    for one, other in zip(again, layers, strict=True):
        if isinstance(one, Affine) and isinstance(other, Affine):
            assert one.weight.values.tolist() == other.weight.values.tolist()


def test_two_turns_are_no_run() -> None:
    (plain,) = repeats(steps(2))
    assert (plain.times, len(plain.body)) == (1, 4)


@pytest.mark.parametrize(
    "changed",
    [
        lambda layer: replace(layer, name="attend9"),
        lambda layer: replace(layer, residual=False),
        lambda layer: replace(layer, heads=(Head(EYE, EYE, EYE, 2 * EYE),)),
        lambda layer: replace(layer, channels=("a", "c")),
    ],
)
def test_a_step_that_differs_ends_the_run(changed) -> None:
    layers = steps(6)
    layers[6] = changed(layers[6])  # the attention of the fourth step
    assert repeats(layers)[0].times == 3


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
    made = (rows.weights[0] * taken).sum(-1) + rows.constants[0]
    found = np.concatenate([state, made])[rows.selected]
    wanted = dense.reshape(tokens * width, -1) @ state + constant.ravel()
    assert np.allclose(found, wanted, rtol=1e-14, atol=1e-14)
    assert len(rows.columns) <= tokens * width
