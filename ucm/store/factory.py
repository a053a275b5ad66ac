"""Open a store from its configuration, at once or in a thread of its own."""

from __future__ import annotations

import os
import shutil
from collections import deque
from contextlib import closing, suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ucm.background import Later
from ucm.clock import SYSTEM
from ucm.errors import ConfigError, install_extra
from ucm.logger import get_logger
from ucm.store.base import (
    BlockKey,
    BlockMissingError,
    KVStore,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    Task,
    TaskResult,
    TierStats,
    TransferTask,
)
from ucm.store.config import DRAM, ENTRY_POINT_GROUP, OURS, POSIX
from ucm.store.format import MIN_KEY_BYTES, HeaderCodec
from ucm.store.guard import unexpected
from ucm.store.memory.directory import check_apart
from ucm.store.memory.dram import DramTier
from ucm.store.posix.layout import Layout, check_namespace
from ucm.store.posix.tier import PosixTier
from ucm.store.remote.tiers import MooncakeTier, RedisTier, RemoteTier, S3Tier
from ucm.store.shares import Shares
from ucm.store.tier import Tier, TierPlace, ValueTier
from ucm.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.clock import Clock
    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, BlockTransfer
    from ucm.store.config import StoreConfig
    from ucm.store.tier import TierOptions


class EmptyStore(KVStore):
    """Accepts every block and keeps none.

    All back ends take the same three arguments, of which it uses none.
    """

    def __init__(self, *_: object) -> None:
        self._stats = TierStats()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Find nothing."""
        self._stats.lookups += len(keys)
        return [False] * len(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Find nothing."""
        self._stats.lookups += min(1, len(keys))
        return 0

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Fail every block as missing."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.failed(block.key, BlockMissingError("nothing is ever in the empty store"))
        return task

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Report every block as done and drop it."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.succeeded(block.key, "empty", 0)
        self._stats.saved_blocks += len(blocks)
        return task

    def stats(self) -> Mapping[str, TierStats]:
        """Return the statistics of the one tier."""
        return {"empty": self._stats}

    def close(self) -> None:
        """Do nothing."""


#: Answers for a store that is not open.
_NOTHING = EmptyStore()


class OpeningTask(Task):
    """A transfer that begins when the store is open, or is refused.

    Args:
        opening: The store that is being opened.
        begun: Starts the transfer, or refuses it.
    """

    def __init__(self, opening: OpeningStore, begun: Later[Task]) -> None:
        self._opening, self._begun = opening, begun

    def wait(self) -> TaskResult:
        """Wait until the transfer is finished, or refused because the store takes too long to open."""
        self._opening.end_patience(self._begun)
        return self._begun.result().wait()

    def check(self) -> bool:
        """Return whether the transfer is finished or refused."""
        if self._opening.is_over:
            self._opening.end_patience(self._begun)
        return self._begun.done() and self._begun.result().check()


