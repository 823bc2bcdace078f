"""The head that computes a function of one part: a gate where there is one, else soft anchors with solved values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from attnc.constructions.circuit import Circuit, Wire
from attnc.constructions.keys import Keys
from attnc.constructions.parts import T, function_of_t
from attnc.constructions.unary_fit import Function, UnaryFit, fit_unary
from attnc.targets.tree import Call, Node

WRIGHT = 0.27846454276107
"""W(1/e), rounded up: max_x |relu(x) − x·σ(x)|."""
SELF_GATES = ("relu", "abs", "silu")
SIGMOIDS = {"sigmoid": Keys(np.array([0.0, 1.0]), np.zeros(2), np.array([0.0, 1.0]))}
SIGMOIDS["tanh"] = Keys(np.array([-1.0, 1.0]), np.zeros(2), np.array([-1.0, 1.0]))


class PartFit(Protocol):
    """Heads that compute g(argument) within `error`."""

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
    """t·A(t): two keys, the values carry the argument itself."""

    keys: Keys
    error: float

    @property
    def num_anchors(self) -> int:
        return self.keys.p

    def apply(self, circuit: Circuit, argument: Wire, name: str) -> Wire:
        return circuit.gate(self.keys, argument, argument, name=name)

    def gate(self, circuit: Circuit, argument: Wire, carrier: Wire, name: str) -> Wire:
        raise AssertionError("a gate carries its own argument: it is never absorbed")


def is_self_gate(tree: Node) -> bool:
    """relu(t), |t|, silu(t): t times a sigmoid of t."""
    return isinstance(tree, Call) and tree.name in SELF_GATES and tree.arguments == (T,)


def is_exact(tree: Node) -> bool:
    """sigmoid(t), tanh(t): two keys."""
    return isinstance(tree, Call) and tree.name in SIGMOIDS and tree.arguments == (T,)


def fit_part(tree: Node, lo: float, hi: float, delta: float) -> PartFit | None:
    """The cheapest head for tree(t) on [lo, hi] within δ; None if there is none."""
    if is_exact(tree):
        assert isinstance(tree, Call)
        return UnaryFit(SIGMOIDS[tree.name], 1.0, 0.0, 0.0)
    if is_self_gate(tree):
        assert isinstance(tree, Call)
        if tree.name == "silu":
            return SelfGate(SIGMOIDS["sigmoid"], 0.0)
        keys = SIGMOIDS["sigmoid" if tree.name == "relu" else "tanh"]
        beta = WRIGHT / min(delta, max(abs(lo), abs(hi)))
        # |t| − t·tanh(βt) is |t|·2/(e^{2β|t|} + 1), twice what relu loses at 2β: W(1/e)/β as well.
        return SelfGate(Keys(keys.slopes * beta, keys.offsets, keys.values), WRIGHT / beta)
    return fit_unary(function_of_one(tree), lo, hi, delta)


def function_of_one(tree: Node) -> Function:
    """tree(t) on arrays; NaN and inf where it is not defined."""
    expression = function_of_t(tree)

    def value(t: np.ndarray) -> np.ndarray:
        return expression(t[:, None])[:, 0]

    return value


IDENTITY = T
