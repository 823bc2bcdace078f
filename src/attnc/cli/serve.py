"""`attnc serve`: the playground."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attnc.cli.commands import app
from attnc.cli.options import Command, Json
from attnc.cli.output import print_json, say


@app.command(
    "serve",
    cls=Command,
    epilog="Examples:\n\nattnc serve\n\nattnc serve --host 0.0.0.0 --port 8080",
)
def serve_command(
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 is all of this machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    workers: Annotated[
        int | None, typer.Option(help="The number of jobs at a time; by default the number of cores, at most 8.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Serve the playground: a page in which you type a function and see the attention that computes it."""
    from attnc_playground import serve

    def announce(address: str) -> None:
        if json_output:
            print_json({"address": address})
        else:
            say(f"The playground is at {address}. Ctrl-C stops it.")
        sys.stdout.flush()

    serve(host, port, workers=workers, announce=announce)
