"""Every metric that UCM exports: its name, kind, labels, buckets and meaning.

Names follow the conventions of vLLM (a prefix and a colon) and Prometheus (base units, ``_total`` for counters).
docs/metrics.md explains them to operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product


class Kind(Enum):
    """The kind of a metric, which determines how its values are merged."""

    COUNTER = "counter"  #: values add up
    GAUGE = "gauge"  #: the maximum of simultaneous values, then the latest
    HISTOGRAM = "histogram"  #: lists of observations


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        name: Its name as Prometheus shows it.
        kind: Its kind.
        documentation: Its meaning, for its HELP line and docs/metrics.md.
        labels: Its labels besides vLLM's ``model_name`` and ``engine``.
        unit: Its unit.
        buckets: The upper bounds of a histogram's buckets.
        known: Label values exported as 0 from the start, so that the first increase is visible.
    """

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = field(default=((),))


#: A lookup takes microseconds if all is staged, or as long as reading a long prompt if nothing is.
LOOKUP_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
#: A transfer takes a millisecond for one small block, or seconds for a long prompt from a cold disk.
TRANSFER_BUCKETS = (1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0, 2.0, 5.0, 10.0)

_TIERS = (("dram",), ("posix",))
_CAUSES = ("corrupt", "foreign", "full", "incomplete", "missing", "other", "timeout", "unavailable", "unreadable")
_FAILURES = tuple(product(("save", "load"), _CAUSES))


def _counter(
    name: str,
    documentation: str,
    unit: str,
    labels: tuple[str, ...] = (),
    known: tuple[tuple[str, ...], ...] | None = None,
) -> Metric:
    return Metric(
        f"ucm:{name}", Kind.COUNTER, documentation, labels, unit, known=known or (((),) if not labels else ())
    )


QUERIED_TOKENS = _counter(
    "queried_tokens_total", "Tokens that were looked up, which vLLM's own prefix cache lacked.", "tokens"
)
MATCHED_TOKENS = _counter("matched_tokens_total", "Those of them that were promised from the store.", "tokens")
HIT_TOKENS = _counter(
    "hit_tokens_total", "Tokens whose KV was loaded, by the tier it came from.", "tokens", ("tier",), _TIERS
)
LOOKUPS = _counter(
    "lookups_total",
    "Requests looked up, by whether anything was found.",
    "lookups",
    ("outcome",),
    (("hit",), ("miss",)),
)
LOOKUP_DURATION = Metric(
    "ucm:lookup_duration_seconds",
    Kind.HISTOGRAM,
    "Time from vLLM's first query for a request to the result, including staging.",
    (),
    "seconds",
    LOOKUP_BUCKETS,
)
HASHED_BLOCKS = _counter("hashed_blocks_total", "Blocks whose keys were computed.", "blocks")
HASH_SECONDS = _counter("hash_seconds_total", "Time spent computing keys.", "seconds")
LOAD_BLOCKS = _counter("load_blocks_total", "Blocks loaded, by the tier they came from.", "blocks", ("tier",), _TIERS)
LOAD_BYTES = _counter("load_bytes_total", "Bytes loaded by all ranks.", "bytes")
LOAD_DURATION = Metric(
    "ucm:load_duration_seconds", Kind.HISTOGRAM, "Time of one load, call to last byte.", (), "seconds", TRANSFER_BUCKETS
)
SAVE_BLOCKS = _counter("save_blocks_total", "Blocks handed to the store.", "blocks")
SAVE_BYTES = _counter("save_bytes_total", "Bytes saved by all ranks.", "bytes")
SAVE_DURATION = Metric(
    "ucm:save_duration_seconds", Kind.HISTOGRAM, "Time of one save, call to last byte.", (), "seconds", TRANSFER_BUCKETS
)
FAILURES = _counter(
    "failures_total",
    "Blocks that were not loaded (their tokens are recomputed) or not saved, by cause.",
    "blocks",
    ("operation", "cause"),
    _FAILURES,
)
TIER_LOOKED_UP = _counter("tier_lookup_blocks_total", "Blocks that a tier was asked for.", "blocks", ("tier",), _TIERS)
TIER_FOUND = _counter("tier_hit_blocks_total", "Those of them that the tier had.", "blocks", ("tier",), _TIERS)
TIER_LOADED_BYTES = _counter("tier_load_bytes_total", "Bytes read from a tier.", "bytes", ("tier",), _TIERS)
TIER_SAVED_BYTES = _counter("tier_save_bytes_total", "Bytes written to a tier.", "bytes", ("tier",), _TIERS)
TIER_EVICTED = _counter("tier_evicted_blocks_total", "Blocks deleted to make room.", "blocks", ("tier",), _TIERS)
TIER_QUARANTINED = _counter(
    "tier_quarantined_blocks_total", "Damaged blocks moved to quarantine.", "blocks", ("tier",), _TIERS
)
TIER_FAILURES = _counter(
    "tier_failures_total",
    "Failures in a tier, whether or not a request was affected.",
    "failures",
    ("tier", "operation", "cause"),
    tuple((*tier, *failure) for tier, failure in product(_TIERS, _FAILURES)),
)
TIER_LOOKUP_CALLS = _counter("tier_lookup_calls_total", "Lookups in a tier.", "calls", ("tier",), _TIERS)
TIER_LOOKUP_SECONDS = _counter("tier_lookup_seconds_total", "Time that lookups took.", "seconds", ("tier",), _TIERS)
TIER_LOAD_SECONDS = _counter(
    "tier_load_seconds_total", "Time that reading took, of all threads together.", "seconds", ("tier",), _TIERS
)
TIER_SAVE_SECONDS = _counter(
    "tier_save_seconds_total", "Time that writing took, of all threads together.", "seconds", ("tier",), _TIERS
)
TIER_RESTING = Metric(
    "ucm:tier_resting_ratio",
    Kind.GAUGE,
    "The share of a tier that rests after failures, 0 to 1.",
    ("tier",),
    "ratio",
    known=(),
)
TIER_QUEUED = Metric(
    "ucm:tier_queued_bytes", Kind.GAUGE, "Bytes that wait for write-behind.", ("tier",), "bytes", known=()
)
TIER_USED = Metric(
    "ucm:tier_used_bytes", Kind.GAUGE, "Bytes in a tier, of all its users.", ("tier",), "bytes", known=()
)
TIER_CAPACITY = Metric(
    "ucm:tier_capacity_bytes",
    Kind.GAUGE,
    "Bytes that a tier may take; absent without a limit.",
    ("tier",),
    "bytes",
    known=(),
)

