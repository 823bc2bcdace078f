"""The number of keys of a gate for each error, and the tables of these numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.beyond.gates import GATES
from attnc.constructions.fitting.circuit import Circuit
from attnc.constructions.fitting.gate import (
    EXP_HINTS,
    IDENTITY_HINTS,
    OTHER_RECIPES,
    decay,
    identity,
    reciprocal,
    solved_gate,
)
from attnc.errors import InputError
from attnc.functions.gate_table import RECIPROCAL
from attnc.functions.registry import FUNCTIONS
from constructions.fitting.gate.references import BY_NAME, usual

NUM_KEYS = {
    **{name: {1e-9: 2} for name in ("sigmoid", "silu", "relu")},
    **{name: {1e-9: 3} for name in ("mish", "clip")},
    "gelu": {5.6e-5: 5, 2.6e-6: 6, 1e-7: 8, 2.3e-10: 10, 1e-12: 14},
    "gelu_tanh": {2.7e-6: 6, 1e-7: 8, 5.7e-9: 10},
    "erf": {1e-7: 8},
    "softplus": {1e-7: 5, 1e-11: 8},
    "exp": {6.7e-8: 6, 2e-9: 7},
    "elu": {1e-7: 7},
    "hardswish": {1e-8: 7},
    "softsign": {1e-4: 18},
    "atan": {1e-3: 16},
}
"""By name: the number of keys for each eps."""


@pytest.mark.parametrize("name", NUM_KEYS)
def test_numbers_of_keys(name):
    for eps, keys in NUM_KEYS[name].items():
        gate = GATES[name](eps)
        assert gate.error <= eps
        assert gate.num_anchors == keys


LEAST = {"gelu_tanh": 1.8e-10, "atan": 3.9e-5, "softsign": 4.1e-7}
"""The least eps that refusals name; the other gates reach 1e-12."""


@BY_NAME
@settings(max_examples=30)
@given(exponent=st.floats(-12, 0))
def test_the_error_is_at_most_eps_or_the_refusal_says_what_is_possible(name, exponent):
    eps = 10.0**exponent
    least = LEAST.get(name, 0.0)
    if eps >= least:
        assert 0 <= GATES[name](eps).error <= eps
    elif eps <= 0.9 * least:  # `least` is rounded up: just below it there may be a gate
        with pytest.raises(InputError, match=rf"Choose eps ≥ {least:g}\."):
            GATES[name](eps)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "softplus", "erf", "atan"])
def test_the_table_says_what_its_rows_give(name):
    recipe = OTHER_RECIPES[name][1] if name in OTHER_RECIPES else FUNCTIONS[name].gate
    for p, row in recipe.rows.items():
        error = solved_gate(name, recipe, p).error
        assert 0.92 * row[-1] <= error <= 1.03 * row[-1]
    errors = [row[-1] for row in recipe.rows.values()]
    assert errors == sorted(errors, reverse=True)


def test_hints_say_what_fits_give():
    reciprocal_hints = {p: row[-1] for p, row in RECIPROCAL.items()}
    for hints, keys in ((IDENTITY_HINTS, identity), (EXP_HINTS, decay), (reciprocal_hints, reciprocal)):
        for p, hint in hints.items():
            assert 0.92 * hint <= keys(p)[1] <= hint


@BY_NAME
def test_values_are_small(name):
    gate = usual(name)
    circuit = Circuit(["x"])
    gate.build(circuit, circuit.input(0))
    for head in circuit.heads:
        for numbers in (head.keys.values, head.keys.carried):
            assert numbers is None or np.abs(numbers).max() <= 12 * gate.lipschitz


def test_gelu_weighs_x_by_numbers_close_to_0_and_1():
    carried = GATES["gelu"](1e-12).keys.carried[:, 0, 0]
    assert carried[0] == 0
    assert carried[-1] == 1
    assert np.abs(carried - np.round(carried)).max() < 0.006
