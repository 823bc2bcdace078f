"""Opens files that a user names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader

from attnc.errors import FileError

PathLike = str | os.PathLike[str]


@contextmanager
def open_regular(path: PathLike) -> Iterator[BufferedReader]:
    """Open a regular file or a link to one, but never a pipe, a device or a folder. OSErrors become FileErrors."""
    try:
        try:
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK: a pipe must not make us wait
        except ValueError as error:  # a NUL in the path
            raise FileError(f"{os.fspath(path)!r} cannot be read: {error}") from error
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise FileError(f"{os.fspath(path)!r} is not a regular file")
        with open(number, "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise FileError(f"{os.fspath(path)!r} is missing") from error
    except OSError as error:
        raise FileError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise FileError(f"{os.fspath(path)!r} does not fit in memory") from error
