"""Translate the original UCM's configuration into our names, and keep the place of each setting.

UCM is https://github.com/ModelEngine-Group/unified-cache-management; the keys are those of its examples, its
documents and its stores from 0.1 to 0.8. A key is either mapped, or listed here with the reason why it has no effect,
which is logged once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.config.document import FILE_KEY
from ucm.config.problems import NO_VALUE, Place, unknown, wrong
from ucm.config.settings import ONLY_WITH
from ucm.store.config import pipeline_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucm.config.document import Document
    from ucm.errors import ConfigError

#: The place and the original value of each of our fields, by path.
Origins: TypeAlias = "dict[tuple[str, ...], tuple[Place, object]]"

_THREADS = "store.load_threads and store.save_threads say how many threads transfer blocks"
_LAYOUT = "the geometry of a block is read from the KV cache itself"
_QUEUES = "store.save_queue says how many bytes may wait to be written"
_GC = "when a capacity is set, the blocks unused for longest go as soon as it is reached"
_DEVICE = "the device interface decides how to copy between device and host"
_HEALTH = "a directory that fails always rests for a while; store.failures_until_rest and store.rest_seconds say when"
_NO_TIMEOUT = "a transfer ends when the medium answers; requests are recomputed meanwhile, not failed"
_SAFE_SAVE = "a save always waits for the step that computes its blocks"

#: Top-level keys.
TOP_LEVEL_WITHOUT_EFFECT = {
    "enable_event_sync": _SAFE_SAVE,
    "enable_record_traces": "requests are not traced; ucm:queried_tokens_total and ucm:hit_tokens_total count them",
    "inference_duration_monitor_fake_hit_ratio": "there is no such monitor",
    "load_only_first_rank": "every rank loads what it needs itself",
    "persist_token_threshold": "short requests are saved as well; min_hit_tokens is the shortest hit that is loaded",
    "timeout_ms": _NO_TIMEOUT,
    "transferIoSize": _LAYOUT,
    "wa_dump_block_wise": "every whole block is saved",
}

#: Top-level keys that, if true, enable something other than prefix caching.
MODES_NOT_IN_THIS_VERSION = {
    "use_lite": "to measure the share of hits alone, use `connector: mock` with `hit_ratio: 0`",
    "use_inference_duration_monitor": "vLLM's own request metrics show these durations",
}

#: Keys of ``ucm_connector_config``.
STORE_WITHOUT_EFFECT = {
    "backend": _LAYOUT,
    "block_size": _LAYOUT,
    "buffer_number": _QUEUES,
    "buffer_size": _QUEUES,
    "cache_io_aggregation": _DEVICE,
    "cache_load_backend_only": "a block is loaded from the fastest tier that has it",
    "cache_sdma_direct": _DEVICE,
    "cpu_affinity_cores": "threads run where the operating system puts them",
    "device": _DEVICE,
    "device_id": _DEVICE,
    "engine_id": "engines share blocks by content, whichever engine stored them",
    "gpu_kv_buffer_addrs": _LAYOUT,
    "gpu_kv_buffer_sizes": _LAYOUT,
    "io_size": _LAYOUT,
    "kv_block_size": _LAYOUT,
    "local_rank_size": _LAYOUT,
    "posix_commit_concurrency": _THREADS,
    "posix_data_trans_concurrency": _THREADS,
    "posix_gc_check_interval_sec": _GC,
    "posix_gc_concurrency": _GC,
    "posix_gc_enable": _GC,
    "posix_gc_max_recycle_count_per_shard": _GC,
    "posix_gc_precise_mode": _GC,
    "posix_gc_recycle_percent": _GC,
    "posix_gc_shard_sample_ratio": _GC,
    "posix_gc_task_timeout_ms": _GC,
    "posix_gc_trigger_threshold_ratio": _GC,
    "posix_io_engine": "there is one way to read and write; store.direct_io bypasses the page cache",
    "posix_lookup_concurrency": _THREADS,
    "posix_open_concurrency": _THREADS,
    "recycleEnable": _GC,
    "recycleThresholdRatio": _GC,
    "role": "vLLM says which side a connector is on",
    "running_queue_depth": _QUEUES,
    "shard_data_dir": "blocks always lie in subdirectories",
    "shard_size": _LAYOUT,
    "share_buffer_enable": "all ranks of a host share the Dram tier",
    "share_buffer_capacity_gb": "it sizes the buffer of a store that is not in this version",
    "stream_number": _THREADS,
    "tensor_size": _LAYOUT,
    "tensor_size_list": _LAYOUT,
    "timeout_ms": _NO_TIMEOUT,
    "transferIoSize": _LAYOUT,
    "transferStreamNumber": _THREADS,
    "transfer_enable": "vLLM says which side a connector is on",
    "transfer_stream_number": _THREADS,
    "transfer_timeout_ms": _NO_TIMEOUT,
    "unique_id": "engines share blocks by content, whichever engine stored them",
    "use_gdr": _DEVICE,
    "use_scatter_gather": _DEVICE,
    "waiting_queue_depth": _QUEUES,
}

#: Keys of ``ucm_connector_config.store_health``, a circuit breaker around a store.
HEALTH_WITHOUT_EFFECT = dict.fromkeys(("enabled", "health_check_timeout_s", "health_window_size"), _HEALTH)
#: The keys of ``store_health`` that have another name here.
HEALTH_RENAMED = {"failure_threshold": "failures_until_rest", "health_check_interval_s": "rest_seconds"}

#: Keys of ``ucm_connector_config`` for stores that we do not have.
OTHER_STORES = {
    "compress": ("compress_ratio", "data_type", "decompress_thread_num"),
    "mooncake": (
        "global_segment_size_gb",
        "local_hostname",
        "master_server_address",
        "metadata_server",
        "protocol",
        "replica_num",
    ),
    "pooled DRAM": (
        "drampool_resource_log_path",
        "dump_timeout_ms",
        "load_timeout_ms",
        "local_control_endpoint",
        "local_host",
        "local_transport_manager_id",
        "lookup_timeout_ms",
        "max_io_entries",
        "node_control_endpoints",
        "node_runner_count",
        "node_transport_manager_ids",
        "reconnect_interval_ms",
        "router_type",
        "transport_worker_count",
    ),
    "ASU": ("kv_ns_ids",),
}
#: The same, by prefix.
OTHER_STORES_PREFIXES = {"asu_": "ASU", "delegator_": "Delegator", "yuanrong_": "YuanRong"}

#: Each ``ucm_connector_name`` of a single-tier store, and our name for it.
STORE_NAMES = {
    "UcmDram": "Dram",
    "UcmDramStore": "Dram",
    "UcmFsStore": "Posix",
    "UcmNfsStore": "Posix",
    "UcmPosixStore": "Posix",
}
PIPELINE_NAME = "UcmPipelineStore"

#: Each ``store_pipeline`` of UCM that has another name here.
PIPELINES = {"Cache|Ds3fs": "Cache|Posix", "Cache|Empty": "Dram", "Ds3fs": "Posix"}
#: Each ``store_pipeline`` and ``ucm_connector_name`` of UCM that we do not have, and the alternative.
PIPELINES_NOT_IN_THIS_VERSION = {
    "Cache|Compress|Posix": "use 'Cache|Posix': blocks are stored as they are",
    "Cache|Fake": "use 'Dram', or 'Empty' to measure without a store",
    "Mooncake|Posix": "engines lend no memory here: use 'Posix|Mooncake' in our format, as docs/store.md says",
    "Fake": "use 'Empty' to measure without a store; a store that returns other data than it was given is not offered",
}

GIB = 1 << 30

CONNECTORS, NAME, CONFIG = "ucm_connectors", "ucm_connector_name", "ucm_connector_config"
MODULE = "ucm_connector_module_path"
#: The key of the sparse method, and UCM's name for blending in it.
SPARSE, BLEND = "ucm_sparse_config", "Blend"
#: In UCM's older files, the keys of the only connector are at the top level.
_ONE_CONNECTOR = (NAME, CONFIG, MODULE)


@dataclass
class Translation:
    """Settings in our names.

    Attributes:
        settings: The settings, not yet validated field by field.
        origins: The origin of each setting that had another name or place.
        notices: Settings that are recognised but have no effect, one sentence each.
        problems: Settings that are not recognised.
    """

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

    def origin(self, path: tuple[str | int, ...], top: Place, found: object = NO_VALUE) -> tuple[Place, object]:
        """Return where one of our fields was written, and its original value.

        Args:
            path: The field, or an element of it.
            top: The place reported for a field that was not written.
            found: Its current value, if known.
        """
        for length in range(len(path), 0, -1):
            place, written = self.origins.get(tuple(map(str, path[:length])), (None, None))
            if place is not None:
                rest = path[length:]
                return place.inside(*rest), found if rest else written
        return top.inside(*path), NO_VALUE

    def refuse(self, place: Place, what: str, fix: str, value: object) -> None:
        """Note a problem."""
        self.problems.append(wrong(place, what, fix, value))

    def without_effect(self, place: Place, reason: str) -> None:
        """Note a key that is recognised but has no effect."""
        self.notices.append(f"{place} has no effect here: {reason}")


def other_store(key: str) -> str | None:
    """Return the unsupported store to which a key of ``ucm_connector_config`` belongs, or None."""
    for name, keys in OTHER_STORES.items():
        if key in keys:
            return name
    return next((name for prefix, name in OTHER_STORES_PREFIXES.items() if key.startswith(prefix)), None)


def translate_store(out: Translation, place: Place, connector: Mapping[str, Any]) -> None:
    """Translate one connector of UCM into our ``store``.

    Args:
        out: Collects the result.
        place: The connector's place.
        connector: Its ``ucm_connector_name``, ``ucm_connector_config`` and ``ucm_connector_module_path``.
    """
    within = place.inside("ucm_connector_config")
    config = connector.get("ucm_connector_config", {})
    if not isinstance(config, dict):
        out.refuse(within, "not a mapping", "write {storage_backends: …}", config)
        return
    for key in ("ucm_connector_name", "ucm_connector_module_path"):
        if not isinstance(connector.get(key, ""), str):
            out.refuse(place.inside(key), "not a text", "write a name", connector[key])
            return
    out.origins[("store",)] = (within, NO_VALUE)
    if "ucm_connector_module_path" in connector:
        _custom(out, place, connector)
    elif _pipeline(out, place, connector, config):
        for key, value in config.items():
            _store_key(out, within.inside(str(key)), str(key), value)


def _custom(out: Translation, place: Place, connector: Mapping[str, Any]) -> None:
    """Translate a store of the user's own, which has its own settings."""
    module = connector["ucm_connector_module_path"]
    where = place.inside("ucm_connector_module_path")
    out.put(("store", "pipeline"), f"{module}:{connector.get('ucm_connector_name', '')}", where, module)
    config = connector.get("ucm_connector_config", {})
    out.put(("store", "options"), config, place.inside("ucm_connector_config"), config)


