"""Least squares by Newton–Schulz steps on the prompt: tens of layers where gradient steps take hundreds.

The memory holds the prompt. The main stream holds a state token with the weights w, one token for each row m_r of a
matrix M that tends to the inverse of S = Σ x_i x_iᵀ, and a sink. All turns are equal. A turn is

    prompt     cross-attention, by difference heads (`differences`): the state gets g = Σ (w·x_i − y_i) x_i, and row r
               gets p_r = Σ (m_r·x_i) x_i, row r of MS. All tokens have one kind of score, v·x_i + ρ·y_i: the state has
               v = w and ρ = −1, and row r has v = σ m_r and ρ = 0
    scale      affine: p_r ← p_r/σ and g ← 2^⌊t/2⌋ g in turn t, so that all scores are of one size
    rows       attention over the rows: a token with p gets Σ_k p_k σ m_k. That is Mg for the state, and row r of MSM
    update     affine: w ← w − Mg, m_r ← 2m_r − (MSM)_r

A penalty λ_c is one more row of the prompt, √λ_c in column c and target 0. So the weights of the program depend on the
number of rows and columns, the number of turns and the condition, and on no number of the examples.

Theorem.  Let the trace of S be at most τ and its eigenvalues at least τ/κ, and M₀ = I/τ, w₀ = 0. Exact turns give
              |w_T − w*|_S = |(I − S/τ)^(2^T − 1) w*|_S ≤ (1 − 1/κ)^(2^T − 1) |w*|_S,   |v|_S² = v·Sv.
Proof.    E_t = I − S M_t obeys E_{t+1} = E_t², so E_t = (I − S/τ)^(2^t). The error of w is multiplied by E_t in turn t,
          and the exponents add up to 2^T − 1. All eigenvalues of S/τ are in [1/κ, 1].
Range.    Scores stay within |w·x_i − y_i| ≤ ‖y‖, because the S-norm of the error never grows, and within
          |m_r·x_i| ≤ √(M_rr) ≤ √(κ/τ), because MSM ≤ M. So σ = √(τ/κ) gives both one range. Row sums of MS are at most
          √(τ·M_rr), and entries of M at most κ/τ. In turn t the gradient is S(I − S/τ)^n w*, n = 2^t − 1, of norm at
          most max_s √s (1 − s/τ)^n ≤ √(τ/(2n + 1)), so that 2^⌊t/2⌋ g stays within √τ.
Rounding. A turn corrects the errors of the turns before: E_{t+1} = E_t² + δ, where δ grows like √κ times the rounding
          of a difference head, and w is left with an error of about that of one gradient times κ/τ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnc.errors import InputError
from attnc.incontext.differences import Differences, Sizes, choose, rounded_up
from attnc.incontext.domain import Domain
from attnc.incontext.prompt import ONE, SINK, TARGET, Prompt
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import gamma

SCORE_ROOM = 1.25
"""The factor by which scores may exceed their range in exact arithmetic."""
SETTLING = 5
"""Number of turns beyond log₂κ. After them the theorem's factor is at most e^−31."""


HEADS = 8
"""Number of pairs of difference heads. Measured on five data sets with condition 5e2 to 4e10: with 4 pairs the error of
the weights is 6 to 50 times that of 8 pairs, and with 6 pairs 1 to 3 times."""
MOST_GAIN = 2.0**24
"""The largest factor of a gradient. Rounding leaves gradients of about 1e-13, which stay small beside √τ."""
BITS = 160
"""Precision of the gradient in bits. Products of two numbers of float64 have 106 bits, and sums cancel 53."""
FINEST = 2.0**46
"""The largest condition. Beyond it roundings of float64 leave no digit of the weights."""


