"""The rules that make a program legal. Every construction's output and every loaded file passes through `check`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.repeats import NUMBERED, PARTS, Part, Repeat
from attnc.ir.sparse import Sparse

DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
Shape = tuple[int, int]


def check(program: Program) -> Program:
    """Return the program, or raise ProgramError with the reason why it is not legal."""
    if not program.layers:
        raise ProgramError("a program needs at least one layer")
    if len(program.input_shapes) not in (1, 2) or not all(len(shape) in (1, 2) for shape in program.input_shapes):
        raise ProgramError(f"inputs are one or two of shape (d,) or (n, d); found {program.input_shapes}")
    if min([0, *program.output_shape, *(size for shape in program.input_shapes for size in shape)]) < 0:
        raise ProgramError(f"sizes are ≥ 0; found inputs {program.input_shapes}, output {program.output_shape}")
    for part in (*program.memory, *program.layers):
        for layer in _require_repeat(part) if isinstance(part, Repeat) else (part,):
            if not isinstance(layer, Layer):
                raise ProgramError(f"{type(layer).__name__} is not a layer: only Affine, Attention and Softmax are")
    for layers in (program.unrolled_memory, program.unrolled_layers):
        names = [layer.name for layer in layers]
        if len(set(names)) < len(names) or not all(names):
            raise ProgramError(f"layers need distinct names; found {names}")
    dtype, (main, second) = program.dtype, program.starts
    if dtype not in DTYPES:
        raise ProgramError(f"weights are float64 or float32; found {dtype}")
    memory = _check_stream(program.memory, second, None, dtype)
    if len(program.input_shapes) == 2 and not any(layer.cross for layer in program.unrolled_layers):
        raise ProgramError("the program takes a second input, but no layer looks at it (cross=True)")
    final = _check_stream(program.layers, main, memory, dtype)
    if math.prod(program.output_shape) != final[0] * final[1]:
        raise ProgramError(f"the last state has shape {final}, which is not the output shape {program.output_shape}")
    return program


def _require_repeat(repeat: Repeat) -> tuple[Layer, ...]:
    """Return the layers of the first turn if the other turns can be made from them."""
    what = f"a repeat of {len(repeat.layers)} layers"
    if not repeat.layers or repeat.count < 1:
        raise ProgramError(f"{what}, {repeat.count} times, has no turn with a layer")
    for layer in repeat.layers:
        if isinstance(layer, Layer) and repeat.count > 1 and NUMBERED.fullmatch(layer.name) is None:
            raise ProgramError(f"{what} has the name {layer.name!r} without a number at its end: turns would share it")
    for (place, part), varying in repeat.varying.items():
        varied = repeat.layers[place] if 0 <= place < len(repeat.layers) else None
        if not isinstance(varied, Affine) or part not in PARTS:
            raise ProgramError(f"{what} varies the {part} of layer {place}, which is no affine map")
        entries, values, stored = varying.entries, varying.values, getattr(varied, part).values
        is_ascending = (
            entries.ndim == 1 and np.issubdtype(entries.dtype, np.signedinteger) and (np.diff(entries) > 0).all()
        )
        if not is_ascending or (len(entries) and not 0 <= entries[0] <= entries[-1] < len(stored)):
            raise ProgramError(
                f"layer {varied.name!r} varies entries that its {part} does not have, or one of them twice"
            )
        if (
            values.shape != (repeat.count, len(entries))
            or values.dtype != stored.dtype
            or not np.isfinite(values).all()
        ):
            raise ProgramError(
                f"layer {varied.name!r} varies {len(entries)} entries of its {part} over {repeat.count} turns, and has "
                f"values of shape {values.shape} in {values.dtype}; they are finite and in {stored.dtype}"
            )
    return repeat.layers


def _check_stream(parts: Sequence[Part], shape: Shape, memory: Shape | None, dtype: np.dtype[np.floating]) -> Shape:
    """Return the shape of the state after the parts. The later turns of a repeat have the shapes of the first."""
    for part in parts:
        if not isinstance(part, Repeat):
            shape = _check_layers([part], shape, memory, dtype)
            continue
        after = _check_layers(part.layers, shape, memory, dtype)
        if part.count > 1 and after != shape:
            raise ProgramError(f"a turn of {part.layers[0].name!r} takes a state of shape {shape} and returns {after}")
        shape = after
    return shape


def _check_layers(layers: Sequence[Layer], shape: Shape, memory: Shape | None, dtype: np.dtype[np.floating]) -> Shape:
    for layer in layers:
        shape = _check_layer(layer, shape, memory, dtype)
        _require(len(set(layer.channels)) == len(layer.channels), layer, "has two channels of one name")
    return shape


def _require(holds: bool | np.bool_, layer: Layer, complaint: str) -> None:
    if not holds:
        raise ProgramError(f"layer {layer.name!r} {complaint}")


def _check_layer(layer: Layer, shape: Shape, memory: Shape | None, dtype: np.dtype[np.floating]) -> Shape:
    """Return the shape of the state after the layer."""
    if isinstance(layer, Attention):
        return _check_attention(layer, shape, memory, dtype)
    if isinstance(layer, Affine):
        _check_sparse(layer, "weight", layer.weight, 4, dtype)
        _check_sparse(layer, "constant", layer.constant, 2, dtype)
        taken, shape_out = layer.weight.shape[2:], layer.weight.shape[:2]
        _require(taken == shape, layer, f"takes (tokens, width) = {taken}, but is given {shape}")
        _require(layer.constant.shape == shape_out, layer, f"has a constant of shape {layer.constant.shape}")
        shape = (shape_out[0], shape_out[1])
    else:
        _require(shape[1] > 0, layer, "has no features: a softmax over nothing is not defined")
    _require(len(layer.channels) == shape[1], layer, f"names {len(layer.channels)} channels of {shape[1]}")
    return shape


def _check_sparse(layer: Affine, part: str, tensor: Sparse, rank: int, dtype: np.dtype[np.floating]) -> None:
    index, values = tensor.index, tensor.values
    _require(len(tensor.shape) == rank, layer, f"has a {part} of rank {len(tensor.shape)}, not {rank}")
    whole = min(tensor.shape) >= 0 and math.prod(tensor.shape) < 2**63
    _require(whole, layer, f"has a {part} of shape {tensor.shape}, which is negative or too large to number")
    fits = index.shape == (values.size, rank) and values.ndim == 1
    _require(fits, layer, f"has a {part} whose index and values do not match")
    _require(np.issubdtype(index.dtype, np.signedinteger), layer, f"has a {part} indexed by {index.dtype}")
    _require(values.dtype == dtype, layer, f"has a {part} in {values.dtype}, the program is in {dtype}")
    _require(np.isfinite(values).all(), layer, f"has a {part} with a value that is not finite")
    in_range = not len(index) or (index.min() >= 0 and (index.max(axis=0) < tensor.shape).all())
    _require(in_range, layer, f"has a {part} with an index outside its shape {tensor.shape}")
    flat = np.sort(tensor.flat(slice(None)))
    _require(not (flat[1:] == flat[:-1]).any(), layer, f"has a {part} that states one entry twice")


def _check_attention(layer: Attention, shape: Shape, memory: Shape | None, dtype: np.dtype[np.floating]) -> Shape:
    _require(bool(layer.heads), layer, "has no heads")
    _require(not layer.cross or memory is not None, layer, "is in the memory itself and cannot look at the memory")
    keyed = memory if layer.cross and memory is not None else shape
    _require(keyed[0] > 0, layer, "has no keys: a softmax over nothing is not defined")
    width_out = len(layer.channels)
    _require(not layer.residual or width_out == shape[1], layer, f"adds width {width_out} to a residual of {shape[1]}")
    for number, head in enumerate(layer.heads):
        for name, matrix in head.matrices.items():
            named = f"head {number}: {name}"
            _require(matrix.ndim == 2, layer, f"{named} is not a matrix")
            _require(matrix.dtype == dtype, layer, f"{named} is {matrix.dtype}, the program {dtype}")
            _require(np.isfinite(matrix).all(), layer, f"{named} has a value that is not finite")
        d_k, d_v = head.W_Q.shape[1], head.W_V.shape[1]
        wanted = ((shape[1], d_k), (keyed[1], d_k), (keyed[1], d_v), (d_v, width_out))
        for (name, matrix), size in zip(head.matrices.items(), wanted, strict=True):
            _require(
                matrix.shape == size, layer, f"head {number}: {name} has shape {matrix.shape}, the layer needs {size}"
            )
        _check_mask(layer, number, head, shape[0], keyed[0])
    return shape[0], width_out


def _check_mask(layer: Attention, number: int, head: Head, num_queries: int, num_keys: int) -> None:
    if head.mask is None:
        return
    both = head.mask.query_segments, head.mask.key_segments
    sizes = (both[0].shape, both[1].shape)
    there = f"the layer has {num_queries} queries, {num_keys} keys"
    _require(sizes == ((num_queries,), (num_keys,)), layer, f"head {number}: the mask is for {sizes}, {there}")
    for segments in both:
        _require(np.issubdtype(segments.dtype, np.signedinteger), layer, f"head {number}: segments are integers")
        _require((segments >= EVERY_QUERY).all(), layer, f"head {number}: segments are ≥ {EVERY_QUERY}")
    blind = np.flatnonzero(head.mask.num_visible() == 0)
    _require(not len(blind), layer, f"head {number}: queries {blind[:3].tolist()} see no key")
