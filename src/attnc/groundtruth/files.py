"""The files of the benchmark: public tasks, the answers that belong to them, and the submissions of readers.

A benchmark is a folder. `models/NAME` has a checkpoint and task.json, and `answers/NAME` has everything that a reader
should not see: truth.json, truth.safetensors and the certificate. The JSON schemas in this package describe the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.errors import FileError, InputError
from attnc.exports.safe_files import CONFIG, FolderKind, PathLike, read_json, read_tensors
from attnc.exports.tensors import a_list, a_text, a_typed
from attnc.groundtruth.running import AttentionWeights, RunningModel, Subspace
from attnc.numerics.arrays import Float

FAMILY = "attnc.ground-truth"
INDEX_FORMAT, TASK_FORMAT = f"{FAMILY}/1", f"{FAMILY}.task/1"
TRUTH_FORMAT, ANSWERS_FORMAT = f"{FAMILY}.truth/1", f"{FAMILY}.answers/1"
INDEX, TASK, TRUTH, TENSORS = "benchmark.json", "task.json", "truth.json", "truth.safetensors"
MODELS, ANSWERS = "models", "answers"
WEIGHTS = "model.safetensors"
MAX_CHECKPOINT_BYTES = 2**28
BENCHMARK = FolderKind("a benchmark", FAMILY, ("format",), lambda name: False, has_folders=True)


@dataclass(frozen=True, eq=False)
class BenchmarkTask:
    """One public model: how to run it, and pairs of inputs."""

    name: str
    data: Mapping[str, Any]
    model: RunningModel

    @property
    def clean(self) -> Float[np.ndarray, "pairs variables"]:
        return np.array(self.data["pairs"]["clean"], np.float64)

    @property
    def corrupted(self) -> Float[np.ndarray, "pairs variables"]:
        return np.array(self.data["pairs"]["corrupted"], np.float64)

    @cached_property
    def possible_edges(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.model.edges)

    @property
    def causal_variables(self) -> list[Mapping[str, Any]]:
        return list(self.data["causal_variables"])


def read_index(folder: PathLike) -> list[str]:
    """Return the names of the models of a benchmark."""
    path = os.path.join(os.fspath(folder), INDEX)
    data = read_json(path)
    if data.get("format") != INDEX_FORMAT:
        raise FileError(
            f"{path!r} is not a benchmark of format {INDEX_FORMAT!r}: its format is {data.get('format')!r:.60}"
        )
    return [_plain_name(a_text(name, "models")) for name in a_list(data.get("models"), "models")]


def _plain_name(name: str) -> str:
    if not name.isalnum() or not name.isascii():
        raise FileError(f"{name!r:.60} is not the name of a model: names have letters and digits")
    return name


def read_task(folder: PathLike, name: str) -> BenchmarkTask:
    """Read a public model. Nothing else is read."""
    place = os.path.join(os.fspath(folder), MODELS, name)
    try:
        return _read_task(place, name)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FileError(f"{place!r} does not have the files of a model: {type(error).__name__}: {error}") from None


def _read_task(place: str, name: str) -> BenchmarkTask:
    data = read_json(os.path.join(place, TASK))
    if data.get("format") != TASK_FORMAT:
        raise FileError(f"{place!r} has no task of format {TASK_FORMAT!r}")
    config = read_json(os.path.join(place, CONFIG))
    width, d, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        where = f"model.layers.{i}"
        shapes |= {f"{where}.self_attn.{letter}_proj.weight": (heads * d, width) for letter in "qkv"}
        shapes |= {f"{where}.self_attn.o_proj.weight": (width, heads * d)}
        shapes |= {f"{where}.mlp.{part}_proj.weight": (1, width) for part in ("gate", "up")}
        shapes |= {f"{where}.mlp.down_proj.weight": (width, 1)}
        shapes |= {f"{where}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
    layout = {key: (np.dtype("<f4"), shape) for key, shape in shapes.items()}
    tensors, _ = read_tensors(os.path.join(place, WEIGHTS), layout, MAX_CHECKPOINT_BYTES)
    layers = []
    for i in range(config["num_hidden_layers"]):
        where = f"model.layers.{i}.self_attn"
        W_Q, W_K, W_V = (tensors[f"{where}.{letter}_proj.weight"].reshape(heads, d, width) for letter in "qkv")
        W_O = tensors[f"{where}.o_proj.weight"].reshape(width, heads, d).transpose(1, 0, 2)
        layers.append(AttentionWeights(W_Q, W_K, W_V, W_O))
    E, how = tensors["model.embed_tokens.weight"].astype(np.float64), data["tokens"]
    names = [variable["name"] for variable in data["variables"]]
    tokens = [variable["token"] for variable in data["variables"]]
    # A channel that holds the same large number in all tokens keeps the norm fixed. No head reads it.
    E = np.where(np.abs(E[how["query"]]) > LARGEST_CHANNEL, 0.0, E)
    model = RunningModel(layers, E[how["prefix"]], E[how["query"]], E[tokens], E[how["output"]], names)
    return BenchmarkTask(name, data, model)


LARGEST_CHANNEL = 2.0**14
"""Above every channel that heads read, and below the number 2^m ≥ 2^16 in the pinned channel."""


@dataclass(frozen=True)
class Answer:
    """The submission for one model: edges, with scores if there are any, and a subspace for causal variables."""

    edges: tuple[tuple[str, str], ...]
    scores: tuple[float, ...] | None
    variables: Mapping[str, Subspace]


def read_answers(path: PathLike, tasks: Mapping[str, BenchmarkTask]) -> tuple[str, dict[str, Answer]]:
    """Read a file of answers. Return the name of the method, and the answers by model.

    Raise FileError if it is not such a file, and InputError if it names heads, variables or models that do not exist.
    """
    data = read_json(path)
    if data.get("format") != ANSWERS_FORMAT:
        raise FileError(
            f"{os.fspath(path)!r}: its format is {data.get('format')!r:.60}, and {ANSWERS_FORMAT!r} is read here"
        )
    answers = _object(data.get("answers"), "answers")
    found = {}
    for name, entry in answers.items():
        if name not in tasks:
            raise InputError(f"answers: the benchmark has no model {name!r:.60}")
        found[name] = _answer(entry, f"answers.{name}", tasks[name])
    return a_text(data.get("method", "unnamed"), "method"), found


def _answer(entry: Any, where: str, task: BenchmarkTask) -> Answer:
    stated = _object(entry, where, (), ("edges", "variables"))
    edges, scores = [], []
    for number, edge in enumerate(a_list(stated.get("edges", []), f"{where}.edges")):
        place = f"{where}.edges[{number}]"
        parts = _object(edge, place, ("from", "to"), ("score",))
        pair = (a_text(parts["from"], f"{place}.from"), a_text(parts["to"], f"{place}.to"))
        if pair not in task.possible_edges:
            raise InputError(f"{place}: there is no edge from {pair[0]!r:.40} to {pair[1]!r:.40} in this model")
        edges.append(pair)
        if "score" in parts:
            scores.append(_number(parts["score"], f"{place}.score"))
    if len(set(edges)) != len(edges):
        raise InputError(f"{where}.edges: an edge is listed twice")
    if scores and len(scores) != len(edges):
        raise InputError(
            f"{where}.edges: {len(scores)} of {len(edges)} edges have a score. Give all of them one, or none."
        )
    known = {variable["id"] for variable in task.causal_variables}
    variables = {}
    for name, place in _object(stated.get("variables", {}), f"{where}.variables").items():
        if name not in known:
            raise InputError(f"{where}.variables: there is no causal variable {name!r:.40}")
        variables[name] = _subspace(place, f"{where}.variables.{name}", task.model)
    return Answer(tuple(edges), tuple(scores) if scores else None, variables)


def _subspace(entry: Any, where: str, model: RunningModel) -> Subspace:
    stated = _object(entry, where, ("after_layer", "directions"), ("readers",))
    layer = stated["after_layer"]
    if type(layer) is not int or not -1 <= layer < len(model.layers):
        raise InputError(
            f"{where}.after_layer: expected a whole number from -1 to {len(model.layers) - 1}, found {layer!r:.40}"
        )
    rows = [_rows(stated[name], f"{where}.{name}", model.width) for name in ("directions", "readers") if name in stated]
    if len(rows) == 2 and len(rows[0]) != len(rows[1]):
        raise InputError(f"{where}: {len(rows[0])} directions and {len(rows[1])} readers")
    return Subspace(layer, *rows)


def _rows(entry: Any, where: str, width: int) -> Float[np.ndarray, "k width"]:
    rows = [[_number(x, where) for x in a_list(row, where)] for row in a_list(entry, where)]
    if not 1 <= len(rows) <= width or any(len(row) != width for row in rows):
        raise InputError(f"{where}: expected 1 to {width} vectors of {width} numbers")
    return np.array(rows)


def _object(value: Any, where: str, needed: Sequence[str] = (), allowed: Sequence[str] | None = None) -> dict[str, Any]:
    """Return an object with these keys, and no others if `allowed` lists them."""
    found: dict[str, Any] = a_typed(dict, "an object", value, where)
    for key in needed:
        if key not in found:
            raise FileError(f"{where} lacks the key {key!r}")
    if allowed is not None and (unknown := sorted(set(found) - {*needed, *allowed})):
        raise FileError(f"{where} has the key {unknown[0]!r:.40}, which is not known here")
    return found


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise InputError(f"{where}: expected a number, found {value!r:.40}")
    return float(value)
