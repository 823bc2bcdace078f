"""Functions that compile, refusals, and bounds under stress: extreme scales, infinite boxes, any name or number."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc import proving
from attnc.errors import AttncError, BoundNotMet, DomainError, ExpressionError, FileError, InputError
from attnc.numerics.limits import OutOfTime
from attnc.proofs.certificate import Standing
from strategies.expressions import expressions

BOX = {"x": (-1, 1), "y": (0, 2)}
BEYOND_GATES = 1.5e-14
"""An eps below the error of the most accurate gates, which is below 1e-12."""
EXTREME = [("x*1e307", 1e306), ("1e-170*sin(x)", 1e-171), ("x*1e-290", 1e-291)]
UNIT, REALS, TINY = {"x": (-1, 1)}, {"x": (-np.inf, np.inf)}, {"x": (0, 1e-42), "y": (0, 1)}


@pytest.mark.parametrize(
    ("source", "box", "eps", "method"),
    [
        ("sin(x) + cos(y)", BOX, 1e-3, "proof"),
        ("exp(sin(x)*y)", BOX, 1e-3, "staged proof"),
        ("sqrt(x)", {"x": (0, 1)}, 1e-3, "proof"),
        ("max(x, y)", BOX, 1e-2, "proof"),
    ],
)
def test_auto_brings_a_proof_and_is_no_larger_than_the_papers_grid(source, box, eps, method, tmp_path):
    net = attnc.compile(source, box, eps)
    claim = net.certificate
    assert (claim.method, claim.complete) == (method, True)
    assert 0 < claim.observed <= claim.bound <= eps
    assert claim.bound == pytest.approx(sum(term.value for term in claim.terms))
    if method == "proof":
        assert len(claim.leaf_bounds) == claim.num_leaves > 0
        assert max(claim.leaf_bounds) == claim.bound <= 1.1 * claim.observed
    else:
        assert claim.num_heads == net.program.num_heads
    (grid,) = (row for row in attnc.plan(source, box, eps) if row.name == "max_affine")
    assert grid.why_not is not None or net.num_anchors <= grid.anchors
    net.save(tmp_path / "net")
    assert attnc.load(tmp_path / "net").certificate == claim


def test_auto_brings_a_proof_in_four_variables():
    box = {"a": (-2.9, -2.7), "b": (0, 0.25), "c": (8, 9), "d": (5, 6)}
    assert attnc.compile("(1 + b)*atan(c) + sigmoid(d) + tanh(a)", box, 0.1).certificate.standing is Standing.PROVEN


@pytest.mark.parametrize(
    ("source", "box", "error", "words"),
    [
        ("sin(x", {"x": (0, 1)}, ExpressionError, "closed|end"),
        ("x.real", {"x": (0, 1)}, ExpressionError, "attribute|not allowed"),
        ("x**1e9", {"x": (0, 1)}, ExpressionError, "exponent"),
        ("x + y", {"x": (0, 1)}, InputError, "variable y .* has no box"),
        ("x", {"x": (0, 1), "z": (0, 1)}, InputError, "z is not a variable"),
        ("3", {"x": (0, 1)}, InputError, "no variables"),
        ("x", {}, InputError, "at least one variable"),
        ("x", None, InputError, "state the domain"),
        ("x", {"x": (1, 0)}, InputError, "reversed"),
        ("x", {"x": (1, 1)}, InputError, "empty"),
        ("x + y", {"x": (0, np.inf), "y": (0, 1)}, InputError, "not finite"),
        ("x", "x=0:1", InputError, "expected"),
        ("x", [(0, 1), (0, 1)], InputError, "2 interval"),
        ("1/x", {"x": (-1, 1)}, DomainError, "contains 0"),
        ("log(x)", {"x": (-1, 1)}, DomainError, "log"),
        ("sqrt(x)", {"x": (-1, 1)}, DomainError, "sqrt"),
        (3, {"x": (0, 1)}, InputError, "cannot compile a int"),
        *(
            ("x", {"x": ends}, InputError, "two numbers")
            for ends in ((0, np.nan), (0, 1, 2), "ab", (0, 10**400), "12", {0, 1})
        ),
        *(
            (source, box, InputError, r"is a single range; write \[\(-1")
            for box in ((-1, 1), [-1.0, 1.0], np.array([-1.0, 1.0]))
            for source in ("x*x", np.sin)
        ),
    ],
)
def test_bad_requests(source, box, error, words):
    with pytest.raises(error, match=words):
        attnc.compile(source, box, 0.1)


LAYERED = {"norm": 10, "construction": "max_affine"}


@pytest.mark.parametrize(
    ("source", "box", "eps", "options", "error", "words"),
    [
        ("sin(x)", REALS, 1e-3, {}, InputError, "on an infinite box .* made of gates.* there is no gate for sin"),
        ("x/3", REALS, 1e-3, {}, BoundNotMet, "exactly the slopes of"),  # x/3 and fl(1/3)·x are ever farther apart
        ("gelu(x)", REALS, 1e-3, {"construction": "spectral_grid"}, InputError, "finite box"),
        ("gelu(x)", REALS, 1e-3, {"construction": "max_affine"}, InputError, "finite box"),
        ("sin(x)", UNIT, 0.1, {"heads": 2}, InputError, "heads=2 .*='two_layer' or construction='attention_softmax'"),
        (lambda p: np.sin(50 * p[:, 0]), UNIT, 0.05, {"lipschitz": 1.0}, InputError, "cannot be right"),
        ("x**2", {"x": (1e6, 1e6 + 1)}, 1e-9, {"construction": "max_affine"}, BoundNotMet, r"\[1000000, 1000001\]"),
        ("1e-310*x*y", [(-1, 1)] * 2, 1e-320, {"construction": "max_affine"}, BoundNotMet, "eps"),
        ("x", {"x": (0, 1e-310)}, 1e-312, {"construction": "max_affine"}, InputError, "too wide or too narrow"),
        ("sin(x)", {"x": (1e-300, 1e-299)}, 1e-306, {}, BoundNotMet, r"^eps=\de-(299|30\d) is met, eps=1e-306 is not"),
        ("sign(x)*y", [(-1, 1)] * 2, 0.3, LAYERED, BoundNotMet, "The boundary layer is the largest part"),
        (
            "sign(x-0.3)*y",
            [(-1, 1)] * 2,
            0.01,
            {"norm": 10},
            BoundNotMet,
            r"The largest part is the boundary layer .*0\.0",
        ),
        ("sign(x+y)", [(-1, 1)] * 2, 0.01, {"norm": 2}, BoundNotMet, "boundary layer of cells across which f jumps"),
        ("sin(x)", UNIT, 0.1, {"also": "float64"}, InputError, "also is a second dtype beside float64: float32"),
        ("sin(x)", UNIT, 0.1, {"also": "float16"}, InputError, "also is a second dtype beside float64: float32"),
        ("x + y", TINY, 1e-3, {"dtype": "float32"}, InputError, "too small for float32: scale the variable"),
        ("x + y", TINY, 1e-3, {"also": "float32"}, InputError, "too small for float32: scale the variable"),
    ],
)
def test_requests_that_cannot_be_met(source, box, eps, options, error, words):
    """The message names the reason: the gates, the digits, the constructions that take an option, or the numbers."""
    with pytest.raises(error, match=words):
        attnc.compile(source, box, eps, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eps", eps) for eps in (0, -1, float("nan"), float("inf"), "a", True, 10**400)),
        *(("norm", norm) for norm in (0.5, "2", True, float("nan"))),
        ("criterion", "beauty"),
        ("dtype", "float16"),
        ("construction", "magic"),
        ("max_anchors", 0),
        ("max_bytes", 1.5),
        *(("beta", beta) for beta in (0, -1.0, float("inf"), "hot")),
        *(("points_per_axis", count) for count in (0, 2.5, True, "9", [9, 0], [])),
        *(("seconds", seconds) for seconds in (0, -1.0, float("nan"), float("inf"), "soon", None)),
    ],
)
def test_bad_options(name, value):
    with pytest.raises(InputError, match=name):
        attnc.compile("x", [(0, 1)], **{name: value})


@settings(max_examples=20)
@given(
    text=expressions(("x", "y")),
    dtype=st.sampled_from(["float64", "float32"]),
    construction=st.sampled_from(["auto", "max_affine"]),
)
def test_what_compiles_is_what_was_claimed(text, dtype, construction):
    """Engine, reference and loaded network agree; the bound holds for all of them."""
    expression = attnc.targets.expressions.expression.Expression.parse(text)
    box = {name: (-1, 1) for name in expression.variables}
    try:
        net = attnc.compile(text, box, 0.4, dtype=dtype, max_anchors=5000, construction=construction)
    except (BoundNotMet, DomainError, InputError):
        return
    points = np.random.default_rng(0).uniform(-1, 1, (200, len(net.variables)))
    truth = expression(points)[:, 0]
    for found in (net(points), net.program(points)):
        assert np.abs(found - truth).max() <= net.certificate.bound <= 0.4


def test_all_errors_are_of_one_family():
    for error in (BoundNotMet, DomainError, ExpressionError, FileError, InputError, attnc.ProgramError):
        assert issubclass(error, AttncError)


@pytest.mark.parametrize(
    ("source", "box", "eps", "options"),
    [
        ("x*1e-41", (-1e39, 1e39), 0.05, {"dtype": "float32"}),
        ("x*1e39", (-1, 1), 1e38, {"dtype": "float32"}),
        ("x", (-1e150, 1e150), 1e149, {"dtype": "float32"}),
        ("sin(x)*1e39", (-1, 1), 1e38, {"dtype": "float32"}),
        ("x*1e-36", (0, 1e39), 1.0, {"also": "float32"}),
        ("sin(x*1e-39)", (0, 1e39), 1e-2, {"also": "float32"}),
    ],
)
@pytest.mark.parametrize("construction", ["auto", "max_affine"])
def test_what_the_arithmetic_cannot_hold_is_refused(source, box, eps, options, construction):
    """An overflow would make the network NaN under a finite bound."""
    with pytest.raises(InputError, match=r"too wide or too narrow|more than float32 holds"):
        attnc.compile(source, {"x": box}, eps, construction=construction, **options)


def test_a_box_too_narrow_for_cells_is_wide_enough_for_an_affine_map():
    net = attnc.compile("x", {"x": (0, 1e-310)}, 1e-312)
    assert net.num_anchors == 0
    assert net.certificate.observed <= net.certificate.bound <= 1e-312


@pytest.mark.parametrize(("source", "eps"), EXTREME)
@pytest.mark.parametrize("norm", ["inf", 2, 400])
def test_extreme_scales_neither_under_nor_overflow(source, eps, norm):
    net = attnc.compile(source, {"x": (-1, 1)}, eps, norm=norm, construction="max_affine")
    assert 0 < net.certificate.observed <= 1.001 * net.certificate.bound <= 1.001 * eps
    assert net.certificate.bound <= 10 * net.certificate.observed


@pytest.mark.parametrize(("source", "eps"), [*EXTREME, ("sin(x)*1e307", 1e306), ("sin(x)*1e-290", 1e-291)])
def test_extreme_scales_by_auto(source, eps):
    """An affine function is exact; any other is no better than a few digits beyond eps."""
    net = attnc.compile(source, {"x": (-1, 1)}, eps)
    assert net.certificate.observed <= net.certificate.bound <= eps
    assert (net.certificate.observed == 0) == (net.num_anchors == 0)


@pytest.mark.parametrize(
    ("source", "most", "at_3"),
    [("x", 0.0, 3), ("x - 5*x", 0.0, -12), ("2*x + 1", 1e-13, 7), ("0.5*x - 3", 1e-13, -1.5)],
)
def test_affine_functions_are_proved_on_all_of_R(source, most, at_3):
    """Samples of x - 5*x itself round where those of the network do not: that is no contradiction."""
    net = attnc.compile(source, REALS, 1e-3)
    assert net([[3.0]])[0] == at_3
    assert (net.num_anchors, net.certificate.method, net.certificate.complete) == (0, "proof", True)
    assert net.certificate.observed <= net.certificate.bound <= most
    assert net.certificate.beyond.relative <= 1e-15


@pytest.mark.parametrize(
    ("source", "box", "eps"),
    [
        ("x", {"x": (0, 1e-301)}, 1e-303),  # too narrow for cells, wide enough for an affine map
        ("x", [(0, 1)], np.float32(0.1)),  # numbers of any kind are numbers
        ("bias*one + anchor", {"bias": (-1, 1), "one": (0, 1), "anchor": (0, 1)}, 0.5),  # variables may have any name
        (attnc.ReLUNetwork([np.ones((3, 40)) / 40, np.ones((1, 3))], [np.zeros(3), np.zeros(1)], (-1, 1)), None, 0.1),
    ],
)
def test_unusual_requests_are_met(source, box, eps):
    """The last one has 40 variables: its corners cannot all be tried."""
    net = attnc.compile(source, box, eps)
    assert net.certificate.observed <= net.certificate.bound <= eps
    assert (net.num_anchors == 0) == (source == "x")


def test_refusals_carry_what_was_asked_for():
    clip = attnc.TruncatedLinear([1.0])
    relu = attnc.ReLUNetwork([[[1.0]], [[1.0]]], [[0.0], [0.0]], (-1, 1))
    for target, construction in ((clip, "truncated_linear"), (clip, "truncated_linear_heads"), (relu, "relu_network")):
        with pytest.raises(BoundNotMet) as caught:
            attnc.compile(target, eps=1e-6, max_anchors=300, construction=construction, dtype="float32")
        best = caught.value.network
        assert (best.construction, best.dtype) == (construction, "float32")
        assert best.certificate.bound <= (1 + 1e-6) * caught.value.bound  # a proof may be closer than a theorem
        assert best.num_anchors <= 300
    with pytest.raises(BoundNotMet, match="max_bytes") as caught:
        attnc.compile("x", [(0, 1)], 0.01, max_bytes=1, construction="max_affine")
    assert caught.value.network is None


def test_auto_refuses_with_its_plan():
    with pytest.raises(BoundNotMet) as caught:
        attnc.compile("exp(sin(3*x)*y)", BOX, 1e-6, max_anchors=5)
    for name in ("compose", "spectral_grid", "max_affine"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "box", "eps", "options"),
    [
        ("sin(x)", {"x": (-3, 3)}, 1e-17, {}),  # no construction
        ("sin(x)", {"x": (-3, 3)}, 1e-15, {"construction": "spectral_grid"}),  # below rounding
        ("abs(x)", {"x": (-1, 1)}, 1e-4, {"construction": "spectral_grid", "max_anchors": 60}),
        ("sqrt(x)", {"x": (0, 1)}, 1e-9, {"construction": "graded", "max_anchors": 10}),
        ("sin(x)*y", {"x": (-3, 3), "y": (-1, 1)}, 1e-2, {"construction": "max_affine", "max_anchors": 500}),
        ("sin(x)*y", {"x": (-3, 3), "y": (-1, 1)}, 1e-4, {"max_anchors": 3}),
        ("sin(x)", {"x": (-3, 3)}, BEYOND_GATES, {}),
        ("sin(x)", {"x": (-3, 3)}, BEYOND_GATES, {"construction": "compose"}),
        ("gelu(x)", REALS, BEYOND_GATES, {"construction": "gates"}),
    ],
)
def test_a_refusal_tells_what_can_be_had(text, box, eps, options):
    """The best bound, where it is largest, and an eps that is met indeed."""
    with pytest.raises(attnc.BoundNotMet) as caught:
        attnc.compile(text, box, eps, **options)
    refusal = caught.value
    assert refusal.eps == eps < refusal.network.certificate.bound <= refusal.bound < math.inf
    if eps == BEYOND_GATES:
        assert refusal.network.certificate.bound == refusal.bound < 1e-12
    assert set(refusal.worst_box) == set(box)
    assert all(box[name][0] <= lo < hi <= box[name][1] for name, (lo, hi) in refusal.worst_box.items())
    met = _eps_that_is_met(refusal)
    assert met == pytest.approx(refusal.reach, rel=0.01)
    assert attnc.compile(text, box, met, **options).certificate.bound <= met


def _eps_that_is_met(refusal: BoundNotMet) -> float:
    """The one with which its message begins."""
    return float(re.match(r"eps=([0-9.]*[0-9](?:e[+-][0-9]+)?) is met, eps=\S+ is not\.\n", str(refusal))[1])


@pytest.mark.parametrize("construction", ["max_affine", "max_affine_cross", "two_layer", "attention_softmax", "auto"])
def test_without_eps_the_bound_is_reported_and_not_enforced(construction):
    """The parameters of the theorem are those that were given, and the bound holds at samples."""
    net = attnc.compile("sin(x)", {"x": (-3, 3)}, construction=construction, beta=50.0, points_per_axis=9)
    assert net.eps is None
    assert (net.parameters["points_per_axis"], net.parameters["beta"]) == ("9", 50.0)
    assert net.construction == ("max_affine" if construction == "auto" else construction)
    x = np.linspace(-3, 3, 2001)[:, None]
    assert np.abs(net(x) - np.sin(x[:, 0])).max() <= net.certificate.bound
    assert net.certificate.bound > 0.1, "far above the default eps"


@pytest.mark.parametrize("counts", [[3, 4], np.array([3, 4])])
def test_cells_may_differ_per_axis(counts):
    net = attnc.compile("x+y", {"x": (0, 1), "y": (0, 1)}, points_per_axis=counts, construction="max_affine")
    assert net.num_anchors == 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": 0.1, "points_per_axis": 9}, "give either eps or points_per_axis"),
        ({"points_per_axis": 9, "construction": "compose"}, "not an option of compose. Leave .* use .*max_affine"),
        ({"points_per_axis": (9, 9)}, "expected 1 whole number"),
        ({"points_per_axis": 9, "centres": "adaptive"}, "needs eps"),
    ],
)
def test_requests_without_eps_that_do_not_fit(options, words):
    with pytest.raises(InputError, match=words):
        attnc.compile("sin(x)", {"x": (-3, 3)}, **options)


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets how far a clock goes on whenever it is read."""

    def set_step(seconds: float) -> None:
        now = [0.0]

        def read() -> float:
            now[0] += seconds
            return now[0]

        monkeypatch.setattr(time, "monotonic", read)

    return set_step


