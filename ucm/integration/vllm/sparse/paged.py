"""Backends whose metadata is a block table per request: FlashAttention, Triton, and what the CPU's shares with them.

A metadata object is told by its fields, never by a release. What its kernel derives from the fields that are replaced
must be replaced too: the fields that do so are listed here, and a field of theirs that is in use is either set to what
the backend's own builder gives where it is not used, or refused.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from torch import Tensor

#: What every served metadata has.
FIELDS = ("block_table", "seq_lens", "max_seq_len", "query_start_loc", "slot_mapping", "num_actual_tokens")
#: Implementations whose kernels read exactly the tokens that the replaced fields name.
IMPLEMENTATIONS = ("FlashAttentionImpl", "TritonAttentionImpl")
#: Work that a builder does ahead of the kernel for a batch as it was; without it the kernel does it itself. Cascade
#: attention reads a prefix that all rows share as if it were one: with other blocks per row there is none.
AHEAD = {
    "scheduler_metadata": None,
    "prefix_scheduler_metadata": None,
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
}
#: Masks by the position of a token, which in a restricted table is no longer its place: refused where set.
POSITIONAL = (
    "local_attn_metadata",
    "dcp_context_kv_lens",
    "mm_prefix_range",
    "mm_prefix_range_tensor",
    "mm_prefix_query_range_tensor",
    "rswa_prefix_lens",
    "dynamic_causal",
)


class PagedBackend:
    """FlashAttention and Triton; see `Backend` for what each of its methods is asked."""

    def serves(self, impl: Any) -> bool:
        """Whether an implementation is one of these, with its metadata beside it."""
        kind = type(impl)
        return kind.__name__ in IMPLEMENTATIONS and metadata_class(kind) is not None

    def block_size(self, layer: Any, kv_cache: Tensor) -> int:
        """Tokens in a block."""
        return int(self._keys(layer, kv_cache).shape[1])

    def restricted(
        self, layer: Any, attn_metadata: Any, block_table: Tensor, seq_lens: Tensor, max_seq_len: int
    ) -> Any:
        """The metadata with other blocks to read."""
        del layer
        require_restrictable(attn_metadata)
        changes: dict[str, Any] = {name: value for name, value in AHEAD.items() if hasattr(attn_metadata, name)}
        table, lens = padded(attn_metadata, block_table, seq_lens)
        return dataclasses.replace(attn_metadata, **changes, block_table=table, seq_lens=lens, max_seq_len=max_seq_len)

    def read_keys(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """The keys in some blocks."""
        return self._keys(layer, kv_cache)[block_ids]

    def _keys(self, layer: Any, kv_cache: Tensor) -> Tensor:
        keys = keys_of(kv_cache, layer.num_kv_heads, layer.head_size)
        if keys is None:
            raise SparseMethodError(
                f"a KV cache of the shape {tuple(kv_cache.shape)} is not one that is known",
                where=f"{type(layer.impl).__name__}, {layer.num_kv_heads} KV heads of {layer.head_size}",
                fix="choose another backend with --attention-backend: FLASH_ATTN or TRITON_ATTN",
            )
        return keys


def metadata_class(implementation: type[Any]) -> type[Any] | None:
    """The metadata that an implementation's module defines, if it has a block table per request."""
    for member in vars(sys.modules[implementation.__module__]).values():
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            names = {field.name for field in dataclasses.fields(member)}
            if names.issuperset(FIELDS):
                return member
    return None


def require_restrictable(attn_metadata: Any) -> None:
    """Refuse metadata whose kernel looks at more than rows of blocks.

    Raises:
        SparseMethodError: If it does.
    """
    missing = [name for name in FIELDS if not hasattr(attn_metadata, name)]
    name = type(attn_metadata).__name__
    if missing:
        raise SparseMethodError(
            f"the attention backend's metadata has no {missing[0]} of its own for each request",
            where=name,
            fix="choose another with --attention-backend: FLASH_ATTN or TRITON_ATTN on a GPU",
        )
    for field in POSITIONAL:
        if getattr(attn_metadata, field, None) is not None:
            raise SparseMethodError(
                "the attention of this step has a mask that depends on the positions of its keys",
                where=f"{name}.{field}",
                fix="serve this model without ucm_sparse_config",
            )
    if getattr(attn_metadata, "causal", True) is not True:
        raise SparseMethodError(
            "the attention of this step is not causal", where=name, fix="serve this model without ucm_sparse_config"
        )


def padded(attn_metadata: Any, block_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows for graphs of fixed sizes, which follow those of the requests, are kept."""
    extra = attn_metadata.seq_lens.shape[0] - seq_lens.shape[0]
    if extra <= 0:
        return block_table, seq_lens
    rows = block_table.new_zeros((extra, block_table.shape[1]))
    return _cat(block_table, rows), _cat(seq_lens, attn_metadata.seq_lens[-extra:])


def keys_of(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> Tensor | None:
    """A view of the keys, ``[num_blocks, block_size, num_kv_heads, head_size]``, or None for another layout.

    The layouts, by their logical dimensions: keys and values as two planes before or behind the blocks (FlashAttention
    to 0.25, Triton to 0.25), or as the two halves of each head (both from 0.26 on). How the dimensions lie in memory
    is the strides' business.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 5 and shape[3:] == (num_kv_heads, head_size) and (shape[0] == 2) != (shape[1] == 2):  # noqa: PLR2004 - planes
        return kv_cache[0] if shape[0] == 2 else kv_cache[:, 0]  # noqa: PLR2004
    if len(shape) == 4 and shape[1] == num_kv_heads and shape[3] == 2 * head_size:  # noqa: PLR2004
        return kv_cache.transpose(1, 2)[..., :head_size]
    return None


def _cat(first: Tensor, second: Tensor) -> Tensor:
    import torch  # noqa: PLC0415 - vLLM brings it

    return torch.cat((first, second))
