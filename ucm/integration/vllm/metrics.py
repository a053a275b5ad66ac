"""Counters of the connectors: cheap to call, read once per step.

Each side of a connector has one ``ConnectorCounters``. From vLLM 0.11.0 on its counts travel with the step's output
(``get_kv_connector_stats``), and from 0.11.1 on vLLM hands them to Prometheus (``ucm.integration.vllm.prometheus``).
Older releases take no metrics from connectors: each process publishes its own, see ``create_publisher``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.compat import connector_abilities, optional
from ucm.integration.vllm import metric_names as names
from ucm.integration.vllm.metric_names import has_failures, merge, sentence
from ucm.integration.vllm.prometheus import SeriesSet, client_classes
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.metric_names import StatsData
    from ucm.store.base import TierStats

#: The interval at which the tiers' own counters are read.
TIER_SECONDS = 5.0


class ConnectorCounters:
    """The counters of one side of a connector; used by one thread.

    Args:
        export: Whether the counts also go to vLLM, or only to the log.
        log: Logs them at intervals; None for never.
        publish: Called with each step's counts if vLLM does not take them.
        clock: Tells when the tiers' counters are read again.
    """

    def __init__(
        self,
        *,
        export: bool = True,
        log: MetricsLog | None = None,
        publish: Callable[[StatsData], None] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._export = export
        self._log = log
        self._publish = publish
        self._clock = clock
        self._data: StatsData = {}
        self._stores: list[Callable[[], Mapping[str, TierStats]]] = []
        self._methods: list[tuple[Callable[[], Mapping[str, float]], dict[str, float]]] = []
        self._tiers: dict[tuple[int, str], Counter[tuple[str, str]]] = {}
        self._look_again = 0.0

    def add(self, metric: names.Metric, value: float = 1, key: str = "") -> None:
        """Add to a metric's value with these label values, joined by dots; to a histogram's, an observation."""
        values = self._data.setdefault(metric.name, {})
        before = values.setdefault(key, [] if metric.kind is names.Kind.HISTOGRAM else 0)
        if isinstance(before, list):
            before.append(value)
        else:
            values[key] = before + value

    def looked_up(self, queried_tokens: int, hit_tokens: int, seconds: float) -> None:
        """Count a lookup of a request.

        Args:
            queried_tokens: Its tokens that vLLM has not computed.
            hit_tokens: How many of them will be loaded from the store.
            seconds: Its duration.
        """
        self.add(names.LOOKUPS, 1, "hit" if hit_tokens else "miss")
        self.add(names.QUERIED_TOKENS, queried_tokens)
        self.add(names.MATCHED_TOKENS, hit_tokens)
        self.add(names.LOOKUP_DURATION, seconds)

    def hashed(self, blocks: int, seconds: float) -> None:
        """Count computed block keys."""
        self.add(names.HASHED_BLOCKS, blocks)
        self.add(names.HASH_SECONDS, seconds)

    def loaded(self, blocks: int, nbytes: int, seconds: float, tiers: Iterable[str], tokens_per_block: int = 0) -> None:
        """Count loaded blocks, or layers of them.

        Args:
            blocks: How many are there now as a whole; 0 for all layers of a block but the last.
            nbytes: Bytes loaded.
            seconds: From the call to the last byte.
            tiers: The tier that had each block.
            tokens_per_block: The tokens per block; 0 on all ranks except the first and for all groups except one,
                because they have other parts of the same tokens' KV.
        """
        if not nbytes:
            return
        if blocks:
            for tier, count in Counter(tiers).items():
                self.add(names.LOAD_BLOCKS, count, tier)
                if tokens_per_block:
                    self.add(names.HIT_TOKENS, count * tokens_per_block, tier)
        self.add(names.LOAD_BYTES, nbytes)
        self.add(names.LOAD_DURATION, seconds)

    def saved(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Count saved blocks, and their bytes without those that the store had, in a time from the call to the end."""
        if not nbytes:
            return
        self.add(names.SAVE_BLOCKS, blocks)
        self.add(names.SAVE_BYTES, nbytes)
        self.add(names.SAVE_DURATION, seconds)

    def hinted(self, outcome: str) -> None:
        """Count a request that asks for a lease, by ``retained`` or ``malformed``."""
        self.add(names.HINTS, 1, outcome)

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        """Count blocks that failed to load or save."""
        self.add(names.FAILURES, blocks, f"{operation}.{cause}")

    def watch(self, stats: Callable[[], Mapping[str, TierStats]]) -> None:
        """Read a store's tier counters, `KVStore.stats`, every few seconds from now on."""
        self._stores.append(stats)
        self._look_again = 0.0

    def watch_method(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Read a sparse method's counters every few seconds from now on.

        Args:
            figures: Returns its counters; see `SparseMethod.figures`.
        """
        self._methods.append((figures, {}))
        self._look_again = 0.0

    def take_data(self) -> StatsData | None:
        """Return the counts since the last call, once per step; None if there are none, or no consumer.

        Without counts it only reads the clock.
        """
        now = self._clock.monotonic()
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
        """Log the remaining counts, including the tiers' since they were last read."""
        self._look_again = 0.0
        self.take_data()
        if self._log is not None:
            self._log.close()

    def _look_at_methods(self) -> None:
        for figures, before in self._methods:
            for figure, value in figures().items():
                name, _, key = figure.partition(".")
                metric = names.METRICS.get(f"ucm:sparse_{name}_total")
                rise = value - before.get(figure, 0)
                if metric is not None and rise > 0:
                    self.add(metric, rise, key)
                    before[figure] = value

    def _look_at_tiers(self) -> None:
        for number, of_store in enumerate(self._stores):
            for tier, stats in of_store().items():
                self._rises((number, tier), stats)
                for metric in names.TIER_STATES:
                    value = getattr(stats, metric.stat)
                    if value is not None:
                        self._data.setdefault(metric.name, {})[tier] = value
                for salt, nbytes in stats.bytes_of.items():
                    self._data.setdefault(names.SALT_BYTES.name, {})[f"{tier}.{salt}"] = nbytes

    def _rises(self, of: tuple[int, str], stats: TierStats) -> None:
        """Add the increase of a tier's counters since they were last read."""
        tier = of[1]
        now = Counter({(metric.name, tier): getattr(stats, metric.stat) for metric in names.TIER_COUNTERS})
        for failure, count in stats.failures.items():
            now[names.TIER_FAILURES.name, f"{tier}.{failure}"] = count
        for of_salt, counts in ((names.SALT_HITS, stats.hits_of), (names.SALT_EVICTIONS, stats.evicted_of)):
            now.update({(of_salt.name, f"{tier}.{salt}"): count for salt, count in counts.items()})
        for (name, key), rise in (now - self._tiers.get(of, Counter())).items():
            self.add(names.METRICS[name], rise, key)
        self._tiers[of] = now


def create_counters(vllm_config: Any, config: ConnectorConfig, *, clock: Clock = SYSTEM) -> ConnectorCounters:
    """Create the counters of one side of a connector, as configured and supported by the release."""
    log = MetricsLog(config.metrics_log_interval, clock=clock) if config.metrics_log_interval else None
    publish = create_publisher(vllm_config) if config.metrics else None
    return ConnectorCounters(export=config.metrics, log=log, publish=publish, clock=clock)


class MetricsLog:
    """The log lines of one process.

    A thread logs the counts of an interval at its end, so that the last request before a quiet period is logged as
    well; while nothing happens there is no thread.

    Args:
        interval: Seconds between two lines, more than 0.
        clock: Time and threads.
    """

    def __init__(self, interval: float, *, clock: Clock = SYSTEM) -> None:
        self._interval = interval
        self._clock = clock
        self._lock = clock.lock()
        self._data: StatsData = {}
        self._next = 0.0
        self._waits = False  # whether a thread waits for the end of the interval
        self._closed = clock.event()

    def add(self, data: StatsData) -> None:
        """Add a step's counts."""
        with self._lock:
            merge(self._data, data)
            wait = self._next - self._clock.monotonic()
            if wait <= 0:
                self._say()
            elif not self._waits and not self._closed.is_set():
                with suppress(RuntimeError):  # the system allows no more threads: the next step tries again
                    self._clock.thread(lambda: self._say_after(wait), "ucm-log").start()
                    self._waits = True

    def close(self) -> None:
        """Log the remaining counts."""
        self._closed.set()
        with self._lock:
            self._say()

    def _say_after(self, seconds: float) -> None:
        if not self._closed.wait(seconds):
            with self._lock:
                self._waits = False
                self._say()

    def _say(self) -> None:
        text, level = sentence(self._data), logging.WARNING if has_failures(self._data) else logging.INFO
        self._data = {}
        if text:
            self._next = self._clock.monotonic() + self._interval
            get_logger(__name__).log(level, "[UCM.Connector] %s", text)


VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def create_publisher(vllm_config: Any) -> Callable[[StatsData], None] | None:
    """Return a function that exports this process's counts; None if vLLM does it, or it is impossible."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415 - lazily

    if connector_abilities(KVConnectorBase_V1).exports_stats:
        return None
    if VARIABLE not in os.environ:
        get_logger(__name__).info(
            "[UCM.Connector] this vLLM takes no metrics from connectors: they are in the log only. Set %s to an empty "
            "directory to have them on /metrics",
            VARIABLE,
        )
        return None
    engine = int(optional(vllm_config, "parallel_config.data_parallel_rank", 0))
    labels = {engine: [vllm_config.model_config.served_model_name, str(engine)]}
    series = SeriesSet(client_classes(), ["model_name", "engine"], labels)
    return lambda data: series.observe(data, engine)
