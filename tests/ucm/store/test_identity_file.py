"""The identity file of a namespace."""

from __future__ import annotations

import json
import logging
import shutil
import stat
from typing import TYPE_CHECKING

from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.identity_file import write_identity
from ucm.store.inventory import identity
from ucm.store.posix.layout import Layout, namespaces
from ucm.testing.blocks import ODD, key, save

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
    config = StoreConfig(directories=(str(root),), lookup_cache_keys=0)
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
