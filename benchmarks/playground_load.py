"""Load on the playground: clients on this machine, one in ten of them hostile. Prints a table.

    python benchmarks/playground_load.py [--clients 100] [--seconds 60] [--json]

Honest clients ask for networks that nobody asked for before, for networks that many ask for, for plans, regressions and
the page. Every network is checked: the outputs that come with it must be within the proven bound of numpy's function.
Hostile clients send huge and deeply nested texts, giant boxes, binary junk, endless headers and bodies, and requests
that they cancel. Early in the run a worker is killed, and then the process that workers are forked from. At
the end no job may run or wait, no worker may be left, and the memory of the second half may not differ from that of the
first by more than a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE_SHARE = 10
"""One client in this many is hostile."""
PATIENCE = 600.0
"""Seconds that a client waits for an answer, and that the server has to start and to end, on a machine that is busy."""
PAUSE = 0.25
"""Largest pause in seconds of an honest client between two requests. A reader types more slowly."""
KILL_WORKER, KILL_TEMPLATE = 0.1, 0.2
"""The shares of the run after which a worker, and the template, are killed."""
SETTLE = 0.4
"""The share of the run after which memory counts: before, caches fill, and the template is started again."""
RETRIES = 10
"""Number of times that a hostile client sends the same request while the server is busy."""
REQUIRED = ("content-security-policy", "x-content-type-options", "referrer-policy")
"""Headers that every response must have."""
ROUNDING = 1e-12
"""Largest difference, relative to the values, of numpy's functions and exact ones."""

Functions = dict[str, tuple[str, tuple[float, float], Callable[[np.ndarray, float], np.ndarray]]]
FUNCTIONS: Functions = {
    "sine": ("sin({a}*x)", (-3, 3), lambda x, a: np.sin(a * x)),
    "bell": ("exp(-{a}*x**2)", (-2, 2), lambda x, a: np.exp(-a * x**2)),
    "runge": ("1/(1 + {a}*x**2)", (-1, 1), lambda x, a: 1 / (1 + a * x**2)),
    "kink": ("abs(x - {a}/10)", (-1, 1), lambda x, a: np.abs(x - a / 10)),
    "step": ("tanh({a}*x)", (-2, 2), lambda x, a: np.tanh(a * x)),
}
"""Functions with a parameter a from 1 to 4: the text, the range of x, and the same in numpy."""
POINTS = [[-0.8, -0.5], [-0.3, 0.0], [0.1, 0.2], [0.6, 0.7]]


@dataclass
class Response:
    """The response to a request, or status 0 if the server closed the connection."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""


@dataclass
class Record:
    """The answers, times and sizes of a run, and everything that was wrong in it."""

    seconds: list[float] = field(default_factory=list)  # of honest requests that were answered
    networks: list[float] = field(default_factory=list)  # the same for networks alone
    statuses: Counter[int] = field(default_factory=Counter)  # of honest requests
    hostile: Counter[str] = field(default_factory=Counter)  # kind and status
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # time, bytes of the server and its workers


class Server:
    """The playground as `attnc serve` starts it, and its processes."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    @classmethod
    async def start(cls, folder: Path) -> Server:
        log = folder / "log"
        with log.open("wb") as errors:
            command = (sys.executable, "-m", "attnc", "serve", "--port", "0")
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not found:
            raise RuntimeError(f"the playground does not start: {log.read_text(encoding='utf-8')[-2000:]}")
        return cls(process, int(found[1]), log)

    def descendants(self) -> dict[int, int]:
        """Return the processes below the server, each with its parent."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
        found: dict[int, int] = {}
        level = {self.process.pid}
        while level:
            level = {pid for pid, parent in parents.items() if parent in level}
            found |= {pid: parents[pid] for pid in level}
        return found

    def template(self) -> int:
        """Return the process that workers are forked from."""
        return next(pid for pid, parent in self.descendants().items() if parent == self.process.pid)

    def workers(self) -> list[int]:
        return [pid for pid, parent in self.descendants().items() if parent != self.process.pid]

    def memory(self) -> int:
        """Return the bytes of the server and of the template, shared pages once. Workers live for a job only."""
        total = 0
        for pid in (self.process.pid, *(pid for pid, above in self.descendants().items() if above == self.process.pid)):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
                total += 1024 * int(re.search(r"^Rss:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        return total

    async def stop(self) -> tuple[int, list[int]]:
        """Ask the server to stop. Return its exit code, and the processes that it left behind."""
        below = self.descendants()
        self.process.terminate()
        code = await asyncio.wait_for(self.process.wait(), PATIENCE)
        await asyncio.sleep(0.2)
        return code, [pid for pid in below if Path(f"/proc/{pid}").exists()]


async def ask(port: int, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Response:
    """Send one request. The status is 0 if the server closes the connection without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
        if body:
            head += f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}\r\n".encode() + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return _parsed(await asyncio.wait_for(reader.read(-1), PATIENCE))
    except (ConnectionError, asyncio.IncompleteReadError):
        return Response(0)
    finally:
        writer.close()


