"""Tests in an environment with vLLM, as in ``test_inside.py``, on the newest release alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.environment import with_triton
from tests.e2e.tests_inside import CONNECTOR, LAYERS, SPARSE, each, run_inside

if TYPE_CHECKING:
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: Files that need a part of the newest release only, or of vLLM little beside its torch, which both releases share.
FILES = (
    "tests/e2e/judges/test_distances.py",
    "tests/test_hand_off_proxy.py",
    "tests/ucm/blend/test_position_free.py",
    "tests/ucm/integration/vllm/blend/test_caches.py",
    "tests/ucm/integration/vllm/blend/test_vllm_scheduler.py",
    "tests/ucm/integration/vllm/blend/test_worker.py",
    f"{CONNECTOR}/test_device_memory.py",
    f"{CONNECTOR}/test_live_adapters.py",
    f"{CONNECTOR}/test_multi_connector.py",
    f"{CONNECTOR}/test_staged_simulation.py",
    f"{CONNECTOR}/test_staged_transfer.py",
    f"{CONNECTOR}/test_stuck_medium.py",
    f"{LAYERS}/test_ascend_attention.py",
    f"{LAYERS}/test_block_hashes.py",
    f"{LAYERS}/test_cpu_order.py",
    f"{LAYERS}/test_flash_parts.py",
    f"{LAYERS}/test_latent.py",
    f"{LAYERS}/test_paged.py",
    f"{LAYERS}/test_rerope_on_a_layer.py",
    f"{SPARSE}/esa/test_esa_connector.py",
    f"{SPARSE}/esa/test_esa_on_a_layer.py",
    f"{SPARSE}/esa/test_esa_steps.py",
    f"{SPARSE}/esa/test_offload_store.py",
    f"{SPARSE}/esa/test_resident.py",
    f"{SPARSE}/test_rotation.py",
    f"{SPARSE}/test_sink_window_told.py",
    f"{SPARSE}/test_tables.py",
    f"{SPARSE}/test_window_kernel.py",
    f"{SPARSE}/topk/test_block_topk.py",
    f"{SPARSE}/topk/test_codes.py",
    f"{SPARSE}/topk/test_drafts.py",
    f"{SPARSE}/topk/test_ranking.py",
    f"{SPARSE}/topk/test_samples.py",
    f"{SPARSE}/topk/test_selection.py",
)
#: Files about Triton's kernels, with the environment of their process: kernels are interpreted in all of it or not.
OF_KERNELS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    ((f"{SPARSE}/topk/test_on_device.py", f"{SPARSE}/topk/test_block_topk.py"), {"TRITON_INTERPRET": "1"}),
    ((f"{SPARSE}/topk/test_kernels.py",), {}),
)


@pytest.mark.parametrize("file", each(FILES))
def test_with_real_objects(wrong: dict[str, str], file: str) -> None:
    assert file not in wrong, wrong[file]


@pytest.mark.parametrize(("files", "variables"), OF_KERNELS, ids=["interpreted", "compiled"])
def test_kernels(environments: Environments, files: tuple[str, ...], variables: dict[str, str]) -> None:
    found = run_inside(with_triton(environments.release).python, files, **variables)
    assert not found, "\n".join(found.values())
