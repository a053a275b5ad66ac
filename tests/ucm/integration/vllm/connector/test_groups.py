"""Which KV-cache groups can be restored, and how far a request can continue with the stored blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.errors import ConfigError
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.connector.kv_cache import (
    NO_BLOCK,
    CacheGroup,
    CacheGroups,
    cache_groups,
    in_chunks,
    in_slices,
    lacking,
    longest_hit,
)


@dataclass
class FullAttentionSpec:
    """The part of vLLM's specifications that is read, as of 0.14.1."""

    block_size: int = 16
    real_page_size_bytes: int = 1024
    page_size_bytes: int = 1024
    sliding_window: int | None = None  # of a layer that is managed as full attention


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec:
    block_size: int = 16
    sliding_window: int = 40
    page_size_bytes: int = 512


@dataclass
class RetainingWindowSpec:
    block_size: int = 16
    sliding_window: int = 40
    extra_retained_tokens: int = 3
    page_size_bytes: int = 512


RetainingWindowSpec.__name__ = "SlidingWindowSpec"


@dataclass
class OldAttentionSpec:
    """Until 0.13.0."""

    block_size: int = 16
    page_size_bytes: int = 2048


OldAttentionSpec.__name__ = "FullAttentionSpec"


@dataclass
class PaddedSpec:
    """Since 0.28.0, with pages that are aligned."""

    block_size: int = 16
    unpadded_page_size_bytes: int = 1000
    real_page_size_bytes: int = 1000
    page_size_bytes: int = 1024


PaddedSpec.__name__ = "MLAAttentionSpec"


@dataclass
class MambaSpec:
    """Since 0.30.0; the pages of states are padded to those of attention."""

    block_size: int = 16
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (2, 8))
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    real_page_size_bytes: int = 88
    page_size_bytes: int = 1024


@dataclass
class CircularBufferSpec:
    block_size: int = 16
    page_size_bytes: int = 64


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class CrossAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class HiddenStateCacheSpec(MLAAttentionSpec):
    pass


class OwnSpec(FullAttentionSpec):
    pass


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int = 16
    attention_chunk_size: int = 48
    page_size_bytes: int = 512


@dataclass
class SlidingWindowMLASpec(SlidingWindowSpec):
    """Since 0.32.0."""

    prefix_replay_tokens: int = 0


@dataclass
class PrefixSpec(FullAttentionSpec):
    non_causal: bool = True


PrefixSpec.__name__ = "FullAttentionSpec"


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = 16


def config(*groups: tuple[list[str], Any], **more: Any) -> Any:
    found = [SimpleNamespace(layer_names=names, kv_cache_spec=spec, **more) for names, spec in groups]
    return SimpleNamespace(kv_cache_groups=found, num_blocks=10)


def only(kv_cache_config: Any) -> CacheGroup:
    (group,) = cache_groups(None, kv_cache_config).groups
    return group


def test_full_attention() -> None:
    spec = FullAttentionSpec()
    group = only(config((["a", "b"], spec)))
    assert group == CacheGroup(0, 16, None, {"a": 1024, "b": 1024}, ("a", "b"), spec)
    assert group.first_needed(1000) == 0


def test_a_window_that_is_managed_as_full_attention_needs_every_block() -> None:
    assert only(config((["a"], FullAttentionSpec(sliding_window=32)))).window is None


@pytest.mark.parametrize(
    ("spec", "nbytes"), [(OldAttentionSpec(), 2048), (PaddedSpec(), 1000), (MLAAttentionSpec(), 1024)]
)
def test_the_size_of_a_block_without_padding(spec: Any, nbytes: int) -> None:
    assert only(config((["a"], spec))).page_sizes == {"a": nbytes}


def test_sliding_windows() -> None:
    assert only(config((["a"], SlidingWindowSpec()))).window == 40
    assert only(config((["a"], RetainingWindowSpec()))).window == 43