def _parsed(raw: bytes) -> Response:
    head, _, content = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not first.startswith("HTTP/1.1 "):
        return Response(0)
    pairs = (line.partition(":") for line in lines)
    return Response(int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}, content)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# --- honest clients ---------------------------------------------------------------------------------------------------


def network_request(chance: random.Random) -> tuple[str, bytes, Callable[[bytes], str | None]]:
    """Return the path and the body of a request for a network, and a check of the answer."""
    text, (lo, hi), values = FUNCTIONS[chance.choice(sorted(FUNCTIONS))]
    a = chance.randint(1, 4) if chance.random() < 0.5 else round(chance.uniform(1, 4), 6)  # half are asked for often
    eps = chance.choice([1e-2, 1e-3, 1e-4])

    def check(content: bytes) -> str | None:
        found = json.loads(content)
        bound, checked = found["certificate"]["bound"], found["picture"]["checked"]
        if bound is None or not bound <= eps:
            return f"{found['expression']}: the bound {bound} is not within eps = {eps}"
        exact = values(np.array(checked["points"])[:, 0], a)
        off = np.abs(np.array(checked["outputs"]) - exact).max()
        return None if off <= bound + ROUNDING else f"{found['expression']}: off by {off}, and {bound} is proven"

    return "/api/compile", _json(expression=text.format(a=a), box={"x": [lo, hi]}, eps=eps), check


def other_request(chance: random.Random) -> tuple[str, bytes, Callable[[bytes], str | None]]:
    """Return a request for a plan, for a regression or for a file of the page, and a check of the answer."""

    def has(*names: str) -> Callable[[bytes], str | None]:
        def check(content: bytes) -> str | None:
            missing = [name for name in names if name not in json.loads(content)]
            return f"an answer without {missing[0]}" if missing else None

        return check

    def is_page(content: bytes) -> str | None:
        return None if b"<html" in content else "the page is no page"

    def is_refused_kindly(content: bytes) -> str | None:
        return None if json.loads(content)["error"].get("position") is not None else "a typing error without its place"

    points = [[x, y + chance.uniform(-0.1, 0.1)] for x, y in POINTS]
    return chance.choice(
        [
            ("/api/plan", _json(expression="sin(x)", box={"x": [-3, 3]}, eps=1e-3), has("rows")),
            ("/api/incontext", _json(points=points), has("trajectory", "exact")),
            ("/", b"", is_page),
            ("/openapi.json", b"", has("paths")),
            ("/api/compile", _json(expression="sin(x", box={"x": [-1, 1]}, eps=0.1), is_refused_kindly),
        ]
    )


async def honest(port: int, end: float, chance: random.Random, record: Record) -> None:
    """Ask until the end. When the server is busy, wait for the time in its answer, and ask again."""
    while time.monotonic() < end:
        path, body, check = (network_request if chance.random() < 0.7 else other_request)(chance)
        begun = time.monotonic()
        response = await ask(port, "POST" if body else "GET", path, body)
        record.statuses[response.status] += 1
        expected = 422 if b'"sin(x"' in body else 200
        if response.status == expected:
            record.seconds.append(time.monotonic() - begun)
            record.networks += record.seconds[-1:] if expected == 200 and path == "/api/compile" else []
            wrong = check(response.content)
            record.wrong += [wrong] if wrong else []
        elif response.status == 429:
            await asyncio.sleep(float(response.headers.get("retry-after", "1")) * chance.uniform(0.5, 1))
        record.wrong += _headers_missing(path, response)
        await asyncio.sleep(chance.uniform(0, PAUSE))


