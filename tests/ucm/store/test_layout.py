"""The names of files and directories, and their owners."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ucm.store.workers import owner_name_of_this_process
from ucm.errors import ConfigError
from ucm.store.base import BlockKey
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.inspection import identity
from ucm.store.posix import layout as posix_layout
from ucm.store.posix import space as posix_space
from ucm.store.posix.layout import (
    Layout,
    buckets,
    check_namespace,
    is_stale,
    key_of,
    namespaces,
    owner_name,
    write_identity,
)
from ucm.store.posix.scan import clean_up
from ucm.testing.blocks import ODD, key, save

if TYPE_CHECKING:
    from tests.clock import SimulatedClock
from ucm.testing.conformance import PROCESSES

names = st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,8}(/[a-z0-9_-][a-z0-9._-]{0,8}){0,3}", fullmatch=True)


@settings(deadline=None)
@given(block=st.binary(min_size=16, max_size=64).map(BlockKey), namespace=names)
def test_a_block_s_path_tells_its_key(block: BlockKey, namespace: str) -> None:
    path = Path(Layout("/root", namespace).block(block))
    assert key_of(str(path.parent), path.name) == block
    assert path.parents[1] == Path(Layout("/root", namespace).base)


@settings(deadline=None)
@given(one=names, two=names)
def test_no_namespace_lies_within_another(one: str, two: str) -> None:
    bases = Layout("/root", one).base, Layout("/root", two).base
    assert (bases[0] == bases[1]) == (one == two)
    assert all(Path(base).parent == Path("/root") for base in bases)


@pytest.mark.parametrize("name", ["", "x" * 30, "a" * 29, "a" * 31, "A" * 30, "a" * 128, "0" * 30 + "\n"])
def test_what_is_no_block_s_name(name: str) -> None:
    assert key_of("/root/n/ab", name) is None


def test_namespaces_are_found_by_their_markers(tmp_path: Path) -> None:
    for name in ("b/c", "a"):
        Layout(str(tmp_path), name).make()
    (tmp_path / "stranger").mkdir()
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "NAMESPACE").write_text("a\n", encoding="utf-8")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "NAMESPACE").write_bytes(b"\xff\xfe")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert [layout.namespace for layout in namespaces(str(tmp_path))] == ["a", "b/c"]
    assert buckets(Layout(str(tmp_path), "a")) == []
    assert buckets(Layout(str(tmp_path), "nowhere")) == []
    with pytest.raises(ConfigError):
        check_namespace("A")


def test_names_of_owners_differ() -> None:
    assert len({owner_name() for _ in range(100)}) == 100


@pytest.mark.parametrize("age", [-3601.0, 10.0, 3601.0, 1e9])
def test_a_living_owner_is_known_to_live(age: float) -> None:
    assert not is_stale(owner_name(), age=age, stale_seconds=3600)


def test_a_dead_owner_is_known_to_be_dead() -> None:
    with PROCESSES.Pool(1) as pool:
        name = pool.apply(owner_name_of_this_process)
        assert not is_stale(name, age=0, stale_seconds=3600)
        pool.close()
        pool.join()
    assert is_stale(name, age=0, stale_seconds=3600)
    # A process that reuses the id is not its owner.
    host, _, started, rest = name.split("-", 3)
    assert is_stale(f"{host}-{os.getpid()}-{started}-{rest}", age=0, stale_seconds=3600)


def test_of_another_host_s_owner_only_the_age_tells() -> None:
    name = "0123456789abcdef-999999999-1-x"
    assert not is_stale(name, age=10, stale_seconds=3600)
    assert is_stale(name, age=3601, stale_seconds=3600)


@pytest.mark.parametrize("name", ["junk", "", "notes.txt", "0123456789abcdef-x-1-x"])
def test_what_none_of_us_made_is_never_stale(name: str) -> None:
    assert not is_stale(name, age=1e9, stale_seconds=0)


def test_hosts_that_cannot_be_told_apart_are_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers may have the same host name, but other processes under the same ids."""
    name = owner_name()
    posix_layout._host.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "readlink", _refuse)
        assert not is_stale(name.replace(str(os.getpid()), "999999999"), age=10, stale_seconds=3600)
    posix_layout._host.cache_clear()
    assert is_stale(name.replace(str(os.getpid()), "999999999"), age=10, stale_seconds=3600)


