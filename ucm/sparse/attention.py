"""What a sparse method sees of vLLM's attention, independent of release, model runner and backend.

`ucm.integration.vllm.sparse` implements it. A method gets its `AttentionView` before its first step; a view that can
copy blocks, or compute attention over parts of a context, extends it.

Attention over all keys is the mean of the attention over parts of them, weighted by the sums of exponentials. So a part
consists of its output and the logarithm of that sum (log-sum-exp), and merging parts is exact, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ucm.compat import optional

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ucm.rotary import Rotary
    from ucm.store.base import BlockGeometry

#: The key in ``SamplingParams.extra_args`` under which a client asks something of the method for its own request.
KEY = "ucm_sparse"

#: What stands for a layer.
Layer_contra = TypeVar("Layer_contra", contravariant=True)
#: The queries that share a mask: few, so that few masked scores are computed.
SLAB = 256


@dataclass(frozen=True)
class HeadLayout:
    """The memory layout of a layer's cache, with offsets and strides in numbers.

    Attributes:
        half: Whether the cache is bfloat16, or else float32.
        block_size: Tokens in a block.
        num_kv_heads: The number of KV heads.
        head_size: The numbers per head.
        group: The query heads per KV head.
        block: The stride from a block to the next.
        head: The stride from a head to the next.
        keys: ``[block_size * head_size]``: the offsets of the first head's keys in a block, by token.
        values: The offsets of its values, likewise.
        scale: The scale of scores; layers that differ only in it share a kernel.
    """

    half: bool
    block_size: int
    num_kv_heads: int
    head_size: int
    group: int
    block: int
    head: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    scale: float = field(compare=False)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The requests of one step, in the order of the rows of every per-request tensor.

    All counts are on the host; reading them does not synchronise with the device.

    Attributes:
        request_ids: The request of each row.
        num_new_tokens: ``[num_reqs]``, int64: tokens that the step computes; with speculative decoding, the drafts
            among them that vLLM rejects are computed again by the next step, from ``num_computed_tokens`` on.
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
    extra = optional(sampling_params, "extra_args")
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


class AttentionOf(Protocol[Layer_contra]):
    """What depends on the attention's backend, of a layer: its prefix in the model, or vLLM's ``Attention``."""

    def block_size(self, layer: Layer_contra, /, kv_cache: Tensor) -> int:
        """The number of tokens in a block of the metadata's block table and of ``kv_cache``."""
        ...

    def num_blocks(self, layer: Layer_contra, /, kv_cache: Tensor) -> int:
        """The number of blocks in ``kv_cache``."""
        ...

    def restricted(
        self,
        layer: Layer_contra,
        /,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """Return metadata for the same step that reads other blocks. Writes are not affected.

        Args:
            layer: The layer.
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

    def read_keys(self, layer: Layer_contra, /, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """Return the keys in some blocks, as the backend wrote them.

        Args:
            layer: The layer.
            kv_cache: The layer's cache.
            block_ids: ``[n]``, int64, on the cache's device.

        Returns:
            ``[n, block_size, num_kv_heads, head_size]`` in the cache's dtype.
        """
        ...


class PartsOf(Protocol[Layer_contra]):
    """Attention over parts of a layer's context, where a cache holds the keys and values of each KV head."""

    def require_parts(self, layer: Layer_contra, /) -> None:
        """Check that attention over parts of a layer's context can be computed and merged.

        Raises:
            SparseMethodError: If not: everything that `require` refuses, quantised keys, capped scores, learned sinks,
                or a backend that does not return the log-sum-exp. The message says what to do.
        """
        ...

    def head_layout(self, layer: Layer_contra, /, kv_cache: Tensor) -> HeadLayout | None:
        """Return the memory layout of a cache on the CPU; None on other devices and for dtypes without our kernel."""
        ...

    def read(self, layer: Layer_contra, /, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys, like `read_keys`, and the values of some blocks."""
        ...

    def attend(
        self,
        layer: Layer_contra,
        /,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        count: int,
        *,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over a run of keys of one request, with the layer's scale.

        Args:
            layer: The layer.
            query: ``[n, num_heads, head_size]``; the last one is aligned with the last key.
            keys: ``[num_blocks, block_size, num_kv_heads, head_size]``; not the cache.
            values: Like ``keys``.
            count: The number of keys; with causal attention, at least the number of queries.
            causal: Whether a query reads only keys up to its own position.
            window: The most keys that a causal query reads, including its own; None for all.

        Returns:
            The output, shaped like ``query``, and the log-sum-exps, ``[n, num_heads]``, float32.
        """
        ...


class AttentionView(AttentionOf[str], Protocol):
    """The attention layers of one worker, each named by its prefix in the model."""

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

    def require_engine(self, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
        """Check that a sparse method can serve this engine, and lower its full CUDA graphs to piecewise ones.

        Call it in `SparseMethod.worker_started`: later, vLLM has decided how it captures graphs. Lowering is logged as
        a warning.

        Args:
            latent: Whether the method serves latent attention: it chooses by `scored`, restricts only decodes, and
                never splits a request's queries.
            drafts: Whether the method serves speculative decoding: it takes each token of a step for itself, and
                keeps nothing that a rejected draft has left; see `StepBatch`.
            hybrid: Whether the method serves the attention of models with recurrent layers beside it. These keep a
                state instead of KV and call no method.

        Raises:
            SparseMethodError: With latent attention, speculative decoding or recurrent layers that the method does not
                serve, with drafts that need a KV cache or are verified asynchronously, an encoder, full CUDA graphs
                that cannot be lowered (vLLM up to 0.10.0, vLLM Ascend), a model with sliding windows, and others. The
                message says what to do.
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

    def bound_cache(self, layer_name: str) -> Tensor | None:
        """Return the layer's KV cache; None before vLLM has allocated it."""
        ...

    def block_table(self, attn_metadata: Any) -> Tensor:
        """``[num_reqs or more, max_blocks]``, int32: the blocks of each request, in the order of its tokens."""
        ...

    def scored(self, layer_name: str, query: Tensor, attn_metadata: Any) -> Tensor:
        """Return the queries whose products with the keys in the cache, times ``head_size ** -0.5``, are the scores.

        They are ``query`` unless the layer's attention is latent; then they are those of the step's decodes, which
        come first: a query for each head, for the one key of all heads that `read_keys` returns.

        Args:
            layer_name: The layer's prefix in the model.
            query: As passed to `SparseMethod.attention_begin`.
            attn_metadata: The backend's metadata.

        Returns:
            ``[num_tokens, num_heads, head_size]``.
        """
        ...


class BlockCopies(Protocol):
    """Copies between the KV caches of a worker's layers and host memory."""

    @property
    def layer_names(self) -> Sequence[str]:
        """The layers, in the order of their indices here."""
        ...

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of a block for a store; each layer is one layer slice."""
        ...

    def host_rows(self, layer: int, blocks: int) -> Tensor:
        """Allocate host memory for blocks of a layer, pinned for a device: ``[blocks, bytes of a block]``, uint8."""
        ...

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Copy blocks to host memory: per layer ``[blocks, bytes of a block]``, uint8, complete on return."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], rows: Tensor) -> None:
        """Write into blocks of a layer, in stream order.

        Args:
            layer: Its index in `layer_names`.
            block_ids: The blocks.
            rows: ``[blocks, bytes of a block]``, uint8, in memory from `host_rows`.
        """
        ...


class CopyingView(AttentionView, Protocol):
    """An `AttentionView` that can also copy blocks."""

    def block_copies(self, kv_caches: Mapping[str, Tensor]) -> BlockCopies:
        """Return an interface for copies of whole blocks.

        Args:
            kv_caches: The caches by layer, as passed to `SparseMethod.attention_begin`.

        Raises:
            UcmError: If the blocks of a layer cannot be located.
        """
        ...


class PartsView(AttentionView, PartsOf[str], Protocol):
    """Attention layers whose keys can be rotated, and of whose contexts parts can be read."""

    def rotary(self, layer_name: str) -> Rotary:
        """Return the layer's rotary embedding.

        Raises:
            SparseMethodError: If there is none, it is not a plain one, or its table is shorter than the longest
                context. The message says what to do.
        """
        ...


class Merged:
    """Attention that is merged from parts.

    Args:
        output: ``[num_tokens, num_heads, head_size]``: the output of the first part, which has a key for each token.
        sums: ``[num_tokens, num_heads]``, float32: its log-sum-exps.

    Attributes:
        output: The output of the parts so far, in float32.
    """

    def __init__(self, output: Tensor, sums: Tensor) -> None:
        self.output = output.float()
        self._sums = sums

    def add(self, tokens: slice, output: Tensor, sums: Tensor) -> None:
        """Merge another part, for some of the tokens.

        Args:
            tokens: The tokens' indices, ``n`` of them.
            output: ``[n, num_heads, head_size]``.
            sums: ``[n, num_heads]``, float32.
        """
        before = self._sums[tokens]
        total = before.logaddexp(sums)
        weight = (sums - total).exp()[..., None]
        self.output[tokens] = self.output[tokens].lerp(output.float(), weight)
        self._sums[tokens] = total


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one request's attention over a run of keys, on the CPU.

    Args:
        query: ``[n, num_heads, head_size]``; the last one is aligned with the last key.
        keys: ``[m, num_kv_heads, head_size]``; ``m >= n`` if causal.
        values: Like ``keys``.
        scale: The factor of the scores.
        causal: Whether a query reads only the keys up to its own position.
        window: The most keys that a causal query reads; None for all.

    Returns:
        The output, shaped like ``query``, and the log-sum-exps, ``[n, num_heads]``, float32.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    if not causal:
        return _scored(query, keys, values, scale)
    ahead = keys.shape[0] - query.shape[0]
    outputs, sums = [], []
    for begin in range(0, query.shape[0], SLAB):
        own = torch.arange(begin + ahead, min(begin + SLAB, query.shape[0]) + ahead)
        first = 0 if window is None else max(0, int(own[0]) - window + 1)
        read = slice(first, int(own[-1]) + 1)
        mask = None
        if len(own) > 1:
            places = torch.arange(read.start, read.stop)
            hidden = places > own[:, None]
            if window is not None:
                hidden |= places <= own[:, None] - window
            mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        part = _scored(query[begin : begin + SLAB], keys[read], values[read], scale, mask)
        outputs.append(part[0])
        sums.append(part[1])
    return (outputs[0], sums[0]) if len(sums) == 1 else (torch.cat(outputs), torch.cat(sums))


def _scored(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call PyTorch's own kernel; heads that share keys are passed as further queries."""
    import torch  # noqa: PLC0415 - vLLM brings it

    count, heads, size = query.shape
    shared = keys.shape[1]
    group = heads // shared
    folded = query.view(count, shared, group, size).permute(1, 2, 0, 3).reshape(1, shared, group * count, size)
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - it returns the log-sum-exp
        folded,
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if mask is None else mask.repeat(group, 1),
        scale=scale,
    )
    output = output.reshape(shared, group, count, size).permute(2, 0, 1, 3).reshape(count, heads, size)
    return output, sums.reshape(heads, count).t()
