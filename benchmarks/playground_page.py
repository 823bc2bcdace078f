"""The speed of the playground's page, measured by the clock of a real browser. Prints a table.

    python benchmarks/playground_page.py [--json]

From keystroke to picture: a character is typed into a function that nobody asked for before, and the time runs until
the frame after the one in which the new pictures are drawn. The 0.18 s in which the page waits for the next key are
part of it. Sliders: the position changes in every frame, and the frames that were computed and drawn are counted.
It needs Chromium and the extra `browser`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser.chromium import path as chromium_path

if TYPE_CHECKING:
    from playwright.sync_api import Page

OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
FUNCTIONS = {
    "sin(k*x)": "sin(1.{}*x",
    "exp(-k*x**2)": "exp(-1.{}*x**2",
    "1/(1+k*x**2)": "1/(1+25.{}*x**2",
    "abs(x-k)": "abs(x-0.{}",
}
"""Functions on [-3, 3] with a number that no earlier run has, and without the last character, which is typed."""
REPEATS = 5
LATENCY = """() => new Promise((found) => {
  const html = document.documentElement;
  let typed = null;
  document.getElementById("expression").addEventListener("input", (event) => (typed = event.timeStamp), { once: true });
  const seen = new MutationObserver(() => {
    if (typed === null || !["ready", "error"].includes(html.dataset.state)) return;
    seen.disconnect();
    requestAnimationFrame(() => requestAnimationFrame((now) => found([now - typed, html.dataset.state])));
  });
  seen.observe(html, { attributes: true, attributeFilter: ["data-state"] });
})"""
"""Wait for a keystroke and the pictures that follow it. Return the milliseconds, and the state of the page."""
SLIDE = """async ([name, from, to, count]) => {
  const slider = document.getElementById(name);
  const frame = () => new Promise(requestAnimationFrame);
  const drawn = () => Number(document.getElementById("fps").dataset.frames);
  await frame();
  const [start, first] = [performance.now(), drawn()];
  for (let i = 0; i < count; i++) {
    slider.value = Math.round(from + ((to - from) * i) / (count - 1));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await frame();
  }
  return (1000 * (drawn() - first)) / (performance.now() - start);
}"""
"""Move a slider in every frame. Return the frames that were computed and drawn per second."""
SLIDERS = (("beta", 300, 900), ("heads", 1, 8), ("sentinels", 0, 4))
"""The sliders that are moved at 64 keys, and their positions."""
FRAMES = 120


def latency(page: Page, number: int, text: str) -> float:
    """Return the seconds from the last keystroke of a function to its picture."""
    page.get_by_test_id("expression").fill(text.format(f"{number:03d}"))  # lacks its last bracket
    page.locator("html[data-state=error]").wait_for(state="attached")
    page.evaluate(f"void (window.measured = ({LATENCY})())")
    page.get_by_test_id("expression").press("End")
    page.keyboard.press(")")
    milliseconds, state = page.evaluate("window.measured")
    assert state == "ready", page.get_by_test_id("error").inner_text()
    return milliseconds / 1000


def sliders(page: Page) -> dict[str, float]:
    """Return the frames per second of every slider at 64 keys."""
    page.get_by_test_id("preset-sin").click()
    page.locator("html[data-state=ready]").wait_for(state="attached")
    page.get_by_test_id("view-byhand").check()
    page.get_by_test_id("keys").fill("64")
    page.get_by_test_id("heads").fill("2")  # so that sentinels can be moved
    found = {name: page.evaluate(SLIDE, [name, low, high, FRAMES]) for name, low, high in SLIDERS}
    page.get_by_test_id("heads").fill("1")
    return found | {"keys": page.evaluate(SLIDE, ["keys", 2, 64, FRAMES])}


def measure(address: str) -> dict[str, dict[str, float]]:
    """Return the seconds from keystroke to picture, and the frames per second of the sliders."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=[*OPTIONS])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address)
        page.locator("html[data-state=ready]").wait_for(state="attached")
        seconds = dict[str, float]()
        for name, text in FUNCTIONS.items():
            found = [latency(page, number, text) for number in range(1, REPEATS + 1)]
            seconds |= {f"{name}, median": statistics.median(found), f"{name}, slowest": max(found)}
        rates = sliders(page)
        browser.close()
    return {"seconds from keystroke to picture": seconds, "frames per second at 64 keys": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    command = [sys.executable, "-m", "attnc", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://[\d.:]+", server.stdout.readline())
            assert address, "the playground did not start"
            found = measure(address[0])
        finally:
            server.terminate()
    if options.json:
        print(json.dumps(found))
        return
    for title, rows in found.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:24} {value:6.2f}")


if __name__ == "__main__":
    main()
