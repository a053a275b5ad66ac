"""What lossless compression of a trained model's KV costs and saves: `python -m tests.e2e.bench.compression`.

An engine saves the KV of a prompt of real text, in blocks of 128 tokens, and their bytes are compressed here, by one
thread, whose processor time counts. Then 64 MiB of the same blocks are loaded from a medium of a given speed: a client
of a tier on servers that keeps values in memory and lets each caller wait; see `inside/throttled.py`.

Last, engines in bfloat16 answer a prompt of the same length from such a medium, one that stores blocks as they are and
one that compresses them, in turns: seconds to the first token, beside those of prompts that are computed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure, alternate, median_ratio
from tests.e2e.bench.real import TOKEN_BYTES, workload
from tests.e2e.environment import with_runtime
from tests.e2e.inside.throttled import ThrottledClient
from tests.e2e.prefix_engine import PrefixEngine, connector, posix
from tests.e2e.prefix_workload import request
from tests.e2e.processes import IN_PROCESS, INSIDE
from transforms.place import BUILD
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.compression import FRAME, pack, unpack
from ucm.store.config import StoreConfig
from ucm.store.format import HeaderCodec, checksum, decode, header_nbytes
from ucm.store.remote.tiers import RedisOptions, RedisTier
from ucm.store.tier import TierPlace
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import Memory, key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.e2e.bench.ttft_model import Workload

RELEASE = "0.32.0"
LENGTH, BLOCK = 2048, 128
DTYPES = {"bfloat16": 2, "float32": 4}
#: Bytes per second of the media.
SPEEDS = (0.1e9, 0.3e9, 1e9, 3e9)
#: Bytes that are loaded.
LOADED = 64 << 20
ROUNDS = 9
#: How many prompts take turns, so that no block of the next one is still in the engine's memory.
PROMPTS = 3
_THROTTLED = "throttled:ThrottledTier"


@dataclass(frozen=True)
class Stock:
    """The KV of a prompt.

    Attributes:
        geometry: The geometry of its blocks.
        bodies: The layer slices of each block, back to back.
    """

    geometry: BlockGeometry
    bodies: list[memoryview]

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(map(len, self.bodies))


def figures(release: str) -> Iterator[Figure]:
    """Measure both dtypes, and print the tables."""
    pure = Table("KV", "ratio", "limit of order 0", "compress", "decompress", "checksums", "memcpy", title="one thread")
    speeds = [f"{speed / 1e9:g} GB/s" for speed in SPEEDS]
    loads = Table("KV", *speeds, title=f"seconds to load {LOADED >> 20} MiB, best of {ROUNDS}")
    for dtype, element_size in DTYPES.items():
        stock = taken(release, dtype, element_size)
        ratio, limit, *rates = codec_figures(stock)
        pure.add_row(dtype, f"{ratio:.3f}", f"{limit:.3f}", *(f"{rate:.2f} GB/s" for rate in rates))
        yield Figure(f"compression of {dtype}: ratio", ratio, "", None, {"limit": limit})
        for name, rate in zip(("compress", "decompress"), rates, strict=False):
            yield Figure(f"compression of {dtype}: {name}, one thread", rate, "GB/s", None)
        bests = [loading(stock, speed) for speed in SPEEDS]
        for name, side in (("plain", 0), ("compressed", 1)):
            loads.add_row(f"{dtype}, {name}", *(f"{took[side]:.3f}" for took in bests))
        for speed, (plain, compressed) in zip(speeds, bests, strict=True):
            yield Figure(f"compression of {dtype}: load at {speed}, to plain blocks", compressed / plain, "", None)
    Console().print(pure, loads)
    yield from first_tokens(release)


def first_tokens(release: str) -> Iterator[Figure]:
    """Measure first tokens in bfloat16 from media of each speed, and print the table."""
    speeds = [f"{speed / 1e9:g} GB/s" for speed in SPEEDS]
    table = Table("blocks", *speeds, "computed", title=f"median seconds to the first token of {LENGTH:,} in bfloat16")
    directory = BUILD / "bench" / "compression"
    shutil.rmtree(directory, ignore_errors=True)
    (packages := directory / "packages").mkdir(parents=True)
    origin = Path(zstandard.__path__[0])  # no environment of vLLM has it
    (packages / origin.name).symlink_to(origin)
    work, speed = workload(release, PROMPTS, (LENGTH,), BLOCK), directory / "speed"
    prompts = [work.prompt(LENGTH, str(number)) for number in range(PROMPTS)]
    speed.write_text(str(SPEEDS[-1]), encoding="ascii")
    try:
        with ExitStack() as stack:
            engines = []
            for compression in ("none", "lossless"):
                options = {"speed": str(speed), "compression": compression, "transfer_timeout": 600.0}
                store = {"pipeline": _THROTTLED, "tiers": {_THROTTLED: options}}
                one = _engine(release, work, "bfloat16", directory / compression, store, packages)
                engines.append(stack.enter_context(one))
            computed = zip(*([_first(one, prompt) for one in engines] for prompt in prompts), strict=True)
            turns = [itertools.cycle(prompts) for _ in engines]
            found: list[list[list[float]]] = []
            for medium in SPEEDS:
                speed.write_text(str(medium), encoding="ascii")
                sides = [partial(_loaded, one, turn, medium) for one, turn in zip(engines, turns, strict=True)]
                found.append(alternate(sides, ROUNDS))
            for name, side, of_computed in zip(("plain", "compressed"), (0, 1), computed, strict=True):
                columns = [*(of_both[side] for of_both in found), list(of_computed)]
                table.add_row(name, *(f"{statistics.median(one):.3f} ({min(one):.3f})" for one in columns))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    Console(width=150).print(table, f"the best in brackets; load {os.getloadavg()[0]:.1f}")
    for medium, (plain, compressed) in zip(SPEEDS, found, strict=True):
        ratio = median_ratio(plain, compressed)
        yield Figure(f"compression of bfloat16: first token at {medium}, to plain blocks", ratio, "", None)


def _engine(
    release: str, work: Workload, dtype: str, directory: Path, store: dict[str, Any], packages: Path | None = None
) -> PrefixEngine:
    """Return an engine of one process that stores blocks, and stages little more than those of one prompt."""
    staging = (LENGTH + BLOCK) * TOKEN_BYTES * DTYPES[dtype] // DTYPES["float32"]
    settings = connector(store, staging=staging)
    arguments = {**work.engine, "dtype": dtype, "max_num_batched_tokens": 512, **settings}
    path = os.pathsep.join(str(one) for one in (INSIDE, packages) if one is not None)
    return PrefixEngine(with_runtime(release), directory / "engine", arguments, {**IN_PROCESS, "PYTHONPATH": path})


def _loaded(engine: PrefixEngine, prompts: Iterator[list[int]], speed: float) -> float:
    """Return the seconds to the first token of the next prompt, whose blocks come from a medium.

    Raises:
        ValueError: They came from elsewhere, as the medium would have taken longer.
    """
    took = _first(engine, next(prompts), LENGTH)
    if took < LENGTH * TOKEN_BYTES / 2 / 2 / speed:  # in bfloat16, and not even half of it if compressed
        raise ValueError(f"the first token came after {took:.3f} s from a medium of {speed:g} bytes per second")
    return took


def _first(engine: PrefixEngine, prompt: list[int], cached: int = 0) -> float:
    """Return the seconds to the first token of a prompt of which so many tokens are loaded."""
    if not engine.reset():
        raise RuntimeError("the engine's prefix cache cannot be emptied: blocks are still held")
    (answer,) = engine.generate([request(prompt, 1)])
    if answer.cached != cached or answer.first_s is None:
        raise ValueError(f"the engine had {answer.cached} tokens of {len(prompt)}")
    engine.settle()  # its blocks are visible, and nothing is saved while others are timed
    return answer.first_s


def taken(release: str, dtype: str, element_size: int) -> Stock:
    """Return the KV of a prompt, as an engine stores it."""
    directory = BUILD / "bench" / "compression"
    shutil.rmtree(directory, ignore_errors=True)
    work = workload(release, 1, (LENGTH,), BLOCK)
    try:
        with _engine(release, work, dtype, directory, posix(directory / "store")) as running:
            running.generate([request(work.prompt(LENGTH, "0"), 1)])
        files = [path.read_bytes() for path in sorted((directory / "store").rglob("*")) if path.stat().st_size > FRAME]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    headers = [decode(file[: header_nbytes(file[:4096])]) for file in files]
    if len(files) < LENGTH // BLOCK:
        raise ValueError(f"the engine has stored {len(files)} blocks of a prompt that has {LENGTH // BLOCK}")
    bodies = [memoryview(file)[header.nbytes :] for file, header in zip(files, headers, strict=True)]
    return Stock(BlockGeometry(headers[0].slice_sizes, headers[0].fingerprint, element_size), bodies)


def codec_figures(stock: Stock) -> tuple[float, ...]:
    """Return the ratio, its limit if every byte is coded by itself, and rates in GB/s of what the caller has."""
    element, nbytes = stock.geometry.element_size, stock.geometry.nbytes
    packed = [b"".join(pack(body, element)) for body in stock.bodies]
    into = np.zeros(nbytes, np.uint8)

    def decompress() -> None:
        for one in packed:
            at = 0
            for piece in unpack(memoryview(one), nbytes):
                into.data[at : at + len(piece)] = piece
                at += len(piece)

    def compress() -> None:
        for body in stock.bodies:
            pack(body, element)

    def verify() -> None:
        for body in stock.bodies:
            checksum(body)

    def copy() -> None:
        for body in stock.bodies:
            np.copyto(into, np.frombuffer(body, np.uint8))

    rates = [
        stock.nbytes / min(_seconds(work) for _ in range(ROUNDS)) / 1e9 for work in (compress, decompress, verify, copy)
    ]
    return stock.nbytes / sum(map(len, packed)), _limit(stock), *rates


def _limit(stock: Stock) -> float:
    """Return the ratio of an ideal code of single bytes, with a table of frequencies for each plane of each frame."""
    bits = 0.0
    for body in stock.bodies:
        for at in range(0, len(body), FRAME):
            frame = np.frombuffer(body[at : at + FRAME], np.uint8)
            for plane in frame.reshape(-1, stock.geometry.element_size).T:
                share = np.bincount(plane, minlength=256) / len(plane)
                share = share[share > 0]
                bits -= len(plane) * float((share * np.log2(share)).sum())
    return stock.nbytes * 8 / bits


def _seconds(work: Callable[[], None]) -> float:
    """Return the processor time that some work takes."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def loading(stock: Stock, speed: float) -> tuple[float, float]:
    """Return the seconds to load `LOADED` bytes from a medium, plain and compressed."""
    count = -(-LOADED // stock.geometry.nbytes)
    keys = [key(number) for number in range(count)]
    stores = [_store(stock, keys, speed, compression) for compression in ("none", "lossless")]
    memories = [Memory(one, stock.geometry) for one in keys]

    def load(store: TieredStore) -> float:
        began = time.perf_counter()
        failed = store.load([memory.transfer() for memory in memories]).wait().failed
        took = time.perf_counter() - began
        if failed or any(memory.data != stock.bodies[n % len(stock.bodies)] for n, memory in enumerate(memories)):
            raise ValueError(f"{len(failed)} blocks were not loaded, or others are wrong")
        return took * LOADED / (count * stock.geometry.nbytes)

    took = alternate([lambda store=store: load(store) for store in stores], ROUNDS)  # type: ignore[misc] # see above
    for store in stores:
        store.close()
    return min(took[0]), min(took[1])


def _store(stock: Stock, keys: Sequence[BlockKey], speed: float, compression: str) -> TieredStore:
    config, codec = StoreConfig(pipeline="Redis", save_nice=0), HeaderCodec("bench", stock.geometry)
    place = TierPlace("Redis", "bench", stock.geometry, codec, config)
    options = RedisOptions.model_validate({"compression": compression, "transfer_timeout": 600.0})
    store = TieredStore([RedisTier(options, place, ThrottledClient(lambda: speed))], codec, config)
    memories = [Memory(one, stock.geometry, bytes(stock.bodies[n % len(stock.bodies)])) for n, one in enumerate(keys)]
    if store.save([memory.transfer() for memory in memories]).wait().failed:
        raise ValueError("blocks were not saved")
    return store


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure."""
    release = (arguments or sys.argv[1:] or [RELEASE])[0]
    for figure in figures(release):
        print(f"{figure.name}: {figure.value:.3f} {figure.unit}".rstrip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
