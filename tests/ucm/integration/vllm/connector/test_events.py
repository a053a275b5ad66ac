"""What the scheduler's side announces to routers; `tests/e2e/test_kv_events.py` compares it with vLLM's own events."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, Scene, request
from ucm.integration.vllm.connector import events
from ucm.integration.vllm.connector.events import StoreEvents, store_events
from ucm.integration.vllm.connector.kv_cache import CacheGroup
from ucm.store.base import BlockKey

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

TOKENS = list(range(18))  # four blocks and a half


@dataclass(frozen=True)
class BlockStored:
    """As vLLM's, of an older release: without ``locality`` and ``ownership``."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


BlockStored.__struct_fields__ = tuple(one.name for one in fields(BlockStored))  # type: ignore[attr-defined] # msgspec's


@dataclass(frozen=True)
class BlockRemoved:
    """As vLLM's, of an older release."""

    block_hashes: list[Any]
    medium: str | None


BlockRemoved.__struct_fields__ = tuple(one.name for one in fields(BlockRemoved))  # type: ignore[attr-defined]

MODULE = SimpleNamespace(BlockStored=BlockStored, BlockRemoved=BlockRemoved)
GROUP = CacheGroup(0, SIZE, None, {}, ())
CONFIG = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE))


def named(text: str) -> BlockKey:
    return BlockKey(text.encode())


def heard(scene: Scene, ranks: int = 1) -> StoreEvents:
    found = StoreEvents(CONFIG, {0: ranks}, MODULE)
    scene.side.events = found
    return found


def saved(scene: Scene, request_id: str = "r") -> list[Any]:
    """The keys of a request whose four blocks were computed in one step."""
    new = request(TOKENS, request_id)
    scene.admit(new)
    (moves,) = scene.run(new, len(TOKENS), scene.rows).saves
    return moves.keys


