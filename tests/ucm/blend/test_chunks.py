"""Finding the chunks of a prompt, and naming their pieces."""

from __future__ import annotations

from typing import Any

import pytest

from ucm.blend import PIECE, Chunk, ChunkMarksError, ChunkNames, marked_chunks, separated_chunks
from ucm.salts import tag_digits, tag_of_salt


def test_marks_are_followed() -> None:
    params = {"ucm_chunks": [[0, 10], [10, 12], [30, 100]]}
    assert marked_chunks(params, 100) == [Chunk(0, 10), Chunk(10, 12), Chunk(30, 100)]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_a_request_without_marks(params: Any) -> None:
    assert marked_chunks(params, 100) is None


@pytest.mark.parametrize(
    ("marks", "what"),
    [
        ("0-10", "not a list of pairs"),
        ([0, 10], "not a pair of integers"),
        ([[0, 10, 20]], "not a pair of integers"),
        ([[0, 10.0]], "not a pair of integers"),
        ([[0, True]], "not a pair of integers"),
        ([[-1, 10]], "outside the 100 tokens"),
        ([[0, 101]], "outside the 100 tokens"),
        ([[5, 5]], "is empty"),
        ([[0, 10], [9, 20]], "overlaps"),
        ([[10, 20], [0, 5]], "overlaps"),
    ],
)
def test_marks_that_cannot_be_followed(marks: Any, what: str) -> None:
    with pytest.raises(ChunkMarksError, match=what):
        marked_chunks({"ucm_chunks": marks}, 100)


@pytest.mark.parametrize("params", ["ucm_chunks", ["ucm_chunks"], 7])
def test_params_that_are_no_object_are_refused(params: Any) -> None:
    """The API server's ``vllm_xargs`` bring any of them to the scheduler, where an AttributeError ended the engine."""
    with pytest.raises(ChunkMarksError, match="not an object"):
        marked_chunks(params, 100)


def test_a_refusal_is_short_whatever_a_client_writes() -> None:
    with pytest.raises(ChunkMarksError) as refused:
        marked_chunks({"ucm_chunks": [list(range(100_000))]}, 100)
    assert len(str(refused.value)) < 200


def test_separators_end_chunks_and_what_is_behind_the_last_is_none() -> None:
    assert separated_chunks([5, 6, 1, 7, 2, 8, 9], {1, 2}) == [Chunk(0, 3), Chunk(3, 5)]
    assert separated_chunks([5, 6, 1], {1}) == [Chunk(0, 3)]
    assert separated_chunks([5, 6], {1}) == []


def test_a_chunk_is_named_by_its_own_tokens_alone() -> None:
    names = ChunkNames(b"")
    tokens = list(range(PIECE + 1))
    assert len(names.pieces(tokens, None)) == 2
    assert names.pieces(tokens, None) == ChunkNames(b"").pieces(list(tokens), None)
    assert len(set(names.pieces(tokens, None))) == 2


def test_pieces_are_their_salts() -> None:
    for salt in (None, "tenant"):
        pieces = ChunkNames(b"").pieces(list(range(3 * PIECE)), salt)
        assert {tag_digits(piece) for piece in pieces} == {tag_of_salt(salt).hex()}


def test_what_gives_a_chunk_another_name() -> None:
    """A longer chunk differs from its first piece on, because its KV is stored as a whole."""
    tokens = list(range(2 * PIECE))
    one = ChunkNames(b"").pieces(tokens, None)
    others = [
        ChunkNames(b"").pieces([*tokens, 1], None),
        ChunkNames(b"").pieces(tokens[:-1], None),
        ChunkNames(b"").pieces([*tokens[:-1], 999], None),
        ChunkNames(b"").pieces(tokens, "tenant"),
        ChunkNames(b"anew").pieces(tokens, None),
    ]
    for other in others:
        assert not set(one) & set(other)
