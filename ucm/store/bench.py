"""Measure a store against the best the machine can do: the same bytes, in the same run, in turns.

Every round measures a plain copy in memory, plain files (one write or read per block, no header, no checksum, no
rename) and the store, one after the other, so that other load on the machine affects all of them alike. Ratios are
computed within a round.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ucm.errors import UcmError
from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer
from ucm.store.config import DRAM
from ucm.store.factory import authenticator_of, is_on_servers, open_store, open_tier, remove_blocks
from ucm.store.format import aligned_buffer
from ucm.store.memory.segment import delete_blocks
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.paths import DIRECTORY_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucm.store.base import KVStore, TaskResult
    from ucm.store.config import StoreConfig

    #: Its name and what it does.
    Operation: TypeAlias = tuple[str, Callable[[], None]]

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
#: How long to wait for blocks that are written behind, so that they do not disturb the next measurement.
_FLUSH_SECONDS = 60.0
#: By figure, the one that it is compared with: of a store that begins with files or a server, and of one in memory.
_BESIDE_FILES = {"save": "write", "load hot": "read hot", "load cold": "read cold"}
_BESIDE_MEMORY = {"save": "memcpy", "load hot": "memcpy"}


@dataclass(frozen=True)
class Workload:
    """The blocks to move, each stored and verified as one, as the connector does it.

    Args:
        blocks: The number of blocks.
        block_nbytes: The size of each in bytes.
        rounds: The number of rounds.
    """

    blocks: int = 64
    block_nbytes: int = 4 << 20
    rounds: int = 9

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of the blocks."""
        return BlockGeometry((self.block_nbytes,), b"ucm store bench!")

    @property
    def keys(self) -> list[BlockKey]:
        """The blocks' keys."""
        digests = [hashlib.blake2b(str(number).encode(), digest_size=32) for number in range(self.blocks)]
        return [BlockKey(digest.digest()) for digest in digests]

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return self.blocks * self.geometry.nbytes

    def transfers(self, memory: Bytes) -> list[BlockTransfer]:
        """Return the blocks, back to back in memory of as many bytes, as the connector saves and stages them."""
        return [BlockTransfer(key, [row]) for key, row in zip(self.keys, self.rows(memory), strict=True)]

    def rows(self, memory: Bytes) -> list[memoryview]:
        """Return the memory of each block."""
        size, view = self.geometry.nbytes, memory.data
        return [view[at : at + size] for at in range(0, self.nbytes, size)]


@dataclass
class Figures:
    """The measured seconds of each round, by operation."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    timer: Callable[[], float] = time.perf_counter

    def add(self, operation: str, run: Callable[[], None]) -> None:
        """Measure an operation once."""
        began = self.timer()
        run()
        self.seconds.setdefault(operation, []).append(self.timer() - began)

    def rate(self, operation: str) -> tuple[float, float]:
        """Return the best and the median GB/s of an operation."""
        seconds = self.seconds[operation]
        return self.workload.nbytes / min(seconds) / 1e9, self.workload.nbytes / median(seconds) / 1e9

    def ratio(self, operation: str, beside: str) -> tuple[float, float]:
        """Return the speed of ``operation`` relative to ``beside``: of the best rounds, and the median over rounds."""
        one, other = self.seconds[operation], self.seconds[beside]
        return min(other) / min(one), median(o / s for s, o in zip(one, other, strict=True))


def beside(config: StoreConfig) -> dict[str, str]:
    """Return the figure that each of a store's figures is compared with."""
    return _BESIDE_MEMORY if config.parts[0] in DRAM else _BESIDE_FILES


