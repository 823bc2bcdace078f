"""The files that a package is expected to have, and their content."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import attnc

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_licence_is_the_text_of_apache() -> None:
    """As apache.org publishes it, with its blanks at the beginning of lines."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_one_version() -> None:
    assert PROJECT["version"] == attnc.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {attnc.__version__}\n" in citation


def test_every_package_is_typed() -> None:
    packages = [path.parent for path in (ROOT / "src").glob("*/__init__.py")]
    assert len(packages) == 4
    assert all((package / "py.typed").is_file() for package in packages)


def test_no_host_is_invented() -> None:
    """Addresses lead to the papers alone, wherever the package names one."""
    assert all(url.startswith("https://arxiv.org/abs/") for url in PROJECT["urls"].values())
    assert PROJECT["authors"] == [{"name": "attnc maintainers"}]
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"):
        hosts = re.findall(r"https?://([^/\s)]+)", (ROOT / name).read_text(encoding="utf-8"))
        assert set(hosts) <= {"arxiv.org"}, name


def test_every_extra_is_tried_with_the_wheel() -> None:
    from package.try_wheel import USES

    assert set(PROJECT["optional-dependencies"]) | {"none"} == set(USES)


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    runs = re.findall(r"run: (.*)", workflow)
    assert runs
    for line in runs:
        assert line.removeprefix("make ") in targets, line
    for version in ("3.11", "3.12", "3.13"):
        assert f'"{version}"' in workflow
        assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
