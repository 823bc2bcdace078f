"""One record is enough to add a function: everything else reads it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flint import arb

import attnc
from attnc.constructions.fitting.gate import GATES, function_gate
from attnc.errors import ExpressionError, InputError
from attnc.functions.function import ElementaryFunction
from attnc.functions.gate_recipes import ExactKeys
from attnc.functions.registry import ALL, FUNCTIONS, register
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import taylor
from strategies.reference import precision

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    """The example of CONTRIBUTING.md, which registers steep_silu; the registry is restored afterwards."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Adding a function")[2]
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    before = dict(FUNCTIONS)
    try:
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
        yield names
    finally:
        FUNCTIONS.clear()
        FUNCTIONS.update(before)


def steep_silu(t: float) -> float:
    with precision(200):
        x = arb(t)
        return float((x / ((-2 * x).exp() + 1)).mid())


def test_a_new_function_compiles_everywhere(example: dict[str, Any]) -> None:
    """On all of R by a gate, in a composition, and over a box by interval arithmetic and jets."""
    x = np.linspace(-30, 30, 601)
    exact = np.array([steep_silu(2 * t - 1) + t for t in x])
    assert np.abs(example["net"](x[:, None]) - exact).max() <= example["net"].certificate.bound + 1e-14
    box = {"x": (-1, 1), "y": (-1, 1)}
    for text, construction in [("y*steep_silu(x) + sin(x)", "compose"), ("steep_silu(x + y) - relu(y)", "gates")]:
        net = attnc.compile(text, box, 1e-4, construction=construction)
        points = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        assert net.certificate.complete
        assert np.abs(net(points) - Expression.parse(text).with_variables(("x", "y"))(points)[:, 0]).max() <= 1e-4
    expression = Expression.parse("steep_silu(x)")
    centres, radii = np.array([[-2.0], [0.3], [4.0]]), np.full((3, 1), 0.2)
    ranges = expression.ranges(Interval(centres - radii, centres + radii))
    jets = taylor(expression, centres, radii, 4)
    for i in range(3):
        for s in np.linspace(-1, 1, 21):
            value = steep_silu(float(centres[i, 0] + radii[i, 0] * s))
            assert ranges.lo[i, 0] <= value <= ranges.hi[i, 0]
            model = float((jets.mid[i, 0] * s ** np.arange(5)).sum())
            assert abs(value - model) <= jets.remainder[i, 0] + jets.radius[i, 0].sum() + 1e-15


def test_the_gate_of_a_registered_function_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a name that attnc has for an activation outside the expression language."""
    own = ExactKeys((0.0, 1.0), (0.0, 0.0), (0.0, 2.0), (0.0, 0.0), lipschitz=0.5)
    monkeypatch.setitem(FUNCTIONS, "mish", dataclasses.replace(FUNCTIONS["sigmoid"], name="mish", gate=own))
    assert function_gate("mish", 1e-3).keys.values.ravel().tolist() == [0.0, 2.0]
    assert GATES["mish"](1e-3).keys.num_keys == 3  # that of torch.nn.Mish


def test_names_are_unique_identifiers(example: dict[str, Any]) -> None:
    for name in ("steep_silu", "sin", "2x", "a-b"):
        with pytest.raises(InputError, match="Choose another name"):
            register(ElementaryFunction(name, np.sin, ALL[0].range, ALL[0].jet))


def test_the_registry_is_as_it_was() -> None:
    assert tuple(FUNCTIONS.values()) == ALL
    with pytest.raises(ExpressionError, match="steep_silu is not a function"):
        Expression.parse("steep_silu(x)")


def test_records_are_consistent() -> None:
    for name, function in FUNCTIONS.items():
        assert name == function.name
        assert (function.slope is None) == (function.arity > 1) == (function.gradient is not None)
        assert set(function.asymptotes) <= {1, -1}
        for side, asymptote in function.asymptotes.items():
            for low in (2.0, 9.0):
                bound = asymptote.remainder(low)
                assert bound is not None
                scale, rate = bound
                for s in np.linspace(low, low + 20, 41):
                    value = float(function.value(np.array(side * s)))
                    allowed = scale * (math.exp(-rate * (s - low)) if s > low else 1.0) + 1e-14
                    assert abs(value - float(asymptote.limit.mid) - asymptote.slope * s) <= allowed, (name, side, s)
