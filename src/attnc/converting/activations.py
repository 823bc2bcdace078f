"""Activations by name, the keys that compute them, and the proven error of those keys as they are stored."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from attnc.constructions.fitting.circuit import Circuit
from attnc.constructions.fitting.gate import (
    ACTIVATIONS,
    ALL_REALS,
    FEW_EXPONENTIALS,
    GATES,
    OTHER_RECIPES,
    SELU_ALPHA,
    SELU_SCALE,
    SIGN_ERROR,
    Gate,
)
from attnc.constructions.fitting.search import tightened
from attnc.errors import InputError, positive_number
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.limits import time_limit
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import up
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.prover import ProofRequest
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression

GATE_PROOF_SECONDS = 20.0
"""Counted seconds of the proof of one gate. The proof then returns the best bound so far."""
FINER_ERRORS = (1.2e-7, 6e-7)
"""Errors that are tried before eps in float32, for keys that take one exponential. Two more keys cost a few percent of
the time, and MiniLM then drifts by 1.2 times its noise floor instead of 5 times."""
GATE_ATTEMPTS = 4
"""Maximum number of gates that are tried. Each is made for a quarter of the eps of the one before."""
SOFTSIGN_RANGE = 10_000.0
"""The largest |x| for which softsign is proved. Its tails fall like 1/x, and no finite number of keys follows them."""
SELU = (("scale", SELU_SCALE), ("alpha", SELU_ALPHA))


@dataclass(frozen=True)
class KnownActivation:
    """An elementwise function: the name of a gate and its parameters in a fixed order, ("elu", (("alpha", 1.0),))."""

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value:.6g}" for name, value in self.parameters)
        return f"{self.name}({inside})" if inside else self.name

    def expression(self, dtype: str) -> str:
        """Return the function as text. Its parameters are rounded as the framework rounds them in that dtype."""
        constants = SELU if self.name == "selu" else self.parameters
        return TEXTS[self.name](**{name: float(np.dtype(dtype).type(value)) for name, value in constants})

    def gate(self, eps: float, *, is_one_head: bool = True) -> Gate:
        """Return the gate of one head with the fewest keys and an error ≤ eps, or one that takes few exponentials."""
        make = GATES[self.name] if is_one_head else FEW_EXPONENTIALS.get(self.name, GATES[self.name])
        return make(eps, **dict(self.parameters))


@dataclass(frozen=True, eq=False)
class Solved:
    """Keys with |G(x) − f(x)| ≤ error for all x of `domain`, in exact arithmetic, with keys rounded to any of `dtypes`.

    `sign` is the inverse temperature of the first of two layers; only softsign has two. If `is_product`, the activation
    is x times the head: only hard-swish.
    """

    activation: KnownActivation
    keys: SoftHead[np.ndarray]
    error: float
    method: str  # "closed form" or "proof"
    dtypes: tuple[str, ...]
    lipschitz: float
    domain: tuple[float, float] = ALL_REALS
    sign: float | None = None
    is_product: bool = False

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys + (0 if self.sign is None else 2)

    @property
    def sign_layer(self) -> Solved:
        """The first layer of softsign: tanh(βx) by two keys, in place of the sign."""
        assert self.sign is not None
        sides = np.array([-1.0, 1.0])
        keys = SoftHead.of_one_variable(self.sign * sides, np.zeros(2), sides)
        return Solved(KnownActivation("tanh"), keys, 0.0, "closed form", self.dtypes, self.sign)

    def as_one_head(self) -> Solved:
        """Return the activation as one head, for programs, which have no product of a head with its query."""
        return solve(self.activation, self.error, self.dtypes, is_one_head=True) if self.is_product else self


def exact_number(value: float) -> str:
    """Return the decimal that equals the float exactly."""
    return f"({format(Decimal(value), 'f')})"


def _elu_text(scale: float, alpha: float, width: float) -> str:
    curve = f"{exact_number(scale)}*{exact_number(alpha)}*(exp(min(x, 0)/{exact_number(width)}) - 1)"
    return f"{exact_number(scale)}*max(x, 0) + {curve}"


def _softplus_text(beta: float) -> str:
    """Write softplus as max(x, 0) plus a rest, because the prover cannot reduce β·x/β to x if 1/β is rounded."""
    if math.frexp(beta)[0] == 0.5:
        return f"softplus({exact_number(beta)}*x)/{exact_number(beta)}"
    return f"max(x, 0) + softplus(-{exact_number(beta)}*abs(x))/{exact_number(beta)}"


TEXTS: dict[str, Callable[..., str]] = {
    **{name: lambda name=name: f"{name}(x)" for name in ACTIVATIONS},
    **{name: lambda text=text: text for name, (text, _) in OTHER_RECIPES.items()},
    "softplus": lambda beta=1.0: _softplus_text(beta),
    "logsigmoid": lambda: "-softplus(-x)",
    "leaky_relu": lambda slope: f"max(x, 0) + {exact_number(slope)}*min(x, 0)",
    "hardtanh": lambda lo=-1.0, hi=1.0: f"clip(x, {exact_number(lo)}, {exact_number(hi)})",
    "clamp_min": lambda lo: f"max(x, {exact_number(lo)})",
    "clamp_max": lambda hi: f"min(x, {exact_number(hi)})",
    "relu6": lambda: "clip(x, 0, 6)",
    "hardsigmoid": lambda: "clip(x/6 + 1/2, 0, 1)",
    "hardswish": lambda: "x*clip(x/6 + 1/2, 0, 1)",
    "soft_threshold": lambda threshold: f"x - clip(x, {exact_number(-threshold)}, {exact_number(threshold)})",
    "elu": lambda alpha=1.0: _elu_text(1.0, alpha, 1.0),
    "celu": lambda alpha=1.0: _elu_text(1.0, alpha, alpha),
    "selu": lambda scale, alpha: _elu_text(scale, alpha, 1.0),
    "softsign": lambda: "x/(1 + abs(x))",
}
"""Name of a gate → a function from the gate's parameters to the expression that the proof compares the gate with."""


