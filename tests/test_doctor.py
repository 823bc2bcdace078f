"""`attnc doctor`: this machine keeps the assumptions of certificates, and engines that do not are found out."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import json
import math
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc import doctor
from attnc.cli import main
from attnc.engines.powers import EXPONENTIAL_ULPS
from attnc.errors import InputError
from attnc.ir.rounding import NEGLIGIBLE
from attnc.numerics import arithmetic
from attnc.numerics.rounding import ENGINE_ULPS, LIBM_ASSUMPTION, LIBM_ULPS, UNIT_ROUNDOFF

DTYPES = tuple(UNIT_ROUNDOFF)
MODES = {"down": 0x400, "up": 0x800, "to zero": 0xC00}
"""The rounding modes of fesetround on x86, besides the nearest, which is 0."""
OWN_MODES = {"jax"}
"""Engines that set the modes of the processor while they run: to the nearest, and subnormal numbers to zero."""
NUMPY = doctor._numpy()


@pytest.fixture(scope="module")
def examined() -> list[doctor.Examined]:
    return doctor.examine()


@pytest.fixture(scope="module")
def rows() -> dict[str, doctor.Rows]:
    return {dtype: doctor.Rows.of(dtype) for dtype in DTYPES}


@contextmanager
def flushing_to_zero() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush to zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def rounding(mode: str) -> Iterator[None]:
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        pytest.skip("the numbers of the modes are those of x86")
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    assert library.fesetround(MODES[mode]) == 0
    try:
        yield
    finally:
        library.fesetround(0)


@pytest.fixture
def not_warned() -> Iterator[None]:
    """As in a process that has not warned yet."""
    arithmetic._warn_once.cache_clear()
    yield
    arithmetic._warn_once.cache_clear()


def failed(engine: doctor.Engine, rows: doctor.Rows) -> set[str]:
    return {found.name for found in doctor.measure(engine, rows) if not found.holds}


# --- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_keeps_the_assumptions(examined: list[doctor.Examined]) -> None:
    for each in examined:
        for found in each.measurements:
            assert found.holds, (each.name, each.dtype, found)
    measured = {(each.name, each.dtype) for each in examined}
    assert measured >= {("numpy", "float64"), ("numpy", "float32"), ("prover", "float64")}
    assert {name for name, _ in measured} == {*doctor.ENGINES, "prover"} - set(doctor.missing())


def test_every_assumption_is_measured(examined: list[doctor.Examined]) -> None:
    *engines, prover = examined
    for each in engines:
        names = [found.name for found in each.measurements]
        left_out = {"products"} if each.name == "numba" else set()
        left_out |= set() if each.name == "numba" or (each.name, each.dtype) == ("jax", "float64") else {"powers"}
        assert names == [name for name in doctor.COLUMNS if name not in left_out]
        (exponential, *_) = each.measurements
        takes_powers = each.name == "numpy" and each.dtype == "float64"
        assert exponential.allowed == (EXPONENTIAL_ULPS if takes_powers else ENGINE_ULPS[each.dtype])
        assert exponential.measured > 0.4  # half an ulp is the best that rounding allows
        assert exponential.points > (10**6 if each.dtype == "float32" else 5 * 10**4)
    named = re.findall(r"[a-z]+", LIBM_ASSUMPTION.partition("(")[2].partition(")")[0])
    named = {*named, "sin", "cos"} - {"and", "of", "a", "number"}
    assert {found.name for found in prover.measurements} == named
    assert {found.allowed for found in prover.measurements} == {LIBM_ULPS}


def test_the_command(examined: list[doctor.Examined], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ending:
            main(["doctor", *arguments])
        return int(ending.value.code or 0), " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(doctor, "examine", lambda progress=None: examined)
    code, shown = run()
    assert code == 0
    assert "Certificates in float64 are kept by numpy" in shown
    assert "Certificates in float32 are kept by numpy" in shown
    assert "NOT KEPT" not in shown
    code, text = run("--json")
    facts = json.loads(text)
    assert (code, facts["holds"]) == (0, True)
    assert [row["name"] for row in facts["engines"]] == [each.name for each in examined]
    assert facts["engines"][0]["measurements"][0]["name"] == "exponential"
    first, *others = examined
    off = doctor.Measurement("exponential", 9.25, EXPONENTIAL_ULPS, "ulp", 10, "at -1.5")
    broken = first._replace(measurements=(off, *first.measurements[1:]))
    monkeypatch.setattr(doctor, "examine", lambda progress=None: [broken, *others])
    monkeypatch.setattr(doctor, "missing", lambda: ["numba"])
    code, shown = run()
    assert code == 1
    assert "NOT KEPT by numpy in float64: exponential, 9.25 ulp, of at most 1.25 allowed (at -1.5)." in shown
    assert "Certificates in float64 are kept by numpy" not in shown
    assert "Not installed, and not measured: numba." in shown
    code, text = run("--json")
    assert json.loads(text) | {"holds": False, "missing": ["numba"]} == json.loads(text)
    assert code == 1


def test_a_package_that_does_not_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> doctor.Engine:
        raise ImportError("libtorch.so:\n not found")

    monkeypatch.setattr(doctor, "ENGINES", {"numpy": make})
    monkeypatch.setattr(doctor, "STRIDE", 2**14)
    monkeypatch.setattr(doctor, "EXP_SAMPLES", 2**10)
    broken, prover = doctor.examine()
    assert not broken.holds
    assert prover.holds
    assert (
        "running, 1 failures, of at most 0 allowed (ImportError: libtorch.so: not found)."
        in doctor.remarks([broken, prover])[-1]
    )


def test_onnxruntime_is_not_measured_without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "onnx" else name)
    assert doctor.missing() == ["onnxruntime"]


# --- the measurements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cases_are_rounded_to_nearest(dtype: str) -> None:
    """By exact fractions: no number is closer, and of two that are as close the even one is taken."""
    operations: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
        "add": Fraction.__add__,
        "multiply": Fraction.__mul__,
        "divide": Fraction.__truediv__,
    }
    for operation, *numbers in [*doctor._rounding_cases(dtype), *doctor._subnormal_cases(dtype)]:
        a, b, expected = (np.array(number).astype(dtype)[()] for number in numbers)
        assert all(float(np.dtype(dtype).type(number)) == number for number in numbers)
        exact = operations[operation](Fraction(float(a)), Fraction(float(b)))
        error = abs(Fraction(float(expected)) - exact)
        for neighbour in (np.nextafter(expected, np.inf), np.nextafter(expected, -np.inf)):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and expected.view(doctor.BITS[dtype]) % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ulps", [1, 3, 5, math.nan])
def test_an_exponential_that_is_off_is_found(rows: dict[str, doctor.Rows], dtype: str, ulps: float) -> None:
    """At a single number: the one in a million that an engine gets wrong."""
    scores = rows[dtype].scores
    place = tuple(np.argwhere((scores < -20) & (scores > -30))[17])

    def weights(scores: np.ndarray) -> np.ndarray:
        found = rows[dtype].value.astype(dtype)  # rounded to nearest
        found[place] += np.dtype(dtype).type(ulps) * np.spacing(found[place])
        return found

    found = rows[dtype].compare(dataclasses.replace(NUMPY, weights=weights))
    assert found.holds == (ulps < 4 if dtype == "float32" else ulps < EXPONENTIAL_ULPS)
    assert found.worst == f"at {float(scores[place])!r}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_below_the_negligible_may_be_zero_but_not_large(rows: dict[str, doctor.Rows], dtype: str) -> None:
    scores, least = rows[dtype].scores, NEGLIGIBLE[dtype]
    assert (scores < least).sum() > 1000
    assert np.isneginf(scores).any()
    edge = math.exp(least)
    for far, holds in ((0.0, True), (edge, True), (1.01 * edge, False), (-edge, False), (math.nan, False)):
        weights = np.where(scores > least, np.exp(scores), np.dtype(dtype).type(far))
        assert rows[dtype].compare(dataclasses.replace(NUMPY, weights=lambda _, w=weights: w)).holds is holds


def test_the_sample_covers_the_range(rows: dict[str, doctor.Rows]) -> None:
    for dtype, each in rows.items():
        distances = np.unique(-each.scores[each.scores < 0].astype(np.float64))
        assert distances[0] < 2.0**-24
        for low, high in zip(2.0 ** np.arange(-20, 6), 2.0 ** np.arange(-19, 7), strict=True):
            assert ((distances >= low) & (distances < high)).sum() > 200, (dtype, low)
        subnormal = -math.log(float(np.finfo(dtype).tiny))
        assert ((distances > subnormal) & (distances < subnormal + 10)).sum() > 50


def test_reduced_precision_in_products_is_found(rows: dict[str, doctor.Rows]) -> None:
    """TF32 keeps 10 digits after the first, bfloat16 7."""
    for digits in (10, 7):

        def operate(name: str, a: np.ndarray, b: np.ndarray, digits: int = digits) -> np.ndarray:
            if name == "matmul":
                a, b = (_cut(array, digits) for array in (a, b))
            return NUMPY.operate(name, a, b)

        assert failed(dataclasses.replace(NUMPY, operate=operate), rows["float32"]) == {"products"}


def _cut(array: np.ndarray, digits: int) -> np.ndarray:
    return (array.view(np.uint32) & np.uint32(0xFFFFFFFF << (23 - digits) & 0xFFFFFFFF)).view(np.float32)


def test_sums_one_by_one_are_found_in_float32(rows: dict[str, doctor.Rows]) -> None:
    def average(program, inputs):
        return np.cumsum(inputs[1] / np.float32(doctor.MOST_KEYS), axis=1, dtype=inputs[1].dtype)[:, -1]

    one_by_one = dataclasses.replace(NUMPY, average=average)
    assert failed(one_by_one, rows["float32"]) == {"sums"}
    assert failed(one_by_one, rows["float64"]) == set()


def test_flushing_to_zero_is_found(rows: dict[str, doctor.Rows]) -> None:
    engines = [make() for name, make in doctor.ENGINES.items() if name not in {*doctor.missing(), *OWN_MODES}]
    for engine in engines:
        for dtype in engine.dtypes:
            with flushing_to_zero():
                assert "subnormals" in failed(engine, rows[dtype]), (engine.name, dtype)
            assert failed(engine, rows[dtype]) == set()


def test_engines_that_take_subnormal_numbers_for_zero_must_be_known_for_it(rows: dict[str, doctor.Rows]) -> None:
    """If so, certificates bound it. Another wrong result is found."""

    def flushed(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = NUMPY.operate(name, a, b)
        return np.where(np.abs(found) < np.finfo(a.dtype).tiny, 0, found).astype(a.dtype)

    for dtype in DTYPES:
        strict = dataclasses.replace(NUMPY, operate=flushed)
        assert failed(strict, rows[dtype]) == {"subnormals"}
        assert failed(dataclasses.replace(strict, may_flush=True), rows[dtype]) == set()
        doubled = dataclasses.replace(
            NUMPY, operate=lambda name, a, b: flushed(name, a, b) + np.finfo(a.dtype).tiny, may_flush=True
        )
        assert "subnormals" in failed(doubled, rows[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_another_rounding_mode_is_found(rows: dict[str, doctor.Rows], mode: str) -> None:
    for name, make in doctor.ENGINES.items():
        if name in {*doctor.missing(), *OWN_MODES}:
            continue
        engine = make()
        for dtype in engine.dtypes:
            with rounding(mode):
                found = doctor._exact("rounding", engine, dtype, doctor._rounding_cases(dtype))
            assert not found.holds, (name, dtype)


# --- evaluation in another arithmetic ---------------------------------------------------------------------------------


@contextmanager
def every_fault(name: str) -> Iterator[None]:
    with flushing_to_zero() if name == "zero" else rounding(name):
        yield


FAULTS = {"zero": "takes subnormal numbers for zero", **dict.fromkeys(MODES, "does not round to the nearest number")}


def warnings_of(fault: str, *calls: Callable[[], object]) -> list[warnings.WarningMessage]:
    with every_fault(fault), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_evaluation_warns_once(not_warned: None, fault: str) -> None:
    net = attnc.compile("tanh(x)", {"x": (-1, 1)}, 1e-4)
    calls = (lambda: net([[0.5]]), lambda: net.run([[0.5]], cache=True), lambda: net([[0.25]]))
    (warned,) = warnings_of(fault, *calls)
    assert FAULTS[fault] in str(warned.message)
    assert "see `attnc doctor`" in str(warned.message)
    assert warned.category is RuntimeWarning
    assert warned.filename == __file__
    net([[0.5]])  # warnings are errors in these tests


@pytest.mark.parametrize("fault", FAULTS)
def test_torch_modules_warn_once(not_warned: None, fault: str) -> None:
    torch = pytest.importorskip("torch")
    module = attnc.compile("tanh(x)", {"x": (-1, 1)}, 1e-4).to_torch()
    points = torch.zeros(3, 1, dtype=torch.float64)
    (warned,) = warnings_of(fault, lambda: module(points), lambda: module(points))
    assert FAULTS[fault] in str(warned.message)
    module(points)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:the arithmetic of this thread")
def test_nothing_is_proved_in_another_arithmetic(not_warned: None, fault: str) -> None:
    net = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3)
    with every_fault(fault):
        with pytest.raises(InputError, match=f"nothing can be proved here: .* {FAULTS[fault]}"):
            attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3)
        with pytest.raises(InputError, match="nothing can be proved here"):
            net.bound({"x": (0, 0.5)})
    assert arithmetic.fault() is None
