"""The check of the documentation site's links; `nox -s docs` runs it on the whole site."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from website.links import broken_links

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
<h1 id="top">Title</h1><a href="other.html#part%20two">a</a><a href="#top">b</a><a href="sub/">c</a>
<a href="https://example.org/x">d</a><img src="/picture.svg"><a href="mailto:a@b">e</a>
<link rel="canonical" href="https://example.org/">
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<a href="../index.html#top">up</a>', encoding="utf-8")
    (tmp_path / "other.html").write_text('<h2 id="part two">Part</h2>', encoding="utf-8")
    (tmp_path / "picture.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "index.html").write_text(GOOD, encoding="utf-8")
    return tmp_path


def test_good_links_pass(site: Path) -> None:
    assert broken_links(site) == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ('<a href="missing.html">', "there is no such file"),
        ('<a href="../other.html#three">', "there is no such section"),
        ('<a href="../outside.html">', "there is no such file"),
        ('<img src="nothing.png">', "there is no such file"),
        ('<script src="https://example.org/x.js">', "the page needs the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "the page needs the network"),
    ],
)
def test_a_broken_link_is_named_with_its_page(site: Path, link: str, problem: str) -> None:
    (site / "sub" / "page.html").write_text(link, encoding="utf-8")
    (told,) = broken_links(site)
    assert told.startswith("sub/page.html: ")
    assert told.endswith(problem)
