"""A short campaign passes on our store, and fails on a careless one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.campaign import careless, damaged, kill, leases
from tests.campaign.__main__ import parts_here, run_part
from tests.campaign.careless import CARELESS
from tests.campaign.damage import DAMAGES, block_files, damage_memory, damage_store
from tests.campaign.figures import MUST_BE_ZERO, Figures, table
from tests.campaign.scene import Stage, folders
from ucm.store.inspection import check_block, stored_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20240607


@pytest.mark.parametrize("part", parts_here())
def test_what_must_be_zero_is_zero(part: str) -> None:
    figures = run_part(part, 20, SEED)
    print(table({part: figures}))
    assert figures.trials
    assert figures.loaded
    assert not figures.failed, figures


def test_a_store_that_writes_blocks_in_place_is_found_out() -> None:
    with folders() as (disk, _):
        rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
        figures = kill.run(30, Stage(rng, disk, None, options={"pipeline": CARELESS}))
    assert figures.wrong_bytes
    assert figures.failed


def test_a_store_without_checksums_is_found_out() -> None:
    with folders() as (disk, _):
        rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
        figures = damaged.run(40, Stage(rng, disk, None, options={"pipeline": CARELESS}))
    assert figures.wrong_bytes
    assert figures.failed


@pytest.mark.parametrize(
    ("tier", "count"), [("ForgetfulTier", "lost"), ("EndlessTier", "immortal"), ("RoomyTier", "oversized")]
)
def test_a_store_that_does_not_keep_its_leases_or_its_capacity_is_found_out(tier: str, count: str) -> None:
    with folders() as (disk, _):
        rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
        figures = leases.run(24, Stage(rng, disk, None, options={"pipeline": f"{careless.__name__}:{tier}"}))
    assert getattr(figures, count)


@pytest.mark.parametrize("name", MUST_BE_ZERO)
def test_each_fault_counts(name: str) -> None:
    figures = Figures()
    setattr(figures, name, 1)
    assert figures.failed
    assert not Figures(trials=1, refused=1, left_by_faults=1).failed


def test_the_table_adds_up() -> None:
    lines = table({"one": Figures(trials=1200, notes=["so"]), "two": Figures(trials=34, lost=1)}).splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["one", "1,200", "0"],
        ["two", "34", "0"],
        ["in", "all", "1,234"],
    ]
    assert lines[4:] == ["one: so"]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with folders() as (disk, memory):
        if memory is None:
            pytest.skip("there is no /dev/shm for the Dram tier")
        yield Stage(random.Random(SEED), disk, memory)  # noqa: S311 - it decides what is tested


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damage_in_memory_is_noticed(how: str, stage: Stage) -> None:
    rng = stage.rng
    scene = replace(stage, options={"pipeline": "Cache|Posix"}).scene(12)
    assert damaged.fill(scene).committed == 12
    root = Path(scene.config.dram_directory)
    keys = [block.key for block in stored_blocks(str(root))]
    assert len(keys) == 12
    chosen = rng.sample(keys, 3)
    assert sorted(damage_memory(root, rng, lambda key: how if key in chosen else None)) == sorted(chosen)
    wrong = {block.key for block in stored_blocks(str(root)) if check_block(block) is not None}
    assert wrong == (set() if how == "delete" else set(chosen))
    gone = set(chosen) if how == "delete" else set()
    assert {block.key for block in stored_blocks(str(root))} == set(keys) - gone


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damage_changes_what_it_says(how: str, tmp_path: Path) -> None:
    rng = random.Random(SEED)  # noqa: S311 - it decides what is tested
    scene = Stage(rng, tmp_path, None).scene(12)
    assert damaged.fill(scene).committed == 12
    for root in map(type(tmp_path), scene.roots):
        before = {block.path: block.path.read_bytes() for block in block_files(root)}
        harmed = {block.path for block in damage_store(root, how, rng, limit=3)}
        assert len(harmed) == min(3, len(before))
        for path, content in before.items():
            now = path.read_bytes() if path.exists() else b""
            assert (now != content) == (path in harmed)
