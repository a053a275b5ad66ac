"""UCM's metrics: their names, what counts them, and what exports and logs them.

Names follow the conventions of vLLM (a prefix and a colon) and Prometheus (base units, ``_total`` for counters).
docs/metrics.md explains them to operators.

Each side of a connector has one ``ConnectorCounters``, cheap to call and read once per step. Counts travel to the
process that exports them as plain dictionaries of plain values, because they cross processes as msgpack: by metric
name, the value or list of observations by label values, joined by dots. From vLLM 0.11.0 on they travel with the step's
output (``get_kv_connector_stats``), and from 0.11.1 on vLLM hands them to a `SeriesSet`. Older releases take no metrics
from connectors: each process publishes its own, see ``create_publisher``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.clock import SYSTEM
from ucm.compat import ConnectorAbilities, optional
from ucm.logger import get_logger
from ucm.sparse.outcomes import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.store.base import TierStats

Values: TypeAlias = "dict[str, float | list[float]]"
StatsData: TypeAlias = "dict[str, Values]"


class Kind(Enum):
    """The kind of a metric, which determines how its values are merged."""

    COUNTER = "counter"  #: values add up
    GAUGE = "gauge"  #: the maximum of simultaneous values, then the latest
    HISTOGRAM = "histogram"  #: lists of observations


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        name: Its name as Prometheus shows it. What it ends with shows a counter, and mostly the unit.
        documentation: Its meaning, for its HELP line and docs/metrics.md.
        labels: Its labels besides vLLM's ``model_name`` and ``engine``.
        known: Label values exported as 0 from the start, so that the first increase is visible.
        buckets: The upper bounds of a histogram's buckets.
        stat: The field of `TierStats` with its value; empty for what is counted elsewhere.
        unit: Its unit, if the name does not say it.
    """

    name: str
    documentation: str
    labels: tuple[str, ...]
    known: tuple[tuple[str, ...], ...]
    buckets: tuple[float, ...] = ()
    stat: str = ""
    unit: str = ""

    @property
    def kind(self) -> Kind:
        """Its kind."""
        if self.buckets:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE


#: A lookup takes microseconds if all is staged, or as long as reading a long prompt if nothing is.
LOOKUP_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
#: A transfer takes a millisecond for one small block, or seconds for a long prompt from a cold disk.
TRANSFER_BUCKETS = (1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0, 2.0, 5.0, 10.0)

_TIERS = (("dram",), ("posix",))
_CAUSES = (
    "compressed",
    "corrupt",
    "foreign",
    "full",
    "missing",
    "other",
    "timeout",
    "unavailable",
    "unreadable",
)
_FAILURES = tuple(product(("save", "load"), _CAUSES))


def _metric(name: str, documentation: str, *labels: str, **more: Any) -> Metric:
    return Metric(f"ucm:{name}", documentation, labels, **{"known": () if labels else ((),), **more})


def _of_tier(name: str, documentation: str, **more: Any) -> Metric:
    return _metric(name, documentation, "tier", known=_TIERS, **more)


