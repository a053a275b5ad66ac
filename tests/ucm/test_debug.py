"""`ucm.debug` and `ucm try` on real stores; `tests/e2e/test_try.py` compares them with a real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.hashing.stand_ins import ModelConfig, Request, VllmConfig
from ucm import cli, debug
from ucm.api import ConfigError, RequestHasher, UcmError
from ucm.debug import DebugConnector, describe, open_connector
from ucm.hashing.block_keys import BlockKeys
from ucm.integration.vllm.connector.kv_cache import CacheGroup
from ucm.integration.vllm.weightless import EngineFacts, StoredGroup
from ucm.store.base import BlockGeometry, BlockKey, TransferTask
from ucm.store.factory import EmptyStore
from ucm.testing.blocks import save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucm.store.base import BlockTransfer, Task

NAMESPACE = "llama-0123"
GEOMETRY = BlockGeometry((4096, 4096, 10), b"of a test model!")
SIZE = 16
TOKENS = list(range(5 * SIZE + 3))


def facts(*windows: int | None) -> EngineFacts:
    """Return facts with one KV-cache group per window; None is full attention."""
    groups = [CacheGroup(index, SIZE, window, {}, ()) for index, window in enumerate(windows or (None,))]
    stored = tuple(
        StoredGroup(group, f"{NAMESPACE}/g{group.index}", GEOMETRY, (f"{NAMESPACE}/g{group.index}",))
        for group in groups
    )
    return EngineFacts(NAMESPACE, "cpu", stored, RequestHasher(b"seed"))


def keys(count: int) -> list[BlockKey]:
    hashes = RequestHasher(b"seed").generate_block_hashes(TOKENS, SIZE)
    return [BlockKey(one) for one in hashes[:count]]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace vLLM's description of the model; record the arguments."""
    about: dict[str, Any] = {"facts": facts()}

    def describe_engine(
        model: Path, extra_config: Mapping[str, Any], engine_args: Mapping[str, Any] | None = None
    ) -> EngineFacts:
        about["asked"] = model, extra_config, engine_args
        found: EngineFacts = about["facts"]
        return found

    monkeypatch.setattr(debug, "describe_engine", describe_engine)
    return about


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    return directory


@pytest.fixture
def connector(described: dict[str, Any], root: Path) -> Iterator[DebugConnector]:
    with open_connector({"store": {"directories": str(root)}}, model="/models/llama") as opened:
        yield opened


def test_it_is_opened_with_what_an_engine_is_given(described: dict[str, Any], root: Path, tmp_path: Path) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(f"connector: layerwise\nstore: {{directories: {root}}}\n", encoding="utf-8")
    with open_connector(file, "/models/llama", engine_args={"dtype": "float16"}) as opened:
        assert opened.settings.connector == "layerwise"
        assert opened.namespace == NAMESPACE
        assert list(opened.tiers) == ["posix"]
    assert described["asked"] == (Path("/models/llama"), {"UCM_CONFIG_FILE": str(file)}, {"dtype": "float16"})


def test_a_lookup_finds_what_an_engine_would_load(connector: DebugConnector) -> None:
    assert connector.lookup(TOKENS).found_tokens == 0
    assert connector.lookup([]).hit_rate == 0.0
    save(connector.store, [*keys(3), keys(5)[4]], GEOMETRY)
    found = connector.lookup(TOKENS)
    assert (found.tokens, found.found_tokens) == (len(TOKENS), 3 * SIZE)
    assert found.missing_key == keys(4)[3].hex()
    assert found.hit_rate == pytest.approx(48 / 83)
    assert connector.lookup(TOKENS[: 3 * SIZE]).found_tokens == 2 * SIZE, "one token at least is computed"
    assert connector.lookup(TOKENS[: 3 * SIZE]).missing_key == ""
    assert found.seconds > 0


def test_a_lookup_obeys_the_settings(described: dict[str, Any], root: Path) -> None:
    store = {"directories": str(root)}
    with open_connector({"store": store, "connector": "mock", "hit_ratio": 0.5}, "/m") as capped:
        save(capped.store, keys(5), GEOMETRY)
        assert capped.lookup(TOKENS).found_tokens == 2 * SIZE
    with open_connector({"store": store, "min_hit_tokens": 6 * SIZE}, "/m") as picky:
        assert picky.lookup(TOKENS).found_tokens == 0


def test_every_group_of_layers_must_have_its_blocks(described: dict[str, Any], root: Path) -> None:
    described["facts"] = facts(None, SIZE + 1)
    with open_connector({"store": {"directories": str(root)}}, "/m") as opened:
        full, windowed = opened.stores
        save(full, keys(5), GEOMETRY)
        assert opened.lookup(TOKENS).found_tokens == 0
        save(windowed, keys(4)[3:], GEOMETRY)
        assert opened.lookup(TOKENS).found_tokens == 4 * SIZE, "a window of a block needs the last block alone"
        assert [trip.problems for trip in opened.roundtrip(2)] == [(), ()]


def test_the_first_missing_block_is_one_that_is_needed(described: dict[str, Any], root: Path) -> None:
    """Of a window or of recurrent layers, which may come first, most blocks are never missed."""
    described["facts"] = facts(SIZE + 1, None)
    with open_connector({"store": {"directories": str(root)}}, "/m") as opened:
        windowed, full = opened.stores
        save(windowed, keys(3)[2:], GEOMETRY)
        save(full, keys(3), GEOMETRY)
        found = opened.lookup(TOKENS)
    assert (found.found_tokens, found.missing_key) == (3 * SIZE, keys(4)[3].hex())


