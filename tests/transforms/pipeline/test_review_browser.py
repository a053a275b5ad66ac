"""The pages in a real browser: they fit the window, respond to keys, are legible, and use no network."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.browser import CONTRAST, NARROW, VIEWS, WIDE, started_browser
from tests.transforms.pipeline.memory import SMALL, DictTree
from transforms.pipeline.drift.model import measure_tree
from transforms.pipeline.drift.page import write_drift
from transforms.pipeline.review.page import write_review

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from tests.browser import Scheme
    from transforms.pipeline.review.model import Review

#: Elements whose text must have enough contrast.
REVIEW_TEXT = (
    "body", ".tag", ".muted", "nav a", "nav .count", ".box", ".about", ".fold .label", ".note h3", ".rule", "dt", "dd",
    ".note summary", "button", ".r b", "ins", "ins .k", "ins .c", "ins .s", "code .k", "code .s", "code .c", "code .f",
    "code .m", "code .b", "th",
)  # fmt: skip
DRIFT_TEXT = ("body", ".box", "th", "th a", ".applied", ".not-applicable", ".legend li", ".tag", ".muted", "button")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def review_file(review: Review, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_review(review, tmp_path_factory.mktemp("review"))


@pytest.fixture(scope="module")
def drift_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = DictTree().files
    drifts = [measure_tree(DictTree(f"0.{minor}.0", files), SMALL) for minor in range(9, 33)]
    drifts.append(measure_tree(DictTree("0.33.0", {}), SMALL))
    return write_drift(drifts, tmp_path_factory.mktemp("drift"))


@contextmanager
def visit(browser: Browser, file: Path, size: tuple[int, int], scheme: Scheme) -> Iterator[Page]:
    """Open the page in a window; whatever the test does, it must log nothing, use no network and stay in its width."""
    with browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        yield page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert said == []


def position(page: Page) -> str:
    return page.locator("#position").inner_text()


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_review_fits_and_can_be_read(
    browser: Browser, review_file: Path, size: tuple[int, int], scheme: Scheme
) -> None:
    with visit(browser, review_file, size, scheme) as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        contrasts = {text: page.locator(text).first.evaluate(CONTRAST) for text in REVIEW_TEXT}
        assert {text: found for text, found in contrasts.items() if found < 4.5} == {}
        columns = page.locator(".r:not(.both):not(.add) > code").filter(visible=True)
        left, right = (columns.nth(i).bounding_box() for i in range(2))
        assert left
        assert right
        assert (left["y"] == right["y"]) == (size == WIDE), "side by side when wide, one below the other when narrow"


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_keys_and_buttons_go_from_change_to_change(browser: Browser, review_file: Path, size: tuple[int, int]) -> None:
    with visit(browser, review_file, size, "light") as page:
        total = page.locator(".change").count()
        assert position(page) == f"{total} changes"
        tops = []
        for step in range(1, 4):
            page.keyboard.press("n")
            assert position(page) == f"{step} / {total}"
            tops.append(page.evaluate("scrollY"))
            assert page.evaluate("document.activeElement.classList.contains('change')")
            bar = page.evaluate("document.querySelector('.bar').getBoundingClientRect().bottom")
            top = page.evaluate("document.activeElement.getBoundingClientRect().top")
            assert bar - 2 <= top < bar + 60
        assert tops == sorted(set(tops))
        page.keyboard.press("p")
        assert position(page) == f"2 / {total}"
        page.locator("#next").click()
        page.locator("#previous").click()
        assert position(page) == f"2 / {total}"
        for _ in range(total):
            page.keyboard.press("n")
        assert position(page) == f"{total} / {total}"


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_search_filters(browser: Browser, review_file: Path, size: tuple[int, int]) -> None:
    with visit(browser, review_file, size, "dark") as page:
        page.keyboard.press("/")
        page.keyboard.type("worker.init")
        page.wait_for_function("document.querySelectorAll('.module:not([hidden])').length === 1")
        assert page.locator(".change:visible").count() == 1
        assert page.locator(".change:visible .rule").all_inner_texts() == ["worker.init"]
        assert page.locator("#found").inner_text() == "1 in 1 module"
        page.locator("#search").fill("ensure_kv_transfer_initialized(")
        page.wait_for_function("document.querySelector('#found').textContent.includes('module')")
        page.locator("#search").fill("no such text anywhere")
        page.wait_for_function("!document.querySelector('#none').hidden")
        page.keyboard.press("Escape")
        page.wait_for_function("document.querySelectorAll('.module[hidden], .change[hidden]').length === 0")
        assert page.locator("#overview").is_visible()


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_unchanged_lines_unfold(browser: Browser, review_file: Path, size: tuple[int, int]) -> None:
    with visit(browser, review_file, size, "light") as page:
        fold = page.locator("#m-scheduler .fold").first
        folded = int(re.sub(r"\D", "", fold.locator(".label").inner_text()))
        start = int(fold.get_attribute("data-new") or 0)
        fold.locator("[data-take=head]").click()
        shown = page.locator("#m-scheduler > .diff .r")
        assert shown.count() == 20
        assert shown.first.locator("b").nth(1).get_attribute("data-n") == str(start)
        assert fold.locator(".label").inner_text() == f"{folded - 20} unchanged lines"
        fold.locator("[data-take=all]").click()
        assert shown.count() == folded
        page.locator("#m-scheduler .whole").click()
        assert page.locator("#m-scheduler .fold").count() == 0
        numbers = page.locator("#m-scheduler .r > b:nth-of-type(2)").evaluate_all(
            "(cells) => cells.map((cell) => cell.dataset.n).filter(Boolean).map(Number)"
        )
        assert numbers == list(range(1, len(numbers) + 1))


def test_theme_and_records_toggle(browser: Browser, review_file: Path) -> None:
    with visit(browser, review_file, WIDE, "light") as page:
        seen = []
        for _ in range(3):
            page.keyboard.press("t")
            seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert seen == ["rgb(255, 255, 255)", "rgb(20, 23, 28)", "rgb(255, 255, 255)"]
        page.keyboard.press("r")
        assert page.locator(".record:not([open])").count() == 0
        page.keyboard.press("r")
        assert page.locator(".record[open]").count() == 0


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_drift_fits_and_can_be_read(browser: Browser, drift_file: Path, size: tuple[int, int], scheme: Scheme) -> None:
    with visit(browser, drift_file, size, scheme) as page:
        contrasts = {text: page.locator(text).first.evaluate(CONTRAST) for text in DRIFT_TEXT}
        assert {text: found for text, found in contrasts.items() if found < 4.5} == {}


def test_drift_is_walked_by_keys_and_filtered(browser: Browser, drift_file: Path) -> None:
    with visit(browser, drift_file, WIDE, "light") as page:
        page.locator(".matrix td").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert page.locator("#told").inner_text().startswith("worker.import in 0.10.0: applied, line")
        page.locator("#filter").fill("worker")
        assert page.locator(".matrix tbody tr:visible").count() == 2
        page.locator("thead a").last.click()
        assert page.locator("details[open] h3").all_inner_texts() == ["vLLM 0.33.0"]
