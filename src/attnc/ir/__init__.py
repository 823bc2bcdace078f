"""The intermediate representation: affine maps and softmax attention, and nothing else."""

from attnc.ir.layers import Affine, Attention, Head, Mask, Softmax
from attnc.ir.program import Program
from attnc.ir.repeats import Repeat, Varying

__all__ = ["Affine", "Attention", "Head", "Mask", "Program", "Repeat", "Softmax", "Varying"]
