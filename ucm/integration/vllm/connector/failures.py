"""Refuse engines on which a connector cannot work, and log blocks that fail while it runs."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ucm.compat import (
    DRAFTS,
    device_type,
    divided_context,
    hands_over_states,
    optional,
    saves_after_drafts,
    state_modes,
)
from ucm.errors import ConfigError, SparseMethodError, UcmError
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucm.store.base import BlockKey, StoreError
    from ucm.vllm_types import KVCacheConfig, VllmConfig

#: The name under which rewritten modules import UCM's hooks.
HOOKS = "_ucm_hooks"
#: vLLM's name of the rotary embedding among its custom operators.
_ROTATION = "rotary_embedding"


class FailureLog:
    """Failures of one operation, by cause; any thread may record some.

    Args:
        area: The prefix of the log lines, for instance ``[UCM.Load]``.
        consequence: What happens to the failed blocks, for the log line.
    """

    def __init__(self, area: str, consequence: str) -> None:
        self._area = area
        self._consequence = consequence
        self._lock = Lock()
        self.counts: Counter[str] = Counter()

    def record(self, failed: Mapping[BlockKey, StoreError]) -> None:
        """Count failed blocks; log the first of each cause with its reason."""
        for key, error in failed.items():
            with self._lock:
                self.counts[error.cause] += 1
                is_new = self.counts[error.cause] == 1
            if is_new:
                get_logger(__name__).warning(
                    "%s block %s: %s (cause %s; %s; further ones are only counted)",
                    self._area,
                    key.hex()[:16],
                    error,
                    error.cause,
                    self._consequence,
                )


class UnknownLayoutError(UcmError):
    """The layout of the registered KV caches is unknown, so blocks cannot be located reliably."""


class UnsupportedModelError(ConfigError):
    """The model's KV cannot be restored from blocks, or a setting of the engine forbids it."""


class PromisedBlockLostError(UcmError):
    """Promised blocks must not be used, because the weights were changed in place, and nothing can recompute them.

    Raised where vLLM has no load-failure recovery: the engine stops rather than continue with wrong KV.
    """


@contextmanager
def refusals_logged(tag: str) -> Iterator[None]:
    """Log UCM's errors as one record under a tag, and raise them on to vLLM.

    vLLM prints such an error among its tracebacks, once per process, with a prefix before each line; the tag makes it
    easy to find.

    Raises:
        UcmError: The error, unchanged.
    """
    try:
        yield
    except UcmError as error:
        get_logger(__name__).error("[%s] refused: %s", tag, error)
        raise


def refuse_what_cannot_work(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Refuse settings under which blocks cannot be found again, or must not be.

    Raises:
        UnsupportedModelError: Names the setting.
    """
    divided = divided_context(vllm_config.parallel_config)
    if divided:
        raise UnsupportedModelError(
            "context parallelism spreads the tokens of a block over ranks, but UCM's connectors store whole blocks",
            where=f"parallel_config.{divided} = {optional(vllm_config.parallel_config, divided)}",
            fix="run without context parallelism, or without a UCM connector",
        )
    if kv_cache_config is not None:
        refuse_lost_states(vllm_config, kv_cache_config)
    if optional(vllm_config, "model_config.enable_sleep_mode") and device_type(vllm_config) != "cpu":
        raise UnsupportedModelError(
            "vLLM's sleep mode frees the KV cache's memory without telling the workers' connectors, which may "
            "still be saving from it",
            where="model_config.enable_sleep_mode",
            fix="leave out --enable-sleep-mode, or run without a UCM connector",
        )
    if optional(vllm_config, "speculative_config.draft_model_config") is not None and not saves_after_drafts():
        raise UnsupportedModelError(
            "in this vLLM release connectors save before the draft model has run: its KV would be stored unfinished",
            where="speculative_config",
            fix="use vLLM 0.18.0 or newer, n-gram drafts, or no UCM connector",
        )


def refuse_lost_states(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse recurrent layers whose states vLLM does not keep, or keeps where no connector can find them in time.

    Raises:
        UnsupportedModelError: Names the setting.
    """
    modes = state_modes(kv_cache_config)
    if not modes:
        return
    if not hands_over_states():
        raise UnsupportedModelError(
            "this vLLM release does not tell connectors which blocks hold the states of recurrent layers",
            where=f"model {vllm_config.model_config.model!r}",
            fix="use vLLM 0.30.0 or newer, or run this model without a UCM connector",
        )
    if modes != {"align"}:
        raise UnsupportedModelError(
            "the states of recurrent layers can be stored only where vLLM keeps them at the ends of blocks",
            where=f"cache_config.mamba_cache_mode = {min(modes - {'align'})}",
            fix="enable vLLM's prefix caching, and leave mamba_cache_mode as vLLM then chooses it",
        )
    if optional(vllm_config, "speculative_config") is None:
        return
    # vLLM moves a state to the end of its block when it knows which drafted tokens were accepted. In a pipeline, only
    # the last stage learns that before connectors save.
    fix = "run this model without speculative decoding, or without a UCM connector"
    if int(vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise UnsupportedModelError(
            "stages of a pipeline but the last learn which drafted tokens were accepted, and so which state to keep, "
            "after connectors have saved",
            where="speculative_config",
            fix=fix,
        )
    method = optional(vllm_config, "speculative_config.method")
    if method not in DRAFTS:
        raise UnsupportedModelError(
            f"beside the states of recurrent layers only drafts without a model ({', '.join(DRAFTS)}) "
            f"are served, not those of {method!r}",
            where="speculative_config.method",
            fix=fix,
        )


def refuse_wrong_rotation(vllm_config: VllmConfig) -> None:
    """Refuse latent attention on a CPU whose kernel rotates queries and keys by the positions of other tokens.

    Latent attention passes queries and keys as ``(tokens, heads, size)``. The kernel of vLLM 0.32.0 for the CPU
    takes each head for a token. It reads beyond the step's positions, where earlier steps left theirs, so KV depends on
    what ran before. Compiled models, vLLM's default, rotate in torch instead; ``--enforce-eager`` selects the kernel.

    Raises:
        UnsupportedModelError: The engine would rotate with such a kernel.
    """
    if device_type(vllm_config) != "cpu" or not optional(vllm_config, "model_config.use_mla", False):
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


def refuse_method_without_hooks(vllm_config: VllmConfig) -> None:
    """Refuse a sparse method in a process of upstream vLLM, where nothing would call it.

    Without the overlay, vLLM calls only UCM's connector: the engine would be dense without any notice.

    Raises:
        SparseMethodError: If a method is configured but no vLLM module in this process has hooks.
        ConfigError: If the setting is wrong.
    """
    found = sparse_method_config(vllm_config)
    if found is None:
        return
    # In `vars`: some vLLM modules import others when asked for an attribute that they do not have.
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("vllm.")]
    if any(HOOKS in getattr(module, "__dict__", ()) for module in modules):
        return
    raise SparseMethodError(
        f"the sparse method {found[0]} is configured, but vLLM has no hooks for it here: the engine would be dense",
        where="ucm_sparse_config, in a process without UCM's overlay",
        fix="install the overlay's wheel beside this vLLM and see `ucm doctor`; or serve without ucm_sparse_config",
    )