@pytest.mark.parametrize(
    ("source", "eps", "options"),
    [
        ("max(x, y)", 1e-2, {}),
        ("abs(x)*sin(3*y)", 1e-3, {"construction": "compose"}),
        ("sign(x - 0.5)*y", 0.3, {"norm": 2}),
        ("x*y", 0.3, {"construction": "two_layer"}),
    ],
)
def test_a_slow_machine_makes_the_same_network(clock, source, eps, options, tmp_path):
    found = []
    for step in (0.0, 10.0):
        clock(step)
        attnc.compile(source, BOX, eps, seconds=1e9, **options).save(tmp_path / f"{step}")
        found.append([(tmp_path / f"{step}" / name).read_bytes() for name in ("model.safetensors", "certificate.json")])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("source", "eps", "options", "step"),
    [
        ("exp(sin(x)*y)", 1e-8, {"construction": "spectral_grid"}, "fitting"),
        ("exp(sin(x)*y)", 1e-3, {"construction": "compose"}, "fitting"),
        ("exp(sin(x)*y)", 0.05, {"construction": "max_affine"}, "choosing cells"),
        ("exp(sin(x)*y)", 0.05, {"construction": "max_affine", "centres": "adaptive"}, "placing centres"),
    ],
)
def test_a_refusal_names_the_step_that_was_not_finished_in_time(clock, source, eps, options, step):
    clock(1.0)
    with pytest.raises(BoundNotMet) as found:
        attnc.compile(source, BOX, eps, seconds=5.0, **options)
    words = f"within 5 s: the time ran out while {step}, by {options['construction']}"
    assert words in str(found.value)
    assert "seconds=20 (--seconds 20)" in str(found.value)


