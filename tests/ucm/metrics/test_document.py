"""docs/metrics.md lists exactly the existing metrics, and docs/monitoring.md names no others."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from ucm.integration.vllm.metrics import METRICS
from ucm.store import base

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
BOTH = "\n".join(path.read_text(encoding="utf-8") for path in (DOCUMENT, DOCUMENT.with_name("monitoring.md")))


def rows(heading: str) -> list[list[str]]:
    """The cells of a table's rows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


def test_every_metric_has_its_row() -> None:
    expected = [
        [f"`{m.name}`", m.kind.value, ", ".join(f"`{label}`" for label in m.labels) or "none", unit, m.documentation]
        for m in METRICS.values()
        for unit in [m.unit or re.split("[_:]", m.name.removesuffix("_total"))[-1]]
    ]
    assert rows("| metric | kind |") == expected


def test_no_other_is_named() -> None:
    suffixes = "|_bucket|_sum|_count"
    for name in re.findall(r"ucm:\w+", BOTH):
        assert re.sub(rf"({suffixes})$", "", name) in METRICS or name in METRICS


def test_every_cause_is_explained() -> None:
    of_errors = {error.cause for error in vars(base).values() if hasattr(error, "cause")}
    causes = {*of_errors, "awaited"}  # the connector's own: no tier fails if a prefill engine is late
    assert {row[0].strip("`") for row in rows("| cause |")} == causes
    known = METRICS["ucm:failures_total"].known
    assert {cause for _, cause in known} == causes


def test_the_dashboard_is_where_it_says() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", BOTH):
        assert (DOCUMENT.parent / target).exists(), target


def test_alerts_use_labels_that_their_metrics_have() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (group,) = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 4
    for rule in group["rules"]:
        used = re.findall(r"(ucm:\w+)(?:{([^}]*)})?", rule["expr"])
        for name, selector in used:
            assert set(re.findall(r"(\w+)=", selector)) <= set(METRICS[name].labels), rule
        for grouping in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            for label in set(re.split(r",\s*", grouping)) - {"model_name"}:
                assert all(label in METRICS[name].labels for name, _ in used), rule
        assert used or "node_filesystem" in rule["expr"]
