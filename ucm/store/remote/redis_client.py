"""Talk to Redis or Valkey servers without copying values: one server, a master named by sentinels, or a cluster.

redis-py makes the connections (TLS, authentication, sentinels) and reads replies through our parser, which receives a
value directly into its destination. Commands are written in wire format. So a batch of commands costs one round trip to
each server, an answer for a thousand keys is parsed at once, and no byte of a value is copied in either direction,
except to join small layer slices before they are sent.

Balancers and firewalls forget idle connections without a word, and the other end of such a connection is silent for
ever. Three things keep this from looking like a dead server: keep-alive packets, which most of them count as use; an
idle connection is replaced before it is used; and a used connection that fails is tried again once, through a new one,
before the server rests. Apart from that, and from a cluster's redirections, nothing is retried, so that the time of
every call is bounded.
"""

from __future__ import annotations

import binascii
import socket
import ssl
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis import exceptions
from redis._parsers.resp2 import _RESP2Parser
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool
from redis.utils import SENTINEL as NO_TIMEOUT

from ucm.clock import SYSTEM
from ucm.store.base import BlockForeignError, StoreError, StoreFullError, StoreTimeoutError, StoreUnavailableError
from ucm.store.format import LARGE_BYTES, MOST_BUFFERS, aligned_buffer, beyond
from ucm.store.health import Breaker
from ucm.store.remote.tiers import Client, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucm.clock import Clock
    from ucm.store.base import Buffer
    from ucm.store.remote.tiers import Part, RedisOptions

Answer = TypeVar("Answer")