@pytest.mark.parametrize(("late", "observes"), [("observed_error", False), ("best_proof", True)])
def test_a_theorem_stands_if_there_is_no_time_to_observe_or_prove(monkeypatch, late, observes):
    def out_of_time(*_: object) -> None:
        raise OutOfTime(late)

    monkeypatch.setattr(proving, late, out_of_time)
    claim = attnc.compile("x*y", BOX, 0.3, construction="two_layer").certificate
    assert (claim.method if late == "best_proof" else "theorem", claim.observed is not None) == ("theorem", observes)
    assert claim.bound <= 0.3
    with pytest.raises(BoundNotMet, match=f"the time ran out while {late}, by spectral_grid"):
        attnc.compile("x*y", BOX, 0.3, construction="spectral_grid")


def test_plan_tells_which_costs_were_not_found_in_time(clock):
    clock(1.0)
    rows = attnc.plan("exp(sin(x)*y)", BOX, 1e-6, seconds=4.0)
    late = [row.name for row in rows if row.why_not is not None and "the time ran out" in row.why_not]
    assert "spectral_grid" in late
    assert "compose" in late


@pytest.mark.parametrize(
    ("source", "box"),
    [
        ("sin(x)", (1e-310, 1e-309)),
        ("sin(x)*exp(x)", (5e-324, 1e-322)),
        ("cos(x) - 1", (0, 1e-305)),
        ("abs(1e305*x)", (5e-324, 1e-322)),
        ("abs(1e305*x)", (-1e-306, 1e-306)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"construction": "spectral_grid"}])
