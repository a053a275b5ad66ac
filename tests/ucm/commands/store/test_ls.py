"""`ucm store ls`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.ucm.commands.store.conftest import BIG, FILE, SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.commands.store.conftest import Answer, Kept


def numbers(kept: Kept, answer: Answer, namespace: str = BIG) -> list[int]:
    """Return the numbers of a namespace's listed blocks, in order."""
    listed = [block["key"] for block in answer.data["blocks"] if block["namespace"] == namespace]
    return [[key.hex() for key in kept.keys[namespace]].index(key) for key in listed]


def test_the_most_recently_used_come_first(kept: Kept, ask: Callable[..., Answer]) -> None:
    answer = ask("ls", "--json", "--directory", kept.root)
    assert answer.code == 0
    assert numbers(kept, answer) == list(range(10))
    assert numbers(kept, answer, SMALL) == list(range(4))
    assert (answer.data["matching"], answer.data["matching_bytes"]) == (14, 14 * FILE)
    block = answer.data["blocks"][0]
    assert (block["bytes"], block["tier"], block["directory"]) == (FILE, "posix", str(kept.root))
    assert block["path"] == str(kept.path(block["namespace"], 0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), range(10)),
        (("--limit", 3), range(3)),
        (("--limit", 0), range(10)),
        (("--limit", 3, "--reverse"), (9, 8, 7)),
        (("--limit", 0, "--reverse"), range(9, -1, -1)),
        (("--older-than", "36h"), range(2, 10)),
        (("--newer-than", "36h"), range(2)),
        (("--older-than", "36h", "--newer-than", "4.5d"), range(2, 5)),
        (("--larger-than", f"{FILE - 1}B"), range(10)),
        (("--larger-than", f"{FILE}B"), ()),
    ],
)
def test_filters(
    kept: Kept, ask: Callable[..., Answer], options: tuple[object, ...], expected: tuple[int, ...] | range
) -> None:
    answer = ask("ls", "--json", "--directory", kept.root, "--namespace", BIG, *options)
    assert numbers(kept, answer) == list(expected)


def test_by_size_and_by_key(kept: Kept, ask: Callable[..., Answer]) -> None:
    os.truncate(kept.path(BIG, 5), FILE + 1)
    arguments = ("ls", "--json", "--directory", kept.root, "--namespace", BIG)
    assert numbers(kept, ask(*arguments, "--sort", "size"))[0] == 5
    keys = [block["key"] for block in ask(*arguments, "--sort", "key").data["blocks"]]
    assert keys == sorted(keys)
    assert len(keys) == 10
    answer = ask(*arguments, "--key", keys[3][:7])
    assert [block["key"] for block in answer.data["blocks"]] == [keys[3]]


def test_the_text(kept: Kept, ask: Callable[..., Answer]) -> None:
    lines = ask("ls", "--directory", kept.root, "--namespace", BIG, "--limit", 2).out.splitlines()
    assert lines[0] == f"{kept.root}: {BIG}"
    assert lines[1].split() == ["key", "bytes", "last", "used"]
    assert lines[2].split()[0] == kept.keys[BIG][0].hex()
    assert lines[3].endswith("24 h ago")
    assert lines[5] == "10 blocks, 1.29 MiB; shown: 2, all with --limit 0"


def test_filters_that_contradict_each_other(kept: Kept, ask: Callable[..., Answer]) -> None:
    answer = ask("ls", "--directory", kept.root, "--older-than", "2d", "--newer-than", "1d")
    assert answer.code == 2
    assert "no block can match both --older-than and --newer-than" in answer.err


def test_strangers_are_not_listed(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    (kept.path(BIG, 0).parent / "README").write_text("x", encoding="utf-8")
    (kept.root / "zz").mkdir()
    assert ask("ls", "--json", "--directory", kept.root).data["matching"] == 14
    assert ask("ls", "--json", "--directory", tmp_path).data["matching"] == 0
