"""Which keys a step's tokens see before their window: each once, and none within it; no torch is needed."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.ucm.sparse.steps import step
from ucm.sparse.rerope import UNWANTED, BeyondWindow

ROWS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 60)), min_size=1, max_size=4)


def beyond(rows: list[tuple[int, int]], window: int) -> BeyondWindow:
    return BeyondWindow(step(*[(f"{n}", *row, sum(row)) for n, row in enumerate(rows)]), window)


@given(rows=ROWS, window=st.integers(1, 80), block_size=st.integers(1, 9), at_once=st.integers(1, 40))
def test_each_far_key_is_seen_once_and_no_other(
    rows: list[tuple[int, int]], window: int, block_size: int, at_once: int
) -> None:
    found = beyond(rows, window)
    owners = [(row, i) for row, (done, new) in enumerate(rows) for i in range(max(done, window), done + new)]
    seen: Counter[tuple[int, int, int]] = Counter()
    with patch("ucm.sparse.rerope.TURNED_AT_ONCE", at_once):
        runs = found.runs(block_size)
    for run in runs:
        assert run.begin % block_size == 0
        keys, (begin, end) = run.end - run.begin, (run.tokens.start, run.tokens.stop)
        assert keys <= max(at_once, block_size) or run.causal
        assert end - begin <= keys < end - begin + block_size or not run.causal
        for number in range(begin, end):
            row, own = owners[number]
            assert row == run.row
            # The last query is aligned with the last key.
            last = keys - (end - 1 - number) if run.causal else keys
            seen.update((row, own, run.begin + key) for key in range(last))
    wanted = {(row, own, key) for row, own in owners for key in range(own - window + 1)}
    assert set(seen) == wanted
    assert set(seen.values()) <= {1}
    assert len(found) == len(owners)


@given(rows=ROWS, window=st.integers(1, 80))
def test_tokens_within_their_window_read_what_they_read_before(rows: list[tuple[int, int]], window: int) -> None:
    pieces, lens = beyond(rows, window).spared()
    covered = [(row, i) for row, b, e in zip(pieces.rows, pieces.begins, pieces.ends, strict=True) for i in range(b, e)]
    assert covered == [(row, i) for row, (done, new) in enumerate(rows) for i in range(done, done + new)]
    for begin, end, length in zip(pieces.begins.tolist(), pieces.ends.tolist(), lens.tolist(), strict=True):
        assert length == (end if end <= window else end - begin)
        assert end <= window or (begin >= window and length <= UNWANTED)


def test_a_step_without_such_tokens_has_none() -> None:
    assert not len(beyond([(3, 5), (0, 8)], 8))
    assert len(beyond([(3, 5), (8, 1)], 8)) == 1
    pieces, lens = beyond([(3, 5), (8, 1)], 8).spared()
    assert pieces.whole
    assert np.array_equal(lens, [8, 1])
