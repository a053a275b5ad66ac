"""Sessions, files and switches that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.releases import ASCEND, REVIEWED
from transforms.pipeline.package import group_needs

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
#: The README is an overview; it links to the pages with the details.
README_LINES = 150


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


def test_the_readme_counts_the_releases() -> None:
    assert f"{len(REVIEWED)} releases ({REVIEWED[0]} to {REVIEWED[-1]})" in " ".join(text("README.md").split())


def test_the_reviewed_releases_are_those_with_a_lock() -> None:
    kept = {path.parent.name for path in (ROOT / "overlays").glob("*/lock.json")}
    assert kept == {*(f"vllm-{release}" for release in REVIEWED), *(f"vllm-ascend-{release}" for release in ASCEND)}
