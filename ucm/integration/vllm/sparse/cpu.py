"""vLLM's own attention on the CPU: metadata with a schedule of its own, and keys packed within a block.

How many threads read which blocks is decided once per step, from the lengths: other lengths need another schedule,
which the operator's own function makes. Keys lie in a block as the instruction set wants them (in tiles for AMX, in
columns for AVX-512): where each one lies is seen by writing known keys through the backend's own write.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse import paged

if TYPE_CHECKING:
    from torch import Tensor

IMPLEMENTATION = "CPUAttentionBackendImpl"
#: The dimensions of a cache in which keys and values are halves of each head's part; until 0.22.1 they are planes.
_HALVES_OF_HEADS = 4
#: Integers below this are exact in every dtype that a cache may have.
DIGIT = 256


class CpuBackend:
    """See `Backend` for what each of its methods is asked.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._orders: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        #: The lengths that a schedule was last made for, as the objects that they came as, and the schedule.
        self._scheduled: tuple[Any, Any, Any] | None = None

    def serves(self, impl: Any) -> bool:
        """Whether an implementation is this one, as it is from 0.11.1 on."""
        return type(impl).__name__ == IMPLEMENTATION and paged.metadata_class(type(impl)) is not None

    def block_size(self, layer: Any, kv_cache: Tensor) -> int:
        """Tokens in a block."""
        return int(_halves(layer, kv_cache)[0].shape[2])

    def restricted(
        self, layer: Any, attn_metadata: Any, block_table: Tensor, seq_lens: Tensor, max_seq_len: int
    ) -> Any:
        """The metadata with other blocks to read."""
        paged.require_restrictable(attn_metadata)
        if getattr(attn_metadata, "use_sdpa_prefill", False):  # until 0.23.0, where processors are neither x86 nor ARM
            raise SparseMethodError(
                "the block table of this step has no rows for its prompts",
                where=f"{type(attn_metadata).__name__}.use_sdpa_prefill",
                fix="use vLLM 0.24.0 or later on this processor",
            )
        table, lens = paged.padded(attn_metadata, block_table, seq_lens)
        if self._scheduled is None or self._scheduled[0] is not attn_metadata or self._scheduled[1] is not seq_lens:
            self._scheduled = attn_metadata, seq_lens, self._schedule(layer, attn_metadata, lens)
        return dataclasses.replace(
            attn_metadata,
            block_table=table,
            seq_lens=lens,
            max_seq_len=max_seq_len,
            scheduler_metadata=self._scheduled[2],
        )

    def read_keys(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """The keys in some blocks."""
        stored, _ = _halves(layer, kv_cache)
        _, heads, block_size, head_size = stored.shape
        isa = self._isa(layer, block_size)
        key = (kv_cache.dim(), isa, kv_cache.dtype, heads, block_size, head_size)
        if key not in self._orders:
            self._orders[key] = self._find_order(layer, kv_cache, isa)
        # Whole blocks, values and all, are copied some times faster than the keys alone.
        whole = (kv_cache if kv_cache.dim() == _HALVES_OF_HEADS else stored).flatten(1).index_select(0, block_ids)
        packed = whole.view(len(block_ids), heads, -1)[:, :, : block_size * head_size]
        sizes, strides = zip(*self._orders[key], strict=True)
        laid_out = packed.as_strided((*packed.shape[:2], *sizes), (*packed.stride()[:2], *strides))
        return laid_out.reshape(len(block_ids), heads, block_size, head_size).transpose(1, 2)

    def _schedule(self, layer: Any, attn_metadata: Any, seq_lens: Tensor) -> Tensor:
        """What the backend's builder makes of the lengths, by the same function with the same arguments."""
        from vllm import _custom_ops, envs  # noqa: PLC0415

        make = _custom_ops.cpu_attn_get_scheduler_metadata
        known = {
            "num_reqs": seq_lens.shape[0],
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_size,
            "seq_lens": seq_lens,
            "dtype": self._config.model_config.dtype,
            "query_start_loc": attn_metadata.query_start_loc,
            "causal": attn_metadata.causal,
            "sliding_window_size": -1,
            "isa": getattr(attn_metadata, "isa", None) or self._isa(layer, self._config.cache_config.block_size),
            "enable_kv_split": getattr(envs, "VLLM_CPU_ATTN_SPLIT_KV", True),
            "dynamic_causal": None,
            "kv_cache_dtype": self._config.cache_config.cache_dtype,
        }
        schedule: Tensor = make(**_arguments(make, known))
        return schedule

    def _isa(self, layer: Any, block_size: int) -> str:
        """The instruction set that the layer's keys are packed for: the layer's (0.28.0), its implementation's, …."""
        found = getattr(layer, "isa", None) or getattr(layer.impl, "isa", None)
        if found is None:  # until 0.23.0 only the metadata names it, after this function
            choose = sys.modules[type(layer.impl).__module__]._get_attn_isa  # noqa: SLF001
            known = {
                "dtype": self._config.model_config.dtype,
                "block_size": block_size,
                "head_size": layer.head_size,
                "kv_cache_dtype": self._config.cache_config.cache_dtype,
            }
            found = choose(**_arguments(choose, known))
        return str(found)

    def _find_order(self, layer: Any, kv_cache: Tensor, isa: str) -> list[tuple[int, int]]:
        """Where each key lies in a block.

        Each number is written digit by digit, for a cache's dtype may hold few integers exactly.

        Returns:
            Sizes and strides of a head's keys in memory such that, in this order, they are token by token.

        Raises:
            SparseMethodError: If what was written is not found again, each element once, with its own head.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        blocks = kv_cache.dim() - 4
        shape = tuple(1 if axis == blocks else size for axis, size in enumerate(kv_cache.shape))
        scratch = torch.zeros(shape, dtype=kv_cache.dtype)
        stored, _ = _halves(layer, scratch)
        _, heads, block_size, head_size = stored.shape
        number = torch.arange(block_size * head_size).view(block_size, 1, head_size).expand(-1, heads, -1)
        owner = torch.arange(heads).view(1, heads, 1).expand(block_size, -1, head_size)
        found = torch.zeros(heads, block_size * head_size, dtype=torch.int64)
        for digit in range(3):
            _write(layer, (number // DIGIT**digit % DIGIT).to(kv_cache.dtype), scratch, isa, self._config)
            found += stored[0].reshape(heads, -1).to(torch.int64) * DIGIT**digit
        _write(layer, (owner % DIGIT).to(kv_cache.dtype), scratch, isa, self._config)
        owners = stored[0].reshape(heads, -1).to(torch.int64)
        place = found[0].argsort()
        dimensions = strided(place.tolist())
        right = dimensions is not None and (
            torch.equal(found[0][place], torch.arange(block_size * head_size))
            and bool((found == found[0]).all())
            and torch.equal(owners, (torch.arange(heads) % DIGIT).view(heads, 1).expand_as(owners))
        )
        if dimensions is None or not right:
            raise SparseMethodError(
                "keys that were written to the cache are not found in it one by one",
                where=f"CPU attention for {isa}, a KV cache of the shape {tuple(kv_cache.shape)}",
                fix="use a method that reads no keys, and report this processor and vLLM's version",
            )
        return dimensions


def strided(places: list[int]) -> list[tuple[int, int]] | None:
    """An order as sizes and strides, slowest first; None where there are none that give it.

    Args:
        places: For each element its place.
    """
    found: list[tuple[int, int]] = []
    done = 1
    while done < len(places):
        stride = places[done] - places[0]
        size = 2
        while size * done < len(places) and places[size * done] - places[0] == size * stride:
            size += 1
        found.insert(0, (size, stride))
        done *= size
    built = [places[0] if places else 0]
    for size, stride in reversed(found):
        built = [n * stride + place for n in range(size) for place in built]
    return found if built == places and places[0] == 0 else None


def _halves(layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the operator takes them: each ``[num_blocks, num_kv_heads, block_size, head_size]``.

    Raises:
        SparseMethodError: If the cache has another shape.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 5 and shape[0] == 2 and shape[2] == layer.num_kv_heads and shape[4] == layer.head_size:  # noqa: PLR2004
        return kv_cache[0], kv_cache[1]  # until 0.22.1
    if len(shape) == _HALVES_OF_HEADS and shape[1] == layer.num_kv_heads and shape[3] == 2 * layer.head_size:
        # Each head's keys, packed, and behind them its values: not side by side, as the shape seems to say.
        rows = kv_cache.view(shape[0], shape[1], 2 * shape[2], layer.head_size)
        first, second = rows.chunk(2, dim=2)
        return first, second
    raise SparseMethodError(
        f"a KV cache of the shape {shape} is not one that is known",
        where=f"CPU attention, {layer.num_kv_heads} KV heads of {layer.head_size}",
        fix="serve without ucm_sparse_config",
    )


def _write(layer: Any, key: Tensor, scratch: Tensor, isa: str, vllm_config: Any) -> None:
    """Write a block of keys as the backend does; values are zeros."""
    import torch  # noqa: PLC0415 - vLLM brings it
    from vllm import _custom_ops  # noqa: PLC0415

    write = _custom_ops.cpu_attn_reshape_and_cache
    key_cache, value_cache = _halves(layer, scratch)
    known = {
        "key": key.contiguous(),
        "value": torch.zeros_like(key),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.arange(key.shape[0], dtype=torch.int64),
        "isa": isa,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
    }
    write(**_arguments(write, known))


def _arguments(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """What a function of this release takes, of all that any release's takes.

    Raises:
        SparseMethodError: If it needs what no reviewed release's does.
    """
    parameters = inspect.signature(function).parameters
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in known and parameter.default is inspect.Parameter.empty
    ]
    if unknown:
        raise SparseMethodError(
            f"vLLM's {function.__name__} needs {unknown[0]!r}, which is not known here",
            where="CPU attention",
            fix="use a vLLM release that is listed for this method",
        )
    return {name: known[name] for name in parameters if name in known}