def test_a_block_is_announced_once_all_ranks_have_stored_it(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    found = heard(scene, ranks=2)
    keys = saved(scene)
    assert len(keys) == 4
    found.stored({(0, key): {1: "posix"} for key in keys})
    assert found.take() == []
    found.stored({(0, key): {0: "posix"} for key in reversed(keys[:2])})
    first, second = found.take()
    assert (first.token_ids, first.block_size, first.medium) == (TOKENS[:SIZE], SIZE, "STORAGE")
    assert (first.block_hashes, first.parent_block_hash) == ([keys[0]], None)
    assert (second.block_hashes, second.parent_block_hash) == ([keys[1]], keys[0])
    assert second.token_ids == TOKENS[SIZE : 2 * SIZE]
    found.stored({(0, keys[0]): {0: "posix"}, (0, named("of nobody")): {0: "posix"}})
    assert found.take() == []


def test_two_reports_of_one_rank_are_not_those_of_two(clock: SimulatedClock) -> None:
    """As when two requests save the same block in different steps."""
    scene = Scene(clock)
    found = heard(scene, ranks=2)
    (key, *_) = saved(scene)
    found.stored({(0, key): {0: "posix"}})
    found.stored({(0, key): {0: "posix"}})
    assert found.take() == []
    saved(scene, "another")
    found.stored({(0, key): {1: "posix"}})
    assert len(found.take()) == 1


def test_two_ranks_in_one_report(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    found = heard(scene, ranks=2)
    (key, *_) = saved(scene)
    found.stored({(0, key): {0: "dram", 1: "dram"}})
    assert [event.medium for event in found.take()] == ["CPU"]


def test_vllms_hashes_name_the_blocks_where_there_are_any() -> None:
    found = StoreEvents(CONFIG, {0: 1}, MODULE, convert=lambda one: one.hex())
    hashes = [bytes([number] * 32) for number in range(4)]
    about = SimpleNamespace(all_token_ids=TOKENS, block_hashes=hashes)
    found.loading(about, GROUP, 0, [named("0"), named("1")], None, ["s3", "s3"])
    found.loading(about, GROUP, 3, [named("3")], named("2"), ["s3"])
    said = [(event.block_hashes, event.parent_block_hash) for event in found.take()]
    names = [one.hex() for one in hashes]
    assert said == [([names[0]], None), ([names[1]], names[0]), ([names[3]], names[2])]
    chunks = CacheGroup(0, SIZE, None, {}, (), chunk_blocks=2)
    found.loading(about, chunks, 1, [named("of two")], named("before"), ["s3"])
    (event,) = found.take()
    assert (event.block_hashes, event.parent_block_hash, event.block_size) == (names[2:], names[1], SIZE)
    assert event.token_ids == TOKENS[2 * SIZE : 4 * SIZE]
    found.start_anew()
    assert names[2:] == found.take()[-1].block_hashes[-2:]
    found.loading(about, CacheGroup(0, 2 * SIZE, None, {}, ()), 0, [named("4")], None, ["s3"])
    assert found.take()[0].block_hashes == [named("4")], "vLLM's hashes are of other blocks"
    about.block_hashes = [(1, TOKENS[:SIZE], None)]  # as in 0.10.1
    found.loading(about, GROUP, 0, [named("5")], None, ["s3"])
    assert found.take()[0].block_hashes == [named("5")]


@pytest.mark.parametrize("of", [{"cache_salt": "x"}, {"mm_features": [1]}, {"prompt_embeds": np.ones((4, 2))}])
def test_what_tokens_do_not_identify_is_not_announced(of: dict[str, Any]) -> None:
    found = StoreEvents(CONFIG, {0: 1}, MODULE)
    about = SimpleNamespace(all_token_ids=TOKENS, block_hashes=[], **of)
    found.loading(about, GROUP, 0, [named("0")], None, ["s3"])
    found.loading(SimpleNamespace(all_token_ids=TOKENS), CacheGroup(0, SIZE, 8, {}, ()), 0, [named("0")], None, ["s3"])
    assert found.take() == []


def told(found: StoreEvents) -> list[Any]:
    return [event.block_hashes[0] for event in found.take()]


def test_a_loaded_block_is_announced_once(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = StoreEvents(CONFIG, {0: 1}, MODULE, clock=clock)
    about, keys = SimpleNamespace(all_token_ids=TOKENS), [named("0"), named("1"), named("2")]
    monkeypatch.setattr(events, "MOST_TOLD", 3)

    def load(count: int, tier: str = "s3") -> list[Any]:
        found.loading(about, GROUP, 0, keys[:count], None, [tier] * count)
        return told(found)

    assert load(2) == keys[:2]
    assert load(3) == keys[2:]
    assert load(1, "dram") == keys[:1], "it is also elsewhere"
    assert load(3) == keys[:1], "the oldest is no longer known"
    found.forget()
    assert load(3) == keys
    clock.advance(events.AGAIN_SECONDS - 1)
    assert load(3) == []
    clock.advance(1)
    assert load(3) == keys


def test_of_what_was_announced_nothing_is_read_again() -> None:
    class Hashes(list[bytes]):
        def __iter__(self) -> Any:
            raise AssertionError("all hashes of a long request are read for some blocks")

    found = StoreEvents(CONFIG, {0: 1}, MODULE)
    about = SimpleNamespace(all_token_ids=TOKENS, block_hashes=Hashes([b"0", b"1", b"2"]))
    for _ in range(2):
        found.loading(about, GROUP, 1, [named("1"), named("2")], named("0"), ["s3", "s3"])
        about.all_token_ids = None
    assert told(found) == [b"1", b"2"]


def test_new_keys_take_back_what_was_announced_and_nothing_of_vllms(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    found = heard(scene)
    keys = saved(scene)
    found.stored({(0, keys[0]): {0: "dram"}, (0, keys[1]): {0: "posix"}, (0, keys[2]): {0: "posix"}})
    found.take()
    found.start_anew()
    found.stored({(0, keys[3]): {0: "posix"}})
    assert found.take() == [BlockRemoved([keys[0]], "CPU"), BlockRemoved(keys[1:3], "STORAGE")]
    found.start_anew()
    assert found.take() == []


def test_what_is_never_reported_is_forgotten(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(clock)
    found = heard(scene)
    saved(scene)
    monkeypatch.setattr(events, "MOST_PENDING_BYTES", found._pending_bytes * 3 // 4)
    keys = saved(scene, "another")
    found.stored({(0, key): {0: "posix"} for key in keys})
    assert told(found) == keys[1:]
    assert found._pending_bytes == 0


@pytest.mark.parametrize(
    ("published", "takes", "says"),
    [(False, True, "set kv_events_config"), (True, False, "this vLLM cannot")],
)
def test_where_there_can_be_no_events_the_log_says_so(
    published: bool, takes: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def logger(name: str = "ucm") -> Any:
        return SimpleNamespace(warning=lambda text, *of: lines.append(text % of))

    monkeypatch.setattr(events, "get_logger", logger)
    config = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=published), **vars(CONFIG))
    assert store_events(config, {}, wanted=True, takes_events=takes, hears_workers=True) is None
    assert says in lines[0]
    assert store_events(config, {}, wanted=False, takes_events=takes, hears_workers=True) is None
    assert len(lines) == 1
