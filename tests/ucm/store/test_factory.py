"""Opening a store by its configuration, and invalid configurations."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.errors import ConfigError
from ucm.store import factory
from ucm.store.base import BlockGeometry, BlockMissingError
from ucm.store.config import ENTRY_POINT_GROUP, StoreConfig
from ucm.store.factory import EmptyStore, open_store
from ucm.store.memory.directory import in_memory
from ucm.store.tier import TierOptions, TierPlace, ValueTier
from ucm.testing.blocks import EVEN, ODD, content, fetch, files, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.store.base import BlockKey, Buffer

KEYS = [key(number) for number in range(3)]
HERE = "tests.ucm.store.test_factory"


SHELVES: dict[str, dict[BlockKey, bytes]] = {}


class ShelfTier(ValueTier):
    """A third-party tier with its values in a dictionary."""

    class Options(TierOptions):
        shelf: str

    def __init__(self, options: Options, place: TierPlace) -> None:
        super().__init__("shelf", place)
        self.blocks = SHELVES.setdefault(options.shelf, {})

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        return [block in self.blocks for block in keys]

    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        if key not in self.blocks:
            raise BlockMissingError("no")
        return memoryview(self.blocks[key])

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        self.blocks[key] = b"".join(pieces)

    def remove(self, key: BlockKey, deadline: float) -> None:
        self.blocks.pop(key, None)


def not_a_store(*_: Any) -> object:
    return object()


@pytest.fixture
def shelf() -> Iterator[dict[BlockKey, bytes]]:
    yield SHELVES.setdefault("a", {})
    SHELVES.clear()


@pytest.mark.parametrize("pipeline", [f"{HERE}:ShelfTier|Posix", f"Posix|{HERE}:ShelfTier"])
def test_another_s_tier_stands_in_a_pipeline(config: StoreConfig, shelf: dict[BlockKey, bytes], pipeline: str) -> None:
    mixed = replace(config, pipeline=pipeline, tiers={f"{HERE}:ShelfTier": {"shelf": "a"}})
    with open_store(mixed, "n", ODD) as store:
        assert save(store, KEYS, ODD).failed == {}
        assert store.flush(60)
        assert set(shelf) == set(KEYS)
        for path in files(config.directories[0]):
            path.unlink()
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}
        assert set(store.stats()) == {"shelf", "posix"}


def test_another_s_tier_by_its_entry_point(
    config: StoreConfig, shelf: dict[BlockKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EntryPoint("Shelf", f"{HERE}:ShelfTier", ENTRY_POINT_GROUP)
    monkeypatch.setattr(factory, "entry_points", lambda **_: [found])
    mixed = replace(config, pipeline="Posix|Shelf", tiers={"Shelf": {"shelf": "a"}})
    with open_store(mixed, "n", ODD) as store:
        assert save(store, KEYS, ODD).failed == {}
        assert store.flush(60)
    assert set(shelf) == set(KEYS)


def test_a_damaged_value_is_removed_and_is_a_miss(config: StoreConfig, shelf: dict[BlockKey, bytes]) -> None:
    alone = replace(config, pipeline=f"{HERE}:ShelfTier", tiers={f"{HERE}:ShelfTier": {"shelf": "a"}})
    with open_store(alone, "n", ODD) as store:
        assert save(store, KEYS, ODD).failed == {}
        whole = shelf[KEYS[0]]
        shelf[KEYS[0]] = whole[:-1] + bytes([whole[-1] ^ 1])
        shelf[KEYS[1]] = whole
        assert {error.cause for error in fetch(store, KEYS[:2], ODD)[1].values()} == {"corrupt", "foreign"}
        assert set(shelf) == {KEYS[2]}
        assert store.stats()["shelf"].quarantined_blocks == 2


@pytest.mark.parametrize(
    ("tiers", "where"),
    [
        ({"Redis": {}}, "store: tiers: Redis"),
        ({f"{HERE}:ShelfTier": {"shelf": "a", "password": "hunter2"}}, f"{HERE}:ShelfTier: password"),
        ({f"{HERE}:ShelfTier": {"shelf": 1}}, f"{HERE}:ShelfTier: shelf"),
        ({f"{HERE}:ShelfTier": {}}, f"{HERE}:ShelfTier: shelf"),
    ],
)
def test_a_wrong_option_of_a_tier_is_named_and_not_shown(
    config: StoreConfig, tiers: dict[str, dict[str, object]], where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(replace(config, pipeline=f"Posix|{HERE}:ShelfTier", tiers=tiers), "n", ODD)
    assert caught.value.where.endswith(where)
    assert "hunter2" not in str(caught.value)


def test_another_s_store_stands_alone(config: StoreConfig) -> None:
    with open_store(replace(config, pipeline="ucm.store.factory:EmptyStore"), "n", ODD) as store:
        assert isinstance(store, EmptyStore)
    with pytest.raises(ConfigError, match="complete store"):
        open_store(replace(config, pipeline="ucm.store.factory:EmptyStore|Posix"), "n", ODD)


def test_a_back_end_by_its_entry_point(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("Mine", "ucm.store.factory:EmptyStore", ENTRY_POINT_GROUP)
    monkeypatch.setattr(factory, "entry_points", lambda **of: [found] if of == {"group": "ucm.stores"} else [])
    with open_store(replace(config, pipeline="Mine"), "n", ODD) as store:
        assert isinstance(store, EmptyStore)
    with pytest.raises(ConfigError) as caught:
        open_store(replace(config, pipeline="Theirs"), "n", ODD)
    assert "Posix, Dram, Cache, Redis, Mooncake, S3, Empty, Mine" in caught.value.fix


def test_the_empty_store_takes_everything_and_has_nothing() -> None:
    with open_store(StoreConfig(pipeline="Empty"), "n", ODD) as store:
        memories = filled(KEYS, ODD)
        assert set(store.save([memory.transfer() for memory in memories]).wait().done) == set(KEYS)
        assert store.lookup(KEYS) == [False] * 3
        assert store.lookup_on_prefix(KEYS) == 0
        task = store.load([memory.transfer() for memory in memories])
        assert task.check()
        assert {type(error) for error in task.wait().failed.values()} == {BlockMissingError}
        stats = store.stats()["empty"]
        assert (stats.lookups, stats.hits, stats.saved_blocks) == (4, 0, 3)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"pipeline": ""}, "pipeline"),
        ({"pipeline": "Posix|"}, "pipeline"),
        ({"pipeline": "Posix|Posix"}, "pipeline"),
        ({"pipeline": "Postfix"}, "pipeline"),
        ({"pipeline": "no.such.module:Store"}, "pipeline"),
        ({"pipeline": "ucm.store.factory:NoSuchClass"}, "pipeline"),
        ({"pipeline": ":"}, "pipeline"),
        ({"pipeline": f"{HERE}:not_a_store"}, "pipeline"),
        ({"directories": ()}, "directories"),
        ({"directories": ("/", "/")}, "directories"),
    ],
)
def test_a_wrong_option_is_named(config: StoreConfig, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(replace(config, **changes), "n", ODD)
    assert where in caught.value.where


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("posix_capacity_bytes", 0),
        ("dram_capacity_bytes", -1),
        ("dram_capacity_fraction", 0.0),
        ("dram_capacity_fraction", 1.5),
        ("load_threads", 0),
        ("save_threads", 0),
        ("save_nice", -1),
        ("save_nice", 20),
        ("save_queue_bytes", 0),
        ("rest_seconds", -1.0),
        ("lease_seconds", 1e12),
        ("lease_seconds", float("nan")),
        ("touch_seconds", 86_401.0),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: float) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**changes)
    assert name in caught.value.where
    assert str(value) in caught.value.what


@pytest.mark.parametrize(
    "name", ["", "A", "a b", "/a", "a/", "a//b", "..", "a/../b", ".a", "a/.b", "a+b", "ä", "a" * 201]
)
def test_what_cannot_be_a_namespace(config: StoreConfig, name: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        open_store(config, name, EVEN)


@pytest.mark.parametrize("name", ["a", "0", "a.b", "a/b-c_d/e.1", "_", "-", "a" * 200])
def test_what_can_be_a_namespace(config: StoreConfig, name: str) -> None:
    with open_store(config, name, EVEN) as store:
        assert save(store, KEYS, EVEN).failed == {}


def test_a_geometry_that_cannot_be_stored(config: StoreConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(config, "n", BlockGeometry((0,), bytes(16)))
    assert caught.value.where == "store: geometry"


def test_the_dram_tier_is_in_memory_and_our_own(memory: str, tmp_path: Path) -> None:
    config = StoreConfig(pipeline="Dram", dram_directory=memory, dram_capacity_bytes=1 << 20)
    with open_store(config, "n", EVEN) as store:
        assert store.stats()["dram"].capacity_bytes == 1 << 20
    assert Path(memory).stat().st_mode & 0o777 == 0o700
    system = os.statvfs(memory)
    with open_store(replace(config, dram_capacity_bytes=None, dram_capacity_fraction=0.5), "n", EVEN) as store:
        assert store.stats()["dram"].capacity_bytes == system.f_blocks * system.f_frsize // 2

    refused = {
        "is more than its tmpfs has": replace(config, dram_capacity_bytes=system.f_blocks * system.f_frsize + 1),
        "cannot be created": replace(config, dram_directory=f"{memory}/not/there"),
    }
    with pytest.raises(ConfigError) as caught:
        open_store(refused["is more than its tmpfs has"], "n", EVEN)
    assert caught.value.where == "store: dram_capacity"
    if not in_memory(str(tmp_path)):
        refused["not in a tmpfs"] = replace(config, dram_directory=str(tmp_path / "disk"))
    for words, wrong in refused.items():
        with pytest.raises(ConfigError, match=words):
            open_store(wrong, "n", EVEN)
    assert not (tmp_path / "disk").exists()
    Path(memory).chmod(0o755)
    with pytest.raises(ConfigError, match="this user's own, with mode 700"):
        open_store(config, "n", EVEN)
    link = Path(memory).with_name("link")
    link.symlink_to(memory)
    with pytest.raises(ConfigError, match="this user's own, with mode 700"):
        open_store(replace(config, dram_directory=str(link)), "n", EVEN)
