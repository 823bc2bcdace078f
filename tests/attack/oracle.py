"""Whether a forged certificate is false, decided without the checker.

A certificate is false if a point of its box has an error above its bound, in exact arithmetic or in an evaluation that
the certificate covers; if a point of the box is in no leaf; if a stage is off by more than its own bound, leaves its
interval, or the stages put together are another function. Points are sought in floating point and decided in Arb. A
norm is integrated numerically, and false if it is above the bound by more than that can be off.

A certificate is true if nothing that it states differs from one that was proved, but for a larger bound. All others
are undecided.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb
from safetensors import SafetensorError

from attack.files import MAIN, Files
from attnc.errors import AttncError, ExpressionError
from attnc.ir.program import Program, split_columns
from attnc.targets.expressions.evaluation import evaluate_points
from attnc.targets.expressions.expression import Expression
from proofs.comparisons import BITS, exactly
from proofs.exact_programs import LayerArithmetic
from strategies.reference import precision, tree_value

INFINITE = ("-inf", "inf")
SAMPLES, CONFIRMED = 400, 4
"""Random points at which errors are sought in floating point, and the number of worst points that Arb decides."""
CORNERS = 64
TAIL_SAMPLES = 200
"""Random points on each tail."""
NORM_ROOM = 1.03
"""A norm by quadrature is false if it exceeds the bound by this factor."""
STAGE_POINTS = 6
"""Points at which the claims about stages are evaluated in Arb."""
STAGE_ROOM = 1e-9
"""Stages are false if they miss their bound by this share of their values: texts have rounded coefficients."""
READERS = (AttncError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class Truth(enum.StrEnum):
    FALSE = "false"
    BROKEN = "broken"  # the files do not belong together, or state no whole proof
    UNREADABLE = "unreadable"  # attnc cannot read the program or the claim
    TRUE = "true"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Judgement:
    truth: Truth
    why: str = ""
    worst: float = 0.0  # the largest error of the whole network that Arb confirmed, rounded down
    points: np.ndarray | None = None  # where errors are large

    @property
    def is_false(self) -> bool:
        return self.truth in (Truth.FALSE, Truth.BROKEN)


class Meaning:
    """A text of definitions and outputs, `a = …; b = …; f, g`, as numpy and Arb evaluate it."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        *defined, outputs = text.split(";")
        self.names, self.parts = list(variables), list[tuple[str | None, Expression]]()
        for each in defined:
            name, _, body = each.partition("=")
            self.parts.append((name.strip(), Expression.parse(body.strip())))
        self.parts.append((None, Expression.parse(outputs.strip())))
        known = {*variables}
        for defines, parsed in self.parts:
            if missing := {*parsed.variables} - known:
                raise ExpressionError(f"unknown names {missing}")
            known |= {defines or ""}

    def __call__(self, points: np.ndarray) -> np.ndarray:
        values = {name: points[:, i] for i, name in enumerate(self.names)}
        for name, parsed in self.parts:
            steps, outputs = parsed.schedule
            found = evaluate_points(steps, values)
            columns = [np.broadcast_to(found[number], len(points)) for number in outputs]
            if name is not None:
                values[name] = columns[0]
        return np.stack(columns, axis=1)

    def exact(self, point: Sequence[float]) -> list[arb]:
        values = {name: arb(float(x)) for name, x in zip(self.names, point, strict=True)}
        for name, parsed in self.parts:
            found = [tree_value(tree, values) for tree in parsed.outputs]
            if name is not None:
                values[name] = found[0]
        return found


def judge(
    files: Files, original: Files, rng: np.random.Generator, hints: np.ndarray, samples: int = SAMPLES
) -> Judgement:
    """Decide whether the certificate is false. `hints` are points where the error of the original is large."""
    try:
        with np.errstate(all="ignore"):
            return _judge(files, original, rng, hints, samples)
    except READERS as error:
        return Judgement(Truth.UNREADABLE, f"{type(error).__name__}: {error}"[:200])


