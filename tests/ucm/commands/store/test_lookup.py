"""``ucm store lookup``: the blocks of a prompt, tier by tier."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.commands.described import GEOMETRY, NAMESPACE, SIZE, TOKENS, described, facts, keys  # noqa: F401 - a fixture
from tests.ucm.hashing.stand_ins import ModelConfig, Request, VllmConfig
from ucm.commands.store.prompt import Prompt
from ucm.config.load import check_connector_config
from ucm.errors import UcmError
from ucm.hashing.block_keys import BlockKeys
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.testing.blocks import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ucm.commands.store.conftest import Answer, Remote

pytestmark = pytest.mark.usefixtures("described")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS), encoding="utf-8")
    return file


@pytest.fixture
def config(tmp_path: Path, memory: str) -> Path:
    """Two tiers: the disk has blocks 0, 1, 2 and 4, and the memory has the first."""
    root = tmp_path / "kv"
    root.mkdir()
    file = tmp_path / "ucm_config.yaml"
    places = f"directories: {root}, dram_directory: {memory}"
    file.write_text(f"store: {{pipeline: Cache|Posix, {places}}}\n", encoding="utf-8")
    disk, shared = StoreConfig(directories=(str(root),)), StoreConfig(pipeline="Cache", dram_directory=memory)
    for stored, wanted in ((disk, [*keys(3), keys(5)[4]]), (shared, keys(1))):
        with open_store(stored, f"{NAMESPACE}/g0", GEOMETRY) as store:
            assert save(store, wanted, GEOMETRY).failed == {}
    return file


def test_each_block_with_its_tiers(ask: Callable[..., Answer], config: Path, prompt: Path) -> None:
    answer = ask("lookup", "--config", config, "--model", "/m", "--tokens", prompt)
    assert answer.code == 0, answer.err
    lines = [line.split() for line in answer.out.splitlines()]
    assert answer.out.startswith(f"An engine with an empty KV cache would load {3 * SIZE} of {len(TOKENS)} tokens.\n")
    assert lines[2] == [f"{NAMESPACE}/g0:", "5", "blocks", "of", "16", "tokens"]
    first = [key.hex() for key in keys(5)]
    assert lines[4:] == [
        ["0-0", "0-15", "Cache,", "Posix", first[0]],
        ["1-2", "16-47", "Posix", first[1]],
        ["3-3", "48-63", "-", first[3]],
        ["4-4", "64-79", "Posix", first[4]],
    ]


def test_chunks_are_called_so(
    ask: Callable[..., Answer],
    config: Path,
    prompt: Path,
    described: dict[str, Any],  # noqa: F811 - the fixture
) -> None:
    """Whoever reads of blocks of 32 tokens looks for the wrong setting."""
    (stored,) = described["facts"].stored
    chunks = replace(stored, group=replace(stored.group, chunk_blocks=2))
    described["facts"] = replace(described["facts"], stored=(chunks,))
    answer = ask("lookup", "--config", config, "--model", "/m", "--tokens", prompt)
    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[2] == [f"{NAMESPACE}/g0:", "2", "chunks", "of", "32", "tokens"]
    assert lines[3][:2] == ["chunks", "tokens"]


def test_for_programs(ask: Callable[..., Answer], config: Path, prompt: Path) -> None:
    data = ask("lookup", "--json", "--config", config, "--model", "/m", "--tokens", prompt).data
    assert (data["tokens"], data["found_tokens"]) == (len(TOKENS), 3 * SIZE)
    (group,) = data["groups"]
    assert (group["namespace"], group["block_tokens"], group["silent"]) == (f"{NAMESPACE}/g0", SIZE, {})
    assert group["units"] == "blocks"
    expected: list[dict[str, Any]] = [
        {"key": key.hex(), "tiers": tiers}
        for key, tiers in zip(keys(5), [["Cache", "Posix"], ["Posix"], ["Posix"], [], ["Posix"]], strict=True)
    ]
    assert group["blocks"] == expected


def test_a_prompt_without_a_whole_block(ask: Callable[..., Answer], config: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.json"
    file.write_text("[1]", encoding="utf-8")
    answer = ask("lookup", "--config", config, "--model", "/m", "--tokens", file)
    assert (answer.code, answer.out.splitlines()[0].endswith("would load 0 of 1 token.")) == (0, True)


def below_the_disk(config: Path, remote: Remote, **others: object) -> StoreConfig:
    """Configure a server below the directory of `config`; return the configuration of the server alone."""
    tiers = {remote.name: {**remote.options, **others}}
    text = {"pipeline": f"Posix|{remote.name}", "directories": str(config.parent / "kv"), "tiers": tiers}
    config.write_text(json.dumps({"store": text}), encoding="utf-8")
    return StoreConfig(pipeline=remote.name, tiers=tiers, save_nice=0)


def test_blocks_on_a_server(ask: Callable[..., Answer], config: Path, remote: Remote, prompt: Path) -> None:
    with open_store(below_the_disk(config, remote), f"{NAMESPACE}/g0", GEOMETRY) as store:
        assert save(store, keys(5)[2:4], GEOMETRY).failed == {}
    answer = ask("lookup", "--config", config, "--model", "/m", "--tokens", prompt)
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"An engine with an empty KV cache would load {5 * SIZE} of {len(TOKENS)} tokens.\n")
    first = [key.hex() for key in keys(5)]
    assert [line.split() for line in answer.out.splitlines()[4:]] == [
        ["0-1", "0-31", "Posix", first[0]],
        ["2-2", "32-47", "Posix,", remote.name, first[2]],
        ["3-3", "48-63", remote.name, first[3]],
        ["4-4", "64-79", "Posix", first[4]],
    ]


def test_a_tier_that_does_not_answer_is_named(
    ask: Callable[..., Answer], config: Path, remote: Remote, prompt: Path
) -> None:
    below_the_disk(config, remote, timeout=5.0, **remote.unanswered)
    answer = ask("lookup", "--config", config, "--model", "/m", "--tokens", prompt)
    assert answer.code == 1
    assert f"  {remote.name} does not answer: lookup.unavailable\n" in answer.out
    assert f"would load {3 * SIZE} of" in answer.out


def loaded(count: int = len(TOKENS), *windows: int | None, **settings: Any) -> int:
    """The tokens of a prompt that an engine with these settings would load."""
    config, _ = check_connector_config(settings)
    found: int = Prompt(config, facts(*windows), TOKENS[:count]).lookup()["found_tokens"]
    return found


def test_what_an_engine_would_load_depends_on_its_settings(config: Path) -> None:
    store = {"directories": str(config.parent / "kv")}
    assert loaded(store=store) == 3 * SIZE
    assert loaded(3 * SIZE, store=store) == 2 * SIZE, "one token at least is computed"
    assert loaded(0, store=store) == 0
    assert loaded(store=store, connector="mock", hit_ratio=0.5) == 2 * SIZE
    assert loaded(store=store, min_hit_tokens=4 * SIZE) == 0


def test_every_group_of_layers_must_have_its_blocks(config: Path) -> None:
    directory = str(config.parent / "kv")
    windows, store = (None, SIZE + 1), {"directories": directory}
    assert loaded(len(TOKENS), *windows, store=store) == 0
    with open_store(StoreConfig(directories=(directory,)), f"{NAMESPACE}/g1", GEOMETRY) as windowed:
        save(windowed, keys(3)[2:], GEOMETRY)
    assert loaded(len(TOKENS), *windows, store=store) == 3 * SIZE, "a window of a block needs the last block alone"


def test_blocks_are_named_as_the_scheduler_side_names_them(tmp_path: Path) -> None:
    settings, _ = check_connector_config({"store": {"directories": str(tmp_path)}})
    scheduler = BlockKeys(VllmConfig(ModelConfig("llama")), b"seed")
    for salt in ("", "salt"):
        (group,) = Prompt(settings, facts(), TOKENS, salt).lookup()["groups"]
        named = scheduler.of(Request("r", TOKENS, cache_salt=salt or None), SIZE) or []
        assert [block["key"] for block in group["blocks"]] == [key.hex() for key in named]
    with pytest.raises(UcmError, match="would not cache"):
        Prompt(settings, facts(), [-1] * SIZE).lookup()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tokens", "{}", "is not a JSON list of token ids"),
        ("--tokens", "nothing", "cannot read the file with token ids"),
        ("--prompt", "hello", "cannot tokenize the prompt"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_error(
    ask: Callable[..., Answer], config: Path, tmp_path: Path, option: str, value: str, said: str
) -> None:
    if option == "--tokens":
        (tmp_path / "tokens").write_text(value, encoding="utf-8")
        value = str(tmp_path / "tokens")
    answer = ask("lookup", "--config", config, "--model", "/m", option, value)
    assert (answer.code, answer.err.count("ucm: ")) == (2, 1)
    assert said in answer.err


def test_a_prompt_must_be_given(ask: Callable[..., Answer], config: Path) -> None:
    answer = ask("lookup", "--config", config, "--model", "/m")
    assert answer.code == 2
    assert "--prompt --tokens is required" in answer.err
