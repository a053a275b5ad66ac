"""A second engine on the same store loads KV and generates exactly the tokens of an engine without a connector."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import ABORTED, computed_blocks, expected_hits
from tests.e2e.workload import BLOCK, TOKENS_PER_STEP
from ucm.store.base import BlockKey
from ucm.store.format import verify

if TYPE_CHECKING:
    from tests.e2e.prefix_runs import PrefixRuns

pytestmark = pytest.mark.e2e

COLD = ("cold direct", "cold layer-wise")
WARM = ("warm direct", "warm layer-wise")
DAMAGED = ("damaged direct", "damaged layer-wise")
#: Both sides of a restart, and each connector once with three processes.
CORE = {"cold direct", "warm layer-wise"}
#: The mock differs from the connector that it is made of in how much it looks up, which no release knows of.
MARKS = {**dict.fromkeys(CORE, pytest.mark.core), "mock": pytest.mark.newest_only}
LOCAL, STORED = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
LOADED = "ucm:hit_tokens_total{tier=posix}"


def of(*names: str) -> list[Any]:
    """Return the scenarios as parameters, with their marks."""
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in names]


def test_the_reference_is_vllm_alone(prefix_runs: PrefixRuns) -> None:
    reference = prefix_runs["reference"]
    assert "UCM" not in reference.log
    assert not reference.blocks
    assert sum(len(phase.answers) for phase in reference.phases.values()) >= 100


def test_its_outputs_depend_on_the_whole_context(prefix_runs: PrefixRuns) -> None:
    followers = defaultdict(set)
    for phase in prefix_runs["reference"].phases.values():
        for answer in phase.answers:
            for token, follower in itertools.pairwise(answer.tokens):
                followers[token].add(follower)
    # If the next token depended only on the last one, wrong KV would not show.
    assert sum(len(found) > 2 for found in followers.values()) > 150


@pytest.mark.parametrize("name", of(*COLD, *WARM, *DAMAGED, "mock"))
def test_tokens_are_those_of_the_reference(prefix_runs: PrefixRuns, name: str) -> None:
    reference, record = prefix_runs["reference"].phases, dict(prefix_runs[name].phases)
    if name == "damaged layer-wise":
        # vLLM discards the tokens sampled in a step with a failed load, but not the random numbers drawn for them.
        del record["seeded"]
    assert {phase: played.tokens for phase, played in record.items()} == {
        phase: reference[phase].tokens for phase in record
    }


@pytest.mark.parametrize("name", [*COLD, *WARM])
def test_conditions_were_met(prefix_runs: PrefixRuns, name: str) -> None:
    phases = prefix_runs[name].phases
    assert phases["preempted"].counters["vllm:num_preemptions_total"] > 0
    chunked = phases["chunked"] if name in COLD else phases["grown"]
    computed = sum(len(r["prompt"]) - (a.cached or 0) for r, a in zip(chunked.requests, chunked.answers, strict=True))
    assert chunked.counters["vllm:iteration_tokens_total_count"] >= computed / TOKENS_PER_STEP > 3
    cut = [a for r, a in zip(phases[ABORTED].requests, phases[ABORTED].answers, strict=True) if "abort_after" in r]
    assert len(cut) == 3
    # EngineCore may be far ahead of the aborting process.
    assert any(len(answer.tokens) < 200 for answer in cut)


@pytest.mark.parametrize("name", COLD)
def test_a_cold_engine_stores_every_whole_block_once(prefix_runs: PrefixRuns, name: str) -> None:
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - needs the build's packages

    record = prefix_runs[name]
    assert len(record.blocks) == len(computed_blocks(record.phases.values()))
    for block, path in block_files(record.store).items():
        verify(memoryview(path.read_bytes()), BlockKey(bytes.fromhex(block)))


def test_layer_by_layer_or_not_the_same_blocks_are_stored(prefix_runs: PrefixRuns) -> None:
    one, other = (prefix_runs[name].blocks for name in COLD)
    assert one == other


@pytest.mark.parametrize("name", of(*WARM))
def test_a_warm_engine_computes_only_what_is_not_stored(prefix_runs: PrefixRuns, name: str) -> None:
    stored = computed_blocks(prefix_runs["cold direct"].phases.values())
    for phase, played in prefix_runs[name].phases.items():
        expected = expected_hits(played, stored)
        if phase != ABORTED:
            assert [answer.cached for answer in played.answers] == expected, phase


@pytest.mark.parametrize("name", of(*WARM))
def test_what_was_not_computed_was_loaded_or_in_the_engine(prefix_runs: PrefixRuns, name: str) -> None:
    total = 0.0
    for phase, played in prefix_runs[name].phases.items():
        if phase == ABORTED:
            continue
        rise = played.counters
        assert rise.get(LOCAL, 0) + rise.get(STORED, 0) == sum(a.cached or 0 for a in played.answers), phase
        # A request that resumes after a preemption also loads, which vLLM counts elsewhere.
        loaded = rise.get(LOADED, 0)
        assert loaded >= rise.get(STORED, 0) if phase == "preempted" else loaded == rise.get(STORED, 0), phase
        total += loaded
    assert total > 100 * BLOCK


@pytest.mark.parametrize("name", WARM)
def test_hits_in_the_engine_and_in_the_store_add_up(prefix_runs: PrefixRuns, name: str) -> None:
    phases = prefix_runs[name].phases
    assert phases["part of the document"].counters[STORED] == 4 * BLOCK
    rise = phases["the document"].counters
    assert (rise[LOCAL], rise[STORED]) == (4 * BLOCK, 5 * BLOCK)


@pytest.mark.parametrize("name", [*COLD, *WARM])
def test_salts_share_nothing(prefix_runs: PrefixRuns, name: str) -> None:
    phases = prefix_runs[name].phases
    if name in COLD:
        assert phases["one salt"].answers[0].cached == 0
        return
    assert phases["one salt"].answers[0].cached == 4 * BLOCK
    assert phases["another salt"].answers[0].cached == 0
    assert phases["no salt"].answers[0].cached == 0


@pytest.mark.parametrize("name", [*COLD, *WARM])
def test_a_prompt_whose_logits_are_wanted_is_computed(prefix_runs: PrefixRuns, name: str) -> None:
    (wanted,) = prefix_runs["reference"].phases["logprobs"].answers
    (answer,) = prefix_runs[name].phases["logprobs"].answers
    assert answer.cached == 0
    assert answer.prompt_logprobs is not None
    assert wanted.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert answer.prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-4)


@pytest.mark.parametrize("name", WARM)
def test_generated_tokens_are_found_in_the_next_turn(prefix_runs: PrefixRuns, name: str) -> None:
    (request,), (answer,) = prefix_runs[name].phases["taken up"].requests, prefix_runs[name].phases["taken up"].answers
    asked, said = 50, 60
    assert len(request["prompt"]) > asked + said
    assert answer.cached == (asked + said - 1) // BLOCK * BLOCK


@pytest.mark.newest_only
def test_the_mock_hits_no_more_than_its_share(prefix_runs: PrefixRuns) -> None:
    stored = computed_blocks(prefix_runs["cold direct"].phases.values())
    for phase, played in prefix_runs["mock"].phases.items():
        free = expected_hits(played, stored)
        if phase in {ABORTED, "preempted"} or played.counters.get(LOCAL, 0):
            continue
        capped = [
            min(hit, len(request["prompt"]) // 2 // BLOCK * BLOCK)
            for hit, request in zip(free, played.requests, strict=True)
        ]
        assert [answer.cached for answer in played.answers] == capped, phase
    assert sum(played.counters.get(LOADED, 0) for played in prefix_runs["mock"].phases.values()) > 30 * BLOCK


@pytest.mark.parametrize("name", of(*COLD, *WARM, "mock"))
def test_nothing_failed_and_nothing_was_said_to_have(prefix_runs: PrefixRuns, name: str) -> None:
    record = prefix_runs[name]
    failures = {
        counter: rise
        for played in record.phases.values()
        for counter, rise in played.counters.items()
        if counter.startswith(("ucm:failures_total", "ucm:tier_failures_total")) and rise
    }
    assert not failures
    wrong = [line for line in record.log.splitlines() if "[UCM" in line and ("WARNING" in line or "ERROR" in line)]
    assert not wrong


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_was_met_and_counted(prefix_runs: PrefixRuns, name: str) -> None:
    record = prefix_runs[name]
    rises = [played.counters for played in record.phases.values()]
    for cause in ("corrupt", "foreign"):
        counter = f"ucm:failures_total{{cause={cause},operation=load}}"
        assert sum(rise.get(counter, 0) for rise in rises) > 0
        assert record.log.count(f"(cause {cause}; its tokens are recomputed") == 1
    assert sum(rise.get(LOADED, 0) for rise in rises) > 0


@pytest.mark.parametrize("name", ["cold direct", "warm layer-wise"])
def test_no_overlay_is_needed(prefix_runs: PrefixRuns, name: str) -> None:
    record = prefix_runs[name]
    assert not record.environment.overlay.exists()
    assert "[UCM.Connector]" in record.log
    assert "[UCM.Patch]" not in record.log


@pytest.mark.parametrize("name", ["cold layer-wise", "warm direct"])
def test_an_overlay_does_no_harm(prefix_runs: PrefixRuns, name: str) -> None:
    record = prefix_runs[name]
    assert record.environment.overlay.exists()
    assert "[UCM.Connector]" in record.log
    assert "[UCM.Patch] vllm.v1.core.sched.scheduler is loaded from" in record.log
