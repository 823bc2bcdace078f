"""Functions that jump: cells whose borders are the jumps, and an affine function on each."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnc
from attnc.constructions.built import Built
from attnc.errors import BoundNotMet, InputError
from attnc.targets.expressions.kinks import jumps_across

SQUARE = {"x": (-1, 1), "y": (-1, 1)}


def built(text: str, box: dict[str, tuple[float, float]], eps: float, p: float) -> Built:
    return attnc.constructions.affine_cells(attnc.as_target(text, box, p=p), eps=eps, norm=p)


@pytest.mark.parametrize("p", [1, 2, 3.5, 10])
@pytest.mark.parametrize("eps", [0.3, 0.01])
def test_two_anchors_hold_a_jump_times_a_line_in_every_norm(p: float, eps: float) -> None:
    net = attnc.compile("sign(x)*y", SQUARE, eps, norm=p)
    assert (net.construction, net.num_anchors) == ("affine_cells", 2)
    assert net.certificate.method == "proof"
    assert net.certificate.bound <= eps
    x = np.array([[1e-9, 0.5], [-1e-9, 0.5], [0.7, -0.3]])
    if p == 10:
        assert net(x) == pytest.approx([0.5, -0.5, -0.3], abs=1e-12)


@pytest.mark.parametrize(
    ("text", "box", "p", "eps"),
    [
        ("floor(x)*sin(3*x)", {"x": (-2, 2)}, 7, 0.03),
        ("sign(x-0.1), floor(x)", {"x": (-2, 2)}, 3, 0.1),
        ("floor(2*x)*exp(x*y)", SQUARE, 2, 0.05),
    ],
)
def test_the_error_away_from_jumps_is_within_eps(text: str, box: dict[str, tuple[float, float]], p, eps) -> None:
    target = attnc.as_target(text, box, p=p)
    program = built(text, box, eps, p).program
    ends = np.array(list(box.values()), float)
    x = ends[:, 0] + np.random.default_rng(0).random((4000, len(ends))) * np.diff(ends).T
    errors = np.abs(program(x).reshape(len(x), -1) - target(x))
    assert np.mean(errors.max(axis=1) ** p) ** (1 / p) * np.diff(ends).prod() ** (1 / p) <= eps


def test_a_piecewise_constant_function_carries_nothing() -> None:
    (embed, *_) = built("floor(2*x)", {"x": (-1, 1)}, 0.1, 2).program.layers
    moving = [name for name in embed.channels if name.startswith("value.")]
    columns = [embed.channels.index(name) for name in moving]
    assert not np.isin(embed.weight.index[:, 1], columns).any()


@pytest.mark.parametrize(
    ("text", "box", "places"),
    [
        ("sign(x-0.3)*y", SQUARE, [[0.3], []]),
        ("floor(3*x) + sign(y)", SQUARE, [[-1, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3, 1], [0]]),
        ("sign(sin(x))*x", {"x": (-4, 4)}, [[-math.pi, 0, math.pi]]),
        ("sign(x)*sign(2*x)", {"x": (-1, 2)}, [[0]]),
        ("sin(x)", {"x": (-1, 2)}, [[]]),
    ],
)
def test_places_of_jumps(text: str, box: dict[str, tuple[float, float]], places: list[list[float]]) -> None:
    target = attnc.as_target(text, box, p=2)
    assert target.expression is not None
    found = jumps_across(target.expression, target.box)
    assert found is not None
    for axis, expected in zip(found, places, strict=True):
        assert axis == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("text", ["sign(x+y)", "floor(1000*x)*y", "sin(x)*y"])
def test_other_functions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="takes an expression that jumps, and only where one variable passes certain"):
        built(text, SQUARE, 0.1, 2)


def test_too_many_cells_are_refused_with_a_network_that_exists() -> None:
    target = attnc.as_target("sign(x)*sin(50*x)", {"x": (-1, 1)}, p=2)
    with pytest.raises(BoundNotMet, match=r"needs more than [0-9]+ cells, and the limit is 30") as refusal:
        attnc.constructions.affine_cells(target, eps=1e-3, norm=2, max_anchors=30)
    assert refusal.value.network.program.num_anchors <= 30
