"""How many tokens of a request a step may compute with latent attention: only decodes can be restricted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK


def method(*, latent: bool) -> BlockTopK:
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=latent))
    return BlockTopK(config, Role.SCHEDULER, {"token_budget": 2048})


@pytest.mark.parametrize(
    ("computed", "new", "allowed"),
    [
        (0, 100, 100),  # a prompt
        (40, 60, 60),  # the rest of one
        (0, 130, 100),  # preempted after 30 tokens: first the prompt
        (100, 30, 1),  # then the answer, one by one
        (129, 1, 1),
        (100, 0, 0),
    ],
)
def test_generated_tokens_are_computed_again_one_by_one(computed: int, new: int, allowed: int) -> None:
    request = SimpleNamespace(num_prompt_tokens=100)
    assert method(latent=True).limit_new_tokens(request, computed, new) == allowed
    assert method(latent=False).limit_new_tokens(request, computed, new) == new
