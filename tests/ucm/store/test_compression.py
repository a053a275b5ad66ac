"""Compressed blocks: what is stored, what is refused, and that others of a namespace need not compress."""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.ucm.store.keys import key_file
from ucm.config.load import check_connector_config, load_connector_config
from ucm.errors import ConfigError, UcmError
from ucm.store import compression
from ucm.store.base import BlockCompressedError, BlockCorruptError, BlockGeometry
from ucm.store.compression import FRAME, pack, unpack
from ucm.store.factory import open_store
from ucm.store.inspection import check_block, stored_blocks, take_stock
from ucm.store.posix.layout import Layout
from ucm.store.posix.space import Evictor
from ucm.testing.blocks import EVEN, ODD, Memory, content, fetch, files, filled, key, save

if TYPE_CHECKING:
    from tests.ucm.store.servers import RedisServer
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
KEYS = [key(number) for number in range(4)]
LOSSLESS = {"Posix": {"compression": "lossless"}}
#: A block of several frames, the last one short.
LARGE = BlockGeometry((FRAME // 2 + 24, FRAME, 40), b"several frames16", 4)
HEADER = 4096


@pytest.fixture
def compressing(config: StoreConfig) -> StoreConfig:
    return replace(config, tiers=LOSSLESS)


def unpacked(stored: bytes, nbytes: int, begin: int = 0, end: int | None = None) -> bytes:
    return b"".join(unpack(memoryview(stored), nbytes, begin, end))


def few_values(nbytes: int) -> bytes:
    return (np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8) & 7).tobytes()


@pytest.mark.parametrize("element", [1, 2, 4, 8])
@pytest.mark.parametrize("nbytes", [1, 8, 1000, FRAME - 8, FRAME, FRAME + 8, 3 * FRAME + 1])
def test_what_is_packed_is_unpacked(element: int, nbytes: int) -> None:
    body = few_values(nbytes)
    stored = b"".join(pack(memoryview(body), element))
    assert unpacked(stored, nbytes) == body
    for begin, end in ((0, 1), (nbytes // 3, nbytes // 2 + 1), (nbytes - 1, nbytes)):
        assert unpacked(stored, nbytes, begin, end) == body[begin:end]
    if nbytes >= FRAME - 8:
        assert len(stored) < nbytes / 2


def test_only_planes_that_shrink_are_compressed() -> None:
    halves = np.random.default_rng(1).integers(0, 1 << 16, FRAME // 2, np.uint16) & 0x03FF
    sizes = struct.unpack_from("<3I", pack(halves.data.cast("B"), 2)[0])
    assert sizes[:2] == (2, FRAME // 2)
    assert sizes[2] < FRAME // 7


@given(st.binary(max_size=200), st.integers(0, 100))
def test_junk_is_refused_or_has_the_length(stored: bytes, nbytes: int) -> None:
    with suppress(BlockCorruptError):
        assert len(unpacked(stored, nbytes)) == nbytes


@pytest.mark.parametrize("claimed", [1 << 16, 1 << 40])
def test_a_plane_decides_no_length(claimed: int) -> None:
    nbytes = 1000
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 16))
    at = zstandard.frame_header_size(bomb) - 2  # the length of a frame of 64 KiB has two bytes, less 256
    if claimed > 1 << 16:  # a field of eight bytes, and no window
        bomb = bomb[:4] + b"\xe0" + struct.pack("<Q", claimed) + bomb[at + 2 :]
    assert zstandard.frame_content_size(bomb) == claimed
    with pytest.raises(BlockCorruptError, match="another length"):
        unpacked(struct.pack("<2I", 1, len(bomb)) + bomb, nbytes)


@pytest.mark.parametrize("geometry", [ODD, EVEN, LARGE], ids=["odd", "even", "large"])
@pytest.mark.parametrize("authenticated", [False, True])
def test_one_namespace_has_both_forms(
    config: StoreConfig, tmp_path: Path, geometry: BlockGeometry, authenticated: bool
) -> None:
    if authenticated:
        config = replace(config, authentication_key_file=key_file(tmp_path / "key"))
    wanted = {block: content(block, geometry) for block in KEYS}
    with open_store(replace(config, tiers=LOSSLESS), NAMESPACE, geometry) as packing:
        save(packing, KEYS[:2], geometry)
        with open_store(config, NAMESPACE, geometry) as plain:
            save(plain, KEYS[2:], geometry)
            sizes = {path.stat().st_size for path in files(config.directories[0])}
            assert min(sizes) < max(sizes) == HEADER + geometry.nbytes
            for store in (packing, plain):
                assert fetch(store, KEYS, geometry) == (wanted, {})
                for first in range(len(geometry.slice_sizes)):
                    memories = [Memory(block, geometry) for block in KEYS]
                    assert not store.load([memory.transfer(first, 1) for memory in memories]).wait().failed
                    for memory, whole in zip(memories, filled(KEYS, geometry), strict=True):
                        assert memory.slices[first] == whole.slices[first]


def test_a_block_that_does_not_shrink_is_stored_as_it_is(compressing: StoreConfig, config: StoreConfig) -> None:
    for number, used in enumerate((compressing, config)):
        with open_store(used, NAMESPACE, EVEN) as store:
            save(store, [KEYS[number]], EVEN, version=1)
    layout = Layout(config.directories[0], NAMESPACE)
    for number in (0, 1):
        assert Path(layout.block(KEYS[number])).stat().st_size == HEADER + EVEN.nbytes
        assert Path(layout.block(KEYS[number])).read_bytes()[HEADER:] == content(KEYS[number], EVEN, 1)


def test_the_tally_and_the_statistics_count_stored_bytes(
    compressing: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    reserve = Evictor.reserve

    def counted(self: Evictor, descriptor: int, nbytes: int) -> None:
        reserve(self, descriptor, nbytes)
        reserved.append(nbytes)

    monkeypatch.setattr(Evictor, "reserve", counted)
    with open_store(replace(compressing, posix_capacity_bytes=1 << 30), NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
        stats = store.stats()["posix"]
    sizes = [path.stat().st_size for path in files(compressing.directories[0])]
    assert stats.compressed_bytes == sum(sizes) < 0.8 * len(KEYS) * EVEN.nbytes
    assert sorted(reserved) == sorted(sizes)
    assert stats.saved_bytes == len(KEYS) * EVEN.nbytes


def test_tools_know_compressed_blocks(compressing: StoreConfig) -> None:
    with open_store(compressing, NAMESPACE, LARGE) as store:
        save(store, KEYS, LARGE)
    root = compressing.directories[0]
    (first, *others) = stored_blocks(root)
    stock = take_stock(Layout(root, NAMESPACE), compressing)
    assert stock.uncompressed_bytes == len(KEYS) * (HEADER + LARGE.nbytes) > 1.4 * stock.bytes
    assert all(check_block(block) is None for block in (first, *others))
    good = Path(first.path).read_bytes()
    for index in (8, 100, HEADER + 5, len(good) // 2, len(good) - 1):
        Path(first.path).write_bytes(good[:index] + bytes([good[index] ^ 2]) + good[index + 1 :])
        assert isinstance(check_block(first), UcmError)
    Path(first.path).write_bytes(good[:-1])
    assert isinstance(check_block(first), BlockCorruptError)


def test_a_server_may_have_both_forms(config: StoreConfig, redis_server: RedisServer) -> None:
    options: dict[str, Any] = {"address": redis_server.address, "timeout": 60.0, "transfer_timeout": 60.0}
    plain = replace(config, pipeline="Redis", directories=(), tiers={"Redis": options})
    packing = replace(plain, tiers={"Redis": {**options, "compression": "lossless"}})
    with open_store(packing, NAMESPACE, LARGE) as one, open_store(plain, NAMESPACE, LARGE) as other:
        save(one, KEYS[:2], LARGE)
        save(other, KEYS[2:], LARGE)
        for store in (one, other):
            assert fetch(store, KEYS, LARGE)[1] == {}
            for first in range(len(LARGE.slice_sizes)):
                memories = [Memory(block, LARGE) for block in KEYS]
                assert not store.load([memory.transfer(first, 1) for memory in memories]).wait().failed
                for memory, whole in zip(memories, filled(KEYS, LARGE), strict=True):
                    assert memory.slices[first] == whole.slices[first]
            assert store.stats()["redis"].quarantined_blocks == 0


@pytest.fixture
def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    compression._zstandard.cache_clear()


def test_without_the_package_a_block_stays(
    config: StoreConfig, compressing: StoreConfig, request: pytest.FixtureRequest
) -> None:
    with open_store(compressing, NAMESPACE, EVEN) as store:
        save(store, KEYS[:1], EVEN)
    request.getfixturevalue("without_zstandard")
    with open_store(config, NAMESPACE, EVEN) as store:
        loaded, failed = fetch(store, KEYS[:1], EVEN)
        assert loaded == {}
        assert isinstance(failed[KEYS[0]], BlockCompressedError)
        assert "[compression]" in str(failed[KEYS[0]].fix)
        stats = store.stats()["posix"]
        assert (stats.failures, stats.quarantined_blocks) == ({"load.compressed": 1}, 0)
        assert store.lookup(KEYS[:1]) == [True]


@pytest.mark.parametrize(("pipeline", "tiers"), [("Posix", LOSSLESS), ("Redis", {"Redis": LOSSLESS["Posix"]})])
def test_without_the_package_the_setting_is_refused(
    config: StoreConfig, without_zstandard: None, pipeline: str, tiers: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="compression needs zstandard") as caught:
        open_store(replace(config, pipeline=pipeline, tiers=tiers), NAMESPACE, EVEN)
    assert caught.value.where == f"store: tiers: {pipeline}: compression"
    assert "[compression]" in str(caught.value.fix)


def test_a_check_of_the_settings_says_so_before_an_engine_does(
    tmp_path: Path, config: StoreConfig, without_zstandard: None
) -> None:
    store = {"directories": str(tmp_path / "kv"), "tiers": LOSSLESS}
    with pytest.raises(ConfigError) as opened:
        open_store(replace(config, tiers=LOSSLESS), NAMESPACE, EVEN)
    with pytest.raises(ConfigError) as checked:
        check_connector_config({"store": store}, make=False)
    assert (checked.value.what, checked.value.fix) == (opened.value.what, opened.value.fix)
    assert "tiers" in checked.value.where


def test_an_unknown_compression_is_refused(config: StoreConfig) -> None:
    with pytest.raises(ConfigError, match="'none' or 'lossless'"):
        open_store(replace(config, tiers={"Posix": {"compression": "lossy"}}), NAMESPACE, EVEN)


def test_loading_by_layers_does_not_go_with_it(tmp_path: Path) -> None:
    store = {"pipeline": "Posix", "directories": str(tmp_path), "tiers": LOSSLESS}
    with pytest.raises(ConfigError, match="once for every layer"):
        load_connector_config({"connector": "layerwise", "store": store})
    assert load_connector_config({"connector": "direct", "store": store}).store.tiers == LOSSLESS
