"""The stored program as typed layers, with every shape checked. Unknown fields are refused: they might matter."""

from __future__ import annotations

import itertools
import math
import operator
import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.files import BadFile, Refused, Tensor, are_sizes, require

MAX_TOKENS = 3 * 2**22
"""Largest number of tokens or channels of one layer. OVERFLOW_LIMITS rely on sums of at most as many terms."""
MAX_LAYERS = 64
"""Largest number of layers of one stream, all turns of repeats counted. It bounds the time that a small file can cost.
The corpus has up to 11."""
FLOATS, INTEGERS = {"float64": "F64", "float32": "F32"}, {"int32": "I32", "int64": "I64"}
MATRICES, SEGMENTS = ("W_Q", "W_K", "W_V", "W_O"), ("query_segments", "key_segments")
NUMBERED = re.compile(r"(.*?)([1-9]\d{0,8}|0)")
"""The name of a repeated layer: its number grows by one from turn to turn."""
PARTS = ("weight", "constant")
OWN = {"affine": {"weight", "constant"}, "attention": {"residual", "cross", "num_heads", "heads"}, "softmax": set()}
"""The fields of each kind of layer, in addition to those of all layers."""
SEEN_BY_ALL = -1
"""The segment of a key that every query sees."""

Entry = tuple[int, int]
"""A token and a channel."""
Matrix = list[list[tuple[int, fmpq]]]
"""For every column, its non-zero entries (row, number)."""


@cache
def exact(x: float) -> fmpq:
    return fmpq(*x.as_integer_ratio())


class Constants(NamedTuple):
    """The constants of an affine layer. Millions of them fit into memory."""

    tokens: int
    width: int  # the number of channels
    places: array[int]  # channel·tokens + token, ascending
    values: Sequence[float]

    def at(self, token: int, channel: int) -> fmpq:
        place = channel * self.tokens + token
        n = bisect_left(self.places, place)
        is_there = n < len(self.places) and self.places[n] == place
        return exact(self.values[n]) if is_there else fmpq(0)

    def column(self, channel: int) -> array[float]:
        """Return the constants of all tokens in one channel."""
        found, first = array("d", bytes(8 * self.tokens)), channel * self.tokens
        for n in self._range(channel):
            found[self.places[n] - first] = self.values[n]
        return found

    def largest(self) -> list[float]:
        """Return the largest absolute value in each channel."""
        return [max((abs(self.values[n]) for n in self._range(c)), default=0.0) for c in range(self.width)]

    def _range(self, channel: int) -> range:
        first, last = (bisect_left(self.places, c * self.tokens) for c in (channel, channel + 1))
        return range(first, last)


class AffineLayer(NamedTuple):
    where: str
    rows: dict[Entry, list[tuple[Entry, fmpq]]]
    constant: Constants


class Mask(NamedTuple):
    """A query sees the keys of its own segment and those of SEEN_BY_ALL."""

    queries: Sequence[int]
    keys: Sequence[int]

    def seen_by(self, query: int) -> list[int]:
        """Return the tokens whose keys the query sees."""
        return [k for k, segment in enumerate(self.keys) if segment in (self.queries[query], SEEN_BY_ALL)]


class HeadWeights(NamedTuple):
    W_Q: Matrix
    W_K: Matrix
    W_V: Matrix
    W_O: Matrix
    mask: Mask | None


class AttentionLayer(NamedTuple):
    where: str
    heads: list[HeadWeights]
    residual: bool
    cross: bool


class SoftmaxLayer(NamedTuple):
    where: str


Layer = AffineLayer | AttentionLayer | SoftmaxLayer


class Stream(NamedTuple):
    """The layers of the main stream or of the memory, and (tokens, channels) before the first and after each."""

    first: int  # the number of its first variable
    layers: list[Layer]
    shapes: list[tuple[int, int]]