SLOTS = 16384
#: Values are sent and received in parts of at most this size; each must pass within the timeout of one answer.
_PART = 1 << 20
_TIMEVAL = struct.Struct("ll")
#: Bytes of values that may be requested while earlier ones are received; the server holds them meanwhile.
_WINDOW = 8 << 20
#: The longest value of the wrong length that is read and dropped; a longer one costs the connection.
_MOST_DROPPED = 1 << 16
_READ_SIZE = 1 << 14
#: How many times a command follows a cluster's redirections.
_ROUNDS = 4
#: The least number of seconds between two requests for a cluster's layout.
_LAYOUT_SECONDS = 0.5
#: Seconds without use after which a connection is replaced: shorter than any usual limit of a balancer, 50 s and more.
_MOST_IDLE = 20.0
#: Seconds without use until a connection's first keep-alive packet, seconds between packets, and the unanswered packets
#: after which the kernel ends it.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Into:
    """Receives a value into memory.

    Args:
        memory: The destination buffers, in order.
        deadline: When to stop, by the clock.
        clock: What time passes by.
        is_most: Whether a shorter value is received as well.
    """

    def __init__(self, memory: Sequence[Buffer], deadline: float, clock: Clock, *, is_most: bool = False) -> None:
        self._is_most = is_most
        self._memory = [view.cast("B") for view in memory]
        self._deadline = deadline
        self._clock = clock
        self.nbytes = sum(view.nbytes for view in self._memory)

    def read(self, parser: IntoParser) -> int | None:
        """Receive the value and return its length, or None if there is none; skip one of a wrong length."""
        buffer, sock = parser.buffer, parser.sock
        line = buffer.readline()
        if not line.startswith(b"$"):
            buffer.rewind(buffer.get_pos() - len(line) - 2)
            found: int | None = parser.read_plain()
            return found
        _WANTED.heard = True
        nbytes = int(line[1:])
        if nbytes < 0:
            return None
        if nbytes > self.nbytes or (nbytes < self.nbytes and not self._is_most):
            if nbytes > _MOST_DROPPED:
                raise WrongLengthError(nbytes)
            buffer.read(nbytes)
            return nbytes
        timeout = sock.gettimeout()
        receive = self._receive_checked if isinstance(sock, ssl.SSLSocket) else self._receive_all
        if receive == self._receive_all:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6)))
            sock.settimeout(None)
        try:
            for part, size in in_parts(first_bytes(self._memory, nbytes)):
                ahead, rest = memoryview(parser.read_ahead(size)), part
                left = size - ahead.nbytes
                while ahead:
                    got = min(ahead.nbytes, rest[0].nbytes)
                    rest[0][:got] = ahead[:got]
                    rest, ahead = beyond(rest, got), ahead[got:]
                receive(rest, left, sock, timeout)
        finally:
            sock.settimeout(timeout)
        buffer.read(0)  # consume the end of the line
        return nbytes

    def _receive_all(self, part: list[Buffer], left: int, sock: Any, timeout: float) -> None:
        """Receive a part by one system call, which returns the whole part, or less after a timeout."""
        del timeout
        while left:
            if self._clock.monotonic() > self._deadline:
                raise exceptions.TimeoutError("the value did not arrive in time")
            try:
                got, *_ = sock.recvmsg_into(part, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise exceptions.TimeoutError("nothing of the value arrived in time") from None
            if not got:
                raise exceptions.ConnectionError("the server closed the connection within a value")
            left -= got
            if left:
                part = beyond(part, got)

    def _receive_checked(self, part: list[Buffer], left: int, sock: Any, timeout: float) -> None:
        """Receive whatever is available at a time, because TLS has no MSG_WAITALL."""
        while left:
            remaining = self._deadline - self._clock.monotonic()
            if remaining <= 0:
                raise exceptions.TimeoutError("the value did not arrive in time")
            if remaining < timeout:
                sock.settimeout(remaining)
            got = sock.recv_into(part[0])
            if not got:
                raise exceptions.ConnectionError("the server closed the connection within a value")
            left -= got
            part = beyond(part, got)


def first_bytes(views: Iterable[Buffer], nbytes: int) -> Iterator[Buffer]:
    """Yield the buffers that hold the first ``nbytes``."""
    for view in views:
        yield view[:nbytes]
        nbytes = max(0, nbytes - view.nbytes)


def in_parts(views: Iterable[Buffer]) -> Iterator[tuple[list[Buffer], int]]:
    """Yield consecutive buffers in parts, each of them small enough for one system call, and the bytes of each."""
    part: list[Buffer] = []
    nbytes = 0
    for view in views:
        for at in range(0, view.nbytes, _PART):
            piece = view[at : at + _PART]
            size = piece.nbytes
            if nbytes + size > _PART or len(part) == MOST_BUFFERS:
                yield part, nbytes
                part, nbytes = [], 0
            part.append(piece)
            nbytes += size
    if part:
        yield part, nbytes


class Lines:
    """Receives a number of short replies of one line each.

    Args:
        count: The number of replies.
        deadline: When to stop, by the clock.
        clock: What time passes by.
    """

    def __init__(self, count: int, deadline: float, clock: Clock) -> None:
        self._count = count
        self._deadline = deadline
        self._clock = clock

    def read(self, parser: IntoParser) -> list[bytes]:
        """Receive the replies."""
        data = bytearray(parser.read_ahead(1 << 30))
        while data.count(b"\r\n") < self._count:
            if self._clock.monotonic() > self._deadline:
                raise exceptions.TimeoutError("the answer did not arrive in time")
            got = parser.sock.recv(_READ_SIZE)
            if not got:
                raise exceptions.ConnectionError("the server closed the connection")
            _WANTED.heard = True
            data += got
        return bytes(data).split(b"\r\n")[: self._count]


class WrongLengthError(exceptions.InvalidResponse):
    """A value does not have a block's length; it is left unread and its connection closed."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the value has {nbytes} bytes")
        self.nbytes = nbytes


#: What each thread waits for: how it wants its next reply, and whether anything of its call's answer has come.
_WANTED = threading.local()


class IntoParser(_RESP2Parser):
    """A redis-py parser that receives the next reply in the way its thread requested."""

    def _read_response(self, disable_decoding: bool = False, timeout: float | object = NO_TIMEOUT) -> Any:
        wanted = getattr(_WANTED, "reply", None)
        if wanted is None:
            return super()._read_response(disable_decoding=disable_decoding, timeout=timeout)
        _WANTED.reply = None
        return wanted.read(self)

    @property
    def buffer(self) -> Any:
        """The received bytes that were not read yet."""
        return self._buffer

    @property
    def sock(self) -> Any:
        """The connection's socket."""
        return self._sock

    def read_plain(self) -> Any:
        """Read the next reply as redis-py does."""
        return super()._read_response(disable_decoding=True)

    def read_ahead(self, nbytes: int) -> bytes:
        """Return bytes that were received already, at most ``nbytes``."""
        buffer: Any = self._buffer
        found: bytes = buffer._buffer.read(nbytes)  # noqa: SLF001 - redis-py has no public name for it
        return found


def pack(*words: bytes) -> bytes:
    """Return a command in wire format."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def pack_set(key: bytes, buffers: Sequence[Buffer | bytearray], ttl_seconds: int | None) -> list[Buffer | bytes]:
    """Return a SET command whose value is given in pieces."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    nbytes = sum(view.nbytes for view in views)
    pieces: list[Buffer | bytes] = []
    for part, _ in in_parts(views):
        # Copying small pieces takes less time than a call for each.
        pieces += [b"".join(part)] if all(view.nbytes < LARGE_BYTES for view in part) else part
    words = 3 if ttl_seconds is None else 5
    expiry = b"" if ttl_seconds is None else b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_seconds)), ttl_seconds)
    begin = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, nbytes)
    return [begin, *pieces, b"\r\n" + expiry]


