"""The metadata that the scheduler side of blending sends to the workers with each step, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.blend.chunks import Chunk
    from ucm.store.base import BlockKey
    from ucm.store.memory.slab import SlabAddress


@dataclass(slots=True)
class Blend:
    """One request's blended stretch, to be filled before the step's forward.

    Args:
        request_id: vLLM's request id.
        start: The number of tokens with exact KV, which is the start of the stretch.
        end: The end of the stretch.
        token_ids: The tokens from ``unwritten`` to the end.
        block_ids: The request's blocks, from its first token on.
        chunks: The reused chunks, in order; they may extend past both ends.
        places: The offsets of each chunk's pieces in the slab.
        unwritten: Exact KV exists up to here. From here to ``start`` the step's forward writes it, for another
            request, after the stretch is filled, so it is computed in advance. Equal to ``start`` if there is none.
    """

    request_id: str
    start: int
    end: int
    token_ids: list[int]
    block_ids: list[int]
    chunks: list[Chunk]
    places: list[list[int]]
    unwritten: int


@dataclass(slots=True)
class ChunkSave:
    """A chunk at the start of a prompt whose KV the step computes.

    Args:
        keys: The keys of its pieces.
        tokens: The number of its tokens.
        block_ids: The blocks with its KV.
    """

    keys: list[BlockKey]
    tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class BlendPlan:
    """One step.

    Args:
        blends: Stretches to fill before the forward.
        saves: Chunks to save after it.
        slab: The address of the slab with staged chunks; sent until every rank has answered.
        shares: The offset of each rank's part from a piece's offset.
    """

    blends: list[Blend] = field(default_factory=list)
    saves: list[ChunkSave] = field(default_factory=list)
    slab: SlabAddress | None = None
    shares: tuple[int, ...] = ()
