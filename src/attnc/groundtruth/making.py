"""Make a benchmark: expressions → certified checkpoints → disguises, each certified again → tasks and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnc.constructions.built import Progress
from attnc.errors import AttncError, BoundNotMet, InputError, whole_number
from attnc.exports.directory import json_bytes, network_files
from attnc.exports.safe_files import CONFIG, PathLike, pack_tensors, why_not_writable, write_whole
from attnc.exports.stock_layout import PAD, Checkpoint
from attnc.groundtruth.causal_model import CausalModel
from attnc.groundtruth.certifying import Original, certify, stages
from attnc.groundtruth.deviations import ChannelDeviations
from attnc.groundtruth.disguises import DISGUISES, PART, Model
from attnc.groundtruth.files import (
    ANSWERS,
    BENCHMARK,
    INDEX,
    INDEX_FORMAT,
    MODELS,
    TASK,
    TASK_FORMAT,
    TENSORS,
    TRUTH,
    TRUTH_FORMAT,
    WEIGHTS,
)
from attnc.groundtruth.generator import Example, draw_example
from attnc.groundtruth.running import OUTPUT, head_name
from attnc.numerics.arrays import Float
from attnc.numerics.threads import one_thread
from attnc.proofs.certificate import Certificate
from attnc.proofs.proof import Proof
from attnc.scheduling import finished
from attnc.stock.exporting import ASSUMPTIONS, DTYPE
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression

MOST_MODELS = 10_000
"""Most expressions of a benchmark. One takes about 3 s and 3 MB."""
MOST_SEED = 2**128
"""Seeds are below this. The seed determines the answers, so it should be drawn from all of these."""
EPS: Mapping[str, float] = {"sums": 1e-3, "products": 1e-3, "nested": 1e-3, "kinked": 0.02, "deep": 0.02}
"""The eps of fits by level. Kinks need steep scores, whose rounding in a mixed basis grows like 1/eps."""
LARGEST_BOUND = 0.05
"""Largest proven bound of any disguise, relative to the range of the function. An expression with a larger one is drawn
again: the effects of interventions would be hard to tell from the tolerance."""
MOST_DRAWS = 40
"""Most expressions that are drawn for one place. Of 100, 60 are kept."""
NOISE_SIZES = (2.0**-20, 2.0**-22, 2.0**-24)
"""Sizes of noise, relative to weights. The largest one is taken that does not more than double the noise of
channels."""
PAIRS, HELD_OUT = 24, 48
"""Numbers of pairs of clean and corrupted inputs: public ones, and those that the scorer uses."""
MOST_PAIRS_DRAWN = 4000
"""Pairs that are drawn until enough have effects with a proven tolerance."""
SAMPLED_POINTS = 2000
"""Points at which the range of a function and the observed error are taken."""
NAME_DIGITS = 5
METADATA = {"format": "pt"}
"""The metadata of tensors that transformers expects."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A model of the benchmark: a disguise of an expression, certified."""

    example: Example
    original: Original
    disguise: str
    structure: Model
    stored: Model
    deviations: ChannelDeviations
    proof: Proof
    observed: float
    pairs: Pairs


@dataclass(frozen=True, eq=False)
class Pairs:
    """Clean and corrupted inputs, with the exact effect of taking each causal variable from the corrupted run."""

    model: CausalModel
    clean: Float[np.ndarray, "pairs variables"]
    corrupted: Float[np.ndarray, "pairs variables"]
    effects: Mapping[str | None, tuple[np.ndarray, np.ndarray]]  # by channel, None for no intervention

    def part(self, rows: slice) -> dict[str, Any]:
        """Return some of the pairs as JSON: inputs, outputs, values and effects of the causal variables."""
        clean, corrupted = self.clean[rows], self.corrupted[rows]
        values = [self.model.values(points)[0] for points in (clean, corrupted)]
        outputs = [self.model.effect(points, points) for points in (clean, corrupted)]
        return {
            "pairs": {
                "clean": clean.tolist(),
                "corrupted": corrupted.tolist(),
                "clean_output": outputs[0].output.tolist(),
                "corrupted_output": outputs[1].output.tolist(),
                "tolerance": np.maximum(outputs[0].tolerance, outputs[1].tolerance).tolist(),
            },
            "causal_variables": [
                {
                    "id": channel.name,
                    "clean": values[0][channel.name].mid.tolist(),
                    "corrupted": values[1][channel.name].mid.tolist(),
                    "patched_output": self.effects[channel.name][0][rows].tolist(),
                    "tolerance": self.effects[channel.name][1][rows].tolist(),
                }
                for channel in self.model.channels
            ],
        }


