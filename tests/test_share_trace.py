"""The replay of a steady tenant beside one that floods the store."""

from __future__ import annotations

import pytest

from tests.share_trace import (
    BLOCK,
    CAPACITIES,
    ORDERS,
    OTHER,
    PROMPT,
    PROMPTS,
    STEADY,
    Request,
    computed_again,
    cost,
    lines,
    trace,
)

SMALL = PROMPTS * PROMPT


@pytest.mark.parametrize("kind", ["flood", "scan"])
@pytest.mark.parametrize("capacity", [SMALL, 2 * SMALL])
def test_shares_are_as_good_as_half_of_the_store_alone(kind: str, capacity: int) -> None:
    sent = trace(capacity, kind, requests=800)
    lost = {order: computed_again(sent, capacity, order)[STEADY] for order in ORDERS}
    assert lost["shares"] == pytest.approx(lost["alone, half"], rel=0.05)
    assert lost["alone"] < lost["shares"] < 0.6 * lost["LRU"] < lost["random"]


@pytest.mark.parametrize("order", ORDERS)
def test_with_room_for_all_nothing_is_computed_again(order: str) -> None:
    sent = trace(SMALL, "flood", requests=50)
    everything = sum({request.chain: request.blocks for request in sent}.values())
    assert not computed_again(sent, 2 * everything, order).total()


def test_by_hand() -> None:
    """Ten blocks fit, and the flood brings 12: of LRU nothing is left, of shares the steady five."""
    steady = Request(STEADY, 0, 5)
    flood = [Request(OTHER, -1 - number, 4) for number in range(3)]
    sent = [steady, *flood, steady, *flood]
    assert computed_again(sent, 10, "LRU") == {STEADY: 5 * BLOCK, OTHER: 12 * BLOCK}
    assert computed_again(sent, 10, "shares") == {STEADY: 0, OTHER: 12 * BLOCK}


def test_the_tables() -> None:
    assert len(list(lines(requests=20))) == 1 + 2 * len(CAPACITIES)
    assert len(list(cost(400))) == 4
