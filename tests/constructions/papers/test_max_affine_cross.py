"""Cross-attention: f(X) against a constant memory, f(X, Y) with Y on the side of the keys."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine, max_affine_cross
from attnc.ir import Attention
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.errors import error_at, reference_error


@settings(max_examples=25)
@given(
    n=st.integers(1, 2),
    m=st.integers(1, 2),
    dx=st.integers(1, 2),
    dy=st.integers(1, 2),
    exponent=st.one_of(st.none(), st.floats(-1, 8)),
    centre=st.sampled_from([0.0, 10.0, -300.0]),
    dtype=st.sampled_from(["float64", "float32"]),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_for_two_inputs(n, m, dx, dy, exponent, centre, dtype, seed):
    assume(n * dx + m * dy <= 4)
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(n * dx, n)), rng.normal(size=(m * dy, n))
    lipschitz = float(np.linalg.norm(np.concatenate([A, B]), 2))

    def fn(X, Y):
        flat = (X - centre).reshape(len(X), -1) @ A + (Y - centre).reshape(len(Y), -1) @ B
        return np.sin(flat)[:, :, None]

    target = SequenceTarget(fn, (n, m), (dx, dy), (centre - 1, centre + 1), lipschitz)
    beta = None if exponent is None else 10.0**exponent
    built = max_affine_cross(target, points_per_axis=5, beta=beta, dtype=dtype)
    points = sample_points(target.box, 300)
    assert reference_error(built.program, target, points) <= built.bound.value
    assert error_at(built.program, target, points) <= built.bound.value


def test_tight_on_a_linear_function_of_both():
    target = SequenceTarget(lambda X, Y: X + Y, (1, 1), (1, 1), (-1, 1), np.sqrt(2))
    built = max_affine_cross(target, eps=0.2)
    edges = np.linspace(-1, 1, int(str(dict(built.parameters)["points_per_axis"]).split(" × ")[0]) + 1)
    x, y = (axis.ravel() for axis in np.meshgrid(edges, edges))
    error = reference_error(built.program, target, np.clip(np.stack([x, y], axis=1) + 1e-12, -1, 1))
    assert error <= built.bound.value <= 1.5 * error


def test_one_input_equals_self_attention():
    target = CallableTarget(lambda p: np.sin(p).sum(axis=1), Box.parse([(-2, 1), (0, 3)]), np.sqrt(2))
    cross, own = (build(target, points_per_axis=7, beta=64.0) for build in (max_affine_cross, max_affine))
    points = sample_points(target.box, 500)
    assert np.abs(cross.program(points) - own.program(points)).max() <= 2 * cross.bound.terms[-1].value
    assert [t.value for t in cross.bound.terms] == [t.value for t in own.bound.terms]


def test_the_memory_is_constant_for_one_input_and_linear_in_Y_for_two():
    one = attnc.compile("x*y", [(-1, 1)] * 2, 0.2, construction="max_affine_cross")
    (remember,) = one.program.memory
    assert remember.weight.shape[2:] == (0, 0)
    assert [layer.cross for layer in one.program.layers if isinstance(layer, Attention)] == [True]
    two = attnc.compile(SequenceTarget(lambda X, Y: X * Y, (1, 1), (1, 1), (-1, 1), 1.5), eps=0.3)
    assert two.construction == "max_affine_cross"
    assert two.program.memory[0].weight.num_nonzeros > 0
    assert two.certificate.observed <= two.certificate.bound <= 0.3
