"""Translate the configuration files of the original UCM into our names, and keep the place of each setting.

UCM is https://github.com/ModelEngine-Group/unified-cache-management; the keys are those of the examples that it ships.
A key is mapped, or has no effect for a reason that is logged once, or is refused with what to write instead.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.config.document import FILE_KEY, INLINE
from ucm.config.problems import NO_VALUE, Place, RefusedValueError, unknown, wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucm.config.document import Document
    from ucm.errors import ConfigError

#: The place and the original value of each of our fields, by path.
Origins: TypeAlias = "dict[tuple[str, ...], tuple[Place, object]]"

CONNECTORS, NAME, CONFIG, HEALTH = "ucm_connectors", "ucm_connector_name", "ucm_connector_config", "store_health"
#: The key of the sparse method, and UCM's name for blending in it.
SPARSE, BLEND = "ucm_sparse_config", "Blend"
PIPELINE_NAME = "UcmPipelineStore"
#: Each ``ucm_connector_name`` of a store with one tier.
STORE_NAMES = {"UcmNfsStore": "Posix", "UcmPosixStore": "Posix"}
PIPELINES = ("Cache|Posix", "Dram", "Empty", "Posix")
#: Each ``store_pipeline`` that we do not have, and the alternative.
PIPELINES_NOT_IN_THIS_VERSION = {
    "Cache|Compress|Posix": "use 'Cache|Posix': blocks are stored as they are",
    "Cache|Ds3fs": "use 'Cache|Posix' on the mount",
    "Mooncake|Posix": "engines lend no memory here: use 'Posix|Mooncake' in our format, as docs/store.md says",
}


def _same(value: object) -> object:
    return value


def _layerwise(value: object) -> object:
    if not isinstance(value, bool):
        raise RefusedValueError("neither true nor false", "write true or false")
    return "layerwise" if value else "direct"


def _one_more(value: object) -> object:
    """UCM loads hits of more than this many tokens; we load hits of at least this many."""
    return value + 1 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


def _directories(value: object) -> object:
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


def _gib(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RefusedValueError("not a number of 0 or more", "write a number of GiB; 0 is the same as none at all")
    return int(value * (1 << 30)) or None


#: Top-level keys with another name here, and what to do with their values.
RENAMED: dict[str, tuple[str, Callable[[object], object]]] = {
    "enable_metrics": ("metrics", _same),
    "load_tokens_threshold": ("min_hit_tokens", _one_more),
    "use_layerwise": ("connector", _layerwise),
}
#: The same for ``ucm_connector_config``.
STORE_RENAMED: dict[str, tuple[str, Callable[[object], object]]] = {
    "cache_buffer_capacity_gb": ("dram_capacity", _gib),
    "posix_capacity_gb": ("posix_capacity", _gib),
    "storage_backends": ("directories", _directories),
    f"{HEALTH}.failure_threshold": ("failures_until_rest", _same),
    f"{HEALTH}.health_check_interval_s": ("rest_seconds", _same),
}
#: Top-level keys that are refused, and what to write instead.
REFUSED = {
    NAME: f"write {CONNECTORS}: [{{{NAME}: …, {CONFIG}: {{…}}}}]",
    CONFIG: f"write {CONNECTORS}: [{{{NAME}: …, {CONFIG}: {{…}}}}]",
    "ucm_sparse_method": f"write {SPARSE}: {{<method>: {{}}}}",
    "use_inference_duration_monitor": "vLLM's own request metrics show these durations",
    "use_lite": "to measure the share of hits alone, use `connector: mock` with `hit_ratio: 0`",
}
_NO_TIMEOUT = "a transfer ends when the medium answers; requests are recomputed meanwhile, not failed"
#: Top-level keys that have no effect, as regular expressions, and why.
WITHOUT_EFFECT = {
    "enable_event_sync": "a save always waits for the step that computes its blocks",
    "enable_record_traces": "requests are not traced; ucm:queried_tokens_total and ucm:hit_tokens_total count them",
    "inference_duration_monitor_fake_hit_ratio": "there is no such monitor",
    "load_only_first_rank": "every rank loads what it needs itself",
    "metrics_config_path": "all metrics are exported as vLLM's are; metrics_log_interval is that of the log",
    "persist_token_threshold": "short requests are saved as well; min_hit_tokens is the shortest hit that is loaded",
    "timeout_ms": _NO_TIMEOUT,
    "wa_dump_block_wise": "every whole block is saved",
}
#: The same for ``ucm_connector_config``.
STORE_WITHOUT_EFFECT = {
    "kv_block_size": "the geometry of a block is read from the KV cache itself",
    "buffer_(number|size)|(running|waiting)_queue_depth": "store.save_queue says how many bytes may wait to be written",
    "cache_(io_aggregation|load_backend_only|sdma_direct)|use_gdr": "the device interface decides how to copy",
    "drampool_.*|(local|node|router|transport)_.*|(lookup|dump|load)_timeout_ms|max_io_entries|reconnect_interval_ms": (
        "it belongs to the pooled DRAM store"
    ),
    "posix_gc_.*": "when a capacity is set, the blocks unused for longest go as soon as it is reached",
    "posix_io_engine|io_direct": "there is one way to read and write, through the page cache",
    "shard_data_dir": "blocks always lie in subdirectories",
    "share_buffer_(capacity_gb|enable)": "all ranks of a host share the Dram tier",
    "stream_number|posix_.*_concurrency": "store.load_threads and store.save_threads say how many threads there are",
    rf"{HEALTH}\.(enabled|health_check_timeout_s|health_window_size)": (
        "a directory that fails always rests for a while; store.failures_until_rest and store.rest_seconds say when"
    ),
    "timeout_ms": _NO_TIMEOUT,
}


@dataclass
class Translation:
    """Settings in our names.

    Attributes:
        top: The place reported for a field that was not written.
        settings: The settings, not yet validated field by field.
        origins: The origin of each setting that had another name or place.
        notices: Settings that are recognised but have no effect, one sentence each.
        problems: Settings that are not recognised.
    """

    top: Place
    settings: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, path: tuple[str, ...], value: object, place: Place, written: object) -> None:
        """Set one of our fields, and record where it was written."""
        target = self.settings
        for step in path[:-1]:
            target = target.setdefault(step, {})
        target[path[-1]] = value
        self.origins[path] = (place, written)

    def origin(self, path: tuple[str | int, ...], found: object = NO_VALUE) -> tuple[Place, object]:
        """Return where one of our fields was written, and its original value.

        Args:
            path: The field, or an element of it.
            found: Its current value, if known.
        """
        for length in range(len(path), 0, -1):
            place, written = self.origins.get(tuple(map(str, path[:length])), (None, None))
            if place is not None:
                rest = path[length:]
                return place.inside(*rest), found if rest else written
        return self.top.inside(*path), NO_VALUE

    def refuse(self, place: Place, what: str, fix: str, value: object) -> None:
        """Note a problem."""
        self.problems.append(wrong(place, what, fix, value))

    def without_effect(self, place: Place, reason: str) -> None:
        """Note a key that is recognised but has no effect."""
        self.notices.append(f"{place} has no effect here: {reason}")


def translate(document: Document, own: Iterable[str]) -> Translation:
    """Translate a document's settings into our names."""
    ours = frozenset(own)
    out = Translation(Place(str(document.file or INLINE)))
    for key, value in document.settings.items():
        place = document.place(key)
        rival = "store" if key == CONNECTORS else RENAMED[key][0] if key in RENAMED else None
        if rival in document.settings:
            out.refuse(place, f"sets the same as {rival}", "keep one of the two", value)
        elif key == SPARSE and isinstance(value, dict) and BLEND in value:
            _blend(out, place, value)
        elif key in ours:
            out.put((key,), value, place, value)
        elif key == CONNECTORS:
            _connectors(out, place, value)
        elif key in REFUSED and value is not False:
            out.refuse(place, f"{key} is not in this version", REFUSED[key], value)
        elif key in REFUSED:
            out.without_effect(place, "it is not in this version")
        elif not _by_table(out, (), place, key, value, RENAMED, WITHOUT_EFFECT):
            known = {*ours, *RENAMED, *WITHOUT_EFFECT, CONNECTORS}
            out.problems.append(unknown(place, value, known | ({FILE_KEY} if document.file is None else set())))
    return out


