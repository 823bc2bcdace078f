"""The stored program as it is read: layers and weights, with every shape checked. Unknown fields are refused: they
might matter."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from flint import fmpq

from attnc_checker.files import BadFile, Refused, Tensor, are_sizes

MAX_TOKENS, MAX_LAYERS = 2**21, 64
FLOATS, INTEGERS = {"float64": "F64", "float32": "F32"}, {"int32": "I32", "int64": "I64"}
MATRICES, SEGMENTS = ("W_Q", "W_K", "W_V", "W_O"), ("query_segments", "key_segments")
OWN = {"affine": {"weight", "constant"}, "attention": {"residual", "cross", "num_heads", "heads"}, "softmax": set()}
"""Fields of the kinds of layers, besides those that all have."""


@cache
def exact(x: float) -> Any:
    return fmpq(*x.as_integer_ratio())


def _need(holds: bool, where: str) -> None:
    if not holds:
        raise BadFile(f"config.json and model.safetensors do not describe a network: {where}")


class Program:
    """`layers` and `shapes` (tokens, channels) of the two streams; a layer is a dictionary of what is needed of it."""

    def __init__(self, structure: Any, tensors: dict[str, Tensor], d: int) -> None:
        self.tensors, self.unread, self.d = tensors, set(tensors), d
        try:
            self._read(structure)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadFile(
                f"config.json does not describe a network: a field lacks or is of another kind ({error})"
            ) from None

    def _read(self, structure: Any) -> None:
        _need(set(structure) == {"dtype", "input_shapes", "output_shape", "layers", "memory"}, "its fields")
        self.dtype, shapes = structure["dtype"], structure["input_shapes"]
        _need(self.dtype in FLOATS, f"the dtype {self.dtype!r}")
        _need(1 <= len(shapes) <= 2 and all(are_sizes(shape) and len(shape) in (1, 2) for shape in shapes), "inputs")
        starts = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes] + [(0, 0)]
        _need(sum(map(math.prod, starts)) == self.d, f"its inputs are not the {self.d} variable(s) of the box")
        self.firsts = {"layers": 0, "memory": math.prod(starts[0])}  # the number of a stream's first variable
        self.shapes: dict[str, list[tuple[int, int]]] = {"layers": starts[:1], "memory": starts[1:2]}
        self.layers: dict[str, list[dict[str, Any]]] = {"memory": [], "layers": []}
        self.names: list[str] = [layer["name"] for layer in structure["layers"]]
        self.channels: list[list[str]] = [layer["channels"] for layer in structure["layers"]]
        for stream, layers in self.layers.items():
            _need(len(structure[stream]) <= MAX_LAYERS, f"{stream} has more than {MAX_LAYERS} layers")
            layers += [self._layer(stream, f"{stream}.{i}", layer) for i, layer in enumerate(structure[stream])]
        self.num_outputs = math.prod(self.shapes["layers"][-1])
        shape = structure["output_shape"]
        _need(are_sizes(shape) and math.prod(shape) == self.num_outputs > 0, "the output's shape")
        _need(not self.unread, f"the tensors {sorted(self.unread)[:3]} belong nowhere")

    def _layer(self, stream: str, prefix: str, layer: Any) -> dict[str, Any]:
        kind, where, width = layer["kind"], f"{prefix}.{layer['name']}", len(layer["channels"])
        tokens, width_in = self.shapes[stream][-1]
        _need(set(layer) == {"kind", "name", "channels"} | OWN[kind], f"the fields of {where}")
        are_texts = all(type(name) is str for name in (layer["name"], *layer["channels"]))
        _need(are_texts and len(set(layer["channels"])) == width, f"the names in {prefix}")
        read: dict[str, Any] = {"kind": kind, "where": where}
        if kind == "affine":
            weight, shape = self._sparse(layer["weight"], f"{where}.weight")
            read["constant"], constant_shape = self._sparse(layer["constant"], f"{where}.constant")
            _need(shape[1:] == [width, tokens, width_in] and constant_shape == shape[:2], f"the shapes of {where}")
            tokens, read["rows"] = shape[0], {}
            for place, value in weight.items():
                read["rows"].setdefault(place[:2], []).append((place[2:], value))
        elif kind == "attention":
            residual, cross = layer["residual"], layer["cross"]
            _need(residual is False or (residual is True and width == width_in), f"the residual of {where}")
            _need(cross is False or (cross is True and stream == "layers"), f"what {where} looks at")
            sizes = (tokens, width_in, *(self.shapes["memory"][-1] if cross else (tokens, width_in)), width)
            heads = [self._head(f"{where}.head{h}", head, *sizes) for h, head in enumerate(layer["heads"])]
            _need(layer["num_heads"] == len(heads) > 0, f"the heads of {where}")
            read |= {"residual": residual, "cross": cross, "heads": heads}
        else:
            _need(width == width_in, f"the channels of {where}")
        _need(max(tokens, width) <= MAX_TOKENS, f"{where} is too large")
        self.shapes[stream].append((tokens, width))
        return read

    def _tensor(self, name: str, shape: list[int], *dtypes: str) -> tuple[Any, ...]:
        _need(name in self.unread, f"the tensor {name!r} is missing")
        self.unread.discard(name)
        found = self.tensors[name]
        fits = list(found.shape) == shape and found.dtype in dtypes
        _need(fits, f"the tensor {name!r} is {found.dtype} of shape {found.shape}, not {'/'.join(dtypes)} of {shape}")
        return found.values

    def _sparse(self, entry: Any, where: str) -> tuple[dict[tuple[int, ...], Any], list[int]]:
        _need(set(entry) == {"shape", "num_entries", "index_dtype"} and are_sizes(entry["shape"]), where)
        shape, count = entry["shape"], entry["num_entries"]
        index = self._tensor(f"{where}.index", [count, len(shape)], INTEGERS[entry["index_dtype"]])
        values = self._tensor(f"{where}.values", [count], FLOATS[self.dtype])
        places = list(zip(*(index[i :: len(shape)] for i in range(len(shape))), strict=True))
        in_range = all(0 <= i < size for place in places for i, size in zip(place, shape, strict=True))
        _need(in_range and len(set(places)) == count, f"{where} has an index out of range, or twice")
        return {place: exact(value) for place, value in zip(places, values, strict=True)}, shape

    def _head(self, where: str, head: Any, asks: int, width_q: int, keys: int, width_k: int, width: int) -> Any:
        _need(set(head) == {*MATRICES, "mask"} and min(keys, width_q, width_k) > 0, where)
        d_k, d_v = head["W_Q"][1], head["W_V"][1]
        shapes = [[width_q, d_k], [width_k, d_k], [width_k, d_v], [d_v, width]]
        _need([head[name] for name in MATRICES] == shapes, f"the shapes of {where}")
        read: dict[str, Any] = {"mask": None}
        for name, (_, columns) in zip(MATRICES, shapes, strict=True):  # the non-zeros of each column
            values = self._tensor(f"{where}.{name}", head[name], FLOATS[self.dtype])
            read[name] = [[(i, exact(x)) for i, x in enumerate(values[j::columns]) if x] for j in range(columns)]
        if head["mask"] is not None:
            _need(set(head["mask"]) == set(SEGMENTS), f"the mask of {where}")
            sizes = zip(SEGMENTS, (asks, keys), strict=True)
            asked, seen = (self._tensor(f"{where}.mask.{name}", [size], "I32", "I64") for name, size in sizes)
            if -1 not in seen and not set(asked) <= set(seen):  # and what it says would be nan
                raise Refused(f"a query of {where!r} sees no key")
            read["mask"] = [asked, seen]
        return read
