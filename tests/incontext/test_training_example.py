"""The example runs, and its constructed programs reach the posterior mean."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/incontext_training.py"), run_name="example")


def test_constructed_programs_reach_the_posterior_mean():
    asked = EXAMPLE["prompts"](np.random.default_rng(0), 64)
    ideal = EXAMPLE["posterior_means"](asked)
    distances = [
        np.abs(EXAMPLE["answers"](EXAMPLE["constructed"](T, "chebyshev"), asked) - ideal).max() for T in (4, 16, 160)
    ]
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] <= 1e-6


@pytest.mark.slow
def test_training_learns_something():
    pytest.importorskip("torch")
    rows = dict(EXAMPLE["table"](steps=200, layers=2, seed=0))
    trained = next(error for name, error in rows.items() if name.startswith("trained"))
    assert rows["ridge, the posterior mean"] < trained < rows["answer 0"]
