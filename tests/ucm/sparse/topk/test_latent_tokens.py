"""How many tokens of an answer a step may compute: none chooses among blocks that the step completes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK


def method(*, latent: bool) -> BlockTopK:
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=latent))
    return BlockTopK(config, Role.SCHEDULER, {"token_budget": 2048, "recent_tokens": 9})


@pytest.mark.parametrize(
    ("computed", "new", "allowed", "latent"),
    [
        (0, 100, 100, 100),  # a prompt
        (40, 60, 60, 60),  # the rest of one
        (0, 130, 100, 100),  # preempted after 30 tokens: first the prompt
        (95, 35, 10, 5),  # its end, and then the answer
        (100, 30, 10, 1),  # with latent attention only decodes can be restricted
        (120, 10, 10, 1),
        (129, 1, 1, 1),
        (100, 0, 0, 0),
    ],
)
def test_answers_are_computed_again_a_few_tokens_at_a_time(computed: int, new: int, allowed: int, latent: int) -> None:
    request = SimpleNamespace(num_prompt_tokens=100)
    assert method(latent=False).limit_new_tokens(request, computed, new) == allowed
    assert method(latent=True).limit_new_tokens(request, computed, new) == latent
