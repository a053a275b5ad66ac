"""Attention over parts of a context, and the merging of such parts.

Attention over all keys is the mean of the attention over parts of them, weighted by the sums of exponentials. So a part
consists of its output and the logarithm of that sum (log-sum-exp), and merging parts is exact, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ucm.sparse.attention import AttentionView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ucm.rotary import Rotary
    from ucm.sparse.window_kernel import HeadLayout

#: The queries that share a mask: few, so that few masked scores are computed.
SLAB = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of one request that read a run of keys; the last query is aligned with the last key.

    Attributes:
        queries: The number of queries.
        first_block: The index, among the given blocks, of the block that starts with the run's first key.
        keys: The number of keys; with causal attention, at least the number of queries.
    """

    queries: int
    first_block: int
    keys: int


class PartsView(AttentionView, Protocol):
    """Attention layers whose keys can be rotated, and of whose contexts parts can be read."""

    def require_parts(self, layer_name: str) -> None:
        """Check that attention over parts of a layer's context can be computed and merged.

        Raises:
            SparseMethodError: If not: everything that `require` refuses, quantised keys, capped scores, learned sinks,
                or a backend that does not return the log-sum-exp. The message says what to do.
        """
        ...

    def rotary(self, layer_name: str) -> Rotary:
        """Return the layer's rotary embedding.

        Raises:
            SparseMethodError: If there is none, it is not a plain one, or its table is shorter than the longest
                context. The message says what to do.
        """
        ...

    def bound_cache(self, layer_name: str) -> Tensor | None:
        """Return the layer's KV cache; None before vLLM has allocated it."""
        ...

    def head_layout(self, layer_name: str, kv_cache: Tensor) -> HeadLayout | None:
        """Return the memory layout of a cache on the CPU; None on other devices and for dtypes without our kernel."""
        ...

    def read(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys, like `read_keys`, and the values of some blocks."""
        ...

    def attend(
        self, layer_name: str, query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over runs of keys, with the layer's scale.

        Args:
            layer_name: The layer's prefix in the model.
            query: ``[n, num_heads, head_size]``: the queries of all spans, one after the other.
            keys: ``[num_blocks, block_size, num_kv_heads, head_size]``; not the cache.
            values: Like ``keys``.
            spans: The keys that the queries read.
            causal: Whether a query reads only keys up to its own position.

        Returns:
            The output, shaped like ``query``, and the log-sum-exps, ``[n, num_heads]``, float32.
        """
        ...

    def attend_window(
        self,
        layer_name: str,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        spans: Sequence[Span],
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute causal attention over the last keys of each query, on the cache.

        Args:
            layer_name: The layer's prefix in the model.
            query: ``[n, num_heads, head_size]``: the queries of all spans, one after the other.
            kv_cache: The layer's cache, which contains these tokens.
            block_table: ``[spans, max_blocks]``, int32: the blocks of each span's request.
            spans: For each request, its queries and all keys up to the last query, from the table's first block on.
            window: The most keys that a query reads, including its own.

        Returns:
            See `attend`.
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

    def add(self, tokens: Tensor | slice, output: Tensor, sums: Tensor) -> None:
        """Merge another part, for some of the tokens.

        Args:
            tokens: ``[n]``, int64: the tokens' indices, each once.
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
