"""``ucm store gc``: delete leftovers of dead processes, damaged blocks, and on request old blocks.

Deletions are first counted, so that they can be shown and confirmed, then carried out. A block is deleted only if it
has not been used since it was chosen, and is not promised to any request.
"""

from __future__ import annotations

import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.commands.options import answer, many, say, table
from ucm.commands.store.places import Directory, Places, find_places
from ucm.commands.store.text import progress
from ucm.config.settings import format_size
from ucm.errors import UcmError
from ucm.salts import tag_digits, tag_name
from ucm.store.inspection import damaged_files, left_behind, stored_blocks
from ucm.store.memory.directory import in_memory
from ucm.store.memory.segment import delete_slot, directory_of, remove_empty
from ucm.store.posix.layout import IDENTITY, MARKER, buckets
from ucm.store.posix.paths import remove_directory, status_of, unlink, unlink_if
from ucm.store.posix.scan import side_files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey
    from ucm.store.inspection import StoredBlock
    from ucm.store.posix.layout import Layout

    Order: TypeAlias = tuple[int, int]

LEFT_BEHIND, DAMAGED, BLOCK = "left behind", "damaged", "block"
#: No block is before the one, and all are before the other.
_NONE, _ALL = (0, 0), (1 << 63, 0)
#: How many of the last bytes of a key, which are a hash, order blocks that were used at the same time.
_OF_KEY = 8


