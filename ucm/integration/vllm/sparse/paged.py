"""Backends whose metadata has a block table per request: FlashAttention, Triton, and what the CPU backend shares.

A metadata object is recognised by its fields, never by the release. Fields that a builder derives from the replaced
fields must change too. They are listed here: each is either set to the value that the backend's own builder uses for
"unused", or refused if it is in use.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ucm.compat import choose_backend, optional
from ucm.errors import SparseMethodError
from ucm.sparse.base import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ucm.sparse.attention import QuerySplit

#: The field of the block table.
TABLE = "block_table"
#: The fields that all supported metadata have.
FIELDS = (
    *(TABLE, "seq_lens", "max_seq_len", "query_start_loc", "max_query_len"),
    *("slot_mapping", "num_actual_tokens"),
)
#: Implementations whose kernels read exactly the tokens that the replaced fields name.
IMPLEMENTATIONS = ("FlashAttentionImpl", "TritonAttentionImpl")
#: The method that writes KV to a cache, in releases and backends that have a separate operation for it.
WRITE = "do_kv_cache_update"
#: The name of FlashAttention's function, which returns the log-sum-exp; other kernels do not.
FLASH = "flash_attn_varlen_func"
#: Results that a builder computes for the original batch; without them the kernel computes its own. Cascade attention
#: reads a prefix that all rows share only once; with different blocks per row there is no such prefix.
AHEAD = {
    "scheduler_metadata": None,
    "prefix_scheduler_metadata": None,
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
}
#: Masks by a token's position, which differs from its index in a restricted table, and what vLLM Ascend sets where a
#: rank holds only some tokens of a request, or where it chooses blocks itself: refused if set.
OTHER_READERS = (
    "local_attn_metadata",
    "dcp_context_kv_lens",
    "mm_prefix_range",
    "mm_prefix_range_tensor",
    "mm_prefix_query_range_tensor",
    "rswa_prefix_lens",
    "dynamic_causal",
    *("prefill", "decode_meta", "kvcomp_metadata"),
)


class KeysInPlace:
    """The part of `Backend` that follows from where a cache has its keys."""

    def block_size(self, layer: Any, kv_cache: Tensor) -> int:
        """Return the tokens of a block."""
        return int(self._keys(layer, kv_cache).shape[1])

    def num_blocks(self, layer: Any, kv_cache: Tensor) -> int:
        """Return the number of blocks of the cache."""
        return int(self._keys(layer, kv_cache).shape[0])

    def read_keys(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """Return the keys of some blocks."""
        return self._keys(layer, kv_cache)[block_ids]

    def _keys(self, layer: Any, kv_cache: Tensor) -> Tensor:
        """Return a view of all keys, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        raise NotImplementedError


