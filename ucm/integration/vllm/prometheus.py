"""UCM's metrics in a process that exports them to Prometheus."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.metric_names import METRICS, Kind, Metric
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.integration.vllm.metric_names import StatsData

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
