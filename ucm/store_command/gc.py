"""``ucm store gc``: delete leftovers of dead processes, damaged blocks, and on request old blocks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ucm.config.settings import format_size
from ucm.errors import UcmError
from ucm.store.memory.directory import in_memory
from ucm.store_command.cleaning import BLOCK, Outcome, Plan, Tally, carry_out, plan
from ucm.store_command.places import Directory, Places, find_places
from ucm.store_command.text import many, progress, say, say_json, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    Tallies = Mapping[tuple[Directory, str, str], Tally]


def run(options: argparse.Namespace) -> int:
    """Delete, and print the result; return 1 if something could not be deleted, or a directory could not be read.

    Raises:
        UcmError: The options match nothing, or contradict each other, or the Dram tier's directory is on a disk.
    """
    places = find_places(options)
    _check(options, places)
    with progress("looking", None, "blocks") as bar:
        found = plan(places, options, bar.update)
    if options.dry_run or not found.tallies:
        outcome = Outcome(found.tallies)
    elif _may(found, options):
        with progress("deleting", _count(found.tallies, BLOCK), "blocks") as bar:
            outcome = carry_out(found, places.config.stale_seconds, bar.update)
    else:
        say(["Nothing was deleted."])
        return 0
    if options.json:
        say_json(_data(outcome, dry_run=options.dry_run))
    else:
        say(_text(outcome, "would be deleted" if options.dry_run else "deleted"))
        say(places.complaints())
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
    if options.all and (options.older_than is not None or options.to is not None):
        raise UcmError("--all cannot be combined with --older-than or --to", fix="give it alone")
    tiers = {directory.tier for directory in places.directories}
    if options.to is not None and len(tiers) > 1:
        raise UcmError("--to is the size of one tier, and this store has two", fix="add --tier posix, or --tier dram")


def _may(found: Plan, options: argparse.Namespace) -> bool:
    """Ask for confirmation, if the input is a terminal."""
    if options.yes or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    say(_text(Outcome(found.tallies), "to be deleted"))
    sys.stdout.write("Delete this? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _count(tallies: Tallies, *kinds: str) -> int:
    return sum(tally.count for (_, _, kind), tally in tallies.items() if kind in kinds)


def _text(outcome: Outcome, what: str) -> list[str]:
    if not outcome.tallies:
        lines = ["There is nothing to delete." if not outcome.failed else "Nothing was deleted."]
    else:
        rows = [("directory", "namespace", "what", "how many", "bytes")]
        rows += [
            (directory.path, namespace, kind, f"{tally.count:,}", format_size(tally.nbytes))
            for (directory, namespace, kind), tally in outcome.tallies.items()
        ]
        nbytes = sum(tally.nbytes for tally in outcome.tallies.values())
        blocks = many(_count(outcome.tallies, BLOCK), "block", "blocks")
        others = many(sum(tally.count for tally in outcome.tallies.values()), "file", "files")
        lines = [*table(rows, right=(3, 4)), "", f"{others} {what}, {blocks} among them: {format_size(nbytes)}."]
    if outcome.spared:
        lines.append(f"{many(outcome.spared, 'block is', 'blocks are')} in use and were kept.")
    return [*lines, *(f"{path} could not be deleted: {reason}" for path, reason in outcome.failed)]


def _data(outcome: Outcome, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "deleted": [
            {
                "directory": directory.path,
                "tier": directory.tier,
                "namespace": namespace,
                "kind": kind,
                "count": tally.count,
                "bytes": tally.nbytes,
            }
            for (directory, namespace, kind), tally in outcome.tallies.items()
        ],
        "spared": outcome.spared,
        "failed": [{"path": path, "reason": reason} for path, reason in outcome.failed],
    }
