"""Files generated from the locks are up to date; `nox -s regenerate` compares the locks themselves."""

from __future__ import annotations

import json
import re
from itertools import combinations

from tests.releases import ASCEND, REVIEWED
from transforms.engine.marks import MARK
from transforms.pipeline.diff import OPT_IN
from transforms.pipeline.generate import FINGERPRINTS, fingerprints, generated
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import products

EACH = [(product, release) for product in products() for release in product.reviewed()]


def test_the_reviewed_releases_are_those_with_a_lock() -> None:
    assert [product.reviewed() for product in products()] == [list(REVIEWED), list(ASCEND)]


def test_the_fingerprints_are_the_locks() -> None:
    assert FINGERPRINTS.read_text(encoding="utf-8") == fingerprints()


def test_a_release_can_be_told_by_its_fingerprints() -> None:
    known = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    assert list(known) == list(REVIEWED)
    same = [(one, other) for one, other in combinations(known, 2) if known[one] == known[other]]
    assert same == [("0.18.0", "0.18.1")]  # the doctor goes by the metadata between these


def test_the_pages_of_transforms_are_the_records_and_the_locks() -> None:
    for path, text in generated().items():
        assert path.read_text(encoding="utf-8") == text


def test_every_lock_has_its_diff_with_every_marked_rule() -> None:
    for product, release in EACH:
        lock = read_lock(release, product)
        assert lock is not None
        diff = (product.directory(release) / "changes.diff").read_text(encoding="utf-8")
        for module in lock["modules"]:
            header = f"--- a/{module['path']}\n+++ b/{module['path']}\n"
            assert header in diff
            hunks = re.findall(
                r"^(@@ .*)\n((?:[-+](?!-- ).*\n)*)",
                diff.partition(header)[2].partition("\n--- a/")[0] + "\n",
                re.MULTILINE,
            )
            for rule in module["rules"]:
                lines = [line for line in diff.splitlines() if line.endswith(MARK + rule["id"])]
                assert len(lines) == len(rule.get("lines", []))
                assert all(line.startswith("+") for line in lines)
                headings = [heading for heading, hunk in hunks if MARK + rule["id"] + "\n" in hunk]
                said = [f" ({OPT_IN})" in heading or f"{rule['id']} {OPT_IN})" in heading for heading in headings]
                assert said == [rule.get("opt_in", False)] * len(headings)
