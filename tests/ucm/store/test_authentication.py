"""Authenticated blocks: whoever can write to a medium but has no key causes misses at most."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.system import require_root
from tests.ucm.store.keys import key_file, secret
from ucm.config import load_connector_config
from ucm.errors import ConfigError
from ucm.store.authentication import Authenticator, read_authenticator
from ucm.store.base import BlockGeometry, StoreError
from ucm.store.config import StoreConfig
from ucm.store.factory import authenticator_of, open_store
from ucm.store.format import HeaderCodec, checksum, namespace_digest, nbytes_of, verify
from ucm.store.inspection import check_block, stored_blocks
from ucm.store.memory.segment import segments
from ucm.store.posix.layout import Layout
from ucm.store.posix.tier import PosixTier
from ucm.store.tier import Tier
from ucm.testing.blocks import EVEN, MANY, ODD, Memory, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.clock import SimulatedClock
    from tests.ucm.store.servers import RedisServer
    from ucm.store.base import BlockKey

NAMESPACE = "model/rank-0"
KEYS = [key(number) for number in range(4)]
ALL = {block: content(block, EVEN) for block in KEYS}


class Medium:
    """Where blocks are, for somebody who can write there: a directory, a server, or memory shared with a group."""

    def __init__(self, config: StoreConfig, server: RedisServer | None = None) -> None:
        self.config, self._server = config, server

    @property
    def tier(self) -> str:
        """The tier's name in statistics."""
        return {"Cache": "dram"}.get(self.config.pipeline, self.config.pipeline.lower())

    def get(self, block: BlockKey, namespace: str = NAMESPACE) -> bytearray:
        """The stored bytes of a block."""
        if self._server is not None:
            with self._server.client() as client:
                return bytearray(client.get(self._name(block, namespace)))
        if self.config.pipeline == "Posix":
            return bytearray(self._path(block, namespace).read_bytes())
        return bytearray(self._slot(block, namespace))

    def put(self, block: BlockKey, value: bytes | bytearray, namespace: str = NAMESPACE) -> None:
        """Replace the stored bytes of a block."""
        if self._server is not None:
            with self._server.client() as client:
                client.set(self._name(block, namespace), bytes(value))
        elif self.config.pipeline == "Posix":
            path = self._path(block, namespace)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(value)
        else:
            self._slot(block, namespace)[: len(value)] = value

    def _name(self, block: BlockKey, namespace: str) -> str:
        return f"ucm2:{namespace_digest(namespace).hex()}:{block.hex()}"

    def _path(self, block: BlockKey, namespace: str) -> Path:
        return Path(Layout(self.config.directories[0], namespace).block(block))

    def _slot(self, block: BlockKey, namespace: str) -> memoryview:
        for segment in segments(Layout(self.config.dram_directory, namespace)):
            for found, number in segment.blocks():
                if found == block:
                    return segment.slot(number)[: codec_of(self.config).file_nbytes]
        raise AssertionError(block)