@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 200))
def test_what_a_window_still_reads(block_size: int, window: int, num_tokens: int) -> None:
    """The next token, at position ``num_tokens``, attends to itself and ``window - 1`` before it."""
    group = CacheGroup(0, block_size, window, {}, ())
    first = group.first_needed(num_tokens)
    read = range(max(0, num_tokens - window + 1), num_tokens + 1)
    assert first == min(position // block_size for position in read)


def test_chunks_hold_whole_blocks_of_all_groups_and_no_more_than_a_window_reaches() -> None:
    sizes, windows = (16, 32, 16, 16), (None, None, 256, 200)
    groups = CacheGroups(tuple(CacheGroup(*one, {}, ()) for one in zip(range(4), sizes, windows, strict=True)))
    found = in_chunks(groups, 250)
    assert [group.chunk_blocks for group in found.groups] == [16, 8, 16, 1]
    assert [group.chunk_tokens for group in found.groups] == [256, 256, 256, 16]
    assert found.alignment == 256
    assert in_chunks(groups, 0) == groups
    assert found.facts != groups.facts


@given(st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(1, 40), st.integers(0, 12), st.integers(1, 8))
def test_a_chunk_is_loaded_without_what_is_computed_or_out_of_reach(
    block_size: int, chunk_blocks: int, window: int | None, computed_blocks: int, chunks: int
) -> None:
    group = CacheGroup(0, block_size, window, {}, (), chunk_blocks=chunk_blocks)
    computed, end = computed_blocks * block_size, (computed_blocks // chunk_blocks + chunks) * group.chunk_tokens
    block_ids = list(range(100, 100 + end // block_size))
    needed, loaded = group.needed(computed, end), group.to_load(block_ids, computed, end)
    assert len(loaded) == len(needed) * chunk_blocks
    read = [
        block_ids[block]
        for block in range(computed_blocks, end // block_size)
        if window is None or (block + 1) * block_size > end - window + 1
    ]
    assert [block for block in loaded if block != NO_BLOCK] == read


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 60), st.integers(1, 30))
def test_a_chunk_is_saved_by_the_step_that_fills_it_while_all_of_its_blocks_are_there(
    block_size: int, chunk_blocks: int, beyond: int, computed: int, new: int
) -> None:
    """A window that is at least as long as a chunk reaches the chunk's first token when the last one is computed."""
    plain = CacheGroup(0, block_size, None, {}, (), chunk_blocks=chunk_blocks)
    group = replace(plain, window=plain.chunk_tokens + beyond)
    filled = range(computed // group.chunk_tokens, (computed + new) // group.chunk_tokens)
    assert plain.to_save(filled.start, computed, computed + new) == filled
    assert group.to_save(filled.start, computed, computed + new) == filled
    first = group.first_needed(computed)
    assert all(chunk * chunk_blocks >= first for chunk in group.to_save(0, computed, computed + new))


def test_uniform_types_are_one_group() -> None:
    specs = {"a": FullAttentionSpec(real_page_size_bytes=10), "b": FullAttentionSpec(real_page_size_bytes=20)}
    group = only(config((["a", "b"], UniformTypeKVCacheSpecs(specs))))
    assert group.window is None
    assert group.page_sizes == {"a": 10, "b": 20}
    assert group.layer_names == ("a", "b")


def test_uniform_types_keep_what_the_longest_reach_needs() -> None:
    near, far = SlidingWindowSpec(sliding_window=20), SlidingWindowSpec(sliding_window=50)
    assert only(config((["a", "b"], UniformTypeKVCacheSpecs({"a": near, "b": far})))).window == 50
    specs = {"a": near, "b": FullAttentionSpec()}
    assert only(config((["a", "b"], UniformTypeKVCacheSpecs(specs)))).window is None


def test_recurrent_layers() -> None:
    group = only(config((["a", "b"], MambaSpec())))
    assert (group.window, group.is_recurrent, group.page_sizes) == (None, True, {"a": 88, "b": 88})
    others = [MambaSpec(shapes=((3, 4), (2, 4))), MambaSpec(dtypes=("bfloat16", "bfloat16")), FullAttentionSpec()]
    facts = [str(only(config((["a", "b"], spec))).facts) for spec in others]
    assert len({str(group.facts), *facts}) == 4
    with pytest.raises(UnsupportedModelError, match="group 0 has recurrent layers and others"):
        only(config((["a", "b"], UniformTypeKVCacheSpecs({"a": MambaSpec(), "b": FullAttentionSpec()}))))


@given(st.integers(1, 8), st.integers(0, 9), st.integers(0, 200))
def test_a_request_continues_with_the_state_of_its_last_block_alone(
    block_size: int, computed_blocks: int, num_tokens: int
) -> None:
    group = CacheGroup(0, block_size, None, {}, (), is_recurrent=True)
    end, computed = num_tokens // block_size * block_size, computed_blocks * block_size
    blocks = list(range(100, 100 + end // block_size))
    expected = [len(blocks) - 1] if end > computed else []
    assert list(group.needed(computed, end)) == expected
    assert group.to_load(blocks, computed, end) == [blocks[place] for place in expected]
    assert not group.to_save(0, computed, end)
    assert group.first_needed(end) == max(len(blocks) - 1, 0)


def test_blocks_beside_states_are_stored_alone() -> None:
    """A hit ends where there is a state: most prompts have one at their last full block, and none before."""
    groups = CacheGroups((CacheGroup(0, 4, None, {}, ()), CacheGroup(1, 4, None, {}, (), is_recurrent=True)))
    assert in_chunks(groups, 16) == groups


def test_a_hit_ends_where_there_is_a_state() -> None:
    full, states = CacheGroup(0, 4, None, {}, ()), CacheGroup(1, 4, None, {}, (), is_recurrent=True)
    there = [False, True, False, False, True, False, True, False]
    assert longest_hit([full, states], [[True] * 8, there], 32, 4) == 28
    assert longest_hit([full, states], [[True] * 6 + [False] * 2, there], 32, 4) == 20
    assert longest_hit([full, states], [[True] * 4 + [False] * 4, there], 32, 4) == 8
    assert longest_hit([full, states], [[True] * 8, [False] * 8], 32, 4) == 0
    assert longest_hit([states, full], [there, [False] * 8], 32, 4) == 0


def test_what_a_hit_lacks() -> None:
    full, states = CacheGroup(0, 4, None, {}, ()), CacheGroup(1, 4, None, {}, (), is_recurrent=True)
    groups, everything = CacheGroups((full, states)), [True] * 4
    assert lacking(groups, [everything, [False, True, False, False]], 8, 16) == (1, 2)
    assert lacking(groups, [[True, True, False, True], [False, True, False, True]], 8, 16) == (0, 2)
    assert lacking(groups, [[True, True], everything], 8, 16) == (0, 2)
    assert lacking(groups, [[], [False] * 4], 0, 16) == (0, 0)
    assert lacking(groups, [everything, [False, False, False, True]], 16, 16) is None


@pytest.mark.parametrize(("kinds", "leading"), [("sf", 1), ("fs", 0), ("wsf", 2), ("sw", 0), ("s", 0)])
def test_the_length_of_a_prefix_shows_where_all_blocks_are_needed(kinds: str, leading: int) -> None:
    groups = [
        CacheGroup(index, 4, 9 if kind == "w" else None, {}, (), is_recurrent=kind == "s")
        for index, kind in enumerate(kinds)
    ]
    assert CacheGroups(tuple(groups)).leading == leading


def test_a_request_holds_few_states() -> None:
    full, states = CacheGroup(0, 4, None, {}, ()), CacheGroup(1, 4, None, {}, (), is_recurrent=True)
    assert (full.most_blocks(1001), states.most_blocks(1001)) == (252, 3)
    drafting = replace(states, spec=SimpleNamespace(num_speculative_blocks=4))
    assert drafting.most_blocks(1001) == 7


def test_several_groups_have_a_common_alignment() -> None:
    found = cache_groups(
        None, config((["a"], FullAttentionSpec(block_size=16)), (["b"], SlidingWindowSpec(block_size=24)))
    )
    assert [group.index for group in found.groups] == [0, 1]
    assert found.alignment == 48


def test_releases_without_a_cache_configuration_have_one_group() -> None:
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=32))
    assert cache_groups(vllm_config, None) == CacheGroups((CacheGroup(0, 32, None, {}, ()),))


@pytest.mark.parametrize(
    "spec",
    [
        SinkFullAttentionSpec(),
        CrossAttentionSpec(),
        RSWASpec(),
        HiddenStateCacheSpec(),
        OwnSpec(),
        PrefixSpec(),
    ],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("within", [False, True])
def test_what_cannot_be_restored_is_refused_by_its_name(spec: Any, within: bool) -> None:
    kind = type(spec).__name__
    second = UniformTypeKVCacheSpecs({"b": FullAttentionSpec(), "c": spec}) if within else spec
    with pytest.raises(UnsupportedModelError, match=f"group 1 is of kind {kind}") as refused:
        cache_groups(None, config((["a"], FullAttentionSpec()), (["b", "c"], second)))
    assert refused.value.where == ("layer c" if within else "layer b")


@pytest.mark.parametrize(
    ("spec", "more", "says"),
    [
        (SlidingWindowMLASpec(prefix_replay_tokens=40), {}, "--no-swa-bounded-replay"),
        (FullAttentionSpec(), {"host_resident": True}, "keeps elsewhere"),
        (PrefixSpec(), {}, "attend to later ones"),
        (OwnSpec(), {}, "cannot be restored"),
    ],
    ids=["replay", "host", "prefix", "unknown"],
)
def test_a_refusal_says_why_or_what_to_do(spec: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        cache_groups(None, config((["a"], spec), **more))


def test_nothing_is_stored_of_a_ring() -> None:
    ring, full = CircularBufferSpec(block_size=24), FullAttentionSpec(block_size=16)
    found = cache_groups(None, config((["r"], ring), (["a"], full), (["s"], MambaSpec()), (["t"], ring)))
    assert [group.index for group in found.groups] == [1, 2]
    assert [group.index for group in found.rings] == [0, 3]
    assert found.leading == 1
    assert found.alignment == 48
    assert cache_groups(None, config((["r"], ring), (["a"], SlidingWindowSpec()))).leading == 1
    with pytest.raises(UnsupportedModelError, match="no KV cache"):
        cache_groups(None, config((["r"], ring)))


def test_with_a_ring_a_load_fails_as_a_whole() -> None:
    """VLLM counts the ring as a group, and takes failed blocks of a model with one group only."""
    found = cache_groups(None, config((["r"], CircularBufferSpec()), (["a"], FullAttentionSpec())))
    assert len(found.windows) == 2


def test_an_attention_chunk_needs_its_own_blocks_alone() -> None:
    full, local = FullAttentionSpec(), ChunkedLocalAttentionSpec()
    found = cache_groups(None, config((["a"], full), (["b"], local))).groups[1]
    needed = {end: list(found.needed(0, end)) for end in range(0, 129, 16)}
    assert needed == {0: [], 16: [0], 32: [0, 1], 48: [], 64: [3], 80: [3, 4], 96: [], 112: [6], 128: [6, 7]}
    assert found.to_load(list(range(10, 18)), 64, 80) == [14]
    with pytest.raises(UnsupportedModelError, match="chunked local attention alone"):
        cache_groups(None, config((["b"], local)))


def test_an_attention_chunk_of_whole_chunks_is_stored_in_them() -> None:
    groups = tuple(CacheGroup(number, 16, size, {}, (), is_local=True) for number, size in enumerate((96, 48, 128)))
    found = in_chunks(CacheGroups((*groups, CacheGroup(3, 16, None, {}, ()))), 32)
    assert [group.chunk_blocks for group in found.groups] == [2, 1, 2, 2]


def test_a_compressed_window_is_a_window() -> None:
    found = only(config((["a", "b"], SlidingWindowMLASpec(sliding_window=40))))
    assert (found.window, found.page_sizes) == (40, {"a": 512, "b": 512})


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 60), st.booleans())
def test_a_chunk_is_reached_if_a_hit_somewhere_needs_it(size: int, more: int, window: int, local: bool) -> None:
    group, step = CacheGroup(0, size, window, {}, (), is_local=local), size * more
    for chunk in range(40):
        ends = range(0, (chunk + 2) * size + window + step, step)
        assert group.is_reached(chunk, step) == any(chunk in group.needed(0, end) for end in ends)


def test_a_group_that_is_not_to_be_transferred_is_refused() -> None:
    cache_groups(None, config((["a"], FullAttentionSpec()), enable_kv_transfer=True))
    with pytest.raises(UnsupportedModelError, match="FullAttentionSpec"):
        cache_groups(None, config((["a"], FullAttentionSpec()), enable_kv_transfer=False))


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no KV cache"):
        cache_groups(None, config())


def test_a_specification_without_a_size_is_refused() -> None:
    silent = type("FullAttentionSpec", (), {"block_size": 16})()
    with pytest.raises(UnsupportedModelError, match="does not say how large"):
        cache_groups(None, config((["a"], silent)))


# Slices of heads.


class Quantised(IntEnum):
    NONE = 0
    FP8_PER_TOKEN_HEAD = 3


@dataclass
class HeadsSpec:
    """Since 0.32.0, as far as it concerns heads: 2 bytes for each of 8 numbers of a token and head."""

    block_size: int = 16
    num_kv_heads: int = 4
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    kv_quant_mode: Quantised = Quantised.NONE

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * 8 * 2


HeadsSpec.__name__ = "FullAttentionSpec"


@dataclass
class WindowHeadsSpec(HeadsSpec):
    sliding_window: int = 40


WindowHeadsSpec.__name__ = "SlidingWindowSpec"


def engine_of(ranks: int, heads: int = 4) -> Any:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=ranks))


def sliced(spec: Any, shards: int, ranks: int, heads: int = 4) -> CacheGroups:
    return in_slices(
        cache_groups(None, config((["a"], HeadsSpec(num_kv_heads=heads // ranks)), (["b"], spec))),
        shards,
        engine_of(ranks, heads),
    )


@pytest.mark.parametrize("shards", [2, 4])
def test_engines_of_several_sizes_have_the_same_slices_of_heads(shards: int) -> None:
    found = {ranks: sliced(WindowHeadsSpec(num_kv_heads=4 // ranks), shards, ranks) for ranks in (1, 2)}
    assert found[1].facts == found[2].facts
    assert found[1].facts["kv_head_shards"] == shards
    for ranks, groups in found.items():
        for group in groups.groups:
            assert [part.place for part in group.parts] == list(range(shards // ranks))
            assert set(group.page_sizes.values()) == {16 * 4 // shards * 8 * 2}
        assert groups.staged_bytes(160, {0: shards, 1: shards}) == 16 * 4 * 8 * 2 * (10 + 3)


def test_layers_of_a_uniform_type_are_sliced_one_by_one() -> None:
    @dataclass
    class Uniform:
        kv_cache_specs: dict[str, Any]
        block_size: int = 16

    spec = Uniform({"b": HeadsSpec(), "c": HeadsSpec(num_kv_heads=8)})
    found = in_slices(cache_groups(None, config((["b", "c"], spec))), 4, engine_of(1)).groups[0]
    assert found.page_sizes == {"b": 256, "c": 512}


def test_without_the_setting_groups_stay_as_they_are() -> None:
    groups = cache_groups(None, config((["a"], HeadsSpec())))
    assert in_slices(groups, 0, None) is groups
    assert "kv_head_shards" not in groups.facts
    assert groups.groups[0].parts == [groups.groups[0]]


@pytest.mark.parametrize(("shards", "ranks", "heads"), [(3, 1, 4), (2, 4, 4), (8, 8, 4), (4, 3, 12), (8, 2, 4)])
def test_slices_that_do_not_fit_heads_and_ranks_are_refused(shards: int, ranks: int, heads: int) -> None:
    groups = cache_groups(None, config((["a"], HeadsSpec(num_kv_heads=max(1, heads // ranks)))))
    with pytest.raises(ConfigError, match=f"{heads} KV heads, and the engine {ranks} tensor-parallel"):
        in_slices(groups, shards, engine_of(ranks, heads))


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(),
        MambaSpec(),
        ChunkedLocalAttentionSpec(),
        HeadsSpec(num_kv_heads=1),
        HeadsSpec(num_head_slots=2),
        HeadsSpec(state_content_bytes=100),
        HeadsSpec(kv_quant_mode=Quantised.FP8_PER_TOKEN_HEAD),
    ],
    ids=["latent", "states", "local", "a head", "other slots", "packed", "scales"],
)
def test_what_has_no_whole_heads_is_not_sliced(spec: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="whole KV heads") as refused:
        sliced(spec, 2, 1)
    assert "layer b" in refused.value.where
    assert refused.value.fix == "remove kv_head_shards"


def test_neither_a_ring_nor_an_unknown_cache_is_sliced() -> None:
    unknown = cache_groups(SimpleNamespace(cache_config=SimpleNamespace(block_size=16)), None)
    for groups in (cache_groups(None, config((["r"], CircularBufferSpec()), (["a"], HeadsSpec()))), unknown):
        with pytest.raises(UnsupportedModelError, match="whole KV heads"):
            in_slices(groups, 2, engine_of(1))


# The longest hit.


def can_continue(group: CacheGroup, present: list[bool], num_tokens: int) -> bool:
    """By definition: every full block that a token from ``num_tokens`` on may still read is present."""
    reach = 0 if group.window is None else num_tokens - group.window + 1
    if group.window is not None and group.is_local:
        reach = num_tokens // group.window * group.window
    for block in range(num_tokens // group.block_size):
        end = (block + 1) * group.block_size
        if end > reach and not (block < len(present) and present[block]):
            return False
    return True


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[CacheGroup], list[list[bool]], int]:
    sizes = draw(st.sampled_from([[4], [4, 4], [2, 4], [4, 6], [1, 3, 2]]))
    kinds = st.tuples(st.none() | st.integers(1, 30), st.booleans())
    drawn = [draw(kinds) for _ in sizes]
    groups = [
        CacheGroup(index, size, window, {}, (), is_local=local and window is not None)
        for index, (size, (window, local)) in enumerate(zip(sizes, drawn, strict=True))
    ]
    num_tokens = draw(st.integers(0, 60))
    # Mostly present: otherwise every answer is 0.
    mostly = st.sampled_from([True] * 7 + [False])
    present = [draw(st.lists(mostly, max_size=num_tokens // size + 2)) for size in sizes]
    return groups, present, num_tokens


@given(situations())
def test_the_longest_hit_is_the_longest_by_definition(
    situation: tuple[list[CacheGroup], list[list[bool]], int],
) -> None:
    groups, present, num_tokens = situation
    step = CacheGroups(tuple(groups)).alignment
    expected = max(
        tokens
        for tokens in range(0, num_tokens + 1, step)
        if all(can_continue(group, row, tokens) for group, row in zip(groups, present, strict=True))
    )
    assert longest_hit(groups, present, num_tokens, step) == expected


def test_a_window_continues_where_its_older_blocks_are_gone() -> None:
    full, windowed = CacheGroup(0, 4, None, {}, ()), CacheGroup(1, 4, 6, {}, ())
    everything, recent = [True] * 8, [False] * 6 + [True] * 2
    assert longest_hit([full, windowed], [everything, recent], 32, 4) == 32
    assert longest_hit([full, windowed], [recent, everything], 32, 4) == 0
    assert longest_hit([full, windowed], [everything[:7], recent], 32, 4) == 0


def test_rows_that_stage_a_prefix_are_of_the_largest_group_and_as_many_as_all_groups_need() -> None:
    full = CacheGroup(0, 16, None, {"a": 1000, "b": 24}, ())
    window = CacheGroup(1, 16, 40, {"c": 512}, ())
    assert CacheGroups((full,)).staged_bytes(160, {0: 1}) == 10 * 1024
    assert CacheGroups((full, window)).staged_bytes(160, {0: 2, 1: 1}) == (10 + 3) * 2 * 1024
    assert CacheGroups((CacheGroup(0, 16, None, {}, ()),)).staged_bytes(160, {0: 1}) == 0
