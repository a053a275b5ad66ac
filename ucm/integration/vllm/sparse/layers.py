"""The attention layers of a worker: `AttentionView` for the backend of each layer, and the batch of a step.

V1's runner keeps a persistent batch with all counts on the host. V2's batch is built per step and has them on the
device in some releases, so for V2 `StepBatch` is built from the scheduler's output, which has them in all releases.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import ref

import numpy as np

from ucm.compat import (
    admitted_requests,
    batch_rows,
    bound_kv_cache,
    choose_backend,
    computed_tokens,
    model_of,
    optional,
    prompt_lengths,
    rotary_table,
    rotates_in_float,
)
from ucm.errors import SparseMethodError
from ucm.integration.vllm.connector.kv_cache import CacheGroup, DeviceMemory
from ucm.integration.vllm.sparse import ascend, latent, paged, requirements
from ucm.integration.vllm.sparse.ascend import AscendBackend
from ucm.integration.vllm.sparse.cpu import CpuBackend
from ucm.integration.vllm.sparse.latent import LatentBackend
from ucm.integration.vllm.sparse.paged import PagedBackend
from ucm.integration.vllm.sparse.requirements import lower_graphs
from ucm.rotary import Rotary
from ucm.sparse.attention import AttentionOf, PartsOf, StepBatch, asked_of
from ucm.sparse.base import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ucm.sparse.attention import BlockCopies

#: vLLM's class of rotary embeddings whose angles are multiples of the position.
PLAIN = "RotaryEmbedding"
#: The models' attribute for it, in the module that contains the attention layer.
ATTRIBUTE = "rotary_emb"
#: A norm of queries or keys between the calls of the rotary embedding and of the attention.
NORM_BEHIND = re.compile(rf"\.{ATTRIBUTE}\((?:(?!\.attn\().)*?\b(?:q|k|query|key)\w*norm\w*\(", re.DOTALL)
#: The positions at which a table is compared with its formula, and the largest deviation by rounding.
CHECKED, TOLERANCE = 2048, 2**-6
ELSEWHERE = "serve this model without this method"


P = ParamSpec("P")
Result = TypeVar("Result")


class Rotaries:
    """The rotary embeddings of a worker's model; layers that share one get the same object.

    Args:
        runner: vLLM's model runner, by a weak reference; its model is loaded before a layer is asked for.
        vllm_config: vLLM's ``VllmConfig``.
    """

    def __init__(self, runner: Callable[[], Any], vllm_config: Any) -> None:
        self._runner, self._config = runner, vllm_config
        self._by_layer: dict[str, Rotary] = {}
        self._by_module: dict[int, Rotary] = {}

    def of(self, layer_name: str, layer: Any) -> Rotary:
        """Return the rotary embedding of a layer.

        Raises:
            SparseMethodError: If there is none, it is not a plain one, or its table is shorter than the longest
                context.
        """
        found = self._by_layer.get(layer_name)
        if found is None:
            owner = _owner(self._runner(), layer)
            module: Any = optional(owner, ATTRIBUTE)
            _require_plain(layer_name, owner, module, self._config.model_config)
            if id(module) not in self._by_module:
                table = module.cos_sin_cache
                frequencies = _frequencies(module, table, f"layer {layer_name}")
                # Multiplied in the dtype of queries and keys, except in FlashInfer's kernel.
                applied = table if rotates_in_float(module) else table.to(self._config.model_config.dtype)
                self._by_module[id(module)] = Rotary(applied, module.is_neox_style, frequencies)
            found = self._by_layer[layer_name] = self._by_module[id(module)]
        return found


def _require_plain(layer_name: str, owner: Any, module: Any, model_config: Any) -> None:
    where = f"layer {layer_name}"
    refuse({"no rotary embedding was found for the layer": module is None}, where, ELSEWHERE)
    kind = type(module).__name__
    table = rotary_table(module)
    if kind != PLAIN or table is None:
        raise SparseMethodError(
            f"the layer's rotary embedding is a {kind}; only a plain one, whose angles are multiples of the position, "
            "can be turned to other angles",
            where=where,
            fix="serve this model without this method, or with its plain rotary embedding (no rope_scaling, or "
            "rope_parameters of the rope_type default, in --hf-overrides)",
        )
    normed = "the layer normalises its keys after their rotation, which then cannot be undone"
    refuse({normed: NORM_BEHIND.search(_source(owner))}, where, ELSEWHERE)
    longest = int(model_config.max_model_len)
    if table.shape[0] < longest:
        raise SparseMethodError(
            f"the rotary embedding's table has {table.shape[0]} positions, and a context may have {longest}",
            where=f"{where}, max_model_len",
            fix=f"start vLLM with --hf-overrides '{_overrides(model_config, longest)}'",
        )


def _owner(runner: Any, layer: Any) -> Any:
    """Return the module that has the attention layer as a child; names of layers and of modules may differ."""
    model = model_of(runner)
    if model is None:
        return None
    return next((module for module in model.modules() if any(child is layer for child in module.children())), None)


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(type(owner).forward)
    except (OSError, TypeError):
        return ""


def _frequencies(module: Any, table: Tensor, where: str) -> Tensor:
    """Return radians per position, by the formula of plain rotary embedding.

    Raises:
        SparseMethodError: If the table differs from this formula.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    exponents = torch.arange(0, table.shape[1], 2, dtype=torch.float32) / table.shape[1]
    frequencies: Tensor = 1.0 / module.base**exponents
    angles = torch.arange(min(CHECKED, table.shape[0]))[:, None] * frequencies
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1)
    off = float((table[: len(wanted)].float().cpu() - wanted).abs().max())
    other = f"the rotary embedding's table is not that of its base, {module.base}: it is off by {off:.3g}"
    refuse({other: not off < TOLERANCE}, where, ELSEWHERE)
    return frequencies.to(table.device)


