"""Clear a row in each of vLLM's layouts; tests/e2e/test_block_table.py uses the real tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ucm.compat import clear_row

if TYPE_CHECKING:
    from collections.abc import Callable


class Rows:
    """The operations of a two-dimensional numpy array that writing a table needs."""

    def __init__(self) -> None:
        self.values = [[1, 2, 3, 9], [4, 5, 9, 9]]

    def __setitem__(self, place: tuple[int, slice], value: int) -> None:
        row, columns = place
        for column in range(*columns.indices(4)):
            self.values[row][column] = value


@dataclass
class ArrayTable:
    """Up to 0.10.2: the array is an attribute, and `block_table` the device's tensor."""

    block_table_np: Rows = field(default_factory=Rows)
    block_table: object = None
    num_blocks_per_row: list[int] = field(default_factory=lambda: [3, 2])

    def values(self) -> list[list[int]]:
        return self.block_table_np.values


@dataclass
class Buffer:
    np: Rows = field(default_factory=Rows)


@dataclass
class BufferTable:
    """From 0.11.0: a buffer with a CPU side."""

    block_table: Buffer = field(default_factory=Buffer)
    num_blocks_per_row: list[int] = field(default_factory=lambda: [3, 2])

    def values(self) -> list[list[int]]:
        return self.block_table.np.values


@dataclass
class Groups:
    block_tables: list[ArrayTable | BufferTable]


@pytest.mark.parametrize("table", [ArrayTable, BufferTable])
def test_only_the_used_part_of_the_row_is_emptied(table: Callable[[], ArrayTable | BufferTable]) -> None:
    cleared = table()
    clear_row(cleared, 0)
    assert cleared.values() == [[0, 0, 0, 9], [4, 5, 9, 9]]
    assert cleared.num_blocks_per_row == [0, 2]


@pytest.mark.parametrize("table", [ArrayTable, BufferTable])
def test_an_empty_row_stays_as_it_is(table: Callable[[], ArrayTable | BufferTable]) -> None:
    cleared = table()
    cleared.num_blocks_per_row = [3, 0]
    clear_row(cleared, 1)
    assert cleared.values() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert cleared.num_blocks_per_row == [3, 0]


def test_every_group_is_emptied() -> None:
    tables: list[ArrayTable | BufferTable] = [BufferTable(), ArrayTable(num_blocks_per_row=[1, 2])]
    clear_row(Groups(tables), 0)
    assert [table.values()[0] for table in tables] == [[0, 0, 0, 9], [0, 2, 3, 9]]
    assert [table.num_blocks_per_row for table in tables] == [[0, 2], [0, 2]]
