"""Transfers of blocks of several shapes, beside plain files and copies, and beside the file store of uc-manager.

Checksums are included on our side; uc-manager has none. In each round, all do the same in turn. uc-manager's store
runs in a process of its own; what it loads is compared there. It bypasses the page cache, so ours is also measured with
``direct_io``, beside it in the same rounds. Nothing is deleted before the end; see `ucm.store.bench.bench`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers_install import UC_MANAGER, uc_manager_python
from tests.e2e.bench.ttft_engine import EngineFailedError, TimedEngine
from transforms.place import BUILD
from ucm.store.bench import MIB, Figures, Workload, bench, beside, for_bench, set_aside
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

#: Blocks and their bytes, with as many layer slices each.
BLOCKS, SLICES = ((64, 4 * MIB), (512, MIB // 8)), (1, 32)
ROUNDS = 7
#: Blocks in each file of a packed layout.
PACKED = 64
PEER = "uc-manager"


class UcManager(TimedEngine):
    """uc-manager's store in its process.

    Args:
        root: The directory for its files, made here.
        workload: The blocks.
    """

    def __init__(self, root: Path, workload: Workload) -> None:
        python = uc_manager_python()
        root.mkdir(parents=True)
        arguments = {
            "root": str(root),
            "blocks": workload.blocks,
            "slices": workload.slices,
            "slice_nbytes": workload.slice_nbytes,
        }
        super().__init__(python, arguments, os.environ, root.with_name(f"{root.name}-log"), "uc_manager.py")
        self.started()

    def measure(self) -> dict[str, float]:
        """Return the seconds of its operations, by name."""
        return {f"{PEER} {operation}": seconds for operation, seconds in self._call("measure").items()}


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """Measure every shape in both tiers, and print a table; files are in the build directory."""
    root = BUILD / "bench" / "store"
    shutil.rmtree(root, ignore_errors=True)
    table = Table("GB/s, medians", "", "ours", "plain", PEER)
    try:
        for blocks, nbytes in BLOCKS:
            for slices in SLICES:
                work = Workload(blocks, slices, nbytes // slices, rounds)
                layers = "1 layer slice" if slices == 1 else f"{slices} layer slices"
                shape = f"{blocks} of {nbytes // 1024} KiB, {layers}"
                yield from _shape(shape, work, root, table)
        yield from packed(root, *BLOCKS[-1], rounds, table)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    Console(width=120).print(table)


def _shape(shape: str, work: Workload, root: Path, table: Table) -> Iterator[Figure]:
    directory = root / shape
    directory.mkdir(parents=True)
    config = for_bench(StoreConfig(directories=(str(directory),)))
    with ExitStack() as stack:
        elsewhere: Callable[[], dict[str, float]] = dict
        try:
            peer = UcManager(root / f"{PEER} {shape}", work)
        except (OSError, subprocess.CalledProcessError, EngineFailedError) as error:
            print(f"{UC_MANAGER} is left out: {error}", file=sys.stderr)
        else:
            stack.callback(peer.stop)
            elsewhere = peer.measure
        files = bench(config, work, elsewhere=elsewhere, tidy=False)
        direct = bench(replace(config, direct_io=True), work, elsewhere=elsewhere, tidy=False)
    with TemporaryDirectory(prefix="ucm-bench-", dir="/dev/shm") as memory:
        in_memory = replace(config, pipeline="Dram", dram_directory=memory)
        copies = bench(in_memory, work)
    yield from _judge(f"files, {shape}", config, files, table)
    yield from _beside_peer(f"files past the page cache, {shape}", direct, ("save", "load cold"), table)
    yield from _judge(f"memory, {shape}", in_memory, copies, table)


def _judge(what: str, config: StoreConfig, found: Figures, table: Table) -> Iterator[Figure]:
    detail = {name: found.rate(name)[1] for name in found.seconds}
    for operation, (plain, share) in beside(config).items():
        if operation not in found.seconds or (operation == "staged" and config.pipeline != "Dram"):
            continue
        table.add_row(what, f"{operation}, beside {plain}", *_rates(detail, operation, plain))
        yield Figure(
            f"{what}: {operation}, seconds to {plain}", 1 / found.ratio(operation, plain)[1], "", 1 / share, detail
        )
        yield from _to_peer(what, operation, found, detail)


def _beside_peer(what: str, found: Figures, operations: Sequence[str], table: Table) -> Iterator[Figure]:
    """Compare some operations with the peer's alone; plain files pass through the page cache."""
    detail = {name: found.rate(name)[1] for name in found.seconds}
    for operation in operations:
        table.add_row(what, operation, *_rates(detail, operation, ""))
        yield from _to_peer(what, operation, found, detail)


def _to_peer(what: str, operation: str, found: Figures, detail: dict[str, float]) -> Iterator[Figure]:
    theirs = f"{PEER} {operation}"
    if theirs in detail:
        ratio = 1 / found.ratio(operation, theirs)[1]
        yield Figure(f"{what}: {operation}, seconds to {PEER}", ratio, "", 1.0, detail)


def _rates(detail: dict[str, float], operation: str, plain: str) -> list[str]:
    return [f"{detail[name]:.2f}" if name in detail else "" for name in (operation, plain, f"{PEER} {operation}")]


def packed(root: Path, blocks: int, nbytes: int, rounds: int, table: Table) -> Iterator[Figure]:
    """Compare plain files of one block each with plain files of many blocks, for what a packed layout would bring."""
    directory = root / "packed"
    directory.mkdir(parents=True)
    aside = root / "packed-aside"
    aside.mkdir()
    memory = memoryview(os.urandom(blocks * nbytes))
    into = memoryview(bytearray(blocks * nbytes))
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for per_file in (1, PACKED) if number % 2 else (PACKED, 1):
            for path in directory.iterdir():
                set_aside(path, aside)
            files = [(directory / str(at), range(at, at + per_file)) for at in range(0, blocks, per_file)]
            for operation, flags, move, memories in (
                ("write", os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwrite, memory),
                ("read hot", os.O_RDONLY, lambda *of: os.preadv(of[0], [of[1]], of[2]), into),
            ):
                begin = time.perf_counter()
                for path, held in files:
                    descriptor = os.open(path, flags, 0o600)
                    for place, block in enumerate(held):
                        move(descriptor, memories[block * nbytes : (block + 1) * nbytes], place * nbytes)
                    os.close(descriptor)
                seconds.setdefault(f"{operation}, {per_file}", []).append(time.perf_counter() - begin)
    for operation in ("write", "read hot"):
        one, many = (median(seconds[f"{operation}, {per_file}"]) for per_file in (1, PACKED))
        rates = [f"{blocks * nbytes / of / 1e9:.2f}" for of in (many, one)]
        what = f"plain files, {blocks} blocks of {nbytes // 1024} KiB"
        table.add_row(what, f"{operation}, {PACKED} in a file, beside 1", *rates)
        yield Figure(f"{what}: {operation}, {PACKED} in a file, seconds to 1", many / one, "", None, seconds)
