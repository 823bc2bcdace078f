"""Score a reader's answers: circuits by edges, heads and faithfulness, causal variables by interchange and overlap.

    edges, heads     precision, recall and F1 of the submitted sets. Heads are those that occur in an edge. Decoys and
                     unused heads are no part of the circuit. If edges have scores, their average precision as well
    faithfulness     1 − |y_circuit − y_clean| / |y_corrupted − y_clean|, both averaged over held-out pairs: submitted
                     edges carry the clean run, all others the corrupted run. At least 0
    interchange      the share of held-out pairs where taking the coordinates of the submitted subspace from the
                     corrupted run gives the exact effect, within its proven tolerance and CLOSE times the mean effect
    overlap          trace(P·P′)/k for the orthogonal projections onto the submitted subspace, of k dimensions, and the
                     true direction
A model or variable without an answer scores 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.errors import FileError
from attnc.exports.safe_files import PathLike, read_json, read_tensors
from attnc.groundtruth.files import (
    ANSWERS,
    MAX_CHECKPOINT_BYTES,
    TENSORS,
    TRUTH,
    TRUTH_FORMAT,
    Answer,
    BenchmarkTask,
    read_answers,
    read_index,
    read_task,
)
from attnc.groundtruth.running import OUTPUT, Subspace

CLOSE = 0.1
"""Share of the mean effect by which an interchange may miss the exact effect, besides the proven tolerance. A probe
that reads a channel up to 5 % of its range passes, and one that reads another channel does not."""
MEASURES = (
    "edge_precision",
    "edge_recall",
    "edge_f1",
    "head_precision",
    "head_recall",
    "head_f1",
    "average_precision",
    "faithfulness",
    "interchange",
    "overlap",
)


@dataclass(frozen=True, eq=False)
class Truth:
    """The answer of one model."""

    data: Mapping[str, Any]
    directions: np.ndarray

    @property
    def edges(self) -> frozenset[tuple[str, str]]:
        """The edges between variables, heads and the output: channels between two heads are left out."""
        writers: dict[str, list[str]] = {each["id"]: list(each["written_by"]) for each in self.data["channels"]}
        pairs = [(edge["from"], edge["to"]) for edge in self.data["edges"] if edge["to"] not in writers]
        return frozenset((head, target) for source, target in pairs for head in writers.get(source, [source]))


def read_truth(folder: PathLike, task: BenchmarkTask) -> Truth:
    """Read the answer of a model."""
    place = os.path.join(os.fspath(folder), ANSWERS, task.name)
    data = read_json(os.path.join(place, TRUTH))
    if data.get("format") != TRUTH_FORMAT:
        raise FileError(f"{place!r} has no answer of format {TRUTH_FORMAT!r}")
    k, width = len(data["channels"]), task.model.width
    double = np.dtype("<f8")
    shapes = {"directions": (k, width), "readers": (k, width), "basis": (width, width), "dual": (width, width)}
    layout = {name: (double, shape) for name, shape in shapes.items()}
    tensors, _ = read_tensors(os.path.join(place, TENSORS), layout, MAX_CHECKPOINT_BYTES)
    return Truth(data, tensors["directions"])


def score(folder: PathLike, answers: PathLike) -> dict[str, Any]:
    """Score a file of answers against a benchmark.

    Parameters
    ----------
    folder : str or path
        A benchmark, with its answers.
    answers : str or path
        The submission: a JSON file as described in docs/ground-truth.md.

    Returns
    -------
    dict
        `method`, `answered`, `models` with the scores of every model, and `summary` with their means: over all models,
        by disguise, and by level.

    Raises
    ------
    FileError
        If a file is missing or has another format.
    InputError
        If the answers name models, heads or variables that do not exist.

    Examples
    --------
    >>> import json, tempfile
    >>> from attnc import groundtruth
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (row,) = groundtruth.make(1, seed=0, out=f"{folder}/benchmark", disguises=["plain"])
    ...     edges = [{"from": "L0H0", "to": "output"}]
    ...     answers = {"format": "attnc.ground-truth.answers/1", "answers": {row["name"]: {"edges": edges}}}
    ...     with open(f"{folder}/answers.json", "w") as file:
    ...         json.dump(answers, file)
    ...     found = groundtruth.score(f"{folder}/benchmark", f"{folder}/answers.json")
    >>> found["models"][0]["edge_precision"]
    1.0
    """
    tasks = {name: read_task(folder, name) for name in read_index(folder)}
    method, found = read_answers(answers, tasks)
    rows = []
    for name, task in tasks.items():
        truth = read_truth(folder, task)
        about = {
            "name": name,
            "level": truth.data["level"],
            "disguise": truth.data["disguise"],
            "answered": name in found,
        }
        rows.append(about | score_answer(task, truth, found.get(name, Answer((), None, {}))))
    summary = [_mean("all", "all", rows)]
    for kind in ("disguise", "level"):
        for value in dict.fromkeys(row[kind] for row in rows):
            summary.append(_mean(kind, value, [row for row in rows if row[kind] == value]))
    return {"method": method, "answered": len(found), "models": rows, "summary": summary}


def _mean(kind: str, value: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: [row[name] for row in rows if row[name] is not None] for name in MEASURES}
    found = {name: float(np.mean(numbers)) if numbers else None for name, numbers in means.items()}
    return {"name": value, "kind": kind, "models": len(rows), **found}


def score_answer(task: BenchmarkTask, truth: Truth, answer: Answer) -> dict[str, float | None]:
    """Return the measures of one answer."""
    edges = truth.edges
    heads = _heads(edges)
    found: dict[str, float | None] = {}
    for name, submitted, wanted in (("edge", set(answer.edges), edges), ("head", _heads(answer.edges), heads)):
        right = len(submitted & wanted)
        precision, recall = right / max(1, len(submitted)), right / len(wanted)
        found |= {f"{name}_precision": precision, f"{name}_recall": recall}
        found[f"{name}_f1"] = 2 * precision * recall / (precision + recall) if right else 0.0
    found["average_precision"] = None if answer.scores is None else _average_precision(answer, edges)
    found["faithfulness"] = _faithfulness(task, truth, answer.edges) if answer.edges else 0.0
    found |= _variables(task, truth, answer.variables)
    return found


def _heads(edges: Sequence[tuple[str, str]] | frozenset[tuple[str, str]]) -> set[str]:
    return {node for edge in edges for node in edge if node[:1] == "L" and node != OUTPUT}


def _average_precision(answer: Answer, edges: frozenset[tuple[str, str]]) -> float:
    """Return the mean of the precisions at every true edge, in the order of the scores. Equal scores count as worst."""
    assert answer.scores is not None
    order = sorted(zip(answer.scores, answer.edges, strict=True), key=lambda pair: (-pair[0], pair[1] in edges))
    right, total = 0, 0.0
    for place, (_, edge) in enumerate(order, start=1):
        if edge in edges:
            right += 1
            total += right / place
    return total / len(edges)


def _faithfulness(task: BenchmarkTask, truth: Truth, edges: Sequence[tuple[str, str]]) -> float:
    clean, corrupted = (np.array(truth.data["pairs"][name], np.float64) for name in ("clean", "corrupted"))
    whole, other = task.model.run(clean), task.model.run(corrupted)
    circuit = task.model.run(clean, reading=task.model.circuit_reading(edges, other.nodes))
    missed = np.abs(circuit.output - whole.output).mean() / np.abs(other.output - whole.output).mean()
    return max(0.0, float(1 - missed))


def _variables(task: BenchmarkTask, truth: Truth, submitted: Mapping[str, Subspace]) -> dict[str, float]:
    clean, corrupted = (np.array(truth.data["pairs"][name], np.float64) for name in ("clean", "corrupted"))
    clean_output = np.array(truth.data["pairs"]["clean_output"])
    other = task.model.run(corrupted)
    accuracies, overlaps = [], []
    for each, direction in zip(truth.data["causal_variables"], truth.directions, strict=True):
        subspace = submitted.get(each["id"])
        if subspace is None:
            accuracies.append(0.0)
            overlaps.append(0.0)
            continue
        wanted, tolerance = np.array(each["patched_output"]), np.array(each["tolerance"])
        output = task.model.run(clean, swap=(subspace, other.streams)).output
        room = tolerance + CLOSE * np.abs(wanted - clean_output).mean()
        accuracies.append(float((np.abs(output - wanted) <= room).mean()))
        Q, _ = np.linalg.qr(subspace.directions.T)
        along = Q.T @ (direction / np.linalg.norm(direction))
        overlaps.append(float(along @ along) / Q.shape[1])
    return {"interchange": float(np.mean(accuracies)), "overlap": float(np.mean(overlaps))}
