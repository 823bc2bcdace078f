"""Types of arrays with their shapes, for annotations: `Float[np.ndarray, "points keys"]`.

A type checker reads them from jaxtyping, which attnc does not need to run: annotations are never evaluated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:
    Bool = Float = Int = Any