def make(
    count: int,
    seed: int,
    out: PathLike,
    *,
    disguises: Sequence[str] | None = None,
    progress: Progress | None = None,
    cluster: str | None = None,
    processes: int | None = None,
) -> list[dict[str, Any]]:
    """Write a benchmark of models whose circuits and causal variables are known.

    Parameters
    ----------
    count : int
        Number of expressions. Each becomes one model per disguise.
    seed : int
        The same seed gives the same bytes. Keep it secret: it is enough to make the answers.
    out : str or path
        The folder to write. It must not exist.
    disguises : sequence of str, optional
        Names of disguises; by default all of them, and the plain model.
    progress : callable, optional
        Called during the work, with the current step and the fraction of it that is done.
    cluster : str, optional
        "local" for processes of this machine, or the address of a dask.distributed scheduler; by default this process.
    processes : int, optional
        The number of processes on this machine. By default one for each core.

    Returns
    -------
    list of dict
        For every model its name, level, disguise, expression, bound and observed error.

    Raises
    ------
    InputError
        If the folder cannot be written, or the count, the seed or a disguise is not possible.

    Examples
    --------
    >>> import os, tempfile
    >>> from attnc import groundtruth
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = groundtruth.make(1, seed=0, out=f"{folder}/benchmark", disguises=["plain", "rotated"])
    ...     sorted(os.listdir(f"{folder}/benchmark"))
    ['answers', 'benchmark.json', 'models']
    >>> [row["status"] for row in rows]
    ['proven', 'proven']
    """
    whole_number("count", count, 1, MOST_MODELS)
    whole_number("seed", seed, 0, MOST_SEED - 1)
    wanted = list(DISGUISES) if disguises is None else list(disguises)
    if not wanted or len(set(wanted)) != len(wanted) or any(name not in DISGUISES for name in wanted):
        raise InputError(
            f"disguises are some of {', '.join(DISGUISES)}, each once; found {', '.join(wanted) or 'none'}"
        )
    if reason := why_not_writable(out, BENCHMARK):
        raise InputError(f"cannot make a benchmark: {reason}")
    order = _rng(seed, "names").permutation(count * len(wanted))
    names = [f"m{place:0{NAME_DIGITS}d}" for place in np.argsort(order).tolist()]
    tasks = {n: (n, seed, wanted, names[n * len(wanted) : (n + 1) * len(wanted)]) for n in range(count)}
    models = dict[str, tuple[dict[str, bytes], dict[str, Any]]]()
    for done, (_, found) in enumerate(finished(models_of, tasks, cluster, processes), 1):
        models |= found
        if progress is not None:
            progress("making models", done / count)
    files, rows = dict[str, bytes](), list[dict[str, Any]]()
    for name in sorted(models):
        files |= models[name][0]
        rows.append(models[name][1])
    files[INDEX] = json_bytes({"format": INDEX_FORMAT, "models": [row["name"] for row in rows]}, INDEX)
    if progress is not None:
        progress("writing", 1.0)
    write_whole(out, files, BENCHMARK)
    return rows