@functools.lru_cache(maxsize=512)
def solve(activation: KnownActivation, eps: float, dtypes: tuple[str, ...], *, is_one_head: bool = False) -> Solved:
    """Return the cheapest keys whose proved error is ≤ eps in exact arithmetic, after rounding to each of the dtypes.

    Keys that take one exponential are cheapest, even if there are more of them. If none suffices, the fewest keys are.
    In float32 such keys have a smaller error than eps where a few more of them reach the noise of that arithmetic.
    """
    positive_number("eps", eps)
    if activation.name in FEW_EXPONENTIALS and not is_one_head:
        finer = [error for error in FINER_ERRORS if error < eps and "float32" in dtypes]
        for asked in (*finer, eps):
            with contextlib.suppress(InputError):
                return _solved(activation, asked, dtypes, is_one_head=False)
    return _solved(activation, eps, dtypes, is_one_head=True)


def _solved(activation: KnownActivation, eps: float, dtypes: tuple[str, ...], *, is_one_head: bool) -> Solved:
    def attempt(asked: float, failed: Sequence[Solved]) -> Solved | None:
        try:
            gate = activation.gate(asked, is_one_head=is_one_head)
        except InputError:
            if not failed:
                raise
            return None
        return _proved(activation, gate, dtypes, eps)

    found = tightened(eps, attempt, lambda asked, last: asked / 4, eps, GATE_ATTEMPTS)
    if found.met is not None:
        return found.met
    raise InputError(
        f"cannot prove {activation} to eps={eps:g} with keys stored as {' or '.join(dtypes)}: the least error "
        f"proved is {found.best.error:.2g}. Choose a larger eps"
        f"{', or a model in float64' if 'float32' in dtypes else ''}."
    )


def _proved(activation: KnownActivation, gate: Gate, dtypes: tuple[str, ...], eps: float) -> Solved:
    """Prove the keys of a gate. Those of softsign are its second layer, with inputs from 0 to SOFTSIGN_RANGE."""
    errors, method = list[float](), "closed form"
    proved_on = domain = ALL_REALS
    if gate.sign is not None:
        proved_on, domain = (0.0, SOFTSIGN_RANGE), (-SOFTSIGN_RANGE, SOFTSIGN_RANGE)
    for dtype in dtypes:
        keys = stored_keys(gate.keys, dtype)
        is_exact = all(map(np.array_equal, key_arrays(keys).values(), key_arrays(gate.keys).values()))
        if gate.is_proved and is_exact:
            errors.append(gate.error)
        elif gate.is_product:
            raise InputError(f"{activation}: {dtype} does not hold the keys of the product")
        else:
            errors.append(proved_error(keys, activation.expression(dtype), proved_on, gate.error, eps))
            method = "proof"
    error = max(errors) if gate.sign is None else float(up(max(errors) + up(SIGN_ERROR / gate.sign)))
    return Solved(activation, gate.keys, error, method, dtypes, gate.lipschitz, domain, gate.sign, gate.is_product)


def stored_keys(keys: SoftHead[np.ndarray], dtype: str) -> SoftHead[np.ndarray]:
    """Return the keys rounded to the dtype, as float64 arrays."""
    slopes, offsets, values, carried = (a.astype(dtype).astype(np.float64) for a in key_arrays(keys).values())
    return SoftHead.of_one_variable(slopes, offsets, values, None if keys.carried is None else carried)


def key_arrays(keys: SoftHead[np.ndarray]) -> dict[str, Float[np.ndarray, " keys"]]:
    """Return the slopes, offsets, values and carried parts of a head of one variable, one number per key."""
    carried = np.zeros(keys.num_keys) if keys.carried is None else keys.carried[:, 0, 0]
    return {"slopes": keys.slopes[:, 0], "offsets": keys.offsets, "values": keys.values[:, 0], "carried": carried}


def proved_error(keys: SoftHead[np.ndarray], text: str, domain: tuple[float, float], seen: float, eps: float) -> float:
    """Return a proved bound of |G − f| over the domain for these keys. It includes float64 rounding."""
    circuit = Circuit(["x"])
    program = circuit.build([circuit.apply(keys, circuit.input(0), name="gate")], (), "float64")
    target = ExpressionTarget(Expression.parse(text), Box.parse({"x": domain}))
    with quiet(), time_limit(counted=GATE_PROOF_SECONDS):
        found = LeavesProver().prove(program, target, ProofRequest(observed=seen, eps=eps))
    return float(found.bound)
