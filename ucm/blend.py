"""Find chunks, pieces of text whose KV is reused anywhere in a prompt, and plan which of their tokens to recompute.

docs/blend.md describes what this does, costs and loses. This module does not import vLLM.

A chunk's name depends only on its own tokens, not on what precedes it. Its KV is stored in *pieces* of a fixed number
of tokens; the last one is padded. All blocks in the store therefore have one size, which depends neither on an engine's
block size nor on the chunk's position in a prompt.

All positions are token positions in the prompt. The *stretch* is the range from the end of exact KV to the end of the
blended hit. Its *reused* spans are loaded from chunks; the rest, and some tokens of the reused spans, are computed.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ucm.hashing.request_hasher import RequestHasher, frame
from ucm.salts import tag_of_salt, tagged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from ucm.store.base import BlockKey

#: Part of every name. Change it when what is hashed or stored changes.
FORMAT = "ucm.chunk/2"
#: Tokens per piece.
PIECE = 64
#: The key of the chunks in a request's ``kv_transfer_params``.
MARKS = "ucm_chunks"

#: Consecutive tokens that are selected together: runs of single tokens cost more than they save.
GRANULE = 4


class ChunkMarksError(ValueError):
    """A request's chunk marks are invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a prompt; of those to compute, one row of a forward pass.

    Args:
        start: The first.
        end: The token after the last one.
    """

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.end - self.start


class Chunk(Run):
    """A part of a prompt whose KV is stored alone."""

    __slots__ = ()

    @property
    def pieces(self) -> int:
        """The number of pieces in which it is stored."""
        return -(-self.tokens // PIECE)


def marked_chunks(params: object, prompt_tokens: int) -> list[Chunk] | None:
    """Return the chunks that a request marks.

    Args:
        params: Its ``kv_transfer_params``, which vLLM passes on unchecked; ``ucm_chunks`` in it is a list of pairs
            ``[first token, token after the last one]``.
        prompt_tokens: Tokens of its prompt.

    Returns:
        The chunks in order; None if it marks none.

    Raises:
        ChunkMarksError: If they are not such pairs, overlap, are out of order, or are outside the prompt.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise ChunkMarksError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    marks = params.get(MARKS)
    if marks is None:
        return None
    if not isinstance(marks, list | tuple):
        raise ChunkMarksError(f"{MARKS} is not a list of pairs [start, end]")
    found: list[Chunk] = []
    for mark in marks:
        pair = list(mark) if isinstance(mark, list | tuple) else []
        if len(pair) != 2 or not all(type(place) is int for place in pair):  # noqa: PLR2004 - a pair
            raise ChunkMarksError(f"{reprlib.repr(mark)} in {MARKS} is not a pair of integers [start, end]")
        chunk = Chunk(*pair)
        before = found[-1].end if found else 0
        if not before <= chunk.start < chunk.end <= prompt_tokens:
            raise ChunkMarksError(
                f"{mark!r} in {MARKS} is empty, overlaps the one before it, or is outside the {prompt_tokens} tokens "
                "of the prompt"
            )
        found.append(chunk)
    return found


def separated_chunks(token_ids: Sequence[int], ends: AbstractSet[int]) -> list[Chunk]:
    """Return the chunks of a prompt that separator tokens end. Tokens after the last separator are in no chunk.

    Args:
        token_ids: The prompt.
        ends: The separator tokens; each belongs to the chunk that it ends.
    """
    places = [place + 1 for place, token in enumerate(token_ids) if token in ends]
    return [Chunk(start, end) for start, end in zip([0, *places], places, strict=False)]


