"""L_p: targets that jump, cell averages, the boundary layer; errors by quadrature between the jumps."""

from __future__ import annotations

import pytest

import attnc
import attnc_checker
from attnc.constructions import max_affine, max_affine_cross
from attnc.errors import BoundNotMet, DomainError, InputError
from constructions.errors import lp_error, target_of

CASES = [
    ("sign(x)*y", [(-1, 1)] * 2, 20, 300),
    ("floor(3*x)", [(-1, 1)], 50, 30_000),
    ("floor(3*x) + y", [(-1, 1)] * 2, 12, 360),
    ("sign(x - 0.33)", [(-1, 1)], 40, 40_000),
    ("sin(x)+cos(y)", [(-3, 3)] * 2, 15, 300),
    ("sqrt(x)", [(0, 1)], 30, 30_000),
]


@pytest.mark.parametrize("build", [max_affine, max_affine_cross])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("text", "box", "cells", "nodes"), CASES)
def test_the_bound_holds_and_is_not_vacuous(text, box, cells, nodes, p, build):
    target = target_of(text, *box)
    built = build(target, points_per_axis=cells, norm=p)
    error = lp_error(built.program, target, p, nodes)
    # The quadrature of a jump inside a cell is good to one part in nodes/cells; the bound is far from that here.
    assert error * (1 - cells / nodes) <= built.bound.value
    if p <= 2:  # for larger p the layer, however thin, weighs more: its share is the p-th root of its width
        assert built.bound.value <= 3 * error


@pytest.mark.parametrize("text", ["sign(x)*y", "floor(3*x)*y", "sign(x-y)"])
@pytest.mark.parametrize("norm", [1, 2])
def test_compile_meets_eps(text, norm):
    net = attnc.compile(text, [(-1, 1)] * 2, eps=0.3, norm=norm)
    assert net.certificate.norm == str(norm)
    assert net.certificate.observed <= net.certificate.bound <= 0.3


def test_the_layer_is_stated_where_f_jumps():
    built = max_affine(target_of("sign(x)", (-1, 1)), points_per_axis=10, norm=2.0)
    layer = next(term for term in built.bound.terms if term.name == "boundary layer")
    assert 0 < layer.value < 0.05


def test_averages_beat_samples_in_L2():
    """A cell average is the best constant in L2: sampling at centres cannot do better."""
    target = target_of("x**2 + y", (-1, 1), (-1, 1))
    averaged = max_affine(target, points_per_axis=6, norm=2.0)
    sampled = max_affine(target, points_per_axis=6)
    errors = [lp_error(b.program, target, 2.0, 240) for b in (averaged, sampled)]
    assert errors[0] < errors[1]


def test_jumps_are_refused_in_the_max_norm():
    with pytest.raises(DomainError, match="norm=2"):
        attnc.compile("floor(x)", [(-1, 1)], 0.1)


@pytest.mark.parametrize("norm", [0.5, 0, -1, "two", True, None, float("nan")])
def test_bad_norms(norm):
    with pytest.raises(InputError, match="norm"):
        attnc.compile("x", [(-1, 1)], 0.1, norm=norm)


@pytest.mark.parametrize(("text", "norm"), [("abs(x)", 1), ("exp(x)", 2)])
def test_many_hard_cells_are_proved_in_a_norm(text, norm):
    """On coarse cells no Taylor bound is finite; the proof has to come to finer ones all the same."""
    claim = attnc.compile(text, [(-1, 1)], eps=0.03, construction="max_affine", norm=norm).certificate
    assert claim.method == "proof"
    assert claim.observed <= claim.bound <= 1.05 * claim.observed


def test_jumps_on_borders_take_few_cells():
    """At 0.3 of [−1, 1] a jump is on a border of 20 cells, and of no 2 … 18; those of floor(2y) want 4, 8, 12, …:
    refined in proportion, the two axes hardly meet that together. A jump along a diagonal is on no border."""
    for text, num_cells in {"sign(x-0.3)*y+floor(2*y)": 20 * 20, "floor(5*x)*sign(y-0.1)": 10 * 20}.items():
        built = max_affine(attnc.as_target(text, [(-1, 1)] * 2, p=2), eps=0.3, norm=2)
        assert built.bound.value <= 0.3
        assert built.program.num_anchors <= num_cells
    diagonal = max_affine(attnc.as_target("sign(x+y)", [(-1, 1)] * 2, p=1), eps=0.5, norm=1)
    assert diagonal.program.num_anchors <= 150


@pytest.mark.parametrize(
    ("text", "box", "eps", "p", "construction", "made"),
    [
        ("sin(x)*cos(2*y)", [(-1, 1)] * 2, 1e-3, 2, "auto", "spectral_grid"),
        ("exp(x)/(3 + x)", [(-2, 1)], 1e-5, 1, "auto", "graded"),
        ("tanh(2*x) - x/3", [(0, 3)], 1e-4, 2.5, "binomial", "binomial"),
        ("abs(x)*y", [(-1, 1)] * 2, 0.1, 2, "auto", "max_affine"),
    ],
)
def test_smooth_functions_need_few_keys_and_the_norm_is_proved_again(tmp_path, text, box, eps, p, construction, made):
    net = attnc.compile(text, box=box, eps=eps, norm=p, construction=construction)
    claim = net.certificate
    assert (net.construction, claim.norm) == (made, str(p))
    seen = lp_error(net, target_of(text, *box), p, 3000 if len(box) == 1 else 200)
    assert 0.999 * seen <= claim.bound <= eps
    assert claim.bound <= (1.06 if len(box) == 1 else 5) * seen
    net.save(tmp_path / "net")
    if made != "max_affine":
        assert net.num_anchors <= 40
        assert attnc_checker.check(tmp_path / "net").proved


def test_who_measures_in_lp_is_named():
    with pytest.raises(InputError, match=r"norm=2.0 is not an option of compose.*'max_affine'.*'spectral_grid'"):
        attnc.compile("sin(x)", box=[(-1, 1)], norm=2, construction="compose")


def test_two_layers_that_do_not_fit_in_memory_are_refused():
    """The matrix of a layer that is folded has a row for every channel of every token: 84 GiB here."""
    options = {"norm": 3, "dtype": "float32", "construction": "two_layer", "max_bytes": 2**28}
    with pytest.raises(BoundNotMet, match="max_bytes"):
        attnc.compile("floor(x+y)", [(-1, 1)] * 2, 0.317, **options)
