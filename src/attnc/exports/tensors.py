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
from attnc.ir.repeats import Part, Repeat, Varying
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check

T = TypeVar("T")
Take = Callable[[str, DType, tuple[int, ...]], np.ndarray]

FLOATS: dict[str, DType] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
INTEGERS: dict[str, DType] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
MATRICES = ("W_Q", "W_K", "W_V", "W_O")
SEGMENTS = ("query_segments", "key_segments")
MAX_LAYERS = 1_000_000
"""Maximum number of layers of a stream, all turns of repeats counted. The deepest that are built have 60,000."""
MAX_SHAPE_CELLS = 2**62
"""Maximum number of cells of a shape. `ir.spec` computes positions in it, which must fit an int64."""


def encode(program: Program) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the structure and the tensors. These are the program's own arrays where those are contiguous."""
    tensors: dict[str, np.ndarray] = {}
    structure = {
        "dtype": program.dtype.name,
        "input_shapes": [_ints(shape) for shape in program.input_shapes],
        "output_shape": _ints(program.output_shape),
        "layers": _encode_stream("layers", program.layers, tensors),
        "memory": _encode_stream("memory", program.memory, tensors),
    }
    for name, tensor in tensors.items():
        if tensor.dtype not in (*FLOATS.values(), *INTEGERS.values()):
            known = ", ".join([*FLOATS, *INTEGERS])
            raise FileError(f"cannot encode {name!r}: its dtype is {tensor.dtype}. A saved network holds {known}.")
    return structure, tensors


def layout(structure: Any) -> Layout:
    """Return the dtype and shape of every tensor that the structure needs; raise FileError if it is malformed."""
    return _decoded(structure, {})[1]


def decode(structure: Any, tensors: Mapping[str, np.ndarray]) -> Program:
    """Return the program, checked by `ir.spec`; raise FileError if it is not legal."""
    program, expected = _decoded(structure, tensors)
    require_expected({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, expected)
    try:
        check(program)
    except ProgramError as error:
        raise FileError(f"the program that was read is not legal: {error}") from error
    if program.dtype.name != structure["dtype"]:
        raise FileError(f"program.dtype is {structure['dtype']}, but the program is in {program.dtype}")
    return program


def stored_once(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors without those that equal an earlier one, and for each of these the name of the earlier one."""
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    same = {}
    for name, tensor in tensors.items():
        earlier = first.setdefault((str(tensor.dtype), tensor.shape, tensor.tobytes()), name)
        if earlier != name:
            same[name] = earlier
    return {name: tensor for name, tensor in tensors.items() if name not in same}, same


def require_same(same: Any, expected: Layout) -> dict[str, str]:
    """Return the names that `stored_once` found, read from a file, if each stands for a tensor of its own layout."""
    names: dict[str, str] = a_typed(dict, "an object", same, "same")
    for name, earlier in names.items():
        a_text(earlier, f"same[{shown(name)}]")
        if earlier in names or expected.get(name) is None or expected[name] != expected.get(earlier):
            raise FileError(f"same names {shown(name)} and {shown(earlier)}, which are no two tensors of one layout")
    return names


def _decoded(structure: Any, tensors: Mapping[str, np.ndarray]) -> tuple[Program, Layout]:
    """Return the program and the layout of its tensors. A tensor that is not there is replaced by zeros."""
    expected: dict[str, tuple[DType, tuple[int, ...]]] = {}

    def take(name: str, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        expected[name] = (dtype, shape)
        return tensors[name] if name in tensors else np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory

    return _decode_program(structure, take), expected


def _ints(sizes: Sequence[int]) -> list[int]:
    return [int(size) for size in sizes]


def _encode_stream(stream: str, parts: Sequence[Part], tensors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        _encode_repeat(part, f"{stream}.{i}", tensors)
        if isinstance(part, Repeat)
        else _encode_layer(part, f"{stream}.{i}.{part.name}", tensors)
        for i, part in enumerate(parts)
    ]


def _encode_repeat(repeat: Repeat, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write the layers of one turn, the number of turns, and the values that vary."""
    varying = []
    for (place, part), differ in repeat.varying.items():
        name = f"{prefix}.turns.{place}.{part}"
        tensors[f"{name}.entries"] = np.asarray(differ.entries, order="C")
        tensors[f"{name}.values"] = np.asarray(differ.values, order="C")
        dtype = differ.entries.dtype.name
        varying.append({"layer": place, "part": part, "num_entries": len(differ.entries), "index_dtype": dtype})
    layers = [_encode_layer(layer, f"{prefix}.{i}.{layer.name}", tensors) for i, layer in enumerate(repeat.layers)]
    return {"kind": "repeat", "count": int(repeat.count), "layers": layers, "varying": varying}


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


def _decode_program(structure: Any, take: Take) -> Program:
    keys = ("dtype", "input_shapes", "output_shape", "layers", "memory")
    fields = object_with(structure, "program", keys)
    dtype = a_dtype(fields["dtype"], "program.dtype", FLOATS)
    shapes = enumerate(a_list(fields["input_shapes"], "program.input_shapes"))
    return Program(
        layers=_decode_stream("layers", fields["layers"], dtype, take),
        input_shapes=tuple(a_shape(shape, f"program.input_shapes[{i}]") for i, shape in shapes),
        output_shape=a_shape(fields["output_shape"], "program.output_shape"),
        memory=_decode_stream("memory", fields["memory"], dtype, take),
    )


def _decode_stream(stream: str, parts: Any, dtype: DType, take: Take) -> tuple[Part, ...]:
    found: list[Part] = []
    room = MAX_LAYERS
    for i, part in enumerate(a_list(parts, f"program.{stream}")):
        prefix, where = f"{stream}.{i}", f"program.{stream}[{i}]"
        if isinstance(part, dict) and part.get("kind") == "repeat":
            repeat = _decode_repeat(part, prefix, where, dtype, take)
            room -= repeat.count * len(repeat.layers)
            if room < 0:
                raise FileError(f"{where} has {repeat.count:,} turns; a program has at most {MAX_LAYERS:,} layers")
            found.append(repeat)
        else:
            found.append(_decode_layer(part, prefix, where, dtype, take))
    return tuple(found)


def _decode_repeat(repeat: Any, prefix: str, where: str, dtype: DType, take: Take) -> Repeat:
    fields = object_with(repeat, where, ("kind", "count", "layers", "varying"))
    count, layers = a_size(fields["count"], f"{where}.count"), a_list(fields["layers"], f"{where}.layers")
    body = tuple(
        _decode_layer(layer, f"{prefix}.{i}", f"{where}.layers[{i}]", dtype, take) for i, layer in enumerate(layers)
    )
    varying: dict[tuple[int, str], Varying] = {}
    for i, one in enumerate(a_list(fields["varying"], f"{where}.varying")):
        place = f"{where}.varying[{i}]"
        of = object_with(one, place, ("layer", "part", "num_entries", "index_dtype"))
        number, part = a_size(of["layer"], f"{place}.layer"), a_text(of["part"], f"{place}.part")
        if (number, part) in varying:
            raise FileError(f"{place} names the {part} of layer {number} a second time")
        shape = a_shape([count, a_size(of["num_entries"], f"{place}.num_entries")], place, MAX_STORED_ENTRIES)
        index_dtype = a_dtype(of["index_dtype"], f"{place}.index_dtype", INTEGERS)
        name = f"{prefix}.turns.{number}.{part}"
        entries = take(f"{name}.entries", index_dtype, shape[1:])
        varying[number, part] = Varying(entries, take(f"{name}.values", dtype, shape))
    return Repeat(body, count, varying)


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
