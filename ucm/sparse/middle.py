"""What the scheduler's side of a method tells its workers of the blocks that it has released.

A request's *middle* are its blocks between the sinks and the window. They are counted from the request's start, as all
of its blocks are. An *admission* is a number: a request that was preempted comes back under another one, so nothing of
before is taken for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ucm.store.base import BlockKey


@dataclass(frozen=True, slots=True)
class Released:
    """Blocks of one request that are given back with this step.

    A worker copies them out before anything of the step is done: they may be another request's from then on, or be
    among this one's resident blocks.

    Attributes:
        request_id: The request.
        admission: Of the request.
        first: The place of the first of these blocks in the request.
        block_ids: The blocks, in order.
        resident: Further blocks that the request may bring its middle back into.
    """

    request_id: str
    admission: int
    first: int
    block_ids: tuple[int, ...]
    resident: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MiddleNews:
    """What a step brings; it travels as ``scheduler_output.ucm_sparse_meta``.

    Attributes:
        engine: Names this start of the engine; of the characters of a store's namespace.
        losses: Where to say that blocks are lost; see `ucm.sparse.losses`.
        dropped: Admissions that have ended.
        released: In the order in which it was done.
    """

    engine: str
    losses: str
    dropped: tuple[int, ...]
    released: tuple[Released, ...]

    @property
    def taken_blocks(self) -> list[int]:
        """Blocks that this step takes into use, and may write: what still reads them must finish first."""
        return [block_id for released in self.released for block_id in released.resident]


def block_key(engine: str, admission: int, place: int) -> BlockKey:
    """The name of a block in a worker's own namespace: no two blocks ever share one, so none is found for another."""
    return BlockKey(hashlib.blake2b(f"{engine} {admission} {place}".encode(), digest_size=32).digest())
