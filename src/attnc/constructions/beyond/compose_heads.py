"""Heads that compute a function of one number: a gate where there is one, else soft anchors with solved values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.beyond.gates import MAX_EXPONENT, function_gate
from attnc.constructions.beyond.graded import graded_keys
from attnc.constructions.fitting.axis import MAX_P, AxisSections, SpectralAxis, grid_head, value_limit
from attnc.constructions.fitting.circuit import Circuit, PartFit
from attnc.constructions.fitting.gate.fitted import product_gate, square_gate
from attnc.constructions.fitting.kinks import find_kinks
from attnc.constructions.fitting.minimax import Function
from attnc.errors import AttncError
from attnc.functions import gate_recipes
from attnc.functions.gate_recipes import Decay, ExactKeys, GateRecipe
from attnc.functions.registry import FUNCTIONS
from attnc.ir.soft_head import SoftHead
from attnc.proofs.staged.lines import prove_line
from attnc.proofs.stages.extraction import stages
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Call, Node, Product
from attnc.targets.parts.lowering import SQUARE
from attnc.targets.parts.part import T, function_of_t

if TYPE_CHECKING:
    from jaxtyping import Float


EDGE = 1e-7
"""The least distance of a sample point from an end, as a share of the interval."""

BETWEEN = 1.01
"""The factor by which an error between the points of a sample may be larger than at them."""


def sample_interval(lo: float, hi: float, count: int = 2001) -> Float[np.ndarray, " points"]:
    """Equally spaced, and crowding towards both ends."""
    edge = (hi - lo) * np.geomspace(EDGE, 0.1, count // 8)
    return np.clip(np.concatenate([np.linspace(lo, hi, count), lo + edge, hi - edge]), lo, hi)


def fit_unary(
    f: Function, lo: float, hi: float, delta: float, most: int = MAX_P, dtype: str = "float64"
) -> PartFit | None:
    """The fewest equally spaced anchors; None where `most` of them do not suffice."""
    t = sample_interval(lo, hi)
    wanted = f(t)
    size = float(np.abs(wanted).max())
    if not math.isfinite(size):
        return None
    if hi - lo <= 1e-9 * max(abs(lo), abs(hi)) or size == 0:
        constant = SoftHead.of_one_variable(np.zeros(1), np.zeros(1), np.array([float(wanted[0])]))
        return PartFit(constant, float(np.abs(wanted - wanted[0]).max()), scale=0.0)

    def sections(x: np.ndarray) -> np.ndarray:
        return f(x)[:, None]

    lines = AxisSections(lo, hi, sections, sections)
    goal = delta
    for _ in range(4):
        found = lines.smallest(goal, value_limit(delta, size, dtype) * size, most=most)
        if found is None:
            return None
        fitted = from_axis(found[0], f)
        error = BETWEEN * float(np.abs(fitted(t) - wanted).max())
        if error <= delta:
            return replace(fitted, error=error)
        goal *= 0.5 * delta / error
    return None


def from_axis(axis: SpectralAxis, f: Function) -> PartFit:
    """The head over one axis, with values from f at its nodes."""
    head = grid_head([axis.lattice.keys(axis.lo, axis.hi, "float64")], axis.solve(f(axis.nodes())[:, None]), "float64")
    return PartFit(head.keys, math.nan, float(head.scale[0]), float(head.offset[0]))


MANY_ANCHORS = 48
"""Largest number of evenly spaced keys before graded keys are tried: at kinks, and for √t at 0, even grids have
hundreds of keys, and counting them takes long."""
CLOSE_SHARE = 0.05
"""Least share of δ at which a head for another δ is used again: it has hardly more keys than a head for δ."""
HEAD_PROOF_SECONDS = 1.0
"""Time limit of the proof of one head, in seconds."""


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

    `before`: a head for nearly the same interval and another δ. If it is within δ, it is taken again where a search
    would be long. `may_carry`: whether the keys are free to carry t.
    """
    if tree is T:
        return _identity(lo, hi, delta)
    if has_two_keys(tree):
        return _gate(tree, lo, hi, delta, dtype)
    f = function_of_one(tree)
    few = fit_unary(f, lo, hi, delta, MANY_ANCHORS, dtype)
    gate = _gate(tree, lo, hi, delta, dtype)
    if gate is not None and gate.keys.carried is not None and not may_carry:
        gate = None
    found = _fewest(few, gate) or _again(before, f, lo, hi, delta) or _graded(tree, f, lo, hi, delta)
    if found is None or found.num_anchors > 2 * MANY_ANCHORS:
        found = _fewest(found, fit_unary(f, lo, hi, delta, dtype=dtype))
    return found


