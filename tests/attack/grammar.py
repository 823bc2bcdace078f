"""Random calls of `attnc.compile`: every class of targets, every construction, both dtypes, boxes of every size.

`random_case(seed, number)` is the same call every time. Each case has its `meaning`: the target as an expression, which
Arb can evaluate, whatever the source that is given to `compile` (text, Python code, a torch module). A table is its own
meaning.
"""

from __future__ import annotations

import csv
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc.cli.tables import read_csv
from attnc.errors import AttncError
from attnc.numerics.intervals import Interval
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Node, Number, Product, Sum, Variable
from attnc.targets.target import Target
from strategies.expressions import BINARY, BINARY_KINKED, KINKED, SAFE, SMOOTH

Rng = np.random.Generator
Ends = tuple[float, float]
NAMES = ("x", "y", "z", "w")
ON_THE_LINE = (
    *("gelu({})", "silu({})", "softplus({})", "relu({})", "tanh({})", "sigmoid({})", "erf({})", "abs({})"),
    *("clip({}, -1, 0.75)", "max({}, 0.25)", "min({}, -0.5)"),
)
"""Functions with asymptotes, for infinite boxes."""
RAW = (
    *("exp({})", "log({})", "sqrt({})", "1/({})", "({})**3", "({})**0.5", "({})**-1.5", "tan(0.3*{})", "asin(0.2*{})"),
    *("acos(0.2*{})", "sinh({})", "cosh({})"),
)
"""Functions that are not defined or moderate everywhere. Targets that are not defined on their box are drawn again."""
JUMPING = ("sign({})", "floor({})", "floor(2*{})*{}", "sign({})*sin(3*{})", "relu(sign({}))", "sign({}) + abs({})")
HARD = (
    "x**2",
    "x**4",
    "gelu(x) - relu(x)",
    "x*abs(x)",
    "sqrt(abs(x))",
    "abs(x)**1.5",
    "max(x, 0)**2",
    "1/(1 + 25*x**2)",
)
"""Functions whose error has its largest value at a border of cells, or that are hard to enclose."""
EXTREME = ("sin({})", "{}", "abs({})", "({})**2", "tanh({})", "exp({})", "1/(2 + {})", "sqrt(3 + {})")
"""Functions of x in units of the box, for boxes of all sizes."""
DRAWS = 40
"""The number of attempts to draw a target that is defined on its box and not constant. Half of the drawn ones are."""


@dataclass(frozen=True)
class Case:
    """The arguments of one call of `attnc.compile`, and the function that they mean."""

    kind: str
    source: Any
    box: Any
    eps: float
    options: dict[str, Any]
    meaning: Target = field(repr=False)

    def __str__(self) -> str:
        shown = self.meaning.text or self.meaning.describe()
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.kind}: {shown:.300} on {self.meaning.box}, eps={self.eps!r}{options}"

    def compile(self) -> attnc.Network:
        return attnc.compile(self.source, self.box, self.eps, **self.options)


def random_case(seed: int, number: int, kinds: Sequence[Callable[[Rng], Case]] | None = None) -> Case:
    """Return a case. Drawn targets that are not defined on their box, or constant, are replaced by others."""
    rng = np.random.default_rng((seed, number))
    chosen = (kinds or KINDS)[number % len(kinds or KINDS)]
    for _ in range(DRAWS):
        try:
            return chosen(rng)
        except AttncError:  # not defined on the box, or no variable is left
            continue
    return replace(polynomials(np.random.default_rng(number)), kind="instead of " + chosen.__name__)


def shown(x: float) -> str:
    return f"{x:.3g}"


def affine(rng: Rng, names: Sequence[str]) -> str:
    terms = [f"{shown(rng.normal() * 10 ** rng.uniform(-0.5, 0.5))}*{name}" for name in names]
    return f"({' + '.join([*terms, shown(rng.normal())])})".replace("+ -", "- ")


def composition(rng: Rng, names: Sequence[str], depth: int, templates: Sequence[str], joins: Sequence[str]) -> str:
    """Return a random text, one to `depth` operations deep, in which every variable may occur several times."""
    if depth <= 0:
        name = str(rng.choice(list(names)))
        return name if rng.random() < 0.7 else affine(rng, [name])
    below = depth - 1 - int(rng.random() < 0.15)
    if rng.random() < 0.4:
        parts = [composition(rng, names, below, templates, joins) for _ in range(2)]
        return str(rng.choice(joins)).format(*parts)
    return str(rng.choice(templates)).format(composition(rng, names, below, templates, joins))