class OpeningStore(KVStore):
    """Opens a store in a separate thread.

    Lookups wait for it, so their callers must be in a thread that may wait. Transfers are carried out once it is open,
    in the order of the calls. Once opening has taken longer than ``patience`` or has failed, nothing is found and
    transfers are refused, at once; if opening succeeds late, the store is used normally from then on.

    Args:
        make: Opens the store.
        patience: How many seconds calls wait for the store.
        clock: The clock that ``make`` gives to the store.
    """

    def __init__(self, make: Callable[[], KVStore], patience: float, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._make = make
        self._until = clock.monotonic() + patience
        self._lock = clock.lock()
        self._made: KVStore | None = None
        self._store: KVStore | None = None  # once what waited for it has begun
        self._why: StoreError = StoreTimeoutError("the store is still being opened: its medium does not answer")
        self._waiting: deque[Later[Task]] = deque()
        self._ended = clock.event()  # it is open, or cannot be opened
        self._closed = False
        try:
            clock.thread(self._open, "ucm-open").start()
        except RuntimeError as error:  # the system allows no more threads
            self._failed(error)
            self._ended.set()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Look up blocks; find nothing in a store that cannot be opened in time."""
        return (self._opened() or _NOTHING).lookup(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Look up a prefix; find nothing in a store that cannot be opened in time."""
        return (self._opened() or _NOTHING).lookup_on_prefix(keys)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Load blocks once the store is open."""
        return self._move([block.key for block in blocks], lambda store: store.load(blocks))

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Save blocks once the store is open."""
        return self._move([block.key for block in blocks], lambda store: store.save(blocks))

    def renew(self, depths: Mapping[BlockKey, int]) -> None:
        """Renew blocks, as lookups find them."""
        (self._opened() or _NOTHING).renew(depths)

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Lease blocks, as lookups find them."""
        (self._opened() or _NOTHING).retain(depths, until, pinned=pinned)

    def flush(self, seconds: float) -> bool:
        """Wait for the store to open, and flush it."""
        until = self._clock.monotonic() + seconds
        if not self._ended.wait(seconds) or self._store is None:
            return False
        return self._store.flush(max(0.0, until - self._clock.monotonic()))

    def stats(self) -> Mapping[str, TierStats]:
        """Return the store's statistics; empty until the store is open."""
        return {} if self._store is None else self._store.stats()

    def close(self) -> None:
        """Wait for the store to open, at most ``patience``, and close it; one that opens later is closed then."""
        self._opened()
        with self._lock:  # one that opens just now is seen here, or sees that it is to be closed
            self._closed, store = True, self._store
        if store is not None:
            store.close()

    @property
    def is_over(self) -> bool:
        """Whether the store is open, cannot be opened, or takes too long."""
        return self._ended.is_set() or self._clock.monotonic() >= self._until

    def end_patience(self, task: Later[Task]) -> None:
        """Wait until a task has begun in the open store; refuse it if it has not when the patience ends."""
        self._opened()
        with self._lock:
            if task not in self._waiting:
                return
            self._waiting.remove(task)
        task.run()

    def _opened(self) -> KVStore | None:
        """Return the store, and wait for it as long as the patience lasts; None if it is not open then."""
        self._ended.wait(max(0.0, self._until - self._clock.monotonic()))
        return self._store

    def _open(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # noqa: BLE001 - the engine continues after any error
            self._failed(error)
        while True:
            with self._lock:
                if not self._waiting:  # further calls come after those that waited
                    closed, self._store = self._closed, None if self._closed else self._made
                    break
                task = self._waiting.popleft()
            task.run()  # without the lock, because a store may take its time to begin
        self._ended.set()
        if closed and self._made is not None:
            self._made.close()

    def _failed(self, error: Exception) -> None:
        """Note why the store cannot be opened."""
        self._why = StoreUnavailableError(f"the store could not be opened: {error}")
        get_logger(__name__).warning("[UCM.Store] nothing is loaded or saved here: %s", self._why.what)

    def _move(self, keys: Sequence[BlockKey], call: Callable[[KVStore], Task]) -> Task:
        task = Later(lambda: self._begun(keys, call), clock=self._clock)
        with self._lock:
            store = self._store
            if store is None:
                if self._closed:
                    raise ValueError("the store is closed")
                self._waiting.append(task)
        if store is not None:
            return call(store)
        if self.is_over:
            self.end_patience(task)
        return OpeningTask(self, task)

    def _begun(self, keys: Sequence[BlockKey], call: Callable[[KVStore], Task]) -> Task:
        """Start a transfer in the open store, or fail it if there is none."""
        why_not = self._why
        try:
            if self._made is not None:
                return call(self._made)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            why_not = unexpected(error)
        refused = TransferTask(len(keys))
        for key in keys:
            refused.failed(key, why_not)
        return refused


_CLASSES = {
    "Posix": PosixTier,
    **dict.fromkeys(("Dram", "Cache"), DramTier),
    "Redis": RedisTier,
    "Mooncake": MooncakeTier,
    "S3": S3Tier,
    "Empty": EmptyStore,
}
_WHERE = "store: pipeline"


def open_store(
    config: StoreConfig, namespace: str, geometry: BlockGeometry | None, *, clock: Clock = SYSTEM
) -> KVStore:
    """Open one namespace of a store.

    A third-party store is a class that is called with the first three arguments; a third-party tier is a ``Tier``,
    which receives the clock in its ``TierPlace``.

    Args:
        config: The store's options.
        namespace: The name shared by all engines that share blocks; of ``a-z 0-9 . _ / -``.
        geometry: The geometry of a block; None for an instance that only looks up.
        clock: What time passes by, and whose threads the store uses.

    Raises:
        ConfigError: An option is wrong, or names something that does not exist; the message says which.
    """
    check_namespace(namespace)
    names = config.parts
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError(
            f"the pipeline {config.pipeline!r} has an empty or repeated part", where=_WHERE, fix="for instance Posix"
        )
    for name in config.tiers:
        if name not in names:
            raise ConfigError(
                f"there are options for {name}, which is not part of {config.pipeline!r}",
                where=f"store: tiers: {name}",
                fix="remove them, or add the tier to the pipeline",
            )
    if "Posix" in names:
        check_apart(config.directories, None if DRAM.isdisjoint(names) else config.dram_directory)
    authenticator = authenticator_of(config)
    try:
        codec = HeaderCodec(namespace, geometry, authenticator) if geometry is not None else None
    except ValueError as error:
        raise ConfigError(str(error), where="store: geometry") from error
    back_ends = {name: back_end_class(name) for name in names}
    unchecked = [name for name, one in back_ends.items() if is_tier(one) and not one.authenticates]
    if authenticator is not None and unchecked:
        raise ConfigError(
            f"the tier {unchecked[0]} does not say that it compares the tags of authenticated blocks",
            where="store: authentication_key_file",
            fix="remove the setting or the tier, or derive the tier from ValueTier, which compares them",
        )
    whole = [name for name, back_end in back_ends.items() if not is_tier(back_end)]
    if not whole:
        places = [TierPlace(name, namespace, geometry, codec, config, authenticator, clock) for name in names]
        return TieredStore(_open_tiers([*back_ends.values()], places), codec, config, clock=clock)
    if authenticator is not None and whole != ["Empty"]:
        raise ConfigError(
            f"{whole[0]} stores blocks in its own way, and UCM cannot authenticate them",
            where="store: authentication_key_file",
            fix="remove the setting, or use tiers",
        )
    if len(names) > 1:
        raise ConfigError(f"{whole[0]} is a complete store and cannot be part of {config.pipeline!r}", where=_WHERE)
    return _whole_store(whole[0], back_ends[whole[0]], config, namespace, geometry)


def opening_store(
    config: StoreConfig, namespace: str, geometry: BlockGeometry | None, *, clock: Clock = SYSTEM
) -> OpeningStore:
    """Open a store as ``open_store`` does, but in a thread of its own; calls wait for ``config.stuck_seconds``."""
    return OpeningStore(lambda: open_store(config, namespace, geometry, clock=clock), config.stuck_seconds, clock=clock)


def open_tier(
    config: StoreConfig,
    name: str,
    namespace: str = "doctor",
    authenticator: Authenticator | None = None,
    geometry: BlockGeometry | None = None,
) -> Tier:
    """Open one tier of a pipeline, for tools.

    Args:
        config: The store's options.
        name: The tier's name in the pipeline.
        namespace: The namespace to open.
        authenticator: Checks blocks that are read; None, also where a key is configured: checksums alone.
        geometry: The geometry of a block; None for a tier that is not written to.

    Raises:
        ConfigError: The tier cannot be opened.
    """
    back_end = back_end_class(name)
    codec = None if geometry is None else HeaderCodec(namespace, geometry, authenticator)
    place = TierPlace(name, namespace, geometry, codec, config, authenticator)
    opened: Tier = back_end(tier_options(back_end, place), place)
    return opened


def authenticator_of(config: StoreConfig, *, of_tool: bool = False) -> Authenticator | None:
    """Return what authenticates a store's blocks; None if the configuration names no key.

    Args:
        config: The store's options.
        of_tool: Whether a tool asks, which may be run by root: then the key may belong to whoever owns the store's
            directories as well, as that user's engines require.

    Raises:
        ConfigError: The key cannot be used, or the package for it is not installed.
    """
    if config.authentication_key_file is None:
        return None
    try:
        module = import_module("ucm.store.authentication")
    except ImportError as error:
        raise ConfigError(
            f"authentication needs blake3, which comes with vLLM: {error}",
            where="store: authentication_key_file",
            fix=f"install it: {install_extra('authentication')}",
        ) from error
    found: Authenticator = module.read_authenticator(
        config.authentication_key_file, _owners(config) if of_tool and os.geteuid() == 0 else frozenset()
    )
    return found


def key_fingerprint(config: StoreConfig) -> str:
    """Return the fingerprint of a store's authentication key in hexadecimal digits; empty if it has none.

    Raises:
        ConfigError: As for ``authenticator_of``.
    """
    found = authenticator_of(config)
    return "" if found is None else found.fingerprint.hex()


def _owners(config: StoreConfig) -> frozenset[int]:
    owners = set()
    for directory in (*config.directories, config.dram_directory):
        with suppress(OSError):
            owners.add(Path(directory).stat().st_uid)
    return frozenset(owners)


def remove_blocks(config: StoreConfig, namespace: str, keys: Sequence[BlockKey]) -> None:
    """Delete a namespace of test blocks from the directories, and its blocks from every other tier that can delete."""
    for root in config.roots:
        shutil.rmtree(Layout(root, namespace).base, ignore_errors=True)
    for name in config.parts:
        if name not in POSIX | DRAM and is_tier(back_end_class(name)):
            with suppress(StoreError), closing(open_tier(config, name, namespace)) as tier:
                tier.drop(keys)


def ask_tier(config: StoreConfig, name: str) -> str:
    """Connect to a tier, and look up and read a block that does not exist; nothing is written.

    Args:
        config: The store's options.
        name: The tier's name in the pipeline.

    Returns:
        A description of the answer.

    Raises:
        ConfigError: The tier cannot be opened.
        StoreError: The tier does not answer.
    """
    if not is_tier(back_end_class(name)):
        return "a whole store, which an engine opens"
    tier = open_tier(config, name)
    try:
        began = tier.clock.monotonic()
        nothing = BlockKey(bytes(MIN_KEY_BYTES))
        if isinstance(tier, ValueTier):  # first, because a server may answer a lookup without saying why it fails
            with suppress(BlockMissingError):
                tier.fetch(nothing, began + tier.timeout)
                raise StoreUnavailableError(f"{name} returns a value that nobody stored: another server answers there")
        tier.contains([nothing], tier.clock.monotonic() + tier.timeout)
        seconds = tier.clock.monotonic() - began
        failures = tier.stats().failures
        if failures:
            raise StoreUnavailableError(f"{name} does not answer correctly: {', '.join(failures)}; the log has more")
        return f"answers, in {seconds * 1e3:.1f} ms with the time to connect"
    finally:
        tier.close()


def is_tier(back_end: Any) -> bool:
    """Return whether a back end is a tier, which can be one of several parts of a pipeline."""
    return isinstance(back_end, type) and issubclass(back_end, Tier)


def is_on_servers(name: str) -> bool:
    """Return whether a part of a pipeline is a tier of ours on servers."""
    return issubclass(_CLASSES.get(name, PosixTier), RemoteTier)


def tier_options(back_end: type[Tier], place: TierPlace) -> TierOptions:
    """Return a tier's options, validated.

    Raises:
        ConfigError: An option is wrong. Its value is not shown: it may be a misplaced secret.
    """
    name = place.name
    try:
        return back_end.Options.model_validate(dict(place.config.tiers.get(name, {})))
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)[0]
        option = ".".join(map(str, found["loc"]))
        known = ", ".join(back_end.Options.model_fields) or "none"
        raise ConfigError(
            found["msg"], where=f"store: tiers: {name}: {option}", fix=f"the options of {name} are: {known}"
        ) from None


def _open_tiers(back_ends: Sequence[Any], places: Sequence[TierPlace]) -> list[Tier]:
    """Open every tier of a pipeline; close all of them again if one fails."""
    tiers: list[Tier] = []
    # Check all options before opening the first tier, whose medium may not answer.
    options = [tier_options(back_end, place) for back_end, place in zip(back_ends, places, strict=True)]
    try:
        for back_end, of, place in zip(back_ends, options, places, strict=True):
            tiers.append(back_end(of, place))
            tiers[-1].counters.shares = Shares.of(place.config)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def _whole_store(
    name: str, back_end: Any, config: StoreConfig, namespace: str, geometry: BlockGeometry | None
) -> KVStore:
    made = back_end(config, namespace, geometry)
    if not isinstance(made, KVStore):
        raise ConfigError(f"{name} is neither a KVStore nor a Tier", where=_WHERE)
    return made


def back_end_class(name: str) -> Any:
    """Import and return the class of one part of a pipeline.

    Raises:
        ConfigError: The class does not exist or cannot be imported.
    """
    if name in _CLASSES:
        return _CLASSES[name]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    point = EntryPoint(name, name, ENTRY_POINT_GROUP) if ":" in name else installed.get(name)
    if point is None:
        raise ConfigError(
            f"there is no back end {name!r}",
            where=_WHERE,
            fix=f"use one of {', '.join([*OURS, *sorted(installed)])}, or package.module:Class",
        )
    try:
        return point.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the back end {name} cannot be loaded: {error}",
            where=_WHERE,
            fix="check that the package is installed in this environment",
        ) from error
