"""`attnc.diagnose` finds the papers' failure signatures that attention shows, and names the parameter to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import attnc
from attnc_lab.signatures import Evidence, Observation, Subject, Symptom, signatures

NUM_POINTS = 4000
"""Number of points of a sample: 63 per axis of a square. Half of them are on a grid."""
TOLERATED_SHARE = 0.02
"""The share of the target's range that is tolerated as an error if no eps is given."""
FAR_OUT = 16.0
"""An infinite box is sampled up to this distance from 0. The usual activations are flat there."""
RECORDED_BYTES = 2**29
"""Maximum size of the recorded attention maps, in bytes. The sample is thinned to meet it."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `attnc.diagnose`.

    Attributes
    ----------
    symptoms : tuple of Symptom
        The failure signatures that were found. There are none if the error is within `eps` at every point.
    max_error : float or None
        The largest error at the points; None without a target.
    eps : float or None
        The error that was tolerated.
    num_points : int
        The number of points.
    facts : mapping
        The median peak of the keys, the βh² that follows from it, and the number of cells.

    Examples
    --------
    >>> import attnc
    >>> found = attnc.diagnose(attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1))
    >>> found.is_healthy, found.symptoms
    (True, ())
    """

    symptoms: tuple[Symptom, ...]
    max_error: float | None
    eps: float | None
    num_points: int
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Whether no symptom was found.

        Examples
        --------
        >>> import attnc
        >>> attnc.Diagnosis(symptoms=(), max_error=1e-3, eps=0.1, num_points=100).is_healthy
        True
        """
        return not self.symptoms

    def __str__(self) -> str:
        seen = f"{self.num_points:,} points"
        if self.max_error is not None:
            seen += f", largest error {self.max_error:.3g}, eps {self.eps:.3g}"
        return "\n".join([f"{'healthy' if self.is_healthy else 'not healthy'} ({seen})", *map(str, self.symptoms)])


def diagnose(
    subject: Any,
    target: attnc.Target | Callable[..., Any] | None = None,
    *,
    eps: float | None = None,
    points: Any = None,
    seed: int = 0,
) -> Diagnosis:
    """Observe attention at sample points, and return its failure signatures.

    Parameters
    ----------
    subject : Network or torch module
        A Network; or a torch.nn.MultiheadAttention, which attends from and to points (batch, tokens, width); or a torch
        module that maps points (batch, …) to (outputs, weights), where weights are (batch, …, keys).
    target : Target or callable, optional
        The function that the subject should compute. A network that was made from an expression needs none. Without a
        target no error is known, and only signatures that the weights show are named.
    eps : float, optional
        The tolerated error. The default is the network's own eps, or 2 % of the target's range.
    points : array, optional
        Points (batch, …) that replace the sample of the box.
    seed : int
        The seed of the sample.

    Returns
    -------
    Diagnosis
        The symptoms, each with evidence, place and remedy. `is_healthy` is True if there are none.

    Raises
    ------
    InputError
        If the subject is neither a Network nor a torch module, has no attention, or does not fit the target or points.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("sin(x)", {"x": (-3, 3)})
    >>> net = attnc.compile(target, eps=0.2, construction="max_affine")
    >>> print(attnc.diagnose(net).is_healthy)
    True
    >>> print(attnc.diagnose(net, eps=1e-3).symptoms[0].name)
    oscillation
    """
    if isinstance(subject, attnc.Network):
        known: Any = _target_of(subject, target)
        looked = _of_network(subject)
        box: attnc.Box | None = known.box
        eps = subject.eps if eps is None else eps
        count = _points_allowed(subject) if points is None else NUM_POINTS
    elif _is_module(subject):
        looked, known, count = _of_module(subject), target, NUM_POINTS
        box = target.box if isinstance(target, attnc.Target) else None
    else:
        raise attnc.InputError(f"diagnose takes a Network or a torch module, found a {type(subject).__name__}")
    x = _points(points, box, count, seed)
    if eps is not None and not (isinstance(eps, int | float) and 0 < eps < math.inf):
        raise attnc.InputError(f"eps must be a number > 0, found {eps!r}")
    return _diagnosed(looked, known, x, eps, box)


def _diagnosed(subject: Subject, target: Any, x: np.ndarray, eps: float | None, box: attnc.Box | None) -> Diagnosis:
    with np.errstate(all="ignore"):
        seen = subject.look(x)
        wanted, error, tolerated = np.full_like(seen.outputs, math.nan), None, math.inf
        if target is not None:
            wanted = np.asarray(target(x), np.float64).reshape(len(x), -1)
            if wanted.shape != seen.outputs.shape:
                raise attnc.InputError(
                    f"the target gives {wanted.shape[1]} numbers per point, the network {seen.outputs.shape[1]}"
                )
            error = float(np.abs(seen.outputs - wanted).max())
            tolerated = eps or TOLERATED_SHARE * float(np.ptp(wanted)) or TOLERATED_SHARE
        flat = x.reshape(len(x), -1)
        known = box if box is not None and box.d == flat.shape[1] else None
        evidence = Evidence(flat, seen, wanted, tolerated, known, subject)
        symptoms = signatures(evidence)
    return Diagnosis(tuple(symptoms), error, eps if target is None else tolerated, len(x), evidence.facts)


def _target_of(network: attnc.Network, given: Any) -> attnc.Target:
    if isinstance(given, attnc.Target):
        if given.box.d != network.box.d:
            raise attnc.InputError(f"the target has {given.box.d} variables, the network {network.box.d}")
        return given
    if given is None and network.expression is None:
        raise attnc.InputError("the network was not made from an expression: give the target that it should compute")
    return attnc.as_target(network.expression if given is None else given, network.box.as_dict())


def _is_module(subject: Any) -> bool:
    """Whether this is a torch module, without importing torch: the caller has imported it to make one."""
    return any(
        (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module") for kind in type(subject).__mro__
    )


def _points(given: Any, box: attnc.Box | None, count: int, seed: int) -> np.ndarray:
    if given is not None:
        x = np.asarray(given, np.float64)
        if x.ndim < 2 or not len(x) or not np.isfinite(x).all():
            raise attnc.InputError(f"points must be finite, of shape (batch, …), found shape {x.shape}")
        return x
    if box is None:
        raise attnc.InputError("there are no points to observe: give points, or a Target, which has a box")
    return _sample(box if box.is_bounded else box.core(FAR_OUT), count, np.random.default_rng(seed))


def _sample(box: attnc.Box, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return sorted points: half on a grid with the corners (in many dimensions: random corners), half at random."""
    per_axis = int((count / 2) ** (1 / box.d))
    if per_axis < 2:
        unit = rng.integers(0, 2, (count // 2, box.d)).astype(float)
    else:
        unit = np.stack(np.meshgrid(*[np.linspace(0, 1, per_axis)] * box.d), axis=-1).reshape(-1, box.d)
    unit = np.concatenate([unit, rng.random((max(1, count - len(unit)), box.d))])
    points = np.clip(box.lo + unit * box.widths, box.lo, box.hi)
    return points[np.argsort(points[:, 0], kind="stable")]


def _of_network(network: attnc.Network) -> Subject:
    """Observe the heads of the last attention layer. In a deep program the earlier layers compute its inputs."""
    program = network.program
    layers = [layer for layer in program.unrolled_layers if isinstance(layer, attnc.Attention)]
    if not layers:
        raise attnc.InputError("the network has no attention layer: there is nothing to diagnose")

    def look(points: np.ndarray) -> Observation:
        inputs = _inputs(program, points)
        outputs, cache = network.run(*inputs, cache=True, outside="allow", max_bytes=4 * RECORDED_BYTES)
        name = layers[-1].name
        heads = [cache[f"{name}.head{h}.pattern"] for h in range(len(layers[-1].heads))]
        finite = [found[np.isfinite(found)] for key, found in cache.items() if key.endswith(".scores")]
        scores = [np.abs(found).max(initial=0.0) for found in finite]
        return Observation(_flat(outputs), [_per_query(weights) for weights in heads], float(max(scores)))

    def sharpened(factor: float, points: np.ndarray) -> np.ndarray:
        harder = replace(program, layers=tuple(_scaled(layer, factor) for layer in program.unrolled_layers))
        return _flat(harder(*_inputs(program, points)))

    return Subject(look, sharpened, float(np.finfo(network.dtype).eps) / 2)


def _points_allowed(network: attnc.Network) -> int:
    """Return the number of points whose attention maps can be recorded, estimated from one point."""
    box = network.box.core(FAR_OUT)
    recorded = network.run(*_inputs(network.program, (box.lo / 2 + box.hi / 2)[None]), cache=True).cache
    per_point = 4 * sum(array.nbytes for array in recorded.values())  # keys and values take memory too
    return int(max(64, min(NUM_POINTS, RECORDED_BYTES // max(1, per_point))))


def _inputs(program: attnc.Program, points: np.ndarray) -> list[np.ndarray]:
    """Return flat points as the inputs that a program takes."""
    sizes = [math.prod(shape) for shape in program.input_shapes]
    parts = np.split(points.reshape(len(points), -1), np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, program.input_shapes, strict=True)]


def _of_module(module: Any) -> Subject:
    """Observe torch.nn.MultiheadAttention on its own input, or a module that returns (outputs, weights).

    The weights are (batch, …, keys) and sum to 1 over the last axis. The axes between may be queries and heads.
    """
    import torch
    from torch import nn

    parameter = next(module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype

    def look(points: np.ndarray) -> Observation:
        x = torch.as_tensor(points).to(dtype)
        with torch.no_grad():
            if isinstance(module, nn.MultiheadAttention):
                made = module(x, x, x, need_weights=True, average_attn_weights=False)
            else:
                made = module(x)
        if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, torch.Tensor) for part in made)):
            raise attnc.InputError(
                f"{type(module).__name__} must return (outputs, attention weights) for a batch of points; found "
                f"{type(made).__name__}. Wrap it in a module that does, or give a torch.nn.MultiheadAttention."
            )
        outputs, weights = (part.double().numpy() for part in made)
        if len(outputs) != len(points) or len(weights) != len(points) or weights.ndim < 2:
            raise attnc.InputError(
                f"{type(module).__name__} returned shapes {outputs.shape} and {weights.shape} for {len(points)} "
                "points; outputs are (batch, …), weights (batch, …, keys)"
            )
        if isinstance(module, nn.MultiheadAttention):
            heads = list(np.moveaxis(weights, 1, 0))
        else:
            heads = [weights.reshape(len(weights), -1, weights.shape[-1])]
        return Observation(_flat(outputs), [_per_query(head) for head in heads], None)

    return Subject(look, None, torch.finfo(dtype).eps / 2)


def _scaled(layer: Any, factor: float) -> Any:
    if not isinstance(layer, attnc.Attention):
        return layer
    heads = tuple(replace(head, W_K=(head.W_K * factor).astype(head.W_K.dtype)) for head in layer.heads)
    return replace(layer, heads=heads)


def _flat(outputs: np.ndarray) -> np.ndarray:
    return np.asarray(outputs, np.float64).reshape(len(outputs), -1)


def _per_query(weights: np.ndarray) -> np.ndarray:
    """Map (points, queries, keys) to (points, keys): the weights of the query whose largest weight is smallest."""
    weights = np.asarray(weights, np.float64)
    least = np.nan_to_num(weights.max(axis=-1), nan=0.0).argmin(axis=1)
    return weights[np.arange(len(weights)), least]
