"""The proposer of sparse drafts without an engine; tests/e2e/test_sparse_drafts.py runs it in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ucm.errors import ConfigError
from ucm.integration.vllm.drafter import SparseDrafter, num_slots
from ucm.sparse.topk.drafts import DRAFTER


def config(method: dict[str, Any] | None) -> Any:
    return SimpleNamespace(
        additional_config={"ucm_sparse_config": method} if method else {},
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def test_it_has_the_name_that_the_method_asks_for() -> None:
    assert f"{SparseDrafter.__module__}.{SparseDrafter.__qualname__}" == DRAFTER


@pytest.mark.parametrize("method", [None, {"BlockTopK": {}}])
def test_without_its_method_it_is_refused(method: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match=r"drafts under the method SparseDrafts, and .* is configured"):
        SparseDrafter(config(method))


def test_before_the_method_runs_it_drafts_nothing() -> None:
    drafter = SparseDrafter(config({"SparseDrafts": {}}))
    drafter.load_model(None)
    none = np.zeros((2, 8), np.int32)
    assert drafter.propose([[5], []], np.array([3, 4], np.int32), none, slot_mappings=None) == [[], []]


def test_a_row_has_as_many_slots_as_its_blocks_in_every_group() -> None:
    """By kernel blocks; what other rows had before lies behind them."""
    tables = [
        SimpleNamespace(block_size=16, num_blocks_per_row=np.array([3, 1, 0, 9], np.int32)),
        SimpleNamespace(block_size=8, num_blocks_per_row=np.array([5, 4, 0, 9], np.int32)),
    ]
    runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=tables)))
    assert num_slots(runner, 3).tolist() == [40, 16, 0]
