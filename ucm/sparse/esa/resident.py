"""What a step's tokens read under `ucm.sparse.esa.method`: resident blocks, the offloaded ones they need, block tables.

What a token reads depends only on its request's content and its own position. While the offloaded context before its
tile fits into the budget, it reads everything. Beyond that, a token of the prompt reads the sinks and the window, and
one that generates (the prompt's last one, whose logits give the first generated token, and each generated one) also
reads the offloaded blocks that it needs most. There is room for the blocks of one token, so a step has at
most one such token per request, its last; after a preemption the scheduler side ensures this
(`ucm.sparse.esa.method.ESA.limit_new_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.errors import SparseMethodError
from ucm.sparse.topk.representatives import bounded_products, bounds_of, shares, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.blocks import QueryPieces, SinksAndWindow
    from ucm.sparse.esa.offload_store import Fetch

#: The initial capacity, in blocks.
LEAST = 64
#: The number of blocks whose keys are read at once.
AT_ONCE_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class Reading:
    """What a step reads; all arrays are on the host.

    Attributes:
        pieces: The step's rows, cut where the read blocks change.
        skipped: ``[pieces]``, int64: the number of blocks after the sinks that are not read.
        choosing: The number of offloaded blocks to choose from, by piece, for pieces whose only token chooses.
    """

    pieces: QueryPieces
    skipped: NDArray[np.int64]
    choosing: dict[int, int]


def reading(batch: StepBatch, window: SinksAndWindow, budget: int, block_size: int) -> Reading:
    """Return what a step reads, by the positions of its tokens.

    Args:
        batch: The step.
        window: The sinks and the window.
        budget: The number of offloaded blocks that a token reads.
        block_size: Tokens in a block.

    Raises:
        SparseMethodError: Several tokens of a row would choose.
    """
    pieces, between = window.cut(batch, block_size)
    last = batch.seq_lens - 1
    answers = last >= batch.num_prompt_tokens - 1
    chooses = answers & (window.skipped(last, batch.num_prompt_tokens, block_size) > budget)
    ends = pieces.lasts
    if (chooses & (batch.num_new_tokens > 1) & (last >= batch.num_prompt_tokens)).any():
        raise SparseMethodError(
            "a step computes several tokens of an answer, but there is room for the selection of one only",
            where="the hook limit_new_tokens of the scheduler",
            fix="build the overlay anew (`nox -s build-overlay`), and install it in every environment of the engine",
        )
    alone = chooses & (pieces.begins[ends] < last)
    if alone.any():
        cuts: list[list[int]] = [[] for _ in pieces.rows]
        for row in np.flatnonzero(alone).tolist():
            cuts[int(ends[row])] = [int(last[row])]
        between = between.repeat([1 + len(of) for of in cuts])
        pieces = pieces.cut(cuts)
        ends = pieces.lasts
    choosing = {int(ends[row]): int(between[ends[row]]) for row in np.flatnonzero(chooses).tolist()}
    skipped = np.where(between > budget, between, 0)
    skipped[list(choosing)] = 0
    return Reading(pieces, skipped, choosing)


@dataclass(frozen=True, slots=True)
class Listed:
    """A piece with an explicit list of offloaded blocks to read.

    Attributes:
        piece: Its index among the pieces.
        extent: The number of blocks after the sinks that contain the listed ones.
        reads: The number of listed blocks.
    """

    piece: int
    extent: int
    reads: int


class OffloadedTables:
    """The part of a step's block tables that all layers share.

    Args:
        found: The reading of the step.
        listed: The pieces with listed blocks.
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device.
        sinks: The number of blocks before the offloaded context.
        block_size: Tokens in a block.
    """

    def __init__(
        self, found: Reading, listed: Sequence[Listed], block_table: Tensor, sinks: int, block_size: int
    ) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        pieces, skipped = found.pieces, found.skipped.copy()
        behind = np.full_like(skipped, sinks)
        for of in listed:
            skipped[of.piece] = of.extent - of.reads
            behind[of.piece] = sinks + of.reads
        lens = pieces.ends - skipped * block_size
        self.max_seq_len = int(lens.max())
        device = block_table.device
        self.seq_lens = torch.from_numpy(lens.astype(np.int32)).to(device)
        self.split = pieces.split(device)
        columns = np.arange(-(-self.max_seq_len // block_size))
        # The columns past a row's end are never read, but must be inside the table.
        moved = columns + skipped[:, None] * (columns >= behind[:, None])
        index = torch.from_numpy(moved.clip(max=block_table.shape[1] - 1)).to(device)
        self._whole = block_table
        self._base = block_table[torch.from_numpy(pieces.rows).to(device)[:, None], index]
        lines = np.repeat([of.piece for of in listed], [of.reads for of in listed]).astype(np.int64)
        self._rows = torch.from_numpy(pieces.rows[lines]).to(device)
        columns = np.concatenate([np.arange(sinks, sinks + of.reads) for of in listed] or [lines])
        #: The cells of the listed blocks.
        self._cells = torch.from_numpy(lines).to(device), torch.from_numpy(columns).to(device)

    def naming(self, places: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Return a layer's block table.

        Args:
            places: The places of the listed blocks in their requests, piece by piece.
            blocks: The resident block of each; -1 if it is still in place.

        Returns:
            ``[pieces, blocks]``, int32.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        table = self._base.clone()
        if places:
            both = torch.tensor([places, blocks], dtype=torch.int64).to(table.device)
            held = self._whole[self._rows, both[0]]
            table[self._cells] = torch.where(both[1] < 0, held, both[1].to(table.dtype))
        return table


class ResidentLayer:
    """One layer's use of a request's resident blocks; each layer has different content in the same block."""

    def __init__(self) -> None:
        #: The place in the request of each resident block's content; None if empty.
        self._holds: list[int | None] = []
        self._slots: dict[int, int] = {}
        #: The places that this step's query needs, for the next step, and their load.
        self.ahead: tuple[list[int], Fetch | None] | None = None

    def missing(self, chosen: Sequence[int]) -> list[int]:
        """Return the places that are in no resident block."""
        return [place for place in chosen if place not in self._slots]

    def assign(self, places: Sequence[int], chosen: Sequence[int], resident: int) -> list[int]:
        """Assign to missing places resident blocks whose content is not chosen.

        Args:
            places: The missing places.
            chosen: All places that the step reads.
            resident: The number of resident blocks, at least that of chosen places.

        Returns:
            The resident block of each place, counted from 0.
        """
        self._holds += [None] * (resident - len(self._holds))
        kept = set(chosen)
        free = (slot for slot, place in enumerate(self._holds) if place is None or place not in kept)
        given = []
        for place, slot in zip(places, list(free), strict=False):
            old = self._holds[slot]
            if old is not None:
                del self._slots[old]
            self._holds[slot] = place
            self._slots[place] = slot
            given.append(slot)
        return given

    def clear(self, places: Sequence[int]) -> None:
        """Note that resident blocks do not hold what was assigned to them."""
        for place in places:
            self._holds[self._slots.pop(place)] = None

    def slots(self, chosen: Sequence[int]) -> list[int]:
        """Return the resident blocks of present places."""
        return [self._slots[place] for place in chosen]


class OffloadedBounds:
    """The maximum and minimum of each channel of each block's keys, in a layer of an offloaded context.

    They bound the product of any query with any of these keys from above (Quest, arXiv:2406.10774).
    """

    def __init__(self) -> None:
        #: ``[num_kv_heads, at least size, 2 * head_size]``: the maxima, followed by the minima.
        self._bounds: Tensor | None = None
        #: The number of blocks with bounds.
        self.size = 0

    def append(self, block_ids: Tensor, read_keys: Callable[[Tensor], Tensor]) -> None:
        """Append the bounds of the next blocks.

        Args:
            block_ids: ``[n]``, int64, on the cache's device: the blocks with their keys.
            read_keys: Returns ``[n, block_size, num_kv_heads, head_size]`` for some of them.
        """
        for some in block_ids.split(AT_ONCE_BLOCKS) if len(block_ids) else ():
            self.append_keys(read_keys(some))

    def append_keys(self, keys: Tensor) -> None:
        """Append the bounds of the next blocks' keys, ``[n, block_size, num_kv_heads, head_size]``."""
        bounds = bounds_of(keys)
        self._room(bounds, self.size + len(keys))[:, self.size : self.size + len(keys)] = bounds
        self.size += len(keys)

    def wanted(self, query: Tensor, key: Tensor, blocks: int) -> Tensor:
        """Return how much a token needs each block.

        Its heads distribute their attention over the blocks as if the bounds were the products (a softmax): a head that
        needs one particular block has full weight, and one that needs none in particular hardly any. The token's own
        key also has a share.

        Args:
            query: ``[num_heads, head_size]``: the token's query.
            key: ``[num_kv_heads, head_size]``: the token's key.
            blocks: The number of blocks, from the offloaded context's first, that it may read.

        Returns:
            ``[blocks]``, int64, as of `ucm.sparse.topk.representatives.shares`.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        if self._bounds is None or blocks > self.size:
            raise RuntimeError("nothing to choose from")
        own = bounds_of(key[None, None].to(self._bounds.dtype))
        some = signed(query[None].to(self._bounds.dtype), len(self._bounds)).flatten(1, 2)
        # With all of the room: with a part of it, which is not contiguous, a product took 15 times as long on a CPU.
        scores = torch.cat((bounded_products(some, self._bounds)[..., :blocks], bounded_products(some, own)), -1)[
            :, None
        ]
        return shares(scores, None)[0, :blocks]

    def _room(self, like: Tensor, size: int) -> Tensor:
        """Return the bounds with spare capacity, so that a growing context rarely copies them."""
        if self._bounds is None or self._bounds.shape[1] < size:
            grown = like.new_zeros((like.shape[0], max(LEAST, size + size // 4), like.shape[2]))
            if self._bounds is not None:
                grown[:, : self.size] = self._bounds[:, : self.size]
            self._bounds = grown
        return self._bounds


@dataclass(slots=True)
class OffloadedContext:
    """A worker's state of a request's offloaded context.

    Attributes:
        admission: The request's admission; None before any of it is freed.
        first: The place of its first block.
        stored: The number of its freed blocks; later ones are still in place.
        resident: The resident blocks.
        lost: The indices of its lost blocks.
        bounds: The bounds, by layer.
        layers: The content of the resident blocks, by layer.
    """

    admission: int | None
    first: int
    stored: int = 0
    resident: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    bounds: dict[str, OffloadedBounds] = field(default_factory=lambda: defaultdict(OffloadedBounds))
    layers: dict[str, ResidentLayer] = field(default_factory=lambda: defaultdict(ResidentLayer))
