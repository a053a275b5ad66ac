"""What an engine computes again is counted against what an earlier request had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import httpx2
import pytest

from tests.e2e.bench.agents import SCALE, Replay, prompt
from tests.e2e.prefix_engine import Answer, PrefixEngine
from tests.lease_trace import PERSON, TOOL, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

SYSTEM = SCALE.system
#: Two sessions with one system prompt, and another's prompt between them; all at once, so that nothing waits.
TURNS = [
    Turn(0.0, 0, -1, 2, 0, TOOL, agent=True),
    Turn(0.0, 9, 9, 4, 0, "", agent=False),
    Turn(0.0, 1, -1, 1, 0, PERSON, agent=True),
    Turn(0.0, 0, -1, 5, 2, "", agent=True),
    Turn(0.0, 1, -1, 3, 1, "", agent=True),
]


def replayed(
    cached: Callable[[Turn], int], order: str = "LRU", code: int = 200
) -> tuple[Replay, list[tuple[str, Any]], Any]:
    engine, told, left = create_autospec(PrefixEngine, instance=True), list[tuple[str, Any]](), iter(TURNS)
    engine.generate.side_effect = lambda _: [Answer([1], cached(next(left)), 0.5, "length")]

    def post(action: str, **body: Any) -> httpx2.Response:
        told.append((action, body))
        return httpx2.Response(code if action == "pin" else 200, request=httpx2.Request("POST", "http://ucm"))

    replay = Replay(engine, order, post)
    replay.run(TURNS)
    return replay, told, engine


def test_prompts_have_the_blocks_that_the_trace_says_in_common() -> None:
    first, other, second, later, _ = map(prompt, TURNS)
    assert later[: SYSTEM + 2 * SCALE.block] == first[:-1]
    assert second[:SYSTEM] == first[:SYSTEM]
    assert second[SYSTEM : SYSTEM + SCALE.block] != first[SYSTEM : SYSTEM + SCALE.block]
    assert len(other) == 4 * SCALE.block + 1
    assert other[0] != first[0]


@pytest.mark.parametrize(
    ("cached", "again"),
    [
        (lambda turn: 0, 3 * SYSTEM + 3 * SCALE.block),
        (lambda turn: SYSTEM + turn.known * SCALE.block if turn.agent else 0, 0),
        (lambda turn: SYSTEM if turn.agent else 0, 3 * SCALE.block),
    ],
)
def test_only_what_an_earlier_request_had_is_computed_again(cached: Callable[[Turn], int], again: int) -> None:
    served = replayed(cached)[0].served
    assert served.again == again
    assert served.computed == sum(len(prompt(turn)) - cached(turn) for turn in TURNS)
    assert served.first == {TOOL: [0.5], PERSON: [0.5]}


def test_who_tells_retains_pins_and_drops() -> None:
    _, told, engine = replayed(lambda _: 0, "told")
    assert [action for action, _ in told] == ["pin", "drop", "drop"]
    assert told[0][1]["tokens"] == prompt(TURNS[0])[:SYSTEM]
    assert [body["tokens"] for _, body in told[1:]] == [prompt(TURNS[3]), prompt(TURNS[4])]
    assert {body["from_token"] for _, body in told[1:]} == {SYSTEM}
    hints = [call.args[0][0]["params"].get("extra_args") for call in engine.generate.call_args_list]
    assert [bool(hint) for hint in hints] == [True, False, True, False, False]
    assert (
        hints[0]["kv_transfer_params"]["ucm_retain_seconds"] == 3 * hints[2]["kv_transfer_params"]["ucm_retain_seconds"]
    )


@pytest.mark.parametrize(("code", "refused"), [(200, 0), (400, 1)])
def test_a_refused_pin_is_counted(code: int, refused: int) -> None:
    assert replayed(lambda _: 0, "told", code)[0].served.refused == refused
    with pytest.raises(httpx2.HTTPStatusError):
        replayed(lambda _: 0, "told", 503)
