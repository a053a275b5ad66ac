"""The tests that need vLLM's own objects run with the interpreter that has it, against the installed runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.tests_inside import check_inside

if TYPE_CHECKING:
    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e

CONNECTOR = "tests/ucm/integration/vllm/connector"
LAYERS = "tests/ucm/integration/vllm/sparse"
SPARSE = "tests/ucm/sparse"
FILES = (
    "tests/e2e/test_block_table.py",
    "tests/ucm/test_probe.py",
    "tests/ucm/hashing/test_with_vllm.py",
    f"{CONNECTOR}/test_device_memory.py",
    f"{CONNECTOR}/test_staged_transfer.py",
    f"{CONNECTOR}/test_staged_simulation.py",
    f"{CONNECTOR}/test_vllm_refusal.py",
    f"{CONNECTOR}/test_vllm_scheduler.py",
    f"{LAYERS}/test_block_topk_on_a_layer.py",
    f"{LAYERS}/test_block_topk_schedules.py",
    f"{LAYERS}/test_paged.py",
    f"{LAYERS}/test_real_layers.py",
    f"{SPARSE}/test_block_topk.py",
    f"{SPARSE}/test_representatives.py",
    f"{SPARSE}/test_selection.py",
    f"{SPARSE}/test_sink_window_told.py",
)


@pytest.mark.parametrize("file", FILES)
def test_with_real_objects(environments: Environments, file: str) -> None:
    check_inside(environments.overlay.python, file)
