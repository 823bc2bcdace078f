"""Selection leaves for sequences, two inputs and Python code: bounds hold, and are met by compiling."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.constructions import max_affine, max_affine_cross
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.proofs.selection_prover import prove_selection
from attnc.targets.target import Target
from proofs.mutations import change_a_constant, change_a_link, change_a_projection


def mixed(X):
    return np.tanh(X.sum(axis=1, keepdims=True)) * X / 2


def crossed(X, Y):
    return np.sin(X[..., 0] + Y.mean(axis=(1, 2))[:, None])[..., None] / 2


def one_sequence() -> Target:
    return attnc.SequenceTarget(mixed, tokens=2, width=1, box=(-1, 1), lipschitz=1.1)


def two_sequences() -> Target:
    return attnc.SequenceTarget(crossed, tokens=(2, 1), width=(1, 1), box=(-1, 1), lipschitz=1.0)


def code() -> Target:
    return attnc.as_target(lambda x: np.stack([np.sin(x[:, 0]), x[:, 1] / 2], axis=1), [(-1, 1)] * 2, 1.0)


def four_variables() -> Target:
    return attnc.as_target("x*y + z*w", {name: (-1, 1) for name in "xyzw"})


CASES = [
    (one_sequence, max_affine, 0.2),
    (one_sequence, max_affine_cross, 0.2),
    (two_sequences, max_affine_cross, 0.4),
    (code, max_affine, 0.1),
    (four_variables, max_affine, 1.0),
    (four_variables, max_affine_cross, 1.0),
]


def largest_error(program: Program, target: Target, seed: int = 0) -> float:
    """At random, at corners, and beside the borders of the cells."""
    rng = np.random.default_rng(seed)
    points = rng.random((4000, target.box.d))
    points[:500] = rng.integers(0, 2, (500, target.box.d))
    points[500:1500] = rng.integers(0, 43, (1000, target.box.d)) / 42
    points[1500:2000] = np.clip(points[500:1000] + rng.normal(size=(500, target.box.d)) * 1e-4, 0, 1)
    points = target.box.lo + points * target.box.widths
    engine = NumpyEngine(program)
    return float(np.abs(engine(*target.split(points)).reshape(len(points), -1) - target(points)).max())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("make", "construction", "eps"), CASES)
def test_bounds_hold(make, construction, eps, dtype):
    target = make()
    built = construction(target, eps=eps, dtype=dtype)
    found = prove_selection(built.program, target, eps=eps, time_budget=20)
    assert found.complete
    assert largest_error(built.program, target) <= found.bound <= eps


@pytest.mark.parametrize("mutate", [change_a_constant, change_a_link, change_a_projection])
def test_weights_that_were_changed_are_paid_for(mutate):
    target = one_sequence()
    built = max_affine(target, eps=0.3)
    for seed in range(6):
        program = mutate(np.random.default_rng(seed), built.program)
        try:
            found = prove_selection(program, target, eps=0.3, time_budget=1)
        except ProgramError:
            continue
        assert largest_error(program, target, seed) <= found.bound


def test_another_function_is_not_proved():
    target = one_sequence()
    built = max_affine(target, eps=0.2)
    other = attnc.SequenceTarget(lambda X: mixed(X)[:, ::-1], tokens=2, width=1, box=(-1, 1), lipschitz=1.1)
    found = prove_selection(built.program, other, eps=0.2, time_budget=2)
    assert largest_error(built.program, other) <= found.bound
    assert found.bound > 0.4


def test_another_shape_is_refused():
    built = max_affine(one_sequence(), eps=0.3)
    with pytest.raises(ProgramError, match="the target"):
        prove_selection(built.program, code())


def test_compile_proves_and_names_the_assumption():
    claim = attnc.compile(one_sequence(), eps=0.2).certificate
    assert claim.method == "proof under the stated assumption: Lipschitz constant 1.1 as given"
    assert claim.bound <= 0.2
    assert any("given" in sentence for sentence in claim.assumptions)
    assert {leaf[0] for leaf in claim.leaves} == {"selection"}
