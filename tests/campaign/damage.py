"""Ways to damage a store's files; also used by tests that run an engine on the store.

``damage_store(root, "flip", rng)`` damages every block below a directory of a store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.format import UNIT
from ucm.store.memory.segment import segments
from ucm.store.posix.layout import buckets, key_of, namespaces

if TYPE_CHECKING:
    import random

    from ucm.store.base import BlockKey


class BlockFile(NamedTuple):
    """A block's file."""

    path: Path
    key: BlockKey


Damage = Callable[[Path, "random.Random", list[BlockFile]], None]


def block_files(root: Path) -> list[BlockFile]:
    """Return every block below a directory of a store, ordered by name."""
    found = []
    for layout in namespaces(str(root)):
        for bucket in buckets(layout):
            for _, _, names in os.walk(bucket):
                for name in sorted(names):
                    key = key_of(bucket, name)
                    if key is not None:
                        found.append(BlockFile(Path(bucket, name), key))
    return found


def damage_memory(root: Path, rng: random.Random, ways: Callable[[BlockKey], str | None]) -> list[BlockKey]:
    """Harm blocks in the segments of a Dram tier, in place: others map these files, so none is cut or made longer.

    Args:
        root: The tier's directory.
        rng: Decides where.
        ways: Returns one of ``DAMAGES`` for each block; None: none.

    Returns:
        Those that were harmed.
    """
    harmed = []
    with tempfile.TemporaryDirectory() as name:
        for layout in namespaces(str(root)):
            for segment in segments(layout):
                files = []
                for key, number in segment.blocks():
                    files.append(BlockFile(Path(name, f"{key.hex()}-{segment.inode}"), key))
                    files[-1].path.write_bytes(segment.file_of(number, key)[0])
                for file, (key, number) in zip(files, list(segment.blocks()), strict=True):
                    way = ways(key)
                    if way is None:
                        continue
                    harmed.append(key)
                    before = file.path.read_bytes()
                    DAMAGES["flip" if way == "extend" else way](file.path, rng, files)
                    if not file.path.exists():
                        segment.hide(number, key)
                        continue
                    after = file.path.read_bytes()
                    after += bytes(byte ^ 0xFF for byte in before[len(after) :])
                    segment.slot(number)[: len(before)] = after[: len(before)]
    return harmed


def damage_store(root: Path, how: str, rng: random.Random, limit: int | None = None) -> list[BlockFile]:
    """Damage blocks.

    Args:
        root: A configured directory of a store.
        how: One of ``DAMAGES``.
        rng: Chooses the blocks and the places.
        limit: The largest number of blocks; None for all.

    Returns:
        The damaged blocks that are files.
    """
    damage_memory(root, rng, lambda _: how)
    found = block_files(root)
    chosen = rng.sample(found, len(found) if limit is None else min(limit, len(found)))
    for block in chosen:
        if block.path.exists():
            DAMAGES[how](block.path, rng, found)
    return chosen


def _flip(path: Path, rng: random.Random, begin: int, end: int) -> None:
    place = rng.randrange(begin, end)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _header(path: Path) -> int:
    """Return the length of an intact header."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(12)[10:12], "little") * UNIT


def flip(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Flip one bit, anywhere."""
    _flip(path, rng, 0, path.stat().st_size)


def flip_header(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Flip one bit of the header."""
    _flip(path, rng, 0, _header(path))


def flip_body(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Flip one bit after the header."""
    _flip(path, rng, _header(path), path.stat().st_size)


def truncate(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Truncate the file anywhere, possibly to nothing."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def truncate_header(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Truncate the file within the header."""
    os.truncate(path, rng.randrange(_header(path)))


def truncate_body(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Truncate the file after the header."""
    os.truncate(path, rng.randrange(_header(path), path.stat().st_size))


def extend(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Append bytes."""
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 2 * UNIT)))


def hole(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Overwrite a range with zeros, like a file system that lost a page; if it was zero already, set one bit."""
    size = path.stat().st_size
    place = rng.randrange(0, size, 512)
    with path.open("r+b") as file:
        file.seek(place)
        before = file.read(rng.randrange(1, UNIT))
        file.seek(place)
        file.write(bytes(len(before)) if any(before) else b"\1" + before[1:])


def scramble(path: Path, rng: random.Random, _: list[BlockFile]) -> None:
    """Overwrite everything from some place on with random bytes."""
    size = path.stat().st_size
    place = rng.randrange(size)
    with path.open("r+b") as file:
        file.seek(place)
        first = file.read(1)[0] ^ 0xFF
        file.seek(place)
        file.write(bytes([first]) + rng.randbytes(size - place - 1))


def misplace(path: Path, rng: random.Random, found: list[BlockFile]) -> None:
    """Put another intact block in this one's place; if there is no other, flip a bit."""
    mine = path.read_bytes()
    for other in rng.sample(found, len(found)):
        if other.path.exists() and other.path.read_bytes() != mine:
            copy = path.with_name("copy")
            shutil.copyfile(other.path, copy)
            copy.replace(path)
            return
    flip(path, rng, found)


def delete(path: Path, _: random.Random, __: list[BlockFile]) -> None:
    """Delete the file."""
    path.unlink()


#: All kinds of damage, by name.
DAMAGES: dict[str, Damage] = {
    way.__name__.strip("_").replace("_", "-"): way
    for way in (
        *(flip, flip_header, flip_body, truncate, truncate_header, truncate_body),
        *(extend, hole, scramble, misplace, delete),
    )
}
