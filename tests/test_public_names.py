"""Every public name has a docstring in numpydoc sections, with an example that runs."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import attnc
import attnc_checker
import attnc_lab
import attnc_playground
from attnc import constructions, groundtruth, heads, incontext

LAYERS = (attnc.nn,) if importlib.util.find_spec("torch") else ()
MODULES = (attnc, constructions, heads, incontext, *LAYERS, groundtruth, attnc_lab, attnc_checker, attnc_playground)

NEEDS = {
    "attnc.convert": "torch",
    "attnc.Report": "torch",
    "attnc.load_converted": "torch",
    "attnc.Network.with_weights": "torch",
    "attnc.compare": "torch",
    "attnc.incontext": "sklearn",
    "attnc.nn": "torch",
    "attnc.groundtruth": "torch",
    "attnc_lab": "torch",
}
"""Optional packages without which the examples below a name cannot run."""
METHODS_NEED = {
    "to_torch": "torch",
    "of_torch": "torch",
    "to_jax": "jax",
    "export_onnx": "onnxruntime",
    "plot": "matplotlib",
    "html": "jinja2",
}
"""Optional packages without which the examples of methods with these names cannot run."""


def public_names() -> Iterator[tuple[str, Any]]:
    """The names that the packages export, and the public methods and properties of a network."""
    for module in MODULES:
        for name in module.__all__:
            if callable(getattr(module, name)):
                yield f"{module.__name__}.{name}", getattr(module, name)
    for name, member in vars(attnc.Network).items():
        if name == "__call__" or (not name.startswith("_") and (callable(member) or isinstance(member, property))):
            yield f"attnc.Network.{name}", member


NAMES = dict(public_names())


def sections(public: Any) -> set[str]:
    """The titles of the numpydoc sections of a docstring."""
    lines = (inspect.getdoc(public) or "").splitlines()
    return {title for title, line in itertools.pairwise(lines) if title and set(line) == {"-"}}


def public_members() -> Iterator[tuple[str, Any]]:
    """The public methods and properties of public classes, once each, with those that they inherit from attnc."""
    seen = set[int]()
    for full_name, public in NAMES.items():
        if not inspect.isclass(public) or issubclass(public, Exception):
            continue
        for name, member in inspect.getmembers_static(public):
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            inner = getattr(function, "fget", None) or getattr(function, "func", function)
            is_ours = inspect.isfunction(inner) and inner.__module__.partition(".")[0].startswith("attnc")
            if name.startswith("_") or not is_ours or is_lambda(inner) or id(function) in seen:
                continue
            seen.add(id(function))
            yield f"{full_name}.{name}", function


def is_lambda(function: Any) -> bool:
    return getattr(function, "__name__", "") == "<lambda>"


def needs(full_name: str) -> list[str]:
    """The packages that an example needs and that are not installed."""
    needed = [package for prefix, package in NEEDS.items() if full_name.startswith(prefix)]
    needed += [package for name, package in METHODS_NEED.items() if full_name.endswith(f".{name}")]
    return [package for package in needed if not importlib.util.find_spec(package)]


@pytest.mark.parametrize("full_name", NAMES)
def test_the_example_runs(full_name: str) -> None:
    if missing := needs(full_name):
        pytest.skip(f"needs {', '.join(missing)}")
    assert run_examples(NAMES[full_name], full_name), f"{full_name} has no example"


def run_examples(public: Any, full_name: str) -> int:
    """Run the examples of one docstring. Return their number."""
    found = [test for test in doctest.DocTestFinder(recurse=False).find(public, full_name) if test.examples]
    for test in found:
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not report, "".join(report)
    return len(found)


@pytest.mark.parametrize("full_name", NAMES)
def test_the_docstring_has_the_sections_that_apply(full_name: str) -> None:
    public = NAMES[full_name]
    found = sections(public)
    assert "Examples" in found
    if isinstance(public, property):
        return
    if inspect.isclass(public):
        if dataclasses.is_dataclass(public) or "__init__" in vars(public):
            assert found & {"Parameters", "Attributes"}, f"{full_name} has fields"
        return
    signature = inspect.signature(public)
    if set(signature.parameters) - {"self"}:
        assert "Parameters" in found
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        assert "Returns" in found
    if "raise " in inspect.getsource(public):
        assert "Raises" in found


def test_members_state_their_parameters_and_results() -> None:
    """Methods of public classes have the sections that apply, and all members have an example that runs."""
    lacking = list[str]()
    for full_name, member in public_members():
        if full_name in NAMES or needs(full_name):
            continue
        if not run_examples(member, full_name) and ">>>" not in (inspect.getdoc(member) or ""):  # it may be inherited
            lacking.append(f"{full_name}: Examples")
        if not inspect.isfunction(member):
            continue
        signature, found = inspect.signature(member), sections(member)
        expected = {
            "Parameters": bool(set(signature.parameters) - {"self", "cls"}),
            "Returns": signature.return_annotation not in (None, "None", inspect.Signature.empty),
            "Raises": "raise " in inspect.getsource(member),
        }
        lacking += [
            f"{full_name}: {title}"
            for title, is_expected in expected.items()
            if is_expected and title not in found and not (title == "Returns" and "Yields" in found)
        ]
    assert not lacking


@pytest.mark.parametrize(
    ("full_name", "public"),
    [*NAMES.items(), *public_members()],
)
def test_the_docstring_has_a_summary(full_name: str, public: Any) -> None:
    """Its first paragraph ends with a full stop: it is a sentence, or a noun phrase that names the thing."""
    first = (inspect.getdoc(public) or "").split("\n\n")[0]
    assert first.endswith((".", ":")), f"{full_name} has no summary: {first!r}"
    assert not first.startswith(("Of ", "What ")), full_name
