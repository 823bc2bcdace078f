"""attnc compiles mathematics into softmax attention, and proves how far off the result can be."""

from attnc import constructions, incontext
from attnc.compiling import compile, plan
from attnc.converting import convert, load_converted, mlp_network
from attnc.diagnosing import Diagnosis, diagnose
from attnc.errors import AttncError, BoundNotMet, DomainError, ExpressionError, FileError, InputError, ProgramError
from attnc.ir import Affine, Attention, Program, Softmax
from attnc.loading import load
from attnc.network import Network
from attnc.proofs.certificate import Certificate
from attnc.targets.function_target import SequenceTarget
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.sources import as_target
from attnc.targets.table import TableTarget

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "Attention",
    "AttncError",
    "BoundNotMet",
    "Certificate",
    "Diagnosis",
    "DomainError",
    "ExpressionError",
    "FileError",
    "InputError",
    "Network",
    "Program",
    "ProgramError",
    "ReLUNetwork",
    "SequenceTarget",
    "Softmax",
    "TableTarget",
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
