"""Patches: arrays that replace named activations and attention maps while a program is evaluated."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attnc.errors import InputError
from attnc.ir.program import Program
from attnc.ir.reference import Visit, activation_shapes
from attnc.numerics.arrays import real_array

Patch = npt.ArrayLike | Callable[[np.ndarray], npt.ArrayLike]
"""A number, an array of the shape that the cache has (or of one point), or a function from the array to such a one."""
NAMES_SHOWN = 5
"""Number of near names in a message."""


def patching(program: Program, patch: Mapping[str, Patch], visit: Visit | None = None) -> Visit:
    """Return a visit that replaces the arrays named in `patch`, and then calls `visit`.

    Raise InputError if a name is unknown. The visit raises it if an array has the wrong shape or is not finite.
    """
    if not isinstance(patch, Mapping):
        raise InputError(f"patch is a mapping from names to arrays or functions, found {type(patch).__name__}")
    known = activation_shapes(program)
    for name in patch:
        if name not in known:
            raise InputError(f"patch: {unknown(name, known, 'activation')}")

    def replaced(name: str, array: np.ndarray) -> np.ndarray:
        if name in patch:
            given = patch[name]
            array = _fitting(name, given(array.copy()) if callable(given) else given, array)
        return array if visit is None else visit(name, array)

    return replaced


def unknown(name: Any, known: Collection[str], kind: str) -> str:
    """Return the complaint about an unknown name, with the names that are nearest to it."""
    shown = str(name)
    near = difflib.get_close_matches(shown, known, NAMES_SHOWN, cutoff=0.4) or list(known)[:NAMES_SHOWN]
    more = len(known) - len(near)
    others = f" ({more:,} more; net.run(points, cache=True).cache has all names)" if more > 0 else ""
    return f"there is no {kind} {shown[:80]!r}. Nearest: {', '.join(near) or 'none'}{others}."


def _fitting(name: str, given: Any, array: np.ndarray) -> np.ndarray:
    """Return the given numbers as an array that replaces `array`."""
    found = real_array(f"the numbers of patch {name!r}", given)
    if found.shape not in ((), array.shape, (1, *array.shape[1:])):
        one = (1, *array.shape[1:])
        raise InputError(
            f"patch {name!r} has shape {found.shape}. Give {array.shape}, as in the cache, {one} for all points alike, "
            "or a number."
        )
    with np.errstate(over="ignore"):
        found = np.broadcast_to(found, array.shape).astype(array.dtype)
    is_hidden = (found == -np.inf) if name.endswith(".scores") else np.zeros(found.shape, bool)
    if not (np.isfinite(found) | is_hidden).all():
        place = tuple(int(i) for i in np.argwhere(~(np.isfinite(found) | is_hidden))[0])
        raise InputError(
            f"patch {name!r} is {found[place]} at {place}: numbers must be finite in {array.dtype}"
            f"{', or −∞ for a key that a query does not see' if name.endswith('.scores') else ''}"
        )
    if is_hidden.size and is_hidden.all(axis=-1).any():
        place = tuple(int(i) for i in np.argwhere(is_hidden.all(axis=-1))[0])
        raise InputError(f"patch {name!r} hides all keys from the query at {place}: one score must be finite")
    return found
