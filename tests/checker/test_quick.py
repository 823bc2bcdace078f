"""Quick bounds: models of grids, long division, packed products, Bernstein coefficients, models on larger cells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flint import arb, fmpq
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc_checker import checking, jets
from attnc_checker.cells import Leaf
from attnc_checker.expressions import parse
from attnc_checker.forms import Form, Head
from attnc_checker.jets import above, halves, largest, multiply, over
from attnc_checker.moments import quotient
from attnc_checker.network import Stage
from attnc_checker.partitions import Partition
from attnc_checker.proving import LEVELS_UP, Subject
from attnc_checker.quick import QuickAverage
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Vector
from checker.networks import at_tau, box_of, form, point, reduced, reduced_head, spectral
from checker.test_averages import average

REAL, ANY_LIMIT = Arithmetic("real"), arb(10) ** 9


def exact(x: float) -> fmpq:
    return fmpq(*float(x).as_integer_ratio())


def holds(value: arb, model: tuple[dict[int, arb], arb], tau: Sequence[float]) -> bool:
    """Whether the value is within the error of a polynomial in the balls."""
    poly, error = model
    return bool(abs(value - at_tau(poly, tau)).lower() <= error)


def grid_head(rng: np.random.Generator, d: int, is_product: bool, moves: bool, left_out: int) -> Head:
    """Random slopes along each axis. Constants are sums over the axes, or random; some keys are left out."""
    sizes = rng.integers(1, 4, d)
    slopes, constants = ([rng.uniform(-2, 2, size) for size in sizes] for _ in range(2))
    places = [*itertools.product(*map(range, sizes))]
    places = places[: max(1, len(places) - left_out)]
    scores, values = [], []
    for place in places:
        c = sum(exact(constants[i][n]) for i, n in enumerate(place)) if is_product else exact(rng.uniform(-2, 2))
        scores.append(form((c, *(exact(slopes[i][n]) for i, n in enumerate(place))), [arb(0)] * (d + 1), 0))
        row = (exact(rng.uniform(-1, 3)), *(exact(rng.uniform(-1, 1) * moves) for _ in range(d)))
        values.append(form(row, [arb(0)] * (d + 1), 0))
    return reduced_head(scores, values)


@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_the_quick_model(seed, d, is_product, moves, left_out):
    rng = np.random.default_rng(seed)
    head, m = grid_head(rng, d, is_product, moves, left_out), int(rng.integers(1, 6))
    made, halves_of_sides = QuickAverage.of(head, range(d)), rng.uniform(0.05, 0.6, d)
    for _ in range(2):  # the second box shares axes with the first
        box = box_of(rng.choice([-0.75, 0.5], d), halves_of_sides)
        quick = made.quick_model(box, m, REAL, ANY_LIMIT)
        assert quick is not None
        for tau in itertools.product((-1.0, -0.5, 0.25, 1.0), repeat=d):
            assert holds(average(head, point(box, tau))[0], quick[0], tau)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_quick_model_is_nearly_as_sharp(d):
    head = reduced(spectral(lambda *x: np.prod(np.cos(x), axis=0), [(-1, 1)] * d, 6, pad=2)).heads[0]
    made, box = QuickAverage.of(head, range(d)), box_of([0.3] * d, [0.125] * d)
    (quick,), (sharp,) = (made.quick_model(box, 5, REAL, ANY_LIMIT) or {}).values(), made.model(box, 5, REAL).values()
    assert quick[1] <= 2 * sharp[1]


def test_the_quick_model_counts_errors_of_scores():
    head = grid_head(np.random.default_rng(1), 1, True, False, 0)
    off = [0.1 * (-1) ** k for k in range(head.num_keys)]
    box = box_of(0.25, 0.25)
    made = QuickAverage.of(replace(head, slack=Vector([arb(0.1)] * head.num_keys)), [0])
    quick = made.quick_model(box, 8, REAL, ANY_LIMIT)
    assert quick is not None
    for tau in (-1.0, 0.3, 1.0):
        moved, _, _ = average(head, point(box, [tau]), [arb(x) for x in off])
        assert holds(moved, quick[0], [tau])


def test_rounding_that_is_not_negligible_has_no_quick_model():
    head = reduced(spectral(lambda x: np.sin(x), [(-1, 1)], 9)).heads[0]
    made, box = QuickAverage.of(head, [0]), box_of(0.3, 0.125)
    assert made.quick_model(box, 6, Arithmetic("float64"), arb(1e-6)) is not None
    assert made.quick_model(box, 6, Arithmetic("float64"), arb(1e-13)) is None


def random_poly(rng: np.random.Generator, m: int, d: int) -> dict[int, arb]:
    powers = (j for j in itertools.product(range(m + 1), repeat=d) if sum(j) <= m)
    keys = sorted(sum(n * jets.variable(i, d) for i, n in enumerate(j)) for j in powers)
    return {key: arb(rng.uniform(-1, 1), 1e-9) for key in keys}


@pytest.mark.parametrize(("d", "m"), [(1, 5), (2, 4), (3, 3), (4, 2)])
def test_long_division(d, m):
    rng = np.random.default_rng(d)
    nu, delta = random_poly(rng, m, d), random_poly(rng, m, d)
    delta[0] = arb(5)
    Q, rest = quotient(nu, delta, m, d)
    for tau in itertools.product((-1.0, 0.5, 1.0), repeat=d):
        left = at_tau(nu, tau) - at_tau(Q, tau) * at_tau(delta, tau)
        assert left.mid() <= rest + left.rad()
        assert abs(left).lower() <= rest


@pytest.mark.parametrize(("d", "degrees", "m"), [(2, (5, 4), 6), (2, (3, 6), 4), (3, (4, 4), 5), (3, (2, 5), 3)])
def test_packed_products_are_the_same(monkeypatch, d, degrees, m):
    rng = np.random.default_rng(m)
    a, b = (random_poly(rng, n, d) for n in degrees)
    found = []
    for dense in (0, 10**9):
        monkeypatch.setattr(jets, "DENSE", dense)
        found.append(multiply(a, b, m, d))
    (packed, packed_rest), (plain, plain_rest) = found
    assert packed.keys() == plain.keys()
    assert all(packed[key].overlaps(x) for key, x in plain.items())
    assert max(packed) < above(m, d)
    assert packed_rest.overlaps(plain_rest)


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_halves_and_largest(seed, d):
    """Halves are the polynomial on halves of the cube, and the largest value of each is at most that of the whole."""
    rng = np.random.default_rng(seed)
    p = random_poly(rng, 3, d)
    taus = [*itertools.product((-1.0, -0.25, 0.5, 1.0), repeat=d)]
    for half, side in zip(halves(p, 0, d), (-1, 1), strict=True):
        for tau in taus:
            assert at_tau(half, tau).overlaps(at_tau(p, [(tau[0] + side) / 2, *tau[1:]]))
    seen = max(float(abs(at_tau(p, tau)).lower()) for tau in taus)
    whole = abs(over(p, d)).upper()
    for limit in (seen * 0.5, seen * 1.01, seen * 3):
        assert seen <= largest(p, arb(limit), d) <= whole.max(arb(limit))


def test_a_model_on_a_larger_cell_bounds_every_leaf_in_it(tmp_path: Path):
    attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-4, construction="spectral_grid").save(tmp_path / "net")
    with checking.precision():
        (subject,) = checking.proof_of(*checking.read(tmp_path / "net")).subjects
        assert isinstance(subject, Subject)
        (head,), claim = subject.prover.stage.heads, subject.claim
        parts = [(LEVELS_UP + 2, (i,)) for i in range(2 ** (LEVELS_UP + 2))]
        leaf, found = subject.leaves[0], []
        for cell in parts:
            bound = subject.larger.bound(subject, leaf, cell, claim.bound, 0.0)
            found.append(bound is not None)
            ((lo, hi),) = subject.sides(cell)
            for share in (0, fmpq(1, 3), 1):
                x = arb(lo + share * (hi - lo))
                error = abs(average(head, [x])[0] - x.sin())
                assert bound is None or error <= bound <= claim.bound
                assert subject.larger.bound(subject, leaf, cell, float(error.lower()) / 2 + 1e-300, 0.0) is None
                subject.larger.failures, _ = 0, subject.larger.known.clear()
        assert any(found)


def test_a_leaf_between_knots_shares_no_model(tmp_path: Path):
    """With knots, a part of a cell is not a half of its side, and the half of a polynomial would be another part."""
    attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-4, construction="spectral_grid").save(tmp_path / "net")
    with checking.precision():
        (subject,) = checking.proof_of(*checking.read(tmp_path / "net")).subjects
        uneven, leaf, cell = replace(subject, points=((-3.0, 2.5, 3.0),)), subject.leaves[0], (2, (1,))
        assert uneven.sides(cell) != subject.sides(cell)
        assert uneven.larger.bound(uneven, leaf, cell, 1.0, 0.0) is None
        within = (4, (5,))  # within one segment, parts are even again
        assert uneven.larger.bound(uneven, leaf, within, 1.0, 0.0) is not None


def test_provers_without_heads_share_no_models() -> None:
    """Leaves of partitions and chains have bounds of their own: they compare more than f."""
    prover = Partition(Stage([], [Form({}, {})], []), [], parse("0*x", ["x"]), REAL, [], 1, arb(0), [])
    claim = SimpleNamespace(ends=((0.0, 1.0),), variables=("x",), truncation=0.0, title="", beyond=None)
    subject = Subject(claim, (), (), prover, ((0.0, 1.0),))
    assert subject.larger.bound(subject, Leaf("taylor", 3, (2, (1,))), (2, (1,)), 1e-12, 0.0) is None
