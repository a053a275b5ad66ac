"""The KV cache of one worker, and a model that reads and writes it cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tests.ucm.integration.vllm.connector.simulation.truth import (
    CELL,
    POOL,
    RING,
    STATE,
    attend,
    cell,
    digest,
    embed,
    reach,
    state_after,
)
from tests.ucm.integration.vllm.connector.tensors import Tensor
from ucm.integration.vllm.connector.kv_cache import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.ucm.integration.vllm.connector.simulation.truth import Keys, Truth
    from ucm.integration.vllm.connector.kv_cache import CacheGroups
    from ucm.integration.vllm.connector.metadata import BlockMoves


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request to compute in a step."""

    start: int
    tokens: Sequence[int]
    block_ids: list[list[int]]


def forward(
    memories: Sequence[KVMemory], layer: int, chunks: Sequence[Chunk], hidden: list[list[int]], truth: Truth
) -> list[list[int]]:
    """Run one layer of all ranks; all cells are written before any is read, as in attention kernels.

    Args:
        memories: The memories of all ranks.
        layer: The layer's index.
        chunks: The step's tokens.
        hidden: The layer's input for each token of each chunk.
        truth: The expected results, with the layer's window.

    Returns:
        The layer's output.
    """
    if truth.windows[layer] in {STATE, RING}:
        after = []
        for chunk, values in zip(chunks, hidden, strict=True):
            states = [
                memory.recur(layer, chunk, values)
                if truth.windows[layer] == STATE
                else memory.pool(layer, chunk, values)
                for memory in memories
            ]
            after.append(
                [digest(value, *map(attend, of_token)) for value, *of_token in zip(values, *states, strict=True)]
            )
        return after
    for memory in memories:
        for chunk, values in zip(chunks, hidden, strict=True):
            memory.write(layer, chunk, values)
    after = []
    for chunk, values in zip(chunks, hidden, strict=True):
        parts = [head for memory in memories for head in memory.attend(layer, chunk, truth.windows[layer])]
        after.append([digest(value, *of_token) for value, *of_token in zip(values, *parts, strict=True)])
    return after


