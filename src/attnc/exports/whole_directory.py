"""A directory written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress

from attnc.errors import FileError
from attnc.exports.safe_files import Path


def write_whole(path: Path, files: Mapping[str, bytes], why_not_replace: Callable[[str], str | None]) -> None:
    """Makes the directory `path` with these files in it, and leaves no trace on failure.

    What is already there is replaced if it is a directory for which `why_not_replace` has no answer; whatever else it
    is stays as it was. Only the last component of the path is created.
    """
    for name in files:
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            raise FileError(f"cannot save a file under the name {name!r}: it must be a plain name, without folders")
    try:
        target = _resolve(path, why_not_replace)
        parent, token = os.path.dirname(target), secrets.token_hex(8)
        new, old = os.path.join(parent, f".attnc-{token}.new"), os.path.join(parent, f".attnc-{token}.old")
        os.mkdir(new)
        try:
            for name, content in files.items():
                _write_file(os.path.join(new, name), content)
            _sync_directory(new)
            _put_in_place(new, target, old)
        finally:
            shutil.rmtree(new, ignore_errors=True)  # it is still there only if something went wrong
        _sync_directory(parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error  # without the name of a file that nobody asked for
        raise FileError(f"cannot save to {os.fspath(path)!r}: {reason}. Nothing was changed.") from error
    if os.path.lexists(old):
        try:
            shutil.rmtree(old)
        except OSError as error:
            raise FileError(
                f"{os.fspath(path)!r} was saved, but the former content could not be deleted: {error}. What is left of "
                f"it is in {old!r}; delete that by hand."
            ) from error


def _resolve(path: Path, why_not_replace: Callable[[str], str | None]) -> str:
    """The real path to write to, or FileError if that is out of the question."""
    given = os.fspath(path)
    stripped = given.rstrip(os.sep) or given
    if not stripped:
        raise FileError("cannot save to an empty path: give the name of a folder to create")
    found = None
    if os.path.isdir(stripped):
        found = why_not_replace(stripped)
    elif os.path.islink(stripped) and not os.path.exists(stripped):
        found = "a symbolic link that leads nowhere"
    elif os.path.lexists(stripped):
        found = "a file, not a folder" if os.path.isfile(stripped) else "neither a file nor a folder"
    if found:
        raise FileError(
            f"cannot save to {given!r}: what is there already is {found}. Choose another name, or remove it first."
        )
    parent = os.path.dirname(stripped) or os.curdir
    if not os.path.isdir(parent):
        problem = "is not a folder" if os.path.lexists(parent) else "does not exist"
        raise FileError(f"cannot save to {given!r}: the folder {parent!r} {problem}. Create it first.")
    return os.path.realpath(stripped)


def _write_file(path: str, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    """Some file systems do not offer this; the files themselves are on the disk already."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _put_in_place(new: str, target: str, old: str) -> None:
    """POSIX cannot exchange two directories in one step: killed between the renames, the old one stays at `old`."""
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    try:
        os.rename(target, old)
        os.rename(new, target)
    except BaseException as error:
        if os.path.lexists(old):
            try:
                os.replace(old, target)
            except OSError:
                raise FileError(f"cannot save to {target!r}: {error}. The former content is now in {old!r}.") from error
        raise
