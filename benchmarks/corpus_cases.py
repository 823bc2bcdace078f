"""The corpus: the calls of `attnc.compile` that `corpus.py` runs.

They cover every construction and its options, every kind of target, the norms, both dtypes, infinite boxes, kinks and
jumps, affine functions and refusals. A case takes seconds at most, and all of them take minutes. No result may depend
on a proof's limit in wall-clock time: choose a larger eps for a case that varies from run to run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnc

INF = math.inf
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """The arguments of one call of `attnc.compile`."""

    name: str
    source: Any
    box: Any
    eps: float
    options: Mapping[str, Any]


def box(names: str, lo: float, hi: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(names, (lo, hi))


def relu_network(seed: int, sizes: Sequence[int]) -> attnc.ReLUNetwork:
    rng, pairs = np.random.default_rng(seed), list(itertools.pairwise(sizes))
    weights = [rng.normal(size=(o, i)) / np.sqrt(i) for i, o in pairs]
    return attnc.ReLUNetwork(weights, [rng.normal(size=o) * 0.3 for _, o in pairs], (-1.0, 1.5))


def scattered(seed: int, count: int, d: int, outputs: int = 1, is_smooth: bool = True) -> attnc.TableTarget:
    rng = np.random.default_rng(seed)
    points = rng.uniform(-1, 1, (count, d))
    smooth = np.stack([np.sin(points.sum(axis=1) + j) for j in range(outputs)], axis=1)
    return attnc.TableTarget(points, smooth if is_smooth else rng.normal(size=(count, outputs)))


def gridded(count: int, d: int, f: Callable[..., np.ndarray]) -> attnc.TableTarget:
    axes = np.meshgrid(*[np.linspace(-1, 1, count)] * d, indexing="ij")
    points = np.stack([axis.ravel() for axis in axes], axis=1)
    return attnc.TableTarget(points, f(*points.T))


def expressions() -> Iterator[Case]:
    """Expressions under `auto`, on finite boxes, in the maximum norm."""
    line, plane, space = box("x", -2, 2), box("xy", -2, 2), box("xyz", -1, 1)
    rows: Rows = [
        ("sin(x)", box("x", -3, 3), 1e-6),
        ("sin(x)", box("x", -3, 3), 1e-12),
        ("exp(sin(3*x))", line, 1e-5),
        ("1/(1 + 25*x**2)", line, 1e-5),
        ("x**3 - 2*x", line, 1e-8),
        ("gelu(x)", box("x", -4, 4), 1e-7),
        ("abs(x - 0.3)", line, 1e-4),
        ("max(x, x**2)", line, 1e-4),
        ("min(x, 1 - x, 0.2)", line, 1e-5),
        ("abs(sin(3*x))", line, 1e-3),
        ("sqrt(x)", box("x", 0, 1), 1e-3),
        ("x*log(x)", box("x", 0.1, 2), 1e-6),
        ("(sin(x), cos(x), x)", line, 1e-5),
        ("1e-170*sin(x)", line, 1e-171),
        ("tanh(x - x)", line, 1e-3),
        ("x - 5*x + 0.1", line, 1e-9),
        ("(3*x - 2*y, y/3)", plane, 1e-9),
        ("sin(x) + cos(y)", box("xy", -3, 3), 1e-6),
        ("x*y", plane, 1e-8),
        ("max(x, y)", plane, 1e-2),
        ("abs(x - y)", plane, 1e-3),
        ("abs(x*y)", plane, 1e-3),
        ("exp(sin(x)*y)", plane, 1e-3),
        ("tanh(x*y) + sin(2*x)", plane, 1e-4),
        ("exp(-x**2)*cos(y)", plane, 1e-5),
        ("log(1 + x**2 + y**2)", plane, 1e-4),
        ("(x*y, x + 2*y)", plane, 1e-4),
        ("tanh(5*x + y)", plane, 1e-5),
        ("relu(x) - clip(y, -1, 1) + silu(x + y)", plane, 1e-3),
        ("x*y*z", space, 1e-5),
        ("sin(x)*cos(y) + z**2", space, 1e-5),
        ("(exp(sin(x)*y)*z, max(y, z))", space, 1e-2),
        ("a*b + sqrt(2 + c)*d", box("abcd", -1, 1), 1e-5),
        ("exp(a)*cos(b)*tanh(c)*sigmoid(d)*(f + g)/(2 + h)", box("abcdfgh", -1, 1), 1e-4),
        ("sin(a + b + c + d + p + q + r + s)", box("abcdpqrs", -1, 1), 1e-3),
    ]
    for text, where, eps in rows:
        yield Case(f"auto {text} {eps:g}", text, where, eps, {})
    for criterion in ("layers", "anchors", "parameters"):
        yield Case(f"auto by {criterion}", "exp(sin(x)*y)", plane, 1e-3, {"criterion": criterion})


def infinite_boxes() -> Iterator[Case]:
    """Under `auto`, on R and on half-lines."""
    rows: Rows = [
        ("gelu(x)", -INF, INF, 1e-7, {}),
        ("softplus(x)", -INF, INF, 1e-6, {}),
        ("clip(x, -1, 1)", -INF, INF, 1e-3, {}),
        ("abs(x) + 2*relu(x - 1)", -INF, INF, 1e-4, {}),
        ("tanh(x) + sigmoid(2*x)", -INF, INF, 1e-5, {"dtype": "float32"}),
        ("(silu(x), x + 0.5)", -INF, INF, 1e-5, {"also": "float32"}),
        ("exp(-x)", 0.0, INF, 1e-5, {}),
        ("gelu(0.25*x)", -INF, 2.0, 1e-6, {}),
        ("3.5*x - 2.3", -INF, 3.0, 1e-4, {"dtype": "float32"}),
        ("2*x + 1/3", -INF, INF, 1e-6, {}),
    ]
    for text, lo, hi, eps, options in rows:
        yield Case(f"infinite {text} on {lo:g}:{hi:g}", text, {"x": (lo, hi)}, eps, options)


def dtypes() -> Iterator[Case]:
    """Expressions in float32, and in both dtypes."""
    rows: Rows = [
        ("sin(x)", box("x", -3, 3), 1e-4, {}),
        ("sin(x) + cos(y)", box("xy", -3, 3), 1e-5, {}),
        ("abs(x - 0.3)", box("x", -2, 2), 1e-3, {}),
        ("exp(-x*x)*sin(3*y)", box("xy", -2, 2), 1e-4, {}),
        ("x*y*z", box("xyz", -1, 1), 1e-5, {}),
        ("max(a*b, sin(c))*c - 0.3*a", box("abc", -1, 1.5), 1e-3, {"construction": "compose"}),
        ("tanh(x*y)", box("xy", -1, 1), 1e-4, {"construction": "spectral_grid"}),
        ("x*sin(3*x)", box("x", -2, 2), 0.3, {"construction": "max_affine"}),
        ("x*y, y - x", box("xy", 0, 1), 0.6, {"construction": "attention_softmax"}),
    ]
    for text, where, eps, options in rows:
        yield Case(f"float32 {text}", text, where, eps, {"dtype": "float32", **options})
    rows = [
        ("sin(x)", box("x", -3, 3), 1e-5, {}),
        ("sin(x*y) + 0.1", box("xy", -1, 1.5), 1e-3, {"construction": "compose"}),
        ("exp(-x*x)*y", box("xy", -1, 1), 1e-4, {"construction": "spectral_grid"}),
    ]
    for text, where, eps, options in rows:
        yield Case(f"also float32 {text}", text, where, eps, {"also": "float32", **options})


def constructions() -> Iterator[Case]:
    """Expressions by a named construction."""
    many = " + ".join(f"sin(x{i})*x{i + 1}" for i in range(0, 20, 2))
    line, plane = box("x", -2, 2), box("xy", -2, 2)
    rows: Rows = [
        ("max_affine", "x*sin(3*x)", line, 0.05, {}),
        ("max_affine", "sin(x)*y", box("xy", -1, 1), 0.1, {}),
        ("max_affine", "sin(x)*y", plane, 0.04, {}),
        ("max_affine", "sin(x + y + z)", box("xyz", -1, 1), 0.5, {}),
        ("max_affine", "abs(x) + y + z", box("xyz", -1, 1), 0.3, {}),
        ("max_affine", "x*y + max(z, w)", box("xyzw", -1, 1), 0.8, {}),
        ("max_affine", "sqrt(x)", box("x", 0, 1), 0.04, {"centres": "grid"}),
        ("max_affine", "sqrt(x)", box("x", 0, 1), 0.04, {"centres": "adaptive"}),
        ("max_affine", "exp(-2*(x**2 + y**2))", plane, 0.2, {"centres": "adaptive"}),
        ("max_affine_cross", "sin(3*x)", line, 0.1, {}),
        ("max_affine_cross", "sin(x)*cos(y)", plane, 0.5, {}),
        ("two_layer", "sin(x)", box("x", 0, 3), 0.2, {}),
        ("two_layer", "sin(x)", box("x", 0, 3), 0.2, {"heads": 3}),
        ("two_layer", "x*y", box("xy", 0, 1), 0.4, {}),
        ("two_layer", "sin(x) + cos(y)", box("xy", -3, 3), 0.5, {"heads": 2}),
        ("attention_softmax", "sin(3*x)", line, 0.2, {}),
        ("attention_softmax", "x + y", box("xy", 0, 1), 0.4, {}),
        ("attention_softmax", "x + y", box("xy", 0, 1), 0.4, {"heads": 2}),
        ("spectral_grid", "sin(30*x)", box("x", -1, 1), 1e-6, {}),
        ("spectral_grid", "sin(x*y)", box("xy", -1, 1), 1e-6, {}),
        ("spectral_grid", "exp(sin(x)*y)", plane, 1e-2, {}),
        ("spectral_grid", "exp(sin(x)*y)", plane, 1e-5, {}),
        ("spectral_grid", "sin(x)*cos(y) + z**2", box("xyz", -1, 1), 1e-2, {}),
        ("spectral_grid", "sin(x)*cos(y) + z**2", box("xyz", -1, 1), 1e-3, {}),
        ("spectral_grid", "exp(-x**2 - y**2)*sin(3*x + y)", plane, 1e-5, {}),
        ("spectral_grid", "log(1 + x**2 + y**2)*tanh(x - y)", plane, 1e-4, {}),
        ("spectral_grid", "exp(-x*y*z) + z**3", box("xyz", -1, 1), 3e-2, {}),
        ("graded", "x**1.5", box("x", 0, 1), 1e-6, {}),
        ("graded", "sqrt(1 - x**2)", box("x", -1, 1), 1e-3, {}),
        ("graded", "(abs(x) + abs(x - 0.5), min(x**2, 0.5))", line, 1e-4, {}),
        ("graded", "1/x", box("x", 50, 500), 1e-10, {}),
        ("binomial", "x**3 - 2*x", box("x", -1, 1), 1e-3, {}),
        ("binomial", "(sin(3*x), 1/(1 + x**2))", line, 1e-4, {}),
        ("gates", "gelu(2*x - y) + sigmoid(x)", plane, 1e-4, {}),
        ("gates", "softplus(x) + tanh(2*x)", line, 1e-6, {}),
        ("gates", "3*x*y + tanh(x)", plane, 1e-5, {}),
        ("compose", "sin(x)", box("x", -3, 3), 1e-9, {}),
        ("compose", "a/3 + pi*sin(a*b/7) + sqrt(2)*b", box("ab", -1, 1.5), 1e-8, {}),
        ("compose", "tanh(5*tanh(5*tanh(5*a*b) + b) + a)", box("ab", -1, 1.5), 1e-2, {}),
        ("compose", "clip(a*b, -0.3, 0.5) + abs(b - c)/(2 + a)", box("abc", -1, 1.5), 1e-4, {}),
        ("compose", "sqrt(x)*y + asin(y)", {"x": (0, 1), "y": (-1, 1)}, 3e-2, {}),
        ("compose", "exp(sin(a*b) + c*d)*tanh(f - g*h)", box("abcdfgh", -1, 1), 1e-5, {}),
        ("compose", many, {f"x{i}": (-1, 1) for i in range(20)}, 1e-4, {}),
    ]
    for name, text, where, eps, options in rows:
        variant = "".join(f" {key}={value}" for key, value in options.items())
        yield Case(f"{name}{variant} {text:.60} {eps:g}", text, where, eps, {"construction": name, **options})


def norms() -> Iterator[Case]:
    """L_p norms; half of the functions jump or have a kink."""
    rows: Rows = [
        (1, "floor(2*x) + sin(x)", box("x", -1, 1), 0.5, "auto"),
        (1, "sign(x)", box("x", -1, 1), 0.1, "auto"),
        (2, "floor(3*x)", box("x", -1, 1), 0.3, "auto"),
        (2, "sign(x)*y", box("xy", -1, 1), 1.2, "auto"),
        (2, "sqrt(x)", box("x", 0, 1), 1e-3, "auto"),
        (2, "relu(x)", box("x", -1, 1), 3e-2, "auto"),
        (2, "x*y", box("xy", -1, 1), 1e-3, "auto"),
        (4, "sign(x - 0.2)", box("x", -1, 1), 0.4, "auto"),
        (4, "exp(x)", box("x", -1, 1), 1e-4, "auto"),
        (1, "sin(x) + cos(y)", box("xy", -1, 1), 1e-2, "spectral_grid"),
        (2, "sin(x)", box("x", -3, 3), 0.2, "max_affine"),
        (2, "abs(x - 0.3)", box("x", -1, 1), 0.1, "max_affine"),
        (2, "sign(x) + x", box("x", -1, 1), 0.5, "two_layer"),
        (2, "x", box("x", 0, 1), 0.2, "attention_softmax"),
        (4, "sign(x - 0.3)*floor(2*y)", box("xy", -1, 1), 0.1, "affine_cells"),
    ]
    for p, text, where, eps, construction in rows:
        options = {"norm": p, "construction": construction}
        yield Case(f"L{p} {construction} {text}", text, where, eps, options)


def python_code() -> Iterator[Case]:
    """Callables and functions of sequences, with and without a constant."""

    def wave(points: np.ndarray) -> np.ndarray:
        return np.sin(points.sum(axis=1))

    def largest(points: np.ndarray) -> np.ndarray:
        return np.abs(points).max(axis=1)

    def pair(points: np.ndarray) -> np.ndarray:
        return np.stack([np.sin(points[:, 0]), points[:, 0] ** 2], axis=1)

    def centred(X: np.ndarray) -> np.ndarray:
        return np.tanh(X - X.mean(axis=1, keepdims=True))

    def mixed(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
        return np.sin(X) * Y.mean(axis=1, keepdims=True)

    rows: Rows = [
        ("lipschitz, one variable", wave, 1, 1e-2, {"lipschitz": 1.0}),
        ("lipschitz, two variables", wave, 2, 0.2, {"lipschitz": 1.5}),
        ("lipschitz, max_affine", largest, 2, 0.2, {"lipschitz": 1.0, "construction": "max_affine"}),
        ("lipschitz, L2", pair, 1, 0.1, {"lipschitz": 3.0, "norm": 2}),
        ("hessian_bound, two outputs", pair, 1, 1e-3, {"hessian_bound": 2.0}),
        ("hessian_bound, two variables", wave, 2, 5e-3, {"hessian_bound": 1.0}),
        ("both constants", wave, 1, 1e-4, {"lipschitz": 1.0, "hessian_bound": 1.0}),
        ("no constant", wave, 2, 1e-4, {}),
    ]
    for label, f, d, eps, options in rows:
        yield Case(f"callable {label}", f, [(-1, 1)] * d, eps, options)
    sequence = attnc.SequenceTarget
    rows = [
        ("one input", sequence(centred, tokens=2, width=1, lipschitz=2.0), 0.3, {}),
        (
            "one input, two_layer",
            sequence(centred, tokens=2, width=1, lipschitz=2.0),
            1.0,
            {"construction": "two_layer"},
        ),
        ("three tokens", sequence(lambda X: X, tokens=3, width=1, lipschitz=1.0), 0.8, {"dtype": "float32"}),
        ("two inputs", sequence(mixed, tokens=(1, 2), width=(1, 1), box=(-1, 1), lipschitz=1.0), 0.4, {}),
        ("cross", sequence(centred, tokens=2, width=1, lipschitz=2.0), 0.4, {"construction": "max_affine_cross"}),
    ]
    for label, target, eps, options in rows:
        yield Case(f"sequence {label}", target, None, eps, options)


def linear_targets() -> Iterator[Case]:
    """Truncated linear functions and ReLU networks."""
    rng, heads = np.random.default_rng(0), {"construction": "truncated_linear_heads"}
    plane = attnc.TruncatedLinear([2.1, -1.3], 0.5, 0.1, 1.0, {"s": (-1, 1), "t": (0, 2)})
    tokens = attnc.TruncatedLinear(rng.normal(size=(3, 2)), rng.normal(size=3), -1.0, 1.0, (-2, 2))
    many = attnc.TruncatedLinear(rng.normal(size=12), 0.0, -1.0, 1.0, (-1, 1))
    rows: Rows = [
        ("two variables", plane, 0.02, {}),
        ("two variables, heads", plane, 0.02, heads),
        ("two variables, both dtypes", plane, 0.02, {"also": "float32"}),
        ("tokens", tokens, 0.02, {}),
        ("tokens, heads, float32", tokens, 0.05, {"dtype": "float32", **heads}),
        ("twelve variables", many, 1e-3, {}),
        ("two variables, close", plane, 1e-4, {}),
    ]
    for label, target, eps, options in rows:
        yield Case(f"truncated_linear {label}", target, None, eps, options)
    rows = [
        ((2, 5, 1), 0.1, "float64"),
        ((3, 6, 4, 2), 0.1, "float64"),
        ((1, 32, 1), 0.01, "float64"),
        ((8, 12, 8), 0.1, "float64"),
        ((4, 16, 16, 2), 0.1, "float64"),
        ((4, 32, 32, 2), 0.1, "float64"),
        ((3, 4, 4), 0.1, "float32"),
    ]
    for sizes, eps, dtype in rows:
        label = "-".join(map(str, sizes))
        yield Case(f"relu_network {label} {dtype}", relu_network(0, sizes), None, eps, {"dtype": dtype})
    yield Case("relu_network 2-5-1 both dtypes", relu_network(1, (2, 5, 1)), None, 0.1, {"also": "float32"})


def tables() -> Iterator[Case]:
    """Tables on grids and at scattered points, smooth and rough."""
    rng = np.random.default_rng(3)
    rows: Rows = [
        ("table_grid sin(x)", attnc.TableTarget(np.linspace(-3, 3, 50), np.sin(np.linspace(-3, 3, 50))), 1e-6, {}),
        ("table_grid exp(xy)", gridded(12, 2, lambda x, y: np.exp(x * y)), 1e-4, {}),
        ("table_grid three variables", gridded(6, 3, lambda x, y, z: np.sin(x + y * z)), 1e-4, {}),
        ("table_grid noise", attnc.TableTarget(np.linspace(0, 1, 60), rng.normal(size=60)), 1e-6, {}),
        ("table_grid float32", gridded(10, 2, lambda x, y: np.sin(3 * x) * y), 1e-3, {"dtype": "float32"}),
        ("table_grid 400 points", gridded(20, 2, lambda x, y: np.sin(3 * x) * y), 1e-5, {}),
        ("table_scattered two outputs", scattered(1, 60, 2, 2), 1e-3, {}),
        ("table_scattered three variables", scattered(1, 100, 3), 1e-2, {}),
        ("table_scattered noise", scattered(2, 80, 2, is_smooth=False), 1e-1, {}),
        ("table_scattered float32", scattered(4, 60, 2), 1e-2, {"dtype": "float32"}),
    ]
    for label, table, eps, options in rows:
        yield Case(label, table, None, eps, options)


def refusals() -> Iterator[Case]:
    """Cases that must be refused: the kind of refusal and its best bound are compared."""
    real = {"x": (-INF, INF)}
    rows: Rows = [
        ("gelu(x)", real, 1.5e-14, {}),
        ("sin(x)", box("x", -3, 3), 1e-15, {"construction": "spectral_grid"}),
        ("abs(x)", box("x", -1, 1), 1e-4, {"construction": "spectral_grid", "max_anchors": 60}),
        ("exp(x)", box("x", -1, 2), 1e-5, {"construction": "graded", "dtype": "float32"}),
        ("sin(x)*y", box("xy", -1, 1), 1e-2, {"construction": "max_affine", "max_anchors": 500}),
        ("sin(x)*y", box("xy", -1, 1), 1e-4, {"max_anchors": 3}),
        ("x/3", real, 1e-3, {}),
        ("gelu(x)", real, 1e-3, {"construction": "graded"}),
        ("sin(x)", box("x", -1, 1), 0.1, {"heads": 2}),
        ("x*1e39", box("x", -1, 1), 1e38, {"dtype": "float32"}),
        ("floor(x)", box("x", -1, 1), 0.1, {}),
        ("1/x", box("x", -1, 1), 0.1, {}),
        ("sin(x", box("x", -1, 1), 0.1, {}),
    ]
    for text, where, eps, options in rows:
        variant = "".join(f" {key}={value}" for key, value in options.items())
        yield Case(f"refused {text} {eps:g}{variant}", text, where, eps, options)
    clip = attnc.TruncatedLinear([1.0])
    yield Case("refused clip with 300 anchors", clip, None, 1e-6, {"max_anchors": 300, "dtype": "float32"})
    yield Case("refused Python code in eight variables", lambda X: X.sum(axis=1), [(-1, 1)] * 8, 1e-3, {})


KINDS = (expressions, infinite_boxes, dtypes, constructions, norms, python_code, linear_targets, tables, refusals)


def corpus() -> dict[str, Case]:
    """All cases by name."""
    cases = [case for kind in KINDS for case in kind()]
    named = {case.name: case for case in cases}
    assert len(named) == len(cases), "two cases have the same name"
    return named
