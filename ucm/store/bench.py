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
import uuid
from concurrent.futures import ThreadPoolExecutor
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
from ucm.store.format import aligned_buffer, checksum
from ucm.store.memory.segment import delete_blocks
from ucm.store.memory.slab import PAGE, Slab, SlabReader
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.paths import DIRECTORY_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucm.store.base import KVStore, TaskResult
    from ucm.store.config import StoreConfig

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
#: How long to wait for blocks that are written behind, so that they do not disturb the next measurement.
_FLUSH_SECONDS = 60.0
#: By figure, the one that it is compared with: of a store that begins with files or a server, and of one in memory.
_BESIDE_FILES = {"save": "write", "load hot": "read hot", "load cold": "read cold"}
_BESIDE_MEMORY = {"save": "memcpy", "load hot": "memcpy"}


@dataclass(frozen=True)
class Workload:
    """The blocks to move.

    Args:
        blocks: The number of blocks.
        slices: The number of layer slices per block.
        slice_nbytes: The size of each layer slice in bytes.
        rounds: The number of rounds.
    """

    blocks: int = 64
    slices: int = 16
    slice_nbytes: int = 256 * 1024
    rounds: int = 9

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of the blocks."""
        return BlockGeometry((self.slice_nbytes,) * self.slices, b"ucm store bench!")

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

    def scattered(self, memory: Bytes) -> list[BlockTransfer]:
        """Return the blocks with a buffer for each layer slice, as in a KV cache."""
        size = self.slice_nbytes
        return [
            BlockTransfer(key, [row[at : at + size] for at in range(0, row.nbytes, size)])
            for key, row in zip(self.keys, self.rows(memory), strict=True)
        ]


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

    def end_round(self) -> None:
        """Do nothing; a derived class may add what was measured elsewhere in this round."""

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
    return {**(_BESIDE_MEMORY if config.parts[0] in DRAM else _BESIDE_FILES), "staged": "memcpy"}


def bench(
    config: StoreConfig,
    figures: Figures,
    progress: Callable[[str], None] = lambda _: None,
    *,
    tidy: bool = True,
) -> None:
    """Measure a store in a temporary namespace.

    Files that are written again are emptied and moved aside. When ext4 without a journal creates a file, it passes over
    inodes that were deleted in the last minutes; if they are many, this takes longer than the write.

    Args:
        config: The store. The plain files lie on the file system of its first directory, or of the Dram tier's, or
            where temporary files do.
        figures: Says which blocks to move, and takes the seconds of ``memcpy``, ``write``, ``read hot`` and ``read
            cold`` by one thread and, as ``… xN``, by as many threads as the store uses; of the same threads with one
            checksum per block, as ``… checked xN``, which no store that verifies can surpass; of the store's ``save``,
            ``load hot`` and ``load cold``; and of ``staged``, a worker's copies of blocks that were found and lie
            verified in memory. Files in memory have no cold reads.
        progress: Called with the name of each operation before it is measured.
        tidy: Whether to delete files and blocks at the end; if not, the next measurement is not slowed down, and the
            caller deletes the directories.

    Raises:
        UcmError: The store cannot be opened, or a transfer failed.
    """
    with ExitStack() as stack:
        run = _Run(config, figures.workload, stack, tidy=tidy)
        for number in range(figures.workload.rounds):
            for operation, action in run.operations(number):
                progress(operation)
                figures.add(operation, action)
            figures.end_round()


class _Run:
    """The memory, the files and the store of one benchmark."""

    def __init__(self, config: StoreConfig, workload: Workload, stack: ExitStack, *, tidy: bool) -> None:
        roots = config.roots or [tempfile.gettempdir()]
        namespace = f"bench-{os.getpid()}"
        cleanup = stack.enter_context(ExitStack())  # runs after the store is closed, which may still write
        self._config, self._workload, self._keys = config, workload, workload.keys
        self._store = stack.enter_context(open_store(config, namespace, workload.geometry))
        self._layouts = [Layout(root, namespace) for root in {*roots, config.dram_directory} if Path(root).is_dir()]
        self._plain = Path(roots[0], f"bench-plain-{owner_name()}")
        self._plain.mkdir(mode=DIRECTORY_MODE)
        self._asides: dict[str, Path] = {}  # by root
        if tidy:
            cleanup.callback(shutil.rmtree, self._plain, ignore_errors=True)
            cleanup.callback(remove_blocks, config, namespace, workload.keys)
            cleanup.callback(self._delete_asides)
        self._pools = {
            n: stack.enter_context(ThreadPoolExecutor(n)) for n in {config.load_threads, config.save_threads}
        }
        self._servers = [
            stack.enter_context(closing(open_tier(config, name, namespace, authenticator_of(config))))
            for name in config.parts
            if is_on_servers(name)
        ]
        # Aligned, as a KV cache is: see `aligned_buffer`.
        self._source, self._target = (np.frombuffer(aligned_buffer(workload.nbytes), np.uint8) for _ in range(2))
        self._source[:] = np.frombuffer(np.random.default_rng(0).bytes(workload.nbytes), np.uint8)
        self._target.fill(0)
        self._saves, self._loads = workload.transfers(self._source), workload.transfers(self._target)
        self._from, self._into = workload.rows(self._source), workload.rows(self._target)
        self._copy = self._staged(stack)

    def _staged(self, stack: ExitStack) -> Callable[[], None]:
        """Bring every block into a slab, as the scheduler process does; return what copies them as a worker does."""
        geometry = self._workload.geometry
        slab, reader = Slab(self._workload.nbytes + self._workload.blocks * PAGE, 1), SlabReader()
        stack.callback(reader.close)
        stack.callback(slab.close)
        slab.lay_out(geometry.nbytes)
        reader.attach(slab.address, 0, {})
        places = []
        for block in self._saves:
            claimed = slab.claim(0, block.key)
            if claimed is None:
                raise UcmError("there is no room to stage the blocks", fix="measure fewer or smaller blocks")
            row, _ = claimed
            slab.memory(row, 0, geometry.nbytes)[:] = block.slices[0]
            slab.filled(row, "")
            places.append(slab.offset(row))
        names, scattered = [""] * len(places), self._workload.scattered(self._target)
        return lambda: _raise_failure(reader.load(scattered, places, names).wait())

    def operations(self, number: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the operations of a round; each one's preparation runs when it is requested."""
        loads, saves = self._config.load_threads, self._config.save_threads
        save, load = (partial(call, self._store, of) for call, of in ((save_all, self._saves), (load_all, self._loads)))
        yield "memcpy", lambda: np.copyto(self._target, self._source)
        self._target.fill(0)
        yield "staged", self._copy
        verify(self._source, self._target)
        writes: list[tuple[str, Callable[[], None]]] = [
            ("write", lambda: self._each(self._write)),
            (f"write x{saves}", lambda: self._each(self._write, saves)),
            (f"write checked x{saves}", lambda: self._each(self._write_checked, saves)),
            ("save", save),
        ]
        self._delete(stored=True)
        # Alternate the order, because the first one finds the disk idle.
        for operation, action in writes if number % 2 else [writes[-1], *writes[:-1]]:
            if operation != "save":
                self._delete()
            yield operation, action
        reads: list[tuple[str, Callable[[], None]]] = [
            ("read", lambda: self._each(self._read)),
            (f"read x{loads}", lambda: self._each(self._read, loads)),
            (f"read checked x{loads}", lambda: self._each(self._read_checked, loads)),
            ("load", load),
        ]
        # The first read of a file after it was written costs more than later ones: the kernel moves its pages.
        self._each(self._read)
        self._target.fill(0)
        load()
        verify(self._source, self._target)
        self._store.flush(_FLUSH_SECONDS)
        for operation, action in reads if number % 2 else [reads[-1], *reads[:-1]]:
            yield f"{operation[:4]} hot{operation[4:]}", action
        if self._config.pipeline == "Posix":
            for operation, action in reads if number % 2 else [reads[-1], *reads[:-1]]:
                drop_from_cache(self._files(stored=True))
                yield f"{operation[:4]} cold{operation[4:]}", action

    def _each(self, action: Callable[[int], None], threads: int = 0) -> None:
        numbers = range(self._workload.blocks)
        for _ in self._pools[threads].map(action, numbers) if threads else map(action, numbers):
            pass

    def _write(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(f"{self._plain}/{number}", flags, FILE_MODE)
        os.pwrite(descriptor, self._from[number], 0)
        os.close(descriptor)

    def _read(self, number: int) -> None:
        descriptor = os.open(f"{self._plain}/{number}", os.O_RDONLY)
        os.preadv(descriptor, [self._into[number]], 0)
        os.close(descriptor)

    def _write_checked(self, number: int) -> None:
        checksum(self._from[number])
        self._write(number)

    def _read_checked(self, number: int) -> None:
        self._read(number)
        checksum(self._into[number])

    def _files(self, *, stored: bool) -> list[Path]:
        blocks = [Path(layout.block(key)) for layout in self._layouts for key in self._keys] if stored else []
        return [path for path in [*self._plain.iterdir(), *blocks] if path.exists()]

    def _delete(self, *, stored: bool = False) -> None:
        for path in self._files(stored=stored):
            os.truncate(path, 0)
            path.rename(self._aside(path) / uuid.uuid4().hex)
        for layout in self._layouts if stored else ():
            delete_blocks(layout, self._keys)
        for tier in self._servers if stored else ():
            for key in self._keys:
                tier.remove(key, time.monotonic() + tier.timeout)  # type: ignore[attr-defined] # a RemoteTier

    def _aside(self, path: Path) -> Path:
        """Return the directory for files that are not needed, on the file system of ``path``; create it if need be."""
        roots = {str(self._plain.parent), *(str(layout.root) for layout in self._layouts)}
        root = max((root for root in roots if path.is_relative_to(root)), key=len)
        if root not in self._asides:
            self._asides[root] = Path(root, f"bench-aside-{owner_name()}")
            self._asides[root].mkdir(mode=DIRECTORY_MODE)
        return self._asides[root]

    def _delete_asides(self) -> None:
        """Delete the files that were moved aside."""
        for aside in self._asides.values():
            shutil.rmtree(aside, ignore_errors=True)


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
