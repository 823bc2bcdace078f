"""Gradients: python -m attack.gradients [--count N] [--seed S] [--points P].

Random expressions are compiled with norm="C1", and the gradients that engines compute are compared with those of f in
Arb. A comparison is |∂net/∂x_i − ∂f/∂x_i| ≤ bound for one output and one variable at one point. It passes only if the
ball of f's derivative proves it. The balls are computed once for all engines, and rounded outward to floats: only
comparisons that floats do not decide are done in Arb. The checker has to re-prove every certificate, and to refuse
certificates whose claims about gradients were changed. The exit code is 1 if a bound is violated, or a change is not
refused.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flint import arb

import attnc
from attack.grammar import NAMES, Case, composition, kinked, of_text, polynomials, random_case, smooth
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import AttncError
from attnc.ir.program import split_columns
from attnc.proofs.gradient_prover import stage_of
from attnc.proofs.neighbourhoods import beside_strips, is_excluded
from attnc.proofs.observed import sample_points
from attnc.targets.target import Target
from attnc_checker import check
from strategies.expressions import BINARY, SAFE, SMOOTH
from strategies.reference import DERIVATIVES, VALUES, TreeArithmetic, precision

BITS = 128
"""Precision of Arb."""
Gradient = Callable[[np.ndarray], np.ndarray]
"""A function that maps points (points, d) to slopes (points, outputs, d)."""


def composed(rng: np.random.Generator) -> Case:
    """Smooth functions of two or three variables: most are compositions of several layers."""
    d = int(rng.integers(2, 4))
    ends = [(float(lo), float(lo) + float(rng.choice([0.5, 1.0, 2.0]))) for lo in rng.uniform(-2, 1, d)]
    parts = [composition(rng, NAMES[:d], int(rng.integers(1, 3)), SMOOTH + SAFE, BINARY) for _ in range(2)]
    text = str(rng.choice(SMOOTH + SAFE)).format(str(rng.choice(BINARY)).format(*parts))
    return of_text(rng, "composed", text, ends, 1e-6, 1e-2)


def with_kinks(rng: np.random.Generator) -> Case:
    """Functions of one to three variables with kinks along lines and curves: strips about them are excluded."""
    d = int(rng.integers(1, 4))
    ends = [(float(lo), float(lo) + float(rng.choice([1.0, 2.0]))) for lo in rng.uniform(-1.5, 0, d)]
    kink = str(rng.choice(["relu({})", "abs({})", "max({}, 0.25)", "clip({}, -0.5, 0.5)"]))
    inner = composition(rng, NAMES[:d], int(rng.integers(0, 2)), SMOOTH + SAFE, BINARY)
    parts = [kink.format(inner), composition(rng, NAMES[:d], 1, SMOOTH + SAFE, BINARY)]
    return of_text(rng, "with kinks", str(rng.choice(BINARY)).format(*parts), ends, 1e-6, 1e-2)


KINDS = (smooth, composed, polynomials, with_kinks, smooth, composed, kinked, with_kinks)
MOST_VARIABLES = 3
NEAR = 2.0 ** -np.arange(0, 40, 2.0)
"""Distances from ends of the box and of excluded intervals, as shares of the width of the box."""


@dataclass(frozen=True)
class Dual:
    """A number and its slopes along all variables, in balls."""

    value: arb
    slopes: tuple[arb, ...]

    def moved(self, value: arb, slope: arb) -> Dual:
        return Dual(value, tuple(slope * x for x in self.slopes))

    def __add__(self, other: Dual) -> Dual:
        return Dual(self.value + other.value, tuple(map(operator.add, self.slopes, other.slopes)))

    def __mul__(self, other: Dual) -> Dual:
        pairs = zip(self.slopes, other.slopes, strict=True)
        return Dual(self.value * other.value, tuple(self.value * y + other.value * x for x, y in pairs))

    def __truediv__(self, other: Dual) -> Dual:
        return self * other.moved(1 / other.value, -1 / (other.value * other.value))

    def __neg__(self) -> Dual:
        return self.moved(-self.value, arb(-1))


def _smooth_function(name: str) -> Callable[[Dual], Dual]:
    return lambda u: u.moved(VALUES[name](u.value), DERIVATIVES[name](u.value))


def _larger(u: Dual, v: Dual) -> Dual:
    """Return the larger of two numbers, or their hull if the balls do not decide."""
    if u.value > v.value:
        return u
    if v.value > u.value:
        return v
    return Dual(u.value.max(v.value), tuple(x.union(y) for x, y in zip(u.slopes, v.slopes, strict=True)))


def _of_one(d: int) -> TreeArithmetic:
    zero = Dual(arb(0), (arb(0),) * d)

    def largest(*given: Dual) -> Dual:
        found = given[0]
        for each in given[1:]:
            found = _larger(found, each)
        return found

    def smallest(*given: Dual) -> Dual:
        return -largest(*(-each for each in given))

    def power(u: Dual, v: Dual) -> Dual:
        log = _smooth_function("log")(u)
        return _smooth_function("exp")(v * log)

    kinks = {
        "relu": lambda u: _larger(u, zero),
        "abs": lambda u: _larger(u, -u),
        "max": largest,
        "min": smallest,
        "clip": lambda u, low, high: smallest(largest(u, low), high),
    }
    functions = {name: _smooth_function(name) for name in DERIVATIVES} | kinks
    return TreeArithmetic(functions, lambda ball: Dual(ball, (arb(0),) * d), power)


def exact_gradient(target: Target, point: Sequence[float]) -> list[list[arb]]:
    """Return balls of the slopes of every output along every variable."""
    assert target.expression is not None
    names, d = target.expression.variables, len(point)
    units = [tuple(arb(i == j) for j in range(d)) for i in range(d)]
    where = {name: Dual(arb(x), unit) for name, x, unit in zip(names, point, units, strict=True)}
    rules = _of_one(d)
    return [list(rules.value(tree, where).slopes) for tree in target.expression.outputs]


def by_formula(net: attnc.Network) -> Gradient:
    """The covariance of values and slopes over the keys, in the dtype of the program; of one attention layer alone."""
    stage, _ = stage_of(net.program)
    dtype = net.program.dtype

    def gradient(points: np.ndarray) -> np.ndarray:
        if dtype == np.float64:
            return stage.gradients(points)
        x = points.astype(dtype)
        found = np.repeat(stage.linear.mid.astype(dtype)[None], len(x), axis=0)
        for head in stage.heads:
            slopes, offsets, values = (
                part.astype(dtype) for part in (head.mid.slopes, head.mid.offsets, head.mid.values)
            )
            carried = None if head.carried is None else head.carried.mid.astype(dtype)
            found = found + type(head.mid)(slopes, offsets, values, carried).gradients(x).astype(dtype)
        return found

    return gradient


def by_engine(net: attnc.Network) -> Gradient:
    """`net.gradient`, forwards: compiled loops if numba is installed, and numpy otherwise."""
    return lambda points: net.gradient(*_columns(net, points)).reshape(len(points), -1, net.box.d).astype(np.float64)


def by_numpy(net: attnc.Network) -> Gradient:
    """The engine in numpy, forwards."""
    engine = NumpyEngine(net.program, with_grids=False)
    return lambda points: engine.gradient(*_columns(net, points)).reshape(len(points), -1, net.box.d).astype(np.float64)


def by_autograd(net: attnc.Network) -> Gradient:
    """Automatic differentiation, backwards, of the folded module that attnc makes for torch."""
    return _backwards(net, "folded")


def by_jax(net: attnc.Network) -> Gradient:
    """Automatic differentiation, backwards, of the function that attnc makes for JAX."""
    import jax

    with jax.enable_x64(True):
        run, d = net.to_jax(), net.box.d
        slopes = jax.jit(jax.vmap(jax.jacrev(lambda x: run(x[None]).reshape(-1))))

    def gradient(points: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(slopes(points.astype(net.program.dtype)), np.float64).reshape(len(points), -1, d)

    return gradient


def by_layers(net: attnc.Network) -> Gradient:
    """Automatic differentiation, backwards, of all layers as they are stored."""
    return _backwards(net, "unfolded")


def _columns(net: attnc.Network, points: np.ndarray) -> list[np.ndarray]:
    return list(split_columns(points, net.program.input_shapes))


def _backwards(net: attnc.Network, form: str) -> Gradient:
    import torch

    module = net.to_torch(form=form)

    def gradient(points: np.ndarray) -> np.ndarray:
        x = torch.tensor(points, requires_grad=True)
        y = module(x).reshape(len(points), -1)
        found = [torch.autograd.grad(y[:, o].sum(), x, retain_graph=True)[0] for o in range(y.shape[1])]
        return torch.stack(found, dim=1).numpy().astype(np.float64)

    return gradient


ENGINES: dict[str, Callable[[attnc.Network], Gradient]] = {
    "formula": by_formula,
    "engine": by_engine,
    "numpy": by_numpy,
    "torch": by_autograd,
    "layers": by_layers,
    "jax": by_jax,
}


@dataclass
class Attack:
    """The counts of an attack, and the cases in which a bound was violated."""

    comparisons: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)
    forged: Counter[str] = field(default_factory=Counter)
    in_arb: int = 0
    closest: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def made(self) -> int:
        return sum(self.comparisons.values())

    def run(self, seed: int, count: int, points: int = 2000) -> Attack:
        number = 0
        while self.made < count:
            self.one(random_case(seed, number, KINDS), number, min(points, max(50, count - self.made)))
            number += 1
        return self

    def one(self, case: Case, number: int, points: int) -> None:
        """Compile a case, compare its gradients at points, and have it proved again."""
        options = {name: value for name, value in case.options.items() if name == "dtype"}
        if case.meaning.box.d > MOST_VARIABLES:
            return
        try:
            net = replace(case, options=options | {"norm": "C1", "seconds": 20.0}).compile()
        except AttncError as refusal:
            self.cases[type(refusal).__name__] += 1
            return
        proof = net.certificate.gradient
        assert proof is not None
        is_composed = bool(proof.heads)
        self.cases[f"{net.dtype}, composed" if is_composed else str(net.dtype)] += 1
        chosen = np.concatenate(list(_points(net, case.meaning, points, number)))
        exact, largest = Balls.of(case.meaning, chosen), 0.0
        for name, engine in ENGINES.items():
            if is_composed and name == "formula":
                continue
            about = f"{name} {net.dtype}{', composed' * is_composed}"
            largest = max(largest, self._compare(about, engine(net)(chosen), case, chosen, exact, proof.bound))
        with tempfile.TemporaryDirectory() as folder:
            net.save(f"{folder}/net")
            verdict = check(f"{folder}/net", processes=1)
            if not verdict.proved:
                self.failures.append(f"{number}: {case}: not re-proved: {verdict.reason}")
            self._forge(Path(folder) / "net", f"{number}: {case}", largest)

    def _forge(self, folder: Path, about: str, largest: float) -> None:
        """Change the claim about gradients in several ways, each of which the checker must refuse."""
        stored = (folder / "certificate.json").read_text()
        for name, change in FORGERIES.items():
            data = json.loads(stored)
            if not change(data["gradient"], largest):
                continue
            (folder / "certificate.json").write_text(json.dumps(data))
            self.forged[name] += 1
            if check(folder, processes=1).proved:
                self.failures.append(f"{about}: {name} is not refused")

    def _compare(
        self, name: str, found: np.ndarray, case: Case, points: np.ndarray, exact: Balls, bound: float
    ) -> float:
        """Compare the slopes (points, outputs, d) of an engine. Return the largest error, rounded up."""
        with np.errstate(all="ignore"):
            errors = np.nextafter(np.maximum(np.abs(found - exact.lo), np.abs(found - exact.hi)), np.inf)
        self.comparisons[name] += errors.size
        undecided = np.argwhere(~(errors <= bound))
        self.in_arb += len(undecided)
        with precision(BITS):
            for point, o, i in undecided.tolist():
                ball = exact_gradient(case.meaning, points[point].tolist())[o][i]
                error = abs(ball - arb(float(found[point, o, i])))
                errors[point, o, i] = float(error.upper())
                if not error <= bound:
                    self.failures.append(f"{name}: {case} at {points[point]}: {error.str(6)} > {bound!r}")
        largest = float(errors.max(initial=0.0))
        self.closest = max(self.closest, largest / bound if bound else 0.0)
        return largest


@dataclass(frozen=True)
class Balls:
    """Intervals of floats around the slopes of f, (points, outputs, d)."""

    lo: np.ndarray
    hi: np.ndarray

    @classmethod
    def of(cls, target: Target, points: np.ndarray) -> Balls:
        """Compute the slopes in Arb."""
        with precision(BITS):
            balls = [exact_gradient(target, point) for point in points.tolist()]
            ends = [[[(float(x.lower()), float(x.upper())) for x in row] for row in rows] for rows in balls]
        array = np.array(ends).reshape(len(points), target.num_outputs, target.box.d, 2)
        return cls(np.nextafter(array[..., 0], -np.inf), np.nextafter(array[..., 1], np.inf))


def _lower(claim: dict[str, Any], largest: float) -> bool:
    """State a bound below an error that was seen."""
    claim["bound"], claim["observed"] = 0.99 * largest, min(claim["observed"], 0.99 * largest)
    return largest > 0


def _without_a_leaf(claim: dict[str, Any], largest: float) -> bool:
    part = claim["stages"][0] if claim.get("stages") else claim
    part["leaves"].pop()
    if "leaf_bounds" in part:
        part["leaf_bounds"].pop()
    if part.get("leaf_middles"):
        part["leaf_middles"].pop()
    return True


def _smaller_slopes(claim: dict[str, Any], largest: float) -> bool:
    """State a third of the bounds of all leaves of the stage whose leaves have the largest one."""
    if not claim.get("stages"):
        return False
    stage = max(claim["stages"], key=lambda each: each["bound"])
    if not stage["bound"] > 1e-9:  # bounds of rounding alone may have room
        return False
    stage["bound"] /= 3
    stage["leaf_bounds"] = [bound / 3 for bound in stage["leaf_bounds"]]
    stage["leaf_middles"] = [middle / 3 for middle in stage.get("leaf_middles", [])]
    if not stage["leaf_middles"]:
        stage.pop("leaf_middles")
    return True


def _without_kinks(claim: dict[str, Any], largest: float) -> bool:
    """Claim that nothing is excluded."""
    had_some = bool(claim["excluded"])
    claim["excluded"] = []
    return had_some


def _elsewhere(claim: dict[str, Any], largest: float) -> bool:
    """Move an excluded neighbourhood by its width."""
    for band in claim["excluded"][:1]:
        width = band["hi"] - band["lo"]
        band["lo"], band["hi"] = band["lo"] + width, band["hi"] + width
    return bool(claim["excluded"])


FORGERIES: dict[str, Callable[[dict[str, Any], float], bool]] = {
    "a bound below an error": _lower,
    "a missing leaf": _without_a_leaf,
    "smaller slopes of a head": _smaller_slopes,
    "no excluded neighbourhood": _without_kinks,
    "a moved neighbourhood": _elsewhere,
}
"""Changes of a claim, given the largest error that was seen. They return whether they apply."""


def _points(net: attnc.Network, target: Target, count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield points that are not excluded: random ones, near ends, near kinks, and near the worst of these."""
    box, rng = target.box, np.random.default_rng(seed)
    ends = np.concatenate([box.lo + NEAR[:, None] * box.widths, box.hi - NEAR[:, None] * box.widths])
    edges = [
        end + side * NEAR * box.widths[0]
        for band in net.certificate.excluded
        for side, end in ((-1, np.nextafter(band.lo, -np.inf)), (1, np.nextafter(band.hi, np.inf)))
    ]
    near_kinks = [edge[:, None] for edge in edges] if box.d == 1 else [beside_strips(net.certificate.excluded, box)]
    whole = [sample_points(box, count, seed), ends, *near_kinks]

    def kept(points: np.ndarray) -> np.ndarray:
        inside = ((points >= box.lo) & (points <= box.hi)).all(axis=1)
        return points[inside & ~is_excluded(net.certificate.excluded, box, points)]

    points = kept(np.concatenate(whole))
    yield points
    assert target.expression is not None
    errors = np.abs(by_engine(net)(points) - _float_gradient(target, points)).max(axis=(1, 2))
    worst = points[np.argsort(errors)[-8:]]
    for step in (1e-2, 1e-3, 1e-5):
        near = worst[:, None] + step * box.widths * rng.normal(size=(len(worst), 4, box.d))
        yield kept(np.clip(near.reshape(-1, box.d), box.lo, box.hi))


def _float_gradient(target: Target, points: np.ndarray) -> np.ndarray:
    from attnc.targets.expressions.derivatives import gradient

    assert target.expression is not None
    with np.errstate(all="ignore"):
        found = gradient(target.expression)(points)
    return np.nan_to_num(found).reshape(len(points), -1, target.box.d)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("attack.gradients", description="Attack bounds of gradients.")
    parser.add_argument("--count", type=int, default=1_000_000, help="the number of comparisons (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices (default: 0)")
    parser.add_argument("--points", type=int, default=2000, help="the number of points per case (default: 2,000)")
    chosen = parser.parse_args(arguments)
    found = Attack().run(chosen.seed, chosen.count, chosen.points)
    print(f"{found.made:,} comparisons: {dict(found.comparisons)}")
    print(f"cases: {dict(found.cases)}")
    print(f"decided in Arb: {found.in_arb:,}; forged, of which none may pass: {dict(found.forged)}")
    print(f"largest error / bound: {found.closest:.6f}")
    print(*found.failures, sep="\n")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
