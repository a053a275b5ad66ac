"""A store in a directory that others have tampered with: nothing there redirects or blocks it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system import require_root
from tests.ucm.store.evicting import evict_unpinned
from ucm import cli
from ucm.clock import SYSTEM
from ucm.errors import ConfigError
from ucm.store.factory import open_store
from ucm.store.inspection import check_block, identity, stored_blocks
from ucm.store.posix import paths as posix_paths
from ucm.store.posix import space as posix_space
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.paths import open_in_steps
from ucm.store.posix.scan import clean_up, scan
from ucm.testing.blocks import ODD, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
KEYS = [key(number) for number in range(6)]
OTHERS = 54321


@pytest.fixture(params=["openat2", "openat"], autouse=True)
def _opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to open without following a symbolic link."""
    if request.param == "openat":
        monkeypatch.setattr(posix_paths, "_open", lambda: open_in_steps)


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
    return Layout(config.directories[0], NAMESPACE)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory elsewhere with files named like ours, which must not change."""
    path = tmp_path / "outside"
    path.mkdir()

    def content_of() -> dict[str, tuple[bytes, float, int]]:
        found = {child.name: (child.read_bytes(), child.stat()) for child in path.iterdir()}
        return {name: (data, status.st_mtime, status.st_nlink) for name, (data, status) in found.items()}

    dead = owner_name().replace(f"-{os.getpid()}-", "-999999999-")
    for name in (dead, "1-ab-corrupt", KEYS[0].hex(), KEYS[0].hex()[2:], "precious"):
        (path / name).write_bytes(b"mine")
        os.utime(path / name, (1, 1))
    before = content_of()
    yield path
    assert content_of() == before


def replace_by_link(path: str, target: Path) -> None:
    """Replace a file or directory with a symbolic link."""
    Path(path).rename(f"{target}-moved")
    Path(path).symlink_to(target)


def gc(root: str, *options: str) -> int:
    return cli.main(["store", "gc", "--directory", root, "--yes", *options])


@pytest.mark.parametrize("part", ["temporary", "quarantine"])
def test_a_linked_directory_is_not_emptied(layout: Layout, outside: Path, part: str) -> None:
    replace_by_link(getattr(layout, part), outside)
    clean_up(layout.root, 0.0)
    evict_unpinned(layout.root, scan(layout.root), 1e12, lambda _: None)
    gc(layout.root, "--older-than", "0s")
    gc(layout.root, "--all", "--namespace", "*")


@pytest.mark.parametrize("part", ["temporary", "quarantine", "base"])
def test_a_linked_directory_is_refused(config: StoreConfig, layout: Layout, outside: Path, part: str) -> None:
    replace_by_link(getattr(layout, part), outside)
    with pytest.raises(ConfigError, match="symbolic link") as caught:
        open_store(config, NAMESPACE, ODD)
    assert getattr(layout, part) in caught.value.where


@pytest.mark.parametrize("part", ["temporary", "quarantine", "base", "bucket"])
def test_a_directory_linked_beside_a_running_engine(
    config: StoreConfig, layout: Layout, outside: Path, part: str
) -> None:
    """Nothing is written, deleted or read through it."""
    path = layout.block(KEYS[0]).rpartition("/")[0] if part == "bucket" else getattr(layout, part)
    with open_store(replace(config, rest_seconds=0.0), NAMESPACE, ODD) as store:
        replace_by_link(path, outside)
        loaded = fetch(store, KEYS, ODD)[0]
        assert loaded.items() <= {block: content(block, ODD) for block in KEYS}.items()
        assert (KEYS[0] in loaded) == (part not in {"base", "bucket"})
        save(store, [key(100), *KEYS], ODD)


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_namespace_that_goes_away_beside_a_running_engine(config: StoreConfig, layout: Layout, how: str) -> None:
    """It does not misdirect a writer, who leaves nothing open."""
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, [key(100)], ODD)
        if how == "moved":
            Path(layout.base).rename(f"{layout.base}.old")
        else:
            shutil.rmtree(layout.base)
        assert save(store, [key(101)], ODD).failed == {}
        assert Path(layout.block(key(101))).exists()
    kept = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in kept if os.path.realpath(path).startswith(layout.root)]


def test_a_linked_bucket_is_replaced(config: StoreConfig, layout: Layout, outside: Path) -> None:
    with open_store(config, NAMESPACE, ODD) as store:
        replace_by_link(layout.block(KEYS[0]).rpartition("/")[0], outside)
        fetch(store, KEYS[:1], ODD)
        assert store.stats()["posix"].failures == {"load.unreadable": 1}
        assert save(store, KEYS[:1], ODD).failed == {}
        assert fetch(store, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD)}


def test_a_linked_namespace_is_left_alone(layout: Layout, outside: Path) -> None:
    """Even if the link's target looks like ours."""
    inner = outside.parent / "elsewhere"
    Path(layout.base).rename(inner)
    Path(layout.base).symlink_to(inner)
    blocks = sorted(inner.rglob("*"))
    clean_up(layout.root, 0.0)
    assert scan(layout.root).blocks == 0
    gc(layout.root, "--to", "0")
    gc(layout.root, "--all", "--namespace", "*")
    assert sorted(inner.rglob("*")) == blocks


