"""Proofs of one-stage programs against all that can be thrown at them: no error is ever above its bound.

The bound is the tolerance: nothing is added to it. `comparisons` decides, by intervals or Arb.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc import constructions
from attnc.errors import AttncError, DomainError
from proofs.comparisons import Comparisons, engines_of
from proofs.proving import compare, constructed
from proofs.random_networks import (
    VARIABLES,
    circuit,
    exactly_described,
    partition,
    perturbed,
    random_case,
    random_target,
)
from strategies.expressions import expressions

pytestmark = pytest.mark.slow  # minutes of comparisons


@given(expressions(VARIABLES[:2], max_depth=3), st.integers(0, 2**32 - 1), st.sampled_from([partition, circuit]))
@settings(max_examples=20)
def test_any_program_against_any_expression(text, seed, family):
    rng = np.random.default_rng(seed)
    try:
        target = random_target(rng, text, int(rng.integers(1, 3)) if "y" not in text else 2)
    except AttncError:  # of no variable, or not defined on the box for certain
        return
    compare(Comparisons(), family(rng, target), target, count=300, seconds=0.3)


@pytest.mark.parametrize("seed", range(16))
def test_only_rounding_is_left_where_the_expression_is_the_network(seed):
    program, target = exactly_described(np.random.default_rng(seed), 1 + seed % 2)
    found, _ = compare(Comparisons(), program, target, seed, count=400, seconds=20.0)
    assert found.bound <= (1e-12 if program.dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("size", [1e-12, 1e-9, 1e-6, 1e-3, 1e-1])
@pytest.mark.parametrize("d", [1, 2])
def test_a_weight_that_was_changed_makes_the_bound_grow_as_far_as_it_must(d, size):
    """The error was rounding alone before."""
    rng, made = np.random.default_rng(int(-np.log10(size)) + 100 * d), Comparisons()
    for _ in range(4):
        program, target = exactly_described(rng, d)
        compare(made, perturbed(rng, program, size), target, count=200)
    assert made.unproved == 0


CONSTRUCTED = [
    ("spectral_grid", "exp(sin(2*x))", {"x": (-1, 2)}, {"num_anchors": 21}),
    ("spectral_grid", "sin(3*x)*cos(y)", {"x": (-1, 2), "y": (0, 1)}, {"num_anchors": 15}),
    ("spectral_grid", "tanh(x) + y*z", {"x": (-1, 2), "y": (0, 1), "z": (-1, 1)}, {"num_anchors": 7}),
    ("graded", "abs(x)", {"x": (-1, 2)}, {"num_anchors": 24}),
    ("graded", "sqrt(x) + sin(x)", {"x": (0, 2)}, {"eps": 1e-3}),
    ("binomial", "1/(1 + x**2)", {"x": (-2, 2)}, {"eps": 0.03}),
    ("gates", "relu(x - 0.3) - 2*silu(x)", {"x": (-2, 2)}, {"eps": 1e-5}),
    ("gates", "gelu(x) + x*y", {"x": (-2, 2), "y": (-1, 1)}, {"eps": 1e-3}),
    ("max_affine", "sin(x)*y", {"x": (-2, 2), "y": (-1, 1)}, {"points_per_axis": 9}),
    ("max_affine", "sqrt(x)", {"x": (0, 1)}, {"points_per_axis": 40}),
    ("max_affine", "sin(x)", {"x": (0, 1)}, {"points_per_axis": 40, "beta": 300.0}),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "text", "box", "options"), CONSTRUCTED, ids=[f"{c[0]} {c[1]}" for c in CONSTRUCTED])
def test_constructions_and_the_same_with_a_weight_changed(name, text, box, options, dtype):
    program, target = constructed(name, text, box, dtype=dtype, **options)
    made, rng = Comparisons(), np.random.default_rng(4)
    for size in (0.0, 1e-6, 1e-1):
        compare(made, perturbed(rng, program, size) if size else program, target, count=250)
    assert made.unproved == 0


def test_clipped_linear_functions():
    """`truncated_linear` has a target of its own; the same function as an expression."""
    expression = attnc.as_target("clip(1.5*x - 0.25, -1, 1)", {"x": (-2, 2)})
    own = attnc.TruncatedLinear(np.array([1.5]), np.array([-0.25]), -1.0, 1.0, [(-2, 2)])
    for options in ({"num_anchors": 33}, {"num_anchors": 9, "beta": 40.0}, {"num_anchors": 17, "dtype": "float32"}):
        program = constructions.truncated_linear(own, **options).program
        if program.input_shapes == ((1,),):
            found, worst = compare(Comparisons(), program, expression, count=400)
            assert found.bound <= 1.1 * worst + 1e-5


@pytest.mark.parametrize(("engine", "cases"), [("torch", CONSTRUCTED[::5]), ("onnxruntime", CONSTRUCTED[1::4])])
def test_other_engines(engine, cases):
    made = Comparisons()
    for name, text, box, options in cases:
        for dtype in ("float64", "float32"):
            program, target = constructed(name, text, box, dtype=dtype, **options)
            compare(made, program, target, count=400, engines=engines_of(program, ["numpy", engine]))
    assert made.seen[engine] >= 5_000


def test_a_million_comparisons(capsys):
    """Hundreds of programs: wide logits, any temperature, clusters, values of all sizes, one to three variables."""
    made, seed = Comparisons(), 0
    while made.count < 1_500_000 or made.proofs < 400:
        seed += 1
        rng = np.random.default_rng(10_000 + seed)
        try:
            program, target = random_case(rng, seed % 4)
        except DomainError:
            continue
        program = perturbed(rng, program, 10 ** rng.uniform(-12, -1)) if seed % 8 == 3 else program
        compare(made, program, target, seed)
    with capsys.disabled():
        print(f"\n{made}")
    assert made.unproved <= 0.02 * made.proofs
