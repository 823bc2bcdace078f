"""A real browser, the playground's server, and the site with the verify page. Nothing may be fetched from elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attnc
from attnc_playground import verify_page
from attnc_playground.app import TYPES, security_headers
from browser import chromium
from playground.local_server import Playground

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
"""A container has no sandbox, no graphics card, and little shared memory. The browser itself must not call home."""
ELSEWHERE = re.compile(r"^(https?|wss?)://(?!127\.0\.0\.1[:/])")
"""The addresses of other hosts than this one."""
AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")
PAINTED = "() => performance.getEntriesByName('first-contentful-paint').length > 0"
"""Whether something of the page can be seen."""
WAIT = 600_000
"""Longest wait for anything on a page, in ms: the machine may be busy with other things."""
LONGEST = "3600"
"""The largest time limit in seconds that the verify page takes: no honest check may meet it on a busy machine."""
PATIENCE = f"""new MutationObserver((_, observer) => {{
  const field = document.getElementById('seconds');
  if (field) {{ field.value = '{LONGEST}'; observer.disconnect(); }}
}}).observe(document, {{ childList: true, subtree: true }});"""
"""Set the time limit of the verify page before its own scripts run."""
HOUR = 3600.0
PATIENT = dict.fromkeys(("seconds", "compile_seconds", "header_seconds", "body_seconds", "response_seconds"), HOUR)
"""Limits of a server that a busy machine does not reach. tests/playground has the tests of limits."""

NETWORKS: dict[str, tuple[str, dict[str, tuple[float, float]], float, dict[str, Any]]] = {
    "leaves": ("sin(x)", {"x": (-3, 3)}, 1e-3, {}),
    "stages": ("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-3, {}),
    "square": ("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-4, {"construction": "spectral_grid"}),
    "cube": ("x*y*z", {"x": (-1, 1), "y": (-1, 1), "z": (0, 1)}, 1e-2, {"construction": "spectral_grid"}),
    "slow": ("exp(sin(x)*y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, {"construction": "spectral_grid"}),
}
"""The name, the function, its box, eps and options of networks that are compiled here."""
OLD = Path(__file__).parents[1] / "data" / "network-1"
"""Saved networks of every kind of certificate."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            # A connection of Playwright that is collected late is none of the page's faults.
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium.path(), args=[*OPTIONS], timeout=WAIT)
        yield found
        found.close()


def reached(page: Page, *states: str) -> str:
    """Wait until a page is in one of these states, and return the state that was seen."""
    found = page.wait_for_function(
        "states => states.find((name) => name === document.documentElement.dataset.state)", arg=states
    )
    return found.json_value()


class Visit:
    """A page that is watched: what it logs as an error, and what it asks of other hosts."""

    def __init__(self, context: BrowserContext) -> None:
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.context = context
        context.set_default_timeout(WAIT)
        context.add_init_script(PATIENCE)
        context.route(ELSEWHERE, self._refuse)
        context.on("page", self._watch)
        self.page: Page = context.new_page()

    def _refuse(self, route: Any) -> None:
        self.elsewhere.append(route.request.url)
        route.abort()

    def _watch(self, page: Page) -> None:
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, address: str) -> None:
        """Go to a page, and wait until it is painted: before that, the browser may drop keys."""
        self.page.goto(address)
        self.page.wait_for_function(PAINTED)

    def audit(self) -> list[str]:
        """Return what is wrong with contrast, names for screen readers, and width."""
        return self.page.evaluate(AUDIT)

    def watch_layout(self) -> None:
        """Have the next page add up in `moved` how far its parts move while it loads, in Chromium's measure."""
        self.page.add_init_script(
            "window.moved = 0;"
            "new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.moved += entry.value; })"
            ".observe({ type: 'layout-shift', buffered: true });"
        )

    def moved(self) -> float:
        """Return how far the parts of the page have moved, as soon as its fonts are loaded and it is painted."""
        return self.page.evaluate(
            "async () => { await document.fonts.ready;"
            " for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); return window.moved; }"
        )

    def tabbed(self, most: int = 200) -> set[str]:
        """Return the ids of all controls that the key Tab reaches until it comes round to the first one."""
        found: list[str] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            name = self.page.evaluate(
                "() => { const at = document.activeElement;"
                " return at === document.body ? '' : at.id || at.dataset.testid || at.outerHTML.slice(0, 80); }"
            )
            if name in found[:1]:
                break
            found += [name] if name else []  # between the last control and the first, the browser itself has the focus
        return {*found}


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Open a page of its own. At the end no page may have logged an error, or asked another host for anything."""
    visits: list[Visit] = []

    def opened(width: int = 1400, scheme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        visits.append(Visit(context))
        return visits[-1]

    yield opened
    for one in visits:
        one.context.close()
    assert [url for one in visits for url in one.elsewhere] == []
    assert [error for one in visits for error in one.errors] == []


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with saved networks."""
    folder = tmp_path_factory.mktemp("networks")
    for name, (expression, box, eps, options) in NETWORKS.items():
        attnc.compile(expression, box, eps=eps, seconds=HOUR, **options).save(folder / name)
    for name in ("tails", "table", "norm", "second-dtype", "chain", "definitions", "gradient"):
        shutil.copytree(OLD / name, folder / name)
    return folder


class SiteHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files as any web server of a site does, with the policy of the playground's server."""

    extensions_map = TYPES

    def log_message(self, *_: object) -> None:
        pass

    def end_headers(self) -> None:
        for name, value in security_headers(self.path).items():
            self.send_header(name, value)
        super().end_headers()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, networks: Path) -> Iterator[str]:
    """The address of a site with the verify page, and networks that it offers."""
    folder = tmp_path_factory.mktemp("site")
    offered = [verify_page.Listed(f"the network {name}", f"../gallery/{name}/") for name in NETWORKS]
    verify_page.write(folder / "verify", offered)
    shutil.copytree(networks, folder / "gallery")
    handler = functools.partial(SiteHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a playground, served as `attnc serve` does, with time for a busy machine."""
    server = Playground.start(tmp_path_factory.mktemp("playground"), cpu_seconds=int(HOUR), **PATIENT)
    yield f"http://127.0.0.1:{server.port}"
    server.stop(signal.SIGTERM)
