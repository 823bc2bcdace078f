"""The process that workers are forked from: `python -m attnc_playground.template NAME FOLDER LIMITS`.

It imports attnc and compiles once. Then it forks a worker for every connection on its socket. A worker does one job
under limits of memory, CPU time and file size, and ends. A job that is killed takes nothing with it, and no job can
leave anything behind in memory. If the server dies, the kernel kills the template, and then its workers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct(">Q")
"""Every message is preceded by its length in bytes."""
PR_SET_PDEATHSIG = 1
MAX_FILE = 2**27
"""Largest file in bytes that a worker may write."""
MAX_FILES = 64
"""Largest number of files that a worker may have open."""


class OutOfCpuTime(Exception):
    """The worker used up its CPU time."""


def main(name: str, folder: str, limits: str) -> NoReturn:
    """Serve forever."""
    die_with_parent()
    settings = json.loads(limits)
    from attnc_playground import jobs

    jobs.warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the kernel
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(folder)  # so that the path of the socket is short
    listener.bind(name)
    listener.listen(64)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            work(connection, Path(folder), settings)
        connection.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def work(connection: socket.socket, folder: Path, settings: dict[str, Any]) -> NoReturn:
    """Do one job: state the process id, read the request, answer, end."""
    code = 1
    try:
        die_with_parent()
        restrict(settings)
        connection.sendall(struct.pack(">q", os.getpid()))
        request = json.loads(receive(connection))
        head, content = answer(request, folder / str(os.getpid()), settings)
        text = json.dumps(head, allow_nan=False).encode()
        connection.sendall(LENGTH.pack(len(text)) + text + LENGTH.pack(len(content)) + content)
        code = 0
    finally:
        os._exit(code)  # no handler of the template runs twice


def restrict(settings: dict[str, Any]) -> None:
    """Limit this process. The limits hold for native code, too."""

    def out_of_time(number: int, frame: object) -> None:
        raise OutOfCpuTime

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, out_of_time)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, soft, hard in (
        (resource.RLIMIT_AS, used + settings["memory"], used + settings["memory"]),
        (resource.RLIMIT_CPU, settings["cpu_seconds"], settings["cpu_seconds"] + 1),
        (resource.RLIMIT_FSIZE, MAX_FILE, MAX_FILE),
        (resource.RLIMIT_NOFILE, MAX_FILES, MAX_FILES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def answer(given: dict[str, Any], folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the head and the content of the answer to a request."""
    import attnc
    from attnc_playground import jobs, requests

    def refusal(status: int, error: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {"status": status, "type": "application/json"}, json.dumps({"error": error}).encode()

    mebibytes = settings["memory"] // 2**20
    try:
        folder.mkdir(mode=0o700)
        request = requests.read(given["kind"], json.dumps(given["fields"]).encode())
        found = jobs.run(request, settings["compile_seconds"], folder)
    except attnc.AttncError as error:
        return refusal(422, jobs.error_of(error))
    except OutOfCpuTime:
        return refusal(504, {"type": "TimeLimit", "message": too_long(settings["cpu_seconds"])})
    except MemoryError:
        return refusal(507, {"type": "MemoryLimit", "message": too_large(mebibytes)})
    if isinstance(found, jobs.File):
        return {"status": 200, "type": found.type, "name": found.name}, found.content
    return {"status": 200, "type": "application/json"}, json.dumps(found, allow_nan=False).encode()


def too_long(seconds: float) -> str:
    return (
        f"this takes more than the {seconds:g} s that the playground gives to a job. Choose a larger eps or a smaller "
        "box, or run `attnc compile`, which has no limit."
    )


def too_large(mebibytes: int) -> str:
    return (
        f"this takes more than the {mebibytes:,} MiB that the playground gives to a job. Choose a larger eps or a "
        "smaller box, or run `attnc compile`."
    )


def receive(connection: socket.socket) -> bytes:
    """Return the next message."""
    length = LENGTH.unpack(_exactly(connection, LENGTH.size))[0]
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the server closed the connection")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
