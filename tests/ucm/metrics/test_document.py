"""docs/metrics.md tells of every metric, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from ucm.integration.vllm.metric_names import METRICS
from ucm.store import errors

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of a table's rows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


def test_every_metric_has_its_row() -> None:
    expected = [
        [f"`{m.name}`", m.kind.value, ", ".join(f"`{label}`" for label in m.labels) or "none", m.unit, m.documentation]
        for m in METRICS.values()
    ]
    assert rows("| metric | kind |") == expected


def test_no_other_is_named() -> None:
    suffixes = "|_bucket|_sum|_count"
    for name in re.findall(r"ucm:\w+", DOCUMENT.read_text(encoding="utf-8")):
        assert re.sub(rf"({suffixes})$", "", name) in METRICS or name in METRICS


def test_every_cause_is_explained() -> None:
    causes = {error.cause for error in vars(errors).values() if hasattr(error, "cause")}
    assert {row[0].strip("`") for row in rows("| cause |")} == causes
    known = METRICS["ucm:failures_total"].known
    assert {cause for _, cause in known} == causes


def test_the_dashboard_is_where_it_says() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", DOCUMENT.read_text(encoding="utf-8")):
        assert (DOCUMENT.parent / target).exists(), target