def _headers_missing(path: str, response: Response) -> list[str]:
    missing = [name for name in REQUIRED if name not in response.headers] if response.status else []
    return [f"the answer {response.status} of {path[:40]} has no header {missing[0]}"] if missing else []


# --- hostile clients --------------------------------------------------------------------------------------------------


def _compile(expression: str, box: object = None, **fields: Any) -> bytes:
    return _json(expression=expression, box={"x": [-1, 1]} if box is None else box, eps=1e-3, **fields)


WIDE = {name: [-3, 3] for name in "xyzw"}
BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "huge expression": lambda _: _compile("+".join(["sin(x)"] * 5000)),
    "long expression": lambda chance: _compile("+".join(f"sin({chance.randint(1, 99)}*x)" for _ in range(38))),
    "large body": lambda _: b" " * 2**21,
    "nested brackets": lambda _: _compile("(" * 249 + "x" + ")" * 249),
    "nested calls": lambda _: _compile("sin(" * 99 + "x" + ")" * 99),
    "nested JSON": lambda _: b"[" * 60_000,
    "nested object": lambda _: b'{"box":' * 9000,
    "tall power": lambda _: _compile("x**9**9**9**9"),
    "giant box": lambda chance: _compile(f"sin(x)+{chance.random()}", {"x": [-1e6, 1e6]}),
    "endless box": lambda _: _compile("sin(x)", {"x": [-1e308, 1e308]}),
    "NaN box": lambda _: b'{"expression": "sin(x)", "box": {"x": [NaN, Infinity]}, "eps": 1e-3}',
    "many variables": lambda _: _compile("x", {f"x{i}": [0, 1] for i in range(500)}),
    "hard function": lambda chance: _compile(f"sin(9*x*y)*cos({chance.random()}+8*z*w)", WIDE),
    "many keys": lambda chance: _compile(
        f"sin(x*{chance.random()})", points_per_axis=20_000, construction="max_affine"
    ),
    "code": lambda _: _compile("__import__('os').system('id')"),
    "path": lambda _: _compile("../../etc/passwd", {"../../etc/passwd": [0, 1]}),
    "unknown field": lambda _: _compile("x", file="/etc/passwd"),
    "binary body": lambda chance: chance.randbytes(5000),
}


async def _bodies(port: int, chance: random.Random, record: Record) -> None:
    for kind, body in BODIES.items():
        for _ in range(RETRIES):  # until the queue has a place
            response = await ask(port, "POST", "/api/compile", body(chance))
            if response.status != 429:
                break
            await asyncio.sleep(0.1)
        record.hostile[f"{kind}: {response.status or 'closed'}"] += 1
        if response.status >= 500 and response.status not in (503, 504, 507):
            record.wrong.append(f"{kind}: the server failed with {response.status}")
        record.wrong += _headers_missing(kind, response)


async def _paths(port: int, chance: random.Random, record: Record) -> None:
    for path in ("/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/js/../../app.py", "/" + "a" * 7000, "/%00"):
        response = await ask(port, "GET", path)
        record.hostile[f"path: {response.status or 'closed'}"] += 1
        if response.status == 200 or b"root:" in response.content:
            record.wrong.append(f"GET {path[:40]} was answered")


async def _junk(port: int, chance: random.Random, record: Record) -> None:
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(chance.randbytes(3000) + b"\r\n\r\n")
            await writer.drain()
            answer = _parsed(await asyncio.wait_for(reader.read(-1), PATIENCE))
            record.hostile[f"binary junk: {answer.status or 'closed'}"] += 1
        writer.close()


