"""Our `clear_row` on the real tables of an installed vLLM."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ucm.compat import clear_row

torch = pytest.importorskip("torch", reason="needs an end-to-end environment")
tables = pytest.importorskip("vllm.v1.worker.block_table", reason="needs an end-to-end environment")

pytestmark = pytest.mark.e2e

ROWS: tuple[list[int], ...] = ([11, 12, 13], [21], [])
DEVICE = torch.device("cpu")


def _make(table: Any, **arguments: Any) -> Any:
    """Return a release's table, made with those of the arguments that it takes."""
    known = inspect.signature(table).parameters
    arguments |= {"pin_memory": False, "device": DEVICE}
    return table(**{name: value for name, value in arguments.items() if name in known})


def _single() -> Any:
    table = _make(
        tables.BlockTable,
        block_size=16,
        max_num_reqs=4,
        max_num_blocks_per_req=8,
        max_num_batched_tokens=64,
        kernel_block_size=16,
        cp_kv_cache_interleave_size=1,
    )
    for row, blocks in enumerate(ROWS):
        table.add_row(blocks, row)
    return table


def _groups() -> Any:
    table = _make(
        tables.MultiGroupBlockTable,
        max_num_reqs=4,
        max_model_len=256,
        max_num_batched_tokens=64,
        block_sizes=[16, 32],
        kernel_block_sizes=[16, 32],
        max_num_blocks=[8, 8],
    )
    for row, blocks in enumerate(ROWS):
        table.add_row((blocks, [block + 100 for block in blocks]), row)
    return table


def _state(table: Any) -> list[tuple[list[list[int]], list[int]]]:
    groups = getattr(table, "block_tables", [table])
    return [(group.block_table.np.tolist(), group.num_blocks_per_row.tolist()) for group in groups]


@pytest.mark.skipif(not hasattr(tables.BlockTable, "clear_row"), reason="this release has no clear_row of its own")
@pytest.mark.parametrize("make", [_single, _groups], ids=["one", "groups"])
@pytest.mark.parametrize("row", range(4))
def test_a_row_is_emptied_as_vllm_does(make: Any, row: int) -> None:
    ours, theirs = make(), make()
    clear_row(ours, row)
    theirs.clear_row(row)
    assert _state(ours) == _state(theirs)
    assert all(counts[row] == 0 for _, counts in _state(ours))
