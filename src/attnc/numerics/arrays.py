"""Types of arrays with their shapes, for annotations: `Float[np.ndarray, "points keys"]`; arrays that users give.

A type checker reads the types from jaxtyping, which attnc does not need to run: annotations are never evaluated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    Bool = Float = Int = Any


def real_array(names: str, given: Any) -> np.ndarray:
    """Return the given numbers as a float64 or float32 array, or raise InputError with their name, a plural."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InputError(f"{names} do not form an array: {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{names} must be real numbers, found an array of {array.dtype}")
    return array if array.dtype in (np.float64, np.float32) else array.astype(np.float64)