class Program:
    """The main stream, the memory, and the names by which a certificate refers to channels of the main stream."""

    flush: arb = arb(0)
    """The largest error, in any entry that a map reads, of engines that scale entries before they read them."""
    has_silent_keys = False
    """Whether keys that a mask hides are not hidden, but silent: engines add up their weights, which are negligible."""

    def __init__(self, structure: Any, tensors: dict[str, Tensor], d: int, max_layers: int = MAX_LAYERS) -> None:
        """Read and check `structure`, which is JSON from a file."""
        self.tensors, self.unread, self.max_layers = tensors, set(tensors), max_layers
        try:
            self._read(structure, d)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadFile(
                f"config.json does not describe a network: a field is missing or is of another kind ({error})"
            ) from None

    def _read(self, structure: Any, d: int) -> None:
        _need(set(structure) == {"dtype", "input_shapes", "output_shape", "layers", "memory"}, "its fields")
        self.dtype, shapes = str(structure["dtype"]), structure["input_shapes"]
        _need(self.dtype in FLOATS, f"the dtype {self.dtype!r}")
        _need(1 <= len(shapes) <= 2 and all(are_sizes(shape) and len(shape) in (1, 2) for shape in shapes), "inputs")
        starts = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes] + [(0, 0)]
        _need(sum(map(math.prod, starts)) == d, f"its inputs are not the {d} variable(s) of the box")
        self.memory = Stream(math.prod(starts[0]), [], starts[1:2])
        self.main = Stream(0, [], starts[:1])
        self.names: list[str] = []
        self.channels: list[list[str]] = []
        for name, stream in (("memory", self.memory), ("layers", self.main)):
            for i, part in enumerate(structure[name]):
                self._require_room(stream, 1, name)
                if part["kind"] == "repeat":
                    self._add_repeat(stream, f"{name}.{i}", part)
                else:
                    self._add_layer(stream, f"{name}.{i}", part)
        self.num_outputs = math.prod(self.main.shapes[-1])
        shape = structure["output_shape"]
        _need(are_sizes(shape) and math.prod(shape) == self.num_outputs > 0, "the output's shape")
        _need(not self.unread, f"the tensors {sorted(self.unread)[:3]} belong to no layer")

    @property
    def is_one_attention(self) -> bool:
        """Whether all layers are affine maps, except one layer of attention."""
        others = [layer for layer in (*self.memory.layers, *self.main.layers) if not isinstance(layer, AffineLayer)]
        return len(others) == 1 and isinstance(others[0], AttentionLayer)

    def _require_room(self, stream: Stream, more: int, where: str) -> None:
        _need(len(stream.layers) + more <= self.max_layers, f"{where} has more than {self.max_layers} layers")

    def _add_repeat(self, stream: Stream, prefix: str, repeat: Any) -> None:
        """Add the layers of all turns. Layers of equal numbers are one object."""
        _need(set(repeat) == {"kind", "count", "layers", "varying"}, f"the fields of {prefix}")
        body, count, first = repeat["layers"], repeat["count"], len(stream.layers)
        _need(are_sizes([count]) and count > 0 and isinstance(body, list) and len(body) > 0, f"the turns of {prefix}")
        self._require_room(stream, count * len(body), prefix)
        varying: dict[int, dict[str, tuple[Sequence[int], Sequence[float]]]] = {}
        for one in repeat["varying"]:
            _need(set(one) == {"layer", "part", "num_entries", "index_dtype"}, f"what varies in {prefix}")
            place, part, sizes = one["layer"], one["part"], [one["num_entries"]]
            is_new = part in PARTS and part not in varying.setdefault(place, {})
            _need(are_sizes([place, *sizes]) and is_new and body[place]["kind"] == "affine", f"what varies in {prefix}")
            where = f"{prefix}.turns.{place}.{part}"
            entries = self._tensor(f"{where}.entries", sizes, INTEGERS[one["index_dtype"]])
            varying[place][part] = entries, self._tensor(f"{where}.values", [count, *sizes], FLOATS[self.dtype])
        shape, known = stream.shapes[-1], dict[tuple[int, bytes], Layer]()
        for turn in range(count):
            for place, layer in enumerate(body):
                numbers = {
                    part: (entries, values[turn * len(entries) : (turn + 1) * len(entries)])
                    for part, (entries, values) in varying.get(place, {}).items()
                }
                key = place, b"".join(array("d", values).tobytes() for _, values in numbers.values())
                name = NUMBERED.fullmatch(layer["name"])
                _need(name is not None or count == 1, f"the name of a layer in {prefix}")
                later = layer["name"] if name is None else f"{name[1]}{int(name[2]) + turn}"
                if key in known:
                    self._append(stream, known[key], stream.shapes[first + 1 + place], later, layer["channels"])
                else:
                    if turn:  # the tensors of the layer are read once more
                        self.unread |= {each for each in self.tensors if each.startswith(f"{prefix}.{place}.")}
                    self._add_layer(stream, f"{prefix}.{place}", layer, numbers, later)
                    known[key] = stream.layers[-1]
            _need(count == 1 or stream.shapes[-1] == shape, f"the shape after a turn of {prefix}")

    def _append(self, stream: Stream, layer: Layer, shape: tuple[int, int], name: str, channels: list[str]) -> None:
        stream.layers.append(layer)
        stream.shapes.append(shape)
        if stream is self.main:
            self.names.append(name)
            self.channels.append(channels)

    def _add_layer(
        self,
        stream: Stream,
        prefix: str,
        layer: Any,
        varying: Mapping[str, tuple[Sequence[int], Sequence[float]]] | None = None,
        name: str | None = None,
    ) -> None:
        """Add a layer. `varying` has the entries and their values that replace stored ones, for each part."""
        kind, where, width = layer["kind"], f"{prefix}.{layer['name']}", len(layer["channels"])
        tokens, width_in = stream.shapes[-1]
        _need(set(layer) == {"kind", "name", "channels"} | OWN[kind], f"the fields of {where}")
        are_texts = all(type(name) is str for name in (layer["name"], *layer["channels"]))
        _need(are_texts and len(set(layer["channels"])) == width, f"the names in {prefix}")
        made: Layer
        if kind == "affine":
            differ = varying or {}
            shape, places, values = self._sparse(layer["weight"], f"{where}.weight", differ.get("weight"))
            constant_shape, constant_places, constants = self._sparse(
                layer["constant"], f"{where}.constant", differ.get("constant")
            )
            _need(shape[1:] == [width, tokens, width_in] and constant_shape == shape[:2], f"the shapes of {where}")
            rows: dict[Entry, list[tuple[Entry, fmpq]]] = {}
            for place, value in zip(places, values, strict=True):
                place, token = divmod(place, shape[0])
                place, channel = divmod(place, width)
                rows.setdefault((token, channel), []).append((divmod(place, tokens)[::-1], exact(value)))
            tokens = shape[0]
            made = AffineLayer(where, rows, Constants(tokens, width, constant_places, constants))
        elif kind == "attention":
            residual, cross = layer["residual"], layer["cross"]
            _need(residual is False or (residual is True and width == width_in), f"the residual of {where}")
            _need(cross is False or (cross is True and stream is self.main), f"the keys of {where}")
            keyed = self.memory.shapes[-1] if cross else (tokens, width_in)
            heads = [
                self._head(f"{where}.head{h}", head, (tokens, width_in), keyed, width)
                for h, head in enumerate(layer["heads"])
            ]
            _need(are_sizes([layer["num_heads"]]) and layer["num_heads"] == len(heads) > 0, f"the heads of {where}")
            made = AttentionLayer(where, heads, residual, cross)
        else:
            _need(width == width_in, f"the channels of {where}")
            made = SoftmaxLayer(where)
        _need(max(tokens, width) <= MAX_TOKENS, f"{where} is too large")
        self._append(stream, made, (tokens, width), name or layer["name"], layer["channels"])

    def _tensor(self, name: str, shape: list[int], dtype: str) -> Sequence[Any]:
        """Return the numbers of a tensor, floats or integers by its dtype."""
        _need(name in self.unread, f"the tensor {name!r} is missing")
        self.unread.discard(name)
        found = self.tensors[name]
        fits = are_sizes(shape) and list(found.shape) == shape and found.dtype == dtype
        _need(fits, f"the tensor {name!r} is {found.dtype} of shape {found.shape}, not {dtype} of {shape}")
        return found.values

    def _sparse(
        self, entry: Any, where: str, varying: tuple[Sequence[int], Sequence[float]] | None = None
    ) -> tuple[list[int], array[int], Sequence[float]]:
        """Return the shape, the places of the entries in a dense array of that shape, ascending, and their values.

        `varying` has the numbers of entries, ascending, and the values that replace theirs.

        The first index changes fastest, as in the constants of partitions, which need not be sorted then.
        """
        _need(set(entry) == {"shape", "num_entries", "index_dtype"} and are_sizes(entry["shape"]), where)
        shape, count = entry["shape"], entry["num_entries"]
        index = self._tensor(f"{where}.index", [count, len(shape)], INTEGERS[entry["index_dtype"]])
        values = self._tensor(f"{where}.values", [count], FLOATS[self.dtype])
        if varying is not None:
            values = array("d", values)
            are_ascending = all(map(operator.lt, varying[0], itertools.islice(varying[0], 1, None)))
            _need(are_ascending and all(0 <= n < count for n in varying[0]), f"the varying entries of {where}")
            for n, value in zip(*varying, strict=True):
                values[n] = value
        _need(math.prod(shape) < 2**63, f"the shape of {where}")
        places = array("q", bytes(8 * count))
        for i, size in reversed([*enumerate(shape)]):
            column = index[i :: len(shape)]
            _need(not count or (min(column) >= 0 and max(column) < size), f"{where} has an index out of range")
            places = array("q", (place * size + n for place, n in zip(places, column, strict=True)))
        if any(map(operator.ge, places, itertools.islice(places, 1, None))):
            order = sorted(range(count), key=places.__getitem__)
            places, values = array("q", (places[n] for n in order)), [values[n] for n in order]
            _need(all(map(operator.lt, places, places[1:])), f"{where} has an index twice")
        return shape, places, values

    def _head(self, where: str, head: Any, asks: tuple[int, int], keyed: tuple[int, int], width: int) -> HeadWeights:
        """`asks` and `keyed` are (tokens, channels) of the queries and of the keys."""
        (queries, width_q), (keys, width_k) = asks, keyed
        _need(set(head) == {*MATRICES, "mask"} and min(keys, width_q, width_k) > 0, where)
        d_k, d_v = head["W_Q"][1], head["W_V"][1]
        shapes = [[width_q, d_k], [width_k, d_k], [width_k, d_v], [d_v, width]]
        _need([head[name] for name in MATRICES] == shapes, f"the shapes of {where}")
        W_Q, W_K, W_V, W_O = (self._matrix(f"{where}.{name}", head[name]) for name in MATRICES)
        mask = None
        if head["mask"] is not None:
            _need(set(head["mask"]) == set(SEGMENTS), f"the mask of {where}")
            sizes = zip(SEGMENTS, (queries, keys), strict=True)
            mask = Mask(*(self._segments(head["mask"][name], f"{where}.mask.{name}", size) for name, size in sizes))
            if SEEN_BY_ALL not in mask.keys and not set(mask.queries) <= set(mask.keys):  # its average would be nan
                raise Refused(f"a query of {where!r} sees no key")
        return HeadWeights(W_Q, W_K, W_V, W_O, mask)

    def _segments(self, entry: Any, where: str, size: int) -> Sequence[int]:
        _need(set(entry) == {"dtype", "shape"} and entry["shape"] == [size], where)
        return self._tensor(where, entry["shape"], INTEGERS[entry["dtype"]])

    def _matrix(self, name: str, shape: list[int]) -> Matrix:
        values, columns = self._tensor(name, shape, FLOATS[self.dtype]), shape[1]
        return [[(i, exact(x)) for i, x in enumerate(values[j::columns]) if x] for j in range(columns)]


def _need(holds: bool, where: str) -> None:
    require(holds, f"config.json and model.safetensors do not describe a network: {where}", BadFile)
