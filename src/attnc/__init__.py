"""attnc compiles mathematics into softmax attention, and proves how far off the result can be."""

from typing import TYPE_CHECKING, Any

from attnc import constructions, incontext
from attnc.compiling import compile
from attnc.converting import convert, load_converted, mlp_network
from attnc.errors import AttncError, BoundNotMet, DomainError, ExpressionError, FileError, InputError, ProgramError
from attnc.ir import Affine, Attention, Program, Softmax
from attnc.loading import load
from attnc.network import Network, Parity, Run
from attnc.planning import plan
from attnc.proofs.certificate import Certificate
from attnc.targets.box import Box
from attnc.targets.function_target import SequenceTarget
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.sources import as_target
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from attnc_lab import Diagnosis, Symptom, diagnose

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "Attention",
    "AttncError",
    "BoundNotMet",
    "Box",
    "Certificate",
    "Diagnosis",
    "DomainError",
    "ExpressionError",
    "FileError",
    "InputError",
    "Network",
    "Parity",
    "Program",
    "ProgramError",
    "ReLUNetwork",
    "Run",
    "SequenceTarget",
    "Softmax",
    "Symptom",
    "TableTarget",
    "Target",
    "TruncatedLinear",
    "as_target",
    "compile",
    "constructions",
    "convert",
    "diagnose",
    "incontext",
    "load",
    "load_converted",
    "mlp_network",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Load the lab's part of the API when it is first named."""
    if name in ("Diagnosis", "Symptom", "diagnose"):
        import attnc_lab

        return getattr(attnc_lab, name)
    raise AttributeError(f"module 'attnc' has no attribute {name!r}")
