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
    "attnc.Network.to_torch": "torch",
    "attnc.Network.with_weights": "torch",
    "attnc.compare": "torch",
    "attnc.Network.to_jax": "jax",
    "attnc.Network.export_onnx": "onnxruntime",
    "attnc.Network.plot": "matplotlib",
    "attnc.incontext": "sklearn",
    "attnc.nn": "torch",
    "attnc.groundtruth": "torch",
    "attnc_lab": "torch",
}
"""Optional packages without which an example cannot run."""


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
    """The public methods and properties of public classes."""
    for full_name, public in NAMES.items():
        if inspect.isclass(public) and not issubclass(public, Exception):
            for name, member in vars(public).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if not name.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                    yield f"{full_name}.{name}", function


def is_lambda(function: Any) -> bool:
    return getattr(function, "__name__", "") == "<lambda>"


def needs(full_name: str) -> list[str]:
    """The packages that an example needs and that are not installed."""
    needed = (package for prefix, package in NEEDS.items() if full_name.startswith(prefix))
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
    """Methods of public classes have the sections that apply, and their examples run if they have any."""
    lacking, seen = list[str](), set[int]()
    for full_name, member in public_members():
        if is_lambda(member) or id(member) in seen or full_name in NAMES:
            continue
        seen.add(id(member))
        if needs(full_name):
            continue
        run_examples(member, full_name)
        if isinstance(member, property):
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
    [*NAMES.items(), *((name, member) for name, member in public_members() if not is_lambda(member))],
)
def test_the_docstring_has_a_summary(full_name: str, public: Any) -> None:
    """Its first paragraph ends with a full stop: it is a sentence, or a noun phrase that names the thing."""
    first = (inspect.getdoc(public) or "").split("\n\n")[0]
    assert first.endswith((".", ":")), f"{full_name} has no summary: {first!r}"
    assert not first.startswith(("Of ", "What ")), full_name
