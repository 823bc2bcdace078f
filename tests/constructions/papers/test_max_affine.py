"""One head over a grid: which grids are chosen, and how they are proved."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.constructions import max_affine
from constructions.errors import form_error, target_of


def test_functions_that_are_not_lipschitz():
    net = attnc.compile("sqrt(x)", {"x": (0, 1)}, eps=0.02, construction="max_affine")
    points = np.concatenate([np.linspace(0, 1e-3, 2000), np.linspace(0, 1, 2000)])[:, None]
    error = np.abs(net(points) - np.sqrt(points[:, 0])).max()
    assert error <= net.certificate.bound <= 0.02
    assert net.certificate.bound <= 3 * error


def test_anisotropic_functions_get_anisotropic_grids():
    net = attnc.compile("10*x + y/10", [(-1, 1)] * 2, eps=0.5, construction="max_affine")
    nx, ny = (int(c) for c in net.parameters["points_per_axis"].split(" × "))
    assert nx > 10 * ny


@pytest.mark.parametrize(
    ("text", "box"),
    [("sqrt(x + 1) + y**2", [(-1, 1)] * 2), ("x*y*z", [(-1, 1)] * 3), ("max(x, y)", [(-2, 2), (-1, 1)])],
)
def test_a_grid_is_proved_axis_by_axis(text, box):
    """Fewer leaves than there are cells, and a bound that is close to the error, at kinks and infinite slopes too."""
    net = attnc.compile(text, box, eps=0.25, construction="max_affine")
    claim = net.certificate
    assert claim.method == "proof"
    assert {leaf.kind for leaf in claim.by_leaves.leaves} == {"enclosure"}
    assert claim.num_leaves < net.num_anchors
    assert claim.observed <= claim.bound <= 1.1 * claim.observed
    assert [term.name for term in claim.terms] == ["selection", "rounding"]


@pytest.mark.parametrize(
    ("text", "box", "eps", "least"),
    [("sin(200*x)", [(-3, 3)], 0.01, 60_000), ("sin(300*x)+y", [(-3, 3)] * 2, 0.5, 41_000)],
)
def test_a_grid_for_many_periods_is_as_fine_as_the_slope_asks(text, box, eps, least):
    """32 or 512 cells hold whole periods of these: from their variation alone no rate follows."""
    built = attnc.constructions.max_affine(attnc.as_target(text, box), eps=eps)
    assert built.bound.value <= eps
    assert built.program.num_anchors <= 1.15 * least


def test_a_refusal_names_a_size_that_can_be_read():
    target = attnc.as_target("sin(40*x*y)", [(-3, 3)] * 2)
    with pytest.raises(attnc.BoundNotMet, match=r"it needs about \d\.\de\+17 anchors"):
        attnc.constructions.max_affine(target, eps=1e-6)


def test_the_self_attention_form_is_real():
    """Multiplying out the stored matrices with a T×T softmax gives what the engine gives, within the rounding term.

    Random points are not on borders of cells. There the term leaves out errors of weights, because both cells will do.
    """
    for centres in ("grid", "adaptive"):
        target = target_of("(exp(-9*(x**2+y**2)), x - y)", (-1, 1), (-1, 1))
        built = max_affine(target, eps=0.4, centres=centres)
        rounding = next(term.value for term in built.bound.terms if term.name == "rounding")
        assert form_error(built.program, np.random.default_rng(0).uniform(-1, 1, (60, 2))) <= 2 * rounding