QUERIED_TOKENS = _metric("queried_tokens_total", "Tokens that were looked up, which vLLM's own prefix cache lacked.")
MATCHED_TOKENS = _metric("matched_tokens_total", "Those of them that were promised from the store.")
HIT_TOKENS = _of_tier("hit_tokens_total", "Tokens whose KV was loaded, by the tier it came from.")
LOOKUPS = _metric(
    "lookups_total", "Requests looked up, by whether anything was found.", "outcome", known=(("hit",), ("miss",))
)
LOOKUP_DURATION = _metric(
    "lookup_duration_seconds",
    "Time from vLLM's first query for a request to the result, including staging.",
    buckets=LOOKUP_BUCKETS,
)
HASHED_BLOCKS = _metric("hashed_blocks_total", "Blocks whose keys were computed.")
HASH_SECONDS = _metric("hash_seconds_total", "Time spent computing keys.")
LOAD_BLOCKS = _of_tier("load_blocks_total", "Blocks loaded, by the tier they came from.")
LOAD_BYTES = _metric("load_bytes_total", "Bytes loaded by all ranks.")
LOAD_DURATION = _metric("load_duration_seconds", "Time of one load, call to last byte.", buckets=TRANSFER_BUCKETS)
SAVE_BLOCKS = _metric("save_blocks_total", "Blocks handed to the store.")
SAVE_BYTES = _metric("save_bytes_total", "Bytes saved by all ranks.")
SAVE_DURATION = _metric("save_duration_seconds", "Time of one save, call to last byte.", buckets=TRANSFER_BUCKETS)
FAILURES = _metric(
    "failures_total",
    "Blocks that were not loaded (their tokens are recomputed) or not saved, by cause.",
    "operation",
    "cause",
    unit="blocks",
    known=(*_FAILURES, ("load", "awaited")),
)
HINTS = _metric(
    "hints_total", "Requests that ask for a lease.", "outcome", unit="requests", known=(("retained",), ("malformed",))
)
TIER_COUNTERS = (
    _of_tier("tier_lookup_blocks_total", "Blocks that a tier was asked for.", stat="lookups"),
    _of_tier("tier_hit_blocks_total", "Those of them that the tier had.", stat="hits"),
    _of_tier("tier_load_bytes_total", "Bytes read from a tier.", stat="loaded_bytes"),
    _of_tier("tier_save_bytes_total", "Bytes written to a tier.", stat="saved_bytes"),
    _of_tier(
        "tier_save_compressed_bytes_total",
        "Bytes that a tier that compresses stored for those.",
        stat="compressed_bytes",
    ),
    _of_tier("tier_evicted_blocks_total", "Blocks deleted to make room.", stat="evicted_blocks"),
    _of_tier("tier_quarantined_blocks_total", "Damaged blocks moved to quarantine.", stat="quarantined_blocks"),
    _of_tier("tier_lookup_calls_total", "Lookups in a tier.", stat="lookup_calls"),
    _of_tier("tier_lookup_seconds_total", "Time that lookups took.", stat="lookup_seconds"),
    _of_tier("tier_load_seconds_total", "Time that reading took, of all threads together.", stat="load_seconds"),
    _of_tier("tier_save_seconds_total", "Time that writing took, of all threads together.", stat="save_seconds"),
)
TIER_FAILURES = _metric(
    "tier_failures_total",
    "Failures in a tier, whether or not a request was affected.",
    "tier",
    "operation",
    "cause",
    known=tuple((*tier, *failure) for tier, failure in product(_TIERS, _FAILURES)),
)
TIER_STATES = (
    _metric("tier_resting_ratio", "The share of a tier that rests after failures, 0 to 1.", "tier", stat="resting"),
    _metric("tier_queued_bytes", "Bytes that wait for write-behind.", "tier", stat="queued_bytes"),
    _metric("tier_used_bytes", "Bytes in a tier, of all its users.", "tier", stat="used_bytes"),
    _metric("tier_leased_bytes", "Bytes with a lease.", "tier", stat="leased_bytes"),
    _metric(
        "tier_capacity_bytes", "Bytes that a tier may take; absent without a limit.", "tier", stat="capacity_bytes"
    ),
)
SALT_HITS = _metric("salt_hit_blocks_total", "Blocks found.", "tier", "salt")
SALT_EVICTIONS = _metric("salt_evicted_blocks_total", "Blocks evicted.", "tier", "salt")
SALT_BYTES = _metric("salt_used_bytes", "Bytes held.", "tier", "salt")

BLEND_REQUESTS = _metric(
    "blend_requests_total",
    "Requests with chunks, by whether they were blended, or why not.",
    "outcome",
    known=(("blended",), ("miss",)),
)
BLEND_REUSED_TOKENS = _metric("blend_reused_tokens_total", "Tokens of blended prompts taken from chunks.")
BLEND_COMPUTED_TOKENS = _metric(
    "blend_computed_tokens_total", "Tokens of blended stretches that were computed: gaps and selected ones."
)
BLEND_GATE_FAILURES = _metric(
    "blend_gate_failures_total", "Chunks that were computed because the gate rejected their KV.", unit="chunks"
)
BLEND_SAVED_CHUNKS = _metric("blend_saved_chunks_total", "Chunks handed to the store.")

