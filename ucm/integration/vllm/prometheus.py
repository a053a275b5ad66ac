"""UCM's counts among vLLM's own metrics: classes that derive from vLLM's, made when they are first asked for.

The API is that of vLLM 0.11.0 (counts that travel with a step's output and are logged) and 0.11.1 (Prometheus).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.prometheus_series import SeriesSet, client_classes
from ucm.integration.vllm.stats_data import copied, merge, summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucm.integration.vllm.stats_data import StatsData

STATS_CLASS = "UCMConnectorStats"


def build_stats(data: StatsData | None) -> Any:
    """What ``get_kv_connector_stats`` and ``build_kv_connector_stats`` return.

    Args:
        data: Counts, copied: vLLM adds to an object what comes later, and others may still read these. None is empty.

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
    """What ``build_prom_metrics`` returns.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        metric_types: For each class of prometheus_client, the one to use in its place.
        labelnames: vLLM's labels.
        per_engine_labelvalues: For each engine, their values.

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

    # Worker and scheduler are two processes: pickle looks the class up by this name, see __getattr__.
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
