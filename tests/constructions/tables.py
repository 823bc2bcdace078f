"""Tables, and the checks that all of their fits share."""

from __future__ import annotations

import numpy as np

import attnc


def grid(*axes) -> np.ndarray:
    return np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], axis=1)


def fitted(construction, table: attnc.TableTarget, eps: float, dtype: str = "float64", most: int = 10**9):
    """The network, whose error is ≤ eps at every point and whose anchors are at most `most`."""
    built = construction(table, eps=eps, dtype=dtype)
    assert np.abs(built.program(table.points).reshape(table.num_points, -1) - table.values).max() <= eps
    assert built.program.num_anchors <= most
    return built
