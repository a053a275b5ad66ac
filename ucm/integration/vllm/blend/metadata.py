"""What the scheduler's side of blending tells the workers at each step; it travels by pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.blend.chunks import Chunk
    from ucm.store.base import BlockKey
    from ucm.store.slab import SlabAddress


@dataclass(slots=True)
class Blend:
    """One request's blended stretch, to be filled before the step's forward.

    Args:
        request_id: vLLM's request id.
        start: Tokens of the request whose KV is exact: where the stretch begins.
        end: Where it ends.
        token_ids: The tokens from ``unwritten`` to the end.
        block_ids: The request's blocks from its first token on.
        chunks: The chunks that are reused, in order; they may reach beyond both ends.
        places: Of each chunk, where each of its pieces is staged in the slab.
        unwritten: Before it, the exact KV is there; from it up to ``start``, the step's forward writes it, for another
            request, when the stretch has been filled. So it is computed ahead. Equal to ``start`` if there is none.
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
    """A chunk at the beginning of a prompt whose KV is computed with the step.

    Args:
        keys: The keys of its pieces.
        tokens: How many tokens it has.
        block_ids: The blocks that hold them.
    """

    keys: list[BlockKey]
    tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class BlendPlan:
    """One step.

    Args:
        blends: To be done before the forward.
        saves: To be stored after it.
        slab: Where chunks are staged, until every rank has answered.
        shares: How far from a piece's place each rank's part of it begins.
    """

    blends: list[Blend] = field(default_factory=list)
    saves: list[ChunkSave] = field(default_factory=list)
    slab: SlabAddress | None = None
    shares: tuple[int, ...] = ()
