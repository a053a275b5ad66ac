"""The block tables of a step in which some requests read only what is resident of their middles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ucm.sparse.attention import StepBatch


@dataclass(frozen=True, slots=True)
class MiddleRow:
    """A row whose request has a released middle.

    Attributes:
        row: Its place in the batch.
        stored: Blocks of the middle.
        reads: How many of them are read.
    """

    row: int
    stored: int
    reads: int


class MiddleTables:
    """What all layers of a step have in common.

    Args:
        batch: The step.
        rows: Those with a middle.
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device.
        sinks: Blocks before the middle.
        block_size: Tokens in a block.
    """

    def __init__(
        self, batch: StepBatch, rows: Sequence[MiddleRow], block_table: Tensor, sinks: int, block_size: int
    ) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        skipped = np.zeros(len(batch.request_ids), np.int64)
        behind = np.zeros_like(skipped)
        for row in rows:
            skipped[row.row] = row.stored - row.reads
            behind[row.row] = sinks + row.reads
        lens = batch.seq_lens - skipped * block_size
        self.max_seq_len = int(lens.max())
        device = block_table.device
        self.seq_lens = torch.from_numpy(lens.astype(np.int32)).to(device)
        columns = np.arange(-(-self.max_seq_len // block_size))
        # Columns behind a row's own end are never read; they only must not point outside the table.
        moved = columns + skipped[:, None] * (columns >= behind[:, None])
        index = torch.from_numpy(moved.clip(max=block_table.shape[1] - 1)).to(device)
        self._base = block_table[: len(skipped)].gather(1, index)
        lines = np.repeat([row.row for row in rows], [row.reads for row in rows])
        places = np.concatenate([np.arange(sinks, sinks + row.reads) for row in rows])
        #: Where the resident blocks stand.
        self._cells = torch.from_numpy(lines).to(device), torch.from_numpy(places).to(device)

    def with_resident(self, resident: Sequence[Sequence[int]]) -> Tensor:
        """A layer's table.

        Args:
            resident: Of each of the rows the blocks that hold its chosen places, in the order of these.

        Returns:
            ``[num_reqs, blocks]``, int32.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        table = self._base.clone()
        ids = torch.tensor([block for blocks in resident for block in blocks], dtype=table.dtype)
        table[self._cells] = ids.to(table.device)
        return table
