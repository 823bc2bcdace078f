"""Builds the documentation site: `make docs`, or `python docs/builders/website.py [--out site]`.

The pages of docs/ and CONTRIBUTING.md are copied to a folder of their own. Two pages are added there: the API, from the
docstrings of all public names, and the commands, from their help texts. Zensical turns the folder into a site that
needs no network. The networks of the gallery are saved beside the pages, in gallery/.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import gallery
from attnc_playground import verify_page
from transcripts import run

DOCS = Path(__file__).resolve().parents[1]
CONFIG = DOCS / "zensical.toml"


def _is_function(value: Any, name: str) -> bool:
    return inspect.isfunction(value) and name.count(".") == 1


def _is_in(folder: str, value: Any, name: str) -> bool:
    """Whether a class is defined in this folder, or a method belongs to one that is."""
    return not _is_function(value, name) and _home(value).startswith(f"attnc.{folder}.")


def _is_elsewhere(value: Any, name: str) -> bool:
    return not any(_is_function(value, name) or _is_in(folder, value, name) for folder in FOLDERS)


def _home(value: Any) -> str:
    """Return the module of a class, a method or a property."""
    inner = getattr(value, "fget", None) or getattr(value, "func", value)
    return str(inner.__module__)


def _any(value: Any, name: str) -> bool:
    return True


FOLDERS = ("targets", "ir")
"""The folders whose classes have a page of their own."""
PLAYGROUND = ("attnc_playground",) if find_spec("starlette") else ()
GROUPS = {
    "api-functions": ("Functions of attnc", ("attnc",), _is_function),
    "api-targets": ("Targets and boxes", ("attnc",), functools.partial(_is_in, "targets")),
    "api-programs": ("Programs and layers", ("attnc",), functools.partial(_is_in, "ir")),
    "api-classes": ("Other classes of attnc", ("attnc",), _is_elsewhere),
    "api-constructions": ("Constructions", ("attnc.constructions",), _any),
    "api-incontext": ("In context", ("attnc.incontext",), _any),
    "api-layers": ("Layers for torch", ("attnc.nn",) if find_spec("torch") else (), _any),
    "api-tools": ("Tools", ("attnc.heads", "attnc.groundtruth", "attnc_lab", "attnc_checker", *PLAYGROUND), _any),
}
"""Page → its title, the modules whose `__all__` is public, and which of their names are on it."""
API_ENTRY = '{ "API" = "api.md" }'
"""The entry of the navigation below which the pages of the API are put."""
AS_WRITTEN = (
    r"(^```.*?^```$|^#.*?$|^    .*?$|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]*`|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|<!--.*?-->)"
)
"""The parts of a page that are not running text."""
INDEX = r"(?<![A-Za-z_\\])([A-Za-zα-ωΓΛΠΣ][\u0303\u0304]?)_(\{[^{}]+\}|\d\.\d|[A-Za-z0-9α-ω∞]{1,2})(?![A-Za-z0-9_])"
"""A letter with an index: the letter, with a tilde or a bar, and the index."""
POWER = r"(?<=[\w)\]|·])\^(\{[^{}]+\}|−?[A-Za-z0-9½η]+(?:\.\d+)?)"
"""The power of a number, a letter or a bracket."""
MAX_SIGNATURE = 100
"""The length of a signature, in characters, above which every parameter has a line of its own."""
QUOTED_TYPE = r"(?<=: |> )'([^']*)'"
"""A type in a signature: `from __future__ import annotations` makes it a string."""
WITHOUT_PAYLOAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Verify in the browser</title>
<p>This site was built without the parts that check a network in the browser. <code>make verify-page</code> fetches
them, and <code>make docs</code> then adds the page. On the command line, <code>attnc verify NETWORK</code> does the
same check.</p>
<p><a href="../checker.html">The checker</a></p>
</html>
"""
"""The verify page of a site that was built without a network connection."""
DEFAULT_FUNCTION = r"<(?:function|built-in method) .*? at 0x[0-9a-f]+>"
"""A default that is a function: its address is another one in every build."""
HELP_COLUMNS = "86"
"""The width of help texts, in characters: it fits beside the navigation on a desktop, and scrolls on a phone."""


