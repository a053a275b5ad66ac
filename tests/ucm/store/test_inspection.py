"""Inspecting a root without opening a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.inspection import check_block, quarantine_block, stored_blocks
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import ODD, key, save

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig

KEYS = [key(number) for number in range(10)]
FILE = HeaderCodec("n", ODD).file_nbytes


@pytest.fixture
def root(config: StoreConfig) -> str:
    for namespace in ("a/b", "c"):
        with open_store(config, namespace, ODD) as store:
            save(store, KEYS, ODD)
    return config.directories[0]


def test_every_block_is_listed(root: str) -> None:
    blocks = list(stored_blocks(root))
    assert sorted((block.layout.namespace, block.key) for block in blocks) == sorted(
        (namespace, block) for namespace in ("a/b", "c") for block in KEYS
    )
    assert {block.nbytes for block in blocks} == {FILE}
    assert len(list(stored_blocks(root, "a/b"))) == 10
    assert list(stored_blocks(root, "a")) == []


def test_what_is_wrong_with_a_block(root: str) -> None:
    blocks = {block.key: block for block in stored_blocks(root, "c")}
    assert {check_block(block) for block in blocks.values()} == {None}
    paths = [Path(blocks[block].path) for block in KEYS]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].write_bytes(paths[2].read_bytes())
    paths[3].unlink()
    paths[4].write_bytes(Path(Layout(root, "a/b").block(KEYS[4])).read_bytes())
    expected = [BlockCorruptError, BlockForeignError, type(None), BlockMissingError, BlockForeignError, type(None)]
    found = [check_block(blocks[block]) for block in KEYS[:6]]
    assert [type(error) for error in found] == expected
    assert found[0] is not None
    assert found[0].where == str(paths[0])
    assert quarantine_block(blocks[KEYS[0]], found[0], keep=1)
    assert not paths[0].exists()
    assert len(list((Path(root) / "c" / "aside").iterdir())) == 1
