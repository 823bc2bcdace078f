"""The functions that the docs measure and draw, on their boxes, and the observed error of a program."""

from __future__ import annotations

import functools
import math

import numpy as np

import attnc
from attnc import constructions
from attnc.engines.numpy_engine import NumpyEngine
from attnc.proofs.observed import observed_error

WAVE, WAVE_BOX = "sin(x)+cos(y)", [(-3, 3)] * 2
SPIKE, SPIKE_BOX = "exp(-20*(x**2+y**2))", [(-2, 2)] * 2
HAT = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.5, 1.5))
"""clip(x, 0, 1) on [−½, 3/2]: the truncation is in the box."""


def small_mlp() -> attnc.ReLUNetwork:
    rng, sizes = np.random.default_rng(0), [(8, 2), (8, 8), (1, 8)]
    weights, biases = [rng.normal(size=s) / 2 for s in sizes], [rng.normal(size=s[0]) / 2 for s in sizes]
    return attnc.ReLUNetwork(weights, biases, (-1, 1))


def centred(X: np.ndarray) -> np.ndarray:
    return np.tanh(X - X.mean(axis=1, keepdims=True))


def mixed(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return np.sin(X) * Y.mean(axis=1, keepdims=True)


SEQUENCE = attnc.SequenceTarget(centred, tokens=2, width=1, box=(-1, 1), lipschitz=0.7072)
"""On two tokens X − mean is (x0 − x1)/2 · (1, −1), which is 1/√2-Lipschitz from the 2-norm to the max-norm."""
PAIR = attnc.SequenceTarget(mixed, tokens=(1, 2), width=(1, 1), box=(-1, 1), lipschitz=1.0)
"""The gradient is (cos x·ȳ, sin x/2, sin x/2): its square is at most cos²x + sin²x/2 ≤ 1."""


def observe(target: attnc.targets.target.Target, built: constructions.Built, p: float = math.inf) -> float:
    """As for a certificate: the largest error at a dense sample (in L_p: by quadrature)."""
    engine = NumpyEngine(built.program)

    def evaluate(points: np.ndarray) -> np.ndarray:
        return engine(*target.split(points)).reshape(len(points), -1)

    return observed_error(evaluate, target, built.program.num_anchors, p)


def as_network(target: attnc.targets.target.Target, built: constructions.Built) -> attnc.Network:
    """A construction with parameters of its own as a network, for its picture."""
    from attnc.proofs.certificate import Certificate

    bound, method = (None, "estimate") if built.bound is None else (built.bound.value, "theorem")
    terms = () if built.bound is None else built.bound.terms
    claim = Certificate(bound, observe(target, built), terms, target.assumptions, "float64", method)
    return attnc.Network(
        built.program, claim, target.box, built.construction, target.text, None, dict(built.parameters)
    )


@functools.cache
def sweeps() -> dict[str, tuple[str, list[tuple[int, float, float]]]]:
    """name → (the quantity along the axis, [(its value, bound, observed)])."""

    def found(built: constructions.Built) -> tuple[float, float]:
        return built.bound.value, observe(HAT, built)

    def heads(H: int, n: int, **more: int) -> tuple[float, float]:
        return found(constructions.truncated_linear_heads(HAT, num_heads=H, num_tokens=n, **more))

    soft = {p: found(constructions.truncated_linear(HAT, num_anchors=p)) for p in (9, 17, 33, 65, 129, 257, 513)}
    hard = {p: found(constructions.truncated_linear(HAT, num_anchors=p, beta=1e4)) for p in soft}
    return {
        "one head, β = 2.72": ("p", [(p, *pair) for p, pair in soft.items()]),
        "one head, hard": ("p", [(p, *pair) for p, pair in hard.items()]),
        "n = 10 tokens, H heads": ("H", [(H, *heads(H, 10)) for H in (2, 4, 8, 16, 32, 64)]),
        "H = 8 heads, n tokens": ("n − 2", [(n - 2, *heads(8, n)) for n in (4, 6, 10, 18, 34, 66)]),
        "n = 10, H heads, s = 3": ("H", [(H, *heads(H, 10, sentinels=3)) for H in (2, 4, 8, 16, 32, 64)]),
    }
