"""`ucm store gc`: what it deletes, and what not."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from tests.ucm.commands.store.conftest import BIG, FILE, SMALL
from tests.ucm.store.workers import of_salt
from ucm.commands.store import gc
from ucm.salts import tag_name, tag_of_salt
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store, open_tier
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.paths import touch
from ucm.testing.blocks import EVEN, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer, Kept
    from ucm.store.inspection import StoredBlock


def litter(kept: Kept) -> tuple[list[Path], list[Path]]:
    """Create the leftovers of dead processes, and files of running ones."""
    mine = owner_name()
    dead = mine.replace(f"-{os.getpid()}-", "-999999999-")
    left, used = [kept.side(BIG, "aside/1-ab-corrupt")], []
    for place in ("tmp", "aside"):
        left.append(kept.side(BIG, f"{place}/{dead}"))
        used.append(kept.side(BIG, f"{place}/{mine}"))
    for path in (*left, *used):
        path.write_bytes(b"x" * 10)
    return left, used


def tree(root: Path) -> dict[Path, tuple[int, bytes]]:
    """Return all files below a directory."""
    return {p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in root.rglob("*")}


def test_only_what_nobody_needs_goes_by_itself(kept: Kept, ask: Callable[..., Answer]) -> None:
    left, used = litter(kept)
    answer = ask("gc", "--json", "--directory", kept.root)
    assert answer.code == 0
    assert {(one["kind"], one["count"], one["bytes"]) for one in answer.data["deleted"]} == {
        ("left behind", 2, 20),
        ("damaged", 1, 10),
    }
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in used)
    assert len(kept.blocks(BIG)) == 10
    answer = ask("gc", "--directory", kept.root)
    assert (answer.code, answer.out) == (0, "There is nothing to delete.\n")


def test_old_temporaries_of_other_hosts_go(kept: Kept, ask: Callable[..., Answer]) -> None:
    path = kept.side(BIG, f"tmp/{'0' * 16}-1-1-0-0")
    path.write_bytes(b"x")
    assert ask("gc", "--directory", kept.root).code == 0
    assert path.exists()
    os.utime(path, (time.time() - 4000,) * 2)
    assert ask("gc", "--directory", kept.root).code == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "big", "small"),
    [
        (("--older-than", "60h"), range(3), range(3)),
        (("--older-than", "60h", "--namespace", "llama*"), range(3), range(4)),
        (("--to", f"{14 * FILE}B"), range(10), range(4)),
        (("--to", f"{14 * FILE - 1}B"), range(9), range(4)),
        (("--to", f"{5 * FILE}B", "--namespace", BIG), range(5), range(4)),
        (("--to", "0"), (), ()),
        (("--to", f"{8 * FILE}B", "--older-than", "60h"), range(3), range(3)),
        (("--to", f"{2 * FILE}B", "--older-than", "60h"), range(1), range(1)),
        (("--all", "--namespace", "tiny*"), range(10), ()),
        (("--all", "--namespace", "*"), (), ()),
    ],
)
def test_blocks_go_on_demand(
    kept: Kept,
    ask: Callable[..., Answer],
    options: tuple[object, ...],
    big: tuple[int, ...] | range,
    small: tuple[int, ...] | range,
) -> None:
    os.utime(kept.path(SMALL, 0), (time.time() - 60,) * 2)  # no two blocks may have the same time of last use
    for number in range(1, 4):
        used = kept.path(SMALL, number).stat().st_mtime - 3600
        os.utime(kept.path(SMALL, number), (used, used))
    before = tree(kept.root)
    dry = ask("gc", "--json", "--dry-run", "--directory", kept.root, *options)
    assert dry.code == 0
    assert tree(kept.root) == before
    wet = ask("gc", "--json", "--directory", kept.root, *options)
    assert wet.code == 0
    assert (kept.blocks(BIG), kept.blocks(SMALL)) == (list(big), list(small))
    assert wet.data["deleted"] == dry.data["deleted"]
    gone = 14 - len(big) - len(small)
    assert sum(one["count"] for one in wet.data["deleted"] if one["kind"] == "block") == gone
    assert sum(one["bytes"] for one in wet.data["deleted"]) == gone * FILE


def test_of_blocks_used_in_one_span_no_more_go_than_must(kept: Kept, ask: Callable[..., Answer]) -> None:
    """Engines stamp all that they use within `touch_seconds` with one time."""
    for path in (*(kept.path(BIG, number) for number in range(10)), *(kept.path(SMALL, number) for number in range(4))):
        os.utime(path, (1000, 1000))
    answer = ask("gc", "--json", "--directory", kept.root, "--to", f"{5 * FILE}B")
    assert answer.code == 0
    assert sum(one["count"] for one in answer.data["deleted"]) == 9
    assert len(kept.blocks(BIG)) + len(kept.blocks(SMALL)) == 5


def test_all_blocks_of_a_tenant_go_and_no_others(kept: Kept, ask: Callable[..., Answer]) -> None:
    """Of all ages and namespaces, also pinned ones."""
    config = StoreConfig(directories=(str(kept.root),))
    theirs, others = ([of_salt(salt, number) for number in range(3)] for salt in ("ours", "theirs"))
    for namespace in (BIG, SMALL):
        with open_store(config, namespace, EVEN) as store:
            save(store, [*theirs, *others], EVEN)
    with closing(open_tier(config, "Posix", BIG)) as tier:
        assert tier.lease(dict.fromkeys(theirs, 0), time.time() + 3600.0, pinned=True).leased == 3
    left = {path for path in kept.root.rglob("*") if path.is_file()}
    gone = {Path(Layout(str(kept.root), space).block(one)) for space in (BIG, SMALL) for one in theirs}
    named = tag_name(tag_of_salt("ours").hex())
    for more in (("--dry-run",), ()):
        data = ask("gc", "--json", "--salt", named, "--directory", kept.root, *more).data
        assert [one["count"] for one in data["deleted"]] == [3, 3]
    assert left - {path for path in kept.root.rglob("*") if path.is_file()} == gone
    assert ask("gc", "--json", "--salt", "no-salt", "--namespace", SMALL, "--directory", kept.root).code == 0
    assert (kept.blocks(BIG), kept.blocks(SMALL)) == (list(range(10)), [])


def test_a_namespace_goes_altogether(kept: Kept, ask: Callable[..., Answer]) -> None:
    litter(kept)
    kept.side(BIG, "identity.json").write_text("{}", encoding="utf-8")
    assert ask("gc", "--all", "--namespace", SMALL, "--directory", kept.root).code == 0
    assert not kept.side(SMALL, ".").exists()
    answer = ask("gc", "--all", "--namespace", BIG, "--directory", kept.root)
    assert answer.code == 0
    assert kept.blocks(BIG) == []
    # A running process's unfinished file stays, and with it the namespace.
    assert kept.side(BIG, "NAMESPACE").exists()


def test_what_is_not_ours_is_never_touched(kept: Kept, ask: Callable[..., Answer]) -> None:
    strange = [kept.root / "README", kept.side(BIG, "notes"), kept.path(BIG, 0).parent / "README"]
    for path in strange:
        path.write_text("x", encoding="utf-8")
    assert ask("gc", "--all", "--namespace", "*", "--directory", kept.root).code == 0
    assert all(path.exists() for path in strange)


def test_blocks_of_a_living_process_s_own_stay(
    kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "is_private", property(lambda layout: layout.namespace == BIG))
    before = kept.blocks(BIG)
    answer = ask("gc", "--older-than", "60h", "--namespace", BIG, "--directory", kept.root)
    assert answer.code == 0
    assert kept.blocks(BIG) == before
    assert answer.out.endswith("blocks are in use and were kept.\n")


def test_blocks_used_meanwhile_stay(kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    delete = gc.Plan._delete_block

    def late(self: gc.Plan, block: StoredBlock, outcome: gc.Outcome) -> bool:
        os.utime(kept.path(BIG, 8))
        return delete(self, block, outcome)

    monkeypatch.setattr(gc.Plan, "_delete_block", late)
    answer = ask("gc", "--older-than", "60h", "--namespace", BIG, "--directory", kept.root, "--json")
    assert 8 in kept.blocks(BIG)
    assert answer.data["spared"] <= 1


def test_a_block_that_is_being_deleted_for_its_age_cannot_be_leased(
    kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the lease would be confirmed, and the block gone."""
    delete, leased = os.unlink, list[str]()

    def slow(name: str, *, dir_fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{dir_fd}").readlink() / name)
        with suppress(BlockingIOError):
            touch(path, lambda used_ns: used_ns + 1000)
            leased.append(path)
        delete(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", create_autospec(os.unlink, side_effect=slow))
    assert ask("gc", "--older-than", "60h", "--namespace", BIG, "--directory", kept.root).code == 0
    assert kept.blocks(BIG) == [0, 1, 2]
    assert not leased


def test_what_cannot_be_deleted_is_told(
    kept: Kept, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, goes: Callable[[int], bool]) -> bool:
        del goes
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(gc, "unlink_if", refuse)
    answer = ask("gc", "--older-than", "60h", "--namespace", SMALL, "--directory", kept.root)
    assert answer.code == 1
    assert answer.out == (f"Nothing was deleted.\n{kept.path(SMALL, 3)} could not be deleted: Permission denied\n")
    assert len(ask("gc", "--json", "--older-than", "60h", "--directory", kept.root).data["failed"]) == 8


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--all",), "--all deletes the namespaces that --namespace names"),
        (("--all", "--namespace", "*", "--to", "0"), "--all cannot be combined"),
        (("--all", "--namespace", "*", "--older-than", "1d"), "--all cannot be combined"),
        (("--all", "--namespace", "*", "--salt", "no-salt"), "--all cannot be combined with --salt"),
        (("--salt", "no-salt", "--to", "0"), "--salt cannot be combined with --to"),
        (("--salt", "tenant"), "'tenant': a tag is what `ucm store tag` prints, or no-salt"),
        (("--namespace", "nobody"), "no namespace matches nobody"),
    ],
)
def test_misuse(kept: Kept, ask: Callable[..., Answer], options: tuple[str, ...], what: str) -> None:
    before = tree(kept.root)
    answer = ask("gc", "--directory", kept.root, *options)
    assert answer.code == 2
    assert what in answer.err
    assert tree(kept.root) == before


