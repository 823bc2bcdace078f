"""Random programs of one attention stage: partitions, circuits, and heads that an expression describes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

import attnc
from attnc.constructions.fitting.cell_head import CellHead, self_attention
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.selection import Positions
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from proofs.mutations import with_entry, with_number

VARIABLES = ("x", "y", "z")
MANY = tuple("abcdfghijk")
OF_ONE = (
    "sin({})",
    "cos({})",
    "tanh({})",
    "exp(0.3*{})",
    "sigmoid({})",
    "abs({})",
    "relu({})",
    "atan({})",
    "sqrt(1.5 + sin({}))",
    "1/(2 + cos({}))",
    "({})**2",
    "softplus({})",
    "log(2 + tanh({}))",
    "gelu({})",
    "sin(40*{})",
)
OF_TWO = (
    "({} + {})",
    "({} - {})",
    "({})*({})",
    "max({}, {})",
    "min({}, {})",
    "0.5*({} + {})",
    "({})/(2.5 + tanh({}))",
    "(1.2 + sin({}))**({})",
)


def random_composition(rng: np.random.Generator, num_operations: int, names: Sequence[str]) -> str:
    """Return an expression of these variables, each used once, with this many operations, or as many as join them."""
    pool = [str(name) for name in rng.permutation(list(names))]
    while num_operations > 0 or len(pool) > 1:
        num_operations -= 1
        if len(pool) > 1 and (rng.random() < 0.5 or num_operations <= 0):
            left, right = (pool.pop(int(rng.integers(len(pool)))) for _ in range(2))
            pool.append(str(rng.choice(OF_TWO)).format(left, right))
        else:
            i = int(rng.integers(len(pool)))
            pool[i] = str(rng.choice(OF_ONE)).format(pool[i])
    return pool[0]


def dtype_of(rng: np.random.Generator) -> str:
    return "float32" if rng.random() < 0.35 else "float64"


def random_target(rng: np.random.Generator, text: str, d: int) -> ExpressionTarget:
    """On a box of any width within [−4, 4]^d; variables that the text lacks are added without effect."""
    names = VARIABLES[:d]
    ends = np.sort(rng.uniform(-4, 4, (d, 2)), axis=1)
    if rng.random() < 0.5:
        ends = np.round(ends * 4) / 4 + np.array([0.0, 0.25])
    missing = [name for name in names if name not in Expression.parse(text).variables]
    whole = " + ".join([f"({text})", *(f"{name} - {name}" for name in missing)])
    return attnc.as_target(whole, {name: tuple(map(float, pair)) for name, pair in zip(names, ends, strict=True)})


def random_composed(rng: np.random.Generator) -> ExpressionTarget:
    """One to three variables; DomainError where it is not defined on the box for certain."""
    d = int(rng.choice([1, 1, 2, 2, 3]))
    return random_target(rng, random_composition(rng, int(rng.integers(1, 5)), VARIABLES[:d]), d)


def random_values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of mixed sign and size, some zero."""
    values = rng.normal(size=shape) * 10.0 ** (rng.uniform(-6, 3, shape) if rng.random() < 0.4 else rng.uniform(-3, 2))
    return np.where(rng.random(shape) < 0.1, 0.0, values)


def random_anchors(rng: np.random.Generator, p: int, target: ExpressionTarget) -> np.ndarray:
    """Anywhere in and about the box, in clusters, twice, or on a grid."""
    box = target.box
    anchors = box.lo + rng.uniform(-0.3, 1.3, (p, box.d)) * box.widths
    kind = rng.integers(4)
    if kind == 1:
        anchors = anchors[rng.integers(0, p, p)] + rng.normal(size=(p, box.d)) * 10.0 ** rng.uniform(-8, -1)
    if kind == 2:
        anchors = np.round(anchors * 3) / 3
    return np.asarray(anchors)


def partition(rng: np.random.Generator, target: ExpressionTarget) -> Program:
    """Score β(2L·y + bias), y = scale·x + offset, as `max_affine` has it; or bias that is not −|L|² at all."""
    d, p = target.box.d, int(rng.integers(1, 18))
    anchors = random_anchors(rng, p, target)
    beta = float(10 ** rng.uniform(-2, 8))
    bias = -(anchors**2).sum(axis=1)
    if rng.random() < 0.3:
        bias = bias + rng.normal(size=p) * 10.0 ** rng.uniform(-8, 0)
    scale, offset = np.ones(d), np.zeros(d)
    if rng.random() < 0.5:
        scale, offset = rng.uniform(0.1, 3, d), rng.normal(size=d)
    values = random_values(rng, (p, target.num_outputs))
    if rng.random() < 0.5:  # those of f, so that the error is small where the weights are hard
        inside = np.clip((anchors - offset) / scale, target.box.lo, target.box.hi)
        values = target.expression(inside)
    keys = SoftHead(2 * anchors, bias, values)
    cells = CellHead(target, dtype_of(rng), scale, offset, keys, beta, Positions(1, 0.0))
    return self_attention(cells)


