"""The runtime's functions that refuse configurations in which no hook would be called. The censuses refer to them."""

from __future__ import annotations

_REQUIREMENTS = "ucm.integration.vllm.sparse.requirements"

#: Kinds of model: latent attention, encoders, a mix of attention with other layers, ….
MODEL = f"{_REQUIREMENTS}:_of_model"
#: Draft models, and other speculative decoding that a method does not serve.
DRAFTS = f"{_REQUIREMENTS}:_of_drafts"
#: Kinds of attention layer that call a hook but cannot be served.
LAYER = f"{_REQUIREMENTS}:require_layer"
#: A platform's replacements of vLLM's code: graphs that replay no Python, devices with another cache.
PLATFORM = f"{_REQUIREMENTS}:_of_platform"
#: Layers with a KV cache that call no hook.
UNASKED = f"{_REQUIREMENTS}:require_asked"
#: Model runners without hooks: the V0 engine's, a platform's own, an early V2.
RUNNER = "ucm.integration.vllm.handshake:model_runner"
