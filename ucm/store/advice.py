"""Measure whether compressing the blocks of a tier pays: on this machine, for its medium, with bytes like those stored.

Every round saves and loads the same blocks as they are and compressed, through the tier alone, so that other load
affects both alike; gains are computed within a round. Nothing is predicted: what could not be measured has no advice.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.bench import Figures, drop_from_cache, load_all, save_all, verify
from ucm.store.compression import ELEMENTS, FRAME, pack, unpack
from ucm.store.factory import back_end_class, is_tier, open_store, remove_blocks
from ucm.store.format import aligned_buffer
from ucm.store.inspection import block_body, blocks_in_files
from ucm.store.posix.layout import Layout, namespaces
from ucm.store.tier import CompressingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucm.store.base import BlockGeometry, Buffer, KVStore
    from ucm.store.bench import Workload
    from ucm.store.config import StoreConfig

#: The values of the option, in the order in which they are compared.
PLAIN, LOSSLESS = "none", "lossless"
#: How many times as fast one must be for the difference to count.
MARGIN = 1.1
#: The bytes of a sample; more would not compress otherwise.
_SAMPLE = 16 << 20
#: Generated numbers: how many channels have a scale of their own, and by how many powers of two these differ.
_CHANNELS, _SPREAD = 64, 1.6
_CODEC_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """Bytes like those that engines store.

    Args:
        what: Where they come from.
        element_size: The bytes of a number, by which they compress.
        body: The bytes.
    """

    what: str
    element_size: int
    body: Buffer


def generated(nbytes: int = _SAMPLE) -> Sample:
    """Return numbers in bfloat16 that compress as a trained model's KV does, 1.46 times, but are no model's.

    They are normally distributed in each channel; channels differ in scale. This spreads exponents as much as in
    docs/measurements_compression.md.

    Args:
        nbytes: How many bytes are needed; there are at most 16 MiB.
    """
    chance = np.random.default_rng(0)
    numbers = chance.standard_normal((-(-min(nbytes, _SAMPLE) // 2 // _CHANNELS), _CHANNELS), np.float32)
    numbers *= np.exp2(chance.uniform(-_SPREAD, _SPREAD, _CHANNELS).astype(np.float32))
    return Sample(
        "generated numbers in bfloat16, which compress like a trained model's KV",
        2,
        (numbers.view(np.uint32) >> 16).astype(np.uint16).data.cast("B"),
    )


def stored_sample(directories: Iterable[str], nbytes: int = _SAMPLE) -> Sample | None:
    """Return verified blocks of the namespace that has most of them; None if there are none.

    Args:
        directories: Directories of a Posix tier.
        nbytes: How many bytes are needed; there are at most 16 MiB, and one block more.

    Raises:
        OSError: A directory cannot be listed.
        StoreError: Zstandard is needed, and not installed.
    """
    most, what, body = 0, "", memoryview(b"")
    for root in directories:
        for layout in namespaces(root):
            bodies: list[bytes] = []
            size = 0
            for block in blocks_in_files(layout):
                found = block_body(block)
                if found is not None:
                    bodies.append(found)
                    size += len(found)
                if size >= min(nbytes, _SAMPLE):
                    break
            if size > most:
                most, what, body = size, f"{len(bodies)} of the blocks in {layout.base}", memoryview(b"".join(bodies))
    packed = {size: sum(piece.nbytes for piece in pack(body[: 4 * FRAME], size)) for size in ELEMENTS}
    return Sample(what, min(ELEMENTS, key=lambda size: packed[size]), body) if most else None


@dataclass(frozen=True)
class CodecFigures:
    """What one core does with a sample: how many times smaller it becomes, and bytes per second, uncompressed ones."""

    ratio: float
    compress: float
    decompress: float


def codec_figures(sample: Sample, timer: Callable[[], float] = time.thread_time) -> CodecFigures:
    """Compress and decompress a sample in this thread, the best of some rounds.

    Args:
        sample: The sample.
        timer: Returns seconds; by default those of this thread's processor time.
    """
    body, compressing, decompressing = sample.body, list[float](), list[float]()
    stored = memoryview(b"")

    for _ in range(_CODEC_ROUNDS):
        began = timer()
        pieces = pack(body, sample.element_size)
        compressing.append(timer() - began)
        stored = memoryview(b"".join(pieces))
        began = timer()
        for _piece in unpack(stored, len(body)):
            pass
        decompressing.append(timer() - began)
    return CodecFigures(len(body) / len(stored), len(body) / min(compressing), len(body) / min(decompressing))


@dataclass(frozen=True)
class Comparison:
    """A tier as it is and compressed.

    Args:
        tier: Its name in the pipeline.
        codec: What one core does with the sample.
        figures: The seconds of each round, by operation: ``save none``, ``load lossless`` and so on.
    """

    tier: str
    codec: CodecFigures
    figures: Figures

    @property
    def gains(self) -> tuple[float, float]:
        """How many times as fast loading is if blocks are compressed: of the best rounds, and the median."""
        return self.figures.ratio(f"load {LOSSLESS}", f"load {PLAIN}")

    def seconds_per_gb(self, operation: str, compression: str) -> float:
        """Return the median seconds that a ``save`` or ``load`` takes for a GB of blocks."""
        return 1 / self.figures.rate(f"{operation} {compression}")[1]

    @property
    def advice(self) -> str:
        """Whether to compress; there must be a difference both in the best rounds and in the median round."""
        plain, lossless = (self.seconds_per_gb("load", side) for side in (PLAIN, LOSSLESS))
        times = f"loading a GB takes {lossless:.2f} s compressed and {plain:.2f} s as it is"
        least, most = sorted(self.gains)
        room = f"a compressed tier holds {self.codec.ratio:.2f} times as many blocks"
        if least > MARGIN:
            return f"compress: {times}, at least {least:.2f} times as long, and {room}"
        if most * MARGIN < 1:
            return f"do not compress for speed: {times}, which is at least {1 / most:.2f} times as fast, but {room}"
        return f"no difference in speed: {times}, which is within 10 % or differs from round to round; {room}"


def compressing_tiers(config: StoreConfig) -> list[str]:
    """Return the parts of a pipeline that can compress."""
    back_ends = {name: back_end_class(name) for name in config.parts}
    return [name for name, one in back_ends.items() if is_tier(one) and issubclass(one.Options, CompressingOptions)]


def compare(
    config: StoreConfig,
    tier: str,
    workload: Workload,
    sample: Sample,
    progress: Callable[[str], None] = lambda _: None,
    *,
    codec: Callable[[Sample], CodecFigures] = codec_figures,
    opened: Callable[[StoreConfig, str, BlockGeometry], KVStore] = open_store,
    timer: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Save and load blocks as they are and compressed, in turns, through one tier alone.

    Blocks in files are dropped from the page cache before they are loaded.

    Args:
        config: The store, as ``for_bench`` returns it.
        tier: The tier.
        workload: The blocks to move.
        sample: What is in them, repeated.
        progress: Called with the name of each operation before it is measured.
        codec: Measures one core.
        opened: Opens the store.
        timer: Returns seconds.

    Raises:
        UcmError: The tier cannot be opened, or a transfer failed.
    """
    geometry = replace(workload.geometry, element_size=sample.element_size)
    source, target = (np.frombuffer(aligned_buffer(workload.nbytes), np.uint8) for _ in range(2))
    source[:] = np.resize(np.frombuffer(sample.body, np.uint8), workload.nbytes)
    saves, loads, figures = workload.transfers(source), workload.transfers(target), Figures(workload, timer=timer)
    for number in range(workload.rounds):
        for side in (PLAIN, LOSSLESS) if number % 2 else (LOSSLESS, PLAIN):
            options = {tier: {**config.tiers.get(tier, {}), "compression": side}}
            chosen, namespace = replace(config, pipeline=tier, tiers=options), f"bench-{side}-{os.getpid()}"
            target.fill(0)
            try:
                with closing(opened(chosen, namespace, geometry)) as store:
                    progress(f"{tier}: {side}")
                    figures.add(f"save {side}", partial(save_all, store, saves))
                    if tier == "Posix":
                        _drop(chosen, namespace, workload)
                    figures.add(f"load {side}", partial(load_all, store, loads))
            finally:
                remove_blocks(chosen, namespace, workload.keys)
            verify(source, target)
    return Comparison(tier, codec(sample), figures)


def _drop(config: StoreConfig, namespace: str, workload: Workload) -> None:
    paths = [Path(Layout(root, namespace).block(key)) for root in config.directories for key in workload.keys]
    drop_from_cache(path for path in paths if path.exists())
