"""Real servers for the tests, started on free ports of this host and ended with the tests."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PATIENCE = 120.0
#: Milliseconds after which a cluster takes a silent node for dead: on a busy machine a healthy one may be silent long.
NODE_TIMEOUT = 120_000


def require(program: str, package: str) -> str:
    """The path of a program, which must be there: these tests are not skipped."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is not in PATH: `apt-get update && apt-get install -y {package}` installs it")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """A Redis server with everything in memory."""

    def __init__(self, directory: Path, *options: str, port: int | None = None, sentinel: str = "") -> None:
        self.port = port or free_port()
        self._sentinel = sentinel
        self._directory = directory
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [
            *(require("redis-server", "redis-server"), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(self._directory), "--maxmemory", "128mb"),
            *("--maxmemory-policy", "allkeys-lru", "--enable-debug-command", "yes", *self._options),
        ]
        if self._sentinel:
            file = self._directory / "sentinel.conf"
            file.write_text(f"port {self.port}\nsentinel monitor {self._sentinel} 1\n")
            command = [command[0], str(file), "--sentinel"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self.process.poll() is None, "the Redis server ended at once"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def client(self, password: str | None = None) -> Any:
        """redis-py's own client."""
        return redis.Redis(port=self.port, password=password)

    def kill(self) -> None:
        if self.process is not None:
            self.thaw()
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)


class Proxy:
    """Passes bytes between clients and a server, and does to the server's what a test wants.

    ``spoil`` gets each piece of an answer and the number of bytes before it, and returns what is passed on; None cuts
    the connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.spoil: Callable[[bytes, int], bytes | None] = lambda data, _: data
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sent = self.spoil(data, passed) if is_answer else data
                if sent is None:
                    break
                target.sendall(sent)
                passed += len(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()


@contextlib.contextmanager
def cluster(directory: Path, masters: int = 3, replicas: int = 1) -> Iterator[list[RedisServer]]:
    """A cluster, whose replicas take over soon once ``take_over_after`` says so."""
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        str(NODE_TIMEOUT),
        "--repl-diskless-sync-delay",
        "0",
    )
    count = masters * (1 + replicas)
    nodes: list[RedisServer] = []
    try:
        for number in range(count):
            port = free_port()
            while port > 55535:  # the cluster's own port is 10000 above
                port = free_port()
            nodes.append(RedisServer(directory / str(number), *options, port=port))
        create = [require("redis-cli", "redis-tools"), "--cluster", "create", *(node.address for node in nodes)]
        subprocess.run(
            [*create, "--cluster-replicas", str(replicas), "--cluster-yes"],
            check=True,
            timeout=_PATIENCE,
            stdout=subprocess.DEVNULL,
        )
        wait_until_whole(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def wait_until_whole(nodes: list[RedisServer]) -> None:
    """Wait until all nodes of a cluster agree on it and the replicas follow their masters."""
    deadline = time.monotonic() + _PATIENCE
    for node in nodes:
        with node.client() as client:
            while (
                client.execute_command("CLUSTER INFO")["cluster_state"] != "ok"
                or client.info("replication").get("master_link_status", "up") != "up"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def take_over_after(nodes: list[RedisServer], milliseconds: int) -> None:
    """Have replicas take over from a master that is silent for so long."""
    for node in nodes:
        with node.client() as client:
            client.config_set("cluster-node-timeout", milliseconds)


def certificates(directory: Path, *, days: int = 2) -> dict[str, str]:
    """A certificate authority of one's own, and a server's certificate by it, in files."""
    openssl = require("openssl", "openssl")
    files = {name: str(directory / name) for name in ("ca.key", "ca.crt", "server.key", "server.csr", "server.crt")}
    extensions = directory / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1")
    now = dt.datetime.now(dt.timezone.utc)
    end = (now + dt.timedelta(days=days)).strftime("%Y%m%d%H%M%SZ")
    begin = (now - dt.timedelta(days=9)).strftime("%Y%m%d%H%M%SZ")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], check=True, capture_output=True, env={**os.environ, "HOME": str(directory)})

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new_key, "-keyout", files["ca.key"], "-out", files["ca.crt"], "-days", "9", "-subj", "/CN=ca")
    run("req", *new_key, "-keyout", files["server.key"], "-out", files["server.csr"], "-subj", "/CN=server")
    (directory / "index").touch()
    (directory / "serial").write_text("01")
    config = directory / "ca.cnf"
    config.write_text(
        f"[ca]\ndefault_ca=a\n[a]\ndatabase={directory}/index\nserial={directory}/serial\nnew_certs_dir={directory}\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    run(
        *("ca", "-batch", "-config", str(config), "-cert", files["ca.crt"], "-keyfile", files["ca.key"]),
        *("-in", files["server.csr"], "-out", files["server.crt"], "-notext", "-extfile", str(extensions)),
        *("-startdate", begin, "-enddate", end),
    )
    return files
