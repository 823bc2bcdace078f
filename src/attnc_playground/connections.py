"""HTTP connections with time limits. uvicorn has none for a client that sends its request slowly, or never."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from attnc_playground.app import error_response, security_headers
from attnc_playground.limits import Limits

REFUSED_SECONDS = 1.0
"""Time that a client has to read why its connection is refused."""


class LimitedConnection(H11Protocol):
    """A connection that is closed when a request's head, its answer, or the next request takes too long."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self.refuse(503, "the playground has too many open connections. Try again in a minute.")
            return
        self.close_after(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self.close_after(self.limits.response_seconds)

    def on_response_complete(self) -> None:
        self.close_after(self.timeout_keep_alive + self.limits.header_seconds)
        super().on_response_complete()

    def close_after(self, seconds: float) -> None:
        """Close the connection after some seconds unless the next step comes first."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.refuse(400, "this is not an HTTP request that can be read.")
        else:
            self.transport.close()

    def refuse(self, status: int, message: str) -> None:
        """Answer without the application, with the headers that it would send, and close the connection.

        It is closed a little later: closing at once, with unread input, would take the answer from the client.
        """
        self._is_refused = True
        content = error_response(status, "HTTPError", message).body
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            **security_headers("/"),
        }
        lines = [f"HTTP/1.1 {status} Refused", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + bytes(content))
        self.transport.write_eof()
        self.close_after(REFUSED_SECONDS)