def test_a_linked_block_is_no_block(config: StoreConfig, layout: Layout, outside: Path) -> None:
    """Even if the target is a valid block: it is a miss, and only the link is deleted."""
    path = Path(layout.block(KEYS[0]))
    sound = outside.parent / "sound"
    path.rename(sound)
    path.symlink_to(sound)
    Path(layout.block(KEYS[1])).unlink()
    Path(layout.block(KEYS[1])).symlink_to(outside / "precious")
    assert {type(check_block(block)).__name__ for block in stored_blocks(layout.root) if block.key in KEYS[:2]} == {
        "BlockUnreadableError"
    }
    with open_store(config, NAMESPACE, ODD) as store:
        loaded, failed = fetch(store, KEYS[:1], ODD)
        assert loaded == {}
        assert failed[KEYS[0]].cause == "unreadable"
        assert fetch(store, KEYS[1:2], ODD)[0] == {}
        assert store.lookup(KEYS) == [False, False, True, True, True, True]
    assert sound.exists()


def test_a_linked_tally_is_not_appended_to(config: StoreConfig, layout: Layout, outside: Path) -> None:
    path = Path(layout.root, "USED")
    with open_store(config, NAMESPACE, ODD) as store:
        path.unlink()
        path.symlink_to(outside / "precious")
        assert save(store, [key(100)], ODD).failed
    with pytest.raises(ConfigError, match="symbolic link"):
        open_store(config, NAMESPACE, ODD)


def test_a_linked_identity_is_neither_read_nor_written(layout: Layout, outside: Path) -> None:
    secret = outside.parent / "secret.json"
    secret.write_text('{"name": "secret"}', encoding="utf-8")
    path = Path(layout.base, "identity.json")
    path.symlink_to(secret)
    assert identity(layout) is None
    layout.keep_identity()
    assert layout.identity is None
    layout.identity = b'{"name": "ours"}'
    layout.make()
    assert identity(layout) == {"name": "ours"}
    assert "secret" in secret.read_text(encoding="utf-8")
    marker = Path(layout.base, "NAMESPACE")
    marker.rename(outside.parent / "marker")
    marker.symlink_to(outside.parent / "marker")
    assert scan(layout.root).blocks == 0
    layout.make()
    assert not marker.is_symlink()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "inner").write_bytes(b"mine")


def make_device(path: Path) -> None:
    require_root("only root can make a device")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is limited in length
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_longer(path: Path) -> None:
    """Extend a block's file to a terabyte."""
    Path(f"{path}-moved").rename(path)
    os.truncate(path, 1 << 40)


def make_locked(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    Path(f"{path}-moved").rename(path)
    path.chmod(0)


@pytest.mark.parametrize(
    "make", [make_fifo, make_directory, make_full_directory, make_device, make_socket, make_longer, make_locked]
)
@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_what_is_in_a_block_s_place(
    config: StoreConfig, layout: Layout, memory: str, make: Callable[[Path], None], pipeline: str, clock: SimulatedClock
) -> None:
    """It is a miss, counted once and removed, and does not affect other blocks."""
    path = Path(layout.block(KEYS[0]))
    path.rename(f"{path}-moved")
    make(path)
    config = replace(config, pipeline=pipeline, dram_directory=memory)
    with open_store(replace(config, failures_until_rest=1), NAMESPACE, ODD, clock=clock) as store:
        assert fetch(store, KEYS[:1], ODD)[0] == {}
        assert store.lookup(KEYS) == [False] + [True] * 5
        assert save(store, KEYS[:1], ODD).failed == {}
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}


