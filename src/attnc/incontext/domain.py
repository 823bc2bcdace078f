"""The prompts for which an in-context program is built. Outside of them its steps may diverge, and no bound holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.errors import FileError, InputError
from attnc.incontext.prompt import Prompt
from attnc.incontext.turns import Examples, Turns
from attnc.numerics.arrays import Float

LIMIT_SLACK = 1 + 1e-9
"""The factor by which a norm or an eigenvalue may exceed its limit. Norms of the same prompt differ by roundings when
they are computed in another order, and the heads have a quarter more room than the limits."""
OPTIONAL_SIZES = {"targets": 1, "weighted": False, "queries": 0}
"""Sizes of a prompt that files state only if they differ from these."""
OPTIONAL_LIMITS = ("query", "turns", "gradient", "prefixes")
"""Limits that files may leave out."""
SMALLEST = 4 * float(np.finfo(float).eps)
"""An eigenvalue counts as zero below this multiple of the number of weights times the largest. Steps do not move the
weights along its eigenvector."""


class OutsideDomain(InputError):
    """A prompt is outside the domain of an in-context program.

    Examples
    --------
    >>> import attnc
    >>> program = attnc.incontext.Ridge().fit([[0.0], [1.0]], [0.0, 1.0]).program_
    >>> try:
    ...     program.check(program.domain.prompt.tokens([[9.0], [0.0]], [0.0, 1.0]))
    ... except attnc.incontext.OutsideDomain:
    ...     print("refused")
    refused
    """


@dataclass(frozen=True)
class Domain:
    """The limits that a prompt must keep. A limit that is infinite is not checked.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt.
    x : float
        The largest 2-norm of an example x̃_i, including the 1 of an intercept.
    y : float
        The largest 2-norm of all targets together.
    target : float
        The largest absolute value of a target.
    start : float
        The largest 2-norm of the first weights.
    query : float
        The largest 2-norm of a query.
    L : float
        The largest eigenvalue of curvature·Σ x̃_i x̃_iᵀ + penalty (of the mean instead of the sum if `mean`).
    mu : float
        The smallest eigenvalue of it that is not zero. 0 if the program does not depend on it.
    curvature : float
        The largest second derivative of the loss: 1 for the squared loss, 1/4 for the logistic one.
    penalty : tuple of float
        The penalties of the weights.
    mean : bool
        Whether the objective is a mean over the examples.
    has_penalty_rows : bool
        Whether rows with flag 0 may hold penalties.
    turns : Turns or None
        Newton turns that converge on every prompt of the domain. None does not run them.
    gradient : float
        The largest norm of the gradients of these turns, after their factors.
    prefixes : float or None
        For causal programs, the power of i/N that multiplies the penalty rows for the first i of N examples. The limits
        then hold for all of these prefixes. None for other programs.

    Examples
    --------
    >>> import attnc
    >>> domain = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_.domain
    >>> domain.prompt.rows, domain.has_penalty_rows  # two examples and one row with the penalty
    (3, True)
    >>> domain.violations(domain.prompt.tokens([[9.0], [0.0]], [0.0, 1.0]))[0]
    'the 2-norm of an example is 9, above 1'
    """

    prompt: Prompt
    x: float = math.inf
    y: float = math.inf
    target: float = math.inf
    start: float = math.inf
    query: float = math.inf
    L: float = math.inf
    mu: float = 0.0
    curvature: float = 1.0
    penalty: tuple[float, ...] = ()
    mean: bool = False
    has_penalty_rows: bool = False
    turns: Turns | None = None
    gradient: float = math.inf
    prefixes: float | None = None

    def violations(self, tokens: Any, start: Any = None) -> tuple[str, ...]:
        """Return a sentence for every limit that a prompt, or the first weights, exceed.

        Parameters
        ----------
        tokens : array of shape (rows, features + 2)
            The prompt.
        start : array of shape (weights,), optional
            The first weights.

        Returns
        -------
        tuple of str
            Empty if the prompt is in the domain.

        Raises
        ------
        InputError
            If the prompt has another shape, or a number that is not finite.

        Examples
        --------
        >>> import attnc
        >>> domain = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_.domain
        >>> domain.violations(domain.prompt.tokens([[9.0], [0.0]], [0.0, 1.0]))[0]
        'the 2-norm of an example is 9, above 1'
        """
        tokens = self._tokens(tokens)
        given, asked = tokens[: self.prompt.rows], tokens[self.prompt.rows :]
        d = self.prompt.features
        is_present = given[:, d] != 0
        if self.has_penalty_rows:
            is_present = given.any(axis=1)
        X, y = given[is_present, : self.prompt.num_weights], given[is_present, -self.prompt.targets :]
        found = []
        if not np.isin(given[:, d], (0.0, 1.0)).all():
            found.append("the flag m of a row is neither 1, for an example, nor 0, for padding")
        if given[~is_present].any():
            found.append("a row with flag 0 is not empty: it would count as an example")
        if self.prompt.weighted and (given[:, d + 1] > 0).any():
            found.append("the weight of an example is above 1: divide all weights by the largest")
        if asked[:, d:].any():
            found.append("a query has a flag or a target")
        norms = {
            "the 2-norm of an example": (_longest(X), self.x),
            "the 2-norm of the targets": (float(np.linalg.norm(y, axis=0).max(initial=0)), self.y),
            "the largest absolute target": (float(np.abs(y).max(initial=0)), self.target),
            "the 2-norm of the first weights": (float(np.linalg.norm(start)) if start is not None else 0.0, self.start),
            "the 2-norm of a query": (_longest(asked[:, :d]), self.query),
        }
        found += [
            f"{name} is {size:.6g}, above {most:.6g}"
            for name, (size, most) in norms.items()
            if size > most * LIMIT_SLACK
        ]
        is_checked = math.isfinite(self.L) or self.turns is not None
        for name, each in self._fits(given) if is_checked and is_present.any() else ():
            off = self._of_eigenvalues(each) if math.isfinite(self.L) and len(each.X) else []
            if self.turns is not None and not found and not off and not self.turns.converges(each, self.gradient):
                off = [f"{self.turns.turns} exact turns of Newton's method do not converge on it"]
            found += [f"{name}{one}" for one in off]
            if off:
                break
        return tuple(found)

    def _fits(self, given: Float[np.ndarray, "rows width"]) -> Iterator[tuple[str, Examples]]:
        """Return the examples of every fit that the program makes, with the beginning of a sentence about it."""
        if self.prefixes is None:
            yield "", self.examples(given)
            return
        is_example = given[:, self.prompt.features] != 0
        numbers = np.cumsum(is_example)
        for count in range(1, int(numbers[-1]) + 1):
            share = count / (self.prompt.rows - self.prompt.num_weights * self.has_penalty_rows)
            rows = np.where(is_example[:, None], given, given * share**self.prefixes)
            yield f"with the first {count} examples, ", self.examples(rows[~is_example | (numbers <= count)])

    def examples(self, rows: Float[np.ndarray, "rows width"]) -> Examples:
        """Return the examples in the rows of a prompt, without padding and queries.

        Parameters
        ----------
        rows : array of shape (rows, width)
            The rows of the prompt.

        Returns
        -------
        Examples
            Inputs, targets, weights and penalties.

        Examples
        --------
        >>> from attnc.incontext import Domain, Prompt
        >>> domain = Domain(Prompt(rows=3, features=1))
        >>> given = domain.examples(domain.prompt.tokens([[2.0], [5.0]], [1.0, -1.0]))
        >>> given.X.tolist(), given.y.tolist()
        ([[2.0], [5.0]], [1.0, -1.0])
        """
        d, weights = self.prompt.features, self.prompt.num_weights
        is_example = rows[:, d] != 0
        penalty = np.array(self.penalty or np.zeros(weights))
        if self.has_penalty_rows:
            penalty = penalty + (rows[~is_example, :weights] ** 2).sum(axis=0)
        given = rows[is_example]
        omega = np.exp(given[:, d + 1]) if self.prompt.weighted else np.ones(len(given))
        y = given[:, -1] if self.prompt.targets == 1 else given[:, -self.prompt.targets :]
        return Examples(given[:, :weights], y, omega, penalty)

    def _of_eigenvalues(self, given: Examples) -> list[str]:
        total = float(given.omega.sum()) if self.mean else 1.0
        gram = self.curvature * (given.X.T * given.omega) @ given.X / total + np.diag(given.penalty)
        values = np.linalg.eigvalsh(gram)
        nonzero = values[values > SMALLEST * len(values) * max(float(values[-1]), self.L)]
        found = []
        if values[-1] > self.L * LIMIT_SLACK:
            found.append(f"the largest eigenvalue of the Hessian is {values[-1]:.6g}, above L = {self.L:.6g}")
        if len(nonzero) and nonzero[0] * LIMIT_SLACK < self.mu:
            found.append(f"the smallest eigenvalue of the Hessian is {nonzero[0]:.6g}, below mu = {self.mu:.6g}")
        return found

    def _tokens(self, tokens: Any) -> Float[np.ndarray, "rows width"]:
        shape = self.prompt.shape
        try:
            given = np.asarray(tokens, np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"a prompt is an array of numbers: {error}") from None
        if given.shape != shape:
            raise InputError(
                f"the program takes a prompt of shape {shape}, found {given.shape}. "
                "`program.domain.prompt.tokens(X, y)` makes one, padded with empty rows."
            )
        if not np.isfinite(given).all():
            raise InputError("the prompt has a value that is NaN or infinite; leave such rows out")
        return given

    def as_json(self) -> dict[str, Any]:
        """Return the limits as plain JSON values.

        Returns
        -------
        dict
            Every field by its name. Limits that are infinite are None, which JSON writes as null. Sizes of prompts
            without weights, queries or several targets are left out.

        Examples
        --------
        >>> from attnc.incontext import Domain, Prompt
        >>> Domain(Prompt(rows=3, features=1), x=2.0).as_json()["x"]
        2.0
        """
        fields = dataclasses.asdict(self) | {"penalty": list(self.penalty)}
        left_out = {key for key in OPTIONAL_LIMITS if fields[key] in (None, math.inf)}
        fields["prompt"] = {key: size for key, size in fields["prompt"].items() if size != OPTIONAL_SIZES.get(key)}
        if self.turns is not None:
            fields["turns"] = {key: value for key, value in fields["turns"].items() if value != math.inf}
        return {key: None if value == math.inf else value for key, value in fields.items() if key not in left_out}

    @classmethod
    def from_json(cls, fields: Any) -> Domain:
        """Return the domain that a file describes.

        Parameters
        ----------
        fields : dict
            The values that `as_json` returns.

        Returns
        -------
        Domain

        Raises
        ------
        FileError
            If a field is missing, unknown or of another type.

        Examples
        --------
        >>> from attnc.incontext import Domain, Prompt
        >>> domain = Domain(Prompt(rows=3, features=1), x=2.0)
        >>> Domain.from_json(domain.as_json()) == domain
        True
        """
        try:
            prompt = Prompt(**fields["prompt"])
            sizes = (prompt.rows, prompt.features, prompt.targets, prompt.queries)
            if not all(type(size) is int and size >= 0 for size in sizes):
                raise TypeError("sizes are whole numbers")
            given = dict.fromkeys(OPTIONAL_LIMITS) | fields
            turns = None if given["turns"] is None else Turns(**given["turns"])
            limits = {key: math.inf if given[key] is None else float(given[key]) for key in _LIMITS}
            prefixes = None if given["prefixes"] is None else float(given["prefixes"])
            penalty = tuple(float(number) for number in fields["penalty"])
            found = cls(
                prompt,
                **limits,
                penalty=penalty,
                mean=bool(fields["mean"]),
                has_penalty_rows=bool(fields["has_penalty_rows"]),
                turns=turns,
                prefixes=prefixes,
            )
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise FileError(f"the domain of the program cannot be read: {error}") from None
        names = {field.name for field in dataclasses.fields(cls)}
        if set(fields) | set(OPTIONAL_LIMITS) != names or len(penalty) not in (0, prompt.num_weights):
            raise FileError("the domain of the program has unknown keys, or penalties of another number of weights")
        return found


def _longest(rows: Float[np.ndarray, "rows columns"]) -> float:
    """Return the largest 2-norm of a row."""
    return float(np.sqrt((rows**2).sum(axis=1)).max(initial=0))


_LIMITS = ("x", "y", "target", "start", "query", "L", "mu", "curvature", "gradient")
