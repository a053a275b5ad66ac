"""vLLM Ascend's paged attention: lengths as lists on the host, and keys apart from values.

The fields are those of vLLM Ascend 0.13.0 to 0.30.0rc2, whose ``AscendAttentionBackendImpl`` hands a block table and
lists of lengths to the NPU's fused attention. Older releases compute a prompt and its continuation with other kernels
and masks, which take no restricted table.

No NPU was at hand. `tests.e2e.test_ascend` runs vLLM Ascend's own implementation on a CPU, with torch in the place of
the NPU's kernels.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.paged import PagedBackend, metadata_class, require_restrictable, rows_of
from ucm.sparse.base import refuse

if TYPE_CHECKING:
    from torch import Tensor

    from ucm.sparse.attention import QuerySplit

IMPLEMENTATION = "AscendAttentionBackendImpl"
#: The method that reads `FIELDS`; releases before 0.13.0 have another.
FUSED = "forward_fused_infer_attention"
#: The field with the block table.
TABLE = "block_tables"
#: What every served metadata has.
FIELDS = (
    *(TABLE, "seq_lens", "seq_lens_list", "actual_seq_lengths_q", "query_start_loc", "max_query_len"),
    *("attn_state", "slot_mapping", "num_actual_tokens", "causal"),
)
#: The state of a step whose requests are all new: the kernel reads the step's keys and no block table.
WITHOUT_TABLE = "PrefillNoCache"
#: The state of a step in which a row has any number of queries and of earlier tokens.
WITH_TABLE = "ChunkedPrefill"
OTHER = "serve this model without ucm_sparse_config"


class AscendBackend(PagedBackend):
    """See `Backend` for what each of its methods is asked."""

    def __init__(self) -> None:
        #: The metadata and the lengths that were last copied to the host, and the copy. All layers of a step share it.
        self._copied: tuple[Any, Tensor, Tensor] | None = None

    def serves(self, impl: Any) -> bool:
        """Whether an implementation is this one, with its metadata beside it."""
        kind = type(impl)
        return kind.__name__ == IMPLEMENTATION and hasattr(kind, FUSED) and metadata_class(kind, FIELDS) is not None

    def restricted(
        self,
        layer: Any,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """The metadata with other blocks to read."""
        del max_seq_len  # the kernels find it in the list
        require_restrictable(attn_metadata)
        itself = {"vLLM Ascend chooses the blocks of this layer itself": optional(layer.impl, "enable_hamming_sparse")}
        refuse(itself, f"{IMPLEMENTATION}.enable_hamming_sparse", "switch one of the two off")
        on_host = self._on_host(attn_metadata, seq_lens)
        table, lens, queries = rows_of(attn_metadata, block_table, on_host, split)
        changes: dict[str, Any] = {TABLE: table, "seq_lens": lens, "seq_lens_list": lens.tolist(), **queries}
        if split is not None:
            changes["actual_seq_lengths_q"] = split.starts[1:].tolist()
        state = attn_metadata.attn_state
        # A decode step's kernel may take one query of each row.
        if state.name == WITHOUT_TABLE or split is not None:
            changes["attn_state"] = type(state)[WITH_TABLE]
        copies = {"seq_lens_cpu": lens, "seq_lens_gpu": lens, "query_start_loc_gpu": queries.get("query_start_loc")}
        for name, value in copies.items():
            held = optional(attn_metadata, name)
            if held is not None and value is not None:
                changes[name] = value.to(held.device, non_blocking=True)
        return dataclasses.replace(attn_metadata, **changes)

    def require_parts(self, layer: Any) -> None:
        """The sums of parts are not asked of the NPU's kernels."""
        raise SparseMethodError(
            "methods that put a context together from parts do not run on vLLM Ascend's attention",
            where=type(layer.impl).__module__,
            fix=OTHER,
        )

    def write(self, layer: Any, kv_cache: Any, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """By the implementation's own operation, since 0.23.0, whose slots are int32."""
        super().write(layer, kv_cache, keys, values, slots.int())

    def _on_host(self, attn_metadata: Any, seq_lens: Tensor) -> Tensor:
        if self._copied is None or self._copied[0] is not attn_metadata or self._copied[1] is not seq_lens:
            copy = seq_lens.to("cpu", attn_metadata.seq_lens.dtype)
            self._copied = attn_metadata, seq_lens, copy
        return self._copied[2]

    def _planes(self, layer: Any, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """Keys and values, each ``[num_blocks, block_size, num_kv_heads, head_size]``: one tensor, or one for each."""
        wanted = (layer.num_kv_heads, layer.head_size)
        if len(kv_cache) == 2 and all(len(plane.shape) == 4 and tuple(plane.shape[2:]) == wanted for plane in kv_cache):  # noqa: PLR2004
            return kv_cache[0], kv_cache[1]
        shapes = [tuple(plane.shape) for plane in kv_cache] if isinstance(kv_cache, (tuple, list)) else kv_cache.shape
        raise SparseMethodError(
            f"a KV cache of the shape {shapes} is not one that is known",
            where=f"{type(layer.impl).__name__}, {layer.num_kv_heads} KV heads of {layer.head_size}",
            fix=OTHER,
        )
