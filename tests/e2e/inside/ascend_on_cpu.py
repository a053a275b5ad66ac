"""vLLM Ascend's attention in an engine on the CPU: a plug-in of vLLM, see `tests.e2e.test_ascend`.

Its metadata builder and its implementation are vLLM Ascend's own, and so are the shapes of the KV cache: one tensor for
keys, one for values. torch computes what the NPU's kernels do, by their published description.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch_npu

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The mode of a causal mask that is aligned to the last query and the last key.
CAUSAL = 3


def fused_attention(  # noqa: PLR0913 - as published
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    input_layout: str,
    sparse_mode: int,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """``npu_fused_infer_attention_score`` for tokens of several requests, with or without a block table."""
    assert input_layout == "TND"
    assert sparse_mode == CAUSAL
    size = query.shape[-1]
    output = torch.empty_like(query)
    of_queries = pairwise([0, *actual_seq_lengths])
    of_keys = pairwise([0, *actual_seq_lengths_kv]) if block_table is None else ((0, n) for n in actual_seq_lengths_kv)
    for row, ((begin, end), (first, last)) in enumerate(zip(of_queries, of_keys, strict=True)):
        if block_table is None:
            keys, values = key[first:last], value[first:last]
        else:
            blocks = block_table[row, : -(-last // block_size)].long()
            keys, values = (of[blocks].reshape(-1, num_key_value_heads, size)[:last] for of in (key, value))
        queries = query[begin:end]
        group = num_heads // num_key_value_heads
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1)) * scale
        queried = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        scores.masked_fill_(torch.arange(len(keys)) > queried, float("-inf"))
        output[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
    return output, None


def write(
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """``_npu_reshape_and_cache``."""
    slots = slot_indices.long()
    key_cache.view(-1, *key_cache.shape[2:])[slots] = key
    value_cache.view(-1, *value_cache.shape[2:])[slots] = value


def register() -> None:
    """Have vLLM's CPU platform run it."""
    torch_npu.npu_fused_infer_attention_score = fused_attention
    torch_npu._npu_reshape_and_cache = write
    torch.Tensor.pin_memory = lambda self, *_: self  # there is no device to copy to
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415 - the platform is chosen first
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    CpuPlatform.get_attn_backend_cls = classmethod(lambda *_, **__: f"{__name__}.backend")
    make = GPUModelRunner.initialize_kv_cache_tensors

    def initialize(self: Any, *arguments: Any) -> Any:
        caches = make(self, *arguments)
        for name, cache in caches.items():
            pair = caches[name] = cache[0].clone(), cache[1].clone()
            self.compilation_config.static_forward_context[name].kv_cache = pair
        return caches

    GPUModelRunner.initialize_kv_cache_tensors = initialize


def __getattr__(name: str) -> Any:
    """The back end, which cannot be imported before vLLM's platform is known."""
    if name != "backend":
        raise AttributeError(name)
    import vllm_ascend.ops  # noqa: F401, PLC0415 - imports itself in a circle from elsewhere
    from vllm.config import get_current_vllm_config  # noqa: PLC0415
    from vllm_ascend.ascend_config import init_ascend_config  # noqa: PLC0415
    from vllm_ascend.attention.attention_v1 import (  # noqa: PLC0415
        AscendAttentionBackend,
        AscendAttentionMetadataBuilder,
        AscendAttentionState,
    )
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata  # noqa: PLC0415

    init_ascend_config(get_current_vllm_config())
    print("attention:", AscendAttentionBackend.get_impl_cls().__name__)

    class Builder(AscendAttentionMetadataBuilder):  # type: ignore[misc] # untyped
        """With what vLLM Ascend's runner adds to vLLM's own facts of a step."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *, fast_build: bool = False) -> Any:
            lens = common_attn_metadata.seq_lens_cpu
            new = common_attn_metadata.query_start_loc_cpu.diff()
            state = AscendAttentionState.ChunkedPrefill
            if torch.equal(lens, new):
                state = AscendAttentionState.PrefillNoCache
            elif bool((new == 1).all()):
                state = AscendAttentionState.DecodeOnly
            known = {field.name: getattr(common_attn_metadata, field.name) for field in fields(common_attn_metadata)}
            step = AscendCommonAttentionMetadata(**{**known, "seq_lens_cpu": lens, "attn_state": state})
            return super().build(common_prefix_len, step, fast_build)

    class Backend(AscendAttentionBackend):  # type: ignore[misc] # untyped
        """With blocks of any size."""

        @staticmethod
        def get_builder_cls() -> type[Any]:
            return Builder

        @staticmethod
        def get_supported_kernel_block_sizes() -> list[int]:
            return [32]

    globals()["backend"] = Backend
    return Backend