class PagedBackend(KeysInPlace):
    """FlashAttention and Triton; `Backend` documents the methods."""

    def serves(self, impl: Any) -> bool:
        """Return whether an implementation is one of these and its module defines its metadata."""
        kind = type(impl)
        return kind.__name__ in IMPLEMENTATIONS and metadata_class(kind) is not None

    def restricted(
        self,
        layer: Any,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """Return the metadata with other blocks to read."""
        del layer
        require_restrictable(attn_metadata)
        changes: dict[str, Any] = {name: value for name, value in AHEAD.items() if hasattr(attn_metadata, name)}
        table, lens, queries = rows_of(attn_metadata, block_table, seq_lens, split)
        changes |= queries
        return dataclasses.replace(attn_metadata, **changes, block_table=table, seq_lens=lens, max_seq_len=max_seq_len)

    def require_parts(self, layer: Any) -> None:
        """Refuse backends other than FlashAttention, which returns the log-sum-exp of a part."""
        if not callable(_flash_attention(layer)):
            raise SparseMethodError(
                f"the attention backend {type(layer.impl).__name__} does not return log-sum-exps, which are needed "
                "to merge the parts of a context",
                where=type(layer.impl).__module__,
                fix=choose_backend(tells_sums=True),
            )

    def head_layout(self, layer: Any, kv_cache: Tensor) -> None:
        """Return None: these caches are on an accelerator."""

    def read(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some blocks."""
        keys, values = self._planes(layer, kv_cache)
        return keys[block_ids], values[block_ids]

    def require_write(self, layer: Any) -> None:
        """Refuse an implementation without a separate operation for writing KV; these have one since 0.16.0."""
        if not hasattr(layer.impl, WRITE):
            raise SparseMethodError(
                f"{type(layer.impl).__name__} writes KV within its attention in this release",
                where=type(layer.impl).__module__,
                fix="use vLLM 0.16.0 or later with FlashAttention or Triton attention, or UCMConnector",
            )

    def write(self, layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write KV with the implementation's own method."""
        getattr(layer.impl, WRITE)(layer, keys, values, kv_cache, slots)

    def attend(
        self,
        layer: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        count: int,
        *,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over a run of keys; the blocks serve as FlashAttention's cache.

        Its causal mask and window align the last query with the last key.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        device = query.device
        output, sums = _flash_attention(layer)(
            q=query.contiguous(),
            k=keys,
            v=values,
            cu_seqlens_q=torch.tensor([0, len(query)], dtype=torch.int32).to(device, non_blocking=True),
            max_seqlen_q=len(query),
            seqused_k=torch.tensor([count], dtype=torch.int32).to(device, non_blocking=True),
            max_seqlen_k=count,
            softmax_scale=layer.impl.scale,
            causal=causal,
            window_size=[-1, -1] if window is None else [window - 1, 0],
            block_table=torch.arange(keys.shape[0], dtype=torch.int32, device=device)[None],
            return_softmax_lse=True,
            fa_version=layer.impl.vllm_flash_attn_version,
        )
        return output, sums.t()

    def _keys(self, layer: Any, kv_cache: Tensor) -> Tensor:
        return self._planes(layer, kv_cache)[0]

    def _planes(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        planes = planes_of(kv_cache, layer.num_kv_heads, layer.head_size)
        if planes is None:
            raise SparseMethodError(
                f"KV caches of the shape {tuple(kv_cache.shape)} are not known",
                where=f"{type(layer.impl).__name__}, {layer.num_kv_heads} KV heads of {layer.head_size}",
                fix=choose_backend(),
            )
        return planes


def _flash_attention(layer: Any) -> Any:
    """Return FlashAttention's function from the implementation's own module; None for other implementations."""
    impl = type(layer.impl)
    return optional(sys.modules[impl.__module__], FLASH) if impl.__name__ == IMPLEMENTATIONS[0] else None


def metadata_class(implementation: type[Any], fields: Sequence[str] = FIELDS) -> type[Any] | None:
    """Return the metadata class that an implementation's module defines, if it has these fields."""
    for member in vars(sys.modules[implementation.__module__]).values():
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            names = {field.name for field in dataclasses.fields(member)}
            if names.issuperset(fields):
                return member
    return None


def require_restrictable(attn_metadata: Any) -> None:
    """Refuse metadata whose kernel uses more than the rows of a block table."""
    found = [field for field in OTHER_READERS if optional(attn_metadata, field) is not None]
    obstacles = {
        "the attention of this step reads more than a block table says": found,
        "the attention of this step is not causal": optional(attn_metadata, "causal", True) is not True,
    }
    refuse(obstacles, ".".join([type(attn_metadata).__name__, *found]))


def rows_of(
    attn_metadata: Any, block_table: Tensor, seq_lens: Tensor, split: QuerySplit | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the table and lengths of all rows, and the other fields of the metadata that change with these rows.

    Padding rows for graphs of fixed sizes, which follow those of the requests, are kept. With a split, the number of
    rows varies; this happens only if no graph is replayed.
    """
    if split is not None:
        return block_table, seq_lens, {"query_start_loc": split.starts, "max_query_len": split.longest}
    extra = attn_metadata.seq_lens.shape[0] - seq_lens.shape[0]
    if extra <= 0:
        return block_table, seq_lens, {}
    import torch  # noqa: PLC0415 - vLLM brings it

    rows = block_table.new_zeros((extra, block_table.shape[1]))
    return torch.cat((block_table, rows)), torch.cat((seq_lens, attn_metadata.seq_lens[-extra:])), {}


def planes_of(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> tuple[Tensor, Tensor] | None:
    """Return views of keys and values, each ``[num_blocks, block_size, num_kv_heads, head_size]``; None if unknown.

    Known layouts, by their logical dimensions: keys and values as two planes, in the dimension before or after the
    blocks (FlashAttention and Triton up to 0.25), or as the two halves of each head (both from 0.26 on). The order in
    memory is given by the strides.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 5 and shape[3:] == (num_kv_heads, head_size) and (shape[0] == 2) != (shape[1] == 2):  # noqa: PLR2004 - planes
        return (kv_cache[0], kv_cache[1]) if shape[0] == 2 else (kv_cache[:, 0], kv_cache[:, 1])  # noqa: PLR2004
    if len(shape) == 4 and shape[1] == num_kv_heads and shape[3] == 2 * head_size:  # noqa: PLR2004
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., :head_size], by_token[..., head_size:]
    return None
