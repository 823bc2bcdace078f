"""The three layers. Tokens are rows: Z ∈ R^{tokens × width}; the names of the features are `channels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Bool, Float, Int

EVERY_QUERY = -1
"""The segment of a key that every query may see."""

MOST_VIEWS = 8
"""Maximum number of segments of a mask whose queries an export takes apart. With more, all scores are computed, and
those of keys that a query does not see are hidden. Masks with many segments have few tokens: one for each weight."""


class _WithoutHeads:
    """The attributes that an attention layer sets and the other layers do not need."""

    heads: ClassVar[tuple[Head, ...]] = ()
    residual: ClassVar[bool] = False
    cross: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class Affine(_WithoutHeads):
    """An affine map Z ↦ W·Z + B over tokens *and* features: the papers' Σ P_m Z Q_m, plus constants.

    It may repeat, reorder or drop tokens, and append constant ones.

    Parameters
    ----------
    name : str
        The name of the layer. Names within a program are distinct.
    weight : Sparse
        W, of shape (tokens_out, width_out, tokens_in, width_in).
    constant : Sparse
        B, of shape (tokens_out, width_out).
    channels : tuple of str
        The names of the output's features.

    Attributes
    ----------
    num_parameters : int
        Stored non-zeros.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3, construction="max_affine")
    >>> layer = net.program.layers[0]
    >>> isinstance(layer, attnc.Affine), layer.name
    (True, 'embed')
    >>> layer.weight.shape[2:]  # it takes one token of one feature
    (1, 1)
    """

    name: str
    weight: Sparse
    constant: Sparse
    channels: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros of the layer.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> weight, constant = (attnc.Sparse.from_dense(np.ones(shape)) for shape in ((1, 2, 1, 3), (1, 2)))
        >>> attnc.Affine("map", weight, constant, ("a", "b")).num_parameters  # six weights and two constants
        8
        """
        return self.weight.num_nonzeros + self.constant.num_nonzeros

    def astype(self, dtype: str) -> Affine:
        """Return the map with every number rounded to a dtype.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Affine
            A new map.

        Examples
        --------
        >>> import attnc
        >>> layer = attnc.compile("x**2", {"x": (0, 1)}, 0.1).program.layers[0]
        >>> layer.astype("float32").weight.values.dtype.name
        'float32'
        """
        return replace(self, weight=self.weight.astype(dtype), constant=self.constant.astype(dtype))


@dataclass(frozen=True, eq=False)
class Mask:
    """Query q sees key k if their segments are equal, or if the key's segment is EVERY_QUERY. Never stored as T×T."""

    query_segments: Int[np.ndarray, " queries"]
    key_segments: Int[np.ndarray, " keys"]

    @property
    def shared(self) -> Int[np.ndarray, " shared"]:
        """The keys that every query sees."""
        return np.flatnonzero(self.key_segments == EVERY_QUERY)

    def for_queries(self, tokens: Int[np.ndarray, " chosen"]) -> Mask:
        """Return the mask of some of the queries, with all keys."""
        return Mask(self.query_segments[tokens], self.key_segments)

    def visible(
        self, queries: slice | Int[np.ndarray, " chosen"], keys: slice = slice(None)
    ) -> Bool[np.ndarray, "chosen keys"]:
        """Return which of these keys each of these queries sees."""
        of_keys = self.key_segments[keys]
        seen: np.ndarray = (self.query_segments[queries, None] == of_keys) | (of_keys == EVERY_QUERY)
        return seen

    def groups(self) -> list[tuple[Int[np.ndarray, " queries"], Int[np.ndarray, " own"]]]:
        """Return the queries that see the same keys, with the keys that these queries alone see.

        Every query also sees the `shared` keys. The queries that see no others come first.
        """
        own = _positions(self.key_segments) | {EVERY_QUERY: np.zeros(0, np.int64)}
        has_own = np.isin(self.query_segments, self.key_segments)
        segments = np.where(has_own, self.query_segments, EVERY_QUERY)
        return [(queries, own[segment]) for segment, queries in _positions(segments).items()]

    def views(self) -> list[tuple[Int[np.ndarray, " queries"], Int[np.ndarray, " seen"]]]:
        """Return the queries that see the same keys, with all keys that they see, in ascending order."""
        return [(queries, np.sort(np.concatenate([self.shared, own]))) for queries, own in self.groups()]

    def num_visible(self) -> Int[np.ndarray, " queries"]:
        """Return the number of keys that each query sees."""
        ordered, asked = np.sort(self.key_segments), self.query_segments
        own = np.searchsorted(ordered, asked, "right") - np.searchsorted(ordered, asked, "left")
        return np.where(asked == EVERY_QUERY, 0, own) + len(self.shared)