@dataclass(frozen=True)
class NewtonTask:
    """A fit of at most `prompt.rows` examples, penalty rows included, by Newton–Schulz steps.

    Columns have 2-norm at most 1, and so has the target. The smallest eigenvalue of S is at least weights/condition.
    """

    prompt: Prompt
    condition: float
    heads: int = HEADS

    loss: ClassVar[str] = "squared"
    mean: ClassVar[bool] = False
    l1: ClassVar[tuple[float, ...]] = ()
    iterate: ClassVar[str] = "v"
    token: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 1 <= self.condition <= FINEST:
            raise InputError(f"the condition is a number from 1 to {FINEST:.2g}, found {self.condition!r}")

    @property
    def trace(self) -> float:
        """The bound τ of the trace of S: the number of columns, whose squares add up to at most 1."""
        return float(self.prompt.num_weights)

    @property
    def turns(self) -> int:
        """The number of turns T."""
        return math.ceil(math.log2(self.condition)) + SETTLING

    @property
    def scale(self) -> float:
        """The factor σ of the rows of M, a power of two."""
        return math.ldexp(1.0, math.floor(math.log2(math.sqrt(self.trace / self.condition))))

    def gain(self, turn: int) -> float:
        """Return the factor of g in one turn, from 0. It gives Mg the relative accuracy that g has."""
        return min(math.ldexp(1.0, turn // 2), MOST_GAIN)

    @cached_property
    def over_prompt(self) -> tuple[Differences, float]:
        """The heads over the prompt, and the score of their sink."""
        rows, width = self.prompt.rows, self.prompt.num_weights + 1
        sizes = Sizes(rows, width, math.sqrt(self.trace), SCORE_ROOM, 2 * SCORE_ROOM)
        found = choose(sizes, self.heads, "float64")
        return found, found.sink(rows + 1, SCORE_ROOM, "float64")

    @cached_property
    def over_rows(self) -> tuple[Differences, float]:
        """The heads over the rows of M, and the score of their sink. Entries of g and of MS are at most √τ and 1."""
        weights = self.prompt.num_weights
        reach = SCORE_ROOM * math.sqrt(self.trace)
        found = choose(Sizes(weights, 1, 1.0, reach, reach), self.heads, "float64")
        return found, found.sink(weights + 2, reach, "float64")

    @property
    def penalty(self) -> tuple[float, ...]:
        """No penalty: those of a ridge are rows of the prompt."""
        return (0.0,) * self.prompt.num_weights

    @property
    def domain(self) -> Domain:
        """The prompts for which the program is built."""
        tau = self.trace
        return Domain(
            self.prompt, math.sqrt(tau), 1.0, start=0.0, L=tau, mu=tau / self.condition, has_penalty_rows=True
        )

    def program(self) -> Program:
        """Return the program. Its inputs are the first weights and the prompt, as those of `descent_program`."""
        return _NewtonBuilder(self).program()

    def tokens(
        self,
        X: Float[np.ndarray, "rows weights"],
        y: Float[np.ndarray, " rows"],
        penalty: Float[np.ndarray, " weights"],
    ) -> Float[np.ndarray, "rows width"]:
        """Return the prompt. Penalties that are not 0 are its last rows."""
        tokens = self.prompt.tokens(X, y)
        weights = self.prompt.num_weights
        if penalty.any():
            tokens[-weights:, :weights] = np.diag(np.sqrt(penalty))
        return tokens


@dataclass(frozen=True, eq=False)
class _NewtonBuilder:
    task: NewtonTask

    @cached_property
    def weights(self) -> tuple[str, ...]:
        return self.task.prompt.weight_names

    @cached_property
    def channels(self) -> tuple[str, ...]:
        parts = ("v", "p", "q", "row")
        return (*(f"{part}.{c}" for part in parts for c in self.weights), "rho", ONE, SINK)

    @property
    def tokens(self) -> int:
        """The state, the rows of M, and the sink."""
        return len(self.weights) + 2

    @property
    def rows(self) -> np.ndarray:
        return np.arange(1, len(self.weights) + 1)

    def program(self) -> Program:
        prompt, task = self.task.prompt, self.task
        place = AffineBuilder(prompt.rows, prompt.inputs, prompt.rows + 1, (*prompt.inputs, SINK))
        prompt.place(place, 0, 0, mean=False)
        over_prompt, over_rows = self._prompt_layer(), self._rows_layer()
        layers: list[Layer] = [self._begin()]
        for t in range(task.turns):
            turn = (over_prompt, self._scale(task.gain(t)), over_rows, self._update(task.gain(t)))
            layers += [replace(layer, name=f"{layer.name}{t + 1}") for layer in turn]
        outputs = {f"w.{c}": f"v.{c}" for c in self.weights}
        answer = reading("answer", self.tokens, self.channels, [0], outputs, "float64")
        shapes = ((prompt.num_weights,), (prompt.rows, len(prompt.inputs)))
        memory = (place.build("place"),)
        return check(Program((*layers, answer), shapes, shapes[0], memory))

    def _begin(self) -> Affine:
        names = [f"w.{c}" for c in self.weights]
        begin = AffineBuilder(1, names, self.tokens, self.channels)
        for k, c in enumerate(self.weights):
            begin.link(0, f"v.{c}", 0, f"w.{c}")
            begin.set(1 + k, f"v.{c}", self.task.scale / self.task.trace)
        self._set_constants(begin)
        return begin.build("begin")

    def _set_constants(self, layer: AffineBuilder) -> None:
        layer.set(0, "rho", -1.0)
        layer.set(np.arange(self.tokens), ONE, 1.0)
        layer.set(self.tokens - 1, SINK, 1.0)
        for k, c in enumerate(self.weights):
            layer.set(1 + k, f"row.{c}", 1.0)

    def _prompt_layer(self) -> Attention:
        prompt, (differences, C) = self.task.prompt, self.task.over_prompt
        attending = Attending(self.channels, (*prompt.inputs, SINK), "float64")
        score = {(f"v.{w}", c): 1.0 for w, c in zip(self.weights, prompt.regressors, strict=True)}
        keys = {(c, c): 1.0 for c in (*prompt.regressors, TARGET)}
        outputs = [(c, f"p.{w}") for w, c in zip(self.weights, prompt.regressors, strict=True)]
        heads = differences.sum_heads(attending, C, score | {("rho", TARGET): 1.0}, keys, outputs)
        return Attention("prompt", heads, self.channels, residual=True, cross=True)

    def _scale(self, gain: float) -> Affine:
        scale = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        kept = [channel for channel in self.channels if not channel.startswith("p.")]
        scale.copy(np.arange(self.tokens), np.arange(self.tokens), kept)
        for c in self.weights:
            scale.link(0, f"p.{c}", 0, f"p.{c}", gain)
            scale.link(self.rows, f"p.{c}", self.rows, f"p.{c}", 1 / self.task.scale)
        return scale.build("scale")

    def _rows_layer(self) -> Attention:
        """Let every token see the rows and the sink. The state is hidden as a key."""
        differences, C = self.task.over_rows
        seen = np.full(self.tokens, EVERY_QUERY, np.int32)
        seen[0] = 1
        mask = Mask(np.zeros(self.tokens, np.int32), seen)
        attending = Attending(self.channels, self.channels, "float64", mask)
        score = {(f"p.{c}", f"row.{c}"): 1.0 for c in self.weights}
        keys = {(f"row.{c}", f"row.{c}"): 1.0 for c in self.weights}
        outputs = [(f"v.{c}", f"q.{c}") for c in self.weights]
        heads = differences.sum_heads(attending, C, score, keys, outputs)
        return Attention("rows", heads, self.channels, residual=True)

    def _update(self, gain: float) -> Affine:
        update = AffineBuilder(self.tokens, self.channels, self.tokens, self.channels)
        for c in self.weights:
            update.link(0, f"v.{c}", 0, f"v.{c}")
            update.link(0, f"v.{c}", 0, f"q.{c}", -1 / (self.task.scale * gain))
            update.link(self.rows, f"v.{c}", self.rows, f"v.{c}", 2.0)
            update.link(self.rows, f"v.{c}", self.rows, f"q.{c}", -1.0)
        self._set_constants(update)
        return update.build("update")


def distance_bound(tokens: Float[np.ndarray, "rows width"], weights: Float[np.ndarray, " weights"]) -> Bound:
    """Bound |w − w*|₂ for least squares on the rows of a prompt. It is infinite if S is singular.

    For every matrix R, w − w* = R∇F(w) + (I − RS)(w − w*), so |w − w*| ≤ |R∇F(w)|/(1 − |I − RS|). R is the inverse of
    S in float64. Arb encloses ∇F(w). I − RS is computed in long double, where a sum of n products has a rounding error
    of at most γ_n times the sum of their absolute values.
    """
    d = len(weights)
    given = tokens[tokens.any(axis=1)]
    middle, radius = _gradient(given[:, :d], given[:, -1], weights)
    X, u = given[:, :d].astype(np.longdouble), float(np.finfo(np.longdouble).eps)
    S = X.T @ X
    try:
        R = np.linalg.inv(S.astype(np.float64)).astype(np.longdouble)
    except np.linalg.LinAlgError:
        R = np.full_like(S, np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.abs(R @ middle) + np.abs(R) @ (radius + gamma(d + 2, u) * np.abs(middle))
        of_S = np.abs(S) + gamma(len(X) + 2, u) * (np.abs(X).T @ np.abs(X))
        left = np.abs(np.eye(d) - R @ S) + gamma(len(X) + d + 4, u) * (np.eye(d) + np.abs(R) @ of_S)
        contraction, moved = (float(np.sqrt((part**2).sum())) for part in (left, step))
    is_inverse = contraction < 1  # false for NaN
    value = moved / (1 - contraction) if is_inverse else math.inf
    return rounded_up(("optimality", value, "the distance that a Newton step would go"))


def _gradient(
    X: Float[np.ndarray, "rows weights"], y: Float[np.ndarray, " rows"], w: Float[np.ndarray, " weights"]
) -> tuple[Float[np.ndarray, " weights"], Float[np.ndarray, " weights"]]:
    """Return the middle and the radius of an enclosure of Xᵀ(Xw − y)."""
    import flint

    before, flint.ctx.prec = flint.ctx.prec, BITS
    try:
        A = flint.arb_mat(X.tolist())
        found = A.transpose() * (A * flint.arb_mat(w[:, None].tolist()) - flint.arb_mat(y[:, None].tolist()))
        entries = [found[i, 0] for i in range(len(w))]
        middle = [float(entry.mid()) for entry in entries]
        off = [entry - flint.arb(m) for entry, m in zip(entries, middle, strict=True)]
        return np.array(middle), np.array([float(one.abs_upper()) * (1 + 2**-50) for one in off])
    finally:
        flint.ctx.prec = before
