"""Every metric that UCM exports: its name, kind, labels, buckets and meaning; and the counts of them that travel.

Names follow the conventions of vLLM (a prefix and a colon) and Prometheus (base units, ``_total`` for counters).
docs/metrics.md explains them to operators.

Counts travel from a connector to the process that exports them to Prometheus as plain dictionaries of plain values,
because they cross processes as msgpack: by metric name, the value or list of observations by label values, joined by
dots.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.sparse.outcomes import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterator

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
