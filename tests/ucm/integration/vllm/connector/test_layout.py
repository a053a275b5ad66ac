"""A layout's byte ranges are those of the block's elements, in every release's memory layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ucm.integration.vllm.connector.tensors import LAYOUTS, Tensor, layer_views, tensor
from ucm.integration.vllm.connector import kv_cache
from ucm.integration.vllm.connector.failures import UnknownLayoutError, UnsupportedModelError
from ucm.integration.vllm.connector.kv_cache import (
    CacheGroup,
    HostMemory,
    TensorLayout,
    element_size,
    fingerprint,
    group_layouts,
    layer_layout,
    layers_nbytes,
)
from ucm.store.base import BlockGeometry
from ucm.store.format import nbytes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS, HEADS, TOKENS, DIM = 5, 3, 8, 4

#: Shape, memory order and block dimension of one layer's tensor, by backend and releases.
ONE_LAYER = {
    "CPU 0.9.1-0.11.0": ((2, BLOCKS, TOKENS * HEADS * DIM), None, 1),
    "CPU 0.11.1-0.22.1": ((2, BLOCKS, HEADS, TOKENS, DIM), None, 1),
    "CPU 0.23.0-0.28.0": ((BLOCKS, HEADS, TOKENS, 2 * DIM), None, 0),
    "FlashAttention 0.9.0-0.22.1, Triton 0.9.0-0.10.2": ((2, BLOCKS, TOKENS, HEADS, DIM), None, 1),
    "FlashAttention 0.9.0-0.22.1, heads first": ((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4), 1),
    "FlashAttention 0.23.0-0.25.1, FlashInfer 0.9.0-0.25.1": ((BLOCKS, 2, TOKENS, HEADS, DIM), None, 0),
    "FlashInfer 0.9.0-0.25.1, heads first": ((BLOCKS, 2, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4), 0),
    "FlashAttention, FlashInfer, Triton 0.26.0-0.28.0": ((BLOCKS, HEADS, TOKENS, 2 * DIM), None, 0),
    "the same, tokens first": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 2, 1, 3), 0),
    "MLA until 0.28.0": ((BLOCKS, TOKENS, 9 * DIM), None, 0),
    "each block as four for the kernels": ((4 * BLOCKS, HEADS, TOKENS // 4, 2 * DIM), None, 0),
    "each block as two for the kernels, planes first": ((2, 2 * BLOCKS, TOKENS // 2, HEADS, DIM), None, 1),
}


def part_of(name: str, given_tensor: Tensor, blocks: int | None, page: int | None) -> TensorLayout:
    """Return the layout of a layer's only tensor."""
    (part,) = layer_layout(name, given_tensor, blocks, page).parts
    return part


def ranges(layout: TensorLayout, block: int) -> list[range]:
    """Return the byte ranges of a block according to the layout."""
    base = layout.start + block * layout.block_stride
    return [range(base + offset, base + offset + layout.nbytes) for offset in layout.offsets]


