"""The steps that estimators share: scale the columns, run the program, put the weights back into the user's units."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.ir.layers import Layer
from attnc.ir.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float


class FitError(InputError, ValueError):
    """Data or parameters that an estimator cannot fit: a ValueError too, as scikit-learn's callers expect."""


@dataclass(frozen=True, eq=False)
class ColumnUnits:
    """The units of the prompt: columns are centred and divided by √(mean square + damping), targets centred.

    With the damping penalty/(rows·largest curvature of the loss) every column has the same curvature, so that one
    length of steps suits all of them.
    """

    mean: Float[np.ndarray, " features"]
    scale: Float[np.ndarray, " features"]
    centre: float

    @classmethod
    def of(cls, X: np.ndarray, y: np.ndarray, *, centred: bool, centred_y: bool, damping: float = 0.0) -> ColumnUnits:
        mean = X.mean(axis=0) if centred else np.zeros(X.shape[1])
        moved = X - mean
        scale = np.sqrt((moved**2).mean(axis=0) + damping)
        is_constant = (X[:1] == X).all(axis=0) if centred else (X == 0).all(axis=0)
        if centred and is_constant.any() and len(X) > 1:
            columns = ", ".join(map(str, np.flatnonzero(is_constant)[:8]))
            warnings.warn(
                f"column {columns} of X is constant: its coefficient is 0, since the intercept includes it",
                UserWarning,
                stacklevel=4,
            )
        mean = np.where(is_constant & centred, X[0], mean)  # leaves exact zeros, without rounding
        return cls(mean, np.where(is_constant, 1.0, scale), float(y.mean()) if centred_y else 0.0)

    def uniform(self) -> ColumnUnits:
        """One scale for all columns: the shortest of several optima is then the shortest in X's own units."""
        return ColumnUnits(self.mean, np.full_like(self.scale, np.sqrt((self.scale**2).mean())), self.centre)

    def prompt(self, X: np.ndarray) -> Float[np.ndarray, "rows features"]:
        moved: np.ndarray = (X - self.mean) / self.scale
        return moved

    def undo(self, weights: np.ndarray, intercept: float = 0.0) -> tuple[Float[np.ndarray, " features"], float]:
        """The coefficients and the intercept in the user's units, from the weights of the scaled columns."""
        coefficients = weights / self.scale
        return coefficients, self.centre + intercept - float(self.mean @ coefficients)


def eigenvalue_bounds(gram: Float[np.ndarray, "d d"]) -> tuple[float, float]:
    """(L, μ) such that [μ, L] holds all eigenvalues that are not zero up to rounding."""
    values = np.linalg.eigvalsh(gram)
    slack = 4 * len(gram) * np.finfo(float).eps * float(max(values[-1], np.finfo(float).tiny))
    kept = values[values > 2 * slack]
    if not len(kept):
        return 1.0, 1.0  # every gradient is zero
    return float(values[-1] + slack), float(kept[0] - slack)


def run_recorded(
    program: Program, inputs: Sequence[np.ndarray], start: np.ndarray, iterate: str, token: int = 0
) -> tuple[Float[np.ndarray, " weights"], Float[np.ndarray, "steps weights"]]:
    """Run the program; return the last weights, and those after every step.

    The weights are the channels `iterate` of one token, after each layer `update`.
    """
    path = [np.array(start, np.float64)]
    columns: dict[int, list[int]] = {}

    def watch(layer: Layer, state: np.ndarray) -> None:
        if not layer.name.rpartition(".")[2].startswith("update"):
            return
        key = id(layer.channels)
        if key not in columns:
            columns[key] = [i for i, name in enumerate(layer.channels) if name.startswith(f"{iterate}.")]
        path.append(state[token, columns[key]].astype(np.float64))

    with np.errstate(over="ignore", invalid="ignore"):
        out = run(program, inputs, watch)
    return np.asarray(out, np.float64), np.stack(path)