def test_a_size_is_that_of_one_tier(kept: Kept, ask: Callable[..., Answer], tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(
        f"store: {{pipeline: Cache|Posix, directories: ['{kept.root}'], dram_directory: '{tmp_path}/dram'}}\n",
        encoding="utf-8",
    )
    assert "add --tier posix" in ask("gc", "--to", "0", "--config", file).err
    assert ask("gc", "--to", "0", "--tier", "posix", "--config", file).code == 0
    assert kept.blocks(BIG) == []


def test_an_engine_goes_on_when_its_namespace_is_deleted(kept: Kept, ask: Callable[..., Answer]) -> None:
    ended = threading.Event()
    failed: list[object] = []

    def work() -> None:
        # A save may fail while directories vanish, but not for long.
        config = StoreConfig(directories=(str(kept.root),), rest_seconds=0.0)
        with open_store(config, BIG, EVEN) as store:
            number = 100
            while not ended.is_set():
                save(store, [key(number)], EVEN)
                number += 1
            ended.wait()
            last = [key(1), key(2)]
            save(store, last, EVEN)
            failed.extend(fetch(store, last, EVEN)[1])

    engine = threading.Thread(target=work)
    engine.start()
    try:
        codes = {ask("gc", "--all", "--namespace", "*", "--directory", kept.root).code for _ in range(10)}
    finally:
        ended.set()
        engine.join()
    assert codes <= {0, 2}  # 2: there was no namespace at that time
    assert failed == []
