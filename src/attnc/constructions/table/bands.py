"""Weights of many keys on one axis: each point sees those around it, all others are negligible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEGLIGIBLE = 40.0
"""Weights below e^−40 are left out of a fit, and change nothing in float64."""


class Band:
    """Row j holds the weights at point j of the keys from nearest_j − reach to nearest_j + reach."""

    def __init__(
        self,
        y: Float[np.ndarray, " points"],
        anchors: Float[np.ndarray, " keys"],
        bias: Float[np.ndarray, " keys"],
        nearest: Int[np.ndarray, " points"],
        reach: int,
    ) -> None:
        from scipy.sparse import csr_array

        num_keys = len(anchors)
        self.width = min(2 * reach + 1, num_keys)
        first = np.clip(nearest - reach, 0, num_keys - self.width)
        self._key = first[:, None] + np.arange(self.width)
        self._weights = softmax(2 * y[:, None] * anchors[self._key] + bias[self._key])
        starts = np.arange(0, len(y) * self.width + 1, self.width)
        shape = (len(y), num_keys)
        self.matrix: Any = csr_array((self._weights.ravel(), self._key.ravel(), starts), shape=shape)

    def apply(self, v: Float[np.ndarray, "keys lines"]) -> Float[np.ndarray, "points lines"]:
        return np.asarray(self.matrix @ v)

    def solve(self, f: Float[np.ndarray, "points lines"]) -> Float[np.ndarray, "keys lines"]:
        """W⁻¹f, for as many keys as points."""
        from scipy.linalg import solve_banded

        reach = self.width - 1  # keys that share a row are no farther apart
        diagonals = np.zeros((2 * reach + 1, len(f)))  # W_ij is in row reach + i − j, column j
        diagonals[reach + np.arange(len(f))[:, None] - self._key, self._key] = self._weights
        return np.asarray(solve_banded((reach, reach), diagonals, f))

    def least_squares(
        self, f: Float[np.ndarray, "points lines"], ridge: float
    ) -> Float[np.ndarray, "keys lines"] | None:
        """The v that make |Wv − f|² + ridge·|v|² least, refined twice; None if rounding leaves no way to solve."""
        from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded

        transposed = self.matrix.T.tocsr()
        gram = transposed @ self.matrix
        diagonals = np.zeros((self.width, gram.shape[0]))
        for k in range(self.width):
            diagonals[k, : gram.shape[0] - k] = gram.diagonal(-k)
        diagonals[0] += ridge * diagonals[0].max()
        try:
            factor = cholesky_banded(diagonals, lower=True)
        except LinAlgError:
            return None
        v = np.zeros((gram.shape[0], f.shape[1]))
        for _ in range(3):  # what the ridge holds back in one pass, the next adds
            v += cho_solve_banded((factor, True), transposed @ (f - self.matrix @ v))
        return v


def reach_of_lattice(c: float) -> int:
    """Weights e^{−c·n²} are negligible n keys away; one more for the point's place between two keys."""
    return math.ceil(math.sqrt(NEGLIGIBLE / c)) + 2


def keys_at_nodes(
    y: Float[np.ndarray, " nodes"], c: float
) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Anchors and bias of a key for each node, at which it leads its neighbours by c however uneven the nodes.

    Slopes 2L grow by 2c/gap from a node to the next, and neighbours' scores meet in the middle between them: at a node
    its own key leads by (2c/gap)·(gap/2) = c, and the k-th from it by kc or more. A linear function added to all
    scores changes nothing: the one is chosen that leaves the numbers smallest, and with them their rounding.
    """
    gaps = np.diff(y)
    slopes = np.concatenate([[0.0], np.cumsum(c / gaps)])
    best, chosen = math.inf, (slopes, slopes)
    for level in (slopes[-1] / 2, 0.0, slopes[-1], slopes[np.argmin(gaps)]):
        anchors = slopes - level
        bias = np.concatenate([[0.0], np.cumsum(-2 * np.diff(anchors) * (y[:-1] + gaps / 2))])
        bias -= bias[np.argmin(np.abs(anchors))]
        size = float((np.abs(2 * anchors * y) + np.abs(bias)).max())
        if size < best:
            best, chosen = size, (anchors, bias)
    return chosen


def reach_at_nodes(
    y: Float[np.ndarray, " nodes"], anchors: Float[np.ndarray, " nodes"], bias: Float[np.ndarray, " nodes"]
) -> int:
    """How many keys away the weights of keys at nodes are negligible, at every node."""
    own = 2 * anchors * y + bias
    for k in range(1, len(y)):
        before, after = (
            own[k:] - (2 * anchors[:-k] * y[k:] + bias[:-k]),
            own[:-k] - (2 * anchors[k:] * y[:-k] + bias[k:]),
        )
        if min(before.min(), after.min()) > NEGLIGIBLE:
            return k
    return len(y) - 1
