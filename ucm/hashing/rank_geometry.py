"""Describe which part of the KV a worker holds: its ranks, as a part of its blocks' namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ucm.compat import layer_specs, optional, rank_of
from ucm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """A worker's place in the engine's parallel groups."""

    tp: int
    pcp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The sizes of an engine's parallel groups. Data-parallel replicas hold the same KV and are ignored.

    Args:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dcp: Decode-context-parallel size; its groups lie within the tensor-parallel ones.
        pcp: Prefill-context-parallel size.
        interleave: Consecutive tokens that one context-parallel rank keeps.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    @classmethod
    def of(cls, vllm_config: Any) -> Parallelism:
        """Return the sizes in a ``VllmConfig``; 1 for kinds that the release does not have."""
        config = vllm_config.parallel_config

        def size(*names: str) -> int:
            return max(int(optional(config, name) or 1) for name in names)

        return cls(
            tp=size("tensor_parallel_size"),
            pp=size("pipeline_parallel_size"),
            dcp=size("decode_context_parallel_size"),
            pcp=size("prefill_context_parallel_size"),
            interleave=size("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"),
        )

    def ranks(self, rank: int) -> Ranks:
        """Return a worker's place from its rank within the engine; vLLM's order is PP x PCP x TP."""
        return Ranks(tp=rank % self.tp, pcp=rank // self.tp % self.pcp, pp=rank // (self.tp * self.pcp) % self.pp)


def is_replicated(vllm_config: Any, spec: Any = None) -> bool:
    """Return whether all tensor-parallel ranks hold the same KV: with MLA, apart from context parallelism.

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


def rank_tag(vllm_config: Any, group_id: int, *, spec: Any = None) -> str:
    """Return the only one of `part_tags`, for instance ``tp1of4-pp0of1-g0-b16``, without slices of KV heads."""
    (tag,) = part_tags(vllm_config, group_id, spec=spec)
    return tag


def part_tags(
    vllm_config: Any, group_id: int, *, spec: Any = None, ranks: Ranks | None = None, shards: int = 0
) -> list[str]:
    """Return the directory names for all that one worker stores of one KV-cache group.

    Ranks whose KV is the same have the same names.

    Args:
        vllm_config: vLLM's ``VllmConfig``; of the worker, if ``ranks`` is not given.
        group_id: The KV-cache group's index.
        spec: The group's ``KVCacheSpec``; None in releases that do not provide it.
        ranks: The worker's place; by default this process's.
        shards: The slices of KV heads that a block is stored in, a multiple of the tensor-parallel size; 0: each rank's
            part is one.

    Returns:
        One name; with slices one for each of the worker's, for instance ``kv1of4-pp0of1-g0-b16``.
    """
    sizes = Parallelism.of(vllm_config)
    ranks = ranks or sizes.ranks(rank_of(vllm_config))
    own = shards // sizes.tp
    if shards:
        heads = [f"kv{ranks.tp * own + place}of{shards}" for place in range(own)]
    else:
        heads = [f"tpall{sizes.tp}" if is_replicated(vllm_config, spec) else f"tp{ranks.tp}of{sizes.tp}"]
    parts = [f"pp{ranks.pp}of{sizes.pp}"]
    if sizes.dcp > 1:
        parts.append(f"dcp{ranks.tp % sizes.dcp}of{sizes.dcp}x{sizes.interleave}")
    if sizes.pcp > 1:
        parts.append(f"pcp{ranks.pcp}of{sizes.pcp}x{sizes.interleave}")
    block_size = optional(spec, "block_size") or vllm_config.cache_config.block_size
    return ["-".join([of_heads, *parts, f"g{group_id}", f"b{block_size}"]) for of_heads in heads]


def rank_tags(vllm_config: Any, group_id: int, *, spec: Any = None, shards: int = 0) -> list[str]:
    """Return the tags of all parts of a group's KV: a block exists if it exists under each of them."""
    sizes = Parallelism.of(vllm_config)
    return list(
        dict.fromkeys(
            tag
            for rank in range(sizes.tp * sizes.pcp * sizes.pp)
            for tag in part_tags(vllm_config, group_id, spec=spec, ranks=sizes.ranks(rank), shards=shards)
        )
    )


def must_save(vllm_config: Any, *, spec: Any = None) -> bool:
    """Return whether this worker saves its part: of several with the same KV, the one with the lowest rank does.

    Args:
        vllm_config: The worker's ``VllmConfig``.
        spec: The group's ``KVCacheSpec``; None in releases that do not provide it.
    """
    sizes = Parallelism.of(vllm_config)
    return sizes.ranks(rank_of(vllm_config)).tp < sizes.dcp or not is_replicated(vllm_config, spec)
