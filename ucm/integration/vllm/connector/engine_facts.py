"""Read facts about the engine from vLLM's configuration and classes, which differ between releases."""

from __future__ import annotations

import inspect
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from ucm.errors import SparseMethodError
from ucm.integration.vllm.config import sparse_method_config
from ucm.integration.vllm.connector.failures import UnsupportedModelError

#: The name under which rewritten modules import UCM's hooks.
HOOKS = "_ucm_hooks"
#: vLLM's name of the rotary embedding among its custom operators.
_ROTATION = "rotary_embedding"


def ranks(vllm_config: Any) -> int:
    """Return the number of workers that run one step together."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """When loads run.

    Args:
        between_steps: Requests wait for their loads between steps, in vLLM's state for remote KV; vLLM then computes
            the tokens of blocks that failed to load. If False, blocks are loaded within the step that needs them, and
            loads must not fail.
        background: A step may end before the loads that it started.
        reloads_preempted: A preempted request may load again.
    """

    between_steps: bool
    background: bool = False
    reloads_preempted: bool = True


def load_policy(connector_base: type, num_groups: int, kind: str) -> LoadPolicy:
    """Choose a load policy that vLLM's load-failure recovery supports.

    Recovery came with 0.11.1, for models with one KV-cache group. It is sound for requests that wait between steps,
    except for preempted ones before 0.19.1.

    Args:
        connector_base: vLLM's connector class.
        num_groups: The model's number of KV-cache groups.
        kind: The connector type; ``layerwise`` needs loads within a step.
    """
    if not hasattr(connector_base, "get_block_ids_with_load_errors") or num_groups > 1 or kind == "layerwise":
        return LoadPolicy(between_steps=False)
    # From 0.17.1 at the latest, vLLM keeps the blocks of an aborted request until its load has ended.
    background = hasattr(connector_base, "requires_piecewise_for_cudagraph")
    reaches_pool = hasattr(connector_base, "bind_gpu_block_pool")
    return LoadPolicy(between_steps=True, background=background, reloads_preempted=reaches_pool)


def asks_again(connector_base: type) -> bool:
    """Return whether a lookup's outcome may be reported as not yet known, as from vLLM 0.10.2 on."""
    return hasattr(connector_base, "shutdown")  # added in the same release


def outer_transfer(vllm_config: Any) -> Any:
    """Return the engine's ``KVTransferConfig`` if this is one of several connectors (``MultiConnector``); else None.

    Such a connector is created with its own configuration, so vLLM's is read from the frame of the creator.
    """
    mine = vllm_config.kv_transfer_config.kv_connector
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        found = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if found is not None and found.kv_connector != mine:
            return found
    return None


def runs_micro_batches(vllm_config: Any) -> bool:
    """Return whether the worker may split a batch, so that layers run several times per step, in several threads."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False)) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1


def weights_move(vllm_config: Any) -> bool:
    """Return whether a rank's weights move without a change of the model, so that checking them is meaningless.

    Experts may move between ranks, and offloaded layers may take turns in one buffer on the device.
    """
    offload = getattr(vllm_config, "offload_config", None)
    turns = int(getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) or 0) > 0
    return turns or bool(getattr(vllm_config.parallel_config, "enable_eplb", False))


def drafts_look_ahead(vllm_config: Any) -> bool:
    """Return whether a draft model reads the target's hidden states, shifted by one token (EAGLE, MTP and similar)."""
    draft = getattr(vllm_config, "speculative_config", None)
    return draft is not None and bool(draft.use_eagle())


def refuse_what_cannot_work(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse settings under which blocks cannot be found again, or must not be.

    Raises:
        UnsupportedModelError: Names the setting.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise UnsupportedModelError(
                "context parallelism spreads the tokens of a block over ranks, but UCM's connectors store whole blocks",
                where=f"parallel_config.{name} = {getattr(parallel, name)}",
                fix="run without context parallelism, or without a UCM connector",
            )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        raise UnsupportedModelError(
            "vLLM zeroes blocks of this model's KV cache, also those still being saved, before it tells the connector",
            where="kv_cache_config.needs_kv_cache_zeroing",
            fix="run this model without a UCM connector",
        )
    sleeps = getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False)
    if sleeps and _device_type(vllm_config) != "cpu":
        raise UnsupportedModelError(
            "vLLM's sleep mode frees the KV cache's memory without telling the workers' connectors, which may "
            "still be saving from it",
            where="model_config.enable_sleep_mode",
            fix="leave out --enable-sleep-mode, or run without a UCM connector",
        )
    draft = getattr(vllm_config, "speculative_config", None)
    if draft is not None and getattr(draft, "draft_model_config", None) is not None and not _saves_after_drafts():
        raise UnsupportedModelError(
            "in this vLLM release connectors save before the draft model has run: its KV would be stored unfinished",
            where="speculative_config",
            fix="use vLLM 0.18.0 or newer, n-gram drafts, or no UCM connector",
        )


