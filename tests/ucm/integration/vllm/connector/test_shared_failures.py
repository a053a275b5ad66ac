"""Blocks that failed are reported again until everyone who has them computes for himself."""

from __future__ import annotations

from tests.ucm.integration.vllm.connector.planner import SIZE, Planner, request
from tests.ucm.integration.vllm.connector.simulation.request import Request
from ucm.integration.vllm.connector.request_state import RequestState
from ucm.integration.vllm.connector.shared_failures import SharedFailures


def state(block_ids: list[int], computed: int) -> RequestState:
    found = Request("", list(range(100)), 1, num_computed_tokens=computed)
    return RequestState(found, [block_ids], [0])


def test_until_each_computes_it_for_itself() -> None:
    failures = SharedFailures(SIZE)
    first, second, third = state([1, 2, 3], 12), state([1, 2, 4], 12), state([5], 4)
    states: dict[str, RequestState | None] = {"first": first, "second": second, "third": third, "no": None}
    assert failures.failed({2}, states) == {2}
    assert [name in failures for name in states] == [True, True, False, False]
    first.request.num_computed_tokens = SIZE  # vLLM has the first compute it for both
    assert failures.report(states) == {2}
    assert [name in failures for name in states] == [False, True, False, False]
    assert failures.failed({2}, states) == set()  # nothing new, and the first one is not blamed again
    assert [name in failures for name in states] == [False, True, False, False]
    second.request.num_computed_tokens = SIZE
    assert failures.report(states) == set()
    assert "second" not in failures


def test_a_request_that_ended_is_forgotten() -> None:
    failures = SharedFailures(SIZE)
    states: dict[str, RequestState | None] = {"r": state([1, 2], 8)}
    failures.failed({1}, states)
    assert failures.report({}) == set()
    assert "r" not in failures


def test_the_first_failed_block_counts() -> None:
    failures = SharedFailures(SIZE)
    found = state([1, 2, 3], 12)
    failures.failed({3}, {"r": found})
    assert failures.report({"r": found}) == {3}
    failures.failed({2, 3}, {"r": found})
    assert failures.report({"r": found}) == {2}


def test_what_counts_a_failed_block_as_computed_is_not_dumped() -> None:
    planner = Planner()
    tokens = list(range(18))
    first, second = request(tokens, "first"), request([*tokens[:8], 90, 91, 92, 93], "second")
    for new in (first, second):
        planner.admit(new)
    planner.step({"first": 18, "second": 12}, [(first, [[1, 2, 3, 4, 5]]), (second, [[1, 2, 6]])])
    planner.side.load_failed({2})
    first.num_computed_tokens, second.num_computed_tokens = 4, 8
    plan = planner.step({"first": 14, "second": 4})
    assert plan.failed_block_ids == {2}
    assert [moves.request_id for moves in plan.dumps] == ["first"]
    assert plan.void == 1
    planner.side.load_failed({2})
    first.num_computed_tokens, second.num_computed_tokens = 18, 4
    plan = planner.step({"second": 8})
    assert plan.failed_block_ids == set()
    assert plan.void == 1  # the first request's step was right
    assert [moves.request_id for moves in plan.dumps] == ["second"]


def test_what_an_aborted_request_computed_behind_a_failed_block_is_told_too() -> None:
    planner = Planner()
    new = request(list(range(18)))
    planner.admit(new)
    planner.run(new, 18, [[1, 2, 3, 4, 5]])
    planner.side.finished(new)  # while the step that loads was running
    assert planner.side.load_failed({2}) == {2, 3, 4, 5}
    planner.step({})
    assert planner.side.load_failed({2}) == {2}
