"""A program as a JSON-able structure and named tensors, and back, bit for bit.

The same walk over the structure is used twice, so that both uses agree. `layout` lists the tensors that the structure
needs before any is loaded, and `decode` puts the loaded tensors in their places.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from attnc.errors import FileError, ProgramError
from attnc.exports.safe_files import MAX_RANK, MAX_STORED_ENTRIES, DType, Layout, require_expected
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask, Softmax
from attnc.ir.program import Program
from attnc.ir.repeats import NUMBERED, PARTS, Repeat, repeats
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check

T = TypeVar("T")
Take = Callable[[str, DType, tuple[int, ...]], np.ndarray]

FLOATS: dict[str, DType] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
INTEGERS: dict[str, DType] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
MATRICES = ("W_Q", "W_K", "W_V", "W_O")
SEGMENTS = ("query_segments", "key_segments")
MAX_LAYERS = 1_000_000
"""Maximum number of layers of a stream with runs, all turns counted. The deepest that are built have 60,000."""
MAX_SHAPE_CELLS = 2**62
"""Maximum number of cells of a shape. `ir.spec` computes positions in it, which must fit an int64."""


def encode(program: Program, *, repeated: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the structure and the tensors. These are the program's own arrays where those are contiguous.

    If `repeated`, a run of equal layers (`ir.repeats`) is written once, with the number of its turns.
    """
    tensors: dict[str, np.ndarray] = {}
    encode_stream = _encode_runs if repeated else _encode_stream
    structure = {
        "dtype": program.dtype.name,
        "input_shapes": [_ints(shape) for shape in program.input_shapes],
        "output_shape": _ints(program.output_shape),
        "layers": encode_stream("layers", program.layers, tensors),
        "memory": encode_stream("memory", program.memory, tensors),
    }
    for name, tensor in tensors.items():
        if tensor.dtype not in (*FLOATS.values(), *INTEGERS.values()):
            known = ", ".join([*FLOATS, *INTEGERS])
            raise FileError(f"cannot encode {name!r}: its dtype is {tensor.dtype}. A saved network holds {known}.")
    return structure, tensors


def layout(structure: Any, *, repeated: bool = False) -> Layout:
    """Return the dtype and shape of every tensor that the structure needs; raise FileError if it is malformed."""
    return _decoded(structure, {}, repeated)[1]


