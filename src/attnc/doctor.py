"""Measure whether the engines on this machine keep the assumptions of certificates.

`numerics.rounding.engine_assumption` states what certificates assume of an engine. Here each part is measured, for
every installed engine and both dtypes, against exact values or Arb's:

    exponential   weights relative to the largest, within ENGINE_ULPS ulp down to e^NEGLIGIBLE, and no larger below it.
                  If weights are powers of an exponential, it is within EXPONENTIAL_ULPS
    powers        powers of two whose powers are weights, within EXPONENTIAL_ERROR unit roundoffs
    rounding      sums, products and quotients whose nearest number is known, in cases that differ in every other mode
    subnormals    neither operands nor results are taken for zero, or both are in an engine of which this is known
    products      matrix products, in units of the error that γ_n allows: TF32 and bfloat16 exceed it
    sums          averages over MOST_KEYS keys, in units of the error of the additions that `ir.summing.depth` counts

Proofs assume that numpy's elementary functions are within LIBM_ULPS ulp. All of this is a sample, and no
proof. It covers engines on the CPU, like the certificates.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from attnc.constructions.built import Progress
from attnc.engines.chains import EXPONENTIAL_ERROR, REDUCTION_ERROR
from attnc.engines.numpy_engine import NumpyEngine
from attnc.engines.powers import EXPONENTIAL_ULPS
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.spec import check
from attnc.ir.summing import MOST_KEYS, depth
from attnc.numerics.rounding import ENGINE_ULPS, LIBM_ULPS, SINE_SLACK, UNIT_ROUNDOFF, gamma
from attnc.wording import one_line

ROW = 1024
"""Scores in a row whose weights are measured together, the first of them 0: enough for vectorised loops."""
STRIDE = 64
"""One of this many consecutive float32 numbers is sampled: 4 million exponentials, in 0.1 s."""
EXP_SAMPLES = 2**16
"""Number of float64 numbers at which an exponential is compared with Arb, in about 0.5 s."""
FUNCTION_SAMPLES = 2**10
"""Number of arguments at which each of the prover's functions is compared with Arb, in 0.3 s for all of them."""
REDUCTIONS = (1, 2, 32, 64, 128, 2048)
"""Exponentials reduce their argument by multiples of log 2 divided by one of these numbers, and err most half way
between two multiples."""
BITS = {"float64": np.uint64, "float32": np.uint32}
EXTRA_ROUNDINGS = 8
"""Roundings of a term of an average besides additions: of weights, products, quotients and projections."""
COLUMNS = ("exponential", "powers", "rounding", "subnormals", "products", "sums")
"""The names of the measurements of an engine."""

Array = np.ndarray


class Measurement(NamedTuple):
    """One assumption, measured: it holds if `measured` is at most `allowed`, both in `unit`."""

    name: str
    measured: float
    allowed: float
    unit: str
    points: int
    worst: str = ""

    @property
    def holds(self) -> bool:
        return self.measured <= self.allowed

    def shown(self) -> str:
        """Return the measured number and the allowed one, or the number of wrong cases."""
        unit = " ulp" if self.unit == "ulp" else ""
        return f"{self.measured:.2g} of {self.allowed:g}{unit}" if self.allowed else f"{self.measured:g} wrong"


