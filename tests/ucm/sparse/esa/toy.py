"""A miniature transformer over a paged KV cache, with the real worker side of ESA between its layers.

Everything that a layer reads is compared, key by key, with what was written for that request. The same model without a
cache determines which tokens a dense engine generates.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.e2e.inside.eager_esa import EagerESA
from tests.ucm.stepping.rows import Rows, fresh
from ucm.integration.vllm.sparse.layers import RawBlocks
from ucm.sparse.attention import StepBatch
from ucm.sparse.esa.method import ESA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.sparse.attention import QuerySplit
    from ucm.sparse.base import SparseMethod

#: An argument that no method here uses.
NOTHING: Any = None
VOCABULARY, HIDDEN, KV_HEADS, HEADS, SIZE, LAYERS = 61, 32, 2, 4, 8, 3
LENGTH = 512
#: The tokens of a tile, in proportion to the blocks and contexts of these tests.
TILE = 6


class SmallTiles(ESA):
    """ESA with small tiles."""

    tile = TILE


class EagerSmallTiles(EagerESA):
    """The same, releasing blocks at once."""

    tile = TILE


class Model:
    """The model's weights, the same for all instances."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(1)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=chance, dtype=torch.float64) * scale

        self.tokens, self.positions = drawn(VOCABULARY, HIDDEN), drawn(LENGTH, HIDDEN, scale=0.5)
        inner = HIDDEN**-0.5
        self.query = drawn(LAYERS, HIDDEN, HEADS * SIZE, scale=2 * inner)
        self.key = drawn(LAYERS, HIDDEN, KV_HEADS * SIZE, scale=2 * inner)
        self.value = drawn(LAYERS, HIDDEN, KV_HEADS * SIZE, scale=inner)
        self.out = drawn(LAYERS, HEADS * SIZE, HIDDEN, scale=inner)

    def embed(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """``[n, HIDDEN]``."""
        return self.tokens[list(tokens)] + self.positions[start : start + len(tokens)]

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The query ``[n, HEADS, SIZE]``, and key and value side by side: ``[n, KV_HEADS, 2 * SIZE]``."""
        normed = torch.nn.functional.layer_norm(hidden, (HIDDEN,))
        key = (normed @ self.key[layer]).view(-1, KV_HEADS, SIZE)
        value = (normed @ self.value[layer]).view(-1, KV_HEADS, SIZE)
        return (normed @ self.query[layer]).view(-1, HEADS, SIZE), torch.cat((key, value), -1)

    def attend(self, layer: int, hidden: torch.Tensor, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after a layer whose tokens are the last of those in ``kv``."""
        group = HEADS // KV_HEADS
        keys, values = (half.repeat_interleave(group, 1) for half in kv.to(query.dtype).split(SIZE, -1))
        products = torch.einsum("thd,shd->hts", query, keys) * SIZE**-0.5
        new, every = query.shape[0], kv.shape[0]
        later = torch.arange(every) > torch.arange(every - new, every)[:, None]
        weights = products.masked_fill(later, -torch.inf).softmax(-1)
        return hidden + torch.einsum("hts,shd->thd", weights, values).reshape(new, -1) @ self.out[layer]

    def following(self, hidden: torch.Tensor) -> int:
        """Return the token after the last one."""
        return int((torch.nn.functional.layer_norm(hidden[-1], (HIDDEN,)) @ self.tokens.T).argmax())

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the output of a dense engine."""
        tokens, kvs, start = list(prompt), [torch.zeros(0, KV_HEADS, 2 * SIZE)] * LAYERS, 0
        while len(tokens) < len(prompt) + count:
            hidden = self.embed(tokens[start:], start)
            for layer in range(LAYERS):
                query, kv = self.project(layer, hidden)
                kvs[layer] = torch.cat((kvs[layer], kv.float()))
                hidden = self.attend(layer, hidden, query, kvs[layer])
            start = len(tokens)
            tokens.append(self.following(hidden))
        return tokens[len(prompt) :]


class Device:
    """One worker; it runs steps in the order in which they were scheduled.

    Args:
        method: The worker's instance.
        num_blocks: The blocks of the KV cache.
        block_size: The tokens per block.
        always: The first tokens, and the tokens before the newest, that must always be read.
    """

    def __init__(self, method: SparseMethod, num_blocks: int, block_size: int, always: tuple[int, int]) -> None:
        self.model = Model()
        self.method = method
        self.size = block_size
        self.always = always
        self.caches = {
            f"layer.{layer}": torch.zeros(num_blocks, KV_HEADS, block_size, 2 * SIZE) for layer in range(LAYERS)
        }
        method.attention = self  # type: ignore[assignment] # what it asks of one
        method.worker_started()
        for name in self.caches:
            method.layer_seen(name)
        method.layers_seen()
        self.rows = Rows()
        #: For each request and layer, the KV that was written, or found at its admission.
        self.written: dict[tuple[str, int], torch.Tensor] = {}
        self.read = self.left_out = 0

    # `AttentionView`

    def batch(self, runner: Any, scheduler_output: Any, input_batch: StepBatch) -> StepBatch:
        del runner, scheduler_output
        return input_batch

    ranks = 1

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def require_engine(self, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
        """Accept the engine."""

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        """Accept the layer."""

    def bound_cache(self, layer_name: str) -> torch.Tensor:
        return self.caches[layer_name]

    def block_size(self, layer_name: str, kv_cache: torch.Tensor) -> int:
        del layer_name
        return int(kv_cache.shape[2])

    def num_blocks(self, layer_name: str, kv_cache: torch.Tensor) -> int:
        del layer_name
        return int(kv_cache.shape[0])

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

    def read_keys(self, layer_name: str, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        del layer_name
        return kv_cache[block_ids, :, :, :SIZE].transpose(1, 2)

    def block_copies(self, kv_caches: Mapping[str, torch.Tensor]) -> RawBlocks:
        return RawBlocks(kv_caches, self.size)

    # Steps

    def run(self, output: Any, resumed: Mapping[str, list[int]], alive: set[str]) -> dict[str, list[int]]:
        """Run a step's forward pass, layer by layer; new blocks that are not written yet contain garbage."""
        self.method.update_states(None, output)
        unwritten = fresh(output, self.size)
        for cache in self.caches.values():
            cache[unwritten] = torch.nan
        starts = self.rows.update(output, resumed)
        ids = list(output.num_scheduled_tokens)
        if not ids:
            return {}
        counts = [output.num_scheduled_tokens[i] for i in ids]
        hidden = self._forward(ids, [starts[i] for i in ids], counts, alive)
        sampled = {}
        for request_id, count, last in zip(ids, counts, hidden, strict=True):
            tokens = self.rows.tokens[request_id]
            if starts[request_id] + count == len(tokens):
                tokens.append(self.model.following(last))
                sampled[request_id] = [tokens[-1]]
        return sampled

    def _gather(self, layer: int, blocks: Sequence[int], length: int) -> torch.Tensor:
        """``[length, KV_HEADS, 2 * SIZE]``."""
        found = self.caches[f"layer.{layer}"][list(blocks)].transpose(1, 2).reshape(-1, KV_HEADS, 2 * SIZE)
        return found[:length].clone()

    def _forward(
        self, ids: Sequence[str], starts: Sequence[int], counts: Sequence[int], alive: set[str]
    ) -> list[torch.Tensor]:
        computed, new = np.array(starts, np.int64), np.array(counts, np.int64)
        whole = SimpleNamespace(
            block_table=self.rows.table(ids),
            seq_lens=torch.from_numpy(computed + new).int(),
            starts=[0, *new.cumsum().tolist()],
        )
        owners = [(row, place) for row, count in enumerate(counts) for place in range(count)]
        admitted = np.array([request_id in self.rows.admitted for request_id in ids], np.bool_)
        prompts = np.array([self.rows.prompts[i] for i in ids], np.int64)
        self.method.execute_begin(None, NOTHING, StepBatch(list(ids), new, computed, prompts, admitted))
        every = zip(ids, starts, counts, strict=True)
        hidden = [self.model.embed(self.rows.tokens[i][start : start + count], start) for i, start, count in every]
        for layer in range(LAYERS):
            name = f"layer.{layer}"
            queries, kvs = [], []
            for row, request_id in enumerate(ids):
                query, kv = self.model.project(layer, hidden[row])
                queries.append(query)
                kvs.append(kv)
                self._write(layer, request_id, starts[row], kv.float())
            for request_id, length in self.rows.admitted.items():  # other requests may have written it in this step
                own = self.written[request_id, layer]
                self.written[request_id, layer] = torch.cat(
                    (self._gather(layer, self.rows.blocks[request_id], length), own)
                )
            together = torch.cat(queries).float()
            key, value = torch.cat(kvs).float().split(SIZE, -1)
            *_, used = self.method.attention_begin(name, together, key, value, self.caches[name], whole)
            before, hidden = hidden, [of.clone() for of in hidden]
            for piece, (first, end) in enumerate(pairwise(used.starts)):
                ((row, at),) = {(row, owners[first][1]) for row, _ in owners[first:end]}
                tokens = slice(at, at + end - first)
                kv = self._gather(layer, used.block_table[piece].tolist(), int(used.seq_lens[piece]))
                if ids[row] in alive:
                    self._check(layer, ids[row], starts[row] + at, starts[row] + tokens.stop, kv)
                hidden[row][tokens] = self.model.attend(layer, before[row][tokens], queries[row][tokens], kv)
        self.method.execute_finished(None, NOTHING, None)
        return hidden

    def _write(self, layer: int, request_id: str, start: int, kv: torch.Tensor) -> None:
        places = range(start, start + len(kv))
        blocks = [self.rows.blocks[request_id][place // self.size] for place in places]
        assert all(blocks), "a step writes into the null block"
        self.caches[f"layer.{layer}"][blocks, :, [place % self.size for place in places]] = kv
        known = kv[:0] if request_id in self.rows.admitted else self.written[request_id, layer][:start]
        self.written[request_id, layer] = torch.cat((known, kv))

    def _check(self, layer: int, request_id: str, begin: int, end: int, read: torch.Tensor) -> None:
        """Check that a piece reads its request's tokens, once and in order, including sinks, window and its own."""
        written = self.written[request_id, layer][:end]
        known = {row.numpy().tobytes(): place for place, row in enumerate(written)}
        found = [known.get(row.numpy().tobytes()) for row in read]
        assert None not in found, f"request {request_id} reads what is not its own in layer {layer}"
        places = [place for place in found if place is not None]
        assert places == sorted(set(places)), "tokens are read once, and in order"
        assert places[begin - end :] == list(range(begin, end)), "the piece's own tokens are read last"
        sinks, window = self.always
        wanted = {*range(min(sinks, end)), *range(max(0, begin // TILE * TILE - window), end)}
        assert wanted <= set(places), f"request {request_id} does not read its sinks, or its window"
        self.read += len(read)
        self.left_out += len(written) - len(read)
