"""The subject of a picture: a network, the function that it stands for, and the output that is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import AttncError, InputError
from attnc.ir.normal_form import AttentionStage, NormalForm
from attnc.ir.program import split_columns
from attnc.plots.selectors import SCORE_ROUNDING, common_direction, gaussian_places, reads, selectors
from attnc.plots.style import number, shortened
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import TruncatedLinear
from attnc.targets.target import Target
from attnc.wording import headline, one_line, plural, without_expression

if TYPE_CHECKING:
    from jaxtyping import Float

    from attnc.network import Network

TargetLike = Target | Callable[..., Any]
"""A Target, or a function of flat points (batch, d), or of the inputs that the network takes."""

SMALL_MULTIPLES = 6
"""Most outputs that one picture shows: two rows of three panels."""
PICTURE_SCORES = 8e8
"""Points × scores per point that the values in a picture may cost: some seconds."""
SMALLEST_REACH = 1e-290
"""Smallest bound that sets the scale of an axis: matplotlib needs numbers whose tenths and squares are not zero."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Truncated linear functions: output i is clip(W_i·x + t_i, a, b), x all variables in one row."""

    W: Float[np.ndarray, "outputs d"]
    t: Float[np.ndarray, " outputs"]
    a: float
    b: float

    @classmethod
    def of(cls, target: TruncatedLinear) -> Clip:
        n, d = target.W.shape
        W = np.zeros((n, n, d))
        W[np.arange(n), np.arange(n)] = target.W
        return cls(W.reshape(n, n * d), np.array(target.t), target.a, target.b)

    def __call__(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.clip(points @ self.W.T + self.t, self.a, self.b)

    def describe(self, names: tuple[str, ...]) -> str:
        ends = f"{number(self.a)}, {number(self.b)}"
        if self.W.shape[0] > 1 or len(names) > 3:
            return f"clip(w·x + t, {ends})"
        terms = [
            (w, f"{number(abs(w))}·{name}".removeprefix("1·")) for w, name in zip(self.W[0], names, strict=True) if w
        ]
        is_shifted = abs(self.t[0]) > 1e-9 * (self.b - self.a)  # a shift that was read has rounding errors
        terms += [(self.t[0], number(abs(self.t[0])))] if is_shifted else []
        text = "".join(f" {'−' if w < 0 else '+'} {term}" for w, term in terms)
        return f"clip({text[3:] if text.startswith(' +') else text[1:]}, {ends})"


@dataclass(frozen=True, eq=False)
class PlotSubject:
    """A network, the function that it stands for if that is known, and the output that is shown."""

    network: Network
    function: Callable[[np.ndarray], Any] | None  # of flat points; None: not known
    output: int
    name: str
    clip: Clip | None = None  # the truncated linear functions that the network computes, if it does
    is_read: bool = False  # the function was read from the weights

    @classmethod
    def of(cls, network: Network, target: TargetLike | None, output: int) -> PlotSubject:
        outputs = math.prod(network.program.output_shape)
        if not 0 <= output < outputs:
            raise InputError(f"output must be from 0 to {outputs - 1}, found {output}")
        if target is not None and not callable(target):
            raise InputError(f"target: expected a Target or a function, found a {type(target).__name__}")
        is_clip = network.construction.startswith("truncated_linear")
        clip = read_clip(network._engine.form) if is_clip else None
        if isinstance(target, Target):
            wanted, found = (network.box.d, outputs), (target.box.d, target.num_outputs)
            if wanted != found:
                raise InputError(
                    f"target: {target.describe()} has {found[0]} variable(s) and {found[1]} output(s), the network "
                    f"{wanted[0]} and {wanted[1]}. Give the target that the network was compiled from."
                )
            name = target.text or target.describe()
            if isinstance(target, TruncatedLinear):
                clip = Clip.of(target)
                name = clip.describe(network.variables)
            return cls(network, target, output, name, clip)
        if target is not None:
            name = network.expression or str(getattr(target, "__name__", type(target).__name__))
            return cls(network, _of_points(network, target), output, name, clip)
        if network.expression is not None:
            function = Expression.parse(network.expression).with_variables(network.variables)
            name = network.expression if clip is None else clip.describe(network.variables)
            return cls(network, function, output, name, clip)
        if clip is not None:
            return cls(network, clip, output, clip.describe(network.variables), clip, is_read=True)
        name = without_expression(network)
        return cls(network, None if network.definitions is None else _defined(network), output, name)

    @property
    def form(self) -> NormalForm:
        return self.network._engine.form

    @property
    def num_outputs(self) -> int:
        return math.prod(self.network.program.output_shape)

    @property
    def shown_outputs(self) -> list[int]:
        """The outputs of the small multiples, the chosen one among them."""
        first = max(0, min(self.output, self.num_outputs - SMALL_MULTIPLES))
        return list(range(first, min(self.num_outputs, first + SMALL_MULTIPLES)))

    @property
    def work_per_point(self) -> int:
        """The scores that one point costs, over all layers."""
        heads = [h for stage in self.form.stages if isinstance(stage, AttentionStage) for h in stage.heads]
        softmaxes = [stage.logits for stage in self.form.stages if not isinstance(stage, AttentionStage)]
        of_softmaxes = sum(math.prod(logits.shape) for logits in softmaxes)
        return max(1, of_softmaxes + sum(h.queries.shape[0] * h.keys.shape[0] for h in heads))

    def network_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.asarray(self.network.at(points), np.float64)

    def target_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """The values of the function; NaN where they are not finite."""
        assert self.function is not None
        array = np.asarray(self.function(points), np.float64)
        if array.size != len(points) * self.num_outputs:
            raise InputError(
                f"the target returned shape {array.shape} for {len(points)} points, the network has "
                f"{self.num_outputs} output(s)"
            )
        array = np.where(np.isfinite(array), array, np.nan).reshape(len(points), self.num_outputs)
        if np.isnan(array).all(axis=0).any():
            raise InputError("the target returned no finite value")
        return array

    def error_reach(self, error: Float[np.ndarray, "*shape"]) -> float:
        """The largest number on the scale of the error: the bound if the error is of its size, else the error."""
        largest, bound = float(np.nanmax(np.abs(error))), self.network.certificate.pointwise_bound
        if bound is not None and (bound < 5 * largest or (largest == 0 and bound > SMALLEST_REACH)):
            return max(largest, bound)
        return largest or 1.0

    def leaf_steps(self) -> tuple[Float[np.ndarray, " edges"], Float[np.ndarray, " leaves"]]:
        """The edges and the bounds of the leaves of one variable, from left to right; both are empty without leaves."""
        claim = self.network.certificate
        if self.network.box.d > 1 or not len(claim.leaf_bounds):
            return np.zeros(0), np.zeros(0)
        lo, hi = (ends[:, 0] for ends in claim.cells(self.network.box))
        order = np.argsort(lo)
        return np.append(lo[order], hi[order[-1]]), claim.leaf_bounds[order]

    def errors_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"] | None:
        """The largest error over the outputs; None if the function of the network is not known."""
        if self.function is None:
            return None
        errors = np.abs(self.network_at(points) - self.target_at(points))
        return np.asarray(np.nan_to_num(errors).max(axis=1))

    def entry(self, output: int) -> str:
        where = np.unravel_index(output, self.network.program.output_shape)
        return f"out[{', '.join(map(str, where))}]" if where else "out"

    @property
    def title(self) -> str:
        return shortened(one_line(self.name), 70)

    @property
    def entry_title(self) -> str:
        """The title of a picture of one output."""
        return self.title + (f"   {self.entry(self.output)} of {self.num_outputs}" if self.num_outputs > 1 else "")

    @property
    def header(self) -> list[str]:
        """The facts of the network, and its claims if there is no panel of the error with them."""
        network = self.network
        facts = "   ·   ".join(
            [
                one_line(network.construction),
                plural(network.program.num_heads, "head"),
                plural(network.num_anchors, "anchor"),
                plural(network.num_parameters, "parameter"),
                network.dtype,
            ]
        )
        return [facts] if self.function is not None else [facts, f"error: {headline(network.certificate)}"]


def _defined(network: Network) -> Callable[[np.ndarray], Any]:
    """The function of the definitions of a network, evaluated one after the other: name = expression; …; outputs."""
    *steps, outputs = (network.definitions or "").split(";")

    def function(points: np.ndarray) -> np.ndarray:
        values = dict(zip(network.variables, points.T, strict=True))
        for step in (*steps, f"outputs = {outputs}"):
            name, _, text = step.partition("=")
            expression = Expression.parse(text.strip())
            columns = [values[used] for used in expression.variables]
            found = expression(np.stack(columns, axis=1) if columns else np.zeros((len(points), 0)))
            values[name.strip()] = found if name == "outputs " else found[:, 0]
        return values["outputs"]

    return function


def _of_points(network: Network, function: Callable[..., Any]) -> Callable[[np.ndarray], Any]:
    """The function on flat points, whether it takes these or the network's own inputs: the latter are tried first."""
    shapes, outputs = network.program.input_shapes, math.prod(network.program.output_shape)
    if len(shapes) == 1 and len(shapes[0]) == 1:
        return function

    def of_inputs(points: np.ndarray) -> Any:
        return function(*split_columns(points, shapes))

    middle = (network.box.lo / 2 + network.box.hi / 2)[None].repeat(3, axis=0)
    reasons = []
    for name, way in (("the network's inputs", of_inputs), ("flat points (batch, d)", function)):
        try:
            found = np.shape(way(middle))
        except AttncError:
            raise
        except Exception as error:
            reasons.append(f"on {name} it fails: {type(error).__name__}: {error}")
            continue
        if len(found) and found[0] == 3 and math.prod(found) == 3 * outputs:
            return way
        reasons.append(f"on {name} it returns shape {found} for a batch of 3, not 3 × {outputs} numbers")
    raise InputError("target: the function fits neither the network's inputs nor flat points: " + "; ".join(reasons))


# --- truncated linear functions, read from the weights ----------------------------------------------------------------


def read_clip(form: NormalForm) -> Clip | None:
    """The functions that one attention layer truncates; None if they cannot be read from the weights.

    An output reads one query, whose scores depend on one direction of x and stand like −γ(s − S_k)² along it. Where
    the keys' values are clip(μ + λ·S_k), the function is clip(μ + λ·s).
    """
    if len(form.stages) != 1 or not isinstance(form.stages[0], AttentionStage):
        return None
    rows = [_read_row(form, output) for output in range(math.prod(form.output.shape))]
    if any(row is None for row in rows):
        return None
    known = [row for row in rows if row is not None]
    ends = np.array([[a, b] for _, _, a, b in known])
    if np.ptp(ends, axis=0).max() > 1e-6 * np.ptp(ends):
        return None
    return Clip(np.array([w for w, *_ in known]), np.array([t for _, t, *_ in known]), *map(float, ends[0]))


def _read_row(form: NormalForm, output: int) -> tuple[np.ndarray, float, float, float] | None:
    queries = reads(form, output)[0]
    if len(queries) != 1:
        return None
    heads = selectors(form, 0, output, queries)
    direction = common_direction(heads)
    if direction is None:
        return None
    places, values = [], []
    for head in heads:
        assert head.soft is not None
        rounding = SCORE_ROUNDING[form.output.linear.dtype]
        found = gaussian_places(head.soft.slopes @ direction / (direction @ direction), head.soft.offsets, rounding)
        if found is None or head.outputs is None:
            return None
        has_value = ~head.is_sentinel if len(heads) > 1 else np.ones(len(head), bool)
        places.append(found[has_value])
        values.append(head.outputs[has_value])
    return _linear_between(np.concatenate(places), np.concatenate(values), direction)


def _linear_between(
    S: np.ndarray, v: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, float, float, float] | None:
    """(w, t, a, b) of v = clip(μ + λS, min v, max v), fitted where v is not truncated and checked everywhere."""
    a, b = float(v.min()), float(v.max())
    slack = 1e-4 * (b - a) / max(1, len(v) - 1)
    inside = (v > a + slack) & (v < b - slack)
    if b <= a or not inside.any():
        return None
    # The two ends belong to the line as well: the outermost places that have the ends' values and are nearest to it.
    ends = [np.flatnonzero(v <= a + slack), np.flatnonzero(v >= b - slack)]
    middle = S[inside].mean()
    chosen = np.concatenate([np.flatnonzero(inside), *(e[[np.argmin(np.abs(S[e] - middle))]] for e in ends)])
    slope, constant = np.polyfit(S[chosen], v[chosen], 1)
    if np.abs(np.clip(constant + slope * S, a, b) - v).max() > 1e-3 * (b - a) / max(1, len(chosen) - 1):
        return None
    return slope * direction, float(constant), a, b