def _overrides(model_config: Any, longest: int) -> str:
    """Return the value of ``--hf-overrides`` that lengthens the table."""
    own: dict[str, Any] = {"max_position_embeddings": longest}
    whole = optional(model_config, "hf_config")
    text = optional(model_config, "hf_text_config", whole)
    return json.dumps(own if text is whole else {"text_config": own})


class Backend(AttentionOf[Any], Protocol):
    """The operations that differ between attention backends; ``layer`` is vLLM's ``Attention``."""

    def serves(self, impl: Any) -> bool:
        """Return whether an ``AttentionImpl`` is of this kind, in this release."""
        ...


class PartsBackend(Backend, PartsOf[Any], Protocol):
    """A backend whose caches hold the keys and values of each KV head; `require_parts` is about the backend alone."""

    def write(self, layer: Any, /, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens to a layer's cache.

        Args:
            layer: The layer.
            kv_cache: Its cache.
            keys: ``[n, num_kv_heads, head_size]``, rotated.
            values: Like ``keys``.
            slots: ``[n]``, int64: their slots in the cache.
        """
        ...

    def require_write(self, layer: Any, /) -> None:
        """Check that tokens can be written to a layer's cache.

        Raises:
            SparseMethodError: If its backend can write them only within its attention.
        """
        ...


def step_batch(runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
    """Return the requests of a step, in the order of the rows of its metadata.

    Args:
        runner: vLLM's model runner, V1 or V2.
        scheduler_output: vLLM's ``SchedulerOutput`` of the step.
        input_batch: The runner's persistent batch (V1), or the step's batch (V2).
    """
    request_ids = list(input_batch.req_ids)
    rows = batch_rows(input_batch)
    if rows is None:
        computed = input_batch.num_computed_tokens_cpu[: len(request_ids)]
        prompt = input_batch.num_prompt_tokens[: len(request_ids)]
    else:
        known = computed_tokens(scheduler_output)
        computed = [known[i] for i in request_ids]
        prompt = prompt_lengths(runner)[np.asarray(rows[: len(request_ids)])]
    admitted = {request_id for request_id, _, _ in admitted_requests(scheduler_output)}
    return StepBatch(
        request_ids,
        np.array([scheduler_output.num_scheduled_tokens[i] for i in request_ids], np.int64),
        np.array(computed, np.int64),
        np.array(prompt, np.int64),
        np.array([i in admitted for i in request_ids], np.bool_),
        {
            data.req_id: asked
            for data in scheduler_output.scheduled_new_reqs
            if (asked := asked_of(data.sampling_params)) is not None
        },
    )


def _of_backend(
    method: Callable[Concatenate[Any, Any, P], Result],
) -> Callable[Concatenate[AttentionLayers, str, P], Result]:
    """Return a method that asks a layer's backend, with the layer's name in the place of the layer.

    It refuses a layer that is not supported, or whose backend does not have the method: latent attention has no parts.
    """

    def ask(layers: AttentionLayers, layer_name: str, /, *given: P.args, **named: P.kwargs) -> Result:
        layer, backend = layers._layer(layer_name)  # noqa: SLF001 - a method of it
        of_backend = getattr(backend, method.__name__, None)
        if of_backend is None:
            raise requirements.latent_attention(f"layer {layer_name}")
        result: Result = of_backend(layer, *given, **named)
        return result

    return ask


class AttentionLayers:
    """Implements `AttentionView`; layers are looked up lazily, because the model is loaded later.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        runner: vLLM's model runner, if the model is needed.
    """

    def __init__(self, vllm_config: Any, runner: Any = None) -> None:
        self._config = vllm_config
        self._runner: Callable[[], Any] = (lambda: None) if runner is None else ref(runner)
        self._backends: tuple[Backend, ...] = (
            CpuBackend(vllm_config),
            PagedBackend(),
            AscendBackend(),
            LatentBackend(),
        )
        self._latent = False  #: whether the method serves latent attention
        self._found: dict[str, tuple[Any, Backend]] = {}
        self._rotaries = Rotaries(self._runner, vllm_config)

    batch = staticmethod(step_batch)

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

    def require_engine(self, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
        """See `AttentionView.require_engine`."""
        self._latent = latent
        lower_graphs(self._config, self._runner())
        requirements.require_engine(self._config, latent=latent, drafts=drafts, hybrid=hybrid)
        if self._config.model_config.use_mla:
            from ucm.integration.vllm.handshake import require_latent_hooks  # noqa: PLC0415 - it imports this module

            require_latent_hooks()

    def has_window(self, layer_name: str) -> bool:
        """See `AttentionView.has_window`."""
        layer = self._config.compilation_config.static_forward_context[layer_name]
        return optional(layer, "sliding_window") is not None

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        """See `AttentionView.require`."""
        layer, _ = self._layer(layer_name)
        if reads_keys:
            requirements.require_plain_keys(layer_name, layer)

    def bound_cache(self, layer_name: str) -> Tensor | None:
        """See `AttentionView.bound_cache`."""
        bound: Tensor | None = bound_kv_cache(self._layer(layer_name)[0])
        return bound

    block_size = _of_backend(Backend.block_size)
    num_blocks = _of_backend(Backend.num_blocks)
    restricted = _of_backend(Backend.restricted)
    read_keys = _of_backend(Backend.read_keys)
    head_layout = _of_backend(PartsBackend.head_layout)
    read = _of_backend(PartsBackend.read)
    attend = _of_backend(PartsBackend.attend)
    require_write = _of_backend(PartsBackend.require_write)
    write = _of_backend(PartsBackend.write)
    _require_parts = _of_backend(PartsBackend.require_parts)

    def block_table(self, attn_metadata: Any) -> Tensor:
        """See `AttentionView.block_table`."""
        if latent.is_latent(attn_metadata):
            return latent.block_table(attn_metadata)
        paged.require_restrictable(attn_metadata)
        table: Tensor = getattr(attn_metadata, ascend.TABLE if hasattr(attn_metadata, ascend.TABLE) else paged.TABLE)
        return table

    def scored(self, layer_name: str, query: Tensor, attn_metadata: Any) -> Tensor:
        """See `AttentionView.scored`."""
        layer, backend = self._layer(layer_name)
        return backend.scored(layer, query, attn_metadata) if isinstance(backend, LatentBackend) else query

    def require_parts(self, layer_name: str) -> None:
        """See `PartsOf.require_parts`."""
        self.require(layer_name, reads_keys=True)
        self._require_parts(layer_name)
        requirements.require_plain_scores(layer_name, self._layer(layer_name)[0])

    def rotary(self, layer_name: str) -> Rotary:
        """See `PartsView.rotary`."""
        return self._rotaries.of(layer_name, self._layer(layer_name)[0])

    def block_copies(self, kv_caches: Mapping[str, Tensor]) -> BlockCopies:
        """See `CopyingView.block_copies`."""
        return RawBlocks(kv_caches, int(self._config.cache_config.block_size))

    def _layer(self, layer_name: str) -> tuple[Any, Backend]:
        """Return a supported layer and its backend.

        Raises:
            SparseMethodError: If the layer is not supported.
        """
        found = self._found.get(layer_name)
        if found is None:
            layer = self._config.compilation_config.static_forward_context[layer_name]
            requirements.require_layer(layer_name, layer, latent=self._latent)
            backend = next((backend for backend in self._backends if backend.serves(layer.impl)), None)
            if backend is None:
                raise SparseMethodError(
                    f"the attention backend {type(layer.impl).__name__} has no block table that can be restricted",
                    where=f"layer {layer_name}",
                    fix=latent.OTHER if requirements.is_latent(layer) else choose_backend(),
                )
            found = self._found[layer_name] = layer, backend
        return found


class RawBlocks:
    """Implements `BlockCopies` on a device or on the host.

    Args:
        kv_caches: The caches by layer, all with the same number of blocks, on one device.
        block_size: The tokens of a block.

    Raises:
        UnknownLayoutError: If the blocks of a layer cannot be located.
    """

    def __init__(self, kv_caches: Mapping[str, Tensor], block_size: int) -> None:
        group = CacheGroup(0, block_size, None, {}, tuple(kv_caches))
        self._memory = DeviceMemory(group, kv_caches, None, {})
        self.layer_names = tuple(layout.name for layout in self._memory.layouts)
        sizes = tuple(layout.block_bytes for layout in self._memory.layouts)
        self.geometry = replace(self._memory.geometry, slice_sizes=sizes)

    def host_rows(self, layer: int, blocks: int) -> Tensor:
        """See `BlockCopies.host_rows`."""
        import torch  # noqa: PLC0415 - vLLM brings it

        pinned = self._memory.device.type != "cpu"
        return torch.empty((blocks, self._memory.layouts[layer].block_bytes), dtype=torch.uint8, pin_memory=pinned)

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """See `BlockCopies.read`."""
        rows = self._memory.staging(len(block_ids))
        self._memory.gather(block_ids, range(len(self.layer_names)), rows)
        if self._memory.device.type != "cpu":
            import torch  # noqa: PLC0415 - vLLM brings it

            getattr(torch, self._memory.device.type).current_stream().synchronize()
        return rows

    def write(self, layer: int, block_ids: Sequence[int], rows: Tensor) -> None:
        """See `BlockCopies.write`."""
        staged: list[Any] = [rows] * (layer + 1)
        self._memory.scatter(range(len(block_ids)), block_ids, range(layer, layer + 1), staged)
