"""Every rule of the spec refuses its violations, in words that name the layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnc.errors import ProgramError
from attnc.ir import Affine, Attention, Head, Mask, Program, Softmax
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check

F8 = np.float64
EMBED = Affine("embed", Sparse.from_dense(np.ones((3, 2, 1, 2))), Sparse.from_dense(np.ones((3, 2))), ("a", "b"))
HEAD = Head(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)), np.ones((1, 2)))
SELECT = Attention("select", (HEAD,), ("c", "d"))
SMOOTH = Softmax("smooth", ("e", "f"))
LEGAL = Program((EMBED, SELECT, SMOOTH), ((2,),), (3, 2))
MEMORY = Affine("grid", Sparse.zeros((4, 2, 0, 0), F8), Sparse.from_dense(np.ones((4, 2))), ("g", "h"))
CROSS = replace(LEGAL, layers=(EMBED, replace(SELECT, cross=True), SMOOTH), memory=(MEMORY,))


def with_embed(**changes) -> Program:
    return replace(LEGAL, layers=(replace(EMBED, **changes), SELECT, SMOOTH))


def with_select(**changes) -> Program:
    return replace(LEGAL, layers=(EMBED, replace(SELECT, **changes), SMOOTH))


def with_head(**changes) -> Program:
    return with_select(heads=(HEAD, replace(HEAD, **changes)))


def with_mask(queries, keys) -> Program:
    return with_head(mask=Mask(np.asarray(queries), np.asarray(keys)))


def changed(array: np.ndarray, where, value) -> np.ndarray:
    array = array.copy()
    array[where] = value
    return array


def test_legal_programs_pass():
    assert check(LEGAL) is LEGAL
    assert check(CROSS) is CROSS
    two_inputs = replace(CROSS, input_shapes=((2,), (4, 2)), memory=())
    assert check(two_inputs) is two_inputs
    assert check(with_mask([0, 1, 2], [0, EVERY_QUERY, 1]))
    assert check(replace(LEGAL, output_shape=(6,)))
    assert check(with_head(W_V=np.ones((2, 5)), W_O=np.ones((5, 2))))


W, B = EMBED.weight, EMBED.constant
NO_TOKENS = {"weight": Sparse.zeros((0, 2, 1, 2), F8), "constant": Sparse.zeros((0, 2), F8)}
REFUSED = {
    "": [
        (replace(LEGAL, layers=()), "at least one layer"),
        (replace(LEGAL, input_shapes=()), "one or two"),
        (replace(LEGAL, input_shapes=((2,),) * 3), "one or two"),
        (replace(LEGAL, input_shapes=((1, 1, 2),)), "one or two"),
        (replace(LEGAL, input_shapes=((),)), "one or two"),
        (replace(LEGAL, input_shapes=((-2,),)), "≥ 0"),
        (replace(LEGAL, output_shape=(-3, -2)), "≥ 0"),
        (replace(LEGAL, output_shape=(5,)), "last state"),
        (replace(LEGAL, output_shape=()), "last state"),
        (replace(LEGAL, layers=(EMBED, SELECT, replace(SMOOTH, name="select"))), "distinct names.*select"),
        (replace(LEGAL, layers=(EMBED, SELECT, replace(SMOOTH, name=""))), "distinct names"),
        (replace(CROSS, memory=(MEMORY, replace(SMOOTH, name="grid"))), "distinct names.*grid"),
        (replace(LEGAL, layers=(EMBED, "select")), "str is not a layer"),
        (replace(LEGAL, input_shapes=((2,), (4, 2))), "second input, but no layer"),
        (with_embed(weight=EMBED.weight.astype(np.float16)), "float64 or float32; found float16"),
    ],
    "layer 'embed' .*": [
        (with_embed(weight=Sparse.zeros((3, 2, 2), F8)), "weight of rank 3"),
        (with_embed(constant=Sparse.zeros((3,), F8)), "constant of rank 1"),
        (with_embed(weight=Sparse.zeros((3, 2, 1, 3), F8)), r"takes .*\(1, 3\), but is given \(1, 2\)"),
        (with_embed(weight=Sparse.zeros((3, 2, 2, 2), F8)), r"takes .*\(2, 2\)"),
        (with_embed(weight=Sparse.zeros((-3, 2, 1, 2), F8)), "negative or too large"),
        (with_embed(weight=Sparse.zeros((2**40, 2, 2**40, 2), F8)), "negative or too large"),
        (with_embed(constant=Sparse.zeros((2, 2), F8)), "constant of shape"),
        (with_embed(channels=("a",)), "names 1 channels of 2"),
        (with_embed(channels=("a", "a")), "two channels of one name"),
        (with_embed(weight=replace(W, index=W.index[:-1])), "do not match"),
        (with_embed(weight=replace(W, values=W.values[:, None])), "do not match"),
        (with_embed(weight=replace(W, index=W.index.astype(F8))), "indexed by float64"),
        (with_embed(weight=replace(W, index=W.index.astype(np.uint32))), "indexed by uint32"),
        (with_embed(constant=B.astype(np.float32)), "constant in float32, the program is in float64"),
        (with_embed(weight=replace(W, values=changed(W.values, 0, np.nan))), "not finite"),
        (with_embed(constant=replace(B, values=changed(B.values, 2, np.inf))), "not finite"),
        (with_embed(weight=replace(W, index=changed(W.index, (0, 2), 1))), "outside its shape"),
        (with_embed(weight=replace(W, index=changed(W.index, (0, 0), -1))), "outside its shape"),
        (with_embed(constant=replace(B, index=changed(B.index, 1, B.index[0]))), "states one entry twice"),
        (with_embed(weight=replace(W, index=changed(W.index, 1, W.index[5]))), "states one entry twice"),
        (with_embed(weight=Sparse.zeros((0, 2, 1, 2), F8)), "has a constant"),
    ],
    "layer 'select' .*": [
        (with_select(heads=()), "has no heads"),
        (replace(LEGAL, layers=(replace(SELECT, heads=()), SMOOTH)), "has no heads"),
        (with_select(channels=("c", "c")), "two channels of one name"),
        (with_select(cross=True), "has no keys"),
        (with_select(residual=True, channels=("c", "d", "e")), "adds width 3 to a residual of 2"),
        (with_head(W_Q=np.ones(2)), "head 1: W_Q is not a matrix"),
        (with_head(W_V=np.ones((2, 1), np.float32)), "head 1: W_V is float32"),
        (with_head(W_O=np.full((1, 2), np.nan)), "head 1: W_O has a value that is not finite"),
        (with_head(W_Q=np.ones((3, 1))), r"head 1: W_Q has shape \(3, 1\), the layer needs \(2, 1\)"),
        (with_head(W_K=np.ones((2, 2))), "head 1: W_K has shape"),
        (with_head(W_V=np.ones((3, 1))), "head 1: W_V has shape"),
        (with_head(W_O=np.ones((2, 2))), "head 1: W_O has shape"),
        (with_head(W_O=np.ones((1, 3))), "head 1: W_O has shape"),
        (with_mask([0, 0], [0, 0, 0]), "head 1: the mask is for"),
        (with_mask([0, 0, 0], [0, 0]), "head 1: the mask is for"),
        (with_mask([[0] * 3] * 3, 0), "head 1: the mask is for"),
        (with_mask([0.0] * 3, [0, 0, 0]), "head 1: segments are integers"),
        (with_mask([0] * 3, np.zeros(3, np.uint8)), "head 1: segments are integers"),
        (with_mask([0, 0, -2], [-1, -1, -1]), "head 1: segments are ≥ -1"),
        (with_mask([0, 1, 2], [0, 1, 1]), r"head 1: queries \[2\] see no key"),
        (with_mask([0, EVERY_QUERY, 0], [0, 0, 0]), r"head 1: queries \[1\] see no key"),
        (with_embed(**NO_TOKENS), "has no keys"),
        (
            replace(CROSS, layers=(EMBED, replace(SELECT, cross=True, heads=(replace(HEAD, W_K=np.ones((3, 1))),)))),
            r"head 0: W_K has shape \(3, 1\), the layer needs \(2, 1\)",
        ),
    ],
    "layer 'smooth' .*": [
        (replace(LEGAL, layers=(EMBED, replace(SMOOTH, channels=("e",)))), "names 1 channels of 2"),
        (
            replace(LEGAL, layers=(replace(SMOOTH, channels=()),), input_shapes=((0,),), output_shape=(0,)),
            "has no features",
        ),
    ],
    "layer 'inner' .*": [(replace(CROSS, memory=(MEMORY, replace(SELECT, name="inner", cross=True))), "memory itself")],
    "layer 'grid' .*": [(replace(CROSS, memory=(replace(MEMORY, channels=("g",)),)), "names 1 channels of 2")],
}


@pytest.mark.parametrize(
    ("program", "message"),
    [(program, layer + message) for layer, rows in REFUSED.items() for program, message in rows],
)
def test_a_program_is_refused(program, message):
    with pytest.raises(ProgramError, match=message):
        check(program)
