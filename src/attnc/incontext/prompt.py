"""The prompt: tokens (x_i, m_i, y_i) with m_i = 1 for an example and 0 for padding.

A weighted prompt has a further number for each example, log ω_i ≤ 0. Every head over the examples adds it to its score,
which multiplies the example's share of all sums by ω_i. The last rows of a prompt may be queries (x, 0, 0): programs
that take them return a prediction for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.building import AffineBuilder
from attnc.numerics.arrays import Float

ONE, PRESENT, TARGET, SINK, LOG_WEIGHT = "one", "m", "y", "sink", "log_weight"


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
    targets : int
        Number of targets of an example.
    weighted : bool
        Whether every example has a weight.
    queries : int
        Number of queries, which are the last rows.

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
    targets: int = 1
    weighted: bool = False
    queries: int = 0

    def __post_init__(self) -> None:
        if self.targets < 1 or self.queries < 0:
            raise InputError(
                f"a prompt has at least one target and no negative number of queries, found {self.targets} targets "
                f"and {self.queries} queries"
            )
        if self.rows < 1 or self.features + self.intercept < 1:
            raise InputError(
                f"a prompt needs at least one row and one weight, found {self.rows} rows of {self.features} features"
                f" {'with' if self.intercept else 'without'} intercept"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The channels of a token.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2).inputs
        ('x.0', 'x.1', 'm', 'y')
        """
        weight = (LOG_WEIGHT,) if self.weighted else ()
        return (*(f"x.{c}" for c in range(self.features)), PRESENT, *weight, *self.target_names)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The channels of the targets.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2, targets=2).target_names
        ('y.0', 'y.1')
        """
        return (TARGET,) if self.targets == 1 else tuple(f"{TARGET}.{k}" for k in range(self.targets))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a prompt: its rows, queries included, and the numbers of a token.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2, queries=1).shape
        (4, 4)
        """
        return self.rows + self.queries, len(self.inputs)

    @property
    def regressors(self) -> tuple[str, ...]:
        """The channels that the weights multiply: x̃ = (x, m) with an intercept, else x.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2, intercept=True).regressors
        ('x.0', 'x.1', 'm')
        """
        return self.inputs[: self.features + self.intercept]

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the weights: those of the regressors without their prefix.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2, intercept=True).weight_names
        ('0', '1', 'm')
        """
        return tuple(name.removeprefix("x.") for name in self.regressors)

    @property
    def num_weights(self) -> int:
        """The number of weights of a model, the intercept included.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=2, intercept=True).num_weights
        3
        """
        return self.features + self.intercept

    def tokens(
        self, X: Any, y: Any, *, sample_weight: Any = None, queries: Any = None
    ) -> Float[np.ndarray, "rows width"]:
        """Return the examples as tokens, padded with zeros up to `rows`, and the queries below them.

        Parameters
        ----------
        X : array-like of shape (examples, features)
            The inputs.
        y : array-like of shape (examples,), or (examples, targets) if there are several targets
            The targets.
        sample_weight : array-like of shape (examples,), optional
            The weights, above 0 and at most 1, if the prompt is weighted. None means 1.
        queries : array-like of shape (at most `queries`, features), optional
            The inputs for which predictions are wanted.

        Returns
        -------
        Array of shape (rows + queries, numbers of a token), with the columns of `inputs`.

        Raises
        ------
        InputError
            If shapes do not fit, there are more examples than `rows`, or a number is not finite.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> Prompt(rows=3, features=1).tokens([[2.0], [5.0]], [1.0, -1.0])
        array([[ 2.,  1.,  1.],
               [ 5.,  1., -1.],
               [ 0.,  0.,  0.]])
        """
        X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
        wanted = X.shape[:1] if self.targets == 1 else (*X.shape[:1], self.targets)
        if X.ndim != 2 or y.shape != wanted:
            numbers = "(n,)" if self.targets == 1 else f"(n, {self.targets})"
            raise InputError(f"examples are X (n, d) and y {numbers}; found shapes {X.shape} and {y.shape}")
        if len(X) > self.rows:
            raise InputError(f"the program was built for at most {self.rows} rows, the prompt has {len(X)}")
        tokens = np.zeros(self.shape)
        for row, given in ((0, X), (self.rows, self._asked(queries))):
            if given.shape[1] != self.features:
                raise InputError(f"the program was built for {self.features} features, the prompt has {given.shape[1]}")
            tokens[row : row + len(given), : self.features] = given
        tokens[: len(X), self.features] = 1.0
        tokens[: len(X), -self.targets :] = y.reshape(len(X), self.targets)
        if sample_weight is not None:
            tokens[: len(X), self.features + 1] = self._logarithms(sample_weight, len(X))
        if not np.isfinite(tokens).all():
            raise InputError("the prompt has a value that is NaN or infinite; leave such rows out")
        return tokens

    def _asked(self, queries: Any) -> Float[np.ndarray, "queries features"]:
        """Return the queries as an array of two axes."""
        found = np.zeros((0, self.features)) if queries is None else np.asarray(queries, np.float64)
        if found.ndim != 2 or len(found) > self.queries:
            raise InputError(f"the program was built for at most {self.queries} queries, found shape {found.shape}")
        return found

    def _logarithms(self, sample_weight: Any, examples: int) -> Float[np.ndarray, " examples"]:
        weights = np.asarray(sample_weight, np.float64)
        if not self.weighted or weights.shape != (examples,) or not ((weights > 0) & (weights <= 1)).all():
            raise InputError(
                f"a weighted prompt takes one weight for each of its {examples} examples, above 0 and at most 1; found "
                f"shape {weights.shape} for a prompt that is {'' if self.weighted else 'not '}weighted"
            )
        logarithms: np.ndarray = np.log(weights)
        return logarithms

    def place(self, memory: AffineBuilder, row: int, token: int, mean: bool) -> None:
        """Put the examples, starting at `row`, into the memory, starting at `token`; then the sinks.

        A sum has one sink, and a mean has one sink for each example that is present. A sink has the value zero and a
        score that makes it the denominator. So a head returns e^{-C} times the sum (or the mean) over the examples, and
        not an average whose weights depend on the data.

        Parameters
        ----------
        memory : AffineBuilder
            The map that writes the memory.
        row, token : int
            The first row and the first token.
        mean : bool
            True for means, False for sums.

        Examples
        --------
        >>> from attnc.incontext import Prompt
        >>> from attnc.ir.building import AffineBuilder
        >>> prompt = Prompt(rows=3, features=1)
        >>> memory = AffineBuilder(3, prompt.inputs, 4, (*prompt.inputs, "sink"))
        >>> prompt.place(memory, row=0, token=0, mean=False)
        >>> memory.build("memory").weight.shape  # three examples and one sink
        (4, 4, 3, 3)
        """
        rows, tokens = row + np.arange(self.rows), token + np.arange(self.rows)
        memory.copy(tokens, rows, self.inputs)
        if mean:
            memory.link(tokens + self.rows, SINK, rows, PRESENT)
            if self.weighted:
                memory.link(tokens + self.rows, LOG_WEIGHT, rows, LOG_WEIGHT)
        else:
            memory.set(token + self.rows, SINK, 1.0)
