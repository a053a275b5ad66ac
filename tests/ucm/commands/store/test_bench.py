"""`ucm store bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.commands.store.conftest import BIG
from ucm.commands.store import bench as module
from ucm.store.base import StoreUnavailableError
from ucm.store.bench import Figures, Workload
from ucm.store.config import StoreConfig
from ucm.store.posix.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ucm.commands.store.conftest import Answer, Kept
    from ucm.store.advice import Comparison

QUICK = ("--blocks", 2, "--block", "16kB", "--rounds", 2)


def test_figures_and_shares(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    answer = ask("bench", "--directory", tmp_path, *QUICK)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == "Posix: 2 blocks of 15.6 KiB, 2 rounds"
    measured = {line.split("  ")[0] for line in lines[2 : lines.index("")]}
    assert {"memcpy", "write", "save", "read hot", "load hot", "read cold", "load cold"} <= measured
    assert any(line.startswith("save ") and line.endswith("% of a plain write") for line in lines)
    compression = lines[lines.index("") + 1 :]
    assert [line.split("  ")[0] for line in compression[:2]] == ["compression", "Posix"]
    assert compression[2].startswith("Sample: generated numbers in bfloat16")
    assert compression[3].startswith("Posix: ")
    assert len(compression) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["USED"]


def test_for_a_program(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    data = ask("bench", "--json", "--directory", tmp_path, *QUICK).data
    assert data["workload"] == {"blocks": 2, "slices": 16, "slice_nbytes": 1000, "rounds": 2}
    assert all(len(seconds) == 2 for seconds in data["seconds"].values())
    assert list(data["shares"]) == ["save", "load hot", "load cold"]
    (posix,) = data["compression"]["tiers"]
    assert (posix["tier"], posix["problem"]) == ("Posix", None)
    assert {len(seconds) for seconds in posix["seconds"].values()} == {2}
    assert min(posix["compress"], posix["decompress"], posix["ratio"], *posix["gains"]) > 0
    assert "loading a GB takes" in posix["advice"]


def test_a_sample_of_another_store(kept: Kept, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    store = tmp_path / "new"
    store.mkdir(mode=0o700)
    answer = ask("bench", "--json", "--directory", store, *QUICK, "--sample", kept.root)
    assert answer.data["compression"]["sample"].endswith(f"of the blocks in {Layout(str(kept.root), BIG).base}")
    answer = ask("bench", "--directory", store, *QUICK, "--sample", store)
    assert (answer.code, "there are no blocks" in answer.err) == (2, True)


def test_what_was_not_measured_has_no_advice(
    tmp_path: Path, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: StoreConfig, tier: str, *_: object, **__: object) -> Comparison:
        raise StoreUnavailableError(f"{tier} of {config.pipeline} is broken")

    monkeypatch.setattr(module, "compare", refuse)
    answer = ask("bench", "--directory", tmp_path, *QUICK)
    assert answer.out.splitlines()[-1] == "Posix: compression was not measured: Posix of Posix is broken"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr("ucm.store.compression._local.zstandard", None)
    (posix,) = ask("bench", "--json", "--directory", tmp_path, *QUICK).data["compression"]["tiers"]
    assert set(posix) == {"tier", "problem"}
    assert posix["problem"].startswith("compression needs zstandard")


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
        (("--block", "100B"), "give it a multiple of 16 bytes"),
        (("--block", "0"), "give it a multiple of 16 bytes"),
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
