"""`ucm store ls`."""

from __future__ import annotations

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
        (("--older-than", "36h"), range(2, 10)),
    ],
)
def test_filters(
    kept: Kept, ask: Callable[..., Answer], options: tuple[object, ...], expected: tuple[int, ...] | range
) -> None:
    answer = ask("ls", "--json", "--directory", kept.root, "--namespace", BIG, *options)
    assert numbers(kept, answer) == list(expected)


def test_one_block(kept: Kept, ask: Callable[..., Answer]) -> None:
    key = kept.keys[BIG][3].hex()
    answer = ask("ls", "--json", "--directory", kept.root, "--namespace", BIG, "--key", key[:7])
    assert [block["key"] for block in answer.data["blocks"]] == [key]


def test_the_text(kept: Kept, ask: Callable[..., Answer]) -> None:
    lines = ask("ls", "--directory", kept.root, "--namespace", BIG, "--limit", 2).out.splitlines()
    assert lines[0] == f"{kept.root}: {BIG}"
    assert lines[1].split() == ["key", "bytes", "last", "used"]
    assert lines[2].split()[0] == kept.keys[BIG][0].hex()
    assert lines[3].endswith("24 h ago")
    assert lines[5] == "10 blocks, 1.29 MiB; shown: 2, all with --limit 0"


def test_strangers_are_not_listed(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    (kept.path(BIG, 0).parent / "README").write_text("x", encoding="utf-8")
    (kept.root / "zz").mkdir()
    assert ask("ls", "--json", "--directory", kept.root).data["matching"] == 14
    assert ask("ls", "--json", "--directory", tmp_path).data["matching"] == 0
