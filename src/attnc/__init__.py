"""attnc compiles mathematics into softmax attention, and proves how far off the result can be."""

from typing import TYPE_CHECKING, Any

from attnc import constructions
from attnc.comparing import Comparison, HeadComparison, compare
from attnc.compiling import compile
from attnc.constructions import Built, Estimate
from attnc.converting import convert, load_converted, mlp_network
from attnc.converting.report import Report
from attnc.errors import (
    AttncError,
    BoundNotMet,
    DomainError,
    ExpressionError,
    FileError,
    InputError,
    MissingExtra,
    ParityExceeded,
    ProgramError,
)
from attnc.interventions import Ablated, Trace, TracedSite, trace
from attnc.ir import Affine, Attention, Program, Repeat, Softmax, Varying
from attnc.ir.layers import Head
from attnc.ir.sparse import Sparse
from attnc.loading import load
from attnc.network import Network, Parity, Run
from attnc.numerics.bound import Bound, Term
from attnc.planning import plan
from attnc.proofs.certificate import Certificate, Standing
from attnc.proofs.proof import Beyond, Excluded, GradientProof, Leaves, Points, Stages
from attnc.targets.box import Box
from attnc.targets.function_target import SequenceTarget
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.sources import as_target
from attnc.targets.table import TableTarget
from attnc.targets.target import Target
from attnc.verifying import verify

if TYPE_CHECKING:
    from attnc import incontext as incontext
    from attnc import nn as nn
    from attnc_lab import Diagnosis, Symptom, diagnose

__version__ = "0.1.0"

__all__ = [
    "Ablated",
    "Affine",
    "Attention",
    "AttncError",
    "Beyond",
    "Bound",
    "BoundNotMet",
    "Box",
    "Built",
    "Certificate",
    "Comparison",
    "Diagnosis",
    "DomainError",
    "Estimate",
    "Excluded",
    "ExpressionError",
    "FileError",
    "GradientProof",
    "Head",
    "HeadComparison",
    "InputError",
    "Leaves",
    "MissingExtra",
    "Network",
    "Parity",
    "ParityExceeded",
    "Points",
    "Program",
    "ProgramError",
    "ReLUNetwork",
    "Repeat",
    "Report",
    "Run",
    "SequenceTarget",
    "Softmax",
    "Sparse",
    "Stages",
    "Standing",
    "Symptom",
    "TableTarget",
    "Target",
    "Term",
    "Trace",
    "TracedSite",
    "TruncatedLinear",
    "Varying",
    "as_target",
    "compare",
    "compile",
    "constructions",
    "convert",
    "diagnose",
    "incontext",
    "load",
    "load_converted",
    "mlp_network",
    "plan",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the names of the lab, the layers and the estimators on first use."""
    if name in ("incontext", "nn"):
        import importlib

        return importlib.import_module(f"attnc.{name}")
    if name in ("Diagnosis", "Symptom", "diagnose"):
        import attnc_lab

        return getattr(attnc_lab, name)
    raise AttributeError(f"module 'attnc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "nn"})
