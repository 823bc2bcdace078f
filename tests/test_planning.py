"""The plan: a row for every construction, and auto takes the cheapest that serves."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc import planning
from attnc.constructions.beyond.graded import GRADED
from attnc.constructions.beyond.spectral_grid import SPECTRAL_GRID
from attnc.constructions.catalogue import CATALOGUE
from attnc.constructions.construction import CRITERIA, Request
from attnc.errors import BoundNotMet, InputError

WAVE = ("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-5)


def test_every_construction_has_a_row_and_a_reason_or_a_size() -> None:
    rows = attnc.plan(*WAVE)
    assert {row.name for row in rows} == {construction.name for construction in CATALOGUE}
    for row in rows:
        if row.why_not is None:
            assert row.layers >= 1
            assert min(row.multiply_adds, row.parameters) >= row.anchors >= 1
        else:
            assert len(row.why_not) > 5


@pytest.mark.parametrize("criterion", CRITERIA)
def test_auto_takes_the_least_of_what_is_asked(criterion: str) -> None:
    able = [row for row in attnc.plan(*WAVE) if row.why_not is None]
    network = attnc.compile(*WAVE, criterion=criterion)
    least = min(getattr(row, criterion) for row in able)
    assert getattr(next(row for row in able if row.name == network.construction), criterion) == least


@pytest.mark.parametrize(
    ("name", "request_", "anchors", "parameters"),
    [
        ("compose", WAVE, 0, 0),
        ("spectral_grid", WAVE, 1.5, 1.5),  # planned from sections of f, and fitted as a whole
        ("max_affine", ("sin(x)*y", {"x": (-1, 1), "y": (-1, 1)}, 0.1), 0.1, 0.2),
    ],
)
def test_the_sizes_that_were_planned_are_those_that_are_built(name, request_, anchors, parameters) -> None:
    row = next(row for row in attnc.plan(*request_) if row.name == name)
    network = attnc.compile(*request_, construction=name)
    assert network.num_anchors == pytest.approx(row.anchors, rel=anchors)
    assert network.num_parameters == pytest.approx(row.parameters, rel=parameters)


@pytest.mark.parametrize(
    ("text", "anchors"), [("clip(3*x, -1, 1)", 3), ("tanh(4*x)", 2), ("softplus(3*x)", 6), ("max(x, 0.5-x, -x)", 6)]
)
def test_auto_takes_gates_on_finite_boxes_too(text: str, anchors: int) -> None:
    net = attnc.compile(text, {"x": (-2, 2)}, eps=1e-6)
    cheapest = attnc.plan(text, {"x": (-2, 2)}, eps=1e-6)[0]
    assert net.num_anchors <= min(anchors, cheapest.anchors)
    assert net.certificate.bound <= 1e-6


def test_python_code_in_many_variables_gets_the_table_and_the_reason() -> None:
    with pytest.raises(BoundNotMet, match="1 to 6 variables") as refusal:
        attnc.compile(lambda X: X.sum(axis=1), [(-1, 1)] * 8, 1e-3)
    assert "construction" in str(refusal.value)
    assert "lipschitz" in str(refusal.value)


def test_an_activation_on_all_of_r() -> None:
    network = attnc.compile("gelu(x)", {"x": (-np.inf, np.inf)}, 1e-7)
    assert network.num_anchors <= 17
    assert network.certificate.bound <= 1e-7
    far = np.array([[-1e6], [1e6], [0.5]])
    assert np.abs(network(far) - far[:, 0] * np.array([0.0, 1.0, 0.6914624612740131])).max() <= 1e-7


def test_a_grid_is_not_looked_for_beyond_what_is_found_already(monkeypatch):
    """At a kink an even grid has hundreds of anchors, and graded ones are eight."""
    from attnc.constructions.fitting import axis

    tried: list[int] = []
    fit = axis.unit_fit

    def recorded(lattice: axis.Lattice, spare: int) -> object:
        tried.append(lattice.p)
        return fit(lattice, spare)

    monkeypatch.setattr(axis, "unit_fit", recorded)
    target = attnc.as_target("abs(x-0.3)+x**3", {"x": (-1, 1)})
    best = next(planning.cheapest_first(target, Request(1e-3), [GRADED, SPECTRAL_GRID]))
    assert best.name == "graded"
    assert max(tried) <= best.multiply_adds < 50


SINE = ((lambda X: np.sin(X[:, 0])), [(-1, 1)], 0.1)
CLIP = attnc.TruncatedLinear([[1.0]], 0.0, 0.0, 1.0, box=(-1.0, 1.0))
HALF_LINE = attnc.TruncatedLinear([[1.0]], 0.0, 0.0, 1.0, box=(-1.0, np.inf))


@pytest.mark.parametrize(
    ("source", "options"),
    [(CLIP, {"construction": "graded"}), (SINE[0], {"construction": "graded", "box": [(-1, 1)]})],
)
def test_a_named_construction_refuses_norms_that_its_plan_refuses(source, options) -> None:
    """Nothing would be proved: neither is an expression, and the Python code has no constant."""
    with pytest.raises(InputError, match="graded has proofs in an L_p norm only for expressions"):
        attnc.compile(source, eps=0.1, norm=2, **options)


def test_norms_of_python_code_with_a_constant_are_planned_and_proved() -> None:
    rows = {row.name: row for row in attnc.plan(*SINE, norm=2, lipschitz=1.0)}
    for name in ("graded", "binomial", "spectral_grid"):
        assert rows[name].why_not is None
        assert attnc.compile(*SINE, norm=2, lipschitz=1.0, construction=name).certificate.bound <= 0.1


@pytest.mark.parametrize("norm", ["inf", 2])
@pytest.mark.parametrize(("d", "f"), [(1, lambda X: np.abs(X[:, 0])), (2, lambda X: np.sin(3 * X[:, 0]) + X[:, 1])])
def test_auto_takes_the_cheapest_fit_of_python_code_with_a_constant(d, f, norm) -> None:
    box = [(-1, 1)] * d
    rows = attnc.plan(f, box, 0.1, norm=norm, lipschitz=3.2)
    found = attnc.compile(f, box, 0.1, norm=norm, lipschitz=3.2)
    assert found.construction == next(row.name for row in rows if row.name != "binomial")
    assert found.certificate.bound <= 0.1


def test_python_code_with_a_constant_is_compiled_without_eps() -> None:
    found = attnc.compile(lambda X: np.sin(X[:, 0]), [(-1, 1)], lipschitz=1.0, points_per_axis=5)
    assert found.construction == "max_affine"
    assert found.num_anchors == 5


def test_a_function_that_jumps_is_planned_in_a_norm() -> None:
    planned = attnc.plan("sign(x)*y", {"x": (-1, 1), "y": (-1, 1)}, 1.0, norm=2)
    rows = {row.name: row for row in planned if row.why_not is None}
    assert rows["two_layer"].anchors >= 2


def test_the_plan_of_gates_and_fits_has_an_expected_error() -> None:
    rows = {row.name: row for row in attnc.plan("abs(x)", {"x": (-1, 1)}, 1e-3)}
    for name in ("gates", "compose", "graded"):
        assert 0 < rows[name].error <= 1e-3


@pytest.mark.parametrize(
    ("source", "options", "advice"),
    [
        (CLIP, {"norm": 2}, "Leave it out, or use construction='max_affine' or"),
        ("tanh(x)", {"norm": 2, "box": {"x": (-np.inf, np.inf)}}, "Leave it out.$"),
        (HALF_LINE, {}, "only expressions can have an infinite box. Write it as an expression, or choose a finite box"),
    ],
)
def test_refusals_advise_what_takes_the_target(source, options, advice) -> None:
    with pytest.raises(InputError, match=advice):
        attnc.compile(source, eps=0.1, **options)
