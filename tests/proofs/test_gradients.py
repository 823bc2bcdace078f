"""Bounds of gradients: they hold, they are tight, and what cannot be proved is refused with a remedy."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import attnc
import attnc_checker
from attnc.functions.registry import FUNCTIONS
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.kinds.taylor import head_slopes, prepared
from attnc.proofs.neighbourhoods import share_of
from attnc.proofs.stages.extraction import OneStage, stages
from attnc.proofs.taylor.polynomials import layout
from attnc.targets.expressions.derivatives import gradient
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.parsing import parse

SQUARE = {"x": (-2, 2), "y": (-2, 2)}
CASES = {
    "sin": ("sin(x)", {"x": (-3, 3)}, 1e-6, {}),
    "wave": ("exp(-x)*sin(3*x)", {"x": (-1, 2)}, 1e-6, {}),
    "bump": ("exp(-x**2-y**2)*sin(3*x+y)", SQUARE, 1e-6, {}),
    "float32": ("cos(2*x)", {"x": (-1, 1)}, 1e-3, {"dtype": "float32"}),
    "outputs": ("(sin(x), x**3)", {"x": (-1, 1)}, 1e-5, {}),
    "three": ("sin(x+y)*z", dict.fromkeys("xyz", (-1, 1)), 1e-3, {}),
}


def seen(net: attnc.Network, count: int = 4000) -> float:
    """The largest error of any slope at random points, in float64."""
    points = net.box.lo + np.random.default_rng(0).random((count, net.box.d)) * net.box.widths
    for band in net.certificate.excluded:
        points = points[~band.contains(points, net.variables)]
    exact = gradient(Expression.parse(net.expression).with_variables(net.variables))(points)
    return float(np.abs(net.gradient(points).reshape(len(points), -1) - exact).max())


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_and_is_close_to_the_error(name):
    text, box, eps, options = CASES[name]
    net = attnc.compile(text, box, eps, norm="C1", **options)
    claim = net.certificate
    assert claim.bound <= eps
    assert claim.gradient_eps == 100 * eps / float(net.box.widths.min() / 2)
    assert seen(net) <= claim.gradient_bound <= claim.gradient_eps
    assert claim.gradient_observed <= claim.gradient_bound <= 1.2 * claim.gradient_observed
    assert sum(term.value for term in claim.gradient.terms) == pytest.approx(claim.gradient_bound)
    assert claim.excluded == ()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_slopes_of_an_affine_map_are_exact_up_to_rounding(dtype, tmp_path):
    net = attnc.compile("0.5*x - 3*y + 1", {"x": (0, 1), "y": (-1, 1)}, 1e-3, norm="C1", dtype=dtype)
    assert net.num_anchors == 0
    assert net.certificate.gradient_bound <= (1e-13 if dtype == "float64" else 1e-4)
    net.save(tmp_path / "net")
    assert attnc_checker.check(tmp_path / "net", processes=1).proved


def test_a_smaller_gradient_eps_takes_more_keys_and_is_met():
    coarse, fine = (
        attnc.compile("1/(1+9*x**2)", {"x": (-1, 1)}, 1e-3, norm="C1", gradient_eps=each) for each in (1e-1, 1e-3)
    )
    assert fine.num_anchors > coarse.num_anchors
    assert seen(fine) <= fine.certificate.gradient_bound <= 1e-3 < coarse.certificate.gradient_bound <= 1e-1


@pytest.mark.parametrize("text", ["relu(x)", "abs(x - 0.3) + sin(x)", "clip(x, -0.5, 0.25)"])
def test_neighbourhoods_of_kinks_are_excluded_and_small(text):
    net = attnc.compile(text, {"x": (-1, 1)}, 1e-5, norm="C1", gradient_eps=1e-3)
    claim = net.certificate
    kinks = [0.3] if "0.3" in text else [-0.5, 0.25] if "clip" in text else [0.0]
    assert [band.lo <= kink <= band.hi for band, kink in zip(claim.excluded, kinks, strict=True)] == [True] * len(kinks)
    assert all(band.hi - band.lo < 2e-2 and band.argument == "x" for band in claim.excluded)
    assert seen(net) <= claim.gradient_bound <= 1e-3
    ((stage, _),) = stages(net.program)
    for band, kink in zip(claim.excluded, kinks, strict=True):  # inside, no slope can follow the jump of that of f
        inside = np.linspace(band.lo, band.hi, 4001)[:, None]
        jump = np.diff(stage.gradients(inside)[:, 0, 0][[0, -1]])
        assert abs(jump) > 0.9, kink


STRIPS = {
    "along an axis": ("abs(x)*y", "xy", {"x"}),
    "two": ("relu(x)*relu(y)", "xy", {"x", "y"}),
    "sloped": ("exp(relu(x + 2*y))", "xy", {"x + 2*y"}),
    "one layer": ("relu(x) + sin(y)", "xy", {"x"}),
    "curved": ("clip(x*y, -0.5, 0.5)", "xy", {"x*y + 0.5", "x*y - 0.5"}),
    "nested": ("max(x, y, x*y)", "xy", {"y - x", "x*y - x - relu(y - x)"}),
    "one variable": ("abs(sin(3*x))", "x", {"sin(3*x)"}),
    "three variables": ("relu(x)*z + y", "xyz", {"x"}),
}


@pytest.mark.parametrize("name", STRIPS)
def test_strips_about_kinks_are_excluded_and_narrow(name):
    text, variables, kinks = STRIPS[name]
    net = attnc.compile(text, dict.fromkeys(variables, (-1, 1)), 1e-4, norm="C1", construction="compose")
    claim = net.certificate
    points = net.box.lo + np.random.default_rng(1).random((500, net.box.d)) * net.box.widths
    wanted = np.stack([Expression.parse(kink).with_variables(net.variables)(points)[:, 0] for kink in kinks])
    for band in claim.excluded:  # the kinks are those of the function, whatever the text is
        found = Expression.parse(band.argument).with_variables(net.variables)(points)[:, 0]
        assert min(np.abs(wanted - sign * found).max(axis=1).min() for sign in (1, -1)) < 1e-12
        assert band.lo < 0 < band.hi
        assert band.hi - band.lo < 1e-3
    assert len(claim.excluded) == len(kinks)
    assert claim.bound <= 1e-4
    assert seen(net) <= claim.gradient_bound <= claim.gradient_eps == 1e-2
    assert claim.gradient_bound <= 1.6 * claim.gradient_observed


def test_a_slope_at_a_kink_is_not_that_of_the_function_and_beside_the_strip_it_is():
    net = attnc.compile("max(x, y)", SQUARE, 1e-4, norm="C1", gradient_eps=1e-4)
    (band,) = net.certificate.excluded
    middle = np.linspace(-1, 1, 9)

    def errors(apart):
        """The errors of the slope by y at points with y − x = apart."""
        found = net.gradient(np.stack([middle - apart / 2, middle + apart / 2], axis=1)).reshape(-1, 2)
        return np.abs(found[:, 1] - (apart > 0))

    assert errors(0.0).min() > 0.4
    assert max(errors(1.0001 * band.hi).max(), errors(1.0001 * band.lo).max()) <= net.certificate.gradient_bound


@pytest.mark.parametrize(
    ("argument", "half", "looseness"),
    [("x", 0.01, 1.01), ("x - y", 0.01, 1.1), ("x*y", 1e-3, 3.0), ("x**9", 1e-5, 1.2)],
)
def test_the_share_of_the_box_that_a_strip_takes_up_is_bounded(argument, half, looseness):
    box = attnc.as_target("x + y", dict.fromkeys("xy", (-1, 1))).box
    band = attnc.Excluded(argument, -half, half)
    points = np.random.default_rng(0).uniform(-1, 1, (200_000, 2))
    found = np.count_nonzero(band.contains(points, "xy")) / len(points)
    assert found * 0.95 <= share_of(band, box) <= looseness * found


def test_a_kink_in_several_variables_needs_a_derivation():
    with pytest.raises(attnc.BoundNotMet, match="there is no derivation"):
        attnc.compile("relu(x - y)", SQUARE, 0.1, norm="C1", construction="spectral_grid")


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("d", [1, 2])
def test_slopes_of_a_head_are_within_the_error_of_their_polynomials(gates, d):
    rng = np.random.default_rng(d + 2 * gates)
    slopes, offsets, values = rng.normal(size=(9, d)) * 3, rng.normal(size=9), rng.normal(size=(9, 2))
    carried = Enclosed.exact(rng.normal(size=(9, 2, d))) if gates else None
    head = SoftHead(*map(Enclosed.exact, (slopes, offsets, values)), carried)
    nothing = Enclosed.exact(np.zeros((2, 1 + d)))
    stage = OneStage((head,), nothing[:, 0], nothing[:, 1:])
    centres, radii = rng.uniform(-1, 1, (8, d)), 10.0 ** rng.uniform(-3, -0.7, (8, d))
    for order in (2, 5):
        (keys,) = prepared(stage)
        found, space = head_slopes(keys, centres, radii, order), layout(d, order - 1)
        tau = rng.uniform(-1, 1, (200, d))
        monomials = np.prod(tau[:, None] ** space.exponents, axis=2)
        for box in range(8):
            exact = stage.gradients(centres[box] + radii[box] * tau)
            for i in range(d):
                polynomial = monomials @ found.slopes[i, :, :, box]
                error = np.abs(exact[:, :, i] * radii[box, i] - polynomial).max(axis=0)
                assert (error <= found.errors[i, :, box]).all()


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if function.derivative is not None])
def test_derivatives_of_functions_are_those_of_difference_quotients(name):
    t, h = np.linspace(0.1, 0.9, 9), 1e-6
    (tree,), _, _ = parse(FUNCTIONS[name].derivative)
    stated = Expression("", (tree,), ("t",), False, ())(t[:, None])[:, 0]
    quotients = (FUNCTIONS[name].value(t + h) - FUNCTIONS[name].value(t - h)) / (2 * h)
    assert np.abs(stated - quotients).max() < 1e-8


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("sqrt(x)", {"x": (0, 1)}, 1e-3), {}, "infinite, or not defined, at an end of the box, as that of sqrt at 0"),
        (("sin(x)", {"x": (-np.inf, np.inf)}, 1e-3), {}, "the box is infinite. Choose finite ends"),
        (("x*y*z*w", dict.fromkeys("xyzw", (0, 1)), 1e-2), {}, "gradients are proved in 1 to 3"),
        ((lambda x: x[:, 0], [(0, 1)], 1e-2), {"lipschitz": 1.0}, "only an expression has derivatives"),
        (("sin(x)", {"x": (0, 1)}), {"points_per_axis": 5}, "needs eps"),
        (("sin(x)", {"x": (0, 1)}, 1e-3), {"gradient_eps": -1.0}, "gradient_eps"),
    ],
)
def test_refusals_say_what_to_do(arguments, options, words):
    with pytest.raises(attnc.InputError, match=words):
        attnc.compile(*arguments, norm="C1", **options)


def test_a_table_has_no_gradient():
    with pytest.raises(attnc.InputError, match="a table or Python code shows values"):
        attnc.compile(attnc.TableTarget(np.linspace(0, 1, 5)[:, None], np.zeros(5)), eps=0.1, norm="C1")


def test_gradient_eps_is_for_this_norm_alone():
    with pytest.raises(attnc.InputError, match="Add norm='C1', or leave it out"):
        attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3, gradient_eps=1e-2)


def test_a_network_without_a_derivation_is_refused():
    with pytest.raises(attnc.BoundNotMet, match=r"there is no derivation.*Choose construction='auto', or norm='inf'"):
        attnc.compile("sin(x)", {"x": (-1, 1)}, 0.05, norm="C1", construction="two_layer")


def test_a_gradient_eps_that_is_out_of_reach_is_refused_with_the_error():
    with pytest.raises(attnc.BoundNotMet, match=r"to gradient_eps=1e-13.*Choose gradient_eps ≥"):
        attnc.compile("sin(3*x)", {"x": (-1, 1)}, 1e-3, norm="C1", gradient_eps=1e-13, seconds=2)


def test_files_keep_the_claim(tmp_path):
    net = attnc.compile("relu(x) + x", {"x": (-1, 1)}, 1e-4, norm="C1", gradient_eps=1e-2)
    net.save(tmp_path / "net")
    assert attnc.load(tmp_path / "net").certificate == net.certificate
    card = (tmp_path / "net" / "README.md").read_text()
    assert "**Gradient" in card
    assert "excluded at kinks: x ∈" in card


def test_files_with_a_bound_below_its_parts_are_refused(tmp_path):
    net = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4, norm="C1")
    net.save(tmp_path / "net")
    path = tmp_path / "net" / "certificate.json"
    data = json.loads(path.read_text())
    data["gradient"]["bound"] /= 2
    path.write_text(json.dumps(data))
    with pytest.raises(attnc.FileError, match="of gradients is below"):
        attnc.load(tmp_path / "net")


def test_the_same_call_gives_the_same_proof():
    first, second = (attnc.compile("sin(x)*x", {"x": (-1, 1)}, 1e-5, norm="C1") for _ in range(2))
    assert dataclasses.replace(first.certificate) == second.certificate


def test_other_weights_have_their_gradient_certified_anew():
    pytest.importorskip("torch")
    net = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3, norm="C1")
    again = net.with_weights(net.to_torch(form="unfolded"))
    assert again.certificate.gradient_bound == net.certificate.gradient_bound
