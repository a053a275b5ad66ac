"""vLLM Ascend on the CPU: a platform plug-in of vLLM, see `tests.e2e.test_ascend`.

The platform, worker, model runner, layers, attention and sampler are vLLM Ascend's own, with both overlays. Tensors lie
on the CPU, gloo stands for HCCL, and torch computes what the NPU's kernels do, by their published description.
"""

from __future__ import annotations

import resource
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch_npu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The mode of a causal mask that is aligned to the last query and the last key.
CAUSAL = 3
#: The number of an A2 among its chips.
A2 = 220
MEMORY = 1 << 34


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend for one request, whose last query belongs to its last key; all are (token, head, number)."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
    queried = torch.arange(len(query))[:, None] + len(key) - len(query)
    scores.masked_fill_(torch.arange(len(key)) > queried, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))


def fused_attention(  # noqa: PLR0913 - as published
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    input_layout: str,
    sparse_mode: int,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """``npu_fused_infer_attention_score`` for tokens of several requests, with or without a block table."""
    assert input_layout == "TND"
    assert sparse_mode == CAUSAL
    assert query.shape[1] == num_heads
    of_queries = pairwise([0, *actual_seq_lengths])
    of_keys = pairwise([0, *actual_seq_lengths_kv]) if block_table is None else ((0, n) for n in actual_seq_lengths_kv)
    found = []
    for row, ((begin, end), (first, last)) in enumerate(zip(of_queries, of_keys, strict=True)):
        if block_table is None:
            keys, values = key[first:last], value[first:last]
        else:
            keys, values = (
                of[block_table[row].long()].reshape(-1, num_key_value_heads, query.shape[-1])[:last]
                for of in (key, value)
            )
        found.append(attend(query[begin:end], keys, values, scale))
    return torch.cat(found), None


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


def norm(of: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_rms_norm``."""
    scale = (of.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return of * scale * weight, scale


def add_norm(
    of: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu_add_rms_norm``."""
    added = of + residual
    return *norm(added, weight, epsilon), added


def rotate(of: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate halves of vectors."""
    first, second = of.chunk(2, -1)
    return of * cos + torch.cat([-second, first], -1) * sin


def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, size: int, table: torch.Tensor, halves: bool
) -> None:
    """``_npu_rotary_embedding``."""
    assert halves
    cos, sin = (part.repeat(1, 2)[:, None] for part in table[positions].chunk(2, -1))
    for of in (query, key):
        of.copy_(rotate(of.view(len(of), -1, size), cos, sin).flatten(1))


class MapSlots:
    """vLLM's Triton kernel ``_compute_slot_mapping_kernel``, without context parallelism."""

    def __getitem__(self, _: object) -> Callable[..., None]:
        return self.run

    def run(
        self,
        tokens: int,
        _: int,
        starts: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        stride: int,
        block_size: int,
        slots: torch.Tensor,
        **about: int,
    ) -> None:
        assert stride == table.shape[1]
        rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())[:tokens]
        of = positions[: len(rows)]
        slots.fill_(about["PAD_ID"])
        slots[: len(rows)] = table[rows, of // block_size] * block_size + of % block_size


class Device(torch_npu.Anything):  # type: ignore[misc] # the stand-in's
    """``torch.npu``: one device, whose streams and events are inert."""

    def get_soc_version(self) -> int:
        return A2

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return MEMORY - 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, MEMORY

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def memory_stats(self, *_: object) -> dict[str, int]:
        return {}

    def memory_reserved(self, *_: object) -> int:
        return 0

    def memory_allocated(self, *_: object) -> int:
        return 0

    max_memory_allocated = memory_allocated


class OnCpu(ModuleType):
    """torch for a module that names the device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, _: str) -> torch.device:
        return torch.device("cpu")


def on_cpu(register: Callable[..., None]) -> Callable[..., None]:
    """Register operators of an NPU for tensors of the CPU."""

    def changed(self: Any, name: str, function: Any, dispatch_key: str = "", **settings: Any) -> None:
        key = "CPU" if (self.ns, dispatch_key) == ("vllm", "PrivateUse1") else dispatch_key
        register(self, name, function, key, **settings)

    return changed


def register() -> str:
    """Prepare torch, and name the platform."""
    torch_npu.npu = torch.npu = Device()
    torch_npu.npu_fused_infer_attention_score = fused_attention
    torch_npu._npu_reshape_and_cache = write
    torch_npu._npu_rotary_embedding = rotary_embedding
    torch_npu.npu_rms_norm = norm
    torch_npu.npu_add_rms_norm = add_norm
    torch_npu.npu_swiglu = lambda of: torch.nn.functional.silu(of.chunk(2, -1)[0]) * of.chunk(2, -1)[1]
    torch.accelerator.synchronize = lambda *_: None  # torch may have been built for another device
    torch.Tensor.npu = torch.Tensor.pin_memory = lambda self, *_: self  # there is no device to copy to
    torch.library.Library.impl = on_cpu(torch.library.Library.impl)
    torch.distributed.Backend.register_backend("hccl", torch.distributed.ProcessGroupGloo, devices=["cpu"])
    from vllm_ascend.platform import NPUPlatform  # noqa: PLC0415 - after what it needs

    NPUPlatform.device_type = "cpu"
    NPUPlatform.mem_get_info = staticmethod(torch.npu.mem_get_info)
    NPUPlatform.is_pin_memory_available = classmethod(lambda _: False)
    return f"{NPUPlatform.__module__}.{NPUPlatform.__qualname__}"


def start() -> None:
    """Prepare modules of a worker."""
    import vllm_ascend.ops  # noqa: F401, PLC0415 - imports itself in a circle from elsewhere
    from vllm_ascend.worker import block_table, worker  # noqa: PLC0415

    block_table._compute_slot_mapping_kernel = MapSlots()
    worker.torch = OnCpu("torch")
