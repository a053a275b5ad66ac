"""Attention sinks and a window, and the memory between them given back.

Source: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024,
arXiv:2309.17453), StreamingLLM: a model goes on well if it keeps the KV of the first few tokens (the sinks, which
attention gives much weight whatever they say) and of the latest ones. What lies between is lost: this is not a method
for finding something in a long context.

Other than in the paper, a token keeps its position (vLLM has rotated the keys before they are cached), so contexts are
bounded by the model's greatest length; and whole blocks are kept, so a step reads up to a block more on either side.

The scheduler's side releases blocks (`ucm.sparse.released_blocks`); the worker's side hands the backend a block table
without them, and the sequence length that goes with it. Both take the same integers through `ucm.sparse.window`, so no
row can come to read what is released: there is nothing in a step that could fail for one request alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ucm.errors import SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.base import INVALID_SLOT, Role
from ucm.sparse.needed_hooks import require_hooks
from ucm.sparse.options import MethodOptions, parse_options
from ucm.sparse.released_blocks import ReleasedBlocks
from ucm.sparse.releasing import LOST, ReleasingMethod, require_own_connector
from ucm.sparse.window import SinksAndWindow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ucm.sparse.attention import StepBatch


class SinkWindowOptions(MethodOptions):
    """What an operator may set.

    Attributes:
        sink_tokens: Tokens from the start of a request that are always read; rounded up to whole blocks.
        window_tokens: Tokens before the newest that are always read.
        prefill: ``window``: prompts are computed chunk by chunk in the same way, so the memory of a request stays flat
            from its second step on. ``dense``: prompts are computed with all of their tokens, and what is between is
            released with the first generated token.
    """

    sink_tokens: int = Field(default=4, ge=0, description="a number of tokens, 0 or more")
    window_tokens: int = Field(default=4096, ge=1, description="a number of tokens, 1 or more")
    prefill: Literal["window", "dense"] = Field(default="window", description="`window` or `dense`")

    def window(self) -> SinksAndWindow:
        """The same for the two sides to count with."""
        return SinksAndWindow(self.sink_tokens, self.window_tokens, dense_prefill=self.prefill == "dense")


class SinkWindow(ReleasingMethod[ReleasedBlocks]):
    """Sinks and a window; see the module and `SinkWindowOptions`.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: The side that this instance serves.
        options: The method's own settings, as the operator wrote them.

    Attributes:
        counts: ``steps`` in which blocks were left out, ``rows`` of these, ``blocks_skipped`` and ``blocks_held`` of
            these rows, the ones that are skipped among them.

    Raises:
        ConfigError: If an option is wrong.
        SparseMethodError: If hooks of either side are switched off.
    """

    options_type = SinkWindowOptions

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        super().__init__(vllm_config, role, options)
        require_hooks(type(self).__name__, self.needed_hooks)
        self.window = parse_options(SinkWindowOptions, type(self).__name__, options).window()
        self.counts: Counter[str] = Counter()
        self._batch: StepBatch | None = None
        self._skips = False
        self._rows_before = 0
        #: Of each metadata object of the step, the object (so that its id stays its own) and what replaces it.
        self._replaced: dict[int, tuple[Any, Any]] = {}

    # The scheduler's side

    def scheduler_started(self, scheduler: Any) -> None:
        """Refuse what blocks cannot be released beside."""
        require_own_connector(scheduler.connector, type(self).__name__)
        self.releases = ReleasedBlocks(scheduler, self.window)

    def num_slots(self, request: Any, num_new_tokens: int, num_external_computed_tokens: int) -> int:
        """Release blocks, and leave the allocation to vLLM."""
        del num_new_tokens, num_external_computed_tokens
        if self._blocks.release(request):
            return INVALID_SLOT
        get_logger().warning(
            "[UCM.Sparse] request %s was taken back to token %d, where its blocks are released: it is computed anew",
            request.request_id,
            request.num_computed_tokens,
        )
        return LOST

    def build_metadata(self, scheduler_output: Any) -> None:
        """Count the step; the workers know from their batch what to skip."""
        del scheduler_output
        self._blocks.step_planned()

    # The worker's side

    def worker_started(self) -> None:
        """Refuse an engine that cannot be served."""
        self.attention.require_engine()

    def layer_seen(self, layer_name: str) -> None:
        """Refuse a layer that cannot be served."""
        self.attention.require(layer_name)

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """Note the step's batch, and whether there is anything to skip in it."""
        self._replaced.clear()
        self._batch = self.attention.batch(runner, scheduler_output, input_batch)
        beyond = self._batch.num_computed_tokens - (self.window.sink_tokens + self.window.window_tokens)
        self._skips = bool((beyond > 0).any())
        self._rows_before = self.counts["rows"]

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Replace the metadata by one without the blocks that are skipped."""
        if self._skips:
            found = self._replaced.get(id(attn_metadata))
            if found is None:
                found = attn_metadata, self._compacted(layer_name, kv_cache, attn_metadata)
                self._replaced[id(attn_metadata)] = found
            attn_metadata = found[1]
        return query, key, value, attn_metadata

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """The step is over; what was to be skipped was."""
        del runner, scheduler_output, model_output
        if self.counts["rows"] > self._rows_before:
            self.counts["steps"] += 1
            if self.counts["steps"].bit_count() == 1:  # at 1, 2, 4, …: told often enough, never too often
                get_logger().info("[UCM.Sparse] %s", self.summary())
        unasked = self._skips and not self._replaced
        self._replaced.clear()
        self._batch, self._skips = None, False
        if unasked:
            raise SparseMethodError(
                "a step ran whose attention did not ask what to read: it may have read blocks that were given back",
                where="the hook attention_begin",
                fix="see with `ucm doctor --run` which hooks fire; serve without ucm_sparse_config until they do",
            )

    def summary(self) -> str:
        """What was done until now, in one line."""
        counts = self.counts
        return (
            f"{type(self).__name__} left out {counts['blocks_skipped']} of {counts['blocks_held']} blocks in "
            f"{counts['rows']} rows of {counts['steps']} steps"
        )

    def _compacted(self, layer_name: str, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """The metadata with the sinks' blocks and, right behind them, those of the window and of the new tokens."""
        import torch  # noqa: PLC0415 - vLLM brings it

        batch, size = self._batch, self.attention.block_size(layer_name, kv_cache)
        if batch is None:
            raise RuntimeError(f"{layer_name} ran outside a step")
        skipped = self.window.skipped(batch.num_computed_tokens, batch.num_prompt_tokens, size)
        if not skipped.any():
            return attn_metadata
        self.counts["rows"] += int((skipped > 0).sum())
        self.counts["blocks_skipped"] += int(skipped.sum())
        self.counts["blocks_held"] += int((-(-batch.seq_lens[skipped > 0] // size)).sum())
        table = self.attention.block_table(attn_metadata)[: len(skipped)]
        seq_lens = batch.seq_lens - skipped * size
        longest = int(seq_lens.max())
        gaps = torch.from_numpy(skipped).to(table.device, non_blocking=True)
        columns = torch.arange(-(-longest // size), device=table.device)
        behind = (columns >= self.window.sink_blocks(size)).long()
        # Columns behind a row's own end are never read; they only must not point outside the table.
        places = (columns + gaps[:, None] * behind).clamp(max=table.shape[1] - 1)
        lens = attn_metadata.seq_lens[: len(skipped)] - (gaps * size).to(attn_metadata.seq_lens.dtype)
        return self.attention.restricted(layer_name, attn_metadata, table.gather(1, places), lens, longest)