class Examined(NamedTuple):
    """An engine in one dtype, or the prover, with all that was measured of it."""

    name: str
    version: str
    dtype: str
    measurements: tuple[Measurement, ...]

    @property
    def holds(self) -> bool:
        return all(found.holds for found in self.measurements)

    def cells(self) -> list[str]:
        """Return the cells of a table with COLUMNS: the measured figures and the allowed ones."""
        found = {each.name: each for each in self.measurements}
        return [found[name].shown() if name in found else "" for name in COLUMNS]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON values."""
        rows = [found._asdict() | {"holds": found.holds} for found in self.measurements]
        return self._asdict() | {"holds": self.holds, "measurements": rows}


def remarks(examined: Sequence[Examined]) -> list[str]:
    """Return sentences: which engines keep which certificates, and which assumptions fail."""
    *engines, prover = examined
    lines = list[str]()
    for dtype in UNIT_ROUNDOFF:
        names = ", ".join(each.name for each in engines if each.dtype == dtype and each.holds)
        lines.append(f"Certificates in {dtype} are kept by {names or 'no engine'}.")
    worst = max(prover.measurements, key=lambda found: found.measured / found.allowed)
    fact = f"{len(prover.measurements)} functions are within {worst.measured:.2g} {worst.unit}"
    lines.append(f"The prover's {fact}; {worst.allowed:g} are assumed.")
    for each in examined:
        for found in each.measurements:
            if not found.holds:
                fact = f"{found.name}, {found.measured:.3g} {found.unit}, of at most {found.allowed:g} allowed"
                lines.append(f"NOT KEPT by {each.name} in {each.dtype}: {fact} ({found.worst or 'at random numbers'}).")
    return lines + [f"Not installed, and not measured: {name}." for name in missing()]


@dataclass(frozen=True)
class Engine:
    """The parts of an engine that are measured.

    `weights` maps rows of scores, whose first and largest is 0, to weights, up to a factor for every row. `operate`
    maps the name of an operation, one of `operations`, and two arrays to its result. `average` runs a program. If
    `may_flush`, subnormal numbers may be taken for zero: certificates bound that too (`proofs.rounding.program`). If
    `takes_powers`, exponentials in float64 must be more accurate, because their powers are weights (`engines.powers`).
    `powers` are such exponentials of base two, for the dtypes that have them.
    """

    name: str
    version: str
    dtypes: tuple[str, ...]
    weights: Callable[[Array], Array]
    operate: Callable[[str, Array, Array], Array]
    operations: tuple[str, ...] = ("add", "multiply", "divide", "matmul")
    average: Callable[[Program, Sequence[Array]], Array] | None = None
    may_flush: bool = False
    takes_powers: bool = False
    powers: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)


def examine(progress: Progress | None = None) -> list[Examined]:
    """Measure every installed engine in every dtype that it computes in, and the prover's functions."""
    found, rows = list[Examined](), {dtype: Rows.of(dtype) for dtype in UNIT_ROUNDOFF}
    installed = {name: make for name, make in ENGINES.items() if name not in missing()}
    for number, (name, make) in enumerate(installed.items()):
        try:
            engine = make()
            for dtype in engine.dtypes:
                if progress is not None:
                    progress(f"measuring {name} in {dtype}", number / len(installed))
                found.append(Examined(name, engine.version, dtype, tuple(measure(engine, rows[dtype]))))
        except Exception as error:  # whatever is wrong with a package: to find that out is the purpose
            failure = Measurement("running", 1, 0, "failures", 1, one_line(f"{type(error).__name__}: {error}"))
            found.append(Examined(name, "", "any dtype", (failure,)))
    if progress is not None:
        progress("measuring the prover's functions", 1.0)
    prover = tuple(_functions())
    return [*found, Examined("prover", f"numpy {np.__version__}", "float64", prover)]


def missing() -> list[str]:
    """Return the engines that are not installed."""
    needed = {"onnxruntime": ("onnx", "onnxruntime")}
    return [name for name in ENGINES if not all(map(importlib.util.find_spec, needed.get(name, (name,))))]


def measure(engine: Engine, rows: Rows) -> Iterator[Measurement]:
    """Measure each assumption about an engine."""
    dtype = rows.dtype
    with np.errstate(all="ignore"):
        yield rows.compare(engine)
        if dtype in engine.powers:
            yield _powers(engine.powers[dtype], dtype)
        yield _exact("rounding", engine, dtype, _rounding_cases(dtype))
        yield _exact("subnormals", engine, dtype, _subnormal_cases(dtype), or_zero=engine.may_flush)
        if "matmul" in engine.operations:
            yield _products(engine, dtype)
        if engine.average is not None:
            yield _sums(engine.average, dtype)


# --- exponentials -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of scores, the first of each 0, and their exponentials: `value` + `rest`, far closer than an ulp."""

    dtype: str
    scores: Array
    value: Array
    rest: Array

    @classmethod
    def of(cls, dtype: str) -> Rows:
        scores = -_distances(dtype)
        scores = np.pad(scores, (0, -len(scores) % (ROW - 1)), mode="edge").reshape(-1, ROW - 1)
        scores = np.pad(scores, ((0, 0), (1, 0)))
        exact = _exact_exponentials if dtype == "float64" else _exponentials_in_float64
        return cls(dtype, scores, *exact(scores))

    def compare(self, engine: Engine) -> Measurement:
        """Measure the ratio of each weight to the first in its row, in ulp of the exact exponential."""
        found: Any = engine.weights(self.scores).astype(np.longdouble if self.dtype == "float64" else np.float64)
        ratios = found / found[:, :1]
        ulp = np.spacing(self.value.astype(self.dtype)).astype(np.float64)
        errors = np.abs((ratios - self.value) - self.rest) / ulp
        floor = NEGLIGIBLE[self.dtype]
        below = np.where((ratios >= 0) & (ratios <= math.exp(floor) * (1 + 1e-6)), 0.0, np.inf)
        errors = np.where(self.scores > floor, errors, below)
        errors = np.where(np.isnan(errors), np.inf, errors)
        worst = np.unravel_index(errors.argmax(), errors.shape)
        at = f"at {float(self.scores[worst])!r}"
        is_power = engine.takes_powers and self.dtype == "float64"
        allowed = EXPONENTIAL_ULPS if is_power else ENGINE_ULPS[self.dtype]
        return Measurement("exponential", float(errors[worst]), allowed, "ulp", errors.size, at)