def _rng(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a generator of its own for each purpose."""
    words = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in purpose]
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


@one_thread()
def models_of(
    number: int, seed: int, disguises: Sequence[str], names: Sequence[str]
) -> dict[str, tuple[dict[str, bytes], dict[str, Any]]]:
    """Return the files and the row of every model of one expression, by the names of the models."""
    variants = zip(names, made(number, seed, disguises), strict=True)
    return {name: (_files(name, variant), _row(name, variant)) for name, variant in variants}


def made(number: int, seed: int, disguises: Sequence[str]) -> list[Variant]:
    """Return all disguises of one expression. Expressions with large bounds are drawn again."""
    problem = ""
    for draw in range(MOST_DRAWS):
        example = draw_example(number, _rng(seed, number, draw, "expression"))
        try:
            hardest_first = sorted(disguises, key=list(DISGUISES).index, reverse=True)
            found = {each.disguise: each for each in _variants(example, seed, number, draw, hardest_first)}
            return [found[name] for name in disguises]
        except AttncError as error:
            problem = str(error)
    raise BoundNotMet(
        f"none of {MOST_DRAWS} expressions of level {example.level} could be certified in all disguises; the last "
        f"reason: {problem}",
        eps=LARGEST_BOUND,
    )


def _variants(example: Example, seed: int, number: int, draw: int, disguises: Sequence[str]) -> Iterator[Variant]:
    expression = Expression.parse(example.text).with_variables(tuple(example.box))
    target = ExpressionTarget(expression, Box.parse(example.box, tuple(example.box)))
    original = Original.of(target, EPS[example.level])
    plain, names = Model.plain(original.checkpoint), list(example.box)
    points = (
        target.box.lo + _rng(seed, number, draw, "sample").random((SAMPLED_POINTS, target.box.d)) * target.box.widths
    )
    wanted = target(points)[:, 0]
    for name in disguises:
        disguise, rng = DISGUISES[name], _rng(seed, number, draw, name)
        structure, state = disguise.restructured(plain, names, rng), rng.bit_generator.state
        sizes = NOISE_SIZES if disguise.has_noise else NOISE_SIZES[:1]
        quiet = (
            max(original.noise(structure, disguise.stored(structure, 0.0, rng)).values()) if disguise.has_noise else 0
        )
        for size in sizes:
            rng.bit_generator.state = state
            stored = disguise.stored(structure, size, rng)
            if size == sizes[-1] or max(original.noise(structure, stored).values()) <= 2 * quiet:
                break
        proof, found = certify(original, structure, stored)
        if not proof.bound <= LARGEST_BOUND * np.ptp(wanted):
            raise BoundNotMet(f"the bound of {example.text} is {proof.bound:.3g} if {name}", eps=LARGEST_BOUND)
        observed = float(np.abs(stored.running(names).run(points).output - wanted).max())
        pairs = _pairs(original, proof, found, target.box, _rng(seed, number, draw, name, "pairs"))
        yield Variant(example, original, name, structure, stored, found, proof, observed, pairs)


def _pairs(original: Original, proof: Proof, found: ChannelDeviations, box: Box, rng: np.random.Generator) -> Pairs:
    """Draw pairs whose effects are certain for all causal variables. Their names are in random order."""
    evidence = stages(proof)
    terms = sum(term.value for term in proof.terms if term.name in ("coefficients", "rounding", "truncation"))
    errors = {head.name: head.bound + head.noise for head in evidence.heads}
    model = CausalModel.of(evidence.heads, evidence.outputs[0], box.names, errors, max(terms, found.output))
    order = rng.permutation(len(model.channels))
    model = model.renamed({channel.name: f"v{order[i]}" for i, channel in enumerate(model.channels)})
    drawn = box.lo + rng.random((2, MOST_PAIRS_DRAWN, box.d)) * box.widths
    clean, corrupted = drawn.astype(np.float32).astype(np.float64)
    effects = {}
    is_certain = np.ones(len(clean), bool)
    for channel in (None, *(channel.name for channel in model.channels)):
        effect = model.effect(clean, corrupted, channel)
        effects[channel] = (effect.output, effect.tolerance)
        is_certain &= np.isfinite(effect.tolerance)
    rows = np.flatnonzero(is_certain)[: PAIRS + HELD_OUT]
    if len(rows) < PAIRS + HELD_OUT:
        raise BoundNotMet(f"only {len(rows)} pairs of inputs have certain effects", eps=LARGEST_BOUND)
    kept = {name: (output[rows], tolerance[rows]) for name, (output, tolerance) in effects.items()}
    return Pairs(model, clean[rows], corrupted[rows], kept)


def _row(name: str, variant: Variant) -> dict[str, Any]:
    example = variant.example
    return {
        "name": name,
        "level": example.level,
        "disguise": variant.disguise,
        "expression": example.text,
        "bound": variant.proof.bound,
        "status": "proven",
        "observed": variant.observed,
    }


def _files(name: str, variant: Variant) -> dict[str, bytes]:
    """Return the files of a model, by their paths in the benchmark."""
    public, private = f"{MODELS}/{name}", f"{ANSWERS}/{name}"
    checkpoint = _checkpoint(variant)
    files = {
        f"{public}/{CONFIG}": json_bytes(checkpoint.config(), CONFIG),
        f"{public}/{WEIGHTS}": pack_tensors(checkpoint.tensors(), METADATA),
        f"{public}/{TASK}": json_bytes(_task(name, variant), TASK),
        f"{private}/{TRUTH}": json_bytes(_truth(name, variant), TRUTH),
        f"{private}/{TENSORS}": pack_tensors(_truth_tensors(variant)),
    }
    return files | {f"{private}/certificate/{path}": content for path, content in _certificate(variant).items()}


def _checkpoint(variant: Variant) -> Checkpoint:
    """Return the stored model as a checkpoint, whose words have no names but that of padding."""
    model, m = variant.stored, variant.deviations.pinned
    E = model.embedding.copy()
    E[:, model.pinned] = 0.0
    E[model.tokens, model.pinned] = 2.0**m
    W_Q, W_K, W_V = (
        np.stack([W.reshape(-1, model.width).T for W in matrices]).astype(np.float32)
        for matrices in zip(*((of.W_Q, of.W_K, of.W_V) for of in model.layers), strict=True)
    )
    W_O = np.stack([of.W_O.transpose(0, 2, 1).reshape(-1, model.width) for of in model.layers]).astype(np.float32)
    words = tuple(PAD if word == model.pad else f"<{word}>" for word in range(len(E)))
    return replace(
        variant.original.checkpoint,
        words=words,
        embedding=E.astype(np.float32),
        W_Q=W_Q,
        W_K=W_K,
        W_V=W_V,
        W_O=W_O,
        slots={},
        pinned=m,
    )


def _task(name: str, variant: Variant) -> dict[str, Any]:
    model, box = variant.stored, variant.original.target.box
    return {
        "format": TASK_FORMAT,
        "name": name,
        "tokens": {"prefix": list(model.prefix), "query": model.query, "pad": model.pad, "output": model.output},
        "variables": [
            {"name": each, "token": token, "range": list(ends)}
            for token, (each, ends) in zip(model.variables, box.as_dict().items(), strict=True)
        ],
        "bound": {"value": variant.proof.bound, "status": "proven", "arithmetic": DTYPE, "attention": "eager"},
        **variant.pairs.part(slice(PAIRS)),
    }


def _truth(name: str, variant: Variant) -> dict[str, Any]:
    causal = variant.pairs.model
    writers, heads = _writers(variant), []
    for i, roles in enumerate(variant.stored.roles):
        for h, role in enumerate(roles):
            writes = writers[role.head] if role.kind == PART and role.head is not None else None
            heads.append({"name": head_name(i, h), "role": role.kind, "channel": writes})
    channels = []
    for channel in causal.channels:
        written_by = [str(head["name"]) for head in heads if head["channel"] == channel.name]
        channels.append(
            {
                "id": channel.name,
                "expression": causal.expressions[channel.name],
                "function": channel.function.text,
                "argument": channel.argument.text,
                "parents": list(channel.parents),
                "written_by": written_by,
                "after_layer": int(written_by[0][1:].partition("H")[0]),
                "error": channel.error,
                "interval": list(channel.interval),
            }
        )
    return {
        "format": TRUTH_FORMAT,
        **_row(name, variant),
        "box": variant.original.target.box.as_json(),
        "output": causal.output.text,
        "channels": channels,
        "heads": heads,
        "edges": _edges(channels, causal.parents_of_output),
        **variant.pairs.part(slice(PAIRS, None)),
    }


def _writers(variant: Variant) -> dict[str, str]:
    """Return the causal variable that every head of the plain network computes."""
    by_channel = {
        head.channel: channel.name
        for head, channel in zip(stages(variant.proof).heads, variant.pairs.model.channels, strict=True)
    }
    return {head.name: by_channel[head.writes[0]] for head in variant.original.checkpoint.network.heads}


def _edges(channels: Sequence[Mapping[str, Any]], outputs: Sequence[str]) -> list[dict[str, str]]:
    """Return the edges of the circuit: from variables and channels to heads, from heads to channels, to the output."""
    pairs = []
    for channel in channels:
        for head in channel["written_by"]:
            pairs += [(parent, head) for parent in channel["parents"]]
            pairs.append((head, channel["id"]))
    pairs += [(parent, OUTPUT) for parent in outputs]
    return [{"from": source, "to": target} for source, target in pairs]


def _truth_tensors(variant: Variant) -> dict[str, np.ndarray]:
    """Return the directions and the readers of the causal variables, and the basis of the stream."""
    stored, structure = variant.stored, variant.structure
    by_id = {channel: head for head, channel in _writers(variant).items()}
    writes = {head.name: head.writes[0] for head in variant.original.checkpoint.network.heads}
    places = [structure.dimensions[writes[by_id[channel.name]]] for channel in variant.pairs.model.channels]
    return {
        "directions": stored.basis[:, places].T.copy(),
        "readers": stored.dual[places],
        "basis": stored.basis,
        "dual": stored.dual,
    }


def _certificate(variant: Variant) -> dict[str, bytes]:
    """Return the files of the program with its certificate: it allows for the noise of this checkpoint."""
    original, text = variant.original, variant.example.text
    claim = Certificate(
        None,
        variant.observed,
        (),
        (
            "noise is the error that the checkpoint in the folder of this model, computed by transformers in float32, "
            "adds to a channel, and truncation its error in the output: attnc bounded both from its weights",
            *ASSUMPTIONS,
        ),
        "float64",
        "estimate",
        "inf",
        truncation=variant.deviations.output,
    ).proved(variant.proof, "staged proof")
    config = {
        "construction": "compose",
        "expression": text,
        "variables": list(original.target.box.names),
        "box": original.target.box.as_json(),
        "eps": None,
        "parameters": {},
        "command": None,
    }
    card = "# The program of a model of a benchmark\n\nIts certificate allows for the noise of the checkpoint.\n"
    certificates = {"certificate.json": claim.to_json(text, original.target.box)}
    return network_files(original.checkpoint.program().astype("float64"), config, certificates, card)
