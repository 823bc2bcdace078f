"""The rounding of a line over its leaves, and leaves on which it can be found again.

A gate's values cross where its weights are least sure. Leaves may be wide there, and its rounding is not: it is looked
for in parts of them. Whoever proves the leaves again looks at parts, too, but at PARTS of each and no more; so a leaf
that took more parts is stored as several, each with as many as that. On every part what was found here is found again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import down, up
from attnc.proofs.cells.branching import MAX_LEVEL, Covering, Leaf
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MOST_IDLE = 3
MOST_CELLS = 4096
"""When to halve cells no more for the sake of their rounding."""
WORTH = 0.8
PARTS = 4
"""log₂ of the parts into which a checker cuts a leaf of one variable."""

Bounds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(centres, radii) → a bound for every cell."""


def rounded_leaves(bounds: Bounds, proof: Covering) -> tuple[float, Covering]:
    """The largest bound of any cell, and the proof by leaves of at most 2^PARTS cells that were looked at.

    Cells are halved where the bound is largest, as long as that makes it smaller.
    """
    level = np.array([leaf.level for leaf in proof.leaves])
    index = np.array([leaf.index[0] for leaf in proof.leaves], dtype=np.int64)
    upper, owner, idle = bounds(*_boxes(proof.box, level, index)), np.arange(len(level)), 0
    while idle < MOST_IDLE and len(level) < MOST_CELLS:
        largest = upper.max()
        wide = (upper > largest / 2) & (level < MAX_LEVEL)
        new = np.tile(level[wide] + 1, 2), np.concatenate([2 * index[wide], 2 * index[wide] + 1])
        found = bounds(*_boxes(proof.box, *new)) if wide.any() else upper[:0]
        level, index = np.concatenate([level[~wide], new[0]]), np.concatenate([index[~wide], new[1]])
        upper, owner = np.concatenate([upper[~wide], found]), np.concatenate([owner[~wide], np.tile(owner[wide], 2)])
        idle = 0 if upper.max() < WORTH * largest else idle + 1
    return float(upper.max()), _divided(proof, owner, level, index)


def leaf_intervals(proof: Covering) -> Interval:
    """The leaves of a line, in their order."""
    level = np.array([leaf.level for leaf in proof.leaves])
    centres, radii = _boxes(proof.box, level, np.array([leaf.index[0] for leaf in proof.leaves], dtype=np.int64))
    return Interval(down(centres - radii)[:, 0], up(centres + radii)[:, 0])


def _boxes(
    box: Box, level: Int[np.ndarray, " cells"], index: Int[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, "cells 1"], Float[np.ndarray, "cells 1"]]:
    """Centres and radii of cells of several levels."""
    found = np.empty((2, len(level), 1))
    for each in np.unique(level).tolist():
        rows = level == each
        found[:, rows] = cell_boxes(box, each, index[rows][:, None])
    return found[0], found[1]


def _divided(proof: Covering, owner: np.ndarray, level: np.ndarray, index: np.ndarray) -> Covering:
    """Leaves halved until no cell is more than PARTS levels below its leaf."""
    halved = {
        (deep - above, i >> above)
        for leaf, deep, i in zip(owner.tolist(), level.tolist(), index.tolist(), strict=True)
        for above in range(PARTS + 1, deep - proof.leaves[leaf].level + 1)
    }
    leaves, numbers = list[Leaf](), list[int]()
    for number, leaf in enumerate(proof.leaves):
        pending = [(leaf.level, leaf.index[0])]
        while pending:
            cell = pending.pop()
            if cell in halved:
                pending += [(cell[0] + 1, 2 * cell[1] + side) for side in (1, 0)]
            else:
                leaves.append(dataclasses.replace(leaf, level=cell[0], index=(cell[1],)))
                numbers.append(number)
    terms = {name: term[numbers] for name, term in proof.terms.items()}
    return dataclasses.replace(proof, leaves=tuple(leaves), leaf_bounds=proof.leaf_bounds[numbers], terms=terms)
