"""An expression as an affine combination of activations of affine functions, and of products of two: what gates do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnc.errors import InputError
from attnc.functions.gate_recipes import ExactKeys, ThreeLines
from attnc.functions.registry import FUNCTIONS
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


@dataclass(frozen=True)
class Affine:
    """constant + Σ coefficient·variable, with variables in a fixed order."""

    terms: tuple[tuple[str, float], ...] = ()
    constant: float = 0.0

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for name, coefficient in other.terms:
            terms[name] = terms.get(name, 0.0) + coefficient
        kept = sorted((name, c) for name, c in terms.items() if c != 0)
        return Affine(tuple(kept), self.constant + other.constant)

    def __mul__(self, factor: float) -> Affine:
        return Affine(tuple((name, c * factor) for name, c in self.terms if c * factor != 0), self.constant * factor)


@dataclass(frozen=True)
class Atom:
    """What one head computes: `name` of its arguments. "gated" is carrier·sigmoid or tanh, of (carrier, argument)."""

    name: str
    arguments: tuple[Affine, ...]
    limits: tuple[float, float] | None = None  # of clip
    inner: str = ""  # of gated


@dataclass(frozen=True)
class Form:
    """An affine function and a combination of atoms."""

    affine: Affine = field(default_factory=Affine)
    atoms: tuple[tuple[Atom, float], ...] = ()

    @property
    def is_affine(self) -> bool:
        return not self.atoms

    @property
    def is_constant(self) -> bool:
        return not self.atoms and not self.affine.terms

    def __add__(self, other: Form) -> Form:
        atoms = dict(self.atoms)
        for atom, coefficient in other.atoms:
            atoms[atom] = atoms.get(atom, 0.0) + coefficient
        return Form(self.affine + other.affine, tuple((atom, c) for atom, c in atoms.items() if c != 0))

    def scaled(self, factor: float) -> Form:
        return Form(self.affine * factor, tuple((atom, c * factor) for atom, c in self.atoms if c * factor != 0))


def read_forms(expression: Expression) -> list[Form]:
    """A form for every output; InputError says which part of the expression is none."""
    steps, outputs = schedule(expression.outputs)
    forms: list[Form] = []
    for step in steps:
        forms.append(_form(expression, step, [forms[i] for i in step.arguments]))
    return [forms[i] for i in outputs]


def _form(expression: Expression, step: Step, operands: list[Form]) -> Form:
    node = step.node
    if isinstance(node, Variable):
        return Form(Affine(((node.name, 1.0),)))
    if all(operand.is_constant for operand in operands):
        return Form(Affine((), _constant(expression, node)))
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
    raise _refused(expression, node, "gates know sums, multiples, products of two and squares, and no other operation")


def _constant(expression: Expression, node: Node) -> float:
    """Variables may be in it, as in 0*x and x - x: any values of them will do."""
    anywhere = dict.fromkeys(expression.variables, np.zeros(()))
    value = float(np.asarray(evaluate_points(schedule((node,))[0], anywhere)[-1]))
    if not math.isfinite(value):
        raise _refused(expression, node, f"its value is {value}")
    return value


def _times(expression: Expression, node: Node, left: Form, right: Form) -> Form:
    if left.is_constant or right.is_constant:
        return right.scaled(left.affine.constant) if left.is_constant else left.scaled(right.affine.constant)
    if left.is_affine and right.is_affine:
        return Form(atoms=((Atom("product", (left.affine, right.affine)), 1.0),))
    for carrier, other in ((left, right), (right, left)):
        if carrier.is_affine and len(other.atoms) == 1 and other.affine == Affine():
            atom, coefficient = other.atoms[0]
            if _is_free_to_carry(atom):
                gated = Atom("gated", (carrier.affine, *atom.arguments), inner=atom.name)
                return Form(atoms=((gated, coefficient),))
    raise _refused(expression, node, "a gate multiplies two affine functions, or one and a sigmoid or tanh")


def _is_free_to_carry(atom: Atom) -> bool:
    """Whether the keys are exact and carry nothing, so that they may carry the other factor of a product."""
    recipe = FUNCTIONS[atom.name].gate if atom.name in FUNCTIONS else None
    return isinstance(recipe, ExactKeys) and not any(recipe.carried)


def _call(expression: Expression, node: Node, name: str, operands: list[Form]) -> Form:
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
        return Form(atoms=((Atom("clip", (argument.affine,), limits), 1.0),))
    return Form(atoms=((Atom(name, tuple(operand.affine for operand in operands)), 1.0),))


def _refused(expression: Expression, node: Node, reason: str) -> InputError:
    part = to_text(node)
    where = "" if part == expression.text else f" in {expression.text!r}"
    return InputError(
        f"gates cannot build {part!r}{where}: {reason}. On a finite box construction='compose' takes any expression."
    )


def affine_range(form: Affine, names: Sequence[str], lo: Sequence[float], hi: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest value on a box, whose ends may be infinite."""
    ends = {name: (a, b) for name, a, b in zip(names, lo, hi, strict=True)}
    low = form.constant + sum(c * ends[name][0 if c > 0 else 1] for name, c in form.terms)
    high = form.constant + sum(c * ends[name][1 if c > 0 else 0] for name, c in form.terms)
    return low, high
