"""A worker without a model: each cell of its KV cache identifies its token; the method in it is the real one."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.ucm.stepping.rows import Rows
from ucm.sparse.attention import StepBatch, asked_of
from ucm.sparse.base import Role
from ucm.sparse.sink_window import SinkWindow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.sparse.attention import QuerySplit

VOCABULARY = 5
LAYERS = ("layer.0", "layer.1")


def following(mark: int) -> int:
    """Return the token that follows a token with this mark; there are few, so that requests share generated tokens."""
    return 1 + mark % VOCABULARY


def marks(tokens: Sequence[int]) -> list[int]:
    """Return for each token a number that identifies it and all tokens before it."""
    found, mark = [], 1
    for token in tokens:
        mark = (mark * 1_000_003 + token * 8_191 + 12_345) % (1 << 61)
        found.append(mark)
    return found


class SmallTiles(SinkWindow):
    """`SinkWindow` with tiles in proportion to the blocks and contexts of these tests."""

    tile = 6


class Device:
    """One worker, which runs steps in the order in which they were scheduled.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        options: The method's options.
        num_blocks: The blocks of the KV cache.
        block_size: The tokens per block.
    """

    def __init__(self, vllm_config: Any, options: Mapping[str, Any], num_blocks: int, block_size: int) -> None:
        self.method = SmallTiles(vllm_config, Role.WORKER, options)
        self.method.attention = self
        #: The tokens that must be read.
        self.wanted = self.method.window
        self.cells = np.zeros((num_blocks, block_size), np.int64)
        self.rows = Rows()
        #: Requests that must read everything.
        self.dense: set[str] = set()
        self.size = block_size
        self.skipped_blocks = 0

    # `AttentionView`

    def batch(self, runner: Any, scheduler_output: Any, input_batch: StepBatch) -> StepBatch:
        del runner, scheduler_output
        return input_batch

    @property
    def ranks(self) -> int:
        raise NotImplementedError

    def sum_over_ranks(self, counts: Any) -> Any:
        raise NotImplementedError

    def require_engine(self, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
        raise NotImplementedError

    def has_window(self, layer_name: str) -> bool:
        del layer_name
        return False

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        raise NotImplementedError

    def bound_cache(self, layer_name: str) -> Any:
        raise NotImplementedError

    def block_size(self, layer_name: str, kv_cache: Any) -> int:
        del layer_name, kv_cache
        return self.size

    def num_blocks(self, layer_name: str, kv_cache: Any) -> int:
        raise NotImplementedError

    def block_table(self, attn_metadata: Any) -> Any:
        return attn_metadata.block_table

    def scored(self, layer_name: str, query: Any, attn_metadata: Any) -> Any:
        raise NotImplementedError

    def restricted(
        self,
        layer_name: str,
        attn_metadata: Any,
        block_table: Any,
        seq_lens: Any,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Any:
        del layer_name
        assert max_seq_len == int(seq_lens.max())
        starts = attn_metadata.starts if split is None else split.starts.tolist()
        return SimpleNamespace(block_table=block_table, seq_lens=seq_lens, starts=starts)

    def read_keys(self, layer_name: str, kv_cache: Any, block_ids: Any) -> Any:
        raise NotImplementedError

    # Steps

    def scribble(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks outside the device's stream, like a connector that loads into new blocks."""
        self.cells[list(block_ids)] = -1

    def run(self, output: Any, resumed: Mapping[str, list[int]], alive: set[str]) -> dict[str, list[int]]:
        """Write the KV of a step's tokens, then read each request's row as restricted by the method."""
        starts = self.rows.update(output, resumed)
        self.method.requests_finished(None, output.finished_req_ids)
        asked = {
            data.req_id: of for data in output.scheduled_new_reqs if (of := asked_of(data.sampling_params)) is not None
        }
        self.dense.update(request_id for request_id, of in asked.items() if of is False)
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return {}
        counts = [output.num_scheduled_tokens[i] for i in ids]
        for request_id, count in zip(ids, counts, strict=True):
            known = marks(self.rows.tokens[request_id])
            for place in range(starts[request_id], starts[request_id] + count):
                block = self.rows.blocks[request_id][place // self.size]
                assert block, "a step writes into the null block"
                self.cells[block, place % self.size] = known[place]
        self._read(ids, starts, counts, alive, asked)
        sampled = {}
        for request_id, count in zip(ids, counts, strict=True):
            tokens = self.rows.tokens[request_id]
            if starts[request_id] + count == len(tokens):
                tokens.append(following(marks(tokens)[-1]))
                sampled[request_id] = [tokens[-1]]
        return sampled

    def _read(
        self, ids: list[str], starts: dict[str, int], counts: list[int], alive: set[str], asked: dict[str, object]
    ) -> None:
        computed = np.array([starts[i] for i in ids], np.int64)
        new = np.array(counts, np.int64)
        prompts = np.array([self.rows.prompts[i] for i in ids], np.int64)
        whole = SimpleNamespace(
            block_table=self.rows.table(ids),
            seq_lens=torch.from_numpy(computed + new).int(),
            starts=[0, *new.cumsum().tolist()],
        )
        batch = StepBatch(ids, new, computed, prompts, np.zeros(len(ids), np.bool_), asked)
        self.method.execute_begin(None, None, batch)
        *_, used = self.method.attention_begin(LAYERS[0], None, None, None, None, whole)
        *_, again = self.method.attention_begin(LAYERS[1], None, None, None, None, whole)
        assert again is used, "a metadata object is replaced once per step"
        self.method.execute_finished(None, None, None)
        owners = [
            (request_id, starts[request_id] + place)
            for request_id, n in zip(ids, counts, strict=True)
            for place in range(n)
        ]
        assert used.starts[-1] == len(owners)
        for row, (first, end) in enumerate(pairwise(used.starts)):
            (request_id,) = {request_id for request_id, _ in owners[first:end]}
            if request_id in alive:
                length = int(used.seq_lens[row])
                queries = [position for _, position in owners[first:end]]
                self._check(request_id, queries, used.block_table[row].tolist(), length)
                self.skipped_blocks += (queries[-1] + 1 - length) // self.size

    def _check(self, request_id: str, queries: list[int], blocks: list[int], length: int) -> None:
        """Check that each query reads only its request's tokens: sinks, window, and those up to its position."""
        window = self.wanted
        known = marks(self.rows.tokens[request_id])
        read = [int(self.cells[blocks[place // self.size], place % self.size]) for place in range(length)]
        places = {mark: place for place, mark in enumerate(known)}
        positions = [places.get(mark) for mark in read]
        assert None not in positions, f"request {request_id} reads what is not its own"
        at = [place for place in positions if place is not None]
        assert at == sorted(set(at)), "positions are read once, and in order"
        assert at[-len(queries) :] == queries, "the piece's own tokens are read last"
        for query in queries:
            dense = request_id in self.dense or (window.dense_prefill and query < self.rows.prompts[request_id])
            first = 0 if dense else query // window.tile * window.tile - window.window_tokens
            sinks = -(-window.sink_tokens // self.size) * self.size
            wanted = {place for place in range(query + 1) if place < sinks or place >= first // self.size * self.size}
            read_by = {place for place in at if place <= query}
            assert wanted == read_by, f"request {request_id} reads something else than its sinks and its window"