def _distances(dtype: str) -> Array:
    """Return positive numbers: all binades, the ends of the range, and multiples of log 2 / n with their neighbours.

    They are sorted in two parts, so that far ones are together: the weights of their row add up to 1 exactly.
    """
    rng, low = np.random.default_rng(0), NEGLIGIBLE[dtype]
    ends = np.array(
        [-low, -math.log(float(np.finfo(dtype).tiny)), -math.log(float(np.finfo(dtype).smallest_subnormal))]
    )
    if dtype == "float32":
        first, last = (int(np.float32(x).view(np.uint32)) for x in (2.0**-25, 110.0))
        bits = np.arange(first, last, STRIDE, dtype=np.uint32)
        dense = (bits + rng.integers(0, STRIDE, len(bits), np.uint32)).view(np.float32)
    else:
        spread, octaves = rng.uniform(0, 750, EXP_SAMPLES // 4), 2.0 ** rng.uniform(-60, 9, EXP_SAMPLES // 4)
        dense = np.sort(np.concatenate([spread, octaves]))
    parts = rng.choice(REDUCTIONS, EXP_SAMPLES // 2)
    steps = rng.integers(0, 2 * (-low / math.log(2) * parts).astype(np.int64)) / 2  # multiples, and half way between
    near = np.concatenate([(steps * math.log(2) / parts), np.repeat(ends, 64)]).astype(dtype)
    near = (near.view(BITS[dtype]) + rng.integers(0, 9, len(near), BITS[dtype]) - BITS[dtype](4)).view(dtype)
    return np.concatenate([dense, np.sort(near[(near >= 0) & (near < 2.0**20)]), np.array([np.inf], dtype)])


def _powers(power_of_two: Callable[[Array], Array], dtype: str) -> Measurement:
    """Measure the relative error of powers of two. None of these numbers is rounded when it is reduced."""
    rng, spread = np.random.default_rng(1), 2**20 if dtype == "float32" else 2**12
    x = np.concatenate([rng.uniform(-0.5, 0.5, spread), np.round(rng.uniform(-60, 60, spread) * 64) / 64]).astype(dtype)
    value, rest = _exact_powers(x)
    errors = np.abs((power_of_two(x).astype(np.longdouble) - value) - rest) / value / UNIT_ROUNDOFF[dtype]
    allowed = EXPONENTIAL_ERROR[dtype] - REDUCTION_ERROR[dtype]
    worst = int(np.where(np.isnan(errors), np.inf, errors).argmax())
    return Measurement("powers", float(errors[worst]), allowed, "u", errors.size, f"at {float(x[worst])!r}")


def _exact_powers(x: Array) -> tuple[Array, Array]:
    """Return powers of two as sums of two numbers. float64 has enough digits for those of float32."""
    if x.dtype == np.float32:
        return np.exp2(x.astype(np.float64)), np.zeros(len(x))
    from flint import arb

    with _many_digits():
        exact = [(arb(number) * arb(2).log()).exp() for number in x.tolist()]
        value = [float(each) for each in exact]
        return np.array(value), np.array([float(each - one) for each, one in zip(exact, value, strict=True)])


def _exact_exponentials(scores: Array) -> tuple[Array, Array]:
    from flint import arb

    value, rest = list[float](), list[float]()
    with _many_digits():
        for score in scores.ravel().tolist():
            exact = arb(score).exp() if score > -math.inf else arb(0)
            value.append(float(exact))
            rest.append(float(exact - value[-1]))
    return np.reshape(value, scores.shape), np.reshape(rest, scores.shape)


@contextmanager
def _many_digits() -> Iterator[None]:
    """Let Arb compute with 128 bits, which is more than twice the digits of float64."""
    from flint import ctx

    before, ctx.prec = ctx.prec, 128
    try:
        yield
    finally:
        ctx.prec = before


def _exponentials_in_float64(scores: Array) -> tuple[Array, Array]:
    """Return exponentials of float32 numbers by numpy in float64, where one ulp is 2^-29 of one in float32."""
    value = np.exp(scores.astype(np.float64))
    return value, np.zeros_like(value)


# --- operations -------------------------------------------------------------------------------------------------------

Case = tuple[str, Any, Any, Any]
"""An operation, its operands, and the nearest number to the exact result."""


def _rounding_cases(dtype: str) -> list[Case]:
    """Return cases of which some are off in each rounding mode but the nearest: ties, and numbers close to numbers.

    Numbers are u apart below 1, and 2u above it. All that is computed here is exact.
    """
    u = UNIT_ROUNDOFF[dtype]
    cases: list[Case] = [
        ("add", 1, u, 1),
        ("add", 1 + 2 * u, u, 1 + 4 * u),
        ("add", 1, 1.5 * u, 1 + 2 * u),
        ("add", 1, 0.5 * u, 1),
        ("multiply", 1 + 2 * u, 1 + 2 * u, 1 + 4 * u),
        ("multiply", 1 + 2 * u, 1 - 2 * u, 1),
        ("multiply", 1 + 2 * u, 1 - u, 1),
        ("divide", 1, 1 - u, 1 + 2 * u),
        ("divide", 1, 1 + 2 * u, 1 - 2 * u),
    ]
    return [*cases, *((name, -a, b if name != "add" else -b, -c) for name, a, b, c in cases)]


def _subnormal_cases(dtype: str) -> list[Case]:
    """Return cases of subnormal operands, subnormal results, and both. They are made of bits, without arithmetic.

    Up to twice the smallest normal number, the bits of a number are its multiple of the smallest subnormal one.
    """
    digits = np.finfo(dtype).nmant
    least, two, normal, half, quarter, more = (
        np.array(bits, BITS[dtype]).view(dtype)
        for bits in (1, 2, 1 << digits, 1 << digits - 1, 1 << digits - 2, 3 << digits - 1)
    )
    return [
        ("multiply", normal, 0.5, half),
        ("multiply", least, 2.0**60, 2.0 ** (61 + int(np.finfo(dtype).minexp) - digits - 1)),
        ("add", more, -normal, half),
        ("add", least, least, two),
        ("divide", normal, 4.0, quarter),
    ]


def _exact(name: str, engine: Engine, dtype: str, cases: list[Case], *, or_zero: bool = False) -> Measurement:
    """Count the cases in which an operation differs in any bit, at any place of an array. Zeros may be allowed."""
    wrong, kept = [], [case for case in cases if case[0] in engine.operations]
    for operation, *numbers in kept:
        a, b, expected = (np.full((1, ROW), number, dtype) for number in numbers)
        found = engine.operate(operation, a, b)
        is_wrong = found.view(BITS[dtype]) != expected.view(BITS[dtype])
        if (is_wrong & (found.view(BITS[dtype]) != 0) if or_zero else is_wrong).any():
            wrong.append(f"{operation} {float(numbers[0]):.9g}, {float(numbers[1]):.9g}")
    return Measurement(name, len(wrong), 0, "cases", len(kept), wrong[0] if wrong else "")


def _products(engine: Engine, dtype: str, size: int = 64) -> Measurement:
    """Measure a product of matrices of random numbers, at some of its entries, in units of γ_n Σ|a||b|."""
    rng, worst = np.random.default_rng(0), 0.0
    a, b = (rng.uniform(-1, 1, (size, size)).astype(dtype) for _ in range(2))
    found, allowed = engine.operate("matmul", a, b), Fraction(gamma(size, UNIT_ROUNDOFF[dtype]))
    for i, j in rng.integers(0, size, (size, 2)):
        terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j], strict=True)]
        error = abs(Fraction(float(found[i, j])) - sum(terms)) if np.isfinite(found[i, j]) else Fraction(10**9)
        worst = max(worst, float(error / (allowed * sum(map(abs, terms)))))
    return Measurement("products", worst, 1, "of γ_n", size)