def circuit(rng: np.random.Generator, target: ExpressionTarget) -> Program:
    """Up to three heads, of any temperature; keys that carry a wire; outputs that add heads, inputs and constants."""
    d = target.box.d
    made = Circuit(target.box.names)
    outputs = [Wire({}, float(rng.normal())) for _ in range(target.num_outputs)]
    for _ in range(int(rng.integers(1, 4))):
        p = int(rng.integers(1, 10))
        queries = [_wire(rng, made, d) for _ in range(int(rng.integers(1, d + 1)))]
        slopes = rng.normal(size=(p, len(queries))) * 10.0 ** rng.uniform(-2, 3)
        offsets = rng.normal(size=p) * 10.0 ** rng.uniform(-3, 3)
        values, carried, carriers = random_values(rng, (p, target.num_outputs)), None, None
        if rng.random() < 0.4:
            carried, carriers = random_values(rng, (p, target.num_outputs, 1)), [_wire(rng, made, d)]
        wires = made.head(queries, SoftHead(slopes, offsets, values, carried), carriers)
        outputs = [
            out + wire * float(rng.choice([1.0, -1.0, rng.normal()])) for out, wire in zip(outputs, wires, strict=True)
        ]
    if rng.random() < 0.5:
        outputs = [out + _wire(rng, made, d) for out in outputs]
    return made.build(outputs, target.output_shape, dtype_of(rng))


def _wire(rng: np.random.Generator, made: Circuit, d: int) -> Wire:
    wire = Wire({}, float(rng.normal()) if rng.random() < 0.5 else 0.0)
    for i in range(d):
        wire = wire + made.input(i) * float(rng.choice([1.0, 0.5, rng.normal()]))
    return wire


def exactly_described(rng: np.random.Generator, d: int) -> tuple[Program, ExpressionTarget]:
    """A head, and Σ v_k e^{s_k}/Σ e^{s_k} as an expression with the very weights stored: only rounding is left."""
    dtype = dtype_of(rng)
    p = int(rng.integers(1, 5))
    scale = 10.0 ** rng.uniform(-2, 1)
    slopes = (rng.normal(size=(p, d)) * scale).astype(dtype).astype(float)
    offsets, values = (np.asarray(rng.normal(size=p), dtype).astype(float) for _ in range(2))
    names = VARIABLES[:d]
    scores = [
        " + ".join([*(f"{_exact(a)}*{n}" for a, n in zip(row, names, strict=True)), _exact(c)])
        for row, c in zip(slopes, offsets, strict=True)
    ]
    powers = [f"exp({score})" for score in scores]
    above = " + ".join(f"{_exact(v)}*{power}" for v, power in zip(values, powers, strict=True))
    box = {name: (-1.5, float(rng.choice([1.5, 2.0, 0.7]))) for name in names}
    target = attnc.as_target(f"({above})/({' + '.join(powers)})", box)
    made = Circuit(names)
    (out,) = made.head([made.input(i) for i in range(d)], SoftHead(slopes, offsets, values[:, None]))
    return made.build([out], (), dtype), target


def random_case(rng: np.random.Generator, kind: int) -> tuple[Program, ExpressionTarget]:
    """A circuit, a partition or, of kind 3, a head that its target describes exactly."""
    if kind == 3:
        return exactly_described(rng, int(rng.integers(1, 3)))
    target = random_composed(rng)
    return (partition, circuit)[kind % 2](rng, target), target


def _exact(value: float) -> str:
    exact = Fraction(value)
    return f"({exact.numerator}/{exact.denominator})"


def perturbed(rng: np.random.Generator, program: Program, size: float) -> Program:
    """One stored weight, times 1 ± size."""
    places = [
        (number, name)
        for number, layer in enumerate(program.layers)
        for name in (("weight", "constant") if isinstance(layer, Affine) else ("W_Q", "W_K", "W_V", "W_O"))
    ]
    factor = 1 + size * float(rng.choice([-1.0, 1.0]))
    for number, name in rng.permutation(np.array(places, dtype=object)):
        layer = program.layers[number]
        if isinstance(layer, Affine):
            count = len(getattr(layer, name).values)
            if count:
                return with_number(program, number, name, rng.integers(count), lambda value: value * factor)
        else:
            which = int(rng.integers(len(layer.heads)))
            place = rng.choice(np.argwhere(getattr(layer.heads[which], name) != 0))
            return with_entry(program, number, which, name, place, lambda value: value * factor)
    raise AssertionError("a program without weights")
