"""Structure and tensors: bit for bit there and back, and FileError for whatever is not a program."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.errors import FileError
from attnc.exports.tensors import decode, encode, layout
from attnc.ir.layers import Affine, Attention, Head, Mask, Softmax
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from ir.random_programs import programs


def assert_identical(first: Any, second: Any) -> None:
    """The same types, values and bits, all the way down."""
    assert type(first) is type(second)
    if dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            assert_identical(getattr(first, field.name), getattr(second, field.name))
    elif isinstance(first, tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_identical(one, other)
    elif isinstance(first, np.ndarray):
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        assert first.tobytes() == second.tobytes()
    else:
        assert first == second


def example(dtype: str = "float64") -> Program:
    """Two inputs, a mask, a residual, a softmax: something of everything."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    embed = Affine("embed", Sparse.from_dense(matrix(3, 2, 1, 2)), Sparse.from_dense(matrix(3, 2)), ("a", "b"))
    mask = Mask(np.array([0, 1, 0], np.int32), np.array([0, 1, 1], np.int64))
    select = Attention("select", (Head(*(matrix(2, 2) for _ in range(4)), mask),), ("a", "b"), residual=True)  # type: ignore[arg-type,call-arg]
    look = Attention("look", tuple(Head(*(matrix(2, 2) for _ in range(4))) for _ in range(2)), ("c", "d"), cross=True)  # type: ignore[arg-type]
    return Program((embed, select, look, Softmax("normal", ("c", "d"))), ((2,), (4, 2)), (6,))


@given(programs(wild=True))
def test_round_trip_is_bit_for_bit(program: Program) -> None:
    structure, tensors = encode(program)
    structure = json.loads(json.dumps(structure, allow_nan=False))
    assert_identical(decode(structure, tensors), program)
    assert layout(structure) == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def test_names_are_readable() -> None:
    names = {"layers.0.embed.weight.index", "layers.0.embed.constant.values", "layers.1.select.head0.W_Q"}
    names |= {"layers.1.select.head0.mask.query_segments", "layers.2.look.head1.W_O"}
    assert names <= encode(example())[1].keys()


def test_contiguous_arrays_are_not_copied() -> None:
    program = example()
    _, tensors = encode(program)
    embed = program.layers[0]
    assert isinstance(embed, Affine)
    assert tensors["layers.0.embed.weight.values"] is embed.weight.values
    assert decode(*encode(program)).layers[0].weight.index is embed.weight.index  # type: ignore[union-attr]


def test_transposed_and_strided_arrays_keep_their_values() -> None:
    wide = np.arange(12.0).reshape(2, 6)
    head = Head(wide[:, ::3], wide.T[:2].T, wide[:, :2], np.asfortranarray(wide[:, :2]))
    program = Program((Attention("strided", (head,), ("a", "b")),), ((2,),), (2,))
    _, tensors = encode(program)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())
    assert_identical(decode(*encode(program)), program)


def test_dtypes_that_no_file_holds_are_refused() -> None:
    program = example()
    embed = program.layers[0]
    assert isinstance(embed, Affine)
    narrow = dataclasses.replace(embed.weight, index=embed.weight.index.astype(np.int16))
    changed = dataclasses.replace(program, layers=(dataclasses.replace(embed, weight=narrow), *program.layers[1:]))
    with pytest.raises(FileError, match="int16"):
        encode(changed)


def test_half_a_surrogate_pair_is_no_name() -> None:
    program = Program((Softmax("\ud800", ("a",)),), ((1,),), (1,))
    with pytest.raises(FileError):
        encode(program)


AFFINE, MASKED = ("layers", 0), ("layers", 1, "heads", 0)


MALFORMED: list[tuple[tuple[Any, ...], list[tuple[Any, str]]]] = [
    (("dtype",), [("float16", "program.dtype is one of float32, float64"), (["float64"], "program.dtype")]),
    (("dtype",), [("float32", "is float64 of shape")]),
    (("input_shapes",), [([], "not legal"), ("ab", "is a list")]),
    (("input_shapes", 0), [([-2], "whole number"), ([2.0], "whole number"), ([True], "whole number")]),
    (("input_shapes", 0), [([], "not legal")]),
    (("output_shape",), [([2**32, 2**32, 2**32], "too large"), ([1] * 33, "too large")]),
    (("output_shape",), [([10**5000], "whole number"), ([7], "not legal")]),
    (("layers",), [({}, "is a list"), ([None], "kind"), ([], "is not expected")]),
    (("memory",), [(None, "is a list")]),
    ((*AFFINE, "kind"), [("relu", "affine, attention, softmax"), ([], "affine, attention, softmax")]),
    ((*AFFINE, "kind"), [("softmax", "not known here")]),
    ((*AFFINE, "name"), [(3, "is a text"), ("select", "is missing")]),
    ((*AFFINE, "channels"), [(["a", None], "is a text"), (["a"], "not legal")]),
    ((*AFFINE, "weight", "shape"), [([3, 2, 1, 1], "num_entries"), ([3, 2, 2, 2], "not legal")]),
    ((*AFFINE, "weight", "shape"), [([3, 4], "expected int32 of shape")]),
    ((*AFFINE, "weight", "shape"), [([2**40, 2**40, 2**40, 2**40], "too large")]),
    ((*AFFINE, "weight", "shape"), [([0, 2**62, 2**62, 1], "too large")]),
    ((*AFFINE, "weight", "num_entries"), [(-1, "whole number"), (11, "is int32 of shape"), (2**61, "num_entries")]),
    ((*AFFINE, "weight", "index_dtype"), [("int64", "is int32 of shape"), ("uint8", "one of int32, int64")]),
    ((*AFFINE, "constant"), [(None, "is an object")]),
    (("layers", 1, "residual"), [(1, "true or false")]),
    (("layers", 1, "cross"), [("no", "true or false")]),
    (("layers", 1, "num_heads"), [(2, "1 are described")]),
    (("layers", 1, "heads"), [([], "num_heads")]),
    ((*MASKED, "W_Q"), [([4], "float64 of shape"), ([2**49, 2], "too large")]),
    ((*MASKED, "mask"), [(None, "is not expected"), ([], "is an object")]),
    ((*MASKED, "mask", "key_segments", "dtype"), [("float64", "one of int32, int64")]),
    ((*MASKED, "mask", "key_segments", "shape"), [([], "one axis"), ([4], "of shape")]),
]
"""A place in the structure, and the values there that are refused, each with a part of the message."""


