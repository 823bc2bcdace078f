"""A construction: one object with a name, the targets that it accepts, its cost, and its build.

Every file of `papers/` and `beyond/` defines one `Construction` beside the public function of its theorem, and
`catalogue.py` lists them. CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.errors import InputError, positive_number, whole_number
from attnc.ir.layers import Attention
from attnc.ir.program import Program
from attnc.ir.shapes import key_counts
from attnc.numerics.limits import check_time
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.cells.branching import MOST_PROOF_CELLS
from attnc.proofs.leaves_prover import FEW_VARIABLES
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.target import Target

MAX_ANCHORS = 2_000_000
"""Default limit on (head, key) pairs. At eight numbers per anchor and 64 bytes per number they need about MAX_BYTES."""
MAX_BYTES = 2**30
"""Default limit on the bytes of a program, of the arrays that it is made from, and of a recorded run: one GiB."""
DEFAULT_EPS = 1e-2
"""The largest error if neither eps nor points_per_axis is given."""
MAX_STEP_ANCHORS = 1024
"""Limit on the heads and on the anchors of a step. With 1024 anchors a step has an error of 6e-5. Rounding grows with
the square of their number."""
CRITERIA = ("multiply_adds", "anchors", "parameters", "layers")
"""The fields of an Estimate by which `auto` may compare constructions."""
SMOOTH = "C1"
"""The norm of values and of all partial derivatives: the largest errors of both, each with an eps of its own."""
LEAST_MAGNITUDE = {"float32": 2.0**-100, "float64": 2.0**-996}
"""Least magnitude of a variable. Below 2^−126, or 2^−1022, numbers lose digits, so factors ≥ 2^−26 are safe."""


def exponent(norm: Any) -> float:
    """Return p of the L_p norm; "inf" is the largest error."""
    if norm == "inf":
        return math.inf
    is_number = isinstance(norm, numbers.Real) and not isinstance(norm, bool)
    if not is_number or not norm >= 1:
        raise InputError(f"norm must be 'inf' or a number p ≥ 1, or {SMOOTH!r} for attnc.compile; found {norm!r}")
    return float(norm)


@dataclass(frozen=True)
class Request:
    """The checked arguments of `attnc.compile`, or of the function of one theorem.

    Parameters
    ----------
    eps : float, optional
        The largest error allowed. Without it, parameters of the theorem give the size.
    dtype : {"float64", "float32"}
        The arithmetic of the program.
    p : float
        The exponent of the norm in which the error is measured.
    max_anchors, max_bytes : int
        Limits on the number of (head, key) pairs, and on the bytes of the program and of the arrays for building it.
    centres, heads
        Options that some constructions take.
    construction, criterion : str
        The name of a construction, or "auto" for the cheapest of those that it compares, by the criterion.
    also : str, optional
        A second dtype in which the network is certified.
    seconds : float
        The time limit of `attnc.compile`. The function of a theorem has none.
    gradient_eps : float, optional
        The largest error allowed in a partial derivative; None if gradients are not bounded.
    proof : bool
        False if the network will be proved later.
    progress : callable, optional
        Called with the current step and the fraction of it that is done.
    points_per_axis, beta, num_step_anchors, margin
        Parameters of the theorems that select cells. A parameter that is None is chosen for eps.
    position_channels : bool
        Whether keys have a channel for each position of the output, or the read-out alone writes the positions.

    Raises
    ------
    InputError
        If a number is out of its range.

    Examples
    --------
    >>> import attnc
    >>> attnc.constructions.Request(eps=0.1, heads=2).options
    {'heads': 2}
    """

    eps: float | None = None
    dtype: str = "float64"
    p: float = math.inf
    max_anchors: int = MAX_ANCHORS
    max_bytes: int = MAX_BYTES
    centres: str | None = None
    heads: int | None = None
    progress: Progress | None = field(default=None, compare=False, repr=False)
    points_per_axis: int | tuple[int, ...] | None = None
    beta: float | None = None
    num_step_anchors: int | None = None
    margin: float = 40.0
    position_channels: bool = True
    # Only `attnc.compile` has these arguments: the choice of the construction, and a second certificate.
    construction: str = "auto"
    criterion: str = "multiply_adds"
    also: str | None = None
    seconds: float = math.inf
    gradient_eps: float | None = None
    proof: bool = True

    def __post_init__(self) -> None:
        limit = None if self.seconds == math.inf else self.seconds
        limits = ("eps", self.eps), ("beta", self.beta), ("seconds", limit), ("gradient_eps", self.gradient_eps)
        for name, number in limits:
            if number is not None:
                positive_number(name, number)
        if not isinstance(self.dtype, str) or self.dtype not in UNIT_ROUNDOFF:
            raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {self.dtype!r}")
        if not self.p >= 1:
            raise InputError(f"norm must be 'inf' or a number ≥ 1, found {self.p}")
        if not 0 < self.margin <= 700:
            raise InputError(f"margin must be in (0, 700], found {self.margin}")
        for name, value, least in (("heads", self.heads, 1), ("num_step_anchors", self.num_step_anchors, 2)):
            if value is not None:
                whole_number(name, value, least, MAX_STEP_ANCHORS)
        counts = self.points_per_axis
        for count in counts if isinstance(counts, tuple) else () if counts is None else (counts,):
            whole_number("points_per_axis", count, 1)
        whole_number("max_anchors", self.max_anchors, 1)
        whole_number("max_bytes", self.max_bytes, 1)
        if self.criterion not in CRITERIA:
            raise InputError(f"criterion must be one of {', '.join(CRITERIA)}; found {self.criterion!r}")
        if self.also is not None and (self.also not in UNIT_ROUNDOFF or self.also == self.dtype):
            others = " or ".join(name for name in UNIT_ROUNDOFF if name != self.dtype)
            raise InputError(f"also is a second dtype beside {self.dtype}: {others}; found {self.also!r}")

    def require_representable(self, target: Target) -> None:
        """Refuse numbers that the dtypes cannot hold: the network would be NaN under a finite bound.

        Parameters
        ----------
        target : Target
            The function.

        Raises
        ------
        InputError
            If the box or the values of the function are too large or too small for a dtype.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(eps=0.1, dtype="float32")
        >>> try:
        ...     request.require_representable(attnc.as_target("1e39*x", {"x": (0, 1)}))
        ... except attnc.InputError as error:
        ...     print(error)
        1e39*x reaches 1e+39, more than float32 holds: scale the function
        """
        dtype = "float32" if "float32" in (self.dtype, self.also) else self.dtype
        most, box = float(np.finfo(dtype).max) / 8, target.box.core(1.0)
        if not float(box.magnitude.max()) < math.sqrt(most):  # scores are of the size of its square
            raise InputError(
                f"the box {target.box} is more than {dtype} holds: choose a smaller one, or scale the inputs"
            )
        largest = target.largest_value(sample_points(box, 64))
        if not largest < most:
            raise InputError(f"{target.describe()} reaches {largest:.3g}, more than {dtype} holds: scale the function")
        if dtype == "float32" and (reason := _few_digits(target, dtype)) is not None:
            raise InputError(reason)

    @property
    def goal(self) -> float:
        """The eps that was asked for.

        Examples
        --------
        >>> import attnc
        >>> attnc.constructions.Request(eps=0.1).goal
        0.1
        """
        assert self.eps is not None
        return self.eps

    @property
    def eps_or_any(self) -> float:
        """The eps that was asked for. Without one every error is accepted.

        Examples
        --------
        >>> import attnc
        >>> attnc.constructions.Request().eps_or_any
        inf
        """
        return math.inf if self.eps is None else self.eps

    @property
    def options(self) -> dict[str, object]:
        """The options that were given, by name.

        Examples
        --------
        >>> import attnc
        >>> attnc.constructions.Request(eps=0.1, beta=50.0, points_per_axis=9).options
        {'beta': 50.0, 'points_per_axis': 9}
        """
        given = {
            "centres": self.centres,
            "heads": self.heads,
            "norm": None if self.p == math.inf else self.p,
            "beta": self.beta,
            "points_per_axis": self.points_per_axis,
        }
        return {name: value for name, value in given.items() if value is not None}

    def is_plain(self, target: Target) -> bool:
        """Whether the target is continuous, has one input and a finite box, and the request is for the largest error.

        Parameters
        ----------
        target : Target
            The function.

        Returns
        -------
        bool
            True if all of that holds.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(eps=0.1)
        >>> request.is_plain(attnc.as_target("sin(x)", {"x": (-1, 1)}))
        True
        >>> request.is_plain(attnc.as_target("tanh(x)", {"x": (0, float("inf"))}))  # the box is infinite
        False
        """
        conditions = (finite_box, made_for("function"), one_input, continuous, largest_error)
        return all(condition(target, self) is None for condition in conditions)

    def is_short_proof(self, target: Target) -> bool:
        """Whether no constants are given, or a proof from them needs no more cells than one in an L_p norm may have.

        In two variables, a proof from a Lipschitz constant with 65,536 leaves took 2.6 s.

        Parameters
        ----------
        target : Target
            The function.

        Returns
        -------
        bool
            True if the proof is short enough.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(eps=0.1)
        >>> request.is_short_proof(attnc.as_target(lambda points: points[:, 0], [(0, 1)], lipschitz=1.0))
        True
        """
        most = self.for_largest_error(target.box).eps_or_any
        return target.given is None or _cells_to_prove(target, most) <= MOST_PROOF_CELLS

    def report(self, doing: str, fraction: float) -> None:
        """Call `progress`, if there is one; raise OutOfTime if the time is over.

        Parameters
        ----------
        doing : str
            The step that is done now.
        fraction : float
            The share of it that is done, from 0 to 1.

        Raises
        ------
        OutOfTime
            If the time limit is over.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(eps=0.1, progress=lambda doing, share: print(f"{doing}: {share:.0%}"))
        >>> request.report("place keys", 0.5)
        place keys: 50%
        """
        check_time(doing)
        if self.progress is not None:
            self.progress(doing, fraction)

    def for_largest_error(self, box: Box) -> Request:
        """Return a request for a largest error that implies the L_p bound, since ‖g‖_p ≤ vol^{1/p}·sup |g|.

        Parameters
        ----------
        box : Box
            The box, for its volume.

        Returns
        -------
        Request
            The same request if its norm is the largest error already.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(eps=0.1, p=2.0)
        >>> float(request.for_largest_error(attnc.Box.parse({"x": (0, 4)})).eps)  # 0.1 divided by the root of the width
        0.05
        """
        if self.p == math.inf or self.eps is None:
            return self
        return replace(self, eps=self.eps / math.prod(width ** (1 / self.p) for width in box.widths), p=math.inf)


@dataclass(frozen=True)
class Estimate:
    """A row of `attnc.plan`: the cost of a construction for a request.

    Attributes
    ----------
    name : str
        The name of the construction.
    anchors, heads, layers, parameters : int
        The sizes of the program.
    multiply_adds : int
        The multiply-adds of all heads for one query. A key costs one for each of its numbers.
    error : float or None
        The expected error, not a bound.
    why_not : str or None
        The reason why the construction cannot be used.
    build : callable or None
        Builds the program, and reuses the work of the estimate.

    Examples
    --------
    >>> import attnc
    >>> best = attnc.plan("sin(x)", {"x": (-1, 1)}, 1e-3)[0]
    >>> best.why_not is None, best.layers, best.anchors < 20
    (True, 1, True)
    """

    name: str
    anchors: int = 0
    heads: int = 0
    layers: int = 0
    parameters: int = 0
    multiply_adds: int = 0
    error: float | None = None
    why_not: str | None = None
    build: Callable[[], Built] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def one_layer(
        cls, name: str, anchors: int, d: int, outputs: int, error: float, build: Callable[[], Built] | None = None
    ) -> Estimate:
        """Estimate one head over constant keys. Each key has d slopes, an offset and the values.

        Parameters
        ----------
        name : str
            The name of the construction.
        anchors, d, outputs : int
            The number of keys, of variables and of outputs.
        error : float
            The expected error.
        build : callable, optional
            A function without arguments that builds it.

        Returns
        -------
        Estimate
            The row of a plan.

        Examples
        --------
        >>> import attnc
        >>> row = attnc.Estimate.one_layer("mine", anchors=10, d=2, outputs=1, error=1e-3)
        >>> row.heads, row.multiply_adds  # a key has two slopes, an offset and a value
        (1, 40)
        """
        each = d + 1 + outputs
        embedding = 3 * d + 1 + 3 * outputs  # scale and offset of the query, the projections, the read-out
        return cls(name, anchors, 1, 1, anchors * each + embedding, anchors * each, error, build=build)

    @classmethod
    def of_built(cls, built: Built, error: float | None) -> Estimate:
        """Count the sizes of a program that exists already.

        Parameters
        ----------
        built : Built
            The program, with the name of its construction.
        error : float or None
            Its bound, or the error that it expects.

        Returns
        -------
        Estimate
            The row of a plan.

        Examples
        --------
        >>> import attnc
        >>> built = attnc.constructions.max_affine(attnc.as_target("x**2", {"x": (0, 1)}), points_per_axis=4, beta=50.0)
        >>> attnc.Estimate.of_built(built, built.bound.value).anchors
        4
        """
        made = built.program
        counts = made.num_anchors, made.num_heads, made.num_attention_layers, made.num_parameters, multiply_adds(made)
        return cls(built.construction, *counts, error, build=lambda: built)

    def within(self, request: Request) -> Estimate:
        """Return the same row, or a row with a refusal if it needs more anchors than the request allows.

        Parameters
        ----------
        request : Request
            The limits, in `max_anchors`.

        Returns
        -------
        Estimate
            The row, or the refusal in `why_not`.

        Examples
        --------
        >>> import attnc
        >>> request = attnc.constructions.Request(max_anchors=100)
        >>> attnc.Estimate("mine", anchors=500).within(request).why_not
        'needs about 5e+02 anchors, the limit is 100'
        """
        if self.anchors <= request.max_anchors:
            return self
        needed = f"needs about {self.anchors:.2g} anchors, the limit is {request.max_anchors:,}"
        return Estimate(self.name, why_not=needed)


def multiply_adds(program: Program) -> int:
    """Return the multiply-adds of all heads for one query: d_k + d_v for each of its keys."""
    heads = [head for layer in program.all_layers if isinstance(layer, Attention) for head in layer.heads]
    widths = [head.W_Q.shape[1] + head.W_V.shape[1] for head in heads]
    return sum(width * count for width, count in zip(widths, key_counts(program), strict=True))


Requirement = Callable[[Target, Request], str | None]
"""A condition of a construction: None where it holds, otherwise the reason why it does not, in a few words."""


@dataclass(frozen=True)
class Construction:
    """A way from a target to a program.

    Parameters
    ----------
    name : str
        The name that `construction=…` of `attnc.compile` takes.
    build : callable
        Makes a `Built` from a target and a `Request`.
    requires : tuple of callable
        The conditions, checked in order. Each returns None, or the reason why it does not hold.
    suits : callable
        Whether "auto" considers the construction for a target; by default it never does.
    estimated : callable, optional
        Finds the cost without building; by default the program is built and counted.
    options : frozenset of str
        The options that it takes, among "centres", "heads", "norm", "beta" and "points_per_axis".
    has_own_functions : bool
        Whether each head computes a function of its own. Pictures then show the keys of each head, not common cells.

    Examples
    --------
    >>> import attnc
    >>> by_name = {each.name: each for each in attnc.constructions.CATALOGUE}
    >>> target = attnc.as_target("sin(x)", {"x": (-1, 1)})
    >>> by_name["relu_network"].why_not(target, attnc.constructions.Request(eps=0.1))
    'takes a ReLUNetwork'
    """

    name: str
    build: Callable[[Target, Request], Built]
    requires: tuple[Requirement, ...] = ()
    suits: Callable[[Target, Request], bool] = lambda target, request: False
    estimated: Callable[[Target, Request], Estimate] | None = None
    options: frozenset[str] = frozenset()
    has_own_functions: bool = False

    def accept(self, target: Target, request: Request) -> None:
        """Raise InputError unless this construction takes the target.

        Parameters
        ----------
        target : Target
            The function.
        request : Request
            The accuracy, the norm and the limits.

        Raises
        ------
        InputError
            If the construction does not take the target; the message has the reason.

        Examples
        --------
        >>> import attnc
        >>> by_name = {each.name: each for each in attnc.constructions.CATALOGUE}
        >>> target, request = attnc.as_target("sin(x)", {"x": (-1, 1)}), attnc.constructions.Request(eps=0.1)
        >>> by_name["max_affine"].accept(target, request)  # no error
        """
        refuse(self.name, target, request, *self.requires)

    def why_not(self, target: Target, request: Request) -> str | None:
        """The reason why this construction does not take the target, None if it does.

        Parameters
        ----------
        target : Target
            The function.
        request : Request
            The accuracy, the norm and the limits.

        Returns
        -------
        str or None
            The reason.

        Examples
        --------
        >>> import attnc
        >>> by_name = {each.name: each for each in attnc.constructions.CATALOGUE}
        >>> target, request = attnc.as_target("sin(x)", {"x": (-1, 1)}), attnc.constructions.Request(eps=0.1)
        >>> by_name["truncated_linear"].why_not(target, request)
        'takes a TruncatedLinear'
        """
        reasons = (required(target, request) for required in self.requires)
        return next((reason for reason in reasons if reason is not None), None)

    def estimate(self, target: Target, request: Request) -> Estimate:
        """Return the cost for this request. Raise AttncError if the construction does not reach eps.

        Parameters
        ----------
        target : Target
            The function.
        request : Request
            The accuracy, the norm and the limits.

        Returns
        -------
        Estimate
            The row of a plan.

        Raises
        ------
        AttncError
            If the construction does not reach eps within the limits.

        Examples
        --------
        >>> import attnc
        >>> by_name = {each.name: each for each in attnc.constructions.CATALOGUE}
        >>> target, request = attnc.as_target("sin(x)", {"x": (-1, 1)}), attnc.constructions.Request(eps=0.1)
        >>> row = by_name["max_affine"].estimate(target, request)
        >>> row.name, row.heads
        ('max_affine', 1)
        """
        if self.estimated is not None:
            return self.estimated(target, request)
        built = self.build(target, request)
        return Estimate.of_built(built, built.observed if built.bound is None else built.bound.value)


def for_eps(theorem: Callable[..., Built]) -> Callable[[Target, Request], Built]:
    """Return the build of a theorem whose function takes eps, dtype, max_anchors, max_bytes and progress.

    The theorem is about the largest error. For an L_p norm it gets an eps that implies the L_p bound.
    """

    def build(target: Target, request: Request) -> Built:
        return theorem(
            target,
            eps=request.for_largest_error(target.box).eps,
            dtype=request.dtype,
            max_anchors=request.max_anchors,
            max_bytes=request.max_bytes,
            progress=request.progress,
        )

    return build


def _cells_to_prove(target: Target, eps: float) -> float:
    """Return the number of cells of a proof from given constants. On each, f is within eps/2 of its interpolant."""
    d, r, given = target.box.d, 0.0, target.interpolated
    if len(target.output_shape) > 1 or d > FEW_VARIABLES or given is None:
        return math.inf
    if given.lipschitz is not None:
        r = eps / (2 * max(given.lipschitz, 1e-300) * math.sqrt(d))
    if given.hessian_bound is not None:
        r = max(r, math.sqrt(eps / (max(given.hessian_bound, 1e-300) * d)))
    return math.prod(math.ceil(width / (2 * r)) if width / (2 * r) < 1e9 else math.inf for width in target.box.widths)


def finite_box(target: Target, request: Request) -> str | None:
    """The condition that all ends of the box are finite."""
    return None if target.box.is_bounded else "takes a finite box"


def normal_numbers(target: Target, request: Request) -> str | None:
    """The condition that the dtype has all its digits for the variables."""
    return _few_digits(target, request.dtype)


def _few_digits(target: Target, dtype: str) -> str | None:
    """The name of a variable that is too small for the dtype."""
    least = float(target.box.magnitude.min())
    if not target.box.is_bounded or least >= LEAST_MAGNITUDE[dtype]:
        return None
    name = target.box.names[int(target.box.magnitude.argmin())]
    return f"|{name}| ≤ {least:.3g} is too small for {dtype}: scale the variable"


def function(target: Target, request: Request) -> str | None:
    """The condition that the target has values everywhere on its box."""
    return None if target.kind != "TableTarget" else "takes functions; a table has no values between its points"


def made_for(kind: str) -> Requirement:
    """The condition that the target is of one class, whose weights or points the construction reads."""
    return lambda target, request: None if target.kind == kind else f"takes a {kind}"


def for_kind(theorem: Callable[..., Built], kind: str, is_for_auto: bool = True) -> Construction:
    """The construction of a theorem for targets of one class."""

    def suits(target: Target, request: Request) -> bool:
        return is_for_auto and target.kind == kind and target.box.is_bounded

    return Construction(theorem.__name__, for_eps(theorem), (finite_box, made_for(kind)), suits)


def one_input(target: Target, request: Request) -> str | None:
    """The condition that the target does not take two sequences."""
    return None if len(target.input_shapes) == 1 else "takes one input; use max_affine_cross for a target with two"


def one_variable(target: Target, request: Request) -> str | None:
    """The condition that the box has one axis."""
    return None if target.box.d == 1 else f"takes a function of one variable; the target has {target.box.d}"


def continuous(target: Target, request: Request) -> str | None:
    """The condition that the target has no jumps."""
    return None if target.is_continuous else "approximates continuous functions; use max_affine and norm=2 for jumps"


def expression(target: Target, request: Request) -> str | None:
    """The condition that the target is an expression, whose parts the construction builds."""
    return None if target.expression is not None else "takes an expression: it follows the structure of the function"


def largest_error(target: Target, request: Request) -> str | None:
    """The condition that the error is not measured in an L_p norm."""
    return None if request.p == math.inf else "bounds the largest error, not an L_p norm"


def summable(target: Target, request: Request) -> str | None:
    """The condition that the prover can bound an L_p norm without a theorem of the construction."""
    is_known = target.expression is not None or target.given is not None
    if request.p == math.inf or (is_known and target.box.d <= FEW_VARIABLES):
        return None
    kinds = "expressions, and for functions with a given constant,"
    return f"has proofs in an L_p norm only for {kinds} in up to {FEW_VARIABLES} variables"


def refuse(name: str, target: Target, request: Request, *conditions: Requirement) -> None:
    """Raise InputError unless the target meets these conditions of the construction."""
    for condition in conditions:
        if (reason := condition(target, request)) is not None:
            raise InputError(
                f"cannot build {target.describe()}: {name} {reason}. attnc.plan lists the constructions that take it."
            )


K = TypeVar("K", bound=Target)


def of_kind(name: str, target: Target, kind: type[K]) -> K:
    """Return the target, or raise InputError if it is not of the class that the construction takes."""
    if not isinstance(target, kind):
        raise InputError(
            f"cannot build {target.describe()}: {name} takes a target made by attnc.{kind.__name__}. attnc.plan lists "
            "the constructions that take it."
        )
    return target


CONTINUOUS_FUNCTION = (finite_box, function, one_input, continuous)
"""A continuous function of one input on a finite box."""
FIT = (*CONTINUOUS_FUNCTION, summable, normal_numbers)
"""The conditions of fits by one head. They admit the L_p norms that the prover can bound."""
EXPRESSION = (*CONTINUOUS_FUNCTION, largest_error, expression)
"""The conditions of constructions that build an expression part by part."""
