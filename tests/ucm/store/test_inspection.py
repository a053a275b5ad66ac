"""Inspecting a root without opening a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucm.store.base import BlockCorruptError, BlockForeignError, BlockMissingError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.inspection import (
    check_block,
    identity,
    left_behind,
    quarantine_block,
    stored_blocks,
    take_stock,
    unmarked,
)
from ucm.store.posix.layout import IDENTITY, Layout, owner_name
from ucm.store.posix.scan import side_files
from ucm.testing.blocks import ODD, key, save

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


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    with open_store(config, "a/b", ODD) as store:
        save(store, [key(number) for number in range(3)], ODD)
    return Layout(config.directories[0], "a/b")


def test_a_namespace_s_stock(layout: Layout) -> None:
    for number in range(3):
        os.utime(layout.block(key(number)), (1000 + number, 1000 + number))
    steps: list[None] = []
    stock = take_stock(layout, StoreConfig(), lambda: steps.append(None))
    assert (stock.namespace, stock.blocks, stock.bytes, len(steps)) == ("a/b", 3, 3 * FILE, 3)
    assert (stock.oldest_use, stock.newest_use) == (1000, 1002)
    assert (stock.temporaries, stock.left_behind, stock.quarantined, stock.side_bytes) == (0, 0, 0, 0)


def test_a_block_used_in_1970(layout: Layout) -> None:
    for number in range(3):
        os.utime(layout.block(key(number)), (0, 0))
    stock = take_stock(layout, StoreConfig())
    assert (stock.oldest_use, stock.newest_use) == (0, 0)


def test_a_namespace_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "n")
    stock = take_stock(layout, StoreConfig())
    assert (stock.blocks, stock.oldest_use, stock.newest_use, stock.identity) == (0, None, None, None)
    assert side_files(layout.temporary) == []


def test_what_the_dead_left(layout: Layout) -> None:
    mine = owner_name()
    dead = mine.replace(f"-{os.getpid()}-", "-999999999-")
    for name in (mine, dead):
        Path(layout.temporary, name).write_bytes(b"x" * 7)
        Path(layout.quarantine, name).write_bytes(b"x")
    Path(layout.quarantine, "1-ab-corrupt").write_bytes(b"x" * 3)
    left = left_behind(layout, 3600)
    assert {(file.path, file.nbytes) for file in left} == {
        (f"{layout.temporary}/{dead}", 7),
        (f"{layout.quarantine}/{dead}", 1),
    }
    stock = take_stock(layout, StoreConfig())
    assert (stock.temporaries, stock.left_behind, stock.quarantined, stock.side_bytes) == (2, 2, 1, 17)
    Path(layout.temporary, mine).rename(Path(layout.temporary, f"{'0' * 16}-1-1-0-0"))  # of another host
    assert len(left_behind(layout, 3600)) == 2
    assert len(left_behind(layout, -1)) == 3


def test_identities(layout: Layout) -> None:
    path = Path(layout.base, IDENTITY)
    assert identity(layout) is None
    path.write_text('{"name": "llama"}', encoding="utf-8")
    assert identity(layout) == {"name": "llama"}
    path.unlink()
    path.mkdir()
    assert identity(layout) is None


def test_namespaces_without_a_marker(layout: Layout) -> None:
    root = Path(layout.root)
    for name in ("stranger", "UPPER", "empty"):
        (root / name / "tmp").mkdir(parents=True)
    (root / "stranger" / "ab").mkdir()
    (root / "file").write_text("x", encoding="utf-8")
    assert unmarked(layout.root) == [str(root / "stranger")]
    (root / "stranger" / "ab").rmdir()
    assert unmarked(layout.root) == []
    Path(layout.base, "NAMESPACE").unlink()
    assert unmarked(layout.root) == [layout.base]
