"""How far off a program is: an expression on a box, and the largest error at points."""

from __future__ import annotations

import numpy as np

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Program
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.target import Target


def target_of(text: str, *sides: tuple[float, float]) -> ExpressionTarget:
    parsed = Expression.parse(text)
    return ExpressionTarget(parsed, Box.parse(sides, parsed.variables))


def error_at(program: Program, target: Target, points: np.ndarray) -> float:
    found = NumpyEngine(program)(*target.split(points)).reshape(len(points), -1)
    return float(np.abs(found - target(points)).max())