class Run:
    """The memory, the files and the store of one benchmark, which measures the store in a temporary namespace.

    Each round has keys and files of its own, and only empties those of the last one. When ext4 without a journal
    creates a file, it passes over inodes that were deleted in the last minutes; if they are many, this takes longer
    than the write.

    Args:
        config: The store. The plain files lie on the file system of its first directory, or of the Dram tier's, or
            where temporary files do.
        workload: The blocks.
        stack: Closes and deletes what was opened and made.
        tidy: Whether to delete files and blocks at the end; if not, they are emptied, the next measurement is not
            slowed down, and the caller deletes the directories.

    Raises:
        UcmError: The store cannot be opened.
    """

    def __init__(self, config: StoreConfig, workload: Workload, stack: ExitStack, *, tidy: bool = True) -> None:
        roots = config.roots or [tempfile.gettempdir()]
        namespace = f"bench-{os.getpid()}"
        cleanup = stack.enter_context(ExitStack())  # runs after the store is closed, which may still write
        self.config, self.workload = config, workload
        self._keys: list[BlockKey] = []
        self._store = stack.enter_context(open_store(config, namespace, workload.geometry))
        self._layouts = [Layout(root, namespace) for root in {*roots, config.dram_directory} if Path(root).is_dir()]
        self._plain, self._turn = Path(roots[0], f"bench-plain-{owner_name()}"), 0
        self._plain.mkdir(mode=DIRECTORY_MODE)
        if tidy:
            cleanup.callback(shutil.rmtree, self._plain, ignore_errors=True)
            cleanup.callback(lambda: remove_blocks(config, namespace, self._keys))
        self._servers = [
            stack.enter_context(closing(open_tier(config, name, namespace, authenticator_of(config))))
            for name in config.parts
            if is_on_servers(name)
        ]
        # Aligned, as a KV cache is: see `aligned_buffer`.
        self.source, self.target = (np.frombuffer(aligned_buffer(workload.nbytes), np.uint8) for _ in range(2))
        self.source[:] = np.frombuffer(np.random.default_rng(0).bytes(workload.nbytes), np.uint8)
        self.target.fill(0)
        self._from, self._into = workload.rows(self.source), workload.rows(self.target)
        if not tidy:
            stack.callback(self._empty)

    def measure(self, figures: Figures, progress: Callable[[str], None] = lambda _: None) -> None:
        """Measure all rounds.

        Args:
            figures: Takes the seconds of ``memcpy``, ``write``, ``read hot`` and ``read cold`` by one thread, and the
                store's ``save``, ``load hot`` and ``load cold``. Files in memory have no cold reads.
            progress: Called with the name of each operation before it is measured.

        Raises:
            UcmError: A transfer failed.
        """
        for number in range(self.workload.rounds):
            for operation, action in self.operations(number):
                progress(operation)
                figures.add(operation, action)

    def operations(self, number: int) -> Iterator[Operation]:
        """Yield the operations of a round; each one's preparation runs when it is requested."""
        yield "memcpy", lambda: np.copyto(self.target, self.source)
        self.target.fill(0)
        self._empty()
        self._keys = [BlockKey(os.urandom(32)) for _ in range(self.workload.blocks)]
        saves, loads = (
            [BlockTransfer(key, [row]) for key, row in zip(self._keys, rows, strict=True)]
            for rows in (self._from, self._into)
        )
        load = partial(load_all, self._store, loads)
        for operation, action in _in_turns(self.writes(), ("save", partial(save_all, self._store, saves)), number):
            if operation != "save":
                _truncate(self._files())
                self._turn += 1
            yield operation, action
        # The first read of a file after it was written costs more than later ones: the kernel moves its pages.
        self.each(self.read)
        self.target.fill(0)
        load()
        verify(self.source, self.target)
        self._store.flush(_FLUSH_SECONDS)
        for operation, action in _in_turns(self.reads(), ("load", load), number):
            yield f"{operation[:4]} hot{operation[4:]}", action
        if self.config.pipeline == "Posix":
            for operation, action in _in_turns(self.reads(), ("load", load), number):
                drop_from_cache([*self._files(), *self._blocks()])
                yield f"{operation[:4]} cold{operation[4:]}", action

    def writes(self) -> list[Operation]:
        """Return what a save is compared with: one plain file per block."""
        return [("write", lambda: self.each(self.write))]

    def reads(self) -> list[Operation]:
        """Return what a load is compared with, likewise; their names begin with ``read``."""
        return [("read", lambda: self.each(self.read))]

    def each(self, action: Callable[[int], None]) -> None:
        """Do something for each block, by its number."""
        for number in range(self.workload.blocks):
            action(number)

    def write(self, number: int) -> None:
        """Write a block's plain file."""
        descriptor = os.open(f"{self._plain}/{self._turn}-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        os.pwrite(descriptor, self._from[number], 0)
        os.close(descriptor)

    def read(self, number: int) -> None:
        """Read the file that was written last for a block."""
        descriptor = os.open(f"{self._plain}/{self._turn}-{number}", os.O_RDONLY)
        os.preadv(descriptor, [self._into[number]], 0)
        os.close(descriptor)

    def _files(self) -> list[Path]:
        """Return the plain files that were written last."""
        return list(self._plain.glob(f"{self._turn}-*"))

    def _blocks(self) -> list[Path]:
        """Return the files of the blocks that were saved last."""
        paths = [Path(layout.block(key)) for layout in self._layouts for key in self._keys]
        return [path for path in paths if path.exists()]

    def _empty(self) -> None:
        """Free the room of what was written last."""
        _truncate([*self._files(), *self._blocks()])
        for layout in self._layouts:
            delete_blocks(layout, self._keys)
        for tier in self._servers:
            tier.drop(self._keys)


def _truncate(paths: Iterable[Path]) -> None:
    for path in paths:
        os.truncate(path, 0)


def _in_turns(plain: list[Operation], own: Operation, number: int) -> list[Operation]:
    """Return the operations of a round in its order: it alternates, because the first one finds the disk idle."""
    return [*plain, own] if number % 2 else [own, *plain]


def save_all(store: KVStore, blocks: Sequence[BlockTransfer]) -> None:
    """Save whole blocks and wait until they are visible; raise the first failure."""
    _raise_failure(store.save(blocks).wait())


def load_all(store: KVStore, blocks: Sequence[BlockTransfer]) -> None:
    """Load blocks; raise the first failure."""
    _raise_failure(store.load(blocks).wait())


def _raise_failure(result: TaskResult) -> None:
    for error in result.failed.values():
        raise error


def verify(source: Bytes, target: Bytes) -> None:
    """Check that the store returned what it was given.

    Raises:
        UcmError: It did not.
    """
    if not np.array_equal(source, target):
        raise UcmError("the store gave back other bytes than it was given")


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Write files to their disk, and drop them from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def for_bench(config: StoreConfig) -> StoreConfig:
    """Return a configuration without eviction, queue limits or lowered priority, to measure transfers only."""
    return replace(config, posix_capacity_bytes=None, save_queue_bytes=1 << 62, save_nice=0)
