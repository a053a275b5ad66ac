"""Values of 4 MiB in a Redis server: the tier beside a bare socket and beside redis-py, one thread and one server.

The bare side sends and receives the same bytes, and neither frames nor checks them. The tier's side includes the header
and the checksums of a block. Every round has all sides, in turns; ratios are taken within a round.
"""

from __future__ import annotations

import socket
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import numpy as np
import redis
from redis.utils import HIREDIS_AVAILABLE

from tests.e2e.bench.figure import Figure
from tests.ucm.store.servers import RedisServer
from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer
from ucm.store.config import StoreConfig
from ucm.store.format import HeaderCodec
from ucm.store.remote.tiers import RedisOptions, RedisTier
from ucm.store.tier import TierPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VALUES, SLICES, SLICE_NBYTES, ROUNDS = 16, 16, 256 << 10, 9
NBYTES = SLICES * SLICE_NBYTES
#: Seconds for a call; nothing is frozen here.
_LONG = 60.0
_KEYS = [BlockKey(number.to_bytes(32, "big")) for number in range(VALUES)]
_GOALS = {
    ("load", "bare"): 1 / 0.9,
    ("load", "redis-py"): 1 / 2,
    ("save", "bare"): None,
    ("save", "redis-py"): 1 / 6,
}
_MOST_CPU = 0.3
#: redis-py packs and parses by itself, or with this package where it is installed: the two differ by up to 5 times.
_STOCK = "redis-py with hiredis" if HIREDIS_AVAILABLE else "redis-py"


class Side(Protocol):
    """One way to the server."""

    def save(self, key: BlockKey, value: memoryview) -> None:
        """Store a value."""

    def load(self, key: BlockKey, into: memoryview) -> None:
        """Fetch a value into memory."""


class Bare:
    """A socket, and no more of the protocol than a server needs to see.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def save(self, key: BlockKey, value: memoryview) -> None:
        """``sendall``."""
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$64\r\n%s\r\n$%d\r\n" % (key.hex().encode(), value.nbytes))
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")
        self._expect(b"+OK\r\n")

    def load(self, key: BlockKey, into: memoryview) -> None:
        """``recv_into``."""
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$64\r\n%s\r\n" % key.hex().encode())
        self._expect(b"$%d\r\n" % into.nbytes)
        at = 0
        while at < into.nbytes:
            at += self._socket.recv_into(into[at:])
        self._expect(b"\r\n")

    def drop(self, key: BlockKey) -> None:
        """Delete a value that is there."""
        self._socket.sendall(b"*2\r\n$3\r\nDEL\r\n$64\r\n%s\r\n" % key.hex().encode())
        self._expect(b":1\r\n")

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _expect(self, line: bytes) -> None:
        found = self._socket.recv(len(line), socket.MSG_WAITALL)
        if found != line:
            raise RuntimeError(f"the server answered {found!r}, not {line!r}")


class Stock:
    """redis-py as it comes.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)

    def save(self, key: BlockKey, value: memoryview) -> None:
        """``set``."""
        self._client.set(key.hex(), bytes(value))

    def load(self, key: BlockKey, into: memoryview) -> None:
        """``get``, and a copy to where the value is wanted."""
        found = self._client.get(key.hex())
        if not isinstance(found, bytes):
            raise TypeError("the server has lost a value")
        into[:] = found

    def close(self) -> None:
        """End the connections."""
        self._client.close()


class Ours:
    """The tier.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        geometry = BlockGeometry((SLICE_NBYTES,) * SLICES, b"bench of values!")
        self._codec = HeaderCodec("bench", geometry)
        options = RedisOptions(address=(f"127.0.0.1:{port}",), transfer_timeout=_LONG)
        self._tier = RedisTier(options, TierPlace("Redis", "bench", geometry, self._codec, StoreConfig()))

    def save(self, key: BlockKey, value: memoryview) -> None:
        """Header and layer slices."""
        slices = self._slices(value)
        header = self._codec.encode(key, self._codec.seal(slices))
        self._tier.put(key, [header, *slices], time.monotonic() + _LONG)

    def load(self, key: BlockKey, into: memoryview) -> None:
        """Into the layer slices' memory, verified."""
        [outcome] = self._tier.read_many([BlockTransfer(key, self._slices(into))], time.monotonic() + _LONG)
        if isinstance(outcome, Exception):
            raise outcome

    def close(self) -> None:
        """End the connections."""
        self._tier.close()

    def _slices(self, value: memoryview) -> list[memoryview]:
        return [value[at : at + SLICE_NBYTES] for at in range(0, NBYTES, SLICE_NBYTES)]


def figures() -> Iterator[Figure]:
    """Time of the tier for that of each other side, and its processor time."""
    with TemporaryDirectory(prefix="ucm-bench-redis-") as directory:
        server = RedisServer(Path(directory), "--maxmemory", "1gb")
        sides: dict[str, Ours | Bare | Stock] = {
            "ours": Ours(server.port),
            "bare": Bare(server.port),
            "redis-py": Stock(server.port),
        }
        try:
            seconds, cpu = _measure(sides)
        finally:
            for side in sides.values():
                side.close()
            server.kill()
    total = VALUES * NBYTES / 1e9
    for operation in ("load", "save"):
        ours = seconds[operation, "ours"]
        detail = {name: total / statistics.median(seconds[operation, name]) for name in sides}
        for name in ("bare", "redis-py"):
            ratio = statistics.median(a / b for a, b in zip(ours, seconds[operation, name], strict=True))
            beside = _STOCK if name == "redis-py" else name
            yield Figure(f"redis: {operation} of 4 MiB, to {beside}", ratio, "", _GOALS[operation, name], detail)
        used = {name: statistics.median(cpu[operation, name]) / total for name in sides}
        yield Figure(f"redis: {operation}, processor time of the client", used["ours"], "s/GB", _MOST_CPU, used)


def _measure(sides: dict[str, Ours | Bare | Stock]) -> tuple[dict[tuple[str, str], list[float]], ...]:
    """Seconds, and those of the processor, by operation and side; one entry per round."""
    source = memoryview(np.random.default_rng(0).bytes(VALUES * NBYTES))
    memory = np.zeros(VALUES * NBYTES, dtype=np.uint8)
    target = memory.data
    found: tuple[dict[tuple[str, str], list[float]], ...] = ({}, {})
    for number in range(ROUNDS + 1):
        names: Sequence[str] = list(sides) if number % 2 else list(reversed(sides))
        for name in names:
            side: Side = sides[name]
            for operation, move, values in (("save", side.save, source), ("load", side.load, target)):
                began, used = time.perf_counter(), time.process_time()
                for at, key in enumerate(_KEYS):
                    move(key, values[at * NBYTES : (at + 1) * NBYTES])
                if number:  # the first round warms up
                    found[0].setdefault((operation, name), []).append(time.perf_counter() - began)
                    found[1].setdefault((operation, name), []).append(time.process_time() - used)
            if target != source:
                raise RuntimeError(f"{name} gave back other bytes than it was given")
            memory[:] = 0
    return found
