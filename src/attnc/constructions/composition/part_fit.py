"""The head that computes a function of one part: a gate where there is one, else soft anchors with solved values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from attnc.constructions.circuit import Circuit, Wire
from attnc.constructions.composition.unary_fit import BETWEEN, UnaryFit, fit_unary, sample_interval
from attnc.constructions.gate.keys import Gate, GateKeys
from attnc.constructions.gate.product import product_gate, square_gate
from attnc.constructions.gates import MAX_EXPONENT, function_gate
from attnc.constructions.graded import graded_keys
from attnc.constructions.pieces.kinks import find_kinks
from attnc.constructions.unary.keys import Function, Keys
from attnc.errors import AttncError
from attnc.functions import gate_recipes
from attnc.functions.gate_recipes import Decay, ExactKeys, GateRecipe
from attnc.functions.registry import FUNCTIONS
from attnc.proofs.deep.line_proof import prove_line
from attnc.proofs.stages.extraction import stages
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Call, Node, Product
from attnc.targets.parts.lowering import SQUARE
from attnc.targets.parts.part import T, function_of_t

MANY = 48
"""With more keys than that on an even grid, it is worth looking where the function is hard: at kinks, and like √t at 0.
There even grids have hundreds of keys, and to find out how many takes long."""
CLOSE = 0.05
"""A head with an error of this part of δ has hardly more keys than one for δ."""
SECONDS = 1.0
"""For the proof of a head."""


class PartFit(Protocol):
    """Heads that compute g(argument) within `error`, as far as samples show."""

    @property
    def error(self) -> float: ...
    @property
    def num_anchors(self) -> int: ...
    def apply(self, circuit: Circuit, argument: Wire, name: str) -> Wire: ...
    def gate(self, circuit: Circuit, argument: Wire, carrier: Wire, name: str) -> Wire:
        """carrier·g(argument)."""
        ...


@dataclass(frozen=True, eq=False)
class SelfGate:
    """Σ_k w_k(t)(v_k + u_k·t): the values carry the argument itself."""

    keys: GateKeys
    error: float

    @property
    def num_anchors(self) -> int:
        return self.keys.p

    def apply(self, circuit: Circuit, argument: Wire, name: str) -> Wire:
        keys = self.keys
        (wire,) = circuit.head(
            [argument],
            keys.slopes[:, None],
            keys.offsets,
            keys.values[:, None],
            carrier=argument,
            carried=keys.carried[:, None],
            name=name,
        )
        return wire

    def gate(self, circuit: Circuit, argument: Wire, carrier: Wire, name: str) -> Wire:
        raise AssertionError("a gate carries its own argument: it is never absorbed")


def is_self_gate(tree: Node) -> bool:
    """Whether the head may carry its own argument, and so cannot be a factor of a product as well."""
    return gate_recipes.may_carry(_recipe(tree))


def is_exact(tree: Node) -> bool:
    """Whether the function is a softmax already, as sigmoid(t), tanh(t) and silu(t) are: no error."""
    return isinstance(_recipe(tree), ExactKeys)


def has_two_keys(tree: Node) -> bool:
    return gate_recipes.has_two_keys(_recipe(tree))


def _recipe(tree: Node) -> GateRecipe | None:
    """The gate of f, if the tree is f(t)."""
    return FUNCTIONS[tree.name].gate if isinstance(tree, Call) and tree.arguments == (T,) else None


def fit_part(
    tree: Node, lo: float, hi: float, delta: float, dtype: str, before: PartFit | None = None, may_carry: bool = True
) -> PartFit | None:
    """The cheapest head for tree(t) on [lo, hi] within δ; None if there is none.

    `before`: a head for nearly the same interval and another δ. Taken again, if it does, where a search is long.
    `may_carry`: whether its keys are free to carry t.
    """
    if has_two_keys(tree):
        return next(_gates(tree, lo, hi, delta, dtype), None)
    if tree is T:
        return _identity(lo, hi, delta)
    f = function_of_one(tree)
    few = fit_unary(f, lo, hi, delta, MANY, dtype)
    gates = [gate for gate in _gates(tree, lo, hi, delta, dtype) if may_carry or isinstance(gate, UnaryFit)]
    found: list[PartFit] = [*([] if few is None else [few]), *gates]
    if not found:
        found += _again(before, f, lo, hi, delta) or _graded(tree, f, lo, hi, delta)
    if not found or min(fit.num_anchors for fit in found) > 2 * MANY:
        many = fit_unary(f, lo, hi, delta, dtype=dtype)
        found += [] if many is None else [many]
    return min(found, key=lambda fit: fit.num_anchors, default=None)


def proved_error(fit: PartFit, tree: Node, lo: float, hi: float) -> float:
    """How far the head, in float64, is from tree(t) for t ∈ [lo, hi] in exact arithmetic; as far as samples show if a
    proof takes long."""
    circuit = Circuit(("t",))
    program = circuit.build([fit.apply(circuit, circuit.input(0), "head")], (), "float64")
    ((stage, _),) = stages(program)
    (head,) = stage.heads
    proof, _, _ = prove_line((head,), tree, lo, hi, 0.0, SECONDS)
    return proof.bound if proof.complete else fit.error


def _identity(lo: float, hi: float, delta: float) -> UnaryFit:
    """t on [lo, hi]: a product's head, about the middle of the interval."""
    middle, size = lo / 2 + hi / 2, max(hi / 2 - lo / 2, 1e-300)
    gate = product_gate(delta, 1.0, size)
    return UnaryFit(Keys(gate.keys.slopes, gate.keys.offsets, gate.keys.values + middle), 1.0, -middle, gate.error)


