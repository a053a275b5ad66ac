"""Metrics in releases that take none from connectors: up to 0.11.0.

prometheus_client merges what several processes of a server count, where PROMETHEUS_MULTIPROC_DIR names a directory for
it, and vLLM's /metrics then shows all of it. So where that is set, each process of ours exports its own counts. Where
it is not, they are in the log only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.prometheus_series import SeriesSet, client_classes
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.integration.vllm.stats_data import StatsData

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def create_publisher(vllm_config: Any) -> Callable[[StatsData], None] | None:
    """What exports this process's counts; None where vLLM does it, or nobody can.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415 - lazily

    if hasattr(KVConnectorBase_V1, "build_prom_metrics"):
        return None
    if VARIABLE not in os.environ:
        get_logger().info(
            "[UCM.Connector] this vLLM takes no metrics from connectors: they are in the log only. Set %s to an empty "
            "directory to have them on /metrics",
            VARIABLE,
        )
        return None
    engine = int(getattr(vllm_config.parallel_config, "data_parallel_rank", 0))
    labels = {engine: [vllm_config.model_config.served_model_name, str(engine)]}
    series = SeriesSet(client_classes(), ["model_name", "engine"], labels)
    return lambda data: series.observe(data, engine)
