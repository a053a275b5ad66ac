"""Figures of a store with processor time, of several sides, and beside another process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from ucm.store.base import BlockTransfer
from ucm.store.bench import Figures, Run, Workload, verify
from ucm.store.format import checksum
from ucm.store.memory.slab import PAGE, Slab, SlabReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ucm.store.config import StoreConfig


@dataclass(frozen=True)
class LayeredWorkload(Workload):
    """Blocks that lie in a KV cache in several places.

    Args:
        slices: The number of layer slices per block, of equal size.
    """

    slices: int = 1

    @property
    def slice_nbytes(self) -> int:
        """The size of each in bytes."""
        return self.block_nbytes // self.slices


@dataclass
class SideFigures(Figures):
    """The seconds, and those of this process's processor time."""

    processor: dict[str, list[float]] = field(default_factory=dict)

    def add(self, operation: str, run: Callable[[], None]) -> None:
        used = time.process_time()
        super().add(operation, run)
        self.processor.setdefault(operation, []).append(time.process_time() - used)

    def without(self, rounds: int) -> SideFigures:
        """Return the figures without those of the first rounds."""
        seconds, processor = (
            {name: found[rounds:] for name, found in of.items()} for of in (self.seconds, self.processor)
        )
        work = replace(self.workload, rounds=self.workload.rounds - rounds)
        return SideFigures(work, seconds, processor=processor)

    def merge(self, other: SideFigures, side: str = "") -> None:
        """Add the rounds of another measurement of as many bytes, its operations under names that begin with a side."""
        for own, new in ((self.seconds, other.seconds), (self.processor, other.processor)):
            for operation, rounds in new.items():
                own.setdefault(f"{side}{operation}", []).extend(rounds)

    def processor_per_gb(self, operation: str) -> float:
        """Return the median seconds of processor time that an operation takes for a GB."""
        return median(self.processor[operation]) / self.workload.nbytes * 1e9

    def checked(self, plain: str) -> str:
        """Return the name of an operation on plain files with checksums; empty if it was not measured."""
        return next((name for name in self.seconds if name.startswith(f"{plain} checked x")), "")


class WideRun(Run):
    """Also does what only UCM's own figures need.

    ``… checked xN`` is plain files in as many threads as the store uses, with one checksum per block, which no store
    that verifies can surpass. ``staged`` is a worker's copies of blocks that were found and lie verified in memory.
    """

    def __init__(self, config: StoreConfig, workload: LayeredWorkload, stack: ExitStack, *, tidy: bool = True) -> None:
        super().__init__(config, workload, stack, tidy=tidy)
        self._pools = {
            threads: stack.enter_context(ThreadPoolExecutor(threads))
            for threads in {self.config.load_threads, self.config.save_threads}
        }
        geometry, size = workload.geometry, workload.slice_nbytes
        slab, self._reader = Slab(self.workload.nbytes + self.workload.blocks * PAGE, 1), SlabReader()
        stack.callback(self._reader.close)
        stack.callback(slab.close)
        slab.lay_out(geometry.nbytes)
        self._reader.attach(slab.address, 0, {})
        self._places, self._scattered = [], []
        blocks = zip(self.workload.keys, self._from, self._into, strict=True)
        for key, source, target in blocks:
            claimed = slab.claim(0, key)
            assert claimed is not None, "there is no room to stage the blocks"
            slab.memory(claimed[0], 0, geometry.nbytes)[:] = source
            slab.filled(claimed[0], "")
            self._places.append(slab.offset(claimed[0]))
            # A buffer for each layer slice, as in a KV cache.
            pieces = [target[at : at + size] for at in range(0, target.nbytes, size)]
            self._scattered.append(BlockTransfer(key, pieces))

    def operations(self, number: int) -> Iterator[tuple[str, Callable[[], None]]]:
        self.target.fill(0)
        yield "staged", self._copy
        verify(self.source, self.target)
        yield from super().operations(number)

    def writes(self) -> list[tuple[str, Callable[[], None]]]:
        threads = self.config.save_threads
        return [*super().writes(), (f"write checked x{threads}", partial(self._in_threads, self._write, threads))]

    def reads(self) -> list[tuple[str, Callable[[], None]]]:
        threads = self.config.load_threads
        return [*super().reads(), (f"read checked x{threads}", partial(self._in_threads, self._read, threads))]

    def _in_threads(self, action: Callable[[int], None], threads: int) -> None:
        for _ in self._pools[threads].map(action, range(self.workload.blocks)):
            pass

    def _write(self, number: int) -> None:
        checksum(self._from[number])
        self.write(number)

    def _read(self, number: int) -> None:
        self.read(number)
        checksum(self._into[number])

    def _copy(self) -> None:
        failed = self._reader.load(self._scattered, self._places, [""] * len(self._places)).wait().failed
        assert not failed, failed


def measured(
    config: StoreConfig,
    workload: LayeredWorkload,
    elsewhere: Callable[[], Mapping[str, float]] = dict,
    *,
    tidy: bool = True,
) -> SideFigures:
    """Return what a `WideRun` measures, and what ``elsewhere`` returns at the end of each round: another process's."""
    figures = SideFigures(workload)

    class Beside(WideRun):
        def operations(self, number: int) -> Iterator[tuple[str, Callable[[], None]]]:
            yield from super().operations(number)
            for operation, seconds in elsewhere().items():
                figures.seconds.setdefault(operation, []).append(seconds)

    with ExitStack() as stack:
        Beside(config, workload, stack, tidy=tidy).measure(figures)
    return figures
