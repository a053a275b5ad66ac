"""The built documentation site in a real browser; `nox -s docs` runs it.

Every page fits narrow and wide windows, is legible in both colour schemes, shows its pictures, logs nothing and
fetches nothing from elsewhere; the search finds a page.
"""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import CONTRAST, NARROW, WIDE, started_browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from tests.browser import Scheme

SITE = Path(__file__).parents[1] / "build" / "docs"
PAGES = sorted(path.name for path in SITE.glob("*.html") if path.name != "404.html")
#: Elements whose text must have enough contrast; the second page has code, the third highlighted Python.
TEXT = {
    "index.html": ("h1", ".md-content p", ".md-content td a", ".md-content th", ".md-copyright", ".md-header__topic"),
    "prefix_cache.html": (".md-content code", ".md-content pre code", ".md-content h2"),
    "write_store.html": (".md-content pre .k", ".md-content pre .n", ".md-content pre .s2", ".md-content li"),
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line on stderr for each."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site: browsers do not let pages from the file system search."""
    assert len(PAGES) > 20, f"{SITE} is not built"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.mark.parametrize(("size", "scheme"), [(NARROW, "light"), (WIDE, "dark")])
def test_every_page(browser: Browser, address: str, size: tuple[int, int], scheme: Scheme) -> None:
    problems: dict[str, list[str]] = {}
    with browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme) as context:
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(address) else said.append(request.url))
        page.on("response", lambda response: said.append(response.url) if response.status >= 400 else None)
        for name in PAGES:
            page.goto(address + name)
            width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            said += [f"{width} pixels too wide"] if width > 0 else []
            said += page.evaluate(
                "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
            )
            for selector in TEXT.get(name, ()):
                contrast = page.locator(selector).filter(visible=True).first.evaluate(CONTRAST)
                said += [f"{selector}: contrast {contrast:.2f}"] if contrast < 4.5 else []
            assert page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
            if said:
                problems[name] = [*said]
                said.clear()
    assert problems == {}


def test_the_search_finds_a_page(browser: Browser, address: str) -> None:
    with browser.new_context(viewport={"width": WIDE[0], "height": WIDE[1]}) as context:
        page = context.new_page()
        page.goto(address + "index.html")
        # What is typed before the search has loaded its index is not searched for.
        page.locator(".md-search-result__meta", has_text="Type to start searching").first.wait_for(state="attached")
        # It listens to keys: a text that is set at once is searched for only if that happens in time.
        page.locator(".md-search__input").first.press_sequentially("troubleshoot")
        page.locator(".md-search-result__link").first.click()
        page.wait_for_url("**/troubleshooting.html**")
