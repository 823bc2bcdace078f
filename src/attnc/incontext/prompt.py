"""The prompt: tokens (x_i, m_i, y_i) with m_i = 1 for an example and 0 for padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.building import AffineBuilder
from attnc.numerics.arrays import Float

ONE, PRESENT, TARGET, SINK = "one", "m", "y", "sink"


@dataclass(frozen=True)
class Prompt:
    """The sizes of a prompt: how many examples it may hold, and how many numbers each of them has.

    Parameters
    ----------
    rows : int
        Maximum number of examples.
    features : int
        Number of features of an example.
    intercept : bool
        Whether there is an intercept. Its weight multiplies m_i, which is 1 for examples.

    Raises
    ------
    InputError
        If there is no row or no weight.

    Examples
    --------
    >>> from attnc.incontext import Prompt
    >>> prompt = Prompt(rows=3, features=1)
    >>> prompt.inputs
    ('x.0', 'm', 'y')
    >>> prompt.tokens([[2.0], [5.0]], [1.0, -1.0])
    array([[ 2.,  1.,  1.],
           [ 5.,  1., -1.],
           [ 0.,  0.,  0.]])
    """

    rows: int
    features: int
    intercept: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.features + self.intercept < 1:
            raise InputError(
                f"a prompt needs at least one row and one weight, found {self.rows} rows of {self.features} features"
                f" {'with' if self.intercept else 'without'} intercept"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The channels of a token."""
        return (*(f"x.{c}" for c in range(self.features)), PRESENT, TARGET)

    @property
    def regressors(self) -> tuple[str, ...]:
        """The channels that the weights multiply: x̃ = (x, m) with an intercept, else x."""
        return self.inputs[: self.features + self.intercept]

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the weights: those of the regressors without their prefix."""
        return tuple(name.removeprefix("x.") for name in self.regressors)

    @property
    def num_weights(self) -> int:
        """The number of weights of a model, the intercept included."""
        return self.features + self.intercept

    def tokens(self, X: Any, y: Any) -> Float[np.ndarray, "rows width"]:
        """Return the examples as tokens, padded with zeros up to `rows`.

        Parameters
        ----------
        X : array-like of shape (examples, features)
            The inputs.
        y : array-like of shape (examples,)
            The targets.

        Returns
        -------
        Array of shape (rows, features + 2), with the columns of `inputs`.

        Raises
        ------
        InputError
            If shapes do not fit, there are more examples than `rows`, or a number is not finite.
        """
        X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
        if X.ndim != 2 or y.shape != X.shape[:1]:
            raise InputError(f"examples are X (n, d) and y (n,); found shapes {X.shape} and {y.shape}")
        if X.shape[1] != self.features:
            raise InputError(f"the program was built for {self.features} features, the prompt has {X.shape[1]}")
        if len(X) > self.rows:
            raise InputError(f"the program was built for at most {self.rows} rows, the prompt has {len(X)}")
        if not (np.isfinite(X).all() and np.isfinite(y).all()):
            raise InputError("the prompt has a value that is NaN or infinite; leave such rows out")
        tokens = np.zeros((self.rows, len(self.inputs)))
        tokens[: len(X), : self.features], tokens[: len(X), -2], tokens[: len(X), -1] = X, 1.0, y
        return tokens

    def place(self, memory: AffineBuilder, row: int, token: int, mean: bool) -> None:
        """Put the examples, starting at `row`, into the memory, starting at `token`; then the sinks.

        A sum has one sink, and a mean has one sink for each example that is present. A sink has the value zero and a
        score that makes it the denominator. So a head returns e^{-C} times the sum (or the mean) over the examples, and
        not an average whose weights depend on the data.
        """
        rows, tokens = row + np.arange(self.rows), token + np.arange(self.rows)
        memory.copy(tokens, rows, self.inputs)
        if mean:
            memory.link(tokens + self.rows, SINK, rows, PRESENT)
        else:
            memory.set(token + self.rows, SINK, 1.0)