def random_ends(rng: Rng) -> Ends:
    """Two ends: random, or round numbers, so that cells end at kinks; wide or narrow."""
    lo, hi = np.sort(rng.uniform(-4, 4, 2)) * 10 ** rng.choice([0.0, 0.0, 0.0, -1.0, 0.5])
    if rng.random() < 0.4:
        lo, hi = math.floor(lo), math.floor(lo) + max(1, round(hi - lo))
    return float(lo), float(hi)


def spread(target: Target) -> float:
    """Return max − min of the outputs over a sample, at least 1e-6 of their size. AttncError if f is constant."""
    box = target.box if target.box.is_bounded else target.box.core(8.0)
    values = target(sample_points(box, 400))
    found = float(np.ptp(values, axis=0).max())
    if not found > 0:
        raise attnc.InputError("constant")
    return max(found, 1e-6 * float(np.abs(values).max()))


def log_uniform(rng: Rng, least: float, most: float) -> float:
    return float(10 ** rng.uniform(math.log10(least), math.log10(most)))


def random_options(rng: Rng, **options: Any) -> dict[str, Any]:
    """Return options that suit every target: the dtype, a second one, the criterion."""
    if rng.random() < 0.35:
        options["dtype"] = "float32"
    elif rng.random() < 0.15:
        options["also"] = "float32"
    if rng.random() < 0.15:
        options["criterion"] = str(rng.choice(["anchors", "parameters", "layers"]))
    return options


def of_text(rng: Rng, kind: str, text: str, ends: Sequence[Ends], least: float, most: float, **options: Any) -> Case:
    """Return the case of an expression, with eps between these shares of its spread; in float32 not below 2e-4."""
    parsed, options = Expression.parse(text), random_options(rng, **options)
    box = dict(zip(parsed.variables, ends, strict=False))
    target = ExpressionTarget(parsed, Box.parse(box))
    if "float32" in options.values():
        least, most = max(least, 2e-4), max(most, 2e-3)
    return Case(kind, text, box, log_uniform(rng, least, most) * spread(target), options, target)


# --- kinds of cases ---------------------------------------------------------------------------------------------------


def polynomials(rng: Rng) -> Case:
    d = int(rng.choice([1, 1, 1, 2, 2, 3]))
    terms = []
    for _ in range(int(rng.integers(1, 6))):
        powers = [f"{name}**{n}" for name in NAMES[:d] if (n := int(rng.integers(0, 6 if d == 1 else 3)))]
        terms.append("*".join([shown(rng.normal()), *powers]))
    text = " + ".join([*terms, *(f"{shown(rng.normal())}*{name}" for name in NAMES[:d])]).replace("+ -", "- ")
    return of_text(rng, "polynomial", text, [random_ends(rng) for _ in range(d)], 1e-9 if d == 1 else 1e-6, 0.5)


def smooth(rng: Rng) -> Case:
    d = int(rng.choice([1, 1, 1, 2, 2, 3]))
    text = composition(rng, NAMES[:d], int(rng.integers(1, 4)), SMOOTH + SAFE + RAW, BINARY)
    return of_text(rng, "smooth", text, [random_ends(rng) for _ in range(d)], 1e-9 if d == 1 else 1e-5, 0.5)


def kinked(rng: Rng) -> Case:
    d = int(rng.choice([1, 1, 1, 2]))
    text = composition(rng, NAMES[:d], int(rng.integers(1, 4)), KINKED + KINKED + SMOOTH, BINARY + BINARY_KINKED)
    return of_text(rng, "kinked", text, [random_ends(rng) for _ in range(d)], 1e-4 if d == 1 else 1e-2, 0.5)


def hard(rng: Rng) -> Case:
    """On boxes that are symmetric about the kink, or end in it, at eps near the spread too."""
    end = log_uniform(rng, 1e-8, 4)
    ends = [(-end, end), (0.0, end), (-end, 2 * end)][int(rng.integers(3))]
    return of_text(rng, "hard", str(rng.choice(HARD)), [ends], 1e-5, 0.7)


def sums_of_kinks(rng: Rng) -> Case:
    """Lines and bent lines, whose parts cancel."""
    parts = [affine(rng, "x") for _ in range(2)]
    bent = [str(rng.choice(["abs{}", "relu{}"])).format(affine(rng, "x")) for _ in range(int(rng.integers(1, 3)))]
    text = "(" + " - ".join(parts) + ")" + "".join(f" {rng.choice(['+', '-'])} {part}" for part in bent)
    return of_text(rng, "sum of kinks", text, [random_ends(rng)], 3e-5, 0.3)


