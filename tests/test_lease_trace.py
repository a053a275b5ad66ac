"""The replay of agents' requests under several orders of eviction."""

from __future__ import annotations

import pytest

from tests.lease_trace import PERSON, REAL, TOOL, Turn, busiest, computed_again, lines, trace

ORDERS = ("LRU", "all", "1 min", "5 min", "long", "told", "random", "Belady")


@pytest.fixture(scope="module")
def turns() -> list[Turn]:
    return trace(sessions=40)


@pytest.mark.parametrize("order", ORDERS)
def test_with_room_for_all_nothing_is_computed_again(turns: list[Turn], order: str) -> None:
    everything = sum(turn.blocks - turn.known for turn in turns) + REAL.systems * REAL.system_blocks
    assert computed_again(turns, everything, order) == 0
    assert computed_again(turns, busiest(turns), "Belady") == 0


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
def test_none_is_better_than_who_knows_the_future(turns: list[Turn], share: float) -> None:
    best = computed_again(turns, int(share * busiest(turns)), "Belady")
    assert all(computed_again(turns, int(share * busiest(turns)), order) >= best for order in ORDERS)


def test_without_room_all_is_computed_again(turns: list[Turn]) -> None:
    known = sum(turn.known for turn in turns) * REAL.block
    known += (sum(turn.agent for turn in turns) - REAL.systems) * REAL.system
    assert computed_again(turns, 0, "LRU") == pytest.approx(known, rel=1e-3)


def test_a_lease_protects_who_waits_and_a_flood_goes_first() -> None:
    """One session of two turns with a flood between: by hand, 10 blocks fit."""

    def pair(waits: str) -> list[Turn]:
        agent = [Turn(0.0, 0, -1, 4, 0, waits, agent=True), Turn(50.0, 0, -1, 6, 4, "", agent=True)]
        flood = [Turn(float(at), at, at, 90, 0, "", agent=False) for at in range(1, 40)]
        return sorted([*agent, *flood], key=lambda turn: turn.moment)

    lost = (4 + REAL.system_blocks) * REAL.block
    for order, waits, expected in (
        ("LRU", TOOL, lost),
        ("1 min", TOOL, 0),
        ("1 min", PERSON, lost),
        ("long", PERSON, 0),
        ("told", PERSON, 0),
        ("Belady", PERSON, 0),
    ):
        assert computed_again(pair(waits), 100, order) == expected, (order, waits)


def test_who_tells_that_a_session_has_ended_leaves_its_room_to_others_and_loses_no_system_prompt() -> None:
    """By hand; there is room for the system prompt and 40 blocks."""
    turns = [
        Turn(0.0, 0, -1, 30, 0, "", agent=True),
        Turn(1.0, 1, -1, 30, 0, TOOL, agent=True),
        Turn(2.0, 2, 2, 15, 0, "", agent=False),
        Turn(3.0, 1, -1, 31, 30, "", agent=True),
        Turn(1e6, 3, 3, 40, 0, "", agent=False),
        Turn(2e6, 4, -1, 1, 0, "", agent=True),
    ]
    room = 40 + REAL.system_blocks
    assert computed_again(turns, room, "5 min") == 31 * REAL.block  # of the system prompt, for the last one
    assert computed_again(turns, room, "told") == 0
    assert computed_again(turns[:4], room - 11, "told") == REAL.block


def test_the_table(turns: list[Turn]) -> None:
    table = list(lines(turns, (0.25,)))
    assert len(table) == 4
    assert len(table[-1].split()) == 1 + len(ORDERS)
