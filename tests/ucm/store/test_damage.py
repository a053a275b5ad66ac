"""Files that are not what was stored: never loaded, quarantined, counted, and written anew by the next save."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

from ucm.store.base import BlockCorruptError, BlockForeignError, BlockGeometry
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix.files import check_file
from ucm.store.posix.layout import Layout
from ucm.store.posix.tier import PosixTier
from ucm.testing.blocks import ODD, Memory, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucm.store.base import BlockKey, KVStore, StoreError
    from ucm.store.config import StoreConfig
    from ucm.store.posix.directory import Directory

NAMESPACE = "n"
KEY = key(1)
HEADER = 4096


@pytest.fixture(params=["none", "lossless"])
def config(config: StoreConfig, request: pytest.FixtureRequest) -> StoreConfig:
    return replace(config, tiers={"Posix": {"compression": request.param}})


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    return Layout(config.directories[0], NAMESPACE)


@pytest.fixture
def path(layout: Layout) -> Path:
    return Path(layout.block(KEY))


@pytest.fixture
def store(config: StoreConfig) -> Iterator[KVStore]:
    with open_store(config, NAMESPACE, ODD) as opened:
        save(opened, [KEY], ODD)
        yield opened


def is_refused(store: KVStore, path: Path, damaged: bytes) -> None:
    are_refused(store, {KEY: (path, damaged)})


def are_refused(store: KVStore, damaged: Mapping[BlockKey, tuple[Path, bytes]]) -> None:
    before = store.stats()["posix"].quarantined_blocks
    for path, data in damaged.values():
        path.write_bytes(data)
    assert store.lookup(list(damaged)) == [True] * len(damaged)
    loaded, failed = fetch(store, list(damaged), ODD)
    assert loaded == {}
    for block, (path, _) in damaged.items():
        assert isinstance(failed[block], BlockCorruptError | BlockForeignError)
        assert failed[block].where == str(path)
        assert not path.exists()
    assert store.lookup(list(damaged)) == [False] * len(damaged)
    assert store.stats()["posix"].quarantined_blocks == before + len(damaged)


def test_every_byte_of_the_header(store: KVStore, layout: Layout) -> None:
    """One byte of each of many blocks at a time."""
    keys = [key(number) for number in range(64)]
    save(store, keys, ODD)
    paths = {block: Path(layout.block(block)) for block in keys}
    good = {block: path.read_bytes() for block, path in paths.items()}
    for start in range(0, HEADER, len(keys)):
        damaged = {}
        for index, (block, data) in enumerate(good.items(), start):
            damaged[block] = paths[block], data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        are_refused(store, damaged)
    for block, data in good.items():
        paths[block].write_bytes(data)
    assert fetch(store, keys, ODD)[0] == {block: content(block, ODD) for block in keys}


@pytest.mark.parametrize("config", ["none"], indirect=True)
def test_bits_of_the_slices(store: KVStore, path: Path) -> None:
    good = path.read_bytes()
    chance = np.random.default_rng(3)
    first_of_each = [HEADER + sum(ODD.slice_sizes[:index]) for index in range(len(ODD.slice_sizes))]
    for index in [*first_of_each, len(good) - 1, *chance.integers(HEADER, len(good), 200)]:
        is_refused(store, path, good[:index] + bytes([good[index] ^ 1 << int(chance.integers(8))]) + good[index + 1 :])


@pytest.mark.parametrize("config", ["lossless"], indirect=True)
def test_bits_of_what_is_compressed(store: KVStore, path: Path) -> None:
    """Some bits of Zstandard's mean nothing: then the block is what was stored, and is served."""
    good, chance, served = path.read_bytes(), np.random.default_rng(6), 0
    for index in [*range(HEADER, HEADER + 60), len(good) - 1, *chance.integers(HEADER, len(good), 300)]:
        path.write_bytes(good[:index] + bytes([good[index] ^ 1 << int(chance.integers(8))]) + good[index + 1 :])
        loaded, failed = fetch(store, [KEY], ODD)
        served += len(loaded)
        assert loaded == {KEY: content(KEY, ODD)} or isinstance(failed[KEY], BlockCorruptError)
        assert path.exists() == bool(loaded)
    assert served < 10


def test_other_lengths(store: KVStore, path: Path) -> None:
    good = path.read_bytes()
    lengths = [
        0,
        1,
        100,
        HEADER - 1,
        HEADER,
        HEADER + 1,
        len(good) - 1,
        *np.random.default_rng(4).integers(0, len(good), 50),
    ]
    for length in lengths:
        is_refused(store, path, good[:length])
    is_refused(store, path, good + b"x")
    is_refused(store, path, good + bytes(1 << 20))