def slot(key: bytes) -> int:
    """Return the hash slot of a key without braces."""
    return binascii.crc_hqx(key, 0) % SLOTS


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a batch.

    Args:
        sent: The command in wire format, in pieces.
        wanted: How to receive the reply; None: as redis-py does.
    """

    sent: Sequence[Buffer | bytes]
    wanted: Into | None = None


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
        self.calls = Breaker(f"the Redis server {name}", failures, rest, clock=clock)
        # A full server can still be read.
        self.writes = Breaker(f"writing to the Redis server {name}", failures, rest, clock=clock)

    @property
    def rests(self) -> bool:
        """Whether calls would be refused."""
        return self.calls.rests or self.writes.rests

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Send commands ahead of their replies, and receive the replies.

        Returns:
            The replies, including error replies. Replies after a value of the wrong length are missing.

        Raises:
            StoreError: The server does not answer, or the connection fails.
        """
        replies: list[Any] = []

        def talk(connection: Any, until: float) -> list[Any]:
            sent, ahead = 0, 0
            while len(replies) < len(commands):
                while sent < len(commands) and (sent == len(replies) or ahead < _WINDOW):
                    connection.send_packed_command(self._until(commands[sent].sent, until), check_health=False)
                    ahead += _expected(commands[sent])
                    sent += 1
                command = commands[len(replies)]
                try:
                    replies.append(self._receive(connection, command.wanted))
                except WrongLengthError as error:
                    replies.append(error.nbytes)
                    break
                except exceptions.ResponseError as error:
                    replies.append(error)
                ahead -= _expected(command)
            return replies

        return self._talk(talk, deadline)

    def ask(self, keys: Sequence[bytes], deadline: float, *, asking: bool = False) -> list[bytes]:
        """Look up keys in one round trip; return one line of the answer for each."""
        prefix = pack(b"ASKING") if asking else b""
        sent = b"".join(prefix + b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys)

        def talk(connection: Any, until: float) -> list[bytes]:
            connection.send_packed_command([sent], check_health=False)
            wanted = Lines(len(keys) * (2 if asking else 1), until, self._clock)
            lines: list[bytes] = self._receive(connection, wanted)
            return lines

        lines = self._talk(talk, deadline)
        return lines[1::2] if asking else lines

    def plain(self, *words: bytes) -> Any:
        """Send one command with a short reply."""
        (reply,) = self.exchange([Command([pack(*words)])], self._clock.monotonic() + self._timeout)
        if isinstance(reply, Exception):
            raise failure_of(reply, self.name)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._pool.disconnect()

    def _until(self, pieces: Iterable[Buffer | bytes], deadline: float) -> Iterator[Buffer | bytes]:
        """Yield pieces to send until the deadline."""
        for piece in pieces:
            if self._clock.monotonic() > deadline:
                raise exceptions.TimeoutError("the server did not take the value in time")
            yield piece

    def _receive(self, connection: Any, wanted: Into | Lines | None) -> Any:
        _WANTED.reply = wanted
        try:
            answer = connection.read_response(disable_decoding=True)
        finally:
            _WANTED.reply = None
        _WANTED.heard = True
        return answer

    def _talk(self, talk: Callable[[Any, float], Answer], deadline: float) -> Answer:
        """Return what is said through a connection; convert its errors to StoreError and report them to the breaker.

        If a connection that was used before fails without a byte of an answer, all idle connections are as doubtful:
        they are closed, and a new connection is tried once, for one more time limit where the deadline has passed.

        Args:
            talk: Sends and receives, through a connection and until a time; repeating it does no harm.
            deadline: When to stop, by the clock.
        """
        if not self.calls.allows(wait=False):
            raise self.calls.refusal(self.name)
        try:
            try:
                answer = self._once(talk, deadline)
            except _SilentError:
                self._pool.disconnect(inuse_connections=False)
                try:
                    answer = self._once(talk, max(deadline, self._clock.monotonic() + self._timeout))
                except _SilentError as again:  # another thread released it meanwhile
                    raise again.error from None
        except (exceptions.RedisError, OSError) as error:
            failure = failure_of(error, self.name)
            if isinstance(failure, StoreUnavailableError):
                self.calls.failed(failure)
            raise failure from error
        self.calls.succeeded()
        return answer

    def _once(self, talk: Callable[[Any, float], Answer], deadline: float) -> Answer:
        """Talk through a pooled connection.

        Raises:
            _SilentError: The connection has answered before, and failed now without a byte of an answer.
        """
        connection: Any = self._pool.get_connection()
        try:
            is_new = self._is_new(connection)
            try:
                _WANTED.heard = False
                answer = talk(connection, deadline)
            except (exceptions.TimeoutError, exceptions.ConnectionError, OSError) as error:
                connection.disconnect()
                if is_new or _WANTED.heard:
                    raise
                raise _SilentError(error) from error
            connection.answered = connection._sock, self._clock.monotonic()  # noqa: SLF001 - it has no public name
        finally:
            self._pool.release(connection)
        return answer

    def _is_new(self, connection: Any) -> bool:
        """Return whether a connection has not answered yet; one that has been idle is replaced, and so is new."""
        sock, when = getattr(connection, "answered", (None, 0.0))
        if sock is not connection._sock:  # noqa: SLF001 - it has no public name
            return True
        if self._clock.monotonic() - when < _MOST_IDLE:
            return False
        connection.disconnect()
        connection.connect()
        return True


