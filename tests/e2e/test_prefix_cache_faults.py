"""Damaged, lost and vanishing blocks are recomputed with the same tokens, counted, and logged once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_damage import ABORT_STEPS, CAUSES, DAMAGES, bystanders, crowd, damage_some, sharers, victim
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.prefix_engine import PrefixEngine
    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

KINDS = ("UCMDirectConnector", "UCMLayerWiseConnector")
#: A failed directory is soon tried again.
STORE: dict[str, Any] = {"rest_seconds": 0.2}


@dataclass
class Bench:
    """An engine, its store, and a plain vLLM's answers."""

    engine: PrefixEngine
    store: Path
    expected: dict[str, list[list[int]]]

    def tokens(self, requests: list[Request]) -> list[list[int]]:
        """Return the tokens that the engine generates."""
        return [answer.tokens for answer in self.engine.generate(requests)]

    def blocks_of(self, one: Request) -> list[Path]:
        """Have a request computed and stored; return the files of its prompt's blocks, in order."""
        from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - needs the build's packages

        self.forget()
        found: list[Path] = []
        for end in range(BLOCK, len(one["prompt"]) + 1, BLOCK):
            before = set(block_files(self.store))
            self.engine.generate([{"prompt": one["prompt"][: end + 1], "params": {"max_tokens": 1}}])
            self.engine.settle()
            (new,) = set(block_files(self.store)) - before
            found.append(block_files(self.store)[new])
        self.forget()
        return found

    def forget(self) -> None:
        """Make all that was saved visible, and reset the engine's own prefix cache."""
        self.engine.settle()
        assert self.engine.reset(), "the engine keeps blocks"

    def failures(self, operation: str = "load") -> dict[str, float]:
        """Return the number of failed blocks so far, by cause."""
        return {
            name.partition("cause=")[2].partition(",")[0]: value
            for name, value in self.engine.counters().items()
            if name.startswith("ucm:failures_total{") and f"operation={operation}" in name and value
        }


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest, prefix_runs: PrefixRuns, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
    from tests.e2e.prefix_runs import damage_phase  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    phases = prefix_runs["reference"].phases
    expected = {name: phase.tokens for name in phases if (phase := phases[name]) and name.startswith(damage_phase(""))}
    directory = tmp_path_factory.mktemp(request.param)
    store = {**posix(directory / "store"), **STORE}
    environment = prefix_runs.environments[False]
    with PrefixEngine(environment, directory / "engine", connector(store, request.param), IN_PROCESS) as engine:
        yield Bench(engine, directory / "store", {name.partition(": ")[2]: tokens for name, tokens in expected.items()})


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_block_is_computed_again(bench: Bench, name: str) -> None:
    one = victim(name)
    files = bench.blocks_of(one)
    before, cause = bench.failures(), CAUSES.get(name, "corrupt")
    DAMAGES[name](files[2], files[5])
    assert bench.tokens([one]) == bench.expected[name]
    assert bench.failures() == ({**before, cause: before.get(cause, 0) + 1} if cause else before)
    bench.engine.settle()
    assert files[2].exists()


def test_it_is_stored_again(bench: Bench) -> None:
    one = victim("healed")
    files = bench.blocks_of(one)
    damaged = DAMAGES["a bit of the first layer"]
    damaged(files[2], files[5])
    assert bench.tokens([one]) == bench.expected["healed"]
    bench.forget()
    assert files[2].exists()
    before = bench.failures()
    (answer,) = bench.engine.generate([one])
    assert (answer.tokens, answer.cached) == (bench.expected["healed"][0], 6 * BLOCK)
    assert bench.failures() == before


def test_two_blocks_of_a_prompt_and_the_engine_generates_meanwhile(bench: Bench) -> None:
    one = victim("two")
    files = bench.blocks_of(one)
    DAMAGES["zeros"](files[1], files[5])
    DAMAGES["cut short"](files[4], files[5])
    expected = [*bench.expected["bystanders"], *bench.expected["two"]]
    assert bench.tokens([*bystanders(), one]) == expected


def test_more_is_computed_again_than_a_step_takes(bench: Bench) -> None:
    one = victim("long", 16)
    files = bench.blocks_of(one)
    DAMAGES["the last bits"](files[1], files[5])
    assert bench.tokens([one]) == bench.expected["long"]


def test_requests_that_share_the_block_at_once(bench: Bench) -> None:
    requests = sharers("alike")
    files = bench.blocks_of(requests[0])
    DAMAGES["a bit of the first layer"](files[3], files[5])
    assert bench.tokens(requests) == bench.expected["shared alike"]
    # The engine's own cache is also right.
    assert bench.tokens(requests[::-1]) == bench.expected["shared alike"][::-1]


@pytest.mark.parametrize("steps", ABORT_STEPS)
def test_the_request_that_met_the_damage_is_aborted(bench: Bench, steps: int) -> None:
    first, *others = requests = sharers(str(steps))
    expected = bench.expected[f"shared {steps}"]
    files = bench.blocks_of(first)
    DAMAGES["a bit of the first layer"](files[3], files[5])
    assert bench.tokens([{**first, "abort_after": steps}, *others])[1:] == expected[1:]
    assert bench.tokens(requests) == expected
    bench.forget()
    assert bench.tokens(requests) == expected


def test_damage_everywhere_with_preemptions(bench: Bench) -> None:
    from tests.e2e.prefix_runs import block_files  # noqa: PLC0415 - needs the build's packages

    for seed in range(3):
        assert bench.tokens(crowd()) == bench.expected["crowd"]
        bench.forget()
        assert damage_some(list(block_files(bench.store).values()), seed) > 20
    preempted = bench.engine.counters()["vllm:num_preemptions_total"]
    assert bench.tokens(crowd()) == bench.expected["crowd"]
    assert bench.engine.counters()["vllm:num_preemptions_total"] > preempted


def test_each_cause_is_said_once(bench: Bench) -> None:
    for cause in bench.failures():
        assert bench.engine.log.count(f"(cause {cause}; its tokens are recomputed") == 1


def test_the_store_vanishes_and_comes_back(bench: Bench) -> None:
    stored, lost, back = victim("beside"), victim("lost"), victim("back")
    bench.blocks_of(stored)
    before = bench.failures(), bench.failures("save")
    bench.store.rename(bench.store.with_name("gone"))  # atomically, because it may be written to
    assert bench.tokens([stored]) == bench.expected["beside"]
    assert bench.tokens([lost]) == bench.expected["lost"]
    assert bench.tokens(crowd()) == bench.expected["crowd"]
    # Nothing is found, and the first save creates the directory again.
    assert (bench.failures(), bench.failures("save")) == before
    bench.forget()
    assert bench.tokens([lost]) == bench.expected["lost"]
    bench.engine.settle()
    assert bench.store.exists()
    bench.blocks_of(back)
    (answer,) = bench.engine.generate([back])
    assert (answer.tokens, answer.cached) == (bench.expected["back"][0], 6 * BLOCK)
