"""Activations and products as attention whose values carry x (the case of one head per neuron: arXiv 2309.08593)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import (
    CONTINUOUS_FUNCTION,
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Request,
    for_eps,
    is_plain,
    largest_error,
)
from attnc.constructions.fitting.circuit import Circuit, Wire, channel_of
from attnc.constructions.fitting.gate import fitted, kinks, pieces
from attnc.constructions.fitting.gate.keys import Gate, OutOfReach, exact_gate, positive
from attnc.constructions.fitting.gate.kinks import ChoiceGate, max_gate, min_gate
from attnc.constructions.fitting.gate.product import ProductGate, product_gate, square_gate
from attnc.constructions.fitting.positions import bytes_per_anchor
from attnc.errors import BoundNotMet, InputError
from attnc.functions.gate_recipes import Decay, ExactKeys, FittedKeys, LargestOf, ThreeLines, TwoLines
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.canonical import equivalent
from attnc.targets.expressions.coefficient import UNIT, Coefficient
from attnc.targets.expressions.evaluation import evaluate_points
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import (
    Call,
    Negate,
    Node,
    Power,
    Product,
    Quotient,
    Step,
    Sum,
    Variable,
    schedule,
    to_text,
)
from attnc.targets.parts.part import Derivation, HeadClaim, Multiply, Part, Source, T, Unary, combination
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

__all__ = [
    "GATES",
    "ChoiceGate",
    "Gate",
    "ProductGate",
    "gates",
    "max_gate",
    "min_gate",
    "product_gate",
    "square_gate",
]


def function_gate(name: str, eps: float, hi: float = 0.0) -> Gate:
    """The cheapest gate of an elementary function of one variable with error ≤ eps; exp is for (−∞, hi]."""
    match FUNCTIONS[name].gate:
        case ExactKeys() as recipe:
            return exact_gate(name, recipe, eps)
        case TwoLines(left, right):
            return kinks.two_lines(name, eps, left, right)
        case FittedKeys() as recipe:
            return fitted.fitted_gate(name, recipe, eps)
        case Decay():
            return pieces.exp(eps, hi)
    raise InputError(f"there is no gate of one variable for {name}")


GATES: dict[str, Callable[..., Gate]] = {
    **{name: functools.partial(function_gate, name) for name in ("sigmoid", "tanh", "silu", "relu", "abs")},
    **{name: functools.partial(function_gate, name) for name in ("gelu", "erf", "atan")},
    "tanhshrink": kinks.tanhshrink,
    "quick_gelu": kinks.quick_gelu,
    "mish": kinks.mish,
    "leaky_relu": kinks.leaky_relu,
    "prelu": kinks.prelu,
    "clip": kinks.clip,
    "hardtanh": kinks.hardtanh,
    "relu6": kinks.relu6,
    "hardsigmoid": kinks.hardsigmoid,
    "soft_threshold": kinks.soft_threshold,
    "gelu_tanh": fitted.gelu_tanh,
    "softplus": fitted.softplus,
    "logsigmoid": fitted.logsigmoid,
    "exp": pieces.exp,
    "elu": pieces.elu,
    "celu": pieces.celu,
    "selu": pieces.selu,
    "hardswish": pieces.hardswish,
    "softsign": pieces.softsign,
}
"""name → the cheapest gate with error ≤ eps: GATES["gelu"](1e-7). Parameters by name: GATES["elu"](1e-6, alpha=0.5)."""
DEFAULT_GATE_EPS = 1e-6
"""The error asked for if none is given."""
MAX_EXPONENT = 300.0
"""Largest argument of exp: e^88 is the end of float32, and e^709 that of float64."""


def gates(
    target: Target,
    *,
    eps: float | None = None,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """Affine combinations of activations of affine functions, and of products of two; one layer of heads.

    Theorem.  |out − f| ≤ Σ |coefficient|·error of the gate, on the whole box, whose ends may be infinite wherever the
              gates are global: all but products, and exp upwards.
    Weights.  Every gate is a head on the state token, over keys that carry its argument: see `gate.kinks` and its
              neighbours. A product is taken of factors less the middle of their ranges, the rest of it being affine.
    eps (1e-6 if not given) is shared evenly. Rounding is not part of the error.
    """
    if not isinstance(target, ExpressionTarget):
        raise InputError(f"gates take an expression, not {target.describe()}: gates build its activations")
    if dtype not in UNIT_ROUNDOFF:
        raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")
    eps = DEFAULT_GATE_EPS if eps is None else positive("eps", eps)
    forms = read_forms(target.expression)
    plan = _GatePlan(target)
    shares = _shares(forms, eps)
    wires = [plan.form(form, shares) for form in forms]
    most = min(max_anchors, max_bytes // bytes_per_anchor(target))
    if plan.num_anchors > most:
        raise BoundNotMet(
            f"the gates of {target.describe()} have {plan.num_anchors:,} keys, and max_anchors and max_bytes allow "
            f"{most:,}. Raise both, or eps.",
            eps=eps,
            bound=None,
        )
    program = plan.circuit.build(wires, target.output_shape, dtype)
    if progress is not None:
        progress("building gates", 1.0)
    error = max(math.fsum(abs(c) * plan.errors[atom] for atom, c in form.atoms) for form in forms)
    names = ", ".join(f"{atom.inner or atom.name} ({keys})" for atom, keys in plan.keys.items())
    parameters = (("gates", names), ("error", error))
    return Built(program, "gates", None, parameters=parameters, derivation=plan.derivation(forms))


def _shares(forms: list[GateForm], eps: float) -> dict[Atom, float]:
    """The error that each atom may have: in every output, no more than its even part of eps."""
    shares: dict[Atom, float] = {}
    for form in forms:
        for atom, coefficient in form.atoms:
            share = eps / (len(form.atoms) * abs(coefficient))
            shares[atom] = min(shares.get(atom, math.inf), share)
    return shares


class _GatePlan:
    """The heads that were added to the circuit, by the functions that they compute."""

    def __init__(self, target: ExpressionTarget) -> None:
        self.target, self.circuit = target, Circuit(target.box.names)
        self.wires: dict[Atom, Wire] = {}
        self.errors: dict[Atom, float] = {}
        self.keys: dict[Atom, int] = {}
        self.middles: dict[Atom, tuple[float, float]] = {}  # of products

    @property
    def num_anchors(self) -> int:
        return sum(self.keys.values())

    def form(self, form: GateForm, shares: dict[Atom, float]) -> Wire:
        total = self.affine(form.affine)
        for atom, coefficient in form.atoms:
            if atom not in self.wires:
                self.wires[atom] = self._head(atom, shares[atom])
            total = total + self.wires[atom] * coefficient
        return total

    def derivation(self, forms: list[GateForm]) -> Derivation | None:
        return derivation_of(self.target, forms, self.wires, self.middles)

    def affine(self, form: AffineSum) -> Wire:
        total = Wire({}, form.constant)
        for name, coefficient in form.terms:
            total = total + self.circuit.input(self.target.box.names.index(name)) * coefficient
        return total

    def _head(self, atom: Atom, eps: float) -> Wire:
        wires = [self.affine(argument) for argument in atom.arguments]
        if atom.name == "product":
            return self._product(atom, wires[0], wires[1], eps)
        if _is_choice(atom):
            choice = (max_gate if atom.name == "max" else min_gate)(eps, len(wires))
            self._record(atom, choice.error, choice.num_anchors)
            return choice.build(self.circuit, *wires)
        if atom.name == "gated":
            carrier, argument = wires
            keys = function_gate(atom.inner, eps).keys
            assert keys is not None
            self._record(atom, 0.0, keys.num_keys)
            return self.circuit.gate(keys, argument, carrier, name="gate")
        gate = self._unary(atom, eps)
        self._record(atom, gate.error, gate.num_anchors)
        return gate.build(self.circuit, wires[0])

    def _unary(self, atom: Atom, eps: float) -> Gate:
        if atom.name == "clip":
            assert atom.limits is not None
            return kinks.clip(eps, *atom.limits)
        if atom.name != "exp":
            return function_gate(atom.name, eps)
        _, hi = self._range(atom.arguments[0])
        if not hi < MAX_EXPONENT:
            raise InputError(
                f"exp of an argument up to {hi:g} in {self.target.describe()}: its gate is for (−∞, b], b < "
                f"{MAX_EXPONENT:g}. Choose a box on which the argument is bounded above."
            )
        return pieces.exp(eps, hi)

    def _product(self, atom: Atom, x: Wire, y: Wire, eps: float) -> Wire:
        """(x − a)(y − b) by a head, and ay + bx − ab."""
        (a, size_x), (b, size_y) = (self._middle(argument) for argument in atom.arguments)
        gate = product_gate(eps, size_x, size_y)
        self.middles[atom] = a, b
        self._record(atom, gate.error, gate.num_anchors)
        return gate.build(self.circuit, x - a, y - b) + y * a + x * b - a * b

    def _middle(self, argument: AffineSum) -> tuple[float, float]:
        lo, hi = self._range(argument)
        if not math.isfinite(hi - lo):
            raise InputError(
                f"a product needs bounded factors, and one in {self.target.describe()} takes values in "
                f"[{lo:g}, {hi:g}] on {self.target.box}. Choose a bounded box."
            )
        middle = lo / 2 + hi / 2
        return middle, max(hi - middle, middle - lo) * (1 + 1e-12)

    def _range(self, argument: AffineSum) -> tuple[float, float]:
        box = self.target.box
        return affine_range(argument, box.names, box.lo.tolist(), box.hi.tolist())

    def _record(self, atom: Atom, error: float, keys: int) -> None:
        self.errors[atom], self.keys[atom] = error, keys


def _build(target: Target, request: Request) -> Built:
    try:
        return for_eps(gates)(target, request)
    except OutOfReach as refusal:
        raise BoundNotMet(
            f"gates cannot bring {target.describe()} on {target.box} to eps={request.eps:g}: {refusal}",
            eps=request.goal,
            bound=None,
            reach=request.goal * refusal.error / refusal.eps,
        ) from None


def _suits(target: Target, request: Request) -> bool:
    """For expressions, and for every target on an infinite box: no other construction takes one."""
    return not target.box.is_bounded or (is_plain(target, request) and target.expression is not None)


GATES_CONSTRUCTION = Construction("gates", _build, (*CONTINUOUS_FUNCTION[1:], largest_error), _suits)


# Reading an expression as an affine combination of activations of affine functions, and of products of two


@dataclass(frozen=True)
class AffineSum:
    """constant + Σ coefficient·variable, with variables in a fixed order."""

    terms: tuple[tuple[str, float], ...] = ()
    constant: float = 0.0

    def __add__(self, other: AffineSum) -> AffineSum:
        terms = dict(self.terms)
        for name, coefficient in other.terms:
            terms[name] = terms.get(name, 0.0) + coefficient
        kept = sorted((name, c) for name, c in terms.items() if c != 0)
        return AffineSum(tuple(kept), self.constant + other.constant)

    def __mul__(self, factor: float) -> AffineSum:
        return AffineSum(tuple((name, c * factor) for name, c in self.terms if c * factor != 0), self.constant * factor)


@dataclass(frozen=True)
class Atom:
    """The function that one head computes: `name` of its arguments. "gated" is carrier·f(argument), f = `inner`."""

    name: str
    arguments: tuple[AffineSum, ...]
    limits: tuple[float, float] | None = None  # of clip
    inner: str = ""  # of gated


@dataclass(frozen=True)
class GateForm:
    """An affine function and a combination of atoms."""

    affine: AffineSum = field(default_factory=AffineSum)
    atoms: tuple[tuple[Atom, float], ...] = ()

    @property
    def is_affine(self) -> bool:
        return not self.atoms

    @property
    def is_constant(self) -> bool:
        return not self.atoms and not self.affine.terms

    def __add__(self, other: GateForm) -> GateForm:
        atoms = dict(self.atoms)
        for atom, coefficient in other.atoms:
            atoms[atom] = atoms.get(atom, 0.0) + coefficient
        return GateForm(self.affine + other.affine, tuple((atom, c) for atom, c in atoms.items() if c != 0))

    def scaled(self, factor: float) -> GateForm:
        return GateForm(self.affine * factor, tuple((atom, c * factor) for atom, c in self.atoms if c * factor != 0))


def read_forms(expression: Expression) -> list[GateForm]:
    """A form for every output; an InputError names the part of the expression that has none."""
    steps, outputs = schedule(expression.outputs)
    forms: list[GateForm] = []
    for step in steps:
        forms.append(_form(expression, step, [forms[i] for i in step.arguments]))
    return [forms[i] for i in outputs]


def _form(expression: Expression, step: Step, operands: list[GateForm]) -> GateForm:
    node = step.node
    if isinstance(node, Variable):
        return GateForm(AffineSum(((node.name, 1.0),)))
    if all(operand.is_constant for operand in operands):
        return GateForm(AffineSum((), _constant(expression, node)))
    match node:
        case Sum():
            total = operands[0]
            for operand in operands[1:]:
                total = total + operand
            return total
        case Negate():
            return operands[0].scaled(-1.0)
        case Product():
            total = operands[0]
            for operand in operands[1:]:
                total = _times(expression, node, total, operand)
            return total
        case Quotient() if operands[1].is_constant:
            return operands[0].scaled(1 / operands[1].affine.constant)
        case Power() if operands[1].is_constant and operands[1].affine.constant == 1:
            return operands[0]
        case Power() if operands[1].is_constant and operands[1].affine.constant == 2:
            return _times(expression, node, operands[0], operands[0])
        case Call(name, _):
            return _call(expression, node, name, operands)
    raise _refused(expression, node, "gates build sums, multiples, products of two and squares, and no other operation")


def _constant(expression: Expression, node: Node) -> float:
    """The value of a constant. It may contain variables, as 0*x and x - x do; all their values give the same."""
    anywhere = dict.fromkeys(expression.variables, np.zeros(()))
    value = float(np.asarray(evaluate_points(schedule((node,))[0], anywhere)[-1]))
    if not math.isfinite(value):
        raise _refused(expression, node, f"its value is {value}")
    return value


def _times(expression: Expression, node: Node, left: GateForm, right: GateForm) -> GateForm:
    if left.is_constant or right.is_constant:
        return right.scaled(left.affine.constant) if left.is_constant else left.scaled(right.affine.constant)
    if left.is_affine and right.is_affine:
        return GateForm(atoms=((Atom("product", (left.affine, right.affine)), 1.0),))
    for carrier, other in ((left, right), (right, left)):
        if carrier.is_affine and len(other.atoms) == 1 and other.affine == AffineSum():
            atom, coefficient = other.atoms[0]
            if _is_free_to_carry(atom):
                gated = Atom("gated", (carrier.affine, *atom.arguments), inner=atom.name)
                return GateForm(atoms=((gated, coefficient),))
    raise _refused(expression, node, "a gate multiplies two affine functions, or one and a sigmoid or tanh")


def _is_choice(atom: Atom) -> bool:
    return atom.name in FUNCTIONS and isinstance(FUNCTIONS[atom.name].gate, LargestOf)


def _is_free_to_carry(atom: Atom) -> bool:
    """Whether the keys are exact and carry nothing, so that they may carry the other factor of a product."""
    recipe = FUNCTIONS[atom.name].gate if atom.name in FUNCTIONS else None
    return isinstance(recipe, ExactKeys) and not any(recipe.carried)


def _call(expression: Expression, node: Node, name: str, operands: list[GateForm]) -> GateForm:
    if FUNCTIONS[name].gate is None:
        others = ", ".join(other for other, function in FUNCTIONS.items() if function.gate is not None)
        raise _refused(expression, node, f"there is no gate for {name}, but for {others}")
    if not all(operand.is_affine for operand in operands):
        raise _refused(expression, node, "the argument of an activation must be affine in the variables")
    if isinstance(FUNCTIONS[name].gate, ThreeLines):
        argument, low, high = operands
        if not (low.is_constant and high.is_constant and low.affine.constant < high.affine.constant):
            raise _refused(expression, node, "clip needs two numbers, the first below the second")
        limits = (low.affine.constant, high.affine.constant)
        return GateForm(atoms=((Atom("clip", (argument.affine,), limits), 1.0),))
    return GateForm(atoms=((Atom(name, tuple(operand.affine for operand in operands)), 1.0),))


def _refused(expression: Expression, node: Node, reason: str) -> InputError:
    part = to_text(node)
    where = "" if part == expression.text else f" in {expression.text!r}"
    return InputError(
        f"gates cannot build {part!r}{where}: {reason}. On a finite box construction='compose' takes any expression."
    )


def affine_range(
    form: AffineSum, names: Sequence[str], lo: Sequence[float], hi: Sequence[float]
) -> tuple[float, float]:
    """The least and the greatest value on a box, whose ends may be infinite."""
    ends = {name: (a, b) for name, a, b in zip(names, lo, hi, strict=True)}
    low = form.constant + sum(c * ends[name][0 if c > 0 else 1] for name, c in form.terms)
    high = form.constant + sum(c * ends[name][1 if c > 0 else 0] for name, c in form.terms)
    return low, high


# The derivation: the function that each head computes, so that a proof takes one variable at a time


def derivation_of(
    target: ExpressionTarget,
    forms: Sequence[GateForm],
    wires: Mapping[Atom, Wire],
    middles: Mapping[Atom, tuple[float, float]],
) -> Derivation | None:
    """The derivation; None if an atom is more than a head of one argument, if the box is infinite, or if a coefficient
    is no decimal number, so that the combination of the heads is not exactly the expression.

    `middles`: (a, b) of a product, whose head computes (x − a)(y − b).
    """
    if not target.box.is_bounded:
        return None
    reader = _PartReader(target)
    heads: dict[str, HeadClaim] = {}
    for atom, wire in wires.items():
        signals = [signal for signal in wire.terms if signal.level > 0]
        if _is_choice(atom) or len(signals) != 1:
            return None
        heads[channel_of(signals[0])] = reader.claim(atom, *middles.get(atom, (0.0, 0.0)))
    outputs = tuple(map(reader.form, forms))
    trees = PartRanges(sub_boxes(target.box), target.expression.variables).tree
    is_target = equivalent([trees(part) for part in outputs], target.expression.outputs)
    return Derivation(outputs, heads) if is_target else None


class _PartReader:
    """Turns forms into parts; an atom is one part wherever it occurs."""

    def __init__(self, target: ExpressionTarget) -> None:
        self.sources = {name: Source(i) for i, name in enumerate(target.box.names)}
        self.parts: dict[Atom, Part] = {}

    def form(self, form: GateForm) -> Part:
        atoms = [(self.parts[atom], _decimal(c)) for atom, c in form.atoms]
        return combination([(self.affine(form.affine), UNIT), *atoms])

    def affine(self, form: AffineSum) -> Part:
        terms = [(self.sources[name], _decimal(c)) for name, c in form.terms]
        return combination(terms, _decimal(form.constant))

    def claim(self, atom: Atom, a: float, b: float) -> HeadClaim:
        """The function that the head of an atom computes in exact arithmetic."""
        if atom.name == "product":
            x, y = map(self.affine, atom.arguments)
            carrier, argument = (combination([(part, UNIT)], Coefficient.of(-c)) for part, c in ((x, a), (y, b)))
            product = Multiply(carrier, argument)
            rest = [(y, Coefficient.of(a)), (x, Coefficient.of(b))]
            self.parts[atom] = combination([(product, UNIT), *rest], Coefficient.of(-Fraction(a) * Fraction(b)))
            return HeadClaim(product, argument, T, carrier)
        argument = self.affine(atom.arguments[-1])
        limits = tuple(_decimal(limit).tree for limit in atom.limits or ())
        function = Unary(argument, Call(atom.inner or atom.name, (T, *limits)))
        if atom.name != "gated":
            self.parts[atom] = function
            return HeadClaim(function, argument, function.tree)
        carrier = self.affine(atom.arguments[0])
        self.parts[atom] = Multiply(carrier, function)
        return HeadClaim(self.parts[atom], argument, function.tree, carrier)


def _decimal(number: float) -> Coefficient:
    """The shortest decimal number that is read as this one, as 0.3 was written."""
    return Coefficient.of(Fraction(repr(float(number))))
