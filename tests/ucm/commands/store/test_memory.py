"""The commands on a Dram tier, whose blocks lie in segments."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.conftest import memory  # noqa: F401 - a fixture
from ucm.config import load_connector_config
from ucm.errors import ConfigError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.segment import directory_of, segments
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import EVEN, content, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer

KEYS = [key(number) for number in range(5)]


@pytest.fixture
def store(memory: str) -> StoreConfig:  # noqa: F811
    found = StoreConfig(pipeline="Dram", dram_directory=memory, dram_capacity_bytes=64 << 20, save_nice=0)
    with open_store(found, "tiny/r0", EVEN) as opened:
        save(opened, KEYS, EVEN)
    return found


@pytest.fixture
def file(store: StoreConfig, tmp_path: Path) -> Path:
    found = tmp_path / "ucm_config.yaml"
    text = f"store: {{pipeline: Dram, dram_directory: '{store.dram_directory}', dram_capacity: 64MiB}}\n"
    found.write_text(text, encoding="utf-8")
    return found


def test_they_count_list_and_verify_its_blocks(file: Path, ask: Callable[..., Answer]) -> None:
    (directory,) = ask("stat", "--json", "--config", file).data["directories"]
    (namespace,) = directory["namespaces"]
    assert (namespace["namespace"], namespace["blocks"], namespace["left_behind"]) == ("tiny/r0", 5, 0)
    assert namespace["bytes"] >= 5 * EVEN.nbytes
    listed = ask("ls", "--config", file, "--limit", 0).out
    assert all(block.hex() in listed for block in KEYS)
    answer = ask("verify", "--config", file)
    assert (answer.code, "Every block is as it was written" in answer.out) == (0, True)


def test_a_damaged_block_is_shown_and_taken_out(store: StoreConfig, file: Path, ask: Callable[..., Answer]) -> None:
    for segment in segments(Layout(store.dram_directory, "tiny/r0")):
        for block, number in segment.blocks():
            if block == KEYS[2]:
                segment.slot(number)[5000] ^= 1
    answer = ask("verify", "--config", file)
    assert (answer.code, "1 corrupt" in answer.out) == (1, True)
    assert ask("verify", "--quarantine", "--config", file).code == 1
    assert ask("verify", "--config", file).code == 0
    with open_store(store, "tiny/r0", EVEN) as opened:
        assert opened.lookup(KEYS) == [True, True, False, True, True]


def test_gc_deletes_blocks_and_their_memory(store: StoreConfig, file: Path, ask: Callable[..., Answer]) -> None:
    folder = Path(directory_of(Layout(store.dram_directory, "tiny/r0")))
    with open_store(store, "tiny/r0", EVEN) as opened:
        assert ask("gc", "--yes", "--older-than", "1h", "--config", file).code == 0
        assert opened.lookup(KEYS) == [True] * 5
        answer = ask("gc", "--yes", "--to", "0", "--config", file)
        assert (answer.code, "5 blocks among them" in answer.out) == (0, True)
        assert list(folder.iterdir()) == []
        assert opened.lookup(KEYS) == [False] * 5
        assert save(opened, KEYS, EVEN).failed == {}
        assert fetch(opened, KEYS, EVEN)[1] == {}
    assert ask("gc", "--yes", "--all", "--namespace", "*", "--config", file).code == 0
    assert not folder.parent.exists()


def test_gc_deletes_nothing_where_the_memory_tier_names_a_store_on_disk(
    tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    config = StoreConfig(directories=(str(root),), save_nice=0)
    with open_store(config, "tiny/r0", EVEN) as opened:
        save(opened, KEYS, EVEN)
    for path in root.glob("*/??/*"):
        os.utime(path, (0, 0))
    wrong = tmp_path / "ucm_config.yaml"
    wrong.write_text(f"store: {{pipeline: Dram, dram_directory: '{root}'}}\n", encoding="utf-8")
    for more in ((), ("--all", "--namespace", "*")):
        answer = ask("gc", "--yes", "--config", wrong, *more)
        assert (answer.code, "is not in a tmpfs" in answer.err) == (2, True)
    with open_store(config, "tiny/r0", EVEN) as opened:
        assert fetch(opened, KEYS, EVEN)[1] == {}


@pytest.mark.parametrize("places", [("{0}", "{0}"), ("{0}/kv", "{0}"), ("{0}", "{0}/tier"), ("{0}", "{1}/link")])
def test_tiers_that_share_a_directory_are_refused(
    places: tuple[str, str],
    memory: str,  # noqa: F811
    tmp_path: Path,
    ask: Callable[..., Answer],
) -> None:
    (tmp_path / "link").symlink_to(memory)
    posix, dram = (place.format(memory, tmp_path) for place in places)
    Path(posix).mkdir(parents=True, mode=0o700)
    config = StoreConfig(directories=(posix,), save_nice=0)
    with open_store(config, "tiny/r0", EVEN) as opened:
        save(opened, KEYS, EVEN)
    file = tmp_path / "ucm_config.yaml"
    written = {"store": {"pipeline": "Cache|Posix", "directories": posix, "dram_directory": dram}}
    file.write_text(json.dumps(written), encoding="utf-8")
    for command in ("gc", "stat"):
        answer = ask(command, "--config", file)
        assert (answer.code, "the Posix tier's directory" in answer.err) == (2, True)
    with pytest.raises(ConfigError, match="the Posix tier's directory") as caught:
        load_connector_config(written)
    assert "store.dram_directory" in str(caught.value)
    both = replace(config, pipeline="Cache|Posix", dram_directory=dram)
    with pytest.raises(ConfigError, match="the Posix tier's directory"):
        open_store(both, "tiny/r0", EVEN)
    with open_store(config, "tiny/r0", EVEN) as opened:
        assert fetch(opened, KEYS, EVEN)[1] == {}


def test_gc_spares_what_an_engine_writes_and_deletes_what_dead_ones_began(
    store: StoreConfig, file: Path, ask: Callable[..., Answer]
) -> None:
    layout = Layout(store.dram_directory, "tiny/r0")
    dead = Path(layout.temporary, "0123456789abcdef-1-1-left-0")
    dead.write_bytes(bytes(1000))
    os.utime(dead, (0, 0))
    with open_store(store, "tiny/r0", EVEN) as opened:
        more = [key(number) for number in range(100, 103)]
        assert save(opened, more, EVEN).failed == {}
        answer = ask("gc", "--json", "--to", "0", "--config", file)
        assert (answer.code, dead.exists()) == (0, False)
        done, failed = fetch(opened, more, EVEN)
        assert set(done) | set(failed) == set(more)
        assert {error.cause for error in failed.values()} <= {"missing"}
        assert all(done[block] == content(block, EVEN) for block in done)
