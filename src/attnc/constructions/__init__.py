"""Each theorem by name, with its own parameters: Target → Program and Bound."""

from attnc.constructions.beyond.affine_cells import affine_cells
from attnc.constructions.beyond.binomial import binomial
from attnc.constructions.beyond.compose import compose
from attnc.constructions.beyond.gates import gates
from attnc.constructions.beyond.graded import graded
from attnc.constructions.beyond.spectral_grid import spectral_grid
from attnc.constructions.beyond.table_grid import table_grid
from attnc.constructions.beyond.table_scattered import table_scattered
from attnc.constructions.built import Built
from attnc.constructions.catalogue import CATALOGUE
from attnc.constructions.construction import Construction, Estimate, Request
from attnc.constructions.papers.attention_softmax import attention_softmax
from attnc.constructions.papers.max_affine import max_affine
from attnc.constructions.papers.max_affine_cross import max_affine_cross
from attnc.constructions.papers.relu_network import relu_network
from attnc.constructions.papers.truncated_linear import truncated_linear, truncated_linear_heads
from attnc.constructions.papers.two_layer import two_layer

__all__ = [
    "CATALOGUE",
    "Built",
    "Construction",
    "Estimate",
    "Request",
    "affine_cells",
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
