"""A proof: a bound, its terms, and the evidence from which it can be proved again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnc.numerics.arrays import Bool, Float
from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import Covering, Leaf
from attnc.proofs.cells.dyadic import GradedBox, Knots

if TYPE_CHECKING:
    from attnc.targets.expressions.expression import Expression

REASONS = {
    "jump": "cells beside a jump of f, or where f is infinitely steep: about the height of the jump, on a small volume",
    "tail": "beyond the core of an infinite box, by the limits of the weights",
    "approximation": "the difference of the Taylor polynomials of f and of the network on the worst cell",
    "remainder": "the remainders of these polynomials, and the rounding of the proof itself",
    "selection": "f against the values of the keys that can win on the worst cell, and the leak of the others",
    "enclosure": "f against all values that the stages can have on the worst cell, rounding included",
    "rounding": "of the engine on the worst cell: scores, exponentials, sums",
}
"""The reasons of terms in the ledger. The reason of any other term is the name of its kind."""


@dataclass(frozen=True)
class Beyond:
    """Beyond the core of an infinite box rounding adds at most relative·|x| to the bound, up to |x| = reach.

    Attributes
    ----------
    relative : float
        The rounding of any engine, per unit of |x|.
    reach : float
        The |x| up to which no number of an engine overflows.

    Examples
    --------
    >>> import attnc, math
    >>> claim = attnc.compile("relu(x)", {"x": (-math.inf, math.inf)}, eps=1e-3).certificate
    >>> claim.beyond.relative < 1e-14, claim.beyond.reach > 1e200
    (True, True)
    """

    relative: float
    reach: float


@dataclass(frozen=True, eq=False)
class Leaves:
    """Cells that cover a box, each with a bound of its own.

    An infinite box of one variable has a finite `core`, which the leaves cover, and the tails beyond it in `tails`.
    Enclosure leaves are cut further at the points `cuts`, one list for each variable, and leave out rows of keys whose
    scores are behind by `gap`. With `knots`, sides of the box are cut at these points first. A file may leave out the
    bounds.

    Attributes
    ----------
    leaves : sequence of Leaf
        The cells.
    bounds : ndarray
        The largest error on each cell.
    core : tuple of float or None
        The ends of the core of an infinite box.
    tails : tuple of int
        The sides of the tails, −1 for x → −∞ and 1 for x → ∞.
    cuts : tuple of tuples of float
        The points of further cuts, per variable.
    beyond : Beyond or None
        The rounding beyond the core; None if the tails are about exact arithmetic.
    gap : float or None
        The gap behind the best score from which enclosure leaves leave out rows of keys.
    knots : tuple of tuples of float
        Per variable, the points at which its side is cut into 2^k parts at level k. Without any, all parts are equal.
    middles : tuple of float
        For leaves of a head, the middle m of its error: head − g is in [m − r, m + r] with r = bound − |m|. Empty if
        all are 0.

    Examples
    --------
    >>> import attnc
    >>> claim = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3).certificate
    >>> isinstance(claim.by_leaves, attnc.Leaves), len(claim.by_leaves.leaves) == claim.num_leaves
    (True, True)
    """

    leaves: Sequence[Leaf]
    bounds: Float[np.ndarray, " leaves"]
    core: tuple[float, float] | None = None
    tails: tuple[int, ...] = ()
    cuts: tuple[tuple[float, ...], ...] = ()
    beyond: Beyond | None = None
    gap: float | None = None
    knots: Knots = ()
    middles: tuple[float, ...] = ()

    def __eq__(self, other: object) -> bool:
        names = ("leaves", "core", "tails", "cuts", "beyond", "gap", "knots", "middles")
        return (
            isinstance(other, Leaves)
            and all(getattr(self, name) == getattr(other, name) for name in names)
            and np.array_equal(self.bounds, other.bounds)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class HeadProof:
    """One channel that attention writes is within `bound` of carrier·function(t), in units of the largest carrier.

    t is the affine combination `argument` of the variables and of earlier heads, written with their names. Heads that
    are the same function of t share the leaves of the first one. The others state its name in `like`, and no leaves.
    """

    stage: str  # the attention layer
    channel: str
    name: str  # the name of this head in the texts of later ones
    function: str  # a function of t
    argument: str
    argument_as: str | None = None  # the argument as an expression of the variables, if its range is then narrower
    carrier: str | None = None
    carrier_as: str | None = None
    carrier_size: float | None = None
    term: str  # the term of the ledger to which its error belongs
    interval: tuple[float, float]  # the interval of t
    held: tuple[float, float] | None = None  # the function is constant beyond these ends
    bound: float
    leaves: Leaves | None = None
    like: str | None = None
    noise: float = 0.0  # a further error of the channel, from the machine that computes the program


@dataclass(frozen=True)
class Stages:
    """A proof head by head. `outputs` are combinations of the heads, written with their names.

    Attributes
    ----------
    heads : tuple of HeadProof
        The heads, each with its own bound.
    outputs : tuple of str
        The outputs as expressions in the names of the heads.
    axes : tuple of int
        The axes along which the box is halved in turn, to add up the errors of the heads.

    Examples
    --------
    >>> import attnc
    >>> claim = attnc.compile("x*y*z", dict.fromkeys("xyz", (-1, 1)), eps=0.1, construction="compose").certificate
    >>> isinstance(claim.by_heads, attnc.Stages), len(claim.by_heads.heads) == claim.num_heads
    (True, True)
    """

    heads: tuple[HeadProof, ...]
    outputs: tuple[str, ...]
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Points:
    """A proof at the finitely many points of a table. `table` holds the points with their values if they are few.

    Attributes
    ----------
    count : int
        Number of points.
    table : tuple of tuples of float
        The points, each with its values, or nothing if they are many.
    sha256, columns : str, int
        If they are many: the hash of all rows as a file has them, and the number of columns.
    content : callable or None
        Returns all rows as a file has them, or None if they are too many to be stored. Only the network that was
        compiled has it.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile(attnc.TableTarget([[0.0], [0.5], [1.0]], [1.0, 0.0, 2.0]), eps=1e-6)
    >>> net.certificate.at_points.count
    3
    """

    count: int
    table: tuple[tuple[float, ...], ...] = ()
    sha256: str | None = None
    columns: int = 0
    content: Callable[[], bytes | None] | None = field(default=None, compare=False, repr=False)


Evidence = Leaves | Stages | Points


@dataclass(frozen=True, eq=False)
class Proof:
    """‖f − network‖ ≤ bound, rounding included. The terms add up to the bound.

    `complete` is False if time or cells ran out before the bound was as small as requested. The bound holds anyway.
    """

    bound: float
    terms: tuple[Term, ...]
    evidence: Evidence
    complete: bool = True


@dataclass(frozen=True)
class Excluded:
    """The points with lo ≤ argument ≤ hi are not covered by a bound of gradients, because f has a kink there.

    Attributes
    ----------
    argument : str
        A variable, or an expression of the variables, such as "x - y".
    lo, hi : float
        The ends of the neighbourhood of the kink, in units of the argument.

    Examples
    --------
    >>> import attnc
    >>> claim = attnc.compile("relu(x)", {"x": (-1, 1)}, 1e-3, norm="C1", gradient_eps=1e-3).certificate
    >>> [(band.argument, band.lo < 0 < band.hi) for band in claim.excluded]
    [('x', True)]
    >>> claim.excluded[0].contains([[0.0], [0.5]], ["x"]).tolist()
    [True, False]
    """

    argument: str
    lo: float
    hi: float

    def expression(self, variables: Sequence[str]) -> Expression:
        """Return the argument as a function of these variables.

        Parameters
        ----------
        variables : sequence of str
            The names of all variables, in order.

        Returns
        -------
        Expression
            A function of points, with a column per variable.

        Examples
        --------
        >>> import attnc
        >>> strip = attnc.Excluded("x - y", lo=-0.1, hi=0.1)
        >>> strip.expression(["x", "y"])([[3.0, 1.0]]).tolist()
        [[2.0]]
        """
        from attnc.targets.expressions.expression import Expression  # it imports scipy

        return Expression.parse(self.argument).with_variables(variables)

    def contains(self, points: npt.ArrayLike, variables: Sequence[str]) -> Bool[np.ndarray, " points"]:
        """Return whether each of these points lies in the neighbourhood.

        Parameters
        ----------
        points : array_like (batch, d)
            Points, with a column per variable.
        variables : sequence of str
            The names of all variables, in the order of the columns.

        Returns
        -------
        ndarray of bool (batch,)
            True where lo ≤ argument ≤ hi.

        Examples
        --------
        >>> import attnc
        >>> strip = attnc.Excluded("x - y", lo=-0.1, hi=0.1)
        >>> strip.contains([[3.0, 1.0], [1.0, 1.05]], ["x", "y"]).tolist()
        [False, True]
        """
        t = self.expression(variables)(points)[:, 0]
        return np.asarray((t >= self.lo) & (t <= self.hi))


@dataclass(frozen=True)
class SlopeProof:
    """The computed slopes of the head `name` along its argument are within `bound` of g′, in units of the carrier."""

    name: str
    bound: float
    leaves: Leaves


@dataclass(frozen=True)
class GradientProof:
    """|∂network/∂x_i − ∂f/∂x_i| ≤ bound for every variable and output, rounding included, away from kinks.

    Attributes
    ----------
    eps : float
        The largest error of gradients that was asked for.
    bound : float
        The bound that was proved.
    observed : float
        The largest error of gradients seen at samples. It proves nothing.
    terms : tuple of Term
        The parts of the bound.
    complete : bool
        False where time ran out before the bound was as small as it can be.
    excluded : tuple of Excluded
        The neighbourhoods of kinks, where nothing is claimed. In several variables they are strips about the kinks.
    leaves : Leaves
        The cells that cover the box. Those of the kind "excluded" lie in these neighbourhoods. None if the network has
        several attention layers.
    heads : tuple of SlopeProof
        The slopes of every head, if the network has several attention layers.
    axes : tuple of int
        The axes along which the box is then halved in turn, to add up the errors of the heads.

    Examples
    --------
    >>> import attnc
    >>> claim = attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-4, norm="C1", gradient_eps=1e-2).certificate
    >>> claim.gradient.observed <= claim.gradient.bound <= claim.gradient.eps
    True
    """

    eps: float
    bound: float
    observed: float
    terms: tuple[Term, ...]
    complete: bool
    excluded: tuple[Excluded, ...]
    leaves: Leaves
    heads: tuple[SlopeProof, ...] = ()
    axes: tuple[int, ...] = ()


def proof_by_leaves(
    covering: Covering,
    *,
    ledger: Mapping[str, float] | None = None,
    tails: Mapping[int, float] | None = None,
    beyond: Beyond | None = None,
    cuts: Sequence[np.ndarray] = (),
    gap: float | None = None,
) -> Proof:
    """Return the proof by the cells of a covering, with the bounds of tails beyond its box, by side.

    The ledger is that of the covering unless another one is given.
    """
    tails = tails or {}
    where = "on the worst cell" if covering.norm is None else "on all cells, as the norm weighs them"
    terms = tuple(
        Term(name, value, REASONS.get(name, f"{name} leaves, on the worst cell").replace("on the worst cell", where))
        for name, value in (covering.ledger if ledger is None else ledger).items()
    )
    bound, largest = covering.bound, max(tails.values(), default=0.0)
    if largest > bound:
        bound, terms = largest, (Term("tail", largest, REASONS["tail"]),)
    box = covering.box
    evidence = Leaves(
        covering.leaves,
        covering.cells.upper.max(axis=1),
        (float(box.lo[0]), float(box.hi[0])) if tails else None,
        tuple(tails),
        tuple(tuple(points.tolist()) for points in cuts),
        beyond,
        gap,
        box.knots if isinstance(box, GradedBox) else (),
    )
    return Proof(bound, terms, evidence, covering.complete)