def _sums(average: Callable[[Program, Sequence[Array]], Array], dtype: str) -> Measurement:
    """Measure averages of one large value and many that get lost if they are added to it one by one.

    Two networks, of one and of eight values per key, since engines sum them in different ways.
    """
    u, worst = UNIT_ROUNDOFF[dtype], 0.0
    allowed = Fraction(gamma(depth(MOST_KEYS, dtype) + EXTRA_ROUNDINGS, u))
    for width in (1, 8):
        values = np.full((1, MOST_KEYS, width), 0.75 * u, dtype)
        values[0, np.linspace(0, MOST_KEYS - 1, width).astype(int), np.arange(width)] = 1.0
        zeros, ones = np.zeros((width, 1), dtype), np.eye(width, dtype=dtype)
        layer = Attention("mean", (Head(zeros, zeros, ones, ones),), tuple(f"y{i}" for i in range(width)), cross=True)
        program = check(Program((layer,), ((1, width), (MOST_KEYS, width)), (width,)))
        found = average(program, [np.zeros((1, 1, width), dtype), values])[0]
        exact = (1 + (MOST_KEYS - 1) * Fraction(0.75 * u)) / MOST_KEYS
        errors = [
            abs(Fraction(float(mean)) - exact) / (allowed * exact) if np.isfinite(mean) else 10**9 for mean in found
        ]
        worst = max(worst, float(max(errors)))
    return Measurement("sums", worst, 1, "of γ_depth", 9)


