"""Torch modules with a proven error, to put into models: functions, tables and activations by attention.

This package needs the extra `torch`. `import attnc` does not import it; `attnc.nn` does on its first use.
"""

from attnc.converting import need_torch

need_torch("attnc.nn needs")

from attnc.nn.activation import Activation  # noqa: E402
from attnc.nn.function import Function, Table  # noqa: E402

__all__ = ["Activation", "Function", "Table"]
