"""Proofs over dyadic cells: the leaves cover the box exactly, the bound holds and is close to observed errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, arb_series

from attnc.numerics.limits import time_limit
from attnc.proofs.cells.branching import Budget, Covering, Leaf, branch_and_bound
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import Bounds, Kind
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.kinds.taylor import TaylorKind, choose_order, mean_value_model
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from proofs.exact_cells import cell_ends
from proofs.given_kinds import GivenKind
from proofs.small_stages import VARIABLES, enclosed, head_of, seen_error, spectral_stage, stage_of
from strategies.reference import precision


def prove(stage, f, pairs, **options) -> tuple[Covering, float]:
    """The proof as it is meant to be run, and the error at samples."""
    box = Box.parse(pairs, VARIABLES[: len(pairs)])
    observed = seen_error(stage, f, pairs)
    order, level = choose_order(lambda order: TaylorKind.of(stage, f, order), box, 1.03 * observed)
    kinds = [TaylorKind.of(stage, f, order), TaylorKind.at_kinks(stage, f, box)]
    return branch_and_bound(kinds, box, observed=observed, start_level=level, **options), observed


def check_cover(proof: Covering, d: int, *, complete: bool = True) -> None:
    """With integers alone: cells of their level, none twice or inside another, and of the volume of the box."""
    assert proof.complete == complete
    cells_of = {(leaf.level, leaf.index) for leaf in proof.leaves}
    assert len(cells_of) == len(proof.leaves) == len(proof.cells.upper)
    for level, index in cells_of:
        assert len(index) == d
        assert all(0 <= i < 2**level for i in index)
        ancestors = ((level - up, tuple(i >> up for i in index)) for up in range(1, level + 1))
        assert not any(ancestor in cells_of for ancestor in ancestors)
    assert sum(Fraction(1, 2 ** (d * leaf.level)) for leaf in proof.leaves) == 1


# The search, with methods that are known

UNIT = Box.parse([(0.0, 1.0)] * 2)


def linear_kind(slope: float, name: str = "linear") -> Kind:
    """|f − network| = |x + y| where the method overestimates by slope·r."""

    def bounds(centres, radii, goal):
        return Bounds((centres.sum(axis=1) + slope * radii.max(axis=1))[:, None], {"all": centres[:, :1]}, 0.0)

    return GivenKind(name, bounds, 3)


def test_the_bound_is_that_of_the_worst_leaf_and_within_the_tolerance():
    proof = branch_and_bound([linear_kind(2.0)], UNIT, observed=2.0, tolerance=0.05)
    check_cover(proof, 2)
    assert 2.0 <= proof.bound <= 2.1
    assert proof.bound == proof.cells.upper.max()
    worst = proof.leaves[int(np.argmax(proof.cells.upper))]
    (_, right), (_, top) = cell_ends(UNIT, worst.level, np.array(worst.index))
    assert right == top == 1
    assert {(leaf.kind, leaf.order) for leaf in proof.leaves} == {("linear", 3)}


@pytest.mark.parametrize("leaf", [Leaf("taylor", 6, 3, (1, 7)), Leaf("selection", None, 0, (0,))])
def test_leaves_are_stored_with_the_order_that_they_state(leaf):
    entry = leaf.as_json()
    assert len(entry) == 2 + (leaf.order is not None) + len(leaf.index)
    assert Leaf.from_json(entry, len(leaf.index)) == leaf


@pytest.mark.parametrize("entry", [None, [], "taylor", ["taylor", 6, 3], [3, 0, 0], ["x", 0.5, 0], ["x", True, 0]])
def test_entries_that_are_no_leaves_are_refused(entry):
    with pytest.raises(TypeError, match="leaf"):
        Leaf.from_json(entry, 1 if entry != ["taylor", 6, 3] else 2)


def test_a_goal_stops_the_search_early():
    fine, coarse = (branch_and_bound([linear_kind(8.0)], UNIT, observed=2.0, goal=goal) for goal in (0.0, 4.0))
    assert len(coarse.leaves) < len(fine.leaves)
    assert fine.bound <= 2.06 < coarse.bound <= 4.0
    check_cover(coarse, 2)


@pytest.mark.parametrize(("cells", "seconds"), [(100, math.inf), (10**6, 0.0)])
def test_out_of_budget_what_was_proved_is_returned(cells, seconds):
    kind, examined = linear_kind(8.0), 0

    def counted(centres, radii, goal):
        nonlocal examined
        examined += len(centres)
        return kind.bounds(centres, radii, goal)

    budget = Budget(cells=cells)
    with time_limit(counted=seconds):
        proof = branch_and_bound([GivenKind("counted", counted)], UNIT, observed=2.0, tolerance=1e-4, budget=budget)
    check_cover(proof, 2, complete=False)
    assert 2.0002 < proof.bound < 8.0
    assert examined <= 100


def test_the_best_method_of_each_cell_is_kept():
    def only_left(centres, radii, goal):
        upper = np.where(centres[:, 0] + radii[:, 0] <= 0.5, 0.5, np.inf)
        return Bounds(upper[:, None])

    proof = branch_and_bound([GivenKind("left", only_left), linear_kind(2.0)], UNIT, observed=2.0, start_level=1)
    check_cover(proof, 2)
    assert all((leaf.kind == "left") == (leaf.index[0] / 2**leaf.level < 0.5) for leaf in proof.leaves)


def test_halving_stops_at_the_floor_of_the_method():
    """An error of 0 can be proved to rounding, not to 0."""
    floor = 1e-15
    kind = GivenKind("rounded", lambda c, r, _: Bounds(floor + 1e-14 * r[:, :1], floor=np.full((len(c), 1), floor)))
    proof = branch_and_bound([kind], UNIT)
    assert proof.complete
    assert proof.bound <= 2e-15
    lost = GivenKind("lost", lambda c, r, goal: Bounds(np.full((len(c), 1), np.inf), floor=np.inf))
    proof = branch_and_bound([lost], UNIT, budget=Budget(cells=100))
    assert proof.bound == np.inf
    assert not proof.complete


# Proofs

KINKED = {"c": 0.6, "pad": 2}
FITS = [
    ("sin(x)", [(-3, 3)], 17, {}, 1.05),
    ("sin(10*x)", [(-3, 3)], 129, {}, 1.05),
    ("1/(1 + 25*x**2)", [(-1, 1)], 65, {}, 1.05),
    ("sin(x) + cos(y)", [(-3, 3)] * 2, 17, {}, 1.1),
    ("exp(-x**2 - y**2)*sin(3*x + y)", [(-2, 2)] * 2, 33, {}, 1.1),
    ("exp(sin(x)*y)", [(-3, 3)] * 2, 33, {"cut": 1e-7}, 1.1),
    ("sin(x)*cos(y) + z**2", [(-3, 3)] * 3, 9, {"cut": 1e-4}, 1.2),
    ("(sin(x)*y, exp(x))", [(-1, 1)] * 2, 11, {"pad": 3}, 1.1),
    # Kinks, which end in tiny cells
    ("abs(x)", [(-1, 1.1)], 33, KINKED, 1.09),  # no cell ends at the kink
    ("relu(x - 0.3)", [(-1, 1)], 65, KINKED, 1.09),
    ("sqrt(x)", [(0, 1)], 33, KINKED, 1.09),  # no derivative at 0
    ("sqrt(x - 0.1)", [(0.1, 0.7)], 33, KINKED, 1.09),  # nor at an end that is no float sum
    ("abs(x - 0.3*y)", [(-1, 1)] * 2, 17, KINKED, 1.09),
]


@pytest.mark.parametrize(("text", "pairs", "n", "fit", "looseness"), FITS)
def test_fits_are_proved_closely(text, pairs, n, fit, looseness):
    stage, f = spectral_stage(text, pairs, n, **fit)
    proof, observed = prove(stage, f, pairs)
    check_cover(proof, len(pairs))
    assert observed <= proof.bound <= 1.04 * proof.seen <= looseness * 1.1 * observed
    assert math.fsum(proof.ledger.values()) == pytest.approx(proof.bound, rel=1e-6)
    assert fit is not KINKED or 3 in {leaf.order for leaf in proof.leaves}  # by mean values, at the kink


@pytest.mark.slow
@pytest.mark.parametrize(("text", "cut"), [("sin(x)*cos(y) + z**2", 1e-9), ("exp(sin(x)*y) + x*z", 1e-6)])
def test_cancellation_in_three_variables(text, cut):
    pairs = [(-3.0, 3.0)] * 3
    stage, f = spectral_stage(text, pairs, 15, cut=cut)
    proof, observed = prove(stage, f, pairs)
    check_cover(proof, 3)
    assert observed <= proof.bound <= 1.2 * observed


def test_exact_gates_are_proved_to_rounding():
    """x·σ(x) is exact with two keys: nothing but rounding remains, of the proof and of f's own enclosure."""
    silu = head_of((np.array([[0.0], [1.0]]), np.zeros(2), np.zeros((2, 1)), np.array([[[0.0]], [[1.0]]])))
    proof, _ = prove(stage_of([silu], 1), Expression.parse("silu(x)"), [(-20.0, 20.0)])
    assert proof.complete
    assert 0 < proof.bound <= 1e-12