@pytest.mark.parametrize("number", ["EIO", "EACCES", "EPERM", "EBADMSG"])
def test_a_block_that_the_medium_does_not_read(
    config: StoreConfig, layout: Layout, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """One block's error does not affect the others."""
    preadv = os.preadv
    bad = Path(layout.block(KEYS[0])).stat().st_ino

    def refuse(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(getattr(errno, number), "made up")
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse)
    with open_store(replace(config, failures_until_rest=1), NAMESPACE, ODD) as store:
        loaded, failed = fetch(store, KEYS, ODD)
        assert set(loaded) == set(KEYS[1:])
        assert failed[KEYS[0]].cause == "unreadable"
        assert store.lookup(KEYS[:1]) == [False]
        assert store.stats()["posix"].failures == {"load.unreadable": 1}
        assert store.stats()["posix"].quarantined_blocks == 1
        assert save(store, KEYS[:1], ODD).failed == {}
        assert fetch(store, KEYS, ODD)[1] == {}


def test_strangers_files_stay(layout: Layout) -> None:
    """Cleanup deletes only files with our own names, however old the others are."""
    strangers = [
        *(Path(layout.temporary, name) for name in ("notes", "x-1-2-3")),
        Path(layout.quarantine, "notes"),
        Path(layout.block(KEYS[0])).with_name("notes"),
    ]
    for path in strangers:
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    clean_up(layout.root, 0.0)
    evict_unpinned(layout.root, scan(layout.root), 1e12, lambda _: None)
    gc(layout.root, "--to", "0")
    assert [path.read_bytes() for path in strangers] == [b"mine"] * len(strangers)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
@pytest.mark.parametrize("where", ["root", "base"])
def test_a_directory_that_others_may_write_to_is_refused(
    config: StoreConfig, layout: Layout, capsys: pytest.CaptureFixture[str], mode: int, where: str
) -> None:
    Path(getattr(layout, where)).chmod(mode)
    with pytest.raises(ConfigError, match="may write to it") as caught:
        open_store(config, NAMESPACE, ODD)
    assert getattr(layout, where) in caught.value.where
    for command in ("gc", "stat", "verify", "ls"):
        assert cli.main(["store", command, "--directory", layout.root]) == 2
        assert "may write to it" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["root", "base"])
def test_another_user_s_directory_is_refused(config: StoreConfig, layout: Layout, where: str) -> None:
    require_root("only root can give a directory away")
    os.chown(getattr(layout, where), OTHERS, -1)
    with pytest.raises(ConfigError, match="belongs to user 54321"):
        open_store(config, NAMESPACE, ODD)


def test_a_group_that_is_trusted_shares_a_directory(config: StoreConfig, tmp_path: Path) -> None:
    require_root("only root can give a directory away")
    root = tmp_path / "shared"
    root.mkdir()
    os.chown(root, OTHERS, OTHERS)
    root.chmod(0o770)
    shared = replace(config, directories=(str(root),), trusted_group=OTHERS)
    umask = os.umask(0o077)
    try:
        with open_store(shared, NAMESPACE, ODD) as store:
            save(store, KEYS, ODD)
            assert len(fetch(store, KEYS, ODD)[0]) == len(KEYS)
            made = list(root.rglob("*"))
            assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o2770}
            assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {0o660}
            assert {path.stat().st_gid for path in made} == {OTHERS}
    finally:
        os.umask(umask)
    for wrong in (OTHERS + 1, None):
        with pytest.raises(ConfigError, match="its group 54321 may write"):
            open_store(replace(shared, trusted_group=wrong), NAMESPACE, ODD)
    with pytest.raises(ConfigError, match="no group"):
        open_store(replace(shared, trusted_group="no such group"), NAMESPACE, ODD)


def test_a_running_evictor_deletes_nothing_elsewhere(
    config: StoreConfig, layout: Layout, outside: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    cleaned = []

    def cleaning(root: str, stale_seconds: float, *, clock: Clock = SYSTEM) -> int:
        cleaned.append(clean_up(root, stale_seconds, clock=clock))
        return cleaned[-1]

    monkeypatch.setattr(posix_space, "clean_up", cleaning)
    with open_store(replace(config, stale_seconds=0.0), NAMESPACE, ODD, clock=clock) as store:
        replace_by_link(layout.temporary, outside)
        fetch(store, KEYS, ODD)
        clock.advance(2 * posix_space._FIRST_SECONDS)
    assert cleaned == [0]
