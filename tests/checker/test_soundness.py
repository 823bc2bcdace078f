"""Random networks against random functions: a bound below an error that was seen is never re-proved."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from flint import arb
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnc.targets.expressions.expression import Expression
from attnc_checker import check
from attnc_checker.checking import proof_of, read
from attnc_checker.expressions import parse
from attnc_checker.jets import add, models
from attnc_checker.leaves import linear
from checker.networks import NAMES, at_tau, box_of, grid, lattice_program, save, spectral, uniform
from strategies.expressions import expressions

BOX = {1: [(-1.5, 1.25)], 2: [(-1.0, 1.0), (-0.5, 1.0)]}


def random_case(data: st.DataObject, d: int, seed: int, hardness: float):
    """A text, its function, and a network: anchors anywhere or on a lattice, values at random."""
    text, rng = data.draw(expressions(NAMES[:d], max_depth=3)), np.random.default_rng(seed)
    lattice = grid([(-1.5, 1.5)] * d, 4)
    anchors = lattice if seed % 2 else rng.uniform(-2, 2, lattice.shape)
    program = lattice_program(anchors, rng.uniform(-2, 2, len(anchors)), [1.0] * d, [0.25] * d, hardness)
    return text, Expression.parse(text).with_variables(NAMES[:d]), program


@given(st.data(), st.integers(0, 2**20), st.sampled_from([0.2, 1.0, 40.0]), st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_a_bound_one_percent_below_a_seen_error_is_refused(data, seed, hardness, d):
    (text, f, program), points = random_case(data, d, seed, hardness), grid(BOX[d], {1: 801, 2: 41}[d])
    seen = float(np.abs(program(points)[:, 0] - f(points)[:, 0]).max())
    assume(1e-6 < seen < 1e6)
    kind = data.draw(st.sampled_from(["taylor", "selection"]))
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "net", program, text, BOX[d], uniform(kind, 6 // d, d, 6), 0.99 * seen)
        verdict = check(path, processes=1)
    assert not verdict.proved
    assert "is not re-proved" in verdict.reason


@given(st.data(), st.integers(0, 2**20), st.sampled_from([0.2, 1.0, 40.0, 3000.0]), st.integers(1, 2))
@settings(max_examples=80, deadline=None)
def test_every_leaf_is_above_what_is_seen_on_it(data, seed, hardness, d):
    text, f, program = random_case(data, d, seed, hardness)
    centre = [data.draw(st.floats(lo, hi)) for lo, hi in BOX[d]]
    half = [2.0 ** -data.draw(st.integers(2, 9)) for _ in BOX[d]]
    points = grid([(c - r, c + r) for c, r in zip(centre, half, strict=True)], {1: 301, 2: 25}[d])
    errors = np.abs(program(points)[:, 0] - f(points)[:, 0])
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "net", program, text, [(-4, 4)] * d, uniform("selection", 0, d), 1.0)
        prover = proof_of(*read(path)).subjects[0].prover
    box = box_of(centre, half)
    for kind, order in (("taylor", 5), ("taylor", 1), ("selection", 1)):
        try:
            found = prover.error(kind, order, box, arb(1e-3))
        except (ArithmeticError, ValueError):
            assert kind != "selection" or "sqrt" in text  # the others need a smooth function, or small boxes
            continue
        if found.is_finite():
            assert float(found.upper()) >= errors.max() * (1 - 1e-9) - 1e-12
            if kind == "selection":  # with any gap, though it be a bad one
                for limit in (1e-3 * found, 1e3 * found):
                    left = add(models(prover.function, box, 0)[0].poly, linear(prover._affine(0), box), -1)
                    won = prover._by_places(0, left, box, limit)
                    assert float(won.upper()) >= errors.max() * (1 - 1e-9) - 1e-12
        if order == 5 and max(half) <= 2**-7 and hardness <= 1 and "sqrt" not in text:
            assert float(found) <= 1.05 * errors.max() + 1e-3 * (1 + errors.max())  # and is no looser than need be


@given(st.data(), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_models_enclose_the_function(data, d):
    """Parser and Taylor models against attnc's own parser and numpy."""
    text = data.draw(expressions(NAMES[:d], max_depth=4))
    f = Expression.parse(text).with_variables(NAMES[:d])
    centre = [data.draw(st.floats(-3, 3)) for _ in range(d)]
    half = [2.0 ** -data.draw(st.integers(1, 8)) for _ in range(d)]
    m = data.draw(st.integers(0, 5))
    try:
        ((found, *_),) = models(parse(text, NAMES[:d]), box_of(centre, half), m)
    except ValueError:
        return
    tau = np.random.default_rng(0).uniform(-1, 1, (30, d))
    values = f(np.array(centre) + np.array(half) * tau)[:, 0]
    for t, value in zip(tau, values, strict=True):
        enclosed = at_tau(found, t.tolist())
        assert not enclosed.is_finite() or (enclosed + arb(0, 1e-9 * (1 + abs(value)))).contains(arb(float(value)))


def test_numbers_are_exact_and_operators_bind_as_in_python():
    def value(text, *x):
        return models(parse(text, NAMES), box_of((*x, 0, 0, 0)[:3], 0), 0)[0].poly[0]

    assert value("0.1*10 - 1") == 0
    assert value("-x**2", 3) == -9
    assert value("2**3**2") == 512
    assert value("x**(6/3)", -3) == 9
    assert value("x**-2", 2) == 0.25
    assert value("1e-3*1000 - x/4*4 + x", 7) == 1
    assert value("clip(x, -1, 0.75) + min(3, y, 2) + max(z, -1) + relu(-x) + sign(x)", 5, 4, -2) == 2.75
    assert value("floor(x) - pi + pi", -2.5).contains(-3)
    assert not value("log(x)", -1).is_finite()
    assert not value("x**0.5", -1).is_finite()
    assert not value("1/(x - x)", 1).is_finite()


@pytest.mark.slow
def test_large_certificates(tmp_path):
    """2,000 leaves of a 17² lattice, and a 9³ lattice: both within minutes, on two cores."""

    plane, space = "sin(x) + cos(y)", "sin(x)*cos(y)*exp(z/4)"
    cases = [
        (plane, [(-3, 3)] * 2, 17, 5, uniform("taylor", 5, 2, 8), 7e-10),
        (space, [(-1, 1)] * 3, 9, 2, uniform("taylor", 4, 3, 6), 1.02e-5),
    ]
    for number, (text, box, count, pad, leaves, bound) in enumerate(cases):
        f = Expression.parse(text).with_variables(NAMES[: len(box)])
        program = spectral(
            lambda *x, f=f: f(np.stack([part.ravel() for part in x], axis=-1)).reshape(x[0].shape),
            box,
            count,
            pad=pad,
        )
        path = save(tmp_path / f"net{number}", program, text, box, leaves, bound)
        verdict = check(path)
        assert verdict.proved, verdict.reason