SPARSE_REQUESTS = _metric(
    "sparse_requests_total",
    "Requests, by whether a sparse method left something out, or why they were dense.",
    "outcome",
    known=tuple((outcome,) for outcome in sorted(OUTCOMES)),
)
SPARSE_ROWS = _metric("sparse_rows_total", "Rows of steps, mostly decodes, that read less than their context.")
SPARSE_READ_TOKENS = _metric(
    "sparse_read_tokens_total", "Tokens that these rows read, added up over restricted layers."
)
SPARSE_HELD_TOKENS = _metric("sparse_held_tokens_total", "Tokens that they would have read there with dense attention.")
SPARSE_SELECT_SECONDS = _metric(
    "sparse_select_seconds_total", "Time that the first rank's thread spent on selecting what to read."
)
SPARSE_SAMPLES = _metric(
    "sparse_attention_samples_total", "Choices of blocks for a row and layer that were measured.", unit="choices"
)
SPARSE_KEPT = _metric(
    "sparse_attention_kept_total", "Shares of the row's attention that these choices kept, added up.", unit="shares"
)
SPARSE_FETCHED_BLOCKS = _metric("sparse_fetched_blocks_total", "Offloaded blocks that were loaded again.")
SPARSE_LOST_BLOCKS = _metric("sparse_lost_blocks_total", "Offloaded blocks that could not be loaded again.")
SPARSE_REROPE_ROWS = _metric("sparse_rerope_rows_total", "Rows of steps with tokens beyond the window of ReRoPE.")
SPARSE_REROPE_TOKENS = _metric(
    "sparse_rerope_tokens_total",
    "Tokens beyond the window: each layer merged a near and a far part of their attention, by what computes it.",
    "kernel",
    known=(("compiled",), ("torch",)),
)
SPARSE_REROPE_KEYS = _metric("sparse_rerope_turned_keys_total", "Keys that were rotated for them in each layer.")

#: All metrics by name, in the order of docs/metrics.md.
METRICS = {
    metric.name: metric
    for found in list(globals().values())
    for metric in (found if isinstance(found, tuple) else (found,))
    if isinstance(metric, Metric)
}


def copied(data: StatsData) -> StatsData:
    """Return a deep copy."""
    return {
        name: {key: list(value) if isinstance(value, list) else value for key, value in values.items()}
        for name, values in data.items()
    }


def merge(into: StatsData, data: StatsData) -> None:
    """Add the counts of another rank, or of the other side, in the same step."""
    for name, values in data.items():
        mine = into.setdefault(name, {})
        largest = name in METRICS and METRICS[name].kind is Kind.GAUGE
        for key, value in values.items():
            before = mine.get(key)
            if isinstance(value, list):
                mine[key] = [*before, *value] if isinstance(before, list) else list(value)
            elif not isinstance(before, int | float):
                mine[key] = value
            else:
                mine[key] = max(before, value) if largest else before + value


def total(data: StatsData, metric: Metric, key: str | None = None) -> float:
    """Return the sum of a metric's values, or one value; for a histogram, the sum of observations."""
    found = data.get(metric.name, {})
    values = found.values() if key is None else [found.get(key, 0)]
    return sum(sum(value) if isinstance(value, list) else value for value in values)


def observations(data: StatsData, metric: Metric) -> int:
    """Return the number of a histogram's observations."""
    return sum(len(value) for value in data.get(metric.name, {}).values() if isinstance(value, list))


def summary(data: StatsData) -> dict[str, float]:
    """Return a few figures for vLLM's own log line."""
    wanted = {
        "queried tokens": total(data, QUERIED_TOKENS),
        "matched tokens": total(data, MATCHED_TOKENS),
        "loaded blocks": total(data, LOAD_BLOCKS),
        "loaded MB": round(total(data, LOAD_BYTES) / 1e6, 1),
        "saved blocks": total(data, SAVE_BLOCKS),
        "saved MB": round(total(data, SAVE_BYTES) / 1e6, 1),
        "failed blocks": total(data, FAILURES),
    }
    return {f"UCM {name}": value for name, value in wanted.items() if value}


def has_failures(data: StatsData) -> bool:
    """Return whether a block failed to load, or to save in some tier."""
    return bool(total(data, FAILURES) or not_saved(data))


def not_saved(data: StatsData) -> dict[str, Counter[str]]:
    """Return each tier's failed saves by cause; another tier may have saved the block."""
    found: dict[str, Counter[str]] = {}
    for key, value in _labelled(data, TIER_FAILURES):
        tier, operation, cause = key.rsplit(".", 2)
        if operation == "save":
            found.setdefault(tier, Counter())[cause] += int(value)
    return found


def sentence(data: StatsData) -> str:
    """Return a log line about the counts; empty if there is nothing to report."""
    return "; ".join(_parts(data))