def decode(structure: Any, tensors: Mapping[str, np.ndarray], *, repeated: bool = False) -> Program:
    """Return the program, checked by `ir.spec`; raise FileError if it is not legal. `repeated` admits runs."""
    program, expected = _decoded(structure, _interned(tensors) if repeated else tensors, repeated)
    require_expected({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, expected)
    if program.dtype.name != structure["dtype"]:
        raise FileError(f"program.dtype is {structure['dtype']}, but the program is in {program.dtype}")
    try:
        return check(program)
    except ProgramError as error:
        raise FileError(f"the program that was read is not legal: {error}") from error


def _interned(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with one array for all that are equal. Engines compute shared parts once."""
    known: dict[tuple[str, tuple[int, ...], bytes], np.ndarray] = {}
    return {
        name: known.setdefault((str(tensor.dtype), tensor.shape, tensor.tobytes()), tensor)
        for name, tensor in tensors.items()
    }


def _decoded(structure: Any, tensors: Mapping[str, np.ndarray], repeated: bool) -> tuple[Program, Layout]:
    """Return the program and the layout of its tensors. A tensor that is not there is replaced by zeros."""
    expected: dict[str, tuple[DType, tuple[int, ...]]] = {}

    def take(name: str, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        expected[name] = (dtype, shape)
        return tensors[name] if name in tensors else np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory

    return _decode_program(structure, take, repeated), expected


def _ints(sizes: Sequence[int]) -> list[int]:
    return [int(size) for size in sizes]


def _encode_stream(stream: str, layers: Sequence[Layer], tensors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    return [_encode_layer(layer, f"{stream}.{i}.{layer.name}", tensors) for i, layer in enumerate(layers)]


def _encode_runs(stream: str, layers: Sequence[Layer], tensors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run in repeats(layers):
        prefix = f"{stream}.{len(found)}"
        if run.times == 1:
            found += [
                _encode_layer(layer, f"{stream}.{len(found) + i}.{layer.name}", tensors)
                for i, layer in enumerate(run.body)
            ]
            continue
        varying = []
        for (place, part), values in run.varying.items():
            tensors[f"{prefix}.turns.{place}.{part}"] = values
            varying.append({"layer": place, "part": part})
        body = _encode_stream(prefix, run.body, tensors)
        found.append({"kind": "repeat", "times": run.times, "layers": body, "varying": varying})
    return found


def _encode_layer(layer: Layer, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    channels = [a_text(channel, f"a channel of {prefix}") for channel in layer.channels]
    common = {"name": a_text(layer.name, "a layer's name"), "channels": channels}
    if isinstance(layer, Affine):
        weight = _encode_sparse(layer.weight, f"{prefix}.weight", tensors)
        constant = _encode_sparse(layer.constant, f"{prefix}.constant", tensors)
        return {"kind": "affine", **common, "weight": weight, "constant": constant}
    if isinstance(layer, Attention):
        heads = [_encode_head(head, f"{prefix}.head{h}", tensors) for h, head in enumerate(layer.heads)]
        flags = {"residual": bool(layer.residual), "cross": bool(layer.cross)}
        return {"kind": "attention", **common, **flags, "num_heads": len(heads), "heads": heads}
    return {"kind": "softmax", **common}


def _encode_sparse(sparse: Sparse, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    tensors[f"{prefix}.index"] = np.asarray(sparse.index, order="C")
    tensors[f"{prefix}.values"] = np.asarray(sparse.values, order="C")
    entries, dtype = len(sparse.values), sparse.index.dtype.name
    return {"shape": _ints(sparse.shape), "num_entries": entries, "index_dtype": dtype}


def _encode_head(head: Head, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    tensors |= {f"{prefix}.{name}": np.asarray(matrix, order="C") for name, matrix in head.matrices.items()}
    mask = None
    if head.mask is not None:
        mask = {}
        for name in SEGMENTS:
            segments = np.asarray(getattr(head.mask, name), order="C")
            tensors[f"{prefix}.mask.{name}"] = segments
            mask[name] = {"dtype": segments.dtype.name, "shape": list(segments.shape)}
    return {**{name: list(matrix.shape) for name, matrix in head.matrices.items()}, "mask": mask}


def _decode_program(structure: Any, take: Take, repeated: bool) -> Program:
    keys = ("dtype", "input_shapes", "output_shape", "layers", "memory")
    fields = object_with(structure, "program", keys)
    dtype = a_dtype(fields["dtype"], "program.dtype", FLOATS)
    shapes = enumerate(a_list(fields["input_shapes"], "program.input_shapes"))
    return Program(
        layers=_decode_stream("layers", fields["layers"], dtype, take, repeated),
        input_shapes=tuple(a_shape(shape, f"program.input_shapes[{i}]") for i, shape in shapes),
        output_shape=a_shape(fields["output_shape"], "program.output_shape"),
        memory=_decode_stream("memory", fields["memory"], dtype, take, repeated),
    )


def _decode_stream(stream: str, layers: Any, dtype: DType, take: Take, repeated: bool) -> tuple[Layer, ...]:
    found: list[Layer] = []
    for i, layer in enumerate(a_list(layers, f"program.{stream}")):
        prefix, where = f"{stream}.{i}", f"program.{stream}[{i}]"
        if repeated and isinstance(layer, dict) and layer.get("kind") == "repeat":
            found += _decode_run(layer, prefix, where, dtype, take, MAX_LAYERS - len(found))
        else:
            found.append(_decode_layer(layer, prefix, where, dtype, take))
    return tuple(found)


def _decode_run(run: Any, prefix: str, where: str, dtype: DType, take: Take, most: int) -> tuple[Layer, ...]:
    """Return the layers of all turns. They share the arrays that do not vary."""
    fields = object_with(run, where, ("kind", "times", "layers", "varying"))
    times, described = a_size(fields["times"], f"{where}.times"), a_list(fields["layers"], f"{where}.layers")
    if times < 1 or not described or times * len(described) > most:
        raise FileError(
            f"{where} is a run of {len(described)} layers, {times} times; a program has 1 to {MAX_LAYERS:,}"
        )
    body = tuple(
        _decode_layer(layer, f"{prefix}.{i}", f"{where}.layers[{i}]", dtype, take) for i, layer in enumerate(described)
    )
    if not all(NUMBERED.fullmatch(layer.name) for layer in body):
        raise FileError(f"{where}.layers have names without a number at the end, so that turns would share a name")
    varying = {}
    for i, one in enumerate(a_list(fields["varying"], f"{where}.varying")):
        place = f"{where}.varying[{i}]"
        of = object_with(one, place, ("layer", "part"))
        number, part = a_size(of["layer"], f"{place}.layer"), of["part"]
        layer = body[number] if number < len(body) else None
        if not isinstance(layer, Affine) or part not in PARTS or (number, part) in varying:
            raise FileError(f"{place} names no affine map of the run, or one part twice")
        shape = a_shape([times, len(getattr(layer, part).values)], place, MAX_STORED_ENTRIES)
        varying[number, part] = take(f"{prefix}.turns.{number}.{part}", dtype, shape)
    return Repeat(body, times, varying).layers


def _decode_layer(layer: Any, prefix: str, where: str, dtype: DType, take: Take) -> Layer:
    own = {
        "affine": ("weight", "constant"),
        "attention": ("residual", "cross", "num_heads", "heads"),
        "softmax": (),
    }
    kind = layer.get("kind") if isinstance(layer, dict) else None
    if not isinstance(kind, str) or kind not in own:
        raise FileError(f"{where}.kind is one of {', '.join(own)}; found {shown(kind)}")
    fields = object_with(layer, where, ("kind", "name", "channels", *own[kind]))
    name = a_text(fields["name"], f"{where}.name")
    described = enumerate(a_list(fields["channels"], f"{where}.channels"))
    channels = tuple(a_text(channel, f"{where}.channels[{i}]") for i, channel in described)
    prefix = f"{prefix}.{name}"
    if kind == "affine":
        weight = _decode_sparse(fields["weight"], f"{prefix}.weight", f"{where}.weight", dtype, take)
        constant = _decode_sparse(fields["constant"], f"{prefix}.constant", f"{where}.constant", dtype, take)
        return Affine(name, weight, constant, channels)
    if kind == "attention":
        heads = a_list(fields["heads"], f"{where}.heads")
        if a_size(fields["num_heads"], f"{where}.num_heads") != len(heads):
            raise FileError(f"{where}.num_heads is {shown(fields['num_heads'])}, but {len(heads)} are described")
        if not heads:
            raise FileError(f"{where}.heads is empty: attention needs at least one head")
        decoded = tuple(
            _decode_head(head, f"{prefix}.head{h}", f"{where}.heads[{h}]", dtype, take) for h, head in enumerate(heads)
        )
        residual = a_flag(fields["residual"], f"{where}.residual")
        return Attention(name, decoded, channels, residual, a_flag(fields["cross"], f"{where}.cross"))
    return Softmax(name, channels)


def _decode_sparse(sparse: Any, prefix: str, where: str, dtype: DType, take: Take) -> Sparse:
    fields = object_with(sparse, where, ("shape", "num_entries", "index_dtype"))
    shape = a_shape(fields["shape"], f"{where}.shape")
    entries = a_size(fields["num_entries"], f"{where}.num_entries")
    if entries > math.prod(shape):
        raise FileError(f"{where}.num_entries is {entries}, but a tensor of shape {shape} has {math.prod(shape)}")
    index_dtype = a_dtype(fields["index_dtype"], f"{where}.index_dtype", INTEGERS)
    index = take(f"{prefix}.index", index_dtype, a_shape([entries, len(shape)], where, MAX_STORED_ENTRIES))
    return Sparse(shape, index, take(f"{prefix}.values", dtype, (entries,)))


def _decode_head(head: Any, prefix: str, where: str, dtype: DType, take: Take) -> Head:
    fields = object_with(head, where, (*MATRICES, "mask"))
    shapes = {name: a_shape(fields[name], f"{where}.{name}", MAX_STORED_ENTRIES) for name in MATRICES}
    matrices = {name: take(f"{prefix}.{name}", dtype, shape) for name, shape in shapes.items()}
    mask = None if fields["mask"] is None else _decode_mask(fields["mask"], f"{prefix}.mask", f"{where}.mask", take)
    return Head(**matrices, mask=mask)


def _decode_mask(mask: Any, prefix: str, where: str, take: Take) -> Mask:
    fields = object_with(mask, where, SEGMENTS)
    segments = []
    for name in SEGMENTS:
        place = f"{where}.{name}"
        one = object_with(fields[name], place, ("dtype", "shape"))
        segments_dtype = a_dtype(one["dtype"], f"{place}.dtype", INTEGERS)
        shape = a_shape(one["shape"], f"{place}.shape", MAX_STORED_ENTRIES)
        if len(shape) != 1:
            raise FileError(f"{place}.shape has one axis; found {shape}")
        segments.append(take(f"{prefix}.{name}", segments_dtype, shape))
    return Mask(*segments)


def object_with(value: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return an object that has exactly these keys, or raise FileError."""
    a_typed(dict, "an object", value, where)
    for key in keys:
        if key not in value:
            raise FileError(f"{where} lacks the key {key!r}")
    if unknown := [key for key in value if key not in keys]:
        raise FileError(f"{where} has the key {shown(unknown[0])}, which is not known here; it has {', '.join(keys)}")
    fields: dict[str, Any] = value
    return fields


def a_list(value: Any, where: str) -> list[Any]:
    return a_typed(list, "a list", value, where)


def a_flag(value: Any, where: str) -> bool:
    return a_typed(bool, "true or false", value, where)


def a_typed(kind: type[T], named: str, value: Any, where: str) -> T:
    if not isinstance(value, kind):
        raise FileError(f"{where} is {named}; found {shown(value)}")
    return value


def a_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise FileError(f"{where} is a text; found {shown(value)}")
    return value


def a_size(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SHAPE_CELLS:
        raise FileError(f"{where} is a whole number from 0 to {MAX_SHAPE_CELLS}; found {shown(value)}")
    return value


def a_shape(value: Any, where: str, max_cells: int = MAX_SHAPE_CELLS) -> tuple[int, ...]:
    shape = tuple(a_size(size, f"{where}[{i}]") for i, size in enumerate(a_list(value, where)))
    if len(shape) > MAX_RANK or math.prod(max(1, size) for size in shape) > max_cells:
        raise FileError(f"{where} is too large: at most {MAX_RANK} axes and {max_cells} cells; found {shown(value)}")
    return shape


def a_dtype(value: Any, where: str, known: Mapping[str, DType]) -> DType:
    if not isinstance(value, str) or value not in known:
        raise FileError(f"{where} is one of {', '.join(known)}; found {shown(value)}")
    return known[value]


def shown(value: Any) -> str:
    """Return a short text for any value, for a message."""
    try:
        return ascii(value) if isinstance(value, str) and len(value) <= 60 else reprlib.repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} with a number of thousands of digits"
