"""What is asked of vLLM about its own hashes. `test_with_vllm.py` checks real releases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ucm.hashing.fake_vllm import FakeVllm
from ucm.hashing.request_hasher import finds_adapters_by_name


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
