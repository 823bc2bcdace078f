"""The playground as a reader uses it: presets, sliders, wrong input, links, downloads, a phone, the keyboard alone."""

from __future__ import annotations

import io
import itertools
import re
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnc
from browser.conftest import Visit, reached

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

PRESETS = ("sin", "step", "kink", "runge", "relu", "gelu", "product", "bump")


def settled(page: Page) -> str:
    """Wait until the page has an answer, and return whether it is ready or shows an error."""
    return reached(page, "ready", "error")


def rested(page: Page) -> None:
    """Wait until the page has drawn, named failures and found the best β, which it does when a slider rests."""
    page.locator("html:not([data-busy])").wait_for(state="attached")


def planned(page: Page) -> None:
    """Wait until the table of constructions and the curve of costs are those of the function."""
    page.locator("#cost-curve[data-complete]").wait_for()


def fact(page: Page, name: str) -> str:
    return page.locator(f"#facts [data-fact^={name}]").inner_text().replace("−", "-").replace("\u202f", "")


def slide(page: Page, name: str, *keys: str) -> None:
    """Move a slider with the keyboard, as a reader without a mouse does."""
    for key in keys:
        page.get_by_test_id(name).press(key)
    rested(page)


def shows_failure(page: Page, words: str) -> None:
    from playwright.sync_api import expect

    expect(page.get_by_test_id("signatures")).to_have_attribute("data-names", re.compile(words))


@pytest.fixture(scope="module")
def page(browser: Browser, playground: str) -> Iterator[Page]:
    """A page that many tests use in turn. Each begins with a preset."""
    visit = Visit(browser.new_context())
    visit.open(f"{playground}/")
    assert settled(visit.page) == "ready"
    yield visit.page
    assert (visit.errors, visit.elsewhere) == ([], [])
    visit.context.close()


def preset(page: Page, name: str, view: str = "byhand") -> None:
    page.evaluate("document.documentElement.dataset.state = 'waits'")
    page.get_by_test_id(f"preset-{name}").click()
    assert settled(page) == "ready", page.get_by_test_id("error").inner_text()
    page.get_by_test_id(f"view-{view}").check()


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_compiles_and_is_proven(page: Page, name: str) -> None:
    preset(page, name, "compiled")
    eps = float(page.get_by_test_id("eps").input_value())
    assert float(fact(page, "proven-bound")) <= eps
    assert float(fact(page, "largest-error-seen")) <= eps or name == "step"  # its bound is about a mean
    text = page.get_by_test_id("status").inner_text()
    assert text.startswith("Compiled and proven in"), text
    assert page.locator("#teach").inner_text()
    assert page.locator("#math .katex").count() == 1
    is_plane = name in ("product", "bump")
    for plot in ("plot-target", "plot-network", "plot-partition") if is_plane else ("plot-function", "plot-attention"):
        assert page.get_by_test_id(plot).is_visible()
    assert float(page.get_by_test_id("parity").get_attribute("data-difference") or "nan") <= 1e-9
    assert page.locator("#ledger tbody tr").count() >= 2


def test_the_temperature_goes_from_uniform_to_one_hot(page: Page) -> None:
    preset(page, "sin")
    slide(page, "beta", "Home")
    assert "uniform" in page.locator("#beta-value").inner_text()
    shows_failure(page, "diffuse attention")
    uniform = float(fact(page, "largest-error-seen"))
    slide(page, "beta", "End")
    assert "one-hot" in page.locator("#beta-value").inner_text()
    one_hot = float(fact(page, "largest-error-seen"))
    page.get_by_test_id("beta-best").click()
    rested(page)
    best = float(fact(page, "largest-error-seen"))
    assert best < one_hot < uniform
    position = int(page.get_by_test_id("beta-best").get_attribute("data-position") or "-1")
    assert int(page.get_by_test_id("beta").input_value()) == position


def test_more_keys_have_a_smaller_error(page: Page) -> None:
    preset(page, "sin")
    slide(page, "beta", "End")
    errors = []
    for keys in (8, 16, 32, 64):
        page.get_by_test_id("keys").fill(str(keys))
        rested(page)
        assert fact(page, "keys") == str(keys)
        errors.append(float(fact(page, "largest-error-seen")))
    assert all(1.5 < before / after < 2.5 for before, after in itertools.pairwise(errors))  # 1/keys