class _SilentError(Exception):
    """A connection that has answered before failed without a byte of an answer.

    Args:
        error: How it failed.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def failure_of(error: BaseException, where: str) -> StoreError:
    """Return the StoreError for an error of redis-py."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, exceptions.TimeoutError):
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


def _expected(command: Command) -> int:
    return command.wanted.nbytes if command.wanted is not None else 1


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
            "parser_class": IntoParser,
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

        def ask(node: Node, indexes: list[int], asking: bool) -> list[Any]:
            return list(map(meaning, node.ask([keys[index] for index in indexes], deadline, asking=asking)))

        def meaning(line: bytes) -> Any:
            if line.startswith(b":"):
                return line != b":0"
            said = line[1:].decode(errors="replace")
            kind, _, rest = said.partition(" ")
            if kind in {"MOVED", "ASK"}:
                return (exceptions.MovedError if kind == "MOVED" else exceptions.AskError)(rest)
            return exceptions.ResponseError(said)

        return self._each(keys, ask)

    def read(
        self, names: Sequence[str], parts: Sequence[Sequence[Part]], nbytes: int, deadline: float
    ) -> list[list[int] | StoreError]:
        """Receive parts of values by pipelined commands, each directly into its memory."""
        keys = [name.encode() for name in names]

        def commands(index: int) -> list[Command]:
            wanted, key = parts[index], keys[index]
            if len(wanted) == 1 and wanted[0].nbytes == nbytes:
                return [Command([pack(b"GET", key)], Into(wanted[0].memory, deadline, self._clock))]
            return [
                Command(
                    [pack(b"GETRANGE", key, b"%d" % part.begin, b"%d" % (part.begin + part.nbytes - 1))],
                    Into(part.memory, deadline, self._clock),
                )
                for part in wanted
            ]

        replies = self.run(keys, commands, deadline)
        for index, reply in enumerate(replies):
            # GETRANGE answers with nothing where GET says that there is nothing.
            if not isinstance(reply, StoreError) and (reply[0] is None or (len(reply) > 1 and reply[0] == 0)):
                replies[index] = missing(names[index])
        return replies

    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return values by pipelined commands."""
        keys = [name.encode() for name in names]
        memory = [aligned_buffer(nbytes or 0) for _ in names]

        def commands(index: int) -> list[Command]:
            into = Into([memory[index]], deadline, self._clock, is_most=True) if nbytes else None
            return [Command([pack(b"GET", keys[index])], into)]

        found: list[Buffer | StoreError] = []
        for name, content, reply in zip(names, memory, self.run(keys, commands, deadline), strict=True):
            if isinstance(reply, StoreError):
                found.append(reply)
            elif reply[0] is None:
                found.append(missing(name))
            elif not nbytes:
                found.append(memoryview(reply[0]))
            else:
                found.append(content[: reply[0] if reply[0] <= nbytes else nbytes - 1])
        return found

    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a value by one SET."""
        key = name.encode()
        self._one(key, Command(pack_set(key, buffers, self._options.ttl_seconds)), deadline, writing=True)

    def remove(self, name: str, deadline: float) -> None:
        """Delete a value by one DEL."""
        key, deadline = name.encode(), self._clock.monotonic() + self._options.timeout
        self._one(key, Command([pack(b"DEL", key)]), deadline)

    def _one(self, key: bytes, command: Command, deadline: float, *, writing: bool = False) -> None:
        (reply,) = self.run([key], lambda _: [command], deadline, writing=writing)
        if isinstance(reply, StoreError):
            raise reply

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and lengths by SCAN and STRLEN; a name can come twice."""
        if self._options.mode == "cluster":
            self._server_of(b"")
        for node in dict.fromkeys(self._slots or self.nodes):
            cursor = b"0"
            while True:
                cursor, found = node.plain(b"SCAN", cursor, b"MATCH", prefix.encode() + b"*", b"COUNT", b"1000")
                deadline = self._clock.monotonic() + self._options.transfer_timeout
                lengths = self.run(found, lambda at, keys=found: [Command([pack(b"STRLEN", keys[at])])], deadline)  # type: ignore[misc] # mypy does not infer the default
                for name, nbytes in zip(found, lengths, strict=True):
                    if isinstance(nbytes, StoreError):
                        raise nbytes
                    yield name.decode(errors="replace"), nbytes[0]
                if cursor == b"0":
                    break

    def run(
        self,
        keys: Sequence[bytes],
        commands: Callable[[int], Sequence[Command]],
        deadline: float,
        *,
        writing: bool = False,
    ) -> list[Any]:
        """Run commands for each key and return a list of replies, or an error, for each."""

        def exchange(node: Node, indexes: list[int], asking: bool) -> list[Any]:
            found: list[Any] = []
            while len(found) < len(indexes):
                batch: list[Command] = []
                counts = []
                for index in indexes[len(found) :]:
                    mine = [part for one in commands(index) for part in ([_ASKING, one] if asking else [one])]
                    counts.append(len(mine))
                    batch += mine
                replies = node.exchange(batch, deadline)
                for count in counts:
                    some, replies = replies[:count], replies[count:]
                    if not some:
                        break  # a value of the wrong length has cost the connection: continue with another one
                    some = some[1::2] if asking else some
                    bad = next((one for one in some if isinstance(one, Exception)), None)
                    found.append(some if bad is None else bad)
            return found

        return self._each(keys, exchange, writing=writing)

    def close(self) -> None:
        """Close all connections."""
        for node in self.nodes:
            node.close()

    def _each(  # noqa: C901 - one loop with short branches
        self,
        keys: Sequence[bytes],
        ask: Callable[[Node, list[int], bool], list[Any]],
        *,
        writing: bool = False,
    ) -> list[Any]:
        """Ask the servers of the keys, and follow a cluster's redirections."""
        found: list[Any] = [None] * len(keys)
        asked: dict[tuple[Node, bool], list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            try:
                asked[self._server_of(key), False].append(index)
            except StoreError as error:
                found[index] = error
        for _ in range(_ROUNDS):
            redirected: dict[tuple[Node, bool], list[int]] = defaultdict(list)
            for (node, asking), indexes in asked.items():
                try:
                    if writing and not node.writes.allows():
                        raise node.writes.refusal(node.name)
                    answers = ask(node, indexes, asking)
                except StoreError as error:
                    self._stale = True
                    for index in indexes:
                        found[index] = error
                    continue
                for index, one in zip(indexes, answers, strict=True):
                    if isinstance(one, exceptions.AskError) and self._slots:
                        once = not isinstance(one, exceptions.MovedError)
                        redirected[self._redirection(one, node), once].append(index)
                    found[index] = self._outcome(one, node, writing=writing)
            if not redirected:
                break
            asked = redirected
        return found

    def _outcome(self, answer: Any, node: Node, *, writing: bool) -> Any:
        """Return an answer, or the StoreError for an error; note if a server is full, to pause writes to it."""
        found = failure_of(answer, node.name) if isinstance(answer, Exception) else answer
        if isinstance(found, StoreFullError):
            node.writes.failed(found)
        elif writing and not isinstance(found, StoreError):
            node.writes.succeeded()
        return found

    def _redirection(self, error: exceptions.AskError, node: Node) -> Node:
        """Return the server named by a redirection; MovedError is an AskError."""
        target = self._node(error.host or node.name.rpartition(":")[0], error.port)
        if isinstance(error, exceptions.MovedError):
            self._stale = True
            self._slots[error.slot_id] = target
        return target

    def _server_of(self, key: bytes) -> Node:
        if self._options.mode != "cluster":
            return next(iter(self._nodes.values()))
        if self._stale and (self._clock.monotonic() - self._looked >= _LAYOUT_SECONDS or not self._slots):
            self._look()
        return self._slots[slot(key)]

    def _look(self) -> None:
        """Learn a cluster's layout from the first server that reports it."""
        with self._lock:
            if not self._stale or (self._slots and self._clock.monotonic() - self._looked < _LAYOUT_SECONDS):
                return
            self._looked = self._clock.monotonic()
            failure: StoreError = StoreUnavailableError("no server of the cluster can be asked for its layout")
            for node in sorted(self.nodes, key=lambda one: one.calls.rests):
                try:
                    layout = node.plain(b"CLUSTER", b"SLOTS")
                except StoreError as error:
                    failure = error
                    continue
                slots: list[Node | None] = [None] * SLOTS
                for first, last, (host, port, *_), *_ in layout:
                    name = host.decode() if host else node.name.rpartition(":")[0]
                    slots[first : last + 1] = [self._node(name, port)] * (last + 1 - first)
                known = [one for one in slots if one is not None]
                if len(known) == SLOTS:
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
        del settings["parser_class"]
        if not options.sentinel_auth:
            del settings["username"], settings["password"]
        sentinels: Any = Sentinel  # redis-py has no types for these two
        connections: Any = SentinelConnectionPool
        manager = sentinels(list(options.addresses), sentinel_kwargs={**settings, "ssl": options.tls})
        pool = connections(options.master, manager, **self._settings, ssl=options.tls)
        return Node(f"{options.master} of the sentinels", pool, *self._limits)


_ASKING = Command([pack(b"ASKING")])
CLIENT = Servers
