"""Forgeries: changes of every field of a saved network, made so that hashes, counts and shapes still fit.

A forger changes the files in place and returns the change in words, or None where it does not apply. Forgers of one
family are about one part of the files. `tightened` turns any forgery into a false certificate: it sets the bound a
little below an error that Arb has confirmed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flint import arb

from attack.files import MAIN, Files
from attnc.ir.layers import EVERY_QUERY, Attention, Head, Mask
from attnc.ir.program import Program
from proofs.comparisons import BITS
from proofs.exact_programs import exact_output
from proofs.mutations import PROGRAM_MUTATIONS, hide_a_key, with_layer
from strategies.reference import precision

Rng = np.random.Generator
Forger = Callable[[Rng, Files], str | None]
Path = tuple[str | int, ...]
NUMBER = re.compile(r"(?<![A-Za-z_\d.])\d+\.?\d*(?:e[-+]?\d+)?(?![A-Za-z_\d.])")
NAMES = ("sin", "cos", "tanh", "exp", "abs", "relu", "sigmoid", "erf", "atan", "gelu", "silu", "softplus", "sqrt")
OTHER = re.compile(r"\b(" + "|".join(NAMES) + r")\(")


def size_of(rng: Rng) -> float:
    """A relative change: from the last digits to all of a number."""
    return float(rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-14, 1))


def picked(rng: Rng, things: list[Any]) -> Any:
    return things[int(rng.integers(len(things)))]


# --- JSON -------------------------------------------------------------------------------------------------------------


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """All places of a JSON value, objects and lists themselves included."""
    if before:
        yield before
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield from paths(member, (*before, name))


def at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def shown(path: Path) -> str:
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)


def another(rng: Rng, value: Any, strings: list[str]) -> Any:
    """Another value in place of this one: mostly of the same type, sometimes of another."""
    if rng.random() < 0.06:
        return picked(rng, [None, 0, 1.5, "x", True, [], {}, -1, 2**40, 1e300])
    match value:
        case bool():
            return not value
        case int():
            return picked(
                rng, [value + 1, value - 1, -value, 2 * value, 0, value + int(rng.integers(1, 9)), float(value)]
            )
        case float():
            moved = value * (1 + size_of(rng))
            return picked(rng, [moved, moved, moved, -value, 0.0, math.nextafter(value, 0.0), value + size_of(rng)])
        case str():
            return another_text(rng, value, strings)
        case list() if value:
            return another_list(rng, value)
        case dict() if value:
            return another_object(rng, value)
    return picked(rng, [0, 1.0, "x", [0], {"x": 0}, False])


def another_text(rng: Rng, text: str, strings: list[str]) -> str:
    """Another number, function, operator or name in a text; or another text of the file."""

    def number(match: re.Match[str]) -> str:
        return f"{float(match[0]) * (1 + size_of(rng)):.17g}"

    changes: list[Callable[[], str]] = [lambda: picked(rng, strings), lambda: text + "0", lambda: text[:-1]]
    if found := list(NUMBER.finditer(text)):
        changes += [lambda: _replaced(text, picked(rng, found), number)] * 4
    if found_names := list(OTHER.finditer(text)):
        changes += [lambda: _replaced(text, picked(rng, found_names), lambda _: picked(rng, list(NAMES)) + "(")] * 3
    for old, new in (("+", "-"), ("-", "+"), ("*", "+")):
        if old in text:
            changes.append(lambda old=old, new=new: text.replace(old, new, 1))
    changes += [lambda: f"{text} + {abs(size_of(rng)):.3g}", lambda: f"({text})*(1 + {abs(size_of(rng)):.3g})"]
    return picked(rng, changes)()


def _replaced(text: str, match: re.Match[str], change: Callable[[re.Match[str]], str]) -> str:
    return text[: match.start()] + change(match) + text[match.end() :]


def another_list(rng: Rng, value: list[Any]) -> list[Any]:
    i, j = (int(k) for k in rng.integers(len(value), size=2))
    kept = [*value]
    match int(rng.integers(5)):
        case 0:
            del kept[i]
        case 1:
            kept.insert(i, value[j])
        case 2:
            kept[i], kept[j] = kept[j], kept[i]
        case 3:
            kept[i] = value[j]
        case 4:
            kept = kept[:i]
    return kept


def another_object(rng: Rng, value: dict[str, Any]) -> dict[str, Any]:
    kept, names = dict(value), list(value)
    name, other = picked(rng, names), picked(rng, names)
    match int(rng.integers(4)):
        case 0:
            del kept[name]
        case 1:
            kept[name], kept[other] = kept[other], kept[name]
        case 2:
            kept["another"] = kept[name]
        case 3:
            kept[name + "_"] = kept.pop(name)
    return kept


def json_forger(where: Callable[[Files], list[tuple[dict[str, Any], Path]]]) -> Forger:
    """Make a forger that changes one of the places: alike in all places that have the same path."""

    def forge(rng: Rng, files: Files) -> str | None:
        places = where(files)
        if not places:
            return None
        root, path = picked(rng, places)
        strings = [found for each in paths(root) if isinstance(found := at(root, each), str)]
        old = at(root, path)
        new = another(rng, old, strings)
        at(root, path[:-1])[path[-1]] = new
        return f"{shown(path)}: {json.dumps(old)[:80]} → {json.dumps(new)[:80]}"

    return forge


def within(file: str, *names: str) -> Callable[[Files], list[tuple[dict[str, Any], Path]]]:
    """All places of a file under these keys; under all keys if none is named."""

    def where(files: Files) -> list[tuple[dict[str, Any], Path]]:
        root = getattr(files, file)
        return [(root, path) for path in paths(root) if not names or path[0] in names]

    return where


def both_files(rng: Rng, files: Files) -> str | None:
    """The expression, the box or the variables, in both files alike."""
    name = str(rng.choice(["expression", "expression", "box"]))
    found = json_forger(within("certificate", name))(rng, files)
    files.config[name] = files.certificate[name]
    files.config["variables"] = list(files.certificate["box"]) if isinstance(files.certificate["box"], dict) else []
    return found


def another_hash(rng: Rng, files: Files) -> str:
    files.certificate["weights_sha256"] = "".join(str(digit) for digit in rng.integers(0, 10, 64))
    files.is_hashed = False
    return "another hash"


def other_weights_same_hash(rng: Rng, files: Files) -> str | None:
    found = another_number(rng, files)
    files.is_hashed = False
    return None if found is None else f"{found}, and the hash of before"


# --- weights ----------------------------------------------------------------------------------------------------------


def another_number(rng: Rng, files: Files) -> str | None:
    """One number of a tensor."""
    tensors = files.tensors
    names = [name for name, tensor in tensors.items() if tensor.size and tensor.dtype.kind == "f"]
    if not names:
        return None
    name = picked(rng, names)
    flat = tensors[name].reshape(-1)
    i = int(rng.integers(len(flat)))
    old = flat[i]
    with np.errstate(all="ignore"):
        flat[i] = picked(rng, [old * (1 + size_of(rng)), old * (1 + size_of(rng)), old + size_of(rng), -old, 0.0])
    files.tensors = tensors
    return f"{name}[{i}]: {old!r} → {flat[i]!r}"


def another_index(rng: Rng, files: Files) -> str | None:
    """One index of a sparse tensor."""
    tensors = files.tensors
    names = [name for name, tensor in tensors.items() if tensor.size and name.endswith(".index")]
    if not names:
        return None
    name = picked(rng, names)
    flat = tensors[name].reshape(-1)
    i = int(rng.integers(len(flat)))
    flat[i] += picked(rng, [-1, 1, 1, 2])
    files.tensors = tensors
    return f"{name}[{i}] = {flat[i]}"


def swapped_tensors(rng: Rng, files: Files) -> str | None:
    tensors = files.tensors
    one = picked(rng, list(tensors))
    like = [
        name
        for name, x in tensors.items()
        if name != one and (x.shape, x.dtype) == (tensors[one].shape, tensors[one].dtype)
    ]
    if not like:
        return None
    other = picked(rng, like)
    tensors[one], tensors[other] = tensors[other], tensors[one]
    files.tensors = tensors
    return f"{one} ↔ {other}"


def another_header(rng: Rng, files: Files) -> str | None:
    """The header of model.safetensors: a dtype, a shape, an offset, a name."""
    header = files.header
    path = picked(rng, list(paths(header)))
    dtypes = ["F64", "F32", "I32", "I64", "BF16", "U8"]
    old = at(header, path)
    at(header, path[:-1])[path[-1]] = picked(rng, dtypes) if old in dtypes else another(rng, old, dtypes)
    files.header = header
    return f"header{shown(path)}: {old!r} → {at(header, path) if path[-1] in at(header, path[:-1]) else None!r}"[:160]


def program_forger(change: Callable[[Rng, Program], Program]) -> Forger:
    """Make a forger of a change of the program, which is written with all its shapes and tensors."""

    def forge(rng: Rng, files: Files) -> str | None:
        try:
            with np.errstate(all="ignore"):
                files.program = change(rng, files.program)
        except (ValueError, IndexError):  # the program has no such part
            return None
        return change.__name__

    return forge


# --- masks ------------------------------------------------------------------------------------------------------------


def masks_of(program: Program) -> list[tuple[int, int, Head]]:
    """All heads with their places, those with masks first of all where there are any."""
    found = [
        (i, h, head)
        for i, layer in enumerate(program.layers)
        if isinstance(layer, Attention)
        for h, head in enumerate(layer.heads)
    ]
    return [each for each in found if each[2].mask is not None] or found


def with_mask(program: Program, number: int, which: int, mask: Mask | None) -> Program:
    layer = program.layers[number]
    assert isinstance(layer, Attention)
    heads = [dataclasses.replace(head, mask=mask) if h == which else head for h, head in enumerate(layer.heads)]
    return with_layer(program, number, dataclasses.replace(layer, heads=tuple(heads)))


def mask_forger(change: Callable[[Rng, np.ndarray, np.ndarray], None]) -> Forger:
    """Make a forger that changes the segments of the queries and keys of a mask in place."""

    def another_mask(rng: Rng, program: Program) -> Program:
        number, which, head = picked(rng, masks_of(program))
        if head.mask is None:
            raise ValueError("no mask")
        queries, keys = head.mask.query_segments.copy(), head.mask.key_segments.copy()
        change(rng, queries, keys)
        return with_mask(program, number, which, Mask(queries, keys))

    another_mask.__name__ = change.__name__
    return program_forger(another_mask)


def a_key_of_another(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    """Keys of one segment are seen by another."""
    for place in rng.integers(len(keys), size=int(rng.integers(1, 4))):
        keys[place] = rng.choice(np.concatenate([queries, keys, [EVERY_QUERY]]))


def a_query_of_another(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    queries[rng.integers(len(queries))] = rng.choice(np.concatenate([queries, keys]))


def swapped_keys(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    i, j = rng.integers(len(keys), size=2)
    keys[[i, j]] = keys[[j, i]]


def rotated_keys(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    keys[:] = np.roll(keys, int(rng.integers(1, len(keys))) if len(keys) > 1 else 0)


def all_seen(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    keys[keys == rng.choice(keys)] = EVERY_QUERY


def other_numbers(rng: Rng, queries: np.ndarray, keys: np.ndarray) -> None:
    """Other numbers of the segments: the same mask, unless two of them meet."""
    shift = int(rng.integers(1, 4))
    queries += shift
    keys[keys != EVERY_QUERY] += shift if rng.random() < 0.5 else int(rng.integers(0, 4))


def no_mask(rng: Rng, program: Program) -> Program:
    number, which, _ = picked(rng, masks_of(program))
    return with_mask(program, number, which, None)


# --- dtypes -----------------------------------------------------------------------------------------------------------


def claimed_dtype(rng: Rng, files: Files) -> str:
    files.certificate["dtype"] = old = str(rng.choice(["float32", "float64", "real", "float16", "bfloat16"]))
    return f"claimed for {old}"


def cast(rng: Rng, files: Files) -> str | None:
    """The whole network in the other dtype, with a claim for it."""
    if files.name != MAIN:
        return None
    dtype = "float32" if files.certificate["dtype"] == "float64" else "float64"
    files.program = files.program.astype(dtype)
    files.certificate["dtype"] = dtype
    return f"cast to {dtype}"


def second_dtype(rng: Rng, files: Files) -> str | None:
    """The certificate as one for the weights rounded to float32."""
    if files.name != MAIN or files.certificate["dtype"] != "float64":
        return None
    files.certificate["dtype"], files.name = "float32", "certificate.float32.json"
    return "the same certificate for float32"


def one_tensor_cast(rng: Rng, files: Files) -> str | None:
    tensors = files.tensors
    name = picked(rng, list(tensors))
    kind = tensors[name].dtype
    new = {"float64": np.float32, "float32": np.float64, "int32": np.int64, "int64": np.int32}[kind.name]
    tensors[name] = tensors[name].astype(new)
    files.tensors = tensors
    if name.endswith(".index") and rng.random() < 0.5:
        _, number, *rest = name.split(".")
        layer = files.config["program"][name.split(".")[0]][int(number)]
        layer[rest[-2]]["index_dtype"] = np.dtype(new).name
    return f"{name} as {np.dtype(new).name}"


def weights_rounded(rng: Rng, files: Files) -> str:
    """Weights that were rounded to float32, stored as before."""
    tensors = files.tensors
    with np.errstate(over="ignore"):
        files.tensors = {
            name: x.astype(np.float32).astype(x.dtype) if x.dtype.kind == "f" else x for name, x in tensors.items()
        }
    return "weights rounded to float32"


# --- rows of tables ---------------------------------------------------------------------------------------------------


def a_row_off(rng: Rng, files: Files) -> str | None:
    """A value that is off by a little more than the bound, or a little less."""
    rows = files.certificate.get("table")
    if not rows:
        return None
    row, program, d = picked(rng, rows), files.program, len(files.certificate["box"])
    with precision(BITS):
        y = exact_output(program, row[:d])
        j, side = int(rng.integers(len(y))), float(rng.choice([-1, 1]))
        room = 1 + side * 10 ** rng.uniform(-9, 0)
        row[d + j] = float((y[j] + picked(rng, [-1, 1]) * arb(files.certificate["bound"]) * room).mid())
    return f"a row at {room!r} of the bound"


def rows_changed(rng: Rng, files: Files) -> str | None:
    """A row left out, repeated, moved to another point or given the values of another; counts are adjusted."""
    rows, d = files.certificate.get("table"), len(files.certificate["box"])
    if not rows:
        return None
    i, j = (int(k) for k in rng.integers(len(rows), size=2))
    match int(rng.integers(5)):
        case 0:
            del rows[i]
        case 1:
            rows.append([*rows[i][:d], *(x * (1 + size_of(rng)) for x in rows[i][d:])])
        case 2:
            rows[i][:d], rows[j][:d] = rows[j][:d], rows[i][:d]
        case 3:
            rows[i][d:] = rows[j][d:]
        case 4:
            rows[i][int(rng.integers(d))] *= 1 + size_of(rng)
    counted(files)
    return f"rows {i} and {j} changed"


def another_cell(rng: Rng, files: Files) -> str | None:
    rows = files.certificate.get("table")
    if not rows:
        return None
    row = picked(rng, rows)
    j = int(rng.integers(len(row)))
    row[j] = old = row[j] * (1 + size_of(rng)) + (size_of(rng) if rng.random() < 0.3 else 0.0)
    return f"a cell is {old!r}"


def counted(files: Files) -> None:
    rows = files.certificate["table"]
    files.certificate |= {"points": len(rows), "method": f"proof at the table's {len(rows):,} points"}


# --- leaves and stages ------------------------------------------------------------------------------------------------


def leaf_lists(files: Files) -> list[list[Any]]:
    stages = [stage["leaves"] for stage in files.certificate.get("stages", []) if stage.get("leaves")]
    return [found for found in (files.certificate["leaves"], *stages) if found]


def another_leaf(rng: Rng, files: Files) -> str | None:
    """A leaf left out, moved, widened, halved, of another kind or order."""
    lists = leaf_lists(files)
    if not lists:
        return None
    leaves = picked(rng, lists)
    i = int(rng.integers(len(leaves)))
    kind, *numbers = leaf = leaves[i]
    if kind == "tail":
        leaves[i] = picked(rng, [["tail", -leaf[1]], ["taylor", 4, 0, 0]])
        return f"{leaf} → {leaves[i]}"
    order, (level, *index) = (numbers[:1], numbers[1:]) if kind == "taylor" else ([], numbers)
    match int(rng.integers(6)):
        case 0:
            del leaves[i]
        case 1:
            index[int(rng.integers(len(index)))] += picked(rng, [-1, 1])
            leaves[i] = [kind, *order, level, *index]
        case 2:
            leaves[i] = [kind, *order, level - 1, *(k >> 1 for k in index)]
        case 3:
            leaves[i] = [kind, *order, level + 1, *(2 * k + int(rng.integers(2)) for k in index)]
        case 4:
            leaves[i] = ["selection", level, *index] if kind == "taylor" else ["taylor", 3, level, *index]
        case 5:
            leaves[i] = ["taylor", int(rng.integers(1, 13)), level, *index]
    return f"{leaf} → {leaves[i] if i < len(leaves) else None}"


def another_reach(rng: Rng, files: Files) -> str | None:
    """Less rounding beyond the core of an infinite box, or a larger reach."""
    beyond = files.certificate.get("beyond")
    if beyond is None:
        return None
    name, factor = picked(rng, [("relative", 10 ** rng.uniform(-2, 0)), ("reach", 10 ** rng.uniform(0, 300))])
    beyond[name] = min(beyond[name] * factor, 1e308)
    return f"{name} beyond the core times {factor!r}"


def tight_stage(rng: Rng, files: Files) -> str | None:
    """The bound of a stage, and those of its leaves, a little smaller."""
    stages = [stage for stage in files.certificate.get("stages", []) if "bound" in stage]
    if not stages:
        return None
    stage, share = picked(rng, stages), 1 - 10 ** rng.uniform(-6, -0.1)
    stage["bound"] *= share
    stage["leaf_bounds"] = [min(x, stage["bound"]) for x in stage.get("leaf_bounds", [])] or None
    return f"the bound of stage {stage['name']} times {share!r}"


def swapped_stages(rng: Rng, files: Files) -> str | None:
    """Two stages trade a field."""
    stages = files.certificate.get("stages", [])
    if len(stages) < 2:
        return None
    one, other = (picked(rng, stages) for _ in range(2))
    shared = [name for name in one if name in other and one[name] != other[name]]
    if not shared:
        return None
    name = picked(rng, shared)
    one[name], other[name] = other[name], one[name]
    return f"two stages trade {name}"


def tightened(rng: Rng, files: Files, worst: float) -> str:
    """Set the bound a little below an error that was confirmed; and the stated parts of it, so that they fit."""
    share = 1 - 10 ** rng.uniform(-12, -0.3)
    files.certificate["bound"] = worst * share
    files.certificate["observed"] = None
    files.certificate["terms"] = []
    if files.certificate["norm"] == "inf":
        files.certificate["leaf_bounds"] = []
    return f"the bound is {share!r} of an error"


FAMILIES: Mapping[str, tuple[Forger, ...]] = {
    "masks": (
        *(program_forger(change) for change in (hide_a_key, no_mask)),
        *map(mask_forger, (a_key_of_another, a_query_of_another, swapped_keys, rotated_keys, all_seen, other_numbers)),
    ),
    "dtypes": (claimed_dtype, cast, cast, second_dtype, second_dtype, one_tensor_cast, weights_rounded),
    "stages": (
        *[json_forger(within("certificate", "stages", "outputs", "axes"))] * 3,
        tight_stage,
        tight_stage,
        swapped_stages,
    ),
    "rows": (a_row_off, a_row_off, rows_changed, another_cell, json_forger(within("certificate", "table", "points"))),
    "leaves": (
        another_leaf,
        another_leaf,
        another_reach,
        json_forger(within("certificate", "leaves", "leaf_bounds", "cuts", "core", "beyond")),
    ),
    "claim": (json_forger(within("certificate")), both_files, both_files, another_hash, other_weights_same_hash),
    "config": (json_forger(within("config")), json_forger(within("config", "program"))),
    "weights": (another_number, another_number, another_number, another_index, swapped_tensors, another_header),
    "program": tuple(map(program_forger, PROGRAM_MUTATIONS)),
    "bound": (lambda rng, files: "nothing else",),
}
"""The forgers of each family."""
