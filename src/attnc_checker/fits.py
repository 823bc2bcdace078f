"""The claim of an in-context program about the prompt of its fit: its weights are near an optimum.

The folder holds a program and its inputs, the last of which ends with the prompt. Its rows (x, m, [log ω], y) with the
flag m = 1 are examples, and ω is 1 if it is not given. A row with m = 0 holds the root of a penalty in one column of x,
or nothing. With an intercept, m is the last column of x. The objective of each target is

    F(w) = Σ ω_i ℓ(w·x_i, y_i) + ½ c Σ_j λ_j w_j²,

where λ_j is the stated penalty plus the square of the rows' penalties in column j. c is the stated factor, times Σ ω_i
if the objective is a mean. ℓ is (z − y)²/2, log(1 + e^z) − yz, e^z − yz, or the Huber loss, which is (z − y)²/2 for
|z − y| ≤ 1 and |z − y| − ½ beyond.

Claim.    F has exactly one minimum w*. The stored weights, which the program returned in float64, and the output of the
          program in exact arithmetic are both within `bound` of w* in the 2-norm, over all targets together.
Proof.    F is convex. Let g be its gradient at the stored weights w, and let the Hessian be at least μ > 0 within r
          of w with |g| < μr. On the sphere of radius s about w, |g|/μ < s ≤ r, the derivative of F outwards is at
          least μs − |g| > 0. So the minimum over the ball is inside, it is the minimum of F, and F is strictly convex
          there: w* is unique, and |w − w*| ≤ |g|/μ. Moreover ∇F(w*) = 0 = g + H̄(w* − w), where H̄ is a mean of Hessians
          on the way. Balls enclose all Hessians within r, so the solutions of H̄v = g enclose w − w*. (For the Huber
          loss the second derivative is 1 or 0, and the mean of slopes is between them where it may change.) The
          distance of the exact output from w is added: `exact_run` encloses it. ∎

Positive definite: a matrix X'SX + Λ with S, Λ ≥ 0 has no negative eigenvalue, and if Arb encloses its inverse, its
least eigenvalue is at least 1/|inverse|, in the Frobenius norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flint import arb, arb_mat, ctx

from attnc_checker.exact_run import ExactRun
from attnc_checker.files import (
    MAX_WEIGHTS,
    BadFile,
    Refused,
    Tensor,
    are_sizes,
    field,
    parse_safetensors,
    read_bytes,
    read_json,
    require,
    typed,
)
from attnc_checker.program import Program

FORMAT, FIT = "attnc.incontext/2", "fit.safetensors"
LOSSES = ("squared", "logistic", "poisson", "huber")
SCOPE = "in the weights, for the stored prompt"
DTYPE = "exact arithmetic and in the float64 run that is stored"
RE_PROVED = "the program was run again in exact arithmetic, and the optimum enclosed"
ASSUMED = (
    "the stored weights are those of one run in float64, by the engine that the program was fitted with; other runs in "
    "float64 differ from them by their rounding, of which nothing is claimed",
    "nothing about other prompts: a bound for all of them, if the certificate states one, rests on a theorem",
)
PRECISION, MOST = 192, 2**13
"""Bits of the first attempt at the run, and of the last. An attention layer loses up to 13 bits."""
SOLVING = 256
"""Bits for the optimum. Normal equations lose twice the digits of the condition, which float64 limits to 2⁵²."""
MAX_LAYERS = 2**15
"""Largest number of layers, all turns counted."""
SHARE = 2.0**-10
"""The share of the bound that the radius of the exact output may take."""
RADII = (2, 16, 256)
"""The radii r that are tried, as multiples of |g|/μ at the weights."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a prompt."""

    rows: int
    features: int
    intercept: bool
    targets: int
    weighted: bool

    @property
    def weights(self) -> int:
        return self.features + self.intercept

    @property
    def width(self) -> int:
        return self.features + 1 + self.weighted + self.targets


@dataclass(frozen=True, eq=False)
class Fit:
    """The claim, the program, its inputs and its weights."""

    bound: float
    loss: str
    factor: float
    is_mean: bool
    penalty: tuple[float, ...]
    layout: Layout
    program: Program
    inputs: tuple[Tensor, ...]
    weights: Tensor


def is_in_context(folder: Path) -> bool:
    """Return whether a folder says that it holds an in-context program."""
    try:
        return str(read_json(folder / "config.json").get("format")).startswith("attnc.incontext/")
    except BadFile:
        return False


