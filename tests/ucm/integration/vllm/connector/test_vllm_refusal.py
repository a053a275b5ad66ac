"""A connector that cannot be created logs the reason in one record, and vLLM receives the error."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.kv_cache_interface import KVCacheConfig

from ucm.errors import ConfigError
from ucm.integration.vllm.blend_connector import BlendConnector
from ucm.integration.vllm.connector.failures import takes_heads_for_tokens
from ucm.integration.vllm.ucm_connector import UCMConnector, UCMDirectConnector
from ucm.logger import get_logger
from ucm.overlay.errors import OverlayImportError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("kind", "extra", "what"),
    [
        (UCMConnector, {"store": {"pipeline": "Empty"}, "conector": "layerwise"}, "'conector' is not a setting"),
        (UCMConnector, {}, "no store is configured"),
        (UCMDirectConnector, {}, "no store is configured"),
        (UCMConnector, {"store": {"pipeline": "Empty"}, "blend": {}}, "UCMConnector blends nothing"),
        (BlendConnector, {"store": {"pipeline": "Empty"}, "blend": {"edges": 8}}, "'edges' is not a setting"),
        (
            BlendConnector,
            {"store": {"pipeline": "Empty"}, "kv_head_shards": 2},
            "BlendConnector stores each rank's part of a chunk as it is",
        ),
    ],
)
def test_a_refused_configuration(
    kind: type[UCMConnector], extra: dict[str, object], what: str, role: KVConnectorRole
) -> None:
    transfer = KVTransferConfig(
        kv_connector=kind.__name__,
        kv_role="kv_both",
        kv_connector_module_path=kind.__module__,
        kv_connector_extra_config=extra,
    )
    config = VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    get_logger().addHandler(handler)
    try:
        with pytest.raises(ConfigError) as caught:
            kind(config, role, KVCacheConfig(1, [], []))
    finally:
        get_logger().removeHandler(handler)
    assert caught.value.what == what
    assert stream.getvalue() == f"[UCM.Config] refused: {caught.value}\n"


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_overlay_that_vllm_does_not_check(
    role: KVConnectorRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``VLLM_PLUGINS``, vLLM does not call the entry point that finds an inactive overlay: the connector does."""
    about = tmp_path / "acme_overlay-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-overlay\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nacme_overlay = acme_plugin:register\n[ucm.overlays]\nacme_overlay = acme_overlay\n"
    )
    (tmp_path / "acme_plugin.py").write_text(
        "from ucm.overlay.errors import OverlayImportError\n"
        "def register():\n    raise OverlayImportError('acme is inactive', [], [])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_role="kv_both",
        kv_connector_module_path=UCMConnector.__module__,
        kv_connector_extra_config={"store": {"pipeline": "Empty"}, "conector": "the first error of settings"},
    )
    config = VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))
    for named, error in (("other", OverlayImportError), ("other,acme_overlay", ConfigError)):
        monkeypatch.setenv("VLLM_PLUGINS", named)
        with pytest.raises(error):
            UCMConnector(config, role, KVCacheConfig(1, [], []))


def test_a_kernel_that_rotates_by_other_positions_is_known() -> None:
    """vLLM's own rotation in torch says whether its kernel for the CPU takes queries by head."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        rotary = RotaryEmbedding(64, 64, 16, 10000, is_neox_style=False, dtype=torch.float32)
    query, keys = torch.rand(24, 4, 64), torch.rand(24, 1, 64)
    positions = torch.arange(24) % 16  # longer than the step: the kernel of 0.32.0 reads beyond its three tokens
    expected, _ = rotary.forward_native(positions[:3], query[:3].clone(), keys[:3].clone())
    rotated, _ = rotary.forward_cpu(positions[:3], query[:3], keys[:3])
    assert takes_heads_for_tokens() is not torch.allclose(rotated, expected)