def _fewest(*fits: PartFit | None) -> PartFit | None:
    return min((fit for fit in fits if fit is not None), key=lambda fit: fit.num_anchors, default=None)


def proved_error(fit: PartFit, tree: Node) -> float:
    """A proved bound of |head − tree(t)|, the head in float64; the error on samples if a proof takes long."""
    circuit = Circuit(("t",))
    program = circuit.build([fit.build(circuit, circuit.input(0), None, "head")], (), "float64")
    ((stage, _),) = stages(program)
    (head,) = stage.heads
    proof, _, _ = prove_line((head,), tree, fit.lo, fit.hi, 0.0, HEAD_PROOF_SECONDS)
    return proof.bound if proof.complete else fit.error


def _identity(lo: float, hi: float, delta: float) -> PartFit:
    """t on [lo, hi]: a product's head, about the middle of the interval."""
    middle, size = lo / 2 + hi / 2, max(hi / 2 - lo / 2, 1e-300)
    gate = product_gate(delta, 1.0, size)
    return PartFit(gate.keys.combined(1.0, constant=middle), gate.error, shift=-middle)


def _gate(tree: Node, lo: float, hi: float, delta: float, dtype: str) -> PartFit | None:
    """The gate of the function, if it has one that few keys bring within δ."""
    # A gate need not be finer than the function is large: where relu and abs are below δ, 0 would do.
    delta, recipe = max(min(delta, max(abs(lo), abs(hi))), 1e-300), _recipe(tree)
    is_in_reach = gate_recipes.is_economical(recipe) or (isinstance(recipe, Decay) and hi < MAX_EXPONENT)
    try:
        if isinstance(tree, Call) and is_in_reach:
            gate = function_gate(tree.name, delta, hi)
            return PartFit(gate.keys, gate.error)
        if tree in (SQUARE, Product((T, T))) and dtype == "float64":  # its values are ten times as large
            # t² = (t − m)² + 2mt − m² about the middle m: keys that carry t, and an affine function for free
            middle = lo / 2 + hi / 2
            gate = square_gate(delta, max(hi - middle, middle - lo, 1e-300))
            return PartFit(gate.keys.shifted(-middle).combined(1.0, 2 * middle, -(middle**2)), gate.error)
    except AttncError:
        pass
    return None


def _graded(tree: Node, f: Function, lo: float, hi: float, delta: float) -> PartFit | None:
    """Anchors that crowd where the function is singular, as √t at 0."""
    try:
        target = ExpressionTarget(function_of_t(tree), Box(("t",), np.array([lo]), np.array([hi])))
        fit = PartFit(graded_keys(f, lo, hi, find_kinks(target), eps=0.9 * delta), math.nan)
    except AttncError:
        return None
    error = _error(fit, f, lo, hi)
    return replace(fit, error=error) if error <= delta else None


def _again(before: PartFit | None, f: Function, lo: float, hi: float, delta: float) -> PartFit | None:
    """The same anchors, if they are within δ and not far below it."""
    if before is None or before.keys.carried is not None:
        return None
    error = _error(before, f, lo, hi)
    return replace(before, error=error) if CLOSE_SHARE * delta <= error <= delta else None


def _error(fit: Callable[[np.ndarray], np.ndarray], f: Function, lo: float, hi: float) -> float:
    t = sample_interval(lo, hi, 8001)
    return BETWEEN * float(np.abs(fit(t) - f(t)).max())


def function_of_one(tree: Node) -> Function:
    """tree(t) on arrays; NaN and inf where it is not defined."""
    expression = function_of_t(tree)

    def value(t: np.ndarray) -> np.ndarray:
        return expression(t[:, None])[:, 0]

    return value
