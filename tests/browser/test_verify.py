"""The verify page: the checker, in WebAssembly, proves what the command line proves, and refuses what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attnc_checker
from attnc_checker.files import parse_safetensors
from attnc_playground import verify_page
from browser.conftest import LONGEST, Visit, reached

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ENDED = ("proved", "refused", "undecided", "broken", "missing", "stopped")
HONEST = (
    "leaves",
    "stages",
    "square",
    "cube",
    "tails",
    "table",
    "norm",
    "second-dtype",
    "chain",
    "definitions",
    "gradient",
)


def ended(page: Page) -> str:
    """Wait until the check has come to an end, and return which one."""
    return reached(page, *ENDED)


def checked(page: Page, source: Path) -> str:
    """Choose the files of a network, have it checked, and return how that ended."""
    page.evaluate("document.documentElement.dataset.state = 'idle'")
    page.get_by_test_id("files").set_input_files([*source.iterdir()] if source.is_dir() else source)
    return ended(page)


@pytest.fixture(scope="module")
def page(browser: Browser, site: str) -> Iterator[Page]:
    """A page whose checker is warm. It is used by many tests, as by a reader who tries several networks."""
    visit = Visit(browser.new_context())
    visit.open(f"{site}/verify/")
    yield visit.page
    assert (visit.errors, visit.elsewhere) == ([], [])
    visit.context.close()


@pytest.mark.parametrize("name", HONEST)
def test_it_proves_what_the_command_line_proves(page: Page, networks: Path, name: str) -> None:
    assert checked(page, networks / name) == "proved"
    verdicts = page.locator(".verdict.proved")
    there = [
        attnc_checker.check(networks / name, 1, None, part) for part in attnc_checker.certificates(networks / name)
    ]
    assert verdicts.count() == len(there)
    for i, verdict in enumerate(there):
        found = float(verdicts.nth(i).get_attribute("data-reproved") or "nan")
        assert found == pytest.approx(verdict.reproved, rel=1e-12)  # Arb's last bits depend on the machine
        assert str(verdict.scope) in verdicts.nth(i).inner_text()
        assert ("every partial derivative" in verdicts.nth(i).inner_text()) == (verdict.gradient_bound is not None)
    for text in there[0].assumptions:
        assert text in page.get_by_test_id("assumed").inner_text()
    leaves = there[-1].leaves
    assert f"{leaves:,} of {leaves:,} lea" in page.get_by_test_id("count").inner_text()


def half_the_bound(folder: Path) -> None:
    edit(folder, lambda claim: claim | {"bound": claim["bound"] / 2, "observed": 0.0})


def another_weight(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


def a_hidden_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    assert parse_safetensors(bytes(raw))
    raw[-1] ^= 0x80  # the sign of the last number
    path.write_bytes(raw)
    edit(folder, lambda claim: claim | {"weights_sha256": hashlib.sha256(raw).hexdigest()})


def a_missing_leaf(folder: Path) -> None:
    edit(folder, lambda claim: claim | {"leaves": claim["leaves"][1:]})


def another_function(folder: Path) -> None:
    edit(folder, lambda claim: claim | {"expression": "cos(x)"})


def a_cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def no_json(folder: Path) -> None:
    (folder / "certificate.json").write_text('{"format": "attnc.certificate/1", "format": 1}', encoding="utf-8")


def no_certificate(folder: Path) -> None:
    (folder / "certificate.json").unlink()


def edit(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "certificate.json"
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")


TAMPERED = (
    half_the_bound,
    another_weight,
    a_hidden_weight,
    a_missing_leaf,
    another_function,
    a_cut_file,
    no_json,
    no_certificate,
)


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_it_refuses_what_the_command_line_refuses(
    page: Page, networks: Path, tmp_path: Path, tamper: Callable[[Path], None]
) -> None:
    """With the same reason, word for word, except for the folder."""
    folder = tmp_path / "net"
    shutil.copytree(networks / "leaves", folder)
    tamper(folder)
    there = attnc_checker.check(folder, 1)
    assert not there.proved
    assert checked(page, folder) == "refused"
    reason = page.locator(".verdict.refused").get_attribute("data-reason") or ""
    assert reason.replace("/networks/network", "NET") == there.reason.replace(str(folder), "NET")
    assert page.locator(".verdict.proved").count() == 0


def test_a_refused_leaf_is_marked_on_the_picture(page: Page, networks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "net"
    shutil.copytree(networks / "square", folder)
    half_the_bound(folder)
    assert checked(page, folder) == "refused"
    page.locator("canvas[aria-label*='1 refused']").wait_for()
    assert "Refused" in page.get_by_test_id("leaf").inner_text()


@pytest.mark.parametrize("how", ["bound", "weight", "both"])
def test_the_reader_tries_to_fool_it(page: Page, networks: Path, how: str) -> None:
    assert checked(page, networks / "leaves") == "proved"
    if not page.get_by_test_id(f"tamper-{how}").is_visible():
        page.get_by_text("Try to fool it").click()
    page.get_by_test_id(f"tamper-{how}").click()
    assert ended(page) == "refused"
    assert page.get_by_test_id("tampered").inner_text()
    page.get_by_test_id("check").click()  # the network itself was not changed
    assert ended(page) == "proved"


def test_zip_files_and_folders(page: Page, networks: Path, tmp_path: Path) -> None:
    archive = tmp_path / "wave.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in (networks / "leaves").iterdir():
            zipped.write(path, f"deep/in/{path.name}")
    assert checked(page, archive) == "proved"
    assert "wave" in page.get_by_test_id("chosen").inner_text()
    page.evaluate("document.documentElement.dataset.state = 'idle'")
    page.get_by_test_id("folder").set_input_files(networks / "leaves")
    assert ended(page) == "proved"
    assert "leaves" in page.get_by_test_id("chosen").inner_text()


def test_a_folder_is_dropped(page: Page, networks: Path) -> None:
    page.evaluate("document.documentElement.dataset.state = 'idle'")
    page.get_by_test_id("drop").scroll_into_view_if_needed()
    box = page.get_by_test_id("drop").bounding_box()
    assert box
    given = {"items": [], "files": [str(networks / "stages")], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        place = {"x": box["x"] + 20, "y": box["y"] + 20}
        session.send("Input.dispatchDragEvent", {"type": kind, **place, "data": given})
    assert ended(page) == "proved"
    assert "stages" in page.get_by_test_id("chosen").inner_text()
    assert page.locator("tr[data-stage].proved").count() == page.locator("tr[data-stage]").count() >= 2


def test_files_that_are_no_network(page: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    assert checked(page, tmp_path / "notes.txt") == "broken"
    assert "there is no config.json among these 1 files" in page.get_by_test_id("status").inner_text()
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04 but not really")
    assert checked(page, tmp_path / "bad.zip") == "broken"
    assert "the zip file cannot be read" in page.get_by_test_id("status").inner_text()


def test_a_check_is_stopped_and_started_again(page: Page, networks: Path) -> None:
    page.evaluate("document.documentElement.dataset.state = 'idle'")
    page.get_by_test_id("files").set_input_files([*(networks / "slow").iterdir()])
    page.locator("html[data-state=checking]").wait_for(state="attached")
    page.get_by_test_id("stop").click()
    assert ended(page) == "stopped"
    assert "you stopped the check" in page.get_by_test_id("verdicts").inner_text()
    assert checked(page, networks / "leaves") == "proved"


def test_a_check_ends_at_its_time_limit(page: Page, networks: Path) -> None:
    page.get_by_test_id("seconds").fill("1")
    try:
        assert checked(page, networks / "slow") == "undecided"
        assert "Not decided" in page.get_by_test_id("verdicts").inner_text()
        assert page.locator(".verdict.proved").count() == 0
    finally:
        page.get_by_test_id("seconds").fill(LONGEST)


def test_what_runs_is_the_checker_itself(page: Page, networks: Path, site: str) -> None:
    """The archive has the files of the package, byte for byte, and the page states its hash."""
    raw = page.request.get(f"{site}/verify/checker.zip").body()
    assert raw == verify_page.checker_archive()
    source = Path(attnc_checker.__file__).parent
    with zipfile.ZipFile(tmp := Path(networks, "checker.zip"), "w"):
        pass
    tmp.write_bytes(raw)
    with zipfile.ZipFile(tmp) as archive:
        stored = {name: archive.read(name) for name in archive.namelist()}
    tmp.unlink()
    assert stored == {f"attnc_checker/{path.relative_to(source)}": path.read_bytes() for path in source.rglob("*.py")}
    assert checked(page, networks / "leaves") == "proved"
    assert hashlib.sha256(raw).hexdigest() in page.get_by_test_id("versions").inner_text()


def test_the_gallery_and_its_permalink(visit: Callable[..., Visit], site: str) -> None:
    one = visit()
    one.open(f"{site}/verify/")
    one.page.get_by_test_id("gallery").select_option("the network square")
    assert ended(one.page) == "proved"
    link = one.page.evaluate("location.href")
    assert "net=" in link
    two = visit()
    two.open(link)
    assert ended(two.page) == "proved"
    assert "square" in two.page.get_by_test_id("chosen").inner_text()


def test_networks_of_other_sites_are_not_fetched(visit: Callable[..., Visit], site: str) -> None:
    one = visit()
    one.open(f"{site}/verify/#net=https%3A%2F%2Fexample.org%2Fnet%2F")
    assert ended(one.page) == "broken"
    assert "another site" in one.page.get_by_test_id("chosen").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_contrast_names_and_width(visit: Callable[..., Visit], site: str, width: int, scheme: str) -> None:
    one = visit(width, scheme)
    one.open(f"{site}/verify/#net=../gallery/stages/")
    assert ended(one.page) == "proved"
    one.page.get_by_text("Try to fool it").click()
    assert one.audit() == []


def test_the_keyboard_alone(visit: Callable[..., Visit], site: str) -> None:
    one = visit()
    one.open(f"{site}/verify/")
    one.page.locator("#gallery:enabled").focus()  # the list takes no key until its networks have been fetched
    one.page.keyboard.press("ArrowDown")  # chooses the next network. Enter would open a list outside of the page
    assert ended(one.page) == "proved"
    assert {"home", "files", "folder", "gallery", "check", "seconds"} <= one.tabbed()
    one.page.locator("canvas").press("ArrowRight")
    one.page.get_by_test_id("leaf").filter(has_text="Leaf 1 of").wait_for()
    one.page.locator("canvas").press("End")
    one.page.get_by_test_id("leaf").filter(has_not_text="Leaf 1 of").filter(has_text="x ∈ [").wait_for()


def test_the_page_does_not_move_while_it_loads(visit: Callable[..., Visit], site: str) -> None:
    one = visit()
    one.watch_layout()
    one.open(f"{site}/verify/")
    one.page.locator("#gallery:enabled").wait_for()
    assert one.moved() <= 0.02


def test_without_its_payload_the_page_says_so(visit: Callable[..., Visit], site: str, networks: Path) -> None:
    one = visit()
    one.page.route("**/payload/**", lambda route: route.fulfill(status=404, body=""))
    one.open(f"{site}/verify/")
    assert checked(one.page, networks / "leaves") == "missing"
    assert "make verify-page" in one.page.get_by_test_id("verdicts").inner_text()


def test_the_playground_serves_the_same_page(visit: Callable[..., Visit], playground: str, networks: Path) -> None:
    one = visit()
    one.open(f"{playground}/verify/")
    assert checked(one.page, networks / "leaves") == "proved"
