"""What a sparse method sees of vLLM's attention, independent of release, model runner and backend.

`ucm.integration.vllm.sparse` implements it. A method gets its `AttentionView` before its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

#: The key in ``SamplingParams.extra_args`` under which a client asks something of the method for its own request.
KEY = "ucm_sparse"


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The requests of one step, in the order of the rows of every per-request tensor.

    All counts are on the host; reading them does not synchronise with the device.

    Attributes:
        request_ids: The request of each row.
        num_new_tokens: ``[num_reqs]``, int64: tokens that the step computes.
        num_computed_tokens: ``[num_reqs]``, int64: tokens whose KV existed before the step.
        num_prompt_tokens: ``[num_reqs]``, int64: the length of the prompt; for a resumed request, of the original one.
        admitted: ``[num_reqs]``, bool: whether the request is new in this step or resumed after a preemption, so that
            its row holds other blocks than before.
        asked: Of requests that vLLM sends whole with this step, what their clients ask of the method, as they wrote it:
            ``ucm_sparse`` in ``SamplingParams.extra_args``. Those that ask nothing are left out.
    """

    request_ids: Sequence[str]
    num_new_tokens: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    admitted: NDArray[np.bool_]
    asked: Mapping[str, object] = field(default_factory=dict)

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """``[num_reqs]``, int64: tokens that each request has after the step."""
        return self.num_computed_tokens + self.num_new_tokens

    @property
    def decodes(self) -> NDArray[np.bool_]:
        """``[num_reqs]``: whether a row computes exactly one token, and that one comes after its prompt."""
        found: NDArray[np.bool_] = (self.num_new_tokens == 1) & (self.num_computed_tokens >= self.num_prompt_tokens)
        return found


def asked_of(sampling_params: Any) -> object:
    """What stands under `KEY` in a request's ``extra_args``; None if nothing does.

    Args:
        sampling_params: vLLM's ``SamplingParams``; None for a request that is pooled.
    """
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(KEY) if isinstance(extra, Mapping) else None


@dataclass(frozen=True, eq=False)
class QuerySplit:
    """The division of a step's queries into rows that are not the step's requests.

    Attributes:
        starts: ``[num_rows + 1]``, int32, on the attention's device: the index among the step's tokens at which each
            row's queries begin, and at which the last row's end.
        longest: The largest number of queries in a row.
    """

    starts: Tensor
    longest: int


class AttentionView(Protocol):
    """The attention layers of one worker."""

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        """The requests of the step, from the arguments of `SparseMethod.execute_begin`; for V1 and V2 runners."""
        ...

    @property
    def ranks(self) -> int:
        """The number of workers that share the heads of a layer: the tensor-parallel size."""
        ...

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Sum over the workers that share the heads of a layer. All of them must call it.

        Args:
            counts: Integers, on the attention's device. The call may change them.
        """
        ...

    def require_engine(self) -> None:
        """Check that a sparse method can serve this engine, and lower its full CUDA graphs to piecewise ones.

        Call it in `SparseMethod.worker_started`: later, vLLM has decided how it captures graphs. Lowering is logged as
        a warning.

        Raises:
            SparseMethodError: With latent attention, an encoder, speculative decoding, full CUDA graphs that cannot be
                lowered (vLLM up to 0.10.0, vLLM Ascend), a model with sliding windows, and others. The message says
                what to do.
        """
        ...

    def has_window(self, layer_name: str) -> bool:
        """Return whether a layer has a sliding window of its own, so that `require` refuses it."""
        ...

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        """Check that a sparse method can serve a layer.

        Args:
            layer_name: The layer's prefix in the model.
            reads_keys: Whether the method needs `read_keys`.

        Raises:
            SparseMethodError: With latent attention, an encoder, a sliding window, position biases, or a backend
                without a block table per request. The message names the layer and says what to do.
        """
        ...

    def block_size(self, layer_name: str, kv_cache: Tensor) -> int:
        """The number of tokens in a block of the metadata's block table and of ``kv_cache``."""
        ...

    def num_blocks(self, layer_name: str, kv_cache: Tensor) -> int:
        """The number of blocks in ``kv_cache``."""
        ...

    def block_table(self, attn_metadata: Any) -> Tensor:
        """``[num_reqs or more, max_blocks]``, int32: the blocks of each request, in the order of its tokens."""
        ...

    def restricted(
        self,
        layer_name: str,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """Return metadata for the same step that reads other blocks. Writes are not affected.

        Args:
            layer_name: The layer's prefix in the model.
            attn_metadata: The backend's metadata. The call does not change it.
            block_table: ``[num_rows, max_blocks]``, int32, on the attention's device: the blocks to read, ordered by
                position; the last one contains the row's newest token.
            seq_lens: ``[num_rows]``, int32, on the same device: the number of tokens in these blocks, up to the row's
                newest token. Pass the same tensor for several layers: a backend reuses what it derived from it.
            max_seq_len: The largest of ``seq_lens``.
            split: The queries of each row; None if the rows are the step's requests.

        Raises:
            SparseMethodError: If this metadata cannot be restricted. The message says what to do.
        """
        ...

    def read_keys(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """Return the keys in some blocks, as the backend wrote them.

        Args:
            layer_name: The layer's prefix in the model.
            kv_cache: The layer's cache.
            block_ids: ``[n]``, int64, on the cache's device.

        Returns:
            ``[n, block_size, num_kv_heads, head_size]`` in the cache's dtype.
        """
        ...
