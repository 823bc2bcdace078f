"""Programs as plain transformer blocks: the same function within rounding, or a reason why there is no such form."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.errors import InputError
from attnc.exports import residual_stream as module
from attnc.exports.residual_stream import ResidualStream, residual_stream
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program, split_columns
from attnc.ir.reference import softmax
from attnc.ir.rounding import evaluation_error
from exports.streams import CASES, compiled, points_of


def beyond_rounding(net: attnc.Network, stream: ResidualStream) -> np.ndarray:
    """The difference from the reference as a share of the one that rounding allows, at some points."""
    flat = points_of(net)
    inputs = split_columns(flat, net.program.input_shapes)
    reference = net.program(*inputs)
    allowed = 2 * evaluation_error(net.program, inputs)
    return np.abs(stream(flat).reshape(reference.shape) - reference) / allowed


@pytest.mark.parametrize("name", CASES)
def test_blocks_compute_the_program_within_rounding(name: str) -> None:
    net = compiled(name)
    stream = residual_stream(net.program, net.variables)
    assert beyond_rounding(net, stream).max() <= 1


def test_a_sequence_of_tokens() -> None:
    target = attnc.SequenceTarget(lambda X: X[:, ::-1] / 2, tokens=2, width=1, box=(-1, 1), lipschitz=1.0)
    net = attnc.compile(target, eps=0.5)
    assert beyond_rounding(net, residual_stream(net.program, net.variables)).max() <= 1


def test_a_changed_key_shows() -> None:
    net = compiled("one stage")
    stream = residual_stream(net.program, net.variables)
    stream.embedding[3, stream.channels.index("attend1.head0.value0")] *= 1 + 1e-9
    assert beyond_rounding(net, stream).max() > 1


def test_idle_positions_rest_with_all_their_weight() -> None:
    """The query position sees the keys of each head and nothing else, and the others see `rest` alone or copy."""
    net = compiled("values that carry heads")
    stream = residual_stream(net.program, net.variables)
    state = stream.embed(points_of(net))
    num_keys = {head.name: len(set(np.flatnonzero(state[0] @ head.W_V)) | {0}) for head in stream.blocks[0].heads}
    assert len(num_keys) == 2
    for block in stream.blocks:
        out = state.copy()
        for head in block.heads:
            pattern = softmax((state @ head.W_Q + head.b_Q) @ (state @ head.W_K).transpose(0, 2, 1))
            others = pattern[:, :-1]
            assert (np.isin(others, (0, 1))).all(), "weights of idle positions are exact"
            assert (pattern[:, -1, -1] == 0).all(), "the query position is no key"
            if block.name.endswith(".copy"):
                assert (pattern[:, -1, 0] == 1).all()
                assert (others[:, :, -1] == 1).any(), "some position copies"
            else:
                assert (others[:, :, 0] == 1).all()
                assert (pattern[:, -1, 0] == 0).all()
            out += pattern @ (state @ head.W_V) @ head.W_O
        moved = np.abs(out - state)[:, :-1, : len(net.variables) + 1]
        assert (moved == 0).all(), "only the query position has variables"
        state = out


def test_channels_have_the_names_of_their_expressions() -> None:
    net = compiled("values that carry heads")
    stream = residual_stream(net.program, net.variables, net._meanings(), net._output_texts())
    assert stream.channels[:6] == ("1", "x", "y", "exp(y)", "sin(x)", "tanh(sin(x) + y)*exp(y)")
    flat = points_of(net)
    state = stream.embed(flat)
    for block in stream.blocks:
        pattern = [softmax((state @ h.W_Q + h.b_Q) @ (state @ h.W_K).transpose(0, 2, 1)) for h in block.heads]
        state = state + sum(p @ (state @ h.W_V) @ h.W_O for p, h in zip(pattern, block.heads, strict=True))
    x, y = flat.T
    wanted = np.stack([np.ones_like(x), x, y, np.exp(y), np.sin(x), np.tanh(np.sin(x) + y) * np.exp(y)], axis=1)
    assert np.abs(state[:, -1, :6] - wanted).max() <= 1e-4
    assert (state[:, -1, :3] == wanted[:, :3]).all()


def test_scores_of_two_moving_quantities_are_refused() -> None:
    one = np.ones((1, 1))
    program = Program((Attention("mix", (Head(one, one, one, one),), ("z",)),), ((2, 1),), (2, 1))
    with pytest.raises(InputError, match=r"layer mix multiplies queries and keys that both depend on the input"):
        residual_stream(program)


def test_too_many_keys_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net = compiled("max_affine")
    monkeypatch.setattr(module, "MAX_STREAM_BYTES", 2**10)
    with pytest.raises(InputError, match=r"up to \d+ keys and 1 heads per layer.* attention maps .* MiB"):
        residual_stream(net.program)
