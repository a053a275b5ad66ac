"""UCM's metrics as part of vLLM's own: classes derived from vLLM's, created on first use.

The API is that of vLLM 0.11.0 (counts that travel with a step's output and are logged) and 0.11.1 (Prometheus).
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.metric_names import (
    METRICS,
    Kind,
    Metric,
    copied,
    merge,
    summary,
)
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucm.integration.vllm.metric_names import StatsData

STATS_CLASS = "UCMConnectorStats"


def build_stats(data: StatsData | None) -> Any:
    """Return the result of ``get_kv_connector_stats`` and ``build_kv_connector_stats``.

    Args:
        data: The counts, which are copied, because vLLM adds later ones to the object; None for no counts.

    Returns:
        A ``KVConnectorStats`` of vLLM.
    """
    return _stats_class()(data=copied(data or {}))


def build_prom_metrics(
    vllm_config: Any,
    metric_types: Mapping[Any, Any],
    labelnames: Iterable[str],
    per_engine_labelvalues: Mapping[int, Sequence[object]],
) -> Any:
    """Return the result of ``build_prom_metrics``.

    Returns:
        A ``KVConnectorPromMetrics`` of vLLM.
    """
    return _prom_metrics_class()(vllm_config, metric_types, list(labelnames), per_engine_labelvalues)


@functools.cache
def _stats_class() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: PLC0415 - lazily

    class UCMConnectorStats(KVConnectorStats):  # type: ignore[misc] # vLLM is untyped here
        """Counts of one or more ranks, or of one or more steps."""

        def reset(self) -> None:
            self.data: StatsData = {}

        def is_empty(self) -> bool:
            return not self.data

        def aggregate(self, other: Any) -> Any:
            merge(self.data, other.data)
            return self

        def reduce(self) -> dict[str, float]:
            return summary(self.data)

    # Worker and scheduler are separate processes: pickle finds the class by this name, see __getattr__.
    UCMConnectorStats.__qualname__ = STATS_CLASS
    return UCMConnectorStats


@functools.cache
def _prom_metrics_class() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics  # noqa: PLC0415 - lazily

    class UCMPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # vLLM is untyped here
        """UCM's metrics in the process that answers /metrics."""

        def __init__(
            self,
            vllm_config: Any,
            metric_types: Mapping[Any, Any],
            labelnames: list[str],
            per_engine_labelvalues: Mapping[int, Sequence[object]],
        ) -> None:
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            used = {kind: metric_types[one] for kind, one in client_classes().items()}
            self._series = SeriesSet(used, labelnames, per_engine_labelvalues)

        def observe(self, transfer_stats_data: StatsData, engine_idx: int = 0) -> None:
            self._series.observe(transfer_stats_data, engine_idx)

    return UCMPromMetrics


def __getattr__(name: str) -> Any:
    if name == STATS_CLASS:
        return _stats_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: The merge mode if several processes, for instance API servers, export the same gauge.
GAUGE_MODE = "mostrecent"


def client_classes() -> dict[Kind, Any]:
    """Return the classes of prometheus_client, a dependency of vLLM."""
    client = import_module("prometheus_client")
    return {Kind.COUNTER: client.Counter, Kind.GAUGE: client.Gauge, Kind.HISTOGRAM: client.Histogram}


class SeriesSet:
    """All metrics of UCM in this process.

    Args:
        classes: The class of each kind of metric, with the constructor of prometheus_client's.
        labelnames: vLLM's labels.
        per_engine_labelvalues: Their values for each engine of this process.
    """

    def __init__(
        self,
        classes: Mapping[Kind, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._metrics = _metrics(*(classes[kind] for kind in Kind), tuple(labelnames))
        self._engines = {engine: list(values) for engine, values in per_engine_labelvalues.items()}
        self._children: dict[tuple[int, str, str], Any] = {}
        self._strange: set[str] = set()
        for engine in self._engines:
            for metric in METRICS.values():
                for known in metric.known:
                    self._child(engine, metric, ".".join(known))

    def observe(self, data: StatsData, engine: int) -> None:
        """Add a step's counts; never raise because of their content, which would end the calling process."""
        for name, values in data.items():
            metric = METRICS.get(name)
            if metric is None or engine not in self._engines:
                self._say_strange(name if metric is None else f"engine {engine}")
                continue
            self._add(engine, metric, values)

    def _add(self, engine: int, metric: Metric, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            child = self._child(engine, metric, key)
            if metric.kind is Kind.COUNTER:
                child.inc(value)
            elif metric.kind is Kind.GAUGE:
                child.set(value)
            else:
                for one in value if isinstance(value, list) else [value]:
                    child.observe(one)

    def _child(self, engine: int, metric: Metric, key: str) -> Any:
        found = self._children.get((engine, metric.name, key))
        if found is None:
            count = len(metric.labels)
            # The first label may contain dots (a third-party tier); the others are our own words.
            values = key.rsplit(".", count - 1) if count > 1 else [key] * count
            values += [""] * (count - len(values))
            found = self._metrics[metric.name].labels(*self._engines[engine], *values)
            self._children[engine, metric.name, key] = found
        return found

    def _say_strange(self, what: str) -> None:
        if what not in self._strange:
            self._strange.add(what)
            get_logger(__name__).warning(
                "[UCM.Connector] counts of %s are not exported: this process has not registered it", what
            )


@functools.cache
def _metrics(counter: Any, gauge: Any, histogram: Any, labelnames: tuple[str, ...]) -> dict[str, Any]:
    """Return the metric objects, created once per process, because a name can be registered only once.

    vLLM unregisters its own metrics (by their prefix) whenever it creates its loggers again, but not ours.
    """
    made, classes = {}, dict(zip(Kind, (counter, gauge, histogram), strict=True))
    for metric in METRICS.values():
        more: dict[Kind, dict[str, Any]] = {
            Kind.GAUGE: {"multiprocess_mode": GAUGE_MODE},
            Kind.HISTOGRAM: {"buckets": list(metric.buckets)},
        }
        made[metric.name] = classes[metric.kind](
            name=metric.name,
            documentation=metric.documentation,
            labelnames=[*labelnames, *metric.labels],
            **more.get(metric.kind, {}),
        )
    return made
