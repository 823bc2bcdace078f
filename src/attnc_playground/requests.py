"""The requests that the server takes, read from JSON into types. Nothing in them is a path, a file or code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnc_playground.limits import (
    EPS_RANGE,
    MAX_EXPRESSION,
    MAX_KEYS,
    MAX_POINTS,
    MAX_SIDE,
    MAX_STEPS,
    MAX_VARIABLES,
)

DOWNLOADS = ("network", "onnx", "checkpoint", "files")
"""The forms of a download. The last one is for the page that verifies: JSON of the files of a network, in base 64."""
MODELS = ("descent", "ridge", "kernel")
INFINITE = {"inf": math.inf, "-inf": -math.inf}


class BadRequest(Exception):
    """The request cannot be read. The message states what was found and what is wanted."""


@dataclass(frozen=True)
class FunctionRequest:
    """A function, its box and eps."""

    expression: str
    box: dict[str, list[float | str]]
    eps: float | None = None
    norm: float | str = "inf"


@dataclass(frozen=True)
class CompileRequest(FunctionRequest):
    """A network to compile: either eps is enforced, or `points_per_axis` keys are taken as they are."""

    construction: str = "auto"
    points_per_axis: int | None = None
    beta: float | None = None


@dataclass(frozen=True)
class DownloadRequest(CompileRequest):
    """A network as a file."""

    kind: str = "network"


@dataclass(frozen=True)
class InContextRequest:
    """A regression in context: its points, the model, and the number, length and heads of its steps."""

    points: list[list[float]] = field(default_factory=list)
    model: str = "descent"
    degree: int = 1
    steps: int = 8
    step: float = 0.5
    heads: int = 4
    alpha: float = 0.1
    gamma: float = 4.0


Request = FunctionRequest | InContextRequest


def as_fields(request: Request) -> dict[str, Any]:
    """Return the request as JSON values, the same for equal requests."""
    return asdict(request)


def read(kind: str, body: bytes) -> Request:
    """Return the request of a kind ("compile", "plan", "download", "incontext") that the body states."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest('the body is not JSON. Send an object such as {"expression": "sin(x)", ...}.') from None
    if not isinstance(given, dict):
        raise BadRequest(f"the body must be a JSON object, found {type(given).__name__}.")
    return READERS[kind](_Fields(given))


class _Fields:
    """The fields of an object that are still to be read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)

    def take(self, name: str, default: Any = None) -> Any:
        found = self.given.pop(name, None)
        return default if found is None else found

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float | None:
        found = self.take(name, default)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not least <= found <= most:
            raise BadRequest(f"{name} must be a number from {least:g} to {most:g}, found {_shown(found)}.")
        return float(found)

    def count(self, name: str, least: int, most: int, default: int | None = None) -> int | None:
        found = self.take(name, default)
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most):
            raise BadRequest(f"{name} must be a whole number from {least} to {most}, found {_shown(found)}.")
        return found

    def word(self, name: str, default: str | None = None, choices: tuple[str, ...] = ()) -> str:
        found = self.take(name, default)
        if not isinstance(found, str) or len(found) > MAX_EXPRESSION or (choices and found not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else f"text of at most {MAX_EXPRESSION} characters"
            raise BadRequest(f"{name} must be {wanted}, found {_shown(found)}.")
        return found

    def done(self) -> None:
        if self.given:
            raise BadRequest(f"the field {_shown(next(iter(self.given)))} is unknown.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _function(fields: _Fields) -> dict[str, Any]:
    expression = fields.word("expression")
    box = fields.take("box")
    if not isinstance(box, dict) or not 1 <= len(box) <= MAX_VARIABLES:
        raise BadRequest(f'box must be an object of 1 to {MAX_VARIABLES} variables, such as {{"x": [-3, 3]}}.')
    ranges = {name[:40]: _range(name[:40], ends) for name, ends in box.items()}
    norm = fields.take("norm", "inf")
    if norm != "inf" and not (isinstance(norm, int | float) and not isinstance(norm, bool) and 1 <= norm <= 100):
        raise BadRequest(f'norm must be "inf" or a number from 1 to 100, found {_shown(norm)}.')
    return {"expression": expression, "box": ranges, "eps": fields.number("eps", *EPS_RANGE), "norm": norm}


def _range(name: str, ends: Any) -> list[float | str]:
    if not isinstance(ends, list) or len(ends) != 2:
        raise BadRequest(f'box: {name} must have two ends, such as [-3, 3] or ["-inf", "inf"], found {_shown(ends)}.')
    for end in ends:
        is_number = isinstance(end, int | float) and not isinstance(end, bool) and abs(end) <= MAX_SIDE
        if not (is_number or (isinstance(end, str) and end in INFINITE)):
            raise BadRequest(
                f'box: an end of {name} must be a number within ±{MAX_SIDE:g}, "inf" or "-inf", found {_shown(end)}.'
            )
    return [end if isinstance(end, str) else float(end) for end in ends]


def _compile(fields: _Fields) -> dict[str, Any]:
    found = _function(fields)
    found["construction"] = fields.word("construction", "auto")[:60]
    found["points_per_axis"] = fields.count("points_per_axis", 1, MAX_KEYS)
    found["beta"] = fields.number("beta", 1e-6, 1e12)
    return found


def _read_compile(fields: _Fields) -> Request:
    found = CompileRequest(**_compile(fields))
    fields.done()
    return _with_eps(found)


def _read_plan(fields: _Fields) -> Request:
    found = FunctionRequest(**_function(fields))
    fields.done()
    return found


def _read_download(fields: _Fields) -> Request:
    found = DownloadRequest(**_compile(fields), kind=fields.word("kind", "network", DOWNLOADS))
    fields.done()
    return _with_eps(found)


def _with_eps(request: CompileRequest) -> CompileRequest:
    if request.eps is None and request.points_per_axis is None:
        raise BadRequest("give eps, the largest error allowed, or points_per_axis, the number of keys.")
    return request


def _read_incontext(fields: _Fields) -> Request:
    points = fields.take("points")
    if not isinstance(points, list) or not 2 <= len(points) <= MAX_POINTS:
        raise BadRequest(f"points must be a list of 2 to {MAX_POINTS} pairs [x, y].")
    for point in points:
        is_pair = isinstance(point, list) and len(point) == 2
        if not is_pair or not all(type(end) in (int, float) and abs(end) <= 10 for end in point):
            raise BadRequest(f"a point must be a pair of numbers within ±10, found {_shown(point)}.")
    found = InContextRequest(
        points=[[float(x), float(y)] for x, y in points],
        model=fields.word("model", "descent", MODELS),
        degree=fields.count("degree", 1, 5, 1) or 1,
        steps=fields.count("steps", 1, MAX_STEPS, 8) or 1,
        step=fields.number("step", 0.01, 1.0, 0.5) or 0.5,
        heads=fields.count("heads", 1, 8, 4) or 1,
        alpha=fields.number("alpha", 1e-6, 1e3, 0.1) or 0.1,
        gamma=fields.number("gamma", 1e-3, 1e3, 4.0) or 4.0,
    )
    fields.done()
    return found


READERS: dict[str, Callable[[_Fields], Request]] = {
    "compile": _read_compile,
    "plan": _read_plan,
    "download": _read_download,
    "incontext": _read_incontext,
}
