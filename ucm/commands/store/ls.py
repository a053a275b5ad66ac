"""``ucm store ls``: list the blocks of a store."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ucm.commands.options import answer, table
from ucm.commands.store.places import Directory, about, find_places
from ucm.commands.store.text import ago, blocks_and_bytes, iso, progress
from ucm.config.settings import format_size
from ucm.errors import UcmError
from ucm.store.inspection import StoredBlock, stored_blocks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator


class Listed(NamedTuple):
    """A block and its directory."""

    directory: Directory
    block: StoredBlock


#: Smallest first.
_ORDERS: dict[str, Callable[[Listed], Any]] = {
    "used": lambda listed: -listed.block.used,
    "size": lambda listed: -listed.block.nbytes,
    "key": lambda listed: listed.block.key,
}


def run(options: argparse.Namespace) -> int:
    """List the blocks; return 1 if a directory cannot be read.

    Raises:
        UcmError: The options match nothing, or contradict each other.
    """
    older, newer = options.older_than, options.newer_than
    if older is not None and newer is not None and older >= newer:
        raise UcmError("no block can match both --older-than and --newer-than", fix="make --newer-than the longer time")
    places = find_places(options)
    blocks = nbytes = 0

    def counted(found: Iterator[Listed]) -> Iterator[Listed]:
        nonlocal blocks, nbytes
        with progress("listing", None, "blocks") as bar:
            for listed in found:
                blocks += 1
                nbytes += listed.block.nbytes
                bar.update()
                yield listed

    matching = counted(
        listed
        for directory, layout in places.chosen()
        for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory)
        if _matches(listed := Listed(directory, block), options)
    )
    if options.limit:
        choose = heapq.nlargest if options.reverse else heapq.nsmallest
        shown = choose(options.limit, matching, key=_ORDERS[options.sort])
    else:
        shown = sorted(matching, key=_ORDERS[options.sort], reverse=options.reverse)
    shorter = f"; shown: {len(shown)}, all with --limit 0" if len(shown) < blocks else ""
    lines = [*_text(shown), f"{blocks_and_bytes(blocks, nbytes)}{shorter}", *places.complaints()]
    data = {
        "blocks": [{**about(*one), "bytes": one.block.nbytes, "used": iso(one.block.used)} for one in shown],
        "matching": blocks,
        "matching_bytes": nbytes,
    }
    answer(options, data, lines)
    return int(bool(places.broken))


def _matches(listed: Listed, options: argparse.Namespace) -> bool:
    block = listed.block
    age = time.time() - block.used
    return (
        (options.key is None or block.key.hex().startswith(options.key))
        and (options.older_than is None or age > options.older_than)
        and (options.newer_than is None or age < options.newer_than)
        and (options.larger_than is None or block.nbytes > options.larger_than)
    )


def _text(shown: list[Listed]) -> list[str]:
    """Return one table per namespace and directory, in the order of their first blocks."""
    groups: dict[tuple[str, str], list[StoredBlock]] = {}
    for directory, block in shown:
        groups.setdefault((directory.path, block.layout.namespace), []).append(block)
    lines = []
    for (path, namespace), blocks in groups.items():
        rows = [("key", "bytes", "last used")]
        rows += [(block.key.hex(), format_size(block.nbytes), ago(block.used)) for block in blocks]
        lines += [f"{path}: {namespace}", *(f"  {line}" for line in table(rows, right=(1,))), ""]
    return lines
