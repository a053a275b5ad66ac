"""What a client of the API server writes, through vLLM's own requests to what a method takes from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from ucm.sparse.attention import asked_of
from ucm.sparse.options import RequestOptions, parse_asked


def request(kind: Any, asked: Any) -> Any:
    told = {"vllm_xargs": {"ucm_sparse": asked}, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    del told["messages" if kind is CompletionRequest else "prompt"]
    return kind.model_validate_json(json.dumps(told))


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (False, None),
        (0, None),
        (True, RequestOptions()),
        ('{"token_budget": 512}', RequestOptions(token_budget=512)),
    ],
)
def test_it_arrives(kind: Any, asked: Any, wanted: RequestOptions | None) -> None:
    found = asked_of(request(kind, asked).to_sampling_params(16, {}))
    assert found is not None
    assert parse_asked(found) == wanted


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_an_object_is_refused_by_vllm(kind: Any) -> None:
    with pytest.raises(ValueError, match="vllm_xargs"):
        request(kind, {"token_budget": 512})
