"""Every public name has a docstring with an example that runs."""

from __future__ import annotations

import doctest
import importlib.util

import pytest

import attnc
from attnc import constructions, incontext

WITH_EXAMPLE = {"binomial", "graded", "spectral_grid", "table_grid", "table_scattered"}
"""Constructions that have an example already."""
WITHOUT_EXAMPLE = {
    "attnc.Built",
    "attnc.Certificate",
    "attnc.Estimate",
    *(f"attnc.constructions.{name}" for name in constructions.__all__ if name not in WITH_EXAMPLE),
}
"""Names whose example is still to be written. This set may only shrink."""
NEEDS = {
    "attnc.convert": "torch",
    "attnc.Report": "torch",
    "attnc.load_converted": "torch",
    "attnc.incontext": "sklearn",
}
"""Optional packages without which an example cannot run."""
NAMES = {
    f"{module.__name__}.{name}": (module, name)
    for module in (attnc, constructions, incontext)
    for name in module.__all__
    if f"{module.__name__}.{name}" not in ("attnc.constructions", "attnc.incontext")
}


@pytest.mark.parametrize("full_name", NAMES)
def test_the_example_runs(full_name: str) -> None:
    needed = [package for prefix, package in NEEDS.items() if full_name.startswith(prefix)]
    if not all(importlib.util.find_spec(package) for package in needed):
        pytest.skip(f"needs {', '.join(needed)}")
    module, name = NAMES[full_name]
    public = getattr(module, name)
    assert public.__doc__, f"{full_name} has no docstring"
    found = [test for test in doctest.DocTestFinder(recurse=False).find(public, full_name) if test.examples]
    if full_name in WITHOUT_EXAMPLE and not found:
        pytest.skip("no example yet")
    assert found, f"{full_name} has no example"
    for test in found:
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not report, "".join(report)


def test_names_without_an_example_exist() -> None:
    assert set(NAMES) >= WITHOUT_EXAMPLE