async def _slow(port: int, chance: random.Random, record: Record) -> None:
    """Open connections that send a header, or a body, byte by byte."""
    for head in ("GET / HTTP/1.1\r\nx-endless: ", "POST /api/compile HTTP/1.1\r\nhost: a\r\ncontent-type: "
                 "application/json\r\ncontent-length: 500\r\n\r\n"):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode())
            while not reader.at_eof() and time.monotonic() - begun < PATIENCE:
                writer.write(b"a")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1000), 0.5)
        record.hostile["slow loris: closed"] += 1
        writer.close()


async def _cancelled(port: int, chance: random.Random, record: Record) -> None:
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = _compile(f"sin(7*x*y)+{chance.random()}*cos(5*x)", {"x": [-3, 3], "y": [-3, 3]})
        head = f"POST /api/compile HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        with contextlib.suppress(ConnectionError):
            writer.write(f"{head}\r\n\r\n".encode() + body)
            await writer.drain()
            await asyncio.sleep(chance.uniform(0, 0.2))
        writer.transport.abort()
        record.hostile["cancelled request"] += 1


ATTACKS: tuple[Callable[[int, random.Random, Record], Awaitable[None]], ...] = (
    _bodies,
    _cancelled,
    _junk,
    _slow,
    _paths,
)


async def hostile(port: int, end: float, chance: random.Random, record: Record, first: int) -> None:
    """Attack until the end, in every way in turn."""
    turn = first
    while time.monotonic() < end:
        await ATTACKS[turn % len(ATTACKS)](port, chance, record)
        turn += 1


# --- the run ----------------------------------------------------------------------------------------------------------


async def watch(server: Server, end: float, record: Record) -> None:
    while time.monotonic() < end:
        record.memory.append((time.monotonic(), server.memory()))
        await asyncio.sleep(0.5)


async def kill(server: Server, record: Record, chance: random.Random, *, template: bool) -> str:
    """Kill a worker, or the template, with the signal 9. Return how the next requests were answered."""
    for _ in range(2000):
        found = [server.template()] if template else server.workers()
        if found:
            break
        await asyncio.sleep(0.005)
    else:
        return "no worker was seen"
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(found), signal.SIGKILL)
    begun = time.monotonic()
    while True:
        path, body, check = network_request(chance)
        response = await ask(server.port, "POST", path, body)
        wrong = check(response.content) if response.status == 200 else None
        record.wrong += [wrong] if wrong else []
        if response.status != 429 or time.monotonic() - begun > PATIENCE:
            return f"{response.status} after {time.monotonic() - begun:.2f} s"
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    clients: int
    seconds: float
    requests: int  # of honest clients
    answered: int
    busy: int  # answers 429
    failed: dict[str, int]  # other statuses of honest requests
    wrong: list[str]
    all: tuple[float, float]  # seconds to an answer: median and 95th percentile
    networks: tuple[float, float]  # the same for networks alone
    after_worker: str
    after_template: str
    memory: tuple[float, float]  # MB, median of the first and of the second half, without the start
    left: list[int]  # workers that are left after the run
    idle: bool  # whether no job runs or waits after the run
    exit_code: int
    orphans: list[int]  # processes that the server left behind
    errors: int  # lines of the log about an error of the server
    hostile: dict[str, int]

    @property
    def growth(self) -> float:
        first, second = self.memory
        return second / first - 1 if first else 0.0


