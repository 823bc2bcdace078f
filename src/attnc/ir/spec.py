"""What a legal program is. Every construction's output and every loaded file passes through `check`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.shapes import main_start, memory_start
from attnc.ir.sparse import Sparse

DTYPES = (np.dtype(np.float64), np.dtype(np.float32))


def check(program: Program) -> Program:
    """Returns the program, or raises ProgramError with the reason why it is none."""
    if not program.layers:
        raise ProgramError("a program needs at least one layer")
    if len(program.input_shapes) not in (1, 2) or not all(len(shape) in (1, 2) for shape in program.input_shapes):
        raise ProgramError(f"inputs are one or two of shape (d,) or (n, d); found {program.input_shapes}")
    if min([0, *program.output_shape, *(size for shape in program.input_shapes for size in shape)]) < 0:
        raise ProgramError(f"sizes are ≥ 0; found inputs {program.input_shapes}, output {program.output_shape}")
    _check_names(program)
    dtype = program.dtype
    if dtype not in DTYPES:
        raise ProgramError(f"weights are float64 or float32; found {dtype}")
    memory = _check_stream(program.memory, memory_start(program), None, dtype)
    if len(program.input_shapes) == 2 and not any(_is_cross(layer) for layer in program.layers):
        raise ProgramError("the program takes a second input, but no layer looks at it (cross=True)")
    final = _check_stream(program.layers, main_start(program), memory, dtype)
    if math.prod(program.output_shape) != final[0] * final[1]:
        raise ProgramError(f"the last state has shape {final}, which is not the output shape {program.output_shape}")
    return program


def _is_cross(layer: Layer) -> bool:
    return isinstance(layer, Attention) and layer.cross


def _check_names(program: Program) -> None:
    for layer in program.all_layers:
        if not isinstance(layer, Layer):
            raise ProgramError(f"{type(layer).__name__} is not a layer: only Affine, Attention and Softmax are")
    for layers in (program.memory, program.layers):
        names = [layer.name for layer in layers]
        if len(set(names)) < len(names) or not all(names):
            raise ProgramError(f"layers need distinct names; found {names}")


def _check_stream(
    layers: Sequence[Layer], shape: tuple[int, int], memory: tuple[int, int] | None, dtype: np.dtype[np.floating]
) -> tuple[int, int]:
    checked: dict[tuple[object, ...], tuple[int, int]] = {}  # steps of a loop share their arrays: once is enough
    for layer in layers:
        if isinstance(layer, Affine | Attention):
            parts = (layer.weight, layer.constant) if isinstance(layer, Affine) else (layer.heads, layer.residual)
            key = (*map(id, parts), shape, getattr(layer, "cross", False), len(layer.channels))
            if key not in checked:
                checked[key] = (
                    _check_affine(layer, shape, dtype)
                    if isinstance(layer, Affine)
                    else _check_attention(layer, shape, memory, dtype)
                )
            shape = checked[key]
        else:
            _require(len(layer.channels) == shape[1], layer, f"names {len(layer.channels)} channels of {shape[1]}")
            _require(shape[1] > 0, layer, "has no features: a softmax over nothing is not defined")
        _require(len(set(layer.channels)) == len(layer.channels), layer, "has two channels of one name")
    return shape


def _require(holds: bool, layer: Layer, complaint: str) -> None:
    if not holds:
        raise ProgramError(f"layer {layer.name!r} {complaint}")


def _check_affine(layer: Affine, shape: tuple[int, int], dtype: np.dtype[np.floating]) -> tuple[int, int]:
    _check_sparse(layer, "weight", layer.weight, 4, dtype)
    _check_sparse(layer, "constant", layer.constant, 2, dtype)
    tokens, width, *taken = layer.weight.shape
    _require(tuple(taken) == shape, layer, f"takes (tokens, width) = {tuple(taken)}, but is given {shape}")
    _require(layer.constant.shape == (tokens, width), layer, f"has a constant of shape {layer.constant.shape}")
    _require(len(layer.channels) == width, layer, f"names {len(layer.channels)} channels of {width}")
    return tokens, width


def _check_sparse(layer: Affine, part: str, tensor: Sparse, rank: int, dtype: np.dtype[np.floating]) -> None:
    index, values = tensor.index, tensor.values
    _require(len(tensor.shape) == rank, layer, f"has a {part} of rank {len(tensor.shape)}, not {rank}")
    whole = min(tensor.shape) >= 0 and math.prod(tensor.shape) < 2**63
    _require(whole, layer, f"has a {part} of shape {tensor.shape}, which is negative or too large to number")
    _require(
        index.shape == (values.size, rank) and values.ndim == 1,
        layer,
        f"has a {part} whose index and values do not match",
    )
    _require(np.issubdtype(index.dtype, np.signedinteger), layer, f"has a {part} indexed by {index.dtype}")
    _require(values.dtype == dtype, layer, f"has a {part} in {values.dtype}, the program is in {dtype}")
    _require(bool(np.isfinite(values).all()), layer, f"has a {part} with a value that is not finite")
    in_range = not len(index) or (index.min() >= 0 and (index.max(axis=0) < tensor.shape).all())
    _require(bool(in_range), layer, f"has a {part} with an index outside its shape {tensor.shape}")
    flat = np.sort(tensor.flat(slice(None)))
    _require(not (flat[1:] == flat[:-1]).any(), layer, f"has a {part} that states one entry twice")


def _check_attention(
    layer: Attention, shape: tuple[int, int], memory: tuple[int, int] | None, dtype: np.dtype[np.floating]
) -> tuple[int, int]:
    _require(bool(layer.heads), layer, "has no heads")
    _require(not layer.cross or memory is not None, layer, "is in the memory itself and cannot look at the memory")
    keyed = memory if layer.cross and memory is not None else shape
    _require(keyed[0] > 0, layer, "has no keys: a softmax over nothing is not defined")
    width_out = len(layer.channels)
    _require(not layer.residual or width_out == shape[1], layer, f"adds width {width_out} to a residual of {shape[1]}")
    for number, head in enumerate(layer.heads):
        _check_head(layer, number, head, shape, keyed, width_out, dtype)
    return shape[0], width_out


def _check_head(
    layer: Attention,
    number: int,
    head: Head,
    shape: tuple[int, int],
    keyed: tuple[int, int],
    width_out: int,
    dtype: np.dtype[np.floating],
) -> None:
    matrices = {"W_Q": head.W_Q, "W_K": head.W_K, "W_V": head.W_V, "W_O": head.W_O}
    for name, matrix in matrices.items():
        _require(matrix.ndim == 2, layer, f"head {number}: {name} is not a matrix")
        _require(matrix.dtype == dtype, layer, f"head {number}: {name} is {matrix.dtype}, the program {dtype}")
        _require(bool(np.isfinite(matrix).all()), layer, f"head {number}: {name} has a value that is not finite")
    d_k, d_v = head.W_Q.shape[1], head.W_V.shape[1]
    wanted = {"W_Q": (shape[1], d_k), "W_K": (keyed[1], d_k), "W_V": (keyed[1], d_v), "W_O": (d_v, width_out)}
    for name, size in wanted.items():
        found = matrices[name].shape
        _require(found == size, layer, f"head {number}: {name} has shape {found}, the layer needs {size}")
    if head.mask is not None:
        sizes = (head.mask.query_segments.shape, head.mask.key_segments.shape)
        fits = sizes == ((shape[0],), (keyed[0],))
        _require(
            fits, layer, f"head {number}: the mask is for {sizes}, the layer has {shape[0]} queries, {keyed[0]} keys"
        )
        for segments in (head.mask.query_segments, head.mask.key_segments):
            _require(np.issubdtype(segments.dtype, np.signedinteger), layer, f"head {number}: segments are integers")
            _require(bool((segments >= EVERY_QUERY).all()), layer, f"head {number}: segments are ≥ {EVERY_QUERY}")
        blind = np.flatnonzero(head.mask.num_visible() == 0)
        _require(not len(blind), layer, f"head {number}: queries {blind[:3].tolist()} see no key")
