"""Queries, keys and values as functions of the input, in blocks of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import FloatForm

if TYPE_CHECKING:
    from jaxtyping import Float

DENSE_BYTES = 2**27
"""Constant keys and values up to this size are kept dense; larger ones are unpacked block by block."""


class Rows:
    """A form evaluated whole or in blocks of rows: constants are kept dense when small, and have no batch axis."""

    def __init__(self, form: FloatForm) -> None:
        self._form, self.shape = form, form.shape
        size = form.shape[0] * form.shape[1] * form.constant.dtype.itemsize
        self._dense = form.constant.toarray() if size <= DENSE_BYTES else None

    @property
    def is_constant(self) -> bool:
        return self._form.is_constant

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        whole = self.block(slice(0, self.shape[0]), u)
        return whole if whole.ndim == 3 else np.broadcast_to(whole, (len(u), *whole.shape))

    def block(self, rows: slice, u: np.ndarray) -> Float[np.ndarray, "*batch rows columns"]:
        constant: np.ndarray = self._form.constant[rows].toarray() if self._dense is None else self._dense[rows]
        if self._form.is_constant:
            return constant
        num_rows, columns = constant.shape
        linear = self._form.linear
        if num_rows < self.shape[0]:
            linear = linear[rows.start * columns : rows.stop * columns]
        moving: np.ndarray = (linear @ u.T).T.reshape(len(u), num_rows, columns)
        moving += constant
        return moving

    def constant_block(self, rows: slice) -> Float[np.ndarray, "rows columns"]:
        return self.block(rows, np.zeros((0, 0)))
