"""``ucm store ls``: list the blocks of a store."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from ucm.commands.options import answer, table
from ucm.commands.store.places import Directory, about, find_places
from ucm.commands.store.text import ago, blocks_and_bytes, iso, progress
from ucm.config.settings import format_size
from ucm.store.inspection import StoredBlock

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    """List the blocks; return 1 if a directory cannot be read.

    Raises:
        UcmError: The options match nothing.
    """
    places, found = find_places(options), list[tuple[Directory, StoredBlock]]()
    before = math.inf if options.older_than is None else time.time() - options.older_than
    with progress("listing", None, "blocks") as bar:
        for directory, block in places.blocks():
            if block.used < before and block.key.hex().startswith(options.key or ""):
                found.append((directory, block))
                bar.update()
    found.sort(key=lambda listed: listed[1].used, reverse=True)
    shown, nbytes = found[: options.limit or None], sum(block.nbytes for _, block in found)
    shorter = f"; shown: {len(shown)}, all with --limit 0" if len(shown) < len(found) else ""
    lines = [*_text(shown), f"{blocks_and_bytes(len(found), nbytes)}{shorter}", *places.complaints()]
    data = {
        "blocks": [{**about(at, block), "bytes": block.nbytes, "used": iso(block.used)} for at, block in shown],
        "matching": len(found),
        "matching_bytes": nbytes,
    }
    answer(options, data, lines)
    return int(bool(places.broken))


def _text(shown: list[tuple[Directory, StoredBlock]]) -> list[str]:
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
