"""The keys of UCM's own configuration files, and the treatment of each.

UCM is https://github.com/ModelEngine-Group/unified-cache-management; the keys are those of its examples, its
documents and its stores from 0.1 to 0.8. A key is either mapped (see ``ucm.config.upstream``), or listed here with the
reason why it has no effect, which is logged once.
"""

from __future__ import annotations

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
    "Fake": "use 'Empty' to measure without a store; a store that returns other data than it was given is not offered",
}


def other_store(key: str) -> str | None:
    """Return the unsupported store to which a key of ``ucm_connector_config`` belongs, or None."""
    for name, keys in OTHER_STORES.items():
        if key in keys:
            return name
    return next((name for prefix, name in OTHER_STORES_PREFIXES.items() if key.startswith(prefix)), None)
