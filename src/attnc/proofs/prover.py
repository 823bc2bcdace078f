"""A prover: from stored weights and a target to a bound that holds on the whole box, rounding included.

Provers use nothing of the construction: a wrong theorem yields a refused certificate, never a false one.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.numerics.arithmetic import require_no_fault
from attnc.proofs.cells.branching import Budget
from attnc.proofs.proof import Proof
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

PROOF_SECONDS = 30.0
"""Time limit of a proof that is not part of a compilation, in seconds. It is the half of its 60 s that `compile` leaves
to a proof, and nine times the slowest compilation of the corpus."""


NORM_TOLERANCE = (1.05, 1.5, 2.0)
"""Multiples of the observed norm, in one, in two, and in more variables. The search stops at the larger of this
multiple and PART_OF_EPS·eps. Leaves approach a norm slowly, and each has to be checked."""
PART_OF_EPS = 0.25
"""The part of eps at which the search for a smaller norm may stop."""


@dataclass(frozen=True)
class ProofRequest(Budget):
    """The norm to bound, and when a bound is small enough.

    `observed` is an error that was seen. No bound can be below it, and bounds much closer to it are not sought. `eps`
    is the error that was asked for. Bounds far below it are not sought. `derivation` states a function for every head.
    It is checked, not trusted. `has_theorem` is true if a theorem of the construction bounds the error already. `noise`
    is a further error of channels that heads write, by their names: a proof head by head then holds for every machine
    that computes the program with at most this much noise.

    In a thread whose arithmetic is not the one that proofs rest on, no request can be made: InputError.
    """

    p: float = math.inf
    eps: float = 0.0
    observed: float = 0.0
    tolerance: float = 0.03  # a bound is close enough if it exceeds the observed error by this share
    truncation: float = 0.0  # an error of engines besides rounding, in any output
    derivation: Derivation | None = None
    has_theorem: bool = False
    noise: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_no_fault()

    def goal_in_norm(self, d: int) -> float:
        """Return the bound of an L_p norm at which the search for a smaller one stops, in d variables."""
        close = NORM_TOLERANCE[min(d, len(NORM_TOLERANCE)) - 1] * self.observed
        return min(self.eps, max(PART_OF_EPS * self.eps, close))


class Prover(abc.ABC):
    """One way to prove a program."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of this way to prove, for messages."""

    @abc.abstractmethod
    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        """Return whether to try this way, from the shape of the program and the kind of target alone."""

    @abc.abstractmethod
    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Return the proof. Raise ProgramError if the weights do not have the form that this way needs."""


def num_softmaxes(program: Program) -> int:
    return sum(not isinstance(layer, Affine) for layer in program.all_layers)


def require_same_shapes(program: Program, target: Target) -> None:
    """Raise ProgramError unless the program has the inputs and the outputs of the target."""
    if target.num_outputs != math.prod(program.output_shape) or target.input_shapes != program.input_shapes:
        raise ProgramError(
            f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.input_shapes} to "
            f"{target.output_shape}"
        )