BLEND_REQUESTS = _counter(
    "blend_requests_total",
    "Requests with chunks, by whether they were blended, or why not.",
    "requests",
    ("outcome",),
    (("blended",), ("miss",)),
)
BLEND_REUSED_TOKENS = _counter("blend_reused_tokens_total", "Tokens of blended prompts taken from chunks.", "tokens")
BLEND_COMPUTED_TOKENS = _counter(
    "blend_computed_tokens_total", "Tokens of blended stretches that were computed: gaps and selected ones.", "tokens"
)
BLEND_GATE_FAILURES = _counter(
    "blend_gate_failures_total",
    "Chunks that were computed because the gate rejected their KV.",
    "chunks",
)
BLEND_SAVED_CHUNKS = _counter("blend_saved_chunks_total", "Chunks handed to the store.", "chunks")

SPARSE_REQUESTS = _counter(
    "sparse_requests_total",
    "Requests, by whether a sparse method left something out, or why they were dense.",
    "requests",
    ("outcome",),
    (("failed",), ("opted_out",), ("refused",), ("restricted",)),
)
SPARSE_ROWS = _counter("sparse_rows_total", "Rows of steps, mostly decodes, that read less than their context.", "rows")
SPARSE_READ_TOKENS = _counter(
    "sparse_read_tokens_total", "Tokens that these rows read, added up over restricted layers.", "tokens"
)
SPARSE_HELD_TOKENS = _counter(
    "sparse_held_tokens_total", "Tokens that they would have read there with dense attention.", "tokens"
)
SPARSE_SELECT_SECONDS = _counter(
    "sparse_select_seconds_total", "Time that the first rank's thread spent on selecting what to read.", "seconds"
)
SPARSE_FETCHED_BLOCKS = _counter("sparse_fetched_blocks_total", "Offloaded blocks that were loaded again.", "blocks")
SPARSE_LOST_BLOCKS = _counter("sparse_lost_blocks_total", "Offloaded blocks that could not be loaded again.", "blocks")
SPARSE_REROPE_ROWS = _counter(
    "sparse_rerope_rows_total", "Rows of steps with tokens beyond the window of ReRoPE.", "rows"
)
SPARSE_REROPE_TOKENS = _counter(
    "sparse_rerope_tokens_total",
    "Tokens beyond the window: each layer merged a near and a far part of their attention, by what computes it.",
    "tokens",
    ("kernel",),
    (("compiled",), ("torch",)),
)
SPARSE_REROPE_KEYS = _counter(
    "sparse_rerope_turned_keys_total", "Keys that were rotated for them in each layer.", "keys"
)

#: All metrics by name, in the order of docs/metrics.md.
METRICS = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}

#: Deprecated former names, under which the series are also exported for one release.
FORMER_NAMES = {
    SAVE_BLOCKS.name: "ucm:dump_blocks_total",
    SAVE_BYTES.name: "ucm:dump_bytes_total",
    SAVE_DURATION.name: "ucm:dump_duration_seconds",
    TIER_SAVED_BYTES.name: "ucm:tier_dump_bytes_total",
    TIER_SAVE_SECONDS.name: "ucm:tier_dump_seconds_total",
    TIER_QUARANTINED.name: "ucm:tier_set_aside_blocks_total",
}
FORMER_METRICS = {
    former: replace(METRICS[name], name=former, documentation=f"Deprecated, use {name}.")
    for name, former in FORMER_NAMES.items()
}