def _pipeline(out: Translation, place: Place, connector: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Set the pipeline; return False if the store is unclear or not ours."""
    name_place = place.inside("ucm_connector_name")
    name = connector.get("ucm_connector_name", NO_VALUE)
    if name in STORE_NAMES:
        out.put(("store", "pipeline"), STORE_NAMES[name], name_place, name)
        return True
    if name != PIPELINE_NAME:
        known = ", ".join([PIPELINE_NAME, *STORE_NAMES])
        what = "a store without a name" if name is NO_VALUE else f"there is no store {name!r} in this version"
        out.refuse(name_place, what, f"use one of {known}, or name the module of your own class", name)
        return False
    pipeline = config.get("store_pipeline", "Cache|Posix")
    pipeline_place = place.inside("ucm_connector_config", "store_pipeline")
    if not isinstance(pipeline, str):
        out.refuse(pipeline_place, "not a text", "write it in quotes", pipeline)
        return False
    if pipeline in PIPELINES:
        out.notices.append(f"{pipeline_place}: {pipeline!r} is called {PIPELINES[pipeline]!r} here")
        pipeline = PIPELINES[pipeline]
    ours = ("Cache|Posix", "Dram", "Empty", "Posix")
    if pipeline not in ours:
        fix = PIPELINES_NOT_IN_THIS_VERSION.get(pipeline, f"use one of {', '.join(ours)}")
        out.refuse(pipeline_place, "this pipeline is not in this version", fix, pipeline)
        return False
    out.put(("store", "pipeline"), pipeline, pipeline_place, config.get("store_pipeline", NO_VALUE))
    return True


def _store_key(out: Translation, place: Place, key: str, value: object) -> None:
    if key in _STORE_READERS:
        field, read = _STORE_READERS[key]
        pipeline = out.settings["store"]["pipeline"]
        if not ONLY_WITH[field] & set(pipeline_parts(pipeline)):
            out.without_effect(place, f"it does not apply to the store {pipeline!r}")
            return
        found = read(out, place, value)
        if found is not NO_VALUE:
            out.put(("store", field), found, place, value)
    elif key == "store_health":
        _health(out, place, value)
    elif key in STORE_WITHOUT_EFFECT:
        out.without_effect(place, STORE_WITHOUT_EFFECT[key])
    elif other := other_store(key):
        out.without_effect(place, f"it belongs to the {other} store")
    elif key != "store_pipeline":
        known = {"store_pipeline", "store_health", *_STORE_READERS, *STORE_WITHOUT_EFFECT}
        out.problems.append(unknown(place, value, known))


def _health(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, dict):
        out.refuse(place, "not a mapping", "write {enabled: …}", value)
        return
    for key, one in value.items():
        within = place.inside(str(key))
        if key in HEALTH_RENAMED:
            out.put(("store", HEALTH_RENAMED[key]), one, within, one)
        elif key in HEALTH_WITHOUT_EFFECT:
            out.without_effect(within, HEALTH_WITHOUT_EFFECT[key])
        else:
            out.problems.append(unknown(within, one, {*HEALTH_WITHOUT_EFFECT, *HEALTH_RENAMED}))


def _as_it_is(_out: Translation, _place: Place, value: object) -> object:
    return value


def _directories(out: Translation, place: Place, value: object) -> object:
    """Accept directories separated by colons, as in UCM, and a list."""
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        out.refuse(place, "neither a path nor paths", "write '/a', '/a:/b' or a list of paths", value)
        return NO_VALUE
    found = [part for part in parts if part]
    if not found:
        out.refuse(place, "names no directory", "name one", value)
        return NO_VALUE
    return found


def _size(unit: int) -> Callable[[Translation, Place, object], object]:
    """Return a reader of a capacity in a unit; 0 means the default."""

    def read(out: Translation, place: Place, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            out.refuse(place, "not a number of 0 or more", "write a number; 0 is the same as none at all", value)
            return NO_VALUE
        return int(value * unit) or None

    return read


_STORE_READERS: dict[str, tuple[str, Callable[[Translation, Place, object], object]]] = {
    "backends": ("directories", _directories),
    "cache_buffer_capacity_gb": ("dram_capacity", _size(GIB)),
    "capacity": ("dram_capacity", _size(1)),
    "io_direct": ("direct_io", _as_it_is),
    "max_cache_size": ("dram_capacity", _size(1)),
    "posix_capacity_gb": ("posix_capacity", _size(GIB)),
    "storageCapacity": ("posix_capacity", _size(1)),
    "storage_backends": ("directories", _directories),
    "transferIoDirect": ("direct_io", _as_it_is),
    "transfer_io_direct": ("direct_io", _as_it_is),
    "useDirect": ("direct_io", _as_it_is),
    "use_direct": ("direct_io", _as_it_is),
}


def translate(document: Document, own: Iterable[str]) -> Translation:
    """Translate a document's settings into our names.

    Args:
        document: The settings in our format, UCM's, or a mixture.
        own: The names of our top-level settings.
    """
    ours = frozenset(own)
    out = Translation()
    for key, value in document.settings.items():
        place = document.place(key)
        rival = next((name for name in _SAME_THING.get(key, ()) if name in document.settings), None)
        if rival is not None:
            out.refuse(place, f"sets the same as {rival}", "keep one of the two", value)
        elif key == SPARSE and isinstance(value, dict) and BLEND in value:
            _blend(out, place, value)
        elif key in ours:
            out.put((key,), value, place, value)
        elif key in _READERS:
            _READERS[key](out, place, value)
        elif key in TOP_LEVEL_WITHOUT_EFFECT:
            out.without_effect(place, TOP_LEVEL_WITHOUT_EFFECT[key])
        elif key in MODES_NOT_IN_THIS_VERSION:
            _mode(out, place, key, value)
        elif key not in _ONE_CONNECTOR:
            known = {*ours, *_READERS, *TOP_LEVEL_WITHOUT_EFFECT, *MODES_NOT_IN_THIS_VERSION}
            known |= {FILE_KEY} if document.file is None else set()
            out.problems.append(unknown(place, value, known))
    older = {key: document.settings[key] for key in _ONE_CONNECTOR if key in document.settings}
    if older and not {"store", CONNECTORS} & document.settings.keys():
        translate_store(out, Place(document.place(next(iter(older))).source), older)
    return out


def _use_layerwise(out: Translation, place: Place, value: object) -> None:
    if isinstance(value, bool):
        out.put(("connector",), "layerwise" if value else "direct", place, value)
    else:
        out.refuse(place, "neither true nor false", "write true or false", value)


def _enable_metrics(out: Translation, place: Place, value: object) -> None:
    out.put(("metrics",), value, place, value)


def _load_tokens_threshold(out: Translation, place: Place, value: object) -> None:
    # UCM loads hits of more than this many tokens; we load hits of at least this many.
    at_least = value + 1 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value
    out.put(("min_hit_tokens",), at_least, place, value)


def _sparse_method(out: Translation, place: Place, value: object) -> None:
    out.put(("ucm_sparse_config",), {value: {}} if isinstance(value, str) else value, place, value)


def _blend(out: Translation, place: Place, value: dict[str, object]) -> None:
    """Translate UCM's blending, which selects tokens by their deviation in one layer."""
    place, options = place.inside(BLEND), value[BLEND]
    if len(value) > 1 or not isinstance(options, dict):
        out.refuse(
            place,
            "must be a mapping, and cannot be combined with a sparse method",
            f"write {{{BLEND}: {{…}}}} alone",
            value,
        )
        return
    out.put(("blend", "select"), "deviation", place, options)
    for key, written in options.items():
        at = place.inside(str(key))
        if key == "chunk_end_token_id":
            out.put(("blend", "chunk_end_token_ids"), written, at, written)
        elif key == "compute_meta":
            _check_layer(out, at, written)
        else:
            out.problems.append(unknown(at, written, ("chunk_end_token_id", "compute_meta")))


def _check_layer(out: Translation, place: Place, value: object) -> None:
    items = list(value.items()) if isinstance(value, dict) else []
    numbers = re.findall(r"\d+", str(items[0][0])) if len(items) == 1 else []
    told = items[0][1] if numbers else None
    if not isinstance(told, dict) or set(told) != {"ratio"}:
        fix = "write {model.layers.1.self_attn.attn: {ratio: 0.2}}"
        out.refuse(place, "must be one layer with the ratio to compute after it", fix, value)
        return
    out.put(("blend", "check_layer"), int(numbers[0]), place.inside(str(items[0][0])), value)
    out.put(("blend", "ratio"), told["ratio"], place.inside(str(items[0][0]), "ratio"), told["ratio"])


def _mode(out: Translation, place: Place, key: str, value: object) -> None:
    if value is False:
        out.without_effect(place, "this mode is not in this version")
    else:
        out.refuse(place, f"{key} is not in this version", MODES_NOT_IN_THIS_VERSION[key], value)


def _connectors(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, list) or len(value) != 1:
        number = f"{len(value)} connectors" if isinstance(value, list) else "not a list"
        out.refuse(place, f"{number}, where one is expected", f"write a list of one: [{{{NAME}: …}}]", value)
    else:
        _connector(out, place.inside(0), value[0])


def _connector(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, dict):
        out.refuse(place, "not a mapping", f"write {{{NAME}: …, {CONFIG}: {{…}}}}", value)
        return
    for key in value.keys() - {NAME, CONFIG, MODULE}:
        out.problems.append(unknown(place.inside(str(key)), value[key], (NAME, CONFIG, MODULE)))
    translate_store(out, place, value)


_READERS: dict[str, Callable[[Translation, Place, object], None]] = {
    CONNECTORS: _connectors,
    "enable_metrics": _enable_metrics,
    "load_tokens_threshold": _load_tokens_threshold,
    "ucm_sparse_method": _sparse_method,
    "use_layerwise": _use_layerwise,
}

#: Keys of UCM that must not be combined with another of the same meaning.
_SAME_THING = {
    CONNECTORS: ("store",),
    NAME: ("store", CONNECTORS),
    CONFIG: ("store", CONNECTORS),
    "enable_metrics": ("metrics",),
    "load_tokens_threshold": ("min_hit_tokens",),
    "ucm_sparse_method": ("ucm_sparse_config",),
    "use_layerwise": ("connector",),
}
