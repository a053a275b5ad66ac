"""What was promised is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.blocks import EVEN, Memory, content, key, save
from ucm.store.factory import open_store
from ucm.store.leases import LeasingStore
from ucm.store.posix_layout import Layout
from ucm.store.posix_survey import evict, survey
from ucm.store.posix_tidy import tidy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
KEYS = [key(number) for number in range(6)]


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    return Layout(config.directories[0], NAMESPACE)


@pytest.fixture
def store(config: StoreConfig) -> Iterator[LeasingStore]:
    with open_store(config, NAMESPACE, EVEN) as opened:
        assert isinstance(opened, LeasingStore)
        save(opened, KEYS, EVEN)
        yield opened


def evict_all(layout: Layout) -> None:
    evict(layout.root, survey(layout.root), 1e12, lambda _: None)


def loaded(store: KVStore, lease: str | None) -> list[bool]:
    assert isinstance(store, LeasingStore)
    memories = [Memory(block, EVEN) for block in KEYS]
    result = store.wait(store.load([memory.transfer() for memory in memories], lease))
    for memory in memories:
        if memory.key in result.done:
            assert bytes(memory.data) == content(memory.key, EVEN)
    return [block in result.done for block in KEYS]


def test_a_leased_block_is_not_evicted(store: LeasingStore, layout: Layout) -> None:
    lease = store.lease([KEYS[1], KEYS[4], key(99)])
    assert lease.keys == {KEYS[1], KEYS[4]}
    evict_all(layout)
    expected = [index in {1, 4} for index in range(6)]
    assert store.lookup(KEYS) == expected
    assert loaded(store, None) == expected
    store.release(lease)
    store.release(lease)
    evict_all(layout)
    assert store.lookup(KEYS) == [False] * 6


def test_a_block_deleted_at_the_very_moment_is_loaded_by_its_lease(
    store: LeasingStore, config: StoreConfig, layout: Layout
) -> None:
    lease = store.lease(KEYS[:3])
    for block in KEYS:
        Path(layout.block(block)).unlink()
    # By another process's instance as well: the token is all it needs.
    with open_store(config, NAMESPACE, EVEN) as other:
        assert loaded(other, None) == [False] * 6
        assert loaded(other, lease.token) == [True] * 3 + [False] * 3
    store.release(lease)
    assert loaded(store, lease.token) == [False] * 6


def test_a_block_that_was_written_again_and_damaged_is_loaded_by_its_lease(store: LeasingStore, layout: Layout) -> None:
    lease = store.lease(KEYS)
    path = Path(layout.block(KEYS[2]))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.unlink()
    path.write_bytes(damaged)
    assert loaded(store, lease.token) == [True] * 6
    assert loaded(store, None) == [index != 2 for index in range(6)]
    store.release(lease)


def test_a_leased_copy_that_was_damaged_is_not_the_last_word(store: LeasingStore, layout: Layout) -> None:
    lease = store.lease(KEYS)
    path = Path(layout.block(KEYS[2]))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    path.unlink()
    path.write_bytes(whole)
    assert loaded(store, lease.token) == [True] * 6
    assert store.stats()["posix"].failures == {}
    store.release(lease)


def test_leased_bytes_count(store: LeasingStore, layout: Layout) -> None:
    before = survey(layout.root).nbytes
    lease = store.lease(KEYS)
    assert survey(layout.root).nbytes == before
    store.release(lease)
    assert survey(layout.root).nbytes == before


def test_a_verified_lease_promises_only_what_is_whole(store: LeasingStore, layout: Layout) -> None:
    path = Path(layout.block(KEYS[2]))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert store.lease(KEYS).keys == set(KEYS)
    assert store.lease(KEYS, verify=True).keys == set(KEYS) - {KEYS[2]}
    assert store.stats()["posix"].failures == {"lease.corrupt": 1}
    assert store.lookup(KEYS[2:3]) == [False]


def test_leases_of_the_dead_go_and_of_other_hosts_the_old(store: LeasingStore, layout: Layout) -> None:
    mine = store.lease(KEYS[:1])
    old = store.lease(KEYS[1:2])
    for_long = store.lease(KEYS[3:4])
    elsewhere = Path(layout.leases, f"{'0' * 16}-{old.token.split('-', 1)[1]}")
    Path(layout.leases, old.token).rename(elsewhere)
    for path in (elsewhere, Path(layout.leases, for_long.token)):
        os.utime(path, (1e9, 1e9))
    host, _, _, rest = mine.token.split("-", 3)
    dead = f"{host}-{2**22 + 1}-1-{rest}"
    Path(layout.leases, dead).mkdir()
    Path(layout.leases, dead, KEYS[2].hex()).hardlink_to(layout.block(KEYS[2]))
    assert tidy(layout.root, stale_seconds=3600) == 2
    assert {path.name for path in Path(layout.leases).iterdir()} == {mine.token, for_long.token}
    evict_all(layout)
    assert store.lookup(KEYS) == [True, False, False, True, False, False]


def test_a_directory_that_cannot_lease_promises_nothing(store: LeasingStore, layout: Layout) -> None:
    Path(layout.leases).rmdir()
    Path(layout.leases).write_text("in the way", encoding="utf-8")
    assert store.lease(KEYS).keys == frozenset()


def test_a_medium_that_fails_when_blocks_are_let_go(
    store: LeasingStore, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission withdrawn, a network file system's stale handle: nothing is raised; the next release tries again."""
    refused = []

    def refuse(path: Path) -> bool:
        refused.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    lease = store.lease(KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        store.release(lease)
    assert refused
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *_, **__: refuse(Path()))
        store.release(lease)
    assert len(refused) > 1
    assert list(Path(layout.leases).iterdir())
    store.release(store.lease(KEYS[:1]))
    assert list(Path(layout.leases).iterdir()) == []
