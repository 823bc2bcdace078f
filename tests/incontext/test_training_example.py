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
    model = EXAMPLE["trained"](steps=200, layers=2, seed=0)
    rows = dict(EXAMPLE["table"](model, steps=200, layers=2, seed=0))
    trained = next(error for name, error in rows.items() if name.startswith("trained"))
    assert rows["ridge, the posterior mean"] < trained < rows["answer 0"]
    shares = EXAMPLE["layer_by_layer"](model, layers=2, seed=0)
    assert set(shares) == {"trained (probe)", "plain", "chebyshev", "newton"}
    assert all(len(each) == 3 for each in shares.values())


@pytest.mark.slow
def test_a_constructed_program_is_trained_on():
    pytest.importorskip("torch")
    before, after = EXAMPLE["trained_on"](layers=2, steps=40, seed=0)
    assert after < before
