"""One attention layer of the installed vLLM for the CPU, with a cache and metadata made by its own backend.

It needs a vLLM that has ``vllm.v1.attention.backend`` and runs on a CPU; seen with 0.27.1 and 0.32.0.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.integration.vllm.sparse.layers import AttentionLayers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

NAME = "model.layers.0.self_attn.attn"
HEADS, KV_HEADS = 6, 2
#: The most tokens of a request.
LONGEST = 512


@dataclass
class RealLayer:
    """A layer, its cache, and the view that is tested.

    Attributes:
        config: vLLM's ``VllmConfig``.
        layer: vLLM's ``Attention``.
        kv_cache: Its cache, in its backend's layout.
        view: Our view of the layers.
    """

    config: Any
    layer: Any
    kv_cache: torch.Tensor
    view: AttentionLayers
    block_size: int
    head_size: int

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write tokens, ``[num_tokens, num_kv_heads, head_size]``, as vLLM does."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.kv_cache, slots)

    def metadata(self, rows: Sequence[Sequence[int]], seq_lens: Sequence[int], new: Sequence[int]) -> Any:
        """The metadata of a step, from the backend's own builder; ``rows`` are the block ids of each request."""
        import torch  # noqa: PLC0415
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        width = max(len(row) for row in rows)
        table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(new),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            causal=True,
        )
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=KV_HEADS, head_size=self.head_size, dtype=self.kv_cache.dtype
        )
        with set_current_vllm_config(self.config):
            builder = self.layer.attn_backend.get_builder_cls()(spec, [NAME], self.config, torch.device("cpu"))
            return builder.build(0, common)

    def attend(self, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """What the backend's kernel gives for ``[num_tokens, num_heads, head_size]``."""
        output = query.new_empty(query.shape)
        empty = query.new_empty((query.shape[0], KV_HEADS, self.head_size))
        self.layer.impl.forward(self.layer, query, empty, empty, self.kv_cache, metadata, output=output)
        return output


def real_layer(directory: Path, dtype: str, block_size: int, head_size: int, blocks: int = 16) -> RealLayer:
    """Make a layer of `HEADS` heads and `KV_HEADS` KV heads, for requests of up to `LONGEST` tokens.

    Args:
        directory: Where to write the configuration of a model.
        dtype: The dtype of its cache, as vLLM names it.
        block_size: Tokens per block.
        head_size: The size of a head.
        blocks: Blocks in its cache; the first is never a request's.
    """
    import torch  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    torch.cpu._init_amx()  # noqa: SLF001 - the operating system gives tiles on request; in an engine a linear layer asks first
    arguments = EngineArgs(
        model=str(_write_config(directory, head_size)),
        dtype=dtype,
        block_size=block_size,
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    kind = getattr(torch, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with set_current_vllm_config(config):
            layer = Attention(
                HEADS, head_size, head_size**-0.5, num_kv_heads=KV_HEADS, cache_config=config.cache_config, prefix=NAME
            )
    finally:
        torch.set_default_dtype(before)
    shape_of = optional(layer.attn_backend, "get_kv_cache_shape")
    shape = (
        (blocks, KV_HEADS, block_size, 2 * head_size)
        if shape_of is None
        else shape_of(blocks, block_size, KV_HEADS, head_size)
    )
    cache = layer.kv_cache = torch.zeros(shape, dtype=kind)
    found = RealLayer(config, layer, cache, AttentionLayers(config), block_size, head_size)
    found.metadata([[0]], [1], [1])  # a builder tells its layers for which instruction set it packs
    return found


def _write_config(directory: Path, head_size: int) -> Path:
    """Write the configuration of a Llama of one layer; nothing loads its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * head_size,
        "intermediate_size": 2 * HEADS * head_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_size,
        "vocab_size": 128,
        "max_position_embeddings": LONGEST,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