def _refuse(self: Path) -> Path:
    raise PermissionError(self)


def test_only_what_is_stale_is_deleted(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "n")
    layout.make()
    mine = owner_name()
    old = owner_name()
    foreign, foreign_old = f"{'0' * 16}-1-1-0-0", f"{'0' * 16}-1-1-0-1"
    dead = mine.replace(f"-{os.getpid()}-", "-999999999-")
    for name in (mine, old, foreign, foreign_old, dead):
        Path(layout.temporary, name).write_bytes(b"x")
    for name in (old, foreign_old):
        os.utime(Path(layout.temporary, name), (1, 1))
    (tmp_path / "stranger" / "tmp").mkdir(parents=True)
    (tmp_path / "stranger" / "tmp" / dead).write_bytes(b"x")
    assert clean_up(str(tmp_path), 3600) == 2
    assert sorted(os.listdir(layout.temporary)) == sorted([mine, old, foreign])  # noqa: PTH208 - names
    assert (tmp_path / "stranger" / "tmp" / dead).exists()


def test_a_store_in_use_deletes_what_is_stale(config: StoreConfig, clock: SimulatedClock) -> None:
    layout = Layout(config.directories[0], "n")
    layout.make()
    left = Path(layout.temporary, owner_name().replace(f"-{os.getpid()}-", "-999999999-"))
    left.write_bytes(b"x" * 1000)
    with open_store(config, "n", ODD, clock=clock) as store:
        save(store, [key(1)], ODD)
        clock.advance(posix_space._FIRST_SECONDS + 1)
        assert not left.exists()
        assert save(store, [key(2)], ODD).failed == {}


def test_it_lies_in_every_directory_and_for_its_owner_alone(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    for root in roots:
        (tmp_path / root).mkdir()
    config = StoreConfig(pipeline="Posix", directories=tuple(roots))
    write_identity(config, "model/tp0", json.dumps({"name": "model"}))
    for root in roots:
        layout = Layout(root, "model/tp0")
        assert identity(layout) == {"name": "model"}
        assert stat.S_IMODE((tmp_path / layout.base / "identity.json").stat().st_mode) == 0o600
        assert [found.namespace for found in namespaces(root)] == ["model/tp0"]


def test_a_store_that_makes_a_deleted_namespace_writes_it_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    config = StoreConfig(directories=(str(root),))
    write_identity(config, "model/tp0", json.dumps({"name": "model"}))
    with open_store(config, "model/tp0", ODD) as store:
        for gone in (root, next(root.iterdir())):
            shutil.rmtree(gone)
            assert save(store, [key(1)], ODD).failed == {}
            assert identity(Layout(str(root), "model/tp0")) == {"name": "model"}


def test_the_first_one_stays(tmp_path: Path) -> None:
    config = StoreConfig(pipeline="Posix", directories=(str(tmp_path),))
    for name in ("first", "second"):
        write_identity(config, "model", json.dumps({"name": name}))
    assert identity(Layout(str(tmp_path), "model")) == {"name": "first"}


def test_a_directory_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = StoreConfig(pipeline="Posix", directories=(str(tmp_path / "gone"), str(tmp_path)))
    logger = logging.getLogger("ucm")
    logger.addHandler(caplog.handler)
    try:
        write_identity(config, "model", "{}")
    finally:
        logger.removeHandler(caplog.handler)
    assert "identity.json cannot be written below" in caplog.text
    assert identity(Layout(str(tmp_path), "model")) == {}


def test_a_store_of_others_has_no_directories_of_ours(tmp_path: Path) -> None:
    write_identity(StoreConfig(pipeline="Empty", directories=(str(tmp_path),)), "model", "{}")
    assert not list(tmp_path.iterdir())
