"""References for programs: exact gradient steps in long double, the gradient of one step, scikit-learn's models."""

from __future__ import annotations

import numpy as np

from attnc.engines.prompt import run
from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import Task


def exact_path(schedule: Schedule, gradient, start: np.ndarray, proximal=lambda x, eta: x) -> np.ndarray:
    """The iterates from `start`; gradient(v) includes the smooth penalty, proximal(x, eta) the other."""
    v = p = start.astype(np.longdouble)
    path = [v]
    for eta, beta in schedule.pairs:
        eta, beta = np.longdouble(eta), np.longdouble(beta)
        step = proximal(v - eta * gradient(v), eta)
        if schedule.method == "nesterov":
            v, p = step + beta * (step - p), step
            path.append(p)
        else:
            v, p = step + beta * (v - p), v
            path.append(v)
    return np.stack(path)


def squared(X: np.ndarray, y: np.ndarray, penalty: np.ndarray):
    X, y = X.astype(np.longdouble), y.astype(np.longdouble)
    return lambda v: X.T @ (X @ v - y) + penalty * v


def one_gradient(task: Task, X: np.ndarray, y: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The gradient at `start`: a plain step of length 1 without penalty leaves start − g."""
    return start - run(task.program(), task.inputs(start, X, y))
