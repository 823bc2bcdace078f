"""python tests/browser/chromium.py: prints the path of a Chromium. It is installed with apt-get if that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "make test-browser needs Chromium, and there is none. Only root can install it with apt-get. "
    "Run `sudo apt-get install chromium`, or state its path in the variable CHROMIUM."
)


def path() -> str | None:
    """Return the path of a Chromium that is installed, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def install() -> bool:
    """Install Chromium with apt-get. Return whether that was possible."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    given = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["chromium", "fonts-dejavu-core"]
    commands = (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *packages])
    return all(subprocess.run(["apt-get", *words], env=given, check=False).returncode == 0 for words in commands)


def main() -> int:
    """Print the path of Chromium, and return 0, or state what is missing, and return 1."""
    found = path() or (path() if install() else None)
    print(found or MISSING, file=sys.stdout if found else sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
