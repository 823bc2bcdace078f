"""A playground of its own for a test: a process at a free port, with small limits."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = """
from attnc_playground.limits import Limits
from attnc_playground.serving import run
run(Limits(**{limits!r}), "127.0.0.1", 0)
"""
LONG = {
    "expression": "+".join(f"sin({k}*x*y)" for k in range(1, 40)),
    "box": {"x": [-3, 3], "y": [-3, 3]},
    "eps": 1e-9,
}
"""A function whose compilation takes more than ten seconds."""


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Playground:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @classmethod
    def start(cls, folder: Path, **limits: float) -> Playground:
        """Start a server with other limits than those of `attnc serve`."""
        return cls.run(folder, "-c", START.format(limits=limits))

    @classmethod
    def run(cls, folder: Path, *command: str) -> Playground:
        log = folder / "log.txt"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, line + log.read_text()
        return cls(process, int(line.partition("127.0.0.1:")[2].partition("/")[0]), log)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
        connection = self.connect()
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            found = connection.getresponse()
            return Response(found.status, {name.lower(): text for name, text in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str) -> Response:
        return self.send("GET", path)

    def post(self, path: str, fields: Any) -> Response:
        return self.send("POST", path, json.dumps(fields).encode(), Content_Type="application/json")

    def workers(self) -> list[int]:
        """The processes of the pool: the template and its workers."""
        found, groups = [], self._groups()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().split(b"\0")
                group = int((path / "stat").read_text().rpartition(")")[2].split()[2])
            except (OSError, IndexError):
                continue
            if b"attnc_playground.template" in command and group in groups:
                found.append(int(path.name))
        return sorted(found)

    def _groups(self) -> set[int]:
        """The process groups of the templates that the log names."""
        events = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return {event["pid"] for event in events if event["event"] == "workers"}

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(600)