def _by_table(
    out: Translation,
    path: tuple[str, ...],
    place: Place,
    key: str,
    value: object,
    renamed: Mapping[str, tuple[str, Callable[[object], object]]],
    ignored: Mapping[str, str],
) -> bool:
    """Translate one key below a path of ours; return False if no table has it."""
    if key in renamed:
        name, convert = renamed[key]
        try:
            found = convert(value)
        except RefusedValueError as error:
            out.refuse(place, error.what, error.fix, value)
            return True
        if found is None:
            out.without_effect(place, "it is the default")
        else:
            out.put((*path, name), found, place, value)
        return True
    reason = next((why for pattern, why in ignored.items() if re.fullmatch(pattern, key)), None)
    if reason is not None:
        out.without_effect(place, reason)
    return reason is not None


def _connectors(out: Translation, place: Place, value: object) -> None:
    """Translate the only one of UCM's connectors into our ``store``."""
    if not isinstance(value, list) or len(value) != 1:
        number = f"{len(value)} connectors" if isinstance(value, list) else "not a list"
        out.refuse(place, f"{number}, where one is expected", f"write a list of one: [{{{NAME}: …}}]", value)
        return
    place, connector = place.inside(0), value[0]
    if not isinstance(connector, dict):
        out.refuse(place, "not a mapping", f"write {{{NAME}: …, {CONFIG}: {{…}}}}", connector)
        return
    for key in connector.keys() - {NAME, CONFIG}:
        if key == "ucm_connector_module_path":
            fix = "write store: {pipeline: 'module:Class', options: {…}} in its place"
            out.refuse(place.inside(key), "a store of your own is named in our format", fix, connector[key])
        else:
            out.problems.append(unknown(place.inside(str(key)), connector[key], (NAME, CONFIG)))
    within, config = place.inside(CONFIG), connector.get(CONFIG, {})
    if not isinstance(config, dict):
        out.refuse(within, "not a mapping", "write {storage_backends: …}", config)
        return
    out.origins[("store",)] = (within, NO_VALUE)
    if _pipeline(out, place, connector, config):
        for key, one in config.items():
            _store_key(out, within, str(key), one)


