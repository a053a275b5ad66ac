"""The attention layers of a worker: `AttentionView` over whatever backend each layer has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from ucm.errors import SparseMethodError
from ucm.integration.vllm.options import choose_backend
from ucm.integration.vllm.sparse import paged, requirements
from ucm.integration.vllm.sparse.cpu import CpuBackend
from ucm.integration.vllm.sparse.paged import PagedBackend
from ucm.integration.vllm.sparse.raw_blocks import RawBlocks
from ucm.integration.vllm.sparse.rotary import Rotaries
from ucm.integration.vllm.sparse.step import step_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ucm.sparse.attention import QuerySplit, StepBatch
    from ucm.sparse.block_copies import BlockCopies
    from ucm.sparse.partial_attention import Span
    from ucm.sparse.rotation import Rotary
    from ucm.sparse.window_kernel import HeadLayout


#: What writes KV to a cache, in a release and backend in which that is an operation of its own.
WRITE = "do_kv_cache_update"


class Backend(Protocol):
    """What differs between attention backends; ``layer`` is vLLM's ``Attention``."""

    def serves(self, impl: Any) -> bool:
        """Whether an ``AttentionImpl`` is of this kind, in this release."""
        ...

    def block_size(self, layer: Any, kv_cache: Tensor) -> int:
        """See `AttentionView.block_size`."""
        ...

    def restricted(
        self,
        layer: Any,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None,
    ) -> Any:
        """See `AttentionView.restricted`."""
        ...

    def read_keys(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """See `AttentionView.read_keys`."""
        ...

    def require_parts(self, layer: Any) -> None:
        """See `PartsView.require_parts`; what any backend's layer may have is looked at elsewhere."""
        ...

    def head_layout(self, layer: Any, kv_cache: Tensor) -> HeadLayout | None:
        """See `PartsView.head_layout`."""
        ...

    def read(self, layer: Any, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `PartsView.read`."""
        ...

    def write(self, layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `AttentionLayers.write`; asked only where the implementation has no operation of its own for it."""
        ...

    def require_write(self, layer: Any) -> None:
        """Refuse a layer for which `write` is out of reach."""
        ...

    def attend(
        self, layer: Any, query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `PartsView.attend`."""
        ...

    def attend_window(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        spans: Sequence[Span],
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """See `PartsView.attend_window`."""
        ...


class AttentionLayers:
    """Implements `AttentionView`; nothing is looked at before it is asked for, for the model is loaded later.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        runner: vLLM's model runner, if the model will be looked at.
    """

    def __init__(self, vllm_config: Any, runner: Any = None) -> None:
        self._config = vllm_config
        self._runner: Callable[[], Any] = (lambda: None) if runner is None else ref(runner)
        self._backends: tuple[Backend, ...] = (CpuBackend(vllm_config), PagedBackend())
        self._found: dict[str, tuple[Any, Backend]] = {}
        self._reads_keys: set[str] = set()
        self._rotaries: Rotaries | None = None

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        """See `AttentionView.batch`."""
        return step_batch(runner, scheduler_output, input_batch)

    @property
    def ranks(self) -> int:
        """See `AttentionView.ranks`."""
        return int(self._config.parallel_config.tensor_parallel_size)

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """See `AttentionView.sum_over_ranks`."""
        if self.ranks > 1:
            import torch  # noqa: PLC0415 - vLLM brings it
            from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415

            torch.distributed.all_reduce(counts, group=get_tp_group().device_group)
        return counts

    def require_engine(self) -> None:
        """See `AttentionView.require_engine`."""
        requirements.require_engine(self._config)

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        """See `AttentionView.require`."""
        layer, _ = self._layer(layer_name)
        if reads_keys and layer_name not in self._reads_keys:
            requirements.require_plain_keys(layer_name, layer)
            self._reads_keys.add(layer_name)

    def block_size(self, layer_name: str, kv_cache: Tensor) -> int:
        """See `AttentionView.block_size`."""
        layer, backend = self._layer(layer_name)
        return backend.block_size(layer, kv_cache)

    def block_table(self, attn_metadata: Any) -> Tensor:
        """See `AttentionView.block_table`."""
        paged.require_restrictable(attn_metadata)
        table: Tensor = attn_metadata.block_table
        return table

    def restricted(
        self,
        layer_name: str,
        attn_metadata: Any,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        """See `AttentionView.restricted`."""
        layer, backend = self._layer(layer_name)
        return backend.restricted(layer, attn_metadata, block_table, seq_lens, max_seq_len, split)

    def read_keys(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> Tensor:
        """See `AttentionView.read_keys`."""
        layer, backend = self._layer(layer_name)
        return backend.read_keys(layer, kv_cache, block_ids)

    def require_parts(self, layer_name: str) -> None:
        """See `PartsView.require_parts`."""
        self.require(layer_name, reads_keys=True)
        layer, backend = self._layer(layer_name)
        requirements.require_plain_scores(layer_name, layer)
        backend.require_parts(layer)

    def rotary(self, layer_name: str) -> Rotary:
        """See `PartsView.rotary`."""
        layer, _ = self._layer(layer_name)
        if self._rotaries is None:
            self._rotaries = Rotaries(self._runner, self._config.model_config)
        return self._rotaries.of(layer_name, layer)

    def bound_cache(self, layer_name: str) -> Tensor | None:
        """See `PartsView.bound_cache`."""
        bound: Any = getattr(self._layer(layer_name)[0], "kv_cache", None)
        if isinstance(bound, list | tuple):  # in older releases one for each of several virtual engines
            bound = bound[0] if bound else None
        return bound if getattr(bound, "ndim", 0) > 1 else None

    def head_layout(self, layer_name: str, kv_cache: Tensor) -> HeadLayout | None:
        """See `PartsView.head_layout`."""
        layer, backend = self._layer(layer_name)
        return backend.head_layout(layer, kv_cache)

    def read(self, layer_name: str, kv_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `PartsView.read`."""
        layer, backend = self._layer(layer_name)
        return backend.read(layer, kv_cache, block_ids)

    def attend(
        self, layer_name: str, query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `PartsView.attend`."""
        layer, backend = self._layer(layer_name)
        return backend.attend(layer, query, keys, values, spans, causal=causal)

    def attend_window(
        self,
        layer_name: str,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        spans: Sequence[Span],
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """See `PartsView.attend_window`."""
        layer, backend = self._layer(layer_name)
        return backend.attend_window(layer, query, kv_cache, block_table, spans, window)

    def require_write(self, layer_name: str) -> None:
        """Check that tokens can be written to a layer's cache.

        Raises:
            SparseMethodError: If its backend writes them within its attention, out of reach.
        """
        layer, backend = self._layer(layer_name)
        if not hasattr(layer.impl, WRITE):
            backend.require_write(layer)

    def write(self, layer_name: str, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens to a layer's cache.

        Args:
            layer_name: The layer's prefix in the model.
            kv_cache: Its cache.
            keys: ``[n, num_kv_heads, head_size]``, rotated.
            values: The same.
            slots: ``[n]``, int64: where they go.
        """
        layer, backend = self._layer(layer_name)
        if hasattr(layer.impl, WRITE):
            getattr(layer.impl, WRITE)(layer, keys, values, kv_cache, slots)
        else:
            backend.write(layer, kv_cache, keys, values, slots)

    def block_copies(self, kv_caches: Mapping[str, Tensor]) -> BlockCopies:
        """See `CopyingView.block_copies`."""
        return RawBlocks(kv_caches, int(self._config.cache_config.block_size))

    def _layer(self, layer_name: str) -> tuple[Any, Backend]:
        """A layer that is served, and its backend.

        Raises:
            SparseMethodError: If it is not served.
        """
        found = self._found.get(layer_name)
        if found is None:
            layer = self._config.compilation_config.static_forward_context[layer_name]
            requirements.require_layer(layer_name, layer)
            backend = next((backend for backend in self._backends if backend.serves(layer.impl)), None)
            if backend is None:
                raise SparseMethodError(
                    f"the attention backend {type(layer.impl).__name__} has no block table that can be restricted",
                    where=f"layer {layer_name}",
                    fix=choose_backend(),
                )
            found = self._found[layer_name] = layer, backend
        return found
