"""The server of the playground, from the start to Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import attnc
from attnc_playground.limits import Limits

GRACE_SECONDS = 3
"""Time that answers on their way have when the server is stopped. A job takes about 0.2 s."""


Announce = Callable[[str], None]


def serve(
    host: str = "127.0.0.1", port: int = 8000, *, workers: int | None = None, announce: Announce | None = None
) -> None:
    """Serve the playground until it is interrupted.

    Parameters
    ----------
    host : str
        The address to listen at. 127.0.0.1 can be reached from this machine alone.
    port : int
        The port; 0 takes a free one.
    workers : int, optional
        The number of jobs that run at a time; by default the number of cores, at most 8.
    announce : callable, optional
        Called with the address of the page once it is served. By default a line is printed.

    Raises
    ------
    InputError
        If the address or a limit is not valid.
    MissingExtra
        If a package of the extra `serve` is not installed.
    KeyboardInterrupt
        When the server was stopped by Ctrl-C, after its workers have ended.

    Examples
    --------
    >>> import attnc, attnc_playground
    >>> try:
    ...     attnc_playground.serve(port=70_000)
    ... except attnc.InputError as error:
    ...     print(error)
    port must be from 0 to 65535, found 70000
    """
    if not 0 <= port <= 65535:
        raise attnc.InputError(f"port must be from 0 to 65535, found {port}")
    if workers is not None and not 1 <= workers <= 64:
        raise attnc.InputError(f"workers must be from 1 to 64, found {workers}")
    run(Limits() if workers is None else Limits(workers=workers), host, port, announce or _say)


def _say(address: str) -> None:
    print(f"The playground is at {address}. Ctrl-C stops it.", flush=True)


def run(limits: Limits, host: str, port: int, announce: Announce = _say) -> None:
    """Serve with these limits until interrupted. See `serve`."""
    try:
        import uvicorn

        from attnc_playground.app import make_app
        from attnc_playground.connections import LimitedConnection
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] not in ("uvicorn", "starlette", "h11", "anyio"):
            raise
        raise attnc.MissingExtra("the playground needs", missing, "serve") from None

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with contextlib.suppress(SystemExit):  # newer versions exit with code 3 if the application does not start
                await super().startup(sockets)
            self.should_exit |= not self.started
            if not self.should_exit:
                announce(address)

    class Connection(LimitedConnection):
        pass

    Connection.limits = limits
    app = make_app(limits)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",  # the application writes its own log
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    with _bound(host, port) as listening:
        name, bound = listening.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{bound}/"
        server = Server(config)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the playground has stopped, and no worker is left") from None
    if not server.started:
        print(f"error: the playground did not start: {app.state.failure or 'the reason is above'}", file=sys.stderr)
        raise SystemExit(1)


def _bound(host: str, port: int) -> Any:
    """Return a socket that is bound to an address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise attnc.InputError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}. Choose another --host or --port."
        ) from None
    return listening
