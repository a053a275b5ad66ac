"""Access to the storage of vLLM's V1 block table."""

from __future__ import annotations

from typing import Any


def clear_row(table: Any, row_idx: int) -> None:
    """Clear a row, like `BlockTable.clear_row` of vLLM 0.19.0 and later.

    Args:
        table: A ``BlockTable`` or ``MultiGroupBlockTable``.
        row_idx: The request's row.
    """
    groups = getattr(table, "block_tables", None)
    if groups is not None:
        for group in groups:
            clear_row(group, row_idx)
        return
    num_blocks = table.num_blocks_per_row[row_idx]
    if num_blocks > 0:
        rows = getattr(table, "block_table_np", None)  # up to 0.10.2; later the table is a CpuGpuBuffer
        if rows is None:
            rows = table.block_table.np
        rows[row_idx, :num_blocks] = 0
    table.num_blocks_per_row[row_idx] = 0