def test_numbers_with_few_digits_are_refused_with_the_remedy(source, box, options):
    with pytest.raises(InputError, match=r"\|x\| ≤ .* is too small for float64: scale the variable"):
        attnc.compile(source, {"x": box}, 1e-320, **options)


def test_a_sine_of_small_numbers_is_known_to_all_its_digits():
    """Within 2^-49 of it would be 1.8e-7 here."""
    net = attnc.compile("1e8*sin(1e-8*x)", {"x": (-0.5, 0.5)}, 1.07e-10)
    assert net.certificate.bound <= 1.07e-10


@pytest.mark.parametrize(("expression", "norm"), [("sign(x*x + y - 0.2)", 2), ("floor(x + y)*x", 6)])
def test_an_eps_that_is_expected_to_be_met_is_met_beside_jumps(expression, norm):
    """The advice counts the boundary layer about the jumps, which is most of the error for a large p."""
    options = {"norm": norm, "max_anchors": 30_000}
    with pytest.raises(attnc.BoundNotMet, match="is expected to be met") as refused:
        attnc.compile(expression, [(-1, 1), (-1, 1)], 0.05, **options)
    net = attnc.compile(expression, [(-1, 1), (-1, 1)], refused.value.reach, **options)
    assert net.certificate.bound <= refused.value.reach


def test_a_coefficient_that_overflows_is_told():
    """Expanded, the square has a coefficient of 1.7e528."""
    case = ("2.14e-08*(8.89706e+267*x)**2", [(1.12397e-268, 1.12509e-268)])
    with pytest.raises(InputError, match="larger than float64 holds: scale the variables"):
        attnc.compile(*case, eps=4.8e-17, construction="gates")
    assert attnc.compile(*case, eps=4.8e-17).certificate.bound <= 4.8e-17
    assert attnc.compile(*case, eps=1e-9).certificate.method == "proof"
