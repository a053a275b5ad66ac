"""Talk to a Mooncake Store, whose client takes no deadlines: its calls run in threads that can be abandoned.

A call can take 30 seconds if the master, or a host that lends memory, is frozen, and a failed transfer may use its
memory even after it has returned. So values pass through registered memory of our own: whoever asked for a value
neither waits for a late call nor shares memory with it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ucm.clock import SYSTEM
from ucm.store.base import StoreError, StoreFullError, StoreTimeoutError, StoreUnavailableError
from ucm.store.format import aligned_buffer, gather, nbytes_of, scatter
from ucm.store.health import Breaker, Pool, RefusableJob
from ucm.store.remote.tiers import Client, misfit, missing, too_long

# It logs every connection to stderr; its native part reads this when the first client is made.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.clock import Clock
    from ucm.store.base import Buffer
    from ucm.store.remote.tiers import MooncakeOptions

Answer = TypeVar("Answer")
#: Mooncake's codes for: no memory is left; the value was not written, not completely, or was evicted, perhaps while it
#: was received (-707); wrong sizes; the value exists, or is being written by somebody else.
_FULL = frozenset({-200, -1700})
_MISSING = frozenset({-703, -704, -707, -710, -712})
_WRONG_SIZE, _GONE, _EXISTS = -600, -704, -705
_SAID = {
    -101: "no host lends memory",
    -800: "a transfer failed: is the host that lends the memory alive?",
    -900: "the master cannot be reached",
    -901: "the master cannot be reached",
}
#: What is answered although no transfer can be under way any more: the master's refusals, as opposed to failures.
_HARMLESS = frozenset({*_FULL, *_MISSING, _WRONG_SIZE, _EXISTS, -101, -900, -901})
#: Our own: there was no time to try.
_LATE = 1
#: Lookups are short, and must not wait behind values.
_LOOKUP_THREADS = 2
#: The master evicts in the background, some time after it was full, and somebody else may just be writing a value: how
#: long, and how often, it is tried again.
_AGAIN_FOR_SECONDS, _AGAIN_SECONDS = 1.0, 0.05
#: A call of Mooncake's protocol (magic number, version, serialization, kind, number, function, lengths of the arguments
#: and the attachment) of a function that no master has, and says so with the same magic number and number.
_QUESTION = struct.pack("<BBBBIIII", 21, 0, 0, 0, 7, 0, 0, 0)
_UNIT = 1 << 20
#: Memory that transfers may use: a failed one may still do so, and its memory stays here.
_LENT: set[Staging] = set()
#: The clients of this process, by its id and their settings. None is closed, because this takes a second, in which no
#: thread of the process runs.
_clients: dict[tuple[Any, ...], Any] = {}
_connecting = threading.Lock()


class Staging:
    """Registered memory that one call uses at a time.

    Args:
        store: The client that registers it.
        nbytes: Its size.

    Raises:
        StoreUnavailableError: The memory cannot be registered.
    """

    def __init__(self, store: Any, nbytes: int) -> None:
        self._store = store
        self.memory = aligned_buffer(nbytes)
        self.address: int = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.is_tainted = False  #: whether a transfer has failed, and may still use the memory
        code = store.register_buffer(self.address, nbytes)
        if code:
            raise StoreUnavailableError(f"Mooncake refuses to register {nbytes} bytes of memory: code {code}")

    def free(self) -> None:
        """End the registration."""
        self._store.unregister_buffer(self.address)


class MooncakeClient(Client):
    """One Mooncake Store, of one master.

    Args:
        options: The master's address and how to reach it.
        secret: Not used: Mooncake has no accounts.
        failures: The number of consecutive failures after which the store rests.
        rest: The length of a rest in seconds.
        clock: What rests and deadlines pass by, and whose threads make the calls.
        connected: A connected client of Mooncake's; None: the one of this process, which is connected when needed.
    """

    def __init__(
        self,
        options: MooncakeOptions,
        secret: str,
        failures: int,
        rest: float,
        *,
        clock: Clock = SYSTEM,
        connected: Any = None,
    ) -> None:
        del secret
        self._clock = clock
        self._store = connected
        self._options = options
        self._where = f"Mooncake at {options.address}"
        self.breaker = Breaker(self._where, failures, rest, clock=clock)
        self._lock = threading.Lock()
        self._closed = False
        self._free: list[Staging] = []
        self._replicas = ReplicateConfig()
        self._replicas.replica_num = options.replicas
        self._lookups = Pool("ucm-mc-lookup", _LOOKUP_THREADS, patience=options.timeout, rest=rest, clock=clock)
        self._transfers = Pool(
            "ucm-mc-move", options.parallel, patience=options.transfer_timeout, rest=rest, clock=clock
        )
        self._transfers.submit([self._connect_early])

    def exists(self, names: Sequence[str], deadline: float) -> list[bool | StoreError]:
        """Return whether each value exists, in one round trip to the master."""
        codes = self._call(self._lookups, lambda store: store.batch_is_exist(list(names)), deadline)
        return [code > 0 if code >= 0 else failure_of(code, self._where) for code in codes]

    def read(
        self, names: Sequence[str], memory: Sequence[Sequence[Buffer]], nbytes: int, deadline: float
    ) -> list[StoreError | None]:
        """Receive values into registered memory, by one call, and copy them into place."""
        begins = range(0, nbytes * len(names), nbytes)

        def receive(store: Any) -> tuple[Staging, list[StoreError | None]]:
            staging = self._take(store, nbytes * len(names))
            targets = [staging.address + begin for begin in begins]
            codes = store.batch_get_into(list(names), targets, [nbytes] * len(names))
            staging.is_tainted = any(map(is_harmful, codes))
            return staging, [self._refusal(store, *one, nbytes) for one in zip(names, codes, strict=True)]

        staging, found = self._call(self._transfers, receive, deadline, late=lambda received: self._give(received[0]))
        for into, begin, refusal in zip(memory, begins, found, strict=True):
            if refusal is None:
                scatter(staging.memory[begin : begin + nbytes], into)
        self._give(staging)
        return found

    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return values, one after the other."""

        def receive(store: Any) -> list[Buffer | StoreError]:
            # After the deadline nobody waits any more.
            return [
                self._whole(store, name, nbytes) if self._clock.monotonic() < deadline else self._silent()
                for name in names
            ]

        return self._call(self._transfers, receive, deadline)

    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a value by one call; a value that exists already stays.

        One that somebody else has begun to write is only there once they have ended, which they may never do.
        """
        nbytes = nbytes_of(buffers)

        def send(store: Any) -> None:
            staging = self._take(store, nbytes)
            gather(buffers, staging.memory)
            until = self._clock.monotonic() + _AGAIN_FOR_SECONDS
            code, is_begun = _LATE, False
            # After the deadline nobody waits any more, and the content may have changed.
            while self._clock.monotonic() < deadline:
                (code,) = store.batch_put_from([name], [staging.address], [nbytes], self._replicas)
                is_begun = code == _EXISTS and not store.is_exist(name)
                if not (is_begun or code in _FULL) or self._clock.monotonic() > until:
                    break
                self._clock.sleep(_AGAIN_SECONDS)
            staging.is_tainted = is_harmful(code)
            self._give(staging)
            if is_begun:
                raise StoreError("another client has begun to write the value, and has not ended", where=self._where)
            if code not in {0, _EXISTS}:
                raise self._silent() if code == _LATE else failure_of(code, self._where)

        self._call(self._transfers, send, deadline)

    def remove(self, name: str, deadline: float) -> None:
        """Delete a value, whoever reads it."""
        code = self._call(self._transfers, lambda store: store.remove(name, True), deadline)
        if code < 0 and code not in _MISSING:
            raise failure_of(code, self._where)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Refuse: a client of Mooncake cannot list values."""
        del prefix
        raise StoreUnavailableError("a client of Mooncake cannot list values", where=self._where)

    def close(self) -> None:
        """End the threads, and the registration of memory that no call uses."""
        for pool in (self._lookups, self._transfers):
            pool.close()
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for staging in free:
            staging.free()

    def _call(
        self,
        pool: Pool,
        job: Callable[[Any], Answer],
        deadline: float,
        late: Callable[[Answer], object] | None = None,
    ) -> Answer:
        """Run a job with the connected client in a thread, and stop waiting for it at the deadline.

        Args:
            pool: The threads.
            job: The job; it raises only StoreError.
            deadline: Until when to wait, by the clock.
            late: Called with what the job returns after that.

        Raises:
            StoreError: The job failed or is late.
        """
        found: futures.Future[Answer] = futures.Future()

        def run() -> None:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(job(self._connected()))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the result is wanted
                    found.set_exception(error)

        def refuse() -> None:
            if found.set_running_or_notify_cancel():
                found.set_exception(self._silent())

        ended = self._clock.event()
        found.add_done_callback(lambda _: ended.set())
        pool.submit([RefusableJob(run, refuse)])
        if not ended.wait(max(0.0, deadline - self._clock.monotonic())):
            if not found.cancel() and late is not None:
                dispose = late
                found.add_done_callback(lambda done: None if done.exception() else dispose(done.result()))
            raise self._silent()
        return found.result()

    def _connect_early(self) -> None:
        """Connect before the first request, because this stops all threads for some 20 ms."""
        with suppress(StoreError):  # the first call says why
            self._connected()

    def _connected(self) -> Any:
        """Return the client of this process, connected; it connects again by itself when the master comes back."""
        if self._store is not None:
            return self._store
        options = self._options
        of = os.getpid(), options.address, options.protocol, options.devices
        with _connecting:
            if of not in _clients:
                _clients[of] = self._connect()
            return _clients[of]

    def _connect(self) -> Any:
        """Return a new client, if the master answers.

        Mooncake tries to set up a client for 30 seconds and more, and no other thread of the process runs meanwhile.
        """
        options = self._options
        host, _, port = options.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), options.timeout) as tried:
                own = tried.getsockname()[0]
                tried.sendall(_QUESTION + b"\r\n\r\n")  # so that servers of other kinds answer as well
                answer = tried.recv(len(_QUESTION))
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            raise StoreUnavailableError(f"the master cannot be reached: {error}", where=self._where) from error
        if (answer[:1], answer[4:8]) != (_QUESTION[:1], _QUESTION[4:8]):
            raise StoreUnavailableError("what listens there is no master of Mooncake", where=self._where)
        store = MooncakeDistributedStore()
        code = store.setup(own, "P2PHANDSHAKE", 0, 0, options.protocol, options.devices, options.address)
        if code:
            raise StoreUnavailableError(
                f"the client cannot be set up: code {code}",
                where=self._where,
                fix="set the environment variable MC_LOG_LEVEL=INFO: Mooncake then says why on stderr",
            )
        return store

    def _whole(self, store: Any, name: str, nbytes: int | None) -> Buffer | StoreError:
        """Return a value of at most ``nbytes``."""
        size = store.get_size(name)
        if size < 0:
            return failure_of(size, self._where, name)
        if nbytes is not None and size > nbytes:
            return too_long(size, nbytes)
        staging = self._take(store, size)
        (code,) = store.batch_get_into([name], [staging.address], [size])
        staging.is_tainted = is_harmful(code)
        content = aligned_buffer(size)
        if code == size:
            scatter(staging.memory[:size], [content])
        self._give(staging)
        return content if code == size else failure_of(min(code, _GONE), self._where, name)

    def _refusal(self, store: Any, name: str, code: int, nbytes: int) -> StoreError | None:
        """Return why a value was not received, or None."""
        if code >= 0:
            return misfit(code, nbytes)
        if code == _WRONG_SIZE:  # or anything else: the value must not be deleted for that
            size: int = store.get_size(name)
            if size >= 0 and size != nbytes:
                return misfit(size, nbytes)
        return failure_of(code, self._where, name)

    def _take(self, store: Any, nbytes: int) -> Staging:
        """Return registered memory of at least this size, for ``_give`` to take back."""
        with self._lock:
            found = self._free.pop() if self._free else None
        if found is not None and found.memory.nbytes < nbytes:
            found.free()
            found = None
        staging = found or Staging(store, -(-max(1, nbytes) // _UNIT) * _UNIT)
        _LENT.add(staging)
        return staging

    def _give(self, staging: Staging) -> None:
        """Take back memory that no transfer uses any more."""
        if staging.is_tainted:
            return
        _LENT.discard(staging)
        with self._lock:
            if keep := not self._closed and len(self._free) < self._options.parallel:
                self._free.append(staging)
        if not keep:
            staging.free()

    def _silent(self) -> StoreError:
        return StoreTimeoutError("Mooncake does not answer in time", where=self._where)


CLIENT = MooncakeClient


def is_harmful(code: int) -> bool:
    """Return whether a transfer may still be under way after a code, of which those from 0 on are lengths."""
    return code < 0 and code not in _HARMLESS


def failure_of(code: int, where: str, name: str = "") -> StoreError:
    """Return the StoreError for a code of Mooncake."""
    if code in _MISSING:
        return missing(name)
    if code in _FULL:
        return StoreFullError(
            f"Mooncake has no memory left: code {code}",
            where=where,
            fix="lend it more, or lower its eviction watermark",
        )
    return StoreUnavailableError(f"Mooncake: {_SAID.get(code, 'an operation failed')}: code {code}", where=where)
