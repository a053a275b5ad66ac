"""How many tokens of an answer a step may compute: none chooses among blocks that the step completes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ucm.sparse.attention import StepBatch
from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK
from ucm.sparse.topk.selection import WORTHWHILE, SelectionPlanner


def method(*, latent: bool, **more: Any) -> BlockTopK:
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=latent))
    return BlockTopK(config, Role.SCHEDULER, {"token_budget": 2048, "recent_tokens": 9, **more})


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
    assert method(latent=False, min_context=0).limit_new_tokens(request, computed, new) == allowed
    assert method(latent=True, min_context=0).limit_new_tokens(request, computed, new) == latent


@pytest.mark.parametrize(("more", "least"), [({}, WORTHWHILE), ({"min_context": 500}, 500)])
def test_answers_that_are_dense_anyway_are_computed_again_at_once(more: dict[str, int], least: int) -> None:
    request, one = SimpleNamespace(num_prompt_tokens=100), method(latent=False, **more)
    assert one.limit_new_tokens(request, 90, least) == least - 91
    assert one.limit_new_tokens(request, least - 5, 30) == 10
    planner = SelectionPlanner(one._budget(16), more.get("min_context"))
    assert planner.plan(step(90, least - 91), set()) is None


def step(computed: int, new: int) -> StepBatch:
    """A step of a request with a prompt of 100 tokens."""
    counts = np.array([[new], [computed], [100]], np.int64)
    return StepBatch(["a"], counts[0], counts[1], counts[2], np.array([False]))


def step_is_planned(one: BlockTopK, block_size: int, computed: int, new: int) -> bool:
    """Whether a step has rows that choose."""
    return SelectionPlanner(one._budget(block_size), 0).plan(step(computed, new), set()) is not None


@pytest.mark.parametrize("recent", [0, 3, 64])
@pytest.mark.parametrize("split", [1, 33])
def test_with_recurrent_layers_a_step_may_reach_the_end_of_a_block(recent: int, split: int) -> None:
    """vLLM ends it there, so fewer tokens would become none, in every step; also if the backend splits the blocks."""
    size, request = 528, SimpleNamespace(num_prompt_tokens=100)
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, is_hybrid=True), cache_config=SimpleNamespace(block_size=size)
    )
    one = BlockTopK(config, Role.SCHEDULER, {"token_budget": 4 * size, "recent_tokens": recent, "min_context": 0})
    for computed in range(0, 8 * size, size):
        allowed = one.limit_new_tokens(request, computed, 10 * size - computed)
        assert allowed >= size
        step_is_planned(one, size // split, computed, allowed)
    assert step_is_planned(one, size // split, 7 * size, size)


@pytest.mark.parametrize("size", [1, 16, 48])
def test_a_step_that_vllm_pads_to_all_drafts_is_served_whatever_the_option(size: int) -> None:
    """It pads what was limited to one token, so a limit to one token would let it verify tokens as drafts."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False), speculative_config=SimpleNamespace(num_speculative_tokens=5)
    )
    one = BlockTopK(config, Role.SCHEDULER, {"token_budget": 8 * 48, "recent_tokens": 0, "min_context": 0})
    assert one.limit_new_tokens(SimpleNamespace(num_prompt_tokens=100), 100, 30) == 6
    assert all(step_is_planned(one, size, computed, 6) for computed in range(600, 700))
