"""The conformance suite, run on our own back ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.keys import key_file
from ucm.store.config import StoreConfig
from ucm.testing import StoreConformance

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ucm.store.servers import MooncakeServer, RedisServer, S3Server

MIB = 1 << 20
#: An option of tiers.
COMPRESSED = {"compression": "lossless"}
#: Time limits within which a healthy server answers on a busy machine, in seconds.
PATIENT = {"timeout": 60.0, "transfer_timeout": 60.0}


class TestPosix(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),), save_nice=0)


class TestPosixSeveralDirectories(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        directories = [tmp_path / name for name in ("a", "b", "c")]
        for directory in directories:
            directory.mkdir()
        return StoreConfig(directories=tuple(map(str, directories)), save_nice=0)


class TestPosixWithSync(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),), fsync=True, save_nice=0)


class TestPosixWithCapacityAndOneThread(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(
            directories=(str(tmp_path),),
            posix_capacity_bytes=64 * MIB,
            load_threads=1,
            save_threads=1,
            save_nice=0,
        )


class TestAuthenticated(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, memory: str, redis_server: RedisServer) -> StoreConfig:
        root = tmp_path / "root"
        root.mkdir()
        return StoreConfig(
            pipeline="Cache|Posix|Redis",
            directories=(str(root),),
            dram_directory=memory,
            dram_capacity_bytes=64 * MIB,
            tiers={"Redis": {"address": redis_server.address, **PATIENT}},
            authentication_key_file=key_file(tmp_path / "key"),
            save_nice=0,
        )


class TestDram(StoreConformance):
    @pytest.fixture
    def config(self, memory: str) -> StoreConfig:
        return StoreConfig(pipeline="Dram", dram_directory=memory, dram_capacity_bytes=64 * MIB, save_nice=0)


class TestCachePosix(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, memory: str) -> StoreConfig:
        return StoreConfig(
            pipeline="Cache|Posix",
            directories=(str(tmp_path),),
            dram_directory=memory,
            dram_capacity_bytes=64 * MIB,
            save_nice=0,
        )


class TestRedis(StoreConformance):
    @pytest.fixture
    def config(self, redis_server: RedisServer) -> StoreConfig:
        return StoreConfig(pipeline="Redis", tiers={"Redis": {"address": redis_server.address, **PATIENT}}, save_nice=0)


class TestPosixRedis(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, redis_server: RedisServer) -> StoreConfig:
        tiers = {"Redis": {"address": redis_server.address, "ttl_seconds": 600, **PATIENT}}
        return StoreConfig(pipeline="Posix|Redis", directories=(str(tmp_path),), tiers=tiers, save_nice=0)


class TestRedisCluster(StoreConformance):
    @pytest.fixture
    def config(self, redis_cluster: list[RedisServer]) -> StoreConfig:
        addresses = [node.address for node in redis_cluster[:2]]
        return StoreConfig(
            pipeline="Redis", tiers={"Redis": {"address": addresses, "mode": "cluster", **PATIENT}}, save_nice=0
        )


class TestS3(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, s3_server: S3Server) -> StoreConfig:
        options = s3_server.options(tmp_path / "secret", **PATIENT)
        return StoreConfig(pipeline="S3", tiers={"S3": options}, save_nice=0)


class TestMooncake(StoreConformance):
    @pytest.fixture
    def config(self, mooncake: MooncakeServer) -> StoreConfig:
        options = {"address": mooncake.address, **PATIENT}
        return StoreConfig(pipeline="Mooncake", tiers={"Mooncake": options}, save_nice=0)


class TestCompressedPosix(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),), tiers={"Posix": COMPRESSED}, save_nice=0)


class TestCompressedPosixWithSync(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return StoreConfig(directories=(str(tmp_path),), tiers={"Posix": COMPRESSED}, fsync=True, save_nice=0)


class TestCompressedRedis(StoreConformance):
    @pytest.fixture
    def config(self, redis_server: RedisServer) -> StoreConfig:
        options = {"address": redis_server.address, **PATIENT, **COMPRESSED}
        return StoreConfig(pipeline="Redis", tiers={"Redis": options}, save_nice=0)


class TestCompressedS3(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, s3_server: S3Server) -> StoreConfig:
        options = s3_server.options(tmp_path / "secret", **PATIENT, **COMPRESSED)
        return StoreConfig(pipeline="S3", tiers={"S3": options}, save_nice=0)


class TestCompressedMooncake(StoreConformance):
    @pytest.fixture
    def config(self, mooncake: MooncakeServer) -> StoreConfig:
        options = {"address": mooncake.address, **PATIENT, **COMPRESSED}
        return StoreConfig(pipeline="Mooncake", tiers={"Mooncake": options}, save_nice=0)


class TestCompressedAndAuthenticated(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path, memory: str, redis_server: RedisServer) -> StoreConfig:
        root = tmp_path / "root"
        root.mkdir()
        return StoreConfig(
            pipeline="Cache|Posix|Redis",
            directories=(str(root),),
            dram_directory=memory,
            dram_capacity_bytes=64 * MIB,
            tiers={"Posix": COMPRESSED, "Redis": {"address": redis_server.address, **PATIENT, **COMPRESSED}},
            authentication_key_file=key_file(tmp_path / "key"),
            save_nice=0,
        )
