"""What a picture is of: a network, the function that it stands for, and the output that is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import AttncError, InputError
from attnc.ir.normal_form import AttentionStage, NormalForm
from attnc.plots.clips import Clip, read_clip
from attnc.plots.style import shortened
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import TruncatedLinear
from attnc.targets.target import Target
from attnc.wording import ceiling, one_line, plural, without_expression

if TYPE_CHECKING:
    from jaxtyping import Float

    from attnc.network import Network

TargetLike = Target | Callable[..., Any]
"""A Target, or a function of flat points (batch, d), or of the inputs that the network takes."""

SMALL_MULTIPLES = 6
SCORES = 8e8
"""points × scores that the values in a picture may cost."""


@dataclass(frozen=True, eq=False)
class Subject:
    network: Network
    function: Callable[[np.ndarray], Any] | None  # of flat points; None: not known
    output: int
    name: str
    clip: Clip | None = None  # the truncated linear functions that it is, where it is that
    is_read: bool = False  # the function was read from the weights

    @classmethod
    def of(cls, network: Network, target: TargetLike | None, output: int) -> Subject:
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
        """Those of the small multiples, the chosen output among them."""
        first = max(0, min(self.output, self.num_outputs - SMALL_MULTIPLES))
        return list(range(first, min(self.num_outputs, first + SMALL_MULTIPLES)))

    @property
    def work_per_point(self) -> int:
        """Scores that one point costs, altogether."""
        heads = [h for stage in self.form.stages if isinstance(stage, AttentionStage) for h in stage.heads]
        softmaxes = [stage.logits for stage in self.form.stages if not isinstance(stage, AttentionStage)]
        of_softmaxes = sum(math.prod(logits.shape) for logits in softmaxes)
        return max(1, of_softmaxes + sum(h.queries.shape[0] * h.keys.shape[0] for h in heads))

    def network_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        return np.asarray(self.network(*_split(self.network, points)), np.float64).reshape(len(points), -1)

    def target_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """NaN where the function has no finite value."""
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

    @property
    def bound(self) -> float | None:
        """The bound of |network − target| at every point; None where what was proved is of another norm, of a table's
        points alone, or nothing."""
        return self.network.certificate.pointwise_bound

    @property
    def claims(self) -> str:
        certificate = self.network.certificate
        norm = "" if certificate.norm == "inf" else f"L{one_line(certificate.norm)} norm: "
        bound = "no bound" if certificate.bound is None else f"bound {ceiling(certificate.bound)} (proven)"
        how = "sampled"
        if certificate.is_of_table:
            norm, how = f"at the table's {plural(certificate.num_points, 'point')}: ", "all checked"
        observed = "" if certificate.observed is None else f"   observed {certificate.observed:.3g} ({how})"
        return norm + bound + observed

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
        """What the network is; and what is claimed of it, where there is no panel of the error to say so."""
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
        return [facts] if self.function is not None else [facts, f"error: {self.claims}"]

    @property
    def target_label(self) -> str:
        return "target, read from the weights" if self.is_read else "target"


def _defined(network: Network) -> Callable[[np.ndarray], Any]:
    """What the definitions of a network say, one after the other: name = expression; …; outputs."""
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


def _split(network: Network, points: Float[np.ndarray, "points d"]) -> list[np.ndarray]:
    """Flat points as the inputs that the network takes."""
    shapes = network.program.input_shapes
    parts = np.split(points, np.cumsum([math.prod(shape) for shape in shapes])[:-1], axis=1)
    return [part.reshape(len(points), *shape) for part, shape in zip(parts, shapes, strict=True)]


def _of_points(network: Network, function: Callable[..., Any]) -> Callable[[np.ndarray], Any]:
    """The function on flat points, whether it takes these or the network's own inputs: the latter are tried first."""
    shapes, outputs = network.program.input_shapes, math.prod(network.program.output_shape)
    if len(shapes) == 1 and len(shapes[0]) == 1:
        return function

    def of_inputs(points: np.ndarray) -> Any:
        return function(*_split(network, points))

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
