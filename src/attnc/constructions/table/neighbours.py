"""What neighbours in a scattered table tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What neighbours tell: whether the table is noise to every smooth fit, and how steep it is along each axis."""

    is_rough: bool
    steepness: Float[np.ndarray, " d"]  # in widths of the box, as a part of the steepest

    @classmethod
    def of(cls, y: Float[np.ndarray, "points d"], f: Float[np.ndarray, "points outputs"], eps: float) -> Neighbours:
        """From points in widths of the box.

        A quadratic through a point's neighbours predicts its value: of a smooth function much better than the nearest
        neighbour's value does, of noise no better.
        """
        from scipy.spatial import cKDTree

        d = y.shape[1]
        count = (d + 1) * (d + 2) + 1  # twice as many neighbours as a quadratic has coefficients, and the point itself
        if len(y) <= 2 * count:
            return cls(False, np.ones(d))
        some = np.random.default_rng(1).permutation(len(y))[:400]
        near = np.asarray(cKDTree(y).query(y[some], k=count)[1])
        coefficients = np.linalg.pinv(_quadratic(y[near[:, 1:]] - y[some, None])) @ f[near[:, 1:]]
        predicted = np.abs(coefficients[:, 0] - f[some]).max(axis=1)
        nearest = np.abs(f[near[:, 1]] - f[some]).max(axis=1)
        slopes = np.quantile(np.abs(coefficients[:, 1 : d + 1]).max(axis=2), 0.8, axis=0)
        is_rough = float(np.median(predicted)) > max(5 * eps, 0.5 * float(np.median(nearest)))
        return cls(is_rough, slopes / slopes.max() if slopes.max() > 0 else np.ones(d))


def _quadratic(x: Float[np.ndarray, "batch points d"]) -> Float[np.ndarray, "batch points monomials"]:
    d = x.shape[-1]
    squares = [x[..., i] * x[..., j] for i in range(d) for j in range(i, d)]
    return np.stack([np.ones(x.shape[:-1]), *np.moveaxis(x, -1, 0), *squares], axis=-1)