def _judge(files: Files, original: Files, rng: np.random.Generator, hints: np.ndarray, samples: int) -> Judgement:
    claim = files.certificate
    if broken := _contradiction(files):
        return Judgement(Truth.BROKEN, broken)
    program, bound, box = files.program, claim["bound"], claim["box"]
    if claim["dtype"] not in (str(program.dtype), "real"):
        return Judgement(Truth.BROKEN, "claimed for another dtype than that of the weights")
    names, ends = list(box), [tuple(pair) for pair in box.values()]
    if sum(math.prod(shape) for shape in program.input_shapes) != len(names):
        return Judgement(Truth.BROKEN, "the inputs are not the variables")
    if "table" in claim:
        return _judge_table(files, original, program)
    core = [tuple(claim["core"])] if claim.get("core") else ends
    if any(x in INFINITE for pair in core for x in pair) or not all(lo < hi for lo, hi in core):
        return Judgement(Truth.BROKEN, "the box is empty, or has no core")
    if claim["method"] == "proof" and (gap := uncovered(claim, len(names), rng)):
        return Judgement(Truth.BROKEN, gap)
    try:
        meaning = Meaning(claim["expression"], names)
    except ExpressionError as error:
        return Judgement(Truth.UNDECIDED, f"attnc cannot read the expression: {error}"[:200])
    lo, hi = np.array(core, float).T
    points = _points(lo, hi, rng, hints, samples)
    worst, where, why = _worst(program, meaning, points, bound if claim["norm"] == "inf" else math.inf, claim["dtype"])
    if claim["norm"] != "inf":
        why = _norm(program, meaning, lo, hi, float(claim["norm"]), bound)
    elif not why and claim.get("core"):
        why = _tails(program, meaning, claim, rng)
    if not why and claim["method"] == "staged proof":
        drawn = np.concatenate([points[: STAGE_POINTS // 2], rng.uniform(lo, hi, (STAGE_POINTS, len(lo)))])
        why = _stages(claim, program, meaning, drawn, files.weights == original.weights)
    if why:
        return Judgement(Truth.FALSE, why, worst, where)
    is_same = essence(files) == essence(original) and bound >= original.certificate["bound"]
    return Judgement(Truth.TRUE if is_same else Truth.UNDECIDED, "", worst, where)


def _contradiction(files: Files) -> str:
    """Why the files contradict each other or themselves, if they do."""
    claim, config = files.certificate, files.config
    if claim["weights_sha256"] != hashlib.sha256(files.weights).hexdigest():
        return "the hash is that of other weights"
    for name in ("expression", "box"):
        if config[name] != claim[name]:
            return f"config.json has another {name}"
    if config["variables"] != list(claim["box"]):
        return "config.json has other variables"
    if type(claim["bound"]) not in (int, float) or not claim["bound"] >= 0:
        return "the bound is no number ≥ 0"
    if claim["observed"] is not None and claim["observed"] > claim["bound"]:
        return "the bound is below the error that was observed"
    if (claim.get("truncation") or 0) < 0:
        return "the truncation is negative"
    points = f"proof at the table's {len(claim.get('table') or ()):,} points"
    if claim["method"] not in ("proof", "staged proof") and (not claim.get("table") or claim["method"] != points):
        return "the method is no proof"
    if (claim["method"] == points) == (claim["expression"] is not None):
        return "a table has no expression, and nothing else has a table"
    if files.name != MAIN and files.name != f"certificate.{claim['dtype']}.json":
        return "the name of the certificate is another dtype"
    return ""


def essence(files: Files) -> str:
    """All that the claim depends on, but for the bound, as a text."""
    claim, config = files.certificate, files.config
    named = ("expression", "box", "dtype", "norm", "method", "leaves", "core", "beyond", "table", "points", "outputs")
    stages = [{**stage, "term": None} for stage in claim.get("stages", [])]
    stated = {name: claim.get(name) for name in named}
    stated |= {"stages": stages, "truncation": claim.get("truncation"), "program": config["program"]}
    if claim["norm"] != "inf":
        stated["leaf_bounds"] = claim.get("leaf_bounds")
    return json.dumps(stated, sort_keys=True) + hashlib.sha256(files.weights).hexdigest()


def _points(lo: np.ndarray, hi: np.ndarray, rng: np.random.Generator, hints: np.ndarray, samples: int) -> np.ndarray:
    d, grid = len(lo), rng.integers(0, 33, (samples // 4, len(lo))) / 32
    corners = np.where(rng.random((min(CORNERS, 2 ** min(d, 7)), d)) < 0.5, lo, hi)
    found = [corners, lo + grid * (hi - lo), lo + rng.random((samples, d)) * (hi - lo)]
    if hints.ndim == 2 and hints.shape[1] == d and len(hints):
        near = hints[rng.integers(len(hints), size=samples)]
        found = [
            hints,
            near + rng.normal(size=near.shape) * 10 ** rng.uniform(-16, -1, (samples, 1)) * (hi - lo),
            *found,
        ]
    return np.clip(np.concatenate(found), lo, hi)


def _run(program: Program, points: np.ndarray) -> np.ndarray:
    return np.asarray(program(*split_columns(points, program.input_shapes)), np.float64).reshape(len(points), -1)


def _worst(
    program: Program, meaning: Meaning, points: np.ndarray, bound: float, dtype: str
) -> tuple[float, np.ndarray, str]:
    """Return the largest confirmed error, the points with large ones, and the reason if one is above the bound.

    Errors are those of the network in exact arithmetic. In float32 also those of the plain evaluation are errors that
    the certificate covers.
    """
    f, y = meaning(points), _run(program.astype("float64"), points)
    if f.shape != y.shape:
        return 0.0, points[:0], f"the network has {y.shape[1]} outputs, the expression {f.shape[1]}"
    if not np.isfinite(f).all():
        undefined = points[~np.isfinite(f).all(axis=1)][0]
        with precision(BITS):
            if not all(value.is_finite() for value in meaning.exact(undefined)):
                return math.inf, points[:0], f"the expression has no value at {undefined.tolist()}"
    error = np.nan_to_num(np.abs(f - y).max(axis=1), nan=math.inf)
    order, worst = np.argsort(-error)[: 4 * CONFIRMED], 0.0
    for i in order[:CONFIRMED]:
        worst = max(worst, _confirmed(meaning, points[i], exactly(program, points[i])))
        if worst > bound:
            return worst, points[order], f"the error is at least {worst!r} at {points[i].tolist()}"
    if dtype == str(program.dtype):
        evaluated = _run(program, points)
        error = np.nan_to_num(np.abs(f - evaluated).max(axis=1), nan=math.inf)
        for i in np.argsort(-error)[:CONFIRMED]:
            if not np.isfinite(evaluated[i]).all():
                return math.inf, points[order], f"the network is not finite at {points[i].tolist()}"
            worst = max(worst, _confirmed(meaning, points[i], [arb(y) for y in evaluated[i]]))
            if worst > bound:
                return worst, points[order], f"evaluated, the error is at least {worst!r} at {points[i].tolist()}"
    return worst, points[order], ""


def _confirmed(meaning: Meaning, point: np.ndarray, y: Sequence[arb]) -> float:
    """Return a lower bound of the error at the point."""
    with precision(BITS):
        errors = [abs(value - found).lower() for value, found in zip(meaning.exact(point), y, strict=True)]
        found = max((error for error in errors if error.is_finite()), default=arb(0))
        return max(0.0, math.nextafter(float(found), -math.inf))


def _tails(program: Program, meaning: Meaning, claim: Mapping[str, Any], rng: np.random.Generator) -> str:
    """Why the claim is false beyond the core: in exact arithmetic, or evaluated up to the reach of the claim."""
    (ends,), (lo, hi), bound = claim["box"].values(), claim["core"], claim["bound"]
    starts = ([(-1, lo)] if ends[0] in INFINITE else []) + ([(1, hi)] if ends[1] in INFINITE else [])
    for x in (end + side * (hi - lo) * 10.0**n for side, end in starts for n in range(-2, 7)):
        if _confirmed(meaning, np.array([x]), exactly(program, np.array([x]))) > bound:
            return f"the error is above the bound on the tail, at {x!r}"
    if claim.get("beyond") is None or claim["dtype"] != str(program.dtype):
        return ""
    relative, reach = claim["beyond"]["relative"], claim["beyond"]["reach"]
    far = np.exp(rng.uniform(0, math.log(max(2.0, reach)), TAIL_SAMPLES))
    points = np.concatenate([np.clip(end + side * far, -reach, reach) for side, end in starts])[:, None]
    points = points[(points[:, 0] < lo) | (points[:, 0] > hi)]
    y, allowed = _run(program, points), bound + relative * np.abs(points[:, 0])
    excess = np.nan_to_num(np.abs(meaning(points) - y).max(axis=1) / allowed, nan=math.inf)
    for i in np.argsort(-excess)[:CONFIRMED]:
        if not np.isfinite(y[i]).all():
            return f"the network is not finite at {points[i, 0]!r}, within the reach"
        if _confirmed(meaning, points[i], [arb(value) for value in y[i]]) > allowed[i]:
            return f"evaluated, the error is above the bound on the tail, at {points[i, 0]!r}"
    return ""


def _norm(program: Program, meaning: Meaning, lo: np.ndarray, hi: np.ndarray, p: float, bound: float) -> str:
    """Why the L_p norm is above the bound, by midpoints of two grids that have to agree."""
    if len(lo) > 2 or not p >= 1:
        return "" if p >= 1 else "there is no such norm"
    found = []
    for per_axis in ((4001, 8003), (61, 121))[len(lo) - 1]:
        axes = [a + (b - a) * (np.arange(per_axis) + 0.5) / per_axis for a, b in zip(lo, hi, strict=True)]
        points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
        errors = np.abs(meaning(points) - _run(program.astype("float64"), points)).max(axis=1)
        most = float(errors.max())
        volume = math.exp(float(np.log(hi - lo).sum()) / p)
        found.append(0.0 if not most else most * float(np.mean((errors / most) ** p)) ** (1 / p) * volume)
    agree = abs(found[0] - found[1]) <= (NORM_ROOM - 1) / 3 * found[1]
    return f"the norm is about {found[1]!r}" if agree and found[1] > NORM_ROOM * bound else ""


def uncovered(claim: Mapping[str, Any], d: int, rng: np.random.Generator) -> str:
    """Why the leaves do not cover the box: they are too small together, or a random point is in none."""
    cells, sides = list[tuple[int, ...]](), list[int]()
    for kind, *numbers in claim["leaves"]:
        if kind == "tail":
            sides += numbers
        else:
            cells.append(tuple(numbers[1:] if kind == "taylor" else numbers))
    (ends, *_) = claim["box"].values()
    wanted = [side for side, end in zip((-1, 1), ends, strict=True) if end in INFINITE]
    if sorted(sides) != wanted:
        return f"tails on the sides {sides}, infinite ends on {wanted}"
    if any(len(cell) != d + 1 or cell[0] < 0 or not all(0 <= i < 2 ** cell[0] for i in cell[1:]) for cell in cells):
        return "a leaf is no cell of the box"
    finest = max((cell[0] for cell in cells), default=0)
    if sum(2 ** (d * (finest - cell[0])) for cell in cells) < 2 ** (d * finest):
        return "the leaves are smaller than the box"
    known, levels = set(cells), {cell[0] for cell in cells}
    for _ in range(200):
        place = [int.from_bytes(rng.bytes(24), "little") for _ in range(d)]  # of 2^192 places along each axis
        if not any((level, *(x >> 192 - level for x in place)) in known for level in levels if level <= 192):
            return f"no leaf covers {[x / 2**192 for x in place]} of the box"
    return ""


def _judge_table(files: Files, original: Files, program: Program) -> Judgement:
    """Compare every row with the network, in exact arithmetic and evaluated."""
    claim = files.certificate
    rows, ends = claim["table"], np.array(list(claim["box"].values()), float)
    d, bound = len(ends), claim["bound"]
    if claim.get("points", len(rows)) != len(rows) or len({len(row) for row in rows}) != 1:
        return Judgement(Truth.BROKEN, "the rows are not as many, or not as long, as stated")
    table = np.array(rows, float)
    points, values = table[:, :d], table[:, d:]
    if not ((points >= ends[:, 0]) & (points <= ends[:, 1])).all():
        return Judgement(Truth.BROKEN, "a row is outside of the box")
    y = _run(program, points)
    if values.shape != y.shape:
        return Judgement(Truth.BROKEN, "the rows have not the outputs of the network")
    error, worst = np.nan_to_num(np.abs(values - y).max(axis=1), nan=math.inf), 0.0
    for i in np.argsort(-error)[:CONFIRMED]:
        is_evaluated = claim["dtype"] == str(program.dtype)
        for output in (exactly(program, points[i]), *([[arb(value) for value in y[i]]] if is_evaluated else [])):
            with precision(BITS):
                off = max(abs(arb(value) - found).lower() for value, found in zip(values[i], output, strict=True))
                worst = max(worst, math.nextafter(float(off), -math.inf))
    if worst > bound:
        return Judgement(Truth.FALSE, f"a row is off by {worst!r}", worst)
    is_same = essence(files) == essence(original) and bound >= original.certificate["bound"]
    return Judgement(Truth.TRUE if is_same else Truth.UNDECIDED, "", worst)


# --- stages -----------------------------------------------------------------------------------------------------------


def _stages(
    claim: Mapping[str, Any], program: Program, meaning: Meaning, points: np.ndarray, are_own_weights: bool
) -> str:
    """Why the claims about stages are false at one of the points."""
    try:
        stages = _Stages(claim, program, are_own_weights)
    except ExpressionError:
        return ""
    for point in points:
        with precision(BITS):
            if why := stages.lie_at(point, meaning):
                return f"{why}, at {point.tolist()}"
    return ""


class _Stages:
    """The claims about stages: as functions of the variables, and as the outputs of the layers of the network.

    A stage of other weights may be off by more than its own bound: values that depend on more than its input are
    counted in the bound of the whole.
    """

    def __init__(self, claim: Mapping[str, Any], program: Program, are_own_weights: bool) -> None:
        self.names, self.program, known = list(claim["box"]), program, dict[str, dict[str, Any]]()
        self.are_own_weights = are_own_weights
        self.stages = []
        for stage in claim["stages"]:
            like = {**known[stage["like"]], "argument_as": None, "carrier_as": None} if stage.get("like") else {}
            whole = {**like, **stage}
            known[whole["name"]] = whole
            self.stages.append(whole)
        texts = itertools.chain(
            claim["outputs"],
            *((s["function"], s["argument"], s.get("argument_as"), s.get("carrier")) for s in self.stages),
        )
        self.parsed = {
            text: Expression.parse(text).outputs[0] for text in texts if text is not None and ";" not in text
        }
        self.outputs = claim["outputs"]
        self.layers = {layer.name: i for i, layer in enumerate(program.layers)}

    def lie_at(self, point: np.ndarray, meaning: Meaning) -> str:
        at = {name: arb(float(x)) for name, x in zip(self.names, point, strict=True)}
        states = [state for state, _ in LayerArithmetic().states(self.program, list(at.values()))]
        ideal, actual = dict(at), dict(at)
        for stage in self.stages:
            name = stage["name"]
            t, unit = self._value(stage["argument"], ideal), self._unit(stage, ideal)
            low, high = stage["interval"]
            if t < arb(low) or t > arb(high):
                return f"stage {name} is given {t.str(6)}, outside of its interval"
            ideal[name] = unit * self._value(stage["function"], {"t": t})
            written = self._written(stage, states)
            held, carried = self._value(stage["argument"], actual), self._unit(stage, actual)
            if stage.get("held"):
                held = held.max(arb(stage["held"][0])).min(arb(stage["held"][1]))
            wanted = carried * self._value(stage["function"], {"t": held})
            actual[name] = written
            if stage.get("carrier") is None and self.are_own_weights:
                room = arb(stage["bound"]) + STAGE_ROOM * (abs(wanted) + abs(written))
                if abs(written - wanted) > room:
                    return f"stage {name} is off by {abs(written - wanted).str(6)}, claimed {stage['bound']!r}"
        wanted = meaning.exact(point)
        if len(self.outputs) != len(wanted):
            return "the stages have not as many outputs as the expression"
        for text, value in zip(self.outputs, wanted, strict=True):
            if not self._value(text, ideal).overlaps(value):
                return f"the stages put together are {self._value(text, ideal).str(12)}, and not {value.str(12)}"
        return ""

    def _value(self, text: str, at: Mapping[str, arb]) -> arb:
        return tree_value(self.parsed[text], at)

    def _unit(self, stage: Mapping[str, Any], at: Mapping[str, arb]) -> arb:
        return arb(1) if stage.get("carrier") is None else self._value(stage["carrier"], at)

    def _written(self, stage: Mapping[str, Any], states: Sequence[Any]) -> arb:
        name, _, token = stage["channel"].partition("@")
        number = self.layers[stage["stage"]]
        return states[number + 1][int(token or 0)][self.program.layers[number].channels.index(name)]
