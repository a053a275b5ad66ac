"""A line to a real server that stands still, slows down and goes on as a test requires, in simulated time.

The server answers at once as far as the store can see, however slow the machine is: what a socket waits for in real
time takes no simulated time. The limits of a socket count only while the line holds its answers back.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import socket
from typing import TYPE_CHECKING, Any

import obstore
import redis

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

#: Real seconds after which a server that should answer counts as hung.
_HUNG = 120


class Line:
    """What answers of a server come through.

    Args:
        clock: What they are delayed by.
    """

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.delay = 0.0  #: simulated seconds before each piece of an answer
        self.pieces_left = math.inf  #: how many pieces come before the line freezes by itself
        self.connections = 0  #: how many were made
        self._forgotten = 0
        self._moves = clock.event()
        self._moves.set()

    def freeze(self) -> None:
        """Hold all answers back."""
        self._moves.clear()

    def forget(self) -> None:
        """Hold back, for ever, the answers through the connections made so far, as a balancer does with idle ones."""
        self._forgotten = self.connections

    def thaw(self) -> None:
        """Let everything through."""
        self.delay, self.pieces_left = 0.0, math.inf
        self._moves.set()

    def comes(self, limit: float | None, number: int = 0) -> bool:
        """Wait for the next piece; return whether it comes within a limit in seconds, None for none.

        Args:
            limit: The limit.
            number: Which connection waits, from 1 on; 0 if the line forgets none.
        """
        if 0 < number <= self._forgotten:
            assert limit is not None, "it would wait for ever"
            self.clock.sleep(limit)
            return False
        if self.pieces_left <= 0:
            self.freeze()
        self.pieces_left -= 1
        until = math.inf if limit is None else self.clock.monotonic() + limit
        self.clock.sleep(self.delay if limit is None else min(self.delay, limit))
        left = until - self.clock.monotonic()
        return (limit is None or self.delay < limit) and self._moves.wait(None if limit is None else left)

    def redis_connections(self) -> type[redis.Connection]:
        """Return the class of connections to a Redis server through this line."""
        line = self

        class Connection(redis.Connection):
            def _connect(self) -> socket.socket:
                made: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
                limit = made.gettimeout()
                held = _Socket(fileno=made.detach())
                held.line = line
                held.number = line.connections = line.connections + 1
                held.settimeout(limit)
                return held

        return Connection


class _Socket(socket.socket):
    """A connected socket whose answers come through a line; limits of 0 seconds, for a look, count in real time."""

    line: Line
    number: int
    _limit: float | None = None

    def settimeout(self, value: float | None) -> None:
        self._limit = value
        super().settimeout(_HUNG if value else value)

    def gettimeout(self) -> float | None:
        return self._limit

    def recv(self, *args: Any) -> bytes:
        self._await()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._await()
        return super().recv_into(*args)

    def _await(self) -> None:
        if self._limit == 0:
            return
        if not self.line.comes(self._limit, self.number):
            raise TimeoutError


class _Selector(selectors.SelectSelector):
    """Waits for calls from other threads, and for no sockets."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self.called = clock.event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.called.wait(timeout)
        self.called.clear()
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop in simulated time, without sockets."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._simulated, self._calls = clock, _Selector(clock)
        super().__init__(self._calls)

    def time(self) -> float:
        return self._simulated.monotonic()

    def _write_to_self(self) -> None:
        self._calls.called.set()


class S3Line:
    """The functions of obstore, with answers that come when a test wants, on a loop in simulated time.

    The requests themselves are obstore's synchronous ones, which take no simulated time.
    """

    def __init__(self, clock: SimulatedClock) -> None:
        self.loop = Loop(clock)
        self.delay = 0.0  #: simulated seconds before each answer and before each body
        self.answers_left = math.inf  #: how many answers come before the line freezes by itself
        self._moves = asyncio.Event()
        self._moves.set()

    def freeze(self) -> None:
        """Hold all answers back."""
        self.answers_left = 0

    def thaw(self) -> None:
        """Let everything through."""
        self.delay, self.answers_left = 0.0, math.inf
        self.loop.call_soon_threadsafe(self._moves.set)

    async def head_async(self, store: Any, name: str) -> Any:
        await self._come()
        return obstore.head(store, name)

    async def get_async(self, store: Any, name: str) -> Any:
        await self._come()
        return _Got(self, obstore.get(store, name))

    async def put_async(self, store: Any, name: str, content: Any, *, use_multipart: bool) -> None:
        await self._come()
        obstore.put(store, name, content, use_multipart=use_multipart)

    async def delete_async(self, store: Any, name: str) -> None:
        await self._come()
        obstore.delete(store, name)

    async def _come(self) -> None:
        if self.answers_left <= 0:
            self._moves.clear()
        self.answers_left -= 1
        await self._moves.wait()
        await asyncio.sleep(self.delay)


class _Got:
    """An answer whose body comes through the line as well."""

    def __init__(self, line: S3Line, result: Any) -> None:
        self._line, self._result = line, result
        self.meta = result.meta

    async def bytes_async(self) -> Any:
        await self._line._come()
        return self._result.bytes()


class MooncakeLine:
    """A connected client of Mooncake whose calls begin when a test wants, in simulated time."""

    def __init__(self, clock: SimulatedClock, client: Any) -> None:
        self._client = client
        self._moves = clock.event()
        self._moves.set()

    def freeze(self) -> None:
        """Hold all calls back."""
        self._moves.clear()

    def thaw(self) -> None:
        """Let everything through."""
        self._moves.set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name in {"register_buffer", "unregister_buffer"}:  # they ask nobody
            return call

        def held(*args: Any) -> Any:
            self._moves.wait()
            return call(*args)

        return held
