"""When vLLM's own hashes can name stored blocks. `test_with_vllm.py` checks real releases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ucm.hashing.fake_vllm import FakeVllm, old_sha256, sha256
from tests.ucm.hashing.stand_ins import CacheConfig, ModelConfig, Request, VllmConfig
from ucm.hashing.request_hasher import HashPlan, finds_adapters_by_name, has_hashes, plan_hashes, verified_block_size

TOKENS = list(range(100))


def plan(algorithm: str = "sha256") -> HashPlan:
    return plan_hashes(VllmConfig(ModelConfig("m"), CacheConfig(prefix_caching_hash_algo=algorithm)))


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_release_with_a_fixed_start_names_blocks_itself(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    FakeVllm(monkeypatch).release("0.29.0")
    found = plan(algorithm)
    assert found.uses_vllm
    assert found.kind == f"vllm:{algorithm}:{sha256('vllm-none-hash').hex()}"


def test_a_release_with_a_random_start_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch).release("0.28.0")
    assert not plan().uses_vllm
    assert plan().kind == "ucm"
    assert "PYTHONHASHSEED would fix it" in plan().reason


def test_the_seed_that_an_operator_fixed_is_part_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        for release in ("0.28.0", "0.29.0"):
            FakeVllm(monkeypatch).release(release)
            kinds.append(plan().kind)
    assert kinds == [f"vllm:sha256:{sha256(seed).hex()}" for seed in ("0", "0", "1", "1")]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin", "sha256_cbor_64bit", None])
def test_an_algorithm_that_one_can_find_collisions_of(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    FakeVllm(monkeypatch).release("0.29.0")
    assert plan(algorithm).reason == f"vLLM hashes blocks with {algorithm!r}, which is not a cryptographic hash"


def test_a_start_that_changes_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch).release("0.29.0 xxhash")
    assert "random" in plan().reason


@pytest.mark.parametrize(
    "fake", [{"hashing_module": "vllm.other"}, {"function": old_sha256, "hashing_module": "vllm.utils"}]
)
def test_a_release_whose_hashes_are_no_bytes(monkeypatch: pytest.MonkeyPatch, fake: dict[str, str]) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    FakeVllm(monkeypatch, **fake).release("0.28.0")  # type: ignore[arg-type]
    assert plan().reason == "this vLLM release has no block hashes of requests"


def test_a_release_without_hashes_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch).release("0.10.0")
    assert plan().reason == "this vLLM release has no block hashes of requests"


def test_without_any_vllm() -> None:
    assert plan().kind == "ucm"


def test_the_function_is_found_where_older_releases_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    FakeVllm(monkeypatch, hashing_module="vllm.utils").release("0.28.0")
    assert plan().uses_vllm


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_how_many_tokens_a_hash_covers(
    monkeypatch: pytest.MonkeyPatch, size: int, salt: str | None, *, tagged: bool
) -> None:
    vllm = FakeVllm(monkeypatch).release("0.29.0")
    for num_tokens in (size, 33, 100):
        request = Request("r", TOKENS[:num_tokens], cache_salt=salt)
        vllm.hash_blocks(request, size, tagged=tagged)
        assert verified_block_size(request, plan(), 48) == (size if num_tokens >= size else None)


def test_a_hash_that_does_not_divide_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm(monkeypatch).release("0.29.0")
    request = Request("r", TOKENS)
    vllm.hash_blocks(request, 16)
    assert verified_block_size(request, plan(), 40) is None


def test_a_hash_of_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm(monkeypatch).release("0.29.0")
    decided = plan()
    request = Request("r", TOKENS)
    vllm.hash_blocks(request, 16)
    request._all_token_ids[3] += 1
    assert verified_block_size(request, decided, 16) is None
    salted = Request("r", TOKENS, cache_salt="salt")
    vllm.hash_blocks(salted, 16)
    salted.cache_salt = "another"
    assert verified_block_size(salted, decided, 16) is None


def test_a_start_that_is_not_what_was_planned_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm(monkeypatch).release("0.29.0")
    decided = plan()
    vllm.utils.NONE_HASH = sha256("another")
    request = Request("r", TOKENS)
    vllm.hash_blocks(request, 16)
    assert verified_block_size(request, decided, 16) is None


def test_requests_that_vllm_did_not_hash() -> None:
    request = Request("r", TOKENS)
    assert not has_hashes(request)
    request.block_hashes = [(1, TOKENS[:16], None)]  # as in 0.10.1
    assert not has_hashes(request)
    request.block_hashes = [b"h" * 32]
    assert has_hashes(request)
    assert not has_hashes(object())


@pytest.mark.parametrize(
    ("keys", "by_name"),
    [
        (lambda request: [request.lora_request.lora_name], True),
        (lambda request: [request.lora_request.lora_name, request.lora_request.lora_path], False),
        (None, True),
    ],
)
def test_whether_vllm_finds_adapters_by_name_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch, keys: Any, *, by_name: bool
) -> None:
    assert not finds_adapters_by_name()  # vLLM is not installed
    vllm = FakeVllm(monkeypatch)
    vllm.release("0.29.0")
    if keys is not None:
        vllm.utils._gen_lora_extra_hash_keys = keys
    assert finds_adapters_by_name() == by_name
