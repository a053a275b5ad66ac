"""The block tables of rows that leave out some of their blocks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import numpy as np
import torch

from ucm.sparse.tables import ReadTables

SIZE = 4


def test_tables_have_first_named_and_latest_blocks() -> None:
    """Rows: one reads everything; one names two of its eight blocks; one names all of its three."""
    table = torch.arange(100, 100 + 3 * 16, dtype=torch.int32).view(3, 16)
    left_out, named = np.array([0, 6, 0]), np.array([0, 2, 3])
    tables = ReadTables(table, np.arange(3), np.array([10, 53 - 6 * SIZE, 30]), left_out, 1, SIZE, named)
    assert tables.seq_lens.tolist() == [10, 53 - 6 * SIZE, 30]
    assert tables.longest == 30
    assert [of.tolist() for of in tables.cells] == [[1, 1, 2, 2, 2], [1, 2, 1, 2, 3]]
    made = tables.naming(torch.tensor([7, 124, 3, 2, 4]))
    assert made.dtype == torch.int32
    assert made[0, :3].tolist() == [100, 101, 102]
    assert made[1, :8].tolist() == [116, 7, 124, *range(116 + 9, 116 + 14)]
    assert made[2, :8].tolist() == [132, 3, 2, 4, *range(136, 140)]
    assert table[1, 1] == 117, "the runner's own table stays as it is"


def test_rows_may_be_pieces_of_a_request() -> None:
    """A row past the end of its part of the table has any valid block there."""
    table = torch.arange(24, dtype=torch.int32).view(2, 12)
    tables = ReadTables(table, np.array([1, 1, 0]), np.array([12, 13, 4]), np.array([2, 8, 0]), 1, SIZE)
    assert tables.base[0, :3].tolist() == [12, 15, 16]
    assert tables.base[1, :4].tolist() == [12, 21, 22, 23]
    assert tables.base[2, 0] == 0
    assert int(tables.base.max()) < 24
    assert not len(tables.cells[0])
