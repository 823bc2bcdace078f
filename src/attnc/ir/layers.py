"""The three layers. Tokens are rows: Z ∈ R^{tokens × width}; the names of the features are `channels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.sparse import Sparse

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EVERY_QUERY = -1
"""The segment of a key that every query may see."""


@dataclass(frozen=True, eq=False)
class Affine:
    """Z ↦ W·Z + B: any linear map over tokens *and* features (the papers' Σ P_m Z Q_m), plus constants.

    It may repeat, reorder or drop tokens, and append constant ones.
    """

    name: str
    weight: Sparse  # (tokens_out, width_out, tokens_in, width_in)
    constant: Sparse  # (tokens_out, width_out)
    channels: tuple[str, ...]  # of the output

    @property
    def num_parameters(self) -> int:
        return self.weight.num_nonzeros + self.constant.num_nonzeros

    def astype(self, dtype: str) -> Affine:
        return replace(self, weight=self.weight.astype(dtype), constant=self.constant.astype(dtype))


@dataclass(frozen=True, eq=False)
class Mask:
    """Query q sees key k if their segments are equal, or if the key's segment is EVERY_QUERY. Never stored as T×T."""

    query_segments: Int[np.ndarray, " queries"]
    key_segments: Int[np.ndarray, " keys"]

    def visible(self, queries: np.ndarray, keys: slice) -> np.ndarray:
        """Which of these keys each of these queries sees."""
        of_keys = self.key_segments[keys]
        seen: np.ndarray = (self.query_segments[queries, None] == of_keys) | (of_keys == EVERY_QUERY)
        return seen

    def num_visible(self) -> Int[np.ndarray, " queries"]:
        """How many keys each query sees."""
        segments, inverse = np.unique(self.query_segments, return_inverse=True)
        ordered = np.sort(self.key_segments)
        own = np.searchsorted(ordered, segments, "right") - np.searchsorted(ordered, segments, "left")
        shared = np.count_nonzero(self.key_segments == EVERY_QUERY)
        own = np.where(segments == EVERY_QUERY, 0, own)
        return (own + shared)[inverse]


@dataclass(frozen=True, eq=False)
class Head:
    """One head. The inverse temperature β is part of W_K."""

    W_Q: Float[np.ndarray, "width d_k"]
    W_K: Float[np.ndarray, "key_width d_k"]
    W_V: Float[np.ndarray, "key_width d_v"]
    W_O: Float[np.ndarray, "d_v width_out"]
    mask: Mask | None = None

    @property
    def num_parameters(self) -> int:
        return sum(int(np.count_nonzero(W)) for W in (self.W_Q, self.W_K, self.W_V, self.W_O))

    def astype(self, dtype: str) -> Head:
        W_Q, W_K, W_V, W_O = (W.astype(dtype) for W in (self.W_Q, self.W_K, self.W_V, self.W_O))
        return Head(W_Q, W_K, W_V, W_O, self.mask)


@dataclass(frozen=True, eq=False)
class Attention:
    """Z ↦ [Z +] Σ_h softmax_rows(Z W_Q (Y W_K)ᵀ) Y W_V W_O, with Y = Z, or the memory if `cross`."""

    name: str
    heads: tuple[Head, ...]
    channels: tuple[str, ...]  # of the output
    residual: bool = False
    cross: bool = False

    @property
    def num_parameters(self) -> int:
        return sum(head.num_parameters for head in self.heads)

    def astype(self, dtype: str) -> Attention:
        return replace(self, heads=tuple(head.astype(dtype) for head in self.heads))


@dataclass(frozen=True, eq=False)
class Softmax:
    """Z ↦ softmax over the features of each token."""

    name: str
    channels: tuple[str, ...]

    num_parameters = 0

    def astype(self, dtype: str) -> Softmax:
        return self


Layer = Affine | Attention | Softmax