async def load(clients: int, seconds: float, seed: int = 0) -> Result:
    """Start a playground, put it under load, stop it, and return what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        server = await Server.start(Path(folder))
        try:
            return await _load(server, clients, seconds, seed)
        finally:
            if server.process.returncode is None:
                server.process.kill()
                await server.process.wait()


async def _load(server: Server, clients: int, seconds: float, seed: int) -> Result:
    record, begun = Record(), time.monotonic()
    end = begun + seconds
    num_hostile = max(1, clients // HOSTILE_SHARE)
    tasks = [
        asyncio.ensure_future(hostile(server.port, end, random.Random(seed + i), record, i))
        if i < num_hostile
        else asyncio.ensure_future(honest(server.port, end, random.Random(seed + i), record))
        for i in range(clients)
    ]
    tasks.append(asyncio.ensure_future(watch(server, end, record)))
    chance = random.Random(seed - 1)
    await asyncio.sleep(KILL_WORKER * seconds)
    after_worker = await kill(server, record, chance, template=False)
    await asyncio.sleep(max(0.0, begun + KILL_TEMPLATE * seconds - time.monotonic()))
    after_template = await kill(server, record, chance, template=True)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException):
            record.wrong.append(f"a client ended with {outcome!r}")
    is_idle, left = await _settled(server)
    code, orphans = await server.stop()
    settled = [bytes_ for at, bytes_ in record.memory if at >= begun + SETTLE * seconds] or [0]
    halves = settled[: len(settled) // 2 or 1], settled[len(settled) // 2 :]
    log = server.log.read_text(encoding="utf-8").splitlines()
    return Result(
        clients=clients,
        seconds=seconds,
        requests=record.statuses.total(),
        answered=len(record.seconds),
        busy=record.statuses[429],
        failed={str(status or "closed"): n for status, n in record.statuses.items() if status not in (200, 422, 429)},
        wrong=record.wrong,
        all=_quantiles(record.seconds),
        networks=_quantiles(record.networks),
        after_worker=after_worker,
        after_template=after_template,
        memory=(float(np.median(halves[0])) / 1e6, float(np.median(halves[1])) / 1e6),
        left=left,
        idle=is_idle,
        exit_code=code,
        orphans=orphans,
        errors=sum('"event": "error"' in line or "Traceback" in line for line in log),
        hostile=dict(sorted(record.hostile.items())),
    )


def _quantiles(seconds: list[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    return float(np.quantile(seconds, 0.5)), float(np.quantile(seconds, 0.95))


async def _settled(server: Server) -> tuple[bool, list[int]]:
    """Wait until all jobs have ended. Return whether they have, and the workers that are left."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        state = json.loads((await ask(server.port, "GET", "/health")).content or b"{}")
        is_idle = state.get("running") == state.get("waiting") == 0
        if is_idle and not server.workers():
            return True, []
        await asyncio.sleep(0.5)
    return is_idle, server.workers()


def rows(result: Result) -> Iterator[tuple[str, str]]:
    """Return what the table shows: names and values."""
    yield "clients, of which hostile", f"{result.clients}, {max(1, result.clients // HOSTILE_SHARE)}"
    yield "seconds", f"{result.seconds:g}"
    yield "honest requests, a second", f"{result.requests}, {result.requests / result.seconds:.1f}"
    yield "of these answered, right", f"{result.answered}, {result.answered - len(result.wrong)}"
    yield "of these asked to come again (429)", f"{result.busy}"
    yield "of these failed", str(result.failed or "none")
    for what, (median, p95) in (("any answer", result.all), ("a network", result.networks)):
        yield f"seconds to {what}, median and p95", f"{median:.2f}, {p95:.2f}"
    yield "the request after kill -9 of a worker", result.after_worker
    yield "the request after kill -9 of the template", result.after_template
    first, second = result.memory
    yield "memory in MB, first and second half", f"{first:.0f}, {second:.0f} ({100 * result.growth:+.1f} %)"
    yield "workers left, jobs left", f"{len(result.left)}, {'none' if result.idle else 'some'}"
    yield "exit code, processes left after it", f"{result.exit_code}, {len(result.orphans)}"
    yield "errors in the log", f"{result.errors}"


def main() -> int:
    """Print the table. Return 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description="Load on the playground.")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    chosen = parser.parse_args()
    result = asyncio.run(load(chosen.clients, chosen.seconds, chosen.seed))
    if chosen.json:
        print(json.dumps(vars(result), indent=1))
    else:
        print("| | |\n| :-- | :-- |", *(f"| {name} | {value} |" for name, value in rows(result)), sep="\n")
        print("\nHostile requests:", *(f"{kind} × {n}" for kind, n in result.hostile.items()), sep="\n  ")
        print(*(f"WRONG: {text}" for text in result.wrong[:20]), sep="\n")
    is_fine = result.idle and not (result.wrong or result.left or result.orphans or result.errors)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
