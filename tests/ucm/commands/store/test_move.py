"""``ucm store prefetch`` and ``demote``: the blocks of one prompt into the first tier, and out of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.commands.described import GEOMETRY, NAMESPACE, SIZE, TOKENS, described, facts, keys  # noqa: F401 - a fixture
from tests.ucm.commands.store.test_lease import run  # noqa: F401 - a fixture
from tests.ucm.commands.store.test_lookup import below_the_disk, config, prompt  # noqa: F401 - fixtures
from tests.ucm.store.keys import key_file
from ucm.hashing.request_content import RequestContent
from ucm.hashing.request_hasher import RequestHasher
from ucm.store.base import BlockKey, StoreFullError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.dram import DramTier
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import content, fetch, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.ucm.commands.store.conftest import Answer, Remote

pytestmark = pytest.mark.usefixtures("described")
G0 = f"{NAMESPACE}/g0"


def held(memory: str, blocks: Sequence[BlockKey], namespace: str = G0, **more: Any) -> list[bool]:
    """Return which blocks an engine loads from memory, with the content that was saved."""
    with open_store(StoreConfig(pipeline="Dram", dram_directory=memory, **more), namespace, GEOMETRY) as store:
        found, _ = fetch(store, blocks, GEOMETRY)
    assert found == {block: content(block, GEOMETRY) for block in found}
    return [block in found for block in blocks]


def on_disk(config: Path, block: BlockKey, namespace: str = G0) -> Path:  # noqa: F811 - the file
    return Path(Layout(str(config.parent / "kv"), namespace).block(block))


def test_what_an_engine_would_load_comes_into_memory(run: Callable[..., Answer], memory: str) -> None:  # noqa: F811
    answer = run("prefetch")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == [
        "Cache: 3 of 3 blocks, 2 of them copied",
        "An engine loads 48 tokens from there.",
    ]
    assert held(memory, keys(5)) == [True, True, True, False, False], "the last one is behind a gap"
    again = run("prefetch", "--json").data
    assert again == {"tier": "Cache", "tokens": 48, "blocks": 3, "there": 3, "copied": 0, "failed": {}}


def test_all_ranks_and_only_what_a_window_reaches(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    memory: str,
    described: dict[str, Any],  # noqa: F811
) -> None:
    full, window = facts(None, SIZE + 1).stored
    ranks = tuple(f"{NAMESPACE}/{name}" for name in ("g1", "g1-other"))
    described["facts"] = replace(described["facts"], stored=(full, replace(window, ranks=ranks)))
    for namespace in ranks:
        with open_store(StoreConfig(directories=(str(config.parent / "kv"),)), namespace, GEOMETRY) as store:
            save(store, keys(3), GEOMETRY)
    with open_store(StoreConfig(directories=(str(config.parent / "kv"),)), ranks[0], GEOMETRY) as store:
        save(store, keys(5)[3:4], GEOMETRY)
    data = run("prefetch", "--json").data
    assert (data["blocks"], data["there"], data["copied"]) == (5, 5, 4)
    assert [held(memory, keys(3), namespace) for namespace in ranks] == [[False, False, True]] * 2
    on_disk(config, keys(3)[2], ranks[1]).unlink()
    assert run("lookup", "--json").data["groups"][1]["blocks"][2]["tiers"] == ["Cache"], "where all ranks have it"


def test_slices_of_heads_into_a_tier_that_compresses(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    tmp_path: Path,
    memory: str,
    described: dict[str, Any],  # noqa: F811
) -> None:
    """They are alike on all ranks, so that one of them tells what a block holds."""
    (full,) = described["facts"].stored
    slices = tuple(f"{NAMESPACE}/kv{place}of2-g0" for place in range(2))
    described["facts"] = replace(
        described["facts"], stored=(replace(full, group=replace(full.group, slices=2), ranks=slices),)
    )
    root = str(tmp_path / "other")
    for namespace in slices:
        with open_store(StoreConfig(pipeline="Dram", dram_directory=memory), namespace, GEOMETRY) as opened:
            assert not save(opened, keys(5), GEOMETRY).failed
    compression: dict[str, Any] = {"tiers": {"Posix": {"compression": "lossless"}}}
    settings = {"pipeline": "Posix|Dram", "dram_directory": memory, "directories": root, **compression}
    config.write_text(json.dumps({"store": settings, "kv_head_shards": 2}), encoding="utf-8")
    answer = run("prefetch", "--json")
    assert answer.code == 0, answer.err
    assert answer.data["copied"] == 10
    copied = StoreConfig(pipeline="Posix", directories=(root,), **compression)
    for namespace in slices:
        with open_store(copied, namespace, GEOMETRY) as opened:
            assert fetch(opened, keys(5), GEOMETRY) == ({block: content(block, GEOMETRY) for block in keys(5)}, {})


@pytest.mark.parametrize("ranks", [(G0,), (G0, f"{G0}-other")])
@pytest.mark.parametrize("pipeline", ["Dram|Posix", "Posix|Dram"])
def test_compressed_and_authenticated_blocks(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    tmp_path: Path,
    memory: str,
    described: dict[str, Any],  # noqa: F811
    pipeline: str,
    ranks: tuple[str, ...],
) -> None:
    """What several ranks store can be read without its geometry, but not be compressed."""
    assert run("drop").code == 0, "what the fixture has stored is not authenticated"
    first, lower = pipeline.split("|")
    root = tmp_path / "other"
    root.mkdir()
    store: dict[str, Any] = {
        "dram_directory": memory,
        "directories": [str(root)],
        "authentication_key_file": key_file(tmp_path / "key"),
        "tiers": {"Posix": {"compression": "lossless"}},
    }
    settings: dict[str, Any] = {**store, "directories": (str(root),)}

    def alone(tier: str) -> StoreConfig:
        tiers = {name: options for name, options in store["tiers"].items() if name == tier}
        return StoreConfig(**{**settings, "pipeline": tier, "tiers": tiers})

    for namespace in ranks:
        with open_store(alone(lower), namespace, GEOMETRY) as opened:
            assert not save(opened, keys(5), GEOMETRY).failed
    config.write_text(json.dumps({"store": {**store, "pipeline": pipeline}}), encoding="utf-8")
    (stored,) = described["facts"].stored
    described["facts"] = replace(described["facts"], stored=(replace(stored, ranks=ranks),))
    if first == "Posix" and len(ranks) > 1:
        answer = run("prefetch")
        assert (answer.code, "cannot be prefetched into a tier that compresses" in answer.err) == (2, True)
        return
    assert run("prefetch").code == 0
    assert run("demote").code == 0
    assert run("prefetch", "--json").data["copied"] == 5 * len(ranks)
    for namespace in ranks:
        with open_store(alone(first), namespace, GEOMETRY) as opened:
            assert fetch(opened, keys(5), GEOMETRY) == ({block: content(block, GEOMETRY) for block in keys(5)}, {})


def test_from_a_server(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    remote: Remote,
) -> None:
    with open_store(below_the_disk(config, remote), G0, GEOMETRY) as store:
        assert save(store, keys(5)[2:], GEOMETRY).failed == {}
    assert run("prefetch", "--json").data["copied"] == 1, "of the five, block 3 is on the server alone"
    assert on_disk(config, keys(5)[3]).exists()
    below_the_disk(config, remote, timeout=5.0, **remote.unanswered)
    answer = run("prefetch")
    assert (answer.code, answer.out.splitlines()[0]) == (0, "Posix: 5 of 5 blocks, 0 of them copied")
    answer = run("demote", "--json")
    assert (answer.code, answer.data["deleted"], list(answer.data["failed"])) == (1, 0, [remote.name.lower()])
    assert all(on_disk(config, one).exists() for one in keys(5)), "who does not answer may have nothing"
    on_disk(config, keys(5)[3]).unlink()
    answer = run("prefetch")
    assert (answer.code, answer.out.splitlines()) == (
        1,
        [
            "Posix: 3 of 3 blocks, 0 of them copied",
            "An engine loads 48 tokens from there.",
            f"{remote.name.lower()}: does not answer: lookup.unavailable",
        ],
    )


def test_into_a_server_that_does_not_answer(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    remote: Remote,
) -> None:
    tiers = {remote.name: {**remote.options, "timeout": 5.0, **remote.unanswered}}
    text = {"pipeline": f"{remote.name}|Posix", "directories": str(config.parent / "kv"), "tiers": tiers}
    config.write_text(json.dumps({"store": text}), encoding="utf-8")
    answer = run("prefetch")
    assert (answer.code, answer.out.splitlines()[0]) == (1, f"{remote.name}: 0 of 3 blocks, 0 of them copied")
    assert answer.out.splitlines()[1:] == [f"{remote.name.lower()}: does not answer: lookup.unavailable"]


def test_a_damaged_block_is_not_copied(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    memory: str,
) -> None:
    path = on_disk(config, keys(2)[1])
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    answer = run("prefetch")
    assert answer.code == 1
    assert answer.out.splitlines() == [
        "Cache: 2 of 3 blocks, 1 of them copied",
        "posix: the checksum of layer slice 2 is wrong",
    ]
    assert held(memory, keys(3)) == [True, False, True]
    assert not path.exists()


def test_a_block_that_one_tier_has_damaged_and_another_whole_is_copied(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    memory: str,
    remote: Remote,
) -> None:
    with open_store(below_the_disk(config, remote), G0, GEOMETRY) as store:
        assert save(store, keys(3), GEOMETRY).failed == {}
    text = json.loads(config.read_text())
    text["store"] |= {"pipeline": f"Cache|Posix|{remote.name}", "dram_directory": memory}
    config.write_text(json.dumps(text))
    for path in (on_disk(config, one) for one in keys(3)[1:]):
        path.write_bytes(bytes(path.stat().st_size))
    answer = run("prefetch", "--json")
    assert (answer.code, answer.data["copied"], answer.data["failed"]) == (0, 2, {})
    assert held(memory, keys(3)) == [True] * 3


def test_a_tier_that_cannot_take_a_block_says_so(
    run: Callable[..., Answer],  # noqa: F811 - a fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(self: DramTier, key: BlockKey, pieces: Sequence[Any], deadline: float) -> None:
        raise StoreFullError("no memory is left")

    monkeypatch.setattr(DramTier, "put", put)
    answer = run("prefetch")
    assert (answer.code, answer.out.splitlines()) == (
        1,
        ["Cache: 1 of 3 blocks, 0 of them copied", "dram: no memory is left"],
    )


def test_more_than_memory_may_hold_is_refused(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    memory: str,
) -> None:
    store = {"pipeline": "Dram|Posix", "directories": str(config.parent / "kv"), "dram_directory": memory}
    config.write_text(json.dumps({"store": {**store, "dram_capacity": "32KiB"}}), encoding="utf-8")
    answer = run("prefetch")
    assert answer.code == 2
    assert "these blocks take 36 KiB, and Dram may hold 32 KiB" in answer.err
    assert "raise the capacity of Dram" in answer.err


@pytest.mark.parametrize("command", ["prefetch", "demote"])
def test_a_store_of_one_tier_has_nowhere_to_move_to(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    command: str,
) -> None:
    config.write_text(f"store: {{directories: {config.parent / 'kv'}}}\n", encoding="utf-8")
    answer = run(command)
    assert answer.code == 2
    assert "the store 'Posix' has one tier" in answer.err


def test_a_prompt_leaves_memory_where_another_tier_has_it(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    memory: str,
) -> None:
    assert run("prefetch").code == 0
    on_disk(config, keys(1)[0]).unlink()
    answer = run("demote")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == [
        "Cache: 2 blocks deleted, which Posix has",
        "Cache: 1 block kept, which no other tier has",
    ]
    assert held(memory, keys(3)) == [True, False, False]
    assert all(on_disk(config, one).exists() for one in keys(3)[1:])


def test_prompts_of_a_salt(
    run: Callable[..., Answer],  # noqa: F811 - fixtures
    config: Path,  # noqa: F811
    tmp_path: Path,
    memory: str,
) -> None:
    """All commands about a prompt take the salt of its requests, from a file alone."""
    salt = tmp_path / "salt"
    salt.write_text("a tenant's own\n", encoding="utf-8")
    salt.chmod(0o644)
    assert "other users can read" in run("lookup", "--salt-file", salt).err
    salt.chmod(0o600)
    hashes = RequestHasher(b"seed").generate_block_hashes(TOKENS, SIZE, RequestContent(salt="a tenant's own"))
    salted = [BlockKey(one) for one in hashes]
    with open_store(StoreConfig(directories=(str(config.parent / "kv"),)), G0, GEOMETRY) as store:
        save(store, salted, GEOMETRY)
    assert run("lookup", "--salt-file", salt, "--json").data["found_tokens"] == 5 * SIZE
    assert run("prefetch", "--salt-file", salt, "--json").data["copied"] == 5
    assert held(memory, salted) == [True] * 5
    assert run("pin", "--for", "1h", "--salt-file", salt, "--json").data["tiers"]["Posix"]["leased"] == 5
    assert run("drop", "--salt-file", salt, "--json").data["dropped"] == {"Cache": 5, "Posix": 5}
    assert run("lookup", "--json").data["found_tokens"] == 3 * SIZE, "those without a salt are still there"
