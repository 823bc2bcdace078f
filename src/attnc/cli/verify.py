"""`attnc verify`: the independent checker, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import typer

from attnc.cli.commands import Json, Saved, app


@app.command("verify", epilog="Example:\n\nattnc verify net")
def verify_command(net: Saved, json_output: Json = False) -> None:
    """Re-prove a saved network's bound by a separate program that shares no code with this one.

    Exit code 0 only if the bound is re-proved; 1 if it is not; 2 if the files cannot be read.
    """
    command = [sys.executable, "-m", "attnc_checker", str(net), *(["--json"] if json_output else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
