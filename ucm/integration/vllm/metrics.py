"""Counting what the connectors do: cheap to call, read once per step.

Each side of a connector has one ``ConnectorCounters``. From vLLM 0.11.0 on its counts travel with the step's output
(``get_kv_connector_stats``), and from 0.11.1 on vLLM hands them to Prometheus (``ucm.integration.vllm.prometheus``).
Older releases take no metrics from connectors: see ``ucm.integration.vllm.metrics_fallback``.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from ucm.integration.vllm import metric_names as names
from ucm.integration.vllm.metrics_log import MetricsLog

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

    def dumped(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Blocks were handed to the store, or some layers of them; those that it had already are not.

        Args:
            blocks: How many are there now as a whole; 0 for all layers of a block but the last.
            nbytes: Bytes dumped.
            seconds: From the call to the last byte.
        """
        if not nbytes:
            return
        if blocks:
            self._add(names.DUMP_BLOCKS, "", blocks)
        self._add(names.DUMP_BYTES, "", nbytes)
        self._observe(names.DUMP_DURATION, seconds)

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        """Blocks were not loaded, or not saved.

        Args:
            operation: ``load`` or ``dump``.
            cause: The ``cause`` of the store's error.
            blocks: How many.
        """
        self._add(names.FAILURES, f"{operation}.{cause}", blocks)

    def watch(self, store: HasTiers) -> None:
        """From now on, look at a store's tiers every few seconds."""
        self._stores.append(store)
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

    def _look_at_tiers(self) -> None:
        for number, store in enumerate(self._stores):
            for tier, stats in store.stats().items():
                self._rises((number, tier), stats)
                for metric, value in ((names.TIER_USED, stats.used_bytes), (names.TIER_CAPACITY, stats.capacity_bytes)):
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
    "hits": names.TIER_FOUND,
    "loaded_bytes": names.TIER_LOADED_BYTES,
    "dumped_bytes": names.TIER_DUMPED_BYTES,
    "evicted_blocks": names.TIER_EVICTED,
    "set_aside_blocks": names.TIER_SET_ASIDE,
}


def create_counters(vllm_config: Any, config: ConnectorConfig) -> ConnectorCounters:
    """The counters of one side of a connector, as configured and as the release allows.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        config: The connector's settings.
    """
    from ucm.integration.vllm.metrics_fallback import create_publisher  # noqa: PLC0415 - looks at vLLM's classes

    log = MetricsLog(config.metrics_log_interval) if config.metrics_log_interval else None
    publish = create_publisher(vllm_config) if config.metrics else None
    return ConnectorCounters(export=config.metrics, log=log, publish=publish)
