"""The theorems about one head, against its average in exact arithmetic: they hold, and are not far from sharp."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx, fmpq
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc_checker.averages import Average
from attnc_checker.checking import precision
from attnc_checker.forms import Head, dense
from attnc_checker.jets import largest, over
from attnc_checker.leaves import _largest_mean, _where_winning
from attnc_checker.ranges import Box
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Vector, at, most
from checker.networks import at_tau, box_of, form, head_of, point, reduced, reduced_head, spectral

REAL, FLOAT32 = Arithmetic("real"), Arithmetic("float32")


def random_head(rng: np.random.Generator, d: int, keys: int, steepness: float, moves: bool) -> Head:
    def rows(scale, slope):
        table = rng.uniform(-1, 1, (keys, d + 1)) * np.array([scale] + [slope] * d)
        return [tuple(fmpq(*float(x).as_integer_ratio()) for x in row) for row in table]

    tables = (rows(2.0, steepness), 5), (rows(1.0, 1.0 if moves else 0.0), 2)
    scores, values = ([form(row, [3 * abs(x) for x in row], n) for row in table] for table, n in tables)
    return reduced_head(scores, values)


def made(head: Head, d: int = 1) -> Average:
    return Average.of(head, range(d))


def exactly(terms: dict, x: list) -> Vector:
    return at(dense(terms, range(len(x))), x)


def average(head: Head, x: list, shifts: list | None = None):
    """A(x) exactly, and the weights; scores shifted."""
    weights = (exactly(head.scores.terms, x) + Vector(shifts or [arb(0)] * head.num_keys)).each(arb.exp)
    values, whole = exactly(head.values[0].terms, x), sum(weights)
    return weights @ values / whole, weights / whole, values


def test_sums_in_the_worst_order():
    """After a weight of 1, weights of nearly u are lost one by one, and their products with more than 1 round up."""
    p, u = 1000, 2.0**-24
    w, v = np.float32([1, *[u * (1 - 2**-10)] * p]), np.float32([1, *[1 + 2**-8] * p])
    above = below = np.float32(0)
    for weight, product in zip(w, w * v, strict=True):
        above, below = above + product, below + weight
    terms = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(w, v, strict=True)]
    exact = sum(x * y for x, y in terms) / sum(x for x, _ in terms)
    error = abs(Fraction(float(above / below)) - exact)
    values = Vector(map(arb, v.tolist()))
    head = head_of([(0, 0)] * (p + 1), [(fmpq(*float(x).as_integer_ratio()), 0) for x in v])
    bound = FLOAT32.summation(head, 0, Vector(map(arb, w.tolist())), values)
    assert float(error) <= float(bound.lower()) <= 1.05 * float(error)


CORNERS = (-1.0, -0.5, 0.25, 1.0)


def farthest(head: Head, poly: dict, box: Box) -> arb:
    """The largest distance that is seen between the average and a polynomial."""
    taus = itertools.product(CORNERS, repeat=len(box.half))
    return most(abs(average(head, point(box, tau))[0] - at_tau(poly, tau)) for tau in taus)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 5), st.sampled_from([0.1, 1.0, 3.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_taylor_model(seed, d, keys, steepness, moves):
    rng = np.random.default_rng(seed)
    head, m = random_head(rng, d, keys, steepness, moves), int(rng.integers(1, 5))
    box = box_of(rng.uniform(-1, 1, d), rng.uniform(0.05, 0.6, d))
    poly, error = made(head, d).model(box, m, REAL)[0]
    assert farthest(head, poly, box) <= error


@pytest.mark.parametrize(
    ("scores", "values", "m", "half", "ratio"),
    [
        ([(0, -1), (0, 1)], [(-1, 0), (1, 0)], 2, 0.01, 2.1),  # tanh at 0: 2/3 of r³ are proved, 1/3 is true
        ([(0, 0), (-20, 1)], [(0, 0), (1, 0)], 1, 0.01, 1.05),  # next to an exponential: the remainder itself
        ([(0, 0), (-20, 1)], [(0, 0), (1, 0)], 4, 0.01, 1.05),
        ([(0, 0), (-20, 1)], [(0, 0), (0, 1)], 1, 1.0, 1.4),  # t·e^t: the remainder of the numerator
        ([(0, 0), (-20, 1)], [(0, 1), (0, 0)], 1, 1.0, 1.4),  # t/(1 + e^t): the remainder of the denominator
    ],
)
def test_the_taylor_model_is_nearly_sharp(scores, values, m, half, ratio):
    head, box = head_of(scores, values), box_of(0, half)
    poly, error = made(head).model(box, m, REAL)[0]
    seen = farthest(head, poly, box)
    assert seen <= error <= ratio * seen


def test_the_model_of_a_lattice_contains_its_average():
    head = reduced(spectral(lambda x, y: x * y, [(-1, 1), (0, 1)], 7, pad=2)).heads[0]
    box = box_of((0.3, 0.4), (0.1, 0.2))
    poly, error = made(head, 2).model(box, 6, Arithmetic("float64"))[0]
    assert farthest(head, poly, box) <= error < 1e-4


def test_a_key_that_wins_with_a_slope_of_many_digits():
    """Its slope less the mean of all slopes is a ball around 0."""
    head = head_of([(0, fmpq(1) + fmpq(1, 2**200)), (-1000, 0)], [(2, 0), (1, 0)])
    poly, error = made(head).model(box_of(0, 0.25), 4, REAL)[0]
    assert abs(poly[0] - 2) + error <= 1e-30


@given(st.integers(0, 2**32), st.integers(1, 2), st.sampled_from([0.5, 30.0]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_errors_of_scores_are_covered(seed, d, steepness, moves):
    """Scores that are off by all that is allowed, in the worst direction."""
    rng = np.random.default_rng(seed)
    head = random_head(rng, d, 4, steepness, moves)
    box = box_of(rng.uniform(-1, 1, d), rng.uniform(0.0, 0.05, d))
    head_average = made(head, d)
    poly, error = head_average.model(box, 6, FLOAT32)[0]
    plain = head_average.model(box, 6, REAL)[0][1]
    j, gaps, _ = head_average.gaps(box, FLOAT32)
    for tau in itertools.product((-1.0, 0.3, 1.0), repeat=d):
        x = point(box, tau)
        exact, _, values = average(head, x)
        off = FLOAT32.gamma(5) * exactly(head.scores.sizes, [abs(v) for v in x])
        worst = [e * (1 if v > exact else -1) for e, v in zip(off, values, strict=True)]
        moved, weights, _ = average(head, x, worst)
        assert abs(moved - at_tau(poly, tau)) <= error
        assert 0 < abs(moved - exact) <= error - plain
        for k, gap in enumerate(gaps):
            shifts = [arb(0)] * 4
            shifts[k], shifts[j] = off[k], -off[j]
            _, weights, _ = average(head, x, shifts)
            if k != j:
                assert weights[k] <= (-gap).exp() * weights[j]


@pytest.mark.parametrize("slack", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("seed", range(8))
def test_where_scores_may_be_off_by_anything_values_are_as_far_apart_as_they_are(seed, slack):
    rng, box = np.random.default_rng(seed), box_of(0.25, 2.0**-9)
    head = replace(random_head(rng, 1, 4, 2.0, seed % 2 == 0), slack=Vector([arb(slack)] * 4))
    poly, error = made(head).model(box, 6, FLOAT32)[0]
    for tau, signs in itertools.product((-1.0, 0.3, 1.0), itertools.product((-1, 1), repeat=4)):
        moved, _, values = average(head, point(box, (tau,)), [arb(slack * sign) for sign in signs])
        assert abs(moved - at_tau(poly, (tau,))) <= error
        assert error <= 1.05 * (max(values) - min(values)) + 1e-3


def test_errors_of_scores_count_where_weights_are_largest():
    """The weight of the second key grows 20 times from the centre of the box to its end."""
    head, box = head_of([(0, 0), (-20, 1)], [(0, 0), (1, 0)]), box_of(0, 3.0)
    poly, error = made(replace(head, slack=Vector([arb(0), arb(0.1)]))).model(box, 20, REAL)[0]
    moved, _, _ = average(head, point(box, (1.0,)), [arb(0), arb(0.1)])
    seen = abs(moved - at_tau(poly, (1.0,)))
    assert seen <= error <= 1.01 * seen


def test_where_weights_are_not_known_values_count_on_the_whole_box():
    """The average of x and −x is 0. Scores that may be off by 40 make it x or −x."""
    head = replace(head_of([(0, 0), (0, 0)], [(0, 1), (0, -1)]), slack=Vector([arb(40)] * 2))
    poly, error = made(head).model(box_of(0, 1.0), 4, REAL)[0]
    moved, _, _ = average(head, [arb(1)], [arb(40), arb(-40)])
    assert abs(moved - at_tau(poly, (1.0,))) <= error <= 2.01


class Recorded(Arithmetic):
    """Arithmetic that records its arguments."""

    behind: Vector
    shares: Vector

    def weights(self, errors: Vector, behind: Vector) -> Vector:
        self.behind = behind
        return super().weights(errors, behind)

    def summation(self, head: Head, o: int, weights: Vector, *sizes) -> arb:
        self.shares = weights
        return super().summation(head, o, weights, *sizes)


def test_scores_and_weights_on_the_whole_box():
    """How far a score may be behind the largest one, and how large computed weights may be."""
    head, off, box = head_of([(0, -1), (0, 1), (-8, 0)], [(0, 0)] * 3), arb(0.2), box_of(0, 1.0)
    head, by_gaps, by_model = replace(head, slack=Vector([off] * 3)), Recorded("float32"), Recorded("float32")
    made(head).gaps(box, by_gaps)
    made(head).model(box, 8, by_model)
    for tau, k in itertools.product((-1.0, 0.0, 1.0), range(3)):
        scores = exactly(head.scores.terms, point(box, (tau,)))
        assert most(scores) - scores[k] <= min(by_gaps.behind[k], by_model.behind[k])
        shifts = [off if other == k else -off for other in range(3)]
        assert average(head, point(box, (tau,)), shifts)[1][k] <= by_model.shares[k]


@pytest.mark.parametrize("terms", [(1, 2**-24 * (1 + 2**-10)), (1, 2**-24 * (1 + 2**-10), -1)])
def test_sums_of_the_terms_of_a_score(terms):
    """The second term makes the first sum round up by as much as a float32 sum near 1 can."""
    computed = np.float32(0)
    for term in terms:
        computed += np.float32(term)
    exact = sum(fmpq(*float(term).as_integer_ratio()) for term in terms)
    one = form((exact,), (sum(map(abs, terms)),))
    head = replace(reduced_head([one], [one]), addends=len(terms))
    (bound,) = made(head, 0).score_errors(Box([], []), FLOAT32, [])
    error = abs(arb(float(computed)) - arb(exact))
    assert error <= bound <= 1.01 * error


def test_weights_that_are_computed():
    """Scores are off, the difference from the largest one rounds, and the exponential is off by 4 ulp, 8u."""
    errors, behind = Vector([arb(1e-3), arb(2e-3)]), Vector([arb(0), arb(50)])
    far = behind[1] + sum(errors)
    worst = errors[1] + FLOAT32.u * (far + errors[1] - errors[0]) - (1 - 8 * FLOAT32.u).log()
    assert worst <= FLOAT32.weights(errors, behind)[1] <= 1.001 * worst


@pytest.mark.parametrize("x", [2.0**-150, 3e-45, 1e-40, 0.1, 1e30 / 3])
def test_casts_to_float32(x):
    assert abs(arb(float(np.float32(x))) - arb(x)) <= FLOAT32.cast_error(arb(x))


def test_rounding_of_scores_is_not_overstated():
    head = random_head(np.random.default_rng(1), 1, 4, 1.0, False)
    box = box_of(0.3, 2.0**-20)
    found = made(head).model(box, 4, FLOAT32)[0][1] - made(head).model(box, 4, REAL)[0][1]
    assert found <= 100 * FLOAT32.u


@given(st.integers(0, 2**32), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_keys_that_are_left_out_are_paid_for(seed, d):
    """Of keys with wide scores many are left out, for next to nothing; the average is that of all."""
    ctx.prec = 2000
    rng = np.random.default_rng(seed)
    head = random_head(rng, d, 40, 400.0, moves=bool(rng.integers(2)))
    box = box_of(rng.uniform(-1, 1, d), rng.uniform(0.0001, 0.002, d))
    near = made(head, d).without_far(box, REAL)
    assert len(near.kept) == 40 or 0 < near.dropped[0] <= 1e-22
    poly, error = near.model(box, 6, REAL)[0]
    assert farthest(head, poly, box) <= error


def test_most_of_many_keys_are_left_out():
    head = random_head(np.random.default_rng(0), 1, 40, 400.0, moves=False)
    assert len(made(head).without_far(box_of(0.9, 0.001), REAL).kept) < 20


def test_what_engines_leave_of_a_key_that_is_left_out_is_paid_for():
    """They may turn a weight e^−2000 into e^−700, and that times 1e300 is seen."""
    head = head_of([(0, 0), *[(-2000, 0)] * 3], [(0, 0), *[(10**300, 0)] * 3])
    near = made(head).without_far(box_of(0, 1), Arithmetic("float64"))
    assert len(near.kept) == 1
    weight = arb(-700).exp()
    assert near.dropped[0] >= 3 * weight / (1 + 3 * weight) * arb(10) ** 300


def zeros(keys: int) -> Head:
    return reduced_head(*[[form((), ())] * keys] * 2)


@pytest.mark.parametrize("keys", [2, 3, 8])
def test_sums_in_float32(keys):
    """Weighted sums by numpy, in two orders, values that cancel among them."""
    rng = np.random.default_rng(keys)
    worst, head = 0.0, zeros(keys)
    for _ in range(400):
        weights = np.exp(-rng.uniform(0, rng.choice([1.0, 30.0]), keys)).astype(np.float32)
        weights[0] = 1
        values = rng.choice([-1, 1], keys).astype(np.float32) * (1 + rng.random(keys).astype(np.float32) / 8)
        w, v = (Vector(map(arb, numbers.tolist())) for numbers in (weights, values))
        mean, shares = w @ v / sum(w), w / sum(w)
        for order in (slice(None), slice(None, None, -1)):
            top, bottom = np.float32(0), np.float32(0)
            for weight, value in zip(weights[order], values[order], strict=True):
                top, bottom = top + weight * value, bottom + weight
            off, bound = abs(arb(float(top / bottom)) - mean), FLOAT32.summation(head, 0, shares, abs(v), abs(mean))
            assert off <= bound
            worst = max(worst, float(off / bound))
    assert worst > 1 / (4 * keys)


def test_far_keys_are_not_counted_but_paid_for():
    far = [arb(2) ** -40] * 1000
    ones, head = Vector([arb(1)] * 1002), zeros(1002)
    few = FLOAT32.summation(head, 0, Vector([arb(0.5)] * 2 + far), ones, arb(1))
    all_of_them = FLOAT32.summation(head, 0, ones * (arb(1) / 1002), ones, arb(1))
    assert 2 * sum(far) < few < 20 * FLOAT32.u < 1000 * FLOAT32.u < all_of_them


def test_far_weights_are_lost_from_the_sum_of_weights():
    """Each of 1000 weights just below u/8 is lost. Their values are 0, so that only the sum of the weights is off."""
    far = 2.0**-27 * (1 - 2**-10)
    sizes = Vector([arb(1)] + [arb(0)] * 1000)
    error = 1 - 1 / (1 + 1000 * arb(far))
    assert error <= FLOAT32.summation(zeros(1001), 0, Vector([arb(1)] + [arb(far)] * 1000), sizes, arb(1))


def test_weights_that_may_be_lost_move_the_average():
    """An engine may make e^−700 of 1000 weights that are 0. Their values are V, and that of the other key is −V."""
    keys, V, lost = 1001, arb(10) ** 300, arb(-700).exp()
    moved = 2 * 1000 * lost * V / (1 + 1000 * lost)
    weights, sizes = Vector([arb(1)] + [arb(0)] * 1000), Vector([V] * keys)
    rounding = Arithmetic("float64").summation(zeros(keys), 0, weights, sizes, arb(0), arb(0))
    assert moved <= rounding <= 3 * moved


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_largest_mean(seed, keys):
    """Against all vertices of the polytope of weights: some keys at their limits, the others at zero."""
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=keys), rng.exponential(size=keys) * rng.choice([1e-3, 1.0, 1e3], keys)
    best = 0.0
    for chosen in itertools.product((0, 1), repeat=keys):
        w = weights * chosen
        best = max(best, float((w * values).sum() / (1 + w.sum())))
    found = float(_largest_mean(*(Vector(arb(float(x)) for x in numbers) for numbers in (values, weights))))
    assert best * (1 - 1e-12) <= found <= best * (1 + 1e-12) + 1e-15


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_where_a_key_can_win(seed, d):
    """No point that meets all conditions is left out, and on a line nothing else is kept."""
    rng = np.random.default_rng(seed)
    leads, slacks = rng.normal(size=(3, d + 1)) * rng.choice([1.0, 20.0]), rng.exponential(size=3)
    centre, half = rng.normal(size=d), rng.exponential(size=d)
    box = box_of(centre, half)
    found = _where_winning([tuple(arb(float(x)) for x in row) for row in leads], [arb(float(x)) for x in slacks], box)
    points = centre + half * rng.uniform(-1, 1, (2000, d))
    wins = (leads[:, 0] + points @ leads[:, 1:].T >= -slacks).all(axis=1)
    if found is None:
        assert not wins.any()
        return
    middle, reach = (np.array([float(x) for x in side]) for side in (found.centre, found.half))
    low, high = middle - reach, middle + reach
    inside = ((points >= low - 1e-12) & (points <= high + 1e-12)).all(axis=1)
    assert not (wins & ~inside).any()
    assert (low >= centre - half - 1e-12).all()
    assert (high <= centre + half + 1e-12).all()
    if d == 1:
        assert not (inside & ~wins)[np.abs(points[:, 0] - low) > 1e-9].any()


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_ranges_of_polynomials(seed, d, m):
    rng = np.random.default_rng(seed)
    exponents = [j for j in itertools.product(range(m + 1), repeat=d) if sum(j) <= m]
    coefficients = {j: float(x) for j, x in zip(exponents, rng.normal(size=len(exponents)), strict=True)}
    poly = {(sum(j) << 6 * d) + sum(n << 6 * i for i, n in enumerate(j)): arb(x) for j, x in coefficients.items()}
    tau = np.concatenate([rng.uniform(-1, 1, (300, d)), np.array(list(itertools.product((-1, 0, 1), repeat=d)))])
    values = sum(x * np.prod(tau ** np.array(j), axis=1) for j, x in coefficients.items())
    ball = over(poly, d)
    assert float(ball.lower()) <= values.min() + 1e-12
    assert float(ball.upper()) >= values.max() - 1e-12
    size = float(np.abs(values).max())
    limit = 1.3 * size
    found = float(largest(poly, arb(limit), d))
    assert size * (1 - 1e-12) <= found
    assert found <= limit or found <= float(abs(ball).upper())
    below = float(largest(poly, arb(0.9 * size), d))
    assert below > 0.9 * size


@pytest.mark.parametrize("side", [0, 1])
def test_where_a_key_wins_ends_of_the_box_stay_exact(side):
    """sign(x + y) may jump at a corner of the box, which a part of the box must not cross by a rounding."""
    box = Box.between([(fmpq(71, 256), fmpq(142, 512) + fmpq(1, 1024))] * 2)
    slope = arb(3) * (-1) ** side
    with precision():
        row = (-slope * arb(fmpq(71, 256) + fmpq(1, 3072)), slope, arb(0))  # positive beyond a third of the first side
        part = _where_winning([row], [arb(0)], box)
        kept, cut = (part.sides[0][end] for end in (1 - side, side))
        assert kept == box.sides[0][1 - side]
        assert part.sides[1] == box.sides[1]
        third = arb(fmpq(71, 256) + fmpq(1, 3072))
        assert (cut - third) * (-1) ** side <= 0
        assert abs(cut - third) < 1e-15
