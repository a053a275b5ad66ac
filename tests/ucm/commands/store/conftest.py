"""A real store with two namespaces, a tier on each kind of server, and a fixture that runs the command on them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from tests.ucm.store.conftest import (  # noqa: F401 - fixtures
    memory,
    mooncake,
    mooncake_of_session,
    redis_of_session,
    redis_server,
    s3_of_session,
    s3_server,
)
from tests.ucm.store.workers import of_salt
from ucm import cli
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import EVEN, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.store.servers import MooncakeServer, RedisServer, S3Server
    from ucm.store.base import BlockKey

BIG, SMALL = "llama-3f9a/g0", "tiny-9bce/g0"
FILE = HeaderCodec(BIG, EVEN).file_nbytes
DAY = 86400.0
PATIENT = {"timeout": 60.0, "transfer_timeout": 60.0}


@dataclass
class Kept:
    """A store; block number n of a namespace was last used n days ago."""

    root: Path
    keys: dict[str, list[BlockKey]] = field(default_factory=dict)

    def path(self, namespace: str, number: int) -> Path:
        return Path(Layout(str(self.root), namespace).block(self.keys[namespace][number]))

    def side(self, namespace: str, name: str) -> Path:
        return Path(Layout(str(self.root), namespace).base, name)

    def blocks(self, namespace: str) -> list[int]:
        """Return the numbers of the existing blocks."""
        return [number for number in range(len(self.keys[namespace])) if self.path(namespace, number).exists()]

    def fill(self, namespace: str, count: int, compression: str = "none") -> None:
        self.keys[namespace] = [of_salt("", number) for number in range(count)]
        config = StoreConfig(directories=(str(self.root),), tiers={"Posix": {"compression": compression}})
        with open_store(config, namespace, EVEN) as store:
            save(store, self.keys[namespace], EVEN)
        now = time.time()
        for number in range(count):
            os.utime(self.path(namespace, number), (now - number * DAY,) * 2)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    found = Kept(root)
    found.fill(BIG, 10)
    found.fill(SMALL, 4)
    return found


@dataclass
class Remote:
    """A tier on a server: its name, the server, its options, and those by which nobody answers."""

    name: str
    server: Any
    options: dict[str, Any]
    unanswered: dict[str, Any]


@pytest.fixture(params=["Redis", "Mooncake", "S3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Each kind of server in turn, without blocks."""
    nobody = f"127.0.0.1:{free_port()}"
    if request.param == "Mooncake":
        node: MooncakeServer = request.getfixturevalue("mooncake")
        return Remote("Mooncake", node, {"address": node.address, **PATIENT}, {"address": nobody})
    if request.param == "Redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return Remote("Redis", server, {"address": server.address, **PATIENT}, {"address": nobody})
    bucket: S3Server = request.getfixturevalue("s3_server")
    options = bucket.options(tmp_path / "secret", **PATIENT)
    return Remote("S3", bucket, options, {"endpoint": f"http://{nobody}"})


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run ``ucm store`` in this process."""

    def run(*words: object) -> Answer:
        capsys.readouterr()
        try:
            code = cli.main(["store", *map(str, words)])
        except SystemExit as end:  # argparse's own errors
            code = int(end.code or 0)
        return Answer(code, *capsys.readouterr())

    return run
