"""A layer is linear in the prompt: its memory, and what a step stores."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import GLMTask, Task
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.prompt import Prompt


def prepared(rows: int, kind: str, steps: int = 3):
    prompt, schedule = Prompt(rows, 5), Schedule("nesterov", steps, 1e6, 1e5)
    differences = choose(Sizes(rows, 6, 3.0, 1.0, 2.0), 4, "float64")
    if kind == "logistic":
        task: Task = GLMTask(prompt, schedule, differences, 1.0, (0.1,) * 5)
    else:
        task = Task(prompt, schedule, differences, 10.0, (0.1,) * 5, mean=kind == "mean")
    X = np.random.default_rng(0).uniform(-1, 1, (rows, 5))
    return task.program(), task.inputs(np.zeros(5), X, np.ones(rows))


@pytest.mark.parametrize("kind", ["sum", "mean", "logistic"])
def test_memory_is_linear_in_the_prompt(kind):
    peaks = []
    for rows in (4_000, 16_000):
        program, inputs = prepared(rows, kind)
        run(program, inputs)
        tracemalloc.start()
        run(program, inputs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 5 * peaks[0]


@pytest.mark.parametrize("kind", ["sum", "logistic"])
def test_steps_share_what_they_store(kind):
    program, _ = prepared(50, kind, steps=200)
    stored = {id(layer.weight if hasattr(layer, "weight") else layer.heads) for layer in program.all_layers}
    assert len(program.all_layers) > 400
    assert len(stored) <= 6
