"""What a sparse method sees of vLLM's attention, whatever the release, the runner and the backend.

`ucm.integration.vllm.sparse` implements it; a method gets its `AttentionView` before its first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The requests of one step, in the order of the rows of every per-request tensor.

    All counts are known on the host: nothing is read back from the device for them.

    Attributes:
        request_ids: Of each row.
        num_new_tokens: ``[num_reqs]``, int64: tokens that the step computes.
        num_computed_tokens: ``[num_reqs]``, int64: tokens whose KV was there before the step.
        num_prompt_tokens: ``[num_reqs]``, int64; of a resumed request, the prompt as the operator gave it.
        admitted: ``[num_reqs]``: whether the request is new in this step, or back after a preemption: its row holds
            other blocks than before.
    """

    request_ids: Sequence[str]
    num_new_tokens: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    admitted: NDArray[np.bool_]

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """``[num_reqs]``, int64: tokens that each request has after the step."""
        return self.num_computed_tokens + self.num_new_tokens

    @property
    def decodes(self) -> NDArray[np.bool_]:
        """``[num_reqs]``: whether a row computes exactly one token, and that one comes after its prompt."""
        found: NDArray[np.bool_] = (self.num_new_tokens == 1) & (self.num_computed_tokens >= self.num_prompt_tokens)
        return found


class AttentionView(Protocol):
    """The attention layers of one worker."""

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        """What `SparseMethod.execute_begin` was called for; for V1 and V2 runners."""
        ...

    def require_engine(self) -> None:
        """Check that this engine can be served by a sparse method at all; known before its model is loaded.

        Raises:
            SparseMethodError: If it cannot: latent attention, an encoder, speculative decoding, whole CUDA graphs, a
                sliding window of the model's own, …. The message says what to do.
        """
        ...

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        """Check that a layer can be served by a sparse method.

        Args:
            layer_name: The layer's prefix in the model.
            reads_keys: Whether the method needs `read_keys`.

        Raises:
            SparseMethodError: If it cannot: latent attention, an encoder, a sliding window of the layer's own, position
                biases, a backend without a block table per request. The message names the layer and what to do.
        """
        ...

    def block_size(self, layer_name: str, kv_cache: Tensor) -> int:
        """Tokens in a block, as the metadata's block table and ``kv_cache`` count blocks."""
        ...

    def block_table(self, attn_metadata: Any) -> Tensor:
        """``[num_reqs or more, max_blocks]``, int32: the block of each request's tokens."""
        ...

    def restricted(
        self, layer_name: str, attn_metadata: Any, block_table: Tensor, seq_lens: Tensor, max_seq_len: int
    ) -> Any:
        """The metadata of the same step with other blocks to read; what is written, and where, stays as it is.

        Args:
            layer_name: The layer's prefix in the model.
            attn_metadata: The backend's metadata; it is not changed.
            block_table: ``[num_reqs, max_blocks]``, int32, on the attention's device: the blocks to read, in the order
                of their positions, with the block of the newest token last.
            seq_lens: ``[num_reqs]``, int32, on the same device: tokens in these blocks, those of this step included.
                What a backend derives from them is kept for the next layer that comes with the same tensor.
            max_seq_len: The greatest of them.

        Raises:
            SparseMethodError: If the metadata holds what cannot be restricted. The message says what to do.
        """
        ...

    def read_keys(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """The keys in some blocks, as the backend wrote them.

        Args:
            layer_name: The layer's prefix in the model.
            kv_cache: The layer's cache.
            block_ids: ``[n]``, int64, on the cache's device.

        Returns:
            ``[n, block_size, num_kv_heads, head_size]`` in the cache's dtype.
        """
        ...
