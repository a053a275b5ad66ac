"""What a step's tokens read under `ucm.sparse.esa.method`: resident blocks, the offloaded ones they need, block tables.

What a token reads depends only on its request's content and its own position. While the offloaded context before its
tile fits into the budget, it reads everything, and so do all tokens of a prompt that is dense. Otherwise a token of the
prompt reads the sinks and the window, and one that generates (each generated one and, with windowed prompts, the
prompt's last one, whose logits give the first generated token) also reads the offloaded blocks that it needs most.
There is room for the blocks of one token, so a step has at most one such token per request, its last; after a
preemption the scheduler side ensures this (`ucm.sparse.esa.method.ESA.limit_new_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.blocks import QueryPieces, SinksAndWindow
    from ucm.sparse.esa.offload_store import Fetch
    from ucm.sparse.topk.codes import KeyCodes


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


def first_choosing(window: SinksAndWindow, num_prompt_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of the first tokens that choose blocks: a dense prompt's last token reads everything."""
    return num_prompt_tokens - (not window.dense_prefill)


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
    answers = last >= first_choosing(window, batch.num_prompt_tokens)
    chooses = answers & (window.skipped(last, batch.num_prompt_tokens, block_size) > budget)
    ends = pieces.lasts
    if (chooses & (batch.num_new_tokens > 1) & (last >= batch.num_prompt_tokens)).any():
        raise SparseMethodError(
            "a step computes several tokens of an answer, but there is room for the selection of one only",
            where="the hook limit_new_tokens of the scheduler",
            fix="build the overlay anew, and install it in every environment of the engine",
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


@dataclass(slots=True)
class OffloadedContext:
    """A worker's state of a request's offloaded context.

    Attributes:
        admission: The request's admission; None before any of it is freed.
        first: The place of its first block.
        stored: The number of its freed blocks; later ones are still in place.
        resident: The resident blocks.
        lost: The indices of its lost blocks.
        codes: The codes of its blocks, freed or in place, by layer; see `ucm.sparse.topk.codes`.
        layers: The content of the resident blocks, by layer.
    """

    admission: int | None
    first: int
    stored: int = 0
    resident: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    codes: dict[str, KeyCodes] = field(default_factory=dict)
    layers: dict[str, ResidentLayer] = field(default_factory=lambda: defaultdict(ResidentLayer))
