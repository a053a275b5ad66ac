"""The hashes of a blended request's blocks when vLLM also hashes parts of blocks."""

from __future__ import annotations

import pytest

from tests.ucm.integration.vllm.blend.scene import BLOCK, Request
from ucm.integration.vllm.blend.scheduler import OwnNames


@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("number", range(4 * BLOCK, 9 * BLOCK, 7))
def test_no_blended_block_keeps_its_name_and_every_exact_one_does(block_size: int, number: int) -> None:
    """Each hash is for `BLOCK` tokens here, whatever the block size."""
    one = Request("r", list(range(number)))
    exact = list(one.block_hashes)
    for tokens in range(0, number, block_size):
        names = OwnNames(one, block_size)
        names.give(tokens)
        kept = tokens // BLOCK
        assert not set(one.block_hashes[kept:]) & set(exact)
        # The number of hashes shows the tokens per hash; if two sizes fit, the larger one is assumed.
        assert one.block_hashes[: kept // 2] == exact[: kept // 2]
        if block_size == BLOCK:
            assert one.block_hashes[:kept] == exact[:kept]
        assert [len(name) for name in one.block_hashes] == [len(name) for name in exact]
        names.take_back()
        assert one.block_hashes == exact


def test_a_stretch_that_grows_to_the_front() -> None:
    one = Request("r", list(range(8 * BLOCK)))
    exact = list(one.block_hashes)
    names = OwnNames(one, BLOCK)
    names.give(4 * BLOCK)
    own = list(one.block_hashes)
    names.give(6 * BLOCK)
    assert one.block_hashes == own
    names.give(2 * BLOCK)
    assert one.block_hashes[4:] == own[4:]
    assert one.block_hashes[:2] == exact[:2]
    assert not set(one.block_hashes[2:]) & set(exact)


def test_a_request_without_names() -> None:
    one = Request("r", [1, 2, 3])
    names = OwnNames(one, BLOCK)
    names.give(0)
    names.take_back()
    assert one.block_hashes == []
