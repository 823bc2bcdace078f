"""A sparse tensor of any rank: the coordinates of its non-zeros, and their values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.numerics.arrays import Float, Int

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True, eq=False)
class Sparse:
    """`tensor[tuple(index[i])] = values[i]`, zero elsewhere. `ir.spec` checks ranges and that no cell occurs twice.

    Attributes
    ----------
    shape : tuple of int
        The shape of the tensor.
    index : ndarray
        The places of the non-zeros, one row each.
    values : ndarray
        The non-zeros.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> attnc.Sparse.from_dense(np.array([[0.0, 2.0], [0.0, 0.0]])).num_nonzeros
    1
    """

    shape: tuple[int, ...]
    index: Int[np.ndarray, "nonzeros rank"]
    values: Float[np.ndarray, " nonzeros"]

    @classmethod
    def from_dense(cls, array: Float[np.ndarray, "*shape"]) -> Sparse:
        """Return the non-zeros of an array.

        Parameters
        ----------
        array : array
            Any shape.

        Returns
        -------
        Sparse
            The same numbers.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> sparse = attnc.Sparse.from_dense(np.array([[0.0, 2.0], [0.0, 0.0]]))
        >>> sparse.shape, sparse.num_nonzeros
        ((2, 2), 1)
        """
        where = np.nonzero(array)
        return cls(array.shape, np.stack(where, axis=1).astype(np.int32), array[where])

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> Sparse:
        """Return an array without non-zeros.

        Parameters
        ----------
        shape : tuple of int
            The shape.
        dtype : dtype
            The type of the numbers.

        Returns
        -------
        Sparse
            An array of zeros.

        Examples
        --------
        >>> import attnc
        >>> attnc.Sparse.zeros((2, 3), "float64").num_nonzeros
        0
        """
        return cls(shape, np.zeros((0, len(shape)), np.int32), np.zeros(0, dtype))

    @property
    def num_nonzeros(self) -> int:
        """The number of stored entries.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Sparse.from_dense(np.array([0.0, 2.0, 3.0])).num_nonzeros
        2
        """
        return int(np.count_nonzero(self.values))

    @property
    def nbytes(self) -> int:
        """The bytes of the stored entries and their indices.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Sparse.from_dense(np.array([0.0, 2.0, 3.0])).nbytes  # two places of 4 bytes and two numbers of 8
        24
        """
        return self.index.nbytes + self.values.nbytes

    def astype(self, dtype: Any) -> Sparse:
        """Return the array with its entries in another dtype.

        Parameters
        ----------
        dtype : dtype
            The type of the numbers.

        Returns
        -------
        Sparse
            A new array.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Sparse.from_dense(np.array([0.0, 2.0])).astype("float32").values.dtype.name
        'float32'
        """
        return Sparse(self.shape, self.index, self.values.astype(dtype))

    def dense(self) -> Float[np.ndarray, "*shape"]:
        """Return the array with its zeros.

        Returns
        -------
        array
            Every number, in the shape of this array.

        Examples
        --------
        >>> import attnc
        >>> attnc.Sparse.zeros((1, 2), "float64").dense().tolist()
        [[0.0, 0.0]]
        """
        array = np.zeros(self.shape, self.values.dtype)
        array[tuple(self.index.T)] = self.values
        return array

    def flat(self, axes: slice) -> Int[np.ndarray, " nonzeros"]:
        """Row-major position of every non-zero within the given axes.

        Parameters
        ----------
        axes : slice
            The axes to count along.

        Returns
        -------
        array of shape (nonzeros,)
            A number for each non-zero, in their order.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Sparse.from_dense(np.array([[0.0, 2.0], [3.0, 0.0]])).flat(slice(0, 2)).tolist()
        [1, 2]
        """
        shape = self.shape[axes]
        strides = np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)
        return np.asarray(self.index[:, axes] @ strides)

    def matrix(self, rank: int) -> csr_array:
        """Return the matrix whose rows run over the first `rank` axes and whose columns run over the others.

        Parameters
        ----------
        rank : int
            The number of axes that become rows.

        Returns
        -------
        csr_array
            A sparse matrix of SciPy.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.Sparse.from_dense(np.ones((2, 3, 4))).matrix(1).shape
        (2, 12)
        """
        from scipy.sparse import coo_array

        shape = (math.prod(self.shape[:rank]), math.prod(self.shape[rank:]))
        return coo_array((self.values, (self.flat(slice(0, rank)), self.flat(slice(rank, None)))), shape).tocsr()