@dataclass
class Outcome:
    """What was deleted, or would be, as ``--json`` prints it."""

    #: By directory, namespace and kind.
    deleted: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    spared: int = 0  #: blocks promised to a running engine's requests, or used since they were chosen
    failed: list[dict[str, str]] = field(default_factory=list)

    def add(self, directory: Directory, layout: Layout, kind: str, nbytes: int) -> None:
        """Count one more file of a kind."""
        of = {"directory": directory.path, "tier": directory.tier, "namespace": layout.namespace, "kind": kind}
        row = self.deleted.setdefault((directory.path, layout.namespace, kind), {**of, "count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += nbytes

    def count(self, *kinds: str) -> int:
        """Return how many there are of all kinds, or of some."""
        return sum(row["count"] for row in self.deleted.values() if not kinds or row["kind"] in kinds)


class Plan:
    """What a command line asks to delete.

    Args:
        places: The directories and namespaces.
        options: ``older_than``, ``to``, ``all`` and ``salt``.
    """

    def __init__(self, places: Places, options: argparse.Namespace) -> None:
        self._chosen, self._stale_seconds = places.chosen(), places.config.stale_seconds
        #: Whether the namespaces are deleted completely, and the name of the only tag whose blocks are deleted.
        self._drop, self._salt = options.all, options.salt
        #: Blocks before this one in the order of deletion are deleted.
        self._until = _ALL if options.all or options.salt else _until(self._chosen, options.older_than, options.to)

    def run(self, step: Callable[[], object], *, dry: bool) -> Outcome:
        """Delete, or only count what would be deleted.

        Args:
            step: Called after each block.
            dry: Whether to only count.

        Raises:
            OSError: A directory cannot be listed.
        """
        outcome = Outcome()
        for directory, layout in self._chosen:
            for kind, files in _beside(layout, self._stale_seconds, drop=self._drop).items():
                for path, nbytes in files:
                    if dry or _delete(path, outcome):
                        outcome.add(directory, layout, kind, nbytes)
            if self._until > _NONE and not layout.is_abandoned:
                for block in stored_blocks(layout.root, layout.namespace):
                    step()
                    if self._has(block) and (dry or self._delete_block(block, outcome)):
                        outcome.add(directory, layout, BLOCK, block.nbytes)
            if not dry:
                remove_empty(layout)
                if self._drop or layout.is_abandoned:
                    _remove_directories(layout)
        return outcome

    def _has(self, block: StoredBlock) -> bool:
        is_meant = not self._salt or tag_name(tag_digits(block.key)) == self._salt
        return is_meant and _order(block.used_ns, block.key) < self._until

    def _delete_block(self, block: StoredBlock, outcome: Outcome) -> bool:
        if block.layout.is_private:
            outcome.spared += 1
            return False
        if block.slot is not None:
            return delete_slot(*block.slot, block.key)
        return _delete(block.path, outcome, lambda used_ns: _order(used_ns, block.key) < self._until)


def _order(used_ns: int, key: BlockKey) -> Order:
    """Return where a block comes in the order of deletion: by its time of last use, which many blocks may share."""
    return used_ns, int.from_bytes(key[-_OF_KEY:], "big")


def _until(chosen: Sequence[tuple[Directory, Layout]], older_than: float | None, to: int | None) -> Order:
    """Return the first block in the order of deletion that stays."""
    until = _NONE if older_than is None else (int((time.time() - older_than) * 1e9), 0)
    if to is None:
        return until
    held = sorted(
        (*_order(block.used_ns, block.key), block.nbytes)
        for directory, layout in chosen
        if not (directory.offloaded or layout.is_abandoned)
        for block in stored_blocks(layout.root, layout.namespace)
    )
    kept = 0
    for used, of_key, nbytes in reversed(held):
        kept += nbytes
        if kept > to:
            return max(until, (used, of_key + 1))
    return until


def _beside(layout: Layout, stale_seconds: float, *, drop: bool) -> dict[str, list[tuple[str, int]]]:
    """Return the deletions in a namespace other than blocks, as paths and bytes, by kind."""
    whole = drop and not layout.is_abandoned
    abandoned = side_files(layout.temporary) if whole else left_behind(layout, stale_seconds)
    return {
        LEFT_BEHIND: [(file.path, file.nbytes) for file in abandoned],
        DAMAGED: [(file.path, file.nbytes) for file in ([] if layout.is_abandoned else damaged_files(layout))],
    }


def _delete(path: str, outcome: Outcome, goes: Callable[[int], bool] = lambda _: True) -> bool:
    """Delete a file if ``goes`` says so of its time of last use, or an empty directory in a block's place."""
    try:
        mode = status_of(path).st_mode
        if stat.S_ISREG(mode):
            gone = unlink_if(path, goes)
        else:
            gone = True
            (remove_directory if stat.S_ISDIR(mode) else unlink)(path)
    except FileNotFoundError:
        return False
    except BlockingIOError:  # another process changes its time
        gone = False
    except OSError as error:
        outcome.failed.append({"path": path, "reason": error.strerror or str(error)})
        return False
    outcome.spared += not gone
    return gone


def _remove_directories(layout: Layout) -> None:
    """Remove a namespace's empty directories; any remaining file means that an engine uses it, so its marker stays."""
    with suppress(OSError):
        for path in (*buckets(layout), directory_of(layout), layout.temporary, layout.quarantine):
            with suppress(FileNotFoundError):
                remove_directory(path)
        for path in (f"{layout.base}/{IDENTITY}", f"{layout.base}/{MARKER}"):
            with suppress(FileNotFoundError):
                unlink(path)
        remove_directory(layout.base)


def run(options: argparse.Namespace) -> int:
    """Delete, and print the result; return 1 if something could not be deleted, or a directory could not be read.

    Raises:
        UcmError: The options match nothing, or contradict each other, or the Dram tier's directory is on a disk.
    """
    places = find_places(options)
    _check(options, places)
    plan = Plan(places, options)
    with progress("looking", None, "blocks") as bar:
        outcome = plan.run(bar.update, dry=True)
    if outcome.deleted and not options.dry_run:
        if not _may(outcome, options):
            say(["Nothing was deleted."])
            return 0
        with progress("deleting", outcome.count(BLOCK), "blocks") as bar:
            outcome = plan.run(bar.update, dry=False)
    lines = [*_text(outcome, "would be deleted" if options.dry_run else "deleted"), *places.complaints()]
    rest = {"deleted": list(outcome.deleted.values()), "spared": outcome.spared, "failed": outcome.failed}
    answer(options, {"dry_run": options.dry_run, **rest}, lines)
    return int(bool(outcome.failed or places.broken))


def _check(options: argparse.Namespace, places: Places) -> None:
    for directory in places.readable:
        if directory.in_memory and not in_memory(directory.path):
            raise UcmError(
                "this directory is not in a tmpfs, so no engine has its Dram tier there: nothing is deleted",
                where=f"store: dram_directory: {directory.path}",
                fix="correct the setting; for a store on disk name it with directories, or --directory",
            )
    if options.all and not options.namespace:
        raise UcmError("--all deletes the namespaces that --namespace names", fix="name them; '*' stands for every one")
    how = {"--all": options.all or None, "--salt": options.salt, "--older-than": options.older_than, "--to": options.to}
    given = [name for name, value in how.items() if value is not None]
    if len(given) > 1 and given[0] in {"--all", "--salt"}:
        raise UcmError(f"{given[0]} cannot be combined with {given[1]}", fix="give it alone")
    tiers = {directory.tier for directory in places.directories if not directory.offloaded}
    if options.to is not None and len(tiers) > 1:
        raise UcmError("--to is the size of one tier, and this store has two", fix="add --tier posix, or --tier dram")


def _may(found: Outcome, options: argparse.Namespace) -> bool:
    """Ask for confirmation, if the input is a terminal."""
    if options.yes or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    say(_text(found, "to be deleted"))
    sys.stdout.write("Delete this? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _text(outcome: Outcome, what: str) -> list[str]:
    rows = list(outcome.deleted.values())
    if not rows:
        lines = ["There is nothing to delete." if not outcome.failed else "Nothing was deleted."]
    else:
        cells = [("directory", "namespace", "what", "how many", "bytes")]
        cells += [
            (row["directory"], row["namespace"], row["kind"], f"{row['count']:,}", format_size(row["bytes"]))
            for row in rows
        ]
        size = format_size(sum(row["bytes"] for row in rows))
        files, blocks = many(outcome.count(), "file", "files"), many(outcome.count(BLOCK), "block", "blocks")
        lines = [*table(cells, right=(3, 4)), "", f"{files} {what}, {blocks} among them: {size}."]
    if outcome.spared:
        lines.append(f"{many(outcome.spared, 'block is', 'blocks are')} in use and were kept.")
    return [*lines, *(f"{one['path']} could not be deleted: {one['reason']}" for one in outcome.failed)]
