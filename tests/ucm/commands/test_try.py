"""`ucm try` on real stores; `tests/e2e/test_try.py` compares it with a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.commands.described import GEOMETRY, NAMESPACE, described, facts  # noqa: F401 - a fixture
from ucm import cli
from ucm.commands.try_stores import round_trip
from ucm.store.base import TransferTask
from ucm.store.config import StoreConfig
from ucm.store.factory import EmptyStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockTransfer, Task


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    return directory


def test_a_round_trip_leaves_nothing_behind(root: Path) -> None:
    there = sorted(root.rglob("*"))
    problems, times = round_trip(StoreConfig(directories=(str(root),)), GEOMETRY, 3)
    assert problems == []
    assert min(times["saved"], times["loaded"]) > 0
    assert [path for path in sorted(root.rglob("*")) if path.name != "USED"] == there


def test_a_tier_of_others_is_left_empty_as_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "store")
    name = "ucm_shelf:ShelfTier"
    config = StoreConfig(pipeline=f"Posix|{name}", directories=(str(root),), tiers={name: {"path": str(root)}})
    assert round_trip(config, GEOMETRY, 3)[0] == []
    assert [path for path in root.glob("ucm-try*/*") if path.is_file()] == []


class ForgetfulStore(EmptyStore):
    """Accepts every block, and reports loads that it did not do."""

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        task = TransferTask(len(blocks))
        for block in blocks:
            task.succeeded(block.key, "empty", GEOMETRY.nbytes)
        return task


def test_what_goes_wrong_is_said(root: Path) -> None:
    problems, times = round_trip(StoreConfig(directories=(str(root),), save_queue_bytes=1), GEOMETRY, 8)
    assert list(times) == ["saved"]
    assert problems
    assert all(problem.startswith("save: ") for problem in problems)
    forgetful = f"{__name__}:{ForgetfulStore.__name__}"
    problems, _ = round_trip(StoreConfig(pipeline=forgetful), GEOMETRY, 8)
    assert problems == ["load: the bytes are not those that were saved, and no checksum failed"]


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["try", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def file(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("VLLM_LOGGING_LEVEL", "UNIFIED_CACHE_LOG_LEVEL"):
        monkeypatch.setenv(name, "INFO")  # the command sets them only if unset
    written = tmp_path / "ucm_config.yaml"
    written.write_text(f"store: {{directories: {root}}}\n", encoding="utf-8")
    return written


def test_the_command_tells_all(
    capsys: pytest.CaptureFixture[str],
    described: dict[str, Any],  # noqa: F811 - the fixture
    file: Path,
) -> None:
    described["facts"] = facts(None, 17)
    arguments = ("--blocks", 2, "--engine-args", '{"dtype": "float16"}')
    code, out, _ = run(capsys, "--config", file, "--model", "/m", *arguments)
    assert code == 0
    for said in ("connector    direct", f"namespace    {NAMESPACE}", "device       cpu", "store        Posix"):
        assert said in out
    assert f"group 1      blocks of 16 tokens, 8,202 bytes; {NAMESPACE}/g1" in out
    assert out.count("2 blocks, 16,404 bytes: intact, saved in ") == 2
    assert described["asked"] == (Path("/m"), {"UCM_CONFIG_FILE": str(file)}, {"dtype": "float16"})


@pytest.mark.usefixtures("described")
def test_a_failed_round_trip_is_an_exit_code(capsys: pytest.CaptureFixture[str], file: Path, root: Path) -> None:
    file.write_text(f"store: {{directories: {root}, save_queue: 1B}}\n", encoding="utf-8")
    code, out, _ = run(capsys, "--config", file, "--model", "/m")
    assert code == 1
    assert "FAILED" in out


def test_wrong_settings_or_a_wrong_model_are_one_error(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    code, _, err = run(capsys, "--config", tmp_path / "no.yaml", "--model", tmp_path)
    assert (code, err.count("ucm: ")) == (2, 1)
    assert "no.yaml" in err
    code, _, err = run(capsys, "--config", file, "--model", tmp_path)
    assert (code, err.count("ucm: ")) == (2, 1)
    assert "config.json cannot be read" in err
    for option, value, said in (("--engine-args", "[]", "write a JSON object"), ("--blocks", "0", "at least 1")):
        with pytest.raises(SystemExit) as ended:
            run(capsys, "--config", file, "--model", tmp_path, option, value)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("slices", [0, 2])
def test_ranks_and_slices_of_heads_are_not_tried(
    capsys: pytest.CaptureFixture[str],
    described: dict[str, Any],  # noqa: F811 - the fixture
    file: Path,
    slices: int,
) -> None:
    (stored,) = facts().stored
    ranks = (f"{NAMESPACE}/g0-0", f"{NAMESPACE}/g0-1")
    of_two = replace(stored, group=replace(stored.group, slices=slices), ranks=ranks)
    described["facts"] = replace(facts(), stored=(of_two,))
    code, _, err = run(capsys, "--config", file, "--model", "/m")
    assert (code, "only whole blocks of one rank can be tried" in err) == (2, True)


def test_without_vllm_it_says_so(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    code, _, err = run(capsys, "--config", file, "--model", tmp_path)
    assert (code, "vLLM cannot be imported" in err) == (2, True)
