"""`attnc.diagnose`: which of the papers' failure signatures attention shows, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnc.diagnosing.evidence import Evidence
from attnc.diagnosing.observing import Subject, of_module, of_network, points_allowed
from attnc.diagnosing.signatures import Symptom, signatures
from attnc.errors import InputError, real_number
from attnc.network import Network
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.function_target import CallableTarget
from attnc.targets.target import Target

POINTS = 4000
SHARE = 0.02
"""Of the target's range: the error that is tolerated where none is stated."""


@dataclass(frozen=True)
class Diagnosis:
    """The symptoms that were found; none if the error is within `eps` everywhere that was looked."""

    symptoms: tuple[Symptom, ...]
    max_error: float | None
    eps: float | None
    num_points: int
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        return not self.symptoms

    def __str__(self) -> str:
        seen = f"{self.num_points:,} points"
        if self.max_error is not None:
            seen += f", largest error {self.max_error:.3g}, eps {self.eps:.3g}"
        return "\n".join([f"{'healthy' if self.is_healthy else 'not healthy'} ({seen})", *map(str, self.symptoms)])


def diagnose(
    subject: Any,
    target: Target | Callable[..., Any] | None = None,
    *,
    eps: float | None = None,
    points: Any = None,
    seed: int = 0,
) -> Diagnosis:
    """Looks at attention at samples, and names what is wrong with it: see `signatures`.

    `subject` is a Network, a torch.nn.MultiheadAttention (points are (batch, tokens, width), attended from and to), or
    a torch module that maps points (batch, …) to (outputs, weights), the weights (batch, …, keys). `target` is what it
    should compute: a Target or a function of the points; that of a network's expression is known. `eps` is the error
    that is tolerated: the network's own, or 2 % of the target's range. `points` replace the sample of the box.
    Without a target no error is known, and only what the weights alone show is named.
    """
    if isinstance(subject, Network):
        looked = of_network(subject)
        known: Any = _target_of(subject, target)
        if not looked.num_layers:
            raise InputError("the network has no attention layer: there is nothing to diagnose")
        box: Box | None = subject.box if known is None else known.box
        eps = subject.eps if eps is None else eps
        count = points_allowed(subject, POINTS)
    elif _is_module(subject):
        looked, known, count = of_module(subject), target, POINTS
        box = target.box if isinstance(target, Target) else None
    else:
        raise InputError(f"diagnose takes a Network or a torch module, found a {type(subject).__name__}")
    x = _points(points, box, count, seed)
    if eps is not None and not real_number("eps", eps) > 0:
        raise InputError(f"eps must be a number > 0, found {eps!r}")
    return _diagnosed(looked, known, x, eps, box)


def _diagnosed(subject: Subject, target: Any, x: np.ndarray, eps: float | None, box: Box | None) -> Diagnosis:
    with np.errstate(all="ignore"):
        seen = subject.look(x)
        wanted = None if target is None else np.asarray(target(x), np.float64).reshape(len(x), -1)
        if wanted is not None and wanted.shape != seen.outputs.shape:
            raise InputError(f"the target gives {wanted.shape[1]} numbers a point, the network {seen.outputs.shape[1]}")
        tolerated = eps
        if wanted is not None and eps is None:
            tolerated = SHARE * float(np.ptp(wanted)) or SHARE
        flat = x.reshape(len(x), -1)
        evidence = Evidence(flat, _names(box, flat.shape[1]), seen, wanted, tolerated, box, subject)
        symptoms = signatures(evidence)
    error = None if wanted is None else float(np.abs(seen.outputs - wanted).max())
    return Diagnosis(tuple(symptoms), error, tolerated, len(x), evidence.facts)


def _target_of(network: Network, given: Any) -> Target | None:
    if isinstance(given, Target):
        if given.box.d != network.box.d:
            raise InputError(f"the target has {given.box.d} variables, the network {network.box.d}")
        return given
    if given is not None:
        return CallableTarget(given, network.box)
    if network.expression is None:
        raise InputError("the network was not made from an expression: give the target that it should compute")
    return ExpressionTarget(Expression.parse(network.expression), network.box)


def _is_module(subject: Any) -> bool:
    """Without importing torch: who has a module has imported it."""
    return any(
        (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module") for kind in type(subject).__mro__
    )


def _points(given: Any, box: Box | None, count: int, seed: int) -> np.ndarray:
    if given is not None:
        x = np.asarray(given, np.float64)
        if x.ndim < 2 or not len(x) or not np.isfinite(x).all():
            raise InputError(f"points must be finite, of shape (batch, …), found shape {x.shape}")
        return x
    if box is None:
        raise InputError("where should it be looked at? Give points, or a Target, which has a box")
    return sample_points(box if box.is_bounded else box.core(16.0), count, seed)


def _names(box: Box | None, count: int) -> tuple[str, ...]:
    return box.names if box is not None and box.d == count else tuple(f"x{i}" for i in range(count))
