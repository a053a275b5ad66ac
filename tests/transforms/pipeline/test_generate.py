"""What follows from the locks alone is up to date; `nox -s regenerate` compares the locks themselves."""

from __future__ import annotations

import json

from tests.releases import REVIEWED
from transforms.engine.marks import MARK
from transforms.pipeline.generate import FINGERPRINTS, TRANSFORMS_PAGE, fingerprints
from transforms.pipeline.lock import directory, read_lock, reviewed_releases
from transforms.pipeline.transforms_page import transforms_page
from transforms.registry import TRANSFORMS


def test_the_reviewed_releases_are_those_with_a_lock() -> None:
    assert reviewed_releases() == list(REVIEWED)


def test_the_fingerprints_are_the_locks() -> None:
    assert FINGERPRINTS.read_text(encoding="utf-8") == fingerprints()


def test_a_release_can_be_told_by_its_fingerprints() -> None:
    known = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    contents = {release: tuple(sorted(modules.items())) for release, modules in known.items()}
    assert list(contents) == list(REVIEWED)
    assert len(set(contents.values())) == len(REVIEWED)


def test_the_page_of_transforms_is_the_records_and_the_locks() -> None:
    assert TRANSFORMS_PAGE.read_text(encoding="utf-8") == transforms_page()


def test_every_lock_has_its_diff_with_every_marked_rule() -> None:
    for release in REVIEWED:
        lock = read_lock(release)
        assert lock is not None
        diff = (directory(release) / "changes.diff").read_text(encoding="utf-8")
        for module in lock["modules"]:
            assert f"--- a/{module['path']}\n+++ b/{module['path']}\n" in diff
            for rule in module["rules"]:
                lines = [line for line in diff.splitlines() if line.endswith(MARK + rule["id"])]
                assert len(lines) == len(rule.get("lines", []))
                assert all(line.startswith("+") for line in lines)


def test_every_rule_is_inserted_or_left_out_with_a_reason() -> None:
    rules = {rule.id for transform in TRANSFORMS for rule in transform.all_rules}
    for release in REVIEWED:
        lock = read_lock(release)
        assert lock is not None
        inserted = {rule["id"] for module in lock["modules"] for rule in module["rules"]}
        left_out = {entry["rule"] for entry in lock["not_inserted"] if entry["reason"]}
        assert inserted.isdisjoint(left_out)
        assert {r for r in rules - inserted - left_out if not r.endswith(".import")} == set()