def test_heads_sentinels_and_arithmetic(page: Page) -> None:
    preset(page, "sin")
    picture = page.get_by_test_id("plot-function")
    one_head = picture.inner_html(), fact(page, "largest-error-seen")
    assert page.get_by_test_id("sentinels").is_disabled()
    slide(page, "heads", "ArrowRight", "ArrowRight")
    assert fact(page, "keys") == str(9 + 3 * 2)  # one sentinel on each side of three heads
    slide(page, "sentinels", "Home")
    assert picture.inner_html() != one_head[0]
    assert float(fact(page, "largest-error-seen")) > float(one_head[1])  # heads without sentinels disturb each other
    slide(page, "sentinels", "End")
    assert fact(page, "keys") == str(9 + 3 * 2 * 4)
    assert fact(page, "largest-error-seen") == one_head[1]  # with sentinels, the heads add up to the same network
    slide(page, "heads", "End")
    assert fact(page, "keys") == str(9 + 8 * 2 * 4)
    assert fact(page, "largest-error-seen") == one_head[1]
    page.get_by_test_id("arithmetic").select_option("plain32")
    slide(page, "beta", *["End", *["ArrowLeft"] * 3])
    shows_failure(page, "underflow|overflow")
    assert page.get_by_test_id("fps").get_attribute("data-frames") != "0"


def test_a_point_of_the_plane_shows_its_attention(page: Page) -> None:
    from playwright.sync_api import expect

    preset(page, "bump")
    readout = page.locator("#readout")
    before = readout.inner_text()
    picture = page.get_by_test_id("plot-network").locator(".frame")
    picture.locator("svg circle").first.wait_for()  # it has its size, and is drawn
    box = picture.bounding_box()
    assert box
    picture.hover(position={"x": 0.7 * box["width"], "y": 0.3 * box["height"]})
    expect(readout).not_to_have_text(before)
    expect(readout).to_contain_text("wins with weight")
    assert page.get_by_test_id("plot-keys").is_visible()
    page.get_by_test_id("view-compiled").check()  # its heads are shown beside one another
    assert len(re.findall(r"head \d+: key \d+ wins with weight", readout.inner_text())) >= 2
    assert "in its head" in page.get_by_test_id("plot-keys").inner_text()


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [("sin(x", 3, "("), ("2*x + y^2", 7, "**"), ("foo(x)", 0, "foo"), ("x + $", 4, "$")],
)
def test_a_wrong_expression_is_marked_where_it_is_wrong(
    visit: Callable[..., Visit], playground: str, text: str, position: int, words: str
) -> None:
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    one.page.get_by_test_id("expression").fill(text)
    assert settled(one.page) == "error"
    error = one.page.get_by_test_id("error")
    assert words in error.inner_text()
    assert error.get_attribute("data-position") == str(position)
    assert error.get_attribute("role") == "alert"
    assert one.page.get_by_test_id("expression").get_attribute("aria-invalid") == "true"
    one.page.get_by_test_id("expression").fill("cos(x)")
    assert settled(one.page) == "ready"
    assert not error.inner_text()
    assert one.page.get_by_test_id("expression").get_attribute("aria-invalid") is None


@pytest.mark.parametrize("text", ["x", "x, y", "constructor", "2*x + toString", "x**2, sin(x)"])
def test_unusual_functions_are_drawn(visit: Callable[..., Visit], playground: str, text: str) -> None:
    """Networks without a key, names that JavaScript gives a meaning, and several outputs."""
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    for view in ("compiled", "byhand"):
        one.page.get_by_test_id(f"view-{view}").check()
        one.page.evaluate("document.documentElement.dataset.state = 'waits'")
        one.page.get_by_test_id("expression").fill(f"{text} ")
        one.page.get_by_test_id("expression").fill(text)
        assert settled(one.page) == "ready", one.page.get_by_test_id("error").inner_text()
        reading = one.page.locator("#readout").inner_text()
        assert ("the first of 2 outputs" in reading) == ("," in text)
        assert ("no keys" in reading) == (view == "compiled" and "**" not in text)