class ChunkNames:
    """Names chunks.

    Args:
        seed: The part of the hash that all chunks of an engine share.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def pieces(self, token_ids: Sequence[int], salt: str | None) -> list[BlockKey]:
        """Return the keys of a chunk's pieces.

        Args:
            token_ids: The tokens of the chunk.
            salt: The ``cache_salt`` of the request; requests with another salt do not find what it stores.

        Raises:
            ValueError: If a token id is not an integer from 0 to 2**32 - 1.
        """
        seed = frame((FORMAT, self._seed, len(token_ids), salt or ""))
        whole = RequestHasher(seed).generate_block_hashes(token_ids, len(token_ids))[0]
        count = Chunk(0, len(token_ids)).pieces
        names = (hashlib.sha256(frame((FORMAT, whole, piece))).digest() for piece in range(count))
        tag = tag_of_salt(salt)
        return [cast("BlockKey", tagged(name, tag)) for name in names]


def blended_end(stored: Sequence[Chunk], computed: int, limit: int, block_size: int) -> int:
    """Return the end of the part of a prompt that is worth blending.

    Tokens that are computed in a blended stretch are not counted in the scheduler's token budget. The stretch therefore
    ends with the last chunk up to which at least half of its tokens come from chunks.

    Args:
        stored: The available chunks, in order.
        computed: Tokens with exact KV.
        limit: The maximum tokens of a hit.
        block_size: Tokens per block; the end is a multiple of it.

    Returns:
        The end; ``computed`` if there is nothing to blend.
    """
    found, reused = computed, 0
    for number, chunk in enumerate(stored):
        end = min(chunk.end, limit) // block_size * block_size
        reused += max(0, chunk.end - max(chunk.start, computed))
        if end <= computed or (chunk.end > limit and chunk.start >= end):  # the stretch has nothing of it
            continue
        # A prompt may have thousands of chunks, so only those that the end cuts are examined again.
        cut, place = 0, number
        while place >= 0 and stored[place].end > end:
            cut += stored[place].end - max(stored[place].start, computed, end)
            place -= 1
        if 2 * (reused - cut) >= end - computed:
            found = end
    return found


def reused_spans(chunks: Sequence[Chunk], start: int, end: int) -> list[Run]:
    """Return the parts of a stretch that are in chunks, one per chunk."""
    cut = (Run(max(chunk.start, start), min(chunk.end, end)) for chunk in chunks)
    return [run for run in cut if run.tokens > 0]


def runs_of(selected: Sequence[bool], start: int) -> list[Run]:
    """Return the runs of selected tokens.

    Args:
        selected: Whether each token of the stretch is selected.
        start: The position of the first.
    """
    found: list[Run] = []
    for place, chosen in enumerate(selected, start):
        if not chosen:
            continue
        if found and found[-1].end == place:
            found[-1] = Run(found[-1].start, place + 1)
        else:
            found.append(Run(place, place + 1))
    return found


def gaps_and_edges(chunks: Sequence[Chunk], start: int, end: int, edge_tokens: int) -> list[bool]:
    """Return, for each token of a stretch, whether it is computed whatever the question reads.

    These are the tokens outside of chunks, and the first tokens of each chunk that is not at the start of the prompt.
    Two more tokens of each reused span are computed to check the others: one in its middle, and its last one.

    Args:
        chunks: The reused chunks.
        start: The start of the stretch.
        end: Its end.
        edge_tokens: The number of tokens at a chunk's start to compute.
    """
    chosen = [True] * (end - start)
    for chunk in chunks:
        edge = chunk.start + edge_tokens if chunk.start else 0
        begin, stop = max(chunk.start, start), min(chunk.end, end)
        for place in range(max(begin, edge), stop):
            chosen[place - start] = False
        if stop > begin:
            chosen[(begin + stop) // 2 - start] = chosen[stop - 1 - start] = True
    return chosen


def highest(scores: Sequence[float], start: int, spans: Sequence[Run], ratio: float) -> list[bool]:
    """Return, for each token of a stretch, whether it is among the reused tokens with the highest scores.

    Args:
        scores: The score of each token of the stretch.
        start: The position of the first.
        spans: The reused spans.
        ratio: The fraction of the reused tokens to select, in granules of neighbours, by the highest score of each.
    """
    pieces = [
        Run(place, min(place + GRANULE, span.end)) for span in spans for place in range(span.start, span.end, GRANULE)
    ]
    wanted = ratio * sum(span.tokens for span in spans)
    chosen = [False] * len(scores)
    taken = 0.0
    for run in sorted(pieces, key=lambda run: (-max(scores[run.start - start : run.end - start]), run.start)):
        # The last granule is the one that comes closest to the ratio.
        if taken + run.tokens / 2 > wanted:
            break
        taken += run.tokens
        chosen[run.start - start : run.end - start] = [True] * run.tokens
    return chosen


def passes(runs: Sequence[Run], most_tokens: int) -> Iterator[list[Run]]:
    """Split runs into forward passes of limited size, in ascending order: later passes read what earlier ones wrote."""
    batch: list[Run] = []
    room = most_tokens
    for run in runs:
        start = run.start
        while start < run.end:
            part = Run(start, min(run.end, start + room))
            batch.append(part)
            room -= part.tokens
            start = part.end
            if not room:
                yield batch
                batch, room = [], most_tokens
    if batch:
        yield batch
