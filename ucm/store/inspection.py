"""List, check and count what is in a store's directories, for tools outside an engine.

All functions work on a root that engines are using; files that vanish during a scan are ignored.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.salts import tag_digits
from ucm.store.base import (
    BlockForeignError,
    BlockMissingError,
    BlockUnreadableError,
    StoreError,
)
from ucm.store.format import namespace_digest
from ucm.store.memory.segment import check_slot, delete_slot, segments
from ucm.store.posix.files import check_file, quarantine, read_header
from ucm.store.posix.layout import (
    IDENTITY,
    MARKER,
    MAX_IDENTITY_BYTES,
    TEMPORARY,
    Layout,
    buckets,
    check_namespace,
    distrusted_namespaces,
    is_quarantined,
    key_of,
    namespaces,
)
from ucm.store.posix.paths import list_directory, read_file
from ucm.store.posix.scan import StoredFile, side_files, stale_files
from ucm.store.tier import LeaseRules, used_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's file, as described by its directory entry, or a block in memory."""

    layout: Layout
    key: BlockKey
    nbytes: int
    used_ns: int  #: its time of last use, in nanoseconds since the epoch
    slot: tuple[str, int] | None = None  #: in memory: the path of its segment and the number of its slot

    @property
    def used(self) -> float:
        """Its time of last use in seconds since the epoch; of a leased block, when its lease ends."""
        return self.used_ns / 1e9

    @property
    def path(self) -> str:
        """The path of the file."""
        return self.layout.block(self.key) if self.slot is None else f"{self.slot[0]}#{self.slot[1]}"


def stored_blocks(root: str, namespace: str | None = None) -> Iterator[StoredBlock]:
    """Yield every block of a root, or of one of its namespaces; skip those that vanish meanwhile.

    Args:
        root: The root.
        namespace: The namespace; None: all.

    Raises:
        OSError: The root cannot be listed.
    """
    for layout in namespaces(root):
        if namespace is not None and layout.namespace != namespace:
            continue
        for bucket in buckets(layout):
            for name, status in list_directory(bucket):
                key = key_of(bucket, name)
                if key is not None:
                    yield StoredBlock(layout, key, status.st_size, status.st_mtime_ns)
        for segment in segments(layout):
            for key, number in segment.blocks():
                yield StoredBlock(layout, key, segment.slot_nbytes, segment.age()[0], (segment.path, number))


def check_block(
    block: StoredBlock, authenticator: Authenticator | None = None, authentic: Callable[[], object] = int
) -> StoreError | None:
    """Read a block and compare every checksum; return what is wrong with it, or None.

    Args:
        block: The block.
        authenticator: Checks the tags as well, of a block that is authenticated by its key.
        authentic: Called if these are right.
    """
    try:
        if block.slot is None:
            header, _ = check_file(block.path, block.key, authenticator, any_key=True)
        else:
            header = check_slot(*block.slot, block.key, authenticator)
    except FileNotFoundError:
        return BlockMissingError("the block is gone", where=block.path)
    except OSError as error:
        return BlockUnreadableError(f"the block cannot be read: {error.strerror}", where=block.path)
    except StoreError as error:
        error.where = block.path
        return error
    if header.namespace_digest != namespace_digest(block.layout.namespace):
        return BlockForeignError("the block belongs to another namespace", where=block.path)
    if header.tags:
        authentic()
    return None


def quarantine_block(block: StoredBlock, error: StoreError, keep: int) -> bool:
    """Move a damaged block away, as an engine that meets it does; see ``quarantine``. One in memory is deleted."""
    if block.slot is not None:
        return delete_slot(*block.slot, block.key)
    return quarantine(block.layout, block.key, error, keep)


@dataclass(slots=True)
class NamespaceStock:
    """The contents of a namespace in one directory; bytes count whole files, times are seconds since the epoch.

    The names are those of ``ucm store stat --json``.
    """

    namespace: str
    identity: dict[str, Any] | None  #: the facts that its blocks depend on
    blocks: int = 0
    bytes: int = 0
    uncompressed_bytes: int | None = None  #: of the blocks without compression; None if unknown
    leased_bytes: int = 0  #: of retained and pinned blocks
    pinned_bytes: int = 0
    oldest_use: float | None = None  #: the time of the least recent use
    newest_use: float | None = None
    temporaries: int = 0  #: blocks being written
    left_behind: int = 0  #: temporary files whose owners are gone
    quarantined: int = 0  #: damaged blocks in quarantine
    side_bytes: int = 0  #: of temporaries and damaged blocks
    #: Blocks, bytes, and pinned bytes, by the digits of the salt's tag.
    by_salt: dict[str, list[int]] = field(default_factory=dict)


