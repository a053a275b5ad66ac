"""The tier of files: one file per block, in one or several directories."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError, StoreError, StoreFullError
from ucm.store.posix_aside import set_aside
from ucm.store.posix_directory import Directory
from ucm.store.posix_index import NameIndex
from ucm.store.posix_keeper import Keeper
from ucm.store.posix_layout import check_namespace, key_of
from ucm.store.posix_leases import leased_path, link_blocks, unlink_blocks
from ucm.store.posix_reader import read_block, read_file
from ucm.store.posix_writer import BlockFileWriter
from ucm.store.recent import RecentKeys
from ucm.store.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec

#: Keys are spread over the directories by their last two bytes.
_SLOTS = 4096
#: How many keys of a prefix are looked up at once in the beginning.
_FIRST_STEP = 64


class PosixTier(Tier):
    """Blocks as files.

    Args:
        name: The tier's name.
        roots: Its directories.
        namespace: What the sharers of blocks have in common.
        codec: What a block's file looks like; None in an instance that only looks up and prefetches.
        config: The store's options.
        capacity_bytes: What it may use.
        on_disk: Whether the directories are, or else in memory.

    Raises:
        ConfigError: A directory is missing or unusable, or the namespace cannot be one.
    """

    def __init__(
        self,
        name: str,
        roots: Sequence[str],
        namespace: str,
        codec: HeaderCodec | None,
        config: StoreConfig,
        capacity_bytes: int | None,
        *,
        on_disk: bool = True,
    ) -> None:
        super().__init__(name)
        if not roots or len(set(roots)) != len(roots):
            raise ConfigError(
                "the Posix tier needs one or more directories, each named once",
                where="store: directories",
                fix="name directories that exist and are this user's own",
            )
        check_namespace(namespace)
        self._directories = [Directory(root, namespace, config, on_disk=on_disk) for root in roots]
        self._slots = _slots(roots)
        self._codec = codec
        self._capacity_bytes = capacity_bytes
        self._recent = RecentKeys(config.lookup_cache_keys, config.lookup_cache_seconds)
        self._index = NameIndex([directory.layout for directory in self._directories])
        self._unreleased: deque[str] = deque()
        self._keeper = Keeper(self._directories, capacity_bytes, config.stale_seconds, self._note_eviction)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """One test of a directory entry per key that is not known to be there."""
        found = self._known(keys)
        if False in found:
            holds = self._test()
            unknown = [index for index, there in enumerate(found) if not there]
            for index in unknown:
                found[index] = holds(keys[index])
            self._tested([keys[index] for index in unknown if found[index]], len(unknown))
        self.counters.looked_up(len(keys), found.count(True))
        return found

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """Stops at the first key that is not there."""
        holds = self._test()
        hits, step = 0, _FIRST_STEP
        gap = False
        while hits < len(keys) and not gap:
            # What is known is looked up for some keys at once, but not for all: the first gap may be near.
            some = keys[hits : hits + step]
            step *= 4
            tested, there = 0, []
            for key, known in zip(some, self._known(some), strict=True):
                if not known:
                    tested += 1
                    if not holds(key):
                        gap = True
                        break
                    there.append(key)
                hits += 1
            self._tested(there, tested)
        self.counters.looked_up(min(hits + 1, len(keys)), hits)
        return hits

    def read(self, block: BlockTransfer, lease: str | None) -> bool:
        """One call to the operating system for a whole block; of a lease, what was leased before what is there now."""
        self._keeper.start()
        codec, key = self._known_codec(), block.key
        directory = self._directory(key)
        path = directory.layout.block(key)
        try:
            try:
                first = path if lease is None else leased_path(directory.layout, lease, key)
                old = read_block(directory, codec, block, first)
            except (BlockMissingError, BlockCorruptError, BlockForeignError):
                if lease is None:
                    raise
                old = read_block(directory, codec, block, path)
        except StoreError as error:
            self._note_failure(directory, key, error)
            raise
        if old:
            self._keeper.touch(path)
        return old

    def touch(self, key: BlockKey) -> None:
        """In the background."""
        self._keeper.start()
        self._keeper.touch(self._directory(key).layout.block(key))

    def read_file(self, key: BlockKey) -> Buffer:
        """The file as it is, verified by its own header."""
        directory = self._directory(key)
        return self._read_file(directory, key, directory.layout.block(key))

    def writer(self, key: BlockKey, file_nbytes: int) -> BlockFileWriter | None:
        """A writer of a temporary file; None if the block is there."""
        directory = self._directory(key)
        if os.path.exists(directory.layout.block(key)):  # noqa: PTH110 - a Path costs as much as the call
            return None
        self._keeper.start()
        return BlockFileWriter(directory, key, file_nbytes, self)

    def prefetch(self, key: BlockKey) -> None:
        """Have the kernel read the file into the page cache."""
        directory = self._directory(key)
        if directory.direct_io or directory.reads.rests:
            return
        with suppress(OSError):
            descriptor = os.open(directory.layout.block(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def lease(self, token: str, keys: Sequence[BlockKey], *, verify: bool) -> set[BlockKey]:
        """Hard links; see ``ucm.store.posix_leases``."""
        held: set[BlockKey] = set()
        for directory in self._directories:
            if not directory.reads.rests:
                held |= link_blocks(directory.layout, token, [k for k in keys if self._directory(k) is directory])
        return {key for key in held if self._is_sound(token, key)} if verify else held

    def release(self, token: str) -> None:
        """Delete the links, and those of an earlier lease that the medium did not let go."""
        tokens = [token]
        with suppress(IndexError):
            tokens.append(self._unreleased.popleft())
        for each in tokens:
            gone = [unlink_blocks(directory.layout, each) for directory in self._directories]
            if not all(gone):
                self._unreleased.append(each)

    def stats(self) -> TierStats:
        """The counters, and what the tier uses."""
        return self.counters.snapshot(self._keeper.used_bytes, self._capacity_bytes)

    def close(self) -> None:
        """End the keeper, and the listing of names."""
        self._keeper.close()
        self._index.close()

    def committed(self, directory: Directory, key: BlockKey, file_nbytes: int) -> None:
        """A writer made a block visible."""
        self._recent.generations()[0].add(key)
        self._index.add([key])
        self._keeper.wrote(directory, file_nbytes)

    def refused(self, directory: Directory, error: StoreError) -> None:
        """A writer could not go on."""
        if isinstance(error, StoreFullError):
            self._keeper.full(directory)

    def _directory(self, key: BlockKey) -> Directory:
        if len(self._directories) == 1:
            return self._directories[0]
        return self._directories[self._slots[(key[-2] << 8 | key[-1]) % _SLOTS]]

    def _known(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks need not be asked for."""
        if not any(directory.reads.rests for directory in self._directories):
            known = self._index.known(keys)
            if known is not None:
                return known
        young, old = self._recent.generations()
        return [key in young or key in old for key in keys]

    def _tested(self, there: list[BlockKey], tested: int) -> None:
        """Remember the outcome of so many tests."""
        self._recent.generations()[0].update(there)
        self._index.add(there)
        self._index.tested(tested)

    def _test(self) -> Callable[[BlockKey], bool]:
        """What tells whether a block is there, for the length of one lookup."""
        resting = {directory for directory in self._directories if directory.reads.rests}
        if len(self._directories) > 1:
            return lambda key: (found := self._directory(key)) not in resting and found.holds(key)
        return (lambda _: False) if resting else self._directories[0].holds

    def _read_file(self, directory: Directory, key: BlockKey, path: str) -> Buffer:
        try:
            return read_file(directory, key, path)
        except StoreError as error:
            self._note_failure(directory, key, error)
            raise

    def _is_sound(self, token: str, key: BlockKey) -> bool:
        directory = self._directory(key)
        try:
            self._read_file(directory, key, leased_path(directory.layout, token, key))
        except StoreError as error:
            self.counters.failed("lease", error)
            return False
        return True

    def _known_codec(self) -> HeaderCodec:
        if self._codec is None:
            raise ValueError("the store was opened without a geometry: it looks up and prefetches, no more")
        return self._codec

    def _note_eviction(self, path: str) -> None:
        self.counters.evicted(1)
        key = key_of(*path.rsplit("/", 2)[-2:])
        if key is not None:
            self._drop(key)

    def _drop(self, key: BlockKey) -> None:
        """Forget that a block was there."""
        self._recent.drop(key)
        self._index.drop(key)

    def _note_failure(self, directory: Directory, key: BlockKey, error: StoreError) -> None:
        self._drop(key)
        if isinstance(error, BlockCorruptError | BlockForeignError) and set_aside(
            directory.layout, key, error, directory.aside_keep
        ):
            self.counters.set_aside()


def _slots(roots: Sequence[str]) -> list[int]:
    """Which directory has which keys, by rendezvous: another directory takes its share from all, the rest stays."""
    if len(roots) == 1:
        return []
    weights = [hashlib.blake2b(root.encode(), digest_size=8).digest() for root in roots]
    return [
        max(
            range(len(roots)),
            key=lambda i: hashlib.blake2b(slot.to_bytes(2, "little"), key=weights[i], digest_size=8).digest(),
        )
        for slot in range(_SLOTS)
    ]
