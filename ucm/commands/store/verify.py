"""``ucm store verify``: read every block and compare every checksum."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ucm.commands.options import answer, many
from ucm.commands.store.places import Directory, Places, about, find_places, opened_server
from ucm.commands.store.text import NO_STORE, about_unmarked, blocks_and_bytes, progress
from ucm.config.settings import format_size
from ucm.errors import ConfigError, UcmError
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
from ucm.store.inspection import check_block, quarantine_block

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from ucm.store.authentication import Authenticator
    from ucm.store.remote.tiers import RemoteTier, StoredValue


class Item(NamedTuple):
    """A block to read, in a directory or on a server."""

    about: dict[str, str]  #: what ``--json`` prints of it
    nbytes: int  #: the length of its file or value
    check: Callable[[Callable[[], object]], StoreError | None]  #: reads it; its argument is called if it is authentic
    quarantine: Callable[[StoreError], bool]  #: takes it out of the way, and returns whether it could


def run(options: argparse.Namespace) -> int:
    """Verify, and print the result; return 1 if there are problems, or a part could not be verified.

    Raises:
        UcmError: The options match nothing.
    """
    places = find_places(options, servers=True)
    if not places.directories and not places.listed:
        raise UcmError(
            f"what is in {', '.join(places.servers)} cannot be listed, so there is nothing to verify",
            where="store: pipeline",
            fix="trust the engines, which check every block that they load",
        )
    data, broken = verify(places, options.threads, options.quarantine)
    lacks = bool(broken or data["bare"] or data["unmarked"])
    answer(options, data, _text(data, broken, lacks=lacks))
    return int(bool(data["problems"] or data["keyless"]) or lacks)


def verify(places: Places, threads: int, quarantine: bool) -> tuple[dict[str, Any], list[Directory]]:
    """Read every block; return what ``--json`` prints, and the directories and tiers on servers that cannot be read."""
    try:
        authenticator, keyless = authenticator_of(places.config, of_tool=True), None
    except ConfigError as error:
        authenticator, keyless = None, str(error)
    broken = places.broken

    def opened(stack: ExitStack, name: str) -> RemoteTier | None:
        try:
            tier = stack.enter_context(opened_server(places.config, name, authenticator))
            next(tier.stored(), None)
        except (ConfigError, StoreError) as error:
            broken.append(Directory(name.lower(), name, str(error).splitlines()[0]))
            return None
        return tier

    with ExitStack() as stack:
        servers = {name: tier for name in places.listed if (tier := opened(stack, name))}
        began = time.perf_counter()
        with progress("reading", None, "B") as bar:
            done, problems = _read(_items(places, servers, authenticator), threads, bar, quarantine=quarantine)
    seconds, causes = time.perf_counter() - began, [problem["cause"] for problem in problems]
    data = {
        **done,
        "authentic": None if authenticator is None else done["authentic"],
        "seconds": seconds,
        "bytes_per_second": done["bytes"] / seconds,
        "keyless": keyless,
        "damaged": {cause: causes.count(cause) for cause in sorted(set(causes))},
        "problems": problems,
        "unreadable": [{"directory": one.path, "tier": one.tier, "reason": one.problem} for one in broken],
        "bare": [one.path for one in places.bare() if one.tier != "dram"],  # memory is empty after a boot
        "unmarked": places.unmarked(),
    }
    return data, broken


def _read(
    items: Iterator[Item], threads: int, bar: Any, *, quarantine: bool
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Read blocks in threads; return how many there were, and what is wrong with some."""
    done = dict.fromkeys(("blocks", "bytes", "vanished", "authentic"), 0)
    problems: list[dict[str, Any]] = []
    lock = threading.Lock()

    def authentic() -> None:
        with lock:
            done["authentic"] += 1

    def read() -> None:
        while True:
            with lock:
                item = next(items, None)
            if item is None:
                return
            error = item.check(authentic)
            if isinstance(error, StoreUnavailableError | BlockCompressedError):
                raise error
            bad = isinstance(error, BlockCorruptError | BlockForeignError | BlockUnreadableError)
            quarantined = bad and quarantine and error is not None and item.quarantine(error)
            with lock:
                bar.update(item.nbytes)
                if isinstance(error, BlockMissingError):  # an engine deleted it between listing and reading
                    done["vanished"] += 1
                    continue
                done["blocks"] += 1
                done["bytes"] += item.nbytes
                if error is not None:
                    found = {"cause": error.cause, "reason": error.what, "quarantined": quarantined}
                    problems.append({**item.about, **found})

    with ThreadPoolExecutor(threads) as pool:
        try:
            for one in [pool.submit(read) for _ in range(threads)]:
                one.result()
        finally:
            items = iter(())
    return done, problems


def _items(places: Places, servers: Mapping[str, RemoteTier], authenticator: Authenticator | None) -> Iterator[Item]:
    for directory, block in places.blocks():
        quarantine = partial(quarantine_block, block, keep=places.config.quarantine_keep)
        yield Item(about(directory, block), block.nbytes, partial(check_block, block, authenticator), quarantine)
    meant, known = places.digests(), places.names()
    for name, tier in servers.items():
        for value in tier.stored():
            if meant is None or value.digest in meant:
                of = {
                    "namespace": known.get(value.digest, value.digest),
                    "key": value.key.hex(),
                    "path": tier.path(value),
                }
                check, discard = partial(tier.check, value), partial(_discard, tier, value)
                yield Item({"directory": name, "tier": tier.name, **of}, value.nbytes, check, discard)


def _discard(tier: RemoteTier, value: StoredValue, error: StoreError) -> bool:
    """Delete a damaged value, as an engine that reads it does; servers have no place for quarantine."""
    del error
    try:
        tier.discard(value)
    except StoreError:
        return False
    return True


def _text(data: dict[str, Any], broken: list[Directory], *, lacks: bool) -> list[str]:
    lines = [one.complaint for one in broken]
    lines += [f"{path} (posix): {NO_STORE}" for path in data["bare"]]
    lines += [line for path in data["unmarked"] for line in about_unmarked(path)]
    if data["keyless"]:
        lines += ["No tags are compared, because the key cannot be used; only accidental changes are found:"]
        lines += [f"  {line}" for line in data["keyless"].splitlines()]
    for problem in data["problems"]:
        done = "; quarantined" if problem["quarantined"] else ""
        lines += [f"{problem['cause']}: {problem['reason']}{done}", f"  {problem['path']}"]
    rate, gone = format_size(data["bytes_per_second"]), data["vanished"]
    meanwhile = f"; {many(gone, 'was', 'were')} deleted meanwhile" if gone else ""
    read = blocks_and_bytes(data["blocks"], data["bytes"])
    lines.append(f"{read} read in {data['seconds']:.1f} s, {rate}/s{meanwhile}")
    others = 0 if data["authentic"] is None else data["blocks"] - len(data["problems"]) - data["authentic"]
    if others:
        whose = f"{many(others, 'block is', 'blocks are')} of another authentication key, or of none"
        lines.append(f"{whose}: only accidental changes would be found there.")
    bad = ", ".join(f"{count:,} {cause}" for cause, count in data["damaged"].items())
    if bad:
        return [*lines, f"Not as they should be: {bad}."]
    if not data["blocks"]:
        return [*lines, "Nothing was verified: there are no blocks."]
    if data["keyless"]:
        return [*lines, "No block that was read was changed by accident; whether they are authentic is not known."]
    if lacks:
        return [*lines, "Every block that was read is as it was written; not all could be, see above."]
    return [*lines, "Every block is as it was written."]