def test_an_exact_network_has_no_error(visit: Callable[..., Visit], playground: str) -> None:
    """Its bound is 0, so the page must compute at the very points at which the server took the function."""
    one = visit()
    one.open(f"{playground}/#f=2*x&view=compiled")
    assert settled(one.page) == "ready"
    assert (fact(one.page, "proven-bound"), fact(one.page, "largest-error-seen")) == ("0", "0")


def test_the_link_to_the_pictures_keeps_the_state(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/#f=cos(x)")
    assert settled(one.page) == "ready"
    one.page.keyboard.press("Tab")
    one.page.keyboard.press("Enter")
    one.page.keyboard.press("Tab")
    assert one.page.evaluate("document.activeElement.closest('figure').id") == "plot-function"
    assert one.page.get_by_test_id("expression").input_value() == "cos(x)"


def test_a_jump_can_be_measured_in_the_mean(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/#f=floor(x)&eps=0.1")
    assert settled(one.page) == "error"
    one.page.get_by_test_id("use-norm").click()
    one.page.get_by_test_id("status").filter(has_text="in the L2 norm").wait_for()
    assert settled(one.page) == "ready"


@pytest.mark.parametrize(
    "link",
    [
        "tab=zzz&view=hand&beta=NaN&keys=1e9&toString=1&constructor=2",
        "f=sin(y)&box=x:-1:1",
        "f=x*y&at=1e300,1",
        "tab=incontext&model=kernel&points=0.5,0.5;0.5,0.5",
    ],
)
def test_a_broken_link_still_opens(visit: Callable[..., Visit], playground: str, link: str) -> None:
    one = visit()
    one.open(f"{playground}/#{link}")
    assert settled(one.page) == "ready"


def test_a_phone_shows_the_picture_below_the_function(visit: Callable[..., Visit], playground: str) -> None:
    one = visit(400)
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"

    rested(one.page)

    def top(place: str) -> float:
        box = one.page.locator(place).bounding_box()
        assert box
        return box["y"]

    order = [".function", "#plot-function", "#readout", ".tour", "#beta", ".settings", "#plot-error", "#constructions"]
    assert sorted(order, key=top) == order
    assert top("#plot-function") < 600  # of a screen of 900
    assert top("#beta") - top("#plot-function") < 860  # the picture, the text on keys and the temperature fit a screen


def test_the_point_under_the_pointer_stays_in_view(page: Page) -> None:
    preset(page, "sin")
    page.get_by_test_id("plot-attention").hover()
    start = page.evaluate("scrollY")
    page.mouse.wheel(0, 300)
    page.wait_for_function(
        """(start) => {
          const { top } = document.getElementById('readout').getBoundingClientRect();
          return scrollY >= start + 100 && top >= 0 && top < 400;
        }""",
        arg=start,
    )
    page.evaluate("scrollTo(0, 0)")


def test_the_cost_curve_says_that_it_is_planned(page: Page) -> None:
    preset(page, "runge")
    note = page.locator("#cost-curve-note")
    assert "planned" in note.inner_text() or page.locator("#cost-curve[data-complete]").count()
    planned(page)
    assert "1/ε keys" in note.inner_text()


def test_text_of_the_reader_is_never_run(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/#f=" + "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&box=x%3A-1%3A1")
    assert settled(one.page) == "error"
    assert one.page.locator("#panel-function img").count() == 0


def test_a_permalink_holds_the_whole_state(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    preset(one.page, "product")
    one.page.get_by_test_id("expression").fill("sin(2*x)*y + 0.25")
    assert settled(one.page) == "ready"
    one.page.get_by_test_id("box-x-lo").fill("-2")
    one.page.get_by_test_id("eps").fill("1e-4")
    assert settled(one.page) == "ready"
    one.page.get_by_test_id("view-byhand").check()
    one.page.get_by_test_id("keys").fill("11")
    slide(one.page, "beta", "Home", "PageUp", "PageUp")
    one.page.get_by_test_id("permalink").click()
    two = visit()
    two.open(one.page.evaluate("location.href"))
    assert settled(two.page) == "ready"
    rested(two.page)
    for name in ("expression", "box-x-lo", "box-x-hi", "box-y-lo", "eps", "keys", "beta"):
        assert two.page.get_by_test_id(name).input_value() == one.page.get_by_test_id(name).input_value(), name
    assert fact(two.page, "largest-error-seen") == fact(one.page, "largest-error-seen")
    assert two.page.get_by_test_id("view-byhand").is_checked()


def test_constructions_side_by_side(page: Page) -> None:
    preset(page, "sin")
    planned(page)
    rows = page.locator("#constructions tbody tr")
    names = [rows.nth(i).get_attribute("data-name") for i in range(rows.count())]
    assert {"max_affine", "compose"} <= {*names}
    cells = {name: page.locator(f"#constructions tr[data-name={name}] td") for name in ("max_affine", "compose")}
    keys = {name: int(re.sub(r"\D", "", found.nth(2).inner_text())) for name, found in cells.items()}
    assert keys["max_affine"] > 100 * keys["compose"] > 0


def test_a_failed_plan_leaves_no_table_of_another_function(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    planned(one.page)
    table = one.page.locator("#constructions tbody")
    assert "compose" in table.inner_text()
    answer = {"error": {"type": "TimeLimit", "message": "the job took longer than 20 s"}}
    refuse = {"status": 200, "headers": {"Attnc-Status": "504"}, "json": answer}
    one.page.route("**/api/plan", lambda route: route.fulfill(**refuse))
    one.page.get_by_test_id("expression").fill("cos(3*x)")
    table.filter(has_text="There is no plan: the job took longer than 20 s").wait_for()
    assert "compose" not in table.inner_text()


def test_downloads(page: Page, tmp_path: Path) -> None:
    preset(page, "sin", "compiled")
    with page.expect_download() as waiting:
        page.get_by_test_id("download-network").click()
    with zipfile.ZipFile(io.BytesIO(Path(waiting.value.path()).read_bytes())) as archive:
        archive.extractall(tmp_path)
    (config,) = tmp_path.rglob("config.json")
    net = attnc.load(config.parent)
    assert net.expression == "sin(x)"
    with page.expect_download() as waiting:
        page.get_by_test_id("download-svg").click()
    root = ET.fromstring(Path(waiting.value.path()).read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")


def test_the_playground_opens_its_network_in_the_verify_page(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    with one.context.expect_page() as waiting:
        one.page.get_by_test_id("verify-open").click()
    other = waiting.value
    other.locator("html[data-state=proved]").wait_for(state="attached")
    assert "sin(x)" in other.get_by_test_id("claim").inner_text()


@pytest.mark.parametrize(("field", "text", "words"), [("eps", "", "above 0"), ("expression", "sin(x", "never closed")])
def test_what_cannot_be_compiled_is_not_handed_to_the_verify_page(
    visit: Callable[..., Visit], playground: str, field: str, text: str, words: str
) -> None:
    """The page says why. `visit` fails the test for an error in the console."""
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    one.page.evaluate("document.documentElement.dataset.state = 'waits'")
    one.page.get_by_test_id(field).fill(text)
    assert settled(one.page) == "error"
    one.page.get_by_test_id("verify-open").click()
    one.page.locator("#download-note").filter(has_text=words).wait_for()
    rested(one.page)
    assert len(one.context.pages) == (1 if field == "eps" else 2)


def test_equal_weights_have_no_winner(visit: Callable[..., Visit], playground: str) -> None:
    broken = "arithmetic=plain32&beta=950&keys=40"
    for link, words in (("beta=0", "All keys have the same weight, 0.11"), (broken, "No key wins")):
        one = visit()
        one.open(f"{playground}/#{link}")
        assert settled(one.page) == "ready"
        assert words in one.page.locator("#readout").inner_text()


def test_five_variables_are_refused_by_their_number(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/#f=max(a,b,c,d,g)")
    assert settled(one.page) == "error"
    assert "at most 4 variables, found 5" in one.page.get_by_test_id("error").inner_text()
    assert not one.page.locator("#beta-mark").is_visible()  # there is no best β yet


def test_a_refused_regression_is_asked_for_again(visit: Callable[..., Visit], playground: str) -> None:
    """A slider moves while the server refuses: the last position counts."""
    one = visit()
    one.open(f"{playground}/#tab=incontext&steps=2")
    assert settled(one.page) == "ready"
    refused = []

    def refuse(route: Route) -> None:
        if refused:
            route.continue_()
            return
        refused.append(route.request.url)
        answer = {"error": {"type": "Busy", "message": "the playground is busy."}}
        route.fulfill(headers={"Attnc-Status": "429"}, json=answer)

    one.page.route("**/api/incontext", refuse)
    one.page.get_by_test_id("ic-steps").press("ArrowRight")
    one.page.get_by_test_id("ic-steps").press("ArrowLeft")
    one.page.get_by_test_id("ic-steps").press("ArrowLeft")
    one.page.get_by_test_id("ic-status").filter(has_text=", 1 step.").wait_for()
    assert refused


def test_regression_in_context(page: Page) -> None:
    page.get_by_test_id("tab-incontext").click()
    assert settled(page) == "ready"

    def loss() -> float:
        rested(page)
        assert settled(page) == "ready"
        return float(page.locator("#ic-facts [data-fact=loss]").inner_text().replace("−", "-"))

    least = page.locator("#ic-facts [data-fact=least-possible]")
    page.get_by_test_id("ic-steps").fill("1")
    first = loss()
    page.get_by_test_id("ic-steps").fill("60")
    last = loss()
    assert float(least.inner_text().replace("−", "-")) <= last < first  # more layers, a better fit
    moved = loss()
    page.get_by_test_id("ic-point-0").focus()
    for _ in range(10):
        page.keyboard.press("ArrowUp")
    assert loss() != moved
    handle = page.get_by_test_id("ic-point-3").bounding_box()
    assert handle
    before = loss()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(handle["x"] + 5, handle["y"] - 60, steps=5)
    page.mouse.up()
    assert loss() != before
    for model, sliders in (("ridge", ("ic-alpha", "ic-heads", "ic-degree")), ("kernel", ("ic-alpha", "ic-gamma"))):
        page.get_by_test_id("ic-model").select_option(model)
        seen = {loss()}
        for name in sliders:
            slide(page, name, "ArrowLeft", "ArrowLeft") if name == "ic-heads" else slide(page, name, "ArrowRight")
            seen.add(loss())
            assert page.get_by_test_id(name).is_visible()
        assert len(seen) >= 2
    page.get_by_test_id("tab-function").click()
    assert settled(page) == "ready"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_contrast_names_and_width(visit: Callable[..., Visit], playground: str, width: int, scheme: str) -> None:
    one = visit(width, scheme)
    one.open(f"{playground}/")
    found = []
    for name in ("sin", "product"):
        preset(one.page, name)
        rested(one.page)
        found += [f"{name}: {text}" for text in one.audit()]
    one.page.get_by_test_id("tab-incontext").click()
    assert settled(one.page) == "ready"
    found += [f"in context: {text}" for text in one.audit()]
    assert found == []


def test_the_keyboard_reaches_everything(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    planned(one.page)
    rested(one.page)
    wanted = one.page.evaluate(
        "() => [...document.querySelectorAll('button, input, select, summary, a[href]')]"
        ".filter((node) => node.checkVisibility() && !node.disabled && node.tabIndex >= 0 && node.type !== 'radio')"
        ".map((node) => node.id || node.dataset.testid).filter(Boolean)"
    )
    missing = {*wanted} - one.tabbed()
    assert missing == set()
    assert len(wanted) >= 20


def test_the_page_does_not_move_while_it_loads(visit: Callable[..., Visit], playground: str) -> None:
    one = visit()
    one.watch_layout()
    one.open(f"{playground}/")
    assert settled(one.page) == "ready"
    planned(one.page)
    assert one.moved() <= 0.05