def read_fit(folder: Path) -> Fit:
    """Read the claim, and check that its files belong together."""
    config, certificate = read_json(folder / "config.json"), read_json(folder / "certificate.json")
    for name, data in (("config.json", config), ("certificate.json", certificate)):
        if data.get("format") != FORMAT:
            raise BadFile(
                f"{name} has the format {data.get('format')!r:.40}, not {FORMAT!r}: check it with the version of attnc "
                "that wrote it"
            )
    require(config.get("domain") == certificate.get("domain"), "config.json and certificate.json differ in the domain")
    stated = certificate.get("fit")
    if not isinstance(stated, dict) or "bound" not in stated:
        reason = stated.get("reason") if isinstance(stated, dict) else None
        raise Refused(
            f"the folder states no bound for a stored prompt: {reason or 'it holds no prompt'}. Its bound for all "
            "prompts, if there is one, rests on a theorem, which is not proved again here"
        )
    weights, stored = (read_bytes(folder / name, MAX_WEIGHTS) for name in ("model.safetensors", FIT))
    for name, raw, digest in (
        ("model.safetensors", weights, certificate.get("weights_sha256")),
        (FIT, stored, field(stated, "sha256", str, "fit.")),
    ):
        require(digest == hashlib.sha256(raw).hexdigest(), f"the certificate belongs to another {name}")
    layout = _layout(config)
    tensors, given = parse_safetensors(weights), parse_safetensors(stored)
    tensors |= _same(config.get("same"), tensors)
    numbers = [f"input{i}" for i in range(len(given) - 1)]
    require(set(given) == {"weights", *numbers}, f"{FIT} holds other tensors than inputs and weights", BadFile)
    inputs = tuple(given[name] for name in numbers)
    require(all(one.dtype == "F64" for one in given.values()), f"{FIT} holds numbers that are not float64", BadFile)
    structure = config.get("program")
    shapes = structure.get("input_shapes") if isinstance(structure, dict) else None
    require([list(one.shape) for one in inputs] == shapes, f"the inputs in {FIT} are not those of the program", BadFile)
    program = Program(structure, tensors, sum(len(one.values) for one in inputs), MAX_LAYERS)
    require(program.dtype == "float64", "the program is not in float64")
    shape = (layout.targets, layout.weights)
    require(given["weights"].shape == shape, f"the weights in {FIT} have not the shape {shape}", BadFile)
    require(program.num_outputs == math.prod(shape), "the program returns other numbers than weights")
    rows = inputs[-1].shape
    fits = len(rows) == 2 and rows[1] == layout.width and rows[0] == layout.rows + (len(inputs) == 1)
    require(fits, f"the prompt in {FIT} has another shape than its layout", BadFile)
    loss, bound = field(stated, "loss", str, "fit."), field(stated, "bound", float, "fit.")
    require(loss in LOSSES, f"the loss {loss!r:.40} is not one of {', '.join(LOSSES)}")
    penalty = field(stated, "penalty", tuple[float, ...], "fit.")
    is_mean, factor = stated.get("mean"), field(stated, "factor", float, "fit.")
    known = {"sha256", "loss", "bound", "penalty", "mean", "factor", "terms"}
    is_plain = set(stated) == known and isinstance(is_mean, bool) and factor > 0 and bound > 0
    require(is_plain, f"the claim about the fit has not the fields {', '.join(sorted(known))}", BadFile)
    require(len(penalty) == layout.weights and min(penalty) >= 0, "the penalties are not one ≥ 0 for each weight")
    return Fit(bound, loss, factor, bool(is_mean), penalty, layout, program, inputs, given["weights"])


def prove(fit: Fit, look: Callable[[], None]) -> float:
    """Return a bound of the distances of the claim, or raise Refused."""
    run = ExactRun(fit.program, look)
    most = min(MOST, run.most_bits())
    stored = [arb(value) for value in fit.weights.values]
    squares = arb(0)
    before = ctx.prec
    try:
        ctx.prec = SOLVING
        for target in range(fit.layout.targets):
            look()
            squares += _distance(fit, target) ** 2
        bits = PRECISION
        while True:
            require(bits <= most, f"the run of the program is not enclosed with {most:,} bits, which this check takes")
            ctx.prec = bits
            exact, share = run.output([_as_matrix(given) for given in fit.inputs])
            moved = sum(((one - other) ** 2 for one, other in zip(exact, stored, strict=False)), arb(0))
            if exact and moved.is_finite() and moved.rad() < (SHARE * arb(fit.bound)) ** 2:
                break
            bits = max(2 * bits, math.ceil(0.75 * bits / share))
        found = (squares.sqrt() + abs(moved).sqrt()).upper()
    finally:
        ctx.prec = before
    near = float(found) * (1 + 2**-50)
    require(
        near <= fit.bound,
        f"the weights are proved to be within {near:.6g} of the optimum, and the claim is {fit.bound:.6g}",
    )
    return near


def _layout(config: dict[str, object]) -> Layout:
    domain: Any = config.get("domain")
    sizes = domain.get("prompt") if isinstance(domain, dict) else None
    known = {"rows", "features", "intercept", "targets", "weighted", "queries"}
    if not isinstance(sizes, dict) or not {"rows", "features", "intercept"} <= set(sizes) <= known:
        raise BadFile("config.json does not state the sizes of the prompt")
    counts = [sizes["rows"], sizes["features"], sizes.get("targets", 1), sizes.get("queries", 0)]
    flags = [sizes["intercept"], sizes.get("weighted", False)]
    are_plain = are_sizes(counts) and all(type(flag) is bool for flag in flags)
    require(are_plain and counts[0] > 0 and counts[2] > 0, "the sizes of the prompt in config.json", BadFile)
    require(counts[3] == 0, "the program answers queries: it does not return weights")
    found = Layout(counts[0], counts[1], flags[0], counts[2], flags[1])
    require(found.weights > 0, "the prompt has no columns", BadFile)
    return found


