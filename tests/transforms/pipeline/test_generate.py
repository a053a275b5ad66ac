"""What follows from the locks; `nox -s tests` regenerates all files and compares them, so these tests do not."""

from __future__ import annotations

import json
import re
from itertools import combinations

from tests.releases import REVIEWED
from transforms.engine.marks import MARK
from transforms.pipeline.diff import OPT_IN
from transforms.pipeline.generate import FINGERPRINTS, RELEASES, counted, marked
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import products

EACH = [(product, release) for product in products() for release in product.reviewed()]


def test_a_release_can_be_told_by_its_fingerprints() -> None:
    known = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    assert list(known) == list(REVIEWED)
    same = [(one, other) for one, other in combinations(known, 2) if known[one] == known[other]]
    assert same == [("0.18.0", "0.18.1")]  # the doctor goes by the metadata between these


def test_the_readme_counts_the_overlays() -> None:
    text = "holds the result for each of 3 releases (0.1.0 to 0.2.0) of vLLM, and builds all 3 overlays again"
    found = f"each of {len(REVIEWED)} releases ({REVIEWED[0]} to {REVIEWED[-1]}) of vLLM"
    assert counted(text) == f"holds the result for {found}, and builds all {len(REVIEWED)} overlays again"


def test_the_table_of_published_releases_marks_those_with_a_lock() -> None:
    text = "## vLLM\n\n| 0.32.0 | 61 | 0 | 0 | ready to adopt |\n| 0.1.0 | 3 | 9 | 0 | decisions are missing |\n"
    assert marked(text) == text.replace("ready to adopt", "reviewed")
    assert marked("## vLLM Ascend\n| 0.32.0 | 0.32.0 | 1 | 0 | 0 | 0 | ready to adopt |\n").endswith(
        "ready to adopt |\n"
    )
    assert RELEASES.read_text(encoding="utf-8").count("| reviewed |") == sum(len(one.reviewed()) for one in products())


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
