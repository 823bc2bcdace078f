"""The user's cache folder, and whether its files are safe from other users."""

from __future__ import annotations

import os
import stat
import sys

from attnc.exports.safe_files import PathLike


def user_cache(name: str) -> str | None:
    """Return the path of attnc's folder of this name in the user's cache; None if the user has no cache folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(given):  # the XDG specification: other values are ignored
        ways = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local"}
        given = os.path.expanduser(ways.get(sys.platform, "~/.cache"))
    return os.path.join(given, "attnc", name) if os.path.isabs(given) else None


def is_private(path: PathLike) -> bool:
    """Return whether a file or folder, which is no link, belongs to this user, and nobody else can write it."""
    found = os.lstat(path)
    if os.name == "nt":  # Windows has no owner ids or permission bits; a user's profile folder is private by default
        return not stat.S_ISLNK(found.st_mode)
    return found.st_uid == os.geteuid() and _is_closed(found)


def is_safe(path: PathLike) -> bool:
    """Return whether a file or folder, which is no link, can be written by this user and root alone."""
    found = os.lstat(path)
    return found.st_uid in (0, os.geteuid()) and _is_closed(found)


def _is_closed(found: os.stat_result) -> bool:
    return not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022
