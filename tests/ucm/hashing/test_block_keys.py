"""The keys that connectors receive, made by vLLM or by us."""

from __future__ import annotations

import logging
import threading
import time
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


def test_ours_without_vllm(log: pytest.LogCaptureFixture) -> None:
    keys = BlockKeys(CONFIG, SEED)
    assert [record.levelname for record in log.records] == ["INFO"]
    assert log.messages[0].startswith("[UCM.Hasher] UCM's own hashes are the keys: this vLLM release has no")
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


def test_vllms_where_they_are_good(vllm: FakeVllm, log: pytest.LogCaptureFixture) -> None:
    keys = BlockKeys(CONFIG, SEED)
    assert log.messages == [
        "[UCM.Hasher] vLLM's own sha256 block hashes are the keys: they are the same in every process"
    ]
    request = Request("r", TOKENS)
    vllm.hash_blocks(request, 8)
    assert keys.of(request, 8) == request.block_hashes
    assert keys.of(request, 24) == request.block_hashes[2::3]
    assert keys.of(request, 24, 2) == request.block_hashes[8::3]
    request.append(*range(20))
    vllm.hash_blocks(request, 8)
    assert keys.of(request, 24) == request.block_hashes[2::3]
    assert len(request.block_hashes) == 15


def test_what_the_caller_does_with_the_keys_is_its_own_affair(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    hashed, plain = Request("hashed", TOKENS), Request("plain", TOKENS)
    vllm.hash_blocks(hashed, 16)
    for request in (hashed, plain):
        first = keys.of(request, 16)
        assert first
        first.clear()
        assert len(keys.of(request, 16) or []) == 6


def test_salted_requests_are_looked_at_by_themselves(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    found = []
    for salt in (None, "a", "b"):
        request = Request(f"r{salt}", TOKENS, cache_salt=salt)
        vllm.hash_blocks(request, 16, tagged=True)
        assert keys.of(request, 16) == request.block_hashes
        found.append(request.block_hashes[0])
    assert len(set(found)) == 3


def test_vllms_are_not_used_where_they_do_not_say_what_we_think(vllm: FakeVllm, log: pytest.LogCaptureFixture) -> None:
    keys = BlockKeys(CONFIG, SEED)
    for number in range(3):
        request = Request(f"r{number}", TOKENS)
        request.block_hashes = [b"h" * 32] * 6
        assert keys.of(request, 16) == ours(TOKENS, 16)
    assert [record.levelname for record in log.records] == ["INFO", "WARNING"]
    assert "UCM's own hashes are used for these blocks" in log.messages[1]
    assert vllm.utils.NONE_HASH


def test_vllms_are_not_used_for_blocks_that_they_do_not_divide(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS)
    vllm.hash_blocks(request, 16)
    assert keys.of(request, 40) == ours(TOKENS, 40)
    assert keys.of(request, 32) == request.block_hashes[1::2]


def test_a_request_that_is_too_short_to_have_hashes_decides_nothing(vllm: FakeVllm) -> None:
    keys = BlockKeys(CONFIG, SEED)
    request = Request("r", TOKENS[:10])
    assert keys.of(request, 16) == []
    request.append(*TOKENS[10:])
    vllm.hash_blocks(request, 16)
    assert keys.of(request, 16) == request.block_hashes


@pytest.mark.usefixtures("later")
def test_requests_that_are_more_than_text_have_keys_of_ours(vllm: FakeVllm, tmp_path: Path) -> None:
    """vLLM's keys contain only the name of a LoRA, and in some releases an image without its position."""
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
    assert [record.levelname for record in log.records] == ["INFO", "WARNING"]
    assert log.messages[1].startswith("[UCM.Hasher] requests are computed without the store: a multimodal input comes")


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
    assert [record.levelname for record in log.records] == ["INFO", "WARNING"]
    assert "no longer finds blocks that were stored before" in log.messages[1]
    assert "not found by other engines or after a restart" in log.messages[1]


def picture(number: int, name: str | None = None, **more: Any) -> MultiModalFeatureSpec:
    data = more.pop("data", {"pixel_values": np.full((3, 8, 8), number, np.float32)})
    return MultiModalFeatureSpec(name or f"{number:064x}", PlaceholderRange(8 * number, 4), data=data)


def until_ready(keys: BlockKeys, request: Request) -> None:
    until = time.monotonic() + 60
    while not keys.is_ready(request):
        assert time.monotonic() < until
        keys.wait(0.01)


def test_inputs_are_hashed_beside_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is hashed exactly once, and the keys equal those of hashing on the caller's thread."""
    here, may, digest, threads = threading.get_ident(), threading.Event(), digest_of, []

    def digest_when_it_may(data: Any) -> Any:
        threads.append(threading.get_ident())
        assert may.wait(60)
        return digest(data)

    request = Request("r", TOKENS, mm_features=[picture(number) for number in range(6)])
    with monkeypatch.context() as patch:
        patch.setattr(block_keys, "digest_of", digest_when_it_may)
        patch.setattr(request_content, "digest_of", digest_when_it_may)
        keys = BlockKeys(CONFIG, SEED)
        assert [keys.is_ready(request) for _ in range(3)] == [False] * 3
        keys.wait(0.001)
        assert keys.is_ready(Request("text", TOKENS)), "no other one waits"
        may.set()
        until_ready(keys, request)
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


def test_who_does_not_wait_gets_the_same_keys() -> None:
    request, waited = Request("r", TOKENS, mm_features=[picture(1), picture(2)]), BlockKeys(CONFIG, SEED)
    waited.is_ready(request)
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


def test_the_end_waits_for_no_input_that_is_not_being_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    may, begun = threading.Event(), []

    def digest_when_it_may(data: Any) -> Any:
        begun.append(data)
        assert may.wait(60)
        return b""

    monkeypatch.setattr(block_keys, "digest_of", digest_when_it_may)
    keys = BlockKeys(CONFIG, SEED)
    keys.is_ready(Request("r", TOKENS, mm_features=[picture(number) for number in range(20)]))
    keys.close()
    may.set()
    keys._pool.shutdown(wait=True)
    assert len(begun) <= block_keys._THREADS