# --- the prover -------------------------------------------------------------------------------------------------------


def _functions() -> Iterator[Measurement]:
    """Measure the functions of the prover, in ulp, and sin and cos in units of SINE_SLACK."""
    from flint import arb
    from scipy.special import erf

    rng = np.random.default_rng(1)
    signs = rng.choice([-1.0, 1.0], FUNCTION_SAMPLES)
    small, wide, far = (signs * 2.0 ** rng.uniform(-30, last, FUNCTION_SAMPLES) for last in (0, 9, 20))
    positive = 2.0 ** rng.uniform(-1000, 1000, FUNCTION_SAMPLES)
    functions: list[tuple[str, Any, Any, tuple[Array, ...]]] = [
        ("exp", np.exp, arb.exp, (wide,)),
        ("log", np.log, arb.log, (positive,)),
        ("power", np.power, arb.__pow__, (positive, rng.uniform(-1, 1, FUNCTION_SAMPLES))),
        ("tan", np.tan, arb.tan, (wide,)),
        ("tanh", np.tanh, arb.tanh, (wide,)),
        ("sinh", np.sinh, arb.sinh, (wide,)),
        ("cosh", np.cosh, arb.cosh, (wide,)),
        ("arctan", np.arctan, arb.atan, (far,)),
        ("arcsin", np.arcsin, arb.asin, (small,)),
        ("arccos", np.arccos, arb.acos, (small,)),
        ("erf", erf, arb.erf, (np.clip(wide, -5, 5),)),
        ("logaddexp", lambda t: np.logaddexp(0.0, t), lambda t: t.exp().log1p(), (wide,)),
        ("sin", np.sin, arb.sin, (far,)),
        ("cos", np.cos, arb.cos, (far,)),
    ]
    for name, function, exactly, arguments in functions:
        is_absolute, worst, at = name in ("sin", "cos"), 0.0, ""
        with np.errstate(all="ignore"), _many_digits():
            for value, *numbers in zip(
                function(*arguments).tolist(), *(part.tolist() for part in arguments), strict=True
            ):
                ulp = SINE_SLACK / LIBM_ULPS if is_absolute else math.ulp(value)
                error = abs(float(exactly(*map(arb, numbers)) - value)) / ulp
                if error > worst:
                    worst, at = error, f"at {', '.join(map(repr, numbers))}"
        yield Measurement(name, worst, LIBM_ULPS, "·2^-52" if is_absolute else "ulp", FUNCTION_SAMPLES, at)


# --- the engines ------------------------------------------------------------------------------------------------------


def _numpy() -> Engine:
    def operate(name: str, a: Array, b: Array) -> Array:
        return np.asarray(getattr(np, name)(a, b))

    def average(program: Program, inputs: Sequence[Array]) -> Array:
        return NumpyEngine(program)(*inputs)

    return Engine("numpy", np.__version__, tuple(UNIT_ROUNDOFF), np.exp, operate, average=average, takes_powers=True)


