"""The block tables of rows that do not read all of their blocks.

A row reads its first blocks, then blocks that each layer names, then those behind the ones that it leaves out. Entries
past a row's end are never read, but are valid block ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class ReadTables:
    """What all layers of a step share of their block tables.

    Args:
        block_table: ``[num_reqs or more, max_blocks]``, int32, on the attention's device: the step's own.
        rows: ``[n]``, int64: the row of ``block_table`` of each row.
        seq_lens: ``[n]``: the tokens that each row reads.
        left_out: ``[n]``, int64: the blocks that each row leaves out.
        first: The number of first blocks, which are read in place.
        block_size: Tokens in a block.
        named: ``[n]``, int64: the blocks of each row that a layer names; None if there are none.

    Attributes:
        seq_lens: ``[n]``, int32, on the device.
        longest: The largest of them.
        base: ``[n, blocks]``, int32: the block table, with any blocks where a layer names others.
        cells: The row and the column of each named block, row by row, ``[all named]``, int64, on the device.
    """

    def __init__(
        self,
        block_table: Tensor,
        rows: NDArray[np.int64],
        seq_lens: NDArray[np.integer],
        left_out: NDArray[np.int64],
        first: int,
        block_size: int,
        named: NDArray[np.int64] | None = None,
    ) -> None:
        import torch  # noqa: PLC0415 - vLLM brings it

        device = block_table.device
        count = np.zeros_like(left_out) if named is None else named
        on_device = torch.from_numpy(np.stack((rows, left_out, first + count))).to(device, non_blocking=True)
        of_table, skips, behind = on_device[..., None]
        self.seq_lens = torch.from_numpy(seq_lens.astype(np.int32)).to(device, non_blocking=True)
        self.longest = int(seq_lens.max())
        columns = torch.arange(-(-self.longest // block_size), device=device)
        self.base = block_table[of_table, (columns + skips * (columns >= behind)).clamp(max=block_table.shape[1] - 1)]
        owners = np.arange(len(rows)).repeat(count)
        places = np.arange(len(owners)) - (count.cumsum() - count)[owners]
        cells = torch.from_numpy(np.stack((owners, places + first))).to(device, non_blocking=True)
        self.cells = cells[0], cells[1]

    def naming(self, block_ids: Tensor) -> Tensor:
        """Return a layer's table, ``[n, blocks]``, int32, with these blocks in `cells`; ``[all named]``."""
        table = self.base.clone()
        table[self.cells] = block_ids.to(table.dtype)
        return table