def test_a_round_trip_leaves_nothing_behind(connector: DebugConnector, root: Path) -> None:
    there = sorted(root.rglob("*"))
    (trip,) = connector.roundtrip(blocks=3, loads=4)
    assert trip.problems == ()
    assert (trip.blocks, trip.nbytes, trip.tiers) == (3, 3 * GEOMETRY.nbytes, ("posix",))
    assert len(trip.load_seconds) == 4
    assert [path for path in sorted(root.rglob("*")) if path.name != "USED"] == [
        path for path in there if path.name != "USED"
    ]
    with pytest.raises(ValueError, match="at least one"):
        connector.roundtrip(0)


def test_a_tier_of_others_is_left_empty_as_well(
    described: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "store")
    name = "ucm_shelf:ShelfTier"
    store = {"pipeline": f"Posix|{name}", "directories": str(root), "tiers": {name: {"path": str(root)}}}
    with open_connector({"store": store}, "/m") as opened:
        assert opened.roundtrip()[0].problems == ()
        assert list(opened.tiers) == ["posix", "shelf"]
    assert [path for path in root.glob("ucm-try*/*") if path.is_file()] == []


class ForgetfulStore(EmptyStore):
    """Accepts every block, and reports loads that it did not do."""

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        task = TransferTask(len(blocks))
        for block in blocks:
            task.succeeded(block.key, "empty", GEOMETRY.nbytes)
        return task


def test_what_goes_wrong_is_said(described: dict[str, Any], root: Path) -> None:
    with open_connector({"store": {"directories": str(root), "save_queue": "1B"}}, "/m") as opened:
        (trip,) = opened.roundtrip()
    assert trip.load_seconds == ()
    assert trip.problems
    assert all(problem.startswith("save: ") for problem in trip.problems)
    with open_connector({"store": {"pipeline": "tests.ucm.test_debug:ForgetfulStore"}}, "/m") as opened:
        (trip,) = opened.roundtrip()
    assert trip.problems == ("load: the bytes are not those that were saved, and no checksum failed",)


def test_blocks_are_named_as_the_scheduler_side_names_them() -> None:
    config: Any = VllmConfig(ModelConfig("llama"))
    assert BlockKeys(config, b"seed").of(Request("r", TOKENS), SIZE) == debug.block_keys(facts(), TOKENS, SIZE)
    of_tenant = BlockKeys(config, b"seed").of(Request("r", TOKENS, cache_salt="salt"), SIZE)
    assert of_tenant == debug.block_keys(facts(), TOKENS, SIZE, "salt")
    with pytest.raises(UcmError, match="would not cache"):
        debug.block_keys(facts(), [-1] * SIZE, SIZE)


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
    capsys: pytest.CaptureFixture[str], described: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "--config", file, "--model", "/m", "--blocks", 2)
    assert code == 0
    for said in ("connector    direct", f"namespace    {NAMESPACE}", "tier         posix", "100 lookups", "10 loads"):
        assert said in out
    assert "0 of 65 tokens of the test prompt found: 0%" in out
    assert "2 blocks, 16,404 bytes: intact, from posix" in out
    with open_connector(file, "/m") as opened:
        save(opened.store, keys(4), GEOMETRY)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS), encoding="utf-8")
    arguments = ("--engine-args", '{"dtype": "float16"}')
    code, out, _ = run(capsys, "--config", file, "--model", "/m", "--tokens", tokens, *arguments)
    assert f"64 of {len(TOKENS)} tokens of the prompt found: 77%" in out
    assert described["asked"][2] == {"dtype": "float16"}


def test_a_failed_round_trip_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], described: dict[str, Any], file: Path, root: Path
) -> None:
    file.write_text(f"store: {{directories: {root}, save_queue: 1B}}\n", encoding="utf-8")
    code, out, _ = run(capsys, "--config", file, "--model", "/m")
    assert code == 1
    assert "FAILED" in out


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "{}"), "is not a JSON list of token ids"),
        (("--tokens", "nothing"), "cannot read the file with token ids"),
        (("--prompt", "hello"), "cannot tokenize the prompt"),
    ],
)
def test_a_wrong_option_is_one_error(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path, arguments: tuple[str, str], said: str
) -> None:
    option, value = arguments
    if option == "--tokens":
        (tmp_path / "tokens").write_text(value, encoding="utf-8")
        value = str(tmp_path / "tokens")
    code, _, err = run(capsys, "--config", file, "--model", "/m", option, value)
    assert code == 2
    assert err.count("ucm: ") == 1
    assert said in err


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
    with pytest.raises(ConfigError):
        open_connector({"store": {}}, tmp_path)


@pytest.mark.parametrize("slices", [0, 2])
def test_ranks_and_slices_of_heads_are_looked_up_but_not_tried(
    described: dict[str, Any], root: Path, tmp_path: Path, slices: int
) -> None:
    (stored,) = facts().stored
    ranks = (f"{NAMESPACE}/g0-0", f"{NAMESPACE}/g0-1")
    of_two = replace(stored, group=replace(stored.group, slices=slices), ranks=ranks)
    described["facts"] = replace(facts(), stored=(of_two,))
    config = {"store": {"directories": str(root)}}
    with pytest.raises(UcmError, match="only whole blocks of one rank can be tried"):
        open_connector(config, tmp_path)
    assert describe(config, tmp_path)[1] is described["facts"]


def test_without_vllm_it_says_so(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UcmError, match="vLLM cannot be imported"):
        open_connector(file, tmp_path)
