"""Fixtures of the store tests: directories, log lines and servers."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.not_judged import NOT_JUDGED
from tests.ucm.store.servers import (
    EndedAtOnceError,
    MooncakeServer,
    RedisServer,
    S3Server,
    cluster,
    redis_program,
    wait_until_whole,
)
from ucm.logger import get_logger
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The logged lines."""
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def memory() -> Iterator[str]:
    """The path of a directory, not yet created, in a tmpfs."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("there is no /dev/shm for the Dram tier")
    parent = tempfile.mkdtemp(dir=SHARED_MEMORY)
    yield f"{parent}/tier"
    shutil.rmtree(parent)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    root = tmp_path / "root"
    root.mkdir()
    # Normal priority, because a low-priority thread hardly ever runs on a busy machine.
    return StoreConfig(directories=(str(root),), save_nice=0)


@pytest.fixture(scope="session")
def redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(redis_of_session: RedisServer, record_property: Callable[[str, object], None]) -> RedisServer:
    """A running, empty server: Redis, or what takes its place."""
    if not redis_program()[1]:
        record_property(NOT_JUDGED, "Redis itself: Valkey took its place")
    if redis_of_session.process is None:
        redis_of_session.start()
    redis_of_session.thaw()
    with redis_of_session.client() as client:
        client.flushall()
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "128mb")
    return redis_of_session


@pytest.fixture(scope="session")
def s3_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    for attempt in range(3):
        # Beside other test processes it sometimes ends at once; each attempt has other ports.
        try:
            server = S3Server(tmp_path_factory.mktemp("s3"))
            break
        except EndedAtOnceError:
            if attempt == 2:
                raise
    yield server
    server.kill()


@pytest.fixture
def s3_server(s3_of_session: S3Server) -> S3Server:
    """A server that runs and has an empty bucket."""
    if s3_of_session.process is None:
        s3_of_session.start()
    s3_of_session.thaw()
    s3_of_session.clear()
    return s3_of_session


@pytest.fixture(scope="session")
def mooncake_of_session() -> Iterator[MooncakeServer]:
    server = MooncakeServer()
    yield server
    server.kill()


@pytest.fixture
def mooncake(mooncake_of_session: MooncakeServer) -> MooncakeServer:
    """A master, and a node that lends memory, without values."""
    if mooncake_of_session.process is None:
        mooncake_of_session.start()
    mooncake_of_session.thaw()
    mooncake_of_session.remove(".*")
    return mooncake_of_session


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def redis_cluster(cluster_of_session: list[RedisServer]) -> list[RedisServer]:
    """The three masters and three replicas of a running, empty cluster."""
    wait_until_whole(cluster_of_session)
    for node in cluster_of_session:
        with node.client() as client:
            if client.role()[0] == b"master":
                client.flushall()
    return cluster_of_session
