"""The reduction is the program, and any evaluation of it is within the rounding that is counted."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb, fmpq
from hypothesis import assume, given, settings

from attnc.ir import Attention, Head, Mask, Program, Softmax
from attnc.ir.building import Attending
from attnc_checker.averages import Average
from attnc_checker.files import Refused
from attnc_checker.float32 import _depth_of_sums
from attnc_checker.forms import ONE, Form, stacked, unit
from attnc_checker.forms import dense as row_of
from attnc_checker.ranges import Box
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import at
from checker.networks import affine, dense, gate, lattice_program, one_head, reduced, spectral
from ir.random_programs import programs_and_inputs


def assert_computes(program: Program, inputs: tuple[np.ndarray, ...]) -> None:
    """At every point the program is within its rounding of the exact stage."""
    stage, arithmetic = reduced(program), Arithmetic(str(program.dtype))
    heads = [Average.of(head, stage.inputs) for head in stage.heads]
    computed = program(*inputs).reshape(len(inputs[0]), int(np.prod(program.output_shape)))
    for number, row in enumerate(computed):
        x = [arb(float(v)) for given in inputs for v in given[number].ravel()]
        box = Box(x, [arb(0)] * len(x))
        models = [head.model(box, 1, arithmetic) for head in heads]
        for o, value in enumerate(row):
            form = stage.affine[o]
            exact = at(tuple(map(arb, row_of(form.terms, stage.inputs))), x)
            allowed = arithmetic.gamma(form.n) * at(row_of(form.sizes, stage.inputs), box.reach)
            for model in models:
                if o in model:
                    exact, allowed = exact + model[o][0][0], allowed + model[o][1]
            assert abs(arb(float(value)) - exact) <= allowed + arb(2) ** -1000
            assert allowed <= 1e-3 * (1 + abs(exact).upper())


@given(programs_and_inputs(max_layers=2, scales=(0.1, 1.0, 5.0)))
@settings(max_examples=150, deadline=None)
def test_random_programs(case):
    program, inputs = case
    try:
        reduced(program)
    except Refused as refusal:
        assert "not a one-stage program" in str(refusal)  # noqa: PT017
        assume(False)
    assert_computes(program, inputs)


@pytest.mark.parametrize(
    "program",
    [
        spectral(np.sin, [(-3, 3)], 17),
        spectral(np.sin, [(-3, 3)], 17, dtype=np.float32),
        gate([(0, 0), (0.5, 3)], [(0.25, 0), (-1, 1)], residual=0.5),
    ],
)
def test_fitted_networks_and_a_gate(program):
    assert_computes(program, (np.linspace(-3, 3, 200).astype(program.dtype)[:, None],))


BOTH = [1, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("links", "constants"),
    [
        # Keys that move, and products of a query that moves. Scores of 70 differ little around x = 0.7.
        ([(BOTH, "key", 0, "x", np.array([100.1, 99.3]))], [(0, "query", 1.0)]),
        ([(0, "query", 0, "x")], [(BOTH, "key", np.array([100.1, 99.3]))]),
        # The query is about 0 there, and its rounding is not. Products with powers of two are exact.
        ([(0, "query", 0, "x", 0.1)], [(0, "query", -0.07), (BOTH, "key", np.array([2.0**12, -(2.0**12)]))]),
    ],
)
def test_queries_keys_and_their_products_round(dtype, links, constants):
    names = ("query", "key", "value")
    made = Attending(names, names, dtype, Mask(np.zeros(3, np.int64), np.array([1, 0, 0])))
    head = made.head({("query", "q"): 1.0}, {("key", "q"): 1.0}, {("value", "out"): 1.0})
    constants = [*constants, (BOTH, "value", np.array([1.0, -1.0]))]
    program = one_head(affine("embed", (1, ["x"]), (3, names), links, constants, dtype), head)
    assert_computes(program, (np.linspace(0.6, 0.8, 200).astype(dtype)[:, None],))


def test_engines_that_compute_parts_in_float64():
    """Queries and keys that are exact in float32 may be off by eight roundings of float64."""
    (head,) = reduced(lattice_program(np.array([[1.0], [2.0]]), np.zeros(2), [1.0], [0.0], 0.5, np.float32)).heads
    eight, u = 8 * arb(2) ** -53, Arithmetic("float32").u
    query, _ = head.query  # of x, which is cast, and of the constant 1
    assert eight * 1 <= u * head.query[1][ONE] <= 1.01 * eight
    assert eight * 0.5 <= u * head.own[ONE][0] <= 1.01 * eight
    assert u <= u * query[0]


def test_maps_that_an_engine_folds_into_one():
    """8 sums of 8 numbers, and their sum: folded, it is a sum of 64 numbers, in which 63 additions round up."""
    first, last = np.kron(np.eye(8), np.ones((1, 8))).reshape(1, 8, 1, 64), np.ones((1, 1, 1, 8))
    stage = reduced(Program((dense("first", first), dense("last", last)), ((64,),), (1,)))
    x = np.array([1.0] + [2.0**-53 * (1 + 2.0**-10)] * 63)
    computed = np.add.accumulate(x)[-1]
    (form,) = stage.affine
    bound = Arithmetic("float64").gamma(form.n) * at(row_of(form.sizes, stage.inputs), [*map(arb, x)])
    assert abs(arb(float(computed)) - sum(map(arb, x))) <= bound


def test_the_worst_key_counts():
    assert stacked([unit(0), Form({0: fmpq(3)}, {0: arb(3)}, 5)]).n == 5


@pytest.mark.parametrize("keys", [1, 2, 7, 8, 9, 63, 64, 65, 100, 4096])
def test_additions_of_a_term_in_sums_by_eights(keys):
    additions = [0] * keys
    while len(additions) > 1:
        blocks = [additions[i : i + 8] for i in range(0, len(additions), 8)]
        additions = [max(block) + len(block) - 1 for block in blocks]
    assert _depth_of_sums(keys) >= additions[0]
    assert _depth_of_sums(4097) >= 4096


def test_underflow_of_products_is_counted():
    """Values of 2^−130 and weights below 1: most products are subnormal numbers of float32."""
    rng = np.random.default_rng(0)
    anchors, values = np.arange(64.0)[:, None] / 16, 2.0**-130 * rng.uniform(0.5, 1, 64)
    program = lattice_program(anchors, values, [1.0], [0.0], 0.1, np.float32)
    assert_computes(program, (rng.uniform(0, 4, (60, 1)).astype(np.float32),))


ONES = Head(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)))
COPY = dense("copy", np.ones((2, 1, 1, 1)), np.array([[0.0], [1.0]]))
READ = dense("read", np.ones((1, 1, 2, 1)))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((COPY, Attention("a", (ONES,), ("c0",)), READ), "queries and keys of a head both depend"),
        ((COPY, Softmax("s", ("c0",)), Softmax("t", ("c0",)), READ), "attention reads an entry that attention wrote"),
        (
            (
                dense("k", np.zeros((2, 1, 1, 1)), np.ones((2, 1))),
                Attention("a", (ONES,), ("c0",)),
                Attention("b", (ONES,), ("c0",)),
                READ,
            ),
            "attention reads an entry that attention wrote",
        ),
    ],
)
def test_what_is_not_one_stage_is_refused(layers, reason):
    with pytest.raises(Refused, match=reason):
        reduced(Program(layers, ((1,),), (1,)))


def test_dead_tokens_do_not_matter():
    """The second token asks about the input with keys that depend on it, but nothing reads its answer."""
    names = ("c0", "c1")
    links, constants = [(0, "c0", 0, "in"), (1, "c1", 0, "in")], [(0, "c1", 1.0), (1, "c0", 2.0)]
    head = Head(np.eye(2)[:, :1], np.eye(2)[:, :1] * 0.5, np.eye(2)[:, 1:], np.eye(1, 2))
    layers = (affine("embed", (1, ["in"]), (2, names), links, constants), Attention("a", (head,), names))
    alive = Program((*layers, dense("read", np.ones((1, 1, 2, 2)))), ((1,),), (1,))
    with pytest.raises(Refused, match="both depend"):
        reduced(alive)
    read = affine("read", (2, names), (1, ["out"]), [(0, "out", 1, "c0")])
    assert_computes(Program((*layers, read), ((1,),), (1,)), (np.linspace(-2, 2, 9)[:, None],))


def test_overflow_is_refused():
    huge = dense("huge", np.full((1, 1, 1, 1), 1e300))
    with pytest.raises(Refused, match="may overflow"):
        reduced(Program((huge, dense("again", np.full((1, 1, 1, 1), 1e300))), ((1,),), (1,)))
