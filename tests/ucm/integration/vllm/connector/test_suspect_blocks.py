"""A block that failed is reported again until somebody has computed it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.planner import SIZE, Planner, request
from tests.ucm.integration.vllm.connector.simulation.request import Request
from ucm.integration.vllm.connector.request_state import RequestState
from ucm.integration.vllm.connector.suspect_blocks import SuspectBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence


class Requests:
    """Requests by name, with their blocks and computed tokens."""

    def __init__(self, **of: tuple[list[int], int]) -> None:
        self.states: dict[str, RequestState | None] = {
            name: RequestState(Request(name, [1] * 99, 1, num_computed_tokens=computed), [blocks], [0])
            for name, (blocks, computed) in of.items()
        }
        self.suspects = SuspectBlocks(SIZE)

    def computed(self, **tokens: int) -> None:
        for name, count in tokens.items():
            state = self.states[name]
            assert state is not None
            state.request.num_computed_tokens = count

    def failed(self, *block_ids: int) -> set[int]:
        lists = [state.block_ids[0] for state in self.states.values() if state is not None]
        return self.suspects.failed(set(block_ids), lists)

    def begin(self, *scheduled: str, loaded: Sequence[int] = ()) -> set[int]:
        return self.suspects.begin(loaded, scheduled, self.states)


def test_what_is_behind_a_failed_block_is_suspect() -> None:
    requests = Requests(first=([1, 2, 3], 12), second=([1, 2, 4, 5], 12), third=([6, 7], 8))
    assert requests.failed(2) == {2, 3, 4, 5}
    assert requests.failed(7) == {7}
    assert requests.failed(99) == {99}


def test_it_is_reported_while_somebody_reads_it() -> None:
    requests = Requests(first=([1, 2, 3], 4), second=([1, 2, 4], 8))
    requests.failed(2)
    assert requests.begin("first", "second") == {2}
    assert "second" in requests.suspects
    assert "first" not in requests.suspects  # it computes the block in this step
    assert requests.failed(2) == set()  # nothing new
    requests.computed(first=8, second=4)
    assert requests.begin("first", "second") == set()


def test_what_was_computed_anew_is_trusted() -> None:
    requests = Requests(first=([1, 2, 3], 4), second=([1, 2, 4], 8))
    requests.failed(2)
    assert requests.begin("first") == set()
    requests.computed(first=8)
    assert requests.begin("second") == set()


def test_what_vllm_took_back_is_not() -> None:
    requests = Requests(first=([1, 2, 3], 4), second=([1, 2, 4], 8))
    requests.failed(2)
    requests.begin("first")
    requests.computed(first=4)
    assert requests.begin("second") == {2}


def test_a_part_of_a_block_is_not_enough() -> None:
    requests = Requests(first=([1, 2, 3], 4), second=([1, 2, 4], 8))
    requests.failed(2)
    for tokens in (5, 7):
        requests.begin("first")
        requests.computed(first=tokens)
        assert requests.begin("second") == {2}
    requests.begin("first")
    requests.computed(first=9)
    assert requests.begin("first", "second") == set()


def test_what_was_computed_behind_a_suspect_block_is_suspect_still() -> None:
    requests = Requests(first=([1, 2, 3], 8), second=([9, 3], 8))
    requests.failed(2)
    assert requests.begin("first") == {2}
    requests.computed(first=12)
    assert requests.begin("second") == {3}


def test_a_block_that_is_loaded_is_another_block() -> None:
    requests = Requests(first=([1, 2, 3], 8), other=([7, 2], 8))
    requests.failed(2)
    del requests.states["first"]
    assert requests.begin("other", loaded=[2]) == set()


def test_requests_that_are_gone_or_unknown_are_left_alone() -> None:
    requests = Requests(first=([1, 2], 8))
    requests.states["no cache"] = None
    requests.failed(1)
    requests.begin("first")
    del requests.states["first"]
    assert requests.begin("first", "no cache") == set()


def test_what_reads_a_suspect_block_is_not_dumped() -> None:
    planner = Planner()
    tokens = list(range(18))
    first, second = request(tokens, "first"), request([*tokens[:8], 90, 91, 92, 93], "second")
    for new in (first, second):
        planner.admit(new)
    planner.step({"first": 18, "second": 12}, [(first, [[1, 2, 3, 4, 5]]), (second, [[1, 2, 6]])])
    assert planner.side.load_failed({2}) == {2, 3, 4, 5, 6}
    first.num_computed_tokens, second.num_computed_tokens = 4, 8
    plan = planner.step({"first": 14, "second": 4})
    assert plan.failed_block_ids == {2}
    assert [moves.request_id for moves in plan.dumps] == ["first"]
    assert plan.void == 1
    assert planner.side.load_failed({2}) == set()
    first.num_computed_tokens, second.num_computed_tokens = 18, 4
    plan = planner.step({"second": 8})
    assert plan.failed_block_ids == set()
    assert plan.void == 1  # what was dumped for the first request is right
    assert [moves.request_id for moves in plan.dumps] == ["second"]


def test_what_an_aborted_request_computed_behind_a_failed_block_is_told_too() -> None:
    planner = Planner()
    new = request(list(range(18)))
    planner.admit(new)
    planner.run(new, 18, [[1, 2, 3, 4, 5]])
    planner.side.finished(new)  # while the step that loads was running
    assert planner.side.load_failed({2}) == {2, 3, 4, 5}
    planner.step({})
    assert planner.side.load_failed({8}) == {8}
