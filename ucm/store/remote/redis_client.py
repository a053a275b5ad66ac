"""Talk to Redis or Valkey servers without copying values: one server, a master named by sentinels, or a cluster.

redis-py makes the connections (TLS, authentication, sentinels); commands are written, and replies read, here. So a
batch of commands costs one round trip to each server, and a value is sent from, and received into, its own memory: no
byte of it is copied, except to join small layer slices before they are sent, and where it begins.

Balancers and firewalls forget idle connections without a word, and the other end of such a connection is silent for
ever. Three things keep this from looking like a dead server: keep-alive packets, which most of them count as use; an
idle connection is replaced before it is used; and a used connection that fails is tried again once, through a new one,
before the server rests. Apart from that, and from a cluster's redirections, nothing is retried, so that the time of
every call is bounded.
"""

from __future__ import annotations

import io
import math
import socket
import ssl
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ucm.clock import SYSTEM
from ucm.store.base import BlockForeignError, StoreError, StoreFullError, StoreTimeoutError, StoreUnavailableError
from ucm.store.format import LARGE_BYTES, aligned_buffer
from ucm.store.health import Breaker
from ucm.store.remote.tiers import Client, misfit, missing, too_long

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucm.clock import Clock
    from ucm.store.base import Buffer
    from ucm.store.remote.tiers import RedisOptions

#: Values are sent in parts of at most this size; each must pass within the timeout of one answer.
_PART = 1 << 20
#: By how much a value may be too long and still be read to its end; a longer one costs the connection.
_MOST_DROPPED = 1 << 16
#: Bytes that are received ahead at most, and copied to where they belong.
_READ_SIZE = 1 << 14
#: How many times a command follows a cluster's redirections.
_ROUNDS = 4
#: The least number of seconds between two requests for a cluster's layout.
_LAYOUT_SECONDS = 0.5
#: Seconds without use after which a connection is replaced: shorter than any usual limit of a balancer, 50 s and more.
_MOST_IDLE = 20.0
#: What turns a server's refusal into an exception; redis-py has no types for it.
_PARSER: Any = DefaultParser
#: Seconds without use until a connection's first keep-alive packet, seconds between packets, and the unanswered packets
#: after which the kernel ends it.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Command(NamedTuple):
    """One command of a batch.

    Args:
        sent: The command in wire format, in pieces.
        memory: Where the value that answers it goes; the reply is then its length. None: the reply is the value.
        most: The longest value that is wanted; the reply is a BlockCorruptError for a longer one, or much longer than
            the memory.
    """

    sent: Sequence[Buffer | bytes]
    memory: Sequence[Buffer] | None = None
    most: float = math.inf


def pack(*words: bytes) -> bytes:
    """Return a command in wire format."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack_set(key: bytes, buffers: Sequence[Buffer | bytearray], ttl_seconds: int | None) -> list[Buffer | bytes]:
    """Return a SET command whose value is given in pieces."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    words = 3 if ttl_seconds is None else 5
    expiry = b"" if ttl_seconds is None else b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_seconds)), ttl_seconds)
    nbytes = sum(view.nbytes for view in views)
    return [b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, nbytes), *views, b"\r\n" + expiry]


def packets(pieces: Iterable[Buffer | bytes]) -> Iterator[Buffer | bytes]:
    """Yield consecutive bytes as they are sent, each by one call: small pieces joined, and large ones cut.

    To copy small pieces takes less time than a call for each.
    """
    small: list[Buffer | bytes] = []
    nbytes = 0
    for piece in pieces:
        size = len(piece)
        if small and (size >= LARGE_BYTES or nbytes + size > _PART):
            yield b"".join(small)
            small, nbytes = [], 0
        if size >= LARGE_BYTES:
            yield from (piece[at : at + _PART] for at in range(0, size, _PART))
        else:
            small.append(piece)
            nbytes += size
    if small:
        yield b"".join(small)


