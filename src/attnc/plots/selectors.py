"""One softmax of a network at a time: the scores that one query of one head meets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import FoldedHead
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from scipy.sparse import csr_array


@dataclass(frozen=True, eq=False)
class Selector:
    """softmax_k(a_k·u + c_k) over the keys that a query sees, u the state before the stage; or a bilinear one."""

    stage: int
    layer: str
    head: int | None  # None: a Softmax layer
    query: int
    keys: Int[np.ndarray, " keys"]  # their tokens
    a: csr_array | None  # (keys, variables); None: the scores are not affine
    c: Float[np.ndarray, " keys"]
    values: Float[np.ndarray, " keys"] | None  # what a key with all of the weight adds to the output, if a constant
    base: float  # what is added to that
    folded: FoldedHead | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def scores(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """(batch, near): of some of the keys."""
        if self.a is not None:
            return np.asarray((self.a[near] @ u.T).T + self.c[near])
        assert self.folded is not None
        queries = self.folded.queries.rows(np.array([self.query]))(u)
        keys = self.folded.keys.rows(self.keys[near])(u)
        return np.asarray((queries @ keys.transpose(0, 2, 1))[:, 0])

    def near(
        self,
        lo: Float[np.ndarray, " variables"],
        hi: Float[np.ndarray, " variables"],
        margin: float,
        among: Int[np.ndarray, " among"] | None = None,
    ) -> Int[np.ndarray, " near"]:
        """Those of the keys that come within `margin` of the largest score somewhere in the window.

        Such a key comes within `margin` of the key that wins in the middle, and a linear difference is largest at a
        corner. So this drops no key that matters, and costs one pass.
        """
        if self.a is None or len(self if among is None else among) == 1:
            return np.arange(len(self)) if among is None else among
        a, c = (self.a, self.c) if among is None else (self.a[among], self.c[among])
        middle, half = (lo + hi) / 2, (hi - lo) / 2
        scores = a @ middle + c
        best = int(np.argmax(scores))
        row = a[[best]].toarray()[0]
        # Σ_i |a_ki − row_i|·half_i, from the non-zeros of a_k alone
        change = (np.abs(a.data - row[a.indices]) - np.abs(row[a.indices])) * half[a.indices]
        spread = np.abs(row) @ half + type(a)((change, a.indices, a.indptr), a.shape) @ np.ones(a.shape[1])
        found = np.flatnonzero(scores - scores[best] + spread >= -margin)
        return found if among is None else among[found]

    def weights(self, u: Float[np.ndarray, "batch variables"], near: Int[np.ndarray, " near"]) -> np.ndarray:
        """(batch, near); keys that are left out must not matter."""
        return softmax(self.scores(u, near))

    @cached_property
    def spoken(self) -> Float[np.ndarray, "keys channels"] | None:
        """What a key with all of the weight adds to the state; None where that moves, or for a Softmax layer."""
        if self.folded is None or not self.folded.values.is_constant:
            return None
        return np.asarray(self.folded.values.constant @ self.folded.W_O, np.float64)[self.keys]

    @cached_property
    def is_sentinel(self) -> Bool[np.ndarray, " keys"]:
        """Keys that say nothing, beyond all keys that do; where keys do not stand in a line, all that say nothing."""
        if self.spoken is None or not self.spoken.any():
            return np.zeros(len(self), bool)
        silent = np.asarray(~self.spoken.any(axis=1))
        direction = common_direction([self])
        if direction is None or self.a is None:
            return silent
        place = self.a @ direction
        first, last = place[~silent].min(), place[~silent].max()
        return np.asarray(silent & ((place < first) | (place > last)))

    @property
    def outputs(self) -> Float[np.ndarray, " keys"] | None:
        """What the network returns where one key has all of the weight and other heads are silent."""
        return None if self.values is None else self.values + self.base

    def on_line(
        self, origin: Float[np.ndarray, " variables"], direction: Float[np.ndarray, " variables"]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(slope, constant) of every score along u = origin + t·direction."""
        return None if self.a is None else (self.a @ direction, self.a @ origin + self.c)


def common_direction(heads: list[Selector]) -> Float[np.ndarray, " variables"] | None:
    """The w of which the gradient of every score is a multiple; None where there is no such."""
    found = None
    for head in heads:
        if head.a is None or head.a.nnz == 0:
            return None
        columns = np.unique(head.a.indices)
        dense = head.a[:, columns].toarray()
        if found is None:
            found = np.zeros(head.a.shape[1])
            found[columns] = dense[np.argmax(np.abs(dense).max(axis=1))]
        along = dense @ found[columns] / (found @ found)
        if np.abs(dense - along[:, None] * found[columns]).max() > 1e-6 * np.abs(dense).max():
            return None
    return found
