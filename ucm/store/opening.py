"""Open a store in a thread, so that its users do not wait for a directory or a server that does not answer."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

from ucm.background import call_later
from ucm.logger import get_logger
from ucm.store.base import KVStore, Task, TaskResult
from ucm.store.errors import StoreTimeoutError, StoreUnavailableError
from ucm.store.guard import unexpected
from ucm.store.pool import Pool, RefusableJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, TierStats
    from ucm.store.errors import StoreError

#: How often, in seconds, a thread that waits for a task checks whether opening has taken too long.
_LOOK_SECONDS = 1.0


class OpeningTask(Task):
    """A transfer that begins when the store is open, or is refused.

    Args:
        keys: The blocks to transfer.
    """

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys
        self._ended = threading.Event()
        self.begun: tuple[KVStore, Task] | None = None  #: the store's own task, once it has one
        self.result = TaskResult({}, {}, 0, 0.0)  #: the result of a refused task

    def begin(self, store: KVStore, call: Callable[[KVStore], Task]) -> None:
        """Start the transfer in the open store."""
        try:
            self.begun = store, call(store)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            self.refuse(unexpected(error))
        self._ended.set()

    def refuse(self, error: StoreError) -> None:
        """Fail the transfer."""
        self.result = TaskResult({}, dict.fromkeys(self._keys, error), 0, 0.0)
        self._ended.set()

    def ended_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the transfer has begun or is refused, and return whether it has."""
        return self._ended.wait(seconds)


class OpeningStore(KVStore):
    """Opens a store in a separate thread; until then it finds nothing.

    Transfers wait for the store, in the order of the calls. Once opening has taken longer than ``patience`` or has
    failed, they are refused immediately; if opening succeeds late, the store is used normally from then on.

    Args:
        make: Opens the store.
        patience: How many seconds transfers wait for the store.
    """

    def __init__(self, make: Callable[[], KVStore], patience: float) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._store: KVStore | None = None
        self._why: StoreError = StoreTimeoutError("the store is still being opened: its medium does not answer")
        self._waiting = 0
        self._closed = False
        self._pool = Pool("ucm-open", 1, patience=patience, rest=math.inf)
        self._pool.submit([self._open])

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Look up blocks; find nothing until the store is open."""
        return [False] * len(keys) if self._store is None else self._store.lookup(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Look up a prefix; find nothing until the store is open."""
        return 0 if self._store is None else self._store.lookup_on_prefix(keys)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Prefetch blocks; do nothing until the store is open."""
        if self._store is not None:
            self._store.prefetch(keys)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Load blocks once the store is open."""
        return self._move([block.key for block in blocks], lambda store: store.load(blocks))

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Save blocks once the store is open."""
        return self._move([block.key for block in blocks], lambda store: store.save(blocks))

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Commit blocks once the store is open."""
        return self._move(keys, lambda store: store.commit(keys))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Discard blocks, after all earlier saves."""
        store = self._ready()
        if store is not None:
            store.discard(keys)
        else:
            self._later(lambda store: store.discard(keys), lambda _: None)

    def throttle(self, *, active: bool) -> None:
        """Pass the hint to an open store; the opening thread ignores it, because it mostly waits."""
        if self._store is not None:
            self._store.throttle(active=active)

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task, and at most ``patience`` for the store to open."""
        if not isinstance(task, OpeningTask):
            return self._opened().wait(task)
        while not task.ended_within(_LOOK_SECONDS):
            self._pool.relieve()
        return task.result if task.begun is None else task.begun[0].wait(task.begun[1])

    def check(self, task: Task) -> bool:
        """Return whether a task is finished or refused."""
        if not isinstance(task, OpeningTask):
            return self._opened().check(task)
        self._pool.relieve()
        if not task.ended_within(0):
            return False
        return task.begun is None or task.begun[0].check(task.begun[1])

    def flush(self, seconds: float) -> bool:
        """Wait for the store to open, and flush it."""
        until, store = time.monotonic() + seconds, self._ready()
        if store is None:
            opened = threading.Event()
            self._later(lambda _: opened.set(), lambda _: opened.set())
            if not opened.wait(seconds) or self._store is None:
                return False
        return self._opened().flush(max(0.0, until - time.monotonic()))

    def stats(self) -> Mapping[str, TierStats]:
        """Return the store's statistics; empty until the store is open."""
        return {} if self._store is None else self._store.stats()

    def close(self) -> None:
        """Wait for the store to open, at most ``patience``, and close it; one that opens later is closed then."""
        self._pool.close()
        with self._lock:
            self._closed, store = True, self._store
        if store is not None:
            store.close()

    def _opened(self) -> KVStore:
        if self._store is None:
            raise StoreUnavailableError("the store is not open yet")
        return self._store

    def _open(self) -> None:
        try:
            store = self._make()
        except Exception as error:  # noqa: BLE001 - the engine continues after any error
            self._why = StoreUnavailableError(f"the store could not be opened: {error}")
            get_logger(__name__).warning("[UCM.Store] nothing is loaded or saved here: %s", self._why.what)
            return
        with self._lock:
            self._store = None if self._closed else store
        if self._store is None:
            store.close()

    def _move(self, keys: Sequence[BlockKey], call: Callable[[KVStore], Task]) -> Task:
        store = self._ready()
        if store is not None:
            return call(store)
        task = OpeningTask(keys)
        self._later(partial(task.begin, call=call), task.refuse)
        return task

    def _ready(self) -> KVStore | None:
        """Return the store; None if earlier calls still wait for it, so that this one must wait as well."""
        with self._lock:
            store = None if self._waiting else self._store
            self._waiting += store is None
            return store

    def _later(self, run: Callable[[KVStore], None], refuse: Callable[[StoreError], None]) -> None:
        def end(*, refused: bool = False) -> None:
            if self._store is None or refused:
                refuse(self._why)
            else:
                run(self._store)
            with self._lock:
                self._waiting -= 1

        self._pool.submit([RefusableJob(end, partial(end, refused=True))])


def opens_within(make: Callable[[], KVStore], seconds: float) -> bool:
    """Open and close a store, to detect wrong options or directories early.

    Args:
        make: Opens the store.
        seconds: How long to wait.

    Returns:
        Whether that ended in time; otherwise a thread continues with it.

    Raises:
        ConfigError: The store cannot be opened.
    """
    trial = call_later(lambda: make().close(), "ucm-open")
    wait([trial], seconds)
    if not trial.done():
        return False
    trial.result()
    return True
