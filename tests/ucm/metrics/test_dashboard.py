"""The Grafana dashboard: every query uses existing metrics and labels, and it shows every metric."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ucm.integration.vllm.metrics import METRICS, Kind

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "ucm.json"
#: The suffixes that Prometheus adds to a histogram's name.
SUFFIXES = ("_bucket", "_sum", "_count")
COLUMNS = 24


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def exported() -> dict[str, str]:
    """Return the exported names, each with its metric."""
    names: dict[str, str] = {}
    for name, metric in METRICS.items():
        suffixes = SUFFIXES if metric.kind is Kind.HISTOGRAM else ("",)
        names |= {f"{name}{suffix}": name for suffix in suffixes}
    return names


def test_every_query_names_metrics_that_there_are(dashboard: dict[str, Any]) -> None:
    assert queries(dashboard)
    for query in [*queries(dashboard), *(v["query"]["query"] for v in variables(dashboard, "query"))]:
        found = re.findall(r"ucm:\w+", query)
        assert found, query
        assert set(found) <= set(exported()), query


def test_every_metric_is_on_it(dashboard: dict[str, Any]) -> None:
    named = {exported()[name] for query in queries(dashboard) for name in re.findall(r"ucm:\w+", query)}
    assert named == set(METRICS)


def test_every_query_uses_labels_that_its_metrics_have(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        names = [exported()[name] for name in re.findall(r"ucm:\w+", query)]
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            for label in re.split(r",\s*", grouping):
                for name in names:
                    own = {"le"} if METRICS[name].kind is Kind.HISTOGRAM else set()
                    assert label in {*METRICS[name].labels, *own}, query
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~", selector)) == {"model_name", "engine"}, query


def test_legends_use_labels_that_are_left(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            left = {label for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in found.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_counters_are_only_used_by_their_rise(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        for name in re.findall(r"ucm:\w+", query):
            rising = METRICS[exported()[name]].kind is not Kind.GAUGE
            before = re.split(rf"{name}\b", query)[0]
            assert before.endswith(("rate(", "increase(")) == rising, query


def test_brackets_are_balanced(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_its_structure(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] == 42
    assert dashboard["id"] is None  # Grafana assigns one at import
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"])
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "model_name", "engine"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]


def test_it_is_bound_to_no_data_source_of_ours(dashboard: dict[str, Any]) -> None:
    bound = {"type": "prometheus", "uid": "${datasource}"}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == bound
            assert all(target["datasource"] == bound for target in panel["targets"])
    assert all(variable["datasource"] == bound for variable in variables(dashboard, "query"))


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= COLUMNS
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        taken |= cells


def variables(dashboard: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [variable for variable in dashboard["templating"]["list"] if variable["type"] == kind]
