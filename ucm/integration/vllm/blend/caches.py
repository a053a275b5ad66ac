"""The KV caches of a worker's layers, read and written token by token in the layout of any backend."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.blend import FORMAT, PIECE
from ucm.compat import optional, rotary_table, rotates_in_float
from ucm.errors import SparseMethodError
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.rotary import Rotation
from ucm.sparse.attention import QuerySplit
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from ucm.blend import Run

#: vLLM Ascend's module for the context of a forward pass, loaded where its attention is.
ASCEND = "vllm_ascend.ascend_forward_context"
OTHER = "use UCMConnector, which loads exact prefixes, for this model"


@dataclass(frozen=True, eq=False)
class Rows:
    """Runs of one request as the rows of a forward pass.

    Attributes:
        positions: ``[tokens]``, int64.
        slots: ``[tokens]``, int64: the slots to which their KV is written.
        table: ``[rows, blocks]``, int32: the request's blocks, for each row.
        seq_lens: ``[rows]``, int32: the number of tokens that each row reads.
        starts: ``[rows + 1]``, int32: the index of each row's first token.
        longest: The largest number of tokens of a row.
        reach: The largest of ``seq_lens``.
    """

    positions: Tensor
    slots: Tensor
    table: Tensor
    seq_lens: Tensor
    starts: Tensor
    longest: int
    reach: int


class LayerCaches:
    """All layers of a worker that have a KV cache.

    Raises:
        UnsupportedModelError: If the keys of a layer cannot be rotated, or its backend writes KV only within its
            attention.
    """

    def __init__(self, vllm_config: Any, kv_caches: Mapping[str, Any], model: Any) -> None:
        self._config = vllm_config
        self._view = AttentionLayers(vllm_config)
        self.names = sorted(kv_caches, key=_place)
        self._caches = {name: kv_caches[name] for name in self.names}
        self._layers = {name: vllm_config.compilation_config.static_forward_context[name] for name in self.names}
        first = self._layers[self.names[0]]
        self.heads, self.head_size = int(first.num_kv_heads), int(first.head_size)
        # Of a pair, the tensor of keys; values are alike.
        kinds = {name: kv_caches[name][0] for name in self.names}
        self.dtype, self.device = kinds[self.names[0]].dtype, kinds[self.names[0]].device
        owners = {id(child): module for module in model.modules() for child in module.children()}
        self._rotations: dict[str, Rotation] = {}
        for name in self.names:
            layer = self._layers[name]
            try:
                self._view.require(name, reads_keys=True)
            except SparseMethodError as error:
                raise UnsupportedModelError(error.what, where=error.where, fix=OTHER) from error
            try:
                self._view.require_write(name)
            except SparseMethodError as error:
                raise UnsupportedModelError(error.what, where=error.where, fix=error.fix) from error
            if (layer.num_kv_heads, layer.head_size, kinds[name].dtype) != (self.heads, self.head_size, self.dtype):
                raise UnsupportedModelError(
                    "blending does not serve layers of several shapes", where=f"layer {name}", fix=OTHER
                )
            self._rotations[name] = self._rotation(name, owners.get(id(layer)))
        self._kernel_block = self._view.block_size(self.names[0], self._caches[self.names[0]])
        self._manager_block = int(vllm_config.cache_config.block_size)

    @property
    def piece_shape(self) -> tuple[int, int, int, int]:
        """The shape of a piece in one layer: ``(2, PIECE, heads, head_size)``, keys then values."""
        return (2, PIECE, self.heads, self.head_size)

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of a piece, of all layers."""
        two, tokens, heads, size = self.piece_shape
        about = f"{FORMAT} {self.piece_shape} {self.dtype} {self.names}"
        digest = hashlib.blake2b(about.encode(), digest_size=16).digest()
        nbytes = two * tokens * heads * size * self.dtype.itemsize * len(self.names)
        return BlockGeometry((nbytes,), digest, self.dtype.itemsize)

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Return the sum over all ranks; see `AttentionView.sum_over_ranks`."""
        return self._view.sum_over_ranks(counts)

    def blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Return the ids of a request's blocks in the caches, ``[n]``, int64; a kernel may use smaller blocks."""
        import torch  # noqa: PLC0415 - vLLM brings it

        split = self._manager_block // self._kernel_block
        whole = torch.tensor(list(block_ids), dtype=torch.int64)
        return (whole[:, None] * split + torch.arange(split)).flatten().to(self.device)

    def slots(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of some positions, ``[n]``, int64."""
        return blocks[positions // self._kernel_block] * self._kernel_block + positions % self._kernel_block

    def write(self, layer: int, positions: Tensor, slots: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """Write position-free KV to some positions.

        Args:
            layer: The layer's index in `names`.
            positions: ``[n]``, int64.
            slots: ``[n]``, int64: their slots; see `slots`.
            free: ``[2, n, heads, head_size]``, on the caches' device: keys and values.

        Returns:
            The keys and values as written.
        """
        name = self.names[layer]
        keys, values = self._rotations[name].done(free[0], positions), free[1].contiguous()
        self._view.write(name, self._caches[name], keys, values, slots)
        return keys, values

    def read(self, layer: int, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values at some positions, each ``[n, heads, head_size]``."""
        name = self.names[layer]
        places = positions // self._kernel_block
        wanted, inverse = places.unique(return_inverse=True)
        found = self._view.read(name, self._caches[name], blocks[wanted])
        keys, values = (of[inverse, positions % self._kernel_block] for of in found)
        return keys, values

    def read_free(self, layer: int, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `read`, with the rotation of the keys undone."""
        keys, values = self.read(layer, blocks, positions)
        return self._rotations[self.names[layer]].taken_back(keys, positions), values

    def rows(self, runs: Sequence[Run], blocks: Tensor) -> Rows:
        """Return the runs of a request as rows, each of which reads up to its own last token."""
        import torch  # noqa: PLC0415 - vLLM brings it

        positions = torch.cat([torch.arange(run.start, run.end) for run in runs]).to(self.device)
        lens = torch.tensor([run.end for run in runs], dtype=torch.int32)
        lengths = torch.tensor([0, *(run.tokens for run in runs)], dtype=torch.int64)
        reach = max(run.end for run in runs)
        needed = blocks[: -(-reach // self._kernel_block)].to(torch.int32)
        return Rows(
            positions,
            self.slots(blocks, positions),
            needed.expand(len(runs), -1).contiguous(),
            lens.to(self.device),
            lengths.cumsum(0).to(torch.int32).to(self.device),
            max(run.tokens for run in runs),
            reach,
        )

    @contextmanager
    def context(self, rows: Rows, attn_metadata: Mapping[str, Any], *, by_modules: bool = False) -> Iterator[None]:
        """Set the forward context of a pass over some rows.

        Args:
            rows: The rows.
            attn_metadata: The step's metadata, by layer; fields that do not depend on rows are taken from it.
            by_modules: Whether the pass calls the model's layers as modules even if the model is compiled; some
                releases cannot.
        """
        from vllm.forward_context import set_forward_context  # noqa: PLC0415 - ucm imports without vLLM

        split = QuerySplit(rows.starts, rows.longest)
        made: dict[int, Any] = {}
        by_layer = {}
        for name in self.names:
            given = attn_metadata[name]
            if id(given) not in made:
                cut = self._view.restricted(name, given, rows.table, rows.seq_lens, rows.reach, split)
                tokens = len(rows.positions)
                slots = rows.slots.to(given.slot_mapping.dtype)
                made[id(given)] = dataclasses.replace(cut, slot_mapping=slots, num_actual_tokens=tokens)
            by_layer[name] = made[id(given)]
        more: dict[str, Any] = {"slot_mapping": dict.fromkeys(self.names, rows.slots), "skip_compiled": by_modules}
        # vLLM Ascend's operators read more of a context than vLLM puts in it.
        begin = optional(sys.modules.get(ASCEND), "set_ascend_forward_context", set_forward_context)
        known = inspect.signature(begin).parameters
        more = {name: value for name, value in more.items() if name in known}
        with begin(by_layer, self._config, num_tokens=len(rows.positions), **more):
            yield

    @contextmanager
    def attention(self, blocks: Tensor, reach: int, asking: int) -> Iterator[Tensor]:
        """Sum the attention of tokens to the cached ones before them, during a forward pass over one row.

        Args:
            blocks: The row's blocks; see `blocks`.
            reach: The number of tokens before the row.
            asking: The index of the row's first token that counts.

        Yields:
            ``[reach]``, float32: the attention to each token, as a mean over tokens, layers and this rank's heads. It
            is complete after the pass, and NaN if the model did not call its layers as modules.
        """
        import torch  # noqa: PLC0415 - vLLM brings it

        positions = torch.arange(reach, device=self.device)
        found = torch.full((reach,), torch.nan, device=self.device)

        def called(layer: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            arguments = dict(zip(("query", "key", "value"), given, strict=False)) | named
            query = arguments["query"].view(len(arguments["query"]), -1, self.head_size)
            own = arguments["key"].view(-1, self.heads, self.head_size)
            keys = torch.cat([self.read(layer, blocks, positions)[0], own.to(self.dtype)])
            scale = optional(self._layers[self.names[layer]], "impl.scale", self.head_size**-0.5)
            found.nan_to_num_(nan=0.0).add_(attention_paid(query, keys, asking, scale)[:reach] / len(self.names))

        hooks = [
            self._layers[name].register_forward_pre_hook(
                lambda _, given, named, layer=layer: called(layer, given, named), with_kwargs=True
            )
            for layer, name in enumerate(self.names)
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _rotation(self, name: str, owner: Any) -> Rotation:
        module = optional(owner, "rotary_emb")
        table = rotary_table(module)
        if module is None or table is None or table.dim() != 2:  # noqa: PLR2004 - positions, numbers
            raise UnsupportedModelError(
                "the layer has no rotary embedding with one table for all positions",
                where=f"layer {name}",
                fix=OTHER,
            )
        if table.shape[0] < self._config.model_config.max_model_len:
            raise UnsupportedModelError(
                f"the rotary embedding's table has {table.shape[0]} positions",
                where=f"layer {name}, max_model_len {self._config.model_config.max_model_len}",
                fix="start vLLM with a smaller --max-model-len",
            )
        if not rotates_in_float(module):  # vLLM multiplies in the model's dtype
            table = table.to(self._config.model_config.dtype)
        return Rotation(table.to(self.device), bool(module.is_neox_style))


def attention_paid(query: Tensor, keys: Tensor, asking: int, scale: float) -> Tensor:
    """Return how much attention a row's tokens pay to each token, as a mean over tokens and heads.

    Args:
        query: ``[n, query heads, head_size]``, of the row.
        keys: ``[before + n, heads, head_size]``: of the tokens before the row, and of the row.
        asking: The index of the row's first token that counts.
        scale: The factor of the scores.

    Returns:
        ``[before + n]``, float32.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    before, heads = len(keys) - len(query), keys.shape[1]
    places = torch.arange(len(keys), device=keys.device)
    later = places > before + torch.arange(asking, len(query), device=keys.device)[:, None]
    paid = torch.zeros(len(keys), device=keys.device)
    # One head of the keys at a time: a long prompt's scores of all heads are large.
    for head, group in enumerate(query[asking:].float().unflatten(1, (heads, -1)).unbind(1)):
        scores = torch.einsum("ngd,td->gnt", group, keys[:, head].float()) * scale
        paid += scores.masked_fill(later, -torch.inf).softmax(-1).mean((0, 1)) / heads
    return paid


def _place(name: str) -> tuple[int, ...]:
    """Return a layer's place in the model: the numbers in its name."""
    return tuple(int(number) for number in re.findall(r"\d+", name))
