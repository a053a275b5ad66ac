"""The deletions of ``ucm store gc``: first planned, so that they can be shown and confirmed, then carried out.

A block is deleted only if it has not been used since it was chosen, and is not promised to any request.
"""

from __future__ import annotations

import stat
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.inspection import damaged_files, former_blocks, left_behind, side_files, stored_blocks
from ucm.store.memory.segment import delete_slot, directory_of, remove_empty
from ucm.store.posix.index import log_removals, removals_path
from ucm.store.posix.layout import IDENTITY, MARKER, buckets
from ucm.store.posix.paths import remove_directory, status_of, unlink

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.base import BlockKey
    from ucm.store.inspection import StoredBlock
    from ucm.store.posix.layout import Layout
    from ucm.store_command.places import Directory, Places

_LOGGED_AT_ONCE = 1_000
LEFT_BEHIND, DAMAGED, BLOCK = "left behind", "damaged", "block"


@dataclass(slots=True)
class Tally:
    """A number of files and their size."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one more."""
        self.count += 1
        self.nbytes += nbytes


@dataclass
class Plan:
    """The deletions that ``gc`` plans.

    Args:
        chosen: The namespaces, each in its directory.
        until: Blocks last used before this time are deleted, in seconds since the epoch.
        drop: Whether the namespaces are deleted completely.
    """

    chosen: Sequence[tuple[Directory, Layout]]
    until: float
    drop: bool
    tallies: dict[tuple[Directory, str, str], Tally] = field(default_factory=dict)

    def tally(self, directory: Directory, layout: Layout, kind: str) -> Tally:
        """Return the tally of one kind of file in a namespace of a directory."""
        return self.tallies.setdefault((directory, layout.namespace, kind), Tally())


@dataclass
class Outcome:
    """The result of deleting."""

    tallies: dict[tuple[Directory, str, str], Tally]
    spared: int = 0  #: blocks promised to a running engine's requests, or used since
    failed: list[tuple[str, str]] = field(default_factory=list)  #: paths and reasons


def plan(places: Places, options: argparse.Namespace, step: Callable[[], object] = int) -> Plan:
    """Find the files that a command line asks to delete.

    Args:
        places: The directories and namespaces.
        options: ``older_than``, ``to`` and ``all``.
        step: Called after each block.

    Raises:
        OSError: A directory cannot be listed.
    """
    chosen = places.chosen()
    until = float("inf") if options.all else _until(chosen, options.older_than, options.to)
    found = Plan(chosen, until, drop=options.all)
    for directory, layout in chosen:
        for kind, files in _beside(directory, layout, places.config.stale_seconds, drop=found.drop).items():
            for path, nbytes in files:
                del path
                found.tally(directory, layout, kind).add(nbytes)
        if until > 0:
            for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory):
                step()
                if block.used < until:
                    found.tally(directory, layout, BLOCK).add(block.nbytes)
    return found


def carry_out(found: Plan, stale_seconds: float, step: Callable[[], object] = int) -> Outcome:
    """Carry out a plan.

    Args:
        found: The plan.
        stale_seconds: See ``StoreConfig``.
        step: Called after each block.
    """
    done = Plan(found.chosen, found.until, found.drop)
    outcome = Outcome(done.tallies)
    for directory, layout in found.chosen:
        for kind, files in _beside(directory, layout, stale_seconds, drop=found.drop).items():
            for path, nbytes in files:
                if _delete(path, outcome):
                    done.tally(directory, layout, kind).add(nbytes)
        if found.until > 0:
            for block in _deleted(directory, layout, found.until, outcome, step):
                done.tally(directory, layout, BLOCK).add(block.nbytes)
        remove_empty(layout)
        if found.drop:
            _remove_directories(layout)
    return outcome


def _until(chosen: Sequence[tuple[Directory, Layout]], older_than: float | None, to: int | None) -> float:
    """Return the time before which blocks to delete were last used; 0 if none are deleted."""
    until = 0.0 if older_than is None else time.time() - older_than
    if to is None:
        return until
    uses, sizes = array("d"), array("q")
    for directory, layout in chosen:
        for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory):
            uses.append(block.used)
            sizes.append(block.nbytes)
    order = np.argsort(np.frombuffer(uses))
    # The bytes kept if all blocks used before a block are deleted, for each block.
    kept = np.cumsum(np.frombuffer(sizes, dtype=np.int64)[order][::-1])[::-1]
    too_many = int(np.count_nonzero(kept > to))
    if not too_many:
        return until
    last = uses[order[too_many - 1]]
    return max(until, float(np.nextafter(last, np.inf)))


def _beside(
    directory: Directory, layout: Layout, stale_seconds: float, *, drop: bool
) -> dict[str, list[tuple[str, int]]]:
    """Return the deletions in a namespace other than blocks, as paths and bytes, by kind."""
    abandoned = left_behind(layout, stale_seconds, in_memory=directory.in_memory)
    if drop:
        former = former_blocks(layout) if directory.in_memory else []
        abandoned = [*side_files(layout.temporary), *former]
    return {
        LEFT_BEHIND: [(file.path, file.nbytes) for file in abandoned],
        DAMAGED: [(file.path, file.nbytes) for file in damaged_files(layout)],
    }


def _delete(path: str, outcome: Outcome) -> bool:
    """Delete a file, or an empty directory in a block's place."""
    try:
        if stat.S_ISDIR(status_of(path).st_mode):
            remove_directory(path)
        else:
            unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        outcome.failed.append((path, error.strerror or str(error)))
        return False
    return True


def _deleted(
    directory: Directory, layout: Layout, until: float, outcome: Outcome, step: Callable[[], object]
) -> Iterator[StoredBlock]:
    """Delete old blocks, and notify the engines that have them in their index."""
    gone: list[BlockKey] = []
    in_use = layout.is_private
    try:
        for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory):
            step()
            if block.used < until and in_use:
                outcome.spared += 1
            elif block.used < until and _delete_block(block, until, outcome):
                gone.append(block.key)
                yield block
            if len(gone) >= _LOGGED_AT_ONCE:
                log_removals(layout, gone)
                gone.clear()
    finally:
        if gone:
            log_removals(layout, gone)


def _delete_block(block: StoredBlock, until: float, outcome: Outcome) -> bool:
    if block.slot is not None:
        return delete_slot(*block.slot, block.key)
    with suppress(FileNotFoundError):
        status = status_of(block.path)
        if status.st_mtime < until:
            return _delete(block.path, outcome)
        outcome.spared += 1
    return False


def _remove_directories(layout: Layout) -> None:
    """Remove a namespace's empty directories; any remaining file means that an engine uses it, so its marker stays."""
    with suppress(OSError):
        for path in (*buckets(layout), directory_of(layout), layout.temporary, layout.quarantine):
            with suppress(FileNotFoundError):
                remove_directory(path)
        for path in (f"{layout.base}/{IDENTITY}", removals_path(layout), f"{layout.base}/{MARKER}"):
            with suppress(FileNotFoundError):
                unlink(path)
        remove_directory(layout.base)
