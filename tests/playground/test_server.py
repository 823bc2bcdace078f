"""The server: its answers, its limits, its headers, and what is left when workers or clients go away."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnc
import attnc_checker

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from playground.local_server import LONG, Playground, Response

SIN = {"expression": "sin(x)", "box": {"x": [-3, 3]}, "eps": 1e-3}
MODERATE = {
    "expression": "exp(sin(x)*y)",
    "box": {"x": [-3, 3], "y": [-3, 3]},
    "eps": 1e-5,
    "construction": "spectral_grid",
}
"""A function whose compilation takes long enough for its worker to be found and killed."""
PATIENT = {"workers": 1, "seconds": 300.0, "cpu_seconds": 300, "compile_seconds": 300.0, "header_seconds": 300.0}
LIMITS = {**PATIENT, "queue": 1, "connections": 12}
"""No honest request may meet a limit of time by chance. So the server that has short ones is another one."""


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    running = Playground.start(tmp_path_factory.mktemp("playground"), **LIMITS)
    yield running
    running.stop()


def until(condition, seconds: float = 600) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def answered(playground: Playground, text: bytes) -> bytes:
    """Send bytes until they are answered. A busy machine may be too slow for a server that waits 3 s for a head."""
    for _ in range(20):
        with contextlib.suppress(ConnectionError):
            if received := raw(playground, text):
                return received
    return b""


def is_idle(playground: Playground) -> bool:
    health = playground.get("/health").json
    return health["running"] == health["waiting"] == 0 and len(playground.workers()) == 1


# --- answers ----------------------------------------------------------------------------------------------------------


def test_compile_answers_what_attnc_compiles(playground: Playground) -> None:
    found = playground.post("/api/compile", SIN)
    net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
    assert found.status == 200
    assert found.json["certificate"]["bound"] == net.certificate.bound
    assert found.json["num_anchors"] == net.num_anchors
    assert found.json["variables"] == ["x"]
    checked = found.json["picture"]["checked"]
    assert checked["outputs"] == net(checked["points"]).tolist()


def test_equal_requests_are_computed_once(playground: Playground) -> None:
    asked = {"expression": "cos(x)", "box": {"x": [-1, 1]}, "eps": 0.01}
    first = playground.post("/api/compile", asked)
    again = playground.post("/api/compile", asked | {"construction": "auto", "norm": "inf"})
    assert first.content == again.content

    def notes() -> list[str | None]:
        return [json.loads(line).get("note") for line in playground.log.read_text().splitlines()]

    assert until(lambda: notes()[-2:] == ["computed", "kept"])  # a line is written after its answer


def test_plan_lists_every_construction(playground: Playground) -> None:
    rows = playground.post("/api/plan", SIN).json["rows"]
    expected = attnc.plan("sin(x)", {"x": (-3, 3)}, 1e-3)
    assert [(row["name"], row["anchors"], row["why_not"]) for row in rows] == [
        (row.name, row.anchors, row.why_not) for row in expected
    ]


@pytest.mark.parametrize("kind", ["network", "checkpoint"])
def test_downloads_are_what_verify_proves(playground: Playground, kind: str, tmp_path: Path) -> None:
    found = playground.post("/api/download", SIN | {"kind": kind})
    assert found.headers["content-disposition"] == f'attachment; filename="{kind}.zip"'
    zipfile.ZipFile(io.BytesIO(found.content)).extractall(tmp_path)
    assert attnc_checker.check(tmp_path / kind).proved


def test_files_for_the_page_that_verifies(playground: Playground) -> None:
    found = playground.post("/api/download", SIN | {"kind": "files"}).json
    assert sorted(found) == ["README.md", "certificate.json", "config.json", "model.safetensors"]


def test_a_function_on_all_numbers(playground: Playground) -> None:
    asked = {"expression": "gelu(x)", "box": {"x": ["-inf", "inf"]}, "eps": 1e-3}
    found = playground.post("/api/compile", asked).json
    assert found["box"] == {"x": ["-inf", "inf"]}
    assert found["picture"]["lo"] == [-6.0]
    assert found["certificate"]["bound"] <= 1e-3


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_error_states_its_place(playground: Playground) -> None:
    found = playground.post("/api/compile", SIN | {"expression": "sin(x)^2"})
    assert found.status == 422
    assert found.json["error"]["type"] == "ExpressionError"
    assert found.json["error"]["position"] == 6
    assert "\n" not in found.json["error"]["message"]


def test_the_page_gets_the_status_of_a_refusal_in_a_header(playground: Playground) -> None:
    body = json.dumps(SIN | {"expression": "sin("}).encode()
    found = playground.send("POST", "/api/compile", body, Content_Type="application/json", Attnc_Status="header")
    assert (found.status, found.headers["attnc-status"]) == (200, "422")
    assert found.json["error"]["type"] == "ExpressionError"


def test_a_jump_in_an_lp_norm(playground: Playground) -> None:
    asked = {"expression": "sign(x)", "box": {"x": [-1, 1]}, "eps": 0.01}
    assert playground.post("/api/compile", asked).status == 422
    found = playground.post("/api/compile", asked | {"norm": 2}).json
    assert found["certificate"]["norm"] == "2"
    assert found["picture"]["target"][0] == -1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (SIN | {"expression": "1/x"}, 422),
        (SIN | {"box": {"x": [1, 0]}}, 422),
        (SIN | {"construction": "nonsense"}, 422),
        (SIN | {"expression": "(" * 499}, 422),
        (SIN | {"expression": "x" * 501}, 400),
        (SIN | {"box": {"x": [-1e300, 1e300]}}, 400),
        (SIN | {"box": {f"x{i}": [0, 1] for i in range(9)}}, 400),
        (SIN | {"eps": True}, 400),
        (SIN | {"eps": "1e-3"}, 400),
        (SIN | {"eps": 1e-300}, 400),
        (SIN | {"path": "/etc/passwd"}, 400),
        (SIN | {"points_per_axis": 10**9}, 400),
        ([1, 2], 400),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_with_a_sentence(playground: Playground, fields, status: int) -> None:
    found = playground.post("/api/compile", fields)
    assert found.status == status
    assert len(found.json["error"]["message"].split()) > 4


def test_bodies_that_are_not_requests(playground: Playground) -> None:
    as_json = {"Content_Type": "application/json"}
    assert playground.send("POST", "/api/compile", b"[" * 60_000, **as_json).status == 400
    assert playground.send("POST", "/api/compile", b"\x00\xff\xfe", **as_json).status == 400
    for size in (70_000, 6_000_000):  # the larger one is still sent when the answer is clear
        assert playground.send("POST", "/api/compile", b" " * size, **as_json).status == 413
    assert playground.send("POST", "/api/compile", json.dumps(SIN).encode(), Content_Type="text/plain").status == 415
    assert playground.get("/api/compile").status == 405
    assert playground.get("/nowhere").status == 404
    for path in ("/../app.py", "/js/../../app.py", "/%2e%2e/app.py", "/js/%2e%2e/%2e%2e/app.py"):
        assert playground.get(path).status == 404


# --- headers ----------------------------------------------------------------------------------------------------------


def has_security_headers(response: Response) -> bool:
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert "'unsafe-eval'" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    return response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/js/main.js", "/openapi.json", "/health", "/api/compile", "/nowhere"])
def test_every_response_has_the_security_headers(playground: Playground, method: str, path: str) -> None:
    response = playground.send(method, path)
    assert has_security_headers(response)
    if method == "HEAD":
        assert response.content == b""
    if path == "/" and method in ("GET", "HEAD"):
        assert response.status == 200
        assert "wasm-unsafe-eval" not in response.headers["content-security-policy"]


def test_files_are_not_sent_twice(playground: Playground) -> None:
    tag = playground.get("/js/main.js").headers["etag"]
    again = playground.send("GET", "/js/main.js", If_None_Match=tag)
    assert (again.status, again.content) == (304, b"")


def raw(playground: Playground, text: bytes) -> bytes:
    """Send bytes, and return everything until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", playground.port), timeout=600) as connection:
        connection.sendall(text)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def test_junk_is_answered_with_the_headers_too(playground: Playground) -> None:
    received = raw(playground, b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")
    assert b"content-security-policy: default-src 'none'" in received


# --- limits -----------------------------------------------------------------------------------------------------------


def test_what_is_slow_is_cut_off(tmp_path: Path) -> None:
    """A head and a body that do not come, and a job that takes too long."""
    hurried = Playground.start(tmp_path, workers=1, seconds=4.0, header_seconds=3.0, body_seconds=1.0)
    try:
        assert raw(hurried, b"GET / HTTP/1.1\r\nHost: a\r\n") == b""
        head = b"POST /api/compile HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        assert answered(hurried, head + b"Content-Length: 99\r\n\r\n{").startswith(b"HTTP/1.1 408")
        body = json.dumps(LONG).encode()
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        answer = answered(hurried, head + length + body)
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"4 s" in answer
        assert until(lambda: len(hurried.workers()) == 1)
    finally:
        hurried.stop()


def test_too_many_connections_are_refused(playground: Playground) -> None:
    held = [socket.create_connection(("127.0.0.1", playground.port)) for _ in range(12)]
    try:
        assert until(lambda: raw(playground, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").startswith(b"HTTP/1.1 503"))
    finally:
        for connection in held:
            connection.close()
    assert until(lambda: is_idle(playground))


def test_more_than_the_queue_are_refused(tmp_path: Path) -> None:
    playground = Playground.start(tmp_path, **PATIENT, queue=1)
    try:
        askers = [playground.connect() for _ in range(2)]
        for number, asker in enumerate(askers):
            body = json.dumps(LONG | {"eps": 1e-9 * (1 + number / 100)})
            asker.request("POST", "/api/compile", body, {"Content-Type": "application/json"})
            assert until(
                lambda number=number: sum(playground.get("/health").json[k] for k in ("running", "waiting")) > number
            )
        refused = playground.post("/api/compile", SIN | {"eps": 0.0123})
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "Try again" in refused.json["error"]["message"]
        for asker in askers:
            asker.close()
        assert until(lambda: is_idle(playground))
        assert playground.post("/api/compile", SIN).status == 200
    finally:
        playground.stop()


def test_a_client_that_leaves_takes_its_worker_along(tmp_path: Path) -> None:
    playground = Playground.start(tmp_path, **PATIENT)
    try:
        connection = playground.connect()
        connection.request("POST", "/api/compile", json.dumps(LONG), {"Content-Type": "application/json"})
        assert until(lambda: len(playground.workers()) == 2)
        connection.close()
        assert until(lambda: is_idle(playground))  # the job itself may take 300 s
    finally:
        playground.stop()


@pytest.mark.parametrize("victim", ["worker", "template"])
def test_a_job_whose_worker_is_killed_is_done_once_more(tmp_path: Path, victim: str) -> None:
    playground = Playground.start(tmp_path, **PATIENT)
    found: list[Response] = []

    def ask(fields: dict[str, object]) -> threading.Thread:
        asker = threading.Thread(target=lambda: found.append(playground.post("/api/compile", fields)))
        asker.start()
        return asker

    def kill(known: list[int]) -> list[int]:
        """Kill the victim as soon as there is a worker that is not known. Return the processes that are now known."""
        seen: list[int] = []

        def is_new() -> bool:
            seen[:] = playground.workers()
            return len(seen) == 2 and seen[1] not in known

        assert until(is_new)
        os.kill(seen[victim == "worker"], signal.SIGKILL)
        return [*known, *seen]

    try:
        asker = ask(MODERATE)
        kill([])
        asker.join()
        assert found[-1].status == 200
        assert found[-1].json["certificate"]["bound"] <= MODERATE["eps"]
        assert until(lambda: is_idle(playground))
        asker = ask(LONG)
        kill(kill([]))
        asker.join()
        assert found[-1].status == 507
        assert playground.post("/api/compile", SIN).status == 200
        assert until(lambda: is_idle(playground))
    finally:
        playground.stop()


def test_a_job_that_needs_more_memory_is_refused(tmp_path: Path) -> None:
    playground = Playground.start(tmp_path, workers=1, memory=2**21)
    try:
        found = playground.post("/api/compile", LONG)
        assert found.status == 507
        assert "2 MiB" in found.json["error"]["message"]
    finally:
        assert playground.stop() == -signal.SIGINT


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Its workers are not ready in time, or the process that starts them ends."""
    program = "import sys\nfrom attnc_playground import pool, serving\n{change}\nserving.serve(port=0)"
    changes = {
        "pool.START_SECONDS = 0.01": "its workers were not ready after 0.01 s",
        "pool.sys.executable = '/bin/false'": "the process that starts its workers ended",
        "pool.sys.executable = '/no/python'": "No such file or directory: '/no/python'",
    }
    for change, words in changes.items():
        command = [sys.executable, "-c", program.format(change=change)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("error: the playground did not start: "), done.stderr
        assert words in done.stderr


# --- the end ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_no_worker_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path / "tmp"))
        playground = Playground.run(tmp_path, "-m", "attnc", "serve", "--port", "0", "--workers", "1")
    asking = playground.connect()
    asking.request("POST", "/api/compile", json.dumps(LONG), {"Content-Type": "application/json"})
    assert until(lambda: len(playground.workers()) == 2)
    workers = playground.workers()
    assert playground.stop() == 130
    assert "interrupted: the playground has stopped" in playground.log.read_text()
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert list((tmp_path / "tmp").iterdir()) == []
    asking.close()