class Answer(io.RawIOBase):
    """What comes through a connection until a deadline.

    It is read through ``io.BufferedReader``, which receives all of a value but its first bytes directly into memory.

    Args:
        sock: The connection's socket.
        timeout: The most seconds of silence.
        deadline: When to stop, by the clock.
        clock: What time passes by.
    """

    def __init__(self, sock: socket.socket, timeout: float, deadline: float, clock: Clock) -> None:
        self._sock = sock
        self._timeout = timeout
        self._deadline = deadline
        self._clock = clock
        self.heard = False  #: whether anything has come

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def limit(self) -> None:
        """Let the next call wait for as long as it may, to receive or to send.

        Raises:
            TimeoutError: The deadline has passed.
        """
        remaining = self._deadline - self._clock.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(min(self._timeout, remaining))

    def readinto(self, memory: Any) -> int:
        """Receive what has come.

        Raises:
            TimeoutError: Nothing comes in time.
            ConnectionError: The server has closed the connection.
        """
        self.limit()
        got = self._sock.recv_into(memory)
        if not got:
            raise exceptions.ConnectionError("the server closed the connection")
        self.heard = True
        return got


def read_reply(reader: io.BufferedReader[Answer], command: Command) -> Any:
    """Return the next reply, which is an exception if the server refuses the command.

    Raises:
        RedisError: The server cannot be used, or the reply is no reply.
    """
    line = reader.readline()
    kind, rest = line[:1], line[1:-2]
    if kind == b":":
        return int(rest)
    if kind == b"+":
        return rest
    if kind == b"-":
        error = _PARSER.parse_error(rest.decode(errors="replace"))
        if isinstance(error, exceptions.ConnectionError):
            raise error
        return error
    if kind == b"*":
        return [read_reply(reader, command) for _ in range(int(rest))]
    if kind == b"$":
        return _read_value(reader, int(rest), command)
    raise exceptions.InvalidResponse(f"the server answered {line[:80]!r}")


def _read_value(reader: io.BufferedReader[Answer], nbytes: int, command: Command) -> Buffer | int | StoreError | None:
    """Return the reply with a value of a length; None for a negative length: there is no value."""
    if nbytes < 0:
        return None
    if nbytes > command.most + (_MOST_DROPPED if command.memory else 0):
        return too_long(nbytes, command.most)
    memory = command.memory or [aligned_buffer(nbytes)]
    left = nbytes
    for view in memory:
        left -= reader.readinto(view.cast("B")[:left])
    reader.read(left + 2)
    return nbytes if command.memory else memory[0]


