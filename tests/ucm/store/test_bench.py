"""The store benchmark measures what it claims, and leaves nothing behind."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.bench.store_figures import LayeredWorkload, SideFigures, WideRun, measured
from ucm.store.bench import Figures, Run, beside, for_bench
from ucm.testing.blocks import files

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig

SMALL = LayeredWorkload(blocks=4, block_nbytes=15_000, rounds=3, slices=3)


@pytest.mark.parametrize("pipeline", ["Posix", "Dram", "Cache|Posix"])
@pytest.mark.parametrize("wide", [False, True], ids=["the command's", "UCM's own"])
def test_every_operation_is_measured_in_every_round(
    config: StoreConfig, memory: str, pipeline: str, wide: bool
) -> None:
    chosen = replace(config, pipeline=pipeline, dram_directory=memory, dram_capacity_bytes=1 << 24, load_threads=3)
    heard: list[str] = []
    figures = SideFigures(SMALL)
    with ExitStack() as stack:
        (WideRun if wide else Run)(for_bench(chosen), SMALL, stack).measure(figures, heard.append)
    expected = ["memcpy", "write", "save", "read hot", "load hot"]
    if pipeline == "Posix":
        expected += ["read cold", "load cold"]
    if wide:
        expected += ["staged", "write checked x2"]
        expected += [name.replace("load", "read") + " checked x3" for name in expected if name.startswith("load")]
    assert sorted(figures.seconds) == sorted(expected)
    assert all(len(seconds) == SMALL.rounds for seconds in figures.seconds.values())
    assert {operation: len(used) for operation, used in figures.processor.items()} == dict.fromkeys(
        expected, SMALL.rounds
    )
    assert min(map(figures.processor_per_gb, expected)) >= 0
    assert sorted(heard) == sorted(SMALL.rounds * expected)
    compared = beside(chosen)
    assert set(compared) >= {"save", "load hot"}
    for operation, plain in compared.items():
        if operation in figures.seconds:
            assert min(figures.rate(operation)) > 0
            assert min(figures.ratio(operation, plain)) > 0
    for root in (config.directories[0], memory):
        assert not Path(root).exists() or files(root) == []


def test_files_may_be_left_for_the_caller_to_delete(config: StoreConfig, memory: str) -> None:
    """They are empty, and nothing lies where the store has no tier."""
    Path(memory).mkdir(parents=True, exist_ok=True)
    chosen = replace(for_bench(config), pipeline="Posix", dram_directory=memory)
    for _ in range(2):
        measured(chosen, SMALL, tidy=False)
    left = files(config.directories[0])
    assert len(left) == 2 * 3 * SMALL.rounds * SMALL.blocks, "a round writes the blocks, and plain files twice"
    assert {path.stat().st_size for path in left} == {0}
    assert list(Path(memory).iterdir()) == []


def test_sides_are_merged() -> None:
    one, other = (SideFigures(SMALL, {"save": [seconds]}, processor={"save": [seconds / 2]}) for seconds in (2.0, 4.0))
    one.merge(other)
    one.merge(other, "chunks ")
    assert one.seconds == {"save": [2.0, 4.0], "chunks save": [4.0]}
    assert one.processor == {"save": [1.0, 2.0], "chunks save": [2.0]}
    assert one.processor_per_gb("save") == pytest.approx(1.5 / SMALL.nbytes * 1e9)
    assert one.without(1).seconds == {"save": [4.0], "chunks save": []}
    assert one.without(1).processor == {"save": [2.0], "chunks save": []}


def test_ratios_are_taken_within_a_round() -> None:
    figures = Figures(SMALL, {"load hot": [2.0, 1.0, 4.0], "read hot": [1.0, 1.0, 3.0]})
    assert figures.ratio("load hot", "read hot") == (1.0, 0.75)
