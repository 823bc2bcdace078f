"""A program as a model of TransformerLens: a native `TransformerBridge` with attention alone.

The blocks are those of `attnc.exports.residual_stream`. TransformerLens divides scores by a scale. It is 2 here, and
W_Q is doubled, which changes no bit. Its positional embedding is zero, and there is no norm.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnc.errors import MissingExtra
from attnc.exports.residual_stream import ResidualStream, StreamHead
from attnc.ir.program import require_shapes

try:
    import torch

    with warnings.catch_warnings():  # some of its dependencies use deprecated names
        warnings.simplefilter("ignore")
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge
except ImportError as error:
    raise MissingExtra("to_transformer_lens needs", "transformer-lens", "lens", error) from error

SCALE = 2.0
"""The number by which scores are divided. TransformerLens refuses 1, and 2 is exact."""

CELLS_PER_RUN = 2**22
"""Number of array cells of the points that are compared with the reference at once: 32 MiB of float64."""


def to_transformer_lens(stream: ResidualStream, input_shapes: Sequence[tuple[int, ...]], dtype: str) -> Any:
    """Return the model. `model(model.embed_points(points))[:, -1]` has the outputs.

    It has these further attributes: `embed_points`, `residual_labels`, `position_labels`, `head_labels`.
    """
    numbers = getattr(torch, dtype)
    config = TransformerBridgeConfig(
        d_model=len(stream.channels),
        d_head=stream.d_head,
        n_layers=max(1, len(stream.blocks)),
        n_heads=stream.num_heads,
        n_ctx=len(stream.positions),
        d_vocab=len(stream.positions),
        d_vocab_out=stream.unembed.shape[1],
        d_mlp=1,
        act_fn="relu",
        attn_only=True,
        attn_scale=SCALE,
        attention_dir="bidirectional",
        normalization_type=None,
        init_weights=False,
        dtype=numbers,
        model_name="attnc",
    )
    model: Any = TransformerBridge.boot_native(config, dtype=numbers, model_name="attnc")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_().requires_grad_(False)
        native = model.original_model
        _set(native.tok_embed, stream.embedding)
        _set(native.head, stream.unembed.T)
        for number, block in enumerate(stream.blocks):
            _set_heads(native.layers[number].attn, block.heads, config.n_heads, config.d_head)
    model.eval()
    entering = torch.tensor(stream.entering.toarray().T.reshape(-1, *stream.embedding.shape))
    embedding = torch.tensor(stream.embedding)

    def embed_points(*inputs: Any) -> Any:
        """Return the tensor (batch, positions, d_model) that the model takes for these points."""
        given = [torch.as_tensor(np.asarray(each) if isinstance(each, list) else each) for each in inputs]
        require_shapes("model", input_shapes, given)
        flat = torch.cat([each.to(numbers).flatten(1) for each in given], dim=1)
        return embedding + torch.einsum("bi,ipc->bpc", flat, entering)

    model.embed_points = embed_points
    model.residual_labels = stream.channels
    model.position_labels = stream.positions
    model.head_labels = tuple(tuple(head.name for head in block.heads) for block in stream.blocks)
    return model


def run_points(model: Any, inputs: Sequence[np.ndarray], output_shape: tuple[int, ...]) -> np.ndarray:
    """Return the outputs at some points, a few at a time."""
    config = model.cfg
    cells = config.n_heads * config.n_ctx**2 + 4 * config.n_ctx * config.d_model
    step = max(1, CELLS_PER_RUN // cells)
    with torch.no_grad():
        found = [
            model(model.embed_points(*(given[i : i + step] for given in inputs)))[:, -1].numpy()
            for i in range(0, len(inputs[0]), step)
        ]
    return np.concatenate(found).reshape(len(inputs[0]), *output_shape)


def _set(component: Any, weight: np.ndarray) -> None:
    _weight(component).copy_(torch.tensor(weight))


def _weight(component: Any) -> Any:
    return getattr(component, "original_component", component).weight


def _bias(component: Any) -> Any:
    return getattr(component, "original_component", component).bias


def _set_heads(attention: Any, heads: Sequence[StreamHead], num_heads: int, d_head: int) -> None:
    """Fill the projections. Heads that a block does not have stay zero, and write nothing."""
    attention = getattr(attention, "original_component", attention)
    for number, head in enumerate(heads):
        start = number * d_head
        d_k, d_v = head.W_Q.shape[1], head.W_V.shape[1]
        _weight(attention.q)[start : start + d_k] = torch.tensor(SCALE * head.W_Q.T)
        _bias(attention.q)[start : start + d_k] = torch.tensor(SCALE * head.b_Q)
        _weight(attention.k)[start : start + d_k] = torch.tensor(head.W_K.T)
        _weight(attention.v)[start : start + d_v] = torch.tensor(head.W_V.T)
        _weight(attention.o)[:, start : start + d_v] = torch.tensor(head.W_O.T)