class Node:
    """One server, or the master that sentinels name.

    Args:
        name: The name used in messages.
        pool: The server's connections.
        timeout: The most seconds until an answer.
        failures: See ``Breaker``.
        rest: See ``Breaker``.
        clock: What rests and deadlines pass by.
    """

    def __init__(
        self, name: str, pool: redis.ConnectionPool, timeout: float, failures: int, rest: float, clock: Clock
    ) -> None:
        self.name = name
        self._pool = pool
        self._timeout = timeout
        self._clock = clock
        #: When each connection has answered last.
        self._answered: WeakKeyDictionary[socket.socket, float] = WeakKeyDictionary()
        self.calls = Breaker(f"the Redis server {name}", failures, rest, clock=clock)
        # A full server can still be read.
        self.writes = Breaker(f"writing to the Redis server {name}", failures, rest, clock=clock)

    @property
    def rests(self) -> bool:
        """Whether calls would be refused."""
        return self.calls.rests or self.writes.rests

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Send commands ahead of their replies, and return the replies, of which some may be exceptions.

        Raises:
            StoreError: The server does not answer, or the connection fails.
        """
        replies: list[Any] = []
        while len(replies) < len(commands):  # a value that is much too long has cost the connection
            replies += self._talk(commands[len(replies) :], deadline)
        return replies

    def plain(self, *words: bytes) -> Any:
        """Send one command with a short reply."""
        (reply,) = self.exchange([Command([pack(*words)])], self._clock.monotonic() + self._timeout)
        if isinstance(reply, Exception):
            raise failure_of(reply, self.name)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._pool.disconnect()

    def _talk(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Return replies; convert errors of the connection to StoreError and report them to the breaker.

        If a connection that was used before fails without a byte of an answer, all idle connections are as doubtful:
        they are closed, and a new connection is tried once, for one more time limit where the deadline has passed. To
        repeat a command does no harm.
        """
        if not self.calls.allows(wait=False):
            raise self.calls.refusal(self.name)
        try:
            replies = self._once(commands, deadline)
            if replies is None:
                self._pool.disconnect(inuse_connections=False)
                until = max(deadline, self._clock.monotonic() + self._timeout)
                replies = self._once(commands, until, is_last=True) or []
        except (exceptions.RedisError, OSError) as error:
            failure = failure_of(error, self.name)
            if isinstance(failure, StoreUnavailableError):
                self.calls.failed(failure)
            raise failure from error
        self.calls.succeeded()
        return replies

    def _once(self, commands: Sequence[Command], deadline: float, *, is_last: bool = False) -> list[Any] | None:
        """Talk through a pooled connection; return None if it was used before and said nothing, unless it is the last.

        It can only be used again once all replies are read.
        """
        connection: Any = self._pool.get_connection()
        try:
            was_used = self._was_used(connection)
            sock = connection._sock  # noqa: SLF001 - it has no public name
            answer = Answer(sock, self._timeout, deadline, self._clock)
            try:
                replies = self._converse(connection, answer, commands)
            except BaseException as error:
                connection.disconnect()
                if was_used and not answer.heard and not is_last and isinstance(error, exceptions.RedisError | OSError):
                    return None
                if isinstance(error, ValueError | OverflowError | MemoryError | RecursionError):  # damaged
                    raise exceptions.InvalidResponse(str(error)) from error
                raise
            self._answered[sock] = self._clock.monotonic()
        finally:
            self._pool.release(connection)
        return replies

    def _was_used(self, connection: Any) -> bool:
        """Return whether a connection has answered before; one that has been idle is replaced, and has not."""
        when = self._answered.get(connection._sock)  # noqa: SLF001 - it has no public name
        if when is None or self._clock.monotonic() - when < _MOST_IDLE:
            return when is not None
        connection.disconnect()
        connection.connect()
        return False

    def _converse(self, connection: Any, answer: Answer, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands; those behind a value that is much too long are missing."""
        for packet in packets(piece for command in commands for piece in command.sent):
            answer.limit()
            connection.send_packed_command([packet], check_health=False)
        reader = io.BufferedReader(answer, _READ_SIZE)
        replies: list[Any] = []
        for command in commands:
            replies.append(read_reply(reader, command))
            if isinstance(replies[-1], StoreError):
                connection.disconnect()  # the value is unread
                break
        if any(isinstance(reply, exceptions.ReadOnlyError) for reply in replies):
            connection.disconnect()  # the next one asks the sentinels who is the master by now
        return replies


def failure_of(error: BaseException, where: str) -> StoreError:
    """Return the StoreError for an error of redis-py."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return StoreTimeoutError(f"Redis does not answer in time: {said}", where=where)
    if isinstance(error, exceptions.OutOfMemoryError):
        return StoreFullError(
            f"Redis has no memory left: {said}",
            where=where,
            fix="raise maxmemory, or set a maxmemory-policy that evicts",
        )
    if isinstance(error, exceptions.ResponseError) and said.startswith("WRONGTYPE"):
        return BlockForeignError(f"another kind of value has the block's key: {said}", where=where)
    if isinstance(error, exceptions.InvalidResponse):  # no block's fault: otherwise a whole batch would be deleted
        return StoreUnavailableError(f"Redis answered what cannot be read: {said}", where=where)
    return StoreUnavailableError(f"Redis: {said}", where=where)


class Servers(Client):
    """All servers named by the options. Each has a breaker of its own.

    Args:
        options: The addresses and how to connect to them.
        password: The password; empty: none.
        failures: The number of consecutive failures after which a server rests.
        rest: The length of a rest in seconds.
        clock: What rests and deadlines pass by.
        connections: The class of the connections, which makes their sockets; None: redis-py's, with TLS or without.
            The time limits of a socket are its own.
    """

    def __init__(
        self,
        options: RedisOptions,
        password: str,
        failures: int,
        rest: float,
        *,
        clock: Clock = SYSTEM,
        connections: type[redis.Connection] | None = None,
    ) -> None:
        self._options = options
        self._limits = options.timeout, failures, rest, clock
        self._clock = clock
        self._connections = connections or (redis.SSLConnection if options.tls else redis.Connection)
        self._lock = clock.lock()
        self._slots: list[Node] = []  # the nodes of a cluster, by slot
        self._looked = 0.0
        self._stale = True
        self._settings: dict[str, Any] = {
            "db": options.database,
            "username": options.username,
            "password": password or None,
            "socket_timeout": options.timeout,
            "socket_connect_timeout": options.timeout,
            "socket_keepalive": True,
            "socket_keepalive_options": _KEEP_ALIVE,
            "socket_read_size": _READ_SIZE,
            "protocol": 2,
            "driver_info": None,
            "retry": Retry(NoBackoff(), 0),
        }
        if options.tls:
            self._settings |= {
                "ssl_ca_certs": options.tls_ca,
                "ssl_certfile": options.tls_certificate,
                "ssl_keyfile": options.tls_key,
                "ssl_check_hostname": options.tls_check_hostname,
                "ssl_cert_reqs": "required",
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            }
        self._nodes = {}
        if options.mode == "sentinel":
            self._nodes[options.master or "", 0] = self._of_sentinels()
        else:
            for host, port in options.addresses:
                self._node(host, port)

    @property
    def nodes(self) -> list[Node]:
        """All known servers."""
        return list(self._nodes.values())

    @property
    def resting(self) -> float:
        """The share of the servers that rest, 0 to 1."""
        return sum(node.rests for node in self.nodes) / len(self.nodes)

    def exists(self, names: Sequence[str], deadline: float) -> list[bool | StoreError]:
        """Return whether each value exists, in one round trip to each server."""
        keys = [name.encode() for name in names]
        asked = [Command([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key)]) for key in keys]
        replies = self.run(keys, asked, deadline)
        return [reply if isinstance(reply, StoreError) else reply > 0 for reply in replies]

    def read(
        self, names: Sequence[str], memory: Sequence[Sequence[Buffer]], nbytes: int, deadline: float
    ) -> list[StoreError | None]:
        """Receive values by pipelined commands, each directly into its memory."""
        keys = [name.encode() for name in names]
        wanted = [Command([pack(b"GET", key)], into, nbytes) for key, into in zip(keys, memory, strict=True)]
        replies = self.run(keys, wanted, deadline)
        return [reply if isinstance(reply, StoreError) else misfit(reply, nbytes) for reply in replies]

    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return values by pipelined commands."""
        most = math.inf if nbytes is None else nbytes
        keys = [name.encode() for name in names]
        return self.run(keys, [Command([pack(b"GET", key)], None, most) for key in keys], deadline)

    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a value by one SET."""
        key = name.encode()
        self._one(key, Command(pack_set(key, buffers, self._options.ttl_seconds)), deadline, writing=True)

    def remove(self, name: str, deadline: float) -> None:
        """Delete a value by one DEL."""
        key, deadline = name.encode(), self._clock.monotonic() + self._options.timeout
        self._one(key, Command([pack(b"DEL", key)]), deadline)

    def _one(self, key: bytes, command: Command, deadline: float, *, writing: bool = False) -> None:
        (reply,) = self.run([key], [command], deadline, writing=writing)
        if isinstance(reply, StoreError):
            raise reply

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and lengths by SCAN and STRLEN; a name can come twice."""
        if self._options.mode == "cluster":
            self._look()
        for node in dict.fromkeys(self._slots or self.nodes):
            cursor = b"0"
            while True:
                after, keys = node.plain(b"SCAN", cursor, b"MATCH", prefix.encode() + b"*", b"COUNT", b"1000")
                cursor, found = bytes(after), list(map(bytes, keys))
                deadline = self._clock.monotonic() + self._options.transfer_timeout
                lengths = self.run(found, [Command([pack(b"STRLEN", key)]) for key in found], deadline)
                for name, nbytes in zip(found, lengths, strict=True):
                    if isinstance(nbytes, StoreError):
                        raise nbytes
                    yield name.decode(errors="replace"), nbytes
                if cursor == b"0":
                    break

    def run(
        self, keys: Sequence[bytes], commands: Sequence[Command], deadline: float, *, writing: bool = False
    ) -> list[Any]:
        """Run a command for each key and return its reply or an error; follow redirections."""
        try:
            nodes = self._servers_of(keys)
        except StoreError as error:
            return [error] * len(keys)
        found: list[Any] = [None] * len(keys)
        asked: dict[tuple[Node, bool], list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            asked[node, False].append(index)
        for _ in range(_ROUNDS):
            redirected: dict[tuple[Node, bool], list[int]] = defaultdict(list)
            for (node, asking), indexes in asked.items():
                batch = [commands[index] for index in indexes]
                answers = self._ask(node, batch, deadline, asking=asking, writing=writing)
                for index, one in zip(indexes, answers, strict=True):
                    if isinstance(one, exceptions.AskError) and self._slots:
                        once = not isinstance(one, exceptions.MovedError)
                        redirected[self._redirection(one, node), once].append(index)
                    found[index] = self._outcome(keys[index], one, node, writing=writing)
            asked = redirected
        return found

    def close(self) -> None:
        """Close all connections."""
        for node in self.nodes:
            node.close()

    def _ask(self, node: Node, batch: Sequence[Command], deadline: float, *, asking: bool, writing: bool) -> list[Any]:
        """Return the replies of a server, of which some may be exceptions."""
        commands = [one for command in batch for one in ([_ASKING] * asking + [command])]
        try:
            if writing and not node.writes.allows():
                raise node.writes.refusal(node.name)
            return node.exchange(commands, deadline)[asking :: 1 + asking]
        except StoreError as error:
            self._stale = True
            return [error] * len(batch)

    def _outcome(self, key: bytes, answer: Any, node: Node, *, writing: bool) -> Any:
        """Return an answer, or the StoreError for an error; note if a server is full, to pause writes to it."""
        if isinstance(answer, StoreError):
            return answer
        if not isinstance(answer, Exception):
            if writing:
                node.writes.succeeded()
            return missing(key.decode(errors="replace")) if answer is None else answer
        found = failure_of(answer, node.name)
        if isinstance(found, StoreFullError):
            node.writes.failed(found)
        return found

    def _redirection(self, error: exceptions.AskError, node: Node) -> Node:
        """Return the server named by a redirection; MovedError is an AskError."""
        target = self._node(error.host or node.name.rpartition(":")[0], error.port)
        if isinstance(error, exceptions.MovedError):
            self._stale = True
            self._slots[error.slot_id] = target
        return target

    def _servers_of(self, keys: Sequence[bytes]) -> list[Node]:
        """Return the server of each key.

        Raises:
            StoreError: No server knows the cluster's layout.
        """
        if self._options.mode != "cluster":
            return self.nodes * len(keys)
        self._look()
        return [self._slots[key_slot(key)] for key in keys]

    def _must_look(self) -> bool:
        is_early = self._clock.monotonic() - self._looked < _LAYOUT_SECONDS
        return self._stale and not (self._slots and is_early)

    def _look(self) -> None:
        """Learn a cluster's layout from the first server that reports it, if it may have changed."""
        if not self._must_look():
            return
        with self._lock:
            if not self._must_look():
                return
            self._looked = self._clock.monotonic()
            failure: StoreError = StoreUnavailableError("no server of the cluster can be asked for its layout")
            for node in sorted(self.nodes, key=lambda one: one.calls.rests):
                try:
                    layout = node.plain(b"CLUSTER", b"SLOTS")
                except StoreError as error:
                    failure = error
                    continue
                slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
                for first, last, (host, port, *_), *_ in layout:
                    name = bytes(host).decode() if host else node.name.rpartition(":")[0]
                    slots[first : last + 1] = [self._node(name, port)] * (last + 1 - first)
                known = [one for one in slots if one is not None]
                if len(known) == REDIS_CLUSTER_HASH_SLOTS:
                    self._slots, self._stale = known, False
                    return
                failure = StoreUnavailableError("the cluster does not cover all slots", where=node.name)
            if not self._slots:
                raise failure

    def _node(self, host: str, port: int) -> Node:
        if (host, port) not in self._nodes:
            pool = redis.ConnectionPool(connection_class=self._connections, host=host, port=port, **self._settings)
            self._nodes[host, port] = Node(f"{host}:{port}", pool, *self._limits)
        return self._nodes[host, port]

    def _of_sentinels(self) -> Node:
        options = self._options
        settings = {**self._settings, "db": 0}
        if not options.sentinel_auth:
            del settings["username"], settings["password"]
        sentinels: Any = Sentinel  # redis-py has no types for these two
        connections: Any = SentinelConnectionPool
        manager = sentinels(list(options.addresses), sentinel_kwargs={**settings, "ssl": options.tls})
        pool = connections(options.master, manager, **self._settings, ssl=options.tls)
        return Node(f"{options.master} of the sentinels", pool, *self._limits)


_ASKING = Command([pack(b"ASKING")])
CLIENT = Servers
