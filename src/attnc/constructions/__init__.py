"""Each theorem by name, with its own parameters: Target → Program and Bound. What they are made of is in folders."""

from attnc.constructions.attention_softmax import attention_softmax
from attnc.constructions.binomial import binomial
from attnc.constructions.built import Built
from attnc.constructions.compose import compose
from attnc.constructions.gates import gates
from attnc.constructions.graded import graded
from attnc.constructions.max_affine import max_affine
from attnc.constructions.max_affine_cross import max_affine_cross
from attnc.constructions.relu_network import relu_network
from attnc.constructions.spectral_grid import spectral_grid
from attnc.constructions.table_grid import table_grid
from attnc.constructions.table_scattered import table_scattered
from attnc.constructions.truncated_linear import truncated_linear, truncated_linear_heads
from attnc.constructions.two_layer import two_layer

__all__ = [
    "Built",
    "attention_softmax",
    "binomial",
    "compose",
    "gates",
    "graded",
    "max_affine",
    "max_affine_cross",
    "relu_network",
    "spectral_grid",
    "table_grid",
    "table_scattered",
    "truncated_linear",
    "truncated_linear_heads",
    "two_layer",
]
