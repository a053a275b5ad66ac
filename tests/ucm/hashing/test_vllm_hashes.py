"""What is asked of vLLM about its own hashes. `test_with_vllm.py` checks real releases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ucm.hashing.fake_vllm import FakeVllm
from tests.ucm.hashing.stand_ins import Request
from ucm.hashing.request_hasher import finds_adapters_by_name, has_hashes

TOKENS = list(range(100))


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