def damaged_files(layout: Layout) -> list[StoredFile]:
    """Return the quarantined blocks; raises like ``side_files``."""
    return [file for file in side_files(layout.quarantine) if is_quarantined(file.path.rpartition("/")[2])]


def left_behind(layout: Layout, stale_seconds: float) -> list[StoredFile]:
    """Return unfinished files whose owners are gone, and all files of a namespace whose only process is dead.

    Args:
        layout: The namespace.
        stale_seconds: See ``StoreConfig``.

    Raises:
        OSError: The namespace cannot be listed.
    """
    return _all_files(layout) if layout.is_abandoned else stale_files(layout, stale_seconds)


def _all_files(layout: Layout) -> list[StoredFile]:
    """Return all files of a namespace; the marker comes last, so that a deletion that is interrupted can go on."""
    found = []
    for directory, _, names in os.walk(layout.base):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(f"{directory}/{name}")
                found.append(StoredFile(f"{directory}/{name}", status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda file: file.path == f"{layout.base}/{MARKER}")


def identity(layout: Layout) -> dict[str, Any] | None:
    """Return the content of a namespace's identity file; None if it is missing or unreadable."""
    try:
        found = json.loads(read_file(f"{layout.base}/{IDENTITY}", MAX_IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def take_stock(layout: Layout, config: StoreConfig, step: Callable[[], object] = int) -> NamespaceStock:
    """Count the contents of a namespace.

    Args:
        layout: The namespace.
        config: The store's options.
        step: Called after each block.

    Raises:
        OSError: The namespace cannot be listed.
    """
    stock = NamespaceStock(layout.namespace, identity(layout))
    size: int | None = None  # of each block without compression: all blocks of a namespace have one geometry
    rules, now = LeaseRules.of(config), int(time.time() * 1e9)
    span_ends = used_until(now / 1e9, config.touch_seconds, 0)
    for block in stored_blocks(layout.root, layout.namespace):
        if size is None and block.slot is None:
            with suppress(OSError, StoreError):  # another block will do
                size = read_header(block.path).file_nbytes
        stock.blocks += 1
        stock.bytes += block.nbytes
        of_salt = stock.by_salt.setdefault(tag_digits(block.key), [0, 0, 0])
        of_salt[0] += 1
        of_salt[1] += block.nbytes
        if rules.rank(block.used_ns, now) > span_ends:
            stock.leased_bytes += block.nbytes
        if rules.is_pinned(block.used_ns, now):
            of_salt[2] += block.nbytes
            stock.pinned_bytes += block.nbytes
        stock.oldest_use = block.used if stock.oldest_use is None else min(block.used, stock.oldest_use)
        stock.newest_use = block.used if stock.newest_use is None else max(block.used, stock.newest_use)
        step()
    stock.uncompressed_bytes = None if size is None else size * stock.blocks
    temporaries, quarantined = side_files(layout.temporary), damaged_files(layout)
    stock.temporaries, stock.quarantined = len(temporaries), len(quarantined)
    stock.side_bytes = sum(file.nbytes for file in (*temporaries, *quarantined))
    stock.left_behind = len(left_behind(layout, config.stale_seconds))
    return stock


def unmarked(root: str) -> list[str]:
    """Return directories that look like a namespace but lack its marker, so that no process maintains them.

    Raises:
        OSError: The root cannot be listed.
    """
    known = {layout.base for layout in namespaces(root)} | {path for path, _ in distrusted_namespaces(root)}
    found = []
    for name, status in sorted(list_directory(os.path.realpath(root))):
        with suppress(ConfigError):
            layout = Layout(root, check_namespace(name.replace("+", "/")))
            if layout.base in known or not stat.S_ISDIR(status.st_mode):
                continue
            if buckets(layout) and TEMPORARY in dict(list_directory(layout.base)):
                found.append(layout.base)
    return found
