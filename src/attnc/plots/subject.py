"""The subject of a picture: a network, its function, the output that is shown, and the lines that it is drawn along."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import AttncError, InputError
from attnc.ir.normal_form import AttentionStage, NormalForm
from attnc.ir.program import split_columns
from attnc.numerics.arrays import Float
from attnc.plots.selectors import LayerSoftmaxes, common_direction, last_layer, num_scores
from attnc.plots.style import number
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import TruncatedLinear
from attnc.targets.target import Target
from attnc.wording import headline, one_line, plural, shortened, without_expression

if TYPE_CHECKING:
    from attnc.network import Network
    from attnc.targets.box import Box

TargetLike = Target | Callable[..., Any]
"""A Target, or a function of flat points (batch, d), or of the inputs that the network takes."""

SMALL_MULTIPLES = 6
"""Maximum number of outputs in one picture: two rows of three panels."""
PICTURE_SCORES = 8e8
"""Maximum of points × scores per point for the values in a picture. They take some seconds."""
SMALLEST_REACH = 1e-290
"""Smallest bound that sets the scale of an axis. matplotlib needs numbers whose tenths and squares are not zero."""
SHOWN_BEYOND = 0.3
"""A truncation to [a, b] is shown this share of b − a beyond both ends."""
MANY_VARIABLES = 64
"""Number of variables, counted from the first, among which a cut is chosen. Each costs 33 evaluations."""
NAMED_VARIABLES = 5
"""Maximum number of other variables whose values the note on a cut lists. More would not fit on its line."""
SHOWN_REACH = 8.0
"""Length of an infinite range that is shown on either side of 0. The usual activations are straight beyond it."""
ELSEWHERE, LITTLE = 0.75, 0.02
"""If the output changes along cuts through the middle of the box by less than the share LITTLE of its spread, cuts
through the share ELSEWHERE of each interval are tried."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Truncated linear functions. Output i is clip(W_i·x + t_i, a, b), where x holds all variables in one row."""

    W: Float[np.ndarray, "outputs d"]
    t: Float[np.ndarray, " outputs"]
    a: float
    b: float

    @classmethod
    def of(cls, target: TruncatedLinear) -> Clip:
        from scipy.linalg import block_diag

        return cls(block_diag(*target.W), target.t, target.a, target.b)

    def __call__(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.clip(points @ self.W.T + self.t, self.a, self.b)

    def describe(self, names: tuple[str, ...]) -> str:
        ends = f"{number(self.a)}, {number(self.b)}"
        if self.W.shape[0] > 1 or len(names) > 3:
            return f"clip(w·x + t, {ends})"
        terms = [
            (w, f"{number(abs(w))}·{name}".removeprefix("1·")) for w, name in zip(self.W[0], names, strict=True) if w
        ]
        is_shifted = abs(self.t[0]) > 1e-9 * (self.b - self.a)  # a shift read from weights has rounding errors
        terms += [(self.t[0], number(abs(self.t[0])))] if is_shifted else []
        text = "".join(f" {'−' if w < 0 else '+'} {term}" for w, term in terms)
        return f"clip({text[3:] if text.startswith(' +') else text[1:]}, {ends})"


@dataclass(frozen=True, eq=False)
class PlotSubject:
    """A network, the function that it approximates if that is known, and the output that is shown."""

    network: Network
    function: Callable[[np.ndarray], Any] | None  # of flat points; None if not known
    output: int
    name: str
    clip: Clip | None = None  # the truncated linear functions that the network computes, if any
    is_read: bool = False  # the function was read from the weights

    @classmethod
    def of(cls, network: Network, target: TargetLike | None, output: int) -> PlotSubject:
        outputs, is_clip = math.prod(network.program.output_shape), network.construction.startswith("truncated_linear")
        if not 0 <= output < outputs:
            raise InputError(f"there is no output {output}: the network has {plural(outputs, 'output')}, from 0 on")
        if target is not None and not callable(target):
            raise InputError(f"target: expected a Target or a function, found a {type(target).__name__}")
        clip = Clip.of(target) if isinstance(target, TruncatedLinear) else read_clip(network) if is_clip else None
        function: Callable[[np.ndarray], Any] | None = None
        name, is_read = without_expression(network), False
        if isinstance(target, Target):
            wanted, found = (network.box.d, outputs), (target.box.d, target.num_outputs)
            if wanted != found:
                raise InputError(
                    f"target: {target.describe()} has {found[0]} variable(s) and {found[1]} output(s), the network "
                    f"{wanted[0]} and {wanted[1]}. Give the target that the network was compiled from."
                )
            function, name = target, target.text or target.describe()
        elif target is not None:
            function = _of_points(network, target)
            name = network.expression or str(getattr(target, "__name__", type(target).__name__))
        elif network.expression is not None:
            function = Expression.parse(network.expression).with_variables(network.variables)
            name = network.expression
        elif clip is not None:
            function, is_read = clip, True
        elif network.definitions is not None:
            function = _defined(network)
        if clip is not None and (target is None or isinstance(target, TruncatedLinear)):
            name = clip.describe(network.variables)
        return cls(network, function, output, name, clip, is_read)

    @property
    def form(self) -> NormalForm:
        return self.network._engine.form

    @property
    def num_outputs(self) -> int:
        return math.prod(self.network.program.output_shape)

    @property
    def shown_outputs(self) -> list[int]:
        """The outputs of the small panels, including the chosen one."""
        first = max(0, min(self.output, self.num_outputs - SMALL_MULTIPLES))
        return list(range(first, min(self.num_outputs, first + SMALL_MULTIPLES)))

    @property
    def work_per_point(self) -> int:
        """The scores that one point costs, over all layers."""
        return max(1, sum(map(num_scores, self.form.stages)))

    def network_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.asarray(self.network.at(points), np.float64)

    def target_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """Return the values of the function, and NaN where they are not finite."""
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
        """Return the end of the error scale: the bound if the error is of its size, else the largest error."""
        largest, bound = float(np.nanmax(np.abs(error))), self.network.certificate.pointwise_bound
        if bound is not None and (bound < 5 * largest or (largest == 0 and bound > SMALLEST_REACH)):
            return max(largest, bound)
        return largest or 1.0

    def leaf_steps(self, variable: int = 0) -> tuple[Float[np.ndarray, " edges"], Float[np.ndarray, " steps"]]:
        """Return the edges of steps along a variable, and the largest bound of the leaves over each step.

        Both are empty without leaves.
        """
        claim = self.network.certificate
        if not len(claim.leaf_bounds):
            return np.zeros(0), np.zeros(0)
        starts, stops = (ends[:, variable] for ends in claim.cells(self.network.box))
        edges = np.unique(np.concatenate([starts, stops]))
        bounds = np.zeros(len(edges) - 1)
        for start, stop, bound in zip(starts, stops, claim.leaf_bounds, strict=True):
            within = slice(*np.searchsorted(edges, (start, stop)))
            bounds[within] = np.maximum(bounds[within], bound)
        return edges, bounds

    def errors_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"] | None:
        """Return the largest error over the outputs, or None if the function of the network is not known."""
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
        """The facts of the network, and its claims unless a panel of the error states them."""
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
    """Return the function that a network's definitions state: name = expression; …; outputs."""
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
    """Return the function on flat points. It may take flat points or the network's inputs, which are tried first."""
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


def read_clip(network: Network) -> Clip | None:
    """Return the functions that one attention layer truncates, or None if they cannot be read from the weights.

    An output reads one query. Its scores depend on one direction of x and have the form −γ(s − S_k)² along it. If the
    keys' values are clip(μ + λ·S_k), the function is clip(μ + λ·s).
    """
    form = network._engine.form
    if len(form.stages) != 1 or not isinstance(form.stages[0], AttentionStage):
        return None
    rows = [_read_row(last_layer(form, output)) for output in range(math.prod(form.output.shape))]
    known = [row for row in rows if row is not None]
    ends = np.array([[a, b] for _, _, a, b in known])
    if len(known) < len(rows) or np.ptp(ends, axis=0).max() > 1e-6 * np.ptp(ends):
        return None
    return Clip(np.array([w for w, *_ in known]), np.array([t for _, t, *_ in known]), *map(float, ends[0]))


def _read_row(layer: LayerSoftmaxes) -> tuple[np.ndarray, float, float, float] | None:
    direction = common_direction(layer.members)
    if len(layer.queries) != 1 or direction is None:
        return None
    places, values = [], []
    for head in layer.members:
        found = layer.anchors_along(head, np.zeros(len(direction)), direction / (direction @ direction))
        if found is None or head.outputs is None:
            return None
        has_value = ~head.is_sentinel if len(layer) > 1 else np.ones(len(head), bool)
        places.append(found[has_value])
        values.append(head.outputs[has_value])
    return _linear_between(np.concatenate(places), np.concatenate(values), direction)


def _linear_between(
    S: np.ndarray, v: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, float, float, float] | None:
    """Return (w, t, a, b) of v = clip(μ + λS, min v, max v), fitted where v is not truncated and checked everywhere."""
    a, b = float(v.min()), float(v.max())
    slack = 1e-4 * (b - a) / max(1, len(v) - 1)
    inside = (v > a + slack) & (v < b - slack)
    if b <= a or not inside.any():
        return None
    # The two ends are on the line as well: they are the places with the ends' values that are nearest to it.
    ends = [np.flatnonzero(v <= a + slack), np.flatnonzero(v >= b - slack)]
    middle = S[inside].mean()
    chosen = np.concatenate([np.flatnonzero(inside), *(e[[np.argmin(np.abs(S[e] - middle))]] for e in ends)])
    slope, constant = np.polyfit(S[chosen], v[chosen], 1)
    if np.abs(np.clip(constant + slope * S, a, b) - v).max() > 1e-3 * (b - a) / max(1, len(chosen) - 1):
        return None
    return slope * direction, float(constant), a, b


# --- lines through the box: a variable, a cut, the input of a truncation ----------------------------------------------


@dataclass(frozen=True, eq=False)
class PlotLine:
    """The points origin + t·direction inside the box, for t from lo to hi. The axis goes from shown[0] to shown[1]."""

    name: str  # of t
    lo: float
    hi: float
    origin: Float[np.ndarray, " d"]
    direction: Float[np.ndarray, " d"]
    box: Box
    note: str = ""  # the part of the box that the picture leaves out, if any
    shown: tuple[float, float] | None = None

    def at(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points d"]:
        return np.clip(self.origin + t[:, None] * self.direction, self.box.lo, self.box.hi)

    def share(self, s: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points d"]:
        """Return the points at shares of the line, from s = 0 at lo to s = 1 at hi."""
        return self.at(self.lo + s * (self.hi - self.lo))

    @property
    def axis(self) -> tuple[float, float]:
        return self.shown or (self.lo, self.hi)


def along_variable(box: Box, variable: int, note: str = "", share: float = 0.5) -> PlotLine:
    """Return the line along one variable. The others stay in the middle of their intervals, or at another share."""
    if not box.is_bounded:  # only a box of one variable may be infinite; a part of it is drawn
        line = along_variable(box.core(SHOWN_REACH), 0)
        return replace(line, note=f"drawn from {number(line.lo)} to {number(line.hi)}, a part of {box}")
    origin, direction = (1 - share) * box.lo + share * box.hi, np.zeros(box.d)
    origin[variable], direction[variable] = 0.0, 1.0
    lo, hi = float(box.lo[variable]), float(box.hi[variable])
    return PlotLine(one_line(box.names[variable]), lo, hi, origin, direction, box, note)


def cut(subject: PlotSubject) -> PlotLine:
    """Return the line along the variable that changes the shown outputs most."""
    box = subject.network.box
    corners = np.random.default_rng(0).random((33, box.d))
    spread = np.ptp(subject.network_at(box.lo + corners * box.widths)[:, subject.shown_outputs], axis=0).max()
    for share in (0.5, ELSEWHERE):
        lines = [along_variable(box, i, share=share) for i in range(min(box.d, MANY_VARIABLES))]
        points = np.concatenate([line.at(np.linspace(line.lo, line.hi, 33)) for line in lines])
        values = subject.network_at(points)[:, subject.shown_outputs].reshape(len(lines), 33, -1)
        changes = np.ptp(values, axis=1).max(axis=1)
        if changes.max() > LITTLE * spread:
            break
    best = int(np.argmax(changes > changes.max() * (1 - 1e-6)))
    others = [
        f"{one_line(name)} = {number(place)}"
        for i, (name, place) in enumerate(zip(box.names, lines[best].origin, strict=True))
        if i != best
    ]
    left_out = f", … ({len(others) - NAMED_VARIABLES} more)" if len(others) > NAMED_VARIABLES else ""
    at = ", ".join(others[:NAMED_VARIABLES]) + left_out
    unread = subject.network.construction.startswith("truncated_linear") and subject.clip is None
    why = "   (w·x + t cannot be read from these weights: give target=)" if unread else ""
    return replace(lines[best], note=f"a cut along {one_line(box.names[best])} at {at}{why}")


def ridge_lines(subject: PlotSubject) -> list[tuple[int, PlotLine]] | None:
    """Return (output, line) for the shown outputs that are truncated linear functions.

    Return None if the chosen one is not.
    """
    if subject.clip is None:
        return None
    found = [(output, _ridge(subject, subject.clip, output)) for output in subject.shown_outputs]
    lines = [(output, line) for output, line in found if line is not None]
    return lines if any(output == subject.output for output, _ in lines) else None


def _ridge(subject: PlotSubject, clip: Clip, output: int) -> PlotLine | None:
    """Return the line of u = w·x + t_i, from the corner of the box with the smallest u to the one with the largest."""
    box, w = subject.network.box, clip.W[output]
    middle = box.lo / 2 + box.hi / 2
    corner = np.sign(w) * (box.hi - middle)
    reach, centre = float(w @ corner), float(w @ middle + clip.t[output])
    if not reach > 0:
        return None
    wanted = clip.a - SHOWN_BEYOND * (clip.b - clip.a), clip.b + SHOWN_BEYOND * (clip.b - clip.a)
    lo, hi = max(wanted[0], centre - reach), min(wanted[1], centre + reach)
    if lo >= hi:  # the box does not touch the range
        lo, hi, wanted = centre - reach, centre + reach, (centre - reach, centre + reach)
    is_one = subject.num_outputs == 1
    moved = "x goes" if is_one else "each output over its own w·x + t; x goes"
    beyond = "" if (lo, hi) == wanted else "; grey: outside the box"
    name = "u = w·x + t" if is_one else f"u = w·x + t of {subject.entry(output)}"
    origin, direction = middle - centre / reach * corner, corner / reach
    return PlotLine(name, lo, hi, origin, direction, box, f"{moved} from corner to corner of the box{beyond}", wanted)
