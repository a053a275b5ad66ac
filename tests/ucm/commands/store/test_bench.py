"""`ucm store bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.commands.store import bench as module
from ucm.store.bench import Figures, Workload
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer

QUICK = ("--blocks", 2, "--block", "16kB", "--rounds", 2)


def test_figures_and_shares(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    answer = ask("bench", "--directory", tmp_path, *QUICK)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == "Posix: 2 blocks of 15.6 KiB, 2 rounds"
    measured = {line.split("  ")[0] for line in lines[2:]}
    assert {"memcpy", "write", "save", "read hot", "load hot", "read cold", "load cold"} <= measured
    assert any(line.startswith("save ") and line.endswith("% of a plain write") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["USED"]


def test_for_a_program(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    data = ask("bench", "--json", "--directory", tmp_path, *QUICK).data
    assert data["workload"] == {"blocks": 2, "block_nbytes": 16_000, "rounds": 2}
    assert all(len(seconds) == 2 for seconds in data["seconds"].values())
    assert list(data["shares"]) == ["save", "load hot", "load cold"]


def test_the_shares() -> None:
    plain = {"write": [0.9, 1.0], "read hot": [1.0, 1.7], "memcpy": [1.5, 1.3]}
    figures = Figures(Workload(rounds=2), {"save": [1.0, 1.1], "load hot": [2.0, 2.0], **plain})
    for pipeline, beside, percents in (
        ("Posix", ["write", "read hot"], ["90%", "68%"]),
        ("Dram", ["memcpy"] * 2, ["134%", "70%"]),  # a tier in memory is compared with memory
        ("Cache|Posix", ["memcpy"] * 2, ["134%", "70%"]),
    ):
        found = module._shares(StoreConfig(pipeline=pipeline), figures)
        assert [plain for plain, _ in found.values()] == beside
        assert [f"{share:.0%}" for _, share in found.values()] == percents


def test_a_dram_tier_that_was_not_there_is_gone_again(memory: str, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"store: {{pipeline: Dram, dram_directory: '{memory}'}}", encoding="utf-8")
    assert ask("bench", "--config", file, *QUICK).code == 0
    assert not Path(memory).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--blocks", 0), "--blocks: must be a whole number of at least 1"),
        (("--rounds", 0), "--rounds: must be a whole number of at least 1"),
        (("--block", "0"), "a block has no bytes"),
    ],
)
def test_nothing_to_measure(tmp_path: Path, ask: Callable[..., Answer], options: tuple[object, ...], said: str) -> None:
    answer = ask("bench", "--directory", tmp_path, *options)
    assert (answer.code, said in answer.err) == (2, True), answer.err


def test_a_directory_must_be_there(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    assert ask("bench", "--directory", tmp_path / "nowhere", *QUICK).code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_keeps_nothing_is_refused(ask: Callable[..., Answer], tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text("store: {pipeline: Empty}\n", encoding="utf-8")
    answer = ask("bench", "--config", file)
    assert (answer.code, "keeps nothing" in answer.err) == (2, True)
