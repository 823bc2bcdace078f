"""How far the channels of a checkpoint, as transformers computes it in float32, are from those of its program.

The checkpoint has streams ŝ = B·(z + e + l) + r. Here z is the state of the program in channels, and e are the errors
of results, which the certificate follows from head to head. The leaks l are written by heads into channels that are not
theirs, and r, the drift, is the rounding of embeddings, output projections and residuals. For every head this bounds

    noise ≥ |what the parts of the head write into its channel − Σ_k softmax_k(a_k·q + c_k)·v_k|

where q is the head's query component at the state z + e. A certificate of the program with this much noise in every
channel (`ProofRequest.noise`) is then a certificate of the checkpoint. The terms, for a part with the query vector Q̂,
keys K̂_k and values V̂_k in its own space of d dimensions, and u = 2^−24:

    stored      the scores that the stored numbers define, as a form in z + e for every key, minus a_k·q + c_k: η_k
    keys        K̂_k errs by γ_width of |W_K||ŝ_k|, by the drift of prefix tokens, and by what heads wrote into them: η_k
    products    γ_d of |Q̂||K̂_k|: η_k
    queries     Q̂ errs by γ_width·|W_Q|₂|ŝ|₂ and |W_Q|₂·drift. With K̂_k = a_k·X_a + c_k·X_c + rest, this is a shift of q
                by δ and of the coefficient of c_k by θ, up to a rest: a_k·δ + θ·c_k = a_k·(δ − θq) + θ·s_k
    weights     this changes weights by factors e^{±x_k}, x_k = η_k + (θ + u)·gap_k, and averages by at most
                Σ p_k τ_k |v_k − A| / (1 − Σ p_k τ_k), τ_k = e^{x_k}(1 + 2Ku) − 1. The shift of q adds (δ + θ|q|)·|A′|
    values      γ_width of |W_V||ŝ_k|, the stored values against v_k, γ of the sum over keys
    silence     tokens that are no keys have scores at least LEAST_GAP below the largest one

Two heads that cancel are bounded in the same way, and their sum goes into the drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attnc.errors import ProgramError
from attnc.exports.stock_layout import CONTEXT, ENERGY, LEAST_PINNED, ONE, Checkpoint, StockHead
from attnc.groundtruth.disguises import DECOY, PART, Model
from attnc.groundtruth.running import AttentionWeights
from attnc.ir.rounding import NEGLIGIBLE
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, gamma, up

U = UNIT_ROUNDOFF["float32"]
PRODUCT_ERROR, WIDEST = 2.0**-42, 256
"""Relative error of three float64 products of matrices in a row, up to this width, in terms of the products of absolute
values: 3·γ_256 < 2^−43."""
LEAST_GAP = 100.0
"""Least distance of the scores of silent tokens below the largest score. All tokens of a context then have together a
weight below CONTEXT·e^−100 < 2^−129."""
LARGEST_NOISE = 0.25
"""The largest noise of a channel for which the bounds hold: sizes of channels include this much. More is refused."""
INTERVAL_ROOM = 2.0**-4
"""The bounds hold for arguments up to this share of an interval beyond its ends."""
SMALL_COLUMN = 1e-5
"""A head writes less than this share of its largest value into most dimensions: only rounding."""
FLUSH = 2.0**-100
"""A norm multiplies by a power of two and by its inverse: a number below 2^−149·2^m, m ≤ 48, may be lost."""
MOST_RANGES = 8192
LARGEST_COUNTED = 200.0
"""Larger exponents count as this number. Bounds are then larger than distances of values, which are taken instead."""
FINE = 0.02
"""Cells are halved until all weights together grow by at most FINE on each, or until there are MOST_RANGES. Any cells
are sound."""


@dataclass(frozen=True)
class ChannelDeviations:
    """The noise of every channel that heads write, the error of the output, and m: the pinned channel holds 2^m."""

    noise: dict[str, float]
    output: float
    pinned: int


@dataclass(frozen=True, eq=False)
class _Line:
    """A head as a function of its query component q in [lo, hi]: scores a_k·q + c_k."""

    a: Float[np.ndarray, " keys"]
    c: Float[np.ndarray, " keys"]
    lo: float
    hi: float

    @property
    def reach(self) -> float:
        return max(abs(self.lo), abs(self.hi))


def deviations(
    plain: Model, structure: Model, stored: Model, checkpoint: Checkpoint, intervals: Mapping[str, tuple[float, float]]
) -> ChannelDeviations:
    """Bound the noise of all channels of a stored model.

    Parameters
    ----------
    plain : Model
        The model without a disguise: the numbers of the program.
    structure : Model
        The restructured model, in the plain basis. Its basis is the identity.
    stored : Model
        The model as it is stored, in its own basis.
    checkpoint : Checkpoint
        The plain checkpoint, whose heads are those of the program.
    intervals : mapping
        For every head, the interval of its query component.

    Raises
    ------
    ProgramError
        If the stored numbers are too far from the program: if a silent token may be heard, or the noise exceeds
        LARGEST_NOISE.
    """
    return _Bounding(plain, structure, stored, checkpoint, intervals).walk()


class _Bounding:
    def __init__(
        self,
        plain: Model,
        structure: Model,
        stored: Model,
        checkpoint: Checkpoint,
        intervals: Mapping[str, tuple[float, float]],
    ) -> None:
        self.plain, self.structure, self.stored, self.intervals = plain, structure, stored, intervals
        self.heads = {head.name: head for head in checkpoint.network.heads}
        self.box, self.n = checkpoint.network.box, stored.width
        if self.n > WIDEST:
            raise ProgramError(f"the stream is {self.n} wide, and bounds of its rounding hold up to {WIDEST}")
        self.B, self.R = stored.basis, stored.dual
        self.abs_B = np.abs(self.B)
        F = np.abs(np.eye(self.n) - self.R @ self.B) + PRODUCT_ERROR * np.abs(self.R) @ self.abs_B
        self.off = float(F.sum(axis=1).max())
        if not self.off < 2.0**-20:
            raise ProgramError(f"the dual basis is not inverse to the basis: it is off by {self.off:.3g}")
        self.gram = np.abs(self.B.T @ self.B) + PRODUCT_ERROR * self.abs_B.T @ self.abs_B
        self.E, self.z = stored.embedding.copy(), structure.embedding.copy()
        self.E[:, stored.pinned] = self.z[:, stored.pinned] = 0.0
        self._require_pinned()
        self.still = self.z[structure.query]  # the part of the state of query tokens that does not move
        self.moving, self.leaked, self.written = np.zeros((3, self.n))
        self.drift, self.prefix_drift = np.full((2, self.n), FLUSH)
        fed = np.abs(self.E[stored.query])
        self.drift += self._misplaced(stored.query, structure.query)
        for word, new, size in zip(structure.variables, stored.variables, self.box.magnitude, strict=True):
            self.moving += size * np.abs(self.z[word])
            self.drift += size * self._misplaced(new, word)
            fed = fed + size * np.abs(self.E[new])
        self.drift += gamma(len(stored.variables) + 2, U) * fed
        self.noise: dict[str, float] = {}
        self.largest = 0.0

    def _misplaced(self, word: int, at: int) -> Float[np.ndarray, " width"]:
        """Bound the distance of a stored embedding from B·z."""
        return np.abs(self.E[word] - self.B @ self.z[at]) + PRODUCT_ERROR * self.abs_B @ np.abs(self.z[at])

    def _require_pinned(self) -> None:
        """Raise ProgramError if a head reads or writes the pinned channel, or if the basis moves it."""
        pin, unit = self.stored.pinned, np.eye(self.n)[self.stored.pinned]
        read = any(W[..., pin].any() for of in self.stored.layers for W in (of.W_Q, of.W_K, of.W_V))
        is_mixed = any((M[pin] != unit).any() or (M[:, pin] != unit).any() for M in (self.B, self.R))
        if read or is_mixed or any(of.W_O[:, pin].any() for of in self.stored.layers):
            raise ProgramError("a head reads or writes the pinned channel, or the basis moves it")

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def reach(self) -> Float[np.ndarray, " width"]:
        """The largest absolute values of the channels of query tokens, the leaks of heads included."""
        return np.abs(self.still) + self.moving + self.leaked

    @property
    def query_sizes(self) -> Float[np.ndarray, " width"]:
        """The largest absolute values of the stream of query tokens."""
        return (self.abs_B @ self.reach + self.drift) * (1 + 2.0**-40)

    @property
    def query_length(self) -> float:
        """Bound the 2-norm of the stream of query tokens."""
        by_gram = math.sqrt(float(self.reach @ self.gram @ self.reach)) + _length(self.drift)
        return _up(min(by_gram, _length(self.query_sizes)))

    @property
    def junk_sizes(self) -> Float[np.ndarray, " width"]:
        """The largest absolute changes of tokens of the prefix by heads and rounding."""
        return (self.abs_B @ self.written + self.prefix_drift) * (1 + 2.0**-40)

    @property
    def prefix_length(self) -> float:
        longest = max(_length(self.E[word]) for word in self.stored.tokens)
        by_gram = math.sqrt(float(self.written @ self.gram @ self.written)) + _length(self.prefix_drift)
        return _up(longest + min(by_gram, _length(self.junk_sizes)))

    # --- the walk -----------------------------------------------------------------------------------------------------

    def walk(self) -> ChannelDeviations:
        for i, of in enumerate(self.stored.layers):
            self._layer(i, of)
        energy = max(self.largest, self.query_length**2, self.prefix_length**2)
        pinned = max(LEAST_PINNED, math.ceil(math.log2(energy / ENERGY) / 2) + 1)
        return ChannelDeviations(self.noise, self._output(), pinned)

    def _output(self) -> float:
        """Bound the error of the output, at the exact state: its stored coefficients, its rounding, and the drift."""
        read = self.E[self.stored.output]
        wanted = np.zeros(self.n)
        for name, dimension in self.plain.dimensions.items():
            if c := self.plain.embedding[self.plain.output, dimension]:
                wanted[self.structure.dimensions[name]] += c
        found = np.abs(read @ self.B) + PRODUCT_ERROR * np.abs(read) @ self.abs_B
        off = np.abs(read @ self.B - wanted) + PRODUCT_ERROR * np.abs(read) @ self.abs_B
        rounding = gamma(max(1, int(np.count_nonzero(read))), U) * self._product_size(
            read[None], self.query_sizes, self.query_length
        )
        total = off @ self.reach + found @ self.leaked + rounding[0] + np.abs(read) @ self.drift
        return _up(float(total))

    @staticmethod
    def _product_size(
        W: Float[np.ndarray, "rows width"], sizes: Float[np.ndarray, " width"], length: float
    ) -> Float[np.ndarray, " rows"]:
        """Bound Σ_j |W_ij s_j| for a stream of these sizes and of at most this length."""
        return np.minimum(np.abs(W) @ sizes, np.linalg.norm(W, axis=1) * length) * (1 + 2.0**-40)

    def _layer(self, i: int, of: AttentionWeights) -> None:
        self.largest = max(self.largest, self.query_length**2, self.prefix_length**2)
        parts: dict[str, list[tuple[np.ndarray, float]]] = {}
        pairs: dict[str | None, list[np.ndarray]] = {}
        outputs, leaks, written = np.zeros((3, self.n))
        for h, role in enumerate(self.stored.roles[i]):
            part = _Part(self, i, h, of)
            sizes = part.written
            written += sizes
            outputs += np.abs(of.W_O[h]) @ part.largest_values
            if role.kind == PART and role.head is not None:
                head = self.heads[role.head]
                own = self.structure.dimensions[head.writes[0]]
                error = part.error(*self._line(head), part.values[:, own]) + part.value_error[own]
                parts.setdefault(role.head, []).append((part.values[:, own], error))
                leaks += np.where(np.arange(self.n) == own, 0.0, sizes)
            elif role.kind == DECOY and role.head is not None:
                leaks += part.errors(*self._decoy(i, h)) + part.value_error
                pairs.setdefault(role.head, []).append(part.values)
            else:
                leaks += sizes
        for first, second in pairs.values():
            leaks += np.abs(first + second).max(axis=0) + PRODUCT_ERROR * (np.abs(first) + np.abs(second)).max(axis=0)
        for name, found in parts.items():
            self._record(self.heads[name], [values for values, _ in found], sum(error for _, error in found))
            own = self.structure.dimensions[self.heads[name].writes[0]]
            self.moving[own] = np.abs(self.heads[name].keys.values).max() + LARGEST_NOISE
        # A sum over heads rounds once per column of W_O that is not zero, and the residual once more.
        columns = int(of.W_O.any(axis=1).sum())
        rounding = gamma(max(1, columns), U) * outputs
        is_changed = outputs > 0
        self.leaked = self.leaked + leaks
        self.drift = self.drift + np.where(is_changed, rounding + 1.01 * U * self.query_sizes, 0.0)
        self.written = self.written + written
        largest = np.abs(self.E[self.stored.tokens]).max(axis=0) + self.junk_sizes
        self.prefix_drift = self.prefix_drift + np.where(is_changed, rounding + 1.01 * U * largest, 0.0)

    def _record(self, head: StockHead, values: list[np.ndarray], error: float) -> None:
        i, h = self._place(head)
        of, order = self.plain.layers[i], list(self.stored.keys)
        tokens = self.plain.embedding[list(self.plain.prefix)][order]
        wanted = (tokens @ of.W_V[h].T @ of.W_O[h].T)[:, self.plain.dimensions[head.writes[0]]]
        off = np.abs(sum(values, -wanted)).max()
        size = np.abs(wanted).max() + sum(np.abs(each).max() for each in values)
        noise = _up(error + float(off) + PRODUCT_ERROR * float(size))
        if not noise <= LARGEST_NOISE:
            raise ProgramError(f"the noise of {head.writes[0]} may be {noise:.3g}, more than {LARGEST_NOISE}")
        self.noise[head.writes[0]] = noise

    # --- the heads of the program -------------------------------------------------------------------------------------

    def _place(self, head: StockHead) -> tuple[int, int]:
        ((i, h),) = self.plain.heads_of(head.name)
        return i, h

    def _line(self, head: StockHead) -> tuple[_Line, np.ndarray]:
        """Return a head of the program as a function of its query component, and the forms of its scores."""
        i, h = self._place(head)
        lo, hi = self.intervals[head.name]
        room = INTERVAL_ROOM * (hi - lo)
        line, forms = self._of_model(self.plain, i, h, lo - room, hi + room)
        moved = np.zeros((len(forms), self.n))
        for name, dimension in self.plain.dimensions.items():
            if forms[:, dimension].any():
                moved[:, self.structure.dimensions[name]] += forms[:, dimension]
        return line, moved

    def _decoy(self, i: int, h: int) -> tuple[_Line, np.ndarray]:
        """Return a head that is no part of the program, as a function of its query component."""
        read = self.structure.layers[i].W_Q[h][0] / math.sqrt(self.structure.d_head)
        middle, half = float(read @ self.still), float(np.abs(read) @ self.moving) * (1 + LARGEST_NOISE)
        return self._of_model(self.structure, i, h, middle - half, middle + half)

    def _of_model(self, model: Model, i: int, h: int, lo: float, hi: float) -> tuple[_Line, np.ndarray]:
        """Read a head off a model in the plain basis. Its query has one component, and the constant 1 as a second."""
        of, order = model.layers[i], self.stored.keys if model is self.plain else range(len(model.prefix))
        tokens = model.embedding[list(model.prefix)][list(order)]
        K, W_Q = tokens @ of.W_K[h].T, of.W_Q[h] / math.sqrt(of.d_head)
        one = np.zeros(self.n)
        one[model.dimensions[ONE]] = 1.0
        if W_Q[2:].any() or (W_Q[1] != one).any():
            raise ProgramError(f"head {h} of layer {i} has more than one input")
        return _Line(K[:, 0], K[:, 1], lo, hi), K[:, :2] @ W_Q[:2]


class _Part:
    """One head of the stored model: its keys and values in its own space, with bounds of their errors."""

    def __init__(self, bounding: _Bounding, i: int, h: int, of: AttentionWeights) -> None:
        self.of, b = bounding, bounding
        W_Q, W_K, W_V, W_O = of.W_Q[h], of.W_K[h], of.W_V[h], of.W_O[h]
        self.name, self.W_Q, self.W_K, self.scale = f"L{i}H{h}", W_Q, W_K, 1 / math.sqrt(of.d_head)
        self.in_query = W_Q @ b.B
        self.dq = self._moving_error(W_Q)
        self.q = np.abs(self.in_query) @ b.reach + PRODUCT_ERROR * np.abs(W_Q) @ b.abs_B @ b.reach + self.dq
        self.K, self.dK = self._projected(W_K)
        V, dV = self._projected(W_V)
        write = b.R @ W_O  # per dimension of the plain stream
        write_off = 2 * b.off * np.abs(write).max(axis=0) + PRODUCT_ERROR * np.abs(b.R) @ np.abs(W_O)
        self.values = V @ write.T
        of_queries = (
            np.abs(W_V @ b.B) @ b.reach + PRODUCT_ERROR * np.abs(W_V) @ b.abs_B @ b.reach + self._moving_error(W_V)
        )
        self.largest_values = np.maximum(np.abs(V).max(axis=0) + dV.max(axis=0), of_queries)  # padding sees queries
        sums = gamma(2 * len(V) + 8, U)
        self.value_error = (np.abs(write) + write_off) @ (dV.max(axis=0) + sums * self.largest_values)
        self.value_error += write_off @ self.largest_values + PRODUCT_ERROR * np.abs(write) @ self.largest_values
        silent = 4 * CONTEXT * math.exp(-LEAST_GAP)
        self.value_error += silent * (np.abs(write) @ self.largest_values)
        self.value_error *= 1 + 2.0**-20
        self.written = (np.abs(write) + write_off) @ self.largest_values * (1 + 2.0**-20) + self.value_error

    def _moving_error(self, W: Float[np.ndarray, "d_head width"]) -> Float[np.ndarray, " d_head"]:
        """Bound the error of a projection of query tokens: its rounding, leaks and drift."""
        b = self.of
        rounding = _gammas(W) * b._product_size(W, b.query_sizes, b.query_length)
        leaked = (np.abs(W @ b.B) + PRODUCT_ERROR * np.abs(W) @ b.abs_B) @ b.leaked
        return (rounding + leaked + b._product_size(W, b.drift, _length(b.drift))) * (1 + 2.0**-30)

    def _projected(self, W: Float[np.ndarray, "d_head width"]) -> tuple[np.ndarray, np.ndarray]:
        """Return the projections of the prefix tokens, and bounds of their errors in transformers."""
        b = self.of
        E = b.E[list(b.stored.prefix)]
        junk = b._product_size(W, b.junk_sizes, _length(b.junk_sizes))
        error = _gammas(W) * (np.abs(E) @ np.abs(W).T + junk) + PRODUCT_ERROR * np.abs(E) @ np.abs(W).T
        heard = (np.abs(W @ b.B) + PRODUCT_ERROR * np.abs(W) @ b.abs_B) @ b.written
        heard = heard + b._product_size(W, b.prefix_drift, _length(b.prefix_drift))
        return E @ W.T, (error + heard) * (1 + 2.0**-30)

    def error(
        self, line: _Line, forms: Float[np.ndarray, "prefix width"], values: Float[np.ndarray, " prefix"]
    ) -> float:
        """Bound the change of the average of these values that errors of the weights cause.

        `forms` are the scores of the program as forms in the state.
        """
        b, K = self.of, self.K
        if not values.any():
            return 0.0
        apart = K @ self.in_query * self.scale - forms
        shared = (apart.max(axis=0) + apart.min(axis=0)) / 2  # it has no effect on weights
        apart = np.abs(apart - shared)
        size = np.abs(K) @ (np.abs(self.W_Q) @ b.abs_B) * self.scale + np.abs(forms)
        eta = (apart + PRODUCT_ERROR * size) @ b.reach + self.dK @ self.q * self.scale
        eta += gamma(len(self.q) + 2, U) * (np.abs(K) + self.dK) @ self.q * self.scale
        table = np.stack([line.a, line.c], axis=1)
        X, *_ = np.linalg.lstsq(table, K, rcond=None)
        rest = np.abs(K - table @ X) + PRODUCT_ERROR * (np.abs(table) @ np.abs(X) + np.abs(K))
        shift, theta = (np.abs(X) @ self.dq * self.scale).tolist()
        eta = (eta + rest @ self.dq * self.scale) * (1 + 2.0**-20)
        self._require_silence(line, float(eta.max() + np.abs(shared) @ b.reach))
        shift += theta * line.reach
        if not shift <= INTERVAL_ROOM / 4 * (line.hi - line.lo):
            raise ProgramError(f"the query of head {self.name} may be off by {shift:.3g}, too much for its interval")
        return weights_error(line, values, eta, shift, theta)

    def errors(self, line: _Line, forms: Float[np.ndarray, "prefix width"]) -> Float[np.ndarray, " width"]:
        """Bound the same for the output of the head in every dimension. Small columns may change altogether."""
        sizes = np.abs(self.values).max(axis=0)
        is_large = sizes > SMALL_COLUMN * sizes.max()
        found = [self.error(line, forms, self.values[:, c]) if is_large[c] else 2 * sizes[c] for c in range(len(sizes))]
        return np.array(found)

    def _require_silence(self, line: _Line, eta: float) -> None:
        """Raise ProgramError unless query and padding tokens, as keys, have scores far below the largest one."""
        b, least = self.of, _least_top(line) - eta
        in_key, lengths = np.abs(self.W_K @ b.B), np.linalg.norm(self.W_K, axis=1)
        largest = lengths * max(b.query_length, b.prefix_length)
        room = float(self.dq @ largest + (gamma(b.n, U) + gamma(len(self.q) + 2, U) + 2.0**-40) * self.q @ largest)
        room += float(self.q @ lengths) * (_length(b.drift) + _length(b.prefix_drift))
        for word, around in ((b.stored.query, b.moving + b.leaked), (b.stored.pad, b.written)):
            key = self.W_K @ b.E[word]
            score = float((self.in_query @ b.still) @ key) + float(np.abs(key @ self.in_query) @ b.moving)
            score = (score + float(self.q @ (in_key @ around)) + room) * self.scale
            if not score <= least - LEAST_GAP:
                raise ProgramError(
                    f"a silent token of head {self.name} may be heard: its score may be {score:.4g}, and the largest "
                    f"score is at least {least:.4g}"
                )


def _least_top(line: _Line) -> float:
    """Bound the largest score from below, over all q. It is convex and piecewise linear: it is least at a crossing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        crossings = (line.c[:, None] - line.c) / (line.a - line.a[:, None])
    inside = crossings[(crossings > line.lo) & (crossings < line.hi)]
    at = np.outer(np.concatenate([[line.lo, line.hi], inside]), line.a) + line.c
    size = np.abs(line.a).max() * line.reach + np.abs(line.c).max()
    return float(at.max(axis=1).min() - 2.0**-30 * size)


