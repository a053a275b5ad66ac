"""The file store of uc-manager, without an engine and a GPU: `uc_manager.py ARGUMENTS`.

Reads the directory and the shape of the blocks, and obeys like `ttft.py`. Each block is one shard, as without its
layer-wise connector.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
import time
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 4096


class Store:
    """One store with its memory.

    Args:
        root: An empty directory.
        blocks: How many blocks one call moves.
        slices: The layer slices of a block.
        slice_nbytes: The bytes of each.
    """

    def __init__(self, root: str, blocks: int, slices: int, slice_nbytes: int) -> None:
        package = Path(str(import_module("ucm").__file__)).parent  # uc-manager's, not ours
        # The module below finds its symbols here.
        ctypes.CDLL(str(package / "shared/metrics/libmetrics.so"), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        pipeline = import_module("ucm.store.pipeline.ucmpipelinestore")
        self._root, self._blocks, self._count = Path(root), blocks, count()
        # Not deleted, as on the other side, because deleted inodes slow down the creation of files.
        self._aside = Path(f"{root}-aside")
        self._aside.mkdir()
        size = slices * slice_nbytes
        config = {
            "storage_backends": [root],
            "unique_id": "bench",
            "device_id": 0,
            "tensor_size": slice_nbytes,
            "shard_size": size,
            "block_size": size,
        }
        self._store = pipeline.PipelineStore()
        self._store.Stack("Posix", str(package / "store/posix/libposixstore.so"), config)
        self._source, self._target = (_aligned(blocks * size) for _ in range(2))
        self._source[:] = np.frombuffer(np.random.default_rng(0).bytes(blocks * size), np.uint8)
        self._shards = np.zeros(blocks, np.uint64)
        places = np.arange(blocks * slices, dtype=np.uint64).reshape(blocks, slices) * slice_nbytes
        self._from, self._into = (places + memory.ctypes.data for memory in (self._source, self._target))

    def measure(self) -> dict[str, float]:
        """Return the seconds of a save of new blocks, and of loads with and without the page cache.

        Raises:
            ValueError: A block is missing or has other bytes.
        """
        for path in self._files():
            os.truncate(path, 0)
            path.rename(self._aside / str(next(self._count)))
        keys = np.frombuffer(secrets.token_bytes(16 * self._blocks), np.uint8)
        seconds = {"save": self._timed(self._store.Dump, keys, self._from)}
        if not all(self._store.Lookup(keys)):
            raise ValueError("a block that was saved is not found")
        self._load(keys)  # as with our store, the first read after a write is not measured
        seconds["load hot"] = self._load(keys)
        for path in self._files():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return {**seconds, "load cold": self._load(keys)}

    def _load(self, keys: NDArray[np.uint8]) -> float:
        self._target.fill(0)
        seconds = self._timed(self._store.Load, keys, self._into)
        if not np.array_equal(self._source, self._target):
            raise ValueError("a block has other bytes than were saved")
        return seconds

    def _timed(self, call: Any, keys: NDArray[np.uint8], places: NDArray[np.uint64]) -> float:
        begin = time.perf_counter()
        self._store.Wait(call(keys, self._shards, places))
        return time.perf_counter() - begin

    def _files(self) -> list[Path]:
        return [path for path in self._root.rglob("*") if path.is_file()]


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(nbytes + PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE
    return memory[begin : begin + nbytes]


def main(arguments: Path) -> None:
    """Open the store, say so, measure once per line of the input."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        begin = time.perf_counter()
        store = Store(**json.loads(arguments.read_text(encoding="utf-8")))
        answers.write(json.dumps({"answer": time.perf_counter() - begin}) + "\n")
        for line in sys.stdin:
            name, *parameters = json.loads(line)
            answers.write(json.dumps({"answer": getattr(store, name)(*parameters)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
