"""The web application: the page, the API, and the headers that every response has."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import attnc
from attnc_playground import verify_page
from attnc_playground.limits import MAX_BODY, MAX_DISCARDED, Limits
from attnc_playground.openapi import document
from attnc_playground.pool import Answer, Answers, NotStarted, Pool, QueueFull, refused
from attnc_playground.requests import BadRequest, as_fields, read

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "worker-src": "'self'",
    "manifest-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""Everything that a page may load comes from this server. Nothing that stands in the page itself is run."""
VERIFY = "/verify/"
"""The page that runs the checker. WebAssembly is allowed below it, and nowhere else."""
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".wasm": "application/wasm",
    ".whl": "application/zip",
    ".zip": "application/zip",
    ".woff2": "font/woff2",
    ".safetensors": "application/octet-stream",
}
"""The types of files that are served. Files of other types, such as licences, are text."""
STATUS = "attnc-status"
"""The header of requests and responses for the page: see `_for_page`."""
RETRY_SECONDS = "2"
"""The time after which a client that was refused may ask again: a job takes about 0.2 s, and 32 of them wait."""


def make_app(limits: Limits | None = None) -> Starlette:
    """Return the application. Its workers start and end with it."""
    chosen = limits or Limits()
    pool = Pool(chosen, report)
    answers = Answers(pool, chosen.cache)
    files = static_files()
    description = document()

    async def page(request: Request) -> Response:
        return files[_page_of(request.url.path)].response(request)

    async def api(request: Request) -> Response:
        return _for_page(request, await respond(request, answers, chosen))

    async def openapi(request: Request) -> Response:
        return JSONResponse(description)

    async def health(request: Request) -> Response:
        state = {"ready": pool.is_ready, "running": pool.running, "waiting": pool.waiting, "version": attnc.__version__}
        return JSONResponse(state | {"kept_bytes": answers.bytes}, 200 if pool.is_ready else 503)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await pool.start()
        except (NotStarted, OSError) as error:
            app.state.failure = str(error)
            raise
        try:
            yield
        finally:
            await pool.close()

    routes = [Route(path, page, methods=["GET"]) for path in _paths(files)]
    routes += [Route(f"/api/{kind}", api, methods=["POST"]) for kind in ("compile", "plan", "download", "incontext")]
    routes += [Route("/openapi.json", openapi), Route("/health", health)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _as_json, Exception: _as_json})
    app.router.redirect_slashes = False
    app.add_middleware(Outermost)
    app.state.pool = pool
    app.state.failure = None  # why the workers did not start
    return app


def _for_page(request: Request, response: Response) -> Response:
    """Move the status of a refusal to a header if the request asks for that with the same header.

    Browsers log every refusal as an error of the page, and a function that is half typed is none.
    """
    if request.headers.get(STATUS) == "header" and response.status_code >= 400:
        response.headers[STATUS] = str(response.status_code)
        response.status_code = 200
    return response


