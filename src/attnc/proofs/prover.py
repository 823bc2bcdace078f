"""A prover: from stored weights and a target to a bound that holds on the whole box, rounding included.

Provers use nothing of the construction: a wrong theorem yields a refused certificate, never a false one.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.proofs.cells.branching import Budget
from attnc.proofs.proof import Proof
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target


@dataclass(frozen=True)
class ProofRequest(Budget):
    """The norm to bound, and how far to go for it.

    `observed` is an error that was seen: no bound can be below it, and none is sought that is much closer. `eps` is the
    error that was asked for: bounds far below it are not sought. `derivation` states a function for every head; it is
    checked, not trusted. `has_theorem`: a theorem of the construction bounds the error already.
    """

    p: float = math.inf
    eps: float = 0.0
    observed: float = 0.0
    tolerance: float = 0.03  # a bound within this part of the observed error is close enough
    truncation: float = 0.0  # engines may be off by this besides rounding, in any output
    derivation: Derivation | None = None
    has_theorem: bool = False


class Prover(abc.ABC):
    """One way to prove a program."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the way, for messages."""

    @abc.abstractmethod
    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        """Whether a proof in this way is worth a try, from the shape of the program and the kind of target alone."""

    @abc.abstractmethod
    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """The proof. ProgramError where the weights do not have the form that this way needs."""


def num_softmaxes(program: Program) -> int:
    return sum(not isinstance(layer, Affine) for layer in program.all_layers)


def require_same_shapes(program: Program, target: Target) -> None:
    """ProgramError unless the program takes the inputs of the target and has its outputs."""
    if target.num_outputs != math.prod(program.output_shape) or target.input_shapes != program.input_shapes:
        raise ProgramError(
            f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.input_shapes} to "
            f"{target.output_shape}"
        )
