"""UCM's metrics as objects of prometheus_client, or of what vLLM uses in its place under Ray."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.metric_names import METRICS, Kind, Metric
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.integration.vllm.stats_data import StatsData

#: Where several processes export one gauge, as several API servers do.
GAUGE_MODE = "mostrecent"


def client_classes() -> dict[Kind, Any]:
    """The classes of prometheus_client, which vLLM brings."""
    client = import_module("prometheus_client")
    return {Kind.COUNTER: client.Counter, Kind.GAUGE: client.Gauge, Kind.HISTOGRAM: client.Histogram}


class SeriesSet:
    """All metrics of UCM in this process.

    Args:
        classes: The class to make a metric of each kind with, called as prometheus_client's are.
        labelnames: vLLM's labels.
        per_engine_labelvalues: For each engine that this process answers for, their values.
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
        """Add a step's counts; never raises for what they hold, because that would end the process that asks."""
        for name, values in data.items():
            metric = METRICS.get(name)
            if metric is None or engine not in self._engines:
                self._say_strange(name if metric is None else f"engine {engine}")
                continue
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
            # The first label may hold dots (a tier of others), the rest are words of ours.
            values = key.rsplit(".", count - 1) if count > 1 else [key] * count
            values += [""] * (count - len(values))
            found = self._metrics[metric.name].labels(*self._engines[engine], *values)
            self._children[engine, metric.name, key] = found
        return found

    def _say_strange(self, what: str) -> None:
        if what not in self._strange:
            self._strange.add(what)
            get_logger().warning("[UCM.Connector] counts of %s are not exported: this process does not know it", what)


@functools.cache
def _metrics(counter: Any, gauge: Any, histogram: Any, labelnames: tuple[str, ...]) -> dict[str, Any]:
    """The metric objects, made once per process: a name can be registered once.

    vLLM takes its own metrics out of the registry (by their prefix) whenever it starts to log anew, but not ours.
    """
    made = {}
    for metric in METRICS.values():
        labels = [*labelnames, *metric.labels]
        if metric.kind is Kind.COUNTER:
            made[metric.name] = counter(name=metric.name, documentation=metric.documentation, labelnames=labels)
        elif metric.kind is Kind.GAUGE:
            made[metric.name] = gauge(
                name=metric.name,
                documentation=metric.documentation,
                labelnames=labels,
                multiprocess_mode=GAUGE_MODE,
            )
        else:
            made[metric.name] = histogram(
                name=metric.name,
                documentation=metric.documentation,
                labelnames=labels,
                buckets=list(metric.buckets),
            )
    return made
