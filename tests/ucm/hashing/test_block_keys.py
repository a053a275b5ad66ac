"""The keys that connectors receive."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.ucm.hashing.fake_vllm import FakeVllm
from tests.ucm.hashing.stand_ins import (
    LoRARequest,
    ModelConfig,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    VllmConfig,
    write_adapter,
)
from ucm.hashing import block_keys, request_content
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.request_content import digest_of
from ucm.hashing.request_hasher import RequestHasher
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.clock import SimulatedClock

TOKENS = list(range(100))
CAT = "c" * 64
CONFIG = VllmConfig(ModelConfig("m"))
SEED = b"identity"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return FakeVllm(monkeypatch).release("0.29.0")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = get_logger()
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "ucm"):
        yield caplog
    logger.removeHandler(caplog.handler)


def ours(tokens: list[int], size: int) -> list[bytes]:
    return RequestHasher(SEED).generate_block_hashes(tokens, size)


def test_keys_of_full_blocks() -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS)
    assert keys.of(request, 16) == ours(TOKENS, 16)
    assert keys.of(request, 16, 4) == ours(TOKENS, 16)[4:]
    assert keys.of(request, 32) == ours(TOKENS, 32)
    assert keys.of(Request("short", TOKENS[:15]), 16) == []


def test_ours_as_a_request_grows() -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS[:10])
    for token in TOKENS[10:]:
        request.append(token)
        known = list(request.all_token_ids)
        assert keys.of(request, 16, 1) == ours(known, 16)[1:]


def test_ours_when_tokens_are_taken_back() -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS)
    keys.of(request, 16)
    del request._all_token_ids[50:]
    assert keys.of(request, 16) == ours(TOKENS[:50], 16)


@pytest.mark.parametrize("release", ["0.10.0", "0.28.0", "0.29.0"])
def test_keys_follow_from_no_hash_seed(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Whatever vLLM starts its own hashes from, engines with the same KV have the same keys."""
    found = []
    for seed in (None, "0", "1", "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        vllm = FakeVllm(monkeypatch).release(release)
        for salt in (None, "a"):
            request = Request("r", TOKENS, cache_salt=salt)
            if release != "0.10.0":
                vllm.hash_blocks(request, 8)
            found.append(BlockKeys(CONFIG, SEED).of(request, 16))
    plain, salted = found[:2]
    assert plain != salted
    assert found == [plain, salted] * 4


def test_what_the_caller_does_with_the_keys_is_its_own_affair(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    hashed, plain = Request("hashed", TOKENS), Request("plain", TOKENS)
    vllm.hash_blocks(hashed, 16)
    for request in (hashed, plain):
        first = keys.of(request, 16)
        assert first
        first.clear()
        assert len(keys.of(request, 16) or []) == 6


@pytest.mark.usefixtures("later")
def test_requests_that_are_more_than_text_have_other_keys_than_vllms_hashes(vllm: FakeVllm, tmp_path: Path) -> None:
    """vLLM's hashes contain only the name of a LoRA, and in some releases an image without its position."""
    keys = BlockKeys(CONFIG, SEED)
    lora = LoRARequest("sql", 1, str(write_adapter(tmp_path, b"A")))
    image = MultiModalFeatureSpec(CAT, PlaceholderRange(40, 8), data={"pixels": np.ones(1)})
    requests = [Request("l", TOKENS, lora_request=lora), Request("m", TOKENS, mm_features=[image])]
    for request in requests:
        vllm.hash_blocks(request, 16)
        found = keys.of(request, 16)
        assert found is not None
        assert len(found) == 6
        assert set(found).isdisjoint(request.block_hashes)


def test_what_is_not_cacheable_has_no_keys_and_is_said_once(log: pytest.LogCaptureFixture) -> None:
    keys = BlockKeys(CONFIG, SEED)
    for number in range(3):
        image = MultiModalFeatureSpec(f"{number}-image-0", PlaceholderRange(0, 8))
        request = Request(f"r{number}", TOKENS, mm_features=[image])
        assert [keys.of(request, 16), keys.of(request, 16)] == [None, None]
    assert list(keys.refused.values()) == [3]
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert log.messages[0].startswith("[UCM.Hasher] requests are computed without the store: a multimodal input comes")


def test_tokens_that_are_none_make_a_request_not_cacheable() -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS)
    assert keys.of(request, 16)
    request.append(*[-1] * 16)
    assert [keys.of(request, 16), keys.of(request, 16)] == [None, None]
    assert list(keys.refused.values()) == [1]


def test_an_id_that_is_used_again_is_another_request() -> None:
    keys = BlockKeys(CONFIG, SEED)
    one, other = Request("r", TOKENS, cache_salt="a"), Request("r", TOKENS[::-1])
    assert keys.of(one, 16)
    assert keys.of(other, 16) == ours(TOKENS[::-1], 16)


def test_a_streaming_session_is_looked_at_each_time() -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS[:33], resumable=True)
    assert keys.of(request, 16) == ours(TOKENS[:33], 16)
    del request._all_token_ids[31:]
    request.append(*range(500, 530))
    request.mm_features = [MultiModalFeatureSpec(CAT, PlaceholderRange(40, 8), data={"pixels": np.ones(1)})]
    found = keys.of(request, 16)
    assert found is not None
    assert found[:2] == ours(list(request.all_token_ids), 16)[:2]
    assert found[2] != ours(list(request.all_token_ids), 16)[2]


