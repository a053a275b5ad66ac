"""UCM's metrics with vLLM's own classes and the real prometheus_client; run by `tests/e2e/test_metrics.py`."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ucm.integration.vllm import metrics
from ucm.integration.vllm.metrics import METRICS, ConnectorCounters, Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucm.integration.vllm.metrics import StatsData

client = pytest.importorskip("prometheus_client", reason="needs an end-to-end environment")
parser = pytest.importorskip("prometheus_client.parser", reason="needs an end-to-end environment")
vllm_metrics = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics", reason="needs an end-to-end environment"
)

CONNECTOR = import_module("ucm.integration.vllm.ucm_connector").UCMConnector

pytestmark = pytest.mark.e2e

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "ucm.json"
LABELS = ["model_name", "engine"]


def everything() -> StatsData:
    """A step in which every metric has a value."""
    data: StatsData = {}
    for name, metric in METRICS.items():
        key = ".".join(["posix", "load", "corrupt"][-len(metric.labels) :] if metric.labels else [""])
        if metric.labels == ("tier",):
            key = "posix"
        elif metric.labels == ("outcome",):
            key = "hit"
        data[name] = {key: [0.002] if metric.kind is Kind.HISTOGRAM else 3}
    return data


def prom_metrics() -> Any:
    types = {one: one for one in (client.Counter, client.Gauge, client.Histogram)}
    return CONNECTOR.build_prom_metrics(SimpleNamespace(kv_transfer_config=None), types, LABELS, {0: ["llama", "0"]})


def samples() -> dict[str, float]:
    """What /metrics shows of ours: for each name, the sum over its labels."""
    found: dict[str, float] = {}
    for family in client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("ucm:") and not sample.name.endswith("_created"):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def names_of(metrics: Mapping[str, Metric]) -> set[str]:
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {f"{name}{suffix}" for name, metric in metrics.items() for suffix in suffixes.get(metric.kind, ("",))}


def test_what_is_exported_is_what_is_documented_and_shown() -> None:
    prom_metrics().observe(everything(), 0)
    assert set(samples()) == names_of(METRICS)
    shown = set(re.findall(r"ucm:\w+", DASHBOARD.read_text(encoding="utf-8")))
    assert shown <= names_of(METRICS)


def test_values_add_up_over_steps_and_loggers() -> None:
    """vLLM makes its loggers anew where an engine is made anew, and forgets its own metrics then, not ours."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics  # noqa: PLC0415 - needs vLLM

    before = samples()
    prom_metrics().observe(everything(), 0)
    unregister_vllm_metrics()
    again = prom_metrics()
    again.observe(everything(), 0)
    rise = {name: value - before.get(name, 0) for name, value in samples().items()}
    assert rise["ucm:queried_tokens_total"] == 6
    assert rise["ucm:load_duration_seconds_count"] == 2
    assert rise["ucm:load_duration_seconds_sum"] == pytest.approx(0.004)
    assert samples()["ucm:tier_used_bytes"] == 3
    assert isinstance(again, vllm_metrics.KVConnectorPromMetrics)


def test_the_text_format_can_be_read_back() -> None:
    prom_metrics().observe(everything(), 0)
    text = client.generate_latest(client.REGISTRY).decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    for name, metric in METRICS.items():
        family = families[name.removesuffix("_total")]
        assert family.type == metric.kind.value
        assert family.documentation == metric.documentation
        assert all(set(sample.labels) >= {*LABELS, *metric.labels} for sample in family.samples)


def test_stats_are_what_vllm_expects_of_a_step() -> None:
    counters = ConnectorCounters()
    assert counters.take_data() is None
    counters.looked_up(100, 64, 0.001)
    stats = CONNECTOR.build_kv_connector_stats(counters.take_data())
    assert isinstance(stats, vllm_metrics.KVConnectorStats)
    assert not stats.is_empty()
    assert stats.reduce() == {"UCM queried tokens": 100, "UCM matched tokens": 64}
    stats.reset()
    assert stats.is_empty()


def test_stats_travel_from_worker_to_scheduler(tmp_path: Path) -> None:
    """As a pickle, between processes that import by name."""
    stats = CONNECTOR.build_kv_connector_stats(everything())
    there, back_again = tmp_path / "there", tmp_path / "back"
    there.write_bytes(pickle.dumps(stats))
    script = (
        "import pickle, sys; stats = pickle.load(open(sys.argv[1], 'rb'))\n"
        "stats.aggregate(stats.__class__(data={'ucm:queried_tokens_total': {'': 4}}))\n"
        "pickle.dump(stats, open(sys.argv[2], 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", script, there, back_again], check=True)
    back = pickle.loads(back_again.read_bytes())  # noqa: S301 - our own child's
    assert type(back) is type(stats)
    assert back.data == everything() | {"ucm:queried_tokens_total": {"": 7}}


