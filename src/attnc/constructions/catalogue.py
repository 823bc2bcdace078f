"""The one list of constructions. A new construction is one file and one row here: see CONTRIBUTING.md."""

from __future__ import annotations

from attnc.constructions.beyond.affine_cells import AFFINE_CELLS
from attnc.constructions.beyond.binomial import BINOMIAL
from attnc.constructions.beyond.compose import COMPOSE
from attnc.constructions.beyond.gates import GATES_CONSTRUCTION
from attnc.constructions.beyond.graded import GRADED
from attnc.constructions.beyond.spectral_grid import SPECTRAL_GRID
from attnc.constructions.beyond.table_grid import TABLE_GRID
from attnc.constructions.beyond.table_scattered import TABLE_SCATTERED
from attnc.constructions.construction import Construction
from attnc.constructions.papers.attention_softmax import ATTENTION_SOFTMAX
from attnc.constructions.papers.max_affine import MAX_AFFINE
from attnc.constructions.papers.max_affine_cross import MAX_AFFINE_CROSS
from attnc.constructions.papers.relu_network import RELU_NETWORK
from attnc.constructions.papers.truncated_linear import TRUNCATED_LINEAR, TRUNCATED_LINEAR_HEADS
from attnc.constructions.papers.two_layer import TWO_LAYER

CATALOGUE: list[Construction] = [
    COMPOSE,
    GATES_CONSTRUCTION,
    GRADED,
    BINOMIAL,
    AFFINE_CELLS,
    MAX_AFFINE,
    MAX_AFFINE_CROSS,
    TWO_LAYER,
    ATTENTION_SOFTMAX,
    SPECTRAL_GRID,
    TRUNCATED_LINEAR,
    TRUNCATED_LINEAR_HEADS,
    RELU_NETWORK,
    TABLE_GRID,
    TABLE_SCATTERED,
]
"""All constructions, in the order in which `auto` and `plan` estimate them."""
