"""Builds the documentation site: `make docs`, or `python docs/builders/website.py [--out site]`.

The pages of docs/ and CONTRIBUTING.md are copied to a folder of their own. Two pages are added there: the API, from the
docstrings of all public names, and the commands, from their help texts. Zensical turns the folder into a site that
needs no network.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from transcripts import run

DOCS = Path(__file__).resolve().parents[1]
CONFIG = DOCS / "zensical.toml"
MODULES = ("attnc", "attnc.constructions", "attnc.incontext")
"""The modules whose `__all__` is public."""
MAX_SIGNATURE = 100
"""The length of a signature, in characters, above which every parameter has a line of its own."""
QUOTED_TYPE = r"(?<=: |> )'([^']*)'"
"""A type in a signature: `from __future__ import annotations` makes it a string."""
HELP_COLUMNS = "86"
"""The width of help texts, in characters: it fits beside the navigation on a desktop, and scrolls on a phone."""


def public_objects(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module, and the public methods of classes that it defines."""
    holder = importlib.import_module(module)
    for name in sorted(holder.__all__, key=str.lower):
        value = getattr(holder, name)
        if not callable(value):
            continue
        yield f"{module}.{name}", value
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, method in vars(value).items():
                is_public = not member.startswith("_") and (inspect.isfunction(method) or isinstance(method, property))
                if is_public and inspect.getdoc(method):
                    yield f"{module}.{name}.{member}", method


def api_page() -> str:
    """Return the page of all public names, as Markdown."""
    parts = ["# API", "Every public name, with its parameters, results, errors and an example."]
    for module in MODULES:
        parts.append(f"## {module}")
        for name, value in public_objects(module):
            parts += [f"### {name.removeprefix(module + '.')}", _signature(name, value), _described(value)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"```text\n{name}\n```"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"```text\n{name}\n```"
    text = f"{name}{signature}"
    if len(text) > MAX_SIGNATURE:
        listed = "".join(f"    {parameter},\n" for parameter in signature.parameters.values())
        text = f"{name}(\n{listed}){text.rpartition(')')[2]}"
    plain = re.sub(QUOTED_TYPE, r"\1", text)
    return f"```text\n{plain}\n```"


def _described(value: Any) -> str:
    """Return a docstring as Markdown: text, tables of parameters and results, and examples."""
    from griffe import Docstring, DocstringSectionKind

    parts = list[str]()
    for section in Docstring(inspect.getdoc(value) or "").parse("numpy", warnings=False):
        if section.kind is DocstringSectionKind.text:
            parts.append(_indented_as_code(section.value))
        elif section.kind is DocstringSectionKind.examples:
            parts.append("**Examples**")
            for kind, text in section.value:
                is_text = kind is DocstringSectionKind.text
                parts.append(_indented_as_code(text) if is_text else f"```pycon\n{text}\n```")
        elif section.kind is DocstringSectionKind.admonition:
            parts += [f"**{section.title}**", section.value.description]
        else:
            rows = [f"| {_cell(_label(item))} | {_cell(item.description)} |" for item in section.value]
            parts += [f"**{section.kind.value.title()}**", "\n".join(["| name | meaning |", "| :-- | :-- |", *rows])]
    return "\n\n".join(parts)


def _label(item: Any) -> str:
    name, kind = getattr(item, "name", ""), str(item.annotation or "")
    return f"`{name}`" + (f": {kind}" if kind else "") if name else f"`{kind}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _indented_as_code(text: str) -> str:
    """Fence indented lines, which are formulas: Markdown would take them for code only after an empty line."""
    lines, is_code = list[str](), False
    for line in text.splitlines():
        starts_code = line.startswith("    ")
        if starts_code != is_code and (line.strip() or not starts_code):
            lines.append("```text" if starts_code else "```")
            is_code = starts_code
        lines.append(line)
    return "\n".join([*lines, "```"] if is_code else lines)


def commands_page() -> str:
    """Return the page of all commands, as Markdown: their help texts."""
    import typer

    from attnc.cli import app

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield from walk(inner, (*path, name))

    parts = ["# Commands", "The help texts of all commands. [The command line](command-line.md) shows them at work."]
    for path in walk(typer.main.get_command(app), ("attnc",)):
        parts += [f"## {' '.join(path)}", f"```text\n{_help_text(path[1:])}\n```"]
    return "\n\n".join(parts) + "\n"


def _help_text(arguments: tuple[str, ...]) -> str:
    with mock.patch.dict(os.environ, {"COLUMNS": HELP_COLUMNS, "TERMINAL_WIDTH": HELP_COLUMNS, "NO_COLOR": "1"}):
        text = run(" ".join(["attnc", *arguments, "--help"]))
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _add_contributing(pages: Path) -> None:
    """Make CONTRIBUTING.md, which is beside docs/, a page of the site."""
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (pages / "contributing.md").write_text(text.replace("](docs/", "]("), encoding="utf-8")
    for page in pages.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "](../CONTRIBUTING.md" in text:
            page.write_text(text.replace("](../CONTRIBUTING.md", "](contributing.md"), encoding="utf-8")


def build(out: Path) -> None:
    """Write the site to a folder. It replaces one that is there."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "docs"
        shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("builders", "*.toml", "__pycache__"))
        _add_contributing(pages)
        (pages / "api.md").write_text(api_page(), encoding="utf-8")
        (pages / "commands.md").write_text(commands_page(), encoding="utf-8")
        shutil.copy(CONFIG, folder)
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(Path(folder) / "site", out)
    print(f"wrote {out / 'index.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=DOCS.parent / "site")
    build(parser.parse_args().out)
