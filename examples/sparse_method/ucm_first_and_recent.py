"""A sparse method outside UCM: a decode step reads the first block of a request and its most recent ones.

It is a minimal complete method. `docs/write_sparse_method.md` explains it from top to bottom.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ucm.api import MethodOptions, Role, SparseMethod, StepBatch, keep_apart, parse_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class FirstAndRecentOptions(MethodOptions):
    """The settings under ``ucm_sparse_config``; ``ucm doctor --config`` checks them without an engine."""

    recent_blocks: int = Field(default=16, ge=1, description="the number of most recent blocks to read, 1 or more")


class FirstAndRecent(SparseMethod):
    """Decode steps read the first block and the most recent ones; prompts are computed densely.

    Attributes:
        counts: The number of restricted ``rows``, and their ``blocks_read`` and ``blocks_held``, once per step.

    Raises:
        ConfigError: If an option is wrong.
        SparseMethodError: If the hooks that it needs are switched off.
    """

    options_type = FirstAndRecentOptions
    needed_hooks = ("ATTENTION", "SCHEDULER", "KV_CACHE_MANAGER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2")

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        self._recent = parse_options(FirstAndRecentOptions, "FirstAndRecent", options).recent_blocks
        self._batch: StepBatch | None = None
        self._replaced: tuple[Any, Any] | None = None
        self.counts: Counter[str] = Counter()

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return True: a prompt's KV is the same as in an engine without the method, so the two can share it."""
        del options
        return True

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return the tokens whose KV others may reuse: not generated ones, which depend on where the prompt ends."""
        del options
        return num_prompt_tokens

    # Scheduler side.

    def before_allocation(self, request: Any) -> bool:
        """Keep generated blocks out of other requests' prefix hits in vLLM's own cache."""
        keep_apart(request, request.num_prompt_tokens, self.vllm_config.cache_config)
        return True

    # Worker side.

    def worker_started(self) -> None:
        """Refuse an engine that no sparse method can serve."""
        self.attention.require_engine()

    def layer_seen(self, layer_name: str) -> None:
        """Refuse a layer whose block table cannot be restricted."""
        self.attention.require(layer_name)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Record the requests of the step; the host knows their lengths."""
        self._batch = self.attention.batch(runner, scheduler_output, input_batch)
        self._replaced = None

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Give the backend metadata with fewer blocks; layers with the same metadata get the same replacement."""
        if self._replaced is None or self._replaced[0] is not attn_metadata:
            self._replaced = attn_metadata, self._restricted(layer_name, kv_cache, attn_metadata)
        return query, key, value, self._replaced[1]

    def _restricted(self, layer_name: str, kv_cache: Tensor, attn_metadata: Any) -> Any:
        import torch  # noqa: PLC0415 - vLLM brings it, and `ucm doctor` imports this module without it

        batch = self._batch
        if batch is None:
            raise RuntimeError(f"{layer_name} ran outside a step")
        size = self.attention.block_size(layer_name, kv_cache)
        held = -(-batch.seq_lens // size)
        skipped = np.where(batch.decodes, np.maximum(held - 1 - self._recent, 0), 0)
        if not skipped.any():
            return attn_metadata
        self.counts["rows"] += int((skipped > 0).sum())
        self.counts["blocks_held"] += int(held[skipped > 0].sum())
        self.counts["blocks_read"] += int((held - skipped)[skipped > 0].sum())
        table = self.attention.block_table(attn_metadata)
        seq_lens = batch.seq_lens - skipped * size
        columns = torch.arange(int((held - skipped).max()), device=table.device)
        gaps = torch.from_numpy(skipped).to(table.device)[:, None] * (columns > 0)
        # The columns past the end of a shorter row are never read, but must be inside the table.
        places = (columns + gaps).clamp(max=table.shape[1] - 1)
        blocks = table[: len(batch.request_ids)].gather(1, places)
        lens = torch.from_numpy(seq_lens.astype(np.int32)).to(table.device)
        return self.attention.restricted(layer_name, attn_metadata, blocks, lens, int(seq_lens.max()))
