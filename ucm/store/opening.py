"""A store that a thread opens, so that whoever uses it waits for no directory and no server that does not answer."""

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

#: How often a thread that waits for a task looks whether the opening has become hopeless.
_LOOK_SECONDS = 1.0


class OpeningTask(Task):
    """A transfer that begins when the store is open, or is refused.

    Args:
        keys: What it moves.
    """

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys
        self._settled = threading.Event()
        self.begun: tuple[KVStore, Task] | None = None  #: the store's own task, once it has one
        self.result = TaskResult({}, {}, 0, 0.0)  #: of one that was refused

    def begin(self, store: KVStore, call: Callable[[KVStore], Task]) -> None:
        """Have the open store do it."""
        try:
            self.begun = store, call(store)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting caller must hear of it
            self.refuse(unexpected(error))
        self._settled.set()

    def refuse(self, error: StoreError) -> None:
        """It will not be done."""
        self.result = TaskResult({}, dict.fromkeys(self._keys, error), 0, 0.0)
        self._settled.set()

    def settled_within(self, seconds: float) -> bool:
        """Wait so long at most until it is begun or refused; whether it is."""
        return self._settled.wait(seconds)


class OpeningStore(KVStore):
    """Opens a store in a thread of its own. Until it is open nothing is found in it.

    What is to be moved waits for it, in the order of the calls. Once the opening has taken longer than the patience, or
    has failed, it is refused instead, at once; after an opening that ends late all goes on as if it had been in time.

    Args:
        make: Opens the store.
        patience: For how many seconds transfers wait for it.
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
        """Nothing, until the store is open."""
        return [False] * len(keys) if self._store is None else self._store.lookup(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Nothing, until the store is open."""
        return 0 if self._store is None else self._store.lookup_on_prefix(keys)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Of no use until the store is open."""
        if self._store is not None:
            self._store.prefetch(keys)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Waits for the store, as long as that may take."""
        return self._move([block.key for block in blocks], lambda store: store.load(blocks))

    def dump(self, blocks: Sequence[BlockTransfer]) -> Task:
        """As ``load``."""
        return self._move([block.key for block in blocks], lambda store: store.dump(blocks))

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """As ``load``."""
        return self._move(keys, lambda store: store.commit(keys))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """After the dumps called before."""
        store = self._ready()
        if store is not None:
            store.discard(keys)
        else:
            self._later(lambda store: store.discard(keys), lambda _: None)

    def stand_back(self, *, active: bool) -> None:
        """An opening does not stand back: it is one thread that mostly waits."""
        if self._store is not None:
            self._store.stand_back(active=active)

    def wait(self, task: Task) -> TaskResult:
        """Not longer for the opening than the patience."""
        if not isinstance(task, OpeningTask):
            return self._opened().wait(task)
        while not task.settled_within(_LOOK_SECONDS):
            self._pool.relieve()
        return task.result if task.begun is None else task.begun[0].wait(task.begun[1])

    def check(self, task: Task) -> bool:
        """Whether a task is finished, or refused."""
        if not isinstance(task, OpeningTask):
            return self._opened().check(task)
        self._pool.relieve()
        if not task.settled_within(0):
            return False
        return task.begun is None or task.begun[0].check(task.begun[1])

    def flush(self, seconds: float) -> bool:
        """Waits for the opening as well."""
        until, store = time.monotonic() + seconds, self._ready()
        if store is None:
            settled = threading.Event()
            self._later(lambda _: settled.set(), lambda _: settled.set())
            if not settled.wait(seconds) or self._store is None:
                return False
        return self._opened().flush(max(0.0, until - time.monotonic()))

    def stats(self) -> Mapping[str, TierStats]:
        """Of no tier, until the store is open."""
        return {} if self._store is None else self._store.stats()

    def close(self) -> None:
        """Waits for the opening, within the patience; one that ends later closes what it has opened."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
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
        """The store; None where something waits for it yet, and so must what comes now."""
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
    """Open a store for a moment, to hear at once of what is wrong with its options or its directories.

    Args:
        make: Opens it.
        seconds: How long that may take.

    Returns:
        Whether it did not take longer; else a thread goes on with it.

    Raises:
        ConfigError: It cannot be opened.
    """
    trial = call_later(lambda: make().close(), "ucm-open")
    wait([trial], seconds)
    if not trial.done():
        return False
    trial.result()
    return True