async def _as_json(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        report("error", path=request.url.path[:200], type=type(error).__name__, message=str(error)[:500])
        return error_response(500, "ServerError", "the server failed. Its log states why.")
    messages = {404: "there is nothing at this path. GET / is the page, GET /openapi.json describes the API."}
    message = messages.get(error.status_code, str(error.detail))
    response = error_response(error.status_code, "HTTPError", message)
    response.headers.update(error.headers or {})
    return response


def error_response(status: int, kind: str, message: str) -> Response:
    """Return an error in the form that all errors of the API have."""
    return as_response(refused(status, kind, message))


def as_response(answer: Answer) -> Response:
    """Return an answer as a response."""
    headers = {"cache-control": "no-store"}
    if answer.name is not None:
        headers["content-disposition"] = f'attachment; filename="{answer.name}"'
    if answer.status == 429:
        headers["retry-after"] = RETRY_SECONDS
    if answer.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(answer.content, answer.status, headers, answer.type)


# --- the API ----------------------------------------------------------------------------------------------------------


async def respond(request: Request, answers: Answers, limits: Limits) -> Response:
    """Read a request, have it answered by a worker, and cancel that when the client leaves."""
    kind = request.url.path.rpartition("/")[2]
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return error_response(415, "BadRequest", "send the request with the header Content-Type: application/json.")
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _body(request)
    except TimeoutError:
        return error_response(408, "BadRequest", f"the body did not arrive within {limits.body_seconds:g} s.")
    if body is None:
        return error_response(413, "BadRequest", f"the body is larger than {MAX_BODY:,} bytes.")
    try:
        asked = read(kind, body)
    except BadRequest as error:
        return error_response(400, "BadRequest", str(error))
    fields = as_fields(asked)
    key = hashlib.sha256(json.dumps([kind, fields], sort_keys=True).encode()).hexdigest()
    job = asyncio.ensure_future(answers.get(key, kind, fields))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((job, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            request.scope["attnc.note"] = "client left"
            return error_response(499, "ClientLeft", "the client closed the connection; the job was cancelled.")
        answer, is_kept = job.result()
        request.scope["attnc.note"] = "kept" if is_kept else "computed"
        return as_response(answer)
    except QueueFull:
        many = f"the playground is busy: {limits.queue} jobs wait already. Try again in {RETRY_SECONDS} s."
        return as_response(refused(429, "Busy", many))
    finally:
        for task in (job, leaving):
            task.cancel()
        await asyncio.gather(job, leaving, return_exceptions=True)


async def _body(request: Request) -> bytes | None:
    """Return the body, or None if it is larger than allowed.

    Some of what is too much is read, and not kept: a client that still sends when the connection closes gets no answer.
    """
    parts, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts += part
        elif size > MAX_DISCARDED:
            break
    return bytes(parts) if size <= MAX_BODY else None


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticFile:
    """A file of the page. Small ones are in memory, and no path of a request is ever looked up on the disk."""

    type: str
    tag: str
    content: bytes | None
    source: Traversable | None = None

    @classmethod
    def of(cls, name: str, content: bytes, source: Traversable | None = None) -> StaticFile:
        """Return a file. A large one is read again from its source whenever it is sent."""
        kept = content if source is None or len(content) <= IN_MEMORY else None
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(TYPES.get(name[name.rfind(".") :], "text/plain; charset=utf-8"), tag, kept, source)

    def response(self, request: Request) -> Response:
        headers = {"etag": self.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        content = self.content
        if content is None:
            assert self.source is not None
            content = self.source.read_bytes()
        return Response(content, headers=headers, media_type=self.type)


IN_MEMORY = 2**20
"""Largest file in bytes that is kept in memory. Only those of the verify page are larger."""


def static_files() -> dict[str, StaticFile]:
    """Return the files of the page by path, from the package."""
    found: dict[str, StaticFile] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif not entry.name.startswith("."):
                found[prefix + entry.name] = StaticFile.of(entry.name, entry.read_bytes(), entry)

    walk(resources.files("attnc_playground") / "static", "/")
    return found | {VERIFY + name: StaticFile.of(name, content) for name, content in verify_page.generated().items()}


def _paths(files: Mapping[str, StaticFile]) -> list[str]:
    return [*files, *(path.removesuffix("index.html") for path in files if path.endswith("/index.html"))]


def _page_of(path: str) -> str:
    return f"{path}index.html" if path.endswith("/") else path


# --- what every response has ------------------------------------------------------------------------------------------


def security_headers(path: str) -> dict[str, str]:
    """Return the security headers of a response."""
    scripts = "'self' 'wasm-unsafe-eval'" if path.startswith(VERIFY) else "'self'"
    policy = POLICY | {"script-src": scripts}
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    }


class Outermost:
    """Add the security headers to every response, and write a line to the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = [(name.encode(), value.encode()) for name, value in security_headers(scope["path"]).items()]

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - started), 1)
            request = {"method": scope["method"], "path": scope["path"][:200], "status": status}
            report("request", **request, milliseconds=milliseconds, note=scope.get("attnc.note"))


def report(event: str, **facts: Any) -> None:
    """Write one line of JSON to the log, which is standard error."""
    line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event} | facts
    print(json.dumps({name: value for name, value in line.items() if value is not None}), file=sys.stderr, flush=True)
