"""A target: the function to compile, its box, and the questions that constructions and proofs ask about it."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.program import split_columns
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box

if TYPE_CHECKING:
    from attnc.targets.expressions.expression import Expression
    from attnc.targets.function_target import FunctionTarget

    Points = Float[np.ndarray, "batch d"]
    Values = Float[np.ndarray, "batch outputs"]


class Target(abc.ABC):
    """A function of a flat vector of d variables on a box, and the shapes of its inputs and outputs.

    `attnc.as_target` makes one from an expression, a callable or a torch.nn.Sequential. Subclasses take their own
    parameters. A target of another kind is a subclass that defines `__call__`, `variation` and `describe`.

    Attributes
    ----------
    box : Box
        The domain.
    input_shapes, output_shape : tuple
        The shapes of the inputs and the output of a network for the target, without the batch.
    num_outputs : int
        The number of outputs of one input, over all positions.
    assumptions : tuple of str
        The facts that every certificate about the target takes on trust.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> target = attnc.as_target("x * y", {"x": (0, 1), "y": (0, 2)})
    >>> isinstance(target, attnc.Target), target.box.names, target(np.array([[0.5, 2.0]])).tolist()
    (True, ('x', 'y'), [[1.0]])
    """

    box: Box
    expression: Expression | None = None
    text: str | None = None  # the text of the expression, if there is one
    definitions: str | None = None  # a list of definitions in place of the text, if the function needs them
    kind: str = "function"  # or the name of the class that some constructions are made for
    is_continuous: bool = True
    assumptions: tuple[str, ...] = ()
    given: str | None = None  # the constants that proofs take on trust, in a few words
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        """The number of outputs of one input, over all positions.

        Examples
        --------
        >>> import attnc
        >>> attnc.as_target("x + y, x - y", {"x": (0, 1), "y": (0, 1)}).num_outputs
        2
        """
        return math.prod(self.output_shape)

    @property
    def is_known_on_cells(self) -> bool:
        """Whether the target can be enclosed over cells, by its own form or by a given constant.

        Examples
        --------
        >>> import attnc
        >>> attnc.as_target("x**2", {"x": (0, 1)}).is_known_on_cells
        True
        >>> attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0]).is_known_on_cells  # nothing is known between its points
        False
        """
        return True

    @property
    def interpolated(self) -> FunctionTarget | None:
        """The target itself if only its values and given constants are known; None otherwise.

        Examples
        --------
        >>> import attnc
        >>> print(attnc.as_target("x**2", {"x": (0, 1)}).interpolated)
        None
        >>> target = attnc.as_target(lambda points: points[:, 0] ** 2, [(0, 1)], lipschitz=2.0)
        >>> target.interpolated is target
        True
        """
        return None

    def split(self, points: Points) -> list[np.ndarray]:
        """Return flat points as the inputs that a network for this target takes.

        Parameters
        ----------
        points : array of shape (batch, d)
            The points.

        Returns
        -------
        list of arrays
            One array for each input of the network.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> target = attnc.SequenceTarget(lambda X: X, tokens=2, width=1, box=(-1, 1), lipschitz=1.0)
        >>> [part.shape for part in target.split(np.zeros((5, 2)))]  # five points, each with two tokens
        [(5, 2, 1)]
        """
        return split_columns(points, self.input_shapes)

    @property
    def num_check_points(self) -> int | None:
        """The number of points that the claim is about, if it is finite, as for a table; None for the whole box.

        Examples
        --------
        >>> import attnc
        >>> print(attnc.as_target("x**2", {"x": (0, 1)}).num_check_points)
        None
        >>> attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0]).num_check_points
        2
        """
        return None

    def check_blocks(self) -> Iterator[tuple[Points, Values]]:
        """Yield the points that the claim is about, with their values, block by block. There are none for a box.

        Yields
        ------
        tuple of two arrays
            Points (batch, d) and values (batch, outputs).

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> [(points.tolist(), values.tolist()) for points, values in table.check_blocks()]
        [([[0.0], [1.0]], [[2.0], [3.0]])]
        >>> list(attnc.as_target("x**2", {"x": (0, 1)}).check_blocks())
        []
        """
        yield from ()

    def largest_value(self, points: Points) -> float:
        """Return the largest |value| at the points, or at all those that the claim is about.

        Parameters
        ----------
        points : array of shape (batch, d)
            The points.

        Returns
        -------
        float
            The largest absolute value over all outputs.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> target = attnc.as_target("x**2", {"x": (-1, 1)})
        >>> target.largest_value(np.array([[0.5], [-1.0]]))
        1.0
        """
        return float(np.abs(self(points)).max(initial=0.0))

    def critical_points(self) -> Float[np.ndarray, "points d"]:
        """Return points of the box, such as kinks, where an error may be larger than at all points nearby.

        Returns
        -------
        array of shape (points, d)
            The points; there may be none.

        Examples
        --------
        >>> import attnc
        >>> found = attnc.as_target("abs(x)", {"x": (-1, 1)}).critical_points()
        >>> bool((found == 0.0).any())
        True
        """
        return np.zeros((0, self.box.d))

    @abc.abstractmethod
    def __call__(self, points: Points) -> Values:
        """Return the values, all finite, in floating point."""

    @abc.abstractmethod
    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        """Return, for every cell, an upper bound of |f(x) − value| over x in the cell, in the max-norm of the output.

        The values are those given, or self(centres). The centres lie in their cells.

        Parameters
        ----------
        cells : Interval
            Boxes, as arrays of shape (cells, d).
        centres : array of shape (cells, d)
            A point of each cell.
        values : array of shape (cells, outputs), optional
            The values to compare with; by default those at the centres.

        Returns
        -------
        array of shape (cells,)
            Upper bounds.

        Raises
        ------
        InputError
            If nothing is known between points, as for a table.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> from attnc.numerics.intervals import Interval
        >>> target = attnc.as_target("x**2", {"x": (-1, 1)})
        >>> cells = Interval(np.array([[0.0]]), np.array([[1.0]]))
        >>> bool(target.variation(cells, np.array([[0.0]]))[0] >= 1.0)
        True
        """

    def enclosure(self, cells: Interval) -> Interval:
        """Return, for every cell and output, an interval that contains all values on the cell.

        Parameters
        ----------
        cells : Interval
            Boxes, as arrays of shape (cells, d).

        Returns
        -------
        Interval
            Arrays of shape (cells, outputs).

        Raises
        ------
        InputError
            If constants that were given contradict the values of the function.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> from attnc.numerics.intervals import Interval
        >>> target = attnc.as_target("x**2", {"x": (-1, 1)})
        >>> cells = Interval(np.array([[0.0]]), np.array([[1.0]]))
        >>> found = target.enclosure(cells)
        >>> bool(found.lo[0, 0] <= 0.0), bool(found.hi[0, 0] >= 1.0)
        (True, True)
        """
        centres = cells.mid
        values, reach = self(centres), self.variation(cells, centres)[:, None]
        return Interval(-up(reach - values), up(values + reach))

    def distance(self, points: Points, values: Values) -> Float[np.ndarray, " batch"]:
        """Return |self(point) − value| in the max-norm, rounded up.

        Parameters
        ----------
        points : array of shape (batch, d)
            The points.
        values : array of shape (batch, outputs)
            A value to compare with at each point.

        Returns
        -------
        array of shape (batch,)
            The largest distance over the outputs.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> target = attnc.as_target("x**2", {"x": (-1, 1)})
        >>> target.distance(np.array([[0.5]]), np.array([[0.5]])).tolist()
        [0.25000000000000006]
        """
        return up(np.abs(self(points) - values).max(axis=1))

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a short name for people.

        Returns
        -------
        str
            A few words, such as the expression.

        Examples
        --------
        >>> import attnc
        >>> target = attnc.as_target("x**2", {"x": (-1, 1)})
        >>> target.describe()
        'x**2'
        """


def show_point(names: tuple[str, ...], point: np.ndarray) -> str:
    """Return the text of a point, such as "x = 1, y = 2"."""
    return ", ".join(f"{name} = {value:.6g}" for name, value in zip(names, point, strict=True))
