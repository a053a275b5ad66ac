"""vLLM's reference implementation of latent attention (MLA) on the CPU: one key per token, shared by all heads.

Its cache holds for each token a latent vector, followed by the rotated part of the key. A decode multiplies this key
with a query whose first part has been projected to the latent space (*absorbed*). Prompts are computed with ordinary
keys, which are made from the latent vectors. So the metadata has a part for decodes, which come first, and a part for
prompts, and only the first can be restricted.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.integration.vllm.sparse.paged import KeysInPlace
from ucm.sparse.base import refuse

if TYPE_CHECKING:
    from torch import Tensor

    from ucm.sparse.attention import QuerySplit

IMPLEMENTATION = "CPUMLAImpl"
#: The class of its metadata; that of other back ends has fields with the same names.
METADATA = "MLACommonMetadata"
OTHER = "serve this model without ucm_sparse_config"


class LatentBackend(KeysInPlace):
    """Latent attention on the CPU; `Backend` documents the methods. ``layer`` is vLLM's ``MLAAttention``."""

    def serves(self, impl: Any) -> bool:
        """Return whether an implementation is this one."""
        return type(impl).__name__ == IMPLEMENTATION

    def scored(self, layer: Any, query: Tensor, attn_metadata: Any) -> Tensor:
        """Return the absorbed queries of the step's decodes.

        Args:
            layer: The layer.
            query: ``[num_tokens, num_heads, head_size]``: for each head, a part to absorb and a rotated part.
            attn_metadata: vLLM's ``MLACommonMetadata``.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        count = attn_metadata.num_decode_tokens
        projection = layer.W_UK_T  # [num_heads, channels, latent channels]
        plain, rotated = query[:count].tensor_split([projection.shape[1]], -1)
        absorbed = torch.bmm(plain.transpose(0, 1), projection).transpose(0, 1)
        wanted = torch.cat((absorbed, rotated), -1)
        # The scale is that of the ordinary heads, and methods apply that of the latent key's channels.
        return wanted * (layer.impl.scale * wanted.shape[-1] ** 0.5)

    def restricted(
        self,
        layer: Any,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """Return the metadata with other blocks for its decodes to read."""
        del layer
        require_restrictable(attn_metadata)
        divided = "the tokens of a prompt cannot read different blocks with latent attention"
        refuse({divided: split is not None}, type(attn_metadata).__name__)
        count = attn_metadata.num_decodes
        decode = dataclasses.replace(
            attn_metadata.decode, block_table=block_table[:count].contiguous(), seq_lens=seq_lens[:count]
        )
        return dataclasses.replace(attn_metadata, decode=decode, max_seq_len=max_seq_len)

    def _keys(self, layer: Any, kv_cache: Tensor) -> Tensor:
        del layer
        return kv_cache[:, :, None]  # the latent keys, of the only KV head


def is_latent(attn_metadata: Any) -> bool:
    """Return whether metadata is that of latent attention."""
    return any(kind.__name__ == METADATA for kind in type(attn_metadata).__mro__)


def block_table(attn_metadata: Any) -> Tensor:
    """Return the block table of all requests of a step, decodes first, as vLLM has ordered its rows."""
    import torch  # noqa: PLC0415 - vLLM brings it

    require_restrictable(attn_metadata)
    parts = [attn_metadata.decode.block_table[: attn_metadata.num_decodes]] if attn_metadata.num_decodes else []
    if attn_metadata.prefill is not None:
        parts.append(attn_metadata.prefill.block_table)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def require_restrictable(attn_metadata: Any) -> None:
    """Refuse steps whose attention reads more than the rows of the decodes' block table."""
    several = attn_metadata.num_decodes != attn_metadata.num_decode_tokens
    obstacles = {
        "a decode of latent attention has several tokens": several,
        "the attention of this step is not causal": optional(attn_metadata, "causal", True) is not True,
    }
    refuse(obstacles, type(attn_metadata).__name__)
