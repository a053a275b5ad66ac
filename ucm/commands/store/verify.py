"""``ucm store verify``: read every block and compare every checksum."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.commands.options import many, say, say_json
from ucm.commands.store.places import Directory, Places, find_places, opened_server
from ucm.commands.store.text import NO_STORE, about_unmarked, blocks_and_bytes, progress
from ucm.config.settings import format_size
from ucm.errors import ConfigError
from ucm.store.base import (
    BlockCompressedError,
    BlockCorruptError,
    BlockForeignError,
    BlockMissingError,
    BlockUnreadableError,
    StoreError,
    StoreUnavailableError,
)
from ucm.store.factory import authenticator_of
from ucm.store.inspection import check_block, quarantine_block, stored_blocks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockKey
    from ucm.store.remote.tiers import RemoteTier, StoredValue


@dataclass(frozen=True, slots=True)
class Item:
    """A block to read, in a directory or on a server.

    Args:
        place: The directory, or the tier's name in the pipeline.
        tier: ``posix``, ``dram``, ``redis``, ``mooncake`` or ``s3``.
        namespace: Its namespace, or the digest of one that no directory names.
        key: Its key.
        path: Its file, or its name on the server.
        nbytes: The length of its file or value.
        check: Reads it and returns what is wrong with it, or None; its argument is called if the block is authentic.
        quarantine: Takes it out of the way, and returns whether it could.
    """

    place: str
    tier: str
    namespace: str
    key: BlockKey
    path: str
    nbytes: int
    check: Callable[[Callable[[], object]], StoreError | None]
    quarantine: Callable[[StoreError], bool]


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged or unreadable block."""

    block: Item
    error: StoreError
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Lacks:
    """The parts of a store that cannot be verified.

    Args:
        broken: Directories and tiers on servers that cannot be read.
        bare: Directories on disk without any part of a store; directories in memory are empty after a boot.
        unmarked: The paths of namespaces without a marker, which are not read.
    """

    broken: list[Directory]
    bare: list[Directory]
    unmarked: list[str]

    @classmethod
    def of(cls, places: Places, silent: list[Directory]) -> Lacks:
        """Return the parts of some directories that cannot be verified, and ``silent``, tiers on servers."""
        return cls([*places.broken, *silent], [one for one in places.bare() if one.tier != "dram"], places.unmarked())

    @property
    def is_bad(self) -> bool:
        """Whether any part cannot be verified."""
        return bool(self.broken or self.bare or self.unmarked)

    def text(self) -> list[str]:
        """Return messages for the user."""
        return [
            *(one.complaint for one in self.broken),
            *(f"{one.path} ({one.tier}): {NO_STORE}" for one in self.bare),
            *(line for path in self.unmarked for line in about_unmarked(path)),
        ]

    def data(self) -> dict[str, Any]:
        """Return the parts as plain data."""
        return {
            "unreadable": [{"directory": one.path, "tier": one.tier, "reason": one.problem} for one in self.broken],
            "bare": [one.path for one in self.bare],
            "unmarked": self.unmarked,
        }


@dataclass
class Verdict:
    """The result of a verification."""

    blocks: int = 0
    nbytes: int = 0
    vanished: int = 0  #: blocks that an engine deleted between listing and reading
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    silent: list[Directory] = field(default_factory=list)  #: tiers on servers that cannot be listed
    authentic: int | None = None  #: blocks whose tags are right; None if no key was used
    keyless: str = ""  #: why the configured key cannot be used, so that no tags were compared

    @property
    def by_cause(self) -> dict[str, int]:
        """Return the number of problems by cause."""
        causes = [problem.error.cause for problem in self.problems]
        return {cause: causes.count(cause) for cause in sorted(set(causes))}


def run(options: argparse.Namespace) -> int:
    """Verify, and print the result; return 1 if there are problems, or a part could not be verified.

    Raises:
        UcmError: The options match nothing.
    """
    places = find_places(options, servers=True)
    verdict = verify(places, options.threads, options.quarantine)
    lacks = Lacks.of(places, verdict.silent)
    if options.json:
        say_json({**_data(verdict), **lacks.data()})
    else:
        say(_text(verdict, lacks))
    return int(bool(verdict.problems or verdict.keyless) or lacks.is_bad)


def verify(places: Places, threads: int, quarantine: bool) -> Verdict:
    """Read every block."""
    authenticator, keyless = None, ""
    try:
        authenticator = authenticator_of(places.config, of_tool=True)
    except ConfigError as error:
        keyless = str(error)
    verdict = Verdict(authentic=None if authenticator is None else 0, keyless=keyless)
    with ExitStack() as stack:
        servers = {}
        for name in places.servers:
            try:
                servers[name] = stack.enter_context(opened_server(places.config, name, authenticator))
                next(servers[name].stored(), None)
            except (ConfigError, StoreError) as error:
                servers.pop(name, None)
                verdict.silent.append(Directory(name.lower(), name, str(error).splitlines()[0]))
        with progress("listing", None, "blocks") as bar:
            total = sum(item.nbytes for item in _items(places, servers, authenticator) if bar.update() or True)
        began = time.perf_counter()
        with progress("reading", total, "B") as bar, ThreadPoolExecutor(threads) as pool:
            reader = _Reader(verdict, _items(places, servers, authenticator), bar, quarantine=quarantine)
            try:
                for done in [pool.submit(reader.read) for _ in range(threads)]:
                    done.result()
            finally:
                reader.stopped = True
    verdict.seconds = time.perf_counter() - began
    return verdict