def refuse_wrong_rotation(vllm_config: Any) -> None:
    """Refuse latent attention on a CPU whose kernel rotates queries and keys by the positions of other tokens.

    Latent attention passes queries and keys as ``(tokens, heads, size)``. The kernel of vLLM 0.32.0 for the CPU
    takes each head for a token. It reads beyond the step's positions, where earlier steps left theirs, so KV depends on
    what ran before. Compiled models, vLLM's default, rotate in torch instead; ``--enforce-eager`` selects the kernel.

    Raises:
        UnsupportedModelError: The engine would rotate with such a kernel.
    """
    if _device_type(vllm_config) != "cpu" or not getattr(vllm_config.model_config, "use_mla", False):
        return
    operators = vllm_config.compilation_config.custom_ops
    disabled = f"-{_ROTATION}" in operators or ("none" in operators and f"+{_ROTATION}" not in operators)
    if not disabled and takes_heads_for_tokens():
        raise UnsupportedModelError(
            "vLLM's rotary embedding kernel for the CPU rotates the queries and keys of latent attention by the "
            "positions of other tokens, so tokens depend on what ran before (models with a scaling of their own, as "
            "DeepSeek's YaRN, may not use it, but that is not known before they are loaded)",
            where=f"compilation_config.custom_ops = {list(operators)}",
            fix=f"""start vLLM with --compilation-config '{{"custom_ops": ["all", "-{_ROTATION}"]}}', or without """
            "--enforce-eager",
        )


def takes_heads_for_tokens() -> bool:
    """Whether vLLM's kernel rotates ``(tokens, heads, size)`` in another way than ``(tokens, heads * size)``."""
    import torch  # noqa: PLC0415 - ucm imports without torch and vLLM
    from vllm import _custom_ops  # noqa: PLC0415

    tokens, heads, size = 2, 2, 32
    # Larger than the kernel should need: one that takes heads for tokens reads and writes beyond the two tokens.
    positions, angles = torch.arange(tokens * heads), torch.linspace(-1, 1, tokens * heads * size).view(-1, size)
    query = torch.linspace(-1, 1, tokens * heads * size).view(tokens, heads, size)
    keys = torch.linspace(-1, 1, tokens * heads * size).view(-1, 1, size)
    expected = query.clone().view(tokens, -1)
    rotate = _custom_ops.rotary_embedding
    rotate(positions[:tokens], expected, keys.clone()[:tokens, 0], size, angles, False)
    rotate(positions[:tokens], query, keys[:tokens], size, angles, False)
    return not torch.equal(query.view(tokens, -1), expected)


def _device_type(vllm_config: Any) -> str:
    device = getattr(vllm_config, "device_config", None)
    return str(getattr(device, "device_type", None) or getattr(device, "device", None) or "")


def refuse_method_without_hooks(vllm_config: Any) -> None:
    """Refuse a sparse method in a process of upstream vLLM, where nothing would call it.

    Without the overlay, vLLM calls only UCM's connector: the engine would be dense without any notice.

    Raises:
        SparseMethodError: If a method is configured but no vLLM module in this process has hooks.
        ConfigError: If the setting is wrong.
    """
    found = sparse_method_config(vllm_config)
    if found is None:
        return
    # Not `hasattr`: some vLLM modules import others when asked for an attribute that they do not have.
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("vllm.")]
    if any(HOOKS in getattr(module, "__dict__", ()) for module in modules):
        return
    raise SparseMethodError(
        f"the sparse method {found[0]} is configured, but vLLM has no hooks for it here: the engine would be dense",
        where="ucm_sparse_config, in a process without UCM's overlay",
        fix="install the overlay's wheel beside this vLLM and see `ucm doctor`; or serve without ucm_sparse_config",
    )


def _saves_after_drafts() -> bool:
    try:
        from vllm.v1.worker.kv_connector_model_runner_mixin import (  # noqa: PLC0415 - ucm imports without vLLM
            KVConnectorModelRunnerMixin,
        )
    except ImportError:
        return False
    return hasattr(KVConnectorModelRunnerMixin, "finalize_kv_connector")
