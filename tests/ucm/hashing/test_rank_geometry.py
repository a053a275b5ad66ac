"""The namespace of each worker's part of the KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ucm.hashing.stand_ins import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from ucm.errors import ConfigError
from ucm.hashing.rank_geometry import is_replicated, must_save, part_tags, rank_tags


@dataclass
class FullAttentionSpec:
    """``vllm.v1.kv_cache_interface``; ``use_mla`` up to 0.10.2"""

    block_size: int = 16
    use_mla: bool = False


class MLAAttentionSpec(FullAttentionSpec):
    """``vllm.v1.kv_cache_interface``, from 0.11.0 on"""


class MambaSpec(FullAttentionSpec):
    """``vllm.v1.kv_cache_interface``"""


@dataclass
class UniformTypeKVCacheSpecs:
    """``vllm.v1.kv_cache_interface``"""

    block_size: int = 16
    kv_cache_specs: dict[str, Any] = field(default_factory=dict)


def config(rank: int = 0, sizes: dict[str, int] | None = None, *, mla: bool = False) -> VllmConfig:
    return VllmConfig(ModelConfig("m", use_mla=mla), CacheConfig(), ParallelConfig(rank=rank, **(sizes or {})))


def sized(tp: int = 1, pp: int = 1) -> dict[str, int]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}


def test_a_tag_says_what_it_is() -> None:
    assert part_tags(config(), 0) == ["tp0of1-pp0of1-g0-b16"]
    assert part_tags(config(5, sized(4, 2)), 3) == ["tp1of4-pp1of2-g3-b16"]


def test_geometries_share_no_tag() -> None:
    tags = []
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        for group, spec in ((0, None), (1, None), (0, FullAttentionSpec(32)), (0, MLAAttentionSpec(16))):
            tags += rank_tags(config(sizes=sized(tp, pp)), group, spec=spec)
    assert len(set(tags)) == len(tags)
    assert len(tags) == 3 * (1 + 2 + 4 + 2 + 4) + (1 + 1 + 1 + 2 + 2)


@pytest.mark.parametrize("sizes", [sized(), sized(4), sized(2, 3)])
def test_the_workers_tags_are_those_that_the_scheduler_looks_for(sizes: dict[str, int]) -> None:
    world = 1
    for size in sizes.values():
        world *= size
    workers = [tag for rank in range(world) for tag in part_tags(config(rank, sizes), 0)]
    assert workers == rank_tags(config(sizes=sizes), 0)
    assert len(set(workers)) == world


def test_of_replicated_kv_one_copy_is_kept_and_one_rank_saves_it() -> None:
    workers = [config(rank, sized(4, 2), mla=True) for rank in range(8)]
    savers = [tag for worker in workers if must_save(worker) for tag in part_tags(worker, 0)]
    assert savers == rank_tags(workers[0], 0)
    assert len(set(savers)) == len(savers) == 2
    assert {tag for worker in workers for tag in part_tags(worker, 0)} == set(savers)


def test_every_rank_saves_what_only_it_has() -> None:
    assert all(must_save(config(rank, sized(4))) for rank in range(4))


@pytest.mark.parametrize(
    ("spec", "mla", "replicated"),
    [
        (None, False, False),
        (None, True, True),
        (FullAttentionSpec(), True, False),
        (FullAttentionSpec(use_mla=True), True, True),
        (MLAAttentionSpec(), True, True),
        (MambaSpec(), True, False),
        (UniformTypeKVCacheSpecs(kv_cache_specs={"a": MLAAttentionSpec(), "b": MLAAttentionSpec()}), True, True),
        (UniformTypeKVCacheSpecs(kv_cache_specs={"a": FullAttentionSpec(), "b": MLAAttentionSpec()}), True, False),
    ],
)
def test_whose_kv_is_replicated(spec: Any, *, mla: bool, replicated: bool) -> None:
    assert is_replicated(config(mla=mla), spec) == replicated


@pytest.mark.parametrize("names", [("MLA", "full"), ("full", "MLA")])
def test_a_draft_model_of_another_attention_is_known_to_both_sides(names: tuple[str, str]) -> None:
    """For its scheduler, vLLM describes a group by its first layer, here one of the model's or one of the draft's."""
    kinds = {"MLA": MLAAttentionSpec(), "full": FullAttentionSpec()}
    layers = {name: kinds[name] for name in names}
    drafting = config(1, sized(2), mla=True)
    drafting.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(use_mla=False))
    workers = part_tags(drafting, 0, spec=UniformTypeKVCacheSpecs(kv_cache_specs=layers))
    assert workers == ["tp1of2-pp0of1-g0-b16"]
    assert workers[0] in rank_tags(drafting, 0, spec=layers[names[0]])
    drafting.speculative_config.draft_model_config.use_mla = True
    assert rank_tags(drafting, 0, spec=MLAAttentionSpec()) == ["tpall2-pp0of1-g0-b16"]


def test_a_group_that_the_scheduler_would_take_for_another_is_refused() -> None:
    specs = UniformTypeKVCacheSpecs(kv_cache_specs={"a": MLAAttentionSpec(), "b": FullAttentionSpec()})
    with pytest.raises(ConfigError, match="other attention beside it") as caught:
        part_tags(config(mla=True), 0, spec=specs)
    assert caught.value.where == "layer b"


def test_a_hybrid_model_needs_its_specs_told() -> None:
    hybrid = config(mla=True)
    hybrid.model_config.is_hybrid = True
    assert not is_replicated(hybrid)
    assert is_replicated(hybrid, MLAAttentionSpec())


def test_a_place_may_be_given() -> None:
    assert part_tags(config(sizes=sized(2)), 0, rank=1) == ["tp1of2-pp0of1-g0-b16"]


def test_slices_of_heads_are_named_alike_in_engines_of_all_sizes() -> None:
    engines = [config(sizes=sized(tp, 2)) for tp in (1, 2, 4)]
    every = [rank_tags(engine, 0, shards=4) for engine in engines]
    assert every[0] == [f"kv{place}of4-pp{stage}of2-g0-b16" for stage in range(2) for place in range(4)]
    assert every == [every[0]] * 3
    assert part_tags(config(3, sized(2, 2)), 0, shards=4) == ["kv2of4-pp1of2-g0-b16", "kv3of4-pp1of2-g0-b16"]
    for engine in engines:  # without the setting, names stay what they were
        assert part_tags(engine, 0) == rank_tags(engine, 0)[:1]
