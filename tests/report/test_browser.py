"""The page in a real browser: no error, filters and links work, accessible, fits a phone, prints whole.

Debian's chromium is driven by Playwright; axe-core comes with `axe-playwright-python`. Nothing is downloaded.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.evidence.reader import open_bundle
from harness.gate import decide, load_submission
from harness.report import build_view, render_html
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_policy, many_checks, write_example

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
CUT_OFF = (
    "[...document.querySelectorAll('.card p, .card li')].filter((p) => p.scrollWidth > p.clientWidth + 1)"
    ".map((p) => p.textContent)"
)
"""Texts that are wider than their place."""
SCREENSHOTS = os.environ.get("FASTTRACK_SCREENSHOTS")
"""Folder for pictures of the page; none are kept where it is unset."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_example(folder / "bundle")
    verdict = decide([load_submission(folder / "bundle", judge, as_planned)], example_policy())
    path = folder / "report.html"
    path.write_text(render_html(build_view(open_bundle(folder / "bundle"), verdict, path="out/mine")))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Any]:
    """The page at desktop width; whatever the browser complains of fails the test."""
    yield from _open(browser, page_file, viewport=DESKTOP)


def _open(browser: Any, path: Path, **context: Any) -> Iterator[Any]:
    held = browser.new_context(**context)
    page = held.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith("file:") else None)
    page.goto(path.as_uri())
    yield page
    held.close()
    assert complaints == []


def test_the_filter_narrows_checks_and_rows_by_cell_and_status(opened: Any) -> None:
    assert opened.locator("#found").inner_text() == "44 of 44 checks shown"
    opened.fill("#search", "router b64")
    assert opened.locator("#found").inner_text() == "1 of 44 checks shown"
    assert opened.locator("details.check:visible .id").all_inner_texts() == [
        "kernels/router/cpu.tp1.dcp1.b64.c512.d0.bf16.decode"
    ]
    opened.fill("#search", "")
    opened.locator(".chips label", has_text="PASS").click()
    assert opened.locator("details.check[data-status=PASS]:visible").count() == 0
    assert opened.locator("details.check[data-status=FAIL]:visible").count() == 5


def test_a_link_to_a_check_opens_it_wherever_it_is_folded_away(opened: Any) -> None:
    anchor = "check-kernels-router-cpu.tp1.dcp1.b1.c64.d0.bf16.decode"
    assert not opened.locator(f"[id='{anchor}'] .inside").is_visible()
    opened.evaluate(f"location.hash = '#{anchor}'")
    opened.wait_for_function(f"document.getElementById('{anchor}').open")
    inside = opened.locator(f"[id='{anchor}'] .inside")
    assert inside.is_visible()
    assert "fasttrack reproduce out/mine --only kernels/router/cpu.tp1" in inside.inner_text()


def test_the_keyboard_alone_reaches_the_verdict_the_filter_and_a_check(opened: Any) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    opened.keyboard.press("Enter")
    assert opened.evaluate("location.hash") == "#main"
    seen = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        seen.add(opened.evaluate("document.activeElement.tagName"))
        outline = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "the focus must be seen"
        if opened.evaluate("document.activeElement.matches('details.check > summary')"):
            break
    assert {"A", "SUMMARY"} <= seen
    before = opened.evaluate("document.activeElement.parentElement.open")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.parentElement.open") is not before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_no_serious_violation_and_nothing_is_wider_than_the_screen(
    browser: Any, page_file: Path, viewport: dict[str, int], scheme: str
) -> None:
    for page in _open(browser, page_file, viewport=viewport, color_scheme=scheme):
        if SCREENSHOTS:
            page.screenshot(path=f"{SCREENSHOTS}/{viewport['width']}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert page.evaluate(CUT_OFF) == []
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        found = axe.Axe().run(page).response["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in serious] == []
        if SCREENSHOTS:
            page.screenshot(path=f"{SCREENSHOTS}/{viewport['width']}-{scheme}-whole.png", full_page=True)


def test_a_screen_reader_finds_landmarks_headings_and_a_name_for_every_control(opened: Any) -> None:
    tree = opened.locator("body").aria_snapshot()
    for words in (
        'link "Skip to the verdict"', 'navigation "Stages"', 'heading "Evidence" [level=2]',
        'searchbox "Filter checks and rows"', 'region "Verdict"', 'button "Switch between light and dark"',
    ):  # fmt: skip
        assert words in tree, words
    assert "- button\n" not in tree
    assert "- link\n" not in tree


def test_the_button_turns_dark_into_light_and_back(opened: Any) -> None:
    def paper() -> str:
        return str(opened.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = paper()
    opened.click("#theme")
    dark = paper()
    opened.click("#theme")
    assert light != dark
    assert paper() == light


def test_print_shows_every_check_and_no_control(opened: Any, tmp_path: Path) -> None:
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.emulate_media(media="print")
    assert opened.locator("details.check .inside:visible").count() == 44
    assert not opened.locator(".rail").is_visible()
    pdf = opened.pdf(path=str(tmp_path / "report.pdf"))
    assert pdf.startswith(b"%PDF")


def test_a_page_of_a_thousand_checks_is_small_and_ready_in_under_a_second(
    browser: Any, tmp_path: Path
) -> None:
    path = tmp_path / "large.html"
    path.write_text(render_html(build_view(many_checks(24))))
    assert path.stat().st_size < 3_000_000
    held = browser.new_context(viewport=DESKTOP)
    page = held.new_page()
    meter = held.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})  # others may share the cores
    page.goto(path.as_uri())
    assert page.locator("#found").inner_text() == "1032 of 1032 checks shown"
    spent = {m["name"]: m["value"] for m in meter.send("Performance.getMetrics")["metrics"]}
    held.close()
    assert 0 < spent["TaskDuration"] < 1.0