def _same(names: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are stored under the name of an equal one."""
    found = {}
    for name, earlier in typed(names, dict, "same in config.json").items():
        is_known = isinstance(earlier, str) and earlier in tensors and name not in tensors
        require(is_known, f"same in config.json names {name!r:.60}, which equals no stored tensor", BadFile)
        found[name] = tensors[earlier]
    return found


def _as_matrix(given: Tensor) -> arb_mat:
    rows, columns = (1, *given.shape) if len(given.shape) == 1 else given.shape
    return arb_mat(rows, columns, [*given.values])


def _distance(fit: Fit, target: int) -> arb:
    """Return a bound of |w − w*| for one target."""
    d, layout, tokens = fit.layout.weights, fit.layout, fit.inputs[-1]
    width, first = layout.width, tokens.shape[0] - layout.rows
    penalty = [arb(value) for value in fit.penalty]
    X: list[list[float]] = []
    y: list[arb] = []
    omega: list[arb] = []
    for row in range(first, tokens.shape[0]):
        numbers = [*tokens.values[row * width : (row + 1) * width]]
        flag, entries = numbers[layout.features], [j for j in range(d) if numbers[j]]
        if flag == 1:
            X.append(numbers[:d])
            omega.append(arb(numbers[layout.features + 1]).exp() if layout.weighted else arb(1))
            y.append(arb(numbers[-layout.targets + target]))
        else:
            is_penalty = flag == 0 and len(entries) <= 1 and not any(numbers[d:])
            require(is_penalty, f"row {row} of the prompt is neither an example nor a penalty")
            for j in entries:
                penalty[j] += arb(numbers[j]) ** 2
    scale = arb(fit.factor) * (sum(omega, arb(0)) if fit.is_mean else arb(1))
    penalty = [one * scale for one in penalty]
    w = arb_mat(d, 1, [*fit.weights.values[target * d : (target + 1) * d]])
    rows = arb_mat(len(X), d, [x for row in X for x in row])
    z, lengths = rows * w, [_norm([arb(x) for x in row]) for row in X]
    off = [o * _slope(fit.loss, z[i, 0], y[i]) for i, o in enumerate(omega)]
    pulled = rows.transpose() * arb_mat(len(X), 1, off)
    g = arb_mat(d, 1, [pulled[j, 0] + penalty[j] * w[j, 0] for j in range(d)])
    steep = _norm(g.entries())
    require(bool(steep.is_finite()), "the gradient at the stored weights is not finite")

    def hessian(r: arb, *, is_least: bool) -> arb_mat:
        """Enclose the Hessians within r of w, or return one that is below them all."""
        scaled = []
        for i, o in enumerate(omega):
            around = arb(0, (lengths[i] * r).upper()) + z[i, 0]
            s = o * _curvature(fit.loss, around, y[i])
            s = arb(max(arb(0), s.lower())) if is_least else s
            scaled += [s * x for x in X[i]]
        made = rows.transpose() * arb_mat(len(X), d, scaled)
        for j in range(d):
            made[j, j] = made[j, j] + (penalty[j].lower() if is_least else penalty[j])
        return made

    def least(r: arb) -> arb:
        """Return a lower bound of the eigenvalues of all Hessians within r of w, or 0."""
        try:
            inverse = hessian(r, is_least=True).inv()
        except ZeroDivisionError:
            return arb(0)
        size = _norm(inverse.entries())
        return (1 / size).lower() if size.is_finite() and size > 0 else arb(0)

    mu = least(arb(0))
    require(bool(mu > 0), "the optimum on the stored prompt is not proved to be unique")
    for factor in RADII:
        r = (factor * steep / mu).upper() + arb(2) ** -600
        below = least(r)
        if below * r > steep:
            near = (steep / below).upper()
            try:
                step = _norm(hessian(r, is_least=False).solve(g).entries())
            except ZeroDivisionError:
                return near
            return arb(min(near, step.upper())) if step.is_finite() else near
    raise Refused("the curvature about the stored weights is too small to enclose the optimum")


def _norm(entries: list[arb]) -> arb:
    return abs(sum((one * one for one in entries), arb(0))).sqrt()


def _slope(loss: str, z: arb, y: arb) -> arb:
    """Return the derivative of the loss."""
    if loss == "huber":
        return (z - y).max(arb(-1)).min(arb(1))
    mean = {"squared": lambda: z, "poisson": lambda: z.exp(), "logistic": lambda: 1 / (1 + (-z).exp())}[loss]()
    return mean - y


def _curvature(loss: str, z: arb, y: arb) -> arb:
    """Return the second derivative of the loss for all z of a ball."""
    if loss == "squared":
        return arb(1)
    if loss == "poisson":
        return z.exp()
    if loss == "logistic":
        return 1 / (2 + z.exp() + (-z).exp())
    size = abs(z - y)
    return arb(1) if size < 1 else arb(0) if size > 1 else arb(0.5, 0.5)
