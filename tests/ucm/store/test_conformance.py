"""Our own back ends, each held to the conformance suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.conformance import StoreConformance
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class TestPosix(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),))


class TestPosixSeveralDirectories(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        directories = [tmp_path / name for name in ("a", "b", "c")]
        for directory in directories:
            directory.mkdir()
        return StoreConfig(directories=tuple(map(str, directories)))


class TestPosixDirectWithSync(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),), direct_io=True, fsync=True)


class TestPosixWithCapacityAndOneThread(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(
            directories=(str(tmp_path),),
            posix_capacity_bytes=64 * MIB,
            load_threads=1,
            dump_threads=1,
            dump_nice=0,
            lookup_cache_keys=0,
        )


class TestDram(StoreConformance):
    @pytest.fixture
    def config(self, memory: str) -> StoreConfig:
        return StoreConfig(pipeline="Dram", dram_directory=memory, dram_capacity_bytes=64 * MIB)


class TestCachePosix(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, memory: str) -> StoreConfig:
        return StoreConfig(
            pipeline="Cache|Posix",
            directories=(str(tmp_path),),
            dram_directory=memory,
            dram_capacity_bytes=64 * MIB,
        )