def test_selection_and_taylor_leaves_together():
    anchors = np.linspace(-1, 1, 17)[:, None]
    beta = 1e7
    stage = stage_of([head_of((2 * beta * anchors, -beta * anchors[:, 0] ** 2, np.sin(anchors), None))], 1)
    f, box = Expression.parse("sin(x)"), Box.parse([(-1.0, 1.0)], ["x"])
    target = ExpressionTarget(f, box)
    observed = seen_error(stage, f, [(-1, 1)])
    proof = branch_and_bound([SelectionKind(stage, target), TaylorKind.of(stage, f, 6)], box, observed=observed)
    check_cover(proof, 1)
    assert observed <= proof.bound <= 1.06 * observed
    assert "selection" in {leaf.kind for leaf in proof.leaves}


def test_leaves_are_confirmed_by_another_method():
    """Derivatives of f − A over balls, by power series of the quotient itself, on 200 pieces of each leaf."""
    pairs = [(-3.0, 3.0)]
    stage, f = spectral_stage("sin(x)", pairs, 13)
    proof, _ = prove(stage, f, pairs)
    head, terms = stage.heads[0], 6
    slopes, offsets, values = head.slopes.mid[:, 0].tolist(), head.offsets.mid.tolist(), head.values.mid[:, 0].tolist()

    def series(x: arb) -> list[arb]:
        t = arb_series([x, 1], terms + 1)
        shift = slopes[len(slopes) // 2]
        exps = [((a - shift) * t + c).exp() for a, c in zip(slopes, offsets, strict=True)]
        top = sum((v * e for v, e in zip(values[1:], exps[1:], strict=True)), values[0] * exps[0])
        return (t.sin() - top / sum(exps[1:], exps[0])).coeffs()

    with precision(200):
        for leaf, bound in zip(proof.leaves, proof.cells.upper[:, 0].tolist(), strict=True):
            ((left, right),) = cell_ends(Box.parse(pairs), leaf.level, np.array(leaf.index))
            r = arb(float(right - left)) / 400
            confirmed = arb(0)
            for piece in range(200):
                c = arb(float(left)) + (2 * piece + 1) * r
                thin, fat = series(c), series(c + arb(0, float(r) * 1.0001))
                upper = sum((abs(a) * r**i for i, a in enumerate(thin[:terms])), abs(fat[terms]) * r**terms)
                confirmed = confirmed.max(upper)
            assert confirmed < 1.05 * bound


def test_the_mean_value_model_contains_the_function():
    f = Expression.parse("abs(x - 0.3*y) + sqrt(x + 1)*max(y, x**2)").with_variables(("x", "y"))
    box = Box.parse([(-1.0, 1.0)] * 2, ("x", "y"))
    rng = np.random.default_rng(2)
    for level in (0, 3, 9):
        index = rng.integers(0, 2**level, (20, 2))
        index[0] = 0
        centres, radii = cell_boxes(box, level, index)
        model = mean_value_model(f, box, centres, radii, 2)
        tau = rng.uniform(-1, 1, (20, 50, 2))
        values = f((centres[:, None] + radii[:, None] * tau).reshape(-1, 2)).reshape(20, 50)
        guess = model.mid[:, 0, :1] + np.einsum("bi,bti->bt", model.mid[:, 0, 1:3], tau)
        assert (np.abs(values - guess) <= model.remainder + 1e-15).all()
        assert np.isfinite(model.remainder).all()


def test_outputs_have_their_own_bounds():
    heads = [head_of((np.array([[0.0], [1.0]]), np.zeros(2), np.array([[0.0, 0.0], [1.0, 100.0]]), None))]
    f = Expression.parse("(sigmoid(x) + 1e-3*sin(x), 100*sigmoid(x))")
    proof, _ = prove(stage_of(heads, 1), f, [(-3.0, 3.0)])
    first, second = proof.cells.upper.max(axis=0)
    assert 1e-3 <= first <= 1.04e-3
    assert second <= 1e-3
    assert proof.bound == first


def test_read_outs_are_subtracted():
    stage, f = spectral_stage("sin(x)", [(-3, 3)], 13)
    f = Expression.parse("sin(x) + 2*x - 1")
    plain, _ = prove(stage, Expression.parse("sin(x)"), [(-3, 3)])
    with_slope = type(stage)(stage.heads, enclosed([-1.0]), enclosed([[2.0]]))
    proof, _ = prove(with_slope, f, [(-3, 3)])
    assert proof.bound == pytest.approx(plain.bound, rel=0.05)
