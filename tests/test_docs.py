"""Sessions, files and switches that the documents name exist, and the documents stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transforms.pipeline.package import group_needs

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
#: The README is an overview; it links to the pages with the details.
README_LINES = 150
#: A page answers one question; what is more goes to pages of its own.
PAGE_WORDS = 1800
#: Lists that `nox -s regenerate` and `nox -s adopt -- published` write, for look-ups. They are as long as they are.
GENERATED = {"transforms.md", "transforms_ascend.md", "ascend_rebindings.md", "releases.md"}
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/tutorial.md", "docs/overlays.md"])
def test_every_session_that_is_named_exists(document: str) -> None:
    noxfile = text("noxfile.py")
    sessions = set(re.findall(r'@nox\.session\(name="([\w-]+)"\)', noxfile))
    sessions |= set(re.findall(r"@nox\.session\ndef (\w+)", noxfile))
    named = set(re.findall(r"nox -s ([\w-]+)", text(document)))
    assert named
    assert named <= sessions


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_linked_file_exists(document: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", text(document)):
        assert (ROOT / target).exists(), target


def test_every_switch_is_documented() -> None:
    page = text("docs/shadowing.md")
    for group in group_needs():
        assert f"`UCM_DISABLE_{group.upper()}_PATCH=1`" in page


def test_the_readme_stays_a_front_door() -> None:
    assert len(text("README.md").splitlines()) < README_LINES


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", *(f"docs/{name}" for name in PAGES if name not in GENERATED)])
def test_a_page_has_a_readers_patience(document: str) -> None:
    assert len(text(document).split()) <= PAGE_WORDS


def test_only_generated_lists_are_exempt() -> None:
    generated = {name for name in PAGES if "This page is generated from" in text(f"docs/{name}")}
    assert generated == GENERATED


def test_the_reading_order_has_every_page_once_and_no_generated_list() -> None:
    nav, _, left_out = text("mkdocs.yml").partition("\nnav:")[2].partition("\nnot_in_nav: |")
    made_by_the_site = {"settings.md", "commands.md"}
    assert sorted(re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE)) == sorted({*PAGES, *made_by_the_site} - GENERATED)
    assert {name.lstrip("/") for name in left_out.split()} == GENERATED


def test_nobody_is_told_to_install_our_distributions_by_name() -> None:
    """No package index has them: whoever registered a name there would run code in our users' engines."""
    for document in (*DOCUMENTS, *(f"docs/{name}" for name in PAGES)):
        for command in re.findall(r"pip install ([^`\n]*)", text(document)):
            assert [word for word in re.findall(r"[^\s'\"]+", command) if word.startswith("ucm-")] == [], document