def weights_error(
    line: _Line, values: Float[np.ndarray, " keys"], eta: Float[np.ndarray, " keys"], shift: float, theta: float
) -> float:
    """Bound |Σ p̂_k v_k − Σ p_k v_k| over all q in the interval of the line, by the theorem in `proofs.rounding.stage`.

    Scores err by eta_k, and by a share of at most `theta` of themselves, besides rounding. Also q itself is off by at
    most `shift`, which changes the average by its slope Σ p_k (a_k − ā)(v_k − A).
    """
    a, c, v, ulps = line.a, line.c, values, 2 * ENGINE_ULPS["float32"] * U
    centres = np.array([line.lo / 2 + line.hi / 2])
    radii = np.array([up((line.hi - line.lo) / 2, 2)])
    worst, count = 0.0, 0
    while len(centres):
        scores = np.outer(centres, a) + c
        behind = scores.max(axis=1, keepdims=True) - scores
        log_p = -behind - np.log(np.exp(-behind).sum(axis=1, keepdims=True))
        p = np.exp(log_p)
        alpha = a - (p @ a)[:, None]
        rho = np.abs(alpha) * radii[:, None]
        grown = np.exp(np.minimum(log_p + rho, LARGEST_COUNTED)) - p  # p_k(q) ≤ p_k + grown_k on the cell
        count += len(centres)
        split = (grown.sum(axis=1) > FINE) & (count < MOST_RANGES)
        # A number that all scores share changes no weight: so the largest score may be that at the centre.
        farthest = (np.abs(alpha) * shift + rho).max(axis=1, keepdims=True) + eta.max()
        x = eta + (theta + U) * (behind + 2 * farthest)
        tau = np.expm1(np.minimum(x, LARGEST_COUNTED)) * (1 + ulps) + ulps
        off = np.abs(v - (p @ v)[:, None])
        moved = (grown * off).sum(axis=1, keepdims=True)  # of the average
        change = grown + p * grown.sum(axis=1, keepdims=True) + p * -np.expm1(-rho)  # of each weight, at most
        slope = np.abs((p * alpha * (v - (p @ v)[:, None])).sum(axis=1)) + (change * np.abs(alpha) * off).sum(axis=1)
        slope = slope + (change * np.abs(alpha)).sum(axis=1) * moved[:, 0]
        weights = np.minimum(p + grown, 1.0)
        mean_tau = (weights * tau).sum(axis=1)
        errors = (weights * tau * (off + moved)).sum(axis=1) / (1 - np.minimum(mean_tau, 0.5))
        errors = np.where(mean_tau < 0.5, errors + slope * shift, np.ptp(v))
        worst = max(worst, float(np.minimum(errors, np.ptp(v))[~split].max(initial=0.0)) * (1 + 2.0**-30))
        half = radii[split] / 2
        centres = np.concatenate([centres[split] - half, centres[split] + half])
        radii = np.concatenate([half, half]) * (1 + 2.0**-40)
    return _up(worst + 4 * len(a) * math.exp(NEGLIGIBLE["float32"]) * float(np.abs(v).max()))


def _gammas(W: Float[np.ndarray, "rows width"]) -> Float[np.ndarray, " rows"]:
    """γ of the number of products of a row that are not zero, for sums in any order."""
    return np.array([gamma(max(1, int(count)), U) for count in np.count_nonzero(W, axis=1)])


def _length(vector: Float[np.ndarray, " width"]) -> float:
    """Bound the 2-norm of a vector from above."""
    return float(np.linalg.norm(vector)) * (1 + 2.0**-40)


def _up(x: float) -> float:
    return float(up(x * (1 + 2.0**-40), 4))