@pytest.fixture(params=["Posix", "Redis", "Cache"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, config: StoreConfig) -> Medium:
    key_path = key_file(tmp_path / "key")
    signed = replace(config, pipeline=request.param, authentication_key_file=key_path)
    if request.param == "Redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        options: dict[str, Any] = {"address": server.address, "timeout": 60.0, "transfer_timeout": 60.0}
        return Medium(replace(signed, tiers={"Redis": options}, directories=()), server)
    if request.param == "Cache":
        # Memory that a group shares is no more private than a directory.
        memory: str = request.getfixturevalue("memory")
        signed = replace(signed, dram_directory=memory, dram_capacity_bytes=64 << 20, trusted_group=os.getgid())
    return Medium(signed)


def codec_of(config: StoreConfig, namespace: str = NAMESPACE, geometry: BlockGeometry = EVEN) -> HeaderCodec:
    return HeaderCodec(namespace, geometry, authenticator_of(config))


def resealed(value: bytearray) -> bytearray:
    """Update all checksums, as somebody without the key can."""
    codec = HeaderCodec(NAMESPACE, EVEN, Authenticator("anything else"))
    for index, (begin, end) in enumerate(zip(codec.offsets, codec.offsets[1:], strict=False)):
        at = 128 + 8 * len(EVEN.slice_sizes) + 8 * index
        value[at : at + 8] = checksum(bytes(value[begin:end])).to_bytes(8, "little")
    value[codec.nbytes - 8 : codec.nbytes] = checksum(bytes(value[: codec.nbytes - 8])).to_bytes(8, "little")
    return value


def other_bytes(medium: Medium, block: BlockKey) -> bytearray:
    value = medium.get(block)
    value[-EVEN.nbytes :] = content(block, EVEN, version=1)
    return resealed(value)


def without_key(medium: Medium, block: BlockKey) -> bytearray:
    codec = HeaderCodec(NAMESPACE, EVEN)
    data = content(block, EVEN, version=1)
    return codec.encode(block, codec.seal(Memory(block, EVEN, data).slices)) + bytearray(data)


def another_key(medium: Medium, block: BlockKey) -> bytearray:
    codec = HeaderCodec(NAMESPACE, EVEN, Authenticator("of somebody else"))
    data = content(block, EVEN, version=1)
    return codec.encode(block, codec.seal(Memory(block, EVEN, data).slices)) + bytearray(data)


def another_key_renamed(medium: Medium, block: BlockKey) -> bytearray:
    """With the fingerprint of the engine's key, which is no secret."""
    value, nbytes = another_key(medium, block), codec_of(medium.config).nbytes
    value[nbytes - 32 : nbytes - 24] = medium.get(block)[nbytes - 32 : nbytes - 24]
    return resealed(value)


def another_block(medium: Medium, block: BlockKey) -> bytearray:
    return medium.get(KEYS[-1])


def another_block_renamed(medium: Medium, block: BlockKey) -> bytearray:
    value = medium.get(KEYS[-1])
    value[64 : 64 + len(block)] = block
    return resealed(value)


def swapped_slices(medium: Medium, block: BlockKey) -> bytearray:
    """Two layer slices of a block, with their tags."""
    value, codec = medium.get(block), codec_of(medium.config)
    first, second, third = codec.offsets[:3]
    value[first:third] = value[second:third] + value[first:second]
    tags = 128 + 16 * len(EVEN.slice_sizes)
    value[tags : tags + 32] = value[tags + 16 : tags + 32] + value[tags : tags + 16]
    return resealed(value)


def another_namespace(medium: Medium, block: BlockKey) -> bytearray:
    with open_store(medium.config, "another", EVEN) as store:
        assert save(store, [block], EVEN, version=1).failed == {}
    return medium.get(block, "another")


def another_namespace_renamed(medium: Medium, block: BlockKey) -> bytearray:
    value = another_namespace(medium, block)
    value[40:56] = namespace_digest(NAMESPACE)
    return resealed(value)


def another_geometry(medium: Medium, block: BlockKey) -> bytearray:
    """With the same sizes, but for instance another layout of the bytes."""
    codec = codec_of(medium.config, geometry=BlockGeometry(EVEN.slice_sizes, bytes(16)))
    data = content(block, EVEN, version=1)
    value = codec.encode(block, codec.seal(Memory(block, EVEN, data).slices)) + bytearray(data)
    value[24:40] = EVEN.fingerprint
    return resealed(value)


FORGERIES = [
    other_bytes,
    without_key,
    another_key,
    another_key_renamed,
    another_block_renamed,
    swapped_slices,
    another_namespace_renamed,
    another_geometry,
]
MOVES = [another_block, another_namespace]


@pytest.mark.parametrize("forge", FORGERIES + MOVES)
def test_a_forged_block_is_refused_and_stored_again(
    medium: Medium, forge: Callable[[Medium, BlockKey], bytearray]
) -> None:
    with open_store(medium.config, NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
        value = forge(medium, KEYS[0])
        assert len(value) == len(medium.get(KEYS[0]))
        medium.put(KEYS[0], value)
        assert store.lookup(KEYS) == [True] * 4
        done, failed = fetch(store, KEYS, EVEN)
        assert done == {block: ALL[block] for block in KEYS[1:]}
        cause = "foreign" if forge in MOVES else "corrupt"
        assert {block: error.cause for block, error in failed.items()} == {KEYS[0]: cause}
        stats = store.stats()[medium.tier]
        assert (stats.failures, stats.quarantined_blocks) == ({f"load.{cause}": 1}, 1)
        assert store.lookup(KEYS) == [False, True, True, True]
        assert save(store, KEYS[:1], EVEN).failed == {}
        assert fetch(store, KEYS, EVEN) == (ALL, {})


@pytest.mark.parametrize("forge", FORGERIES + MOVES)
def test_a_forged_block_is_not_copied_to_another_tier(
    tmp_path: Path,
    memory: str,
    config: StoreConfig,
    forge: Callable[[Medium, BlockKey], bytearray],
    clock: SimulatedClock,
) -> None:
    signed = replace(config, authentication_key_file=key_file(tmp_path / "key"))
    medium = Medium(signed)
    with open_store(signed, NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
    forged = forge(medium, KEYS[0])
    cause = "foreign" if forge in MOVES else "corrupt"
    cached = replace(signed, pipeline="Cache|Posix", dram_directory=memory, dram_capacity_bytes=64 << 20)
    medium.put(KEYS[0], forged)
    with open_store(cached, NAMESPACE, EVEN, clock=clock) as store:
        assert fetch(store, KEYS[:1], EVEN)[1][KEYS[0]].cause == cause
        clock.run_until_idle()
    with open_store(replace(cached, pipeline="Cache", directories=()), NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS) == [False] * 4


@pytest.mark.parametrize("geometry", [ODD, EVEN, MANY])
@pytest.mark.parametrize("private", [False, True])
def test_every_tier_loads_what_another_one_stored(
    tmp_path: Path, memory: str, config: StoreConfig, geometry: BlockGeometry, private: bool
) -> None:
    signed = replace(config, authentication_key_file=key_file(tmp_path / "key"))
    cached = replace(signed, pipeline="Cache|Posix", dram_directory=memory, dram_capacity_bytes=64 << 20)
    cached = replace(cached, trusted_group=None if private else os.getgid())
    expected = {block: content(block, geometry) for block in KEYS}
    with open_store(cached, NAMESPACE, geometry) as store:
        save(store, KEYS, geometry)
        assert fetch(store, KEYS, geometry) == (expected, {})
        assert store.flush(60.0)
    with open_store(signed, NAMESPACE, geometry) as store:
        assert fetch(store, KEYS, geometry) == (expected, {})


def test_private_memory_is_checked_by_checksums(
    tmp_path: Path, memory: str, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody without the key can write to it, and checksums are faster; damage is found all the same."""
    signed = replace(config, authentication_key_file=key_file(tmp_path / "key"), pipeline="Cache")
    signed = replace(signed, dram_directory=memory, dram_capacity_bytes=64 << 20)
    with open_store(signed, NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
        tagged: list[int] = []

        def counting(self: Authenticator, pieces: Iterable[memoryview]) -> bytes:
            tagged.append(nbytes_of(pieces))
            return bytes(16)

        monkeypatch.setattr(Authenticator, "slice_tag", counting)
        assert fetch(store, KEYS, EVEN) == (ALL, {})
        assert tagged == []
        medium = Medium(signed)
        value = medium.get(KEYS[0])
        value[-1] ^= 1
        medium.put(KEYS[0], value)
        assert {error.cause for error in fetch(store, KEYS, EVEN)[1].values()} == {"corrupt"}


def test_engines_with_another_key_refuse_the_blocks(medium: Medium, tmp_path: Path) -> None:
    """Also where somebody gives their namespaces the same name; the connector does not."""
    other = replace(medium.config, authentication_key_file=key_file(tmp_path / "other"))
    with open_store(medium.config, NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
    with open_store(other, NAMESPACE, EVEN) as store:
        done, failed = fetch(store, KEYS, EVEN)
        assert (done, {error.cause for error in failed.values()}) == ({}, {"corrupt"})
        assert all("another" in str(error) for error in failed.values())


def test_engines_without_a_key_refuse_the_blocks(config: StoreConfig, tmp_path: Path) -> None:
    with open_store(replace(config, authentication_key_file=key_file(tmp_path / "key")), NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
    with open_store(config, NAMESPACE, EVEN) as store:
        assert fetch(store, KEYS, EVEN)[0] == {}


def test_the_header_is_as_documented() -> None:
    """Existing blocks must stay valid: this test changes only together with the format's version."""
    authenticator = Authenticator("0123456789abcdef" * 4)
    assert authenticator.fingerprint.hex() == "726eb665ff71dba7"
    codec = HeaderCodec("n", BlockGeometry((3, 5), b"0123456789abcdef"), authenticator)
    header = codec.encode(key(1, 16), codec.seal([memoryview(b"abc"), memoryview(b"defgh")]))
    assert header[8:12] == bytes([2, 0, 1, 0])
    assert header[160:192].hex() == "3e7662bfc3b07da6fae3c4e6c6d92aa1127facb17a13ae1691ba756d39939df6"
    assert header[192:4064] == bytes(4064 - 192)
    assert header[4064:4072] == authenticator.fingerprint
    assert header[4072:4088].hex() == "54d194f75187edaff6488003f8e37e7d"


def test_every_changed_byte_is_noticed_without_the_checksums() -> None:
    """A changed byte with renewed checksums: only the tags can tell."""
    authenticator = Authenticator("0123456789abcdef" * 4)
    codec = HeaderCodec(NAMESPACE, EVEN, authenticator)
    data = content(KEYS[0], EVEN)
    sound = codec.encode(KEYS[0], codec.seal(Memory(KEYS[0], EVEN, data).slices)) + bytearray(data)
    verify(memoryview(sound), KEYS[0], authenticator)
    for index in [*range(codec.nbytes - 8), *range(codec.nbytes, len(sound), 997)]:
        value = bytearray(sound)
        value[index] ^= 0x40
        value = resealed(value)
        if value == sound:
            continue  # a checksum, which was renewed
        with pytest.raises(StoreError):
            verify(memoryview(value), KEYS[0], authenticator)


def test_a_tool_without_the_key_finds_damage_and_one_with_it_finds_forgeries(
    config: StoreConfig, tmp_path: Path
) -> None:
    signed = replace(config, authentication_key_file=key_file(tmp_path / "key"))
    medium = Medium(signed)
    with open_store(signed, NAMESPACE, EVEN) as store:
        save(store, KEYS, EVEN)
    medium.put(KEYS[0], other_bytes(medium, KEYS[0]))
    damaged = medium.get(KEYS[1])
    damaged[-1] ^= 1
    medium.put(KEYS[1], damaged)
    with open_store(config, "another", EVEN) as store:
        save(store, KEYS[:1], EVEN)
    blocks = list(stored_blocks(config.directories[0]))
    assert sum(check_block(block) is not None for block in blocks) == 1
    authentic: list[None] = []
    wrong = [
        block.key for block in blocks if check_block(block, authenticator_of(signed), lambda: authentic.append(None))
    ]
    assert (sorted(wrong), len(authentic)) == (sorted(KEYS[:2]), 2)


# The key.


def test_a_key_is_read_once(tmp_path: Path) -> None:
    """An engine that opens another namespace later has the key that it began with."""
    path = key_file(tmp_path / "key", secret("a"))
    before = read_authenticator(path)
    key_file(tmp_path / "key", secret("b"))
    assert read_authenticator(path) is before


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o604, "a" * 32, "other users can read or change it"),
        (0o620, "a" * 32, "other users can read or change it"),
        (0o602, "a" * 32, "other users can read or change it"),
        (0o600, secret("a")[:31], "the key has 31 characters, but needs at least 32"),
        (0o600, "aaaa" * 16, "the key is not random: it has only 1 different character"),
        (0o600, "aaab" * 16, "the key is not random: it has only 2 different characters"),
        (0o600, " " * 64, "blanks or characters other than printable ASCII"),
        (0o600, secret("a") + " ", "blanks or characters other than printable ASCII"),
        (0o600, "\ufeff" + secret("a"), "blanks or characters other than printable ASCII"),
        (0o600, secret("a") + "\0", "blanks or characters other than printable ASCII"),
        (0o600, "", "empty first line"),
        (0o600, "\n" + "a" * 32, "empty first line"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused(
    tmp_path: Path, config: StoreConfig, mode: int, text: str, words: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words) as caught:
        open_store(replace(config, authentication_key_file=str(path)), NAMESPACE, EVEN)
    assert str(path) in str(caught.value.where)
    assert caught.value.fix
    assert not {"aaaa", "aaab", secret("a")[:31]} & set(re.findall(r"\w+", str(caught.value)))
    assert secret("a")[:8] not in str(caught.value)


@pytest.mark.parametrize("ends", ["\n", "\r\n", ""])
def test_the_end_of_the_line_is_no_part_of_the_key(tmp_path: Path, ends: str) -> None:
    path = Path(key_file(tmp_path / "key"))
    path.write_bytes(secret("a").encode() + ends.encode())
    assert read_authenticator(str(path)).fingerprint == Authenticator(secret("a")).fingerprint


@pytest.mark.parametrize("kind", ["nothing", "directory", "fifo", "not UTF-8", "NUL", "empty"])
def test_what_is_no_key_file_is_refused(tmp_path: Path, config: StoreConfig, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "not UTF-8":
        path.touch(0o600)
        path.write_bytes(b"\xff" * 64)
    named = {"NUL": f"{path}\0", "empty": ""}.get(kind, str(path))
    with pytest.raises(ConfigError, match=r"cannot be read|is no file") as caught:
        open_store(replace(config, authentication_key_file=named), NAMESPACE, EVEN)
    assert caught.value.fix
    with pytest.raises(ConfigError, match=r"cannot be read|is no file|is empty|null character") as caught:
        load_connector_config({"store": {"directories": config.directories[0], "authentication_key_file": named}})
    assert "authentication_key_file" in str(caught.value.where)


def test_a_key_of_another_user_is_refused(tmp_path: Path, config: StoreConfig) -> None:
    require_root("only root can give files away")
    path = key_file(tmp_path / "key")
    os.chown(path, 12345, os.getgid())
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        open_store(replace(config, authentication_key_file=path), NAMESPACE, EVEN)


def test_a_whole_store_of_others_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(pipeline="ucm.store.factory:EmptyStore", authentication_key_file=key_file(tmp_path / "key"))
    with pytest.raises(ConfigError, match="UCM cannot authenticate"):
        open_store(config, NAMESPACE, EVEN)


class UncheckedTier(PosixTier):
    """A tier of others, which may or may not compare tags."""

    authenticates = False


def test_a_tier_that_does_not_say_that_it_compares_tags_is_refused(config: StoreConfig, tmp_path: Path) -> None:
    theirs = replace(config, pipeline=f"{__name__}:UncheckedTier")
    with open_store(theirs, NAMESPACE, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}
    with pytest.raises(ConfigError, match="does not say that it compares the tags") as caught:
        open_store(replace(theirs, authentication_key_file=key_file(tmp_path / "key")), NAMESPACE, EVEN)
    assert caught.value.where == "store: authentication_key_file"
    assert not Tier.authenticates
