"""``ucm store ls``: list the blocks of a store."""

from __future__ import annotations

import heapq
import math
import operator
import time
from typing import TYPE_CHECKING, NamedTuple

from ucm.commands.options import answer, table
from ucm.commands.store.places import Directory, about, find_places
from ucm.commands.store.text import ago, blocks_and_bytes, iso, progress
from ucm.config.settings import format_size
from ucm.store.inspection import StoredBlock, stored_blocks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


class Listed(NamedTuple):
    """A block and its directory."""

    directory: Directory
    block: StoredBlock


def run(options: argparse.Namespace) -> int:
    """List the blocks; return 1 if a directory cannot be read.

    Raises:
        UcmError: The options match nothing.
    """
    places, blocks, nbytes = find_places(options), 0, 0
    before = math.inf if options.older_than is None else time.time() - options.older_than

    def counted(found: Iterator[Listed]) -> Iterator[Listed]:
        nonlocal blocks, nbytes
        with progress("listing", None, "blocks") as bar:
            for listed in found:
                blocks += 1
                nbytes += listed.block.nbytes
                bar.update()
                yield listed

    matching = counted(
        Listed(directory, block)
        for directory, layout in places.chosen()
        for block in stored_blocks(layout.root, layout.namespace, in_memory=directory.in_memory)
        if block.used < before and block.key.hex().startswith(options.key or "")
    )
    latest_first = operator.attrgetter("block.used")
    shown = (
        heapq.nlargest(options.limit, matching, key=latest_first)
        if options.limit
        else sorted(matching, key=latest_first, reverse=True)
    )
    shorter = f"; shown: {len(shown)}, all with --limit 0" if len(shown) < blocks else ""
    lines = [*_text(shown), f"{blocks_and_bytes(blocks, nbytes)}{shorter}", *places.complaints()]
    data = {
        "blocks": [{**about(*one), "bytes": one.block.nbytes, "used": iso(one.block.used)} for one in shown],
        "matching": blocks,
        "matching_bytes": nbytes,
    }
    answer(options, data, lines)
    return int(bool(places.broken))


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
