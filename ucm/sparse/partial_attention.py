"""Attention over a part of a context, and what puts the parts together.

Attention over all keys is the mean of attention over parts of them, each weighted by its sum of exponentials. So a part
is its output with the logarithm of that sum, and two parts make a whole exactly, up to rounding.
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

#: Queries that share a mask: few enough that little is computed to be hidden.
SLAB = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of one request that read a run of keys; the last query is aligned with the last key.

    Attributes:
        queries: How many.
        first_block: Among the blocks that are given, the one whose first token is the run's first key.
        keys: How many; at least as many as the queries where they are causal.
    """

    queries: int
    first_block: int
    keys: int


class PartsView(AttentionView, Protocol):
    """Attention layers whose keys can be turned, and of whose contexts parts can be read."""

    def require_parts(self, layer_name: str) -> None:
        """Check that attention over parts of a layer's context can be computed, and put together.

        Raises:
            SparseMethodError: If it cannot: what `require` refuses, quantised keys, capped scores, learned sinks, a
                backend that does not tell the sums of exponentials. The message says what to do.
        """
        ...

    def rotary(self, layer_name: str) -> Rotary:
        """The layer's rotary embedding.

        Raises:
            SparseMethodError: If there is none, it is not a plain one, or its table ends before the longest context.
                The message says what to do.
        """
        ...

    def bound_cache(self, layer_name: str) -> Tensor | None:
        """The layer's KV cache; None before vLLM has allocated it."""
        ...

    def head_layout(self, layer_name: str, kv_cache: Tensor) -> HeadLayout | None:
        """Where a cache on the CPU has its numbers; None for others, and of dtypes that have no kernel of ours."""
        ...

    def read(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The keys, as `read_keys`, and the values in some blocks."""
        ...

    def attend(
        self, layer_name: str, query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention over runs of keys, for the layer's scale.

        Args:
            layer_name: The layer's prefix in the model.
            query: ``[n, num_heads, head_size]``: the queries of all spans, one after the other.
            keys: ``[num_blocks, block_size, num_kv_heads, head_size]``; not the cache.
            values: As ``keys``.
            spans: What they read.
            causal: Whether a query reads keys up to its own place only.

        Returns:
            The output, as ``query``, and the logarithms of the sums of exponentials, ``[n, num_heads]``, float32.
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
        """Causal attention over the last keys of each query, in the cache.

        Args:
            layer_name: The layer's prefix in the model.
            query: ``[n, num_heads, head_size]``: the queries of all spans, one after the other.
            kv_cache: The layer's cache; these tokens are in it.
            block_table: ``[spans, max_blocks]``, int32: the blocks of each span's request.
            spans: Of each, the queries and all keys up to the last one of them; the first block is the table's.
            window: Keys that a query reads at most, itself among them.

        Returns:
            As `attend`.
        """
        ...


class Merged:
    """Attention that is put together from parts.

    Args:
        output: ``[num_tokens, num_heads, head_size]``: of the first part, which has a key for each token.
        sums: ``[num_tokens, num_heads]``, float32: logarithms of its sums of exponentials.

    Attributes:
        output: In float32, of the parts that there are.
    """

    def __init__(self, output: Tensor, sums: Tensor) -> None:
        self.output = output.float()
        self._sums = sums

    def add(self, tokens: Tensor | slice, output: Tensor, sums: Tensor) -> None:
        """Another part, for some of the tokens.

        Args:
            tokens: ``[n]``, int64: which; each once.
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
    """One request's attention over a run of keys, on the CPU.

    Args:
        query: ``[n, num_heads, head_size]``; the last one is aligned with the last key.
        keys: ``[m, num_kv_heads, head_size]``; ``m >= n`` where causal.
        values: As ``keys``.
        scale: Of the scores.
        causal: Whether a query reads the keys up to its own place, or else all.
        window: Of these, how many at most; None for all.

    Returns:
        The output, as ``query``, and the logarithms of the sums of exponentials, ``[n, num_heads]``, float32.
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
    """With PyTorch's own kernel, to which the heads that share keys are further queries."""
    import torch  # noqa: PLC0415 - vLLM brings it

    count, heads, size = query.shape
    shared = keys.shape[1]
    group = heads // shared
    folded = query.view(count, shared, group, size).permute(1, 2, 0, 3).reshape(1, shared, group * count, size)
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - it tells the sums
        folded,
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if mask is None else mask.repeat(group, 1),
        scale=scale,
    )
    output = output.reshape(shared, group, count, size).permute(2, 0, 1, 3).reshape(count, heads, size)
    return output, sums.reshape(heads, count).t()
