"""UCM's KV connector for prompts assembled from chunks in changing orders.

Only vLLM's connector factory imports this module::

    --kv-transfer-config '{"kv_connector": "BlendConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "ucm.integration.vllm.blend_connector",
      "kv_connector_extra_config": {"UCM_CONFIG_FILE": "./ucm_config.yaml"}}'

It extends `UCMDirectConnector`, which loads exact prefixes, by reusing stored chunks anywhere in the rest of a prompt;
docs/blend.md describes the costs and losses.
"""

from __future__ import annotations

from ucm.integration.vllm.blend.sides import BlendSchedulerSide, BlendWorkerSide
from ucm.integration.vllm.ucm_connector import UCMDirectConnector


class BlendConnector(UCMDirectConnector):
    """Exact prefixes, and chunks anywhere in a prompt; see `UCMConnector`.

    Raises:
        ConfigError: If a setting is wrong, or nothing can be blended in this engine; the message says why.
    """

    blends = True
    scheduler_side, worker_side = BlendSchedulerSide, BlendWorkerSide


class UCMBlendConnector(BlendConnector):
    """`BlendConnector` under UCM's name."""