def tuples(rng: Rng) -> Case:
    d = int(rng.choice([1, 1, 2]))
    texts = [composition(rng, NAMES[:d], 2, SMOOTH + KINKED, BINARY) for _ in range(int(rng.integers(2, 4)))]
    return of_text(rng, "several outputs", f"({', '.join(texts)})", [random_ends(rng) for _ in range(d)], 1e-3, 0.5)


def many_variables(rng: Rng) -> Case:
    """Compositions of four variables and more, which `compose` proves head by head."""
    names = [f"x{i}" for i in range(int(rng.integers(4, 8)))]
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    text = " + ".join(composition(rng, group, 2, SMOOTH, BINARY) for group in groups)
    return of_text(rng, "many variables", text, [random_ends(rng) for _ in names], 1e-4, 0.5)


def jumps(rng: Rng) -> Case:
    """In L_p, for small and large p, with one variable or two."""
    d = 2 if rng.random() < 0.25 else 1
    parts = [str(rng.choice(JUMPING)).replace("{}", affine(rng, "x"))]
    parts += ["y" if d == 2 else affine(rng, "x")] if d == 2 or rng.random() < 0.5 else []
    text = str(rng.choice(["+", "*"])).join(parts)
    p = float(rng.choice([1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.5, 4.0, 7.0]))
    case = of_text(rng, "jump", text, [random_ends(rng) for _ in range(d)], 0.1, 0.7, norm=p)
    return _in_norm(case, p)


def norms(rng: Rng) -> Case:
    """Continuous functions in L_p."""
    p = float(rng.choice([1.0, 2.0, 4.0, 6.5]))
    case = (kinked if rng.random() < 0.5 else smooth)(rng)
    return _in_norm(replace(case, kind="norm", options=case.options | {"norm": p}), p)


def _in_norm(case: Case, p: float) -> Case:
    """Scale eps as the norm of a constant: by the volume of the box to 1/p."""
    volume = float(np.prod(case.meaning.box.widths))
    return replace(case, eps=max(case.eps, 1e-3 * spread(case.meaning)) * volume ** (1 / p))


def infinite_boxes(rng: Rng) -> Case:
    """On R and on half-lines: functions that are nearly affine far out, with slopes that floats can hold, mostly."""

    def number() -> str:
        return str(rng.integers(-24, 25) / 8) if rng.random() < 0.9 else shown(rng.normal())

    parts = [
        str(rng.choice(ON_THE_LINE)).format(f"({number()}*x + {number()})") for _ in range(int(rng.integers(1, 4)))
    ]
    if rng.random() < 0.4:
        parts.append("x")
    text = " + ".join(f"{number()}*{part}" for part in parts)
    ends = [(-math.inf, math.inf), (-math.inf, shown(rng.normal())), (shown(rng.normal()), math.inf)]
    lo, hi = map(float, ends[int(rng.integers(3))])
    return of_text(rng, "infinite box", text, [(lo, hi)], 1e-6, 0.3)


def extreme_boxes(rng: Rng) -> Case:
    """Boxes from 1e-300 to 1e300 wide, about 0 or beside it, and functions of x in units of the box or not."""
    unit = log_uniform(rng, 1e-12, 1e12) if rng.random() < 0.8 else log_uniform(rng, 1e-300, 1e300)
    lo, hi = ((-unit, unit), (0.0, unit), (unit, 2 * unit), (unit, unit * (1 + 1e-3)))[int(rng.integers(4))]
    inner = f"{1 / unit:.6g}*x" if unit < 1e-3 or unit > 1e3 or rng.random() < 0.5 else "x"
    text = str(rng.choice(EXTREME)).format(inner)
    if rng.random() < 0.5:
        text = f"{shown(log_uniform(rng, 1e-9, 1e9))}*{text}"
    return of_text(rng, "extreme box", text, [(lo, hi)], 1e-6, 0.5)


def named_constructions(rng: Rng) -> Case:
    """A construction of the papers or beyond, with its own options."""
    name = str(rng.choice(["max_affine", "max_affine_cross", "two_layer", "attention_softmax", "graded", "binomial"]))
    name = str(rng.choice([name, name, name, "spectral_grid", "gates", "compose"]))
    options: dict[str, Any] = {"construction": name}
    d = 1 if name in ("graded", "binomial") or rng.random() < 0.6 else 2
    templates = KINKED + SMOOTH if name in ("graded", "compose", "gates") or name.startswith("max_") else SMOOTH
    text = composition(rng, NAMES[:d], 2, templates, BINARY)
    least, most = (0.03 if d == 1 else 0.12, 0.6) if name in SELECTING else (1e-5 if d == 1 else 1e-3, 0.5)
    if name == "max_affine" and rng.random() < 0.5:
        options["centres"] = str(rng.choice(["grid", "adaptive"]))
    if name in ("two_layer", "attention_softmax") and rng.random() < 0.3:
        options["heads"] = 2
    return of_text(rng, name, text, [random_ends(rng) for _ in range(d)], least, most, **options)


