"""Transfers of blocks of several shapes, beside plain files and copies, and beside the file store of uc-manager.

Checksums are included on our side; uc-manager has none. In each round, all do the same in turn. uc-manager's store
runs in a process of its own; what it loads is compared there. It bypasses the page cache. Nothing is deleted before
the end; see `ucm.store.bench.Run`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers_install import UC_MANAGER, uc_manager_python
from tests.e2e.bench.store_figures import LayeredWorkload, SideFigures, measured
from tests.e2e.bench.ttft_engine import EngineFailedError, TimedEngine
from transforms.place import BUILD
from ucm.store.bench import beside, for_bench
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
#: Blocks and their bytes, with as many layer slices each.
BLOCKS, SLICES = ((64, 4 * MIB), (512, MIB // 8)), (1, 32)
ROUNDS = 7
#: Blocks of a chunk: 256 tokens in blocks of 16.
CHUNK = 16
PEER = "uc-manager"


class UcManager(TimedEngine):
    """uc-manager's store in its process.

    Args:
        root: The directory for its files, made here.
        workload: The blocks.
    """

    def __init__(self, root: Path, workload: LayeredWorkload) -> None:
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
    table = Table(
        "GB/s, medians", "", "ours", "plain", "with checksums", PEER, "ours, processor s/GB", "plain", "with checksums"
    )
    try:
        for blocks, nbytes in BLOCKS:
            for slices in SLICES:
                work = LayeredWorkload(blocks, nbytes, rounds, slices)
                shape = f"{blocks} of {_shape_of(nbytes, slices)}"
                yield from _shape(shape, work, root, table)
        yield from chunks(root, *BLOCKS[-1], rounds, table)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    Console(width=150).print(table)


def _shape_of(nbytes: int, slices: int) -> str:
    return f"{nbytes // 1024} KiB, {slices} layer slice{'s' if slices > 1 else ''}"


def _shape(shape: str, work: LayeredWorkload, root: Path, table: Table) -> Iterator[Figure]:
    directory = root / shape
    directory.mkdir(parents=True)
    config = for_bench(StoreConfig(directories=(str(directory),)))
    with ExitStack() as stack:
        elsewhere = _peer(stack, root / f"{PEER} {shape}", work)
        files = measured(config, work, elsewhere, tidy=False)
    with TemporaryDirectory(prefix="ucm-bench-", dir="/dev/shm") as memory:
        in_memory = replace(config, pipeline="Dram", dram_directory=memory)
        copies = measured(in_memory, work)
    yield from _judge(f"files, {shape}", config, files, table)
    yield from _judge(f"memory, {shape}", in_memory, copies, table)


#: The goals: shares of the speed of a copy in memory, and of plain files.
_OF_A_COPY, _OF_A_FILE = 0.7, 0.9


def _judge(what: str, config: StoreConfig, found: SideFigures, table: Table) -> Iterator[Figure]:
    detail = {name: found.rate(name)[1] for name in found.seconds}
    detail |= {f"{name}, processor s/GB": found.processor_per_gb(name) for name in found.processor}
    compared = {**beside(config), **({"staged": "memcpy"} if config.pipeline == "Dram" else {})}
    for operation, plain in compared.items():
        if operation not in found.seconds:
            continue
        checked = found.checked(plain)
        costs = [f"{detail[f'{name}, processor s/GB']:.2f}" for name in (operation, plain, checked) if name]
        table.add_row(what, f"{operation}, beside {plain}", *_rates(detail, operation, plain, checked), *costs)
        share = _OF_A_COPY if plain == "memcpy" else _OF_A_FILE
        for other in filter(None, (plain, checked)):
            ratio = 1 / found.ratio(operation, other)[1]
            yield Figure(f"{what}: {operation}, seconds to {other}", ratio, "", 1 / share, detail)
        yield from _to_peer(what, operation, found, detail)


def _to_peer(what: str, operation: str, found: SideFigures, detail: dict[str, float]) -> Iterator[Figure]:
    theirs = f"{PEER} {operation}"
    if theirs in detail:
        ratio = 1 / found.ratio(operation, theirs)[1]
        yield Figure(f"{what}: {operation}, seconds to {PEER}", ratio, "", 1.0, detail)


def _rates(detail: dict[str, float], operation: str, plain: str, checked: str) -> list[str]:
    names = (operation, plain, checked, f"{PEER} {operation}")
    return [f"{detail[name]:.2f}" if name in detail else "" for name in names]


def chunks(root: Path, blocks: int, nbytes: int, rounds: int, table: Table) -> Iterator[Figure]:
    """Measure the same blocks alone and in chunks, beside plain files of either size, in turns."""
    for slices in SLICES:
        alone = LayeredWorkload(blocks, nbytes, 2, slices)  # two rounds, so that neither side always begins
        works = {"alone": alone, "in chunks": replace(alone, blocks=blocks // CHUNK, block_nbytes=nbytes * CHUNK)}
        shape = _shape_of(nbytes, slices)
        with ExitStack() as stack:
            peers = {name: _peer(stack, root / f"{PEER} {shape} {name}", work) for name, work in works.items()}
            memory = stack.enter_context(TemporaryDirectory(prefix="ucm-bench-", dir="/dev/shm"))
            configs = {}
            for name in works:
                (root / shape / name).mkdir(parents=True)
                files = for_bench(StoreConfig(directories=(str(root / shape / name),)))
                configs["files", name] = files
                configs["memory", name] = replace(files, pipeline="Dram", dram_directory=f"{memory}/{name}")
            found = {of: SideFigures(replace(works[of[1]], rounds=rounds + rounds % 2)) for of in configs}
            for number in range((rounds + 1) // 2):
                for of in configs if number % 2 else reversed(configs):
                    elsewhere = peers[of[1]] if of[0] == "files" else dict
                    # The memory tier empties and fills the same memory again and again; its first use is left out.
                    first = int(of[0] == "memory")
                    work = replace(works[of[1]], rounds=works[of[1]].rounds + first)
                    once = measured(configs[of], work, elsewhere, tidy=False).without(first)
                    found[of].merge(once)
        for (medium, name), figures_ in found.items():
            yield from _judge(f"{medium}, {shape}, {name}", configs[medium, name], figures_, table)


def _peer(stack: ExitStack, root: Path, work: LayeredWorkload) -> Callable[[], dict[str, float]]:
    """Start uc-manager's store and return what measures it, which is nothing where it cannot be installed."""
    try:
        peer = UcManager(root, work)
    except (OSError, subprocess.CalledProcessError, EngineFailedError) as error:
        print(f"{UC_MANAGER} is left out: {error}", file=sys.stderr)
        return dict
    stack.callback(peer.stop)
    return peer.measure
