"""vLLM's own attention on the CPU: metadata with a schedule, and keys packed within a block.

The schedule says which threads read which blocks. It is computed once per step from the lengths, so other lengths need
another schedule, from the operator's own function. The instruction set determines the order of keys in a block (tiles
for AMX, columns for AVX-512). This order is determined by writing known keys with the backend's own function.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ucm.compat import optional
from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse import paged
from ucm.sparse.attention import HeadLayout, attend

if TYPE_CHECKING:
    from torch import Tensor

    from ucm.sparse.attention import QuerySplit

IMPLEMENTATION = "CPUAttentionBackendImpl"
#: The number of dimensions of a cache with keys and values as halves of each head; up to 0.22.1 they are planes.
_HALVES_OF_HEADS = 4
#: Integers below this are exact in every dtype of a cache.
DIGIT = 256


class Order(NamedTuple):
    """Where a head's keys or values lie in a block.

    Attributes:
        places: ``[block_size * head_size]``, int64: the place of each element, by token.
        sizes: The sizes of a view of the block that has them in this order.
        strides: Its strides.
    """

    places: Tensor
    sizes: list[int]
    strides: list[int]

    @classmethod
    def of(cls, places: Tensor) -> Order | None:
        """Return the order of elements with these places; None if no view has it."""
        import torch  # noqa: PLC0415 - vLLM brings it

        every, found, viewed = places.tolist(), cls(places, [], []), torch.zeros(1, dtype=torch.int64)
        while len(viewed) < len(every):
            done, size = len(viewed), 2
            stride = every[done] - every[0]
            while size * done < len(every) and every[size * done] - every[0] == size * stride:
                size += 1
            found.sizes.insert(0, size)
            found.strides.insert(0, stride)
            viewed = (stride * torch.arange(size)[:, None] + viewed).flatten()
        return found if torch.equal(viewed, places) else None

    def view(self, packed: Tensor) -> Tensor:
        """Return a view by token of the elements in the last dimension, which becomes several."""
        own = packed.shape[:-1], packed.stride()[:-1]
        return packed.as_strided((*own[0], *self.sizes), (*own[1], *self.strides), packed.storage_offset())


class CpuBackend(paged.KeysInPlace):
    """vLLM's CPU attention; `Backend` documents the methods."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        #: By kind of cache, the order of a head's keys and of its values in a block.
        self._orders: dict[tuple[object, ...], list[Order]] = {}
        #: The last schedule, with the metadata and the lengths that it was computed for.
        self._scheduled: tuple[Any, Any, Any] | None = None

    def serves(self, impl: Any) -> bool:
        """Return whether an implementation is this one, in its form from 0.11.1 on."""
        return type(impl).__name__ == IMPLEMENTATION and paged.metadata_class(type(impl)) is not None

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
        paged.require_restrictable(attn_metadata)
        if optional(attn_metadata, "use_sdpa_prefill", False):  # up to 0.23.0, on processors other than x86 and ARM
            raise SparseMethodError(
                "the block table of this step has no rows for its prompts",
                where=f"{type(attn_metadata).__name__}.use_sdpa_prefill",
                fix="use vLLM 0.24.0 or later on this processor",
            )
        table, lens, queries = paged.rows_of(attn_metadata, block_table, seq_lens, split)
        found = dataclasses.replace(attn_metadata, **queries, block_table=table, seq_lens=lens, max_seq_len=max_seq_len)
        if self._scheduled is None or self._scheduled[0] is not attn_metadata or self._scheduled[1] is not seq_lens:
            self._scheduled = attn_metadata, seq_lens, self._schedule(layer, found)
        return dataclasses.replace(found, scheduler_metadata=self._scheduled[2])

    def read_keys(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """Return the keys of some blocks."""
        stored, _ = _halves(layer, kv_cache)
        _, heads, block_size, head_size = stored.shape
        # Copying whole blocks with their values is several times faster than copying the keys alone.
        whole = (kv_cache if kv_cache.dim() == _HALVES_OF_HEADS else stored).flatten(1).index_select(0, block_ids)
        packed = whole.view(len(block_ids), heads, -1)[:, :, : block_size * head_size]
        by_token = self._order(layer, kv_cache)[0].view(packed)
        return by_token.reshape(len(block_ids), heads, block_size, head_size).transpose(1, 2)

    def require_parts(self, layer: Any) -> None:
        """Accept any layer: PyTorch's own kernel computes parts of it."""

    def head_layout(self, layer: Any, kv_cache: Tensor) -> HeadLayout | None:
        """Return the memory layout of a float32 or bfloat16 cache, if the model has the same dtype."""
        import torch  # noqa: PLC0415 - vLLM brings it

        if kv_cache.dtype not in {torch.float32, torch.bfloat16} & {self._config.model_config.dtype}:
            return None
        keys, values = _halves(layer, kv_cache)
        behind = values.storage_offset() - keys.storage_offset()
        of_keys, of_values = self._order(layer, kv_cache)
        return HeadLayout(
            kv_cache.dtype == torch.bfloat16,
            *(keys.shape[2], keys.shape[1], keys.shape[3], layer.num_heads // layer.num_kv_heads),
            *(keys.stride(0), keys.stride(1)),
            tuple(of_keys.places.tolist()),
            tuple((of_values.places + behind).tolist()),
            float(layer.impl.scale),
        )

    def read(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some blocks; in memory they are ordered by head, block and token."""
        import torch  # noqa: PLC0415 - vLLM brings it

        stored, _ = _halves(layer, kv_cache)
        blocks, heads, block_size, head_size = stored.shape
        head, half = torch.arange(heads)[None, :, None], torch.arange(2)[:, None, None]
        if kv_cache.dim() == _HALVES_OF_HEADS:
            rows = (block_ids * heads + head) * 2 + half
        else:
            rows = (half * blocks + block_ids) * heads + head
        found = kv_cache.view(-1, block_size * head_size).index_select(0, rows.flatten()).view(*rows.shape, -1)
        keys, values = (
            order.view(of).reshape(heads, len(block_ids), block_size, head_size).contiguous().permute(1, 2, 0, 3)
            for of, order in zip(found, self._order(layer, kv_cache), strict=True)
        )
        return keys, values

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
        """Compute attention over a run of keys."""
        keys, values = (of.flatten(0, 1)[:count] for of in (keys, values))
        return attend(query, keys, values, layer.impl.scale, causal=causal, window=window)

    def require_write(self, layer: Any) -> None:
        """Accept any layer: vLLM's function writes any tokens."""

    def write(self, layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write KV with the implementation's own method; up to 0.23.0 with the function that its attention calls."""
        if hasattr(layer.impl, paged.WRITE):
            getattr(layer.impl, paged.WRITE)(layer, keys, values, kv_cache, slots)
        else:
            self._write(layer, kv_cache, keys, values, slots, self._isa(layer, self.block_size(layer, kv_cache)))

    def _write(self, layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor, isa: str) -> None:
        from vllm import _custom_ops  # noqa: PLC0415

        write = _custom_ops.cpu_attn_reshape_and_cache
        key_cache, value_cache = _halves(layer, kv_cache)
        known = {
            "key": keys,
            "value": values,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slots,
            "isa": isa,
            "k_scale": 1.0,
            "v_scale": 1.0,
            "kv_cache_dtype": self._config.cache_config.cache_dtype,
        }
        write(**_arguments(write, known))

    def _keys(self, layer: Any, kv_cache: Tensor) -> Tensor:
        return _halves(layer, kv_cache)[0].transpose(1, 2)  # packed: of use for its shape

    def _order(self, layer: Any, kv_cache: Tensor) -> list[Order]:
        """Return the order of a head's keys, and of its values, in a block."""
        _, heads, block_size, head_size = _halves(layer, kv_cache)[0].shape
        isa = self._isa(layer, block_size)
        key = (kv_cache.dim(), isa, kv_cache.dtype, heads, block_size, head_size)
        if key not in self._orders:
            self._orders[key] = self._find_order(layer, kv_cache, isa)
        return self._orders[key]

    def _schedule(self, layer: Any, attn_metadata: Any) -> Tensor:
        """Compute the schedule of the lengths with the same function and arguments as the backend's builder."""
        from vllm import _custom_ops, envs  # noqa: PLC0415

        make = _custom_ops.cpu_attn_get_scheduler_metadata
        known = {
            "num_reqs": attn_metadata.seq_lens.shape[0],
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_size,
            "seq_lens": attn_metadata.seq_lens,
            "dtype": self._config.model_config.dtype,
            "query_start_loc": attn_metadata.query_start_loc,
            "causal": attn_metadata.causal,
            "sliding_window_size": -1,
            "isa": optional(attn_metadata, "isa") or self._isa(layer, self._config.cache_config.block_size),
            "enable_kv_split": optional(envs, "VLLM_CPU_ATTN_SPLIT_KV", True),
            "dynamic_causal": None,
            "kv_cache_dtype": self._config.cache_config.cache_dtype,
        }
        schedule: Tensor = make(**_arguments(make, known))
        return schedule

    def _isa(self, layer: Any, block_size: int) -> str:
        """Return the instruction set that the layer's keys are packed for."""
        found = optional(layer, "isa") or optional(layer, "impl.isa")
        if found is None:  # up to 0.23.0 only the metadata has it, from this function
            choose = sys.modules[type(layer.impl).__module__]._get_attn_isa  # noqa: SLF001
            known = {
                "dtype": self._config.model_config.dtype,
                "block_size": block_size,
                "head_size": layer.head_size,
                "kv_cache_dtype": self._config.cache_config.cache_dtype,
            }
            found = choose(**_arguments(choose, known))
        return str(found)

    def _find_order(self, layer: Any, kv_cache: Tensor, isa: str) -> list[Order]:
        """Determine the order of a head's keys, and of its values, in a block.

        The index of each element is written digit by digit, because few integers are exact in some dtypes of a cache.

        Raises:
            SparseMethodError: If there is none, or elements are not found in their own head, and at one place in all.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        blocks = kv_cache.dim() - 4
        shape = tuple(1 if axis == blocks else size for axis, size in enumerate(kv_cache.shape))
        scratch = torch.zeros(shape, dtype=kv_cache.dtype)
        halves = _halves(layer, scratch)
        _, heads, block_size, head_size = halves[0].shape
        number = torch.arange(block_size * head_size).view(block_size, 1, head_size).expand(-1, heads, -1)
        owner = torch.arange(heads).view(1, heads, 1).expand(block_size, -1, head_size)

        def written(digit: Tensor) -> list[Tensor]:
            """Write digits as keys and values, and return what is in memory then: ``[heads, elements]``, int64."""
            digit = (digit % DIGIT).to(kv_cache.dtype).contiguous()
            self._write(layer, scratch, digit, digit, torch.arange(block_size), isa)
            return [stored[0].reshape(heads, -1).to(torch.int64) for stored in halves]

        digits = [written(number // DIGIT**place) for place in range(3)]
        found, whole = [], torch.arange(block_size * head_size)
        for what, own, *of in zip(("keys", "values"), written(owner), *digits, strict=True):
            numbers = torch.stack(of, -1) @ DIGIT ** torch.arange(len(of))
            order = Order.of(numbers[0].argsort())
            right = torch.equal(numbers.sort().values, whole.expand_as(numbers)) and (numbers == numbers[0]).all()
            if order is None or not right or (own != (torch.arange(heads) % DIGIT)[:, None]).any():
                raise SparseMethodError(
                    f"the positions of {what} in the KV cache cannot be determined",
                    where=f"CPU attention for {isa}, a KV cache of the shape {tuple(kv_cache.shape)}",
                    fix="use a method that reads no keys, and report this processor and vLLM's version",
                )
            found.append(order)
        return found


def _halves(layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as the operator takes them, each ``[num_blocks, num_kv_heads, block_size, head_size]``.

    Raises:
        SparseMethodError: If the cache has another shape.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 5 and shape[0] == 2 and shape[2] == layer.num_kv_heads and shape[4] == layer.head_size:  # noqa: PLR2004
        return kv_cache[0], kv_cache[1]  # up to 0.22.1
    if len(shape) == _HALVES_OF_HEADS and shape[1] == layer.num_kv_heads and shape[3] == 2 * layer.head_size:
        # The memory of each head has all keys, packed, then all values, although the shape suggests pairs.
        rows = kv_cache.view(shape[0], shape[1], 2 * shape[2], layer.head_size)
        first, second = rows.chunk(2, dim=2)
        return first, second
    raise SparseMethodError(
        f"KV caches of the shape {shape} are not known",
        where=f"CPU attention, {layer.num_kv_heads} KV heads of {layer.head_size}",
        fix="serve without ucm_sparse_config",
    )


def _arguments(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that this release's function takes from those that any reviewed release's takes.

    Raises:
        SparseMethodError: If the function needs an argument that no reviewed release has.
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
