"""Activations and products as attention whose values carry x (the case of one head per neuron: arXiv 2309.08593)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from attnc.constructions.built import Built, Progress
from attnc.constructions.circuit import Circuit, Wire
from attnc.constructions.gate import exact, fitted, kinks, pieces
from attnc.constructions.gate.deriving import derivation_of
from attnc.constructions.gate.keys import Gate, GateKeys, exact_gate, positive
from attnc.constructions.gate.kinks import ChoiceGate, max_gate, min_gate
from attnc.constructions.gate.product import ProductGate, product_gate, square_gate
from attnc.constructions.gate.terms import Affine, Atom, Form, affine_range, read_forms
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES, bytes_per_anchor
from attnc.constructions.unary.keys import Keys
from attnc.errors import BoundNotMet, InputError
from attnc.functions.gate_recipes import Decay, ExactKeys, FittedKeys, TwoLines
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

__all__ = [
    "GATES",
    "ChoiceGate",
    "Gate",
    "GateKeys",
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
    "tanhshrink": exact.tanhshrink,
    "quick_gelu": exact.quick_gelu,
    "mish": exact.mish,
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
DEFAULT_EPS = 1e-6
MAX_EXPONENT = 300.0
"""exp of more leaves float32 long before, and float64 soon."""


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
        raise InputError(f"gates take an expression, not {target.describe()}: its activations are what is built")
    if dtype not in UNIT_ROUNDOFF:
        raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")
    eps = DEFAULT_EPS if eps is None else positive("eps", eps)
    forms = read_forms(target.expression)
    plan = _Plan(target)
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


def _shares(forms: list[Form], eps: float) -> dict[Atom, float]:
    """The error that each atom may have: in every output, no more than its even part of eps."""
    shares: dict[Atom, float] = {}
    for form in forms:
        for atom, coefficient in form.atoms:
            share = eps / (len(form.atoms) * abs(coefficient))
            shares[atom] = min(shares.get(atom, math.inf), share)
    return shares


class _Plan:
    """The heads that were added to the circuit, by what they compute."""

    def __init__(self, target: ExpressionTarget) -> None:
        self.target, self.circuit = target, Circuit(target.box.names)
        self.wires: dict[Atom, Wire] = {}
        self.errors: dict[Atom, float] = {}
        self.keys: dict[Atom, int] = {}
        self.middles: dict[Atom, tuple[float, float]] = {}  # of products

    @property
    def num_anchors(self) -> int:
        return sum(self.keys.values())

    def form(self, form: Form, shares: dict[Atom, float]) -> Wire:
        total = self.affine(form.affine)
        for atom, coefficient in form.atoms:
            if atom not in self.wires:
                self.wires[atom] = self._head(atom, shares[atom])
            total = total + self.wires[atom] * coefficient
        return total

    def derivation(self, forms: list[Form]) -> Derivation | None:
        return derivation_of(self.target, forms, self.wires, self.middles)

    def affine(self, form: Affine) -> Wire:
        total = Wire({}, form.constant)
        for name, coefficient in form.terms:
            total = total + self.circuit.input(self.target.box.names.index(name)) * coefficient
        return total

    def _head(self, atom: Atom, eps: float) -> Wire:
        wires = [self.affine(argument) for argument in atom.arguments]
        if atom.name == "product":
            return self._product(atom, wires[0], wires[1], eps)
        if atom.name in ("max", "min"):
            choice = (max_gate if atom.name == "max" else min_gate)(eps, len(wires))
            self._record(atom, choice.error, choice.num_anchors)
            return choice.build(self.circuit, *wires)
        if atom.name == "gated":
            carrier, argument = wires
            keys = function_gate(atom.inner, eps).keys
            assert keys is not None
            self._record(atom, 0.0, keys.p)
            return self.circuit.gate(Keys(keys.slopes, keys.offsets, keys.values), argument, carrier, name="gate")
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

    def _middle(self, argument: Affine) -> tuple[float, float]:
        lo, hi = self._range(argument)
        if not math.isfinite(hi - lo):
            raise InputError(
                f"a product needs bounded factors, and one in {self.target.describe()} takes values in "
                f"[{lo:g}, {hi:g}] on {self.target.box}. Choose a bounded box."
            )
        middle = lo / 2 + hi / 2
        return middle, max(hi - middle, middle - lo) * (1 + 1e-12)

    def _range(self, argument: Affine) -> tuple[float, float]:
        box = self.target.box
        return affine_range(argument, box.names, box.lo.tolist(), box.hi.tolist())

    def _record(self, atom: Atom, error: float, keys: int) -> None:
        self.errors[atom], self.keys[atom] = error, keys
