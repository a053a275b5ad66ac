"""The directories that a configuration selects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.ucm.config.conftest import UPSTREAM
from ucm.config import load_connector_config
from ucm.config.load import read_store_settings
from ucm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.commands.store.conftest import Answer, Kept


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["pipeline", "nfs", "pooled_dram", "developer"])
def test_the_same_as_the_connector_understands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the connector, reading the configuration creates no directories."""
    monkeypatch.setenv("KV", str(tmp_path / "kv"))
    monkeypatch.chdir(tmp_path)
    found = read_store_settings(UPSTREAM / f"{name}.yaml")
    assert list(tmp_path.iterdir()) == []
    assert found == load_connector_config({"UCM_CONFIG_FILE": str(UPSTREAM / f"{name}.yaml")}).store


@pytest.mark.parametrize("name", ["compress", "mooncake", "ds3fs"])
def test_what_the_connector_does_not_understand(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV", str(tmp_path / "kv"))
    file = UPSTREAM / f"{name}.yaml"
    with pytest.raises(ConfigError) as its:
        load_connector_config({"UCM_CONFIG_FILE": str(file)})
    with pytest.raises(ConfigError, match=re.escape(its.value.what)):
        read_store_settings(file)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("store: {directories: [kv], pipelines: Posix}", "'pipelines' is not a setting"),
        ("store: {pipeline: Posix}", "needs a directory"),
        ("stores: {}", "'stores' is not a setting"),
        ("", "no store is configured"),
        ("store: {pipeline: Empty}", "the store 'Empty' has no directories that this command can read"),
        ("store: {pipeline: 'a.b:C'}", "the store 'a.b:C' has no directories that this command can read"),
        ("store: {directories: ['$NOWHERE_AT_ALL/kv']}", "NOWHERE_AT_ALL is not set"),
    ],
)
def test_a_configuration_that_cannot_be_used(text: str, what: str, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    answer = ask("stat", "--config", write(tmp_path / "c.yaml", text))
    assert answer.code == 2
    assert what in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_configuration_that_is_not_there(tmp_path: Path, ask: Callable[..., Answer]) -> None:
    assert ask("stat", "--config", tmp_path / "c.yaml").code == 2


def test_tiers(kept: Kept, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    file = write(tmp_path / "c.yaml", f"store: {{directories: ['{kept.root}']}}")
    data = ask("stat", "--json", "--tier", "posix", "--config", file).data
    assert data["directories"][0]["blocks"] == 14
    answer = ask("stat", "--tier", "dram", "--config", file)
    assert (answer.code, "this store has no dram tier" in answer.err) == (2, True)
    answer = ask("stat", "--tier", "posix", "--directory", kept.root)
    assert (answer.code, "--tier chooses among the tiers of a configuration" in answer.err) == (2, True)


def test_the_dram_tier_s_capacity_is_a_share_of_its_memory(
    kept: Kept, tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    file = write(
        tmp_path / "c.yaml",
        f"store: {{pipeline: Dram, dram_directory: '{kept.root}', dram_capacity_fraction: 0.5}}",
    )
    data = ask("stat", "--json", "--config", file).data
    (directory,) = data["directories"]
    assert data["tiers"][0]["capacity_bytes"] == directory["total_bytes"] // 2
    text = f"store: {{pipeline: Dram, dram_directory: '{kept.root}', dram_capacity: 3MiB}}"
    data = ask("stat", "--json", "--config", write(file, text)).data
    assert data["tiers"][0]["capacity_bytes"] == 3 << 20


def test_several_directories_and_patterns(kept: Kept, tmp_path: Path, ask: Callable[..., Answer]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    data = ask(
        *("stat", "--json", "--directory", kept.root, "--directory", other, "--directory", other),
        *("--namespace", "tin?-*", "--namespace", "nobody"),
    ).data
    assert [(one["directory"], one["blocks"]) for one in data["directories"]] == [(str(kept.root), 4), (str(other), 0)]
    answer = ask("stat", "--directory", other, "--namespace", "x")
    assert "the store has no namespaces" in answer.err