def _pipeline(out: Translation, place: Place, connector: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Set the pipeline; return False if the store is unclear or not ours."""
    name = connector.get(NAME, NO_VALUE)
    if isinstance(name, str) and name in STORE_NAMES:
        out.put(("store", "pipeline"), STORE_NAMES[name], place.inside(NAME), name)
        return True
    if name != PIPELINE_NAME:
        what = "a store without a name" if name is NO_VALUE else f"there is no store {name!r} in this version"
        out.refuse(place.inside(NAME), what, f"use one of {', '.join([PIPELINE_NAME, *STORE_NAMES])}", name)
        return False
    pipeline = config.get("store_pipeline", "Cache|Posix")
    where = place.inside(CONFIG, "store_pipeline")
    if pipeline in PIPELINES:
        out.put(("store", "pipeline"), pipeline, where, config.get("store_pipeline", NO_VALUE))
        return True
    fix = f"use one of {', '.join(PIPELINES)}"
    if isinstance(pipeline, str):
        fix = PIPELINES_NOT_IN_THIS_VERSION.get(pipeline, fix)
    out.refuse(where, "this pipeline is not in this version", fix, pipeline)
    return False


def _store_key(out: Translation, within: Place, key: str, value: object) -> None:
    place = within.inside(key)
    if key == HEALTH and isinstance(value, dict):
        for name, one in value.items():
            _store_key(out, within, f"{HEALTH}.{name}", one)
    elif key == HEALTH:
        out.refuse(place, "not a mapping", "write {enabled: …}", value)
    elif key != "store_pipeline" and not _by_table(
        out, ("store",), place, key, value, STORE_RENAMED, STORE_WITHOUT_EFFECT
    ):
        out.problems.append(unknown(place, value, {"store_pipeline", *STORE_RENAMED}))


def _blend(out: Translation, place: Place, value: dict[str, object]) -> None:
    """Translate UCM's blending; it selects tokens by their deviation in one layer, where ours asks the question."""
    place, options = place.inside(BLEND), value[BLEND]
    if len(value) > 1 or not isinstance(options, dict):
        out.refuse(
            place,
            "must be a mapping, and cannot be combined with a sparse method",
            f"write {{{BLEND}: {{…}}}} alone",
            value,
        )
        return
    out.put(("blend", "select"), "question", place, options)
    for key, written in options.items():
        at = place.inside(str(key))
        if key == "chunk_end_token_id":
            out.put(("blend", "chunk_end_token_ids"), written, at, written)
        elif key == "compute_meta":
            _ratio(out, at, written)
        else:
            out.problems.append(unknown(at, written, ("chunk_end_token_id", "compute_meta")))


def _ratio(out: Translation, place: Place, value: object) -> None:
    items = list(value.items()) if isinstance(value, dict) else []
    told = items[0][1] if len(items) == 1 else None
    if not isinstance(told, dict) or set(told) != {"ratio"}:
        fix = "write {model.layers.1.self_attn.attn: {ratio: 0.2}}"
        out.refuse(place, "must be one layer with the ratio to compute after it", fix, value)
        return
    layer = place.inside(str(items[0][0]))
    out.without_effect(layer, "the question selects the tokens, not what a layer computes")
    out.put(("blend", "ratio"), told["ratio"], layer.inside("ratio"), told["ratio"])
