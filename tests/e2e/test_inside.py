"""Tests that need vLLM's own objects run in an environment with vLLM, against the installed runtime."""

from __future__ import annotations

import pytest

from tests.e2e.tests_inside import CONNECTOR, LAYERS, SPARSE, each

pytestmark = pytest.mark.e2e

#: Kinds of KV-cache groups that earlier releases lack, or for which the connectors refuse them.
GROUPS = "tests/campaign/test_groups.py"
FILES = (
    "tests/e2e/test_block_table.py",
    "tests/ucm/test_probe.py",
    "tests/ucm/hashing/test_with_vllm.py",
    f"{CONNECTOR}/test_live_weights.py",
    f"{CONNECTOR}/test_vllm_refusal.py",
    f"{CONNECTOR}/test_vllm_scheduler.py",
    f"{LAYERS}/test_asked_of_the_api.py",
    f"{LAYERS}/test_block_topk_on_a_layer.py",
    f"{LAYERS}/test_block_topk_schedules.py",
    f"{LAYERS}/test_graphs.py",
    f"{LAYERS}/test_memory.py",
    f"{LAYERS}/test_real_layers.py",
    f"{LAYERS}/test_rerope_schedules.py",
    f"{LAYERS}/test_rotary.py",
    f"{SPARSE}/accounting/test_accounting.py",
    f"{SPARSE}/accounting/test_connector.py",
    f"{SPARSE}/accounting/test_on_a_layer.py",
    f"{SPARSE}/accounting/test_release.py",
    f"{SPARSE}/test_example_method.py",
    f"{SPARSE}/test_method_conformance.py",
)


@pytest.mark.parametrize("file", [pytest.param(GROUPS, marks=pytest.mark.newest_only), *each(FILES)])
def test_with_real_objects(wrong: dict[str, str], file: str) -> None:
    assert file not in wrong, wrong[file]
