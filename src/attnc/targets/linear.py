"""Targets given by matrices: truncated linear functions, and networks of ReLUs."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box, BoxLike
from attnc.targets.expressions.parsing import MAX_LENGTH
from attnc.targets.target import Target

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values

U = UNIT_ROUNDOFF["float64"]
MAX_HALVINGS = 500
"""Largest exponent of one power of two in a text. The parser refuses exponents above 1000. The 1,074 halvings of the
smallest float64 number take three factors."""
MAX_STATED, MAX_DEFINITION = 2**14, 50_000
"""Maximum number of weights that are written as text, and maximum number of characters of one definition. A weight
takes about 25 characters. So a text of 2¹⁴ weights has 400 kB, and a definition has at most about 2,000 weights."""


class WeightedTarget(Target):
    """A target whose error bounds follow from the absolute values of its weights."""

    @abc.abstractmethod
    def _through(self, reach: Points, size: Points) -> tuple[Values, Values, int]:
        """Return the largest changes of the outputs for inputs that move by up to `reach`, rounded up.

        Also return, for inputs of this size, the sums of the absolute values of all terms of an output, and the number
        of these terms.
        """

    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        # A bound of the change from the centre, and γ times the sum of absolute values for the rounding there.
        reach = up(np.maximum(cells.hi - centres, centres - cells.lo))
        moved, size, count = self._through(reach, np.abs(centres))
        found = np.asarray(up(moved + up(gamma(count, U) * size)).max(axis=1))
        return found if values is None else up(found + self.distance(centres, values))


class TruncatedLinear(WeightedTarget):
    """clip(w_i·x_i + t_i, a, b) for tokens i < n: n of the papers' generalised ReLUs at once.

    Parameters
    ----------
    W : array (n, d) or (d,)
        The weights for n tokens of width d, or for one function of d variables.
    t : float or array (n,)
        The offsets.
    a, b : float
        The ends of the range, a < b.
    box : box, or pair of float
        The box of every token: one interval per feature, or one for all features.

    Raises
    ------
    InputError
        If the shapes do not fit, or a < b does not hold.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> clip = attnc.TruncatedLinear([2.0], t=-0.5, a=0.0, b=1.0, box=(-1, 1))
    >>> clip(np.array([[0.5], [1.0]])).tolist()
    [[0.5], [1.0]]
    >>> attnc.compile(clip, eps=1e-3).certificate.bound <= 1e-3
    True
    """

    kind = "TruncatedLinear"

    def __init__(
        self, W: Any, t: Any = 0.0, a: float = 0.0, b: float = 1.0, box: BoxLike | tuple[float, float] = (-1.0, 1.0)
    ) -> None:
        self.W, self.is_single = _matrix("W", W)
        n, d = self.W.shape
        if np.size(t) not in (1, n):
            raise InputError(f"t has {np.size(t)} entries, {n} are needed")
        self.t = np.broadcast_to(_array("t", t), (n,))
        self.a, self.b = float(a), float(b)
        if not (math.isfinite(self.a) and math.isfinite(self.b) and self.a < self.b):
            raise InputError(f"truncation needs finite a < b, found a={a}, b={b}")
        feature = feature_box(box, d)
        self.input_shapes = ((d,),) if self.is_single else ((n, d),)
        self.output_shape = () if self.is_single else (n,)
        names = feature.names if self.is_single else [f"x{i}_{c}" for i in range(n) for c in range(d)]
        self.box = Box(tuple(names), np.tile(feature.lo, n), np.tile(feature.hi, n))

    @cached_property
    def text(self) -> str | None:  # type: ignore[override]
        """The text clip(w·x + t, a, b), …, with exact numbers; None if it is long.

        Examples
        --------
        >>> import attnc
        >>> attnc.TruncatedLinear([2.0], 1.0, box={"x": (-1, 1)}).text
        'clip(2*x + 1, 0, 1)'
        """
        text = self._clips(self._rows)
        return text if 0 < len(text) <= MAX_LENGTH else None

    @cached_property
    def definitions(self) -> str | None:  # type: ignore[override]
        """The text z0 = w·x + t; …; clip(z0, a, b), … if the expression is long; None if a row is too long.

        Examples
        --------
        >>> import attnc
        >>> print(attnc.TruncatedLinear([2.0], 1.0, box={"x": (-1, 1)}).definitions)  # its text is short
        None
        """
        if self.text is not None or not 0 < max(map(len, self._rows), default=0) <= MAX_DEFINITION:
            return None
        z = free_letter("z", self.box.names)
        defined = [f"{z}{i} = {row}" for i, row in enumerate(self._rows)]
        return "; ".join([*defined, self._clips([f"{z}{i}" for i in range(len(defined))])])

    @cached_property
    def _rows(self) -> list[str]:
        """The texts w_i·x_i + t_i for every token; none if there are too many numbers."""
        if self.W.size > MAX_STATED:
            return []
        names = np.reshape(self.box.names, self.W.shape).tolist()
        return [affine_text(w, x, float(t), with_zeros=True) for w, x, t in zip(self.W, names, self.t, strict=True)]

    def _clips(self, texts: Iterable[str]) -> str:
        ends = f"{exact_text(self.a)}, {exact_text(self.b)}"
        return ", ".join(f"clip({text}, {ends})" for text in texts)

    def linear(self, points: Points) -> Values:
        """Return w_i·x_i + t_i, not truncated.

        Parameters
        ----------
        points : array of shape (batch, n·d)
            The points; n tokens of width d.

        Returns
        -------
        array of shape (batch, n)
            The linear functions.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> target = attnc.TruncatedLinear([2.0], 1.0, a=0.0, b=1.0, box=(-1, 1))
        >>> target.linear(np.array([[0.5]])).tolist()
        [[2.0]]
        """
        n, d = self.W.shape
        return np.asarray(np.einsum("bnd,nd->bn", points.reshape(len(points), n, d), self.W) + self.t)

    def __call__(self, points: Points) -> Values:
        return np.clip(self.linear(points), self.a, self.b)

    def _through(self, reach: Points, size: Points) -> tuple[Values, Values, int]:
        """Use that clipping does not increase distances. The sum at the centre has d + 1 roundings."""
        n, d = self.W.shape
        moved = up((reach.reshape(-1, n, d) * np.abs(self.W)).sum(axis=2), d + 1)
        return moved, up((size.reshape(-1, n, d) * np.abs(self.W)).sum(axis=2) + np.abs(self.t), d + 2), d + 2

    def describe(self) -> str:
        n, d = self.W.shape
        return f"clip(w·x + t, {self.a:g}, {self.b:g}) with {n} row(s) of {d} weights"


class ReLUNetwork(WeightedTarget):
    """x ↦ W_L·relu(… relu(W_1·x + b_1) …) + b_L.

    Parameters
    ----------
    weights : sequence of array
        The matrices; weights[l] is (out, in), as in torch.nn.Linear.
    biases : sequence of array
        The biases, one vector per matrix.
    box : box, or pair of float
        The box of the input: one interval per feature, or one for all features.

    Raises
    ------
    InputError
        If the shapes do not fit each other.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> relu = attnc.ReLUNetwork([[[1.0], [-1.0]], [[1.0, 1.0]]], [[0.0, 0.0], [0.0]], box=(-1, 1))
    >>> relu(np.array([[-0.5]])).tolist()
    [[0.5]]
    >>> attnc.compile(relu, eps=0.01).certificate.bound <= 0.01
    True
    """

    kind = "ReLUNetwork"

    def __init__(self, weights: Sequence[Any], biases: Sequence[Any], box: Box | BoxLike | tuple[float, float]) -> None:
        if not weights or len(weights) != len(biases):
            raise InputError(f"a ReLU network needs as many biases as weights, found {len(weights)} and {len(biases)}")
        self.weights = [_matrix(f"weights[{i}]", W)[0] for i, W in enumerate(weights)]
        self.biases = [_array(f"biases[{i}]", b).ravel() for i, b in enumerate(biases)]
        width = self.weights[0].shape[1]
        for i, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            if W.shape[1] != width or len(b) != len(W):
                raise InputError(
                    f"layer {i} of the ReLU network: weights {W.shape} and {len(b)} biases do not fit {width} inputs"
                )
            width = len(W)
        self.box = feature_box(box, self.weights[0].shape[1])
        self.input_shapes = ((self.box.d,),)
        self.output_shape = (width,)

    @classmethod
    def of_torch(cls, module: Any, box: BoxLike | tuple[float, float]) -> ReLUNetwork:
        """Read a torch.nn.Sequential of Linear and ReLU in turn, in evaluation mode.

        Parameters
        ----------
        module : torch.nn.Sequential
            Linear, ReLU, …, Linear. Dropout and Identity are left out.
        box : mapping, sequence or pair
            The range of every input, or one range for all of them.

        Returns
        -------
        ReLUNetwork

        Raises
        ------
        InputError
            If the module has other parts.

        Examples
        --------
        >>> import attnc, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> attnc.ReLUNetwork.of_torch(module, box=(-1, 1)).describe()
        'ReLU network 2→3→1'
        """
        parts = [part for part in module if type(part).__name__ not in ("Dropout", "Identity")]
        names = [type(part).__name__ for part in parts]
        if not names or names != [("Linear", "ReLU")[i % 2] for i in range(len(names))] or names[-1] != "Linear":
            raise InputError(
                f"a torch.nn.Sequential is compiled if it is Linear, ReLU, …, Linear; found {', '.join(names)}. "
                "attnc.mlp_network takes other activations."
            )
        given = [(part.weight, 0 * part.weight[:, 0] if part.bias is None else part.bias) for part in parts[::2]]
        arrays = [[array.detach().cpu().double().numpy() for array in pair] for pair in given]
        return cls([W for W, _ in arrays], [b for _, b in arrays], box)

    def __call__(self, points: Points) -> Values:
        state = points
        for W, b in zip(self.weights[:-1], self.biases[:-1], strict=True):
            state = np.maximum(state @ W.T + b, 0.0)
        return np.asarray(state @ self.weights[-1].T + self.biases[-1])

    def ranges(self) -> list[Interval]:
        """For every layer, an enclosure of its pre-activations on the box (interval propagation).

        Returns
        -------
        list of Interval
            One for each layer; arrays of shape (units,).

        Examples
        --------
        >>> import attnc
        >>> network = attnc.ReLUNetwork([[[1.0]], [[2.0]]], [[0.5], [0.0]], box=(-1, 1))
        >>> [bool(found.lo[0] <= 0.0 and found.hi[0] >= 1.5) for found in network.ranges()]
        [True, True]
        """
        found, state = [], Interval(self.box.lo, self.box.hi)
        for W, b in zip(self.weights, self.biases, strict=True):
            pre = affine_range(W, b, state)
            found.append(pre)
            state = Interval(np.maximum(pre.lo, 0.0), np.maximum(pre.hi, 0.0))
        return found

    @cached_property
    def letters(self) -> tuple[str, str, str]:
        """The letters z, h and s, each with underscores if a variable begins with that letter.

        Examples
        --------
        >>> import attnc
        >>> attnc.ReLUNetwork([[[1.0]], [[2.0]]], [[0.5], [0.0]], box={"z": (-1, 1)}).letters
        ('z_', 'h', 's')
        """
        z, h, s = (free_letter(letter, self.box.names) for letter in "zhs")
        return z, h, s

    @cached_property
    def definitions(self) -> str:  # type: ignore[override]
        """The text z1_0 = w·x + b; h1_0 = relu(z1_0); …; z2_0 = w·h + b; …; outputs, with exact numbers.

        Examples
        --------
        >>> import attnc
        >>> attnc.ReLUNetwork([[[1.0]], [[2.0]]], [[0.5], [0.0]], box={"x": (-1, 1)}).definitions
        'z1_0 = 1*x + 0.5; h1_0 = relu(z1_0); z2_0 = 2*h1_0 + 0; z2_0'
        """
        (z, h, _), names, found = self.letters, list(self.box.names), []
        for l, (W, b) in enumerate(zip(self.weights, self.biases, strict=True), 1):  # noqa: E741
            sums = [f"{z}{l}_{j}" for j in range(len(W))]
            found += [f"{unit} = {affine_text(w, names, c)}" for unit, w, c in zip(sums, W, b, strict=True)]
            names = [f"{h}{l}_{j}" for j in range(len(W))]
            if l < len(self.weights):
                found += [f"{unit} = relu({below})" for unit, below in zip(names, sums, strict=True)]
        return "; ".join([*found, ", ".join(sums)])

    def _through(self, reach: Points, size: Points) -> tuple[Values, Values, int]:
        """Use the Lipschitz constants Π|W_l|, entry by entry."""
        count = 0
        for W, b in zip(self.weights, self.biases, strict=True):
            count += W.shape[1] + 2
            reach = up(reach @ np.abs(W).T, W.shape[1] + 1)
            size = up(size @ np.abs(W).T + np.abs(b), W.shape[1] + 2)
        return reach, size, count

    def describe(self) -> str:
        return "ReLU network " + "→".join(map(str, [self.box.d, *(len(W) for W in self.weights)]))


def free_letter(letter: str, names: Sequence[str]) -> str:
    """Return the letter with underscores added until no name begins with it."""
    while any(name.startswith(letter) for name in names):
        letter += "_"
    return letter


def affine_text(row: Iterable[float], names: Sequence[str], constant: float, *, with_zeros: bool = False) -> str:
    """Return the text Σ w·name + constant with exact numbers. Terms with w = 0 are left out unless `with_zeros`."""
    pairs = [(w, name) for w, name in zip(row, names, strict=True) if w or with_zeros]
    terms = [f"{exact_text(w)}*{name}" for w, name in pairs] + [exact_text(constant)]
    return " + ".join(terms).replace("+ -", "- ")


def exact_text(x: float) -> str:
    """Return a float as a short decimal if that is exact, and as p/2**q otherwise."""
    p, q = float(x).as_integer_ratio()
    text, halvings = f"{x:.15g}", q.bit_length() - 1
    if Fraction(text) == Fraction(p, q):
        return text
    powers = [MAX_HALVINGS] * (halvings // MAX_HALVINGS) + [halvings % MAX_HALVINGS]
    return str(p) + "".join(f"/2**{n}" for n in powers if n)


def affine_range(W: Float[np.ndarray, "out in"], b: Float[np.ndarray, " out"], x: Interval) -> Interval:
    """Return an enclosure of W·x + b, from midpoint and radius, each rounded outward."""
    mid = x.lo / 2 + x.hi / 2
    radius = up(np.maximum(x.hi - mid, mid - x.lo))
    centre = mid @ W.T + b
    slack = up(gamma(W.shape[1] + 2, U) * up(np.abs(mid) @ np.abs(W).T + np.abs(b), W.shape[1] + 2))
    spread = up(up(radius @ np.abs(W).T, W.shape[1] + 1) + slack)
    return Interval(-up(spread - centre), up(centre + spread))


def feature_box(box: Any, d: int) -> Box:
    """Read a box of d features: one interval for all features, or one for each."""
    if isinstance(box, Box):
        return box
    if not isinstance(box, dict) and np.ndim(box) == 1 and len(box) == 2:
        return Box.parse([tuple(box)] * d)
    parsed = Box.parse(box)
    if parsed.d != d:
        raise InputError(f"box: {parsed.d} interval(s) for {d} feature(s)")
    return parsed


def _array(name: str, given: Any) -> np.ndarray:
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be an array of numbers") from None
    if not np.isfinite(array).all():
        raise InputError(f"{name} has a value that is not finite")
    return array


def _matrix(name: str, given: Any) -> tuple[np.ndarray, bool]:
    """Return a matrix, and whether it was given as a single row."""
    array = _array(name, given)
    if array.ndim not in (1, 2) or array.size == 0:
        raise InputError(f"{name} must be a matrix (or one row of it), found shape {array.shape}")
    return np.atleast_2d(array), array.ndim == 1