def rows_of(given_tensor: Tensor, blocks: int, axis: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tensor's elements by block: in vLLM, kernel blocks ``b * split + i`` make up block ``b``."""
    moved = np.moveaxis(values, axis, 0)
    split = given_tensor.shape[axis] // blocks
    return moved.reshape(blocks, split, *moved.shape[1:])


def check(layout: TensorLayout, given_tensor: Tensor, blocks: int, axis: int) -> None:
    places = rows_of(given_tensor, blocks, axis, given_tensor.places())
    taken: set[int] = set()
    for block in range(blocks):
        named = [place for part in ranges(layout, block) for place in part]
        element = given_tensor.element_size()
        assert sorted(named) == [place + i for place in sorted(places[block].flat) for i in range(element)]
        assert len(named) == layout.block_bytes == places[block].size * element
        assert taken.isdisjoint(named)
        taken.update(named)
        # The elements of the block in memory order, read from the raw buffer.
        elements = rows_of(given_tensor, blocks, axis, given_tensor.view())[block]
        in_order = elements.flat[np.argsort(places[block], axis=None)].tobytes()
        assert given_tensor.raw[named].tobytes() == in_order


@pytest.mark.parametrize("name", ONE_LAYER)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_one_tensor_per_layer(name: str, dtype: str) -> None:
    shape, order, axis = ONE_LAYER[name]
    found = tensor(shape, order, dtype)
    page = prod(shape) // BLOCKS * found.element_size()
    check(part_of("layer", found, BLOCKS, page), found, BLOCKS, axis)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("padding", [0, 24])
def test_all_layers_in_one_allocation(name: str, padding: int) -> None:
    heads = HEADS if name in {"LBHNC", "LBNHC", "BLHNC", "BLNHC"} or not padding else 1
    views = layer_views(name, (4, BLOCKS, heads, TOKENS, 2 * DIM), padding=padding)
    page = heads * TOKENS * 2 * DIM * 2
    layouts = [part_of(f"layer {i}", view, BLOCKS, page) for i, view in enumerate(views)]
    for layout, view in zip(layouts, views, strict=True):
        check(layout, view, BLOCKS, 0)
    taken = [place for layout in layouts for block in range(BLOCKS) for r in ranges(layout, block) for place in r]
    assert len(taken) == len(set(taken)) == 4 * BLOCKS * page


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_all_layers_in_one_allocation_with_blocks_split_for_the_kernels(name: str) -> None:
    for view in layer_views(name, (2, BLOCKS, HEADS, TOKENS, 2 * DIM), split=2):
        layout = part_of("layer", view, BLOCKS, HEADS * TOKENS * 2 * DIM * 2)
        check(layout, view, BLOCKS, 0)
        assert len(layout.offsets) == 1


def test_a_contiguous_block_is_one_range_and_planes_are_two() -> None:
    blocks_first = tensor((BLOCKS, HEADS, TOKENS, DIM))
    planes_first = tensor((2, BLOCKS, HEADS, TOKENS, DIM))
    assert part_of("layer", blocks_first, BLOCKS, None).offsets == (0,)
    assert part_of("layer", planes_first, BLOCKS, None).offsets == (0, BLOCKS * HEADS * TOKENS * DIM * 2)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Draw a tensor of known order and any strides, with its number of blocks and their dimension."""
    blocks, split = draw(st.integers(3, 6)), draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    planes = draw(st.booleans())
    shape = [2, blocks * split, *inner] if planes else [blocks * split, *inner]
    order = draw(st.permutations(range(len(shape))))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 5]), min_size=len(shape), max_size=len(shape)))
    dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
    return tensor(shape, order, dtype, gaps, draw(st.integers(0, 7))), blocks, int(planes)


@given(tensors())
def test_any_strides(case: tuple[Tensor, int, int]) -> None:
    found, blocks, axis = case
    check(part_of("layer", found, blocks, None), found, blocks, axis)


@given(tensors(), st.integers(1, 40))
def test_another_page_size_is_refused(case: tuple[Tensor, int, int], off_by: int) -> None:
    found, blocks, _ = case
    page = prod(found.shape) // blocks * found.element_size()
    part_of("layer", found, blocks, page)
    for wrong in (page - off_by, page + off_by):
        with pytest.raises(UnknownLayoutError, match=f"{page} bytes in its tensor but {wrong} by configuration"):
            part_of("layer", found, blocks, wrong)


@pytest.mark.parametrize(
    ("shape", "blocks", "what"),
    [
        ((7, 4, 16), 5, "no block dimension"),
        ((3, 5, 4, 16), 5, "no block dimension"),  # three planes
        ((4, 8), 5, "no block dimension"),  # fewer rows than blocks
        ((2, 7, 16), 5, "no block dimension"),
        ((2, 2, 4, 16), 2, "two possible block dimensions"),
        ((2, 16, 4), 2, "two possible block dimensions"),
        ((2, 1, 16), 1, "two possible block dimensions"),
    ],
)
def test_unknown_and_ambiguous_orders_are_refused(shape: tuple[int, ...], blocks: int, what: str) -> None:
    with pytest.raises(UnknownLayoutError, match=what) as refused:
        part_of("model.layers.0.attn", tensor(shape), blocks, None)
    assert "model.layers.0.attn" in refused.value.where
    assert str(shape) in refused.value.where
    assert refused.value.fix


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 9, 8, 3, 4), 1), ((9, 2, 8, 3, 4), 0), ((9, 8, 12), 0), ((2, 9, 96), 1)]
)
def test_releases_that_do_not_tell_the_number_of_blocks(shape: tuple[int, ...], axis: int) -> None:
    """Until 0.11.0, none of whose layouts splits blocks for the kernels."""
    found = tensor(shape)
    layout = part_of("layer", found, None, None)
    assert layout.num_blocks == 9
    check(layout, found, 9, axis)


def test_they_are_ambiguous_with_two_blocks() -> None:
    with pytest.raises(UnknownLayoutError, match="two possible block dimensions"):
        part_of("layer", tensor((2, 2, 8, 4)), None, None)


# The description on which engines must agree.


def meaning(found: Tensor, layout: TensorLayout, blocks: int, axis: int) -> list[int]:
    """Return the logical index in its block of each stored element, in the order of the stored bytes."""
    places = rows_of(found, blocks, axis, found.places())[0]
    at = {int(place): number for number, place in enumerate(places.flat)}
    return [at[place] for part in ranges(layout, 0) for place in part[:: found.element_size()]]


@given(tensors(), st.data())
def test_one_description_means_one_order_of_bytes(case: tuple[Tensor, int, int], data: st.DataObject) -> None:
    """Whatever else differs, including gaps and the number of blocks."""
    found, old_blocks, axis = case
    blocks = data.draw(st.integers(3, 9))
    shape = list(found.shape)
    shape[axis] = shape[axis] // old_blocks * blocks
    other = tensor(shape, data.draw(st.permutations(range(len(shape)))), str(found.dtype))
    first, second = part_of("layer", found, old_blocks, None), part_of("layer", other, blocks, None)
    same_bytes = meaning(found, first, old_blocks, axis) == meaning(other, second, blocks, axis)
    assert (first.description == second.description) == same_bytes


def test_engines_with_more_or_fewer_blocks_share_them() -> None:
    small, large = tensor((2, 5, HEADS, TOKENS, DIM)), tensor((2, 70, HEADS, TOKENS, DIM))
    first, second = layer_layout("layer", small, 5, None), layer_layout("layer", large, 70, None)
    assert fingerprint([first], {}) == fingerprint([second], {})


def test_heads_first_and_tokens_first_are_told_apart() -> None:
    tokens_first, heads_first = tensor((5, 2, TOKENS, HEADS, DIM)), tensor((5, 2, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4))
    first, second = (layer_layout("layer", given_tensor, 5, None) for given_tensor in (tokens_first, heads_first))
    assert first.parts[0].offsets == second.parts[0].offsets
    assert first.block_bytes == second.block_bytes
    assert fingerprint([first], {}) != fingerprint([second], {})


def test_what_else_changes_a_fingerprint() -> None:
    layer = layer_layout("layer", tensor((5, 8, 4)), 5, None)
    variants = [
        fingerprint([layer], {}),
        fingerprint([layer], {"layout": "LBNHC"}),
        fingerprint([layer], {"layout": "LBHNC"}),
        fingerprint([layer, layer], {}),
        fingerprint([layer_layout("other", tensor((5, 8, 4)), 5, None)], {}),
        fingerprint([layer_layout("layer", tensor((5, 8, 4), dtype="int16"), 5, None)], {}),
        fingerprint([layer_layout("layer", tensor((5, 4, 8)), 5, None)], {}),
        fingerprint([layer_layout("layer", tensor((10, 4, 4)), 5, None)], {}),
    ]
    assert len(set(variants)) == len(variants)
    assert {len(variant) for variant in variants} == {16}


# Groups of layers.


def group(*names: str, page: int | None = None) -> CacheGroup:
    return CacheGroup(0, TOKENS, None, {} if page is None else dict.fromkeys(names, page), names)


def test_layers_that_share_a_cache_are_moved_once() -> None:
    first, second = tensor((5, 8, 4)), tensor((5, 8, 4))
    caches = {"a": first, "b": second, "a again": Tensor(first.raw, first.shape, first.strides, first.dtype)}
    found = group_layouts(group("a", "b", "a again", page=64), caches, 5)
    assert [layout.name for layout in found] == ["a", "b"]


def test_a_layer_with_a_tensor_for_keys_and_one_for_values() -> None:
    """As vLLM Ascend registers them; of latent attention the two differ in size."""
    keys, values = tensor((5, 8, 4)), tensor((5, 8, 2))
    (found,) = group_layouts(group("a", "a again", page=96), dict.fromkeys(("a", "a again"), (keys, values)), 5)
    for part, whole in zip(found.parts, (keys, values), strict=True):
        check(part, whole, 5, 0)
    assert found.block_bytes == 96
    swapped = layer_layout("a", [values, keys], 5, 96)
    assert fingerprint([found], {}) != fingerprint([swapped], {})
    with pytest.raises(UnknownLayoutError, match="96 bytes in its tensor but 64") as refused:
        layer_layout("a", (keys, values), 5, 64)
    assert refused.value.where.count("shape") == 2


def test_layers_of_one_allocation_are_all_moved() -> None:
    views = layer_views("BLNHC", (3, BLOCKS, HEADS, TOKENS, DIM))
    found = group_layouts(group("a", "b", "c"), dict(zip("abc", views, strict=True)), BLOCKS)
    assert [layout.name for layout in found] == ["a", "b", "c"]


def test_a_group_moves_only_its_own_layers() -> None:
    caches = {name: tensor((5, 8, 4)) for name in "abc"}
    assert [layout.name for layout in group_layouts(group("c", "a"), caches, 5)] == ["c", "a"]
    assert [layout.name for layout in group_layouts(group(), caches, 5)] == ["a", "b", "c"]


def test_a_layer_without_a_cache_is_told() -> None:
    with pytest.raises(UnknownLayoutError, match="1 layers of KV-cache group 0") as refused:
        group_layouts(group("a", "lost"), {"a": tensor((5, 8, 4))}, 5)
    assert refused.value.where == "lost"


# In host memory.


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_storage", lambda tensor: memoryview(tensor.raw))


@pytest.mark.usefixtures("_without_torch")
@pytest.mark.parametrize("name", LAYOUTS)
def test_buffers_are_the_memory_of_the_blocks(name: str) -> None:
    views = layer_views(name, (3, BLOCKS, HEADS, TOKENS, DIM))
    memory = HostMemory(group("a", "b", "c"), dict(zip("abc", views, strict=True)), BLOCKS, {})
    for block in range(BLOCKS):
        every = memory.buffers([block], range(3))
        assert memory.geometry.slice_sizes == (nbytes_of(every),)
        for layer, view in enumerate(views):
            mine = memory.buffers([block], range(layer, layer + 1))
            assert mine == every[layer * len(mine) : (layer + 1) * len(mine)]
            assert layers_nbytes(memory.group, memory.layouts[: layer + 1]) == (layer + 1) * nbytes_of(mine)
            for buffer in mine:
                buffer[:] = bytes([layer + 1]) * buffer.nbytes
            assert set(np.unique(view.view()[block].view(np.uint8))) == {layer + 1}
    assert memory.geometry.element_size == views[0].element_size()


def test_an_element_of_several_kinds_is_what_divides_all() -> None:
    caches = {"wide": tensor((5, 8, 4), dtype="float32"), "narrow": tensor((5, 8, 4))}
    assert element_size(group_layouts(group(*caches), caches, 5), caches) == 2


@pytest.mark.usefixtures("_without_torch")
def test_a_tensor_that_ends_before_its_last_block_is_refused() -> None:
    whole = tensor((5, 8, 4))
    short = Tensor(whole.raw[:-1], whole.shape, whole.strides, whole.dtype)
    with pytest.raises(UnknownLayoutError, match="ends at byte 320 of a storage of 319"):
        HostMemory(group("a"), {"a": short}, 5, {})


def test_every_layer_is_checked_against_its_own_page_size() -> None:
    caches = {"small": tensor((5, 8, 4)), "large": tensor((5, 8, 8))}
    pages = {"small": 64, "large": 128}
    found = group_layouts(CacheGroup(0, TOKENS, None, pages, ("small", "large")), caches, 5)
    assert [layout.block_bytes for layout in found] == [64, 128]
    with pytest.raises(UnknownLayoutError, match="128 bytes in its tensor but 64"):
        group_layouts(group("small", "large", page=64), caches, 5)


def parts_of(ranks: int, slices: int, heads: int) -> list[CacheGroup]:
    """Return the group of layers a, b and c for each slice of one rank's heads."""
    own = slices // ranks
    page = heads // slices * TOKENS * DIM * 2
    whole = CacheGroup(0, TOKENS, None, dict.fromkeys("abc", page), tuple("abc"), slices=own)
    return replace(whole, spec=SimpleNamespace(num_kv_heads=heads // slices)).parts


@pytest.mark.usefixtures("_without_torch")
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slice_of_heads_is_laid_out_alike_on_ranks_of_any_number(name: str, split: int, padding: int) -> None:
    """Its bytes are those of its heads, whose order in a block of more heads does not matter."""
    heads, found = 4, dict[int, list[tuple[list[bytes], BlockGeometry]]]()
    for ranks in (1, 2, 4):
        sizes = (3, BLOCKS + ranks, heads // ranks, TOKENS, DIM)  # the number of blocks is each engine's own
        for rank in range(ranks):
            views = layer_views(name, sizes, split, padding if split == 1 else 0)
            for layer, view in enumerate(views):
                values = view.view()
                for block, head, token, cell in np.ndindex(values.shape):
                    at = (layer, block, rank * heads // ranks + head, token, cell)
                    values[block, head, token, cell] = np.float16(hash(at) % 2039)
            caches = dict(zip("abc", views, strict=True))
            for part in parts_of(ranks, 4, heads):
                memory = HostMemory(part, caches, BLOCKS + ranks, {})
                content = [b"".join(memory.buffers([block], range(3))) for block in range(BLOCKS)]
                found.setdefault(rank * 4 // ranks + part.place, []).append((content, memory.geometry))
    for place in range(4):
        assert len(found[place]) == 3
        assert found[place] == found[place][:1] * 3
    assert len({content for of in found.values() for content in of[0][0]}) == 4 * BLOCKS, "no two are alike"


@pytest.mark.parametrize(
    "cache",
    [
        tensor((2, BLOCKS, TOKENS, 4, DIM)),
        tensor((BLOCKS, TOKENS, 4 * DIM)),
        tensor((BLOCKS, 2, TOKENS, 2 * DIM)),
        (tensor((BLOCKS, 4, TOKENS, DIM)),) * 2,
    ],
    ids=["planes", "no heads", "other heads", "two tensors"],
)
def test_a_cache_without_a_dimension_of_heads_is_not_sliced(cache: object) -> None:
    with pytest.raises(UnsupportedModelError, match="whole KV heads"):
        group_layouts(parts_of(1, 2, 4)[0], dict.fromkeys("abc", cache), BLOCKS)