@pytest.mark.parametrize(
    ("place", "value", "complaint"), [(place, *case) for place, cases in MALFORMED for case in cases]
)
def test_malformed_structures_are_refused(place: tuple[Any, ...], value: Any, complaint: str) -> None:
    structure, tensors = encode(example())
    with pytest.raises(FileError, match=complaint):
        decode(_with(structure, place, value), tensors)


def _with(structure: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(structure)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


@pytest.mark.parametrize("structure", [None, [], "program", 3, {}])
def test_what_is_no_structure_is_refused(structure: Any) -> None:
    with pytest.raises(FileError):
        decode(structure, {})
    with pytest.raises(FileError):
        layout(structure)


def test_attention_without_heads_is_refused() -> None:
    structure, tensors = encode(example())
    layer = {**structure["layers"][1], "num_heads": 0, "heads": []}
    with pytest.raises(FileError, match="at least one head"):
        decode({**structure, "layers": [layer]}, tensors)


def test_every_key_is_needed_and_no_other_is_known() -> None:
    structure, tensors = encode(example())
    for place in _objects(structure):
        whole = structure
        for key in place:
            whole = whole[key]
        for key in whole:
            less = {k: v for k, v in whole.items() if k != key}
            with pytest.raises(FileError, match=r"lacks the key|kind is one of"):
                decode(_with(structure, place, less) if place else less, tensors)
        more = {**whole, "extra": 0}
        with pytest.raises(FileError, match="'extra'"):
            decode(_with(structure, place, more) if place else more, tensors)


def _objects(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place] if isinstance(value, dict) else []
    return found + [inner for key, member in members for inner in _objects(member, (*place, key))]


def test_tensors_must_match_the_structure() -> None:
    structure, tensors = encode(example())
    with pytest.raises(FileError, match="'more' is not expected"):
        decode(structure, {**tensors, "more": np.zeros(1)})
    for name, tensor in tensors.items():
        with pytest.raises(FileError, match="is missing"):
            decode(structure, {k: v for k, v in tensors.items() if k != name})
        for changed in (tensor.reshape(-1, 1, 1), tensor.astype(np.float32), tensor.astype(">f8"), tensor[:0]):
            with pytest.raises(FileError):
                decode(structure, {**tensors, name: changed})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.embed.weight.index", 3),
        ("layers.0.embed.weight.index", -1),
        ("layers.0.embed.weight.index", 2**31 - 1),
        ("layers.0.embed.weight.values", np.nan),
        ("layers.0.embed.weight.values", np.inf),
        ("layers.1.select.head0.W_K", -np.inf),
        ("layers.1.select.head0.mask.query_segments", 2**30),
        ("layers.1.select.head0.mask.query_segments", -2),
        ("layers.1.select.head0.mask.key_segments", -(2**63)),
    ],
)
def test_illegal_values_are_refused(name: str, value: float) -> None:
    program = example()
    structure, tensors = encode(program)
    damaged = tensors[name].copy()
    damaged[...] = value
    with pytest.raises(FileError, match="not legal"):
        decode(structure, {**tensors, name: damaged})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(programs(), st.data())
def test_any_damage_to_a_structure_is_a_file_error_or_harmless(program: Program, data: st.DataObject) -> None:
    structure, tensors = encode(program)
    structure = json.loads(json.dumps(structure))
    place: tuple[Any, ...] = ()
    inner: Any = structure
    while isinstance(inner, dict | list) and inner and (not place or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        place, inner = (*place, key), inner[key]
    changed = _with(structure, place, data.draw(JSON))
    try:
        decode(changed, tensors)
    except FileError:
        return
    assert layout(changed).keys() == tensors.keys()
