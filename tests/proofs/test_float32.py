"""float32, in every engine that a certificate names: outputs are within the bound, at random and bad points.

The bound is the tolerance. `comparisons` decides a comparison by intervals, or by Arb.
"""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.engines.grid import GridHead
from attnc.errors import BoundNotMet, DomainError
from attnc.ir.program import Program
from attnc.network import Network
from proofs.comparisons import ENGINES, Comparisons, Engine, adversarial_points, engines_of
from proofs.proving import compare, constructed, proven
from proofs.random_networks import random_case, random_composed


def engines(program: Program) -> dict[str, Engine]:
    """All that a certificate names; numpy's is the grid engine where the anchors are a grid."""
    found = engines_of(program, ENGINES)
    if any(isinstance(head, GridHead) for stage in found["numpy"]._stages for head in stage.heads):
        found["grid"] = found.pop("numpy")
    return found


def compare_certified(made: Comparisons, network: Network, count: int, seed: int = 0) -> None:
    claim = network.certificate
    assert claim.dtype == str(network.program.dtype) == "float32"
    target = attnc.as_target(network.expression, network.box.as_dict())
    points = adversarial_points(network.program, target, count, seed)
    made.check(network.program, target, claim.bound, points, engines(network.program))


CASES = [
    ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-5, "auto"),
    ("tanh(x*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-4, "spectral_grid"),
    ("exp(-x*x)*sin(3*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-4, "auto"),
    ("x*y*z", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-5, "auto"),
    ("relu(x) + gelu(x - 1)", {"x": (-2, 3)}, 1e-4, "auto"),
]


@pytest.mark.parametrize(("text", "box", "eps", "construction"), CASES, ids=[case[0] for case in CASES])
def test_a_bound_proved_in_float32_holds_in_every_engine(text, box, eps, construction):
    network, made = attnc.compile(text, box=box, eps=eps, dtype="float32", construction=construction), Comparisons()
    assert network.certificate.bound <= eps
    compare_certified(made, network, 150)
    assert len(made.seen) == 5  # and exact arithmetic, at the worst points
    assert made.closest < 1


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("log(x)*x", {"x": (0.1, 2)}),
        ("sin(x)*cos(y)", {"x": (-3, 3), "y": (-3, 3)}),
        ("exp(-x*x-y*y)", {"x": (-2, 2), "y": (-2, 2)}),
    ],
)
def test_a_construction_is_asked_for_less_and_another_one_for_the_same(text, box):
    """The first one built has a bound above eps: with its rounding, or by that alone."""
    assert attnc.compile(text, box=box, eps=1e-5, dtype="float32").certificate.bound <= 1e-5


def test_what_rounding_does_not_allow_is_refused_with_the_level():
    with pytest.raises(
        BoundNotMet, match=r"Rounding in float32 alone contributes .*\. Choose eps ≥ .*, float64"
    ) as refusal:
        attnc.compile("exp(x)", box={"x": (-1, 2)}, eps=1e-5, dtype="float32")
    level = float(str(refusal.value).split("eps ≥ ")[1].split(",")[0])
    assert refusal.value.bound <= level <= 3e-5
    assert attnc.compile("exp(x)", box={"x": (-1, 2)}, eps=level, dtype="float32").certificate.bound <= level


SOFT_GRIDS = [("tanh(x*y)", 2), ("sin(x)+cos(y)", 3), ("exp(-x*x-y*y)", 2), ("1/(1+x*x+y*y)", 2)]
"""100 to 230 keys of 17² count at a point; values are of one sign or of both."""


@pytest.mark.parametrize(("text", "end"), SOFT_GRIDS)
def test_the_rounding_term_is_not_far_above_what_is_observed(text, end):
    """On a 2-D grid, against the float32 errors of the engines that compute in it."""
    box = {"x": (-end, end), "y": (-end, end)}
    program, target = constructed("spectral_grid", text, box, num_anchors=17, dtype="float32")
    points = np.random.default_rng(0).uniform(-end, end, (20_000, 2))
    exact = program.astype("float64")(points)  # of the very weights
    seen = max(float(np.abs(np.asarray(run(points), np.float64) - exact).max()) for run in engines(program).values())
    (rounding,) = (term.value for term in proven(program, target, 20).terms if term.name == "rounding")
    assert seen <= rounding <= 20 * seen


@pytest.mark.slow
def test_hundreds_of_networks_in_float32(capsys):
    """One-stage programs of any temperature, proved by leaves, and compiled expressions, deep ones among them."""
    made, seed = Comparisons(), 0
    while made.proofs < 300:
        seed += 1
        rng = np.random.default_rng(20_000 + seed)
        try:
            if seed % 4 == 0:
                network = attnc.compile(random_composed(rng), eps=10 ** rng.uniform(-4, -1), dtype="float32")
                if network.certificate.bound is not None:
                    compare_certified(made, network, 500, seed)
                continue
            program, target = random_case(rng, seed % 4)
        except DomainError:
            continue
        except BoundNotMet:
            made.unproved += 1
            continue
        program = program.astype("float32")
        compare(made, program, target, seed, count=500, engines=engines(program))
    with capsys.disabled():
        print(f"\nfloat32: {made}")
    assert all(made.seen[name] >= 100_000 for name in ENGINES)
    assert made.unproved <= 0.2 * made.proofs