def test_holes_and_junk(store: KVStore, path: Path) -> None:
    good = path.read_bytes()
    is_refused(store, path, bytes(len(good)))
    is_refused(store, path, good[:HEADER] + bytes(len(good) - HEADER))
    is_refused(store, path, bytes(HEADER) + good[HEADER:])
    is_refused(store, path, np.random.default_rng(5).bytes(len(good)))


def test_a_whole_block_in_the_wrong_place(store: KVStore, config: StoreConfig, path: Path, layout: Layout) -> None:
    save(store, [key(2)], ODD)
    is_refused(store, path, Path(layout.block(key(2))).read_bytes())
    with open_store(config, "other", ODD) as other:
        save(other, [KEY], ODD)
    is_refused(store, path, Path(Layout(config.directories[0], "other").block(KEY)).read_bytes())


@pytest.mark.parametrize("config", ["none"], indirect=True)
def test_a_part_of_a_block_is_checked_as_well(store: KVStore, path: Path) -> None:
    good = path.read_bytes()
    wanted = 3
    begin = HEADER + sum(ODD.slice_sizes[:wanted])
    memory = Memory(KEY, ODD)
    # Damage outside the requested part is not checked; damage in it, or in the header, is.
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert store.load([memory.transfer(wanted, 1)]).wait().failed == {}
    for index in (begin, begin + ODD.slice_sizes[wanted] - 1, 70, 200):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
        assert KEY in store.load([memory.transfer(wanted, 1)]).wait().failed
        assert not path.exists()


def test_a_damaged_block_is_written_anew(store: KVStore, path: Path) -> None:
    is_refused(store, path, path.read_bytes()[:-1])
    assert save(store, [KEY], ODD).nbytes == ODD.nbytes
    assert fetch(store, [KEY], ODD)[0] == {KEY: content(KEY, ODD)}


def test_a_bounded_number_is_kept(store: KVStore, config: StoreConfig, path: Path, layout: Layout) -> None:
    good = path.read_bytes()
    for number in range(config.quarantine_keep + 5):
        is_refused(store, path, good[: HEADER + number])
    kept = sorted(Path(layout.quarantine).iterdir())
    assert len(kept) == config.quarantine_keep
    assert [file.stat().st_size - HEADER for file in kept] == list(range(5, config.quarantine_keep + 5))
    assert all(KEY.hex() in file.name and file.name.endswith("-corrupt") for file in kept)


def test_each_cause_is_counted_and_logged_once(store: KVStore, path: Path, said: list[str]) -> None:
    good = path.read_bytes()
    foreign = bytearray(good)
    foreign[8] = 9
    for damaged in (good[:-1], good[:-2], bytes(foreign)):
        is_refused(store, path, damaged)
    assert store.stats()["posix"].failures == {"load.corrupt": 2, "load.foreign": 1}
    assert [line.split(" in tier")[0] for line in said] == ["[UCM.Store] load.corrupt", "[UCM.Store] load.foreign"]


@pytest.mark.parametrize("config", ["none"], indirect=True)
def test_no_memory_is_taken_for_what_a_foreign_header_claims(path: Path, store: KVStore) -> None:
    assert store.lookup([KEY]) == [True]
    claim = BlockGeometry((1 << 40,), ODD.fingerprint)
    path.write_bytes(HeaderCodec(NAMESPACE, claim).encode(KEY, [0]))
    os.truncate(path, HEADER + claim.nbytes)  # it takes no room
    with pytest.raises(BlockForeignError):
        check_file(str(path), KEY, namespace=NAMESPACE, geometry=ODD)


def test_a_block_that_was_replaced_meanwhile_stays(
    store: KVStore, config: StoreConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines meet the damage, and the faster one has saved the block again before the slower one goes on."""
    judge = PosixTier._fail

    def late(self: PosixTier, directory: Directory, key: BlockKey, error: StoreError) -> NoReturn:
        with monkeypatch.context() as patch, open_store(config, NAMESPACE, ODD) as faster:
            patch.setattr(PosixTier, "_fail", judge)
            assert isinstance(fetch(faster, [KEY], ODD)[1][KEY], BlockCorruptError)
            save(faster, [KEY], ODD)
        judge(self, directory, key, error)

    path.write_bytes(path.read_bytes()[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(PosixTier, "_fail", late)
        assert isinstance(fetch(store, [KEY], ODD)[1][KEY], BlockCorruptError)
    assert fetch(store, [KEY], ODD)[0] == {KEY: content(KEY, ODD)}


def test_what_cannot_be_moved_is_deleted(store: KVStore, path: Path, layout: Layout) -> None:
    Path(layout.quarantine).rmdir()
    Path(layout.quarantine).write_text("in the way", encoding="utf-8")
    is_refused(store, path, path.read_bytes()[:-1])