def test_the_names_of_a_streaming_session_s_inputs_stand_for_nothing_known() -> None:
    """Its inputs may be replaced, and are not read; vLLM keeps their encodings by name."""
    keys = BlockKeys(CONFIG, SEED)
    named = MultiModalFeatureSpec(CAT, PlaceholderRange(40, 8), data={"pixels": np.ones(1)})
    runs = Request("runs", TOKENS, mm_features=[named])
    assert keys.of(runs, 16)
    assert not keys.is_invalidated(runs)
    keys.note(Request("session", TOKENS, mm_features=[named], resumable=True))
    assert keys.is_invalidated(runs)
    assert keys.of(Request("later", TOKENS, mm_features=[named]), 16) is None


def test_a_finished_request_is_forgotten() -> None:
    keys = BlockKeys(CONFIG, SEED)
    keys.of(Request("r", TOKENS), 16)
    keys.forget("r")
    keys.forget("never seen")
    assert keys._known == {}


def test_after_a_reset_no_block_is_found_again(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    one, other = Request("one", TOKENS), Request("other", TOKENS)
    for request in (one, other):
        vllm.hash_blocks(request, 16)
    generations = []
    for _ in range(3):
        generations.append(keys.of(one, 16) or [])
        assert keys.of(other, 16) == generations[-1]
        keys.start_anew()
    assert len({key for found in generations for key in found}) == 18


def test_the_operator_is_warned_of_what_a_reset_costs(log: pytest.LogCaptureFixture) -> None:
    BlockKeys(CONFIG, SEED).start_anew()
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert "no longer finds blocks that were stored before" in log.messages[0]
    assert "not found by other engines or after a restart" in log.messages[0]


def picture(number: int, name: str | None = None, **more: Any) -> MultiModalFeatureSpec:
    data = more.pop("data", {"pixel_values": np.full((3, 8, 8), number, np.float32)})
    return MultiModalFeatureSpec(name or f"{number:064x}", PlaceholderRange(8 * number, 4), data=data)


def until_ready(keys: BlockKeys, request: Request) -> None:
    while not keys.is_ready(request):
        keys.wait(60)


@pytest.mark.parametrize("clock", [None, *range(4)], indirect=True)
def test_inputs_are_hashed_beside_the_scheduler(monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock) -> None:
    """Each input is hashed exactly once, and the keys equal those of hashing on the caller's thread."""
    here, may, digest, threads = threading.get_ident(), clock.event(), digest_of, []

    def digest_when_it_may(data: Any) -> Any:
        threads.append(threading.get_ident())
        may.wait()
        return digest(data)

    request = Request("r", TOKENS, mm_features=[picture(number) for number in range(6)])
    with monkeypatch.context() as patch:
        patch.setattr(block_keys, "digest_of", digest_when_it_may)
        patch.setattr(request_content, "digest_of", digest_when_it_may)
        keys, began = BlockKeys(CONFIG, SEED, clock=clock), clock.monotonic()
        assert [keys.is_ready(request) for _ in range(3)] == [False] * 3
        keys.wait(0.5)
        assert clock.monotonic() == began + 0.5
        assert len(set(threads)) == block_keys._THREADS
        assert keys.is_ready(Request("text", TOKENS)), "no other one waits"
        may.set()
        until_ready(keys, request)
        assert clock.monotonic() == began + 0.5, "it is told of each input that is hashed"
        found = [keys.of(request, size) for size in (16, 8)]
    assert len(threads) == 6
    assert here not in threads
    assert found == [BlockKeys(CONFIG, SEED).of(request, size) for size in (16, 8)]
    assert keys.is_ready(request)


def test_a_reset_hashes_no_input_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the scheduler; and vLLM may have let go of the data."""
    keys, request = BlockKeys(CONFIG, SEED), Request("r", TOKENS, mm_features=[picture(1)])
    until_ready(keys, request)
    before = keys.of(request, 16) or []

    def digest_again(data: Any) -> Any:
        raise AssertionError(data)

    with monkeypatch.context() as patch:
        patch.setattr(block_keys, "digest_of", digest_again)
        patch.setattr(request_content, "digest_of", digest_again)
        keys.start_anew()
        assert keys.is_ready(request)
        after = keys.of(request, 16) or []
    assert set(before).isdisjoint(after)
    other = Request("r", TOKENS, mm_features=[picture(2)])
    until_ready(keys, other)
    assert len({*after, *(keys.of(other, 16) or [])}) == 2 * len(after)


def test_who_does_not_wait_gets_the_same_keys(clock: SimulatedClock) -> None:
    request, waited = Request("r", TOKENS, mm_features=[picture(1), picture(2)]), BlockKeys(CONFIG, SEED, clock=clock)
    assert not waited.is_ready(request)
    assert waited.of(request, 16) == BlockKeys(CONFIG, SEED).of(request, 16)


@pytest.mark.parametrize("data", [None, {"shm": 5}, {"pixel_values": object()}])
def test_inputs_that_cannot_be_hashed_are_not_cached(data: Any) -> None:
    keys, request = BlockKeys(CONFIG, SEED), Request("r", TOKENS, mm_features=[picture(1), picture(2, data=data)])
    until_ready(keys, request)
    assert keys.of(request, 16) is None
    assert sum(keys.refused.values()) == 1


def test_another_request_with_the_id_of_one_that_is_hashed_has_its_own_inputs() -> None:
    keys, first, second = BlockKeys(CONFIG, SEED), *(Request("r", TOKENS, mm_features=[picture(n)]) for n in (1, 2))
    keys.is_ready(first)
    until_ready(keys, second)
    assert keys.of(second, 16) == BlockKeys(CONFIG, SEED).of(second, 16) != BlockKeys(CONFIG, SEED).of(first, 16)
    keys.forget("r")
    keys.is_ready(first)
    keys.forget("r")
    assert keys.of(first, 16) == BlockKeys(CONFIG, SEED).of(first, 16)


def test_only_inputs_that_count_are_hashed() -> None:
    keys = BlockKeys(CONFIG, SEED, trust_media_names=True)
    assert keys.is_ready(Request("r", TOKENS, mm_features=[picture(1)]))
    assert BlockKeys(CONFIG, SEED).is_ready(Request("r", TOKENS, mm_features=[picture(1)], resumable=True))


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_what_nobody_asks_for_any_more_is_not_hashed(
    monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock, how: str
) -> None:
    may, begun = clock.event(), []

    def digest_when_it_may(data: Any) -> Any:
        begun.append(data)
        may.wait()
        return b""

    monkeypatch.setattr(block_keys, "digest_of", digest_when_it_may)
    keys = BlockKeys(CONFIG, SEED, clock=clock)
    request = Request("r", TOKENS, mm_features=[picture(number) for number in range(20)])
    assert not keys.is_ready(request)
    clock.run_until_idle()
    if how == "forgotten":
        keys.forget("r")
    else:
        keys.close()
        assert keys.is_ready(request), "nobody will hash its inputs, so `of` does not wait for them"
        assert keys.of(request, 16) == BlockKeys(CONFIG, SEED).of(request, 16)
    may.set()
    clock.run_until_idle()
    assert len(begun) == block_keys._THREADS
    assert len(clock.alive) == (block_keys._THREADS if how == "forgotten" else 0)


def embedded(ids: list[int] | None, mask: list[bool] | None = None, *, dtype: Any = np.int32) -> Request:
    """Return a request whose blocks vLLM names by the rows' bytes and the ids alone: the same for all of these."""
    rows = np.arange(96 * 4, dtype=np.int32).reshape(96, 4).view(dtype)
    request = Request(f"{id(rows)}", ids, prompt_embeds=rows, prompt_is_token_ids=mask)
    request.block_hashes = [bytes([block]) * 32 for block in range(6)]
    return request


OTHER_MEANING: list[dict[str, Any]] = [
    {"ids": [0] * 96},
    {"ids": [0] * 96, "mask": [False] * 40 + [True] * 56},
    {"ids": None, "dtype": np.float32},
]


@pytest.mark.parametrize("other", OTHER_MEANING)
def test_embeddings_with_another_mask_have_other_keys_and_are_not_saved_from_the_firsts_blocks(
    other: dict[str, Any],
) -> None:
    keys, first, second = BlockKeys(CONFIG, SEED), embedded(None), embedded(**other)
    found = keys.of(first, 16)
    assert found
    assert not keys.is_invalidated(first)
    assert keys.of(second, 16) is None
    assert keys.is_invalidated(first), "after a preemption, it may find blocks of the second one"
    keys.forget(first.request_id)
    assert keys.of(embedded(None), 16) is None, "the name stays ambiguous"
    keys.forget(second.request_id)
    keys.prefix_cache_emptied()
    alone = keys.of(embedded(**other), 16)
    assert alone
    assert alone != found


def test_a_request_that_runs_while_the_prefix_cache_is_emptied_keeps_its_names() -> None:
    keys, first = BlockKeys(CONFIG, SEED), embedded(None)
    assert keys.of(first, 16)
    keys.prefix_cache_emptied()
    assert keys.of(embedded([0] * 96), 16) is None


def test_a_medium_stays_ambiguous_when_the_prefix_cache_is_emptied() -> None:
    """Encodings have a cache of their own."""
    keys = BlockKeys(CONFIG, SEED)

    def of(number: int) -> Any:
        data = {"pixel_values": np.full((3, 8, 8), number, np.float32)}
        request = Request("r", TOKENS, mm_features=[picture(1, "x", data=data)])
        return keys.of(request, 16)

    assert of(1)
    assert of(2) is None
    keys.prefix_cache_emptied()
    assert of(1) is None


def pictured(name: str, number: int, request_id: str = "r") -> Request:
    data = {"pixel_values": np.full((3, 8, 8), number, np.float32)}
    return Request(request_id, TOKENS, mm_features=[picture(1, name, data=data)])


def test_a_mediums_name_is_free_again_once_both_caches_have_dropped_what_it_stood_for() -> None:
    for cleared in ("prefix cache", "encodings", "both"):
        keys = BlockKeys(CONFIG, SEED)
        assert keys.of(pictured("x", 1), 16)
        keys.forget("r")
        if cleared != "encodings":
            keys.prefix_cache_emptied()
        if cleared != "prefix cache":
            keys.next_step(["y", "x"])
        assert (keys.of(pictured("x", 2), 16) is not None) == (cleared == "both"), cleared


def test_a_request_that_runs_while_its_encoding_is_dropped_keeps_its_name() -> None:
    """If it is preempted, it is encoded again."""
    keys, runs = BlockKeys(CONFIG, SEED), pictured("x", 1, "runs")
    assert keys.of(runs, 16)
    keys.prefix_cache_emptied()
    keys.next_step(["x"])
    assert keys.of(pictured("x", 2), 16) is None
    assert keys.is_invalidated(runs)


def test_a_name_that_stood_for_two_media_stays_ambiguous_when_an_encoding_is_dropped() -> None:
    """Its inputs may be encoded again by a session that is not known."""
    keys = BlockKeys(CONFIG, SEED)
    keys.note(Request("session", TOKENS, mm_features=pictured("x", 1).mm_features, resumable=True))
    keys.prefix_cache_emptied()
    keys.next_step(["x"])
    assert keys.of(pictured("x", 1), 16) is None


def test_what_is_remembered_of_encodings_is_what_vllm_has() -> None:
    keys = BlockKeys(CONFIG, SEED)
    for number in range(100):
        assert keys.of(pictured(f"{number:064x}", number), 16)
        keys.forget("r")
        keys.next_step([f"{number - 10:064x}"] if number >= 10 else [])
    assert len(keys._reader.encodings._contents) == 10


def test_blocks_behind_a_request_of_unknown_content_are_not_saved() -> None:
    keys, odd, plain = BlockKeys(CONFIG, SEED), Request("odd", TOKENS), Request("plain", TOKENS)
    for request in (odd, plain):
        request.block_hashes = [b"h" * 32] * 6
    odd.pooling_params = SimpleNamespace(extra_kwargs={"x": object()})
    assert keys.of(odd, 16) is None
    assert keys.of(plain, 16) is None
    keys.forget("odd")
    keys.prefix_cache_emptied()
    assert keys.of(Request("plain", TOKENS), 16)


def test_a_request_that_may_find_later_blocks_of_unknown_content_is_invalidated() -> None:
    """It was looked up first, or is preempted, and finds what the other one has computed meanwhile."""
    keys, odd, plain = BlockKeys(CONFIG, SEED), Request("odd", TOKENS), Request("plain", TOKENS)
    for request in (odd, plain):
        request.block_hashes = [b"h" * 32] * 6
    odd.pooling_params = SimpleNamespace(extra_kwargs={"x": object()})
    assert keys.of(plain, 16)
    assert not keys.is_invalidated(plain)
    assert keys.of(odd, 16) is None
    assert keys.is_invalidated(plain)


@pytest.mark.parametrize("ends", [True, False])
def test_unknown_content_counts_for_a_first_block_that_is_filled_later(*, ends: bool) -> None:
    """The prompt is shorter than a block, so vLLM names it only after some tokens are generated."""
    keys, odd = BlockKeys(CONFIG, SEED), Request("odd", TOKENS[:10])
    odd.block_hashes = []
    odd.pooling_params = SimpleNamespace(extra_kwargs={"x": object()})
    assert keys.of(odd, 16) is None
    for token in TOKENS[10:40]:
        odd.append(token)
    odd.block_hashes.append(b"h" * 32)
    keys.forget("odd") if ends else keys.prefix_cache_emptied()
    plain = Request("plain", TOKENS)
    plain.block_hashes = [b"h" * 32] * 6
    assert keys.of(plain, 16) is None


def test_first_blocks_that_are_filled_later_are_noted_once_per_step_for_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, odd = BlockKeys(CONFIG, SEED), Request("odd", TOKENS[:10])
    odd.block_hashes = []
    odd.pooling_params = SimpleNamespace(extra_kwargs={"x": object()})
    assert keys.of(odd, 16) is None
    running = [Request(f"plain {number}", TOKENS) for number in range(5)]
    for request in running:
        request.block_hashes = [b"h" * 32] * 6
        assert keys.of(request, 16)
    looks, first_block = [], keys._reader.first_block

    def look(request: Any) -> Any:
        looks.append(request.request_id)
        return first_block(request)

    monkeypatch.setattr(keys._reader, "first_block", look)
    for named in (False, True):
        odd.block_hashes[:] = [b"h" * 32] if named else []
        looks.clear()
        keys.next_step()
        assert [keys.is_invalidated(request) for request in running] == [named] * 5
        assert looks.count("odd") == 1
