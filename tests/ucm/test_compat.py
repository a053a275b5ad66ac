"""The scheduling decisions of all releases are read into one form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ucm.compat import admitted_requests, block_ids_by_group, grown_requests


def blocks(ids: Any) -> Any:
    return SimpleNamespace(get_block_ids=lambda: ids)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),  # 0.9.0
        ([[1, 2, 3]], [[1, 2, 3]]),  # 0.9.1
        (([1, 2, 3],), [[1, 2, 3]]),  # since 0.9.2
        (([1, 2], [7, 8]), [[1, 2], [7, 8]]),
        (([],), [[]]),
        (([], [4]), [[], [4]]),
        ([], []),
    ],
)
def test_block_ids(ids: Any, expected: list[list[int]]) -> None:
    found = block_ids_by_group(blocks(ids))
    assert found == expected


def test_the_ids_are_our_own_lists() -> None:
    """They grow with the request; vLLM's lists must not change."""
    theirs = [1, 2]
    (ours,) = block_ids_by_group(blocks((theirs,)))
    ours.append(3)
    assert theirs == [1, 2]


def one(request_id: str, new_block_ids: Any, *, resumed: bool = False) -> Any:
    return SimpleNamespace(
        req_id=request_id, new_block_ids=new_block_ids, num_computed_tokens=8, resumed_from_preemption=resumed
    )


def output(cached: Any) -> Any:
    return SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)


EXPECTED = [("grown", [[4]]), ("both", [[5, 6]])]
RESUMED = [("resumed", [[1, 2]], 8)]


def test_one_object_per_request_with_one_group() -> None:
    """0.9.0."""
    cached = [one("grown", [4]), one("same", []), one("resumed", [1, 2], resumed=True), one("both", [5, 6])]
    assert list(grown_requests(output(cached))) == EXPECTED
    assert list(admitted_requests(output(cached))) == RESUMED


def test_one_object_per_request() -> None:
    """0.9.1."""
    cached = [one("grown", [[4]]), one("same", []), one("resumed", [[1, 2]], resumed=True), one("both", [[5, 6]])]
    assert list(grown_requests(output(cached))) == EXPECTED
    assert list(admitted_requests(output(cached))) == RESUMED


@pytest.mark.parametrize("nothing", [([],), None])
def test_lists_with_flags(nothing: Any) -> None:
    """0.9.2 to 0.11.0; a request without new blocks has empty lists or, since 0.10.2, None."""
    cached = SimpleNamespace(
        req_ids=["grown", "same", "resumed", "both"],
        new_block_ids=[([4],), nothing, ([1, 2],), ([5, 6],)],
        num_computed_tokens=[8] * 4,
        resumed_from_preemption=[False, False, True, False],
    )
    assert [found for found in grown_requests(output(cached)) if found[1] != [[]]] == EXPECTED
    assert list(admitted_requests(output(cached))) == RESUMED


def test_lists_with_a_set_of_resumed_requests() -> None:
    """Since 0.11.1."""
    cached = SimpleNamespace(
        req_ids=["grown", "same", "resumed", "both"],
        new_block_ids=[([4],), None, ([1, 2],), ([5, 6],)],
        num_computed_tokens=[8] * 4,
        resumed_req_ids={"resumed"},
    )
    assert list(grown_requests(output(cached))) == EXPECTED
    assert list(admitted_requests(output(cached))) == RESUMED


def test_several_groups() -> None:
    cached = SimpleNamespace(
        req_ids=["first", "second"],
        new_block_ids=[([4], []), ([], [9])],
        num_computed_tokens=[8, 8],
        resumed_req_ids=set[str](),
    )
    assert list(grown_requests(output(cached))) == [("first", [[4], []]), ("second", [[], [9]])]


def test_nothing_cached() -> None:
    assert list(grown_requests(output([]))) == []
    empty = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set[str]())
    assert list(grown_requests(output(empty))) == []
