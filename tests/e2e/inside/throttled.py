"""A tier of values for which callers wait as long as a medium of a given speed would take, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ucm.clock import SYSTEM
from ucm.store.base import BlockMissingError, StoreError
from ucm.store.format import scatter
from ucm.store.remote.tiers import Client, RedisOptions, RedisTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.base import Buffer
    from ucm.store.tier import TierOptions, TierPlace


class ThrottledClient(Client):
    """Keeps values in memory and returns them at the speed of a medium.

    Args:
        speed: Returns its bytes per second.
    """

    def __init__(self, speed: Callable[[], float]) -> None:
        self.speed = speed
        self._values: dict[str, bytes] = {}
        self._lock = SYSTEM.lock()
        self._free = 0.0  # when the medium has sent what was asked for before

    def exists(self, names: Sequence[str], deadline: float) -> list[bool | StoreError]:
        """Return whether there are values."""
        del deadline
        return [name in self._values for name in names]

    def read(
        self, names: Sequence[str], memory: Sequence[Sequence[Buffer]], nbytes: int, deadline: float
    ) -> list[StoreError | None]:
        """Copy whole values into place, when the medium has sent them."""
        del nbytes, deadline
        for name, into in zip(names, memory, strict=True):
            scatter(self._sent(name), into)
        return [None] * len(names)

    def fetch(self, names: Sequence[str], nbytes: int | None, deadline: float) -> list[Buffer | StoreError]:
        """Return values, when the medium has sent them."""
        del nbytes, deadline
        return [self._sent(name) if name in self._values else BlockMissingError("no value") for name in names]

    def put(self, name: str, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Keep a value."""
        del deadline
        self._values[name] = b"".join(buffers)

    def remove(self, name: str, deadline: float) -> None:
        """Drop a value."""
        del deadline
        self._values.pop(name, None)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and lengths."""
        return ((name, len(value)) for name, value in self._values.items() if name.startswith(prefix))

    def close(self) -> None:
        """Do nothing."""

    def _sent(self, name: str) -> Buffer:
        value = self._values[name]
        with self._lock:
            self._free = max(self._free, SYSTEM.monotonic()) + len(value) / self.speed()
            until = self._free
        SYSTEM.sleep(max(0.0, until - SYSTEM.monotonic()))
        return memoryview(value)


class ThrottledOptions(RedisOptions):
    """The options of the tier: ``speed`` is a file with the medium's bytes per second, which may change."""

    speed: str


class ThrottledTier(RedisTier):
    """The tier for an engine of one process, all of whose stores share the values."""

    Options: ClassVar[type[TierOptions]] = ThrottledOptions
    _client_of_process: ClassVar[ThrottledClient | None] = None

    def __init__(self, options: ThrottledOptions, place: TierPlace) -> None:
        cls = ThrottledTier
        cls._client_of_process = cls._client_of_process or ThrottledClient(
            lambda: float(Path(options.speed).read_text(encoding="ascii"))
        )
        super().__init__(options, place, cls._client_of_process)
