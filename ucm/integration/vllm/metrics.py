"""Counting what the connectors do: cheap to call, read once per step.

Each side of a connector has one ``ConnectorCounters``. From vLLM 0.11.0 on its counts travel with the step's output
(``get_kv_connector_stats``), and from 0.11.1 on vLLM hands them to Prometheus (``ucm.integration.vllm.prometheus``).
Older releases take no metrics from connectors: each process publishes its own, see ``create_publisher``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from ucm.integration.vllm import metric_names as names
from ucm.integration.vllm.prometheus import SeriesSet, client_classes
from ucm.integration.vllm.stats_data import has_failures, merge, sentence
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.stats_data import StatsData
    from ucm.store.base import TierStats

#: How often the tiers are asked for their own counts.
TIER_SECONDS = 5.0
#: The tier of blocks of which the caller does not say where they came from.
UNKNOWN_TIER = "unknown"


class HasTiers(Protocol):
    """A store, as far as it counts."""

    def stats(self) -> Mapping[str, TierStats]:
        """A snapshot of each tier's counters."""


class ConnectorCounters:
    """Counts of one side of a connector; used by one thread.

    Args:
        export: Whether the counts are for vLLM as well, or only for the log.
        log: Says them at intervals; None for never.
        publish: Called with each step's counts, where vLLM does not take them.
        clock: Seconds that only rise.
    """

    def __init__(
        self,
        *,
        export: bool = True,
        log: MetricsLog | None = None,
        publish: Callable[[StatsData], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._export = export
        self._log = log
        self._publish = publish
        self._clock = clock
        self._data: StatsData = {}
        self._stores: list[HasTiers] = []
        self._methods: list[tuple[Callable[[], Mapping[str, float]], dict[str, float]]] = []
        self._tiers: dict[tuple[int, str], Counter[tuple[str, str]]] = {}
        self._look_again = 0.0

    def looked_up(self, queried_tokens: int, hit_tokens: int, seconds: float) -> None:
        """A request was looked up.

        Args:
            queried_tokens: Its tokens that vLLM has not computed.
            hit_tokens: Those of them that the store is said to have, and will be loaded.
            seconds: How long it took.
        """
        self._add(names.LOOKUPS, "hit" if hit_tokens else "miss", 1)
        self._add(names.QUERIED_TOKENS, "", queried_tokens)
        self._add(names.MATCHED_TOKENS, "", hit_tokens)
        self._observe(names.LOOKUP_DURATION, seconds)

    def hashed(self, blocks: int, seconds: float) -> None:
        """Keys of blocks were computed."""
        self._add(names.HASHED_BLOCKS, "", blocks)
        self._add(names.HASH_SECONDS, "", seconds)

    def loaded(
        self, blocks: int, nbytes: int, seconds: float, tiers: Iterable[str] | None = None, tokens_per_block: int = 0
    ) -> None:
        """Blocks were loaded, or some layers of them.

        Args:
            blocks: How many are there now as a whole; 0 for all layers of a block but the last.
            nbytes: Bytes loaded.
            seconds: From the call to the last byte.
            tiers: For each block, the tier that had it.
            tokens_per_block: The tokens that each stands for; 0 on all ranks and for all groups but the first, which
                hold other parts of the same tokens' KV.
        """
        if not nbytes:
            return
        if blocks:
            for tier, count in Counter(tiers).items() if tiers is not None else [(UNKNOWN_TIER, blocks)]:
                self._add(names.LOAD_BLOCKS, tier, count)
                if tokens_per_block:
                    self._add(names.HIT_TOKENS, tier, count * tokens_per_block)
        self._add(names.LOAD_BYTES, "", nbytes)
        self._observe(names.LOAD_DURATION, seconds)

    def saved(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Blocks were handed to the store, or some layers of them; those that it had already are not.

        Args:
            blocks: How many are there now as a whole; 0 for all layers of a block but the last.
            nbytes: Bytes saved.
            seconds: From the call to the last byte.
        """
        if not nbytes:
            return
        if blocks:
            self._add(names.SAVE_BLOCKS, "", blocks)
        self._add(names.SAVE_BYTES, "", nbytes)
        self._observe(names.SAVE_DURATION, seconds)

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        """Blocks were not loaded, or not saved.

        Args:
            operation: ``load`` or ``save``.
            cause: The ``cause`` of the store's error.
            blocks: How many.
        """
        self._add(names.FAILURES, f"{operation}.{cause}", blocks)

    def blend_planned(self, outcome: str) -> None:
        """A request with chunks was blended, or why it was not."""
        self._add(names.BLEND_REQUESTS, outcome, 1)

    def blended(self, reused: int, computed: int) -> None:
        """A stretch of a prompt was filled.

        Args:
            reused: Its tokens that come from chunks.
            computed: Those that were computed.
        """
        self._add(names.BLEND_REUSED_TOKENS, "", reused)
        self._add(names.BLEND_COMPUTED_TOKENS, "", computed)

    def gate_failed(self, chunks: int) -> None:
        """Chunks were computed because their KV was not what the model computes."""
        self._add(names.BLEND_GATE_FAILURES, "", chunks)

    def chunk_saved(self, tokens: int) -> None:
        """A chunk of so many tokens was handed to the store."""
        del tokens
        self._add(names.BLEND_SAVED_CHUNKS, "", 1)

    def watch(self, store: HasTiers) -> None:
        """From now on, look at a store's tiers every few seconds."""
        self._stores.append(store)
        self._look_again = 0.0

    def watch_method(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """From now on, look at what a sparse method has counted every few seconds.

        Args:
            figures: What it has counted, as of `SparseMethod.figures`.
        """
        self._methods.append((figures, {}))
        self._look_again = 0.0

    def take(self) -> Any:
        """What was counted since the last call, as vLLM's ``KVConnectorStats``; None if nothing was.

        vLLM asks once per step, from 0.11.0 on; where it does not, a connector calls ``take_data`` itself.
        """
        data = self.take_data()
        if data is None:
            return None
        from ucm.integration.vllm.prometheus import build_stats  # noqa: PLC0415 - its class derives from vLLM's

        return build_stats(data)

    def take_data(self) -> StatsData | None:
        """What was counted since the last call; None if nothing was, or nobody wants it.

        With nothing counted it is one look at the clock.
        """
        now = self._clock()
        if now >= self._look_again:
            self._look_again = now + TIER_SECONDS
            self._look_at_tiers()
            self._look_at_methods()
        if not self._data:
            return None
        data, self._data = self._data, {}
        if self._log is not None:
            self._log.add(data)
        if self._publish is not None:
            self._publish(data)
        return data if self._export else None

    def close(self) -> None:
        """Say what was counted and not yet said, also by the tiers since they were looked at."""
        self._look_again = 0.0
        self.take_data()
        if self._log is not None:
            self._log.close()

    def _add(self, metric: names.Metric, key: str, value: float) -> None:
        values = self._data.setdefault(metric.name, {})
        before = values.get(key, 0)
        values[key] = value if isinstance(before, list) else before + value

    def _observe(self, metric: names.Metric, value: float) -> None:
        values = self._data.setdefault(metric.name, {})
        found = values.setdefault("", [])
        if isinstance(found, list):
            found.append(value)

    def _look_at_methods(self) -> None:
        for figures, before in self._methods:
            for figure, value in figures().items():
                name, _, key = figure.partition(".")
                metric = names.METRICS.get(f"ucm:sparse_{name}_total")
                rise = value - before.get(figure, 0)
                if metric is not None and rise > 0:
                    self._add(metric, key, rise)
                    before[figure] = value

    def _look_at_tiers(self) -> None:
        for number, store in enumerate(self._stores):
            for tier, stats in store.stats().items():
                self._rises((number, tier), stats)
                for metric, value in (
                    (names.TIER_USED, stats.used_bytes),
                    (names.TIER_CAPACITY, stats.capacity_bytes),
                    (names.TIER_RESTING, stats.resting),
                    (names.TIER_QUEUED, stats.queued_bytes),
                ):
                    if value is not None:
                        self._data.setdefault(metric.name, {})[tier] = value

    def _rises(self, of: tuple[int, str], stats: TierStats) -> None:
        """Add by how much a tier's counters have risen since it was last looked at."""
        tier = of[1]
        now = Counter({(metric.name, tier): getattr(stats, counter) for counter, metric in _TIER_COUNTERS.items()})
        for failure, count in stats.failures.items():
            now[names.TIER_FAILURES.name, f"{tier}.{failure}"] = count
        for (name, key), rise in (now - self._tiers.get(of, Counter())).items():
            self._add(names.METRICS[name], key, rise)
        self._tiers[of] = now


_TIER_COUNTERS = {
    "lookups": names.TIER_LOOKED_UP,
    "lookup_calls": names.TIER_LOOKUP_CALLS,
    "lookup_seconds": names.TIER_LOOKUP_SECONDS,
    "load_seconds": names.TIER_LOAD_SECONDS,
    "save_seconds": names.TIER_SAVE_SECONDS,
    "hits": names.TIER_FOUND,
    "loaded_bytes": names.TIER_LOADED_BYTES,
    "saved_bytes": names.TIER_SAVED_BYTES,
    "evicted_blocks": names.TIER_EVICTED,
    "quarantined_blocks": names.TIER_QUARANTINED,
}


def create_counters(vllm_config: Any, config: ConnectorConfig) -> ConnectorCounters:
    """The counters of one side of a connector, as configured and as the release allows.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        config: The connector's settings.
    """
    log = MetricsLog(config.metrics_log_interval) if config.metrics_log_interval else None
    publish = create_publisher(vllm_config) if config.metrics else None
    return ConnectorCounters(export=config.metrics, log=log, publish=publish)


def _later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


class MetricsLog:
    """The lines of one process.

    What comes during an interval is said at its end by a timer, so that the last request before a quiet time is said
    as well; while nothing happens there is no timer.

    Args:
        interval: Seconds between two lines, more than 0.
        clock: Seconds that only rise.
        later: Calls something after some seconds; its result can be cancelled.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], threading.Timer] = _later,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._data: StatsData = {}
        self._next = 0.0
        self._timer: threading.Timer | None = None

    def add(self, data: StatsData) -> None:
        """Take note of a step's counts."""
        with self._lock:
            merge(self._data, data)
            wait = self._next - self._clock()
            if wait <= 0:
                self._say()
            elif self._timer is None:
                self._timer = self._later(wait, self._on_time)

    def close(self) -> None:
        """Say what is left."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._say()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            self._say()

    def _say(self) -> None:
        text, level = sentence(self._data), logging.WARNING if has_failures(self._data) else logging.INFO
        self._data = {}
        if text:
            self._next = self._clock() + self._interval
            get_logger(__name__).log(level, "[UCM.Connector] %s", text)


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
        get_logger(__name__).info(
            "[UCM.Connector] this vLLM takes no metrics from connectors: they are in the log only. Set %s to an empty "
            "directory to have them on /metrics",
            VARIABLE,
        )
        return None
    engine = int(getattr(vllm_config.parallel_config, "data_parallel_rank", 0))
    labels = {engine: [vllm_config.model_config.served_model_name, str(engine)]}
    series = SeriesSet(client_classes(), ["model_name", "engine"], labels)
    return lambda data: series.observe(data, engine)
