"""Check that every link of the built site has a target, and no page fetches anything from another site."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

#: Attributes whose target a browser fetches.
FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
#: The relations of links that a browser never fetches by itself.
PASSIVE = {"canonical", "prev", "next", "edit"}


class Page(HTMLParser):
    """The ids and links of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, bool]] = []  #: the target, and whether it is fetched
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id and target."""
        of = dict(attrs)
        self.ids |= {of.get("id") or "", (of.get("name") or "") if tag == "a" else ""} - {""}
        for name in ("href", "src"):
            target = of.get(name)
            if target:
                self.links.append((target, (tag, name) in FETCHED and of.get("rel") not in PASSIVE))


def broken_links(site: Path) -> list[str]:
    """Return the problems with the links of a built site, one line each.

    Args:
        site: The output directory of the build.
    """
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link, fetched in page.links:
            problem = _problem(site, path, pages, link, fetched=fetched)
            if problem:
                found.append(f"{path.relative_to(site)}: {link}: {problem}")
    return found


def _problem(site: Path, path: Path, pages: dict[Path, Page], link: str, *, fetched: bool) -> str:
    parts = urlsplit(link)
    if parts.scheme in {"data", "mailto", "javascript"}:
        return ""
    if parts.scheme or parts.netloc:
        return "the page needs the network" if fetched else ""
    base = site if parts.path.startswith("/") else path.parent
    target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site.resolve()) or not target.is_file():
        return "there is no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "there is no such section"
    return ""