def _parts(data: StatsData) -> Iterator[str]:
    lookups = int(total(data, LOOKUPS))
    if lookups:
        hits, queried = int(total(data, LOOKUPS, "hit")), total(data, QUERIED_TOKENS)
        matched = total(data, MATCHED_TOKENS)
        share = 100 * matched / queried if queried else 0
        said = (_many(lookups, "lookup"), _many(hits, "hit"), _many(lookups - hits, "miss", "misses"))
        yield "{}: {}, {}".format(*said)
        yield f"{matched:.0f} of {queried:.0f} tokens found ({share:.1f} %)"
    for verb, blocks, nbytes, duration in (
        ("loaded", LOAD_BLOCKS, LOAD_BYTES, LOAD_DURATION),
        ("saved", SAVE_BLOCKS, SAVE_BYTES, SAVE_DURATION),
    ):
        count = total(data, blocks)
        if count or total(data, nbytes):
            each = 1e3 * total(data, duration) / max(1, observations(data, duration))
            tiers = ", ".join(f"{key} {value:.0f}" for key, value in _labelled(data, blocks))
            where = f" (from {tiers})" if tiers else ""
            what = f"{_many(int(count), 'block')}{where}"
            yield f"{verb} {what}, {total(data, nbytes) / 1e6:.1f} MB, {each:.1f} ms a transfer"
    if failed := _labelled(data, FAILURES):
        yield "failed: " + ", ".join(f"{key.replace('.', ' ')} {value:.0f}" for key, value in failed)
    for tier, causes in not_saved(data).items():
        yield f"not on {tier}: {causes.total()} ({', '.join(f'{cause} {causes[cause]}' for cause in sorted(causes))})"


def _many(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or f'{one}s'}"


def _labelled(data: StatsData, metric: Metric) -> list[tuple[str, float]]:
    values = data.get(metric.name, {})
    return [(key, value) for key, value in sorted(values.items()) if key and not isinstance(value, list)]


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

    def add(self, metric: Metric, value: float = 1, key: str = "") -> None:
        """Add to a metric's value with these label values, joined by dots; to a histogram's, an observation."""
        values = self._data.setdefault(metric.name, {})
        before = values.setdefault(key, [] if metric.kind is Kind.HISTOGRAM else 0)
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
        self.add(LOOKUPS, 1, "hit" if hit_tokens else "miss")
        self.add(QUERIED_TOKENS, queried_tokens)
        self.add(MATCHED_TOKENS, hit_tokens)
        self.add(LOOKUP_DURATION, seconds)

    def hashed(self, blocks: int, seconds: float) -> None:
        """Count computed block keys."""
        self.add(HASHED_BLOCKS, blocks)
        self.add(HASH_SECONDS, seconds)

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
                self.add(LOAD_BLOCKS, count, tier)
                if tokens_per_block:
                    self.add(HIT_TOKENS, count * tokens_per_block, tier)
        self.add(LOAD_BYTES, nbytes)
        self.add(LOAD_DURATION, seconds)

    def saved(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Count saved blocks, and their bytes without those that the store had, in a time from the call to the end."""
        if not nbytes:
            return
        self.add(SAVE_BLOCKS, blocks)
        self.add(SAVE_BYTES, nbytes)
        self.add(SAVE_DURATION, seconds)

    def hinted(self, outcome: str) -> None:
        """Count a request that asks for a lease, by ``retained`` or ``malformed``."""
        self.add(HINTS, 1, outcome)

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        """Count blocks that failed to load or save."""
        self.add(FAILURES, blocks, f"{operation}.{cause}")

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
                metric = METRICS.get(f"ucm:sparse_{name}_total")
                rise = value - before.get(figure, 0)
                if metric is not None and rise > 0:
                    self.add(metric, rise, key)
                    before[figure] = value

    def _look_at_tiers(self) -> None:
        for number, of_store in enumerate(self._stores):
            for tier, stats in of_store().items():
                self._rises((number, tier), stats)
                for metric in TIER_STATES:
                    value = getattr(stats, metric.stat)
                    if value is not None:
                        self._data.setdefault(metric.name, {})[tier] = value
                for salt, nbytes in stats.bytes_of.items():
                    self._data.setdefault(SALT_BYTES.name, {})[f"{tier}.{salt}"] = nbytes

    def _rises(self, of: tuple[int, str], stats: TierStats) -> None:
        """Add the increase of a tier's counters since they were last read."""
        tier = of[1]
        now = Counter({(metric.name, tier): getattr(stats, metric.stat) for metric in TIER_COUNTERS})
        for failure, count in stats.failures.items():
            now[TIER_FAILURES.name, f"{tier}.{failure}"] = count
        for of_salt, counts in ((SALT_HITS, stats.hits_of), (SALT_EVICTIONS, stats.evicted_of)):
            now.update({(of_salt.name, f"{tier}.{salt}"): count for salt, count in counts.items()})
        for (name, key), rise in (now - self._tiers.get(of, Counter())).items():
            self.add(METRICS[name], rise, key)
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

    if ConnectorAbilities(KVConnectorBase_V1).exports_stats:
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
