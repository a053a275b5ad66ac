"""Describe which part of the KV a worker holds: its ranks, as a part of its blocks' namespace.

Data-parallel replicas hold the same KV. Under context parallelism nothing is stored.
"""

from __future__ import annotations

from typing import Any

from ucm.compat import layer_specs, optional, rank_of, ranks
from ucm.errors import ConfigError


def is_replicated(vllm_config: Any, spec: Any = None) -> bool:
    """Return whether all tensor-parallel ranks hold the same KV, as with MLA.

    Workers and the scheduler must agree, but for its scheduler vLLM describes a group of several specifications by the
    first of them. So what else may be in the group of a model with MLA, the layers of a draft model, counts by the
    configuration that both have, and a group in which the scheduler would take another layer for MLA is refused.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        spec: The ``KVCacheSpec`` of the KV-cache group; without one, the model's kind of attention decides.

    Raises:
        ConfigError: The first layer has MLA, and another has not.
    """
    draft = optional(vllm_config, "speculative_config.draft_model_config")
    if draft is not None and not optional(draft, "use_mla", False):
        return False
    if spec is None:
        model_config = vllm_config.model_config
        return bool(optional(model_config, "use_mla", False)) and not optional(model_config, "is_hybrid", False)
    specs = layer_specs(spec)
    latent = ["MLA" in type(layer).__name__ or optional(layer, "use_mla", False) for layer in specs.values()]
    if latent[0] and not all(latent):
        raise ConfigError(
            "a KV-cache group has latent attention (MLA) first and other attention beside it: the scheduler does not "
            "learn that its blocks differ between ranks",
            where=f"layer {list(specs)[latent.index(False)]}",
            fix="run this model without a UCM connector",
        )
    return bool(latent[0])


def part_tags(
    vllm_config: Any, group_id: int, *, spec: Any = None, rank: int | None = None, shards: int = 0
) -> list[str]:
    """Return the directory names for all that one worker stores of one KV-cache group.

    Ranks whose KV is the same have the same names.

    Args:
        vllm_config: vLLM's ``VllmConfig``; of the worker, if ``rank`` is not given.
        group_id: The KV-cache group's index.
        spec: The group's ``KVCacheSpec``; None in releases that do not provide it.
        rank: The worker's rank within the engine, in vLLM's order PP x TP; by default this process's.
        shards: The slices of KV heads that a block is stored in, a multiple of the tensor-parallel size; 0: each rank's
            part is one.

    Returns:
        One name, for instance ``tp1of4-pp0of1-g0-b16``; with slices one for each of the worker's, for instance
        ``kv1of4-pp0of1-g0-b16``.
    """
    tp, pp = vllm_config.parallel_config.tensor_parallel_size, vllm_config.parallel_config.pipeline_parallel_size
    stage, place = divmod((rank_of(vllm_config) if rank is None else rank) % (tp * pp), tp)
    own = shards // tp
    if shards:
        heads = [f"kv{place * own + number}of{shards}" for number in range(own)]
    else:
        heads = [f"tpall{tp}" if is_replicated(vllm_config, spec) else f"tp{place}of{tp}"]
    block_size = optional(spec, "block_size") or vllm_config.cache_config.block_size
    return [f"{of_heads}-pp{stage}of{pp}-g{group_id}-b{block_size}" for of_heads in heads]


def rank_tags(vllm_config: Any, group_id: int, *, spec: Any = None, shards: int = 0) -> list[str]:
    """Return the tags of all parts of a group's KV: a block exists if it exists under each of them."""
    every = range(ranks(vllm_config))
    tags = [part_tags(vllm_config, group_id, spec=spec, rank=rank, shards=shards) for rank in every]
    return list(dict.fromkeys(tag for of_rank in tags for tag in of_rank))


def must_save(vllm_config: Any, *, spec: Any = None) -> bool:
    """Return whether this worker saves its part: of several with the same KV, the one with the lowest rank does.

    Args:
        vllm_config: The worker's ``VllmConfig``.
        spec: The group's ``KVCacheSpec``; None in releases that do not provide it.
    """
    is_first = rank_of(vllm_config) % vllm_config.parallel_config.tensor_parallel_size == 0
    return is_first or not is_replicated(vllm_config, spec)
