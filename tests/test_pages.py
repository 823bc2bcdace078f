"""The pages of the documentation: pictures with alt text, all commands, indices that are lowered, formulas offline."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import attnc
from attnc.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORTEST_ALT = 25
"""Least number of letters of an alt text that describes a picture, rather than names it."""


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "docs/builders"))
    return runpy.run_path(str(ROOT / "docs/builders/website.py"), run_name="website")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_picture_is_described(page: Path) -> None:
    for alt, name in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert len(alt) >= SHORTEST_ALT, f"{page.name}: {name} has the alt text {alt!r}"


def commands(command: Any, path: tuple[str, ...] = ("attnc",)) -> list[str]:
    found = [" ".join(path)] if len(path) > 1 and not hasattr(command, "commands") else []
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            found += commands(inner, (*path, name))
    return found


def test_the_command_line_page_has_every_command() -> None:
    import typer

    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    names = commands(typer.main.get_command(app))
    assert {"attnc compile", "attnc lab run", "attnc ground-truth score"} <= set(names)
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2L_k·x̃_i", "2L<sub>k</sub>·x̃<sub>i</sub>"),
        ("x_j², 2βL_{j,i} in L_p", "x<sub>j</sub>², 2βL<sub>j,i</sub> in L<sub>p</sub>"),
        (
            "2^l, e^{−β}, p^−0.91 and [0, 1]^d",
            "2<sup>l</sup>, e<sup>−β</sup>, p<sup>−0.91</sup> and [0, 1]<sup>d</sup>",
        ),
        ("`x_j` and $x_j$ and max_affine", "`x_j` and $x_j$ and max_affine"),
        ("# L_p\n$$\nx_j\n$$\n```python\nx_j = 2\n```\n", "# L_p\n$$\nx_j\n$$\n```python\nx_j = 2\n```\n"),
        ("![x_j](a_b.png) [x](y_z.md)", "![x_j](a_b.png) [x](y_z.md)"),
    ],
)
def test_indices_and_powers_of_running_text(website: dict[str, Any], text: str, shown: str) -> None:
    assert website["typeset"](text) == shown


def test_the_pages_of_the_api_have_every_name_with_its_parts(website: dict[str, Any]) -> None:
    pages = website["api_pages"]()
    for name in (name for name in attnc.__all__ if callable(getattr(attnc, name))):
        assert f"[`{name}`]" in pages["api"]
    assert {"### compile", "**Parameters**", "**Returns**", "**Raises**", "**Examples**"} <= set(
        pages["api-functions"].splitlines()
    )
    everything = "\n".join(pages.values())
    assert " at 0x" not in everything
    for name in (
        "### Network.to_torch",
        "### max_affine",
        "### Ridge",
        "### certify_heads",
        "### diagnose",
        "### check",
    ):
        assert f"\n{name}\n" in everything


def test_formulas_need_no_network() -> None:
    folder = ROOT / "docs/katex"
    assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")
    style = (folder / "katex.min.css").read_text(encoding="utf-8")
    fonts = set(re.findall(r"url\(([^)]+)\)", style))
    assert fonts
    for font in fonts:
        assert (folder / font).is_file(), font
    config = (ROOT / "docs/zensical.toml").read_text(encoding="utf-8")
    for name in ("katex/katex.min.css", "katex/page.css", "katex/katex.min.js", "katex/render.js"):
        assert f'"{name}"' in config
        assert (ROOT / "docs" / name).is_file()


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_formulas_are_closed(page: Path) -> None:
    """Every dollar sign outside of code belongs to a pair, and braces within a formula are balanced."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert text.count("$$") % 2 == 0
    for formula in re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL) + re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", text):
        bare = formula.replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}"), formula
        assert formula.count(r"\left") == formula.count(r"\right"), formula
    assert re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "", text, flags=re.DOTALL).count("$") == 0
