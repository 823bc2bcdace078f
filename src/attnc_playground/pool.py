"""The pool: jobs run in workers of the template, a few at a time, and are killed when nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnc_playground.limits import Limits
from attnc_playground.template import LENGTH, too_large, too_long

START_SECONDS = 600.0
"""Time in which the template must be ready. It takes 2 s on an idle core, and a minute beside 20 busy processes."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Workers have one thread each: a process with threads cannot be forked safely, and jobs share the cores anyway."""


class NotStarted(Exception):
    """The template did not start. The message states why."""


class QueueFull(Exception):
    """As many jobs wait as may wait."""


@dataclass(frozen=True)
class Answer:
    """The answer of a job, ready to be sent."""

    status: int
    type: str
    content: bytes
    name: str | None = None


def refused(status: int, kind: str, message: str) -> Answer:
    """Return an answer that states an error."""
    return Answer(status, "application/json", json.dumps({"error": {"type": kind, "message": message}}).encode())


class Pool:
    """Workers for jobs."""

    def __init__(self, limits: Limits, report: Callable[..., None]) -> None:
        self.limits, self.report = limits, report
        self.waiting = self.running = 0
        self._slots = asyncio.Semaphore(limits.workers)
        self._starting = asyncio.Lock()
        self._template: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._handle = -1
        self._count = 0
        self._closed = False

    @property
    def is_ready(self) -> bool:
        return self._template is not None and self._template.returncode is None

    async def start(self) -> None:
        """Start the template unless it runs."""
        async with self._starting:
            if self.is_ready or self._closed:
                return
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="attnc-playground-"))
                self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            self._count += 1
            settings = json.dumps(vars(self.limits))
            command = (sys.executable, "-m", "attnc_playground.template", self._name, str(self._folder), settings)
            self._template = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | dict.fromkeys(THREADS, "1"),
                start_new_session=True,  # Ctrl-C is for the server, which then ends the workers
            )
            assert self._template.stdout is not None
            try:
                async with asyncio.timeout(START_SECONDS):
                    line = await self._template.stdout.readline()
            except TimeoutError:
                self._template.kill()
                raise NotStarted(
                    f"its workers were not ready after {START_SECONDS:g} s. Is this machine busy?"
                ) from None
            if line.strip() != b"ready":
                raise NotStarted("the process that starts its workers ended. The reason is above.")
            self.report("workers", pid=self._template.pid, at_a_time=self.limits.workers)

    @property
    def _name(self) -> str:
        """The name of the template's socket in the folder."""
        return f"template-{self._count}"

    async def run(self, kind: str, fields: dict[str, Any]) -> Answer:
        """Run a job in a worker. When this call is cancelled, the worker is killed."""
        if self._slots.locked() and self.waiting >= self.limits.queue:
            raise QueueFull
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            return await self._run({"kind": kind, "fields": fields})
        finally:
            self.running -= 1
            self._slots.release()

    async def _run(self, request: dict[str, Any]) -> Answer:
        """Do a job. If its worker was killed before it could have reached a limit of time, do it once more."""
        left = self.limits.seconds
        for attempt in range(2):
            async with self._worker() as (reader, writer):
                started = time.monotonic()
                try:
                    async with asyncio.timeout(left):
                        return await _answered(request, reader, writer)
                except TimeoutError:
                    return refused(504, "TimeLimit", too_long(self.limits.seconds))
                except (asyncio.IncompleteReadError, ConnectionError):
                    self.report("worker ended", request=request["kind"], attempt=attempt + 1)
            took = time.monotonic() - started
            left -= took
            if took >= self.limits.cpu_seconds or left <= 0:
                break
        return refused(507, "MemoryLimit", f"the worker ended. Perhaps {too_large(self.limits.memory // 2**20)}")

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to a new worker. Kill it at the end if it still runs, and remove its folder."""
        reader, writer, pid = await self._connected()
        process = _process(pid)
        try:
            yield reader, writer
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
            writer.close()
            assert self._folder is not None
            shutil.rmtree(self._folder / str(pid), ignore_errors=True)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Return the connection and the process id of a new worker. If the template was killed, start another one."""
        for attempt in range(3):
            await self.start()
            try:
                # The path of a socket has at most 107 characters, and that of the folder may be longer.
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{self._handle}/{self._name}")
                try:
                    async with asyncio.timeout(START_SECONDS):
                        pid: int = struct.unpack(">q", await reader.readexactly(8))[0]
                except BaseException:
                    writer.close()  # the worker ends when it reads no request
                    raise
                return reader, writer, pid
            except (OSError, asyncio.IncompleteReadError):
                if attempt == 2 or self._closed:
                    raise
                await asyncio.sleep(0.05)  # until the event loop has seen that the template ended
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Kill the template and with it every worker, and remove their folder."""
        self._closed = True
        if self._template is not None and self._template.returncode is None:
            self._template.kill()
            await self._template.wait()
        if self._folder is not None:
            os.close(self._handle)
            shutil.rmtree(self._folder, ignore_errors=True)


def _process(pid: int) -> int | None:
    """Return a handle of a process, which cannot come to mean another one; None if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


async def _answered(request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    """Send a request to a worker, and return its answer."""
    text = json.dumps(request).encode()
    writer.write(LENGTH.pack(len(text)) + text)
    head = json.loads(await _message(reader))
    return Answer(content=await _message(reader), **head)


async def _message(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])


class Answers:
    """Answers by content: finished ones are kept, and equal requests share one job."""

    def __init__(self, pool: Pool, most_bytes: int) -> None:
        self.pool, self.most_bytes = pool, most_bytes
        self.kept: OrderedDict[str, Answer] = OrderedDict()
        self.bytes = 0
        self._jobs: dict[str, tuple[asyncio.Task[Answer], list[None]]] = {}

    async def get(self, key: str, kind: str, fields: dict[str, Any]) -> tuple[Answer, bool]:
        """Return the answer, and whether it was kept. A job is cancelled when nobody waits for it any more."""
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key], True
        if key not in self._jobs:
            self._jobs[key] = (asyncio.ensure_future(self.pool.run(kind, fields)), [])
        job, readers = self._jobs[key]
        readers.append(None)
        try:
            answer = await asyncio.shield(job)
        finally:
            readers.pop()
            if not readers:
                self._jobs.pop(key, None)
                job.cancel()  # it has no effect on a job that has ended
        if answer.status == 200:  # a refusal may be one of the time limit, and depend on the load
            self._keep(key, answer)
        return answer, False

    def _keep(self, key: str, answer: Answer) -> None:
        if key in self.kept or len(answer.content) > self.most_bytes // 4:
            return
        self.kept[key] = answer
        self.bytes += len(answer.content)
        while self.bytes > self.most_bytes:
            self.bytes -= len(self.kept.popitem(last=False)[1].content)
