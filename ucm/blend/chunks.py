"""Find the chunks of a prompt, and name their KV.

A chunk's name depends only on its own tokens, not on what precedes it. Its KV is stored in *pieces* of a fixed number
of tokens; the last one is padded. All blocks in the store therefore have one size, which depends neither on an engine's
block size nor on the chunk's position in a prompt.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ucm.hashing.request_hasher import RequestHasher, frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from ucm.store.base import BlockKey

#: Part of every name. Change it when what is hashed or stored changes.
FORMAT = "ucm.chunk/1"
#: Tokens per piece.
PIECE = 64
#: The key of the chunks in a request's ``kv_transfer_params``.
MARKS = "ucm_chunks"


class ChunkMarksError(ValueError):
    """A request's chunk marks are invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt.

    Args:
        start: Its first token.
        end: The token after its last one.
    """

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.end - self.start

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
        return [cast("BlockKey", name) for name in names]
