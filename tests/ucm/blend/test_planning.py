"""The extent of a blended stretch, and which of its tokens are computed."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ucm import blend
from ucm.blend import (
    Chunk,
    Run,
    blended_end,
    gaps_and_edges,
    highest,
    passes,
    reused_spans,
    runs_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[Chunk]:
    """Draw chunks in order, with and without gaps between them."""
    found, place = [], 0
    for _ in range(draw(st.integers(0, 5))):
        start = place + draw(st.integers(0, 20))
        place = start + draw(st.integers(1, 40))
        found.append(Chunk(start, place))
    return found


@example(chunks=[Chunk(0, 1), Chunk(1, 2), Chunk(2, 8), Chunk(16, 24)], block=0, limit=16)
@given(chunk_lists(), st.integers(0, 20), st.integers(0, 250))
def test_a_stretch_is_block_aligned_and_half_of_it_is_reused(chunks: list[Chunk], block: int, limit: int) -> None:
    """This holds wherever an exact prefix ends; UCM loaded a block twice, or a negative number, there (its PR 1181)."""
    computed = block * 8
    end = blended_end(chunks, computed, limit, 8)
    assert end % 8 == 0
    assert end == computed or computed < end <= limit
    if end > computed:
        reused = sum(span.tokens for span in reused_spans(chunks, computed, end))
        assert 2 * reused >= end - computed
        assert any(chunk.start < end <= chunk.end or chunk.end - chunk.end % 8 == end for chunk in chunks)


@given(chunk_lists(), st.integers(0, 20), st.integers(0, 250))
def test_a_stretch_ends_with_the_last_chunk_up_to_which_half_is_reused(
    chunks: list[Chunk], block: int, limit: int
) -> None:
    computed = block * 8
    within = [chunk for chunk in chunks if chunk.end <= limit or chunk.start < limit // 8 * 8]
    ends = (min(chunk.end, limit) // 8 * 8 for chunk in within)
    worth = [
        end
        for end in ends
        if end > computed and 2 * sum(span.tokens for span in reused_spans(chunks, computed, end)) >= end - computed
    ]
    assert blended_end(chunks, computed, limit, 8) == (worth[-1] if worth else computed)


class _Looked(list[Chunk]):
    """Counts item accesses."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def test_thousands_of_chunks_take_no_longer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planning runs on the scheduler's thread, and once took 4.9 seconds for 2,048 chunks."""

    def sums_anew(chunks: Sequence[Chunk], start: int, end: int) -> list[Run]:
        raise AssertionError("all chunks are summed up for each")

    monkeypatch.setattr(blend, "reused_spans", sums_anew)
    chunks = _Looked(Chunk(start, start + 250) for start in range(0, 256 * 1000, 256))
    assert blended_end(chunks, 0, 256 * 1000, 16) == 256 * 999 + 240
    assert chunks.looks <= 4 * len(chunks)


@pytest.mark.parametrize(
    ("stored", "computed", "limit", "end"),
    [
        ([], 0, 100, 0),
        ([Chunk(0, 32)], 0, 100, 32),
        ([Chunk(0, 33)], 0, 100, 32),  # vLLM computes the rest of it
        ([Chunk(0, 32)], 32, 100, 32),  # nothing beyond the exact KV
        ([Chunk(0, 32)], 16, 100, 32),
        ([Chunk(0, 32), Chunk(64, 96)], 0, 100, 96),
        ([Chunk(64, 96)], 0, 100, 0),  # two thirds would be computed beyond the scheduler's budget
        ([Chunk(0, 32), Chunk(160, 192)], 0, 200, 32),
        ([Chunk(0, 32), Chunk(32, 64)], 0, 40, 32),
    ],
)
def test_where_a_stretch_ends(stored: list[Chunk], computed: int, limit: int, end: int) -> None:
    assert blended_end(stored, computed, limit, 16) == end


@given(chunk_lists(), st.integers(0, 60), st.integers(1, 120), st.integers(0, 12))
def test_everything_outside_the_chunks_and_their_edges_are_computed(
    chunks: list[Chunk], start: int, length: int, edge: int
) -> None:
    end = start + length
    chosen = gaps_and_edges(chunks, start, end, edge)
    assert len(chosen) == length
    for place in range(start, end):
        chunk = next((chunk for chunk in chunks if chunk.start <= place < chunk.end), None)
        if chunk is None or (chunk.start and place < chunk.start + edge):
            assert chosen[place - start]
    for span in reused_spans(chunks, start, end):
        # Some of each chunk is computed for the check, including its last token, which a shift would move.
        assert chosen[span.end - 1 - start]
        assert sum(chosen[span.start - start : span.end - start]) <= edge + 2


def test_the_chunk_that_begins_the_prompt_was_computed_as_it_stands() -> None:
    assert runs_of(gaps_and_edges([Chunk(0, 32), Chunk(32, 64)], 0, 64, 8), 0) == [
        Run(16, 17),
        Run(31, 40),
        Run(48, 49),
        Run(63, 64),
    ]


def test_a_stretch_that_begins_within_a_chunk_has_no_edge_there() -> None:
    assert runs_of(gaps_and_edges([Chunk(0, 32), Chunk(32, 64)], 48, 64, 8), 48) == [Run(56, 57), Run(63, 64)]


def test_a_chunk_that_is_lost_is_a_gap() -> None:
    assert runs_of(gaps_and_edges([Chunk(64, 96)], 0, 96, 4), 0) == [Run(0, 68), Run(80, 81), Run(95, 96)]


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 9))
def test_runs_are_what_was_selected(selected: list[bool], start: int) -> None:
    runs = runs_of(selected, start)
    assert [place for run in runs for place in range(run.start, run.end)] == [
        start + place for place, chosen in enumerate(selected) if chosen
    ]
    assert all(one.end < other.start for one, other in pairwise(runs))


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 25))
def test_passes_keep_the_order_and_the_limit(lengths: list[int], most: int) -> None:
    runs, place = [], 0
    for length in lengths:
        runs.append(Run(place, place + length))
        place += length + 1
    made = list(passes(runs, most))
    assert _tokens(run for batch in made for run in batch) == _tokens(runs)
    assert all(sum(run.tokens for run in batch) == most for batch in made[:-1])
    assert all(0 < sum(run.tokens for run in batch) <= most for batch in made)


def test_the_granules_of_the_highest_scores_are_chosen() -> None:
    scores = [0.0] * 64
    scores[19], scores[50], scores[5] = 3.0, 2.0, 1.0
    spans = [Run(100, 132), Run(132, 164)]
    chosen = highest(scores, 100, spans, 0.125)
    assert runs_of(chosen, 100) == [Run(116, 120), Run(148, 152)]
    assert sum(highest(scores, 100, spans, 0.0)) == 0
    assert all(highest(scores, 100, spans, 1.0))


def test_scores_outside_of_what_is_reused_chooses_nothing() -> None:
    assert runs_of(highest([9.0, 9.0, 1.0, 1.0], 0, [Run(2, 4)], 1.0), 0) == [Run(2, 4)]


def _tokens(runs: Iterable[Run]) -> list[int]:
    return [place for run in runs for place in range(run.start, run.end)]