SELECTING = ("max_affine", "max_affine_cross", "two_layer", "attention_softmax")
"""Constructions whose networks grow like (1/eps)^d."""


def callables(rng: Rng) -> Case:
    """Python code with a Lipschitz constant, which intervals derive from the expression behind it."""
    d = int(rng.choice([1, 1, 2]))
    text = composition(rng, NAMES[:d], 2, SMOOTH, BINARY)
    case = of_text(rng, "callable", text, [random_ends(rng) for _ in range(d)], 0.02 if d == 1 else 0.15, 0.5)
    expression = case.meaning.expression
    assert expression is not None

    def code(points: np.ndarray) -> np.ndarray:
        return expression(points)[:, 0]

    options = {**case.options, "lipschitz": lipschitz(expression, case.meaning.box)}
    return replace(case, source=code, box=list(case.box.values()), options=options)


def lipschitz(expression: Expression, box: Box, cells: int = 512) -> float:
    """Return a Lipschitz constant from the 2-norm to the largest output, by intervals over parts of the box."""
    per_axis = max(1, int(cells ** (1 / box.d)))
    steps = np.stack(np.meshgrid(*[np.arange(per_axis)] * box.d, indexing="ij"), axis=-1).reshape(-1, box.d)
    lo, hi = (np.clip(box.lo + (steps + i) / per_axis * box.widths, box.lo, box.hi) for i in (0, 1))
    overlap = 1e-9 * box.widths
    parts = Interval(np.maximum(lo - overlap, box.lo), np.minimum(hi + overlap, box.hi))
    _, slopes = expression.ranges_and_gradients(parts, violations="infinite")
    found = float(np.sqrt((slopes.mag**2).sum(axis=2)).max()) * (1 + 1e-9)
    if not math.isfinite(found):
        raise attnc.InputError("no Lipschitz constant")
    return found


class SequenceMeaning(ExpressionTarget):
    """An expression of all entries of one or two sequences, and the shapes of these."""

    def __init__(self, expression: Expression, target: attnc.SequenceTarget) -> None:
        super().__init__(expression, target.box)
        self.input_shapes, self.output_shape = target.input_shapes, target.output_shape


def sequences(rng: Rng) -> Case:
    """One or two sequences of tokens; every output is an expression of all entries."""
    shapes = [[(2, 1)], [(3, 1)], [(2, 2)], [(1, 1), (2, 1)], [(2, 1), (1, 1)]][int(rng.integers(5))]
    lo, hi = random_ends(rng)
    middle, half = (lo + hi) / 2, min(1.0, (hi - lo) / 2)
    ends = (middle - half, middle + half)
    names = [
        f"{letter}{i}_{j}" for letter, (n, d) in zip("xy", shapes, strict=False) for i in range(n) for j in range(d)
    ]
    total = f"tanh({' + '.join(f'{shown(rng.normal())}*{name}' for name in names)})".replace("+ -", "- ")
    texts = [
        f"{total} + {shown(rng.normal())}*{composition(rng, names, 1, SMOOTH, BINARY)}" for _ in range(shapes[0][0])
    ]
    expression = Expression.parse(f"({', '.join(texts)},)" if len(texts) == 1 else f"({', '.join(texts)})")
    expression, n = expression.with_variables(names), shapes[0][0]

    def code(*inputs: np.ndarray) -> np.ndarray:
        flat = np.concatenate([part.reshape(len(part), -1) for part in inputs], axis=1)
        return expression(flat).reshape(len(flat), n, 1)

    constant = lipschitz(expression, Box.parse([ends] * len(names), names))
    tokens, width = (shapes[0]) if len(shapes) == 1 else tuple(zip(*shapes, strict=True))
    target = attnc.SequenceTarget(code, tokens, width, ends, lipschitz=constant)
    eps = log_uniform(rng, 0.25, 0.8) * constant * half * math.sqrt(len(names))
    options = random_options(rng)
    if len(shapes) == 1 and rng.random() < 0.3:
        options["construction"] = str(rng.choice(["two_layer", "max_affine_cross"]))
    return Case("sequence", target, None, eps, options, SequenceMeaning(expression, target))