def _gates(tree: Node, lo: float, hi: float, delta: float, dtype: str) -> Iterator[PartFit]:
    # A gate need not be finer than the function is large: where relu and abs are below delta, 0 would do.
    delta, recipe = max(min(delta, max(abs(lo), abs(hi))), 1e-300), _recipe(tree)
    is_in_reach = gate_recipes.is_economical(recipe) or (isinstance(recipe, Decay) and hi < MAX_EXPONENT)
    try:
        if isinstance(tree, Call) and is_in_reach:
            gate = function_gate(tree.name, delta, hi)
        elif tree in (SQUARE, Product((T, T))) and dtype == "float64":  # its values are ten times as large
            gate = _square(lo, hi, delta)
        else:
            return
    except AttncError:
        return
    keys = gate.keys
    if keys is None:
        return
    if keys.carried.any():
        yield SelfGate(keys, gate.error)
    else:
        yield UnaryFit(Keys(keys.slopes, keys.offsets, keys.values), 1.0, 0.0, gate.error)


def _square(lo: float, hi: float, delta: float) -> Gate:
    """t² = (t − m)² + 2mt − m² about the middle of the interval: keys that carry t, and an affine function for free."""
    middle = lo / 2 + hi / 2
    gate = square_gate(delta, max(hi - middle, middle - lo, 1e-300))
    assert gate.keys is not None
    return replace(gate, keys=gate.keys.at(1.0, -middle).combined(1.0, 2 * middle, -(middle**2)))


def _graded(tree: Node, f: Function, lo: float, hi: float, delta: float) -> list[UnaryFit]:
    """Anchors that crowd where the function is singular, as √t at 0."""
    try:
        target = ExpressionTarget(function_of_t(tree), Box(("t",), np.array([lo]), np.array([hi])))
        keys = graded_keys(f, lo, hi, find_kinks(target), eps=0.9 * delta)
    except AttncError:
        return []
    error = _error(keys, f, lo, hi)
    return [UnaryFit(keys, 1.0, 0.0, error)] if error <= delta else []


def _again(before: PartFit | None, f: Function, lo: float, hi: float, delta: float) -> list[UnaryFit]:
    """The same anchors, if they are within δ and not far below it."""
    if not isinstance(before, UnaryFit):
        return []
    error = _error(before, f, lo, hi)
    return [replace(before, error=error)] if CLOSE * delta <= error <= delta else []


def _error(fit: Callable[[np.ndarray], np.ndarray], f: Function, lo: float, hi: float) -> float:
    t = sample_interval(lo, hi, 8001)
    return BETWEEN * float(np.abs(fit(t) - f(t)).max())


def function_of_one(tree: Node) -> Function:
    """tree(t) on arrays; NaN and inf where it is not defined."""
    expression = function_of_t(tree)

    def value(t: np.ndarray) -> np.ndarray:
        return expression(t[:, None])[:, 0]

    return value
