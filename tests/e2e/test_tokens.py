"""Without a configured feature a real engine generates exactly plain vLLM's tokens, in all scheduling conditions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tests.e2e.workload import BLOCK, TOKENS_PER_STEP, phases

if TYPE_CHECKING:
    from tests.e2e.scenarios import Runs

pytestmark = pytest.mark.e2e

CORE = pytest.param("probe", marks=pytest.mark.core)
#: Without any of its files loaded, no rule of a release matters; groups of rules alone are another overlay.
DISABLED = pytest.param("disabled", marks=pytest.mark.newest_only)
SAME_AS_PLAIN = ("overlay", CORE, DISABLED, "attention off", "scheduler off")
REQUESTS = {name: [*itertools.chain(*batches)] for name, batches in phases().items()}


@pytest.mark.parametrize("name", ["plain", "overlay"])
def test_the_workload_meets_every_condition(runs: Runs, name: str) -> None:
    run = runs[name]
    assert run.code == 0, run.log[-4000:]
    assert sum(map(len, run.tokens.values())) >= 50
    assert run.about["block_size"] == BLOCK
    counters = {phase: result["counters"] for phase, result in run.phases.items()}
    assert counters["preempted"]["vllm:num_preemptions"] > 0
    assert counters["prefix"]["vllm:prefix_cache_hits"] >= 8 * 5 * BLOCK
    assert run.phases["prefix"]["cached"][1:] == [5 * BLOCK] * 8
    # A step computes at most its budget, so a longer prompt took several steps.
    assert run.about["chunked_prefill"]
    assert run.about["tokens_per_step"] == TOKENS_PER_STEP
    assert all(len(request["prompt"]) > 2 * TOKENS_PER_STEP for request in REQUESTS["chunked"])
    prompt_tokens = sum(len(request["prompt"]) for request in REQUESTS["chunked"])
    assert counters["chunked"]["vllm:iteration_tokens_total:count"] >= prompt_tokens / TOKENS_PER_STEP


def test_outputs_depend_on_the_whole_context(runs: Runs) -> None:
    greedy = [tokens for phase, many in runs["plain"].tokens.items() if phase != "sampled" for tokens in many]
    assert len({tuple(tokens) for tokens in greedy}) == len(greedy)
    followers = defaultdict(set)
    for tokens in greedy:
        for token, follower in itertools.pairwise(tokens):
            followers[token].add(follower)
    # If the next token depended only on the last one, each would have a single successor.
    assert sum(len(found) > 2 for found in followers.values()) > 100


@pytest.mark.parametrize("name", SAME_AS_PLAIN)
def test_tokens_are_those_of_plain_vllm(runs: Runs, name: str) -> None:
    assert runs[name].code == 0, runs[name].log[-4000:]
    assert runs[name].tokens == runs["plain"].tokens


def test_tokens_are_those_of_plain_vllm_when_compiled(runs: Runs) -> None:
    plain, overlay = runs["compiled plain"], runs["compiled overlay"]
    assert plain.code == 0, plain.log[-4000:]
    assert overlay.code == 0, overlay.log[-4000:]
    for name in ("compiled plain", "compiled overlay"):
        assert list(runs.directory(name).rglob("*.so")), "nothing was compiled"
    assert overlay.tokens == plain.tokens