def public_objects(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module, and the public methods of classes that it defines.

    Classes that are not public, and from which public ones inherit methods, come last.
    """
    holder = importlib.import_module(module)
    values = [getattr(holder, name) for name in sorted(holder.__all__, key=str.lower)]
    classes = [value for value in values if inspect.isclass(value) and not issubclass(value, Exception)]
    bases = {base: None for value in classes for base in hidden_bases(value, values)}
    for value in [*filter(callable, values), *bases]:
        yield f"{module}.{value.__name__}", value
        if value in classes or value in bases:
            for member, method in own_members(value).items():
                yield f"{module}.{value.__name__}.{member}", method


def own_members(value: type) -> dict[str, Any]:
    """Return the public methods and properties that a class itself defines and describes."""
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    return {
        name: member.__func__ if isinstance(member, classmethod | staticmethod) else member
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, kinds))
        and inspect.getdoc(member)
    }


def hidden_bases(value: type, public: list[Any]) -> list[type]:
    """Return the classes of attnc that are not public, and from which a class inherits public methods."""
    bases = [base for base in value.__mro__[1:] if base.__module__.startswith("attnc") and base not in public]
    return [base for base in bases if own_members(base)]


def inherited(value: Any) -> str:
    """Return a sentence with the methods that a class inherits, and where they are described."""
    found, lines = set(dir(object)) | set(own_members(value)), list[str]()
    for base in value.__mro__[1:]:
        names = [name for name in own_members(base) if name not in found] if base.__module__.startswith("attnc") else []
        found |= set(names)
        if names:
            listed = ", ".join(f"`{name}`" for name in names)
            lines.append(f"Inherited from [`{base.__name__}`](#{_anchor(base.__name__)}): {listed}.")
    return "\n\n".join(lines)


def api_pages() -> dict[str, str]:
    """Return the pages of all public names, as Markdown: an index, and one page for each group of names."""
    index = ["# API", "Every public name, with its parameters, results, errors and an example."]
    pages = dict[str, str]()
    for page, (title, modules, is_chosen) in GROUPS.items():
        parts, rows = [f"# {title}"], list[str]()
        for module in modules:
            if len(modules) > 1:
                parts.append(f"## {module}")
            for name, value in public_objects(module):
                if not is_chosen(value, name):
                    continue
                short = name.removeprefix(module + ".")
                parts += [f"### {short}", _signature(name, value), _described(value)]
                if inspect.isclass(value) and not issubclass(value, Exception):
                    parts.append(inherited(value))
                if "." not in short:
                    summary = _cell((inspect.getdoc(value) or "").split("\n\n")[0])
                    rows.append(f"| [`{short}`]({page}.md#{_anchor(short)}) | {summary} |")
        pages[page] = "\n\n".join(part for part in parts if part) + "\n"
        index += [f"## {title}", "\n".join(["| name | summary |", "| :-- | :-- |", *rows])]
    return {"api": "\n\n".join(index) + "\n", **pages}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property | functools.cached_property):
        return f"```text\n{name}\n```"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"```text\n{name}\n```"
    text = f"{name}{signature}"
    if len(text) > MAX_SIGNATURE:
        listed = "".join(f"    {parameter},\n" for parameter in signature.parameters.values())
        text = f"{name}(\n{listed}){text.rpartition(')')[2]}"
    plain = re.sub(DEFAULT_FUNCTION, "…", re.sub(QUOTED_TYPE, r"\1", text))
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


def command_names() -> Iterator[tuple[str, ...]]:
    """Yield the names of all commands, such as ("attnc", "lab", "run")."""
    import typer

    from attnc.cli import app

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield from walk(inner, (*path, name))

    yield from walk(typer.main.get_command(app), ("attnc",))


def commands_page() -> str:
    """Return the page of all commands, as Markdown: their help texts."""
    parts = ["# Commands", "The help texts of all commands. [The command line](command-line.md) shows them at work."]
    for path in command_names():
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
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "../CONTRIBUTING.md" in text:  # behind another ../ in a folder of pages
            page.write_text(text.replace("../CONTRIBUTING.md", "contributing.md"), encoding="utf-8")


def typeset(text: str) -> str:
    """Return Markdown with the indices and powers of running text lowered and raised: x_j, e^{−β} and 2^l.

    Code, formulas, headings (whose names are link targets), pictures and addresses stay as they are.
    """
    parts = re.split(AS_WRITTEN, text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):
        raised = re.sub(POWER, lambda found: f"<sup>{found[1].strip('{}')}</sup>", parts[i])
        parts[i] = re.sub(INDEX, lambda found: f"{found[1]}<sub>{found[2].strip('{}')}</sub>", raised)
    return "".join(parts)


def _add_verify_page(out: Path) -> None:
    """Write the page that checks networks in the browser. Without its payload, write how to get it."""
    if verify_page.is_installed():
        verify_page.write(out / "verify", verify_page.gallery(out / "gallery"))
        return
    (out / "verify").mkdir()
    (out / "verify" / "index.html").write_text(WITHOUT_PAYLOAD, encoding="utf-8")


def build(out: Path) -> None:
    """Write the site to a folder. It replaces one that is there."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "docs"
        shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("builders", "*.toml", "__pycache__"))
        for page in pages.rglob("*.md"):
            page.write_text(typeset(page.read_text(encoding="utf-8")), encoding="utf-8")
        _add_contributing(pages)
        made = {name: typeset(text) for name, text in api_pages().items()}
        for name, text in {**made, "commands": commands_page()}.items():
            (pages / f"{name}.md").write_text(text, encoding="utf-8")
        config = CONFIG.read_text(encoding="utf-8")
        assert API_ENTRY in config, f"{CONFIG.name} has no entry {API_ENTRY}"
        entries = ", ".join(f'"{name}.md"' for name in made)
        config = config.replace(API_ENTRY, f'{{ "API" = [{entries}] }}')
        (Path(folder) / CONFIG.name).write_text(config, encoding="utf-8")
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(Path(folder) / "site", out)
    gallery.save_all(out / "gallery")
    _add_verify_page(out)
    print(f"wrote {out / 'index.html'}. For the search, serve it: python -m http.server -d {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=DOCS.parent / "site")
    build(parser.parse_args().out)