def _items(places: Places, servers: Mapping[str, RemoteTier], authenticator: Authenticator | None) -> Iterator[Item]:
    """List the blocks, which are as many as the medium has at that moment."""
    keep = places.config.quarantine_keep
    for directory, layout in places.chosen():
        for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory):
            yield Item(
                *(directory.path, directory.tier, layout.namespace, block.key, block.path, block.nbytes),
                partial(check_block, block, authenticator),
                partial(quarantine_block, block, keep=keep),
            )
    meant, known = places.digests(), places.names()
    for name, tier in servers.items():
        for value in tier.stored():
            if meant is None or value.digest in meant:
                namespace = known.get(value.digest, value.digest)
                yield Item(
                    *(name, tier.name, namespace, value.key, tier.path(value), value.nbytes),
                    partial(tier.check, value),
                    partial(_discard, tier, value),
                )


def _discard(tier: RemoteTier, value: StoredValue, error: StoreError) -> bool:
    """Delete a damaged value, as an engine that reads it does; servers have no place for quarantine."""
    del error
    try:
        tier.discard(value)
    except StoreError:
        return False
    return True


class _Reader:
    """The state that the threads of a run share."""

    def __init__(self, verdict: Verdict, items: Iterator[Item], bar: Any, *, quarantine: bool) -> None:
        self.stopped = False
        self._verdict = verdict
        self._items = items
        self._bar = bar
        self._quarantine = quarantine
        self._lock = threading.Lock()

    def read(self) -> None:
        """Read blocks until there are no more."""
        while not self.stopped:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            error = item.check(self._authentic)
            if isinstance(error, StoreUnavailableError | BlockCompressedError):
                raise error
            bad = isinstance(error, BlockCorruptError | BlockForeignError | BlockUnreadableError)
            quarantined = bad and self._quarantine and error is not None and item.quarantine(error)
            with self._lock:
                self._note(item, error, quarantined)

    def _authentic(self) -> None:
        with self._lock:
            self._verdict.authentic = (self._verdict.authentic or 0) + 1

    def _note(self, item: Item, error: StoreError | None, quarantined: bool) -> None:
        self._bar.update(item.nbytes)
        if isinstance(error, BlockMissingError):
            self._verdict.vanished += 1
            return
        self._verdict.blocks += 1
        self._verdict.nbytes += item.nbytes
        if error is not None:
            self._verdict.problems.append(Problem(item, error, quarantined))


def _text(verdict: Verdict, lacks: Lacks) -> list[str]:
    lines = lacks.text()
    if verdict.keyless:
        lines += ["No tags are compared, because the key cannot be used; only accidental changes are found:"]
        lines += [f"  {line}" for line in verdict.keyless.splitlines()]
    for problem in verdict.problems:
        done = "; quarantined" if problem.quarantined else ""
        lines += [f"{problem.error.cause}: {problem.error.what}{done}", f"  {problem.block.path}"]
    rate = format_size(verdict.nbytes / verdict.seconds) if verdict.seconds else "0 B"
    gone = f"; {many(verdict.vanished, 'was', 'were')} deleted meanwhile" if verdict.vanished else ""
    lines.append(f"{blocks_and_bytes(verdict.blocks, verdict.nbytes)} read in {verdict.seconds:.1f} s, {rate}/s{gone}")
    others = 0 if verdict.authentic is None else verdict.blocks - len(verdict.problems) - verdict.authentic
    if others:
        whose = f"{many(others, 'block is', 'blocks are')} of another authentication key, or of none"
        lines.append(f"{whose}: only accidental changes would be found there.")
    bad = ", ".join(f"{count:,} {cause}" for cause, count in verdict.by_cause.items())
    if bad:
        return [*lines, f"Not as they should be: {bad}."]
    if not verdict.blocks:
        return [*lines, "Nothing was verified: there are no blocks."]
    if verdict.keyless:
        return [*lines, "No block that was read was changed by accident; whether they are authentic is not known."]
    if lacks.is_bad:
        return [*lines, "Every block that was read is as it was written; not all could be, see above."]
    return [*lines, "Every block is as it was written."]


def _data(verdict: Verdict) -> dict[str, Any]:
    return {
        "blocks": verdict.blocks,
        "bytes": verdict.nbytes,
        "seconds": verdict.seconds,
        "bytes_per_second": verdict.nbytes / verdict.seconds if verdict.seconds else 0.0,
        "vanished": verdict.vanished,
        "authentic": verdict.authentic,
        "keyless": verdict.keyless or None,
        "damaged": verdict.by_cause,
        "problems": [
            {
                "directory": problem.block.place,
                "tier": problem.block.tier,
                "namespace": problem.block.namespace,
                "key": problem.block.key.hex(),
                "path": problem.block.path,
                "cause": problem.error.cause,
                "reason": problem.error.what,
                "quarantined": problem.quarantined,
            }
            for problem in verdict.problems
        ],
    }
