"""Three methods of interpretability, as readers of the benchmark: they see checkpoints and public pairs, no answers.

activation patching    a node of the corrupted run replaces that of the clean run, and the change of the output is its
                       score. For edges: only the input of one head from one node is replaced (path patching). A causal
                       variable is the main direction in which patching the stream moves it: the difference of streams
                       that best predicts the difference of the variable
attribution patching   the same to first order: the difference of the nodes times the gradient of the output
linear probe           for causal variables: ridge regression of the values on streams. For circuits: edges are those
                       whose source is read by a head along a direction that varies with the source
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnc.groundtruth.files import ANSWERS_FORMAT, BenchmarkTask
from attnc.groundtruth.running import OUTPUT, Recording, RunningModel, Subspace, head_name
from attnc.numerics.arrays import Float

KEPT = 0.01
"""Edges are kept whose mean effect on the output is at least this share of the mean total effect."""
PROBE_PENALTY = 1e-6
"""The penalty of ridge regression, relative to the variance of streams. Probes with 24 pairs have fewer examples than
dimensions."""

Edge = tuple[str, str]


def activation_patching(task: BenchmarkTask) -> dict[str, Any]:
    """Find edges by patching the input of one head from one node, and variables by the directions that move them."""
    model, clean, other = task.model, task.model.run(task.clean), task.model.run(task.corrupted)
    total = np.abs(other.output - clean.output).mean()
    scores: dict[Edge, float] = {}
    for source, target in model.edges:
        patched = model.run(task.clean, reading=_with_one_edge(model, source, target, other))
        scores[source, target] = float(np.abs(patched.output - clean.output).mean() / total)
    variables = {each["id"]: _best_direction(task, each, clean, other) for each in task.causal_variables}
    return _answer(_pruned(scores, model), variables)


def attribution_patching(task: BenchmarkTask) -> dict[str, Any]:
    """Find edges and variables by the gradient of the output times the difference of nodes."""
    model, clean, other = task.model, task.model.run(task.clean), task.model.run(task.corrupted)
    total = np.abs(other.output - clean.output).mean()
    gradients = model.gradients(clean)
    scores: dict[Edge, float] = {}
    for source, target in model.edges:
        layer, head = _place(model, target)
        difference = other.nodes[source] - clean.nodes[source]
        scores[source, target] = float(np.abs((difference * gradients[layer][head]).sum(axis=1)).mean() / total)
    variables = {}
    for each in task.causal_variables:
        change = np.array(each["patched_output"]) - np.array(task.data["pairs"]["clean_output"])
        variables[each["id"]] = _by_attribution(task, change, clean, other, gradients)
    return _answer(_pruned(scores, model), variables)


def linear_probe(task: BenchmarkTask) -> dict[str, Any]:
    """Find variables by ridge regression on streams, and edges from sources that heads read."""
    model, clean, other = task.model, task.model.run(task.clean), task.model.run(task.corrupted)
    variables = {}
    for each in task.causal_variables:
        values = np.concatenate([each["clean"], each["corrupted"]])
        best: tuple[float, Subspace] | None = None
        for layer in range(len(model.layers)):
            streams = np.concatenate([clean.streams[layer + 1], other.streams[layer + 1]])
            error, reader = _ridge(streams, values)
            if best is None or error < 0.5 * best[0]:  # the first layer that has the variable
                best = error, Subspace(layer, reader[None])
        assert best is not None
        variables[each["id"]] = best[1]
    scores: dict[Edge, float] = {}
    nodes = {name: np.concatenate([clean.nodes[name], other.nodes[name]]) for name in clean.nodes}
    nodes = {name: values - values.mean(axis=0) for name, values in nodes.items()}
    for source, target in model.edges:
        moved, (layer, head) = nodes[source], _place(model, target)
        read = model.output[None] if target == OUTPUT else model.layers[layer].W_Q[head]
        size = float(np.linalg.norm(read)) * float(np.linalg.norm(moved))
        scores[source, target] = float(np.linalg.norm(moved @ read.T) / size) if size > 0 else 0.0
    return _answer(_pruned(scores, model, kept=10 * KEPT), variables)


METHODS: Mapping[str, Callable[[BenchmarkTask], dict[str, Any]]] = {
    "activation patching": activation_patching,
    "attribution patching": attribution_patching,
    "linear probe": linear_probe,
}


def answers_of(method: str, tasks: Mapping[str, BenchmarkTask]) -> dict[str, Any]:
    """Return the answers of a method, in the format that `score` reads."""
    found = {name: METHODS[method](task) for name, task in tasks.items()}
    return {"format": ANSWERS_FORMAT, "method": method, "answers": found}


def _answer(edges: Mapping[Edge, float], variables: Mapping[str, Subspace]) -> dict[str, Any]:
    return {
        "edges": [{"from": source, "to": target, "score": score} for (source, target), score in edges.items()],
        "variables": {name: _stated(subspace) for name, subspace in variables.items()},
    }


def _stated(subspace: Subspace) -> dict[str, Any]:
    readers = {} if subspace.readers is None else {"readers": subspace.readers.tolist()}
    return {"after_layer": subspace.after_layer, "directions": subspace.directions.tolist()} | readers


def _place(model: RunningModel, target: str) -> tuple[int, int]:
    if target == OUTPUT:
        return len(model.layers), 0
    layer, _, head = target[1:].partition("H")
    return int(layer), int(head)


def _with_one_edge(model: RunningModel, source: str, target: str, other: Recording) -> Any:
    """Return how heads read the stream if one of them reads one node of another run."""

    def reading(layer: int, head: int, made: Mapping[str, np.ndarray]) -> np.ndarray:
        name = OUTPUT if layer == len(model.layers) else head_name(layer, head)
        stream = model.query + sum(made.values(), np.zeros((len(other.output), model.width)))
        return stream + other.nodes[source] - made[source] if name == target else stream

    return reading


def _pruned(scores: Mapping[Edge, float], model: RunningModel, kept: float = KEPT) -> dict[Edge, float]:
    """Return the edges above the threshold that are on a path from a variable to the output."""
    edges = {edge for edge, score in scores.items() if score >= kept}
    while True:
        heard, read = {target for _, target in edges} | set(model.names), {source for source, _ in edges} | {OUTPUT}
        left = {(source, target) for source, target in edges if source in heard and target in read}
        if left == edges:
            return {edge: scores[edge] for edge in sorted(left)}
        edges = left


def _best_direction(task: BenchmarkTask, each: Mapping[str, Any], clean: Recording, other: Recording) -> Subspace:
    """Return the direction of the head that changes the output most like the variable if it is patched."""
    model, wanted = task.model, np.array(each["patched_output"])
    best: tuple[float, Subspace] | None = None
    for layer, of in enumerate(model.layers):
        for h in range(of.num_heads):
            name = head_name(layer, h)
            patched = model.run(task.clean, nodes={name: other.nodes[name]})
            error = float(np.abs(patched.output - wanted).mean())
            if best is None or error < best[0]:
                best = error, Subspace(layer, _main_direction(other.nodes[name] - clean.nodes[name])[None])
    assert best is not None
    return best[1]


def _by_attribution(
    task: BenchmarkTask,
    change: Float[np.ndarray, " pairs"],
    clean: Recording,
    other: Recording,
    gradients: list[Float[np.ndarray, "heads batch width"]],
) -> Subspace:
    """Return the head whose first-order effect is most like that of the variable, and its direction."""
    model = task.model
    best: tuple[float, Subspace] | None = None
    for layer, of in enumerate(model.layers):
        later = sum((part.sum(axis=0) for part in gradients[layer + 1 :]), np.zeros_like(clean.streams[0]))
        for h in range(of.num_heads):
            name = head_name(layer, h)
            difference = other.nodes[name] - clean.nodes[name]
            error = float(np.abs((difference * later).sum(axis=1) - change).mean())
            if best is None or error < best[0]:
                best = error, Subspace(layer, _main_direction(difference)[None])
    assert best is not None
    return best[1]


def _main_direction(differences: Float[np.ndarray, "pairs width"]) -> Float[np.ndarray, " width"]:
    _, sizes, rows = np.linalg.svd(differences, full_matrices=False)
    return rows[0] if sizes[0] > 0 else np.eye(differences.shape[1])[0]


def _ridge(
    streams: Float[np.ndarray, "points width"], values: Float[np.ndarray, " points"]
) -> tuple[float, Float[np.ndarray, " width"]]:
    """Return the share of the variance that a linear probe misses by leave-one-out, and the probe."""
    X, y = streams - streams.mean(axis=0), values - values.mean()
    U, sizes, rows = np.linalg.svd(X, full_matrices=False)
    shrunk = sizes**2 / (sizes**2 + PROBE_PENALTY * (sizes**2).sum() + 1e-300)
    leverage = (U**2 * shrunk).sum(axis=1)
    residuals = (y - U @ (shrunk * (U.T @ y))) / np.maximum(1 - leverage - 1 / len(y), 1e-9)
    probe = rows.T @ (shrunk / np.maximum(sizes, 1e-300) * (U.T @ y))
    missed = float((residuals**2).sum() / max(float((y**2).sum()), 1e-300))
    return max(missed, 1e-12), probe if probe.any() else np.eye(len(probe))[0]