def test_stats_travel_from_the_engine_to_the_frontend() -> None:
    """As msgpack, within what vLLM's scheduler sends."""
    from vllm.v1.engine import EngineCoreOutputs  # noqa: PLC0415 - needs vLLM
    from vllm.v1.metrics.stats import SchedulerStats  # noqa: PLC0415
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: PLC0415

    stats = CONNECTOR.build_kv_connector_stats(everything())
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.data))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert received.scheduler_stats.kv_connector_stats == everything()


def test_ranks_are_put_together_as_vllm_does_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: PLC0415 - needs vLLM
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: PLC0415

    outputs = []
    for nbytes in (100, 250, None):
        counters = ConnectorCounters()
        if nbytes is not None:
            counters.loaded(1, nbytes, 0.01, ["posix"])
        data = counters.take_data()
        stats = None if data is None else CONNECTOR.build_kv_connector_stats(data)
        step = KVConnectorOutput(kv_connector_stats=stats)
        outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=step))
    stats = KVOutputAggregator(expected_finished_count=3).aggregate(outputs).kv_connector_output.kv_connector_stats
    assert stats.data["ucm:load_bytes_total"] == {"": 350}
    assert stats.data["ucm:load_duration_seconds"] == {"": [0.01, 0.01]}


def test_vllms_own_log_line() -> None:
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - needs vLLM

    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_connector_module_path="ucm.integration.vllm.ucm_connector",
        kv_role="kv_both",
    )
    logging = vllm_metrics.KVConnectorLogging(transfer)
    data = everything()
    logging.observe(data)
    logging.observe(data)
    assert data == everything()  # what Prometheus is about to read is not added to
    lines: list[str] = []
    logging.log(log_fn=_into(lines))
    logging.log(log_fn=_into(lines))
    assert len(lines) == 1
    assert "UCM queried tokens=6, UCM matched tokens=6, UCM loaded blocks=6" in lines[0]


def _into(lines: list[str]) -> Callable[..., None]:
    return lambda text, *values: lines.append(text % values)


FALLBACK = """
import os, sys
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
if hasattr(KVConnectorBase_V1, "build_prom_metrics"):
    del KVConnectorBase_V1.build_prom_metrics
from ucm.integration.vllm.metrics import create_publisher
config = SimpleNamespace(
    parallel_config=SimpleNamespace(data_parallel_rank=0),
    model_config=SimpleNamespace(served_model_name="llama"),
)
publish = create_publisher(config)
publish({"ucm:queried_tokens_total": {"": 5}, "ucm:tier_used_bytes": {"posix": 7}})
publish({"ucm:load_duration_seconds": {"": [1]}})
"""


def test_a_release_that_takes_no_metrics_from_connectors(tmp_path: Path) -> None:
    """Each process exports its own, and the server's /metrics shows them together."""
    environment = {**os.environ, metrics.VARIABLE: str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", FALLBACK], env=environment, check=True)
    script = (
        "import json, sys; from prometheus_client import CollectorRegistry, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(json.dumps([[s.name, s.labels, s.value] for f in registry.collect() for s in f.samples]))\n"
    )
    shown = json.loads(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True))
    values = {(name, labels.get("tier", "")): value for name, labels, value in shown if labels["model_name"] == "llama"}
    assert values["ucm:queried_tokens_total", ""] == 10
    assert values["ucm:tier_used_bytes", "posix"] == 7
    assert values["ucm:load_duration_seconds_count", ""] == 2


def test_such_a_release_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415 - needs vLLM

    monkeypatch.delattr(KVConnectorBase_V1, "build_prom_metrics")
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    said: list[str] = []
    monkeypatch.setattr(
        metrics, "get_logger", lambda name: SimpleNamespace(info=lambda text, *values: said.append(text % values))
    )
    assert metrics.create_publisher(SimpleNamespace()) is None
    assert len(said) == 1
    assert "they are in the log only. Set PROMETHEUS_MULTIPROC_DIR to an empty directory" in said[0]


def test_this_release_takes_them() -> None:
    assert metrics.create_publisher(SimpleNamespace()) is None