def _numba() -> Engine:
    """Return the compiled loops. All of them use one exponential, and one power of two."""
    from attnc.engines import exponential_numba, grid_numba

    def weights(scores: Array) -> Array:
        flat = np.maximum(scores, NEGLIGIBLE[str(scores.dtype)]).ravel()
        found = np.empty_like(flat)
        exponential_numba.exponentials(flat, found)
        return found.reshape(scores.shape)

    def power_of_two(x: Array) -> Array:
        found = np.empty_like(x)
        exponential_numba.powers_of_two(x, x.dtype.type(1), x.dtype.type(0), found)
        return found

    return Engine(
        "numba",
        version("numba"),
        tuple(UNIT_ROUNDOFF),
        weights,
        lambda name, a, b: grid_numba.product_of_weights(a, b),
        ("multiply",),
        average=lambda program, inputs: NumpyEngine(program)(*inputs, is_compiled=True),
        powers=dict.fromkeys(UNIT_ROUNDOFF, power_of_two),
    )


def _torch() -> Engine:
    import torch

    from attnc.engines.torch_engine import to_torch

    def operate(name: str, a: Array, b: Array) -> Array:
        found: Any = getattr(torch, name)(torch.from_numpy(a), torch.from_numpy(b))
        return np.asarray(found.numpy())

    def weights(scores: Array) -> Array:
        """Return every other row by the softmax over the first axis, the others by the one over the last: both run."""
        found = torch.softmax(torch.from_numpy(scores), dim=-1)
        found[::2] = torch.softmax(torch.from_numpy(scores[::2].T.copy()), dim=0).mT
        return np.asarray(found.numpy())

    def average(program: Program, inputs: Sequence[Array]) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the properties measured here
            return np.asarray(to_torch(program)(*map(torch.from_numpy, inputs)).numpy())

    return Engine("torch", torch.__version__, tuple(UNIT_ROUNDOFF), weights, operate, average=average)


def _jax() -> Engine:
    """Return the engine on a CPU, where XLA takes subnormal numbers for zero."""
    import jax
    import jax.numpy as jnp

    from attnc.engines import jax_engine

    names: dict[str, Callable[..., Any]] = {
        "add": jnp.add,
        "multiply": jnp.multiply,
        "divide": jnp.divide,
        "matmul": jax_engine.matmul,
    }

    def run(function: Callable[..., Any], *arrays: Array) -> Array:
        with jax.enable_x64(True):
            return np.asarray(jax.jit(function)(*arrays))

    def weights(scores: Array) -> Array:
        """Return every other row by the exponential of instructions, the others by that of stages."""
        found = run(jax_engine.exponentials, scores).copy()
        found[::2] = run(jax_engine.exponential, scores[::2])
        return found

    def average(program: Program, inputs: Sequence[Array]) -> Array:
        with jax.enable_x64(True):
            return np.asarray(jax_engine.to_jax(program)(*inputs))

    return Engine(
        "jax",
        jax.__version__,
        tuple(UNIT_ROUNDOFF),
        weights,
        lambda name, a, b: run(names[name], a, b),
        average=average,
        may_flush=True,
        powers={"float64": lambda x: run(lambda x: jax_engine.power_of_two(x, 1.0, 0.0), x)},
    )


def _onnxruntime() -> Engine:
    from onnx import helper

    from attnc.exports.onnx_file import OPSET, run_onnx, to_model

    operators = {"add": "Add", "multiply": "Mul", "divide": "Div", "matmul": "MatMul"}

    def run(operator: str, *arrays: Array, **attributes: Any) -> Array:
        names = [f"input{i}" for i in range(len(arrays))]
        element = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
        *given, made = (helper.make_tensor_value_info(name, element, [None, None]) for name in (*names, "output"))
        node = helper.make_node(operator, names, ["output"], **attributes)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            helper.make_graph([node], "doctor", given, [made]),
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets),
        )
        return run_onnx(model.SerializeToString(), arrays)

    return Engine(
        "onnxruntime",
        version("onnxruntime"),
        tuple(UNIT_ROUNDOFF),
        lambda scores: run("Softmax", scores, axis=-1),
        lambda name, a, b: run(operators[name], a, b),
        average=lambda program, inputs: run_onnx(to_model(program, {}).SerializeToString(), inputs),
    )


ENGINES: dict[str, Callable[[], Engine]] = {
    "numpy": _numpy,
    "numba": _numba,
    "torch": _torch,
    "jax": _jax,
    "onnxruntime": _onnxruntime,
}
"""The engines, by the name of their package."""