def _positions(segments: Int[np.ndarray, " tokens"]) -> dict[int, Int[np.ndarray, " members"]]:
    """Return the positions of each segment, by ascending segment."""
    order = np.argsort(segments, kind="stable")
    found, starts = np.unique(segments[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, starts[1:]), strict=False))  # without segments, split still has one


@dataclass(frozen=True, eq=False)
class Head:
    """One head. The inverse temperature β is part of W_K.

    Attributes
    ----------
    W_Q, W_K, W_V, W_O : ndarray
        The projections of queries, keys, values and outputs.
    mask : Mask or None
        Which keys a query sees. None means all.

    Examples
    --------
    >>> import attnc
    >>> program = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).program
    >>> heads = [head for layer in program.layers if isinstance(layer, attnc.Attention) for head in layer.heads]
    >>> isinstance(heads[0], attnc.Head), heads[0].W_Q.shape[1] == heads[0].W_K.shape[1]
    (True, True)
    """

    W_Q: Float[np.ndarray, "width d_k"]
    W_K: Float[np.ndarray, "key_width d_k"]
    W_V: Float[np.ndarray, "key_width d_v"]
    W_O: Float[np.ndarray, "d_v width_out"]
    mask: Mask | None = None

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """The four projections by name.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> head = attnc.Head(W_Q=np.ones((3, 2)), W_K=np.ones((4, 2)), W_V=np.ones((4, 1)), W_O=np.ones((1, 5)))
        >>> {name: W.shape for name, W in head.matrices.items()}
        {'W_Q': (3, 2), 'W_K': (4, 2), 'W_V': (4, 1), 'W_O': (1, 5)}
        """
        return {"W_Q": self.W_Q, "W_K": self.W_K, "W_V": self.W_V, "W_O": self.W_O}

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros of the head.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Head(*(np.eye(2) for _ in range(4))).num_parameters  # zeros do not count
        8
        """
        return sum(int(np.count_nonzero(W)) for W in self.matrices.values())

    def astype(self, dtype: str) -> Head:
        """Return the head with every number rounded to a dtype.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Head
            A new head.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Head(*(np.eye(2) for _ in range(4))).astype("float32").W_Q.dtype.name
        'float32'
        """
        return Head(**{name: W.astype(dtype) for name, W in self.matrices.items()}, mask=self.mask)


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention layer Z ↦ [Z +] Σ_h softmax_rows(Z W_Q (Y W_K)ᵀ) Y W_V W_O.

    Y is Z itself, or the memory if `cross`.

    Parameters
    ----------
    name : str
        The name of the layer. Names within a program are distinct.
    heads : tuple of Head
        The heads: W_Q, W_K, W_V, W_O and a mask, or None.
    channels : tuple of str
        The names of the output's features.
    residual : bool
        Whether Z is added.
    cross : bool
        Whether keys and values are made from the memory.

    Attributes
    ----------
    num_parameters : int
        Stored non-zeros.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3, construction="max_affine")
    >>> (layer,) = [layer for layer in net.program.layers if isinstance(layer, attnc.Attention)]
    >>> layer.name, len(layer.heads), layer.residual
    ('select', 1, False)
    >>> layer.heads[0].W_V.shape[1]  # the values of its keys are numbers
    1
    """

    name: str
    heads: tuple[Head, ...]
    channels: tuple[str, ...]
    residual: bool = False
    cross: bool = False

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros of the layer.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> head = attnc.Head(*(np.ones((1, 1)) for _ in range(4)))
        >>> attnc.Attention("attend", (head, head), ("y",)).num_parameters
        8
        """
        return sum(head.num_parameters for head in self.heads)

    def astype(self, dtype: str) -> Attention:
        """Return the layer with every number rounded to a dtype.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Attention
            A new layer.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> layer = attnc.Attention("attend", (attnc.Head(*(np.ones((1, 1)) for _ in range(4))),), ("y",))
        >>> layer.astype("float32").heads[0].W_V.dtype.name
        'float32'
        """
        return replace(self, heads=tuple(head.astype(dtype) for head in self.heads))


@dataclass(frozen=True, eq=False)
class Softmax(_WithoutHeads):
    """Z ↦ the softmax over the features of each token. It has no weights.

    Parameters
    ----------
    name : str
        The name of the layer. Names within a program are distinct.
    channels : tuple of str
        The names of the features, which do not change.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("abs(x)", {"x": (-1, 1)}, 0.5, construction="attention_softmax")
    >>> [layer.name for layer in net.program.layers if isinstance(layer, attnc.Softmax)]
    ['select']
    """

    name: str
    channels: tuple[str, ...]

    num_parameters: ClassVar[int] = 0

    def astype(self, dtype: str) -> Softmax:
        """Return the layer itself: it has no numbers to cast.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Softmax
            The layer itself.

        Examples
        --------
        >>> import attnc
        >>> layer = attnc.Softmax("select", ("a", "b"))
        >>> layer.astype("float32") is layer
        True
        """
        return self


Layer = Affine | Attention | Softmax