def embedded(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return the input of the first layer."""
    return [[embed(token, at) for at, token in enumerate(chunk.tokens, chunk.start)] for chunk in chunks]


class KVMemory:
    """One worker's KV cache.

    Args:
        groups: The model's groups. They share memory, with pages of the largest block.
        num_blocks: The number of blocks.
        rank: The worker's rank.
        precisions: See `Setting`.
        heads: The worker's KV heads, each with cells of its own.
        tokens_first: Whether the heads of a token are together, as in FlashAttention's blocks, and not a head's tokens.
    """

    def __init__(
        self,
        groups: CacheGroups,
        num_blocks: int,
        rank: int,
        *,
        precisions: bool = False,
        heads: int = 1,
        tokens_first: bool = False,
    ) -> None:
        #: By vLLM's numbers.
        self.groups = sorted((*groups.groups, *groups.rings), key=lambda group: group.index)
        self.rank = rank
        #: Its places among the heads of all workers.
        self.heads = [0] if precisions else list(range(rank * heads, (rank + 1) * heads))
        self.layers = [name for group in self.groups for name in group.layer_names]
        self.group_of = [group.index for group in self.groups for _ in group.layer_names]
        #: Each layer's cache, as registered.
        self.caches: dict[str, Tensor] = {}
        #: By layer: ``[blocks, heads, tokens]``.
        self._cells: list[NDArray[np.uint64]] = []
        shared: dict[int, NDArray[np.uint8]] = {}
        largest = max(group.block_size for group in self.groups) * heads
        for group in self.groups:
            for place, name in enumerate(group.layer_names):
                other = precisions and group.needs_all and place % 2 == 1
                page = largest + other  # padded
                raw = shared.setdefault(place, np.full(num_blocks * page * CELL.itemsize, 0xEE, np.uint8))
                cells = 1 if group.is_recurrent else group.block_size
                by_head = (1, heads) if tokens_first else (group.block_size, 1)
                self.caches[name] = Tensor(raw, (num_blocks, cells, 1), (page, 1, 1), CELL)
                if group.slices:
                    self.caches[name] = Tensor(raw, (num_blocks, heads, cells, 1), (page, *by_head, 1), CELL)
                if other:
                    shape = (num_blocks, cells, CELL.itemsize)
                    strides = (page * CELL.itemsize, CELL.itemsize, 1)
                    self.caches[name] = Tensor(raw, shape, strides, np.dtype(np.uint8))
                places = [step * CELL.itemsize for step in (page, *by_head)]
                self._cells.append(as_strided(raw.view(CELL), (num_blocks, heads, group.block_size), places))
        self._states: dict[str, int] = {}

    def write(self, layer: int, chunk: Chunk, hidden: Sequence[int]) -> None:
        """Write the cells of a chunk from the layer's input."""
        group = self.groups[self.group_of[layer]]
        for position, value in enumerate(hidden, chunk.start):
            block = chunk.block_ids[group.index][position // group.block_size]
            cells = [cell(value, layer, head) for head in self.heads]
            self._cells[layer][block, :, position % group.block_size] = cells

    def prepare(self, zeroed: Sequence[int]) -> None:
        """Zero blocks in the layers with attention, as vLLM does for models with recurrent layers."""
        for layer, group in enumerate(self.group_of):
            if not self.groups[group].is_recurrent:
                self._cells[layer][list(zeroed)] = 0

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to others, in all layers, as vLLM does for hits that end within a block."""
        for cells in self._cells:
            for source, target in blocks:
                cells[target] = cells[source]

    def move_state(self, request_id: str, chunk: Chunk, *, begins: bool) -> None:
        """Copy the states of a request's last step to the blocks that this step uses, as vLLM does in mode `align`.

        Args:
            request_id: The request.
            chunk: Its tokens in this step.
            begins: Whether the step starts or resumes it.
        """
        for layer, group in enumerate(self.group_of):
            if not self.groups[group].is_recurrent:
                continue
            size, ids = self.groups[group].block_size, chunk.block_ids[group]
            known = None if begins else self._states.get(request_id)
            before = (chunk.start - 1) // size if known is None else known
            now = (chunk.start + len(chunk.tokens) - 1) // size
            if before not in {-1, now}:
                self._cells[layer][ids[now]] = self._cells[layer][ids[before]]
        sizes = [group.block_size for group in self.groups if group.is_recurrent]
        if sizes:
            self._states[request_id] = (chunk.start + len(chunk.tokens) - 1) // sizes[0]

    def recur(self, layer: int, chunk: Chunk, hidden: Sequence[int]) -> list[bytes]:
        """Advance a request's state by a chunk; return the state after each token."""
        group = self.groups[self.group_of[layer]]
        block = chunk.block_ids[group.index][(chunk.start + len(hidden) - 1) // group.block_size]
        state, after = int(self._cells[layer][block, 0, 0]) if chunk.start else 0, []
        for value in hidden:
            state = state_after(state, value, layer, self.rank)
            after.append(CELL.type(state).tobytes())
        self._cells[layer][block, 0, 0] = state
        return after

    def pool(self, layer: int, chunk: Chunk, hidden: Sequence[int]) -> list[bytes]:
        """Write the cells of a chunk into a request's ring; return what each token attends to, its own cell last."""
        group = self.groups[self.group_of[layer]]
        ring = self._cells[layer][chunk.block_ids[group.index][0], 0]
        context = [ring[at % group.block_size] for at in range(reach(chunk.start, RING), chunk.start)]
        found = []
        for position, value in enumerate(hidden, chunk.start):
            own = CELL.type(cell(value, layer, self.heads[0]))
            context = [*(context if position % POOL else []), own]
            ring[position % group.block_size] = own
            found.append(np.array(context, CELL).tobytes())
        return found

    def attend(self, layer: int, chunk: Chunk, window: int | None) -> list[list[int]]:
        """Return for each head the attention output of each token of a chunk, from the cells in memory."""
        begin = reach(chunk.start, window)
        context = self._at(layer, range(begin, chunk.start + len(chunk.tokens)), chunk.block_ids)
        ends = range(chunk.start + 1, chunk.start + len(chunk.tokens) + 1)
        return [
            [attend(of_head[reach(end - 1, window) - begin : end - begin].tobytes()) for end in ends]
            for of_head in context
        ]

    def check(self, moves: BlockMoves, failed: set[int], truth: Truth, keys: Keys) -> None:
        """Check that the loaded KV equals the computed one."""
        group = self.groups[moves.group]
        for key, blocks in moves.chunks():
            right = truth.cells(keys.tokens[key])[self.heads, :, -group.chunk_tokens :]
            for place, block in enumerate(blocks):
                if block in failed or block == NO_BLOCK:
                    continue
                cells = right[..., place * group.block_size : (place + 1) * group.block_size]
                for layer, of in enumerate(self.group_of):
                    if of == group.index:
                        assert (self._cells[layer][block] == cells[:, layer]).all(), "a wrong block was loaded"

    def _at(self, layer: int, positions: range, block_ids: list[list[int]]) -> NDArray[np.uint64]:
        group = self.groups[self.group_of[layer]]
        where = np.arange(positions.start, positions.stop)
        table = np.array(block_ids[group.index])
        return self._cells[layer][table[where // group.block_size], :, where % group.block_size].T
