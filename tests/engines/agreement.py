"""Networks of each construction, and checks that every engine and export passes: it computes what the reference does.

The tolerance is `ir.rounding`: the error that any evaluation in the program's dtype may have. `run(program, inputs)`
returns the outputs of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import attnc
from attnc.ir import Program
from ir.random_programs import lookup_program, programs_and_inputs, random_inputs
from ir.rounding import assert_agrees

Sizes = dict[tuple[Any, str], int]
"""New values of constants, by module and name."""
Run = Callable[[Program, tuple[np.ndarray, ...]], np.ndarray]

rng = np.random.default_rng(0)
LINEAR = attnc.TruncatedLinear(rng.normal(size=(3, 2)), 0.1, -1, 1, box=(-1, 1))
RELU = attnc.ReLUNetwork(
    [rng.normal(size=(5, 2)), rng.normal(size=(4, 5)), rng.normal(size=(2, 4))],
    [rng.normal(size=5), rng.normal(size=4), rng.normal(size=2)],
    (-1, 1),
)
SEQUENCE = attnc.SequenceTarget(lambda X: X.mean(axis=1, keepdims=True) + 0 * X, 2, 1, (-1, 1), lipschitz=1.0)
PAIR = attnc.SequenceTarget(lambda X, Y: X + Y.mean(axis=1, keepdims=True), (2, 1), (1, 1), (-1, 1), lipschitz=2.0)
NETWORKS = {
    "max_affine": lambda dtype: attnc.compile("sin(x) + cos(y)", [(-1, 1)] * 2, 0.3, dtype=dtype),
    "max_affine, sequence": lambda dtype: attnc.compile(SEQUENCE, eps=0.5, dtype=dtype),
    "max_affine_cross": lambda dtype: attnc.compile(PAIR, eps=0.8, dtype=dtype),
    "truncated_linear": lambda dtype: attnc.compile(LINEAR, eps=0.05, dtype=dtype),
    "truncated_linear_heads": lambda dtype: attnc.compile(
        LINEAR, eps=0.05, dtype=dtype, construction="truncated_linear_heads"
    ),
    "relu_network": lambda dtype: attnc.compile(RELU, eps=0.2, dtype=dtype),
}


def small_program(dtype=np.float64) -> Program:
    anchors = np.linspace(-1, 1, 9)
    return lookup_program(anchors, np.cos(anchors), 4.0, dtype)


def set_sizes(patch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    for (module, name), size in sizes.items():
        patch.setattr(module, name, size)


def assert_random_programs_agree(run: Run, sizes: Sizes, examples: int = 40, **options: Any) -> None:
    """Run random programs, with the constants `sizes` of modules changed so that tiny ones meet every path."""

    @settings(max_examples=examples, deadline=None)
    @given(programs_and_inputs(**options))
    def agree(case):
        program, inputs = case
        with pytest.MonkeyPatch.context() as patch:
            set_sizes(patch, sizes)
            assert_agrees(program, inputs, run(program, inputs))

    agree()


def assert_batches_agree(program: Program, run: Run) -> None:
    for batch in (0, 1, 7):
        inputs = tuple(array / 2 for array in random_inputs(program, batch, batch))
        assert_agrees(program, inputs, run(program, inputs))


def assert_wide_logits_agree(dtype, run: Run) -> tuple[Program, np.ndarray]:
    """Logits that span a million give no NaN. Return the program and its points."""
    anchors = np.linspace(-1, 1, 101)
    program = lookup_program(anchors, np.cos(anchors), 1e6, dtype)
    points = np.linspace(-1, 1, 37)[:, None].astype(dtype)
    assert_agrees(program, (points,), run(program, (points,)))
    return program, points
