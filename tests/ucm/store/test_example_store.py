"""The example store package: installation, entry point, conformance suite, and failures of its medium."""

from __future__ import annotations

import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from transforms.pipeline.package import build_wheel
from transforms.place import ROOT
from ucm import cli
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.testing import StoreConformance
from ucm.testing.blocks import EVEN, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put it on the path of this process and its children, as pip would."""
    directory = tmp_path_factory.mktemp("package")
    site = directory / "site"
    with zipfile.ZipFile(build_wheel(ROOT / "examples" / "store", directory)) as wheel:
        wheel.extractall(site)
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
    sys.modules.pop("ucm_shelf", None)


def shelf(directory: Path) -> StoreConfig:
    return StoreConfig(pipeline="Shelf", tiers={"Shelf": {"path": str(directory)}})


class TestShelf(StoreConformance):
    @pytest.fixture
    def config(self, tmp_path: Path) -> StoreConfig:
        return shelf(tmp_path)


def test_what_fails_is_counted_and_named(tmp_path: Path) -> None:
    keys = [key(number) for number in range(2)]
    with open_store(shelf(tmp_path / "gone"), "model", EVEN) as store:
        assert set(save(store, keys, EVEN).failed) == set(keys)
        assert store.lookup(keys) == [False, False]
        assert fetch(store, keys, EVEN)[0] == {}
        assert store.stats()["shelf"].failures == {"save.unavailable": 2, "load.missing": 2}
    with open_store(shelf(tmp_path), "model", EVEN) as store:
        assert save(store, keys, EVEN).failed == {}
        for file in tmp_path.rglob(keys[0].hex()):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert set(fetch(store, keys, EVEN)[1]) == {keys[0]}
        assert store.lookup(keys) == [False, True], "a damaged block is removed"


def test_the_doctor_checks_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(f"store: {{pipeline: Shelf, tiers: {{Shelf: {{path: {tmp_path}}}}}}}\n", encoding="utf-8")
    cli.main(["doctor", "--config", str(file)])
    assert "answers, in" in capsys.readouterr().out
    file.write_text(
        f"store: {{pipeline: Shelf, tiers: {{Shelf: {{path: {tmp_path}, timeout: 0}}}}}}\n", encoding="utf-8"
    )
    assert cli.main(["doctor", "--config", str(file)]) == 1
    assert "store.tiers.Shelf.timeout" in capsys.readouterr().out