def relu_networks(rng: Rng) -> Case:
    """A torch.nn.Sequential of Linear and ReLU with random weights, and the same as a tree of exact numbers."""
    import torch

    sizes = [int(rng.integers(1, 4)), *(int(rng.integers(2, 7)) for _ in range(int(rng.integers(1, 3)))), 1]
    sizes[-1] = int(rng.integers(1, 3))
    parts: list[Any] = []
    names = [f"x{i}" for i in range(sizes[0])]
    state: list[Node] = [Variable(name) for name in names]
    for inputs, outputs in itertools.pairwise(sizes):
        linear = torch.nn.Linear(inputs, outputs)
        with torch.no_grad():
            linear.weight.copy_(torch.as_tensor(rng.normal(size=(outputs, inputs)) / math.sqrt(inputs)))
            linear.bias.copy_(torch.as_tensor(rng.normal(size=outputs) * 0.3))
        W, b = (array.detach().double().numpy() for array in (linear.weight, linear.bias))
        sums = [_combination(row, state, c) for row, c in zip(W, b, strict=True)]
        state = [Call("relu", (node,)) for node in sums]
        parts += [linear, torch.nn.ReLU()]
    expression = Expression("ReLU network " + "-".join(map(str, sizes)), tuple(sums), tuple(names), True, ())
    ends = random_ends(rng)
    target = ExpressionTarget(expression, Box.parse([ends] * sizes[0], names))
    eps = log_uniform(rng, 0.01, 0.4) * spread(target)
    return Case("ReLU network", torch.nn.Sequential(*parts[:-1]), [ends] * sizes[0], eps, random_options(rng), target)


def _combination(weights: np.ndarray, nodes: Sequence[Node], constant: float) -> Node:
    terms = [Product((Number(Fraction(float(w))), node)) for w, node in zip(weights, nodes, strict=True)]
    return Sum((*terms, Number(Fraction(float(constant)))))


def truncated_linear(rng: Rng) -> Case:
    n, d = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    a, b = np.sort(rng.normal(size=2)) + np.array([-0.2, 0.2])
    W, t = rng.normal(size=(n, d)), rng.normal(size=n)
    target = attnc.TruncatedLinear(W[0] if n == 1 else W, t[0] if n == 1 else t, float(a), float(b), random_ends(rng))
    assert target.text is not None
    expression = Expression.parse(f"({target.text},)" if n == 1 else f"({target.text})")
    meaning = ExpressionTarget(expression.with_variables(target.box.names), target.box)
    meaning.input_shapes, meaning.output_shape = target.input_shapes, target.output_shape
    options = random_options(rng)
    if rng.random() < 0.4:
        options["construction"] = "truncated_linear_heads"
    return Case("truncated linear", target, None, log_uniform(rng, 2e-3, 0.3) * float(b - a), options, meaning)


def tables(rng: Rng) -> Case:
    """A table from a CSV file: on a grid or scattered, smooth or random values, one or two outputs."""
    d, outputs = int(rng.choice([1, 1, 2, 2, 3])), int(rng.integers(1, 3))
    if rng.random() < 0.5:
        counts = [int(rng.integers(2, (40, 10, 5)[d - 1])) for _ in range(d)]
        axes = [np.sort(rng.uniform(-2, 2, n)) for n in counts]
        points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    else:
        points = rng.uniform(-1, 1, (int(rng.integers(4, 60)), d)) * 10 ** rng.uniform(-2, 2, d)
    values = rng.normal(size=(len(points), outputs))
    is_smooth = rng.random() < 0.7
    if is_smooth:
        values = np.stack([np.sin(points @ rng.normal(size=d) + j) for j in range(outputs)], axis=1)
    names, columns = NAMES[:d], [f"f{j}" for j in range(outputs)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*names, *columns])
            writer.writerows(np.concatenate([points, values], axis=1).tolist())
        target = read_csv(path, ",".join(names), ",".join(columns))
    options = random_options(rng)
    least = 1e-3 if "float32" in options.values() else 1e-6
    return Case("table", target, None, log_uniform(rng, least, 0.1), options, target)


KINDS: tuple[Callable[[Rng], Case], ...] = (
    polynomials,
    smooth,
    kinked,
    hard,
    sums_of_kinks,
    tuples,
    many_variables,
    jumps,
    norms,
    infinite_boxes,
    extreme_boxes,
    named_constructions,
    callables,
    sequences,
    relu_networks,
    truncated_linear,
    tables,
    named_constructions,
)
"""All kinds of cases, in turn. Named constructions have two turns: there are nine of them."""
